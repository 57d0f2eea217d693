"""What noise in a sketch does: errors of decoded gradients, and weights that noise alone reaches.

    g~ = A (A' g + z),  z ~ N(0, v I_k)        E |g - g~|^2 = |g - A A' g|^2 + v tr(A A')

For k orthonormal columns whose span holds g this is v k, where without a sketch it is v d. What the
noise adds to second moments is `dpjax.transforms.projections.second_moment_noise`. All is float64.

Reference:
    Nicolas et al., Communication Efficient, Differentially Private Distributed Optimization using
    Correlation-Aware Sketching, Lemma 3.1.
"""

import math

import numpy as np
from jaxtyping import Float

from dpjax import _validate

__all__ = ["mean_square_error", "noise_floor", "printed_deviation"]

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
