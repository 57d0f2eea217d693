"""How the code reads, measured: a ratchet, so that no measure gets worse than its bound.

A formatter cannot change these numbers. Each bound is what the code had when the bound was last
lowered. Lower it when the code is better, until it meets the goal beside it. Only the limit on the
core's syntax nodes may rise, by the nodes of a new part (CONTRIBUTING.md). The units:

    nodes a statement     syntax nodes over statements, docstrings aside
    vague names           % of bindings
    comment lines         a hundred statements
    syntax nodes          in all
    repeated names        public top-level names, constants and types too, of several modules
    unshared names        those that no other file imports, or calls by their module's name
    all others            a thousand statements
"""

import ast
import collections
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]


class Bound(NamedTuple):
    limit: float
    goal: float


# Of the core: `dpjax` without the folders of `APART`. All are upper bounds but that of comments.
BOUNDS = {
    "nodes a statement": Bound(13.2, 13.5),
    "vague names": Bound(0.1, 0.8),
    "packed assignments": Bound(0.1, 4),
    "Any": Bound(17, 40),
    "comment lines": Bound(7.4, 7),
    "nested conditionals": Bound(0, 0),
    "texts times truths": Bound(0, 0),
    "long comprehensions": Bound(1, 1),
    "syntax nodes": Bound(260_000, 260_000),
    "repeated names": Bound(2, 2),
    "unshared names": Bound(1, 0),
}
# Of everything else together. A new test adds nodes, so only rates are bounded.
OTHER_BOUNDS = {
    "nodes a statement": Bound(15.4, 15),
    "vague names": Bound(1.1, 2),
    "packed assignments": Bound(0.8, 10),
    "Any": Bound(18.1, 15),
    "comment lines": Bound(2.3, 5),
    "nested conditionals": Bound(0.1, 0),
    "texts times truths": Bound(0.03, 0),
    "long comprehensions": Bound(6.4, 3),
}
LEAST = "comment lines"
"""The one measure that must not fall; all others must not rise."""
SIZE = "syntax nodes"
ROOM = (
    "first remove code that the change makes superfluous; for a new part that contrib cannot hold, "
    "raise the limit by its nodes and say so in the commit, as CONTRIBUTING.md has it under 'The "
    "size of a part'; the goal stays"
)
"""What to do about the one bound that a new part may raise."""
APART = ("contrib", "sites")
OTHERS = ("tests", "experiments", "benchmarks", "examples", "dpjax/contrib", "dpjax/sites")
PAGES = ("docs", "scripts")

# Pronouns and participles that say how a value came about, and not what it is.
VAGUE = frozenset(
    "all alone apart asked at both by chosen each every far found full given held how joined kept "
    "known least less made more most now of one own said seen shown taken there these told two "
    "wanted what whole wrong".split()
)
NUMBERS = frozenset({"count", "depth", "indent", "length", "repeats", "width"})
"""Names of whole numbers: a text times one of these repeats the text."""
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Place(NamedTuple):
    """What a measure counts, or the size of what it adds up; a message shows the largest first."""

    line: int
    size: float
    text: str


class Examined(NamedTuple):
    """What one file adds to the measures."""

    path: str
    nodes: int
    statements: int
    bindings: int
    places: dict[str, list[Place]]
    public: dict[str, int]


def is_statement(node: ast.AST) -> bool:
    """Whether a node is a statement and no docstring."""
    if not isinstance(node, ast.stmt):
        return False
    return not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def own_nodes(statement: ast.stmt) -> int:
    """Nodes of a statement without those of the statements inside it."""
    count = 0
    waiting: list[ast.AST] = [statement]
    while waiting:
        count += 1
        children = ast.iter_child_nodes(waiting.pop())
        waiting.extend(child for child in children if not isinstance(child, ast.stmt))
    return count


def wide_statements(nodes: list[ast.AST]) -> Iterator[Place]:
    """Every statement with its own nodes: how much a reader takes in at once."""
    for node in nodes:
        if is_statement(node):
            assert isinstance(node, ast.stmt)
            size = own_nodes(node)
            yield Place(node.lineno, size, f"{size} nodes")


def vague_names(nodes: list[ast.AST]) -> Iterator[Place]:
    """Bindings, arguments among them, whose name is no noun."""
    for name, node in bound_names(nodes):
        if name in VAGUE:
            yield Place(node.lineno, 1, name)


