"""Killed and resumed runs: the same bits; releases only with their own key."""

import dataclasses
import fcntl
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from dpjax.engine import program
from dpjax.engine.keys import KeyFile
from dpjax.plans import plan
from dpjax.topology import graphs, mixing
from dpjax.transforms import rounds
from tests.support import make_config, make_problem, run

ROOT = Path(__file__).resolve().parents[2]


def launch(out, checkpoint, key_file="-", kill_at=-1):
    command = [sys.executable, "-m", "tests.engine.killed_run"]
    command += [str(out), str(checkpoint), str(key_file), str(kill_at)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def same_file(a, b):
    with np.load(a) as first, np.load(b) as second:
        assert set(first) == set(second)
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.slow
def test_killed_simulation_resumes_to_same_bits(tmp_path):
    complete = launch(tmp_path / "whole.npz", "-")
    assert complete.returncode == 0, complete.stderr
    dead = launch(tmp_path / "resumed.npz", tmp_path / "checkpoint", kill_at=20)
    assert dead.returncode == -signal.SIGKILL and not (tmp_path / "resumed.npz").exists()
    assert any((tmp_path / "checkpoint").iterdir())
    resumed = launch(tmp_path / "resumed.npz", tmp_path / "checkpoint")
    assert resumed.returncode == 0, resumed.stderr
    same_file(tmp_path / "whole.npz", tmp_path / "resumed.npz")


@pytest.mark.slow
def test_killed_release_resumes_by_its_key_file_only(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    key = tmp_path / "noise.key"
    dead = launch(tmp_path / "r.npz", checkpoint, key, kill_at=20)
    assert dead.returncode == -signal.SIGKILL
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    copy = tmp_path / "copy.key"
    shutil.copy2(key, copy)

    key.rename(tmp_path / "hidden.key")
    refused = launch(tmp_path / "r.npz", checkpoint, key)
    assert refused.returncode == 1 and "a release resumes only with its own" in refused.stderr
    assert not key.exists(), "a refused resume must not draw a new key"
    (tmp_path / "hidden.key").rename(key)

    resumed = launch(tmp_path / "r.npz", checkpoint, key)
    assert resumed.returncode == 0, resumed.stderr
    assert not key.exists(), "the key is deleted when the run ends"
    complete = launch(tmp_path / "w.npz", "-", copy)
    assert complete.returncode == 0, complete.stderr
    same_file(tmp_path / "r.npz", tmp_path / "w.npz")
    # A finished release is read back, without any key.
    again = launch(tmp_path / "a.npz", checkpoint, key)
    assert again.returncode == 0 and not key.exists()
    same_file(tmp_path / "r.npz", tmp_path / "a.npz")


def files_with(folder, needle):
    return [p for p in folder.rglob("*") if p.is_file() and needle in p.read_bytes()]


def test_noise_key_is_never_in_checkpoint(tmp_path, network, small):
    training_plan = plan.make(make_config(release=True), network)
    key = tmp_path / "noise.key"
    words = []

    def peek(_):
        import json

        words.extend(json.loads(key.read_text())["key"])
        return True

    run(training_plan, small, seeds=[0], checkpoint=tmp_path / "c", key_file=key, callback=peek)
    raw = np.asarray(words[:2], np.uint32).tobytes()
    assert len(words) == 2 and not key.exists()
    assert any((tmp_path / "c").rglob("*"))
    assert not files_with(tmp_path / "c", raw)
    assert not files_with(tmp_path / "c", str(words[0]).encode())


def test_release_draws_fresh_noise_each_time_and_not_from_seed(tmp_path, network, small):
    training_plan = plan.make(make_config(release=True), network)
    ends = [run(training_plan, small, seeds=[0], key_file=tmp_path / f"{i}.key") for i in range(2)]
    ends.append(run(plan.make(make_config(), network), small, seeds=[0]))
    leaves = [jax.tree.leaves(end.params)[0] for end in ends]
    assert not np.array_equal(leaves[0], leaves[1])
    assert not np.array_equal(leaves[0], leaves[2])
    assert ends[0].guarantees[0].release and not ends[2].guarantees[0].release


def test_release_refusals(tmp_path, network, small):
    training_plan = plan.make(make_config(release=True), network)
    with pytest.raises(ValueError, match="key_file is None for a release"):
        run(training_plan, small, seeds=[0])
    with pytest.raises(ValueError, match="one plan with one seed"):
        run(training_plan, small, seeds=[0, 1], key_file=tmp_path / "k")
    with pytest.raises(ValueError, match="one plan with one seed"):
        run([training_plan, training_plan], small, seeds=[0], key_file=tmp_path / "k")
    with pytest.raises(ValueError, match="lies inside checkpoint"):
        run(training_plan, small, seeds=[0], checkpoint=tmp_path, key_file=tmp_path / "sub" / "k")
    assert not list(tmp_path.iterdir())


def test_same_key_never_serves_another_run(tmp_path, network, small):
    """Same noise on other gradients: the difference of two messages would be noiseless."""
    training_plan = plan.make(make_config(release=True), network)
    key = tmp_path / "noise.key"

    class Stop(Exception):
        pass

    def crash(_):
        raise Stop

    with pytest.raises(Stop):
        run(training_plan, small, seeds=[0], key_file=key, callback=crash)
    for problem, plan_, seed in (
        (make_problem(6, seed=1), training_plan, 0),
        (small, plan.make(make_config(release=True, step_size=0.2), network), 0),
        (small, training_plan, 1),
    ):
        with pytest.raises(ValueError, match="belongs to another run"):
            run(plan_, problem, seeds=[seed], key_file=key)
    run(training_plan, small, seeds=[0], key_file=key)
    assert not key.exists()


def test_checkpoint_of_another_run_is_refused_naming_what_differs(tmp_path, network, small):
    training_plan = plan.make(make_config(), network)
    run(training_plan, small, seeds=[0], checkpoint=tmp_path / "c")
    with pytest.raises(ValueError, match="differs in seeds"):
        run(training_plan, small, seeds=[1], checkpoint=tmp_path / "c")
    longer = plan.make(make_config(rounds=21), network)
    with pytest.raises(ValueError, match=r"differs in Config.rounds .20 there, 21 here."):
        run(longer, small, seeds=[0], checkpoint=tmp_path / "c")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file', which cannot be written .Not a directory"):
        run(training_plan, small, seeds=[0], checkpoint=tmp_path / "file")


def test_stopped_run_stays_stopped(tmp_path, network, small):
    training_plan = plan.make(make_config(), network)
    stopped = run(
        training_plan,
        small,
        seeds=[0],
        eval_every=5,
        checkpoint=tmp_path / "c",
        callback=lambda p: True,
    )
    again = run(training_plan, small, seeds=[0], eval_every=5, checkpoint=tmp_path / "c")
    assert not again.ended and again.rounds.tolist() == stopped.rounds.tolist() == [5]
    assert os.listdir(tmp_path) == ["c"]


class Crash(Exception):
    """A process that dies."""


def crash_at(rounds):
    def callback(progress):
        if progress.round >= rounds:
            raise Crash

    return callback


@pytest.mark.slow
def test_release_does_not_resume_with_another_loss(tmp_path, network, small):
    """Even a constant inside the loss: the same noise on other gradients would cancel."""

    def scaled(factor):
        constant = np.float32(factor)
        return dataclasses.replace(
            small, batch_loss=lambda p, x, y: constant * small.batch_loss(p, x, y)
        )

    training_plan = plan.make(make_config(release=True), network)
    key = tmp_path / "noise.key"
    with pytest.raises(Crash):
        run(training_plan, scaled(1.0), seeds=[0], key_file=key, callback=crash_at(5))
    for other in (scaled(-1.0), scaled(1.0 + 1e-6), small):
        with pytest.raises(ValueError, match="belongs to another run"):
            run(training_plan, other, seeds=[0], key_file=key)
    run(training_plan, scaled(1.0), seeds=[0], key_file=key)


def test_key_lost_before_first_timed_checkpoint_is_noticed(tmp_path, network, small):
    training_plan = plan.make(make_config(release=True), network)
    key = tmp_path / "noise.key"
    folder = tmp_path / "c"
    options = {"seeds": [0], "checkpoint": folder, "key_file": key, "checkpoint_seconds": 1e6}
    with pytest.raises(Crash):
        run(training_plan, small, callback=crash_at(5), **options)
    key.unlink()
    with pytest.raises(ValueError, match="a release resumes only with its own"):
        run(training_plan, small, **options)
    with pytest.raises(ValueError, match="a release resumes only with its own"):
        run(training_plan, small, **(options | {"key_file": tmp_path / "other.key"}))
    assert not key.exists()


def test_run_has_its_key_and_its_checkpoints_to_itself(tmp_path, network, small, monkeypatch):
    """Two runs of one key would send its noise with two payloads, and save over each other."""
    training_plan = plan.make(make_config(release=True), network)
    key = tmp_path / "noise.key"
    other = tmp_path / "other.key"
    options = {"seeds": [0], "eval_every": 10, "checkpoint": tmp_path / "c", "key_file": key}
    refusals = []

    def again(progress):
        for changes in ({"key_file": other}, {"checkpoint": tmp_path / "d"}):
            with pytest.raises(ValueError, match="another process uses, or another object") as no:
                run(training_plan, small, **(options | changes))
            refusals.append(str(no.value).partition(",")[0])
        raise Crash

    with pytest.raises(Crash):
        run(training_plan, small, callback=again, **options)
    assert refusals == [f"checkpoint is '{tmp_path / 'c'}'", f"key_file is '{key}'"]
    assert sorted(os.listdir(tmp_path)) == ["c", "noise.key"]
    # A run that has ended, by an error too, lets go of both.
    run(training_plan, small, **options)
    assert os.listdir(tmp_path) == ["c"]
    # The broken copy, without locks, sends all rounds beside the run that has begun.
    monkeypatch.setattr(fcntl, "flock", lambda handle, mode: None)
    options |= {"checkpoint": tmp_path / "b", "key_file": tmp_path / "b.key"}
    ends = []

    def beside(progress):
        ends.append(run(training_plan, small, **options))
        raise Crash

    with pytest.raises(Crash):
        run(training_plan, small, callback=beside, **options)
    assert ends[0].ended


def test_bad_input_leaves_no_key_behind(tmp_path, network, small):
    training_plan = plan.make(make_config(release=True), network)
    key = tmp_path / "noise.key"
    with pytest.raises(ValueError, match="start has shapes"):
        run(
            training_plan, small, seeds=[0], key_file=key, start={"a": np.zeros(2)}, phase=1,
            spent=[training_plan.guarantee], planned=True,
        )  # fmt: skip
    with pytest.raises(ValueError, match="name a file"):
        run(training_plan, small, seeds=[0], key_file=tmp_path)
    assert not list(tmp_path.iterdir())


def test_ended_release_deletes_no_other_file(tmp_path, network, small):
    """Another run's key, or a text: read back, a finished release leaves what is not its own."""
    training_plan = plan.make(make_config(release=True), network)
    own, theirs, text = (tmp_path / name for name in ("own.key", "theirs.key", "thesis.txt"))
    options = {"seeds": [0], "checkpoint": tmp_path / "c"}
    run(training_plan, small, key_file=own, **options)
    assert not own.exists()
    KeyFile(theirs, "another run").create()
    text.write_text("chapter 1")
    before = {path: path.read_bytes() for path in (theirs, text)}
    for path in before:
        run(training_plan, small, key_file=path, **options)
    assert {path: path.read_bytes() for path in before} == before


def test_release_whose_state_was_lost_is_not_begun_anew(tmp_path, network, small):
    """With another key: what was sent would go out again under fresh noise."""
    training_plan = plan.make(make_config(release=True), network)
    key = tmp_path / "noise.key"
    folder = tmp_path / "c"
    options = {"seeds": [0], "eval_every": 10, "key_file": key, "checkpoint": folder}
    assert run(training_plan, small, **options).ended and not key.exists()
    (folder / "state.npz").unlink()
    with pytest.raises(ValueError, match="a release resumes only with its own"):
        run(training_plan, small, **options)
    assert not key.exists()


def test_release_that_begins_again_elsewhere_sends_same(tmp_path, network, small):
    """Its key draws the noise of the first time, whatever folder it has."""
    training_plan = plan.make(make_config(release=True), network)
    key = tmp_path / "noise.key"
    options = {"seeds": [0], "eval_every": 5}
    with pytest.raises(Crash):
        run(
            training_plan,
            small,
            checkpoint=tmp_path / "c",
            callback=crash_at(5),
            key_file=key,
            **options,
        )
    copy = shutil.copy2(key, tmp_path / "copy.key")
    first = run(training_plan, small, checkpoint=tmp_path / "c", key_file=key, **options)
    again = run(training_plan, small, checkpoint=tmp_path / "d", key_file=copy, **options)
    for leaf, other in zip(
        jax.tree.leaves(first.params), jax.tree.leaves(again.params), strict=True
    ):
        np.testing.assert_array_equal(leaf, other)


def test_what_does_not_compose_is_refused_before_anything_is_sent(tmp_path, network, small):
    training_plan = plan.make(make_config(release=True, rounds=2), network)
    simulated = plan.make(make_config(rounds=2), network).guarantee
    zero = jax.tree.map(
        lambda leaf: np.zeros((1, 1, 6, *leaf.shape)), small.init(jax.random.key(0))
    )
    sent = []
    for spent, text in (
        ([simulated], "release is False"),
        (
            [training_plan.guarantee, training_plan.guarantee],
            "for 1 plans; give one guarantee a plan",
        ),
        ([], r"guarantees is \[\] for 1 plans"),
        (training_plan.guarantee, "guarantees is Guarantee.* for 1 plans"),
        ([1.5], r"guarantees is \[1.5\] for 1 plans; give one guarantee a plan"),
    ):
        with pytest.raises(ValueError, match=text):
            run(
                training_plan, small, seeds=[0], key_file=tmp_path / "noise.key", start=zero,
                phase=1, spent=spent, planned=True, callback=sent.append,
            )  # fmt: skip
    assert not sent and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"checkpoint": ""}, "folder is ''; name a folder, or leave it out"),
        ({"checkpoint": "  "}, "folder is '  '"),
        ({"checkpoint": 3}, "folder is 3"),
        ({"checkpoint": True}, "folder is True"),
        ({"checkpoint": b"c"}, "folder is b'c'"),
        ({"checkpoint": "a\0b"}, "folder is 'a"),
        ({"checkpoint": "x" * 300}, "checkpoint is .*x', which cannot be written"),
        ({"key_file": ""}, "key_file is ''; name a file"),
        ({"key_file": 1.5}, "key_file is 1.5"),
        ({"key_file": "x" * 300}, "key_file is .*x', which cannot be written"),
        ({"checkpoint_seconds": float("nan")}, "seconds is nan; give seconds"),
        ({"checkpoint_seconds": -1}, "seconds is -1"),
        ({"checkpoint_seconds": "20"}, "seconds is '20'"),
        ({"checkpoint_seconds": True}, "seconds is True"),
        ({"progress": 1}, "progress is 1"),
        ({"callback": 3}, "callback is 3"),
        ({"chunk_blocks": 1.0}, "chunk_blocks is 1.0"),
        ({"eval_every": np.float64(5)}, "eval_every is"),
        ({"eval_every": True}, "eval_every is True"),
        ({"phase": "1"}, "number is '1'"),
        ({"phase": 10**5000}, "number is "),
        ({"seeds": "0"}, "seeds is '0'"),
        ({"seeds": 0}, "seeds is 0"),
        ({"seeds": np.array(3)}, "seeds is .*3.*; give whole numbers"),
        ({"phase": 1, "planned": 1.5}, "planned is 1.5; give True or False"),
        ({"seeds": [2**32]}, "seeds is 4294967296; give a whole number from 0"),
        ({"seeds": [10**5000]}, "seeds is"),
        ({"devices": True}, "devices is True"),
        ({"start": "abc", "phase": 1}, "guarantees is None for 1 plans"),
    ],
)
def test_bad_options_come_first(tmp_path, monkeypatch, network, small, options, text):
    monkeypatch.chdir(tmp_path)
    training_plan = plan.make(make_config(release="key_file" in options, rounds=2), network)
    with pytest.raises(ValueError, match=text):
        run(training_plan, small, **({"seeds": [0]} | options))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("plans", [None, 3, [], "plan", [None]])
