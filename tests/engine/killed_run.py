"""A run in a process of its own, which may kill itself; used by test_resume.

usage: python -m tests.engine.killed_run OUT CHECKPOINT KEY_FILE|- KILL_AT_ROUND
"""

import os
import signal
import sys

import jax
import numpy as np

from dpjax.plans import plan
from dpjax.topology import graphs, mixing
from tests.support import make_config, make_problem, run


def main(out, checkpoint, key_file, kill_at):
    """Run, die at the round asked for, else store what was learned."""
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(6, 0.5, 0))
    release = key_file != "-"
    names = ("whisper",) if release else ("whisper", "independent")
    plans = [plan.make(make_config(design=d, rounds=30, release=release), matrix) for d in names]

    def die(progress):
        if progress.round == int(kill_at):
            os.kill(os.getpid(), signal.SIGKILL)

    result = run(
        plans, make_problem(6), seeds=[0] if release else [0, 1], eval_every=5,
        checkpoint=None if checkpoint == "-" else checkpoint, checkpoint_seconds=0,
        key_file=key_file if release else None, callback=die,
    )  # fmt: skip
    leaves = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(result.params))}
    np.savez(out, **leaves, **result.metrics)


if __name__ == "__main__":
    main(*sys.argv[1:])
