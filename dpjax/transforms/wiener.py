"""The optimal causal filter of gradients that drift, learned from privatised gradients alone.

Guarantee: none of its own and none lost. Gain, correlation and power are functions of privatised
gradients and of the noise's variance, which is public: post-processing. In front of the noise the
same link would leak, see `dpjax.transforms.lowpass`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from dpjax import _validate
from dpjax.mechanism import strategy as strategy_

__all__ = ["ScheduledState", "WienerState", "scheduled", "steady_gain", "wiener"]

# Largest correlation that is estimated: a filter of about a thousand rounds.
_LARGEST = 0.999

Variance = float | Float[Array, ""] | Callable[[Int[Array, ""]], Any]


class WienerState(NamedTuple):
    """What the filter keeps: two copies of the model.

    Attributes:
        estimate: The filtered gradient, before any division by the response to ones.
        past: The last gradient that came in.
        power: Running mean of |y_t|^2 / d - noise.
        product: Running mean of <y_t, y_{t-1}> / d.
        error: Variance of the estimate's error in a coordinate.
        ones: The filter's response to ones.
        rounds: Rounds done.
    """

    estimate: Any
    past: Any
    power: Float[Array, ""]
    product: Float[Array, ""]
    error: Float[Array, ""]
    ones: Float[Array, ""]
    rounds: Int[Array, ""]


def steady_gain(correlation: Any, power: Any, noise: Any) -> Float[Array, ""]:
    """Return the gain K that the Kalman filter of an AR(1) gradient settles at.

    K = E / (E + r), E = rho^2 E r / (E + r) + (1 - rho^2) p the variance of what comes next given
    all that was seen. The filter is then a recursion: m_t = rho (1 - K) m_{t-1} + K y_t.

    Args:
        correlation: rho, of one round's gradient with the next one's.
        power: p, variance of a coordinate of the gradient.
        noise: r, variance of the noise.

    Example:
        >>> from dpjax.transforms.wiener import steady_gain
        >>> round(float(steady_gain(0.0, 1.0, 3.0)), 4), round(float(steady_gain(0.9, 1.0, 3.0)), 4)
        (0.25, 0.1893)
    """
    squared = jnp.square(jnp.asarray(correlation))
    fresh = (1 - squared) * power
    half = (noise * (1 - squared) - fresh) / 2
    ahead = jnp.sqrt(half**2 + fresh * noise) - half
    return ahead / jnp.maximum(ahead + noise, jnp.finfo(ahead.dtype).tiny)


def wiener(
    noise: Variance,
    *,
    correlation: float | None = None,
    power: float | None = None,
    decay: float = 0.99,
    steady: bool = False,
    unit: bool = False,
    floor: float = 1e-3,
) -> optax.GradientTransformation:
    """Filter updates by the causal filter of least mean square error for an AR(1) gradient.

    With x_t = rho x_{t-1} + w_t of variance p in every coordinate, seen as y_t = x_t + n_t,

        m_t = rho m_{t-1} + K_t (y_t - rho m_{t-1})

    is the Kalman filter, whose gain is one number for all coordinates. Unless they are given, rho
    and p are estimated in every round from running means over about 1 / (1 - decay) rounds,

        p = mean(|y_t|^2 / d - r_t),     rho p = mean(<y_t, y_{t-1}> / d)

    for noise that is white over rounds. The part of a gradient that sampling draws anew in every
    round counts as gradient here. The tree is one model: behind ``Chain`` that is one agent's.

    The estimate is shrunk: where noise is large, a gradient of the least square error is small.
    ``unit`` divides by the response to ones, as `lowpass` does, so that a constant gradient passes
    as it is and a step size means what it means without a filter.

    Args:
        noise: Variance r_t of the noise in a coordinate of what comes in, (sigma C / B)^2 for a
            mean of B records; or a function of the round where it changes.
        correlation: rho, from 0 to below 1; None estimates it.
        power: p; None estimates it.
        decay: Of the running means, up to 1, which weighs all rounds alike.
        steady: Use the gain that belongs to the estimates at once, in place of the recursion's,
            which starts from p and knows that the first rounds know little.
        unit: Divide by the response to ones.
        floor: Least p that is estimated, as a share of the noise's variance.

    Returns:
        The transformation; its state is a `WienerState`.

    Raises:
        ValueError: For numbers outside these ranges.

    Reference:
        Kalman, A New Approach to Linear Filtering and Prediction Problems (1960). The model of
        gradients is the one of DiSK (Zhang et al. 2024), its gain is not.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.transforms.wiener import wiener
        >>> link = wiener(noise=3.0, correlation=0.9, power=1.0)
        >>> first, state = link.update(jnp.array([4.0]), link.init(jnp.zeros(1)))
        >>> second, state = link.update(jnp.array([4.0]), state)
        >>> [round(float(x[0]), 2) for x in (first, second)]
        [1.0, 1.57]
    """
    if correlation is not None and not 0 <= _validate.number("correlation", correlation) < 1:
        raise ValueError(f"correlation is {correlation!r}; give one from 0 to below 1, or None")
    if power is not None:
        power = _validate.positive("power", power)
    if not 0 < _validate.number("decay", decay) <= 1:
        raise ValueError(f"decay is {decay!r}; give a number above 0, up to 1")
    _validate.positive("floor", floor)
    _validate.flag("steady", steady)
    _validate.flag("unit", unit)
    if not callable(noise) and not isinstance(noise, jax.Array):
        _validate.positive("noise", noise)

    def init(params: Any) -> WienerState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        none = jnp.zeros((), jnp.float32)
        return WienerState(zeros, zeros, none, none, none, none, jnp.zeros((), jnp.int32))

    def update(updates: Any, state: WienerState, params: Any = None) -> tuple[Any, WienerState]:
        del params
        given = noise(state.rounds) if callable(noise) else noise
        r = jnp.asarray(given, jnp.float32)
        size = sum(leaf.size for leaf in jax.tree.leaves(updates))
        squared = _running(state.power, _product(updates, updates) / size - r, state.rounds, decay)
        # There is no product in the first round.
        follows = jnp.maximum(state.rounds - 1, 0)
        product = jnp.where(
            state.rounds > 0,
            _running(state.product, _product(updates, state.past) / size, follows, decay),
            0.0,
        )
        p = jnp.maximum(squared, floor * r) if power is None else jnp.float32(power)
        rho = jnp.clip(product / p, 0.0, _LARGEST) if correlation is None else correlation
        rho = jnp.asarray(rho, jnp.float32)
        ahead = jnp.where(state.rounds > 0, rho**2 * state.error + (1 - rho**2) * p, p)
        gain = steady_gain(rho, p, r) if steady else ahead / (ahead + r)
        kept = rho * (1 - gain)
        ones = kept * state.ones + gain
        estimate = jax.tree.map(
            lambda old, new: kept.astype(new.dtype) * old + gain.astype(new.dtype) * new,
            state.estimate,
            updates,
        )
        out = estimate
        if unit:
            out = jax.tree.map(lambda leaf: leaf / ones.astype(leaf.dtype), estimate)
        return out, WienerState(
            estimate, updates, squared, product, (1 - gain) * ahead, ones, state.rounds + 1
        )

    return optax.GradientTransformation(init, update)


def _running(mean: Any, value: Any, before: Any, decay: float) -> Float[Array, ""]:
    """A running mean after one more value; its weights add up to 1 from the first round on."""
    count = before.astype(jnp.float32) + 1
    weight = 1 / count if decay == 1 else (1 - decay) / (1 - jnp.float32(decay) ** count)
    return mean + weight * (value - mean)


def _product(one: Any, other: Any) -> Float[Array, ""]:
    """<one, other> over all leaves, in float32 at least."""
    terms = jax.tree.map(
        lambda x, y: jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32)), one, other
    )
    return jnp.stack(jax.tree.leaves(terms)).sum().astype(jnp.float32)


class ScheduledState(NamedTuple):
    """What a filter of every round keeps: as many copies of the model as it has rounds back.

    Attributes:
        past: Leaves [width, ...] of inputs, that of round t in place t mod width.
        rounds: Rounds done.
    """

    past: Any
    rounds: Int[Array, ""]


def scheduled(matrix: Float[np.ndarray, "t t"]) -> optax.GradientTransformation:
    """Apply a causal filter over rounds that is given as a matrix, m_t = sum_{s<=t} F_ts y_s.

    For `dpjax.mechanism.filtered`, whose filters are other ones in every round. Memory is one copy
    of the model for each round that F reaches back: cut F to a band where that is too much, and ask
    `filtered.error` what it costs.

    Args:
        matrix: [T, T] F, lower triangular. Beyond T rounds the last row is used.

    Returns:
        The transformation; its state is a `ScheduledState`.

    Raises:
        ValueError: For another matrix.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.transforms.wiener import scheduled
        >>> link = scheduled([[1.0, 0.0], [0.5, 0.5]])
        >>> first, state = link.update(jnp.array([4.0]), link.init(jnp.zeros(1)))
        >>> link.update(jnp.array([2.0]), state)[0].tolist()
        [3.0]
    """
    whole = _validate.square("matrix", matrix)
    if not strategy_.is_triangular(whole):
        raise ValueError("matrix is not lower triangular; a filter sees no round before it is over")
    width = strategy_.width(whole) if whole.any() else 0
    now, before = jnp.asarray(np.diag(whole)), jnp.asarray(strategy_.bands(whole))

    def init(params: Any) -> ScheduledState:
        past = jax.tree.map(lambda leaf: jnp.zeros((width, *leaf.shape), leaf.dtype), params)
        return ScheduledState(past, jnp.zeros((), jnp.int32))

    def update(updates: Any, state: ScheduledState, params: Any = None) -> tuple[Any, Any]:
        del params
        t = jnp.minimum(state.rounds, len(whole) - 1)
        place = jnp.mod(state.rounds, max(width, 1))
        # Slot s holds round t - k with k = (t - 1 - s) mod width + 1; rounds before 0 are zero.
        lags = jnp.mod(state.rounds - 1 - jnp.arange(width), max(width, 1))

        def one(given: Any, past: Any) -> Any:
            out = now[t].astype(given.dtype) * given
            if width:
                weights = before[t][lags].astype(given.dtype)
                out = out + jnp.tensordot(weights, past, axes=1, precision="highest")
            return out

        out = jax.tree.map(one, updates, state.past)
        past = state.past
        if width:
            past = jax.tree.map(lambda given, old: old.at[place].set(given), updates, past)
        return out, ScheduledState(past, state.rounds + 1)

    return optax.GradientTransformation(init, update)
