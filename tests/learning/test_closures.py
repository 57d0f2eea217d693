"""Functions of one record that hold others, whose clip bounds nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.data import partition
from dpjax.learning import query
from dpjax.learning.supervised import supervised
from dpjax.models.linear import Linear
from dpjax.transforms import clipping

RECORDS = 20
CLIP = 0.1
X = np.random.default_rng(0).normal(size=(RECORDS, 4)).astype(np.float32)
Y = np.where(X[:, 0] > 0, 1, -1)


def mixing(x):
    """Each record with another one of ``x``."""
    held = jnp.asarray(x)

    def augment(key, record):
        return (record + held[jax.random.randint(key, (), 0, len(held))]) / 2

    return augment


def made(augment=None):
    shards = partition.iid(RECORDS, 2, 0)
    return supervised(Linear(), "logistic", (X, Y), (X, Y), shards, augment=augment)


def moved(augment):
    """How far the sum of clipped gradients moves, over the clip norm, as one record is emptied."""
    single = made()
    params = jax.tree.map(lambda leaf: leaf + 0.1, single.init(jax.random.key(0)))
    fewer = X.copy()
    fewer[3] = 0
    sums = []
    for x in (X, fewer):
        loss = query.Augmentation(augment(x), 2).averaged(single.loss)
        records = query.keyed(jax.random.key(5), jnp.asarray(x), jnp.arange(RECORDS))
        padding = jnp.arange(RECORDS) == 3 if x is fewer else jnp.zeros(RECORDS, bool)
        total = jax.jit(clipping.per_example(loss, CLIP))(params, records, Y, padding)
        sums.append(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(total)]))
    return np.linalg.norm(sums[0] - sums[1]) / CLIP


def test_what_mixes_records_is_not_bounded_by_clip():
    assert moved(lambda x: lambda key, record: -record) <= 1
    assert moved(lambda x: lambda key, record: record - 4 * jnp.asarray(x)[3]) > 1.5


@pytest.mark.parametrize(
    "held", [X, X[:7], X.astype(np.float64), np.vstack([X[:3], np.eye(4)[:3]])]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_augmentation_that_holds_records_is_refused(held, compiled):
    augment = jax.jit(mixing(held)) if compiled else mixing(held)
    with pytest.raises(ValueError, match="augment holds an array .* of the training records"):
        made(augment)


@pytest.mark.parametrize("held", [np.eye(4), np.zeros((20, 4)), X + 1, X[:, :2] @ np.ones((2, 4))])
def test_public_arrays_are_no_records(held):
    made(mixing(held.astype(np.float32)))


def test_loss_that_holds_records_is_refused():
    single = made()

    def near(params, x, y):
        return single.loss(params, x, y) + jnp.sum((jnp.asarray(X) - x) ** 2)

    with pytest.raises(ValueError, match=r"loss holds an array \(20, 4\)"):
        dataclasses.replace(single, weighted=None, loss=near)
    twice = dataclasses.replace(
        single, weighted=None, loss=lambda p, x, y: 2 * single.loss(p, x, y)
    )
    assert twice.agents == 2
