"""Mixing matrices: how an agent averages what it receives. Row i holds agent i's weights.

A matrix is a dense array [n, n], or for many agents a sparse one, ``scipy.sparse.csr_array``: the
functions of a graph make it with ``sparse=True``. A schedule [P, n, n] is dense.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import networkx as nx
import numpy as np
from jaxtyping import Float
from scipy.sparse import csgraph, csr_array, diags_array, eye_array, issparse
from scipy.sparse.linalg import ArpackNoConvergence, eigs, eigsh

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

SquareMatrix: TypeAlias = Float[np.ndarray, "n n"]
DenseMixing: TypeAlias = Float[np.ndarray, "*p n n"]
"""A dense mixing matrix W, or a schedule of P of them."""
Mixing: TypeAlias = DenseMixing | csr_array
"""A mixing matrix W, dense or sparse, or a schedule of P of them."""
Stochastic = Literal["rows", "columns", "double"]

_LISTED = 6
"""How many agents a message names."""

_SMALLEST = np.finfo(np.float32).tiny
"""Entries below it are 0 on some devices and not on others."""

_HASHED = 2**17
"""Entries that are hashed at once."""

_SMALL = 500
"""Sparse matrices of fewer agents have their eigenvalues computed densely."""

_SUMS = {None: (), "rows": ("row",), "columns": ("column",), "double": ("row", "column")}


def metropolis_hastings(graph: nx.Graph, *, sparse: bool = False) -> Mixing:
    """Return the Metropolis-Hastings weights, symmetric and doubly stochastic.

    W_ij = 1 / (1 + max(deg_i, deg_j)) on edges, and the diagonal takes what is left.

    Args:
        graph: a connected undirected graph over 0..n-1; weights of its edges are not read.
        sparse: whether to return a ``scipy.sparse.csr_array``.

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
    sends = _adjacency(graph, sparse)
    if (sends != sends.T).sum():
        raise ValueError(
            "graph is directed; use uniform_neighbors or push_sum, or graph.to_undirected()"
        )
    degree = sends.sum(axis=1)
    links = sends.tocoo()
    row, column = links.coords
    weights = 1.0 / (1.0 + np.maximum(degree[row], degree[column]))
    off = csr_array((weights, links.coords), shape=links.shape)
    if sparse:
        return off + diags_array(1.0 - off.sum(axis=1), format="csr")
    mixing = off.toarray()
    # Sums of dense rows do not round as those of sparse ones.
    np.fill_diagonal(mixing, 1.0 - mixing.sum(axis=1))
    return mixing


def uniform_neighbors(graph: nx.Graph, *, sparse: bool = False) -> Mixing:
    """Return W = (A + I) / (deg + 1), row-stochastic: equal weights on what an agent receives.

    On a directed graph an edge u -> v means that u sends to v, and row v averages over v and
    those that send to it.

    Args:
        graph: a connected (strongly, if directed) graph over 0..n-1; weights of its edges are not
            read.
        sparse: whether to return a ``scipy.sparse.csr_array``.

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
    receives = _receives(graph, sparse)
    mixing = diags_array(1.0 / receives.sum(axis=1), format="csr") @ receives
    return mixing if sparse else mixing.toarray()


def push_sum(graph: nx.Graph, *, sparse: bool = False) -> Mixing:
    """Return the column-stochastic matrix by which each agent splits equally what it sends.

    W_ij = 1 / (1 + out-degree of j) when j sends to i or j = i. The models must be divided by
    the push-sum weights y_t+1 = W y_t, y_0 = 1 (all 1 on regular graphs).

    Args:
        graph: a strongly connected directed graph (or a connected one) over 0..n-1.
        sparse: whether to return a ``scipy.sparse.csr_array``.

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
    receives = _receives(graph, sparse)
    mixing = receives @ diags_array(1.0 / receives.sum(axis=0), format="csr")
    return mixing if sparse else mixing.toarray()


