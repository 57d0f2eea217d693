"""Vectors of reals as the whole numbers of a secure sum, on a client and on the server.

`SumCode` says what all agree on; `dpjax.transforms.fixed` does the same inside jit, to the bit.
Only NumPy is needed, and `dpjax.secagg.discrete` for a client's words and noise.
"""

import math

import numpy as np
from jaxtyping import Float, Int64, UInt32

from dpjax import _validate
from dpjax._sums import LARGEST, TRIES, SumCode
from dpjax.secagg import discrete

__all__ = ["SumCode", "contribution", "decode", "encode", "noisy"]


def encode(
    code: SumCode,
    values: Float[np.ndarray, " k"],
    signs: Float[np.ndarray, " K"],
    stream: discrete.Stream,
    weight: float | None = None,
) -> Int64[np.ndarray, " K"]:
    """Return a vector's whole numbers, without noise.

    Guarantee: the sum of their squares is at most ``code.limit``.

    Args:
        code: What all agree on.
        values: [k] reals of a norm of at most ``code.bound``.
        signs: [K] from ``code.signs``.
        stream: Where words for the rounding come from.
        weight: From 0 to 1, where the code is weighted.

    Returns:
        [K] whole numbers.

    Raises:
        ValueError: For a vector that is not finite, too long or of another size, a weight out of
            range, or one that is missing.

    Example:
        >>> import numpy as np
        >>> from dpjax.secagg import discrete, fixed
        >>> code = fixed.SumCode(size=4, bound=1.0, grid=0.25, clients=3)
        >>> x, signs = np.array([0.5, 0.0, -0.25, 0.5]), code.signs(b"round 1")
        >>> whole = fixed.encode(code, x, signs, discrete.Stream(bytes(32)))
        >>> float(np.abs(fixed.decode(code, whole, signs) - x).max()) < 0.5
        True
    """
    vector = _checked(code, values, weight)
    places = rotation(code, vector, signs)
    lower = np.floor(places)
    # Exact: a fraction's 24 leading bits, of which words hold as many.
    shares = (places - lower) * np.float32(2**24)
    for _ in range(TRIES):
        words = stream.words(code.padded) >> np.uint32(8)
        whole = lower.astype(np.int64) + (words.astype(np.float32) < shares)
        if int(whole @ whole) <= code.limit:
            return whole
    whole = np.trunc(places).astype(np.int64)
    if int(whole @ whole) > code.limit:
        length = float(np.linalg.norm(vector))
        raise ValueError(
            f"values have a norm of {length:.9g}, beyond bound {code.bound}; clip them first"
        )
    return whole


def noisy(
    code: SumCode,
    values: Float[np.ndarray, " k"],
    signs: Float[np.ndarray, " K"],
    stream: discrete.Stream,
    weight: float | None = None,
) -> Int64[np.ndarray, " K"]:
    """Return a vector's whole numbers and its client's noise: what goes into a secure sum.

    The sum of ``Terms(code.clients, code.padded, bits=32, bound=code.largest, ...)`` takes them.

    Guarantee: zero-out of one client moves the sum by at most ``code.sensitivity``; the noise in
    it is the discrete Gaussian of ``code.variance`` squared grid units, of every client that is in
    the sum. `dpjax.accounting.discrete` states the loss.

    Args:
        code: What all agree on.
        values: [k] reals.
        signs: [K] from ``code.signs``.
        stream: Where words for rounding and noise come from: of a secret seed, for this round.
        weight: As `encode`.

    Returns:
        [K] whole numbers, of at most ``code.largest``.

    Raises:
        ValueError: As `encode`.
    """
    whole = encode(code, values, signs, stream, weight)
    if not code.variance:
        return whole
    return whole + discrete.discrete_gaussians(stream, code.padded, code.variance)


def contribution(
    code: SumCode,
    values: Float[np.ndarray, " k"],
    signs: Float[np.ndarray, " K"],
    stream: discrete.Stream,
    weight: float | None = None,
) -> UInt32[np.ndarray, " K"]:
    """Return the same modulo 2^b, as `dpjax.transforms.fixed.contributions` does in jit.

    Guarantee: that of `noisy`.

    Args:
        code: What all agree on.
        values: [k] reals.
        signs: [K] from ``code.signs``.
        stream: As `noisy`.
        weight: As `encode`.

    Returns:
        [K] whole numbers below 2^b.

    Raises:
        ValueError: As `encode`.
    """
    return (noisy(code, values, signs, stream, weight) & (2**code.bits - 1)).astype(np.uint32)


def decode(
    code: SumCode, total: Int64[np.ndarray, " K"] | UInt32[np.ndarray, " K"], signs: np.ndarray
) -> Float[np.ndarray, " k"]:
    """Return the sum of vectors that whole numbers stand for.

    Args:
        code: What all agree on.
        total: [K] sums, whole or modulo 2^b.
        signs: [K] from ``code.signs``.

    Returns:
        [k] float64; where the code is weighted [k + 1], the sum of w x and then that of w.

    Raises:
        ValueError: For another size, or what are no whole numbers.
    """
    array = np.asarray(total)
    if array.shape != (code.padded,) or array.dtype.kind not in "iu":
        raise ValueError(
            f"total is {array.dtype}{list(array.shape)}; give {code.padded} whole numbers"
        )
    half = 1 << (code.bits - 1)
    signed = ((array.astype(np.int64) + half) & (2 * half - 1)) - half
    reals = signed.astype(np.float64) * code.grid
    if code.rotated:
        reals = hadamard(reals) / math.sqrt(code.padded) * signs
    reals = reals[: code.size + code.weighted]
    if code.weighted:
        reals[-1] /= code.bound
    return reals


def rotation(
    code: SumCode, vector: Float[np.ndarray, " m"], signs: Float[np.ndarray, " K"]
) -> Float[np.ndarray, " K"]:
    """A vector's places on the grid, in float32: one product a coordinate, then sums alone."""
    places = np.zeros(code.padded, np.float32)
    places[: vector.size] = vector * code.factor
    if code.rotated:
        places = hadamard(places * signs)
    return np.clip(places, -np.float32(LARGEST), np.float32(LARGEST))


def hadamard(values: Float[np.ndarray, " K"]) -> Float[np.ndarray, " K"]:
    """Sums and differences in the order of Walsh and Hadamard: H values, H entries of +-1."""
    width = 1
    while width < values.size:
        pairs = values.reshape(-1, 2, width)
        values = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(-1)
        width *= 2
    return values


def _checked(code: SumCode, values: np.ndarray, weight: float | None) -> np.ndarray:
    """The vector as it is rounded, its weight behind it."""
    vector = _validate.finite_array("values", values, ndim=1)
    if vector.size != code.size:
        raise ValueError(f"values are {vector.size}; give {code.size}, the code's size")
    length = float(np.linalg.norm(vector))
    if length > code.bound * (1 + 1e-5):
        raise ValueError(
            f"values have a norm of {length:.9g}, beyond bound {code.bound}; clip them first"
        )
    if (weight is not None) != code.weighted:
        raise ValueError(
            f"weight is {weight}, and the code is {'' if code.weighted else 'not '}weighted; give "
            f"{'one from 0 to 1' if code.weighted else 'none'}"
        )
    single = vector.astype(np.float32)
    if weight is None:
        return single
    share = _validate.number("weight", weight)
    if not 0 <= share <= 1:
        raise ValueError(f"weight is {weight}; give a number from 0 to 1")
    return np.append(single, np.float32(code.bound)) * np.float32(share)
