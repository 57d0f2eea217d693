"""A run over several devices and processes: what each of them holds, and what one decides.

All processes that `jax.distributed.initialize` joined make the same call with the same arguments,
which they compare. Of the training data each may hold its own agents' records alone.
Their devices are one mesh; the first process keeps the files and asks the callback, and what it
decides is sent to the others.

`RunMemory` refuses runs that need more memory than devices have.

Compiled calls compute with n agents, whatever the devices: XLA gives every device equally many and
leaves what is behind the last one out of every sum. Arguments and results of such calls must divide
evenly, so `place` pads them and `without_padding` cuts it off, inside the call.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Traced
from jaxtyping import Array

from dpjax import _validate
from dpjax._agents import AGENTS
from dpjax.learning.problem import Problem
from dpjax.protocols import State, Tree
from dpjax.transforms.rounds import WIDEST

__all__ = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Padded:
    """An array over devices whose number does not divide the agents; zeros fill up.

    Attributes:
        array: With the zeros.
        axis: The agents' axis.
        length: Its length without them.
    """

    array: Array
    axis: int = field(metadata={"static": True})
    length: int = field(metadata={"static": True})


def agent_mesh(n: int, devices: int | None) -> Mesh | None:
    """Make a one-dimensional mesh for n agents.

    Args:
        n: Number of agents.
        devices: How many of `jax.devices()` to use; None or one device is no mesh.

    Returns:
        The mesh with the one axis `AGENTS`, or None for a single device.

    Raises:
        ValueError: If there are fewer devices or agents, or for less than all devices of several
            processes.
    """
    available = jax.devices()
    count = len(available)
    processes = jax.process_count()
    # A program over some processes alone would leave the others waiting.
    if processes > 1 and devices != count:
        raise ValueError(
            f"devices is {devices} in {processes} processes that jax.distributed joined; give all "
            f"of theirs, devices={count}"
        )
    if devices is None:
        return None
    _validate.integer(
        "devices", devices, maximum=count,
        remedy=f"this process has {count}, choose 1 to {count} (on CPUs the "
        "variable JAX_NUM_CPU_DEVICES, set before JAX starts, is how many it has)",
    )  # fmt: skip
    if devices > n:
        raise ValueError(f"devices is {devices} for {n} agents; choose 1 to {n}")
    return None if devices == 1 else Mesh(np.asarray(available[:devices]), (AGENTS,))


def place(tree: Tree, mesh: Mesh | None, axis: int | None, agents: int | None = None) -> Tree:
    """Put every leaf on the mesh, its ``axis`` over the agents; also inside a compiled call.

    Args:
        tree: Pytree of arrays.
        mesh: From `agent_mesh`; None is one device.
        axis: Which axis counts the agents; None puts a copy on every device.
        agents: Of a state whose leaves have any layout, the first axis from ``axis`` on of this
            length is taken; leaves without one stay as they are.

    Returns:
        The tree, whose leaves are padded where the mesh does not divide the axis.
    """
    if mesh is None:
        return jax.tree.map(jnp.asarray, tree)
    if axis is None:
        return _spread(tree, NamedSharding(mesh, PartitionSpec()))

    def placed(leaf: Array) -> Array | _Padded:
        axes = [axis]
        if agents is not None:
            axes = [i for i in range(axis, leaf.ndim) if leaf.shape[i] == agents]
        # Keys are not divided: each of them has an axis of words of its own.
        if not axes or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        agents_axis = axes[0]
        sharding = _over_agents(mesh, agents_axis)
        length = leaf.shape[agents_axis]
        widths = np.zeros((leaf.ndim, 2), int)
        widths[agents_axis, 1] = -length % mesh.size
        if not widths.any():
            return _spread(leaf, sharding)
        pad = jnp.pad if isinstance(leaf, jax.core.Tracer) else np.pad
        return _Padded(_spread(pad(leaf, widths), sharding), agents_axis, length)

    return jax.tree.map(placed, tree)


def _over_agents(mesh: Mesh, axis: int) -> NamedSharding:
    """The agents' axis over the mesh; others are not divided."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, AGENTS))


def own_devices(mesh: Mesh | None) -> list[int]:
    """Which of a mesh's devices are this process's; None is one device."""
    if mesh is None:
        return [0]
    return [i for i, device in enumerate(mesh.devices.flat) if device in mesh.local_devices]


