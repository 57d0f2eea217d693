"""Runs: reproducible, resumable, sharded, honest about what was spent."""

import dataclasses
import errno
import gc
import io
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax._programs import Compiled
from dpjax.algorithms.federated import Federated
from dpjax.algorithms.tracking import Tracking
from dpjax.contrib import fusion, trace
from dpjax.data import batches, partition
from dpjax.engine import host, keys, program
from dpjax.engine import run as run_
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.plans import noise, optimizers, plan
from dpjax.plans.protect import Budget, Protect
from dpjax.plans.scheduled import ScheduledGaussian
from dpjax.topology import graphs, mixing
from dpjax.transforms import noise as noise_
from tests.support import make_config, make_problem, run


@pytest.fixture(scope="module")
def plans(network):
    names = ("non_private", "independent", "whisper")
    return [plan.make(make_config(design=name), network) for name in names]


def same(a, b):
    assert set(a.metrics) == set(b.metrics)
    for name in a.metrics:
        np.testing.assert_array_equal(a.metrics[name], b.metrics[name])
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        np.testing.assert_array_equal(x, y)


def test_one_seed_gives_one_result_and_two_compilations_at_most(plans, small):
    before = program.traces()
    first = run(plans, small, seeds=[0, 3], eval_every=6, chunk_blocks=2)
    assert program.traces() - before <= 2
    same(first, run(plans, small, seeds=[0, 3], eval_every=6, chunk_blocks=2))
    assert program.traces() - before <= 2
    assert first.rounds.tolist() == [6, 12, 18, 20]
    assert first.metrics["test_loss"].shape == (4, 2, 3)
    assert first.ended and first.rounds_per_second > 0


