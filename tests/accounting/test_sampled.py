"""Losses of sampled rounds, never below the truth and close above it, at every delta."""

import math
import warnings

import mpmath
import numpy as np
import pytest
from scipy import fft, special

from dpjax.accounting import gdp, sampled
from dpjax.accounting.sampled import Pld
from tests.accounting import lattice

DELTA = 1e-5

# (rate, ratio, rounds), the lattice's width and points, and the epsilon about.
SETTINGS = [
    (0.004, 2.35, 250, 3e-5, 2**20, 8),
    pytest.param(0.004, 1.3, 250, 3.5e-6, 2**21, 1, marks=pytest.mark.slow),
    pytest.param(0.1, 0.2, 200, 5e-6, 2**21, 1.1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("rate", "ratio", "rounds", "width", "points", "about"), SETTINGS)
def test_many_rounds_against_their_composition(rate, ratio, rounds, width, points, about):
    arguments = rate, ratio, rounds, DELTA, width, points
    below, above = lattice.bracket(*arguments)
    assert above < 1.001 * below and below == pytest.approx(about, rel=0.05)
    assert below <= Pld.of([rate], [ratio], rounds).epsilon(DELTA) <= above
    # The twins: noise a percent less or more than is accounted for, and one direction alone.
    assert Pld.of([rate], [ratio / 1.01], rounds).epsilon(DELTA) < below / 1.005
    assert Pld.of([rate], [ratio * 1.01], rounds).epsilon(DELTA) > above * 1.005
    present, back = (lattice.bracket(*arguments, sides=(number,)) for number in (True, False))
    assert present == (below, above) and back[1] < below / 1.02


def test_bracket_holds_gaussian():
    """All records in every batch, nearly: the exact epsilon of one Gaussian of all rounds."""
    below, above = lattice.bracket(1 - 1e-12, 0.1, 100, DELTA, 3e-5, 2**20)
    assert below <= float(gdp.epsilon(1.0, DELTA)) <= above < 1.001 * below


def test_bound_on_records_of_every_batch_is_gaussian_one():
    bound = sampled.bound([1.0, 1.0], 25, 1.0, DELTA, sensitivity=2.0)
    mu = 2 * bound**0.5 * 25**0.5
    assert mu <= gdp.mu(1.0, DELTA) <= mu * 1.001


def test_loss_of_all_rounds_together_counts_once():
    """The phase of a Gaussian that is added to sampled rounds, alone and whatever its length."""
    for rounds, times in ((0, 0), (1, 1), (40, 1)):
        assert sampled.Phase((1.0,), (1.0,), rounds, whole=True).times == times


def test_of_many_rates_every_agent_has_noise_of_rate_at_least_its_own(monkeypatch):
    """Few levels stand for many rates; what each takes is decided apart."""
    rates = np.random.default_rng(0).uniform(0.05, 0.2, 50)
    monkeypatch.setattr(sampled, "_largest_ratio", lambda rate, *budget: 1 / rate)
    levels = sampled.bound(rates, 2, 2.0, DELTA, sensitivity=1.0) ** -0.5
    assert (levels >= rates).all() and len(np.unique(levels.round(9))) == 8
    assert levels[rates.argmax()] == pytest.approx(rates.max(), rel=1e-9)


# (rate, ratio, rounds, delta) and the cells' width of the other accountant.
SLOW = pytest.mark.slow
POINTS = [
    (0.01, 1 / 1.077, 200, 1.5e-9, 1e-4),
    (0.01, 1 / 1.077, 200, 1.4e-9, 1e-4),
    (250 / 650_000, 1 / 0.711, 10_000, 7e-8, 1e-4),
    pytest.param(1e-3, 1.25, 10**6, 1e-6, 1e-4, marks=SLOW),
    (256 / 60_000, 1 / 1.335, 14_000, 1e-6, 1e-4),
    pytest.param(0.5, 1.0, 1, 1e-3, 1e-4, marks=SLOW),
    pytest.param(0.01, 1.0, 1, 1e-4, 1e-4, marks=SLOW),
    pytest.param(1e-3, 3.0, 1, 1e-5, 1e-3, marks=SLOW),
    (0.3, 0.5, 2, 1e-12, 1e-4),
    (0.1, 0.5, 20, 1e-10, 1e-4),
    pytest.param(1 / 6, 0.53, 20, 1e-5, 1e-4, marks=SLOW),
    (0.2, 0.1, 300, 1e-5, 1e-4),
    (0.02, 0.05, 2000, 1e-6, 1e-4),
    pytest.param(0.9, 0.3, 50, 1e-8, 1e-4, marks=SLOW),
    pytest.param(1e-4, 1.5, 10**5, 1e-7, 2e-5, marks=SLOW),
    pytest.param(1e-5, 2.0, 10**6, 1e-6, 2e-5, marks=SLOW),
    pytest.param(0.004, 2.35, 250, 1e-5, 1e-3, marks=SLOW),
    pytest.param(0.01, 1.0, 1000, 1e-12, 1e-4, marks=SLOW),
    pytest.param(0.99, 0.01, 10_000, 1e-5, 1e-4, marks=SLOW),
    pytest.param(0.05, 0.02, 10**5, 1e-6, 2e-5, marks=SLOW),
    pytest.param(0.5, 1e-3, 10**6, 1e-6, 2e-5, marks=SLOW),
]


@pytest.mark.gate(4)
@pytest.mark.parametrize(("rate", "ratio", "rounds", "delta", "width"), POINTS)
def test_within_two_percent_of_another_accountant(rate, ratio, rounds, delta, width):
    from dp_accounting.pld import privacy_loss_distribution
    from dp_accounting.privacy_accountant import NeighboringRelation

    other = privacy_loss_distribution.from_gaussian_mechanism(
        1 / ratio,
        sampling_prob=rate,
        value_discretization_interval=width,
        neighboring_relation=NeighboringRelation.REPLACE_SPECIAL,
    ).self_compose(rounds)
    epsilon = Pld.of([rate], [ratio], rounds).epsilon(delta)
    assert epsilon == pytest.approx(other.get_epsilon_for_delta(delta), rel=0.02)


@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize(("rate", "ratio"), [(0.01, 1.0), (0.5, 0.3), (1e-4, 5.0), (0.999, 2.0)])
def test_one_round_at_any_delta_in_many_digits(rate, ratio, present):
    """Delta in closed form, in 400 digits, where float64 has no digit left."""
    for exponent in (-3, -12, -16, -50, -200):
        with mpmath.workdps(400):
            delta = mpmath.mpf(10) ** exponent
            curve = sampled._composed([(rate, ratio, 1)], float(delta), present)
            epsilon = curve.epsilon(float(delta))
            exact = one_round(rate, ratio, epsilon, present)
            assert exact <= delta * (1 + mpmath.mpf(1e-9))
            # Close, but where no loss is as large.
            if epsilon > 0 and exact > 0:
                assert one_round(rate, ratio, 0.99 * epsilon, present) > delta


def one_round(rate, ratio, epsilon, present):
    q = mpmath.mpf(rate)
    r = mpmath.mpf(ratio)
    odds = mpmath.exp(mpmath.mpf(epsilon))
    ratio_there = odds if present else 1 / odds
    if ratio_there <= 1 - q:
        return mpmath.mpf(0)
    x = mpmath.log((ratio_there - 1 + q) / q) / r + r / 2
    if present:
        there = (1 - q) * mpmath.ncdf(-x) + q * mpmath.ncdf(r - x)
        return there - odds * mpmath.ncdf(-x)
    return mpmath.ncdf(x) - odds * ((1 - q) * mpmath.ncdf(x) + q * mpmath.ncdf(x - r))


def estimated(rate, ratio, rounds, epsilon, order, trials=20_000):
    """Log of delta and its relative deviation, by trials where losses near epsilon are usual.

    A round is drawn from its distribution times exp(order loss): at a whole order a mixture of
    Gaussians, as in Mironov, Talwar and Zhang (2019). No grid and no transform.
    """
    draw = np.random.default_rng(0)
    drawn = np.arange(order + 2)
    logs = (
        special.gammaln(order + 2) - special.gammaln(drawn + 1) - special.gammaln(order + 2 - drawn)
    )
    logs += (order + 1 - drawn) * np.log1p(-rate) + drawn * np.log(rate)
    logs += (drawn**2 - drawn) * ratio**2 / 2
    moment = special.logsumexp(logs)
    total = np.zeros(trials)
    for _ in range(rounds):
        mean = ratio * draw.choice(len(drawn), size=trials, p=np.exp(logs - moment))
        place = mean + draw.normal(size=trials)
        total += np.logaddexp(np.log1p(-rate), np.log(rate) + ratio * (place - ratio / 2))
    above = np.maximum(total - epsilon, 0)
    values = -np.expm1(-above) * np.exp(-order * above)
    mean = values.mean()
    return rounds * moment - order * epsilon + np.log(mean), values.std() / mean / trials**0.5


@pytest.mark.parametrize(
    ("rate", "ratio", "rounds", "delta", "order"),
    [
        (0.2, 0.1, 300, 1e-12, 16),
        (0.5, 1.0, 20, 1e-20, 2),
        (0.05, 0.3, 400, 1e-12, 14),
        pytest.param(0.01, 1.0, 1000, 1e-15, 7, marks=SLOW),
    ],
)
def test_many_rounds_at_small_deltas_against_trials(rate, ratio, rounds, delta, order):
    stated = Pld.of([rate], [ratio], rounds).epsilon(delta)
    log_delta, deviation = estimated(rate, ratio, rounds, stated, order)
    assert deviation < 0.06 and log_delta < math.log(delta) + 4 * deviation
    # Two percent less would not hold.
    reduced, deviation = estimated(rate, ratio, rounds, 0.98 * stated, order)
    assert reduced > math.log(delta) + 4 * deviation


@pytest.mark.parametrize("rounds", [200, 10_000])
def test_no_delta_loses_amplification(rounds):
    epsilons = [0.0]
    for delta in (1e-3, 1e-9, 1e-12, 1e-30, 1e-100, 1e-240):
        stated = Pld.of([1e-3], [1.0], rounds).epsilon(delta)
        assert epsilons[-1] < stated < 0.6 * gdp.epsilon(rounds**0.5, delta)
        epsilons.append(stated)


# (rate, ratio, rounds) of some epsilons near 0, and others.
MANY = [
    (0.817, 0.00161455, 890),
    (0.0070401, 0.00145973, 17),
    (0.25, 0.0092, 3815),
    (1.3e-7, 0.041, 1322),
    (0.01, 1.0, 200),
]


@pytest.mark.gate(5)
@pytest.mark.parametrize(("rate", "ratio", "rounds"), MANY)
@pytest.mark.parametrize("centre", [2.0**-32, 4.63e-12, 1.87e-6])
def test_epsilon_never_rises_with_delta(rate, ratio, rounds, centre):
    """By steps of one part in 10^8, also where another composition is read: exactly."""
    loss = Pld.of([rate], [ratio], rounds)
    distant = np.array([-0.5, -0.03, -0.0201, -0.02, -0.0199, -0.01])
    steps = np.sort(np.concatenate([distant, np.arange(-4, 5) * 1e-8, -distant]))
    epsilons = [loss.epsilon(centre * (1 + step)) for step in steps]
    assert epsilons == sorted(epsilons, reverse=True)


def test_tiny_epsilons_rise_with_rounds_and_rates():
    """Of few draws, and at a delta at which float64 just holds the shares of it."""
    rare = [Pld.of([1.3047e-7], [0.0409378], t).epsilon(5.46e-12) for t in (331, 661, 1322)]
    assert rare == sorted(rare)
    rates = [2.1321e-5, 2.1326e-5]
    small = [Pld.of([rate], [0.00102215], 888_244).epsilon(2.2e-220) for rate in rates]
    assert small == sorted(small)


@pytest.mark.parametrize("nudged", ["rate", "ratio"])
@pytest.mark.parametrize(("rate", "ratio", "rounds"), MANY)
def test_epsilon_hardly_wavers(rate, ratio, rounds, nudged):
    """Runs that differ by one part in 10^8 have the same cells, but at their borders."""
    extra = (rate * (1 + 1e-8), ratio) if nudged == "rate" else (rate, ratio * (1 + 1e-8))
    reduced, larger = (Pld.of([q], [r], rounds).epsilon(DELTA) for q, r in ((rate, ratio), extra))
    assert reduced <= larger * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize(
    ("rate", "ratio", "delta"),
    [(2.88165e-8, 0.694848, 1.196831e-12), (3e-7, 0.2, 1e-10), (1e-5, 0.05, 1e-8)],
)
def test_epsilons_of_rare_draws_are_close(rate, ratio, delta):
    """Of one round, whose delta is known in closed form: epsilon was 80 times too large."""
    epsilon = Pld.of([rate], [ratio], 1).epsilon(delta)
    with mpmath.workdps(60):
        exact = [max(one_round(rate, ratio, e, side) for side in (True, False))
                 for e in (epsilon, 0.7 * epsilon)]  # fmt: skip
    assert exact[0] <= delta < exact[1]


@pytest.mark.parametrize(
    ("rate", "ratio", "rounds", "delta"),
    [
        (0.8826676655038547, 338.26026356665534, 279, 2.34e-225),
        (1.0, 1e-170, 1, 1e-240),
        (0.5, 1e-200, 1, 0.0),
        (0.7, 832.0, 29_757, 5e-7),
        (7.5e-8, 2.86, 36, 1.25e-3),
    ],
)
def test_extreme_losses_warn_of_nothing(rate, ratio, rounds, delta):
    """And are on the safe side: where nothing is sampled, by the Gaussian of all rounds."""
    loss = Pld.of([rate], [ratio], rounds)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epsilon = loss.epsilon(delta)
        if rate == 1 or delta == 0:
            # In squares, ratios below 1e-162 are zeros.
            assert epsilon >= gdp.epsilon(ratio, delta) > 0
        if rate * rounds < delta:
            assert epsilon == 0
        assert loss.unamplified >= ratio * math.sqrt(rounds)


@pytest.mark.mutant
def test_what_is_truncated_counts(monkeypatch):
    """Three tenths of delta may be cut off: the losses that are left must keep the rest."""
    monkeypatch.setattr(sampled, "_SHARE", 0.3)
    epsilon = sampled._composed([(0.9, 1.0, 1)], 1e-3, True).epsilon(1e-3)
    assert one_round(0.9, 1.0, epsilon, True) < 1e-3


@pytest.mark.mutant
def test_what_transforms_round_counts(monkeypatch):
    """Sums that are too small by as much as is allowed for state no less than exact ones."""
    part = (0.1, 0.5, 20)
    exact = sampled._composed([part], DELTA, True).epsilon(DELTA)
    monkeypatch.setattr(sampled, "_FOURIER", 1e-7)
    transform = fft.irfft

    def rounded(spectrum, size):
        allowed = 2 * (part[2] + 1) * 1e-7 * math.log2(size)
        return transform(spectrum, size) - allowed / size**0.5

    monkeypatch.setattr(fft, "irfft", rounded)
    assert exact < sampled._composed([part], DELTA, True).epsilon(DELTA) < 1.05 * exact


@pytest.mark.parametrize("size", [16_384, 16_875, 50_625])
def test_transforms_round_by_less_than_is_said(size):
    """Powers of transforms of a round's losses, against the same in extended precision."""
    if np.finfo(np.longdouble).eps > 1e-18:
        pytest.skip("no extended precision")
    masses = special.softmax(np.random.default_rng(0).normal(scale=3, size=size))
    for rounds in (1, 1000):
        sums = fft.irfft(fft.rfft(masses) ** rounds, size)
        finer = fft.irfft(fft.rfft(masses.astype(np.longdouble)) ** rounds, size)
        error = float(np.sqrt(((sums - finer) ** 2).sum()))
        assert error < 0.5 * (rounds + 1) * sampled._FOURIER * math.log2(size)
