"""Frozen leaves: neither trained, clipped, noised, sent nor copied; and values to start from."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import _programs
from dpjax.algorithms.dsgd import DSGD
from dpjax.data import partition
from dpjax.engine import host, inputs, program
from dpjax.engine.program import Blocks
from dpjax.engine.step import Statics
from dpjax.learning.query import AgentQuery, RecordQuery
from dpjax.learning.supervised import supervised
from dpjax.models.mlp import MLP
from dpjax.plans import plan
from tests.support import make_config, run

AGENTS = 6
RECORDS = 12
FEATURES = 5
HIDDEN = 7
X = np.random.default_rng(0).normal(size=(AGENTS * RECORDS, FEATURES)).astype(np.float32)
Y = np.argmax(X[:, :3], axis=1)
SHARDS = partition.iid(len(X), AGENTS, 0)
KEY = jax.random.key(0)


class Net(nn.Module):
    """A body and a head."""

    @nn.compact
    def __call__(self, x):
        """Return the logits."""
        return nn.Dense(3, name="head")(nn.tanh(nn.Dense(HIDDEN, name="body")(x)))


PARAMS = Net().init(KEY, jnp.zeros((1, FEATURES)))


def body(path):
    return "body" in path


def make(model=None, frozen=body, params=PARAMS, x=X, **options):
    return supervised(
        model or Net(), "cross_entropy", (x, Y), (x[:30], Y[:30]), SHARDS,
        params=params, frozen=frozen, **options,
    )  # fmt: skip


def head_alone():
    """The same task by other means: a head on features that the body has made beforehand."""
    result = PARAMS["params"]["body"]
    features = np.tanh(X @ np.asarray(result["kernel"]) + np.asarray(result["bias"]))
    return make(Net.head(), None, {"params": PARAMS["params"]["head"]}, features)


Net.head = staticmethod(lambda: nn.Dense(3))


def leaves_of(result, *path):
    tree = result.params["params"]
    for name in path:
        tree = tree[name]
    return tree


CONFIGS = {
    "agent": {"relation": "replace_agent"},
    "record": {"relation": "replace_record"},
    "automatic": {"relation": "zero_out_record", "clipping": "automatic"},
    "rounds": {"relation": "zero_out_record", "participation": (2, 2), "design": "mafalda"},
}

SLOW = ("automatic", "rounds")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["agent", *(pytest.param(case, marks=pytest.mark.slow) for case in ("record", *SLOW))],
)
def test_training_head_is_training_it_on_bodys_features(network, name):
    """Gradient, clip, noise and gossip of the head are those of a model that has no body."""
    changes = {"batch_size": 6, "rounds": 4, "clip_norm": 0.2} | CONFIGS[name]
    training_plan = plan.make(make_config(**changes), network)
    frozen, single = (run(training_plan, task, seeds=[0, 1]) for task in (make(), head_alone()))
    for leaf in ("kernel", "bias"):
        np.testing.assert_allclose(
            leaves_of(frozen, "head", leaf), leaves_of(single, leaf), rtol=2e-4, atol=2e-5
        )
        assert leaves_of(frozen, "body", leaf) is None
    for metric, values in single.metrics.items():
        np.testing.assert_allclose(frozen.metrics[metric], values, rtol=2e-4, atol=1e-5)
    # The broken twin: a body whose gradients count in the norm, and that gets noise and moves.
    twin = run(training_plan, make(frozen=None), seeds=[0, 1])
    gap = np.abs(leaves_of(twin, "head", "kernel") - leaves_of(single, "kernel")).max()
    assert gap > 1e-3 and leaves_of(twin, "body", "kernel") is not None


def queries(task, clip_norm=0.1):
    return {
        "agent": AgentQuery(task.loss, task.batch_loss, clip_norm, "flat"),
        "record": RecordQuery(task.loss, task.weighted, clip_norm, "flat", None),
        "record-microbatch": RecordQuery(task.loss, task.weighted, clip_norm, "flat", 2),
    }


def norms_of(tree):
    leaves = [np.asarray(leaf).reshape(AGENTS, -1) for leaf in jax.tree.leaves(tree)]
    return np.sqrt(sum((leaf**2).sum(1) for leaf in leaves))


def batches():
    x = X.reshape(AGENTS, RECORDS, FEATURES)
    y = Y.reshape(AGENTS, RECORDS)
    other = x.copy(), y.copy()
    other[0][2, 0] *= -40
    other[1][2, 0] = (y[2, 0] + 1) % 3
    return (jnp.asarray(x), jnp.asarray(y), None), (*map(jnp.asarray, other), None)


@pytest.mark.parametrize("kind", ["agent", "record", "record-microbatch"])
def test_one_record_moves_trained_leaves_by_no_more_than_stated(kind):
    task = make()
    query = queries(task)[kind].merging(task.frozen)
    models = jax.tree.map(lambda leaf: jnp.stack([2 * leaf] * AGENTS), task.init(KEY))
    answer = jax.jit(lambda models, batch: query(models, batch).total)
    first, second = (answer(models, batch) for batch in batches())
    assert jax.tree.structure(first) == jax.tree.structure(models)
    moved = norms_of(jax.tree.map(lambda a, b: a - b, first, second))
    assert 0 < moved[2] <= 2 * 0.1 * (1 + 1e-6) and np.delete(moved, 2).max() == 0


@pytest.mark.mutant
@pytest.mark.parametrize("kind", ["agent", "record", "record-microbatch"])
def test_norm_is_of_trained_gradients_alone(kind):
    """Each term by hand; a clip that counts frozen gradients, the broken twin, gives less."""
    task, (batch, _) = make(), batches()
    models = jax.tree.map(lambda leaf: jnp.stack([leaf] * AGENTS), task.init(KEY))
    query = queries(task)[kind].merging(task.frozen)
    total = jax.jit(lambda models: query(models, batch).total)(models)["params"]["head"]

    def loss(params, x, y):
        selection = jnp.take_along_axis(
            jax.nn.log_softmax(Net().apply(params, x)), y[:, None], axis=1
        )
        return -jnp.mean(selection)

    x, y, _ = batch
    if kind == "agent":
        x = x[:, None]
        y = y[:, None]
    else:
        x = x[:, :, None]
        y = y[:, :, None]
    per_term = jax.jit(jax.vmap(jax.vmap(jax.grad(loss), (None, 0, 0)), (None, 0, 0)))
    gradients = per_term(PARAMS, x, y)["params"]

    def by_hand(counted):
        leaves = jax.tree.leaves([gradients[name] for name in counted])
        norms = np.sqrt(sum(np.square(leaf).sum(tuple(range(2, leaf.ndim))) for leaf in leaves))
        scales = np.minimum(1, 0.1 / norms)[..., None, None]
        return (np.asarray(gradients["head"]["kernel"]) * scales).sum(1)

    np.testing.assert_allclose(total["kernel"], by_hand(["head"]), rtol=1e-4, atol=1e-6)
    assert np.abs(total["kernel"] - by_hand(["head", "body"])).max() > 1e-3


def constants(task, value):
    """Shapes of arrays that a traced chunk of rounds captures, and of what it computes."""
    statics = Statics.of((value,), (task,))
    arrays = inputs.stacked_arrays((value,))
    data = inputs.stacked_data((task,))
    models = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (1, 1, AGENTS, *leaf.shape)), task.init(KEY)
    )
    keys = jax.random.split(KEY, 1)
    state = program.initial(statics, arrays, models, keys, keys)
    traced = program.advance.trace(statics, arrays, data, state, keys, keys, Blocks(1, 2))
    held = [np.shape(constant) for constant in _programs.constants(traced.jaxpr)]
    results = [
        variable.aval.shape
        for jaxpr, _ in _programs.jaxprs(traced.jaxpr)
        for equation in jaxpr.eqns
        for variable in equation.outvars
    ]
    return held, results


@pytest.mark.gate(1)
@pytest.mark.parametrize("relation", ["replace_agent", "replace_record"])
def test_frozen_leaves_are_arguments_held_once(network, relation):
    shape = (FEATURES, HIDDEN)
    training_plan = plan.make(make_config(relation=relation, rounds=4), network)
    held, result = constants(make(), training_plan)
    assert shape not in held
    copies = [item for item in result if item[-2:] == shape and len(item) > 2]
    assert not copies
    # The broken twins: values that the loss closes over, and a body of every agent's own.
    task = make()
    closed = dataclasses.replace(
        head_alone(),
        batch_loss=lambda p, x, y: jnp.sum(p["params"]["kernel"]) * jnp.sum(_body(task)),
        loss=lambda p, x, y: jnp.sum(p["params"]["kernel"]) * jnp.sum(_body(task)),
        weighted=None,
    )
    assert shape in constants(closed, training_plan)[0]
    assert any(
        value[-2:] == shape and len(value) > 2
        for value in constants(make(frozen=None), training_plan)[1]
    )


def _body(task):
    return task.frozen["params"]["body"]["kernel"]


@pytest.mark.slow
def test_poisson_batches_several_devices_and_one_problem_seed(network):
    from dpjax.learning import samplers

    sampler = samplers.Poisson(4, capacity=3)
    training_plan = plan.make(
        make_config(relation="zero_out_record", sampler=sampler, rounds=4, design="independent"),
        network,
        counts=SHARDS.counts,
    )
    complete = run(training_plan, make(), seeds=[0])
    single = run(training_plan, head_alone(), seeds=[0])
    np.testing.assert_allclose(
        leaves_of(complete, "head", "kernel"), leaves_of(single, "kernel"), rtol=2e-4, atol=2e-5
    )
    assert Statics.of((training_plan,), (make(),)).query.capacity == 3
    second = plan.make(make_config(rounds=4), network)
    result = run(second, [make(), make()], seeds=[0, 1])
    spread = run(second, make(), seeds=[0, 1], devices=3)
    for a, b in zip(jax.tree.leaves(result.params), jax.tree.leaves(spread.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    other = jax.tree.map(lambda leaf: leaf + 1, PARAMS)
    with pytest.raises(ValueError, match="other frozen values|differs in init"):
        run(second, [make(), make(params=other)], seeds=[0, 1])


@pytest.mark.slow
def test_frozen_values_are_part_of_what_run_is(tmp_path, network):
    training_plan = plan.make(make_config(rounds=4), network)

    class Cut(Exception):
        pass

    def cut(progress):
        if progress.round > 2:
            raise Cut

    options = {"seeds": [0], "eval_every": 2, "checkpoint_seconds": 0}
    straight = run(training_plan, make(), **options)
    with pytest.raises(Cut):
        run(training_plan, make(), checkpoint=tmp_path / "c", callback=cut, **options)
    changed = jax.tree.map(jnp.array, PARAMS)
    changed["params"]["body"]["kernel"] = PARAMS["params"]["body"]["kernel"].at[0, 0].add(1e-3)
    with pytest.raises(ValueError, match="differs in frozen values"):
        run(training_plan, make(params=changed), checkpoint=tmp_path / "c", **options)
    resumed = run(training_plan, make(), checkpoint=tmp_path / "c", **options)
    for a, b in zip(jax.tree.leaves(straight.params), jax.tree.leaves(resumed.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_counts_are_of_trained_leaves(network):
    training_plan = plan.make(make_config(), network)
    pair = [
        inputs.Inputs.of((training_plan,), (task,), (0,)) for task in (make(), make(frozen=None))
    ]
    entries = [HIDDEN * 3 + 3, HIDDEN * 3 + 3 + FEATURES * HIDDEN + 7]
    assert [item.entries for item in pair] == entries
    assert pair[0].payload == pair[0].entries


@pytest.mark.parametrize(
    "frozen",
    [
        {"params": {"body": True, "head": False}},
        {"params": {"body": {"kernel": True, "bias": True}, "head": False}},
    ],
)
def test_tree_of_bools_says_same(frozen):
    first = make()
    other = make(frozen=frozen)
    assert jax.tree.structure(first.frozen) == jax.tree.structure(other.frozen)


def test_mlp_with_frozen_layers_takes_no_fast_norm():
    """Its own sum of weighted gradients is of all layers."""
    model = MLP(hidden=(HIDDEN,), outputs=3)
    params = model.init(KEY, jnp.zeros((1, FEATURES)))
    frozen = make(model, lambda path: "Dense_0" in path, params)
    complete = make(model, None, params)
    assert frozen.weighted is None and complete.weighted is not None
    with pytest.raises(ValueError, match="weighted is given with frozen values"):
        dataclasses.replace(frozen, weighted=complete.weighted)


def with_leaf(value):
    return {"params": {**PARAMS["params"], "body": {**PARAMS["params"]["body"], "bias": value}}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"frozen": lambda path: True}, "frozen is .*True.*; give a function of a leaf"),
        (
            {"frozen": lambda path: "nothing" in path},
            "frozen is .*False.*; give a function of a leaf",
        ),
        (
            {"frozen": lambda path: path},
            "frozen is .*'params/body/bias'.*; give a function of a leaf",
        ),
        ({"frozen": {"params": {"body": 1, "head": 0}}}, "frozen is .*; give a function of a leaf"),
        ({"frozen": {"params": {"foot": True}}}, "frozen does not fit the parameters"),
        ({"params": None}, "frozen is given without params"),
        ({"params": with_leaf(np.full(HIDDEN, np.nan))}, "params params/body/bias holds nan"),
        ({"params": with_leaf(np.full(HIDDEN, 1e300))}, r"params/body/bias reaches 1e\+300"),
        ({"params": with_leaf(np.zeros(3))}, r"differs from the model in params/body/bias \(\(3,"),
        ({"params": {"params": PARAMS["params"]["head"]}}, "params differs from the model in"),
        (
            {"params": with_leaf(np.array(["a"] * HIDDEN))},
            "params params/body/bias is not an array of num",
        ),
        (
            {"params": jax.tree.map(lambda x: x.astype(int), PARAMS)},
            "are int.* and the model's float32, .*freeze them",
        ),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_problem_of_ones_own_has_one_value_in_every_place():
    task = make()
    for invalid in ({"params": {"body": None, "head": None}}, PARAMS, (jnp.zeros(3),)):
        with pytest.raises(ValueError, match="frozen has other places than init leaves free"):
            dataclasses.replace(task, frozen=invalid)
    values = jax.tree.map(np.array, task.frozen)
    mine = dataclasses.replace(task, frozen=values)
    values["params"]["body"]["bias"][2] = np.nan
    assert np.isfinite(mine.frozen["params"]["body"]["bias"]).all()
    with pytest.raises(ValueError, match="frozen params/body/bias holds nan"):
        dataclasses.replace(task, frozen=values)


def test_all_start_from_given_values(network):
    """Without frozen leaves too; every agent and seed alike."""
    task = make(frozen=None)
    still = plan.make(make_config(design="non_private", step_size=1e-30, rounds=2), network)
    result = run(still, task, seeds=[3, 5])
    for expected, got in zip(jax.tree.leaves(PARAMS), jax.tree.leaves(result.params), strict=True):
        np.testing.assert_allclose(got, np.broadcast_to(expected, got.shape), rtol=1e-6, atol=1e-7)


def test_given_values_are_held_as_they_were_checked():
    values = jax.tree.map(np.array, PARAMS)
    task = make(params=values)
    values["params"]["body"]["kernel"][:] = np.nan
    assert np.isfinite(_body(task)).all()


class Own(DSGD):
    """A method of one's own, which is followed through the program of a round."""


