"""Standard Laplace variables from threefry hashes, 64 bits each, in float32 as in float64.

Number (i, j) is the hash of the counter (i, j), two words of 32 bits: the first bit is the sign,
the second says on which side of its median, log 2, the magnitude lies, and the other 62 bits k are
a probability q = (k + 1/2) 2^-63 in (0, 1/2), of what lies beyond the magnitude or of what lies
below it:

    |x| = -log(q)        beyond log 2, a tail of 2^-64 at its end
    |x| = -log(1 - q)    below it, down to 2^-64 at its end

q is a floating-point number with all of its digits however small it is, so neither the tail nor
what is near zero is coarser than the dtype. The sign has a bit of its own: x and -x are equally
likely to the bit. A number depends on (key, row, column) alone: not on how many rows or columns
there are, on what is vmapped, or on how arrays are sharded.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from dpjax import _validate
from dpjax.transforms.noise import check_key
from dpjax.transforms.normals import words

__all__ = ["from_words", "laplaces"]

LARGEST = 44.37
"""None is larger: -log(2^-64), of which a true one has a probability of 2^-64, is 44.3614."""
SMALLEST = 2.0**-64
"""None is nearer to zero."""


def laplaces(key: PRNGKeyArray, shape: tuple[int, int], dtype: Any) -> Float[Array, "r c"]:
    """Draw independent Laplace variables of scale 1, of density exp(-|x|) / 2.

    Assumption: threefry with 20 rounds and a 64-bit key is pseudorandom. Every counter is used
    once for a key, so equal keys give equal numbers and different ones independent numbers.

    Args:
        key: A threefry key, of this draw alone.
        shape: (rows, columns), each below 2**32.
        dtype: float32 or float64.

    Returns:
        [rows, columns] numbers, symmetric about zero, of a standard deviation of sqrt(2).

    Raises:
        ValueError: For anything but one threefry key, another shape or dtype, or float64 where JAX
            computes in float32.
    """
    check_key(key)
    if not isinstance(shape, list | tuple) or len(shape) != 2:
        raise ValueError(f"shape is {_validate.shown(shape)}; give (rows, columns)")
    rows, columns = (_validate.integer("shape", size, least=0, most=2**32 - 1) for size in shape)
    wanted = _checked_dtype(dtype)
    return from_words(*words(key, (rows, columns)), wanted)


def from_words(
    high: UInt32[Array, "..."], low: UInt32[Array, "..."], dtype: Any
) -> Float[Array, "..."]:
    """The number that the two words of a hash stand for.

    Args:
        high: Words whose first bit is the sign and whose second is the side.
        low: Words of the last 32 bits of k.
        dtype: float32 or float64.

    Raises:
        ValueError: As `laplaces`, and for what are no words of 32 bits.
    """
    for name, word in (("high", high), ("low", low)):
        if getattr(word, "dtype", None) != np.uint32:
            raise ValueError(
                f"{name} is {type(word).__name__} of dtype {getattr(word, 'dtype', None)}; give an "
                "array of uint32"
            )
    scalar = _checked_dtype(dtype).type
    # Scaled by powers of two, so that no compiler rounds a product and a sum otherwise.
    upper = (high & np.uint32(2**30 - 1)).astype(dtype) * scalar(2.0**-31)
    tail = upper + (low.astype(dtype) + scalar(0.5)) * scalar(2.0**-63)
    beyond = (high >> np.uint32(30)) & np.uint32(1) == 1
    magnitude = -jnp.where(beyond, jnp.log(tail), jnp.log1p(-tail))
    return jnp.where(high >> np.uint32(31) == 1, -magnitude, magnitude)


def _checked_dtype(given: Any) -> np.dtype[Any]:
    """float32 or float64, where arrays may have it."""
    try:
        dtype = None if given is None else np.dtype(given)
    except TypeError:
        dtype = None
    if dtype not in (np.float32, np.float64):
        raise ValueError(f"dtype is {_validate.shown(given)}; give float32 or float64")
    if jnp.result_type(float) != np.float64 and dtype == np.float64:
        raise ValueError(
            f"dtype is {dtype} where JAX computes in float32; set JAX_ENABLE_X64=1, or give float32"
        )
    return dtype
