"""Clipping per record by a model's own sum of gradients, which never forms a record's gradient."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dpjax import _numerics, _validate
from dpjax.transforms import clipping

__all__ = ["clipped_sum"]


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

    Guarantee: as `per_example`'s. The clip norm of a record is lowered as there, by
    `clipping.slack`, by what entries below the normal range can add, and, unless the norms are
    stated to be bounds, by the rounding of the norms, 2^-24 (in float32) for each input and output
    of every layer. Passes are added up in float64. A pass of m records of a function of one's own
    is assumed to be wrong by at most (m + inputs and outputs of all layers) 2^-24 of the terms'
    norms, added up. A record marked as padding adds exactly zero, and so does one whose gradient
    (per layer: whose layer) is not finite.

    Args:
        weighted: ``weighted(params, x, y, weights)``: a `dpjax.models.taps.Gradients`, whose norms
            are bounds; or a function of one's own, whose norms may be off by the rounding above.
        clip_norm: Clip norm C of one record's gradient.
        method: "flat" or "automatic".
        per_layer: Whether every layer is clipped by itself; asks for ``weighted.by_layer``.
        microbatch: Records at once, to bound memory; None is `weighted`'s own choice, or all. A
            batch it does not divide is padded.

    Returns:
        ``fn(params, x, y, is_padding=None)``, to a tree like params. It works on an empty batch.

    Raises:
        ValueError: For invalid numbers, or a `weighted` that is no such function; when called, for
            x, y and is_padding of different lengths, or parameters whose dtype cannot hold B C.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from dpjax.models import losses, mlp, taps
        >>> from dpjax.transforms import sums
        >>> model = mlp.MLP(hidden=(4,), outputs=2)
        >>> x, y = jnp.ones((3, 5)), jnp.array([0, 1, 1])
        >>> gradients = taps.Gradients(model.apply, losses.cross_entropy)
        >>> total = sums.clipped_sum(gradients, 0.1)(model.init(jax.random.key(0), x), x, y)
    """
    clip_norm, _ = clipping.check(clip_norm, method, clipping.STABILITY)
    _validate.flag("per_layer", per_layer)
    if not callable(weighted) or (per_layer and not hasattr(weighted, "by_layer")):
        asked = " with by_layer, as models.taps.Gradients has," if per_layer else ""
        raise ValueError(
            f"weighted is {_validate.shown(weighted)}; give a function{asked} of params, x, y and "
            "weights, or use per_example"
        )
    if microbatch is not None:
        microbatch = _validate.integer("microbatch", microbatch)

    wide = wide_clipped_sum(weighted, clip_norm, method, per_layer, microbatch)

    def fn(params: Any, x: Array, y: Array, is_padding: Bool[Array, " b"] | None = None) -> Any:
        return _numerics.rounded_sum(wide(params, x, y, is_padding), _like(weighted, params))

    return fn


def wide_clipped_sum(
    weighted: Any,
    clip_norm: float,
    method: clipping.Clipping,
    per_layer: bool,
    microbatch: int | None,
) -> Callable[..., Any]:
    """`clipped_sum` before it is rounded, in float64; arguments as there, checked.

    Returns:
        ``fn(params, x, y, is_padding=None, places=None)``, as
        `dpjax.transforms.clipping.wide_per_example`.
    """

    def fn(
        params: Any,
        x: Array,
        y: Array,
        is_padding: Bool[Array, " b"] | None = None,
        places: int | None = None,
    ) -> Any:
        count = clipping.examples(x, y, is_padding)
        whole = count if places is None else places
        like = _like(weighted, params)

        def part(x: Array, y: Array, is_padding: Bool[Array, " b"] | None) -> Any:
            def weights(
                norms: Float[Array, "b *layers"], error: float
            ) -> Float[Array, "b *layers"]:
                limits = _limits(like, clip_norm, per_layer, whole, error, bounds=_known(weighted))
                bound = jnp.asarray([limits] if per_layer else limits[0], norms.dtype)
                if method == "automatic":
                    scale = bound / (norms + clipping.STABILITY)
                else:
                    tiny = jnp.finfo(norms.dtype).tiny
                    scale = jnp.minimum(1.0, bound / jnp.maximum(norms, tiny))
                scale = jnp.where(jnp.isfinite(norms), scale, 0)
                if is_padding is None:
                    return scale
                return jnp.where(is_padding[:, None] if per_layer else is_padding, 0, scale)

            if _known(weighted):
                options = {"by_layer": per_layer, "places": whole}
                return weighted.wide(params, x, y, weights, **options)
            error = _error(weighted, params, x, whole)
            summed = weighted.by_layer if per_layer else weighted
            return _numerics.wide_sum(
                _numerics.wide_zeros(like),
                summed(params, x, y, lambda norms: weights(norms, error)),
            )

        size = _at_once(weighted, params, x) if microbatch is None and count else microbatch
        return clipping.in_passes(part, size, x, y, is_padding, like)

    return fn


