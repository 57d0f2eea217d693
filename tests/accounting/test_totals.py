"""Totals over phases: exact adversaries against the filter, the naive rule and broken filters."""

import dataclasses
import functools
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from dpjax.accounting import budget, discrete, gdp, losses, records
from dpjax.accounting.guarantee import Guarantee
from dpjax.accounting.rounding import up
from dpjax.mechanism import temporal
from dpjax.mechanism.participation import Participation
from dpjax.plans import plan
from dpjax.plans.protect import Budget
from dpjax.topology import graphs, mixing
from tests.accounting.test_stopping import payoff, profile
from tests.support import make_config

DELTA = 1e-5
TOTAL = Budget(epsilon=3.0, delta=DELTA)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)


def phase(mu=None, **change):
    fields = dict(
        epsilon=math.inf, delta=DELTA, mu=mu and float(mu), relation="replace_record", rounds=100,
        attacker="outsider", clip_norm=1.0, accountant="gdp", release=False,
    )  # fmt: skip
    return Guarantee.of(**(fields | change))


def expected(value, mu, loss, thresholds=()):
    """E value(loss + step) for a phase of full effect, step ~ N(mu^2 / 2, mu^2) of its loss.

    Quadrature on panels that end where the value jumps.
    """
    ends = mu**2 / 2 + mu * np.linspace(-10, 10, 11)
    ends = np.union1d(ends, [t - loss for t in thresholds if ends[0] < t - loss < ends[-1]])
    middle = (ends[1:] + ends[:-1]) / 2
    half = (ends[1:] - ends[:-1]) / 2
    steps = (middle[:, None] + half[:, None] * _NODES).ravel()
    weights = (half[:, None] * _WEIGHTS).ravel()
    density = np.exp(-((steps - mu**2 / 2) ** 2) / (2 * mu**2)) / (mu * math.sqrt(2 * math.pi))
    return float((weights * density) @ value(loss + steps))


def last(epsilon, mu):
    """E(1 - exp(epsilon - L))_+ as a function of the loss before the last phase."""
    if mu == 0:
        return lambda loss: payoff(epsilon, loss)
    return lambda loss: profile(epsilon - np.asarray(loss), mu**2)


def worst(epsilon, first, choices):
    """The delta of the best of adversaries who choose the second phase by the first one's loss.

    Args:
        epsilon: Claimed where the second phase's mu is so, a function.
        first: Mu of the first phase.
        choices: Mus that the second one may have; 0 is none.
    """

    def value(loss):
        return np.max([last(epsilon(mu), mu)(loss) for mu in choices], axis=0)

    grid = first**2 / 2 + first * np.linspace(-10, 10, 401)
    return expected(value, first, 0.0, grid)


@pytest.mark.mutant
def test_phase_chosen_after_first_breaks_naive_rule_and_keeps_total():
    """Two equal phases: 1.87 times delta where each ending states what was run, delta under one."""
    first = float(gdp.mu(5.0, DELTA)) / math.sqrt(2)
    pair = math.hypot(first, first)

    def naive(mu):
        return float(gdp.epsilon(math.hypot(first, mu), DELTA))

    assert worst(naive, first, (0.0, first)) == pytest.approx(1.87 * DELTA, rel=0.005)
    total = Budget(epsilon=5.0, delta=DELTA)
    left = budget.remaining(total, [phase(first)])
    assert left.mu == pytest.approx(first, rel=1e-6) and left.delta == DELTA
    choices = left.mu * np.linspace(0, 1, 9)
    delta = worst(lambda mu: total.epsilon, first, choices)
    assert 0.999 * DELTA < delta <= DELTA * (1 + 1e-9)
    # Chosen or not, what is stated is the total.
    stated = phase(first).within(total)
    assert stated.epsilon == 5.0 and stated.mu == pytest.approx(pair)
    for mu in (choices[1], left.mu):
        after = stated.followed_by(phase(mu), planned=False)
        assert (after.epsilon, after.mu) == (stated.epsilon, stated.mu)
        assert after.spent.mu == pytest.approx(math.hypot(first, mu)) and after.rounds == 200
    with pytest.raises(ValueError, match=r"mu of 2 phases is .* more than the total's"):
        stated.followed_by(phase(left.mu * 1.0001), planned=False)


def forgets_earlier(total, spent):
    """Broken copy: only the latest phase is counted."""
    return honest(total, spent[-1:])


def adds_epsilons(total, spent):
    """Broken copy: epsilons of the phases at one delta are added, as if each had its own."""
    used = sum(float(gdp.epsilon(mu, total.delta)) for mu in spent)
    return float(gdp.mu(max(total.epsilon - used, 0.0), total.delta))


def honest(total, spent):
    return budget.remaining(total, [phase(mu, delta=total.delta) for mu in spent]).mu


cuts = st.lists(st.floats(-2.0, 2.0), min_size=2, max_size=2).map(sorted)
shares = st.floats(0.1, 1.0) | st.sampled_from([0.0, 1.0])


def tree(level):
    """Shares of what remains and the cuts of the loss so far that choose the next of three."""
    below = st.none() if level == 1 else st.lists(tree(level - 1), min_size=3, max_size=3)
    return st.tuples(shares, cuts, below)