def place_own(array: np.ndarray, mesh: Mesh | None, axis: int) -> Array:
    """Put what this process has of an array on its devices, the axis over all devices.

    Args:
        array: The parts of its devices; those of all devices are equally long.
        mesh: From `agent_mesh`; None is one device.
        axis: Along which the parts lie.
    """
    if mesh is None:
        return jnp.asarray(array)
    # Devices have parts of one length, so their number says the length of all.
    shape = list(array.shape)
    shape[axis] = shape[axis] // len(own_devices(mesh)) * mesh.size
    sharding = _over_agents(mesh, axis)
    return jax.make_array_from_process_local_data(sharding, _host(array), tuple(shape))


def without_padding(tree: Tree) -> Tree:
    """A tree with the padding of `place` cut off.

    Args:
        tree: Pytree of arrays.
    """

    def cut(leaf: Array | _Padded) -> Array:
        if not isinstance(leaf, _Padded):
            return leaf
        return leaf.array[(*[slice(None)] * leaf.axis, slice(leaf.length))]

    return jax.tree.map(cut, tree, is_leaf=lambda leaf: isinstance(leaf, _Padded))


def is_first() -> bool:
    """Whether this process keeps files, reports, and decides for all; true where it is alone."""
    return jax.process_index() == 0


def broadcast(tree: Tree) -> Tree:
    """The first process's values on all, bit for bit; a call that all processes make.

    Args:
        tree: Pytree of arrays and numbers, of one structure, shapes and dtypes on all processes.
    """
    if jax.process_count() == 1:
        return tree

    def received(leaf: np.ndarray | float) -> np.ndarray:
        array = np.asarray(leaf)
        # As bytes: what the others add to floats is zero, which takes the sign of -0.
        sent = multihost_utils.broadcast_one_to_all(np.frombuffer(array.tobytes(), np.uint8))
        return np.frombuffer(bytearray(np.asarray(sent)), array.dtype).reshape(array.shape)

    return jax.tree.map(received, tree)


@contextlib.contextmanager
def all_gather_errors_and_values() -> Iterator[list[Any]]:
    """A block that ends alike on all processes: an error on one of them is raised on all.

    All processes enter it, and inside it none waits for another. Alone nothing is sent.

    Yields:
        An empty list. What a process appends must be plain values (JSON); after the block the list
        holds what all processes appended, in their order.

    Raises:
        ValueError: With the text of an error that another process raised.
    """
    values: list[Any] = []
    if jax.process_count() == 1:
        yield values
        return
    error = None
    try:
        yield values
    except Exception as raised:
        error = raised
    text = None if error is None else str(error)
    if not isinstance(error, ValueError | None):
        text = f"{type(error).__name__}: {error}"
    # Every process comes here, with an error or without, or the others would wait for it.
    ends = _gathered((text, values))
    if error is not None:
        raise error
    for text, _ in ends:
        if text is not None:
            raise ValueError(text)
    values[:] = [value for _, others in ends for value in others]


