"""Take the next runs of the GPU queue that fit into the seconds given, and keep what they find.

    scripts/gpu 540                 runs for nine minutes, from the top of the queue
    scripts/gpu --list              says what is done and what comes next
    scripts/gpu --page              lists all records of GPUs anew in docs/records/gpu.md
    scripts/gpu --rehearse          tries every command at a hundredth of its size, on a CPU

A run that is done has a line in docs/records/gpu.md and is not run again. Its records become an
archive in docs/records, those of a benchmark a file in benchmarks/records; figures, logs and
checkpoints lie in results/gpu. A run that the time ends carries on from there, and one that fails
is left for the next call. With $OUT, all of this is copied there too, as gpu.tar.gz and
checkpoints.tar.gz: unpack both in the root of a checkout.

On a bare machine set PYTHONPATH to the libraries that it lacks, and DPJAX_DATA to the data.
"""

import argparse
import gzip
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))
from _common import archives
from _runs import QUEUE, TINY, Run

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("tyro", "jax_privacy", "dp_accounting")
"""What experiments import, and images with JAX lack."""
ABOUT = "import json; from dpjax.results import records; print(json.dumps(records.metadata()))"
FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
"""Programs compile sooner."""
GRACE = 15.0
"""Seconds that a run has to end; an experiment keeps its last checkpoint anyway."""
PACKING = 15.0
"""Seconds for copying results."""
BEGIN, END = "<!-- made by scripts/gpu -->", "<!-- end of records -->"


def page() -> Path:
    """The page of the runs that are done."""
    return ROOT / "docs" / "records" / "gpu.md"


def results() -> Path:
    """The folder of logs, figures, records and checkpoints."""
    return ROOT / "results" / "gpu"


def record(run: Run, device: str = "*") -> Path:
    """The committed records of a run; of a benchmark on a device, or on any."""
    if run.script.startswith("bench_"):
        return ROOT / "benchmarks" / "records" / f"{run.name}@{device}.jsonl"
    return ROOT / "docs" / "records" / f"{run.name}.jsonl.gz"


def is_done(run: Run) -> bool:
    """Whether a run has its line, or committed records."""
    stored = record(run)
    lines = page().read_text(encoding="utf-8") if page().exists() else ""
    return f"| {run.name} | done |" in lines or any(stored.parent.glob(stored.name))


def next_run(runs: Iterable[Run], seconds: float) -> Run | None:
    """The first run that fits into so many seconds."""
    return next((run for run in runs if 60 * run.minutes <= seconds), None)


def about() -> dict[str, Any]:
    """Device, commit and date, asked of another process: this one must not take the GPU."""
    answer = subprocess.check_output([sys.executable, "-c", ABOUT], encoding="utf-8")
    return json.loads(answer.splitlines()[-1])


def environment(**more: str) -> dict[str, str]:
    """The environment of runs: their logs are whole, whenever they end."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", **more}


def command(run: Run, folder: Path, tiny: bool = False) -> list[str]:
    """The command line of a run, whose output goes to a folder."""
    words = [*run.words, *TINY[run.script].split()] if tiny else run.words
    if run.script == "pytest":
        return [sys.executable, *words]
    if run.script.startswith("bench_"):
        output = folder / f"{run.name}.jsonl"
        # A benchmark begins anew, and overwrites no record.
        output.unlink(missing_ok=True)
        return [sys.executable, *words, "--output", str(output)]
    rehearsal = [str(ROOT / "scripts" / "_rehearse.py")] if tiny else []
    return [sys.executable, *rehearsal, *words, "--output", str(folder), "--quiet"]


def called(words: Sequence[str], log: Path, seconds: float, env: Mapping[str, str]) -> int | None:
    """Run a command for so many seconds at most; its exit status, None where the time ended it."""
    with log.open("a", encoding="utf-8") as file:
        print(f"$ {' '.join(words[1:])}", file=file, flush=True)
        # A group of its own: the processes that it starts are ended with it.
        process = subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=env, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """End a process and all that it started, if it still runs."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def outcome(run: Run, code: int | None, folder: Path) -> str:
    """What is said of an exit status: a run that is done has records, unless it tests."""
    if code is None:
        return "stopped"
    silent = run.script != "pytest" and not any(folder.rglob("*.jsonl"))
    return "failed" if code or silent else "done"


def say(text: str) -> None:
    """Print a line, and keep it."""
    print(text, flush=True)
    with (results() / "log.txt").open("a", encoding="utf-8") as file:
        print(text, file=file)


def heads(path: Path) -> list[dict[str, Any]]:
    """The metadata of a file of records, or of all files of an archive."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        lines = [line for line in file if line.startswith('{"metadata"')]
    return [json.loads(line)["metadata"] for line in lines]


def recorded() -> list[str]:
    """A row for all that an archive has of one preset, device, JAX and commit, if a GPU's."""
    rows: dict[tuple[str, ...], float] = {}
    stored = sorted((ROOT / "docs" / "records").glob("*.jsonl.gz"))
    benchmarks = sorted((ROOT / "benchmarks" / "records").glob("*.jsonl"))
    for path in [*stored, *benchmarks]:
        for head in heads(path):
            device = head["device"]["kind"]
            if device != "cpu":
                jax = head["versions"]["jax"]
                key = (path.name, head.get("preset", ""), device, jax, commit_of(head))
                rows[key] = rows.get(key, 0.0) + head.get("seconds", 0.0)
    cells = [[*key, f"{seconds:.0f}" if seconds else ""] for key, seconds in rows.items()]
    titles = ["record", "preset", "device", "JAX", "commit", "seconds"]
    return [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *cells)]


def commit_of(head: Mapping[str, Any]) -> str:
    """The commit, with an asterisk where the checkout differed."""
    return (head["commit"] or "unknown")[:10] + ("*" if head["dirty"] else "")


