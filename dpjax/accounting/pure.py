"""What messages hidden by Laplace noise cost together: pure epsilon, for any schedule of noise.

Message k = 1..K of an agent is a value plus Laplace noise of scale nu_k in every entry. Replayed on
a neighbouring problem, where this agent has another cost function, the value moves by at most
Delta_k in L1 norm, and the whole sequence is epsilon-DP with

    epsilon = sum_{k=1..K} Delta_k / nu_k

against whoever sees all messages, whatever these decide about later rounds. In gradient tracking
the first message is the public start, and message k carries the step of the round before:
Delta_k = alpha_{k-1} gap for k >= 2. With Gaussian noise of deviations sigma_k and moves in L2 norm
the same sequence is mu-GDP, mu^2 = sum Delta_k^2 / sigma_k^2. How far messages of other methods
move is in ``dpjax.contrib.moves``. Everything here is rounded up.
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from dpjax import _validate
from dpjax.accounting.arrays import Numbers
from dpjax.accounting.rounding import MARGIN, TINY

__all__ = ["epsilon", "epsilon_of_sensitivities"]


def epsilon(step_sizes: ArrayLike, scales: ArrayLike, gradient_gap: float) -> float:
    """Return the pure loss of K messages of gradient tracking: sum_{k=2..K} gap alpha_{k-1} / nu_k.

    Guarantee: the K messages are epsilon-DP for a change of one agent's cost function, against
        whoever sees all of them, if its gradients before and after differ by at most
        ``gradient_gap`` in L1 norm at every point; never below the exact sum. What follows message
        K (the last models) is not covered: it shows the step of round K without noise.

    Args:
        step_sizes: [K] alpha_k, the step after message k; the last may be left out, it is not
            shown.
        scales: [K] Laplace scale nu_k of every entry of message k; 0 is no noise.
        gradient_gap: L1 bound.

    Returns:
        Epsilon; infinity where a message that moves has no noise.

    Raises:
        ValueError: For entries that are not finite and >= 0, lengths that do not fit, or a gap that
        is
            not above 0.

    Reference:
        Xie, Liu and Chai, Lemma 4.4; (12) pairs alpha_k with nu_k instead, one round too early.

    Example:
        >>> from dpjax.accounting import pure
        >>> round(pure.epsilon(step_sizes=[0.5, 0.25], scales=[2.0, 1.0, 1.0], gradient_gap=2.0), 6)
        1.5
    """
    return _summed(_of_steps(step_sizes, scales, gradient_gap), 1)


def mu_of_steps(step_sizes: ArrayLike, deviations: ArrayLike, gradient_gap: float) -> float:
    """Return the Gaussian-DP loss of K messages: mu^2 = sum_{k=2..K} (gap alpha_{k-1} / sigma_k)^2.

    Guarantee: as `epsilon`, with Gaussian noise and the gap in L2 norm: mu-GDP, so that
        `dpjax.accounting.gdp.epsilon` states it at a delta.

    Args:
        step_sizes: [K] as in `epsilon`.
        deviations: [K] standard deviation sigma_k of every entry of message k.
        gradient_gap: L2 bound.

    Returns:
        Mu, never below the exact one.

    Raises:
        ValueError: As in `epsilon`.

    Reference:
        Dong, Roth and Su (2022), Theorem 2.7 and Corollary 3.3.

    Example:
        >>> from dpjax.accounting import pure
        >>> loss = pure.mu_of_steps([3.0, 4.0], deviations=[1.0, 1.0, 1.0], gradient_gap=1.0)
        >>> round(loss, 6)
        5.0
    """
    return _summed(_of_steps(step_sizes, deviations, gradient_gap), 2)


def epsilon_of_sensitivities(sensitivities: ArrayLike, scales: ArrayLike) -> float:
    """Return the pure loss of messages of one or several variables: sensitivities over scales.

    Guarantee: epsilon-DP against whoever sees all messages, if message k moves by at most the given
        amounts in L1 norm, the messages before it given (``dpjax.contrib.moves``); never
        below the exact sum.

    Args:
        sensitivities: [K] or [K, P] in L1 norm, of the P variables of each message.
        scales: [K] or [K, P] Laplace scales, or one that broadcasts.

    Returns:
        Epsilon.

    Raises:
        ValueError: For entries that are not finite and >= 0, or shapes that do not fit.

    Example:
        >>> from dpjax.accounting import pure
        >>> sensitivities = [[0.0, 1.0], [0.5, 2.0]]  # of models and trackers, in two messages
        >>> round(pure.epsilon_of_sensitivities(sensitivities, [[1.0, 4.0], [1.0, 4.0]]), 6)
        1.25
    """
    return _summed(_of_sensitivities(sensitivities, scales), 1)


def mu_of_sensitivities(sensitivities: ArrayLike, deviations: ArrayLike) -> float:
    """Return the Gaussian-DP loss of messages of one or several variables.

    Guarantee: as `epsilon_of_sensitivities`, for Gaussian noise and L2 norms: mu-GDP.

    Args:
        sensitivities: [K] or [K, P] in L2 norm.
        deviations: [K] or [K, P] standard deviations, or one that broadcasts.

    Returns:
        Mu, never below the exact one.

    Raises:
        ValueError: As in `epsilon_of_sensitivities`.

    Example:
        >>> from dpjax.accounting import pure
        >>> round(pure.mu_of_sensitivities([[3.0, 4.0]], deviations=1.0), 6)
        5.0
    """
    return _summed(_of_sensitivities(sensitivities, deviations), 2)


def _nonnegative(name: str, value: ArrayLike, dimensions: int) -> Numbers:
    array = _validate.finite_array(name, value)
    if array.ndim > dimensions or (array.ndim == 0 and dimensions == 1):
        raise ValueError(f"{name} has shape {array.shape}; give one number a message")
    if array.min() < 0:
        raise ValueError(f"{name} holds {array.min():g}; give numbers >= 0")
    return array


def _of_steps(step_sizes: ArrayLike, scales: ArrayLike, gradient_gap: float) -> Numbers:
    """Return quotients of all messages but the first."""
    scales = _nonnegative("scales", scales, 1)
    gap = _validate.positive("gradient_gap", gradient_gap)
    steps = _nonnegative("step_sizes", step_sizes, 1) if np.size(step_sizes) else np.zeros(0)
    if len(steps) not in (len(scales), len(scales) - 1):
        raise ValueError(
            f"step_sizes has {len(steps)} entries for {len(scales)} scales; give one step a "
            "message, or all but the last"
        )
    return _quotients(steps[: len(scales) - 1], gap, scales[1:])


def _of_sensitivities(sensitivities: ArrayLike, scales: ArrayLike) -> Numbers:
    """Return [K, P] quotients."""
    moved = _nonnegative("sensitivities", sensitivities, 2)
    scales = _nonnegative("scales", scales, 2)
    rows = moved.reshape(len(moved) if moved.ndim else 1, -1)
    columns = scales[:, None] if scales.ndim == 1 and len(scales) > 1 else scales
    try:
        spread = np.broadcast_to(columns, rows.shape)
    except ValueError:
        raise ValueError(
            f"scales has shape {scales.shape} for sensitivities {moved.shape}; give one a message, "
            "one a message and variable, or one number"
        ) from None
    return _quotients(rows, 1.0, spread)


def _quotients(moved: Numbers, gap: float, scales: Numbers) -> Numbers:
    """Return moved gap / scales within three roundings; nothing under- or overflows on the way."""
    a, exponents = np.frexp(moved)
    b, power = math.frexp(gap)
    c, scale_exponents = np.frexp(scales)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        value = np.ldexp(a * b / c, exponents + power - scale_exponents)
    return np.where(moved > 0, np.maximum(value, TINY), 0.0)


def _summed(lost: Numbers, power: int) -> float:
    """Return (sum of powers)^(1/power), rounded up."""
    with np.errstate(over="ignore", under="ignore"):
        powers = np.where(lost > 0, np.maximum(lost**power, TINY), 0.0)
        total = float(powers.sum())
    if math.isfinite(total):
        total = math.fsum(powers.flat)
    return (math.sqrt(total) if power == 2 else total) * MARGIN
