"""Central training by epochs: rounds, rates and noise that belong together."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.algorithms.average import Average
from dpjax.algorithms.dsgd import DSGD
from dpjax.contrib import filtered
from dpjax.contrib.central import TITLES, Assumed, Central, title
from dpjax.contrib.rules import BASES, UpdateRule, read_filter
from dpjax.mechanism import workload
from tests.accounting import lattice


def spent(sigma, rate, rounds, delta):
    """Epsilon of so many rounds by a library that the plan's own accountant is apart from."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    distribution = pld.from_gaussian_mechanism(
        sigma, value_discretization_interval=1e-4, sampling_prob=rate
    )
    return distribution.self_compose(rounds).get_epsilon_for_delta(delta)


@pytest.mark.slow
@pytest.mark.parametrize("larger", [1.0, pytest.param(2.0, marks=pytest.mark.slow)])
def test_noise_is_what_rate_and_rounds_that_run_need(larger):
    (result,) = Central(epochs=3, batch_size=50).plans(
        UpdateRule(), [0.5], 2.0, 1000, larger=larger
    )
    rate = 50 * larger / 1000
    rounds = int(60 / larger)
    assert result.config.rounds == rounds and result.sampler.expected == 50 * larger
    assert result.sampler.capacity == 16
    assert result.sampler.rates(np.array([1000]))[0] == pytest.approx(rate, rel=1e-5)
    assert result.guarantee.delta == pytest.approx(1000**-1.1, rel=1e-9)
    sigma = float(result.factor[0, 0])
    assert spent(sigma, rate, rounds, 1000**-1.1) == pytest.approx(2.0, rel=1e-3)
    # The two numbers that reports of such training give; the clip norm is 1.
    text = f"sampling rate {rate:g}, noise multiplier {sigma:.4g}"
    assert text in result.guarantee.statement()
    # The twins: noise for fewer rounds, for a smaller rate, and noise of a mean for a sum.
    assert spent(sigma, rate, 2 * rounds, 1000**-1.1) > 2.5
    assert spent(sigma, 2 * rate, rounds, 1000**-1.1) > 2.5
    assert spent(sigma / 1.5, rate, rounds, 1000**-1.1) > 2.5


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "width", "points"), [(8.0, 3e-5, 2**20), (1.0, 3.5e-6, 2**21)])
def test_noise_of_many_rounds_spends_budget_to_thousandth(budget, width, points):
    """Between two bounds on what 250 rounds at a rate of 0.004 lose with this noise."""
    count = 50_000
    (result,) = Central(epochs=1, batch_size=200).plans(UpdateRule(), [0.5], budget, count)
    sigma = float(result.factor[0, 0])
    delta = result.guarantee.delta
    assert result.config.rounds == 250
    below, above = lattice.bracket(0.004, 1 / sigma, 250, delta, width, points)
    assert above < 1.001 * below
    assert below <= result.guarantee.exact_epsilon <= above and 0.999 * budget < below < budget
    # The twin: noise a percent smaller is above the budget.
    assert lattice.bracket(0.004, 1.01 / sigma, 250, delta, width, points)[0] > 1.005 * budget


@pytest.mark.slow
def test_post_processing_costs_nothing_and_clipping_says_so():
    stated = set()
    for schedule in ("constant", "cosine"):
        recipe = Central(epochs=2, batch_size=100, schedule=schedule, clip_norm=0.7)
        for text in ("none", "first v1"):
            plans = recipe.plans(UpdateRule("sgd", read_filter(text)), (1.0, 0.1), 4.0, 500)
            assert [plan.config.optimizer.first for plan in plans] == [1.0, 0.1]
            stated |= {(item.guarantee.epsilon, float(item.factor[0, 0])) for item in plans}
    assert len(stated) == 1
    layers = Central(epochs=2, batch_size=100, clipping="flat", per_layer=True)
    (result,) = layers.plans(UpdateRule(), [1.0], 4.0, 500, delta=1e-6)
    assert result.config.protect.per_layer and result.config.protect.clipping == "flat"
    assert result.guarantee.delta == pytest.approx(1e-6, rel=1e-9)


