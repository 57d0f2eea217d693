"""Gossip: one product with the mixing matrix over the leading (agent) axis of every leaf."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

__all__ = ["mix"]

Tree = TypeVar("Tree")


def mix(mixing: Float[Array, "n n"], tree: Tree) -> Tree:
    """Return ``mixing @ leaf`` over the leading axis of every leaf.

    The product runs at full float32 precision on every device: on GPUs the default one has
    ten-bit mantissas, in which noise that should cancel does not. Leaves below float32 are
    mixed in float32 and rounded once.

    Args:
        mixing: [n, n] weights; row i holds what agent i puts on each agent's value.
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
    n = mixing.shape[-1]

    def one(path: tuple, leaf: Array) -> Array:
        leaf = jnp.asarray(leaf)
        if leaf.ndim == 0 or leaf.shape[0] != n or not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"tree{jax.tree_util.keystr(path)} has shape {leaf.shape} and dtype {leaf.dtype}; "
                f"give floating leaves with a leading axis of n={n} agents"
            )
        dtype = jnp.promote_types(leaf.dtype, jnp.float32)
        weights = jnp.asarray(mixing).astype(dtype)
        mixed = jnp.tensordot(
            weights, leaf.astype(dtype), axes=1, precision=jax.lax.Precision.HIGHEST
        )
        return mixed.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, tree)


def at(mixing: Float[Array, "*p n n"], round: Int[Array, ""] | int) -> Float[Array, "n n"]:
    """Return the matrix of a round: ``mixing`` itself, or entry ``round mod P`` of a schedule."""
    if mixing.ndim == 2:
        return jnp.asarray(mixing)
    index = jnp.asarray(round) % mixing.shape[0]
    return jax.lax.dynamic_index_in_dim(jnp.asarray(mixing), index, keepdims=False)
