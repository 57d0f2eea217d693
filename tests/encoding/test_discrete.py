"""Discrete Gaussians from ChaCha20 and from threefry: one law, and every number exact."""

import functools
import importlib.util
import subprocess
import sys
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

pytest.importorskip("cryptography")

from dpjax import _numerics  # noqa: E402
from dpjax._numerics import double_precision  # noqa: E402
from dpjax.encoding import integers, simulated  # noqa: E402
from dpjax.encoding.lattice import proposal, variance_above  # noqa: E402
from tests.encoding import lattice  # noqa: E402

pytestmark = pytest.mark.optimized  # many draws: compiling them well pays
DRAWS = 200_000
IN_JIT = [Fraction(1, 4), 4, Fraction(50, 3)]


def key(seed=3):
    return jax.random.key(seed, impl="threefry2x32")


@functools.lru_cache(maxsize=None, typed=True)  # 4.0 is refused, 4 is not
def of_client(variance, seed=1, count=DRAWS):
    return integers.discrete_gaussians(integers.Stream(bytes([seed] * 32)), count, variance)


@functools.cache
def in_jit(variance, seed=3, shape=(40, 1500)):
    drawn = jax.jit(simulated.discrete_gaussian_rows, static_argnums=(1, 2))(
        key(seed), shape, variance
    )
    assert drawn.dtype == jnp.int32 and drawn.shape == shape
    return np.asarray(drawn)


SAMPLES = [(of_client, variance) for variance in lattice.VARIANCES] + [
    (in_jit, item) for item in IN_JIT
]


@pytest.mark.gate(4)
@pytest.mark.parametrize(("sample", "variance"), SAMPLES)
def test_their_law_is_exact_one(sample, variance) -> None:
    values = sample(variance).ravel()
    assert lattice.fit(values, variance) > 1e-3
    # The same test refuses a variance that is wrong by 5 %, and tails that end.
    assert lattice.fit(values, Fraction(variance) * Fraction(105, 100)) < 1e-6
    tail = np.abs(values) > 3 * float(variance) ** 0.5
    assert lattice.fit(np.where(tail, 0, values), variance) < 1e-4


@pytest.mark.mutant
def test_probabilities_of_few_bits_are_caught() -> None:
    rng = np.random.default_rng(0)
    assert lattice.fit(lattice.rounded_twin(rng, DRAWS, 4, 40), 4) > 1e-3
    assert lattice.fit(lattice.rounded_twin(rng, DRAWS, 4, 5), 4) < 1e-6


@pytest.mark.gate(4)
@pytest.mark.parametrize(("sample", "variance"), SAMPLES)
def test_their_moments(sample, variance) -> None:
    values = sample(variance).astype(np.float64).ravel()
    second, fourth, eighth = (lattice.moment(variance, power) for power in (2, 4, 8))
    count = values.size
    assert abs(values.mean()) < 4 * (second / count) ** 0.5
    assert abs((values**2).mean() - second) < 4 * ((fourth - second**2) / count) ** 0.5
    assert abs((values**4).mean() - fourth) < 4 * ((eighth - fourth**2) / count) ** 0.5
    # Each other: neighbours are not correlated, nor are their squares.
    for case in (values, values**2):
        assert abs(np.corrcoef(case[1:], case[:-1])[0, 1]) < 4 / count**0.5


def test_both_samplers_have_one_law() -> None:
    for variance in IN_JIT:
        mine = of_client(variance, seed=0, count=60_000)
        assert lattice.same(in_jit(variance).ravel(), mine) > 1e-3
    wider = of_client(Fraction(22, 5), seed=0, count=60_000)
    assert lattice.same(in_jit(4).ravel(), wider) < 1e-6


@pytest.mark.parametrize("variance", [1000, 2**20, Fraction(2**20 - 1, 2**10)], ids=str)
def test_wide_ones_are_normals_on_grid(variance) -> None:
    spread = np.random.default_rng(0).uniform(-0.5, 0.5, DRAWS)
    values = (of_client(variance, 3) + spread) / float(variance + Fraction(1, 12)) ** 0.5
    assert scipy.stats.kstest(values, "norm").pvalue > 1e-3
    assert 4 < np.abs(values).max() < 6.5


def test_seed_draws_same_numbers_and_purpose_others() -> None:
    first = of_client(4, count=300)
    np.testing.assert_array_equal(first, of_client(4, count=300))
    assert np.mean(first == of_client(4, seed=2, count=300)) < 0.4
    other = integers.discrete_gaussians(integers.Stream(bytes([1] * 32), 1), 300, 4)
    assert np.mean(first == other) < 0.4


