"""Losses of sums of discrete Gaussians, against exact Renyi divergences."""

import functools
import itertools
import math
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest

from dpjax.accounting import discrete, gdp, losses
from dpjax.accounting.discrete import Cohort
from dpjax.contrib import discrete as rules
from dpjax.encoding import lattice

ALPHAS = (1.001, 1.5, 2.0, 4.0, 16.0, 64.0)
REACH = 160


@functools.cache
def summed(variance: Fraction, clients: int) -> tuple:
    """Probabilities of -REACH, ..., REACH of a sum of discrete Gaussians, fifty digits."""
    with mp.workdps(50):
        reach = range(-REACH, REACH + 1)
        v = mp.mpf(variance.numerator) / variance.denominator
        single = [mp.exp(-(mp.mpf(y) ** 2) / (2 * v)) for y in reach]
        complete = mp.fsum(single)
        single = [item / complete for item in single]
        # Terms below 10^-20000 are of no order's sum here.
        near = [(y, p) for y, p in zip(reach, single, strict=True) if p > mp.mpf(10) ** -20000]
        law = single
        for _ in range(clients - 1):
            law = [
                mp.fsum(p * law[x - y + REACH] for y, p in near if -REACH <= x - y <= REACH)
                for x in reach
            ]
        return tuple(law)


def divergence(first, second, alpha: float) -> float:
    """The Renyi divergence of two laws on the same numbers."""
    with mp.workdps(50):
        a = mp.mpf(alpha)
        terms = [p**a * q ** (1 - a) for p, q in zip(first, second, strict=True) if p > 0 and q > 0]
        return float(mp.log(mp.fsum(terms)) / (a - 1))


def moved(law: tuple, key: int, alpha: float) -> float:
    """The divergence of a law and the same one moved, of what both hold."""
    return max(
        divergence(law[key:], law[: len(law) - key], alpha),
        divergence(law[: len(law) - key], law[key:], alpha),
    )


VARIANCES = (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2))


@pytest.mark.gate(3)
@pytest.mark.parametrize(
    ("variance", "clients"),
    [
        pytest.param(variance, clients, marks=[pytest.mark.slow] if (row + clients) % 2 else [])
        for row, variance in enumerate(VARIANCES)
        for clients in (1, 2, 3)
    ],
)
def test_no_divergence_is_above_loss(variance, clients) -> None:
    law = summed(variance, clients)
    for key, alpha in itertools.product((1, 2, 3, 7), ALPHAS):
        # Orders at which what lies beyond the reach matters are left out.
        if alpha * key > REACH / 2:
            continue
        exact = moved(law, key, alpha)
        bound = discrete.round_epsilon(key, variance, clients, 1) ** 2 / 2
        assert exact <= alpha * bound * (1 + 1e-9)
        if variance >= 1:
            # And it is no loose one: noise of 3 % more would not be enough for the exact loss.
            assert exact > alpha * bound * 0.97


def test_tau_is_needed() -> None:
    # The broken twin: a sum of discrete Gaussians taken for one.
    law = summed(Fraction(1, 4), 2)
    exact = max(moved(law, 1, alpha) / alpha for alpha in ALPHAS)
    assert exact > 1 / (2 * 2 * 0.25) * (1 + 1e-3)
    assert exact <= discrete.round_epsilon(1, Fraction(1, 4), 2, 1) ** 2 / 2


def test_noise_of_clients_that_are_gone_is_made_up_for() -> None:
    """Four clients, of whom one drops out and one colludes: the noise of two is left."""
    law = summed(Fraction(1), 2)
    rounds = dict(rounds=1, participations=1, relation="zero_out")
    exact = max(moved(law, 1, alpha) / alpha for alpha in ALPHAS)
    right = discrete.concentrated_loss(1.0, 1, Cohort(4, dropouts=1, colluders=1), 1, **rounds)
    assert exact <= right.rho
    # The broken twins: all clients' noise counted, or that of all survivors.
    for invalid in (Cohort(4), Cohort(4, dropouts=1)):
        assert exact > discrete.concentrated_loss(1.0, 1, invalid, 1, **rounds).rho
    # And the calibrated noise: as of the formula, whatever drops out.
    cohort = Cohort(4, dropouts=1, colluders=1)
    assert rules.variance(2.0, 3.0, 5, cohort) == pytest.approx(5 * 4 * 9 / 2)


def test_more_survivors_lose_no_more() -> None:
    for alpha in (1.5, 4.0):
        values = [moved(summed(Fraction(1, 2), n), 1, alpha) for n in (1, 2, 3)]
        assert values == sorted(values, reverse=True)


