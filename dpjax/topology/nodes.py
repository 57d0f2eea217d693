"""Names of nodes: the module that maps labels to indices, and back.

Arrays know indices 0..n-1 alone; files and people have names. A number that is both the label of
one node and the index of another is refused, never guessed at.
"""

from collections.abc import Iterable, Sequence
from typing import NoReturn, TypeAlias

import networkx as nx

from dpjax import _validate

__all__ = ["find", "labels"]

_Names: TypeAlias = Sequence[str]
"""Names of nodes, in the order of the rows of the mixing matrix."""
_INDEX = "index:"
_LABEL = "label:"


def labels(graph: nx.Graph) -> tuple[str, ...]:
    """Return the name of every node, in the order of the rows of its mixing matrix.

    Args:
        graph: A graph; a node's name is its ``label`` attribute, else the node itself.

    Returns:
        n names, in Unicode's composed form (NFC); those of a graph without names are "0", "1", ...

    Raises:
        ValueError: For an array or anything else that is no networkx graph, and one without nodes.

    Example:
        >>> from dpjax.topology import graphs, nodes
        >>> nodes.labels(graphs.florentine())[:2]
        ('Acciaiuoli', 'Medici')
    """
    names = (graph.nodes[node].get("label", node) for node in order(graph))
    return tuple(map(_validate.name, names))


def order(graph: nx.Graph) -> list:
    """Return the nodes in the order of the rows of the mixing matrix.

    Args:
        graph: Nodes 0..n-1 come as numbers do, whenever they were added; others as they were added.

    Raises:
        ValueError: For what is no networkx graph, and for one without nodes.
    """
    if not isinstance(graph, nx.Graph):
        text = " ".join(_validate.shown(graph).split())
        raise ValueError(
            f"graph is {text}; give a networkx graph, networkx.from_numpy_array(A) of an "
            "adjacency array A, or one from dpjax.topology.graphs"
        )
    if not len(graph):
        raise ValueError("graph has no nodes; give at least one agent")
    # Numbers are rows, in whatever order edges have named them.
    numbers = range(graph.number_of_nodes())
    if set(graph) == set(numbers):
        return list(numbers)
    return list(graph)


def have_names(names: _Names) -> bool:
    """Return whether names tell more than indices do."""
    return any(name != str(index) for index, name in enumerate(names))


def title(names: _Names, index: int) -> str:
    """Return a node's title in a text: its name, and its index where the two differ.

    Args:
        names: From `labels`.
        index: The node.
    """
    if names[index] == str(index):
        return f"agent {index}"
    return f"agent {names[index]} (index {index})"


def find(names: _Names, word: str, argument: str = "node") -> int:
    """Return the index of the node that a word means.

    A word is a label, or an index where no label is a number; ``label:3`` and ``index:3`` say
    which.

    Args:
        names: From `labels`.
        word: What the user wrote.
        argument: What the word is the value of, for messages.

    Returns:
        The index, 0..n-1.

    Raises:
        ValueError: For a word that means no node, or two, and for names that are no texts.

    Example:
        >>> from dpjax.topology import graphs, nodes
        >>> nodes.find(nodes.labels(graphs.florentine()), "Medici")
        1
    """
    several = isinstance(names, Iterable) and not isinstance(names, str)
    if not several or not all(isinstance(label, str) for label in names):
        raise _validate.refusal("names", names, "give nodes.labels(graph)")
    # Letters with accents have two forms in Unicode; labels are in the composed one.
    word = _validate.name(word).strip()
    name = word.removeprefix(_LABEL)
    called = {index for index, label in enumerate(names) if label in (name, word)}
    # A word that begins with "label:" means no index.
    counted = set() if name != word else _counted(names, word.removeprefix(_INDEX))
    # A bare number that is no label: where other labels are numbers, it may be a mistyped one.
    if counted and not called and name == word.removeprefix(_INDEX):
        if any(label.isdecimal() for label in names):
            remedy = f"{_INDEX}{word} is {title(names, *counted)}"
            _refuse(names, f"{argument} is {word!r}, a number that is no label here; {remedy}", "")
    # The label of one node may be the index of another.
    matches = sorted(called | counted)
    if not matches:
        _refuse(names, f"{argument} is {word!r}, which is no node", name)
    if len(matches) > 1:
        twins = " or ".join(title(names, index) for index in matches[:2])
        ways = f"{_LABEL}{word} or {_INDEX}{word}"
        if len(called) > 1 or word.startswith(_INDEX):
            ways = " or ".join(f"{_INDEX}{index}" for index in matches[:2])
        raise ValueError(f"{argument} is {word!r}, which may be {twins}; write {ways}")
    return matches[0]


def find_all(names: _Names, words: Sequence[str], argument: str) -> tuple[int, ...]:
    """Return the indices of the nodes that several words mean.

    Args:
        names: From `labels`.
        words: See `find`.
        argument: What the words are the value of, for messages.

    Raises:
        ValueError: As `find`, and for a node that is named twice.
    """
    indices: list[int] = []
    for word in words:
        index = find(names, word, argument)
        if index in indices:
            raise ValueError(f"{argument} names {title(names, index)} twice; name it once")
        indices.append(index)
    return tuple(indices)


def _counted(names: _Names, word: str) -> set[int]:
    """The index that a word is, if it is one; 007 is none."""
    # int() also takes digits of other scripts, which no index is written in.
    decimal = word.isascii() and word.isdecimal() and len(word) < 10
    if not decimal or word != str(int(word)):
        return set()
    return {int(word)} & set(range(len(names)))


def _refuse(names: _Names, reason: str, word: str) -> NoReturn:
    """Refuse, with what there is to choose from, the label nearest to a word first."""
    remedy = f"give 0 .. {len(names) - 1}"
    if have_names(names):
        listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        remedy = f"give a label ({listed}), or {_INDEX}0 .. {_INDEX}{len(names) - 1}"
        remedy = _validate.choice(word, names, remedy)
    raise ValueError(f"{reason}; {remedy}")
