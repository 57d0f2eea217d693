"""Convolutions: flax's parameters and numbers, in two layouts, and standardised kernels."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.models import conv, layers

CASES = [
    # Size, channels, features, kernel, strides, padding, groups.
    ((7, 6), 3, 8, (3, 3), 1, "SAME", 1),
    ((8, 7), 3, 4, (3, 2), 2, "SAME", 1),
    ((9, 9), 4, 6, (3, 3), 2, 1, 2),
    ((28, 28), 1, 4, (8, 8), 2, "SAME", 1),
    ((13, 13), 2, 4, (4, 4), 2, "VALID", 1),
    ((8, 8), 6, 6, (5, 5), 2, "SAME", 6),
    ((6, 6), 4, 8, (3, 3), 1, 1, 4),
    ((8, 8), 3, 5, (1, 1), 2, 0, 1),
    ((8, 8), 3, 5, (4, 4), 4, "VALID", 1),
]


run = jax.jit(conv.convolve, static_argnums=(2, 3, 4, 5))


def arrays(size, channels, features, kernel, groups, dtype, front=(2,)):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(*front, *size, channels)).astype(dtype)
    return x, rng.normal(size=(*kernel, channels // groups, features)).astype(dtype)


def by_shape(x, kernel, *options):
    return jax.eval_shape(lambda x, kernel: conv.convolve(x, kernel, *options), x, kernel)


def by_hand(x, kernel, strides, pads, groups):
    """The sum, place by place, in float64."""
    x = np.pad(x.astype(np.float64), [(0, 0), *pads, (0, 0)])
    rows, columns, inside, features = kernel.shape
    high = (x.shape[1] - rows) // strides + 1
    wide = (x.shape[2] - columns) // strides + 1
    out = np.zeros((len(x), high, wide, features))
    for p in range(high):
        for q in range(wide):
            part = x[:, p * strides : p * strides + rows, q * strides : q * strides + columns]
            for o in range(features):
                first = o // (features // groups) * inside
                observed = part[..., first : first + inside]
                out[:, p, q, o] = (observed * kernel[..., o]).sum(axis=(1, 2, 3))
    return out


def same(size, window, strides):
    """What SAME pads: output of ceil(size / strides), the odd zero at the end."""
    pads = []
    for length, wide in zip(size, window, strict=True):
        total = max(0, (-(-length // strides) - 1) * strides + wide - length)
        pads.append((total // 2, total - total // 2))
    return pads


@pytest.mark.parametrize("layout", conv.LAYOUTS)
@pytest.mark.parametrize(
    ("size", "channels", "features", "kernel", "strides", "padding", "groups"), CASES
)
def test_each_layout_is_sum(layout, size, channels, features, kernel, strides, padding, groups):
    x, weight = arrays(size, channels, features, kernel, groups, np.float32)
    pads = same(size, kernel, strides) if padding == "SAME" else [(0, 0)] * 2
    pads = [(padding, padding)] * 2 if isinstance(padding, int) else pads
    got = run(x, weight, strides, padding, groups, layout)
    want = by_hand(x, weight, strides, pads, groups)
    assert got.shape == want.shape and got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "channels", "features", "kernel", "strides", "padding", "groups"),
    [*CASES[::2], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1::2])],
)
def test_layouts_have_one_gradient(size, channels, features, kernel, strides, padding, groups):
    """Per example, by kernel and by input: in float64 equal to its rounding."""
    with jax.enable_x64(True):
        x, weight = arrays(size, channels, features, kernel, groups, np.float64)
        outputs = by_shape(x, weight, strides, padding, groups).shape
        d = np.random.default_rng(1).normal(size=outputs)

        def gradients(layout):
            def loss(weight, x, d):
                out = conv.convolve(x, weight, strides, padding, groups, layout)
                return jnp.sum(jnp.tanh(out) * d)

            return jax.jit(jax.vmap(jax.grad(loss, (0, 1)), (None, 0, 0)))(weight, x, d)

        want = gradients("conv")
        for a, b in zip(gradients("patches"), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", conv.LAYOUTS)
@pytest.mark.parametrize("groups", [1, 4])
def test_layer_has_flax_s_parameters_and_numbers(layout, groups):
    ours = conv.Conv(8, (3, 3), 2, 1, groups=groups, layout=layout)
    flax = nn.Conv(8, (3, 3), 2, padding=1, feature_group_count=groups)
    x = arrays((9, 8), 4, 8, (3, 3), 1, np.float32)[0]
    params, theirs = (jax.jit(case.init)(jax.random.key(0), x) for case in (ours, flax))
    assert jax.tree.structure(params) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(ours.apply(params, x), flax.apply(params, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", conv.LAYOUTS)
def test_any_axes_may_be_in_front(layout):
    x, kernel = arrays((6, 6), 2, 3, (3, 3), 1, np.float32, front=(2, 3))
    complete = conv.convolve(x, kernel, layout=layout)
    assert complete.shape == (2, 3, 6, 6, 3)
    convolution = conv.convolve(x[1, 2], kernel, layout=layout)
    np.testing.assert_allclose(convolution, complete[1, 2], rtol=1e-5, atol=1e-6)


def test_images_of_bytes_are_taken_as_kernel_s_numbers():
    x = np.full((1, 4, 4, 1), 200, np.uint8)
    out = conv.convolve(x, np.ones((3, 3, 1, 1), np.float32), padding="VALID")
    np.testing.assert_array_equal(out, np.full((1, 2, 2, 1), 1800.0))


@pytest.mark.parametrize("mode", ["plain", "scaled"])
def test_standardised_kernels_are_their_formula(mode):
    """As the two papers' codes write it: with and without the fan-in, gain and bias."""
    scaled = mode == "scaled"
    layer = conv.Conv(4, padding="VALID", standardize=mode)
    x = arrays((5, 5), 3, 4, (3, 3), 1, np.float32)[0]
    params = layer.init(jax.random.key(0), x)["params"]
    assert set(params) == {"kernel", "bias"} | ({"gain"} if scaled else set())
    rng = np.random.default_rng(2)
    params = {name: rng.normal(size=leaf.shape) for name, leaf in params.items()}
    flat = params["kernel"].reshape(27, 4)
    kernel = (flat - flat.mean(0)) / flat.std(0)
    if scaled:
        kernel = params["gain"] * kernel / np.sqrt(27)
    want = by_hand(x, kernel.reshape(3, 3, 3, 4), 1, [(0, 0)] * 2, 1) + params["bias"]
    got = layer.apply({"params": jax.tree.map(jnp.float32, params)}, x)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    # The mean and the size of a kernel do nothing.
    moved = params | {"kernel": 3 * params["kernel"] + 0.5}
    again = layer.apply({"params": jax.tree.map(jnp.float32, moved)}, x)
    np.testing.assert_allclose(again, got, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused():
    x = np.ones((1, 4, 4, 3))
    kernel = np.ones((3, 3, 3, 2))
    for arguments, message in [
        (dict(layout="fast"), "layout is 'fast'; choose one of conv, patches"),
        (dict(padding="FULL"), "padding is 'FULL'; choose one of SAME, VALID"),
        (dict(padding=-1), "padding is -1"),
        (dict(groups=2), "2 groups of 3 channels"),
    ]:
        with pytest.raises(ValueError, match=message):
            conv.convolve(x, kernel, **arguments)


@pytest.mark.parametrize(("window", "strides"), [(2, 2), (2, 1), (3, 2)])
def test_pooling_is_flax_s_with_its_choice_among_equal_numbers(window, strides):
    """In values and gradients; whole numbers from 0 to 2 are equal in most windows."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(0, 3, (2, 7, 9, 3)), jnp.float32)

    def known(x):
        return nn.max_pool(x, (window, window), (strides, strides))

    def ours(x):
        return layers.max_pool(x, window, strides)

    shape = jax.eval_shape(known, x).shape
    weight = jnp.asarray(rng.integers(-4, 5, shape), jnp.float32)
    broken = np.array(x)
    broken[0, 3, 3, 0] = np.nan

    @functools.partial(jax.jit, static_argnums=0)
    def found(pool, x, weight, broken):
        value, pull = jax.vjp(pool, x)
        return value, pull(weight)[0], pool(broken)

    for a, b in zip(found(ours, x, weight, broken), found(known, x, weight, broken), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("mode", ["no", "plain", "scaled"])
def test_layer_promotes_no_ranks(mode):
    layer = conv.Conv(3, (2, 2), standardize=mode)
    with jax.numpy_rank_promotion("raise"):
        layer.init_with_output(jax.random.key(0), jnp.ones((2, 4, 4, 2)))
