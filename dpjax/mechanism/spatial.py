"""Designs of the noise over agents, all under one bound: [R^-1]_ii <= b_i.

Guarantee (independent, pairwise, whisper): R is positive definite and its exact inverse has no
diagonal entry above the agent's bound, rounding included; `accounting.budget` turns the bound
into epsilon for an outsider who sees every message, W and R but not the noise. `central` breaks
the bound and guarantees nothing towards outsiders.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.linalg import inv

from dpjax import _validate
from dpjax.mechanism import workload
from dpjax.mechanism.certificate import EPS, Factor, Vector, eigen
from dpjax.mechanism.factorization import Solution, minimize_trace
from dpjax.topology.links import adjacency
from dpjax.topology.mixing import DenseMixing, SquareMatrix

__all__ = [
    "central",
    "energy",
    "figures",
    "independent",
    "pairwise",
    "whisper",
]

Bound: TypeAlias = Vector | float
Subgroups: TypeAlias = Sequence[Sequence[int]] | None

# Where the energy falls for ever with the coupling (W = 11'/n), stop at c lambda_max(L) / s of
# this size: the excess over the infimum is then about n / 1e5, and so are the variances' growth.
_LARGEST_COUPLING = 1e5
_GOLDEN = (np.sqrt(5.0) - 1.0) / 2.0


def independent(mixing: DenseMixing, precision_bound: Bound) -> SquareMatrix:
    """Return R = diag(1 / b_i): every agent on its own (local differential privacy).

    Example:
        >>> from dpjax.mechanism import spatial
        >>> from dpjax.topology import graphs, mixing
        >>> weights = mixing.metropolis_hastings(graphs.ring(3))
        >>> spatial.independent(weights, precision_bound=4.0).round(6)
        array([[0.25, 0.  , 0.  ],
               [0.  , 0.25, 0.  ],
               [0.  , 0.  , 0.25]])
    """
    limits = bounds(precision_bound, np.shape(mixing)[-1])
    return np.diag(independent_variances(limits))


def independent_variances(limits: Vector) -> Vector:
    """Return 1 / b_i, one unit upwards, so that 1 / (1 / b) rounds to no more than b."""
    return np.nextafter(1.0 / limits, np.inf)


def central(mixing: DenseMixing, precision_bound: Bound) -> SquareMatrix:
    """Return R = 11' / (b n^2): a trusted server's noise on the mean, the ideal to compare with.

    It breaks [R^-1]_ii <= b (R is singular), and accounting for outsiders refuses it. With
    unequal bounds the strictest one counts.

    Example:
        >>> from dpjax.mechanism import spatial
        >>> from dpjax.topology import graphs, mixing
        >>> weights = mixing.metropolis_hastings(graphs.ring(3))
        >>> spatial.central(weights, precision_bound=1.0).round(3)
        array([[0.111, 0.111, 0.111],
               [0.111, 0.111, 0.111],
               [0.111, 0.111, 0.111]])
    """
    n = np.shape(mixing)[-1]
    strictest = bounds(precision_bound, n).min()
    return np.full((n, n), 1.0 / (strictest * n * n))


def pairwise(
    mixing: DenseMixing, precision_bound: Bound, horizon: int | None = None, **options: Any
) -> SquareMatrix:
    """Return R = s I + c L, L the Laplacian of W's support, of least energy under the bound.

    With bounds b_i it is s diag(1/b) + c L.

    Args:
        mixing: [n, n] W, or a schedule [P, n, n].
        precision_bound: b or [n] b_i, largest allowed [R^-1]_ii.
        horizon: as for :func:`whisper`; None is the published one-step objective.
        options: ``step_sizes``, ``weights``: the table in
            ``mechanism.workload.factor``.

    Returns:
        [n, n] float64. Where no finite c is best (W = 11'/n) it stops at
        ``_LARGEST_COUPLING``; a ``mechanism.design.Design`` says so.

    Reference:
        Allouah et al., "The privacy power of correlated noise in decentralized learning", 2024.

    Example:
        >>> from dpjax.mechanism import spatial
        >>> from dpjax.topology import graphs, mixing
        >>> weights = mixing.metropolis_hastings(graphs.ring(6))
        >>> round(spatial.energy(spatial.pairwise(weights, 1.0), weights), 3)
        1.499
    """
    matrix = _validate.finite_array("mixing", mixing)
    limits = bounds(precision_bound, matrix.shape[-1])
    root = workload.factor(matrix, horizon, **options)
    return solve_pairwise(matrix, root, limits)[0]


def whisper(
    mixing: DenseMixing,
    precision_bound: Bound,
    horizon: int | None = None,
    *,
    weights: Vector | None = None,
    subgroups: Subgroups = None,
    **options: Any,
) -> SquareMatrix:
    """Return the covariance of least noise energy tr(M R) with [R^-1]_ii <= b_i.

    Args:
        mixing: [n, n] W, or a schedule [P, n, n]; symmetric, row- or column-stochastic.
        precision_bound: b or [n] b_i, largest allowed [R^-1]_ii.
        horizon: None for one step, the paper's M = W'W; T for all models of T rounds.
        weights: [n] push-sum weights by which models are divided;
            `mechanism.design.Design.whisper` has other objectives.
        subgroups: lists of agents, a partition of all. Each shares a seed of its own and nothing
            with the others: R is block-structured. Less noise cancels; trust stays in a group.
        options: further options of ``factorization.minimize_trace``, such as ``max_variance``.

    Returns:
        [n, n] float64 R.

    Raises:
        ValueError: for a bad mixing matrix, bound, option or partition.

    Reference:
        Rodio, Chen and Larsson, "Whisper D-SGD", problem (10).

    Example:
        >>> from dpjax.mechanism import spatial
        >>> from dpjax.topology import graphs, mixing
        >>> weights = mixing.metropolis_hastings(graphs.ring(6))
        >>> round(spatial.energy(spatial.whisper(weights, 1.0), weights), 3)
        1.185
    """
    root = workload.factor(mixing, horizon, weights=weights)
    return solve_whisper(root, precision_bound, subgroups=subgroups, **options)[0]


def solve_whisper(
    factor: Factor,
    precision_bound: Bound,
    *,
    subgroups: Subgroups = None,
    **options: Any,
) -> tuple[SquareMatrix, tuple[Solution, ...]]:
    """Return R for M = F'F, and the certified solution of every subgroup (one if None).

    With bounds b_i the problem is the one with F diag(b)^-1/2: R_ij = [P^-1]_ij / sqrt(b_i b_j).
    A subgroup's rows and columns of R depend on its own columns of F alone, so blocks solved
    one by one are optimal among block-structured R.
    """
    n = factor.shape[1]
    root = 1.0 / np.sqrt(bounds(precision_bound, n))
    covariance = np.zeros((n, n))
    solutions = []
    for group in partition(subgroups, n):
        solution = minimize_trace(factor=factor[:, group] * root[group], **options)
        block = np.ix_(group, group)
        # The solution's margin covers the rounding of these products: it is entrywise, too.
        covariance[block] = solution.covariance * np.outer(root[group], root[group])
        solutions.append(solution)
    return covariance, tuple(solutions)


def solve_pairwise(
    mixing: DenseMixing,
    factor: Factor,
    bounds: Vector,
) -> tuple[SquareMatrix, bool]:
    """Return R = s diag(1/b) + c L of least tr(M R), and whether c ran into its bound.

    [R^-1]_ii <= b_i, s and c >= 0.

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
    linked = adjacency(mixing)
    # Published: s I + c L, for one bound.
    laplacian = np.diag(linked.sum(axis=1)) - linked.astype(float)
    root = np.sqrt(bounds)
    # B^1/2 L B^1/2, whose eigenvectors all t share.
    values, vectors = np.linalg.eigh(root[:, None] * laplacian * root)
    values = np.maximum(values, 0.0)
    squares = vectors**2
    independent_energy = np.sum((factor / root) ** 2)
    # Rounding may make a sum of squares negative.
    coupled_energy = max(0.0, trace(factor, laplacian))
    largest = _LARGEST_COUPLING / max(values[-1], bounds.min())

    def scale(t: float) -> float:
        return np.max(squares @ (1.0 / (1.0 + t * values)))

    def ray_energy(t: float) -> float:
        return scale(t) * (independent_energy + t * coupled_energy)

    # In log(1 + t / unit), so that small and large couplings are resolved alike.
    unit = largest / _LARGEST_COUPLING
    low = 0.0
    high = np.log1p(_LARGEST_COUPLING)
    # Golden sections: the energy is quasi-convex along the ray.
    for _ in range(120):
        left = high - _GOLDEN * (high - low)
        right = low + _GOLDEN * (high - low)
        if ray_energy(unit * np.expm1(left)) <= ray_energy(unit * np.expm1(right)):
            high = right
        else:
            low = left
    inner = unit * np.expm1((low + high) / 2.0)
    t = min((0.0, largest, inner), key=ray_energy)
    covariance = scale(t) * (1.0 + 1e-12) * (np.diag(1.0 / bounds) + t * laplacian)
    # The inverse of the rounded matrix, not of the ideal one, has to keep the bound.
    excess = np.max(inv(covariance).diagonal() / bounds)
    # The inversion loses digits with the condition number, 1 + t lambda_max.
    rounding = 8 * n * EPS * (1.0 + t * values[-1])
    margin = max(excess, 1.0) * (1.0 + rounding)
    return covariance * margin, bool(t >= 0.999 * largest)


def energy(
    covariance: SquareMatrix, mixing: DenseMixing, horizon: int | None = None, **options: Any
) -> float:
    """Return tr(M R): the expected squared noise, per coordinate, in all agents' models.

    For one step it is tr(W R W'); divide by n for one agent's share.

    Raises:
        ValueError: for a mixing matrix that is stochastic neither by rows nor by columns.

    Example:
        >>> from dpjax.mechanism import spatial
        >>> from dpjax.topology import graphs, mixing
        >>> weights = mixing.metropolis_hastings(graphs.ring(6))
        >>> round(spatial.energy(spatial.independent(weights, 1.0), weights), 3)
        2.0
    """
    schedule = workload.schedule_of(mixing, connected=False)
    root = workload.factor(schedule, horizon, **options)
    return trace(root, np.asarray(covariance))


def trace(root: Factor, covariance: SquareMatrix) -> float:
    """Return tr(M R) for M = F'F."""
    return float(np.einsum("ij,jk,ik->", root, covariance, root, optimize=True))


def figures(covariance: SquareMatrix, mixing: DenseMixing) -> dict[str, float]:
    """Return figures of merit of a design, per coordinate of the model and round.

    Returns:
        ``lambda_min``: smallest eigenvalue of R; ``energy``: tr(W R W'); ``per_agent_energy``:
        that over n; ``network_mean_variance``: 1'R1 / n^2, the variance of the mean of all
        agents' noise; ``largest_variance``: max_i R_ii; ``largest_variance_ratio``: that over
        independent noise's at the same loss, max_i R_ii max_i [R^-1]_ii (infinite if singular).

    Example:
        >>> import numpy as np
        >>> from dpjax.mechanism import spatial
        >>> spatial.figures(np.eye(2), np.eye(2))["energy"]
        2.0
    """
    matrix = _validate.square("covariance", covariance)
    n = matrix.shape[0]
    values, vectors = eigen(matrix)
    cost = energy(matrix, mixing)
    # No finite loss: an outsider sees some combination bare.
    singular = values[0] <= n * EPS * values[-1]
    # max_i [R^-1]_ii from R = U diag(values) U'.
    loss = np.inf if singular else float(np.max((vectors**2) @ (1.0 / values)))
    largest = float(matrix.diagonal().max())
    return {
        "lambda_min": float(values[0]),
        "energy": cost,
        "per_agent_energy": cost / n,
        "network_mean_variance": float(matrix.sum()) / n**2,
        "largest_variance": largest,
        "largest_variance_ratio": largest * loss,
    }


def bounds(precision_bound: Bound, n: int) -> Vector:
    """Return [n] positive bounds from a scalar or a vector; ValueError otherwise."""
    values = _validate.finite_array("precision_bound", precision_bound)
    if values.ndim > 1 or values.shape not in ((), (1,), (n,)):
        raise ValueError(f"precision_bound has shape {values.shape}; give a number or {n} of them")
    values = np.broadcast_to(values, (n,)).copy()
    if values.min() <= 0:
        raise ValueError(f"precision_bound holds {values.min()}; give bounds above 0")
    return values


def partition(subgroups: Subgroups, n: int) -> list[list[int]]:
    """Return all agents in groups, one if None; ValueError unless each stands once."""
    if subgroups is None:
        return [list(range(n))]
    groups = [sorted(_validate.agents("subgroups", group)) for group in subgroups]
    if sorted(agent for group in groups for agent in group) != list(range(n)) or not all(groups):
        raise ValueError(
            f"subgroups is {list(map(list, subgroups))!r}; give lists in which every agent of "
            f"0..{n - 1} stands once"
        )
    return groups
