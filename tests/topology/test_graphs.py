"""Graphs: shapes, connectedness, files and refusals."""

from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpjax.topology import graphs, nodes


@pytest.mark.parametrize(
    ("spec", "nodes", "edges"),
    [
        ("ring:12", 12, 12),
        ("complete:20", 20, 190),
        ("grid:3:4", 12, 17),
        ("star:8", 8, 7),
        ("path:5", 5, 4),
        ("exponential:16", 16, 64),
        ("exponential:6", 6, 18),
        ("florentine", 15, 20),
    ],
)
def test_parse_gives_the_named_graph(spec: str, nodes: int, edges: int) -> None:
    graph = graphs.parse(spec)
    assert list(graph) == list(range(nodes))
    assert graph.number_of_edges() == edges


@given(st.integers(2, 25), st.floats(0.3, 1.0), st.integers(0, 1000))
def test_erdos_renyi_is_the_first_connected_draw(n: int, p: float, seed: int) -> None:
    graph = graphs.erdos_renyi(n, p, seed)
    draws = (nx.gnp_random_graph(n, p, seed=seed + k) for k in range(100))
    first = next(draw for draw in draws if nx.is_connected(draw))
    assert set(graph.edges) == set(first.edges)


def test_erdos_renyi_gives_up_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"p is 0\.001: 100 draws .* raise p"):
        graphs.erdos_renyi(50, 0.001, 0)


@pytest.mark.parametrize(
    "spec", ["er:20", "er:20:0.5:1:2", "er:20:x", "ring", "ring:2", "er:20:1.5", "er:-3:0.5"]
)
def test_parse_refuses(spec: str) -> None:
    with pytest.raises(ValueError, match=r"\d|give"):
        graphs.parse(spec)


def test_parse_of_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="neither a file nor a known name.*florentine"):
        graphs.parse("no_such_graph")


def test_exponential_sends_to_powers_of_two() -> None:
    assert sorted(graphs.exponential(8).successors(6)) == [0, 2, 7]


def test_edge_list_keeps_numbers_ignores_weights_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "net.txt"
    file.write_text("# a network\n2 0 0.5\n\n0,1\n1\t3 # last\n3 1\n")
    graph = graphs.parse(str(file))
    assert list(graph) == [0, 1, 2, 3]
    assert set(map(frozenset, graph.edges)) == set(map(frozenset, [(2, 0), (0, 1), (1, 3)]))


def test_edge_list_numbers_names_in_order_of_mention(tmp_path: Path) -> None:
    file = tmp_path / "net.txt"
    file.write_text("zoe adam\nadam mia\n")
    graph = graphs.from_edgelist(file)
    assert [graph.nodes[i]["label"] for i in graph] == ["zoe", "adam", "mia"]
    assert graphs.from_edgelist(file, directed=True).has_edge(0, 1)
    assert not graphs.from_edgelist(file, directed=True).has_edge(1, 0)


@pytest.mark.parametrize("line", ["7", "3 3"])
def test_edge_list_names_the_bad_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "net.txt"
    file.write_text(f"0 1\n{line}\n")
    with pytest.raises(ValueError, match="line 2 of"):
        graphs.from_edgelist(file)


def test_edge_list_refuses_empty_and_binary_files(tmp_path: Path) -> None:
    file = tmp_path / "net.txt"
    file.write_text("# nothing\n")
    with pytest.raises(ValueError, match="holds no edge"):
        graphs.from_edgelist(file)
    file.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ValueError, match="cannot be read.*give an edge list"):
        graphs.from_edgelist(file)
    with pytest.raises(ValueError, match="a folder"):
        graphs.from_edgelist(tmp_path)


def test_facebook_ego_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPJAX_DATA", str(tmp_path / "here"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="here.*cache.*DPJAX_DATA"):
        graphs.facebook_ego()


def test_facebook_ego_refuses_another_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPJAX_DATA", str(tmp_path))
    (tmp_path / "facebook_ego.edgelist").write_text("0 1\n")
    with pytest.raises(ValueError, match="2 nodes and 1 edges"):
        graphs.facebook_ego()


def test_facebook_ego_is_the_stored_graph(real_data) -> None:
    graph = graphs.facebook_ego(real_data("facebook_ego"))
    degrees = [degree for _, degree in graph.degree]
    assert (graph.number_of_nodes(), graph.number_of_edges()) == (148, 1692)
    assert (min(degrees), max(degrees)) == (1, 57)


def test_renumbered_graphs_are_the_same_with_neighbours_near_each_other() -> None:
    far = nx.relabel_nodes(graphs.grid(9, 9), {i: (i * 32) % 81 for i in range(81)})
    for graph in (far, far.to_directed()):
        near = graphs.renumbered(graph)
        assert max(abs(i - j) for i, j in near.edges) <= 9
        names = {i: int(label) for i, label in near.nodes(data="label")}
        assert set(names) == set(range(81))
        back = nx.relabel_nodes(near, names)
        assert {*map(frozenset, back.edges)} == {*map(frozenset, graph.edges)}
        assert back.number_of_edges() == graph.number_of_edges()
    named = graphs.renumbered(graphs.florentine())
    assert sorted(nodes.labels(named)) == sorted(nodes.labels(graphs.florentine()))
