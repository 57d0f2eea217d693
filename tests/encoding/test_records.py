"""Sums of clipped records as whole numbers: how far one record moves them, and their size."""

import dataclasses
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("cryptography")

from dpjax import _numerics  # noqa: E402
from dpjax.accounting import discrete, losses  # noqa: E402
from dpjax.encoding import integers, lattice, simulated  # noqa: E402
from dpjax.encoding.lattice import SumCode  # noqa: E402
from dpjax.encoding.stream import Stream  # noqa: E402
from tests.encoding.lattice import Script, law, same  # noqa: E402

encode = jax.jit(simulated.encode_rows, static_argnums=0)
noisy = jax.jit(simulated.noisy_rows, static_argnums=0)
PLACES = [(0.1, 0.3), (0.5, 0.5), (2.1, 2.1), (1.4, 2.3), (0.0, 2.9), (3.0, 0.2), (-2.2, 1.7)]
REACH = 60


def key(seed=0):
    return jax.random.key(seed, impl="threefry2x32")


def distances(place, other):
    """Squared distances of two neighbours' whole numbers, with the probability of the coins."""
    options = []
    for y, z in zip(place, other, strict=True):
        # One uniform number decides both: between two fractions lie the coins that part them.
        cuts = sorted({0.0, y % 1, z % 1, 1.0})
        rounded = []
        for low, high in itertools.pairwise(cuts):
            middle = (low + high) / 2
            rounded.append((high - low, math.ceil(y - middle) - math.ceil(z - middle)))
        options.append(rounded)
    shares: dict[tuple[int, ...], float] = {}
    for parts in itertools.product(*options):
        moves = tuple(abs(move) for _, move in parts)
        shares[moves] = shares.get(moves, 0.0) + math.prod(share for share, _ in parts)
    return shares


def pairs(norm):
    """Neighbours so far apart, at places of many norms: those of sums of several records."""
    for place, angle in itertools.product(PLACES, np.linspace(0, np.pi, 9)):
        end = np.add(place, [norm * math.cos(angle), norm * math.sin(angle)])
        yield place, tuple(end.tolist())


def joint_delta(place, other, variance, epsilon):
    """The delta of coins and noisy numbers together: whoever knows the coins sees no less."""
    single = law(variance, -REACH, REACH)
    total = 0.0
    for moves, share in distances(place, other).items():
        first, second = (single[move:] for move in moves)
        base = np.outer(single[: len(first)], single[: len(second)])
        total += share * np.maximum(np.outer(first, second) - math.exp(epsilon) * base, 0).sum()
    return total


def unknown_delta(place, other, variance, epsilon):
    """The delta of what the mechanism releases: the noisy numbers alone."""

    def released(y):
        laws = []
        for entry in y:
            low = math.floor(entry)
            share = entry - low
            wide = law(variance, -REACH, REACH)
            laws.append((1 - share) * np.roll(wide, low) + share * np.roll(wide, low + 1))
        return np.outer(*laws)

    here = released(place)
    present = released(other)
    pairs_of_laws = ((here, present), (present, here))
    return max(float(np.maximum(a - math.exp(epsilon) * b, 0).sum()) for a, b in pairs_of_laws)


def test_neighbours_with_same_coins_differ_by_two_whole_numbers() -> None:
    for place, other in pairs(1.93):
        for axis in range(2):
            parts = distances(place[axis : axis + 1], other[axis : axis + 1])
            d = abs(place[axis] - other[axis])
            certain = {moves for moves, share in parts.items() if share > 1e-9}
            assert certain <= {(math.floor(d),), (math.floor(d) + 1,)}
            mean = sum(share * moves[0] for moves, share in parts.items())
            assert mean == pytest.approx(d, abs=1e-9)


@pytest.mark.parametrize("beta", [0.6, 0.2, 0.02])
@pytest.mark.parametrize("norm", [0.4, 1.0, 3.0])
def test_share_of_coins_that_move_further_is_below_beta(norm, beta) -> None:
    square = lattice.limit(norm, 2, beta)
    for place, other in pairs(norm):
        parts = distances(place, other)
        assert sum(parts.values()) == pytest.approx(1.0)
        assert sum(p for m, p in parts.items() if m[0] ** 2 + m[1] ** 2 > square) <= beta
        assert max(m[0] ** 2 + m[1] ** 2 for m in parts) <= lattice.limit(norm, 2, 0.0)


