"""Mixing and noise in turn: every half-step feasible, energies that never rise."""

import numpy as np
import pytest

from dpjax.mechanism import alternating, spatial
from dpjax.topology import graphs, mixing

pytest.importorskip("clarabel")


def rate(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix - 1 / len(matrix), 2))


@pytest.mark.parametrize("spec", ["florentine", "er:10:0.4", "star:6"])
def test_energies_fall_and_both_halves_stay_feasible(spec: str) -> None:
    graph = graphs.parse(spec)
    start = mixing.metropolis_hastings(graph)
    found = alternating.alternate(graph, 0.5, steps=6)
    assert (np.diff(found.energies) <= 0).all()
    assert found.energies[-1] < 0.97 * found.energies[0]
    mixing.check(found.mixing, stochastic="double", symmetric=True)
    assert not found.mixing[start == 0].any()
    assert rate(found.mixing) <= rate(start) * (1 + 1e-9)
    assert (np.linalg.inv(found.covariance).diagonal() <= 0.5).all()
    assert found.energies[-1] == pytest.approx(spatial.energy(found.covariance, found.mixing))
    assert 0 <= found.gap < 1e-5


def test_faster_mixing_costs_noise() -> None:
    graph = graphs.florentine()
    noise = np.eye(15)
    slowest = rate(mixing.metropolis_hastings(graph))
    costs = []
    for allowed in (slowest, 0.99 * slowest):
        matrix = alternating.best_mixing(graph, noise, rate=allowed)
        assert rate(matrix) <= allowed * (1 + 1e-9)
        costs.append(spatial.energy(noise, matrix))
    assert costs[0] < costs[1]


def test_best_mixing_is_locally_best() -> None:
    """Random feasible directions on the graph never lower the energy."""
    graph = graphs.erdos_renyi(8, 0.5, 1)
    start = mixing.metropolis_hastings(graph)
    noise = spatial.whisper(start, 1.0)
    best = alternating.best_mixing(graph, noise, rate=rate(start))
    cost, rng = spatial.energy(noise, best), np.random.default_rng(0)
    assert cost < spatial.energy(noise, start)
    edges = list(graph.edges)
    for _ in range(300):
        other = start.copy()
        for i, j in edges:  # another doubly stochastic matrix on the graph
            change = rng.uniform(-1, 1) * min(other[i, j], other[i, i], other[j, j])
            other[i, j] = other[j, i] = other[i, j] + change
            other[i, i] -= change
            other[j, j] -= change
        if other.min() >= 0 and rate(other) <= rate(start):
            assert spatial.energy(noise, other) >= cost * (1 - 1e-6)


def test_refusals() -> None:
    ring = graphs.ring(6)
    with pytest.raises(ValueError, match="off the graph's edges"):
        alternating.alternate(ring, 1.0, start=mixing.metropolis_hastings(graphs.complete(6)))
    with pytest.raises(ValueError, match="below the start's"):
        alternating.alternate(ring, 1.0, rate=0.1)
    with pytest.raises(ValueError, match="faster than any mixing"):
        alternating.best_mixing(ring, np.eye(6), rate=0.1)
    with pytest.raises(ValueError, match="covariance has shape"):
        alternating.best_mixing(ring, np.eye(5), rate=0.9)
