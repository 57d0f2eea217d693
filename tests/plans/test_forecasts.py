"""The forecast is what simulated noise and full clipped steps do, for every design and unit."""

import dataclasses
import math
import re
import warnings

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest

from dpjax.accounting import forecast, gdp
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.tracking import DPOP
from dpjax.algorithms.zip_dl import ZipDL
from dpjax.data.partition import Partition
from dpjax.engine.run import run
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.plans import links, noise, plan, protect, scheduled, statements
from dpjax.plans.optimizers import Sgd
from dpjax.topology import graphs, mixing
from tests.support import diagonal, make_config, make_problem, retargeted

PRIVATE = [name for name in noise.LABELS if name != "non_private"]
UNITS = [
    {"relation": "replace_agent"},
    {"relation": "zero_out_record", "batch_size": 3},
    {"relation": "replace_record", "participation": (4, 5)},
    {"relation": "replace_agent", "step_decay": "sqrt"},
]


def steps_of(result):
    """[T] step sizes of a plan."""
    config = result.config
    decay = np.sqrt(np.arange(1, config.rounds + 1)) if config.optimizer.decay == "sqrt" else 1.0
    return np.broadcast_to(config.optimizer.step_size / decay, (config.rounds,))


def rounds_of(result, added):
    """The average of the models after X <- W (X - eta added_t / B) in every round, from zero."""
    schedule = result.mixing if result.mixing.ndim == 3 else result.mixing[None]
    divisor = result.config.sampler.batch_size if result.config.protect.unit == "record" else 1
    models = np.zeros(added.shape[1:])
    for t, step in enumerate(steps_of(result)):
        models = schedule[t % len(schedule)] @ (models - step * added[t] / divisor)
    return models.mean(axis=0)


def simulated(result, coordinates=4000, filled=None):
    """Noise in the average model over the largest drift, for one coordinate, by doing both."""
    n = result.agents
    rounds = result.config.rounds
    normals = np.random.default_rng(0).normal(size=(rounds, n * coordinates))
    if result.strategy is not None:
        normals = np.linalg.solve(result.applied_strategy, normals)
    added = np.einsum("ij,tjd->tid", result.factor, normals.reshape(rounds, n, coordinates))
    records = result.config.sampler.batch_size if result.config.protect.unit == "record" else 1
    complete = np.ones((rounds, n, 1)) if filled is None else filled[..., None]
    drift = rounds_of(result, result.config.protect.clip_norm * records * complete)
    return np.sqrt(np.mean(rounds_of(result, added) ** 2)) / abs(drift[0])


@pytest.mark.parametrize(("name", "unit"), diagonal(PRIVATE, UNITS))
def test_ratio_is_what_noise_and_full_steps_do(network, name, unit):
    training_plan = plan.make(make_config(design=name, **unit), network)
    result = training_plan.forecast(2500)
    assert result.ratio == pytest.approx(50 * simulated(training_plan), rel=0.05)
    # No design goes below the floor, and none whose agents draw apart below theirs.
    assert result.floor <= result.ratio * (1 + 1e-6)
    if result.independent:
        assert 50 * result.apart_rate <= result.ratio * (1 + 1e-6)
    assert result.independent == (
        name not in ("pairwise", "whisper", "whisper_horizon", "spacetime")
    )


def test_floors_are_closed_forms(network):
    n = len(network)
    mu = float(gdp.mu(8.0, 1e-5))
    for times, changes, units in [
        (2, {"relation": "replace_agent"}, n),
        (2, {"relation": "replace_record"}, n * 4),
        (1, {"relation": "zero_out_record"}, n * 4),
        (2, {"relation": "replace_record", "participation": (4, 5)}, n * 20),
    ]:
        training_plan = plan.make(make_config(design="independent", **changes), network)
        result = training_plan.forecast(900)
        assert result.floor == pytest.approx(times * 30 / (units * mu), rel=1e-6)
        assert 30 * result.apart_rate == pytest.approx(result.floor * np.sqrt(n), rel=1e-9)
        if "participation" not in changes:
            # Fresh independent noise attains what drawing apart allows; clip norm and T are gone.
            assert result.ratio == pytest.approx(30 * result.apart_rate, rel=1e-6)
            free = changes | {"clip_norm": 3.0, "rounds": 7, "step_size": 9.0}
            other = make_config(design="independent", **free)
            assert plan.make(other, network).forecast(900).ratio == pytest.approx(
                result.ratio, rel=1e-6
            )


