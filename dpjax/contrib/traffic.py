"""What a run sends in a round: numbers and bytes, over one link and over all."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.engine import arguments
from dpjax.engine.inputs import Inputs
from dpjax.learning.problem import Problem
from dpjax.plans.plan import Plan

__all__ = ["Traffic", "per_round"]


@dataclass(frozen=True)
class Traffic:
    """What goes over a network in a round of a method.

    Attributes:
        numbers: Sent over one link, in one direction, in a round.
        bytes: The same in bytes, as arrays of the run's dtypes.
        links: Directed links that are used.
    """

    numbers: float
    bytes: float
    links: int

    @property
    def total(self) -> float:
        """Numbers over all links in a round."""
        return self.numbers * self.links


def per_round(plan: Plan, problem: Problem) -> Traffic:
    """Count what the agents of a plan send, from the shapes of its messages; nothing is run.

    Every gossip step counts, and every receiver: a broadcast to d neighbours is d messages.
    Ciphertexts are longer than the numbers in them; they are counted where they are made
    (``dpjax.contrib.paillier``).

    Args:
        plan: The plan.
        problem: The problem.

    Returns:
        The counts.

    Raises:
        ValueError: For a plan that does not fit the problem, or whose agents send to no neighbour.

    Example:
        >>> import dpjax as dp
        >>> from dpjax.contrib import traffic
        >>> config = dp.Config(
        ...     protect=dp.Protect("replace_agent", clip_norm=1.0), rounds=5,
        ...     sampler=dp.samplers.Random(1), optimizer=dp.optimizers.Sgd(0.05),
        ... )
        >>> plan = dp.make_plan(config, dp.mixing.metropolis_hastings(dp.graphs.ring(6)))
        >>> traffic.per_round(plan, dp.quadratics(6))
        Traffic(numbers=2.0, bytes=8.0, links=12)
    """
    inputs = Inputs.of(*arguments.check_run(plan, problem, (0,)))
    exchange = inputs.statics.method.exchange
    matrix = plan.mixing if plan.mixing.ndim == 2 else np.abs(plan.mixing).max(axis=0)
    links = int(np.count_nonzero(matrix - np.diag(np.diagonal(matrix))))
    if not links:
        raise ValueError(f"mixing has {plan.agents} agents and no links; give a network")
    arrays = jax.tree.map(lambda leaf: leaf[0], inputs.arrays)

    def message(models: Any, key: Any) -> Any:
        sent = inputs.statics.first_round(arrays, inputs.data, models, key)
        return exchange(arrays, jnp.int32(0), sent.message).sent

    models = jax.tree.map(lambda leaf: leaf[0, 0], inputs.start(None, 1))
    leaves = jax.tree.leaves(jax.eval_shape(message, models, inputs.batch_keys[0]))
    # Messages of their own on every link have an axis of receivers too, own copies among them.
    shares = plan.agents
    if exchange.per_link:
        shares *= plan.agents
    numbers = sum(leaf.size for leaf in leaves) / shares
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / shares
    return Traffic(float(numbers), float(size), links)
