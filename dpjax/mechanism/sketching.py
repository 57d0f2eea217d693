"""What noise in a sketch does: errors of decoded gradients, and weights that noise alone reaches.

    g~ = A (A' g + z),  z ~ N(0, v I_k)        E |g - g~|^2 = |g - A A' g|^2 + v tr(A A')

For k orthonormal columns whose span holds g this is v k, where without a sketch it is v d. What the
noise adds to second moments is `dpjax.transforms.projections.second_moment_noise`. Whether a sketch
that learns can find a direction at all is a matter of d, k, rounds and noise: `findable`. All is
float64.

Reference:
    Nicolas et al., Communication Efficient, Differentially Private Distributed Optimization using
    Correlation-Aware Sketching, Lemma 3.1.
"""

import math

import numpy as np
from jaxtyping import Float

from dpjax import _validate

__all__ = ["findable", "mean_square_error", "noise_floor", "printed_deviation", "rounds_to_find"]

_FORGOTTEN = 1e-17


def mean_square_error(
    variance: float,
    projection: int | Float[np.ndarray, "d k"],
    gradient: Float[np.ndarray, " d"] | None = None,
) -> float:
    """Return E |g - A (A' g + z)|^2 over the noise.

    Args:
        variance: v, of the noise in a coordinate of the sketch; of the average of B clients with
            noise a^2 each it is a^2 / B.
        projection: A; or a number of orthonormal columns that span every gradient: k, and d for
            noise in the full dimension.
        gradient: g, already clipped; None for one that the sketch holds.

    Raises:
        ValueError: For a negative variance, or shapes that do not fit.

    Example:
        >>> from dpjax.mechanism import sketching
        >>> sketching.mean_square_error(0.5, 10), sketching.mean_square_error(0.5, 1000)
        (5.0, 500.0)

    Reference:
        Nicolas et al., Lemma 3.1, for orthonormal P with g = P P' g; P must not depend on the
        gradient that it projects.
    """
    variance = _validate.number("variance", variance)
    if variance < 0:
        raise ValueError(f"variance is {variance!r}; give a number of at least 0")
    if isinstance(projection, int | np.integer):
        if gradient is not None:
            raise ValueError("gradient is given with a number of columns; give the projection too")
        return variance * _validate.integer("projection", projection)
    matrix = _validate.finite_array("projection", projection, ndim=2)
    error = variance * float(np.sum(np.square(matrix)))
    if gradient is None:
        return error
    g = _validate.finite_array("gradient", gradient, ndim=1)
    if len(g) != len(matrix):
        raise ValueError(f"gradient has {len(g)} entries; give one of {len(matrix)}")
    return error + float(np.sum(np.square(g - matrix @ (matrix.T @ g))))


def printed_deviation(epsilon: float, delta: float, clip_norm: float) -> float:
    """Return the noise of Lemma 3.1 as printed, C sqrt(2 ln(1.25 / delta)) / epsilon.

    Guarantee: (epsilon, delta) for one release of one gradient of norm at most C, zero-out, epsilon
    below 1; replacement takes twice the noise. The print says nothing of epsilon, and above 1 the
    classical proof fails and so does the claim: 1e-5 becomes 2.3e-5 at epsilon 10. The exact noise
    is C / mu, mu = `dpjax.accounting.gdp.mu` of (epsilon, delta), for every epsilon, and smaller.

    Args:
        epsilon: Above 0, below 1.
        delta: Above 0, below 1.
        clip_norm: C.

    Raises:
        ValueError: For parameters out of range.

    Example:
        >>> from dpjax.mechanism import sketching
        >>> round(sketching.printed_deviation(0.5, 1e-5, 1.0), 3)
        9.69

    Reference:
        Nicolas et al., Lemma 3.1; Dwork and Roth (2014), Theorem A.1, for epsilon below 1.
    """
    epsilon = _validate.positive("epsilon", epsilon)
    if epsilon >= 1:
        raise ValueError(
            f"epsilon is {epsilon!r}, where the printed noise is not enough; give one below 1, or "
            "take clip_norm / accounting.gdp.mu(epsilon, delta)"
        )
    delta = _validate.probability("delta", delta)
    clip_norm = _validate.positive("clip_norm", clip_norm)
    return clip_norm * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def noise_floor(variance: float, k: int, forgetting: float, rounds: int | None = None) -> float:
    """Return the largest eigenvalue that noise alone gives sum_s f^(t - s) z_s z_s', z ~ N(0, v I).

    The upper edge of its spectrum where k and the rounds within memory are many,

        min over 0 < x < 1 of   v ( sum_s w_s / (1 - w_s x) + k / x ),      w_s = f^(t - s),

    v (sqrt(T) + sqrt(k))^2 without forgetting. For 8 to 64 columns noise passes it in about one
    round of ten, and 1.3 times it hardly ever. It depends on public numbers alone.

    Args:
        variance: v, of the noise in a coordinate of the average.
        k: Columns of the sketch.
        forgetting: f, above 0, at most 1.
        rounds: T; None for more than are remembered, with f below 1.

    Raises:
        ValueError: For parameters out of range, or no forgetting without rounds.

    Example:
        >>> from dpjax.mechanism import sketching
        >>> round(sketching.noise_floor(1.0, 4, 1.0, rounds=100), 6)
        144.0

    Reference:
        Marchenko and Pastur (1967); with weights, the R-transform of a sum of free projections.
    """
    from scipy import optimize

    variance = _validate.positive("variance", variance)
    k = _validate.integer("k", k)
    forgetting = _validate.positive("forgetting", forgetting)
    if forgetting > 1:
        raise ValueError(f"forgetting is {forgetting!r}; give a number above 0, at most 1")
    if rounds is None:
        if forgetting == 1:
            raise ValueError("rounds is None with forgetting 1, where noise adds up; give a number")
        count = math.ceil(math.log(_FORGOTTEN) / math.log(forgetting))
    else:
        count = _validate.integer("rounds", rounds)
    weights = forgetting ** np.arange(count, dtype=np.float64)

    def edge(x: float) -> float:
        return float(np.sum(weights / (1 - weights * x)) + k / x)

    # Convex: largest at both ends.
    found = optimize.minimize_scalar(
        edge, bounds=(0.0, 1.0), method="bounded", options={"xatol": 1e-10}
    )
    return variance * float(found.fun)


