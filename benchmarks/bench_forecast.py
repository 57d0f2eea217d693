"""How much is learned at which ratio of noise to drift: python benchmarks/bench_forecast.py

The thresholds of `dpjax.accounting.forecast` come from here. Handwritten digits (scikit-learn's)
are learned by networks of 12 or 40 agents, by softmax regression and by one hidden layer, under the
agent and the record unit and several designs. For each ratio the budget is the one that gives it,
and the step size the best of seven; what is printed is the accuracy above chance that is left of
what training without noise reaches with its own best step. Half an hour on two cores.
"""

import sys
import time

import flax.linen as nn
import numpy as np

from dpjax.data import load, partition, split
from dpjax.engine import plan, problem
from dpjax.engine.run import run
from dpjax.topology import graphs, mixing

RATIOS = (0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 4.5, 7.0)
DRIFTS = (1, 2, 4, 8, 16, 32, 64)  # C T eta, how far the average model can go
CYCLIC = {"participation": (5, 20), "sampler": "cyclic"}


class Net(nn.Module):
    """Softmax regression, with a hidden layer where width is not 0."""

    width: int = 0

    @nn.compact
    def __call__(self, x):
        """Ten scores."""
        return nn.Dense(10)(nn.tanh(nn.Dense(self.width)(x)) if self.width else x)


CASES = [
    # width, agents, relation, design, rounds, clip norm, further config
    (0, 12, "replace_agent", "whisper_horizon", 100, 1.0, {}),
    (0, 12, "replace_agent", "independent", 100, 1.0, {}),
    (0, 40, "replace_agent", "whisper_horizon", 100, 1.0, {}),
    (0, 12, "replace_agent", "whisper_horizon", 400, 1.0, {}),
    (0, 12, "replace_agent", "whisper_horizon", 100, 0.1, {}),
    (32, 12, "replace_agent", "whisper_horizon", 100, 1.0, {}),
    (32, 12, "replace_agent", "independent", 100, 1.0, {}),
    (128, 12, "replace_agent", "whisper_horizon", 100, 1.0, {}),
    (0, 12, "replace_record", "whisper_horizon", 100, 1.0, {}),
    (0, 12, "replace_record", "mafalda", 100, 1.0, CYCLIC),
    (32, 12, "replace_record", "independent", 100, 1.0, {}),
    (128, 12, "replace_record", "whisper_horizon", 100, 1.0, {}),
]


def kept(width, agents, relation, design, rounds, clip_norm, further, seeds=3):
    """What is left at each of `RATIOS`, and the model's size."""
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(agents, 0.4, seed=0))
    data = load.load("digits")
    train, test = split.split(np.clip(data.x_train, -3, 3), data.y_train, 0.25, seed=0)
    shards = partition.iid(len(train[0]), agents, seed=0)
    task = problem.supervised(Net(width), "cross_entropy", train, test, shards)
    size = 65 * width + 10 * (width + 1) if width else 650
    batch = -(-int(shards.counts.max()) // 20) if further else 8
    common = dict(delta=1e-5, relation=relation, rounds=rounds, clip_norm=clip_norm,
                  batch_size=batch, **further)  # fmt: skip

    def best(name, epsilon):
        """The best accuracy over step sizes."""
        steps = [drift / (clip_norm * rounds) for drift in DRIFTS]
        configs = [plan.Config(name, epsilon, step_size=step, **common) for step in steps]
        result = run([plan.make(each, matrix) for each in configs], task, seeds=range(seeds),
                     eval_every=rounds)  # fmt: skip
        return float(result.metrics["test_accuracy"][-1].mean(axis=0).max())

    whole = best("non_private", 1.0) - 0.1
    found = plan.make(plan.Config(design, 4.0, step_size=1.0, **common), matrix)
    expected = found.forecast(size, counts=shards.counts)
    return [(best(design, expected.epsilon(ratio)) - 0.1) / whole for ratio in RATIOS], size


def main():
    """Print a line for each case."""
    print(f"{'parameters, agents, relation, design, T, C':66}" + "".join(f"{r:>6}" for r in RATIOS))
    for case in CASES:
        began = time.monotonic()
        left, size = kept(*case)
        name = f"{size:,}, {case[1]}, {case[2]}, {case[3]}, {case[4]}, {case[5]}"
        print(f"{name:66}" + "".join(f"{each:6.2f}" for each in left), flush=True)
        print(f"  {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    import warnings

    from dpjax.engine.forecasts import HopelessWarning

    warnings.simplefilter("ignore", HopelessWarning)
    main()
