"""The layout of noise: which draw a leaf's noise is part of, and what decides its numbers.

The leaves of one computing dtype are taken in tree order and packed into groups of at most `PACK`
entries an agent (a larger leaf is a group of its own). Group g of round t is one draw of shape
[n, entries] under ``fold_in(fold_in(key, t), g)``; each leaf is a run of columns of it. So a small
model is one draw a round, a large one never holds more than a leaf's noise twice, and numbers
depend on (key, round, layout) alone: not on what they are scaled by, on what is vmapped, or on how
arrays are sharded. The layout is part of what a seed means, so it stays fixed.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dpjax.transforms.leaves import check as check_leaf

__all__: list[str] = []

PACK = 65_536
"""Entries an agent up to which leaves share one draw."""


class Group(NamedTuple):
    """Leaves that share a draw.

    Attributes:
        leaves: Their positions in the flattened tree.
        sizes: Their entries an agent.
        dtype: What their noise is computed in.
    """

    leaves: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: Any


def groups(paths: list[tuple[Any, Any]], n: int, expected: str, wide: Any = None) -> list[Group]:
    """Pack leaves into draws.

    Args:
        paths: The leaves in tree order, each with where it is.
        n: Agents, the length of every leading axis.
        expected: What a message calls that axis.
        wide: One computing dtype for all; None is each leaf's, float32 for narrower ones.

    Raises:
        ValueError: For a leaf of another leading axis, or not of floating dtype.
    """
    packed: list[Group] = []
    open_groups: dict[Any, int] = {}
    for position, (path, leaf) in enumerate(paths):
        shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
        check_leaf(path, leaf, n, expected)
        size = int(np.prod(shape[1:]))
        dtype = jnp.promote_types(dtype, jnp.float32) if wide is None else np.dtype(wide)
        index = open_groups.get(dtype)
        if index is not None and sum(packed[index].sizes) + size <= PACK:
            group = packed[index]
            packed[index] = Group((*group.leaves, position), (*group.sizes, size), dtype)
        else:
            open_groups[dtype] = len(packed)
            packed.append(Group((position,), (size,), dtype))
    return packed


def draw_key(key: PRNGKeyArray, round: Any, group: int) -> PRNGKeyArray:
    """Return the key of a group's draw in a round."""
    return jax.random.fold_in(jax.random.fold_in(key, round), group)


def parts(
    group: Group, noise: Float[Array, "n d"], leaves: list[Any]
) -> Iterator[tuple[int, Float[Array, "n ..."]]]:
    """Give every leaf of a group its part of the noise: the leaf's position, and its shape.

    Args:
        group: The group.
        noise: [n, entries of the group] noise.
        leaves: All leaves.
    """
    columns = np.cumsum(group.sizes)[:-1]
    for position, part in zip(group.leaves, jnp.split(noise, columns, 1), strict=True):
        yield position, part.reshape(leaves[position].shape)


def pinned(values: Any, round: Int[Array, ""]) -> Array:
    """Return the same numbers, whose rounding compilers cannot move into what follows.

    Factors that are multiplied, or a product and a sum, would be rounded together, to other last
    bits than around a matrix product; a seed's results are to stay what they are. Rounds are not
    below 0, which no compiler knows.
    """
    words = jnp.uint32 if values.dtype == jnp.float32 else jnp.uint64
    zero = (round < 0).astype(words)
    bits = jax.lax.bitcast_convert_type(values, words) ^ zero
    return jax.lax.bitcast_convert_type(bits, values.dtype)
