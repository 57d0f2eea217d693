"""Geometric schedules of steps and noise for gradient tracking whose messages are hidden.

Message k shows x(k-1) + noise, whose scale is nu_k; what an agent keeps to itself is in x(k-1)
through the step of the round before, alpha_{k-1}. With

    alpha_k = gamma q1^(k-1),   nu_k = nu_1 q2^(k-1),   0 < q1 < q2 < 1

K messages cost sum_{k=2..K} gap alpha_{k-1} / nu_k = gap gamma / (nu_1 (q2 - q1)) (1 - r^(K-1))
with r = q1 / q2: pure epsilon for Laplace noise.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from dpjax import _validate
from dpjax.mechanism.certificate import Vector

__all__ = [
    "Schedule",
    "decays",
    "first_scale",
    "geometric",
]

Horizon = Literal["endless", "run"]
"""Whether a budget is for all rounds to come, or for those of this run."""

_HORIZONS = ("endless", "run")
# Powers and quotients are off by less than this, so that what is accounted stays in the budget.
_UP = 1 + 1e-14
_TINY = float(np.finfo(np.float64).tiny)


class Schedule(NamedTuple):
    """Steps and noise of every round.

    Attributes:
        step_sizes: [T] alpha_k, the step taken after message k.
        scales: [T] of the noise of message k: nu_k of Laplace noise (whose variance is 2 nu^2), or
            the standard deviation of Gaussian noise; see ``noise``.
        noise: "laplace" or "gaussian".
        budget: Loss, epsilon or mu, that no number of rounds of this schedule exceeds.
        spent: Loss of the T messages.
        gradient_gap: What all this is for: how far gradients of the same agent differ.

    Example:
        >>> from dpjax.mechanism import laplace
        >>> schedule = laplace.geometric(1.0, 1.0, 0.1, 0.8, 0.9, 5)
        >>> schedule.noise, schedule.step_sizes.shape
        ('laplace', (5,))
    """

    step_sizes: Vector
    scales: Vector
    noise: str
    budget: float
    spent: float
    gradient_gap: float


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return a quotient of two products, where nothing under- or overflows but the result.

    Args:
        above: Numbers above 0.
        below: Numbers above 0.

    Returns:
        The quotient, a rounding for each number off; 0 or infinite beyond float64.
    """
    value = 1.0
    power = 0
    # Mantissas are multiplied apart from exponents, which alone may leave float64's range.
    for sign, numbers in ((1, above), (-1, below)):
        for number in numbers:
            share, exponent = math.frexp(number)
            value = value * share if sign > 0 else value / share
            power += sign * exponent
    try:
        return math.ldexp(value, power)
    except OverflowError:
        return math.inf


def decays(q1: float, q2: float) -> tuple[float, float]:
    """Return both decays as floats with 0 < q1 < q2 < 1.

    Args:
        q1: Decay of the steps.
        q2: Decay of the noise.

    Returns:
        q1 and q2.

    Raises:
        ValueError: For any others.

    Example:
        >>> from dpjax.mechanism import laplace
        >>> laplace.decays(0.97, 0.99)
        (0.97, 0.99)
    """
    q1 = _validate.probability("q1", q1)
    q2 = _validate.probability("q2", q2)
    if q1 >= q2:
        raise ValueError(
            f"q1 is {q1:g} and q2 {q2:g}; give q1 < q2, or noise that decays as fast as the steps "
            "costs the same in every round and no budget lasts"
        )
    return q1, q2


def horizon_share(rounds: int | None, power: int, q1: float, q2: float) -> float:
    """Return the share of an endless run's loss that a run of so many messages has.

    1 - (q1/q2)^(power (messages - 1)), without cancellation.

    Args:
        rounds: Messages; None is no end, a share of 1.
        power: 1 for epsilons, 2 for squares of mu.
        q1: Decay of the steps.
        q2: Decay of the noise.
    """
    if rounds is None:
        return 1.0
    rounds = _validate.integer("rounds", rounds)
    return -math.expm1(power * (rounds - 1) * math.log1p((q1 - q2) / q2)) if rounds > 1 else 1.0


