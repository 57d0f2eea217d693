"""One extreme record: the terms of all others stay as they are, bit for bit."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import _agents
from dpjax.learning.query import AgentQuery
from dpjax.models import cnn, layer_norms, losses, mlp
from dpjax.transforms import clipping

CLIP = 1.0


class Words(nn.Module):
    """An embedding and a dense layer: a word that is not in the vocabulary is not a number."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        return nn.Dense(3)(nn.tanh(nn.Embed(50, 64)(x)).reshape(*x.shape[:-1], -1))


class Saturated(nn.Module):
    """A layer in bfloat16 whose derivative is zero where its input is infinite there."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        return nn.Dense(3)(nn.tanh(nn.Dense(64, dtype=jnp.bfloat16)(x)))


class Logarithm(nn.Module):
    """A logarithm of what comes in, which numbers below zero do not have."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        return nn.Dense(3)(nn.Dense(64)(jnp.log(x)))


class Normal(nn.Module):
    """A layer norm between dense layers."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        return nn.Dense(3)(nn.relu(nn.LayerNorm()(nn.Dense(64)(x))))


class Convolved(nn.Module):
    """Convolutions of all kinds: plain, in groups, one a channel, transposed."""

    groups: int = 1
    transposed: bool = False

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        if self.transposed:
            x = nn.ConvTranspose(8, (3, 3), strides=(2, 2))(x)
        x = nn.Conv(8, (3, 3), feature_group_count=self.groups)(x)
        return nn.Dense(3)(nn.relu(x).reshape(*x.shape[:-3], -1))


class Flat(nn.Module):
    """A convolution over one axis, in groups."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        return nn.Dense(3)(nn.Conv(8, (3,), feature_group_count=4)(x).reshape(*x.shape[:-2], -1))


