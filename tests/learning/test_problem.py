"""Data that would fail or mislead later is refused when the problem is made."""

import dataclasses
import re

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pandas
import pytest
from jax.flatten_util import ravel_pytree

from dpjax.contrib import fusion
from dpjax.data import canonical, partition, split
from dpjax.learning.problem import Problem
from dpjax.learning.quadratics import quadratics
from dpjax.learning.supervised import supervised
from dpjax.models import losses
from dpjax.models.linear import Linear
from dpjax.models.mlp import MLP
from dpjax.plans import noise, plan
from tests.support import make_config

X = np.random.default_rng(0).normal(size=(12, 3))
Y = np.tile([0, 1, 2], 4)
SHARDS = partition.iid(12, 3, 0)
MEAN = np.full((3, 3), 1 / 3)


def make(model=None, loss="cross_entropy", train=(X, Y), test=(X, Y), shards=SHARDS):
    return supervised(model or MLP(hidden=(4,), outputs=3), loss, train, test, shards)


def test_good_problem_and_its_fingerprint():
    result = make()
    assert result.agents == 3 and result.fingerprint() == make().fingerprint()
    assert result.fingerprint() != make(train=(X + 1, Y)).fingerprint()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": (X, Y + 1)}, "y reaches class 3, the model has 3 outputs"),
        ({"train": (X, 7 * Y)}, "y reaches class 14"),
        ({"test": (X, Y + 1)}, "y reaches class 3"),
        ({"train": (X, Y - 1)}, "cross_entropy loss takes classes 0"),
        ({"train": (X, Y + 0.5)}, "cross_entropy loss takes classes 0"),
        ({"loss": "hinge"}, "loss is 'hinge'; choose one of logistic"),
        ({"loss": "logistic", "model": Linear()}, "the logistic loss takes -1 and"),
        (
            {"loss": "logistic", "train": (X, Y % 2)},
            r"train y has classes \[0, 1\] in shape \(12,\); .* -1 and \+1; give 2 \* y - 1",
        ),
        ({"train": (X, 2 * (Y % 2) - 1)}, r"y has classes \[-1, 1\].*; give \(y \+ 1\) // 2"),
        ({"train": (X, np.eye(3)[Y])}, r"they are one-hot: give .*, np.argmax\(y, 1\)"),
        ({"train": (X, Y[:, None])}, r"train y has shape \(12, 1\); .*; give np.ravel\(y\)"),
        (
            {"loss": "logistic", "train": (X, Y % 2 + 1)},
            r"has classes \[1, 2\] .* -1 and \+1; give np.where\(y == 2, 1, -1\)",
        ),
        ({"train": X}, r"train is a ndarray; give two arrays, .*, \(x_train, y_train\)"),
        ({"train": (X, Y, Y)}, "train is a tuple of 3; give two arrays, examples and their labels"),
        ({"train": pandas.DataFrame(X[:, :2])}, "train is a DataFrame; give two arrays"),
        ({"train": lambda rows: X[rows]}, "train is a ndarray; give two arrays"),
        ({"test": None}, r"test is a NoneType; give two arrays, .*, \(x_test, y_test\)"),
        (
            {"loss": "squared", "model": MLP((), outputs=1)},
            r"model maps \(2, 3\) to \(2, 1\); .* takes \[batch\]; return x\[..., 0\]",
        ),
        ({"loss": "squared"}, "the squared loss takes"),
        ({"train": (np.where(X > 2, np.nan, X), Y)}, "holds nan at"),
        ({"train": (X[:5], Y)}, "one label a row"),
        ({"shards": partition.iid(13, 3, 0)}, "partition the same data"),
    ],
)
def test_bad_data(arguments, message):
    if "nan" in message:
        arguments = {"train": (np.where(np.arange(36).reshape(12, 3) == 5, np.nan, X), Y)}
    with pytest.raises(ValueError, match=message):
        make(**arguments)


