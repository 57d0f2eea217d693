"""What every benchmark shares: repeated timing, peak memory, a command line, rows and their record.

Times are taken in turns where calls are compared, so that whatever else the machine does falls on
all of them alike. A first call compiles; it is told apart and never counted. Rows of a peer hold
``times_dpjax``, how many times as long as dpjax it takes; dpjax's own hold ``times_floor`` or
another ratio to what no program does faster on the machine.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpjax.results import records, tables

__all__ = ["Bench", "Timing", "forget_peak", "installed", "peak", "timed", "turns"]


_SPEED = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OPENBLAS_NUM_THREADS", "XLA_FLAGS")
"""Variables that change how fast libraries are."""
_PEERS = (
    "clarabel", "cvxpy", "flwr", "jax_privacy", "opacus", "opendp", "phe", "ray", "scikit-learn",
    "torch",
)  # fmt: skip
"""What benchmarks compare with: their versions are recorded."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, repeated.

    Attributes:
        result: What the last call gave.
        first: Seconds of the first call, compilation included.
        times: Seconds of the others.
    """

    result: Any
    first: float
    times: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the repeated calls; the first one's seconds where it was the only one."""
        return statistics.median(self.times) if self.times else self.first

    @property
    def least(self) -> float:
        """Least of the repeated calls: a floor, which other work on the machine must not raise."""
        return min(self.times, default=self.first)


def timed(
    call: Callable[[], Any], repeats: int, *, clock: Callable[[Any], float] | None = None
) -> Timing:
    """Time a call once and then ``repeats`` times more.

    Args:
        call: What to time; its arrays are waited for.
        repeats: How often after the first call.
        clock: Seconds as the result itself states them, where setting up shall not count.

    Returns:
        The last result and the seconds.
    """
    return turns({"": call}, repeats, clock=clock)[""]


def turns(
    calls: Mapping[str, Callable[[], Any]],
    repeats: int,
    *,
    clock: Callable[[Any], float] | None = None,
) -> dict[str, Timing]:
    """Time several calls, one of each in turn. Arguments as in `timed`; a timing by name."""
    import jax

    seconds: dict[str, list[float]] = {name: [] for name in calls}
    results = {}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            results[name] = jax.block_until_ready(call())
            took = time.perf_counter() - began
            seconds[name].append(took if clock is None else clock(results[name]))
    return {
        name: Timing(results[name], second[0], tuple(second[1:]))
        for name, second in seconds.items()
    }


def peak() -> int:
    """Return the process's largest resident size so far, in bytes."""
    # On Linux getrusage also counts what the process that started this one had.
    with contextlib.suppress(OSError):
        text = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> int:
    """Begin `peak` anew, as Linux allows it, and return what it says then, in bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return peak()


def installed(peer: str) -> bool:
    """Whether a peer's module can be imported; says so where its rows are left out."""
    result = importlib.util.find_spec(peer) is not None
    if not result:
        print(f"{peer} is not installed: left out (pip install '.[bench]')", flush=True)
    return result


def _machine() -> dict[str, Any]:
    """Processor and memory."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"processor": model, "memory_gib": round(pages / 2**30)}


def _versions() -> dict[str, str]:
    """Of the peers that are installed."""
    results = {}
    for name in _PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            results[name] = importlib.metadata.version(name)
    return results


class Bench:
    """A benchmark's command line and the rows that it makes.

    Args:
        script: The benchmark's ``__file__``.
        doc: Its docstring, shown by ``--help``.
        repeats: Default of ``--repeats``.

    Attributes:
        parser: Add the benchmark's own options to it before `parse`.
        rows: What was measured so far.
        failed: Rows whose process failed.
    """

    def __init__(self, script: str, doc: str | None, *, repeats: int = 3):
        self.script = Path(script)
        self.parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.parser.add_argument("--repeats", type=int, default=repeats)
        self.parser.add_argument("--output", type=Path, help="record file to write")
        self.parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the options; an output that exists is an error before anything is measured."""
        words = list(sys.argv[1:] if argv is None else argv)
        options = self.parser.parse_args(words)
        self._output = options.output
        if self._output is not None:
            if self._output.exists():
                self.parser.error(f"--output {self._output} exists; records are never overwritten")
            # Where the record is written says nothing of what was measured.
            position = words.index("--output")
            del words[position : position + 2]
        self._command = shlex.join(["python", f"benchmarks/{self.script.name}", *words])
        self._busy = os.getloadavg()[0]
        return options

    def row(self, **entries: Any) -> None:
        """Keep a row and print it in one line."""
        self.rows.append({"experiment": self.script.stem, **entries})
        words = (f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in entries.items())
        print("  ".join(words), flush=True)

    def in_own_process(self, *words: Any, repeats: int) -> None:
        """Keep the row that this script prints as JSON when called with ``--one words``.

        A process that fails (a graph that is not here, too little memory) costs its own row alone;
        `finish` names it.
        """
        command = [sys.executable, str(self.script), "--one", *map(str, words)]
        answer = subprocess.run(
            [*command, "--repeats", str(repeats)], capture_output=True, encoding="utf-8"
        )
        if answer.returncode:
            reason = (answer.stderr.splitlines() or [f"exit status {answer.returncode}"])[-1]
            self.failed.append(f"{' '.join(map(str, words))}: {reason}")
            print(self.failed[-1], flush=True)
            return
        self.row(**json.loads(answer.stdout.splitlines()[-1]))

    def finish(self) -> int:
        """Print all rows as a table, write the record where one is asked for, and return 0.

        Where rows failed, they are named and 1 is returned. Without rows there is no record.
        """
        if self.rows:
            print(tables.text(self.rows))
        if self._output is not None and self.rows:
            about = records.metadata(command=self._command, seed=0)
            # Times on a busy machine say little; readers see how busy it was.
            about["load_average"] = [self._busy, os.getloadavg()[0]]
            about["machine"] = _machine()
            about["versions"] |= _versions()
            about["environment"] = {name: os.environ[name] for name in _SPEED if name in os.environ}
            records.write(self._output, self.rows, about)
        for reason in self.failed:
            print(f"failed: {reason}", file=sys.stderr)
        return int(bool(self.failed))
