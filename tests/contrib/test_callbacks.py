"""Callbacks that pass metrics on, and end no run."""

import struct
import time
import types

import numpy as np
import pytest

from dpjax.contrib import callbacks
from dpjax.engine.run import run
from dpjax.plans import plan
from tests.support import make_config


def made(network):
    return [plan.make(make_config(design=name), network) for name in ("whisper", "non_private")]


def events(folder):
    """Tag, round and value of every scalar in a folder's one file."""
    from tensorboardX.proto import event_pb2

    (file,) = folder.iterdir()
    content = file.read_bytes()
    results = []
    while content:  # Length, its checksum, a message, its checksum.
        (length,) = struct.unpack("<Q", content[:8])
        event = event_pb2.Event.FromString(content[12 : 12 + length])
        results += [(item.tag, event.step, item.simple_value) for item in event.summary.value]
        content = content[16 + length :]
    return results


@pytest.mark.slow
def test_boards_have_means_over_seeds(tmp_path, network, small):
    logged = []
    board = types.SimpleNamespace(log=lambda values, step: logged.append((step, values)))
    watch = callbacks.wandb(board, labels=["whisper", "bare"])
    files = callbacks.tensorboard(tmp_path / "logs")
    result = run(
        made(network), small, seeds=[0, 1], eval_every=5, chunk_blocks=1,
        callback=lambda progress: (watch(progress), files(progress))[0],
    )  # fmt: skip
    assert [step for step, _ in logged] == list(result.rounds)
    means = result.metrics["test_loss"].mean(axis=1)
    np.testing.assert_allclose([item["test_loss/whisper"] for _, item in logged], means[:, 0])
    np.testing.assert_allclose([case["test_loss/bare"] for _, case in logged], means[:, 1])
    # Stopping at a measurement that was read costs all, and the bare plan has no epsilon.
    assert logged[-1][1]["epsilon/whisper"] == pytest.approx(result.guarantees[0].epsilon)
    assert not any("epsilon/bare" in one for _, one in logged)
    deadline = time.monotonic() + 30
    written = []
    while len(written) < 4 and time.monotonic() < deadline:
        time.sleep(0.2)
        outcome = events(tmp_path / "logs")
        written = [(step, value) for tag, step, value in outcome if tag == "test_loss/0"]
    np.testing.assert_allclose(written, np.stack([result.rounds, means[:, 0]], axis=1), rtol=1e-6)
    assert result.ended


@pytest.mark.slow
def test_boards_have_extreme_epsilons_of_agents(network, small):
    logged = []
    board = types.SimpleNamespace(log=lambda values, step: logged.append(values))
    plans = [plan.make(make_config(epsilon=case), network) for case in ((1.0,) * 5 + (4.0,), 4.0)]
    run(plans, small, seeds=[0], eval_every=20, callback=callbacks.wandb(board))
    assert (logged[-1]["least_epsilon/0"], logged[-1]["epsilon/0"]) == (1.0, 4.0)
    assert logged[-1]["epsilon/1"] == 4.0 and "least_epsilon/1" not in logged[-1]


def test_what_cannot_log_is_refused(network, small):
    with pytest.raises(ValueError, match="run is None; give what wandb.init"):
        callbacks.wandb(None)
    board = types.SimpleNamespace(log=lambda values, step: None)
    with pytest.raises(ValueError, match="for 2 plans; give one a plan"):
        run(made(network), small, seeds=[0], callback=callbacks.wandb(board, labels=["one"]))
