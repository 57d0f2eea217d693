"""Runs that are killed at random moments: the same bits, the same noise, nothing left over."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from dpjax.plans import plan
from tests.engine import shot_run
from tests.support import make_config, run

ROOT = Path(__file__).resolve().parents[2]


def sent(folder):
    """Round -> every digest that was sent as its messages."""
    results = {}
    lines = (folder / "sent").read_text().splitlines() if (folder / "sent").exists() else []
    for line in lines:
        round_, digest = line.split()
        results.setdefault(int(round_), set()).add(digest)
    return results


def words(key):
    """The noise key in a file, or None."""
    return json.loads(key.read_text())["key"] if key.exists() else None


def same(folder, other):
    """The same result, and for every round the same messages, once and again."""
    with np.load(folder / "result.npz") as first, np.load(other / "result.npz") as second:
        assert set(first) == set(second)
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])
    assert sent(folder) == sent(other)
    assert all(len(digests) == 1 for digests in sent(folder).values())


class Range:
    """Chains of killed and resumed runs, and those that nobody killed."""

    def __init__(self, folder, seed):
        self.folder = folder / "runs"
        self.numbers = random.Random(seed)
        self.folder.mkdir()
        self.whole = {}
        self.kills = 0
        self.chains = 0
        self.errors = folder / "errors"
        # What was compiled once is read back: most of a short run is spent there.
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        with self.errors.open("w") as errors:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.shot_run"], cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env=os.environ | cache,
            )  # fmt: skip

    def launch(self, folder, kind, when):
        """One process; whether it was shot."""
        self.server.stdin.write(f"{folder}\t{kind}\t{when}\n")
        self.server.stdin.flush()
        status = int(self.server.stdout.readline())
        assert status in (0, -signal.SIGKILL), f"{kind} {when}: {self.errors.read_text()}"
        return status != 0

    def close(self):
        """End the server."""
        self.server.stdin.close()
        self.server.stdout.close()
        assert self.server.wait() == 0

    def reference(self, kind, key=None):
        """A run that nobody killed, with a key of its own or a given one."""
        folder = self.folder / f"whole{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        if key is not None:
            shutil.copy2(key, folder / "noise.key")
        assert not self.launch(folder, kind, "never")
        text = (folder / "said").read_text().split()
        return folder, float(text[0]), int(text[1])

    def chain(self, kind, most):
        """Kill and resume one run until it ends, and compare it with one that nobody killed."""
        if kind not in self.whole:
            self.whole[kind] = self.reference(kind)
        complete, seconds, events = self.whole[kind]
        folder = self.folder / f"chain{self.chains}"
        self.chains += 1
        folder.mkdir()
        key = folder / "noise.key"
        if shared := kind != "simulation" and self.chains % 2 == 0:
            shutil.copy2(complete / "copied.key", key)
        killed = True
        while killed:
            when = "never"
            if self.kills < most:
                when = f"at {self.numbers.randint(1, events)}"
                if self.numbers.random() < 0.5:
                    when = f"after {self.numbers.uniform(0, seconds):.3f}"
            before = words(key)
            killed = self.launch(folder, kind, when)
            self.kills += killed
            if killed and kind != "simulation" and sent(folder):
                ended = max(sent(folder)) == shot_run.ROUNDS
                assert key.exists() or ended, "the key was lost before the run had ended"
            assert before is None or words(key) in (before, None)
        if kind != "simulation":
            assert not [path for path in folder.iterdir() if "noise.key" in path.name]
            if not shared:
                complete, *_ = self.reference(kind, folder / "copied.key")
        same(folder, complete)


class Interrupted(BaseException):
    """A run that is torn off; unlike a kill it passes through the code that cleans up."""


class Hook:
    """Interrupts at the next events of files, in this thread."""

    def __init__(self):
        self.left = None
        self.seen = 0
        sys.addaudithook(self.hear)

    def hear(self, event, _):
        if (
            event not in shot_run.EVENTS
            or threading.current_thread() is not threading.main_thread()
        ):
            return
        self.seen += 1
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                self.left = None
                raise Interrupted


@pytest.mark.slow
def test_release_torn_off_at_any_file_keeps_its_key_and_its_bits(tmp_path, network, small):
    training_plan = plan.make(make_config(release=True, rounds=12), network)
    hook = Hook()
    numbers = random.Random(5)
    key = tmp_path / "noise.key"
    copy = tmp_path / "copy.key"
    options = {"seeds": [0], "eval_every": 3, "checkpoint_seconds": 0}

    def once(folder, path, left=None):
        hook.left = left
        hook.seen = 0
        try:
            return run(training_plan, small, checkpoint=folder, key_file=path, **options)
        finally:
            hook.left = None

    for name in ("imports", "counts"):
        once(tmp_path / name, tmp_path / f"{name}.key")
    events = hook.seen
    torn = 0
    while torn < 12:
        try:
            result = once(tmp_path / "c", key, numbers.randint(1, events // 2))
            break
        except Interrupted:
            torn += 1
            # A run that has ended may have deleted it; any other needs it, and says so.
            if key.exists():
                if not copy.exists():
                    shutil.copy2(key, copy)
                assert key.read_bytes() == copy.read_bytes()
    else:
        result = once(tmp_path / "c", key)
    assert torn >= 2
    assert not [path for path in tmp_path.iterdir() if "noise.key" in path.name]
    complete = once(tmp_path / "whole", copy)
    for first, second in zip(
        jax.tree.leaves((result.params, result.metrics)),
        jax.tree.leaves((complete.params, complete.metrics)),
        strict=True,
    ):
        np.testing.assert_array_equal(first, second)


@pytest.mark.slow
def test_fifty_kills(tmp_path):
    shooting = Range(tmp_path, seed=2)
    while shooting.kills < 50:
        shooting.chain(list(shot_run.DESIGNS)[shooting.chains % 3], most=50)
    shooting.close()
