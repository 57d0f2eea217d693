"""How far an agent's messages move when its cost function changes: sensitivity, method by method.

The messages of all agents are replayed, noise and all, on the changed problem; message k, k = 1..T,
of the changed agent holds one value for each variable that it sends. What is bounded is how far
that value, before its noise, moves in L1 norm. Where the agent works with its own noisy value, that
value is a message and does not move; where it works with its own true one, the move is passed on
with the weight w that the agent gives itself, the diagonal of the mixing matrix.

    tracking, dpop    x+ = W z - a_k (... + g(z))                            a_{k-1} gap
    pp_doagt          s+ = W s~ + a_k g(x),   x+ = W x~ - (s+ - s)           two variables
    diff_tv_ab        x+ = W x~ - a_k y,      y+ = W y~ + g(x+) - g(x)       two; y does not settle

Each sent value is linear in the differences of the gradients met so far, so that its largest move
is the sum of its coefficients' sizes times the largest difference: no bound for a gradient in every
round is smaller. `printed_sensitivity` has what the paper's Table 3 says instead.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Float

from dpjax import _validate

__all__ = [
    "VARIABLES",
    "diff_tv_ab",
    "moves",
    "numbers_sent",
    "pp_doagt",
    "printed_sensitivity",
    "tracking",
]

VARIABLES: dict[str, int] = {
    "tracking": 1,
    "dpop": 1,
    "pp_doagt": 2,
    "diff_tv_ab": 2,
    "ding2022": 2,
    "xuan2023": 2,
    "wang2024": 2,
}
"""Variables that each method sends: Algorithm 1, DPOP, and rows [24], [21], [20], [23] and [22] of
Tables 2 and 3 of Xie, Liu and Chai."""

_UNIT = float(np.finfo(np.float64).eps)
_TINY = float(np.finfo(np.float64).tiny)
_MINUS = np.array([[-1.0], [1.0]])
"""Factor of a sum that is subtracted: rounding errors of a difference add up like its terms' sizes.

