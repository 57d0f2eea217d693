"""Graphs: shapes, connectedness, files and refusals."""

from pathlib import Path

import networkx as nx
import numpy as np
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
def test_parse_gives_named_graph(spec: str, nodes: int, edges: int) -> None:
    graph = graphs.parse(spec)
    assert list(graph) == list(range(nodes))
    assert graph.number_of_edges() == edges


@given(st.integers(2, 25), st.floats(0.3, 1.0), st.integers(0, 1000))
def test_erdos_renyi_is_first_connected_draw(n: int, p: float, seed: int) -> None:
    graph = graphs.erdos_renyi(n, p, seed)
    draws = (nx.gnp_random_graph(n, p, seed=seed + k) for k in range(100))
    first = next(draw for draw in draws if nx.is_connected(draw))
    assert set(graph.edges) == set(first.edges)


def test_erdos_renyi_gives_up_with_remedy() -> None:
    with pytest.raises(ValueError, match=r"p is 0\.001: 100 draws .* raise p"):
        graphs.erdos_renyi(50, 0.001, 0)


@pytest.mark.parametrize(
    "spec", ["er:20", "er:20:0.5:1:2", "er:20:x", "ring", "ring:2", "er:20:1.5", "er:-3:0.5"]
)
def test_parse_refuses(spec: str) -> None:
    with pytest.raises(ValueError, match=r"\d|give"):
        graphs.parse(spec)


def test_parse_of_unknown_name_lists_known_ones() -> None:
    with pytest.raises(ValueError, match="neither a file nor a known name.*florentine"):
        graphs.parse("no_such_graph")


def test_exponential_sends_to_powers_of_two() -> None:
    assert sorted(graphs.exponential(8).successors(6)) == [0, 2, 7]


def test_edge_list_keeps_numbers_ignores_weights_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "net.txt"
    file.write_text("# a network\n2 0 0.5\n\n0,1\n% another\n1\t3\n3 1 # last\n")
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
def test_edge_list_names_bad_line(tmp_path: Path, line: str) -> None:
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


def read(tmp_path: Path, text: str, name: str = "net.txt") -> nx.Graph:
    """The graph of a file with that text."""
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return graphs.from_edgelist(file)


def labelled(graph: nx.Graph) -> set[frozenset[str]]:
    """The edges by name."""
    names = nodes.labels(graph)
    return {frozenset((names[u], names[v])) for u, v in graph.edges}


