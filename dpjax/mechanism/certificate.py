"""A feasible precision from multipliers, and bounds on its value that rounding cannot break."""

import math
from typing import NamedTuple

import numpy as np
import scipy.linalg
from jaxtyping import Float
from numpy.linalg import LinAlgError, cholesky, eigh, svd

from dpjax.topology.mixing import SquareMatrix

__all__ = ()

Factor = Float[np.ndarray, "m n"]
Vector = Float[np.ndarray, " n"]
BlockStack = Float[np.ndarray, "b k k"]

EPS = float(np.finfo(np.float64).eps)


def relative_gap(value: float, bound: float) -> float:
    """Return value / bound - 1, how far a value may be above its infimum; infinite without one."""
    return value / bound - 1.0 if bound > 0 else math.inf


def eigen(matrix: SquareMatrix) -> tuple[Vector, SquareMatrix]:
    """Return ascending eigenvalues and the eigenvectors of a matrix that rounding tilted."""
    return eigh((matrix + matrix.T) / 2.0)


class _Certificate(NamedTuple):
    """A precision with margin, its inverse, and tr(M P^-1) rounded up."""

    precision: SquareMatrix
    covariance: SquareMatrix
    value: float
    variance_ratio: float


def precision_of(factor: Factor, multipliers: Vector) -> SquareMatrix:
    """Return P = F' U e^-1 U' F for F L^1/2 = U e V', scaled and with every diagonal entry 1.

    Scaling to max diag = 1 and then raising slack entries to 1 keeps P feasible and only adds a
    positive semidefinite matrix to it, so tr(M P^-1) never rises.
    """
    left, values, _ = svd(factor * np.sqrt(multipliers), full_matrices=False)
    positive = values > max(factor.shape) * EPS * values[0]
    rotated = (left[:, positive].T @ factor) / np.sqrt(values[positive])[:, None]
    return unit_diagonal(rotated.T @ rotated)


def unit_diagonal(precision: SquareMatrix) -> SquareMatrix:
    """Return P, made symmetric, over its largest diagonal entry, the others raised to 1."""
    precision = (precision + precision.T) / (2.0 * precision.diagonal().max())
    np.fill_diagonal(precision, 1.0)
    return precision


def certify(factor: Factor, precision: SquareMatrix) -> _Certificate | None:
    """Return the precision with its safety margin, inverse and value; None if it is singular.

    With E = I - R P for the rounded inverse R, the exact inverse of R is P (I - E)^-1. The
    margin is twice the bound on the diagonal of the difference that follows, residual and its
    own rounding included, so diag(R^-1) <= 1 holds exactly, and still by another's arithmetic.
    """
    n = precision.shape[0]
    try:
        # P = L L' fails where P is not positive definite.
        lower = cholesky(precision)
        inverse_lower = scipy.linalg.solve_triangular(lower, np.eye(n), lower=True)
    except LinAlgError:
        return None
    covariance = inverse_lower.T @ inverse_lower
    covariance = (covariance + covariance.T) / 2.0
    size = np.abs(precision)
    residual = np.abs(np.eye(n) - covariance @ precision)
    residual += n * EPS * (np.abs(covariance) @ size)
    norm = residual.sum(axis=1).max()
    if not norm < 0.25:
        return None
    # |P E (I - E)^-1|_ii <= (|P| |E|)_ii + max|P| |E| norm / (1 - norm), summed over the column.
    first = np.einsum("ij,ji->i", size, residual).max()
    margin = 2.0 * first + 2.0 * norm * norm * size.sum(axis=1).max() / (1.0 - norm) + 4 * EPS
    if not margin < 1e-3:
        return None
    covariance = covariance / (1.0 - margin)
    value = upper_trace(covariance, factor=factor)
    ratio = float(covariance.diagonal().max())
    return _Certificate(precision * (1.0 - margin), covariance, value, ratio)


def upper_trace(
    covariance: SquareMatrix,
    *,
    factor: Factor | None = None,
    gram: SquareMatrix | None = None,
) -> float:
    """Return tr(M R), rounded up, for the very entries that are given.

    Where noise cancels, the terms of the trace are far larger than the trace itself: the worst
    rounding of its sums is added.

    Args:
        covariance: [n, n] R, symmetric.
        factor: [m, n] F with F'F = M. Give this or ``gram``.
        gram: [n, n] M.
    """
    if gram is not None:
        products = (gram * covariance).ravel()
        return math.nextafter(math.fsum(products) + EPS * math.fsum(np.abs(products)), math.inf)
    assert factor is not None
    value = float(np.sum((factor @ covariance) * factor))
    terms = float(np.sum((np.abs(factor) @ np.abs(covariance)) * np.abs(factor)))
    return value + 2 * (max(factor.shape) + 2) * EPS * terms


