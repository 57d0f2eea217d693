"""Layers that several networks share; each looks at one example alone."""

from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dpjax.models.conv import Images, shifted

__all__: list[str] = []

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


def attend(
    query: Float[Array, "b t d"],
    key: Float[Array, "b s d"],
    value: Float[Array, "b s d"],
    heads: int,
    visible: Bool[Array, "b s"] | None = None,
) -> Float[Array, "b t d"]:
    """Return softmax(q k' / sqrt(d / heads)) v, for each head of d / heads channels.

    Args:
        query: Of each place that asks.
        key: Of each place that is looked at.
        value: What is read there.
        heads: Their number, a divisor of d.
        visible: Which places may be looked at; others have weight exactly zero. None is all.
    """
    if visible is None:
        mask = None
    else:
        mask = visible[:, None, None, :]
    q, k, v = (_by_head(part, heads) for part in (query, key, value))
    attended = jax.nn.dot_product_attention(q, k, v, mask=mask)
    return attended.reshape(query.shape)


def _by_head(x: Float[Array, "b t d"], heads: int) -> Float[Array, "b t h k"]:
    return x.reshape(*x.shape[:-1], heads, -1)
