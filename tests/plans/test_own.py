"""A covariance of the user's own: scaled to the budget, audited, refused where it cannot defend."""

import dataclasses

import numpy as np
import pytest

from dpjax.accounting import gdp
from dpjax.engine.run import run
from dpjax.learning import samplers
from dpjax.mechanism import spatial
from dpjax.mechanism.design import Design
from dpjax.plans import noise, plan
from dpjax.plans.protect import Budget, Protect
from dpjax.results import plots
from dpjax.topology import graphs
from tests.support import make_config, with_factor


def own_config(covariance, name="mine", **changes):
    """A config for a covariance."""
    return make_config(noise=noise.Covariance(covariance, name), **changes)


def positive(n, seed=0):
    """Some covariance."""
    root = np.random.default_rng(seed).normal(size=(n, 2 * n))
    return root @ root.T


@pytest.mark.parametrize("scale", [1e-200, 1.0, 3e150])
@pytest.mark.parametrize("relation", ["replace_agent", "zero_out_record"])
def test_only_shape_of_covariance_matters(network, scale, relation):
    shape = positive(6)
    training_plan = plan.make(own_config(scale * shape, relation=relation), network)
    held = training_plan.covariance()
    np.testing.assert_allclose(held / held[0, 0], shape / shape[0, 0], rtol=1e-5, atol=1e-6)
    # As a dense oracle has it: all T messages, the worst agent, equal shifts.
    times = 2 if relation == "replace_agent" else 1
    mu = times * 0.5 * np.sqrt(20 * np.diag(np.linalg.inv(held)).max())
    assert mu <= float(gdp.mu(8.0, 1e-5)) * (1 + 1e-12) and mu == pytest.approx(
        training_plan.guarantee.mu, rel=1e-6
    )
    # Tight: one percent less noise is refused.
    with pytest.raises(ValueError, match="guarantee states epsilon"):
        with_factor(training_plan, np.float32(0.99) * training_plan.factor)


def test_budgets_of_each_agent_bound_it(network):
    epsilons = (2.0, 4.0, 4.0, 8.0, 8.0, 16.0)
    training_plan = plan.make(own_config(positive(6), epsilon=epsilons), network)
    mu = 2 * 0.5 * np.sqrt(20 * np.diag(np.linalg.inv(training_plan.covariance())))
    allowed = np.asarray(gdp.mu(np.array(epsilons), 1e-5))
    assert (mu <= allowed * (1 + 1e-9)).all() and (mu / allowed).max() > 1 - 1e-5


def test_built_in_designs_come_back(network):
    """Whisper's shape through the keyword is Whisper's plan."""
    whisper = plan.make(make_config(), network)
    again = plan.make(own_config(spatial.whisper(network, 7.0)), network)
    np.testing.assert_allclose(again.covariance(), whisper.covariance(), rtol=1e-5, atol=1e-9)


def test_name_goes_into_records_and_plans(network, small):
    training_plan = plan.make(own_config(positive(6), "half-half", rounds=2), network)
    assert repr(training_plan).startswith("Plan(half-half, 6 agents, (epsilon = 8")
    result = run(training_plan, small, seeds=[0])
    row = result.rows()[0]
    assert row["design"] == "half-half" and row["guarantee"]["epsilon"] == 8
    assert result.terms[0]["label"] == "half-half"
    other = plan.make(own_config(positive(6), "other", rounds=2), network)
    assert other.fingerprint() != training_plan.fingerprint()


def test_strategy_of_ones_own_keeps_its_name_and_is_accounted(network, small, tmp_path):
    """Over rounds alone: the identity over agents."""
    strategy = np.eye(4) - 0.5 * np.eye(4, k=-1)
    part = noise.Covariance(np.eye(6), "half back", strategy=7.0 * strategy)
    config = make_config(noise=part, rounds=4, epsilon=3.0)
    training_plan = plan.make(config, network)
    result = run(training_plan, small, seeds=[0])
    assert repr(training_plan).startswith("Plan(half back, 6 agents")
    assert {row["design"] for row in result.rows()} == {"half back"}
    assert "correlated over rounds" in training_plan.guarantee.statement()
    # As a dense oracle has it: an agent's data may change in every round, each by 2 clip norms.
    worst = max(
        np.linalg.norm(strategy @ signs)
        for signs in np.array(np.meshgrid(*[[-1, 1]] * 4)).reshape(4, -1).T
    )
    deviation = training_plan.factor[0, 0] / 7.0
    assert 2 * 0.5 * worst / deviation <= gdp.mu(3.0, 1e-5) * (1 + 1e-9)
    assert training_plan.guarantee.mu == pytest.approx(2 * 0.5 * worst / deviation, rel=1e-5)
    with pytest.raises(ValueError, match="guarantee states epsilon"):
        with_factor(training_plan, np.float32(0.99) * training_plan.factor)
    with np.load(training_plan.save(tmp_path / "it.npz")) as file:
        assert "(half back)" in str(file["how_to_use"]) and file["strategy"].shape == (4, 4)
    other = dataclasses.replace(part, strategy=np.eye(4))
    assert plan.make(dataclasses.replace(config, noise=other), network).strategy[1, 0] == 0


