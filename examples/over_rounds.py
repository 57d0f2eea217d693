"""Noise correlated over rounds, and what single agents learn: python examples/over_rounds.py"""

import argparse

import dpjax as dp
from dpjax.accounting import views
from dpjax.data import split
from dpjax.models.linear import Linear


def main(epochs=20, batches=8):
    weights = dp.mixing.metropolis_hastings(dp.graphs.ring(10))
    data = dp.datasets.load("breast_cancer")
    train, test = split.split(data.x_train, data.y_train, 0.3, seed=0)
    shards = dp.partition.iid(len(train[1]), 10, seed=0)
    task = dp.supervised(Linear(), "logistic", train, test, shards)
    places = -(-int(shards.counts.max()) // batches)  # A record comes back once an epoch.
    config = dp.Config(
        noise=dp.noise.Mafalda(), budget=dp.Budget(epsilon=3.0, delta=1e-5),
        protect=dp.Protect("replace_record", clip_norm=1.0), rounds=epochs * batches,
        sampler=dp.samplers.Cyclic(epochs, batches, places), optimizer=dp.optimizers.Sgd(0.1),
    )  # fmt: skip
    results = {}
    for design in (None, dp.noise.Independent(), dp.noise.Mafalda(), dp.noise.SpaceTime()):
        made = dp.make_plan(config.using(design), weights)
        results[made.config.label] = result = dp.run(made, task, seeds=range(5))
        print(f"{made.config.label:12} test loss {result.metrics['test_loss'][-1].mean():.3f}")
        if design == config.noise:
            print(made.guarantee.statement())
            # Each agent draws its own noise, so agents may attack: what node 0 learns of others.
            # Its own entry is nan: it has its data, and no number says what it learns of them.
            view = views.dsgd(weights, made.applied_strategy).pndp(0)
            mu = view.guaranteed(made.config.pattern).round(4)
            print("mu of every agent against node 0, at noise 1, zero-out:", mu)
            print("(nan: node 0 is the attacker, and nothing hides its own data from itself)")
    return results


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
