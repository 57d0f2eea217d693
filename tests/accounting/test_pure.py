"""Pure losses against exact rationals, an audit by likelihood ratios, and published budgets."""

from fractions import Fraction

import numpy as np
import pytest

from dpjax.accounting import gdp, losses, pure
from dpjax.contrib import moves, published, schedules
from dpjax.mechanism import laplace


def test_message_one_is_free_and_last_step_is_never_shown():
    assert pure.epsilon([0.5], [1.0], 1.0) == 0.0
    assert pure.epsilon([], [1.0], 1.0) == 0.0
    complete = pure.epsilon([0.5, 0.2, 99.0], [1.0, 2.0, 4.0], 2.0)
    assert complete == pure.epsilon([0.5, 0.2], [1.0, 2.0, 4.0], 2.0)
    assert complete == pytest.approx(2 * (0.5 / 2 + 0.2 / 4), rel=1e-14)


@pytest.mark.parametrize("seed", range(4))
def test_losses_are_never_below_exact_ones_and_close(seed):
    rng = np.random.default_rng(seed)
    steps = np.exp(rng.uniform(-30, 5, 400))
    scales = np.exp(rng.uniform(-30, 5, 400))
    gap = float(np.exp(rng.uniform(-5, 5)))
    single = [
        Fraction(gap) * Fraction(a) / Fraction(s)
        for a, s in zip(steps[:-1], scales[1:], strict=True)
    ]
    exact = square = Fraction(0)
    for k, value in enumerate(single, start=2):
        exact = exact + value
        square = square + value**2
        first = steps[:k], scales[:k], gap
        assert exact <= Fraction(pure.epsilon(*first)) <= exact * Fraction(1 + 1e-14)
        assert square <= Fraction(pure.mu_of_steps(*first)) ** 2 <= square * Fraction(1 + 1e-14)


def test_extreme_numbers_stay_on_safe_side():
    assert pure.epsilon([1e-200], [1.0, 1e-300], 1e-200) == pytest.approx(1e-100, rel=1e-12)
    assert pure.epsilon([5e-324], [1.0, 1e300], 1.0) > 0
    assert pure.mu_of_steps([1e-250], [1.0, 1.0], 1.0) > 0
    assert pure.epsilon([1.0], [1.0, 0.0], 1.0) == np.inf
    assert pure.epsilon([0.0], [1.0, 0.0], 1.0) == 0.0
    assert pure.epsilon([1.0, 1.0], [1.0, 2.0, 0.0], 1.0) == np.inf
    assert pure.mu_of_steps([1.0, 1.0, 1.0], [1.0, 2.0, 0.0, 2.0], 1.0) == np.inf
    assert pure.mu_of_steps([1e300], [1.0, 1e-300], 1.0) == np.inf


def test_moves_of_several_variables_add_up():
    steps = 0.1 * 0.9 ** np.arange(6)
    gap = 1.5
    moved = moves.moves("pp_doagt", steps, gap, own_weight=0.3)
    scales = np.stack([2.0 * 0.95 ** np.arange(6), 0.7 * 0.97 ** np.arange(6)], axis=1)
    want = sum(
        Fraction(a) / Fraction(b) for a, b in zip(moved.ravel(), scales.ravel(), strict=True)
    )
    result = pure.epsilon_of_sensitivities(moved, scales)
    assert want <= Fraction(result) <= want * Fraction(1 + 1e-14)
    assert pure.epsilon_of_sensitivities(moved, scales[:, 0]) == pytest.approx(
        (moved / scales[:, :1]).sum(), rel=1e-13
    )
    assert pure.epsilon_of_sensitivities(moved, 2.0) == pytest.approx(moved.sum() / 2, rel=1e-13)
    assert pure.mu_of_sensitivities(moved, scales) == pytest.approx(
        np.sqrt(((moved / scales) ** 2).sum()), rel=1e-13
    )
    assert pure.epsilon_of_sensitivities(1.0, 2.0) == pytest.approx(0.5, rel=1e-13)
    same = pure.epsilon_of_sensitivities(moves.tracking(steps, gap), scales[:, 0])
    assert same == pytest.approx(pure.epsilon(steps, scales[:, 0], gap), rel=1e-13)


def audited(schedule, scale=1.0, runs=200_000):
    """Largest log ratio of frequencies of an event under adjacent problems, and its error.

    One agent, gradients 0 and gap: message k is the one before, less the step, plus noise. The
    event is the one that tells most: every message at most where the second problem's mean is.
    """
    rng = np.random.default_rng(0)
    hits = []
    for gradient in (0.0, schedule.gradient_gap):
        messages = rng.laplace(size=(runs, len(schedule.scales))) * schedule.scales * scale
        inside = np.ones(runs, bool)
        state = display = np.zeros(runs)
        for k, noise in enumerate(messages.T):
            z = state + noise
            if k:
                inside &= z <= display - schedule.step_sizes[k - 1] * schedule.gradient_gap
            display = z
            state = z - schedule.step_sizes[k] * gradient
        hits.append(inside.sum())
    ratio = np.log(hits[1] / hits[0])
    return ratio, 4 * np.sqrt(1 / hits[0] + 1 / hits[1])


def test_audit_finds_no_more_than_epsilon_and_finds_halved_noise():
    schedule = laplace.geometric(1.0, 1.0, 0.5, 0.15, 0.9, 4)
    assert schedule.spent > 0.99
    result, error = audited(schedule)
    assert result - error <= 1.0 and result + error >= schedule.spent
    halved, error = audited(schedule, scale=0.5)
    assert halved - error > 1.0


