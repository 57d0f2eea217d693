"""Adam for noisy gradients: the second moment without the noise's variance.

Guarantee: none of its own and none lost: post-processing of privatised gradients. What is taken off
the second moment is the variance that the noise is known to have, not data.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from dpjax import _validate
from dpjax.mechanism import filters
from dpjax.transforms import variance
from dpjax.transforms.lowpass import lowpass

__all__ = ["AdamState", "scale_by_adam"]


class AdamState(NamedTuple):
    """What Adam keeps.

    Attributes:
        first: State of the first moment's filter.
        second: Running means of squared gradients, noise included, but for one that was told.
        noise: Running mean of the noise's variance, which ``second`` includes.
        rounds: Rounds done.
    """

    first: Any
    second: Any
    noise: Float[Array, ""]
    rounds: Int[Array, ""]


def scale_by_adam(
    noise: variance.Variance,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    floor: float = 1e-8,
    filter: tuple[Sequence[float], Sequence[float]] | None = None,
) -> optax.GradientTransformation:
    """Divide a filtered gradient by the root of its second moment, the noise's variance taken off.

    m / sqrt(max(v - noise, floor)): m the bias-corrected first moment, an average at rate b1 or a
    low-pass filter in its place, v the bias-corrected average of squares of what comes in, which is
    gradient and noise together, and noise its variance, averaged over the rounds as v is. With
    noise = 0 it is Adam, whose v holds mostly noise. A filter stands here and not in front: there v
    would hold noise of variance noise * sum kappa^2.

    Args:
        noise: Variance of the noise in a coordinate of what comes in, (sigma C / B)^2 for a mean of
            B records; or a function of the round where it changes; or
            `dpjax.transforms.variance.TOLD`, where every update comes with it: a number, or a tree
            like the update's, by coordinate.
        b1: Decay of the first moment, without a filter.
        b2: Decay of the second.
        floor: Least second moment.
        filter: (b, a) of a low-pass filter as the first moment.

    Returns:
        The transformation, without a step size; its state is an `AdamState`. Its ``update`` takes
        ``noise_variance``, where noise is told, and only there.

    Raises:
        ValueError: For noise below 0, decays outside [0, 1), a floor of 0, or a filter that
            `lowpass` refuses.

    Reference:
        Tang et al., DP-AdamBC (2024), Algorithm 1; by coordinate, Nicolas et al., Lemma 3.2; Zhang
        et al., DOPPLER, Algorithm 3, whose v is corrected by 1 - beta^t where its recursion,
        counting from 0, needs 1 - (1 - beta)^(t+1), and keeps the noise.
    """
    of_round = variance.per_round(noise)
    _validate.positive("floor", floor)
    for name, decay in (("b1", b1), ("b2", b2)):
        if not 0 <= _validate.number(name, decay) < 1:
            raise ValueError(f"{name} is {decay!r}; give a decay from 0 to below 1")
    b, a = ((1 - b1,), (-b1,) if b1 else ()) if filter is None else filters.read(filter)
    first = lowpass(b, a)

    def init(params: Any) -> AdamState:
        second = jax.tree.map(jnp.zeros_like, params)
        rounds = jnp.zeros((), jnp.int32)
        return AdamState(first.init(params), second, jnp.zeros((), jnp.float32), rounds)

    def update(
        updates: Any,
        state: AdamState,
        params: Any = None,
        *,
        noise_variance: Any = None,
        **others: Any,
    ) -> tuple[Any, AdamState]:
        del params, others
        mean, kept = first.update(updates, state.first)
        squares = jax.tree.map(jnp.square, updates)
        if noise is variance.TOLD:
            # By coordinate, so off each square: a mean of its own would be one more model to keep.
            if noise_variance is None:
                raise ValueError("noise_variance is None for noise that is told; give the variance")
            squares, now = _off(squares, noise_variance), jnp.float32(0)
        else:
            now = of_round(state.rounds)
        second = jax.tree.map(lambda old, new: b2 * old + (1 - b2) * new, state.second, squares)
        done = state.rounds + 1
        correction = 1 - jnp.float32(b2) ** done
        known = b2 * state.noise + (1 - b2) * now
        out = jax.tree.map(
            lambda m, v: m / jnp.sqrt(jnp.maximum((v - known) / correction, floor)).astype(m.dtype),
            mean,
            second,
        )
        return out, AdamState(kept, second, known.astype(jnp.float32), done)

    return optax.GradientTransformationExtraArgs(init, update)


def _off(squares: Any, noise_variance: Any) -> Any:
    """Squares less what noise adds to them on average."""
    if not jax.tree_util.treedef_is_leaf(jax.tree.structure(squares)) and (
        jax.tree_util.treedef_is_leaf(jax.tree.structure(noise_variance))
    ):
        noise_variance = jax.tree.map(lambda _: noise_variance, squares)
    return jax.tree.map(lambda s, v: s - jnp.asarray(v, s.dtype), squares, noise_variance)