def edges(*pairs: tuple[str, str]) -> set[frozenset[str]]:
    """Edges to compare with."""
    return set(map(frozenset, pairs))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # SNAP: a header with #, tabs; and temporal edges of four columns.
        ("# Nodes: 3 Edges: 2\n# FromNodeId\tToNodeId\n0\t1\n1\t2\n", [("0", "1"), ("1", "2")]),
        ("1 2 1082040961\n1 3 1082155839\n3 2 1082414391\n", [("1", "2"), ("1", "3"), ("2", "3")]),
        # KONECT: comments with %, weights and times.
        ("% sym unweighted\n% 2 3 3\n1 2 \n3 2 \n", [("1", "2"), ("2", "3")]),
        ("% asym positive\n1 2 1 99\n2 1 1 98\n2 3 1 97\n", [("1", "2"), ("2", "3")]),
        # Signed edges with times, as of a spreadsheet.
        ("6,2,4,1289241911.7\n6,5,-2,1289241941.5\n", [("6", "2"), ("6", "5")]),
        # networkx's own, with data.
        ("a b {'weight': 2, 'since': 'May'}\nb c {}\n", [("a", "b"), ("b", "c")]),
        ('a,b,{"weight": 2}\nb,c,{}\n', [("a", "b"), ("b", "c")]),
        # Weights of some lines; those with a decimal point are no nodes.
        ("0 1 5.0\n1 2\n", [("0", "1"), ("1", "2")]),
        ("1 0 1.0\n2 0 3.0\n", [("0", "1"), ("0", "2")]),
        # In the tree of three edges two nodes have one parent, and all weights are 1.
        ("1 0 1\n2 0 1\n3 1 1\n", [("1", "0"), ("2", "0"), ("3", "1")]),
        ("Rome,Milan,\nMilan,Turin,0.5\n", [("Rome", "Milan"), ("Milan", "Turin")]),
        ("Rome Milan 5\nMilan Turin 7\n", [("Rome", "Milan"), ("Milan", "Turin")]),
        # The tab separates: all else is a name.
        ("St Mary, N\tX (DC)\n", [("St Mary, N", "X (DC)")]),
        ('"a\tb"\tc\n"St Mary" N  0.5\n', None),
        ('"Ward#3" "Ward #4"\n', [("Ward#3", "Ward #4")]),
        ('"a;b|c:d",e-1.x_y\n', [("a;b|c:d", "e-1.x_y")]),
        ('"St Mary"\t"0.7"\n', [("St Mary", "0.7")]),
        ("O'Brien a@b.org\n", [("O'Brien", "a@b.org")]),
    ],
)
def test_edge_lists_of_these_forms_are_read(tmp_path: Path, text: str, expected) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="line 1 of .*visible"):
            read(tmp_path, text)
    else:
        assert labelled(read(tmp_path, text)) == edges(*expected)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a b\nRome,,0.7\n", "line 2 of .*'Rome,,0.7'.*two"),
        ("a b\n,Rome,Milan\n", "line 2 of .*two"),
        ("a b\nRome 0.7\n", "line 2 of .*decimal numbers"),
        ("a b\nRome Milan\t5\n", "line 2 of .*double quotes"),
        ("a b\nWard#3 Ward#4\n", "line 2 of .*in double quotes"),
        ("a b\nA\tWard # 3\n", "line 2 of .*in double quotes"),
        ("a b\nA,Ward #3\n", "line 2 of .*in double quotes"),
        ("a b\nA Ward #3\n", "line 2 of .*numbers only"),
        ("a b\na b#c\n", "line 2 of .*in double quotes"),
        ("a b\nRome;Milan\n", "line 2 of .*a tab, a comma or spaces"),
        ("a b\nRome; Milan\n", "line 2 of .*in double quotes"),
        ("a b\nRome;Milan;0,5\n", "line 2 of .*in double quotes"),
        ("a b\nRome|Milan\n", "line 2 of .*a tab, a comma or spaces"),
        ("a b\nRome | Milan\n", "line 2 of .*"),
        ("a b\nRome: Milan\n", "line 2 of .*in double quotes"),
        ("a b\n0:\t1\n", "line 2 of .*in double quotes"),
        ("a b\n(0, 1)\n", r"line 2 of .*in double quotes"),
        ("a b\na -> 5\n", "line 2 of .*in double quotes"),
        ("a b\n% %\n-- a\n", "line 3 of .*lack letters and digits"),
        ("a b\n'St Mary' 5\n", "line 2 of .*in double quotes"),
        ("a b\nRome Milan Turin\n", "line 2 of .*after two names.*from_dict_of_lists"),
        ("a b\nRome\n", "line 2 of .*two.*from_dict_of_lists"),
        ("a b\na a\u00a0b\n", "line 2 of .*visible"),
        ("a b\nRome\x85Milan Turin\n", "line 2 of .*visible"),
        ("3 2\n2\n1 3\n2\n", "line 2 of .*METIS"),
        ("3 2 1\n2 5\n1 1\n2 1", "line 3 of .*METIS"),
        ('a b\n"a"b c\n', "line 2 of .*close every double quote"),
    ],
)
def test_lines_that_are_no_edge_are_named(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a b 0.5\nb c 2.0\nc d 1.0\n", "3 lines"),
        ("a b {'weight': 0.5}\nb c {}\n", "1 line"),
        ("a,b,0.5\nb,c\n", "1 line"),
        ("a b {}\nb c # 2.0\n", None),
        ("a b\nb c\n", None),
    ],
)
def test_weights_are_ignored_with_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, lines: str | None
) -> None:
    assert read(tmp_path, text).number_of_edges() == text.count("\n")
    error = capsys.readouterr().err
    file = tmp_path / "net.txt"
    begin = f"{file}: weights after the names are ignored (in {lines}); "
    assert error.startswith(begin) and error.count("\n") == 1 if lines else not error


