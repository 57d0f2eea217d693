"""Weighted sums of per-example gradients of flax modules, by layers' inputs and derivatives."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.contrib import efficientnet, resnet, roberta, vit
from dpjax.models import cnn, conv, layer_norms, layers, linear, losses, mlp
from dpjax.models.layer_norms import Gradients
from tests.support import with_norms

KEY = jax.random.key(0)


class Narrow(nn.Module):
    """The five-layer network's parts, narrow, with flax's own convolution among them."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        x = nn.GroupNorm(2)(nn.tanh(conv.Conv(4, padding=1, layout="patches")(x)))
        x = nn.tanh(nn.Conv(6, (3, 3), 2, padding=[(1, 1), (1, 1)])(x))
        x = nn.tanh(conv.Conv(6, (2, 2), use_bias=False, standardize="scaled")(x))
        x = nn.tanh(nn.Conv(6, (2, 2), feature_group_count=3, padding="VALID")(x))
        return nn.DenseGeneral(3, axis=(-3, -2, -1))(x)


MODELS = {
    "mlp": (mlp.MLP((16,), 5), (8,)),
    "narrow": (Narrow(), (8, 8, 3)),
}
SLOW = {
    "roberta": (roberta.RoBERTa(2, 20, 12, width=16, depth=1, heads=2, hidden=24), (6,)),
    "vit": (vit.ViT(patch=4, width=32, depth=1, heads=4), (8, 8, 3)),
    "small_cnn": (cnn.SmallCNN(), (28, 28, 1)),
    "wide_resnet": (resnet.WideResNet(depth=10, width=1), (8, 8, 3)),
    "cnn5": (cnn.CNN5(), (16, 16, 3)),
    "efficientnet": (efficientnet.EfficientNet(stem_strides=1), (16, 16, 3)),
    "resnet": (resnet.ResNet(blocks=(1, 1)), (32, 32, 3)),
}
named = pytest.mark.parametrize(
    "name", [*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)


def task(name, count=5):
    """A network with parameters that are not those of its start, and examples."""
    model, shape = (MODELS | SLOW)[name]
    rng = np.random.default_rng(0)
    if name == "roberta":
        x = jnp.asarray(rng.integers(1, 20, (count, *shape)), jnp.int32)
    else:
        x = jnp.asarray(rng.normal(size=(count, *shape)), jnp.float32)
    params = jax.jit(model.init)(KEY, x)
    params = jax.tree.map(
        lambda leaf: leaf + jnp.asarray(0.05 * rng.normal(size=leaf.shape), leaf.dtype), params
    )
    return model, params, x, jnp.asarray(rng.integers(0, 2, count))


def one_by_one(model, params, x, y, loss=losses.cross_entropy):
    """Each example's gradient by plain differentiation."""

    def one(params, x, y):
        return loss(model.apply(params, x[None])[0], y)

    return jax.jit(jax.vmap(jax.grad(one), (None, 0, 0)))(params, x, y)


def lengths(value):
    return np.sqrt(
        sum(
            np.sum(np.float64(leaf).reshape(len(leaf), -1) ** 2, 1)
            for leaf in jax.tree.leaves(value)
        )
    )


def weighted_sum(value, weights):
    return jax.tree.map(lambda leaf: np.tensordot(weights, np.float64(leaf), 1), value)


def check_close(got, want, tolerance):
    """Entries relative to the largest one: the sum of terms that cancel has no relative error."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    top = max(np.abs(leaf).max() for leaf in jax.tree.leaves(want))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * top)


def run(gradients, params, x, y, scale):
    """The sum with weights scale / (scale + norm), and the norms."""
    return with_norms(gradients, params, x, y, lambda norms: scale / (scale + norms))


@pytest.mark.gate(1)
@named
def test_sums_and_norms_are_those_of_plain_differentiation(name):
    model, params, x, y = task(name)
    each = one_by_one(model, params, x, y)
    norms = lengths(each)
    total, observed = run(Gradients(model.apply, losses.cross_entropy), params, x, y, norms[0])
    # Never below, but for the rounding of plain gradients; above by what is added for safety.
    assert np.all(observed >= norms * (1 - 4e-6))
    np.testing.assert_allclose(observed, norms, rtol=3e-5)
    # The same norms: what remains is the sum's.
    weights = norms[0] / (norms[0] + np.float64(observed))
    check_close(total, weighted_sum(each, weights), 1e-5)


def test_linear_score_skips_infinite_records():
    model = linear.Linear()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 300)).astype(np.float32)
    x[1, 3] = np.nan
    x[2, 5] = -np.inf
    x[3] = 1e30
    x[4] = 3e38
    x = jnp.asarray(x)
    y = jnp.asarray(rng.choice([-1.0, 1.0], 8))
    params = {"params": {"weight": jnp.asarray(rng.normal(size=300)), "bias": jnp.float32(0.1)}}
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    gradients = Gradients(model.apply, losses.logistic)
    assert gradients.chosen(params, x) == {"": "norm"}
    total, observed = run(gradients, params, x, y, 1.0)
    good = np.array([0, 5, 6, 7])
    assert not np.isfinite(np.delete(observed, good)).any()
    each = one_by_one(model, params, x[good], y[good], losses.logistic)
    norms = lengths(each)
    assert np.all(observed[good] >= norms) and np.all(observed[good] <= norms * (1 + 1e-4))
    check_close(total, weighted_sum(each, 1 / (1 + np.float64(observed[good]))), 1e-5)


def test_rule_and_caller_choose_what_is_formed():
    """2 t^2 <= p d: 64 positions of a kernel of 108 numbers are formed, one position is not."""
    model, params, x, _ = task("narrow", 1)
    gradients = Gradients(model.apply, losses.cross_entropy)
    assert gradients.chosen(params, x) == {
        "Conv_0": "formed",
        "Conv_1": "formed",
        "Conv_2": "formed",
        "Conv_3": "formed",
        "DenseGeneral_0": "norm",
    }
    big = mlp.MLP((64,), 2)
    params = jax.eval_shape(big.init, KEY, jnp.zeros((1, 9, 4)))
    for positions, first in ((11, "norm"), (12, "formed")):  # 2 * 121 <= 4 * 64 < 2 * 144
        x = jax.ShapeDtypeStruct((1, positions, 4), jnp.float32)
        result = Gradients(big.apply, losses.cross_entropy).chosen(params, x)
        assert result == {"Dense_0": first, "Dense_1": "norm" if positions < 9 else "formed"}
    request = Gradients(big.apply, losses.cross_entropy, {"Dense_0": "norm", "Dense_1": "plain"})
    assert request.chosen(params, x) == {"Dense_0": "norm"}
    with pytest.raises(ValueError, match=r"routes\['a'\] is 'ghost'; choose one of norm, formed"):
        Gradients(big.apply, losses.cross_entropy, {"a": "ghost"})


@pytest.mark.parametrize("route", layer_norms.ROUTES)
def test_routes_agree(route):
    model = mlp.MLP((4,), 3)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(6, 5, 2)), jnp.float32)
    y = jnp.asarray(rng.integers(0, 3, (6, 5)))

    def loss(outputs, y):
        return jnp.sum(losses.cross_entropy(outputs, y))

    params = jax.jit(model.init)(KEY, x)
    each = one_by_one(model, params, x, y, loss)
    gradients = Gradients(model.apply, loss, dict.fromkeys(("Dense_0", "Dense_1"), route))
    total, norms = run(gradients, params, x, y, 1.0)
    np.testing.assert_allclose(norms, lengths(each), rtol=1e-5)
    check_close(total, weighted_sum(each, 1 / (1 + lengths(each))), 1e-5)


class Body(nn.Module):
    """What one step of a scan does."""

    @nn.compact
    def __call__(self, carry, _):
        """Return the next state."""
        return nn.tanh(nn.Dense(3)(carry)), None


class Odd(nn.Module):
    """A dense layer that is known, and something else that is not."""

    kind: str

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        first = nn.Dense(3, name="known")
        x = nn.tanh(first(x))
        if self.kind == "twice":
            layer = nn.Dense(3, name="odd")
            x = layer(nn.tanh(layer(x)))
        elif self.kind == "elsewhere":
            layer = nn.Dense(3, name="odd")
            x = layer(x) + 0.1 * jnp.sum(layer.variables["params"]["kernel"] ** 2)
        elif self.kind == "remat":
            x = nn.remat(nn.Dense)(3, name="odd")(x)
        elif self.kind == "jit":
            x = nn.jit(nn.Dense)(3, name="odd")(x)
        elif self.kind == "scan":
            steps = nn.scan(
                Body, variable_broadcast="params", split_rngs={"params": False}, length=2
            )
            x = steps(name="odd")(x, None)[0]
        elif self.kind == "scan-stacked":
            steps = nn.scan(
                Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )
            x = steps(name="odd")(x, None)[0]
        elif self.kind == "vmap":
            many = nn.vmap(nn.Dense, variable_axes={"params": None}, split_rngs={"params": False})
            x = many(3, name="odd")(jnp.stack([x, x**2])).sum(0)
        elif self.kind == "vmap-stacked":
            many = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})
            x = many(3, name="odd")(jnp.stack([x, x**2])).sum(0)
        elif self.kind == "weight-norm":
            x = nn.WeightNorm(nn.Dense(3, name="odd"))(x)
        elif self.kind == "mapped":
            mapped = nn.map_variables(
                nn.Dense, "params", lambda tree: jax.tree.map(jnp.sin, tree), init=True
            )
            x = mapped(3, name="odd")(x)
        elif self.kind == "subclass":
            x = Doubled(3, name="odd")(x)
        elif self.kind == "cond":
            layer = nn.Dense(3, name="odd")
            x = nn.cond(jnp.sum(x) > 0, lambda m, x: m(x), lambda m, x: m(2 * x), layer, x)
        elif self.kind == "keyword":
            x = nn.Dense(3, name="odd")(inputs=x)
        elif self.kind == "tied":
            words = nn.Embed(3, 3, name="odd")
            x = words.attend(x + words(jnp.argmax(x, axis=-1)))
        return x


class Doubled(nn.Dense):
    """Not the layer whose gradient is known."""

    @nn.compact
    def __call__(self, x):
        """Return twice the kernel's product."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        return 2 * x @ kernel


ODD = [
    *("twice", "elsewhere", "remat", "jit", "scan", "scan-stacked", "vmap", "vmap-stacked"),
    *("weight-norm", "mapped", "subclass", "cond", "keyword", "tied"),
]


def odd_task(kind):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(4, 2)), jnp.float32)
    model = Odd(kind)
    params = jax.tree.map(lambda leaf: leaf + np.float32(0.1), jax.jit(model.init)(KEY, x))
    return model, params, x, jnp.arange(4) % 3


