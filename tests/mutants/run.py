"""Put faults into copies of the package and see that tests find them: scripts/mutants.

Written faults are those of faults.txt, and all must be found. Generated ones are a seeded sample of
changed comparisons, signs, constants and arguments in the files of `GENERATED`, of which a share of
`ENOUGH` must be found. A fault is found where a test of the package that it is in fails; the same
test must pass without it.
"""

import argparse
import ast
import concurrent.futures
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ENOUGH = 0.9
FAILING = r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$"  # Names of cases hold spaces.
GENERATED = (
    *("accounting/budget", "accounting/discrete", "accounting/gdp", "accounting/losses"),
    *("accounting/precision", "accounting/pure", "accounting/sampled", "data/batches"),
    *("engine/keys", "engine/step", "mechanism/temporal", "plans/samplers", "secagg/client"),
    *("secagg/primitives", "transforms/clipping", "transforms/integers", "transforms/masks"),
    *("transforms/noise", "transforms/rounds", "transforms/variates"),
)
COMPARED = {
    ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
SIGNED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*"}
SYMMETRIC = {"hypot", "isinstance", "maximum", "max", "min", "minimum", "fmin", "plus", "add"}


class Fault(NamedTuple):
    """One changed place of the package.

    Attributes:
        file: Under dpjax/.
        line: Its number.
        what: What is wrong.
        text: The whole file with the fault in it.
        tests: Files under tests/ that see it first.
    """

    file: str
    line: int
    what: str
    text: str
    tests: tuple[str, ...]


class Outcome(NamedTuple):
    """What became of a fault: the test that found it, or "" where none did."""

    fault: Fault
    test: str
    seconds: float


def written() -> list[Fault]:
    """The faults of faults.txt; refused where a text is not in one place of the package."""
    lines = (Path(__file__).parent / "faults.txt").read_text().splitlines()
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    sources = {str(p.relative_to(ROOT / "dpjax")): p.read_text() for p in package()}
    faults, wrong = [], []
    for head, old, new in zip(*(iter(lines),) * 3, strict=True):
        what, _, tests = head.partition(" | ")
        old, new = old.strip(), new.strip()
        found = {name: text.count(old) for name, text in sources.items() if old in text}
        if list(found.values()) != [1]:
            wrong.append(
                f"text not found in one place but in {found}: update the entry\n{head}\n  {old}"
            )
            continue
        (file,) = found
        text = sources[file]
        line = text[: text.index(old)].count("\n") + 1
        faults.append(Fault(file, line, what, text.replace(old, new), tuple(tests.split())))
    if wrong:
        sys.exit("\n".join(wrong))
    return faults


def generated(count: int, seed: int) -> list[Fault]:
    """A sample of changed expressions."""
    sites = []
    for name in GENERATED:
        file = ROOT / "dpjax" / f"{name}.py"
        if not file.exists():
            sys.exit(f"{file} is not there: update GENERATED in {__file__}")
        sites += [(f"{name}.py", *change) for change in changes(ast.parse(file.read_text()))]
    faults = []
    for name, node, new in random.Random(seed).sample(sites, min(count, len(sites))):
        source = (ROOT / "dpjax" / name).read_text()
        old, text = ast.get_source_segment(source, node), replaced(source, node, new)
        what = f"{' '.join(str(old).split())} -> {' '.join(new.split())}"
        faults.append(Fault(name, node.lineno, what, text, ()))
    return faults


def replaced(source: str, node: ast.expr, new: str) -> str:
    """The source with another text in a node's place; its positions count bytes."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    assert node.end_lineno is not None and node.end_col_offset is not None
    first = starts[node.lineno - 1] + node.col_offset
    last = starts[node.end_lineno - 1] + node.end_col_offset
    whole = b"".join(lines)
    return (whole[:first] + f"({new})".encode() + whole[last:]).decode()


def changes(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Expressions that compute something, each with what may take its place."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.If) and all(isinstance(one, ast.Raise) for one in node.body):
            continue  # Checks of arguments are tested, but are no arithmetic.
        if isinstance(node, ast.AnnAssign | ast.FunctionDef):
            # Shapes in annotations are no code.
            parts = node.body if isinstance(node, ast.FunctionDef) else [node.value]
            yield from changes(ast.Module([one for one in parts if one], []))
            continue
        if isinstance(node, ast.expr):
            yield from ((node, new) for new in variants(node))
        yield from changes(node)


def variants(node: ast.expr) -> Iterator[str]:
    """What may take an expression's place."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARED:
            yield f"{ast.unparse(left)} {COMPARED[type(op)]} {ast.unparse(right)}"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SIGNED:
            if not any(isinstance(one, ast.Constant | ast.JoinedStr) for one in (left, right)):
                yield f"({ast.unparse(left)}) {SIGNED[type(op)]} ({ast.unparse(right)})"
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield ast.unparse(operand)
        case ast.Constant(value=bool() as value):
            yield str(not value)
        # Margins for rounding are smaller; no test is about their last digits.
        case ast.Constant(value=int() | float() as value) if value == 0 or abs(value) >= 1e-6:
            yield repr(value + 1 if isinstance(value, int) else 1.5 * value or 1.0)
        case ast.Call(func=func, args=[first, second, *rest]):
            name = ast.unparse(func).rpartition(".")[2]
            if name not in SYMMETRIC and not isinstance(first, ast.Starred):
                if not isinstance(second, ast.Starred) and ast.dump(first) != ast.dump(second):
                    args = [second, first, *rest]
                    yield ast.unparse(ast.Call(func, args, node.keywords))


def package() -> list[Path]:
    """The package's files."""
    return sorted((ROOT / "dpjax").rglob("*.py"))


def copied(folder: Path) -> None:
    """Copy the working tree, times of files too, so that compiled ones are still right."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, names):
        if (source := ROOT / name).is_file() and "docs/records" not in name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)


def stages(fault: Fault) -> list[list[str]]:
    """The tests that may see a fault: its namesake and those that it names, then all of its part.

    In two runs, since collecting a whole part takes longer than most tests.
    """
    part = ROOT / "tests" / Path(fault.file).parent
    named = fault.tests or (f"{fault.file[: -len('.py')]}".replace("/", "/test_") + ".py",)
    first = [one for one in (ROOT / "tests" / name for name in named) if one.exists()]
    every = part.glob("test_*.py") if part.name == "tests" else part.rglob("test_*.py")
    rest = sorted(set(every) - set(first))
    return [[str(one.relative_to(ROOT)) for one in stage] for stage in (first, rest) if stage]


def pytest(folder: Path, *arguments: str, limit: float) -> subprocess.CompletedProcess[str]:
    """Run tests of a copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "--no-header"]
    environment = os.environ | {"PYTHONPATH": str(folder), "CI": "true"}
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=limit,
    )  # fmt: skip


