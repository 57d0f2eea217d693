"""The forecast of a plan: what its noise does to a model of a given size, before any training."""

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from dpjax import _validate
from dpjax.accounting import forecast as forecast_
from dpjax.accounting.forecast import Forecast
from dpjax.accounting.losses import Concentrated
from dpjax.accounting.sampled import Pld
from dpjax.plans import guarantees

if TYPE_CHECKING:
    from dpjax.plans.plan import Plan

__all__ = ["HopelessWarning"]


class HopelessWarning(UserWarning):
    """A run was started whose noise leaves nothing to learn."""


def known(plan: "Plan") -> bool:
    """Whether there is a forecast: of clipped gradients, under Gaussian noise added to them.

    Args:
        plan: The plan.
    """
    if plan.config.protect.gradient_gap is not None:
        return False
    return plan.noise is None or plan.noise.factor is not None


def remark(plan: "Plan") -> str:
    """What a plan's line says of its noise: the model that it allows for, where it is too fine.

    Args:
        plan: The plan.

    Returns:
        "", or the remarks, each after a semicolon.
    """
    said, arrays = "", {} if plan.noise is None else plan.noise.arrays
    if known(plan) and not np.isinf(affords := of_plan(plan, 1).affords()):
        said = f"; noise allows for {affords:,.0f} parameters"
    if "noise_scales" in arrays:
        scales = arrays["noise_scales"]
        below = np.flatnonzero((scales > 0) & (scales < 2.0**-23))
        if below.size:
            said += (
                f"; from round {below[0] + 1:,} on its scale is below 1.2e-7, which float32 "
                "numbers of size 1 do not keep: use float64"
            )
    return said


def of_plan(plan: "Plan", parameters: int, counts: Any = None) -> Forecast:
    """Return the forecast of a plan for a model size; see `dpjax.accounting.forecast`.

    Args:
        plan: The plan.
        parameters: d, entries of one agent's model.
        counts: [n] records of each agent, by which the cyclic sampler's batches are filled; None
            takes full batches.

    Returns:
        The forecast; its ratio is 0 for a non-private plan.

    Raises:
        ValueError: For a number of parameters below 1, or counts that are not one an agent.
    """
    if not known(plan):
        gap = plan.config.protect.gradient_gap
        what = "noise is " + type(plan.config.noise).__name__
        if gap is not None:
            what = f"gradient_gap is {gap:g}"
        raise ValueError(
            f"{what}, of which no forecast is known: give a plan of clipped gradients (clip_norm) "
            "whose Gaussian noise has one scale, a design of plans.noise"
        )
    config, rounds, loss = plan.config, plan.config.rounds, plan.guarantee.loss
    sampled = loss if isinstance(loss, Pld) else None
    mu = plan.guarantee.mu if sampled is None else sampled.unamplified
    concentrated = isinstance(loss, Concentrated)
    if isinstance(loss, Concentrated):
        # Of real noise that has this rho: what is forecast is no guarantee.
        mu = math.sqrt(2 * loss.rho)
    assert mu is not None
    asked, budgets = config.budget, None
    if asked is not None and asked.each is not None:
        budgets = asked.allowed_mu()
    return forecast_.forecast(
        parameters,
        factor=plan.factor,
        reach=forecast_.weights(plan.mixing, rounds),
        step_sizes=config.optimizer.relative(rounds),
        patterns=(config.pattern.epochs, config.pattern.separation),
        clip_norm=config.protect.clip_norm,
        relation=config.protect.relation,
        batch_size=plan.sampler.divisor,
        mu=mu,
        sampled=sampled,
        # Without noise neither is read.
        delta=0.5 if asked is None else asked.delta,
        accountant="rdp" if concentrated else "gdp" if asked is None else asked.rule,
        strategy=plan.strategy,
        budgets=budgets,
        filled=1.0 if counts is None else _filled(plan, counts),
    )


def _filled(plan: "Plan", counts: Any) -> np.ndarray:
    """How much of each batch is records, [T, n] or [n]."""
    records = _validate.finite_array("counts", counts, ndim=1)
    if len(records) != plan.agents:
        raise ValueError(f"counts has {len(records)} entries for {plan.agents} agents; give [n]")
    if plan.config.protect.clips == "agent":
        return np.ones(plan.agents)
    return plan.sampler.filled(records, plan.config.rounds)


def entries(params: Any) -> int:
    """Number of entries of one model.

    Args:
        params: Its pytree, of arrays or of their shapes.
    """
    return int(sum(np.prod(np.shape(leaf)) for leaf in jax.tree.leaves(params)))


def tell(plans: Sequence["Plan"], parameters: int, counts: Any = None) -> str:
    """Return a line about plans that are to run, and warn where one of them cannot learn.

    Args:
        plans: The plans.
        parameters: d.
        counts: As in `of_plan`.

    Returns:
        The line; empty where no plan is private.

    Warns:
        HopelessWarning: Once, with the best of the hopeless plans' statement.
        UserWarning: For a delta above one over the number of records.
    """
    for plan in plans:
        # Others have been checked when they were made.
        if plan.counts is None and plan.config.protect.unit == "record":
            guarantees.check_delta(plan.config, plan.agents, counts, stacklevel=4)
    forecasts = [of_plan(plan, parameters, counts) for plan in plans if known(plan)]
    private = sorted((each for each in forecasts if each.rate > 0), key=lambda each: each.ratio)
    if not private:
        return ""
    hopeless = [each for each in private if each.level == "hopeless"]
    if hopeless:
        many = f"{len(hopeless)} of {len(forecasts)} plans: " if len(forecasts) > 1 else ""
        warnings.warn(
            f"noise leaves nothing to learn; {many}{hopeless[0].statement()}",
            HopelessWarning,
            stacklevel=3,
        )
    line = f"forecast: {private[0].caption()}"
    if len(private) > 1 and private[-1].ratio > private[0].ratio * 1.01:
        line += f"; up to {private[-1].ratio:.2g} times"
    return line
