"""What trees of parameters are held as, and which of them can be trained at all."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.engine.run import Result, run
from dpjax.learning.supervised import supervised
from dpjax.plans import plan
from tests.learning.test_frozen import KEY, PARAMS, SHARDS, Net, X, Y, make
from tests.support import make_config

BODY = {"kernel": jnp.ones((5, 7)), "bias": jnp.zeros(7)}


def other_body():
    """The same shapes and start of what is trained."""
    return {"params": {**PARAMS["params"], "body": BODY}}


def test_no_leaf_of_start_can_be_replaced(network):
    task = make()
    training_plan = plan.make(make_config(rounds=2), network)
    before = run(training_plan, task, seeds=[0])
    handed = task.init(KEY)
    handed["params"]["head"]["kernel"] = handed["params"]["head"]["kernel"] + 100
    handed["params"]["head"]["bias"] = "no array"
    assert task.init == make().init and hash(task.init) == hash(make().init)
    after = run(training_plan, task, seeds=[0])
    for a, b in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert task.init != make(params=jax.tree.map(lambda leaf: leaf + 1, PARAMS)).init


def test_models_are_put_together_with_frozen_values_they_were_trained_with(tmp_path, network):
    task = make()
    training_plan = plan.make(make_config(rounds=2), network)
    result = run(training_plan, task, seeds=[0])
    loaded = Result.load(result.save(tmp_path / "r"))
    assert loaded.frozen == result.frozen != ""
    for case in (result, loaded):
        assert case.predictor(make())(X[:2]).shape == (2, 3)
        with pytest.raises(ValueError, match="problem has other frozen values"):
            case.predictor(make(params=other_body()))
        with pytest.raises(ValueError, match="give the problem that was trained"):
            case.predictor(Net())
    complete = run(training_plan, make(frozen=None), seeds=[0])
    assert complete.frozen == ""
    with pytest.raises(ValueError, match="give the problem that was trained"):
        complete.predictor(task)
    half = jax.tree.map(lambda leaf: leaf.astype(np.float16), result.params)
    with pytest.raises(ValueError, match="problem trains another model"):
        dataclasses.replace(result, params=half).predictor(task)


class Normalised(nn.Module):
    """Running statistics are a collection of their own."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        return nn.Dense(3)(nn.BatchNorm(use_running_average=True)(x))


def test_statistics_are_no_parameters():
    """They would be clipped, noised and released with them."""
    params = Normalised().init(KEY, jnp.zeros((1, 5)))
    remedy = r"batch_stats/.* released.*frozen=lambda path: path.startswith\('batch_stats'\)"
    for case in (params, None):
        with pytest.raises(ValueError, match=remedy):
            make(Normalised(), None, case)
    with pytest.raises(ValueError, match=remedy):
        make(Normalised(), lambda path: "Dense" in path, params)
    task = make(Normalised(), lambda path: path.startswith("batch_stats"), params)
    assert set(task.frozen["batch_stats"]["BatchNorm_0"]) == {"mean", "var"}
    assert jax.tree.leaves(task.init(KEY)["batch_stats"]) == []


@pytest.mark.parametrize("frozen", [None, lambda path: "body" in path])
def test_what_is_trained_has_models_own_dtype(frozen):
    with pytest.raises(ValueError, match="params params/.* are int32 and the model's float32"):
        make(frozen=frozen, params=jax.tree.map(lambda leaf: np.zeros(leaf.shape, int), PARAMS))
    for kind in (np.float16, jnp.bfloat16):
        narrow = jax.tree.map(lambda leaf, kind=kind: leaf.astype(kind), PARAMS)
        with pytest.raises(ValueError, match="16 and the model's float32.*give them as float32"):
            make(frozen=frozen, params=narrow)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), PARAMS)
    assert {
        leaf.dtype.name for leaf in jax.tree.leaves(make(frozen=frozen, params=wide).init(KEY))
    } == {"float32"}


def test_frozen_body_may_be_held_in_half_memory():
    body = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS["params"]["body"])
    task = make(params={"params": {**PARAMS["params"], "body": body}})
    assert task.frozen["params"]["body"]["kernel"].dtype == jnp.bfloat16


@pytest.mark.parametrize("leaf", ["float32", b"x", jax.random.key(0), object()])
def test_frozen_values_that_are_no_numbers(leaf):
    task = make()
    values = task.frozen
    values["params"]["body"]["bias"] = leaf
    with pytest.raises(ValueError, match="frozen params/body/bias"):
        dataclasses.replace(task, frozen=values)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (3.0, "train x is 3.0; give one entry a record"),
        ([[1], [2, 3]], "train x is not an array of numbers"),
        (jax.random.key(0), "train x is not an array of numbers"),
    ],
)
def test_examples_that_are_no_array(x, message):
    with pytest.raises(ValueError, match=message):
        supervised(Net(), "cross_entropy", (x, Y), (X, Y), SHARDS)


def test_problem_of_ones_own_has_rows():
    for name in ("x", "y"):
        with pytest.raises(ValueError, match=f"{name} is .*3"):
            dataclasses.replace(make(), **{name: np.float32(3)})
