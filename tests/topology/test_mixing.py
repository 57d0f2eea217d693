"""Mixing matrices: weights, checks, schedules, fingerprints."""

from pathlib import Path

import jax
import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpjax as dp
from dpjax.topology import gossip, graphs, mixing, nodes


@given(st.integers(1, 20), st.floats(0.3, 1.0), st.integers(0, 100))
def test_metropolis_hastings_is_formula(n: int, p: float, seed: int) -> None:
    graph = graphs.erdos_renyi(n, p, seed)
    matrix = mixing.check_mixing(mixing.metropolis_hastings(graph), stochastic="double")
    np.testing.assert_array_equal(matrix, matrix.T)
    for i, j in graph.edges:
        assert matrix[i, j] == 1 / (1 + max(graph.degree[i], graph.degree[j]))
    assert np.count_nonzero(np.triu(matrix, 1)) == graph.number_of_edges()


def test_edge_and_node_order_do_not_matter() -> None:
    graph = graphs.florentine()
    shuffled = nx.Graph()
    shuffled.add_nodes_from(reversed(range(15)))
    shuffled.add_edges_from((v, u) for u, v in reversed(list(graph.edges)))
    first = mixing.metropolis_hastings(graph)
    second = mixing.metropolis_hastings(shuffled)
    assert mixing.fingerprint(first) == mixing.fingerprint(second)


def test_uniform_neighbors_and_push_sum_on_digraph() -> None:
    graph = nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)])
    rows = mixing.uniform_neighbors(graph)
    columns = mixing.push_sum(graph)
    np.testing.assert_allclose(rows, [[1 / 2, 0, 1 / 2], [1 / 2, 1 / 2, 0], [1 / 3] * 3])
    np.testing.assert_allclose(columns[:, 0], [1 / 3] * 3)
    mixing.check_mixing(columns, stochastic="columns")
    with pytest.raises(ValueError, match="row 0 summing to"):
        mixing.check_mixing(columns)


def test_one_round_of_push_sum_recovers_mean_in_limit() -> None:
    graph = nx.DiGraph([(i, (i + 1) % 8) for i in range(8)] + [(0, 3), (5, 2)])
    matrix = mixing.push_sum(graph)
    values = np.arange(8.0)
    power = np.linalg.matrix_power(matrix, 300)
    np.testing.assert_allclose(power @ values / power.sum(axis=1), values.mean())


def test_directed_graph_has_no_metropolis_hastings() -> None:
    with pytest.raises(ValueError, match="push_sum"):
        mixing.metropolis_hastings(nx.DiGraph([(0, 1), (1, 2), (2, 0)]))


@pytest.mark.parametrize("make", [mixing.metropolis_hastings, mixing.uniform_neighbors])
def test_disconnected_graphs_are_refused(make) -> None:
    with pytest.raises(ValueError, match="not connected: agent 2, agent 3 and the other 2 of 4"):
        make(nx.Graph([(0, 1), (2, 3)]))


def test_header_line_read_as_edge_is_named(tmp_path: Path) -> None:
    (tmp_path / "net.csv").write_text("source,target\nLyon,Paris\nParis,Nice\nNice,Lyon\n")
    graph = graphs.from_edgelist(tmp_path / "net.csv")
    for make in (mixing.metropolis_hastings, mixing.uniform_neighbors):
        reported = r"agent source \(index 0\), agent target \(index 1\) and the other 3 of 5 agents"
        with pytest.raises(ValueError, match=f"{reported}.*header line.*begin it with #"):
            make(graph)
    # Without names there is no header; of many agents the first are named.
    apart = nx.disjoint_union(nx.path_graph(9), nx.path_graph(8))
    with pytest.raises(ValueError, match="agent 14 and 2 more and the other 9 of 17") as refusal:
        mixing.metropolis_hastings(apart)
    assert "header" not in str(refusal.value)


