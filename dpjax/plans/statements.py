"""What a run states: its forecast, the price of finite precision, and its guarantee at the end."""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import numpy as np

from dpjax import _validate
from dpjax.accounting import budget as budget_
from dpjax.accounting import finite, gdp
from dpjax.accounting.guarantee import Guarantee
from dpjax.accounting.parties import epsilon_text
from dpjax.accounting.rounding import MARGIN, up
from dpjax.learning.problem import Problem
from dpjax.plans import calibration, compatibility, noise
from dpjax.plans.plan import Plan
from dpjax.transforms import rounds as rounds_

__all__ = ["HopelessWarning"]

Stopping = Literal["plan", "curve"]
"""What a run that may be stopped states; see `dpjax.engine.run.run`."""

ROUNDING_LIMIT = 0.01
"""Share of the clip norm that rounding sums of records may take in a release."""


class HopelessWarning(UserWarning):
    """A run was started whose noise leaves nothing to learn.

    Example:
        >>> from dpjax.plans.statements import HopelessWarning
        >>> issubclass(HopelessWarning, UserWarning)
        True
    """


def parameter_count(params: Any) -> int:
    """Number of entries of one model.

    Args:
        params: Its pytree, of arrays or of their shapes.
    """
    return sum(math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(params))


def forecast_line(plans: Sequence[Plan], parameters: int, counts: Any = None) -> str:
    """Return a line about plans that are to run, and warn where one of them cannot learn.

    Args:
        plans: The plans.
        parameters: d.
        counts: As in `Plan.forecast`.

    Returns:
        The line; empty where no plan is private.

    Warns:
        HopelessWarning: Once, with the best of the hopeless plans' statement.
        UserWarning: For a delta above one over the number of records.
    """
    for plan in plans:
        # Others have been checked when they were made.
        if plan.counts is None and plan.config.protect.unit == "record":
            calibration.check_delta(plan.config, plan.agents, counts, stacklevel=4)
    gaussian = [plan for plan in plans if not plan.why_no_forecast]
    private = []
    for plan in gaussian:
        forecast = plan.forecast(parameters, counts=counts)
        if forecast.rate > 0:
            design = noise.display_name(plan.config.label)
            private.append((forecast, f"{design}, epsilon {epsilon_text(plan.guarantee)}"))
    if not private:
        return ""
    # The best first: a sweep is worth its time if one of its plans can learn.
    private.sort(key=lambda pair: max(pair[0].ratio, pair[0].disagreement))
    hopeless = [forecast for forecast, _ in private if forecast.level == "hopeless"]
    if hopeless:
        many = f"{len(hopeless)} of {len(gaussian)} plans: " if len(gaussian) > 1 else ""
        text = f"noise leaves nothing to learn; {many}{hopeless[0].statement()}"
        warnings.warn(text, HopelessWarning, stacklevel=3)
    best, best_name = private[0]
    worst, worst_name = private[-1]
    line = f"forecast: {best.caption()}"
    if worst.ratio > best.ratio * 1.01:
        caption = worst.caption().partition(": ")[2]
        line += f" ({best_name}); worst of {len(private)} plans: {caption} ({worst_name})"
    return line


def custom_parts(problem: Problem) -> tuple[str, ...]:
    """Return the names of a user's own parts by which gradients and initial models are made.

    Args:
        problem: Of which no message depends on metrics and predictions.
    """
    functions = problem.init, problem.loss, problem.batch_loss, problem.weighted, problem.augment
    return compatibility.custom_names(type(problem), type(problem.partition), *functions)


