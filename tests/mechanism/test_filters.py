"""Filters against scipy, dense sums and optimisation; the paper's misprints shown."""

import numpy as np
import pytest
from scipy import optimize, signal, stats

from dpjax.accounting import gdp
from dpjax.contrib import snr
from dpjax.mechanism import filters

DECAYING = 0.5 * 0.8 ** np.arange(400)


# The paper's Tables 2 and 4 as printed: b, a, and what both are over.
PRINTED = {
    "sgd": ((1,), (), 1),
    "momentum": ((0.1,), (-0.9,), 1),
    "first v1": ((1, 1), (-9,), 11),
    "first v2": ((3, -1), (-9,), 11),
    "second": ((1, 2, 1), (-92, 38), 58),
    "f1": ((0.075, 0.025), (-0.9,), 1),
    "f2": ((0.025, 0.075), (-0.9,), 1),
    "f3": ((0.1, 0.1), (-0.8,), 1),
    "f4": ((0.2, 0.2), (-0.6,), 1),
    "f5": ((0.025, 0.05, 0.025), (-0.9,), 1),
    "f6": ((0.025, 0.025), (-1.8, 0.85), 1),
}


def test_published_filters_are_as_printed():
    assert list(filters.PUBLISHED) == list(PRINTED)
    for name, (b, a, divisor) in PRINTED.items():
        result = filters.PUBLISHED[name]
        assert [len(result.b), len(result.a)] == [len(b), len(a)]
        np.testing.assert_allclose(result.b, np.array(b) / divisor, rtol=1e-15, err_msg=name)
        np.testing.assert_allclose(result.a, np.array(a) / divisor, rtol=1e-15, err_msg=name)


@pytest.mark.parametrize("name", filters.PUBLISHED)
def test_published_filters_are_stable_and_pass_constant(name):
    b, a = filters.check_filter(*filters.PUBLISHED[name])
    assert sum(b) - sum(a) == pytest.approx(1, abs=1e-12)
    assert np.abs(filters.poles(a)).max(initial=0) < 1
    frequencies, response = snr.frequency_response(b, a, 65)
    assert response[0] == pytest.approx(1, abs=1e-9) and frequencies[-1] == 0.5
    kappa = filters.impulse_response(b, a, 3_000)
    dense = (kappa * np.exp(-2j * np.pi * frequencies[:, None] * np.arange(3_000))).sum(axis=1)
    np.testing.assert_allclose(response, dense, atol=1e-9)


def test_printed_stability_test_refuses_what_paper_uses():
    """|x| < 1 for the roots of 1 + sum a x^k fails for each of its recursive filters."""
    recursive = {name: f.a for name, f in filters.PUBLISHED.items() if f.a}
    printed = {name: np.abs(np.roots([*a[::-1], 1.0])) for name, a in recursive.items()}
    assert len(recursive) == 10 and all((moduli > 1).all() for moduli in printed.values())
    moduli = np.concatenate(list(printed.values()))
    assert moduli.min() == pytest.approx(1.085, abs=1e-3)
    assert moduli.max() == pytest.approx(1.667, abs=1e-3)


def test_printed_ratio_of_momentum_counts_its_first_term_twice():
    taus = np.arange(400)
    printed = 1.9 * (0.5 + (0.9**taus * DECAYING).sum())
    true = snr.signal_to_noise(*filters.PUBLISHED["momentum"], DECAYING)
    assert printed == pytest.approx(4.34, abs=0.01)
    assert true == pytest.approx(3.39, abs=0.01)
    assert snr.signal_to_noise((1.0,), (), DECAYING) == 0.5


@pytest.mark.parametrize("rounds", [1, 7, 300])
def test_ratio_is_its_double_sum(rounds):
    b, a = filters.PUBLISHED["f6"]
    kappa = signal.lfilter(b, [1, *a], np.eye(1, rounds)[0])
    total = sum(DECAYING[k] * kappa[k] for t in range(rounds) for k in range(t + 1))
    noise = sum(kappa[k] ** 2 for t in range(rounds) for k in range(t + 1))
    assert snr.signal_to_noise(b, a, DECAYING, rounds) == pytest.approx(total / noise, rel=1e-10)


@pytest.mark.parametrize(
    ("c", "best", "paper"), [((0.5, 0.4, 0.3, 0.2), 1.435, 1.400), ((0.5, 0.0), 0.604, 0.5)]
)
def test_taps_in_closed_form_beat_proportional_ones_and_search(c, best, paper):
    coefficients = snr.optimal_fir(c)
    value = snr.signal_to_noise(*coefficients, c)
    assert value == pytest.approx(best, abs=1e-3)
    assert value == pytest.approx((sum(c) + np.sqrt(len(c) * np.dot(c, c))) / 2, rel=1e-12)
    assert snr.signal_to_noise(*snr.proportional_fir(c), c) == pytest.approx(paper, abs=1e-3)

    def negative(free):
        b = np.append(free, 1 - free.sum())
        return -np.dot(c, b) / np.dot(b, b)

    searched = optimize.minimize(negative, np.full(len(c) - 1, 1 / len(c)), tol=1e-12)
    assert -searched.fun == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(
    ("b", "a", "text"),
    [
        ((), (), "b is empty"),
        ((0.5,), (), "sum b - sum a is 0.5"),
        ((float("nan"),), (), "b holds nan"),
        ((-0.1,), (-1.1,), "pole of modulus 1.1"),
        ((0.0, 1.0), (), "response of b, a to ones falls to 0"),
        ((1.5, -1.8, 1.3), (), "falls to -0.3"),
    ],
)
def test_coefficients_no_run_should_use_are_refused(b, a, text):
    with pytest.raises(ValueError, match=text):
        filters.check_filter(b, a)


