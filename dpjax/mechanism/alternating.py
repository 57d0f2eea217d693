"""Mixing weights and noise optimised in turn on a given graph.

    minimise  tr(W R W')   over  W symmetric doubly stochastic with the graph's support,
                                 |W - 11'/n|_2 <= rate,   and  R > 0 with [R^-1]_ii <= b_i.

The energy alone would trade mixing for noise (W = I mixes nothing), hence the bound on the rate
of consensus. Either half is convex: R is the certified solve, W a quadratic programme whose
result is taken only if the energy falls, so that the sequence of energies never rises.
"""

from typing import NamedTuple

import networkx as nx
import numpy as np
from jaxtyping import Float

from dpjax import _numerics, _validate
from dpjax.mechanism import sdp, spatial
from dpjax.topology import mixing as mixing_

__all__ = ["Alternated", "alternate", "best_mixing"]


class Alternated(NamedTuple):
    """What :func:`alternate` returns.

    ``energies`` holds tr(W R W') after every half-step, the first after the R of the starting
    matrix; ``gap`` is the certificate of the last R for the last W.
    """

    mixing: Float[np.ndarray, "n n"]
    covariance: Float[np.ndarray, "n n"]
    energies: tuple[float, ...]
    gap: float


def alternate(
    graph: nx.Graph,
    precision_bound: float | Float[np.ndarray, " n"],
    *,
    rate: float | None = None,
    start: Float[np.ndarray, "n n"] | None = None,
    steps: int = 20,
    tolerance: float = 1e-6,
) -> Alternated:
    """Return a mixing matrix and a covariance optimised in turn, R first.

    Args:
        graph: a connected undirected graph; W is zero off its edges and the diagonal.
        precision_bound: b or [n] b_i.
        rate: largest allowed |W - 11'/n|_2, the factor of consensus a round; None keeps that of
            ``start``.
        start: [n, n] first W, None for Metropolis-Hastings. It must keep ``rate``.
        steps: most pairs of half-steps.
        tolerance: stop when a pair lowers the energy by less than this, relatively.

    Returns:
        The pair, and the energy after every half-step.

    Raises:
        ValueError: for a start that is not symmetric doubly stochastic, breaks ``rate`` or uses
            links the graph lacks; without cvxpy and Clarabel.

    Reference:
        The joint design that "Whisper D-SGD" leaves as future work.
    """
    steps = _validate.integer("steps", steps)
    default = mixing_.metropolis_hastings(graph)
    matrix = mixing_.check(
        default if start is None else start, stochastic="double", symmetric=True, name="start"
    )
    if matrix.shape != default.shape or (matrix[default == 0] != 0).any():
        raise ValueError("start has weights off the graph's edges; give one on the same graph")
    held = _rate(matrix)
    limit = held if rate is None else _validate.positive("rate", rate)
    if held > limit * (1 + 1e-9):
        raise ValueError(f"rate is {rate!r}, below the start's {held:.6g}; give that or a faster W")
    covariance, (solution,) = spatial.solve_whisper(matrix, precision_bound)
    energies = [spatial.energy(covariance, matrix)]
    for _ in range(steps):
        before = energies[-1]
        candidate = best_mixing(graph, covariance, rate=limit)
        if spatial.energy(covariance, candidate) < before:
            matrix = candidate
        energies.append(spatial.energy(covariance, matrix))
        fresh, (certificate,) = spatial.solve_whisper(
            matrix, precision_bound, warm_start=solution.multipliers
        )
        if spatial.energy(fresh, matrix) <= energies[-1]:
            covariance, solution = fresh, certificate
        energies.append(spatial.energy(covariance, matrix))
        if before - energies[-1] <= tolerance * before:
            break
    best = spatial.solve_whisper(matrix, precision_bound)[1][0].lower_bound
    return Alternated(matrix, covariance, tuple(energies), energies[-1] / best - 1.0)


def best_mixing(
    graph: nx.Graph, covariance: Float[np.ndarray, "n n"], *, rate: float
) -> Float[np.ndarray, "n n"]:
    """Return the symmetric doubly stochastic W on the graph of least tr(W R W') at a rate.

    W = I - B diag(w) B' with one weight w >= 0 a link, a convex problem in w.

    Args:
        graph: a connected undirected graph.
        covariance: [n, n] R.
        rate: largest allowed |W - 11'/n|_2.

    Returns:
        [n, n] float64, within 1e-9 of the rate.

    Raises:
        ValueError: without cvxpy and Clarabel, or when no W on the graph is that fast.
    """
    rate = _validate.positive("rate", rate)
    noise = spatial.sampling_factor(covariance)
    support = mixing_.metropolis_hastings(graph) > 0
    n = len(support)
    if noise.shape != (n, n):
        raise ValueError(f"covariance has shape {noise.shape}; give [{n}, {n}], as the graph's")
    ends = _numerics.link_pairs(support)
    incidence = _numerics.incidence(ends, n)
    cp = sdp.library()
    weights = cp.Variable(len(ends), nonneg=True)
    matrix = np.eye(n) - incidence @ cp.diag(weights) @ incidence.T
    scale = float(np.linalg.norm(noise))
    away = matrix - np.full((n, n), 1.0 / n)
    inner = rate * (1.0 - 1e-8) * np.eye(n)
    problem = cp.Problem(
        cp.Minimize(cp.sum_squares(matrix @ (noise / scale))),
        [cp.diag(matrix) >= 0, inner - away >> 0, inner + away >> 0],
    )
    try:
        problem.solve(solver=cp.CLARABEL)
    except cp.error.SolverError:
        pass
    if weights.value is None:
        raise ValueError(f"rate is {rate!r}, faster than any mixing on this graph; raise it")
    held = np.maximum(np.asarray(weights.value), 0.0)
    result = np.eye(n) - (incidence * held) @ incidence.T
    # Rounding may leave a diagonal entry a little below 0: pull the whole matrix towards I.
    worst = min(0.0, float(result.diagonal().min()))
    result = (result - worst * np.eye(n)) / (1.0 - worst)
    return (result + result.T) / 2.0


def _rate(matrix: Float[np.ndarray, "n n"]) -> float:
    n = len(matrix)
    return float(np.linalg.norm(matrix - np.full((n, n), 1.0 / n), 2))
