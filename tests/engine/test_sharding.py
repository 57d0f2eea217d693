"""Agents over devices: exchange of rows, padding, noise, and the numbers of one device."""

import re

import flax.linen as nn
import jax
import networkx as nx
import numpy as np
import pytest

from dpjax import _agents
from dpjax.data import partition
from dpjax.engine import processes, program
from dpjax.engine.inputs import Inputs
from dpjax.engine.run import run
from dpjax.learning import query, samplers
from dpjax.learning.supervised import supervised
from dpjax.models.linear import Linear
from dpjax.plans import noise, plan
from dpjax.topology import gossip, graphs, mixing
from tests.support import cut_and_resumed, make_config, make_problem

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")

N = 100
RING = mixing.metropolis_hastings(graphs.ring(N), sparse=True)
KEY = jax.random.key(3, impl="threefry2x32")


def test_one_device_is_no_mesh():
    assert processes.agent_mesh(24, None) is None
    assert processes.agent_mesh(24, 1) is None


@pytest.mark.parametrize("agents", [24, 20])
def test_agents_are_spread_and_padded(agents):
    mesh = processes.agent_mesh(agents, 8)
    array = np.arange(2.0 * agents).reshape(2, agents).astype(np.float32)
    placed = processes.place(array, mesh, 1)
    (leaf,) = jax.tree.leaves(placed)
    assert {shard.data.shape for shard in leaf.addressable_shards} == {(2, 3)}
    np.testing.assert_array_equal(processes.collected(placed), array)
    other = processes.place(array, mesh, 1, agents=5)
    assert other is array
    copied = processes.place(array, mesh, None)
    assert {shard.data.shape for shard in copied.addressable_shards} == {(2, agents)}


def test_more_devices_than_agents_are_refused():
    with pytest.raises(ValueError, match="devices is 8 for 5 agents; choose 1 to 5"):
        processes.agent_mesh(5, 8)


@pytest.mark.parametrize("devices", [0, 9, -1, True])
def test_devices_that_are_not_there(devices):
    with pytest.raises(ValueError, match="devices is .*this process has 8"):
        processes.agent_mesh(24, devices)


def random_matrix(graph, rng):
    """Weights on a graph's links and on itself, which need not be connected."""
    links = nx.to_numpy_array(graph, nodelist=range(len(graph))) + np.eye(len(graph))
    return (links * rng.uniform(0.5, 1, links.shape)).astype(np.float32)


GRAPHS = {
    "random": lambda rng: nx.gnp_random_graph(29, 0.08, seed=int(rng.integers(99))),
    "ring": lambda rng: graphs.ring(24),
    "apart": lambda rng: nx.disjoint_union(graphs.ring(9), nx.empty_graph(10)),
    "star": lambda rng: graphs.star(90),
    "complete": lambda rng: graphs.complete(24),
    "schedule": lambda rng: nx.gnp_random_graph(40, 0.03, seed=int(rng.integers(99))),
}


@pytest.mark.optimized
@pytest.mark.gate(4)
@pytest.mark.parametrize(
    ("name", "devices"), [*((name, 8) for name in GRAPHS), ("random", 3), ("star", 3)]
)
def test_rows_are_exchanged_as_dense_product_needs(name, devices, monkeypatch):
    monkeypatch.setattr(gossip, "_DENSE", 0)
    monkeypatch.setattr(gossip, "_ENTRY", 0)
    rng = np.random.default_rng(devices)
    rounds = 3 if name == "schedule" else 1
    matrix = np.stack([random_matrix(GRAPHS[name](rng), rng) for _ in range(rounds)])
    matrix = matrix if rounds > 1 else matrix[0]
    complete = gossip.neighbours(matrix, np.float32)
    parts = gossip.partitioned(complete, processes.agent_mesh(matrix.shape[-1], devices))
    values = rng.normal(size=(matrix.shape[-1], 3)).astype(np.float32)

    @jax.jit
    def mixed(layout, values):
        return gossip.mix(gossip.at(layout, rounds - 1), values)

    single = mixed(complete, values)
    spread = mixed(parts, values)
    dense = (matrix[-1] if rounds > 1 else matrix) @ values
    np.testing.assert_allclose(spread, dense, rtol=1e-5, atol=1e-6)
    if name != "star":  # A dense row of its hub adds in another order.
        np.testing.assert_array_equal(spread, single)
    everything = (devices - 1) * parts.block
    if name == "complete" and len(matrix) % devices == 0:
        assert parts.steps is None and parts.received == everything
        return
    assert parts.received < everything or name == "star"
    for step in parts.steps or ():
        senders, receivers = zip(*step, strict=True)
        assert len(set(senders)) == len(senders) and len(set(receivers)) == len(receivers)
        assert all(i != j for i, j in step)
    if name == "apart":  # The last devices have agents without links.
        assert not any(devices - 1 in pair for step in parts.steps for pair in step)


