"""The documentation: tables that fit an ordinary window, and names that are there."""

import importlib
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
import yaml

from dpjax.mechanism.filters import PUBLISHED
from tests.support import load_script
from tests.test_imports import OUTSIDE

ROOT = Path(__file__).resolve().parents[1]
ALL = sorted(
    page
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if page.parent.name not in ("reference", "records")
)
PAGES = [str(page.relative_to(ROOT)) for page in ALL if page.name != "CHANGELOG.md"]


@pytest.mark.parametrize("page", PAGES)
def test_rows_of_tables_fit_window(page: str) -> None:
    for number, line in enumerate((ROOT / page).read_text().splitlines(), start=1):
        assert not line.startswith("|") or len(line) <= 100, f"{page}, line {number}"


def anchors(page: Path) -> set[str]:
    """Return what links to parts of a page may name: its headings' slugs, and its labels."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in headings}
    return slugs | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_headings(page: str) -> None:
    links = re.findall(r"\]\(([^\s()#:]*)#([^\s()]+)\)", (ROOT / page).read_text())
    for address, anchor in links:
        other = (ROOT / page).parent / address if address else ROOT / page
        # Pages of the reference are made with the site.
        if other.suffix == ".md" and other.parent.name != "reference":
            assert anchor in anchors(other), f"{page}: {address}#{anchor}"


def test_release_s_limits_stand_where_it_is_named() -> None:
    text = (ROOT / "docs" / "howto" / "release.md").read_text()
    after = text.partition("`release=True`")[2].partition("## ")[0]
    assert "One process holds everything" in after and "Nothing is really sent" in after


def test_table_of_parties_is_what_its_snippet_prints(capsys: pytest.CaptureFixture) -> None:
    text = (ROOT / "docs" / "understand" / "accounting.md").read_text()
    section = text.partition("## Who is protected from whom")[2]
    code, printed = re.findall(r"```(?:python|text)\n(.*?)```", section, re.DOTALL)[:2]
    exec(code, {})
    assert capsys.readouterr().out == printed


def rooms() -> list[str]:
    """Return the package's rooms."""
    return sorted(path.parent.name for path in (ROOT / "dpjax").glob("*/__init__.py"))


def unknown_names(text: str) -> list[str]:
    """Return names like `room.module` or `room.module.thing` in backticks that lead nowhere."""
    faults = []
    for name in re.findall(r"`(?:dpjax\.)?((?:[a-z_0-9]+\.)+[A-Za-z_0-9]+)[`(]", text):
        room, module, *rest = name.split(".")
        # A file may be named as a package is: `sites.toml`.
        if room not in rooms() or module in ("json", "toml", "txt"):
            continue
        try:
            thing = importlib.import_module(f"dpjax.{room}.{module}")
            for part in rest:
                thing = getattr(thing, part)
        except (ImportError, AttributeError):
            faults.append(name)
    return faults


@pytest.mark.slow
def test_server_s_example_is_as_accurate_as_its_page_says(real_data, monkeypatch) -> None:
    monkeypatch.setenv("DPJAX_DATA", str(real_data("a9a").parent))
    text = (ROOT / "docs" / "howto" / "server.md").read_text()
    names = {}
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], names)
    low, high = re.search(r"accuracy is ([.0-9]+) to ([.0-9]+) by seed", text).groups()
    result = names["result"].metrics["test_accuracy"][-1]
    # What builds round otherwise moves a seed so far.
    assert float(low) - 0.02 < result.min() and result.max() < float(high) + 0.02
    assert result.max() - result.min() > 0.5 * (float(high) - float(low))


@pytest.mark.parametrize("page", PAGES)
def test_modules_that_page_names_are_there(page: str) -> None:
    assert not unknown_names((ROOT / page).read_text())


def test_published_coefficients_are_those_that_run() -> None:
    text = (
        (ROOT / "docs" / "found" / "filters.md")
        .read_text()
        .partition("## The published filters")[2]
    )
    listed = {}
    for name, *parts in re.findall(
        r"^\| (\w[^|]*) \| ([-/., 0-9]*) \| ([-/., 0-9]*) \|$", text, re.M
    ):
        listed[name] = tuple(
            tuple(float(Fraction(word.strip())) for word in part.split(",") if word.strip())
            for part in parts
        )
    assert listed == {name: tuple(item) for name, item in PUBLISHED.items()}


def helpers(text: str) -> set[str]:
    """Return the folders and private helpers of a checkout that a page or notebook imports."""
    pattern = r'^[\s">]*(?:import (\w+)|from (\w+)[\w.]* import)'
    roots = {"".join(groups) for groups in re.findall(pattern, text, re.MULTILINE)}
    return {root for root in roots if root.startswith("_") or root in OUTSIDE} - {"__future__"}


