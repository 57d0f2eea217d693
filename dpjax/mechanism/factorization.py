"""min tr(M P^-1) over P > 0 with diag(P) <= 1: the one problem behind every noise design.

Stationarity gives P L P = M with L = diag(l) the multipliers; the fixed point l_i <- l_i P_ii
climbs the concave dual, every iterate gives a feasible P and a lower bound, and the gap between
the two is the certificate.
"""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from numpy.linalg import inv, qr

from dpjax import _validate
from dpjax._files import PathLike
from dpjax._numerics import double_precision
from dpjax.mechanism import certificate, fixed_point, store
from dpjax.mechanism.certificate import Factor, Vector
from dpjax.topology.mixing import SquareMatrix

__all__ = ["Solution", "minimize_trace"]

Device: TypeAlias = jax.Device | None
"""The JAX device of a solver; None is JAX's default."""
# A larger gap without regularisation means that the infimum is not attained (or that rounding
# decides which directions W kills); slack constraints leave up to 1e-7.
_ATTAINED = 3e-7
_BISECTIONS = 40
_LARGEST_SDP = 30
_ARRAYS = ("precision", "covariance", "multipliers")


@dataclass(frozen=True, eq=False)
class Solution:
    """A feasible point of  min tr(M P^-1), diag(P) <= 1,  with its certificate.

    Attributes:
        precision: [n, n] P, positive definite; its diagonal is 1 less a rounding margin, so that
            the exact inverse of ``covariance`` has no diagonal entry above 1.
        covariance: [n, n] P^-1 as rounded; the noise covariance at bound 1.
        multipliers: [n] dual variables; a later solve can start from them.
        value: tr(M P^-1), rounded up.
        lower_bound: a lower bound on the infimum, rounded down. Value and bound both refer to M
            itself, never to the regularised one.
        iterations: evaluations of the fixed-point map, over all attempts (0: interior point).
        converged: whether the iteration met its tolerance, for the regularised problem where
            ``regularization`` is not 0. ``gap`` says how close the design is to M's own infimum.
        regularization: r of the term r tr(M)/n I that was added to M, 0 where the infimum is
            attained without.
        variance_ratio: largest variance in the design over that of independent noise under the
            same bound: the range and precision that noise which must cancel asks for.

    Example:
        >>> import numpy as np
        >>> from dpjax.mechanism import factorization
        >>> solution = factorization.minimize_trace(np.diag([1.0, 4.0]))
        >>> round(float(solution.value), 4), solution.converged
        (5.0, True)
    """

    precision: SquareMatrix
    covariance: SquareMatrix
    multipliers: Vector
    value: float
    lower_bound: float
    iterations: int
    converged: bool
    regularization: float
    variance_ratio: float

    @property
    def gap(self) -> float:
        """Relative duality gap, value / lower_bound - 1: an upper bound on the excess."""
        return certificate.relative_gap(self.value, self.lower_bound)

    def save(self, path: PathLike) -> Path:
        """Write the solution to an npz file (complete or not at all) and return its path."""
        content = asdict(self)
        return store.write_arrays(
            path, "solution", {name: content.pop(name) for name in _ARRAYS}, content
        )

    @classmethod
    def load(cls, path: PathLike) -> "Solution":
        """Return the solution saved at ``path``; ValueError for a damaged or foreign file."""
        return cls(**store.read_arrays(path, "solution", {field.name for field in fields(cls)}))


