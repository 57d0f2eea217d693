"""Training at a server: agents send clipped gradients, and the server steps by their sum."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from dpjax import _validate
from dpjax.algorithms.exchange import Server, Sum
from dpjax.protocols import Aggregator, Emission, Round, Seen

__all__ = ["Federated"]


@dataclass(frozen=True)
class Federated:
    """x <- x + opt(sum / present): one model at a server, which all agents know.

    An agent is a place at the server; `dpjax.plans.samplers.Clients` lets clients take turns at
    it. The optimizer's state is the server's. A round whose sum was not opened (present = 0) moves
    nothing.

    Guarantee: none by itself; it is the plan's. Sums are all that models depend on, through noise
    that their parts were given (`dpjax.plans.aggregate.Aggregate`), or single messages with noise
    enough each (`dpjax.plans.noise.Independent`).

    Attributes:
        aggregate: How the server comes by the sum; `Sum` shows every message.

    Reference:
        McMahan et al. (2017), FedSGD; with an optimizer at the server, Reddi et al. (2021).

    Example:
        >>> from dpjax.algorithms.exchange import Trusted
        >>> from dpjax.algorithms.federated import Federated
        >>> Federated(Trusted(dropouts=1)).exchange.aggregate.least(10)
        9
    """

    aggregate: Aggregator = Sum()

    stochastic: ClassVar[Literal["rows", "columns", "double"]] = "rows"

    def __post_init__(self) -> None:
        """Refuse what sums nothing."""
        if isinstance(self.aggregate, type) or not isinstance(self.aggregate, Aggregator):
            raise ValueError(
                f"aggregate is {_validate.shown(self.aggregate)}; give algorithms.exchange.Sum() "
                "or Trusted()"
            )

    @property
    def exchange(self) -> Server:
        """A sum at the server."""
        return Server(self.aggregate)

    def start(self, here: Round, models: Any) -> Any:
        """The server's optimizer, of one model."""
        return here.optimizer.init(_one(models))

    def payload(self, models: Any) -> Any:
        """One gradient for each place."""
        return models

    def emit(self, here: Round, seen: Seen) -> Emission:
        """The gradients are private."""
        answer = here.query(seen.models, here.batch)
        return Emission(answer.total, metrics=answer.metrics)

    def send(self, here: Round, seen: Seen, emission: Emission, noisy: Any) -> tuple[Any, Any]:
        """The noisy gradients themselves."""
        return noisy, ()

    def absorb(self, here: Round, seen: Seen, carry: Any, received: Any) -> tuple[Any, Any]:
        """The server's step, sent to all places; none where no sum was opened."""
        total, present = received
        mean = jax.tree.map(lambda leaf: leaf[None], here.mean(total, present))
        one = _one(seen.models)
        updates, memory = here.optimizer.update(mean, seen.memory, one)
        moved = optax.apply_updates(one, updates)
        opened = present > 0
        moved, memory = jax.tree.map(
            lambda new, old: jnp.where(opened, new, old), (moved, memory), (one, seen.memory)
        )
        models = jax.tree.map(lambda x, new: jnp.broadcast_to(new, x.shape), seen.models, moved)
        return models, memory

    def released(self, seen: Seen) -> Any:
        """The model: a function of sums."""
        return seen.models


def _one(models: Any) -> Any:
    """The model that all places share, [1, ...]."""
    return jax.tree.map(lambda leaf: leaf[:1], models)
