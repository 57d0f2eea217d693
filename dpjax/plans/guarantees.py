"""The guarantee that a plan states, and its audit: computed again from what will be run."""

import dataclasses
import warnings
from typing import Any, NamedTuple

import numpy as np

from dpjax import _numerics, _validate
from dpjax.accounting import losses
from dpjax.accounting.guarantee import Guarantee
from dpjax.accounting.records import Threat
from dpjax.plans import compatibility
from dpjax.plans.calibration import Calibrated, Factored, Target
from dpjax.plans.config import Config
from dpjax.plans.samplers import Random
from dpjax.topology import mixing as mixing_

__all__: list[str] = []

_REMEDY = "make the plan from one config with plan.make"
_AMOUNTS = ("mu", "rho", "bound", "rates", "ratios")
"""Fields of losses that may be stated larger than they are; all others must agree."""


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
    budget, spent = target.budget, _spent(config, target, noise)
    loss: Any = {"other_loss": spent.loss}
    if isinstance(spent.loss, losses.Gaussian):
        loss = {"mu": spent.loss.mu}
    return Guarantee.of(
        epsilon=budget.largest,
        per_agent_epsilon=budget.each,
        unsound=bool(np.max(spent.exact) > budget.largest),
        **loss,
        **_terms(config, target, noise),
    )


class _Spent(NamedTuple):
    """What the very arrays that run cost.

    Attributes:
        loss: The worst agent's, or all agents' where batches are sampled.
        epsilon: [n] epsilon by the accountant; 0 where the loss alone says it.
        exact: [n] exact epsilon.
    """

    loss: losses.AnyLoss
    epsilon: Any = 0.0
    exact: Any = 0.0


def _spent(config: Config, target: Target, noise: Calibrated) -> _Spent:
    if target.rates is not None:
        if not isinstance(noise, Factored):
            raise ValueError(
                f"noise is {type(noise).__name__} for sampled batches; give a covariance over "
                "agents, and a strategy over rounds of few bands or none"
            )
        return _Spent(noise.sampled_loss(target))
    loss, rounds, dealt = noise.loss(target), config.rounds, config.participation
    size = float(np.max(loss.size))
    if loss.kind == "pure":
        total: losses.AnyLoss = losses.Pure(size, rounds)
    elif loss.kind == "zcdp":
        # A unit that is not in all rounds may be in the first ones, unless they are dealt.
        even = dealt is not None or config.pattern.epochs == rounds
        total = losses.Concentrated(size, rounds, even, dealt)
    else:
        white, over_rounds = _over_rounds(config, target, noise)
        total = losses.Gaussian(size, rounds, white, dealt, over_rounds)
    return _Spent(total, loss.epsilon, loss.exact_epsilon)


def _over_rounds(config: Config, target: Target, noise: Calibrated) -> tuple[bool, Any]:
    """Whether rounds spend apart, and why not; None where a design of a user's does not say."""
    # The losses of some say themselves what the first rounds spend.
    if target.rates is not None or config.accountant in ("pure", "zcdp") or noise.white(target):
        return True, None
    if noise.strategy is not None:
        return False, "correlated"
    return False, "schedule" if compatibility.noise(config.noise).by_round else None


def _terms(config: Config, target: Target, noise: Calibrated) -> dict[str, Any]:
    """What a guarantee is about, as its fields: all but how large the loss is."""
    protect, part = config.protect, config.noise
    white, over_rounds = _over_rounds(config, target, noise)
    # A class of a user's own inherits no promise.
    states = compatibility.packaged(type(part)) or "secrets" in vars(type(part))
    secrets = getattr(noise, "secrets", None) if states or isinstance(noise, Factored) else None
    threat = {one.name: getattr(protect, one.name) for one in dataclasses.fields(Threat)}
    return threat | {
        "delta": target.budget.delta,
        "rounds": config.rounds,
        "accountant": config.accountant,
        "release": config.release,
        "participation": None if config.accountant in ("pure", "zcdp") else config.participation,
        "white": white,
        "over_rounds": over_rounds,
        "secrets": "alone" if target.agents == 1 else secrets,
        "dropouts": getattr(part, "dropouts", 0),
        "colluders": getattr(part, "colluders", 0),
        "sum_only": getattr(part, "sum_only", False),
        "custom": compatibility.custom(config),
    }


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
    target = Target(config, mixing, checked_counts(config, counts, mixing.shape[-1]))
    correlated = isinstance(noise, Factored)
    part = None if correlated else getattr(noise, "part", config.noise)
    own_keys = correlated and noise.secrets == "own"
    compatibility.check_noise(part, config.method, config.protect, own_keys=own_keys)
    noise.check(target)
    spent = _spent(config, target, noise)
    (runs, expected), (claims, claimed) = _split(spent.loss), _split(stated.loss)
    for name, value in (_terms(config, target, noise) | expected).items():
        other = claimed.get(name, getattr(stated, name, None))
        if value != other:
            raise ValueError(f"guarantee.{name} is {other!r}, the config runs {value!r}; {_REMEDY}")
    runs = {"epsilon": spent.epsilon, **runs}
    claims["epsilon"] = stated.per_agent_epsilon or stated.epsilon
    for name, amount in runs.items():
        pair = np.broadcast_arrays(amount, claims.get(name, -1.0), np.zeros(target.agents))
        worst = int(np.argmax(pair[0] - pair[1]))
        if pair[0][worst] > pair[1][worst]:
            raise ValueError(
                f"guarantee states {name} {pair[1][worst]:.6g} for agent {worst}, but its noise "
                f"gives {pair[0][worst]:.6g}; {_REMEDY}"
            )


def _split(loss: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """How large a loss is, and all else that it says."""
    phases = getattr(loss, "phases", (loss,))
    fields = dict(vars(phases[0]), kind=loss.kind, phases=len(phases))
    amounts = {name: fields.pop(name) for name in _AMOUNTS if name in fields}
    return amounts, fields


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
    unit, sampler, more = config.protect.unit, config.sampler, False
    units: int | None = agents * getattr(sampler, "clients", 1) if unit == "client" else agents
    if unit == "record":
        units = None if counts is None else int(np.sum(counts))
        if counts is None and type(sampler) is Random:  # Of distinct records.
            units, more = agents * sampler.batch_size, True
    if config.budget is not None and units is not None:
        wrong = _numerics.loose_delta(config.budget.delta, units, unit, more=more)
        if wrong:
            warnings.warn(wrong, UserWarning, stacklevel=stacklevel)


def checked_counts(config: Config, counts: Any, agents: int) -> np.ndarray | None:
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
