"""Whole numbers of a secure sum: their norm, their mean, their bits, on a client and in jit."""

import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("cryptography")

from dpjax import _numerics  # noqa: E402
from dpjax.encoding import integers, lattice, simulated  # noqa: E402
from dpjax.encoding.lattice import SumCode  # noqa: E402
from tests.encoding.lattice import Script  # noqa: E402

encode = jax.jit(simulated.encode_rows, static_argnums=0)
noisy = jax.jit(simulated.noisy_rows, static_argnums=0)
CODE = SumCode(size=100, bound=1.0, grid=0.05, clients=50, variance=4)


def vectors(count=50, size=100, bound=1.0, seed=0):
    rng = np.random.default_rng(seed)
    drawn = rng.normal(size=(count, size)) * rng.exponential(size=(count, size))
    return bound * drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def key(seed=0):
    return jax.random.key(seed, impl="threefry2x32")


def test_limit_is_papers_and_below_simple_one() -> None:
    c = 1.0
    gamma = 0.02
    k = 4096
    beta = math.exp(-0.5)
    printed = c**2 + gamma**2 * k / 4
    printed += math.sqrt(2 * math.log(1 / beta)) * gamma * (c + gamma * math.sqrt(k) / 2)
    result = gamma * math.sqrt(lattice.limit(c / gamma, k, beta))
    assert 0 <= math.sqrt(printed) - result < gamma
    assert lattice.limit(c / gamma, k, 0.0) == int((c / gamma + math.sqrt(k)) ** 2)
    code = SumCode(size=k, bound=c, grid=gamma, clients=10)
    assert code.sensitivity == pytest.approx(result, rel=1e-12)
    # Never above: a huge grid leaves the simple one.
    assert lattice.limit(0.01, 4, 1e-9) == lattice.limit(0.01, 4, 0.0)


def test_share_of_repeated_roundings_is_below_beta() -> None:
    # Two coordinates, all four roundings with their probabilities, over places and betas.
    for beta in (0.6065, 0.2, 0.75):
        for place in itertools.product((0.1, 0.5, 2.5, 3.9), repeat=2):
            square = lattice.limit(math.hypot(*place), 2, beta)
            share = 0.0
            for up in itertools.product((0, 1), repeat=2):
                complete = [math.floor(p) + u for p, u in zip(place, up, strict=True)]
                odds = [(p % 1) if u else 1 - p % 1 for p, u in zip(place, up, strict=True)]
                share += math.prod(odds) * (sum(w**2 for w in complete) > square)
            assert share <= beta


@pytest.mark.parametrize(
    ("grid", "beta"),
    [
        (0.05, 0.0),
        (2.0, math.exp(-0.5)),
        (0.05, 0.75),
        pytest.param(2.0, 0.0, marks=pytest.mark.slow),
        pytest.param(0.05, math.exp(-0.5), marks=pytest.mark.slow),
        pytest.param(2.0, 0.75, marks=pytest.mark.slow),
    ],
)
def test_no_vector_is_longer_than_its_sensitivity(grid, beta) -> None:
    code = SumCode(size=100, bound=1.0, grid=grid, clients=50, beta=beta)
    x = vectors(20)
    signs = code.signs(b"a")
    stream = integers.Stream(bytes(32))
    complete = np.array([integers.encode(code, item, signs, stream) for item in x])
    traced, fine = encode(code, jnp.asarray(x, jnp.float32), signs, key())
    for drawn in (complete, np.asarray(traced, np.int64)):
        lengths = np.linalg.norm(grid * drawn, axis=1)
        assert lengths.max() <= code.sensitivity
    assert np.asarray(fine).all()


