"""Toy methods of very different kinds, a few lines each, and the round that joins their parts."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import protocols
from dpjax.algorithms.average import Average
from dpjax.algorithms.exchange import Gossip, Server
from dpjax.protocols import Answer, Emission
from dpjax.topology import graphs, mixing
from dpjax.transforms import noise
from tests.support import make_algorithm

N = 5
D = 3
B = 4
MATRIX = mixing.metropolis_hastings(graphs.ring(N))
KEY = jax.random.key(3, impl="threefry2x32")


def squared(params, x, y):
    return jnp.sum((x @ params["w"] - y) ** 2)


@dataclass(frozen=True)
class Records:
    """Per-record clipping at 1 of the squared loss."""

    clip_norm: float = 1.0
    loss: Any = squared
    metrics = ()

    def __call__(self, models, batch, encode=None):
        x, y, padding = batch

        def of_record(params, x, y, skip):
            gradient = jax.grad(self.loss)(params, x, y)
            gradient = gradient if encode is None else encode(gradient)
            scale = jnp.minimum(1.0, self.clip_norm / optax.tree.norm(gradient))
            return jax.tree.map(lambda leaf: jnp.where(skip, 0.0, leaf * scale), gradient)

        def of_agent(params, x, y, padding):
            function = jax.vmap(of_record, (None, 0, 0, 0))(params, x, y, padding)
            return jax.tree.map(lambda leaf: leaf.sum(0), function)

        axis = 0 if len(jax.tree.leaves(models)[0]) == len(x) else None
        if axis is None:
            models = jax.tree.map(lambda leaf: leaf[0], models)
        return Answer(jax.vmap(of_agent, (axis, 0, 0, 0))(models, x, y, padding))

    def points(self, weights=None):
        """At several models: the gradient of the sum of the losses at all of them."""
        total = lambda p, x, y: jax.vmap(self.loss, (0, None, None))(p, x, y).sum()  # noqa: E731
        return replace(self, loss=total)


def batch(seed=0, agents=N, places=B):
    random = np.random.default_rng(seed)
    x = random.normal(size=(agents, places, D))
    y = random.normal(size=(agents, places))
    return jnp.float32(x), jnp.float32(y), jnp.asarray(random.random((agents, places)) < 0.3)


def models(agents=N):
    return {"w": jnp.zeros((agents, D)) + jnp.arange(D)}


def correlated(agents=N, key=KEY):
    return noise.correlated(np.eye(agents, dtype=np.float32), key=key, rounds=3)


class Method(protocols.Method):
    """What most of the toys share."""

    exchange: Any = Gossip()
    stochastic = "rows"
    min_entries = D

    def start(self, ctx, models):
        return ctx.optimizer.init(models)

    def payload(self, models):
        return models

    def emit(self, ctx, public_state):
        answer = ctx.query(public_state.models, ctx.batch)
        return Emission(answer.total, metrics=answer.metrics)

    def absorb(self, ctx, public_state, carry, received):
        return received, carry

    def released(self, public_state):
        return public_state.models

    def updated(self, ctx, public_state, noisy):
        updates, memory = ctx.optimizer.update(
            ctx.mean(noisy), public_state.memory, public_state.models
        )
        return optax.apply_updates(public_state.models, updates), memory


@dataclass(frozen=True)
class Dsgd(Method):
    def send(self, ctx, public_state, emission, noisy):
        return self.updated(ctx, public_state, noisy)


@dataclass(frozen=True)
class Tracking(Method):
    """The model is what is private: gradients enter it after the exchange, without noise."""

    beta: float = 0.5

    def start(self, ctx, models):
        return {"y": jax.tree.map(jnp.zeros_like, models), "z": models}

    def sensitivity(self, answer, steps, divisor, mixing):
        """By the first step of the optimizer, which every round starts anew."""
        del mixing
        return np.where(np.arange(len(steps)) > 0, steps[0] * answer(0.0) / divisor, 0.0)

    def emit(self, ctx, public_state):
        return Emission(public_state.models)

    def send(self, ctx, public_state, emission, noisy):
        return noisy, noisy

    def absorb(self, ctx, public_state, sent, received):
        y = jax.tree.map(
            lambda y, z, w: y + self.beta * (z - w), public_state.memory["y"], sent, received
        )
        gradient = ctx.query(sent, ctx.batch).total
        step = jax.tree.map(lambda y, g: y + g / ctx.divisor, y, gradient)
        updates, _ = ctx.optimizer.update(step, ctx.optimizer.init(step))
        return optax.apply_updates(received, updates), {"y": y, "z": sent}

    def released(self, public_state):
        return public_state.memory["z"]


@dataclass(frozen=True)
class PushSum(Method):
    """The weights of a directed graph are public, and travel with the models."""

    def start(self, ctx, models):
        return ctx.optimizer.init(models), jnp.ones(len(models["w"]))

    def emit(self, ctx, public_state):
        weight = public_state.memory[1]
        ratio = jax.tree.map(lambda leaf: leaf / weight[:, None], public_state.models)
        return Emission(ctx.query(ratio, ctx.batch).total, public=weight)

    def send(self, ctx, public_state, emission, noisy):
        inner = public_state._replace(memory=public_state.memory[0])
        moved, memory = self.updated(ctx, inner, noisy)
        return (moved, emission.public), memory

    def absorb(self, ctx, public_state, carry, received):
        moved, weight = received
        return moved, (carry, weight)


@dataclass(frozen=True)
class Sketch(Method):
    """Clients send sketches of gradients; one server learns from their sum and from the sketch."""

    rows: int = 2
    exchange: Any = Server()

    def start(self, ctx, models):
        basis = jnp.eye(D)[: self.rows]
        single = jax.tree.map(lambda leaf: leaf[:1], models)
        return {"sketch": basis, "mean": jnp.zeros(D), "optimizer": ctx.optimizer.init(single)}

    def payload(self, models):
        return jnp.zeros((N, self.rows))

    def emit(self, ctx, public_state):
        sketch = public_state.memory["sketch"]
        mean = public_state.memory["mean"]
        answer = ctx.query(public_state.models, ctx.batch, lambda g: sketch @ (g["w"] - mean))
        return Emission(answer.total)

    def send(self, ctx, public_state, emission, noisy):
        return noisy, ()

    def absorb(self, ctx, public_state, carry, received):
        total, present = received
        memory = public_state.memory
        step = memory["sketch"].T @ ctx.mean(total, present) + memory["mean"]
        updates, inner = ctx.optimizer.update(
            {"w": step[None]}, memory["optimizer"], public_state.models
        )
        sketch = jnp.roll(memory["sketch"], 1, axis=1)
        new = {"sketch": sketch, "mean": 0.9 * memory["mean"] + 0.1 * step, "optimizer": inner}
        return optax.apply_updates(public_state.models, updates), new


@dataclass(frozen=True)
class Midway(Dsgd):
    """Gradients at the model and half-way back to the last one: the larger of both, by entries."""

    def start(self, ctx, models):
        return ctx.optimizer.init(models), models

    def emit(self, ctx, public_state):
        back = jax.tree.map(
            lambda x, old: (x + old) / 2, public_state.models, public_state.memory[1]
        )
        union = jax.tree.map(lambda *pair: jnp.stack(pair, 1), public_state.models, back)

        def larger(gradients):
            return jax.tree.map(lambda g: jnp.where(g[0] ** 2 > g[1] ** 2, g[0], g[1]), gradients)

        return Emission(ctx.query.points()(union, ctx.batch, larger).total)

    def send(self, ctx, public_state, emission, noisy):
        moved, memory = self.updated(
            ctx, public_state._replace(memory=public_state.memory[0]), noisy
        )
        return moved, (memory, public_state.models)


class Case(NamedTuple):
    method: Any
    models: Any
    agents: int = N
    optimizer: Any = optax.sgd(0.1, momentum=0.9)


CASES = {
    "dsgd": Case(Dsgd(), models()),
    "muffliato": Case(type("K3", (Dsgd,), {"exchange": Gossip(3)})(), models()),
    "tracking": Case(Tracking(), models(), optimizer=optax.sgd(0.1)),
    "push_sum": Case(PushSum(), models()),
    "midway": Case(Midway(), models()),
    "average": Case(Average(Tracking()), models(), optimizer=optax.sgd(0.1)),
    "poisson": Case(Dsgd(), models(1), 1, optax.adam(0.1, eps=1.0)),
    "sketch": Case(Sketch(), models(1), N, optax.adam(0.1, eps=1.0)),
}


def parts(case):
    matrix = MATRIX if case.agents == N else np.ones((1, 1))
    arrays = {"mixing": jnp.asarray(matrix, jnp.float32)}
    shared = {"query": Records(), "optimizer": case.optimizer, "divisor": 2.0}
    return arrays, shared


def algorithm(case, privatizer=True):
    arrays, shared = parts(case)
    added = correlated(case.agents) if privatizer else None
    return make_algorithm(case.method, arrays, privatizer=added, **shared)
