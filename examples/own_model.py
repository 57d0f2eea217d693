"""Your own graph, data and flax model, trained privately: python examples/own_model.py"""

import flax.linen as nn
import networkx as nx
import numpy as np

from dpjax.data import partition
from dpjax.engine.run import run
from dpjax.plans import plan, problem
from dpjax.topology import mixing


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.tanh(nn.Dense(16)(x)))


def main(rounds=400):
    graph = nx.connected_watts_strogatz_graph(12, 4, 0.3, seed=1)
    x = np.random.default_rng(0).normal(size=(3600, 8))
    y = np.argmax(x @ np.random.default_rng(1).normal(size=(8, 3)), axis=1)
    train, test = (x[600:], y[600:]), (x[:600], y[:600])
    shards = partition.iid(len(train[0]), len(graph), seed=0)
    task = problem.supervised(Net(), "cross_entropy", train, test, shards)
    config = dict(epsilon=8.0, delta=1e-5, relation="replace_agent", rounds=rounds,
                  clip_norm=1.0, batch_size=32, step_size=0.02)  # fmt: skip
    designs = ("non_private", "independent", "whisper_horizon")
    weights = mixing.metropolis_hastings(graph)
    plans = [plan.make(plan.Config(design=name, **config), weights) for name in designs]
    result = run(plans, task, seeds=[0, 1, 2], progress=True)
    for name, accuracy in zip(designs, result.metrics["test_accuracy"][-1].mean(0), strict=True):
        print(f"{name:16} test accuracy {accuracy:.3f}")
    print(result.guarantees[-1].statement())
    return result


if __name__ == "__main__":
    main()
