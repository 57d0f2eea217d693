"""Processes and cluster jobs that share the cells of an experiment."""

import dataclasses
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

from _common import launch
from dpjax import _files, _workers
from dpjax.results import records
from tests.support import load_script

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Config:
    """Cells.

    Attributes:
        cells: How many.
        killed: The one whose first process is killed.
        refused: The one that raises an error.
    """

    cells: int = 4
    killed: int = -1
    refused: int = -1


def compute(config, number, lab):
    marker = lab.folder / "killed"
    if number == config.killed:
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)  # The first process sees meanwhile that the other one is gone.
    if number == config.refused:
        raise ValueError("cell is refused; leave it out")
    return [{"number": number, "process": os.getpid(), "loss": 0.1 * number}]


def experiment(config, lab):
    """Write down numbers."""
    cells = [
        (str(i), {"number": i}, lambda folder, i=i: compute(config, i, lab))
        for i in range(config.cells)
    ]
    lab.say(f"sum {lab.cells(cells)['number'].sum()}")


def main(folder, *options):
    return launch.main("trial", {"cpu": Config()}, experiment, ["--output", str(folder), *options])


def test_file_is_made_by_one_process_and_others_wait_for_it(tmp_path):
    paths = [tmp_path / f"{i}.jsonl" for i in range(3)]
    paths[1].touch()
    other = _files.Lock("output", paths[0], _workers._beside(paths[0]), passing=True)
    os.write(other.handle, b"process 7 on a node")

    def finish():
        while not messages:
            time.sleep(0.01)
        paths[0].touch()
        other.close()

    messages = []
    order = []
    thread = threading.Thread(target=finish)
    thread.start()
    for path, missing in _workers.shared_files(paths, say=messages.append):
        order.append((paths.index(path), missing))
        if missing:
            assert _workers._beside(path).exists()
            path.touch()
    thread.join()
    assert order == [(1, False), (2, True), (0, False)]
    assert messages == [f"{paths[0]}: waits for process 7 on a node, which makes it"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in paths]


def test_what_dead_process_left_is_taken_over_last(tmp_path):
    paths = [tmp_path / f"{i}.jsonl" for i in range(3)]
    lock = f"_files.Lock('output', 'x', pathlib.Path({str(_workers._beside(paths[0]))!r}))"
    code = f"import os, pathlib; from dpjax import _files; lock = {lock}; os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == -9
    order = []
    for path, missing in _workers.shared_files(paths):
        order.append((paths.index(path), missing))
        path.touch()
    assert order == [(1, True), (2, True), (0, True)]


@pytest.mark.slow
def test_others_take_over_from_worker_that_was_killed(tmp_path):
    paths = [tmp_path / str(i) for i in range(4)]
    marker = tmp_path / "killed"
    messages = []

    def work():  # Local, so that workers do not import this file.
        for path, missing in _workers.shared_files(paths):
            if missing and path == paths[1]:
                if not marker.exists():
                    marker.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.5)  # The first process sees meanwhile that the other one is gone.
            if missing:
                path.write_text(str(os.getpid()))

    with _workers.Team(2, work, tmp_path, messages.append) as team:
        assert not list(_workers.shared_files([], team)) and not team._jobs  # Nothing to start for.
        assert sorted(_workers.shared_files(paths, team)) == [(path, False) for path in paths]
    assert (
        len(messages) == 1
        and "died with SIGKILL(-9); others take over what it was at" in messages[0]
    )
    assert str(os.getpid()) not in {path.read_text() for path in paths}
    assert not list(tmp_path.rglob(".*"))


def test_workers_have_first_process_s_settings(tmp_path):
    paths = [tmp_path / "values"]

    @functools.partial(jax.jit, static_argnames="power")
    def jitted(x, power):
        return x**power

    def work():
        for path, _ in _workers.shared_files(paths):
            value = jax.jit(lambda x: jitted(x, power=2)).trace(3.0).out_info
            path.write_text(f"{value.dtype} {jax.config.jax_default_matmul_precision}")

    with (
        jax.enable_x64(True), jax.default_matmul_precision("highest"),
        _workers.Team(1, work, tmp_path, print) as team,
    ):  # fmt: skip
        list(_workers.shared_files(paths, team))
    assert paths[0].read_text() == "float64 highest"
    lock = threading.Lock()
    text = "parallel asks for 2 workers, .*cannot pickle '_thread.lock' object.*; give parallel=1"
    with pytest.raises(ValueError, match=text):
        _workers.Team(2, lambda: lock, tmp_path, print).running()