def made(devices, **changes):
    """A plan on the ring, its task, and their inputs on devices."""
    parts = {"noise": noise.Independent(), "rounds": 50, **changes}
    training_plan = plan.make(make_config(**parts), RING)
    task = make_problem(N)
    return training_plan, task, Inputs.of((training_plan,), (task,), (0,), devices)


def collectives(text):
    """(operation, entries of its result) of a compiled program."""
    for shapes, name in re.findall(r"= (.*?) (\S*(?:all|collective|scatter)\S*)\(", text):
        if name.startswith(("all-", "collective-", "reduce-scatter")):
            sizes = [
                np.prod([int(d) for d in dims.split(",") if d])
                for dims in re.findall(r"f\d+\[([\d,]*)\]", shapes)
            ]
            yield name.removesuffix("-start"), int(sum(sizes))


def round_of(data):
    """The collectives of compiled rounds: entries exchanged, and of other ones."""
    state = data.initial(data.start(None, 1), data.batch_keys)
    arguments = data.statics, data.arrays, data.data, state, data.batch_keys, data.batch_keys
    text = program.advance.trace(*arguments, np.array([4], np.int32)).lower().compile().as_text()
    result = list(collectives(text))
    others = [size for name, size in result if name == "all-reduce"]
    names = {name for name, _ in result} - {"all-reduce"}
    return names, sum(size for name, size in result if name in names), others


@pytest.mark.gate(1)
@pytest.mark.parametrize("layout", ["tables", "dense"])
def test_rounds_collectives_are_exchange_alone(layout, monkeypatch):
    if layout == "dense":
        monkeypatch.setattr(gossip, "neighbours", lambda *_: None)
    _, _, data = made(8, rounds=4)
    names, moved, others = round_of(data)
    if layout == "tables":
        received = data.arrays["mixing"].received
        assert names == {"collective-permute"} and moved == received * data.entries
        assert received == 2
    else:
        assert names == {"all-gather"} and moved == 104 * data.entries
    # Means of metrics and of models, at the end of a block; no noise and no batch.
    assert all(size <= data.entries + 1 for size in others)


class Net(nn.Module):
    """A convolution and a dense layer."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Conv(2, (2, 2), strides=2)(x))
        return nn.Dense(2)(x.reshape((*x.shape[:-3], -1)))


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["replace_agent", "replace_record"])
def test_gradients_of_networks_stay_on_their_devices(relation):
    """Compilers gather all images, and JAX adds derivatives by constants up over devices."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(36, 4, 4, 1)).astype(np.float32)
    y = rng.integers(0, 2, 36)
    shards = partition.iid(36, 6, 0)
    task = supervised(Net(), "cross_entropy", (x, y), (x[:4], y[:4]), shards)
    matrix = mixing.metropolis_hastings(graphs.ring(6))
    config = make_config(design="independent", relation=relation, rounds=3, batch_size=2)
    training_plan = plan.make(config, matrix, counts=shards.counts)
    single, spread = (
        run([training_plan, training_plan], task, seeds=[0], devices=d) for d in (None, 4)
    )
    same(single, spread)
    data = Inputs.of((training_plan,), (task,), (0,), 4)
    names, moved, others = round_of(data)
    assert names == {"all-gather"} and moved == 8 * data.entries
    assert all(size <= data.entries for size in others)


SIZES = [3, 9, 4, 7, 2, 5, 6, 3, 2, 7]


def unequal(seed=0, **options):
    """A task of ten agents with other numbers of records each, of 60 that are not all dealt."""
    rng = np.random.default_rng(1)
    x = np.c_[np.arange(60), rng.normal(size=(60, 3))].astype(np.float32)
    y = rng.choice([-1, 1], size=60)
    shards = partition.by_size(48, SIZES, seed)
    moved = shards._replace(indices=shards.indices + 9)
    train = (lambda rows: (x[rows], y[rows])) if options.pop("local", False) else (x, y)
    return supervised(Linear(), "logistic", train, (x, y), moved, **options)


def jitter(key, x):
    return x * (1 + 0.1 * jax.random.normal(key, x.shape, x.dtype))


