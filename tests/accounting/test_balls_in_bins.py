"""Losses of records in secret bins: never below dense computations of the same pair, and close."""

import dataclasses
import math
import subprocess
import sys
import types

import numpy as np
import pytest
from scipy import stats

from dpjax.accounting import gdp
from dpjax.accounting.balls_in_bins import BinLoss, Bins
from dpjax.accounting.loss import KINDS
from dpjax.accounting.losses import Gaussian

DELTA = 1e-5


def loss(bins, ratio, epochs=1):
    return BinLoss(bins=bins, ratios=(ratio,), separation=bins, rounds=bins * epochs)


def sticks(present, absent, area, epsilon):
    """P(E) - e^epsilon Q(E) and the other way, of densities on a grid."""
    odds = math.exp(epsilon)
    there = np.maximum(present - odds * absent, 0).sum() * area
    gone = np.maximum(absent - odds * present, 0).sum() * area
    return there, gone


def plane(cells=1600, reach=9.0):
    """[cells, cells] coordinates of two messages, and the area of a cell."""
    axis = np.linspace(-reach, reach + 3, cells)
    first, second = np.meshgrid(axis, axis, indexing="ij")
    return first, second, (axis[1] - axis[0]) ** 2


def normal(first, second, centre=(0.0, 0.0)):
    return stats.norm.pdf(first - centre[0]) * stats.norm.pdf(second - centre[1])