class Full(io.StringIO):
    """A stream on a full disk; a pipe that nobody reads fails likewise."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self):
        self.write("")


@pytest.mark.parametrize("stream", ["none", "closed", "full"])
@pytest.mark.parametrize("progress", [False, True])
def test_run_needs_no_standard_error(plans, small, stream, progress, monkeypatch):
    closed = io.StringIO()
    out = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", {"none": None, "closed": closed, "full": Full()}[stream])
    result = run(plans, small, seeds=[0, 3], eval_every=6, chunk_blocks=2, progress=progress)
    assert result.ended
    # What is for one stream does not go to the other.
    assert not out.getvalue()


def lambdas(agents):
    """A problem whose functions are new objects, and a weak reference to each."""
    rows = np.ones((4 * agents, 3), np.float32)
    result = Problem(
        lambda key: jnp.zeros(3), lambda params, x, y: (x @ params - y) ** 2,
        lambda params, evaluation: {"size": jnp.mean(params**2)}, rows, rows[:, 0],
        partition.iid(len(rows), agents, 0), (), batch_loss=lambda params, x, y: jnp.mean(params),
    )  # fmt: skip
    functions = (result.init, result.loss, result.metrics, result.batch_loss)
    return result, [weakref.ref(function) for function in functions]


@pytest.mark.slow
def test_programs_of_earlier_problems_are_dropped(network):
    """The caches hold 16 programs each; all others go, with the functions they were made of."""
    plans_ = [plan.make(make_config(batch_size=1, rounds=2), network)]
    single, dropped = lambdas(len(network))
    run(plans_, single, seeds=[0])
    run(plans_, single, seeds=[0], transport=host.local_transport(plans_[0]))
    trace.trace(plans_[0], single, seeds=[0], read=lambda passed: passed.private)
    packages = (host, program, trace)
    caches = [
        var for package in packages for var in vars(package).values() if isinstance(var, Compiled)
    ]
    assert len(caches) == 9
    for cache in caches:
        for number in range(16):  # As many other programs, none of which is compiled.
            cache._program(number)
    del single
    gc.collect()
    assert [reference() for reference in dropped] == [None] * 4


@pytest.mark.slow
def test_twenty_problems_leave_functions_of_sixteen(network):
    one_plan = plan.make(make_config(batch_size=1, rounds=2), network)
    references = []
    for _ in range(20):
        result, new = lambdas(len(network))
        run(one_plan, result, seeds=[0])
        references += new
    del result
    gc.collect()
    # Of each problem its loss, batch_loss and metrics are in programs, and ``init`` in none.
    assert sum(reference() is not None for reference in references) <= 3 * 16


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (lambda params, evaluation: None, "metrics returns None; return a dict of real scalars"),
        (lambda params, evaluation: {"a": params.mean(1)}, r"metrics returns .*a.*shape=\(6,\)"),
        (lambda params, evaluation: {"a": {"b": 1.0}}, "metrics returns .*a.*b.*real scalars"),
        (lambda params, evaluation: {"a": 1j}, "metrics returns .*a.*complex64.*real scalars"),
        (lambda params, evaluation: {1: 1.0}, "metrics returns {1: .*; return a dict"),
    ],
)
def test_metrics_that_are_no_scalars_are_refused_before_anything(
    plans, network, tmp_path, metrics, message
):
    result, _ = lambdas(len(network))
    result = dataclasses.replace(result, metrics=metrics)
    with pytest.raises(ValueError, match=message):
        run(plans, result, seeds=[0], checkpoint=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_models_beyond_memory_are_refused_by_their_bytes(plans, network):
    """Before anything of their size is made: 3 plans of 6 agents, 2 seeds, each twice."""
    result, _ = lambdas(len(network))

    def init(key):
        return jnp.zeros(10**9)

    huge = dataclasses.replace(result, init=init, loss=lambda params, x, y: params.sum())
    entries = r"\[2 seeds, 3 plans, 6 agents, 1,000,000,000 entries\]"
    with pytest.raises(
        ValueError, match=rf"problem is .*{entries}.* takes 268\.2 GiB; this machine"
    ):
        run(plans, huge, seeds=[0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dsgd", "record", "tracking", "federated"])
def test_runs_under_strict_rank_promotion(method, network, small):
    """A user who asks JAX to refuse implicit ranks finds none of ours, in design and rounds."""
    problem_ = small
    matrix = network
    with jax.numpy_rank_promotion("raise"):
        if method == "tracking":
            problem_ = fusion.problem(fusion.make(6, seed=1, high=3.0))
            config = plan.Config(
                method=Tracking(5.0), noise=ScheduledGaussian(0.9), rounds=4,
                budget=Budget(1.0, delta=1e-5),
                protect=Protect("replace_agent", clip_norm=0.5), sampler=samplers.Random(1),
                optimizer=optimizers.Sgd(0.01, decay=0.8),
            )  # fmt: skip
        elif method == "federated":
            matrix = mixing.metropolis_hastings(graphs.complete(len(network)))
            config = make_config(design="independent", method=Federated(), rounds=4)
        else:
            relation = "replace_record" if method == "record" else "replace_agent"
            config = make_config(design="whisper_horizon", relation=relation, rounds=4)
        training_plan = plan.make(config, matrix, counts=problem_.partition.counts)
        assert run(training_plan, problem_, seeds=[0, 1]).ended


@pytest.mark.slow
def test_blocks_told_as_data_are_those_of_program(plans, small, monkeypatch):
    options = {"seeds": [0, 3], "eval_every": 6, "chunk_blocks": 2}
    result = run(plans, small, **options)
    monkeypatch.setattr(run_, "_as_argument", lambda blocks: blocks)
    part = run(plans, small, **options)
    assert result.rounds.tolist() == part.rounds.tolist() == [6, 12, 18, 20]
    for name in result.metrics:
        np.testing.assert_allclose(result.metrics[name], part.metrics[name], rtol=1e-6, atol=1e-7)
    for x, y in zip(jax.tree.leaves(result.params), jax.tree.leaves(part.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


def test_runs_do_not_depend_on_their_neighbours(plans, small):
    together = run(plans, small, seeds=[0, 3], eval_every=10, chunk_blocks=2)
    single = run(plans[2], small, seeds=[3], eval_every=10)
    np.testing.assert_allclose(
        together.metrics["test_loss"][:, 1, 2], single.metrics["test_loss"][:, 0, 0], rtol=1e-5
    )


def test_run_is_formula(network, small):
    """A plain numpy loop with the same batches and the same normals."""
    training_plan = plan.make(make_config(rounds=4), network)
    result = run(training_plan, small, seeds=[5], eval_every=4)
    config = training_plan.config
    n = training_plan.agents
    clip_norm = config.protect.clip_norm
    step = config.optimizer.step_size
    weight = np.zeros((n, 5))
    bias = np.zeros((n, 1))
    noise_key = keys.derive(5, "noise")
    batch_key = keys.derive(5, "batches")
    chain = noise_.correlated(training_plan.factor, key=noise_key, rounds=config.rounds)
    noisy = jax.jit(chain.update)
    zero = {"params": {"bias": np.zeros(n, np.float32), "weight": np.zeros((n, 5), np.float32)}}
    noise_state = chain.init(zero)
    counts = np.asarray(small.partition.counts)
    for t in range(config.rounds):
        positions = batches.draw(
            jax.random.fold_in(batch_key, t), counts, config.sampler.batch_size
        )
        rows = np.take_along_axis(np.asarray(small.partition.indices), np.asarray(positions), 1)
        drawn, noise_state = noisy(zero, noise_state)
        drawn = drawn["params"]
        gw = np.zeros_like(weight)
        gb = np.zeros_like(bias)
        for i in range(n):
            x = small.x[rows[i]]
            y = small.y[rows[i]]
            slope = -y / (1 + np.exp(y * (x @ weight[i] + bias[i])))
            gw[i] = (slope[:, None] * x).mean(0)
            gb[i] = slope.mean()
            size = np.sqrt((gw[i] ** 2).sum() + gb[i] ** 2)
            gw[i] *= min(1, clip_norm / size)
            gb[i] *= min(1, clip_norm / size)
        weight = training_plan.mixing @ (weight - step * (gw + np.asarray(drawn["weight"])))
        bias = training_plan.mixing @ (bias - step * (gb + np.asarray(drawn["bias"])[:, None]))
    final = result.params["params"]
    np.testing.assert_allclose(final["weight"][0, 0], weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(final["bias"][0, 0], bias[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("relation", ["replace_agent", "replace_record"])
def test_no_noise_and_wide_clip_is_plain_dsgd(network, small, relation):
    config = make_config(
        design="non_private", clip_norm=1e6, relation=relation, rounds=200, step_size=0.5
    )
    result = run(plan.make(config, network), small, seeds=[0], eval_every=100)
    loss = result.metrics["test_loss"][:, 0, 0]
    assert loss[-1] < loss[0] < np.log(2) and loss[-1] < 0.3


def test_units_agree_without_clipping(network, small):
    """The mean of records' gradients is the gradient of the mean."""
    results = []
    for relation in ("replace_agent", "replace_record"):
        config = make_config(design="non_private", clip_norm=1e6, relation=relation)
        results.append(run(plan.make(config, network), small, seeds=[0]).metrics["test_loss"])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5)


