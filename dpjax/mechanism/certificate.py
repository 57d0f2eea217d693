"""A feasible precision from multipliers, and bounds on its value that rounding cannot break."""

from typing import NamedTuple

import numpy as np
import scipy.linalg
from jaxtyping import Float

__all__ = ["Certificate", "certify", "lower_bound", "precision_of"]

_EPS = float(np.finfo(np.float64).eps)


class Certificate(NamedTuple):
    """A precision with margin, its inverse, and tr(M P^-1) rounded up."""

    precision: Float[np.ndarray, "n n"]
    covariance: Float[np.ndarray, "n n"]
    value: float
    variance_ratio: float


def precision_of(
    factor: Float[np.ndarray, "m n"], multipliers: Float[np.ndarray, " n"]
) -> Float[np.ndarray, "n n"]:
    """Return P = F' U e^-1 U' F for F L^1/2 = U e V', scaled and with every diagonal entry 1.

    Scaling to max diag = 1 and then raising slack entries to 1 keeps P feasible and only adds a
    positive semidefinite matrix to it, so tr(M P^-1) never rises.
    """
    left, values, _ = np.linalg.svd(factor * np.sqrt(multipliers), full_matrices=False)
    kept = values > max(factor.shape) * _EPS * values[0]
    rotated = (left[:, kept].T @ factor) / np.sqrt(values[kept])[:, None]
    precision = rotated.T @ rotated
    precision = (precision + precision.T) / (2.0 * precision.diagonal().max())
    np.fill_diagonal(precision, 1.0)
    return precision


def certify(
    factor: Float[np.ndarray, "m n"], precision: Float[np.ndarray, "n n"]
) -> Certificate | None:
    """Return the precision with its safety margin, inverse and value; None if it is singular.

    With E = I - R P for the rounded inverse R, the exact inverse of R is P (I - E)^-1. The
    margin is twice the bound on the diagonal of the difference that follows, residual and its
    own rounding included, so diag(R^-1) <= 1 holds exactly, and still by another's arithmetic.
    """
    n = precision.shape[0]
    try:
        lower = np.linalg.cholesky(precision)
        inverse_lower = scipy.linalg.solve_triangular(lower, np.eye(n), lower=True)
    except (np.linalg.LinAlgError, scipy.linalg.LinAlgError):
        return None
    covariance = inverse_lower.T @ inverse_lower
    covariance = (covariance + covariance.T) / 2.0
    size = np.abs(precision)
    residual = np.abs(np.eye(n) - covariance @ precision)
    residual += n * _EPS * (np.abs(covariance) @ size)
    norm = residual.sum(axis=1).max()
    if not norm < 0.25:
        return None
    # |P E (I - E)^-1|_ii <= (|P| |E|)_ii + max|P| |E| norm / (1 - norm), summed over the column.
    first = np.einsum("ij,ji->i", size, residual).max()
    margin = 2.0 * first + 2.0 * norm * norm * size.sum(axis=1).max() / (1.0 - norm) + 4 * _EPS
    if not margin < 1e-3:
        return None
    covariance = covariance / (1.0 - margin)
    # The trace of the covariance as rounded, and the worst rounding of its own sums on top:
    # where noise cancels, its terms are far larger than the trace.
    value = float(np.sum((factor @ covariance) * factor))
    terms = float(np.sum((np.abs(factor) @ np.abs(covariance)) * np.abs(factor)))
    value += 2 * (n + 2) * _EPS * terms
    ratio = float(covariance.diagonal().max())
    return Certificate(precision * (1.0 - margin), covariance, float(value), ratio)


def lower_bound(
    factor: Float[np.ndarray, "m n"], multipliers: Float[np.ndarray, " n"]
) -> tuple[float, Float[np.ndarray, " n"]]:
    """Return the best scaled dual value tr(S)^2 / sum(l), rounded down, and its multipliers.

    Multipliers at the floor stand for 0; the bound is taken with and without them.
    """
    n = multipliers.shape[0]
    without = np.where(multipliers > 2e-8 * multipliers.max(), multipliers, 0.0)
    best, chosen = 0.0, multipliers
    for candidate in (multipliers,) if without.all() else (multipliers, without):
        values = np.linalg.svd(factor * np.sqrt(candidate), compute_uv=False)
        # Each computed singular value is within a few eps of the largest one of the true one.
        total = max(0.0, float(values.sum()) - 8 * n * _EPS * float(values[0]))
        bound = total * total / float(candidate.sum()) * (1.0 - 4 * n * _EPS)
        if bound > best:
            best, chosen = bound, candidate
    return best, chosen
