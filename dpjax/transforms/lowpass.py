"""Low-pass filters over rounds as optax links: post-processing of noisy gradients.

Guarantee: none of its own and none lost. A link sees privatised gradients alone, so that a run with
a filter states what the run without it does, for any attacker and relation. In front of the noise
it would sum one record's gradients over rounds, and no accounting here covers that: put it into the
optimizer (``Chain(lambda step: optax.chain(lowpass(b, a), optax.sgd(step)), 0.5)``), which stands
behind the noise.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from dpjax import _validate
from dpjax.mechanism import filters
from dpjax.transforms import leaves

__all__ = ["FILTERS", "AdaptiveState", "LowpassState", "adaptive", "lowpass"]


FILTERS = filters.PUBLISHED
"""The published filters (b, a) by name (Zhang et al., DOPPLER, Tables 2 and 4)."""


class LowpassState(NamedTuple):
    """What a filter keeps: max(p, q) copies of the model.

    Attributes:
        delayed: Sums of past inputs and outputs that rounds to come add to, the next one first.
        ones: [max(p, q)] the same of a stream of ones.
    """

    delayed: tuple[Any, ...]
    ones: Float[Array, " k"]


def lowpass(b: Sequence[float], a: Sequence[float] = ()) -> optax.GradientTransformation:
    """Filter updates over rounds, corrected for the zero start.

    m_t = - sum_k a_k m_{t-k} + sum_k b_k g_{t-k}, divided by the same recursion on ones. A filter
    of no lags returns updates as they are. Works on any tree, agent-stacked or not, and needs no
    params. Two links one after the other filter twice: momentum behind it is a filter of its own.

    Args:
        b: b_0 .. b_q.
        a: a_1 .. a_p, without the leading 1, unlike scipy.

    Returns:
        The transformation; its state is a `LowpassState`.

    Raises:
        ValueError: For coefficients that `dpjax.mechanism.filters.checked` refuses.

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
    made = filters.checked(b, a)
    order = max(len(made.b) - 1, len(made.a))
    taps = jnp.zeros(order + 1).at[: len(made.b)].set(jnp.asarray(made.b))
    feedback = jnp.zeros(order).at[: len(made.a)].set(jnp.asarray(made.a))

    def step(delayed: Any, given: Any) -> tuple[Any, list[Any]]:
        # Direct form II transposed: max(p, q) copies where p + q past values would do as well.
        weights, back = taps.astype(given.dtype), feedback.astype(given.dtype)
        out = weights[0] * given + (delayed[0] if order else 0)
        later = [*delayed[1:], 0]
        return out, [weights[k + 1] * given - back[k] * out + later[k] for k in range(order)]

    def init(params: Any) -> LowpassState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return LowpassState((zeros,) * order, jnp.zeros(order))

    def update(updates: Any, state: LowpassState, params: Any = None) -> tuple[Any, LowpassState]:
        del params
        if not order:
            return updates, state
        correction, ones = step(state.ones, jnp.ones(()))
        flat, structure = jax.tree.flatten(updates)
        past = [jax.tree.leaves(tree) for tree in state.delayed]
        pairs = [step([tree[i] for tree in past], jnp.asarray(leaf)) for i, leaf in enumerate(flat)]
        new = [
            jax.tree.unflatten(structure, [delayed[k] for _, delayed in pairs])
            for k in range(order)
        ]
        out = [leaf / correction.astype(leaf.dtype) for leaf, _ in pairs]
        return jax.tree.unflatten(structure, out), LowpassState(tuple(new), jnp.stack(ones))

    return optax.GradientTransformation(init, update)


class AdaptiveState(NamedTuple):
    """What an adaptive filter keeps: one copy of the model for every tap but the first.

    Attributes:
        past: g_{t-1}, g_{t-2}, ...
        products: [taps] running means of <g_t, g_{t-k}>, the noise's taken off.
        squares: [taps] running means of |g_{t-k}|^2 over the same rounds, the noise's taken off.
        rounds: Rounds done.
    """

    past: tuple[Any, ...]
    products: Float[Array, " taps"]
    squares: Float[Array, " taps"]
    rounds: Int[Array, ""]


