"""What a run states about its privacy, at its end or wherever it was stopped."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dpjax import _validate
from dpjax._numerics import MARGIN
from dpjax.accounting.guarantee import Guarantee
from dpjax.plans import strategies
from dpjax.plans.plan import Plan

__all__: list[str] = []

Stopping = Literal["plan", "curve"]

STOPPING = ("plan", "curve")
"""What a run that may be stopped states; see `dpjax.engine.run.run`."""


@dataclass(frozen=True)
class StoppingRule:
    """What each plan of a run states, fixed before its first round.

    Guarantee: holds for runs stopped by what was released. Where the decision was left to a
    callback that could read metrics of private data, the record says that it is not covered.

    Attributes:
        whole: What each of the V plans states after all of the run's rounds.
        before: What earlier phases have spent, one a plan; None in a first phase.
        planned: Whether all phases were fixed before the first one.
        private: Whether a callback reads metrics of private data.
    """

    whole: tuple[Guarantee, ...]
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
        now = [
            one
            if one.relation is None
            else one.replace(private_stop=self.private and decided, lost_noise=bare)
            for one, bare in zip(
                (whole.stopped(done) for whole in self.whole),
                lost or [None] * len(self.whole),
                strict=True,
            )
        ]
        if self.before is None:
            return tuple(now)
        return tuple(
            first.followed_by(second, planned=self.planned)
            for first, second in zip(self.before, now, strict=True)
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
    _validate.one_of("stopping", stopping, STOPPING)
    _validate.flag("planned", planned)
    totals = before is not None and all(one.phases for one in before)
    if stopping == "curve" and (not callback or (before is not None and not totals)):
        raise ValueError(
            f"stopping is 'curve' {'in a later phase' if before is not None else 'and no callback'}"
            "; a curve costs epsilon for a callback that may stop a run of one phase, leave it out"
        )
    if planned != (before is not None) and not totals:
        raise ValueError(
            f"planned is {planned} and spent is {'given' if before is not None else 'None'}; say "
            "planned=True where this phase, its length and its noise were fixed before the first "
            "one began, and only then. A phase added because of what was released is covered where "
            "a total was fixed before the first one: give spent=[first.within(total)], with "
            "first the guarantee of the first phase"
        )
    rounds = ends[-1]
    whole = []
    for plan in plans:
        one = plan.guarantee
        if rounds != plan.config.rounds:
            one = one.after(rounds)
        if stopping == "curve" and one.relation is not None:
            one = one.stopping_at(ends, shares=_shares(plan, ends))
        whole.append(one if one.relation is None else one.replace(phase=phase))
    result = StoppingRule(tuple(whole), None if before is None else tuple(before), planned, private)
    # Phases that do not compose or pass a total, or whose finite precision uses up delta, are
    # refused here.
    result.at(rounds)
    return result


def check_stop_at(stop_at: int | None, rounds: int) -> int:
    """Return the number of rounds that a run of a plan's rounds does.

    Args:
        stop_at: A number of rounds fixed beforehand; None is all.
        rounds: Rounds T of the plan.

    Raises:
        ValueError: For more rounds than are planned.
    """
    if stop_at is None:
        return rounds
    if _validate.integer("stop_at", stop_at) > rounds:
        raise ValueError(f"stop_at is {stop_at}, the plan covers {rounds}; plan the longer run")
    return stop_at


def _shares(plan: Plan, ends: Sequence[int]) -> list[float] | None:
    """What the rounds up to each end spend at most, for noise correlated over rounds."""
    if plan.strategy is None:
        return None
    whole = plan.target.over_rounds(plan.strategy)
    parts = strategies.partial_energies(plan.strategy, plan.config.pattern, ends)
    # A run cut short by stop_at has after all stated its whole plan's loss.
    shares = np.minimum(np.maximum.accumulate(parts) / whole * MARGIN, 1.0)
    shares[-1] = 1.0
    return [float(share) for share in shares]
