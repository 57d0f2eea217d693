"""Mini-batches of distinct records, drawn or dealt in turn, inside the compiled loop."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from dpjax import _numerics, _validate
from dpjax.protocols import Counts

__all__ = ()

# Its square fits into 32 bits.
_LARGEST = 46_340


def check_batch_size(counts: Counts, batch_size: int, agents: Sequence[str] | None = None) -> None:
    """Refuse a batch size that some agent cannot fill with distinct records.

    Args:
        counts: [n] records of each agent.
        batch_size: Records an agent draws each round.
        agents: [n] what a message calls them; "agent 0", ... by default.

    Raises:
        ValueError: Naming the agent with the fewest records.
    """
    if batch_size > _LARGEST:
        raise ValueError(f"batch_size is {batch_size}; give at most {_LARGEST}")
    poorest = int(counts.argmin())
    agent = agents[poorest] if agents is not None else f"agent {poorest}"
    if counts[poorest] < batch_size:
        raise ValueError(
            f"batch_size is {batch_size}, but {agent} has "
            f"{_validate.counted(counts[poorest], 'record')}; lower it to that, or "
            "give this agent more records"
        )


def draw(key: PRNGKeyArray, counts: Int[Any, " n"], batch_size: int) -> Int[Array, "n b"]:
    """Draw positions of distinct records for every agent.

    An agent's c records, in a cyclic order shifted at random, are cut into ``batch_size`` strata
    from floor(j c / B) to floor((j + 1) c / B), and one record is drawn from each. Records are
    distinct by construction, which per-record clipping needs: a record drawn twice would move a
    sum by twice the clip norm. Every record has the same probability B / c, up to the rounding
    of 24 random bits (below c / (B 2^24) of it) and of a 32-bit remainder (below c / 2^32). No
    amplification by subsampling is claimed for it.

    Args:
        key: The round's key.
        counts: [n] records of each agent, each at least ``batch_size`` (see `check_batch_size`).
        batch_size: Records B an agent draws.

    Returns:
        [n, B] int32 positions, in 0 .. counts - 1, distinct within a row.
    """
    counts = jnp.asarray(counts, jnp.int32)[:, None]
    bits = _numerics.threefry_bits(key, (counts.shape[0], batch_size + 1))
    strata = jnp.arange(batch_size, dtype=jnp.int32)[None]
    quotient = counts // batch_size
    remainder = counts % batch_size
    # floor(j c / B) without the overflow of j c: c = quotient B + remainder.
    begin = (strata * remainder) // batch_size
    end = ((strata + 1) * remainder) // batch_size
    low = strata * quotient + begin
    width = quotient + end - begin
    # 24 bits are exact in float32 and far cheaper than an integer remainder.
    high_bits = (bits[:, 1:] >> 8).astype(jnp.float32)
    share = high_bits * jnp.float32(2.0**-24)
    inside = (share * width.astype(jnp.float32)).astype(jnp.int32)
    # The product may round up to the width, which is the next stratum's.
    inside = jnp.minimum(inside, width - 1)
    # One shift an agent, so that the order of the records is kept.
    remainders = bits[:, :1] % counts.astype(jnp.uint32)
    shift = remainders.astype(jnp.int32)
    position = low + inside + shift
    return jnp.where(position >= counts, position - counts, position)


def check_cyclic(
    counts: Counts,
    batch_size: int,
    separation: int,
    agents: Sequence[str] | None = None,
) -> None:
    """Refuse a batch size that cannot hold some agent's largest batch of a cycle.

    Args:
        counts: [n] records of each agent.
        batch_size: Places in a batch, padding included.
        separation: Batches of a cycle, b.
        agents: [n] what a message calls them; "agent 0", ... by default.

    Raises:
        ValueError: Naming the agent with the most records and the batch size it needs.
    """
    richest = int(counts.argmax())
    agent = agents[richest] if agents is not None else f"agent {richest}"
    needed = -(-int(counts[richest]) // separation)
    if needed > batch_size:
        raise ValueError(
            f"batch_size is {batch_size}, but {agent} has "
            f"{_validate.counted(counts[richest], 'record')} in cycles of "
            f"{_validate.counted(separation, 'batch', 'batches')}; give batch_size={needed}, or a "
            "larger separation"
        )
    if batch_size * separation >= 2**31:
        raise ValueError(
            f"batch_size is {batch_size} in cycles of {separation} batches; give numbers whose "
            "product is below 2**31"
        )


def cyclic(
    round: _numerics.Integer, counts: Int[Any, " n"], batch_size: int, separation: int
) -> tuple[Int[Array, "n b"], Bool[Array, "n b"]]:
    """Positions of every agent's records of a round, in a fixed order that repeats.

    Record r of an agent is in the batches of the rounds r mod b, r mod b + b, r mod b + 2 b, ...:
    once in any b rounds in a row, the same in every cycle. Batches differ by one record at most;
    the places left over are padding, which must add exactly zero.

    Guarantee: in k b rounds every record takes part exactly k times, exactly b rounds apart,
    whatever the data.

    Args:
        round: Number of the round, from 0.
        counts: [n] records of each agent, each at most ``batch_size * separation`` (see
            `check_cyclic`).
        batch_size: Places B in a batch.
        separation: Batches of a cycle, b.

    Returns:
        [n, B] int32 positions, 0 where there is padding, and [n, B] which places are padding.
    """
    counts = jnp.asarray(counts, jnp.int32)[:, None]
    places = jnp.arange(batch_size, dtype=jnp.int32)[None]
    # Record r is in the batches of rounds that are r modulo b.
    phase = jnp.mod(jnp.asarray(round, jnp.int32), separation)
    position = phase + places * separation
    padding = position >= counts
    return jnp.where(padding, 0, position), padding
