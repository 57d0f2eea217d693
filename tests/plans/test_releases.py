"""Releases: the cost of finite precision is stated or refused; who may be told what about nodes."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax.accounting import budget, finite, gdp, views
from dpjax.accounting.guarantee import Guarantee
from dpjax.accounting.rounding import up
from dpjax.data import partition
from dpjax.data.partition import Partition
from dpjax.engine import arguments, keys, program
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.mechanism.participation import Participation
from dpjax.models.linear import Linear
from dpjax.plans import plan, protect, statements
from dpjax.topology import mixing
from dpjax.transforms import clipping, noise
from tests.support import composed, make_config, make_problem, run
from tests.transforms import rounding


def test_release_states_epsilon_that_was_asked_for(tmp_path, network, small):
    training_plan = plan.make(make_config(epsilon=3.0, release=True, rounds=4), network)
    assert training_plan.guarantee.added_epsilon == 0
    stated = "of epsilon and {:.3g} of delta are for noise of finite precision"
    planned = stated.format(0.01 * training_plan.guarantee.delta)
    assert f"; 0.003 {planned}, and a run that needs more is" in training_plan.guarantee.statement()
    result = run(training_plan, small, seeds=[0], eval_every=2, key_file=tmp_path / "key")
    (spent,) = result.guarantees
    assert 0 < spent.added_epsilon < 1e-3 and 0 < spent.added_delta <= 0.01 * spent.delta
    true = gdp.epsilon(spent.mu, spent.delta - spent.added_delta) + spent.added_epsilon
    assert 0.998 * 3 < true <= spent.epsilon == training_plan.guarantee.epsilon == 3.0
    assert "(epsilon = 3, delta" in spent.statement() and "(epsilon = 3, " in spent.caption()
    assert stated.format(spent.added_delta) in spent.statement()
    assert "needs more" not in spent.statement()
    row = result.rows()[-1]
    assert row["epsilon"] == spent.epsilon == row["guarantee"]["epsilon"]
    # A callback's stop keeps the cost.
    stopped = run(
        training_plan,
        small,
        seeds=[0],
        eval_every=2,
        key_file=tmp_path / "key",
        callback=lambda _: True,
    )
    assert stopped.guarantees[0].added_epsilon == spent.added_epsilon


def test_release_sends_no_message_that_is_not_finite(tmp_path, network, small, monkeypatch):
    """Whatever let it through: the rounds are spent, and the run begun again ends as it did."""
    training_plan = plan.make(make_config(release=True, rounds=4), network)
    assert "It ends where a message is not finite" in training_plan.guarantee.statement()
    files = {"key_file": tmp_path / "key", "checkpoint": tmp_path / "checkpoint"}
    monkeypatch.setattr(clipping, "_finite", lambda tree: jax.tree.map(lambda x: x * jnp.nan, tree))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"rounds 1 to 2 is not finite, .* no epsilon covers"):
            run(training_plan, small, seeds=[0], eval_every=2, **files)
    assert (tmp_path / "key").exists()
    simulated = plan.make(make_config(rounds=4), network)
    assert np.isnan(run(simulated, small, seeds=[0]).metrics["test_loss"]).all()


@pytest.mark.mutant
def test_partition_made_from_labels_is_refused_in_release_and_stated_else(tmp_path, network):
    """One label that changes moves records of other agents, and public counts."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 5))
    y = np.where(rng.random(240) < 0.5, 1, -1)
    other = np.where(np.arange(240) == 0, -y, y)
    dealt = [partition.dirichlet(labels, 6, 0.5, seed=0) for labels in (y, other)]
    owners = [np.repeat(np.arange(6), item.counts) for item in dealt]
    rows = [np.concatenate([r[:k] for r, k in zip(*value[:2], strict=True)]) for value in dealt]
    first, second = (who[np.argsort(row)] for who, row in zip(owners, rows, strict=True))
    assert np.count_nonzero(first != second) > 100
    assert (dealt[0].counts != dealt[1].counts).any()

    def learn(shards, release):
        config = make_config(
            release=release, rounds=2, design="independent", relation="replace_record"
        )
        training_plan = plan.make(config, network, counts=shards.counts)
        task = supervised(Linear(), "logistic", (x, y), (x, y), shards)
        key = {"key_file": tmp_path / "key"} if release else {}
        return run(training_plan, task, seeds=[0], **key).guarantees[0]

    with pytest.raises(ValueError, match=r"partition is made from private values.*partition\.iid"):
        learn(dealt[0], True)
    assert not (tmp_path / "key").exists()
    # As a phase after a departure deals it.
    kept = dealt[0]._replace(indices=dealt[0].indices[:6], counts=dealt[0].counts[:6])
    with pytest.raises(ValueError, match="partition is made from private values"):
        learn(kept, True)
    stated = learn(dealt[0], False)
    assert "taken as public" in stated.caption() and "taken as public" in stated.statement()
    for public in (
        partition.iid(240, 6, seed=0), partition.by_size(240, [40] * 6, seed=0),
        partition.by_owner(np.arange(240) % 6, range(6)),
    ):  # fmt: skip
        assert "taken as public" not in learn(public, False).statement()
    assert learn(public, True).release
    pair = stated.replace(private_partition=False).followed_by(stated, planned=True)
    assert pair.private_partition and Guarantee.from_dict(pair.to_dict()) == pair
    invalid = public._replace(origin="labels")
    with pytest.raises(ValueError, match="partition.origin is 'labels'"):
        learn(invalid, False)


