"""Clipping: the bound in exact arithmetic, on whatever comes in, and nothing but the bound."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import _numerics
from dpjax.models import layer_norms
from dpjax.transforms import clipping
from tests.transforms.rounding import check_bound, factors, of_remainders

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


@functools.cache
def per_agent(clip_norm, method="flat", **options):
    """Compiled once for all that use it."""
    transform = clipping.per_agent(clip_norm, method, **options)
    return transform._replace(update=jax.jit(transform.update))


def norm(tree):
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def naive(clip_norm):
    """The textbook line, in float32."""

    def update(updates, state, params=None):
        def one(tree):
            scale = jnp.minimum(1.0, clip_norm / norm(tree))
            return jax.tree.map(lambda leaf: (leaf * scale).astype(leaf.dtype), tree)

        return jax.vmap(one)(updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), jax.jit(update))


def random_updates(seed, n=16, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    size = 10.0 ** rng.uniform(-3, 3, size=(n, 1, 1))
    return {
        "kernel": jnp.asarray(size * rng.normal(size=(n, 7, 5)), dtype),
        "bias": jnp.asarray(size[:, 0] * rng.standard_cauchy(size=(n, 3)), dtype),
    }


@pytest.mark.x64
@pytest.mark.parametrize(
    ("method", "dtype", "clip_norm"),
    [
        *[("flat", jnp.float32, clip_norm) for clip_norm in (0.1, 1.0, 3.0)],
        *[("flat", jnp.bfloat16, 0.1), ("flat", jnp.float16, 3.0)],
        *[("automatic", jnp.float32, 3.0), ("automatic", jnp.bfloat16, 1.0)],
        ("automatic", jnp.float16, 0.1),
    ],
)
def test_bound_is_exact(method, dtype, clip_norm):
    transform = per_agent(clip_norm, method)
    for seed in range(4):
        check_bound(transform, random_updates(seed, dtype=dtype), clip_norm)


@pytest.mark.mutant
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_textbook_line_breaks_bound(dtype):
    with pytest.raises(AssertionError):
        for seed in range(4):
            check_bound(naive(0.1), random_updates(seed, dtype=dtype), 0.1)


@pytest.mark.parametrize("size", [1, 4_096, 4_097, 2_000_003])
@pytest.mark.parametrize("value", [0.1, 1e-4, 3.7])
def test_bound_holds_for_large_leaves(size, value):
    # Equal entries make one long float32 sum drift; the two levels bound it.
    check_bound(per_agent(1.0), jnp.full((2, size), value, jnp.float32), 1.0)


@pytest.mark.gate(3)
@pytest.mark.optimized
@pytest.mark.parametrize("method", clipping.CLIPPINGS)
@pytest.mark.parametrize(("size", "n"), [(2, 1), (16, 4), (100, 4)])
def test_bound_holds_where_number_formed_twice_differs(size, n, method):
    check_bound(of_remainders(1.0, method), factors(size, n), 1.0)


@pytest.mark.mutant
@pytest.mark.optimized
@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="its XLA forms each number once")
def test_barrier_alone_breaks_bound_on_cpu(monkeypatch):
    def fenced(fn, *args):
        return fn(*jax.lax.optimization_barrier(args))

    monkeypatch.setattr(_numerics, "from_memory", fenced)
    with pytest.raises(AssertionError):
        check_bound(of_remainders(1.0), factors(16, 4), 1.0)


@hypothesis.given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=12),
    st.sampled_from([1e-3, 0.1, 10.0]),
    st.sampled_from(clipping.CLIPPINGS),
)
def test_bound_holds_for_anything(values, clip_norm, method):
    rows = np.zeros((2, 12), np.float32)
    rows[0, : len(values)], rows[1, : len(values)] = values, values[::-1]
    check_bound(per_agent(clip_norm, method), {"w": jnp.asarray(rows)}, clip_norm)


def test_clips_and_only_clips():
    updates = random_updates(0)
    out, _ = per_agent(1.0).update(updates, optax.EmptyState())
    norms = np.asarray(jax.vmap(norm)(updates))
    for agent, size in enumerate(norms):
        scale = min(1.0, 1.0 / size)
        for name, leaf in updates.items():
            np.testing.assert_allclose(out[name][agent], leaf[agent] * scale, rtol=2e-5)
    assert (norms < 1).any() and (norms > 1).any()


def test_automatic_is_published_rule():
    updates = random_updates(1)
    out, _ = per_agent(0.5, "automatic").update(updates, optax.EmptyState())
    norms = jax.vmap(norm)(updates)
    expected = updates["bias"] * (0.5 / (norms + 0.01))[:, None]
    np.testing.assert_allclose(out["bias"], expected, rtol=2e-5)


def test_infinite_clip_norm_drops_what_is_not_finite():
    updates = {"w": jnp.array([[1e18, 3.0], [jnp.inf, 1.0], [0.0, -0.0]], jnp.float32)}
    out, _ = clipping.per_agent(math.inf).update(updates, optax.EmptyState())
    np.testing.assert_array_equal(
        out["w"], np.array([[1e18, 3.0], [0.0, 0.0], [0.0, 0.0]], np.float32)
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("method", clipping.CLIPPINGS)
def test_bad_gradient_becomes_zero_and_harms_no_other(bad, method):
    updates = {"a": jnp.ones((3, 4), jnp.float32), "b": jnp.ones((3,), jnp.float32)}
    spoiled = updates | {"a": updates["a"].at[1, 2].set(bad)}
    transform = per_agent(0.1, method)
    clean, _ = transform.update(updates, optax.EmptyState())
    out, _ = transform.update(spoiled, optax.EmptyState())
    for name in updates:
        np.testing.assert_array_equal(out[name][1], 0)
        np.testing.assert_array_equal(out[name][jnp.array([0, 2])], clean[name][jnp.array([0, 2])])


def check_agents_are_apart(transform) -> None:
    """Replacing agent 0's gradient moves its output by at most 2 C and no other output."""
    updates = random_updates(2)
    before, _ = transform.update(updates, transform.init(updates))
    moved = jax.tree.map(lambda leaf: leaf.at[0].set(-1e3 * leaf[0]), updates)
    after, _ = transform.update(moved, transform.init(moved))
    shift = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b), before, after)
    assert math.sqrt(sum((leaf[0] ** 2).sum() for leaf in shift.values())) <= 2 * 0.1
    assert all((leaf[1:] == 0).all() for leaf in shift.values())


