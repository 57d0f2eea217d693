"""Pairwise noise (DECOR): agents share noise with their neighbours, which cancels in the mean."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from dpjax import _numerics

__all__ = ["PairwiseSolution", "solve"]

# Where the energy falls for ever with the coupling (W = 11'/n), stop at c lambda_max(L) / s of
# this size: the excess over the infimum is then about n / 1e5, and so are the variances' growth.
LARGEST_COUPLING = 1e5
_GOLDEN = (np.sqrt(5.0) - 1.0) / 2.0


class PairwiseSolution(NamedTuple):
    """R = own diag(1 / b) + shared L, and whether the coupling ran into its bound."""

    covariance: Float[np.ndarray, "n n"]
    own: float
    shared: float
    bounded: bool


def solve(
    mixing: Float[np.ndarray, "*p n n"],
    factor: Float[np.ndarray, "m n"],
    bounds: Float[np.ndarray, " n"],
) -> PairwiseSolution:
    """Return R = s diag(1/b) + c L of least tr(M R) with [R^-1]_ii <= b_i, s and c >= 0.

    L is the unweighted Laplacian of the off-diagonal support of W, symmetrised; with one bound
    for all this is the published s I + c L. Along a ray c / s = t the scale is s = max_i h_i(t),
    h_i = [(I + t B^1/2 L B^1/2)^-1]_ii with B = diag(b). The feasible set is convex and the
    objective linear, so the least energy along rays is quasi-convex in t and golden sections
    find it.

    Args:
        mixing: [n, n] W, or a schedule [P, n, n], whose union support counts.
        factor: F with F'F = M.
        bounds: [n] precision bounds.
    """
    n = bounds.shape[0]
    linked = _numerics.linked(mixing)
    laplacian = np.diag(linked.sum(axis=1)) - linked.astype(float)
    root = np.sqrt(bounds)
    values, vectors = np.linalg.eigh(root[:, None] * laplacian * root)
    values, squares = np.maximum(values, 0.0), vectors**2
    alone = float(np.sum((factor / root) ** 2))
    coupled = max(0.0, float(np.einsum("ij,jk,ik->", factor, laplacian, factor, optimize=True)))
    most = LARGEST_COUPLING / max(float(values[-1]), float(bounds.min()))

    def scale(t: float) -> float:
        return float(np.max(squares @ (1.0 / (1.0 + t * values))))

    def energy(t: float) -> float:
        return scale(t) * (alone + t * coupled)

    # In log(1 + t / unit), so that small and large couplings are resolved alike.
    unit = most / LARGEST_COUPLING
    low, high = 0.0, float(np.log1p(LARGEST_COUPLING))
    for _ in range(120):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if energy(unit * np.expm1(left)) <= energy(unit * np.expm1(right)):
            high = right
        else:
            low = left
    t = min((0.0, most, unit * float(np.expm1((low + high) / 2.0))), key=energy)
    own = scale(t) * (1.0 + 1e-12)
    covariance = own * (np.diag(1.0 / bounds) + t * laplacian)
    # The inverse of the rounded matrix, not of the ideal one, has to keep the bound.
    worst = float(np.max(np.linalg.inv(covariance).diagonal() / bounds))
    margin = max(worst, 1.0) * (1.0 + 8 * n * np.finfo(np.float64).eps * (1.0 + t * values[-1]))
    covariance, own = covariance * margin, own * margin
    return PairwiseSolution(covariance, own, own * t, bool(t >= 0.999 * most))
