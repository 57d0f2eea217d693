"""Standard normals and Laplace variables from threefry hashes, for simulations and for releases.

Every number follows from (key, row, column) alone, for `normals` in float32 also from the number of
columns: not from how many rows there are, from what is vmapped, or from how arrays are sharded.

`normals` makes two float32 normals of every hash: with h = ceil(columns / 2), its first word is
column j and its second one column h + j. In float64 both words make one normal. The float32 normals
take 2^24 values, symmetric about zero, none beyond 5.42: they are for simulations. One hash for two
numbers takes .3 to .9 of the time of `jax.random.normal` on two CPU cores
(``benchmarks/bench_noise.py``).

`laplaces` uses all 64 bits of a hash: a sign, on which side of its median, log 2, the magnitude
lies, and 62 bits k, a probability q = (k + 1/2) 2^-63 in (0, 1/2):

    |x| = -log(q)        beyond log 2, a tail of 2^-64 at its end
    |x| = -log(1 - q)    below it, down to 2^-64 at its end

A floating-point q has all of its digits however small it is, so neither the tail nor what is near
zero is coarser than the dtype. x and -x are equally likely to the bit.

`release_normals` are float64: a sign and 63 bits m of a tail probability, p = (m + 1/2) 2^-64 in
(0, 1/2), whose normal is +- Phi^-1(p). Where m < 2^32, once in 2^31 draws, a second hash refines
the probability by 64 more bits, p = (m + (x + 1/2) 2^-64) 2^-64: tails end at 13 standard
deviations instead of 9.1, and up to 11.3 of them every normal is within 2.1e-11 of the real one
that it stands for. `dpjax.accounting.finite` bounds what the difference costs.

Assumption: threefry2x32 with 20 rounds and a secret key of 64 bits is pseudorandom: what it gives
on distinct counters and keys folded from a secret one cannot be told from uniform bits by anyone
who does not try some 2^64 keys. Every counter is used once for a key.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from dpjax import _numerics
from dpjax._numerics import Shape, WordPair, Words

__all__ = ["laplaces", "laplaces_of_words", "normals", "normals_of_words"]

AgentRows: TypeAlias = Sequence[int] | None
_Shape: TypeAlias = tuple[int, int]
_Numbers: TypeAlias = Float[Array, "..."]

LARGEST_NORMAL = 5.42
"""No float32 normal is larger."""
LARGEST_LAPLACE = 44.37
"""None is larger: -log(2^-64), of which a true one has a probability of 2^-64, is 44.3614."""
SMALLEST_LAPLACE = 2.0**-64
"""None is nearer to zero."""

_LARGE = 2**22
"""Float32 normals from which each word is hashed where it is used; the numbers are the same."""

_FINER = 2.0**-32
"""Tail probability below which 64 more bits are drawn."""
_EDGE = 6.23
"""Less than the quantile of it."""
_FAR_FROM = 1.3888e-11
"""exp(-25), where the outermost rational function begins."""

# Wichura (1988), algorithm AS 241, PPND16: numerators and denominators by ascending power for
# |p - 1/2| <= .425, sqrt(-log p) <= 5, and beyond.
_CENTRE = (
    (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
     1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
     3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4,
     5.2264952788528545610e3),
)  # fmt: skip
_TAIL = (
    (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0,
     3.64784832476320460504e0, 1.27045825245236838258e0, 2.41780725177450611770e-1,
     2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4,
     1.05075007164441684324e-9),
)  # fmt: skip
_FAR = (
    (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0,
     2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
     2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7,
     2.04426310338993978564e-15),
)  # fmt: skip


def words(key: PRNGKeyArray, shape: _Shape, rows: AgentRows = None) -> WordPair:
    """The two 32-bit words of the hash of every counter (row, column).

    Args:
        key: One threefry key, of this draw alone.
        shape: (rows, columns), each below 2**32.
        rows: Numbers of the rows; None counts from 0.
    """
    column = lax.broadcasted_iota(jnp.uint32, shape, 1)
    return _numerics.threefry(key, _row_numbers(shape, rows), column)


def _row_numbers(shape: Shape, rows: AgentRows) -> Words:
    """The number of its row for every entry of an array."""
    if rows is None:
        return lax.broadcasted_iota(jnp.uint32, shape, 0)
    return lax.broadcast_in_dim(np.asarray(rows, np.uint32), shape, (0,))


def normals(key: PRNGKeyArray, shape: _Shape, dtype: jnp.dtype, rows: AgentRows = None) -> _Numbers:
    """Draw independent standard normals.

    Args:
        key: One threefry key, of this draw alone.
        shape: (rows, columns), each below 2**32.
        dtype: float32 or float64.
        rows: Numbers of the rows, which decide their normals; None counts from 0.

    Raises:
        ValueError: For another dtype.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from dpjax.transforms import variates
        >>> variates.normals(jax.random.key(0), (2, 3), jnp.float32).shape
        (2, 3)
    """
    count, columns = shape
    if jnp.dtype(dtype) == jnp.float64:
        low, high = words(key, shape, rows)
        # Odd multiples of 2**-53 in (-1, 1): 53 bits, of which the first word holds the sign.
        signed = lax.bitcast_convert_type(high, jnp.int32).astype(jnp.float64)
        lowest = (low >> 11).astype(jnp.float64)
        steps = signed * 2.0**21 + lowest
        uniforms = (steps + 0.5) * 2.0**-52
        return math.sqrt(2) * lax.erf_inv(uniforms)
    if jnp.dtype(dtype) != jnp.float32:
        raise ValueError(f"dtype is {jnp.dtype(dtype)}; give float32 or float64")
    half = -(-columns // 2)
    if count * columns >= _LARGE:
        # Hashing twice is faster than memory beyond caches, and words need none.
        size = (count, 2, half)
        word = lax.broadcasted_iota(jnp.uint32, size, 1)
        column = lax.broadcasted_iota(jnp.uint32, size, 2)
        first, second = _numerics.threefry(key, _row_numbers(size, rows), column)
        bits = jnp.where(word == 0, first, second)
        bits = bits.reshape(count, 2 * half)
    else:
        pair = _numerics.through_memory(*words(key, (count, half), rows))
        bits = jnp.concatenate(pair, axis=1)
    return normals_of_words(bits[:, :columns])


def normals_of_words(bits: Words) -> _Numbers:
    """The float32 normals that the upper 24 bits of words stand for.

    Args:
        bits: Words.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.transforms import variates
        >>> bool(abs(variates.normals_of_words(jnp.zeros(1, jnp.uint32))[0]) < 1e-6)
        True
    """
    # Odd multiples of 2**-24 in (-1, 1), exact in float32.
    signed = lax.bitcast_convert_type(bits, jnp.int32)
    steps = (signed >> 8).astype(jnp.float32)
    uniforms = (steps + 0.5) * 2.0**-23
    return math.sqrt(2) * lax.erf_inv(uniforms)


def laplaces(
    key: PRNGKeyArray, shape: _Shape, dtype: jnp.dtype, rows: AgentRows = None
) -> _Numbers:
    """Draw independent Laplace variables of scale 1, of density exp(-|x|) / 2.

    Args:
        key: One threefry key, of this draw alone.
        shape: (rows, columns), each below 2**32.
        dtype: float32, or float64 where JAX computes in it.
        rows: As in `normals`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from dpjax.transforms import variates
        >>> variates.laplaces(jax.random.key(0), (2, 3), jnp.float32).shape
        (2, 3)
    """
    return laplaces_of_words(*words(key, shape, rows), dtype)


def laplaces_of_words(high: Words, low: Words, dtype: jnp.dtype) -> _Numbers:
    """The Laplace variable that the two words of a hash stand for.

    Args:
        high: Words whose first bit is the sign and whose second is the side.
        low: Words of the last 32 bits of k.
        dtype: float32 or float64.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.transforms import variates
        >>> word = jnp.zeros(1, jnp.uint32)
        >>> float(variates.laplaces_of_words(word, word, jnp.float32)[0]) >= 0
        True
    """
    # Scaled by powers of two, so that no compiler rounds a product and a sum otherwise.
    upper = (high & 2**30 - 1).astype(dtype)
    upper = upper * 2.0**-31
    lower = low.astype(dtype) + 0.5
    lower = lower * 2.0**-63
    tail = upper + lower
    beyond = (high >> 30) & 1 == 1
    magnitude = -jnp.where(beyond, jnp.log(tail), jnp.log1p(-tail))
    return _signed(high, magnitude)


def _signed(words: Words, magnitude: _Numbers) -> _Numbers:
    """A magnitude with the sign of the first bit of a word."""
    return jnp.where(words >> 31 == 1, -magnitude, magnitude)


def release_normals(key: PRNGKeyArray, shape: _Shape) -> _Numbers:
    """Standard normals of agents and coordinates, each from 64 bits of its own.

    Normal (i, j) follows from the key and the counter (i, j) alone: not from the shape, from what
    is vmapped around, or from how arrays are sharded.

    Guarantee: up to 11.3 standard deviations each is as near to a standard normal, independent
    of all others, as `dpjax.accounting.finite` assumes, if threefry2x32 is pseudorandom. Call it
    in double precision.

    Args:
        key: One threefry key, of no other use.
        shape: (n, d), below 2^32 each.

    Returns:
        [n, d] float64.
    """
    first = jax.random.fold_in(key, 0)
    second = jax.random.fold_in(key, 1)

    def finer(_: Array, values: Array) -> Array:
        # What does not depend on the values would be moved out of the loop, and always be done.
        fenced = values, jax.random.key_data(first), jax.random.key_data(second)
        values, *data = lax.optimization_barrier(fenced)
        keys = [jax.random.wrap_key_data(words, impl=_numerics.THREEFRY) for words in data]
        coarse_words = words(keys[0], shape)
        coarse = signed_probabilities(*coarse_words)
        refined = signed_probabilities(*coarse_words, words(keys[1], shape))
        return jnp.where(jnp.abs(coarse) < _FINER, quantile(refined), values)

    # Both pass through memory: the compiler would hash again wherever they are used otherwise.
    coarse = lax.optimization_barrier(signed_probabilities(*words(first, shape)))
    values = lax.optimization_barrier(quantile(coarse, smallest=_FINER))
    # A loop of no trips but where a draw needs it: vmapped, a conditional would always do both.
    is_far = jnp.abs(values) > _EDGE
    trips = jnp.any(is_far).astype(jnp.int32)
    return lax.fori_loop(0, trips, finer, values)


def signed_probabilities(high: Words, low: Words, finer: WordPair | None = None) -> _Numbers:
    """Tail probabilities of words, below zero where the normal is.

    p = (m + 1/2) 2^-64 for the 63 bits m of ``high`` without its first bit, which is the sign, and
    of ``low``; with the finer words (m + (x + 1/2) 2^-64) 2^-64.

    Args:
        high: uint32 words.
        low: uint32 words.
        finer: The upper and the lower half of x.

    Returns:
        float64 in [-1/2, 1/2], not zero.
    """
    upper = (high & 2**31 - 1).astype(jnp.float64)
    lower = low.astype(jnp.float64)
    # Smallest terms first: what rounding takes is then below 2 units of the result.
    if finer is None:
        value = jnp.float64(2.0**-65)
    else:
        finer_high, finer_low = finer
        value = (finer_low.astype(jnp.float64) + 0.5) * 2.0**-128
        value = value + finer_high.astype(jnp.float64) * 2.0**-96
    value = value + lower * 2.0**-64 + upper * 2.0**-32
    return _signed(high, value)


def quantile(signed: _Numbers, *, smallest: float = 2.0**-129) -> _Numbers:
    """The normal of which |p| is the probability beyond, with the sign of p.

    Args:
        signed: float64 in [-1/2, 1/2].
        smallest: Smallest |p| that matters; from exp(-25) on the outermost of three rational
            functions is left out, and what lies below gives some number above 6.23.

    Returns:
        float64, within 2^-49 (1 + |z|) of the exact one.

    Reference:
        Wichura (1988), The percentage points of the normal distribution, algorithm AS 241.
    """
    p = jnp.abs(signed)
    q = 0.5 - p
    root = jnp.sqrt(-jnp.log(p))
    centre = q <= 0.425
    outermost = root > 5.0

    def by_range(inner: float | Array, tail: float | Array, outer: float | Array) -> Array:
        if smallest <= _FAR_FROM:
            tail = jnp.where(outermost, outer, tail)
        return jnp.where(centre, inner, tail)

    argument = by_range(0.180625 - q * q, root - 1.6, root - 5.0)
    # Horner's rule for numerator and denominator, in the coefficients of each number's range.
    polynomials = []
    for ranges in zip(_CENTRE, _TAIL, _FAR, strict=True):
        total = jnp.zeros_like(p)
        for inner, tail, outer in reversed(list(zip(*ranges, strict=True))):
            total = total * argument + by_range(inner, tail, outer)
        polynomials.append(total)
    above, below = polynomials
    ratio = above / below
    value = ratio * jnp.where(centre, q, 1.0)
    return jnp.where(signed < 0, -value, value)
