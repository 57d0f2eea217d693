"""A sampler of your own and its accountant, one coin a record: python examples/own_sampler.py"""

import argparse
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

import dpjax as dp
from dpjax.accounting import gdp
from dpjax.accounting.loss import AmplifiedLoss, draw_ratios, draw_sensitivity
from dpjax.data import split
from dpjax.models.linear import Linear
from dpjax.protocols import Amplification, CountedRecords, Draw

SHARE = 1 / 4


@dataclasses.dataclass(frozen=True)
class CoinLoss(AmplifiedLoss):
    """Messages have the law (1 - q) M0 + q M1 with a record, M0 where it is zeroed out.

    M0 and M1 are mu-GDP apart, mu = ratio sqrt(T): T rounds of fresh noise, whatever was sent
    before. A mixture's delta at log(1 + q (e^eps - 1)) is at most q times that of M0 and M1 at
    eps, in both directions: Balle, Barthe and Gaboardi (2018), theorem 1.
    """

    ratios: tuple
    rounds: int
    kind = "one_coin"
    accounting = "with one secret coin for every record, tossed once for all rounds"
    draw_ratios = property(lambda self: self.ratios)
    unamplified = property(lambda self: max(self.ratios) * math.sqrt(self.rounds) * (1 + 1e-12))

    def epsilon(self, delta):
        if delta >= SHARE:
            return 0.0
        epsilon = gdp.epsilon(self.unamplified, delta / SHARE)
        mixed = np.logaddexp(math.log(1 - SHARE), math.log(SHARE) + epsilon)
        return float(max(mixed, 0.0)) * (1 + 1e-12)

    def first_rounds(self, rounds):
        return dataclasses.replace(self, rounds=rounds)

    def scaled(self, factor):
        return dataclasses.replace(self, ratios=tuple(factor * ratio for ratio in self.ratios))


class Coin(Amplification):
    """The noise for a budget, and what is lost under it."""

    kind = CoinLoss.kind

    def bound(self, target, strategy):
        epsilon = math.log1p(math.expm1(target.budget.largest) / SHARE)
        mu = float(gdp.mu(epsilon, target.budget.delta / SHARE)) * (1 - 1e-9)
        return np.asarray((mu / draw_sensitivity(target, strategy)) ** 2 / target.rounds)

    def loss(self, target, noise):
        return CoinLoss(tuple(draw_ratios(target, noise).tolist()), target.rounds)


@dataclasses.dataclass(frozen=True)
class OneCoin(CountedRecords):
    """Every record is in all rounds with probability q, else in none."""

    records: int | None = None
    key_of = "run"
    divisor = property(lambda self: SHARE * (self.records or math.nan))  # The plan says it.

    def amplification(self, counts=None):
        return Coin()

    def draw(self, key, round, counts):
        heads = jax.random.bits(key, (len(counts), self.places), "uint8") < 64  # 1 / 4 exactly.
        return Draw.of_flags(heads & (jnp.arange(self.places) < counts[:, None]), self.places)


def main(rounds=100):
    train, test = split.split(*dp.datasets.load("breast_cancer")[1:3], 0.3, seed=0)
    shards = dp.partition.iid(len(train[1]), 3, seed=0)
    config = dp.Config(sampler=OneCoin(), noise=dp.noise.Independent(), rounds=rounds,
                       budget=dp.Budget(2.0, delta=1e-5),
                       protect=dp.Protect("zero_out_record", clip_norm=1.0),
                       optimizer=dp.optimizers.Sgd(0.2))  # fmt: skip
    plan = dp.make_plan(config, np.full((3, 3), 1 / 3), counts=shards.counts)
    print(plan.guarantee.statement())
    task = dp.supervised(Linear(), "logistic", train, test, shards)
    result = dp.run(plan, task, seeds=range(3))
    print(f"test accuracy {result.metrics['test_accuracy'][-1].mean():.2f}")
    return result


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
