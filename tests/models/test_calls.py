"""Layers that look like products and are none: sums are those of plain differentiation anyway."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.models import layer_norms, losses
from dpjax.models.layer_norms import Gradients
from dpjax.transforms import clipping

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(4, 8)), jnp.float32)
Y = jnp.array([0, 1, 2, 1], jnp.int32)
KEY = jax.random.key(0)


class Body(nn.Module):
    """A layer whose place in a model of its own is that of another model's first one."""

    @nn.compact
    def __call__(self, x):
        """Return its outputs."""
        return nn.tanh(nn.Dense(8)(x))


BODY = Body().init(jax.random.key(7), X)


class Backbone(nn.Module):
    """Another model is applied, with values of its own that stay as they are."""

    first: bool

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        if self.first:
            x = Body(parent=None).apply(BODY, x)
        x = nn.tanh(nn.Dense(8)(x))
        if not self.first:
            x = Body(parent=None).apply(BODY, x)
        return nn.Dense(3)(x)


class Shared(nn.Module):
    """A layer that has its parent's place."""

    def setup(self):
        """Make it."""
        self.dense = nn.Dense(8)
        nn.share_scope(self, self.dense)

    def __call__(self, x):
        """Return its outputs, and more."""
        return 3 * nn.tanh(self.dense(2 * x))


class SharedPlace(nn.Module):
    """A model with such a layer."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        return nn.Dense(3)(Shared()(x))


class Intercepted(nn.Module):
    """A model that changes what its layers do."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""

        def scaled(call, args, kwargs, context):
            if type(context.module) is nn.Dense and context.method_name == "__call__":
                return call(2 * args[0]) + 1
            return call(*args, **kwargs)

        with nn.intercept_methods(scaled):
            x = nn.tanh(nn.Dense(8)(x))
        return nn.Dense(3)(x)


MODELS = {
    "backbone first": Backbone(True),
    "backbone last": Backbone(False),
    "shared place": SharedPlace(),
    "intercepted": Intercepted(),
}


def plain(model, params, x, y, weight, loss=losses.cross_entropy):
    def one(params, x, y):
        return loss(model.apply(params, x[None])[0], y)

    function = jax.jit(jax.vmap(jax.grad(one), (None, 0, 0)))(params, x, y)
    return jax.tree.map(lambda leaf: weight * jnp.sum(leaf, axis=0), function)


def difference(value, other):
    pairs = zip(jax.tree.leaves(value), jax.tree.leaves(other), strict=True)
    return float(np.max([jnp.max(jnp.abs(a - b)) for a, b in pairs]))


def error(model):
    """How far the sum is from that of plain differentiation."""
    params = jax.jit(model.init)(KEY, X)
    gradients = Gradients(model.apply, losses.cross_entropy)
    assert "Dense_1" in gradients.chosen(params, X) or "Dense_0" in gradients.chosen(params, X)
    half = jax.jit(lambda p, x, y: gradients(p, x, y, lambda norms: jnp.full_like(norms, 0.5)))
    return difference(half(params, X, Y), plain(model, params, X, Y, 0.5))


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_plain_differentiation(name):
    assert error(MODELS[name]) < 1e-5


def test_layer_called_by_interceptor_is_not_model_s(monkeypatch):
    params = jax.eval_shape(Intercepted().init, KEY, X)
    gradients = Gradients(Intercepted().apply, losses.cross_entropy)
    assert gradients.chosen(params, X) == {"Dense_1": "norm"}
    # The broken twin believes the marks.
    monkeypatch.setattr(layer_norms, "_plain", lambda *args: True)
    assert error(Intercepted()) > 1e-3


def test_layers_are_numbered_by_call(monkeypatch):
    class Placed(nn.Module):
        """Two models of one place, side by side."""

        @nn.compact
        def __call__(self, x):
            """Return the logits."""
            other = Body(parent=None).apply(BODY, x)
            return nn.Dense(3)(nn.tanh(nn.Dense(8)(x)) + other)

    assert error(Placed()) < 1e-5
    # The broken copy takes the layer before.
    calls_of = Gradients._calls

    def shifted(gradients, params, x):
        calls = calls_of(gradients, params, x)
        return [call._replace(number=call.number - 1) for call in calls]

    monkeypatch.setattr(Gradients, "_calls", shifted)
    with pytest.raises((AssertionError, TypeError, ValueError)):
        assert error(Placed()) < 1e-5


