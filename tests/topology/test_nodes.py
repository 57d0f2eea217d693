"""Names of nodes: what a word means, and what it must not be taken for."""

from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpjax.topology import graphs, mixing, nodes

ONE_BASED = ("1", "2", "3", "4")


def test_labels_follow_rows_of_matrix(tmp_path: Path) -> None:
    file = tmp_path / "net.txt"
    file.write_text('zoe "New York"\n"New York",mia\n')
    assert nodes.labels(graphs.from_edgelist(file)) == ("zoe", "New York", "mia")
    file.write_text("St Mary\tNorth\t0.5\nNorth\tNew York\n")
    assert nodes.labels(graphs.from_edgelist(file)) == ("St Mary", "North", "New York")
    file.write_text("a b 3.5 1\nb c {'weight': 2, 'since': 'May'}\n")
    assert nodes.labels(graphs.from_edgelist(file)) == ("a", "b", "c")
    assert nodes.labels(nx.Graph([("b", "a")])) == ("b", "a")
    # Numbers are rows, in whatever order a user's edges first named them.
    backwards = nx.Graph([(2, 1), (1, 0)])
    backwards.nodes[2]["label"] = "end"
    assert nodes.labels(backwards) == ("0", "1", "end")
    assert (
        mixing.uniform_neighbors(backwards)[0, 2] == 0 < mixing.uniform_neighbors(backwards)[0, 1]
    )
    assert nodes.labels(graphs.ring(3)) == ("0", "1", "2") and not nodes.have_names(("0", "1", "2"))
    assert nodes.labels(graphs.florentine())[3] == "Peruzzi" and nodes.have_names(ONE_BASED)


def test_label_is_its_node_and_number_of_two_nodes_is_none() -> None:
    assert nodes.find(("a", "b"), "b") == 1 == nodes.find(("a", "b"), "1")
    assert nodes.find(("0", "1", "2"), "2") == 2
    # Beyond the indices, and so of one node alone.
    assert nodes.find(ONE_BASED, "4") == 3
    assert nodes.find(ONE_BASED, "label:3") == 2 and nodes.find(ONE_BASED, "index:3") == 3
    with pytest.raises(
        ValueError, match=r"agent 3 \(index 2\) or agent 4 \(index 3\); write label"
    ):
        nodes.find(ONE_BASED, "3", "attacker")
    with pytest.raises(ValueError, match="attacker is '0', a number that is no label.*index:0 is"):
        nodes.find(ONE_BASED, "0", "attacker")
    with pytest.raises(ValueError, match="attacker names agent b .* twice"):
        nodes.find_all(("a", "b"), ["b", "1"], "attacker")


@pytest.mark.parametrize(
    "word", ["7", "-1", "", "1.0", "01", "²", "9" * 5000, "index:9", "label:9"]
)
def test_what_is_no_node_is_refused_with_choice(word: str) -> None:
    with pytest.raises(ValueError, match=r"which is no node; give 0 \.\. 2"):
        nodes.find(("0", "1", "2"), word)
    with pytest.raises(ValueError, match="a label .a, b., or index:0 .. index:1"):
        nodes.find(("a", "b"), word)


@given(st.lists(st.sampled_from(["0", "1", "2", "3", "a", "index:1", "label:1"]), min_size=1))
def test_word_finds_node_that_was_told_or_refuses(names: list[str]) -> None:
    for index, name in enumerate(names):
        for word in (name, f"label:{name}", f"index:{index}"):
            try:
                result = nodes.find(names, word)
            except ValueError:
                continue
            assert result == index
            # What is found without a prefix is never the index of another node.
            other = name.isdecimal() and int(name) < len(names) and int(name) != result
            assert word != name or not other


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("New York,Boston", "double quotes"),
        ("Boston, New York", "double quotes"),
        ('"New York Boston', "close every double quote"),
        ("New York Boston", "after two names"),
        ("St Mary North 2.5", "after two names"),
        ('"" Boston', "visible"),
        ("a\x1b[31m b", "visible"),
    ],
)
def test_names_that_could_be_read_twice_are_refused(tmp_path: Path, line: str, match: str) -> None:
    file = tmp_path / "net.txt"
    file.write_text(f"a b\n{line}\n")
    with pytest.raises(ValueError, match=f"line 2 of .*{match}"):
        graphs.from_edgelist(file)


def test_byte_order_mark_is_no_name(tmp_path: Path) -> None:
    file = tmp_path / "net.csv"
    file.write_text("a,b\nb,c\nc,a\n", encoding="utf-8-sig")
    assert nodes.labels(graphs.from_edgelist(file)) == ("a", "b", "c")


@pytest.mark.parametrize("names", [None, "abc", graphs.ring(3), [0, 1, 2]])
def test_names_are_texts(names):
    with pytest.raises(ValueError, match=r"names is .*; give nodes.labels\(graph\)"):
        nodes.find(names, "1")
