"""The audit of sites: deployed noise, measured from what arrived, and the faults it finds."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import audit_sites
from benchmarks.audit_sites import BARE, CASES, HALF, TWICE, Case, Runs
from dpjax.results import records

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two rounds, so that few runs suffice."""
    return Runs(CASES[0], tmp_path_factory.mktemp("short"), rounds=2)


@pytest.mark.mutant
def test_what_arrives_loses_what_is_stated(short: Runs) -> None:
    worlds = short.recorded(72)
    outsider = audit_sites.measured(short, worlds, None)
    assert outsider.low < outsider.stated < outsider.high
    # Else the audit could miss a fault of this size.
    assert outsider.high < 1.4 * outsider.stated
    neighbour = audit_sites.measured(short, worlds, ("nice",))
    assert neighbour.low < 1.02 * outsider.stated


@pytest.mark.mutant
def test_link_without_noise_is_found(short: Runs) -> None:
    found = audit_sites.measured(short, audit_sites.broken_records(short, BARE, 72), None)
    assert found.measured == np.inf


def test_secrets_are_each_run_s_own(short: Runs) -> None:
    one, other = short.recorded(2)
    # Equal noise in both worlds of a run, other noise in each run.
    assert np.abs(one[0] - one[1]).max() > 0.5
    assert 0 < np.abs(one - other).max() < 5 * audit_sites.MOST_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.noise}-{case.sampler}")
def test_all_designs_lose_what_is_stated_and_faults_are_found(case: Case, tmp_path: Path) -> None:
    rows = list(audit_sites.rows(case, 256, tmp_path))
    assert [row["fault"] for row in rows] == ["", "", *case.faults]
    for row in rows:
        assert not row.get("finding") and row.get("flagged", True), row
    assert rows[0]["high"] > 0.99, rows[0]


@pytest.mark.slow
def test_grpc_carries_what_queues_do(tmp_path: Path) -> None:
    runs = Runs(CASES[0], tmp_path, "grpc", rounds=2)
    found = audit_sites.measured(runs, runs.recorded(72), None)
    assert found.low < found.stated < found.high


def test_record_has_every_case_and_no_finding() -> None:
    rows = records.read(audit_sites.RECORD).to_dict("records")
    audited = {(row["noise"], row["sampler"], row["fault"]) for row in rows}
    faults = {(*case[:2], fault) for case in CASES for fault in ("", *case.faults)}
    assert audited == faults
    assert {HALF, TWICE, BARE} <= {row["fault"] for row in rows}
    for row in rows:
        if row["fault"]:
            assert row["flagged"] is True, row
        else:
            assert row["finding"] is False and row["low"] < 1.02, row
    outsiders = [row for row in rows if not row["fault"] and row["attacker"] == "outsider"]
    assert all(row["high"] > 0.99 for row in outsiders)
