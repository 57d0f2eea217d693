"""How messages cross a network: gossip with a mixing matrix, or a sum at a server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool

from dpjax import _numerics, _validate
from dpjax.protocols import (
    Aggregator,
    Arrays,
    Carry,
    Combine,
    Exchange,
    Memory,
    Message,
    Models,
    Received,
)
from dpjax.topology import gossip
from dpjax.topology.gossip import RoundNumber, Senders
from dpjax.topology.mixing import Mixing

__all__ = ["Gossip", "Server", "Sum", "Trusted"]

Transmission: TypeAlias = tuple[Message, Carry]
"""A message, and what its sender keeps of the round."""
_Total: TypeAlias = tuple[Message, Array]
"""The sum of messages, and the number of agents in it."""
Transition: TypeAlias = tuple[Models, Memory]
"""Models and memory after a round."""
AgentNumbers: TypeAlias = tuple[int, ...]
"""Agents by number."""


def beside(weights: Array, leaf: Array) -> Array:
    """Weights of the first axes, shaped to multiply a leaf.

    Args:
        weights: [n] or [n, n].
        leaf: [n, ...] or [n, n, ...].
    """
    return weights.reshape((*weights.shape, *[1] * (leaf.ndim - weights.ndim)))


@dataclass(frozen=True)
class Gossip(Exchange):
    """Every agent averages the received messages: X <- W^K X.

    Attributes:
        steps: K. For K > 1 the sent messages have a leading axis of gossip steps. A schedule of
            matrices gives one matrix for each round.
    """

    steps: int = 1

    def __post_init__(self) -> None:
        """Check the number of steps."""
        _validate.fields(self, _validate.integer, "steps")

    def __call__(self, arrays: Arrays, round: RoundNumber, message: Message) -> Received:
        """Mix a message with ``arrays["mixing"]``, [n, n] or a schedule [P, n, n]."""
        matrix = gossip.at(arrays["mixing"], round)
        # Without a scan the message of one step has no axis of steps.
        if self.steps == 1:
            return Received(gossip.mix(matrix, message), message)

        # Each step mixes what the last one sent, which crossed the network itself.
        return Received(
            *jax.lax.scan(
                lambda sent, _: (gossip.mix(matrix, sent), sent), message, length=self.steps
            )
        )

    def for_agents(self, mixing: Mixing, agents: Sequence[int], senders: Senders) -> Combine | None:
        """Rows of W; None of several steps, for which messages cross the network again."""
        return gossip.combining(mixing, agents, senders) if self.steps == 1 else None


@dataclass(frozen=True)
class PerLinkMessages(Exchange):
    """A separate message on every link: x_j = sum of W_ji m_ij over the senders i to j.

    Attributes:
        sender: [L] agents, one for each message; agents also send to themselves.
        receiver: [L] agents.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.algorithms.exchange import PerLinkMessages
        >>> links = PerLinkMessages(sender=(0, 0, 1, 1), receiver=(0, 1, 0, 1))
        >>> messages = jnp.array([[1.0], [1.0], [3.0], [3.0]])
        >>> links({"mixing": jnp.full((2, 2), 0.5)}, 0, messages).value.tolist()
        [[2.0], [2.0]]
    """

    sender: AgentNumbers
    receiver: AgentNumbers

    def __call__(self, arrays: Arrays, round: RoundNumber, message: Message) -> Received:
        """Combine messages [L, ...] with ``arrays["mixing"]``, [n, n]."""
        matrix = arrays["mixing"]
        sender = np.array(self.sender)
        receiver = np.array(self.receiver)
        # W_ij is the weight that receiver i gives to sender j.
        weights = jnp.asarray(matrix)[receiver, sender]

        def combine(leaf: Array) -> Array:
            wide = _numerics.wide_dtype(leaf)
            weighted = leaf.astype(wide) * beside(weights.astype(wide), leaf)
            # Messages of one receiver are added up in the order of the senders.
            return jax.ops.segment_sum(weighted, receiver, len(matrix)).astype(leaf.dtype)

        return Received(jax.tree.map(combine, message), message)


@dataclass(frozen=True)
class Sum(Aggregator):
    """The plain sum: every agent is present, and whoever listens sees every message.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.algorithms.exchange import Sum
        >>> total, present = Sum()(jnp.array([[1.0], [3.0]]))
        >>> total.tolist(), float(present)
        ([4.0], 2.0)
    """

    def __call__(self, messages: Message) -> _Total:
        """Sum over the agents, and their number."""
        # Integers keep their dtype, whose sums are modulo 2^32.
        total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0, dtype=leaf.dtype), messages)
        return total, jnp.float32(len(jax.tree.leaves(messages)[0]))


@dataclass(frozen=True)
class Trusted(Aggregator):
    """A sum by a trusted party, which alone sees single messages.

    It simulates a secure sum without its cost. A secure sum reveals the same, without a trusted
    party; ``dpjax.contrib.masks`` simulates its masks, too.

    Guarantee: it releases the sum alone, and only if at most ``dropouts`` agents are missing. Real
    numbers are added in float64 and rounded once. Up to n 2^-53 of the messages' sizes the result
    is a function of their exact sum, for which accounting holds. Integers are added exactly.

    Attributes:
        dropouts: The most agents that may be missing from an opened sum.
        missing: Agents that are missing in every round, for tests; or tuples of agents, which
            rounds take in turn.
    """

    dropouts: int = 0
    missing: AgentNumbers | tuple[AgentNumbers, ...] = ()

    sum_only = True

    def __post_init__(self) -> None:
        """Check the number of dropouts and the missing agents."""
        _validate.fields(self, _validate.integer, "dropouts", minimum=0, maximum=2**31 - 2)
        _validate.fields(self, _agents, "missing")

    def min_survivors(self, agents: int) -> int:
        """The fewest agents in an opened sum.

        Args:
            agents: Number of agents n.
        """
        return agents - self.dropouts

    def at(self, round: RoundNumber) -> Callable[[Message], _Total]:
        """The aggregator of a round.

        Args:
            round: Rounds done before, traced or not.
        """

        def aggregate(messages: Message) -> _Total:
            agents = len(jax.tree.leaves(messages)[0])
            presence = self._presence(agents, round)
            count = jnp.sum(presence, dtype=jnp.int32)
            # Below the fewest survivors nobody can open the sum, as in secure aggregation.
            opened = (count > 0) & (count >= self.min_survivors(agents))
            total = self._total(messages, presence, round)
            total = optax.tree.where(opened, total, optax.tree.zeros_like(total))
            return total, jnp.where(opened, count, 0).astype(jnp.float32)

        return aggregate

    def __call__(self, messages: Message) -> _Total:
        """Sum over the present agents, and their number; zeros where they are too few."""
        return self.at(0)(messages)

    def observed(self, messages: Message, total: Message) -> Message:
        """The sum."""
        return total

    def _presence(self, agents: int, round: RoundNumber) -> Bool[Array, " n"]:
        """The present agents of a round."""
        by_turns = self.missing and isinstance(self.missing[0], tuple)
        turns: Any = self.missing if by_turns else (self.missing,)
        table = np.ones((len(turns), agents), bool)
        for row, absent in zip(table, turns, strict=True):
            # A cohort may be smaller than the agents that are named.
            row[[agent for agent in absent if agent < agents]] = False
        return jnp.asarray(table)[jnp.asarray(round) % len(table)]

    def _total(self, messages: Message, present: Bool[Array, " n"], round: RoundNumber) -> Message:
        """The sum over the agents that are present, [n] bools."""

        def total(leaf: Array) -> Array:
            # Selected, not multiplied: a missing agent's infinity times 0 would be nan.
            part = jnp.where(beside(present, leaf), leaf, 0)
            # Whole numbers are added up modulo their range, as masks need.
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                return jnp.sum(part, axis=0, dtype=leaf.dtype)
            # In float32 the sum of clipped terms would move by more than its sensitivity.
            with _numerics.double_precision():
                return jnp.sum(part.astype(jnp.float64), axis=0).astype(leaf.dtype)

        return jax.tree.map(total, messages)


def _agents(name: str, value: Any) -> tuple[Any, ...]:
    """Agents by number, sorted; or tuples of them, by turns."""
    if not isinstance(value, list | tuple):
        raise _validate.refusal(name, value, "give agents, as in (0, 3)")
    if value and all(isinstance(turn, list | tuple) for turn in value):
        return tuple(_agents(name, turn) for turn in value)
    return tuple(sorted(set(_validate.agents(name, value))))


@dataclass(frozen=True)
class Server(Exchange):
    """Agents send to a server, which receives ``(sum, present)`` from an aggregate.

    Attributes:
        aggregate: Computes the sum; a secure sum replaces the plain one.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.algorithms.exchange import Server
        >>> total, present = Server()({}, 0, jnp.array([[1.0], [3.0]])).value
        >>> total.tolist(), float(present)
        ([4.0], 2.0)
    """

    aggregate: Aggregator = Sum()

    def __call__(self, arrays: Arrays, round: RoundNumber, message: Message) -> Received:
        """Aggregate the messages of all agents; the value is ``(sum, present)``."""
        total, present = self.aggregate.at(round)(message)
        return Received((total, present), self.aggregate.observed(message, total))

    def min_survivors(self, agents: int) -> int:
        """The fewest agents in an opened sum, for sum-only aggregates; else 0."""
        return self.aggregate.min_survivors(agents) if self.aggregate.sum_only else 0
