"""Federated training of a model of one's own: a learned sketch, noise in shares, clients' replay.

    python examples/federated.py

Digits (in scikit-learn, no download): 40 clients a round, one image each, every image once. With so
few rounds a sketch learns little: it sends 40 numbers of 650, and loses accuracy for it.
"""

import argparse

import flax.linen as nn
import jax
import optax

import dpjax as dp
from dpjax.algorithms.exchange import Trusted
from dpjax.contrib.optimizers import scale_by_adam
from dpjax.contrib.replica import Feed, Replica
from dpjax.data import split
from dpjax.engine.host import local_transport

PLACES, CLIENTS = 40, 35


def adam(step_size, noise):
    """Adam less the noise's variance, which the plan knows."""
    link = scale_by_adam(noise, floor=1e-4)
    return optax.chain(link, optax.scale_by_learning_rate(step_size))


def main() -> None:
    """Train with and without a sketch, then follow the first run as a client."""
    train, test = split.with_test(dp.datasets.load("digits"), 0.2, seed=1)
    train = tuple(part[: PLACES * CLIENTS] for part in train)
    shards = dp.partition.iid(PLACES * CLIENTS, PLACES, 0)
    task = dp.supervised(nn.Dense(10), "cross_entropy", train, test, shards)
    network = dp.mixing.metropolis_hastings(dp.graphs.complete(PLACES))

    plans = {}
    for name, method in {
        "DOME": dp.methods.dome(40, Trusted(2)),
        "all numbers": dp.methods.Federated(Trusted(2)),
    }.items():
        config = dp.Config(
            protect=dp.Protect("zero_out_client", clip_norm=1.0, attacker="aggregator"),
            budget=dp.Budget(epsilon=4.0, delta=1e-5),
            method=method,
            noise=dp.noise.SumShares(dropouts=2, colluders=2),
            sampler=dp.samplers.Clients(CLIENTS, examples=1, epochs=1),
            optimizer=dp.optimizers.Chain(adam, 0.02, uses_noise=True),
            rounds=CLIENTS,
        )
        plans[name] = plan = dp.make_plan(config, network)
        result = dp.run(plan, task, seeds=range(3))
        accuracies = result.metrics["test_accuracy"][-1]
        entries = sum(leaf.size for leaf in jax.tree.leaves(result.model(seed=0)))
        size = entries if method.sketch is None else method.sketch.k
        print(
            f"{name:12} accuracy {accuracies.mean():.3f}, {4 * size:,} bytes a client sends a turn"
        )
    print(plans["DOME"].guarantee.statement())

    plan = plans["DOME"]
    sums = []
    carry = local_transport(plan)  # in place of a network: what the server would receive

    def transport(message, round):
        sums.append(carry(message, round))
        return sums[-1]

    transport.colluders = carry.colluders  # what its sums withstand
    dp.run(plan, task, seeds=[0], transport=transport)
    server = Feed(Replica(plan, task))
    client = Replica(plan, task)
    for received in sums:
        server.publish(received)
    size = client.follow(server)
    print(f"a client who missed all {len(sums)} rounds receives {size:,} bytes to have the model")
    print(f"and the sketch ({4 * entries * (40 + 2):,} bytes); the model alone has {4 * entries:,}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
