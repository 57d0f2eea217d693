"""A noise covariance of your own, beside the built-in designs: python examples/own_design.py"""

import argparse

import numpy as np

import dpjax as dp
from dpjax.data import split
from dpjax.models.linear import Linear


def half_half(n):
    """Half the variance each agent's own, half shared by i and i + n/2 with opposite signs."""
    own, pairs = np.eye(n), np.eye(n) - np.roll(np.eye(n), n // 2, axis=1)
    return own / 2 + pairs / 2


def main(rounds=200):
    weights = dp.mixing.metropolis_hastings(dp.graphs.erdos_renyi(12, 0.4, seed=0))
    data = dp.datasets.load("breast_cancer")
    train, test = split.split(data.x_train, data.y_train, 0.3, seed=0)
    task = dp.supervised(Linear(), "logistic", train, test, dp.partition.iid(len(train[1]), 12, 0))
    # Any symmetric positive definite matrix, at any scale: the plan scales it to the budget.
    mine = dp.noise.Covariance(half_half(12), name="half-half")
    config = dp.Config(noise=mine, budget=dp.Budget(10.0, delta=1e-5), rounds=rounds,
                       protect=dp.Protect("replace_agent", clip_norm=1.0),
                       sampler=dp.samplers.Random(16),
                       optimizer=dp.optimizers.Sgd(0.02))  # fmt: skip
    designs = None, dp.noise.Independent(), dp.noise.Whisper("run"), mine
    plans = [dp.make_plan(config.using(design), weights) for design in designs]
    print(plans[-1].guarantee.statement())
    result = dp.run(plans, task, seeds=range(5))
    for each, loss in zip(plans, result.metrics["test_loss"][-1].mean(0), strict=True):
        print(f"{each.config.label:16} test loss {loss:.3f}   {each.forecast(31).caption()}")
    return result


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
