"""What both streams of noise keep: bits that nothing else decides, laws, independence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpjax._numerics import double_precision
from tests.transforms.streams import LAPLACE, NORMAL, ROWS, key

pytestmark = pytest.mark.parametrize("stream", [NORMAL, LAPLACE], ids=lambda value: value.law)


@pytest.mark.gate(1)
def test_place_decides_number_and_not_number_of_rows(stream):
    np.testing.assert_array_equal(stream.sample(shape=(2, 11)), stream.sample(shape=(8, 11))[:2])


@pytest.mark.x64
def test_double_precision_around_it_changes_no_float32_number(stream):
    outside = stream.sample(shape=(5, 7))
    with double_precision():
        inside = stream.draw(key(), (5, 7), jnp.float32)
    assert outside.dtype == inside.dtype == np.float32
    np.testing.assert_array_equal(outside, inside)


def test_what_is_vmapped_or_compiled_does_not_matter(stream):
    keys = jax.random.split(key(), 3)

    def draw(value):
        return stream.draw(value, (4, 11), jnp.float32)

    together = jax.jit(jax.vmap(draw))(keys)
    scanned = jax.jit(lambda k: jax.lax.map(draw, k))(keys)
    for index in range(3):
        # Compiled code may round the last place otherwise; the bits behind it are the same.
        np.testing.assert_allclose(together[index], draw(keys[index]), rtol=stream.rounding)
        np.testing.assert_array_equal(together[index], scanned[index])


@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_number_of_devices_does_not_matter(stream, devices):
    if len(jax.devices()) < devices:
        pytest.skip("needs more devices")
    mesh = Mesh(np.array(jax.devices()[:devices]), ("agents",))
    spread = NamedSharding(mesh, PartitionSpec("agents"))

    def draw(value):
        return stream.draw(value, (16, 333), jnp.float32)

    single = jax.jit(draw)(key())
    np.testing.assert_array_equal(jax.jit(draw, out_shardings=spread)(key()), single)


@pytest.mark.slow
def test_numbers_follow_law_within_one_percent(stream):
    values = stream.sample()
    assert stream.distance(values) < 2.2  # passed by chance once in 8,000 keys
    assert stream.distance(1.01 * values) > 2.2
    assert stream.distance(values + 0.005) > 2.2
    (other,) = {NORMAL, LAPLACE} - {stream}
    deviation = {NORMAL: 1.0, LAPLACE: np.sqrt(2)}
    scaled = other.sample()[:1] * deviation[stream] / deviation[other]
    assert stream.distance(scaled) > 2.2


@pytest.mark.x64
def test_double_precision_numbers_follow_it_too(stream):
    with double_precision():
        wide = np.asarray(stream.draw(key(), (ROWS, 4_000), jnp.float64))
    assert wide.dtype == np.float64 and stream.distance(wide) < 2.2
    assert (wide != wide.astype(np.float32)).mean() > 0.99


@pytest.mark.gate(2)
@pytest.mark.parametrize("shift", [(0, 1), (1, 0)])
def test_neighbouring_places_are_independent(stream, shift):
    values = stream.sample()
    other = values[shift[0] :, shift[1] :]
    same = values[: values.shape[0] - shift[0], : values.shape[1] - shift[1]]
    assert abs(stream.dependence(same.ravel(), other.ravel())) < 5
    assert stream.dependence(same.ravel(), np.abs(other.ravel()) * np.sign(same.ravel())) > 100


def test_keys_bit_apart_are_independent(stream):
    data = np.asarray(jax.random.key_data(key()))
    other = jax.random.wrap_key_data(jnp.asarray(data ^ np.uint32([0, 1])), impl="threefry2x32")
    assert abs(stream.dependence(stream.sample().ravel(), stream.sample(other).ravel())) < 5
