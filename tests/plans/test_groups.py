"""Coins flipped by groups of records, under noise over rounds of few diagonals: amplified bands."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dpjax.accounting import gdp
from dpjax.accounting.guarantee import Guarantee
from dpjax.accounting.sampled import Phase, Pld
from dpjax.learning.samplers import Poisson
from dpjax.plans import noise, plan
from dpjax.transforms import rounds
from tests.plans.draws import audit
from tests.support import make_config

T = 12
SEPARATION = 3
EXPECTED = 4.0
CLIP = 0.5
DELTA = 1e-5
ONE = np.ones((1, 1))
COUNTS = np.array([60])


def config(**changes):
    options = {
        "relation": "zero_out_record", "rounds": T, "clip_norm": CLIP, "epsilon": 2.0,
        "sampler": Poisson(EXPECTED, 8, separation=SEPARATION), "noise": noise.PrefixSum(bands=3),
    }  # fmt: skip
    return make_config(**(options | changes))


@functools.cache
def made():
    return plan.make(config(), ONE, counts=COUNTS)


def presence(sampler, counts, times):
    """[times, n, m] which records were drawn."""
    function = jax.vmap(lambda t: sampler.draw(jax.random.fold_in(jax.random.key(5), t), t, counts))
    rows, padding = map(np.asarray, jax.jit(function)(jnp.arange(times)))
    result = np.zeros((times, len(counts), max(counts)), int)
    for t, agent, place in zip(*np.nonzero(~padding), strict=True):
        result[t, agent, rows[t, agent, place]] += 1
    return result


def test_record_is_drawn_in_its_groups_rounds_alone_and_at_its_rate():
    counts = np.array([60, 31])
    times = 3000
    sampler = Poisson(EXPECTED, 5, records=60, separation=SEPARATION)
    result = presence(sampler, counts, times)
    rates = sampler.rates(counts)
    np.testing.assert_allclose(rates, EXPECTED * SEPARATION / counts)
    for agent, count in enumerate(counts):
        for record in range(count):
            own = result[:, agent, record]
            turns = np.arange(times) % SEPARATION == record % SEPARATION
            assert not own[~turns].any()
            rate = rates[agent]
            chances = turns.sum()
            deviation = np.sqrt(rate * (1 - rate) / chances)
            assert abs(own[turns].mean() - rate) < 4.5 * deviation
        assert result[:, agent].sum(1).mean() == pytest.approx(EXPECTED, rel=0.05)


@pytest.mark.slow
def test_guarantee_against_another_accountant():
    """As often as a group has rounds, a subsampled Gaussian of the largest column's norm."""
    from dp_accounting import dp_event, pld
    from dp_accounting.privacy_accountant import NeighboringRelation

    single = made()
    columns = np.linalg.norm(rounds.applied(single.strategy, np.float32), axis=0)
    ratio = CLIP * columns.max() / float(single.factor[0, 0])
    rate = EXPECTED * SEPARATION / COUNTS[0]
    accountant = pld.PLDAccountant(NeighboringRelation.REPLACE_SPECIAL)
    event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(1 / ratio))
    result = accountant.compose(event, T // SEPARATION).get_epsilon(DELTA)
    assert 1.99 < result <= 2.0 == single.guarantee.epsilon
    assert single.guarantee.exact_epsilon == pytest.approx(result, rel=1e-3)
    loss = single.guarantee.loss
    assert isinstance(loss, Pld) and loss.phases[0].times == T // SEPARATION
    # It amplifies: the same noise, every record in all rounds of its group.
    mu = np.sqrt(T // SEPARATION) * ratio
    assert loss.unamplified == pytest.approx(mu, rel=1e-5)
    assert gdp.epsilon(mu, DELTA) > 2 * single.guarantee.epsilon
    # All columns have one norm: none is paid for that is not there.
    assert columns.min() > 0.999 * columns.max()
    # The first rounds: as many coins as they hold, rounded up.
    assert [loss.after(t).phases[0].times for t in (0, 1, 3, 4, T)] == [0, 1, 1, 2, 4]


def hockey_stick(centres, weights, epsilon, told=np.zeros_like, cells=700, reach=9.0):
    """The largest P(E) - e^epsilon Q(E) or the other way, of messages of two rounds, on a grid.

    P is a mixture of unit Gaussians at [k, 2] centres, Q the one at zero; in both what others
    send in the second round, ``told``, depends on the first one's message.
    """
    axis = np.linspace(-reach, reach, cells)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1)
    grid[..., 1] -= told(grid[..., 0])
    density = lambda position: np.exp(-((grid - position) ** 2).sum(-1) / 2) / (2 * np.pi)  # noqa: E731
    p = sum(w * density(c) for w, c in zip(weights, centres, strict=True))
    q = density(np.zeros(2))
    area = (axis[1] - axis[0]) ** 2
    ways = (p - np.exp(epsilon) * q, q - np.exp(epsilon) * p)
    return max(np.maximum(way, 0).sum() * area for way in ways)


def one_draw(rate, ratio, epsilon):
    """The same of one subsampled Gaussian, in closed form."""

    def excess(bound, sign):
        # P(E) - e^eps Q(E) and the other way, on a half line from where the ratio is e^eps.
        p = (1 - rate) * stats.norm.cdf(-sign * bound) + rate * stats.norm.cdf(
            sign * (ratio - bound)
        )
        q = stats.norm.cdf(-sign * bound)
        return p - np.exp(epsilon) * q if sign > 0 else q - np.exp(epsilon) * p

    up = ratio / 2 + np.log1p((np.exp(epsilon) - 1) / rate) / ratio
    down = np.exp(-epsilon) - (1 - rate)
    other = 0.0
    if down > 0:
        other = excess(ratio / 2 + np.log(down / rate) / ratio, -1)
    return max(excess(up, 1), other)


@pytest.mark.mutant
def test_block_of_rounds_is_one_draw_of_its_columns_norm():
    """The joint distribution of two rounds' messages, by cubature, against one subsampled Gaussian.

    And the broken twin: where both rounds may draw the record, the strategy's rows join the draws,
    and two draws apart cost less than both together do.
    """
    c = np.array([[1.1, 0.0], [0.8, 1.1]])
    rate = 0.2
    epsilon = 0.3
    apart = hockey_stick([[0, 0], c[:, 0]], [1 - rate, rate], epsilon)
    norm = np.linalg.norm(c[:, 0])
    assert apart == pytest.approx(one_draw(rate, norm, epsilon), rel=1e-3)
    adaptive = hockey_stick([[0, 0], c[:, 0]], [1 - rate, rate], epsilon, told=np.tanh)
    assert adaptive == pytest.approx(apart, rel=1e-3)
    draws = [(0, 0), (1, 0), (0, 1), (1, 1)]
    chances = [np.prod([rate if d else 1 - rate for d in draw]) for draw in draws]
    combined = hockey_stick([c @ np.array(item) for item in draws], chances, epsilon)
    orthogonal = hockey_stick([norm * np.array(value) for value in draws], chances, epsilon)
    assert combined > 1.05 * orthogonal


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"noise": noise.PrefixSum()}, "with noise 'prefix_sum': .*a strategy of few bands"),
        ({"noise": noise.PrefixSum(bands=4)}, "with noise 'prefix_sum.bands=4.'"),
        ({"noise": noise.SpaceTime()}, "with noise 'spacetime'"),
        ({"relation": "replace_record"}, "with relation 'replace_record'"),
        ({"release": True}, "with release=True"),
        ({"rounds": T + 1}, "rounds is 13 .*give a multiple of 3"),
        ({"sampler": Poisson(EXPECTED, 8)}, "with noise 'prefix_sum.bands=3.'"),
        ({"sampler": Poisson(EXPECTED, 8, separation=2)}, "with noise 'prefix_sum.bands=3.'"),
    ],
)
def test_what_is_not_covered_is_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        config(**changes)


