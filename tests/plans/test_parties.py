"""Who is protected from whom: plans' tables, SECURITY.md's, and the losses of views agree."""

import dataclasses
import functools
import re
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from dpjax.accounting import gdp, parties, views
from dpjax.accounting.parties import ANOTHER
from dpjax.algorithms import methods
from dpjax.algorithms.average import Average
from dpjax.algorithms.disk import DiSK
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.exchange import Sum
from dpjax.algorithms.pairs import PPDOAGT, DiffTVAB, GradientTracking
from dpjax.algorithms.pmlf import PMLF
from dpjax.algorithms.random_weights import CorrelatedRandomness, Encrypted
from dpjax.algorithms.tracking import DGD, DPOP, Tracking
from dpjax.algorithms.zip_dl import ZipDL
from dpjax.contrib.references import EXTRA, NIDS
from dpjax.learning import samplers
from dpjax.plans import compatibility, noise, plan, scheduled, statements
from dpjax.plans.links import PairKeys, ZeroSum
from dpjax.plans.noise import SumShares
from dpjax.plans.optimizers import Sgd
from dpjax.plans.protect import Budget, Protect
from dpjax.plans.sums import Discrete
from dpjax.topology import graphs, mixing
from tests.plans import test_aggregate
from tests.support import make_config

SECURITY = (Path(__file__).resolve().parents[2] / "SECURITY.md").read_text()
N = 6
MATRIX = mixing.metropolis_hastings(graphs.erdos_renyi(N, 0.5, 0))
GROUPS = ((0, 3, 4), (1, 2, 5))
OUTSIDER = "an outsider"
SERVER = "an aggregator or server"


def gossip(**changes):
    """A plan of D-SGD, or of what is named."""
    counts = np.full(N, 24)
    return plan.make(make_config(**{"rounds": 4, **changes}), MATRIX, counts=counts)


def apart():
    """Two groups whose noise is correlated inside alone."""
    matrix = np.eye(N)
    matrix[0, 1] = matrix[1, 0] = 0.5
    return matrix


def by_schedule(part, method, **changes):
    """A plan whose noise has a scale by round."""
    pure = isinstance(part, scheduled.ScheduledLaplace)
    options = dict(
        noise=part, method=method, rounds=4, optimizer=Sgd(0.01, decay=0.9),
        budget=Budget(1.0, accountant="pure") if pure else Budget(1.0, 1e-5),
        protect=Protect("replace_agent", 0.5, norm="l1" if pure else "l2"),
    )  # fmt: skip
    return gossip(**(options | changes))


def summed(part, attacker="aggregator", **changes):
    """A plan of sums at a server."""
    protect = Protect("zero_out_client", clip_norm=0.5, attacker=attacker)
    config = test_aggregate.config("zero_out_client", part, protect=protect, **changes)
    return plan.make(config, test_aggregate.COMPLETE)


@dataclasses.dataclass(frozen=True)
class Mine(PairKeys):
    """A user's own design, whose agents keep who knows what from each other."""

    label = "mine"


def bare(method, **changes):
    return gossip(method=method, design="non_private", **changes)