def bound_names(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.Name | ast.arg]]:
    """Names that are bound, ``self`` and ``cls`` aside."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node
        if isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.arg, node


def packed_assignments(nodes: list[ast.AST]) -> Iterator[Place]:
    """Assignments of one tuple display to another."""
    for node in nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        if isinstance(node.targets[0], ast.Tuple):
            yield Place(node.lineno, len(node.value.elts), ast.unparse(node.targets[0]))


def loose_types(nodes: list[ast.AST]) -> Iterator[Place]:
    """The name ``Any``."""
    for node in nodes:
        if isinstance(node, ast.Name) and node.id == "Any":
            yield Place(node.lineno, 1, "Any")


def nested_conditionals(nodes: list[ast.AST]) -> Iterator[Place]:
    """Conditional expressions inside another."""
    for node in nodes:
        if not isinstance(node, ast.IfExp):
            continue
        inside = sum(isinstance(part, ast.IfExp) for part in ast.walk(node)) - 1
        if inside:
            yield Place(node.lineno, inside, ast.unparse(node)[:60])


def is_text(node: ast.AST) -> bool:
    """Whether a node is a written text."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    return isinstance(node, ast.JoinedStr)


def is_truth(node: ast.AST) -> bool:
    """Whether a factor of a text looks like a truth value and not like a number."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "bool"
    if isinstance(node, ast.Name):
        return node.id not in NUMBERS
    if isinstance(node, ast.Attribute):
        return node.attr not in NUMBERS
    negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return negated or isinstance(node, ast.Compare | ast.BoolOp)


def texts_times_truths(nodes: list[ast.AST]) -> Iterator[Place]:
    """Products that keep or drop a text."""
    for node in nodes:
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
            continue
        factors = (node.left, node.right)
        if any(map(is_text, factors)) and any(map(is_truth, factors)):
            yield Place(node.lineno, 1, ast.unparse(node)[:60])


def long_comprehensions(nodes: list[ast.AST]) -> Iterator[Place]:
    """Comprehensions and generators over more than two lines."""
    for node in nodes:
        if isinstance(node, COMPREHENSIONS) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > 2:
                yield Place(node.lineno, lines, f"{lines} lines")


def top_level_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Classes, functions, constants and names of types that a module defines, with their lines."""
    for node in tree.body:
        if isinstance(node, DEFINITIONS):
            yield node.name, node.lineno
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, node.lineno


def comment_lines(text: str) -> int:
    """Lines of comments below the first block, a licence, say."""
    rows = [row.strip() for row in text.splitlines()]
    start = 0
    while start < len(rows) and (not rows[start] or rows[start].startswith("#")):
        start += 1
    if start == len(rows):
        start = 0
    return sum(row.startswith("#") for row in rows[start:])


MEASURES: dict[str, Callable[[list[ast.AST]], Iterator[Place]]] = {
    "nodes a statement": wide_statements,
    "vague names": vague_names,
    "packed assignments": packed_assignments,
    "Any": loose_types,
    "nested conditionals": nested_conditionals,
    "texts times truths": texts_times_truths,
    "long comprehensions": long_comprehensions,
}


def examined(text: str, path: str = "snippet.py") -> Examined:
    """Measure one file; its syntax tree is dropped afterwards."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    statements = sum(map(is_statement, nodes))
    places = {name: list(measure(nodes)) for name, measure in MEASURES.items()}
    comments = comment_lines(text)
    # A file is shown for the statements that lack a comment.
    missing = statements * BOUNDS[LEAST].goal / 100 - comments
    places[LEAST] = [Place(1, missing, f"{comments} for {statements} statements")]
    places["syntax nodes"] = [Place(1, len(nodes), f"{len(nodes)} nodes")]
    public = {}
    for name, line in top_level_names(tree):
        if not name.startswith("_"):
            public.setdefault(name, line)
    bindings = sum(1 for _ in bound_names(nodes))
    return Examined(path, len(nodes), statements, bindings, places, public)


def values_of(files: list[Examined]) -> dict[str, float]:
    """Every measure of some files together, but for those that compare modules."""
    statements = max(1, sum(file.statements for file in files))
    counts = {name: sum(len(file.places[name]) for file in files) for name in MEASURES}
    values = {name: 1000 * count / statements for name, count in counts.items()}
    nodes = sum(file.nodes for file in files)
    bindings = max(1, sum(file.bindings for file in files))
    vague = "vague names"
    values[vague] = 100 * counts[vague] / bindings
    values["nodes a statement"] = nodes / statements
    values["syntax nodes"] = nodes
    comments = sum(int(file.places[LEAST][0].text.split()[0]) for file in files)
    values[LEAST] = 100 * comments / statements
    return values


def files_in(*folders: str) -> list[Path]:
    """Python files of some folders."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def core() -> list[Examined]:
    """The files of the package, contrib and sites aside."""
    files = []
    for path in files_in("dpjax"):
        parts = path.relative_to(ROOT / "dpjax").parts
        if parts[0] not in APART:
            files.append(examined(path.read_text(), str(path.relative_to(ROOT))))
    return files


