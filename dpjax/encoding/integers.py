"""Vectors of reals as the whole numbers of a secure sum with their noise, on a client and a server.

`SumCode` says what all agree on; `dpjax.encoding.simulated` does the same inside jit, to the bit.
Only NumPy is needed, and the extra ``secure`` for a client's words.

Discrete Gaussian variables are exact, for whole numbers decide, never probabilities:

    P(y) ~ exp(-y^2 / (2 sigma^2)),    y = ..., -1, 0, 1, ...;    sigma^2 rational, 1/4 to 2^20

Every event of a rational probability is decided by comparing as many words of 32 bits as it takes,
one but for once in 2^32; those of probability e^-x by how many rational ones happen in a row (see
`dpjax.encoding.lattice`). What is drawn depends on the stream alone.

Assumption: ChaCha20 with a secret seed of 256 bits is pseudorandom. The time that a draw takes
depends on what is drawn; whoever can measure it within a client is no attacker here.

Reference:
    Canonne, Kamath and Steinke (2020), The discrete Gaussian for differential privacy.
"""

import math
from fractions import Fraction

import numpy as np
from jaxtyping import Bool, Float, Int64, UInt32, UInt64

from dpjax import _validate
from dpjax.encoding import lattice
from dpjax.encoding.lattice import SumCode
from dpjax.encoding.stream import Stream

__all__ = ["decode", "discrete_gaussians", "encode", "noisy"]

_Words = UInt64[np.ndarray, " n"]
_Events = Bool[np.ndarray, " n"]
_Integers = Int64[np.ndarray, " K"]
_Vector = Float[np.ndarray, " k"]
_Signs = Float[np.ndarray, " K"]

_WORD = 2**32


def discrete_gaussians(stream: Stream, count: int, variance: int | Fraction) -> _Integers:
    """Draw independent discrete Gaussian variables.

    Guarantee: exact, if the stream's words are uniform, but for proposals beyond 63.9 deviations,
    which are never drawn: less than 2^-2900 of all.

    Args:
        stream: Where words come from.
        count: How many.
        variance: sigma^2, a whole number or a Fraction of a numerator of at most 2^20, from 1/4 to
            2^20. (The variance of what is drawn is this up to 10^-2 at 1/4, 10^-16 from 2 on.)

    Returns:
        [count] whole numbers.

    Raises:
        ValueError: For another variance or count.

    Example:
        >>> from dpjax.encoding import integers
        >>> integers.discrete_gaussians(integers.Stream(bytes(32)), 6, 4).shape
        (6,)
    """
    count = _validate.integer("count", count, minimum=0)
    law = lattice.proposal(variance)
    drawn = np.zeros(0, np.int64)
    while drawn.size < count:
        # About every second proposal is kept; what is left over is not used.
        proposals = 32 + 9 * (count - drawn.size) // 4
        drawn = np.concatenate([drawn, _accepted(stream, proposals, law)])
    return drawn[:count]


