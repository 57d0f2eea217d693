"""Methods of very different kinds fit the protocols, and those that leak do not pass.

The bodies are toys of a few lines; what is held here is that the parts join: one round each of
D-SGD, tracking, push-sum, DP-SGD with Poisson sampling, and a sketch over a sum with a server.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.algorithms.average import Average
from dpjax.algorithms.exchange import Gossip, Server
from dpjax.engine import rounds
from dpjax.plans import dependence
from dpjax.protocols import Answer, Draw, Emission
from dpjax.topology import gossip, graphs, mixing
from dpjax.transforms import clipping, noise

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


class Method:
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

    def sensitivity(self, rounds):
        raise NotImplementedError("a toy: what one record moves the models by")

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
    return rounds.compose(case.method, arrays, privatizer=added, **shared)


@pytest.mark.parametrize("name", CASES)
def test_a_round_joins_the_parts(name):
    case = CASES[name]
    made, drawn = algorithm(case), batch(agents=case.agents)
    state = made.init(case.models)
    new, info = made.step(KEY, state, drawn)
    jitted, sent = jax.jit(made.step)(KEY, state, drawn)
    # The tree, shapes and dtypes are those of the start, so that rounds can be scanned.
    assert jax.tree.structure(new) == jax.tree.structure(state)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
        assert before.shape == after.shape and before.dtype == after.dtype
    assert int(new.round) == 1
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        (new.models, new.memory, info.messages),
        (jitted.models, jitted.memory, sent.messages),
    )
    # The noise key is in the secret slot and nowhere else.
    keys = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(new)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    assert keys == [".secret.key"]
    # What is sent moves by the noise: the payload went through the privatizer.
    _, bare = algorithm(case, privatizer=False).step(
        KEY, algorithm(case, False).init(case.models), drawn
    )
    moved = [
        float(jnp.abs(a - b).max())
        for a, b in zip(*map(jax.tree.leaves, (info.messages, bare.messages)), strict=True)
    ]
    assert max(moved) > 0.01


@pytest.mark.parametrize("name", CASES)
def test_messages_depend_on_data_through_the_noise_alone(name):
    case = CASES[name]
    arrays, shared = parts(case)
    dependence.check(
        case.method, arrays, **shared, models=case.models, batch=batch(agents=case.agents)
    )


def test_the_composed_round_is_the_written_one():
    """D-SGD by parts against its formula written out, to the bit."""
    arrays, shared = parts(CASES["dsgd"])
    made, query = algorithm(CASES["dsgd"]), Records()
    chain = optax.chain(correlated(), optax.scale(1 / 2.0), optax.sgd(0.1, momentum=0.9))

    @jax.jit
    def written(params, inner, batch):
        updates, inner = chain.update(query(params, batch).total, inner, params)
        messages = optax.apply_updates(params, updates)
        return gossip.mix(arrays["mixing"], messages), inner, messages

    params, state = models(), made.init(models())
    inner = chain.init(params)
    for t in range(3):
        params, inner, messages = written(params, inner, batch(t))
        state, info = jax.jit(made.step)(KEY, state, batch(t))
        np.testing.assert_array_equal(messages["w"], info.messages["w"])
        np.testing.assert_array_equal(params["w"], state.models["w"])


def test_the_halves_around_a_network_are_the_whole_round():
    case = CASES["tracking"]
    arrays, shared = parts(case)
    cut = rounds.halves(case.method, arrays, privatizer=correlated(), **shared)
    whole, state = algorithm(case), cut.init(case.models)
    wanted, info = whole.step(KEY, state, batch())
    sent = cut.outgoing(KEY, state, batch())
    np.testing.assert_array_equal(sent.message["w"], info.messages["w"])
    received = Gossip()(arrays, state.round, sent.message)
    new = cut.incoming(KEY, state, batch(), sent, received.value)
    jax.tree.map(np.testing.assert_array_equal, new.models, wanted.models)


@dataclass(frozen=True)
class RawModel(Tracking):
    """The broken twin: the model that absorbed bare gradients is published."""

    def released(self, seen):
        return seen.models


@dataclass(frozen=True)
class BareLeaf(Dsgd):
    """The broken twin: a second leaf goes out beside the noisy one."""

    def emit(self, here, seen):
        total = here.query(seen.models, here.batch).total
        return Emission(total, carry=total)

    def send(self, here, seen, emission, noisy):
        moved, memory = self.updated(here, seen, noisy)
        return {"noisy": moved, "bare": emission.carry["w"]}, memory

    def absorb(self, here, seen, carry, received):
        return received["noisy"], carry


@dataclass(frozen=True)
class KeptBack(Dsgd):
    """The broken twin: this round's batch goes out with the next one's message."""

    def start(self, here, models):
        return here.optimizer.init(models), jnp.zeros(N)

    def send(self, here, seen, emission, noisy):
        moved, memory = self.updated(here, seen._replace(memory=seen.memory[0]), noisy)
        return jax.tree.map(lambda leaf: leaf + seen.memory[1][:, None], moved), memory

    def absorb(self, here, seen, carry, received):
        return received, (carry, here.batch[1].mean(1))


@dataclass(frozen=True)
class Branching(Dsgd):
    """The broken twin: data decide in a loop and a branch, not in a value."""

    def emit(self, here, seen):
        total = here.query(seen.models, here.batch).total
        return Emission(total, public=jnp.mean(here.batch[1]))

    def send(self, here, seen, emission, noisy):
        moved, memory = self.updated(here, seen, noisy)
        flag = jax.lax.cond(emission.public > 0, lambda: 1.0, lambda: -1.0)
        count = jax.lax.while_loop(lambda c: c < emission.public, lambda c: c + 1.0, flag)
        total, _ = jax.lax.scan(lambda c, _: (c + count, None), 0.0, length=3)
        return jax.tree.map(lambda leaf: leaf + 0 * total, moved), memory


@dataclass(frozen=True)
class TriedStep(Midway):
    """The broken twin: one of the points is where bare gradients would lead."""

    def emit(self, here, seen):
        bare = here.query(seen.models, here.batch).total
        there = jax.tree.map(lambda x, g: x - 0.1 * g, seen.models, bare)
        return super().emit(here, seen._replace(memory=(seen.memory[0], there)))


@dataclass(frozen=True)
class Weighed(Midway):
    """The broken twin: records weigh points for each other, in the encoder."""

    def emit(self, here, seen):
        both = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf], 1), seen.models)
        share = jnp.mean(here.batch[1])
        encode = lambda g: jax.tree.map(lambda leaf: leaf[0] + share * leaf[1], g)  # noqa: E731
        return Emission(here.query.points()(both, here.batch, encode).total)


@pytest.mark.parametrize(
    ("method", "leaf"),
    [
        (TriedStep(), "models"),
        (Weighed(), "encoded"),
        (RawModel(), "released"),
        (Average(RawModel()), "released"),
        (BareLeaf(), "bare"),
        (KeptBack(), "message"),
        (Branching(), "public"),
    ],
)
def test_a_method_that_leaks_is_refused(method, leaf):
    arrays, shared = parts(CASES["dsgd"])
    with pytest.raises(ValueError, match=f"(?s)method shows.*{leaf}"):
        dependence.check(method, arrays, **shared, models=models(), batch=batch())


def test_control_flow_passes_data_on():
    def program(data, public):
        flag = jax.lax.cond(data > 0, lambda: 1.0, lambda: -1.0)
        count = jax.lax.while_loop(lambda c: c < data, lambda c: c + 1.0, public)
        clean = jax.lax.while_loop(lambda c: c < 3, lambda c: c + public, public)
        late, stacked = jax.lax.scan(
            lambda c, x: ((c[1], c[1] + data, c[2] + x), c[2]),
            (public, public, public),
            jnp.ones(3) * public,
        )
        inner = jax.jit(lambda a, b: (a, b * 2))(data, public)
        mapped = jax.vmap(lambda a: jnp.sin(a) @ jnp.ones(2))(jnp.ones((2, 2)) * public)
        return flag, count, clean, late, stacked, inner, mapped

    closed, shapes = jax.make_jaxpr(program, return_shape=True)(1.0, 2.0)
    names = jax.tree.structure(shapes).unflatten(dependence.reached(closed.jaxpr, [True, False]))
    flag, count, clean, late, stacked, inner, mapped = names
    assert (flag, count, clean, mapped, stacked) == (True, True, False, False, False)
    assert late == (True, True, False) and inner == (True, False)


@dataclass(frozen=True)
class Doubled(Dsgd):
    """The broken twin: twice as sensitive as what the noise is calibrated for."""

    def emit(self, here, seen):
        total = here.query(seen.models, here.batch).total
        return Emission(jax.tree.map(lambda leaf: 2 * leaf, total))


@dataclass(frozen=True)
class Twice(Dsgd):
    """The broken twin: one batch is asked about at two models."""

    def emit(self, here, seen):
        there = jax.tree.map(jnp.negative, seen.models)
        both = [here.query(each, here.batch).total for each in (seen.models, there)]
        return Emission(jax.tree.map(jnp.add, *both))


@dataclass(frozen=True)
class LastRounds(Dsgd):
    """The broken twin: an answer goes out in the next round, when another one is accounted for."""

    def start(self, here, models):
        return here.optimizer.init(models), jax.tree.map(jnp.zeros_like, models)

    def emit(self, here, seen):
        total = here.query(seen.models, here.batch).total
        return Emission(seen.memory[1], carry=total)

    def send(self, here, seen, emission, noisy):
        moved, memory = self.updated(here, seen._replace(memory=seen.memory[0]), noisy)
        return moved, (memory, emission.carry)


@pytest.mark.parametrize("method", [Doubled(), Twice(), LastRounds()])
def test_a_payload_that_is_no_answer_is_refused(method):
    arrays, shared = parts(CASES["dsgd"])
    with pytest.raises(ValueError, match="state a sensitivity"):
        dependence.check(method, arrays, **shared, models=models(), batch=batch())


def test_what_is_written_in_place_is_followed():
    def program(data):
        box = jax.new_ref(jnp.zeros(()))
        before = box[...]

        def write(c, _):
            box[...] = data + c
            return c, None

        jax.lax.scan(write, jnp.ones(()), None, length=2)
        return before, box[...]

    if not hasattr(jax, "new_ref"):
        pytest.skip("this version has no references")
    closed = jax.make_jaxpr(program)(1.0)
    assert dependence.reached(closed.jaxpr, [True]) == [False, True]


@dataclass(frozen=True)
class KeyInMemory(Dsgd):
    """The broken twin: a noise key where checkpoints and other plans see it."""

    def start(self, here, models):
        return here.optimizer.init(models), KEY


def test_a_key_outside_the_secret_slot_is_refused():
    arrays, shared = parts(CASES["dsgd"])
    with pytest.raises(ValueError, match="state has a key in"):
        dependence.check(KeyInMemory(), arrays, **shared, models=models(), batch=batch())


@dataclass(frozen=True)
class OtherPayload(Dsgd):
    def payload(self, models):
        return {"w": jnp.zeros((N, D + 1))}


def test_a_payload_of_other_shapes_is_refused():
    arrays, shared = parts(CASES["dsgd"])
    with pytest.raises(ValueError, match="payload says"):
        dependence.check(OtherPayload(), arrays, **shared, models=models(), batch=batch())


@dataclass(frozen=True)
class Poisson:
    """Every record with one probability; a toy of the sampler, in one microbatch."""

    expected: float

    @property
    def divisor(self):
        return self.expected

    def check(self, counts):
        if not self.expected <= counts.min():
            raise ValueError(f"expected is {self.expected}; give at most {counts.min()}")

    def draw(self, key, round, counts):
        del round
        places = int(counts.max())
        taken = jax.random.uniform(key, (len(counts), places)) < (self.expected / counts)[:, None]
        beyond = jnp.arange(places) >= jnp.asarray(counts)[:, None]
        return Draw(jnp.broadcast_to(jnp.arange(places), taken.shape), ~taken | beyond)


class Pld(NamedTuple):
    """A toy of a loss that is no Gaussian one: Poisson sampling composed by dp_accounting."""

    rate: float
    multiplier: float
    rounds: int

    def _event(self):
        import dp_accounting

        event = dp_accounting.GaussianDpEvent(self.multiplier)
        return dp_accounting.PoissonSampledDpEvent(self.rate, event)

    def epsilon(self, delta):
        from dp_accounting import pld

        accountant = pld.PLDAccountant()
        accountant.compose(self._event(), self.rounds)
        return float(accountant.get_epsilon(delta))

    def after(self, rounds):
        return self._replace(rounds=rounds)

    def then(self, later):
        assert (later.rate, later.multiplier) == (self.rate, self.multiplier)
        return self._replace(rounds=self.rounds + later.rounds)


def test_poisson_sampling_and_a_loss_that_is_not_gaussian():
    counts = np.array([40, 20])
    sampler = Poisson(5.0)
    sampler.check(counts)
    drawn = jax.vmap(lambda k: sampler.draw(k, 0, jnp.asarray(counts)))(jax.random.split(KEY, 2000))
    taken = (~drawn.padding).sum(-1).mean(0)
    np.testing.assert_allclose(taken, 5.0, atol=0.2)
    assert drawn.padding[:, 1, 20:].all()
    loss = Pld(5 / 40, 1.0, 20)
    assert loss.after(10).epsilon(1e-5) < loss.epsilon(1e-5) < loss.then(loss).epsilon(1e-5)


def test_clipping_per_agent_is_a_query_too():
    """One gradient an agent: the divisor is 1 and the sum has one term."""
    clip = clipping.per_agent(0.1)

    def query(models, batch, encode=None):
        x, y, _ = batch
        mean = jax.vmap(
            jax.grad(lambda p, x, y: jnp.mean(jax.vmap(squared, (None, 0, 0))(p, x, y)))
        )
        gradients = mean(models, x, y)
        clipped, _ = clip.update(gradients, clip.init(gradients))
        norms = jax.vmap(optax.tree.norm)(gradients)
        return Answer(clipped, {"gradient_norm": jnp.mean(norms)})

    arrays, shared = parts(CASES["dsgd"])
    shared |= {"query": query, "divisor": 1.0}
    made = rounds.compose(Dsgd(), arrays, privatizer=correlated(), **shared)
    _, info = made.step(KEY, made.init(models()), batch())
    assert set(info.metrics) == {"gradient_norm"}