FRAME = pandas.DataFrame(X, columns=["age", "weight", "pulse"])
REORDERED = FRAME[["weight", "age", "pulse"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": (FRAME, Y), "test": (REORDERED, Y)},
         r"test x has columns .*; give those of train x, in its order: .*'pulse'"),
        ({"train": (FRAME, pandas.Series(Y).sample(frac=1, random_state=0))},
         r"train y has another index than train x; give y.loc\[x.index\]"),
        ({"test": (FRAME.iloc[::-1], pandas.Series(Y))}, "test y has another index"),
    ],
)  # fmt: skip
def test_data_frames_are_not_joined_by_position(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_data_frames_that_agree_are_what_their_arrays_are():
    rows = np.arange(12)[::-1]
    frame = FRAME.iloc[rows]
    labels = pandas.Series(Y).iloc[rows]
    result = make(train=(frame, labels), test=(FRAME, list(Y)))
    assert result.fingerprint() == make(train=(X[rows], Y[rows])).fingerprint()
    assert result.columns == ("age", "weight", "pulse") and make().columns is None
    own = {"init": result.init, "loss": result.loss, "metrics": result.metrics, "partition": SHARDS}
    with pytest.raises(ValueError, match="y has another index than x"):
        Problem(**own, x=frame, y=pandas.Series(Y), evaluation=())
    assert Problem(**own, x=frame, y=labels, evaluation=()).columns == result.columns


@pytest.mark.parametrize(
    ("indices", "counts", "message"),
    [
        ([[0, 0, 1]], [3], "gives record 0 2 times"),
        ([[0, 1], [1, 2]], [2, 2], "gives record 1 2 times"),
        ([[0], [1]], [1, 4], r"int64\[2, 1\] and counts array\(\[1, 4"),
        ([[0], [1]], [1, 0], r"counts array\(\[1, 0\]"),
        ([[0.0], [1.0]], [1, 1], r"indices float64\[2, 1\]"),
        ([[0], [1]], [1], "no rows of 1 agents"),
        ([[0], [12]], [1, 1], "indices reach from 0 to 12"),
    ],
)
def test_partitions_that_would_change_sensitivity(indices, counts, message):
    shards = partition.Partition(np.asarray(indices), np.asarray(counts))
    with pytest.raises(ValueError, match=message):
        make(shards=shards)


def test_names_that_records_cannot_hold_are_refused():
    shards = make().partition
    for names in (np.array(["a", "b", "c"]), ("a",), (0, 1, 2)):
        with pytest.raises(ValueError, match="partition has names .* give a tuple of as many"):
            make(shards=shards._replace(names=names))
    with pytest.raises(ValueError, match="name is 5; give text"):
        dataclasses.replace(make(), name=5)


def test_data_cannot_be_changed_after_check():
    result = make()
    for array in (result.x, result.y, *result.partition[:2]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_problem_prints_its_size_and_no_data():
    display = repr(quadratics(4))
    assert display.startswith("Problem('") and "4 agents" in display and "array" not in display


def own(**changes):
    """A problem whose functions are a user's own."""
    options = {
        "init": lambda key: {"a": jnp.zeros(3)},
        "loss": lambda params, x, y: (params["a"] @ x - y) ** 2,
        "metrics": lambda params, evaluation: {"size": jnp.mean(params["a"] ** 2)},
    }
    data = {"x": X.astype(np.float32), "y": Y, "partition": SHARDS, "evaluation": (X, Y)}
    return Problem(**(options | data | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init": lambda key: {}}, r"init returns {}; return a pytree of floating"),
        ({"init": lambda key: None}, "init returns None; return a pytree"),
        ({"init": lambda key: jnp.zeros((0, 3))}, "init returns .*; return a pytree"),
        ({"init": 3}, "init is 3; give a function"),
        (
            {"init": lambda key: {"a": jnp.zeros(3, int)}},
            "init returns .*int32.*; return a pytree of floating",
        ),
        (
            {"init": lambda key: {"a": jnp.zeros(3), "b": jnp.array(True)}},
            "init returns .*bool.*; return .* to train, and move others to frozen",
        ),
        (
            {"loss": lambda params, x, y: params["a"] * x},
            r"loss returns .*\(3,\).*; return one real scalar",
        ),
        ({"loss": lambda params, x, y: None}, "loss returns None; return one real scalar"),
        ({"loss": lambda params, x, y: y}, "loss returns .*int32.*; return one real scalar"),
        (
            {"batch_loss": lambda params, x, y: x @ params["a"]},
            r"batch_loss returns .*\(2,\).*; return one real scalar",
        ),
        ({"metrics": None}, "metrics is missing; give a function"),
    ],
)
def test_functions_that_cannot_be_trained_are_refused(changes, message):
    own()
    with pytest.raises(ValueError, match=message):
        own(**changes)


def masked(array, place=0):
    """The array with one masked entry."""
    array = np.array(array)
    return np.ma.array(array, mask=np.arange(array.size).reshape(array.shape) == place)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("train x", lambda: make(train=(masked(X), Y))),
        ("train x", lambda: make(train=(masked((9 * X).astype(int)), Y), test=(Y[:, None] + X, Y))),
        ("train x", lambda: make(train=([masked(row) for row in X], Y))),
        ("train y", lambda: make(train=(X, masked(Y)))),
        ("test x", lambda: make(test=(masked(X), Y))),
        ("x", lambda: own(x=masked(X))),
        ("y", lambda: own(y=masked(Y))),
        ("evaluation", lambda: own(evaluation={"x": masked(X)})),
        ("indices", lambda: own(partition=SHARDS._replace(indices=masked(SHARDS.indices)))),
        ("counts", lambda: own(partition=SHARDS._replace(counts=masked(SHARDS.counts)))),
        ("labels", lambda: partition.dirichlet(masked(Y), 2, 1.0, 0)),
        ("x", lambda: split.split(masked(X), Y, 0.5, 0)),
        ("y of own.npz", lambda: canonical.check_arrays("own.npz", {"x": X, "y": masked(Y)})),
        ("mixing", lambda: plan.make(make_config(), masked(np.full((3, 3), 1 / 3)))),
        (
            "counts",
            lambda: plan.make(make_config(), np.full((3, 3), 1 / 3), counts=masked([4] * 3)),
        ),
        ("covariance", lambda: noise.Covariance(masked(np.eye(3)), "mine")),
        ("train", lambda: split.standardise(masked(X), X)),
        ("values", lambda: fusion.costs_of(np.ones((2, 1, 1)), masked([[1.0], [3.0]]), 0.0, [2.0])),
    ],
)
def test_masked_entries_are_refused(name, make):
    """A plain array of them would hold the values that were masked."""
    with pytest.raises(ValueError, match=rf"^{name} is a masked array .*; leave out or fill these"):
        make()


