"""Noise that a sum needs, added in shares by those whose messages are summed."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, PRNGKeyArray

from dpjax import _validate
from dpjax._rounding import MARGIN
from dpjax.algorithms.exchange import Server
from dpjax.plans.calibration import Target
from dpjax.plans.shaped import Shaped
from dpjax.protocols import Privatizer
from dpjax.transforms import noise as noise_

__all__ = ["Aggregate"]


@dataclass(frozen=True)
class Aggregate(Shaped):
    """Gaussian noise in shares: every agent adds its own, and the sum has what privacy asks for.

    Guarantee: of n agents at most ``dropouts`` are missing from a sum that is opened (the method's
    aggregate aborts below n - dropouts, before anything is seen), and at most ``colluders`` of
    those who are in it show their messages to the aggregator. Then the shares of the others,
    n - dropouts - colluders at least, are unknown to it. Each has deviation a, so that with
    sensitivity s (C, or 2 C where data are replaced) a unit that takes part in k rounds loses
    mu = s sqrt(k / (n - dropouts - colluders)) / a to an "aggregator", who receives the sum of
    every round and no single message, whatever gradients depend on. To an "outsider", who reads all
    links, it loses no more, and the same is stated: single messages go masked over these, which is
    what a sealed aggregate promises, so that this one sees the sums that are opened and no shares.
    Exact arithmetic; real noise, in simulations. A round whose sum may have been opened counts,
    finished or not.

    Attributes:
        dropouts: Agents that may be missing from a sum, at most.
        colluders: Agents that may show the aggregator what they know, at most.

    Reference:
        DOME, Algorithm 1, a^2 = N E sigma^2 C^2 / B, which leaves the shares of missing clients out
        of the sum; here they are made up for beforehand.

    Example:
        >>> from dpjax.plans.aggregate import Aggregate
        >>> Aggregate(dropouts=5).label
        'aggregate'
    """

    dropouts: int = 0
    colluders: int = 0

    label, secrets = "aggregate", "shares"
    sealed = True
    """Its loss is of sums alone: see `dpjax.accounting.guarantee.Guarantee`."""

    def __post_init__(self) -> None:
        """Refuse what is no number of agents."""
        for name in ("dropouts", "colluders"):
            value = _validate.integer(name, getattr(self, name), least=0, most=2**31 - 2)
            object.__setattr__(self, name, value)

    def shares(self, agents: int) -> int:
        """Shares of noise in a sum that the aggregator does not know, at least.

        Args:
            agents: Number of agents n.

        Raises:
            ValueError: Where none is left.
        """
        left = agents - self.dropouts - self.colluders
        if left < 1:
            raise ValueError(
                f"noise is {self} for {agents} agents, of whom none is left to hide the others; "
                "give fewer dropouts and colluders"
            )
        return left

    def unit(self, target: Target) -> Float[np.ndarray, " n"]:
        """Loss mu of every agent at a deviation of 1."""
        check_sum_only(self, target)
        rounds = target.over_rounds(None)
        mu = target.protect.sensitivity * math.sqrt(rounds / self.shares(target.agents)) * MARGIN
        return np.full(target.agents, mu)

    def source(self, target: Target) -> Float[np.ndarray, "n n"]:
        """Every agent's own normals."""
        return np.eye(target.agents)

    def drawn(self, target: Target) -> "AggregatePrivatizer":
        """Independent normals."""
        return AggregatePrivatizer(target.rounds, target.agents)


def check_sum_only(part: Any, target: Target) -> None:
    """Refuse an exchange that shows single messages, or opens sums of too few.

    Args:
        part: Noise in shares, with the ``dropouts`` that it makes up for.
        target: What it is for.

    Raises:
        ValueError: Naming the exchange and the remedy.
    """
    exchange = getattr(target.method, "exchange", None)
    aggregate: Any = exchange.aggregate if isinstance(exchange, Server) else None
    if not getattr(aggregate, "sealed", False):
        raise ValueError(
            f"method has exchange {exchange}, which shows single messages, with noise {part}, of "
            "which each has a share; give an aggregate that shows the sum alone, or "
            "noise.Independent() and attacker='outsider'"
        )
    agents, least = target.agents, aggregate.least(target.agents)
    if least < agents - part.dropouts:
        remedy = f"dropouts={agents - least}, or " if least > 0 else ""
        raise ValueError(
            f"aggregate opens sums of {max(least, 0)} of {agents} agents with noise {part}; give "
            f"{remedy}an aggregate that aborts earlier"
        )


@dataclass(frozen=True)
class AggregatePrivatizer(Privatizer):
    """How `Aggregate` is drawn; see `dpjax.transforms.noise.correlated`.

    Attributes:
        rounds: Rounds that the noise is accounted for.
        agents: n.
    """

    rounds: int
    agents: int

    def transformation(self, arrays: Any, key: PRNGKeyArray) -> optax.GradientTransformation:
        """The noise of one plan; ``arrays["noise_scale"]`` is its deviation."""
        deviations = jnp.full(self.agents, 1.0, jnp.float32) * arrays["noise_scale"]
        return noise_.correlated(deviations, key=key, rounds=self.rounds)