def test_roundings_that_are_too_long_are_drawn_anew() -> None:
    code = SumCode(size=64, bound=1.0, grid=1.0, clients=2)
    signs = code.signs(b"a")
    # Rotated, every place is 1/8.
    x = lattice.hadamard(np.full(64, 0.125) / 8) * signs
    # Words of zero round all up. The broken twin sends that: longer than it says.
    assert 64 > code.limit
    later = np.random.default_rng(0).integers(0, 2**32, 64).tolist()
    complete = integers.encode(code, x, signs, Script([0] * 128 + later))
    assert complete.tolist() == [int((word >> 8) < 2**21) for word in later]
    assert 0 < int(complete @ complete) <= code.limit
    # Words that never let it pass: all towards zero.
    assert not integers.encode(code, x, signs, Script([0] * (64 * lattice.TRIES))).any()
    # Where every rounding is taken, the limit is that of all up.
    always = SumCode(size=64, bound=1.0, grid=1.0, clients=2, beta=0.0)
    assert integers.encode(always, x, signs, Script([0] * 64)).sum() == 64 <= always.limit


@pytest.mark.x64
@pytest.mark.parametrize("size", [1, pytest.param(5, marks=pytest.mark.slow), 64])
def test_jit_and_numpy_agree_to_bit(size) -> None:
    code = SumCode(size, 3.7, 0.013, 9)
    x = vectors(9, size, 3.7).astype(np.float32)
    signs = code.signs(b"seed")
    traced, fine = encode(code, jnp.asarray(x), signs, key(5))
    assert traced.dtype == jnp.int32 and fine.all()
    column = jnp.arange(code.padded, dtype=jnp.uint32)
    for row in range(9):
        folded = jax.random.fold_in(key(5), row)
        words = [
            np.asarray(_numerics.threefry(folded, jnp.full_like(column, t), column)[0]).tolist()
            for t in range(3)
        ]
        mine = integers.encode(code, x[row], signs, Script(sum(words, [])))
        np.testing.assert_array_equal(mine, np.asarray(traced[row]))


def test_mean_is_vector_s() -> None:
    x = vectors(1)[0]
    signs = CODE.signs(b"a")
    rows = jnp.tile(jnp.asarray(x, jnp.float32), (8000, 1))
    complete, _ = encode(CODE, rows, signs, key())
    mean = np.asarray(complete, np.float64).mean(0) * CODE.grid
    mean = (lattice.hadamard(mean) / math.sqrt(CODE.padded) * signs)[:100]
    # Standard errors of half a grid unit at most, and a bias that conditioning leaves.
    assert np.abs(mean - x).max() < 4.5 * CODE.grid / 2 / math.sqrt(8000)
    # Rounding to nearest would be further off: the twin.
    nearest = CODE.grid * np.rint(integers.rotation(CODE, x.astype(np.float32), signs))
    nearest = lattice.hadamard(nearest) / math.sqrt(CODE.padded) * signs
    assert np.abs(nearest[:100] - x).max() > 4.5 * CODE.grid / 2 / math.sqrt(8000)


def test_sums_of_noisy_vectors_are_those_of_vectors() -> None:
    code = SumCode(100, 1.0, 0.01, 50, variance=Fraction(9, 2))
    x = vectors()
    signs = code.signs(b"a")
    stream = integers.Stream(bytes(32))
    mine = np.array([integers.noisy(code, item, signs, stream) for item in x])
    traced, fine = noisy(code, jnp.asarray(x, jnp.float32), signs, key())
    assert fine.all() and traced.dtype == jnp.int32
    low = 2**code.bits - 1
    total = (mine.sum(0) & low).astype(np.uint32)
    theirs = jnp.sum(traced, axis=0, dtype=jnp.int32).astype(jnp.uint32) & np.uint32(low)
    # Noise of 50 clients, and roundings of each: at most 1/4 a coordinate.
    spread = code.grid * math.sqrt(50 * (4.5 + 0.25))
    for complete in (total, np.asarray(theirs)):
        error = integers.decode(code, complete, signs) - x.sum(0)
        assert 0.7 * spread < error.std() < 1.3 * spread and np.abs(error).max() < 5 * spread
    result = integers.decode(code, np.asarray(theirs), signs)
    decode = jax.jit(simulated.decode_total, static_argnums=0)
    np.testing.assert_allclose(decode(code, theirs, signs), result, atol=1e-5)


