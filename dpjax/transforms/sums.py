"""Clipping per record by a model's own sum of gradients, which never forms a record's gradient."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dpjax import _layers, _validate
from dpjax.transforms import clipping

__all__ = ["clipped_sum"]

_STABILITY = 0.01


def clipped_sum(
    weighted: Any,
    clip_norm: float,
    *,
    method: clipping.Clipping = "flat",
    per_layer: bool = False,
    microbatch: int | None = None,
) -> Callable[..., Any]:
    """`dpjax.transforms.clipping.per_example` for a model that knows its gradients' norms.

    sum_b w_b g_b, w_b = min(1, C / |g_b|), or C / (|g_b| + 0.01) for automatic clipping; per layer,
    the same of each of L layers with C / sqrt(L).

    Guarantee: as `per_example`'s. C is lowered by `clipping.slack`, by what entries below the
    normal range can add, and, unless the norms are stated to be bounds, by the rounding of the
    norms, 2^-24 (in float32) for each input and output of every layer: every term's L2 norm is at
    most ``clip_norm`` in exact arithmetic. A record marked as padding adds exactly zero, and so
    does one whose gradient (per layer: whose layer) is not finite.

    Args:
        weighted: ``weighted(params, x, y, weights)``: a `dpjax.models.taps.Gradients`, whose norms
            are bounds; or a function of one's own, whose norms may be off by the rounding above.
        clip_norm: Clip norm C of one record's gradient.
        method: "flat" or "automatic".
        per_layer: Whether every layer is clipped by itself; asks for ``weighted.by_layer``.
        microbatch: Records at once, to bound memory; None is `weighted`'s own choice, or all. A
            batch it does not divide is padded. It changes the order of the sum alone.

    Returns:
        ``fn(params, x, y, is_padding=None)``, to a tree like params. It works on an empty batch.

    Raises:
        ValueError: For invalid numbers, or a `weighted` that is no such function; when called, for
            x, y and is_padding of different lengths.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from dpjax.models import losses, mlp, taps
        >>> from dpjax.transforms import sums
        >>> model = mlp.MLP(hidden=(4,), outputs=2)
        >>> x, y = jnp.ones((3, 5)), jnp.array([0, 1, 1])
        >>> gradients = taps.Gradients(model.apply, losses.cross_entropy)
        >>> total = sums.clipped_sum(gradients, 0.1)(model.init(jax.random.key(0), x), x, y)
    """
    clip_norm, _ = clipping.check(clip_norm, method, _STABILITY)
    _validate.flag("per_layer", per_layer)
    bounds = hasattr(weighted, "by_layer")
    if not callable(weighted) or (per_layer and not bounds):
        asked = " with by_layer, as models.taps.Gradients has," if per_layer else ""
        raise ValueError(
            f"weighted is {_validate.shown(weighted)}; give a function{asked} of params, x, y and "
            "weights, or use per_example"
        )
    if microbatch is not None:
        microbatch = _validate.integer("microbatch", microbatch)

    def fn(params: Any, x: Array, y: Array, is_padding: Bool[Array, " b"] | None = None) -> Any:
        count = clipping.examples(x, y, is_padding)
        if is_padding is not None:
            is_padding = jnp.asarray(is_padding, bool)
        if method == "automatic":
            clipping.check_reach(params, clip_norm)
        limits = _limits(params, clip_norm, per_layer, exact=bounds)

        def part(x: Array, y: Array, is_padding: Bool[Array, " b"] | None) -> Any:
            def weights(norms: Float[Array, "b *layers"]) -> Float[Array, "b *layers"]:
                bound = jnp.asarray(limits if per_layer else limits[0], norms.dtype)
                if method == "automatic":
                    scale = bound / (norms + _STABILITY)
                else:
                    tiny = jnp.finfo(norms.dtype).tiny
                    scale = jnp.minimum(1.0, bound / jnp.maximum(norms, tiny))
                scale = jnp.where(jnp.isfinite(norms), scale, 0)
                if is_padding is None:
                    return scale
                return jnp.where(is_padding[:, None] if per_layer else is_padding, 0, scale)

            summed = weighted.by_layer if per_layer else weighted
            return summed(params, x, y, weights)

        if count == 0:
            one = [jax.ShapeDtypeStruct((1, *each.shape[1:]), each.dtype) for each in (x, y)]
            shapes = jax.eval_shape(lambda x, y: part(x, y, None), *one)
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        size = microbatch
        if size is None and bounds:
            size = weighted.at_once(params, x)
        if size is None or size >= len(x):
            return part(x, y, is_padding)
        return _in_passes(part, size, x, y, is_padding)

    return fn


def _in_passes(
    part: Callable[..., Any], size: int, x: Array, y: Array, padding: Bool[Array, " b"] | None
) -> Any:
    """The sum over passes of ``size`` records, the last of which is filled up."""
    extra = -len(x) % size
    padding = jnp.zeros(len(x), bool) if padding is None else padding
    if extra:
        # Repeated, not zero: a loss may be undefined at zero, and padding must stay cheap.
        x, y = (jnp.concatenate([each, jnp.repeat(each[:1], extra, axis=0)]) for each in (x, y))
        padding = jnp.concatenate([padding, jnp.ones(extra, bool)])
    passes = [each.reshape(-1, size, *each.shape[1:]) for each in (x, y, padding)]
    first = jax.eval_shape(part, *(each[0] for each in passes))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first)

    def add(total: Any, one: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, part(*one)), None

    return jax.lax.scan(add, zeros, passes)[0]


def _limits(params: Any, clip_norm: float, per_layer: bool, *, exact: bool) -> list[float]:
    """The clip norm of all leaves, or of each layer, less everything that rounding can add."""
    leaves = jax.tree.leaves(params)
    layers = _layers.groups(params) if per_layer else [list(range(len(leaves)))]
    share = _layers.share(clip_norm, len(layers))
    return [_lowered([leaves[i] for i in layer], share, exact=exact) for layer in layers]


def _lowered(leaves: list[Any], clip_norm: float, *, exact: bool) -> float:
    kinds = [jnp.finfo(leaf.dtype) for leaf in leaves]
    unit = max(float(kind.eps) for kind in kinds) / 2
    sides = 0 if exact else sum(sum(leaf.shape) for leaf in leaves)
    floor = max(float(kind.tiny) for kind in kinds)
    size = sum(leaf.size for leaf in leaves)
    bound = clip_norm * (1 - clipping.slack(leaves) - sides * unit) - math.sqrt(size) * floor
    if not bound > 0:
        raise ValueError(
            f"clip_norm is {clip_norm}, below what rounding of {size} numbers hides; give a larger "
            "one"
        )
    return bound
