"""Vectors of many simulated clients as the whole numbers of a secure sum, with their noise, in jit.

What `dpjax.encoding.integers` does for one client, to the bit, if the words are the same:
coordinates are multiplied once, then added and subtracted in a fixed order. Words are threefry's.

Discrete Gaussian variables are exact, for whole numbers decide:

    P(y) ~ exp(-y^2 / (2 sigma^2)),    y = ..., -1, 0, 1, ...;    sigma^2 rational, 1/4 to 2^20

Number (i, j) is drawn from the hashes of the counters (0, j), (1, j), (2, j), ... under the key
folded with i, as many as it takes: it depends on (key, row, column) alone, not on how many rows or
columns there are, on what is vmapped, or on how arrays are sharded. A simulation that is resumed
draws the same numbers.

A while loop advances many numbers at once, by one hash each: a lane draws some columns of a row,
one after the other, so that none waits for the unluckiest number of all. In one step a lane::

    starts     draws u and the sign, see `dpjax.encoding.lattice`
    repeats    decides one event of probability rest / divisor and one of 1 / k, each by a word of
               32 bits; where that word leaves it open, once in 2^32, the remainder goes on to the
               next one. The first k at which one of them fails is odd with probability
               exp(-rest / divisor): by such runs v is counted up, then the proposal is kept or not

in words of 32 bits alone, whose products have two words: the arithmetic is the same in JAX's
default precision as in double.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray, UInt32

from dpjax import _numerics
from dpjax._numerics import double_precision
from dpjax.encoding import lattice
from dpjax.encoding.lattice import SumCode

__all__ = ["decode_total", "discrete_gaussian_rows", "encode_rows", "noisy_rows"]

_SIGNS = 2**32 - 2
"""Folded into a round's public key: above every number of a cohort slot, agent or gossip step."""
_UPPER = 20
"""Bits that squares of up to 2^44 lose where 2^24 of them are added in 63."""
_PER_LANE = 32
"""Numbers that a lane draws: fewer wait longer for the unluckiest lane, more fill fewer lanes."""
_STEPS = 4
"""Steps of the loop between two looks at which numbers are done."""
_LONGEST = 2**11
"""Proposals of v = 2^11 are turned down: once in e^2048."""
_START = 0
_COUNT = 1
_KEEP = 2
_DONE = 3

_Words = UInt32[Array, "r l"]
_Pair = tuple[_Words, _Words]
"""Upper and lower words of products."""
_Signs = Float[Array, " K"]
_Vectors = Float[Array, "n k"]
_Integers = Int32[Array, "n K"]
_Sent = Bool[Array, " n"]
"""True where a row is its vector's."""


class _Lane(NamedTuple):
    """Where every lane stands.

    Attributes:
        slot: Which of its numbers it draws.
        tick: Hashes it has taken for this number.
        stage: Start, count v up, keep or not, done.
        uniform: u.
        runs: v.
        exponent: What is left of it, in units of 1 / (2 p).
        first: Remainder of what the first word decides.
        second: Remainder of what the second word decides.
        length: k.
        value: The sign while v is counted, then the number.
    """

    slot: _Words
    tick: _Words
    stage: _Words
    uniform: _Words
    runs: _Words
    exponent: _Words
    first: _Words
    second: _Words
    length: _Words
    value: Int32[Array, "r l"]


_LaneCarry = tuple[_Lane, Array]
"""Lanes and the numbers that are done, as a loop carries them."""


def public_signs(code: SumCode, key: PRNGKeyArray) -> _Signs:
    """Return the signs of a round's rotation, which everybody knows.

    Args:
        code: What all agree on, static.
        key: The round's public key.
    """
    return signs(code, jax.random.fold_in(key, _SIGNS))


