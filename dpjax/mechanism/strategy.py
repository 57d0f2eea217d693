"""Which strategies over rounds can be used: one check, for runs and for accounting."""

import numpy as np
import scipy.linalg
from jaxtyping import Float

from dpjax import _validate

__all__ = ()

Strategy = Float[np.ndarray, "t t"]
_EXTREME = 1e12
"""Largest and inverse of the smallest diagonal entry of a strategy."""
WORST = 1e6
"""Largest condition number, the largest row sum of |C^-1| |C|."""


def is_triangular(matrix: Strategy) -> bool:
    """Tell whether nothing stands above the diagonal: no round's noise uses a later one's.

    Args:
        matrix: [T, T].
    """
    return not np.triu(matrix, 1).any()


def inverse_of(strategy: Strategy) -> Strategy:
    """C^-1 by substitution: its errors are small by row, and nothing appears above the diagonal.

    Args:
        strategy: [T, T] lower triangular C with a positive diagonal.
    """
    return scipy.linalg.solve_triangular(strategy, np.eye(len(strategy)), lower=True)


def check_strategy(strategy: object, rounds: int | None = None) -> Strategy:
    """Return C in float64 where noise C^-1 Z can be made and accounted.

    Args:
        strategy: [T, T] lower triangular C with a positive diagonal.
        rounds: T, or None for that of the strategy.

    Returns:
        [T, T] float64.

    Raises:
        ValueError: For another matrix, or one beyond `_EXTREME` or `WORST`.
    """
    matrix = _validate.square("strategy", strategy)
    if rounds is not None and len(matrix) != rounds:
        raise ValueError(
            f"strategy has shape {matrix.shape} for rounds = {rounds}; give a [{rounds}, {rounds}] "
            "strategy, or None"
        )
    diagonal = np.diag(matrix)
    # A diagonal that is not positive has a message of its own below.
    if diagonal.min() > 0 and not (1 / _EXTREME <= diagonal.min() <= diagonal.max() <= _EXTREME):
        raise ValueError(
            f"strategy has a diagonal from {diagonal.min():.3g} to {diagonal.max():.3g}, with "
            f"which noise would vanish or overflow; scale it into 1 / {_EXTREME:g} .. {_EXTREME:g}"
        )
    if not is_triangular(matrix) or not (diagonal > 0).all():
        raise ValueError(
            "strategy is not lower triangular with a positive diagonal; give such a C (noise is "
            "C^-1 Z), or None"
        )
    # Skeel's condition number, which no scaling of rows changes; it may overflow.
    with np.errstate(over="ignore", invalid="ignore"):
        sizes = np.abs(inverse_of(matrix)) @ np.abs(matrix)
        conditioned = sizes.sum(axis=1).max()
    if not conditioned <= WORST:
        raise ValueError(
            f"strategy has condition number {conditioned:.3g}, too large for noise in float32; "
            f"give one below {WORST:g}"
        )
    return matrix


def sparse_inverse_of(strategy: Strategy) -> Strategy:
    """C^-1 with zeros where the inversion leaves rounding and an exact one has nothing.

    Args:
        strategy: [T, T] lower triangular C with a positive diagonal.
    """
    inverse = inverse_of(strategy)
    # Zeros shorten the recursion that a run keeps: its width is the last nonzero band.
    inverse[np.abs(inverse) < 1e-13 * np.abs(inverse).max()] = 0.0
    return inverse


def width(matrix: Strategy) -> int:
    """How many rounds back the entries of a lower triangular matrix reach.

    Args:
        matrix: [T, T].
    """
    row, column = np.nonzero(matrix)
    return int((row - column).max())


def bands(matrix: Strategy) -> Float[np.ndarray, "t w"]:
    """[T, width] entries below the diagonal, the latest first.

    Args:
        matrix: [T, T] lower triangular.
    """
    entries = np.zeros((len(matrix), width(matrix)))
    for lag in range(1, entries.shape[1] + 1):
        entries[lag:, lag - 1] = np.diag(matrix, -lag)
    return entries