SAMPLERS = {"random": samplers.Random(2), "poisson": samplers.Poisson(2.0, 3)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "local"),
    [("poisson", True), ("random", False), ("random", True), ("poisson", False)],
)
def test_batches_are_those_of_one_device_and_each_holds_its_own_agents_records(sampler, local):
    config = make_config(
        design="independent", relation="zero_out_record", sampler=SAMPLERS[sampler]
    )
    training_plan = plan.make(config, mixing.metropolis_hastings(graphs.ring(10)), counts=SIZES)
    tasks = [
        unequal(seed, augment=jitter, augmentation_multiplicity=2, local=local) for seed in (0, 1)
    ]

    def batches(tasks, devices):
        data = Inputs.of((training_plan,), tuple(tasks), tuple(range(len(tasks))), devices)

        @jax.jit
        def drawn(value):
            value = data.statics.of_first_seed(processes.without_padding(value))
            batch = data.statics.batch(value, KEY, KEY, np.int32(3))
            if sampler != "poisson":
                return batch
            position = batch.rows if batch.positions is None else batch.positions
            x, y = _agents.gathered(position, *batch[:2])
            return query.keyed(batch.key, x, batch.rows), y, batch.padding

        return data.data, jax.device_get(drawn(data.data))

    _, single = batches([unequal(0, augment=jitter, augmentation_multiplicity=2)], None)
    for devices in (None, 3, 8):
        for case in (tasks[:1], tasks):
            data, spread = batches(case, devices)
            jax.tree.map(np.testing.assert_array_equal, spread, single)
    size = -(-10 // 8)
    rows = tasks[0].partition.indices
    for shard in data.x.addressable_shards:
        device = shard.index[1].start // shard.data.shape[1]
        agents = range(10)[size * device : size * (device + 1)]
        owned = {int(row) for i in agents for row in rows[i, : SIZES[i]]}
        held = set(np.asarray(shard.data)[0, :, 0].astype(int).tolist())
        assert owned <= held and len(held) <= len(owned) + 2  # What fills up.


@pytest.mark.slow
def test_records_that_are_loaded_by_number_train_to_same_bits():
    config = make_config(design="independent", relation="replace_record", rounds=4, batch_size=1)
    training_plan = plan.make(config, mixing.metropolis_hastings(graphs.ring(10)), counts=SIZES)
    complete = unequal()
    own = unequal(local=True)
    assert len(own.x) == 48 and own.x[:, 0].tolist() == list(range(9, 57))
    for devices in (None, 4):
        same(
            *(run(training_plan, task, seeds=[0], devices=devices) for task in (complete, own)),
            exact=True,
        )


def test_noise_has_same_bits_on_any_devices_and_agents_share_none():
    def drawn(devices):
        _, _, data = made(devices)
        statics = data.statics

        @jax.jit
        def noise_of(arrays, round):
            first = jax.tree.map(lambda leaf: leaf[0], processes.without_padding(arrays))
            zeros = np.zeros((N, 7), np.float32)
            link = statics.transformation(first, KEY)
            state = link.init(zeros)._replace(round=round)
            return processes.place(link.update(zeros, state)[0], statics.mesh, 0, N)

        compiled = noise_of.lower(data.arrays, np.int32(1)).compile()
        assert not list(collectives(compiled.as_text()))
        placed = compiled(data.arrays, np.int32(1))
        shards = jax.tree.leaves(placed)[0].addressable_shards
        assert {shard.data.shape for shard in shards} == {(-(-N // (devices or 1)), 7)}
        return processes.collected(placed)

    single = drawn(None)
    for devices in (2, 3, 8):
        np.testing.assert_array_equal(drawn(devices), single)
    assert len(np.unique(np.abs(single))) == single.size


def same(value, other, exact=False):
    """Whether two runs have the same models and metrics, to the bit or to 1e-6 of the largest."""
    for a, b in zip(*map(jax.tree.leaves, (value.params, other.params)), strict=True):
        assert a.shape == b.shape
        if exact:
            np.testing.assert_array_equal(b, a)
        np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-6 * np.abs(a).max())
    for name, values in value.metrics.items():
        np.testing.assert_allclose(other.metrics[name], values, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(3, 8), (2,)])
def test_fifty_rounds_by_tables_agree_to_rounding(counts, tmp_path):
    """Rows add in one order (above), but compilers may round a product and a sum at once, or not.

    3 and 8 devices do not divide the agents.
    """
    first, task, _ = made(None)
    options = {"seeds": [0], "eval_every": 25}
    single = run(first, task, **options)
    for devices in counts:
        spread = run(first, task, **options, devices=devices)
        same(single, spread)
    same(spread, cut_and_resumed(first, task, tmp_path, **options, devices=counts[-1]), exact=True)


@pytest.mark.slow
def test_fifty_rounds_of_dense_products_agree_to_rounding():
    """A product of fewer rows may add in another order."""
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(24, 0.3, 0))
    plans = [
        plan.make(make_config(design=name, rounds=50), matrix)
        for name in ("whisper", "independent")
    ]
    options = {"seeds": [0, 1], "eval_every": 25}
    single, spread = (run(plans, make_problem(24), devices=d, **options) for d in (None, 5))
    same(single, spread)
