"""How messages cross a network: gossip with a mixing matrix, or a sum at a server."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dpjax import _validate
from dpjax.protocols import Aggregator, Received
from dpjax.topology import gossip
from dpjax.topology import mixing as mixing_

__all__ = ["Copies", "Gossip", "Server", "Sum", "Trusted"]


@dataclass(frozen=True)
class Gossip:
    """Every agent averages what it receives: X <- W^K X.

    Attributes:
        steps: K; for K > 1 what is sent has an axis of gossip steps before, what goes out before
            each. A schedule of matrices gives one a round.
    """

    steps: int = 1

    def __post_init__(self) -> None:
        """Refuse no steps."""
        object.__setattr__(self, "steps", _validate.integer("steps", self.steps))

    def __call__(self, arrays: Any, round: Int[Array, ""], message: Any) -> Received:
        """Mix a message with ``arrays["mixing"]``, [n, n] or a schedule [P, n, n]."""
        matrix = mixing_.at(arrays["mixing"], round)
        if self.steps == 1:
            return Received(gossip.mix(matrix, message), message)

        def once(sent: Any, _: None) -> tuple[Any, Any]:
            return gossip.mix(matrix, sent), sent

        return Received(*jax.lax.scan(once, message, length=self.steps))


@dataclass(frozen=True)
class Copies:
    """A message of its own on every link: x_j = sum of W_ji m_ij over who sends to j.

    Attributes:
        sender: [L] agents, one a message, own copies among them.
        receiver: [L] agents; the sender for its own copy.
    """

    sender: tuple[int, ...]
    receiver: tuple[int, ...]

    def __call__(self, arrays: Any, round: Int[Array, ""], message: Any) -> Received:
        """Combine messages [L, ...] with ``arrays["mixing"]``, [n, n]."""
        del round
        matrix, sender, receiver = arrays["mixing"], np.array(self.sender), np.array(self.receiver)
        weights = jnp.asarray(matrix)[receiver, sender]

        def combine(leaf: Array) -> Array:
            wide = jnp.promote_types(leaf.dtype, jnp.float32)
            side = weights.astype(wide).reshape((-1, *[1] * (leaf.ndim - 1)))
            weighted = leaf.astype(wide) * side
            return jax.ops.segment_sum(weighted, receiver, len(matrix)).astype(leaf.dtype)

        return Received(jax.tree.map(combine, message), message)


@dataclass(frozen=True)
class Sum:
    """The plain sum: every agent is present, and whoever listens sees every message."""

    def __call__(self, messages: Any) -> tuple[Any, Array]:
        """Sum over the agents, and their number."""
        present = len(jax.tree.leaves(messages)[0])
        # In their own type: whole numbers are added modulo 2^32 there.
        total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0, dtype=leaf.dtype), messages)
        return total, jnp.float32(present)

    def seen(self, messages: Any, total: Any) -> Any:
        """Every message."""
        del total
        return messages


@dataclass(frozen=True)
class Trusted:
    """A sum by somebody whom all trust with single messages, and nobody else sees them.

    The stand-in for a secure sum, at no cost: what is left to see is the same, and who sums is not
    trusted there.

    Guarantee: the sum alone leaves it, and only if at most ``dropouts`` agents are missing.

    Attributes:
        dropouts: Agents that may be missing from a sum, at most; it is not opened with more.
        missing: Agents that are missing in every round, to try this out.
    """

    dropouts: int = 0
    missing: tuple[int, ...] = ()

    sealed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse what is no number of agents, or none of them."""
        dropouts = _validate.integer("dropouts", self.dropouts, least=0, most=2**31 - 2)
        object.__setattr__(self, "dropouts", dropouts)
        given: Any = self.missing
        if not isinstance(given, list | tuple):
            raise ValueError(f"missing is {_validate.shown(given)}; give agents, as in (0, 3)")
        absent = {_validate.integer("missing", agent, least=0, most=2**31 - 2) for agent in given}
        object.__setattr__(self, "missing", tuple(sorted(absent)))

    def least(self, agents: int) -> int:
        """Agents in a sum that is opened, at least.

        Args:
            agents: Number of agents n.
        """
        return agents - self.dropouts

    def __call__(self, messages: Any) -> tuple[Any, Array]:
        """Sum over the agents that are there; zero and nobody where they are too few."""
        agents = len(jax.tree.leaves(messages)[0])
        there = np.setdiff1d(np.arange(agents), self.missing)
        opened = 0 < len(there) >= self.least(agents)

        def total(leaf: Array) -> Array:
            if not opened:
                return jnp.zeros_like(leaf[0])
            return jnp.sum(leaf[there], axis=0, dtype=leaf.dtype)

        return jax.tree.map(total, messages), jnp.float32(len(there) if opened else 0)

    def seen(self, messages: Any, total: Any) -> Any:
        """The sum."""
        del messages
        return total


@dataclass(frozen=True)
class Server:
    """Agents send to a server, which receives ``(sum, present)`` from an aggregate.

    Attributes:
        aggregate: How it comes by the sum; a secure sum takes the plain one's place.
    """

    aggregate: Aggregator = Sum()

    def __call__(self, arrays: Any, round: Int[Array, ""], message: Any) -> Received:
        """Aggregate the messages of all agents; the value is ``(sum, present)``."""
        del arrays, round
        total, present = self.aggregate(message)
        return Received((total, present), self.aggregate.seen(message, total))
