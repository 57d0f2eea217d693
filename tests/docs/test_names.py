"""One name a design: in the table of names, in figures, in the commands' help and on all pages."""

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from dpjax import cli
from dpjax.plans import noise
from dpjax.results import plots
from tests.support import ROOT, load_script

BOUNDS = tomllib.loads((Path(__file__).parent / "words.toml").read_text(encoding="utf-8"))
# Evidence quotes papers; the table of names has theirs.
PAGES = [page for page in sorted(BOUNDS["pages"]) if not re.search("artifact|errata", page)]
PAPERS = re.compile(r"\b(LDP|D-MF|BISR|DP-lambda-CGD|Anti-PGD)\b|horizon-aware", re.IGNORECASE)
OWN = "anti-PGD"
"""A name of ours that papers begin with a capital."""


@pytest.fixture(scope="module")
def claims():
    return load_script("claims", folder="scripts")


def test_table_of_names_is_what_classes_say(claims):
    assert sorted(claims.ORDER) == sorted([*noise.DESIGNS, "covariance"])
    page = (ROOT / "docs" / claims.NAMES).read_text(encoding="utf-8")
    assert claims.names() in page, "run scripts/claims"
    rows = [line.strip("| ").split(" | ") for line in claims.names().splitlines()[2:]]
    for label, row in zip(claims.ORDER, rows, strict=True):
        assert row[2].strip("`") == (label if label != "covariance" else "its own name")
        kind = getattr(noise, re.match(r"`(\w+)", row[0])[1])
        assert label == "covariance" or isinstance(noise.DESIGNS[label], kind)


@pytest.mark.mutant
def test_renamed_design_makes_table_stale(claims, monkeypatch, capsys):
    look = noise.Mafalda.look._replace(label="MAFALDA-SGD")
    monkeypatch.setattr(noise.Mafalda, "look", look)
    assert claims.main("--check") == 1
    assert capsys.readouterr().out.startswith("terms.md is stale")


def repeated(looks):
    """What two of several looks have in common."""
    names = Counter(look.label.lower() for look in looks)
    marks = Counter((look.color, look.marker) for look in looks)
    return [thing for thing, count in (names + marks).items() if count > 1]


def test_no_two_designs_share_name_or_look():
    assert not repeated(plots.LOOKS.values())


@pytest.mark.mutant
def test_shared_look_is_caught():
    first, second = noise.OneStep.look, noise.ZeroSum.look
    assert repeated([first, second._replace(label="One step")]) == ["one step"]
    assert repeated([first, second._replace(marker=first.marker)]) == [(first.color, first.marker)]


def test_label_of_config_has_name_in_tables():
    for label, name in plots.TITLES.items():
        assert noise.display_name(label) == name
    assert noise.display_name("prefix_sum(bands=8)") == "prefix sum (bands=8)"
    assert noise.display_name("whisper_horizon(horizon=12)") == "Whisper (horizon=12)"
    assert noise.display_name("DiSK (Opacus)") == "DiSK (Opacus)"
    assert noise.display_name("mine") == "mine"


@pytest.mark.parametrize("command", ["design", "account"])
def test_help_has_name_beside_label(command, capsys):
    assert cli.main([command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    chosen = noise.PARTS if command == "account" else [p for p in noise.PARTS if p.compared]
    for part in chosen:
        if command == "account" and not part.account:
            continue
        plain = part.label == part.look.label
        assert (part.label if plain else f"{part.label} ({part.look.label}") in text
    # Local DP is a kind of trust there.
    words = re.sub(f"{OWN}|\\b(Sec)?LDP\\b", "", text, flags=re.IGNORECASE)
    assert not PAPERS.findall(words)


def old_names(text):
    """Names that a page has of papers, outside of brackets that say so and of code."""
    text = re.sub(r"<!-- made by.*?<!-- end of names -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", text, flags=re.DOTALL)
    text = re.sub(r"\([^()]*\bpapers?\b[^()]*\)", "", text)
    return [match[0] for match in PAPERS.finditer(text) if match[0] != OWN]


@pytest.mark.parametrize("page", PAGES)
def test_page_has_names_of_project(page):
    assert not old_names((ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.mutant
def test_old_name_is_caught():
    assert old_names("Noise of LDP, BISR and a Horizon-aware design.") == [
        "LDP",
        "BISR",
        "Horizon-aware",
    ]
    assert old_names("Anti-PGD is not anti-PGD.") == ["Anti-PGD"]
    assert not old_names("Prefix sum (the paper's D-MF), `trust=ldp` and [a](LDP.md).")
