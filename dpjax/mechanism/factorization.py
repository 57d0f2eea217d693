"""min tr(M P^-1) over P > 0 with diag(P) <= 1: the one problem behind every noise design.

Stationarity gives P L P = M with L = diag(l) the multipliers; the fixed point l_i <- l_i P_ii
climbs the concave dual, every iterate gives a feasible P and a lower bound, and the gap between
the two is the certificate.
"""

import importlib
import os
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from dpjax import _validate
from dpjax._numerics import double_precision
from dpjax.mechanism import certificate, fixed_point, store

__all__ = ["Solution", "minimize_trace"]

_EPS = float(np.finfo(np.float64).eps)
# A larger gap without regularisation means that the infimum is not attained (or that rounding
# decides which directions W kills); slack constraints leave up to 1e-7.
_ATTAINED = 3e-7
_BISECTIONS = 40
LARGEST_SDP = 30
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
    """

    precision: Float[np.ndarray, "n n"]
    covariance: Float[np.ndarray, "n n"]
    multipliers: Float[np.ndarray, " n"]
    value: float
    lower_bound: float
    iterations: int
    converged: bool
    regularization: float
    variance_ratio: float

    @property
    def gap(self) -> float:
        """Relative duality gap, value / lower_bound - 1: an upper bound on the excess."""
        return self.value / self.lower_bound - 1.0 if self.lower_bound > 0 else np.inf

    @property
    def attained(self) -> bool:
        """Whether the design solves the problem itself rather than its regularised twin."""
        return self.regularization == 0.0

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the solution to an npz file (complete or not at all) and return its path."""
        content = asdict(self)
        arrays = {name: content.pop(name) for name in _ARRAYS}
        return store.write(path, "solution", arrays, content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Solution":
        """Return the solution saved at ``path``; ValueError for a damaged or foreign file."""
        arrays, content = store.read(path, "solution")
        if {*arrays, *content} != {field.name for field in fields(cls)}:
            raise ValueError(f"path is {str(path)!r}, which lacks fields; make it again")
        return cls(**arrays, **content)


def minimize_trace(
    gram: Float[np.ndarray, "n n"] | None = None,
    *,
    factor: Float[np.ndarray, "m n"] | None = None,
    solver: Literal["fixed_point", "sdp"] = "fixed_point",
    tolerance: float = 1e-9,
    max_iterations: int = 1000,
    regularization: float = 1e-9,
    max_variance: float | None = None,
    warm_start: Float[np.ndarray, " n"] | None = None,
    pad_to: int | None = None,
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
    problem = _Given(gram, factor)
    n = root.shape[1]
    tolerance = _tolerance(tolerance)
    limit_gap = tolerance or 1e-9
    max_iterations = _validate.integer("max_iterations", max_iterations)
    regularization = _validate.positive("regularization", regularization)
    limit = None if max_variance is None else _validate.number("max_variance", max_variance)
    if limit is not None and limit <= 1:
        raise ValueError(f"max_variance is {max_variance!r}; give a ratio above 1")
    if solver == "sdp":
        return _by_sdp(root, problem, tolerance, limit)
    size = n if pad_to is None else _validate.integer("pad_to", pad_to, least=n)
    start = _start(root, warm_start)

    def attempt(r: float, start: Float[np.ndarray, " n"], spent: int) -> Solution | None:
        climbed, log_multipliers = _pad(_regularized(root, r), np.log(start), size)
        with double_precision():
            state = fixed_point.climb(climbed, log_multipliers, tolerance, max_iterations)
            x, gap, iterations = (
                np.asarray(state.best_x),
                float(state.best_gap),
                int(state.iterations),
            )
        return _finish(root, problem, r, np.exp(x[:n]), gap <= limit_gap, spent + iterations)

    plain = attempt(0.0, start, 0)
    solution = plain
    if solution is None or not _closed(solution):
        spent = 0 if plain is None else plain.iterations
        solution = _better(plain, attempt(regularization, start, spent))
    if limit is None or solution.variance_ratio <= limit:
        return solution
    low, high, best = np.log(regularization), np.log(1e6), None
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        near = _revived((best or solution).multipliers)
        trial = attempt(float(np.exp(middle)), near, (best or solution).iterations)
        if trial is not None and trial.variance_ratio <= limit:
            best, high = trial, middle
            if trial.variance_ratio >= 0.999 * limit:
                break
        else:
            low = middle
    if best is None:
        raise ValueError(f"max_variance is {max_variance!r}, too close to 1; raise it")
    return best


class _Given(NamedTuple):
    """M as it was given, which bounds refer to: what was computed from it is rounded."""

    gram: Float[np.ndarray, "n n"] | None
    factor: Float[np.ndarray, "m n"] | None

    def lower_bound(self, multipliers: Float[np.ndarray, " n"]) -> tuple[float, np.ndarray]:
        if self.factor is not None:
            return certificate.lower_bound(np.asarray(self.factor, np.float64), multipliers)
        gram = np.asarray(self.gram, np.float64)
        return certificate.lower_bound(gram, multipliers, gram=gram)

    def value(self, certified: certificate.Certificate) -> float:
        """tr(M P^-1), rounded up: also where a rounded factor of M was certified."""
        problem = {
            name: None if each is None else np.asarray(each, np.float64)
            for name, each in self._asdict().items()
        }
        return max(certified.value, certificate.upper_trace(certified.covariance, **problem))


def factor_of(gram: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """Return F with F'F = ``gram``; ValueError unless it is symmetric positive semidefinite."""
    gram = _validate.square("gram", gram)
    scale = float(np.abs(gram).max())
    if np.abs(gram - gram.T).max() > 1e-10 * scale:
        raise ValueError("gram is not symmetric; give (gram + gram.T) / 2")
    values, vectors = np.linalg.eigh((gram + gram.T) / 2.0)
    if values[0] < -1e-10 * scale:
        raise ValueError(
            f"gram has the eigenvalue {float(values[0])!r}; give a positive semidefinite matrix"
        )
    return np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T


def _root(
    gram: Float[np.ndarray, "n n"] | None, factor: Float[np.ndarray, "m n"] | None
) -> Float[np.ndarray, "m n"]:
    if (gram is None) == (factor is None):
        raise ValueError("gram and factor: give exactly one of them")
    if gram is not None:
        root = factor_of(gram)
    else:
        root = _validate.finite_array("factor", factor, ndim=2)
    if not root.any():
        raise ValueError("gram is zero; every covariance costs nothing: give a nonzero matrix")
    if root.shape[0] > root.shape[1]:
        root = np.asarray(np.linalg.qr(root, mode="r"))
    return root


def _tolerance(tolerance: float) -> float:
    tolerance = _validate.number("tolerance", tolerance)
    if tolerance < 0:
        raise ValueError(f"tolerance is {tolerance!r}; give 0 or a small number above")
    return tolerance


def _start(
    root: Float[np.ndarray, "m n"], warm_start: Float[np.ndarray, " n"] | None
) -> Float[np.ndarray, " n"]:
    if warm_start is None:
        norms = np.sqrt((root**2).sum(axis=0))
        return np.maximum(norms, 1e-8 * norms.max())
    start = _validate.finite_array("warm_start", warm_start, ndim=1)
    if start.shape != (root.shape[1],) or start.min() < 0 or not start.any():
        raise ValueError(
            f"warm_start has shape {start.shape} and least entry {start.min()}; give "
            f"{root.shape[1]} multipliers, none below 0 and not all 0"
        )
    return _revived(start)


def _revived(multipliers: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Return positive multipliers: one at 0 could never rise again."""
    return np.maximum(multipliers, 1e-8 * multipliers.max())


def _regularized(root: Float[np.ndarray, "m n"], r: float) -> Float[np.ndarray, "m n"]:
    if r == 0.0:
        return root
    n = root.shape[1]
    identity = np.sqrt(r * float(np.sum(root**2)) / n) * np.eye(n)
    return np.asarray(np.linalg.qr(np.concatenate([root, identity]), mode="r"))


def _pad(
    root: Float[np.ndarray, "m n"], log_multipliers: Float[np.ndarray, " n"], size: int
) -> tuple[Float[np.ndarray, "s s"], Float[np.ndarray, " s"]]:
    """Return a square factor of ``size``, the new entries uncoupled and solved from the start."""
    m, n = root.shape
    padded = np.zeros((size, size))
    padded[:m, :n] = root
    # An uncoupled entry with gram c has l = c at the optimum; a small c leaves the gap alone.
    small = 1e-3 * float(np.sum(root**2)) / n
    padded[range(n, size), range(n, size)] = np.sqrt(small)
    return padded, np.concatenate([log_multipliers, np.full(size - n, np.log(small))])


def _finish(
    root: Float[np.ndarray, "m n"],
    problem: _Given,
    r: float,
    multipliers: Float[np.ndarray, " n"],
    converged: bool,
    iterations: int,
) -> Solution | None:
    precision = certificate.precision_of(_regularized(root, r), multipliers)
    certified = certificate.certify(root, precision)
    if certified is None:
        return None
    bound, chosen = problem.lower_bound(multipliers)
    return Solution(
        precision=certified.precision,
        covariance=certified.covariance,
        multipliers=chosen,
        value=problem.value(certified),
        lower_bound=bound,
        iterations=iterations,
        converged=bool(converged),
        regularization=r,
        variance_ratio=certified.variance_ratio,
    )


def _closed(solution: Solution | None) -> bool:
    return solution is not None and solution.gap <= _ATTAINED


def _better(plain: Solution | None, regularized: Solution | None) -> Solution:
    """Return the regularised attempt, unless the plain one only lacked iterations."""
    if regularized is None and plain is None:
        raise ValueError("regularization is too small for this matrix; raise it (say to 1e-8)")
    if regularized is None or plain is None:
        return plain or regularized  # type: ignore[return-value]
    unfinished = not plain.converged and plain.value <= regularized.value
    return plain if unfinished else regularized


def _by_sdp(
    root: Float[np.ndarray, "m n"], problem: _Given, tolerance: float, limit: float | None
) -> Solution:
    if limit is not None:
        raise ValueError('max_variance needs solver="fixed_point"; leave it out')
    covariance, multipliers = solve_sdp(root.T @ root, max(tolerance, 1e-12))
    precision = np.linalg.inv((covariance + covariance.T) / 2.0)
    precision = (precision + precision.T) / (2.0 * precision.diagonal().max())
    np.fill_diagonal(precision, 1.0)
    certified = certificate.certify(root, precision)
    if certified is None:
        raise ValueError('gram leaves Clarabel with a singular precision; use solver="fixed_point"')
    bound, chosen = problem.lower_bound(multipliers)
    return Solution(
        precision=certified.precision,
        covariance=certified.covariance,
        multipliers=chosen,
        value=problem.value(certified),
        lower_bound=bound,
        iterations=0,
        converged=problem.value(certified) <= bound * (1.0 + 1e-6),
        regularization=0.0,
        variance_ratio=certified.variance_ratio,
    )


def sdp_library() -> Any:
    """Return cvxpy, with Clarabel installed; ValueError with the remedy otherwise."""
    try:
        importlib.import_module("clarabel")
        return importlib.import_module("cvxpy")
    except ImportError:
        raise ValueError(
            "cvxpy or clarabel is not installed, and semidefinite programs need both; "
            'pip install cvxpy clarabel (designs themselves do not: solver="fixed_point")'
        ) from None


def solve_sdp(
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
    if n > LARGEST_SDP:
        raise ValueError(
            f'gram has n={n}; solver="sdp" is for n <= {LARGEST_SDP} (use solver="fixed_point")'
        )
    cp = sdp_library()
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