def test_plans_that_are_none(small, plans):
    with pytest.raises(ValueError, match="plans is"):
        run(plans, small, seeds=[0])


def test_start_that_is_no_model(network, small):
    training_plan = plan.make(make_config(rounds=2), network)
    for start in (3, {"a": "b"}, [object()], np.zeros(3)):
        with pytest.raises(ValueError, match="start (is no pytree of arrays|has shapes)"):
            run(
                training_plan,
                small,
                seeds=[0],
                start=start,
                phase=1,
                spent=[training_plan.guarantee],
                planned=True,
            )


class Cut(Exception):
    """An interrupt between two chunks."""


ROUTES = {
    "blocked": ("mafalda", np.tril(np.full((72, 72), 0.01)) + np.diag(np.linspace(1, 2, 72))),
    "moving": ("anti_pgd", None),
    "recursion": ("mafalda", sum(c * np.eye(72, k=-lag) for lag, c in enumerate((1.0, 0.4, 0.2)))),
}


PAIRS = [
    ("blocked", "replace_agent"),
    pytest.param("moving", "zero_out_record", marks=pytest.mark.slow),
    ("recursion", "replace_agent"),
]


@pytest.mark.gate(1)
@pytest.mark.parametrize(("kind", "relation"), PAIRS)
def test_interrupted_noise_over_rounds_resumes_to_same_bits(tmp_path, network, kind, relation):
    """Later noise depends on earlier normals, which no checkpoint holds: they are drawn again."""
    name, strategy = ROUTES[kind]
    cyclic = {"participation": (6, 12)} if "record" in relation else {}
    config = make_config(design=name, relation=relation, rounds=72, **cyclic)
    training_plan = plan.make(config, network, strategy=strategy)
    assert rounds.route(training_plan.strategy, 72).kind == kind
    task = make_problem(len(network))

    def whole(**options):
        return run(training_plan, task, seeds=[0, 3], eval_every=9, **options)

    def cut(observed):
        if observed.round >= 45:
            raise Cut

    straight = whole()
    folder = tmp_path / "checkpoint"
    with pytest.raises(Cut):
        whole(checkpoint=folder, checkpoint_seconds=0, callback=cut)
    reached = []
    resumed = whole(checkpoint=folder, callback=lambda views: reached.append(views.round))
    assert reached[0] > 36
    for first, second in zip(
        jax.tree.leaves(straight.params), jax.tree.leaves(resumed.params), strict=True
    ):
        np.testing.assert_array_equal(first, second)
    for metric, values in straight.metrics.items():
        np.testing.assert_array_equal(values, resumed.metrics[metric])


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("design", ["mafalda", "spacetime", "prefix_sum"])
def test_seeds_that_share_strategy_resume_to_same_bits_from_any_round(tmp_path, design):
    """Past noise of several seeds is coloured as in the rounds, whose sums depend on the shape."""
    agents = 4
    length = 48
    matrix = mixing.metropolis_hastings(graphs.ring(agents))
    config = make_config(
        design=design, relation="zero_out_record", rounds=length, participation=(6, 8)
    )
    training_plan = plan.make(config, matrix)
    assert rounds.route(training_plan.strategy, length).kind == "blocked"
    task = make_problem(agents, features=3)
    folder = tmp_path / "checkpoint"

    def whole(folder, callback):
        options = {"eval_every": 4, "checkpoint": folder, "checkpoint_seconds": 0}
        return run(training_plan, task, seeds=[0, 1], callback=callback, **options)

    def copy(observed):
        if observed.round > 4:
            shutil.copytree(folder, tmp_path / str(observed.round))

    straight = whole(folder, copy)
    for stored in range(4, length, 8):
        reached = []
        # The copy of a round holds the state of the chunk before it.
        resumed = whole(
            tmp_path / str(stored + 4), lambda views, reached=reached: reached.append(views.round)
        )
        assert reached[0] == stored + 4
        jax.tree.map(np.testing.assert_array_equal, straight.params, resumed.params)
        jax.tree.map(np.testing.assert_array_equal, straight.metrics, resumed.metrics)


