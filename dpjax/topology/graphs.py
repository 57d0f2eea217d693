"""Communication graphs: networkx at the border, nodes always numbered 0 to n-1."""

import inspect
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
_EDGE = 300
_NODE = 700  # bytes that networkx takes
_EGO = "facebook_ego.edgelist"
_EGO_SHAPE = (148, 1692)

# Parts of a line of an edge list.
_QUOTED = re.compile(r'"([^"]*)"')
_DATA = re.compile(r"(?<=[\s,])\{.*\}$")
_COMMENT = re.compile(r"\s#(\s.*)?$")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
# A name without quotes holds a letter or digit, is no decimal number and is in no other quotes.
_PLAIN = r"(?i)(?!'|[-+]?\d*\.\d*(e[-+]?\d+)?$)(?=.*[^\W_])[^\"#;:|{}]+(?<!')"
_NAME = re.compile(_PLAIN.replace("{}", r"()<>\[\]{} "))
_NAME_BESIDE_TABS = re.compile(_PLAIN.replace("{}", ""))
# A name and a number, or two names and their weight.
_UNCLEAR = re.compile(r"[^\t]*[ ,][^\t]*\t[-+\d.]+")

_WRITE = r"write edges by networkx.write_edgelist(graph, path, delimiter='\t', data=False)"
_NEIGHBOURS = f"rows of neighbours (METIS, say) go by networkx.from_dict_of_lists; {_WRITE}"
_FORMATS = {
    r"\A\s*<(\?|!|graphml|gexf)": "GraphML or GEXF: use networkx.read_graphml or read_gexf",
    r"(?m)^[ \t]*graph\s*\[": "GML: use networkx.read_gml",
    r"(?m)^[ \t]*(strict\s+)?(di)?graph\b[^\n\[]*\{": "DOT: use networkx.nx_pydot.read_dot",
    r"(?mi)^[ \t]*\*(vertices|network|edges|arcs)": "Pajek: use networkx.read_pajek",
    r"\A\s*[\[{]": "JSON: use networkx.node_link_graph",
    r"(?i)\A%+MatrixMarket": "Matrix Market: use scipy.io.mmread, networkx.from_scipy_sparse_array",
    r"\A([01]([ \t,]+[01]){2,}\s*)++\Z": "an adjacency matrix: use networkx.from_numpy_array",
    r"(?m)^p[ \t]+[a-z]+[ \t]+\d+[ \t]+\d+": "DIMACS: keep its edges only, two names a line",
    r"(?i)\A\s*dl\s+n\s*=": "UCINET's DL: keep its edges only, two names a line",
    r"\A([^#\n]++\n)++#[ \t]*\n(?=[^#\n])": "TGF, or has a lone #: keep its edges only",
    r"\A%[ \t]*bip": "two-mode, with one number for two nodes: give each a name of its own",
}
"""Other formats, whose lines may look like edges, and how to read them."""


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
    p = _validate.fraction("p", p)
    _require_memory("n", n, n, round(p * n * (n - 1) / 2))
    seed = _validate.integer("seed", seed, minimum=0)
    # The seed that was used is kept: whoever repeats the run begins there.
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


def _require_memory(name: str, value: int, nodes: int, edges: int) -> None:
    """Refuse a graph that exceeds this machine's memory, before it is made."""
    _validate.memory(name, value, "the graph", _EDGE * edges + _NODE * nodes, item=1)


def _size(n: int, minimum: int) -> int:
    """The number of agents of a graph that has about as many edges."""
    n = _validate.integer("n", n, minimum=minimum)
    _require_memory("n", n, n, n)
    return n


def ring(n: int) -> nx.Graph:
    """Return the cycle over ``n`` >= 3 agents.

    Example:
        >>> from dpjax.topology import graphs
        >>> list(graphs.ring(4).edges)
        [(0, 1), (0, 3), (1, 2), (2, 3)]
    """
    # Two agents would have two links between them, which networkx counts once.
    return nx.cycle_graph(_size(n, minimum=3))


