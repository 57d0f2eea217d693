"""Sums of squares whose rounding is bounded whatever the order of additions."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__: list[str] = []

# Up to this many entries one sum, in any order, is accurate enough.
ONE_SUM = 4_096


def levels(size: int) -> tuple[int, int]:
    """Length and number of the partial sums of that many numbers."""
    if size <= ONE_SUM:
        return size, 1
    length = math.isqrt(size - 1) + 1
    return length, -(-size // length)


def total(flat: Float[Array, " d"]) -> Float[Array, ""]:
    """Sum of squares with rounding error below (length + number) ulp whatever the order."""
    length, number = levels(flat.size)
    squares = jnp.square(flat)
    if number == 1:
        return jnp.sum(squares)
    squares = jnp.pad(squares, (0, length * number - flat.size)).reshape(number, length)
    # The barrier keeps the compiler from merging the two sums into one of d terms.
    return jnp.sum(jax.lax.optimization_barrier(jnp.sum(squares, axis=1)))