@pytest.mark.slow
def test_others_take_over_cell_of_worker_that_was_killed(tmp_path, capfd):
    assert main(tmp_path, "--parallel", "2", "--killed", "1") == 0
    out, err = capfd.readouterr()
    assert "sum 6" in out
    assert "trial: worker" in err and "died with SIGKILL(-9); others take over" in err
    frame = records.read(tmp_path / "trial" / "cpu")
    assert sorted(frame["number"]) == [0, 1, 2, 3] and os.getpid() not in set(frame["process"])
    assert not list(tmp_path.rglob("*.claim"))


@pytest.mark.slow
def test_cell_that_all_workers_fail_at_is_missing(tmp_path, capfd):
    assert main(tmp_path, "--parallel", "2", "--refused", "3") == 2
    err = capfd.readouterr().err
    assert "3.jsonl is missing: all 2 workers ended (cell is refused; leave it out)" in err
    assert len(records.read(tmp_path / "trial" / "cpu")) == 3
    assert main(tmp_path) == 0
    assert "sum 6" in capfd.readouterr().out


@pytest.mark.slow
def test_jobs_of_submitit_make_cells(tmp_path):
    pytest.importorskip("submitit")
    path = tmp_path / "submitit.yaml"
    # In a process of its own: submitit keeps the standard output that it finds when it is imported.
    call = f"test_workers.main(pathlib.Path({str(tmp_path)!r}), '--parallel', {str(path)!r}"
    code = (
        f"import pathlib, sys; from tests import test_workers; sys.exit({call}, '--killed', '1'))"
    )
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "experiments")))

    def run(text):
        path.write_text(f"workers: 2\ncluster: local\n{text}: 5\n")
        command = [sys.executable, "-c", code]
        env = os.environ | {"PYTHONPATH": folders}
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)

    refused = run("timeut_min")
    assert refused.returncode == 2
    assert "which cannot be used (NameError: Unknown executor 'timeut'" in refused.stderr
    assert not (tmp_path / "trial").exists()
    done = run("timeout_min")
    assert done.returncode == 0 and "sum 6" in done.stdout and "others take over" in done.stderr
    assert list((tmp_path / "jobs").glob("*_log.out"))


@pytest.mark.slow
def test_cells_of_two_processes_have_bits_of_one(tmp_path):
    module = load_script("whisper_logistic")
    options = ["--preset", "tiny", "--epsilon", "5", "10", "--quiet", "--output"]
    assert module.main([*options, str(tmp_path / "one")]) == 0
    assert module.main([*options, str(tmp_path / "two"), "--parallel", "2"]) == 0
    paths = sorted((tmp_path / "one").rglob("*.jsonl"))
    assert len(paths) == 2
    for path in paths:
        lines = path.read_text().splitlines()[1:]
        other = tmp_path / "two" / path.relative_to(tmp_path / "one")
        assert other.read_text().splitlines()[1:] == lines and len(lines) > 10


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["0"], "parallel is 0; give how many processes, or the path of a YAML file"),
        (["none.yaml"], "parallel is 'none.yaml', which cannot be used (FileNotFoundError: No"),
        (
            ["few.yaml"],
            "parallel is 'few.yaml', which cannot be used (workers is missing; give a whole number",
        ),
        (["2", "--no-resume"], "parallel is given with --no-resume; name another --output"),
    ],
)
def test_other_workers_are_refused_before_work_starts(tmp_path, monkeypatch, capsys, options, text):
    monkeypatch.chdir(tmp_path)
    Path("few.yaml").write_text("cluster: local\n")
    assert main(tmp_path / "out", "--parallel", *options) == 2
    assert f"trial: error: {text}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_submitit_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    path = tmp_path / "submitit.yaml"
    path.write_text("workers: 2")
    with pytest.raises(ValueError, match="not installed; pip install submitit"):
        _workers.Team(path, print, tmp_path, print)
