"""Norms of convolutions' gradients from their pixels: equal to those from patches, and bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax.models import conv, products


def layer(kernel: tuple[int, int], padding: int, features: int, shape: tuple[int, ...]):
    """A convolution by 1 as a product."""
    module = conv.Conv(features, kernel, padding=padding)
    x = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    out = jax.eval_shape(lambda x: module.init_with_output(jax.random.key(0), x)[0], x)
    product = products.product(module, x)
    assert product is not None and product.gram is not None
    return product, out.shape


@pytest.mark.slow
@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(2, 4)),
    padding=st.integers(0, 4),
    size=st.tuples(st.integers(4, 7), st.integers(4, 7)),
    channels=st.sampled_from((1, 3, 70)),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_patches_meet_as_their_pixels_do(kernel, padding, size, channels, seed) -> None:
    result, _ = layer(kernel, padding, 2, (*size, channels))
    rng = np.random.default_rng(seed)
    # Of very different sizes, so that a place which is left out or counted twice is seen.
    x = rng.normal(size=(1, *size, channels)) * 10 ** rng.uniform(-2, 2, (1, *size, 1))
    x = x.astype(np.float32)
    rows = np.asarray(result.rows(jnp.asarray(x)), np.float64)
    gram, terms = result.gram(jnp.asarray(x))
    invalid = products._error(gram, terms, rows.shape[1])
    assert np.all(np.abs(np.asarray(gram, np.float64) - rows @ rows.T) <= np.asarray(invalid))
    lengths = np.linalg.norm(rows, axis=1)
    assert np.all(np.asarray(invalid) <= 1e-4 * lengths[:, None] * lengths + 1e-12 * lengths.max())


@pytest.mark.slow
@pytest.mark.parametrize(("cancelled", "padding"), [(False, 1), (True, 0), (False, 0), (True, 1)])
def test_bound_from_pixels_is_bound(padding, cancelled) -> None:
    result, out = layer((3, 3), padding, 5, (6, 6, 40))
    rng = np.random.default_rng(7)
    x = rng.normal(size=(1, 6, 6, 40)).astype(np.float32)
    positions = out[1] * out[2]
    derivative = rng.normal(size=(positions, 5)).astype(np.float32)
    if cancelled:
        # What adds up to nearly nothing: the rounding is then larger than the norm.
        x = np.ones_like(x)
        derivative = derivative - derivative.mean(axis=0)
    rows = result.rows(jnp.asarray(x))
    exact = np.square(np.asarray(rows, np.float64).T @ derivative.astype(np.float64)).sum()
    by_pixels = products.square_bound(result, rows, jnp.asarray(derivative), jnp.asarray(x))
    by_patches = products.square_bound(result, rows, jnp.asarray(derivative))
    assert exact <= float(by_pixels) and exact <= float(by_patches)
    if not cancelled:
        assert float(by_pixels) <= exact * (1 + 2e-3)


def test_strides_and_groups_take_patches() -> None:
    x = jax.ShapeDtypeStruct((1, 6, 6, 4), jnp.float32)
    for options in ({"strides": 2}, {"groups": 2}, {"kernel_size": (1, 1)}):
        module = conv.Conv(4, **options)
        assert products.product(module, x).gram is None
