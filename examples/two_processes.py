"""One run over two processes, against the same in one: python examples/two_processes.py [FOLDER]

Each process loads the records of its own agents. Killed, one ends both within a minute; the same
command goes on from the checkpoint in FOLDER. On a cluster, Slurm starts the processes:
srun --ntasks=2 --kill-on-bad-exit=1 python examples/two_processes.py FOLDER join
"""

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

PROCESSES, DEVICES = 2, 4  # of each process
AGENTS, RECORDS = 100, 800


def load(rows):
    """The records of these numbers and no others: here drawn, elsewhere read from a file."""
    x = np.stack([np.random.default_rng(row).normal(size=5) for row in rows]).astype(np.float32)
    return x, np.where(x.sum(axis=1) > 0, 1, -1)


def train(folder=None):
    """A hundred agents on a ring, 12 or 13 on each of eight devices, under independent noise."""
    import jax

    import dpjax as dp
    from dpjax.models.linear import Linear

    config = dp.Config(
        noise=dp.noise.Independent(), budget=dp.Budget(10.0, delta=1e-5), rounds=50,
        protect=dp.Protect("replace_agent", clip_norm=1.0),
        sampler=dp.samplers.Random(4), optimizer=dp.optimizers.Sgd(0.1),
    )  # fmt: skip
    plan = dp.make_plan(config, dp.mixing.metropolis_hastings(dp.graphs.ring(AGENTS)))
    shards = dp.partition.iid(RECORDS, AGENTS, seed=0)
    test = load(range(RECORDS, RECORDS + 100))
    task = dp.supervised(Linear(), "logistic", load, test, shards)
    devices = jax.device_count() if jax.process_count() > 1 else None
    return dp.run(plan, task, seeds=[0], devices=devices, checkpoint=folder)


def join(folder, *where):
    """What each process does: join the others, make the same call, and the first one saves."""
    import jax

    # On a cluster (Slurm, Open MPI, Kubernetes) without arguments: it finds the others by itself.
    jax.distributed.initialize(*where, heartbeat_timeout_seconds=30)
    result = train(folder / "checkpoint")
    if jax.process_index() == 0:
        # Results are never overwritten; this one is that of the command before.
        (folder / "two.npz").unlink(missing_ok=True)
        result.save(folder / "two.npz")


def launch(folder):
    """Start the processes; the first one that fails ends all, and is named in the last line."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    settings = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}
    settings["XLA_FLAGS"] = ""  # Those of this process may name another number of devices.
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"process_{number}.log" for number in range(PROCESSES)]
    with contextlib.ExitStack() as stack:
        running = []
        for number, log in enumerate(logs):
            command = [sys.executable, __file__, str(folder), "join", str(number), address]
            out = stack.enter_context(log.open("wb"))
            running.append(subprocess.Popen(command, env=settings, stdout=out, stderr=out))
            stack.callback(running[-1].wait)
            stack.callback(running[-1].kill)
        while None in (codes := [each.poll() for each in running]) and not any(codes):
            time.sleep(0.1)
    if any(codes):
        number = codes.index(next(filter(None, codes)))
        tail = logs[number].read_text(encoding="utf-8").strip().splitlines() or ["it said nothing"]
        sys.exit(f"process {number} ended with {codes[number]}: {tail[-1]}")


def main(folder):
    folder = Path(folder)
    launch(folder)
    import jax

    from dpjax.engine.run import Result

    results = Result.load(folder / "two.npz"), train()
    pairs = zip(*(jax.tree.leaves((each.params, each.metrics)) for each in results), strict=True)
    largest = max(float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)) for a, b in pairs)
    print(f"{PROCESSES} processes of {DEVICES} devices: largest difference {largest:.1e}, relative")
    return largest


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path, nargs="?", default="results/two_processes")
    parser.add_argument("role", nargs="*", metavar="join", help="[NUMBER ADDRESS]")
    options = parser.parse_args()
    if options.role[1:]:
        join(options.folder, options.role[2], PROCESSES, int(options.role[1]))
    elif options.role:
        join(options.folder)
    else:
        main(options.folder)