def play(tree, allowed, total, leaf, spent=(), losses_=0.0):
    """[losses] E leaf(L) of phases chosen by a tree: by quadrature, the last one in closed form."""
    share, position, below = tree
    # What remains depends on the phases so far alone.
    mu = share * allowed(total, spent)
    if below is None or mu < 1e-6:
        return leaf(mu)(losses_)
    ends = total_mu(total) * np.array(position)
    # The harm has a kink at epsilon, which what is left of the total smooths, little or much.
    layers = np.geomspace(1e-3, 1, 6) * total_mu(total)
    panels = [*ends, total.epsilon, *(total.epsilon - layers), *(total.epsilon + layers)]

    def value(after):
        out = np.empty_like(after)
        which = np.searchsorted(ends, after, side="right")
        for k, child in enumerate(below):
            out[which == k] = play(child, allowed, total, leaf, (*spent, mu), after[which == k])
        return out

    return np.array([expected(value, mu, item, panels) for item in np.atleast_1d(losses_)])


def total_mu(total):
    return float(gdp.mu(total.epsilon, total.delta))


def harm(total):
    """What is to stay below delta: E(1 - exp(epsilon - L))_+ after a last phase."""
    return lambda mu: last(total.epsilon, mu)


@given(tree(3), st.sampled_from([(0.5, 0.1), (3.0, 1e-5), (8.0, 1e-7)]))
@settings(max_examples=10, deadline=None)
def test_no_tree_of_phases_passes_total(tree, numbers):
    total = Budget(*numbers)
    assert play(tree, functools.cache(honest), total, harm(total)) <= total.delta * (1 + 1e-5)


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("broken", "numbers"), [(forgets_earlier, (3.0, 1e-5)), (adds_epsilons, (0.1, 0.3))]
)
def test_broken_filters_are_caught(broken, numbers):
    total = Budget(*numbers)
    leaf = (1.0, [-1.0, 1.0], None)
    tree = (0.9, [-1.0, 1.0], [(1.0, [-1.0, 1.0], [leaf] * 3)] * 3)
    assert play(tree, functools.cache(honest), total, harm(total)) <= total.delta * (1 + 1e-5)
    assert play(tree, functools.cache(broken), total, harm(total)) > total.delta * 1.02


def test_interactive_phases_of_correlated_noise_are_single_queries():
    """Gradients of later rounds are chosen by the loss so far, and then a phase of what is left."""
    total = Budget(3.0, DELTA)
    strategy = np.array([[1.0, 0.0], [0.2, 0.3]])
    # A record's two gradients have norm 1; what is seen is C G + Z.
    moves = [np.linalg.norm(strategy @ [1.0, g]) for g in (-1.0, 1.0)]
    assert max(moves) <= temporal.sensitivity(strategy, Participation(2, 2, 1)) * (1 + 1e-9)
    scale = 0.7 * total_mu(total) / max(moves)
    first = scale * strategy[0, 0]
    seconds = [scale * abs(strategy[1] @ [1.0, g]) for g in (-1.0, 0.0, 1.0)]

    def adversary(left):
        def after(position):
            return np.max(
                [
                    [
                        expected(last(3.0, left), mu, item) if mu else last(3.0, left)(item)
                        for item in position
                    ]
                    for mu in seconds
                ],
                axis=0,
            )

        return expected(after, first, 0.0)

    single = phase(scale * max(moves), white=False, rounds=2)
    assert adversary(honest(total, [single.mu])) <= DELTA * (1 + 1e-9)
    # Stopped after a round, it counts whole: more than half of mu^2 may be spent by then.
    assert first > single.mu * math.sqrt(0.5)
    stopped = single.stopped(1)
    assert budget.remaining(total, [stopped]) == budget.remaining(total, [single])
    # Broken copies: half of mu^2 for one round of two; the loss of gradients fixed beforehand.
    share = math.sqrt(total_mu(total) ** 2 - 0.5 * single.mu**2)
    assert gdp.delta(math.hypot(first, share), 3.0) > DELTA * 1.02
    fixed = math.sqrt(total_mu(total) ** 2 - (scale * min(moves)) ** 2)
    assert adversary(fixed) > DELTA * 1.02


@pytest.mark.parametrize("order", [2.0, 9.0])
def test_totals_of_concentrated_losses_bound_every_renyi_divergence(order):
    total = Budget(3.0, DELTA, "zcdp")
    entire = discrete.largest_rho(3.0, DELTA)

    def moment(mu):
        # Of a Gaussian last phase, exactly.
        return lambda loss: np.exp((order - 1) * (loss + order * mu**2 / 2))

    def allowed(_, spent):
        left = budget.remaining(total, [phase(mu) for mu in spent])
        return math.sqrt(2 * discrete.largest_rho(left.epsilon, DELTA))

    leaf = (1.0, [-1.0, 1.0], None)
    tree = (0.6, [-1.0, 1.0], [(0.0, [], None), (0.5, [-1, 1], [leaf] * 3), leaf])
    maximum = math.exp(order * (order - 1) * entire)
    assert play(tree, functools.cache(allowed), total, moment)[0] <= maximum
    complete = (0.6, [-1.0, 1.0], [leaf] * 3)
    assert play(complete, functools.cache(allowed), total, moment)[0] > 0.99 * maximum


