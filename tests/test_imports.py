"""Who may import whom, what importing dpjax must not load, and the form of modules."""

import ast
import functools
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dpjax"
OUTSIDE = ("experiments", "examples", "benchmarks", "tests")

# A package and the others that it may import. A new package is a decision: add its row.
ARROWS = {
    "topology": set(),
    "models": set(),
    "data": set(),
    "results": set(),
    "learning": {"models", "data", "mechanism", "transforms", "accounting"},
    "plans": {
        *("topology", "models", "data", "encoding", "mechanism", "accounting", "transforms"),
        *("algorithms", "learning"),
    },
    "encoding": set(),
    "secagg": {"encoding"},
    "mechanism": {"topology"},
    "accounting": {"mechanism", "topology", "encoding"},
    "transforms": {"mechanism", "topology", "encoding"},
    "algorithms": {"topology", "transforms"},
    "engine": {
        *("plans", "learning", "topology", "data", "accounting", "transforms", "algorithms"),
    },
}
# One process a site drives the engine's rounds, over a channel and with keys of secagg's kind.
ARROWS["sites"] = {"engine", *ARROWS["engine"], "secagg", "encoding"}
ARROWS["commands"] = set(ARROWS)
# Contrib imports anything, and nothing in the core imports contrib.
ARROWS["contrib"] = set(ARROWS)

# The command line, and what starts it.
_ENTRIES = ("cli", "__main__")

# Modules that may import more than their package.
WIDER = {
    # A result prints and draws itself, by what reads records.
    "dpjax.engine.result": {"results"},
    "dpjax.engine.report": {"results"},
    # A noise design says how it is drawn, also in files of records alone.
    "dpjax.results.plots": {"plans"},
    # A caption is the guarantee's own.
    "dpjax.results.captions": {"accounting"},
    # A command's body has its arguments as all commands have them.
    "dpjax.sites.sum_command": {"commands"},
    # A round's sums may cross the sites' channel, which builds on them.
    "dpjax.secagg.transport": {"sites"},
}

# Modes of files of text.
TEXT_MODE = re.compile(r"[rwax]t?\+?t?")

# Each of these takes longer to import than all of dpjax may; or, as torch, is no dependency.
SLOW = (
    *(
        "clarabel",
        "cloudpickle",
        "cryptography",
        "cvxpy",
        "dp_accounting",
        "jax_privacy",
        "matplotlib",
        "orbax",
    ),
    *("joblib", "matplotlib", "orbax", "pandas", "phe", "safetensors", "scipy.optimize", "sklearn"),
    *("submitit", "tensorflow_datasets", "tokenizers", "torch"),
)


# What dpjax builds on; some of it may load a slow library by itself, which is not counted.
GROUND = ("jax", "optax", "flax.linen")

parsed = functools.cache(ast.parse)


@functools.cache
def modules() -> dict[str, str]:
    """Return the source of every module of the package, by dotted name."""
    results = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        results[name] = path.read_text()
    return results


def packages() -> set[str]:
    """Return the dotted names of dpjax and its packages."""
    return {".".join(p.parent.relative_to(ROOT).parts) for p in PACKAGE.rglob("__init__.py")}


def imported(name: str, source: str, is_package: bool) -> Iterator[str]:
    """Yield every dotted name that a module imports, in functions and type-checking blocks too."""
    here = name.split(".") if is_package else name.split(".")[:-1]
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield str(first.value)


def arrow_violations(sources: dict[str, str], inits: set[str]) -> list[str]:
    """Return one line for each import in ``sources`` that the arrows forbid."""
    faults = []
    for name, source in sources.items():
        package = name.split(".")[1] if name.count(".") else None
        # cli, _validate and the like stand at the top, in no package.
        is_package = package is not None and f"dpjax.{package}" in inits
        if is_package and package not in ARROWS:
            faults.append(f"{name}: the package {package} has no row in ARROWS")
            continue
        for target in imported(name, source, name in inits):
            top, _, rest = target.partition(".")
            other = rest.split(".")[0]
            if top in OUTSIDE or (other == "cli" and top == "dpjax" and package not in _ENTRIES):
                faults.append(f"{name} imports {target}: nobody imports it")
            elif top == "dpjax" and other == "contrib" and package != "contrib":
                faults.append(f"{name} imports {target}: nothing in the core imports contrib")
            elif package in (None, "cli") or top != "dpjax" or f"dpjax.{other}" not in inits:
                continue
            elif not is_package:
                faults.append(
                    f"{name} imports {target}: what all packages share imports none of them"
                )
            elif other != package and other not in ARROWS[package] | WIDER.get(name, set()):
                faults.append(f"{name} imports {target}: {package} may not import {other}")
    return faults


