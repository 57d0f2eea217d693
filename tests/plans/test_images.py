"""Image classifiers by name: data, network and problem that belong together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.data import augmentation
from dpjax.models import images as networks
from dpjax.plans import images


def test_bytes_become_numbers_from_minus_one_to_one():
    class Same(networks.nn.Module):
        @networks.nn.compact
        def __call__(self, x):
            return x

    x = jnp.asarray([[0, 51, 255]], jnp.uint8)
    out = networks.Pixels(Same()).apply({}, x)
    np.testing.assert_allclose(out, [[-1.0, -0.6, 1.0]], rtol=1e-6)
    assert out.dtype == jnp.float32
    # Enlarged, neighbours are averaged and an image of one colour stays one.
    image = jnp.asarray([[0, 255], [0, 255]], jnp.uint8)[None, :, :, None]
    large = networks.Pixels(Same(), side=4).apply({}, image)[0, :, :, 0]
    np.testing.assert_allclose(large, [[-1.0, -0.5, 0.5, 1.0]] * 4, atol=1e-6)


@pytest.mark.parametrize("name", ["small_cnn", "cnn5", "vit_tiny"])
def test_networks_have_a_logit_a_class(name):
    x = jnp.zeros((2, 28, 28, 1), jnp.uint8)
    model = networks.network(name, 7, pixels=True)
    shapes = jax.eval_shape(lambda key: model.init_with_output(key, x)[0], jax.random.key(0))
    assert shapes.shape == (2, 7)


def test_a_problem_is_of_the_records_that_it_is_given():
    digits = images.read("digits", "mlp", records=100)
    x, y = digits.train
    assert len(x) == len(y) == 100 and type(digits.model).__name__ == "MLP"
    half = digits.problem((x[:50], y[:50]), (x[50:], y[50:]))
    assert len(half.y) == 50 and half.partition.counts.tolist() == [50]
    given = digits.model.init(jax.random.key(3), jnp.asarray(x[:1]))
    started = digits.problem(digits.train, digits.test, params=given).init(jax.random.key(0))
    for found, wanted in zip(jax.tree.leaves(started), jax.tree.leaves(given), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert half.copies == 1 and half.augment is None and half.name == "digits"
    # A mirrored digit is another sign: it is shifted alone, a picture of anything else is not.
    pictures = np.zeros((6, 28, 28, 1), np.float32), np.arange(6) % 2
    shown = images.Images("mnist", pictures, pictures, networks.network("small_cnn", 2))
    shifted = shown.problem(pictures, pictures, 2)
    assert isinstance(shifted.augment, augmentation.Shift) and shifted.copies == 2
    mirrored = shown._replace(dataset="cifar10").problem(pictures, pictures, 2)
    assert mirrored.augment is augmentation.standard


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="model is 'cnn6'; choose one of mlp"):
        images.read("digits", "cnn6")
    with pytest.raises(ValueError, match="records is -1"):
        images.read("digits", "mlp", records=-1)
    with pytest.raises(ValueError, match="name is 'cnn6'"):
        networks.network("cnn6", 10)