def with_precision_cost(
    plan: Plan,
    parameters: int,
    rounding: float = 0.0,
    enough: int | None = None,
    problems: Sequence[Problem] = (),
) -> Plan:
    """The plan with a guarantee that includes the cost of noise of finite precision.

    A simulation's states what rounding sums takes of the clip norm, and is else returned as it is:
    whoever knows its seed needs no last bits.

    Guarantee: a release of a model of this size has the guarantee of the plan that is returned,
    rounding, bits and tails of all its draws included: `dpjax.accounting.finite.release_cost`.
    Its epsilon is the budget's, for less of which, `Budget.reserve`, its ideal noise was
    calibrated.

    Args:
        plan: The plan, audited again.
        parameters: d, entries of one agent's model.
        rounding: Share of the clip norm that rounding sums of records takes; 0 for one gradient.
        enough: A pass length with a smaller one, if there is one.
        problems: Those of the run, one or one a seed.

    Returns:
        The plan, with `Guarantee.added_epsilon`, ``added_delta``, ``sum_rounding``, ``custom`` and
        ``private_partition`` set.

    Raises:
        ValueError: Where the cost takes more than 1 % of delta, or more than the reserve, or
            rounding more than 1 % of the clip norm.
    """
    config = plan.config
    protect = plan.config.protect
    # Each rounded term is clipped lower by as much, which a release would lose without a word.
    if config.release and rounding > ROUNDING_LIMIT:
        remedy = f"give Protect(..., microbatch={enough})"
        if enough is None:
            remedy = (
                f"sums of more than {math.floor(ROUNDING_LIMIT * 2**23):,} records are too long "
                "for float32; give a smaller batch, or spread the records over more agents"
            )
        raise ValueError(
            f"microbatch is {_validate.shown(protect.microbatch)}, and rounding the sums of "
            f"records would take {rounding:.2g} of the clip norm, more than {ROUNDING_LIMIT:.0%}; "
            f"{remedy}"
        )
    if plan.guarantee.relation is None:
        return plan
    # Records that were dealt by what they hold say something of it by where they are.
    private = any(problem.partition.origin == "private" for problem in problems)
    names = [*plan.guarantee.custom]
    for problem in problems:
        names += custom_parts(problem)
    changes: dict[str, Any] = {
        "sum_rounding": rounding,
        "private_partition": private,
        "custom": tuple(dict.fromkeys(names)),
    }
    if plan.grid is not None:
        cost = _cost(plan, plan.grid, parameters)
        changes |= {"added_epsilon": cost.epsilon, "added_delta": cost.delta}
    stated = plan.guarantee.replace(**changes)
    return plan if stated == plan.guarantee else dataclasses.replace(plan, guarantee=stated)


def _cost(plan: Plan, grid: finite.Grid, parameters: int) -> finite.Cost:
    """What noise on a grid costs a release, refused where it takes too much."""
    config = plan.config
    protect = plan.config.protect
    delta = plan.guarantee.delta
    assert plan.guarantee.mu is not None and plan.noise is not None and config.budget is not None
    # The noise is added to one clipped gradient, or to the sum of a batch of them.
    terms = math.ceil(plan.sampler.divisor) if protect.clips == "record" else 1
    cost = finite.release_cost(
        plan.factor,
        config.rounds,
        plan.applied_strategy,
        spacing=grid.spacing,
        parameters=parameters,
        mu=plan.guarantee.mu,
        delta=delta,
        clip_norm=protect.clip_norm * terms,
        recursive=plan.strategy is not None
        and rounds_.route(plan.strategy, config.rounds).kind == "recursion",
    )
    draws = f"{cost.draws:,} draws of this release (rounds x parameters x agents, and links)"
    if not cost.delta <= finite.LIMIT * delta:
        raise ValueError(
            f"delta is {delta:g}, of which noise of finite precision would take {cost.delta:.2g} "
            f"over the {draws}, more than {finite.LIMIT:.0%}. Run fewer rounds or a smaller model, "
            "or choose noise that cancels less: the condition number of this factor is "
            f"{np.linalg.cond(plan.factor.astype(np.float64)):.2g}, and "
            "noise.Whisper(max_variance=20) bounds it"
        )
    if plan.guarantee.unsound:  # The paper's rule stays as false as it was.
        return cost
    budget = config.budget
    mu = plan.noise.loss(plan.target).size
    rest = delta - cost.delta
    claimed = budget_.claimed_epsilon(mu, rest, accountant=budget.rule, allow_unsound=True)
    spent = np.maximum(claimed, gdp.epsilon(mu, rest)) + cost.epsilon
    lacking = float(np.max(spent / np.asarray(budget.epsilon))) - 1
    if lacking > 0:
        share = budget.reserve + lacking
        # A grid is a power of two, and may be finer by half under a little more noise.
        enough = min(2 * share, (1 + share) / 2)
        raise ValueError(
            f"reserve is {budget.reserve:g} of epsilon {_validate.shown(budget.epsilon)}, of which "
            f"noise of finite precision takes {up(share, 2)} over the {draws}. Give "
            f"Budget(..., reserve={up(enough, 2)}), run fewer rounds or train a smaller model"
        )
    return cost


