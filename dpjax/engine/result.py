"""What a run leaves, and what its callback sees on the way."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dpjax.accounting.guarantee import Guarantee
from dpjax.plans.plan import Plan

__all__: list[str] = []


class Progress(NamedTuple):
    """What a callback sees at a chunk's end: metrics only, never data, models or keys.

    Attributes:
        round: Rounds done.
        metrics: name -> [S, V], the latest.
        guarantees: What each of the V plans states if the run ends here because of it, see
            ``stopping`` of `dpjax.engine.run.run`.
        rounds_per_second: One seed's round of one plan counts one; this process only.
    """

    round: int
    metrics: dict[str, np.ndarray]
    guarantees: tuple[Guarantee, ...]
    rounds_per_second: float


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """What a run leaves.

    Attributes:
        plans: The V plans.
        seeds: The S seeds.
        rounds: [E] rounds at which metrics were taken.
        metrics: name -> [E, S, V].
        guarantees: What each plan states: its own guarantee, also after an early stop, which
            anything seen on the way may have decided; less only where the rounds were fixed
            beforehand (``stop_at``) or a curve over marks was (``stopping="curve"``).
        params: What the method releases at the end, the agents' models as a rule, leaves
            [S, V, n, ...]: functions of messages, which the guarantee covers. Under
            gradients="view" the agents' own models, which it does not.
        seconds: Time in the compiled loop, this process only, compilation included.
        rounds_per_second: One seed's round of one plan counts one; the first chunk, which
            compiles, is left out where there is a second one.
        ended: False when a callback stopped the run.
    """

    plans: tuple[Plan, ...]
    seeds: tuple[int, ...]
    rounds: np.ndarray
    metrics: dict[str, np.ndarray]
    guarantees: tuple[Guarantee, ...]
    params: Any
    seconds: float
    rounds_per_second: float
    ended: bool

    def __repr__(self) -> str:
        """One line: how many runs, how far, which metrics."""
        return (
            f"Result({len(self.plans)} plans, {len(self.seeds)} seeds, {self.rounds[-1]} rounds, "
            f"metrics {', '.join(self.metrics)})"
        )

    def rows(self, **extra: Any) -> list[dict[str, Any]]:
        """Tidy rows, one for each plan, seed and measured round.

        Args:
            extra: Columns to add to every row; ``algorithm`` takes the place of the design's name.

        Returns:
            Rows of plain Python values.

        Raises:
            ValueError: For a column that the result states itself, or one ``algorithm`` for plans
                of several designs.
        """
        rows = []
        if "algorithm" in extra and len({plan.config.label for plan in self.plans}) > 1:
            raise ValueError(
                f"algorithm is {extra['algorithm']!r} for plans of several designs, which it would "
                "not tell apart; leave it out"
            )
        for v, plan in enumerate(self.plans):
            config, budget = plan.config, plan.config.budget
            columns = {
                "algorithm": config.label,
                "agents": plan.agents,
                # Several phases together, and a curve's last numbers, are above the plan's.
                "epsilon": max(plan.guarantee.epsilon, self.guarantees[v].epsilon),
                "delta": 0.0 if budget is None else budget.delta,
                "budget": config.accountant or "none",
                "relation": config.protect.relation,
                "unit": config.protect.unit,
                "step_size": config.optimizer.first,
                "guarantee": self.guarantees[v].to_dict(),
            }
            own = [*columns, "seed", "round", *self.metrics]
            for name in extra:
                if name in own and name != "algorithm":
                    raise ValueError(
                        f"{name} is {extra[name]!r}, a column that the result states itself; give "
                        "it another name"
                    )
            columns = {**extra, **columns, "algorithm": extra.get("algorithm", config.label)}
            for s, seed in enumerate(self.seeds):
                for e, rounds in enumerate(self.rounds):
                    taken = {name: float(value[e, s, v]) for name, value in self.metrics.items()}
                    rows.append({**columns, "seed": seed, "round": int(rounds), **taken})
        return rows
