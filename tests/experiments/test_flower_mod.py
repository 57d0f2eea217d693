"""The mod for Flower, with Flower's own messages, apps and simulation."""

import subprocess
import sys
import time

import numpy as np
import pytest

from dpjax.contrib import updates
from tests.support import ROOT, load_script

pytest.importorskip("flwr.clientapp", reason="needs Flower: pip install 'flwr>=1.22'")

from flwr.app import (  # noqa: E402
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp  # noqa: E402

try:
    from flwr.app import Metadata
except ImportError:
    from flwr.common import Metadata

example = load_script("flower_mod", "examples")
TERMS = dict(rounds=3, clip_norm=1.0, noise_multiplier=2.4, delta=1e-5)
OLD = np.linspace(-1, 1, 600, dtype=np.float32).reshape(20, 30)


def asked(kind="train", arrays=None):
    """A message of the server's."""
    arrays = {"layer.w": Array(OLD)} if arrays is None else arrays
    content = RecordDict({"arrays": ArrayRecord(arrays), "config": ConfigRecord({"lr": 0.1})})
    metadata = Metadata(1, "id", 0, 1, "", "1", time.time(), 3600.0, kind)
    return Message(content, metadata=metadata)


def context(partition=4):
    return Context(1, 1, {"partition-id": partition}, RecordDict(), {})


def trained(message, _):
    """Training that changes the model far, and sends more than the model."""
    arrays = {key: Array(array.numpy() + 7) for key, array in message.content["arrays"].items()}
    content = RecordDict(
        {
            "arrays": ArrayRecord(arrays),
            "metrics": MetricRecord({"loss": 0.123, "num-examples": 333}),
            "notes": ConfigRecord({"note": "0.123"}),
        }
    )
    return Message(content, reply_to=message)


def reply_of(mod, message=None, train=trained, partition=4):
    """What Flower's app sends, the mod in its chain."""
    app = ClientApp()
    app.train(mods=[mod])(train)
    return app(asked() if message is None else message, context(partition))


def made(folder, **changes):
    return example.NoisyUpdates(folder=str(folder), **(TERMS | changes))


def update_of(reply):
    return reply.content["arrays"]["layer.w"].numpy() - OLD


def test_update_is_clipped_and_noisy(tmp_path, monkeypatch):
    monkeypatch.setattr(updates, "_secret", lambda: b"s" * 32)
    reply = reply_of(made(tmp_path))
    assert reply.content["arrays"]["layer.w"].numpy().dtype == np.float32
    noise = update_of(reply)
    # 600 numbers, of which none is near 7: five standard errors.
    assert abs(np.std(noise) / 2.4 - 1) < 5 / np.sqrt(1200)
    mod = made(tmp_path / "bare")
    monkeypatch.setattr(type(mod.updates), "_released", lambda self, clipped: clipped)
    np.testing.assert_allclose(update_of(reply_of(mod)), 1 / np.sqrt(600), rtol=1e-4)


def leaks(mod):
    """Whether a metric or another record of training's reply goes out."""
    content = reply_of(mod).content
    # Bytes of noise may look like anything.
    del content["arrays"]
    return "0.123" in repr(content) or "333" in repr(content)


def test_what_is_no_update_is_dropped(tmp_path):
    mod = made(tmp_path)
    assert not leaks(mod)
    content = reply_of(mod).content
    assert dict(content["metrics"]) == {"num-examples": 1} and "notes" not in content


@pytest.mark.mutant
def test_mod_that_keeps_metrics_is_caught(tmp_path):
    class Broken(example.NoisyUpdates):
        def __call__(self, msg, ctxt, call_next):
            sent = []
            reply = super().__call__(msg, ctxt, lambda *a: sent.append(call_next(*a)) or sent[0])
            content = sent[0].content
            content["arrays"] = reply.content["arrays"]
            return Message(content, reply_to=msg)

    assert leaks(Broken(tmp_path, **TERMS))


def test_training_that_changes_its_message_is_clipped_all_the_same(tmp_path, monkeypatch):
    def in_place(message, _):
        record = message.content["arrays"]
        record["layer.w"] = Array(record["layer.w"].numpy() + 7)
        return Message(RecordDict({"arrays": record}), reply_to=message)

    mod = made(tmp_path)
    monkeypatch.setattr(type(mod.updates), "_released", lambda self, clipped: clipped)
    update = update_of(reply_of(mod, train=in_place))
    assert np.linalg.norm(update) < 1.001


def test_restarted_client_goes_on_and_total_is_kept_by_site(tmp_path):
    for _ in range(3):
        reply_of(made(tmp_path))
        reply_of(made(tmp_path), partition=5)

    def train(message, _):
        pytest.fail("it trained")

    for partition in (4, 5):
        with pytest.raises(ValueError, match="rounds is 3, of which .* has counted 3"):
            reply_of(made(tmp_path), train=train, partition=partition)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site-4", "site-5"]


def test_all_else_is_refused_uncounted(tmp_path):
    mod = made(tmp_path)
    app = ClientApp(mods=[mod])
    app.evaluate()(trained)
    with pytest.raises(ValueError, match="a evaluate reply has no update; .*@app.train alone"):
        app(asked("evaluate"), context())

    def renamed(message, _):
        return Message(RecordDict({"a": ArrayRecord({"b": Array(OLD)})}), reply_to=message)

    def reshaped(message, _):
        return Message(
            RecordDict({"a": ArrayRecord({"layer.w": Array(OLD[:1])})}), reply_to=message
        )

    def twice(message, _):
        records = {"a": ArrayRecord([OLD]), "b": ArrayRecord([OLD])}
        return Message(RecordDict(records), reply_to=message)

    for train in (renamed, reshaped):
        with pytest.raises(ValueError, match="returned other arrays than it was given"):
            reply_of(mod, train=train)
    with pytest.raises(ValueError, match="has 2 ArrayRecords; send the model as one"):
        reply_of(mod, train=twice)
    counters = asked(arrays={"num_batches_tracked": Array(np.zeros(1, int))})
    with pytest.raises(ValueError, match="num_batches_tracked of int64; send NumPy arrays"):
        reply_of(mod, counters)
    assert not list(tmp_path.rglob("round-*"))


def test_error_s_text_is_dropped(tmp_path):
    def failed(message, _):
        return Message(Error(7, "record 7 is bad"), reply_to=message)

    reply = reply_of(made(tmp_path), train=failed)
    assert reply.error.code == 7 and reply.error.reason is None
    assert not list(tmp_path.rglob("round-*"))


def test_example_states_what_it_claims(tmp_path, capsys):
    example.main()
    out = capsys.readouterr().out
    for epsilon in ("9.17", "22.2"):
        assert f"epsilon {epsilon} " in out and f"epsilon {epsilon} " in example.__doc__
    reply_of(made(tmp_path))
    example.main(tmp_path / "site-4")
    assert "After 1 of at most 3 rounds" in capsys.readouterr().out


SIMULATION = """
import sys
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from flower_mod import NoisyUpdates

noise = NoisyUpdates("FOLDER", rounds=2, clip_norm=1.0, noise_multiplier=2.4, delta=1e-5)
app = ClientApp()
server = ServerApp()

@app.train(mods=[noise])
def train(msg, context):
    arrays = {key: Array(array.numpy() + 1) for key, array in msg.content["arrays"].items()}
    metrics = MetricRecord({"loss": 0.123, "num-examples": 333})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "m": metrics}), reply_to=msg)

@server.main()
def main(grid, context):
    start = ArrayRecord([np.zeros((20, 30), np.float32)])
    strategy = FedAvg(fraction_evaluate=0.0)
    end = strategy.start(grid=grid, initial_arrays=start, num_rounds=3)
    np.save("model.npy", end.arrays.to_numpy_ndarrays()[0])

run_simulation(server_app=server, client_app=app, num_supernodes=2)
"""


@pytest.mark.slow
def test_mod_in_simulation(tmp_path):
    """Two sites and three rounds, of which two are left: nothing is sent in the third."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'flwr[simulation]'")
    script = f"import sys\nsys.path.insert(0, {str(ROOT / 'examples')!r})\n" + SIMULATION
    (tmp_path / "run.py").write_text(script.replace("FOLDER", str(tmp_path / "noise")))
    command = [sys.executable, "run.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    log = done.stdout + done.stderr
    assert "has counted 2: nothing more may be sent" in log and "0.123" not in log
    assert len(list((tmp_path / "noise").rglob("round-*"))) == 4
    # The mean of two sites, over two rounds, moves by one site's noise of one round.
    model = np.load(tmp_path / "model.npy")
    assert abs(np.std(model) / 2.4 - 1) < 5 / np.sqrt(1200)
