"""Communication graphs: networkx at the border, nodes always numbered 0 to n-1."""

from collections.abc import Callable

import networkx as nx

from dpjax import _validate
from dpjax.topology.files import facebook_ego, from_edgelist

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
    "ring",
    "star",
]

_DRAWS = 100
_EDGE, _NODE = 300, 700  # bytes that networkx takes


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
    """The value, unless its graph and the mixing matrix of that exceed this machine's memory."""
    _validate.memory(name, value, "the graph", _EDGE * edges + _NODE * nodes, item=1)
    _validate.memory(name, value, "a mixing matrix [n, n] and its support", 3, nodes, nodes)
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
    function, types, least = _NUMBERED[name]
    if not least <= len(words) <= len(types):
        raise ValueError(
            f"graph is {spec!r} with {len(words)} numbers after {name!r}; give "
            + (f"{least} to {len(types)}" if least != len(types) else f"{least}")
        )
    try:
        arguments = [convert(word) for convert, word in zip(types, words, strict=False)]
    except ValueError:
        raise ValueError(f"graph is {spec!r}; give numbers, as in er:20:0.5 or ring:12") from None
    try:
        return function(*arguments)
    except ValueError as error:
        raise ValueError(f"graph is {spec!r}: {error}") from None
