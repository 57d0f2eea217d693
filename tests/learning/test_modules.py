"""Flax modules as problems: integer inputs, and evaluation in batches."""

import dataclasses

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.data import partition
from dpjax.learning import examples
from dpjax.learning.supervised import _records_at_once, supervised
from dpjax.models import layer_norms, losses, mlp
from dpjax.models.linear import Linear
from dpjax.plans import plan
from tests.support import cut_and_resumed, make_config, run, with_norms

AGENTS = 6
RECORDS = 12
LENGTH = 4
WORDS = 11


class Reader(nn.Module):
    """Classes of short texts: an embedding takes integers alone."""

    @nn.compact
    def __call__(self, tokens):
        """Return the logits."""
        return nn.Dense(3)(nn.Embed(WORDS, 5)(tokens).mean(axis=-2))


def texts(kind=np.int64, seed=0):
    random = np.random.default_rng(seed)
    tokens = random.integers(0, WORDS, size=(AGENTS * RECORDS, LENGTH)).astype(kind)
    return tokens, tokens[:, 0] % 3


def reading(kind=np.int64, seed=0, **options):
    x, y = texts(kind, seed)
    shards = partition.iid(len(x), AGENTS, 0)
    return supervised(Reader(), "cross_entropy", (x, y), (x[:20], y[:20]), shards, **options)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize(
    "relation", [pytest.param("replace_agent", marks=pytest.mark.slow), "zero_out_record"]
)
def test_tokens_are_learned_from_and_stopped_run_goes_on(tmp_path, network, relation):
    task = reading()
    assert task.x.dtype == np.int32 and task.evaluation[0].dtype == np.int32
    assert jax.eval_shape(task.init, jax.random.key(0))["params"]["Embed_0"]["embedding"].shape
    training_plan = plan.make(make_config(relation=relation, rounds=6, clip_norm=0.5), network)
    options = {"seeds": [0], "eval_every": 2, "checkpoint_seconds": 0}
    straight = run(training_plan, task, **options)
    assert np.isfinite(straight.metrics["test_loss"]).all()
    (stated,) = straight.guarantees
    assert stated.replace(sum_rounding=0.0, custom=()) == training_plan.guarantee
    assert stated.custom == ("Reader",)
    assert (stated.sum_rounding > 0) == (relation == "zero_out_record")
    resumed = cut_and_resumed(training_plan, task, tmp_path / "c", **options)
    for a, b in zip(jax.tree.leaves(straight.params), jax.tree.leaves(resumed.params), strict=True):
        np.testing.assert_array_equal(a, b)
    other = reading(seed=1)
    with pytest.raises(ValueError, match="differs in data"):
        run(training_plan, other, checkpoint=tmp_path / "c", **options)


@pytest.mark.gate(1)
@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_one_text_moves_its_agents_sum_by_no_more_than_stated(clipping):
    from dpjax.learning.query import RecordQuery

    task = reading()
    models = jax.tree.map(lambda leaf: jnp.stack([leaf] * AGENTS), task.init(jax.random.key(1)))
    x = jnp.asarray(task.x).reshape(AGENTS, RECORDS, LENGTH)
    y = jnp.asarray(task.y).reshape(AGENTS, RECORDS)
    changed = x.at[2, 0].set((x[2, 0] + 3) % WORDS), y.at[2, 0].set((y[2, 0] + 1) % 3), None

    def moved(clip_norm):
        query = RecordQuery(task.loss, task.weighted, clip_norm, clipping, None)
        answer = jax.jit(lambda batch: query(models, batch).total)
        first = answer((x, y, None))
        second = answer(changed)
        squares = [
            ((a - b) ** 2).reshape(AGENTS, -1).sum(1)
            for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
        ]
        return np.sqrt(sum(squares))

    norms = moved(0.05)
    assert 0 < norms[2] <= 0.1 * (1 + 1e-6) and np.delete(norms, 2).max() == 0
    # The broken twin, which clips at twice the norm.
    assert moved(0.1)[2] > 0.1