def complete(n: int) -> nx.Graph:
    """Return the graph in which all ``n`` agents are joined to each other.

    Example:
        >>> from dpjax.topology import graphs
        >>> graphs.complete(20).number_of_edges()
        190
    """
    n = _validate.integer("n", n)
    _require_memory("n", n, n, n * (n - 1) // 2)
    return nx.complete_graph(n)


def star(n: int) -> nx.Graph:
    """Return the star over ``n`` agents, agent 0 in the middle.

    Example:
        >>> from dpjax.topology import graphs
        >>> list(graphs.star(4).edges)
        [(0, 1), (0, 2), (0, 3)]
    """
    # networkx counts the leaves alone.
    return nx.star_graph(_size(n, minimum=2) - 1)


def path(n: int) -> nx.Graph:
    """Return the path 0 - 1 - ... - n-1.

    Example:
        >>> from dpjax.topology import graphs
        >>> list(graphs.path(4).edges)
        [(0, 1), (1, 2), (2, 3)]
    """
    return nx.path_graph(_size(n, minimum=1))


def grid(rows: int, columns: int) -> nx.Graph:
    """Return the grid; the agent in row r and column c is number ``r * columns + c``.

    Example:
        >>> from dpjax.topology import graphs
        >>> list(graphs.grid(2, 3).edges)
        [(0, 3), (0, 1), (1, 4), (1, 2), (2, 5), (3, 4), (4, 5)]
    """
    rows = _validate.integer("rows", rows)
    columns = _validate.integer("columns", columns)
    agents = rows * columns
    # An agent has a link to the right and one below.
    _require_memory("rows and columns", agents, agents, 2 * agents)
    return nx.convert_node_labels_to_integers(nx.grid_2d_graph(rows, columns))


def exponential(n: int) -> nx.DiGraph:
    """Return the directed exponential graph: i sends to i + 1, i + 2, i + 4, ... modulo n.

    Example:
        >>> from dpjax.topology import graphs
        >>> sorted(graphs.exponential(8).successors(0))
        [1, 2, 4]
    """
    n = _validate.integer("n", n, minimum=2)
    # Hops double until the next would lead around the whole circle.
    count = (n - 1).bit_length()
    _require_memory("n", n, n, n * count)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(n))
    for i in range(n):
        graph.add_edges_from((i, (i + 2**k) % n) for k in range(count))
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


def from_edgelist(path: _files.PathLike, *, directed: bool = False) -> nx.Graph:
    """Return the graph of a text file with one edge, two node names, a line.

    What could be read in two ways is refused. These are the rules:

    - A tab separates; in a line without tabs a comma; in a line without either, spaces.
    - A name in double quotes may hold anything visible. Other names hold a letter or a digit, are
      no decimal numbers, and hold none of ``# ; : |``. They hold commas only beside tabs, and
      spaces and brackets too.
    - After the names there may be numbers or data in braces, as weights, which are ignored: a line
      on standard error says so. Whole numbers are refused where they may be neighbours: in rows of
      different lengths, or where all rows begin differently.
    - Blank lines and those that begin with ``#`` or ``%`` are ignored. After names that spaces
      separate, so is what follows a ``#`` between spaces.
    - Letters are compared in Unicode's composed form (NFC). The file is UTF-8.

    When the names are exactly the numbers 0..n-1 they are kept; otherwise nodes are numbered in the
    order in which the file first names them. The name is each node's ``label`` attribute;
    `dpjax.topology.nodes` finds a node by it. Repeated edges count once.

    Args:
        path: the file.
        directed: read ``u v`` as "u sends to v" and return a DiGraph.

    Returns:
        The graph, nodes 0..n-1 in order.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: for a line that is no edge by these rules, or a self-loop (with its number); for
            a file without edges, of another format, or that is not text.

    Example:
        >>> from pathlib import Path
        >>> from dpjax.topology import graphs
        >>> _ = Path("links.csv").write_text("Rome,Milan\\nMilan,Turin")
        >>> graphs.from_edgelist("links.csv").nodes(data="label")
        NodeDataView({0: 'Rome', 1: 'Milan', 2: 'Turin'}, data='label')
    """
    if not path or not isinstance(path, str | os.PathLike):
        raise _validate.refusal("path", path, "give the path of an edge-list file")
    path = Path(path)
    if os.path.isdir(path):
        raise ValueError(f"path is {str(path)!r}, a folder; give an edge-list file")
    with _files.reading(path, "give an edge list, as UTF-8 text"):
        # Spreadsheets begin a file with a byte order mark, which is no part of the first name.
        text = _validate.name(path.read_text(encoding="utf-8-sig"))
    for pattern, description in _FORMATS.items():
        if re.search(pattern, text):
            raise ValueError(f"path is {str(path)!r}, which is {description}; {_WRITE}")
    rows = []
    weighted = 0
    # Not `splitlines`, which also divides names at rare characters.
    for number, line in enumerate(text.split("\n"), start=1):
        row = _row(path, number, line)
        if row:
            rows.append(row)
            # networkx writes {} behind an edge without weights.
            data = _DATA.findall(line.rstrip())
            weighted += len(row) > 2 or data not in ([], ["{}"])
    if not rows:
        raise ValueError(f"path is {str(path)!r}, which holds no edge; give two names a line")
    _check_rows(path, rows)
    if weighted:
        _files.say(
            f"{path}: weights after the names are ignored (in {_validate.counted(weighted, 'line')}"
            "); agents average by who is joined, or by a mixing matrix of your own"
        )
    names = list(dict.fromkeys(name for row in rows for name in row[:2]))
    numbers = [str(i) for i in range(len(names))]
    if sorted(names) == sorted(numbers):
        # Numbers 0..n-1 are the nodes themselves, whatever line names them first.
        names.sort(key=int)
    number_of = {name: i for i, name in enumerate(names)}
    graph: nx.Graph = nx.DiGraph() if directed else nx.Graph()
    graph.add_nodes_from((i, {"label": name}) for name, i in number_of.items())
    for first, second, *_ in rows:
        graph.add_edge(number_of[first], number_of[second])
    return graph