def test_theorem_2_does_not_cover_every_published_filter():
    """Its proof needs a response of at least 0 that sums to at most 1."""
    for name, minimum, total in (("f6", -0.046, 1.90), ("second", -0.005, 1.08), ("f1", 0.0, 1.0)):
        response = filters.impulse_response(*filters.PUBLISHED[name], 2_000)
        assert response.min() == pytest.approx(minimum, abs=1e-3)
        assert np.abs(response).sum() == pytest.approx(total, abs=5e-3)


@pytest.mark.parametrize(("epsilon", "true"), [(1, 1.117), (4, 5.303), (8, 12.218)])
def test_noise_printed_in_theorem_3_is_not_private(epsilon, true):
    """Of all records in each of T rounds the mean's noise has mu = C sqrt(T) / (N deviation)."""
    records, rounds, clip_norm = 50_000, 400, 1.0
    delta = records**-1.1
    variance = clip_norm**2 * rounds * np.log(1 / delta) / (records * epsilon) ** 2
    mu = clip_norm / records * np.sqrt(rounds / variance)
    assert gdp.epsilon(mu, delta) == pytest.approx(true, abs=1e-3)
    # By definition: the odds of one event, which the Gaussian's tails have.
    threshold = epsilon / mu + mu / 2
    likely = stats.norm.sf(threshold - mu) - np.exp(epsilon) * stats.norm.sf(threshold)
    assert likely > 1.5 * delta


def test_noise_of_definition_2_is_enough():
    """Its sum of two terms holds at every budget, and wastes little."""
    epsilon = np.logspace(-2, 2, 41)[:, None]
    delta = np.array([0.05, 0.01, 1e-3, 1e-5, 1e-8, 1e-12, 1e-20])
    deviation = np.sqrt(2 * np.log(1 / (2 * delta))) / epsilon + 1 / np.sqrt(2 * epsilon)
    true = gdp.epsilon(*np.broadcast_arrays(1 / deviation, delta))
    assert (true <= epsilon).all()
    wasted = deviation * gdp.mu(*np.broadcast_arrays(epsilon, delta))
    usual = wasted[(epsilon[:, 0] >= 1) & (epsilon[:, 0] <= 10)][:, 3:6]
    assert 1 <= wasted.min() and usual.max() == pytest.approx(1.44, abs=5e-3)


def test_falling_autocorrelation_may_have_a_rising_spectrum():
    """Section 3 concludes the contrary; 1, 2/3, 1/3 are a sum's over three rounds."""
    lags = np.arange(-2, 3)
    correlation = 1 - abs(lags) / 3
    np.testing.assert_allclose(correlation, signal.correlate(np.ones(3), np.ones(3)) / 3)
    frequencies = np.array([2 * np.pi / 3, np.pi])
    spectrum = (correlation * np.exp(1j * np.outer(frequencies, lags))).sum(axis=1).real
    np.testing.assert_allclose(spectrum, [0, 1 / 3], atol=1e-12)


def _clipped(gradient):
    return gradient / max(1.0, np.linalg.norm(gradient))


def test_clipping_may_make_a_problem_less_smooth():
    """Section 3.2 has L' <= L: clipping expands nothing, but gradients of records cancel in L."""

    def field(x, clip):
        return (clip(np.array([10 * x])) + clip(np.array([-8 * x])))[0] / 2

    x = np.array([0.11, 0.12])
    for clip, slope in ((lambda gradient: gradient, 1.0), (_clipped, -4.0)):
        values = [field(point, clip) for point in x]
        assert np.diff(values)[0] / np.diff(x)[0] == pytest.approx(slope)


def test_filters_lag_behind_gradients_that_change():
    """Of a gradient that grows by one a round they return an earlier value: a bias."""
    rounds = 2_000
    ramp = np.arange(float(rounds))
    lags = []
    for name, parts in filters.PUBLISHED.items():
        response = filters.impulse_response(*parts, rounds)
        lag = ramp[-1] - np.convolve(response, ramp)[rounds - 1]
        assert (abs(lag) < 1e-9) == (name == "sgd")
        lags.append(lag)
    assert len(lags) == 11 and np.isclose(sorted(lags)[1], 2.0) and np.isclose(max(lags), 10.0)


def test_clipped_gradients_are_no_gradient():
    """Section 3.2 integrates one along a line; a gradient's Jacobian is symmetric."""
    curvature = np.array([1.0, 4.0])
    x, step = np.array([1.0, 1.0]), 1e-6
    jacobian = np.zeros((2, 2))
    for number, move in enumerate(step * np.eye(2)):
        difference = _clipped(curvature * (x + move)) - _clipped(curvature * (x - move))
        jacobian[:, number] = difference / (2 * step)
    assert jacobian[0, 1] == pytest.approx(-16 / 17**1.5, abs=1e-6)
    assert jacobian[1, 0] == pytest.approx(-4 / 17**1.5, abs=1e-6)