def test_sums_do_not_wrap_and_with_fewer_bits_they_would() -> None:
    # All clients alike: the worst case.
    code = SumCode(64, 1.0, 0.02, 200, variance=16)
    x = np.zeros((200, 64), np.float32)
    x[:, 3] = 1.0
    signs = code.signs(b"a")
    traced, _ = noisy(code, jnp.asarray(x), signs, key())
    low = np.uint32(2**code.bits - 1)
    total = np.asarray(jnp.sum(traced, axis=0, dtype=jnp.int32)).astype(np.uint32) & low
    result = integers.decode(code, total, signs)
    assert abs(result[3] - 200) < 10 and np.abs(np.delete(result, 3)).max() < 10
    half = 1 << (code.bits - 1)
    complete = ((total.astype(np.int64) + half) & (2 * half - 1)) - half
    assert (np.abs(complete) >= 1 << (code.bits - 5)).any()


def test_dropout_takes_its_noise_along() -> None:
    pytest.importorskip("msgpack")
    from dpjax.secagg.terms import Terms
    from tests.secagg.rounds import Round

    code = SumCode(30, 1.0, 0.01, 5, variance=25)
    terms = Terms(5, code.padded, bits=32, bound=code.largest, corrupt=0.0, dropout=0.2)
    x = vectors(5, 30)
    signs = code.signs(b"a")
    stream = integers.Stream(bytes(32))
    values = np.array([integers.noisy(code, item, signs, stream) for item in x])
    assert np.abs(values).max() <= code.largest
    ctx = Round(terms, values, leaves={2: "mask"})
    result = integers.decode(code, ctx.run().values, signs)
    error = result - x[[0, 1, 3, 4]].sum(0)
    spread = code.grid * math.sqrt(4 * 25.25)
    assert 0.6 * spread < error.std() < 1.4 * spread


def test_no_entry_is_beyond_largest() -> None:
    code = SumCode(4, 1.0, 0.05, 3, variance=Fraction(9, 4))
    law = lattice.proposal(code.variance)
    # The farthest proposal that is kept, and the longest vector.
    assert code.largest == math.isqrt(code.limit) + law.centre + law.farthest
    assert law.farthest >= 63.9 * 1.5
    assert SumCode(4, 1.0, 0.05, 3).largest == math.isqrt(code.limit)


def test_bits_are_those_of_signals_and_of_noise() -> None:
    options = dict(clients=1000, norm=20.0, square=500, size=4096, failure=2.0**-40)
    bits = lattice.wrap_bits(variance=4, **options)
    z = math.sqrt(2 * math.log(4 * 4096 * 2.0**40))
    reach = 1000 * 20 / 64 * z + 1000 + math.sqrt(4000) * z
    assert 2 ** (bits - 1) > reach >= 2 ** (bits - 2)
    # The broken twin: a modulus for the signals alone wraps on noise.
    quiet = dict(options, clients=4, norm=1.0, square=2)
    single = lattice.wrap_bits(variance=0, **quiet)
    noise = integers.discrete_gaussians(integers.Stream(bytes(32)), 4096, 400)
    assert np.abs(noise).max() >= 2 ** (single - 1)
    assert np.abs(noise).max() < 2 ** (lattice.wrap_bits(variance=400, **quiet) - 1)
    # More of anything never takes fewer.
    for change in ({"clients": 2000}, {"norm": 40.0, "square": 2000}, {"failure": 2.0**-60}):
        assert lattice.wrap_bits(variance=4, **(options | change)) >= bits


def test_signs_are_public_coins() -> None:
    signs = SumCode(2**14, 1.0, 0.1, 2).signs(b"a")
    assert signs.dtype == np.float32 and set(signs) == {-1.0, 1.0} and abs(signs.mean()) < 0.04
    assert abs((signs * SumCode(2**14, 1.0, 0.1, 2).signs(b"b")).mean()) < 0.04


