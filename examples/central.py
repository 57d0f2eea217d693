"""DP-SGD where one holds all records, and what may follow it: python examples/central.py"""

import argparse
from dataclasses import replace

import flax.linen as nn
import numpy as np
import optax

import dpjax as dp
from dpjax.data import split
from dpjax.transforms.lowpass import FILTERS, lowpass


def main(rounds=200, tried=("SGD", "filter", "average", "banded")):
    data, net = dp.datasets.load("digits"), nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(10)])
    train, test = split.split(data.x_train, data.y_train, 0.25, seed=0)
    shard, results = dp.partition.iid(len(train[1]), 1, seed=0), {}  # All records, one agent.
    task = dp.supervised(net, "cross_entropy", train, test, shard)
    base = dp.Config(
        noise=dp.noise.Independent(), budget=dp.Budget(epsilon=2.0, delta=1e-4), rounds=rounds,
        protect=dp.Protect("zero_out_record", clip_norm=1.0),
        sampler=dp.samplers.Poisson(64, capacity=96), optimizer=dp.optimizers.Sgd(1.0))  # fmt: skip
    averaged = dp.methods.Average(dp.methods.DSGD(), decay=1 - 10 / rounds)
    ways = {  # Each has a step size of its own: tune every one anew.
        "SGD": (0.5, optax.sgd, base),
        "filter": (0.25, lambda step: optax.chain(lowpass(*FILTERS["f1"]), optax.sgd(step)), base),
        "average": (0.5, optax.sgd, replace(base, method=averaged)),
        "banded": (0.5, optax.sgd, replace(base, noise=dp.noise.PrefixSum(bands=4),
                                           sampler=replace(base.sampler, separation=4))),
    }  # fmt: skip
    for way in tried:
        step, rule, config = ways[way]
        config = replace(config, optimizer=dp.optimizers.Chain(rule, step))
        made = dp.make_plan(config, np.eye(1), counts=shard.counts)
        results[way] = dp.run(made, task, seeds=[0, 1, 2])
        accuracy = results[way].metrics["test_accuracy"][-1].mean()
        print(f"{way} at step {step}: test accuracy {accuracy:.3f}\n{made.guarantee.statement()}")
    return results


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
