"""Vectors of reals as the whole numbers of a secure sum, of many simulated clients inside jit.

What `dpjax.secagg.fixed` does for one client, to the bit, if the words are the same: coordinates
are multiplied once, then added and subtracted in a fixed order. Words are threefry's: that of
client i, coordinate j and try t is the hash of the counter (t, j) under the key folded with i.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray, UInt32

from dpjax import _numerics
from dpjax._sums import LARGEST, TRIES, SumCode
from dpjax.mechanism.x64 import double_precision
from dpjax.transforms.discrete import discrete_gaussians
from dpjax.transforms.noise import check_key

__all__ = ["contributions", "decode", "encode", "noisy", "signs"]

_UPPER = 20
"""Bits that squares of up to 2^44 lose where 2^24 of them are added in 63."""


def encode(
    code: SumCode,
    values: Float[Array, "n k"],
    signs: Float[Array, " K"],
    key: PRNGKeyArray,
    weights: Float[Array, " n"] | None = None,
) -> tuple[Int32[Array, "n K"], Bool[Array, " n"]]:
    """Return the whole numbers of every client's vector, without noise.

    Guarantee: the sum of squares of a row is at most ``code.limit``, whatever the values are: a
    row that is longer, or not finite, is all zero, and said to be.

    Args:
        code: What all agree on, static.
        values: [n, k] reals, rows of a norm of at most ``code.bound``.
        signs: [K] from ``code.signs``.
        key: A threefry key, of this rounding alone.
        weights: [n] from 0 to 1, where the code is weighted.

    Returns:
        ([n, K] int32, [n] True where a row is its vector's).

    Raises:
        ValueError: For other shapes, weights that are missing or too many, another key.
    """
    check_key(key)
    places = _rotated(code, _checked(code, values, weights), signs)
    fine = jnp.all(jnp.isfinite(places), axis=1)
    places = jnp.where(fine[:, None], places, 0)
    lower = jnp.floor(places)
    shares = (places - lower) * np.float32(2**24)
    whole = lower.astype(jnp.int32)
    rows, columns = whole.shape
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows, dtype=jnp.uint32))
    column = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.uint32), (rows, columns))

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        tries, _, short = carry
        return (tries < TRIES) & ~jnp.all(short)

    def body(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tries, kept, short = carry
        words, _ = jax.vmap(_numerics.threefry)(keys, jnp.full_like(column, tries), column)
        up = (words >> np.uint32(8)).astype(jnp.float32) < shares
        drawn = whole + up.astype(jnp.int32)
        kept = jnp.where(short[:, None], kept, drawn)
        return tries + np.uint32(1), kept, short | _short(code, drawn)

    start = jnp.uint32(0), jnp.zeros_like(whole), jnp.zeros(rows, bool)
    _, kept, short = jax.lax.while_loop(unfinished, body, start)
    towards_zero = jnp.trunc(places).astype(jnp.int32)
    kept = jnp.where(short[:, None], kept, towards_zero)
    fine = fine & (short | _short(code, towards_zero))
    return jnp.where(fine[:, None], kept, 0), fine


def signs(code: SumCode, key: PRNGKeyArray) -> Float[Array, " K"]:
    """Return public signs, +-1 in float32, as ``code.signs`` does of bytes.

    Args:
        code: What all agree on, static.
        key: A public key of this round alone, which the vectors do not depend on.
    """
    if not code.rotated:
        return jnp.ones(code.padded, jnp.float32)
    words = jax.random.bits(key, (-(-code.padded // 32),), jnp.uint32)
    bits = words[:, None] >> jnp.arange(32, dtype=jnp.uint32) & np.uint32(1)
    return 1 - 2 * bits.reshape(-1)[: code.padded].astype(jnp.float32)


def noisy(
    code: SumCode,
    values: Float[Array, "n k"],
    signs: Float[Array, " K"],
    key: PRNGKeyArray,
    weights: Float[Array, " n"] | None = None,
) -> tuple[Int32[Array, "n K"], Bool[Array, " n"]]:
    """Return every client's whole numbers and noise, as they are.

    Guarantee: as `dpjax.secagg.fixed.noisy`, for whoever does not know the key; a row whose vector
    is not sent is its noise.

    Args:
        code: What all agree on, static.
        values: [n, k] reals.
        signs: [K], public.
        key: A threefry key, of this round alone.
        weights: As `encode`.

    Returns:
        ([n, K] int32, [n] True where a row is its vector's).

    Raises:
        ValueError: As `encode`.
    """
    check_key(key)
    whole, fine = encode(code, values, signs, jax.random.fold_in(key, 0), weights)
    if code.variance:
        shape = len(whole), code.padded
        whole = whole + discrete_gaussians(jax.random.fold_in(key, 1), shape, code.variance)
    return whole, fine


def contributions(
    code: SumCode,
    values: Float[Array, "n k"],
    signs: Float[Array, " K"],
    key: PRNGKeyArray,
    weights: Float[Array, " n"] | None = None,
) -> tuple[UInt32[Array, "n K"], Bool[Array, " n"]]:
    """Return what every client hands to a secure sum modulo 2^b: whole numbers and noise.

    Guarantee: that of `noisy`, where they are added up modulo 2^b: sums in more bits would also
    show how many of the numbers were below zero.

    Args:
        code: What all agree on, static.
        values: [n, k] reals.
        signs: [K] from ``code.signs``.
        key: A threefry key, of this round alone.
        weights: As `encode`.

    Returns:
        ([n, K] uint32 below 2^b, [n] True where a row is its vector's).

    Raises:
        ValueError: As `encode`.
    """
    whole, fine = noisy(code, values, signs, key, weights)
    return whole.astype(jnp.uint32) & np.uint32(2**code.bits - 1), fine


def decode(
    code: SumCode, total: UInt32[Array, " K"], signs: Float[Array, " K"]
) -> Float[Array, " k"]:
    """Return the sum of vectors that whole numbers stand for, in float32.

    Args:
        code: What all agree on, static.
        total: [K] sums, in 32 bits or modulo 2^b.
        signs: [K] from ``code.signs``.

    Returns:
        [k] reals; where the code is weighted [k + 1], the sum of w x and then that of w.

    Raises:
        ValueError: For another size, or what are no whole numbers.
    """
    if total.shape != (code.padded,) or total.dtype not in (jnp.uint32, jnp.int32):
        raise ValueError(
            f"total is {total.dtype}{list(total.shape)}; give {code.padded} whole numbers of 32 "
            "bits"
        )
    spare = np.uint32(32 - code.bits)
    signed = jax.lax.bitcast_convert_type(total.astype(jnp.uint32) << spare, jnp.int32)
    signed = signed >> spare.astype(np.int32)
    # Sums of whole numbers first, which are exact up to 2^24, and one product: through memory, so
    # that it is not rounded together with what follows.
    reals, unit = signed.astype(jnp.float32), code.grid
    if code.rotated:
        reals, unit = _hadamard(reals[None])[0] * signs, code.grid / math.sqrt(code.padded)
    reals = jax.lax.optimization_barrier(reals * np.float32(unit))
    reals = reals[: code.size + code.weighted]
    return reals.at[-1].divide(np.float32(code.bound)) if code.weighted else reals


def _checked(code: SumCode, values: Any, weights: Any) -> Float[Array, "n m"]:
    """The vectors as they are rounded, float32, their weights behind them."""
    if values.ndim != 2 or values.shape[1] != code.size:
        raise ValueError(f"values are {list(values.shape)}; give [clients, {code.size}]")
    if (weights is not None) != code.weighted:
        raise ValueError(
            f"weights are {'missing' if weights is None else 'given'}, and the code is "
            f"{'' if code.weighted else 'not '}weighted; give {'them' if code.weighted else 'none'}"
        )
    vectors = values.astype(jnp.float32)
    if weights is None:
        return vectors
    if weights.shape != values.shape[:1]:
        raise ValueError(f"weights are {list(weights.shape)}; give one for each client")
    shares = weights.astype(jnp.float32)[:, None]
    last = jnp.full((len(vectors), 1), code.bound, jnp.float32)
    return jnp.concatenate([vectors, last], axis=1) * shares


def _rotated(code: SumCode, vectors: Float[Array, "n m"], signs: Any) -> Float[Array, "n K"]:
    """The places of vectors on the grid."""
    # Through memory: a product and a sum fused would be rounded once, and not as NumPy's.
    scaled = jax.lax.optimization_barrier(vectors * code.factor)
    places = jnp.pad(scaled, ((0, 0), (0, code.padded - vectors.shape[1])))
    if code.rotated:
        places = _hadamard(places * jnp.asarray(signs, jnp.float32))
    largest = np.float32(LARGEST)
    return jnp.where(jnp.abs(places) > largest, jnp.sign(places) * largest, places)


def _hadamard(values: Float[Array, "n K"]) -> Float[Array, "n K"]:
    """H of every row, as `dpjax.secagg.fixed.hadamard`."""
    rows, columns = values.shape
    width = 1
    while width < columns:
        pairs = values.reshape(rows, -1, 2, width)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        values = jnp.stack([first + second, first - second], axis=2).reshape(rows, columns)
        width *= 2
    return values


def _short(code: SumCode, whole: Int32[Array, "n K"]) -> Bool[Array, " n"]:
    """Whether the squares of a row add up to at most the limit."""
    with double_precision():
        squares = jnp.square(whole.astype(jnp.int64))
        # Their sum may be beyond 64 bits; that of their upper parts is not, and bounds it.
        upper = jnp.sum(squares >> _UPPER, axis=1) <= np.int64(code.limit >> _UPPER)
        return upper & (jnp.sum(squares, axis=1) <= np.int64(code.limit))
