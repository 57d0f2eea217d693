"""Make docs/artifact/data/claims_PAPER.csv and the counts of verdicts in docs/found/findings.md.

Both come from docs/records/claims.toml. The page of each paper loads its file of claims. The table
of names in docs/start/terms.md comes from the classes of the noise designs.

scripts/claims writes them. With --check it names those that are stale, and its exit status is 1.
A store that cannot be read is named, with the remedy; the exit status is 2.

scripts/claims --paper whisper --out report.html writes one page for a paper's authors, which needs
no other file: verdicts, what would decide the open ones, errata, figures.
"""

import argparse
import base64
import csv
import html
import io
import os.path
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
DECIDED = ("reproduced", "not reproduced")
OPEN = ("not run at the paper's size", "within chance", "the paper leaves it open")
VERDICTS = DECIDED + OPEN
HEADINGS = ("paper", *DECIDED, "not run", "within chance", "left open")
"""Of the counts, which a window shows whole."""
FIELDS = {"where", "claim", "verdict", "found", "size", "evidence"}
FOLDERS = {"figure": ("docs/figures",), "record": ("docs/records", "benchmarks/records")}
DATA = Path("artifact", "data")
COUNTS = Path("found", "findings.md")
COLUMNS = ("where", "claim", "verdict", "what was found", "size", "evidence")
BEGIN, END = "<!-- made by scripts/claims -->", "<!-- end of claims -->"
NAMES, NAMES_END = Path("start", "terms.md"), "<!-- end of names -->"
ORDER = (
    *("independent", "pairwise", "pair_keys", "whisper", "whisper_horizon", "anti_pgd"),
    *("prefix_sum", "mafalda", "banded_inverse", "one_step", "spacetime", "polynomial"),
    *("covariance", "laplace", "normal", "aggregate", "discrete", "zip_dl"),
)
"""Labels of the designs in the order of the table of names."""


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
    if fields := sorted(FIELDS ^ (claim.keys() - FOLDERS.keys() - {"needs"})):
        return f"{', '.join(fields)} missing or unknown; give {', '.join(sorted(FIELDS))}"
    for field, value in claim.items():
        texts = value if field == "evidence" else [value]
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
            return f"{field} is {value!r}; give a {'list of texts' if texts is value else 'text'}"
    for field in FIELDS - {"evidence"}:
        if "\n" in claim[field]:
            return f"{field} is {claim[field]!r}; write one line"
    if not claim["claim"].endswith("."):
        return "claim has no full stop at its end; add it"
    if not re.fullmatch(f"({'|'.join(VERDICTS)})(: .+)?", claim["verdict"]):
        said = f"verdict is {claim['verdict']!r}; begin it with one of {', '.join(VERDICTS)}"
        return f"{said}, and give a reason after a colon, or no colon"
    if ("needs" in claim) != (word(claim) in OPEN):
        return "needs says what would decide a claim that is open; give it to these and to no other"
    for field in FOLDERS.keys() & claim.keys():
        if not stored(field, claim):
            return f"{field} is {claim[field]!r}, and no such file is stored; name another"
    for each in claim["evidence"]:
        if not is_there(each):
            return f"evidence has {each!r}, which is not there; give FILE, FILE::NAME or FILE#PART"
    return ""


def word(claim: dict[str, Any]) -> str:
    """The verdict without its reason."""
    return claim["verdict"].partition(":")[0]


def stored(field: str, claim: dict[str, Any]) -> str:
    """The path of a claim's figure or record in the repository; empty where none is stored."""
    name = claim[field]
    for folder in FOLDERS[field]:
        # A path may lead elsewhere.
        if Path(name).name == name and (DOCS.parent / folder / name).is_file():
            return f"{folder}/{name}"
    return ""


def is_there(evidence: str) -> bool:
    """Whether a file of the repository exists, with the name or the section that follows it."""
    path, _, anchor = evidence.partition("#")
    if anchor:
        return anchor in titles(path)
    path, _, name = evidence.partition("::")
    file = DOCS.parent / path
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return bool(re.search(rf"^ *(def|class) {re.escape(name)}\b" if name else ".", text, re.M))


def titles(page: str) -> dict[str, str]:
    """Headings of a page by their anchors, as the site and GitHub make them."""
    file = DOCS.parent / page
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = re.findall(r"^#+ (.*)$", text, re.M)
    plain = (re.sub(r"[^\w\s-]", "", title).strip().lower() for title in found)
    return {re.sub(r"[-\s]+", "-", title): own for title, own in zip(plain, found, strict=True)}


