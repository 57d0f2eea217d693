"""How much is learned at which ratio of noise to drift: python benchmarks/forecast_thresholds.py

The thresholds of `dpjax.accounting.forecast` come from here. Handwritten digits (scikit-learn's)
are learned by networks of 12 or 40 agents, by softmax regression and by one hidden layer, under the
agent and the record unit and several designs. For each ratio the budget is the one that gives it,
and the step size the best of seven; what is printed is the accuracy above chance that is left of
what training without noise reaches with its own best step. Half an hour on two cores; with --few,
only models of two to ten parameters, logistic regression on made records: three minutes.
"""

import sys
import time

import flax.linen as nn
import numpy as np

from dpjax.data import load, partition, split
from dpjax.engine.run import run
from dpjax.learning import samplers
from dpjax.learning.supervised import supervised
from dpjax.models.linear import Linear
from dpjax.plans import noise, optimizers, plan, protect
from dpjax.topology import graphs, mixing

RATIOS = (0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 4.5, 7.0)
DRIFTS = (1, 2, 4, 8, 16, 32, 64)  # C T eta, how far the average model can go
CYCLIC = (5, 20)


class Net(nn.Module):
    """Softmax regression, with a hidden layer where width is not 0."""

    width: int = 0

    @nn.compact
    def __call__(self, x):
        """Ten scores."""
        return nn.Dense(10)(nn.tanh(nn.Dense(self.width)(x)) if self.width else x)


CASES = [
    # width, agents, relation, design, rounds, clip norm, (epochs, separation) of a fixed order
    (0, 12, "replace_agent", "whisper_horizon", 100, 1.0, None),
    (0, 12, "replace_agent", "independent", 100, 1.0, None),
    (0, 40, "replace_agent", "whisper_horizon", 100, 1.0, None),
    (0, 12, "replace_agent", "whisper_horizon", 400, 1.0, None),
    (0, 12, "replace_agent", "whisper_horizon", 100, 0.1, None),
    (32, 12, "replace_agent", "whisper_horizon", 100, 1.0, None),
    (32, 12, "replace_agent", "independent", 100, 1.0, None),
    (128, 12, "replace_agent", "whisper_horizon", 100, 1.0, None),
    (0, 12, "replace_record", "whisper_horizon", 100, 1.0, None),
    (0, 12, "replace_record", "mafalda", 100, 1.0, CYCLIC),
    (32, 12, "replace_record", "independent", 100, 1.0, None),
    (128, 12, "replace_record", "whisper_horizon", 100, 1.0, None),
]


FEW = [
    # parameters, agents, relation, design, rounds, clip norm, (epochs, separation)
    (size, 12, relation, "whisper_horizon", 100, clip_norm, None)
    for relation in ("replace_agent", "replace_record")
    for clip_norm in (0.1, 1.0)
    for size in (2, 5, 10)
]


def digits(width, agents):
    """Handwritten digits, the accuracy of guessing, and the model's size."""
    data = load.load("digits")
    train, test = split.split(np.clip(data.x_train, -3, 3), data.y_train, 0.25, seed=0)
    shards = partition.iid(len(train[0]), agents, seed=0)
    size = 65 * width + 10 * (width + 1) if width else 650
    return supervised(Net(width), "cross_entropy", train, test, shards), 0.1, size


def made(size, agents):
    """Records on two sides of a plane through zero, one in seven or so mislabelled."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200 * agents + 4000, size))
    margin = x @ np.ones(size) / np.sqrt(size)
    y = np.where(margin + 0.5 * rng.normal(size=len(x)) > 0, 1, -1)
    shards = partition.iid(200 * agents, agents, seed=0)
    count = 200 * agents
    train = (x[:count], y[:count])
    test = (x[count:], y[count:])
    return supervised(Linear(use_bias=False), "logistic", train, test, shards), 0.5, size


def kept(task, chance, size, agents, relation, design, rounds, clip_norm, order, seeds=3):
    """What is left at each of `RATIOS`."""
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(agents, 0.4, seed=0))
    shards = task.partition
    sampler = samplers.Random(8)
    if order is not None:
        sampler = samplers.Cyclic(*order, batch_size=-(-int(shards.counts.max()) // order[1]))

    def planned(name, epsilon, step):
        """The plan of a design at a step size."""
        config = plan.Config(
            noise=noise.Independent(), budget=protect.Budget(epsilon, 1e-5),
            protect=protect.Protect(relation, clip_norm), sampler=sampler,
            optimizer=optimizers.Sgd(step), rounds=rounds,
        )  # fmt: skip
        return plan.make(config.using(noise.named(name)), matrix)

    def best(name, epsilon):
        """The best accuracy over step sizes."""
        steps = [drift / (clip_norm * rounds) for drift in DRIFTS]
        plans = [planned(name, epsilon, step) for step in steps]
        result = run(plans, task, seeds=range(seeds), eval_every=rounds)
        return float(result.metrics["test_accuracy"][-1].mean(axis=0).max())

    total = best("non_private", 1.0) - chance
    expected = planned(design, 4.0, 1.0).forecast(size, counts=shards.counts)
    return [(best(design, expected.epsilon(ratio)) - chance) / total for ratio in RATIOS]


def main():
    """Print a line for each case."""
    print(f"{'parameters, agents, relation, design, T, C':66}" + "".join(f"{r:>6}" for r in RATIOS))
    few = "--few" in sys.argv[1:]
    for case in FEW if few else CASES:
        began = time.monotonic()
        task, chance, size = (made if few else digits)(*case[:2])
        # Few coordinates average less over one seed's noise.
        left = kept(task, chance, size, *case[1:], seeds=20 if few else 3)
        name = f"{size:,}, {case[1]}, {case[2]}, {case[3]}, {case[4]}, {case[5]}"
        print(f"{name:66}" + "".join(f"{item:6.2f}" for item in left), flush=True)
        print(f"  {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    import warnings

    from dpjax.plans.statements import HopelessWarning

    warnings.simplefilter("ignore", HopelessWarning)
    main()
