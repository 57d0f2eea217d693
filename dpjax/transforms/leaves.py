"""What transformations ask of all leaves together: one check, one inner product."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

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


def product(one: Any, other: Any) -> Float[Array, ""]:
    """Return <one, other> over all leaves, in float32.

    Args:
        one: A tree.
        other: A tree like it.
    """
    terms = jax.tree.map(
        lambda x, y: jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32)), one, other
    )
    return jnp.stack(jax.tree.leaves(terms)).sum().astype(jnp.float32)