def minimize_trace(
    gram: SquareMatrix | None = None,
    *,
    factor: Factor | None = None,
    solver: Literal["fixed_point", "sdp"] = "fixed_point",
    tolerance: float = 1e-9,
    max_iterations: int = 1000,
    regularization: float = 1e-9,
    max_variance: float | None = None,
    warm_start: Vector | None = None,
    pad_to: int | None = None,
    device: Device = None,
) -> Solution:
    """Minimise tr(M P^-1) over symmetric P > 0 with diag(P) <= 1.

    The duality gap is the certificate: ``solution.gap`` bounds the excess over the infimum, of M
    as it is given: value and lower bound both hold with the rounding of what is computed from it.
    Where the infimum is not attained (M singular without a slack constraint, as for 11'/n or a
    ring of 12), the problem with M + r tr(M)/n I is solved instead, r = ``regularization``, and
    the gap to M's own infimum is about sqrt(r); ``solution.regularization`` says so.

    Args:
        gram: [n, n] M, symmetric positive semidefinite. Give this or ``factor``.
        factor: [m, n] F with F'F = M; it keeps twice the digits of M.
        solver: "fixed_point", or "sdp" for cvxpy with Clarabel (n <= 30), the independent check.
        tolerance: relative gap at which to stop; 0 runs exactly ``max_iterations``, so that
            agents who solve for themselves do the same work.
        max_iterations: most evaluations an attempt.
        regularization: r, used only where the infimum is not attained.
        max_variance: largest allowed variance, in units of independent noise's (> 1). When the
            design exceeds it, r is raised until it does not.
        warm_start: [n] multipliers of a similar problem.
        pad_to: solve inside a matrix of this size, so that one compilation serves several n.
        device: the JAX device that climbs; None is JAX's default.

    Returns:
        The design and its certificate.

    Raises:
        ValueError: for a matrix that is not symmetric positive semidefinite or is zero, for a
            bad option, or when the solver cannot make a positive definite P.

    Reference:
        Rodio, Chen and Larsson, "Whisper D-SGD", eq. (10); Denisov et al. 2022.

    Example:
        >>> import numpy as np
        >>> from dpjax.mechanism.factorization import minimize_trace
        >>> solution = minimize_trace(np.eye(6) + 1.0)
        >>> round(solution.value, 4), solution.gap < 1e-8
        (9.7429, True)
    """
    _validate.one_of("solver", solver, ("fixed_point", "sdp"))
    root = _root(gram, factor)
    # What bounds refer to: what was computed from it is rounded.
    if gram is None:
        problem = {"factor": np.asarray(factor, np.float64)}
    else:
        problem = {"gram": np.asarray(gram, np.float64)}
    n = root.shape[1]
    remedy = "give 0 or a small number above"
    tolerance = _validate.number("tolerance", tolerance, remedy=remedy, holds=lambda x: x >= 0)
    max_iterations = _validate.integer("max_iterations", max_iterations)
    regularization = _validate.positive("regularization", regularization)
    limit = max_variance
    if limit is not None:
        remedy = "give a ratio above 1"
        limit = _validate.number("max_variance", limit, remedy=remedy, holds=lambda x: x > 1)
    if solver == "sdp":
        if limit is not None:
            raise ValueError('max_variance needs solver="fixed_point"; leave it out')
        covariance, multipliers = _solve_sdp(root.T @ root, max(tolerance, 1e-12))
        precision = certificate.unit_diagonal(inv((covariance + covariance.T) / 2.0))
        exact = _certified(root, problem, precision, multipliers, 0, False, 0.0)
        if exact is None:
            raise ValueError(
                'gram leaves Clarabel with a singular precision; use solver="fixed_point"'
            )
        return replace(exact, converged=exact.value <= exact.lower_bound * (1.0 + 1e-6))
    # One size for several problems compiles the solver once.
    size = n if pad_to is None else _validate.integer("pad_to", pad_to, minimum=n)
    if warm_start is None:
        start = np.sqrt((root**2).sum(axis=0))
    else:
        start = _validate.finite_array("warm_start", warm_start, ndim=1)
        if start.shape != (n,) or start.min() < 0 or not start.any():
            raise ValueError(
                f"warm_start has shape {start.shape} and least entry {start.min()}; give {n} "
                "multipliers, none below 0 and not all 0"
            )
    start = _revived(start)

    def attempt(r: float, start: Vector, spent: int) -> Solution | None:
        regular = regularized(root, r)
        with double_precision():
            placed = jax.device_put(_pad(regular, np.log(start), size), device)
            state = fixed_point.climb(*placed, tolerance, max_iterations)
            multipliers = np.exp(np.asarray(state.best_x)[:n])
            converged = float(state.best_gap) <= (tolerance or 1e-9)
            spent += int(state.iterations)
        precision = certificate.precision_of(regular, multipliers)
        return _certified(root, problem, precision, multipliers, spent, converged, r)

    plain = attempt(0.0, start, 0)
    solution = plain
    # The optimum is not attained, or P is singular: add a multiple of the identity.
    if solution is None or not solution.gap <= _ATTAINED:
        spent = 0 if plain is None else plain.iterations
        solution = _better(plain, attempt(regularization, start, spent))
    if limit is None or solution.variance_ratio <= limit:
        return solution
    return _within(limit, attempt, solution, np.log(regularization))


def _within(
    limit: float, attempt: Callable[..., Solution | None], solution: Solution, low: float
) -> Solution:
    """The solution of the least regularization, from exp(low) on, that keeps the variance."""
    high = np.log(1e6)
    best = None
    for _ in range(_BISECTIONS):
        # In the logarithm, as the regularization spans orders of magnitude.
        middle = (low + high) / 2.0
        near = best or solution
        trial = attempt(float(np.exp(middle)), _revived(near.multipliers), near.iterations)
        if trial is not None and trial.variance_ratio <= limit:
            best = trial
            high = middle
            # Near enough: noise is least at the limit.
            if trial.variance_ratio >= 0.999 * limit:
                break
        else:
            low = middle
    if best is None:
        raise ValueError(f"max_variance is {limit!r}, too close to 1; raise it")
    return best


def factor_of(gram: SquareMatrix, name: str = "gram") -> SquareMatrix:
    """Return F with F'F = ``gram``; ValueError unless it is symmetric positive semidefinite."""
    gram = _validate.symmetric(name, gram)
    values, vectors = certificate.eigen(gram)
    # Rounding leaves eigenvalues of a semidefinite matrix a little below 0.
    if values[0] < -1e-10 * np.abs(gram).max():
        raise ValueError(
            f"{name} has the eigenvalue {float(values[0])!r}; give a positive semidefinite matrix"
        )
    return np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T


