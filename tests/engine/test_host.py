"""The host loop: the scan's bits, and no noise that goes out with two payloads."""

import json
import shutil
import traceback

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

from dpjax.algorithms.dsgd import DSGD
from dpjax.data import partition
from dpjax.engine import host, keys
from dpjax.engine.checkpoint import Checkpoint, Storage
from dpjax.engine.keys import KeyFile
from dpjax.learning import samplers
from dpjax.learning.supervised import supervised
from dpjax.models.mlp import MLP
from dpjax.plans import plan
from dpjax.plans.links import PairKeys
from dpjax.plans.optimizers import Chain
from dpjax.transforms import clipping
from tests.support import make_config, run

ROUNDS = 10
RECORDS = {"relation": "zero_out_record"}
CASES = {
    "none": {"design": "non_private"},
    "independent": {"design": "independent"},
    "whisper": {"design": "whisper"},
    "mafalda": {"design": "mafalda"},
    "anti_pgd": {"design": "anti_pgd"},
    "spacetime": {"design": "spacetime"},
    "records": {"relation": "replace_record", "batch_size": 5},
    "passes": {**RECORDS, "microbatch": 2},
    "cyclic": {**RECORDS, "participation": (2, 5), "batch_size": 5, "design": "prefix_sum"},
    "poisson": {**RECORDS, "sampler": samplers.Poisson(4.0, 6), "epsilon": 2.0},
    "full": {"sampler": samplers.Full()},
    "muffliato": {"method": DSGD(3), "design": "independent"},
    "adam": {"optimizer": Chain(optax.adam, 0.05)},
    "pair_keys": {"noise": PairKeys(2.0), "attacker": "node"},
}


def made(matrix, **changes):
    return plan.make(make_config(**{"rounds": ROUNDS, **changes}), matrix, counts=[24] * 6)


def same(value, other):
    assert set(value.metrics) == set(other.metrics)
    for name, values in value.metrics.items():
        np.testing.assert_array_equal(values, other.metrics[name], err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, value.params, other.params)
    np.testing.assert_array_equal(value.rounds, other.rounds)
    assert value.guarantees == other.guarantees and value.ended == other.ended


def rows(result):
    messages = [{k: v for k, v in row.items()} for row in result.rows()]
    return json.dumps(messages, sort_keys=True, default=str)


# Runs of Whisper are compared by `test_callbacks_stop_at_same_rounds` too.
SLOW = set(CASES) - {"anti_pgd", "records"}


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES]
)
def test_over_its_own_exchange_run_is_scan_to_bit(network, small, name):
    single = made(network, **CASES[name])
    # Blocks of unequal lengths, and chunks of several.
    options = {"seeds": [3], "eval_every": 3, "chunk_blocks": 2}
    scan = run(single, small, **options)
    loop = run(single, small, transport=host.local_transport(single), **options)
    same(scan, loop)
    assert rows(scan) == rows(loop)


class Normed(nn.Module):
    """A layer, its norm over channels, and a head."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.LayerNorm()(nn.tanh(nn.Dense(8)(x))))


@pytest.mark.parametrize(
    ("module", "changes"),
    [
        pytest.param(Normed(), {}, marks=pytest.mark.slow),
        pytest.param(Normed(), {"relation": "replace_record"}, marks=pytest.mark.slow),
        pytest.param(MLP((8,), 3), {"relation": "replace_record"}, marks=pytest.mark.slow),
        pytest.param(MLP((8,), 3), {"design": "mafalda"}, marks=pytest.mark.slow),
    ],
)
def test_networks_of_layers_are_scan_to_rounding(network, module, changes):
    """Halves are programs of their own, in which layers may be fused, and so rounded, otherwise."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(144, 7))
    y = rng.integers(0, 3, 144)
    shards = partition.iid(144, 6, 0)
    task = supervised(module, "cross_entropy", (x, y), (x[:30], y[:30]), shards)
    single = made(network, **changes)
    options = {"seeds": [3], "eval_every": 5}
    scan = run(single, task, **options)
    loop = run(single, task, transport=host.local_transport(single), **options)
    for a, b in zip(jax.tree.leaves(scan.params), jax.tree.leaves(loop.params), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-6)
    for name, values in scan.metrics.items():
        np.testing.assert_allclose(loop.metrics[name], values, rtol=1e-5, err_msg=name)