def _accepted(stream: Stream, count: int, law: lattice.Proposal) -> _Integers:
    """The numbers that so many independent proposals leave."""
    uniform = stream.below(law.numerator, count)
    runs = _geometric(stream, count)
    sums = uniform + law.numerator * runs
    sizes = (sums // law.step).astype(np.int64)
    away = np.abs(sizes - law.centre)
    negative = stream.words(count) >> 31 == 1
    # Zero has one sign: -0 is not kept.
    negative_zero = negative & (sizes == 0)
    rows = np.flatnonzero((away <= law.farthest) & ~negative_zero)
    squares = np.square(away[rows]).astype(np.uint64)
    exponents = 2 * uniform[rows] + law.denominator * squares
    rows = rows[_decaying(stream, exponents, 2 * law.numerator)]
    return np.where(negative[rows], -sizes[rows], sizes[rows])


def _geometric(stream: Stream, count: int) -> _Words:
    """Numbers v of probability (1 - 1/e) e^-v."""
    runs = np.zeros(count, np.uint64)
    going = np.arange(count)
    while going.size:
        going = going[_odd(stream, np.ones(going.size, np.uint64), 1)]
        runs[going] += 1
    return runs


def _decaying(stream: Stream, exponents: _Words, divisor: int) -> _Events:
    """True with probability exp(-exponent / divisor)."""
    units, rests = np.divmod(exponents, divisor)
    happened = _odd(stream, rests, divisor)
    # One event of probability 1/e for every unit of the exponent.
    while (going := np.flatnonzero(happened & (units > 0))).size:
        happened[going] = _odd(stream, np.ones(going.size, np.uint64), 1)
        units[going] -= 1
    return happened


def _odd(stream: Stream, rests: _Words, divisor: int) -> _Events:
    """True with probability exp(-rest / divisor), for rests up to the divisor.

    The first k = 1, 2, ... at which an event of probability rest / (k divisor) does not happen is
    odd so often.
    """
    odd = np.ones(rests.size, bool)
    going = np.arange(rests.size)
    length = 1
    while going.size:
        # Of probability rest / divisor and 1 / k, each decided by itself.
        going = going[_rational(stream, rests[going], divisor)]
        if length > 1:
            going = going[_rational(stream, np.ones(going.size, np.uint64), length)]
        length += 1
        odd[going] = length % 2 == 1
    return odd


def _rational(stream: Stream, tops: _Words, divisor: int) -> _Events:
    """True with probability top / divisor, for tops up to the divisor, below 2^32.

    A real whose first digits are the word w is below top / divisor if w + 1 is not above
    2^32 top / divisor; it is not if w is not below; else the remainder is compared with the next.
    """
    below = tops == divisor
    open_ = np.flatnonzero((tops > 0) & (tops < divisor))
    remainders = tops[open_]
    while open_.size:
        products = stream.words(open_.size).astype(np.uint64) * divisor
        targets = remainders * _WORD
        rest = np.where(products < targets, targets - products, 0)
        below[open_[rest >= divisor]] = True
        # A word leaves an event open once in 2^32: the remainder goes on to the next.
        undecided = (rest > 0) & (rest < divisor)
        open_ = open_[undecided]
        remainders = rest[undecided]
    return below


def encode(code: SumCode, values: _Vector, signs: _Signs, stream: Stream) -> _Integers:
    """Return a vector's whole numbers, without noise.

    Guarantee: the sum of their squares is at most ``code.limit``. Of several records the rounding
    reads ``code.padded`` words, whatever the values are, and one record moves it as
    `dpjax.encoding.lattice` says.

    Args:
        code: What all agree on.
        values: [k] reals of a norm of at most ``code.bound``, or that times ``code.records``.
        signs: [K] from ``code.signs``.
        stream: Where words for the rounding come from.

    Returns:
        [K] whole numbers.

    Raises:
        ValueError: For a vector that is not finite, too long or of another size.

    Example:
        >>> import numpy as np
        >>> from dpjax.encoding import integers
        >>> code = integers.SumCode(size=4, bound=1.0, grid=0.25, clients=3)
        >>> x, signs = np.array([0.5, 0.0, -0.25, 0.5]), code.signs(b"round 1")
        >>> rounded = integers.encode(code, x, signs, integers.Stream(bytes(32)))
        >>> float(np.abs(integers.decode(code, rounded, signs) - x).max()) < 0.5
        True
    """
    vector = _validate.finite_array("values", values, ndim=1)
    if vector.size != code.size:
        raise ValueError(f"values are {vector.size}; give {code.size}, the code's size")
    length = float(np.linalg.norm(vector))
    bound = code.records * code.bound
    too_long = f"values have a norm of {length:.9g}, beyond bound {bound}; clip them first"
    if length > bound * (1 + 1e-5):
        raise ValueError(too_long)
    coordinates = rotation(code, vector.astype(np.float32), signs)
    lower = np.floor(coordinates)
    # Exact: a fraction's 24 leading bits, of which words hold as many.
    shares = (coordinates - lower) * 2**24
    for _ in range(lattice.TRIES):
        words = stream.words(code.padded) >> 8
        rounded = lower.astype(np.int64) + (words.astype(np.float32) < shares)
        # Whole numbers alone are tested: what floating point did before does not matter. A draw of
        # several records stays, whatever it is: another would depend on them.
        if code.records > 1 or int(rounded @ rounded) <= code.limit:
            return rounded
    rounded = np.trunc(coordinates).astype(np.int64)
    if int(rounded @ rounded) > code.limit:
        raise ValueError(too_long)
    return rounded


def noisy(
    code: SumCode,
    values: _Vector,
    signs: _Signs,
    stream: Stream,
    rounding: Stream | None = None,
) -> _Integers:
    """Return a vector's whole numbers and its client's noise: what goes into a secure sum.

    The sum of ``Terms(code.clients, code.padded, bits=32, bound=code.largest, ...)`` takes them.

    Guarantee: zero-out of one client, or record, moves the sum by at most ``code.sensitivity``, of
    several records but for a share ``code.beta`` of roundings; the noise in it is the discrete
    Gaussian of ``code.variance`` squared grid units, of every client that is in the sum.
    `dpjax.accounting.discrete` states the loss.

    Args:
        code: What all agree on.
        values: [k] reals.
        signs: [K] from ``code.signs``.
        stream: Where words for rounding and noise come from: of a secret seed, for this round.
        rounding: Where words for rounding come from, ``Stream(seed, purpose=1)`` say, which several
            records need; None is ``stream``.

    Returns:
        [K] whole numbers, of at most ``code.largest``.

    Raises:
        ValueError: As `encode`, and for several records without a stream for rounding.

    Example:
        >>> import numpy as np
        >>> from dpjax.encoding import integers
        >>> code = integers.SumCode(size=2, bound=1.0, grid=2**-10, clients=2, variance=4)
        >>> integers.noisy(code, [0.25, -0.5], np.ones(2), integers.Stream(bytes(32))).shape
        (2,)
    """
    if rounding is None and code.records > 1:
        raise ValueError("rounding is None; give several records Stream(seed, purpose=1)")
    integers = encode(code, values, signs, rounding or stream)
    if not code.variance:
        return integers
    return integers + discrete_gaussians(stream, code.padded, code.variance)


def decode(code: SumCode, total: _Integers | UInt32[np.ndarray, " K"], signs: _Signs) -> _Vector:
    """Return the sum of vectors that whole numbers stand for.

    Args:
        code: What all agree on.
        total: [K] sums, whole or modulo 2^b.
        signs: [K] from ``code.signs``.

    Returns:
        [k] float64.

    Raises:
        ValueError: For another size, or what are no whole numbers.

    Example:
        >>> import numpy as np
        >>> from dpjax.encoding import integers
        >>> code, signs = integers.SumCode(size=2, bound=1.0, grid=2**-10, clients=2), np.ones(2)
        >>> rounded = integers.encode(code, [0.25, -0.5], signs, integers.Stream(bytes(32)))
        >>> bool(abs(integers.decode(code, rounded, signs) - [0.25, -0.5]).max() < 0.01)
        True
    """
    array = np.asarray(total)
    if array.shape != (code.padded,) or array.dtype.kind not in "iu":
        raise ValueError(
            f"total is {array.dtype}{list(array.shape)}; give {code.padded} whole numbers"
        )
    # Residues modulo 2^b as the numbers around zero.
    half = 1 << (code.bits - 1)
    residues = (array.astype(np.int64) + half) & (2 * half - 1)
    reals = (residues - half).astype(np.float64) * code.grid
    # H is its own inverse over sqrt(K), and so are the signs.
    rotated = lattice.hadamard(reals) / math.sqrt(code.padded)
    return (rotated * signs)[: code.size]


def rotation(code: SumCode, vector: _Vector, signs: _Signs) -> Float[np.ndarray, " K"]:
    """A vector's grid coordinates in float32: one product for each, then sums alone."""
    padded = np.zeros(code.padded, np.float32)
    padded[: vector.size] = vector * code.factor
    return np.clip(lattice.hadamard(padded * signs), -lattice.LONGEST, lattice.LONGEST)