def lower_bound(
    multipliers: Vector,
    *,
    factor: Factor | None = None,
    gram: SquareMatrix | None = None,
) -> tuple[float, Vector]:
    """Return the best scaled dual value tr(S)^2 / sum(l), S^2 = L^1/2 M L^1/2, and its multipliers.

    Multipliers at the floor stand for 0; the bound is taken with and without them.

    Guarantee: not above the infimum of tr(M P^-1), whatever rounds.

    Args:
        multipliers: [n] l, none below 0.
        factor: [m, n] F; M is F'F exactly. Give this or ``gram``.
        gram: [n, n] M itself.
    """
    without = np.where(multipliers > 2e-8 * multipliers.max(), multipliers, 0.0)
    best = 0.0
    weights = multipliers
    # Either choice is a bound; multipliers at their floor stand for 0.
    for candidate in (multipliers,) if without.all() else (multipliers, without):
        roots = np.sqrt(candidate)
        if gram is not None:
            total = root_trace(gram, roots)
        else:
            assert factor is not None
            total = nuclear_norm(factor * roots, blur=EPS)
        bound = total * total / math.fsum(roots**2) * (1.0 - 8 * EPS)
        if bound > best:
            best = bound
            weights = candidate
    return best, weights


def nuclear_norm(matrix: Factor, *, blur: float) -> float:
    """Return a lower bound on the sum of the singular values of X, tight to rounding.

    |X|_* >= <Z, X> / |Z|_2 for any Z. The computed singular vectors make a Z that is nearly the
    best; what it is off by, and what rounds in the product, is taken off.

    Args:
        matrix: [m, n] X as rounded.
        blur: Relative rounding of its entries: those of the true X lie within ``blur`` |X|, in
            the Frobenius norm.

    Reference:
        Rump (2010), Verification methods, section 10.
    """
    scale = _power(matrix)
    if not scale > 0:
        return 0.0
    matrix = matrix / scale
    left, _, right = svd(matrix, full_matrices=False)
    # The polar factor of X: its inner product with X is |X|_*.
    turned = left @ right
    small = turned @ turned.T if len(turned) <= turned.shape[1] else turned.T @ turned
    squares = float(np.sum(turned**2)) * (1 + turned.size * EPS)
    # |Z|_2^2 is at most 1 plus what Z'Z is off the identity.
    excess = _norm(small - np.eye(len(small))) + turned.size * EPS
    excess += max(turned.shape) * EPS * squares
    off = math.sqrt(squares) * _norm(matrix) * (blur + 4 * EPS)
    inner = math.fsum((turned * matrix).ravel()) - off
    return max(0.0, inner) / math.sqrt(1 + excess) * scale * (1 - 8 * EPS)


def root_trace(gram: SquareMatrix, half: SquareMatrix | Vector) -> float:
    """Return a lower bound on tr((Z' M Z)^1/2) for M >= 0, tight where no eigenvalue vanishes.

    With A = Z' M Z = Q D Q' + E the i-th eigenvalue of A is at least D_i less |D_i| |Q'Q - I| and
    |E|_2. Both are computed, E from exact products of halves of the digits, and bounded with their
    own rounding: the root of an eigenvalue that is rounding alone is no part of the bound.

    Args:
        gram: [n, n] M, symmetric.
        half: [n, n] Z, or its diagonal [n].

    Reference:
        Weyl's and Ostrowski's inequalities (Horn and Johnson, Matrix Analysis, chapter 4); Ozaki
        et al. (2012) for the products.
    """
    # Powers of four: scaling and its roots round nothing.
    scale = _power(gram)
    width = _power(half)
    if not (scale > 0 and width > 0):
        return 0.0
    n = len(gram)
    matrix = gram / scale
    outer = half / width
    matrix = (matrix + matrix.T) / 2
    if outer.ndim == 1:
        high = outer[:, None] * matrix * outer
        low = np.zeros_like(high)
        error = 4 * EPS * _norm(high)
    else:
        first, rest, off = _product(outer.T, matrix)
        first = first + rest
        high, low, error = _product(first, outer)
        size = _norm(outer)
        error += off * size
        error += 4 * EPS * _norm(np.abs(first) @ np.abs(outer)) * (1 + n * EPS)
    values, vectors = eigh(high + low)
    upper, lower, extra = _product(vectors * values, vectors.T)
    difference = (high - upper) + (low - lower)
    error += extra + _norm(difference) * (1 + 2 * n * n * EPS)
    # Of the columns of Q D as rounded, and of the differences.
    error += 4 * EPS * (np.abs(values).sum() + _norm(low - lower))
    error += 4 * EPS * _norm(high + low)
    # Computed eigenvectors are not quite orthogonal.
    skew = _norm(vectors.T @ vectors - np.eye(n)) + 2 * n * n * EPS
    certain = np.maximum(values - np.abs(values) * skew - error, 0.0)
    total = math.fsum(np.sqrt(certain)) * (1 - 4 * EPS)
    return total * math.sqrt(scale) * width * (1 - 4 * EPS)


