"""Filters over rounds as optax links: post-processing of noisy gradients.

`lowpass` is a fixed recursion, `adaptive` a finite response whose weights follow the gradients,
`wiener` the causal filter of least error for gradients that drift.
Those that follow the gradients take the public noise variance as a `NoiseVariance`.

Guarantee: none by themselves. A link reads noisy gradients alone, so that a run with a filter has
the guarantee of the run without it, for any attacker and relation. Before the noise it would sum
one record's gradients over rounds, which no accounting here covers. Put it into the optimizer
behind the noise: ``Chain(lambda step: optax.chain(lowpass(b, a), optax.sgd(step)), 0.5)``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int
from optax import GradientTransformation, Params, Updates

from dpjax import _validate
from dpjax.mechanism import filters

__all__ = ["FILTERS", "NoiseVariance", "adaptive", "lowpass", "passed", "wiener"]

_Scalar = Float[Array, ""]
_Round = Int[Array, ""]
Variance = float | _Scalar | Callable[..., Any]

FILTERS = filters.PUBLISHED
"""The published filters (b, a) by name (Zhang et al., DOPPLER, Tables 2 and 4)."""
LAGS = 64
"""Lags at which noise that is correlated over rounds is known to an optimizer."""
SHARES = "share_variance"
"""Name, among a plan's arrays, of the variances [n] of agents' shares in a sum."""

_LARGEST = 0.999
"""Largest correlation that is estimated: a filter of about a thousand rounds."""
_TINY = 1e-30
"""The divisor for gradients that are zero without noise."""


class NoiseVariance(NamedTuple):
    """Variance of the noise in a coordinate of an optimizer's input.

    It is public, since it follows from the plan. Links here and in
    `dpjax.transforms.optimizers` take it as their ``noise``.

    Attributes:
        scale: Variance of noise that is fresh in every round, or what ``profile`` multiplies.
        profile: [T, LAGS] covariance of rounds t and t - lag for noise correlated over rounds, of
            scale 1; None where it is fresh in every round.

    Example:
        >>> from dpjax.transforms.lowpass import NoiseVariance
        >>> variance = NoiseVariance(0.25)
        >>> float(variance(3)), float(variance(3, lag=1))
        (0.25, 0.0)
    """

    scale: float | _Scalar
    profile: Float[Array, "t lags"] | None = None

    def __call__(self, round: int | _Round, lag: int = 0) -> float | _Scalar:
        """Covariance of a coordinate's noise in a round with that ``lag`` rounds before.

        Args:
            round: From 0.
            lag: 0 for the variance.

        Raises:
            ValueError: For a lag outside 0 .. `LAGS` - 1.
        """
        lag = _validate.integer("lag", lag, minimum=0, maximum=LAGS - 1)
        if self.profile is not None:
            return self.scale * jnp.asarray(self.profile)[round, lag]
        return self.scale if lag == 0 else self.scale * 0.0


def passed(round: int | _Round, lag: int = 0) -> NoReturn:
    """The ``noise`` of a link whose updates receive it: ``update(..., noise_variance=)``.

    The variance of a server's mean depends on the present clients, and with a sketch on the
    coordinate.

    Raises:
        ValueError: Always: it is no function of the round.

    Example:
        >>> from dpjax.transforms import lowpass, optimizers
        >>> link = optimizers.scale_by_adam(lowpass.passed)  # update(..., noise_variance=...)
    """
    del round, lag
    raise ValueError(
        "noise is passed with every update, by coordinate, and this link asks for one number a "
        "round; give one that reads update(..., noise_variance=), as optimizers.scale_by_adam does"
    )


def per_round(noise: Variance) -> Callable[..., Any] | NoiseVariance:
    """Return the variance as a function of the round, from a number or a function.

    Args:
        noise: A variance, fresh in every round; or a function of the round, and of the lag if
            needed. Functions and arrays are not checked.

    Raises:
        ValueError: For another value, or one below 0.
    """
    if callable(noise):
        return noise
    if not isinstance(noise, jax.Array) and _validate.number("noise", noise) < 0:
        raise ValueError(f"noise is {noise!r}; give a variance of at least 0")
    return NoiseVariance(noise)


class _LowpassState(NamedTuple):
    """The state of a filter: max(p, q) copies of the model.

    Attributes:
        delayed: Sums of past inputs and outputs for coming rounds, the next one first.
        ones: [max(p, q)] the same of a stream of ones.
    """

    delayed: tuple[Updates, ...]
    ones: Float[Array, " k"]


def lowpass(b: Sequence[float], a: Sequence[float] = ()) -> GradientTransformation:
    """Filter updates over rounds, corrected for the zero start.

    m_t = - sum_k a_k m_{t-k} + sum_k b_k g_{t-k}, divided by the same recursion on ones. A filter
    without lags returns updates unchanged. It works on any tree, agent-stacked or not, and needs no
    params. Two links in a row filter twice, and momentum behind it is a second filter.

    Args:
        b: b_0 .. b_q.
        a: a_1 .. a_p, without the leading 1, unlike scipy.

    Returns:
        The transformation.

    Raises:
        ValueError: For coefficients that `dpjax.mechanism.filters.check_filter` refuses.

    Reference:
        Zhang et al., DOPPLER, Algorithm 2.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.transforms.lowpass import FILTERS, lowpass
        >>> link = lowpass(*FILTERS["f1"])
        >>> first, state = link.update(jnp.array([4.0]), link.init(jnp.zeros(1)))
        >>> second, state = link.update(jnp.array([0.0]), state)
        >>> [round(float(x[0]), 2) for x in (first, second)]
        [4.0, 2.21]
    """
    coefficients = filters.check_filter(b, a)
    order = max(len(coefficients.b) - 1, len(coefficients.a))
    # Of one length, so that a step knows neither p nor q.
    forward = jnp.asarray(coefficients.b)
    backward = jnp.asarray(coefficients.a)
    taps = jnp.zeros(order + 1).at[: len(forward)].set(forward)
    feedback = jnp.zeros(order).at[: len(backward)].set(backward)

    def step(delayed: Sequence[Array] | Array, value: Array) -> tuple[Array, list[Array]]:
        # Direct form II transposed needs max(p, q) copies, and not p + q past values.
        weights = taps.astype(value.dtype)
        back = feedback.astype(value.dtype)
        output = weights[0] * value + delayed[0]
        later = [*delayed[1:], 0]
        sums = []
        for k in range(order):
            term = weights[k + 1] * value - back[k] * output
            sums.append(term + later[k])
        return output, sums

    def init(params: Params) -> _LowpassState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return _LowpassState((zeros,) * order, jnp.zeros(order))

    def update(
        updates: Updates, state: _LowpassState, params: Params | None = None
    ) -> tuple[Updates, _LowpassState]:
        if not order:
            return updates, state
        # The response to ones corrects for the zero start.
        correction, ones = step(state.ones, jnp.ones(()))
        leaves, structure = jax.tree.flatten(updates)
        past = [jax.tree.leaves(tree) for tree in state.delayed]
        filtered = []
        delayed: list[list[Array]] = [[] for _ in range(order)]
        for i, leaf in enumerate(leaves):
            delays = [tree[i] for tree in past]
            output, sums = step(delays, jnp.asarray(leaf))
            filtered.append(output / correction.astype(output.dtype))
            for tree, term in zip(delayed, sums, strict=True):
                tree.append(term)
        trees = tuple(jax.tree.unflatten(structure, tree) for tree in delayed)
        return jax.tree.unflatten(structure, filtered), _LowpassState(trees, jnp.stack(ones))

    return GradientTransformation(init, update)


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
            (`NoiseVariance`).
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
        >>> from dpjax.transforms import lowpass
        >>> link = lowpass.adaptive(3, noise=0.0)
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
            rounds before (`NoiseVariance`).
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
        >>> from dpjax.transforms.lowpass import wiener
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
