"""Make docs/claims.md, its counts in docs/findings.md, and "Claim by claim" of the papers' pages.

All come from docs/records/claims.toml.

scripts/claims writes them. With --check it names those that are stale, and its exit status is 1.
A store that cannot be read is named, with the remedy; the exit status is 2.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path
from textwrap import wrap
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
VERDICTS = ("reproduced", "not reproduced", "cannot be told at our size")
FIELDS = {"where", "claim", "verdict", "found", "size", "evidence"}
FOLDERS = {"figure": ("figures",), "record": ("records", "../benchmarks/records")}
BEGIN, END = "<!-- made by scripts/claims -->", "<!-- end of claims -->"


def load(path: Path = DOCS / "records" / "claims.toml") -> dict[str, Any]:
    """The papers by key: title, page and claims.

    Raises:
        ValueError: Naming the claim that is incomplete or names what is not there, and the remedy.
    """
    try:
        store = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path.name} is not TOML ({error}); correct it there") from None
    for key, paper in store.items():
        fields = paper if isinstance(paper, dict) else {}
        if not all(isinstance(fields.get(name), str) for name in ("title", "page")):
            raise ValueError(f"{key} has no title or no page; give both as texts under [{key}]")
        claims = fields.get("claims")
        if not (isinstance(claims, list) and claims and all(isinstance(c, dict) for c in claims)):
            raise ValueError(f"{key} has no claim; add one under [[{key}.claims]]")
        for claim in claims:
            if fault := wrong(claim):
                raise ValueError(f"{key}, {claim.get('where')}, {claim.get('claim')!r}: {fault}")
        names = [(claim["where"], claim["claim"]) for claim in claims]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{key}, {twice[0][0]}, {twice[0][1]!r}: given twice; leave one out")
    return store


def wrong(claim: dict[str, Any]) -> str:
    """What is wrong with a claim, and the remedy; empty where nothing is."""
    if fields := sorted(FIELDS ^ (claim.keys() - FOLDERS.keys())):
        return f"{', '.join(fields)} missing or unknown; give {', '.join(sorted(FIELDS))}"
    for field, value in claim.items():
        texts = value if field == "evidence" else [value]
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
            return f"{field} is {value!r}; give a {'list of texts' if texts is value else 'text'}"
    for field in ("where", "claim", "size"):
        if re.search(r"[|\n]", claim[field]):
            return f"{field} is {claim[field]!r}; write one line without |, which splits a table"
    if not claim["claim"].endswith("."):
        return "claim has no full stop at its end; add it"
    if not re.fullmatch(f"({'|'.join(VERDICTS)})(: .+)?", claim["verdict"]):
        said = f"verdict is {claim['verdict']!r}; begin it with one of {', '.join(VERDICTS)}"
        return f"{said}, and give a reason after a colon, or no colon"
    for field in FOLDERS.keys() & claim.keys():
        if stored(field, claim) == "none":
            return f"{field} is {claim[field]!r}, and no such file is stored; name another"
    for each in claim["evidence"]:
        if not is_there(each):
            return f"evidence has {each!r}, which is not there; give PAGE.md#SECTION or FILE::NAME"
    return ""


def word(claim: dict[str, Any]) -> str:
    """The verdict without its reason."""
    return claim["verdict"].partition(":")[0]


def stored(field: str, claim: dict[str, Any]) -> str:
    """A claim's figure or record as pages show it."""
    name = claim.get(field, "")
    for folder in FOLDERS[field]:
        # A path may lead elsewhere.
        if Path(name).name == name and (DOCS / folder / name).is_file():
            path = f"{folder}/{name}"
            return f"`{path[3:]}`" if path.startswith("..") else f"[{field}]({path})"
    return "none"


