"""Noise on the messages of links that sums to zero over a sender's messages (Zip-DL).

Normals of leaf l (in tree order) in round t are one draw [L, entries] under
``fold_in(fold_in(key, t), l)``, one row a link, own copies among them.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dpjax import _validate
from dpjax.transforms.leaves import check as check_leaf
from dpjax.transforms.noise import NoiseState, check_key, check_round
from dpjax.transforms.normals import normals

__all__ = ["Over", "zero_sum"]

Over = Literal["messages", "with_own_copy"]


def projection(
    sender: Int[np.ndarray, " l"], receiver: Int[np.ndarray, " l"], over: Over = "with_own_copy"
) -> Float[np.ndarray, "l l"]:
    """Return the map of standard normals to the messages' noise at a deviation of 1.

    Args:
        sender: [L] agents.
        receiver: [L] agents; the sender for its own copy.
        over: As in `zero_sum`.
    """
    noised = (sender != receiver) | (over == "with_own_copy")
    together = (sender[:, None] == sender) & noised[:, None] & noised
    counts = np.maximum(together.sum(axis=1), 1)
    return np.diag(noised.astype(np.float64)) - together / counts[:, None]


def zero_sum(
    sender: Int[np.ndarray, " l"],
    receiver: Int[np.ndarray, " l"],
    deviation: Any,
    *,
    key: PRNGKeyArray,
    rounds: int,
    over: Over = "with_own_copy",
) -> optax.GradientTransformation:
    """Add to every message of a sender a noise of its own, all of them summing to zero.

    The noises of a sender's m messages are z_k - mean(z), z_k standard normals times
    ``deviation``: over the messages that it sends, or over these and its own copy.

    Guarantee: none by itself. For messages that one clipped gradient moves by at most s a round,
    single nodes or coalitions that see what they receive face the loss of
    ``accounting.views.zip_dl(mixing, zero_sum=over).pndp`` at noise deviation / s, for gradients
    that are fixed or functions of what they see ("view"); no finite number is known for others
    ("any"). An eavesdropper of all messages takes the noise away by averaging where the sum runs
    over messages: that loss is infinite. Nodes with one neighbour have no noise on their message
    then. Noise is fresh in each of the first ``rounds`` rounds and for every link; later rounds
    are refused, inside compiled code NaN.

    Args:
        sender: [L] agents, one a message, own copies among them.
        receiver: [L] agents; the sender for its own copy.
        deviation: Standard deviation of a message's noise before the mean is taken away; may be
            traced, and is then not checked.
        key: A threefry key of no other use.
        rounds: Rounds the noise is accounted for.
        over: Over what the noises sum to zero.

    Returns:
        An optax transformation of leaves [L, ...], with state `dpjax.transforms.noise.NoiseState`.

    Raises:
        ValueError: For another key, deviation or rule, links that are not as many senders as
            receivers; in ``update``, for leaves without the L links as their leading axis.

    Reference:
        Biswas et al. (2025), Low-cost privacy-preserving decentralized learning.
    """
    _validate.one_of("over", over, ("messages", "with_own_copy"))
    rounds = _validate.integer("rounds", rounds)
    if not isinstance(deviation, jax.core.Tracer):
        deviation = _validate.spread("deviation", deviation)
    check_key(key)
    if np.ndim(sender) != 1 or np.shape(sender) != np.shape(receiver) or not len(sender):
        raise ValueError(
            f"sender has shape {np.shape(sender)}, receiver {np.shape(receiver)}; give one of each "
            "a message"
        )
    count, n = len(sender), int(np.max(sender)) + 1
    noised = (sender != receiver) | (over == "with_own_copy")
    counts = np.maximum(np.bincount(sender[noised], minlength=n), 1)

    def init(params: optax.Params) -> NoiseState:
        del params
        return NoiseState(key, jnp.zeros((), jnp.int32))

    def update(
        updates: optax.Updates, state: NoiseState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, NoiseState]:
        del params
        check_round(state.round, rounds)
        round_key = jax.random.fold_in(state.key, state.round)
        valid = jnp.where(state.round < rounds, 1.0, jnp.nan) * deviation

        def noisy(index: int, leaf: Array) -> Array:
            wide = jnp.promote_types(leaf.dtype, jnp.float32)
            leaf_key = jax.random.fold_in(round_key, index)
            drawn = normals(leaf_key, (count, leaf.size // count), wide).reshape(leaf.shape)
            side = (-1, *[1] * (leaf.ndim - 1))
            drawn = drawn * jnp.asarray(noised, wide).reshape(side)
            total = jax.ops.segment_sum(drawn, sender, n)
            mean = (total / jnp.asarray(counts, wide).reshape(side))[sender]
            noise = jnp.where(noised.reshape(side), drawn - mean, 0)
            return (leaf.astype(wide) + valid.astype(wide) * noise).astype(leaf.dtype)

        paths = jax.tree_util.tree_leaves_with_path(updates)
        leaves = []
        for index, (path, leaf) in enumerate(paths):
            check_leaf(path, leaf, count, f"the {count} messages")
            leaves.append(noisy(index, leaf))
        updates = jax.tree.unflatten(jax.tree.structure(updates), leaves)
        return updates, NoiseState(state.key, state.round + 1)

    return optax.GradientTransformation(init, update)
