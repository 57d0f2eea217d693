"""Sums in float64 in the middle of a program in float32, whatever the global flag says."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

__all__: list[str] = []

UNIT = 2.0**-53
"""Half the spacing of float64 at 1."""


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Return a context in which jax computes in float64; the global flag is restored after.

    Ranks are promoted as numpy does, too, whatever jax is configured to: nothing of a user's is
    computed here.
    """
    if hasattr(jax, "enable_x64"):
        wide: AbstractContextManager = jax.enable_x64(True)
    else:
        from jax import experimental

        wide = experimental.enable_x64()  # type: ignore[attr-defined]  # before it moved to jax
    with wide, jax.numpy_rank_promotion("allow"):
        yield


def error(terms: int) -> float:
    """How wrong a sum in float64 may be, in any order, over the sizes of its terms added up.

    Args:
        terms: How many there are.
    """
    return (terms + 4) * UNIT


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