def circles(sources: dict[str, str], inits: set[str]) -> list[list[str]]:
    """Return the modules that import each other, for types and in functions too."""
    graph = nx.DiGraph()
    for name, source in sources.items():
        for target in imported(name, source, name in inits):
            # `from module import thing` names the module, where thing is none.
            module = target if target in sources else target.rpartition(".")[0]
            if module in sources and module != name:
                graph.add_edge(name, module)
    return [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]


def form_violations(sources: dict[str, str], inits: set[str]) -> list[str]:
    """Return one line for each module in bad form: undocumented, no ``__all__``, shadowed."""
    faults = []
    for name, source in sources.items():
        tree = parsed(source)
        if not ast.get_docstring(tree):
            faults.append(f"{name} has no docstring")
        bound = set()
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                bound.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                bound |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                bound |= {ast.unparse(target) for target in targets}
        if name not in inits and "__all__" not in bound:
            faults.append(f"{name} has no __all__")
        if name in inits:
            # `from dpjax.package import thing` must give the module, never a function of that name.
            inside = {other[len(name) + 1 :] for other in sources if other.startswith(name + ".")}
            faults += [f"{name} binds {pair}, a module of it" for pair in sorted(bound & inside)]
    return faults


def loaded_slow(names: list[str], *folders: Path, ground: tuple[str, ...] = GROUND) -> list[str]:
    """Import ``names`` in a new process and return which slow modules came with them."""
    code = (
        f"import sys, {', '.join(('importlib', *ground))}\n"
        f"sys.path[:0] = {[str(folder) for folder in folders]}\n"
        "before = set(sys.modules)\n"
        f"for name in {names}: importlib.import_module(name)\n"
        f"print([m for m in {SLOW} if m in sys.modules and m not in before])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


def test_packages_keep_arrows() -> None:
    assert not arrow_violations(modules(), packages())


def test_no_modules_import_each_other() -> None:
    assert circles(modules(), packages()) == []


@pytest.mark.mutant
def test_circle_of_imports_is_caught() -> None:
    lazy = "def f():\n    from dpjax.plans.a import A"
    typed = "if TYPE_CHECKING:\n    from dpjax.plans import b"
    assert circles({"dpjax.plans.a": typed, "dpjax.plans.b": lazy}, set()) == [
        ["dpjax.plans.a", "dpjax.plans.b"]
    ]
    assert circles({"dpjax.plans.a": typed, "dpjax.plans.b": "import dpjax.plans.c"}, set()) == []


def test_modules_have_docstring_and_all() -> None:
    assert not form_violations(modules(), packages())


def lines_of(function: ast.FunctionDef) -> int:
    """Return a function's lines, its docstring's left out."""
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    documented = ast.get_docstring(function) is not None
    return lines - (first.end_lineno - first.lineno + 1 if documented else 0)


@pytest.mark.parametrize("folder", ["dpjax", "experiments", "benchmarks", "examples"])
def test_functions_fit_screen(folder: str) -> None:
    long = [
        f"{path.relative_to(ROOT)}: {node.name} has {lines_of(node)} lines"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(parsed(path.read_text()))
        if isinstance(node, ast.FunctionDef) and lines_of(node) > 80
    ]
    assert not long, long


def unencoded(source: str) -> list[str]:
    """Return the calls that read or write text in the encoding of the machine's locale."""
    calls = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in calls if in_the_locale(call)]


