"""Networks for images: their sizes, counted from published tables, and one example at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.contrib import efficientnet, resnet, vit
from dpjax.models import cnn, conv, products


def size(model, *shape, dtype=jnp.float32):
    """Parameters, counted without computing any."""
    example = jax.ShapeDtypeStruct((2, *shape), dtype)
    shapes = jax.eval_shape(model.init, jax.random.key(0), example)
    assert set(shapes) == {"params"}, "no running statistics"
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def kernels(rows, bias=True):
    """Parameters of convolutions (side, inputs, outputs), or dense layers (1, ...)."""
    return sum(k * k * i * o + bias * o for k, i, o in rows)


def test_cnn5_has_its_table_s_parameters():
    widths = [3, 32, 64, 128, 256, 10]
    rows = [(3, i, o) for i, o in zip(widths, widths[1:], strict=False)]
    want = kernels(rows) + 2 * sum(widths[1:-1])
    assert want == 412_426 == size(cnn.CNN5(), 32, 32, 3)
    extra = kernels([(3, 256, 100)]) - kernels([(3, 256, 10)])
    assert size(cnn.CNN5(classes=100), 32, 32, 3) == want + extra


def test_small_cnn_has_26_010_parameters():
    # 28 by 2 to 14, pooled to 13, 4x4 by 2 to 5, pooled to 4.
    want = kernels([(8, 1, 16), (4, 16, 32), (1, 4 * 4 * 32, 32), (1, 32, 10)])
    assert want == 26_010 == size(cnn.SmallCNN(), 28, 28, 1)


@pytest.mark.parametrize(("depth", "published"), [(16, 2.75e6), (40, 8.95e6)])
def test_wide_resnets_have_published_size(depth, published):
    """2.7 and 8.9 million; gains, biases and norms on skip paths add a few thousand."""

    def convolution(k, i, o):
        return k * k * i * o + 2 * o  # Bias and gain.

    want = convolution(3, 3, 16)
    channels = 16
    for features in (64, 128, 256):
        for _ in range((depth - 4) // 6):
            if channels != features:
                want += 2 * channels + convolution(1, channels, features)
            want += 2 * channels + convolution(3, channels, features)
            want += 2 * features + convolution(3, features, features)
            channels = features
    want += 2 * 256 + 256 * 10 + 10
    assert size(resnet.WideResNet(depth=depth), 32, 32, 3) == want
    assert abs(want / published - 1) < 2e-3


def test_resnet_50_has_published_size():
    """23.5 million without the head, 25.55 with 1,000 classes."""
    want = 7 * 7 * 3 * 64
    channels = 64
    for inner, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for index in range(blocks):
            if index == 0:
                want += channels * 4 * inner
            want += 2 * channels + channels * inner
            want += 2 * inner + 9 * inner * inner
            want += 2 * inner + inner * 4 * inner
            channels = 4 * inner
    want += 2 * 2048
    assert want == 23_500_352
    assert size(resnet.ResNet(classes=1000), 224, 224, 3) == want + 2049 * 1000 == 25_549_352
    small = size(resnet.ResNet(classes=10, stem="small"), 32, 32, 3)
    assert small == want + 2049 * 10 - (49 - 9) * 3 * 64


def test_efficientnet_b0_has_published_size():
    """5.3 million: kernels without bias, two numbers a channel of each norm, and the squeezes."""
    want = 9 * 3 * 32 + 2 * 32
    channels = 32
    for expansion, side, features, blocks in (
        (1, 3, 16, 1),
        (6, 3, 24, 2),
        (6, 5, 40, 2),
        (6, 3, 80, 3),
        (6, 5, 112, 3),
        (6, 5, 192, 4),
        (6, 3, 320, 1),
    ):
        for _ in range(blocks):
            wide = expansion * channels
            few = channels // 4
            if expansion > 1:
                want += channels * wide + 2 * wide
            want += side * side * wide + 2 * wide
            want += wide * few + few + few * wide + wide
            want += wide * features + 2 * features
            channels = features
    want += 320 * 1280 + 2 * 1280 + 1281 * 1000
    assert want == 5_288_548 == size(efficientnet.EfficientNet(classes=1000), 224, 224, 3)


def test_vit_small_has_published_size():
    d = 384
    block = 4 * d + 3 * (d * d + d) + d * d + d + 4 * d * d + 4 * d + 4 * d * d + d
    rest = 16 * 16 * 3 * d + d + d + 197 * d + 2 * d + 1000 * (d + 1)
    want = 12 * block + rest
    assert want == 22_050_664 == size(vit.ViT(classes=1000), 224, 224, 3)
    small = vit.ViT(classes=10, patch=4)
    fewer = (16 * 16 - 4 * 4) * 3 * d + (197 - 65) * d + 990 * (d + 1)
    assert size(small, 32, 32, 3) == want - fewer


SMALL = {
    "cnn5": (cnn.CNN5(), (16, 16, 3)),
    "small_cnn": (cnn.SmallCNN(), (28, 28, 1)),
    "wide_resnet": (resnet.WideResNet(depth=10, width=1), (8, 8, 3)),
    "resnet": (resnet.ResNet(blocks=(1, 1), stem="small"), (8, 8, 3)),
    "resnet_large": (resnet.ResNet(blocks=(1,)), (16, 16, 3)),
    "vit": (vit.ViT(patch=4, width=32, depth=1, heads=4), (8, 8, 3)),
    "efficientnet": (efficientnet.EfficientNet(stem_strides=1), (16, 16, 3)),
}


def start(name, dtype=np.float32, examples=2):
    """A model, random parameters (a head of zeros would hide everything) and images."""
    model, shape = SMALL[name]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(examples, *shape)).astype(dtype)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)

    def draw(path, leaf):
        if path[-1].key in ("scale", "gain"):
            return rng.uniform(0.5, 1.5, leaf.shape).astype(dtype)
        scale = np.sqrt(1 / max(1, np.prod(leaf.shape[:-1])))
        return rng.normal(0, scale if len(leaf.shape) > 1 else 0.1, leaf.shape).astype(dtype)

    return model, jax.tree.map_with_path(draw, shapes), x


@pytest.mark.parametrize(
    "name",
    [
        item if item in ("small_cnn", "wide_resnet") else pytest.param(item, marks=pytest.mark.slow)
        for item in SMALL
    ],
)
def test_example_s_logits_are_its_own(name):
    """Nothing of the other examples of a batch enters."""
    model, params, x = start(name)
    apply = jax.jit(model.apply)
    pair = apply(params, x)
    assert pair.shape == (2, 10) and np.isfinite(pair).all()
    assert np.abs(pair[0] - pair[1]).max() > 1e-3
    other = apply(params, np.stack([x[0], 5 * x[1] + 3]))
    np.testing.assert_allclose(other[0], pair[0], rtol=1e-5, atol=1e-6)
    assert np.abs(other[1] - pair[1]).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [("cnn5", "patches"), ("small_cnn", "patches"), ("wide_resnet", "patches")],
)
def test_layouts_of_network_agree_in_double_precision(name, layout):
    """Value and per-example gradients; in float32 a pool might choose another of two equals."""
    with jax.enable_x64(True):
        model, params, x = start(name, np.float64)

        def gradients(layout):
            other = model.clone(layout=layout)

            def loss(params, value):
                return jax.nn.logsumexp(other.apply(params, value[None]))

            return jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))(params, x)

        got = gradients(layout)
        want = gradients("conv")
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9)


def test_wrong_sizes_are_refused():
    for model, shape, message in [
        (resnet.WideResNet(depth=18), (8, 8, 3), "depth is 18; give 6 k"),
        (resnet.ResNet(stem="tiny"), (8, 8, 3), "stem is 'tiny'"),
        (vit.ViT(patch=5), (32, 32, 3), "patch is 5; give a divisor"),
        (vit.ViT(heads=7), (32, 32, 3), "heads is 7; give a divisor"),
        (cnn.CNN5(layout="best"), (32, 32, 3), "layout is 'best'"),
    ]:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, *shape)))


def by_numpy(params, x):
    """CNN5 in plain numpy, float64."""

    def convolution(layer, x):
        x = np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
        shape = (len(x), x.shape[1] - 2, x.shape[2] - 2, layer["kernel"].shape[3])
        out = np.broadcast_to(layer["bias"], shape).astype(np.float64)
        for i in range(3):
            for j in range(3):
                out = out + x[:, i : i + shape[1], j : j + shape[2]] @ layer["kernel"][i, j]
        return out

    def norm(layer, x):
        n, h, w, c = x.shape
        groups = x.reshape(n, h * w, 16, c // 16)
        mean = groups.mean(axis=(1, 3), keepdims=True)
        deviation = np.sqrt(groups.var(axis=(1, 3), keepdims=True) + 1e-5)
        return ((groups - mean) / deviation).reshape(x.shape) * layer["scale"] + layer["bias"]

    for index in range(4):
        x = np.tanh(convolution(params[f"Conv_{index}"], x))
        if index < 3:
            n, h, w, c = x.shape
            x = x.reshape(n, h // 2, 2, w // 2, 2, c).max(axis=(2, 4))
        x = norm(params[f"GroupNorm_{index}"], x)
    return convolution(params["Conv_4"], x).mean(axis=(1, 2))


def test_cnn5_is_its_description():
    model, params, x = start("cnn5")
    params64 = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    want = by_numpy(params64["params"], x.astype(np.float64))
    np.testing.assert_allclose(jax.jit(model.apply)(params, x), want, rtol=1e-3, atol=1e-5)


def test_plain_and_standardised_layer_are_two_kinds():
    """What knows the one must not take the other for it: their kernels are used differently."""
    x = jnp.ones((1, 4, 4, 2))
    plain, standardized = (conv.Conv(3, standardize=name) for name in ("no", "scaled"))
    for layer, names in ((plain, ("kernel",)), (standardized, ("kernel", "gain"))):
        product = products.product(layer, x)
        assert product.names == names