@pytest.mark.mutant
@pytest.mark.parametrize("twin", ["", "failure", "replace"])
def test_no_delta_is_above_stated_one(twin) -> None:
    """Two coordinates, the coins known and not: each exact delta at epsilons that are stated.

    The twins forget what the coins take of delta, or that a replaced record moves twice as far.
    """
    understated = 0
    variance = 2
    shapes = itertools.product([(3.0, "zero_out"), (1.5, "replace")], [0.6, 1e-9])
    for (clip, relation), beta in shapes:
        code = SumCode(2, clip, 1.0, 1, variance, beta, records=3)
        moved = code.moved("zero_out" if twin == "replace" else relation)
        loss = discrete.concentrated_loss(
            moved, variance, discrete.Cohort(1), 2, rounds=1, participations=1,
            relation="zero_out", failure=0.0 if twin == "failure" else beta,
        )  # fmt: skip
        for place, other in pairs(3.0):
            for delta in (0.7, 1e-6, 1e-12):
                epsilon = loss.epsilon(delta)
                if epsilon == math.inf:
                    continue
                spent = joint_delta(place, other, variance, epsilon)
                assert unknown_delta(place, other, variance, epsilon) <= spent + 1e-15
                understated += spent > delta
    assert (understated > 0) == bool(twin)


def test_several_rounds_lose_what_they_lack_once_each() -> None:
    """Three rounds as one of six coordinates, whose coins fail in some round."""
    loss = losses.Concentrated(0.5, 3, True, failure=3e-6)
    assert loss.epsilon(1e-5) == losses.Concentrated(0.5).epsilon(7e-6)
    assert loss.epsilon(1e-5) > losses.Concentrated(0.5).epsilon(1e-5)
    assert loss.epsilon(3e-6) == loss.epsilon(0.0) == math.inf
    # Each of 1,000 draws of three rounds fails with the probability that is stated, at most.
    code = SumCode(2, 1.0, 1.0, 1, 4, beta=0.3, records=2)
    rng = np.random.default_rng(0)
    coins = rng.random((4000, 3, 2))
    place = np.array([0.3, 0.8])
    moves = np.ceil(place + [0.7, 0.71] - coins) - np.ceil(place - coins)
    failed = (moves**2).sum(2) > code.moved("zero_out") ** 2
    assert failed.any(1).mean() <= 3 * 0.3


@pytest.mark.parametrize("relation", ["zero_out", "replace"])
def test_moves_are_those_of_hoeffding_and_of_float32(relation) -> None:
    """The formula again, and that its terms for rounding are no more than a share of it."""
    copies = {"zero_out": 1, "replace": 2}[relation]
    for size, records, norm in ((64, 8, 40.0), (2**15, 32, 300.0), (2**15, 1000, 300.0)):
        n = copies * norm
        root = math.sqrt(size)
        exact = n**2 + size / 4 + math.sqrt(2 * math.log(1e10)) * (n + root / 2)
        code = SumCode(size, norm, 1.0, 6, 4, 1e-10, records)
        moved = code.moved(relation)
        assert math.sqrt(exact) - 1 / n < moved < math.sqrt(exact) * (1 + 4e-6 * records)
        assert moved < n + root
    # One vector is as before, and is moved out by its limit.
    single = SumCode(64, 40.0, 1.0, 6, 4)
    assert single.moved(relation) == copies * math.sqrt(single.limit)


@pytest.mark.optimized
def test_real_roundings_of_neighbours_keep_their_limit() -> None:
    """The same key rounds two data sets by the same coins; another key does not."""
    size = 1024
    code = SumCode(size, 1.0, 1 / 16, 2, beta=0.05, records=20)
    rng = np.random.default_rng(0)
    base = rng.normal(size=(400, size))
    base *= 15 / np.linalg.norm(base, axis=1, keepdims=True)
    record = rng.normal(size=(400, size))
    record /= np.linalg.norm(record, axis=1, keepdims=True)
    signs = code.signs(b"a")
    first, fine = encode(code, jnp.asarray(base, jnp.float32), signs, key())
    second, _ = encode(code, jnp.asarray(base + record, jnp.float32), signs, key())
    squares = np.square(np.asarray(first, np.int64) - np.asarray(second)).sum(1)
    assert np.asarray(fine).all()
    limit = code.moved("zero_out") ** 2
    assert (squares > limit).mean() <= 0.05
    # The mean of the proof, below what no rounding passes, and far above the square of the norm.
    assert 16**2 < squares.mean() <= 16**2 + size / 4
    other, _ = encode(code, jnp.asarray(base + record, jnp.float32), signs, key(1))
    anew = np.square(np.asarray(first, np.int64) - np.asarray(other)).sum(1)
    assert anew.mean() > squares.mean() + size / 8


