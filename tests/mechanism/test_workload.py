"""H against the matrix of the whole run, nT x nT, for each kind of mixing matrix."""

import tracemalloc

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpjax.mechanism import temporal, workload
from dpjax.topology import graphs, mixing

N = 6
_DIRECTED = nx.DiGraph([(i, (i + 1) % N) for i in range(N)] + [(0, 3), (4, 2)])
SYMMETRIC = mixing.metropolis_hastings(graphs.erdos_renyi(N, 0.5, 0))
REVERSIBLE = mixing.uniform_neighbors(graphs.star(N))
COLUMNS = mixing.push_sum(_DIRECTED)
ROWS = mixing.uniform_neighbors(_DIRECTED)
MIXINGS = {
    "symmetric": SYMMETRIC,
    "reversible": REVERSIBLE,
    "reversible columns": np.ascontiguousarray(REVERSIBLE.T),
    "directed columns": COLUMNS,
    "directed rows": ROWS,
    "complete": np.full((N, N), 1 / N),
    "one agent": np.ones((1, 1)),
    "schedule of two": np.stack([SYMMETRIC, ROWS]),
    "schedule of three": np.stack([REVERSIBLE, SYMMETRIC, ROWS]),
}


def covariance(n: int) -> np.ndarray:
    root = np.random.default_rng(3).normal(size=(n, n))
    return root @ root.T


def whole_run(matrix: np.ndarray, rounds: int, before_gossip: bool = False) -> np.ndarray:
    """Return the nT x nT map from the noise of all rounds to the models of all rounds."""
    n = matrix.shape[-1]
    schedule = matrix[None] if matrix.ndim == 2 else matrix
    blocks = np.zeros((rounds, n, rounds, n))
    for s in range(rounds):
        carry = np.eye(n)
        for t in range(s, rounds):
            if t > s or not before_gossip:
                carry = schedule[t % len(schedule)] @ carry
            blocks[t, :, s, :] = carry
    return blocks.reshape(rounds * n, rounds * n)


def dense(
    matrix: np.ndarray, rounds: int, r: np.ndarray, before_gossip: bool = False
) -> np.ndarray:
    n = len(r)
    run = whole_run(matrix, rounds, before_gossip)
    columns = run.reshape(-1, rounds, n)
    return np.einsum("xsi,ij,xtj->st", columns, r, columns)