COVARIANCE = noise.Covariance(np.eye(N) + 0.1, "mine")
NODES = {
    "independent": {"design": "independent"},
    "record": {"design": "independent", "relation": "replace_record"},
    "whisper": {"design": "whisper"},
    "groups": {"design": "whisper", "subgroups": GROUPS},
    "pairwise": {"design": "pairwise"},
    "anti_pgd": {"design": "anti_pgd"},
    "mafalda": {
        "design": "mafalda", "relation": "zero_out_record", "participation": (2, 2),
        "batch_size": 12,
    },
    "spacetime": {"design": "spacetime"},
    "pair_keys": {"noise": PairKeys(2.0), "attacker": "node"},
}  # fmt: skip
PLANS = {
    "non-private": [
        lambda: gossip(design="non_private"),
        lambda: bare(Average(DSGD(), decay=0.5)),
    ],
    "independent": [
        lambda: gossip(design="independent"),
        lambda: gossip(design="independent", attacker="node"),
        lambda: gossip(design="independent", relation="replace_record"),
    ],
    "pairwise": [lambda: gossip(design="pairwise")],
    "Whisper, Whisper (whole run)": [
        lambda: gossip(design="whisper"),
        lambda: gossip(design="whisper_horizon"),
        lambda: gossip(design="whisper", method=Average(DSGD(), decay=0.5)),
    ],
    "Whisper with subgroups": [lambda: gossip(design="whisper", subgroups=GROUPS)],
    "anti-PGD, prefix sum, MAFALDA, banded inverse, one step": [
        lambda: gossip(design="anti_pgd"),
        lambda: gossip(design="prefix_sum", attacker="coalition", nodes=(0, 3)),
        lambda: gossip(design="mafalda"),
        lambda: gossip(design="banded_inverse"),
        lambda: gossip(design="one_step"),
    ],
    "space and time": [lambda: gossip(design="spacetime")],
    "polynomial": [lambda: gossip(noise=noise.Polynomial())],
    "covariance (custom matrix)": [lambda: gossip(noise=noise.Covariance(apart(), "mine"))],
    "pair keys, planned for any one agent": [lambda: gossip(noise=PairKeys(2.0), attacker="node")],
    "pair keys, planned for a coalition": [
        lambda: gossip(noise=PairKeys(2.0), attacker="coalition", nodes=(0, 3)),
    ],
    "gradients at several models (DiSK, PMLF), any design": [
        lambda: gossip(method=DiSK(), design="independent"),
        lambda: gossip(method=PMLF(length=3, beta=0.5), design="whisper"),
    ],
    "K gossip steps (Muffliato), any design": [
        lambda: gossip(method=DSGD(gossip_steps=3), design="independent"),
        lambda: gossip(method=DSGD(gossip_steps=3), design="pairwise"),
    ],
    "`Federated` by relays, independent noise": [
        lambda: summed(noise.Independent(), "outsider", aggregate=Sum()),
    ],
    "scheduled Laplace, scheduled Gaussian: D-SGD": [
        lambda: by_schedule(scheduled.ScheduledLaplace(0.9), DSGD()),
        lambda: by_schedule(scheduled.ScheduledGaussian(0.9), DSGD()),
    ],
    "the same under tracking, DPOP, DGD": [
        lambda: by_schedule(scheduled.ScheduledLaplace(0.9), Tracking(5.0)),
        lambda: by_schedule(scheduled.ScheduledLaplace(0.9), DPOP()),
        lambda: by_schedule(scheduled.ScheduledGaussian(0.9), DGD()),
    ],
    "the same under pairs: Diff-TV-AB, PP-DOAGT": [
        lambda: by_schedule(scheduled.ScheduledLaplace(0.9), DiffTVAB()),
        lambda: by_schedule(scheduled.ScheduledGaussian(0.9), GradientTracking()),
        lambda: by_schedule(scheduled.ScheduledLaplace(0.9), PPDOAGT()),
    ],
    "EXTRA, NIDS (references)": [lambda: bare(EXTRA()), lambda: bare(NIDS())],
    "correlated randomness": [lambda: bare(CorrelatedRandomness(until=3))],
    "encrypted differences (Paillier)": [lambda: bare(Encrypted())],
    "secure sum, discrete, with colluders=0": [
        lambda: summed(SumShares()),
        lambda: summed(SumShares(), "outsider"),
        lambda: summed(Discrete(5), budget=test_aggregate.ZCDP),
    ],
    "secure sum, discrete, with colluders": [
        lambda: summed(SumShares(colluders=1)),
        lambda: summed(SumShares(colluders=2), "outsider"),
        lambda: summed(Discrete(5, colluders=1), budget=test_aggregate.ZCDP),
    ],
    "batches by coin flips (Poisson), balls in bins": [
        lambda: gossip(
            design="independent", relation="zero_out_record", sampler=samplers.Poisson(6.0, 4)
        )
    ],
    "a custom design that states nothing": [lambda: gossip(noise=Mine(2.0), attacker="outsider")],
    "zero sum (Zip-DL)": [
        lambda: gossip(method=ZipDL(), noise=ZeroSum(), attacker="node", gradients="view"),
    ],
    "central (CDP)": [],
}
"""Plans of every row of SECURITY.md's table."""


