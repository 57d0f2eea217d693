"""The example of real sites: hospitals that train, processes that end, folders kept apart."""

import importlib.machinery
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "examples/hospitals/run"
PACKAGES = next(path for path in sys.path if Path(path, "jax").is_dir())
CAPTION = "(epsilon = 3, delta = 0.0001)-DP per record (zero_out_record), outsider, T = 50"


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users can enter, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="hospitals"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def example() -> ModuleType:
    """The script as a module."""
    loader = importlib.machinery.SourceFileLoader("hospitals_run", str(RUN))
    spec = importlib.util.spec_from_loader("hospitals_run", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def python() -> str:
    """An interpreter that other users can run, or a skipped test."""
    names = [sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"]
    for name in names if not os.geteuid() else ():
        try:
            subprocess.run([name, "-c", "import ssl"], check=True, user=61000, group=61000)
        except (OSError, subprocess.CalledProcessError):
            continue
        return name
    pytest.skip("not root, or no other user can run this Python")


def environment() -> dict[str, str]:
    """The packages are those of this process; devices and flags are a user's."""
    path = os.pathsep.join((str(ROOT), PACKAGES))
    return {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": ""}


def run(*words: str | Path, interpreter: str = sys.executable) -> subprocess.CompletedProcess:
    """What the script does."""
    command = [interpreter, RUN, *words]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment())


def processes(folder: Path) -> list[str]:
    """Processes that work in a folder."""
    numbers = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").resolve().is_relative_to(folder):
                numbers.append(entry.name)
        except OSError:
            continue
    return numbers


def test_script_is_executable() -> None:
    assert os.access(RUN, os.X_OK)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "is not an empty folder; name a new one"),
        (["--sites", "2"], "--sites is 2; give 3 to 9"),
    ],
)
def test_script_refuses_in_one_line(tmp_path: Path, words: list[str], reason: str) -> None:
    folder = tmp_path / "new"
    if not words:
        folder.mkdir()
        (folder / "mine.txt").write_text("kept")
    done = run(folder, *words)
    assert done.returncode and not done.stdout
    assert done.stderr.startswith("hospitals: ") and reason in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*.*")] == ([] if words else ["mine.txt"])


def test_process_that_fails_ends_run_with_its_last_line(example, tmp_path: Path) -> None:
    hospital = example.Hospital(tmp_path, "lyon", None)
    hospital.folder.mkdir()
    (hospital.folder / "log.txt").write_text("INFO all well\ndpjax site run: error: no key\n")
    hospital.process = SimpleNamespace(poll=lambda: 0, returncode=0)
    hospital.check()
    hospital.process = SimpleNamespace(poll=lambda: 2, returncode=2)
    with pytest.raises(example.Failed, match="lyon ended with status 2: .*error: no key"):
        example.wait_for([hospital], lambda: False)


@pytest.mark.mutant
def test_folder_that_others_can_read_is_caught(example, public: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", python())
    hospitals = [example.Hospital(public, name, 61000 + k) for k, name in enumerate(("a", "b"))]
    for hospital in hospitals:
        hospital.run.mkdir(parents=True)
        names = ["site.toml", "records.csv", f"{hospital.name}.key", "run/audit.jsonl", "run/state"]
        for name in names:
            (hospital.folder / name).touch(0o644)
        hospital.folder.chmod(0o700)
        os.chown(hospital.folder, hospital.user, hospital.user)
    example.check_users(hospitals)
    hospitals[1].folder.chmod(0o711)
    with pytest.raises(example.Failed, match="b/records.csv can be read"):
        example.check_users(hospitals)
    # One that reaches nothing at all shows nothing.
    hospitals[0].folder.chmod(0)
    with pytest.raises(example.Failed, match="Permission denied"):
        example.check_users(hospitals)


@pytest.mark.slow
def test_three_hospitals_go_on_after_kill(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    done = run(folder)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    pattern = (
        r"three hospitals: 50 rounds at epsilon 3 a record, lyon was killed at round (\d+) and "
        r"went on; held-out accuracy (0\.\d\d), (0\.\d\d), (0\.\d\d)"
    )
    killed_at, *accuracies = re.fullmatch(pattern, last).groups()
    assert 25 <= int(killed_at) < 50
    assert all(0.55 < float(accuracy) < 0.85 for accuracy in accuracies)
    assert done.stdout.count(CAPTION) == 3 and "simulation" not in done.stdout
    assert not processes(folder)
    for name in ("lyon", "geneva", "turin"):
        assert (folder / name / "run/model.npz").exists()
        assert not (folder / name / "run/secret").exists()
        assert (folder / name).stat().st_mode & 0o777 == 0o700
        settings = tomllib.loads((folder / name / "site.toml").read_text(encoding="utf-8"))
        assert settings["name"] == name


@pytest.mark.slow
def test_nine_hospitals_are_users_that_cannot_read_each_other(public: Path) -> None:
    done = run(public / "new", "--sites", "9", "--users", interpreter=python())
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("nine hospitals: 50 rounds at epsilon 3 a record, each by a Unix user")
    assert last.count("0.") == 9
    names = {path.stat().st_uid for path in (public / "new").glob("*/run")}
    assert names == set(range(61000, 61009))


@pytest.mark.slow
def test_script_that_is_stopped_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, RUN, tmp_path / "new"]
    script = subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8", env=environment())
    while not list(tmp_path.glob("new/*/run/run")) and script.poll() is None:
        time.sleep(0.1)
    assert len(processes(tmp_path)) == 3
    script.send_signal(signal.SIGTERM)
    assert script.communicate()[1] == "hospitals: stopped\n"
    assert script.returncode == 1 and not processes(tmp_path)
