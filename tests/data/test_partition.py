"""Partitions: every record belongs to exactly one agent."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dpjax.data import partition

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


def exact(result: partition.Partition, total: int) -> bool:
    """Whether each of the records stands once, and rows are padded with their first record."""
    rows = list(zip(result.indices, result.counts, strict=True))
    held = np.concatenate([row[:count] for row, count in rows])
    padded = all((row[count:] == row[0]).all() for row, count in rows)
    return padded and sorted(held.tolist()) == list(range(total))


seeds = st.integers(0, 2**31)


@hypothesis.given(st.integers(1, 200), st.integers(1, 30), seeds)
def test_iid_deals_every_record_once_in_even_shares(total: int, n: int, seed: int) -> None:
    if total < n:
        with pytest.raises(ValueError, match=f"n is {n} agents"):
            partition.iid(total, n, seed)
        return
    shards = partition.iid(total, n, seed)
    assert shards.origin == "public"
    assert exact(shards, total) and len(shards.counts) == n
    assert shards.counts.max() - shards.counts.min() <= 1
    assert shards.indices.dtype == shards.counts.dtype == np.int32


@hypothesis.given(st.lists(st.integers(1, 20), min_size=1, max_size=12), seeds)
def test_by_size_deals_given_shares(sizes: list[int], seed: int) -> None:
    result = partition.by_size(sum(sizes), sizes, seed)
    assert exact(result, sum(sizes)) and result.counts.tolist() == sizes
    with pytest.raises(ValueError, match="make them sum to that"):
        partition.by_size(sum(sizes) + 1, sizes, seed)


@hypothesis.given(
    st.lists(st.integers(-1, 3), min_size=40, max_size=120),
    st.integers(1, 5),
    st.floats(0.5, 100),
    seeds,
)
def test_dirichlet_deals_every_record_once(
    labels: list[int], n: int, alpha: float, seed: int
) -> None:
    shards = partition.dirichlet(np.array(labels), n, alpha, seed)
    assert shards.origin == "private"  # It reads labels.
    assert exact(shards, len(labels)) and shards.counts.min() >= 1


@pytest.mark.mutant
def test_partition_that_loses_or_doubles_record_is_caught() -> None:
    shards = partition.iid(20, 4, 0)
    lost = shards._replace(counts=shards.counts - np.array([1, 0, 0, 0], np.int32))
    doubled = shards._replace(indices=np.where(shards.indices == 3, 4, shards.indices))
    assert exact(shards, 20)
    assert not exact(lost, 20) and not exact(doubled, 20)


def test_small_alpha_makes_agents_differ() -> None:
    labels = np.repeat([-1, 1], 2000)

    def spread(alpha: float) -> float:
        shards = partition.dirichlet(labels, 5, alpha, 0)
        rows = zip(shards.indices, shards.counts, strict=True)
        return float(np.std([np.mean(labels[row[:count]]) for row, count in rows]))

    assert spread(0.3) > 5 * spread(1000.0)


def test_minimum_is_kept_or_refused() -> None:
    labels = np.repeat([0, 1], 100)
    shards = partition.dirichlet(labels, 4, 1.0, 0, minimum=20)
    assert shards.counts.min() >= 20
    with pytest.raises(ValueError, match="raise alpha, use fewer agents or a smaller minimum$"):
        partition.dirichlet(labels, 4, 0.01, 0, minimum=50)
    with pytest.raises(ValueError, match="there are 200; use fewer agents, a smaller minimum or"):
        partition.dirichlet(labels, 4, 1.0, 0, minimum=60)


@pytest.mark.parametrize("alpha", [0.0, -1.0, np.nan, np.inf])
def test_bad_alpha_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha is"):
        partition.dirichlet(np.zeros(10, int), 2, alpha, 0)


def test_seed_decides() -> None:
    first, again, other = (partition.iid(50, 3, seed).indices for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_owners_keep_their_records_in_order_of_labels() -> None:
    owners = ["North", "St Mary", "North", "East", "North"]
    shards = partition.by_owner(owners, ("St Mary", "North", "East"))
    np.testing.assert_array_equal(shards.counts, [1, 3, 1])
    np.testing.assert_array_equal(shards.indices, [[1, 1, 1], [0, 2, 4], [3, 3, 3]])
    assert shards.names == ("St Mary", "North", "East") and partition.iid(5, 2, 0).names is None
    for arguments, labels, match in (
        (owners, ("St Mary", "North"), "'East', which is no agent"),
        (owners, ("St Mary", "North", "East", "West"), "'West', which owns no record"),
        (owners, ("North", "North", "East"), "a name of its own"),
    ):
        with pytest.raises(ValueError, match=match):
            partition.by_owner(arguments, labels)


def test_process_owns_records_of_consecutive_agents(monkeypatch):
    shards = partition.by_size(20, [3, 1, 7, 2, 5, 2], 0)
    devices = [SimpleNamespace(process_index=i) for i in (0, 0, 1, 1, 1, 2)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    owned = []
    for process in range(3):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        owned.append(partition.local(shards).tolist())
    agents = [shards.indices[i, : shards.counts[i]] for i in range(6)]
    assert owned == [sorted(np.concatenate(agents[a:b])) for a, b in ((0, 2), (2, 5), (5, 6))]
    # Two agents on each of the first three devices, and none on the last one.
    devices[:] = devices[:3] + devices[-1:]
    with pytest.raises(ValueError, match="6 agents, .* 4 devices, none on those of process 2"):
        partition.local(shards)


@pytest.mark.parametrize(
    ("deal", "match"),
    [
        (lambda: partition.dirichlet(np.eye(3), 2, 1.0, 0), r"one-hot: .*np.argmax\(labels, 1\)"),
        (lambda: partition.dirichlet(np.ones((9, 1)), 2, 1.0, 0), r"give np.ravel\(labels\)"),
        (lambda: partition.dirichlet("abc", 2, 1.0, 0), "give one number or text a record"),
        (
            lambda: partition.dirichlet(["a", None], 2, 1.0, 0),
            "labels is no list of classes .*one number or text",
        ),
        (
            lambda: partition.dirichlet([[1], [1, 2]], 2, 1.0, 0),
            "labels is no list of classes .*one number or text",
        ),
        (lambda: partition.dirichlet([], 2, 1.0, 0), "labels has shape"),
        (lambda: partition.by_size(9, 9, 0), r"sizes is 9; give a list, \[9\]"),
        (lambda: partition.by_size(9, None, 0), "sizes is missing; give a list$"),
        (lambda: partition.by_owner(None, ["a"]), "owners is missing; give a list$"),
        (lambda: partition.by_owner("ab", ["a", "b"]), r"owners is 'ab'; give a list, \['ab'\]"),
        (lambda: partition.by_owner(["a"], 3), "labels is 3; give a list"),
        (lambda: partition.by_owner([], []), r"labels is \[\]; give every agent a name"),
        (lambda: partition.by_owner([b"\xff"], ["a"]), r"owners holds '.*xff', which is no agent"),
        (lambda: partition.local(None), "partition is a NoneType; make it with dpjax.data.p"),
    ],
)
def test_what_is_no_list_of_records_is_refused_by_name(deal, match) -> None:
    with pytest.raises(ValueError, match=match):
        deal()


def test_dirichlet_deals_labels_that_equal_nothing() -> None:
    labels = np.where(np.arange(40) % 2, np.nan, 1.0)
    assert exact(partition.dirichlet(labels, 3, 100.0, 0), 40)
