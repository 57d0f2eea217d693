"""The plan of a run: sampler, clipping, noise, algorithm and guarantee, made together.

Only the plan calibrates. It is made once from one frozen config and audits itself: the guarantee
it states is computed again from the very factor that colours the noise, so parts that disagree
are refused before any training.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpjax.accounting import budget, finite
from dpjax.accounting.forecast import Forecast
from dpjax.accounting.guarantee import Guarantee
from dpjax.mechanism import design as design_
from dpjax.plans import export, forecasts, own, releases, strategies
from dpjax.plans import factor as factor_
from dpjax.plans.config import DESIGNS, Config
from dpjax.topology import mixing as mixing_
from dpjax.transforms import rounds as rounds_

__all__ = ["DESIGNS", "Config", "Plan", "audit", "make"]


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A config made concrete; refused when its parts disagree.

    Guarantee: `Guarantee` in ``guarantee``, against an outsider who sees every message on every
    link; it assumes that the run clips at ``config.clip_norm``, samples as ``config.sampler`` says
    and adds ``factor @ (inv(strategy) Z)_t`` in round t, Z ~ N(0, I) for every agent and round,
    independently for every coordinate, as `dpjax.engine.run` does. Gradients may depend on
    everything sent before.

    Attributes:
        config: What it was made from.
        mixing: [n, n] or [P, n, n] mixing matrix, float64.
        factor: [n, n] float32 noise factor F as the run uses it; the covariance is F F'.
        guarantee: What the run guarantees.
        design: The noise design over agents; None when non-private.
        strategy: [T, T] float64 C over rounds, lower triangular; None is the identity.

    Raises:
        ValueError: If the audit fails.
    """

    config: Config
    mixing: np.ndarray
    factor: np.ndarray
    guarantee: Guarantee
    design: design_.Design | None = None
    strategy: np.ndarray | None = None

    def __post_init__(self) -> None:
        """Audit the parts against each other, on copies that nobody can change afterwards."""
        for name in ("mixing", "factor", "strategy"):
            if getattr(self, name) is None:
                continue
            array = np.array(getattr(self, name))
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        audit(self)

    def __repr__(self) -> str:
        """One line: the design, the network's size, the guarantee, the model it affords."""
        affords = self.forecast(1).affords()
        told = "" if np.isinf(affords) else f"; noise allows for {affords:,.0f} parameters"
        if self.grid is not None:
            told += (
                f"; rounded to a grid of {self.grid.spacing:.3g}, which adds "
                f"{self.grid.share:.2g} of itself to the network's mean noise variance"
            )
        stated = self.guarantee.caption(6)
        return f"Plan({self.config.label}, {self.agents} agents, {stated}{told})"

    @property
    def agents(self) -> int:
        """Number of agents n."""
        return self.mixing.shape[-1]

    def covariance(self) -> np.ndarray:
        """Covariance F F' [n, n] of one coordinate's noise over agents, in float64."""
        factor = self.factor.astype(np.float64)
        return factor @ factor.T

    @property
    def applied_strategy(self) -> np.ndarray | None:
        """[T, T] C with its coefficients rounded as the run applies it; None without one.

        In float32, in a release in float64. Accounting of a run's messages
        (`dpjax.accounting.views`) is about this one.
        """
        kind = np.float64 if self.config.release else np.float32
        return None if self.strategy is None else rounds_.applied(self.strategy, kind)

    @functools.cached_property
    def grid(self) -> finite.Grid | None:
        """The grid that a release rounds its noisy sums to, and what it adds; else None."""
        return releases.grid(self)

    def forecast(self, parameters: int, *, counts: Any = None) -> Forecast:
        """Noise in the average model against the largest drift of clipped gradients.

        Reads the plan and no data; see `dpjax.accounting.forecast`.

        Args:
            parameters: d, entries of one agent's model.
            counts: [n] records of each agent, which fill the cyclic sampler's batches; None takes
                full ones.

        Returns:
            The forecast: ``ratio``, ``level``, ``affords()``, ``statement()``.

        Raises:
            ValueError: For a number of parameters below 1, or counts that are not one an agent.
        """
        return forecasts.of_plan(self, parameters, counts)

    def save(self, path: str | os.PathLike[str], labels: Sequence[object] | None = None) -> Path:
        """Write design, terms and instructions to an .npz file for a loop of one's own.

        See `dpjax.plans.export`, which states what it guarantees.

        Args:
            path: Where to; ``.npz`` is appended when there is no suffix.
            labels: [n] names of the sites; None numbers them from 0.

        Returns:
            The path written.

        Raises:
            ValueError: For a non-private plan or a release, or labels that are not n different
                ones.
        """
        return export.save(self, path, labels)

    def fingerprint(self) -> str:
        """SHA-256 of config, mixing, factor and strategy, in hexadecimal."""
        config = json.dumps(dataclasses.asdict(self.config), sort_keys=True, default=repr)
        digest = hashlib.sha256(config.encode())
        digest.update(np.ascontiguousarray(self.mixing).data)
        digest.update(np.ascontiguousarray(self.factor).data)
        if self.strategy is not None:
            digest.update(np.ascontiguousarray(self.strategy).data)
        return digest.hexdigest()


