"""Estimates: they spend nothing, hold what the compiler says, and refuse what does not fit."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax as dp
from dpjax import _validate
from dpjax.contrib.trace import trace
from dpjax.engine import estimate as estimate_
from dpjax.engine import keys, program
from dpjax.plans import plan
from tests.support import make_config, run

HELD = 10**9
LIMIT = 10**12


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Blocks of one call: these tests do not read seconds."""
    monkeypatch.setattr(estimate_, "_SECONDS", 0.0)


@pytest.fixture
def machine(monkeypatch):
    """A machine of a given limit, on which the process always holds as much."""

    def of(limit):
        monkeypatch.setattr(_validate, "resident", lambda: (HELD, HELD))
        monkeypatch.setattr(_validate, "memory_limit", lambda: limit)

    return of


def bits(result):
    leaves = jax.tree.leaves((result.params, result.metrics, result.guarantees[0].to_dict()))
    return [leaf.tobytes() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]


def purposes(monkeypatch, call):
    """The purposes of the keys that a call derives from seeds or draws from the system."""
    observed = []
    stacked = keys.seed_keys
    opened = keys.KeyFile.__init__

    def recorded(seeds, purpose, phase=0):
        observed.append(purpose)
        return stacked(seeds, purpose, phase)

    def file(self, *value):
        observed.append("file")
        opened(self, *value)

    with monkeypatch.context() as patch:
        patch.setattr(keys, "seed_keys", recorded)
        patch.setattr(keys.KeyFile, "__init__", file)
        call()
    return set(observed)


@pytest.mark.mutant
def test_estimate_spends_nothing_and_changes_no_bit(network, small, tmp_path, monkeypatch):
    results = [plan.make(make_config(design=name), network) for name in ("whisper", "independent")]
    before = dp.run(results, small, seeds=[0, 3], eval_every=6)
    spent = purposes(monkeypatch, lambda: dp.estimate(results, small, seeds=[0, 3], eval_every=6))
    assert spent == {"initial", "batches"}
    assert bits(dp.run(results, small, seeds=[0, 3], eval_every=6)) == bits(before)
    with monkeypatch.context() as broken:
        # A broken copy, whose rounds have the run's own noise.
        broken.setattr(keys, "throwaway", lambda seeds: keys.seed_keys(range(seeds), "noise"))
        spent = purposes(
            monkeypatch, lambda: dp.estimate(results, small, seeds=[0, 3], eval_every=6)
        )
    assert "noise" in spent
    release = plan.make(make_config(release=True), network)
    spent = purposes(monkeypatch, lambda: dp.estimate(release, small, seeds=[0]))
    assert spent == {"initial", "batches"}


@pytest.mark.parametrize(("plans", "seeds"), [(1, 2), (2, 1)])
def test_release_of_two_runs_is_refused_as_by_run(network, small, tmp_path, plans, seeds):
    result = [plan.make(make_config(release=True, rounds=2), network)] * plans
    message = rf"^a release came with {plans} plans and {seeds} seeds, .* one plan with one seed$"
    with pytest.raises(ValueError, match=message):
        dp.estimate(result, small, seeds=range(seeds))
    with pytest.raises(ValueError, match=message):
        run(result, small, seeds=range(seeds), key_file=tmp_path / "key")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_noise_over_rounds_is_timed_and_last_chunk_compiled(network, small):
    config = make_config(
        design="prefix_sum", participation=(3, 6), relation="zero_out_record", rounds=18
    )
    training_plan = plan.make(config, network)
    expected = dp.estimate(training_plan, small, seeds=[1], eval_every=4, chunk_blocks=3)
    assert expected.rounds == 18 and expected.runs == 1
    assert expected.seconds > expected.setup_seconds > 0 and expected.round_seconds > 0
    assert expected.in_use + expected.added <= expected.memory < expected.limit
    assert "1 run of 18 rounds: about" in expected.statement()
    assert dp.estimate(training_plan, small, seeds=[1], stop_at=5).rounds == 5


@pytest.mark.parametrize(
    ("bursts", "calls"),
    [((1.0, 1.0), 2), ((1.64, 1.0, 1.0, 1.0), 4), ((4.0,), 1), ((0.8, 0.9, 0.8, 0.9, 1.0), 5)],
)
def test_block_is_timed_again_until_its_times_agree(network, small, monkeypatch, bursts, calls):
    """Of 257 rounds and 1.285 seconds, and longer where the machine has other work."""
    lengths = []
    current = [0.0]
    advance = estimate_.program.advance

    def timed(*value):
        lengths.append(int(value[-1].sum()))
        again = lengths.count(257)
        current[0] += 0.005 * lengths[-1] * (bursts[again - 1] if lengths[-1] == 257 else 1.0)
        return advance(*value)

    timed.trace = advance.trace
    monkeypatch.setattr(estimate_, "_SECONDS", 1.0)
    monkeypatch.setattr(estimate_.program, "advance", timed)
    clock = types.SimpleNamespace(perf_counter=lambda: current[0])
    monkeypatch.setattr(estimate_, "time", clock)
    training_plan = plan.make(make_config(design="independent", rounds=400), network)
    expected = dp.estimate(training_plan, small, seeds=[0], eval_every=400)
    assert lengths == [1] * 6 + [2, 5, 17, 65] + [257] * calls
    each = (257 * sum(bursts) / calls - 1) / 256
    each += max(1 - each, 0) / 400
    assert expected.round_seconds == pytest.approx(0.005 * each)