def test_phase_given_twice_repeats_noise_in_simulation_alone(tmp_path, network, small):
    """A release's key is drawn anew for every run, whatever its phase is called."""
    noise = {}
    for release in (False, True):
        config = make_config(
            release=release, rounds=2, design="independent", epsilon=0.5, clip_norm=1e-6,
            step_size=1.0,
        )  # fmt: skip
        training_plan = plan.make(config, network)
        key = [{"key_file": tmp_path / f"key{k}"} if release else {} for k in range(3)]
        first = run(training_plan, small, seeds=[0], **key[0])
        zero = jax.tree.map(np.zeros_like, first.params)
        drawn = []
        options = {"start": zero, "phase": 1, "planned": True}
        for place in (1, 2):  # Two branches of one record, which nobody can tell apart.
            again = run(
                training_plan, small, seeds=[0], spent=first.guarantees, **options, **key[place]
            )
            drawn.append(jax.tree.leaves(again.params)[1].ravel())
        options |= {"spent": again.guarantees}
        if release:
            run(training_plan, small, seeds=[0], **options, **key[1])
        else:
            with pytest.raises(
                ValueError, match=r"number is 1 and guarantees .* up to 1, .*give 2"
            ):
                run(training_plan, small, seeds=[0], **options)
        noise[release] = np.abs(drawn[0] - drawn[1]) > 1e-3 * np.abs(drawn[0])
    assert not noise[False].any() and noise[True].mean() > 0.9


def test_no_phase_repeats_noise_of_earlier_one_under_total(network, small):
    total = protect.Budget(3.0, 1e-5)
    training_plan = plan.make(make_config(rounds=2, design="independent", epsilon=0.5), network)
    first = run(training_plan, small, seeds=[0])
    zero = jax.tree.map(np.zeros_like, first.params)
    stated = [first.guarantees[0].within(total)]

    def carried(phase, spent):
        return run(training_plan, small, seeds=[0], start=zero, phase=phase, spent=spent).guarantees

    second = carried(5, stated)
    assert second[0].phase == 5 and [item.phase for item in second[0].phases] == [0, 5]
    assert Guarantee.from_dict(second[0].to_dict()) == second[0]
    with pytest.raises(ValueError, match=r"number is 5 and guarantees .* up to 5, .*give 6"):
        carried(5, second)
    assert len(carried(6, second)[0].phases) == 3
    # A record of before phases were numbered.
    older = [value.replace(phase=0) for value in second[0].phases]
    older = older[0].within(total).followed_by(older[1], planned=False)
    with pytest.raises(ValueError, match="number is 1 .* give 2"):
        carried(1, [older])


