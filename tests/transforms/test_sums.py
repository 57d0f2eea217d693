"""Clipping by norms: the sum of the clipped records' gradients, and never more than the bound."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax import _numerics
from dpjax.models import conv, losses
from dpjax.models.layer_norms import Gradients
from dpjax.models.mlp import MLP
from dpjax.transforms import clipping

NETWORK = MLP(hidden=(16,), outputs=None, activation="relu")
WEIGHTED = Gradients(NETWORK.apply, losses.squared)


def one(params, x, y):
    return losses.squared(NETWORK.apply(params, x[None])[0], y)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(12, 8)), jnp.float32)
    return (
        jax.jit(NETWORK.init)(jax.random.key(0), x),
        x,
        jnp.asarray(3 * rng.normal(size=12), jnp.float32),
    )


def length(tree):
    flat = [np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)]
    return float(np.linalg.norm(np.concatenate(flat)))


@pytest.mark.parametrize(
    ("clip_norm", "method"), [(0.5, "flat"), (5.0, "automatic"), (1e6, "flat")]
)
def test_sum_is_that_of_per_example_clipping(batch, method, clip_norm):
    padding = jnp.arange(12) % 3 == 0
    got = jax.jit(clipping.clipped_sum(WEIGHTED, clip_norm, method=method))(*batch, padding)
    want = jax.jit(clipping.per_example(one, clip_norm, method=method))(*batch, padding)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * min(clip_norm, 5))


def test_no_record_exceeds_clip_norm(batch):
    """In float64, at clip norms that rounding would break; norms taken 1e-5 too small do."""
    params, x, y = batch

    def largest(clip_norm, understated=1.0):
        def weighted(params, x, y, weights):
            return WEIGHTED(params, x, y, lambda norms: weights(norms * understated))

        fn = jax.jit(clipping.clipped_sum(weighted, clip_norm))
        each = [fn(params, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
        return max(map(length, each)) / clip_norm

    for clip_norm in (1e-9, 0.3):
        assert 0.9999 < largest(clip_norm) <= 1
    assert largest(0.3, understated=1 - 1e-4) > 1


def test_padding_and_nan_add_exactly_zero(batch):
    params, x, y = batch
    fn = jax.jit(clipping.clipped_sum(WEIGHTED, 1.0))
    complete = fn(params, x[:8], y[:8])
    padding = jnp.arange(12) >= 8
    for replaced in (y, y.at[8:].set(1e30), y.at[8:].set(jnp.inf)):
        padded = fn(params, x, replaced, padding)
        for a, b in zip(jax.tree.leaves(padded), jax.tree.leaves(complete), strict=True):
            np.testing.assert_allclose(a, b, rtol=5e-5, atol=1e-7)
        nothing = fn(params, x, replaced, jnp.ones(12, bool))
        assert all(not np.any(leaf) for leaf in jax.tree.leaves(nothing))
    broken = fn(params, x, y.at[8:].set(jnp.nan))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(broken))
    assert length(fn(jax.tree.map(lambda leaf: leaf * jnp.inf, params), x, y)) == 0


def test_zeroing_record_moves_sum_by_clip_norm(batch):
    params, x, y = batch
    fn = jax.jit(clipping.clipped_sum(WEIGHTED, 0.25))
    complete = fn(params, x, y, jnp.zeros(12, bool))
    for record in range(12):
        reduced = fn(params, x, y, jnp.arange(12) == record)
        moved = length(jax.tree.map(lambda a, b: a - b, complete, reduced))
        assert 0.2 < moved <= 0.25 * (1 + 1e-5)


class Images(nn.Module):
    """A convolution, a norm and a dense layer: a formed gradient, plain ones, and a norm alone."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        x = nn.GroupNorm(2)(nn.tanh(conv.Conv(4, (2, 2), 2)(x)))
        return nn.Dense(3)(x.reshape(*x.shape[:-3], -1))


class Words(nn.Module):
    """An embedding, and a dense layer at every position."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        return nn.Dense(3)(nn.tanh(nn.Dense(4)(nn.Embed(7, 4)(x))).mean(-2))


NETWORKS = {"mlp": NETWORK, "images": Images(), "words": Words()}


@functools.cache
def known(name):
    """A network's parameters, examples, sum and per-example gradients, compiled once."""
    model = NETWORKS[name]
    rng = np.random.default_rng(0)
    shape = {"mlp": (8,), "images": (4, 4, 2), "words": (3,)}[name]
    if name == "words":
        x = jnp.asarray(rng.integers(0, 7, (6, *shape)), jnp.int32)
    else:
        x = jnp.asarray(rng.normal(size=(6, *shape)), jnp.float32)
    params = jax.jit(model.init)(jax.random.key(1), x)

    def loss(outputs, y):
        # Weighed by the label, which may be zero, huge, tiny or nan.
        return y * jnp.sum(jnp.sin(jnp.ravel(outputs)))

    def plain(params, x, y):
        return loss(model.apply(params, x[None])[0], y)

    return params, x, Gradients(model.apply, loss), plain


