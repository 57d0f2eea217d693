"""docs/benchmarks.md, written from the records of the suite."""

import json
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _suite import SECTIONS, SUITE, Entry, Line
from dpjax.results import records

__all__ = ["PAGE", "RECORDS", "page"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RECORDS = ROOT / "benchmarks" / "records"

HEAD = """# Benchmarks

This page shows how fast dpjax is beside other programs and lower bounds, and how its cost grows
with the problem. `scripts/bench` writes it from the records of all benchmarks.

```bash
scripts/bench                             # runs all benchmarks, one after the other
scripts/bench secagg                      # runs those of one package of dpjax
scripts/bench --quick                     # runs all at small sizes; leaves the records alone
python benchmarks/bench_dsgd.py --help    # says what a script measures
```

- **Times** is a ratio: how many times as long a peer takes as dpjax, or dpjax as a floor or limit.
- Times and rates are medians unless a script says otherwise. Compilation is excluded. Programs that
  are compared alternate within one run.
- The sizes suit two cores and twenty minutes. The scripts have options for larger ones.
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


def _times(line: Line, row: dict[str, Any]) -> str:
    """The ratio's cell."""
    if not line.times:
        return ""
    kind, _, column = line.times.rpartition(" ")
    ratio = row[column]
    if kind:
        ratio = row["base"][column] / ratio if kind == "rate" else ratio / row["base"][column]
    return _short(ratio)


def _cells(line: Line, rows: list[dict[str, Any]]) -> Iterator[list[str]]:
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


def page() -> str:
    """The text of the page."""
    cells: dict[str, list[str]] = {section: [] for section in SECTIONS}
    sources = []
    missing = []
    places = dict[str, int]()
    for entry in SUITE:
        stored = _stored(entry, RECORDS)
        missing += [] if stored else [f"`{entry.name}`"]
        for path in stored:
            about = records.read_metadata(path)
            where = f"{_machine(about)}; {_versions(about)}"
            number = places.setdefault(where, len(places) + 1)
            rows = _rows(path)
            for line in entry.lines:
                for kind, *others in _cells(line, rows):
                    row = entry.package, f"{kind} ({number})" if number > 1 else kind, *others
                    cells[line.section].append("| `{}` | {} | {} | {} | {} |".format(*row))
            command = about["command"].partition(" --output")[0]
            sources.append(f"| `{path.name}` | `{command}` | {number} |")
    listed = (f"{number}. {where}" for where, number in places.items())
    parts = [
        HEAD,
        "Machines and versions. Lines without a number in brackets are of machine 1:\n",
        *listed,
    ]
    for section, title in SECTIONS.items():
        parts += [f"\n## {section.capitalize()}\n", title + "\n"]
        parts += ["| package | what | dpjax | compared with | times |"]
        parts += ["| --- | --- | --- | --- | --- |", *cells[section]]
    parts += ["\n## Records\n", "| record | command | machine |", "| --- | --- | --- |", *sources]
    if missing:
        parts.append(f"\nWithout a record: {', '.join(missing)}.")
    return "\n".join(parts) + "\n"
