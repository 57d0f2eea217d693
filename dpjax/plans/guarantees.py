"""The guarantee that a plan states, and its audit: computed again from what will be run."""

import warnings
from typing import Any, Literal

import numpy as np

from dpjax import _numerics, _validate
from dpjax.accounting import budget as budget_
from dpjax.accounting import losses, records
from dpjax.accounting.guarantee import Guarantee
from dpjax.accounting.sampled import Phase, Pld
from dpjax.plans import compatibility
from dpjax.plans.calibration import Calibrated, Factored, Target, target_of
from dpjax.plans.config import Config
from dpjax.plans.samplers import Random
from dpjax.topology import mixing as mixing_

__all__: list[str] = []

_REMEDY = "make the plan from one config with plan.make"


def of(config: Config, target: Target, noise: Calibrated) -> Guarantee:
    """The budget as a guarantee, with the loss of the noise that will run.

    Guarantee: the constructor's, which refuses less than the loss says. With sampled batches that
    is of an outsider who knows neither batches nor noise, for zeroing out one record: agent i has
    the sampler's rate and the sensitivity over noise C sqrt([R^-1]_ii) in every round in which it
    may be drawn, times the norm of the strategy's largest column where there is one.

    Args:
        config: The config.
        target: What the noise was made for.
        noise: The noise as it will run.
    """
    budget, terms = target.budget, _terms(config, target, noise)
    if target.rates is not None:
        assert noise.factor is not None  # Samplers with rates join no other noise.
        sampled = target.sampled(noise.factor, noise.strategy)
        return Guarantee.of(epsilon=budget.largest, mu=None, other_loss=sampled, **terms)
    loss = noise.loss(target)
    return Guarantee.of(
        epsilon=budget.largest,
        mu=float(np.max(loss.mu)) if isinstance(loss, budget_.CovarianceLoss) else None,
        other_loss=_additive(loss, config),
        per_agent_epsilon=budget.each,
        unsound=bool(np.max(loss.exact_epsilon) > budget.largest),
        **terms,
    )


def _terms(config: Config, target: Target, noise: Calibrated) -> dict[str, Any]:
    """What a guarantee is about, as its fields: all but how large the loss is."""
    protect, part = config.protect, config.noise
    # Their losses say themselves what the first rounds spend.
    additive = config.accountant in ("pure", "zcdp")
    white = target.rates is not None or additive or noise.white(target)
    return {
        "delta": target.budget.delta,
        "relation": protect.relation,
        "attacker": protect.attacker,
        "gradients": protect.gradients,
        "nodes": protect.nodes,
        "norm": protect.norm,
        "clip_norm": protect.clip_norm,
        "gradient_gap": protect.gradient_gap,
        "smoothness": protect.smoothness,
        "rounds": config.rounds,
        "accountant": config.accountant,
        "release": config.release,
        "participation": None if additive else config.participation,
        "white": white,
        "over_rounds": None if white else over_rounds(config, noise),
        "secrets": "alone" if target.agents == 1 else _secrets(part, noise),
        "dropouts": getattr(part, "dropouts", 0),
        "colluders": getattr(part, "colluders", 0),
        "sealed": getattr(part, "sealed", False),
        "custom": compatibility.custom(config),
    }


def _secrets(part: Any, noise: Calibrated) -> records.Secrets | None:
    """Who draws the noise from which secret; a class of a user's own inherits no promise."""
    states = compatibility.packaged(type(part)) or "secrets" in vars(type(part))
    return getattr(noise, "secrets", None) if states or isinstance(noise, Factored) else None


def over_rounds(config: Config, noise: Calibrated) -> Literal["correlated", "schedule"] | None:
    """Why noise is not white over rounds; None where a design of one's own does not say.

    Args:
        config: The config.
        noise: The noise as it will run, which is not white.
    """
    if noise.strategy is not None:
        return "correlated"
    return "schedule" if compatibility.noise(config.noise).by_round else None


def audit(
    config: Config,
    mixing: np.ndarray,
    noise: Calibrated | None,
    stated: Guarantee,
    counts: np.ndarray | None,
) -> None:
    """Compute the guarantee again from what will be run, and refuse an understatement.

    A plan with a smaller factor, a strategy of larger sensitivity, a larger clip norm, more rounds,
    more participations or a weaker relation than its guarantee states cannot exist.

    Args:
        config: The config.
        mixing: [n, n] or [P, n, n] mixing matrix.
        noise: The noise as it will run; None when non-private.
        stated: The guarantee.
        counts: [n] records of each agent, or None.

    Raises:
        ValueError: Naming what disagrees.
    """
    mixing_.check(mixing, stochastic=config.method.stochastic)
    if (noise is None) != (config.noise is None):
        raise ValueError(
            f"noise is {type(noise).__name__} for a config with noise "
            f"{_validate.shown(config.noise)}; {_REMEDY}"
        )
    if noise is None:
        if np.isfinite(stated.epsilon):
            raise ValueError(
                f"guarantee states epsilon {stated.epsilon} for a config without noise; "
                "use Guarantee.none"
            )
        return
    if counts is None:
        kept_counts(config, None, mixing.shape[-1])
    else:
        config.sampler.check(counts)
    target = target_of(config, mixing, counts)
    noise.check(target)
    for name, value in _terms(config, target, noise).items():
        if value != getattr(stated, name):
            raise ValueError(
                f"guarantee.{name} is {getattr(stated, name)!r}, the config runs {value!r}; "
                f"{_REMEDY}"
            )
    if target.rates is not None:
        _audit_sampled(target, noise, stated)
        return
    loss = noise.loss(target)
    n = target.agents
    claimed = np.broadcast_to(np.asarray(stated.per_agent_epsilon or stated.epsilon), (n,))
    worst = int(np.argmax(np.asarray(loss.epsilon) - claimed))
    if isinstance(loss, budget_.PureLoss):
        said, runs_at, name = getattr(stated.loss, "bound", -1.0), loss.epsilon, "bound"
    elif isinstance(loss, budget_.ConcentratedLoss):
        said, runs_at, name = getattr(stated.loss, "rho", -1.0), loss.rho, "rho"
        _audit_rounds(config, stated.loss)
    else:
        said, runs_at, name = stated.mu, loss.mu, "mu"
    if loss.epsilon[worst] > claimed[worst] or said is None or np.max(runs_at) > said:
        raise ValueError(
            f"guarantee states epsilon {claimed[worst]:.6g} ({name} {said or 0.0:.6g}) for agent "
            f"{worst}, but its noise gives {loss.epsilon[worst]:.6g} ({name} "
            f"{np.max(runs_at):.6g}); {_REMEDY}"
        )