@pytest.mark.parametrize(
    ("text", "match"),
    [
        # Rows of a node and its neighbours: a path, a star, a ring, and METIS.
        ("0 1 2 3\n1 2\n2 3\n", "neighbours"),
        ("0 1\n1 0 2\n2 1\n", "neighbours"),
        ("0 1 4\n1 0 2\n2 1 3\n3 2 4\n4 3 0\n", "neighbours"),
        ("0 1 2\n1 3 4\n", "neighbours"),
        ("% a comment\n4 6\n2 3 4\n1 3 4\n1 2 4\n1 2 3\n", "METIS"),
        ("3 2 1\n2 7\n1 7 3 5\n2 5\n\n", "METIS"),
        # The number of each row, in front of the edge.
        ("1,2,1\n2,3,2\n3,1,3\n", "neighbours"),
        # An adjacency matrix, of ones or weights.
        ("0 1 0\n1 0 1\n0 1 0\n", "matrix"),
        ("0,1,0,1\n1,0,1,0\n0,1,0,1\n1,0,1,0\n", "matrix"),
        ("0 0 1 0 1\n0 0 1 0 0\n", "matrix"),
        # Counts in front.
        ("4 3\n1 2\n2 3\n3 4\n", "begin it with #"),
        ("source, target\n1,2\n2,3\n", "may be titles.*begin it with #"),
        # Others' formats by name.
        ("<?xml version='1.0'?>\n<graphml><graph/></graphml>\n", "GraphML.*read_graphml"),
        ('graph [\n  node [ id 0 label "A" ]\n]\n', "GML.*read_gml"),
        ('Creator "me"\ngraph\n[\n directed 0\n]\n', "GML.*read_gml"),
        ('*Vertices 2\n1 "Rome"\n2 "Milan"\n*Edges\n1 2\n', "Pajek.*read_pajek"),
        ("%%MatrixMarket matrix coordinate pattern symmetric\n3 3 2\n2 1\n3 1\n", "mmread"),
        ("c a graph\np edge 3 2\ne 1 2\ne 2 3\n", "DIMACS"),
        ("p sp 3 2\na 1 2 7\na 2 3 5\n", "DIMACS"),
        ("%MatrixMarket matrix coordinate pattern general\n3 4 2\n2 1\n3 1\n", "mmread"),
        ("DL n=5\nformat = edgelist1\n1 2\n", "UCINET"),
        ("1 Rome\n2 Milan\n#\n1 2\n", "TGF"),
        ("% bip unweighted\n1 1\n1 2\n", "two-mode"),
        ("graph G {\n a -- b;\n}\n", "DOT.*read_dot"),
        ('{"nodes": [{"id": 0}], "links": []}\n', "JSON.*node_link_graph"),
    ],
)
def test_what_is_another_format_is_named(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(ValueError, match=f"path is .*net.txt.*{match}"):
        read(tmp_path, text)


@pytest.mark.parametrize("seed", range(4))
def test_what_networkx_writes_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    """Edge lists are the same graph; rows of neighbours and METIS are never another one."""
    graph = nx.relabel_nodes(graphs.erdos_renyi(9, 0.4, seed), {i: f"St {i}" for i in range(9)})
    for data in (True, False):
        nx.write_edgelist(graph, tmp_path / "net.txt", delimiter="\t", data=data)
        assert labelled(graphs.from_edgelist(tmp_path / "net.txt")) == {
            frozenset(map(str, edge)) for edge in graph.edges
        }
    rows = ["\t".join(map(str, [node, *graph[node]])) for node in graph]
    for lines in (rows, list(nx.generate_adjlist(nx.convert_node_labels_to_integers(graph)))):
        with pytest.raises(ValueError, match="from_dict_of_lists"):
            read(tmp_path, "\n".join(lines))


def test_one_name_in_two_forms_of_unicode_is_one_node(tmp_path: Path) -> None:
    composed = "Z\u00fcrich"
    decomposed = "Zu\u0308rich"
    graph = read(tmp_path, f"{composed} Bern\nBern {decomposed}\n")
    assert (
        nodes.labels(graph) == (composed, "Bern") == nodes.labels(nx.Graph([(decomposed, "Bern")]))
    )
    assert nodes.find((composed, "Bern"), decomposed) == 0


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


def test_facebook_ego_is_stored_graph(real_data) -> None:
    graph = graphs.facebook_ego(real_data("facebook_ego"))
    degrees = [degree for _, degree in graph.degree]
    assert (graph.number_of_nodes(), graph.number_of_edges()) == (148, 1692)
    assert (min(degrees), max(degrees)) == (1, 57)


def test_renumbered_graphs_keep_edges_and_shorten_them() -> None:
    distant = nx.relabel_nodes(graphs.grid(9, 9), {i: (i * 32) % 81 for i in range(81)})
    for graph in (distant, distant.to_directed()):
        near = graphs.renumbered(graph)
        assert max(abs(i - j) for i, j in near.edges) <= 9
        names = {i: int(label) for i, label in near.nodes(data="label")}
        assert set(names) == set(range(81))
        back = nx.relabel_nodes(near, names)
        assert {*map(frozenset, back.edges)} == {*map(frozenset, graph.edges)}
        assert back.number_of_edges() == graph.number_of_edges()
    named = graphs.renumbered(graphs.florentine())
    assert sorted(nodes.labels(named)) == sorted(nodes.labels(graphs.florentine()))


@pytest.mark.parametrize(
    "make", [graphs.ring, graphs.complete, graphs.star, graphs.path, graphs.exponential]
)
@pytest.mark.parametrize("n", [3, 100])
def test_numbers_of_any_width_are_taken(make, n):
    assert nx.utils.graphs_equal(make(np.int8(n)), make(n))
    assert nx.utils.graphs_equal(graphs.grid(np.int8(n), np.int8(3)), graphs.grid(n, 3))


@pytest.mark.parametrize("value", [None, 3, b"ring:3", [(0, 1)], graphs.ring(3), ""])
def test_what_is_no_text_names_no_graph(value):
    with pytest.raises(ValueError, match=r"graph is .*; give text, such as 'ring:8' or the path"):
        graphs.parse(value)
    with pytest.raises(ValueError, match=r"path is .*; give the path of an edge-list file"):
        graphs.from_edgelist(value)