@pytest.mark.parametrize("kind", ODD)
def test_layers_called_twice_have_no_layer_norms(kind):
    model = Odd(kind)
    x = jnp.ones((4, 2))
    params = jax.eval_shape(model.init, KEY, x)
    gradients = Gradients(model.apply, losses.cross_entropy)
    assert set(gradients.chosen(params, x)) == {"known"}


@pytest.mark.parametrize(
    "kind",
    [item if item in ("twice", "vmap") else pytest.param(item, marks=pytest.mark.slow)
     for item in ODD],
)  # fmt: skip
def test_what_is_not_tapped_is_differentiated_plainly(kind):
    model, params, x, y = odd_task(kind)
    gradients = Gradients(model.apply, losses.cross_entropy)
    each = one_by_one(model, params, x, y)
    total, norms = run(gradients, params, x, y, 1.0)
    np.testing.assert_allclose(norms, lengths(each), rtol=1e-5)
    check_close(total, weighted_sum(each, 1 / (1 + lengths(each))), 1e-5)


@pytest.mark.mutant
def test_layer_called_twice_and_counted_once_is_noticed(monkeypatch):
    """The broken twin of the test above."""
    # Of the three calls, the second is of the layer that the third calls again.
    monkeypatch.setattr(layer_norms, "_alone", lambda program, call: call.number < 2)
    with pytest.raises(AssertionError):
        test_what_is_not_tapped_is_differentiated_plainly("twice")