def test_no_covariance_strategy_mixing_or_step_goes_below_floor():
    """The exact loss of equal shifts, which is the least that mu can be, for random mechanisms."""
    rng = np.random.default_rng(0)
    n = 5
    rounds = 6
    nearest = np.inf
    nearest_apart = np.inf
    for trial in range(400):
        apart = trial % 2 == 0
        factor = np.diag(rng.uniform(0.1, 3, n)) if apart else rng.normal(size=(n, n))
        strategy = np.tril(rng.normal(size=(rounds, rounds))) + 3 * np.eye(rounds)
        matrix = rng.uniform(size=(n, n)) + np.eye(n)
        matrix /= matrix.sum(axis=1, keepdims=True)
        epochs, separation = [(6, 1), (3, 2), (2, 3), (1, 6)][trial % 4]
        starts = rounds - (epochs - 1) * separation
        rows = np.array([[(t - s) in range(0, epochs * separation, separation)
                          for t in range(rounds)] for s in range(starts)], float)  # fmt: skip
        over_rounds = np.einsum("st,tu,su->s", rows, strategy.T @ strategy, rows).max()
        over_agents = np.diag(np.linalg.inv(factor @ factor.T))
        mu = 2 * 0.7 * np.sqrt(over_rounds * over_agents)
        reach = forecast.weights(matrix, rounds)
        np.testing.assert_allclose(reach.sum(axis=1), 1)
        result = forecast.forecast(
            9, factor=factor, reach=reach, step_sizes=rng.uniform(0.1, 1, rounds),
            patterns=(epochs, separation), clip_norm=0.7, relation="replace_record", batch_size=3,
            mu=mu.max(), delta=1e-5, strategy=strategy, budgets=mu,
        )  # fmt: skip
        assert result.ratio >= result.floor * (1 - 1e-9) and result.independent == apart
        nearest = min(nearest, result.ratio / result.floor)
        if apart:
            assert 3 * result.apart_rate <= result.ratio * (1 + 1e-9)
            nearest_apart = min(nearest_apart, result.ratio / (3 * result.apart_rate))
    # Not far below either: bounds half again as large would have failed.
    assert nearest < 1.5 and nearest_apart < 1.5


def test_floor_is_reached_by_noise_that_cancels_on_complete_graph():
    matrix = mixing.metropolis_hastings(graphs.complete(10))
    result = plan.make(make_config(design="whisper", rounds=5), matrix).forecast(100)
    assert result.floor <= result.ratio <= 1.1 * result.floor
    assert result.ratio < 0.4 * 10 * result.apart_rate


@pytest.mark.parametrize("name", ["whisper_horizon", "mafalda"])
def test_row_stochastic_weights_and_schedules_reach_unevenly(name):
    star = mixing.uniform_neighbors(graphs.star(6))
    other = mixing.uniform_neighbors(nx.path_graph(6))
    for matrix in (star, np.stack([star, other])):
        training_plan = plan.make(make_config(design=name, rounds=8), matrix)
        assert training_plan.forecast(1).ratio == pytest.approx(simulated(training_plan), rel=0.05)
        # A broken twin takes 1/n for everybody.
        even = forecast.forecast(
            1, factor=training_plan.factor, reach=np.full((1, 6), 1 / 6), step_sizes=np.ones(8),
            patterns=(8, 1), clip_norm=0.5, relation="replace_agent", batch_size=4,
            mu=training_plan.guarantee.mu, delta=1e-5, strategy=training_plan.strategy,
        )  # fmt: skip
        assert not even.ratio == pytest.approx(simulated(training_plan), rel=0.05)
        assert training_plan.forecast(1).ratio >= training_plan.forecast(1).floor


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("broken", "design"),
    [
        ({"strategy": None}, "mafalda"),
        ({"batch_size": 1}, "independent"),
        ({"step_sizes": np.ones(20)}, "whisper"),
        ({"factor": "diagonal"}, "whisper"),
    ],
)
def test_forecast_that_forgets_part_is_caught(network, broken, design):
    config = make_config(design=design, relation="replace_record", step_decay="sqrt")
    training_plan = plan.make(config, network)
    if "factor" in broken:
        broken = {"factor": np.diag(np.sqrt(np.diag(training_plan.covariance())))}
    options = dict(
        factor=training_plan.factor, reach=np.full((1, 6), 1 / 6),
        step_sizes=steps_of(training_plan), patterns=(20, 1), clip_norm=0.5,
        relation="replace_record", batch_size=4, mu=training_plan.guarantee.mu,
        delta=1e-5, strategy=training_plan.strategy,
    )  # fmt: skip
    assert forecast.forecast(1, **options).ratio == pytest.approx(
        simulated(training_plan), rel=0.05
    )
    assert not forecast.forecast(1, **(options | broken)).ratio == pytest.approx(
        simulated(training_plan), rel=0.05
    )


