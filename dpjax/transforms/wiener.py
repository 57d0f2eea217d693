"""The optimal causal filter of gradients that drift, learned from privatised gradients alone.

Guarantee: none of its own and none lost. Gain, correlation and power are functions of privatised
gradients and of the noise's variance, which is public: post-processing. In front of the noise the
same link would leak, see `dpjax.transforms.lowpass`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from dpjax import _validate
from dpjax.mechanism import strategy as strategy_
from dpjax.transforms import leaves, rounds, variance

__all__ = ["ScheduledState", "WienerState", "scheduled", "steady_gain", "wiener"]

# Largest correlation that is estimated: a filter of about a thousand rounds.
_LARGEST = 0.999
# Of gradients that are zero without noise: a power to divide by.
_TINY = 1e-30


class WienerState(NamedTuple):
    """What the filter keeps: three copies of the model, two where fresh parts are no noise.

    Attributes:
        estimate: The filtered gradient, before any division by the response to ones.
        past: The last gradients that came in, the latest first.
        moments: Running means of <y_t, y_{t-k}> / d, the noise's taken off, k = 0, 1, ..
        error: Variance of the estimate's error in a coordinate.
        ones: The filter's response to ones.
        rounds: Rounds done.
    """

    estimate: Any
    past: tuple[Any, ...]
    moments: Float[Array, " lags"]
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
        (0.25, 0.164)
    """
    squared = jnp.square(jnp.asarray(correlation))
    fresh = (1 - squared) * power
    half = (noise * (1 - squared) - fresh) / 2
    ahead = jnp.sqrt(half**2 + fresh * noise) - half
    return ahead / (ahead + noise)


def wiener(
    noise: variance.Variance,
    *,
    correlation: float | None = None,
    power: float | None = None,
    decay: float = 0.99,
    fresh: bool = True,
    steady: bool = False,
    unit: bool = False,
    floor: float = 1e-3,
) -> optax.GradientTransformation:
    """Filter updates by the causal filter of least mean square error for an AR(1) gradient.

    With x_t = rho x_{t-1} + w_t of variance p in every coordinate, seen as y_t = x_t + n_t,

        m_t = rho m_{t-1} + K_t (y_t - rho m_{t-1})

    is the Kalman filter, whose gain is one number for all coordinates. Unless they are given, rho
    and p are estimated in every round from running means over about 1 / (1 - decay) rounds,

        c_k = mean(<y_t, y_{t-k}> / d - r_{t,k}),     p = c_0,     rho = c_1 / c_0

    where ``fresh`` is False. A batch's gradient is a part that drifts and one that its sampling
    draws anew. With ``fresh`` the second one is noise as well, of variance c_0 - p, and rho =
    c_2 / c_1, p = c_1 / rho: where it is large, the other estimate of rho is far too small, and
    filters of fixed length may be nearer.

    Noise that is correlated over rounds is taken off as it is, but the gain is the one for fresh
    noise; for its own filter see ``experiments/_common/filtered.py``. The tree is one model: behind
    ``Chain`` that is one agent's.

    The estimate is shrunk: where noise is large, a gradient of the least square error is small.
    ``unit`` divides by the response to ones, as `lowpass` does, so that a constant gradient passes
    as it is and a step size means what it means without a filter.

    Args:
        noise: Variance r_t of the noise in a coordinate of what comes in, (sigma C / B)^2 for a
            mean of B records; or ``noise(round, lag)``, the covariance with the noise of so many
            rounds before (`dpjax.transforms.variance.NoiseVariance`).
        correlation: rho, from 0 to below 1; None estimates it.
        power: p; None estimates it.
        decay: Of the running means, up to 1, which weighs all rounds alike.
        fresh: Whether what sampling draws anew in every round is noise too, of a variance that is
            estimated. It takes a third copy of the model.
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
        >>> link = wiener(noise=3.0, correlation=0.9, power=1.0, fresh=False)
        >>> first, state = link.update(jnp.array([4.0]), link.init(jnp.zeros(1)))
        >>> second, state = link.update(jnp.array([4.0]), state)
        >>> [round(float(x[0]), 2) for x in (first, second)]
        [1.0, 1.55]
    """
    if correlation is not None and not 0 <= _validate.number("correlation", correlation) < 1:
        raise ValueError(f"correlation is {correlation!r}; give one from 0 to below 1, or None")
    if power is not None:
        power = _validate.positive("power", power)
    if not 0 < _validate.number("decay", decay) <= 1:
        raise ValueError(f"decay is {decay!r}; give a number above 0, up to 1")
    _validate.positive("floor", floor)
    for name, value in (("fresh", fresh), ("steady", steady), ("unit", unit)):
        _validate.flag(name, value)
    of_round = variance.per_round(noise)
    lags = 3 if fresh else 2

    def init(params: Any) -> WienerState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        none = jnp.zeros((), jnp.float32)
        moments = jnp.zeros(lags, jnp.float32)
        return WienerState(
            zeros, (zeros,) * (lags - 1), moments, none, none, jnp.zeros((), jnp.int32)
        )

    def update(updates: Any, state: WienerState, params: Any = None) -> tuple[Any, WienerState]:
        del params
        window, t = (updates, *state.past), state.rounds
        size = sum(leaf.size for leaf in jax.tree.leaves(updates))
        taken = [jnp.asarray(of_round(t, lag), jnp.float32) for lag in range(lags)]
        found = jnp.stack([leaves.product(updates, old) for old in window]) / size
        found = found - jnp.stack(taken)
        moments = _running(state.moments, found, t - jnp.arange(lags), decay)
        p, rho, r = _model(moments, taken[0], floor, fresh)
        p = p if power is None else jnp.float32(power)
        rho = rho if correlation is None else jnp.float32(correlation)
        ahead = jnp.where(t > 0, rho**2 * state.error + (1 - rho**2) * p, p)
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
        after = (1 - gain) * ahead
        return out, WienerState(estimate, window[:-1], moments, after, ones, t + 1)

    return optax.GradientTransformation(init, update)


