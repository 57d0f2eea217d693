"""Residual networks with group norm and standardised kernels."""

import functools
from collections.abc import Sequence
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array

from dpjax import _validate
from dpjax.models.conv import Conv, Images, Layout
from dpjax.models.layers import Logits, average, group_norm, max_pool

__all__ = ["ResNet", "WideResNet"]

_scaled = functools.partial(Conv, standardize="scaled")
_standardized = functools.partial(Conv, use_bias=False, standardize="plain")


class _WideBlock(nn.Module):
    """Two 3x3 convolutions, each after relu and a group norm, and what they are added to."""

    features: int
    strides: int
    project: bool
    layout: Layout

    @nn.compact
    def __call__(self, x: Array) -> Array:
        skip = x
        if self.project:
            skip = group_norm(16, name="skip_norm")(nn.relu(x))
            skip = self._conv(1, self.strides, "skip_conv")(skip)
        x = group_norm(16, name="norm_0")(nn.relu(x))
        x = self._conv(3, self.strides, "conv_0")(x)
        x = group_norm(16, name="norm_1")(nn.relu(x))
        return skip + self._conv(3, 1, "conv_1")(x)

    def _conv(self, size: int, strides: int, name: str) -> Conv:
        return _scaled(self.features, (size, size), strides, layout=self.layout, name=name)


class WideResNet(nn.Module):
    """A wide residual network for 32x32 images: WRN-16-4 by default, WRN-40-4 by ``depth=40``.

    A 3x3 convolution to 16 channels; three groups of (depth - 4) / 6 blocks, of 16, 32 and 64 times
    ``width`` channels, the last two halving the image; relu, group norm, average, a dense layer.
    Norms have 16 groups and come after relu; kernels are standardised and scaled, with a gain and a
    bias a channel; the first block of a group has a norm and a 1x1 convolution on its skip path.
    No statistics of a batch, no dropout.

    Attributes:
        classes: Number of logits.
        depth: Layers, 6 k + 4.
        width: Factor of the channels.
        layout: Of the convolutions, see `dpjax.models.conv`.

    Reference:
        Zagoruyko and Komodakis (2016), Wide Residual Networks, arXiv 1605.07146.
        De, Berrada, Hayes, Smith, Balle (2022), Unlocking High-Accuracy Differentially Private
        Image Classification through Scale, arXiv 2204.13650, and its public code.

    Example:
        >>> import jax
        >>> from dpjax.contrib import resnet
        >>> model, x = resnet.WideResNet(depth=10), jax.ShapeDtypeStruct((2, 32, 32, 3), "float32")
        >>> jax.eval_shape(model.init_with_output, jax.random.key(0), x)[0].shape
        (2, 10)
    """

    classes: int = 10
    depth: int = 16
    width: int = 4
    layout: Layout = "conv"

    @nn.compact
    def __call__(self, x: Images) -> Logits:
        """Return the logits of images."""
        if _validate.integer("depth", self.depth, minimum=10) % 6 != 4:
            raise ValueError(f"depth is {self.depth}; give 6 k + 4, as 16 or 40")
        x = _scaled(16, layout=self.layout, name="first")(x)
        for group in range(3):
            features = 16 * self.width * 2**group
            for index in range((self.depth - 4) // 6):
                first = index == 0
                strides = 1
                if first and group > 0:
                    strides = 2
                name = f"block_{group}_{index}"
                x = _WideBlock(features, strides, first, self.layout, name=name)(x)
        x = average(group_norm(16, name="norm")(nn.relu(x)))
        return nn.Dense(self.classes, name="head")(x)


class _Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, each after a group norm and relu."""

    features: int
    strides: int
    project: bool
    layout: Layout

    @nn.compact
    def __call__(self, x: Array) -> Array:
        ready = nn.relu(group_norm(32, name="norm_0")(x))
        out = 4 * self.features
        skip = x
        if self.project:
            skip = self._conv(out, 1, self.strides, "skip_conv")(ready)
        x = self._conv(self.features, 1, 1, "conv_0")(ready)
        x = nn.relu(group_norm(32, name="norm_1")(x))
        x = self._conv(self.features, 3, self.strides, "conv_1")(x)
        x = nn.relu(group_norm(32, name="norm_2")(x))
        return skip + self._conv(out, 1, 1, "conv_2")(x)

    def _conv(self, features: int, size: int, strides: int, name: str) -> Conv:
        # Symmetric zeros, as the published networks pad, also where a stride leaves some over.
        size_ = (size, size)
        padding = size // 2
        return _standardized(features, size_, strides, padding, layout=self.layout, name=name)


class ResNet(nn.Module):
    """A residual network of bottleneck blocks with norms in front: ResNet-50 by default.

    A 7x7 convolution by 2 to 64 channels and 3x3 max-pooling by 2 (``stem="large"``), or a 3x3
    convolution (``stem="small"``, for 32x32 images); four groups of 3, 4, 6 and 3 blocks of 64 to
    512 channels, four times as many between them, the last three halving the image; group norm,
    relu, average, a dense layer that starts at zero. Norms have 32 groups and come before relu;
    kernels are standardised and have no bias. No statistics of a batch, no dropout.

    Attributes:
        classes: Number of logits.
        blocks: In each of the four groups.
        stem: "large" for 224x224 images, "small" for 32x32.
        layout: Of the convolutions, see `dpjax.models.conv`.

    Reference:
        He, Zhang, Ren, Sun (2016), Identity Mappings in Deep Residual Networks, arXiv 1603.05027.
        Kolesnikov et al. (2019), Big Transfer (BiT), arXiv 1912.11370, and its public code.

    Example:
        >>> import jax
        >>> from dpjax.contrib import resnet
        >>> model, x = resnet.ResNet(stem="small"), jax.ShapeDtypeStruct((2, 32, 32, 3), "float32")
        >>> jax.eval_shape(model.init_with_output, jax.random.key(0), x)[0].shape
        (2, 10)
    """

    classes: int = 10
    blocks: Sequence[int] = (3, 4, 6, 3)
    stem: Literal["large", "small"] = "large"
    layout: Layout = "conv"

    @nn.compact
    def __call__(self, x: Images) -> Logits:
        """Return the logits of images."""
        large = _validate.one_of("stem", self.stem, ("large", "small")) == "large"
        if large:
            size = (7, 7)
            strides = 2
            padding = 3
        else:
            size = (3, 3)
            strides = 1
            padding = 1
        x = _standardized(64, size, strides, padding, layout=self.layout, name="first")(x)
        if large:
            # Zeros, as published, which minus infinity in a pool of its own would not be.
            front = [(0, 0)] * (x.ndim - 3)
            x = jnp.pad(x, [*front, (1, 1), (1, 1), (0, 0)])
            x = max_pool(x, 3, 2)
        for group, count in enumerate(self.blocks):
            for index in range(count):
                first = index == 0
                strides = 1
                if first and group > 0:
                    strides = 2
                name = f"block_{group}_{index}"
                x = _Bottleneck(64 * 2**group, strides, first, self.layout, name=name)(x)
        x = average(nn.relu(group_norm(32, name="norm")(x)))
        return nn.Dense(self.classes, kernel_init=nn.initializers.zeros_init(), name="head")(x)