def test_decaying_step(network, small):
    """With eta / sqrt(t), the second round's step is smaller by sqrt 2."""
    base = make_config(
        design="non_private", clip_norm=1e-3, rounds=2, step_decay="sqrt", batch_size=24,
        clipping="automatic",
    )  # fmt: skip
    complete = np.full_like(network, 1 / len(network))
    after = []
    for rounds in (1, 2):
        config = dataclasses.replace(base, rounds=rounds)
        result = run(plan.make(config, complete), small, seeds=[0], eval_every=1)
        after.append(result.params["params"]["weight"][0, 0, 0])
    ratio = np.linalg.norm(after[1] - after[0]) / np.linalg.norm(after[0])
    np.testing.assert_allclose(ratio, 1 / np.sqrt(2), rtol=1e-3)


def test_callback_reads_metrics_and_stops_early(plans, small):
    observed = []

    def stop_at_ten(progress):
        observed.append(progress)
        return progress.round >= 10

    result = run(plans, small, seeds=[0], eval_every=5, callback=stop_at_ten)
    assert [p.round for p in observed] == [5, 10] and not result.ended
    assert result.rounds.tolist() == [5, 10]
    assert observed[0].metrics["test_loss"].shape == (1, 3)
    # The stop may depend on all that was released: 10 rounds' own loss would be too little.
    for progress in observed:
        assert [g.epsilon for g in progress.guarantees] == [p.guarantee.epsilon for p in plans]
    assert [g.mu for g in result.guarantees] == [p.guarantee.mu for p in plans]
    complete = run(plans, small, seeds=[0], eval_every=5)
    np.testing.assert_array_equal(complete.metrics["test_loss"][:2], result.metrics["test_loss"])