@pytest.mark.parametrize(
    ("kind", "selection"),
    [
        (np.uint8, np.uint8), (np.int16, np.int16), (np.int64, np.int32), (np.uint32, np.int32),
        (np.float64, np.float32), (np.float32, np.float32), (bool, np.float32),
    ],
)  # fmt: skip
def test_integers_stay_and_other_numbers_are_float32(kind, selection):
    assert examples.as_inputs(examples.as_numbers("x", np.ones((3, 2), kind))).dtype == selection


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.array([[2**31]]), "train x reaches 2147483648, beyond what int32"),
        (np.zeros((0, 2), int), r"shape \(0, 2\); give at least one entry"),
        (np.array([["a"]]), "train x is not an array of numbers"),
    ],
)
def test_integers_that_no_run_can_hold(x, message):
    with pytest.raises(ValueError, match=message):
        examples.as_numbers("train x", x)


def test_test_data_of_another_kind_are_refused():
    x, y = texts()
    with pytest.raises(ValueError, match="is float32, train x of .* and int32"):
        supervised(
            Reader(), "cross_entropy", (x, y), (x + 0.5, y), partition.iid(len(x), AGENTS, 0)
        )


@pytest.mark.parametrize("kind", [np.uint8, np.int32])
def test_fast_norms_of_integers_do_not_wrap_around(kind):
    """200 squared is 64 in the eight bits of an image: norms of it would be far too short."""
    model = mlp.MLP(hidden=(3,), outputs=2)
    limit = 70_000 if kind == np.int32 else 255
    x = np.random.default_rng(0).integers(0, limit, size=(5, 4)).astype(kind)
    y = jnp.array([0, 1, 0, 1, 1])
    params = jax.tree.map(
        lambda leaf: leaf / limit, model.init(jax.random.key(0), jnp.zeros((1, 4)))
    )

    def loss(params, x, y):
        return losses.cross_entropy(model.apply(params, x[None])[0], y)

    by_hand = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))
    each = by_hand(params, jnp.asarray(x, jnp.float32), y)
    squares = [jnp.sum(leaf.reshape(5, -1) ** 2, axis=1) for leaf in jax.tree.leaves(each)]
    gradients = layer_norms.Gradients(model.apply, losses.cross_entropy)
    _, norms = with_norms(gradients, params, x, y, jnp.ones_like)
    np.testing.assert_allclose(norms, jnp.sqrt(sum(squares)), rtol=1e-5)


def measured(task, agents=AGENTS):
    params = jax.vmap(task.init)(jax.random.split(jax.random.key(3), agents))
    return jax.jit(task.metrics)(params, task.evaluation)


@pytest.mark.parametrize("batch", [1, 7, 20])
def test_evaluation_in_batches_is_whole_evaluation(batch):
    """Every record counts once, those of a short last batch too."""
    complete = measured(reading())
    parts = measured(reading(eval_batch=batch))
    assert set(complete) == set(parts) == {"test_loss", "test_accuracy"}
    for name in complete:
        np.testing.assert_allclose(parts[name], complete[name], rtol=2e-6)


@pytest.mark.mutant
def test_test_set_that_batch_repeats_or_drops_is_noticed():
    """The broken twins of the test above: the mean of the batches' means, and whole batches."""
    x, y = texts()
    pieces = [(0, 7), (7, 14), (14, 20)]

    def of(part):
        shards = partition.iid(len(x), AGENTS, 0)
        problem = supervised(
            Reader(), "cross_entropy", (x, y), (x[part[0] : part[1]], y[part[0] : part[1]]), shards
        )
        return float(measured(problem)["test_loss"])

    complete = float(measured(reading())["test_loss"])
    assert abs(np.mean([of(part) for part in pieces]) / complete - 1) > 1e-4
    assert abs(of((0, 14)) / complete - 1) > 1e-4


def test_layers_of_all_agents_and_records_are_not_held_together(monkeypatch):
    """By default from a size on; below, the whole evaluation is the program that it was."""
    big, small = (
        jax.jit(task.metrics).lower(
            jax.eval_shape(jax.vmap(task.init), jax.random.split(jax.random.key(0), 50)),
            (jnp.zeros((4000, LENGTH), jnp.int32), jnp.zeros(4000, jnp.int32)),
        ).compile().memory_analysis().temp_size_in_bytes
        for task in (reading(), reading(eval_batch=40))
    )  # fmt: skip
    assert small < big / 20
    x = np.zeros((100, LENGTH), np.int32)
    assert _records_at_once(Reader(), x, AGENTS) is None
    monkeypatch.setattr("dpjax.learning.supervised._EVALUATED", 5_000)
    assert 1 <= _records_at_once(Reader(), x, AGENTS) < 100
    assert _records_at_once(Linear(), np.zeros((100, 30), np.float32), AGENTS) is None


