"""The paper's bound on the accuracy of private gradient tracking, and its way to choose parameters.

Theorem 5.18 bounds d = lim E|mean x(k) - x*|^2 for mu-strongly convex, L-smooth costs by

    exp(-mu sum alpha) c1 + c2 L^2 / (n mu) sum alpha + 2 p sum nu^2
        + (4 p L + 2 p L^2 / mu) sum alpha nu^2                                            (25)

with c1, c2 above E|mean x(k) - x*|^2 and E|x(k) - 1 mean x(k)|^2 in all rounds. These have no
closed form: `iterate` runs the recursion (22). As a guide to tuning the bound is useless: its
minimum is at no step at all (`remark_520`). Exact errors are in `dpjax.contrib.schedules`.

Reference:
    Xie, Liu and Chai, Theorem 5.18 and Remark 5.20.
"""

import numpy as np
from jaxtyping import Float

from dpjax.mechanism.laplace import first_scale

__all__ = ["conditions", "iterate", "largest_decay", "remark_520", "terms", "transition"]

_THETA = 2.0
"""theta > 1 of the theorem, a constant that it leaves open."""

_Array = np.ndarray


def terms(
    step_sizes: _Array, scales: _Array, n: int, p: int, lip: float, m: float, c1: float, c2: float
) -> Float[_Array, " 4"]:
    """Return the terms of (25), whose sum is the bound: (34), before its last line.

    Example:
        >>> import numpy as np
        >>> from dpjax.contrib import accuracy
        >>> accuracy.terms(np.ones(2), np.ones(2), 4, 1, 1.0, 0.5, 1.0, 1.0).round(3).tolist()
        [0.368, 1.0, 4.0, 16.0]
    """
    total = step_sizes.sum()
    squares = scales**2
    start = np.exp(-m * total) * c1
    disagreement = lip**2 / (n * m) * total * c2
    noise = 2 * p * squares.sum()
    moved = (4 * p * lip + 2 * p * lip**2 / m) * (step_sizes * squares).sum()
    return np.array([start, disagreement, noise, moved])


def iterate(
    step_sizes: _Array,
    scales: _Array,
    mixing: Float[_Array, "n n"],
    start: Float[_Array, " 3"],
    *,
    q1: float,
    beta: float,
    p: int,
    lip: float,
    m: float,
) -> Float[_Array, "T 3"]:
    """Return s(1), .., s(T) of (22), s(k+1) = A_k s(k) + b_k; infinite once it overflows.

    Args:
        step_sizes: [T] alpha_k, geometric with decay q1.
        scales: [T] Laplace scales.
        mixing: [n, n] symmetric W.
        start: s(1): E|mean x(1) - x*|^2, E|x(1) - 1 mean x(1)|^2 and E|x(1) - x(0)|^2.
        q1: Decay of the steps.
        beta: Gain.
        p: Entries of a model.
        lip: L.
        m: mu.

    Example:
        >>> import numpy as np
        >>> from dpjax.contrib import accuracy
        >>> from dpjax.topology import graphs, mixing
        >>> matrix = mixing.metropolis_hastings(graphs.ring(4))
        >>> accuracy.iterate(
        ...     np.full(3, 0.1), np.ones(3), matrix, np.ones(3), q1=0.9, beta=0.5, p=1, lip=1.0,
        ...     m=0.5,
        ... ).shape
        (3, 3)
    """
    n, drift, sigma = _network(mixing, step_sizes, q1, beta)
    path = [np.asarray(start, np.float64)]
    with np.errstate(over="ignore", invalid="ignore"):
        for k in range(len(step_sizes) - 1):
            matrix = transition(step_sizes[k + 1], n, sigma, drift, q1, lip, m)
            alpha = step_sizes[k : k + 2]
            nu = scales[k : k + 2]
            state = matrix @ path[-1]
            state += _pushed(alpha, nu, n, p, sigma, lip, m)
            path.append(np.where(np.isnan(state), np.inf, state))
    return np.stack(path)


