"""The stream of Laplace variables: its bits, its statistics, and what it does not depend on."""

from fractions import Fraction

import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

from dpjax._numerics import double_precision
from dpjax.transforms import variates
from dpjax.transforms.variates import words
from tests.transforms.streams import LAPLACE, key


def computed(high, low, dtype):
    """What the words stand for, to NumPy."""
    with double_precision():
        result = variates.laplaces_of_words(jnp.asarray(high), jnp.asarray(low), dtype)
    assert result.dtype == dtype
    return np.asarray(result, np.float64)


def exact(high, low):
    """The same by fractions and fifty digits."""
    values = []
    with mp.workdps(50):
        for first, second in zip(high.tolist(), low.tolist(), strict=True):
            k = ((first & (2**30 - 1)) << 32) + second
            q = Fraction(2 * k + 1, 2**64)
            q = 1 - q if not first >> 30 & 1 else q
            magnitude = -mp.log(mp.mpf(q.numerator) / q.denominator)
            values.append(float(-magnitude if first >> 31 else magnitude))
    return np.array(values)


def several_words():
    """Random ones, and those of which few digits are left: the tail's and those near zero."""
    rng = np.random.default_rng(0)
    high, low = rng.integers(0, 2**32, (2, 900), dtype=np.uint32)
    shorter = rng.integers(0, 31, 600).astype(np.uint32)
    high[300:] &= np.uint32(3 << 30) | (np.uint32(2**30 - 1) >> shorter)
    high[600:] &= np.uint32(3 << 30)
    low[600:] >>= rng.integers(0, 33, 300).astype(np.uint32) % np.uint32(32)
    ends = np.array([0, 2**30 - 1, 2**30, 2**31 - 1], np.uint32)
    high = np.concatenate([high, ends, ends | np.uint32(2**31)])
    low = np.concatenate([low, *[np.array([0, 2**32 - 1] * 2, np.uint32)] * 2])
    return high, low


@pytest.mark.x64
@pytest.mark.parametrize(("dtype", "digits"), [(np.float32, 4e-7), (np.float64, 1e-13)])
def test_words_become_laplaces_by_inversion(dtype, digits):
    high, low = several_words()
    np.testing.assert_allclose(computed(high, low, dtype), exact(high, low), rtol=digits)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ends_are_stated_ones(dtype):
    none = np.uint32([0])
    single = np.uint32([1 << 30])
    (minimum,), (largest,) = computed(none, none, dtype), computed(single, none, dtype)
    assert minimum == variates.SMALLEST_LAPLACE
    assert 44.36 < largest <= variates.LARGEST_LAPLACE
    # Both sides meet at the median: no gap and no overlap beyond rounding.
    maximum = np.uint32([2**32 - 1])
    below, above = (
        computed(np.uint32([side | (2**30 - 1)]), maximum, dtype)[0] for side in (0, 1 << 30)
    )
    assert below <= above and above - below < 3e-7 and above == pytest.approx(np.log(2), rel=3e-7)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_are_symmetric_to_bit(dtype):
    high, low = several_words()
    other = computed(high ^ np.uint32(1 << 31), low, dtype)
    np.testing.assert_array_equal(other, -computed(high, low, dtype))


def test_each_is_of_its_own_hash():
    high, low = (np.asarray(word).ravel() for word in words(key(), (30, 40)))
    np.testing.assert_allclose(
        LAPLACE.sample(shape=(30, 40)), exact(high, low).reshape(30, 40), rtol=4e-7
    )


def finest(draw):
    """Spacing of what a sampler gives near zero, and its largest, from a million words."""
    high, low = np.random.default_rng(5).integers(0, 2**32, (2, 1 << 20), dtype=np.uint32)
    magnitudes = np.unique(np.abs(draw(high, low)))
    return np.diff(magnitudes[:2000]).min(), magnitudes.max()


def test_uniform_of_24_bits_would_be_seen():
    """The usual sampler: multiples of 2^-23 near zero, nothing beyond 16.7."""

    def usual(high, low):
        del low
        uniform = (high >> 8).astype(np.float64) * 2.0**-23 - 1 + 2.0**-24
        return np.sign(uniform) * -np.log1p(-np.abs(uniform))

    spacing, largest = finest(usual)
    assert spacing > 2.0**-25 and largest < 16.7
    mine, _ = finest(lambda high, low: computed(high, low, np.float32))
    assert 0 < mine < 2.0**-32
    # The tail by words that are not random.
    few = np.full(64, 1 << 30, np.uint32)
    reached = computed(few, np.uint32(2) ** (np.arange(64, dtype=np.uint32) // 2), np.float32)
    assert (reached > 20).all() and len(np.unique(reached)) == 32


def test_no_float32_number_is_beyond_ends():
    values = np.abs(LAPLACE.sample())
    assert values.min() >= variates.SMALLEST_LAPLACE and values.max() <= variates.LARGEST_LAPLACE


def test_place_decides_number_and_not_number_of_columns():
    many = LAPLACE.sample(shape=(8, 11))
    np.testing.assert_array_equal(LAPLACE.sample(shape=(8, 4)), many[:, :4])


def test_tails_and_what_is_near_zero_hold_what_they_should():
    values = np.abs(LAPLACE.sample(shape=(400, 20_000)))
    for bound in (3.0, 6.0, 9.0, 12.0):
        expected = values.size * np.exp(-bound)
        assert abs((values > bound).sum() - expected) < 5 * np.sqrt(expected)
        expected = values.size * -np.expm1(-np.exp(-bound))
        assert abs((values < np.exp(-bound)).sum() - expected) < 5 * np.sqrt(expected)


def signs_by_magnitudes(values):
    """Chi-square of signs against 64 quantiles of magnitudes, in deviations from its mean."""
    bins = np.minimum((-np.expm1(-np.abs(values)) * 64).astype(int), 63).ravel()
    table = np.bincount(2 * bins + (values.ravel() > 0), minlength=128)
    expected = values.size / 128
    return (((table - expected) ** 2 / expected).sum() - 127) / np.sqrt(2 * 127)


def test_sign_and_magnitude_are_independent():
    values = LAPLACE.sample()
    assert abs(signs_by_magnitudes(values)) < 5
    # A sign shared with the side, with a middle bit or with one number in fifty would be seen.
    magnitude = np.abs(values)
    assert signs_by_magnitudes(np.where(magnitude > np.log(2), magnitude, -magnitude)) > 100
    fine = np.floor(np.exp(-magnitude) * 64).astype(int) % 2 == 0
    assert signs_by_magnitudes(np.where(fine, magnitude, -magnitude)) > 100
    few = np.arange(values.size).reshape(values.shape) % 50 == 0
    assert signs_by_magnitudes(np.where(few, magnitude, values)) > 5