def make(
    config: Config,
    mixing: Any,
    *,
    design: design_.Design | None = None,
    strategy: np.ndarray | None = None,
    covariance: np.ndarray | None = None,
) -> Plan:
    """Make the plan of a config on a network.

    Args:
        config: The mechanism.
        mixing: [n, n] row-stochastic matrix of a connected graph, or [P, n, n], a schedule.
        design: A design made earlier for the same mixing matrix, budget and horizon (a saved
            one, say); made here when None.
        strategy: [T, T] C over rounds made earlier, in place of the one that the config's design
            names, for the designs that have one; made here when None, once for a mixing matrix and
            a participation, whatever the budget.
        covariance: [n, n] R over agents, symmetric positive definite, at any scale, for a config
            with design="covariance"; scaled until it keeps the budget.

    Returns:
        The plan, audited.

    Raises:
        ValueError: If the mixing matrix is unfit, the design is another network's or budget's, or
            the covariance is not symmetric, singular or nearly so.
    """
    matrix = mixing_.check(mixing, stochastic="rows")
    n = matrix.shape[-1]
    if strategy is not None and config.design not in strategies.DESIGNS:
        raise ValueError(
            f"strategy is given for design {config.design!r}, whose noise is fresh in every round; "
            f"leave it out, or choose one of {', '.join(strategies.DESIGNS)}"
        )
    own.check(config.design, config.name, covariance, design)
    if config.design == "non_private":
        if design is not None:
            raise ValueError("design is given for a non_private config; leave it out")
        return Plan(config, matrix, np.zeros((n, n), np.float32), Guarantee.none(config.rounds))
    kind, joint = config.design, None
    if config.design in strategies.DESIGNS:
        kind = "spacetime" if config.design == "spacetime" else "independent"
        made = strategies.make(config.design, matrix, config.pattern, given=strategy)
        strategy, joint = made.strategy, made.covariance
    bound = config.precision_bound(strategy)
    if bound.ndim and len(bound) != n:
        raise ValueError(f"epsilon has {len(bound)} entries for {n} agents; give one an agent")
    horizon = config.horizon or config.rounds if config.design == "whisper_horizon" else None
    if design is None:
        options: dict[str, Any] = {}
        if config.max_variance is not None:
            options["max_variance"] = config.max_variance
        if config.subgroups is not None:
            options["subgroups"] = config.subgroups
        if horizon is not None and config.step_decay == "sqrt":
            options["step_sizes"] = 1 / np.sqrt(np.arange(1, horizon + 1))
        if joint is not None:
            design = strategies.spatial(matrix, joint, bound)
        elif covariance is not None:
            design = own.design(covariance, matrix, bound, config.label)
        else:
            design = design_.make(kind, matrix, bound, horizon=horizon, **options)
    elif design.kind != kind or design.horizon != horizon:
        raise ValueError(
            f"design is {design.kind!r} with horizon {design.horizon}, the config asks for "
            f"{kind!r} with horizon {horizon}; make a design for this config"
        )
    design.check(matrix, bound)
    groups = None if config.subgroups is None else [list(group) for group in config.subgroups]
    if design.options.get("subgroups") != groups:
        raise ValueError(
            f"design has subgroups {design.options.get('subgroups')}, the config {groups}; make a "
            "design for this config"
        )
    factor = factor_.rounded(design.covariance, bound)
    guarantee = _guarantee(config, factor, strategy)
    return Plan(config, matrix, factor, guarantee, design, strategy)