@functools.cache
def made(row):
    return [make() for make in PLANS[row]]


def table():
    """SECURITY.md's table: row -> its three cells, without the numbers of footnotes."""
    lines = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", SECURITY, re.M)
    plain = [[re.sub(r" \([0-9, ]+\)$", "", cell) for cell in cells] for cells in lines]
    return {row: cells for row, *cells in plain if not row.startswith(("method", "---"))}


def told(plan_):
    """What a plan says of the three parties, in the table's words."""
    rows = {row.party: row for row in plan_.protection()}

    def word(party):
        return "no" if rows[party].epsilon is None else "yes"

    groups = [word(party) for party in rows if party.startswith(f"{ANOTHER} of")]
    agents = "group" if groups == ["no", "yes"] else word(ANOTHER)
    return word(OUTSIDER), agents, word(SERVER)


WORDS = {
    "protected": "yes", "as the aggregator": "yes", "some": "yes",
    "**not protected**": "no", "nothing protected": "no", "no epsilon": "no", "none": "no",
    "ciphertexts, no epsilon": "no", "**not** in its own group": "group",
}  # fmt: skip
"""What a cell means: protected, not, or from other groups alone."""


def test_table_of_designs_and_plans_here_have_same_rows():
    assert set(table()) == set(PLANS)


@pytest.mark.parametrize("row", [row for row in PLANS if not row.endswith("any design")])
def test_plans_protect_from_whom_security_says(row):
    if row == "central (CDP)":
        with pytest.raises(ValueError, match="design is 'central'; choose one of"):
            noise.named("central")
    for item in made(row):
        assert told(item) == tuple(WORDS[cell] for cell in table()[row])


@pytest.mark.parametrize("row", [row for row in PLANS if row.endswith("any design")])
def test_gossip_steps_and_filters_change_nothing_for_other_parties(row):
    assert set(table()[row]) <= {"as with one", "as D-SGD"}
    for item in made(row):
        plain = plan.make(dataclasses.replace(item.config, method=DSGD()), MATRIX)
        assert item.protection() == plain.protection()


def test_every_row_of_registry_has_answer():
    entries = [value for row in PLANS for value in made(row)]
    designs = [case.config.noise for case in entries if case.noise is not None]
    # Designs of equal terms protect the same parties.
    answered = {compatibility.noise(design) for design in designs}
    assert {design.terms for design in noise.DESIGNS.values()} <= answered
    # A method without terms of its own has its base's.
    registered = [getattr(methods, name) for name in methods.__all__]
    stating = {kind for kind in registered if "terms" in vars(kind)}
    assert stating <= {type(one.config.method) for one in entries}
    for item in entries:
        silent = item.config.label.startswith("mine") and isinstance(item.config.noise, Mine)
        assert (item.guarantee.secrets is None) == (silent or item.noise is None)
        assert all(row.party in str(item.protection()) for row in item.protection())


def test_row_gives_stated_epsilon_and_holder_of_seed_is_last():
    single = made("independent")[0]
    rows = single.protection()
    last = ["whoever runs this process", "whoever holds the seed"]
    assert [row.party for row in rows] == [OUTSIDER, ANOTHER, SERVER, *last]
    assert [row.epsilon for row in rows] == [8.0, 8.0, 8.0, None, None]
    assert {row.delta for row in rows} == {1e-5} and "seed of a simulation" in rows[-1].why
    released = gossip(design="independent", release=True)
    assert released.protection()[-1].why.startswith("the key of this release")
    assert "NOT protected from whoever runs this process: it holds" in single.guarantee.statement()


@pytest.mark.parametrize(
    "changes", [{"design": "independent"}, {"design": "mafalda"}, {"subgroups": GROUPS}]
)
def test_release_protects_participants_who_have_neither_its_process_nor_its_key(changes):
    released = gossip(release=True, **changes)
    simulated = gossip(**changes)
    rows = [row for row in released.protection() if row.party.startswith(ANOTHER)]
    selection = [row.why for row in rows if row.epsilon is not None]
    assert selection and all(
        "neither runs this process nor reads its key" in why for why in selection
    )
    assert not any("secret of its own" in row.why for row in released.protection())
    assert "neither runs" not in str(simulated.protection())