def test_budgets_of_each_agent_count(network):
    training_plan = plan.make(
        make_config(design="independent", epsilon=(1.0, 4, 4, 8, 8, 16)), network
    )
    result = training_plan.forecast(400)
    assert result.ratio == pytest.approx(20 * simulated(training_plan), rel=0.05)
    assert result.floor == pytest.approx(2 * 20 / (6 * gdp.mu(1.0, 1e-5)), rel=1e-6)
    assert result.ratio == pytest.approx(20 * result.apart_rate, rel=1e-6)


def test_padding_lowers_drift(network):
    counts = np.array([20, 20, 20, 7, 3, 11])
    config = make_config(design="mafalda", relation="replace_record", participation=(4, 5))
    training_plan = plan.make(config, network)
    rounds = np.arange(20)[:, None] % 5
    filled = np.array([[sum(r % 5 == t for r in range(c)) / 4 for c in counts] for (t,) in rounds])
    result = training_plan.forecast(1, counts=counts)
    assert result.ratio == pytest.approx(simulated(training_plan, filled=filled), rel=0.05)
    assert result.ratio > 1.4 * training_plan.forecast(1).ratio
    with pytest.raises(ValueError, match="counts has 2 entries for 6 agents"):
        training_plan.forecast(1, counts=[1, 2])


def test_forecast_takes_counts_that_plan_knows(network):
    """One large agent makes the places of a full batch, of which the others fill few."""
    counts = np.array([400, 20, 20, 20, 20, 20])
    config = make_config(relation="zero_out_record", sampler=samplers.Full())
    training_plan = plan.make(config, network, counts=counts)
    complete = training_plan.forecast(20_000, counts=np.full(6, 400))
    result = training_plan.forecast(20_000)
    assert (complete.level, result.level) == ("learns", "poor")
    assert result.ratio == pytest.approx(complete.ratio * 2400 / 500)
    assert f"noise allows for {result.affords():,.0f} parameters" in repr(training_plan)
    assert training_plan.forecast(1).affords() < complete.affords() / 20


def spread_of(result, steps=1):
    """Root mean square of the models' noise around their average, from the dense map of all noise.

    In units of the largest drift of one agent's clipped gradient.
    """
    n = result.agents
    rounds = result.config.rounds
    schedule = np.atleast_3d(result.mixing.T).T
    reach = np.eye(n) - 1 / n
    effect = np.empty((rounds, n, n))
    for t in range(rounds - 1, -1, -1):
        reach = reach @ np.linalg.matrix_power(schedule[t % len(schedule)], steps)
        effect[t] = steps_of(result)[t] * reach @ result.factor
    if result.strategy is not None:
        inverse = np.linalg.inv(result.strategy)
        effect = np.einsum("tij,ts->sij", effect, inverse)
    drift = result.config.protect.clip_norm * steps_of(result).sum()
    return np.sqrt((effect**2).sum() / n) / drift


