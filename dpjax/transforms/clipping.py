"""Clipping, per agent as an optax link and per example around a loss or by a model's own sum.

The bounds hold exactly, not up to rounding. The squares of large leaves are summed in two levels,
and the clip norm is lowered by a bound on all rounding, a relative `slack`. In float32 it is
(d + 17) 2^-24 up to d = 4,096 entries, and about 2 sqrt(d) 2^-24 for larger leaves. So the float32
(or bfloat16) results have an L2 norm of at most ``clip_norm`` in exact arithmetic, and accounting
needs no correction. For sums of clipped records the clip norm is lowered once more, by what
rounding can add to the distance of two neighbouring sums (`rounding_share`). `_clip` scales
gradients; `wide_clipped_sum` weights those that a model sums by itself.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float
from optax import GradientTransformation, Params, Updates

from dpjax import _agents, _numerics, _validate

__all__ = ["clipped_sum", "per_agent", "per_example"]

Clipping = Literal["flat", "automatic"]
_Norm = Literal["l2", "l1"]

_Records = Any
"""A user's own pytree of arrays [B, ...], a record each."""
_Count = int | None
"""Of records or agents; None is no limit, or not known."""
_Padding = Bool[Array, " b"] | None
"""True where a slot holds no record; None where all do."""
_Loss = Callable[[Params, _Records, _Records], _numerics.Scalar]
_Encoder = Callable[[Updates], Updates]
_Leaves = list[Array]
_Sum = Callable[..., Updates]
"""``sum(params, x, y, is_padding=None)``, a tree like params."""

_NORMS = ("l2", "l1")
"""The bounded norm: Gaussian noise needs the first, Laplace noise the second."""

CLIPPINGS = ("flat", "automatic")
"""flat: scale by min(1, C / norm). automatic: always scale, by C / (norm + 0.01)."""

_STABILITY = 0.01
"""What automatic clipping adds to the norm, in the gradient's units."""

# Entries of per-example gradients that stay in a CPU's caches: above, the passes over memory of
# differentiating a whole batch at once cost 5 to 40 times (benchmarks/bench_clipping.py).
_CACHED = 32_768


def slack(tree: Updates, norm: _Norm = "l2") -> float:
    """Relative amount by which clipping one gradient shaped like ``tree`` lowers the clip norm.

    Args:
        tree: Pytree of arrays (or shapes) of one agent or example, no leading axis.
        norm: Which norm is bounded.

    Returns:
        A bound on the relative rounding of the norm, the scaling and the result's dtype.
    """
    leaves = jax.tree.leaves(tree)
    wide = _numerics.wide_dtype(leaves)
    terms = len(leaves)
    for leaf in leaves:
        terms += sum(_numerics.sum_levels(leaf.size))
    # Twice the first-order bound: an L2 norm halves the error of the sum of squares, L1 does not.
    if norm == "l1":
        terms *= 2
    unit = float(jnp.finfo(wide).eps) / 2
    bound = (terms + 16) * unit
    # A narrower leaf rounds once more, after the scaling.
    narrow = _unit(leaves)
    if narrow > unit:
        bound += narrow
    return bound


def _finite(tree: Updates) -> Updates:
    """Widen the leaves and put the largest number for nan and infinity: the norm then overflows."""
    wide = _numerics.wide_dtype(jax.tree.leaves(tree))
    top = float(jnp.finfo(wide).max)

    def finite(leaf: Array) -> Array:
        return jnp.nan_to_num(leaf.astype(wide), nan=top, posinf=top, neginf=-top)

    return jax.tree.map(finite, tree)


def _norm(tree: Updates, norm: _Norm) -> _numerics.Scalar:
    """Norm of a widened gradient; L2 is infinite beyond 1e19 in float32, where squares overflow."""
    leaves = [leaf.reshape(-1) for leaf in jax.tree.leaves(tree) if leaf.size]
    zero = jnp.zeros((), jnp.float32)
    if norm == "l1":
        total = sum(map(_numerics.absolute_sum, leaves), zero)
        # An entry that is not finite counts as the largest number.
        return jnp.where(total < jnp.finfo(total.dtype).max, total, jnp.inf)
    return jnp.sqrt(sum(map(_numerics.square_sum, leaves), zero))