@pytest.mark.slow
def test_what_metrics_hold_at_once_is_counted(network, small):
    """A matrix that is sorted takes its own bytes more, up to four times."""
    training_plan = plan.make(make_config(rounds=2), network)
    size = 1_000

    def metrics(params, evaluation):
        row = jnp.linspace(0.0, 1.0, size) + sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))
        return {"least": jnp.sort(row[:, None] * row)[0, 0]}

    larger = dataclasses.replace(small, metrics=metrics)
    added = [dp.estimate(training_plan, task, seeds=[0]).added for task in (small, larger)]
    assert 4 * size**2 <= added[1] - added[0] <= 16 * size**2


@pytest.mark.parametrize("diagonals", [40, 8])
def test_noise_kept_over_rounds_is_refused_before_it_is_made(
    network, small, machine, monkeypatch, diagonals
):
    """Arrays [n, d] of 96 rounds (40 in blocks of 32, and one more), or 7 for 8 diagonals."""
    lags = np.subtract.outer(np.arange(40), np.arange(40))
    strategy = np.where((lags >= 0) & (lags < diagonals), 1 / (1 + np.abs(lags)), 0.0)
    part = dp.noise.Covariance(np.eye(len(network)), "mine", strategy=strategy)
    config = make_config(noise=part, participation=(1, 40), relation="zero_out_record", rounds=40)
    training_plan = plan.make(config, network)
    entries = 100_000
    large = dataclasses.replace(
        small,
        init=lambda key: jnp.zeros(entries),
        loss=lambda params, x, y: jnp.sum(params),
        metrics=lambda params, evaluation: {},
        batch_loss=None,
        weighted=None,
    )
    noise = 4 * (96 if diagonals == 40 else 7) * len(network) * entries
    machine(HELD + noise)
    # It is traced, and never called.
    monkeypatch.setattr(program, "initial", types.SimpleNamespace(trace=program.initial.trace))
    message = rf"seeds has 1 seed, .* {noise / 2**30:.2f} of them for noise kept .* bands=8,"
    for call in (dp.estimate, dp.run):
        with pytest.raises(ValueError, match=message):
            call(training_plan, large, seeds=[0])


def test_estimate_says_what_is_under_way_where_asked(network, small, capsys):
    training_plan = plan.make(make_config(rounds=2), network)
    dp.estimate(training_plan, small, seeds=[0])
    assert not capsys.readouterr().err
    dp.estimate(training_plan, small, seeds=[0], progress=True)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "estimate: preparing and compiling the rounds"
    assert second.startswith("estimate: compiled after ")
    with pytest.raises(ValueError, match="progress is 'yes'; give True or False"):
        dp.estimate(training_plan, small, seeds=[0], progress="yes")


def test_trace_of_more_than_fits_is_refused(network, small, machine):
    training_plan = plan.make(make_config(rounds=3), network)
    read = lambda passed: jnp.zeros(10_000)  # noqa: E731
    machine(HELD + 4 * 3 * 10_000)
    with pytest.raises(ValueError, match="seeds has 1 seed, .* more in the compiled program"):
        trace(training_plan, small, seeds=[0], read=read)
    machine(LIMIT)
    assert trace(training_plan, small, seeds=[0], read=read).shape == (1, 3, 10_000)


@pytest.mark.gate(1)
@pytest.mark.parametrize("release", [False, True])
def test_run_that_does_not_fit_is_refused_with_its_numbers(
    network, small, tmp_path, machine, release
):
    training_plan = plan.make(make_config(release=release, rounds=4), network)
    options = {"seeds": [0], "eval_every": 2}
    files = {"checkpoint": tmp_path / "at", "key_file": tmp_path / "key"} if release else {}
    machine(LIMIT)
    added = dp.estimate(training_plan, small, **options).added
    machine(HELD + added - 1)
    message = rf"seeds has 1 seed, .*\(0\.93 held and {added / 2**30:.2f} more .*microbatch"
    for call in (lambda: dp.estimate(training_plan, small, **options),
                 lambda: run(training_plan, small, **options, **files)):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    # A refused release has no key yet, so nothing of it is to be accounted for.
    assert not (tmp_path / "key").exists()
    machine(HELD + added)
    assert run(training_plan, small, **options, **files).ended