@pytest.mark.parametrize(
    ("matrix", "changes"),
    [
        (None, {"design": "independent"}),
        (None, {"design": "pairwise", "step_decay": "sqrt"}),
        (None, {"design": "mafalda"}),
        (None, {"design": "whisper_horizon", "method": DSGD(gossip_steps=2)}),
        ("star", {"design": "independent"}),
        ("schedule", {"design": "anti_pgd"}),
    ],
)
def test_disagreement_is_that_of_dense_map(network, matrix, changes):
    star = mixing.uniform_neighbors(graphs.star(6))
    other = mixing.uniform_neighbors(nx.path_graph(6))
    matrix = {"star": star, "schedule": np.stack([star, other])}.get(matrix, network)
    training_plan = plan.make(make_config(**changes), matrix)
    steps = changes["method"].gossip_steps if "method" in changes else 1
    exact = spread_of(training_plan, steps)
    assert training_plan.forecast(100).disagreement == pytest.approx(10 * exact, rel=0.06)
    # Copies that forget a step of gossip or the strategy would be seen.
    assert not training_plan.forecast(1).disagreement == pytest.approx(
        spread_of(training_plan, steps + 1), rel=0.06
    )


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_agents_who_mix_slowly_disagree_and_verdict_says_so(form):
    """A ring of 300, whose average would learn: by the average alone it "learns"."""
    ring = mixing.metropolis_hastings(graphs.ring(300), sparse=form == "sparse")
    training_plan = plan.make(make_config(design="independent", epsilon=8.0, rounds=30), ring)
    result = training_plan.forecast(30)
    assert result.ratio < result.good < result.disagreement and result.level == "poor"
    dense = plan.make(training_plan.config, mixing.metropolis_hastings(graphs.ring(300)))
    assert result.disagreement == pytest.approx(np.sqrt(30) * spread_of(dense), rel=0.06)
    text = result.statement()
    assert (
        f"in agents' own models, it is {result.disagreement:.2g}. Expect it to learn poor" in text
    )
    assert "DSGD(gossip_steps=...)" in text and "agents in place of" not in text
    assert f"({result.disagreement:.2g} between agents)" in result.caption()
    # What is said to help is counted with the disagreement.
    assert training_plan.forecast(int(result.affords())).level == "learns"
    assert training_plan.forecast(int(result.affords()) + 1).level == "poor"
    mixed = dataclasses.replace(training_plan.config, method=DSGD(gossip_steps=200))
    assert plan.make(mixed, ring).forecast(30).level == "learns"


def test_run_s_models_are_as_far_apart_as_forecast(network):
    training_plan = plan.make(make_config(design="pairwise", epsilon=60.0, step_size=1.0), network)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", statements.HopelessWarning)
        models = run(training_plan, flat_problem(6, 0.0), seeds=[0]).params[0, 0]
    apart = np.linalg.norm(models - models.mean(axis=0)) / np.sqrt(6)
    drift = training_plan.config.protect.clip_norm * training_plan.config.rounds
    assert training_plan.forecast(3000).disagreement == pytest.approx(apart / drift, rel=0.06)


def test_polynomials_of_any_number_of_agents_have_forecast(monkeypatch):
    ring = mixing.metropolis_hastings(graphs.ring(60), sparse=True)
    config = make_config(noise=noise.Polynomial(horizon="run"))
    training_plan = plan.make(config, ring)
    options = dict(
        reach=np.full((1, 60), 1 / 60), step_sizes=np.ones(20), patterns=(20, 1), clip_norm=0.5,
        relation="replace_agent", batch_size=4, mu=training_plan.guarantee.mu, delta=1e-5,
    )  # fmt: skip
    dense = forecast.forecast(1, factor=training_plan.factor, **options)
    exact = spread_of(retargeted(training_plan, mixing=training_plan.mixing.toarray()))
    monkeypatch.setattr("dpjax.plans.polynomial._DENSE", 9)
    large = plan.make(config, ring)
    result = large.forecast(1)
    assert result.ratio == pytest.approx(dense.ratio, rel=1e-5)
    assert result.disagreement == pytest.approx(exact, rel=0.06)
    assert not result.independent and result.ratio >= result.floor


def test_statement_says_what_rare_class_has(network):
    result = plan.make(make_config(), network).forecast(100)
    assert f"for it the ratio is {10 * result.ratio:.2g}." in result.statement()