def findable(energy: float, variance: float, dimension: int, k: int, rounds: int) -> float:
    """Return the largest share of a direction that T rounds of k noisy numbers can tell of.

        y_t = S_t' g + z_t,  z_t ~ N(0, v I_k),  S_t [d, k] orthonormal, of y_1, .., y_t-1

        max over rules for S_t and estimates of   1 - E |g - g^|^2 / E |g|^2
            = (m / d) / (1 + m d v / (k T |g|^2)),      m = min(d, k T)

    for g ~ N(0, |g|^2 / d I): a direction of which nothing was known. Given what was seen, g is
    Gaussian of precision P = d / |g|^2 I + sum_t S_t S_t' / v, whatever rule chose the frames; the
    sum has trace k T / v and rank at most k T, and tr P^-1 is least where it is spread evenly. So
    no rule for the frame finds more. Frames that tile the space reach it; with random ones, new in
    every round, the mean of S_t y_t has a squared cosine of 1 / (1 + (d - k) / (k T) + d^2 v /
    (k T |g|^2)) with g. The full dimension is k = d: it needs d / k times fewer rounds.

    A frame of k columns made of all this holds at most k / d more, in expectation: k / d is what a
    random one holds. Gradients of several directions, g_t = U a_t, are no easier: with the mean of
    |a_t|^2 as the energy, a share above this is beyond reach even if every a_t is known.

    Args:
        energy: |g|^2, on the scale on which S' g is seen: a sketch that is scaled to the clip norm
            C after projecting is longer than S' g, at most C^2 d / k in a random frame.
        variance: v, of all that hides S' g in a coordinate: the noise of the average, and what
            other clients would have made of it.
        dimension: d.
        k: Columns, at most d.
        rounds: T.

    Raises:
        ValueError: For an energy not above 0, a negative variance, or counts out of range.

    Example:
        >>> from dpjax.mechanism import sketching
        >>> f"{sketching.findable(0.017, 0.0364 / 64, 26_010, 64, 120):.1e}"
        '3.4e-04'

    Reference:
        Derived here: Gaussian posteriors, and the inverse's trace is convex.
    """
    d, k, noise = _seen(energy, variance, dimension, k)
    seen = k * _validate.integer("rounds", rounds)
    directions = min(d, seen)
    return directions / d / (1 + directions * noise / seen)


def rounds_to_find(share: float, energy: float, variance: float, dimension: int, k: int) -> int:
    """Return the least rounds after which `findable` is at least a share: fewer never do.

    Args:
        share: Above 0, below 1.
        energy: As `findable`.
        variance: As `findable`.
        dimension: d.
        k: Columns, at most d.

    Raises:
        ValueError: For parameters out of range.

    Example:
        >>> from dpjax.mechanism import sketching
        >>> [sketching.rounds_to_find(0.5, 0.1, 0.01, 100, k) for k in (100, 10, 1)]
        [10, 100, 1000]

    Reference:
        Derived here, `findable` solved for T.
    """
    share = _validate.probability("share", share)
    d, k, noise = _seen(energy, variance, dimension, k)
    few, many = share * d * (1 + noise), d * noise * share / (1 - share)
    # Up to d numbers each tells of a direction of its own; from there on they add up.
    return max(1, math.ceil((few if few <= d else many) / k))


def _seen(energy: float, variance: float, dimension: int, k: int) -> tuple[int, int, float]:
    """d, k and d v / |g|^2, noise over signal in a direction."""
    energy, variance = _validate.positive("energy", energy), _validate.number("variance", variance)
    if variance < 0:
        raise ValueError(f"variance is {variance!r}; give a number of at least 0")
    d = _validate.integer("dimension", dimension)
    return d, _validate.integer("k", k, most=d), d * variance / energy
