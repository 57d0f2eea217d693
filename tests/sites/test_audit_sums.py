"""The audit of sums among sites: what the site that adds up learns, and the faults it finds."""

import numpy as np
import pytest

from benchmarks import _audit_sums as audit_sums
from benchmarks._audit_sums import FAULTS, Runs
from dpjax.results import records

pytest.importorskip("cryptography")


# Secrets are the system's, so that no run is another's: a test fails by chance once in a million.
SURE = 1 - 1e-6


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("sums"))


def test_sums_lose_what_is_stated(runs: Runs) -> None:
    epsilon, stated = audit_sums.stated(runs.plan)
    assert 0.99 * 8 < epsilon <= 8 and 1 < stated < 2
    # So many that the interval below ends before twice the loss, whatever was drawn.
    worlds = runs.recorded(80)
    found = audit_sums.measured(runs, worlds, SURE)
    assert found.low < found.stated < found.high
    # Else nothing could be found.
    assert found.high < 2 * found.stated
    # The canary is replaced by its opposite, and each run has noise of its own.
    one, other = worlds
    assert np.linalg.norm((other - one).mean(axis=0)) == pytest.approx(2.0, rel=0.05)
    assert one.std(axis=0).min() > 0.3


@pytest.mark.mutant
def test_halved_shares_are_found(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    integers = audit_sums.compute.integers
    monkeypatch.setattr(integers, "noisy", audit_sums.halved(integers.noisy))
    found = audit_sums.measured(runs, runs.recorded(80), SURE)
    assert found.low > found.stated


def test_record_has_every_fault_and_no_finding() -> None:
    rows = records.read(audit_sums.RECORD).to_dict("records")
    assert [row["fault"] for row in rows] == ["", *FAULTS]
    first, *broken = rows
    assert first["finding"] is False and first["low"] < 1.02 and first["high"] > 0.99
    assert first["epsilon"] < first["stated_epsilon"]
    assert all(row["flagged"] is True for row in broken)