def norms(tree: Updates, norm: _Norm) -> Float[Array, " n"]:
    """Norm of every agent's gradient (a diagnostic, not private).

    Args:
        tree: Agent-stacked gradients, leaves [n, ...].
        norm: Which norm.
    """
    if norm == "l2":
        return jax.vmap(optax.tree.norm)(tree)
    return jax.vmap(lambda gradient: _norm(gradient, norm))(tree)


def _lowered(tree: Updates, clip_norm: float, norm: _Norm) -> float:
    """The clip norm minus all that rounding can add."""
    leaves = jax.tree.leaves(tree)
    # Entries below the normal range round absolutely, by at most half the smallest number.
    floor = 0.0
    for leaf in leaves:
        limits = jnp.finfo(leaf.dtype)
        floor = max(floor, float(limits.tiny) * float(limits.eps))
    spread: float = _size(leaves)
    if norm == "l2":
        spread = math.sqrt(spread)
    bound = clip_norm * (1 - slack(tree, norm)) - spread * floor
    return _above_rounding(bound, clip_norm, leaves, "gradients")


def _above_rounding(bound: float, clip_norm: float, leaves: _Leaves, noun: str) -> float:
    """A lowered clip norm; refused where rounding exceeds it."""
    if bound > 0:
        return bound
    dtypes = [str(leaf.dtype) for leaf in leaves]
    raise ValueError(
        f"clip_norm is {clip_norm}, below what rounding in {dtypes} hides; give a larger one, or "
        f"{noun} in float32"
    )


def _check_reach(tree: Updates, clip_norm: float, count: int = 1) -> None:
    """Refuse clip norms beyond the range of the leaves' dtype.

    Args:
        tree: Gradients or their sum, or shapes of their dtypes.
        clip_norm: Clip norm C of each term; infinity is for no clipping.
        count: Number B of terms in the sum.

    Raises:
        ValueError: Naming clip norm, count and dtype.
    """
    for leaf in jax.tree.leaves(tree):
        largest = float(jnp.finfo(leaf.dtype).max)
        if leaf.size and largest < clip_norm * count < math.inf:
            raise ValueError(
                f"clip_norm is {clip_norm:g} and {count} times that is beyond {leaf.dtype} "
                f"gradients, at most {largest:g}; give a smaller one, or gradients in float32"
            )


class _Rule(NamedTuple):
    """How a gradient is clipped; the fields are arguments of `per_agent`."""

    method: str
    per_layer: bool = False
    norm: _Norm = "l2"


def _clip(tree: Updates, clip_norm: float, rule: _Rule) -> Updates:
    """Clip one agent's or example's gradient; zero if it, or the layer, is not finite."""

    # The norm must be that of the very numbers that are scaled.
    return _numerics.from_memory(lambda tree: _clipped(tree, clip_norm, rule), tree)


def _clipped(tree: Updates, clip_norm: float, rule: _Rule) -> Updates:
    if rule.per_layer:
        leaves, structure = jax.tree.flatten(tree)
        layers = _numerics.layer_groups(tree)
        share = _numerics.layer_share(clip_norm, len(layers))
        within = rule._replace(per_layer=False)
        for layer in layers:
            clipped = _clipped([leaves[i] for i in layer], share, within)
            for i, leaf in zip(layer, clipped, strict=True):
                leaves[i] = leaf
        return jax.tree.unflatten(structure, leaves)
    bounded = rule.norm
    bound = _lowered(tree, clip_norm, bounded)
    # Not read off the norm: a compiler may take the root of one number's square for its size.
    finite_leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    sound = jnp.array(finite_leaves, bool).all()
    # Finite entries times a zero scale are zero, so no entry needs a second look; and XLA keeps
    # the checked gradient instead of computing it twice (1.8 times as fast per example on a CPU).
    finite = _finite(tree)
    norm = _norm(finite, bounded)
    if rule.method == "automatic":
        _check_reach(tree, clip_norm)
        scale = bound / (norm + _STABILITY)
    else:
        # An infinite clip norm still drops what is not finite: max / inf is 0, else it is >= 1.
        limits = jnp.finfo(norm.dtype)
        scale = jnp.minimum(1.0, min(bound, float(limits.max)) / jnp.maximum(norm, limits.tiny))
    scale = jnp.where(sound, scale, 0)
    return jax.tree.map(lambda leaf, wide: (wide * scale).astype(leaf.dtype), tree, finite)


