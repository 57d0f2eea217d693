"""How far one record can move a strategy's output: the sensitivity of C, and whether it is exact.

Guarantee: `sensitivity` is never below the largest ||C (G - G')||_F over two gradient sequences
that differ in the rounds of one pattern, by vectors of norm at most 1 (zero-out at clip 1), its
own rounding included. With noise of standard deviation sigma * sensitivity the release G + C^-1 Z
is 1/sigma-GDP, also when gradients are chosen from what was released. Under replacement a round
moves by 2: double it.
"""

import numpy as np
from jaxtyping import Float

from dpjax import _validate
from dpjax.mechanism.participation import Participation, checked

__all__: list[str] = []

_EPS = float(np.finfo(np.float64).eps)
_TIE = 1e-12


def sensitivity(strategy: Float[np.ndarray, "m t"], participation: Participation) -> float:
    """Return an upper bound on the sensitivity of C (not squared).

    max over patterns pi of sqrt(sum_{s,t in pi} |(C'C)_st|)

    Exact where C'C is non-negative on the patterns. With negative entries the truth is a
    supremum over unit vectors, which this bounds from above and which the supremum over signs
    understates: for C'C = [[1,-.5,-.5],[-.5,1,-.5],[-.5,-.5,1]] the squares are 6 (this), 4.5
    (vectors) and 4 (signs). C = I with k participations gives sqrt(k).

    Args:
        strategy: [m, T] C, any real matrix.
        participation: when a record appears.

    Returns:
        The bound at clip 1, rounded up.

    Raises:
        ValueError: for a strategy of another number of rounds, or NaN in it.

    Reference:
        Choquette-Choo et al. 2023, eq. (5); Pillutla et al., Lemma 3.15.

    Example:
        >>> from dpjax.mechanism import temporal
        >>> from dpjax.mechanism.participation import Participation
        >>> round(float(temporal.sensitivity(temporal.anti_pgd(4), Participation(4, 1, 4))), 6)
        2.0
    """
    scale = _scale(strategy)
    gram, rounding = _gram(np.asarray(strategy, np.float64) / scale, participation)
    largest = _pattern_sums(gram, rounding, participation)[0].max()
    # Sums, products of one term and the root round as well.
    margin = 1.0 + (participation.epochs**2 + 8) * _EPS
    return float(np.sqrt(largest * margin)) * scale


def sensitivity_is_exact(strategy: Float[np.ndarray, "m t"], participation: Participation) -> bool:
    """Return whether :func:`sensitivity` is known to be attained, up to rounding.

    True where C'C has no negative entry (beyond what rounding explains) on a pattern that
    attains the maximum: equal gradients then reach the bound.

    Args:
        strategy: [m, T] C.
        participation: when a record appears.

    Raises:
        ValueError: as for :func:`sensitivity`.
    """
    scaled = np.asarray(strategy, np.float64) / _scale(strategy)
    sums, negative = _pattern_sums(*_gram(scaled, participation), participation)
    return bool((~negative & (sums >= sums.max() * (1.0 - _TIE))).any())


def _scale(strategy: Float[np.ndarray, "m t"]) -> float:
    """A power of two near the largest entry: squares neither vanish nor overflow."""
    largest = float(np.abs(_validate.finite_array("strategy", strategy, ndim=2)).max(initial=0.0))
    return 2.0 ** np.clip(np.frexp(largest)[1], -1000, 1000) if largest > 0 else 1.0


def _gram(
    strategy: Float[np.ndarray, "m t"], participation: Participation
) -> tuple[Float[np.ndarray, "t t"], Float[np.ndarray, "t t"]]:
    """Return C'C and a bound on the rounding of its entries (0 for sums of one product)."""
    matrix = _validate.finite_array("strategy", strategy, ndim=2)
    if matrix.shape[1] != checked(participation).rounds:
        raise ValueError(
            f"strategy has shape {matrix.shape}; give one column for each of the participation's "
            f"{participation.rounds} rounds"
        )
    size, support = np.abs(matrix), (matrix != 0).astype(np.float64)
    terms = support.T @ support
    return matrix.T @ matrix, _EPS * np.where(terms > 1, terms, 0.0) * (size.T @ size)


def _pattern_sums(
    gram: Float[np.ndarray, "t t"],
    rounding: Float[np.ndarray, "t t"],
    participation: Participation,
) -> tuple[Float[np.ndarray, " starts"], np.ndarray]:
    """Return the sum of |C'C| over each pattern, rounded up, and where it has negative entries."""
    # A strategy from a Cholesky factorisation carries that one's error as well.
    large = np.abs(gram) + rounding
    negative = gram < -2.0 * rounding
    sums = np.empty(participation.starts)
    mixed = np.empty(participation.starts, dtype=bool)
    for start in range(participation.starts):
        stop = start + (participation.epochs - 1) * participation.separation + 1
        pattern = slice(start, stop, participation.separation)
        sums[start] = large[pattern, pattern].sum()
        mixed[start] = negative[pattern, pattern].any()
    return sums, mixed