def factored_root_trace(
    factor: SquareMatrix,
    half: BlockStack,
    left: SquareMatrix,
    roots: Vector,
) -> float:
    """Return a lower bound on tr((Z' M Z)^1/2), from F and eigenvectors that are known already.

    Three products in place of eigenvectors and six. Rounding is bounded by norms, which leaves the
    bound n eps tr(M) / l of an eigenvalue l below the trace: for long horizons.

    Args:
        factor: [n, n] F, Cholesky's upper factor of M as rounded.
        half: [b, k, k] the blocks of Z, which is zero between them.
        left: [n, n] U, F Z Z' F' = U e^2 U' nearly.
        roots: [n] e.

    Reference:
        Higham, Accuracy and stability of numerical algorithms, theorem 10.3 for Cholesky;
        Weyl's and Ostrowski's inequalities as in `root_trace`.
    """
    b, k, _ = half.shape
    n = len(factor)
    # Z is zero between blocks: F Z by the columns of each.
    parts = factor.reshape(n, b, k).transpose(1, 0, 2)
    product = np.matmul(parts, half).transpose(1, 0, 2).reshape(n, n)
    terms = _norm(np.matmul(np.abs(parts), np.abs(half)))
    scaled = left * roots
    norm = _norm(product)
    other = _norm(scaled)
    error = _norm(product @ product.T - scaled @ scaled.T)
    error += (n + 8) * EPS * (norm**2 + other**2) + 4 * (k + 2) * EPS * terms**2
    # M = F'F + E, |E| <= n eps |F'| |F|, and M was made symmetric.
    wide = np.sum(half**2, axis=(1, 2)).max()
    error += (n + 8) * EPS * _norm(factor) ** 2 * wide
    skew = _norm(left.T @ left - np.eye(n)) + 2 * n * n * EPS
    certain = np.maximum(roots**2 * (1 - skew) - error * (1 + 4 * n * n * EPS), 0.0)
    return math.fsum(np.sqrt(certain)) * (1 - 4 * EPS)


def _norm(matrix: np.ndarray) -> float:
    """The Frobenius norm."""
    return float(np.linalg.norm(matrix))


def _power(matrix: np.ndarray) -> float:
    """A power of four near the largest entry; 0 for a matrix of zeros."""
    largest = np.abs(matrix).max()
    return 4.0 ** round(math.log2(largest) / 2) if largest > 0 else 0.0


def _product(left: Factor, right: Factor) -> tuple[SquareMatrix, SquareMatrix, float]:
    """A product as an exact part, a small one, and the Frobenius norm of what that one is off."""
    n = left.shape[1]
    # Halves of so few digits that sums of n of their products are exact.
    digits = (53 - math.ceil(math.log2(n + 1))) // 2 - 1
    first = _leading(left, digits)
    last = _leading(right.T, digits).T
    rest = left - first
    tail = right - last
    # Sums of n products of whole numbers below 2^digits: nothing rounds.
    high = first @ last
    low = first @ tail + rest @ right
    # Each product of `low` rounds by at most (n + 4) eps of its factors' norms.
    sizes = _norm(first) * _norm(tail) + _norm(rest) * _norm(right)
    off = (n + 4) * EPS * sizes * (1 + n * EPS)
    return high, low, off


def _leading(matrix: Factor, digits: int) -> Factor:
    """The leading binary digits of every row, in units of its largest entry."""
    largest = np.abs(matrix).max(axis=1, keepdims=True)
    anchor = np.ldexp(1.0, np.frexp(np.where(largest > 0, largest, 1.0))[1] + 53 - digits)
    return np.asarray((matrix + anchor) - anchor)
