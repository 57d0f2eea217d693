"""Rows of a guarantee's protection, what is stored of them, and groups of records."""

import json
from typing import get_args

import numpy as np
import pytest
from scipy import stats

from dpjax.accounting import finite, gdp, losses, parties, sampled
from dpjax.accounting.guarantee import Guarantee
from dpjax.accounting.sampled import Pld
from dpjax.plans.protect import Budget

DELTA = 1e-5


def make(**change):
    fields = {
        "epsilon": 1.0, "delta": DELTA, "mu": gdp.mu(1.0, DELTA), "relation": "replace_record",
        "attacker": "outsider", "rounds": 10, "clip_norm": 0.1, "accountant": "gdp",
        "release": False, "secrets": "own",
    }  # fmt: skip
    return Guarantee.of(**(fields | change))


def with_loss(loss, **change):
    return make(mu=None, other_loss=loss, epsilon=loss.epsilon(change.get("delta", DELTA)),
                accountant=loss.kind, rounds=loss.rounds, **change)  # fmt: skip


@pytest.mark.parametrize("secrets", [*get_args(parties.Secrets), None])
def test_what_is_stored_of_secrets_comes_back(secrets):
    single = make(secrets=secrets, white=False, over_rounds="correlated")
    stored = json.loads(json.dumps(single.to_dict(), allow_nan=False))
    assert Guarantee.from_dict(stored) == single
    assert stored.get("secrets") == secrets


def test_older_records_promise_nothing_to_other_participants():
    stored = make().to_dict()
    del stored["secrets"]
    old = Guarantee.from_dict(stored)
    rows = {row.party: row for row in old.protection()}
    assert rows[parties.ANOTHER].epsilon is None and rows["an outsider"].epsilon == 1.0
    assert "older record" in old.statement()
    assert "or of a scale that changes" in make(white=False).statement()


def test_records_that_contradict_themselves_are_refused():
    with pytest.raises(ValueError, match="secrets is 'open'"):
        make(secrets="open")
    with pytest.raises(ValueError, match="over_rounds is 'correlated' of noise that is white"):
        make(over_rounds="correlated")
    with pytest.raises(ValueError, match="over_rounds is 'always'"):
        make(over_rounds="always", white=False)


@pytest.mark.parametrize(
    ("first", "later", "pair"),
    [("own", "own", "own"), ("own", "shared", "shared"), ("group", "own", "group"),
     ("shared", "group", None), ("group", "group", None), ("own", None, None),
     ("own", "alone", None)],
)  # fmt: skip
def test_phases_protect_whom_both_protect(first, later, pair):
    one = make(secrets=first).followed_by(make(secrets=later), planned=True)
    assert one.secrets == pair


def test_groups_of_one_phase_may_be_other_ones_in_next():
    """Agents 0 and 3 of two groups share a seed in the second phase; an outsider has neither."""
    pair = make(secrets="group").followed_by(make(secrets="group"), planned=True)
    rows = {row.party: row for row in pair.protection()}
    assert rows["an outsider"].epsilon == pair.epsilon
    assert rows[parties.ANOTHER].epsilon is None and "may differ" in rows[parties.ANOTHER].why
    assert not any("group" in party for party in rows)


def test_other_rows_state_no_less_than_holds_under_papers_rule():
    single = make(epsilon=40.0, mu=gdp.mu(41.7, DELTA), accountant="paper", unsound=True)
    assert single.protection()[1].epsilon == single.exact_epsilon > 41


def test_loss_of_sums_says_nothing_of_agents_who_see_messages():
    rows = {row.party: row for row in make(attacker="aggregator").protection()}
    assert rows["an aggregator or server"].epsilon == 1.0
    assert rows["an outsider"].epsilon is None and rows[parties.ANOTHER].epsilon is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"attacker": "node", "gradients": "view"}, "gradients that do not depend on what it"),
        (
            {"sum_only": True, "dropouts": 3, "colluders": 2},
            "at most 3 missing from a sum and 2 coll",
        ),
        (
            {"gradient_gap": 2.0, "clip_norm": np.inf, "relation": "replace_agent"},
            "the gradient gap 2 is ASSUMED",
        ),
    ],
)
def test_promises_say_what_they_count_on(changes, text):
    for row in make(**changes).protection():
        assert (text in row.why) == (row.epsilon is not None)


