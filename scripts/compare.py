"""Compare what a commit computes with what this tree computes: scripts/compare COMMIT [NAME ...]

Both run every experiment's tiny preset (or those named), and state the losses of all plans of
benchmarks/audit_mechanisms.py (NAME: plans). Numbers are equal, or differ by a relative amount that
is shown; equal code on one machine gives equal bits. A preset that a tree cannot run is shown too.
The commit's numbers are stored in results/compare, by its hash.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STORE = ROOT / "results" / "compare"
PLANS = """
import json, sys
sys.path.insert(0, "benchmarks")  # what a script of that folder imports
from benchmarks import audit_mechanisms as audit
for cell, plan, _ in audit.cells(lambda cell: True):
    if plan is not None:
        numbers = [plan.guarantee.epsilon, plan.guarantee.exact_epsilon, plan.guarantee.mu or 0.0]
        numbers += [float(abs(array).sum()) for _, array in sorted(plan.arrays.items())]
        print(json.dumps([" ".join(cell), numbers]))
"""
# Clocks, places and texts: what may differ between equal runs.
IGNORED = ("metadata", "guarantee", "seconds", "rate", "time", "memory")


def run(tree: Path, out: Path, name: str) -> None:
    """Run an experiment's tiny preset in a tree, or state its plans, unless that was done."""
    done = out / f"{name}.json"
    if done.exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PLANS]
    if name != "plans":
        script = f"experiments/{name}.py"
        command = [sys.executable, script, "--preset", "tiny", "--quiet", "--output", str(out)]
    ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, encoding="utf-8")
    if ran.returncode:
        failure = json.dumps({"failed": ran.stderr.strip().splitlines()[-1:]})
        done.write_text(failure, encoding="utf-8")
        return
    rows = sorted(map(json.loads, ran.stdout.splitlines())) if name == "plans" else []
    for path in sorted((out / name / "tiny").rglob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        rows += [[path.name, numbers(json.loads(line))] for line in lines]
    done.write_text(json.dumps(rows), encoding="utf-8")


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row of records by name, but for clocks."""
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, int | float) and not any(part in name for part in IGNORED)
    }


def difference(before: Any, after: Any) -> float:
    """The largest relative difference of numbers in two trees of equal structure; else infinity."""
    if type(before) is not type(after) or isinstance(before, str):
        return 0.0 if before == after else float("inf")
    if isinstance(before, dict):
        before, after = sorted(before.items()), sorted(after.items())
    if isinstance(before, list | tuple):
        pairs = zip(before, after, strict=False)
        longest = 0.0 if len(before) == len(after) else float("inf")
        return max([longest, *(difference(*pair) for pair in pairs)])
    if before == after or (before != before and after != after):
        return 0.0
    return abs(after - before) / max(abs(before), abs(after))


def main(commit: str, *names: str) -> int:
    """Run both, and print a line for each experiment."""
    every = sorted(path.stem for path in (ROOT / "experiments").glob("[!_]*.py"))
    sha = subprocess.check_output(["git", "rev-parse", commit], cwd=ROOT, encoding="utf-8").strip()
    tree, here = STORE / sha / "tree", STORE / "here"
    if not tree.exists():
        subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
        subprocess.run(["git", "worktree", "add", "--detach", tree, sha], cwd=ROOT, check=True)
    worst = 0.0
    for name in names or (*every, "plans"):
        (here / f"{name}.json").unlink(missing_ok=True)
        subprocess.run(["rm", "-rf", here / name], check=True)
        run(tree, STORE / sha, name)
        run(ROOT, here, name)
        files = (tree.parent / f"{name}.json", here / f"{name}.json")
        before, after = (json.loads(file.read_text(encoding="utf-8")) for file in files)
        apart = difference(before, after)
        worst = max(worst, apart)
        failed = after.get("failed") if isinstance(after, dict) else ""
        print(f"{name:24} {len(before):5} rows  {apart or 'equal'}  {failed}", flush=True)
    return int(worst > 1e-5)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    raise SystemExit(main(*sys.argv[1:]))
