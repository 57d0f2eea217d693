"""Places of a batch that hold no record of their agent, and agents who have none in it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

__all__: list[str] = []


def own_alone(x: Any, y: Any, padding: Bool[Array, " b"]) -> tuple[Any, Any]:
    """Return a batch with its first record in the places of padding.

    These hold records of others, whose loss may have no finite gradient: times zero that is nan,
    which the clip would make zero of. A loss may be undefined at zero, so that is no stand-in.

    Args:
        x: Records [b, ...].
        y: Their labels.
        padding: True where a place holds no record.
    """
    first = jnp.argmin(padding)

    def one(leaf: Array) -> Array:
        return jnp.where(padding.reshape(-1, *[1] * (leaf.ndim - 1)), leaf[first], leaf)

    return jax.tree.map(one, (x, y))


def none_of_nobody(answers: Any, padding: Bool[Array, "n b"] | None) -> Any:
    """Return answers with zero for agents without a record in the batch.

    Args:
        answers: Agent-stacked.
        padding: True where a place holds no record; None where none is.
    """
    if padding is None:
        return answers
    nobody = jnp.all(padding, axis=1)

    def one(leaf: Array) -> Array:
        return jnp.where(nobody.reshape(-1, *[1] * (leaf.ndim - 1)), jnp.zeros_like(leaf), leaf)

    return jax.tree.map(one, answers)