def _check(clip_norm: float, method: str) -> float:
    """Return the clip norm as a plain number, refused where nothing can be clipped so.

    Args:
        clip_norm: Clip norm C.
        method: "flat" or "automatic".

    Raises:
        ValueError: Naming what is wrong.
    """
    _validate.one_of("method", method, CLIPPINGS)
    if method == "flat" and clip_norm == math.inf:
        return math.inf
    remedy = "give a finite number above 0"
    if method == "flat":
        remedy += ", or infinity for no clipping and no guarantee"
    clip_norm = _validate.positive("clip_norm", clip_norm, remedy=remedy)
    if not 1e-9 <= clip_norm <= 1e9:
        # Squares that underflow must not matter beside the clip norm.
        raise ValueError(
            f"clip_norm is {clip_norm}; give a clip norm from 1e-9 to 1e9 (scale the loss)"
        )
    return clip_norm


def per_agent(
    clip_norm: float,
    method: Clipping = "flat",
    *,
    per_layer: bool = False,
    norm: _Norm = "l2",
) -> GradientTransformation:
    """Clip each agent's whole gradient, one norm an agent over all leaves, or one a layer.

    flat: g_i min(1, C / |g_i|).   automatic: g_i C / (|g_i| + 0.01).

    Per layer, the same of each of L layers with C / sqrt(L): leaves of one parent, as kernel and
    bias of a dense layer, are a layer.

    Guarantee: every agent's output has a ``norm`` of at most ``clip_norm``, exactly, for every
    gradient. So replacing all data of one agent changes its output by at most 2 ``clip_norm``, and
    no other agent's output. A gradient that is not finite, or whose norm overflows (an L2 norm of
    1e19 in float32), becomes zero.

    Args:
        clip_norm: Clip norm C, in the gradient's units; infinity with "flat" clips nothing.
        method: "flat" or "automatic".
        per_layer: Whether every layer is clipped by itself, in L2 alone.
        norm: Which norm is bounded, "l2" or "l1".

    Returns:
        A stateless optax transformation on agent-stacked pytrees [n, ...].

    Raises:
        ValueError: For invalid numbers; in ``update``, for leaves that are not floating or differ
            in their leading axis, or whose dtype cannot hold the clip norm of "automatic".

    Reference:
        Bu et al. (2023), Automatic clipping, for "automatic".

    Example:
        >>> import numpy as np
        >>> from dpjax.transforms import clipping
        >>> clip = clipping.per_agent(1.0)
        >>> gradients = np.array([[3.0, 4.0], [0.0, 0.5]], np.float32)
        >>> clipped, _ = clip.update(gradients, clip.init(gradients))
        >>> np.linalg.norm(clipped, axis=1).round(3).tolist()
        [1.0, 0.5]
    """
    clip_norm = _check(clip_norm, method)
    if _validate.flag("per_layer", per_layer) and norm != "l2":
        raise ValueError(f"per_layer is True with norm {norm!r}; layers are clipped in 'l2' alone")
    _validate.one_of("norm", norm, _NORMS)
    rule = _Rule(method, per_layer, norm)

    def update(updates: Updates, params: Params) -> Updates:
        agents: _Count = None
        for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
            if agents is None and jnp.ndim(leaf):
                agents = len(leaf)
            _numerics.check_leaf(path, leaf, agents, "the agents")
        # Without the map one norm would bound the whole network.
        return jax.vmap(lambda tree: _clip(tree, clip_norm, rule))(updates)

    return optax.stateless(update)


def _example_count(x: _Records, y: _Records, is_padding: _Padding) -> int:
    """Return the number of examples.

    Args:
        x: Pytree of arrays [B, ...].
        y: The same.
        is_padding: [B], or None.

    Raises:
        ValueError: For several numbers.
    """
    lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves((x, y))}
    if is_padding is not None:
        lengths.add(jnp.shape(is_padding))
    if len(lengths) != 1 or () in lengths:
        raise ValueError(
            f"x, y and is_padding have leading axes {sorted(lengths)}; give one count of "
            "examples, is_padding [B]"
        )
    ((size,),) = lengths
    return int(size)


