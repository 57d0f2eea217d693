"""Which records belong to which agent."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from dpjax import _validate

__all__ = ["Partition", "by_owner", "by_size", "dirichlet", "iid", "local"]

_DRAWS = 100


class Partition(NamedTuple):
    """Records of n agents as indices into one shared array.

    Attributes:
        indices: [n, m] int32 rows; a row past its agent's count repeats its first record.
        counts: [n] int32 records of each agent.
        names: [n] the agents' names, for messages; None where they have none.
        origin: "private" where labels or other values of records decided who holds which record,
            as in `dirichlet`: a change of one record then moves others, which no guarantee covers,
            so that releases refuse it. "public" where none did, as in `iid`, `by_size` and
            `by_owner`. Of a partition that you make yourself it is your word.

    Example:
        >>> import numpy as np
        >>> from dpjax.data import partition
        >>> partition.Partition(np.array([[0, 2], [1, 1]]), np.array([2, 1])).counts.tolist()
        [2, 1]
    """

    indices: Int[np.ndarray, "n m"]
    counts: Int[np.ndarray, " n"]
    names: tuple[str, ...] | None = None
    origin: Literal["public", "private"] = "public"


def blocks(partition: Partition, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide records over devices, of which each has as many consecutive agents but for the last.

    Args:
        partition: Which records belong to which agent.
        devices: How many.

    Returns:
        [n] where each agent's records begin among its device's, and [devices, m] the numbers of
        each device's records, agent by agent; -1 fills up.
    """
    indices = partition.indices
    counts = partition.counts
    n = len(counts)
    size = -(-n // devices)
    # Records of a device, whose agents are consecutive.
    device_of_agent = np.arange(n) // size
    totals = np.bincount(device_of_agent, counts, devices).astype(int)
    # Records are numbered from 0 on every device.
    device_starts = np.repeat(np.cumsum(totals) - totals, size)[:n]
    first = np.cumsum(counts) - counts - device_starts
    rows = np.full((devices, totals.max()), -1)
    is_record = np.arange(indices.shape[1]) < counts[:, None]
    is_filled = np.arange(rows.shape[1]) < totals[:, None]
    rows[is_filled] = indices[is_record]
    return first.astype(np.int32), rows


def local(partition: Partition) -> Int[np.ndarray, " r"]:
    """Return the records of agents on this process's devices, where a run takes all devices.

    Args:
        partition: Which records belong to which agent.

    Returns:
        Their numbers, in ascending order; those of all agents where the process is alone.

    Raises:
        ValueError: For what is no partition, or too few agents for the process to have one.

    Example:
        >>> from dpjax.data import partition
        >>> partition.local(partition.iid(4, n=2, seed=0))
        array([0, 1, 2, 3])
    """
    partition = checked_partition(partition)
    owners = np.array([device.process_index for device in jax.devices()])
    # A device's records belong to the process that owns the device.
    _, device_rows = blocks(partition, len(owners))
    rows = device_rows[owners == jax.process_index()]
    numbers = np.sort(rows[rows >= 0])
    if not numbers.size:
        raise ValueError(
            f"partition has {len(partition.counts)} agents, consecutive ones on {len(owners)} "
            f"devices, none on those of process {jax.process_index()}; use fewer devices"
        )
    return numbers


def checked_partition(partition: Any, records: int | None = None) -> Partition:
    """Return a partition as arrays that nobody can change.

    A record that is given twice is refused: it would move a clipped sum more than once.

    Args:
        partition: Which rows belong to which agent.
        records: Rows that there are; None where nobody knows.

    Raises:
        ValueError: Naming what does not fit.
    """
    remedy = "make it with dpjax.data.partition"
    if not isinstance(partition, Partition):
        raise ValueError(f"partition is a {type(partition).__name__}; {remedy}")
    indices = np.asarray(_validate.unmasked("indices", partition.indices))
    counts = np.asarray(_validate.unmasked("counts", partition.counts))
    fits = indices.dtype.kind in "iu" and counts.dtype.kind in "iu" and indices.ndim == 2
    fits = fits and counts.shape == indices.shape[:1] and counts.size > 0
    # An agent without records would have no gradient to hide.
    fits = fits and 1 <= counts.min() <= counts.max() <= indices.shape[1]
    if not fits:
        raise ValueError(
            f"partition has indices {indices.dtype}{list(indices.shape)} and counts "
            f"{_validate.shown(counts)}, which are no rows of {counts.size} agents; {remedy}"
        )
    names = partition.names
    if names is not None:
        fits = isinstance(names, tuple) and len(names) == len(counts)
        if not fits or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"partition has names {_validate.shown(names)} for {len(counts)} agents; give a "
                "tuple of as many texts"
            )
    _validate.one_of("partition.origin", partition.origin, ("public", "private"))
    # Rows are filled up behind their counts.
    is_record = np.arange(indices.shape[1]) < counts[:, None]
    owned = indices[is_record]
    values, times = np.unique(owned, return_counts=True)
    if times.max() > 1:
        raise ValueError(
            f"partition gives record {values[times.argmax()]} {times.max()} times; every record "
            "belongs to one agent, once, or its sensitivity would be more than stated"
        )
    records = 2**31 - 1 if records is None else records
    if indices.min() < 0 or indices.max() >= records:
        raise ValueError(
            f"partition.indices reach from {indices.min()} to {indices.max()}, x has {records} "
            "rows; partition the same data"
        )
    return partition._replace(
        indices=_validate.fixed(indices, np.int32), counts=_validate.fixed(counts, np.int32)
    )