@pytest.mark.parametrize(
    ("changes", "keepers"),
    [
        ({"design": "independent"}, "agents who each keep a secret of their own"),
        ({"design": "whisper"}, "agents who keep their shared seed secret from everybody else"),
        ({"design": "pairwise"}, "agents who keep their shared seed secret from everybody else"),
        ({"design": "spacetime"}, "agents who keep their shared seed secret from everybody else"),
        ({"subgroups": GROUPS}, "groups that each keep a seed of their own"),
        (NODES["pair_keys"], "agents who keep the secrets of their links"),
        (
            {
                "design": "independent", "relation": "zero_out_record",
                "sampler": samplers.Poisson(6.0, 4),
            },
            "agents who keep noise and batches secret",
        ),
    ],
)  # fmt: skip
def test_holder_s_row_says_whose_secrets_others_count_on(changes, keepers):
    assert gossip(**changes).protection()[-1].why.endswith(f"the other rows are about {keepers}")


def loss_against(value, attacker):
    """[n] loss mu of every agent to one agent, from the noise that runs, by views alone."""
    part = value.config.noise
    if isinstance(part, PairKeys):
        algorithm = views.decor(MATRIX, 1.0, part.shared)
        scale = float(value.noise.scale)
    else:
        groups = getattr(part, "subgroups", None)
        diagonal = value.guarantee.secrets == "own"
        if not diagonal and groups is None:
            groups = [range(N)]
        algorithm = views.dsgd(
            MATRIX,
            value.applied_strategy,
            value.covariance(),
            subgroups=None if diagonal else groups,
        )
        scale = 1.0
    try:
        mu = algorithm.pndp([attacker]).loss(value.config.pattern).mu
    except ValueError as error:  # A seed that all agents share.
        assert "the loss is infinite" in str(error)
        mu = np.full(N, np.inf)
    return mu * value.config.protect.sensitivity / scale


def misstated(value, noise_of=None):
    """(attacker, victim) of whom the table promises more than views confirm, or less.

    ``noise_of`` is the plan whose noise runs, where ``value`` states it falsely.
    """
    runs = value if noise_of is None else noise_of
    rows = {row.party: row.epsilon is not None for row in value.protection()}
    groups = getattr(value.config.noise, "subgroups", None) or [range(N)]
    faults = []
    for attacker in range(N):
        lost = loss_against(runs, attacker)
        for victim in set(range(N)) - {attacker}:
            same = any({attacker, victim} <= set(group) for group in groups)
            party = f"{ANOTHER} of {'its own' if same else 'another'} group"
            kept = lost[victim] <= runs.guarantee.mu * (1 + 1e-6)
            if rows.get(party, rows.get(ANOTHER)) != kept:
                faults.append((attacker, victim))
    return faults


@pytest.mark.parametrize("name", NODES)
def test_other_agents_lose_what_table_says(name):
    assert not misstated(gossip(**NODES[name]))


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("name", "lie"), [("whisper", "own"), ("groups", "own"), ("spacetime", "own")]
)
def test_table_that_calls_shared_seed_own_secret_is_found_out(name, lie):
    """The broken copy: the same noise, under a record that hides who shares its seed."""
    single = gossip(**NODES[name])
    lied = single.guarantee.replace(secrets=lie)
    with pytest.raises(ValueError, match=f"guarantee.secrets is {lie!r}"):
        dataclasses.replace(single, guarantee=lied)
    honest = gossip(**NODES[name])
    object.__setattr__(single, "guarantee", lied)
    assert misstated(single, noise_of=honest)


