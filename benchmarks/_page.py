"""docs/artifact/benchmarks.md and its data files, written from the records of the suite."""

import csv
import io
import json
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _suite import SECTIONS, SUITE, Entry, Line
from dpjax.results import records

__all__ = ["DATA", "PAGE", "RECORDS", "files"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "artifact" / "benchmarks.md"
DATA = PAGE.parent / "data"
RECORDS = ROOT / "benchmarks" / "records"

PLACE = "<!-- rows -->"
FILES = "\n".join(
    f"- [{name}](data/benchmarks_{name}.csv): {text}" for name, text in SECTIONS.items()
)
TEXT = f"""---
nosearch: true
---

# Benchmarks

This page says how fast dpjax is beside other programs, for reviewers and readers who choose a tool.

```bash
scripts/bench                             # all benchmarks, one after the other
scripts/bench secagg                      # those of one package of dpjax
scripts/bench --quick                     # all at small sizes; the records stay
scripts/bench --page                      # this page, from the records
python benchmarks/bench_dsgd.py --help    # what a script measures
```

## Times of other programs

The table says how many times as long a program takes as dpjax, over all measured sizes. Below 1,
dpjax is slower.

{PLACE}

Every size, with the number of its machine:

```{{csv-table}}
:file: data/benchmarks_peers.csv
:header-rows: 1
```

## How it is measured

- Programs that are compared alternate within one run. Compilation is excluded.
- Times and rates are medians unless a script says otherwise.
- Clipped gradients: the fastest length of a pass counts, for each program.
- Runs side by side count each. PyTorch's loop has one run.
- Most records have `dirty` true (changed files), and a `load_average` of up to 24.

## What it cannot show

- Sizes suit two cores and half an hour. The scripts have options for larger ones.
- GPUs have lines for clipped gradients and the design of noise alone.
- Flower's simulation asks for answers every tenth of a second, which bounds its rate for small
  models.

## Data

{FILES}
- [machines](data/benchmarks_machines.csv): hardware and versions
- [records](data/benchmarks_records.csv): commands
"""


class _Formatter(string.Formatter):
    """Numbers with units: time, ms, rate, bytes, flops."""

    def format_field(self, value: Any, spec: str) -> str:
        if spec == "ms":
            value = value / 1e3
            spec = "time"
        if spec == "time":
            return _scaled(value, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)))
        if spec == "rate":
            return _short(value) + "/s"
        if spec == "bytes":
            return _scaled(value, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)))
        if spec == "flops":
            return _scaled(value, (("TFLOP/s", 1e12), ("GFLOP/s", 1e9)))
        return str(super().format_field(value, spec))


def _short(value: float) -> str:
    """Three digits, or all of a number's whole ones."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    """In the largest unit that the value reaches, else in the smallest."""
    name, size = next((unit for unit in units if value >= unit[1]), units[-1])
    return f"{_short(value / size)} {name}"


def _fits(row: dict[str, Any], where: dict[str, Any]) -> bool:
    """Whether a row has these entries."""
    return all(
        row.get(name) in value if isinstance(value, tuple) else row.get(name) == value
        for name, value in where.items()
    )


def _times(line: Line, row: dict[str, Any]) -> float | None:
    """The ratio, of a line that has one."""
    if not line.times:
        return None
    kind, _, column = line.times.rpartition(" ")
    ratio = row[column]
    if kind:
        ratio = row["base"][column] / ratio if kind == "rate" else ratio / row["base"][column]
    return float(ratio)


def _cells(line: Line, rows: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """What, ours, other and times of each row that fits, and that holds what the line shows."""
    display = _Formatter()
    for row in rows:
        if not _fits(row, line.where):
            continue
        meant = line.base | {name: row.get(name) for name in line.by}
        base = next((item for item in rows if line.base and _fits(item, meant)), None)
        try:
            parts = [display.format(case, **row, base=base) for case in (line.what, line.ours)]
            other = display.format(line.other, **row, base=base)
            times = row | {"base": base}
            yield [*parts, other, _times(line, times)]
        except (KeyError, TypeError):
            continue  # a row without that number: a peer that was left out, say


def _rows(path: Path) -> list[dict[str, Any]]:
    """Rows as written: a frame would make floats of whole numbers."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def _stored(entry: Entry, folder: Path) -> list[Path]:
    """The records of an entry: of CPUs, then of other devices, whose names end in theirs."""
    return [
        path for path in sorted(folder.glob(f"{entry.name}*.jsonl"))
        if re.fullmatch(rf"{entry.name}(@[\w-]+)?", path.stem)
    ]  # fmt: skip


