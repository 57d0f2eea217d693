"""One run over two processes: the numbers of one, files of the first, and an end of all."""

import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from dpjax.engine import inputs, processes
from dpjax.engine.run import run
from dpjax.plans import plan
from dpjax.topology import graphs, mixing
from tests.support import ROOT, load_script, make_config, make_problem

EXAMPLE = ROOT / "examples" / "two_processes.py"


def test_two_processes_give_the_numbers_of_one(tmp_path, capsys):
    assert load_script("two_processes", "examples").main(tmp_path) < 1e-6
    assert "largest difference" in capsys.readouterr().out
    # The first one alone keeps files.
    assert sorted(one.name for one in (tmp_path / "checkpoint").iterdir())[-1] == "state.npz"


@pytest.mark.slow
def test_a_killed_process_ends_both_and_the_same_command_goes_on(tmp_path):
    often = "checkpoint=folder, checkpoint_seconds=0.0"
    script = EXAMPLE.read_text().replace("rounds=50", "rounds=8_000")
    script = script.replace("checkpoint=folder", often)
    copy = tmp_path / "long.py"
    copy.write_text(script)
    folder = tmp_path / "out"

    def start():
        return subprocess.Popen([sys.executable, copy, folder], stderr=subprocess.PIPE, text=True)

    state, limit = folder / "checkpoint" / "state.npz", time.monotonic() + 120
    with start() as launcher:
        while not state.exists() and time.monotonic() < limit:
            time.sleep(0.2)
        subprocess.run(["pkill", "-9", "-f", f"{copy} {folder} 1"], check=True)
        began = time.monotonic()
        _, text = launcher.communicate(timeout=60)
    assert launcher.returncode and time.monotonic() - began < 60
    assert "process " in text.splitlines()[-1]
    with start() as again:
        assert again.wait(timeout=300) == 0
    assert (folder / "two.npz").exists()


def test_what_processes_cannot_do_is_refused(monkeypatch):
    matrix = mixing.metropolis_hastings(graphs.ring(8))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    made = plan.make(make_config(), matrix)
    with pytest.raises(ValueError, match="devices is None in 2 processes .* devices=8"):
        run(made, make_problem(8), seeds=[0])
    release = plan.make(make_config(release=True), matrix)
    with pytest.raises(ValueError, match="release is True in 2 processes"):
        inputs.check_device([release], 8)


def test_values_of_one_process_are_its_own():
    """Alone nothing is sent."""
    tree = {"a": np.float32(-0.0), "b": np.arange(3)}
    assert processes.leads() and processes.shared(tree) is tree
    assert processes.collected(tree)["b"].tolist() == [0, 1, 2]
