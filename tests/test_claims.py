"""The claims of the papers: every verdict has its evidence, and files are what the store makes."""

import csv
import html
import re

import pytest

from tests.support import ROOT, load_script

STORE = ROOT / "docs" / "records" / "claims.toml"


@pytest.fixture(scope="module")
def claims():
    return load_script("claims", folder="scripts")


def test_all_papers_have_claims_with_verdict_and_evidence(claims):
    store = claims.load()
    assert list(store) == ["whisper", "mafalda", "tracking", "doppler", "dome"]
    entries = [claim for paper in store.values() for claim in paper["claims"]]
    assert {claims.word(claim) for claim in entries} == set(claims.VERDICTS)
    names = [(key, c["where"], c["claim"]) for key in store for c in store[key]["claims"]]
    assert len(set(names)) == len(names) and all(claim["evidence"] for claim in entries)
    # A claim is a sentence.
    assert all(claim["claim"].endswith(".") for claim in entries)


def test_files_are_what_store_makes(claims):
    assert claims.main("--check") == 0, "run scripts/claims"


def test_changed_verdict_makes_claims_and_counts_stale(claims, capsys, monkeypatch):
    store = claims.load()
    store["dome"]["claims"][0]["verdict"] = "not reproduced"
    monkeypatch.setattr(claims, "load", lambda: store)
    assert claims.main("--check") == 1
    stale = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert stale == {"claims_dome.csv", "findings.md"}


def test_file_of_claims_has_every_field_and_links_that_lead_somewhere(claims):
    store = claims.load()
    for key, paper in store.items():
        page = ROOT / "docs" / paper["page"]
        path = ROOT / "docs" / claims.DATA / f"claims_{key}.csv"
        head, *rows = csv.reader(path.read_text(encoding="utf-8").splitlines())
        assert tuple(head) == claims.COLUMNS and len(rows) == len(paper["claims"])
        for row, claim in zip(rows, paper["claims"], strict=True):
            needs = f"; decided by {claim['needs']}" if "needs" in claim else ""
            assert row[:3] == [claim["where"], claim["claim"], claim["verdict"] + needs]
            assert row[3:5] == [claim["found"], claim["size"]]
            assert len(row[5].split("; ")) >= len(claim["evidence"])
            for link in re.findall(r"\]\(([^)]*)\)", row[5]):
                assert (page.parent / link.partition("#")[0]).is_file(), link
            if "record" in claim:
                assert claim["record"] in row[5]


def test_page_that_does_not_load_its_claims_is_refused(claims):
    store = claims.load()
    store["dome"]["page"] = "artifact/whisper.md"
    with pytest.raises(ValueError, match=r"csv-table with ':file: data/claims_dome.csv'; add it"):
        claims.files(store)


@pytest.mark.parametrize("page", ["errata", "findings"])
def test_tests_that_page_names_are_there(claims, page):
    text = (ROOT / "docs" / "found" / f"{page}.md").read_text()
    named = re.findall(r"`(tests/[^`]+)`", text)
    assert named and not [item for item in named if not claims.is_there(item)]


def refusal(claims, path):
    """What is said of a store."""
    with pytest.raises(ValueError) as refused:
        claims.load(path)
    return str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "reported"),
    [
        ('verdict = "reproduced"', 'verdict = "holds"', "verdict is 'holds'; begin it with one of"),
        ('record = "mechanism.jsonl"', 'record = "none.jsonl"', "'none.jsonl', and no such file"),
        ('figure = "whisper_variance.png"', 'figure = "none.png"', "'none.png', and no such file"),
        ("::test_whisper_is_theorem_two", "::test_gone", "which is not there; give FILE"),
        ("tests/accounting/test_views.py::", "tests/none.py::", "which is not there; give FILE"),
        ("data/whisper_speed.csv", "data/none.csv", "which is not there; give FILE"),
        ("data/whisper_speed.csv", "whisper.md#haste", "which is not there; give FILE"),
        ('size = "theory', 'sizes = "theory', "size, sizes missing or unknown; give"),
    ],
)
def test_broken_store_is_refused(claims, tmp_path, old, new, reported):
    complete = STORE.read_text()
    copy = tmp_path / "claims.toml"
    copy.write_text(complete.replace(old, new, 1))
    text = refusal(claims, copy)
    # The claim is named before what is wrong with it.
    broken = complete[complete.rindex("[[", 0, complete.index(old)) :]
    claim = broken.partition('claim = "')[2].partition('"')[0]
    assert text.startswith("whisper, ") and claim in text and reported in text