@pytest.mark.mutant
@pytest.mark.parametrize("change", [-1, 1])
def test_noise_that_is_drawn_again_for_another_number_of_rounds_is_another_run(
    tmp_path, network, monkeypatch, change
):
    """The broken twin: a replay that is one round off."""
    training_plan = plan.make(make_config(design="anti_pgd", rounds=72), network)
    task = make_problem(len(network))

    def whole(**options):
        return run(training_plan, task, seeds=[0], eval_every=9, **options)

    def cut(observed):
        if observed.round >= 45:
            raise Cut

    straight = whole()
    with pytest.raises(Cut):
        whole(checkpoint=tmp_path / "c", checkpoint_seconds=0, callback=cut)
    secret = program.secret
    monkeypatch.setattr(program, "secret", lambda *value: secret(*value[:-1], value[-1] + change))
    broken = whole(checkpoint=tmp_path / "c")
    assert any(
        not np.array_equal(first, second)
        for first, second in zip(
            jax.tree.leaves(straight.params), jax.tree.leaves(broken.params), strict=True
        )
    )


def test_disk_that_fills_up_loses_nothing(tmp_path, network, small):
    """The save fails with a line that says so; after making room the run ends as if it had not."""
    training_plan = plan.make(make_config(release=True, rounds=20), network)
    key = tmp_path / "noise.key"
    folder = tmp_path / "c"
    options = {"seeds": [0], "eval_every": 5, "checkpoint_seconds": 0}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(progress):
        if progress.round == 10:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))

    try:
        with pytest.raises(
            ValueError, match=f"checkpoint is '{folder}', which cannot be written .*make room"
        ):
            run(training_plan, small, key_file=key, checkpoint=folder, callback=fill, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    copy = shutil.copy2(key, tmp_path / "copy.key")
    reached = []
    resumed = run(
        training_plan, small, key_file=key, checkpoint=folder, **options,
        callback=lambda progress: reached.append(progress.round),
    )  # fmt: skip
    assert reached == [10, 15, 20] and not key.exists()
    complete = run(training_plan, small, key_file=copy, **options)
    for first, second in zip(
        jax.tree.leaves(resumed.params), jax.tree.leaves(complete.params), strict=True
    ):
        np.testing.assert_array_equal(first, second)


def test_damaged_checkpoint_keeps_key_and_what_is_beside_it(tmp_path, network, small):
    training_plan = plan.make(make_config(release=True, rounds=20), network)
    key = tmp_path / "noise.key"
    folder = tmp_path / "c"
    options = {"seeds": [0], "eval_every": 5, "checkpoint_seconds": 0, "key_file": key}
    with pytest.raises(Crash):
        run(training_plan, small, checkpoint=folder, callback=crash_at(15), **options)
    state = folder / "state.npz"
    away = tmp_path / "away"
    shutil.copy2(state, away)
    state.write_bytes(state.read_bytes()[:50])
    before = key.read_bytes()
    with pytest.raises(ValueError, match=f"checkpoint {state} cannot be read .* move it away"):
        run(training_plan, small, checkpoint=folder, **options)
    assert key.read_bytes() == before
    # As it says: from a copy it carries on, with the same noise.
    shutil.copy2(away, state)
    assert run(training_plan, small, checkpoint=folder, **options).ended