def test_strategies_that_cannot_be_applied_are_refused_with_what_to_give(network):
    strategy = np.eye(20)
    with pytest.raises(ValueError, match=r"give noise.Covariance\(matrix, name, strategy=C\)"):
        plan.make(own_config(np.eye(6)), network, strategy=strategy)
    pair = make_config(noise=noise.Covariance(np.eye(6), "mine", strategy))
    with pytest.raises(ValueError, match="strategy is given beside that of the covariance 'mine'"):
        plan.make(pair, network, strategy=strategy)
    with pytest.raises(ValueError, match="strategy"):
        plan.make(dataclasses.replace(pair, rounds=19), network)
    for invalid in (np.ones((3, 3)), np.zeros((3, 3)), np.full((2, 3), 1.0), "no matrix"):
        with pytest.raises(ValueError, match="strategy"):
            noise.Covariance(np.eye(6), "mine", invalid)
    sampled = samplers.Poisson(6.0, 4)
    with pytest.raises(ValueError, match="strategy of few bands"):
        dataclasses.replace(
            make_config(noise=noise.Covariance(np.eye(6), "mine", strategy),
                        relation="zero_out_record"), sampler=sampled,
        )  # fmt: skip


def test_graph_in_place_of_matrix_is_told_what_to_call():
    graph = graphs.ring(6)
    reported = r"mixing is <networkx.*the matrix of a graph, mixing.metropolis_hastings\(graph\)"
    with pytest.raises(ValueError, match=reported):
        plan.make(make_config(), graph)


def test_saved_one_makes_same_plan_under_its_own_name_only(network, tmp_path):
    training_plan = plan.make(own_config(positive(6)), network)
    read = Design.load(training_plan.save(tmp_path / "it.npz"))
    again = plan.make(own_config(None), network, design=read)
    np.testing.assert_array_equal(again.factor, training_plan.factor)
    with pytest.raises(ValueError, match="name 'mine', the config's is 'yours'"):
        plan.make(own_config(None, "yours"), network, design=read)
    with pytest.raises(ValueError, match="design is 'covariance'"):
        plan.make(make_config(), network, design=read)


@pytest.mark.parametrize(
    ("covariance", "message"),
    [
        (np.ones((6, 6)), "covariance is singular"),
        (np.zeros((6, 6)), "covariance is singular"),
        (np.eye(6) - 2 * np.diag(np.eye(6)[0]), "covariance is singular, nearly"),
        (np.eye(6) + np.eye(6, k=1) / 10, "covariance is not symmetric"),
        (np.eye(5), r"covariance '\w+' is \(5, 5\) for 6 agents"),
        (np.full((6, 6), np.nan), "covariance holds nan"),
        ("no matrix", "covariance is not an array"),
        (None, r"covariance '\w+' is None for 6 agents"),
    ],
)
def test_what_cannot_defend_is_refused(network, covariance, message):
    with pytest.raises(ValueError, match=message):
        plan.make(own_config(covariance), network)


def test_name_of_another_design_is_refused():
    others = (None, "", " x", "central", "covariance", "non_private", "a\nb", "x" * 61, 3)
    titles = [title for label, title in plots.TITLES.items() if label in noise.DESIGNS]
    labels = [make_config(noise=part).label for part, label in LABELS if label != "mine"]
    for name in (*others, *noise.DESIGNS, *titles, *labels):
        with pytest.raises(ValueError, match="name is .* for a covariance"):
            own_config(positive(6), name)


def test_covariances_are_equal_where_name_and_bits_are():
    first = noise.Covariance(np.eye(2), "mine")
    assert (
        first == noise.Covariance(np.eye(2), "mine")
        and len({first, noise.Covariance(np.eye(2), "mine")}) == 1
    )
    for other in (
        noise.Covariance(2 * np.eye(2), "mine"),
        noise.Covariance(np.eye(2), "other"),
        noise.Covariance(np.eye(2), "mine", np.tri(3)),
        noise.Independent(),
    ):
        assert first != other


LABELS = [
    (noise.Polynomial(), "polynomial"),
    (noise.Polynomial(degree=4), "polynomial(degree=4)"),
    (noise.Polynomial(8, "run"), "polynomial(degree=8, horizon=run)"),
    (noise.Whisper(), "whisper"),
    (noise.Whisper("run"), "whisper_horizon"),
    (noise.Whisper(12), "whisper_horizon(horizon=12)"),
    (noise.PrefixSum(bands=4), "prefix_sum(bands=4)"),
    (noise.Covariance(np.eye(6), "mine", np.eye(20)), "mine"),
]


@pytest.mark.parametrize(("part", "label"), LABELS)
def test_label_tells_parameters_that_are_no_defaults(part, label):
    assert make_config(noise=part).label == label


def test_long_parameters_are_digests_in_labels():
    """Of two schedules that begin alike, too."""
    labels = set()
    for last in (0.5, 0.6):
        part = noise.ScheduledLaplace((*[1.0] * 19, last))
        protect = Protect("replace_agent", clip_norm=1.0, norm="l1")
        budget = Budget(8.0, accountant="pure")
        labels.add(make_config(noise=part, protect=protect, budget=budget).label)
    assert len(labels) == 2 and all(len(label) < 40 for label in labels)


def test_one_result_has_no_two_designs_of_one_name(network, small):
    plans = [plan.make(make_config(noise=noise.Whisper(horizon)), network) for horizon in (3, 7)]
    result = run(plans, small, seeds=[0])
    assert {row["design"] for row in result.rows()} == {
        "whisper_horizon(horizon=3)", "whisper_horizon(horizon=7)",
    }  # fmt: skip
    n = len(network)
    alike = [
        plan.make(make_config(noise=noise.Covariance(np.eye(n) + part, "mine")), network)
        for part in (0, 1)
    ]
    with pytest.raises(ValueError, match="plans have two noise designs that are called 'mine'"):
        run(alike, small, seeds=[0])