def test_each_kind_of_loss_adds_up_under_total_of_its_own():
    kinds = {
        "gdp": losses.Gaussian(0.3),
        "zcdp": losses.Concentrated(0.05),
        "pure": losses.Pure(1.0),
    }
    for kind, loss in kinds.items():
        delta = 0.0 if kind == "pure" else DELTA
        total = Budget(3.0, delta, kind)
        assert budget.total_fields(total, release=False)["loss"].rounds == 0
        first = stated(loss, delta)
        pair = first.within(total).followed_by(first, planned=False)
        assert pair.spent == loss.then(loss) or kind == "gdp"
        assert pair.spent.size == pytest.approx(loss.size * (math.sqrt(2) if kind == "gdp" else 2))
        assert pair.epsilon == 3.0 >= pair.exact_epsilon > 3.0 * (1 - 1e-6)
        left = budget.remaining(total, [first, first])
        assert budget.remaining(total, [pair]) == left
        if kind == "pure":
            assert left.epsilon == pytest.approx(1.0) and left.mu is None
            with pytest.raises(ValueError, match=r"epsilon of 3 phases is 3 together"):
                budget.remaining(total, [first] * 4)
    # zCDP takes the others, and no other total does.
    for loss in (kinds["gdp"], kinds["zcdp"], losses.Pure(0.4)):
        first = stated(loss, DELTA)
        assert budget.remaining(Budget(3.0, DELTA, "zcdp"), [first]).epsilon < 3
    for kind in ("zcdp", "pure"):
        with pytest.raises(ValueError, match="which no filter of a total by 'gdp' adds up"):
            stated(kinds[kind], DELTA).within(Budget(3.0, DELTA))
    # And none keeps a part of delta for roundings.
    partial = stated(losses.Concentrated(0.05, failure=1e-3 * DELTA), DELTA)
    with pytest.raises(ValueError, match="keeps no part of delta for roundings; state the runs"):
        partial.within(Budget(3.0, DELTA, "zcdp"))


def stated(loss, delta):
    if isinstance(loss, losses.Gaussian):
        return phase(loss.mu, delta=delta, rounds=1)
    return phase(other_loss=loss, accountant=loss.kind, delta=delta, rounds=1)


def test_sampled_losses_have_no_filter():
    loss = losses.Pld((losses.Phase((0.1,), (1.0,), 10),))
    single = phase(other_loss=loss, accountant="pld", relation="zero_out_record", rounds=10)
    with pytest.raises(ValueError, match="does not hold for phases chosen on the way"):
        single.within(Budget(3.0, DELTA))
    with pytest.raises(ValueError, match=r"samplers.Random or Cyclic"):
        phase(0.1, relation="zero_out_record").within(Budget(3.0, DELTA)).followed_by(
            single, planned=False
        )


def sampled_profile(rate, ratio):
    """E(1 - exp(epsilon - L))_+ of a round in which a record is drawn at a rate, any epsilon."""

    def value(epsilon):
        inside = np.exp(epsilon) > 1 - rate
        e = np.where(inside, epsilon, 1.0)
        position = (np.log((np.exp(e) - 1 + rate) / rate) + ratio**2 / 2) / ratio
        present = (1 - rate) * special.ndtr(-position) + rate * special.ndtr(ratio - position)
        return np.where(inside, present - np.exp(e) * special.ndtr(-position), 1 - np.exp(epsilon))

    return value


def test_adding_up_sampled_losses_to_total_would_not_hold():
    """Each of two second phases is within the total; the better one by the first's loss is not."""
    first = 0.7 * total_mu(TOTAL)
    rate = 0.01
    ratio = 1.9
    complete = honest(TOTAL, [first])
    drawn = sampled_profile(rate, ratio)
    natural = losses.Gaussian(first).then(losses.Pld.of([rate], [ratio], 1))
    assert natural.epsilon(DELTA) <= 3.0
    single = expected(lambda loss: drawn(3.0 - loss), first, 0.0)
    assert single <= DELTA and expected(last(3.0, complete), first, 0.0) <= DELTA
    better = expected(
        lambda loss: np.maximum(drawn(3.0 - loss), last(3.0, complete)(loss)), first, 0.0
    )
    assert better == pytest.approx(1.64 * DELTA, rel=0.01)


def test_phases_compose_for_attacker_whom_both_cover():
    own = phase(0.3, secrets="own")
    links = phase(0.3, attacker="node", secrets="links")
    for item, other in ((own, links), (links, own)):
        pair = item.within(TOTAL).followed_by(other, planned=False)
        assert pair.attacker == "node" and pair.secrets == "links"
        assert item.followed_by(other, planned=True).attacker == "node"
    sums = phase(0.3, attacker="aggregator")
    assert phase(0.3).within(TOTAL).followed_by(sums, planned=False).attacker == "aggregator"
    # Nodes who hold the seed of all noise are not covered by an outsider's loss.
    shared = phase(0.3, secrets="shared").within(TOTAL)
    assert shared.followed_by(links, planned=False).attacker == "outsider"
    for item in (shared, sums.within(TOTAL)):
        with pytest.raises(ValueError, match="attacker is .*, and neither phase covers"):
            item.followed_by(phase(0.3, attacker="node"), planned=False)


LEFT = "a participant who has left"


@pytest.mark.parametrize("secrets", ["own", "shared", "group", "alone", None])
@pytest.mark.parametrize("release", [False, True])
def test_participant_who_has_left_has_row_where_another_s_does_not_say_it(secrets, release):
    """Where it counts on new secrets: a release draws them, and elsewhere no one is protected."""
    first = phase(0.3, secrets=secrets, release=release)
    assert "who has left" not in first.statement()
    planned = first.followed_by(phase(0.4, secrets=secrets, release=release), planned=True)
    for pair in (first.within(TOTAL), planned):
        rows = {row.party: row for row in pair.protection()}
        another = [row for party, row in rows.items() if party.startswith("another")]
        assert (LEFT in rows) == (secrets == "own" and not release)
        if LEFT in rows:
            assert rows[LEFT].epsilon == pair.epsilon and str(rows[LEFT]) in pair.statement()
            assert "every later phase must draw its noise from new ones" in rows[LEFT].why
        elif secrets == "alone":
            assert not another and "participant" not in pair.statement()
        else:
            assert any(row.epsilon is None or "reads its key" in row.why for row in another)
    lost = first.replace(lost_noise=(3, 0.1)).within(TOTAL)
    assert LEFT not in {row.party for row in lost.protection()}


