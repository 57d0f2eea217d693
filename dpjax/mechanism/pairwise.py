"""Pairwise noise (DECOR): agents share noise with their neighbours, which cancels in the mean."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

__all__ = ["LARGEST_COUPLING", "Pairwise", "solve"]

# Where the energy falls for ever with the coupling (W = 11'/n), stop at c lambda_max(L) / s of
# this size: the excess over the infimum is then about n / 1e5, and so are the variances' growth.
LARGEST_COUPLING = 1e5
_GOLDEN = (np.sqrt(5.0) - 1.0) / 2.0


class Pairwise(NamedTuple):
    """R = own I + shared L, and whether the coupling ran into its bound."""

    covariance: Float[np.ndarray, "n n"]
    own: float
    shared: float
    bounded: bool


def solve(
    mixing: Float[np.ndarray, "*p n n"],
    factor: Float[np.ndarray, "m n"],
    bounds: Float[np.ndarray, " n"],
) -> Pairwise:
    """Return R = s I + c L of least tr(M R) with [R^-1]_ii <= b_i, s and c >= 0.

    L is the unweighted Laplacian of the off-diagonal support of W, symmetrised. Along a ray
    c / s = t the scale is s = max_i h_i(t) / b_i, h_i = [(I + t L)^-1]_ii. The feasible set is
    convex and the objective linear, so the least energy along rays is quasi-convex in t and
    golden sections find it.

    Args:
        mixing: [n, n] W, or a schedule [P, n, n], whose union support counts.
        factor: F with F'F = M.
        bounds: [n] precision bounds.
    """
    n = bounds.shape[0]
    support = (np.abs(mixing).reshape(-1, n, n) > 0).any(axis=0)
    linked = (support | support.T) & ~np.eye(n, dtype=bool)
    laplacian = np.diag(linked.sum(axis=1)) - linked.astype(float)
    values, vectors = np.linalg.eigh(laplacian)
    values, squares = np.maximum(values, 0.0), vectors**2
    alone = float(np.sum(factor**2))
    coupled = max(0.0, float(np.einsum("ij,jk,ik->", factor, laplacian, factor, optimize=True)))
    most = LARGEST_COUPLING / max(float(values[-1]), 1.0)

    def scale(t: float) -> float:
        return float(np.max((squares @ (1.0 / (1.0 + t * values))) / bounds))

    def energy(t: float) -> float:
        return scale(t) * (alone + t * coupled)

    # In log(1 + t), so that small and large couplings are resolved alike.
    low, high = 0.0, float(np.log1p(most))
    for _ in range(120):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if energy(np.expm1(left)) <= energy(np.expm1(right)):
            high = right
        else:
            low = left
    t = min((0.0, most, float(np.expm1((low + high) / 2.0))), key=energy)
    own = scale(t) * (1.0 + 1e-12)
    covariance = own * (np.eye(n) + t * laplacian)
    # The inverse of the rounded matrix, not of the ideal one, has to keep the bound.
    worst = float(np.max(np.linalg.inv(covariance).diagonal() / bounds))
    margin = max(worst, 1.0) * (1.0 + 8 * n * np.finfo(np.float64).eps * (1.0 + t * values[-1]))
    covariance, own = covariance * margin, own * margin
    return Pairwise(covariance, own, own * t, bool(t >= 0.999 * most))
