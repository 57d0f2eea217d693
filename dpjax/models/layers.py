"""Layers that several networks share; each looks at one example alone."""

from typing import TypeAlias

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpjax.models.conv import Images, shifted

__all__ = ()

Logits: TypeAlias = Float[Array, "*b k"]
"""Scores of classes."""


def group_norm(
    groups: int | None = None, size: int | None = None, name: str | None = None
) -> nn.GroupNorm:
    """A group norm over height, width and the channels of a group, of each image by itself.

    Args:
        groups: Number of groups, or None where ``size`` is given.
        size: Channels of a group.
        name: Of the layer.

    Returns:
        The flax module, with a scale and a bias a channel.
    """
    return nn.GroupNorm(
        num_groups=groups, group_size=size, epsilon=1e-5, reduction_axes=(-3, -2, -1), name=name
    )


def max_pool(x: Images, window: int, strides: int) -> Float[Array, "*b p q c"]:
    """Return the largest number of each window.

    Of equal numbers the first one has the gradient, as in ``flax.linen.max_pool``, whose gradient
    takes a CPU ten times as long.
    """
    unpadded = [(0, 0)] * 2
    largest, *others = shifted(x, (window, window), strides, unpadded)
    for other in others:
        # Not a number is the largest, wherever it stands.
        larger = (other > largest) | jnp.isnan(other)
        largest = jnp.where(larger, other, largest)
    return largest


def average(x: Images) -> Float[Array, "*b c"]:
    """Return the mean over height and width."""
    return jnp.mean(x, axis=(-3, -2))
