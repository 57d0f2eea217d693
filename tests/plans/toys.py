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
from dpjax.engine.step import make_step
from dpjax.protocols import Answer, Emission
from dpjax.topology import graphs, mixing
from dpjax.transforms import noise

N, D, B = 5, 3, 4
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
            each = jax.vmap(of_record, (None, 0, 0, 0))(params, x, y, padding)
            return jax.tree.map(lambda leaf: leaf.sum(0), each)

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
    x, y = random.normal(size=(agents, places, D)), random.normal(size=(agents, places))
    return jnp.float32(x), jnp.float32(y), jnp.asarray(random.random((agents, places)) < 0.3)


def models(agents=N):
    return {"w": jnp.zeros((agents, D)) + jnp.arange(D)}


def correlated(agents=N, key=KEY):
    return noise.correlated(np.eye(agents, dtype=np.float32), key=key, rounds=3)


class Method(protocols.Method):
    """What most of the toys share."""

    exchange: Any = Gossip()
    stochastic = "rows"

    def start(self, here, models):
        return here.optimizer.init(models)

    def payload(self, models):
        return models

    def emit(self, here, seen):
        answer = here.query(seen.models, here.batch)
        return Emission(answer.total, metrics=answer.metrics)

    def absorb(self, here, seen, carry, received):
        return received, carry

    def released(self, seen):
        return seen.models

    def updated(self, here, seen, noisy):
        updates, memory = here.optimizer.update(here.mean(noisy), seen.memory, seen.models)
        return optax.apply_updates(seen.models, updates), memory


@dataclass(frozen=True)
class Dsgd(Method):
    def send(self, here, seen, emission, noisy):
        return self.updated(here, seen, noisy)


@dataclass(frozen=True)
class Tracking(Method):
    """The model is what is private: gradients enter it after the exchange, without noise."""

    beta: float = 0.5

    def start(self, here, models):
        return {"y": jax.tree.map(jnp.zeros_like, models), "z": models}

    def sensitivity(self, answer, steps, divisor, mixing):
        """By the first step of the optimizer, which every round starts anew."""
        del mixing
        return np.where(np.arange(len(steps)) > 0, steps[0] * answer(0.0) / divisor, 0.0)

    def emit(self, here, seen):
        return Emission(seen.models)

    def send(self, here, seen, emission, noisy):
        return noisy, noisy

    def absorb(self, here, seen, sent, received):
        y = jax.tree.map(lambda y, z, w: y + self.beta * (z - w), seen.memory["y"], sent, received)
        gradient = here.query(sent, here.batch).total
        step = jax.tree.map(lambda y, g: y + g / here.divisor, y, gradient)
        updates, _ = here.optimizer.update(step, here.optimizer.init(step))
        return optax.apply_updates(received, updates), {"y": y, "z": sent}

    def released(self, seen):
        return seen.memory["z"]


@dataclass(frozen=True)
class PushSum(Method):
    """The weights of a directed graph are public, and travel with the models."""

    def start(self, here, models):
        return here.optimizer.init(models), jnp.ones(len(models["w"]))

    def emit(self, here, seen):
        weight = seen.memory[1]
        ratio = jax.tree.map(lambda leaf: leaf / weight[:, None], seen.models)
        return Emission(here.query(ratio, here.batch).total, public=weight)

    def send(self, here, seen, emission, noisy):
        inner = seen._replace(memory=seen.memory[0])
        moved, memory = self.updated(here, inner, noisy)
        return (moved, emission.public), memory

    def absorb(self, here, seen, carry, received):
        moved, weight = received
        return moved, (carry, weight)


@dataclass(frozen=True)
class Sketch(Method):
    """Clients send sketches of gradients; one server learns from their sum and from the sketch."""

    rows: int = 2
    exchange: Any = Server()

    def start(self, here, models):
        basis = jnp.eye(D)[: self.rows]
        return {"sketch": basis, "mean": jnp.zeros(D), "optimizer": here.optimizer.init(models)}

    def payload(self, models):
        return jnp.zeros((N, self.rows))

    def emit(self, here, seen):
        sketch, mean = seen.memory["sketch"], seen.memory["mean"]
        answer = here.query(seen.models, here.batch, lambda g: sketch @ (g["w"] - mean))
        return Emission(answer.total)

    def send(self, here, seen, emission, noisy):
        return noisy, ()

    def absorb(self, here, seen, carry, received):
        total, present = received
        memory = seen.memory
        step = memory["sketch"].T @ here.mean(total, present) + memory["mean"]
        updates, inner = here.optimizer.update({"w": step[None]}, memory["optimizer"], seen.models)
        sketch = jnp.roll(memory["sketch"], 1, axis=1)
        new = {"sketch": sketch, "mean": 0.9 * memory["mean"] + 0.1 * step, "optimizer": inner}
        return optax.apply_updates(seen.models, updates), new


@dataclass(frozen=True)
class Midway(Dsgd):
    """Gradients at the model and half-way back to the last one: the larger of both, by entries."""

    def start(self, here, models):
        return here.optimizer.init(models), models

    def emit(self, here, seen):
        back = jax.tree.map(lambda x, old: (x + old) / 2, seen.models, seen.memory[1])
        both = jax.tree.map(lambda *pair: jnp.stack(pair, 1), seen.models, back)

        def larger(gradients):
            return jax.tree.map(lambda g: jnp.where(g[0] ** 2 > g[1] ** 2, g[0], g[1]), gradients)

        return Emission(here.query.points()(both, here.batch, larger).total)

    def send(self, here, seen, emission, noisy):
        moved, memory = self.updated(here, seen._replace(memory=seen.memory[0]), noisy)
        return moved, (memory, seen.models)


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
    return make_step(case.method, arrays, privatizer=added, **shared)