def in_the_locale(call: ast.Call) -> bool:
    """Return whether a call's text is in the locale's encoding."""
    function = ast.unparse(call.func)
    name = function.rpartition(".")[2]
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    values = [*call.args, *keywords.values()]
    words = [str(value.value) for value in values if isinstance(value, ast.Constant)]
    if "encoding" in keywords:
        return False
    if name in ("open", "fdopen"):
        # Without a mode, files of Python's own `open` and of paths are texts.
        plain = len(values) == 1 if function == "open" else not values
        return plain or any(TEXT_MODE.fullmatch(word) for word in words)
    if name in ("read_text", "write_text"):
        return len(call.args) < 1 + (name == "write_text")
    return name == "TextIOWrapper" or "text" in keywords or "universal_newlines" in keywords


@pytest.mark.parametrize("folder", ["dpjax", "experiments", "benchmarks", "examples", "scripts"])
def test_texts_are_utf8_whatever_locale(folder: str) -> None:
    for path in [*(ROOT / folder).rglob("*.py"), ROOT / "docs/conf.py"]:
        assert not unencoded(path.read_text(encoding="utf-8")), path


@pytest.mark.mutant
@pytest.mark.parametrize(
    "source",
    [
        "path.read_text()",
        "path.write_text(words)",
        "open(path)",
        "open(path, 'w')",
        "path.open()",
        "path.open(mode='r+')",
        "gzip.open(path, 'rt')",
        "os.fdopen(handle, 'a')",
        "subprocess.run(words, text=True)",
    ],
)
def test_text_in_locale_s_encoding_is_caught(source: str) -> None:
    assert unencoded(source) == [source]
    named = f"{source[:-1]}{', ' * (source[-2] != '(')}encoding='utf-8')"
    assert not unencoded(named)


@pytest.mark.parametrize("folder", ["experiments", "examples", "benchmarks"])
def test_scripts_never_import_each_other(folder: str) -> None:
    """Helpers have names that begin with _, and lie in the script's own folder."""
    helpers = {path.stem for path in (ROOT / folder).glob("_*")}
    for path in (ROOT / folder).rglob("*.py"):
        roots = {target.split(".")[0] for target in imported(path.stem, path.read_text(), False)}
        scripts = {other.stem for other in (ROOT / folder).glob("*.py")} - helpers
        assert not roots & {*OUTSIDE, *scripts}, f"{path} imports beside dpjax"
        assert {root for root in roots if root.startswith("_")} <= {*helpers, "__future__"}, path


def undefined_names(path: Path) -> list[str]:
    """Return names that nothing defines, as file:line; words inside texts are no names.

    Ruff reports words of jaxtyping's shapes too, so its own run leaves this rule out.
    """
    pytest.importorskip("ruff")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821"]
    done = subprocess.run([*command, "--output-format", "json", path], capture_output=True)
    places = []
    for row in json.loads(done.stdout):
        file = Path(row["filename"])
        number = row["location"]["row"]
        column = row["location"]["column"] - 1
        line = file.read_text(encoding="utf-8").splitlines()[number - 1]
        if line[:column].count('"') % 2 == 0:
            places.append(f"{file}:{number} {row['message']}")
    return places


@pytest.mark.parametrize("folder", ["dpjax", "experiments", "benchmarks", "examples", "tests"])
def test_every_name_is_defined(folder: str) -> None:
    assert undefined_names(ROOT / folder) == []


