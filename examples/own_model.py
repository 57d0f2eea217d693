"""Your own graph, data and flax model, trained privately: python examples/own_model.py"""

import argparse

import flax.linen as nn
import networkx as nx
import numpy as np

import dpjax as dp


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.tanh(nn.Dense(16)(x)))


def main(rounds=400):
    weights = dp.mixing.metropolis_hastings(nx.connected_watts_strogatz_graph(12, 4, 0.3, seed=1))
    x = np.random.default_rng(0).normal(size=(3600, 8))
    y = np.argmax(x @ np.random.default_rng(1).normal(size=(8, 3)), axis=1)
    train, test = (x[600:], y[600:]), (x[:600], y[:600])
    shards = dp.partition.iid(len(train[0]), len(weights), seed=0)
    task = dp.supervised(Net(), "cross_entropy", train, test, shards)
    config = dp.Config(noise=dp.noise.Whisper("run"), budget=dp.Budget(8.0, delta=1e-5),
                       protect=dp.Protect("replace_agent", clip_norm=1.0), rounds=rounds,
                       sampler=dp.samplers.Random(32),
                       optimizer=dp.optimizers.Sgd(0.02))  # fmt: skip
    designs = None, dp.noise.Independent(), config.noise
    plans = [dp.make_plan(config.using(design), weights) for design in designs]
    result = dp.run(plans, task, seeds=[0, 1, 2], progress=True)
    for each, accuracy in zip(plans, result.metrics["test_accuracy"][-1].mean(0), strict=True):
        print(f"{each.config.label:16} test accuracy {accuracy:.3f}")
    predict = result.predictor(task, seed=0, plan="whisper_horizon")  # the average model
    print(result.guarantees[-1].statement(), "\nclasses:", predict(test[0][:9]).argmax(axis=1))
    return result


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
