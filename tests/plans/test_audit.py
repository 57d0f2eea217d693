"""The audit of mechanisms: every row of the registry, small; what it cannot miss; its page."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import _audit
from benchmarks import audit_mechanisms as audit
from benchmarks.audit_mechanisms import Cell
from dpjax.algorithms import methods
from dpjax.algorithms.dsgd import DSGD
from dpjax.plans import noise as noise_
from dpjax.results import plots, records

SEEDS = 1024

OUTSIDER = ("outsider", "any")
CELLS = (
    (Cell("DiSK", "pairwise", "Full", *OUTSIDER, "replace_record"), "Full"),
    (Cell("PMLF", "whisper", "Clients", *OUTSIDER, "zero_out_client"), "whisper"),
    (Cell("Average", "whisper_horizon", "Cyclic", *OUTSIDER, "replace_record"), "Cyclic"),
    (Cell("DSGD", "anti_pgd", "Clients", "coalition", "any", "replace_client"), "DSGD"),
    (Cell("Federated", "prefix_sum", "Cyclic", *OUTSIDER, "zero_out_record"), "Federated"),
    (Cell("PMLF", "mafalda", "Random", "node", "any", "replace_agent"), "mafalda"),
    (Cell("DiSK", "spacetime", "Random", *OUTSIDER, "zero_out_record"), "Random"),
    (Cell("DSGD", "banded_inverse", "Cyclic", *OUTSIDER, "replace_record"), "banded_inverse"),
    (Cell("DSGD", "one_step", "Random", *OUTSIDER, "replace_agent"), "one_step"),
    (Cell("DiSK", "polynomial", "Full", *OUTSIDER, "replace_record"), "polynomial"),
    (Cell("DSGD", "pair_keys", "Random", "node", "view", "replace_agent"), "pair_keys"),
    (Cell("Tracking", "laplace", "Random", *OUTSIDER, "replace_agent"), "laplace"),
    (Cell("DPOP", "normal", "Random", *OUTSIDER, "replace_agent"), "DPOP"),
    (Cell("DGD", "normal", "Random", *OUTSIDER, "replace_agent"), "normal"),
    (Cell("GradientTracking", "normal", "Random", *OUTSIDER, "replace_agent"), "normal"),
    (Cell("PPDOAGT", "laplace", "Random", *OUTSIDER, "replace_agent"), "PPDOAGT"),
    (Cell("Federated", "aggregate", "Random", "aggregator", "any", "replace_agent"), "aggregate"),
    (Cell("Federated", "discrete", "Random", "aggregator", "any", "replace_agent"), "discrete"),
    (Cell("ZipDL", "zip_dl", "Random", "node", "view", "replace_agent"), "zip_dl"),
    (Cell("DSGD", "independent", "Poisson", *OUTSIDER, "zero_out_record"), "Poisson"),
    (Cell("DSGD", "whisper", "BallsInBins", *OUTSIDER, "zero_out_record"), "BallsInBins"),
)
CELLS += tuple(
    (Cell("DSGD", label, "Random", *OUTSIDER, "replace_agent"), label)
    for label in audit.rows("noises")
    if label not in {cell.noise for cell, _ in CELLS}
)
"""Cells in which every row of the registry, attacker and relation comes, and whose fault is tried.
"""
# Rivals whose sensitivity tests of their own are in the gate, and the secure sum's noise, which
# tests/plans/test_integers.py measures there.
SLOW = ("DPOP", "DGD", "GradientTracking", "PPDOAGT", "Average", "pairwise", "discrete", "one_step")
CASES = [
    pytest.param(
        cell,
        fault,
        id=f"{cell.method}-{cell.noise}",
        marks=[pytest.mark.slow] if {cell.method, cell.noise} & {*SLOW} else [],
    )
    for cell, fault in CELLS
]


def joining() -> set[str]:
    """Names of all rows that a private run can have."""
    private = {name for name, terms in audit.method_terms().items() if terms.payload != "bare"}
    return private | {*audit.rows("noises"), *audit.rows("samplers")}


def test_every_row_attacker_and_relation_is_audited_here() -> None:
    assert not audit.missing()
    tried = {name for cell, _ in CELLS for name in cell[:3]}
    assert tried == joining()
    assert {cell.attacker for cell, _ in CELLS} == {who for who, _ in audit.ATTACKERS}
    assert {cell.relation for cell, _ in CELLS} == set(audit.RELATIONS)


@pytest.mark.mutant
def test_row_without_audit_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    method = type("Mine", (DSGD,), {"terms": DSGD.terms})
    monkeypatch.setattr(methods, "Mine", method, raising=False)
    assert audit.missing() == ["Mine", "Mine, a broken copy"]
    with pytest.raises(SystemExit, match="no audit of Mine"):
        audit.main(["--quick"])


@pytest.mark.mutant
@pytest.mark.parametrize(("cell", "fault"), CASES)
def test_measured_loss_is_stated_one_and_fault_is_found(cell: Cell, fault: str) -> None:
    outcome, why = audit.planned(cell)
    assert outcome is not None, why
    result = audit.row(cell, outcome, SEEDS, [fault])
    assert not result["finding"], result
    # Of the last method the worst pair is not known: 0.95 of what is stated.
    assert result["high"] > (0.9 if cell.method == "PPDOAGT" else 0.99), result
    assert result["fault_of"] == fault and result["flagged"], result


@pytest.mark.slow
def test_what_is_refused_is_listed_with_plan_s_reason() -> None:
    kept = {("ZipDL", "zip_dl"), ("Federated", "discrete")}

    def natural(cell: Cell) -> bool:
        sampler = "Clients" if cell.relation.endswith("client") else "Random"
        return (cell.method, cell.noise) in kept and cell.sampler == sampler

    combined = set()
    refused = {}
    for cell, result, why in audit.cells(natural):
        assert (result is None) == bool(why)
        if result is None:
            refused[cell] = why
        else:
            combined.add(cell)
    entries = audit.EVERY
    for method, noise in kept:
        for attacker, gradients in audit.ATTACKERS:
            complete = Cell(method, noise, entries, attacker, gradients, entries)
            of_pair = [case for case in (*combined, *refused) if case[:2] == (method, noise)]
            messages = [
                item for item in of_pair if (item.attacker, item.gradients) == complete[3:5]
            ]
            relations = {value.relation for value in messages}
            assert relations in ({entries}, set(audit.RELATIONS)), (complete, messages)
    apart = {cell[:2] for cell in refused if cell.attacker == entries}
    assert ("EXTRA", "independent") in apart and ("DSGD", "aggregate") in apart
    assert (
        "sends what no noise was accounted for" in refused[Cell("EXTRA", "laplace", *[entries] * 4)]
    )
    node = Cell("ZipDL", "zip_dl", entries, "outsider", "any", entries)
    assert "finite only for nodes" in refused[node]
    assert len(apart | kept) < len(audit.METHODS) * len(audit.rows("noises"))


def test_page_and_data_files_are_record_s() -> None:
    stored = records.read(audit.RECORD).to_dict("records")
    command = records.read_metadata(audit.RECORD)["command"]
    page = audit.PAGE.read_text()
    # Else: python benchmarks/audit_mechanisms.py --page
    for path, text in audit.files(stored, command, page).items():
        assert path.read_text() == text, path.name
    stored[0] = {**stored[0], "ratio": 1.5}
    changed = audit.files(stored, command, page)
    stale = {path.name for path, text in changed.items() if path.read_text() != text}
    assert stale == {"audit.md", "audit.csv", "audit_samplers.csv"}
    stored[0] = {**stored[0], "broken_ratio": 1.03}
    changed = audit.files(stored, command, page)
    assert changed[audit.DATA / "audit_faults.csv"] != (audit.DATA / "audit_faults.csv").read_text()


def test_page_loads_or_links_every_data_file() -> None:
    page = audit.PAGE.read_text()
    written = {path.name for path in audit.DATA.glob("audit*.csv")}
    assert written == set(re.findall(r"\(data/(audit\w*\.csv)\)", page))
    assert ":file: data/audit.csv\n" in page


def marks(path: Path) -> tuple[str, np.ndarray]:
    """The caption of a figure, and where its marks are."""
    text = path.read_text()
    caption = text.partition("<dc:description>")[2].partition("</dc:")[0]
    found = re.findall(r'<use xlink:href="#m\w+" x="([\d.]+)" y="([\d.]+)"', text)
    return caption, np.array(found, float)


def test_figure_is_record_s(tmp_path: Path) -> None:
    stored = records.read(audit.RECORD).to_dict("records")
    drawn = plots.save(audit.figure(stored), tmp_path / "audit.svg")
    # Else: python benchmarks/audit_mechanisms.py --page
    caption, places = marks(audit.FIGURE)
    again, expected = marks(drawn)
    assert caption == again and "783 combinations" in caption
    assert places.shape == expected.shape and len(places) > 300
    # Versions of matplotlib measure texts a little differently.
    np.testing.assert_allclose(places, expected, atol=3.0)


def test_points_are_epsilons_of_measured_losses() -> None:
    common = {"what": "audit", "noise": "independent", "stated": 1.0, "broken_ratio": np.inf}
    entries = [
        {**common, "unit": "mu", "ratio": 1.0},
        {**common, "unit": "mu", "ratio": 1.0001},
        {**common, "unit": "epsilon", "ratio": 2.5, "broken_ratio": 3.0},
        {"what": "refused", "noise": "independent"},
    ]
    assert audit.points(entries) == {
        ("independent", False): [2.5, 4.38],
        ("independent", True): [3.0, np.inf],
    }


def test_data_file_s_reasons_are_those_of_registry() -> None:
    with (audit.DATA / "audit_reasons.csv").open(newline="") as file:
        reasons = [row["reason of the plan"] for row in csv.DictReader(file)]
    methods = {parts[0].terms.why for parts in audit.METHODS.values()}
    designs = {design.terms.why for design in noise_.DESIGNS.values()}
    assert set(reasons) <= methods | designs
    assert len(reasons) == len(set(reasons)) > 10


def test_record_has_every_row_and_no_finding() -> None:
    stored = records.read(audit.RECORD).to_dict("records")
    audits = [value for value in stored if value["what"] == "audit"]
    assert joining() == {case[name] for case in audits for name in ("method", "noise", "sampler")}
    assert joining() <= {each["fault_of"] for each in audits}
    for item in audits:
        assert item["ratio"] < 1.05 and not item["finding"], item
        assert item["flagged"] and item["broken_ratio"] > _audit.WORST, item
    refused = {tuple(each[name] for name in Cell._fields) for each in stored} - {
        tuple(each[name] for name in Cell._fields) for each in audits
    }
    entries = {(name, label) for name in audit.METHODS for label in audit.NOISES}
    assert entries == {cell[:2] for cell in refused} | {(e["method"], e["noise"]) for e in audits}
    assert all(each["why"] for each in stored if each["what"] == "refused")


def test_page_s_example_runs(capsys: pytest.CaptureFixture) -> None:
    code = audit.PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    exec(code, {})
    ratio, low, high = map(float, capsys.readouterr().out.split())
    assert 0.9 < ratio < 1.1 and low < high