class Wire:
    """A network of one process: the method's own exchange, which keeps what it carries."""

    def __init__(self, value, fails=(), changes=None):
        self.exchange = host.local_transport(value)
        self.sent = []
        self.fails = list(fails)
        self.changes = changes

    def __call__(self, message, round):
        self.sent.append((round, jax.tree.map(np.copy, message)))
        if round in self.fails:
            self.fails.remove(round)
            raise ConnectionError("nothing was delivered")
        received = self.exchange(message, round)
        return received if self.changes is None else self.changes(received, round)

    def digests(self):
        return [(t, b"".join(leaf.tobytes() for leaf in jax.tree.leaves(m))) for t, m in self.sent]


def lossy(received, round):
    """A network that delivers otherwise than in a first attempt: an agent was away."""
    return jax.tree.map(lambda leaf: np.float32(0.9) * leaf, received) if round > 2 else received


@pytest.mark.parametrize(
    ("design", "release"),
    [
        ("anti_pgd", True),
        pytest.param("whisper", False, marks=pytest.mark.slow),
        pytest.param("anti_pgd", False, marks=pytest.mark.slow),
        pytest.param("whisper", True, marks=pytest.mark.slow),
    ],
)
def test_round_that_was_not_delivered_is_sent_again_as_it_was(
    network, small, tmp_path, design, release
):
    single = made(network, design=design, release=release)
    options = {"seeds": [1], "eval_every": 4, "checkpoint": tmp_path / "c"}
    if release:
        options["key_file"] = tmp_path / "key"
    wire = Wire(single, fails=[5, 5])
    for _ in range(2):
        with pytest.raises(ConnectionError):
            run(single, small, transport=wire, **options)
    result = run(single, small, transport=wire, **options)
    reported = dict(wire.digests())
    assert [t for t, _ in wire.sent] == [0, 1, 2, 3, 4, 5, 5, 5, 6, 7, 8, 9]
    # Every message of a round is the same one; each round's is another.
    assert all(reported[t] == digest for t, digest in wire.digests())
    assert len(set(reported.values())) == ROUNDS
    if release:
        assert not (tmp_path / "key").exists()
    else:
        same(run(single, small, seeds=[1], eval_every=4), result)


def test_run_that_was_killed_sends_no_noise_with_another_payload(network, small, tmp_path):
    """The network delivers otherwise the second time: only the last message may be sent again."""
    one = made(network)
    options = {"seeds": [1], "eval_every": 4, "checkpoint": tmp_path / "c"}
    # As shot within the exchange of round 6; a kill leaves what is on disk, and so does this.
    first = Wire(one, fails=[6])
    with pytest.raises(ConnectionError):
        run(one, small, transport=first, checkpoint_seconds=np.inf, **options)
    second = Wire(one, changes=lossy)
    run(one, small, transport=second, checkpoint_seconds=np.inf, **options)
    before = dict(first.digests())
    after = dict(second.digests())
    shared = set(before) & set(after)
    assert shared == {6} and before[6] == after[6]


@pytest.mark.mutant
def test_without_state_network_would_see_noise_twice(network, small):
    """The broken twin: a run that begins again after another delivery."""
    one = made(network)
    first = Wire(one)
    second = Wire(one, changes=lossy)
    run(one, small, seeds=[1], transport=first)
    run(one, small, seeds=[1], transport=second)
    before = dict(first.digests())
    after = dict(second.digests())
    assert any(before[t] != after[t] for t in range(ROUNDS))