def shown(path: str, page: str) -> str:
    """A file of the repository, as evidence on a page: a link where the site has it.

    Args:
        path: From the root of the repository, with `::NAME` or `#SECTION`.
        page: That loads the claims, from the folder of the documentation.
    """
    if not path.startswith("docs/") or path.startswith("docs/records/"):
        return path
    name = path.removeprefix("docs/")
    return f"[{name}]({os.path.relpath(name, Path(page).parent)})"


def claims_of(paper: dict[str, Any]) -> str:
    """A paper's claims as CSV, with verdicts and what was found."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for claim in paper["claims"]:
        files = [stored(field, claim) for field in FOLDERS if field in claim]
        evidence = "; ".join(shown(each, paper["page"]) for each in [*claim["evidence"], *files])
        verdict = claim["verdict"]
        if "needs" in claim:
            verdict = f"{verdict}; decided by {claim['needs']}"
        found = claim["found"], claim["size"], evidence
        writer.writerow((claim["where"], claim["claim"], verdict, *found))
    return text.getvalue()


def counts(store: dict[str, Any]) -> str:
    """How many claims of each paper have which verdict, and how many of them are theory."""
    claims = {paper["title"]: paper["claims"] for paper in store.values()}
    claims["all"] = sum(claims.values(), [])
    lines = [HEADINGS, ["---"] * len(HEADINGS)]
    for title, listed in claims.items():
        cells = []
        for verdict in VERDICTS:
            sizes = [claim["size"] for claim in listed if word(claim) == verdict]
            theory = sum(size.startswith("theory") for size in sizes)
            cells.append(f"{len(sizes)} ({theory})")
        lines.append((title, *cells))
    return table(lines)


def names() -> str:
    """What each noise design is called where, and against whom it protects agents, as Markdown."""
    from dpjax.plans import noise

    lines = [("class", "name", "label", "the paper's name", "agents are protected from")]
    lines.append(("---",) * len(lines[0]))
    for label in ORDER:
        if label == "covariance":
            lines.append(("`Covariance`", *["its own name"] * 2, "none", "outsiders"))
            continue
        part = noise.DESIGNS[label]
        shown = type(part).__name__
        if label.startswith("whisper"):
            shown += "()" if part.horizon is None else f'("{part.horizon}")'
        lines.append(
            (f"`{shown}`", part.look.label, f"`{label}`", part.paper or "none", protected(part))
        )
    return table(lines)


def protected(part: Any) -> str:
    """Whom a design protects agents from, by the terms of its class."""
    attackers = {attacker for attacker, _ in part.terms.attackers}
    if "aggregator" in attackers:
        return "a server that sees sums"
    if attackers == {"outsider"}:
        return "outsiders"
    if "outsider" not in attackers:
        return 'one agent or a coalition, under `"view"`'
    # Of secrets on links each attacker holds some: a plan is for one kind of attacker.
    on_links = getattr(part, "secrets", None) == "links"
    return "outsiders, one agent, or a coalition" if on_links else "all"


def table(lines: Iterable[Iterable[Any]]) -> str:
    """Cells as a table of Markdown."""
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def between(page: Path, end: str, content: str, what: str) -> str:
    """The text of a page with other content between its marks.

    Raises:
        ValueError: Where the page has no marks.
    """
    before, begin, rest = (DOCS / page).read_text(encoding="utf-8").partition(BEGIN)
    if not begin or end not in rest:
        raise ValueError(f"{page} has no {BEGIN} and {end}; put both where the {what} belong")
    return f"{before}{BEGIN}\n\n{content}\n\n{end}{rest.partition(end)[2]}"


def files(store: dict[str, Any]) -> dict[Path, str]:
    """Every file's text as it should be.

    Raises:
        ValueError: Where a paper's page does not load its claims, or a table has no place.
    """
    found = {}
    for key, paper in store.items():
        file = DOCS / DATA / f"claims_{key}.csv"
        loads = f":file: {os.path.relpath(file, (DOCS / paper['page']).parent)}\n"
        page = DOCS / paper["page"]
        if not page.is_file() or loads not in page.read_text(encoding="utf-8"):
            raise ValueError(f"{paper['page']} has no csv-table with {loads.strip()!r}; add it")
        found[file] = claims_of(paper)
    found[DOCS / COUNTS] = between(COUNTS, END, counts(store), "counts")
    found[DOCS / NAMES] = between(NAMES, NAMES_END, names(), "names")
    return found


STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { border: 1px solid #ccc; padding: .3rem .5rem; }
td, th { text-align: left; vertical-align: top; } img { max-width: 100%; }
"""