def _gathered(value: Any) -> list[Any]:
    """A plain value of every process, in their order."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    longest = int(multihost_utils.process_allgather(np.int32(text.size)).max())
    # Few lengths, since each one is compiled; blanks at the end are no part of the value.
    padded = np.pad(text, (0, -(-longest // 1024) * 1024 - text.size), constant_values=ord(" "))
    return [json.loads(row.tobytes()) for row in multihost_utils.process_allgather(padded)]


def _spread(tree: Tree, sharding: NamedSharding) -> Tree:
    """Arrays over the devices of all processes; each puts its own devices' part there."""

    def spread(leaf: Array | np.ndarray) -> Array:
        if isinstance(leaf, jax.core.Tracer):
            return jax.lax.with_sharding_constraint(leaf, sharding)
        if not sharding.mesh.is_multi_process:
            return jax.device_put(leaf, sharding)
        host = _host(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(spread, tree)


def _host(leaf: Array | np.ndarray) -> np.ndarray:
    """An array of the dtype that it will have on a device."""
    array = np.asarray(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def collected(tree: Tree) -> Tree:
    """Arrays on the host, without padding, whichever processes hold them; a call that all make.

    Args:
        tree: Pytree of arrays.
    """

    def fetched(leaf: Array | np.ndarray) -> np.ndarray:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return jax.device_get(leaf)
        # Devices of other processes cannot be read from here.
        return multihost_utils.process_allgather(leaf, tiled=True)

    return without_padding(jax.tree.map(fetched, tree))


class _Usage(NamedTuple):
    """Bytes of a process or a device.

    Attributes:
        in_use: Now.
        peak: The most so far.
        limit: All that there are.
    """

    in_use: int
    peak: int
    limit: int


class RunMemory(NamedTuple):
    """The memory of all runs of a call.

    Attributes:
        mesh: From `dpjax.engine.processes.agent_mesh`.
        agents: Number of agents n.
        seeds: Number of seeds.
        plans: Number of plans.
    """

    mesh: Mesh | None
    agents: int
    seeds: int
    plans: int

    @property
    def devices(self) -> int:
        """Devices that the agents are spread over."""
        return 1 if self.mesh is None else self.mesh.size

    def usage(self) -> _Usage:
        """The usage of this process, or of its fullest device."""
        # The fullest one decides: devices hold equal parts, but other work may use them too.
        devices = self._device_usages()
        return max(devices) if devices else _Usage(*_validate.resident(), _validate.memory_limit())

    def check_models(self, problem: Problem) -> None:
        """Refuse models that do not fit twice: those to start from, and the state's.

        Args:
            problem: The problem, whose ``init`` is not run.

        Raises:
            ValueError: With the bytes that they take and those that there are.
        """
        leaves = jax.tree.leaves(jax.eval_shape(problem.init, jax.random.key(0)))
        entries = sum(leaf.size for leaf in leaves)
        shape = f"[{self.seeds} seeds, {self.plans} plans, {self.agents} agents, {entries:,}"
        _validate.memory(
            "problem",
            problem,
            f"the array {shape} entries] of models, with their first state,",
            *(2, self.seeds, self.plans, self.agents, _byte_count(leaves)),
            item=1,
            maximum=sum(usage.limit for usage in self._device_usages()) or None,
        )

    def check_state(self, state: State, keeps_noise: bool) -> None:
        """Refuse a first state that does not fit.

        Args:
            state: Its shapes, a `dpjax.protocols.State`.
            keeps_noise: Whether its secret holds noise of past rounds.

        Raises:
            ValueError: With its bytes and those that there are.
        """
        size = _byte_count(state)
        secret_size = _byte_count(state.secret)
        remedy = "run fewer seeds or plans at once, or use more devices"
        # More than half of the state: fewer diagonals help more than fewer runs.
        if keeps_noise and 2 * secret_size > size:
            remedy = (
                "give the noise over rounds few diagonals, such as bands=8, of which a run keeps 7 "
                f"rounds (it keeps all rounds of more than {WIDEST + 1} diagonals), or {remedy}"
            )
        part = f"the first state, {secret_size / 2**30:,.2f} of them for noise kept over rounds"
        self._require(-(-size // self.devices), part, remedy)

    def check_programs(self, programs: Iterable[Traced], state: State) -> tuple[int, int]:
        """Compile the rounds of a run, and refuse them where they do not fit.

        Args:
            programs: Traced, not compiled.
            state: Of their arrays, which are waited for: they count as held.

        Returns:
            The bytes held, and those that the largest program adds: its outputs and intermediate
            values, without the state whose buffers it uses again.

        Raises:
            ValueError: With both and the limit.
        """
        added = 0
        for program in programs:
            analysis = program.lower().compile().memory_analysis()
            # Not every platform has one.
            if analysis is not None:
                # An alias is an output in the place of an argument, which is held already.
                size = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
                added = max(added, size - analysis.alias_size_in_bytes)
        # Arrays that are still under way would not count as held.
        jax.block_until_ready(state)
        remedy = (
            "run fewer seeds or plans at once, give Protect(microbatch=...) for clipped records, "
            "or use more devices"
        )
        return self._require(added, "the compiled program", remedy)

    def _require(self, added: int, part: str, remedy: str) -> tuple[int, int]:
        """Refuse ``added`` bytes a device that do not fit beside the held ones; return both."""
        machine = "device"
        if not self._device_usages():
            # On CPUs all devices share the host's memory.
            machine = "machine"
            added *= len(self._local_devices())
        in_use, _, limit = self.usage()
        total = in_use + added
        if total > limit:
            sizes = [f"{size / 2**30:,.2f}" for size in (total, in_use, added, limit)]
            raise ValueError(
                f"seeds has {_validate.counted(self.seeds, 'seed')}, with "
                f"{_validate.counted(self.plans, 'plan')} of {self.agents} agents. Their rounds "
                f"take {sizes[0]} GiB ({sizes[1]} held and {sizes[2]} more in {part}); this "
                f"{machine} has {sizes[3]} GiB: {remedy}"
            )
        return in_use, added

    def _local_devices(self) -> Sequence[jax.Device]:
        return jax.local_devices()[:1] if self.mesh is None else self.mesh.local_devices

    def _device_usages(self) -> list[_Usage]:
        """The usage of each device; empty where devices use the host's memory."""
        usages = []
        for device in self._local_devices():
            stats = device.memory_stats() or {}
            names = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
            if not all(name in stats for name in names):
                return []
            usages.append(_Usage(*(stats[name] for name in names)))
        return usages


def _byte_count(tree: Tree) -> int:
    """The bytes of a tree of arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
