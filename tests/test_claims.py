"""The claims of the papers: every verdict has its evidence, and pages are what the store makes."""

import pytest

from tests.support import ROOT, load_script

STORE = ROOT / "docs" / "records" / "claims.toml"


@pytest.fixture(scope="module")
def claims():
    return load_script("claims", folder="scripts")


def test_all_papers_have_claims_with_a_verdict_and_evidence_that_is_there(claims):
    store = claims.load()
    assert list(store) == ["whisper", "mafalda", "tracking", "doppler", "dome"]
    every = [claim for paper in store.values() for claim in paper["claims"]]
    assert {claims.word(claim) for claim in every} == set(claims.VERDICTS)
    names = [(key, c["where"], c["claim"]) for key in store for c in store[key]["claims"]]
    assert len(set(names)) == len(names) and all(claim["evidence"] for claim in every)
    # A sentence each, which pages put before the verdict, and no column of a table.
    assert all(c["claim"].endswith(".") and "|" not in c["claim"] + c["size"] for c in every)


def test_pages_are_what_the_store_makes(claims):
    assert claims.main("--check") == 0, "run scripts/claims"


def test_a_changed_verdict_makes_two_pages_stale(claims, capsys, monkeypatch):
    store = claims.load()
    store["dome"]["claims"][0]["verdict"] = "not reproduced"
    monkeypatch.setattr(claims, "load", lambda: store)
    assert claims.main("--check") == 1
    said = capsys.readouterr().out.split()
    assert {"reproduction-dome.md", "claims.md"} <= set(said) and "reproduction.md" not in said


@pytest.mark.parametrize(
    ("old", "new", "told"),
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
def test_a_broken_store_is_refused(claims, tmp_path, old, new, told):
    whole, copy = STORE.read_text(), tmp_path / "claims.toml"
    copy.write_text(whole.replace(old, new, 1))
    with pytest.raises(ValueError) as refusal:
        claims.load(copy)
    # The claim is named before what is wrong with it.
    broken = whole[whole.rindex("[[", 0, whole.index(old)) :]
    claim = broken.partition('claim = "')[2].partition('"')[0]
    assert str(refusal.value).startswith("whisper, ") and claim in str(refusal.value)
    assert told in str(refusal.value)


def test_a_paper_without_claims_and_a_page_without_marks_are_refused(claims, tmp_path, monkeypatch):
    copy = tmp_path / "claims.toml"
    copy.write_text('[other]\ntitle = "Other"\npage = "other.md"\n')
    with pytest.raises(ValueError, match=r"other has no claim; add one under \[\[other.claims\]\]"):
        claims.load(copy)
    monkeypatch.setattr(claims, "DOCS", tmp_path)
    (tmp_path / "claims.md").write_text("# No marks\n")
    with pytest.raises(ValueError, match=r"claims.md has no .* put both where its claims belong"):
        claims.pages({})