def flat_problem(agents, slope, size=3000):
    """Models of a given size whose gradient is the same everywhere: slope in every entry."""
    return Problem(
        init=lambda key: jnp.zeros(size),
        loss=lambda params, x, y: slope * jnp.sum(params),
        metrics=lambda params, evaluation: {"value": jnp.sum(params)},
        x=np.zeros((agents * 8, 1), np.float32),
        y=np.zeros(agents * 8, np.float32),
        partition=Partition(
            np.arange(agents * 8, dtype=np.int32).reshape(agents, 8), np.full(agents, 8, np.int32)
        ),
        evaluation=np.zeros(1, np.float32),
    )


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["replace_agent", "replace_record"])
def test_run_has_noise_and_drift_of_its_forecast(network, relation):
    changes = {"relation": relation, "epsilon": 60.0, "step_size": 1.0}
    noisy = plan.make(make_config(design="whisper_horizon", **changes), network)
    clean = plan.make(make_config(design="non_private", **changes), network)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", statements.HopelessWarning)
        noise = run(noisy, flat_problem(6, 0.0), seeds=[0]).params[0, 0].mean(axis=0)
        drift = run(clean, flat_problem(6, 1e3), seeds=[0]).params[0, 0].mean(axis=0)
    ratio = np.linalg.norm(noise) / np.linalg.norm(drift)
    assert noisy.forecast(3000).ratio == pytest.approx(ratio, rel=0.05)


def test_what_would_help_does(network):
    horizon = dict(design="whisper_horizon", epsilon=16.0)
    config = make_config(**horizon)
    result = plan.make(config, network).forecast(5000)
    assert result.level == "hopeless" and result.ratio > forecast.HOPELESS["agent"]
    smaller = plan.make(config, network).forecast(int(result.affords()))
    assert 0.9 * result.good < smaller.ratio <= result.good and smaller.level == "learns"
    assert plan.make(config, network).forecast(int(result.affords()) + 1).ratio > result.good
    richer = make_config(**horizon | {"epsilon": result.epsilon()})
    assert plan.make(richer, network).forecast(5000).ratio == pytest.approx(result.good, rel=1e-6)
    batch = int(re.findall(r"with batches of (\d+)", result.statement())[0])
    horizon["relation"] = "replace_record"
    records = make_config(**horizon, batch_size=batch)
    minimum = plan.make(records, network).forecast(5000)
    assert minimum.level == "learns" and minimum.ratio > 0.9 * minimum.good
    small = plan.make(make_config(**horizon, batch_size=1), network).forecast(5000)
    (needed,) = re.findall(r"batches of (\d+) in place of 1", small.statement())
    assert int(needed) == batch
    single = plan.make(config.using(noise.Independent()), network).forecast(500)
    ring = mixing.metropolis_hastings(graphs.ring(single.agents_needed(2.0)))
    extra = plan.make(config.using(noise.Independent()), ring).forecast(500)
    assert extra.ratio == pytest.approx(2.0, rel=0.02)
    text = result.statement()
    assert f"{result.affords():,.0f} parameters" in text and f"{result.epsilon():,.0f}" in text
    assert f"{result.agents_needed():,} agents" in text
    assert "whisper_horizon" in single.statement() and "whisper_horizon" not in text


@pytest.mark.parametrize("relation", ["replace_agent", "replace_record"])
def test_poorly_says_between_what(network, relation):
    """A class over a factor of ten: its ends."""
    training_plan = plan.make(make_config(relation=relation, epsilon=100.0), network)
    single = training_plan.forecast(1)
    low = forecast.GOOD[single.unit]
    high = forecast.HOPELESS[single.unit]
    result = training_plan.forecast(round((low * high) / single.rate**2))
    assert result.level == "poor" and low < result.ratio < high
    assert f"From {low:g} to {high:g} a model keeps" in result.statement()
    for ratio in (low / 2, high * 2):
        result = training_plan.forecast(max(1, round((ratio / single.rate) ** 2)))
        assert result.level != "poor" and "a model keeps" not in result.statement()


