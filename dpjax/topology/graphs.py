"""Communication graphs: networkx at the border, nodes always numbered 0 to n-1."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import networkx as nx
from scipy.sparse import csgraph

from dpjax import _files, _validate
from dpjax.topology import nodes

__all__ = [
    "complete",
    "erdos_renyi",
    "exponential",
    "facebook_ego",
    "florentine",
    "from_edgelist",
    "grid",
    "parse",
    "path",
    "renumbered",
    "ring",
    "star",
]

_DRAWS = 100
_EDGE, _NODE = 300, 700  # bytes that networkx takes
_EGO = "facebook_ego.edgelist"
_EGO_SHAPE = (148, 1692)
_FIELD = re.compile(r'"([^"]*)"|([^\s,"]+)')
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


def erdos_renyi(n: int, p: float, seed: int = 0) -> nx.Graph:
    """Return a connected random graph in which every pair is an edge with probability ``p``.

    Draws ``networkx.gnp_random_graph(n, p, seed)`` and, while that is disconnected, tries
    ``seed + 1``, ``seed + 2``, ... The seed that was used is ``graph.graph["seed"]``.

    Args:
        n: number of agents.
        p: edge probability in (0, 1]; 1 gives the complete graph.
        seed: the first seed tried.

    Returns:
        A connected graph over 0..n-1.

    Raises:
        ValueError: for a bad argument, or when 100 draws in a row are disconnected.

    Example:
        >>> from dpjax.topology import graphs
        >>> graph = graphs.erdos_renyi(20, 0.5, seed=0)
        >>> graph.number_of_nodes(), graph.number_of_edges()
        (20, 88)
    """
    n = _validate.integer("n", n)
    p = _validate.positive("p", p, remedy="give an edge probability in (0, 1]")
    if p > 1:
        raise ValueError(f"p is {p!r}; give an edge probability in (0, 1]")
    _room("n", n, n, round(p * n * (n - 1) / 2))
    seed = _validate.integer("seed", seed, least=0)
    for trial in range(seed, seed + _DRAWS):
        graph = nx.gnp_random_graph(n, p, seed=trial)
        if nx.is_connected(graph):
            graph.graph["seed"] = trial
            return graph
    raise ValueError(
        f"p is {p!r}: {_DRAWS} draws of a random graph over n={n} agents, seeds {seed} to "
        f"{seed + _DRAWS - 1}, were all disconnected; raise p (connected graphs are common above "
        f"log(n)/n) or lower n"
    )


def _room(name: str, value: int, nodes: int, edges: int) -> int:
    """The value, unless its graph exceeds this machine's memory."""
    _validate.memory(name, value, "the graph", _EDGE * edges + _NODE * nodes, item=1)
    return value


def ring(n: int) -> nx.Graph:
    """Return the cycle over ``n`` >= 3 agents.

    Example:
        >>> from dpjax.topology import graphs
        >>> list(graphs.ring(4).edges)
        [(0, 1), (0, 3), (1, 2), (2, 3)]
    """
    return nx.cycle_graph(_room("n", _validate.integer("n", n, least=3), n, n))