def test_rotation_spreads_what_one_coordinate_holds() -> None:
    code = SumCode(1000, 1.0, 0.001, 2)
    x = np.zeros(1000, np.float32)
    x[7] = 1.0
    places = integers.rotation(code, x, code.signs(b"a"))
    np.testing.assert_allclose(np.abs(places), 1000 / 32, rtol=1e-6)
    back = lattice.hadamard(places.astype(np.float64)) / 32 * code.signs(b"a") * 0.001
    np.testing.assert_allclose(back[:1000], x, atol=1e-6)


def test_rows_that_are_too_long_or_not_finite_are_not_sent() -> None:
    x = np.array(vectors(6), np.float32)
    x[1] *= 3
    x[2, 5] = np.nan
    x[3, 5] = np.inf
    x[4] = 1e38
    complete, fine = encode(CODE, jnp.asarray(x), CODE.signs(b"a"), key())
    assert np.asarray(fine).tolist() == [True, False, False, False, False, True]
    assert not np.asarray(complete)[1:5].any() and np.asarray(complete)[[0, 5]].any()


@pytest.mark.x64
def test_squares_beyond_64_bits_are_no_short_vector() -> None:
    """Norms are tested whatever the payload was: sums of squares must not come round to small."""
    size = 2**19
    code = SumCode(size, 1.0, 1 / 64, 1)
    rows = np.zeros((4, size), np.int32)
    rows[0] = lattice.LONGEST  # 2^63, the least number of int64
    rows[1, :-1] = lattice.LONGEST
    rows[2, : code.limit % 1024] = 1
    rows[3, : math.isqrt(code.limit)] = 1
    rows[3, 0] = math.isqrt(code.limit)
    exact = [sum(int(entry) ** 2 for entry in row) <= code.limit for row in rows]
    assert exact == [False, False, True, False]
    assert np.asarray(simulated._short(code, jnp.asarray(rows))).tolist() == exact
    # The broken twin, one sum of 64 bits, calls the longest vector that there is a short one.
    assert int(np.sum(rows[0].astype(np.int64) ** 2)) <= code.limit
    # To the unit, on both sides of the limit.
    places = np.zeros((2, size), np.int32)
    places[:, : code.limit] = 1
    places[1, code.limit] = 1
    assert np.asarray(simulated._short(code, jnp.asarray(places))).tolist() == [True, False]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SumCode(0, 1.0, 0.1, 2), "size is 0"),
        (lambda: SumCode(4, -1.0, 0.1, 2), "bound is -1"),
        (lambda: SumCode(4, 1.0, 0.0, 2), "grid is 0"),
        (lambda: SumCode(4, 1.0, 0.1, 0), "clients is 0"),
        (lambda: SumCode(4, 1.0, 0.1, 2, variance=1.5), "variance is 1.5"),
        (lambda: SumCode(4, 1.0, 0.1, 2, beta=1.0), "beta is 1.0"),
        (lambda: SumCode(4, 1.0, 1e-7, 2), "take a coarser grid"),
        (lambda: SumCode(4, 1.0, 1e-6, 10**5), "takes 3[3-9] bits"),
        (lambda: CODE.signs("a"), "give bytes"),
        (lambda: integers.decode(CODE, np.zeros(3, int), CODE.signs(b"a")), "give 128 whole"),
        (lambda: integers.decode(CODE, np.zeros(128), CODE.signs(b"a")), "give 128 whole"),
    ],
)
def test_what_has_no_whole_numbers_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("change", ["long", "nan", "size"])
def test_vectors_that_have_none_are_refused(change) -> None:
    x = vectors(1)[0]
    x = {"long": 1.01 * x, "nan": np.where(np.arange(100) == 3, np.nan, x), "size": x[:9]}[change]
    with pytest.raises(ValueError, match="values"):
        integers.encode(CODE, x, CODE.signs(b"a"), integers.Stream(bytes(32)))