def _row(path: Path, number: int, line: str) -> list[str]:
    """The names of a line and the numbers after them; nothing of a line without an edge."""
    text = line.strip()
    if text[:1] in ("", "#", "%"):
        return []
    # A quote stands for each quoted name, which may hold separators, while the line is divided.
    quoted = iter(_QUOTED.findall(text))
    bare = _DATA.sub("", _QUOTED.sub('"', text))
    separator = next((mark for mark in "\t," if mark in bare), " ")
    if separator == " ":
        bare = re.sub(" +", " ", _COMMENT.sub("", bare)).strip()
    fields = [field.strip() for field in bare.split(separator)]
    words = [next(quoted, "").strip() if field == '"' else field for field in fields]
    # Tabs leave no doubt where a name ends, which may then hold spaces and commas.
    plain = _NAME_BESIDE_TABS if separator == "\t" else _NAME
    named = all(field == '"' or plain.fullmatch(field) for field in fields[:2])
    visible = all(word and word.isprintable() for word in words[:2])
    if not visible or len(words) < 2 or words[0] == words[1]:
        remedy = (
            "give two different nodes by visible names, with a tab, a comma or spaces between; "
            f"{_NEIGHBOURS}"
        )
    elif not named or text.count('"') % 2 or _UNCLEAR.fullmatch(bare):
        remedy = (
            "put names that are decimal numbers, lack letters and digits, or hold spaces or any of "
            "#;:|'()[]{}<> in double quotes, and close every double quote"
        )
    elif not all(word == "" or _NUMBER.fullmatch(word) for word in words[2:]):
        remedy = (
            "after two names, give numbers only; begin a header with #; put names that hold spaces "
            f"in double quotes; {_NEIGHBOURS}"
        )
    else:
        return [word for word in words if word]
    raise ValueError(f"line {number} of {path} is {text[:60]!r}; {remedy}")


