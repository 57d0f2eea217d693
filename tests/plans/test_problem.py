"""Data that would fail or mislead later is refused when the problem is made."""

import numpy as np
import pytest

from dpjax.data import partition
from dpjax.models.linear import Linear
from dpjax.models.mlp import MLP
from dpjax.plans import problem

X = np.random.default_rng(0).normal(size=(12, 3))
Y = np.tile([0, 1, 2], 4)
SHARDS = partition.iid(12, 3, 0)


def make(model=None, loss="cross_entropy", train=(X, Y), test=(X, Y), shards=SHARDS):
    return problem.supervised(model or MLP(hidden=(4,), outputs=3), loss, train, test, shards)


def test_a_good_problem_and_its_fingerprint():
    made = make()
    assert made.agents == 3 and made.fingerprint() == make().fingerprint()
    assert made.fingerprint() != make(train=(X + 1, Y)).fingerprint()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": (X, Y + 1)}, "y reaches class 3, the model has 3 outputs"),
        ({"train": (X, 7 * Y)}, "y reaches class 14"),
        ({"test": (X, Y + 1)}, "y reaches class 3"),
        ({"train": (X, Y - 1)}, "cross_entropy takes classes 0"),
        ({"train": (X, Y + 0.5)}, "cross_entropy takes classes 0"),
        ({"loss": "hinge"}, "loss is 'hinge'; choose one of logistic"),
        ({"loss": "logistic", "model": Linear()}, "the logistic loss takes -1 and"),
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


@pytest.mark.parametrize(
    ("indices", "counts", "message"),
    [
        ([[0, 0, 1]], [3], "gives record 0 2 times"),
        ([[0, 1], [1, 2]], [2, 2], "gives record 1 2 times"),
        ([[0], [1]], [1, 4], "in rows of 1"),
        ([[0], [1]], [1, 0], "counts go from 0"),
        ([[0.0], [1.0]], [1, 1], "dtypes float64"),
        ([[0], [1]], [1], "shapes"),
        ([[0], [12]], [1, 1], "indices reach 12"),
    ],
)
def test_partitions_that_would_change_the_sensitivity(indices, counts, message):
    shards = partition.Partition(np.asarray(indices), np.asarray(counts))
    with pytest.raises(ValueError, match=message):
        make(shards=shards)


def test_data_cannot_be_changed_after_the_check():
    made = make()
    for array in (made.x, made.y, *made.partition[:2]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_a_problem_prints_its_size_and_no_data():
    shown = repr(problem.quadratics(4))
    assert shown.startswith("Problem('") and "4 agents" in shown and "array" not in shown