def first_scale(
    epsilon: float,
    gradient_gap: float,
    gamma: float,
    q1: float,
    q2: float,
    rounds: int | None = None,
    printed: bool = False,
) -> float:
    """Return nu_1 of the geometric Laplace schedule that spends epsilon.

    nu_1 = gamma gap / (epsilon (q2 - q1)), times 1 - (q1/q2)^(rounds - 1) where rounds are given.

    Guarantee: with this scale or a larger one, any number of messages (or ``rounds`` of them) of
        one agent is epsilon-DP for a change of its cost function, against an outsider who sees all
        messages. Its gradients at the same point may differ by at most ``gradient_gap`` in L1 norm.
        With ``printed`` it spends epsilon / q2.

    Args:
        epsilon: Budget, above 0.
        gradient_gap: L1 distance of an agent's gradients before and after the change.
        gamma: First step.
        q1: Decay of the steps.
        q2: Decay of the noise, between q1 and 1.
        rounds: Messages that are ever sent; None for any number.
        printed: The paper's (5), smaller by the factor q2.

    Returns:
        The scale, rounded up.

    Raises:
        ValueError: For numbers out of range, q1 not below q2, rounds given with ``printed``, or a
            scale that is no normal number of float64.

    Reference:
        Xie, Liu and Chai, (5) and Theorem 4.5, whose sum pairs alpha_k with nu_k where message k
        carries alpha_{k-1}.

    Example:
        >>> from dpjax.mechanism import laplace
        >>> round(laplace.first_scale(1.0, gradient_gap=1.0, gamma=0.001, q1=0.97, q2=0.99), 6)
        0.05
    """
    named = {"epsilon": epsilon, "gradient_gap": gradient_gap, "gamma": gamma}
    epsilon, gap, gamma = (_validate.positive(name, value) for name, value in named.items())
    q1, q2 = decays(q1, q2)
    if _validate.flag("printed", printed) and rounds is not None:
        raise ValueError("printed is the paper's form for endless runs; leave rounds out")
    share = horizon_share(rounds, 1, q1, q2)
    scale = ratio([gamma, gap, share], [epsilon, q2 - q1])
    # The paper's (5) pairs alpha_k with nu_k, a factor q2 below what message k needs.
    scale = scale * q2 if printed else scale * _UP
    if not _TINY <= scale < math.inf:
        raise ValueError(
            f"epsilon is {epsilon:g}, gradient_gap {gap:g} and gamma {gamma:g}, whose first scale "
            "is beyond the numbers of float64; give them in units in which they are nearer to 1"
        )
    return scale


def geometric(
    epsilon: float,
    gradient_gap: float,
    gamma: float,
    q1: float,
    q2: float,
    rounds: int,
    printed: bool = False,
    *,
    horizon: Horizon = "endless",
) -> Schedule:
    """Return steps and Laplace scales that spend epsilon (1 - (q1/q2)^(K-1)) in K messages.

    Guarantee: as `first_scale`; what T messages cost is in ``spent``, and
        `dpjax.accounting.pure.epsilon` confirms it from the numbers. With ``printed`` the budget is
        epsilon / q2, and stated as that.

    Args:
        epsilon: Budget, above 0.
        gradient_gap: L1 distance of an agent's gradients before and after the change.
        gamma: First step.
        q1: Decay of the steps.
        q2: Decay of the noise, between q1 and 1.
        rounds: Rounds T.
        printed: The paper's scales, q2 times smaller: sum_{k>=2} is then epsilon / q2, above
            epsilon.
        horizon: "endless" for a budget that no number of rounds exceeds; "run" for one that these
            T messages spend whole, which is never more noise.

    Returns:
        The schedule, float64.

    Raises:
        ValueError: For numbers out of range, q1 not below q2, noise that falls below all numbers
            within the rounds, or ``printed`` for a run.

    Reference:
        Xie, Liu and Chai, (5).

    Example:
        >>> from dpjax.mechanism import laplace
        >>> schedule = laplace.geometric(1.0, 1.0, gamma=0.001, q1=0.97, q2=0.99, rounds=100)
        >>> round(schedule.spent, 6), schedule.scales.shape
        (0.867408, (100,))
        >>> round(laplace.geometric(1.0, 1.0, 0.001, 0.97, 0.99, 1000, printed=True).spent, 4)
        1.0101
    """
    run = _validate.one_of("horizon", horizon, _HORIZONS) == "run"
    first = first_scale(epsilon, gradient_gap, gamma, q1, q2, rounds if run else None, printed)
    gap = float(gradient_gap)
    steps = np.arange(_validate.integer("rounds", rounds), dtype=np.float64)
    scales = first * np.float64(q2) ** steps
    if not _TINY <= scales[-1] <= scales[0] < np.inf:
        raise ValueError(
            f"rounds is {rounds}, in which noise of decay q2 = {q2:g} goes from {scales[0]:g} to "
            f"{scales[-1]:g}, beyond the numbers of float64; give fewer rounds or a q2 nearer to 1"
        )
    total = max(ratio([gap, gamma], [first, q2 - q1]) * _UP, _TINY)
    # Message 1 carries no step, so that it costs nothing.
    spent = total * horizon_share(rounds, 1, q1, q2) if rounds > 1 else 0.0
    budget = total if printed or run else float(epsilon)
    return Schedule(gamma * np.float64(q1) ** steps, scales, "laplace", budget, spent, gap)
