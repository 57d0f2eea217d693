"""The one check of what transformations take: floating leaves with one leading axis."""

from typing import Any

import jax
import jax.numpy as jnp

__all__: list[str] = []


def check(path: Any, leaf: Any, count: int | None, expected: str) -> None:
    """Refuse a leaf of updates of another leading axis or dtype.

    Args:
        path: Where the leaf is.
        leaf: An array, or a tracer.
        count: Length of the leading axis.
        expected: What a message calls the axis.

    Raises:
        ValueError: Naming the leaf.
    """
    shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
    if not shape or shape[0] != count or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"updates{jax.tree_util.keystr(path)} has shape {shape} and dtype {dtype}; give "
            f"floating leaves with {expected} as their leading axis"
        )
