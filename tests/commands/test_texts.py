"""What the package's texts say of the manual, and of misspelt words."""

import re
from pathlib import Path

import pytest

from dpjax import _validate

ROOT = Path(__file__).resolve().parents[2]


def titles() -> set[str]:
    """Titles of the manual's pages."""
    files = [ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]
    return {title for file in files for title in re.findall("^# (.+)$", file.read_text(), re.M)}


def faults(text: str) -> list[str]:
    """Files of a checkout that a text names, and pages that the manual lacks."""
    # Titles go over the ends of lines, of comments, and of texts that are joined.
    text = re.sub(r'\s*"\n\s*f?"|\n\s*#|\\n', " ", text)
    words = " ".join(text.split())
    named = re.findall(r"""[Tt]he page (['"])(.+?)\1 of the manual""", words)
    return re.findall(r"[\w/-]+\.md\b", words) + [t for _, t in named if t not in titles()]


def test_pages_are_named_by_their_titles() -> None:
    """By which the manual can be searched: an installed package has no files of pages."""
    modules = sorted((ROOT / "dpjax").rglob("*.py"))
    found = {str(path.relative_to(ROOT)): faults(path.read_text()) for path in modules}
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.mutant
def test_name_of_file_and_title_of_no_page_are_caught() -> None:
    assert faults("see docs/secagg.md, or SECURITY.md") == ["docs/secagg.md", "SECURITY.md"]
    assert faults("the page 'Nothing' of the manual") == ["Nothing"]
    assert not faults("The page 'Train from\n# a file' of the manual")
    assert faults('''"the page 'No "\n    "page' of the manual"''') == ["No page"]


@pytest.mark.parametrize(
    ("value", "options", "text"),
    [
        ("Wisper", ["Pairwise", "Whisper"], "did you mean Whisper? If not, choose one of Pairwise"),
        ("MPL", ["CNN", "MLP"], "did you mean MLP? If not, choose one of CNN, MLP"),
        ("full", ["Full", "Random"], "did you mean Full? If not, choose one of Full, Random"),
        ("nothing", ["one", "two"], "choose one of one, two"),
        ("x", [], "there are none: leave it out"),
        (3, ["one", "two"], "choose one of one, two"),
        pytest.param(10**5000, ["one", "two"], "choose one of one, two", id="digits"),
        (None, ["one", "two"], "choose one of one, two"),
    ],
)
def test_nearest_option_comes_first(value: object, options: list[str], text: str) -> None:
    assert _validate.choice(value, options).startswith(text)
    with pytest.raises(ValueError, match=re.escape(f"; {text}")):
        _validate.one_of("kind", value, options)
