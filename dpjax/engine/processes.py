"""A run over several devices and processes: what each of them holds, and what one decides.

All processes that `jax.distributed.initialize` joined make the same call with the same arguments,
which they compare. Of the training data each may hold its own agents' records alone.
Their devices are one mesh; the first process keeps the files and asks the callback, and what it
decides is sent to the others.

Compiled calls compute with n agents, whatever the devices: XLA gives every device equally many and
leaves what is behind the last one out of every sum. Arguments and results of such calls must divide
evenly, so `place` pads them and `whole` cuts the padding off, inside the call.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpjax import _validate
from dpjax._agents import AGENTS

__all__: list[str] = []


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Padded:
    """An array over devices whose number does not divide the agents; zeros fill up.

    Attributes:
        array: With the zeros.
        axis: The agents' axis.
        length: Its length without them.
    """

    array: Any
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
    if (joined := jax.process_count()) > 1 and devices != len(available):
        raise ValueError(
            f"devices is {devices} in {joined} processes that jax.distributed joined; give all of "
            f"theirs, devices={len(available)}"
        )
    if devices is None:
        return None
    _validate.integer(
        "devices", devices, maximum=len(available),
        remedy=f"this process has {len(available)}, choose 1 to {len(available)} (on CPUs the "
        "variable JAX_NUM_CPU_DEVICES, set before JAX starts, is how many it has)",
    )  # fmt: skip
    if devices > n:
        raise ValueError(f"devices is {devices} for {n} agents; choose 1 to {n}")
    return None if devices == 1 else Mesh(np.asarray(available[:devices]), (AGENTS,))


def place(tree: Any, mesh: Mesh | None, axis: int | None, agents: int | None = None) -> Any:
    """Put every leaf on the mesh, its ``axis`` over the agents; also inside a compiled call.

    Args:
        tree: Pytree of arrays.
        mesh: From `agent_mesh`; None is one device.
        axis: Which axis counts the agents; None puts a copy on every device.
        agents: Of a state whose leaves have any layout, the first axis from ``axis`` on of this
            length is taken; leaves without one stay as they are.

    Returns:
        The tree, with leaves `Padded` where the mesh does not divide the axis.
    """
    if mesh is None:
        return jax.tree.map(jnp.asarray, tree)
    if axis is None:
        return _spread(tree, NamedSharding(mesh, PartitionSpec()))

    def one(leaf: Any) -> Any:
        at = axis
        if agents is not None:
            at = next((a for a in range(axis, leaf.ndim) if leaf.shape[a] == agents), leaf.ndim)
        if at == leaf.ndim or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        sharding = NamedSharding(mesh, PartitionSpec(*[None] * at, AGENTS))
        length = leaf.shape[at]
        if not (more := -length % mesh.size):
            return _spread(leaf, sharding)
        pad = jnp.pad if isinstance(leaf, jax.core.Tracer) else np.pad
        padded = pad(leaf, [(0, more if each == at else 0) for each in range(leaf.ndim)])
        return Padded(_spread(padded, sharding), at, length)

    return jax.tree.map(one, tree)


def mine(mesh: Mesh | None) -> list[int]:
    """Which of a mesh's devices are this process's; None is one device."""
    if mesh is None:
        return [0]
    return [i for i, device in enumerate(mesh.devices.flat) if device in mesh.local_devices]


def place_own(array: np.ndarray, mesh: Mesh | None, axis: int) -> Any:
    """Put what this process has of an array on its devices, the axis over all devices.

    Args:
        array: The parts of its devices; those of all devices are equally long.
        mesh: From `agent_mesh`; None is one device.
        axis: Along which the parts lie.
    """
    if mesh is None:
        return jnp.asarray(array)
    length = array.shape[axis] // len(mine(mesh)) * mesh.size
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * axis, AGENTS))
    shape = (*array.shape[:axis], length, *array.shape[axis + 1 :])
    return jax.make_array_from_process_local_data(sharding, _host(array), shape)


def whole(tree: Any) -> Any:
    """A tree with the padding of `place` cut off.

    Args:
        tree: Pytree of arrays.
    """

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Padded):
            return leaf
        return leaf.array[(*[slice(None)] * leaf.axis, slice(leaf.length))]

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, Padded))


def is_first() -> bool:
    """Whether this process keeps files, reports, and decides for all; true where it is alone."""
    return jax.process_index() == 0


def shared(tree: Any) -> Any:
    """The first process's values on all, bit for bit; a call that all processes make.

    Args:
        tree: Pytree of arrays and numbers, of one structure, shapes and dtypes on all processes.
    """
    if jax.process_count() == 1:
        return tree

    def one(leaf: Any) -> Any:
        array = np.asarray(leaf)
        # As bytes: what the others add to floats is zero, which takes the sign of -0.
        sent = multihost_utils.broadcast_one_to_all(np.frombuffer(array.tobytes(), np.uint8))
        return np.frombuffer(bytearray(np.asarray(sent)), array.dtype).reshape(array.shape)

    return jax.tree.map(one, tree)


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
    said: list[Any] = []
    if jax.process_count() == 1:
        yield said
        return
    error = None
    try:
        yield said
    except Exception as raised:
        error = raised
    kind = "" if error is None or isinstance(error, ValueError) else f"{type(error).__name__}: "
    ends = _gathered((None if error is None else f"{kind}{error}", said))
    if error is not None:
        raise error
    for text in (text for text, _ in ends if text is not None):
        raise ValueError(text)
    said[:] = [each for _, values in ends for each in values]


def _gathered(value: Any) -> list[Any]:
    """A plain value of every process, in their order."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    longest = int(multihost_utils.process_allgather(np.int32(text.size)).max())
    # Few lengths, since each one is compiled; blanks at the end are no part of the value.
    padded = np.pad(text, (0, -(-longest // 1024) * 1024 - text.size), constant_values=ord(" "))
    return [json.loads(row.tobytes()) for row in multihost_utils.process_allgather(padded)]


def _spread(tree: Any, sharding: NamedSharding) -> Any:
    """Arrays over the devices of all processes; each puts its own devices' part there."""

    def one(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.core.Tracer):
            return jax.lax.with_sharding_constraint(leaf, sharding)
        if not sharding.mesh.is_multi_process:
            return jax.device_put(leaf, sharding)
        host = _host(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, tree)


def _host(leaf: Any) -> np.ndarray:
    """An array of the dtype that it will have on a device."""
    array = np.asarray(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def collected(tree: Any) -> Any:
    """Arrays on the host, without padding, whichever processes hold them; a call that all make.

    Args:
        tree: Pytree of arrays.
    """

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return jax.device_get(leaf)
        return multihost_utils.process_allgather(leaf, tiled=True)

    return whole(jax.tree.map(one, tree))
