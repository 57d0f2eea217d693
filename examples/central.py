"""DP-SGD where one holds all records, and what may follow it: python examples/central.py"""

from dataclasses import replace

import flax.linen as nn
import numpy as np
import optax

from dpjax.algorithms.average import Average
from dpjax.algorithms.dsgd import DSGD
from dpjax.data import load, partition, split
from dpjax.engine.run import run
from dpjax.plans import noise, optimizers, plan, problem, protect, samplers
from dpjax.transforms.lowpass import FILTERS, lowpass


def main(rounds=200, tried=("SGD", "filter", "average", "banded")):
    data, net = load.load("digits"), nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(10)])
    train, test = split.split(data.x_train, data.y_train, 0.25, seed=0)
    shard, results = partition.iid(len(train[1]), 1, seed=0), {}  # All records, one agent.
    task = problem.supervised(net, "cross_entropy", train, test, shard)
    base = plan.Config(
        noise=noise.Independent(), budget=protect.Budget(epsilon=2.0, delta=1e-4), rounds=rounds,
        protect=protect.Protect("zero_out_record", clip_norm=1.0),
        sampler=samplers.Poisson(64, capacity=96), optimizer=optimizers.Sgd(1.0))  # fmt: skip
    ways = {  # Each has a step size of its own: tune every one anew.
        "SGD": (0.5, optax.sgd, base),
        "filter": (0.25, lambda step: optax.chain(lowpass(*FILTERS["f1"]), optax.sgd(step)), base),
        "average": (0.5, optax.sgd, replace(base, method=Average(DSGD(), decay=1 - 10 / rounds))),
        "banded": (0.5, optax.sgd, replace(base, noise=noise.PrefixSum(bands=4),
                                           sampler=replace(base.sampler, separation=4))),
    }  # fmt: skip
    for way in tried:
        step, rule, config = ways[way]
        config = replace(config, optimizer=optimizers.Chain(rule, step))
        made = plan.make(config, np.eye(1), counts=shard.counts)
        results[way] = run(made, task, seeds=[0, 1, 2])
        accuracy = results[way].metrics["test_accuracy"][-1].mean()
        print(f"{way} at step {step}: test accuracy {accuracy:.3f}\n{made.guarantee.statement()}")
    return results


if __name__ == "__main__":
    main()