def test_masked_arrays_without_masked_entries_are_arrays():
    first = make()
    other = make(train=(np.ma.array(X), np.ma.array(Y)))
    assert first.fingerprint() == other.fingerprint()


def test_own_records_that_are_not_those_asked_for_are_refused():
    shards = partition.iid(12, 3, 0)
    load = lambda rows: (np.ones((len(rows) - 1, 2)), np.ones(len(rows) - 1))  # noqa: E731
    test = np.ones((2, 2)), np.ones(2)
    with pytest.raises(ValueError, match="x has 11 records, the agents .* have 12; give those of"):
        supervised(Linear(), "logistic", load, test, shards)
    single = dataclasses.replace(quadratics(4), local=True)
    assert single.fingerprint() != quadratics(4).fingerprint()
    assert single.fingerprint() == dataclasses.replace(single, x=single.x + 1).fingerprint()


def classifier(test=None, **options):
    """Two agents, 24 records of three classes."""
    random = np.random.default_rng(0)
    x = random.normal(size=(24, 4))
    y = np.arange(24) % 3
    shards = partition.iid(24, 2, seed=0)
    test = test or (x, y)
    return supervised(MLP((), 3), "cross_entropy", (x, y), test, shards, **options)


@pytest.mark.slow
@pytest.mark.parametrize("eval_batch", [None, 7])
def test_more_metrics_are_means_over_agents(eval_batch):
    task = classifier(metrics=("auc", "f1", "balanced_accuracy"), eval_batch=eval_batch)
    keys = jax.random.split(jax.random.key(0), 2)
    models = jax.vmap(task.init)(keys)
    metrics = task.metrics(models, task.evaluation)
    plain = classifier().metrics
    single = classifier(metrics="auc", eval_batch=eval_batch).metrics(models, task.evaluation)
    assert single["test_auc"] == metrics["test_auc"]
    outputs = jax.vmap(task.predict, in_axes=(0, None))(models, task.evaluation[0])
    for name in ("auc", "f1", "balanced_accuracy"):
        each = [getattr(losses, name)(output, task.evaluation[1]) for output in outputs]
        assert metrics.pop(f"test_{name}") == pytest.approx(np.mean(each), abs=1e-6)
    expected = jax.tree.map(float, plain(models, task.evaluation))
    assert metrics == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_weights_of_classes_are_factors_of_training_loss():
    plain = classifier()
    task = classifier(class_weights=(1.0, 2.0, 0.5))
    params = task.init(jax.random.key(0))
    for x, y, factor in zip(task.x, task.y, (1.0, 2.0, 0.5), strict=False):
        assert task.loss(params, x, y) == pytest.approx(factor * float(plain.loss(params, x, y)))
    function = jax.vmap(task.loss, in_axes=(None, 0, 0))(params, task.x, task.y)
    mean = float(np.mean(function))
    assert task.batch_loss(params, task.x, task.y) == pytest.approx(mean, rel=1e-6)
    models = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), params)
    measured = [case.metrics(models, task.evaluation)["test_loss"] for case in (task, plain)]
    assert measured[0] == measured[1]
    # Records are clipped after they are weighed: by their own gradients, and by norms of layers.
    clip = lambda norms: jnp.minimum(1.0, 0.1 / norms)  # noqa: E731
    summed = task.weighted(params, task.x, task.y, clip)
    gradients = []
    for x, y in zip(task.x, task.y, strict=True):
        gradient = ravel_pytree(jax.grad(task.loss)(params, x, y))[0]
        gradients.append(gradient * clip(jnp.linalg.norm(gradient)))
    np.testing.assert_allclose(ravel_pytree(summed)[0], sum(gradients), atol=1e-3)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"metrics": ("roc",)}, "metrics is 'roc'"),
        (
            {"metrics": ("auc",), "test": (np.eye(4), np.ones(4))},
            "metrics has 'auc' and test y one class, 1; give test records of two classes",
        ),
        ({"class_weights": (1.0, 2.0)}, "class_weights is (1.0, 2.0); give 3 numbers"),
        ({"class_weights": (1.0, 0.0, 1.0)}, "numbers above 0"),
    ],
)
def test_metrics_and_weights_that_are_none_are_refused(options, match):
    with pytest.raises(ValueError, match=re.escape(match)):
        classifier(**options)


def test_problem_that_went_to_another_process_runs():
    sent = cloudpickle.loads(cloudpickle.dumps(make()))
    shapes = jax.eval_shape(sent.init, jax.random.key(0))
    assert jax.tree.structure(shapes) == jax.tree.structure(make().init(jax.random.key(0)))
