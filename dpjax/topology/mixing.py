"""Mixing matrices: how an agent averages what it receives. Row i holds agent i's weights."""

import hashlib
from collections.abc import Sequence
from typing import Literal

import networkx as nx
import numpy as np
import scipy.sparse.csgraph as csgraph
from jaxtyping import Float

from dpjax import _validate
from dpjax.topology import nodes

__all__ = [
    "fingerprint",
    "metropolis_hastings",
    "push_sum",
    "spectral_gap",
    "survivors",
    "uniform_neighbors",
]

Stochastic = Literal["rows", "columns", "double"]

_LISTED = 6
"""How many agents a message names."""

_SUMS: dict[str | None, tuple[str, ...]] = {
    None: (),
    "rows": ("row",),
    "columns": ("column",),
    "double": ("row", "column"),
}


def metropolis_hastings(graph: nx.Graph) -> Float[np.ndarray, "n n"]:
    """Return the Metropolis-Hastings weights, symmetric and doubly stochastic.

    W_ij = 1 / (1 + max(deg_i, deg_j)) on edges, and the diagonal takes what is left.

    Args:
        graph: a connected undirected graph over 0..n-1.

    Returns:
        [n, n] float64.

    Raises:
        ValueError: for a disconnected or directed graph.

    Example:
        >>> from dpjax.topology import graphs, mixing
        >>> mixing.metropolis_hastings(graphs.path(3)).round(2)
        array([[0.67, 0.33, 0.  ],
               [0.33, 0.33, 0.33],
               [0.  , 0.33, 0.67]])
    """
    sends = _adjacency(graph)
    if (sends != sends.T).any():
        raise ValueError(
            "graph is directed; use uniform_neighbors or push_sum, or graph.to_undirected()"
        )
    degree = sends.sum(axis=1)
    mixing = np.where(sends, 1.0 / (1.0 + np.maximum.outer(degree, degree)), 0.0)
    np.fill_diagonal(mixing, 1.0 - mixing.sum(axis=1))
    return mixing


def uniform_neighbors(graph: nx.Graph) -> Float[np.ndarray, "n n"]:
    """Return W = (A + I) / (deg + 1), row-stochastic: equal weights on what an agent receives.

    On a directed graph an edge u -> v means that u sends to v, and row v averages over v and
    those that send to it.

    Args:
        graph: a connected (strongly, if directed) graph over 0..n-1.

    Returns:
        [n, n] float64.

    Raises:
        ValueError: for a graph that is not connected.

    Example:
        >>> from dpjax.topology import graphs, mixing
        >>> mixing.uniform_neighbors(graphs.path(3)).round(2)
        array([[0.5 , 0.5 , 0.  ],
               [0.33, 0.33, 0.33],
               [0.  , 0.5 , 0.5 ]])
    """
    receives = _adjacency(graph).T + np.eye(graph.number_of_nodes())
    return receives / receives.sum(axis=1, keepdims=True)


def push_sum(graph: nx.Graph) -> Float[np.ndarray, "n n"]:
    """Return the column-stochastic matrix by which each agent splits equally what it sends.

    W_ij = 1 / (1 + out-degree of j) when j sends to i or j = i. The models must be divided by
    the push-sum weights y_t+1 = W y_t, y_0 = 1 (all 1 on regular graphs).

    Args:
        graph: a strongly connected directed graph (or a connected one) over 0..n-1.

    Returns:
        [n, n] float64.

    Raises:
        ValueError: for a graph that is not connected.

    Example:
        >>> from dpjax.topology import graphs, mixing
        >>> mixing.push_sum(graphs.path(3)).round(2)
        array([[0.5 , 0.33, 0.  ],
               [0.5 , 0.33, 0.5 ],
               [0.  , 0.33, 0.5 ]])
    """
    receives = _adjacency(graph).T + np.eye(graph.number_of_nodes())
    return receives / receives.sum(axis=0, keepdims=True)


