"""Discrete Gaussian variables from threefry hashes inside jit, exact: whole numbers decide.

    P(y) ~ exp(-y^2 / (2 sigma^2)),    y = ..., -1, 0, 1, ...;    sigma^2 rational, 1/4 to 2^20

Number (i, j) is drawn from the hashes of the counters (0, j), (1, j), (2, j), ... under the key
folded with i, as many as it takes: it depends on (key, row, column) alone, not on how many rows or
columns there are, on what is vmapped, or on how arrays are sharded. A simulation that is resumed
draws the same numbers.

A while loop advances many numbers at once, by one hash each: a lane draws some columns of a row,
one after the other, so that none waits for the unluckiest number of all. In one step a lane

    starts     draws u and the sign, see `dpjax._lattice`
    repeats    decides one event of probability rest / divisor and one of 1 / k, each by a word of
               32 bits; where that word leaves it open, once in 2^32, the remainder goes on to the
               next one. The first k at which one of them fails is odd with probability
               exp(-rest / divisor): by such runs v is counted up, then the proposal is kept or not

in words of 32 bits alone, whose products have two words: the arithmetic is the same in JAX's
default precision as in double.
"""

from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, PRNGKeyArray, UInt32

from dpjax import _lattice, _numerics, _validate
from dpjax.mechanism.x64 import double_precision
from dpjax.transforms.noise import check_key

__all__ = ["discrete_gaussians"]

_PER_LANE = 32
"""Numbers that a lane draws: fewer wait longer for the unluckiest lane, more fill fewer lanes."""
_STEPS = 4
"""Steps of the loop between two looks at which numbers are done."""
_LONGEST = 2**11
"""Proposals of v = 2^11 are turned down: once in e^2048."""
_START, _COUNT, _KEEP, _DONE = (np.uint32(stage) for stage in range(4))

Words = UInt32[Array, "r l"]


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

    slot: Words
    tick: Words
    stage: Words
    uniform: Words
    runs: Words
    exponent: Words
    first: Words
    second: Words
    length: Words
    value: Int32[Array, "r l"]


