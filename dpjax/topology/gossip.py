"""Gossip: one product with the mixing matrix over the leading (agent) axis of every leaf.

The matrix has one of two layouts: dense [n, n], or `Neighbours`, tables of the entries that are
not zero. Both give the same numbers to rounding.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Array, Float, Int

__all__ = ["Neighbours", "mix"]

Tree = TypeVar("Tree")

_DENSE = 64
"""Up to so many agents the layout is dense."""
_ENTRY = 32
"""Entries of a dense product in the time of a table's entry: 50 on two cores, fewer on GPUs."""
_WIDEST = 64
"""Rows with more entries than this are a dense product of their own."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Neighbours:
    """A mixing matrix as tables of its entries, rows of about equally many entries in one table.

    Row r of all tables one after the other is the sum over j of ``weights[r, j]`` times the value
    of agent ``senders[r, j]``; padding has weight 0 and the row's first sender. Rows of more than
    64 entries are in ``wide``. A schedule has a leading axis of its rounds everywhere but in
    ``order``.

    Attributes:
        senders: A table [m, k] of agents for each number k of entries.
        weights: Its weights [m, k].
        wide: [h, n] rows with many entries, the last ones.
        order: [n] which of these rows is agent i's; None where they are in the agents' order.

    Example:
        >>> import numpy as np
        >>> from dpjax.topology import gossip, graphs, mixing
        >>> ring = mixing.metropolis_hastings(graphs.ring(300))
        >>> tables = gossip.neighbours(ring, np.float32)
        >>> tables.senders[0][:3].tolist()
        [[0, 1, 299], [0, 1, 2], [1, 2, 3]]
        >>> one = gossip.mix(tables, np.eye(300, 1, dtype=np.float32))
        >>> np.asarray(one)[:3, 0].round(2)
        array([0.33, 0.33, 0.  ], dtype=float32)
    """

    senders: tuple[Int[Array, "*p m k"], ...]
    weights: tuple[Float[Array, "*p m k"], ...]
    wide: Float[Array, "*p h n"]
    order: Int[Array, " n"] | None

    @property
    def agents(self) -> int:
        """Number of agents n."""
        return self.wide.shape[-1]


def mix(mixing: Float[Array, "n n"] | Neighbours, tree: Tree) -> Tree:
    """Return ``mixing @ leaf`` over the leading axis of every leaf.

    The product runs at full float32 precision on every device: on GPUs the default one has
    ten-bit mantissas, in which noise that should cancel does not. Leaves below float32 are
    mixed in float32 and rounded once.

    Args:
        mixing: [n, n] weights; row i holds what agent i puts on each agent's value. `Neighbours`
            add up the same products, each row in the order of its table.
        tree: a pytree of floating arrays [n, ...].

    Returns:
        The mixed tree, of the same structure, shapes and dtypes.

    Raises:
        ValueError: for a leaf whose leading axis is not n, or that is not of floating dtype.

    Example:
        >>> import numpy as np
        >>> from dpjax.topology import gossip
        >>> models = {"weights": np.array([[1.0], [3.0]], np.float32)}
        >>> gossip.mix(np.full((2, 2), 0.5), models)["weights"].tolist()
        [[2.0], [2.0]]
    """
    n = mixing.agents if isinstance(mixing, Neighbours) else mixing.shape[-1]

    def one(path: tuple, leaf: Array) -> Array:
        leaf = jnp.asarray(leaf)
        if leaf.ndim == 0 or leaf.shape[0] != n or not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"tree{jax.tree_util.keystr(path)} has shape {leaf.shape} and dtype {leaf.dtype}; "
                f"give floating leaves with a leading axis of n={n} agents"
            )
        dtype = jnp.promote_types(leaf.dtype, jnp.float32)
        wide = leaf.astype(dtype)
        mixed = _gathered(mixing, wide) if isinstance(mixing, Neighbours) else _dot(mixing, wide)
        return mixed.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, tree)


def at(mixing: Any, round: Int[Array, ""] | int) -> Any:
    """Return the matrix of a round: ``mixing`` itself, or entry ``round mod P`` of a schedule."""
    if not isinstance(mixing, Neighbours):
        return jnp.asarray(mixing) if mixing.ndim == 2 else _entry(mixing, round)
    if mixing.wide.ndim == 2:
        return mixing
    by_round = mixing.senders, mixing.weights, mixing.wide
    senders, weights, wide = jax.tree.map(lambda part: _entry(part, round), by_round)
    return Neighbours(senders, weights, wide, mixing.order)


def neighbours(mixing: Any, dtype: Any) -> Neighbours | None:
    """Return the tables of a matrix where these are faster than the dense product, else None.

    They are where n > 64 and 32 times the entries of all tables, padding included, are below n^2:
    a table's entry is one read from memory, one of a dense product is one of many in a block.

    Args:
        mixing: [n, n], dense or a scipy.sparse array, or a dense schedule [P, n, n].
        dtype: Of the weights.

    Returns:
        The tables, as numpy arrays. A row's senders are in ascending order.
    """
    n = mixing.shape[-1]
    if n <= _DENSE:
        return None
    schedule = mixing if mixing.ndim == 3 else [mixing]
    rows = [scipy.sparse.csr_array(one) for one in schedule]
    counts = np.max([np.ones(n), *(np.diff(one.indptr) for one in rows)], axis=0).astype(np.int64)
    # Widths are 1, 2, 3, 4, 6, 8, 12, ...: a row is padded by less than half of its entries.
    widths = np.unique([width for p in range(7) for width in (2**p, 3 * 2**p // 2)])
    exact = np.unique(counts[counts <= _WIDEST])
    widths = exact if len(exact) <= 4 else widths
    bucket = np.searchsorted(widths, np.where(counts > _WIDEST, np.inf, counts))
    heavy = int((counts > _WIDEST).sum())
    entries = int(widths[bucket[counts <= _WIDEST]].sum())
    if _ENTRY * entries + heavy * n >= n * n:
        return None
    order = np.argsort(bucket, kind="stable")
    senders: list[Any] = []
    weights: list[Any] = []
    for index in np.unique(bucket[counts <= _WIDEST]):
        members, width = np.flatnonzero(bucket == index), widths[index]
        tables = [_table(one, members, width, dtype) for one in rows]
        for all_tables, part in zip((senders, weights), zip(*tables, strict=True), strict=True):
            all_tables.append(np.stack(part) if mixing.ndim == 3 else part[0])
    wide = [one[np.flatnonzero(counts > _WIDEST)].toarray().astype(dtype) for one in rows]
    # Numpy arrays, which a caller puts on its devices.
    heavy_rows: Any = np.stack(wide) if mixing.ndim == 3 else wide[0]
    place: Any = np.argsort(order).astype(np.int32) if len(np.unique(bucket)) > 1 else None
    return Neighbours(tuple(senders), tuple(weights), heavy_rows, place)


def _entry(schedule: Array, round: Int[Array, ""] | int) -> Array:
    index = jnp.asarray(round) % schedule.shape[0]
    return jax.lax.dynamic_index_in_dim(jnp.asarray(schedule), index, keepdims=False)


def _dot(weights: Any, values: Array) -> Array:
    weights = jnp.asarray(weights).astype(values.dtype)
    return jnp.tensordot(weights, values, axes=1, precision=jax.lax.Precision.HIGHEST)


def _gathered(mixing: Neighbours, values: Array) -> Array:
    """Sums of gathered rows: no index is out of bounds, and no loop over entries is left."""
    parts = []
    for senders, weights in zip(mixing.senders, mixing.weights, strict=True):
        total: Any = 0
        for j in range(senders.shape[-1]):
            weight = jnp.asarray(weights)[:, j].astype(values.dtype)
            weight = weight.reshape((-1, *[1] * (values.ndim - 1)))
            sent = values.at[jnp.asarray(senders)[:, j]].get(mode="promise_in_bounds")
            total = weight * sent if j == 0 else total + weight * sent
        parts.append(total)
    if mixing.wide.shape[0]:
        parts.append(_dot(mixing.wide, values))
    if mixing.order is None:
        return parts[0]
    rows = jnp.concatenate(parts)
    return rows.at[jnp.asarray(mixing.order)].get(mode="promise_in_bounds")


def _table(
    matrix: scipy.sparse.csr_array, members: np.ndarray, width: int, dtype: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Senders and weights [m, k] of some rows of at most k entries."""
    starts, counts = matrix.indptr[members], np.diff(matrix.indptr)[members]
    place = np.arange(width)
    used = place < counts[:, None]
    # Padding repeats the first sender, whose value is read anyway; an empty row reads its own.
    at = starts[:, None] + np.where(used, place, 0)
    indices, data = np.append(matrix.indices, 0), np.append(matrix.data, 0)
    filled = np.minimum(at, len(indices) - 1)
    senders = np.where(counts[:, None] > 0, indices[filled], members[:, None])
    return senders.astype(np.int32), np.where(used, data[filled], 0).astype(dtype)
