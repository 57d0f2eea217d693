"""The filter for NVIDIA FLARE, with FLARE's own results, contexts and simulator."""

import shutil
import subprocess
import sys

import numpy as np
import pytest

from dpjax.contrib import updates
from tests.support import load_script

pytest.importorskip("nvflare", reason="needs NVIDIA FLARE: pip install nvflare")

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable  # noqa: E402
from nvflare.apis.dxo_filter import DXOFilter  # noqa: E402
from nvflare.apis.event_type import EventType  # noqa: E402
from nvflare.apis.fl_constant import FLContextKey, ReturnCode  # noqa: E402
from nvflare.apis.fl_context import FLContextManager  # noqa: E402
from nvflare.apis.shareable import Shareable, make_reply  # noqa: E402

example = load_script("flare_filter", "examples")
TERMS = dict(rounds=3, clip_norm=1.0, noise_multiplier=2.4, delta=1e-5)


def context(site="hospital"):
    """A client's context, as FLARE makes one for a task."""
    manager = FLContextManager(
        engine=None, identity_name=site, job_id="job", public_stickers={}, private_stickers={}
    )
    return manager.new_context()


def result(data=None, kind=DataKind.WEIGHT_DIFF, **meta):
    """What training sends: an update, a metric, a number of steps, headers."""
    data = {"layer.w": np.full((20, 30), 7.0, np.float32)} if data is None else data
    sent = DXO(kind, data, {MetaKey.INITIAL_METRICS: {"accuracy": 0.123}, **meta}).to_shareable()
    sent.set_header("current_round", 2)
    sent.set_header("secret", 0.123)
    sent["other"] = 0.123
    return sent


def through(filter_, shareable, fl_ctx=None):
    """What the client sends of a task's result, by the events around FLARE's filters."""
    fl_ctx = context() if fl_ctx is None else fl_ctx
    filter_.handle_event(EventType.BEFORE_TASK_RESULT_FILTER, fl_ctx)
    reply = filter_.process(shareable, fl_ctx)
    return after(filter_, reply, fl_ctx)


def after(filter_, reply, fl_ctx):
    fl_ctx.set_prop(FLContextKey.TASK_RESULT, reply, private=True, sticky=False)
    filter_.handle_event(EventType.AFTER_TASK_RESULT_FILTER, fl_ctx)
    return reply


def made(folder, **changes):
    return example.NoisyUpdates(folder=str(folder), **(TERMS | changes))


def test_update_is_clipped_and_noisy(tmp_path, monkeypatch):
    monkeypatch.setattr(updates, "_secret", lambda: b"s" * 32)
    reply = through(made(tmp_path), result())
    sent = from_shareable(reply)
    assert sent.data_kind == DataKind.WEIGHT_DIFF and list(sent.data) == ["layer.w"]
    noise = sent.data["layer.w"]
    assert noise.shape == (20, 30) and noise.dtype == np.float32
    # 600 numbers, of which none is near 7: five standard errors.
    assert abs(np.std(noise) / 2.4 - 1) < 5 / np.sqrt(1200)
    filter_ = made(tmp_path / "bare")
    monkeypatch.setattr(type(filter_.updates), "_released", lambda self, clipped: clipped)
    bare = from_shareable(through(filter_, result())).data["layer.w"]
    np.testing.assert_allclose(bare, 1 / np.sqrt(600), rtol=1e-6)


def leaks(filter_):
    """Whether a metric, a header or another entry of training's result goes out."""
    reply = through(filter_, result(NUM_STEPS_CURRENT_ROUND=333))
    return "0.123" in repr(reply) or "333" in repr(reply)


def test_what_is_no_update_is_dropped(tmp_path):
    filter_ = made(tmp_path)
    assert not leaks(filter_)
    reply = through(filter_, result(NUM_STEPS_CURRENT_ROUND=333))
    assert from_shareable(reply).get_meta_prop(MetaKey.NUM_STEPS_CURRENT_ROUND) == 1
    assert reply.get_header("current_round") == 2