def test_rows_carry_guarantee(plans, small):
    result = run(plans, small, seeds=[0, 1], eval_every=10, chunk_blocks=2)
    rows = result.rows(experiment="e")
    assert len(rows) == 3 * 2 * 2
    whisper = [row for row in rows if row["design"] == "whisper"]
    assert {row["epsilon"] for row in whisper} == {8.0}
    assert whisper[0]["guarantee"]["relation"] == "replace_agent"
    assert {row["unit"] for row in rows} == {"agent"}


def test_rows_keep_columns_they_are_given_or_refuse_them(plans, small):
    result = run(plans[2], small, seeds=[0], eval_every=10)
    rows = result.rows(design="mine", sweep=3)
    assert {(row["design"], row["sweep"]) for row in rows} == {("mine", 3)}
    for name in ("epsilon", "guarantee", "relation", "seed", "round", "test_loss"):
        with pytest.raises(ValueError, match=f"{name} is 0, a column that the result states"):
            result.rows(**{name: 0})
    with pytest.raises(ValueError, match="design is 'mine' for plans of several designs"):
        run(plans, small, seeds=[0], eval_every=10).rows(design="mine")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"seeds": []}, "seeds is"),
        ({"seeds": [1, 1]}, "each once"),
        ({"seeds": [-1]}, "seeds is -1"),
        ({"seeds": [0], "eval_every": 0}, "eval_every is 0"),
        ({"seeds": [0], "key_file": "k"}, "no plan has release=True"),
    ],
)
def test_bad_arguments(plans, small, kwargs, message):
    with pytest.raises(ValueError, match=message):
        run(plans, small, **kwargs)


def test_agent_with_name_is_told_by_it(network, small):
    names = [f"site {k}" for k in range(6)]
    owners = np.repeat(names, [20, 3, 30, 30, 30, 31])
    shards = partition.by_owner(owners, names)
    task = dataclasses.replace(small, partition=shards)
    assert task.partition.names == tuple(names)
    with pytest.raises(ValueError, match=r"but agent site 1 \(index 1\) has 3 records; lower it"):
        run(plan.make(make_config(), network), task, seeds=[0])
    dealt = make_config(
        relation="replace_record", clip_norm=1.0, participation=(2, 10),
        batch_size=3,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"but agent site 5 \(index 5\) has 31 .*batch_size=4"):
        run(plan.make(dealt, network), task, seeds=[0])
    with pytest.raises(ValueError, match="names .* for 6 agents; give a tuple"):
        dataclasses.replace(task, partition=shards._replace(names=("a", "b")))


def test_plans_that_do_not_fit(plans, small, network):
    longer = plan.make(make_config(rounds=30), network)
    with pytest.raises(ValueError, match="plans differ in rounds"):
        run([plans[0], longer], small, seeds=[0])
    with pytest.raises(ValueError, match="the plan is for 6 agents, the problem has 4"):
        run(plans[0], make_problem(4), seeds=[0])
    greedy = plan.make(make_config(batch_size=25), network)
    with pytest.raises(ValueError, match="batch_size"):
        run(greedy, small, seeds=[0])


def test_counts_are_those_of_run_whatever_sampler(network, small):
    shards = small.partition
    training_plan = plan.make(make_config(), network, counts=shards.counts)
    assert training_plan.fingerprint() == plan.make(make_config(), network).fingerprint()
    run(training_plan, small, seeds=[0], stop_at=1)
    fewer = dataclasses.replace(small, partition=shards._replace(counts=shards.counts - 1))
    with pytest.raises(ValueError, match=r"the plan is for \[24.*the problem has \[23"):
        run(training_plan, fewer, seeds=[0])


def test_interrupt_says_what_is_kept(tmp_path, plans, small, capsys):
    def interrupt(progress):
        if progress.round >= 10:
            raise KeyboardInterrupt

    options = {"seeds": [0], "eval_every": 5}
    kept = options | {"checkpoint": tmp_path / "kept", "checkpoint_seconds": 0}
    late = options | {"checkpoint": tmp_path / "late", "checkpoint_seconds": 1e6}
    for arguments, note in (
        (options, "no checkpoint holds 0 rounds"),
        (late, "late holds 0 rounds"),
        (kept, "kept holds 5 rounds"),
    ):
        with pytest.raises(KeyboardInterrupt) as error:
            run(plans, small, callback=interrupt, **arguments)
        assert "interrupted at round 10" in (text := "".join(error.value.__notes__))
        assert note in text
    assert "resumed" not in capsys.readouterr().err
    stopped = run(plans, small, callback=lambda progress: True, progress=True, **kept)
    assert "resumed at round 5\n" in capsys.readouterr().err
    assert stopped.rounds[-1] == 10 and jax.tree.leaves(stopped.params)
    assert not stopped.ended