@functools.cache
def others() -> list[Examined]:
    """The files of tests, scripts, contrib and sites."""
    return [examined(path.read_text(), str(path.relative_to(ROOT))) for path in files_in(*OTHERS)]


def homes(files: list[Examined]) -> dict[str, list[tuple[str, int]]]:
    """Where each public top-level name is defined."""
    places = collections.defaultdict(list)
    for file in files:
        for name, line in file.public.items():
            places[name].append((file.path, line))
    return places


def repeated_names(files: list[Examined]) -> dict[str, list[tuple[str, int]]]:
    """Public top-level names of two modules or more."""
    return {name: places for name, places in homes(files).items() if len(places) > 1}


def unshared_names(
    files: list[Examined], uses: dict[str, frozenset[tuple[str, str]]]
) -> dict[str, list[tuple[str, int]]]:
    """Public top-level names that no other file takes from their module.

    Args:
        files: The modules.
        uses: What every file takes from modules, by the file's path.
    """
    users = collections.defaultdict(set)
    for path, pairs in uses.items():
        for pair in pairs:
            users[pair].add(path)
    unshared = {}
    for name, places in homes(files).items():
        alone = [place for place in places if not users[module_of(place[0]), name] - {place[0]}]
        if alone:
            unshared[name] = alone
    return unshared


def module_of(path: str) -> str:
    """The last part of a module's dotted name."""
    file = Path(path)
    return file.parent.name if file.stem == "__init__" else file.stem


def uses_in(text: str, is_python: bool = True) -> frozenset[tuple[str, str]]:
    """Names that a file takes from modules: ``from m import n`` and ``m.n``, as pairs (m, n).

    Texts count, too: the command line finds its commands by them, and pages hold snippets.
    """
    # Pairs may overlap, as in a.b.c.
    pairs = re.findall(r"(?=\b(\w+)\.(\w+))", text)
    for module, names in re.findall(r"from (?:\w+\.)*(\w+) import (\w[\w, ]*)", text):
        pairs += [(module, name) for name in names.split(", ")]
    aliases = {}
    for node in ast.walk(ast.parse(text)) if is_python else ():
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = alias.name.rpartition(".")[2]
                if isinstance(node, ast.ImportFrom):
                    pairs.append(((node.module or "").rpartition(".")[2], alias.name))
    return frozenset((aliases.get(module, module), name) for module, name in pairs)


def uses() -> dict[str, frozenset[tuple[str, str]]]:
    """What every file takes from modules, by its path."""
    pairs = {}
    for folder in ("dpjax", *OTHERS[:4], *PAGES):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".txt"):
                text = path.read_text(errors="replace")
                pairs[str(path.relative_to(ROOT))] = uses_in(text, path.suffix == ".py")
    return pairs


def worst(name: str, files: list[Examined]) -> list[str]:
    """The ten worst places of a measure, as file:line."""
    places = [(place, file) for file in files for place in file.places[name]]
    # Of equal sizes, those of the files with the most places come first.
    places.sort(key=lambda pair: (-pair[0].size, -len(pair[1].places[name])))
    return [f"{file.path}:{place.line} {place.text}" for place, file in places[:10]]


def refusal(name: str, value: float, bound: Bound, lines: list[str]) -> str:
    """Why a value breaks its bound, with where to begin; "" where it does not."""
    better = value >= bound.limit if name == LEAST else value <= bound.limit
    if better:
        return ""
    head = f"{name}: {value:,.2f}, bound {bound.limit:,g}, goal {bound.goal:,g}; the worst places:"
    remedy = [ROOM] if name == SIZE else []
    return "\n  ".join([head, *lines, *remedy])


@pytest.mark.parametrize("name", [*MEASURES, LEAST, "syntax nodes"])
def test_core_reads_no_worse_than_its_bound(name):
    value = values_of(core())[name]
    message = refusal(name, value, BOUNDS[name], worst(name, core()))
    assert not message, message


@pytest.mark.parametrize("name", OTHER_BOUNDS)
def test_tests_and_scripts_read_no_worse_than_their_bound(name):
    value = values_of(others())[name]
    message = refusal(name, value, OTHER_BOUNDS[name], worst(name, others()))
    assert not message, message


