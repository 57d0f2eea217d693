"""One run over two processes: the numbers of one, files of the first, and an end of all."""

import json
import os
import re
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from dpjax.data import partition
from dpjax.engine import arguments, processes
from dpjax.plans import plan
from dpjax.topology import graphs, mixing
from tests.support import ROOT, load_script, make_config

EXAMPLE = ROOT / "examples" / "two_processes.py"


REFUSALS = """
def refusals(number, folder):
    import dataclasses
    import json
    import dpjax as dp
    from dpjax.models.linear import Linear
    from dpjax.learning.quadratics import quadratics
    shards = dp.partition.by_size(60, [2, 4, 7, 2, 3, 5, 6, 1] * 2, 0)
    asked = []
    def own(rows):
        asked.append(rows.tolist())
        return load(rows)
    def refused(
        epsilon=10.0, noise=dp.noise.Independent(), graph="ring", scale=1.0, train=None, **options
    ):
        config = dp.Config(
            noise=noise, budget=dp.Budget(epsilon, delta=1e-5), rounds=4,
            protect=dp.Protect("replace_agent", clip_norm=50.0),
            sampler=dp.samplers.Random(1), optimizer=dp.optimizers.Sgd(0.01),
        )
        plan = dp.make_plan(config, dp.mixing.metropolis_hastings(getattr(dp.graphs, graph)(16)))
        data = quadratics(16)
        data = dataclasses.replace(data, y=data.y + scale)
        if train is not None:
            data = dp.supervised(Linear(), "logistic", train, load(range(5)), shards)
        try:
            dp.run(plan, data, **{"seeds": [0], "devices": 8, "eval_every": 1} | options)
        except Exception as error:
            return str(error)
    def fails(at):
        raise KeyError("of the callback")
    foreign = folder / "foreign"
    foreign.mkdir(exist_ok=True)
    (foreign / "notes").touch()
    texts = [
        refused(**({name: value} if number == 1 else {}))
        for name, value in {
            "epsilon": 1000.0, "noise": dp.noise.Pairwise(), "graph": "path", "scale": 2.0,
            "seeds": [1], "eval_every": 2, "chunk_blocks": 2, "stop_at": 2, "stopping": "curve",
            "checkpoint": foreign, "callback": fails, "progress": 1,
        }.items()
    ]
    # Own records, then others in the second process, or all records there.
    others = [lambda rows: load(rows + 9 * number), load(range(60)) if number else own]
    kept = {"checkpoint": folder / "own"}
    texts += [refused(train=each, **kept) for each in (own, others[0], others[1])]
    texts += [refused(checkpoint=foreign), refused(callback=fails)]
    (folder / f"refused_{number}.json").write_text(json.dumps([asked[0], *texts]))


def join("""


@pytest.mark.slow
def test_two_processes_give_numbers_of_one_and_refuse_together(tmp_path, capsys):
    script = EXAMPLE.read_text().replace("def join(", REFUSALS.strip())
    train = "    result = train("
    refused = "    refusals(jax.process_index(), folder)\n"
    copy = tmp_path / "both.py"
    copy.write_text(script.replace(train, refused + train))
    assert load_script("both", tmp_path).main(tmp_path) < 1e-6
    assert "largest difference" in capsys.readouterr().out
    # The first one alone keeps files.
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir())[-1] == "state.npz"
    first, second = (json.loads((tmp_path / f"refused_{i}.json").read_text()) for i in (0, 1))
    # The process whose callback fails raises its own error, the other one its text.
    assert (first.pop(), second.pop()) == ("'of the callback'", "KeyError: 'of the callback'")
    # Each asks for the records of its own agents, on four of the eight devices.
    shards = partition.by_size(60, [2, 4, 7, 2, 3, 5, 6, 1] * 2, 0)
    held = np.arange(7) < shards.counts[:, None]
    for loaded, agents in ((first.pop(0), slice(8)), (second.pop(0), slice(8, 16))):
        assert loaded == sorted(shards.indices[agents][held[agents]])
    assert first == second
    *texts, progress, fine, resumed, mixed, foreign = first
    assert "progress is 1" in progress and "holds notes and no" in foreign and fine is None
    assert re.search("belongs to another run, which differs in records of processes;", resumed)
    assert re.match("process 1 .* differs in data;", mixed)
    names = "budget", "noise", "plans", "data", "seeds", "eval_every", "chunk_blocks", "stop_at"
    for name, text in zip((*names, "stopping", "checkpoint", "callback"), texts, strict=True):
        assert re.match(rf"process 1 .* differs in .*{name}", text), text


@pytest.mark.slow
def test_killed_process_ends_both_and_same_command_goes_on(tmp_path):
    often = "checkpoint=dp.Checkpoint(folder, seconds=0.0)"
    script = EXAMPLE.read_text().replace("rounds=50", "rounds=8_000")
    script = script.replace("checkpoint=folder", often)
    copy = tmp_path / "long.py"
    copy.write_text(script)
    folder = tmp_path / "out"

    def start():
        return subprocess.Popen([sys.executable, copy, folder], stderr=subprocess.PIPE, text=True)

    state = folder / "checkpoint" / "state.npz"
    limit = time.monotonic() + 120
    with start() as launcher:
        while not state.exists() and time.monotonic() < limit:
            time.sleep(0.2)
        subprocess.run(["pkill", "-9", "-f", f"{copy} {folder} join 1"], check=True)
        began = time.monotonic()
        _, text = launcher.communicate(timeout=60)
    assert launcher.returncode and time.monotonic() - began < 60
    assert "process " in text.splitlines()[-1]
    with start() as again:
        assert again.wait(timeout=300) == 0
    assert (folder / "two.npz").exists()


@pytest.mark.slow
def test_slurm_says_who_takes_part(tmp_path):
    """A step of two tasks on one machine, by the variables that Slurm sets in each."""
    script = EXAMPLE.read_text()
    train = "    result = train("
    display = "    return print(jax.process_index(), jax.process_count(), jax.device_count())\n"
    copy = tmp_path / "step.py"
    copy.write_text(script.replace(train, display + train))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    step = {
        "SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2",
        "JAX_COORDINATOR_PORT": port, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "3",
        "XLA_FLAGS": "",
    }  # fmt: skip
    tasks = [
        subprocess.Popen(
            [sys.executable, copy, tmp_path, "join"], stdout=subprocess.PIPE, text=True,
            env=os.environ | step | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank},
        )
        for rank in "01"
    ]  # fmt: skip
    texts = [task.communicate(timeout=120)[0] for task in tasks]
    assert texts == ["0 2 6\n", "1 2 6\n"]


def test_what_processes_cannot_do_is_refused(monkeypatch):
    matrix = mixing.metropolis_hastings(graphs.ring(8))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="devices is None in 2 processes .* devices=8"):
        processes.agent_mesh(8, None)
    release = plan.make(make_config(release=True), matrix)
    with pytest.raises(ValueError, match="release is True in 2 processes"):
        arguments.check_device([release], 8)


def test_values_of_one_process_are_its_own():
    """Alone nothing is sent."""
    tree = {"a": np.float32(-0.0), "b": np.arange(3)}
    assert processes.is_first() and processes.broadcast(tree) is tree
    assert processes.collected(tree)["b"].tolist() == [0, 1, 2]
