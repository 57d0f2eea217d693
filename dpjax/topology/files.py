"""Graphs from edge-list files, and where the stored ones lie."""

import os
import re
from pathlib import Path

import networkx as nx

from dpjax import _files

__all__: list[str] = []

_EGO = "facebook_ego.edgelist"
_EGO_SHAPE = (148, 1692)
_FIELD = re.compile(r'"([^"]*)"|([^\s,"]+)')
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


def from_edgelist(path: str | os.PathLike[str], *, directed: bool = False) -> nx.Graph:
    """Return the graph of a text file with one edge, two node names, a line.

    Blank lines and what follows a ``#`` are ignored, and so are weights after the two names
    (numbers, or data in braces). Spaces, tabs and commas separate, and a name that holds one of
    them stands in double quotes; in a line with tabs names may hold spaces as they are. When the
    names are exactly the numbers 0..n-1 they are kept; otherwise nodes are numbered in the order
    in which the file first names them. The name is each node's ``label`` attribute;
    `dpjax.topology.nodes` finds a node by it. Repeated edges count once.

    Args:
        path: the file.
        directed: read ``u v`` as "u sends to v" and return a DiGraph.

    Returns:
        The graph, nodes 0..n-1 in order.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: for a line with one name or three, a self-loop or names that commas and spaces
            separate differently (with its number), a file without edges, or one that is not text.

    Example:
        >>> from pathlib import Path
        >>> from dpjax.topology import graphs
        >>> _ = Path("links.csv").write_text("Rome,Milan\\nMilan,Turin")
        >>> graphs.from_edgelist("links.csv").nodes(data="label")
        NodeDataView({0: 'Rome', 1: 'Milan', 2: 'Turin'}, data='label')
    """
    path = Path(path)
    if os.path.isdir(path):
        raise ValueError(f"path is {str(path)!r}, a folder; give an edge-list file")
    with _files.reading(path, "give an edge list"):
        # Spreadsheets begin a file with a byte order mark, which is no part of the first name.
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    edges = [
        edge for number, line in enumerate(lines, start=1) if (edge := _edge(path, number, line))
    ]
    if not edges:
        raise ValueError(f"path is {str(path)!r}, which holds no edge; give two names a line")
    names = list(dict.fromkeys(name for edge in edges for name in edge))
    if sorted(names) == sorted(str(i) for i in range(len(names))):
        names.sort(key=int)
    number_of = {name: i for i, name in enumerate(names)}
    graph: nx.Graph = nx.DiGraph() if directed else nx.Graph()
    graph.add_nodes_from((i, {"label": name}) for name, i in number_of.items())
    graph.add_edges_from((number_of[u], number_of[v]) for u, v in edges)
    return graph


def _edge(path: Path, number: int, line: str) -> tuple[str, str] | None:
    """The two names of a line, None of an empty one."""
    text = line.partition("#")[0].strip()
    if not text:
        return None
    if "\t" in text and '"' not in text:
        words = [part.strip() for part in text.split("\t") if part.strip()]
    else:
        words = [quoted or plain for quoted, plain in _FIELD.findall(text)]

    # In `New York,Boston` York may be a node, and in `St Mary North` nobody knows where one ends.
    parts = text.partition("{")[0].split(",")[:2]
    unclear = len(parts) > 1 and '"' not in text and any(len(part.split()) > 1 for part in parts)
    weighted = len(words) < 3 or words[2].startswith("{") or all(map(_NUMBER.fullmatch, words[2:]))
    if text.count('"') % 2 or not all(word and word.isprintable() for word in words[:2]):
        remedy = "give names of visible characters, and close every double quote"
    elif unclear or not weighted:
        remedy = "put names that hold spaces in double quotes; after two names, give numbers only"
    elif len(words) < 2 or words[0] == words[1]:
        remedy = "give the names of two different nodes"
    else:
        return words[0], words[1]
    raise ValueError(f"line {number} of {path} is {line.strip()[:60]!r}; {remedy}")


def facebook_ego(path: str | os.PathLike[str] | None = None) -> nx.Graph:
    """Return ego network 414 of SNAP's ego-Facebook, 148 agents and 1,692 edges.

    Args:
        path: the edge-list file; None looks for ``facebook_ego.edgelist`` in ``$DPJAX_DATA``
            (there or in its folder ``graphs``), then in the user's cache (``~/.cache/dpjax``).

    Returns:
        The connected graph, nodes 0..147 in the file's order of first mention.

    Raises:
        FileNotFoundError: when a path is given and there is no such file.
        ValueError: when there is none where it is looked for, or it is another graph.

    Reference:
        McAuley and Leskovec, "Learning to discover social circles in ego networks", 2012.
    """
    if path is None:
        cache = os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/dpjax"
        named = [root for root in (os.environ.get("DPJAX_DATA"), cache) if root]
        roots = [Path(root).expanduser() for root in named]
        places = [root / folder / _EGO for root in roots for folder in (".", "graphs")]
        path = next((place for place in places if os.path.isfile(place)), None)
        if path is None:
            raise ValueError(
                f"{_EGO} is in none of {', '.join(map(str, roots))}; run `dpjax data` to fetch it, "
                "set DPJAX_DATA to the folder that holds it, or give its path"
            )
    graph = from_edgelist(path)
    shape = (graph.number_of_nodes(), graph.number_of_edges())
    if shape != _EGO_SHAPE or not nx.is_connected(graph):
        raise ValueError(
            f"path is {str(path)!r}, a graph of {shape[0]} nodes and {shape[1]} edges; the ego "
            f"network has {_EGO_SHAPE[0]} and {_EGO_SHAPE[1]}: fetch the file again"
        )
    return graph
