"""The adaptive filter as a link: against a loop, under white and under correlated noise."""

import jax
import numpy as np
import pytest

from dpjax.contrib import snr
from dpjax.contrib.wiener import adaptive
from dpjax.transforms.lowpass import LAGS, NoiseVariance

ROUNDS = 60


def stream(link, gradients):
    """What a link makes of gradients [T, ...] in a tree, under scan."""
    first = jax.tree.map(lambda leaf: leaf[0], gradients)
    step = lambda state, value: link.update(value, state)[::-1]  # noqa: E731
    return jax.lax.scan(step, link.init(first), gradients)[1]


def reference(gradients, taps, noise, *, proportional):
    """The adaptive filter as a loop in float64."""
    rounds = len(gradients)
    size = gradients[0].size
    flat = gradients.reshape(rounds, -1).astype(float)
    out = []
    for t in range(rounds):
        c = [0.5]
        for k in range(1, min(taps, t + 1)):
            position = np.arange(k, t + 1)
            product = np.mean([flat[s] @ flat[s - k] for s in position])
            square = np.mean([flat[s - k] @ flat[s - k] for s in position])
            mean = np.mean([flat[s] @ flat[s] for s in range(t + 1)])
            kept = product - max(square - size * noise, 0) / 2
            c.append(max(kept, 0) / max(mean - size * noise, 1e-3))
        make = snr.proportional_fir if proportional else snr.optimal_fir
        b = make(c).b
        out.append(sum(weight * gradients[t - k] for k, weight in enumerate(b)))
    return np.stack(out)


@pytest.mark.parametrize("proportional", [False, True])
def test_adaptive_taps_follow_gradients(proportional):
    rng = np.random.default_rng(5)
    slow = np.cumsum(rng.normal(size=(ROUNDS, 4, 3)), axis=0) / 8 + 1
    values = (slow + 0.5 * rng.normal(size=slow.shape)).astype(np.float32)
    got = stream(adaptive(4, 0.25, proportional=proportional), values)
    expected = reference(values, 4, 0.25, proportional=proportional)
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)
    assert np.abs(got - slow)[10:].mean() < np.abs(values - slow)[10:].mean()


def test_noise_is_not_taken_for_signal():
    """White noise alone: the estimate sees no correlation, and all taps average it."""
    rng = np.random.default_rng(6)
    values = rng.normal(size=(400, 1_000)).astype(np.float32)
    got = np.asarray(stream(adaptive(4, 1.0, floor=50.0), values))[100:]
    kept = float(np.var(got))
    taps = np.asarray(snr.optimal_fir((0.5, 0.0, 0.0, 0.0)).b)
    assert kept == pytest.approx(float(taps @ taps), rel=0.02)


def test_correlated_noise_is_taken_off_by_its_lags():
    """Noise of an average over two rounds: told its lags, the estimate sees no signal in it."""
    rng = np.random.default_rng(7)
    white = rng.normal(size=(401, 2_000)).astype(np.float32)
    argument = (white[1:] + white[:-1]) / 2
    profile = np.zeros((400, LAGS), np.float32)
    profile[:, :2] = 0.5, 0.25
    deaf, messages = (
        np.var(np.asarray(stream(adaptive(3, noise, floor=50.0), argument))[200:])
        for noise in (0.5, NoiseVariance(1.0, profile))
    )
    b = np.asarray(snr.optimal_fir((0.5, 0.0, 0.0)).b)
    kappa = np.convolve(b, [0.5, 0.5])
    assert messages == pytest.approx(float(kappa @ kappa), rel=0.03)
    assert deaf != pytest.approx(float(kappa @ kappa), rel=0.03)


def test_too_few_taps_are_refused():
    with pytest.raises(ValueError, match="taps is 1"):
        adaptive(1, 0.1)


@pytest.mark.parametrize("noise", [-1.0, float("nan"), "a", None, [], [1.0, -2.0], [[1.0]], True])
def test_what_is_no_covariance_over_rounds_is_refused(noise):
    with pytest.raises(ValueError, match="noise "):
        adaptive(3, noise)
    with pytest.raises(ValueError, match="proportional is 'no'"):
        adaptive(3, 1.0, proportional="no")
