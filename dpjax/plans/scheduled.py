"""Noise whose scale changes by round: Laplace for pure DP, and its Gaussian twin.

A schedule says how the scales go; a budget decides by what they are multiplied, once the method has
said how far its private payload moves in each round.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from dpjax import _validate
from dpjax.accounting import budget as budget_
from dpjax.accounting import pure
from dpjax.plans.calibration import ByFactor, Calibrated, DrawnNoise, PerAgent, Target
from dpjax.plans.compatibility import SCHEDULED
from dpjax.plans.config import Config
from dpjax.plans.protect import Budget
from dpjax.protocols import Arrays, Counts, Look, Privatizer, Updates
from dpjax.topology.mixing import Mixing
from dpjax.transforms import noise as noise_
from dpjax.transforms.variates import AgentRows

__all__ = ["LostNoiseWarning", "ScheduledGaussian", "ScheduledLaplace", "cost"]

_ROUNDING = 1 + 2.0**-20
"""More than the float32 steps of a run are off those of the optimizer."""


class LostNoiseWarning(UserWarning):
    """Noise is finer than the numbers that it is added to, which then are sent without it.

    Example:
        >>> from dpjax.plans.scheduled import LostNoiseWarning
        >>> issubclass(LostNoiseWarning, UserWarning)
        True
    """


@dataclass(frozen=True)
class _Scheduled:
    """What `ScheduledLaplace` and `ScheduledGaussian` share.

    Attributes:
        schedule: The ratio of a round's scale to the one before, in (0, 1]: q2 of a geometric
            schedule, 1 for scales that stay. Or the scales relative to each other, one a round; 0
            in rounds whose payload cannot move, as of tracking the first, and one after a step of
            0: no noise is drawn there.
    """

    schedule: float | tuple[float, ...] = 1.0

    label = ""
    """What records, plans and the command line call the design."""
    paper = ""
    """What its paper calls it; "" where it is of no paper."""
    temporal = True
    kind: ClassVar[noise_.Kind]
    total: ClassVar[Callable[..., float]]
    """``total(sensitivities, scales)``: epsilon or mu of all rounds together."""
    _spent = staticmethod(Budget.spent)
    """``_spent(budget, totals)``: what agents lose by a budget's accountant."""

    def __post_init__(self) -> None:
        """Refuse what is no schedule, and keep plain numbers."""
        schedule: Any = _validate.numbers("schedule", self.schedule)
        # Scales that rise are given as a list, since a ratio starts at the largest.
        if schedule is None:
            schedule = _validate.positive("schedule", self.schedule)
            fits = schedule <= 1
        else:
            fits = min(schedule) >= 0 and max(schedule) > 0
        if not fits:
            raise _validate.refusal(
                "schedule",
                self.schedule,
                "give a ratio of at most 1, or relative scales, one a round, none below 0 and one "
                "above",
            )
        _validate.assign(self, schedule=schedule)

    def relative(self, rounds: int) -> Float[np.ndarray, " t"]:
        """Scales over the largest one.

        Args:
            rounds: Rounds T.

        Raises:
            ValueError: For another number of scales.
        """
        if not isinstance(self.schedule, tuple):
            return self.schedule ** np.arange(rounds, dtype=np.float64)
        if len(self.schedule) != rounds:
            raise ValueError(
                f"schedule has {len(self.schedule)} scales for {rounds} rounds; give one a round"
            )
        return np.asarray(self.schedule) / max(self.schedule)

    def _allowed(self, budget: Budget) -> float:
        """The largest total that keeps a budget, by default a mu."""
        return float(budget.allowed_mu())

    def calibrate(self, target: Target) -> "_ScheduledNoise":
        """Make the noise for a budget.

        Args:
            target: What it is for.

        Returns:
            The noise, at the least float32 scales that keep the budget.

        Raises:
            ValueError: For one epsilon an agent, an accountant or a
                norm of other noise, or scales that float32 cannot hold.
        """
        moves = _sensitivities_of(target)
        profile = self.relative(target.rounds)
        if not (moves > 0).any():
            raise ValueError(
                f"method {type(target.config.method).__name__} shows no gradient in "
                f"{target.rounds} rounds; give 2 rounds at least"
            )
        if ((profile == 0) & (moves > 0).any(axis=1)).any():
            raise ValueError(
                f"schedule is {_validate.shown(self.schedule)}, with a scale of 0 in a round whose "
                "payload moves; give noise to the round after every step"
            )
        # Both losses are inverse to the largest scale.
        budget = target.budget
        scale = self.total(moves, profile) / self._allowed(budget)
        noise = self.at(scale, profile, moves)
        # Rounding of the sums above may leave it a little above the budget.
        while (noise.loss(target).epsilon > budget.largest).any():
            scale *= 1 + 2.0**-22
            noise = self.at(scale, profile, moves)
        if target.config.release:
            return _Released(self, noise.scales, moves, target.agents)
        return noise

    def at(self, scale: float, profile: np.ndarray, sensitivities: np.ndarray) -> "_ScheduledNoise":
        """The noise of a largest scale, rounded up to float32.

        Args:
            scale: The largest of a round.
            profile: [T] scales over it.
            sensitivities: [T, parts] how far the payload moves.

        Raises:
            ValueError: For scales that float32 noise cannot have.
        """
        wide = scale * profile
        # Up, never to the nearest: less noise than stated has a larger loss.
        scales = wide.astype(np.float32)
        low = scales < wide
        scales[low] = np.nextafter(scales[low], np.float32(np.inf))
        for extreme in (scales.max(), scales[scales > 0].min(initial=np.inf)):  # 0 is no noise.
            _validate.spread("scale", float(extreme))
        return _ScheduledNoise(self, scales, sensitivities)


