"""The claims of the papers: every verdict has its evidence, and pages are what the store makes."""

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
    # A sentence each, which pages put before the verdict, and no column of a table.
    assert all(c["claim"].endswith(".") and "|" not in c["claim"] + c["size"] for c in entries)


def test_pages_are_what_store_makes(claims):
    assert claims.main("--check") == 0, "run scripts/claims"


def test_changed_verdict_makes_three_pages_stale(claims, capsys, monkeypatch):
    store = claims.load()
    store["dome"]["claims"][0]["verdict"] = "not reproduced"
    monkeypatch.setattr(claims, "load", lambda: store)
    assert claims.main("--check") == 1
    text = capsys.readouterr().out.split()
    assert {"reproduction-dome.md", "claims.md", "findings.md"} <= set(text)
    assert "reproduction.md" not in text


@pytest.mark.parametrize("page", ["errata", "findings"])
def test_tests_that_page_names_are_there(claims, page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
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
        ("::test_whisper_is_theorem_two", "::test_gone", "which is not there; give PAGE"),
        ("tests/accounting/test_views.py::", "tests/none.py::", "which is not there; give PAGE"),
        ("reproduction.md#speed", "reproduction.md#haste", "which is not there; give PAGE"),
        ("reproduction.md#speed", "none.md#speed", "which is not there; give PAGE"),
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
        ("Holds.", "Holds|not.", "claim is 'Holds|not.'; write one line without |"),
        ('claim = "Holds."', 'claim = "Holds"', "claim has no full stop at its end; add it"),
        ('"reproduced"', '"reproduced:"', "verdict is 'reproduced:'; begin it with one of"),
        ('"reproduced"', "3", "verdict is 3; give a text"),
        ('["scripts/claims.py"]', "[]", "evidence is []; give a list of texts"),
        ('["scripts/claims.py"]', '"scripts/claims.py"', "give a list of texts"),
        ("scripts/claims.py", "tests/test_claims.py::test_(", "which is not there; give PAGE"),
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
    monkeypatch.setattr(claims, "pages", lambda store: pytest.fail("options are read first"))
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
    (tmp_path / "claims.md").write_text("# No marks\n")
    with pytest.raises(ValueError, match=r"claims.md has no .* put both where its claims belong"):
        claims.pages({})