def survivors(mixing: SquareMatrix, departed: Sequence[int]) -> Float[np.ndarray, "k k"]:
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
    matrix = check_mixing(_validate.square("mixing", mixing), stochastic="rows")
    n = len(matrix)
    leaving = _validate.agents("departed", departed)
    if any(agent >= n for agent in leaving):
        raise ValueError(f"departed names agent {max(leaving)}; give numbers from 0 to {n - 1}")
    stay = np.setdiff1d(np.arange(n), leaving)
    if not len(stay):
        raise ValueError(f"departed is {leaving}, everyone; leave at least one agent")
    # What an agent would take from the departed stays with its own model.
    lost = matrix.copy()
    lost[:, stay] = 0.0
    remaining = matrix[np.ix_(stay, stay)]
    remaining[np.diag_indices(len(stay))] += lost.sum(axis=1)[stay]
    return check_mixing(remaining, stochastic="rows", name="mixing of the survivors")


def spectral_gap(mixing: Mixing) -> float:
    """Return 1 minus the second largest modulus of an eigenvalue: the rate of consensus.

    For a schedule [P, n, n] it is that of one period's product, per round. A directed W may be
    far from normal; then the gap is the asymptotic rate, not the worst first step.

    Args:
        mixing: [n, n] stochastic matrix, dense or sparse, or [P, n, n].

    Returns:
        A number in [0, 1]; 1 for the complete graph's 11'/n, and for one agent.

    Raises:
        ValueError: when ``mixing`` is not stochastic by rows or by columns; for a sparse one whose
            second eigenvalue is too close to 1 for Arnoldi iterations.

    Example:
        >>> from dpjax.topology import graphs, mixing
        >>> round(mixing.spectral_gap(mixing.metropolis_hastings(graphs.ring(12))), 3)
        0.089
    """
    matrix = check_stochastic(mixing, connected=False)
    period = 1
    if matrix.ndim == 3:
        period = len(matrix)
        # A schedule contracts by the product W_P .. W_1 over its period.
        product = np.eye(matrix.shape[-1])
        for step in matrix:
            product = step @ product
        matrix = product
    # One agent has no second eigenvalue.
    if matrix.shape[0] == 1:
        return 1.0
    # Arnoldi's iteration needs more agents than it costs products.
    if issparse(matrix) and matrix.shape[0] >= _SMALL:
        return max(0.0, 1.0 - _second(matrix))
    matrix = dense(matrix)
    # Symmetric solvers are faster, and keep eigenvalues real.
    symmetric = np.array_equal(matrix, matrix.T)
    eigenvalues = np.linalg.eigvalsh if symmetric else np.linalg.eigvals
    second = np.sort(np.abs(eigenvalues(matrix)))[-2]
    # The rate of a round, of those of a whole period.
    return float(max(0.0, 1.0 - second ** (1.0 / period)))


def check_stochastic(mixing: Mixing, *, connected: bool = True) -> Mixing:
    """Return a float64 copy of W; ValueError unless it is stochastic by rows or by columns."""
    matrix = check_mixing(mixing, stochastic=None, connected=connected)
    # Push-sum's columns sum to 1; whatever is neither is refused for its rows.
    tolerance = _validate.SUM_TOLERANCE
    columns = np.allclose(matrix.sum(axis=-2), 1.0, rtol=0.0, atol=tolerance)
    return check_mixing(matrix, stochastic="columns" if columns else "rows", connected=False)


