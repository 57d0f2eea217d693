"""Momentum, Nesterov's and Muon as links behind the noise, their steps on one scale.

Guarantee: none of their own and none lost; they stand in an optimizer (``Chain``) and see noisy
means alone. Heavy-ball momentum repeats each gradient 1 / (1 - beta) times over, so that a step
size tuned without it is too long by that with it. Here a step size is the effective one: how far a
gradient moves the model over all rounds, as plain steps and `dpjax.transforms.lowpass` count it. A
filter behind momentum, or momentum behind a filter, is a filter of both, and another optimizer.
"""

from typing import Any

import jax
import optax

from dpjax import _validate

__all__ = ["momentum", "muon"]


def momentum(
    step_size: Any, beta: float = 0.9, *, nesterov: bool = False
) -> optax.GradientTransformation:
    """Heavy-ball steps of an effective size: ``optax.sgd((1 - beta) step_size, beta)``.

    m_t = beta m_{t-1} + g_t, and x moves by -(1 - beta) eta m_t; Nesterov's by
    -(1 - beta) eta (beta m_t + g_t). Both move the model by eta in all for a gradient of 1, so that
    they compare with plain steps of eta. The first steps are short, (1 - beta^t) of a constant
    gradient's: ``lowpass(*FILTERS["momentum"])`` with plain steps is the same corrected for that.

    Args:
        step_size: Effective step eta: a number, traced or not, or an optax schedule.
        beta: How much of the last step is kept, in [0, 1).
        nesterov: Whether to look ahead.

    Returns:
        The optax transformation.

    Raises:
        ValueError: For a step that is no number, or a beta outside [0, 1).

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.transforms.momentum import momentum
        >>> link = momentum(0.5, beta=0.9)
        >>> update, _ = link.update(jnp.ones(1), link.init(jnp.zeros(1)))
        >>> round(float(update[0]), 3)
        -0.05
    """
    beta = _checked(step_size, beta)
    _validate.flag("nesterov", nesterov)
    short: Any = (1 - beta) * step_size if not callable(step_size) else _shorter(step_size, beta)
    return optax.sgd(short, momentum=beta, nesterov=nesterov)


def _checked(step_size: Any, beta: float) -> float:
    """Beta as a plain number; refused are steps that are no number, traced or not, or schedule."""
    if not callable(step_size) and not isinstance(step_size, jax.Array):
        _validate.number("step_size", step_size)
    beta = _validate.number("beta", beta)
    if not 0 <= beta < 1:
        raise ValueError(f"beta is {beta}; give a number from 0 to below 1")
    return beta


def _shorter(schedule: optax.Schedule, beta: float) -> optax.Schedule:
    return lambda count: (1 - beta) * schedule(count)


def muon(step_size: Any, beta: float = 0.95, **options: Any) -> optax.GradientTransformation:
    """Muon (``optax.contrib.muon``) with every kernel as a matrix, [all inputs, outputs].

    optax's own takes leaves of two axes for matrices alone; here convolution kernels are matrices
    of their patches too, and the rest (biases, scales) has Adam at the same step size. Its momentum
    is optax's, corrected for the zero start. The update of a matrix has singular values near 1,
    whatever the gradient's norm, so that a step size compares with no other optimizer's.

    Args:
        step_size: A number, traced or not, or an optax schedule.
        beta: How much of the momentum is kept, in [0, 1).
        options: Of ``optax.contrib.muon``.

    Returns:
        The optax transformation.

    Raises:
        ValueError: For a step that is no number, or a beta outside [0, 1).

    Reference:
        Jordan et al. 2024, Muon; Kim and Fan 2026, DP-Muon (arXiv 2605.12994), for the same behind
        clip and noise.

    Example:
        >>> from dpjax.plans.optimizers import Chain
        >>> from dpjax.transforms.momentum import muon
        >>> Chain(muon, step_size=0.02).first
        0.02
    """
    beta = _checked(step_size, beta)
    given = {"muon_weight_dimension_numbers": _matrices} | options
    return optax.contrib.muon(step_size, beta=beta, **given)


def _matrices(params: Any) -> Any:
    """Which axes of a leaf are a matrix's, in flax's layout; None for biases and scales."""

    def of_leaf(leaf: Any) -> Any:
        last = leaf.ndim - 1
        if last < 1:
            return None
        return optax.contrib.MuonDimensionNumbers(tuple(range(last)), (last,))

    return jax.tree.map(of_leaf, params)
