"""Numbers that a run's 32 bits cannot hold are refused, with where they stand."""

import numpy as np
import pytest

from dpjax.data import canonical, partition, split
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.models.linear import Linear


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([3_000_000_000, 0], "labels reach 3000000000, beyond the 2147483647"),
        ([1.5e300, 0.5], r"a label reaches 1.5e\+300"),
    ],
)
def test_of_labels(labels, message):
    with pytest.raises(ValueError, match=message):
        canonical.as_labels(np.array(labels))


def problem_with(loss="cross_entropy", **changes):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 3))
    y = np.array([-1, 1] * 4)
    parts = {"x": x, "y": y, "x_test": x, "y_test": y} | changes
    return supervised(
        Linear(),
        loss,
        (parts["x"], parts["y"]),
        (parts["x_test"], parts["y_test"]),
        partition.iid(8, 2, seed=0),
    )


@pytest.mark.parametrize(
    ("loss", "changes", "message"),
    [
        (
            "logistic",
            {"x": np.full((8, 3), 1e300)},
            r"train x reaches 1e\+300, beyond what float32",
        ),
        ("logistic", {"x_test": np.full((8, 3), -1e39)}, r"test x reaches -1e\+39"),
        (
            "logistic",
            {"x_test": np.ones((8, 4))},
            r"test x has records of shape \(4,\) and is float32, train x",
        ),
        ("squared", {"y": np.full(8, 1e39)}, r"train y reaches 1e\+39"),
        (
            "cross_entropy",
            {"y": np.full(8, 2.0**32 + 1)},
            "train y holds .4294967297.*the cross_entropy loss takes classes",
        ),
    ],
)
def test_of_problem(loss, changes, message):
    problem_with("logistic")
    with pytest.raises(ValueError, match=message):
        problem_with(loss, **changes)


def test_of_problem_of_ones_own():
    task = problem_with("logistic")
    for name, array in (("x", np.full((8, 3), 1e39)), ("y", np.arange(8) + 2**31)):
        with pytest.raises(ValueError, match=f"{name} reaches"):
            Problem(
                task.init, task.loss, task.metrics, **({"x": task.x, "y": task.y} | {name: array}),
                partition=task.partition, evaluation=None,
            )  # fmt: skip


def test_standardising_does_not_overflow():
    x = np.array([[1.0], [2.0], [4.0]])
    first, second = split.standardise(x * 1e140, x * 1e140)
    assert np.isfinite(first).all() and abs(first.std() - 1) < 1e-12
    for train, test, message in (
        (x * 1e160, x, r"train or test reaches 4e\+160"),
        (x, x * 1e160, "train or test reaches"),
        (x, np.ones((3, 2)), "test has 2 columns, train 1"),
        (np.array([[1.0], [np.nan]]), x, "train holds nan"),
    ):
        with pytest.raises(ValueError, match=message):
            split.standardise(train, test)


def test_labels_keep_their_kind():
    assert canonical.as_labels(np.array([1.0, 2.0**31 - 1])).dtype == np.int32
    assert canonical.as_labels(np.array([0.5, 3e9])).dtype == np.float32
