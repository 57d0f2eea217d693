"""The documentation in an ordinary window: tables whose rows fit."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *("README.md", "SECURITY.md", "CONTRIBUTING.md", "docs/accounting.md", "docs/choosing.md"),
    *("docs/own_loop.md", "docs/architecture.md", "docs/floating-point.md"),
    *("docs/reproduction.md", "docs/reproduction-mafalda.md"),
]


@pytest.mark.parametrize("page", PAGES)
def test_rows_of_tables_fit_a_window(page: str) -> None:
    for number, line in enumerate((ROOT / page).read_text().splitlines(), start=1):
        assert not line.startswith("|") or len(line) <= 100, f"{page}, line {number}"


def test_a_release_s_limits_stand_where_it_is_named() -> None:
    text = (ROOT / "docs" / "choosing.md").read_text()
    after = text.partition("`release=True`")[2].partition("## ")[0]
    assert "One process holds everything" in after and "Nothing is really sent" in after
