"""Discrete Gaussians from ChaCha20: their law, and exactness where words leave an event open."""

import importlib.util
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats

pytest.importorskip("cryptography")

from dpjax.secagg import discrete  # noqa: E402
from tests.secagg import lattice  # noqa: E402

DRAWS = 200_000


def sample(variance, seed=1, count=DRAWS):
    return discrete.discrete_gaussians(discrete.Stream(bytes([seed] * 32)), count, variance)


@pytest.mark.parametrize("variance", lattice.VARIANCES, ids=str)
def test_their_law_is_the_exact_one(variance) -> None:
    values = sample(variance)
    assert values.dtype == np.int64 and lattice.fit(values, variance) > 1e-3
    # The same test refuses a variance that is wrong by 3 %, and tails that end.
    assert lattice.fit(values, Fraction(variance) * Fraction(103, 100)) < 1e-6
    tail = np.abs(values) > 3 * float(variance) ** 0.5
    assert lattice.fit(np.where(tail, 0, values), variance) < 1e-6


@pytest.mark.mutant
def test_probabilities_of_few_bits_are_caught() -> None:
    rng = np.random.default_rng(0)
    assert lattice.fit(lattice.rounded_twin(rng, DRAWS, 4, 40), 4) > 1e-3
    assert lattice.fit(lattice.rounded_twin(rng, DRAWS, 4, 5), 4) < 1e-6


@pytest.mark.parametrize("variance", lattice.VARIANCES, ids=str)
def test_their_moments(variance) -> None:
    values = sample(variance, 2).astype(np.float64)
    second, fourth, eighth = (lattice.moment(variance, power) for power in (2, 4, 8))
    assert abs(values.mean()) < 4 * (second / DRAWS) ** 0.5
    assert abs((values**2).mean() - second) < 4 * ((fourth - second**2) / DRAWS) ** 0.5
    assert abs((values**4).mean() - fourth) < 4 * ((eighth - fourth**2) / DRAWS) ** 0.5
    # Each other: neighbours are not correlated, nor are their squares.
    for one in (values, values**2):
        assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 4 / DRAWS**0.5


@pytest.mark.parametrize("variance", [1000, 2**20, Fraction(2**20 - 1, 2**10)], ids=str)
def test_wide_ones_are_normals_on_a_grid(variance) -> None:
    spread = np.random.default_rng(0).uniform(-0.5, 0.5, DRAWS)
    values = (sample(variance, 3) + spread) / float(variance + Fraction(1, 12)) ** 0.5
    assert scipy.stats.kstest(values, "norm").pvalue > 1e-3
    assert 4 < np.abs(values).max() < 6.5


def test_a_seed_draws_the_same_numbers_and_a_purpose_others() -> None:
    first = sample(4, count=300)
    np.testing.assert_array_equal(first, sample(4, count=300))
    assert np.mean(first == sample(4, seed=2, count=300)) < 0.4
    other = discrete.discrete_gaussians(discrete.Stream(bytes([1] * 32), 1), 300, 4)
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
def test_events_that_a_word_leaves_open_wait_for_the_next(top, divisor, words, below) -> None:
    script = lattice.Script(words)
    found = discrete._rational(script, np.array([top], np.uint64), divisor)
    assert found.tolist() == [below]
    # What was decided by fewer words, or by a float, had not read them all.
    assert not script.left


def test_a_float_decides_the_same_events_wrongly() -> None:
    words = [0x55555555, 0x55555555, 0x55555556]
    real = sum(Fraction(word, 2 ** (32 * (place + 1))) for place, word in enumerate(words))
    assert (real < Fraction(1, 3)) is False and bool(np.float64(real) < np.float64(1 / 3)) is False
    # Rounded to the 24 bits of float32 the third is larger than it is.
    assert bool(np.float64(real) < np.float64(np.float32(1 / 3))) is True


def test_uniform_numbers_are_uniform() -> None:
    drawn = discrete.Stream(bytes(32)).below(12, 120_000)
    assert scipy.stats.chisquare(np.bincount(drawn.astype(int), minlength=12)).pvalue > 1e-3
    # 2^32 mod 12 = 4: of the 2^32 words, four are turned down.
    for word, turned_down in ((0, True), (1, False)):
        script = lattice.Script([word, 2**32 - 1])
        drawn = discrete.Stream.below(script, 12, 1)  # type: ignore[arg-type]
        assert drawn.tolist() == ([11] if turned_down else [0])


def test_they_are_those_of_opendp() -> None:
    if importlib.util.find_spec("opendp") is None:
        pytest.skip("opendp is not installed: pip install 'opendp>=0.14.2'")
    import opendp.prelude as dp

    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=float)
    for scale, variance in ((2.0, 4), (0.75, Fraction(9, 16))):
        theirs = np.array(dp.m.make_gaussian(*space, scale=scale)([0] * 20_000))
        assert lattice.fit(theirs, variance) > 1e-5  # their key is drawn anew each time
        assert lattice.same(sample(variance, 4), theirs) > 1e-5
        assert lattice.same(sample(variance * Fraction(6, 5), 4), theirs) < 1e-5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sample(4.0), "variance is 4.0; give a whole number or a Fraction"),
        (lambda: sample(True), "variance is True"),
        (lambda: sample(Fraction(1, 8)), "too coarse"),
        (lambda: sample(2**20 + 1), "too fine"),
        (lambda: sample(Fraction(2**20 + 1, 2)), "numerator above 2"),
        (lambda: sample(4, count=-1), "count is -1"),
        (lambda: discrete.Stream(b"short"), "give 32 bytes"),
        (lambda: discrete.Stream("no bytes, whatever length it has"), "give 32 bytes"),
        (lambda: discrete.Stream(bytes(32), -1), "purpose is -1"),
        (lambda: discrete.variance_above(0), "variance is 0"),
        (lambda: discrete.variance_above(float("nan")), "variance is nan"),
        (lambda: discrete.variance_above(2**20 + 1), "to 2"),
    ],
)
def test_what_cannot_be_drawn_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_stream_ends_before_it_repeats() -> None:
    stream = discrete.Stream(bytes(32))
    stream._given = 2**36
    with pytest.raises(ValueError, match="take one a round"):
        stream.words(1)


@pytest.mark.parametrize("value", [1e-9, 0.25, 0.3, 1.0, 3.999999, 4, 1 / 3, 1000.1, 2**20 - 0.1])
def test_variances_are_rounded_up_by_little(value) -> None:
    above = discrete.variance_above(value)
    assert above >= Fraction(value) and above.numerator <= 2**20
    assert float(above) <= max(value * (1 + 2**-18), 0.25)
    discrete.discrete_gaussians(discrete.Stream(bytes(32)), 1, above)


def test_clients_load_no_jax() -> None:
    code = (
        "import sys; from dpjax.secagg import discrete\n"
        "discrete.discrete_gaussians(discrete.Stream(bytes(32)), 5, 4)\n"
        "assert 'jax' not in sys.modules and 'scipy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