@pytest.mark.parametrize(
    ("top", "divisor", "words", "below"),
    [
        (1, 3, [0x55555555, 0x55555555, 0x55555554], True),
        (1, 3, [0x55555555, 0x55555555, 0x55555556], False),
        (1, 3, [0x55555554], True),
        (1, 2, [2**31 - 1], True),
        (1, 2, [2**31], False),
        (0, 5, [], False),
        (5, 5, [], True),
        (2**21 - 1, 2**21, [2**32 - 2**11], False),
        (2**21 - 1, 2**21, [2**32 - 2**11 - 1], True),
    ],
)
def test_events_that_word_leaves_open_wait_for_next(top, divisor, words, below) -> None:
    script = lattice.Script(words)
    result = integers._rational(script, np.array([top], np.uint64), divisor)
    assert result.tolist() == [below]
    # What was decided by fewer words, or by a float, had not read them all.
    assert not script.left


def test_float_decides_same_events_wrongly() -> None:
    words = [0x55555555, 0x55555555, 0x55555556]
    real = sum(Fraction(word, 2 ** (32 * (place + 1))) for place, word in enumerate(words))
    assert (real < Fraction(1, 3)) is False and bool(np.float64(real) < np.float64(1 / 3)) is False
    # Rounded to the 24 bits of float32 the third is larger than it is.
    assert bool(np.float64(real) < np.float64(np.float32(1 / 3))) is True


def test_uniform_numbers_are_uniform() -> None:
    drawn = integers.Stream(bytes(32)).below(12, 120_000)
    assert scipy.stats.chisquare(np.bincount(drawn.astype(int), minlength=12)).pvalue > 1e-3
    # 2^32 mod 12 = 4: of the 2^32 words, four are turned down.
    for word, turned_down in ((0, True), (1, False)):
        script = lattice.Script([word, 2**32 - 1])
        drawn = integers.Stream.below(script, 12, 1)  # type: ignore[arg-type]
        assert drawn.tolist() == ([11] if turned_down else [0])


@pytest.mark.slow
def test_they_are_those_of_opendp() -> None:
    if importlib.util.find_spec("opendp") is None:
        pytest.skip("opendp is not installed: pip install 'opendp>=0.14.2'")
    import opendp.prelude as dp

    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=float)
    for scale, variance in ((2.0, 4), (0.75, Fraction(9, 16))):
        theirs = np.array(dp.m.make_gaussian(*space, scale=scale)([0] * 8_000))
        assert lattice.fit(theirs, variance) > 1e-5  # their key is drawn anew each time
        assert lattice.same(of_client(variance, 4), theirs) > 1e-5
        assert lattice.same(of_client(variance * Fraction(6, 5), 4), theirs) < 1e-5


def test_rows_columns_and_keys_are_independent() -> None:
    values = in_jit(4).astype(np.float64)
    others = [values[1:, :], values[:, 1:], in_jit(4, 4)]
    mine = [values[:-1, :], values[:, :-1], values]
    for item, other in zip(mine, others, strict=True):
        assert abs(np.corrcoef(item.ravel(), other.ravel())[0, 1]) < 4 / item.size**0.5


def pairs(row, column, seed=3):
    """The pairs of words that a number is drawn from."""
    folded = jax.random.fold_in(key(seed), row)
    ticks = jnp.arange(3000, dtype=jnp.uint32)
    drawn = _numerics.threefry(folded, ticks, jnp.full_like(ticks, column))
    return list(zip(*(np.asarray(words).tolist() for words in drawn), strict=True))


@pytest.mark.parametrize("variance", IN_JIT, ids=str)
def test_numbers_follow_from_their_words_as_fractions_tell(variance) -> None:
    centre = proposal(variance).centre
    for row, column in [(0, 0), (0, 31), (0, 32), (7, 1499), *((39, c) for c in range(0, 800, 20))]:
        exact = lattice.replayed(pairs(row, column), Fraction(variance), centre)
        assert in_jit(variance)[row, column] == exact