def test_release_whose_newest_state_is_lost_is_refused(network, small, tmp_path):
    first = made(network, release=True)
    options = {
        "seeds": [1], "checkpoint": tmp_path / "c", "key_file": tmp_path / "key",
    }  # fmt: skip
    with pytest.raises(ValueError, match="checkpoint is None for a release over a transport"):
        run(first, small, seeds=[1], transport=Wire(first), key_file=tmp_path / "key")
    wire = Wire(first, fails=[6])
    with pytest.raises(ConnectionError):
        run(first, small, transport=wire, **options)
    assert json.loads((tmp_path / "key").read_text())["sent"] == 7
    shutil.copytree(tmp_path / "c", tmp_path / "elsewhere")
    (tmp_path / "c" / "state.npz").unlink()
    again = Wire(first, changes=lossy)
    with pytest.raises(ValueError, match="says that 7 rounds were sent, the state is of 0"):
        run(first, small, transport=again, **options)
    assert not again.sent
    # With its newest state it goes on.
    shutil.rmtree(tmp_path / "c")
    (tmp_path / "elsewhere").rename(tmp_path / "c")
    run(first, small, transport=again, **options)
    assert [t for t, _ in again.sent] == [6, 7, 8, 9]


def test_another_message_of_round_that_was_sent_is_refused(network, small, tmp_path, monkeypatch):
    """As on a device whose gradients differ from call to call."""
    first = made(network, release=True)
    options = {
        "seeds": [1], "checkpoint": tmp_path / "c", "key_file": tmp_path / "key",
    }  # fmt: skip
    with pytest.raises(ConnectionError):
        run(first, small, transport=Wire(first, fails=[4]), **options)
    outgoing = host._outgoing
    again = Wire(first)

    def last_bit(*args):
        sent, sums = outgoing(*args)
        up = jax.tree.map(lambda leaf: np.nextafter(leaf, np.float32(9)), sent.message)
        return sent._replace(message=up), sums

    last_bit.trace = outgoing.trace
    monkeypatch.setattr(host, "_outgoing", last_bit)
    with pytest.raises(ValueError, match="another message of round 5"):
        run(first, small, transport=again, **options)
    assert not again.sent
    monkeypatch.setattr(host, "_outgoing", outgoing)
    run(first, small, transport=again, **options)
    assert [t for t, _ in again.sent] == [4, 5, 6, 7, 8, 9]


def test_drivers_do_not_take_over_each_others_runs(network, small, tmp_path):
    single = made(network)
    options = {"seeds": [1], "eval_every": 4, "checkpoint": tmp_path / "c"}
    with pytest.raises(ConnectionError):
        run(single, small, transport=Wire(single, fails=[6]), **options)
    with pytest.raises(ValueError, match="belongs to another run, which differs in transport"):
        run(single, small, **options)


@pytest.mark.slow
def test_callbacks_stop_at_same_rounds(network, small):
    single = made(network)
    options = {"seeds": [1], "eval_every": 2, "chunk_blocks": 2}
    calls = []

    def watch(progress):
        calls.append((progress.round, float(progress.metrics["test_loss"][0, 0])))
        return progress.round >= 8

    scan = run(single, small, callback=watch, **options)
    first = calls[:]
    calls[:] = []
    same(
        scan, run(single, small, callback=watch, transport=host.local_transport(single), **options)
    )
    assert first == calls and [t for t, _ in calls] == [4, 8]


def test_what_transport_returns_is_checked(network, small):
    single = made(network)
    for broken, messages in [
        (lambda message, round: None, "transport returned None"),
        (lambda message, round: jax.tree.map(lambda leaf: leaf[:-1], message), r"float32\[5"),
        (lambda message, round: jax.tree.map(np.float64, message), "float64"),
    ]:
        with pytest.raises(ValueError, match=messages):
            run(single, small, seeds=[0], transport=broken)


@pytest.mark.parametrize("lost", [np.nan, np.inf])
def test_numbers_that_were_lost_are_refused(network, small, lost):
    single = made(network)

    def hole(received, round):
        return jax.tree.map(lambda leaf: leaf * lost, received) if round == 2 else received

    with pytest.raises(ValueError, match=r"transport returned numbers .* not finite .* round 2"):
        run(single, small, seeds=[0], transport=Wire(single, changes=hole))


