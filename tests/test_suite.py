"""The suite of benchmarks: its table, its runner and its page."""

import csv
import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

import _page
import _suite
import _timing

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


class Parsed(Exception):
    """Options are fine."""


def runner():
    """scripts/bench.py as a module."""
    spec = importlib.util.spec_from_file_location("bench_runner", ROOT / "scripts" / "bench.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_suite_has_every_benchmark_and_no_other() -> None:
    scripts = {path.stem for kind in ("bench", "rival") for path in BENCHMARKS.glob(f"{kind}_*.py")}
    assert {entry.script for entry in _suite.SUITE} == scripts
    names = [entry.name for entry in _suite.SUITE]
    assert len(set(names)) == len(names)
    for entry in _suite.SUITE:
        assert (ROOT / "dpjax" / entry.package).is_dir(), entry
        assert {line.section for line in entry.lines} <= _suite.SECTIONS.keys()
        # What a benchmark is there for: a ratio to a peer, a floor or a limit, or growth.
        assert any(line.times or line.section == "growth" for line in entry.lines), entry.name


@pytest.mark.parametrize("script", sorted({entry.script for entry in _suite.SUITE}))
def test_suite_s_options_are_those_of_scripts(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = _timing.Bench.parse

    def parsed(bench: _timing.Bench, argv: list[str] | None = None) -> None:
        parse(bench, argv)
        raise Parsed

    monkeypatch.setattr(_timing.Bench, "parse", parsed)
    module = importlib.import_module(script)
    for entry in (benchmark for benchmark in _suite.SUITE if benchmark.script == script):
        for words in (entry.normal, entry.quick):
            with pytest.raises(Parsed):
                module.main(shlex.split(words))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("bench_mechanism", ["--versus", "10", "--alone"]),
        ("bench_temporal", ["--versus", "32", "--gram", "--design"]),
    ],
)
def test_peer_that_is_not_installed_is_left_out(
    script: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert importlib.import_module(script).main([*words, "--repeats", "1"]) == 0
    assert "is not installed: left out" in capsys.readouterr().out


def test_page_and_data_files_are_records() -> None:
    # Else: scripts/bench --page
    texts = _page.files()
    for path, text in texts.items():
        assert path.read_text() == text, path.name
    assert {path for path in _page.DATA.glob("benchmarks_*.csv")} == texts.keys() - {_page.PAGE}


def test_page_loads_or_links_every_data_file() -> None:
    page = _page.PAGE.read_text()
    written = {path.name for path in _page.DATA.glob("benchmarks_*.csv")}
    assert written == set(re.findall(r"\(data/(benchmarks_\w*\.csv)\)", page))
    assert ":file: data/benchmarks_peers.csv\n" in page


def test_page_has_least_and_largest_ratio_of_every_peer() -> None:
    page = _page.PAGE.read_text()
    measured: dict[str, list[float]] = {}
    with (_page.DATA / "benchmarks_peers.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            name = row["compared with"].rpartition(": ")[0]
            measured.setdefault(name, []).append(float(row["times"].replace(",", "")))
    shown: dict[str, list[float]] = {}
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| ([\d.,]+(?: to [\d.,]+)?) \|$", page, re.M)
    for name, ends in rows:
        shown.setdefault(name, []).extend(float(end.replace(",", "")) for end in ends.split(" to "))
    ends = {name: (min(ratios), max(ratios)) for name, ratios in measured.items()}
    assert {name: (min(ratios), max(ratios)) for name, ratios in shown.items()} == ends
    assert len(ends) > 10


SCRIPT = """
import json, sys
_, _, size, _, output = sys.argv
if size == "1":
    raise SystemExit("too small")
about = {"command": "python benchmarks/bench_some.py", "versions": {"python": "3"}, "rows": 2}
about |= {"device": {"kind": "cpu"}, "platform": {"processors": 2, "system": "Linux"}}
about |= {"format": 1, "guarantees": []}
with open(output, "w") as file:
    for line in (
        {"metadata": about},
        {"algorithm": "dpjax", "size": int(size), "seconds": 2.0},
        {"algorithm": "peer", "size": int(size), "seconds": 7.0},
    ):
        print(json.dumps(line), file=file)
"""


def test_runner_goes_on_after_failure_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    bench = runner()
    folder = tmp_path / "benchmarks"
    stored = folder / "records"
    stored.mkdir(parents=True)
    (folder / "bench_some.py").write_text(SCRIPT)
    line = _suite.Line(
        "peers", "a sum of {size}", "{base[seconds]:time}", "a peer: {seconds:time}",
        "time seconds", {"algorithm": "peer"}, {"algorithm": "dpjax"}, ("size",),
    )  # fmt: skip
    suite = [
        _suite.Entry("small", "engine", "bench_some", "--size 1", "--size 1", (line,)),
        _suite.Entry("large", "engine", "bench_some", "--size 5", "--size 3", (line,)),
        _suite.Entry("other", "models", "bench_some", "--size 6", "--size 4", (line,)),
    ]
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "SUITE", suite)
    monkeypatch.setattr(bench, "device", lambda: "")
    monkeypatch.setattr(_page, "SUITE", suite)
    monkeypatch.setattr(_page, "RECORDS", stored)
    monkeypatch.setattr(_page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(_page, "DATA", tmp_path / "data")

    assert bench.main(["engine", "--quick", "--output", str(tmp_path / "quick")]) == 1
    output = capsys.readouterr()
    assert "too small" in output.out and output.err == "failed: small\n"
    assert "large" in output.out and "other" not in output.out and not list(stored.iterdir())
    assert bench.main([]) == 1
    assert {path.name for path in stored.iterdir()} == {"large.jsonl", "other.jsonl"}
    page = (tmp_path / "page.md").read_text()
    assert "| a sum of 5 | a peer | 3.5 |" in page and "| a sum of 6 | a peer | 3.5 |" in page
    peers = tmp_path / "data" / "benchmarks_peers.csv"
    assert "engine,a sum of 5,1,2 s,a peer: 7 s,3.5" in peers.read_text().splitlines()
    assert "Without a record: `small`." in page

    # A record with a peer that is missing now stays.
    before = (stored / "large.jsonl").read_text()
    (stored / "large.jsonl").write_text(
        before.replace('"versions": {', '"versions": {"gone": "1", ')
    )
    text = (stored / "large.jsonl").read_text()
    assert bench.main(["engine"]) == 1
    assert "gone is not installed" in capsys.readouterr().out
    assert (stored / "large.jsonl").read_text() == text
    assert _page._stored(suite[1], stored) == [stored / "large.jsonl"]
    (stored / "large@nvidia-h200.jsonl").write_text(text.replace('"kind": "cpu"', '"kind": "H200"'))
    texts = {path.name: text.splitlines() for path, text in _page.files().items()}
    assert "engine,a sum of 5,2,2 s,a peer: 7 s,3.5" in texts["benchmarks_peers.csv"]
    assert any(line.startswith('2,"H200, ') for line in texts["benchmarks_machines.csv"])
