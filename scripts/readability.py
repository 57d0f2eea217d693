"""Words a sentence and Flesch's reading ease of README and the pages.

python scripts/readability.py [PAGE ...] prints a line a page, hardest first, and with --long N the
sentences of more than N words. Left out are code, tables, headings, figures and what is made from
records.
"""

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MADE = re.compile(r"<!-- made by .*?<!-- end of .*?-->", re.DOTALL)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
APART = re.compile(r"^\s*(\||#|!\[|<!--|:::|\$\$| {4,}\S).*$", re.MULTILINE)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
ITEM = re.compile(r"^\s*([-*]|\d+\.)\s+", re.MULTILINE)
END = re.compile(r"(?<=[.!?])[)*\"_]*\s+(?=[(*\"_`A-Z0-9])")


def sentences(text: str) -> list[list[str]]:
    """The words of every sentence; an item of a list begins one.

    Inline code and formulas count as one word each.
    """
    for pattern in (MADE, FENCE, APART):
        text = pattern.sub("\n\n", text)
    text = re.sub(r"`[^`]*`|\$[^$\n]*\$", "code", LINK.sub(r"\1", text))
    blocks = re.split(r"\n\s*\n", ITEM.sub("\n\n", text))
    parts = [part for block in blocks for part in END.split(" ".join(block.split()))]
    found = [re.findall(r"[A-Za-z][A-Za-z'’-]*|\d[\d.,]*", part) for part in parts]
    return [words for words in found if len(words) > 2]


def syllables(word: str) -> int:
    """About how many: groups of vowels, less a silent e."""
    groups = re.findall(r"[aeiouy]+", word.lower())
    silent = word.lower().endswith("e") and not word.lower().endswith("le")
    return max(1, len(groups) - silent)


def measures(text: str) -> tuple[int, float, float]:
    """Sentences, their mean words, and Flesch's 206.8 - 1.015 words/sentence - 84.6 syllables/word.

    Args:
        text: Of a page.
    """
    found = sentences(text)
    words = [word for one in found for word in one]
    if not words:
        return 0, 0.0, 0.0
    each = len(words) / len(found)
    return len(found), each, 206.835 - 1.015 * each - 84.6 * sum(map(syllables, words)) / len(words)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", type=Path, help="all, where none is given")
    parser.add_argument("--long", type=int, help="sentences of more words than this")
    given = parser.parse_args()
    pages = given.pages or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    rows = [(*measures(page.read_text(encoding="utf-8")), page) for page in pages]
    print("sentences  words  Flesch  page")
    for count, each, ease, page in sorted(rows, key=lambda row: -row[1]):
        print(f"{count:9}  {each:5.1f}  {ease:6.0f}  {page.name}")
        for words in sentences(page.read_text(encoding="utf-8")) if given.long else ():
            if len(words) > given.long:
                print(f"    {len(words)}: {' '.join(words)}")
    total = sum(row[0] for row in rows)
    print(f"{total:9}  {sum(row[0] * row[1] for row in rows) / total:5.1f}  all")


if __name__ == "__main__":
    main()
