"""Methods over a server: what an aggregate delivers is divided by who was present."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.algorithms.exchange import Sum, Trusted
from dpjax.algorithms.federated import Federated
from dpjax.contrib import masks
from dpjax.contrib.masks import Masked
from dpjax.engine import keys
from dpjax.engine.run import run
from dpjax.plans import plan
from dpjax.protocols import Aggregator
from dpjax.topology import graphs, mixing
from dpjax.transforms import noise
from tests.support import composed, make_config, make_problem

N = 5
D = 3
COMPLETE = mixing.metropolis_hastings(graphs.complete(N))
KEY = jax.random.key(3, impl="threefry2x32")


@dataclass(frozen=True)
class Drops(Aggregator):
    """A plain sum of those who are there."""

    absent: tuple[int, ...] = ()

    def __call__(self, messages):
        """The sum over those present, and how many they are."""
        present = np.setdiff1d(np.arange(N), self.absent)
        total = jax.tree.map(lambda leaf: jnp.sum(leaf[present], axis=0), messages)
        return total, jnp.float32(len(present))


@dataclass(frozen=True)
class Veiled(Drops):
    """A stand-in for a secure sum: the sum alone can be read."""

    def observed(self, messages, total):
        """The sum."""
        return total


@dataclass(frozen=True)
class OfAll(Drops):
    """The broken twin: as if everybody were present."""

    def __call__(self, messages):
        """The sum over those present, and how many all are."""
        return super().__call__(messages)[0], jnp.float32(N)


def step(method, gradients, privatizer=None):
    """The models and the messages after one round of given gradients."""
    result = composed(
        COMPLETE, lambda model, batch: batch, optax.sgd(1.0), method=method, privatizer=privatizer
    )
    state = result.init(jnp.zeros((N, D)))
    state, info = jax.jit(result.step)(KEY, state, jnp.asarray(gradients, jnp.float32))
    return np.asarray(state.models), info.messages


@pytest.mark.mutant
@pytest.mark.parametrize("absent", [(), (1,), (0, 3)])
@pytest.mark.parametrize("kind", [Drops, Veiled])
def test_sum_is_divided_by_who_was_present(kind, absent):
    gradients = np.random.default_rng(0).normal(size=(N, D))
    models, _ = step(Federated(kind(absent)), gradients)
    expected = -np.delete(gradients, absent, axis=0).mean(0)
    np.testing.assert_allclose(models, np.tile(expected, (N, 1)), rtol=1e-6)
    invalid, _ = step(Federated(OfAll(absent)), gradients)
    assert np.allclose(invalid, expected, rtol=1e-6) == (not absent)


def test_trusted_sum_is_opened_for_enough_agents_alone():
    gradients = np.random.default_rng(2).normal(size=(N, D))
    models, observed = step(Federated(Trusted(2, (1, 3))), gradients)
    expected = -np.delete(gradients, (1, 3), axis=0).mean(0)
    np.testing.assert_allclose(models, np.tile(expected, (N, 1)), rtol=1e-6)
    assert observed.shape == (D,) and Trusted(2).min_survivors(N) == N - 2
    models, observed = step(Federated(Trusted(1, (1, 3))), gradients)
    assert not models.any() and not np.asarray(observed).any()
    with pytest.raises(ValueError, match="missing is 3"):
        Trusted(1, missing=3)
    with pytest.raises(ValueError, match="aggregate is <class"):
        Federated(Trusted)


@functools.partial(jax.jit, static_argnums=0)
def opened(aggregate, messages, round=0):
    """The sum and who is in it, compiled once for all rounds."""
    return aggregate.at(round)(messages)


WHOLE = np.random.default_rng(5).integers(0, 2**32, (N, 7), dtype=np.uint32)


@pytest.mark.parametrize(
    ("degree", "missing"), [(None, ()), (2, (1, 3)), (None, ((), (1, 3), (0,)))]
)
def test_masked_sums_are_trusted_ones_to_bit(degree, missing):
    turns = missing if missing and isinstance(missing[0], tuple) else (missing,)
    for round in range(len(turns) + 1):
        absent = turns[round % len(turns)]
        expected = np.delete(WHOLE, absent, axis=0).sum(0, dtype=np.uint32)
        for aggregate in (Masked(2, missing, degree), Trusted(2, missing)):
            total, present = opened(aggregate, WHOLE, round)
            assert total.dtype == jnp.uint32 and present.dtype == jnp.float32
            np.testing.assert_array_equal(total, expected)
            assert present == N - len(absent)
            # What may be seen of it is the sum.
            assert aggregate.observed(WHOLE, total) is total and aggregate.sum_only


def test_too_few_open_no_sum_in_round_in_which_they_are():
    for kind in (Masked, Trusted):
        aggregate = kind(1, ((0,), (0, 2)))
        assert opened(aggregate, WHOLE, 0)[1] == N - 1
        total, present = opened(aggregate, WHOLE, 1)
        assert present == 0 and not np.asarray(total).any()


def test_masks_are_new_in_every_round_and_hide_what_they_cover(monkeypatch):
    """What would cross: uniform words, none of them twice; without masks it is the numbers."""
    sent = []
    plain = jax.jit(masks.masked_vectors, static_argnames="degree")
    opened_sum = jax.jit(masks.unmasked_sum, static_argnames="degree")

    def noted(values, key, degree):
        sent.append(plain(values, key, degree))
        return sent[-1]

    monkeypatch.setattr(masks, "masked_vectors", noted)
    monkeypatch.setattr(masks, "unmasked_sum", opened_sum)
    zeros = jnp.zeros((N, 4000), jnp.uint32)
    for round in range(2):
        Masked(degree=2).at(round)(zeros)
    words = np.stack(sent)
    assert len(np.unique(words)) > words.size - 5
    bits = np.unpackbits(words.view(np.uint8)).mean()
    assert abs(bits - 0.5) < 5 * 0.5 / np.sqrt(words.size * 32)


def test_masks_of_numbers_that_are_not_whole_are_refused():
    with pytest.raises(ValueError, match="message is float32"):
        Masked()(np.ones((N, 3), np.float32))
    with pytest.raises(ValueError, match="which adds up whole numbers"):
        config(Federated(Masked()))
    with pytest.raises(ValueError, match="degree is 3"):
        Masked(degree=3)(WHOLE)
    with pytest.raises(ValueError, match="aggregate is Masked.* for 2 agents"):
        Masked()(WHOLE[:2])
    with pytest.raises(ValueError, match="missing is"):
        Trusted(missing=(0, (1, 2)))


@pytest.mark.parametrize("rule", [optax.sgd(1.0), optax.adam(0.1)])
def test_round_without_anybody_moves_nothing(rule):
    result = composed(
        COMPLETE, lambda model, batch: batch, rule, method=Federated(Drops(tuple(range(N))))
    )
    before = result.init(jnp.ones((N, D)))
    after, _ = result.step(KEY, before, jnp.ones((N, D)))
    for old, new in zip(
        jax.tree.leaves(before._replace(round=0)), jax.tree.leaves(after._replace(round=0)),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(old, new)


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


@pytest.mark.slow
@pytest.mark.optimized
def test_networked_run_with_dropouts_equals_simulated_one():
    task = make_problem(N)
    absent = (1, 4)
    training_plan = plan.make(config(Federated(Drops(absent))), COMPLETE)
    expected = run(training_plan, task, seeds=[0])
    plain = plan.make(config(Federated()), COMPLETE)

    def transport(message, round):
        present = np.setdiff1d(np.arange(N), absent)
        total = jax.tree.map(lambda leaf: leaf[present].sum(0), message)
        return total, np.float32(len(present))

    result = run(plain, task, seeds=[0], transport=transport)
    for a, b in zip(jax.tree.leaves(expected.params), jax.tree.leaves(result.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    # An outsider's guarantee is of each message, whoever adds them up.
    for training_plan, plain_one in zip(expected.guarantees, result.guarantees, strict=True):
        assert training_plan.custom == ("Drops",)
        assert dataclasses.replace(training_plan, custom=()) == plain_one
    all_there = run(plain, task, seeds=[0])
    leaves: list[Any] = [jax.tree.leaves(case.params)[0] for case in (result, all_there)]
    assert np.abs(leaves[0] - leaves[1]).max() > 1e-4


@dataclass(frozen=True)
class Leaking(Federated):
    """The broken twin: the sum of bare gradients goes to the server beside the noisy one."""

    def emit(self, ctx, public_state):
        emission = super().emit(ctx, public_state)
        return emission._replace(carry=emission.private)

    def send(self, ctx, public_state, emission, noisy):
        return (noisy, emission.carry), ()

    def absorb(self, ctx, public_state, carry, received):
        return super().absorb(ctx, public_state, carry, (received[0][1], received[1]))


@pytest.mark.mutant
@pytest.mark.parametrize("aggregate", [Sum(), Veiled()])
def test_bare_sum_is_refused_whoever_adds_it_up(aggregate):
    with pytest.raises(ValueError, match="method shows .message"):
        plan.make(config(Leaking(aggregate)), COMPLETE)


def test_no_key_of_masks_is_one_of_run(monkeypatch):
    used = []
    masked = jax.jit(masks.masked_vectors, static_argnames="degree")
    opened_sum = jax.jit(masks.unmasked_sum, static_argnames="degree")

    def watched(values, key, degree):
        used.append(jax.random.key_data(key).tolist())
        return masked(values, key, degree)

    monkeypatch.setattr(masks, "masked_vectors", watched)
    monkeypatch.setattr(masks, "unmasked_sum", opened_sum)
    for round in range(3):
        Masked(seed=0).at(round)(jnp.ones((N, 2), jnp.uint32))
    # A round's number and a leaf's were folded into the seed's key, as a purpose and a phase are.
    runs = [jax.random.key_data(keys.derive(0, name)).tolist() for name in keys.PURPOSES]
    assert len(used) == 3 and not any(key in runs for key in used)