def _root(gram: SquareMatrix | None, factor: Factor | None) -> Factor:
    if (gram is None) == (factor is None):
        raise ValueError("gram and factor: give exactly one of them")
    root = factor_of(gram) if gram is not None else _validate.finite_array("factor", factor, ndim=2)
    if not root.any():
        raise ValueError("gram is zero; every covariance costs nothing: give a nonzero matrix")
    if root.shape[0] > root.shape[1]:
        root = compressed(root)
    return root


def compressed(*factors: Factor) -> Factor:
    """Return F with F'F the sum of F_k'F_k, and as few rows as columns.

    Orthogonal transformations keep the digits that the products would halve.
    """
    return np.asarray(qr(np.concatenate(factors), mode="r"))


def _revived(multipliers: Vector) -> Vector:
    """Return positive multipliers: one at 0 could never rise again."""
    return np.maximum(multipliers, 1e-8 * multipliers.max())


def regularized(root: Factor, r: float) -> Factor:
    """Return a factor of M + r tr(M)/n I, M = F'F."""
    if r == 0.0:
        return root
    n = root.shape[1]
    # tr(M) is the sum of squares of F.
    identity = np.sqrt(r * np.sum(root**2) / n) * np.eye(n)
    return compressed(root, identity)


def _pad(root: Factor, log_multipliers: Vector, size: int) -> tuple[SquareMatrix, Vector]:
    """Return a square factor of ``size``, the new entries uncoupled and solved from the start."""
    m, n = root.shape
    padded = np.zeros((size, size))
    padded[:m, :n] = root
    # An uncoupled entry with gram c has l = c at the optimum; a small c leaves the gap alone.
    small = 1e-3 * np.sum(root**2) / n
    padded[range(n, size), range(n, size)] = np.sqrt(small)
    return padded, np.concatenate([log_multipliers, np.full(size - n, np.log(small))])


def _certified(
    root: Factor,
    problem: dict[str, np.ndarray],
    precision: SquareMatrix,
    multipliers: Vector,
    iterations: int,
    converged: bool,
    r: float,
) -> Solution | None:
    """The solution of a precision and multipliers, for M as given; None if it is singular."""
    certified = certificate.certify(root, precision)
    if certified is None:
        return None
    bound, weights = certificate.lower_bound(multipliers, **problem)
    # Rounded up also where a rounded factor of M was certified.
    value = max(certified.value, certificate.upper_trace(certified.covariance, **problem))
    precision, covariance, _, ratio = certified
    return Solution(
        precision, covariance, weights, value, bound, iterations, converged, r, variance_ratio=ratio
    )


def _better(plain: Solution | None, regularized: Solution | None) -> Solution:
    """Return the regularised attempt, unless the plain one only lacked iterations."""
    if regularized is None and plain is None:
        raise ValueError("regularization is too small for this matrix; raise it (say to 1e-8)")
    if regularized is None or plain is None:
        return plain or regularized  # type: ignore[return-value]
    unfinished = not plain.converged and plain.value <= regularized.value
    return plain if unfinished else regularized


def _solve_sdp(gram: SquareMatrix, tolerance: float) -> tuple[SquareMatrix, Vector]:
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
    if n > _LARGEST_SDP:
        raise ValueError(
            f'gram has n={n}; solver="sdp" is for n <= {_LARGEST_SDP} (use solver="fixed_point")'
        )
    try:
        importlib.import_module("clarabel")
        cp: Any = importlib.import_module("cvxpy")
    except ImportError:
        raise ValueError(
            "cvxpy or clarabel is not installed, and semidefinite programs need both; "
            'pip install cvxpy clarabel (designs themselves do not: solver="fixed_point")'
        ) from None
    scale = np.trace(gram) / n
    covariance = cp.Variable((n, n), symmetric=True)
    columns = np.split(np.eye(n), n, axis=1)
    blocks = [cp.bmat([[covariance, e], [e.T, np.ones((1, 1))]]) >> 0 for e in columns]
    problem = cp.Problem(cp.Minimize(cp.trace((gram / scale) @ covariance)), blocks)
    limits = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), tolerance)
    try:
        with warnings.catch_warnings():
            # "Solution may be inaccurate": the caller's certificate says how inaccurate.
            warnings.simplefilter("ignore", UserWarning)
            problem.solve(solver=cp.CLARABEL, **limits)
    except cp.error.SolverError as error:
        raise ValueError(f'gram defeats Clarabel ({error}); use solver="fixed_point"') from None
    if covariance.value is None:
        raise ValueError(
            f'gram leaves Clarabel {problem.status}; use solver="fixed_point", which bounds '
            f"problems whose infimum is not attained"
        )
    # Only relative sizes of the multipliers matter to the caller.
    multipliers = np.array([np.asarray(block.dual_value)[n, n] for block in blocks])
    return np.asarray(covariance.value), np.maximum(multipliers, 0.0) * scale