def test_noise_that_run_lost_protects_from_nobody():
    single = make(relation="replace_agent", lost_noise=(7, 0.5))
    assert {row.epsilon for row in single.protection()} == {None}
    assert all("from round 7 on" in row.why for row in single.protection()[:-2])
    assert f"NOT protected from {parties.ANOTHER}" in single.statement()


def at_sites(**change):
    return make(**({"release": True, "sites": True} | change))


def promises(record):
    """Whether each party is promised anything, by its name."""
    return {row.party: row.epsilon is not None for row in record.protection()}


GROUP, OTHER = f"{parties.ANOTHER} of its own group", f"{parties.ANOTHER} of another group"


@pytest.mark.parametrize(
    ("change", "others"),
    [
        ({"secrets": "own"}, {parties.ANOTHER: True, "a participant who has left": True}),
        (
            {"secrets": "group"},
            {GROUP: False, OTHER: True, "a participant who has left": False},
        ),
        ({"secrets": "shared"}, {parties.ANOTHER: False, "a participant who has left": False}),
        ({"secrets": "links"}, {parties.ANOTHER: False, "a participant who has left": False}),
        (
            {"secrets": "links", "attacker": "node"},
            {parties.ANOTHER: True, "a participant who has left": True},
        ),
        ({"secrets": "own", "attacker": "node"},
         {parties.ANOTHER: True, "a participant who has left": True}),
        ({"secrets": None}, {parties.ANOTHER: False, "a participant who has left": False}),
        ({"secrets": "alone"}, {}),
    ],
)  # fmt: skip
def test_sites_protect_from_who_lacks_secret(change, others):
    """Nobody aggregates, no process holds all, and no seed draws the noise."""
    single = at_sites(**change)
    insiders = {"the operator of a site": False, "whoever gets a site's secret": False}
    assert promises(single) == {"an outsider": True} | others | insiders
    text = f"{single.statement()} {single.protection()}"
    for word in ("seed", "this process", "aggregator", "Simulation", "Release:"):
        assert word not in text
    # Every sentence of a statement agrees with its row.
    for row in single.protection():
        if row.party not in ("an outsider", parties.ANOTHER):
            assert str(row) in single.statement()


def test_sites_that_collude_are_stated_and_nobody_else():
    single = at_sites(secrets="links", attacker="coalition", nodes=(0, 2))
    covered = [party for party, holds in promises(single).items() if holds]
    assert covered == ["the coalition of agents 0, 2"]
    assert "sites that collude" in single.statement() and "agents 0, 2" in single.statement()


def test_neighbours_of_sites_read_messages():
    row = {row.party: row for row in at_sites().protection()}[parties.ANOTHER]
    assert "also together" in row.why and "single noisy messages, not averages" in row.why
    assert "members of a group hold its secret" in at_sites(secrets="group").statement()


def test_noise_that_site_lost_protects_from_nobody():
    single = at_sites(relation="replace_agent", lost_noise=(7, 0.5))
    assert not any(promises(single).values())
    assert "NOISE LOST" in single.caption()


@pytest.mark.parametrize(
    ("kind", "change"),
    [("simulation", {}), ("release", {"release": True}),
     ("sites", {"release": True, "sites": True})],
)  # fmt: skip
def test_captions_end_with_kind(kind, change):
    single = make(**change)
    assert single.kind == kind and single.caption().endswith(f"gdp accountant, {kind}")
    statement = single.statement()
    named = [word for word in ("Simulation:", "Release:", "Sites:") if word in statement]
    assert named == [f"{kind.capitalize()}:"]


def test_statement_of_sites_names_what_is_assumed():
    # That of a loop of one's own ends before its kind; sites have theirs always.
    for statement in (at_sites().statement(), at_sites().statement(process=False)):
        for text in ("ChaCha20", "HKDF", "256 bits", "copy of its folder", "roster", "entropy"):
            assert text in statement
        assert "sees every message on every link" in statement


def test_links_without_encryption_are_named():
    text = "links were NOT encrypted: started with --insecure-loopback"
    bare = at_sites(insecure=True, custom=("Net",))
    assert text in bare.caption() and text in bare.statement()
    assert bare.caption().endswith("relies on your own `Net`")
    assert text not in at_sites().caption() + at_sites().statement()


