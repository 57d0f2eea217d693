"""Banded strategies as parts of a config: one agent, a fixed order of records, a CNN."""

import dataclasses

import numpy as np
import pytest

from dpjax.accounting import gdp
from dpjax.data import partition
from dpjax.engine.run import run
from dpjax.learning.samplers import Cyclic
from dpjax.learning.supervised import supervised
from dpjax.models.cnn import SmallCNN
from dpjax.plans import noise, plan
from dpjax.transforms import rounds
from tests.support import make_config

ONE = np.ones((1, 1))
T = 8
EPOCHS = 2
SEPARATION = 4
BATCH = 6
CLIP = 0.5


def config(part, **changes):
    return make_config(
        noise=part, relation="zero_out_record", rounds=T, clip_norm=CLIP, epsilon=3.0,
        sampler=Cyclic(EPOCHS, SEPARATION, BATCH), **changes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def banded():
    return plan.make(config(noise.PrefixSum(bands=3)), ONE)


def loss_of(value, strategy=None):
    """The loss by hand: a record's rounds are those of a pattern, and it moves each by the clip.

    What is seen is (C G)_t + noise of the factor's scale: columns of C of the record's rounds,
    their gradients of any directions, so that norms of overlapping ones add up at worst.
    """
    c = rounds.applied(value.strategy, np.float32) if strategy is None else strategy
    gram = np.abs(c.T @ c)
    worst = max(
        gram[np.ix_(turn, turn)].sum()
        for turn in (np.arange(s, T, SEPARATION) for s in range(SEPARATION))
    )
    return CLIP * np.sqrt(worst) / float(value.factor[0, 0])


def test_loss_is_that_of_columns_of_record(banded):
    assert np.count_nonzero(np.tril(banded.strategy, -3)) == 0
    assert rounds.route(banded.strategy, T).kind == "recursion"
    mu = loss_of(banded)
    assert mu == pytest.approx(banded.guarantee.mu, rel=1e-4) and mu <= banded.guarantee.mu
    assert banded.guarantee.epsilon == pytest.approx(3.0)
    assert gdp.epsilon(mu, 1e-5) == pytest.approx(3.0, rel=1e-3)
    assert banded.guarantee.participation == (EPOCHS, SEPARATION)
    # The broken twin: a strategy twice as large under the same factor.
    assert loss_of(banded, 2 * banded.strategy) > banded.guarantee.mu
    with pytest.raises(ValueError, match="its noise gives"):
        noisy = dataclasses.replace(banded.noise, strategy=2 * banded.strategy)
        dataclasses.replace(banded, noise=noisy)


def test_bands_lie_between_fresh_noise_and_best_strategy(banded):
    def error(value):
        inverse = np.eye(T) if value.strategy is None else np.linalg.inv(value.strategy)
        return float(value.factor[0, 0]) * np.linalg.norm(np.tril(np.ones((T, T))) @ inverse)

    fresh, best = (plan.make(config(p), ONE) for p in (noise.Independent(), noise.PrefixSum()))
    assert error(best) <= error(banded) * (1 + 1e-6) and error(banded) < 0.9 * error(fresh)
    # With one agent the network does nothing to sums: both designs are one.
    same = plan.make(config(noise.Mafalda(bands=3)), ONE)
    assert error(same) == pytest.approx(error(banded), rel=1e-5)
    single = error(plan.make(config(noise.PrefixSum(bands=1)), ONE))
    assert error(banded) < single <= error(fresh) * (1 + 1e-6)


@pytest.mark.slow
def test_cnn_trains_with_it(banded):
    random = np.random.default_rng(0)
    x = random.normal(size=(24, 14, 14, 1)).astype(np.float32)
    y = np.arange(24) % 3
    task = supervised(SmallCNN(classes=3), "cross_entropy", (x, y), (x, y), partition.iid(24, 1, 0))
    result = run(banded, task, seeds=[0])
    assert np.isfinite(result.metrics["test_loss"]).all()
    assert result.guarantees[0].replace(sum_rounding=0.0) == banded.guarantee


@pytest.mark.parametrize("bands", [0, 2.5, SEPARATION + 1])
def test_bands_that_there_cannot_be_are_refused(bands):
    with pytest.raises(ValueError, match=f"bands is {bands}"):
        plan.make(config(noise.PrefixSum(bands=bands)), ONE)