def test_shared_seed_is_said_of_phases_and_runs_that_have_one():
    holds = "it holds the seed from which all agents draw their noise"
    single = phase(0.3, secrets="shared")
    assert f"participant: {holds}" in single.statement()
    assert f"participant: {holds}" in single.within(TOTAL).statement()
    for kind in ("gdp", "zcdp"):
        total = Budget(5.0, DELTA, kind)
        mixed = single.within(total).followed_by(phase(0.3, secrets="own"), planned=False)
        assert f"participant: in some phase {holds}" in mixed.statement()
    # The process of a release holds its one key; from its own message an agent learns its own.
    for secrets in ("shared", "group"):
        text = phase(0.3, secrets=secrets, release=True).statement()
        assert holds not in text and "hold its seed" not in text
        assert "it can work out its own noise, and other agents' noise is correlated" in text


def test_statements_over_phases_say_what_was_planned_and_what_was_run():
    first = phase(0.3, clip_norm=0.5).stopped(3)
    one = first.within(TOTAL)
    assert "clip norm 0.5) over 100 planned rounds (of which 3 were run) in one phase against" in (
        one.statement()
    )
    pair = one.followed_by(phase(0.3, clip_norm=0.1), planned=False)
    assert "clip norms 0.5, 0.1) over 200 planned rounds (of which 103 were run) in phases" in (
        pair.statement()
    )
    assert pair.unused == 97 and Guarantee.from_dict(pair.to_dict()) == pair
    # What was planned as a whole keeps no record of its phases.
    planned = phase(0.3, clip_norm=0.5).followed_by(phase(0.3, clip_norm=0.1), planned=True)
    assert "clip norm at most 0.5) over 200 rounds in phases" in planned.statement()
    for case in (one, pair, planned, first, phase(0.3, attacker="node")):
        assert "; an upper bound (Gaussian DP), mu" in case.statement()
    assert "; accounted exactly (Gaussian DP), mu" in phase(0.3).statement()
    with pytest.raises(ValueError, match="unused is 101; give a whole number from 0 to 100"):
        phase(0.3, unused=101)


def test_total_is_said_and_stored():
    record = phase(0.4).within(TOTAL).followed_by(phase(0.3, clip_norm=2.0), planned=False)
    text = record.statement()
    assert text.startswith("(epsilon = 3, delta = 1e-05)-differentially private per record")
    assert (
        "A total of mu = 0.719118 (epsilon = 3 at delta = 1e-05) was fixed before the first phase, "
        "as its user states; later phases may have been chosen by anything released, and by "
        "nothing else that depends on the data. Spent so far: mu = 0.500001, by 2 phases" in text
    )
    assert "correlated" not in text
    assert "T = 200 in 2 phases, total fixed beforehand" in record.caption()
    again = Guarantee.from_dict(json.loads(json.dumps(record.to_dict())))
    assert again == record and again.spent == record.spent
    assert "phases" not in phase(0.4).to_dict() and record.clip_norm == 2.0
    assert record.within(TOTAL) is record
    with pytest.raises(ValueError, match="a total is fixed once"):
        record.within(Budget(3.1, DELTA))
    # What was changed on the way is found.
    forged = record.to_dict()
    forged["phases"][0]["mu"] = 0.7
    with pytest.raises(ValueError, match="mu of 2 phases is"):
        Guarantee.from_dict(forged)
    for name, value in (("clip_norm", 1.0), ("relation", "replace_agent"), ("rounds", 100)):
        with pytest.raises(ValueError, match=f"{name} is|unit is"):
            record.replace(**{name: value})
    with pytest.raises(ValueError, match="give the guarantees of single phases"):
        record.replace(phases=(record,))


def test_stopped_phases_count_whole_unless_they_had_curve():
    curved = phase(0.6).stopping_at((50, 100))
    half = curved.stopped(50)
    assert phase(0.6).stopped(50).within(TOTAL).spent.mu == 0.6
    assert half.within(TOTAL).spent.mu == pytest.approx(0.6 / math.sqrt(2))
    assert half.within(TOTAL).epsilon == 3.0 and half.within(TOTAL).curve is None
    later = phase(0.3, private_stop=True).stopping_at((50, 100)).stopped(100)
    pair = half.within(TOTAL).followed_by(later, planned=False)
    assert pair.spent.mu == pytest.approx(math.hypot(half.mu, 0.3)) and pair.private_stop
    assert "stopping round not covered" in pair.caption()
    assert "NOT covered: the round at which a phase ended was left to a callback" in (
        pair.statement()
    )


def test_patterns_and_budgets_of_agents_may_differ_by_phase():
    dealt = phase(0.3, participation=(5, 20))
    other = phase(0.4, participation=(2, 10), epsilon=8.0, per_agent_epsilon=(1.0, 8.0))
    pair = dealt.within(TOTAL).followed_by(other, planned=False)
    assert pair.spent.mu == pytest.approx(0.5)
    assert pair.participation is None and pair.per_agent_epsilon is None


def by_agent(*epsilons, **change):
    mu = change.pop("mu", gdp.mu(max(epsilons), DELTA))
    return phase(mu, epsilon=max(epsilons), per_agent_epsilon=epsilons, **change)


BY_AGENT = Budget((1.0, 4.0), DELTA)