@pytest.mark.parametrize("insecure", [False, True])
def test_what_is_stored_of_sites_comes_back(insecure):
    single = at_sites(insecure=insecure)
    stored = json.loads(json.dumps(single.to_dict(), allow_nan=False))
    back = Guarantee.from_dict(stored)
    assert back == single and back.caption() == single.caption()
    assert stored["sites"] is True and stored.get("insecure", False) == insecure
    assert "sites" not in make(release=True).to_dict()
    assert Guarantee.of(**single.fields()) == single


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"release": False}, "sites is True with release False"),
        ({"sites": False, "insecure": True}, "insecure is True and sites False"),
        ({"sites": 1}, "sites is 1"),
        ({"attacker": "aggregator"}, "in a release"),
        ({"attacker": "node", "gradients": "view"}, "in a release"),
        ({"attacker": "node", "secrets": "group"}, "plan for attacker 'outsider'"),
        ({"attacker": "node", "secrets": "shared"}, "plan for attacker 'outsider'"),
        ({"attacker": "node", "secrets": None}, "plan for attacker 'outsider'"),
        ({"attacker": "coalition", "nodes": (0,), "secrets": "shared"}, "can subtract the noise"),
        ({"secrets": "shares"}, "read single messages"),
        ({"sum_only": True}, "read single messages"),
    ],
)
def test_sites_are_refused_where_their_promise_is_false(change, text):
    with pytest.raises(ValueError, match=text):
        at_sites(**change)


def test_secret_batches_of_sites_are_refused():
    loss = Pld.of(rates=[0.1], ratios=[1.0], rounds=10)
    changes = {"relation": "zero_out_record", "release": True}
    with_loss(loss, **changes)
    with pytest.raises(ValueError, match="give another sampler"):
        with_loss(loss, **changes, sites=True)


def test_phases_of_sites_compose_with_their_kind_alone():
    phase = at_sites(insecure=True)
    both = at_sites().followed_by(phase, planned=True)
    assert both.kind == "sites" and both.insecure and both.epsilon > 1.0
    for other, name in ((make(), "release"), (make(release=True), "sites")):
        for first, later in ((phase, other), (other, phase)):
            with pytest.raises(ValueError, match=f"{name} is .*; only equal ones compose"):
                first.followed_by(later, planned=True)
    total = Budget(epsilon=3.0, delta=DELTA)
    stated = at_sites().within(total)
    assert stated.kind == "sites" and not stated.insecure
    joined = stated.followed_by(phase, planned=False)
    assert joined.kind == "sites" and joined.insecure and len(joined.phases) == 2
    assert Guarantee.from_dict(joined.to_dict()) == joined
    with pytest.raises(ValueError, match="sites is .*; only equal ones compose"):
        stated.followed_by(make(release=True), planned=False)


def test_parts_of_sites_keep_their_kind():
    assert at_sites().after(5).kind == at_sites().stopping_at([5, 10]).stopped(5).kind == "sites"
    with pytest.raises(ValueError, match="sites is False, and True of its 1 phase"):
        at_sites().within(Budget(epsilon=3.0, delta=DELTA)).replace(sites=False)


def hockey_stick(p, q, epsilon):
    """Delta of two densities on a grid, by brute force."""
    return max(np.maximum(a - np.exp(epsilon) * b, 0).sum() for a, b in ((p, q), (q, p)))


@pytest.mark.parametrize("records", [2, 5])
def test_several_records_under_gaussian_noise(records):
    """More records move the mean k times as far: brute force, and no less noise than that."""
    single = make()
    stated = parties.group_epsilon(single, records)
    grid = np.linspace(-15, 15, 400_001)
    distance = records * single.mu
    p = stats.norm.pdf(grid)
    q = stats.norm.pdf(grid - distance)
    width = grid[1] - grid[0]
    assert hockey_stick(p * width, q * width, stated) <= DELTA * (1 + 1e-6)
    # Tight; and what one record costs, times k, would not hold.
    assert hockey_stick(p * width, q * width, stated * 0.99) > DELTA
    assert hockey_stick(p * width, q * width, records * 1.0) > DELTA