@functools.cache
def compiled(name, clip_norm, method, per_layer, understated=1.0):
    """Each example's own term, [b, ...]."""
    _, _, gradients, _ = known(name)
    if understated != 1:
        exact = gradients

        class Understated:
            at_once = exact.at_once
            like = exact.like
            by_layer = exact.by_layer
            __call__ = exact.__call__

            def wide(self, params, x, y, weights, **options):
                def lowered(norms, error):
                    return weights(norms * understated, error)

                return exact.wide(params, x, y, lowered, **options)

        gradients = Understated()
    fn = clipping.clipped_sum(gradients, clip_norm, method=method, per_layer=per_layer)

    def term(params, x, y):
        return fn(params, x[None], y[None])

    return jax.jit(lambda params, x, y: jax.lax.map(lambda b: term(params, *b), (x, y)))


def worst(name, clip_norm, method, per_layer, labels, scale=1.0, understated=1.0):
    """The longest term by its bound: the whole, and each layer's."""
    params, x, _, _ = known(name)
    params = jax.tree.map(lambda leaf: leaf * scale, params)
    y = jnp.asarray(labels, jnp.float32)
    terms = compiled(name, clip_norm, method, per_layer, understated)(params, x, y)
    squares = [
        np.sum(np.float64(leaf).reshape(len(leaf), -1) ** 2, axis=1)
        for leaf in jax.tree.leaves(terms)
    ]
    assert np.isfinite(squares).all()
    total = np.sqrt(np.sum(squares, axis=0)).max() / clip_norm
    if not per_layer:
        return total
    layers = _numerics.layer_groups(params)
    each = [np.sqrt(sum(squares[i] for i in layer)).max() for layer in layers]
    return max(total, max(each) * np.sqrt(len(layers)) / clip_norm)


LABELS = st.one_of(
    st.sampled_from([0.0, math.nan, math.inf, 1e-30, 3e38, 1.0]),
    st.floats(-38, 38).map(lambda power: 10.0**power),
)


FLAT = [(0.3, "flat", False), (0.3, "flat", True)]
AUTOMATIC = [(2.0, "automatic", True)]


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("name", "clips"),
    [
        ("mlp", FLAT),
        ("images", FLAT + AUTOMATIC),
        ("words", FLAT),
        pytest.param("mlp", AUTOMATIC, marks=pytest.mark.slow),
        pytest.param("words", AUTOMATIC, marks=pytest.mark.slow),
    ],
)
@given(
    data=st.data(),
    labels=st.lists(LABELS, min_size=6, max_size=6),
    scale=st.sampled_from([1.0, 0.0, 1e-12, 1e12, 1e25, math.nan]),
)
def test_no_term_is_longer_than_its_bound(name, clips, data, labels, scale):
    """Whatever the gradient: zero, not finite, or such that squares overflow or vanish."""
    assert worst(name, *data.draw(st.sampled_from(clips)), labels, scale) <= 1


@st.composite
def networks(draw):
    """A small network of drawn widths and image sizes, and its records' shape."""
    width = st.integers(1, 6)
    if draw(st.booleans()):
        hidden, outputs = draw(st.tuples(width, width))
        return MLP(hidden=(hidden,), outputs=outputs, activation="tanh"), (draw(width),)
    channels, outputs, kernel = draw(st.tuples(width, width, st.integers(1, 3)))
    sides = draw(st.tuples(st.integers(3, 5), st.integers(3, 5)))
    model = nn.Sequential(
        [
            conv.Conv(channels, (kernel, kernel), draw(st.integers(1, 2))),
            nn.tanh,
            lambda x: x.reshape(*x.shape[:-3], -1),
            nn.Dense(outputs),
        ]
    )
    return model, (*sides, draw(st.integers(1, 3)))