KINDS = [jnp.float32, jnp.bfloat16, jnp.float16]


def half_task(kind):
    """Derivatives near 1e-5, whose squares are zero in 16 bits, beside inputs near 100."""
    rng = np.random.default_rng(2)
    model = mlp.MLP((3,), 2, "relu")
    x = jnp.asarray(100 * rng.normal(size=(5, 4)), kind)
    params = jax.jit(model.init)(KEY, jnp.zeros((1, 4)))
    params = jax.tree.map(lambda leaf: leaf.astype(kind), params)

    def loss(outputs, y):
        return 1e-5 * jnp.sum(outputs * (1 + y)).astype(jnp.float32)

    return model, loss, params, x, jnp.arange(5)


@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_narrow_numbers_do_not_underflow(kind):
    model, loss, params, x, y = half_task(kind)
    want = lengths(one_by_one(model, params, x, y, loss))
    total, norms = run(Gradients(model.apply, loss), params, x, y, 1.0)
    assert {leaf.dtype for leaf in jax.tree.leaves(total)} == {jnp.dtype(kind)}
    assert 1e-5 < want.min() < want.max() < 0.05
    # Plain gradients themselves are rounded to 16 bits.
    np.testing.assert_allclose(norms, want, rtol=1e-5 if kind == jnp.float32 else 0.05)