def _check_rows(path: Path, rows: list[list[str]]) -> None:
    """Refuse rows of numbers that may be something else than edges and their weights."""
    numbered = [row for row in rows if len(row) > 2 and all(map(str.isdecimal, row[1:3]))]
    # A node has one row of neighbours, and an edge one number, so these begin differently.
    firsts = {row[0] for row in rows}
    separate = len(firsts) == len(rows) == len(numbered)
    separate = separate and all(row[1] != row[2] for row in numbered)
    if separate or (numbered and len(set(map(len, rows))) > 1):
        raise ValueError(
            f"path is {str(path)!r}, whose whole numbers may be weights, or neighbours of each "
            f"line's node; write weights with a decimal point, or none; {_NEIGHBOURS}"
        )
    others = {name for row in rows[1:] for name in row[:2]}
    first = "".join(rows[0][:2])
    titles = "".join(others).isdecimal() and not first.isdecimal()
    counts = [str(len(others)), str(len(rows) - 1)]
    if titles or rows[0] == counts:
        raise ValueError(
            f"path is {str(path)!r}, whose first line {' '.join(rows[0])!r} may be titles, or the "
            "counts of nodes and edges; begin it with #, or write this edge in another line"
        )


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
    names = nodes.labels(graph)
    order = nodes.order(graph)
    links = nx.to_scipy_sparse_array(graph, order, format="csr")
    olds = csgraph.reverse_cuthill_mckee(links).tolist()
    numbers = {order[old]: new for new, old in enumerate(olds)}
    near = nx.relabel_nodes(graph, numbers)
    nx.set_node_attributes(near, {new: names[old] for new, old in enumerate(olds)}, "label")
    return near


def facebook_ego(path: _files.PathLike | None = None) -> nx.Graph:
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
        folders = [os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/dpjax"]
        # The user's own folder comes before the cache, which `dpjax data` fills.
        if os.environ.get("DPJAX_DATA"):
            folders.insert(0, os.environ["DPJAX_DATA"])
        roots = [Path(folder).expanduser() for folder in folders]
        files = [root / folder / _EGO for root in roots for folder in (".", "graphs")]
        path = next(filter(os.path.isfile, files), None)
        if path is None:
            places = ", ".join(map(str, roots))
            raise ValueError(
                f"{_EGO} is in none of {places}; run `dpjax data` to fetch it, set DPJAX_DATA to "
                "the folder that holds it, or give its path"
            )
    graph = from_edgelist(path)
    shape = (graph.number_of_nodes(), graph.number_of_edges())
    if shape != _EGO_SHAPE or not nx.is_connected(graph):
        raise ValueError(
            f"path is {str(path)!r}, a graph of {shape[0]} nodes and {shape[1]} edges; the ego "
            f"network has {_EGO_SHAPE[0]} and {_EGO_SHAPE[1]}: fetch the file again"
        )
    return graph


_NAMED: dict[str, Callable[..., nx.Graph]] = {
    "er": erdos_renyi,
    "ring": ring,
    "complete": complete,
    "star": star,
    "path": path,
    "grid": grid,
    "exponential": exponential,
    "florentine": florentine,
    "facebook_ego": facebook_ego,
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
    if not spec or not isinstance(spec, str | os.PathLike):
        text = _validate.shown(spec)
        raise ValueError(f"graph is {text}; give text, such as 'ring:8' or the path of a file")
    name, *words = str(spec).split(":")
    if name not in _NAMED:
        try:
            return from_edgelist(spec)
        except FileNotFoundError:
            raise ValueError(
                f"graph is {spec!r}, neither a file nor a known name; "
                f"{_validate.choice(name, _NAMED)} (as in er:20:0.5 or ring:12), or give an "
                "edge-list file"
            ) from None
    function = _NAMED[name]
    # A command line gives the numbers of a function's signature, and no paths.
    parameters = inspect.signature(function).parameters.values()
    numbers = [number for number in parameters if number.annotation in (int, float)]
    required = sum(number.default is number.empty for number in numbers)
    allowed = len(numbers)
    if not required <= len(words) <= allowed:
        choice = required if required == allowed else f"{required} to {allowed}"
        raise ValueError(
            f"graph is {spec!r} with {_validate.counted(len(words), 'number')} after {name!r}; "
            f"give {choice}"
        )
    try:
        arguments = [number.annotation(word) for number, word in zip(numbers, words, strict=False)]
    except ValueError:
        raise ValueError(f"graph is {spec!r}; give numbers, as in er:20:0.5 or ring:12") from None
    try:
        return function(*arguments)
    except ValueError as error:
        raise ValueError(f"graph is {spec!r}: {error}") from None