@pytest.mark.parametrize(
    ("old", "new", "reported"),
    [
        ("Holds.", r"Holds\nnot.", r"claim is 'Holds\nnot.'; write one line"),
        ('claim = "Holds."', 'claim = "Holds"', "claim has no full stop at its end; add it"),
        ('"reproduced"', '"reproduced:"', "verdict is 'reproduced:'; begin it with one of"),
        ('"reproduced"', "3", "verdict is 3; give a text"),
        ('"reproduced"', '"within chance"', "needs says what would decide a claim that is open"),
        ("size =", 'needs = "seeds"\nsize =', "needs says what would decide a claim that is open"),
        ('["scripts/claims.py"]', "[]", "evidence is []; give a list of texts"),
        ('["scripts/claims.py"]', '"scripts/claims.py"', "give a list of texts"),
        ("scripts/claims.py", "tests/test_claims.py::test_(", "which is not there; give FILE"),
        ("size =", 'figure = "../../README.md"\nsize =', "and no such file is stored"),
        ("size =", "record = 3\nsize =", "record is 3; give a text"),
        ('title = "One"', "", "one has no title or no page; give both as texts under [one]"),
        ("[one]", "x = 3\n[one]", "x has no title or no page; give both as texts under [x]"),
        ("[[one.claims]]", "claims = [3]\n[two]", "one has no claim; add one"),
        ("[one]", "[one", "claims.toml is not TOML (Expected"),
        ("Evidence", "Again", "one, Theorem 1, 'Holds.': given twice; leave one out"),
    ],
)
def test_what_pages_cannot_show_is_refused(claims, tmp_path, old, new, reported):
    claim = """[[one.claims]]
where = "Theorem 1"
claim = "Holds."
verdict = "reproduced"
found = "It holds."
size = "theory"
evidence = ["scripts/claims.py"]
"""
    text = f'[one]\ntitle = "One"\npage = "one.md"\n\n{claim}'
    copy = tmp_path / "claims.toml"
    copy.write_text(text)
    claims.load(copy)
    copy.write_text(text.replace(old, new) if old in text else text + claim)
    assert reported in refusal(claims, copy)


def test_main_takes_check_alone_and_says_error_in_one_line(claims, capsys, monkeypatch):
    monkeypatch.setattr(claims, "files", lambda store: pytest.fail("options are read first"))
    for option, status in (("--chek", 2), ("--help", 0)):
        with pytest.raises(SystemExit) as stop:
            claims.main(option)
        assert stop.value.code == status and "--check" in "".join(capsys.readouterr())
    monkeypatch.undo()
    monkeypatch.setattr(claims, "load", lambda: open("nowhere.toml"))
    assert claims.main("--check") == 2
    output = capsys.readouterr()
    assert not output.out and output.err.startswith("scripts/claims: error: ")
    assert output.err.count("\n") == 1 and "nowhere.toml" in output.err


def test_papers_without_claims_are_refused(claims, tmp_path, monkeypatch):
    copy = tmp_path / "claims.toml"
    copy.write_text('[other]\ntitle = "Other"\npage = "other.md"\n')
    with pytest.raises(ValueError, match=r"other has no claim; add one under \[\[other.claims\]\]"):
        claims.load(copy)
    monkeypatch.setattr(claims, "DOCS", tmp_path)
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "findings.md").write_text("# No marks\n")
    with pytest.raises(ValueError, match=r"findings.md has no .* put both where the counts belong"):
        claims.files({})


def test_report_has_each_claim_and_each_figure_once(claims, tmp_path):
    store = claims.load()
    for key in ("whisper", "dome"):
        path = tmp_path / f"{key}.html"
        assert claims.main("--paper", key, "--out", str(path)) == 0
        text = path.read_text()
        titles = re.findall("<h3>(.*)</h3>", text.partition("All claims")[2])
        assert [html.unescape(title) for title in titles] == [
            claim["claim"] for claim in store[key]["claims"]
        ]
        figures = {claim["figure"] for claim in store[key]["claims"] if "figure" in claim}
        assert sorted(re.findall('<img alt="([^"]*)"', text)) == sorted(figures)
        open_claims = [claim for claim in store[key]["claims"] if "needs" in claim]
        assert text.count("; decided by ") == len(open_claims)
        assert "<strong>Printed</strong>" in text and "](" not in text.partition("All claims")[0]
        # Nothing is written over.
        assert claims.main("--paper", key, "--out", str(path)) == 2
        assert path.read_text() == text


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (("--paper", "none", "--out", "OUT"), "paper is 'none'; give one of whisper, mafalda"),
        (("--paper", "dome"), "give --paper and --out together"),
        (("--out", "OUT"), "give --paper and --out together"),
    ],
)
def test_report_of_no_paper_is_refused(claims, tmp_path, capsys, options, reported):
    path = tmp_path / "report.html"
    assert claims.main(*(str(path) if word == "OUT" else word for word in options)) == 2
    assert reported in capsys.readouterr().err and not path.exists()
