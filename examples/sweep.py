"""A sweep, tuned, resumable, drawn: python examples/sweep.py [FOLDER [PROCESSES]]"""

import argparse
from pathlib import Path

import flax.linen as nn
import numpy as np

import dpjax as dp
from dpjax.results import plots

DESIGNS = ("independent", "whisper_horizon")


def tasks(agents):
    """The same agents' data, measured on held-out records: for tuning, and for the report."""
    x = np.random.default_rng(0).normal(size=(4800, 8))
    y = np.argmax(x @ np.random.default_rng(1).normal(size=(8, 3)), axis=1)
    held_out = (slice(0, 600), slice(600, 1200))
    shards = dp.partition.iid(3600, agents, seed=0)
    train = (x[1200:], y[1200:])
    return [dp.supervised(nn.Dense(3), "cross_entropy", train, (x[part], y[part]), shards)
            for part in held_out]  # fmt: skip


def main(folder="results/sweep", parallel=1, clips=(0.1, 0.3, 1.0), epsilons=(1.0, 3.0, 10.0, 30.0),
         steps=(0.03, 0.1, 0.3, 1.0), rounds=300, seeds=5):  # fmt: skip
    folder, weights = Path(folder), dp.mixing.metropolis_hastings(dp.graphs.erdos_renyi(12, 0.4))
    tuning, final = tasks(len(weights))
    base = dp.Config(
        noise=dp.noise.Independent(), budget=dp.Budget(epsilons[0], delta=1e-5),
        protect=dp.Protect("replace_record", clip_norm=clips[0]), rounds=rounds,
        sampler=dp.samplers.Random(32), optimizer=dp.optimizers.Sgd(steps[0]),
    )  # fmt: skip
    grid = {"noise": list(map(dp.noise.named, DESIGNS)), "protect.clip_norm": clips,
            "budget.epsilon": epsilons, "optimizer.step_size": steps}  # fmt: skip
    options = {"eval_every": rounds, "parallel": parallel, "progress": True}
    # Steps are chosen on other seeds and records than those that are reported; the guarantee is
    # one run's, and does not cover the choice.
    tuned = dp.sweep(base, grid, weights, tuning, seeds=[100, 101], folder=folder / "tuning",
                     **options)  # fmt: skip
    best = tuned.best("test_loss", over="optimizer.step_size")
    swept = dp.sweep(base, best, weights, final, seeds=range(seeds), folder=folder / "final",
                     **options)  # fmt: skip
    frame = swept.to_frame()
    frame["clip"] = [f"clip norm {value:g}" for value in frame["protect.clip_norm"]]
    return [plots.lines(frame[frame["design"] == name], "budget.epsilon", "test_accuracy",
                        series="clip", log_x=True, path=folder / f"{name}.svg")
            for name in DESIGNS]  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="results/sweep")
    parser.add_argument("processes", type=int, nargs="?", default=1)
    print(*main(*vars(parser.parse_args()).values()), sep="\n")
