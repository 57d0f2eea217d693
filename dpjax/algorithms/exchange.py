"""How messages cross a network: gossip with a mixing matrix, or a sum at a server."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dpjax import _validate
from dpjax.protocols import Received
from dpjax.topology import gossip
from dpjax.topology import mixing as mixing_

__all__ = ["Gossip", "Sum"]


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
class Sum:
    """A server receives the sum of all messages, and how many there were.

    This is the sum itself, in one process: who may see single messages is not its concern.
    """

    def __call__(self, arrays: Any, round: Int[Array, ""], message: Any) -> Received:
        """Sum over the agents; the value is ``(sum, present)``."""
        del arrays, round
        present = len(jax.tree.leaves(message)[0])
        total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), message)
        return Received((total, jnp.float32(present)), message)
