"""The page for reviewers: minutes are those of the records, and runs print what it shows."""

import contextlib
import doctest
import gzip
import io
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pandas
import pytest

from dpjax.results import records
from tests.support import ROOT

PAGE = (ROOT / "docs" / "howto" / "reproduce.md").read_text(encoding="utf-8")
RECORDS = ROOT / "docs" / "records"


def minutes(archive: str) -> dict[str, float]:
    """Minutes of an archive's files, by preset."""
    total: dict[str, float] = {}
    for name in sorted(set(names_in(archive))):
        head = records.read_metadata(RECORDS / f"{archive}.jsonl.gz", name)
        total[head["preset"]] = total.get(head["preset"], 0) + head["seconds"] / 60
    return total


def names_in(archive: str) -> list[str]:
    """Names of an archive's files."""
    text = gzip.decompress((RECORDS / f"{archive}.jsonl.gz").read_bytes()).decode()
    return re.findall(r'^\{"metadata":.*"file":"([^"]*)"', text, re.MULTILINE)


def test_minutes_are_those_of_records() -> None:
    table = re.findall(r"^\|.*\|$", PAGE, re.MULTILINE)
    stated = dict(re.findall(r"`(\w+)` ([\d.]+)", "\n".join(table)))
    assert len(stated) == 21
    for name, number in stated.items():
        measured = sum(time for preset, time in minutes(name).items() if preset[:3] == "cpu")
        assert float(number) == pytest.approx(measured, abs=0.05 if "." in number else 0.5), name


def test_minutes_on_gpu_are_those_of_records() -> None:
    low, high = map(int, re.search(r"in (\d+) to (\d+) minutes", PAGE).groups())
    spans = []
    for path in RECORDS.glob("*_long*.jsonl.gz"):
        name = path.name.removesuffix(".jsonl.gz")
        kind = records.read_metadata(path)["device"]["kind"]
        if name != "cifar_doppler_long":
            assert kind.startswith("NVIDIA"), name
            spans.append(sum(minutes(name).values()))
    assert (round(min(spans)), round(max(spans))) == (low, high)
    assert sum(minutes("cifar_doppler_long").values()) == pytest.approx(600, abs=30)


def test_no_record_has_preset_full() -> None:
    names = [path.name.removesuffix(".jsonl.gz") for path in RECORDS.glob("*.jsonl.gz")]
    assert "full" not in {preset for name in names for preset in minutes(name)}


def claims() -> list[dict[str, str]]:
    """All papers' claims."""
    store = tomllib.loads((RECORDS / "claims.toml").read_text(encoding="utf-8"))
    return [claim for paper in store.values() for claim in paper["claims"]]


def test_parts_of_claims_are_as_many_as_findings_say() -> None:
    findings = (ROOT / "docs" / "found" / "findings.md").read_text(encoding="utf-8")
    parts = [c for c in claims() if "This is a part of the claim" in c["found"]]
    assert {c["verdict"].partition(":")[0] for c in parts} == {"reproduced"}
    assert f"{len(parts)} *reproduced* rows are parts" in findings


def text_blocks() -> list[str]:
    """Rows of claims, each followed by what its run prints."""
    return re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_quoted_rows_are_those_of_claims() -> None:
    for block in text_blocks()[::2]:
        row, verdict, found, record = block.splitlines()
        (claim,) = [one for one in claims() if f"{one['where']}: {one['claim']}" == row]
        parts = [part.strip() for part in found.split("...") if part.strip()]
        assert claim["verdict"] == verdict and all(part in claim["found"] for part in parts)
        assert record == f"docs/records/{claim['record']}"


def sessions() -> str:
    """What the page types into Python, with the answers; other processors round otherwise."""
    text = "\n".join(re.findall(r"^```pycon\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
    return text.replace("new.equals(old)", "close(new, old)")


def close(new: pandas.DataFrame, old: pandas.DataFrame) -> bool:
    """Whether two records agree but for rounding."""
    pandas.testing.assert_frame_equal(new, old, rtol=1e-6)
    return len(new) > 0


def shown() -> list[str]:
    """Patterns of the lines that the page shows of the runs; `...` and seconds are left open."""
    lines = [line for block in text_blocks()[1::2] for line in block.splitlines() if line]
    parts = [re.sub(r"in [\d.]+ s$", "in ... s", line).split() for line in lines]
    return [r"\s+".join(".*" if p == "..." else re.escape(p) for p in line) for line in parts]


@pytest.mark.slow
def test_runs_print_what_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    printed = ""
    for line in re.findall(r"^python (experiments/.*)$", PAGE, re.MULTILINE):
        command = [sys.executable, *line.split()]
        printed += subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout
    assert len(shown()) == 7
    assert not [pattern for pattern in shown() if not re.search(pattern, printed)]
    monkeypatch.chdir(tmp_path)
    session = doctest.DocTestParser().get_doctest(
        sessions(), {"close": close}, "reproduce", None, None
    )
    with contextlib.redirect_stdout(report := io.StringIO()):
        outcome = doctest.DocTestRunner().run(session)
    assert outcome.attempted == 10 and not outcome.failed, report.getvalue()