@dataclass(frozen=True)
class StoppingRule:
    """What each plan of a run states, fixed before its first round.

    Guarantee: holds for runs stopped by what was released. Where the decision was left to a
    callback that could read metrics of private data, the record says that it is not covered.

    Attributes:
        totals: What each of the V plans states after all of the run's rounds.
        before: What earlier phases have spent, one a plan; None in a first phase.
        planned: Whether all phases were fixed before the first one.
        private: Whether a callback reads metrics of private data.
    """

    totals: tuple[Guarantee, ...]
    before: tuple[Guarantee, ...] | None = None
    planned: bool = False
    private: bool = False

    def at(
        self,
        done: int,
        *,
        decided: bool = False,
        lost: Sequence[tuple[int, float] | None] | None = None,
    ) -> tuple[Guarantee, ...]:
        """What each plan states if the run ends now.

        Args:
            done: Rounds done: all of them, or the end of a chunk.
            decided: True where a callback may have decided it.
            lost: `Guarantee.lost_noise` of each plan; None where none was lost.
        """
        stated = [total.stopped(done) for total in self.totals]
        # A plan without noise states nothing that a stop could weaken.
        for k, bare in enumerate(lost or [None] * len(stated)):
            if stated[k].relation is not None:
                stop = self.private and decided
                stated[k] = stated[k].replace(private_stop=stop, lost_noise=bare)
        if self.before is None:
            return tuple(stated)
        return tuple(
            first.followed_by(second, planned=self.planned)
            for first, second in zip(self.before, stated, strict=True)
        )


def stopping_rule(
    plans: Sequence[Plan],
    ends: Sequence[int],
    *,
    stopping: Stopping,
    callback: bool,
    before: Sequence[Guarantee] | None,
    planned: bool,
    phase: int = 0,
    private: bool = False,
) -> StoppingRule:
    """Fix what a run states, before it begins.

    Args:
        plans: The V plans.
        ends: Rounds at which a callback may stop the run; the last is the number of its rounds,
            fixed beforehand as well.
        stopping: "plan" or "curve".
        callback: Whether there is one.
        before: What earlier phases have spent, one guarantee a plan; None in a first phase.
        planned: Whether all phases were fixed before the first one. They need not be where
            ``before`` states totals that were.
        phase: Number of the run among several in a row.
        private: Whether the callback reads metrics of private data.

    Returns:
        What it states.

    Raises:
        ValueError: For a curve without a callback or in planned phases, or phases that were not
            planned without a total, pass it, or do not compose.
    """
    _validate.one_of("stopping", stopping, get_args(Stopping))
    _validate.flag("planned", planned)
    totals = before is not None and all(spent.phases for spent in before)
    if stopping == "curve" and (not callback or (before is not None and not totals)):
        raise ValueError(
            f"stopping is 'curve' {'in a later phase' if before is not None else 'and no callback'}"
            "; a curve costs epsilon for a callback that may stop a run of one phase, leave it out"
        )
    if planned != (before is not None) and not totals:
        raise ValueError(
            f"planned is {planned} in a {'later' if before is not None else 'first'} phase; say "
            "planned=True where this phase, its length and its noise were fixed before the first "
            "one began, and only then. Others are covered where a total was fixed before the "
            "first one: give guarantees=[first.within(total)], first the first phase's guarantee"
        )
    stated = []
    for plan in plans:
        guarantee = plan.guarantee
        if guarantee.relation is not None:
            guarantee = guarantee.replace(phase=phase)
        if ends[-1] != plan.config.rounds:
            guarantee = guarantee.after(ends[-1])
        if stopping == "curve" and guarantee.relation is not None:
            guarantee = guarantee.stopping_at(ends, shares=_shares(plan, ends))
        stated.append(guarantee)
    # Phases compose whole: a stop leaves the earlier ones as they were.
    result = StoppingRule(
        tuple(stated), None if before is None else tuple(before), planned, private
    )
    # Phases that do not compose or pass a total, or whose finite precision uses up delta, are
    # refused here.
    result.at(ends[-1])
    return result


def _shares(plan: Plan, ends: Sequence[int]) -> list[float] | None:
    """What the rounds up to each end spend at most, for noise correlated over rounds."""
    if plan.strategy is None:
        return None
    # Energies of C's first rows, which rise from round to round.
    total = plan.target.squared_sensitivity(plan.strategy)
    parts = calibration.partial_energies(plan.strategy, plan.config.pattern, ends)
    # A run cut short by stop_at has after all stated its whole plan's loss.
    shares = np.minimum(np.maximum.accumulate(parts) / total * MARGIN, 1.0)
    shares[-1] = 1.0
    return shares.tolist()
