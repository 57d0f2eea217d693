"""Sums of squares, or of sizes, whose rounding is bounded whatever the order of additions."""

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
    return _summed(jnp.square(flat))


def sizes(flat: Float[Array, " d"]) -> Float[Array, ""]:
    """Sum of absolute values with rounding error below (length + number) ulp."""
    return _summed(jnp.abs(flat))


def _summed(terms: Float[Array, " d"]) -> Float[Array, ""]:
    length, number = levels(terms.size)
    if number == 1:
        return jnp.sum(terms)
    terms = jnp.pad(terms, (0, length * number - terms.size)).reshape(number, length)
    # The barrier keeps the compiler from merging the two sums into one of d terms.
    return jnp.sum(jax.lax.optimization_barrier(jnp.sum(terms, axis=1)))