class Attention(nn.Module):
    """Self-attention of flax, and a mean over places."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        return nn.Dense(3)(nn.MultiHeadDotProductAttention(num_heads=2)(x, x).mean(-2))


MODELS = {
    "words": (Words(), (64,), (60,)),
    "saturated": (Saturated(), (64,), (3.4e38,)),
    "logarithm": (Logarithm(), (64,), (-0.2,)),
    "mlp": (mlp.MLP((64,), 3), (64,), (np.nan, np.inf, 3e38, 1e-45)),
    "normal": (Normal(), (64,), (np.nan, 3e38)),
    "cnn": (cnn.SmallCNN(), (28, 28, 1), (1e25, np.inf)),
    "convolution": (Convolved(), (8, 8, 8), (np.nan, 3e38)),
    "groups": (Convolved(2), (8, 8, 8), (np.nan, 3e38)),
    "channels": (Convolved(8), (8, 8, 8), (np.inf, 3e38)),
    "transposed": (Convolved(4, True), (4, 4, 8), (np.nan, 3e38)),
    "flat": (Flat(), (16, 8), (np.inf, 3e38)),
    "attention": (Attention(), (8, 16), (np.nan, 3e38)),
}


def task(name, records=72):
    """A model, its parameters, and positive records with labels."""
    model, shape, extremes = MODELS[name]
    rng = np.random.default_rng(0)
    x = rng.uniform(0.5, 1.5, (records, *shape)).astype(np.float32)
    if name == "words":
        x = rng.integers(0, 50, (records, *shape)).astype(np.int32)
    y = jnp.asarray(rng.integers(0, 3, records))
    params = jax.jit(model.init)(jax.random.key(0), jnp.asarray(x[:1]))
    return model, params, x, y, extremes


def sums(model, route):
    """``fn(params, x, y, is_padding)``: the sum of clipped gradients by one route."""
    if route.startswith("record"):
        loss = lambda params, x, y: losses.cross_entropy(model.apply(params, x[None])[0], y)  # noqa: E731
        options = {"microbatch": 24} if route == "record in passes" else {}
        return clipping.per_example(loss, CLIP, **options)
    gradients = layer_norms.Gradients(model.apply, losses.cross_entropy)
    return clipping.clipped_sum(
        gradients,
        CLIP,
        per_layer=route == "layer by layer",
        method="automatic" if route == "automatic" else "flat",
        microbatch=24 if route == "layers in passes" else None,
    )


def in_a_loop(fn):
    """The same sum inside a loop, which compilers lower by other rules."""

    def looped(params, *data):
        start = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.fori_loop(0, 2, lambda _, total: fn(params, *data), start)

    return looped


ROUTES = ["record", "record in passes", "layers", "layer by layer", "automatic", "layers in passes"]
GATE = {
    ("words", "layers"),
    ("logarithm", "layer by layer"),
    ("saturated", "layers"),
    ("mlp", "automatic"),
}


def squared_change(fn, params, x, y, extreme):
    """The squared norm by which an extreme number in a record moves the sum without the record."""
    padding = np.zeros(len(x), bool)
    padding[5] = True
    without = fn(params, jnp.asarray(x), y, jnp.asarray(padding))
    changed = x.copy()
    changed[5].flat[3] = extreme
    total = fn(params, jnp.asarray(changed), y, jnp.zeros(len(x), bool))
    pairs = zip(jax.tree.leaves(total), jax.tree.leaves(without), strict=True)
    return sum(float(np.sum((np.float64(a) - np.float64(b)) ** 2)) for a, b in pairs)


def cases():
    """A few for the gate, all of them and each in a loop among the slow tests."""
    for name in MODELS:
        for route in ROUTES:
            marks = [] if (name, route) in GATE else [pytest.mark.slow]
            yield pytest.param(name, route, False, marks=marks)
            yield pytest.param(name, route, True, marks=pytest.mark.slow)


@pytest.mark.gate(2)
@pytest.mark.optimized
@pytest.mark.parametrize(("name", "route", "loop"), list(cases()))
def test_extreme_record_adds_at_most_clip_norm(name, route, loop):
    """It changes the sum of all others by nothing but its own clipped term."""
    model, params, x, y, extremes = task(name)
    fn = sums(model, route)
    fn = jax.jit(in_a_loop(fn) if loop else fn)
    for extreme in extremes:
        assert squared_change(fn, params, x, y, extreme) <= CLIP**2, extreme


GROUPED = [
    "flat",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("groups", "transposed")),
]


@pytest.mark.mutant
@pytest.mark.optimized
@pytest.mark.parametrize("name", GROUPED)
def test_few_records_of_convolution_in_groups_do_not_meet(name, monkeypatch):
    """Of few records all gradients are one program outside of a loop, where XLA mixes groups."""
    model, params, x, y, extremes = task(name, 6)
    fn = jax.jit(sums(model, "record"))
    for extreme in extremes:
        assert squared_change(fn, params, x, y, extreme) <= CLIP**2, extreme
    monkeypatch.setattr(
        _agents, "vmap_isolated", lambda function, *trees: jax.vmap(function)(*trees)
    )
    fn = jax.jit(sums(model, "record"))
    changes = [squared_change(fn, params, x, y, extreme) for extreme in extremes]
    assert max(changes) > CLIP**2, changes


def test_convolutions_in_groups_stay_apart_under_further_map():
    """Of agents, or of a simulation's seeds: no gradient is of more groups than the model's."""
    model, params, x, y, _ = task("flat", 6)
    models = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), params)
    mapped = jax.vmap(sums(model, "record"))
    data = jnp.asarray(x).reshape(3, 2, *x.shape[1:]), y.reshape(3, 2)
    program = str(jax.make_jaxpr(mapped)(models, *data))
    assert set(re.findall(r"batch_group_count=(\d+)", program)) == {"1", "4"}


@pytest.mark.mutant
@pytest.mark.optimized
def test_agents_with_convolutions_in_groups_do_not_meet(monkeypatch):
    """Each has a kernel of its own, so that their convolutions are groups of one."""
    model, params, x, y, extremes = task("flat", 6)
    query = AgentQuery(
        lambda params, x, y: losses.cross_entropy(model.apply(params, x[None])[0], y),
        None,
        CLIP,
        "flat",
    )
    models = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), params)

    changed = x.copy()
    changed[5].flat[3] = extremes[0]

    def first_agents():
        """The answers of the agents whose records stay, before and after."""

        def answer(x):
            return query(models, (x.reshape(3, 2, *x.shape[1:]), y.reshape(3, 2), None)).total

        compiled = jax.jit(answer)
        return [[leaf[:2] for leaf in jax.tree.leaves(compiled(data))] for data in (x, changed)]

    before, after = first_agents()
    jax.tree.map(np.testing.assert_array_equal, before, after)
    monkeypatch.setattr(
        _agents, "vmap_isolated", lambda function, *trees: jax.vmap(function)(*trees)
    )
    before, after = first_agents()
    assert not all(map(np.array_equal, before, after))


def test_infinite_derivative_adds_nothing():
    """Of gradients at two points: each is finite, and ten billion times one of them is not."""
    model = mlp.MLP((4,), 3)
    shape = (6, 3, 8)
    x = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.5, shape), jnp.float32)
    y = jnp.arange(len(x))
    params = model.init(jax.random.key(0), x[:1])
    points = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 0.1]), params)

    def loss(outputs, y):
        size = jnp.where(y == 5, 1e30, 1.0)
        return size * jnp.sum(losses.cross_entropy(outputs, jnp.full(shape[1], y % 3)))

    routes = dict.fromkeys(("Dense_0", "Dense_1"), "norm")
    gradients = layer_norms.Gradients(model.apply, loss, routes)
    fn = jax.jit(clipping.clipped_sum(gradients.at_points((1e10, 1.0)), CLIP))
    total = fn(points, x, y, jnp.zeros(len(x), bool))
    without = fn(points, x[:5], y[:5], jnp.zeros(5, bool))
    for leaf, other in zip(jax.tree.leaves(total), jax.tree.leaves(without), strict=True):
        # Processors round sums of terms as large as the clip in different orders.
        np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=1e-7 * CLIP)


@pytest.mark.mutant
@pytest.mark.optimized
def test_largest_number_that_drops_nan_is_caught(monkeypatch):
    """The largest of 4,096 numbers, one of them nan, is a number on a CPU."""

    def by_size(activation, derivative):
        top = jnp.max(jnp.abs(derivative), initial=0)
        bounded = top * derivative.size < jnp.finfo(top.dtype).max / 8
        return activation, jnp.where(bounded, derivative, 0), bounded

    monkeypatch.setattr(layer_norms, "_bounded", by_size)
    model, params, x, y, (extreme,) = task("words")
    fn = jax.jit(sums(model, "layers"))
    assert not squared_change(fn, params, x, y, extreme) <= CLIP**2
