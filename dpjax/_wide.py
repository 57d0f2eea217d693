"""Sums in float64 in the middle of a program in float32, whatever the global flag says."""

from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

__all__: list[str] = []

UNIT = 2.0**-53
"""Half the spacing of float64 at 1."""


def double_precision() -> AbstractContextManager:
    """Return a context in which jax computes in float64; the global flag is restored after."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax import experimental

    return experimental.enable_x64()  # type: ignore[attr-defined]  # before it moved to jax


def zeros(like: Any) -> Any:
    """Zeros in float64, in the shapes of a tree.

    Args:
        like: Pytree of arrays or shapes.
    """
    with double_precision():
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float64), like)


def plus(total: Any, more: Any) -> Any:
    """Two sums in float64, added up.

    Args:
        total: Pytree of float64 arrays.
        more: The same.
    """
    with double_precision():
        return jax.tree.map(jnp.add, total, more)


def rounded(total: Any, like: Any) -> Any:
    """A sum in float64, rounded once.

    Args:
        total: Pytree of float64 arrays.
        like: Pytree of the same structure, whose dtypes it gets.
    """
    with double_precision():
        return jax.tree.map(lambda leaf, to: leaf.astype(to.dtype), total, like)
