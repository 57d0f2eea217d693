"""The diagonal of an inverse covariance, with a proven bound on its rounding."""

import numpy as np

from dpjax import _validate
from dpjax.accounting.arrays import Matrix, Numbers, Vector
from dpjax.accounting.rounding import UNIT

__all__ = ()


def diagonal_of(factor: Numbers) -> Numbers | None:
    """The diagonal [n] of a matrix that has nothing else, or that is given as one; else None.

    Args:
        factor: [n, q], or a diagonal [n].
    """
    if factor.ndim == 1:
        return factor
    if factor.ndim != 2:
        return None
    diagonal = factor.diagonal()
    square = factor.shape[0] == factor.shape[1]
    return diagonal if square and np.count_nonzero(factor) == np.count_nonzero(diagonal) else None


def inverse_diagonal(
    covariance: Matrix | None = None,
    *,
    factor: Matrix | Vector | None = None,
) -> Vector:
    """An upper bound on the diagonal of R^-1, tight to rounding.

    For an approximate inverse Y of A and the residual G = I - A Y, columnwise
    A^-1 = Y + A^-1 G and |A^-1|_2 <= |Y|_F / (1 - |G|_F). With A = R this bounds every diagonal
    entry; with A = F, R = F F', it bounds [R^-1]_ii = |F^-1 e_i|^2 at the square root of R's
    condition number. G is bounded from above, its own rounding included.

    Guarantee: no entry is below the true one of the float64 matrix that was given.

    Args:
        covariance: [n, n] symmetric positive definite R.
        factor: [n, n] F instead, of full rank, or [n], the diagonal of one that has nothing else.

    Returns:
        [n] upper bounds on [R^-1]_ii.

    Raises:
        ValueError: When not exactly one is given; for a matrix that is not symmetric, not positive
            definite, or so nearly singular that the bound is 1 % above the computed value.

    Reference:
        Rump (2010), Verification methods, sections 3 and 10.
    """
    if (covariance is None) == (factor is None):
        raise ValueError("covariance and factor are both given or both None; give exactly one")
    if factor is not None:
        if (diagonal := diagonal_of(np.asarray(factor))) is not None:
            return _from_factor(_validate.finite_array("factor", diagonal, ndim=1))
        return _from_factor(_validate.square("factor", factor))
    assert covariance is not None
    matrix = _validate.square("covariance", covariance)
    if abs(matrix - matrix.T).max() > 1e-12 * abs(matrix).max():
        raise ValueError("covariance is not symmetric; give (R + R') / 2 if that is meant")
    return _from_covariance(np.tril(matrix) + np.tril(matrix, -1).T)[1]


def inverse(covariance: Matrix) -> Matrix:
    """R^-1 to rounding, refused where `inverse_diagonal` refuses.

    Args:
        covariance: [n, n] symmetric positive definite R.
    """
    return _from_covariance(covariance)[0]


def _singular(name: str) -> ValueError:
    return ValueError(
        f"{name} is singular, nearly singular or indefinite: some combination of the messages "
        "would carry (almost) no noise. Add independent noise to every agent, or use another "
        "design ('central' is a reference that does not defend against outsiders)"
    )


def _powers(size: Vector, name: str) -> Vector:
    """Powers of two near 1 / size, which scale without rounding."""
    if not (size > 0).all():
        raise _singular(name)
    return 2.0 ** -np.round(np.log2(size))


def _invert(matrix: Matrix, name: str) -> tuple[Matrix, Vector, float]:
    """Approximate inverse Y, column norms of the residual's bound, and a bound on |A^-1|_2."""
    try:
        inverse = np.linalg.inv(matrix)
    except np.linalg.LinAlgError:
        raise _singular(name) from None
    sizes = abs(matrix) @ abs(inverse)
    return inverse, *_bounds(inverse, matrix @ inverse, sizes, np.eye(len(matrix)), name)


def _bounds(
    inverse: Matrix, product: Matrix, sizes: Matrix, identity: Matrix, name: str
) -> tuple[Vector, float]:
    """Column norms of the bound on I - A Y, and a bound on |A^-1|_2, from A Y and |A| |Y|."""
    n = inverse.shape[1]
    rounding = 8 * n * UNIT
    # What the product rounds, by the sizes of its terms.
    residual = abs(identity - product) + (n + 3) * UNIT * (sizes + identity)
    residual *= 1 + rounding
    total = float(np.linalg.norm(residual))
    if not total < 0.5:
        raise _singular(name)
    # |A^-1| <= |Y| / (1 - |R|), by the Neumann series of A Y = I - R.
    size = float(np.linalg.norm(inverse)) / (1 - total) * (1 + rounding)
    return np.linalg.norm(residual, axis=0), size


def _from_covariance(matrix: Matrix) -> tuple[Matrix, Vector]:
    """R^-1 to rounding, and the upper bound on its diagonal."""
    n = len(matrix)
    powers = _powers(np.sqrt(abs(matrix.diagonal())), "covariance")
    matrix = matrix * powers[:, None] * powers
    # A Cholesky factorisation of a matrix lowered by more than its rounding proves definiteness;
    # the scaled diagonal is at most 2.
    shift = 8 * (n + 1) * n * UNIT * np.eye(n)
    try:
        np.linalg.cholesky(matrix - shift)
    except np.linalg.LinAlgError:
        raise _singular("covariance") from None
    inverse, columns, size = _invert(matrix, "covariance")
    computed = inverse.diagonal()
    # For positive definite A: |e_i' A^-1 G e_i| <= sqrt(|A^-1| [A^-1]_ii) |G e_i|, which leaves a
    # quadratic inequality for sqrt([A^-1]_ii).
    half = np.sqrt(size) * columns / 2
    root = half + np.sqrt(half**2 + abs(computed))
    bound = root**2 * (1 + 16 * UNIT)
    if not (computed > 0).all() or (bound > 1.01 * computed).any():
        raise _singular("covariance")
    return inverse * powers[:, None] * powers, bound * powers**2


def _from_factor(factor: Numbers) -> Vector:
    """The bound by a factor [n, n], or by the diagonal [n] of one that has nothing else."""
    if factor.ndim == 1:
        powers = _powers(abs(factor), "factor")
        # Products of diagonals are those of their entries, here in one row.
        scaled = abs(factor * powers)[None]
        inverse = 1.0 / scaled
        product = scaled * inverse
        columns, size = _bounds(inverse, product, product, np.ones_like(scaled), "factor")
    else:
        powers = _powers(np.linalg.norm(factor, axis=1), "factor")
        inverse, columns, size = _invert(factor * powers[:, None], "factor")
    computed = np.linalg.norm(inverse, axis=0)
    bound = (computed + size * columns) * (1 + 4 * len(factor) * UNIT)
    if (bound > 1.005 * computed).any():
        raise _singular("factor")
    return (bound * powers) ** 2 * (1 + 4 * UNIT)
