"""What a run states is fixed, and refused, before its first round."""

import dataclasses

import pytest

from dpjax.plans import plan
from dpjax.plans.endings import endings
from tests.support import make_config


@pytest.fixture(scope="module")
def made(network):
    return plan.make(make_config(design="independent"), network)


def fixed(made, **change):
    options = {"stopping": "plan", "callback": False, "before": None, "planned": False}
    return endings([made], [5, 10, 20], **(options | change))


def test_phases_that_do_not_compose_are_refused_before_the_first_round(made):
    first = made.guarantee
    (both,) = fixed(made, before=[first], planned=True).at(20)
    assert both == first.followed_by(first, planned=True)
    # Stopped on the way, the later phase counts whole.
    assert fixed(made, before=[first], planned=True, callback=True).at(5) == (both,)
    used = dataclasses.replace(first, delta=first.delta / 2, epsilon=first.epsilon * 2)
    with pytest.raises(ValueError, match="only equal ones compose"):
        fixed(made, before=[used], planned=True)
    with pytest.raises(ValueError, match="in a later phase"):
        fixed(made, before=[first], planned=True, callback=True, stopping="curve")
    with pytest.raises(ValueError, match="planned is False"):
        fixed(made, before=[first])
    with pytest.raises(ValueError, match="planned is 1"):
        fixed(made, before=[first], planned=1)


def test_a_curve_is_of_the_ends_of_chunks(made):
    curve = fixed(made, stopping="curve", callback=True)
    assert curve.whole[0].curve.marks == (5, 10, 20)
    assert curve.at(10) == (curve.whole[0].stopped(10),)
    assert curve.at(10)[0].epsilon < fixed(made, callback=True).at(10)[0].epsilon
    with pytest.raises(ValueError, match="marks are"):
        curve.at(7)