def _model(
    moments: Float[Array, " lags"], noise: Any, floor: float, fresh: bool
) -> tuple[Any, Any, Any]:
    """p, rho and the variance of what is noise, from moments."""
    whole = jnp.maximum(moments[0], floor * noise + _TINY)
    if not fresh:
        return whole, jnp.clip(moments[1] / whole, 0.0, _LARGEST), noise
    # Before there is a product two rounds apart, one round apart is all that is known.
    first = jnp.maximum(moments[1], floor * noise + _TINY)
    rho = jnp.clip(jnp.where(moments[2] == 0, moments[1] / whole, moments[2] / first), 0, _LARGEST)
    drifting = jnp.clip(first / jnp.maximum(rho, floor), floor * noise + _TINY, whole)
    return drifting, rho, noise + whole - drifting


def _running(mean: Any, value: Any, before: Any, decay: float) -> Float[Array, " lags"]:
    """Running means after one more value; weights add up to 1 from the first one on."""
    count = jnp.maximum(before, 0).astype(jnp.float32) + 1
    weight = 1 / count if decay == 1 else (1 - decay) / (1 - jnp.float32(decay) ** count)
    # There is no product with rounds before the first.
    return mean + jnp.where(before < 0, 0.0, weight) * (value - mean)


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

    For ``experiments/_common/filtered.py``, whose filters are other ones in every round. Memory is
    one copy of the model for each round that F reaches back: cut F to a band where that is too
    much, and ask its ``error`` what that costs.

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
    # As noise over rounds is made of the last normals, in their place what comes in.
    bands = strategy_.bands(whole) if whole.any() else np.zeros((len(whole), 0))
    route = rounds.Route("moving", np.diag(whole), bands)

    def init(params: Any) -> ScheduledState:
        past = jax.tree.map(lambda leaf: route.start(leaf.shape, leaf.dtype)[0], params)
        return ScheduledState(past, jnp.zeros((), jnp.int32))

    def update(updates: Any, state: ScheduledState, params: Any = None) -> tuple[Any, Any]:
        del params

        def one(given: Any, past: Any) -> Any:
            return route.step(lambda _: given, (past,), state.rounds)

        flat, structure = jax.tree.flatten(updates)
        pairs = [one(*pair) for pair in zip(flat, jax.tree.leaves(state.past), strict=True)]
        out = jax.tree.unflatten(structure, [new for new, _ in pairs])
        past = jax.tree.unflatten(structure, [kept for _, (kept,) in pairs])
        return out, ScheduledState(past, state.rounds + 1)

    return optax.GradientTransformation(init, update)
