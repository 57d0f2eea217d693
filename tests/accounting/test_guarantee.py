"""The guarantee record: it cannot understate, spends by rounds, and survives JSON."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpjax.accounting import budget, gdp, losses, stopping
from dpjax.accounting.guarantee import Guarantee
from dpjax.accounting.rounding import up
from dpjax.accounting.wording import ATTACKERS
from dpjax.results import captions


def make(**change):
    fields = {
        "epsilon": 10.0,
        "delta": 1e-5,
        "mu": gdp.mu(10.0, 1e-5),
        "relation": "replace_agent",
        "attacker": "outsider",
        "rounds": 5000,
        "clip_norm": 0.1,
        "accountant": "gdp",
        "release": False,
    }
    return Guarantee.of(**(fields | change))


def paper(epsilon, **change):
    mu = budget.allowed_mu(epsilon, 1e-5, accountant="paper", allow_unsound=True)
    return make(epsilon=float(epsilon), mu=mu, accountant="paper", **change)


def test_unit_follows_relation():
    assert make().unit == "agent"
    assert make(relation="zero_out_record").unit == "record"
    with pytest.raises(ValueError, match="unit is 'record'"):
        make(unit="record")


def test_fields_of_privacy_have_no_default():
    for name in ("relation", "attacker", "accountant", "release", "rounds", "clip_norm"):
        fields = make().fields()
        fields.pop(name)
        with pytest.raises(TypeError, match=name):
            Guarantee.of(**fields)


@pytest.mark.mutant
@pytest.mark.parametrize("accountant", ["gdp", "rdp", "paper"])
def test_understated_epsilon_is_refused(accountant):
    mu = gdp.mu(10.0, 1e-5)
    assert make(mu=mu, accountant=accountant).exact_epsilon <= 10
    with pytest.raises(ValueError, match="exact epsilon is"):
        make(mu=mu * (1 + 1e-9), accountant=accountant)
    with pytest.raises(ValueError, match="exact epsilon is"):
        make(epsilon=9.99, accountant=accountant)


def test_papers_false_claim_is_stated_beside_truth():
    with pytest.raises(ValueError, match="exact epsilon is 41.7"):
        paper(40)
    false = paper(40, unsound=True)
    assert "FALSE" in false.statement() and "exact epsilon = 41.76" in false.statement()
    assert "FALSE" in false.caption() and "41.77" in false.caption()
    with pytest.raises(ValueError, match="unsound"):
        make(unsound=True)
    with pytest.raises(ValueError, match="unsound"):
        make(epsilon=9.0, unsound=True)
    true = paper(10)
    assert "FALSE" not in true.statement() and "exact epsilon = 6.9" in true.statement()


@pytest.mark.parametrize("rounds", [1, 100, 4999, 5000])
def test_spent_after_some_rounds(rounds):
    guarantee = make()
    spent = guarantee.after(rounds)
    truth = gdp.epsilon(guarantee.mu * math.sqrt(rounds / 5000), 1e-5)
    assert spent.epsilon == pytest.approx(truth, rel=1e-9)
    assert spent.epsilon >= gdp.epsilon(guarantee.mu * math.sqrt(rounds / 5000) * 0.9999, 1e-5)
    assert spent.rounds == rounds and spent.delta == 1e-5
    # What t rounds spend is what a run planned for t rounds with the same noise would state.
    bound = (guarantee.mu / 0.2) ** 2 / 5000
    loss = budget.loss(
        np.eye(3) / bound, 1e-5, rounds=rounds, clip_norm=0.1, relation="replace_agent"
    )
    assert spent.epsilon == pytest.approx(loss.epsilon[0], rel=1e-9)


def test_nothing_is_spent_before_start_and_extension_is_refused():
    assert make().after(0).epsilon == 0
    with pytest.raises(ValueError, match="covers 5000"):
        make().after(5001)
    with pytest.raises(ValueError, match="covers 100"):
        make().after(100).after(101)
    assert make().after(5000).epsilon <= 10
    # Spending in two steps is spending once.
    twice = make().after(2000).after(500)
    assert twice.epsilon == pytest.approx(make().after(500).epsilon, rel=1e-12)


def test_correlated_rounds_spend_whole_loss_at_once():
    spent = make(white=False).after(1)
    assert spent.mu == pytest.approx(make().mu, rel=1e-12) and spent.epsilon <= 10


def test_spent_under_looser_accountants_is_exact():
    loose = paper(10).after(5000)
    assert loose.accountant == "gdp"
    assert loose.epsilon == pytest.approx(paper(10).exact_epsilon, rel=1e-9)


@pytest.mark.parametrize("accountant", budget.ACCOUNTANTS)
def test_budgets_per_agent(accountant):
    each = (1.0, 5.0, 10.0)
    mus = budget.allowed_mu(each, 1e-5, accountant=accountant)
    guarantee = make(mu=float(mus.max()), accountant=accountant, per_agent_epsilon=each)
    spent = guarantee.after(1250)
    assert spent.per_agent_epsilon == pytest.approx(gdp.epsilon(mus / 2, 1e-5), rel=1e-6)
    assert all(
        stated >= truth
        for stated, truth in zip(spent.per_agent_epsilon, gdp.epsilon(mus / 2, 1e-5), strict=True)
    )
    assert "1 to 10 by agent" in guarantee.statement()
    # An exact epsilon beside the range is that of the largest, and says so.
    exact = accountant != "gdp"
    assert ("[largest exact epsilon " in guarantee.caption()) == exact
    largest = f"exact epsilon = {up(guarantee.exact_epsilon)}, at the agent with the larg"
    assert (largest in guarantee.statement()) == exact
    assert "[exact epsilon " not in guarantee.caption()
    with pytest.raises(ValueError, match="maximum"):
        make(per_agent_epsilon=(1.0, 2.0))


def test_statement_says_everything():
    text = make().statement()
    for part in (
        "epsilon = 10,",
        "delta = 1e-05",
        "per agent",
        "replace_agent",
        "clip norm 0.1",
        "5,000 rounds",
        ATTACKERS["outsider"],
        "exactly",
        "mu = 2.00045",
        "Simulation: whoever knows the seed can subtract the noise.",
        "The promises about other participants hold for parties who do not know it.",
    ):
        assert part in text
    released = make(release=True, relation="replace_record").statement()
    assert "Release" in released and "Simulation" not in released
    assert "replacing one record" in released
    caption = make().caption()
    for part in ("epsilon = 10", "1e-05", "agent", "outsider", "T = 5000", "gdp", "simulation"):
        assert part in caption
    assert "release" in make(release=True).caption()


def test_printed_epsilon_is_rounded_up():
    mu = gdp.mu(3.14159, 1e-5)
    assert "epsilon = 3.142," in make(epsilon=3.14159, mu=mu).caption()
    assert "epsilon = 3.14159," in make(epsilon=3.14159, mu=mu).caption(6)
    assert "epsilon = 3.1416," in make(epsilon=3.1415900001, mu=mu).statement()
    # A budget of 3 that is kept up to rounding, or up to what finite precision costs.
    assert "epsilon = 3.001" in make(epsilon=3.0000001, mu=gdp.mu(3.0, 1e-5)).caption()
    assert "epsilon = 3.00001" in make(epsilon=3.0000055, mu=gdp.mu(3.0, 1e-5)).statement()


@given(st.floats(1e-300, 1e300), st.integers(1, 6))
def test_what_is_printed_is_never_below(value, digits):
    display = up(value, digits)
    assert value <= float(display) <= value * (1 + 10.0 ** (1 - digits)) * (1 + 1e-15)
    assert len(display.partition("e")[0].replace(".", "").strip("0")) <= digits
    assert up(1e-5) == "1e-05" and up(math.inf) == "inf"


def test_non_private():
    nothing = Guarantee.none(70)
    assert nothing.epsilon == nothing.mu == math.inf
    assert nothing.statement().startswith("Not private")
    assert nothing.after(7) == Guarantee.none(7)
    with pytest.raises(ValueError, match="covers 70"):
        nothing.after(71)
    with pytest.raises(ValueError, match="relation is None"):
        make(relation=None)


@pytest.mark.parametrize(
    "guarantee",
    [
        make(),
        make(release=True, relation="zero_out_record"),
        make().after(17),
        make(per_agent_epsilon=(2.0, 10.0)),
        paper(40, unsound=True),
        Guarantee.none(5),
    ],
)
def test_json_round_trip(guarantee):
    text = json.dumps(guarantee.to_dict(), allow_nan=False)
    assert Guarantee.from_dict(json.loads(text)) == guarantee


def test_records_are_checked_when_read():
    record = make().to_dict()
    with pytest.raises(ValueError, match="exact epsilon"):
        Guarantee.from_dict(record | {"epsilon": 1.0})
    with pytest.raises(ValueError, match="colour"):
        Guarantee.from_dict(record | {"colour": "red"})
    record.pop("relation")
    with pytest.raises(ValueError, match="missing .*relation"):
        Guarantee.from_dict(record)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("delta", 1.0),
        ("delta", math.nan),
        ("mu", -1.0),
        ("epsilon", math.nan),
        ("rounds", -1),
        ("rounds", 2.5),
        ("clip_norm", 0.0),
        ("relation", "replace"),
        ("attacker", "everyone"),
        ("accountant", "moments"),
    ],
)
def test_malformed_records_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} is"):
        make(**{field: value})


def test_runs_in_row_compose():
    first = make().after(2000)
    second = make().after(3000)
    pair = first.followed_by(second, planned=True)
    # Together they are the 5,000 rounds they came from.
    assert pair.mu == pytest.approx(make().mu, rel=1e-12) and pair.rounds == 5000
    assert pair.epsilon == pytest.approx(make().epsilon, rel=1e-6)
    assert pair.mu > max(first.mu, second.mu)
    with pytest.raises(ValueError, match="only equal ones compose"):
        first.followed_by(make(delta=1e-6, epsilon=12.0), planned=True)


def cyclic(**change):
    fields = {"relation": "zero_out_record", "rounds": 380, "participation": (20, 19)}
    return make(**(fields | change))


@pytest.mark.parametrize(("rounds", "times"), [(1, 1), (19, 1), (20, 2), (190, 10), (380, 20)])
def test_participations_are_spent_as_they_come(rounds, times):
    """After one round a record may have taken part once: more than a share by rounds would say."""
    stated = cyclic()
    spent = stated.after(rounds)
    assert spent.mu == pytest.approx(stated.mu * math.sqrt(times / 20))
    assert spent.mu >= stated.mu * math.sqrt(rounds / 380) * (1 - 1e-12)
    assert spent.participation == (times, 19)
    assert spent.after(1).mu == pytest.approx(stated.mu * math.sqrt(1 / 20))
    complete = cyclic(white=False).after(rounds)
    assert complete.mu == pytest.approx(stated.mu) and complete.participation == (times, 19)
    assert stated.after(0).mu == 0


def test_participation_is_printed_stored_and_checked():
    stated = cyclic(white=False)
    text = stated.statement()
    assert (
        "380 rounds, of which every record takes part in at most 20, 19 apart, with noise" in text
    )
    assert "k = 20, b = 19" in stated.caption()
    assert Guarantee.from_dict(json.loads(json.dumps(stated.to_dict()))) == stated
    old = make().to_dict()
    del old["participation"]
    assert Guarantee.from_dict(old) == make()
    for invalid in ((20,), (381, 1), (20, 0), "20"):
        with pytest.raises(ValueError, match="participation"):
            cyclic(participation=invalid)
    with pytest.raises(ValueError, match="an agent takes part in every round"):
        make(participation=(20, 19))


def test_participations_compose():
    pair = cyclic().after(25).followed_by(cyclic(), planned=True)
    assert pair.participation == (22, 19) and pair.rounds == 405
    assert pair.mu == pytest.approx(cyclic().mu * math.sqrt(22 / 20))
    with pytest.raises(ValueError, match="only equal separations"):
        cyclic().followed_by(cyclic(participation=(19, 20)), planned=True)
    with pytest.raises(ValueError, match="only equal separations"):
        cyclic().followed_by(cyclic(participation=None), planned=True)


def test_concentrated_losses_say_rho_and_who_comes_how_often():
    def stated(times, apart):
        loss = losses.Concentrated(0.5, 40, True, (times, apart))
        return Guarantee.of(
            epsilon=loss.epsilon(1e-5), delta=1e-5, mu=None, other_loss=loss, accountant="zcdp",
            relation="zero_out_client", attacker="aggregator", rounds=40, clip_norm=1.0,
            release=False,
        ).statement()  # fmt: skip

    text = stated(4, 10)
    assert "40 rounds, of which every client takes part in at most 4, 10 apart, against" in text
    assert "(zCDP), rho = 0.5. " in text
    # Once is no number of rounds apart.
    assert "takes part in at most 1, against" in stated(1, 40)


def finite(record, epsilon=1e-3, delta=1e-8):
    """The record of noise of finite precision, which states what that costs on top."""
    total = gdp.epsilon(record.mu, record.delta - delta) + epsilon
    return record.replace(epsilon=total, added_epsilon=epsilon, added_delta=delta)


def test_parts_of_users_own_are_named_wherever_guarantee_is():
    first = make(custom=("Mine",))
    for text in (first.statement(), first.caption(), *captions.guarantees(first.to_dict())):
        assert "relies on your own `Mine`" in text
    rows = first.protection()
    assert all(("`Mine`" in row.why) == (row.epsilon is not None) for row in rows)
    assert Guarantee.from_dict(json.loads(json.dumps(first.to_dict()))) == first
    assert "custom" not in make().to_dict() and "your own" not in make().statement()
    pair = make().followed_by(first, planned=True).followed_by(make(custom=("His",)), planned=True)
    assert pair.custom == ("Mine", "His") and "`Mine`, `His`" in pair.caption()
    assert first.after(7).custom == ("Mine",)
    nameless = make(custom=("train.main.<locals>.<lambda>", "Random.draw"))
    assert Guarantee.from_dict(nameless.to_dict()) == nameless
    assert "your own `train.main.<locals>.<lambda>`, `Random.draw`" in nameless.caption()
    for name in ("two words", "a,b", "", "`", "\x1b", 1):
        with pytest.raises(ValueError, match="custom is"):
            make(custom=(name,))


def test_finite_precision_costs_epsilon_and_part_of_delta():
    exact = make(release=True)
    record = finite(exact)
    assert record.exact_epsilon == gdp.epsilon(record.mu, 1e-5 - 1e-8) + 1e-3
    assert record.exact_epsilon == pytest.approx(10.001, abs=1e-3)
    assert "0.001 of epsilon and 1e-08 of delta" in record.statement()
    assert "epsilon = 10.01" in record.caption() and "not in it" in exact.statement()
    assert Guarantee.from_dict(json.loads(json.dumps(record.to_dict()))) == record
    # Its part of the rounds, and two in a row, carry it on.
    for part in (1, 2500, 5000):
        assert record.after(part).epsilon >= exact.after(part).epsilon + 1e-3
    pair, plain = (case.followed_by(case, planned=True) for case in (record, exact))
    assert pair.epsilon >= plain.epsilon + 2e-3 and pair.added_delta == 2e-8


def test_noise_calibrated_for_less_leaves_its_stated_epsilon_to_finite_precision():
    mu = gdp.mu(10.0 - 0.01, 1e-5)
    plan = make(release=True, mu=mu)
    stated = "; 0.01 of epsilon and 1e-07 of delta are for noise of finite precision"
    assert f"{stated}, and a run that needs more is refused" in plan.statement()
    record = plan.replace(added_epsilon=1e-3, added_delta=1e-8)
    assert record.epsilon == 10.0 and record.exact_epsilon < 10.0
    # The broken copy: the same cost of noise that was calibrated for all of epsilon.
    with pytest.raises(ValueError, match="state at least that"):
        make(release=True).replace(added_epsilon=1e-3, added_delta=1e-8)


@pytest.mark.parametrize("accountant", ["gdp", "rdp"])
def test_parts_of_budgets_that_differ_state_no_more_than_whole_and_no_less_than_is_true(
    accountant,
):
    epsilons = (4.0, 9.0, 10.0)
    mus = [budget.allowed_mu(0.999 * epsilon, 1e-5, accountant=accountant) for epsilon in epsilons]
    record = make(
        epsilon=10.0, per_agent_epsilon=epsilons, mu=max(mus), accountant=accountant,
        release=True, added_epsilon=1e-3, added_delta=1e-8,
    )  # fmt: skip
    for rounds in (1, 2500, 5000):
        part = record.after(rounds)
        for stated, mu, complete in zip(part.per_agent_epsilon, mus, epsilons, strict=True):
            minimum = gdp.epsilon(mu * math.sqrt(rounds / 5000), 1e-5 - 1e-8) + 1e-3
            assert minimum <= stated <= complete


def test_finite_precision_cannot_be_left_out_or_use_up_delta():
    record = finite(make(release=True))
    with pytest.raises(ValueError, match="state at least that"):
        record.replace(epsilon=10.0)
    for cost in ((-1.0, 0.0), (math.inf, 0.0), (0.0, -1e-9), (0.0, 1e-5)):
        with pytest.raises(ValueError, match="added_"):
            make(epsilon=11.0, added_epsilon=cost[0], added_delta=cost[1])
    half = finite(make(release=True), 1e-3, 6e-6)
    with pytest.raises(ValueError, match="uses up delta"):
        half.followed_by(half, planned=True)


def test_release_states_loss_of_all_messages():
    make(attacker="coalition", release=True)
    for change in ({"attacker": "aggregator"}, {"attacker": "coalition", "gradients": "view"}):
        make(**change)
        with pytest.raises(ValueError, match="State the loss of all messages"):
            make(**change, release=True)
    assert "cannot see" in make(attacker="coalition", gradients="view").statement()


def test_what_older_records_call_nodes_is_coalition():
    older = make(attacker="coalition").to_dict() | {"attacker": "nodes"}
    stated = Guarantee.from_dict(older)
    assert stated == make(attacker="coalition")
    assert "Protected from the stated nodes together" in " ".join(map(str, stated.protection()))


def test_old_records_are_readable():
    old = make(release=True).to_dict()
    for name in ("added_epsilon", "added_delta", "gradients", "curve", "private_stop"):
        del old[name]
    assert Guarantee.from_dict(old) == make(release=True)


MARKS = tuple(range(250, 5001, 250))


def test_curve_holds_at_whichever_mark_run_stops():
    stated = make(epsilon=5.0, mu=1.0)
    curved = stated.stopping_at(MARKS)
    stopped = [curved.stopped(mark) for mark in MARKS]
    mus = np.array([item.mu for item in stopped])
    epsilons = np.array([value.epsilon for value in stopped])
    np.testing.assert_allclose(mus, np.sqrt(np.arange(1, 21) / 20), rtol=1e-12)
    assert stopping.supremum(mus, epsilons) <= 1e-5
    # The numbers for rounds fixed beforehand do not hold, by 7 times.
    fixed = np.array([stated.after(mark).epsilon for mark in MARKS])
    assert stopping.supremum(mus, fixed) == pytest.approx(7.1e-5, rel=0.01)
    assert epsilons[0] == pytest.approx(0.93, abs=0.005)
    assert epsilons[-1] == curved.epsilon == pytest.approx(4.84, abs=0.005)
    assert stopped[0].rounds == 250 and stopped[0].delta == 1e-5
    assert stopped[-1] == curved.stopped(5000) and make().stopped(5000) == make()
    early = make().stopped(250)
    assert early == make().replace(unused=4750)
    assert "over 5,000 planned rounds (of which 250 were run) against" in early.statement()
    assert early.after(300) == make().after(300)
    for part in (curved, stopped[3]):
        assert Guarantee.from_dict(json.loads(json.dumps(part.to_dict()))) == part
        assert "20 rounds, fixed beforehand" in part.statement()
        assert "may stop at 20 marks" in part.caption()
    assert Guarantee.none(5).stopping_at([5]) == Guarantee.none(5)


def test_curves_of_budgets_participations_and_correlated_rounds():
    mus = gdp.mu((4.0, 10.0), 1e-5)
    each = make(mu=float(mus.max()), per_agent_epsilon=(4.0, 10.0)).stopping_at(MARKS)
    part = each.stopped(1000)
    shares = np.sqrt(np.arange(1, 21) / 20)
    for mu, complete in zip(mus, each.per_agent_epsilon, strict=True):
        claims = gdp.epsilon(mu * shares, each.curve.delta)
        assert complete == pytest.approx(claims[-1], rel=1e-6)
        assert stopping.supremum(mu * shares, claims) <= 1e-5
    assert part.per_agent_epsilon == pytest.approx(
        gdp.epsilon(mus * math.sqrt(0.2), each.curve.delta), rel=1e-6
    )
    few = cyclic().stopping_at((1, 20, 380))
    assert few.curve.shares == pytest.approx((1 / 20, 2 / 20, 1))
    assert few.stopped(20).participation == (2, 19)
    complete = make(white=False).stopping_at(MARKS)
    assert complete.curve.delta == 1e-5 and complete.stopped(250).epsilon <= 10.0001
    half = make(white=False).stopping_at((2500, 5000), shares=(0.5, 1.0))
    assert half.stopped(2500).mu == pytest.approx(make().mu / math.sqrt(2))
    assert half.epsilon > 10


def test_curve_of_finite_precision_pays_for_its_larger_epsilon():
    record = finite(make(epsilon=5.0, mu=1.0, release=True), 1e-3, 5e-8)
    curved = record.stopping_at(MARKS)
    grown = math.exp(curved.epsilon - record.epsilon)
    assert curved.added_delta >= 5e-8 * grown
    assert curved.curve.delta < make(mu=1.0).stopping_at(MARKS).curve.delta
    assert curved.epsilon >= gdp.epsilon(1.0, curved.curve.delta) + 1e-3
    with pytest.raises(ValueError, match="leaves nothing for a curve"):
        finite(make(epsilon=6.0, mu=1.0, release=True), 1e-3, 9.9e-6).stopping_at(MARKS)


def test_what_curve_refuses():
    curved = make().stopping_at(MARKS)
    with pytest.raises(ValueError, match=r"use stopped\(rounds\)"):
        curved.after(250)
    for rounds in (251, 0, 5001):
        with pytest.raises(ValueError, match="rounds is"):
            curved.stopped(rounds)
    with pytest.raises(ValueError, match="covers 5000"):
        make().stopped(5001)
    with pytest.raises(ValueError, match="end them at the 5000"):
        make(white=False).stopping_at((1, 2))
    with pytest.raises(ValueError, match="rising to 1"):
        make().stopping_at((1, 2))
    with pytest.raises(ValueError, match="state at least that"):
        dataclasses.replace(curved, epsilon=10.0)
    with pytest.raises(ValueError, match="curve.delta is"):
        dataclasses.replace(curved, delta=curved.curve.delta / 2, epsilon=99.0)
    # A curve whose delta was made up.
    naive = dataclasses.replace(curved.curve, delta=1e-5)
    with pytest.raises(ValueError, match="too much to hold at all its marks"):
        dataclasses.replace(curved, curve=naive)
    with pytest.raises(ValueError, match="too much to hold at all its marks"):
        dataclasses.replace(curved.stopped(250), curve=naive)
    with pytest.raises(ValueError, match="compose those"):
        curved.stopped(250).followed_by(make(), planned=True)


def test_phase_decided_on_after_first_is_not_covered():
    """Two equal phases, the second run only if the first looks bad: 1.87 times delta."""
    first = make(mu=gdp.mu(5.0, 1e-5) / math.sqrt(2), epsilon=10.0)
    pair = first.followed_by(first, planned=True)
    mus = np.array([first.mu, pair.mu])
    single = gdp.epsilon(first.mu, 1e-5)
    decided = stopping.supremum(mus, np.array([single, pair.epsilon]))
    assert decided == pytest.approx(1.87e-5, rel=0.01)
    # Planned, both are run whatever the first showed: the number of both holds.
    assert stopping.supremum(mus[1:], np.array([pair.epsilon])) <= 1.01e-5
    with pytest.raises(ValueError, match="planned is False"):
        first.followed_by(first, planned=False)
    with pytest.raises(TypeError, match="planned"):
        first.followed_by(first)


def test_stop_by_private_metrics_is_said():
    stated = make(private_stop=True)
    assert (
        "NOT covered: the round at which it ended was left to a callback, which could read metrics"
        in stated.statement()
    )
    assert "stopping round not covered" in stated.caption()
    assert "not covered" not in make().caption() + make().statement()
    assert Guarantee.from_dict(json.loads(json.dumps(stated.to_dict()))) == stated
    assert stated.followed_by(make(), planned=True).private_stop


def test_what_sum_counts_on_is_stated_and_composes_to_what_both_runs_cover():
    options = dict(
        epsilon=2.0, delta=1e-5, mu=0.4, relation="zero_out_client", attacker="aggregator",
        rounds=4, clip_norm=1.0, accountant="gdp", release=False,
    )  # fmt: skip
    first = Guarantee.of(**options, dropouts=3, colluders=1)
    other = Guarantee.of(**options, dropouts=2, colluders=4)
    pair = first.followed_by(other, planned=True)
    # Larger numbers would promise what one of the runs has no noise for.
    assert (pair.dropouts, pair.colluders) == (2, 1)
    assert first.followed_by(Guarantee.of(**options, sum_only=True), planned=True).sum_only
    assert (
        "(3 missing, 1 colluding)" in first.caption()
        and "missing" not in Guarantee.of(**options).caption()
    )
    assert first.after(2).dropouts == 3
    outside = Guarantee.of(**options | {"attacker": "outsider"}, colluders=2)
    assert "at most 2 show it their messages and noise" in outside.statement()
    with pytest.raises(ValueError, match="colluders is -1"):
        Guarantee.of(**options, colluders=-1)
