"""Clipping by norms: the sum of the clipped records' gradients, and never more than the bound."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.models import losses
from dpjax.models.mlp import MLP, weighted_gradients
from dpjax.transforms import clipping, sums

NETWORK = MLP(hidden=(16,), outputs=None, activation="relu")
WEIGHTED = functools.partial(weighted_gradients, NETWORK, losses.squared)


def one(params, x, y):
    return losses.squared(NETWORK.apply(params, x[None])[0], y)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(12, 8)), jnp.float32)
    return NETWORK.init(jax.random.key(0), x), x, jnp.asarray(3 * rng.normal(size=12), jnp.float32)


def length(tree):
    flat = [np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)]
    return float(np.linalg.norm(np.concatenate(flat)))


@pytest.mark.parametrize("method", clipping.CLIPPINGS)
@pytest.mark.parametrize("clip_norm", [0.5, 5.0, 1e6])
def test_sum_is_that_of_the_per_example_clipping(batch, method, clip_norm):
    padding = jnp.arange(12) % 3 == 0
    got = sums.clipped_sum(WEIGHTED, clip_norm, method=method)(*batch, padding)
    want = clipping.per_example(one, clip_norm, method=method)(*batch, padding)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * min(clip_norm, 5))


def test_no_record_exceeds_the_clip_norm(batch):
    """In float64, at clip norms that rounding would break; norms taken 1e-5 too small do."""
    params, x, y = batch

    def largest(clip_norm, understated=1.0):
        def weighted(params, x, y, weights):
            return WEIGHTED(params, x, y, lambda norms: weights(norms * understated))

        fn = jax.jit(sums.clipped_sum(weighted, clip_norm))
        each = [fn(params, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
        return max(map(length, each)) / clip_norm

    for clip_norm in (1e-9, 0.1, 0.3, 1.0):
        assert 0.9999 < largest(clip_norm) <= 1
    assert largest(0.3, understated=1 - 1e-4) > 1


def test_padding_adds_exactly_zero_and_so_does_what_is_not_finite(batch):
    params, x, y = batch
    fn = sums.clipped_sum(WEIGHTED, 1.0)
    whole = fn(params, x[:8], y[:8])
    padding = jnp.arange(12) >= 8
    for replaced in (y, y.at[8:].set(1e30), y.at[8:].set(jnp.inf)):
        padded = fn(params, x, replaced, padding)
        for a, b in zip(jax.tree.leaves(padded), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        nothing = fn(params, x, replaced, jnp.ones(12, bool))
        assert all(not np.any(leaf) for leaf in jax.tree.leaves(nothing))
    broken = fn(params, x, y.at[8:].set(jnp.nan))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(broken))
    assert length(fn(jax.tree.map(lambda leaf: leaf * jnp.inf, params), x, y)) == 0


def test_zeroing_a_record_moves_the_sum_by_the_clip_norm_at_most(batch):
    params, x, y = batch
    fn = jax.jit(sums.clipped_sum(WEIGHTED, 0.25))
    whole = fn(params, x, y, jnp.zeros(12, bool))
    for record in range(12):
        less = fn(params, x, y, jnp.arange(12) == record)
        moved = length(jax.tree.map(lambda a, b: a - b, whole, less))
        assert 0.2 < moved <= 0.25 * (1 + 1e-5)