def is_there(evidence: str) -> bool:
    """Whether a section of a page, or a name in a file, exists."""
    page, _, anchor = evidence.partition("#")
    if anchor:
        return anchor in titles(page)
    path, _, name = evidence.partition("::")
    file = DOCS.parent / path
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return bool(re.search(rf"^ *(def|class) {re.escape(name)}\b" if name else ".", text, re.M))


def titles(page: str) -> dict[str, str]:
    """Headings of a page by their anchors, as the site and GitHub make them."""
    text = (DOCS / page).read_text(encoding="utf-8") if (DOCS / page).is_file() else ""
    found = re.findall(r"^#+ (.*)$", text, re.M)
    plain = (re.sub(r"[^\w\s-]", "", title).strip().lower() for title in found)
    return {re.sub(r"[-\s]+", "-", title): own for title, own in zip(plain, found, strict=True)}


def shown(evidence: str, page: str = "claims.md") -> str:
    """Evidence as a page shows it."""
    path, _, anchor = evidence.partition("#")
    return f"[{titles(path)[anchor]}]({evidence.removeprefix(page)})" if anchor else f"`{path}`"


def section(paper: dict[str, Any]) -> str:
    """A paper's claims with what was found."""
    lines = []
    for claim in paper["claims"]:
        reason = claim["verdict"].partition(": ")[2]
        text = f"- {claim['where']}: {claim['claim'][:-1]}: **{word(claim)}**"
        text += f" ({reason}). {claim['found']}" if reason else f". {claim['found']}"
        evidence = ", ".join(shown(each, paper["page"]) for each in claim["evidence"])
        text += f" Size: {claim['size']}. Evidence: {evidence}."
        lines += wrap(text, 150, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def counts(store: dict[str, Any]) -> str:
    """How many claims of each paper have which verdict."""
    words = {paper["title"]: [word(each) for each in paper["claims"]] for paper in store.values()}
    words["all"] = sum(words.values(), [])
    lines = [("paper", *VERDICTS), ["---"] * 4]
    return table(lines + [(title, *map(said.count, VERDICTS)) for title, said in words.items()])


def overview(store: dict[str, Any]) -> str:
    """The counts, and the table of all claims."""
    lines = [("paper", "where", "claim", "verdict", *FOLDERS, "evidence", "size"), ["---"] * 8]
    for paper in store.values():
        name = f"[{paper['title']}]({paper['page']}#claim-by-claim)"
        for claim in paper["claims"]:
            files = (stored(field, claim) for field in FOLDERS)
            evidence = ", ".join(map(shown, claim["evidence"]))
            row = (name, claim["where"], claim["claim"], word(claim), *files, evidence)
            lines.append((*row, claim["size"]))
    return f"{counts(store)}\n\n{table(lines)}"


def table(lines: list[Any]) -> str:
    """Cells by line, as Markdown."""
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def pages(store: dict[str, Any]) -> dict[Path, str]:
    """Every page's text as it should be."""
    texts = {paper["page"]: section(paper) for paper in store.values()}
    texts |= {"claims.md": overview(store), "findings.md": counts(store)}
    found = {}
    for page, text in texts.items():
        before, begin, rest = (DOCS / page).read_text(encoding="utf-8").partition(BEGIN)
        if not begin or END not in rest:
            raise ValueError(f"{page} has no {BEGIN} and {END}; put both where its claims belong")
        found[DOCS / page] = f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}"
    return found


def main(*options: str) -> int:
    """Write the pages that differ, or name them."""
    parser = argparse.ArgumentParser("scripts/claims", description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; name stale pages")
    check = parser.parse_args(options).check
    try:
        texts = pages(load())
        written = {path: path.read_text(encoding="utf-8") for path in texts}
        stale = {path: text for path, text in texts.items() if written[path] != text}
    except (ValueError, OSError) as error:
        print(f"scripts/claims: error: {error}", file=sys.stderr)
        return 2
    for path, text in stale.items():
        print(path.name, "is stale; run scripts/claims" if check else "is written")
        if not check:
            path.write_text(text, encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
