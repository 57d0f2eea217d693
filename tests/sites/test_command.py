"""The commands of sites: a status of a site that has stopped, and what it takes to ask."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest

from dpjax import _files
from dpjax.sites import command, start
from dpjax.sites.command import status_command
from dpjax.sites.store import LEAVING, SUCCESSOR, Audit, Folder


def write_status(folder: Path, doing: str, age: float = 1.0, **fields: object) -> None:
    """What a site writes about itself."""
    status = {"name": "turin", "doing": doing, "round": 3, "rounds": 5, "sent": 4, "peers": {}}
    status |= {"caption": "sites", "time": time.time() - age, **fields}
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "audit.jsonl").write_text('{"event": "begun", "before": ""}\n')


@pytest.mark.parametrize(
    ("doing", "age", "used", "code", "words"),
    [
        ("waits for the message of lyon", 1.0, True, 0, ""),
        (
            "waits for the message of lyon",
            200.0,
            True,
            1,
            "the site hangs, or a round takes longer",
        ),
        # At once after a kill: a health check must not wait.
        ("waits for the message of lyon", 1.0, False, 1, "has stopped: no process runs it"),
        ("waits for the message of lyon", 200.0, False, 1, "has stopped: no process runs it"),
        ("stopped: a reason", 1.0, False, 1, "has stopped: no process runs it"),
        ("is done", 200.0, False, 0, ""),
        ("is done, and stays for geneva", 200.0, True, 0, ""),
    ],
)
def test_status_of_site_that_stopped_is_no_success(
    doing: str,
    age: float,
    used: bool,
    code: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    write_status(tmp_path, doing, age)
    lock = _files.Lock("folder", tmp_path, tmp_path / "lock")
    if not used:
        lock.close()
    assert status_command(tmp_path) == code
    printed = capsys.readouterr().out
    assert f"{doing}, round 3 of 5" in printed and "audit: 1 line" in printed
    # What a killed process wrote last is not what it does now.
    is_old = not used and not doing.startswith(("stopped", "is done"))
    assert printed.startswith("turin: stopped; the last" if is_old else f"turin: {doing}")
    assert words in printed and ("the site " in printed) == bool(code)
    # A round of theirs takes longer.
    assert status_command(tmp_path, stale=300.0) == (0 if used else code)
    lock.close()
    # The question keeps nobody out.
    _files.Lock("folder", tmp_path, tmp_path / "lock").close()


def test_status_before_the_first_start_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "run"
    assert status_command(folder) == 1 and not folder.exists()
    assert f"{folder}: no site has been started with this folder" in capsys.readouterr().out
    lock = _files.Lock("folder", folder, folder / "lock")
    assert status_command(folder) == 1
    assert f"{folder}: a site starts with this folder" in capsys.readouterr().out
    lock.close()


def test_status_of_a_site_that_noted_nothing_yet(tmp_path: Path, capsys) -> None:
    write_status(tmp_path, "stopped: KeyboardInterrupt")
    (tmp_path / "audit.jsonl").unlink()
    assert status_command(tmp_path) == 1
    assert "audit: 0 lines" in capsys.readouterr().out


def test_status_of_an_earlier_phase_names_the_last_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    for name in ("run.2", "run.10", "run.old", "runs.11"):
        (tmp_path / name).mkdir()
    assert status_command(folder) == 1
    printed = capsys.readouterr().out
    assert f"{folder}: of an earlier phase; dpjax site status {folder}.10 is" in printed
    folder.mkdir()
    write_status(folder, "stopped: for a while")
    (folder / SUCCESSOR).write_bytes(b"")
    assert status_command(folder) == 1
    assert "no process runs it; its phase has ended" in capsys.readouterr().out
    assert status_command(tmp_path / "run.10") == 1
    assert "earlier phase" not in capsys.readouterr().out


def test_nobody_leaves_by_the_folder_of_its_site(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match="name that of a run that has begun"):
        command.leave_command(tmp_path)
    assert not (tmp_path / LEAVING).exists()


def test_nobody_leaves_a_run_that_is_done(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"")
    write_status(tmp_path, "is done")
    with pytest.raises(ValueError, match="its run is done, so nobody waits for it"):
        command.leave_command(tmp_path)
    assert not (tmp_path / LEAVING).exists()


def test_health_check_loads_no_jax(tmp_path: Path) -> None:
    program = "import sys; from dpjax.sites import command; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path).returncode == 0


class Member:
    """A site that has run, for what is printed of it."""

    name = "turin"
    round = 2
    awaited = ()
    has_left = False
    guarantee = SimpleNamespace(caption=lambda: "a caption", statement=lambda: "a statement")
    agreement = SimpleNamespace(digest="of the plan", roster=SimpleNamespace(digest="of names"))

    def __init__(self, folder: Path, error: Exception | None) -> None:
        self.folder = folder
        self.error = error

    def statement(self) -> str:
        return str(self.guarantee.statement())

    def run(self, callback: Callable[[SimpleNamespace], None]) -> None:
        callback(SimpleNamespace(round=2, metrics={"test_accuracy": np.array([[0.75]])}))
        if self.error is not None:
            raise self.error

    def save(self, path: Path) -> None:
        path.touch()

    def close(self) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs such a site by the command, and leaves nothing in this process."""
    monkeypatch.setenv("GRPC_VERBOSITY", "ERROR")
    (tmp_path / "site.toml").write_text('plan = "plan.json"\n[data]\nfile = "records.csv"\n')

    def run(log: Literal["text", "json"], error: Exception | None = None) -> int:
        monkeypatch.setattr(start, "site", lambda *values, **words: Member(tmp_path, error))
        return command.run_command(tmp_path / "site.toml", log)

    logger = command._LOG
    before = logger.handlers, logger.level, logger.propagate
    yield run
    logger.handlers, logger.level, logger.propagate = before


