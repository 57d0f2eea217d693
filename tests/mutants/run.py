"""Put faults into copies of the package and see that tests find them: scripts/mutants.

Written faults are those of faults.txt, and all must be found. Generated ones are a seeded sample of
changed comparisons, signs, constants and arguments in the files of `GENERATED`, of which a share of
`ENOUGH` must be found; equivalent.txt lists changes that leave the program what it was. A fault is
found where a test fails of the package that it is in, or of those that import its module; the same
test must pass without it.
"""

import argparse
import ast
import compileall
import concurrent.futures
import hashlib
import importlib
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENOUGH = 0.9
FAILING = r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$"  # Names of cases hold spaces.
OPTIONS = ("-q", "-rfE", "--tb=no", "--no-header", "--assert=plain", "-p", "no:cacheprovider")
FORK = multiprocessing.get_context("fork")
# What takes long to import; none of it starts a backend of JAX.
WARM = (
    *("cvxpy", "dp_accounting", "flax.linen", "hypothesis", "jax_privacy", "matplotlib.figure"),
    *("mpmath", "opendp", "optax", "pandas", "scipy.stats", "sklearn", "tensorflow_datasets"),
)
GENERATED = (
    *("accounting/budget", "accounting/discrete", "accounting/gdp", "accounting/losses"),
    *("accounting/precision", "accounting/pure", "accounting/sampled", "data/batches"),
    *("engine/keys", "engine/step", "learning/samplers", "mechanism/temporal", "secagg/client"),
    *("encoding/simulated", "secagg/primitives", "transforms/clipping", "contrib/masks"),
    *("transforms/noise", "transforms/rounds", "transforms/variates"),
)
COMPARED = {
    ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
SIGNED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*"}
SYMMETRIC = {
    *("hypot", "isinstance", "maximum", "max", "min", "minimum", "fmin", "plus", "add"),
    *("_product", "wide_sum"),
}


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


def written() -> list[Fault]:
    """The faults of faults.txt; refused where a text is not in one place of the package."""
    lines = (Path(__file__).parent / "faults.txt").read_text().splitlines()
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    package = ROOT / "dpjax"
    sources = {str(p.relative_to(package)): p.read_text() for p in package.rglob("*.py")}
    faults = []
    wrong = []
    for head, old, new in zip(*(iter(lines),) * 3, strict=True):
        kind, _, tests = head.partition(" | ")
        old = old.strip()
        new = new.strip()
        results = {name: text.count(old) for name, text in sources.items() if old in text}
        if list(results.values()) != [1]:
            wrong.append(
                f"text not found in one place but in {results}: update the entry\n{head}\n  {old}"
            )
            continue
        (file,) = results
        text = sources[file]
        line = text[: text.index(old)].count("\n") + 1
        faults.append(Fault(file, line, kind, text.replace(old, new), tuple(tests.split())))
    if wrong:
        sys.exit("\n".join(wrong))
    return faults


def generated(count: int, seed: int) -> list[Fault]:
    """A sample of changed expressions, ordered by a hash: most stay when other lines change.

    Those of equivalent.txt, which no test can see, are left out.
    """
    lines = (Path(__file__).parent / "equivalent.txt").read_text().splitlines()
    lines = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    heads = [line.split(" | ") for line in lines[::2]]
    unseen = {(file, kind, at) for (file, kind, _), at in zip(heads, lines[1::2], strict=True)}
    faults = {}
    stale = set(unseen)
    for name in GENERATED:
        path = ROOT / "dpjax" / f"{name}.py"
        if not path.exists():
            sys.exit(f"{path} is not there: update GENERATED in {__file__}")
        file = f"{name}.py"
        source = path.read_text()
        for node, new in changes(ast.parse(source)):
            old = ast.get_source_segment(source, node)
            position = source.splitlines()[node.lineno - 1]
            text = f"{' '.join(str(old).split())} -> {' '.join(new.split())}"
            place = file, text, position.strip()
            stale.discard(place)
            if place not in unseen:
                before = node.col_offset - len(position) + len(position.lstrip())
                rank = hashlib.sha256(repr((seed, place, before)).encode()).digest()
                faults[rank, node.lineno] = Fault(
                    file, node.lineno, text, replaced(source, node, new), ()
                )
    if stale:
        sys.exit(f"equivalent.txt: these are not there, update the entries: {sorted(stale)}")
    return [faults[rank] for rank in sorted(faults)[:count]]


def replaced(source: str, node: ast.expr, new: str) -> str:
    """The source with another text in a node's place; its positions count bytes."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    assert node.end_lineno is not None and node.end_col_offset is not None
    first = starts[node.lineno - 1] + node.col_offset
    last = starts[node.end_lineno - 1] + node.end_col_offset
    text = b"".join(lines)
    return (text[:first] + f"({new})".encode() + text[last:]).decode()


def changes(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Expressions that compute something, each with what may take its place."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            continue  # Checks of arguments are tested, but are no arithmetic.
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("_validate."):
            continue
        if isinstance(node, ast.AnnAssign | ast.FunctionDef):
            # Shapes in annotations are no code.
            parts = node.body if isinstance(node, ast.FunctionDef) else [node.value]
            yield from changes(ast.Module([part for part in parts if part], []))
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
            if not any(isinstance(case, ast.Constant | ast.JoinedStr) for case in (left, right)):
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
    """The tests that may see a fault: its namesake or those it names, its users, all of its part.

    In several runs, since collecting a whole part takes longer than most tests.
    """
    tests = ROOT / "tests"
    path = Path(fault.file)
    named = fault.tests or (str(path.with_name(f"test_{path.name}")),)
    first = [item for item in (tests / name for name in named) if item.exists()]
    part = path.parent / "**" if path.parent.name else path.parent
    rest = set(tests.glob(str(part / "test_*.py"))) - set(first)
    package = ".".join(("dpjax", *path.parent.parts))
    imports = rf"from {package} import .*\b{path.stem}\b|{package}\.{path.stem}\b"
    entries = sorted(set(tests.rglob("test_*.py")) - set(first))
    users = [value for value in entries if re.search(imports, value.read_text())]
    users.sort(key=lambda one: one not in rest)
    runs = (first, users, sorted(rest - set(users)))
    return [[str(case.relative_to(ROOT)) for case in run] for run in runs if run]


def failing(folder: Path, runs: list[list[str]], limit: float, *options: str) -> list[str]:
    """What fails in a copy, in the first of these runs in which something does."""
    output = folder.with_suffix(".txt")

    def run() -> None:
        os.environ["PYTHONPATH"] = sys.path[0] = str(folder)
        os.chdir(folder)
        with output.open("w") as sys.stdout:
            for names in runs:
                status = pytest.main([*OPTIONS, *options, *names])
                if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                    break
        os._exit(status)  # without waiting for a test's threads

    process = FORK.Process(target=run)
    process.start()
    process.join(limit)
    # Slow, hung or gone: a person would see it, but no test has said so.
    process.kill()
    process.join()
    matches = re.findall(FAILING, text := output.read_text(), re.MULTILINE)
    if (status := process.exitcode) and not matches:
        print(f"pytest ended with {status}: {text[-2000:]}", flush=True)
    return matches


def tried(fault: Fault, clean: Path, limit: float) -> tuple[Fault, str, float]:
    """A fault, the test that finds it or "", and the seconds of that."""
    began = time.perf_counter()
    compile(fault.text, fault.file, "exec")
    with tempfile.TemporaryDirectory(dir=clean.parent) as name:
        folder = Path(name) / "tree"
        shutil.copytree(clean, folder, copy_function=os.link)
        (folder / "dpjax" / fault.file).unlink()
        (folder / "dpjax" / fault.file).write_text(fault.text)
        result = failing(folder, stages(fault), limit, "-x")
    return fault, result[0] if result else "", time.perf_counter() - began


def warm(folder: Path) -> Path:
    """Import what tests import, which forks then share; return a clean copy of the tree."""
    os.environ["CI"] = "true"
    os.environ.setdefault("DPJAX_DATA", str(ROOT / ".pytest_cache" / "dpjax-data"))
    runpy.run_path(str(ROOT / "tests" / "conftest.py"))  # It sets what JAX reads when imported.
    for name in WARM:
        importlib.import_module(name)
    copied(folder / "clean")
    compileall.compile_dir(folder / "clean", quiet=2)
    return folder / "clean"


def main() -> int:
    """Try the faults that were asked for, and tell which no test finds."""
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("only", nargs="*", help="faults whose file or text holds one of these")
    parser.add_argument("--generated", type=int, default=60, help="how many generated ones")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit", type=float, default=600, help="seconds a fault")
    parser.add_argument("--list", action="store_true", help="show them and run nothing")
    arguments = parser.parse_args()
    by_hand = written()
    result = generated(arguments.generated, arguments.seed)

    def wanted(fault: Fault) -> bool:
        text = f"{fault.file}:{fault.line} {fault.what}"
        return not arguments.only or any(item in text for item in arguments.only)

    faults = [fault for fault in (*by_hand, *result) if wanted(fault)]
    if arguments.list:
        print(*(f"{value.file}:{value.line}: {value.what}" for value in faults), sep="\n")
        return 0
    outcomes = {}
    with tempfile.TemporaryDirectory(prefix="dpjax-mutants-") as name:
        clean = warm(Path(name))
        with concurrent.futures.ProcessPoolExecutor(arguments.workers, FORK) as pool:
            trials = [pool.submit(tried, fault, clean, arguments.limit) for fault in faults]
            for trial in concurrent.futures.as_completed(trials):
                fault, test, seconds = trial.result()
                outcomes[fault] = test
                message = f"found by {test}" if test else "SURVIVES"
                label = f"[{len(outcomes)}/{len(faults)}] {fault.file}:{fault.line}"
                print(f"{label}: {fault.what}: {message} ({seconds:.0f} s)", flush=True)
        tests = sorted({test for test in outcomes.values() if "::" in test})
        unfounded = failing(clean, [tests], 20 * arguments.limit) if tests else []
    for test in unfounded:
        print(f"FAILS WITHOUT A FAULT: {test}")
    fine = not unfounded
    for kind, group, enough in (("written", by_hand, 1.0), ("generated", result, ENOUGH)):
        ours = [fault for fault in group if fault in outcomes]
        lost = [fault for fault in ours if not outcomes[fault]]
        if not ours:
            continue
        share = 1 - len(lost) / len(ours)
        fine = fine and share >= enough
        words = f"{len(ours) - len(lost)} of {len(ours)} found"
        print(f"{kind}: {words}, {share:.0%} of {enough:.0%} asked for")
        for fault in lost:
            print(f"  SURVIVES {fault.file}:{fault.line}: {fault.what}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
