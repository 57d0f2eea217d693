"""Filters over rounds as optax links: post-processing of noisy gradients.

`lowpass` is a fixed recursion. Links that need the public noise variance take a `NoiseVariance`;
``dpjax.contrib.wiener`` has filters that follow the gradients.

Guarantee: none by themselves. A link reads noisy gradients alone, so that a run with a filter has
the guarantee of the run without it, for any attacker and relation. Before the noise it would sum
one record's gradients over rounds, which no accounting here covers. Put it into the optimizer
behind the noise: ``Chain(lambda step: optax.chain(lowpass(b, a), optax.sgd(step)), 0.5)``.
"""

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from optax import GradientTransformation, Params, Updates

from dpjax import _validate
from dpjax._numerics import Integer, Scalar
from dpjax.mechanism import filters

__all__ = ["FILTERS", "NoiseVariance", "lowpass", "passed"]


FILTERS = filters.PUBLISHED
"""The published filters (b, a) by name (Zhang et al., DOPPLER, Tables 2 and 4)."""
LAGS = 64
"""Lags at which noise that is correlated over rounds is known to an optimizer."""
SHARES = "share_variance"
"""Name, among a plan's arrays, of the variances [n] of agents' shares in a sum."""


class NoiseVariance(NamedTuple):
    """Variance of the noise in a coordinate of an optimizer's input.

    It is public, since it follows from the plan. Links of `dpjax.contrib.optimizers` take it as
    their ``noise``.

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

    scale: float | Scalar
    profile: Float[Array, "t lags"] | None = None

    def __call__(self, round: int | Integer, lag: int = 0) -> float | Scalar:
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


def passed(round: int | Integer, lag: int = 0) -> NoReturn:
    """The ``noise`` of a link whose updates receive it: ``update(..., noise_variance=)``.

    The variance of a server's mean depends on the present clients, and with a sketch on the
    coordinate.

    Raises:
        ValueError: Always: it is no function of the round.

    Example:
        >>> from dpjax.contrib import optimizers
        >>> from dpjax.transforms import lowpass
        >>> link = optimizers.scale_by_adam(lowpass.passed)  # update(..., noise_variance=...)
    """
    del round, lag
    raise ValueError(
        "noise is passed with every update, by coordinate, and this link asks for one number a "
        "round; give one that reads update(..., noise_variance=), as scale_by_adam does (of "
        "dpjax.contrib.optimizers)"
    )


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

        def filtered(leaf: Array, *delays: Array) -> list[Array]:
            output, sums = step(delays, jnp.asarray(leaf))
            return [output / correction.astype(output.dtype), *sums]

        # A leaf's output comes first, then its sums for coming rounds.
        streams = jax.tree.map(filtered, updates, *state.delayed)
        trees = []
        for k in range(order + 1):
            trees.append(jax.tree.map(lambda _, stream, k=k: stream[k], updates, streams))
        return trees[0], _LowpassState(tuple(trees[1:]), jnp.stack(ones))

    return GradientTransformation(init, update)