def transition(
    step: float, n: int, sigma: float, drift: float, q1: float, lip: float, m: float
) -> Float[_Array, "3 3"]:
    """Return A_k of (23); sigma is max_k |W~(k) - its limit|, drift is |W - I|.

    Example:
        >>> from dpjax.contrib import accuracy
        >>> accuracy.transition(0.1, 4, 0.5, 1.0, q1=0.9, lip=1.0, m=0.1).shape
        (3, 3)
    """
    s = sigma**2
    gap = 1 - sigma**2
    small = (lip * step) ** 2
    matrix = np.zeros((3, 3))
    # The distance of the mean model from the minimiser.
    matrix[0, 0] = 1 - step * m
    matrix[0, 1] = lip**2 * step / (n * m)
    # The agents' disagreement.
    matrix[1, 0] = 4 * n * (2 + s) * small / gap
    matrix[1, 1] = (2 + s) / 3 + 4 * (2 + s) * small / gap
    matrix[1, 2] = (2 + s) * (q1**2 + 2 * small) / gap
    # What a round moves the models by.
    matrix[2, 0] = 4 * n * (3 + s) * small / gap
    matrix[2, 1] = (3 + s) * (drift**2 + 4 * small) / gap
    matrix[2, 2] = (3 + s) / 4 + 3 * (3 + s) * small / gap
    return matrix


def _pushed(
    alpha: _Array, nu: _Array, n: int, p: int, sigma: float, lip: float, m: float
) -> _Array:
    """b_k of (24) from (alpha_k, alpha_{k+1}) and (nu_k, nu_{k+1})."""
    a, b = alpha
    before, current = nu**2
    gap = 1 - sigma**2
    shared = 6 * lip * a + n * p * lip * b + 2 * lip**2 * a * b
    shared += 6 * lip**2 * (7 + 2 * lip * a) * b**2 / gap
    mean = 2 * p * (1 + 2 * lip * b + lip**2 * b / m) * current
    disagreement = 2 * n * p * (9 + 6 * lip * b + 18 * lip**2 * b**2 / gap) * current
    disagreement += 2 * n * p * (15 + 4 * lip * b + shared) * before
    movement = 2 * n * p * (9 + 6 * lip * b + 28 * lip**2 * b**2 / gap) * current
    movement += 4 * n * p * (19 + 5 * lip * b + shared) * before
    return np.array([mean, disagreement, movement])


def conditions(
    step_sizes: _Array,
    mixing: Float[_Array, "n n"],
    *,
    q1: float,
    beta: float,
    lip: float,
    m: float,
) -> dict[str, bool]:
    """Return which conditions of Theorem 5.18 and of its proof hold, by their number in the paper.

    Those on steps are asked of every round: the paper waits until the steps have fallen below them.

    Example:
        >>> import numpy as np
        >>> from dpjax.contrib import accuracy
        >>> from dpjax.topology import graphs, mixing
        >>> matrix = mixing.metropolis_hastings(graphs.ring(4))
        >>> met = accuracy.conditions(np.full(3, 0.1), matrix, q1=0.9, beta=0.5, lip=1.0, m=0.5)
        >>> met["gamma beta <= 1"], met["(37)"]
        (True, False)
    """
    _, drift, sigma = _network(mixing, step_sizes, q1, beta)
    s = sigma**2
    gap = max(1 - sigma**2, 0.0)
    largest = float(step_sizes.max()) ** 2
    widths = (2 + s) * (3 + s)
    c4 = 4 * lip**2 * q1**2 + 2 * lip**2 * drift**2
    c5 = gap**4 / (48 * (_THETA + 1) * widths) - q1**2 * drift**2
    c6 = m**2 * (_THETA - 1) * gap**4
    c6 /= 24 * (_THETA + 1) * (_THETA + 2) * widths * lip**2 * q1**4
    root = np.sqrt(max(c4**2 + 32 * c5 * lip**4, 0.0))
    holds = {}
    holds["gamma beta <= 1"] = step_sizes[0] * beta <= 1
    holds["alpha <= 2 / (mu + L)"] = step_sizes.max() <= 2 / (m + lip)
    holds["(26)"] = largest <= gap**2 / (24 * (3 + s) * lip**2)
    holds["(30)"] = q1**2 < gap**4 / (12 * widths * drift**2)
    holds["(35)"] = largest <= m**2 * gap**2 / (24 * (_THETA + 1) * (2 + s) * lip**4)
    holds["(37)"] = c5 >= 0
    holds["(38)"] = largest <= (root - c4) / (16 * lip**4)
    holds["(40)"] = largest <= (np.sqrt(1 + c6) - 1) * q1**2 / (4 * lip**2)
    return {name: bool(met) for name, met in holds.items()}


