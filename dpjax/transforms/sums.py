"""Clipping per record by a model's own sum of gradients, which never forms a record's gradient."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dpjax.transforms import clipping

__all__: list[str] = []

_STABILITY = 0.01


def clipped_sum(
    weighted: Callable[..., Any],
    clip_norm: float,
    *,
    method: clipping.Clipping = "flat",
) -> Callable[..., Any]:
    """`dpjax.transforms.clipping.per_example` for a model that knows its gradients' norms.

    sum_b w_b g_b, w_b = min(1, C / |g_b|), or C / (|g_b| + 0.01) for automatic clipping.

    Guarantee: as `per_example`'s. C is lowered by `clipping.slack`, by the rounding of the norms,
    2^-24 (in float32) for each input and output of every layer, and by what entries below the
    normal range can add: every term's L2 norm is at most ``clip_norm`` in exact arithmetic. A
    record marked as padding adds exactly zero, and so does one whose gradient is not finite.

    Args:
        weighted: ``weighted(params, x, y, weights)``, such as
            `dpjax.models.mlp.weighted_gradients` of a model and a loss.
        clip_norm: Clip norm C of one record's gradient.
        method: "flat" or "automatic".

    Returns:
        ``fn(params, x, y, is_padding=None)``, to a tree like params.
    """

    def fn(params: Any, x: Array, y: Array, is_padding: Bool[Array, " b"] | None = None) -> Any:
        bound = _lowered(params, clip_norm)

        def weights(norms: Float[Array, " b"]) -> Float[Array, " b"]:
            if method == "automatic":
                scale = bound / (norms + _STABILITY)
            else:
                tiny = jnp.finfo(norms.dtype).tiny
                scale = jnp.minimum(1.0, bound / jnp.maximum(norms, tiny))
            scale = jnp.where(jnp.isfinite(norms), scale, 0)
            return scale if is_padding is None else jnp.where(is_padding, 0, scale)

        return weighted(params, x, y, weights)

    return fn


def _lowered(params: Any, clip_norm: float) -> float:
    leaves = jax.tree.leaves(params)
    kinds = [jnp.finfo(leaf.dtype) for leaf in leaves]
    unit = max(float(kind.eps) for kind in kinds) / 2
    sides = sum(sum(leaf.shape) for leaf in leaves)
    floor = max(float(kind.tiny) for kind in kinds)
    size = sum(leaf.size for leaf in leaves)
    bound = clip_norm * (1 - clipping.slack(params) - sides * unit) - math.sqrt(size) * floor
    if not bound > 0:
        raise ValueError(
            f"clip_norm is {clip_norm}, below what rounding of {size} numbers hides; give a larger "
            "one"
        )
    return bound