def test_plan_tells_model_that_it_affords(network):
    training_plan = plan.make(make_config(design="whisper_horizon"), network)
    assert f"noise allows for {training_plan.forecast(7).affords():,.0f} parameters" in repr(
        training_plan
    )
    none = plan.make(make_config(design="non_private"), network)
    assert "parameters" not in repr(none)
    assert none.forecast(5).ratio == 0 and none.forecast(5).caption() == "no noise"
    with pytest.raises(ValueError, match="parameters is 0"):
        training_plan.forecast(0)


def test_hopeless_run_warns_before_it_starts_and_others_do_not(network, capsys):
    task = make_problem(6)
    assert statements.parameter_count(jax.eval_shape(task.init, jax.random.key(0))) == 6
    hopeless = plan.make(make_config(epsilon=0.05, rounds=2), network)
    with pytest.warns(statements.HopelessWarning, match="nothing to learn; forecast for 6 param"):
        run(hopeless, task, seeds=[0])
    fair = plan.make(make_config(epsilon=20.0, rounds=2), network)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(fair, task, seeds=[0], progress=True)
    assert "forecast: d = 6: noise 0." in capsys.readouterr().err
    with pytest.warns(statements.HopelessWarning, match="1 of 2 plans"):
        line = statements.forecast_line([hopeless, fair], 6)
    best = f"{fair.forecast(6).caption()} (Whisper, epsilon 20)"
    worst = hopeless.forecast(6).caption().partition(": ")[2]
    assert line == f"forecast: {best}; worst of 2 plans: {worst} (Whisper, epsilon 0.05)"


def test_what_noise_by_schedule_lacks_is_told_in_short(network, tmp_path):
    """A thousand scales stand in no message."""
    scales = tuple(0.99**k for k in range(400))
    config = plan.Config(
        noise=scheduled.ScheduledLaplace(scales), budget=protect.Budget(1.0, accountant="pure"),
        protect=protect.Protect("replace_agent", 1.0, norm="l1"), sampler=samplers.Random(1),
        optimizer=Sgd(0.1, decay=scales), rounds=400,
    )  # fmt: skip
    training_plan = plan.make(config, network)
    assumed = protect.Protect("replace_agent", norm="l1", gradient_gap=0.5)
    faults = [
        ("noise is ScheduledLaplace, of which no forecast", lambda: training_plan.forecast(5)),
        ("noise is ScheduledLaplace, which no one factor says", lambda: training_plan.factor),
        ("plan is laplace.*, .*write noise.scales", lambda: training_plan.save(tmp_path / "x")),
        (
            "gradient_gap is 0.5, of which no forecast",
            lambda: plan.make(
                dataclasses.replace(config, method=DPOP(), protect=assumed), network
            ).forecast(5),
        ),
        (
            "noise is NoneType for a config with noise ScheduledLaplace",
            lambda: dataclasses.replace(training_plan, noise=None),
        ),
        (
            "optimizer is Sgd.*does not join",
            lambda: dataclasses.replace(
                config, method=ZipDL(), noise=links.ZeroSum(),
                budget=protect.Budget(1.0, 1e-5),
                protect=protect.Protect("replace_agent", 1.0, attacker="node", gradients="view"),
            ),
        ),
    ]  # fmt: skip
    for text, request in faults:
        with pytest.raises(ValueError, match=text) as refused:
            request()
        assert len(str(refused.value)) < 600
    assert not list(tmp_path.iterdir())


def test_plan_names_round_from_which_float32_loses_its_noise(network):
    """Of 1e-3 0.5^k, from the first k at which it is below 2^-23; none where all are above."""
    clipped = protect.Protect("replace_agent", 1e-6, norm="l1")

    def line(ratio):
        config = plan.Config(
            noise=scheduled.ScheduledLaplace(ratio), budget=protect.Budget(1.0, accountant="pure"),
            protect=clipped, sampler=samplers.Random(1), optimizer=Sgd(0.1, decay=0.4), rounds=40,
            method=DPOP(),
        )  # fmt: skip
        return plan.make(config, network)

    halved = line(0.5)
    first = next(k for k, scale in enumerate(halved.noise.scales, 1) if scale < 2.0**-23)
    assert 1 < first < 40 and f"; from round {first} on its scale is below 1.2e-7" in repr(halved)
    # One round before, noise of this scale still moves most numbers of size 1; then ever fewer.
    draws = np.random.default_rng(0).laplace(size=4000).astype(np.float32)
    selection = [
        np.mean(np.float32(1) + draws * scale != 1)
        for scale in halved.noise.scales[[first - 2, -1]]
    ]
    assert selection[0] > 0.6 and selection[1] < 0.01
    constant = line((1.0,) * 40)
    assert constant.noise.scales.min() > 2.0**-23 and "below" not in repr(constant)


