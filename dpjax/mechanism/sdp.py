"""The same problem as a semidefinite program in a library solver: the independent check."""

import importlib
import warnings
from typing import Any

import numpy as np
from jaxtyping import Float

__all__: list[str] = []

LARGEST = 30


def library() -> Any:
    """Return cvxpy, with Clarabel installed; ValueError with the remedy otherwise."""
    try:
        importlib.import_module("clarabel")
        return importlib.import_module("cvxpy")
    except ImportError:
        raise ValueError(
            "cvxpy or clarabel is not installed, and semidefinite programs need both; "
            'pip install cvxpy clarabel (designs themselves do not: solver="fixed_point")'
        ) from None


def solve(
    gram: Float[np.ndarray, "n n"], tolerance: float = 1e-9
) -> tuple[Float[np.ndarray, "n n"], Float[np.ndarray, " n"]]:
    """Return the covariance and the multipliers of  min tr(M R), [[R, e_i], [e_i', 1]] >= 0.

    By Schur's complement each block says [R^-1]_ii <= 1; its dual's corner is l_i.

    Args:
        gram: [n, n] M, n <= 30.
        tolerance: Clarabel's gap and feasibility tolerances.

    Returns:
        R [n, n] and l [n], both unscaled solver output: the caller makes them feasible.

    Raises:
        ValueError: for n > 30, without cvxpy and Clarabel, or when Clarabel fails.
    """
    n = gram.shape[0]
    if n > LARGEST:
        raise ValueError(
            f'gram has n={n}; solver="sdp" is for n <= {LARGEST} (use solver="fixed_point")'
        )
    cp = library()
    scale = float(np.trace(gram)) / n
    covariance = cp.Variable((n, n), symmetric=True)
    unit = np.eye(n)
    blocks = []
    for i in range(n):
        column = unit[:, [i]]
        blocks.append(cp.bmat([[covariance, column], [column.T, np.ones((1, 1))]]) >> 0)
    problem = cp.Problem(cp.Minimize(cp.trace((gram / scale) @ covariance)), blocks)
    try:
        with warnings.catch_warnings():
            # "Solution may be inaccurate": the caller's certificate says how inaccurate.
            warnings.simplefilter("ignore", UserWarning)
            problem.solve(
                solver=cp.CLARABEL,
                tol_gap_abs=tolerance,
                tol_gap_rel=tolerance,
                tol_feas=tolerance,
            )
    except cp.error.SolverError as error:
        raise ValueError(f'gram defeats Clarabel ({error}); use solver="fixed_point"') from None
    if covariance.value is None:
        raise ValueError(
            f'gram leaves Clarabel {problem.status}; use solver="fixed_point", which bounds '
            f"problems whose infimum is not attained"
        )
    # Only relative sizes of the multipliers matter to the caller.
    multipliers = np.array([float(np.asarray(block.dual_value)[n, n]) for block in blocks])
    return np.asarray(covariance.value), np.maximum(multipliers, 0.0) * scale
