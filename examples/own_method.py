"""A method of your own, gradient push on a directed graph: python examples/own_method.py"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas

import dpjax as dp
from dpjax.data import split
from dpjax.models.linear import Linear
from dpjax.protocols import Emission
from dpjax.results import plots


@dataclasses.dataclass(frozen=True)
class Push(dp.methods.DSGD):
    """x <- W (x + opt(G(x / w))), w <- W w: w corrects for who is heard more than others."""

    stochastic = "columns"  # An agent divides what it sends.

    def start(self, ctx, models):
        return ctx.optimizer.init(models), models, jnp.ones(len(jax.tree.leaves(models)[0]), "f4")

    def emit(self, ctx, public_state):  # Models are x / w; the weights are public.
        total, metrics = ctx.query(public_state.models, ctx.batch)
        return Emission(total, public=public_state.memory[2], metrics=metrics)

    def send(self, ctx, public_state, emission, noisy):
        state, x, _ = public_state.memory
        updates, state = ctx.optimizer.update(ctx.mean(noisy), state, x)
        return (optax.apply_updates(x, updates), emission.public), state

    def absorb(self, ctx, public_state, carry, received):
        x, w = received
        return jax.tree.map(lambda leaf: (leaf.T / w).T, x), (carry, x, w)


def main(rounds=300, output="own_method.svg", n=12):
    sends = np.eye(n) + np.roll(np.eye(n), 1, axis=0) + np.eye(n, k=-3)
    train, test = split.split(*dp.datasets.load("breast_cancer")[1:3], 0.3, seed=0)
    shards = dp.partition.iid(len(train[1]), n, seed=0)
    task = dp.supervised(Linear(), "logistic", train, test, shards)
    config = dp.Config(method=Push(), noise=dp.noise.Independent(), rounds=rounds,
                       budget=dp.Budget(10.0, delta=1e-5), sampler=dp.samplers.Random(8),
                       protect=dp.Protect("replace_agent", clip_norm=1.0),
                       optimizer=dp.optimizers.Sgd(0.05))  # fmt: skip
    plans = [dp.make_plan(config.using(x), sends / sends.sum(0)) for x in (None, config.noise)]
    result = dp.run(plans, task, seeds=range(5))
    print(result.guarantees[-1].statement())
    plots.lines(pandas.DataFrame(result.rows()), "round", "test_loss", path=output)
    return result


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