def adaptive(
    taps: int,
    noise: float | Sequence[float] | Callable[..., Any],
    *,
    proportional: bool = False,
    floor: float = 1e-3,
) -> optax.GradientTransformation:
    """Filter by a finite response whose taps follow the gradients' autocorrelation.

    From privatised gradients of earlier rounds and this one, c_0 = 1/2 and

        c_k = max(0, mean(<g_t, g_{t-k}> - d r_k) - max(mean(|g_{t-k}|^2 - d r_0), 0) / 2)
              / max(mean(|g_t|^2 - d r_0), floor)

    with means over all rounds so far, taken before anything is clamped. Negative c_k are set to 0,
    so that no tap falls below 0. The taps maximise the normalised ratio
    (``experiments/_common/snr.py``). At k = 0 the same formula would keep the noise and filter
    nothing, hence the 1/2. The tree is one model: behind ``Chain`` that is one agent's.

    Args:
        taps: How many, 2 and above.
        noise: Variance r_0 of the noise in a coordinate of what comes in; or r_0, r_1, .. where
            noise is correlated over rounds, 0 beyond; or ``noise(round, lag)`` where that changes
            (`dpjax.transforms.variance.NoiseVariance`).
        proportional: The paper's taps c_k / sum c.
        floor: Least squared norm of a gradient, the paper's epsilon_1.

    Returns:
        The transformation; its state is an `AdaptiveState`.

    Raises:
        ValueError: For fewer taps, or noise that is not a variance.

    Reference:
        Zhang et al., DOPPLER, section 5.3.
    """
    taps = _validate.integer("taps", taps, least=2)
    _validate.positive("floor", floor)
    _validate.flag("proportional", proportional)
    covariance = noise if callable(noise) else _constant(noise, taps)

    def init(params: Any) -> AdaptiveState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AdaptiveState(
            (zeros,) * (taps - 1), jnp.zeros(taps), jnp.zeros(taps), jnp.zeros((), jnp.int32)
        )

    def update(updates: Any, state: AdaptiveState, params: Any = None) -> tuple[Any, Any]:
        del params
        window = (updates, *state.past)
        size = sum(leaf.size for leaf in jax.tree.leaves(updates))
        lag = jnp.arange(taps)
        # Rounds in which g_{t-k} exists; means of other lags stay as they are, at 0.
        seen = jnp.maximum(state.rounds - lag + 1, 0)
        weight = jnp.where(seen > 0, 1 / jnp.maximum(seen, 1), 0.0)
        t = state.rounds
        now = jnp.stack(
            [leaves.product(updates, old) - size * covariance(t, k) for k, old in enumerate(window)]
        )
        before = jnp.stack(
            [
                leaves.product(old, old) - size * covariance(jnp.maximum(t - k, 0), 0)
                for k, old in enumerate(window)
            ]
        )
        products = state.products + weight * (now - state.products)
        squares = state.squares + weight * (before - state.squares)
        kept = products - jnp.maximum(squares, 0) / 2
        c = jnp.maximum(kept, 0) / jnp.maximum(squares[0], floor)
        c = jnp.where(seen > 0, c.at[0].set(0.5), 0.0)
        count = jnp.sum(seen > 0)
        raised = c if proportional else c + jnp.sqrt(jnp.sum(c**2) / count)
        raised = jnp.where(seen > 0, raised, 0.0)
        b = raised / jnp.sum(raised)
        out = jax.tree.map(
            lambda *past: sum(b[k].astype(leaf.dtype) * leaf for k, leaf in enumerate(past)),
            *window,
        )
        state = AdaptiveState(window[:-1], products, squares, state.rounds + 1)
        return out, state

    return optax.GradientTransformation(init, update)


def _constant(noise: Any, taps: int) -> Callable[[Any, int], Any]:
    """The same covariance in every round."""
    if not isinstance(noise, jax.Array):
        one = isinstance(noise, float | int | np.number) and not isinstance(noise, bool)
        noise = _validate.finite_array("noise", [noise] if one else noise, ndim=1)
        if noise[0] < np.abs(noise).max():
            raise ValueError(
                f"noise is {_validate.shown(noise)}; give its variance, of at least 0, then "
                "covariances that are no larger"
            )
    given = jnp.atleast_1d(jnp.asarray(noise, jnp.float32))[:taps]
    lags = jnp.zeros(taps).at[: len(given)].set(given)
    return lambda round, lag: lags[lag]
