"""Gossip: one product with the mixing matrix over the leading (agent) axis of every leaf.

The matrix has one of two layouts: dense [n, n], or `Neighbours`, tables of the entries that are
not zero. Both give the same numbers to rounding. Over devices the tables are `Partitioned`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, DTypeLike, Float
from scipy.sparse import csr_array, issparse

from dpjax import _numerics, _validate
from dpjax._numerics import Integer
from dpjax.topology.mixing import Mixing

__all__ = ["Neighbours", "mix"]

_Tree = TypeVar("_Tree")
RoundNumber: TypeAlias = Integer | int
Senders: TypeAlias = Sequence[Sequence[int]]
"""Agents whose messages arrive, for each of some agents."""
_Values: TypeAlias = Float[Array, "n d"]
_Numbers: TypeAlias = np.ndarray | Array
_Tables: TypeAlias = tuple[_Numbers, ...]
"""Numpy's arrays until they are placed on devices, then JAX's."""
_Steps: TypeAlias = tuple[tuple[tuple[int, int], ...], ...] | None
"""The pairs (sender, receiver) of devices in every step; None where all devices hear all."""

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
        >>> mixed = gossip.mix(tables, np.eye(300, 1, dtype=np.float32))
        >>> np.asarray(mixed)[:3, 0].round(2)
        array([0.33, 0.33, 0.  ], dtype=float32)
    """

    senders: _Tables
    weights: _Tables
    wide: _Numbers
    order: _Numbers | None

    @property
    def agents(self) -> int:
        """Number of agents n."""
        return self.wide.shape[-1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Partitioned:
    """Tables of a mesh of devices, each of which has a block of the agents and receives rows.

    A device's values are those of its own agents, then those that it receives, step by step. In a
    step, no device sends to two or receives from two.

    Attributes:
        tables: The devices' tables one after the other; senders, columns of ``wide`` and ``order``
            count the rows of one device.
        sends: For each step, [devices m] which of its agents a device sends.
        agents: Number of agents n.
        mesh: The devices, one axis.
        steps: For each step, the pairs (sender, receiver) of devices; None where every device
            receives all values, since as many rows would be sent.
    """

    tables: Neighbours
    sends: _Tables
    agents: int = field(metadata={"static": True})
    mesh: Mesh = field(metadata={"static": True})
    steps: _Steps = field(metadata={"static": True})

    @property
    def block(self) -> int:
        """Agents of a device; the last ones have fewer where they do not divide n."""
        return -(-self.agents // self.mesh.size)

    @property
    def received(self) -> int:
        """Rows of values that reach a device in one exchange, in messages of the largest size."""
        if self.steps is None:
            return (self.mesh.size - 1) * self.block
        return sum(rows.shape[-1] for rows in self.sends) // self.mesh.size


_Weights: TypeAlias = Float[Array, "*p n n"] | Neighbours | Partitioned
"""A mixing matrix, or a schedule, in any layout."""


def mix(mixing: _Weights, tree: _Tree) -> _Tree:
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
        ValueError: for a matrix that is no array; for a leaf whose leading axis is not n, or that
            is not of floating dtype.

    Example:
        >>> import numpy as np
        >>> from dpjax.topology import gossip
        >>> models = {"weights": np.array([[1.0], [3.0]], np.float32)}
        >>> gossip.mix(np.full((2, 2), 0.5), models)["weights"].tolist()
        [[2.0], [2.0]]
    """
    if isinstance(mixing, Neighbours | Partitioned):
        n = mixing.agents
    elif hasattr(mixing, "shape"):
        n = mixing.shape[-1]
    else:
        text = _validate.shown(mixing)
        raise ValueError(
            f"mixing is {text}; give the matrix of a graph, mixing.metropolis_hastings(graph)"
        )
    products: dict[type, Callable] = {Neighbours: _gathered, Partitioned: _exchanged}
    product = products.get(type(mixing), _dot)

    def mixed(path: tuple, leaf: Array) -> Array:
        leaf = jnp.asarray(leaf)
        stacked = leaf.ndim > 0 and leaf.shape[0] == n
        if not stacked or not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"tree{jax.tree_util.keystr(path)} has shape {leaf.shape} and dtype {leaf.dtype}; "
                f"give floating leaves with a leading axis of n={n} agents"
            )
        # Narrow floats are multiplied in float32, or cancelling noise would not cancel.
        dtype = _numerics.wide_dtype(leaf)
        return product(mixing, leaf.astype(dtype)).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(mixed, tree)


def polynomial(mixing: _Weights, coefficients: Float[Array, " m"], values: _Values) -> _Values:
    """Return sum_k coefficients[k] T_k(W) values, T_k Chebyshev's polynomials, by Clenshaw's rule.

    Args:
        mixing: [n, n] weights, or their tables.
        coefficients: [m + 1], for m products with W.
        values: One row an agent.
    """
    if len(coefficients) == 1:
        return coefficients[0] * values

    # A loop: in one program compilers would compute each product anew for every link of the next.
    # B_k = c_k X + 2 W B_{k+1} - B_{k+2}, from the highest degree down.
    def step(carry: tuple[_Values, _Values], coefficient: Array) -> tuple:
        current, before = carry
        following = coefficient * values + 2 * mix(mixing, current) - before
        return (following, current), None

    start = coefficients[-1] * values, jnp.zeros_like(values)
    # Clenshaw's rule begins with the highest degree; the constant term has one product less.
    descending = coefficients[-2:0:-1]
    (current, before), _ = lax.scan(step, start, descending)
    return coefficients[0] * values + mix(mixing, current) - before


def at(mixing: _Weights, round: RoundNumber) -> Any:
    """Return the matrix of a round: ``mixing`` itself, or entry ``round mod P`` of a schedule."""
    if isinstance(mixing, Partitioned):
        return dataclasses.replace(mixing, tables=_tables_at(mixing.tables, round))
    if isinstance(mixing, Neighbours):
        return _tables_at(mixing, round)
    if mixing.ndim == 2:
        return jnp.asarray(mixing)
    return _entry(mixing, round)


def _tables_at(tables: Neighbours, round: RoundNumber) -> Neighbours:
    if tables.wide.ndim == 2:
        return tables
    by_round = (tables.senders, tables.weights, tables.wide)
    senders, weights, wide = jax.tree.map(lambda part: _entry(part, round), by_round)
    # Every matrix of a schedule has the same rows in one table, so that the order stays.
    return Neighbours(senders, weights, wide, tables.order)


def combining(mixing: Mixing, agents: Sequence[int], senders: Senders) -> Callable[..., _Tree]:
    """Return the mix of some agents alone: ``combine(round, sent, received)``.

    Agent i has W_ii times its own value, plus W_ij times that of each sender j. Places beyond an
    agent's senders have weight 0, and may hold anything.

    Args:
        mixing: [n, n] W, dense or sparse, or a dense schedule [P, n, n].
        agents: m agents.
        senders: For each of them the other agents whose values it has.

    Returns:
        A function of the round's number, of trees of the agents' own values [m, ...] and of the
        senders' [m, senders, ...].
    """
    picked = list(agents)
    rows = csr_array(mixing)[picked].toarray() if issparse(mixing) else mixing[..., picked, :]
    rows = rows.reshape(-1, len(agents), mixing.shape[-1])
    weights = np.zeros((len(rows), len(agents), 1 + max(map(len, senders))))
    for row, agent in enumerate(agents):
        heard = [agent, *senders[row]]
        weights[:, row, : len(heard)] = rows[:, row, heard]

    def combine(weights: Array, round: RoundNumber, sent: _Tree, received: _Tree) -> _Tree:
        def mixed(own: Array, others: Array) -> Array:
            dtype = _numerics.wide_dtype(own)
            # float32 first, as in a run: its weights are rounded once.
            current = _entry(jnp.asarray(weights.astype(dtype)), round)
            values = jnp.concatenate([own[:, None], jnp.asarray(others, own.dtype)], axis=1)
            side = current.reshape((*current.shape, *[1] * (own.ndim - 1)))
            # Zero times a number that is not finite is nan.
            terms = jnp.where(side == 0, 0, side * values.astype(dtype))
            return jnp.sum(terms, axis=1).astype(own.dtype)

        return jax.tree.map(mixed, sent, received)

    # Weights in a closure would be constants of programs.
    return jax.tree_util.Partial(combine, weights)


def neighbours(mixing: Mixing, dtype: DTypeLike) -> Neighbours | None:
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
    is_schedule = mixing.ndim == 3
    matrices = [csr_array(matrix) for matrix in (mixing if is_schedule else [mixing])]
    # A row without entries has one of weight zero.
    counts = np.ones(n, np.int64)
    for matrix in matrices:
        counts = np.maximum(counts, np.diff(matrix.indptr))
    heavy = counts > _WIDEST
    # Widths are 1, 2, 3, 4, 6, 8, 12, ...: a row is padded by less than half of its entries.
    powers = 2 ** np.arange(7)
    widths = np.unique([powers, 3 * powers // 2])
    exact = np.unique(counts[~heavy])
    if len(exact) <= 4:
        widths = exact
    # Heavy rows are in the bucket behind all widths.
    bucket = np.searchsorted(widths, np.where(heavy, np.inf, counts))
    buckets = np.unique(bucket)
    entries = widths[bucket[~heavy]].sum()
    # Rows of many senders are cheaper as rows of a dense product.
    if _ENTRY * entries + heavy.sum() * n >= n * n:
        return None

    # Numpy arrays, which a caller puts on its devices.
    def stacked(parts: Iterable[np.ndarray]) -> np.ndarray:
        stack = np.stack(list(parts))
        return stack if is_schedule else stack[0]

    senders = []
    weights = []
    for index in buckets[buckets < len(widths)]:
        members = np.flatnonzero(bucket == index)
        tables = [_table(matrix, members, widths[index], dtype) for matrix in matrices]
        senders.append(stacked(table[0] for table in tables))
        weights.append(stacked(table[1] for table in tables))
    wide = stacked(matrix[np.flatnonzero(heavy)].toarray().astype(dtype) for matrix in matrices)
    order = None
    if len(buckets) > 1:
        # The inverse of the permutation that sorts agents by bucket.
        order = np.argsort(np.argsort(bucket, kind="stable")).astype(np.int32)
    return Neighbours(tuple(senders), tuple(weights), wide, order)


def partitioned(source: Neighbours, mesh: Mesh) -> Partitioned:
    """Return the tables of a mesh of devices, the agents in their order in equal blocks.

    Every row adds up the products of `source` in the same order.

    Args:
        source: From `neighbours`.
        mesh: Devices, one axis.
    """
    n = source.agents
    devices = mesh.size
    block = -(-n // devices)
    wide = np.asarray(source.wide)
    # The agents of each table's rows; the last ones are of `wide`.
    agents = np.arange(n) if source.order is None else np.argsort(np.asarray(source.order))
    lengths = [part.shape[-2] for part in source.senders]
    rows = np.split(agents, np.cumsum(lengths))
    owners = [members // block for members in rows]
    needed = np.zeros((devices, n), bool)
    for owner, part in zip(owners, source.senders, strict=False):
        needed[owner[:, None], part] = True
    heavy = (wide != 0).any(axis=tuple(range(wide.ndim - 2)))
    # Heavy rows read every agent of their weights, from all devices.
    np.logical_or.at(needed, owners[-1], heavy)
    steps, sends, place, length = _steps(needed, block)

    row, column = np.nonzero(heavy)
    moved = np.zeros((*wide.shape[:-1], length), wide.dtype)
    local_column = place[owners[-1][row], column]
    moved[..., row, local_column] = wide[..., row, column]
    # Numbers of agents become places on the device that reads them.
    narrow_tables = zip(owners, source.senders, strict=False)
    senders = [place[owner[:, None], part] for owner, part in narrow_tables]
    order = np.tile(np.arange(block, dtype=np.int32), devices)
    in_order = order.copy()
    first = 0
    tables = []
    columns = ([*senders, moved], [*source.weights, moved])
    for members, owner, *parts in zip(rows, owners, *columns, strict=True):
        # Members ascend within a table, so that a device's are next to each other.
        offset = np.arange(len(owner)) - np.searchsorted(owner, owner)
        size = int(offset.max(initial=-1)) + 1
        order[members] = first + offset
        first = first + size
        # Devices with fewer rows have some of weight zero, which no agent reads.
        filled = []
        for part in parts:
            *front, _, width = part.shape
            table = np.zeros((*front, devices * size, width), part.dtype)
            table[..., owner * size + offset, :] = part
            filled.append(table)
        tables.append(filled)
    local_senders, local_weights = zip(*tables, strict=True)
    *narrow, heavy_rows = local_senders
    is_sorted = first == block and (order == in_order).all()
    local_tables = Neighbours(
        tuple(narrow), local_weights[:-1], heavy_rows, None if is_sorted else order
    )
    return Partitioned(local_tables, sends, n, mesh, steps)


def _steps(needed: Bool[np.ndarray, "d n"], block: int) -> tuple[_Steps, _Tables, np.ndarray, int]:
    """Steps that bring every device the rows that it needs, and where a device has a row.

    Pairs of devices are edges of a graph, coloured by steps: each pair takes the first step in
    which its sender does not send and its receiver does not receive.

    Args:
        needed: Which agents' rows each device reads.
        block: Agents of a device.

    Returns:
        As in `Partitioned`, steps and sends; [d n] the place of an agent's row on a device; and
        the number of a device's rows.
    """
    devices, n = needed.shape
    steps: list[dict] = []
    for shift in range(1, devices):
        for i in range(devices):
            j = (i + shift) % devices
            rows = np.flatnonzero(needed[j, i * block : (i + 1) * block])
            if not len(rows):
                continue
            # Colours the edges: in one step no device sends or receives twice.
            for step in steps:
                if all(a != i and b != j for a, b in step):
                    break
            else:
                step = {}
                steps.append(step)
            step[i, j] = rows
    sizes = [max(map(len, step.values())) for step in steps]
    if sum(sizes) >= (devices - 1) * block:
        # `all_gather` moves no more rows than these steps.
        everywhere = np.tile(np.arange(n, dtype=np.int32), (devices, 1))
        return None, (), everywhere, devices * block
    # A device has its own agents first, then what it receives, step by step.
    place = np.zeros((devices, n), np.int32)
    numbers = np.arange(n)
    place[numbers // block, numbers] = numbers % block
    sends = []
    length = block
    for step, size in zip(steps, sizes, strict=True):
        send = np.zeros((devices, size), np.int32)
        for (i, j), rows in step.items():
            send[i, : len(rows)] = rows
            agents = i * block + rows
            place[j, agents] = length + np.arange(len(rows))
        sends.append(send.reshape(-1))
        length += size
    return tuple(tuple(step) for step in steps), tuple(sends), place, length


def _exchanged(mixing: Partitioned, values: Array) -> Array:
    """Every device's rows, from its own agents' values and those that it receives."""
    (axis,) = mixing.mesh.axis_names
    spec = PartitionSpec(*mixing.mesh.axis_names)

    def local(tables: Neighbours, sends: _Tables, values: Array) -> Array:
        if mixing.steps is None:
            return _gathered(tables, lax.all_gather(values, axis, tiled=True))
        received = []
        for rows, pairs in zip(sends, mixing.steps, strict=True):
            sent = values.at[rows].get(mode="promise_in_bounds")
            received.append(lax.ppermute(sent, axis, pairs))
        return _gathered(tables, jnp.concatenate([values, *received]))

    # Agents that do not divide by the devices are filled up with zeros, which no row reads.
    padding = mixing.mesh.size * mixing.block - mixing.agents
    others = [(0, 0)] * (values.ndim - 1)
    padded = jnp.pad(values, ((0, padding), *others))
    sharded = jax.shard_map(local, mesh=mixing.mesh, in_specs=spec, out_specs=spec)
    return sharded(mixing.tables, mixing.sends, padded)[: mixing.agents]


def _entry(schedule: Array, round: RoundNumber) -> Array:
    index = jnp.asarray(round) % schedule.shape[0]
    return lax.dynamic_index_in_dim(jnp.asarray(schedule), index, keepdims=False)


def _dot(matrix: _Numbers, values: Array) -> Array:
    # The default precision of GPUs has ten-bit mantissas.
    weights = jnp.asarray(matrix).astype(values.dtype)
    return jnp.tensordot(weights, values, axes=1, precision=lax.Precision.HIGHEST)


def _gathered(mixing: Neighbours, values: Array) -> Array:
    """Sums of gathered rows: no index is out of bounds, and no loop over entries is left."""
    parts = []
    for senders, weights in zip(mixing.senders, mixing.weights, strict=True):
        total = _term(senders, weights, 0, values)
        for j in range(1, senders.shape[-1]):
            total = total + _term(senders, weights, j, values)
        parts.append(total)
    if mixing.wide.shape[0]:
        parts.append(_dot(mixing.wide, values))
    if mixing.order is None:
        return parts[0]
    return jnp.concatenate(parts).at[jnp.asarray(mixing.order)].get(mode="promise_in_bounds")


def _term(senders: _Numbers, weights: _Numbers, j: int, values: Array) -> Array:
    """What each row's sender number j adds to it."""
    weight = jnp.asarray(weights)[:, j].astype(values.dtype)
    weight = weight.reshape((-1, *[1] * (values.ndim - 1)))
    return weight * values.at[jnp.asarray(senders)[:, j]].get(mode="promise_in_bounds")


def _table(
    matrix: csr_array, members: np.ndarray, width: int, dtype: DTypeLike
) -> tuple[np.ndarray, np.ndarray]:
    """Senders and weights [m, k] of some rows of at most k entries."""
    rows = matrix[members]
    used = np.arange(width) < np.diff(rows.indptr)[:, None]
    weights = np.zeros(used.shape, dtype)
    weights[used] = rows.data
    # Padding repeats the first sender, whose value is read anyway; an empty row reads its own.
    senders = np.repeat(members[:, None], width, axis=1)
    senders[used] = rows.indices
    senders = np.where(used, senders, senders[:, :1])
    return senders.astype(np.int32), weights