def test_totals_and_what_remains_are_by_agent():
    first = by_agent(0.75, 3.0)
    stated = first.within(BY_AGENT)
    assert (stated.epsilon, stated.per_agent_epsilon) == (4.0, (1.0, 4.0))
    left = budget.remaining(BY_AGENT, [first])
    assert left.epsilon == pytest.approx((0.613, 2.361), abs=1e-3)
    assert left.epsilon == pytest.approx(gdp.epsilon(left.mu, DELTA))
    # Under one total for all an agent that has spent less has more left.
    assert budget.remaining(Budget(4.0, DELTA), [first]).epsilon == pytest.approx(
        (3.884, 2.361), abs=1e-3
    )
    assert budget.remaining(BY_AGENT, []).epsilon == pytest.approx((1.0, 4.0), rel=2e-3)
    pair = stated.followed_by(by_agent(*left.epsilon), planned=False)
    assert pair.per_agent_epsilon == (1.0, 4.0) and pair.within(BY_AGENT) is pair
    assert Guarantee.from_dict(json.loads(json.dumps(pair.to_dict()))) == pair
    # Each agent's phases together are within its own total, to the last bit and nearly all of it.
    together = np.hypot(gdp.mu([0.75, 3.0], DELTA), gdp.mu(left.epsilon, DELTA))
    assert (np.asarray(gdp.epsilon(together, DELTA)) <= [1.0, 4.0]).all()
    np.testing.assert_allclose(pair.agents_spent, gdp.mu([1.0, 4.0], DELTA), rtol=1e-7)
    assert max(budget.remaining(BY_AGENT, [pair]).epsilon) < 1e-3
    # One that passes its own total is found, whatever the others have left.
    for passing in (0, 1):
        extras = [left.epsilon[agent] * (1.001 if agent == passing else 0.5) for agent in (0, 1)]
        with pytest.raises(ValueError, match=f"together at agent {passing}, more than the total's"):
            stated.followed_by(by_agent(*extras), planned=False)
    # Phases of one budget for all cost all the same, and count at the smallest total.
    same = phase(gdp.mu(0.6, DELTA))
    after = stated.followed_by(same, planned=False)
    spent = np.hypot(gdp.mu([0.75, 3.0], DELTA), same.mu)
    np.testing.assert_allclose(after.agents_spent, spent, rtol=1e-8)
    with pytest.raises(ValueError, match="at agent 0"):
        stated.followed_by(phase(gdp.mu(0.62, DELTA)), planned=False)


@pytest.mark.slow
def test_no_chain_of_phases_passes_total_of_any_agent():
    rng = np.random.default_rng(0)
    for _ in range(20):
        total = Budget(tuple(rng.uniform(0.2, 8.0, 3)), DELTA)
        spent = []
        mus = np.zeros(3)
        for phase_number in range(4):
            left = np.array(budget.remaining(total, spent).epsilon)
            share = 1.0 if phase_number == 3 else rng.uniform(0.1, 0.9, 3)
            each = left * share
            mus = np.hypot(mus, gdp.mu(each, DELTA))
            single = by_agent(*each)
            spent = [spent[0].followed_by(single, planned=False) if spent else single.within(total)]
        assert (np.asarray(gdp.epsilon(mus, DELTA)) <= total.epsilon).all()
        assert (np.asarray(gdp.epsilon(mus, DELTA)) > 0.999 * np.array(total.epsilon)).all()


def test_first_phase_may_take_all_of_every_total():
    for case in ((1.0, 4.0), (0.3, 0.7), (2.0, 8.0)):
        stated = by_agent(*case).within(Budget(case, DELTA))
        limits = budget.limits(vars(stated), DELTA)
        assert (stated.agents_spent <= limits).all()
        assert max(budget.remaining(Budget(case, DELTA), [stated]).epsilon) < 1e-3


def random_phases(seed, by_agents, count):
    """A random total, and phases of which the last one takes exactly what remains, twice."""
    rng = np.random.default_rng(seed)
    each = rng.uniform(0.3, 9.0, 4)
    total = Budget(tuple(each) if by_agents else float(each[0]), DELTA)
    stated = None
    for number in range(count):
        left = budget.remaining(total, [stated] if stated else [])
        share = rng.uniform(0.3, 0.99, 4) if number < count - 1 else np.ones(4)
        mus = share * gdp.mu(left.epsilon, DELTA)
        single = by_agent(*gdp.epsilon(mus, DELTA), mu=mus.max(), per_agent_mu=tuple(mus))
        stated = (
            single.within(total) if stated is None else stated.followed_by(single, planned=False)
        )
    return total, stated


@pytest.mark.gate(1)
@pytest.mark.parametrize("by_agents", [True, False])
def test_phases_of_what_remains_are_admitted_and_anybody_may_leave(by_agents):
    """Also of what remains of a total of which nearly nothing does; all is true to the last bit."""
    for seed in range(8):
        total, stated = random_phases(seed, by_agents, count=1 + seed % 3)
        left = budget.remaining(total, [stated])
        mus = np.full(4, left.mu)
        rest = phase(mus.max(), epsilon=math.inf, per_agent_epsilon=(math.inf,) * 4,
                     per_agent_mu=tuple(mus))  # fmt: skip
        stated = stated.followed_by(rest, planned=False)
        spent = functools.reduce(np.hypot, (item.per_agent_mu for item in stated.phases))
        assert (spent <= stated.agents_spent).all()
        assert (gdp.epsilon(stated.agents_spent, DELTA) <= np.array(total.epsilon)).all()
        assert (gdp.epsilon(spent, DELTA) > 0.999 * np.array(total.epsilon)).all()
        departed = [seed % 4]
        stay = stated.survivors(departed)
        kept = np.delete(stated.agents_spent, departed)
        np.testing.assert_array_equal(stay.agents_spent, kept)
        again = stay.survivors([0, 1])
        assert again.phases[0].per_agent_mu == stay.phases[0].per_agent_mu[2:]
        assert Guarantee.from_dict(json.loads(json.dumps(stated.to_dict()))) == stated