@pytest.mark.mutant
def test_norms_taken_in_16_bits_are_noticed(monkeypatch):
    """The broken twin of the test above."""
    monkeypatch.setattr(layer_norms._numerics, "wide_dtype", lambda tree: jnp.float16)
    with pytest.raises(AssertionError):
        test_norms_of_narrow_numbers_do_not_underflow(jnp.float16)


class Small(nn.Module):
    """A convolution and a dense layer."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        x = nn.tanh(conv.Conv(2, (2, 2), 2)(x))
        return nn.Dense(3)(x.reshape(len(x), -1))


def test_agents_are_mapped_over():
    model = Small()
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 3, 4, 4, 1)), jnp.float32)
    y = jnp.asarray(rng.integers(0, 3, (2, 3)))
    params = jax.jit(jax.vmap(model.init, (0, None)))(jax.random.split(KEY), x[0])
    gradients = Gradients(model.apply, losses.cross_entropy)

    def of_agent(params, x, y):
        return gradients(params, x, y, lambda norms: 1 / (1 + norms))

    mapped = jax.jit(jax.vmap(of_agent))(params, x, y)
    for agent in range(2):
        own = jax.tree.map(lambda leaf, agent=agent: leaf[agent], params)
        each = one_by_one(model, own, x[agent], y[agent])
        got = jax.tree.map(lambda leaf, agent=agent: leaf[agent], mapped)
        check_close(got, weighted_sum(each, 1 / (1 + lengths(each))), 1e-5)


def test_large_batches_run_in_even_passes(monkeypatch):
    model, params, x, _ = task("mlp", 5)
    gradients = Gradients(model.apply, losses.cross_entropy)
    assert gradients.at_once(params, x) is None
    # 8 and 16 numbers come in, 16 and 5 come out: 46 with one to spare.
    for held, size in ((5 * 46, None), (5 * 46 - 1, 3), (2 * 46, 2), (45, 1)):
        monkeypatch.setattr(layer_norms, "_HELD", held)
        assert gradients.at_once(params, x) == (size if jax.default_backend() == "cpu" else None)


class Pooled(nn.Module):
    """A convolution whose patches overlap, pooled: what a kernel sees first."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        x = layers.max_pool(nn.tanh(conv.Conv(3, (3, 3), padding=1)(x)), 2, 1)
        return nn.Dense(2)(x.reshape(len(x), -1))


@pytest.mark.parametrize(
    ("wide", "tolerance"), [pytest.param(False, 1e-5, marks=pytest.mark.slow), (True, 1e-13)]
)
def test_first_kernel_is_as_exact_as_precision(wide, tolerance):
    """By both routes, in both precisions; whole numbers make ties that pooling must break alike."""
    with jax.enable_x64(wide):
        kind = jnp.float64 if wide else jnp.float32
        rng = np.random.default_rng(3)
        model = Pooled()
        x = jnp.asarray(rng.integers(0, 3, (3, 5, 5, 2)), kind)
        params = jax.tree.map(lambda leaf: leaf.astype(kind), jax.jit(model.init)(KEY, x))
        y = jnp.arange(3) % 2
        each = one_by_one(model, params, x, y)
        for route in ("norm", "formed"):
            gradients = Gradients(model.apply, losses.cross_entropy, {"Conv_0": route})
            assert gradients.chosen(params, x)["Conv_0"] == route
            total, norms = run(gradients, params, x, y, 1.0)
            np.testing.assert_allclose(norms, lengths(each), rtol=tolerance)
            want = weighted_sum(each, 1 / (1 + lengths(each)))
            check_close(total["params"]["Conv_0"], want["params"]["Conv_0"], tolerance)
            assert total["params"]["Conv_0"]["kernel"].dtype == kind
