"""Low-rank adapters beside a frozen layer: they alone are clipped, noised, sent and counted."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.data import partition
from dpjax.engine import host
from dpjax.engine.inputs import Inputs
from dpjax.engine.run import run
from dpjax.learning.query import RecordQuery
from dpjax.learning.supervised import supervised
from dpjax.plans import plan
from dpjax.topology import graphs, mixing
from tests.support import make_config

AGENTS = 4
RECORDS = 6
FEATURES = 5
OUTPUTS = 3
RANK = 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(AGENTS * RECORDS, FEATURES)).astype(np.float32)
Y = np.argmax(X[:, :OUTPUTS], axis=1)
SHARDS = partition.iid(len(X), AGENTS, 0)
RING = mixing.metropolis_hastings(graphs.ring(AGENTS))
KEY = jax.random.key(0)


class Adapted(nn.Module):
    """W x + B A x: W as it was, A normal and B zero at the start."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        down = self.param("down", nn.initializers.normal(1.0), (FEATURES, RANK), jnp.float32)
        up = self.param("up", nn.initializers.zeros, (RANK, OUTPUTS), jnp.float32)
        return nn.Dense(OUTPUTS, name="base")(x) + x @ down @ up


PARAMS = Adapted().init(KEY, jnp.zeros((1, FEATURES), jnp.float32))


def make(params=PARAMS, frozen=lambda path: "base" in path):
    return supervised(
        Adapted(), "cross_entropy", (X, Y), (X[:9], Y[:9]), SHARDS, params=params, frozen=frozen
    )


def along(up):
    """The same parameters with another B."""
    return {"params": {**PARAMS["params"], "up": jnp.asarray(up, jnp.float32)}}


def test_at_start_model_is_frozen_one():
    still = plan.make(make_config(design="non_private", step_size=1e-30, rounds=1), RING)
    task = make()
    text = run(still, task, seeds=[0]).predictor(task, seed=0, agent=1)(X)
    base = PARAMS["params"]["base"]
    plain = X @ np.asarray(base["kernel"]) + np.asarray(base["bias"])
    np.testing.assert_allclose(text, plain, rtol=1e-5, atol=1e-6)
    # The twin: a B that is not zero.
    other = make(along(np.ones((RANK, OUTPUTS))))
    moved = run(still, other, seeds=[0]).predictor(other, seed=0, agent=1)(X)
    assert np.abs(moved - plain).max() > 0.1


@pytest.mark.mutant
@pytest.mark.parametrize("up", [np.zeros((RANK, OUTPUTS)), RNG.normal(size=(RANK, OUTPUTS))])
def test_clipped_sum_is_of_adapters_alone(up):
    """Record by record; norms that count the frozen layer, the broken twin, give less."""
    params = along(up)
    clip_norm = 0.1
    task = make(params)
    models = jax.tree.map(lambda leaf: jnp.stack([leaf] * AGENTS), task.init(KEY))
    x = jnp.asarray(X.reshape(AGENTS, RECORDS, -1))
    y = jnp.asarray(Y.reshape(AGENTS, RECORDS))
    query = RecordQuery(task.loss, task.weighted, clip_norm, "flat", None).merging(task.frozen)
    total = jax.jit(lambda models: query(models, (x, y, None)).total)(models)["params"]
    assert {name for name, branch in total.items() if jax.tree.leaves(branch)} == {"down", "up"}

    def loss(params, x, y):
        return -jax.nn.log_softmax(Adapted().apply(params, x))[y]

    function = jax.jit(jax.vmap(jax.vmap(jax.grad(loss), (None, 0, 0)), (None, 0, 0)))
    gradients = function(params, x, y)["params"]

    def by_hand(*counted):
        leaves = jax.tree.leaves([gradients[name] for name in counted])
        norms = np.sqrt(sum(np.square(leaf).sum(tuple(range(2, leaf.ndim))) for leaf in leaves))
        scales = np.minimum(1, clip_norm / norms)[..., None, None]
        return {name: (np.asarray(gradients[name]) * scales).sum(1) for name in ("down", "up")}

    right = by_hand("down", "up")
    invalid = by_hand("down", "up", "base")
    for name, leaf in right.items():
        np.testing.assert_allclose(total[name], leaf, rtol=1e-4, atol=1e-6)
    assert np.abs(np.asarray(total["up"]) - invalid["up"]).max() > 1e-3
    assert np.any(np.asarray(total["down"])) == np.any(up)


@pytest.mark.slow
def test_private_run_moves_and_sends_adapters_alone():
    training_plan = plan.make(make_config(rounds=2), RING)
    task = make()
    exchange = host.local_transport(training_plan)
    sent = []

    def transport(*value):
        sent.append(value)
        return exchange(*value)

    moved = run(training_plan, task, seeds=[0], transport=transport).params["params"]
    assert jax.tree.leaves(moved["base"]) == []
    for name in ("down", "up"):
        assert (np.asarray(moved[name]) != np.asarray(PARAMS["params"][name])).all()
    shapes = {np.shape(leaf) for leaf in jax.tree.leaves(sent) if np.ndim(leaf)}
    assert shapes == {(AGENTS, FEATURES, RANK), (AGENTS, RANK, OUTPUTS)}
    counts = [
        Inputs.of((training_plan,), (case,), (0,)).entries for case in (task, make(frozen=None))
    ]
    adapters = RANK * (FEATURES + OUTPUTS)
    assert counts == [adapters, adapters + OUTPUTS * (FEATURES + 1)]
