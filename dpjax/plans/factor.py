"""The float32 factor that colours a run's noise, rounded so that it keeps the bound."""

import numpy as np
import scipy.sparse.csgraph
from jaxtyping import Float, Int

from dpjax.accounting import precision

__all__: list[str] = []

_TRIES = 40


def groups(factor: Float[np.ndarray, "n n"]) -> Int[np.ndarray, " n"]:
    """Which agents share a seed: those who use the same normals, directly or through others.

    Args:
        factor: [n, n] F, whose column j holds how much of the j-th normals each agent adds.

    Returns:
        [n] numbers, equal within a group.
    """
    _, group = scipy.sparse.csgraph.connected_components(factor != 0, directed=False)
    return group.astype(np.int64)


def rounded(
    covariance: Float[np.ndarray, "n n"], bound: Float[np.ndarray, "*n"]
) -> Float[np.ndarray, "n n"]:
    """Round a factor of a covariance to float32, keeping [R^-1]_ii <= b_i.

    The factor is the triangular one: where noise cancels, its small pivots keep all their digits,
    and those of R^-1 follow. A symmetric factor writes the same small numbers as differences of
    large ones, whose rounding costs noise in proportion to the square root of R's condition number.

    Guarantee: with R = F F' of the float32 F that is returned, no [R^-1]_ii exceeds b_i, rounding
    included; R gains a few 1e-7 of itself, unless it is all but singular in float32.

    Args:
        covariance: [n, n] symmetric positive definite R, in the squared units of the noise.
        bound: b, or [n] b_i.

    Returns:
        [n, n] lower triangular float32 F.

    Raises:
        ValueError: For a covariance that is singular in float32.
    """
    try:
        exact = np.linalg.cholesky(covariance)
        scale = 1.0
        for attempt in range(_TRIES):
            with np.errstate(over="ignore"):
                factor = (exact * scale).astype(np.float32)
            diagonal = precision.inverse_diagonal(factor=factor.astype(np.float64))
            excess = float(np.max(diagonal / bound))
            # The margin covers the rounding between this and the accountant's own steps.
            if excess <= 1 - 1e-12:
                return factor
            # Steps that grow: each rounding moves the excess anew, by an amount that does not.
            scale *= np.sqrt(excess) * (1 + 2.0 ** (attempt - 25))
    except (np.linalg.LinAlgError, ValueError):
        pass
    raise ValueError(
        f"design.covariance has condition number {np.linalg.cond(covariance):.1e} and entries up "
        f"to {np.max(np.abs(covariance)):.1e}, too far apart for float32 noise; take "
        "noise.Whisper(max_variance=20), which bounds the noise's variance, or rescale the loss"
    )