def signs(code: SumCode, key: PRNGKeyArray) -> _Signs:
    """Return public signs, +-1 in float32, as ``code.signs`` does of bytes.

    Args:
        code: What all agree on, static.
        key: A public key of this round alone, which the vectors do not depend on.
    """
    count = -(-code.padded // 32)
    words = jax.random.bits(key, (count,), jnp.uint32)
    places = jnp.arange(32, dtype=jnp.uint32)
    bits = words[:, None] >> places[None, :] & 1
    bits = bits.reshape(-1)[: code.padded]
    return 1 - 2 * bits.astype(jnp.float32)


def noisy_rows(
    code: SumCode, values: _Vectors, signs: _Signs, key: PRNGKeyArray
) -> tuple[_Integers, _Sent]:
    """Return every client's whole numbers and noise, as they are.

    Guarantee: as `dpjax.encoding.integers.noisy`, for whoever does not know the key; a row whose
    vector is not sent is its noise.

    Args:
        code: What all agree on, static.
        values: [n, k] reals.
        signs: [K], public.
        key: A threefry key, of this round alone.

    Returns:
        ([n, K] int32, [n] True where a row is its vector's).

    Example:
        >>> import jax, numpy as np
        >>> from dpjax.encoding.lattice import SumCode
        >>> from dpjax.encoding import simulated
        >>> code, signs = SumCode(size=3, bound=1.0, grid=2**-10, clients=2, variance=4), np.ones(4)
        >>> rows, _ = simulated.noisy_rows(code, np.full((2, 3), 0.25), signs, jax.random.key(0))
        >>> bool(abs(simulated.decode_total(code, rows.sum(0), signs) - 0.5).max() < 0.05)
        True
    """
    integers, sent = encode_rows(code, values, signs, jax.random.fold_in(key, 0))
    if code.variance:
        noise_key = jax.random.fold_in(key, 1)
        shape = len(integers), code.padded
        integers = integers + discrete_gaussian_rows(noise_key, shape, code.variance)
    return integers, sent


def encode_rows(
    code: SumCode, values: _Vectors, signs: _Signs, key: PRNGKeyArray
) -> tuple[_Integers, _Sent]:
    """Return the whole numbers of every client's vector, without noise.

    Guarantee: the sum of squares of a row is at most ``code.limit``, whatever the values are: a
    row that is longer, or not finite, is all zero, and said to be. Of several records a row that is
    not finite is, which no clipped record makes; all others are rounded once, and a change of the
    values moves them as `dpjax.encoding.lattice` says.

    Args:
        code: What all agree on, static.
        values: [n, k] reals, rows of a norm of at most ``code.bound``.
        signs: [K] from ``code.signs``.
        key: A threefry key, of this rounding alone.

    Returns:
        ([n, K] int32, [n] True where a row is its vector's).

    Example:
        >>> import jax, numpy as np
        >>> from dpjax.encoding.lattice import SumCode
        >>> from dpjax.encoding import simulated
        >>> code = SumCode(size=3, bound=1.0, grid=2**-10, clients=2, variance=4)
        >>> x, signs = np.full((2, 3), 0.25), np.ones(4)
        >>> rows, sent = simulated.encode_rows(code, x, signs, jax.random.key(0))
        >>> rows.shape, rows.dtype.name, sent.tolist()
        ((2, 4), 'int32', [True, True])
    """
    # Through memory: a product and a sum fused would be rounded once, and not as NumPy's.
    scaled = lax.optimization_barrier(values.astype(jnp.float32) * code.factor)
    extra = code.padded - code.size
    coordinates = jnp.pad(scaled, ((0, 0), (0, extra)))
    signed = coordinates * jnp.asarray(signs, jnp.float32)[None, :]
    coordinates = lattice.hadamard(signed, jnp.stack)
    coordinates = jnp.clip(coordinates, -lattice.LONGEST, lattice.LONGEST)
    finite = jnp.all(jnp.isfinite(coordinates), axis=1)
    coordinates = jnp.where(finite[:, None], coordinates, 0)
    floors = jnp.floor(coordinates)
    # Exact: a fraction's 24 leading bits, of which words hold as many.
    shares = (coordinates - floors) * 2**24
    lower = floors.astype(jnp.int32)
    rows, columns = lower.shape
    keys = _numerics.row_keys(key, rows)
    column = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.uint32), (rows, columns))

    def unfinished(carry: _Rounding) -> Array:
        return (carry.tries < lattice.TRIES) & ~jnp.all(carry.short)

    def draw(carry: _Rounding) -> _Rounding:
        tries = jnp.full_like(column, carry.tries)
        words, _ = jax.vmap(_numerics.threefry)(keys, tries, column)
        up = (words >> 8).astype(jnp.float32) < shares
        drawn = lower + up.astype(jnp.int32)
        # The first draw that is short enough stays.
        rounded = jnp.where(carry.short[:, None], carry.rounded, drawn)
        return _Rounding(carry.tries + 1, rounded, carry.short | _short(code, drawn))

    start = _Rounding(jnp.uint32(0), jnp.zeros_like(lower), jnp.zeros(rows, bool))
    _, rounded, short = lax.while_loop(unfinished, draw, start)

    def settled(rounded: Array, towards_zero: Array, finite: Array) -> tuple[Array, Array]:
        rounded = jnp.where(short[:, None], rounded, towards_zero)
        sent = finite & _short(code, rounded)
        return jnp.where(sent[:, None], rounded, 0), sent

    # The row that is sent must be the very one whose length was looked at.
    towards_zero = jnp.trunc(coordinates).astype(jnp.int32)
    return _numerics.from_memory(settled, rounded, towards_zero, finite)


