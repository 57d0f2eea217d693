"""Every public name and its parameters, held against tests/public_api.txt.

Other people's scripts call these. Adding is free, renaming and removing break somebody: read the
difference, then write the file anew with ``python tests/test_public_api.py --write``.

Public is what stands in a module's ``__all__``: what README, docs, examples, experiments and
benchmarks call, what authors of methods, designs and samplers write against (the protocols, the
parts and their rows), and the classes that these return, at the module from which they are called.
What only the package calls stays out of ``__all__``, whatever its name.

`dpjax.contrib` promises no stability: its names are counted apart and are not in the file. What
scripts and pages call there must stand in an ``__all__``, as everywhere.
"""

import ast
import difflib
import functools
import importlib
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dpjax

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOT = Path(__file__).with_name("public_api.txt")
CONTRIB = "dpjax.contrib."
NAMESPACES = (
    *("dpjax", "dpjax.algorithms.methods", "dpjax.plans.noise"),
    *("dpjax.plans.problem", "dpjax.plans.samplers", "dpjax.learning.samplers"),
)
"""Modules that name what stands in others."""
MOST = 320
"""Public classes and functions."""
REMEDY = "if it is meant, run: python tests/test_public_api.py --write"


def public_modules() -> list[str]:
    """Return the dotted names of the modules whose path holds no underscore at a start."""
    names = set()
    for path in (ROOT / "dpjax").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            names.add(".".join(parts))
    return sorted(names)


def core_modules() -> list[str]:
    """Return the public modules whose names keep their meaning from one release to the next."""
    return [name for name in public_modules() if not f"{name}.".startswith(CONTRIB)]


@functools.cache
def contrib_names() -> set[str]:
    """Return the dotted names in the ``__all__`` of contrib's modules."""
    names = set()
    for module in public_modules():
        if module.startswith(CONTRIB):
            names |= {f"{module}.{name}" for name in importlib.import_module(module).__all__}
    return names


def plain(value: Any) -> bool:
    """Tell whether a value's repr says all there is, on any machine."""
    if isinstance(value, (tuple, list)):
        return all(plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)


def parameters(thing: Any) -> str:
    """Render the parameters and their defaults, without annotations: libraries reword those."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return "(?)"
    bare = []
    for parameter in signature.parameters.values():
        default = parameter.default
        if default is not parameter.empty and not plain(default):
            default = Ellipsis
        bare.append(parameter.replace(annotation=parameter.empty, default=default))
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def members(name: str, cls: type) -> Iterator[str]:
    """Yield a class's own public methods and properties."""
    for key, value in sorted(vars(cls).items()):
        if key.startswith("_"):
            continue
        if isinstance(value, (property, functools.cached_property)):
            yield f"{name}.{key}: property"
        elif isinstance(value, (staticmethod, classmethod)):
            yield f"{name}.{key}{parameters(value.__func__)}"
        elif isinstance(value, types.FunctionType):
            yield f"{name}.{key}{parameters(value)}"


def describe(name: str, thing: Any) -> Iterator[str]:
    """Yield the lines that stand for one public name."""
    if typing.get_origin(thing) is typing.Literal:
        yield f"{name} = Literal{list(typing.get_args(thing))}"
    elif inspect.isclass(thing):
        yield f"{name}{parameters(thing)}"
        yield from members(name, thing)
    elif inspect.isroutine(thing) or hasattr(thing, "__wrapped__"):
        yield f"{name}{parameters(thing)}"
    elif plain(thing):
        yield f"{name} = {thing!r}"
    else:
        yield name


def home(thing: Any) -> str:
    """Return the dotted name of a module, a class or a function."""
    name: str = thing.__name__
    return name if inspect.ismodule(thing) else f"{thing.__module__}.{name}"


def surface(module: types.ModuleType) -> list[str]:
    """Return the lines that stand for the names in a module's ``__all__``."""
    lines: list[str] = []
    for key in sorted(set(getattr(module, "__all__", [])) - {"__version__"}):
        name = f"{module.__name__}.{key}"
        thing = getattr(module, key)
        other = module.__name__ in NAMESPACES and hasattr(thing, "__name__") and home(thing) != name
        lines += [f"{name} = {home(thing)}"] if other else describe(name, thing)
    return lines


def render() -> str:
    """Return the whole snapshot."""
    lines = []
    for name in core_modules():
        lines += surface(importlib.import_module(name))
    return "\n".join(lines) + "\n"


def difference(stored: str, current: str) -> str:
    """Return the changed lines, empty when there are none."""
    pair = difflib.unified_diff(stored.splitlines(), current.splitlines(), "stored", "now", n=0)
    return "\n".join(pair)