def discrete_gaussians(
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
        ValueError: For anything but one threefry key, another shape or variance.

    Example:
        >>> import jax
        >>> from dpjax.transforms import discrete
        >>> discrete.discrete_gaussians(jax.random.key(0), (2, 3), 4).shape
        (2, 3)
    """
    check_key(key)
    if not isinstance(shape, list | tuple) or len(shape) != 2:
        raise ValueError(f"shape is {_validate.shown(shape)}; give (rows, columns)")
    rows, columns = (_validate.integer("shape", size, least=0, most=2**32 - 1) for size in shape)
    law = _lattice.proposal(variance)
    if not rows or not columns:
        return jnp.zeros((rows, columns), jnp.int32)
    return _drawn(key, rows, columns, law)


def _drawn(
    key: PRNGKeyArray, rows: int, columns: int, law: _lattice.Proposal
) -> Int32[Array, "r c"]:
    lanes = -(-columns // _PER_LANE)
    slots = -(-columns // lanes)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows, dtype=jnp.uint32))
    offset = jax.lax.broadcasted_iota(jnp.uint32, (rows, lanes), 1)

    def refilled(lane: _Lane, out: Array) -> tuple[_Lane, Array]:
        done = lane.stage == _DONE
        places = jax.lax.broadcasted_iota(jnp.uint32, (slots, rows, lanes), 0)
        out = jnp.where(done & (places == lane.slot), lane.value, out)
        slot = lane.slot + done.astype(jnp.uint32)
        over = slot * np.uint32(lanes) + offset >= np.uint32(columns)
        stage = jnp.where(over, _DONE, jnp.where(done, _START, lane.stage))
        # A lane that is over keeps its slot beyond the last, where nothing is written.
        slot = jnp.where(over, np.uint32(slots), slot)
        return lane._replace(slot=slot, stage=stage, tick=jnp.where(done, 0, lane.tick)), out

    def body(carry: tuple[_Lane, Array]) -> tuple[_Lane, Array]:
        def step(_: Any, lane: _Lane) -> _Lane:
            column = lane.slot * np.uint32(lanes) + offset
            return _stepped(lane, *_hashed(keys, lane.tick, column), law)

        lane, out = carry
        return refilled(jax.lax.fori_loop(0, _STEPS, step, lane), out)

    def unfinished(carry: tuple[_Lane, Array]) -> Array:
        return jnp.any(carry[0].slot < np.uint32(slots))

    zero = jnp.zeros((rows, lanes), jnp.uint32)
    first = _Lane(*(zero,) * 9, zero.astype(jnp.int32))
    out = jnp.zeros((slots, rows, lanes), jnp.int32)
    _, out = jax.lax.while_loop(unfinished, body, (first, out))
    return out.transpose(1, 0, 2).reshape(rows, slots * lanes)[:, :columns]


def _hashed(keys: PRNGKeyArray, ticks: Words, columns: Words) -> tuple[Words, Words]:
    """The two words of every lane's counter, through memory: compilers would hash for each use."""
    high, low = jax.vmap(_numerics.threefry)(keys, ticks, columns)
    with double_precision():
        both = high.astype(jnp.uint64) | (low.astype(jnp.uint64) << np.uint64(32))
        both = jax.lax.optimization_barrier(both)
        return both.astype(jnp.uint32), (both >> np.uint64(32)).astype(jnp.uint32)


def _stepped(lane: _Lane, high: Words, low: Words, law: _lattice.Proposal) -> _Lane:
    """Every lane after one hash more."""
    top = np.uint32(law.numerator)
    twice = np.uint32(2 * law.numerator)
    starts, counts, keeps = (lane.stage == stage for stage in (_START, _COUNT, _KEEP))
    product = _product(high, top)

    # u = floor(p w / 2^32), uniform where the rest is not below 2^32 mod p: Lemire (2019).
    drawn = starts & (product[1] >= np.uint32(2**32 % law.numerator))
    sign = jnp.where(low >> np.uint32(31) == 1, np.int32(-1), np.int32(1))

    doubled = (product[0] << 1) | (product[1] >> 31), product[1] << 1
    yes, no, left = _compared(doubled, lane.first, twice)
    yes_too, no_too, left_too = _compared(_product(low, lane.length), lane.second, lane.length)
    decided = (no | no_too) * np.uint32(1) + yes * np.uint32(2) + yes_too * np.uint32(4)
    decided = jax.lax.optimization_barrier(decided)
    fails, yes, yes_too = decided & 1 == 1, decided & 2 == 2, decided & 4 == 4
    passes = yes & yes_too
    odd = lane.length & 1 == 1

    # v + 1, or the end of counting.
    more = counts & fails & odd
    runs = jnp.where(drawn, np.uint32(0), lane.runs + more.astype(jnp.uint32))
    counted = counts & fails & ~odd
    size = ((lane.uniform + top * lane.runs) // np.uint32(law.step)).astype(jnp.int32)
    size = jax.lax.optimization_barrier(size)
    away = jnp.abs(size - np.int32(law.centre)).astype(jnp.uint32)
    beyond = (away > np.uint32(law.farthest)) | (more & (runs >= np.uint32(_LONGEST)))
    proposed = counted & ~beyond & ~((size == 0) & (lane.value < 0))
    away = jnp.where(proposed, away, np.uint32(0))
    exponent = jnp.where(
        proposed, 2 * lane.uniform + np.uint32(law.denominator) * away * away, lane.exponent
    )
    exponent = jnp.where(drawn | more, twice, exponent)

    # One unit of the exponent after the other, then what is left of it.
    kept = keeps & fails & odd
    whole = lane.exponent >= twice
    exponent = jnp.where(kept & whole, lane.exponent - twice, exponent)
    done = kept & ~whole
    lost = (keeps & fails & ~odd) | (counted & ~proposed) | (more & beyond)

    # A new run; at a rest of one its first event is certain, and left out.
    fresh = drawn | (fails & (counts | keeps))
    rest = jnp.minimum(exponent, twice)
    length = jnp.where(fresh, 1 + (rest == twice).astype(jnp.uint32), lane.length)
    longer = ~fresh & passes
    settled = jnp.where(passes | yes, rest, left), jnp.where(yes_too, lane.length, left_too)
    length = jnp.where(longer, length + 1, length)
    stage = jnp.where(drawn, _COUNT, lane.stage)
    stage = jnp.where(proposed, _KEEP, stage)
    stage = jnp.where(done, _DONE, jnp.where(lost, _START, stage))
    value = jnp.where(drawn, sign, jnp.where(proposed, lane.value * size, lane.value))
    return _Lane(
        slot=lane.slot,
        tick=lane.tick + 1,
        stage=stage,
        uniform=jnp.where(drawn, product[0], lane.uniform),
        runs=runs,
        exponent=exponent,
        first=jnp.where(fresh | longer, rest, jnp.where(yes, twice, left)),
        second=jnp.where(fresh | longer, np.uint32(1), settled[1]),
        length=length,
        value=value,
    )


def _compared(
    product: tuple[Words, Words], rest: Words, divisor: Any
) -> tuple[Array, Array, Words]:
    """Whether a real that begins with a word is below rest / divisor, is not, or by what remainder.

    Args:
        product: The word times the divisor.
        rest: Up to the divisor.
        divisor: Below 2^32.

    Returns:
        (below, not below, 2^32 rest - product where neither is true).
    """
    high, low = product
    no = high >= rest
    borrow = (low > 0).astype(jnp.uint32)
    left = np.uint32(0) - low
    yes = ~no & ((rest - high > borrow) | (left >= divisor))
    return yes, no, left


def _product(first: Words, second: Any) -> tuple[Words, Words]:
    """The two words of a product of words."""
    half, mask = np.uint32(16), np.uint32(2**16 - 1)
    second = jnp.asarray(second, jnp.uint32)
    a, b = first >> half, first & mask
    c, d = second >> half, second & mask
    cross, other, small = b * c, a * d, b * d
    middle = (small >> half) + (cross & mask) + (other & mask)
    high = a * c + (cross >> half) + (other >> half) + (middle >> half)
    return high, first * second