@pytest.mark.mutant
@pytest.mark.parametrize("ratio", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("delta", [1e-1, 1e-2, DELTA])
def test_two_bins_against_plane_of_their_messages(ratio, delta):
    first, second, area = plane()
    present = (normal(first, second, (ratio, 0)) + normal(first, second, (0, ratio))) / 2
    epsilon = loss(2, ratio).epsilon(delta)
    result = max(sticks(present, normal(first, second), area, epsilon))
    assert result <= delta * (1 + 1e-6)
    assert epsilon == 0 or result > 0.99 * delta
    # Two epochs are ratios of sqrt(2): rounds of one bin are one Gaussian.
    assert loss(2, ratio / math.sqrt(2), epochs=2).epsilon(delta) == pytest.approx(epsilon)


@pytest.mark.mutant
def test_stating_smaller_direction_alone_would_not_cover_larger():
    first, second, area = plane()
    absent = normal(first, second)
    for ratio, epsilon in ((1.0, 2.0), (3.0, 0.7), (2.0, 1.0)):
        present = (normal(first, second, (ratio, 0)) + normal(first, second, (0, ratio))) / 2
        there, gone = sticks(present, absent, area, epsilon)
        assert gone < 0.99 * there
        assert loss(2, ratio).epsilon(there) == pytest.approx(epsilon, rel=5e-3)
        assert loss(2, ratio).epsilon(gone) > 1.005 * epsilon


def exact_delta(bins, ratio, epsilon, samples=400_000):
    """Delta in both directions by Monte Carlo under Q, with four deviations of each."""
    normals = np.random.default_rng(0).standard_normal((samples, bins))
    quotient = np.exp(ratio * normals - ratio**2 / 2).mean(axis=1)
    results = []
    for excess in (quotient - math.exp(epsilon), 1 - math.exp(epsilon) * quotient):
        losses = np.maximum(excess, 0)
        results.append((losses.mean(), 4 * losses.std() / math.sqrt(samples)))
    return max(results)


@pytest.mark.mutant
@pytest.mark.parametrize(("bins", "ratio"), [(3, 1.0), (7, 0.5), (20, 1.0), (50, 2.0)])
def test_many_bins_against_mean_of_lognormals(bins, ratio):
    delta = 1e-2
    epsilon = loss(bins, ratio).epsilon(delta)
    result, error = exact_delta(bins, ratio, epsilon)
    assert result - error <= delta < 1.03 * (result + error)


@pytest.mark.slow
@pytest.mark.parametrize(("bins", "epochs", "multiplier"), [(5, 2, 1.2), (8, 1, 0.8)])
def test_against_another_librarys_samples(bins, epochs, multiplier):
    generation = pytest.importorskip("jax_privacy.experimental.monte_carlo.sample_generation")
    from jax_privacy import batch_selection

    strategy = batch_selection.BallsInBinsSampling(iterations=bins * epochs, cycle_length=bins)
    delta = 2e-2
    samples = 20_000
    epsilon = loss(bins, 1 / multiplier, epochs).epsilon(delta)
    results = []
    for positive in (True, False):
        generator = np.random.default_rng(1)
        losses = np.array(
            [
                generation.get_privacy_loss_sample(
                    strategy, multiplier, np.ones(1), generator, positive
                )[0]
                for _ in range(samples)
            ]
        )
        excess = np.maximum(-np.expm1(epsilon - losses), 0)
        results.append((excess.mean(), 4 * excess.std() / math.sqrt(samples)))
    mean, error = max(results)
    assert mean - error <= delta <= 1.03 * (mean + error)


def test_one_bin_is_gaussian():
    for ratio in (0.1, 1.0, 30.0):
        stated = loss(1, ratio, epochs=4)
        assert stated.epsilon(DELTA) == gdp.epsilon(stated.unamplified, DELTA)
        assert stated.unamplified == pytest.approx(2 * ratio, rel=1e-9)


@pytest.mark.mutant
def test_gradients_that_follow_messages_cost_no_more():
    """The second round's gradient depends on the first message: shorter, or turned around."""
    first, second, area = plane()
    absent = normal(first, second)
    epsilon = loss(2, 1.0).epsilon(1e-2)
    for case in (np.tanh, np.sign, lambda message: -1.0 * (message > 0)):
        later = stats.norm.pdf(first) * stats.norm.pdf(second - case(first))
        present = (normal(first, second, (1.0, 0)) + later) / 2
        assert max(sticks(present, absent, area, epsilon)) <= 1e-2


def target(strategy, bins):
    """What a plan tells of a strategy, and nothing else."""
    diagonals = 1 + max(int(row - column) for row, column in np.argwhere(strategy))
    return types.SimpleNamespace(diagonals=lambda _: diagonals, bins=bins)


@pytest.mark.mutant
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_noise_that_joins_bins_tells_which_of_them(sign):
    """Two rounds, two bins, two diagonals: nothing is left to hide in, and columns count whole."""
    strategy = np.array([[1.1, 0.0], [sign * 0.8, 1.1]])
    first, second, area = plane()
    columns = strategy.T
    present = (normal(first, second, columns[0]) + normal(first, second, columns[1])) / 2
    hidden = Bins(2).hidden(target(strategy, 2), strategy)
    norm = float(np.linalg.norm(columns, axis=1).max())
    stated = BinLoss(hidden, (norm,), separation=2, rounds=2)
    epsilon = stated.epsilon(1e-2)
    result = max(sticks(present, normal(first, second), area, epsilon))
    assert hidden == 1 and result <= 1e-2
    # The broken copy, in which joined bins hide each other as others do.
    if sign > 0:
        short = BinLoss(2, (norm,), separation=2, rounds=2).epsilon(1e-2)
        equal = np.array([[1.0, 0.0], [0.9, 1.0]])
        present = (normal(first, second, equal[:, 0]) + normal(first, second, (0.9, 1.0))) / 2
        assert max(sticks(present, normal(first, second), area, short)) > 1e-2


@pytest.mark.parametrize(
    ("bins", "diagonals", "hidden"), [(6, 1, 6), (6, 2, 3), (6, 4, 1), (12, 5, 2), (7, 2, 1)]
)
def test_bins_that_are_left_are_as_far_apart_as_diagonals(bins, diagonals, hidden):
    banded = sum(np.eye(24, k=-lag) for lag in range(diagonals))
    assert Bins(bins).hidden(target(banded, bins), banded) == hidden


def test_four_bins_under_two_diagonals_by_samples():
    """All of P is known: the loss of what is left, two bins, is above it."""
    strategy = np.eye(4) + 0.7 * np.eye(4, k=-1)
    samples = 200_000
    generator = np.random.default_rng(0)
    messages = generator.standard_normal((samples, 4))
    logs = messages @ strategy - (strategy**2).sum(axis=0) / 2
    quotient = np.exp(logs).mean(axis=1)
    norm = float(np.linalg.norm(strategy, axis=0).max())
    stated = BinLoss(Bins(4).hidden(target(strategy, 4), strategy), (norm,), 4, 4)
    epsilon = stated.epsilon(1e-2)
    assert stated.bins == 2 and epsilon < gdp.epsilon(norm, 1e-2)
    for excess in (quotient - math.exp(epsilon), 1 - math.exp(epsilon) * quotient):
        losses = np.maximum(excess, 0)
        assert losses.mean() + 4 * losses.std() / math.sqrt(samples) <= 1e-2


def test_more_bins_smaller_ratios_and_larger_deltas_cost_less():
    base = loss(10, 1.0).epsilon(DELTA)
    assert loss(11, 1.0).epsilon(DELTA) < base < loss(9, 1.0).epsilon(DELTA)
    assert loss(10, 0.9).epsilon(DELTA) < base < loss(10, 1.1).epsilon(DELTA)
    epsilons = [loss(10, 1.0).epsilon(delta) for delta in np.geomspace(1e-20, 0.9, 60)]
    assert all(earlier >= later for earlier, later in zip(epsilons, epsilons[1:], strict=False))
    assert epsilons[-1] == 0 and loss(10, 0.0).epsilon(DELTA) == 0
    for extreme in (1e-5, 1e3):
        stated = loss(10, extreme)
        assert stated.epsilon(DELTA) <= gdp.epsilon(stated.unamplified, DELTA)


def test_first_rounds_cost_as_many_rounds_of_bin_as_were_begun():
    stated = BinLoss(bins=5, ratios=(0.5, 0.4), separation=5, rounds=20)
    assert [stated.after(t).times for t in (0, 1, 5, 6, 20)] == [0, 1, 1, 2, 4]
    assert stated.after(0).epsilon(DELTA) == 0 < stated.after(5).epsilon(DELTA)
    assert stated.after(5).epsilon(DELTA) < stated.epsilon(DELTA)
    assert stated.scaled(2.0).ratios == (1.0, 0.8)
    with pytest.raises(ValueError, match="covers 20"):
        stated.after(21)


def test_stored_loss_is_read_where_nothing_else_was_imported():
    stored = "{'kind': 'balls_in_bins', 'bins': 4, 'ratios': (1.0,), 'separation': 4, 'rounds': 4}"
    command = (
        "from dpjax.accounting.guarantee import Guarantee; print(Guarantee.from_dict(dict("
        "epsilon=9.0, delta=1e-5, mu=None, relation='zero_out_record', attacker='outsider', "
        f"rounds=4, clip_norm=1.0, accountant='balls_in_bins', release=False, other_loss={stored}"
        ")).loss)"
    )
    result = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert result.stdout.startswith("BinLoss(bins=4"), result.stderr


def test_what_does_not_compose_or_is_no_loss_is_refused():
    stated = loss(4, 1.0)
    assert KINDS["balls_in_bins"] is BinLoss
    with pytest.raises(ValueError, match="state the two runs apart"):
        stated.then(stated)
    with pytest.raises(ValueError, match="do not compose; state the two runs apart"):
        stated.then(Gaussian(1.0))
    for change in ({"bins": 5}, {"separation": 0}, {"ratios": ()}, {"ratios": (-1.0,)}):
        with pytest.raises(ValueError, match="bins|separation|ratios"):
            dataclasses.replace(stated, **change)
    with pytest.raises(ValueError, match="delta is 1"):
        stated.epsilon(1.0)