def share(weighted: Any, params: Any, x: Any, places: int, microbatch: int | None) -> float:
    """The share of the clip norm by which rounding of such a sum lowers it, see `clipping.share`.

    Args:
        weighted: As in `clipped_sum`.
        params: Arrays or shapes.
        x: [m, ...] records of one call, arrays or shapes.
        places: Records of all calls whose sums are added up.
        microbatch: Records a pass, or None.
    """
    size = _at_once(weighted, params, x) if microbatch is None else microbatch
    size = len(x) if size is None else min(size, len(x))
    x = jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)
    return clipping.share(places, _like(weighted, params), _error(weighted, params, x, places))


def _known(weighted: Any) -> bool:
    """Whether it is the package's own, which knows how it rounds."""
    return hasattr(weighted, "wide")


def _like(weighted: Any, params: Any) -> Any:
    """A tree of the shapes of the sum."""
    return weighted.like(params) if _known(weighted) else params


def _at_once(weighted: Any, params: Any, x: Any) -> int | None:
    return weighted.at_once(params, x) if _known(weighted) else None


def _error(weighted: Any, params: Any, x: Any, places: int) -> float:
    """How wrong a sum of clipped records may be before it is rounded, see `clipping.share`."""
    if _known(weighted):
        return weighted.error(params, x, places)
    leaves = jax.tree.leaves(params)
    return (len(x) + _sides(leaves)) * _unit(leaves) + _numerics.sum_error(places)


def _limits(
    like: Any, clip_norm: float, per_layer: bool, places: int, error: float, *, bounds: bool
) -> list[float]:
    """The clip norm of all leaves, or of each layer, less everything that rounding can add."""
    leaves = jax.tree.leaves(like)
    layers = _numerics.layer_groups(like) if per_layer else [list(range(len(leaves)))]
    share = _numerics.layer_share(clipping.lowered(clip_norm, like, places, error), len(layers))
    return [_lowered([leaves[i] for i in layer], share, bounds=bounds) for layer in layers]


def _lowered(leaves: list[Any], clip_norm: float, *, bounds: bool) -> float:
    sides = 0 if bounds else _sides(leaves)
    floor = max(float(jnp.finfo(leaf.dtype).tiny) for leaf in leaves)
    size = sum(math.prod(leaf.shape) for leaf in leaves)
    bound = clip_norm * (1 - clipping.slack(leaves) - sides * _unit(leaves))
    bound -= math.sqrt(size) * floor
    if not bound > 0:
        raise ValueError(
            f"clip_norm is {clip_norm}, below what rounding of {size} numbers hides; give a larger "
            "one"
        )
    return bound


def _sides(leaves: list[Any]) -> int:
    """Inputs and outputs of all layers."""
    return sum(sum(leaf.shape) for leaf in leaves)


def _unit(leaves: list[Any]) -> float:
    return max(float(jnp.finfo(leaf.dtype).eps) for leaf in leaves) / 2
