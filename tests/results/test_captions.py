"""Captions state every guarantee among the rows, and never less than it."""

import math
import re

import pytest

from dpjax.accounting import gdp, losses
from dpjax.accounting.guarantee import Guarantee
from dpjax.accounting.rounding import delta_text
from dpjax.results import captions


def private(epsilon=10.0, **changes):
    fields = {
        "epsilon": epsilon, "delta": 1e-5, "mu": float(gdp.mu(epsilon, 1e-5)),
        "relation": "replace_agent", "attacker": "outsider", "rounds": 5000, "clip_norm": 0.1,
        "accountant": "gdp", "release": False,
    }  # fmt: skip
    return Guarantee.of(**{**fields, **changes})


def test_one_guarantee_reads_as_its_own_caption():
    for case in (private(), private(relation="replace_record", release=True), Guarantee.none(7)):
        assert captions.guarantees(case) == [case.caption()]
        assert captions.guarantees(case.to_dict()) == [case.caption()]
    assert captions.guarantees("any text") == ["any text"]
    assert captions.guarantees(None) == captions.guarantees([]) == []


def test_budgets_are_told_together_and_kinds_apart():
    def told(*value):
        return captions.guarantees([item.to_dict() for item in value])

    (second,) = told(private(3.0), private(10.0), private(3.0), Guarantee.none(5000))
    assert second.startswith("(epsilon = 3 and 10, delta = 1e-05)-DP per agent (replace_agent)")
    (many,) = told(*map(private, (3.0, 5.0, 7.0, 40.0)))
    assert many.startswith("(epsilon = 3 to 40, ")
    agent, record = told(private(), private(relation="replace_record"))
    assert "per agent" in agent and "per record" in record
    assert told(Guarantee.none(10), Guarantee.none(20)) == ["not private, T = 10 and 20"]
    assert captions.guarantees([None, math.nan, private()]) == [private().caption()]


def test_agents_with_budgets_of_their_own_are_told():
    single = private(per_agent_epsilon=(2.0, 10.0))
    assert "epsilon = 2 to 10 by agent," in captions.guarantees(single)[0]


def test_no_printed_epsilon_is_below_stated_one():
    for epsilon in (3.00001, 9.99949, 0.123449, 1234.1):
        text = captions.guarantees(private(epsilon))[0]
        display = float(text.removeprefix("(epsilon = ").split(",")[0])
        assert epsilon <= display <= epsilon * 1.001


@pytest.mark.parametrize("delta", [0.999999, 1 - 2.0**-53, 0.99996, 5e-324, 1e-5, 1.23456e-7])
def test_printed_delta_is_rounded_up_within_0_and_1(delta):
    single = private(delta=delta, mu=1e-6)
    texts = [*captions.guarantees(single), *captions.guarantees(single.to_dict()), single.caption()]
    for text in (*texts, single.statement()):
        display = float(re.search(r"delta ?= ?([-+.e0-9]+)", text)[1])
        assert delta <= display < 1 and 0 < display <= max(delta * 1.001, 1e-323)


def test_delta_of_0_is_0():
    assert delta_text(0.0) == "0" and delta_text(1.0) == "1" and delta_text(0.5, 1) == "0.5"


def test_false_statement_is_marked():
    true = private()
    record = true.replace(epsilon=5.0, accountant="paper", unsound=True).to_dict()
    (text,) = captions.guarantees(record)
    assert "FALSE" in text and "[FALSE: exact epsilon " in text
    assert "FALSE" not in captions.guarantees(true)[0]


def test_what_is_no_guarantee_is_refused():
    with pytest.raises(ValueError, match="give a text"):
        captions.guarantees([3])


def cyclic(epochs, separation, **changes):
    fields = {"relation": "zero_out_record", "participation": (epochs, separation), "rounds": 380}
    return private(**fields, **changes)


def test_stops_and_views_are_told_and_told_apart():
    curved = private(rounds=20).stopping_at((10, 20))
    arguments = [curved, private(rounds=20), private(rounds=20, private_stop=True)]
    arguments.append(private(rounds=20, attacker="coalition", gradients="view"))
    assert captions.guarantees(arguments) == [item.caption() for item in arguments]
    assert captions.guarantees([value.to_dict() for value in arguments]) == [
        case.caption() for case in arguments
    ]


def test_custom_parts_are_named_together():
    """A figure of many models of one's own has one caption, beside that of the package's parts."""
    arguments = [private(custom=names) for names in (("Net",), ("Net", "rule"), ("Wide",), ())]
    first, second = captions.guarantees([*arguments, private(custom=("Net",), epsilon=12.0)])
    assert first.endswith("relies on your own `Net`, `rule`, `Wide`") and "10 and 12" in first
    assert second == arguments[-1].caption()
    assert captions.guarantees(arguments[1].to_dict()) == [arguments[1].caption()]


def test_participations_are_told_and_told_apart():
    """A guarantee for 20 of 380 rounds must not read like one for all."""
    few = cyclic(20, 19)
    all_rounds = private(relation="zero_out_record", rounds=380)
    for case in (few, cyclic(1, 380), all_rounds):
        assert captions.guarantees(case) == [case.caption()]
        assert captions.guarantees(case.to_dict()) == [case.caption()]
    first, second, third = captions.guarantees([few, cyclic(19, 20), all_rounds])
    assert "T = 380, k = 20, b = 19, " in first and "T = 380, k = 19, b = 20, " in second
    assert "k = " not in third
    (pair,) = captions.guarantees([few, cyclic(20, 19, epsilon=3.0)])
    assert "epsilon = 3 and 10" in pair and "k = 20, b = 19" in pair


def test_assumed_gap_is_in_every_caption():
    """A figure whose guarantee rests on an assumption says so, apart from others."""
    loss = losses.Pure(bound=1.0, rounds=10)
    options = dict(
        epsilon=1.0, delta=0.0, mu=None, other_loss=loss, relation="replace_agent",
        attacker="outsider", rounds=10, clip_norm=math.inf, accountant="pure", release=False,
        norm="l1",
    )  # fmt: skip
    results = [Guarantee.of(**options, gradient_gap=gap) for gap in (1.0, 0.5)]
    (caption,) = captions.guarantees([item.to_dict() for item in results])
    assert "ASSUMED l1 gap 0.5 and 1)" in caption
    clipped = Guarantee.of(**(options | {"clip_norm": 0.5}))
    assert len(captions.guarantees([clipped, results[0]])) == 2
    smooth = Guarantee.of(**options, gradient_gap=1.0, smoothness=3.0)
    assert "ASSUMED l1 gap 1 and smoothness 3)" in captions.guarantees(smooth)[0]