def survivors(
    mixing: Float[np.ndarray, "n n"], departed: Sequence[int]
) -> Float[np.ndarray, "k k"]:
    """Return the mixing of those who stay: the departed's weights go to each one's own model.

    Symmetric doubly stochastic matrices stay so.

    Args:
        mixing: [n, n], rows summing to 1.
        departed: the agents who leave.

    Returns:
        [k, k], the agents who stay in their old order.

    Raises:
        ValueError: when the departure disconnects the network, nobody stays, or a number is no
            agent's.

    Example:
        >>> from dpjax.topology import graphs, mixing
        >>> ring = mixing.metropolis_hastings(graphs.ring(4))
        >>> mixing.survivors(ring, [3]).round(2)
        array([[0.67, 0.33, 0.  ],
               [0.33, 0.33, 0.33],
               [0.  , 0.33, 0.67]])
    """
    matrix = check(_validate.square("mixing", mixing), stochastic="rows")
    leaving = _validate.agents("departed", departed)
    n = len(matrix)
    if any(agent >= n for agent in leaving):
        raise ValueError(f"departed names agent {max(leaving)}; give numbers from 0 to {n - 1}")
    stay = np.setdiff1d(np.arange(n), leaving)
    if not len(stay):
        raise ValueError(f"departed is {leaving}, everyone; leave at least one agent")
    lost = matrix.copy()
    lost[:, stay] = 0.0
    remaining = matrix[np.ix_(stay, stay)]
    remaining[np.diag_indices(len(stay))] += lost.sum(axis=1)[stay]
    return check(remaining, stochastic="rows", name="mixing of the survivors")


def spectral_gap(mixing: Float[np.ndarray, "*p n n"]) -> float:
    """Return 1 minus the second largest modulus of an eigenvalue: the rate of consensus.

    For a schedule [P, n, n] it is that of one period's product, per round. A directed W may be
    far from normal; then the gap is the asymptotic rate, not the worst first step.

    Args:
        mixing: [n, n] stochastic matrix, or [P, n, n].

    Returns:
        A number in [0, 1]; 1 for the complete graph's 11'/n, and for one agent.

    Raises:
        ValueError: when ``mixing`` is not stochastic by rows or by columns.

    Example:
        >>> from dpjax.topology import graphs, mixing
        >>> round(mixing.spectral_gap(mixing.metropolis_hastings(graphs.ring(12))), 3)
        0.089
    """
    matrix = np.asarray(mixing, dtype=np.float64)
    tolerance = _validate.SUM_TOLERANCE
    columns = matrix.ndim >= 2 and np.allclose(matrix.sum(axis=-2), 1.0, atol=tolerance)
    matrix = check(matrix, stochastic="columns" if columns else "rows", connected=False)
    period = 1
    if matrix.ndim == 3:
        period, product = matrix.shape[0], np.eye(matrix.shape[-1])
        for step in matrix:
            product = step @ product
        matrix = product
    if matrix.shape[0] == 1:
        return 1.0
    symmetric = np.array_equal(matrix, matrix.T)
    values = np.linalg.eigvalsh(matrix) if symmetric else np.linalg.eigvals(matrix)
    second = np.sort(np.abs(values))[-2]
    return float(max(0.0, 1.0 - second ** (1.0 / period)))


