"""min tr(M P^-1) over P > 0 with diag(P) <= 1: the one problem behind every noise design.

Stationarity gives P L P = M with L = diag(l) the multipliers; the fixed point l_i <- l_i P_ii
climbs the concave dual, every iterate gives a feasible P and a lower bound, and the gap between
the two is the certificate.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from dpjax import _validate
from dpjax.mechanism import certificate, fixed_point, sdp
from dpjax.mechanism.solution import Solution
from dpjax.mechanism.x64 import double_precision

__all__ = ["Solution", "minimize_trace", "minimize_traces"]

_EPS = float(np.finfo(np.float64).eps)
# A larger gap without regularisation means that the infimum is not attained (or that rounding
# decides which directions W kills); slack constraints leave up to 1e-7.
_ATTAINED = 3e-7
_BISECTIONS = 40


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


def minimize_traces(
    grams: Float[np.ndarray, "b n n"] | None = None,
    *,
    factors: Float[np.ndarray, "b m n"] | None = None,
    tolerance: float = 1e-9,
    max_iterations: int = 1000,
    regularization: float = 1e-9,
) -> list[Solution]:
    """Solve many problems of one size in one vmapped call; see :func:`minimize_trace`.

    Args:
        grams: [B, n, n]. Give this or ``factors``.
        factors: [B, m, n].
        tolerance: relative gap at which each stops.
        max_iterations: most evaluations each.
        regularization: r, where an infimum is not attained.

    Returns:
        One solution a problem, in order.

    Raises:
        ValueError: as for :func:`minimize_trace`.
    """
    stack = grams if factors is None else factors
    if stack is None or np.ndim(stack) != 3 or (grams is not None and factors is not None):
        raise ValueError("grams and factors: give one of them, as an array [B, n, n]")
    problems = [_Given(a, None) if factors is None else _Given(None, a) for a in np.asarray(stack)]
    roots = [_root(*problem) for problem in problems]
    n = roots[0].shape[1]
    tolerance = _tolerance(tolerance)
    limit_gap = tolerance or 1e-9
    max_iterations = _validate.integer("max_iterations", max_iterations)
    regularization = _validate.positive("regularization", regularization)

    def attempt(
        r: float, starts: Sequence[Float[np.ndarray, " n"]], spent: Sequence[int]
    ) -> list[Solution | None]:
        stacked = np.stack([_pad(_regularized(root, r), np.zeros(n), n)[0] for root in roots])
        logs = np.log(np.stack(starts))
        with double_precision():
            states = fixed_point.climb_batch(stacked, logs, tolerance, max_iterations)
            x = np.asarray(states.best_x)
            gaps, counts = np.asarray(states.best_gap), np.asarray(states.iterations)
        return [
            _finish(
                root,
                problems[k],
                r,
                np.exp(x[k]),
                bool(gaps[k] <= limit_gap),
                spent[k] + int(counts[k]),
            )
            for k, root in enumerate(roots)
        ]

    starts = [_start(root, None) for root in roots]
    plain = attempt(0.0, starts, [0] * len(roots))
    solutions = plain
    if not all(_closed(solution) for solution in plain):
        # The whole batch runs again: a part of it would have another shape and compile anew.
        again = attempt(regularization, starts, [s.iterations if s else 0 for s in plain])
        solutions = [
            first if _closed(first) else _better(first, second)
            for first, second in zip(plain, again, strict=True)
        ]
    return [solution for solution in solutions if solution is not None]


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
    covariance, multipliers = sdp.solve(root.T @ root, max(tolerance, 1e-12))
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
