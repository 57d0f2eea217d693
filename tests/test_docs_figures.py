"""Figures of the documentation: each is on a page, with an alt text that says what it shows."""

import re

import pytest

from tests.support import ROOT

FIGURES = ROOT / "docs" / "figures"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def shown():
    """Page, alt text and file of every embedded figure."""
    for page in PAGES:
        for alt, name in re.findall(
            r"!\[([^\]]*)\]\((?:docs/)?figures/([^)]+)\)", page.read_text()
        ):
            yield page.name, alt, name


def test_every_figure_is_on_page_and_every_link_leads_to_one():
    present = {path.name for path in FIGURES.iterdir()}
    assert {name for _, _, name in shown()} == present
    for page in PAGES:
        linked = set(re.findall(r"figures/([\w.-]+\.(?:svg|png))", page.read_text()))
        assert linked <= present, f"{page.name} links {linked - present}"


def test_figure_has_one_alt_text_on_all_pages():
    texts = dict.fromkeys((name, alt) for _, alt, name in shown())
    assert len({name for name, _ in texts}) == len(texts)


@pytest.mark.parametrize("page", sorted({page for page, _, _ in shown()}))
def test_alt_texts_name_both_axes_and_finding(page):
    texts = {alt: name for position, alt, name in shown() if position == page}
    for alt, name in texts.items():
        assert len(alt.split()) >= 20 and alt.endswith("."), f"{page}: {name}"
        words = ("(up", "(left)", "above", "a slow wave"), ("across", "(right)", "below")
        assert all(any(word in alt for word in some) for some in words), f"{page}: {name}"
    assert len(texts) == sum(place == page for place, _, _ in shown())


def test_figures_keep_their_caption_as_text():
    for path in FIGURES.glob("*.svg"):
        caption = path.read_text().partition("<dc:description>")[2].partition("</dc:")[0]
        assert len(caption.split()) >= 5, path.name