def test_several_records_under_other_losses():
    pure = with_loss(losses.Pure(0.5, 10), delta=0.0)
    assert parties.group_epsilon(pure, 5) == pure.for_records(5) == pytest.approx(2.5, rel=1e-12)
    # Laplace noise of scale 2: odds of outputs beyond both are e^(5 / 2), whatever the grid.
    assert stats.laplace.logpdf(9, scale=2) - stats.laplace.logpdf(9 - 5, scale=2) == -2.5
    rho = with_loss(losses.Concentrated(0.01, 10))
    squared = losses.Concentrated(0.25, 10).epsilon(DELTA)
    assert parties.group_epsilon(rho, 5) == pytest.approx(squared, rel=1e-12)
    # The Gaussian of that rho is exact: zCDP states no less.
    exact = gdp.epsilon(5 * np.sqrt(0.02), DELTA)
    assert exact <= parties.group_epsilon(rho, 5) <= 1.3 * exact
    # Each of five steps with the same roundings may fail.
    partial = with_loss(losses.Concentrated(0.01, 10, failure=DELTA / 8))
    rest = losses.Concentrated(0.25, 10).epsilon(DELTA * 3 / 8)
    assert parties.group_epsilon(partial, 5) == pytest.approx(rest, rel=1e-12)
    assert parties.group_epsilon(partial, 9) == np.inf


@pytest.mark.parametrize(("rate", "ratio"), [(0.1, 0.5), (0.3, 0.2), (0.02, 1.0)])
@pytest.mark.parametrize("records", [2, 5])
def test_several_records_in_sampled_batches(rate, ratio, records):
    """One round: k coins, each moving the mean by the ratio, against none of them."""
    single = with_loss(Pld.of([rate], [ratio], 1), relation="zero_out_record")
    stated = parties.group_epsilon(single, records)
    grid = np.linspace(-14, 14 + records * ratio, 400_001)
    width = grid[1] - grid[0]
    drawn = stats.binom.pmf(np.arange(records + 1), records, rate)
    p = sum(w * stats.norm.pdf(grid - j * ratio) for j, w in enumerate(drawn))
    q = stats.norm.pdf(grid)
    assert hockey_stick(p * width, q * width, stated) <= DELTA
    # The broken copy: what one record costs.
    assert hockey_stick(p * width, q * width, single.epsilon) > DELTA
    # No more than noise without sampling.
    assert stated <= losses.Gaussian(records * ratio).epsilon(DELTA) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("rate", "ratio", "rounds", "delta", "records", "maximum"),
    [
        (256 / 60_000, 1 / 1.3349, 14_000, 1e-6, 2, 4.73),  # By Renyi divergences.
        (256 / 60_000, 1 / 1.3349, 14_000, 1e-6, 5, 15.71),
        (0.01, 1.0, 1000, DELTA, 8, 200.0),  # 33,078 where the steps' epsilon was not reached.
    ],
)
def test_several_records_over_many_sampled_rounds(rate, ratio, rounds, delta, records, maximum):
    loss = Pld.of([rate], [ratio], rounds)
    stated = parties.group_epsilon(
        with_loss(loss, delta=delta, relation="zero_out_record"), records
    )
    assert stated <= maximum
    # One record's epsilon holds at the delta that so many steps take; a little less does not.
    epsilon = stated / records
    steps = sum(np.exp(j * epsilon) for j in range(records))
    assert loss.epsilon(delta / steps) <= epsilon
    reduced = 0.99 * epsilon
    assert loss.epsilon(delta / sum(np.exp(j * reduced) for j in range(records))) > reduced


def test_statement_composes_few_times(monkeypatch):
    """All deltas that several records ask for are read off few compositions, and not 40."""
    composed = sampled._composed
    counts = []

    def counted(*args):
        counts.append(args)
        return composed(*args)

    monkeypatch.setattr(sampled, "_composed", counted)
    loss = Pld.of([256 / 59_999], [1 / 1.3349], 14_000)
    single = with_loss(loss, delta=1e-6, relation="zero_out_record")
    single.statement()
    assert len(counts) <= 6
    # As close as by 40.
    assert single.for_records(2) <= 1.003 * 4.40993 and single.for_records(5) <= 1.003 * 14.83607


