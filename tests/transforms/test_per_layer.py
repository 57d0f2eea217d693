"""Clipping of every layer by itself: C / sqrt(L) each, C together."""

import dataclasses
import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import _numerics
from dpjax.learning.query import AgentQuery, RecordQuery
from dpjax.learning.supervised import supervised
from dpjax.models import mlp
from dpjax.plans import plan
from dpjax.transforms import clipping
from tests.support import make_config, make_problem

SIZES = {"a": 1e-3, "b": 1.0, "c": 1e3, "d": 1e6}


def gradients(agents=5):
    """Four layers of different lengths, one of two leaves at two depths."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=(agents, *shape)), jnp.float32)

    tree = {name: {"kernel": size * draw(3, 4), "bias": draw(4)} for name, size in SIZES.items()}
    tree["c"]["inner"] = {"scale": draw(2)}
    return tree


def exact(leaves):
    """The sum of squares, without rounding."""
    numbers = [float(value) for leaf in leaves for value in np.ravel(leaf)]
    return sum(fractions.Fraction(number) ** 2 for number in numbers)


def test_layers_are_leaves_of_one_parent():
    tree = gradients()
    assert _numerics.layer_numbers(tree) == (0, 0, 1, 1, 2, 3, 2, 4, 4)
    assert _numerics.layer_groups(tree)[2] == [4, 6] and len(_numerics.layer_groups(tree)) == 5
    assert _numerics.layer_numbers(jnp.ones(3)) == (0,) and _numerics.layer_groups(None) == []
    frozen = {"a": {"kernel": None, "bias": jnp.ones(2)}, "b": {"kernel": None}}
    assert _numerics.layer_numbers(frozen) == (0,)
    for layers in (2, 3, 7, 1000):
        share = fractions.Fraction(_numerics.layer_share(0.1, layers))
        assert layers * share**2 <= fractions.Fraction(0.1) ** 2


@pytest.mark.parametrize("method", clipping.CLIPPINGS)
def test_each_layer_is_clipped_to_its_share(method):
    tree = gradients()
    clip_norm = 0.3
    tree["b"]["kernel"] = tree["b"]["kernel"].at[3, 0, 0].set(jnp.nan)
    clip = clipping.per_agent(clip_norm, method, per_layer=True)
    out, _ = jax.jit(clip.update)(tree, clip.init(tree))
    leaves = jax.tree.leaves(out)
    argument = jax.tree.leaves(tree)
    share = clip_norm / math.sqrt(5)
    for agent in range(5):
        assert exact([leaf[agent] for leaf in leaves]) <= fractions.Fraction(clip_norm) ** 2
        for layer in _numerics.layer_groups(tree):
            mine = [np.float64(leaves[i][agent]) for i in layer]
            plain = [np.float64(argument[i][agent]) for i in layer]
            norm = math.sqrt(sum(np.sum(item**2) for item in plain))
            if not math.isfinite(norm):
                assert all(not np.any(value) for value in mine)
                continue
            scale = share / (norm + 0.01) if method == "automatic" else min(1, share / norm)
            for a, b in zip(mine, plain, strict=True):
                np.testing.assert_allclose(a, scale * b, rtol=1e-4)
    # The other layers of the agent whose one is not finite are there.
    assert np.any(out["a"]["kernel"][3]) and not np.any(out["b"]["kernel"][3])


@pytest.mark.mutant
def test_layers_that_each_have_whole_norm_are_noticed(monkeypatch):
    """The broken twin."""
    monkeypatch.setattr(_numerics, "layer_share", lambda clip_norm, layers: clip_norm)
    with pytest.raises(AssertionError):
        test_each_layer_is_clipped_to_its_share("flat")


def test_one_layer_is_whole():
    tree = {"kernel": gradients()["c"]["kernel"]}
    outs = [
        clipping.per_agent(0.3, per_layer=number).update(tree, optax.EmptyState())[0]
        for number in (False, True)
    ]
    np.testing.assert_array_equal(*(out["kernel"] for out in outs))


def problem_of(agents):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(agents * 6, 5))
    y = rng.integers(0, 3, agents * 6)
    shards = make_problem(agents, records=6).partition
    return supervised(mlp.MLP((4,), 3), "cross_entropy", (x, y), (x, y), shards)


def test_queries_of_agents_and_of_records_clip_layers():
    """An agent with one record is that record, by norms and by differentiation."""
    task = problem_of(6)
    models = jax.jit(jax.vmap(task.init))(jax.random.split(jax.random.key(0), 6))
    batch = jnp.asarray(task.x[:6, None]), jnp.asarray(task.y[:6, None]), None
    rest = {"clip_norm": 0.2, "clipping": "flat", "per_layer": True}
    queries = [
        AgentQuery(task.loss, task.batch_loss, **rest),
        RecordQuery(task.loss, task.weighted, microbatch=None, **rest),
        RecordQuery(task.loss, None, microbatch=None, **rest),
        RecordQuery(task.loss, lambda *_: None, microbatch=None, **rest),
    ]
    assert [query.one_by_one for query in queries] == [False, False, True, True]
    answers = [jax.jit(query)(models, batch) for query in queries[:3]]  # the last is the third
    assert float(answers[0].metrics["clip_fraction"]) == 1.0
    for answer in answers[1:]:
        for a, b in zip(*map(jax.tree.leaves, (answer.total, answers[0].total)), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)
    complete = jax.jit(AgentQuery(task.loss, task.batch_loss, 0.2, "flat"))(models, batch)
    assert not np.allclose(complete.total["params"]["Dense_0"]["bias"][0],
                           answers[0].total["params"]["Dense_0"]["bias"][0], rtol=0.01)  # fmt: skip


def test_plans_say_so(network):
    first = make_config(relation="zero_out_record")
    config = dataclasses.replace(first, protect=dataclasses.replace(first.protect, per_layer=True))
    training_plan = plan.make(config, network)
    other = plan.make(first, network)
    assert training_plan.config.protect.per_layer and not other.config.protect.per_layer
    assert training_plan.fingerprint() != other.fingerprint()
    # The same norm bounds the whole, so that the guarantee is the same.
    assert training_plan.guarantee.epsilon == other.guarantee.epsilon
    with pytest.raises(ValueError, match="per_layer is 1; give True or False"):
        dataclasses.replace(first.protect, per_layer=1)