@pytest.mark.mutant
def test_undefined_name_is_caught(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('def f(x: Float["n"]) -> problem.Problem: ...\n')
    assert [place.partition(" ")[2] for place in undefined_names(path)] == [
        "Undefined name `Float`",
        "Undefined name `problem`",
    ]


def test_importing_every_module_loads_no_slow_library() -> None:
    assert loaded_slow(sorted(modules())) == []


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("dpjax.topology.bad", "import dpjax.mechanism.spatial"),
        ("dpjax.topology.bad", "from dpjax import data"),
        ("dpjax.topology.bad", "from ..mechanism import spatial"),
        ("dpjax.topology.bad", "from .. import models"),
        ("dpjax.topology", "from ..models import linear"),
        ("dpjax.accounting.bad", "def f():\n    from dpjax.algorithms.dsgd import dsgd"),
        ("dpjax.accounting.bad", "from dpjax.secagg import client"),
        ("dpjax.encoding.bad", "from dpjax.transforms import noise"),
        ("dpjax.secagg.bad", "from dpjax.mechanism.spatial import whisper"),
        ("dpjax.engine.bad", "from dpjax import cli"),
        ("dpjax.engine.bad", "from dpjax.cli import main"),
        ("dpjax.cli", "from experiments import whisper_variance"),
        ("dpjax.results.bad", "import importlib\nimportlib.import_module('dpjax.engine.run')"),
        ("dpjax.results.bad", "from dpjax.plans.statements import HopelessWarning"),
        ("dpjax.plans.bad", "from dpjax.engine.run import Result"),
        ("dpjax.plans.bad", "from dpjax.results import records"),
        ("dpjax.learning.bad", "from dpjax.plans import protect"),
        ("dpjax.learning.bad", "from dpjax.topology import graphs"),
        ("dpjax.engine.bad", "from dpjax.mechanism import design"),
        ("dpjax.engine.bad", "from dpjax.results import records"),
        ("dpjax.engine.bad", "from dpjax.commands import design"),
        ("dpjax.commands.bad", "from dpjax import cli"),
        ("dpjax.commands.bad", "from dpjax.contrib import rules"),
        ("dpjax.cli", "def f():\n    from dpjax.contrib.rules import UpdateRule"),
        ("dpjax", "from dpjax.contrib import rules"),
        ("dpjax._validate", "from dpjax.topology import graphs"),
        ("dpjax.newpackage.bad", "import numpy"),
    ],
)
def test_wrong_import_is_caught(name: str, source: str) -> None:
    inits = {"dpjax", "dpjax.newpackage", *(f"dpjax.{package}" for package in ARROWS)}
    assert len(arrow_violations({name: source}, inits)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (
            "dpjax.engine.good",
            "from dpjax.plans import plan\nfrom dpjax.topology import gossip",
        ),
        ("dpjax.engine.result", "from dpjax.results import plots"),
        ("dpjax.contrib.good", "from dpjax.engine import run\nfrom dpjax.contrib import rules"),
        ("dpjax.commands.good", "from dpjax.plans import plan\nfrom dpjax.results import records"),
        ("dpjax.topology.good", "from dpjax import _validate\nfrom dpjax.topology import graphs"),
        ("dpjax.cli", "from dpjax.plans import plan\nfrom dpjax.mechanism import design"),
        ("dpjax.__main__", "from dpjax.cli import main"),
        ("dpjax.mechanism.good", "from .fixed_point import solve\nfrom ..topology import mixing"),
    ],
)
def test_right_import_passes(name: str, source: str) -> None:
    assert not arrow_violations(
        {name: source}, {"dpjax", *(f"dpjax.{package}" for package in ARROWS)}
    )


@pytest.mark.mutant
def test_module_in_bad_form_is_caught() -> None:
    inits = {"dpjax.transforms"}
    good = '"""Words."""\n__all__ = []\n'
    assert form_violations({"dpjax.transforms.a": "__all__ = []"}, inits) == [
        "dpjax.transforms.a has no docstring"
    ]
    assert form_violations({"dpjax.transforms.a": '"""Words."""'}, inits) == [
        "dpjax.transforms.a has no __all__"
    ]
    shadow = '"""Words."""\nfrom dpjax.transforms.lowpass import lowpass\n'
    sources = {"dpjax.transforms": shadow, "dpjax.transforms.lowpass": good}
    assert form_violations(sources, inits) == ["dpjax.transforms binds lowpass, a module of it"]


@pytest.mark.mutant
def test_slow_import_is_caught(tmp_path: Path) -> None:
    (tmp_path / "pandas.py").write_text("")
    (tmp_path / "hasty.py").write_text("import pandas\n")
    assert importlib.util.find_spec("hasty") is None
    assert loaded_slow(["hasty"], tmp_path, ground=()) == ["pandas"]