@pytest.mark.parametrize("kind", MIXINGS)
@pytest.mark.parametrize("rounds", [1, 2, 5, 12])
@pytest.mark.parametrize("correlated", [False, True])
def test_gram_is_that_of_whole_run(kind, rounds, correlated) -> None:
    matrix = MIXINGS[kind]
    n = matrix.shape[-1]
    r = covariance(n) if correlated else np.eye(n)
    gram = temporal.workload_gram(matrix, rounds, covariance=r if correlated else None)
    assert gram.dtype == np.float64
    np.testing.assert_array_equal(gram, gram.T)
    np.testing.assert_allclose(gram, dense(matrix, rounds, r), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", MIXINGS)
def test_gram_of_models_before_gossip_is_another_matrix(kind) -> None:
    matrix = MIXINGS[kind]
    before = dense(matrix, 5, np.eye(matrix.shape[-1]), before_gossip=True)
    distance = np.abs(workload.gram(matrix, 5) / before - 1.0).max()
    # One agent averages with nobody: both are the running sums.
    assert distance < 1e-12 if kind == "one agent" else distance > 0.05


@given(st.integers(0, 10_000), st.integers(1, 12), st.sampled_from(list(MIXINGS)))
def test_trace_is_energy_of_correlated_noise(seed, rounds, kind) -> None:
    matrix = MIXINGS[kind]
    n = matrix.shape[-1]
    rng = np.random.default_rng(seed)
    over_rounds = rng.normal(size=(rounds, rounds))
    over_agents = rng.normal(size=(n, n))
    k = over_rounds @ over_rounds.T
    r = over_agents @ over_agents.T
    run = whole_run(matrix, rounds)
    energy = np.trace(run @ np.kron(k, r) @ run.T)
    trace = np.trace(workload.gram(matrix, rounds, covariance=r) @ k)
    np.testing.assert_allclose(trace, energy, rtol=1e-10)


@pytest.mark.parametrize("kind", ["symmetric", "directed rows", "schedule of three"])
def test_diagonal_agrees_with_factor_over_agents(kind) -> None:
    factor = workload.factor(MIXINGS[kind], 30)
    np.testing.assert_allclose(
        np.trace(workload.gram(MIXINGS[kind], 30)), np.sum(factor**2), rtol=1e-11
    )


def test_one_agent_is_running_sum() -> None:
    ones = np.tri(7)
    np.testing.assert_allclose(workload.prefix_sum_gram(7), ones.T @ ones)
    np.testing.assert_allclose(workload.gram(np.ones((1, 1)), 7), ones.T @ ones)


@pytest.mark.parametrize("kind", ["symmetric", "reversible", "reversible columns"])
def test_eigenvalues_serve_where_they_can(kind, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("flattened powers of a matrix that eigenvalues serve")

    expected = workload.gram(np.stack([MIXINGS[kind], MIXINGS[kind]]), 9)
    monkeypatch.setattr(workload, "_flattened", refuse)
    np.testing.assert_allclose(workload.gram(MIXINGS[kind], 9), expected, rtol=1e-12)
    with pytest.raises(AssertionError, match="flattened"):
        workload.gram(ROWS, 9)


def test_symmetric_support_alone_is_not_reversible() -> None:
    cycle = np.array([[0.2, 0.5, 0.3], [0.3, 0.2, 0.5], [0.5, 0.3, 0.2]])
    assert workload._reversing(cycle) is None
    gram = workload.gram(cycle, 8)
    np.testing.assert_allclose(gram, dense(cycle, 8, np.eye(3)), rtol=1e-12)


def test_wide_weights_keep_their_digits() -> None:
    n = 24  # a biased path: weights 9^i, 22 orders of magnitude
    path = np.diag(np.full(n - 1, 0.9), 1) + np.diag(np.full(n - 1, 0.1), -1)
    path[0, 0] = 0.1
    path[-1, -1] = 0.9
    assert workload._reversing(path) is None
    np.testing.assert_allclose(
        workload.gram(path, 20), dense(path, 20, np.eye(n)), rtol=1e-11, atol=1e-13
    )


def test_blocks_of_rows_add_up(monkeypatch) -> None:
    complete = workload.gram(ROWS, 9, covariance=covariance(N))
    monkeypatch.setattr(workload, "_BLOCK", 9 * N * 4)  # four rows, then two
    np.testing.assert_allclose(
        workload.gram(ROWS, 9, covariance=covariance(N)), complete, rtol=1e-12
    )


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((np.eye(3), 5), "not connected"),
        ((SYMMETRIC * 1.1, 5), "sum to 1"),
        ((np.ones((2, 3)), 5), "mixing has shape"),
        ((SYMMETRIC, 0), "rounds is 0"),
        ((SYMMETRIC, 2.0), "rounds is 2.0"),
        ((np.where(SYMMETRIC > 0, np.nan, 0), 5), "mixing holds nan"),
    ],
)
def test_bad_input(arguments, match) -> None:
    with pytest.raises(ValueError, match=match):
        workload.gram(*arguments)


@pytest.mark.parametrize(
    ("r", "match"),
    [
        (np.eye(N + 1), "covariance has shape"),
        (-np.eye(N), "covariance has the eigenvalue"),
        (np.triu(np.ones((N, N))), "covariance is not symmetric"),
    ],
)
def test_bad_covariance(r, match) -> None:
    with pytest.raises(ValueError, match=match):
        workload.gram(SYMMETRIC, 5, covariance=r)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [mixing.metropolis_hastings, mixing.uniform_neighbors])
def test_large_networks_fit(weights) -> None:
    matrix = weights(graphs.erdos_renyi(1000, 0.01, 0))
    tracemalloc.start()
    try:
        gram = workload.gram(matrix, 2000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**30
    # The last rows meet few powers: they can be had by hand.
    squares = matrix @ matrix
    assert gram[-1, -1] == pytest.approx(np.sum(matrix**2), rel=1e-10)
    assert gram[-1, -2] == pytest.approx(np.sum(matrix * squares), rel=1e-10)