def test_keys_of_links_protect_agents_only_where_they_are_attackers():
    outside = gossip(noise=PairKeys(2.0), attacker="outsider")
    rows = {row.party: row for row in outside.protection()}
    assert rows[ANOTHER].epsilon is None and rows[OUTSIDER].epsilon == 8.0
    lost = np.nanmax([np.nanmax(loss_against(outside, a)) for a in range(N)])
    assert lost > 1.02 * outside.guarantee.mu
    some = gossip(noise=PairKeys(2.0), attacker="coalition", nodes=(1, 4))
    rows = {row.party: row.epsilon for row in some.protection()}
    assert rows.pop("the coalition of agents 1, 4") == 8.0 and set(rows.values()) == {None}


def test_what_coalition_s_own_agents_lose_is_not_in_its_number():
    """Agent 0 hangs on one of six others who all share secrets; its own are few."""
    graph = nx.complete_graph(range(1, 7))
    graph.add_edge(0, 1)
    tail = nx.Graph()
    tail.add_nodes_from(range(7))
    tail.add_edges_from(graph.edges)
    config = make_config(
        noise=PairKeys(), epsilon=3.0, attacker="coalition", nodes=(0,), rounds=2,
        relation="replace_record",
    )  # fmt: skip
    matrix = mixing.metropolis_hastings(tail)
    training_plan = plan.make(config, matrix)
    stated = training_plan.guarantee
    pattern = training_plan.config.pattern
    decor = views.decor(matrix, 1.0, 1.0)
    each = decor.pndp((0,)).guaranteed(pattern)
    lost = decor.ldp().guaranteed(pattern) * stated.mu / np.nanmax(each)
    assert lost[0] > 1.2 * stated.mu and gdp.epsilon(lost[0], stated.delta) > 3.8
    assert lost[1:].max() <= stated.mu
    rows = {row.party: row for row in training_plan.protection()}
    coalition = rows.pop("the coalition of agents 0")
    assert coalition.epsilon == 3.0 and coalition.why == (
        "it is the stated attacker of all other agents' data"
    )
    assert {row.epsilon for row in rows.values()} == {None}
    for party in (OUTSIDER, SERVER):
        assert rows[party].why.endswith("cover the data of the coalition of agents 0")
    assert not parties.covers(stated, "outsider")
    assert ", agents 0, for the data of all other agents" in stated.statement()
    # Under noise of their own the number is the outsider's, of every agent.
    own = gossip(design="independent", attacker="coalition", nodes=(0,))
    rows = {row.party: row.epsilon for row in own.protection()}
    assert {rows[party] for party in (OUTSIDER, SERVER, ANOTHER)} == {own.guarantee.epsilon}


@pytest.mark.parametrize("design", ["independent", "anti_pgd", "prefix_sum", "mafalda"])
@pytest.mark.parametrize("attack", [{"attacker": "node"}, {"attacker": "coalition", "nodes": (1,)}])
def test_against_agents_noise_of_their_own_is_outsider_s(design, attack):
    single = gossip(design=design, **attack)
    outside = gossip(design=design)
    np.testing.assert_array_equal(single.factor, outside.factor)
    assert single.guarantee.mu == outside.guarantee.mu and single.guarantee.epsilon == 8.0
    assert single.guarantee.attacker == attack["attacker"]
    assert not misstated(single)


@dataclasses.dataclass(frozen=True)
class Coloured(noise.Independent):
    """A user's own: called independent, correlated over agents."""

    def over_agents(self, target, bound):
        return noise.Whisper().over_agents(target, bound)

    def check(self, design, target):
        pass


def test_noise_of_shared_seed_is_refused_against_agents():
    for shared in ({"design": "whisper"}, {"design": "spacetime"}, {"subgroups": GROUPS}):
        with pytest.raises(
            ValueError, match="'node'.*a seed that they share.*Independent.*noise.PairKeys"
        ):
            gossip(**shared, attacker="node")
    assert gossip(noise=Coloured()).guarantee.secrets == "shared"
    # The broken copy: a subclass of a design whose agents share nothing.
    with pytest.raises(ValueError, match="'node'.*a seed that they share"):
        gossip(noise=Coloured(), attacker="node")
    with pytest.raises(ValueError, match=r"nodes is \(9,\) of 6 agents"):
        gossip(design="independent", attacker="coalition", nodes=(9,))
    poisson = samplers.Poisson(6.0, 4)
    with pytest.raises(ValueError, match="give 'outsider', who knows no batches"):
        gossip(design="independent", relation="zero_out_record", sampler=poisson, attacker="node")