def _guarantee(config: Config, factor: np.ndarray, strategy: np.ndarray | None) -> Guarantee:
    loss = _loss(config, factor, strategy)
    epsilon = float(np.max(config.epsilon))
    return Guarantee(
        epsilon=epsilon,
        delta=config.delta,
        mu=float(np.max(loss.mu)),
        relation=config.relation,
        attacker="outsider",
        rounds=config.rounds,
        clip_norm=config.clip_norm,
        accountant=config.accountant,
        release=config.release,
        per_agent_epsilon=config.epsilon if isinstance(config.epsilon, tuple) else None,
        white=strategy is None,
        unsound=bool(np.max(loss.exact_epsilon) > epsilon),
        participation=config.participation,
    )


def _loss(config: Config, factor: np.ndarray, strategy: np.ndarray | None) -> budget.Loss:
    return budget.loss(
        None,
        config.delta,
        clip_norm=config.clip_norm,
        relation=config.relation,
        accountant=config.accountant,
        factor=factor.astype(np.float64),
        allow_unsound=config.allow_unsound,
        sensitivity_squared=config.over_rounds(strategy),
    )


def audit(plan: Plan) -> None:
    """Compute the guarantee again from what will be run, and refuse an understatement.

    Args:
        plan: The plan; called by its constructor, so a plan with a smaller factor, a strategy of
            larger sensitivity, a larger clip norm, more rounds, more participations or a weaker
            relation than its guarantee states cannot exist.

    Raises:
        ValueError: Naming what disagrees.
    """
    config, stated = plan.config, plan.guarantee
    matrix = mixing_.check(plan.mixing, stochastic="rows")
    n = matrix.shape[-1]
    if plan.factor.shape != (n, n) or plan.factor.dtype != np.float32:
        raise ValueError(
            f"factor is {plan.factor.dtype} {plan.factor.shape}; give float32 {(n, n)}"
        )
    strategies.check(plan.strategy, config.rounds)
    if config.design == "non_private":
        if plan.strategy is not None or np.any(plan.factor) or np.isfinite(stated.epsilon):
            raise ValueError(
                f"guarantee states epsilon {stated.epsilon} for a non_private config; "
                "use Guarantee.none"
            )
        return
    if stated.white != (plan.strategy is None):
        raise ValueError(
            f"guarantee.white is {stated.white} for a plan "
            f"{'without' if plan.strategy is None else 'with'} a strategy; make the plan from one "
            "config with plan.make"
        )
    names = ("relation", "rounds", "clip_norm", "delta", "unit", "accountant", "release")
    for name in (*names, "participation"):
        mine, theirs = getattr(config, name), getattr(stated, name)
        if mine != theirs:
            raise ValueError(
                f"guarantee.{name} is {theirs!r}, the config runs {mine!r}; make the plan from "
                "one config with plan.make"
            )
    loss = _loss(config, plan.factor, plan.strategy)
    claimed = np.broadcast_to(np.asarray(stated.per_agent_epsilon or stated.epsilon), (n,))
    worst = int(np.argmax(np.asarray(loss.epsilon) - claimed))
    if loss.epsilon[worst] > claimed[worst] or np.max(loss.mu) > stated.mu:
        raise ValueError(
            f"guarantee states epsilon {claimed[worst]:.6g} (mu {stated.mu:.6g}) for agent "
            f"{worst}, but factor and strategy give {loss.epsilon[worst]:.6g} (mu "
            f"{np.max(loss.mu):.6g}); make the plan from one config with plan.make"
        )


def statics(plans: Sequence[Plan]) -> dict[str, Any]:
    """What plans must share to run in one call, from the first; used by `dpjax.engine.run`.

    Args:
        plans: At least one plan.

    Returns:
        The shared settings.

    Raises:
        ValueError: If there is none, or they differ, naming the setting.
    """
    if not plans:
        raise ValueError("plans is empty; give at least one plan")
    names = (
        *("rounds", "clip_norm", "batch_size", "step_decay", "clipping", "microbatch"),
        *("participation", "sampler", "unit"),
    )

    def of(plan: Plan) -> dict[str, Any]:
        values = {name: getattr(plan.config, name) for name in names}
        strategy = None if plan.strategy is None else mixing_.fingerprint(plan.strategy)[:12]
        return values | {"mixing": plan.mixing.shape, "strategy": strategy}

    shared = of(plans[0])
    for plan in plans[1:]:
        other = of(plan)
        for name, value in shared.items():
            if other[name] != value:
                raise ValueError(
                    f"plans differ in {name} ({value!r} and {other[name]!r}); run them apart"
                )
    participation = shared["participation"]
    return shared | {"separation": None if participation is None else participation[1]}
