"""What a run states is fixed, and refused, before its first round."""

import dataclasses

import pytest

from dpjax.plans import plan
from dpjax.plans.statements import stopping_rule
from tests.support import make_config


@pytest.fixture(scope="module")
def made(network):
    return plan.make(make_config(design="independent"), network)


def fixed(made, **change):
    options = {"stopping": "plan", "callback": False, "before": None, "planned": False}
    return stopping_rule([made], [5, 10, 20], **(options | change))


def test_phases_that_do_not_compose_are_refused_before_the_first_round(made):
    first = made.guarantee
    (both,) = fixed(made, before=[first], planned=True).at(20)
    assert both == first.followed_by(first, planned=True)
    # Stopped on the way, the later phase counts whole.
    assert fixed(made, before=[first], planned=True, callback=True).at(5) == (
        both.replace(unused=15),
    )
    used = dataclasses.replace(first, delta=first.delta / 2, epsilon=first.epsilon * 2)
    with pytest.raises(ValueError, match="only equal ones compose"):
        fixed(made, before=[used], planned=True)
    with pytest.raises(ValueError, match="in a later phase"):
        fixed(made, before=[first], planned=True, callback=True, stopping="curve")
    with pytest.raises(ValueError, match="planned is False"):
        fixed(made, before=[first])
    with pytest.raises(ValueError, match="planned is 1"):
        fixed(made, before=[first], planned=1)


def test_a_phase_that_was_not_planned_states_the_total_that_was_fixed(made):
    """Ten rounds of a plan, then all of it; twice all of it would pass the total."""
    total = dataclasses.replace(made.config.budget, epsilon=1.4 * made.config.budget.epsilon)
    first = made.guarantee.after(10).within(total)
    ended = fixed(made, before=[first])
    assert [one.epsilon for one in ended.at(20)] == [total.epsilon]
    # Stopped on the way, it counts whole, but for a curve.
    assert ended.at(5)[0].spent.mu == ended.at(20)[0].spent.mu
    curve = fixed(made, before=[first], stopping="curve", callback=True)
    assert curve.at(5)[0].spent.mu == pytest.approx(first.spent.mu * 1.5**0.5)
    assert curve.at(5)[0].epsilon == total.epsilon
    full = made.guarantee.within(total)
    with pytest.raises(ValueError, match="mu of 2 phases is .* more than the total's"):
        fixed(made, before=[full])
    # What is done counts, where that was fixed before the phase.
    short = {"callback": False, "before": [full], "stopping": "plan", "planned": False}
    assert stopping_rule([made], [1], **short).at(1)[0].rounds == 21
    with pytest.raises(ValueError, match=r"give spent=\[first.within\(total\)\]"):
        fixed(made, before=[made.guarantee])


def test_a_curve_is_of_the_ends_of_chunks(made):
    curve = fixed(made, stopping="curve", callback=True)
    assert curve.whole[0].curve.marks == (5, 10, 20)
    assert curve.at(10) == (curve.whole[0].stopped(10),)
    assert curve.at(10)[0].epsilon < fixed(made, callback=True).at(10)[0].epsilon
    with pytest.raises(ValueError, match="marks are"):
        curve.at(7)
