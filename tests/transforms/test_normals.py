"""The stream of normals: its hash, its statistics, and what it does not depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from jax.extend import random as extend
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpjax.mechanism.x64 import double_precision
from dpjax.transforms import normals

ROWS, COLUMNS = 64, 20_001


def key(seed=3):
    return jax.random.key(seed, impl="threefry2x32")


def sample(one=None, shape=(ROWS, COLUMNS)):
    return np.asarray(normals.normals(one if one is not None else key(), shape, jnp.float32))


def test_the_hash_is_threefry():
    data = jax.random.key_data(key(9))
    shape = (5, 7)
    counters = [jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1)]
    keys = [jnp.broadcast_to(word, shape) for word in data]
    expected = extend.threefry2x32_p.bind(*keys, *counters)
    for mine, theirs in zip(normals.words(key(9), shape), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_both_words_become_normals_by_the_inverse_distribution_function():
    low, high = normals.words(key(), (3, 4))
    bits = np.concatenate([low, high], axis=1)[:, :7].astype(np.int64)
    # The upper 24 bits as a signed number, in the middle of its cell.
    steps = bits >> 8
    steps = np.where(steps >= 2**23, steps - 2**24, steps) + 0.5
    expected = scipy.special.ndtri((1 + steps / 2**23) / 2)
    np.testing.assert_allclose(sample(shape=(3, 7)), expected, rtol=2e-6)


def test_no_float32_normal_is_beyond_the_stated_largest():
    words = np.array([0x7FFFFFFF, 0x80000000], np.uint32)
    steps = (words.view(np.int32) >> 8).astype(np.float32)
    edge = np.float32(np.sqrt(2)) * jax.lax.erf_inv((steps + np.float32(0.5)) * np.float32(2**-23))
    assert 5.41 < float(edge[0]) <= normals.LARGEST and float(edge[1]) == -float(edge[0])
    assert np.abs(sample()).max() < normals.LARGEST


def test_a_numbers_place_decides_it_and_not_the_number_of_rows():
    few, many = sample(shape=(2, 9)), sample(shape=(8, 9))
    np.testing.assert_array_equal(few, many[:2])


def test_what_is_vmapped_or_compiled_does_not_matter():
    keys = jax.random.split(key(), 3)

    def draw(one):
        return normals.normals(one, (4, 11), jnp.float32)

    together = jax.jit(jax.vmap(draw))(keys)
    scanned = jax.jit(lambda k: jax.lax.map(draw, k))(keys)
    for index in range(3):
        # Compiled code may round the last place otherwise; the bits behind it are the same.
        np.testing.assert_allclose(together[index], draw(keys[index]), rtol=1e-6)
        np.testing.assert_array_equal(together[index], scanned[index])


@pytest.mark.parametrize("devices", [2, 8])
def test_the_number_of_devices_does_not_matter(devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("agents",))
    spread = NamedSharding(mesh, PartitionSpec("agents"))

    def draw(one):
        return normals.normals(one, (16, 333), jnp.float32)

    alone = jax.jit(draw)(key())
    np.testing.assert_array_equal(jax.jit(draw, out_shardings=spread)(key()), alone)


def distribution_distance(values):
    """Kolmogorov's distance from the normal, in units of its standard error."""
    return scipy.stats.kstest(values.ravel(), "norm").statistic * np.sqrt(values.size)


def test_the_numbers_are_normal_and_the_test_sees_one_percent():
    values = sample()
    assert distribution_distance(values) < 2.2  # passed by chance once in 8,000 keys
    assert distribution_distance(1.01 * values) > 2.2
    assert distribution_distance(values + 0.005) > 2.2


def test_tails_hold_what_they_should():
    values = np.abs(sample(shape=(400, 20_000)))
    for bound in (3.0, 4.0, 4.8):
        expected = values.size * 2 * scipy.stats.norm.sf(bound)
        assert abs((values > bound).sum() - expected) < 5 * np.sqrt(expected)


def pairs_of_words(values):
    """The two normals of one hash, [number of hashes] each."""
    half = (values.shape[1] + 1) // 2
    return values[:, : values.shape[1] - half].ravel(), values[:, half:].ravel()


def dependence(left, right):
    """Chi-square of a 16 x 16 table of quantiles, in standard deviations from its mean."""
    bins = [np.minimum((scipy.special.ndtr(part) * 16).astype(int), 15) for part in (left, right)]
    table = np.bincount(16 * bins[0] + bins[1], minlength=256)
    expected = left.size / 256
    return (((table - expected) ** 2 / expected).sum() - 255) / np.sqrt(2 * 255)


def test_the_words_of_a_hash_are_independent():
    left, right = pairs_of_words(sample())
    assert abs(dependence(left, right)) < 5
    assert abs(np.corrcoef(left, right)[0, 1]) < 5 / np.sqrt(left.size)
    assert abs(np.corrcoef(left**2, right**2)[0, 1]) < 5 / np.sqrt(left.size)
    # One word used twice, half of it used twice, or a sign shared, would be seen.
    assert dependence(left, left) > 100
    assert dependence(left, np.where(np.arange(left.size) % 50 == 0, left, right)) > 5
    assert dependence(left, np.abs(right) * np.sign(left)) > 100


@pytest.mark.parametrize("shift", [(0, 1), (1, 0)])
def test_neighbouring_places_are_independent(shift):
    values = sample()
    other = values[shift[0] :, shift[1] :]
    same = values[: values.shape[0] - shift[0], : values.shape[1] - shift[1]]
    assert abs(dependence(same.ravel(), other.ravel())) < 5


def test_keys_a_bit_apart_are_independent():
    data = np.asarray(jax.random.key_data(key()))
    other = jax.random.wrap_key_data(jnp.asarray(data ^ np.uint32([0, 1])), impl="threefry2x32")
    assert abs(dependence(sample().ravel(), sample(other).ravel())) < 5


def test_no_number_is_drawn_twice():
    low, high = normals.words(key(), (512, 300))
    whole = (np.asarray(low).astype(np.uint64) << np.uint64(32)) | np.asarray(high)
    assert len(np.unique(whole)) == whole.size


def test_double_precision_uses_both_words_for_one_normal():
    with double_precision():
        wide = np.asarray(normals.normals(key(), (ROWS, 4_000), jnp.float64))
    assert wide.dtype == np.float64 and distribution_distance(wide) < 2.2
    low, high = normals.words(key(), (ROWS, 4_000))
    bits = np.asarray(high).view(np.int32).astype(np.int64) * 2**21 + (np.asarray(low) >> 11)
    expected = scipy.special.ndtri((1 + (bits + 0.5) / 2**52) / 2)
    np.testing.assert_allclose(wide, expected, rtol=1e-9, atol=1e-12)


def test_another_dtype_is_refused():
    with pytest.raises(ValueError, match="float32 or float64"):
        normals.normals(key(), (2, 2), jnp.bfloat16)