def check(
    mixing: Float[np.ndarray, "*p n n"],
    *,
    stochastic: Stochastic | None = "rows",
    symmetric: bool = False,
    connected: bool = True,
    name: str = "mixing",
) -> Float[np.ndarray, "*p n n"]:
    """Return a validated float64 copy of a mixing matrix or of a schedule of them.

    Args:
        mixing: [n, n], or [P, n, n] for a schedule of period P.
        stochastic: which sums must be 1 (entries then >= 0); None asks for finite entries only.
        symmetric: whether W must equal its transpose.
        connected: whether every agent must reach every other (a schedule: over its period).
        name: the argument's name in error messages.

    Returns:
        The float64 copy, same shape.

    Raises:
        ValueError: with the first entry, row or agent at fault and the remedy.
    """
    if stochastic is not None:
        _validate.one_of("stochastic", stochastic, ("rows", "columns", "double"))
    if hasattr(mixing, "adjacency"):
        raise ValueError(
            f"{name} is a graph, {_validate.shown(mixing)}; give its matrix, "
            "mixing.metropolis_hastings(graph)"
        )
    matrix = _validate.stochastic(name, mixing, _SUMS[stochastic])
    small = (matrix != 0) & (np.abs(matrix) < np.finfo(np.float32).tiny)
    if small.any():
        where = tuple(int(i) for i in np.argwhere(small)[0])
        raise ValueError(
            f"{name} is {matrix[where]:g} at {where}, which float32 takes for 0 on some devices "
            "and not on others; give 0, or at least 1.2e-38"
        )
    if symmetric and (skew := np.abs(matrix - np.swapaxes(matrix, -1, -2))).max() > 1e-12:
        where = tuple(int(i) for i in np.unravel_index(skew.argmax(), skew.shape))
        raise ValueError(
            f"{name} is not symmetric at {where}; give a symmetric matrix, such as "
            f"metropolis_hastings(graph)"
        )
    if connected:
        support = matrix != 0
        _require_connected(support.any(axis=0) if matrix.ndim == 3 else support, name)
    return matrix


def fingerprint(*arrays: Float[np.ndarray, "..."] | float) -> str:
    """Return the sha256 of the arrays' shapes and float64 values (little-endian, -0 as 0).

    Equal exactly when every bit of every entry is equal, on any platform.

    Example:
        >>> from dpjax.topology import mixing
        >>> len(mixing.fingerprint([[1.0]], 2.0))
        64
    """
    digest = hashlib.sha256()
    for array in arrays:
        values = np.asarray(array, dtype=np.float64) + 0.0
        digest.update(repr(values.shape).encode())
        digest.update(np.ascontiguousarray(values, dtype="<f8").tobytes())
    return digest.hexdigest()


def _adjacency(graph: nx.Graph) -> Float[np.ndarray, "n n"]:
    """Return the 0/1 matrix, entry (u, v) for an edge u -> v, without self-loops."""
    n = graph.number_of_nodes()
    if n == 0:
        raise ValueError("graph has no nodes; give at least one agent")
    _validate.memory("graph", f"of {n} agents", "a mixing matrix [n, n] and its support", 3, n, n)
    adjacency = nx.to_numpy_array(graph, nodelist=nodes.order(graph), weight=None) > 0
    np.fill_diagonal(adjacency, False)
    _require_connected(adjacency, "graph", nodes.labels(graph))
    return adjacency.astype(float)


def _require_connected(support: np.ndarray, name: str, names: Sequence[str] | None = None) -> None:
    """Refuse unless everyone reaches everyone, naming the smallest part that does not."""
    parts, part_of = csgraph.connected_components(support, connection="strong")
    if parts == 1:
        return
    sizes = np.bincount(part_of).astype(float)
    # Of several as small, the one without agent 0.
    sizes[part_of[0]] += 0.5
    members = np.flatnonzero(part_of == sizes.argmin())
    names = [str(i) for i in range(len(support))] if names is None else names
    members_text = ", ".join(nodes.title(names, int(i)) for i in members[:_LISTED])
    members_text += f" and {len(members) - _LISTED} more" if len(members) > _LISTED else ""
    hint = ""
    if nodes.named(names) and len(members) == 2:
        hint = " (a header line of a file is read as an edge: begin it with #, or delete it)"
    raise ValueError(
        f"{name} is not connected: {members_text} and the other {len(support) - len(members)} of "
        f"{len(support)} agents cannot all reach each other{hint}; add links, or design each "
        "component on its own"
    )
