"""The agent axis over a device mesh."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

__all__: list[str] = []

AXIS = "agents"


def agent_mesh(n: int, devices: int | Sequence[jax.Device] | None) -> Mesh | None:
    """Make a one-dimensional mesh over which n agents divide evenly.

    Args:
        n: Number of agents.
        devices: How many of `jax.devices()` to use, or the devices; None or one device is no mesh.

    Returns:
        The mesh with the one axis `AXIS`, or None for a single device.

    Raises:
        ValueError: If there are fewer devices, or if their number does not divide n.
    """
    if devices is None:
        return None
    if isinstance(devices, str | bytes | float) or not isinstance(devices, int | Sequence):
        raise ValueError(f"devices is {devices!r}; give a whole number, or a list of devices")
    if isinstance(devices, int):
        available = jax.devices()
        if isinstance(devices, bool) or not 1 <= devices <= len(available):
            raise ValueError(
                f"devices is {devices!r}; this process has {len(available)}, "
                f"choose 1 to {len(available)}"
            )
        devices = available[:devices]
    count = len(devices)
    if count == 0 or n % count:
        fitting = [k for k in range(1, n + 1) if n % k == 0]
        raise ValueError(
            f"devices is {count}, which does not divide the {n} agents; "
            f"use one of {', '.join(map(str, fitting))} devices"
        )
    return None if count == 1 else Mesh(np.asarray(devices), (AXIS,))


def place(tree: Any, mesh: Mesh | None, axis: int | None) -> Any:
    """Put every leaf on the mesh, its ``axis`` over the agents (None: a copy on every device).

    Args:
        tree: Pytree of arrays.
        mesh: From `agent_mesh`; None leaves the tree as it is.
        axis: Which axis counts the agents.

    Returns:
        The placed pytree.
    """
    if mesh is None:
        return tree
    spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)
    return jax.device_put(tree, NamedSharding(mesh, spec))


def memory(mesh: Mesh | None) -> int | None:
    """Bytes of memory of the devices of a mesh together; None where they are the machine's.

    Args:
        mesh: From `agent_mesh`; None is the first device.
    """
    devices = jax.devices()[:1] if mesh is None else mesh.devices.flat
    stats = [device.memory_stats() or {} for device in devices]
    found = [each["bytes_limit"] for each in stats if "bytes_limit" in each]
    return sum(found) if len(found) == len(stats) else None