@dataclass(frozen=True)
class ScheduledLaplace(_Scheduled):
    """Laplace noise of a scale that changes by round, fresh for every number: pure DP.

    Guarantee: with nu_k the scale of round k and s_k how far one agent's private payload moves in
    L1 in it, whatever was sent before (`sensitivities`: the method's, from the clip or the assumed
    gap), all messages together are (sum_k s_k / nu_k)-DP against an outsider who sees every
    message. Under D-SGD s_k is twice the clip norm; under tracking the step before times the gap.
    Simulations only: what float32 adds is not in it (the page 'Noise of finite precision' of the
    manual).

    Reference:
        Dwork, McSherry, Nissim and Smith (2006); adaptive composition of pure losses.

    Example:
        >>> from dpjax.plans.scheduled import ScheduledLaplace
        >>> ScheduledLaplace(0.5).relative(3).tolist()
        [1.0, 0.5, 0.25]
    """

    label = "laplace"
    kind = "laplace"
    look = Look("scheduled Laplace", "#AA4499", "h", "--")
    terms = dataclasses.replace(
        SCHEDULED,
        loss="pure",
        released=False,
        why=(
            f"{SCHEDULED.why}; what float32 adds to it is not accounted, so it is a simulation "
            "(release=False)"
        ),
    )

    total = staticmethod(pure.epsilon_of_sensitivities)

    @staticmethod
    def _spent(budget: Budget, totals: PerAgent) -> budget_.AgentLoss:
        """Epsilons at every delta."""
        return budget_.AgentLoss("pure", totals, totals, totals)

    def _allowed(self, budget: Budget) -> float:
        """The largest epsilon."""
        return budget.largest


@dataclass(frozen=True)
class ScheduledGaussian(_Scheduled):
    """Gaussian noise of a deviation that changes by round, fresh for every number.

    Guarantee: with sigma_k the deviation of round k and s_k how far one agent's private payload
    moves in L2 in it, all messages together are mu-GDP, mu^2 = sum_k (s_k / sigma_k)^2, against an
    outsider who sees every message. A release is one of sites, as a strategy over rounds
    C = diag(1 / sigma_k), for clipped gradients: nothing bounds what float64 loses of other
    payloads.

    Reference:
        Dong, Roth and Su (2022), Corollary 3.3.

    Example:
        >>> from dpjax.plans.scheduled import ScheduledGaussian
        >>> ScheduledGaussian((2.0, 1.0)).relative(2).tolist()
        [1.0, 0.5]
    """

    label = "normal"
    kind = "normal"
    look = Look("scheduled Gaussian", "#117733", "d", "-.")
    terms = SCHEDULED

    total = staticmethod(pure.mu_of_sensitivities)


@dataclass(frozen=True, eq=False)
class _ScheduledNoise(Calibrated):
    """Noise of a schedule at the scale that keeps a budget.

    Guarantee: `loss` is that of the moves and of these very scales, for an outsider.

    Attributes:
        part: The design.
        scales: [T] float32.
        sensitivities: [T, parts] how far the private payload moves, in the design's norm.
    """

    part: _Scheduled
    scales: Float[np.ndarray, " t"]
    sensitivities: Float[np.ndarray, "t parts"]

    secrets = "own"

    @property
    def arrays(self) -> Arrays:
        """The scales."""
        return {"noise_scales": self.scales}

    def spends_evenly(self, target: Target) -> bool:
        """Never: rounds differ in what they spend, so the whole loss stands from the first."""
        return False

    def check(self, target: Target) -> None:
        """Refuse scales of other rounds or types than the target's."""
        if self.scales.shape != (target.rounds,) or self.scales.dtype != np.float32:
            raise ValueError(
                f"scales is {self.scales.dtype} {self.scales.shape}; give float32 "
                f"{(target.rounds,)}"
            )

    def loss(self, target: Target) -> budget_.AgentLoss:
        """What every agent loses, its moves those of the target."""
        total = self.part.total(_sensitivities_of(target), self.scales.astype(np.float64))
        return self.part._spent(target.budget, np.full(target.agents, total))

    def privatizer(self, target: Target) -> Privatizer:
        """How it is drawn: every agent's part by itself."""
        return DrawnNoise(_scheduled, (target.rounds, self.part.kind), _lost, by_agent=True)