def test_one_way_streets_are_refused() -> None:
    with pytest.raises(ValueError, match="not connected"):
        mixing.push_sum(nx.DiGraph([(0, 1), (1, 0), (1, 2)]))


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[1.0, 0.5], [0.5, 0.5]], "row 0 summing to 1.5"),
        ([[1.5, -0.5], [0.5, 0.5]], r"holds -0.5 at \(0, 1\)"),
        ([[np.nan, 1.0], [0.5, 0.5]], "nan"),
        ([[0.5, 0.5]], "shape"),
        (np.eye(2), "not connected"),
        ([1.0, 2.0], "shape"),
        (np.array([[0.5, 0.5], [1e-40, 1.0]]), "1e-40 at .1, 0., which float32 takes for 0"),
    ],
)
def test_check_names_what_is_wrong(matrix, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixing.check_mixing(matrix)


def test_check_of_both_sums() -> None:
    rows = np.array([[0.5, 0.5], [0.25, 0.75]])
    with pytest.raises(ValueError, match="column 0"):
        mixing.check_mixing(rows, stochastic="double")
    with pytest.raises(ValueError, match="W has"):
        mixing.check_mixing(2 * rows, name="W")


def test_schedule_needs_only_connected_union() -> None:
    pairs = np.full((2, 3, 3), 0.0)
    for step, (i, j, k) in zip(pairs, [(0, 1, 2), (1, 2, 0)], strict=True):
        step[np.ix_([i, j], [i, j])] = 0.5
        step[k, k] = 1.0
    checked = mixing.check_mixing(pairs, stochastic="double")
    assert 0 < mixing.spectral_gap(checked) < 1
    with pytest.raises(ValueError, match="not connected"):
        mixing.check_mixing(pairs[:1])
    picked = jax.jit(lambda round: gossip.at(checked, round))(5)
    np.testing.assert_allclose(picked, checked[1], rtol=1e-6)
    assert gossip.at(checked[0], 7).shape == (3, 3)


def test_spectral_gap_of_known_graphs() -> None:
    ring = mixing.metropolis_hastings(graphs.ring(12))
    assert mixing.spectral_gap(ring) == pytest.approx(1 - (1 + 2 * np.cos(np.pi / 6)) / 3)
    complete = mixing.metropolis_hastings(graphs.complete(9))
    assert mixing.spectral_gap(complete) == pytest.approx(1)
    directed = mixing.uniform_neighbors(nx.DiGraph((i, (i + 1) % 5) for i in range(5)))
    assert mixing.spectral_gap(directed) == pytest.approx(1 - np.cos(np.pi / 5))
    assert mixing.spectral_gap(np.eye(4)) == pytest.approx(0)
    assert mixing.spectral_gap(np.ones((1, 1))) == 1


def test_fingerprint_sees_every_bit_and_only_values() -> None:
    matrix = mixing.metropolis_hastings(graphs.ring(5))
    other = matrix.copy()
    other[0, 0] = np.nextafter(other[0, 0], 1)
    assert mixing.fingerprint(matrix) == mixing.fingerprint(np.asfortranarray(matrix))
    assert mixing.fingerprint(matrix) != mixing.fingerprint(other)
    assert mixing.fingerprint(matrix) != mixing.fingerprint(matrix.ravel())
    assert mixing.fingerprint(np.zeros(2)) == mixing.fingerprint(-np.zeros(2))


def test_survivors_keep_doubly_stochastic_matrix() -> None:
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(12, 0.4, 1))
    rest = mixing.check_mixing(mixing.survivors(matrix, [3, 7]), stochastic="double")
    np.testing.assert_allclose(rest, rest.T, rtol=0, atol=1e-12)
    stay = np.delete(np.arange(12), [3, 7])
    between = matrix[np.ix_(stay, stay)]
    np.testing.assert_array_equal(
        rest - np.diag(np.diag(rest)), between - np.diag(np.diag(between))
    )
    star = mixing.metropolis_hastings(graphs.star(5))
    for departed, message in (
        ([0], "survivors is not connected"),
        (range(5), "everyone"),
        ([5], "names agent 5"),
        (5, r"departed is 5; give a list, \[5\]"),
        (["Fulda"], r"departed names 'Fulda'.*nodes\.find"),
    ):
        with pytest.raises(ValueError, match=message):
            mixing.survivors(star, departed)


@pytest.mark.parametrize(
    "function",
    [
        mixing.metropolis_hastings,
        mixing.uniform_neighbors,
        mixing.push_sum,
        graphs.renumbered,
        nodes.labels,
    ],
)
def test_functions_of_graph_take_graphs_with_nodes(function):
    adjacency = np.ones((3, 3)) - np.eye(3)
    sparse = nx.to_scipy_sparse_array(graphs.ring(4))
    for value in (adjacency, adjacency.tolist(), sparse, None, "ring:3", {0: [1], 1: [0]}):
        with pytest.raises(ValueError, match=r"^graph is .*; give a networkx graph, .*\(A\)"):
            function(value)
    with pytest.raises(ValueError, match="graph has no nodes; give at least one agent"):
        function(nx.Graph())
    function(nx.from_numpy_array(adjacency))


@pytest.mark.parametrize(
    "call",
    [
        lambda graph: mixing.survivors(graph, [1]),
        mixing.spectral_gap,
        lambda graph: gossip.mix(graph, np.ones(4, np.float32)),
        lambda graph: dp.account(graph, relation="replace_agent", rounds=5, sigma=1.0),
    ],
)
def test_functions_of_matrix_say_how_graph_becomes_one(call):
    with pytest.raises(ValueError, match=r"mixing is <networkx.*mixing.metropolis_hastings\(gr"):
        call(graphs.ring(4))


@pytest.mark.parametrize("value", [None, "a"])
def test_gap_of_what_is_no_matrix_is_refused_by_name(value):
    with pytest.raises(ValueError, match="mixing is "):
        mixing.spectral_gap(value)


def test_hashable_matrix_is_made_dense_once() -> None:
    sparse = mixing.HashableMatrix(mixing.metropolis_hastings(graphs.ring(5), sparse=True))
    dense = mixing.HashableMatrix(mixing.metropolis_hastings(graphs.ring(5)))
    assert sparse.dense == dense and sparse.dense is sparse.dense
    assert dense.dense is dense
