"""Threefry hashes written out, so that compilers fuse them with what follows.

Keys of rounds and parts are folded by JAX: a round without any loop of its own was scheduled over
threads on a CPU, and took twice as long.

On a CPU JAX hashes in a loop that nothing fuses with, which costs a small round most of its draws'
time. Bits are those of `jax.random`, under its default layout of counters and whatever that setting
says; the tests hold them to it.

Reference:
    Salmon et al. (2011), Parallel random numbers: as easy as 1, 2, 3 (Threefry-2x32-20).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, UInt32

__all__ = ["IMPLEMENTATION", "bits", "hashed"]

IMPLEMENTATION = "threefry2x32"

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


@functools.partial(jax.jit, inline=True)
def hashed(
    key: PRNGKeyArray, high: UInt32[Array, "..."], low: UInt32[Array, "..."]
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """The two words of the hash of every counter.

    Args:
        key: One threefry key.
        high: First words of the counters.
        low: Second words, of the same shape.

    Raises:
        ValueError: For several keys.
    """
    _one(key)
    first, second = jax.random.key_data(key)
    schedule = (first, second, first ^ second ^ _PARITY)
    x, y = high + schedule[0], low + schedule[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x = x + y
            y = (y << np.uint32(distance)) | (y >> np.uint32(32 - distance))
            y = x ^ y
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def bits(key: PRNGKeyArray, shape: tuple[int, int]) -> UInt32[Array, "r c"]:
    """`jax.random.bits` of 32 bits each.

    Args:
        key: One key; of another generator than threefry, JAX draws.
        shape: (rows, columns); where their product is beyond 32 bits, JAX draws.

    Raises:
        ValueError: For several keys.
    """
    _one(key)
    rows, columns = shape
    if str(jax.random.key_impl(key)) != IMPLEMENTATION or rows * columns >= 2**32:
        return jax.random.bits(key, shape, jnp.uint32)
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
    counter = row * np.uint32(columns) + column
    high, low = hashed(key, jnp.zeros_like(counter), counter)
    return high ^ low


def _one(key: PRNGKeyArray) -> None:
    if key.shape:
        raise ValueError(f"key has shape {key.shape}; give one key, or use jax.vmap")
