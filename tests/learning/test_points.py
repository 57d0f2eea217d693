"""Gradients at several models in one answer: the combination is clipped, example by example."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.learning.query import AgentQuery, RecordQuery, UngatheredBatch
from dpjax.models import losses
from dpjax.models.layer_norms import Gradients

N = 3
POINTS = 2
B = 5
D = 4
CLIP = 0.5
# What DiSK combines where its gamma is small: not an average, and its weights are above 1.
WEIGHTS = np.array([-1.5, 2.5])
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, B, D))
Y = RNG.normal(size=(N, B))
PADDING = RNG.random((N, B)) < 0.3
MODELS = {"w": RNG.normal(size=(N, POINTS, D)), "b": RNG.normal(size=(N, POINTS))}


def loss(params, x, y):
    return (x @ params["w"] + params["b"] - y) ** 2 / 2


def batch_loss(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2) / 2


def combined(gradients):
    return jax.tree.map(lambda leaf: jnp.tensordot(jnp.asarray(WEIGHTS), leaf, 1), gradients)


def single(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def by_hand(unit, padding=PADDING, x=X, clip=CLIP):
    """Residual times (x, 1) at every point, weighted, clipped, added up: loops over NumPy."""
    total = np.zeros((N, D + 1))
    for i in range(N):
        each = []
        for b in range(B):
            row = np.append(x[i, b], 1.0)
            position = [
                (x[i, b] @ MODELS["w"][i, p] + MODELS["b"][i, p] - Y[i, b]) * row
                for p in range(POINTS)
            ]
            each.append(sum(w * g for w, g in zip(WEIGHTS, position, strict=True)))
        selection = [g for g, skip in zip(each, padding[i], strict=True) if not skip]
        terms = [np.mean(selection, axis=0)] if unit == "agent" else selection
        total[i] = sum(g * min(1.0, clip / np.linalg.norm(g)) for g in terms)
    return total


RECORD = RecordQuery(loss, None, CLIP, "flat", None)
QUERIES = {
    "agent": AgentQuery(loss, None, CLIP, "flat"),
    "record": RECORD,
    "microbatches": dataclasses.replace(RECORD, microbatch=2),
    "passes": dataclasses.replace(RECORD, capacity=2),
}


def asked(query, encode=combined, models=MODELS, x=X, weights=None):
    """The answer at the points, [n, D + 1]; a query in passes gathers its batch itself."""
    arguments = (x, Y, PADDING)
    if getattr(query, "capacity", None):
        # One more place, so that two divides them.
        rows = np.pad(np.arange(N * B).reshape(N, B), ((0, 0), (0, 1)))
        skip = np.pad(PADDING, ((0, 0), (0, 1)), constant_values=True)
        arguments = UngatheredBatch(x.reshape(N * B, D), Y.reshape(-1), rows, skip)
    batch = jax.tree.map(jnp.asarray, arguments)
    batch = jax.tree.map(lambda z: z.astype(jnp.float32) if z.dtype.kind == "f" else z, batch)
    answer = jax.jit(lambda *value: query.points(weights)(*value, encode).total)
    total = answer(single(models), batch)
    return jax.tree.map(np.asarray, total)


@pytest.mark.parametrize("name", QUERIES)
def test_answer_is_clipped_combination(name):
    got = asked(QUERIES[name])
    got = np.concatenate([got["w"], got["b"][:, None]], axis=1)
    np.testing.assert_allclose(got, by_hand(name.split("s")[0]), rtol=2e-5, atol=1e-5)


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", QUERIES)
def test_weights_are_encode_of_their_own(name):
    expected = asked(QUERIES[name])
    got = asked(QUERIES[name], encode=None, weights=WEIGHTS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)

    def halved(gradient):
        return jax.tree.map(lambda leaf: leaf / 2, gradient)

    # An encode gets the sum, and what it returns is clipped: here at twice the norm.
    again = asked(QUERIES[name], encode=halved, weights=2 * WEIGHTS)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), again, expected
    )


class Net(nn.Module):
    """A layer of each kind: formed, by its norm alone, an embedding, and plain parameters."""

    @nn.compact
    def __call__(self, x):
        """Return logits of images and of a token."""
        images = x[..., :48]
        token = x[..., 48].astype(jnp.int32)
        h = nn.tanh(nn.Conv(3, (3, 3))(images.reshape(-1, 4, 4, 3)))
        h = nn.LayerNorm()(h.reshape(len(h), -1))
        return nn.Dense(3)(jnp.concatenate([h, nn.Embed(5, 4)(token)], axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize("per_layer", [pytest.param(False, marks=pytest.mark.slow), True])
def test_model_that_knows_its_norms_gives_same(per_layer):
    """Sums of gradients that are never formed, at two points, against those of single records."""
    model = Net()
    random = np.random.default_rng(1)
    x = np.concatenate([random.normal(size=(1, 6, 48)), random.integers(0, 5, (1, 6, 1))], -1)
    y = random.integers(0, 3, (1, 6))
    x[0, 4, 0] = np.nan
    batch = jnp.asarray(x, jnp.float32), jnp.asarray(y), jnp.asarray([[False] * 5 + [True]])
    keys = jax.random.split(jax.random.key(0), POINTS)
    points = jax.vmap(lambda key: model.init(key, batch[0][0]))(keys)
    points = jax.tree.map(lambda leaf: leaf[None], points)
    own = Gradients(model.apply, losses.cross_entropy)
    kinds = own.chosen(jax.tree.map(lambda leaf: leaf[0, 0], points), batch[0][0])
    assert set(kinds.values()) == {"formed", "norm"}

    def of_record(params, x, y):
        return losses.cross_entropy(model.apply(params, x[None])[0], y)

    slow = RecordQuery(of_record, None, CLIP, "flat", None, per_layer=per_layer)
    fast = dataclasses.replace(slow, weighted=own)
    arguments = [
        jax.jit(lambda *argument, value=case: value.points(WEIGHTS)(*argument).total)(points, batch)
        for case in (slow, fast)
    ]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6),
        arguments[1],
        arguments[0],
    )
    # It is the model's own sum that was asked, and of both points.
    assert fast.points(WEIGHTS).weighted is not None and fast.points().weighted is None
    assert not fast.points(WEIGHTS).one_by_one


def test_faster_mean_loss_is_asked_at_all_points():
    queries = [AgentQuery(loss, fast, CLIP, "flat") for fast in (None, batch_loss)]
    complete = (*(jnp.asarray(part, jnp.float32) for part in (X, Y)), None)
    answers = [
        jax.jit(lambda *value, query=query: query.points()(*value, combined).total)(
            single(MODELS), complete
        )
        for query in queries
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *answers)


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", ["agent", "record", "passes"])
def test_frozen_leaves_are_same_at_all_points(name):
    complete = {**MODELS, "b": np.full((N, POINTS), 0.7)}
    trained = {"w": MODELS["w"], "b": None}
    query = QUERIES[name].merging({"w": None, "b": jnp.float32(0.7)})
    got = asked(query, models=trained)
    assert got["b"] is None
    # Frozen coordinates are no part of the norm: clipped at infinity both agree.
    wide = {"clip_norm": 1e6}
    query = dataclasses.replace(query, **wide)
    other = dataclasses.replace(QUERIES[name], **wide)
    expected = asked(other, models=complete)["w"]
    np.testing.assert_allclose(asked(query, models=trained)["w"], expected, rtol=1e-5, atol=1e-5)


def test_without_encode_stack_is_clipped_as_whole():
    got = asked(dataclasses.replace(RECORD, clip_norm=0.1), encode=None)
    norms = np.sqrt((got["w"] ** 2).sum((1, 2)) + (got["b"] ** 2).sum(1))
    assert got["w"].shape == (N, POINTS, D)
    assert (norms <= 0.1 * (~PADDING).sum(1)).all()


def separately(query):
    """The broken twin: every gradient is clipped, and then they are combined."""

    @dataclasses.dataclass(frozen=True)
    class Separate:
        def points(self, weights=None):
            return self

        def __call__(self, models, batch, encode):
            position = [
                query(jax.tree.map(lambda leaf, p=p: leaf[:, p], models), batch).total
                for p in range(POINTS)
            ]
            return type("Answer", (), {"total": encode_all(position)})

    return Separate()


def encode_all(position):
    return jax.tree.map(lambda *g: sum(w * x for w, x in zip(WEIGHTS, g, strict=True)), *position)


def moved(query):
    """How far a record moves its agent's answer, against padding."""
    other = X.copy()
    where = np.argwhere(~PADDING)[0]
    other[tuple(where)] *= -80
    a = asked(query)
    b = asked(query, x=other)
    return np.sqrt(((a["w"] - b["w"]) ** 2).sum() + ((a["b"] - b["b"]) ** 2).sum())


@pytest.mark.mutant
def test_one_record_moves_answer_by_twice_clip_at_most():
    assert 0 < moved(RECORD) <= 2 * CLIP * (1 + 1e-6)
    assert moved(separately(RECORD)) > 2 * CLIP