@pytest.mark.parametrize(
    "design",
    [
        "anti_pgd",
        pytest.param("spacetime", marks=pytest.mark.slow),
        pytest.param("prefix_sum", marks=pytest.mark.slow),
        pytest.param("mafalda", marks=pytest.mark.slow),
    ],
)
def test_what_is_hashed_of_release_is_what_runs(tmp_path, network, small, design):
    """Past noise is float64 with either flag: the run finds the program that was traced."""
    training_plan = plan.make(make_config(release=True, design=design, rounds=36), network)
    before = program.traces()
    result = run(
        training_plan, small, seeds=[0], eval_every=12, chunk_blocks=1, key_file=tmp_path / "key"
    )
    assert program.traces() - before == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.params))


def test_release_of_all_records_is_priced_by_largest_number_of_them(network):
    options = dict(relation="replace_record", design="independent", release=True, rounds=2)
    counts = np.arange(10, 10 + len(network))
    complete = plan.make(make_config(sampler=samplers.Full(), **options), network, counts=counts)
    drawn = make_config(batch_size=int(counts.max()), **options)
    priced = [
        statements.with_precision_cost(case, 100).guarantee
        for case in (complete, plan.make(drawn, network))
    ]
    assert priced[0].added_epsilon == priced[1].added_epsilon > 0


def test_grid_is_told_with_plan(network):
    training_plan = plan.make(make_config(release=True), network)
    grid = training_plan.grid
    precision = np.linalg.inv(training_plan.covariance()).diagonal()
    assert grid.deviation == pytest.approx(1 / np.sqrt(precision.max()))
    assert grid.spacing <= grid.deviation / 8 and grid.share <= 0.01
    assert f"grid of {grid.spacing:.3g}" in repr(training_plan)
    assert plan.make(make_config(), network).grid is None


def test_release_that_needs_more_than_its_reserve_is_refused_with_one_that_is_enough(network):
    """Also where agents' budgets differ: the smallest one leaves the least.

    What an accountant other than the exact one leaves over is no reserve.
    """
    unequal = (0.1, *[8.0] * (len(network) - 1))
    for epsilon, rule in ((0.1, "gdp"), (unequal, "gdp"), (0.1, "rdp"), (0.1, "paper")):
        config = make_config(
            epsilon=epsilon, accountant=rule, release=True, design="independent", rounds=100
        )
        training_plan = plan.make(config, network)
        assert "; 0.0001 of epsilon and 1e-07 of delta" in training_plan.guarantee.statement()
        stated = statements.with_precision_cost(training_plan, 1000).guarantee
        assert stated.epsilon == training_plan.guarantee.epsilon
        assert stated.per_agent_epsilon == training_plan.guarantee.per_agent_epsilon
        with pytest.raises(ValueError, match="reserve is 0.001 of epsilon") as refusal:
            statements.with_precision_cost(training_plan, 10**6)
        enough = float(str(refusal.value).partition("Budget(..., reserve=")[2].partition(")")[0])
        larger = protect.Budget(epsilon, 1e-5, rule, reserve=enough)
        wider = plan.make(dataclasses.replace(config, budget=larger), network)
        assert (
            statements.with_precision_cost(wider, 10**6).guarantee.epsilon
            == training_plan.guarantee.epsilon
        )
    for reserve in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match="reserve is"):
            protect.Budget(1.0, 1e-5, reserve=reserve)