@pytest.mark.mutant
def test_understated_plans_are_refused():
    first = made()
    wide = sum(np.diag(np.full(T - lag, 0.5**lag), -lag) for lag in range(SEPARATION + 1))
    with pytest.raises(ValueError, match="more than 3 diagonals"):
        plan.make(config(), ONE, counts=COUNTS, strategy=wide)
    with pytest.raises(ValueError, match="guarantee states ratios"):
        larger = dataclasses.replace(first.noise, strategy=first.strategy * 1.01)
        dataclasses.replace(first, noise=larger)
    with pytest.raises(ValueError, match="more than 3 diagonals"):
        dataclasses.replace(first, noise=dataclasses.replace(first.noise, strategy=wide))
    for other in (2, 4):
        phase = dataclasses.replace(first.guarantee.loss.phases[0], separation=other)
        loss = Pld((phase,))
        text = first.guarantee.replace(other_loss=loss, epsilon=max(2.0, loss.epsilon(DELTA)))
        with pytest.raises(ValueError, match="guarantee.separation is"):
            dataclasses.replace(first, guarantee=text)
    with pytest.raises(ValueError, match="has 11 records in 3 groups; lower it to 3.66667"):
        plan.make(config(), ONE, counts=[11])


@dataclasses.dataclass(frozen=True)
class Anywhere(Poisson):
    """The broken twin: every record flips its coin in every round, at the groups' rate."""

    def draw(self, key, round, counts):
        """As if there were no groups."""
        other = Poisson(self.expected * self.separation, self.capacity, self.records)
        return other.draw(key, round, counts)


@pytest.mark.mutant
def test_sampler_that_ignores_its_groups_is_refused():
    audit(Poisson(EXPECTED, 8, records=60, separation=SEPARATION), COUNTS, T)
    with pytest.raises(ValueError, match="its pattern says 3 apart"):
        audit(Anywhere(EXPECTED, 8, records=60, separation=SEPARATION), COUNTS, T)


def test_record_says_it_and_comes_back():
    stated = made().guarantee
    assert "k = 4, b = 3" in stated.caption()
    assert "in 4 of which, 3 apart, every record may be drawn" in stated.statement()
    assert Guarantee.from_dict(stated.to_dict()) == stated
    # Records of before have no separation: every round counts.
    assert Phase(**{"rates": (0.1,), "ratios": (1.0,), "rounds": 5}).times == 5


def test_sums_are_hidden_by_less_noise_than_without_amplification_or_bands():
    """The noise in the sum of all rounds' answers, at one guarantee."""

    def error(value):
        inverse = np.eye(T) if value.strategy is None else np.linalg.inv(value.strategy)
        return float(value.factor[0, 0]) * np.linalg.norm(np.tril(np.ones((T, T))) @ inverse)

    fresh = config(sampler=Poisson(EXPECTED, 8), noise=noise.Independent())
    white = plan.make(fresh, ONE, counts=COUNTS)
    assert error(made()) < error(white)
