"""Methods of very different kinds fit the protocols: one round each of the toys, by parts.

D-SGD, tracking, push-sum, DP-SGD with Poisson sampling, and a sketch over a sum with a server.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.algorithms.exchange import Gossip
from dpjax.protocols import Answer, Draw
from dpjax.topology import gossip
from dpjax.transforms import clipping
from tests.plans.toys import (
    CASES,
    KEY,
    Dsgd,
    Records,
    algorithm,
    batch,
    correlated,
    models,
    parts,
    squared,
)
from tests.support import make_algorithm

# Of models that are read elsewhere and of sketches there are methods of the package.
SLOW = ("average", "midway", "sketch")


@pytest.mark.gate(2)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES]
)
def test_round_joins_parts(name):
    case = CASES[name]
    result = algorithm(case)
    drawn = batch(agents=case.agents)
    state = result.init(case.models)
    new, info = result.step(KEY, state, drawn)
    jitted, sent = jax.jit(result.step)(KEY, state, drawn)
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
    assert keys == [".secret.noise.key"]
    # What is sent moves by the noise: the payload went through the privatizer.
    _, bare = algorithm(case, privatizer=False).step(
        KEY, algorithm(case, False).init(case.models), drawn
    )
    moved = [
        float(jnp.abs(a - b).max())
        for a, b in zip(*map(jax.tree.leaves, (info.messages, bare.messages)), strict=True)
    ]
    assert max(moved) > 0.01


@pytest.mark.optimized
def test_composed_round_is_written_one():
    """D-SGD by parts against its formula written out, to the bit."""
    arrays, shared = parts(CASES["dsgd"])
    result = algorithm(CASES["dsgd"])
    query = Records()
    chain = optax.chain(correlated(), optax.scale(1 / 2.0), optax.sgd(0.1, momentum=0.9))

    @jax.jit
    def written(params, inner, batch):
        updates, inner = chain.update(query(params, batch).total, inner, params)
        messages = optax.apply_updates(params, updates)
        return gossip.mix(arrays["mixing"], messages), inner, messages

    params = models()
    state = result.init(models())
    inner = chain.init(params)
    for t in range(3):
        params, inner, messages = written(params, inner, batch(t))
        state, info = jax.jit(result.step)(KEY, state, batch(t))
        np.testing.assert_array_equal(messages["w"], info.messages["w"])
        np.testing.assert_array_equal(params["w"], state.models["w"])


def test_halves_around_network_are_whole_round():
    case = CASES["tracking"]
    arrays, shared = parts(case)
    cut = make_algorithm(case.method, arrays, privatizer=correlated(), **shared)
    complete = algorithm(case)
    state = cut.init(case.models)
    expected, info = complete.step(KEY, state, batch())
    sent = cut.outgoing(KEY, state, batch())
    np.testing.assert_array_equal(sent.message["w"], info.messages["w"])
    received = Gossip()(arrays, state.round, sent.message)
    new = cut.incoming(KEY, state, batch(), sent, received.value)
    jax.tree.map(np.testing.assert_array_equal, new.models, expected.models)


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


@pytest.mark.slow
def test_poisson_sampling_and_loss_that_is_not_gaussian():
    counts = np.array([40, 20])
    sampler = Poisson(5.0)
    sampler.check(counts)
    drawn = jax.vmap(lambda k: sampler.draw(k, 0, jnp.asarray(counts)))(jax.random.split(KEY, 2000))
    mean = (~drawn.padding).sum(-1).mean(0)
    np.testing.assert_allclose(mean, 5.0, atol=0.2)
    assert drawn.padding[:, 1, 20:].all()
    loss = Pld(5 / 40, 1.0, 20)
    assert loss.after(10).epsilon(1e-5) < loss.epsilon(1e-5) < loss.then(loss).epsilon(1e-5)


def test_clipping_per_agent_is_query_too():
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
    result = make_algorithm(Dsgd(), arrays, privatizer=correlated(), **shared)
    _, info = result.step(KEY, result.init(models()), batch())
    assert set(info.metrics) == {"gradient_norm"}