@pytest.mark.mutant
def test_filter_that_keeps_metrics_is_caught(tmp_path):
    class Broken(example.NoisyUpdates):
        def process(self, shareable, fl_ctx):
            fl_ctx.set_prop(example.PASSED, True, private=True, sticky=False)
            return DXOFilter.process(self, shareable, fl_ctx)

    assert leaks(Broken(folder=str(tmp_path), **TERMS))


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (lambda: result(kind=DataKind.WEIGHTS), "kind .*WEIGHTS.* only WEIGHT_DIFF .*DIFF"),
        (lambda: result(kind=DataKind.METRICS, data={"loss": 1.0}), "only WEIGHT_DIFF passes"),
        (lambda: result(data={}), "only WEIGHT_DIFF passes"),
        (lambda: Shareable({"model": 1}), "the result is no DXO"),
        (lambda: result(PROCESSED_ALGORITHM="HE"), "is encoded already"),
        (lambda: result(data={"n": np.zeros(2, int)}), "n of int64; send NumPy arrays of floats"),
    ],
)
def test_all_else_is_refused_uncounted(sent, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        made(tmp_path).process(sent(), context())
    assert not list(tmp_path.rglob("round-*"))


def test_result_that_went_past_filter_is_emptied(tmp_path):
    filter_, fl_ctx = made(tmp_path), context()
    through(filter_, result(), fl_ctx)
    # Another task in the same context, which the job's filters do not name.
    filter_.handle_event(EventType.BEFORE_TASK_RESULT_FILTER, fl_ctx)
    reply = after(filter_, result(), fl_ctx)
    assert reply.get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR
    assert "0.123" not in repr(reply) and "layer" not in repr(reply)
    failed = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    failed["text"] = "record 7 is bad"
    reply = through(filter_, failed)
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "record" not in repr(reply)


@pytest.mark.mutant
def test_filter_without_its_guard_is_caught(tmp_path):
    class Broken(example.NoisyUpdates):
        def handle_event(self, event_type, fl_ctx):
            pass

    fl_ctx = context()
    assert "0.123" in repr(after(Broken(folder=str(tmp_path), **TERMS), result(), fl_ctx))


def test_restarted_client_goes_on_and_total_is_kept_by_site(tmp_path):
    for _ in range(3):
        through(made(tmp_path), result())
        through(made(tmp_path), result(), context("clinic"))
    for site in ("hospital", "clinic"):
        with pytest.raises(ValueError, match="rounds is 3, of which .* has counted 3"):
            made(tmp_path).process(result(), context(site))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clinic", "hospital"]


def test_example_states_what_it_claims(tmp_path, capsys):
    example.main()
    out = capsys.readouterr().out
    for epsilon in ("9.17", "22.2"):
        assert f"epsilon {epsilon} " in out and f"epsilon {epsilon} " in example.__doc__
    through(made(tmp_path), result())
    example.main(tmp_path / "hospital")
    assert "After 1 of at most 3 rounds" in capsys.readouterr().out


CLIENT = """
import nvflare.client as flare
flare.init()
while flare.is_running():
    model = flare.receive()
    new = {name: array + 1 for name, array in model.params.items()}
    flare.send(flare.FLModel(params=new, metrics={"accuracy": 0.123}))
"""
JOB = """
import sys
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.client.config import TransferType
from nvflare.recipe import SimEnv
from flare_filter import NoisyUpdates
recipe = NumpyFedAvgRecipe(
    name="noisy", min_clients=2, num_rounds=2, model=[[0.0] * 20] * 30, train_script="client.py",
    params_transfer_type=TransferType.DIFF)
noise = NoisyUpdates("noise", rounds=2, clip_norm=1.0, noise_multiplier=2.4, delta=1e-5)
recipe.add_client_output_filter(noise, tasks=[sys.argv[1]])
recipe.execute(SimEnv(num_clients=2, workspace_root="workspace"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("task", ["train", "*"])
def test_filter_in_simulator(task, tmp_path):
    """Two sites, two rounds; a filter for "*" reaches no task, so that nothing is sent."""
    (tmp_path / "client.py").write_text(CLIENT)
    (tmp_path / "job.py").write_text(JOB.replace('"noise"', repr(str(tmp_path / "noise"))))
    shutil.copy(example.__file__, tmp_path)
    command = [sys.executable, "job.py", task]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    log = done.stdout + done.stderr
    assert "0.123" not in log
    models = list((tmp_path / "workspace").rglob("server.npy"))
    if task == "*":
        assert "a result did not pass the noise and is not sent" in log and not models
        return
    assert len(list((tmp_path / "noise").rglob("round-*"))) == 4
    # The mean of two sites, over two rounds, moves by one site's noise of one round.
    model = np.load(models[0])
    assert abs(np.std(model) / 2.4 - 1) < 5 / np.sqrt(1200)
