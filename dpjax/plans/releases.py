"""Releases: the grid of a plan's noise, and the guarantee with what finite precision costs."""

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from dpjax.accounting import finite
from dpjax.transforms import rounds as rounds_

if TYPE_CHECKING:
    from dpjax.plans.plan import Plan

__all__: list[str] = []


def grid(plan: "Plan") -> finite.Grid | None:
    """The grid that a release's noisy sums are rounded to; None for a simulation.

    Args:
        plan: The plan.
    """
    if not plan.config.release or plan.noise is None:
        return None
    return plan.noise.grid(plan.target)


def priced(plan: "Plan", parameters: int) -> "Plan":
    """The plan with a guarantee that includes the cost of noise of finite precision.

    A simulation's plan is returned as it is: whoever knows its seed needs no last bits.

    Guarantee: a release of a model of this size has the guarantee of the plan that is returned,
    rounding, bits and tails of all its draws included: `dpjax.accounting.finite.cost`.

    Args:
        plan: The plan, audited again.
        parameters: d, entries of one agent's model.

    Returns:
        The plan, with `Guarantee.added_epsilon` and ``added_delta`` set.

    Raises:
        ValueError: Where the cost takes more than 1 % of delta.
    """
    chosen = plan.grid
    if chosen is None:
        return plan
    config, protect, strategy = plan.config, plan.config.protect, plan.applied_strategy
    route = None if plan.strategy is None else rounds_.route(plan.strategy, config.rounds)
    assert plan.guarantee.mu is not None
    # The noise is added to one clipped gradient, or to the sum of a batch of them.
    terms = math.ceil(config.sampler.divisor) if protect.clips == "record" else 1
    cost = finite.cost(
        plan.factor,
        config.rounds,
        strategy,
        spacing=chosen.spacing,
        parameters=parameters,
        mu=plan.guarantee.mu,
        delta=plan.guarantee.delta,
        clip_norm=protect.clip_norm * terms,
        recursive=route is not None and route.kind == "recursion",
    )
    if not cost.delta <= finite.LIMIT * plan.guarantee.delta:
        raise ValueError(
            f"delta is {plan.guarantee.delta:g}, of which noise of finite precision would take "
            f"{cost.delta:.2g} over the {cost.draws:,} draws of this release (rounds x agents x "
            f"parameters), more than {finite.LIMIT:.0%}; run fewer rounds or a smaller model, or "
            f"choose a design with noise that cancels less (condition number of its factor "
            f"{np.linalg.cond(plan.factor.astype(np.float64)):.2g}; max_variance bounds it)"
        )
    guarantee = plan.guarantee.with_finite_precision(cost.epsilon, cost.delta)
    return dataclasses.replace(plan, guarantee=guarantee)