@pytest.mark.parametrize("cost", ["a run's", "all of the reserve"])
@pytest.mark.parametrize(
    "options",
    [
        dict(epsilon=1.0, design="independent"),
        dict(epsilon=8.0, design="whisper"),
        dict(epsilon=2.0, design="prefix_sum"),
        dict(epsilon=1.0, design="independent", accountant="rdp"),
        dict(epsilon=1.0, design="independent", accountant="paper"),
        dict(epsilon=(0.5, *[4.0] * 5), design="independent"),
    ],
)
def test_release_plan_states_no_less_than_its_run_and_little_more(network, options, cost):
    """Whole, in part, in two phases and at stops, of one record and of two."""
    training_plan = plan.make(
        make_config(relation="replace_record", rounds=20, release=True, **options), network
    )
    planned = training_plan.guarantee
    run_ = statements.with_precision_cost(training_plan, 10_000).guarantee
    if cost == "all of the reserve":
        # The largest that pricing lets pass: little of delta, or a hundredth of it.
        epsilons = np.array(planned.per_agent_epsilon or (planned.epsilon,))
        mus = training_plan.noise.loss(training_plan.target).size
        delta = 0.99 * planned.delta
        rule = training_plan.config.budget.rule
        claimed = budget.claimed_epsilon(mus, delta, accountant=rule, allow_unsound=True)
        rest = float(np.min(epsilons - claimed)) * (1 - 1e-9)
        run_ = planned.replace(added_epsilon=rest, added_delta=planned.delta - delta)
    pairs = [(planned, run_)]
    for rounds in (10, 20):
        pairs.append((planned.after(rounds), run_.after(rounds)))
    pairs.append(tuple(case.followed_by(case, planned=True) for case in (planned, run_)))
    pairs.append(tuple(item.followed_by(item.after(5), planned=True) for item in (planned, run_)))
    curves = [value.stopping_at([10, 20]) for value in (planned, run_)]
    for stated, spent in pairs:
        assert spent.for_records(2) <= stated.for_records(2) <= 1.01 * spent.for_records(2)
        assert spent.for_records(1) <= stated.for_records(1) <= stated.epsilon
    pairs += [tuple(curves), tuple(curve.stopped(10) for curve in curves)]
    for stated, spent in pairs:
        for name in ("epsilon", "per_agent_epsilon"):
            upper, lower = (np.array(getattr(one, name) or 0.0) for one in (stated, spent))
            assert (lower <= upper).all() and (upper <= 1.01 * lower).all()
    assert planned.stopped(10).epsilon == run_.stopped(10).epsilon == planned.epsilon
    assert planned.survivors([0]).after(10).epsilon >= run_.survivors([0]).after(10).epsilon


