"""Which steps and gains gradient tracking is stable at: mode by mode, and by its spectral radius.

Without noise and with a constant step, where all agents have the Hessian h I, an eigenvector of W
with eigenvalue l follows [[l - alpha beta (1-l) - alpha h, -alpha], [beta (1-l), 1]]. Its
eigenvalues have determinant l - alpha h and trace above it by 1 - alpha beta (1-l), so that (Jury)
they lie inside the unit circle exactly where

    alpha beta (1 - l) < 2 (1 + l) - 2 alpha h,      and alpha h > 0,

for l < 1; the average (l = 1) needs alpha h < 2, which is the same formula. The paper's gamma beta
<= 1 is neither necessary nor sufficient.
"""

from typing import Any

import numpy as np
from jaxtyping import Float

from dpjax import _validate
from dpjax.mechanism import costs

__all__ = ["largest_gain", "margins", "peak", "spectral_radius"]


def margins(
    mixing: Any, curvature: float, step_size: float, beta: float
) -> Float[np.ndarray, " n"]:
    """Return 2 (1 + l) - 2 alpha h - alpha beta (1 - l) of every mode: all above 0 where stable.

    Args:
        mixing: [n, n] symmetric W.
        curvature: Common Hessian h of all costs, above 0.
        step_size: Constant alpha, above 0.
        beta: Gain.

    Returns:
        [n] margins, ordered as W's eigenvalues l, from the least.

    Raises:
        ValueError: For numbers out of range, or a W that is not symmetric and stochastic.

    Example:
        >>> import numpy as np
        >>> from dpjax.mechanism import stability
        >>> ring = (np.eye(4) + np.roll(np.eye(4), 1, 0) + np.roll(np.eye(4), -1, 0)) / 3
        >>> stability.margins(ring, curvature=1.0, step_size=0.1, beta=10.0).round(3).tolist()
        [-0.2, 1.8, 1.8, 3.8]
    """
    modes = _modes(mixing)
    h = _validate.positive("curvature", curvature)
    alpha = _validate.positive("step_size", step_size)
    gain = _gain(beta)
    return 2 * (1 + modes) - 2 * alpha * h - alpha * gain * (1 - modes)


def largest_gain(mixing: Any, curvature: float, step_size: float) -> float:
    """Return the beta up to which every mode is stable: the border, itself not stable.

    min over l < 1 of (2 (1 + l) - 2 alpha h) / (alpha (1 - l)), set by the least eigenvalue.

    Args:
        mixing: [n, n] symmetric W.
        curvature: Common Hessian h, above 0.
        step_size: Constant alpha, above 0.

    Returns:
        The border; 0 where no gain is stable, infinity for one agent.

    Raises:
        ValueError: As in `margins`.

    Example:
        >>> import numpy as np
        >>> from dpjax.mechanism import stability
        >>> round(stability.largest_gain(np.full((3, 3), 1 / 3), curvature=1.0, step_size=0.1), 6)
        18.0
    """
    at_rest = margins(mixing, curvature, step_size, 0.0)
    if at_rest.min() <= 0:
        return 0.0
    gaps = 1 - _modes(mixing)
    pulled = gaps > 1e-12
    return float((at_rest[pulled] / (step_size * gaps[pulled])).min(initial=np.inf))


def spectral_radius(mixing: Any, hessians: Any, step_size: float, beta: float) -> float:
    """Return the spectral radius of a noise-free round with a constant step, for any Hessians.

    Of errors of models and tracking variables; the sum of these is 0 and stays it, and is left out.
    Dense: for up to a thousand entries 2 n p.

    Args:
        mixing: [n, n] symmetric W.
        hessians: [n, p, p].
        step_size: Constant alpha.
        beta: Gain.

    Returns:
        The radius; the run converges where it is below 1.

    Raises:
        ValueError: For shapes that do not fit, or numbers out of range.

    Example:
        >>> import numpy as np
        >>> from dpjax.mechanism import stability
        >>> mixing, hessians = np.full((3, 3), 1 / 3), np.ones((3, 1, 1))
        >>> round(stability.spectral_radius(mixing, hessians, step_size=0.1, beta=5.0), 6)
        0.9
    """
    alpha = _validate.positive("step_size", step_size)
    problem = costs.checked(mixing, hessians, None, [alpha], _gain(beta))
    n, p = problem.hessians.shape[:2]
    size = n * p
    full = costs.advanced(problem, alpha, np.eye(2 * size))
    # An orthonormal basis of vectors over agents whose sum is 0.
    basis = np.linalg.svd(np.ones((1, n)))[2][1:].T
    spread = np.kron(basis, np.eye(p))
    kept = np.zeros((2 * size, size + spread.shape[1]))
    kept[:size, :size] = np.eye(size)
    kept[size:, size:] = spread
    return float(np.abs(np.linalg.eigvals(kept.T @ full @ kept)).max())


def peak(
    mixing: Any, hessians: Any, linear: Any, step_sizes: Any, beta: float, start: Any = 0.0
) -> float:
    """Return the largest |x(k) - x*|^2 of a noise-free run: how far decaying steps first go astray.

    Steps that decay fall below every border in the end, and averaging undoes what grew before, as
    far as the run's precision has kept it: beyond 1e14 times the final error float32 has not.

    Args:
        mixing: [n, n] W.
        hessians: [n, p, p].
        linear: [n, p].
        step_sizes: [T].
        beta: Gain.
        start: [n, p] x(0), or what broadcasts.

    Returns:
        The sum over agents; infinity where it overflows.

    Raises:
        ValueError: For shapes that do not fit, or numbers out of range.

    Example:
        >>> import numpy as np
        >>> from dpjax.mechanism import stability
        >>> mixing, hessians = np.full((3, 3), 1 / 3), np.ones((3, 1, 1))
        >>> round(stability.peak(mixing, hessians, np.ones((3, 1)), [0.5, 0.5], beta=1.0), 6)
        0.75
    """
    problem = costs.checked(mixing, hessians, linear, step_sizes, _gain(beta))
    with np.errstate(over="ignore", invalid="ignore"):
        squares = (costs.mean_error(problem, start) ** 2).sum(axis=(1, 2))
    return float(np.where(np.isnan(squares), np.inf, squares).max())


def _gain(beta: float) -> float:
    beta = _validate.number("beta", beta)
    if beta < 0:
        raise ValueError(f"beta is {beta:g}; give a number >= 0")
    return beta


def _modes(mixing: Any) -> np.ndarray:
    matrix = _validate.stochastic("mixing", mixing, ("row", "column"))
    if matrix.ndim != 2 or np.abs(matrix - matrix.T).max() > 1e-9:
        raise ValueError(
            "mixing is not one symmetric matrix; give one, as metropolis_hastings makes"
        )
    return np.linalg.eigvalsh(matrix)
