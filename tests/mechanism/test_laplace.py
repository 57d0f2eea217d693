"""Geometric schedules against exact sums of rationals; the printed form shown to overspend."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from dpjax.accounting import pure
from dpjax.contrib import published, schedules
from dpjax.mechanism import laplace


def exact(schedule, power=1):
    """The sum of (gap alpha_{k-1} / nu_k)^power, of the very floats, without rounding."""
    pairs = zip(schedule.step_sizes[:-1], schedule.scales[1:], strict=True)
    gap = Fraction(schedule.gradient_gap)
    return sum(((gap * Fraction(a) / Fraction(s)) ** power for a, s in pairs), Fraction(0))


SETTINGS = [
    (0.1, 1.0, 0.001, 0.92, 0.99),
    (1.0, 0.3, 0.001, 0.97, 0.99),
    (10.0, 2.0, 0.002, 0.2, 0.999),
]


@pytest.mark.parametrize(("epsilon", "gap", "gamma", "q1", "q2"), SETTINGS)
@pytest.mark.parametrize("rounds", [1, 2, 3, 60, 700])
def test_default_spends_what_it_says(epsilon, gap, gamma, q1, q2, rounds):
    schedule = laplace.geometric(epsilon, gap, gamma, q1, q2, rounds)
    want = epsilon * (1 - (q1 / q2) ** (rounds - 1))
    spent = exact(schedule)
    assert abs(float(spent) - want) <= 1e-12 * epsilon
    assert spent <= Fraction(pure.epsilon(schedule.step_sizes, schedule.scales, gap))
    assert pure.epsilon(schedule.step_sizes, schedule.scales, gap) <= epsilon
    assert schedule.spent == pytest.approx(want, rel=1e-12, abs=1e-12 * epsilon)
    assert schedule.budget == epsilon and schedule.noise == "laplace"
    assert schedule.step_sizes.dtype == schedule.scales.dtype == np.float64
    np.testing.assert_allclose(schedule.step_sizes, gamma * q1 ** np.arange(rounds), rtol=1e-13)
    first = gamma * gap / (epsilon * (q2 - q1))
    np.testing.assert_allclose(schedule.scales, first * q2 ** np.arange(rounds), rtol=1e-12)


@pytest.mark.parametrize(("epsilon", "gap", "gamma", "q1", "q2"), SETTINGS)
@pytest.mark.parametrize("rounds", [2, 3, 60, 700])
def test_printed_form_spends_more_than_its_epsilon(epsilon, gap, gamma, q1, q2, rounds):
    printed = laplace.geometric(epsilon, gap, gamma, q1, q2, rounds, printed=True)
    default = laplace.geometric(epsilon, gap, gamma, q1, q2, rounds)
    np.testing.assert_allclose(printed.scales, q2 * default.scales, rtol=1e-12)
    want = epsilon / q2 * (1 - (q1 / q2) ** (rounds - 1))
    assert float(exact(printed)) == pytest.approx(want, rel=1e-12)
    assert printed.spent == pytest.approx(want, rel=1e-12) and printed.budget > epsilon
    # The paper's own sum, which pairs step and noise of the same round, is epsilon in the limit.
    total = (gap * printed.step_sizes / printed.scales).sum()
    assert total == pytest.approx(epsilon * (1 - (q1 / q2) ** rounds), rel=1e-11)


def ratio_on_a_path(schedule, messages):
    """Log p(messages | f) - log p(messages | f') where f' adds the gap to f's gradient, one agent.

    With one agent W = 1 and y = 0: the true state before message k is z(k-1) - alpha_{k-1} g.
    """
    loss = 0.0
    for k, z in enumerate(messages):
        mean = mean_there = 0.0
        if k:
            mean = messages[k - 1] - schedule.step_sizes[k - 1] * messages[k - 1]
            mean_there = mean - schedule.step_sizes[k - 1] * schedule.gradient_gap
        loss += (abs(z - mean_there) - abs(z - mean)) / schedule.scales[k]
    return loss


def path(schedule):
    """Messages above both means in every round, where the likelihood ratio is largest."""
    messages = [0.0]
    for step, scale in zip(schedule.step_sizes[:-1], schedule.scales[1:], strict=True):
        messages.append(messages[-1] - step * messages[-1] + scale)
    return messages


def test_on_explicit_path_printed_noise_tells_more_than_epsilon():
    printed = laplace.geometric(1.0, 1.0, 0.001, 0.97, 0.99, 700, printed=True)
    default = laplace.geometric(1.0, 1.0, 0.001, 0.97, 0.99, 700)
    assert ratio_on_a_path(printed, path(printed)) == pytest.approx(1.0101, abs=1e-5)
    assert 0.99999 < ratio_on_a_path(default, path(default)) <= 1.0
    halved = default._replace(scales=default.scales / 2)
    assert ratio_on_a_path(halved, path(halved)) == pytest.approx(2.0, abs=1e-5)


def test_no_path_tells_more_than_epsilon():
    """All eight orders of three messages around the means, at q1/q2 = .2."""
    schedule = laplace.geometric(1.0, 1.0, 0.5, 0.18, 0.9, 4)
    losses = []
    for sides in product((-1.0, 1.0), repeat=3):
        messages = [0.0]
        for step, side in zip(schedule.step_sizes[:-1], sides, strict=True):
            messages.append(messages[-1] - step * messages[-1] + side * 10)
        losses.append(ratio_on_a_path(schedule, messages))
    assert max(np.abs(losses)) == pytest.approx(schedule.spent, rel=1e-9)
    assert max(np.abs(losses)) <= 1.0


def test_run_spends_its_budget_whole():
    run = laplace.geometric(2.0, 1.0, 0.001, 0.998, 0.999, 200, horizon="run")
    endless = laplace.geometric(2.0, 1.0, 0.001, 0.998, 0.999, 200)
    assert float(exact(run)) == pytest.approx(2.0, rel=1e-12)
    assert pure.epsilon(run.step_sizes, run.scales, 1.0) <= 2.0
    np.testing.assert_allclose(run.scales / endless.scales, endless.spent / 2.0, rtol=1e-12)
    assert run.spent == pytest.approx(2.0, rel=1e-12)
    # Continued beyond its rounds, this schedule would spend more.
    assert run.budget == pytest.approx(4.0 / endless.spent, rel=1e-12)


def test_both_closed_forms_are_inverse():
    for epsilon, gap, gamma, q1, q2 in SETTINGS:
        for rounds in (None, 2, 50):
            scale = laplace.first_scale(epsilon, gap, gamma, q1, q2, rounds)
            back = published.geometric(scale, gap, gamma, q1, q2, rounds)
            assert epsilon <= back <= epsilon * (1 + 1e-13)


@pytest.mark.parametrize("rounds", [2, 5, 300])
def test_gaussian_schedules_spend_what_they_say(rounds):
    mu = 0.7
    gap = 1.5
    gamma = 0.01
    q1 = 0.95
    q2 = 0.98
    schedule = schedules.geometric_gaussian(mu, gap, gamma, q1, q2, rounds)
    want = mu * np.sqrt(1 - (q1 / q2) ** (2 * (rounds - 1)))
    assert float(exact(schedule, 2)) ** 0.5 == pytest.approx(want, rel=1e-12)
    assert pure.mu_of_steps(schedule.step_sizes, schedule.scales, gap) <= mu
    assert (
        exact(schedule, 2)
        <= Fraction(pure.mu_of_steps(schedule.step_sizes, schedule.scales, gap)) ** 2
    )
    assert schedule.spent == pytest.approx(want, rel=1e-12) and schedule.noise == "gaussian"
    run = schedules.geometric_gaussian(mu, gap, gamma, q1, q2, rounds, horizon="run")
    assert float(exact(run, 2)) ** 0.5 == pytest.approx(mu, rel=1e-12)
    assert pure.mu_of_steps(run.step_sizes, run.scales, gap) <= mu


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("epsilon", {"epsilon": 0.0}),
        ("gradient_gap", {"gradient_gap": float("nan")}),
        ("gamma", {"gamma": -1.0}),
        ("q1", {"q1": 1.0}),
        ("q1", {"q1": 0.99}),
        ("q2", {"q2": 1.0}),
        ("rounds", {"rounds": 0}),
        ("rounds", {"rounds": 10**6}),
        ("horizon", {"horizon": "forever"}),
        ("printed", {"printed": True, "horizon": "run"}),
    ],
)
def test_bad_input_is_named(name, change):
    good = dict(epsilon=1.0, gradient_gap=1.0, gamma=0.1, q1=0.9, q2=0.99, rounds=10)
    with pytest.raises(ValueError, match=name):
        laplace.geometric(**{**good, **change})


def of_rationals(gamma, gap, budget, q1, q2):
    return Fraction(gamma) * Fraction(gap) / (Fraction(budget) * (Fraction(q2) - Fraction(q1)))


@pytest.mark.parametrize(
    ("budget", "gap", "gamma"),
    [(1e-200, 1e-200, 1e-200), (1e-300, 1e-165, 1e-165), (1e9, 1e300, 1)],
)
def test_first_scales_of_far_apart_numbers_are_rounded_up(budget, gap, gamma):
    wide = of_rationals(gamma, gap, budget, 0.5, 0.9)
    result = laplace.first_scale(budget, gap, gamma, 0.5, 0.9)
    assert wide <= Fraction(result) <= wide * Fraction(1 + 1e-13)
    squared = wide**2 * (Fraction(0.9) - Fraction(0.5)) / (Fraction(0.9) + Fraction(0.5))
    deviation = schedules.first_deviation(budget, gap, gamma, 0.5, 0.9)
    assert squared <= Fraction(deviation) ** 2 <= squared * Fraction(1 + 1e-13)
    outcome = laplace.geometric(budget, gap, gamma, 0.5, 0.9, 20)
    assert 0.999 * budget < pure.epsilon(outcome.step_sizes, outcome.scales, gap) <= budget
    assert outcome.spent == pytest.approx(budget, rel=1e-4, abs=0)


@pytest.mark.parametrize(("budget", "gap", "gamma"), [(1.0, 1e-200, 1e-200), (1e-9, 1e200, 1e200)])
def test_first_scales_beyond_float64_are_refused(budget, gap, gamma):
    match = f"is {budget:g}, gradient_gap {gap:g} and gamma".replace("+", "[+]")
    for make in (laplace.first_scale, schedules.first_deviation):
        with pytest.raises(ValueError, match=match):
            make(budget, gap, gamma, 0.5, 0.9)
    for make in (laplace.geometric, schedules.geometric_gaussian):
        with pytest.raises(ValueError, match=match):
            make(budget, gap, gamma, 0.5, 0.9, 10)