def list_records() -> None:
    """Write the page's table of records anew, where it has one."""
    before, begin, rest = page().read_text(encoding="utf-8").partition(BEGIN)
    if begin:
        rows = "\n".join(recorded())
        text = f"{before}{BEGIN}\n\n{rows}\n\n{END}{rest.partition(END)[2]}"
        page().write_text(text, encoding="utf-8")


def store(run: Run, folder: Path, found: Mapping[str, Any], seconds: float) -> None:
    """Put the records of a run that is done beside the others, and its line into the page."""
    device = found["device"]["kind"]
    files = sorted(folder.rglob("*.jsonl"))
    if run.script.startswith("bench_"):
        for file in files:
            shutil.copy(file, record(run, re.sub(r"\W+", "-", device.lower()).strip("-")))
    elif files:
        archives.pack(record(run), files)
    cells = [str(run.entry), run.name, "done", found["date"][:10], device, commit_of(found)]
    with page().open("a", encoding="utf-8") as file:
        print(f"| {' | '.join([*cells, f'{seconds:.0f}'])} |", file=file)
    list_records()


def deliver(out: Path) -> None:
    """Copy all that this machine found to a folder, every file whole or not at all."""
    stored = [path for run in QUEUE for path in record(run).parent.glob(record(run).name)]
    files = [path for path in sorted(results().rglob("*")) if path.is_file()]
    unfinished = [path for path in files if "checkpoints" in path.parts]
    finished = [path for path in files if "checkpoints" not in path.parts]
    packed = {
        "gpu.tar.gz": [page(), *stored, *finished],
        "checkpoints.tar.gz": unfinished,
    }
    for name, paths in packed.items():
        part = out / f"{name}.part"
        with tarfile.open(part, "w:gz") as archive:
            for path in paths:
                archive.add(path, path.relative_to(ROOT))
        part.replace(out / name)
    for path in (page(), results() / "log.txt"):
        shutil.copy(path, out / path.name)


def take(seconds: float, out: Path | None) -> int:
    """Run what fits; the exit status is 1 where a run failed."""
    until = time.monotonic() + seconds - GRACE - PACKING
    found = about()
    if found["platform"]["backend"] == "cpu":
        remedy = "install '.[cuda]' there; scripts/gpu --rehearse tries the runs on a CPU"
        print(f"JAX of {sys.executable} sees no GPU: {remedy}", file=sys.stderr)
        return 2
    for folder in filter(None, (results(), out)):
        folder.mkdir(parents=True, exist_ok=True)
    waiting = [run for run in QUEUE if not is_done(run)]
    env = environment(DPJAX_TEST_PLATFORM="gpu")
    failed = False
    while run := next_run(waiting, until - time.monotonic()):
        waiting.remove(run)
        folder = results() / run.name
        folder.mkdir(exist_ok=True)
        log = folder / "log.txt"
        # Benchmarks are of programs as users compile them.
        flagged = run.flags or run.words[0].startswith("experiments/")
        flags = {"XLA_FLAGS": FLAGS} if flagged else {}
        began = time.monotonic()
        code = called(command(run, folder), log, until - began, flags | env)
        took = time.monotonic() - began
        said = outcome(run, code, folder)
        if said == "done":
            store(run, folder, found, took)
        failed = failed or said == "failed"
        say(f"{run.entry:3} {run.name:40} {said} after {took:.0f} s")
        if said == "failed":
            ending = log.read_text(encoding="utf-8").splitlines()[-8:]
            say("\n".join(f"    {line}" for line in ending))
        if out is not None:
            deliver(out)
    if waiting:
        say(f"next: {waiting[0].name}, {waiting[0].minutes:g} minutes")
    return int(failed)


def rehearse(runs: Sequence[Run]) -> int:
    """Run every command at a hundredth of its size; the exit status is 1 where one failed."""
    # Most of the time is compiling.
    env = environment(JAX_PLATFORMS="cpu", JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for run in runs:
            own = Path(folder) / run.name
            own.mkdir()
            log = own / "log.txt"
            began = time.monotonic()
            code = called(command(run, own, tiny=True), log, 600, env)
            took = time.monotonic() - began
            said = outcome(run, code, own)
            print(f"{run.name:40} {said} after {took:.0f} s", flush=True)
            if said != "done":
                failed = True
                print(log.read_text(encoding="utf-8"))
    return int(failed)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("seconds", type=float, nargs="?", metavar="SECONDS")
    parser.add_argument("--list", action="store_true", help="say what is done and what comes next")
    parser.add_argument("--page", action="store_true", help="list all records of GPUs on the page")
    parser.add_argument(
        "--rehearse", nargs="*", metavar="NAME", help="try these runs, or all, at small sizes"
    )
    options = parser.parse_args(argv)
    names = [run.name for run in QUEUE]
    for name in options.rehearse or ():
        if name not in names:
            parser.error(f"NAME is {name!r}; give one of {', '.join(names)}")
    if options.list:
        for run in QUEUE:
            state = "done" if is_done(run) else f"{run.minutes:g} minutes"
            print(f"{run.entry:3} {run.name:40} {state:12} {run.decides}")
        return 0
    if options.page:
        list_records()
        return 0
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        parser.error(f"{', '.join(lacking)} not installed; put a folder of them on PYTHONPATH")
    if options.rehearse is not None:
        return rehearse([run for run in QUEUE if run.name in (options.rehearse or names)])
    if options.seconds is None:
        parser.error("SECONDS is missing; give how long the GPU is there")
    out = os.environ.get("OUT")
    return take(options.seconds, Path(out) if out else None)


if __name__ == "__main__":
    raise SystemExit(main())