class Tied(nn.Module):
    """Words as outputs too: the embedding is turned round."""

    @nn.compact
    def __call__(self, tokens):
        """Return the logits."""
        words = nn.Embed(5_000, 64)
        return words.attend(words(tokens).mean(axis=-2))


class Half(nn.Module):
    """Weights of 32 bits, cast before they are used."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        return nn.Dense(3, dtype=jnp.bfloat16)(nn.Dense(2_000, dtype=jnp.bfloat16)(x))


class Branching(nn.Module):
    """Another program for another number of records."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        return nn.Dense(3)(jnp.stack([nn.tanh(item) for item in x]))


@pytest.mark.parametrize(
    ("model", "shape", "kind", "widest"),
    [
        (Tied(), (16,), np.int32, 5_000),  # its logits; 16 words of 64 numbers are fewer
        (Half(), (1_000,), np.float32, 2_000),
        (Reader(), (LENGTH,), np.int32, LENGTH * 5),
    ],
)
def test_only_what_grows_with_records_counts(monkeypatch, model, shape, kind, widest):
    """Weights that are turned round or cast do not: 320,000 and 2,000,000 numbers here."""
    monkeypatch.setattr("dpjax.learning.supervised._EVALUATED", 12 * widest * AGENTS)
    assert _records_at_once(model, np.zeros((12, *shape), kind), AGENTS) is None
    assert _records_at_once(model, np.zeros((13, *shape), kind), AGENTS) == 12


def test_programs_that_cannot_be_compared_are_bounded(monkeypatch):
    monkeypatch.setattr("dpjax.learning.supervised._EVALUATED", 10 * AGENTS * 40)
    assert 1 <= _records_at_once(Branching(), np.zeros((100, 40), np.float32), AGENTS) <= 10


@pytest.mark.parametrize("batch", [0, 2.5, True])
def test_no_number_of_records(batch):
    with pytest.raises(ValueError, match="eval_batch is"):
        reading(eval_batch=batch)


@pytest.mark.slow
def test_run_measures_in_batches(network):
    training_plan = plan.make(make_config(rounds=4), network)
    complete, parts = (
        run(training_plan, reading(**case), seeds=[0]) for case in ({}, {"eval_batch": 6})
    )
    for name, values in complete.metrics.items():
        np.testing.assert_allclose(parts.metrics[name], values, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(complete.params), jax.tree.leaves(parts.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert dataclasses.replace(reading()).fingerprint() == reading(eval_batch=6).fingerprint()


class Coupled(nn.Module):
    """Records look at each other, and running statistics are kept."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        return nn.Dense(2)(nn.BatchNorm(use_running_average=False)(x))


class Dropping(nn.Module):
    """Random keys are asked for."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=False)(x))


class Telling(nn.Module):
    """More than one array comes out."""

    @nn.compact
    def __call__(self, x):
        """Return logits, and what they were made of."""
        return nn.Dense(2)(x), x


@pytest.mark.parametrize(
    ("model", "text"), [(Coupled(), "batch_stats"), (Dropping(), "PRNG"), (Telling(), "tuple")]
)
def test_models_of_more_than_parameters_and_examples_are_refused(model, text):
    x = np.eye(4, dtype=np.float32)
    y = np.arange(4) % 2
    shards = partition.iid(4, 2, 0)
    with pytest.raises(ValueError, match=f"model is {type(model).__name__}, .*{text}.*GroupNorm"):
        supervised(model, "cross_entropy", (x, y), (x, y), shards)


def test_modules_of_nnx_are_told_their_bridge():
    class Scores(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x):
            return self.layer(x)[..., 0]

    x = np.eye(12, 3)
    y = np.tile([-1, 1], 6)

    def task(model):
        return supervised(model, "logistic", (x, y), (x, y), partition.iid(12, 3, 0))

    for model in (Scores, Scores(nnx.Rngs(0))):
        with pytest.raises(ValueError, match=r"model is Scores, .*; give nnx.bridge.to_linen\(Sco"):
            task(model)
    assert task(nnx.bridge.to_linen(Scores)).agents == 3
    with pytest.raises(ValueError, match="model is Linear, which fails .* not the Module class"):
        task(Linear)
