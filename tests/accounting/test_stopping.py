"""The price of stopping by what was released: the supremum against four other computations."""

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, special

from dpjax.accounting import gdp, stopping

DELTA = 1e-5


def even(marks, mu=1.0):
    return mu * np.sqrt(np.arange(1, marks + 1) / marks)


def payoff(epsilon, loss):
    return np.maximum(1 - np.exp(np.minimum(epsilon - loss, 0.0)), 0.0)


def profile(epsilon, energy):
    """E(1 - exp(epsilon - Z))_+ for Z ~ N(energy / 2, energy), any real epsilon."""
    root = np.sqrt(energy)
    distant = special.ndtr(root / 2 - epsilon / root)
    return distant - np.exp(epsilon + special.log_ndtr(-root / 2 - epsilon / root))


def two_marks(mus, epsilons):
    """The supremum over two marks by quadrature: stop, or take the last payoff's mean."""
    first = mus[0] ** 2
    step = mus[1] ** 2 - mus[0] ** 2

    def value(loss):
        density = math.exp(-((loss - first / 2) ** 2) / (2 * first))
        best = max(float(payoff(epsilons[0], loss)), float(profile(epsilons[1] - loss, step)))
        return best * density / math.sqrt(2 * math.pi * first)

    ends = first / 2 + np.linspace(-12, 12, 49) * mus[0]
    pieces = [integrate.quad(value, a, b, epsabs=0)[0] for a, b in itertools.pairwise(ends)]
    return math.fsum(pieces)


def coin_tosses(mus, epsilons, tosses):
    """The supremum for a mechanism of coin tosses, which tend to the walk: enumerated exactly."""
    tosses_at = np.rint(np.asarray(mus) ** 2 / mus[-1] ** 2 * tosses).astype(int)
    size = mus[-1] / math.sqrt(tosses)
    up = 1 / (1 + math.exp(-size))
    value = None
    for toss in range(tosses, 0, -1):
        loss = size * np.arange(-toss, toss + 1, 2)
        if value is None:
            value = np.zeros(len(loss))
        for mark in np.flatnonzero(tosses_at == toss):
            value = np.maximum(value, payoff(epsilons[mark], loss))
        value = up * value[1:] + (1 - up) * value[:-1]
    return float(value[0])


def check_bound(function, mus, epsilons, truth, close):
    bound = function(np.asarray(mus), np.asarray(epsilons))
    assert truth * (1 - 1e-9) <= bound <= truth * (1 + close)


@pytest.mark.parametrize("mu", [0.05, 1.0, 7.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.05])
def test_two_marks_are_bounded_from_above_and_closely(mu, delta):
    for share in (0.02, 0.5, 0.9):
        mus = [mu * math.sqrt(share), mu]
        claims = gdp.epsilon(mus, delta)
        check_bound(stopping.supremum, mus, claims, two_marks(mus, claims), 5e-3)
        # A claim of 0 has delta to spare.
        assert claims[0] == 0 or two_marks(mus, claims) > delta * 1.05


@pytest.mark.mutant
def test_rounding_downwards_is_caught(monkeypatch):
    """The broken twin gives every cell's mass to its lower end."""
    mus = even(2)
    claims = gdp.epsilon(mus, DELTA)
    honest = stopping._kernel

    def lower(deviation, spacing, reach):
        first, kernel = honest(deviation, spacing, reach)
        return first - 1, np.append(kernel[1:], 0.0)

    monkeypatch.setattr(stopping, "_kernel", lower)
    with pytest.raises(AssertionError):
        check_bound(stopping.supremum, mus, claims, two_marks(mus, claims), 5e-3)


@pytest.mark.parametrize(("marks", "times"), [(20, 7.1), (100, 11.3)])
def test_stating_fixed_rounds_loss_after_chosen_stop_is_false(marks, times):
    claims = gdp.epsilon(even(marks), DELTA)
    bound = stopping.supremum(even(marks), claims)
    assert bound / DELTA == pytest.approx(times, rel=0.01)
    assert coin_tosses(even(marks), claims, 8000) == pytest.approx(bound, rel=0.04)


@pytest.mark.slow
def test_stating_fixed_rounds_loss_after_every_round_of_2000_is_false():
    claims = gdp.epsilon(even(2000), DELTA)
    assert stopping.supremum(even(2000), claims) / DELTA == pytest.approx(17.9, rel=0.01)


def test_curve_holds_and_is_largest():
    inner = stopping.inner_delta(even(20), DELTA)
    assert DELTA / inner == pytest.approx(8.05, rel=0.005)
    claims = gdp.epsilon(even(20), inner)
    assert claims[0] == pytest.approx(0.93, abs=0.005)
    assert claims[-1] == pytest.approx(4.84, abs=0.005)
    assert gdp.epsilon(1.0, DELTA) == pytest.approx(4.38, abs=0.005)
    assert coin_tosses(even(20), claims, 8000) <= DELTA * 1.01
    # Half a percent more is too much, by the other computation too.
    assert coin_tosses(even(20), gdp.epsilon(even(20), inner * 1.03), 8000) > DELTA