def _at_once(params: Params, examples: int) -> _Count:
    """How many examples to differentiate at once; None is all."""
    size = max(1, _size(jax.tree.leaves(params)))
    if jax.default_backend() != "cpu" or examples * size <= _CACHED:
        return None
    # As few passes as the caches allow, as even as they can be.
    passes = -(-examples // max(1, _CACHED // size))
    return -(-examples // passes)


def per_example(
    loss_fn: _Loss,
    clip_norm: float,
    *,
    method: Clipping = "flat",
    microbatch: _Count = None,
    encode: _Encoder | None = None,
    per_layer: bool = False,
) -> _Sum:
    """The sum of one agent's clipped per-example gradients.

    sum_b clip(grad loss_fn(params, x_b, y_b)) over the examples that are not padding. A sum, not
    a mean: noise is added to it, and dividing by a fixed number afterwards is post-processing.

    Guarantee: zeroing out one record of the batch changes the computed and rounded sum by an L2
    norm of at most ``clip_norm``, and replacing it by at most twice that. Marking a record as
    padding zeroes it out. Each of the B terms is clipped to C / (1 + r), where r = `rounding_share`
    bounds all rounding of two such sums, whatever the order of additions: terms are added in
    float64, and the sum is rounded once, r = 2 B 2^-24 for parameters in float32 (2^-8 for 2^-24
    in bfloat16).
    A gradient that is not finite adds zero.

    Args:
        loss_fn: ``loss_fn(params, x, y) -> scalar`` of one example, which must not depend on
            other examples (no batch norm).
        clip_norm: Clip norm C of one example's gradient; infinity with "flat" clips nothing.
        method: "flat" or "automatic".
        microbatch: Examples differentiated at once, to bound memory; None chooses by cost: on a
            CPU as many as its caches hold, elsewhere the whole batch. A batch it does not divide
            is padded.
        encode: Applied to every example's gradient before the clip, which then bounds the norm of
            what it returns (a projection or a sketch, say); None is the gradient itself.
        per_layer: Whether every layer of an example's gradient is clipped by itself, as in
            `per_agent`.

    Returns:
        ``fn(params, x, y, is_padding=None)`` with x and y pytrees of arrays [B, ...] and
        is_padding [B] bool, to a tree like params, or like what ``encode`` returns. It works on an
        empty batch and under vmap.

    Raises:
        ValueError: For invalid numbers; when called, for x and y of different lengths, or
            parameters whose dtype cannot hold B C.

    Reference:
        Abadi et al. (2016).
        Casacuberta et al. (2022), Widespread underestimation of sensitivity in differentially
        private libraries and how to fix it, for what rounding does to sums.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.transforms import clipping
        >>> sum_of_clipped = clipping.per_example(lambda w, x, y: x @ w, clip_norm=1.0)
        >>> x = jnp.array([[3.0, 4.0], [0.0, 0.5]])
        >>> total = sum_of_clipped(jnp.zeros(2), x, jnp.zeros(2))
        >>> [round(float(entry), 3) for entry in total]
        [0.6, 1.3]
    """
    clip_norm = _check(clip_norm, method)
    _validate.flag("per_layer", per_layer)
    if not callable(loss_fn):
        raise _validate.refusal(
            "loss_fn", loss_fn, "give a function of params, x and y of one example"
        )
    if microbatch is not None:
        microbatch = _validate.integer("microbatch", microbatch)

    wide = wide_per_example(loss_fn, clip_norm, method, microbatch, encode, per_layer)

    def fn(params: Params, x: _Records, y: _Records, is_padding: _Padding = None) -> Updates:
        total = wide(params, x, y, is_padding)
        return _numerics.rounded_sum(total, _encoded(params, encode))

    return fn


def _encoded(params: Params, encode: _Encoder | None) -> Updates:
    """A tree of the shapes of an encoded gradient."""
    return params if encode is None else jax.eval_shape(encode, params)


def wide_per_example(
    loss_fn: _Loss,
    clip_norm: float,
    method: Clipping,
    microbatch: _Count,
    encode: _Encoder | None,
    per_layer: bool,
) -> _Sum:
    """`per_example` before its sum is rounded, in float64; arguments as there, checked.

    Returns:
        ``fn(params, x, y, is_padding=None, records=None)``. For sums over calls ``records``
        is the number of records in all calls; None is that of one.
    """

    rule = _Rule(method, per_layer)

    def fn(
        params: Params,
        x: _Records,
        y: _Records,
        is_padding: _Padding = None,
        records: _Count = None,
    ) -> Updates:
        size = _example_count(x, y, is_padding)
        params = jax.tree.map(jnp.asarray, params)
        like = _encoded(params, encode)
        bound = lowered(clip_norm, like, size if records is None else records)

        def of_record(x: _Records, y: _Records) -> Updates:
            gradient = jax.grad(loss_fn)(params, x, y)
            if encode is not None:
                gradient = encode(gradient)
            return _clip(gradient, bound, rule)

        def part(x: _Records, y: _Records, is_padding: _Padding) -> Updates:
            terms = _agents.vmap_isolated(of_record, x, y)
            if is_padding is not None:
                # A padded record adds exactly zero, whatever its gradient is.
                terms = _numerics.masked(is_padding, jnp.zeros_like, terms)
            with _numerics.double_precision():
                return jax.tree.map(lambda leaf: _numerics.row_sum(leaf.astype(jnp.float64)), terms)

        at_once = _at_once(params, size) if microbatch is None else microbatch
        return _in_passes(part, at_once, x, y, is_padding, like)

    return fn


def rounding_share(count: int, tree: Updates, error: float | None = None) -> float:
    """The share r of the clip norm by which rounding can separate two sums of clipped records.

    r = 2 B (u + e). A sum of B records of norm C' has norm at most B C'. It is rounded once, to the
    narrowest leaf's dtype (u, 2^-24 in float32), after additions with an error of e B C'.

    Args:
        count: Number B of records in all passes.
        tree: Pytree of arrays (or shapes) like the sum.
        error: e; None is that of adding up in float64, in any order.
    """
    if error is None:
        error = _numerics.sum_error(count)
    unit = _unit(jax.tree.leaves(tree))
    # Twice: either of two neighbouring sums is rounded.
    of_sum = unit * (1 + error) + error
    return 2 * count * of_sum * (1 + 1e-6)


def lowered(clip_norm: float, tree: Updates, count: int, error: float | None = None) -> float:
    """The clip norm C / (1 + r) of one record, with which sums are C-sensitive as computed.

    Args:
        clip_norm: C.
        tree: As in `rounding_share`, and all others.
        count: Number B of records.
        error: e.

    Raises:
        ValueError: Where rounding exceeds C, or B C is beyond the sum's dtype.
    """
    _check_reach(tree, clip_norm, count)
    leaves = jax.tree.leaves(tree)
    # Below the normal range numbers may become zero: once in each sum, and in products before.
    wide = jnp.finfo(_numerics.wide_dtype(leaves))
    lost = _tiny(leaves) + count * float(wide.tiny)
    # Two sums: each loses as much.
    spread = 2 * math.sqrt(_size(leaves)) * lost
    bound = (clip_norm - spread) / (1 + rounding_share(count, tree, error))
    return _above_rounding(bound, clip_norm, leaves, "parameters") * (1 - 2**-50)


def _in_passes(
    part: Callable[[_Records, _Records, _Padding], Updates],
    size: _Count,
    x: _Records,
    y: _Records,
    is_padding: _Padding,
    like: Updates,
) -> Updates:
    """The sum, in float64, over passes of ``size`` records.

    Args:
        part: ``part(x, y, is_padding)``, the sum of one pass in float64.
        size: Records a pass; the last one is filled up. None is all at once.
        x: Pytree of arrays [B, ...].
        y: The same.
        is_padding: [B] or None. Passes of nothing else at the end are left out.
        like: Pytree of shapes like the sum.
    """
    count = _example_count(x, y, is_padding)
    if count == 0:
        return _numerics.wide_zeros(like)
    padding = None if is_padding is None else jnp.asarray(is_padding, bool)
    if size is None or size >= count:
        return part(x, y, padding)
    extra = -count % size
    if extra:

        def filled(leaf: Array) -> Array:
            # Repeated, not zero: a loss may be undefined at zero, and padding must stay cheap.
            rows = jnp.repeat(leaf[:1], extra, axis=0)
            return jnp.concatenate([leaf, rows])

        x, y = jax.tree.map(filled, (x, y))
        if padding is None:
            padding = jnp.zeros(count, bool)
        padding = jnp.concatenate([padding, jnp.ones(extra, bool)])

    def in_passes(leaf: Array) -> Array:
        return leaf.reshape(-1, size, *leaf.shape[1:])

    passes = jax.tree.map(in_passes, (x, y, padding))
    number: int | Array = -(-count // size)
    if is_padding is not None:
        # Passes after the last record are left out.
        is_empty = passes[2].all(axis=1)
        numbers = jnp.arange(1, number + 1)
        number = jnp.max(jnp.where(is_empty, 0, numbers))

    def add(index: Array, total: Updates) -> Updates:
        records = jax.tree.map(lambda leaf: leaf[index], passes)
        return _numerics.wide_sum(total, part(*records))

    return jax.lax.fori_loop(0, number, add, _numerics.wide_zeros(like))


def clipped_sum(
    weighted: Any,
    clip_norm: float,
    *,
    method: Clipping = "flat",
    per_layer: bool = False,
    microbatch: _Count = None,
) -> _Sum:
    """`per_example` for a model that knows its gradients' norms.

    sum_b w_b g_b, w_b = min(1, C / |g_b|), or C / (|g_b| + 0.01) for automatic clipping; per layer,
    the same of each of L layers with C / sqrt(L).

    Guarantee: as `per_example`'s. The clip norm of a record is lowered as there, by `slack`, and by
    what entries below the normal range can add. Unless the norms are stated to be bounds, it is
    also lowered by their rounding, 2^-24 (in float32) for each input and output of every layer.
    Passes are added up in float64. For a custom function, a pass of m records is assumed to have an
    error of at most (m + inputs and outputs of all layers) 2^-24 times the sum of the terms' norms.
    A record marked as padding adds exactly zero. So does a record whose gradient (per layer: whose
    layer) is not finite; a custom function must leave out what has weight zero, by ``jnp.where``,
    since zero times such a gradient is nan.

    Args:
        weighted: ``weighted(params, x, y, weights)``: a `models.layer_norms.Gradients`, whose norms
            are bounds; or a custom function, whose norms may have the rounding error above.
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
        >>> from dpjax.models import losses, mlp, layer_norms
        >>> from dpjax.transforms import clipping
        >>> model = mlp.MLP(hidden=(4,), outputs=2)
        >>> x, y = jnp.ones((3, 5)), jnp.array([0, 1, 1])
        >>> gradients = layer_norms.Gradients(model.apply, losses.cross_entropy)
        >>> total = clipping.clipped_sum(gradients, 0.1)(model.init(jax.random.key(0), x), x, y)
    """
    clip_norm = _check(clip_norm, method)
    _validate.flag("per_layer", per_layer)
    if not callable(weighted) or (per_layer and not hasattr(weighted, "by_layer")):
        member = " with by_layer, as models.layer_norms.Gradients has," if per_layer else ""
        raise _validate.refusal(
            "weighted",
            weighted,
            f"give a function{member} of params, x, y and weights, or use per_example",
        )
    if microbatch is not None:
        microbatch = _validate.integer("microbatch", microbatch)

    wide = wide_clipped_sum(weighted, clip_norm, method, per_layer, microbatch)

    def fn(params: Params, x: Array, y: Array, is_padding: _Padding = None) -> Updates:
        return _numerics.rounded_sum(wide(params, x, y, is_padding), _like(weighted, params))

    return fn


def wide_clipped_sum(
    weighted: Any, clip_norm: float, method: Clipping, per_layer: bool, microbatch: _Count
) -> _Sum:
    """`clipped_sum` before it is rounded, in float64; arguments as there, checked.

    Returns:
        ``fn(params, x, y, is_padding=None, records=None)``, as `wide_per_example`.
    """

    def fn(
        params: Params, x: Array, y: Array, is_padding: _Padding = None, records: _Count = None
    ) -> Updates:
        count = _example_count(x, y, is_padding)
        total_count = count if records is None else records
        like = _like(weighted, params)
        packaged = _packaged(weighted)

        def part(x: Array, y: Array, is_padding: _Padding) -> Updates:
            def weights(norms: Array, error: float) -> Array:
                limits = _limits(like, clip_norm, per_layer, total_count, error, bounds=packaged)
                bound = jnp.asarray([limits] if per_layer else limits[0], norms.dtype)
                if method == "automatic":
                    scale = bound / (norms + _STABILITY)
                else:
                    tiny = jnp.finfo(norms.dtype).tiny
                    scale = jnp.minimum(1.0, bound / jnp.maximum(norms, tiny))
                scale = jnp.where(jnp.isfinite(norms), scale, 0)
                if is_padding is not None:
                    scale = _numerics.masked(is_padding, jnp.zeros_like, scale)
                return scale

            if packaged:
                options = {"by_layer": per_layer, "places": total_count}
                return weighted.wide(params, x, y, weights, **options)
            error = _error(weighted, params, x, total_count)
            summed = weighted.by_layer if per_layer else weighted
            if is_padding is not None:
                # A function that multiplies by weights must not meet what padding holds.
                first = jnp.argmin(is_padding)
                x, y = _numerics.masked(is_padding, lambda leaf: leaf[first], (x, y))
            total = summed(params, x, y, lambda norms: weights(norms, error))
            if is_padding is not None:
                total = jax.tree.map(lambda leaf: jnp.where(is_padding.all(), 0, leaf), total)
            return _numerics.wide_sum(_numerics.wide_zeros(like), total)

        size = microbatch
        if size is None and count:
            size = _pass_size(weighted, params, x)
        return _in_passes(part, size, x, y, is_padding, like)

    return fn


def weighted_share(
    weighted: Any, params: Params, x: _Records, count: int, microbatch: _Count
) -> float:
    """The share of the clip norm by which rounding of such a sum lowers it, see `rounding_share`.

    Args:
        weighted: As in `clipped_sum`.
        params: Arrays or shapes.
        x: [m, ...] records of one call, arrays or shapes.
        count: Number of records in all calls.
        microbatch: Records a pass, or None.
    """
    size = _pass_size(weighted, params, x) if microbatch is None else microbatch
    size = len(x) if size is None else min(size, len(x))
    shape = (size, *x.shape[1:])
    x = jax.ShapeDtypeStruct(shape, x.dtype)
    return rounding_share(count, _like(weighted, params), _error(weighted, params, x, count))


def _packaged(weighted: Any) -> bool:
    """Whether it is a class of the package, which knows its rounding error."""
    return hasattr(weighted, "wide")


def _like(weighted: Any, params: Params) -> Updates:
    """A tree of the shapes of the sum."""
    return weighted.like(params) if _packaged(weighted) else params


def _pass_size(weighted: Any, params: Params, x: Array) -> _Count:
    return weighted.at_once(params, x) if _packaged(weighted) else None


def _error(weighted: Any, params: Params, x: Array, count: int) -> float:
    """The error of a sum of clipped records before it is rounded, see `rounding_share`."""
    if _packaged(weighted):
        return weighted.error(params, x, count)
    leaves = jax.tree.leaves(params)
    terms = len(x) + _sides(leaves)
    return terms * _unit(leaves) + _numerics.sum_error(count)


def _limits(
    like: Updates, clip_norm: float, per_layer: bool, count: int, error: float, *, bounds: bool
) -> list[float]:
    """The clip norm of all leaves, or of each layer, less everything that rounding can add."""
    leaves = jax.tree.leaves(like)
    layers = [leaves]
    if per_layer:
        groups = _numerics.layer_groups(like)
        layers = [[leaves[i] for i in group] for group in groups]
    layer_norm = _numerics.layer_share(lowered(clip_norm, like, count, error), len(layers))
    limits = []
    for layer in layers:
        # Norms that are no bounds have a rounding error for each input and output.
        sides = 0 if bounds else _sides(layer)
        rounding = sides * _unit(layer)
        bound = layer_norm * (1 - slack(layer) - rounding)
        bound -= math.sqrt(_size(layer)) * _tiny(layer)
        limits.append(_above_rounding(bound, layer_norm, layer, "parameters"))
    return limits


def _sides(leaves: _Leaves) -> int:
    """Inputs and outputs of all layers."""
    return sum(sum(leaf.shape) for leaf in leaves)


def _size(leaves: _Leaves) -> int:
    return sum(leaf.size for leaf in leaves)


def _unit(leaves: _Leaves) -> float:
    """The relative rounding error of the narrowest leaf."""
    return max((float(jnp.finfo(leaf.dtype).eps) / 2 for leaf in leaves), default=0.0)


def _tiny(leaves: _Leaves) -> float:
    """The smallest normal number of the narrowest leaf."""
    return max((float(jnp.finfo(leaf.dtype).tiny) for leaf in leaves), default=0.0)
