"""The stream of normals: its hash, its statistics, and what it does not depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from jax.extend import random as extend

from dpjax._numerics import double_precision
from dpjax.transforms import variates
from tests.transforms.streams import NORMAL, ROWS, key


def test_hash_is_threefry():
    data = jax.random.key_data(key(9))
    shape = (5, 7)
    counters = [jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1)]
    keys = [jnp.broadcast_to(word, shape) for word in data]
    expected = extend.threefry2x32_p.bind(*keys, *counters)
    for mine, theirs in zip(variates.words(key(9), shape), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_words_become_normals_by_inversion():
    low, high = variates.words(key(), (3, 4))
    bits = np.concatenate([low, high], axis=1)[:, :7].astype(np.int64)
    # The upper 24 bits as a signed number, in the middle of its cell.
    steps = bits >> 8
    steps = np.where(steps >= 2**23, steps - 2**24, steps) + 0.5
    expected = scipy.special.ndtri((1 + steps / 2**23) / 2)
    np.testing.assert_allclose(NORMAL.sample(shape=(3, 7)), expected, rtol=2e-6)


@pytest.mark.parametrize("columns", [6, 7])
def test_large_draws_have_numbers_of_small_ones(columns, monkeypatch):
    draws = []
    for minimum in (variates._LARGE, 1):
        monkeypatch.setattr(variates, "_LARGE", minimum)
        draw = jax.jit(lambda key: variates.normals(key, (5, columns), jnp.float32))
        draws.append(draw(key()))
    np.testing.assert_array_equal(*draws)


def test_no_float32_normal_is_beyond_stated_largest():
    words = np.array([0x7FFFFFFF, 0x80000000], np.uint32)
    steps = (words.view(np.int32) >> 8).astype(np.float32)
    edge = np.float32(np.sqrt(2)) * jax.lax.erf_inv((steps + np.float32(0.5)) * np.float32(2**-23))
    assert 5.41 < float(edge[0]) <= variates.LARGEST_NORMAL and float(edge[1]) == -float(edge[0])
    assert np.abs(NORMAL.sample()).max() < variates.LARGEST_NORMAL


def test_tails_hold_what_they_should():
    values = np.abs(NORMAL.sample(shape=(400, 20_000)))
    for bound in (3.0, 4.0, 4.8):
        expected = values.size * 2 * scipy.stats.norm.sf(bound)
        assert abs((values > bound).sum() - expected) < 5 * np.sqrt(expected)


def pairs_of_words(values):
    """The two normals of one hash, [number of hashes] each."""
    half = (values.shape[1] + 1) // 2
    return values[:, : values.shape[1] - half].ravel(), values[:, half:].ravel()


def test_words_of_hash_are_independent():
    left, right = pairs_of_words(NORMAL.sample())
    assert abs(NORMAL.dependence(left, right)) < 5
    assert abs(np.corrcoef(left, right)[0, 1]) < 5 / np.sqrt(left.size)
    assert abs(np.corrcoef(left**2, right**2)[0, 1]) < 5 / np.sqrt(left.size)
    # One word used twice, half of it used twice, or a sign shared, would be seen.
    assert NORMAL.dependence(left, left) > 100
    assert NORMAL.dependence(left, np.where(np.arange(left.size) % 50 == 0, left, right)) > 5
    assert NORMAL.dependence(left, np.abs(right) * np.sign(left)) > 100


def test_no_number_is_drawn_twice():
    low, high = variates.words(key(), (512, 300))
    total = (np.asarray(low).astype(np.uint64) << np.uint64(32)) | np.asarray(high)
    assert len(np.unique(total)) == total.size


@pytest.mark.x64
def test_double_precision_uses_both_words_for_one_normal():
    with double_precision():
        wide = np.asarray(variates.normals(key(), (ROWS, 4_000), jnp.float64))
    low, high = variates.words(key(), (ROWS, 4_000))
    bits = np.asarray(high).view(np.int32).astype(np.int64) * 2**21 + (np.asarray(low) >> 11)
    expected = scipy.special.ndtri((1 + (bits + 0.5) / 2**52) / 2)
    np.testing.assert_allclose(wide, expected, rtol=1e-9, atol=1e-12)


def test_another_dtype_is_refused():
    for dtype in (jnp.bfloat16, jnp.int32):
        with pytest.raises(ValueError, match="float32 or float64"):
            variates.normals(key(), (2, 2), dtype)