A sum is [2, T]: coefficients of the gradients' moves, and the same sums without any cancelling, of
which rounding errors are a share.
"""
_unwarned = np.errstate(over="ignore", invalid="ignore", under="ignore")
"""Moves beyond float64 are infinite, and need no warning."""


def numbers_sent(method: str, dimension: int) -> int:
    """Return how many numbers an agent sends, and adds noise to, in a round.

    Args:
        method: One of `VARIABLES`.
        dimension: Entries p of a model.

    Returns:
        p, or 2 p for methods that send two variables.

    Raises:
        ValueError: For another method or dimension.

    Reference:
        Xie, Liu and Chai, Table 2, and Remark 3.3 for DPOP.

    Example:
        >>> from dpjax.contrib import moves
        >>> moves.numbers_sent("tracking", 10), moves.numbers_sent("pp_doagt", 10)
        (10, 20)
    """
    variables = VARIABLES[_validate.one_of("method", method, VARIABLES)]
    return variables * _validate.integer("dimension", dimension)


def moves(
    method: str,
    step_sizes: Any,
    gradient_gap: float,
    own_weight: float = 0.0,
    smoothness: float = 0.0,
) -> Float[np.ndarray, "T P"]:
    """Return the largest L1 move of every variable of every message.

    Guarantee: no pair of problems that differ in one agent's cost function moves a message further,
        whatever all agents sent before, as long as that agent's gradients differ by at most
        ``gradient_gap`` plus ``smoothness`` times the L1 distance of the points at which they are
        taken. Gradients clipped to an L1 norm of gap / 2 differ by at most gap at any two points
        and need no smoothness.

    Args:
        method: "tracking" or "dpop" (own values are the noisy ones, gradients too: neither weight
            nor smoothness matters), "pp_doagt" or "diff_tv_ab".
        step_sizes: [T] step taken after message k.
        gradient_gap: L1 bound, above 0.
        own_weight: Weight that the agent gives to its own true value, in [0, 1]; 0 where it uses
            its own noisy one.
        smoothness: Bound on the change of a gradient in L1 norm over the L1 distance of its points;
            0 for clipped gradients.

    Returns:
        [T, P] moves of message 1 to T, one column for each variable, models first; rounded up,
        infinite where they are beyond float64.

    Raises:
        ValueError: For an unknown method, or numbers out of range.

    Reference:
        Xie, Liu and Chai, Definition 3 and (11), one round later: message k carries alpha_{k-1}.

    Example:
        >>> from dpjax.contrib import moves
        >>> moves.moves("tracking", [0.1, 0.05], 1.0, 0.5, 0.0).shape
        (2, 1)
    """
    _validate.one_of("method", method, ("tracking", "dpop", "pp_doagt", "diff_tv_ab"))
    if method == "pp_doagt":
        return pp_doagt(step_sizes, gradient_gap, own_weight, smoothness)
    if method == "diff_tv_ab":
        return diff_tv_ab(step_sizes, gradient_gap, own_weight, smoothness)
    return tracking(step_sizes, gradient_gap)[:, None]


@_unwarned
def tracking(step_sizes: Any, gradient_gap: float) -> Float[np.ndarray, " T"]:
    """Return the moves of Algorithm 1 and of DPOP: 0, then alpha_{k-1} gap.

    Models, tracking variable and the point of the gradient are made of messages alone, so that only
    the gradient of the round before moves. DPOP projects: a projection onto a box moves no further
    in L1 norm either, one onto another convex set may.

    Guarantee: as `moves`.

    Args:
        step_sizes: [T] step taken after message k.
        gradient_gap: L1 bound on the difference of gradients at the same point.

    Returns:
        [T] moves of messages 1 to T.

    Raises:
        ValueError: For steps that are not finite and >= 0, or a gap that is not above 0.

    Example:
        >>> from dpjax.contrib import moves
        >>> [round(float(move), 3) for move in moves.tracking([0.1, 0.05, 0.025], 2.0)]
        [0.0, 0.2, 0.1]
    """
    steps = _steps(step_sizes)
    gap = _validate.positive("gradient_gap", gradient_gap)
    # A move that underflows is still a move, and 0 would say that nothing was sent.
    raised = np.maximum(steps[:-1] * gap * (1 + 4 * _UNIT), _TINY)
    return np.concatenate([[0.0], np.where(steps[:-1] > 0, raised, 0.0)])


@_unwarned
def pp_doagt(
    step_sizes: Any, gradient_gap: float, own_weight: float, smoothness: float = 0.0
) -> Float[np.ndarray, "T 2"]:
    """Return the moves of PP-DOAGT: of models x, of cumulative gradients s.

    s(k) = W s~(k-1) + a_k g(x(k-1)) and x(k) = W x~(k-1) - (s(k) - s(k-1)), s(0) = 0, both sent
    with noise, an agent's own values without: a reconstruction from memory, not checked against the
    paper.

    Guarantee: as `moves`, for the method as written here.

    Args:
        step_sizes: [T] a_k.
        gradient_gap: As in `moves`.
        own_weight: As in `moves`.
        smoothness: As in `moves`.

    Returns:
        [T, 2] moves of x(k-1) and s(k-1), which message k sends.

    Raises:
        ValueError: For numbers out of range.

    Reference:
        Huang, Wu, Shi, Dey and Shi (2024).

    Example:
        >>> from dpjax.contrib import moves
        >>> moves.pp_doagt([0.1, 0.05], 1.0, own_weight=0.5).shape
        (2, 2)
    """
    steps, gap, weight, slope = _arguments(step_sizes, gradient_gap, own_weight, smoothness)
    rounds = len(steps)
    x = np.zeros((2, rounds))
    s = np.zeros((2, rounds))
    gaps = np.zeros(rounds)
    result = np.zeros((rounds, 2))
    for k in range(rounds):
        result[k] = _move(x, gaps), _move(s, gaps)
        gaps[k] = gap + slope * result[k, 0]
        last = s
        s = weight * s
        s[:, k] += steps[k]
        x = weight * x + _MINUS * (s + _MINUS * last)
    return result


@_unwarned
def diff_tv_ab(
    step_sizes: Any, gradient_gap: float, own_weight: float, smoothness: float = 0.0
) -> Float[np.ndarray, "T 2"]:
    """Return the moves of Diff-TV-AB: of models x, of the tracked gradient y.

    x(k) = W x~(k-1) - a_k y(k-1) and y(k) = W y~(k-1) + g(x(k)) - g(x(k-1)), y(0) = g(x(0)), both
    sent with noise: a reconstruction from memory, not checked against the paper. The moves of y do
    not vanish (up to 2 gap, whatever the steps), so that noise which decays buys no finite loss.

    Guarantee: as `moves`, for the method as written here.

    Args:
        step_sizes: [T] a_k.
        gradient_gap: As in `moves`.
        own_weight: As in `moves`.
        smoothness: As in `moves`.

    Returns:
        [T, 2] moves of x(k-1) and y(k-1), which message k sends.

    Raises:
        ValueError: For numbers out of range.

    Reference:
        Yang, He and Yang (2025).

    Example:
        >>> from dpjax.contrib import moves
        >>> moves.diff_tv_ab([0.1, 0.05], 1.0, own_weight=0.5).shape
        (2, 2)
    """
    steps, gap, weight, slope = _arguments(step_sizes, gradient_gap, own_weight, smoothness)
    rounds = len(steps)
    x = np.zeros((2, rounds))
    y = np.zeros((2, rounds))
    gaps = np.zeros(rounds)
    result = np.zeros((rounds, 2))
    for k in range(rounds):
        # The gradient at x(k): the message after the one that moves x tells nothing of it yet.
        result[k, 0] = _move(x, gaps)
        gaps[k] = gap + slope * result[k, 0]
        y = weight * y
        y[:, k] += 1.0
        if k:
            y[:, k - 1] += _MINUS[:, 0]
        result[k, 1] = _move(y, gaps)
        x = weight * x + _MINUS * (steps[k] * y)
    return result


def _move(total: np.ndarray, gaps: np.ndarray) -> float:
    """Return sum |coefficient| gap, rounded up; infinite where one of them was too large."""
    coefficients, sizes = total
    slack = 8 * (len(gaps) + 1) * _UNIT
    value = float((np.abs(coefficients) + slack * sizes) @ gaps)
    if math.isnan(value):
        return math.inf
    return max(value, _TINY) if sizes.any() and gaps.any() else value


def printed_sensitivity(
    method: str,
    gradient_gap: float,
    step_size: float = 1.0,
    *,
    constants: tuple[float, float] = (0.0, 0.0),
    weakening: float = 0.0,
) -> float:
    """Return what Table 3 of the paper prints for one round: a comparison, never a guarantee.

    With delta the gap, a the step and the two constants c, c' > 0 that the table leaves open:

        tracking                delta a                       "no more than"
        pp_doagt                3 (delta + c') a              "not lower than", as what follows
        xuan2023                (2c + 1) (delta + c') a
        wang2024                (2 - b) (delta + c') (a + 1)
        ding2022, diff_tv_ab    (2c + 2) (delta + c')

    DPOP has no row; it moves as Algorithm 1 does.

    Args:
        method: One of `VARIABLES`.
        gradient_gap: delta.
        step_size: a of the round.
        constants: (c, c').
        weakening: b, the decaying factor alpha_2(k) of [22].

    Raises:
        ValueError: For another method or numbers out of range.

    Reference:
        Xie, Liu and Chai, Table 3.

    Example:
        >>> from dpjax.contrib import moves
        >>> moves.printed_sensitivity("tracking", gradient_gap=1.0, step_size=0.1)
        0.1
    """
    _validate.one_of("method", method, VARIABLES)
    gap = _validate.positive("gradient_gap", gradient_gap)
    step = _validate.positive("step_size", step_size)
    weakening = _validate.number("weakening", weakening)
    weight, other = (_validate.number("constants", value) for value in constants)
    if min(weight, other, weakening) < 0:
        raise ValueError(f"constants is {constants}, weakening {weakening:g}; give numbers >= 0")
    if method in ("tracking", "dpop"):
        return gap * step
    if method == "pp_doagt":
        factor = 3 * step
    elif method == "xuan2023":
        factor = (2 * weight + 1) * step
    elif method == "wang2024":
        factor = (2 - weakening) * (step + 1)
    else:
        factor = 2 * weight + 2
    return factor * (gap + other)


def _steps(step_sizes: Any) -> np.ndarray:
    steps = _validate.finite_array("step_sizes", step_sizes, ndim=1)
    if steps.min() < 0:
        raise ValueError(f"step_sizes holds {steps.min():g}; give steps >= 0")
    return steps


def _arguments(
    step_sizes: Any, gradient_gap: float, own_weight: float, smoothness: float
) -> tuple[np.ndarray, float, float, float]:
    gap = _validate.positive("gradient_gap", gradient_gap)
    weight = _validate.number("own_weight", own_weight)
    slope = _validate.number("smoothness", smoothness)
    if not 0 <= weight <= 1:
        raise ValueError(f"own_weight is {weight:g}; give the agent's weight for itself, in [0, 1]")
    if slope < 0:
        raise ValueError(f"smoothness is {slope:g}; give a bound >= 0, 0 for clipped gradients")
    return _steps(step_sizes), gap, weight, slope