def test_remedy_that_is_not_enough_alone_says_so():
    """Agents who agree still have the average's noise; shared noise may be a part of the way."""
    matrix = mixing.metropolis_hastings(graphs.ring(50))
    training_plan = plan.make(
        make_config(design="whisper_horizon", epsilon=4.0, rounds=200, clip_norm=1.0), matrix
    )
    expected = training_plan.forecast(5000)
    assert expected.disagreement > expected.ratio > expected.good
    (line,) = [line for line in expected.statement().splitlines() if "more gossip" in line]
    assert f"about {expected.agents_needed():,} agents in place of 50, and more gossip" in line


@pytest.mark.gate(1)
@pytest.mark.parametrize("kind", ["random", "full", "cyclic", "poisson"])
def test_larger_batches_take_no_more_records_than_agents_have(network, kind):
    """Where they do, the factor by which records must grow is said, and it is enough."""
    relation = "zero_out_record"

    def build(times, batch):
        sampler = {
            "random": samplers.Random(batch),
            "full": samplers.Full(),
            "cyclic": samplers.Cyclic(4, 5, 8 * times),
            "poisson": samplers.Poisson(4 * times, capacity=8 * times),
        }[kind]
        config = make_config(design="independent", relation=relation, rounds=20, sampler=sampler)
        return plan.make(config, network, counts=np.full(6, 40 * times))

    outcome = build(1, 4)
    result = outcome.forecast(400_000)
    (line,) = [line for line in result.statement().splitlines() if "- batches of" in line]
    pattern = (
        r"batches of ([\d,]+) in place of \d+; these take about ([\d,.]+) times as many records"
    )
    minimum, factor = re.search(pattern, line).groups()
    times = math.ceil(float(factor.replace(",", "")) * 1.05)
    assert build(times, times * 40).forecast(400_000).ratio <= result.good
    fewer = max(1, times // 2)
    assert build(fewer, fewer * 40).forecast(400_000).ratio > result.good
    assert ("of the smallest agent, reach" in line) == (kind == "random")
    if kind == "random":
        (reached,) = re.findall(r"batches of 40, .* reach ([\d.]+)", line)
        assert build(1, 40).forecast(400_000).ratio == pytest.approx(float(reached), rel=0.05)
    # What its records fill needs no more of them.
    small = outcome.forecast(int(outcome.forecast(1).affords()) * 2)
    assert ("times as many records" in small.statement()) == (kind != "random")


def test_records_in_place_of_agents_have_batches_of_records_that_there_are(network):
    config = make_config(design="independent")
    training_plan = plan.make(config, network, counts=np.full(6, 7))
    result = training_plan.forecast(5000)
    text = result.statement()
    assert f"batches of 7, all records of the smallest agent, reach {result.ratio / 7:.2g})" in text
    unknown = plan.make(config, network).forecast(5000).statement()
    assert "with batches of" in unknown and "as many records" not in unknown


def test_remedy_that_is_none_is_not_listed(network):
    """No model is small enough; an epsilon above 20 is vacuous; numbers have no exponents."""
    training_plan = plan.make(make_config(design="independent", epsilon=0.5), network)
    text = training_plan.forecast(100_000).statement()
    assert training_plan.forecast(1).affords() == 0
    assert "smaller model" not in text and "no model at all" not in text
    assert "at the same delta, which is vacuous" in text and "e+" not in text
    assert "This network" not in text
    rich = plan.make(make_config(design="independent", epsilon=100.0), network).forecast(1)
    assert f"models of up to {rich.affords():,.0f} parameters can learn" in rich.statement()
