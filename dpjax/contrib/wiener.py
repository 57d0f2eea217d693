"""Filters over rounds whose weights follow the noisy gradients, as optax links.

`adaptive` is a finite response, `wiener` the causal filter of least error for gradients that drift.
Both take the public noise variance (`dpjax.transforms.lowpass.NoiseVariance`).

Guarantee: none by themselves. A link reads noisy gradients alone, so that a run with a filter has
the guarantee of the run without it, for any attacker and relation. Put it into the optimizer behind
the noise: ``Chain(lambda step, noise: optax.chain(wiener(noise), optax.sgd(step)), 0.5,
uses_noise=True)``.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int
from optax import GradientTransformation, Params, Updates

from dpjax import _validate
from dpjax.contrib.optimizers import Variance, per_round

__all__ = ["adaptive", "wiener"]

_Scalar = Float[Array, ""]
_Round = Int[Array, ""]

_LARGEST = 0.999
"""Largest correlation that is estimated: a filter of about a thousand rounds."""
_TINY = 1e-30
"""The divisor for gradients that are zero without noise."""


class _AdaptiveState(NamedTuple):
    """The state of an adaptive filter: one copy of the model for every tap but the first.

    Attributes:
        past: g_{t-1}, g_{t-2}, ...
        products: [taps] running means of <g_t, g_{t-k}>, corrected for the noise.
        squares: [taps] running means of |g_{t-k}|^2 over the same rounds, corrected as well.
        rounds: Rounds done.
    """

    past: tuple[Updates, ...]
    products: Float[Array, " taps"]
    squares: Float[Array, " taps"]
    rounds: _Round


def adaptive(
    taps: int,
    noise: Variance,
    *,
    proportional: bool = False,
    floor: float = 1e-3,
) -> GradientTransformation:
    """Filter by a finite response whose taps follow the gradients' autocorrelation.

    From noisy gradients of earlier rounds and this one, c_0 = 1/2 and

        c_k = max(0, mean(<g_t, g_{t-k}> - d r_k) - max(mean(|g_{t-k}|^2 - d r_0), 0) / 2)
              / max(mean(|g_t|^2 - d r_0), floor)

    with means over all rounds so far, taken before anything is clamped. Negative c_k are set to 0,
    so that no tap falls below 0. The taps maximise the normalised ratio
    (``dpjax.contrib.snr``). At k = 0 the same formula would keep the noise and filter
    nothing, hence the 1/2. The tree is one model: behind ``Chain`` that is one agent's.

    Args:
        taps: Number of taps, 2 and above.
        noise: Variance r_0 of the noise in a coordinate of the noisy gradient, fresh in every
            round; or ``noise(round, lag)``, the covariance with the noise ``lag`` rounds before
            (`dpjax.transforms.lowpass.NoiseVariance`).
        proportional: The paper's taps c_k / sum c.
        floor: Smallest squared norm of a gradient, the paper's epsilon_1.

    Returns:
        The transformation.

    Raises:
        ValueError: For fewer taps, or noise that is not a variance.

    Reference:
        Zhang et al., DOPPLER, section 5.3.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.contrib.wiener import adaptive
        >>> link = adaptive(3, noise=0.0)
        >>> gradient = jnp.ones(4)
        >>> filtered, state = link.update(gradient, link.init(gradient))
        >>> filtered.shape
        (4,)
    """
    taps = _validate.integer("taps", taps, minimum=2)
    _validate.positive("floor", floor)
    _validate.flag("proportional", proportional)
    covariance = per_round(noise)

    def init(params: Params) -> _AdaptiveState:
        gradient = jax.tree.map(jnp.zeros_like, params)
        past = (gradient,) * (taps - 1)
        zeros = jnp.zeros(taps)
        return _AdaptiveState(past, zeros, zeros, jnp.int32(0))

    def update(
        updates: Updates, state: _AdaptiveState, params: Params | None = None
    ) -> tuple[Updates, _AdaptiveState]:
        window = (updates, *state.past)
        size = optax.tree.size(updates)
        t = state.rounds
        # Rounds in which g_{t-k} exists; means of other lags stay 0.
        available = jnp.maximum(t - jnp.arange(taps) + 1, 0)
        exists = available > 0
        weight = jnp.where(exists, 1 / jnp.maximum(available, 1), 0.0)
        crossed = []
        squared = []
        for k, old in enumerate(window):
            crossed.append(_product(updates, old) - size * covariance(t, k))
            before = jnp.maximum(t - k, 0)
            squared.append(_product(old, old) - size * covariance(before, 0))
        products = state.products + weight * (jnp.stack(crossed) - state.products)
        squares = state.squares + weight * (jnp.stack(squared) - state.squares)
        # Clamped only now: clamped terms would have means above zero under noise alone.
        excess = products - jnp.maximum(squares, 0) / 2
        c = jnp.maximum(excess, 0) / jnp.maximum(squares[0], floor)
        # The formula at k = 0 would keep the noise and filter nothing.
        c = jnp.where(exists, c.at[0].set(0.5), 0.0)
        if not proportional:
            # The taps that maximise the normalised ratio: raised by their root mean square.
            count = jnp.sum(exists).astype(c.dtype)
            squared_mean = jnp.sum(c**2) / count
            c = c + jnp.sqrt(squared_mean)
        c = jnp.where(exists, c, 0.0)
        b = c / jnp.sum(c)

        def filtered(*past: Array) -> Updates:
            return sum(b[k].astype(leaf.dtype) * leaf for k, leaf in enumerate(past))

        after = _AdaptiveState(window[:-1], products, squares, t + 1)
        return jax.tree.map(filtered, *window), after

    return GradientTransformation(init, update)


def _product(left: Updates, right: Updates) -> _Scalar:
    """<left, right> over all leaves, in float32."""

    def product(x: Array, y: Array) -> Array:
        return jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32))

    terms = jax.tree.leaves(jax.tree.map(product, left, right))
    return jnp.stack(terms).sum().astype(jnp.float32)


class _WienerState(NamedTuple):
    """The state of the filter: three copies of the model, or two without ``fresh``.

    Attributes:
        estimate: The filtered gradient, before any division by the response to ones.
        past: The last noisy gradients, the latest first.
        moments: Running means of <y_t, y_{t-k}> / d, corrected for the noise, k = 0, 1, ..
        error: Variance of the estimate's error in a coordinate.
        ones: The filter's response to ones.
        rounds: Rounds done.
    """

    estimate: Updates
    past: tuple[Updates, ...]
    moments: Float[Array, " lags"]
    error: _Scalar
    ones: _Scalar
    rounds: _Round


def wiener(
    noise: Variance,
    *,
    correlation: float | None = None,
    power: float | None = None,
    decay: float = 0.99,
    fresh: bool = True,
    unit: bool = False,
    floor: float = 1e-3,
) -> GradientTransformation:
    """Filter updates by the causal filter of least mean square error for an AR(1) gradient.

    With x_t = rho x_{t-1} + w_t of variance p in every coordinate, observed as y_t = x_t + n_t,

        m_t = rho m_{t-1} + K_t (y_t - rho m_{t-1})

    is the Kalman filter, with one gain for all coordinates. Unless rho and p are given, every round
    estimates them from running means over about 1 / (1 - decay) rounds,

        c_k = mean(<y_t, y_{t-k}> / d - r_{t,k}),     p = c_0,     rho = c_1 / c_0

    where ``fresh`` is False. A batch's gradient is the sum of a drifting part and a sampling part,
    which is fresh in every round. With ``fresh`` the sampling part counts as noise of variance
    c_0 - p, and rho = c_2 / c_1, p = c_1 / rho. Where it is large, the other estimate of rho is far
    too small, and filters of fixed length may have a smaller error.

    The correction is right for noise that is correlated over rounds, but the gain is that for fresh
    noise; ``dpjax.contrib.filtered`` has the filter for correlated noise. The tree is one
    model: behind ``Chain`` that is one agent's.

    The estimate is shrunk: where noise is large, the gradient of least square error is small.
    ``unit`` divides by the response to ones, as `lowpass` does, so that a constant gradient passes
    unchanged and step sizes need no rescaling.

    Args:
        noise: Variance r_t of the noise in a coordinate of the noisy gradient, (sigma C / B)^2 for
            a mean of B records; or ``noise(round, lag)``, the covariance with the noise ``lag``
            rounds before (`dpjax.transforms.lowpass.NoiseVariance`).
        correlation: rho, from 0 to below 1; None estimates it.
        power: p; None estimates it.
        decay: Decay of the running means, up to 1, which weighs all rounds equally.
        fresh: Whether the sampling part counts as noise of an estimated variance. It takes a third
            copy of the model.
        unit: Divide by the response to ones.
        floor: Smallest estimate of p, as a share of the noise's variance.

    Returns:
        The transformation.

    Raises:
        ValueError: For numbers outside these ranges.

    Reference:
        Kalman, A New Approach to Linear Filtering and Prediction Problems (1960). The model of
        gradients is the one of DiSK (Zhang et al. 2024), its gain is not.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.contrib.wiener import wiener
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
    _validate.fraction("decay", decay)
    _validate.positive("floor", floor)
    _validate.flag("fresh", fresh)
    _validate.flag("unit", unit)
    of_round = per_round(noise)
    # Without the sampling part, products one round apart and none are enough.
    lags = 3 if fresh else 2

    def init(params: Params) -> _WienerState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        past = (zeros,) * (lags - 1)
        moments = jnp.zeros(lags, jnp.float32)
        return _WienerState(zeros, past, moments, jnp.float32(0), jnp.float32(0), jnp.int32(0))

    def update(
        updates: Updates, state: _WienerState, params: Params | None = None
    ) -> tuple[Updates, _WienerState]:
        window = (updates, *state.past)
        t = state.rounds
        noises = [jnp.asarray(of_round(t, lag), jnp.float32) for lag in range(lags)]
        products = jnp.stack([_product(updates, old) for old in window])
        products = products / optax.tree.size(updates)
        products = products - jnp.stack(noises)
        # Weights add up to 1 from the first product on; there is none with rounds before the first.
        before = t - jnp.arange(lags)
        count = jnp.maximum(before, 0).astype(jnp.float32) + 1
        if decay == 1:
            weight = 1 / count
        else:
            weight = (1 - decay) / (1 - jnp.float32(decay) ** count)
        weight = jnp.where(before < 0, 0.0, weight)
        moments = state.moments + weight * (products - state.moments)
        p, rho, r = _model(moments, noises[0], floor, fresh)
        if power is not None:
            p = jnp.float32(power)
        if correlation is not None:
            rho = jnp.float32(correlation)
        # Kalman's error before the round's gradient, and its gain.
        square = rho**2
        predicted = square * state.error + (1 - square) * p
        ahead = jnp.where(t > 0, predicted, p)
        gain = ahead / (ahead + r)
        memory = rho * (1 - gain)
        # What a gradient of ones becomes: below one while the filter shrinks.
        ones = memory * state.ones + gain

        def mixed(old: Array, new: Array) -> Array:
            return memory.astype(new.dtype) * old + gain.astype(new.dtype) * new

        estimate = jax.tree.map(mixed, state.estimate, updates)
        error = (1 - gain) * ahead
        after = _WienerState(estimate, window[:-1], moments, error, ones, t + 1)
        if unit:
            estimate = jax.tree.map(lambda leaf: leaf / ones.astype(leaf.dtype), estimate)
        return estimate, after

    return GradientTransformation(init, update)


def _model(
    moments: Float[Array, " lags"], noise: _Scalar, floor: float, fresh: bool
) -> tuple[_Scalar, _Scalar, _Scalar]:
    """p, rho and the variance of the noise, from moments."""
    # Under large noise the estimate may be zero or less, and a gain of zero would never leave.
    smallest = floor * noise + _TINY
    power = jnp.maximum(moments[0], smallest)
    if not fresh:
        return power, jnp.clip(moments[1] / power, 0.0, _LARGEST), noise
    first = jnp.maximum(moments[1], smallest)
    # Before a product two rounds apart exists, one round apart must do.
    single, double = moments[1:]
    ratio = jnp.where(double == 0, single / power, double / first)
    rho = jnp.clip(ratio, 0, _LARGEST)
    drifting = first / jnp.maximum(rho, floor)
    drifting = jnp.clip(drifting, smallest, power)
    return drifting, rho, noise + power - drifting
