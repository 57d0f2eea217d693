"""Nine sites train, one leaves unplanned, the others go on: python examples/departure.py"""

import dataclasses

import jax
import numpy as np

from dpjax.accounting import budget
from dpjax.data import load, partition, split
from dpjax.engine.run import run
from dpjax.models.linear import Linear
from dpjax.plans import noise, optimizers, plan, problem, protect, samplers
from dpjax.topology import graphs, mixing


def main(rounds=100, gone=4):
    data = load.load("breast_cancer")
    train, test = split.split(data.x_train, data.y_train, 0.3, seed=0)
    shards = partition.iid(len(train[1]), 9, seed=0)
    weights = mixing.metropolis_hastings(graphs.erdos_renyi(9, 0.6, seed=0))

    def task(sites):
        kept = partition.Partition(shards.indices[sites], shards.counts[sites])
        return problem.supervised(Linear(), "logistic", train, test, kept)

    # Fixed before the first round, for all phases. The first phase is planned for a part of it.
    total = protect.Budget(epsilon=3.0, delta=1e-5)
    config = plan.Config(
        noise=noise.Independent(), budget=protect.Budget(epsilon=2.0, delta=1e-5),
        protect=protect.Protect("replace_record", clip_norm=1.0), rounds=rounds,
        sampler=samplers.Random(batch_size=16), optimizer=optimizers.Sgd(step_size=0.2),
    )  # fmt: skip
    first = run(plan.make(config, weights), task(np.arange(9)), seeds=[0])
    spent = [first.guarantees[0].within(total)]
    # A site leaves. Whoever stays plans anew, as they like, within what the total leaves.
    left, stay = budget.remaining(total, spent), np.delete(np.arange(9), gone)
    later = dataclasses.replace(config, budget=protect.Budget(left.epsilon, left.delta))
    made = plan.make(later, mixing.survivors(weights, [gone]))
    start = jax.tree.map(lambda leaf: leaf[:, :, stay], first.params)
    second = run(made, task(stay), seeds=[0], start=start, phase=1, spent=spent)
    for name, result in {"nine sites": first, "eight sites": second}.items():
        print(f"{name}: test accuracy {result.metrics['test_accuracy'][-1].mean():.3f}")
    print(f"the first phase left epsilon {left.epsilon:.3f} for the second")
    print(second.guarantees[0].statement())
    return first, second


if __name__ == "__main__":
    main()