class _Rounding(NamedTuple):
    """Roundings so far.

    Attributes:
        tries: How many were drawn.
        rounded: [n, K] the first that is short enough, or the last.
        short: [n] which rows are.
    """

    tries: UInt32[Array, ""]
    rounded: _Integers
    short: _Sent


def decode_total(code: SumCode, total: UInt32[Array, " K"], signs: _Signs) -> Float[Array, " k"]:
    """Return the sum of vectors that whole numbers stand for, in float32.

    Args:
        code: What all agree on, static.
        total: [K] sums, in 32 bits or modulo 2^b.
        signs: [K] from ``code.signs``.

    Returns:
        [k] reals.

    Example:
        >>> import jax, numpy as np
        >>> from dpjax.encoding.lattice import SumCode
        >>> from dpjax.encoding import simulated
        >>> code, signs = SumCode(size=3, bound=1.0, grid=2**-10, clients=2, variance=4), np.ones(4)
        >>> rows, _ = simulated.encode_rows(code, np.full((2, 3), 0.25), signs, jax.random.key(0))
        >>> bool(abs(simulated.decode_total(code, rows.sum(0), signs) - 0.5).max() < 0.01)
        True
    """
    spare = 32 - code.bits
    signed = lax.bitcast_convert_type(total.astype(jnp.uint32) << spare, jnp.int32)
    signed = signed >> spare
    # Sums of whole numbers first, which are exact up to 2^24, and one product: through memory, so
    # that it is not rounded together with what follows.
    unit = code.grid / math.sqrt(code.padded)
    reals = lattice.hadamard(signed.astype(jnp.float32), jnp.stack) * signs
    return lax.optimization_barrier(reals * unit)[: code.size]


