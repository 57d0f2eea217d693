"""Filters as links: against scipy and optax, on trees of any kind, and what they keep."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import signal

from dpjax.transforms.lowpass import FILTERS, lowpass

ROUNDS = 60


def stream(link, gradients):
    """What a link makes of gradients [T, ...] in a tree, under scan."""
    first = jax.tree.map(lambda leaf: leaf[0], gradients)
    step = lambda state, value: link.update(value, state)[::-1]  # noqa: E731
    return jax.lax.scan(step, link.init(first), gradients)[1]


def tree(seed=0, agents=()):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=(ROUNDS, *agents, *shape)).astype(np.float32)  # noqa: E731
    return {"w": draw(4, 3), "b": (draw(3), draw())}


@pytest.mark.x64
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("agents", [(), (5,)])
def test_it_is_scipys_filter_over_its_response_to_ones(name, agents):
    b, a = FILTERS[name]
    gradients = tree(agents=agents)
    got = stream(lowpass(b, a), gradients)
    ones = signal.lfilter(b, [1, *a], np.ones(ROUNDS))
    for leaf, value in zip(jax.tree.leaves(got), jax.tree.leaves(gradients), strict=True):
        expected = signal.lfilter(b, [1, *a], value.astype(float), axis=0)
        expected /= ones.reshape(-1, *[1] * (value.ndim - 1))
        np.testing.assert_allclose(leaf, expected, rtol=2e-4, atol=2e-5)
        assert leaf.dtype == np.float32


def test_random_filters_too():
    rng = np.random.default_rng(3)
    for _ in range(8):
        poles = rng.uniform(0.1, 0.95, 2)
        a = np.poly(poles)[1:]
        b = rng.uniform(0.2, 1, rng.integers(1, 4))
        b *= (1 + a.sum()) / b.sum()
        values = rng.normal(size=(ROUNDS, 3))
        got = stream(lowpass(tuple(b), tuple(a)), jnp.asarray(values, jnp.float32))
        ones = signal.lfilter(b, [1, *a], np.ones(ROUNDS))
        expected = signal.lfilter(b, [1, *a], values, axis=0) / ones[:, None]
        np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-4)


def test_momentum_is_optaxs_debiased_average():
    gradients = tree(1)
    got = stream(lowpass(*FILTERS["momentum"]), gradients)
    expected = stream(optax.ema(0.9, debias=True), gradients)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_no_lags_change_nothing_and_keep_nothing():
    link = lowpass((1.0,))
    options = {"w": jnp.arange(3.0)}
    out, state = link.update(options, link.init(options))
    assert out["w"] is options["w"] and not jax.tree.leaves(state)[0].size


@pytest.mark.parametrize("name", FILTERS)
def test_it_keeps_no_more_than_its_order(name):
    b, a = FILTERS[name]
    models = {"w": jnp.zeros((7, 11))}
    sizes = sum(leaf.size for leaf in jax.tree.leaves(lowpass(b, a).init(models)))
    assert sizes <= (len(a) + len(b) - 1) * (77 + 1)


def test_filter_that_scales_is_refused():
    with pytest.raises(ValueError, match="sum b - sum a is 0.2"):
        lowpass((0.1,), (-0.1,))


@pytest.mark.parametrize("b", ["first v1", None, [[1.0]], (0.5j,), (float("nan"),)])
def test_what_are_no_coefficients_is_refused(b):
    with pytest.raises(ValueError, match="^b "):
        lowpass(b)
    with pytest.raises(ValueError, match="^a "):
        lowpass((1.0,), b)
