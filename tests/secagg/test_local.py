"""Sums with all parties in one process are the protocol's, with a network and without."""

import asyncio
import sys

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra `secure` is not installed")
pytest.importorskip("msgpack", reason="the extra `secure` is not installed")

from dpjax.secagg import local, messages  # noqa: E402
from dpjax.secagg.terms import Abort, Limits  # noqa: E402
from dpjax.sites import sums  # noqa: E402
from tests.secagg.rounds import terms_for, vectors  # noqa: E402

LIMITS = Limits(enrol=2.0, stage=20.0, send=5.0)
LEAVES = [{}, {0: "share", 5: "mask"}, {2: "unmask", 8: "share"}, {1: "enrol"}]


@pytest.mark.gate(2)
@pytest.mark.parametrize("leaves", LEAVES, ids=str)
def test_both_give_sum_of_survivors_by_row(leaves):
    terms = terms_for(9, dropout=0.25, length=64)
    values = vectors(terms)
    rows = [i for i in range(9) if leaves.get(i) in (None, "unmask")]
    without = local.over_memory(terms, values, leaves)
    over = sums.over_channel(terms, values, leaves, limits=LIMITS)
    for total in (without.total, over.total):
        assert total.survivors == tuple(rows)
        np.testing.assert_array_equal(total.values, values[rows].sum(axis=0))
    # A vector of 256 bytes each, and what it takes to unmask it.
    assert len(rows) * 256 < without.received < over.received < 9 * 2000
    assert without.sent > 9 * 100
    assert 0 < without.server < 60 and 0 < without.clients < 60
    assert over.server is None and over.clients is None


def test_confirmations_are_stage_of_their_own():
    plain = terms_for(9, dropout=0.25, length=64)
    terms = terms_for(9, dropout=0.25, length=64, adversary="semi_malicious")
    values = vectors(terms)
    leaves = {0: "confirm", 7: "unmask"}
    without = local.over_memory(terms, values, leaves)
    over = sums.over_channel(terms, values, leaves, limits=LIMITS)
    for total in (without.total, over.total):
        assert total.survivors == tuple(range(9))
        np.testing.assert_array_equal(total.values, values.sum(axis=0))
    # 48 bytes for each neighbour, and a few around them.
    degree = terms.graph(9).degree
    reported = local.over_memory(terms, values).received - local.over_memory(plain, values).received
    reported -= 9 * (degree - plain.graph(9).degree) * (messages.SEALED_BYTES + 3 + 36)  # shares
    assert 9 * degree * 50 < reported < 9 * (degree * 51 + 24)
    assert local.over_memory(terms, values, {0: "mask"}).total.survivors == tuple(range(1, 9))
    assert terms.stages == ("enrol", "share", "mask", "confirm", "unmask")
    assert plain.stages == local.STAGES
    with pytest.raises(ValueError, match="leaves is 'confirm'"):
        local.over_memory(plain, values, {0: "confirm"})


def test_sums_over_channel_work_where_event_loop_runs():
    """A notebook's, say."""
    terms = terms_for(6, dropout=0.17)

    async def cell():
        return sums.over_channel(terms, vectors(terms), limits=LIMITS)

    np.testing.assert_array_equal(asyncio.run(cell()).total.values, vectors(terms).sum(axis=0))


def test_too_many_that_leave_are_abort_either_way():
    terms = terms_for(6, dropout=0.17)
    leaves = {0: "mask", 1: "mask"}
    for act in (local.over_memory, sums.over_channel):
        with pytest.raises(Abort, match="4 clients sent a vector"):
            act(terms, vectors(terms), leaves)


@pytest.mark.slow
def test_thousand_clients_with_dropouts():
    options = {"length": 4096, "bits": 32, "bound": 2**20, "corrupt": 0.05, "dropout": 0.05}
    terms = terms_for(1000, **options)
    rows = np.random.default_rng(2).choice(1000, 50, replace=False)
    leaves = {int(row): terms.stages[index % 4] for index, row in enumerate(rows)}
    values = vectors(terms)
    total, received, sent = local.over_memory(terms, values, leaves)[:3]
    present = [row for row in range(1000) if leaves.get(row) in (None, "unmask")]
    assert total.survivors == tuple(present)
    np.testing.assert_array_equal(total.values, values[present].sum(axis=0))
    assert received < 1000 * 21000 and sent < 1000 * 22000


@pytest.mark.parametrize("name", ["enrol", "stage", "send"])
def test_times_that_are_none_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        Limits(**{name: 0})


def test_extra_that_is_missing_is_named(monkeypatch):
    """Without gRPC sums in memory work, and those over a channel say what they lack."""
    terms = terms_for(3)
    monkeypatch.setitem(sys.modules, "grpc", None)
    assert local.over_memory(terms, vectors(terms)).total.survivors == (0, 1, 2)
    with pytest.raises(ValueError, match=r"grpcio is not installed.*dpjax\[sites\]"):
        sums.over_channel(terms, vectors(terms))


@pytest.mark.parametrize("act", [local.over_memory, sums.over_channel])
def test_rows_and_stages_that_cannot_be_are_refused(act):
    terms = terms_for(3)
    values = vectors(terms)
    for rows, leaves, told in [
        (values[0], {}, "rows have shape"),
        (np.concatenate([values, values]), {}, "rows have shape"),
        (values.astype(float), {}, "values are float64"),
        (values * 10**6, {}, "beyond bound 1000"),
        (values, {3: "mask"}, "leaves is 3"),
        (values, {0: "lunch"}, "leaves is 'lunch'"),
    ]:
        with pytest.raises(ValueError, match=told):
            act(terms, rows, leaves)
