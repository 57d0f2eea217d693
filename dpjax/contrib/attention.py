"""Attention, which transformers share."""

import jax
from jaxtyping import Array, Bool, Float

__all__ = ()


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
