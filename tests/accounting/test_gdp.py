"""Gaussian-DP conversions against 60-digit arithmetic, dp_accounting, and each other."""

import math

import numpy as np
import pytest

from dpjax.accounting import gdp

mpmath = pytest.importorskip("mpmath")
hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

MUS = st.floats(-9, 2.5).map(lambda power: 10**power)
DELTAS = st.floats(-200, -0.01).map(lambda power: 10**power)


def exact_delta(mu: float, epsilon: float) -> "mpmath.mpf":
    """The textbook formula, with enough digits for its cancellation."""
    with mpmath.workdps(60 + int(epsilon / 2)):
        m = mpmath.mpf(mu)
        e = mpmath.mpf(epsilon)

        def phi(z: "mpmath.mpf") -> "mpmath.mpf":
            return mpmath.erfc(-z / mpmath.sqrt(2)) / 2

        return phi(-e / m + m / 2) - mpmath.exp(e) * phi(-e / m - m / 2)


def check_delta_is_safe(function, mu: float, epsilon: float) -> None:
    truth = exact_delta(mu, epsilon)
    value = function(mu, epsilon)
    assert value >= truth
    assert value <= truth * (1 + 1e-9) + 1e-300


@hypothesis.given(MUS, st.floats(-1, 36))
def test_delta_is_exact_and_rounded_up(mu, tail):
    # epsilon = mu (x + mu/2): x from the left half of the curve to a delta of 1e-284.
    epsilon = min(mu * (max(tail, -mu / 2) + mu / 2), 600.0)
    check_delta_is_safe(gdp.delta, mu, epsilon)


@pytest.mark.mutant
def test_naive_delta_is_caught():
    from scipy.stats import norm

    def naive(mu, epsilon):
        left = norm.cdf(-epsilon / mu + mu / 2)
        return left - np.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2)

    with pytest.raises(AssertionError):
        check_delta_is_safe(naive, 1e-6, 5e-6)


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 5.0, 20.0, 100.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_epsilon_agrees_with_dp_accounting(mu, delta):
    dp_accounting = pytest.importorskip("dp_accounting")
    theirs = dp_accounting.get_epsilon_gaussian(1 / mu, delta)
    assert gdp.epsilon(mu, delta) == pytest.approx(theirs, rel=1e-9, abs=1e-11)


@hypothesis.given(st.floats(-3, 1.3).map(lambda power: 10**power), DELTAS)
def test_epsilon_is_safe_and_tight(mu, delta):
    epsilon = gdp.epsilon(mu, delta)
    assert exact_delta(mu, epsilon) <= delta
    if epsilon > 0:
        assert exact_delta(mu, epsilon * (1 - 1e-9)) > delta * (1 - 1e-10)


@hypothesis.given(st.floats(-6, 4).map(lambda power: 10**power), DELTAS)
def test_calibrating_and_converting_back_never_exceeds_budget(epsilon, delta):
    mu = gdp.mu(epsilon, delta)
    again = gdp.epsilon(mu, delta)
    assert again <= epsilon
    assert gdp.delta(mu, epsilon) <= delta
    # Where delta alone nearly covers the loss, epsilon is ill-conditioned: compare delta there.
    assert again >= epsilon * (1 - 1e-9) or gdp.delta(mu, epsilon) >= delta * (1 - 1e-9)


@hypothesis.given(st.floats(0, 50), st.floats(1e-12, 0.5))
def test_mu_is_largest_safe_one(epsilon, delta):
    mu = gdp.mu(epsilon, delta)
    assert exact_delta(mu, epsilon) <= delta
    assert exact_delta(mu * (1 + 1e-10), epsilon) > delta


@hypothesis.given(MUS, DELTAS)
def test_epsilon_is_monotone(mu, delta):
    here = gdp.epsilon(mu, delta)
    assert gdp.epsilon(mu * 1.001, delta) >= here
    assert gdp.epsilon(mu, delta * 0.9) >= here


def test_extremes():
    assert gdp.epsilon(0.0, 1e-5) == 0
    assert gdp.epsilon(0.0, 0.0) == 0
    assert gdp.epsilon(1.0, 0.0) == math.inf
    assert gdp.epsilon(math.inf, 1e-5) == math.inf
    assert gdp.delta(0.0, 0.0) == 0
    assert gdp.delta(math.inf, 3.0) == 1
    assert gdp.delta(2.0, math.inf) == 0
    assert gdp.mu(math.inf, 1e-5) == math.inf
    assert gdp.mu(3.0, 0.0) == 0
    assert gdp.mu(0.0, 1e-5) == pytest.approx(1e-5 * math.sqrt(2 * math.pi))
    # Large budgets: mu^2 / 2 dominates, and nothing overflows on the way.
    assert gdp.epsilon(1e6, 1e-9) == pytest.approx(5e11, rel=1e-4)
    assert gdp.mu(gdp.epsilon(1e6, 1e-9), 1e-9) == pytest.approx(1e6, rel=1e-9)
    assert 0 < gdp.delta(1.0, 800.0) < 1e-300  # rounded up, not to zero