@pytest.mark.parametrize("by_agents", [True, False])
def test_millionth_more_than_total_is_refused(by_agents):
    for seed in range(8):
        each = np.random.default_rng(seed).uniform(0.3, 9.0, 4)
        each = each if by_agents else np.full(4, each[0])
        total = Budget(tuple(each) if by_agents else float(each[0]), DELTA)
        first = np.array([0.6, 0.8, 0.5, 0.7]) * gdp.mu(each, DELTA)
        over = each * np.where(np.arange(4) == seed % 4, 1 + 1e-6, 0.9)
        second = np.sqrt(gdp.mu(over, DELTA) ** 2 - first**2)
        phases = [
            phase(mu.max(), epsilon=math.inf, per_agent_epsilon=(math.inf,) * 4,
                  per_agent_mu=tuple(mu))
            for mu in (first, second)
        ]  # fmt: skip
        with pytest.raises(ValueError, match="more than the total's"):
            phases[0].within(total).followed_by(phases[1], planned=False)


@pytest.mark.gate(1)
@pytest.mark.parametrize("by_agents", [True, False])
def test_phases_known_by_epsilons_alone_may_take_all_and_leave(by_agents):
    """As in older records: no agent's mu is stated, and nothing is added for that."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        each = rng.uniform(0.3, 9.0, 4)
        total = Budget(tuple(each) if by_agents else float(each.max()), DELTA)
        complete = by_agent(*each).within(total)
        assert complete.survivors([0]).survivors([2]).agents_spent.max() <= complete.mu
        first = by_agent(*(each * rng.uniform(0.2, 0.9, 4))).within(total)
        left = budget.remaining(total, [first])
        pair = first.followed_by(by_agent(*left.epsilon), planned=False)
        stay = pair.survivors([seed % 4])
        kept = np.delete(pair.agents_spent, seed % 4)
        np.testing.assert_array_equal(stay.agents_spent, kept)
        kept = np.delete(pair.phases[0].per_agent_epsilon, seed % 4)
        assert stay.phases[0].per_agent_epsilon == tuple(kept)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_agent_mu": (0.1,)}, "per_agent_mu is .* one number for each of 2 agents"),
        ({"per_agent_mu": (0.1, 9.0)}, "per_agent_mu is .* of which mu .* is the largest"),
        # Else later phases would count on nothing having been spent.
        ({"per_agent_mu": (0.0, 0.0)}, "per_agent_mu is .* of which mu .* is the largest"),
        ({"per_agent_mu": (0.0, math.nan)}, "per_agent_mu is .* of which mu .* is the largest"),
        ({"per_agent_epsilon": (3.0, math.nan)}, "per_agent_epsilon is .* to be their maximum"),
        ({"per_agent_epsilon": (math.nan, 3.0)}, "per_agent_epsilon is .* to be their maximum"),
        ({"per_agent_epsilon": None, "per_agent_mu": (0.1, 0.1)}, "for each of 0 agents"),
    ],
)
def test_losses_of_agents_that_contradict_record_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        by_agent(0.5, 3.0).replace(**changes)
    stated = by_agent(0.5, 3.0)
    with pytest.raises(ValueError, match="per_agent_epsilon is 0.5 at agent 0 with mu 0.4"):
        stated.replace(per_agent_mu=(0.4, stated.mu))


def test_epsilons_of_unsound_rule_do_not_lower_what_phases_lose():
    stated = {"epsilon": 2.0, "per_agent_epsilon": (2.0, 2.0), "mu": 1.2, "accountant": "paper"}
    phase = by_agent(0.5, 3.0).replace(**stated, per_agent_mu=None, unsound=True)
    assert records.agents_mus(phase).max() == 1.2
    assert phase.followed_by(phase, planned=True).mu == pytest.approx(1.2 * math.sqrt(2))


def test_totals_by_agent_are_said_and_rows_are_by_agent():
    stated = by_agent(0.75, 3.0, secrets="own").within(BY_AGENT)
    assert "(epsilon = 1 to 4 by agent, delta" in stated.caption()
    mus = [up(case) for case in (*gdp.mu([1.0, 4.0], DELTA), *stated.agents_spent)]
    assert (
        f"A total of mu = {mus[0]} to {mus[1]} by agent (epsilon = 1 to 4 by agent at delta = "
        "1e-05) was fixed" in stated.statement()
    )
    assert f"Spent so far: mu = {mus[2]} to {mus[3]} by agent, by 1 phase." in stated.statement()
    assert "Agent i is" not in stated.statement()
    pair = stated.followed_by(by_agent(0.5, 1.0, secrets="own"), planned=False)
    assert "Agent i is the same one in all phases, as its user states" in pair.statement()
    for row in stated.protection():
        protected = row.epsilon is not None
        assert row.per_agent_epsilon == ((1.0, 4.0) if protected else None)
        assert ("(epsilon = 1 to 4 by agent, delta" in str(row)) == protected
    assert re.search(r"^an outsider +epsilon = 1 to 4 by agent  it", str(stated.protection()))


def test_agents_that_leave_keep_what_was_stated_and_others_their_totals():
    total = Budget((1.0, 4.0, 2.0), DELTA)
    stated = by_agent(0.5, 3.0, 1.5).within(total)
    stay = stated.survivors([1])
    assert (stay.epsilon, stay.per_agent_epsilon) == (2.0, (1.0, 2.0))
    assert stay.mu == pytest.approx(gdp.mu(2.0, DELTA)) and stay.exact_epsilon <= 2.0
    assert stay.phases[0].per_agent_epsilon == pytest.approx((0.5, 1.5), rel=1e-6)
    assert min(np.subtract(stay.phases[0].per_agent_epsilon, (0.5, 1.5))) >= 0
    complete, left = (budget.remaining(Budget(item, DELTA), [value]) for item, value in (
        (total.epsilon, stated), ((1.0, 2.0), stay),
    ))  # fmt: skip
    assert left.epsilon == pytest.approx(np.delete(complete.epsilon, 1), rel=1e-6)
    later = stay.followed_by(by_agent(*left.epsilon), planned=False)
    assert later.per_agent_epsilon == (1.0, 2.0)
    with pytest.raises(ValueError, match=r"epsilons of \[2, 3\] agents"):
        stated.followed_by(by_agent(*left.epsilon), planned=False)
    assert by_agent(0.5, 3.0).survivors([1]).epsilon == pytest.approx(0.5)
    # Agents of one epsilon are all the same.
    assert phase(0.3).survivors([1]) == phase(0.3)
    # Under one total, phases of different numbers of agents count by the worst agent.
    mixed = by_agent(0.5, 3.0, 1.5).within(Budget(6.0, DELTA))
    mixed = mixed.followed_by(by_agent(1.0, 2.0), planned=False)
    assert mixed.agents_spent == pytest.approx([math.hypot(*gdp.mu([3.0, 2.0], DELTA))])


def test_planned_phases_add_up_by_agent():
    pair = by_agent(0.75, 3.0).followed_by(by_agent(1.0, 0.5), planned=True)
    mus = np.hypot(gdp.mu([0.75, 3.0], DELTA), gdp.mu([1.0, 0.5], DELTA))
    assert pair.per_agent_epsilon == pytest.approx(gdp.epsilon(mus, DELTA), rel=1e-7)
    assert (np.asarray(pair.per_agent_epsilon) >= gdp.epsilon(mus, DELTA)).all()
    assert pair.mu < math.hypot(*gdp.mu([3.0, 1.0], DELTA))
    assert "Agent i is the same one in all phases" in pair.statement()
    apart = by_agent(0.75, 3.0).followed_by(by_agent(1.0, 0.5, 0.5), planned=True)
    assert apart.per_agent_epsilon is None
    assert apart.mu == pytest.approx(math.hypot(*gdp.mu([3.0, 1.0], DELTA)))


def test_releases_of_totals_by_agent_keep_part_of_smallest():
    cost = dict(release=True, added_epsilon=2e-4, added_delta=1e-9)
    mu = gdp.mu(2.9, DELTA)
    stated = by_agent(0.75, 3.0, **cost, mu=mu).within(BY_AGENT)
    assert stated.added_epsilon == pytest.approx(0.001)
    assert stated.exact_epsilon <= stated.epsilon
    limits = budget.limits(vars(stated), DELTA)
    np.testing.assert_allclose(limits, gdp.mu([0.999, 3.999], 0.99 * DELTA))
    left = budget.remaining(BY_AGENT, [stated])
    mu = gdp.mu(0.99 * max(left.epsilon), DELTA)
    pair = stated.followed_by(by_agent(*left.epsilon, **cost, mu=mu), planned=False)
    assert (pair.agents_spent <= limits).all()


def test_releases_keep_part_for_finite_precision():
    first = phase(0.4, release=True, added_epsilon=1e-5, added_delta=1e-9)
    record = first.within(TOTAL).followed_by(first, planned=False)
    assert (record.added_epsilon, record.added_delta) == pytest.approx((0.003, 1e-7))
    assert record.epsilon == 3.0 >= record.exact_epsilon
    assert record.mu == pytest.approx(gdp.mu(2.997, 0.99e-5))
    assert "; 0.003 of epsilon and 1e-07 of delta are for noise" in record.statement()
    costly = first.replace(added_epsilon=2e-3)
    with pytest.raises(ValueError, match="keeps for noise of finite precision"):
        costly.within(TOTAL).followed_by(costly, planned=False)
    # A first phase that takes all of what is left of nothing spent fits a release as well.
    single = budget.remaining(TOTAL, [])
    assert (
        phase(gdp.mu(single.epsilon, DELTA), release=True).within(TOTAL).spent.mu
        < single.mu * 1.001
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: phase(0.8).within(TOTAL), "mu of 1 phase is 0.8 together, more than the total's"),
        (
            lambda: phase(0.1).within(Budget((1.0, 2.0), DELTA, "zcdp")),
            r"epsilon is \(1.0, 2.0\) of a total by 'zcdp'; give one number",
        ),
        (
            lambda: by_agent(0.5, 2.0).within(Budget((1.0, 2.0, 3.0), DELTA)),
            r"epsilons of \[2, 3\] agents; state them for the agents that stay, by survivors",
        ),
        (
            lambda: by_agent(1.1, 2.0).within(Budget((1.0, 4.0), DELTA)),
            "mu of 1 phase is .* at agent 0, more than the .* .epsilon 1 to 4 by agent at delta",
        ),
        (lambda: by_agent(0.5, 2.0).survivors([2]), "departed is 2; give a whole number from 0"),
        (lambda: by_agent(0.5, 2.0).survivors([0, 1]), "everyone; leave at least one agent"),
        (lambda: phase(0.1).within(Budget(1.0, DELTA, "rdp")), "accountant is 'rdp' of a total"),
        (lambda: phase(0.1).within(Budget(1.0, 1e-6)), "delta is 1e-05, and the total's 1e-06"),
        (lambda: Guarantee.none(3).within(TOTAL), "relation is None"),
        (lambda: phase(0.1, gradients="view").within(TOTAL), "gradients is 'view' under a total"),
        (
            lambda: phase(0.1, attacker="coalition", nodes=(0, 2)).within(TOTAL),
            "numbered anew where some have left",
        ),
        (lambda: phase(0.1).within(TOTAL).after(10), "phases are 1 under a total"),
        (lambda: phase(0.1).within(TOTAL).stopping_at((50, 100)), "phases are 1 already"),
        (
            lambda: phase(0.1).followed_by(phase(0.1).within(TOTAL), planned=False),
            "which the earlier one does not state",
        ),
        (
            lambda: phase(0.1).followed_by(phase(0.1), planned=False),
            r"by within\(total\)",
        ),
        (
            lambda: (
                phase(0.1).within(TOTAL).followed_by(phase(0.1, attacker="node"), planned=False)
            ),
            "attacker is 'outsider', then 'node', and neither .* plan both for one attacker",
        ),
        (
            lambda: budget.remaining(TOTAL, [phase(0.1), phase(0.1, relation="zero_out_record")]),
            "relation is 'replace_record', then 'zero_out_record'",
        ),
        (lambda: budget.remaining(TOTAL, phase(0.1)), r"spent is a Guarantee; give a list"),
    ],
)
def test_what_total_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=3), st.floats(0.1, 10.0))
@settings(max_examples=6, deadline=None)
def test_budgets_that_remain_are_admitted_and_not_much_too_small(parts, epsilon):
    total = Budget(epsilon, DELTA)
    spent = []
    for part in parts:
        left = budget.remaining(total, spent)
        spent.append(phase(part * gdp.mu(left.epsilon, DELTA)))
    left = budget.remaining(total, spent)
    spent.append(phase(gdp.mu(left.epsilon, DELTA)))
    record = functools.reduce(
        lambda record, value: record.followed_by(value, planned=False),
        spent[1:], spent[0].within(total),
    )  # fmt: skip
    assert (1 - 2e-3) * record.mu < record.spent.mu <= record.mu
    assert record.spent.mu >= math.sqrt(sum(item.mu**2 for item in spent)) * (1 - 1e-12)


def test_total_by_agent_hides_no_false_epsilons():
    """The paper's rule states epsilons that do not hold; a total of the same ones refuses them."""
    each = (30.0, 40.0, 50.0, 60.0)
    matrix = mixing.metropolis_hastings(graphs.ring(4))
    false = Budget(each, 1e-5, accountant="paper", allow_unsound=True)
    config = make_config(rounds=4, design="independent")
    phase = plan.make(dataclasses.replace(config, budget=false), matrix).guarantee
    assert phase.unsound
    with pytest.raises(ValueError, match="total"):
        phase.within(Budget(each, 1e-5))


