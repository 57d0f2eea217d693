"""What noise in a sketch does: errors of decoded gradients, and whether directions can be found.

    g~ = A (A' g + z),  z ~ N(0, v I_k)        E |g - g~|^2 = |g - A A' g|^2 + v tr(A A')

For k orthonormal columns whose span holds g this is v k, where without a sketch it is v d.

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
        variance: v, of the noise in a coordinate of the sketch.
        projection: A, which must not depend on the gradient; or a number of orthonormal columns
            that span every gradient.
        gradient: g, already clipped; None for one that the sketch holds.
    """
    if isinstance(projection, int):
        return variance * projection
    missed = 0.0
    if gradient is not None:
        missed = float(np.sum(np.square(gradient - projection @ (projection.T @ gradient))))
    return variance * float(np.sum(np.square(projection))) + missed


def printed_deviation(epsilon: float, delta: float, clip_norm: float) -> float:
    """Return the noise of Lemma 3.1 as printed, C sqrt(2 ln(1.25 / delta)) / epsilon.

    For zero-out it is enough below epsilon 1 (Dwork and Roth, Theorem A.1); above it the claim
    fails: 1e-5 becomes 2.3e-5 at epsilon 10. The exact noise is C / mu.

    Example:
        >>> from dpjax.contrib import sketching
        >>> round(sketching.printed_deviation(1.0, 1e-5, clip_norm=1.0), 3)
        4.845
    """
    return clip_norm * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


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

    Example:
        >>> from dpjax.contrib import sketching
        >>> round(sketching.findable(1.0, 0.01, dimension=100, k=10, rounds=20), 3)
        0.667
    """
    directions = min(dimension, k * rounds)
    noise = dimension * variance / energy
    return directions / dimension / (1 + directions * noise / (k * rounds))


def rounds_to_find(share: float, energy: float, variance: float, dimension: int, k: int) -> int:
    """Return the least rounds after which `findable` is at least a share in (0, 1).

    Example:
        >>> from dpjax.contrib import sketching
        >>> sketching.rounds_to_find(0.5, 1.0, 0.01, dimension=100, k=10)
        10
    """
    noise = dimension * variance / energy
    few = share * dimension * (1 + noise)
    many = dimension * noise * share / (1 - share)
    # Up to d numbers each tells of a direction of its own; from there on they add up.
    numbers = few if few <= dimension else many
    return max(1, math.ceil(numbers / k))


def noise_floor(variance: float, k: int, forgetting: float, rounds: int | None = None) -> float:
    """Return the largest eigenvalue that noise alone gives sum_s f^(t - s) z_s z_s', z ~ N(0, v I).

    It is the upper edge of the spectrum where k and the rounds within memory are many,

        min over 0 < x < 1 of   v ( sum_s w_s / (1 - w_s x) + k / x ),      w_s = f^(t - s),

    and v (sqrt(T) + sqrt(k))^2 without forgetting. For 8 to 64 columns noise exceeds it in about
    one round of ten, and 1.3 times it hardly ever. It depends on public numbers alone.

    Args:
        variance: Variance v of the noise in a coordinate of the average.
        k: Columns of the sketch.
        forgetting: f, above 0, at most 1.
        rounds: T; None for more rounds than the memory holds, with f below 1.

    Raises:
        ValueError: For parameters out of range, or no forgetting without rounds.

    Example:
        >>> from dpjax.contrib import sketching
        >>> round(sketching.noise_floor(1.0, 4, 1.0, rounds=100), 6)
        144.0

    Reference:
        Marchenko and Pastur (1967); with weights, the R-transform of a sum of free projections.
    """
    from scipy import optimize

    variance = _validate.positive("variance", variance)
    k = _validate.integer("k", k)
    forgetting = _validate.fraction("forgetting", forgetting)
    if rounds is None:
        if forgetting == 1:
            raise ValueError("rounds is None with forgetting 1, where noise adds up; give a number")
        # Older rounds weigh less than float64 can tell.
        rounds = math.ceil(math.log(_FORGOTTEN) / math.log(forgetting))
    weights = forgetting ** np.arange(_validate.integer("rounds", rounds), dtype=np.float64)

    def edge(x: float) -> float:
        return float(np.sum(weights / (1 - weights * x)) + k / x)

    # Convex: largest at both ends.
    optimum = optimize.minimize_scalar(
        edge, bounds=(0.0, 1.0), method="bounded", options={"xatol": 1e-10}
    )
    return variance * float(optimum.fun)