def discrete_gaussian_rows(
    key: PRNGKeyArray, shape: tuple[int, int], variance: int | Fraction
) -> Int32[Array, "r c"]:
    """Draw independent discrete Gaussian variables.

    Assumption: threefry with 20 rounds and a 64-bit key is pseudorandom. Every counter is used
    once for a key, so equal keys give equal numbers and different ones independent numbers.

    Guarantee: exact under that assumption, but for proposals beyond 63.9 deviations and
    v >= 2^11, which are never drawn: less than 2^-2900 of all. It is a simulation's: who knows
    the key knows the noise.

    Args:
        key: A threefry key, of this draw alone.
        shape: (rows, columns), each below 2^32.
        variance: sigma^2, a whole number or a Fraction of a numerator of at most 2^20, from 1/4 to
            2^20; static.

    Returns:
        [rows, columns] int32.

    Raises:
        ValueError: For anything but one threefry key, or another variance.

    Example:
        >>> import jax
        >>> from dpjax.encoding import simulated
        >>> simulated.discrete_gaussian_rows(jax.random.key(0), (2, 4), 4).shape
        (2, 4)
    """
    _numerics.check_key(key)
    law = lattice.proposal(variance)
    rows, columns = shape
    if not rows or not columns:
        return jnp.zeros(shape, jnp.int32)
    lanes = -(-columns // _PER_LANE)
    slots = -(-columns // lanes)
    size = (slots, rows, lanes)
    keys = _numerics.row_keys(key, rows)
    offset = lax.broadcasted_iota(jnp.uint32, size[1:], 1)

    def column(slot: _Words) -> _Words:
        return slot * lanes + offset

    def refilled(lane: _Lane, numbers: Array) -> _LaneCarry:
        done = lane.stage == _DONE
        index = lax.broadcasted_iota(jnp.uint32, size, 0)
        target = done[None] & (index == lane.slot[None])
        numbers = jnp.where(target, lane.value[None], numbers)
        slot = lane.slot + done.astype(jnp.uint32)
        over = column(slot) >= np.uint32(columns)
        stage = jnp.where(done, _START, lane.stage)
        stage = jnp.where(over, _DONE, stage)
        # A lane that is over keeps its slot beyond the last, where nothing is written.
        slot = jnp.where(over, slots, slot)
        tick = jnp.where(done, 0, lane.tick)
        return lane._replace(slot=slot, stage=stage, tick=tick), numbers

    def body(carry: _LaneCarry) -> _LaneCarry:
        def step(_: Array, lane: _Lane) -> _Lane:
            words = jax.vmap(_numerics.threefry)(keys, lane.tick, column(lane.slot))
            return _stepped(lane, *_numerics.through_memory(*words), law)

        lane, numbers = carry
        return refilled(lax.fori_loop(0, _STEPS, step, lane), numbers)

    def unfinished(carry: _LaneCarry) -> Array:
        lane, _ = carry
        return jnp.any(lane.slot < slots)

    zero = jnp.zeros(size[1:], jnp.uint32)
    first = _Lane(*(zero,) * 9, zero.astype(jnp.int32))
    numbers = jnp.zeros(size, jnp.int32)
    _, numbers = lax.while_loop(unfinished, body, (first, numbers))
    return numbers.transpose(1, 0, 2).reshape(rows, slots * lanes)[:, :columns]


def _stepped(lane: _Lane, high: _Words, low: _Words, law: lattice.Proposal) -> _Lane:
    """Every lane after one hash more."""
    top = law.numerator
    twice = 2 * top
    starts = lane.stage == _START
    counts = lane.stage == _COUNT
    keeps = lane.stage == _KEEP

    # u = floor(p w / 2^32), uniform where the rest is not below 2^32 mod p: Lemire (2019).
    uniform, excess = _product(high, top)
    drawn = starts & (excess >= 2**32 % top)
    sign = 1 - 2 * (low >> 31).astype(jnp.int32)

    doubled = (uniform << 1) | (excess >> 31), excess << 1
    fails, first_passes, second_passes, first_rest, second_rest = _events(lane, doubled, low, twice)
    odd = lane.length & 1 == 1

    # v + 1, or the end of counting.
    counts_on = counts & fails & odd
    runs = jnp.where(drawn, 0, lane.runs + counts_on.astype(jnp.uint32))
    counted = counts & fails & ~odd
    total = lane.uniform + top * lane.runs
    size = (total // law.step).astype(jnp.int32)
    # Once: its uses would divide again.
    size = lax.optimization_barrier(size)
    away = jnp.abs(size - law.centre).astype(jnp.uint32)
    too_long = counts_on & (runs >= _LONGEST)
    beyond = (away > law.farthest) | too_long
    # Zero has one sign: -0 is not kept.
    negative_zero = (size == 0) & (lane.value < 0)
    proposed = counted & ~beyond & ~negative_zero
    away = jnp.where(proposed, away, 0)
    proposal = 2 * lane.uniform + law.denominator * away * away
    exponent = jnp.where(proposed, proposal, lane.exponent)
    exponent = jnp.where(drawn | counts_on, twice, exponent)

    # One unit of the exponent after the other, then what is left of it.
    accepts = keeps & fails & odd
    is_unit = lane.exponent >= twice
    exponent = jnp.where(accepts & is_unit, lane.exponent - twice, exponent)
    done = accepts & ~is_unit
    rejected = keeps & fails & ~odd
    lost = rejected | (counted & ~proposed) | (counts_on & beyond)

    # A new run; at a rest of one its first event is certain, and left out.
    fresh = drawn | (fails & (counts | keeps))
    rest = jnp.minimum(exponent, twice)
    start = 1 + (rest == twice).astype(jnp.uint32)
    length = jnp.where(fresh, start, lane.length)
    longer = ~fresh & first_passes & second_passes
    length = jnp.where(longer, length + 1, length)
    again = fresh | longer
    # An event that a word leaves open goes on with its remainder.
    first = jnp.where(first_passes, twice, first_rest)
    second = jnp.where(second_passes, lane.length, second_rest)
    first = jnp.where(again, rest, first)
    second = jnp.where(again, 1, second)

    stage = jnp.where(drawn, _COUNT, lane.stage)
    stage = jnp.where(proposed, _KEEP, stage)
    stage = jnp.where(lost, _START, stage)
    stage = jnp.where(done, _DONE, stage)
    value = jnp.where(proposed, lane.value * size, lane.value)
    value = jnp.where(drawn, sign, value)
    uniform = jnp.where(drawn, uniform, lane.uniform)
    return _Lane(
        slot=lane.slot,
        tick=lane.tick + 1,
        stage=stage,
        uniform=uniform,
        runs=runs,
        exponent=exponent,
        first=first,
        second=second,
        length=length,
        value=value,
    )


def _events(lane: _Lane, doubled: _Pair, low: _Words, twice: int) -> tuple[Array, ...]:
    """Decide two events, each by a word: of probability rest / divisor, and of 1 / k.

    Returns:
        Where one of them fails, where each passes, and the rests where their words leave them open.
    """
    first_passes, first_misses, first_rest = _compared(doubled, lane.first, twice)
    product = _product(low, lane.length)
    second_passes, second_misses, second_rest = _compared(product, lane.second, lane.length)
    # As numbers of one kind: a flag's place is its bit.
    flags = (first_misses | second_misses).astype(jnp.uint32)
    flags = flags + first_passes.astype(jnp.uint32) * 2
    flags = flags + second_passes.astype(jnp.uint32) * 4
    flags = lax.optimization_barrier(flags)
    return flags & 1 == 1, flags & 2 == 2, flags & 4 == 4, first_rest, second_rest


def _compared(product: _Pair, rest: _Words, divisor: _Words | int) -> tuple[Array, Array, _Words]:
    """Whether a real that begins with a word is below rest / divisor, is not, or by what remainder.

    Args:
        product: The word times the divisor.
        rest: Up to the divisor.
        divisor: Below 2^32.

    Returns:
        (below, not below, 2^32 rest - product where neither is true).
    """
    high, low = product
    not_below = high >= rest
    borrow = (low > 0).astype(jnp.uint32)
    remainder = 0 - low
    below = ~not_below & ((rest - high > borrow) | (remainder >= divisor))
    return below, not_below, remainder


def _product(first: _Words, second: _Words | int) -> _Pair:
    """The two words of a product of words, by halves of 16 bits."""
    half = 16
    mask = 2**16 - 1
    second = jnp.asarray(second, jnp.uint32)
    a = first >> half
    b = first & mask
    c = second >> half
    d = second & mask
    inner = b * c
    outer = a * d
    # The middle words' lower halves carry into the upper word.
    lowest = b * d >> half
    middle = lowest + (inner & mask) + (outer & mask)
    uppers = (inner >> half) + (outer >> half)
    high = a * c + uppers + (middle >> half)
    return high, first * second


def _short(code: SumCode, integers: _Integers) -> _Sent:
    """Whether the squares of a row add up to at most the limit; of several records not asked."""
    # Their rounding stays: one that is chosen by what it makes of the data is no longer blind.
    if code.records > 1:
        return jnp.ones(len(integers), bool)
    with double_precision():
        squares = jnp.square(integers.astype(jnp.int64))
        # Their sum may be beyond 64 bits; that of their upper parts is not, and bounds it.
        limit = code.limit
        upper = jnp.sum(squares >> _UPPER, axis=1) <= limit >> _UPPER
        return upper & (jnp.sum(squares, axis=1) <= limit)