def largest_decay(mixing: Float[_Array, "n n"]) -> float:
    """Return the largest q1 that (37) lets through on a network, by bisection: sigma grows with it.

    The paper's own are .92 and .97.

    Example:
        >>> from dpjax.contrib import accuracy
        >>> from dpjax.topology import graphs, mixing
        >>> matrix = mixing.metropolis_hastings(graphs.ring(4))
        >>> round(accuracy.largest_decay(matrix), 4)
        0.0188
    """
    low = 0.0
    high = 1.0
    for _ in range(60):
        middle = (low + high) / 2
        met = conditions(np.zeros(1), mixing, q1=middle, beta=0.0, lip=1.0, m=1.0)["(37)"]
        if met:
            low = middle
        else:
            high = middle
    return low


def remark_520(
    epsilon: float,
    gradient_gap: float,
    n: int,
    p: int,
    lip: float,
    m: float,
    c1: float,
    c2: float,
    seed: int,
) -> tuple[list[float], float]:
    """Minimise (25) over gamma in [0, 1], q1 and q2 in turn, from a random start: (41).

    It ends at gamma = 0, where nothing is learned: with c1 and c2 held fixed, the first term falls
    by mu c1 for a unit of sum alpha and the second rises by L^2 c2 / (n mu).

    Returns:
        (gamma, q1, q2) where it ends, and (25) there.

    Example:
        >>> from dpjax.contrib import accuracy
        >>> point, bound = accuracy.remark_520(1.0, 1.0, 4, 1, 1.0, 0.5, c1=1.0, c2=1.0, seed=0)
        >>> point[0]
        0.0
    """
    from scipy import optimize

    def accuracy(point: list[float]) -> float:
        gamma, q1, q2 = point
        if gamma <= 0:
            return c1
        total = gamma / (1 - q1)
        squares = first_scale(epsilon, gradient_gap, gamma, q1, q2, printed=True) ** 2
        noise = 2 * p * squares / (1 - q2**2)
        noise += (4 * p * lip + 2 * p * lip**2 / m) * gamma * squares / (1 - q1 * q2**2)
        start = np.exp(-m * total) * c1
        disagreement = lip**2 / (n * m) * total * c2
        return float(start + disagreement + noise)

    generator = np.random.default_rng(seed)
    q1, q2 = np.sort(generator.uniform(0.01, 0.99, 2))
    point = [float(generator.uniform()), float(q1), float(q2)]
    for _ in range(20):
        for i in range(3):
            # The ends of q1 and q2 move with each other.
            ends = [(0.0, 1.0), (1e-6, point[2] - 1e-9), (point[1] + 1e-9, 1 - 1e-9)]
            low, high = ends[i]

            def along(entry: float, i: int = i) -> float:
                return accuracy([*point[:i], entry, *point[i + 1 :]])

            inner = optimize.minimize_scalar(along, bounds=(low, high), method="bounded").x
            point[i] = min((float(inner), low, high, point[i]), key=along)
        if point[0] == 0:
            break
    return point, accuracy(point)


def _network(mixing: _Array, alpha: _Array, q1: float, beta: float) -> tuple[int, float, float]:
    """n, |W - I| and sigma = max_k |W~(k) - 11'/n|."""
    modes = np.linalg.eigvalsh(mixing)[:-1]
    pulled = np.append(alpha[1:] * beta, 0.0)[:, None]
    sigma = np.abs(q1 - pulled + (1 - q1 + pulled) * modes).max()
    return len(mixing), float((1 - modes).max()), float(sigma)
