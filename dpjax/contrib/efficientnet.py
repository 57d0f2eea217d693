"""EfficientNet-B0 with group norm in the place of batch norm."""

from typing import Any

import flax.linen as nn
from jaxtyping import Array

from dpjax.models.conv import Conv, Images, Layout
from dpjax.models.layers import Logits, average, group_norm

__all__ = ["EfficientNet"]

_STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
"""Expansion, kernel, stride, channels and blocks of each stage."""


class _Inverted(nn.Module):
    """A wide depthwise convolution between two narrow ends, its channels weighed by their means."""

    expansion: int
    size: int
    strides: int
    features: int
    layout: Layout

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shortcut = x
        channels = x.shape[-1]
        wide = channels * self.expansion
        if self.expansion > 1:
            x = self._conv(wide, 1, "expand")(x)
            x = nn.silu(group_norm(size=8, name="expand_norm")(x))
        x = self._conv(wide, self.size, "depthwise", strides=self.strides, groups=wide)(x)
        x = nn.silu(group_norm(size=8, name="depthwise_norm")(x))
        # Squeeze and excitation: channels are weighted by what all places hold.
        squeezed = max(1, channels // 4)
        weight = nn.Dense(squeezed, name="squeeze")(average(x))
        weight = nn.Dense(wide, name="excite")(nn.silu(weight))
        weight = nn.sigmoid(weight)
        x = x * weight[..., None, None, :]
        x = self._conv(self.features, 1, "project")(x)
        x = group_norm(size=8, name="project_norm")(x)
        if self.strides == 1 and channels == self.features:
            return x + shortcut
        return x

    def _conv(self, features: int, size: int, name: str, **options: Any) -> Conv:
        options |= {"use_bias": False, "layout": self.layout}
        return Conv(features, (size, size), name=name, **options)


class EfficientNet(nn.Module):
    """EfficientNet-B0: 16 blocks of inverted bottlenecks with squeeze and excitation.

    The published network with a group norm of 8 channels a group for each batch norm: as many
    parameters, 5,288,548 for 1,000 classes. No statistics of a batch, no dropout and no stochastic
    depth.

    Attributes:
        classes: Number of logits.
        stem_strides: Of the first convolution: 2 as published, 1 for 32x32 images.
        layout: Of the convolutions, see `dpjax.models.conv`.

    Reference:
        Tan and Le (2019), EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks,
        arXiv 1905.11946, Table 1.

    Example:
        >>> import jax
        >>> from dpjax.contrib import efficientnet
        >>> model, x = efficientnet.EfficientNet(), jax.ShapeDtypeStruct((2, 64, 64, 3), "float32")
        >>> jax.eval_shape(model.init_with_output, jax.random.key(0), x)[0].shape
        (2, 10)
    """

    classes: int = 10
    stem_strides: int = 2
    layout: Layout = "conv"

    @nn.compact
    def __call__(self, x: Images) -> Logits:
        """Return the logits of images."""
        first = Conv(
            32, (3, 3), self.stem_strides, use_bias=False, layout=self.layout, name="first"
        )
        x = nn.silu(group_norm(size=8, name="first_norm")(first(x)))
        for stage, (expansion, size, strides, features, count) in enumerate(_STAGES):
            for index in range(count):
                name = f"block_{stage}_{index}"
                step = 1
                if index == 0:
                    step = strides
                x = _Inverted(expansion, size, step, features, self.layout, name=name)(x)
        last = Conv(1280, (1, 1), use_bias=False, layout=self.layout, name="last")
        x = average(nn.silu(group_norm(size=8, name="last_norm")(last(x))))
        return nn.Dense(self.classes, name="head")(x)