def complete(n: int) -> nx.Graph:
    """Return the graph in which all ``n`` agents are joined to each other.

    Example:
        >>> from dpjax.topology import graphs
        >>> graphs.complete(20).number_of_edges()
        190
    """
    n = _validate.integer("n", n)
    return nx.complete_graph(_room("n", n, n, n * (n - 1) // 2))


def star(n: int) -> nx.Graph:
    """Return the star over ``n`` agents, agent 0 in the middle.

    Example:
        >>> from dpjax.topology import graphs
        >>> list(graphs.star(4).edges)
        [(0, 1), (0, 2), (0, 3)]
    """
    return nx.star_graph(_room("n", _validate.integer("n", n, least=2), n, n) - 1)


def path(n: int) -> nx.Graph:
    """Return the path 0 - 1 - ... - n-1.

    Example:
        >>> from dpjax.topology import graphs
        >>> list(graphs.path(4).edges)
        [(0, 1), (1, 2), (2, 3)]
    """
    return nx.path_graph(_room("n", _validate.integer("n", n), n, n))


def grid(rows: int, columns: int) -> nx.Graph:
    """Return the grid; the agent in row r and column c is number ``r * columns + c``.

    Example:
        >>> from dpjax.topology import graphs
        >>> list(graphs.grid(2, 3).edges)
        [(0, 3), (0, 1), (1, 4), (1, 2), (2, 5), (3, 4), (4, 5)]
    """
    rows = _validate.integer("rows", rows)
    columns = _validate.integer("columns", columns)
    _room("rows and columns", rows * columns, rows * columns, 2 * rows * columns)
    return nx.convert_node_labels_to_integers(nx.grid_2d_graph(rows, columns))


def exponential(n: int) -> nx.DiGraph:
    """Return the directed exponential graph: i sends to i + 1, i + 2, i + 4, ... modulo n.

    Example:
        >>> from dpjax.topology import graphs
        >>> sorted(graphs.exponential(8).successors(0))
        [1, 2, 4]
    """
    n = _validate.integer("n", n, least=2)
    _room("n", n, n, n * (n - 1).bit_length())
    graph = nx.DiGraph()
    graph.add_nodes_from(range(n))
    hops = [1 << k for k in range((n - 1).bit_length())]
    graph.add_edges_from((i, (i + hop) % n) for i in range(n) for hop in hops)
    return graph


def florentine() -> nx.Graph:
    """Return the 15 Florentine families and their marriages; names in the ``label`` attribute.

    Example:
        >>> from dpjax.topology import graphs
        >>> graph = graphs.florentine()
        >>> len(graph), graph.nodes[8]["label"]
        (15, 'Albizzi')
    """
    return nx.convert_node_labels_to_integers(
        nx.florentine_families_graph(), label_attribute="label"
    )


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
    edges = [edge for each in enumerate(lines, start=1) if (edge := _edge(path, *each))]
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


def renumbered(graph: nx.Graph) -> nx.Graph:
    """Return the graph with other numbers, neighbours near each other.

    A run over devices gives each of them consecutive agents, and sends what agents of different
    devices exchange (``run(..., devices=k)``). These numbers are the reverse Cuthill-McKee order,
    which suits graphs with far and near agents; random graphs, all near, gain nothing by it.

    Args:
        graph: Nodes of any names.

    Returns:
        The graph over 0..n-1. The ``label`` attribute of a node is its name in the given graph, by
        which `dpjax.topology.nodes` finds it; data go to agents by the new numbers.

    Reference:
        George and Liu (1981), Computer solution of large sparse positive definite systems.

    Example:
        >>> import networkx as nx
        >>> from dpjax.topology import graphs
        >>> far = nx.Graph([(0, 3), (3, 1), (1, 4), (4, 2)])
        >>> near = graphs.renumbered(far)
        >>> max(abs(i - j) for i, j in far.edges), max(abs(i - j) for i, j in near.edges)
        (3, 1)
        >>> near.nodes(data="label")[1]
        '4'
    """
    names, order = nodes.labels(graph), nodes.order(graph)
    links = nx.to_scipy_sparse_array(graph, order, format="csr")
    olds = csgraph.reverse_cuthill_mckee(links).tolist()
    near = nx.relabel_nodes(graph, {order[old]: new for new, old in enumerate(olds)})
    nx.set_node_attributes(near, {new: names[old] for new, old in enumerate(olds)}, "label")
    return near


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
        files = [root / folder / _EGO for root in roots for folder in (".", "graphs")]
        path = next((file for file in files if os.path.isfile(file)), None)
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


_NUMBERED: dict[str, tuple[Callable[..., nx.Graph], tuple[type, ...], int]] = {
    # name: (function, argument types, how many of them may not be left out)
    "er": (erdos_renyi, (int, float, int), 2),
    "ring": (ring, (int,), 1),
    "complete": (complete, (int,), 1),
    "star": (star, (int,), 1),
    "path": (path, (int,), 1),
    "grid": (grid, (int, int), 2),
    "exponential": (exponential, (int,), 1),
    "florentine": (florentine, (), 0),
    "facebook_ego": (facebook_ego, (), 0),
}


def parse(spec: str) -> nx.Graph:
    """Return the graph that a command line names.

    Args:
        spec: ``er:20:0.5`` or ``er:20:0.5:7`` (agents, edge probability, first seed),
            ``ring:12``, ``complete:20``, ``star:8``, ``path:5``, ``grid:3:4``,
            ``exponential:16``, ``florentine``, ``facebook_ego``, or the path of an edge-list file.

    Returns:
        The graph, nodes 0..n-1.

    Raises:
        ValueError: naming the part of ``spec`` that is wrong.

    Example:
        >>> from dpjax.topology import graphs
        >>> graphs.parse("grid:3:4").number_of_nodes()
        12
    """
    name, *words = str(spec).split(":")
    if name not in _NUMBERED:
        known = ", ".join(_NUMBERED)
        try:
            return from_edgelist(spec)
        except FileNotFoundError:
            raise ValueError(
                f"graph is {spec!r}, neither a file nor a known name; give an edge-list file or "
                f"one of {known} (as in er:20:0.5 or ring:12)"
            ) from None
    function, types, required = _NUMBERED[name]
    if not required <= len(words) <= len(types):
        raise ValueError(
            f"graph is {spec!r} with {len(words)} numbers after {name!r}; give "
            + (f"{required} to {len(types)}" if required != len(types) else f"{required}")
        )
    try:
        arguments = [convert(word) for convert, word in zip(types, words, strict=False)]
    except ValueError:
        raise ValueError(f"graph is {spec!r}; give numbers, as in er:20:0.5 or ring:12") from None
    try:
        return function(*arguments)
    except ValueError as error:
        raise ValueError(f"graph is {spec!r}: {error}") from None