def rounded_law(x: float, square: int) -> dict[int, float]:
    """Whole numbers that one coordinate becomes, conditional on the limit."""
    low = math.floor(x)
    odds = {low: 1 - (x - low), low + 1: x - low}
    selection = {z: p for z, p in odds.items() if z * z <= square and p > 0}
    return {z: p / sum(selection.values()) for z, p in selection.items()}


@pytest.mark.parametrize("x", [0.3, 1.5, 2.0])
@pytest.mark.parametrize("relation", ["zero_out", "replace"])
def test_whole_mechanism_rounding_included(x, relation) -> None:
    """One coordinate, a vector of norm 2 grid units at most, two clients' noise."""
    square = lattice.limit(2.0, 1, math.exp(-0.5))
    law = np.array(summed(Fraction(3, 2), 2))
    stated = discrete.concentrated_loss(
        math.sqrt(square), Fraction(3, 2), Cohort(2), 1,
        rounds=1, participations=1, relation=relation,
    )  # fmt: skip

    def output(value: float) -> list:
        parts = rounded_law(value, square).items()
        total = sum(mp.mpf(p) * np.roll(law, z) for z, p in parts)
        return list(total[12:-12])

    first = output(x)
    second = output(-x if relation == "replace" else 0.0)
    for alpha in (1.001, 1.5, 2.0, 4.0, 8.0):
        pair = divergence(first, second, alpha), divergence(second, first, alpha)
        assert max(pair) <= alpha * stated.rho
    # The twin: a sensitivity that forgets rounding, or replacement, is too small for some vector.
    if x == 1.5 and relation == "replace":
        low = discrete.round_epsilon(1.5, Fraction(3, 2), 2, 1) ** 2 / 2
        assert max(divergence(first, second, a) / a for a in (2.0, 4.0)) > low


def test_numbers_of_specification() -> None:
    size = 4096
    honest = 1000
    first, second, four = (discrete.tau(v, honest) * math.sqrt(size) for v in (1, 2, 4))
    each = 0.0162  # a round's epsilon under real Gaussian noise
    assert first > each and ((each + first) / each) ** 2 == pytest.approx(10, rel=0.1)
    assert ((each + second) / each) ** 2 == pytest.approx(1.0002, abs=2e-5)
    assert discrete.tau(4, honest) == pytest.approx(7e-17, rel=0.03) and four < 1e-14
    assert discrete.tau(1, 1) == 0.0


def test_every_coordinate_is_off_by_tau() -> None:
    """Theorem 1 of Kairouz, Liu and Steinke: tau once a coordinate, so that its root counts."""
    off = 10 * sum(math.exp(-2 * math.pi**2 * 0.5 * j / (j + 1)) for j in range(1, 5))
    expected = 20 / math.sqrt(5 * 0.5) + off * math.sqrt(4096)
    assert discrete.round_epsilon(20, Fraction(1, 2), 5, 4096) == pytest.approx(expected, rel=1e-9)


def test_tau_of_many_clients_is_not_below_its_sum() -> None:
    exact = 10 * mp.fsum(mp.exp(-2 * mp.pi**2 * j / (j + 1)) for j in range(1, 6000))
    assert exact <= discrete.tau(1, 6000) < exact * (1 + 1e-4)


def test_units_and_relations() -> None:
    cohort = Cohort(50, 5, 5)

    def rho(unit, relation):
        times = {"client": 60, "record": 3}[unit]
        return discrete.concentrated_loss(
            10.0, 64, cohort, 256, rounds=200, participations=times, relation=relation
        ).rho

    assert rho("client", "zero_out") == pytest.approx(20 * rho("record", "zero_out"), rel=1e-12)
    assert rho("client", "replace") == pytest.approx(4 * rho("client", "zero_out"), rel=1e-9)
    single = discrete.concentrated_loss(
        10.0, 64, cohort, 256, rounds=7, participations=7, relation="zero_out"
    )
    assert single.after(2).rho == pytest.approx(single.rho * 2 / 7)
    late = discrete.concentrated_loss(
        10.0, 64, cohort, 256, rounds=7, participations=2, relation="zero_out"
    )
    assert late.after(1).rho == late.rho