def called(source: str) -> set[str]:
    """Return the dotted names of the package that a script imports, or calls on its modules."""
    modules = {}
    names = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {name.asname or "dpjax": "dpjax" for name in node.names
                        if name.name == "dpjax"}  # fmt: skip
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dpjax":
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                if (ROOT / dotted.replace(".", "/")).with_suffix(".py").exists():
                    modules[alias.asname or alias.name] = dotted
                else:
                    names.add(dotted)
    # A name that a function imports from elsewhere may be either.
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != "dpjax":
            for alias in node.names:
                modules.pop(alias.asname or alias.name, None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (module := module_of(node.value, modules)):
            names.add(f"{module}.{node.attr}")
    return names


def module_of(node: ast.expr, modules: dict[str, str]) -> str | None:
    """Return the dotted name of the module that an expression is: ``mixing``, ``dp.mixing``."""
    if isinstance(node, ast.Name):
        return modules.get(node.id)
    if isinstance(node, ast.Attribute) and module_of(node.value, modules) == "dpjax":
        thing = getattr(dpjax, node.attr, None)
        return home(thing) if inspect.ismodule(thing) else None
    return None


def scripts() -> dict[str, str]:
    """Return what users read and run: scripts, and the Python in documents, by path."""
    folders = ("examples", "experiments", "benchmarks")
    paths = [path for folder in folders for path in sorted((ROOT / folder).glob("[!_]*.py"))]
    results = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))):
        blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
        if blocks:
            results[str(path.relative_to(ROOT))] = "\n".join(blocks)
    return results


def stored_names() -> set[str]:
    """Return the dotted names of the snapshot, without methods."""
    return {re.match(r"[\w.]+", line)[0] for line in SNAPSHOT.read_text().splitlines()}


def test_public_api_is_stored_one() -> None:
    changed = difference(SNAPSHOT.read_text(), render())
    assert not changed, f"the public names changed; {REMEDY}\n{changed}"


@pytest.mark.parametrize("path", scripts())
def test_what_scripts_and_documents_call_is_public(path: str) -> None:
    unknown = called(scripts()[path]) - stored_names() - contrib_names()
    assert not unknown, f"neither in public_api.txt nor contrib's: {sorted(unknown)}"


def test_public_classes_and_functions_are_few() -> None:
    # Methods have a class before their own name.
    names = re.findall(r"^dpjax(?:\.[a-z_0-9]+)+(?:\.[A-Z]\w*)?\(", SNAPSHOT.read_text(), re.M)
    assert len(names) <= MOST, f"{len(names)} public classes and functions, of at most {MOST}"


@pytest.mark.mutant
def test_call_on_module_is_found() -> None:
    source = "from dpjax.topology import graphs as g\nfrom dpjax.engine.run import run\ng.ring(3)"
    assert called(source) == {"dpjax.topology.graphs.ring", "dpjax.engine.run.run"}
    top = "import dpjax as dp\ndp.graphs.ring(3)\ndp.run(3).ring"
    assert called(top) == {"dpjax.graphs", "dpjax.topology.graphs.ring", "dpjax.run"}
    assert "dpjax.topology.graphs.ring" in stored_names()
    assert called("from dpjax.accounting import kalman\nkalman.sweep") - stored_names()


def test_public_name_means_one_thing() -> None:
    homes: dict[str, set[str]] = {}
    others = tuple(f"{module}.{key}" for module in NAMESPACES for key in
                   importlib.import_module(module).__all__)  # fmt: skip
    for dotted in stored_names() - set(others):
        module, *rest = re.split(r"\.(?=[A-Z])", dotted, maxsplit=1)
        if rest:
            homes.setdefault(rest[0].partition(".")[0], set()).add(module)
    twice = {name: sorted(modules) for name, modules in homes.items() if len(modules) > 1}
    assert not twice, f"classes and constants of one name: {twice}"


def test_public_names_are_no_participles() -> None:
    verbs = set(re.findall(r"\b(made|found|told|given|needed|stated)\b", SNAPSHOT.read_text()))
    assert not verbs, f"name what it is, not what was done: {verbs}"


@pytest.mark.mutant
def test_renamed_parameter_and_lost_name_are_caught() -> None:
    module = types.ModuleType("dpjax.some.module")
    names: dict[str, Any] = {}
    exec("def mix(mixing, tree, *, precision='highest'): ...\nLIMIT = 4\nclass State: ...", names)
    module.__dict__.update(names, __all__=["LIMIT", "State", "mix"])
    before = surface(module)
    assert before == [
        "dpjax.some.module.LIMIT = 4",
        "dpjax.some.module.State()",
        "dpjax.some.module.mix(mixing, tree, *, precision='highest')",
    ]
    exec("def mix(matrix, tree, *, precision='highest'): ...", names)
    module.__dict__.update(names)
    renamed = surface(module)
    assert difference("\n".join(before), "\n".join(renamed))
    module.__dict__["__all__"] = ["LIMIT", "mix"]
    assert difference("\n".join(renamed), "\n".join(surface(module)))


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"usage: {REMEDY.partition(': ')[2]}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.insert(0, str(ROOT))
    SNAPSHOT.write_text(render())
    print(f"{SNAPSHOT}: {len(SNAPSHOT.read_text().splitlines())} public names")
