"""Experiments of gradient tracking: options, stored records, what is printed with them."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    sys.modules.pop(name, None)
    return importlib.import_module(name)


@pytest.mark.parametrize("name", ["tracking_fusion", "tracking_leakage"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gamma", "0.1", "0.2"], "gamma has 2 entries and epsilon 1; give one for each"),
        (["--q1", "0.99"], "q1 is 0.99 and q2 0.99; give q1 < q2"),
        (["--q2", "1.5"], "q2 is 1.5"),
        (["--beta", "-1"], "beta is -1"),
    ],
)
def test_options_of_a_budget_are_refused_before_any_work(
    tmp_path, capsys, monkeypatch, name, options, said
):
    arguments = ["--preset", "tiny", "--output", str(tmp_path), *options]
    assert script(name, monkeypatch).main(arguments) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_decays_of_images_are_checked_too(tmp_path, capsys, monkeypatch):
    module = script("tracking_mnist", monkeypatch)
    assert module.main(["--preset", "tiny", "--output", str(tmp_path), "--q1", "0.97"]) == 2
    assert "q1 is 0.97 and q2 0.95; give q1 < q2" in capsys.readouterr().err


def read_again(tmp_path, capsys, monkeypatch, name):
    """What is printed of the records in the documentation, none of which may be made anew."""
    shutil.copytree(ROOT / "docs" / "records" / name, tmp_path / name / "cpu")
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / name).rglob("*.jsonl")}
    module = script(name, monkeypatch)
    assert module.main(["--output", str(tmp_path), "--quiet"]) == 0
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / name).rglob("*.jsonl")} == stored
    return capsys.readouterr().out.splitlines()


def test_tables_of_fusion_say_what_epsilon_is_of(tmp_path, capsys, monkeypatch):
    lines = read_again(tmp_path, capsys, monkeypatch, "tracking_fusion")
    assumed, smooth = (next(i for i, x in enumerate(lines) if said in x) for said in (
        "at most 1 apart in L1 at every model", "for PP-DOAGT and Diff-TV-AB also"
    ))  # fmt: skip
    heads = [i for i, line in enumerate(lines) if "algorithm" in line.split()]
    assert len(heads) == 2 and assumed < smooth < heads[0]
    for head in heads:
        assert "epsilon" in lines[head].split()
    last = next(i for i in range(heads[0], len(lines)) if not lines[i])
    first = [line.split() for line in lines[heads[0] + 2 : last]]
    column = lines[heads[0]].replace("per agent", "per_agent").split().index("epsilon")
    for row in first:
        own = row[2] in ("tracking", "dpop")
        assert (float(row[column].replace(",", "")) == float(row[0])) == own


def test_records_of_leakage_are_read_as_stored(tmp_path, capsys, monkeypatch):
    lines = read_again(tmp_path, capsys, monkeypatch, "tracking_leakage")
    assert sum(line.endswith(": read") for line in lines) == 5