@dataclass(frozen=True, eq=False)
class _Released(ByFactor, _ScheduledNoise):
    """Noise of a schedule as sites draw it: C^-1 Z with C = diag(1 / scales).

    Attributes:
        agents: n.
    """

    agents: int

    operator = None

    @property
    def factor(self) -> np.ndarray:  # type: ignore[override]
        """The identity's diagonal."""
        return np.ones(self.agents, np.float32)

    @property
    def strategy(self) -> np.ndarray:  # type: ignore[override]
        """C, from which no scale comes out smaller, however 1 / C is rounded."""
        return np.diag(np.nextafter(1 / self.scales.astype(np.float64), 0))


def _scheduled(
    arrays: Arrays, key: PRNGKeyArray, rounds: int, kind: noise_.Kind, rows: AgentRows = None
) -> optax.GradientTransformation:
    scales = arrays["noise_scales"]
    return noise_.scheduled(scales, key=key, rounds=rounds, kind=kind, rows=rows)


def _lost(
    arrays: Arrays, round: Array, payload: Updates, rounds: int, kind: noise_.Kind, *_: AgentRows
) -> Array:
    """How likely the largest entry of a round's payload is to go out without its noise."""
    scale = jnp.take(arrays["noise_scales"], round, mode="clip")
    return noise_.lost(payload, scale, kind)


def _sensitivities_of(target: Target) -> Float[np.ndarray, "t parts"]:
    """How far one agent's private payload moves in each round, in the norm of its clip.

    Given all messages before: what the method says of it, and of one that emits answers of the
    query how far these move, in every round.

    Args:
        target: What the noise is for.

    Raises:
        ValueError: Where a record takes part in some rounds alone, of which this knows nothing.
    """
    if target.pattern.epochs != target.rounds:
        raise ValueError(
            f"sampler has participation {target.pattern}; scales that change by round are "
            "accounted for what may take part in all of them: use Random or Full"
        )
    protect = target.protect
    method = target.config.method
    of_method = method.sensitivity
    if of_method is None:
        return np.full((target.rounds, 1), protect.sensitivity)
    optimizer = target.config.optimizer
    # A run's steps are float32, which may be larger by the rounding.
    steps = np.asarray(optimizer.relative(target.rounds), np.float64) * optimizer.first * _ROUNDING
    moves = of_method(protect.answer_distance, steps, target.divisor, target.dense)
    moves = np.asarray(moves, np.float64)
    # NaN fails both comparisons.
    if not np.all((moves >= 0) & (moves < np.inf)):
        raise ValueError(
            f"method is {type(method).__name__}, whose sensitivity has no bound under relation "
            f"{protect.relation!r}, gradient_gap {protect.gradient_gap} and smoothness "
            f"{protect.smoothness}; clip gradients (clip_norm), or assume a smoothness"
        )
    return moves.reshape(target.rounds, -1) * _ROUNDING


def cost(config: Config, mixing: Mixing, scale: float, *, counts: Counts | None = None) -> float:
    """The epsilon at which a config's schedule has a given largest scale, at its budget's delta.

    For methods whose noise is given, and not a budget: what it costs by this package's account.

    Args:
        config: A config with noise of this module; its own epsilon is not read.
        mixing: [n, n] mixing matrix.
        scale: The largest, which is the first of a ratio's.
        counts: [n] records of each agent, as in `plan.make`.

    Returns:
        Epsilon, rounded up; a config with this budget has that noise up to float32.

    Raises:
        ValueError: As `plan.make`.

    Example:
        >>> from dpjax.learning import samplers
        >>> from dpjax.plans import plan, protect, scheduled
        >>> from dpjax.plans.optimizers import Sgd
        >>> config = plan.Config(
        ...     noise=scheduled.ScheduledLaplace(), rounds=5,
        ...     budget=protect.Budget(1.0, accountant="pure"),
        ...     protect=protect.Protect("replace_agent", clip_norm=1.0, norm="l1"),
        ...     sampler=samplers.Random(1), optimizer=Sgd(0.1),
        ... )
        >>> round(scheduled.cost(config, [[0.5, 0.5], [0.5, 0.5]], scale=10.0), 9)
        1.0
    """
    part: Any = config.noise
    target = Target(config, mixing, counts)
    scale = _validate.positive("scale", scale)
    profile = part.relative(target.rounds)
    return float(np.max(part.at(scale, profile, _sensitivities_of(target)).loss(target).epsilon))