def report(paper: dict[str, Any]) -> str:
    """A paper's claims, errata and figures as one page of HTML."""
    from markdown_it import MarkdownIt

    from dpjax.results import records

    title = paper["title"]
    head = records.metadata()
    lines = [
        f"# {title} in dpjax",
        f"dpjax {head['versions']['dpjax']}, commit `{head['commit']}`. Paths are those of its "
        "repository. Each record begins with command, seeds, versions and device.",
        "## Verdicts",
        counts({"one": paper}).rpartition("\n")[0],
        "In brackets: about theory, without a run.",
        "## What would decide the open claims",
    ]
    for claim in paper["claims"]:
        if "needs" in claim:
            lines.append(f"- {claim['where']}: {claim['claim']} **{claim['verdict']}**; decided by "
                         f"{claim['needs']}")  # fmt: skip
    lines += ["## Errata", errata(title), "## All claims"]
    markdown = MarkdownIt("commonmark").enable("table")
    parts = [markdown.render("\n\n".join(lines))]
    drawn: set[str] = set()
    for claim in paper["claims"]:
        parts.append(section(claim))
        name = claim.get("figure", "")
        if name and name not in drawn:
            parts.append(figure(DOCS.parent / stored("figure", claim)))
        drawn.add(name)
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)} '
        f"in dpjax</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def section(claim: dict[str, Any]) -> str:
    """One claim as HTML."""
    evidence = [
        *claim["evidence"],
        *filter(None, (stored(f, claim) for f in FOLDERS if f in claim)),
    ]
    rows = {
        "where": claim["where"],
        "verdict": claim["verdict"],
        "decided by": claim.get("needs", ""),
        "found": claim["found"],
        "size": claim["size"],
        "evidence": ", ".join(evidence),
    }
    cells = "".join(
        f"<tr><th>{name}</th><td>{html.escape(text)}</td></tr>"
        for name, text in rows.items()
        if text
    )
    return f"<h3>{html.escape(claim['claim'])}</h3>\n<table>{cells}</table>"


def figure(path: Path) -> str:
    """A figure inside of HTML."""
    kind = "svg+xml" if path.suffix == ".svg" else path.suffix[1:]
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{html.escape(path.name)}" src="data:image/{kind};base64,{data}"></p>'


def errata(title: str) -> str:
    """The errata of a paper, as the page of all has them."""
    text = (DOCS / "found" / "errata.md").read_text(encoding="utf-8")
    _, _, rest = text.partition(f"\n## {title}\n")
    own = re.split(r"(?m)^## ", rest)[0]
    # Links lead to pages that are not here.
    return re.sub(r"\[([^]]*)\]\((?!http)[^)]*\)", r"\1", own)


def main(*options: str) -> int:
    """Write the files that differ, or name them; or one paper's report."""
    parser = argparse.ArgumentParser("scripts/claims", description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; name stale files")
    parser.add_argument("--paper", help="a paper's key: whisper, mafalda, tracking, doppler, dome")
    parser.add_argument("--out", type=Path, help="the report, which must not exist")
    arguments = parser.parse_args(options)
    check = arguments.check
    if (arguments.paper is None) != (arguments.out is None):
        print("scripts/claims: error: give --paper and --out together", file=sys.stderr)
        return 2
    try:
        if arguments.paper is not None:
            store = load()
            if arguments.paper not in store:
                raise ValueError(f"paper is {arguments.paper!r}; give one of {', '.join(store)}")
            text = report(store[arguments.paper])
            with arguments.out.open("x", encoding="utf-8") as file:
                file.write(text)
            print(f"report: {arguments.out}")
            return 0
        texts = files(load())
        present = {path: path.read_bytes().decode() for path in texts if path.is_file()}
        stale = {path: text for path, text in texts.items() if present.get(path) != text}
    except (ValueError, OSError) as error:
        print(f"scripts/claims: error: {error}", file=sys.stderr)
        return 2
    for path, text in stale.items():
        print(path.name, "is stale; run scripts/claims" if check else "is written")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
    return int(check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
