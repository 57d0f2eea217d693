"""Standard normals from threefry hashes, none of whose output is thrown away.

Layout. Row i, pair j is one hash of the counter (i, j). In float32 both of its words become
normals: with h = ceil(columns / 2), word 0 is column j and word 1 column h + j. In float64 the two
words make one normal, of column j. So a number depends on (key, row, column, columns) alone: not on
how many rows there are, on what is vmapped, or on how arrays are sharded.

The float32 normals take 2^24 values, symmetric about zero, none beyond 5.42: they are for
simulations. `jax.random.normal` hashes once for each number; one hash for two took .3 to .9 of its
time on two CPU cores, by shape and by what else ran (``benchmarks/bench_noise.py``).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from dpjax import _numerics
from dpjax.mechanism.x64 import double_precision

__all__ = ["from_bits", "normals"]

LARGEST = 5.42
"""No float32 normal is larger."""


def normals(key: PRNGKeyArray, shape: tuple[int, int], dtype: Any) -> Float[Array, "r c"]:
    """Draw independent standard normals.

    Assumption: threefry with 20 rounds and a 64-bit key is pseudorandom. Every counter is used
    once for a key, so equal keys give equal numbers and different ones independent numbers.

    Args:
        key: A threefry key, of this draw alone.
        shape: (rows, columns), each below 2**32.
        dtype: float32 or float64.

    Returns:
        [rows, columns] normals.

    Raises:
        ValueError: For another dtype.
    """
    rows, columns = shape
    if jnp.dtype(dtype) == jnp.float64:
        return _wide(*words(key, (rows, columns)))
    if jnp.dtype(dtype) != jnp.float32:
        raise ValueError(f"dtype is {jnp.dtype(dtype)}; give float32 or float64")
    low, high = words(key, (rows, -(-columns // 2)))
    # The bits pass through memory as one array: the compiler would hash for each word otherwise.
    with double_precision():
        both = low.astype(jnp.uint64) | (high.astype(jnp.uint64) << np.uint64(32))
        both = jax.lax.optimization_barrier(both)
        low, high = both.astype(jnp.uint32), (both >> np.uint64(32)).astype(jnp.uint32)
    bits = jnp.concatenate([low, high], axis=1)[:, :columns]
    return from_bits(bits)


def from_bits(bits: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """The float32 normals that the upper 24 bits of words stand for.

    Args:
        bits: Words.
    """
    # Odd multiples of 2**-24 in (-1, 1), exact in float32.
    steps = (jax.lax.bitcast_convert_type(bits, jnp.int32) >> 8).astype(jnp.float32)
    uniforms = (steps + np.float32(0.5)) * np.float32(2.0**-23)
    return np.float32(np.sqrt(2)) * jax.lax.erf_inv(uniforms)


def _wide(low: UInt32[Array, "r c"], high: UInt32[Array, "r c"]) -> Float[Array, "r c"]:
    """Float64 normals of 53 bits each; odd multiples of 2**-53 in (-1, 1)."""
    signed = jax.lax.bitcast_convert_type(high, jnp.int32).astype(jnp.float64) * 2.0**21
    steps = signed + (low >> np.uint32(11)).astype(jnp.float64)
    return np.sqrt(2.0) * jax.lax.erf_inv((steps + 0.5) * 2.0**-52)


def words(
    key: PRNGKeyArray, shape: tuple[int, int]
) -> tuple[UInt32[Array, "r c"], UInt32[Array, "r c"]]:
    """The two 32-bit words of the hash of every counter (row, column).

    Args:
        key: A threefry key.
        shape: (rows, columns), each below 2**32.

    Returns:
        Two arrays [rows, columns].
    """
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
    return _numerics.threefry(key, row, column)
