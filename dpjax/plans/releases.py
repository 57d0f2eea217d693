"""Releases: the grid of a plan's noise, and the guarantee with what finite precision costs."""

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from dpjax import _validate
from dpjax._numerics import up
from dpjax.accounting import finite, gdp
from dpjax.transforms import rounds as rounds_

if TYPE_CHECKING:
    from dpjax.plans.plan import Plan

__all__: list[str] = []

LIMIT = 0.01
"""Share of the clip norm that rounding sums of records may take in a release."""


def grid(plan: "Plan") -> finite.Grid | None:
    """The grid that a release's noisy sums are rounded to; None for a simulation.

    Args:
        plan: The plan.
    """
    if not plan.config.release or plan.noise is None:
        return None
    return plan.noise.grid(plan.target)


def priced(
    plan: "Plan", parameters: int, rounding: float = 0.0, enough: int | None = None
) -> "Plan":
    """The plan with a guarantee that includes the cost of noise of finite precision.

    A simulation's states what rounding sums takes of the clip norm, and is else returned as it is:
    whoever knows its seed needs no last bits.

    Guarantee: a release of a model of this size has the guarantee of the plan that is returned,
    rounding, bits and tails of all its draws included: `dpjax.accounting.finite.cost`. Its epsilon
    is the budget's, for less of which, `Budget.reserve`, its ideal noise was calibrated.

    Args:
        plan: The plan, audited again.
        parameters: d, entries of one agent's model.
        rounding: Share of the clip norm that rounding sums of records takes; 0 for one gradient.
        enough: A pass length with a smaller one, if there is one.

    Returns:
        The plan, with `Guarantee.added_epsilon`, ``added_delta`` and ``sum_rounding`` set.

    Raises:
        ValueError: Where the cost takes more than 1 % of delta, or more than the reserve, or
            rounding more than 1 % of the clip norm.
    """
    if plan.config.release and rounding > LIMIT:
        remedy = f"give Protect(..., microbatch={enough})"
        if enough is None:
            remedy = (
                f"sums of more than {math.floor(LIMIT * 2**23):,} records are too long for "
                "float32; give a smaller batch, or spread the records over more agents"
            )
        raise ValueError(
            f"microbatch is {_validate.shown(plan.config.protect.microbatch)}, and rounding the "
            f"sums of records would take {rounding:.2g} of the clip norm, more than {LIMIT:.0%}; "
            f"{remedy}"
        )
    if rounding and plan.guarantee.relation is not None:
        guarantee = plan.guarantee.replace(sum_rounding=rounding)
        plan = dataclasses.replace(plan, guarantee=guarantee)
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
            f"{np.linalg.cond(plan.factor.astype(np.float64)):.2g}; "
            "noise.Whisper(max_variance=20) bounds it)"
        )
    guarantee = plan.guarantee
    if not guarantee.unsound:  # The paper's rule stays as false as it was.
        _check_reserve(plan, cost)
    guarantee = guarantee.replace(added_epsilon=cost.epsilon, added_delta=cost.delta)
    return dataclasses.replace(plan, guarantee=guarantee)


def _check_reserve(plan: "Plan", cost: finite.Cost) -> None:
    """Refuse a release whose ideal noise leaves too little of some agent's epsilon for its cost."""
    assert plan.noise is not None and plan.config.budget is not None
    budget, delta = plan.config.budget, plan.guarantee.delta
    mu = plan.noise.loss(plan.target).mu  # type: ignore[union-attr]
    spent = np.asarray(gdp.epsilon(mu, delta - cost.delta)) + cost.epsilon
    lacking = float(np.max(spent / np.asarray(budget.epsilon))) - 1
    if lacking > 0:
        share = budget.reserve + lacking
        # A grid is a power of two, and may be finer by half under a little more noise.
        enough = min(2 * share, (1 + share) / 2)
        raise ValueError(
            f"reserve is {budget.reserve:g} of epsilon {_validate.shown(budget.epsilon)}; noise "
            f"of finite precision takes {up(share, 2)} of it over the "
            f"{cost.draws:,} draws of this release (rounds x agents x parameters); give "
            f"Budget(..., reserve={up(enough, 2)}), run fewer rounds or train a smaller model"
        )
