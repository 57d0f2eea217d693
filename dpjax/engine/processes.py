"""A run over several processes: what one decides and reads, and what all of them hold.

All processes that `jax.distributed.initialize` joined make the same call with the same arguments.
Their devices are one mesh; the first process keeps the files and asks the callback, and what it
decides is sent to the others.
"""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

__all__: list[str] = []


def leads() -> bool:
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


def spread(tree: Any, sharding: NamedSharding) -> Any:
    """Arrays over the devices of all processes, each of which has the whole of them.

    Args:
        tree: Pytree of arrays.
        sharding: Of every leaf.
    """
    if not sharding.mesh.is_multi_process:
        return jax.device_put(tree, sharding)

    def one(leaf: Any) -> jax.Array:
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, tree)


def collected(tree: Any) -> Any:
    """Arrays on the host, whole, whichever processes hold their parts; a call that all make.

    Args:
        tree: Pytree of arrays.
    """

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return jax.device_get(leaf)
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.tree.map(one, tree)
