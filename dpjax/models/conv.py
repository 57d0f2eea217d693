"""Convolutions, in one place: two layouts of the same sum, and standardised kernels."""

import math
from typing import Any, Literal, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from dpjax import _validate
from dpjax._numerics import Shape

__all__ = ["Conv", "convolve"]

Images: TypeAlias = Float[Array, "*b h w c"]
"""Images, or what layers make of them: height, width, channels."""
Layout = Literal["conv", "patches"]
Padding = Literal["SAME", "VALID"] | int
Pads: TypeAlias = list[tuple[int, int]]
"""Zeros before and after each axis."""
LAYOUTS = ("conv", "patches")
"""How a convolution is computed, see `convolve`."""


def convolve(
    x: Images,
    kernel: Float[Array, "kh kw i o"],
    strides: int = 1,
    padding: Padding = "SAME",
    groups: int = 1,
    layout: Layout = "conv",
) -> Float[Array, "*b p q o"]:
    """Return the convolution of ``x`` with ``kernel``, computed in one of two ways.

    They differ by rounding alone. Gradients per example or per agent map over kernels, where which
    one is fastest depends on the backend and the shape:

    - "conv": the backend's own convolution.
    - "patches": kh kw shifted slices side by side, [*b, p, q, kh kw c], and one product.

    Args:
        x: Images, with any axes in front.
        kernel: [kh, kw, c / groups, o].
        strides: Of both axes.
        padding: "SAME" (as much after as before, or one more), "VALID", or zeros on each side.
        groups: Groups of channels that do not mix; c of them is depthwise.
        layout: One of `LAYOUTS`.

    Returns:
        [*b, p, q, o], in the kernel's dtype.

    Raises:
        ValueError: For an unknown layout or padding, or channels that do not fit.

    Example:
        >>> import numpy as np
        >>> from dpjax.models import conv
        >>> x, kernel = np.ones((1, 4, 4, 1)), np.ones((3, 3, 1, 1))
        >>> conv.convolve(x, kernel, padding="VALID", layout="patches")[0, :, :, 0].tolist()
        [[9.0, 9.0], [9.0, 9.0]]
    """
    _validate.one_of("layout", layout, LAYOUTS)
    x = jnp.asarray(x)
    kernel = jnp.asarray(kernel)
    # Images are bytes as they are stored; gradients need the kernel's dtype.
    x = x.astype(kernel.dtype)
    *front, height, width, channels = x.shape
    if channels != kernel.shape[2] * groups or kernel.shape[3] % groups:
        raise ValueError(
            f"kernel has shape {kernel.shape} for {groups} groups of {channels} channels; give "
            "[height, width, channels / groups, features], with features in equal groups too"
        )
    pads = padding_of((height, width), kernel.shape[:2], strides, padding)
    if layout == "conv":
        images = x.reshape(-1, height, width, channels)
        out = lax.conv_general_dilated(
            images,
            kernel,
            (strides, strides),
            pads,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return out.reshape(*front, *out.shape[1:])
    parts = shifted(x, kernel.shape[:2], strides, pads)
    if groups == 1:
        patches = jnp.concatenate(parts, axis=-1)
        return patches @ kernel.reshape(-1, kernel.shape[-1])
    # Channels of one group meet the kernels of that group alone.
    grouped = [part.reshape(*part.shape[:-1], groups, -1) for part in parts]
    stacked = jnp.stack(grouped, axis=-1)
    blocks = kernel.reshape(len(parts), kernel.shape[2], groups, -1)
    out = jnp.einsum("...gik,kigo->...go", stacked, blocks)
    return out.reshape(*out.shape[:-2], -1)


def padding_of(size: tuple[int, int], window: Shape, strides: int, padding: Padding) -> Pads:
    """Zeros before and after each axis of images of this size, see `convolve`."""
    if isinstance(padding, str):
        _validate.one_of("padding", padding, ("SAME", "VALID"))
        return list(lax.padtype_to_pads(size, window, (strides, strides), padding))
    # A number is the same for both axes, before and after.
    zeros = _validate.integer("padding", padding, minimum=0)
    return [(zeros, zeros)] * 2


def shifted(
    x: Images,
    window: Shape,
    strides: int,
    pads: Pads,
) -> list[Array]:
    """What each place of the kernel meets: kh kw strided slices of the padded images.

    Args:
        x: Images.
        window: (kh, kw).
        strides: Of both axes.
        pads: Zeros before and after each axis.

    Returns:
        kh kw arrays [*b, p, q, c], the kernel's last axis first.
    """
    front = [(0, 0)] * (x.ndim - 3)
    x = jnp.pad(x, [*front, *pads, (0, 0)])
    rows, columns = window
    high = (x.shape[-3] - rows) // strides + 1
    wide = (x.shape[-2] - columns) // strides + 1
    parts = []
    for row in range(rows):
        for column in range(columns):
            # The end is exclusive, and a whole number of strides behind the start.
            down = slice(row, row + (high - 1) * strides + 1, strides)
            along = slice(column, column + (wide - 1) * strides + 1, strides)
            parts.append(x[..., down, along, :])
    return parts


def _lecun_normal(key: PRNGKeyArray, shape: Shape, dtype: Any = jnp.float32) -> Array:
    """Return a kernel as flax's default start draws it, to the bit.

    Drawn as one row: of four axes the random bits take several times as long to compile.

    Args:
        key: Of the draw.
        shape: Of the kernel, [kh, kw, i, o]; the variance is 1 / (kh kw i).
        dtype: Of the kernel.
    """
    kind = np.dtype(dtype).type
    root_variance = np.sqrt(kind(1 / math.prod(shape[:-1])))
    # A normal number cut off at two deviations has this one.
    deviation = root_variance / kind(0.87962566103423978)
    row = jax.random.truncated_normal(key, -2, 2, (math.prod(shape),), dtype)
    return row.reshape(shape) * deviation


class Conv(nn.Module):
    """A convolution with the parameters of ``flax.linen.Conv``: kernel [kh, kw, i, o] and bias [o].

    Standardized, its kernels have mean 0 and a fixed variance over their inputs, per channel:

        k = (w - mean w) / sqrt(var w + 1e-10)                              (plain: Qiao et al.)
        k = gain (w - mean w) / sqrt(max(fan_in var w, 1e-4))               (scaled: De et al.)

    That needs no statistics of a batch, so one example's gradient is its own.

    Attributes:
        features: Channels that come out, o.
        kernel_size: (kh, kw).
        strides: Of both axes.
        padding: "SAME", "VALID", or zeros on each side.
        groups: Groups of channels; those of the input is depthwise.
        use_bias: Whether to learn a bias.
        layout: How it is computed, see `convolve`.
        standardize: "no", "plain", or "scaled" by the root of the fan-in and a learned gain.

    Reference:
        Qiao, Wang, Liu, Shen, Yuille (2019), Weight Standardization, arXiv 1903.10520.
        Brock, De, Smith (2021), Characterizing signal propagation ..., arXiv 2101.08692.

    Example:
        >>> import jax
        >>> from dpjax.models import conv
        >>> model, x = conv.Conv(8, strides=2), jax.ShapeDtypeStruct((2, 6, 6, 3), "float32")
        >>> jax.eval_shape(model.init_with_output, jax.random.key(0), x)[0].shape
        (2, 3, 3, 8)
    """

    features: int
    kernel_size: tuple[int, int] = (3, 3)
    strides: int = 1
    padding: Padding = "SAME"
    groups: int = 1
    use_bias: bool = True
    layout: Layout = "conv"
    standardize: Literal["no", "plain", "scaled"] = "no"

    @nn.compact
    def __call__(self, x: Images) -> Float[Array, "*b p q o"]:
        """Return the convolved images."""
        choices = ("no", "plain", "scaled")
        standardization = _validate.one_of("standardize", self.standardize, choices)
        per_channel: Any = (self.features,), jnp.float32
        shape = (*self.kernel_size, x.shape[-1] // self.groups, self.features)
        kernel = self.param("kernel", _lecun_normal, shape, jnp.float32)
        if standardization == "plain":
            kernel = standardized(kernel)
        elif standardization == "scaled":
            gain = self.param("gain", nn.initializers.ones_init(), *per_channel)
            kernel = standardized(kernel, gain)
        out = convolve(x, kernel, self.strides, self.padding, self.groups, self.layout)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros_init(), *per_channel)
            # Weights of several examples at once have axes in front of the channels'.
            front = (1,) * (out.ndim - 1)
            out = out + bias.reshape(*front, -1)
        return out


def standardized(
    weight: Float[Array, "kh kw i o"], gain: Float[Array, " o"] | None = None
) -> Float[Array, "kh kw i o"]:
    """The kernel of a `Conv` that standardizes it; scaled where there is a gain.

    Args:
        weight: Its parameter.
        gain: Of the scaled kind, or None.
    """
    centred = weight - jnp.mean(weight, axis=(0, 1, 2), keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=(0, 1, 2), keepdims=True)
    # 1e-10 keeps the derivative of a constant kernel finite.
    if gain is None:
        return centred * lax.rsqrt(variance + 1e-10)
    fan_in = math.prod(weight.shape[:-1])
    # NFNets bound the variance of the sum that a channel's inputs make, not of a weight.
    scale = lax.rsqrt(jnp.maximum(variance * fan_in, 1e-4))
    return centred * (gain.reshape(1, 1, 1, -1) * scale)