@pytest.mark.slow
def test_methods_are_told_their_rounds_and_bands_divide_them():
    recipe = Central(epochs=2.5, batch_size=100, capacity=32)
    (result,) = recipe.plans(
        UpdateRule(), [1.0], 4.0, 400, method=lambda rounds: Average(DSGD(), 1.0, rounds // 2)
    )
    assert result.config.rounds == 10 and result.config.method.begin == 5
    (banded,) = recipe.plans(UpdateRule(), [1.0], 4.0, 400, bands=4)
    assert banded.config.rounds == 12 and banded.sampler.separation == 4
    assert banded.guarantee.epsilon == result.guarantee.epsilon == 4.0
    assert "sampling rate 0.25," in result.guarantee.statement()
    assert "sampling rate" not in banded.guarantee.statement()
    (complete,) = recipe.plans(UpdateRule(), [1.0], 4.0, 60)
    assert complete.sampler.expected == 60 and complete.config.rounds == math.ceil(2.5)


@pytest.mark.slow
def test_filter_chosen_with_noise_costs_nothing():
    recipe = Central(epochs=2, batch_size=50, capacity=32)
    (single,) = recipe.plans(UpdateRule(), [1.0], 4.0, 400, bands=4)
    argument = Assumed(norm=0.02, correlation=0.9, coordinates=2)
    first, second = recipe.plans(UpdateRule(), [1.0, 0.5], 4.0, 400, bands=4, together=argument)
    assert first.guarantee.epsilon == single.guarantee.epsilon
    np.testing.assert_allclose(first.factor, single.factor, rtol=1e-6)
    # The noise alone is another; a column is as long as before.
    assert abs(first.strategy - single.strategy).max() > 0.004
    lengths = [np.linalg.norm(case.strategy, axis=0) for case in (first, single)]
    np.testing.assert_allclose(*lengths, rtol=1e-12)
    assert np.array_equal(first.strategy, second.strategy)

    rounds = first.config.rounds
    size = 2
    deviation = float(single.factor[0, 0]) / 50
    signal = 0.0004 / size * 0.9 ** abs(np.subtract.outer(np.arange(rounds), np.arange(rounds)))
    signal += np.eye(rounds) / 50 / size
    inverse = np.linalg.inv(first.strategy)
    matrix = filtered.wiener(
        signal, deviation**2 * inverse @ inverse.T, gram=workload.prefix_sum_gram(rounds)
    )
    link = second.config.optimizer.make(0.5)
    gradients = np.random.default_rng(0).normal(size=(rounds, 2))
    state = link.init(jnp.zeros(2))
    steps = []
    for gradient in gradients:
        step, state = link.update(jnp.asarray(gradient, jnp.float32), state)
        steps.append(step)
    want = -0.5 * matrix @ gradients / matrix[-1].sum()
    np.testing.assert_allclose(steps, want, atol=0.02 * abs(want).max())


def test_what_is_no_recipe_is_refused():
    for options, text in (
        ({"epochs": 0.0, "batch_size": 10}, "epochs is 0"),
        ({"epochs": 1.0, "batch_size": -1.0}, "batch_size is -1"),
        ({"epochs": 1.0, "batch_size": 10, "capacity": -2}, "capacity is -2"),
    ):
        with pytest.raises(ValueError, match=text):
            Central(**options)
    recipe = Central(epochs=1.0, batch_size=10)
    for options, text in (
        ({"steps": []}, "steps is empty"),
        ({"count": 0}, "count is 0"),
        ({"larger": 0.0}, "larger is 0"),
        ({"bands": -1}, "bands is -1"),
        ({"together": Assumed(0.1, 0.9, 2)}, "together is given and bands is 0"),
    ):
        argument = {"steps": [1.0], "epsilon": 1.0, "count": 100} | options
        with pytest.raises(ValueError, match=text):
            recipe.plans(UpdateRule(), **argument)


def test_legends_say_what_filter_does():
    assert set(TITLES) == set(BASES)
    assert title(UpdateRule(filter="wiener")) == "SGD, Wiener filtered"
    assert title(UpdateRule("momentum", read_filter("f3"))) == "momentum behind a filter"
