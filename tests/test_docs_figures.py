"""Figures of the documentation: each is on a page, with an alt text and a caption."""

import re

import pytest

from tests.support import ROOT

FIGURES = ROOT / "docs" / "figures"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"(?:\.\./|docs/)?figures/([\w.-]+\.(?:svg|png))")
# The dark one of a pair has the alt text of the light one.
DARK = {"trust_dark.svg"}


def shown():
    """Page, alt text, file and caption of every embedded figure."""
    pattern = r"!\[([^\]]*)\]\((?:\.\./|docs/)?figures/([^)]+)\)\s+\*([^*]+)\*"
    for page in PAGES:
        for alt, name, caption in re.findall(pattern, page.read_text()):
            yield page.name, alt, name, caption
    picture = r"<img src=\"docs/figures/([^\"]+)\" alt=\"([^\"]*)\">\s*</picture>\s+\*([^*]+)\*"
    for name, alt, caption in re.findall(picture, (ROOT / "README.md").read_text()):
        yield "README.md", alt, name, caption


def test_every_figure_is_on_page_and_every_link_leads_to_one():
    present = {path.name for path in FIGURES.iterdir()}
    # Pages of evidence embed the most telling ones, and link the others.
    linked = {
        name
        for page in PAGES
        if page.parent.name == "artifact"
        for name in LINK.findall(page.read_text())
    }
    assert {name for _, _, name, _ in shown()} | DARK | linked == present
    for page in PAGES:
        linked = set(LINK.findall(page.read_text()))
        assert linked <= present, f"{page.name} links {linked - present}"


def test_figure_has_one_alt_text_on_all_pages():
    texts = dict.fromkeys((name, alt) for _, alt, name, _ in shown())
    assert len({name for name, _ in texts}) == len(texts)


@pytest.mark.parametrize("page", sorted({page for page, *_ in shown()}))
def test_alt_text_says_what_is_drawn_and_caption_what_is_seen(page):
    for place, alt, name, caption in shown():
        if place == page:
            assert len(alt.split()) >= 5 and alt.endswith("."), f"{page}: {name}"
            assert len(caption.split()) >= 10 and caption.endswith("."), f"{page}: {name}"


def test_figures_keep_their_caption_as_text():
    for path in FIGURES.glob("*.svg"):
        caption = path.read_text().partition("<dc:description>")[2].partition("</dc:")[0]
        assert len(caption.split()) >= 5, path.name