def sums_of_sites(rho=0.02, failure=1e-8, **change):
    """What a phase of sums among sites states."""
    loss = losses.Concentrated(rho, 10, failure=failure)
    fields = dict(
        epsilon=loss.epsilon(DELTA), delta=DELTA, relation="zero_out_record", rounds=10,
        attacker="aggregator", clip_norm=1.0, accountant="zcdp", release=True, sites=True,
        other_loss=loss, sum_only=True, secrets="shares", dropouts=1, colluders=1,
    )  # fmt: skip
    return Guarantee.of(**(fields | change))


@pytest.mark.mutant
def test_roundings_of_sums_take_their_part_of_a_total():
    """A total keeps a hundredth of delta, of which each phase's roundings take their share."""
    total = Budget(3.0, DELTA, "zcdp")
    stated = sums_of_sites().within(total)
    assert stated.added_delta == pytest.approx(0.01 * DELTA)
    # Ten such phases fill the hundredth; rho is not what stops the eleventh.
    for _ in range(8):
        stated = stated.followed_by(sums_of_sites(rho=1e-4), planned=False)
    assert len(stated.phases) == 9 and stated.epsilon == 3.0
    with pytest.raises(ValueError, match="added_delta of 10 phases is 1.1e-07, more than the"):
        stated.followed_by(sums_of_sites(rho=1e-4, failure=2e-8), planned=False)
    # By hand: what the total allows, stated at the delta that is left, is its epsilon.
    limit = budget.total_fields(total, release=True)["loss"].rho
    reserve = budget.total_fields(total, release=True)["added_epsilon"]
    assert losses.Concentrated(limit).epsilon(0.99 * DELTA) + reserve <= 3.0 * (1 + 1e-9)
    with pytest.raises(ValueError, match="rho of 2 phases"):
        sums_of_sites(rho=limit / 2).within(total).followed_by(
            sums_of_sites(rho=0.6 * limit), planned=False
        )
    # A simulation keeps nothing of delta.
    simulated = dict(release=False, sites=False)
    with pytest.raises(ValueError, match="of a simulated phase"):
        sums_of_sites(**simulated).within(total)


@pytest.mark.mutant
def test_sums_and_gossip_compose_where_no_noise_is_shared():
    total = Budget(3.0, DELTA, "zcdp")
    gossip = dict(
        epsilon=math.inf, mu=0.05, attacker="outsider", sum_only=False, other_loss=None,
        accountant="gdp", dropouts=0, colluders=0,
    )  # fmt: skip
    unshared = sums_of_sites(**gossip, secrets="own")
    joint = sums_of_sites().within(total).followed_by(unshared, planned=False)
    # The colluders of sums are those of both.
    assert (joint.attacker, joint.colluders, joint.dropouts) == ("aggregator", 1, 1)
    group = sums_of_sites(**gossip, secrets="group")
    with pytest.raises(ValueError, match="secrets is 'group' of a phase without sums"):
        sums_of_sites().within(total).followed_by(group, planned=False)