def stops(epsilons, losses, above):
    """Stop at the first mark whose loss is so far above its claim, else at the last."""
    over = losses >= epsilons + above
    over[:, -1] = True
    selection = over.argmax(axis=1)
    rows = np.arange(len(losses))
    return payoff(epsilons[selection], losses[rows, selection])


def test_by_monte_carlo():
    """A stop at the first mark that looks bad: .035 where .01 is claimed, and under the curve."""
    delta = 0.01
    marks = 100
    paths = 50_000
    steps = np.random.default_rng(7).normal(0.5 / marks, math.sqrt(1 / marks), (paths, marks))
    losses = np.cumsum(steps, axis=1)
    naive = gdp.epsilon(even(marks), delta)
    honest = gdp.epsilon(even(marks), stopping.inner_delta(even(marks), delta))
    results = {above: stops(naive, losses, above).mean() for above in (0.1, 0.2, 0.3, 0.5)}
    assert max(results.values()) > 3 * delta
    assert max(results.values()) < stopping.supremum(even(marks), naive)
    for above in (0.1, 0.2, 0.3, 0.5):
        values = stops(honest, losses, above)
        assert values.mean() - 4 * values.std() / math.sqrt(paths) <= delta


def adaptive(energies, claims, moves, hoard):
    """The best of adversaries who choose each mark's step by the loss so far, on a fine grid.

    With ``hoard`` an unspent step may be spent later. Steps are in quarters of a mark's energy.
    """
    marks = len(energies)
    quarter = energies[0] / 4
    loss = np.linspace(-6, 12, 1801)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    maximum = 4 * marks
    value = np.zeros((maximum + 1, len(loss)))  # by quarters left unspent
    for mark in range(marks - 1, -1, -1):
        stopped = np.maximum(value, payoff(claims[mark], loss))
        value = np.zeros_like(stopped)
        for left in range(maximum + 1):
            purse = min(left, maximum) + 4 if hoard else 4
            for spent in {min(move, purse) for move in moves}:
                after = min(purse - spent, maximum) if hoard else 0
                energy = spent * quarter
                places = loss[:, None] + energy / 2 + math.sqrt(energy) * nodes
                mean = np.interp(places, loss, stopped[after]) @ weights
                value[left] = np.maximum(value[left], mean)
    return float(np.interp(0.0, loss, value[0]))


def test_full_steps_are_worst():
    """No plan over smaller, later or unspent steps beats full steps; a larger step does."""
    mus = even(3, 1.5)
    claims = gdp.epsilon(mus, 1e-3)
    bound = stopping.supremum(mus, claims)
    assert adaptive(mus**2, claims, (4,), hoard=False) == pytest.approx(bound, rel=0.05)
    assert adaptive(mus**2, claims, (0, 1, 2, 3, 4), hoard=False) <= bound * 1.005
    assert adaptive(mus**2, claims, range(0, 13), hoard=True) <= bound * 1.005
    # The broken twin: a fourth more energy a mark than accounted.
    assert adaptive(1.25 * mus**2, claims, (4,), hoard=False) > bound * 1.1


def test_one_mark_costs_nothing_and_equal_marks_neither():
    assert stopping.inner_delta([1.0], DELTA) == DELTA
    assert stopping.inner_delta([0.0, 1.0, 1.0], DELTA) == DELTA
    assert stopping.inner_delta([0.5, 1.0], 0.0) == 0
    assert stopping.inner_delta([0.0, 0.0], DELTA) == DELTA
    assert stopping.supremum(np.zeros(2), np.zeros(2)) == 0
    # One mark is the profile itself.
    check_bound(stopping.supremum, [2.0], [3.0], float(gdp.delta(2.0, 3.0)), 4e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("mu", "delta"), [(1e-6, 1e-9), (40.0, 0.4), (3000.0, 1e-9)])
def test_extremes_are_finite_and_between_delta_and_union(mu, delta):
    curve = stopping.Curve(marks=range(1, 6), shares=[1e-8, 0.3, 0.30001, 0.8, 1], delta=0.0)
    inner = stopping.inner_delta(mu * curve.roots, delta)
    assert delta / 5.0001 <= inner <= delta
    mus = mu * np.sqrt(curve.shares)
    assert stopping.supremum(mus, np.asarray(gdp.epsilon(mus, inner))) <= delta * (1 + 1e-9)
    # Without the least share the union of the marks is what is proven.
    assert delta / 3.0001 <= stopping.inner_delta(mu * np.sqrt([1e-18, 0.3, 1]), delta) <= delta


@pytest.mark.slow
def test_tiny_delta():
    inner = stopping.inner_delta(even(20), 1e-100)
    assert 1e-100 / 21 <= inner <= 1e-100 / 20 * 1.01


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stopping.inner_delta([1.0, math.inf], DELTA), "mus reaches inf"),
        (lambda: stopping.Curve(marks=(2, 1), shares=(0.5, 1), delta=0.1), "marks is"),
        (lambda: stopping.Curve(marks=(1, 2), shares=(0.5, 0.9), delta=0.1), "shares is"),
        (lambda: stopping.Curve(marks=(1,), shares=(1.0,), delta=2.0), "delta is"),
    ],
)
def test_bad_numbers_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
