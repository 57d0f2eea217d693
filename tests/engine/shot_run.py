"""Runs in processes of their own that are shot at some moment; used by test_kills.

usage: python -m tests.engine.shot_run, with lines FOLDER<tab>KIND<tab>WHEN on the standard input

Each line is a process, forked before JAX has started; its exit status is printed. FOLDER holds its
checkpoints, key and result, and ``sent``: a line for each call of the compiled rounds, with the
digest of all models after it. WHEN is "never", "after SECONDS" or "at EVENT", an event being one of
the files, names and folders that Python opens, makes or moves. FOLDER/said tells how long the run
took and how many events there were.
"""

import hashlib
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import jax
import numpy as np

from dpjax.engine import program
from dpjax.plans import plan
from dpjax.topology import graphs, mixing
from tests.support import make_config, make_problem, run

DESIGNS = {"simulation": "whisper", "release": "whisper", "release_over_rounds": "anti_pgd"}
ROUNDS = 12
EVENTS = ("open", "os.link", "os.mkdir", "os.remove", "os.rename")


def shoot():
    """Die as after `kill -9`."""
    os.kill(os.getpid(), signal.SIGKILL)


class Gun:
    """Shoots after some seconds, or at some event."""

    def __init__(self, when):
        kind, _, number = when.partition(" ")
        self.events = 0
        self.last = int(number) if kind == "at" else -1
        self.armed = True
        sys.addaudithook(self.hear)
        if kind == "after":
            timer = threading.Timer(float(number), shoot)
            timer.daemon = True
            timer.start()

    def hear(self, event, _):
        """Count what happens to files."""
        if self.armed and event in EVENTS:
            self.events += 1
            if self.events == self.last:
                shoot()


class Wire:
    """The compiled call, which also writes down what it sent."""

    def __init__(self, folder):
        self.advance = program.advance
        self.folder = folder
        self.trace = program.advance.trace

    def __call__(self, *args, **kwargs):
        key = self.folder / "noise.key"
        copy = self.folder / "copied.key"
        if key.exists() and not copy.exists():
            shutil.copy2(key, self.folder / "copying")
            os.replace(self.folder / "copying", copy)
        state, metrics = self.advance(*args, **kwargs)
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(state.models):
            digest.update(np.asarray(leaf).tobytes())
        line = f"{int(state.round)} {digest.hexdigest()}\n"
        handle = os.open(self.folder / "sent", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(handle, line.encode())
        os.close(handle)
        return state, metrics


def main(folder, kind, when):
    """Run or resume to the end, unless shot."""
    folder = Path(folder)
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(6, 0.5, 0))
    release = kind != "simulation"
    config = make_config(design=DESIGNS[kind], rounds=ROUNDS, release=release)
    training_plan = plan.make(config, matrix)
    task = make_problem(6)
    program.advance = Wire(folder)
    gun = Gun(when)
    began = time.monotonic()
    result = run(
        training_plan, task, seeds=[0], eval_every=2, checkpoint=folder / "checkpoint",
        checkpoint_seconds=0, key_file=folder / "noise.key" if release else None,
    )  # fmt: skip
    gun.armed = False
    leaves = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(result.params))}
    np.savez(folder / "result.npz", **leaves, **result.metrics)
    (folder / "said").write_text(f"{time.monotonic() - began} {gun.events}")


def serve():
    """Fork a process for each line, and tell how it ended."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                main(*line.rstrip("\n").split("\t"))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(ended), flush=True)


if __name__ == "__main__":
    serve()
