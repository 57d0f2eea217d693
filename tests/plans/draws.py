"""What a sampler draws, tried against what it says."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from dpjax import _validate
from dpjax.plans.compatibility import packaged
from dpjax.protocols import Draw, Sampler

_ROUNDS = 3
_COUNTED = 16
_RARE = 1e-9
_LARGEST = 10**8
_TURNS = 10**4


def audit(
    sampler: Sampler,
    counts: Int[np.ndarray, " n"],
    rounds: int,
    *,
    turns: tuple[int, int] | None = None,
    single: bool = False,
) -> None:
    """Refuse a sampler that draws otherwise than it says, on numbers of records at hand.

    Guarantee: what passes drew distinct records of each agent in the rounds tried, and none more
    often than its pattern allows; two cycles of a pattern are tried, or a few rounds. A user's own
    sampler draws distinct records in all rounds (of batches that all fit in 10^8 numbers), and of
    as many records as a batch has, and one more, where draws with replacement meet at once. One
    that claims rates is refused where an honest one would draw so much, in all, for an agent or of
    a record, with a probability below 1e-9.

    Args:
        sampler: The sampler.
        counts: [n] records of each agent.
        rounds: Rounds T.
        turns: (times, separation) of clients, where these are protected: record r of an agent is
            client r mod separation's.
        single: Whether the noise is of one record's gradient an agent.

    Raises:
        ValueError: Naming the round and the agent.
    """
    if single:
        _check_single(sampler, counts)
    key = jax.random.key(0)
    epochs, separation = sampler.pattern(rounds)
    tried = min(rounds, _ROUNDS if epochs == rounds else 2 * separation + 1)
    rates = getattr(sampler.amplification(counts), "rates", None)
    if rates is not None:
        tried = max(_COUNTED, min(rounds, 2 * separation + 1))
    if turns is not None:
        # Nothing else says of a user's own who is which client.
        cycles = min(rounds, 2 * turns[1] + 1)
        tried = max(tried, cycles if packaged(type(sampler)) else min(rounds, _TURNS))
    last: dict[tuple[int, int], int] = {}
    came: dict[tuple[int, int], list[int]] = {}
    times = [np.zeros(count, np.int64) for count in counts]
    for t in range(tried):
        drawn = _drawn(sampler, key, jnp.int32(t), jnp.asarray(counts))
        rows = np.asarray(drawn.rows)
        skip = np.zeros(rows.shape, bool) if drawn.padding is None else np.asarray(drawn.padding)
        for agent, (row, none) in enumerate(zip(rows, skip, strict=True)):
            taken = row[~none]
            if turns is not None:
                _check_turn(sampler, turns, agent, t, {int(r) % turns[1] for r in taken}, came)
            if len(set(taken.tolist())) != len(taken) or (taken >= counts[agent]).any():
                raise ValueError(
                    f"sampler is {_validate.shown(sampler)}, which draws a record of agent {agent} "
                    f"twice, or one that is not there, in round {t}; draw distinct records"
                )
            times[agent][taken] += 1
            if epochs == rounds:
                continue
            for record in taken.tolist():
                difference = t - last.get((agent, record), t - separation)
                # Coins leave some of its rounds out.
                off = difference % separation if rates is not None else difference
                if off not in (0, separation):
                    raise ValueError(
                        f"sampler is {_validate.shown(sampler)}, which draws record {record} of "
                        f"agent {agent} in rounds {last[agent, record]} and {t}, its pattern says "
                        f"{separation} apart; deal records by the pattern"
                    )
                last[agent, record] = t
    if rates is not None:
        _check_rates(sampler, times, rates, -(-tried // separation))
    if not packaged(type(sampler)):
        _check_distinct(sampler, counts, rounds, claimed=rates is not None)


def _check_turn(
    sampler: Sampler,
    turns: tuple[int, int],
    agent: int,
    round: int,
    clients: set[int],
    came: dict[tuple[int, int], list[int]],
) -> None:
    """Refuse clients of a place who come sooner again, or more often, than is said of them."""
    times, separation = turns
    for client in sorted(clients):
        before = came.setdefault((agent, client), [])
        if len(before) == times or (before and (round - before[-1]) % separation):
            raise ValueError(
                f"sampler is {_validate.shown(sampler)}, which draws records of client {client} of "
                f"agent {agent} in rounds {[*before, round]}, its turns say {times} times, "
                f"{separation} apart; deal record r to client r mod {separation}, as "
                "samplers.Clients does"
            )
        before.append(round)


def _check_single(sampler: Sampler, counts: Int[np.ndarray, " n"]) -> None:
    """Refuse batches with places for several records, whose sum is no one clipped gradient."""
    width = _width(sampler, counts)
    if width != 1:
        raise ValueError(
            f"sampler is {_validate.shown(sampler)}, whose batches have {width} places, with noise "
            "that rounds one clipped gradient an agent; give batches of one record "
            "(Clients(..., batch=1), Random(1)), or protect whole clients or agents"
        )


def _width(sampler: Sampler, counts: Int[np.ndarray, " n"]) -> int:
    """Places of a batch."""
    drawn = jax.eval_shape(
        lambda counts: sampler.draw(jax.random.key(0), jnp.int32(0), counts).rows, counts
    )
    return drawn.shape[1]


def _check_distinct(
    sampler: Sampler, counts: Int[np.ndarray, " n"], rounds: int, *, claimed: bool
) -> None:
    """Refuse records that come twice in a round: of these counts, and of the fewest there may be.

    With many records a draw with replacement seldom meets one twice; with as few as a batch it
    does in most rounds.
    """
    width = _width(sampler, counts)
    # Where rates are claimed, the numbers of records are part of the sampler.
    for few in (None,) if claimed else (None, width, width + 1):
        tried = counts if few is None else np.full_like(counts, few)
        try:
            sampler.check(tried)
        except ValueError:
            continue
        maximum = max(1, _LARGEST // (len(counts) * width))
        twice = np.asarray(
            _repeated(
                sampler, jnp.arange(min(rounds, maximum), dtype=jnp.int32), jnp.asarray(tried)
            )
        )
        if twice.any():
            round, agent = (int(index) for index in np.argwhere(twice)[0])
            raise ValueError(
                f"sampler is {_validate.shown(sampler)}, which of {tried[agent]} records draws one "
                f"twice, or one that is not there, in round {round}; draw distinct records: one "
                "that comes twice is clipped twice, and not protected as stated"
            )


@functools.partial(jax.jit, static_argnames="sampler")
def _repeated(
    sampler: Sampler, rounds: Int[Array, " t"], counts: Int[Array, " n"]
) -> Bool[Array, "t n"]:
    """Whether an agent's batch of a round holds a record twice, or one beyond its records."""

    def of_round(round: Int[Array, ""]) -> Bool[Array, " n"]:
        drawn = sampler.draw(jax.random.fold_in(jax.random.key(0), round), round, counts)
        rows = drawn.rows
        padding = drawn.padding
        if padding is None:
            padding = jnp.zeros(rows.shape, bool)
        beyond = jnp.any((rows >= counts[:, None]) & ~padding, axis=1)
        # Padding is told apart from records, and from other padding.
        difference = -1 - jnp.arange(rows.shape[1], dtype=rows.dtype)
        ordered = jnp.sort(jnp.where(padding, difference, rows), axis=1)
        return beyond | jnp.any(ordered[:, 1:] == ordered[:, :-1], axis=1)

    return jax.lax.map(of_round, rounds)