@given(
    design=st.sampled_from(["independent", "pairwise", "whisper", "anti_pgd", "prefix_sum"]),
    epsilon=st.floats(0.05, 5.0),
    delta=st.floats(1e-9, 1e-3),
    accountant=st.sampled_from(["gdp", "rdp"]),
    release=st.booleans(),
    differ=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_no_plan_states_more_than_was_asked_or_wastes_thousandth(
    network, design, epsilon, delta, accountant, release, differ
):
    """Whole and in part, as numbers and as text."""
    request = (epsilon, *[epsilon * 2] * (len(network) - 1)) if differ else epsilon
    config = make_config(
        design=design,
        epsilon=request,
        delta=delta,
        accountant=accountant,
        release=release,
        rounds=8,
    )
    training_plan = plan.make(config, network)
    stated = statements.with_precision_cost(training_plan, 20).guarantee
    assert stated.epsilon == max(np.atleast_1d(request)) >= stated.after(8).epsilon
    assert stated.per_agent_epsilon == (request if differ else None)
    spent = training_plan.noise.loss(training_plan.target).epsilon
    assert 0.99899 <= (spent / request).max() <= 1
    assert float(up(stated.epsilon)) == float(up(max(np.atleast_1d(request))))


def test_release_whose_cost_takes_more_of_delta_is_refused(tmp_path, network, small, monkeypatch):
    training_plan = plan.make(make_config(release=True, design="prefix_sum"), network)
    assert statements.with_precision_cost(training_plan, 1000).guarantee.added_epsilon > 0
    with pytest.raises(ValueError, match="more than 1%. Run fewer rounds or a smaller model"):
        statements.with_precision_cost(training_plan, 10**14)
    # In a run before there is a key, let alone a message.
    monkeypatch.setattr(finite, "LIMIT", 1e-12)
    key = tmp_path / "key"
    with pytest.raises(ValueError, match="noise of finite precision would take"):
        run(training_plan, small, seeds=[0], key_file=key, checkpoint=tmp_path / "folder")
    assert not key.exists() and not (tmp_path / "folder").exists()
    # A simulation has no such cost.
    free = plan.make(make_config(), network)
    assert statements.with_precision_cost(free, 10**14) is free


@pytest.mark.mutant
def test_node_reads_remainders_of_rounded_messages():
    """The broken twin of rounding as post-processing: who sees a part of the messages only."""
    h = 2.0**-4
    step = 0.5
    d = 1000
    matrix = mixing.metropolis_hastings(nx.path_graph(3))  # 2/3 1/3 0; 1/3 1/3 1/3; 0 1/3 2/3
    key = jax.random.key(5, impl="threefry2x32")
    noisy = noise.correlated(np.eye(3, dtype=np.float32), key=key, rounds=2, grid=h)
    algorithm = composed(
        np.float32(matrix), lambda params, _: 0 * params, optax.scale(-step), privatizer=noisy
    )
    state = algorithm.init(jnp.zeros((3, d)))
    sent = []
    step_of = jax.jit(algorithm.step)
    for _ in range(2):
        state, info = step_of(key, state, jnp.zeros((3, 1)))
        sent.append(np.asarray(info.messages, np.float64))
    secret = np.round(sent[0][0] / -(step * h)).astype(int)
    # Node 2 sees node 1's messages and knows its own: 3 m = k of node 0 + known + 3 k of node 1.
    reference = np.round((sent[0][1] + sent[0][2]) / -(step * h))
    read = np.round(3 * sent[1][1] / -(step * h)) - reference
    assert (read.astype(int) % 3 == secret % 3).all(), "1,000 of 1,000"
    # The view's loss is finite and small; that of every message covers what was read.
    view = views.dsgd(matrix).pndp(2)
    when = Participation(2, 2, 1)
    narrow, complete = (view.gdp(when, gradients=which)[0] for which in ("view", "any"))
    assert narrow < 0.8 * complete
    outside = views.dsgd(matrix).ldp().gdp(when)[0]
    assert complete == pytest.approx(outside)


def summed(params, x, y, weights):
    """A sum of one's own, of gradients of logistic regression."""
    weight = params["params"]["weight"]
    bias = params["params"]["bias"]
    slopes = -y * jax.nn.sigmoid(-y * (x @ weight + bias))
    used = slopes * weights(jnp.abs(slopes) * jnp.sqrt(1 + jnp.sum(x**2, axis=1)))
    return {"params": {"weight": x.T @ used, "bias": jnp.sum(used)}}


def test_release_whose_sums_round_by_more_than_hundredth_is_refused(tmp_path, network):
    """300 records in one product of a user's own; one by one they are added in float64."""
    task = dataclasses.replace(make_problem(len(network), records=300), weighted=summed)
    options = dict(relation="replace_record", batch_size=300, rounds=2, design="independent")
    training_plan = plan.make(make_config(release=True, **options), network)
    with pytest.raises(ValueError, match="microbatch is None, and rounding") as refusal:
        run(training_plan, task, seeds=[0], key_file=tmp_path / "key")
    assert not (tmp_path / "key").exists()
    length = int(str(refusal.value).partition("Protect(..., microbatch=")[2].partition(")")[0])
    longer = make_config(release=True, microbatch=length, **options)
    result = run(plan.make(longer, network), task, seeds=[0], key_file=tmp_path / "key")
    assert 0 < result.guarantees[0].sum_rounding <= 1e-4
    simulated = run(plan.make(make_config(**options), network), task, seeds=[0])
    (stated,) = simulated.guarantees
    assert 0.01 < stated.sum_rounding < 0.012
    assert "Rounding moves a sum of records by at most 0.011 of the clip norm" in stated.statement()
    assert type(stated).from_dict(stated.to_dict()) == stated
    # One gradient an agent is clipped after all sums.
    agents = run(plan.make(make_config(rounds=2), network), task, seeds=[0])
    assert agents.guarantees[0].sum_rounding == 0
    assert "Sums of records" not in agents.guarantees[0].statement()
    with pytest.raises(ValueError, match="more than 83,886 records"):
        statements.with_precision_cost(training_plan, 100, 0.02, None)


def on(platform, monkeypatch):
    """Let runs go to devices of that platform."""
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
    monkeypatch.setattr(arguments, "agent_mesh", lambda n, devices: mesh)


@pytest.mark.parametrize(
    "flags",
    ["", "--xla_gpu_deterministic_ops=false", "--other=true",
     "--xla_gpu_deterministic_ops --xla_gpu_deterministic_ops=0"],
)  # fmt: skip
def test_release_on_gpu_asks_for_deterministic_operations(
    flags, tmp_path, network, small, monkeypatch
):
    training_plan = plan.make(make_config(release=True, rounds=2), network)
    monkeypatch.setenv("XLA_FLAGS", flags)
    # Where arrays go counts, not which backend there is besides.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    arguments.check_device([training_plan], None)
    on("gpu", monkeypatch)
    # XLA has read its flags by the time that anybody could set them here.
    with pytest.raises(
        ValueError, match="XLA_FLAGS=--xla_gpu_deterministic_ops=true before Python"
    ):
        run(training_plan, small, seeds=[0], devices=2, key_file=tmp_path / "key")
    assert not (tmp_path / "key").exists()
    arguments.check_device([plan.make(make_config(rounds=2), network)], None)
    for words in ("=true", "=1", "", '="True"'):
        monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_gpu_deterministic_ops{words}")
        arguments.check_device([training_plan], None)


def test_release_runs_on_processors_whose_sums_are_known(network, monkeypatch):
    on("tpu", monkeypatch)
    with pytest.raises(ValueError, match="release is True on a tpu, whose float64"):
        arguments.check_device([plan.make(make_config(release=True, rounds=2), network)], 2)
    arguments.check_device([plan.make(make_config(rounds=2), network)], 2)


@pytest.mark.parametrize(
    "flag", ["cpu_enable_fast_math", "cpu_enable_fast_min_max", "gpu_enable_fast_min_max"]
)
def test_release_under_fast_math_is_refused(flag, tmp_path, network, small, monkeypatch):
    """Without nan, a gradient that is not finite adds nan in place of zero."""
    training_plan = plan.make(make_config(release=True, rounds=2), network)
    file = tmp_path / "flags"
    for words in (f"--xla_{flag}", f" --xla_{flag}=1", f"--xla_{flag}=false --xla_{flag}=True"):
        file.write_text(words)
        for flags in (words, str(file)):
            monkeypatch.setenv("XLA_FLAGS", flags)
            with pytest.raises(ValueError, match=f"release is True with --xla_{flag} in XLA_FLAGS"):
                run(training_plan, small, seeds=[0], key_file=tmp_path / "key")
    assert not (tmp_path / "key").exists()
    for words in (f"--xla_{flag}=false", f"--xla_{flag} --xla_{flag}=0", str(tmp_path / "none")):
        monkeypatch.setenv("XLA_FLAGS", words)
        arguments.check_device([training_plan], None)


def total(w, x, y):
    """A loss whose gradient is its record."""
    return jnp.sum(w * x)


def nothing(w, evaluation):
    """No metrics."""
    return {}


def released(first, folder, loss=total):
    """What the first of two agents leaves after one round of a release with a fixed noise key."""
    x = np.concatenate([rounding.amplitudes(), np.zeros(rounding.PLACES, np.float32)])
    x[0] = first
    rows = np.arange(len(x), dtype=np.int32).reshape(2, -1)
    shards = Partition(rows, np.full(2, rounding.PLACES, np.int32))
    task = Problem(
        lambda key: jnp.zeros(1), loss, nothing,
        x[:, None], np.zeros(len(x), np.float32), shards, None,
    )  # fmt: skip
    config = make_config(
        relation="zero_out_record", design="independent", clip_norm=rounding.CLIP, epsilon=3.0,
        batch_size=rounding.PLACES, step_size=1.0, rounds=1, release=True, microbatch=1,
        participation=(1, 1),
    )  # fmt: skip
    result = run(
        plan.make(config, np.full((2, 2), 0.5)), task, seeds=[0], key_file=folder / str(first)
    )
    return 2 * rounding.PLACES * np.float64(jax.tree.leaves(result.params)[0])[0, 0, 0, 0]


@pytest.mark.optimized
def test_records_that_are_replayed_move_release_by_clip_norm(tmp_path, monkeypatch):
    """The whole round, of a release too, under the noise of one key."""
    monkeypatch.setattr(keys.secrets, "randbits", lambda bits: 7)
    assert 0.99 < abs(released(1, tmp_path) - released(0, tmp_path)) <= rounding.CLIP
    rounding.in_single_precision(monkeypatch)

    def again(w, x, y):  # Another function: a program of its own.
        return total(w, x, y)

    results = [released(first, tmp_path, again) for first in (0, 1)]
    assert abs(results[1] - results[0]) > 1.1 * rounding.CLIP