@pytest.mark.mutant
@pytest.mark.parametrize("size", [1, 2**6, 2**15])
def test_rounding_of_rotations_is_in_move(size) -> None:
    """Float32 against float64, for sums of many records; a loss without it is too small."""
    records = 500
    norm = 4096
    code = SumCode(size, 1.0, 1 / norm, 2, beta=1e-9, records=records)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, size))
    x *= records / np.linalg.norm(x, axis=1, keepdims=True)
    x[1] = x[0] * (1 - 1 / records)
    signs = code.signs(b"a")
    rough = [integers.rotation(code, item.astype(np.float32), signs) for item in x]
    fine = [lattice.hadamard(item * signs) * norm / math.sqrt(size) for item in x]
    # Rounded up to 24 bits of a fraction.
    rough = [np.ceil(item.astype(np.float64) * 2**24) / 2**24 for item in rough]
    error = np.linalg.norm((rough[0] - rough[1]) - (fine[0] - fine[1]))
    steps = size.bit_length() + 3
    stated = 2.0**-23 * (norm + steps * records * norm + math.sqrt(size))
    assert error <= stated < 1e-2 * norm
    assert 0.01 * stated < error or size == 1
    needed = [lattice.limit(norm + part, size, 1e-9) for part in (0.0, error, 2 * stated)]
    moved = code.moved("zero_out") ** 2
    assert needed[1] <= moved < needed[2] and (needed[0] < needed[1] or size == 1)


def test_what_is_sent_depends_on_no_draw_before() -> None:
    """However long a row is, its first rounding goes out, and noise that knows nothing of it."""
    code = SumCode(64, 1.0, 1 / 16, 3, 4, beta=1e-6, records=4)
    signs = code.signs(b"a")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 64)).astype(np.float32)
    # A mistake elsewhere made them ten times as long: no record may decide what becomes of it.
    x *= 40 / np.linalg.norm(x, axis=1, keepdims=True)
    rows, fine = encode(code, jnp.asarray(x), signs, key(5))
    assert np.asarray(fine).all()
    column = jnp.arange(64, dtype=jnp.uint32)
    for row in range(5):
        folded = jax.random.fold_in(key(5), row)
        words, _ = _numerics.threefry(folded, jnp.zeros_like(column), column)
        coordinates = integers.rotation(code, x[row], signs).astype(np.float64)
        expected = np.ceil(coordinates - (np.asarray(words) >> 8) / 2**24)
        np.testing.assert_array_equal(rows[row], expected)

    class Short(SumCode):
        """One whose test nothing passes."""

        limit = 0

    strict = Short(64, 1.0, 1 / 16, 3, 4, beta=1e-6, records=4)
    later = Script([0] * 64)
    assert integers.encode(strict, x[0] / 10, signs, later).any() and not later.left
    # With one vector such a draw is not sent.
    with pytest.raises(ValueError, match="norm"):
        integers.encode(dataclasses.replace(strict, records=1), x[0] / 40, signs, Script([0] * 64))


def test_noise_of_a_seed_is_same_whatever_is_rounded() -> None:
    code = SumCode(32, 1.0, 1 / 16, 3, 4, beta=1e-6, records=4)
    signs = code.signs(b"a")
    noise = []
    for x in (np.full(32, 0.1), np.linspace(-0.5, 0.4, 32)):
        seed = bytes([7] * 32)
        sent = integers.noisy(code, x, signs, Stream(seed), Stream(seed, purpose=1))
        noise.append(sent - integers.encode(code, x, signs, Stream(seed, purpose=1)))
    np.testing.assert_array_equal(*noise)
    np.testing.assert_array_equal(noise[0], integers.discrete_gaussians(Stream(seed), 32, 4))
    with pytest.raises(ValueError, match="rounding is None; give several records"):
        integers.noisy(code, x, signs, Stream(seed))
    # The broken twin: coins of the noise's own words are not those of another purpose.
    twin = integers.encode(code, x, signs, Stream(seed))
    assert (twin != integers.encode(code, x, signs, Stream(seed, purpose=1))).any()