def _audit_rounds(config: Config, stated: Any) -> None:
    """Refuse a concentrated loss that is spread over other rounds than a unit takes part in."""
    dealt = getattr(stated, "participation", None)
    if dealt not in (None, config.participation):
        raise ValueError(
            f"guarantee has participation {dealt}, the config runs {config.participation}; "
            f"{_REMEDY}"
        )
    every = dealt is not None or config.pattern.epochs == config.rounds
    if getattr(stated, "even", True) and not every:
        raise ValueError(
            f"guarantee has {stated}, even over rounds, and a unit takes part in "
            f"{config.pattern.epochs} of {config.rounds}, maybe the first; {_REMEDY}"
        )


def _audit_sampled(target: Target, noise: Calibrated, guarantee: Guarantee) -> None:
    """Refuse a stated loss below that of the factor and the sampler's rates."""
    if not isinstance(noise, Factored):
        raise ValueError(
            f"noise is {type(noise).__name__} for sampled batches; give a covariance over agents, "
            "and a strategy over rounds of few bands or none"
        )
    (runs,) = target.sampled(noise.factor, noise.strategy).phases
    phases = guarantee.loss.phases if isinstance(guarantee.loss, Pld) else ()
    stated = phases[0] if len(phases) == 1 else None
    if stated is None or _of_rounds(stated) != _of_rounds(runs):
        raise ValueError(
            f"guarantee has {_validate.shown(guarantee.loss)}, the config samples {runs.rounds} "
            f"rounds, a record in one of {runs.separation}; {_REMEDY}"
        )
    for name in ("rates", "ratios"):
        runs_at, claimed = np.asarray(getattr(runs, name)), np.asarray(getattr(stated, name))
        worst = int(np.argmax(runs_at - claimed))
        if runs_at[worst] > claimed[worst]:
            raise ValueError(
                f"guarantee states {name} of {claimed[worst]:.6g} for agent {worst}, but sampler, "
                f"counts and factor give {runs_at[worst]:.6g}; {_REMEDY}"
            )


def _of_rounds(phase: Phase) -> tuple[int, int, bool, int]:
    """What must be the same in two accounts of a run."""
    return phase.rounds, phase.separation, phase.whole, len(phase.rates)


def _additive(loss: Any, config: Config) -> losses.Pure | losses.Concentrated | None:
    """A loss that adds up over rounds otherwise than mu, the worst agent's; None for mu."""
    if isinstance(loss, budget_.PureLoss):
        return losses.Pure(float(np.max(loss.epsilon)), config.rounds)
    if isinstance(loss, budget_.ConcentratedLoss):
        # A unit that is not in all rounds may be in the first ones, unless they are dealt.
        dealt = config.participation
        even = dealt is not None or config.pattern.epochs == config.rounds
        return losses.Concentrated(float(np.max(loss.rho)), config.rounds, even, dealt)
    return None


def check_delta(config: Config, agents: int, counts: Any, stacklevel: int = 3) -> None:
    """Warn of a delta above one over the number of units that are protected, where it is known.

    Args:
        config: The config.
        agents: n.
        counts: [n] records of each agent, or None.
        stacklevel: Of the caller to whom the warning points.

    Warns:
        UserWarning: Once.
    """
    unit, units, more = config.protect.unit, None, False
    if unit == "agent":
        units = agents
    elif unit == "record" and counts is not None:
        units = int(np.sum(counts))
    elif unit == "record" and type(config.sampler) is Random:  # Of distinct records.
        units, more = agents * config.sampler.batch_size, True
    elif unit == "client":
        units = agents * getattr(config.sampler, "clients", 1)
    if config.budget is not None and units is not None:
        wrong = _numerics.loose_delta(config.budget.delta, units, unit, more=more)
        if wrong:
            warnings.warn(wrong, UserWarning, stacklevel=stacklevel)


def kept_counts(config: Config, counts: Any, agents: int) -> np.ndarray | None:
    """The records of each agent as a plan keeps them; None where they are not given.

    Args:
        config: The config.
        counts: [n] records of each agent, or None.
        agents: n.

    Raises:
        ValueError: For counts that are missing, no numbers of records, or unfit for the sampler.
    """
    if counts is None:
        if config.sampler.counted or config.sampler.capacity is not None:
            raise ValueError(
                f"counts is None for sampler {config.sampler}, whose rates or divisor depend on "
                "them; give plan.make(config, mixing, counts=shards.counts)"
            )
        return None
    whole = _validate.finite_array("counts", counts, ndim=1)
    if len(whole) != agents or (whole != np.round(whole)).any() or (whole < 1).any():
        raise ValueError(
            f"counts is {_validate.shown(counts)} for {agents} agents; give the number of records "
            "of each"
        )
    records = whole.astype(np.int64)
    config.sampler.check(records)
    config.sampler.holding(int(records.max()))
    return records