def test_agents_do_not_meet():
    check_agents_are_apart(per_agent(0.1))


@pytest.mark.mutant
def test_one_norm_over_network_is_caught():
    with pytest.raises(AssertionError):
        check_agents_are_apart(optax.clip_by_global_norm(0.1))


@pytest.mark.x64
def test_structure_dtype_and_jit():
    updates = {"a": jnp.ones((4, 2, 3), jnp.bfloat16), "b": (jnp.ones((4,)), jnp.ones((4, 0)))}
    transform = clipping.per_agent(0.1)
    out, _ = transform.update(updates, transform.init(updates))
    assert jax.tree.structure(out) == jax.tree.structure(updates)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), out) == jax.tree.map(
        lambda x: (x.shape, x.dtype), updates
    )
    jitted = jax.jit(lambda tree: transform.update(tree, optax.EmptyState())[0])(updates)
    for eager, compiled in zip(jax.tree.leaves(out), jax.tree.leaves(jitted), strict=True):
        np.testing.assert_allclose(
            eager.astype(jnp.float32), compiled.astype(jnp.float32), rtol=1e-2
        )


def test_slack_is_small_and_grows_with_size():
    small = clipping.slack(jnp.zeros(123, jnp.float32))
    assert 0 < small < 1e-5
    assert small < clipping.slack(jnp.zeros(10_000_000, jnp.float32)) < 1e-3
    assert clipping.slack(jnp.zeros(123, jnp.bfloat16)) < 1e-2
    many = [jnp.zeros((), jnp.float32)] * 1000  # Their sum rounds, as do their squares.
    assert clipping.slack(many) > clipping.slack(jnp.zeros(2000, jnp.float32))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0.0,), "clip_norm"),
        ((-1.0,), "clip_norm"),
        ((math.nan,), "clip_norm"),
        ((1e-12,), "clip_norm"),
        ((math.inf, "automatic"), "clip_norm"),
        ((1.0, "global"), "method"),
    ],
)
def test_invalid_arguments_are_refused(arguments, name):
    with pytest.raises(ValueError, match=f"{name} is"):
        clipping.per_agent(*arguments)
    rest = dict(zip(("method",), arguments[1:], strict=False))
    with pytest.raises(ValueError, match=f"{name} is"):
        clipping.per_example(lambda p, x, y: p @ x, arguments[0], **rest)


def test_malformed_updates_are_refused():
    transform = clipping.per_agent(1.0)
    for updates in ({"a": jnp.ones((3, 2)), "b": jnp.ones((2, 2))}, jnp.ones(()), jnp.arange(3)):
        with pytest.raises(ValueError, match=r"updates.* leading axis"):
            transform.update(updates, optax.EmptyState())
    with pytest.raises(ValueError, match="below what rounding"):
        clipping.per_agent(1e-9).update(jnp.ones((2, 3), jnp.float16), optax.EmptyState())