@pytest.mark.x64
def test_jit_and_numpy_agree_to_bit() -> None:
    code = SumCode(64, 1.0, 0.013, 9, beta=1e-6, records=4)
    rng = np.random.default_rng(2)
    x = rng.normal(size=(9, 64)).astype(np.float32)
    x *= 3.9 / np.linalg.norm(x, axis=1, keepdims=True)
    signs = code.signs(b"seed")
    traced, fine = encode(code, jnp.asarray(x), signs, key(5))
    assert fine.all()
    column = jnp.arange(64, dtype=jnp.uint32)
    for row in range(9):
        folded = jax.random.fold_in(key(5), row)
        words, _ = _numerics.threefry(folded, jnp.zeros_like(column), column)
        mine = integers.encode(code, x[row], signs, Script(np.asarray(words).tolist()))
        np.testing.assert_array_equal(mine, np.asarray(traced[row]))


def test_jit_and_numpy_have_one_law() -> None:
    size = 2**14
    code = SumCode(size, 1.0, 1 / 128, 3, 4, beta=1e-6, records=4)
    signs = np.ones(size, np.float32)
    x = np.zeros(size, np.float32)
    # Rotated, every place is 3.7 grid units.
    x[0] = 3.7
    traced, _ = noisy(code, jnp.asarray(x)[None], signs, key(3))
    noise = Stream(bytes(32))
    coins = Stream(bytes(32), purpose=1)
    mine = integers.noisy(code, x, signs, noise, coins)
    whole = np.arange(-12, 21)
    shares = 0.3 * law(4, -15, 17) + 0.7 * law(4, -16, 16)
    for drawn in (np.asarray(traced)[0], mine):
        expected = np.maximum(shares * size, 1e-9)
        counts = np.array([(drawn == number).sum() for number in whole])
        likely = expected > 5
        error = (counts - expected)[likely] / np.sqrt(expected[likely])
        assert np.abs(error).max() < 4.5
        # Coins that always fall up are told from these.
        assert abs(drawn.mean() - 3.7) < 0.1 < abs(drawn.mean() - 4.0)
    assert same(np.asarray(traced)[0], mine) > 1e-4


@pytest.mark.mutant
@pytest.mark.parametrize("twin", [False, True])
def test_sums_do_not_wrap(twin) -> None:
    """All records of all clients alike; the twin's modulus is that of one record a client."""
    code = SumCode(64, 1.0, 0.02, 20, 16, beta=1e-6, records=32)
    bits = dataclasses.replace(code, records=1).bits if twin else code.bits
    x = np.zeros((20, 64), np.float32)
    x[:, 3] = 32.0
    signs = code.signs(b"a")
    traced, _ = noisy(code, jnp.asarray(x), signs, key())
    assert np.abs(np.asarray(traced)).max() <= code.largest
    total = np.asarray(jnp.sum(traced, axis=0, dtype=jnp.int32)).astype(np.uint32)
    low = 1 << bits
    residues = (total.astype(np.int64) + low // 2) % low - low // 2
    result = lattice.hadamard(residues * code.grid / 8) * signs
    close = abs(result[3] - 640) < 10 and np.abs(np.delete(result, 3)).max() < 10
    assert close == (not twin)
    if not twin:
        np.testing.assert_allclose(integers.decode(code, total, signs), result, atol=1e-6)


def test_entries_are_up_to_those_of_all_records() -> None:
    code = SumCode(1, 1.0, 0.02, 3, Fraction(9, 4), beta=1e-6, records=32)
    single = dataclasses.replace(code, records=1)
    extra = lattice.proposal(code.variance).centre + lattice.proposal(code.variance).farthest
    sent = integers.encode(code, [32.0], np.ones(1), Script([0]))
    assert abs(sent[0]) <= code.largest - extra <= 32 * 50 + 2
    assert abs(sent[0]) > single.largest - extra
    # Rows that no clip made are refused by a client, before a word is drawn.
    for x in ([32.1], [math.nan]):
        with pytest.raises(ValueError, match="values"):
            integers.encode(code, x, np.ones(1), Script([0]))


def test_rows_that_are_not_finite_are_zero() -> None:
    code = SumCode(4, 1.0, 0.02, 3, beta=1e-6, records=32)
    rows, fine = encode(code, jnp.asarray([[1.0, 2, 3, 4], [1, math.nan, 0, 0]]), np.ones(4), key())
    assert np.asarray(fine).tolist() == [True, False] and not np.asarray(rows)[1].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"records": 0}, "records is 0"),
        ({"records": 2**20}, "of 1048576 records, .*fewer records"),
        ({"records": 1.5}, "records is 1.5"),
    ],
)
def test_what_has_no_whole_numbers_is_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SumCode(4, 1.0, 0.02, 3), **change)
