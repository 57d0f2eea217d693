"""The paper's bound on the accuracy of private gradient tracking, for comparison with exact errors.

Theorem 5.18 bounds d = lim E|mean x(k) - x*|^2 for mu-strongly convex, L-smooth costs by

    exp(-mu sum alpha) c1 + c2 L^2 / (n mu) sum alpha + 2 p sum nu^2
        + (4 p L + 2 p L^2 / mu) sum alpha nu^2                                            (25)

with c1, c2 above E|mean x(k) - x*|^2 and E|x(k) - 1 mean x(k)|^2 in all rounds; the print inserts
its own geometric nu. These have no closed form: `iterate` runs the recursion (22). Its conditions
are far from what anybody uses, and are returned, not raised. As a guide to tuning the bound is
useless: its minimum is at no step at all (`dpjax.mechanism.heuristic`). Exact errors
are in `dpjax.mechanism.quadratic`.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dpjax import _validate

__all__ = [
    "Bound",
    "bound",
    "conditions",
    "iterate",
    "largest_decay",
    "value",
]

THETA = 2.0
"""theta > 1 of the theorem, a constant that it leaves open."""


class Bound(NamedTuple):
    """Theorem 5.18 for one run.

    Attributes:
        value: The bound; infinite where the recursion overflows.
        terms: [4] terms of (25).
        constants: c1 and c2, the largest values that the start and (22) take.
        holds: Condition by name, True where met; the bound is one only where all are.
        rounds: Rounds after which (22) overflowed, or all of them.
    """

    value: float
    terms: Float[np.ndarray, " 4"]
    constants: tuple[float, float]
    holds: dict[str, bool]
    rounds: int


def value(
    step_sizes: Any,
    scales: Any,
    *,
    agents: int,
    dimension: int,
    smoothness: float,
    convexity: float,
    constants: tuple[float, float],
) -> Float[np.ndarray, " 4"]:
    """Return the terms of (25) from the actual sums of alpha, nu^2 and alpha nu^2.

    Args:
        step_sizes: [T] alpha_k.
        scales: [T] Laplace scales nu_k.
        agents: Agents n.
        dimension: Entries p.
        smoothness: L, of every cost.
        convexity: mu, of every cost.
        constants: c1 and c2.

    Returns:
        [4] terms; their sum is the bound.

    Raises:
        ValueError: For numbers out of range.

    Reference:
        Xie, Liu and Chai, (34), before its last line.

    Example:
        >>> from dpjax.mechanism import accuracy
        >>> terms = accuracy.value([0.0, 0.0], [0.0, 0.0], agents=2, dimension=1, smoothness=2.0,
        ...                        convexity=1.0, constants=(0.7, 3.0))
        >>> terms.tolist()
        [0.7, 0.0, 0.0, 0.0]
    """
    alpha = _validate.finite_array("step_sizes", step_sizes, ndim=1)
    nu = _validate.finite_array("scales", scales, ndim=1)
    n, p = _validate.integer("agents", agents), _validate.integer("dimension", dimension)
    lip, m = curvatures(smoothness, convexity)
    c1, c2 = constants
    squares = nu**2
    return np.array(
        [
            np.exp(-m * alpha.sum()) * c1,
            lip**2 / (n * m) * alpha.sum() * c2,
            2 * p * squares.sum(),
            (4 * p * lip + 2 * p * lip**2 / m) * (alpha * squares).sum(),
        ]
    )


def bound(
    step_sizes: Any,
    scales: Any,
    mixing: Any,
    *,
    q1: float,
    beta: float,
    dimension: int,
    smoothness: float,
    convexity: float,
    before: Any,
    start: Any,
) -> Bound:
    """Return Theorem 5.18's bound with its constants from (22), and which of its conditions hold.

    Args:
        step_sizes: [T] alpha_k, geometric with decay q1.
        scales: [T] Laplace scales.
        mixing: [n, n] symmetric W.
        q1: Decay of the steps.
        beta: Gain.
        dimension: Entries p.
        smoothness: L.
        convexity: mu.
        before: [2] E|mean x(0) - x*|^2 and E|x(0) - 1 mean x(0)|^2, which c1 and c2 cover too.
        start: [3] s(1): E|mean x(1) - x*|^2, E|x(1) - 1 mean x(1)|^2 and E|x(1) - x(0)|^2.

    Returns:
        The bound, its terms, constants and conditions.

    Raises:
        ValueError: For numbers out of range.

    Reference:
        Xie, Liu and Chai, Theorem 5.18 and its proof.
    """
    alpha = _validate.finite_array("step_sizes", step_sizes, ndim=1)
    rest = _validate.finite_array("before", before)
    if rest.shape != (2,):
        raise ValueError(f"before has shape {rest.shape}; give two numbers, of the start")
    path = iterate(
        alpha,
        scales,
        mixing,
        q1=q1,
        beta=beta,
        dimension=dimension,
        smoothness=smoothness,
        convexity=convexity,
        start=start,
    )
    finite = np.isfinite(path).all(axis=1)
    rounds = int(np.argmin(finite)) if not finite.all() else len(path)
    largest = path.max(axis=0) if finite.all() else np.full(3, np.inf)
    holds = conditions(alpha, mixing, q1=q1, beta=beta, smoothness=smoothness, convexity=convexity)
    holds["(22) stays finite"] = bool(finite.all())
    constants = float(max(largest[0], rest[0])), float(max(largest[1], rest[1]))
    sizes = {"agents": len(np.asarray(mixing)), "dimension": dimension}
    with np.errstate(over="ignore"):
        terms = value(
            alpha, scales, **sizes, smoothness=smoothness, convexity=convexity, constants=constants
        )
    return Bound(float(terms.sum()), terms, constants, holds, rounds)


def iterate(
    step_sizes: Any,
    scales: Any,
    mixing: Any,
    *,
    q1: float,
    beta: float,
    dimension: int,
    smoothness: float,
    convexity: float,
    start: Any,
) -> Float[np.ndarray, "T 3"]:
    """Return s(1), .., s(T) of (22), s(k+1) = A_k s(k) + b_k; infinite once it overflows.

    Args:
        step_sizes: As in `bound`.
        scales: As in `bound`.
        mixing: As in `bound`.
        q1: As in `bound`.
        beta: As in `bound`.
        dimension: As in `bound`.
        smoothness: As in `bound`.
        convexity: As in `bound`.
        start: As in `bound`.

    Raises:
        ValueError: For numbers out of range.

    Reference:
        Xie, Liu and Chai, (22), (23) and (24).
    """
    alpha = _validate.finite_array("step_sizes", step_sizes, ndim=1)
    nu = _validate.finite_array("scales", scales, ndim=1)
    state = _validate.finite_array("start", start, ndim=1)
    if len(alpha) != len(nu) or state.shape != (3,):
        raise ValueError(
            f"scales has {len(nu)} entries for {len(alpha)} steps, start {state.shape}; give one "
            "scale a step and three numbers to start from"
        )
    lip, m = curvatures(smoothness, convexity)
    n, far, sigma = _network(mixing, alpha, q1, beta)
    found = [state]
    with np.errstate(over="ignore", invalid="ignore"):
        for k in range(len(alpha) - 1):
            matrix = transition(alpha[k + 1], n, sigma, far, q1, lip, m)
            pushed = _pushed(alpha[k : k + 2], nu[k : k + 2], n, dimension, sigma, lip, m)
            state = matrix @ state + pushed
            found.append(np.where(np.isnan(state), np.inf, state))
    return np.stack(found)


def transition(
    step: float,
    agents: int,
    sigma: float,
    far: float,
    q1: float,
    smoothness: float,
    convexity: float,
) -> Float[np.ndarray, "3 3"]:
    """Return A_k of (23).

    Args:
        step: alpha_{k+1}.
        agents: n.
        sigma: max_k of the spectral norm of W~(k) less its limit.
        far: Spectral norm of W - I.
        q1: Decay of the steps.
        smoothness: L.
        convexity: mu.
    """
    s, gap, small = sigma**2, 1 - sigma**2, (smoothness * step) ** 2
    return np.array(
        [
            [1 - step * convexity, smoothness**2 * step / (agents * convexity), 0.0],
            [
                4 * agents * (2 + s) * small / gap,
                (2 + s) / 3 + 4 * (2 + s) * small / gap,
                (2 + s) * (q1**2 + 2 * small) / gap,
            ],
            [
                4 * agents * (3 + s) * small / gap,
                (3 + s) * (far**2 + 4 * small) / gap,
                (3 + s) / 4 + 3 * (3 + s) * small / gap,
            ],
        ]
    )


def _pushed(
    alpha: np.ndarray, nu: np.ndarray, n: int, p: int, sigma: float, lip: float, m: float
) -> np.ndarray:
    """Return b_k of (24) from (alpha_k, alpha_{k+1}) and (nu_k, nu_{k+1})."""
    (a, b), (before, now), gap = alpha, nu**2, 1 - sigma**2
    shared = 6 * lip * a + n * p * lip * b + 2 * lip**2 * a * b
    shared += 6 * lip**2 * (7 + 2 * lip * a) * b**2 / gap
    return np.array(
        [
            2 * p * (1 + 2 * lip * b + lip**2 * b / m) * now,
            2 * n * p * (9 + 6 * lip * b + 18 * lip**2 * b**2 / gap) * now
            + 2 * n * p * (15 + 4 * lip * b + shared) * before,
            2 * n * p * (9 + 6 * lip * b + 28 * lip**2 * b**2 / gap) * now
            + 4 * n * p * (19 + 5 * lip * b + shared) * before,
        ]
    )


def conditions(
    step_sizes: Any, mixing: Any, *, q1: float, beta: float, smoothness: float, convexity: float
) -> dict[str, bool]:
    """Return which conditions of Theorem 5.18 and of its proof hold, by their number in the paper.

    Those on steps are asked of every round: the paper waits until the steps have fallen below them.

    Args:
        step_sizes: [T] alpha_k.
        mixing: [n, n] symmetric W.
        q1: Decay of the steps.
        beta: Gain.
        smoothness: L.
        convexity: mu.

    Raises:
        ValueError: For numbers out of range.

    Reference:
        Xie, Liu and Chai, (5), (26), (30), (35), (37), (38), (40) and Lemma 5.15.
    """
    alpha = _validate.finite_array("step_sizes", step_sizes, ndim=1)
    lip, m = curvatures(smoothness, convexity)
    _, far, sigma = _network(mixing, alpha, q1, beta)
    s, gap, largest = sigma**2, max(1 - sigma**2, 0.0), float(alpha.max()) ** 2
    widths = (2 + s) * (3 + s)
    c4 = 4 * lip**2 * q1**2 + 2 * lip**2 * far**2
    c5 = gap**4 / (48 * (THETA + 1) * widths) - q1**2 * far**2
    c6 = m**2 * (THETA - 1) * gap**4
    c6 /= 24 * (THETA + 1) * (THETA + 2) * widths * lip**2 * q1**4
    root = np.sqrt(max(c4**2 + 32 * c5 * lip**4, 0.0))
    holds = {
        "gamma beta <= 1": alpha[0] * beta <= 1,
        "alpha <= 2 / (mu + L)": alpha.max() <= 2 / (m + lip),
        "(26)": largest <= gap**2 / (24 * (3 + s) * lip**2),
        "(30)": q1**2 < gap**4 / (12 * widths * far**2),
        "(35)": largest <= m**2 * gap**2 / (24 * (THETA + 1) * (2 + s) * lip**4),
        "(37)": c5 >= 0,
        "(38)": largest <= (root - c4) / (16 * lip**4),
        "(40)": largest <= (np.sqrt(1 + c6) - 1) * q1**2 / (4 * lip**2),
    }
    return {name: bool(met) for name, met in holds.items()}


def largest_decay(mixing: Any, theta: float = THETA) -> float:
    """Return the largest q1 that (37) lets through on a network.

    q1^2 <= (1 - s^2)^4 / (48 (theta + 1) (2 + s^2) (3 + s^2) |W - I|^2), s = |q1 I + (1 - q1) W -
    11'/n|, which W~(k) comes to and which grows with q1: solved by bisection.

    Args:
        mixing: [n, n] symmetric W.
        theta: Above 1, left open by the theorem; less is milder.

    Returns:
        q1; the paper's own are .92 and .97.

    Raises:
        ValueError: For a W that is not symmetric and stochastic.

    Example:
        >>> from dpjax.mechanism import accuracy
        >>> from dpjax.topology import graphs, mixing
        >>> w = mixing.metropolis_hastings(graphs.erdos_renyi(100, 0.1, seed=0))
        >>> accuracy.largest_decay(w) < 0.005
        True
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        _, far, sigma = _network(mixing, np.zeros(1), middle, 0.0)
        s = sigma**2
        kept = middle**2 * 48 * (theta + 1) * (2 + s) * (3 + s) * far**2 <= max(1 - s, 0.0) ** 4
        low, high = (middle, high) if kept else (low, middle)
    return low


def curvatures(smoothness: float, convexity: float) -> tuple[float, float]:
    """Return L and mu as floats with 0 < mu <= L, else raise ValueError.

    Args:
        smoothness: L.
        convexity: mu.
    """
    lip, m = (
        _validate.positive("smoothness", smoothness),
        _validate.positive("convexity", convexity),
    )
    if m > lip:
        raise ValueError(f"convexity is {m:g}, above smoothness {lip:g}; give the least curvature")
    return lip, m


def _network(mixing: Any, alpha: np.ndarray, q1: float, beta: float) -> tuple[int, float, float]:
    """Return n, |W - I| and sigma = max_k |W~(k) - 11'/n|."""
    w = _validate.stochastic("mixing", mixing, ("row", "column"))
    modes = np.linalg.eigvalsh(w)[:-1]
    pulled = np.append(alpha[1:] * beta, 0.0)[:, None]
    sigma = np.abs(q1 - pulled + (1 - q1 + pulled) * modes).max()
    return len(w), float((1 - modes).max()), float(sigma)
