"""The audit of a plan: its guarantee, computed again from what will be run."""

from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax import _validate
from dpjax.accounting.budget import ConcentratedLoss, PureLoss
from dpjax.accounting.sampled import Phase, Pld
from dpjax.plans import compatibility, dependence, guarantees
from dpjax.plans.calibration import Factored
from dpjax.topology import mixing as mixing_

if TYPE_CHECKING:
    from dpjax.plans.plan import Plan

__all__: list[str] = []


def audit(plan: "Plan") -> None:
    """Compute the guarantee again from what will be run, and refuse an understatement.

    Args:
        plan: The plan; called by its constructor, so a plan with a smaller factor, a strategy of
            larger sensitivity, a larger clip norm, more rounds, more participations or a weaker
            relation than its guarantee states cannot exist.

    Raises:
        ValueError: Naming what disagrees.
    """
    config, guarantee = plan.config, plan.guarantee
    method: Any = plan.method  # Hashable, as all parts are.
    dependence.check_method(method, config.optimizer.shared(), plan.mixing.shape, config.coded)
    matrix = mixing_.check(plan.mixing, stochastic=config.method.stochastic)
    n = matrix.shape[-1]
    if (plan.noise is None) != (config.noise is None):
        raise ValueError(
            f"noise is {type(plan.noise).__name__} for a config with noise "
            f"{_validate.shown(config.noise)}; make the plan from one config with plan.make"
        )
    if plan.noise is None:
        if np.isfinite(guarantee.epsilon):
            raise ValueError(
                f"guarantee states epsilon {guarantee.epsilon} for a config without noise; "
                "use Guarantee.none"
            )
        return
    wanted = plan.target
    plan.noise.check(wanted)
    _stated(plan)
    if plan.counts is None and (config.sampler.counted or config.sampler.capacity is not None):
        raise ValueError(
            f"counts is None for sampler {config.sampler}; make the "
            "plan with plan.make(config, mixing, counts=shards.counts)"
        )
    if plan.counts is not None:
        config.sampler.check(plan.counts)
    if config.sampler.capacity is not None:
        _sampled(plan)
        return
    loss = plan.noise.loss(wanted)
    claimed = np.broadcast_to(np.asarray(guarantee.per_agent_epsilon or guarantee.epsilon), (n,))
    worst = int(np.argmax(np.asarray(loss.epsilon) - claimed))
    if isinstance(loss, PureLoss):
        said, runs_at, name = getattr(guarantee.loss, "bound", -1.0), loss.epsilon, "bound"
    elif isinstance(loss, ConcentratedLoss):
        said, runs_at, name = getattr(guarantee.loss, "rho", -1.0), loss.rho, "rho"
        dealt = getattr(guarantee.loss, "participation", None)
        if dealt not in (None, config.participation):
            raise ValueError(
                f"guarantee has participation {dealt}, the config runs {config.participation}; "
                "make the plan from one config with plan.make"
            )
        every = dealt is not None or config.pattern.epochs == config.rounds
        if getattr(guarantee.loss, "even", True) and not every:
            raise ValueError(
                f"guarantee has {guarantee.loss}, even over rounds, and a unit takes part in "
                f"{config.pattern.epochs} of {config.rounds}, maybe the first; make the plan from "
                "one config with plan.make"
            )
    else:
        said, runs_at, name = guarantee.mu, loss.mu, "mu"
    if loss.epsilon[worst] > claimed[worst] or said is None or np.max(runs_at) > said:
        raise ValueError(
            f"guarantee states epsilon {claimed[worst]:.6g} ({name} {said or 0.0:.6g}) for agent "
            f"{worst}, but its noise gives {loss.epsilon[worst]:.6g} ({name} "
            f"{np.max(runs_at):.6g}); make the plan from one config with plan.make"
        )


def _stated(plan: "Plan") -> None:
    """Refuse a guarantee of something else than what will be run."""
    config, wanted = plan.config, plan.target
    protect = config.protect
    assert plan.noise is not None
    # Their losses say themselves what the first rounds spend.
    additive = config.accountant in ("pure", "zcdp")
    white = wanted.rates is not None or additive or plan.noise.white(wanted)
    runs = {
        "relation": protect.relation,
        "rounds": config.rounds,
        "clip_norm": protect.clip_norm,
        "delta": wanted.budget.delta,
        "unit": protect.unit,
        "accountant": config.accountant,
        "release": config.release,
        "participation": None if additive else config.participation,
        "attacker": protect.attacker,
        "gradients": protect.gradients,
        "nodes": protect.nodes,
        # Of sampled rounds the loss says itself what the first ones spend.
        "white": white,
        "over_rounds": None if white else guarantees.over_rounds(config, plan.noise),
        "secrets": guarantees.secrets_of(plan.noise, plan.agents),
        "norm": protect.norm,
        "gradient_gap": protect.gradient_gap,
        "smoothness": protect.smoothness,
        "custom": compatibility.custom(config),
        **guarantees.of_sums(config),
    }
    for name, mine in runs.items():
        if mine != (theirs := getattr(plan.guarantee, name)):
            raise ValueError(
                f"guarantee.{name} is {theirs!r}, the config runs {mine!r}; make the plan from "
                "one config with plan.make"
            )


def _sampled(plan: "Plan") -> None:
    """Refuse a stated loss below that of the factor and the sampler's rates."""
    if not isinstance(plan.noise, Factored):
        raise ValueError(
            f"noise is {type(plan.noise).__name__} for sampler {plan.config.sampler}; give a "
            "covariance over agents, and a strategy over rounds of few bands or none"
        )
    loss = plan.guarantee.loss
    (runs,) = plan.target.sampled(plan.factor, plan.strategy).phases
    phases = loss.phases if isinstance(loss, Pld) else ()
    said = phases[0] if len(phases) == 1 else None
    if said is None or _of_rounds(said) != _of_rounds(runs):
        raise ValueError(
            f"guarantee has {_validate.shown(loss)}, the config samples {runs.rounds} rounds, a "
            f"record in one of {runs.separation}; make the plan from one config with plan.make"
        )
    for name in ("rates", "ratios"):
        excess = np.asarray(getattr(runs, name)) - np.asarray(getattr(said, name))
        worst = int(np.argmax(excess))
        if excess[worst] > 0:
            raise ValueError(
                f"guarantee states {name} of {getattr(said, name)[worst]:.6g} for agent {worst}, "
                f"but sampler, counts and factor give {getattr(runs, name)[worst]:.6g}; make the "
                "plan from one config with plan.make"
            )


def _of_rounds(phase: Phase) -> tuple[int, int, bool, int]:
    """What must be the same in two accounts of a run."""
    return phase.rounds, phase.separation, phase.whole, len(phase.rates)