def check_mixing(
    mixing: Mixing,
    *,
    stochastic: Stochastic | None = "rows",
    connected: bool = True,
    name: str = "mixing",
) -> Mixing:
    """Return a validated float64 copy of a mixing matrix or of a schedule of them.

    The copy of a sparse matrix is a read-only ``csr_array`` of sorted entries, none of them 0.

    Args:
        mixing: [n, n], dense or sparse, or [P, n, n] for a schedule of period P.
        stochastic: which sums must be 1 (entries then >= 0); None asks for finite entries only.
        connected: whether every agent must reach every other (a schedule: over its period).
        name: the argument's name in error messages.

    Returns:
        The float64 copy, same shape.

    Raises:
        ValueError: with the first entry, row or agent at fault and the remedy.
    """
    if stochastic is not None:
        _validate.one_of("stochastic", stochastic, ("rows", "columns", "double"))
    if mixing is None:
        raise ValueError(
            f"{name} is None; give the matrix of a graph, mixing.metropolis_hastings(graph)"
        )
    copy = _entries if issparse(mixing) else _validate.finite_array
    matrix = copy(name, mixing)
    _validate.check_weights(name, matrix, _SUMS[stochastic])
    sizes = abs(matrix)
    position = _validate.first((sizes > 0) != (sizes >= _SMALLEST))
    if position:
        raise ValueError(
            f"{name} is {matrix[position]:g} at {position}, which float32 takes for 0 on some "
            "devices and not on others; give 0, or at least 1.2e-38"
        )
    if connected:
        # A schedule connects whom any of its matrices connects.
        support = sizes if matrix.ndim == 2 else sizes.sum(axis=0)
        _require_connected(csr_array(support), name)
    return matrix


def _entries(name: str, value: csr_array) -> csr_array:
    """A read-only float64 copy of a sparse matrix: its entries in order, finite, none of them 0."""
    if value.dtype.kind not in "fiub":
        raise ValueError(f"{name} is a sparse matrix of {value.dtype}; give one of numbers")
    matrix = csr_array(value, dtype=np.float64, copy=True)
    # Equal matrices must have equal bits: runs and designs are tied to their digest.
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    invalid = matrix.copy()
    invalid.data = ~np.isfinite(matrix.data)
    position = _validate.first(invalid)
    if position:
        value = matrix[position]
        raise ValueError(f"{name} holds {value} at {position}; remove or replace such entries")
    for part in (matrix.data, matrix.indices, matrix.indptr):
        part.flags.writeable = False
    return matrix


def dense(mixing: Mixing, name: str = "mixing") -> DenseMixing:
    """Return the matrix as a dense array, which it may be already.

    Raises:
        ValueError: for a sparse one whose dense form exceeds this machine's memory.
    """
    if not issparse(mixing):
        return mixing
    n = mixing.shape[-1]
    purpose = "what is asked needs a dense matrix [n, n] and several as large, which"
    _validate.memory(name, f"a sparse matrix of {n} agents", purpose, 4, n, n)
    return csr_array(mixing).toarray()


def _second(matrix: csr_array) -> float:
    """The second largest modulus of an eigenvalue of a sparse stochastic matrix."""
    asymmetric = (matrix != matrix.T).nnz
    solve = eigs if asymmetric else eigsh
    # A fixed start: the same number at every call.
    start = np.random.default_rng(0).standard_normal(matrix.shape[0])
    try:
        values = solve(matrix, k=2, which="LM", v0=start, return_eigenvectors=False)
    except ArpackNoConvergence:
        raise ValueError(
            f"mixing of {matrix.shape[0]} agents has a second eigenvalue too close to another one "
            "for sparse iterations; give mixing.toarray() if memory allows it"
        ) from None
    return float(np.sort(np.abs(values))[0])


