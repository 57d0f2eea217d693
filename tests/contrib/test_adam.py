"""Adam without the noise's variance: against optax, a loop, and what the noise leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import signal

from dpjax.contrib.optimizers import scale_by_adam, scale_by_galore
from dpjax.contrib.wiener import wiener
from dpjax.transforms.lowpass import FILTERS


def stream(link, gradients):
    """What a link makes of gradients [T, ...] under scan."""
    step = lambda state, value: link.update(value, state)[::-1]  # noqa: E731
    return jax.lax.scan(step, link.init(gradients[0]), gradients)[1]


def gradients(rounds=50, size=7, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(1.0, 0.5, (rounds, size)).astype(np.float32)


@pytest.mark.x64
def test_without_noise_it_is_adam():
    argument = gradients()
    expected = stream(optax.scale_by_adam(0.9, 0.999, eps=0.0), argument)
    np.testing.assert_allclose(stream(scale_by_adam(0.0), argument), expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["f1", "second", "momentum"])
def test_with_filter_it_is_loop(name):
    arguments, (b, a) = gradients().astype(float), FILTERS[name]
    ones = signal.lfilter(b, [1, *a], np.ones(len(arguments)))[:, None]
    mean = signal.lfilter(b, [1, *a], arguments, axis=0) / ones
    v = np.zeros(7)
    expected = []
    for t, g in enumerate(arguments):
        v = 0.99 * v + 0.01 * g**2
        expected.append(mean[t] / np.sqrt(np.maximum(v / (1 - 0.99 ** (t + 1)) - 0.25, 1e-8)))
    link = scale_by_adam(0.25, b2=0.99, filter=(b, a))
    np.testing.assert_allclose(stream(link, arguments.astype(np.float32)), expected, rtol=2e-3)


def test_second_moment_is_gradients_own():
    """Gradients of 1 under noise of variance 9: without the correction steps shrink by sqrt(10)."""
    rng = np.random.default_rng(1)
    values = (1 + 3 * rng.normal(size=(6_000, 200))).astype(np.float32)
    right, plain = (
        np.asarray(stream(scale_by_adam(noise, b1=0.99), values))[-1].mean() for noise in (9.0, 0.0)
    )
    assert plain == pytest.approx(1 / np.sqrt(10), rel=0.1)
    assert right > 2 * plain


def test_printed_bias_correction_is_wrong():
    """1 - beta^t with v = (1 - beta) v + beta g^2 from t = 0: a constant 1 should give v = 1."""
    beta = 0.01
    v = 0.0
    printed = []
    right = []
    for t in range(1, 6):
        v = (1 - beta) * v + beta
        printed.append(v / (1 - beta**t))
        right.append(v / (1 - (1 - beta) ** t))
    np.testing.assert_allclose(right, 1.0)
    assert max(printed) < 0.06
    ones = stream(scale_by_adam(0.0, b2=1 - beta), jnp.ones((5, 1)))
    np.testing.assert_allclose(ones, 1.0, rtol=1e-5)


def test_noise_may_follow_rounds():
    argument = gradients()
    fixed, moving = (stream(scale_by_adam(n), argument) for n in (0.1, lambda t: 0.1 + 0.0 * t))
    np.testing.assert_allclose(fixed, moving, rtol=1e-6)


def test_noise_that_changes_is_averaged_as_second_moment_is():
    """Squares of 1 + the round's noise: what is left of v is 1, whatever the rounds before had."""
    rounds = np.arange(40)
    variances = jnp.asarray(4.0 / (1 + rounds), jnp.float32)
    argument = np.sqrt(1 + np.asarray(variances))[:, None]
    out = stream(scale_by_adam(lambda t: variances[t], b1=0.0, b2=0.9), argument)
    np.testing.assert_allclose(out, argument, rtol=1e-4)
    # The broken twin takes this round's variance off a mean over all of them.
    squares = np.convolve(argument[:, 0] ** 2, 0.1 * 0.9**rounds)[:40] / (1 - 0.9 ** (rounds + 1))
    twin = argument[:, 0] / np.sqrt(squares - np.asarray(variances))
    assert np.abs(twin / argument[:, 0] - 1).max() > 0.1


@pytest.mark.parametrize(
    ("value", "text"),
    [({"b1": 1.0}, "b1 is 1.0"), ({"b2": -0.1}, "b2 is -0.1"), ({"floor": 0.0}, "floor is 0.0")],
)
def test_bad_settings_are_refused(value, text):
    with pytest.raises(ValueError, match=text):
        scale_by_adam(0.1, **value)


@pytest.mark.parametrize("noise", [-1.0, float("nan"), "a", None, [1.0], True])
@pytest.mark.parametrize("make", [scale_by_adam, scale_by_galore, wiener])
def test_what_is_no_variance_is_refused(make, noise):
    with pytest.raises(ValueError, match="noise is"):
        make(noise)


@pytest.mark.parametrize("filter", ["first v1", 0.5, (), ((1.0,), (), ()), "ab"])
def test_what_is_no_filter_is_refused(filter):
    with pytest.raises(ValueError, match="filter is"):
        scale_by_adam(0.0, filter=filter)