@pytest.mark.parametrize(
    "page", [*ALL, *sorted(ROOT.glob("docs/tutorials/*.ipynb"))], ids=lambda page: page.stem
)
def test_pages_import_what_is_installed(page: Path) -> None:
    assert not helpers(page.read_text())


@pytest.mark.mutant
def test_page_s_import_of_helper_is_caught() -> None:
    assert helpers("from _common import tune") == {"_common"}
    assert helpers("import dpjax as dp\nfrom experiments import x") == {"experiments"}
    assert helpers('    "import _replica\\n",') == {"_replica"}


@pytest.mark.mutant
def test_module_that_is_gone_is_caught() -> None:
    assert unknown_names("`plans.nowhere`, `engine.run.jog(plan)`, `engine.run.run(plan)`") == [
        "plans.nowhere",
        "engine.run.jog",
    ]


def test_list_of_packages_is_whole() -> None:
    page = (ROOT / "docs" / "developers" / "architecture.md").read_text()
    assert len(page.splitlines()) <= 150
    table = page.partition("## The packages")[2].partition("\n## ")[0]
    rows: dict[str, set[str]] = {}
    for room, row in re.findall(r"^- `(\w+)`: (.*(?:\n  .*)*)", table, re.MULTILINE):
        rows[room] = set(re.findall(r"`(\w+)`", row))
    assert sorted(rows) == rooms()
    stops = page.partition("## From a run to a step")[2].partition("\n## ")[0]
    for room, named in rows.items():
        modules = {path.stem for path in (ROOT / "dpjax" / room).glob("[!_]*.py")}
        missing = modules - named - set(re.findall(rf"`{room}/(\w+)\.py`", stops))
        # The rows of these name the more important ones.
        some = ("models", "data", "commands", "contrib")
        assert not missing or room in some, f"{room}: {sorted(missing)}"


def test_new_part_touches_few_files_that_exist() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| to add |")[2].partition("\n\n")[0]
    rows = table.splitlines()[2:]
    for row in rows:
        paths = re.findall(r"`([a-z]+/[a-z]+\.py)`", row)
        assert len(paths) <= 5 and all((ROOT / "dpjax" / path).is_file() for path in paths), row
    assert len(rows) == 7


def test_what_float32_noise_gives_away_is_what_was_measured() -> None:
    record = (ROOT / "benchmarks" / "records" / "precision.jsonl").read_text().splitlines()[1:]
    measured = {}
    for row in map(json.loads, record):
        if row["what"] == "attack":
            place = round(row["state"], 9), row["scale"], row["shift"], row["kind"]
            measured[place] = row["excluded"], row["real"]
    text = (ROOT / "docs" / "artifact" / "proofs.md").read_text()
    rows = re.findall(r"^\| ([01/3]+), ([01.]+) \| ([01.]+) \| (.*) \|$", text, re.M)
    assert len(rows) == 10
    for state, scale, shift, rest in rows:
        messages = [0.0 if "none" in cell else float(cell[:-2]) / 100 for cell in rest.split(" | ")]
        place = round(float(Fraction(state)), 9), float(scale), float(shift)
        results = [*measured[(*place, "laplace")], *measured[(*place, "normal")]]
        assert messages == pytest.approx(results, rel=0.06), (
            f"x = {state}, scale {scale}, shift {shift}"
        )


def test_citation_is_that_of_its_file() -> None:
    stored = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    page = " ".join((ROOT / "docs" / "start" / "cite.md").read_text().split())
    assert all(f"{name} = {{{stored[name]}}}" in page for name in ("title", "version", "license"))
    assert all(f"[{item['title']}]({item['url']})" in page for item in stored["references"])


def test_link_of_optax_runs_as_its_page_has_it() -> None:
    section = (ROOT / "docs" / "howto" / "own_loop.md").read_text().partition("## In optax")[2]
    exec(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0], names := {})
    assert names["models"]["w"].shape == (6, 3) and names["models"]["w"].std() > 0.1


# Errors of papers quote them, and proofs have formulas.
LONG = ("errata", "proofs", "CHANGELOG", "architecture", "contributing", "changelog", "security")


@pytest.mark.parametrize(
    "page", [page for page in ALL if page.stem not in LONG], ids=lambda page: page.stem
)
def test_pages_have_short_sentences(page: Path) -> None:
    readability = load_script("readability", folder="scripts")
    count, words, _ = readability.measures(page.read_text())
    assert not count or words < 18, f"{words:.1f} words a sentence"