def fingerprint(*arrays: Any) -> str:
    """Return the sha256 of the arrays' shapes and float64 values (little-endian, -0 as 0).

    Equal exactly when every bit of every entry is equal, on any platform. That of a sparse matrix
    is of its entries by row and column, and differs from that of the dense matrix.

    Example:
        >>> from dpjax.topology import mixing
        >>> len(mixing.fingerprint([[1.0]], 2.0))
        64
    """
    digest = hashlib.sha256()
    for array in arrays:
        if issparse(array):
            rows = _entries("mixing", array)
            digest.update(f"sparse {rows.shape}".encode())
            # One byte order and size, so that the digest is the same on any platform.
            digest.update(rows.indptr.astype("<i8").tobytes())
            digest.update(rows.indices.astype("<i8").tobytes())
            digest.update(rows.data.astype("<f8").tobytes())
            continue
        values = np.asarray(array, dtype=np.float64)
        digest.update(repr(values.shape).encode())
        flat = values.reshape(-1)
        # In blocks: a second copy of a large matrix takes longer than its digest.
        for start in range(0, len(flat), _HASHED):
            # Adding 0 makes -0 and 0 one number.
            part = flat[start : start + _HASHED] + 0.0
            digest.update(part.astype("<f8", copy=False).data)
    return digest.hexdigest()


@dataclass(frozen=True)
class HashableMatrix:
    """A matrix as a static value, a strategy over rounds, say: equal where all its bits are.

    Attributes:
        matrix: Float64, dense or sparse.
        fingerprint: Of its bits.
    """

    # Compared by the fingerprint alone, which takes no time.
    matrix: Any = field(compare=False, repr=False)
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        """Take the fingerprint."""
        object.__setattr__(self, "fingerprint", fingerprint(self.matrix))

    @property
    def dense(self) -> "HashableMatrix":
        """The same matrix as a dense array; refused beyond memory."""
        return self._dense if issparse(self.matrix) else self

    # Of sparse ones alone: a matrix that held itself would outlive its last user.
    @functools.cached_property
    def _dense(self) -> "HashableMatrix":
        return HashableMatrix(dense(self.matrix))


def _adjacency(graph: nx.Graph, sparse: bool) -> csr_array:
    """Return the 0/1 matrix, entry (u, v) for an edge u -> v, without self-loops.

    Refuses a graph whose dense mixing matrix exceeds memory, unless a sparse one is asked for.
    """
    order = nodes.order(graph)
    n = len(order)
    if not _validate.flag("sparse", sparse):
        purpose = "a mixing matrix [n, n] and its support"
        _validate.memory("graph", f"of {n} agents without sparse=True", purpose, 3, n, n)
    adjacency = nx.to_scipy_sparse_array(graph, nodelist=order, weight=None, dtype=float)
    # Several links of one pair count once, and links of an agent to itself not at all.
    adjacency.data[:] = 1.0
    adjacency = adjacency - diags_array(adjacency.diagonal(), format="csr")
    adjacency.eliminate_zeros()
    _require_connected(adjacency, "graph", nodes.labels(graph))
    return adjacency


def _receives(graph: nx.Graph, sparse: bool) -> csr_array:
    """Entry (v, u) is 1 where u sends to v, or is v."""
    sends = _adjacency(graph, sparse)
    return (sends.T + eye_array(sends.shape[0])).tocsr()


def _require_connected(support: Mixing, name: str, names: Sequence[str] | None = None) -> None:
    """Refuse unless everyone reaches everyone, naming the smallest part that does not."""
    parts, part_of = csgraph.connected_components(support, connection="strong")
    if parts == 1:
        return
    n = support.shape[0]
    sizes = np.bincount(part_of).astype(float)
    # Of several as small, the one without agent 0.
    sizes[part_of[0]] += 0.5
    members = np.flatnonzero(part_of == sizes.argmin())
    if names is None:
        names = [str(i) for i in range(n)]
    members_text = ", ".join(nodes.title(names, int(i)) for i in members[:_LISTED])
    if len(members) > _LISTED:
        members_text += f" and {len(members) - _LISTED} more"
    hint = ""
    if nodes.have_names(names) and len(members) <= 2:
        hint = (
            " (a name in two spellings is two sites; a header line of a file is read as an edge: "
            "begin it with #, or delete it)"
        )
    raise ValueError(
        f"{name} is not connected: {members_text} and the other {n - len(members)} of "
        f"{n} agents cannot all reach each other{hint}; add links, or design each "
        "component on its own"
    )