@functools.partial(jax.jit, static_argnames="sampler")
def _drawn(sampler: Sampler, key: PRNGKeyArray, round: Any, counts: Any) -> Draw:
    """What is drawn in a round, compiled as a run draws it: operation by operation takes longer."""
    if sampler.key_of == "round":
        key = jax.random.fold_in(key, round)
    return sampler.draw(key, round, counts)


def _check_rates(
    sampler: Sampler, times: list[np.ndarray], rates: Float[np.ndarray, " n"], rounds: int
) -> None:
    """Refuse more draws than the rates make likely in so many rounds of each record's.

    ``times`` counts each record's draws.
    """
    from scipy import stats

    for agent, (own, rate) in enumerate(zip(times, rates, strict=True)):
        drawn = {
            f"the {len(own)} records": (own.sum(), len(own) * rounds, 1),
            f"record {int(own.argmax())}": (own.max(), rounds, len(own)),
        }
        for name, (observed, chances, among) in drawn.items():
            if stats.binom.sf(observed - 1, chances, rate) * among * len(rates) < _RARE:
                raise ValueError(
                    f"sampler is {_validate.shown(sampler)}, which in {rounds} rounds draws {name} "
                    f"of agent {agent} {observed} times, its rate says {chances * rate:.3g}; draw "
                    "as often as rates says, each record and round apart from all others"
                )
