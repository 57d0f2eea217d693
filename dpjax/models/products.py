"""Layers whose kernel's gradient is a product of what came in and the loss's derivative.

One example gives A' D: A [t, d], what came in at t positions (of a convolution, its patches), and
D [t, p], the derivatives of the loss by what came out.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dpjax import _numerics
from dpjax._numerics import Shape
from dpjax.models import conv
from dpjax.models.linear import Linear

__all__ = ()

_HIGHEST = lax.Precision.HIGHEST
_LONGEST = 2**20
"""Sums of more terms than this are not bounded below."""
_BLOCK = 64
"""Terms of a partial sum."""


@dataclass(frozen=True)
class Product:
    """How one layer's gradient follows from its input and its output's derivative.

    Attributes:
        names: Its parameters that the product gives, the kernel first.
        shape: (d, p) of the kernel as a matrix.
        rows: From one example's input, in the dtype of products, to A; in groups of channels
            [t, groups, d]; for an embedding [t], which row was read.
        groups: Of channels that do not mix.
        reads: Whether its input is numbers of rows.
        gram: From one example's input to A A' and a number of rounding errors, see `_error`, where
            that is less work than from A; or None.
        back: From the parameters to the effective kernel, or None where the kernel is that.
    """

    names: tuple[str, ...]
    shape: tuple[int, int]
    rows: Callable[[Array], Array]
    groups: int = 1
    reads: bool = False
    gram: Callable[[Array], tuple[Array, int]] | None = None
    back: Callable[..., Array] | None = None

    def by_norm(self, positions: int) -> bool:
        """Whether the norm can be had without the gradient."""
        largest = max(positions**2, *self.shape)
        return self.back is None and self.groups == 1 and largest <= _LONGEST

    def pays(self, positions: int) -> bool:
        """Whether it is less work to take the norm alone: 2 t^2 <= p d."""
        return self.by_norm(positions) and 2 * positions**2 <= math.prod(self.shape)

    def gradient(self, rows: Array, derivative: Float[Array, "t p"]) -> Float[Array, "d p"]:
        """One example's gradient of the effective kernel, or a sum over examples in a row.

        In full precision: an example's weight has been chosen for these very numbers.
        """
        if rows.ndim == 1:
            return jnp.zeros(self.shape, derivative.dtype).at[rows].add(derivative)
        if self.groups == 1:
            # No `matmul`, which names its dtype: mapped over later, float64 would be refused.
            over = (((0,), (0,)), ((), ()))
            if derivative.shape[1] == 1:
                # Of many models and one batch [lanes, d], half the time of [d, lanes] on a CPU.
                return lax.dot_general(derivative, rows, over, precision=_HIGHEST).T
            return lax.dot_general(rows, derivative, over, precision=_HIGHEST)
        # Groups of channels do not mix, so each has a product of its own.
        grouped = derivative.reshape(len(rows), self.groups, -1)
        return jnp.einsum("tgi,tgo->igo", rows, grouped, precision=_HIGHEST).reshape(self.shape)

    def parameters(self, formed: Float[Array, "b d p"], values: Sequence[Array]) -> list[Array]:
        """Gradients of the layer's parameters, one an example, from the effective kernel's."""
        if self.back is None:
            return [formed]
        wide = [value.astype(formed.dtype) for value in values]
        kernel, pull = jax.vjp(self.back, *wide)
        return list(jax.vmap(pull)(formed.reshape(-1, *kernel.shape)))


def combined_points(coefficients: Sequence[float] | None, parts: Sequence[Any]) -> Any:
    """Formed gradients and products of several points, as those of a linear combination.

    Products are added up by putting their positions in a row.

    Args:
        coefficients: One a point; None is one point as it is.
        parts: For every point, by the number of a parameter, formed gradients [b, ...], and
            (product, rows, derivative, activation), arrays [b, ...].
    """
    if coefficients is None:
        return parts[0]
    formed = {}
    for number in parts[0][0]:
        gradients = [part[0][number] for part in parts]
        formed[number] = sum(map(operator.mul, coefficients, gradients))
    pairs = {}
    for number, (product, *_) in parts[0][1].items():
        factors = [part[1][number] for part in parts]
        scaled = map(operator.mul, coefficients, [factor[2] for factor in factors])
        rows = jnp.concatenate([factor[1] for factor in factors], axis=1)
        derivative = jnp.concatenate([*scaled], axis=1)
        # What one point's positions have to do with another's is in A alone.
        pairs[number] = product, rows, derivative, None
    return formed, pairs


def square_bound(
    product: Product, rows: Array, derivative: Float[Array, "t p"], activation: Array | None = None
) -> _numerics.Scalar:
    """|A' D|^2 of one example as <A A', D D'>, never below the exact value.

    Guarantee: what is added covers the rounding of both products and of their sum in any order, of
    t positions in two levels, numbers that vanish below the normal range, and the rounding of D
    times a weight. With u half the spacing of numbers at 1 and sums of d terms in n parts, entries
    of A A' are wrong by at most (d / n + n) u |a_s| |a_t|. Infinite or nan where squares overflow.

    Args:
        product: The layer's.
        rows: A, or the numbers of rows that are 1 at one place each.
        derivative: D.
        activation: The input that A is made of; None takes A A' from A.
    """
    kind = jnp.finfo(derivative.dtype)
    outer, terms = _gram(derivative)
    outer_error = _error(outer, terms, derivative.shape[1])
    if rows.ndim == 1:
        inner = (rows[:, None] == rows[None, :]).astype(derivative.dtype)
        # Ones and zeros are exact.
        inner_error = jnp.zeros_like(inner)
    else:
        if activation is None or product.gram is None:
            inner, terms = _gram(rows)
        else:
            inner, terms = product.gram(activation)
        inner_error = _error(inner, terms, rows.shape[1])
    size = jnp.abs(inner)
    # By the errors of both factors, then of their product and its sums.
    errors = inner_error * (jnp.abs(outer) + outer_error) + size * outer_error
    rounding = (2 * len(derivative) + 4) * _unit(kind)
    errors = errors + rounding * size * jnp.abs(outer) + float(kind.tiny)
    # Two sums, which are not to be merged into one of t^2 terms: as in `_numerics`.
    by_position = jnp.sum(inner * outer + errors, axis=1)
    return jnp.sum(lax.optimization_barrier(by_position))


def _unit(kind: jnp.finfo) -> float:
    """Half the spacing of numbers at 1, and a quarter more, since bounds are themselves rounded."""
    return 1.25 * float(kind.eps) / 2


def _error(gram: Float[Array, "t t"], terms: int, size: int) -> Array:
    """By how much a product of a matrix with its transpose may be wrong.

    Args:
        gram: The product.
        terms: How many rounding errors one addend meets at most, whatever the order of sums.
        size: Addends an entry.
    """
    kind = jnp.finfo(gram.dtype)
    smallest = float(kind.tiny)
    lengths = jnp.sqrt(jnp.diagonal(gram) + terms * smallest)
    # Cauchy-Schwarz bounds the sum of absolute addends of an entry by the two lengths.
    share = (terms + 4) * _unit(kind)
    return share * lengths[:, None] * lengths[None] + size * smallest


def _gram(matrix: Float[Array, "t d"]) -> tuple[Array, int]:
    """The product of a matrix with its transpose, and the rounding errors of an addend."""
    positions, size = matrix.shape
    if positions == 1:
        square = _numerics.square_sum(matrix[0])
        return square[None, None], 1 + sum(_numerics.sum_levels(size))
    fewest = -(-size // _BLOCK)
    # A short bound on rounding costs little time; blocks of equal length need no padding.
    divisors = (number for number in range(fewest, 2 * fewest) if size % number == 0)
    number = next(divisors, fewest)
    length = -(-size // number)
    if number == 1:
        product = jnp.einsum("sd,td->st", matrix, matrix, precision=_HIGHEST)
        return product, 1 + length
    matrix = jnp.pad(matrix, [(0, 0), (0, number * length - size)])
    blocks = matrix.reshape(positions, number, length)
    partial = jnp.einsum("snd,tnd->nst", blocks, blocks, precision=_HIGHEST)
    return jnp.sum(lax.optimization_barrier(partial), axis=0), number + length


def _shifted_gram(
    x: Float[Array, "*one h w c"], window: Shape, pads: conv.Pads
) -> tuple[Array, int]:
    """`_gram` of a convolution's patches, from that of its pixels.

    Patches at s and t meet as pixels at s + o and t + o do, for every place o of the kernel; a sum
    over its rows of places, and one over its columns.
    """
    high, wide, channels = x.shape[-3:]
    gram, terms = _gram(x.reshape(-1, channels))
    gram = gram.reshape(high, wide, high, wide)
    gram = jnp.pad(gram, [*pads, *pads])
    for axis, places in enumerate(window):
        length = gram.shape[axis] - places + 1
        parts = []
        for offset in range(places):
            once = lax.slice_in_dim(gram, offset, offset + length, axis=axis)
            parts.append(lax.slice_in_dim(once, offset, offset + length, axis=axis + 2))
        gram = sum(parts[1:], start=parts[0])
    positions = math.prod(gram.shape[:2])
    return gram.reshape(positions, positions), terms + sum(window)


def product(module: nn.Module, x: Array) -> Product | None:
    """Return how a layer's gradient is a product, or None where its options make it none.

    Args:
        module: A layer of a `known` type.
        x: Its input, of one example with an axis of length one in front: shape and dtype.
    """
    if getattr(module, "promote_dtype", None) is not getattr(type(module), "promote_dtype", None):
        return None
    return _KNOWN[type(module)](module, x.shape)


def known(module: nn.Module) -> bool:
    """Whether a layer is of a type whose gradient may be a product; no subclass is."""
    return type(module) in _KNOWN


def _dense(module: nn.Dense | nn.DenseGeneral, shape: Shape) -> Product | None:
    axes = _flat(getattr(module, "axis", -1))
    features = _flat(module.features)
    last = list(range(len(shape) - len(axes), len(shape)))
    batched = _flat(getattr(module, "batch_dims", ()))
    # Such a product is not A' D of the last axes.
    if module.dot_general or module.dot_general_cls or batched:
        return None
    if [axis % len(shape) for axis in axes] != last:
        return None
    size = math.prod(shape[-len(axes) :])
    kernel = (size, math.prod(features))
    return Product(("kernel",), kernel, lambda x: x.reshape(-1, size))


def _linear(module: Linear, shape: Shape) -> Product:
    size = shape[-1]
    return Product(("weight",), (size, 1), lambda x: x.reshape(-1, size))


def _flat(value: Any) -> tuple[Any, ...]:
    """The leaves of a tree of sequences; what is none is the only one."""
    # Flax writes None for what is as usual.
    return tuple(jax.tree.leaves(value, is_leaf=lambda entry: entry is None))


def _embed(module: nn.Embed, shape: Shape) -> Product:
    count = module.num_embeddings

    def rows(x: Int[Array, "*t"]) -> Int[Array, " t"]:
        # Narrow kinds do not hold the count.
        if x.dtype.itemsize < 4:
            x = x.astype(jnp.int32)
        # Negative numbers count from the end.
        flat = jnp.where(x < 0, x + count, x)
        # A table of one row is read whatever the number.
        if count == 1:
            flat = jnp.zeros_like(x)
        # Of all others no row was read: one behind the last takes what they would add.
        return jnp.where((flat < 0) | (flat >= count), count, flat).reshape(-1)

    return Product(("embedding",), (count, module.features), rows, reads=True)


def _convolution(module: conv.Conv, shape: Shape) -> Product | None:
    plain = _patches(module, module.strides, module.padding, module.groups, shape)
    if plain is None or module.standardize == "no":
        return plain
    # The scaled kind learns a gain beside its kernel.
    names = ("kernel", "gain") if module.standardize == "scaled" else ("kernel",)
    return replace(plain, names=names, back=conv.standardized)


def _flax_convolution(module: nn.Conv, shape: Shape) -> Product | None:
    strides = {stride or 1 for stride in _flat(module.strides)}
    paddings = set(_flat(module.padding))
    dilations = {*_flat(module.input_dilation), *_flat(module.kernel_dilation)}
    # `conv.shifted` has one stride and one padding for both axes, and no dilation.
    if not dilations <= {1, None} or len(strides) != 1 or len(paddings) != 1:
        return None
    padding = paddings.pop()
    if not isinstance(padding, int) and padding not in ("SAME", "VALID"):
        return None
    special = (module.mask, module.conv_general_dilated, module.conv_general_dilated_cls)
    if any(option is not None for option in special):
        return None
    return _patches(module, strides.pop(), padding, module.feature_group_count, shape)


def _patches(
    module: nn.Conv | conv.Conv,
    strides: int,
    padding: conv.Padding,
    groups: int,
    shape: Shape,
) -> Product | None:
    """A convolution as a product of its patches."""
    window = _flat(module.kernel_size)
    if len(shape) < 3 or len(window) != 2:
        return None
    image = (shape[-3], shape[-2])
    pads = conv.padding_of(image, window, strides, padding)
    size = math.prod(window) * shape[-1] // groups

    def rows(x: Array) -> Array:
        parts = conv.shifted(x, window, strides, pads)
        if groups == 1:
            return jnp.concatenate(parts, axis=-1).reshape(-1, size)
        channels = shape[-1] // groups
        grouped = [part.reshape(-1, groups, channels) for part in parts]
        return jnp.concatenate(grouped, axis=-1)

    gram = None
    # Of one pixel a patch, the Gram of patches is that of pixels anyway.
    if groups == strides == math.prod(shape[:-3]) == 1 < math.prod(window):
        gram = functools.partial(_shifted_gram, window=window, pads=pads)
    return Product(("kernel",), (size, module.features), rows, groups, gram=gram)


_KNOWN: dict[type, Callable[[Any, Shape], Product | None]] = {
    nn.Dense: _dense,
    nn.DenseGeneral: _dense,
    nn.Embed: _embed,
    nn.Conv: _flax_convolution,
    conv.Conv: _convolution,
    Linear: _linear,
}