Own = dataclasses.dataclass(frozen=True)(Own)


@pytest.mark.slow
def test_methods_of_ones_own_releases_and_phases(tmp_path, network):
    """The body stays where it is in all of them."""
    training_plan = plan.make(make_config(method=Own(), rounds=2), network)
    first = run(training_plan, make(), seeds=[0])
    same = run(plan.make(make_config(rounds=2), network), make(), seeds=[0])
    np.testing.assert_array_equal(leaves_of(first, "head", "bias"), leaves_of(same, "head", "bias"))
    release = plan.make(make_config(release=True, rounds=2), network)
    left = run(release, make(), seeds=[0], key_file=tmp_path / "noise.key")
    assert leaves_of(left, "body", "kernel") is None
    later = run(
        training_plan,
        make(),
        seeds=[0],
        start=first.params,
        phase=1,
        spent=first.guarantees,
        planned=True,
    )
    moved = leaves_of(later, "head", "kernel") - leaves_of(first, "head", "kernel")
    assert np.isfinite(moved).all() and np.abs(moved).max() > 0
    with pytest.raises(ValueError, match="start has shapes"):
        run(training_plan, make(frozen=None), seeds=[0], start=first.params, phase=1,
            spent=first.guarantees, planned=True)  # fmt: skip


@pytest.mark.slow
def test_messages_that_cross_network_are_trained_leaves_alone(network):
    """The host loop trains the same head, and what it hands over holds nothing of the body."""
    training_plan = plan.make(make_config(rounds=3), network)
    exchange = host.local_transport(training_plan)
    sent = []

    def transport(*value):
        sent.append(value)
        return exchange(*value)

    loop = run(training_plan, make(), seeds=[0], transport=transport)
    scan = run(training_plan, make(), seeds=[0])
    for a, b in zip(jax.tree.leaves(loop.params), jax.tree.leaves(scan.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    shapes = {np.shape(leaf) for leaf in jax.tree.leaves(sent) if np.ndim(leaf)}
    assert shapes == {(AGENTS, HIDDEN, 3), (AGENTS, 3)}
