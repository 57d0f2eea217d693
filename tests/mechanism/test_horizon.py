"""Every factor of M against the definition, by brute force and by simulation of the loop."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpjax.mechanism import spatial, workload
from dpjax.topology import graphs, mixing

SYMMETRIC = mixing.metropolis_hastings(graphs.erdos_renyi(6, 0.5, 0))
DIRECTED = mixing.push_sum(nx.DiGraph([(i, (i + 1) % 6) for i in range(6)] + [(0, 3), (4, 2)]))
ROWS = mixing.uniform_neighbors(graphs.star(6))
SCHEDULE = np.stack([SYMMETRIC, ROWS, DIRECTED])
EVERY = [SYMMETRIC, DIRECTED, ROWS, SCHEDULE]


def gram(matrix: np.ndarray, *arguments, **options) -> np.ndarray:
    root = workload.factor(matrix, *arguments, **options)
    return root.T @ root


def brute_force(
    matrix: np.ndarray,
    rounds: int,
    etas: np.ndarray | None = None,
    weights: np.ndarray | None = None,
) -> np.ndarray:
    """Sum over every pair s <= t of the map from the noise of round s to the models of t."""
    n = matrix.shape[-1]
    schedule = matrix[None] if matrix.ndim == 2 else matrix
    read = np.diag(1 / (np.ones(n) if weights is None else weights))
    etas = np.ones(rounds) if etas is None else etas
    total = np.zeros((n, n))
    for t in range(rounds):
        for s in range(t + 1):
            carry = np.eye(n)
            for r in range(s, t + 1):
                carry = schedule[r % len(schedule)] @ carry
            total += etas[s] ** 2 * (read @ carry).T @ (read @ carry)
    return total


@pytest.mark.parametrize("matrix", EVERY)
@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_gram_is_definition(matrix, rounds, steps, weighted) -> None:
    etas = np.linspace(1, 0, rounds + 1)[:-1] if steps else None
    weights = np.linspace(0.5, 2, 6) if weighted else None
    result = gram(matrix, rounds, step_sizes=etas, weights=weights)
    expected = brute_force(matrix, rounds, etas, weights)
    np.testing.assert_allclose(result, expected, rtol=1e-11, atol=1e-12)


def test_one_step_is_papers() -> None:
    for matrix in (SYMMETRIC, DIRECTED, ROWS):
        np.testing.assert_allclose(gram(matrix), matrix.T @ matrix)
    mean = np.mean([w.T @ w for w in SCHEDULE], axis=0)
    np.testing.assert_allclose(gram(SCHEDULE), mean)


@given(st.integers(1, 3000))
def test_doubling_equals_eigenvalues(rounds: int) -> None:
    nudged = SYMMETRIC.copy()
    nudged[0, 1] = np.nextafter(nudged[0, 1], 1)  # no longer symmetric: the general path
    np.testing.assert_allclose(
        gram(nudged, rounds), gram(SYMMETRIC, rounds), rtol=1e-10, atol=1e-12
    )


def test_energy_is_what_simulated_run_pays() -> None:
    """One trajectory's noise has energy tr(M R) on average; 1.5 times R is told apart."""
    rng = np.random.default_rng(0)
    covariance = spatial.whisper(DIRECTED, 1.0, horizon=9)
    draws = 4000
    noise = np.linalg.cholesky(covariance) @ rng.normal(size=(9, 6, draws))
    models = np.zeros((6, draws))
    paid = np.zeros(draws)
    for step in noise:
        models = DIRECTED @ (models + step)
        paid += (models**2).sum(axis=0)
    error = paid.std() / np.sqrt(draws)
    expected = spatial.energy(covariance, DIRECTED, 9)
    assert abs(paid.mean() - expected) < 4 * error
    assert abs(paid.mean() - 1.5 * expected) > 10 * error


def test_factor_keeps_weak_directions() -> None:
    """A direction that W all but kills survives in the factor, and would not in M."""
    values = np.array([1.0, 0.5, 1e-10])
    q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))
    general = (q * values) @ np.linalg.inv(q + 1e-3 * np.triu(np.ones((3, 3)), 1))
    weakest = np.linalg.svd(workload.factor(general, 8), compute_uv=False)[-1]
    assert weakest == pytest.approx(
        np.sqrt(8) * np.linalg.svd(general, compute_uv=False)[-1], rel=1
    )
    squared = np.linalg.eigvalsh(gram(general, 8))[0]
    assert abs(squared) > 1e2 * weakest**2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"horizon": 0}, "horizon is 0"),
        ({"horizon": 3, "step_sizes": np.ones(4)}, "4 entries for horizon=3"),
        ({"step_sizes": np.zeros(4)}, "not all 0"),
        ({"weights": np.zeros(6)}, "6 positive"),
        ({"weights": np.ones(5)}, "6 positive"),
    ],
)
def test_refusals(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workload.factor(SYMMETRIC, **arguments)
