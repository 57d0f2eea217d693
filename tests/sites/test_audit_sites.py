"""The audit of sites: deployed noise, measured from what arrived, and the faults it finds."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import _audit_sites as audit_sites
from benchmarks._audit_sites import BARE, CASES, HALF, TWICE, Case, Runs
from dpjax.results import records

pytest.importorskip("cryptography")


# Secrets are the system's, so that no run is another's: a test fails by chance once in a million.
SURE = 1 - 1e-6
NEIGHBOUR = ("nice",)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One round, so that few runs suffice."""
    return Runs(CASES[0], tmp_path_factory.mktemp("short"), rounds=1)


@pytest.fixture(scope="module")
def worlds(short: Runs) -> list[np.ndarray]:
    return short.recorded(36)


def test_what_arrives_loses_what_is_stated(short: Runs, worlds: list[np.ndarray]) -> None:
    outsider = audit_sites.measured(short, worlds, None, SURE)
    assert outsider.low < outsider.stated < outsider.high
    # Else nothing could be found.
    assert outsider.high < 3 * outsider.stated
    neighbour = audit_sites.measured(short, worlds, NEIGHBOUR, SURE)
    assert 0 < neighbour.low < outsider.stated


def test_runs_have_secrets_of_their_own(worlds: list[np.ndarray]) -> None:
    one, other = worlds
    # Runs differ by their noise; both worlds of a run by a record and its rounding.
    assert one.std(axis=0).min() > 0.2
    difference = other - one
    assert difference.std(axis=0).max() < 0.2 * one.std(axis=0).max()


def test_link_without_noise_is_found(short: Runs) -> None:
    broken = audit_sites.broken_records(short, BARE, 24)
    assert audit_sites.measured(short, broken, NEIGHBOUR).measured == np.inf


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.noise}-{case.sampler}")
def test_all_designs_lose_what_is_stated_and_faults_are_found(case: Case, tmp_path: Path) -> None:
    rows = list(audit_sites.rows(case, 256, tmp_path, confidence=SURE))
    assert [row["fault"] for row in rows] == ["", "", *case.faults]
    for row in rows:
        assert not row.get("finding") and row.get("flagged", True), row
    assert rows[0]["high"] > 0.99, rows[0]


@pytest.mark.slow
def test_grpc_carries_what_queues_do(tmp_path: Path) -> None:
    runs = Runs(CASES[0], tmp_path, "grpc", rounds=2)
    found = audit_sites.measured(runs, runs.recorded(64), None, SURE)
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