def test_noise_as_published_and_tight() -> None:
    for epsilon, delta in ((0.5, 1e-5), (4.0, 1e-6), (40.0, 1e-3)):
        published = rules.sigma(epsilon, delta, "published")
        assert published >= max(1 / epsilon**0.5, 2 * (2 * math.log(1 / delta)) ** 0.5 / epsilon)
        # What is published holds, and is never the least.
        assert losses.Concentrated(1 / (2 * published**2)).epsilon(delta) <= epsilon
        zcdp, tight = (rules.sigma(epsilon, delta, name) for name in ("zcdp", "gdp"))
        assert tight < zcdp < published
        assert epsilon * (1 - 1e-6) < losses.Concentrated(1 / (2 * zcdp**2)).epsilon(delta)
        assert losses.Concentrated(1 / (2 * zcdp**2)).epsilon(delta) <= epsilon
        assert gdp.epsilon(1 / tight, delta) == pytest.approx(epsilon, rel=1e-6)
    # Records that are replaced move a sum by twice the clip.
    for epsilon, spent in ((4.0, 8.78e-7), (8.0, 1.018e-5), (16.0, 4.22e-4)):
        replaced = gdp.delta(2 / rules.sigma(epsilon, 1e-5, "published"), epsilon)
        assert replaced == pytest.approx(spent, rel=2e-3)


def test_real_noise_of_formula_has_loss_it_was_made_for() -> None:
    cohort = Cohort(100, dropouts=7, colluders=3)
    sigma = rules.sigma(3.0, 1e-5, "gdp")
    each = rules.variance(sigma, 0.7, 12, cohort)
    options = dict(rounds=40, participations=12, relation="zero_out")
    loss = rules.gaussian_loss(0.7, each, cohort, **options)
    assert loss.mu == pytest.approx(1 / sigma, rel=1e-9)
    assert loss.epsilon(1e-5) == pytest.approx(3.0, rel=1e-6)
    # The mean of sums has this signal, whatever the unit: mu of 12 sums of 90 honest noises.
    assert loss.mu == pytest.approx(0.7 * math.sqrt(12 / (90 * each)), rel=1e-9)
    twice = rules.gaussian_loss(0.7, each, cohort, **(options | {"relation": "replace"}))
    assert twice.mu == pytest.approx(2 * loss.mu)


@pytest.mark.parametrize("relation", ["zero_out", "replace"])
@pytest.mark.parametrize("rho", [0.02, 0.5, 8.0])
def test_grid_spends_budget_and_no_more(rho, relation) -> None:
    cohort = Cohort(60, 3, 2)
    options = dict(participations=6, relation=relation)
    grid = discrete.smallest_grid(2.5, rho, cohort, 256, variance=50_000, **options)
    square = lattice.limit(2.5 / grid, 256, math.exp(-0.5))
    spent = discrete.concentrated_loss(
        math.sqrt(square), 50_000, cohort, 256, rounds=6, **options
    ).rho
    assert rho * 0.99 < spent <= rho
    finer = lattice.limit(2.5 / (grid * 0.98), 256, math.exp(-0.5))
    assert (
        discrete.concentrated_loss(math.sqrt(finer), 50_000, cohort, 256, rounds=6, **options).rho
        > rho
    )


def call(name, *values, **changes):
    options = dict(rounds=4, participations=2, relation="zero_out")
    if name == "smallest_grid":
        del options["rounds"]
    return lambda: getattr(discrete, name)(*values, **(options | changes))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: Cohort(5, 3, 2), "ask more clients"),
        (lambda: Cohort(5, -1), "dropouts is -1"),
        (lambda: discrete.tau(0.2, 3), "nothing is proved"),
        (lambda: discrete.round_epsilon(0.0, 4, 3, 5), "sensitivity is 0"),
        (call("concentrated_loss", 1.0, 4, Cohort(3), 5, participations=5), "at most as many"),
        (call("concentrated_loss", 1.0, 4, Cohort(3), 5, relation="add"), "relation is 'add'"),
        (
            lambda: rules.gaussian_loss(
                1.0, 4, Cohort(3), rounds=4, participations=5, relation="zero_out"
            ),
            "at most as many",
        ),
        (lambda: rules.sigma(1.0, 1e-5, "rdp"), "accountant is 'rdp'"),
        (call("smallest_grid", 1.0, 1e-3, Cohort(3), 4096, variance=4), "give more variance"),
    ],
)
def test_what_has_no_loss_is_refused(ask, message) -> None:
    with pytest.raises(ValueError, match=message):
        ask()


def test_bisection_ends_at_thirteen_digits():
    requests = []
    result = discrete._bisected(lambda x: requests.append(x) or x <= 0.3, 0.0, 1.0)
    assert 0.3 * (1 - 1e-13) <= result <= 0.3 and len(requests) < 50
