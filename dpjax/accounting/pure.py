"""What messages hidden by Laplace noise cost together: pure epsilon, for any schedule of noise.

Message k = 1..K of an agent is a value plus Laplace noise of scale nu_k in every entry. Replayed on
a neighbouring problem, where this agent has another cost function, the value moves by at most
Delta_k in L1 norm, and the whole sequence is epsilon-DP with

    epsilon = sum_{k=1..K} Delta_k / nu_k

against whoever sees all messages, whatever these decide about later rounds. In gradient tracking
the first message is the public start, and message k carries the step of the round before:
Delta_k = alpha_{k-1} gap for k >= 2. With Gaussian noise of deviations sigma_k and moves in L2 norm
the same sequence is mu-GDP, mu^2 = sum Delta_k^2 / sigma_k^2. How far messages of other methods
move is in ``experiments/_common/moves.py``. Everything here is rounded up.
"""

import math
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from dpjax import _validate
from dpjax._numerics import MARGIN
from dpjax.mechanism import laplace

__all__ = [
    "after",
    "epsilon",
    "epsilon_of_moves",
    "geometric",
    "mu",
    "mu_of_moves",
]

# Of a product of five factors, the share of a run's messages among them, and above the budget of
# a first scale that was rounded up.
_UP = 1 + 2e-14
_TINY = float(np.finfo(np.float64).tiny)

Noise = Literal["laplace", "gaussian"]


def epsilon(step_sizes: Any, scales: Any, gradient_gap: float) -> float:
    """Return the pure loss of K messages of gradient tracking: sum_{k=2..K} gap alpha_{k-1} / nu_k.

    Guarantee: the K messages are epsilon-DP for a change of one agent's cost function, against
    whoever
        sees all of them, if its gradients before and after differ by at most ``gradient_gap`` in L1
        norm at every point; never below the exact sum. What follows message K (the last models) is
        not covered: it shows the step of round K without noise.

    Args:
        step_sizes: [K] alpha_k, the step after message k; the last may be left out, it is not
            shown.
        scales: [K] Laplace scale nu_k of every entry of message k; 0 is no noise.
        gradient_gap: L1 bound.

    Returns:
        Epsilon; infinity where a message that moves has no noise.

    Raises:
        ValueError: For entries that are not finite and >= 0, lengths that do not fit, or a gap that
        is
            not above 0.

    Reference:
        Xie, Liu and Chai, Lemma 4.4; (12) pairs alpha_k with nu_k instead, one round too early.

    Example:
        >>> from dpjax.accounting import pure
        >>> round(pure.epsilon(step_sizes=[0.5, 0.25], scales=[2.0, 1.0, 1.0], gradient_gap=2.0), 6)
        1.5
    """
    return float(after(step_sizes, scales, gradient_gap)[-1])


def mu(step_sizes: Any, deviations: Any, gradient_gap: float) -> float:
    """Return the Gaussian-DP loss of K messages: mu^2 = sum_{k=2..K} (gap alpha_{k-1} / sigma_k)^2.

    Guarantee: as `epsilon`, with Gaussian noise and the gap in L2 norm: mu-GDP, so that
        `dpjax.accounting.gdp.epsilon` states it at a delta.

    Args:
        step_sizes: [K] as in `epsilon`.
        deviations: [K] standard deviation sigma_k of every entry of message k.
        gradient_gap: L2 bound.

    Returns:
        Mu, never below the exact one.

    Raises:
        ValueError: As in `epsilon`.

    Reference:
        Dong, Roth and Su (2022), Theorem 2.7 and Corollary 3.3.

    Example:
        >>> from dpjax.accounting import pure
        >>> round(pure.mu(step_sizes=[3.0, 4.0], deviations=[1.0, 1.0, 1.0], gradient_gap=1.0), 6)
        5.0
    """
    return float(after(step_sizes, deviations, gradient_gap, noise="gaussian")[-1])


def after(
    step_sizes: Any, scales: Any, gradient_gap: float, *, noise: Noise = "laplace"
) -> Float[np.ndarray, " K"]:
    """Return the loss after each message, the number of messages fixed beforehand.

    Args:
        step_sizes: [K] as in `epsilon`.
        scales: [K] Laplace scales, or standard deviations.
        gradient_gap: In L1 norm, or in L2 for Gaussian noise.
        noise: Which noise: "laplace" gives epsilons, "gaussian" mus.

    Returns:
        [K] losses, 0 after the first; each rounded up.

    Raises:
        ValueError: As in `epsilon`.

    Example:
        >>> from dpjax.accounting import pure
        >>> pure.after([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], gradient_gap=1.0).round(6).tolist()
        [0.0, 0.5, 1.0]
    """
    power = _power(noise)
    scales = _nonnegative("scales", scales, 1)
    gap = _validate.positive("gradient_gap", gradient_gap)
    steps = _nonnegative("step_sizes", step_sizes, 1) if np.size(step_sizes) else np.zeros(0)
    if len(steps) not in (len(scales), len(scales) - 1):
        raise ValueError(
            f"step_sizes has {len(steps)} entries for {len(scales)} scales; give one step a "
            "message, or all but the last"
        )
    shown = steps[: len(scales) - 1]
    lost = _quotients(shown[:, None], gap, scales[1:, None])
    return _summed(np.concatenate([np.zeros((1, 1)), lost]), power)


