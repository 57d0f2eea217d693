"""The manual's words a page, numbers in prose, captions, imports as users write, plain words."""

import ast
import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest

import dpjax as dp
from tests.support import load_script

ROOT = Path(__file__).resolve().parents[2]
BOUNDS = tomllib.loads((Path(__file__).parent / "words.toml").read_text(encoding="utf-8"))
PAGES = sorted(BOUNDS["pages"])
# Evidence has numbers; corrections of papers are about them.
GUIDES = [page for page in PAGES if not re.search("artifact|developers|errata|SECURITY", page)]
MOST_NUMBERS = 5
"""Numbers in a hundred words of prose."""

readability = load_script("readability", folder="scripts")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def test_every_page_has_a_bound() -> None:
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    written = {page for page in pages if not page.startswith(("docs/reference", "docs/records"))}
    assert written | {"README.md", "SECURITY.md"} == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_page_has_few_words(page: str) -> None:
    assert len(text_of(page).split()) <= BOUNDS["pages"][page]


def test_manual_has_few_words() -> None:
    tutorials = 0
    for path in (ROOT / "docs" / "tutorials").glob("*.ipynb"):
        tutorials += len(_words_of_notebook(path))
    assert tutorials + sum(len(text_of(page).split()) for page in PAGES) <= BOUNDS["total"]


def _words_of_notebook(path: Path) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return " ".join("".join(cell["source"]) for cell in cells).split()


def numbers_in_prose(text: str) -> float:
    """Numbers in a hundred words of prose; code, tables and formulas are left out."""
    # a9a and float32 are names, and 1e-5 is one number.
    text = re.sub(r"\b[A-Za-z]+\d\w*|(?<=\d)e-?\d+", "name", text)
    words = [word for sentence in readability.sentences(text) for word in sentence]
    return 100 * sum(word[0].isdigit() for word in words) / max(len(words), 1)


@pytest.mark.parametrize("page", GUIDES)
def test_prose_has_few_numbers(page: str) -> None:
    assert numbers_in_prose(text_of(page)) <= MOST_NUMBERS


@pytest.mark.mutant
def test_numbers_are_counted() -> None:
    assert numbers_in_prose("It takes 3 rounds and 12 agents here.") == pytest.approx(25)
    assert not numbers_in_prose("It takes `3` rounds, and $12$ agents are here.")


def without_caption(text: str) -> list[str]:
    """Figures whose next paragraph is no caption in italics."""
    found = re.findall(r"^!\[[^\]]*\]\((?!http)([^)]*)\)\s*\n\s*\n?(.?)", text, re.MULTILINE)
    return [figure for figure, first in found if first != "*"]


@pytest.mark.parametrize("page", PAGES)
def test_figures_have_captions(page: str) -> None:
    assert not without_caption(text_of(page))


@pytest.mark.mutant
def test_figure_without_caption_is_caught() -> None:
    assert without_caption("![a](b.svg)\n\nText.\n") == ["b.svg"]
    assert not without_caption("![a](b.svg)\n\n*What is seen.*\n")


def long_imports(text: str) -> list[str]:
    """Imports by module path of what `dp` has."""
    faults = []
    for module, names in re.findall(r"^from (dpjax[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
        for name in re.findall(r"(\w+)(?: as \w+)?", names):
            value = getattr(importlib.import_module(module), name, None)
            if value is None:
                value = importlib.import_module(f"{module}.{name}")
            if getattr(dp, name, None) is value:
                faults.append(f"{module}.{name}")
    return faults


@pytest.mark.parametrize("page", PAGES)
def test_code_imports_names_of_top_level(page: str) -> None:
    assert not long_imports(text_of(page))


@pytest.mark.mutant
def test_long_import_is_caught() -> None:
    assert long_imports("from dpjax.plans import noise, export") == ["dpjax.plans.noise"]


@pytest.mark.parametrize("page", PAGES)
def test_code_fits_its_column(page: str) -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)
    for kind, block in blocks:
        # What programs print has their width.
        most = 100 if kind == "text" else 88
        assert not [line for line in block.splitlines() if len(line) > most]


# Numbers begin with a digit, and errors with ±.
UNTIDY = re.compile(r"\+-|(?<![\w.\])`-])\.\d")


def prose(text: str) -> str:
    """A page without code, links, formulas and comments."""
    for pattern in (r"^```.*?^```", r"<!--.*?-->"):
        text = re.sub(pattern, "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`|\]\([^)]*\)|\$[^$]*\$", "", text)


@pytest.mark.parametrize("page", PAGES)
def test_numbers_have_a_leading_digit(page: str) -> None:
    assert not UNTIDY.findall(prose(text_of(page)))


@pytest.mark.mutant
def test_untidy_numbers_are_caught() -> None:
    assert UNTIDY.findall(prose("It is .05 +- 0.1, and `.3` is code.")) == [".0", "+-"]
    assert not UNTIDY.findall(prose("Version 1.2.3 is 0.05 ± 0.1. See [it](.././a.md)."))


def private_words(*places: str) -> re.Pattern[str]:
    """Words that the project alone had, which no text of these places may have."""
    words = [word for place in places for word in BOUNDS["private"][place]]
    return re.compile(rf"\b(?:{'|'.join(words)})\b", re.IGNORECASE)


def hits(words: re.Pattern[str], text: str) -> list[str]:
    """What of these words a text has, over the ends of its lines too."""
    return [match[0] for match in words.finditer(" ".join(text.split()))]


# The changelog, and how to contribute, too.
TEXTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
WRITTEN = sorted(path for path in TEXTS if path.parent.name not in ("reference", "records"))


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_pages_have_words_of_the_field(page: Path) -> None:
    words = private_words("everywhere", "pages")
    assert not hits(words, page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", GUIDES)
def test_guides_have_words_of_the_field(page: str) -> None:
    assert not hits(private_words(*BOUNDS["private"]), prose(text_of(page)))


def texts_of(source: str) -> str:
    """Docstrings and messages of a module."""
    nodes = ast.walk(ast.parse(source))
    values = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return "\n".join(value for value in values if isinstance(value, str))


def test_docstrings_and_messages_have_words_of_the_field() -> None:
    words = private_words("everywhere")
    faults = {}
    for path in sorted((ROOT / "dpjax").rglob("*.py")):
        text = texts_of(path.read_text(encoding="utf-8"))
        faults[str(path.relative_to(ROOT))] = hits(words, text)
    assert not {name: phrases for name, phrases in faults.items() if phrases}


@pytest.mark.mutant
def test_private_words_are_caught() -> None:
    words = private_words("everywhere", "pages")
    text = "Twins are told that some rooms are sealed.\nNo best step is Beyond chance."
    assert hits(words, text) == [
        "Twins", "told that some", "rooms", "sealed", "No best step", "Beyond chance"
    ]  # fmt: skip
    assert not hits(words, "A twinkling leaf is in the mushroom.")
    assert hits(private_words("guides"), "The gate has a leaf.") == ["The gate", "leaf"]
    assert not hits(words, prose("`sealed` is code."))
    message = 'def f():\n    """It is\n    told it."""\n    raise ValueError(f"{x} stories")'
    assert hits(words, texts_of(message)) == ["told it", "stories"]