@pytest.mark.slow
@settings(max_examples=6)
@given(network=networks(), seed=st.integers(0, 9), per_layer=st.booleans())
def test_no_term_is_longer_than_its_bound_whatever_shapes(network, seed, per_layer):
    """Records whose gradients are none, not finite, huge, and plain ones that reach the bound."""
    model, shape = network
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(5, *shape)), jnp.float32)
    params = jax.jit(model.init)(jax.random.key(seed), x)
    gradients = Gradients(model.apply, lambda outputs, y: y * jnp.sum(jnp.sin(jnp.ravel(outputs))))
    y = jnp.asarray([1e5, 0.0, math.nan, math.inf, 1e30], jnp.float32)

    def longest(clip_norm):
        fn = clipping.clipped_sum(gradients, clip_norm, per_layer=per_layer)
        function = jax.jit(lambda x, y: jax.lax.map(lambda value: fn(params, *value), (x, y)))
        terms = function(x[:, None], y[:, None])
        leaves = [np.float64(leaf).reshape(len(y), -1) for leaf in jax.tree.leaves(terms)]
        return np.linalg.norm(np.concatenate(leaves, axis=1), axis=1)

    lengths = longest(0.3)
    assert lengths.max() <= 0.3 and lengths[1] == 0
    assert lengths[0] > 0.299


@pytest.mark.mutant
@pytest.mark.parametrize("per_layer", [False, True])
def test_terms_reach_bound(per_layer):
    """The test above is of something: bounds are met to 1e-4, and broken by 2e-4."""
    for name in NETWORKS:
        labels = [50.0, 1e3, 1e5, 0.0, 1e10, math.nan]
        assert worst(name, 0.3, "flat", per_layer, labels) > 1 - 1e-4
    assert worst("images", 0.3, "flat", per_layer, labels, understated=1 - 2e-4) > 1


@pytest.mark.mutant
def test_norm_that_lacks_biases_is_noticed(monkeypatch):
    """A broken twin: leaves of one axis are left out."""
    compiled.cache_clear()
    total = _numerics.square_sum
    monkeypatch.setattr(
        _numerics, "square_sum", lambda flat: total(flat) * (flat.size not in (3, 4, 16, 1))
    )
    assert worst("images", 0.3, "flat", False, [1e3] * 6) > 1 + 1e-3
    compiled.cache_clear()


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("name", "per_layer", "size"),
    [
        ("mlp", True, 4),
        ("images", False, None),
        ("words", False, 4),
        pytest.param("mlp", True, None, marks=pytest.mark.slow),
        pytest.param("images", True, 4, marks=pytest.mark.slow),
        pytest.param("words", False, None, marks=pytest.mark.slow),
    ],
)
def test_routes_agree_with_padding_and_in_passes(name, per_layer, size):
    params, x, gradients, plain = known(name)
    y = jnp.asarray([0.1, 1.0, 20.0, 3.0, 1.0, -5.0])
    padding = jnp.arange(6) == 3
    want = jax.jit(clipping.per_example(plain, 0.7, per_layer=per_layer))(params, x, y, padding)
    fn = clipping.clipped_sum(gradients, 0.7, per_layer=per_layer, microbatch=size)
    got = jax.jit(fn)(params, x, y, padding)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_empty_batch_sums_to_nothing():
    params, x, gradients, plain = known("words")
    for options in ({}, {"microbatch": 2}, {"per_layer": True}):
        got = clipping.clipped_sum(gradients, 0.7, **options)(params, x[:0], jnp.zeros(0))
        want = clipping.per_example(plain, 0.7)(params, x[:0], jnp.zeros(0))
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"clip_norm": float("nan")}, "clip_norm is nan"),
        ({"clip_norm": "1"}, "clip_norm is '1'"),
        ({"clip_norm": True}, "clip_norm is True"),
        ({"clip_norm": 1e-30}, "clip_norm is 1e-30"),
        ({"clip_norm": 1.0, "method": "Flat"}, "method is 'Flat'"),
        ({"clip_norm": 1.0, "per_layer": "no"}, "per_layer is 'no'"),
        ({"clip_norm": 1.0, "weighted": None}, "weighted is missing"),
        ({"clip_norm": 1.0, "weighted": len, "per_layer": True}, "by_layer"),
    ],
)
def test_what_clips_nothing_is_refused_before_it_is_called(options, text):
    with pytest.raises(ValueError, match=text):
        clipping.clipped_sum(**({"weighted": WEIGHTED} | options))


def test_batches_of_several_lengths_are_refused(batch):
    params, x, y = batch
    for size in (None, 5):
        fn = clipping.clipped_sum(WEIGHTED, 1.0, microbatch=size)
        for lengths in ((x, y[:5], None), (x, y, jnp.zeros(5, bool)), (x, y, jnp.ones(1, bool))):
            with pytest.raises(ValueError, match="give one count of examples"):
                fn(params, *lengths)