def _pack(shards: Sequence[np.ndarray], names: Sequence[str] | None = None) -> Partition:
    counts = np.array([len(shard) for shard in shards], np.int32)
    indices = np.empty((len(shards), counts.max()), np.int32)
    for row, shard in zip(indices, shards, strict=True):
        row[: len(shard)] = shard
        # Padding repeats a record; batches never draw beyond the counts.
        row[len(shard) :] = shard[0]
    return Partition(indices, counts, None if names is None else tuple(names))


def generator(seed: int) -> np.random.Generator:
    """Return NumPy's generator of a seed; ValueError unless it is a whole number of at least 0."""
    return np.random.default_rng(_validate.integer("seed", seed, minimum=0))


def _enough(n_records: int, n: int, minimum: int) -> tuple[int, int, int]:
    n_records = _validate.integer("n_records", n_records)
    n = _validate.integer("n", n)
    minimum = _validate.integer("minimum", minimum)
    if n_records < n * minimum:
        fewer = ", a smaller minimum" if minimum > 1 else ""
        raise ValueError(
            f"n is {_validate.counted(n, 'agent')} with at least "
            f"{_validate.counted(minimum, 'record')} each, but there are {n_records}; "
            f"use fewer agents{fewer} or more data"
        )
    return n_records, n, minimum


def by_owner(owners: Sequence[object], labels: Sequence[object]) -> Partition:
    """Give every record to the agent that holds it, in a network with named agents.

    Names are compared in Unicode's composed form (NFC).

    Who holds a record is public, and no part of it: a record that changes stays with its owner. Do
    not make owners from labels or features.

    Args:
        owners: The owner's name of every record, by row of the data.
        labels: [n] names of the agents in the order of the mixing matrix, as of
            `dpjax.topology.nodes.labels`.

    Returns:
        The partition; agents may hold different numbers of records.

    Raises:
        ValueError: For what is no list, a name given twice, an owner that is no agent, or an agent
            without records.

    Example:
        >>> from dpjax.data import partition
        >>> shards = partition.by_owner(["b", "a", "b"], labels=["a", "b"])
        >>> shards.counts, shards.indices
        (array([1, 2], dtype=int32), array([[1, 1],
               [0, 2]], dtype=int32))
    """
    names = [_validate.name(label) for label in _validate.entries("labels", labels)]
    entries = _validate.entries("owners", owners)
    record_owners = np.array([_validate.name(owner) for owner in entries])
    if not names or len(set(names)) != len(names):
        raise ValueError(f"labels is {names}; give every agent a name of its own")
    owner_names = set(record_owners.tolist())
    strange = sorted(owner_names - set(names))
    if strange:
        raise ValueError(f"owners holds {strange[0]!r}, which is no agent; they are {names}")
    # An agent without records would have no gradient to hide.
    without = [name for name in names if name not in owner_names]
    if without:
        raise ValueError(f"labels holds {without[0]!r}, which owns no record; leave it out")
    return _pack([np.flatnonzero(record_owners == name) for name in names], names)