def test_one_agent_alone_has_no_other_participant():
    config = make_config(design="independent", rounds=2)
    single = plan.make(config, np.ones((1, 1)))
    assert [row.party for row in single.protection()][:2] == [OUTSIDER, SERVER]
    assert "participant" not in single.guarantee.statement()
    poisson = {"relation": "zero_out_record", "sampler": samplers.Poisson(6.0, 4)}
    config = make_config(design="independent", rounds=2, **poisson)
    text = plan.make(config, np.ones((1, 1)), counts=[60]).guarantee.statement()
    assert "The promises hold for one agent who keeps its seed secret." in text


def test_agents_in_sum_count_as_colluders():
    rows = {row.party: row for row in summed(SumShares()).protection()}
    assert rows[ANOTHER].epsilon is None and "give colluders=1" in rows[ANOTHER].why
    assert rows[OUTSIDER].epsilon == rows[SERVER].epsilon == 2.0


def test_statements_of_designs_differ_in_who_is_protected():
    texts = [
        made(row)[0].guarantee.statement()
        for row in ("independent", "Whisper, Whisper (whole run)", "Whisper with subgroups")
    ]
    assert f"Protected from {ANOTHER} (epsilon = 8, delta = 1e-05): every agent" in texts[0]
    assert f"NOT protected from {ANOTHER}: it holds the seed" in texts[1]
    assert f"NOT protected from {ANOTHER} of its own group" in texts[2]
    assert f"Protected from {ANOTHER} of another group (epsilon = 8" in texts[2]
    assert made("independent")[1].guarantee.statement().count(f"Protected from {OUTSIDER}") == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"design": "mafalda"}, " rounds with noise correlated over rounds against"),
        ({"design": "independent"}, " rounds against"),
    ],
)
def test_what_differs_over_rounds_is_named(changes, text):
    assert text in gossip(**changes).guarantee.statement()
    by_round = by_schedule(scheduled.ScheduledGaussian(0.9), DSGD()).guarantee
    assert "with noise of a scale that changes by round against" in by_round.statement()
    pair = by_round.followed_by(by_round, planned=True)
    assert "in phases with noise of their own against" in pair.statement()


@pytest.mark.parametrize(
    ("changes", "counts", "text"),
    [
        ({"delta": 0.5}, None, "delta is 0.5 for 6 agents.*below 0.17"),
        ({"delta": 0.01, "relation": "replace_record"}, 24, "delta is 0.01 for 144 records"),
        ({"delta": 0.01, "relation": "replace_record"}, 16, None),
        (
            {"delta": 0.05, "relation": "replace_record"},
            None,
            "for at least 24 records.*below 0.042",
        ),
        ({"delta": 0.04, "relation": "replace_record"}, None, None),
        ({"delta": 0.16}, 24, None),
    ],
)
def test_delta_above_one_over_units_warns(changes, counts, text):
    config = make_config(design="independent", rounds=2, **changes)
    argument = None if counts is None else np.full(N, counts)
    if text is None:
        plan.make(config, MATRIX, counts=argument)
        return
    with pytest.warns(UserWarning, match=text) as caught:
        plan.make(config, MATRIX, counts=argument)
    assert len(caught) == 1 and caught[0].filename == __file__


def test_delta_above_one_over_clients_warns():
    """Six places, three clients each."""
    made_for = Budget(2.0, 0.06)
    with pytest.warns(UserWarning, match="delta is 0.06 for 18 clients"):
        summed(SumShares(), budget=made_for)
    summed(SumShares(), budget=Budget(2.0, 0.05))


def test_run_warns_where_plan_did_not_know_its_records():
    training_plan = plan.make(
        make_config(design="independent", rounds=2, relation="replace_record", delta=0.01), MATRIX
    )
    with pytest.warns(UserWarning, match="delta is 0.01 for 144 records"):
        statements.forecast_line([training_plan], 5, np.full(N, 24))
    statements.forecast_line([training_plan], 5, np.full(N, 16))