def test_automatic_clipping_beyond_dtype_is_refused():
    """Scaled to 1e5, a gradient of one entry would be infinite in float16."""
    gradients = jnp.asarray([[100.0, 0.0], [3.0, 4.0]], jnp.float16)
    limit = float(jnp.finfo(jnp.float16).max)
    automatic = functools.partial(per_agent, method="automatic")
    with pytest.raises(ValueError, match=r"clip_norm is 100000 .*float16 .*65504; give a smaller"):
        automatic(1e5).update(gradients, optax.EmptyState())
    check_bound(automatic(limit), gradients, limit)
    check_bound(automatic(1e5), gradients.astype(jnp.float32), 1e5)
    check_bound(automatic(1e5), gradients.astype(jnp.bfloat16), 1e5)
    # Flat clipping lengthens nothing; layers have their shares.
    check_bound(per_agent(1e5), gradients, 1e5)
    layers = {"a": {"w": gradients}, "b": {"w": gradients}}
    check_bound(automatic(9e4, per_layer=True), layers, 9e4)
    with pytest.raises(ValueError, match="clip_norm is 70710.7 .*float16"):
        automatic(1e5, per_layer=True).update(layers, optax.EmptyState())
    clip = clipping.per_example(lambda p, x, y: p @ x, 1e5, method="automatic")
    with pytest.raises(ValueError, match="clip_norm is 100000 .*float16"):
        clip(gradients[0], gradients, jnp.zeros(2))


@pytest.mark.gate(1)
@pytest.mark.parametrize(("method", "per_layer"), [("flat", True), ("automatic", False)])
def test_sums_that_dtype_cannot_hold_are_refused(method, per_layer):
    """Three records of 3e4 are infinite in float16, two are not."""
    model = nn.Dense(1, use_bias=False)
    x = jnp.full((3, 1), 5e4, jnp.float16)
    y = jnp.zeros(3)
    params = {"params": {"kernel": jnp.zeros((1, 1), jnp.float16)}}
    options = {"method": method, "per_layer": per_layer}
    gradients = layer_norms.Gradients(model.apply, lambda out, y: jnp.sum(out))
    for fn in (
        clipping.per_example(lambda p, x, y: jnp.sum(model.apply(p, x)), 3e4, **options),
        clipping.per_example(lambda p, x, y: jnp.sum(model.apply(p, x)), 3e4, microbatch=1),
        clipping.clipped_sum(gradients, 3e4, **options),
        clipping.clipped_sum(gradients, 3e4, microbatch=1),
    ):
        fn = jax.jit(fn)
        with pytest.raises(ValueError, match="clip_norm is 30000 and 3 times .* float16 .* 65504"):
            fn(params, x, y)
        (total,) = jax.tree.leaves(fn(params, x[:2], y[:2]))
        assert 5.8e4 < float(total[0, 0]) <= 6e4
    unclipped = clipping.per_example(lambda p, x, y: jnp.sum(p * x), math.inf)
    assert unclipped(jnp.zeros(1, jnp.float16), x[:1], y[:1]).item() == x[0, 0]


@pytest.mark.parametrize("reference", [True, False])
def test_stated_share_is_one_by_which_sums_are_lowered(reference):
    """One long gradient among eight places, in float16, where the share is far above a rounding."""
    model = nn.Dense(1, use_bias=False)
    gradients = layer_norms.Gradients(model.apply, lambda out, y: jnp.sum(out))

    def plain(params, x, y, weights):
        total = weights(jnp.linalg.norm(x, axis=1)) @ x
        return {"params": {"kernel": total[:, None]}}

    weighted = gradients if reference else plain
    params = {"params": {"kernel": jnp.zeros((2, 1), jnp.float16)}}
    x = jnp.asarray([[0, 0]] * 7 + [[30, 40]], jnp.float16)
    (total,) = jax.tree.leaves(clipping.clipped_sum(weighted, 1.0)(params, x, jnp.zeros(8)))
    share = clipping.weighted_share(weighted, params, x, 8, None)
    assert share > 0.007
    assert np.linalg.norm(total.astype(float)) * (1 + share) == pytest.approx(1, abs=4e-3)


@pytest.mark.parametrize(("method", "microbatch"), [("flat", 2), ("automatic", None)])
def test_what_encoder_returns_is_clipped(method, microbatch):
    """A sketch of every gradient, clipped after it is made: the sketch may stretch."""
    random = np.random.default_rng(0)
    sketch = jnp.asarray(50 * random.normal(size=(3, 7)), jnp.float32)
    x, y = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((5, 7), (5,)))
    params = jnp.asarray(random.normal(size=7), jnp.float32)

    def loss(params, x, y):
        return jnp.square(x @ params - y)

    summed = jax.jit(
        clipping.per_example(
            loss, 0.5, method=method, microbatch=microbatch, encode=lambda g: sketch @ g
        )
    )

    def answer(x, y):
        return np.asarray(summed(params, x, y))

    each = [np.asarray(sketch @ jax.grad(loss)(params, *pair)) for pair in zip(x, y, strict=True)]
    extra = 0.01 if method == "automatic" else 0.0
    expected = sum(g * min(1.0, 0.5 / (np.linalg.norm(g) + extra)) for g in each)
    np.testing.assert_allclose(answer(x, y), expected, rtol=1e-4, atol=1e-5)
    # One record moves it by no more than the clip norm; without the second clip it would.
    single = np.linalg.norm(answer(x, y) - answer(x[1:], y[1:]))
    assert single <= 0.5 * (1 + 1e-5) < np.linalg.norm(each[0])
    assert answer(x[:0], y[:0]).shape == (3,)
