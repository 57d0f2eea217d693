"""A sweep over clip norm and epsilon, tuned, resumable, drawn: python examples/sweep.py [FOLDER]"""

import dataclasses
import sys
from pathlib import Path

import flax.linen as nn
import numpy as np

import dpjax as dp
from dpjax.results import plots, records

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


def grid(config, steps, weights):
    """A plan for each step size; the noise design is made once."""
    plans = []
    for step in steps:
        optimizer = dataclasses.replace(config.optimizer, step_size=step)
        design = plans[0].design if plans else None
        plans.append(dp.make_plan(dataclasses.replace(config, optimizer=optimizer), weights,
                               design=design))  # fmt: skip
    return plans


def main(folder="results/sweep", clips=(0.1, 0.3, 1.0), epsilons=(1.0, 3.0, 10.0, 30.0),
         steps=(0.03, 0.1, 0.3, 1.0), rounds=300, seeds=5):  # fmt: skip
    folder, weights = Path(folder), dp.mixing.metropolis_hastings(dp.graphs.erdos_renyi(12, 0.4))
    tuning, final = tasks(len(weights))
    for clip in clips:
        for epsilon in epsilons:
            path = folder / f"clip_{clip:g}_epsilon_{epsilon:g}.jsonl"
            if path.exists():  # The sweep was stopped, and has this point.
                continue
            base = dp.Config(
                noise=dp.noise.Independent(), budget=dp.Budget(epsilon, delta=1e-5),
                protect=dp.Protect("replace_record", clip_norm=clip), rounds=rounds,
                sampler=dp.samplers.Random(32), optimizer=dp.optimizers.Sgd(steps[0]),
            )  # fmt: skip
            configs = [base.using(dp.noise.named(name)) for name in DESIGNS]
            # Steps are chosen on other seeds and records than those that are reported; the
            # guarantee is one run's, and does not cover the choice.
            tried = [each for config in configs for each in grid(config, steps, weights)]
            losses = dp.run(
                tried,
                tuning,
                seeds=[100, 101],
                eval_every=rounds,
                checkpoint=folder / "tuning" / path.stem,
            ).metrics["test_loss"]
            losses = np.nan_to_num(losses[-1].mean(axis=0), nan=np.inf).reshape(len(configs), -1)
            plans = [tried[d * len(steps) + best] for d, best in enumerate(losses.argmin(axis=1))]
            result = dp.run(plans, final, seeds=range(seeds), eval_every=rounds, progress=True,
                         checkpoint=folder / "final" / path.stem)  # fmt: skip
            rows = result.rows(clip_norm=clip, budget_epsilon=epsilon)
            records.write(path, rows, records.metadata("python examples/sweep.py"))
    return [plots.from_records(sorted(folder.glob("*.jsonl")), x="budget_epsilon",
                               y="test_accuracy", series="clip_norm", log_x=True,
                               where=[f"algorithm={name}"], out=folder / f"{name}.svg")
            for name in DESIGNS]  # fmt: skip


if __name__ == "__main__":
    print(*main(*sys.argv[1:2]), sep="\n")