def iid(n_records: int, n: int, seed: int) -> Partition:
    """Deal records to agents at random, in shares that differ by one at most.

    Args:
        n_records: Number of records.
        n: Number of agents.
        seed: Of the permutation.

    Returns:
        The partition; every record belongs to exactly one agent.

    Raises:
        ValueError: For more agents than records.

    Example:
        >>> from dpjax.data import partition
        >>> partition.iid(10, n=4, seed=0).counts
        array([3, 3, 2, 2], dtype=int32)
    """
    n_records, n, _ = _enough(n_records, n, 1)
    rng = generator(seed)
    return _pack(np.array_split(rng.permutation(n_records), n))


def by_size(n_records: int, sizes: Sequence[int], seed: int) -> Partition:
    """Deal records to agents at random, in shares of given sizes.

    Args:
        n_records: Number of records.
        sizes: Records of each agent; they sum to ``n_records``.
        seed: Of the permutation.

    Returns:
        The partition.

    Raises:
        ValueError: For what is no list, or sizes that do not sum to the records.

    Example:
        >>> from dpjax.data import partition
        >>> partition.by_size(10, sizes=[7, 3], seed=0).counts
        array([7, 3], dtype=int32)
    """
    n_records = _validate.integer("n_records", n_records)
    sizes = [_validate.integer("sizes", size) for size in _validate.entries("sizes", sizes)]
    if sum(sizes) != n_records or not sizes:
        raise ValueError(f"sizes sum to {sum(sizes)} of {n_records} records; make them sum to that")
    rng = generator(seed)
    # Cut at the running totals, a permutation gives everyone a random share.
    order = rng.permutation(n_records)
    return _pack(np.split(order, np.cumsum(sizes)[:-1]))


def dirichlet(
    labels: Int[np.ndarray, " N"], n: int, alpha: float, seed: int, *, minimum: int = 1
) -> Partition:
    """Deal each label's records to agents in Dirichlet(alpha) shares: small alpha, unlike agents.

    For simulations: it reads labels, so that one that changes can move most records to other
    agents. Guarantees take the partition as public and say so, and releases refuse it.

    Args:
        labels: [N] class of each record.
        n: Number of agents.
        alpha: Concentration, above 0.
        seed: Of the shares and the permutations.
        minimum: Records every agent must get; shares are drawn again until they do.

    Returns:
        The partition; every record belongs to exactly one agent.

    Raises:
        ValueError: For labels that are not one number or text a record, more agents than records,
            or when no draw gives everyone the minimum.

    Example:
        >>> from dpjax.data import partition
        >>> shards = partition.dirichlet([0] * 50 + [1] * 50, n=3, alpha=0.5, seed=0)
        >>> int(shards.counts.sum())
        100
    """
    classes = _classes(labels)
    total, n, minimum = _enough(len(classes), n, minimum)
    alpha = _validate.positive("alpha", alpha)
    rng = generator(seed)
    for _ in range(_DRAWS):
        parts = []
        # Every class is dealt by itself, which is what makes agents unlike.
        for number in range(classes.max() + 1):
            rows = rng.permutation(np.flatnonzero(classes == number))
            shares = rng.dirichlet(np.full(n, alpha))
            cuts = np.cumsum(shares)[:-1] * len(rows)
            parts.append(np.split(rows, np.round(cuts).astype(int)))
        # From classes of agents to agents of classes.
        agent_rows = [np.concatenate(shard) for shard in zip(*parts, strict=True)]
        if min(map(len, agent_rows)) >= minimum:
            return _pack(agent_rows)._replace(origin="private")
    remedy = "raise alpha, or use fewer agents"
    if minimum > 1:
        remedy = "raise alpha, use fewer agents or a smaller minimum"
    raise ValueError(
        f"alpha is {alpha}: none of {_DRAWS} draws gave each of the {n} agents {minimum} of the "
        f"{total} records; {remedy}"
    )


def _classes(labels: Any) -> Int[np.ndarray, " N"]:
    """The number of each record's class, in the order of the labels."""
    remedy = "give one number or text a record, [N]"
    _validate.unmasked("labels", labels)
    try:
        array = np.asarray(labels)
        classes = np.unique(array, return_inverse=True)[1]
    except (TypeError, ValueError) as error:  # Of several kinds, which have no order, or ragged.
        raise ValueError(f"labels is no list of classes ({error}); {remedy}") from None
    if array.ndim != 1 or not array.size:
        cure = _validate.flattened("labels", array) or f"; {remedy}"
        raise ValueError(f"labels has shape {array.shape}{cure}")
    return classes