def test_losses_take_numbers():
    schedule = laplace.geometric(1.0, 1.0, 0.001, 0.97, 0.99, 300)
    spent = pure.epsilon(schedule.step_sizes, schedule.scales, 1.0)
    assert losses.Pure(spent, 300).epsilon(0.0) == spent
    gaussian = schedules.geometric_gaussian(gdp.mu(1.0, 1e-5), 1.0, 0.001, 0.97, 0.99, 300)
    mu = pure.mu_of_steps(gaussian.step_sizes, gaussian.scales, 1.0)
    assert gdp.epsilon(mu, 1e-5) <= 1.0


# gamma, q1 and q2 of Algorithm 1 by epsilon, as printed.
PRINTED = {10.0: (0.002, 0.97, 0.99), 1.0: (0.001, 0.97, 0.99), 0.1: (0.001, 0.92, 0.99)}


@pytest.mark.parametrize("epsilon", PRINTED)
def test_published_budgets(epsilon):
    gamma, q1, q2 = PRINTED[epsilon]
    scale = laplace.first_scale(epsilon, 1.0, gamma, q1, q2, printed=True)
    common = dict(q1=q1, q2=q2, gamma=gamma)
    own = published.budget("tracking", scale, gradient_gap=1.0, **common)
    assert own.epsilon == pytest.approx(epsilon, rel=1e-12) and not own.reconstruction
    truth = published.geometric(scale, 1.0, gamma, q1, q2)
    assert truth == pytest.approx(epsilon / q2, rel=1e-12) and truth > own.epsilon

    # Bounded gradients: 2 C2 sqrt(p) is the gap.
    dpop = published.budget("dpop", scale, gradient_bound=0.25, dimension=4, **common)
    assert dpop.epsilon == pytest.approx(epsilon, rel=1e-12) and dpop.reconstruction

    rival = published.budget("pp_doagt", scale, gradient_gap=1.0, **{**common, "gamma": 1.0})
    ratio = published.REPORTED["pp_doagt"][epsilon] / rival.epsilon
    assert ratio == pytest.approx({10.0: 1.2298, 1.0: 1.2176, 0.1: 1.2176}[epsilon], abs=1e-4)
    filled = published.budget(
        "pp_doagt", scale, gradient_gap=1.0, constant=ratio - 1, **{**common, "gamma": 1.0}
    )
    assert filled.epsilon == pytest.approx(published.REPORTED["pp_doagt"][epsilon], rel=1e-9)

    other = published.budget("diff_tv_ab", scale, gradient_gap=1.0, **common)
    ratio = published.REPORTED["diff_tv_ab"][epsilon] / other.epsilon
    assert ratio == pytest.approx({10.0: 1.0138, 1.0: 1.0068, 0.1: 1.0070}[epsilon], abs=1e-4)


def test_first_message_alone_is_not_what_diff_tv_ab_costs():
    gamma, q1, q2 = PRINTED[1.0]
    scale = laplace.first_scale(1.0, 1.0, gamma, q1, q2, printed=True)
    spent = []
    for rounds in (1, 100, 500):
        steps = gamma * q1 ** np.arange(rounds)
        moved = moves.moves("diff_tv_ab", steps, 1.0, own_weight=0.1)
        spent.append(pure.epsilon_of_sensitivities(moved, scale * q2 ** np.arange(rounds)))
    claim = published.budget("diff_tv_ab", scale, q1=q1, q2=q2, gamma=gamma, gradient_gap=1.0)
    assert spent[0] == pytest.approx(claim.epsilon, rel=1e-9)
    assert spent[1] > 100 * spent[0] and spent[2] > 50 * spent[1]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("step_sizes", lambda: pure.epsilon([1.0, 1.0, 1.0], [1.0], 1.0)),
        ("step_sizes", lambda: pure.epsilon([], [1.0, 1.0], 1.0)),
        ("step_sizes", lambda: pure.epsilon([-1.0], [1.0, 1.0], 1.0)),
        ("scales", lambda: pure.epsilon([1.0], [1.0, np.nan], 1.0)),
        ("gradient_gap", lambda: pure.epsilon([1.0], [1.0, 1.0], 0.0)),
        ("scales", lambda: pure.epsilon_of_sensitivities(np.ones((3, 2)), np.ones(4))),
        ("first_scale", lambda: published.geometric(0.0, 1.0, 0.1, 0.5, 0.9)),
        ("method", lambda: published.budget("gt", 1.0, q1=0.5, q2=0.9, gamma=1.0)),
        ("gradient_gap", lambda: published.budget("tracking", 1.0, q1=0.5, q2=0.9, gamma=1.0)),
        ("gradient_bound", lambda: published.budget("dpop", 1.0, q1=0.5, q2=0.9, gamma=1.0)),
    ],
)
def test_bad_input_is_named(name, call):
    with pytest.raises(ValueError, match=name):
        call()


@pytest.mark.parametrize("rounds", [None, 3])
@pytest.mark.parametrize(
    ("scale", "gap", "gamma"), [(1e-300, 1e-165, 1e-165), (1e300, 1e200, 1e200), (1.0, 2.0, 3.0)]
)
def test_geometric_losses_of_far_apart_numbers_are_rounded_up(scale, gap, gamma, rounds):
    q1 = Fraction(0.5)
    q2 = Fraction(0.9)
    want = Fraction(gap) * Fraction(gamma) / (Fraction(scale) * (q2 - q1))
    want *= 1 if rounds is None else 1 - (q1 / q2) ** (rounds - 1)
    result = published.geometric(scale, gap, gamma, 0.5, 0.9, rounds)
    assert want <= Fraction(result) <= want * Fraction(1 + 1e-13)


def test_geometric_losses_beyond_float64_are_never_below_truth():
    assert 0 < published.geometric(1.0, 1e-200, 1e-200, 0.5, 0.9) < 1e-300
    assert published.geometric(1.0, 1e200, 1e200, 0.5, 0.9) == np.inf
