"""Designs of the noise over rounds: strategies C, noise C^-1 z at each agent alone.

Guarantee: noise of standard deviation sigma * `sensitivity(C, participation)` at clip 1 gives
1/sigma-GDP against an outsider who sees every message of every round. It is for the zero-out of one
record in every round of its pattern; replacing it doubles the sensitivity. This also holds when
gradients depend on earlier messages. All designs return strategies of sensitivity 1 for the given
participation, and for no other, except `identity` and `anti_pgd`, which are not scaled.

`sensitivity` is an upper bound of ||C (G - G')||_F, rounding included. G and G' are two gradient
sequences that differ in the rounds of one pattern, by vectors of norm at most 1.

The optimum is min tr(H P^-1) with P = C'C, where a record comes back every epoch: with T = k b the
patterns are the b residue classes. Requiring P_st = 0 between two rounds of a class loses nothing.
At that optimum V = P^-1 H P^-1 is zero between classes, and the diagonal of each class's block V_c
has one value l. As V_c >= 0, its other entries are at most l. These are the optimality conditions
of the problem with sum |P_st| <= 1 over each class, and of the one with the exact sensitivity. The
dual is over the blocks,

    max  tr((V^1/2 H V^1/2)^1/2)^2 / sum_c l_c,      V_c >= 0 with diagonal l_c,

and V_c <- V_c^1/2 P_c V_c^1/2 climbs it: for k = 1 the fixed point l <- l P_ii of
`mechanism.factorization`. Every iterate gives a feasible P and a lower bound.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from numpy.linalg import LinAlgError, cholesky, lstsq, norm

from dpjax import _validate
from dpjax._numerics import double_precision, one_lapack_thread
from dpjax.mechanism import certificate, workload
from dpjax.mechanism import strategy as strategy_
from dpjax.mechanism.certificate import EPS, BlockStack, Factor, Vector
from dpjax.mechanism.factorization import Device, factor_of, minimize_trace, regularized
from dpjax.mechanism.participation import Participation, check_participation
from dpjax.mechanism.strategy import Strategy
from dpjax.mechanism.workload import Gram
from dpjax.topology.mixing import DenseMixing, SquareMatrix

__all__ = [
    "TemporalSolution",
    "anti_pgd",
    "identity",
    "mafalda",
    "objective",
    "prefix_sum",
    "sensitivity",
    "solve",
    "strategy_of",
    "workload_gram",
]

workload_gram = workload.gram

_WINDOW = 8
_JUMP = 6.0  # an accelerated step longer than this in any logarithm is not trusted
_FALL = 1e-12  # a relative fall of the dual below this is rounding
_PATIENCE = 60  # iterations without progress, after which rounding has the last word
_FLOOR = 1e-13  # least eigenvalue of V kept, relative to the largest
_LEAST_LEVEL = 1e-8  # of a class's multiplier, relative to the largest
_DELICATE = 1e-8
_SINGULAR = 1e-10  # least over largest eigenvalue of H
# Shares of H's mean diagonal, added in turn where H is singular: the climb is slow along V's
# vanishing directions unless it comes from a problem that is further from singular.
_RIDGES = (1e-4, 1e-6, 1e-8)
_COMPILED = 256  # rounds below which compiling takes longer than NumPy takes to solve
_COARSE = 512  # rounds beyond which the start is the optimum of a quarter of the horizon
_LONG = 2048  # rounds beyond which eigenvalues are computed once an iteration, and nowhere else
_NEAR = 1e-6  # gap of a shorter horizon's optimum, from which a longer one starts


class TemporalSolution(NamedTuple):
    """A strategy of sensitivity 1 with the certificate of how good it is.

    Attributes:
        strategy: [T, T] C, lower triangular with a positive diagonal, of sensitivity 1 (below
            it by rounding's margin).
        value: tr(H (C'C)^-1), the noise energy at sensitivity 1.
        lower_bound: no strategy of sensitivity 1 has a smaller value, rounded down.
        iterations: evaluations of the fixed-point map.
        converged: whether the gap met the tolerance.

    Example:
        >>> import numpy as np
        >>> from dpjax.mechanism import temporal
        >>> from dpjax.mechanism.participation import Participation
        >>> temporal.solve(np.eye(4), Participation(4, 1, 4)).converged
        True
    """

    strategy: Strategy
    value: float
    lower_bound: float
    iterations: int
    converged: bool

    @property
    def gap(self) -> float:
        """Relative duality gap, value / lower_bound - 1: an upper bound on the excess."""
        return certificate.relative_gap(self.value, self.lower_bound)


def identity(rounds: int) -> Strategy:
    """Return C = I: fresh noise in every round (DP-D-SGD). Sensitivity sqrt(epochs).

    Args:
        rounds: T.

    Raises:
        ValueError: for rounds below 1, or more than memory holds.

    Example:
        >>> from dpjax.mechanism import temporal
        >>> temporal.identity(2).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    _validate.rounds_in_memory(rounds)
    return np.eye(rounds)


def anti_pgd(rounds: int) -> Strategy:
    """Return C = lower triangular ones: the noise of round t is z_t - z_{t-1} (Anti-PGD).

    Not scaled: its sensitivity grows with the rounds that are left, sqrt(T) for one appearance.

    Args:
        rounds: T.

    Raises:
        ValueError: for rounds below 1, or more than memory holds.

    Example:
        >>> from dpjax.mechanism import temporal
        >>> temporal.anti_pgd(3)
        array([[1., 0., 0.],
               [1., 1., 0.],
               [1., 1., 1.]])
    """
    _validate.rounds_in_memory(rounds)
    return np.tri(rounds)


def prefix_sum(participation: Participation, *, device: Device = None) -> Strategy:
    """Return the optimum for running sums, one trusted server's workload (D-MF).

    Args:
        participation: when a record appears; T = k b, or k = 1.
        device: as for :func:`solve`.

    Returns:
        [T, T] C, lower triangular with a positive diagonal, of sensitivity 1.

    Raises:
        ValueError: for another participation.

    Reference:
        Denisov et al. 2022; Choquette-Choo et al. 2022.

    Example:
        >>> from dpjax.mechanism import temporal
        >>> from dpjax.mechanism.participation import Participation
        >>> temporal.prefix_sum(Participation(4, 2, 2)).round(3)
        array([[ 0.667,  0.   ,  0.   ,  0.   ],
               [ 0.38 ,  0.705,  0.   ,  0.   ],
               [-0.017,  0.275,  0.606,  0.   ],
               [ 0.05 ,  0.   ,  0.2  ,  0.654]])
    """
    gram = workload.prefix_sum_gram(check_participation(participation).rounds)
    return solve(gram, participation, device=device).strategy


def mafalda(
    mixing: DenseMixing, participation: Participation, *, device: Device = None
) -> Strategy:
    """Return the optimum for decentralized SGD with this mixing matrix (MAFALDA-SGD).

    min sensitivity(C)^2 ||L C^-1||_F^2,  L'L = H. It and its certificate, a lower bound on
    every strategy, are :func:`solve` of :func:`workload_gram`.

    Args:
        mixing: [n, n] W, or a schedule [P, n, n].
        participation: when a record appears; T = k b, or k = 1.
        device: as for :func:`solve`.

    Returns:
        [T, T] C, lower triangular with a positive diagonal, of sensitivity 1.

    Raises:
        ValueError: for another participation or a bad mixing matrix.

    Reference:
        "MAFALDA-SGD", eq. (11). Its Algorithm 1 leaves the sensitivity out of the noise's
        standard deviation, and its code factorises P with the wrong flip.

    Example:
        >>> from dpjax.mechanism import temporal
        >>> from dpjax.mechanism.participation import Participation
        >>> from dpjax.topology import graphs, mixing
        >>> weights = mixing.metropolis_hastings(graphs.ring(6))
        >>> temporal.mafalda(weights, Participation(4, 2, 2)).round(3)
        array([[ 0.684,  0.   ,  0.   ,  0.   ],
               [ 0.313,  0.714,  0.   ,  0.   ],
               [-0.012,  0.232,  0.634,  0.   ],
               [ 0.044,  0.   ,  0.173,  0.66 ]])
    """
    gram = workload.gram(mixing, check_participation(participation).rounds)
    return solve(gram, participation, device=device).strategy


def strategy_of(precision: SquareMatrix) -> Strategy:
    """Return the lower triangular C with C'C = P and a positive diagonal: J chol(J P J)' J.

    J reverses the rounds. numpy's Cholesky factor L has L L' = P, another matrix.

    Args:
        precision: [T, T] P, symmetric positive definite.

    Raises:
        ValueError: when P is not symmetric positive definite.

    Example:
        >>> import numpy as np
        >>> from dpjax.mechanism import temporal
        >>> temporal.strategy_of(np.diag([4.0, 9.0])).tolist()
        [[2.0, 0.0], [0.0, 3.0]]
    """
    try:
        # J P J = L L' with J the reversal, so that P = (J L' J)' (J L' J).
        factor = cholesky(_validate.symmetric("precision", precision)[::-1, ::-1])
    except LinAlgError:
        raise ValueError("precision is not positive definite; give one that is") from None
    return np.ascontiguousarray(factor.T[::-1, ::-1])


def objective(
    strategy: Strategy,
    gram: Gram,
    participation: Participation,
) -> float:
    """Return sensitivity(C)^2 tr(H (C'C)^-1), the same for every scale of C.

    Args:
        strategy: [T, T] C, lower triangular and invertible.
        gram: [T, T] H, symmetric.
        participation: when a record appears.

    Raises:
        ValueError: for shapes that do not fit, a singular strategy or one that is not lower
            triangular, or a gram that is not symmetric.

    Reference:
        "MAFALDA-SGD", eq. (11).

    Example:
        >>> import numpy as np
        >>> from dpjax.mechanism import temporal
        >>> from dpjax.mechanism.participation import Participation
        >>> round(temporal.objective(5 * np.eye(2), np.eye(2), Participation(2, 1, 2)), 6)
        2.0
    """
    matrix = _validate.square("strategy", strategy)
    if not strategy_.is_triangular(matrix):
        raise ValueError(
            "strategy has entries above its diagonal; give a lower triangular C first, then the "
            "gram"
        )
    gram = _validate.symmetric("gram", gram)
    if gram.shape != matrix.shape:
        raise ValueError(f"gram has shape {gram.shape}; give {matrix.shape}, as the strategy's")
    bound = sensitivity(matrix, participation)
    try:
        inverse = strategy_.inverse_of(matrix)
    except LinAlgError:
        raise ValueError("strategy is singular; give an invertible matrix") from None
    # tr(C^-T H C^-1) without its off-diagonal entries.
    energy = float(np.sum((gram @ inverse) * inverse))
    return bound**2 * energy


def solve(
    gram: Gram,
    participation: Participation,
    *,
    factor: Factor | None = None,
    tolerance: float | None = None,
    max_iterations: int = 200,
    device: Device = None,
) -> TemporalSolution:
    """Minimise sensitivity(C)^2 tr(H (C'C)^-1) over lower triangular C.

    From 256 rounds on, or where a device is given, the iteration is compiled by JAX, in float64.
    Beyond 2,048 rounds an iteration takes most of a minute on two cores, and one or two are made.

    Args:
        gram: [T, T] H, symmetric positive semidefinite (`workload.gram`). A singular one is
            solved with 1e-8 of its mean diagonal added, and `converged` is that problem's; value
            and bound refer to H itself.
        participation: when a record appears; T = k b, or k = 1.
        factor: [m, T] F with F'F = H where ``gram`` is that product as rounded; the bound then
            refers to F'F.
        tolerance: relative gap at which to stop; None is 1e-9, and 1e-2 beyond 2,048 rounds.
        max_iterations: most evaluations of the map.
        device: the JAX device that computes; None is JAX's default.

    Returns:
        The strategy, of sensitivity 1, and its certificate.

    Raises:
        ValueError: for another participation, or a gram that does not fit it, is not positive
            semidefinite, or is zero.

    Reference:
        "MAFALDA-SGD", eq. (11); Choquette-Choo et al. 2022, "Multi-epoch matrix factorization".

    Example:
        >>> import numpy as np
        >>> from dpjax.mechanism import temporal
        >>> from dpjax.mechanism.participation import Participation
        >>> solution = temporal.solve(np.tri(4).T @ np.tri(4), Participation(4, 1, 4))
        >>> solution.strategy.shape, solution.gap < 1e-6
        ((4, 4), True)
    """
    gram = _validate.square("gram", gram)
    rounds = check_participation(participation).rounds
    k = participation.epochs
    b = participation.separation
    if tolerance is None:
        tolerance = 1e-9 if rounds <= _LONG else 1e-2
    tolerance = _validate.positive("tolerance", tolerance)
    max_iterations = _validate.integer("max_iterations", max_iterations)
    if len(gram) != rounds:
        raise ValueError(f"gram has shape {gram.shape}; give [{rounds}, {rounds}], one row a round")
    # A long horizon takes the iteration of several epochs, whose start and certificate are faster.
    if k == 1 and (factor is not None or rounds <= _LONG):
        single = minimize_trace(
            gram if factor is None else None,
            factor=factor,
            tolerance=tolerance,
            max_iterations=5 * max_iterations,
            device=device,
        )
        strategy = normalized(strategy_of(single.precision), participation)
        value = objective(strategy, gram, participation)
        bound = single.lower_bound
        count = single.iterations
        return TemporalSolution(strategy, value, bound, count, single.converged)
    if k == 1:
        participation = Participation(rounds, 1, rounds)
    elif rounds != k * b:
        raise ValueError(
            f"participation is ({rounds}, {k}, {b}); the optimum over rounds is known for rounds "
            f"= epochs * separation (or one epoch): use {k * b} rounds, or change the others"
        )
    with one_lapack_thread() if _COMPILED <= rounds <= _COARSE else contextlib.nullcontext():
        return _certified(gram, participation, factor, tolerance, max_iterations, device)


def _certified(
    gram: Gram,
    participation: Participation,
    factor: Factor | None,
    tolerance: float,
    limit: int,
    device: Device,
) -> TemporalSolution:
    """The optimum of several epochs, and its certificate."""
    rounds = participation.rounds
    k = participation.epochs
    b = participation.separation
    order = _by_class(k, b)
    classes = np.ix_(order, order)
    sorted_gram = gram[classes]
    long = rounds > _LONG and factor is None
    exact = _cholesky(sorted_gram) if long else factor_of(sorted_gram)
    sorted_factor = None
    if factor is not None:
        sorted_factor = _validate.finite_array("factor", factor, ndim=2)[:, order]
    if not exact.any():
        raise ValueError("gram is zero; every strategy costs nothing: give a nonzero matrix")
    squares = np.sum(exact**2, axis=1)
    condition = 1.0 if long else squares.min() / squares.max()
    start = None
    iterations = 0
    bound = 0.0
    if condition >= _DELICATE:
        start = _coarse(gram, k, device)
    candidates: list[tuple[float, Strategy]] = []
    for ridge in _RIDGES if condition < _SINGULAR else (0.0,):
        climbed = regularized(exact, ridge)
        best, count = _climb(climbed, k, tolerance, limit, condition < _DELICATE, start, device)
        start = best.logarithm
        iterations += count
        if long:
            eigenvectors = np.asarray(best.left), np.asarray(best.roots)
            total = certificate.factored_root_trace(exact, best.half, *eigenvectors)
            bound = _dual(total, best.half)
        else:
            bound = max(bound, _lower_bound(sorted_gram, sorted_factor, best.half))
        if np.isfinite(best.gap):
            restored = np.empty(gram.shape)
            restored[classes] = np.asarray(best.precision)
            strategy = normalized(strategy_of(restored), participation)
            candidates.append((objective(strategy, gram, participation), strategy))
    if not candidates:
        raise ValueError("gram is too close to singular; add a small multiple of the identity")
    value, strategy = min(candidates, key=lambda candidate: candidate[0])
    return TemporalSolution(strategy, value, bound, iterations, bool(best.gap <= tolerance))


def _by_class(k: int, b: int) -> np.ndarray:
    """Rounds class by class: c, c + b, c + 2b, ..., for c = 0 .. b - 1."""
    return np.arange(k * b).reshape(k, b).T.ravel()


def normalized(strategy: Strategy, participation: Participation) -> Strategy:
    """Return C over its sensitivity, with a margin that keeps it at 1 in others' arithmetic."""
    margin = 1.0 + 4 * len(strategy) * EPS
    return strategy / (sensitivity(strategy, participation) * margin)


def sensitivity(strategy: Factor, participation: Participation) -> float:
    """Return an upper bound on the sensitivity of C (not squared).

    max over patterns pi of sqrt(sum_{s,t in pi} |(C'C)_st|)

    Exact where C'C is non-negative on the patterns. With negative entries the truth is a
    supremum over unit vectors, which this bounds from above and which the supremum over signs
    understates: for C'C = [[1,-.5,-.5],[-.5,1,-.5],[-.5,-.5,1]] the squares are 6 (this), 4.5
    (vectors) and 4 (signs). C = I with k participations gives sqrt(k).

    Args:
        strategy: [m, T] C, any real matrix.
        participation: when a record appears.

    Returns:
        The bound at clip 1, rounded up.

    Raises:
        ValueError: for a strategy of another number of rounds, or NaN in it.

    Reference:
        Choquette-Choo et al. 2023, eq. (5); Pillutla et al., Lemma 3.15.

    Example:
        >>> from dpjax.mechanism import temporal
        >>> from dpjax.mechanism.participation import Participation
        >>> round(float(temporal.sensitivity(temporal.anti_pgd(4), Participation(4, 1, 4))), 6)
        2.0
    """
    matrix = _validate.finite_array("strategy", strategy, ndim=2)
    rounds = check_participation(participation).rounds
    k = participation.epochs
    b = participation.separation
    if matrix.shape[1] != rounds:
        raise ValueError(
            f"strategy has shape {matrix.shape}; give one column for each of the participation's "
            f"{rounds} rounds"
        )
    # A power of two near the largest entry: squares neither vanish nor overflow.
    largest = np.abs(matrix).max(initial=0.0)
    scale = 2.0 ** int(np.clip(np.frexp(largest)[1], -1000, 1000)) if largest > 0 else 1.0
    matrix = matrix / scale
    patterns = (slice(start, start + (k - 1) * b + 1, b) for start in range(participation.starts))
    if rounds <= _LONG or participation.starts * k * k > rounds * rounds:
        gram = _products(matrix)
        energy = max(gram[pattern, pattern].sum() for pattern in patterns)
    else:
        energy = max(_products(matrix[:, pattern]).sum() for pattern in patterns)
    # Sums, products of one term and the root round as well.
    margin = 1.0 + (k**2 + 8) * EPS
    return float(np.sqrt(energy * margin)) * scale


def _products(matrix: Factor) -> Gram:
    """Return |C'C| and a bound on its rounding, which sums of one product do not have."""
    sizes = np.abs(matrix)
    support = (matrix != 0).astype(np.float64)
    # A sum of m products rounds by at most m eps of their sizes.
    terms = support.T @ support
    roundings = EPS * np.where(terms > 1, terms, 0.0)
    return np.abs(matrix.T @ matrix) + roundings * (sizes.T @ sizes)


class _Point(NamedTuple):
    """The map at one V = exp(X): its blocks, the next X without acceleration, and the bounds."""

    half: BlockStack
    logarithm: BlockStack
    plain: BlockStack
    precision: SquareMatrix
    left: SquareMatrix  # eigenvectors and roots of eigenvalues of F V F'
    roots: Vector
    dual: float
    gap: float


def _climb(
    factor: SquareMatrix,
    k: int,
    tolerance: float,
    limit: int,
    fine: bool = False,
    start: BlockStack | None = None,
    device: Device = None,
) -> tuple[_Point, int]:
    """Return the point of least gap (infinite where none was feasible) and the evaluations spent.

    Anderson's acceleration in log V; a step that lowers the dual is taken back. `fine` asks for
    singular values, which resolve twice the digits of eigenvalues at three times the cost.
    """
    norms = np.sqrt((factor**2).sum(axis=0).reshape(-1, k).sum(axis=1))
    levels = np.log(np.maximum(norms, 1e-8 * norms.max()) / norms.max())
    point = levels[:, None, None] * np.eye(k) if start is None else start
    evaluate = _evaluator(factor, fine, device)
    last = best = None
    changes: list[tuple[np.ndarray, np.ndarray]] = []
    since = count = 0
    highest = 0.0
    while count < limit and since < _PATIENCE:
        current = evaluate(point)
        count += 1
        if last is not None and not current.dual >= last.dual * (1.0 - _FALL) and changes:
            point = last.plain
            changes = []
            last = None
            since += 1
            continue
        since += 1
        # The dual may climb for long while the gap, of a P that is not feasible yet, does not.
        if current.dual > highest * (1.0 + tolerance):
            highest = current.dual
            since = 0
        if best is None or current.gap < best.gap or not np.isfinite(best.gap):
            best = current
            since = 0
        if best.gap <= tolerance:
            break
        step = current.plain - current.logarithm
        if last is not None:
            moved = current.logarithm - last.logarithm
            changes = [*changes[1 - _WINDOW :], (moved, step - (last.plain - last.logarithm))]
        last = current
        point = current.plain
        if changes:
            # The combination of past changes that cancels this step best.
            turned = np.stack([change.ravel() for _, change in changes])
            weights = lstsq(turned.T, step.ravel(), rcond=1e-12)[0]
            correction = sum(w * (x + f) for w, (x, f) in zip(weights, changes, strict=True))
            accelerated = current.plain - correction
            # Symmetric again, as rounding may have tilted it.
            if np.abs(accelerated - current.logarithm).max() <= _JUMP:
                point = (accelerated + np.swapaxes(accelerated, 1, 2)) / 2.0
            else:
                changes = []
    assert best is not None  # the first evaluation always is
    return best, count


def _coarse(gram: Gram, k: int, device: Device) -> BlockStack | None:
    """Return log V of a quarter of the horizon, stretched to all of it, where that helps.

    Gradients of the last rounds cost as those of a horizon that short: their H is a corner of H.
    """
    b = len(gram) // k
    few = b // 4
    rounds = k * few
    if len(gram) <= _COARSE or few < 2:
        return None
    order = _by_class(k, few)
    corner = gram[-rounds:, -rounds:]
    factor = _cholesky(corner[np.ix_(order, order)])
    start = _coarse(corner, k, device)
    best, _ = _climb(factor, k, _NEAR, _PATIENCE, False, start, device)
    values = best.half @ best.half
    # Classes by the logarithm of their distance from both ends, near which V bends.
    new = _logit(b)
    old = _logit(few)
    place = np.interp(new * old[-1] / new[-1], old, np.arange(few))
    below = np.minimum(place.astype(int), few - 2)
    share = (place - below)[:, None, None]
    return _apply("log", (1.0 - share) * values[below] + share * values[below + 1])


def _logit(count: int) -> Vector:
    """log(x / (1 - x)) at the midpoints of so many equal parts of [0, 1]."""
    middles = (np.arange(count) + 0.5) / count
    return np.log(middles / (1.0 - middles))


def _cholesky(gram: Gram) -> SquareMatrix:
    """The upper triangular F with F'F = H."""
    try:
        return cholesky((gram + gram.T) / 2.0).T
    except LinAlgError:
        raise ValueError(
            "gram is too close to singular; add a small multiple of the identity"
        ) from None


def _evaluator(factor: SquareMatrix, fine: bool, device: Device) -> Callable[[BlockStack], _Point]:
    """Return the map as a function of log V: NumPy's for few rounds, else JAX's on its device."""
    # Compiling takes longer than such a solve.
    if len(factor) < _COMPILED and device is None:
        return functools.partial(_evaluate, factor, fine=fine)
    with double_precision():
        placed = jax.device_put(factor, device)

    def evaluate(point: BlockStack) -> _Point:
        with double_precision():
            evaluated = _compiled(placed, jax.device_put(point, device), fine=fine)
            # The large arrays stay on the device.
            small = ("half", "logarithm", "plain", "dual", "gap")
            arrays = {name: np.asarray(getattr(evaluated, name)) for name in small}
            return evaluated._replace(**arrays)

    return evaluate


def _evaluate(factor: SquareMatrix, point: BlockStack, *, fine: bool) -> _Point:
    """The map in the arrays' own library: NumPy or JAX."""
    xp = np if isinstance(point, np.ndarray) else jnp
    scipy_ = scipy if xp is np else jax.scipy
    rounds = len(factor)
    b, k, _ = point.shape
    blocks = _constant_diagonal(_apply("exp", point))
    levels = blocks[:, 0, 0]
    half = _apply("sqrt", blocks)
    weighted = xp.matmul(factor.reshape(rounds, b, k).transpose(1, 0, 2), half)
    weighted = weighted.transpose(1, 0, 2).reshape(rounds, rounds)
    if fine:
        left, roots, _ = xp.linalg.svd(weighted)
        roots = xp.maximum(roots, rounds * EPS * roots[0])
    else:
        values, left = xp.linalg.eigh(weighted @ weighted.T)
        roots = xp.sqrt(xp.maximum(values, rounds * EPS * values[-1]))
    # P = F' U e^-1 U' F for F V^1/2 = U e ..., so that P V P = F'F.
    rotated = (left.T @ factor) / xp.sqrt(roots)[:, None]
    precision = rotated.T @ rotated
    classes = np.arange(b)
    diagonal_blocks = precision.reshape(b, k, b, k)[classes, :, classes, :]
    diagonal = xp.einsum("cii->ci", diagonal_blocks)
    sums = diagonal.sum(axis=1)
    dual = roots.sum() ** 2 / levels.sum()

    # The next V: V^1/2 P V^1/2 in the scale where P has a unit diagonal, its diagonal made even.
    scale = xp.sqrt(diagonal)
    outer = scale[:, :, None] * scale[:, None, :]
    middle = _apply("sqrt", blocks * outer)
    moved = _constant_diagonal(middle @ (diagonal_blocks / outer) @ middle / outer)
    target = levels * sums
    target = xp.maximum(target, _LEAST_LEVEL * target.max())
    moved = moved * (target * levels.sum() / (target.sum() * moved[:, 0, 0]))[:, None, None]

    # Feasible: nothing between the rounds of a class, and sum 1 along its diagonal.
    index = xp.arange(rounds)
    paired = (index[:, None] // k == index // k) & (index[:, None] != index)
    shrink = xp.repeat(1.0 / xp.sqrt(sums), k)
    precision = xp.where(paired, 0.0, precision) * (shrink[:, None] * shrink)
    try:
        lower = xp.linalg.cholesky(precision)
        whitened = scipy_.linalg.solve_triangular(lower, factor.T, lower=True)
        gap = xp.nan_to_num(xp.sum(whitened**2) / dual - 1.0, nan=np.inf)
    except LinAlgError:
        gap = np.inf
    logarithm = _apply("log", blocks)
    plain = _apply("log", moved)
    return _Point(half, logarithm, plain, precision, left, roots, dual, gap)


_compiled = jax.jit(_evaluate, static_argnames="fine")


def _apply(function: str, blocks: BlockStack) -> BlockStack:
    """Return the matrix function of each symmetric block; roots and logarithms are floored."""
    xp = np if isinstance(blocks, np.ndarray) else jnp
    values, vectors = xp.linalg.eigh((blocks + xp.swapaxes(blocks, 1, 2)) / 2.0)
    if function != "exp":
        values = xp.maximum(values, _FLOOR * values[:, -1:])
    return (vectors * getattr(xp, function)(values)[:, None, :]) @ xp.swapaxes(vectors, 1, 2)


def _constant_diagonal(blocks: BlockStack) -> BlockStack:
    """Return D^-1/2 V D^-1/2 times the mean of D, D the diagonal of each block."""
    xp = np if isinstance(blocks, np.ndarray) else jnp
    diagonal = xp.einsum("cii->ci", blocks)
    scale = xp.sqrt(diagonal.mean(axis=1, keepdims=True) / diagonal)
    return blocks * scale[:, :, None] * scale[:, None, :]


def _lower_bound(gram: Gram, factor: Factor | None, half: BlockStack) -> float:
    """Return tr(S)^2 / sum(l) for V = Z Z', S^2 = Z' H Z, rounded down whatever rounds."""
    b, k, _ = half.shape
    if factor is None:
        total = certificate.root_trace(gram, scipy.linalg.block_diag(*half))
    else:
        parts = factor.reshape(len(factor), b, k).transpose(1, 0, 2)
        weighted = np.matmul(parts, half).transpose(1, 0, 2).reshape(factor.shape)
        terms = np.matmul(np.abs(parts), np.abs(half))
        # Relative rounding of F Z, sums of k products.
        blur = (k + 2) * EPS * norm(terms) / norm(weighted)
        total = certificate.nuclear_norm(weighted, blur=blur)
    return _dual(total, half)


def _dual(total: float, half: BlockStack) -> float:
    """Return total^2 / sum(l), rounded down."""
    # l_c, the largest diagonal entry of V_c = Z_c Z_c', rounded up.
    levels = np.sum(half**2, axis=2).max(axis=1) * (1.0 + (half.shape[1] + 2) * EPS)
    return total * total / math.fsum(levels) * (1.0 - 8 * EPS)
