"""Run all benchmarks or those of some packages, one after the other, and write their page.

Peers that are not installed are left out, and every script says so. To have them all:

    .venv/bin/pip install '.[bench]'        PyTorch, Opacus, Flower's secure sums
    python benchmarks/rival_flower.py --help        an environment for Flower's simulation
"""

import argparse
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import _page
from _suite import SUITE, Entry
from dpjax.results import records

ROOT = Path(__file__).resolve().parents[1]

DEVICE = "import jax, json; d = jax.devices()[0]; print(json.dumps([d.platform, d.device_kind]))"
PACKAGES = sorted({entry.package for entry in SUITE})


def device() -> str:
    """The accelerator's name as part of a file's; empty for CPUs."""
    answer = subprocess.check_output([sys.executable, "-c", DEVICE], encoding="utf-8")
    platform, kind = json.loads(answer.splitlines()[-1])
    return "" if platform == "cpu" else "@" + re.sub(r"\W+", "-", kind.lower()).strip("-")


def measured(entry: Entry, quick: bool, record: Path) -> bool:
    """Run one benchmark, print its line and put its record in place; whether it succeeded."""
    words = shlex.split(entry.quick if quick else entry.normal)
    script = ROOT / "benchmarks" / f"{entry.script}.py"
    log, made = record.with_suffix(".txt"), record.with_suffix(".part.jsonl")
    made.unlink(missing_ok=True)
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with log.open("wb") as file:
        command = [sys.executable, str(script), *words, "--output", str(made)]
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    said = "" if code == 0 else "failed" if code > 0 else f"ended by signal {-code}"
    if code == 0 and not made.exists():
        said = "left out: " + (log.read_text(encoding="utf-8").splitlines() or [""])[-1]
    took = f"{time.monotonic() - began:7.1f} s {spent:7.1f} s of processors"
    print(f"{entry.name:18}{took}  {said}".rstrip(), flush=True)
    if code == 0 and made.exists():
        os.replace(made, record)
    elif code:
        tail = log.read_text(encoding="utf-8").splitlines()[-8:]
        print("".join(f"    {line}\n" for line in tail), end="")
    return code == 0


def stored(record: Path) -> str:
    """Put a record beside the others, unless it lacks peers of theirs, which are returned."""
    target = _page.RECORDS / record.name
    if target.exists():
        before, now = (records.read_metadata(path)["versions"] for path in (target, record))
        if missing := before.keys() - now.keys():
            return ", ".join(sorted(missing))
    target.write_bytes(record.read_bytes())
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"of {', '.join(PACKAGES)}")
    parser.add_argument("--quick", action="store_true", help="small sizes; the records stay")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="for records and logs")
    parser.add_argument("--page", action="store_true", help="write the page alone, from records")
    options = parser.parse_args(argv)
    for name in set(options.packages) - set(PACKAGES):
        parser.error(f"PACKAGE is {name!r}; give one of {', '.join(PACKAGES)}")
    failed = []
    if not options.page:
        kept = Path(options.output or tempfile.mkdtemp(prefix="dpjax-bench-")).resolve()
        kept.mkdir(parents=True, exist_ok=True)
        named = device()
        for entry in SUITE:
            if entry.package in (options.packages or PACKAGES) and (entry.gpu or not named):
                record = kept / f"{entry.name}{named}.jsonl"
                if not measured(entry, options.quick, record):
                    failed.append(entry.name)
                elif record.exists() and not (options.quick or options.output):
                    if missing := stored(record):
                        print(f"    {record.name} stays: {missing} is not installed")
                        failed.append(entry.name)
        print(f"records and logs: {kept}")
    if not (options.quick or options.output):
        for path, text in _page.files().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