def test_metrics_are_in_file_and_nowhere_else(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert run("text") == 0
    out, err = capsys.readouterr()
    metrics = tmp_path / "metrics.jsonl"
    assert out.splitlines()[-1].endswith(
        f"turin: round 2, model {tmp_path}/model.npz, metrics {metrics}"
    )
    assert json.loads(metrics.read_text()) == {"round": 2, "test_accuracy": 0.75}
    assert metrics.stat().st_mode & 0o077 == 0
    assert "0.75" not in out + err and "accuracy" not in out + err
    assert "INFO roster of names, plan of the plan" in err


def test_log_of_json_is_json_alone(run: Callable[..., int], capsys: pytest.CaptureFixture) -> None:
    assert run("json", ValueError("it is\nno file")) == 2
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["level"] for line in lines] == ["INFO", "INFO", "ERROR"]
    assert lines[-1]["text"] == "it is\nno file"
    assert os.environ["GRPC_VERBOSITY"] == "NONE"
    with pytest.raises(ValueError, match="no file"):
        run("text", ValueError("no file"))


def test_lines_of_grpc_are_kept_where_a_site_listens(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There alone they say why a handshake was refused."""
    monkeypatch.delenv("GRPC_VERBOSITY")
    path = tmp_path / "site.toml"
    text = path.read_text()
    path.write_text('listen = "127.0.0.1:1"\n' + text)
    assert run("text") == 0 and "GRPC_VERBOSITY" not in os.environ
    path.write_text(text)
    assert run("text") == 0 and os.environ.pop("GRPC_VERBOSITY") == "NONE"


@pytest.mark.mutant
@pytest.mark.parametrize("swallows", [False, True])
def test_sigterm_leaves_a_last_line_and_is_what_ended_it(swallows: bool) -> None:
    """A callback of the garbage collector swallows what is raised in it; JAX has one."""
    call = "Swallowing()" if swallows else "interrupt()"
    program = (
        "import os, signal, time; from dpjax.sites import command; command._log_to_stderr('text')\n"
        "command._AGAIN = 0.5\n"
        "def interrupt(): os.kill(os.getpid(), signal.SIGTERM)\n"
        "class Swallowing:\n"
        "    def __del__(self): interrupt()\n"
        "with command._noting_termination():\n"
        f"    {call}\n"
        "    time.sleep(10)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGTERM
    assert done.stderr.endswith(" INFO stopped by SIGTERM; started again, the site goes on\n")


def test_log_is_opened_before_grpc_is_imported() -> None:
    program = (
        "import sys; from dpjax.sites import command; command._log_to_stderr('json'); "
        "from dpjax.sites import start; sys.exit('grpc' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_status_has_units_and_says_that_a_site_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    peers = {"lyon": {"session": "open", "sent_bytes": 5, "silence_s": None}}
    status = {"name": "turin", "doing": "stopped: a reason", "round": 3, "rounds": 5, "sent": 4}
    status |= {"caption": "sites", "time": time.time(), "peers": peers}
    (tmp_path / "status.json").write_text(json.dumps(status))
    (tmp_path / "audit.jsonl").write_text("")
    assert status_command(tmp_path) == 1
    printed = capsys.readouterr().out
    assert "turin: stopped: a reason" in printed and "has stopped" in printed
    assert "  lyon: session open, sent_bytes 5\n" in printed


@pytest.mark.parametrize(
    ("doing", "words"),
    [
        ("stopped: lyon shows a message; turin must leave", "it does not go on in this run"),
        ("stopped: lyon sent two messages. Go on without it", "it does not go on in this run"),
        ("goes on", "start it again"),
    ],
)
def test_status_says_whether_to_start_again(
    doing: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(tmp_path)
    audit = Audit(folder)
    for round in range(4):
        audit.note("stored", round=round)
    folder.close()
    # Written before the last two messages.
    status = {"name": "turin", "time": time.time(), "doing": doing, "round": 2, "rounds": 9,
              "sent": 2, "caption": "sites", "peers": {}}  # fmt: skip
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert status_command(tmp_path) == 1
    printed = capsys.readouterr().out
    assert words in printed and "messages sent: 4 of 9" in printed
