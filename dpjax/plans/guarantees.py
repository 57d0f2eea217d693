"""The guarantee that a plan states, from its config, its noise and what it knows of the data."""

import warnings
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dpjax import _rounding, _validate
from dpjax.accounting import budget as budget_
from dpjax.accounting import losses, records
from dpjax.accounting.guarantee import Guarantee
from dpjax.plans import compatibility
from dpjax.plans.calibration import Calibrated, Target
from dpjax.plans.samplers import Random

if TYPE_CHECKING:
    from dpjax.plans.config import Config

__all__: list[str] = []


def of(config: "Config", target: Target, noise: Calibrated) -> Guarantee:
    """The budget as a guarantee, with the loss of the noise that will run.

    Other agents are protected as `secrets_of` says.

    Guarantee: the constructor's, which refuses less than the loss says. With sampled batches that
    is of an outsider who knows neither batches nor noise, for zeroing out one record: agent i has
    the sampler's rate and the sensitivity over noise C sqrt([R^-1]_ii) in every round in which it
    may be drawn, times the norm of the strategy's largest column where there is one.

    Args:
        config: The config.
        target: What the noise was made for.
        noise: The noise as it will run.
    """
    budget = target.budget
    if target.rates is not None:
        assert noise.factor is not None  # Samplers with rates join no other noise.
        return Guarantee.of(
            epsilon=budget.largest,
            delta=budget.delta,
            mu=None,
            relation=config.protect.relation,
            attacker=config.protect.attacker,
            rounds=config.rounds,
            clip_norm=config.protect.clip_norm,
            accountant="pld",
            release=config.release,
            other_loss=target.sampled(noise.factor, noise.strategy),
            custom=compatibility.custom(config),
            secrets=secrets_of(noise, target.agents),
        )
    loss = noise.loss(target)
    mu, other = None, _additive(loss, config)
    if isinstance(loss, budget_.CovarianceLoss):
        mu = float(np.max(loss.mu))
    white = other is not None or noise.white(target)
    return Guarantee.of(
        epsilon=budget.largest,
        delta=budget.delta,
        mu=mu,
        other_loss=other,
        norm=config.protect.norm,
        gradient_gap=config.protect.gradient_gap,
        smoothness=config.protect.smoothness,
        relation=config.protect.relation,
        attacker=config.protect.attacker,
        gradients=config.protect.gradients,
        nodes=config.protect.nodes,
        rounds=config.rounds,
        clip_norm=config.protect.clip_norm,
        accountant=budget.accountant,
        release=config.release,
        per_agent_epsilon=budget.each,
        white=white,
        over_rounds=None if white else over_rounds(config, noise),
        secrets=secrets_of(noise, target.agents),
        unsound=bool(np.max(loss.exact_epsilon) > budget.largest),
        participation=None if other is not None else config.participation,
        custom=compatibility.custom(config),
        **of_sums(config),
    )


def secrets_of(noise: Calibrated, agents: int) -> records.Secrets | None:
    """Who draws the noise from which secret; None where a design of one's own does not say.

    Args:
        noise: The noise as it will run.
        agents: n.
    """
    return "alone" if agents == 1 else getattr(noise, "secrets", None)


def over_rounds(config: "Config", noise: Calibrated) -> Literal["correlated", "schedule"] | None:
    """Why noise is not white over rounds; None where a design of one's own does not say.

    Args:
        config: The config.
        noise: The noise as it will run, which is not white.
    """
    if noise.strategy is not None:
        return "correlated"
    return "schedule" if compatibility.noise(config.noise).by_round else None


def of_sums(config: "Config") -> dict[str, Any]:
    """What a guarantee of sums counts on, as its fields: who is there, and that nobody sees parts.

    Args:
        config: The config.
    """
    part = config.noise
    return {
        "dropouts": getattr(part, "dropouts", 0),
        "colluders": getattr(part, "colluders", 0),
        "sealed": getattr(part, "sealed", False),
    }


def _additive(loss: Any, config: "Config") -> losses.Pure | losses.Concentrated | None:
    """A loss that adds up over rounds otherwise than mu, the worst agent's; None for mu."""
    if isinstance(loss, budget_.PureLoss):
        return losses.Pure(float(np.max(loss.epsilon)), config.rounds)
    if isinstance(loss, budget_.ConcentratedLoss):
        # A unit that is not in all rounds may be in the first ones, unless they are dealt.
        dealt = config.participation
        even = dealt is not None or config.pattern.epochs == config.rounds
        return losses.Concentrated(float(np.max(loss.rho)), config.rounds, even, dealt)
    return None


def check_delta(config: "Config", agents: int, counts: Any, stacklevel: int = 3) -> None:
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
        wrong = _rounding.loose_delta(config.budget.delta, units, unit, more=more)
        if wrong:
            warnings.warn(wrong, UserWarning, stacklevel=stacklevel)


def kept_counts(config: "Config", counts: Any, agents: int) -> np.ndarray | None:
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