def epsilon_of_moves(moves: Any, scales: Any) -> float:
    """Return the pure loss of messages of one or several variables: the sum of moves over scales.

    Guarantee: epsilon-DP against whoever sees all messages, if message k moves by at most the given
        amounts in L1 norm, the messages before it given (``experiments/_common/moves.py``); never
        below the exact sum.

    Args:
        moves: [K] or [K, P] L1 moves of the P variables of each message.
        scales: [K] or [K, P] Laplace scales, or one that broadcasts.

    Returns:
        Epsilon.

    Raises:
        ValueError: For entries that are not finite and >= 0, or shapes that do not fit.

    Example:
        >>> from dpjax.accounting import pure
        >>> moves = [[0.0, 1.0], [0.5, 2.0]]  # of models and trackers, in two messages
        >>> round(pure.epsilon_of_moves(moves, scales=[[1.0, 4.0], [1.0, 4.0]]), 6)
        1.25
    """
    return float(_summed(_of_moves(moves, scales), 1)[-1])


def mu_of_moves(moves: Any, deviations: Any) -> float:
    """Return the Gaussian-DP loss of messages of one or several variables.

    Guarantee: as `epsilon_of_moves`, for Gaussian noise and moves in L2 norm: mu-GDP.

    Args:
        moves: [K] or [K, P] L2 moves.
        deviations: [K] or [K, P] standard deviations, or one that broadcasts.

    Returns:
        Mu, never below the exact one.

    Raises:
        ValueError: As in `epsilon_of_moves`.

    Example:
        >>> from dpjax.accounting import pure
        >>> round(pure.mu_of_moves([[3.0, 4.0]], deviations=1.0), 6)
        5.0
    """
    return float(_summed(_of_moves(moves, deviations), 2)[-1])


def geometric(
    first_scale: float,
    gradient_gap: float,
    gamma: float,
    q1: float,
    q2: float,
    rounds: int | None = None,
) -> float:
    """Return what messages of a geometric Laplace schedule cost, in closed form.

    epsilon = gap gamma / (nu_1 (q2 - q1)) (1 - (q1/q2)^(K-1)) after K messages, the first factor
    for any number of them: the inverse of `dpjax.mechanism.laplace.first_scale`.

    Guarantee: as `epsilon`, for steps gamma q1^(k-1) and scales nu_1 q2^(k-1).

    Args:
        first_scale: nu_1, above 0.
        gradient_gap: L1 bound.
        gamma: First step.
        q1: Decay of the steps.
        q2: Decay of the noise, between q1 and 1.
        rounds: Messages K; None for any number of them.

    Returns:
        Epsilon, rounded up.

    Raises:
        ValueError: For numbers out of range, or q1 not below q2.

    Example:
        >>> from dpjax.accounting import pure
        >>> round(pure.geometric(0.05, gradient_gap=1.0, gamma=0.001, q1=0.97, q2=0.99), 6)
        1.0
    """
    scale = _validate.positive("first_scale", first_scale)
    gap = _validate.positive("gradient_gap", gradient_gap)
    gamma = _validate.positive("gamma", gamma)
    q1, q2 = laplace.decays(q1, q2)
    share = laplace.horizon_share(rounds, 1, q1, q2)
    return max(laplace.ratio([gap, gamma, share], [scale, q2 - q1]) * _UP, _TINY)


def _power(noise: str) -> int:
    return 1 if _validate.one_of("noise", noise, ("laplace", "gaussian")) == "laplace" else 2


def _nonnegative(name: str, value: Any, most: int) -> np.ndarray:
    array = _validate.finite_array(name, value)
    if most == 1 and not array.ndim:
        raise ValueError(f"{name} is {_validate.shown(value)}; give one number a message")
    if array.ndim > most:
        raise ValueError(f"{name} has shape {array.shape}; give at most {most} dimensions")
    if array.min() < 0:
        raise ValueError(f"{name} holds {array.min():g}; give numbers >= 0")
    return array


def _of_moves(moves: Any, scales: Any) -> np.ndarray:
    """Return [K, P] quotients."""
    moved = _nonnegative("moves", moves, 2)
    scales = _nonnegative("scales", scales, 2)
    rows = moved.reshape(len(moved) if moved.ndim else 1, -1)
    columns = scales[:, None] if scales.ndim == 1 and len(scales) > 1 else scales
    try:
        spread = np.broadcast_to(columns, rows.shape)
    except ValueError:
        raise ValueError(
            f"scales has shape {scales.shape} for moves {moved.shape}; give one a message, one a "
            "message and variable, or one number"
        ) from None
    return _quotients(rows, 1.0, spread)


def _quotients(moved: np.ndarray, gap: float, scales: np.ndarray) -> np.ndarray:
    """Return moved gap / scales within three roundings; nothing under- or overflows on the way."""
    (a, more), (b, power), (c, less) = np.frexp(moved), math.frexp(gap), np.frexp(scales)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        value = np.ldexp(a * b / c, more + power - less)
    return np.where(moved > 0, np.maximum(value, _TINY), 0.0)


def _summed(lost: np.ndarray, power: int) -> np.ndarray:
    """Return (sum of the first k rows' powers)^(1/power), rounded up; errors do not add up."""
    total, rest, sums = 0.0, 0.0, np.zeros(len(lost))
    with np.errstate(over="ignore", under="ignore"):
        rows = np.where(lost > 0, np.maximum(lost**power, _TINY), 0.0)
    for k, row in enumerate(rows):
        one = math.fsum(row) if np.isfinite(row).all() else math.inf
        high = total + one
        if math.isinf(high):
            sums[k:] = math.inf
            break
        # What the addition lost: Knuth's two-sum.
        back = high - total
        rest += (total - (high - back)) + (one - back)
        total = high
        sums[k] = total + rest
    return np.maximum.accumulate((np.sqrt(sums) if power == 2 else sums) * MARGIN)