class Words(nn.Module):
    """Sums of words, so that derivatives are finite where words are not."""

    count: int

    @nn.compact
    def __call__(self, x):
        """Return one number a text."""
        return jnp.sum(nn.Embed(self.count, 4)(x), axis=(1, 2))


def linear(outputs, y):
    return outputs * y


@pytest.mark.gate(2)
@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint16, np.int32])
def test_numbers_of_words_may_be_narrow(kind):
    model = Words(256)
    x = jnp.asarray([[1, 2, 1], [3, 127, 0]], kind)
    params = jax.jit(model.init)(KEY, x)
    gradients = Gradients(model.apply, linear)
    y = jnp.array([1.0, 2.0], jnp.float32)
    got = jax.jit(lambda *subject: gradients(*subject, lambda norms: jnp.ones_like(norms)))(
        params, x, y
    )
    # Some of XLA's compilers end the process at a gradient by rows of so narrow numbers.
    wide = x.astype(jnp.int32)
    assert difference(got, plain(model, params, wide, y, 1.0, linear)) < 1e-5


@pytest.mark.parametrize("words", [(2, -4), (-1, -4, 2), (3, 3), (-4, -7, 5)])
def test_words_that_there_are_not_keep_clip(words):
    # Three words: -1 is the last one; what is beyond has no row, and must not meet one.
    model = Words(3)
    x = jnp.asarray([words], jnp.int32)
    params = jax.jit(model.init)(KEY, x)
    fn = jax.jit(clipping.clipped_sum(Gradients(model.apply, linear), 0.1))
    total = fn(params, x, jnp.ones(1))
    term = np.float64(total["params"]["Embed_0"]["embedding"])
    assert np.isfinite(term).all()
    assert np.linalg.norm(term) <= 0.1
    expected = plain(model, params, x, jnp.ones(1), 1.0, linear)
    present = np.asarray(expected["params"]["Embed_0"]["embedding"])
    np.testing.assert_array_equal(term != 0, present != 0)


class Numbers(nn.Module):
    """A dense layer on whole numbers."""

    @nn.compact
    def __call__(self, x):
        """Return one number a record."""
        return nn.Dense(2)(x)[:, 0]


@pytest.mark.parametrize("route", ["norm", "formed", "plain"])
def test_overflow_of_whole_numbers_is_record_less(route):
    x = jnp.array([[2**30, 2**30], [1, 2]], jnp.int32)
    y = jnp.array([1e32, 1.0], jnp.float32)
    params = jax.jit(Numbers().init)(KEY, x)
    gradients = Gradients(Numbers().apply, linear, {"Dense_0": route})
    fn = jax.jit(clipping.clipped_sum(gradients, 1.0))
    total = fn(params, x, y)
    single = fn(params, x[1:], y[1:])
    assert difference(total, single) < 1e-6
    assert difference(single, jax.tree.map(jnp.zeros_like, single)) > 0.1


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda g: Gradients(g.apply, g.loss, None), "routes is missing"),
        (
            lambda g: Gradients(g.apply, g.loss, {"Dense": "norm"}),
            "routes names 'Dense'",
        ),
        (lambda g: g.at_points([]), "coefficients has shape"),
        (lambda g: g.at_points([float("nan")]), "coefficients holds nan"),
        (lambda g: g.at_points("ab"), "coefficients is not"),
    ],
)
def test_bad_input_is_named(result, text):
    params = jax.eval_shape(Numbers().init, KEY, jnp.ones((1, 2)))
    with pytest.raises(ValueError, match=text):
        result(Gradients(Numbers().apply, linear)).chosen(params, jnp.ones((1, 2)))