@pytest.mark.parametrize("records", [2, 3, 5])
@pytest.mark.parametrize("strategy", [None, np.eye(6) + 0.5 * np.eye(6, k=-1)])
@pytest.mark.parametrize("mu", [0.05, 0.3, 0.9])
def test_finite_precision_of_group_is_that_of_means_further_apart(mu, strategy, records):
    """Of the same noise under k times the shift, by the bound for one record of that mu."""
    factor = np.eye(3) - 0.2
    spacing = finite.release_grid(factor, 6, strategy).spacing
    position = {"spacing": spacing, "parameters": 10**5, "delta": DELTA, "clip_norm": 1.0}
    single, distant = (
        finite.release_cost(factor, 6, strategy, mu=k * mu, **position) for k in (1, records)
    )
    bound = finite.of_group(records, mu, (single.epsilon, single.delta), DELTA)
    assert distant.epsilon <= bound.epsilon and distant.delta <= bound.delta
    record = make(release=True, mu=mu, epsilon=np.inf, added_epsilon=single.epsilon,
                  added_delta=single.delta)  # fmt: skip
    exact = gdp.epsilon(records * mu, DELTA - distant.delta) + distant.epsilon
    assert exact <= parties.group_epsilon(record, records) <= 1.05 * exact < np.inf


@pytest.mark.parametrize(("epsilon", "records"), [(1.0, 5), (3.0, 5), (8.0, 2), (12.0, 2)])
def test_release_under_total_states_what_groups_cost(epsilon, records):
    """By brute force: the total's mu so many times over, at delta, and little more than that."""
    phase = make(release=True, mu=0.1, epsilon=np.inf)
    total = phase.within(Budget(epsilon, DELTA))
    stated = total.for_records(records)
    grid = np.linspace(-15, 15, 400_001)
    width = grid[1] - grid[0]
    p, q = (stats.norm.pdf(grid - mean) * width for mean in (0, records * total.mu))
    assert hockey_stick(p, q, stated) <= DELTA
    minimum = gdp.epsilon(records * total.mu, DELTA)
    assert minimum < stated <= minimum * 1.02
    assert f"{records} records cost at most epsilon = {parties.up(stated)}" in total.statement()


def test_finite_precision_that_takes_all_of_delta_states_nothing():
    # A plan does not know yet what its run will add, and allows for the most.
    planned = make(release=True, epsilon=1.001)
    ran = planned.replace(added_epsilon=1e-6, added_delta=1e-5 * DELTA)
    assert parties.group_epsilon(planned, 2) > parties.group_epsilon(ran, 2)
    assert parties.group_epsilon(ran, 1) <= ran.epsilon
    assert parties.group_epsilon(planned, 1) == planned.epsilon
    # Shifts of so many deviations pass what normals of finite precision can hide.
    large = make(release=True, epsilon=12.012, mu=gdp.mu(12.0, DELTA))
    assert parties.group_epsilon(large, 5) == np.inf
    why = "5 records no finite epsilon follows, as noise of finite precision may take all of delta"
    assert f"{why} there; the run's result may" in large.statement()
    spent = large.replace(added_epsilon=1e-6, added_delta=1e-9)
    assert f"{why} there" in spent.statement() and "result may" not in spent.statement()
    maximum = make(release=True, epsilon=3.0, added_epsilon=1e-3, added_delta=9.99e-6)
    assert parties.group_epsilon(maximum, 5) == np.inf


def test_statements_per_record_say_what_person_with_several_gets():
    text = make().statement()
    second, five = (parties.group_epsilon(make(), k) for k in (2, 5))
    costs = (
        f"2 records cost at most epsilon = {parties.up(second)}, 5 records cost at most epsilon = "
    )
    assert f"is protected less, at the same delta and against the same attacker: {costs}" in text
    assert f"{costs}{parties.up(five)}." in text
    loud = make(epsilon=5.0, mu=gdp.mu(5.0, DELTA)).statement()
    assert "that of 5 is vacuous" in loud
    assert "several records" not in make(relation="replace_agent").statement()
    curve = make().stopping_at((5, 10)).statement()
    assert "several records of one person cost together is not stated with a curve" in curve


def test_table_prints_rows_that_fit_window():
    lines = str(make().protection()).splitlines()
    assert lines[1].startswith("another participant        epsilon = 1    every agent")
    assert lines[2].startswith(" " * 42) and max(map(len, lines)) <= 100
    for start in (
        "whoever runs this process  NOT protected  it",
        "whoever holds the seed     NOT ",
    ):
        assert any(line.startswith(start) for line in lines)


def test_several_records_are_refused_where_no_record_is_unit():
    agents = with_loss(losses.Pure(0.5, 10), delta=0.0).replace(relation="replace_agent")
    with pytest.raises(ValueError, match="unit is 'agent', for which no cost of records"):
        agents.for_records(2)
    with pytest.raises(ValueError, match="records is 0"):
        with_loss(losses.Pure(0.5, 10), delta=0.0).for_records(0)
