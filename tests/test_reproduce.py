"""scripts/reproduce: its help, and that stored records are replaced only where that is asked."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from _common import archives
from dpjax.results import records

ROOT = Path(__file__).resolve().parents[1]
# What it would have measured lies in ``new``, so that its processes import nothing slow.
EXPERIMENT = """
import pathlib, shutil, sys
assert sys.argv[1:] == ["--preset", "cpu"]
folder = pathlib.Path("results/one/cpu")
folder.mkdir(parents=True, exist_ok=True)
for name in ("a", "b"):
    if not (folder / f"{name}.jsonl").exists():
        shutil.copy(f"new/{name}.jsonl", folder)
folder.joinpath("one.svg").write_text("new one.svg")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one experiment, whose environment is this one."""
    for folder in ("scripts", "experiments/_common", "docs/records"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("scripts/reproduce", "experiments/_common/archives.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    text = f"environment() {{ PYTHON={sys.executable}; }}\n"
    (tmp_path / "scripts" / "_environment.sh").write_text(text)
    (tmp_path / "experiments" / "one.py").write_text(EXPERIMENT)
    (tmp_path / "new").mkdir()
    for name in "ab":
        records.write(tmp_path / "new" / f"{name}.jsonl", [{"text": f"new {name}"}], {})
    precious = records.write(tmp_path / "a.jsonl", [{"text": "precious"}], {})
    archives.pack(tmp_path / "docs" / "records" / "one.jsonl.gz", [precious])
    return tmp_path


def reproduce(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the script of a checkout."""
    command = ["bash", str(folder / "scripts" / "reproduce"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_help_runs_nothing(checkout: Path) -> None:
    for word in ("--help", "-h"):
        done = reproduce(checkout, "one", word)
        assert done.returncode == 0 and done.stdout.startswith("usage: scripts/reproduce")
        assert "--overwrite" in done.stdout and "experiments: one\n" in done.stdout
    for words, match in ((["--force"], "no option --force"), (["two"], "no experiments/two.py")):
        done = reproduce(checkout, *words)
        assert done.returncode == 2 and match in done.stderr
    assert not (checkout / "results").exists()


@pytest.mark.slow
def test_stored_records_are_kept_unless_asked(checkout: Path) -> None:
    stored = checkout / "docs" / "records" / "one.jsonl.gz"
    done = reproduce(checkout)
    assert done.returncode == 0, done.stderr
    assert records.read(stored)["text"].tolist() == ["precious", "new b"]
    assert (checkout / "docs" / "figures" / "one.svg").read_text() == "new one.svg"
    assert "a.jsonl differs" in done.stdout and "1 stored files differ" in done.stdout
    done = reproduce(checkout, "--overwrite", "one")
    assert records.read(stored)["text"].tolist() == ["new a", "new b"]
    assert "differ" not in done.stdout
    assert sorted(path.name for path in stored.parent.iterdir()) == ["one.jsonl.gz"]


def test_equal_rows_of_another_day_are_no_difference(tmp_path: Path) -> None:
    rows = [{"text": "a"}]
    first = records.write(tmp_path / "first" / "a.jsonl", rows, {"created": "2026-01-01"})
    second = records.write(tmp_path / "second" / "a.jsonl", rows, {"created": "2026-01-02"})
    other = records.write(tmp_path / "other" / "a.jsonl", [{"text": "b"}], {})
    archive = tmp_path / "one.jsonl.gz"
    assert archives.pack(archive, [first]) == []
    content = archive.read_bytes()
    assert archives.pack(archive, [second]) == [] and archive.read_bytes() == content
    assert archives.pack(archive, [other]) == ["a.jsonl"] and archive.read_bytes() == content


PLACE = "results/again/one"
FURTHER = """
import pathlib, shutil, sys
PRESETS = {"cpu": 1, "cpu_more": 2, "gpu": 3}
option, preset = sys.argv[1:]
folder = pathlib.Path("results/one") / preset
folder.mkdir(parents=True)
shutil.copy("new/b.jsonl", folder / (preset + ".jsonl"))
"""


@pytest.mark.slow
def test_further_presets_of_cpu_are_run_too(checkout: Path) -> None:
    (checkout / "experiments" / "one.py").write_text(FURTHER)
    done = reproduce(checkout)
    assert done.returncode == 0, done.stderr
    stored = archives.unpack(checkout / "docs" / "records" / "one.jsonl.gz", checkout / "unpacked")
    assert [path.name for path in stored] == ["a.jsonl", "cpu.jsonl", "cpu_more.jsonl"]


@pytest.mark.slow
def test_other_seeds_leave_stored_records_alone(checkout: Path) -> None:
    stored = checkout / "docs" / "records" / "one.jsonl.gz"
    before = stored.read_bytes()
    script = EXPERIMENT.replace('["--preset", "cpu"]', "ARGUMENTS").replace("results/one", PLACE)
    words = ["--preset", "cpu", "--other-seeds", "5000", "--output", "results/again"]
    (checkout / "experiments" / "one.py").write_text(f"ARGUMENTS = {words}\n{script}")
    done = reproduce(checkout, "--other-seeds", "one")
    assert done.returncode == 0, done.stderr
    again = stored.parent / "again" / "one.jsonl.gz"
    assert records.read(again)["text"].tolist() == ["new a", "new b"]
    assert stored.read_bytes() == before and not (checkout / "docs" / "figures").exists()