def test_messages_that_are_not_finite_do_not_go_out(network, small, monkeypatch):
    single, messages = made(network, clip_norm=0.0625), []  # No other test's compiled round.

    def transport(message, round):
        messages.append(message)

    monkeypatch.setattr(clipping, "_finite", lambda tree: jax.tree.map(lambda x: x * np.nan, tree))
    with pytest.raises(ValueError, match=r"message of round 0 \(from 0\), at .* is not finite"):
        run(single, small, seeds=[0], transport=transport)
    assert not messages


def test_messages_of_all_dtypes_are_carried():
    # Numbers of agents are whole, and have no infinity.
    message = {"count": np.int32([3]), "sum": np.array(jax.numpy.bfloat16([1.0]))}
    loop = host.HostDriver(lambda message, round: message)
    expected = jax.eval_shape(lambda: message)
    received = loop._received(message, 0, expected, Storage({}, Checkpoint()))
    jax.tree.map(np.testing.assert_array_equal, received, message)


def test_what_transport_raises_says_how_run_goes_on(network, small, tmp_path):
    single = made(network)
    with pytest.raises(ConnectionError, match="nothing was delivered") as failed:
        run(single, small, seeds=[1], transport=Wire(single, fails=[3]))
    (note,) = failed.value.__notes__
    assert "round 3 (from 0) was not delivered" in note and "the run is over" in note
    options = {"seeds": [1], "checkpoint": tmp_path / "c"}
    with pytest.raises(ConnectionError) as failed:
        run(single, small, transport=Wire(single, fails=[3]), **options)
    (note,) = failed.value.__notes__
    assert f"goes on from the checkpoint {tmp_path / 'c'}" in note
    # As it says.
    assert run(single, small, transport=Wire(single), **options).ended


@pytest.mark.mutant
@pytest.mark.parametrize("driver", ["callback", "transport"])
def test_tracebacks_with_local_variables_show_no_key_and_no_record(network, small, driver):
    single = made(network)

    def fails(*arguments):
        raise ConnectionError("nothing was delivered")

    try:
        run(single, small, seeds=[1], **{driver: fails})
    except ConnectionError as error:
        shown = "".join(
            traceback.TracebackException.from_exception(error, capture_locals=True).format()
        )
    assert "runs = RunState(...)" in shown and "data = Inputs(...)" in shown
    for purpose in ("noise", "batches"):
        words = jax.random.key_data(keys.derive(1, purpose)).tolist()
        assert not any(str(word) in shown for word in words)
    record = jax.tree.leaves(small.x)[0].ravel()[:3]
    assert "overlaying" not in shown and not any(str(entry) in shown for entry in record)


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"transport": "tcp"}, "transport is 'tcp'; give a function"),
        ({"seeds": [0, 1]}, "1 plans and 2 seeds; run one plan"),
        ({"devices": 2}, "devices is 2 with a transport"),
    ],
)
def test_runs_that_no_network_carries_are_refused(network, small, options, reported):
    single = made(network)
    with pytest.raises(ValueError, match=reported):
        run(single, small, **{"seeds": [0], "transport": host.local_transport(single), **options})


def test_transport_cannot_change_what_agents_hold(network, small):
    single = made(network)
    exchange = host.local_transport(single)

    def greedy(message, round):
        received = exchange(message, round)
        for leaf in jax.tree.leaves(message):
            leaf[:] = 0
        return received

    same(run(single, small, seeds=[3]), run(single, small, seeds=[3], transport=greedy))


def test_note_of_what_was_sent_never_goes_back(tmp_path):
    file = KeyFile(tmp_path / "key", "f")
    key = file.create()
    assert file.sent() == 0
    file.note_sent(3, "message")
    file.note_sent(3, "message")
    for rounds, message in [(2, "message"), (3, "another")]:
        with pytest.raises(ValueError, match=f"another message of round {rounds}, or a later"):
            file.note_sent(rounds, message)
    assert file.sent() == 3
    assert (jax.random.key_data(file.key()) == jax.random.key_data(key)).all()