def _machine(about: dict[str, Any]) -> str:
    """Processor, cores, memory and device of a record."""
    cores = f"{about['platform']['processors']} cores"
    words = [cores, about["platform"]["system"]]
    if "machine" in about:
        words[1:1] = [about["machine"]["processor"], f"{about['machine']['memory_gib']} GiB"]
    device = about["device"]["kind"]
    return ", ".join(words if device == "cpu" else [device, *words])


def _versions(about: dict[str, Any]) -> str:
    """Libraries and peers."""
    left = ("jaxlib", "optax", "flax")
    listed = {name: value for name, value in about["versions"].items() if name not in left}
    return ", ".join(f"{name} {value}" for name, value in listed.items() if value)


def _title(line: Line, what: str, other: str) -> tuple[str, str]:
    """What the page calls a line and its peer."""
    return line.title or what.partition(",")[0], other.rpartition(": ")[0]


def _ends(ratios: list[float]) -> str:
    """The least and the largest of ratios."""
    return " to ".join(dict.fromkeys(map(_short, (min(ratios), max(ratios)))))


def _read() -> tuple[dict[str, list[Any]], dict[tuple[str, str], list[float]], list[str]]:
    """Lines of the data files by name, ratios of peers by title, and entries without a record."""
    lines: dict[str, list[Any]] = {
        section: [("package", "what", "machine", "dpjax", "compared with", "times")]
        for section in SECTIONS
    }
    lines["records"] = [("record", "command", "machine")]
    machines = dict[str, int]()
    ratios: dict[tuple[str, str], list[float]] = {}
    missing = []
    for entry in SUITE:
        stored = _stored(entry, RECORDS)
        missing += [] if stored else [f"`{entry.name}`"]
        for path in stored:
            about = records.read_metadata(path)
            where = f"{_machine(about)}; {_versions(about)}"
            number = machines.setdefault(where, len(machines) + 1)
            rows = _rows(path)
            for line in entry.lines:
                for what, ours, other, ratio in _cells(line, rows):
                    times = "" if ratio is None else _short(ratio)
                    row = (entry.package, what.replace("`", ""), number, ours, other, times)
                    lines[line.section].append(row)
                    if line.section == "peers":
                        ratios.setdefault(_title(line, what, other), []).append(ratio)
            command = about["command"].partition(" --output")[0]
            lines["records"].append((path.name, command, number))
    lines["machines"] = [("machine", "hardware", "versions")]
    lines["machines"] += [(number, *where.split("; ")) for where, number in machines.items()]
    return lines, ratios, missing


def files() -> dict[Path, str]:
    """The page and its data files, by path."""
    lines, ratios, missing = _read()
    shown = ["| what | program | times |", "| --- | --- | --- |"]
    shown += [f"| {what} | {peer} | {_ends(each)} |" for (what, peer), each in ratios.items()]
    if missing:
        shown.append(f"\nWithout a record: {', '.join(missing)}.")
    results = {PAGE: TEXT.replace(PLACE, "\n".join(shown))}
    for name, rows in lines.items():
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        results[DATA / f"benchmarks_{name}.csv"] = text.getvalue()
    return results