def test_few_names_stand_in_several_modules():
    names = repeated_names(core())
    ordered = sorted(names, key=lambda name: -len(names[name]))
    lines = [f"{name}: {', '.join(map(place_text, names[name]))}" for name in ordered[:10]]
    kind = "repeated names"
    message = refusal(kind, len(names), BOUNDS[kind], lines)
    assert not message, message


def test_names_that_their_module_alone_uses_are_private():
    names = unshared_names(core(), uses())
    lines = [f"{place_text(names[name][0])} {name}" for name in sorted(names)[:10]]
    kind = "unshared names"
    message = refusal(kind, len(names), BOUNDS[kind], lines)
    assert not message, message


def place_text(place: tuple[str, int]) -> str:
    """A place as file:line."""
    return f"{place[0]}:{place[1]}"


@pytest.mark.parametrize(
    ("name", "snippet", "value"),
    [
        # Module, Assign, Name, Store and Constant; a docstring is an Expr and a Constant.
        ("nodes a statement", "x = 1", 5),
        ("nodes a statement", '"""Only a docstring counts nodes."""\nx = 1', 7),
        ("vague names", "def f(one, row):\n    kept = all", 200 / 3),
        ("packed assignments", "a, b = 1, 2\na, b = pair\nc = 1, 2", 1000 / 3),
        ("Any", "x: Any = 1\ny = 'Any'", 500),
        ("comment lines", "# A licence.\n\nx = 1  # Beside.\n# Why.\ny = 2", 50),
        ("comment lines", "# Only comments.", 100),
        ("nested conditionals", "x = 1 if a else 2 if b else 3", 1000),
        ("nested conditionals", "x = (1 if a else 2, 1 if b else 2)", 0),
        ("texts times truths", "x = 'a' * (b > 1)\ny = f'{a}' * known", 1000),
        ("texts times truths", "x = 'a' * 3\ny = width * '-'\nz = b * c", 0),
        ("long comprehensions", "x = [\n a\n for a in b\n]\ny = [a\n for a in b]", 500),
        ("syntax nodes", "x = 1\ny = 1", 9),
    ],
)
def test_measure_counts_what_it_says(name, snippet, value):
    assert values_of([examined(snippet)])[name] == pytest.approx(value)


def test_names_are_looked_up_in_all_modules():
    text = "def alone(): ...\ndef shared(): ...\nclass _Hidden: ...\nLIMIT = 1\nRow: type = dict\n"
    first = examined(text, "first.py")
    second = examined("def shared(): ...\nclass Used: ...\nLIMIT = 2", "second.py")
    files = [first, second]
    assert repeated_names(files) == {
        "shared": [("first.py", 2), ("second.py", 1)],
        "LIMIT": [("first.py", 4), ("second.py", 3)],
    }
    texts = {
        # Its own uses and plain words are no uses by others.
        "first.py": "import second\nsecond.shared()\nfirst.alone()\nUsed = LIMIT",
        "second.py": "import first as before\nbefore.Row\nfrom first import (\n    shared,\n)",
        "page.md": "alone, `second.Used` and first.py",
    }
    pairs = {path: uses_in(text, path.endswith("py")) for path, text in texts.items()}
    unshared = unshared_names(files, pairs)
    assert unshared == {
        "alone": [("first.py", 1)],
        "LIMIT": [("first.py", 4), ("second.py", 3)],
    }


def test_broken_bound_shows_worst_places():
    file = examined("x = 1\ny = [a + b for a, b in zip(c, d)]\n# Why.", "module.py")
    name = "nodes a statement"
    message = refusal(name, 30.0, Bound(20, 13.5), worst(name, [file]))
    first, place, *_ = message.splitlines()
    assert first == "nodes a statement: 30.00, bound 20, goal 13.5; the worst places:"
    assert place.strip().startswith("module.py:2 ")
    assert ROOM not in message
    assert not refusal(name, 20.0, Bound(20, 13.5), [])
    assert refusal(LEAST, 2.0, Bound(3, 7), []) and not refusal(LEAST, 3.0, Bound(3, 7), [])


def test_bound_on_size_says_how_new_part_raises_it():
    message = refusal(SIZE, 260_400, BOUNDS[SIZE], worst(SIZE, core()))
    assert message.splitlines()[-1].strip() == ROOM
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert "### The size of a part" in page
    assert f"`goal` of {BOUNDS[SIZE].goal:,} stays" in page
