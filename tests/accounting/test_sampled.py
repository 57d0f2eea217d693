"""Losses of many sampled rounds between two bounds less than a thousandth apart."""

import numpy as np
import pytest

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
    given = rate, ratio, rounds, DELTA, width, points
    below, above = lattice.bracket(*given)
    assert above < 1.001 * below and below == pytest.approx(about, rel=0.05)
    assert below <= Pld.of([rate], [ratio], rounds).epsilon(DELTA) <= above
    # The twins: noise a percent less or more than is accounted for, and one direction alone.
    assert Pld.of([rate], [ratio / 1.01], rounds).epsilon(DELTA) < below / 1.005
    assert Pld.of([rate], [ratio * 1.01], rounds).epsilon(DELTA) > above * 1.005
    there, back = (lattice.bracket(*given, sides=(one,)) for one in (True, False))
    assert there == (below, above) and back[1] < below / 1.02


def test_the_bracket_holds_the_gaussian():
    """All records in every batch, nearly: the exact epsilon of one Gaussian of all rounds."""
    below, above = lattice.bracket(1 - 1e-12, 0.1, 100, DELTA, 3e-5, 2**20)
    assert below <= float(gdp.epsilon(1.0, DELTA)) <= above < 1.001 * below


def test_the_bound_on_records_of_every_batch_is_the_gaussian_one():
    bound = sampled.bound([1.0, 1.0], 25, 1.0, DELTA, sensitivity=2.0)
    mu = 2 * bound**0.5 * 25**0.5
    assert mu <= gdp.mu(1.0, DELTA) <= mu * 1.001


def test_a_loss_of_all_rounds_together_counts_once():
    """The phase of a Gaussian that is added to sampled rounds, alone and whatever its length."""
    for rounds, times in ((0, 0), (1, 1), (40, 1)):
        assert sampled.Phase((1.0,), (1.0,), rounds, whole=True).times == times


def test_of_many_rates_every_agent_has_the_noise_of_a_rate_at_least_its_own(monkeypatch):
    """Few levels stand for many rates; what each takes is decided apart."""
    rates = np.random.default_rng(0).uniform(0.05, 0.2, 50)
    monkeypatch.setattr(sampled, "_largest_ratio", lambda rate, *budget: 1 / rate)
    levels = sampled.bound(rates, 2, 2.0, DELTA, sensitivity=1.0) ** -0.5
    assert (levels >= rates).all() and len(np.unique(levels.round(9))) == 8
    assert levels[rates.argmax()] == pytest.approx(rates.max(), rel=1e-9)
