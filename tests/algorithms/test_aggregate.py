"""Methods over a server: what an aggregate delivers is divided by who was present."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.algorithms.exchange import Server, Sum
from dpjax.engine.run import run
from dpjax.plans import plan
from dpjax.protocols import Aggregate, Emission
from dpjax.topology import graphs, mixing
from dpjax.transforms import noise
from tests.support import composed, make_config, make_problem

N, D = 5, 3
COMPLETE = mixing.metropolis_hastings(graphs.complete(N))
KEY = jax.random.key(3, impl="threefry2x32")


@dataclass(frozen=True)
class Drops:
    """A plain sum of those who are there."""

    absent: tuple[int, ...] = ()

    def __call__(self, messages):
        """The sum over those present, and how many they are."""
        there = np.setdiff1d(np.arange(N), self.absent)
        total = jax.tree.map(lambda leaf: jnp.sum(leaf[there], axis=0), messages)
        return total, jnp.float32(len(there))

    def seen(self, messages, total):
        """Every message: an absent agent's may have left it."""
        return messages


@dataclass(frozen=True)
class Veiled(Drops):
    """A stand-in for a secure sum: the sum alone can be read."""

    def seen(self, messages, total):
        """The sum."""
        return total


@dataclass(frozen=True)
class Federated:
    """SGD at a server, whose model all agents know."""

    aggregate: Aggregate = Sum()
    stochastic = "rows"

    @property
    def exchange(self):
        return Server(self.aggregate)

    def start(self, here, models):
        return here.optimizer.init(models)

    def payload(self, models):
        return models

    def emit(self, here, seen):
        answer = here.query(seen.models, here.batch)
        return Emission(answer.total, metrics=answer.metrics)

    def send(self, here, seen, emission, noisy):
        return noisy, ()

    def mean(self, here, total, present):
        return here.mean(total, present)

    def absorb(self, here, seen, carry, received):
        mean = self.mean(here, *received)
        each = jax.tree.map(lambda leaf, x: jnp.broadcast_to(leaf, x.shape), mean, seen.models)
        updates, memory = here.optimizer.update(each, seen.memory, seen.models)
        return optax.apply_updates(seen.models, updates), memory

    def measured(self, seen):
        return seen.models

    def released(self, seen):
        return seen.models


@dataclass(frozen=True)
class OfAll(Federated):
    """The broken twin: as if everybody were present."""

    def mean(self, here, total, present):
        return here.mean(total, N)


def step(method, gradients, privatizer=None):
    """The models and the messages after one round of given gradients."""
    made = composed(
        COMPLETE, lambda model, batch: batch, optax.sgd(1.0), method=method, privatizer=privatizer
    )
    state = made.init(jnp.zeros((N, D)))
    state, info = jax.jit(made.step)(KEY, state, jnp.asarray(gradients, jnp.float32))
    return np.asarray(state.models), info.messages


@pytest.mark.parametrize("absent", [(), (1,), (0, 3)])
@pytest.mark.parametrize("kind", [Drops, Veiled])
def test_a_sum_is_divided_by_who_was_present(kind, absent):
    gradients = np.random.default_rng(0).normal(size=(N, D))
    models, _ = step(Federated(kind(absent)), gradients)
    wanted = -np.delete(gradients, absent, axis=0).mean(0)
    np.testing.assert_allclose(models, np.tile(wanted, (N, 1)), rtol=1e-6)
    wrong, _ = step(OfAll(kind(absent)), gradients)
    assert np.allclose(wrong, wanted, rtol=1e-6) == (not absent)


def test_a_round_without_anybody_moves_nothing():
    models, _ = step(Federated(Drops(tuple(range(N)))), np.ones((N, D)))
    assert not models.any()


def test_messages_are_what_who_listens_sees():
    gradients = np.random.default_rng(1).normal(size=(N, D)).astype(np.float32)
    added = noise.correlated(np.eye(N, dtype=np.float32), key=KEY, rounds=1)
    zeros = jnp.zeros((N, D), jnp.float32)
    noisy = gradients + np.asarray(added.update(zeros, added.init(zeros))[0])
    # The aggregator and outsiders alike: each agent's message with its noise.
    _, plain = step(Federated(), gradients, added)
    np.testing.assert_allclose(plain, noisy, rtol=1e-6)
    # Over a secure sum both see one number a coordinate, of those who were present.
    _, veiled = step(Federated(Veiled((2,))), gradients, added)
    assert veiled.shape == (D,)
    np.testing.assert_allclose(veiled, np.delete(noisy, 2, axis=0).sum(0), rtol=1e-6)


def config(method):
    return make_config(method=method, design="independent", rounds=4)


def test_a_run_over_a_network_with_dropouts_is_the_one_with_that_aggregate():
    task, absent = make_problem(N), (1, 4)
    one = plan.make(config(Federated(Drops(absent))), COMPLETE)
    wanted = run(one, task, seeds=[0])
    plain = plan.make(config(Federated()), COMPLETE)

    def transport(message, round):
        there = np.setdiff1d(np.arange(N), absent)
        total = jax.tree.map(lambda leaf: leaf[there].sum(0), message)
        return total, np.float32(len(there))

    found = run(plain, task, seeds=[0], transport=transport)
    for a, b in zip(jax.tree.leaves(wanted.params), jax.tree.leaves(found.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    # An outsider's guarantee is of each message, whoever adds them up.
    assert wanted.guarantees == found.guarantees
    all_there = run(plain, task, seeds=[0])
    leaves: list[Any] = [jax.tree.leaves(one.params)[0] for one in (found, all_there)]
    assert np.abs(leaves[0] - leaves[1]).max() > 1e-4


@dataclass(frozen=True)
class Leaking(Federated):
    """The broken twin: the sum of bare gradients goes to the server beside the noisy one."""

    def emit(self, here, seen):
        emission = super().emit(here, seen)
        return emission._replace(carry=emission.private)

    def send(self, here, seen, emission, noisy):
        return (noisy, emission.carry), ()

    def mean(self, here, total, present):
        return here.mean(total[1], present)


@pytest.mark.parametrize("aggregate", [Sum(), Veiled()])
def test_a_bare_sum_is_refused_whoever_adds_it_up(aggregate):
    with pytest.raises(ValueError, match="method shows .message"):
        plan.make(config(Leaking(aggregate)), COMPLETE)
