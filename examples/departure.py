"""Nine sites train, one leaves unplanned, the others go on: python examples/departure.py"""

import argparse
import dataclasses

import jax
import numpy as np

import dpjax as dp
from dpjax.accounting import budget
from dpjax.data import split
from dpjax.models.linear import Linear


def main(rounds=100, gone=4):
    data = dp.datasets.load("breast_cancer")
    train, test = split.split(data.x_train, data.y_train, 0.3, seed=0)
    shards = dp.partition.iid(len(train[1]), 9, seed=0)
    weights = dp.mixing.metropolis_hastings(dp.graphs.erdos_renyi(9, 0.6, seed=0))

    def task(sites):
        kept = shards._replace(indices=shards.indices[sites], counts=shards.counts[sites])
        return dp.supervised(Linear(), "logistic", train, test, kept)

    # Fixed before the first round, for all phases. The first phase is planned for a part of it.
    total = dp.Budget(epsilon=3.0, delta=1e-5)
    config = dp.Config(
        noise=dp.noise.Independent(), budget=dp.Budget(epsilon=2.0, delta=1e-5),
        protect=dp.Protect("replace_record", clip_norm=1.0), rounds=rounds,
        sampler=dp.samplers.Random(batch_size=16), optimizer=dp.optimizers.Sgd(step_size=0.2),
    )  # fmt: skip
    first = dp.run(dp.make_plan(config, weights), task(np.arange(9)), seeds=[0])
    spent = [first.guarantees[0].within(total)]
    # A site leaves. Whoever stays plans anew, as they like, within what the total leaves.
    left, stay = budget.remaining(total, spent), np.delete(np.arange(9), gone)
    later = dataclasses.replace(config, budget=dp.Budget(left.epsilon, left.delta))
    made = dp.make_plan(later, dp.mixing.survivors(weights, [gone]))
    start = jax.tree.map(lambda leaf: leaf[:, :, stay], first.params)
    onward = dp.Continuation(start, number=1, guarantees=spent)
    second = dp.run(made, task(stay), seeds=[0], continuation=onward)
    for name, result in {"nine sites": first, "eight sites": second}.items():
        print(f"{name}: test accuracy {result.metrics['test_accuracy'][-1].mean():.3f}")
    print(f"the first phase left epsilon {left.epsilon:.3f} for the second")
    print(second.guarantees[0].statement())
    return first, second


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