class Trial:
    """Faults tried in copies of one clean copy, which share what is compiled."""

    def __init__(self, folder: Path, limit: float, total: int) -> None:
        self.clean, self.limit, self.total, self.done = folder / "clean", limit, total, 0
        self._lock = threading.Lock()
        cache = {"DIR": str(folder / "cache"), "MIN_COMPILE_TIME_SECS": "0"}
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache["DIR"])
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = cache["MIN_COMPILE_TIME_SECS"]
        os.environ.setdefault("DPJAX_DATA", str(ROOT / ".pytest_cache" / "dpjax-data"))
        copied(self.clean)

    def __call__(self, fault: Fault) -> Outcome:
        """Try one fault."""
        began = time.perf_counter()
        compile(fault.text, fault.file, "exec")
        with tempfile.TemporaryDirectory(dir=self.clean.parent) as name:
            folder = Path(name) / "tree"
            shutil.copytree(self.clean, folder)
            (folder / "dpjax" / fault.file).write_text(fault.text)
            test = ""
            for tests in stages(fault):
                test = test or self._failing(folder, tests)
        outcome = Outcome(fault, test, time.perf_counter() - began)
        with self._lock:
            self.done += 1
            said = f"found by {test}" if test else "SURVIVES"
            at = f"[{self.done}/{self.total}] {fault.file}:{fault.line}"
            print(f"{at}: {fault.what}: {said} ({outcome.seconds:.0f} s)", flush=True)
        return outcome

    def _failing(self, folder: Path, tests: list[str]) -> str:
        """The first test that fails in a copy; "" where none does."""
        try:
            done = pytest(folder, "-x", *tests, limit=self.limit)
        except subprocess.TimeoutExpired:
            return ""  # Slow or hung: a person would see it, but no test has said so.
        found = re.search(FAILING, done.stdout, re.MULTILINE)
        if done.returncode and not found:
            raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout}{done.stderr}")
        return found[1] if found else ""

    def unfounded(self, outcomes: list[Outcome]) -> list[str]:
        """Tests that found a fault and fail without it."""
        tests = sorted({one.test for one in outcomes if "::" in one.test})
        if not tests:
            return []
        done = pytest(self.clean, *tests, limit=20 * self.limit)
        return re.findall(FAILING, done.stdout, re.MULTILINE)


def main() -> int:
    """Try the faults that were asked for, and tell which no test finds."""
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("only", nargs="*", help="faults whose file or text holds one of these")
    parser.add_argument("--generated", type=int, default=60, help="how many generated ones")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit", type=float, default=600, help="seconds a fault")
    parser.add_argument("--list", action="store_true", help="show them and run nothing")
    asked = parser.parse_args()
    by_hand, made = written(), generated(asked.generated, asked.seed)

    def wanted(fault: Fault) -> bool:
        text = f"{fault.file}:{fault.line} {fault.what}"
        return not asked.only or any(one in text for one in asked.only)

    faults = [fault for fault in (*by_hand, *made) if wanted(fault)]
    if asked.list:
        print(*(f"{one.file}:{one.line}: {one.what}" for one in faults), sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="dpjax-mutants-") as name:
        trial = Trial(Path(name), asked.limit, len(faults))
        with concurrent.futures.ThreadPoolExecutor(asked.workers) as pool:
            outcomes = list(pool.map(trial, faults))
        unfounded = trial.unfounded(outcomes)
    for test in unfounded:
        print(f"FAILS WITHOUT A FAULT: {test}")
    fine = not unfounded
    for kind, group, enough in (("written", by_hand, 1.0), ("generated", made, ENOUGH)):
        ours = [one for one in outcomes if one.fault in group]
        found = [one for one in ours if one.test]
        if not ours:
            continue
        fine = fine and len(found) >= enough * len(ours)
        share = len(found) / len(ours)
        print(f"{kind}: {len(found)} of {len(ours)} found, {share:.0%} of {enough:.0%} asked for")
        for one in ours:
            if not one.test:
                print(f"  SURVIVES {one.fault.file}:{one.fault.line}: {one.fault.what}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
