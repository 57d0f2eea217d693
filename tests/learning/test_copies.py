"""Variants of records: one gradient a record before the clip, keys that everybody may know."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.data import partition
from dpjax.engine import host, inputs, keys
from dpjax.engine.run import run
from dpjax.engine.step import Statics
from dpjax.learning.query import AgentQuery, Augmentation, Keyed, RecordQuery, UngatheredBatch
from dpjax.learning.samplers import Cyclic, Full, Poisson
from dpjax.learning.supervised import supervised
from dpjax.models.linear import Linear
from dpjax.plans import plan
from dpjax.topology import graphs, mixing
from dpjax.transforms import clipping
from tests.support import cut_and_resumed, make_config, make_problem

CLIP = 0.3
AGENTS = 4
RECORDS = 9
FEATURES = 3
RING = mixing.metropolis_hastings(graphs.ring(AGENTS))
RNG = np.random.default_rng(2)
X = RNG.normal(size=(AGENTS * RECORDS, FEATURES)).astype(np.float32)
Y = np.sign(X[:, 0] + RNG.normal(size=len(X))).astype(np.float32)
ROUND_KEY = jax.random.key(5)
MODELS = {"w": jnp.asarray(RNG.normal(size=(2, FEATURES)), jnp.float32)}
ROWS = np.array([[3, 0, 7, 1], [11, 9, 17, 12]])
PADDING = jnp.array([[False, False, False, True], [False, True, False, False]])


def jitter(key, x):
    return x * (1 + jax.random.normal(key, x.shape, x.dtype))


def loss(params, x, y):
    return jnp.log1p(jnp.exp(-y * (x @ params["w"])))


def make(**options):
    shards = partition.iid(len(X), AGENTS, 0)
    return supervised(Linear(), "logistic", (X, Y), (X, Y), shards, **options)


def words(rows):
    """Keys of records by the rule that is documented, one at a time."""
    each = [jax.random.key_data(jax.random.fold_in(ROUND_KEY, int(row))) for row in rows.ravel()]
    return jnp.stack(each).reshape(*rows.shape, 2)


def batch(padding=PADDING):
    return Keyed(jnp.asarray(X[ROWS]), words(ROWS)), jnp.asarray(Y[ROWS]), padding


def variants(row, number):
    key = jax.random.fold_in(ROUND_KEY, row)
    return [jitter(jax.random.fold_in(key, k), jnp.asarray(X[row])) for k in range(number)]


gradient = jax.jit(jax.grad(loss))


def loops(number, padding):
    """Each agent's gradients of its records' mean losses over variants, one after the other."""
    for agent, rows in enumerate(ROWS):
        params = {"w": MODELS["w"][agent]}
        yield [
            sum(gradient(params, x, Y[row])["w"] for x in variants(row, number)) / number
            for place, row in enumerate(rows)
            if padding is None or not padding[agent, place]
        ]


def clipped(gradient):
    return gradient * min(1, CLIP / np.linalg.norm(gradient))


@pytest.mark.parametrize("number", [1, 4])
def test_records_gradient_is_mean_over_its_variants_and_then_clipped(number):
    query = RecordQuery(loss, None, CLIP, "flat", None, Augmentation(jitter, number))
    total = jax.jit(query)(MODELS, batch()).total["w"]
    expected = [sum(map(clipped, gradients)) for gradients in loops(number, PADDING)]
    np.testing.assert_allclose(total, expected, rtol=2e-5, atol=1e-6)
    inner = RecordQuery(loss, None, CLIP, "flat", 3, Augmentation(jitter, number))
    np.testing.assert_allclose(
        jax.jit(inner)(MODELS, batch()).total["w"], expected, rtol=2e-5, atol=1e-6
    )


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("padding", [None, PADDING])
def test_agents_gradient_is_mean_over_all_variants(complete, padding):
    def batch_loss(params, x, y):
        return jnp.mean(jax.vmap(loss, in_axes=(None, 0, 0))(params, x, y))

    query = AgentQuery(
        loss, batch_loss if complete else None, CLIP, "flat", Augmentation(jitter, 3)
    )
    total = jax.jit(query)(MODELS, batch(padding)).total["w"]
    expected = [clipped(np.mean(gradients, axis=0)) for gradients in loops(3, padding)]
    np.testing.assert_allclose(total, expected, rtol=2e-5, atol=1e-6)


def moved(summed, number):
    """How far a sum moves, at most, when one record is zeroed out, over records and sizes."""
    results = []
    for scale in (1, 1e3):
        x = Keyed(jnp.asarray(scale * X[:6]), words(np.arange(6)))
        y = jnp.asarray(Y[:6])
        complete = summed(x, y, jnp.zeros(6, bool), number)
        for row in range(6):
            reduced = summed(x, y, jnp.arange(6) == row, number)
            results.append(np.linalg.norm(np.asarray(complete - reduced, np.float64)))
    return max(results)


@functools.partial(jax.jit, static_argnums=3)
def by_query(x, y, padding, number):
    query = RecordQuery(loss, None, CLIP, "flat", None, Augmentation(jitter, number))
    models = {"w": jnp.zeros((1, FEATURES))}
    one = (Keyed(x.x[None], x.words[None]), y[None], padding[None])
    return query(models, one).total["w"][0]


@functools.partial(jax.jit, static_argnums=3)
def by_records(x, y, padding, number):
    """The broken twin: every variant is clipped as if it were a record."""
    spread, y, padding = Augmentation(jitter, number).spread(x, y, padding)
    total = clipping.per_example(loss, CLIP)
    return total({"w": jnp.zeros(FEATURES)}, spread, y, padding)["w"]


@pytest.mark.mutant
@pytest.mark.parametrize("number", [1, 8])
def test_one_record_moves_sum_by_clip_norm_whatever_copies(number):
    assert 0.5 * CLIP < moved(by_query, number) <= CLIP * (1 + 1e-6)
    twin = moved(by_records, number)
    assert twin > 1.5 * CLIP if number > 1 else twin <= CLIP * (1 + 1e-6)


def prepared(one, task):
    return Statics.of((one,), (task,)), inputs.stacked_data((task,))


def drawn(sampler, task, noise=0, relation="zero_out_record", round=2):
    config = make_config(relation=relation, sampler=sampler, rounds=6)
    counts = task.partition.counts if sampler.needs_counts else None
    statics, data = prepared(plan.make(config, RING, counts=counts), task)
    batch_key = keys.derive(0, "batches")
    noise_key = keys.derive(noise, "noise")
    secret = statics.secret_batch_key(noise_key)
    return statics, jax.jit(statics.batch)(data, batch_key, secret, jnp.int32(round))


def seen(result):
    """Row -> key words, of a gathered batch."""
    x, _, padding = result
    places = zip(np.asarray(x.x), np.asarray(x.words), np.asarray(padding), strict=True)
    reference = {tuple(row): i for i, row in enumerate(X)}
    return {
        reference[tuple(record)]: tuple(word)
        for agent in places
        for record, word, empty in zip(*agent, strict=True)
        if not empty
    }


def test_keys_follow_from_public_key_round_and_row_alone():
    task = make(augment=jitter, augmentation_multiplicity=2)
    complete = seen(drawn(Full(), task)[1])
    assert set(complete) == set(range(len(X))) and len(set(complete.values())) == len(X)
    dealt = seen(drawn(Cyclic(2, 3, 3), task)[1])
    assert dealt and dealt.items() <= complete.items()
    assert not set(complete.values()) & set(seen(drawn(Full(), task, round=3)[1]).values())
    poisson = [drawn(Poisson(3.0, 2), task, noise)[1] for noise in (0, 1)]
    # Batches are the noise key's, and secret; variants are not.
    assert not np.array_equal(poisson[0].rows, poisson[1].rows)
    assert poisson[0].key == poisson[1].key
    again = jax.random.key_data(jax.random.fold_in(poisson[0].key, 7))
    assert tuple(map(int, again)) == tuple(map(int, complete[7]))


@pytest.mark.slow
def test_passes_make_same_variants():
    task = make(augment=jitter, augmentation_multiplicity=2)
    statics, batch = drawn(Poisson(5.0, 2), task)
    assert statics.query.capacity == 2 and isinstance(batch, UngatheredBatch)
    models = jax.vmap(task.init)(jax.random.split(jax.random.key(0), AGENTS))
    at_once = dataclasses.replace(statics.query, capacity=batch.rows.shape[1])
    complete = at_once(models, batch).total
    for a, b in zip(
        *map(jax.tree.leaves, (complete, statics.query(models, batch).total)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def test_runs_without_augmentation_have_no_keys():
    statics, result = drawn(Full(), make())
    assert statics.query.augmentation is None and not isinstance(result[0], Keyed)
    assert drawn(Poisson(3.0, 2), make())[1].key is None


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize(
    "relation", [pytest.param("replace_agent", marks=pytest.mark.slow), "zero_out_record"]
)
def test_resumed_and_on_host_run_makes_same_variants(tmp_path, relation):
    task = make(augment=jitter, augmentation_multiplicity=3)
    sampler = Poisson(4.0, 3) if relation == "zero_out_record" else None
    changes = {} if sampler is None else {"sampler": sampler}
    one = plan.make(
        make_config(relation=relation, rounds=6, **changes), RING,
        counts=None if sampler is None else task.partition.counts,
    )  # fmt: skip
    options = {"seeds": [0], "eval_every": 2}
    complete = run(one, task, **options)
    resumed = cut_and_resumed(one, task, tmp_path, **options)
    loop = run(one, task, transport=host.local_transport(one), **options)
    plain = run(one, make(), **options)
    for a, b, c, d in zip(
        *(jax.tree.leaves(case.params) for case in (complete, resumed, loop, plain)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
        # A loop on the host is another program, whose gradients may round otherwise.
        np.testing.assert_allclose(a, c, rtol=1e-6)
        assert not np.allclose(a, d, rtol=1e-3)


def test_what_is_no_augmentation_is_refused():
    for options, text in (
        ({"augmentation_multiplicity": 2}, "augmentation_multiplicity is 2 without augment"),
        ({"augment": jitter, "augmentation_multiplicity": 0}, "augmentation_multiplicity is 0"),
        ({"augment": 3}, "augment is 3, which fails on a record of .* callable"),
        ({"augment": lambda key, x: x[:2]}, r"augment turns a record of \(3,\)"),
        ({"augment": lambda key, x: x.astype(int)}, "augment turns a record"),
        ({"augment": lambda x: x}, "takes 1 positional argument"),
        ({"augment": lambda key, x: x.nothing}, "augment is .*; give a function of a key and of"),
    ):
        with pytest.raises(ValueError, match=text):
            make(**options)
    with pytest.raises(ValueError, match="weighted is given with an augmentation"):
        RecordQuery(loss, lambda *_: None, CLIP, "flat", None, Augmentation(jitter, 2))
    with pytest.raises(ValueError, match="problem differs in augmentation_multiplicity"):
        run(
            plan.make(make_config(), RING),
            [make(augment=jitter, augmentation_multiplicity=number) for number in (1, 2)],
            seeds=[0, 1],
        )
    assert make_problem(AGENTS).augmentation_multiplicity == 1