def test_events_that_words_leave_open_wait_for_next() -> None:
    rng = np.random.default_rng(0)
    divisors = rng.integers(1, 2**21, 2000).astype(np.uint32)
    rests = (divisors * rng.random(2000)).astype(np.uint32)
    # Words beside the end of the event, and anywhere.
    near = (rests.astype(np.uint64) << np.uint64(32)) // divisors
    words = np.where(np.arange(2000) % 2, near + rng.integers(-1, 2, 2000).astype(np.uint64), near)
    words = np.clip(words.astype(np.int64), 0, 2**32 - 1).astype(np.uint32)
    products = simulated._product(jnp.asarray(words), jnp.asarray(divisors))
    products = tuple(np.asarray(item) for item in products)
    complete = [int(a) * int(b) for a, b in zip(words, divisors, strict=True)]
    assert [int(h) * 2**32 + int(low) for h, low in zip(*products, strict=True)] == complete
    compared = simulated._compared(products, jnp.asarray(rests), jnp.asarray(divisors))
    yes, no, left = (np.asarray(value) for value in compared)
    opened = 0
    for i, product in enumerate(complete):
        target = int(rests[i]) * 2**32
        assert bool(yes[i]) == (product + int(divisors[i]) <= target)
        assert bool(no[i]) == (product >= target)
        if not yes[i] and not no[i]:
            opened += 1
            assert int(left[i]) == target - product
    assert opened > 500


@pytest.mark.x64
def test_number_depends_on_key_row_and_column_alone() -> None:
    complete = in_jit(4)
    draw = jax.jit(simulated.discrete_gaussian_rows, static_argnums=(1, 2))
    np.testing.assert_array_equal(draw(key(), (3, 33), 4), complete[:3, :33])
    keys = jnp.stack([key(3), key(4)])
    function = jax.jit(jax.vmap(lambda k: simulated.discrete_gaussian_rows(k, (2, 40), 4)))(keys)
    np.testing.assert_array_equal(function[0], complete[:2, :40])
    np.testing.assert_array_equal(function[1], in_jit(4, 4)[:2, :40])

    def body(carry, seed):
        return carry, simulated.discrete_gaussian_rows(jax.random.key(seed), (2, 40), 4)

    seeds = jnp.array([3, 4], jnp.uint32)
    np.testing.assert_array_equal(jax.lax.scan(body, 0, seeds)[1][1], function[1])
    with double_precision():
        wide = draw(key(), (3, 33), 4)
    assert wide.dtype == jnp.int32
    np.testing.assert_array_equal(wide, complete[:3, :33])


def test_nothing_is_drawn_for_no_rows() -> None:
    assert simulated.discrete_gaussian_rows(key(), (0, 3), 4).shape == (0, 3)
    assert simulated.discrete_gaussian_rows(key(), (3, 0), 4).shape == (3, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: of_client(4.0), "variance is 4.0; give a whole number or a Fraction"),
        (lambda: of_client(True), "variance is True"),
        (lambda: of_client(Fraction(1, 8)), "too coarse"),
        (lambda: of_client(2**20 + 1), "too fine"),
        (lambda: of_client(Fraction(2**20 + 1, 2)), "numerator above 2"),
        (lambda: of_client(4, count=-1), "count is -1"),
        (lambda: integers.Stream(b"short"), "give 32 bytes"),
        (lambda: integers.Stream("no bytes, whatever length it has"), "give 32 bytes"),
        (lambda: integers.Stream(bytes(32), -1), "purpose is -1"),
        (lambda: simulated.discrete_gaussian_rows(jax.random.key(0, impl="rbg"), (3, 2), 4), "key"),
        (
            lambda: simulated.discrete_gaussian_rows(key(), (3, 2), 4.0),
            "give a whole number or a Fraction",
        ),
        (lambda: variance_above(0), "variance is 0"),
        (lambda: variance_above(float("nan")), "variance is nan"),
        (lambda: variance_above(2**20 + 1), "to 2"),
    ],
)
def test_what_cannot_be_drawn_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_stream_ends_before_it_repeats() -> None:
    stream = integers.Stream(bytes(32))
    stream._read = 2**36
    with pytest.raises(ValueError, match="take one a round"):
        stream.words(1)


@pytest.mark.parametrize("value", [1e-9, 0.25, 0.3, 1.0, 3.999999, 4, 1 / 3, 1000.1, 2**20 - 0.1])
def test_variances_are_rounded_up_by_little(value) -> None:
    above = variance_above(value)
    assert above >= Fraction(value) and above.numerator <= 2**20
    assert float(above) <= max(value * (1 + 2**-18), 0.25)
    integers.discrete_gaussians(integers.Stream(bytes(32)), 1, above)


def test_clients_load_no_jax() -> None:
    code = (
        "import sys; from dpjax.encoding import integers\n"
        "integers.discrete_gaussians(integers.Stream(bytes(32)), 5, 4)\n"
        "assert 'jax' not in sys.modules and 'scipy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_word_is_given_out_twice() -> None:
    """Drawn in pieces or at once, the words of a seed are the same."""
    complete = integers.Stream(bytes(32)).words(5000)
    pieces = integers.Stream(bytes(32))
    counts = [1, 2, 3, 994, 1000, 3000]
    np.testing.assert_array_equal(np.concatenate([pieces.words(n) for n in counts]), complete)