EXTREME_MUS = (5e-324, 1e-308, 1e-300, 1e-155, 1e-50, 1e-16, 0.1, 3.0, 50.0, 1e8, 1e155, 1.7e308)
EXTREME_EPSILONS = (0.0, 5e-324, 1e-300, 1e-100, 1e-9, 1.0, 710.0, 1e8, 1e100, 1e200, 1.7e308)
EXTREME_DELTAS = (5e-324, 1e-308, 1e-200, 1e-30, 1e-5, 0.5, 1 - 1e-10, math.nextafter(1, 0))


def extreme_delta(mu: float, epsilon: float) -> "mpmath.mpf":
    """The textbook formula, with as many digits as it cancels."""
    with mpmath.workdps(120 + int(3 * abs(math.log10(mu)))):
        m = mpmath.mpf(mu)
        e = mpmath.mpf(epsilon)
        x = e / m - m / 2
        if abs(x) > 1e5:
            return mpmath.mpf(0 if x > 0 else 1)
        return mpmath.ncdf(-x) - mpmath.exp(e) * mpmath.ncdf(-x - m)


@pytest.mark.filterwarnings("error")
def test_extreme_arguments_are_finite_and_safe():
    for mu in EXTREME_MUS:
        for epsilon in EXTREME_EPSILONS:
            value = gdp.delta(mu, epsilon)
            assert extreme_delta(mu, epsilon) <= value <= 1, (mu, epsilon)
        for delta in EXTREME_DELTAS:
            epsilon = gdp.epsilon(mu, delta)
            assert epsilon >= 0
            assert epsilon == math.inf or extreme_delta(mu, epsilon) <= delta, (mu, delta)
        for alpha in (math.nextafter(1, 2), 2.0, 1e100, 1e308):
            assert gdp.rdp(mu, alpha) >= mpmath.mpf(alpha) * mpmath.mpf(mu) ** 2 / 2
        assert gdp.zcdp(mu) >= mpmath.mpf(mu) ** 2 / 2
    for epsilon in EXTREME_EPSILONS:
        for delta in EXTREME_DELTAS:
            mu = gdp.mu(epsilon, delta)
            assert mu >= 0 and gdp.epsilon(mu, delta) <= epsilon
            assert mu == 0 or extreme_delta(mu, epsilon) <= delta, (epsilon, delta)
    assert 0 <= gdp.delta(1e-300, 1e-9) < 1e-300


def test_vectorised_and_float64():
    mu = np.array([[0.5], [2.0]])
    delta = np.array([1e-6, 1e-5, 1e-4])
    table = gdp.epsilon(mu, delta)
    assert table.shape == (2, 3) and table.dtype == np.float64
    assert table[1, 2] == gdp.epsilon(2.0, 1e-4)
    assert isinstance(gdp.epsilon(1, 1e-5), float)
    assert isinstance(gdp.mu(1, 1e-5), float)
    assert gdp.delta(np.float32(0.5), [1, 2]).shape == (2,)
    assert isinstance(gdp.zcdp(1.0), float)


def test_renyi_and_concentrated():
    assert 6 <= gdp.rdp(2.0, 3.0) <= 6 * (1 + 1e-15)
    assert 2 <= gdp.zcdp(2.0) <= 2 * (1 + 1e-15)
    assert gdp.rdp(0.0, math.inf) == 0
    # The Renyi divergence of N(mu, 1) from N(0, 1), by quadrature.
    mu = 0.7
    alpha = 5.0
    divergence = mpmath.log(
        mpmath.quad(
            lambda z: mpmath.npdf(z, mu, 1) ** alpha * mpmath.npdf(z) ** (1 - alpha),
            [-20, 0, 3, 30],
        )
    ) / (alpha - 1)
    assert gdp.rdp(mu, alpha) == pytest.approx(float(divergence), rel=1e-12)


@pytest.mark.parametrize(
    "call",
    [
        lambda: gdp.epsilon(-1.0, 1e-5),
        lambda: gdp.epsilon(1.0, 1.0),
        lambda: gdp.epsilon(1.0, -1e-9),
        lambda: gdp.epsilon(math.nan, 1e-5),
        lambda: gdp.delta(1.0, -0.1),
        lambda: gdp.delta([1.0, math.nan], 1.0),
        lambda: gdp.mu(-1.0, 1e-5),
        lambda: gdp.mu(1.0, math.nan),
        lambda: gdp.mu("three", 1e-5),
        lambda: gdp.rdp(1.0, 1.0),
        lambda: gdp.zcdp(-1.0),
    ],
)
def test_invalid_numbers_are_refused_by_name(call):
    with pytest.raises(ValueError, match=r"(mu|epsilon|delta|alpha) is .*; give"):
        call()