def test_phases_carry_on_with_fresh_noise_and_batches(network, small):
    """A second phase starts from the first one's models and repeats none of its noise."""
    frozen = make_config(step_size=1e-30)
    change = dict(rounds=2, step_size=1.0, clip_norm=1e-6, design="independent")
    moved = make_config(**change)
    first = run(plan.make(moved, network), small, seeds=[0])
    still = run(
        plan.make(frozen, network), small, seeds=[0], start=first.params, phase=1,
        spent=first.guarantees, planned=True,
    )  # fmt: skip
    total = still.guarantees[0]
    mus = [result.plans[0].guarantee.mu for result in (first, still)]
    assert total.rounds == 22 and total.mu == pytest.approx(np.hypot(*mus))
    assert total.epsilon > still.plans[0].guarantee.epsilon
    mean = lambda tree: [np.mean(leaf, axis=2) for leaf in jax.tree.leaves(tree)]  # noqa: E731
    for a, b in zip(mean(first.params), mean(still.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)
    zero = jax.tree.map(np.zeros_like, first.params)
    spent = first.guarantees
    training_plan = plan.make(make_config(**change, epsilon=0.5), network)
    drawn = [
        jax.tree.leaves(
            run(
                training_plan, small, seeds=[0], start=zero, phase=p, spent=spent, planned=True
            ).params
        )[1].ravel()
        for p in (1, 2)
    ]
    origin = jax.tree.leaves(run(training_plan, small, seeds=[0]).params)[1].ravel()
    correlation = np.corrcoef([origin, *drawn])
    assert np.abs(correlation[np.triu_indices(3, 1)]).max() < 0.9
    for kwargs in ({"start": zero}, {"phase": 1}, {"start": zero, "phase": 1}):
        with pytest.raises(ValueError, match="guarantees is None for 1 plans"):
            run(training_plan, small, seeds=[0], **kwargs)
    with pytest.raises(ValueError, match="start has shapes"):
        run(training_plan, small, seeds=[0, 1], start=zero, phase=1, spent=spent, planned=True)
    with pytest.raises(ValueError, match="planned is False in a later phase"):
        run(training_plan, small, seeds=[0], start=zero, phase=1, spent=spent)
    with pytest.raises(ValueError, match="continuation is 1; give a Continuation"):
        run(training_plan, small, seeds=[0], continuation=1)


def test_loop_over_records_is_vmap(network, small, monkeypatch):
    """Per-record runs loop over seeds and plans on a CPU; the numbers are the vmap's."""
    config = make_config(relation="replace_record")
    results = [plan.make(config.using(part), network) for part in noise.PARTS[:3]]
    looped = run(results, small, seeds=[0, 1])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    mapped = run(results, small, seeds=[0, 1])
    for name, value in looped.metrics.items():
        np.testing.assert_allclose(mapped.metrics[name], value, rtol=1e-5, atol=1e-6)


def test_narrow_parameters_are_refused_for_record_unit(network, small):
    """Their sum of clipped gradients would be rounded before the noise is added."""
    narrow = dataclasses.replace(
        small, init=lambda key: jax.tree.map(lambda p: p.astype("bfloat16"), small.init(key))
    )
    training_plan = plan.make(make_config(relation="zero_out_record"), network)
    with pytest.raises(ValueError, match="are bfloat16"):
        run(training_plan, narrow, seeds=[0])


@pytest.mark.slow
def test_seeds_with_data_of_their_own_are_those_alone():
    """Two seeds, each with another data set, side by side and one by one."""
    matrix = mixing.metropolis_hastings(graphs.ring(6))
    tasks = [make_problem(6, seed=seed) for seed in range(2)]
    training_plan = plan.make(make_config(relation="replace_record", clip_norm=1.0), matrix)
    pair = run(training_plan, tasks, seeds=(4, 2), eval_every=10)
    single, other = (run(training_plan, task, seeds=[2], eval_every=10) for task in tasks[::-1])
    for name, values in single.metrics.items():
        np.testing.assert_allclose(pair.metrics[name][:, [1]], values, rtol=1e-5)
    assert np.abs(other.metrics["test_loss"][:, 0] - pair.metrics["test_loss"][:, 1]).max() > 1e-3


def test_data_of_their_own_must_be_alike():
    matrix = mixing.metropolis_hastings(graphs.ring(6))
    training_plan = plan.make(make_config(), matrix)
    single = make_problem(6)
    extra = make_problem(6, records=30)
    for tasks, text in (
        ([single, single], "problem is 2 problems for 3 seeds"),
        ([], "problem is 0 problems"),
        ([single, extra, single], "differs in the shapes of its arrays"),
        ([single, "x", single], "problem is str"),
        ("x", "problem is str"),
    ):
        with pytest.raises(ValueError, match=text):
            run(training_plan, tasks, seeds=(0, 1, 2))


def test_rounds_fixed_beforehand_state_what_they_spend(plans, small):
    complete = run(plans, small, seeds=[0], eval_every=5)
    short = run(plans, small, seeds=[0], eval_every=5, stop_at=12)
    assert short.ended and short.rounds.tolist() == [5, 10, 12]
    np.testing.assert_array_equal(short.metrics["test_loss"][:2], complete.metrics["test_loss"][:2])
    for result, stated in zip(plans, short.guarantees, strict=True):
        assert stated == result.guarantee.after(12)
    assert short.guarantees[2].epsilon < plans[2].guarantee.epsilon
    # Rows say what was spent, as the guarantee beside them does.
    for row in short.rows():
        assert row["epsilon"] == float(row["guarantee"]["epsilon"])
    assert short.rows()[-1]["epsilon"] == short.guarantees[2].epsilon
    assert short.guarantees[2].statement() in str(short)
    # A callback within them: the fixed number's guarantee, not less.
    stopped = run(
        plans,
        small,
        seeds=[0],
        eval_every=5,
        stop_at=12,
        callback=lambda observed: observed.round >= 5,
    )
    assert not stopped.ended and stopped.rounds.tolist() == [5]
    assert stopped.guarantees[2].mu == short.guarantees[2].mu
    first, _, text = str(stopped).partition("\n")
    assert "5 rounds, metrics" in first and first.endswith(", which no guarantee covers)")
    assert "over 12 planned rounds (of which 5 were run)" in text
    for invalid in (0, 21):
        with pytest.raises(ValueError, match="stop_at is"):
            run(plans, small, seeds=[0], stop_at=invalid)


def test_number_of_rounds_cannot_be_changed_on_way(tmp_path, network, small):
    training_plan = plan.make(make_config(), network)
    options = {"seeds": [0], "eval_every": 5, "checkpoint": tmp_path / "c"}
    run(training_plan, small, stop_at=10, **options)
    for change in ({"stop_at": 15}, {}):
        with pytest.raises(ValueError, match="differs in stop_at .10 there, (15|20) here.;"):
            run(training_plan, small, **options, **change)


def test_what_checkpoint_differs_in_is_named(tmp_path, network, small):
    """Not the compiled program, which follows from it, nor a digest of plans."""
    training_plan = plan.make(make_config(), network)
    options = {"seeds": [0], "eval_every": 5, "checkpoint": tmp_path / "c"}
    run(training_plan, small, stop_at=10, **options)
    changed = {
        "eval_every .5 there, 2 here.;": {"eval_every": 2},
        "chunk_blocks .1 there, 2 here.;": {"chunk_blocks": 2},
        "seeds ..0,. there, .1,. here.;": {"seeds": [1]},
    }
    for match, change in changed.items():
        with pytest.raises(ValueError, match=f"another run, which differs in {match}"):
            run(training_plan, small, stop_at=10, **options | change)
    for part, name, present, here in (
        ("protect", "clip_norm", "0.5", "2.0"),
        ("optimizer", "step_size", "0.1", "0.7"),
    ):
        other = plan.make(make_config(**{name: float(here)}), network)
        text = f"another run, which differs in Config.{part}.{name} .{present} there, {here} here.;"
        with pytest.raises(ValueError, match=text):
            run(other, small, stop_at=10, **options)
    # What no argument explains is still said.
    sparse = plan.make(make_config(), mixing.metropolis_hastings(graphs.ring(len(network))))
    with pytest.raises(ValueError, match="which differs in plans, arrays;"):
        run(sparse, small, stop_at=10, **options)
    loss = dataclasses.replace(small, batch_loss=None)
    with pytest.raises(ValueError, match="differs in the program: model, loss or metrics, or the"):
        run(training_plan, loss, stop_at=10, **options)


@pytest.mark.slow
def test_curve_chosen_before_run_is_stated_where_it_stopped(network, small):
    """At chunks' ends; noise over rounds by the energy of what was sent so far."""
    results = [plan.make(make_config(design=d), network) for d in ("independent", "whisper")]
    complete = [item.guarantee.stopping_at((4, 8, 12, 16, 20)) for item in results]

    def at(rounds):
        options = {"eval_every": 2, "chunk_blocks": 2, "stopping": "curve"}
        return run(
            results, small, seeds=[0], callback=lambda observed: observed.round >= rounds, **options
        )

    for rounds in (4, 20):
        result = at(rounds)
        stated = [g.replace(private_stop=False) for g in result.guarantees]
        assert stated == [value.stopped(rounds) for value in complete]
        # A figure over epsilon must not place the run below what it states.
        for row in result.rows():
            assert row["epsilon"] >= row["guarantee"]["epsilon"]
    assert complete[0].stopped(4).epsilon < results[0].guarantee.epsilon < complete[0].epsilon
    (correlated,) = [plan.make(make_config(design="prefix_sum"), network)]
    stated = run(
        correlated, small, seeds=[0], eval_every=5, stopping="curve",
        callback=lambda views: views.round >= 10,
    ).guarantees[0]  # fmt: skip
    strategy = correlated.applied_strategy
    energy = np.abs(strategy[:10].T @ strategy[:10]).sum() / np.abs(strategy.T @ strategy).sum()
    assert stated.mu == pytest.approx(correlated.guarantee.mu * np.sqrt(energy), rel=1e-6)
    with pytest.raises(ValueError, match="no callback"):
        run(results, small, seeds=[0], stopping="curve")
    with pytest.raises(ValueError, match="stopping is 'never'"):
        run(results, small, seeds=[0], stopping="never")


def test_private_metrics_are_said_to_leave_stopping_round_open(plans, small):
    def flags(problem, **options):
        result = run(plans, problem, seeds=[0], eval_every=10, **options)
        return {guarantee.private_stop for guarantee in result.guarantees}

    public = dataclasses.replace(small, evaluation_data="public")
    assert small.evaluation_data == "private"
    assert flags(small, callback=lambda observed: True) == {True, False} - (
        {False} if all(p.guarantee.relation for p in plans) else set()
    )
    # That it ran on to its end was the callback's decision as well; one that watches has none.
    assert True in flags(small, callback=lambda views: False)
    assert flags(small, callback=lambda seen: None) == flags(small) == {False}
    assert flags(public, callback=lambda seen: True) == {False}
    with pytest.raises(ValueError, match="evaluation_data is 'secret'"):
        dataclasses.replace(small, evaluation_data="secret")


def test_stopped_run_that_is_read_again_still_says_so(tmp_path, plans, small):
    options = {"seeds": [0], "eval_every": 5, "checkpoint": tmp_path / "c"}
    first = run(plans, small, callback=lambda observed: observed.round >= 10, **options)
    again = run(plans, small, **options)
    assert again.guarantees == first.guarantees and again.guarantees[-1].private_stop


def test_bar_has_metrics_and_is_drawn_no_more_often_for_them(network, small, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # Older releases of tqdm would cut the bar to it.
    training_plan = plan.make(make_config(rounds=40), network)
    result = run(training_plan, small, seeds=[0, 1], eval_every=1, chunk_blocks=1, progress=True)
    output = capsys.readouterr().err
    low = result.metrics["test_loss"][-1].min()
    high = result.metrics["test_loss"][-1].max()
    assert f"test_loss {low:.4g} to {high:.4g}" in output
    # Into a file it is drawn at the start and the end, and every 30 seconds.
    assert output.count("rounds/s") <= 3
