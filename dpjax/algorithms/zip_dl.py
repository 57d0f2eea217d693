"""Zip-DL: another noise on each outgoing message, summing to zero over a sender's messages."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dpjax import _validate
from dpjax.algorithms.base import Algorithm, GradFn, Info, State
from dpjax.topology import mixing as mixing_
from dpjax.transforms.noise import check_key, check_round
from dpjax.transforms.normals import normals

__all__ = ["Links", "ZeroSum", "links", "zip_dl"]

ZeroSum = Literal["messages", "with_own_copy"]


class Links(NamedTuple):
    """Who sends to whom, own copies among them, by sender.

    Attributes:
        sender: [L] agents.
        receiver: [L] agents; the sender for its own copy.
        weight: [L] the receiver's weight on the sender.
    """

    sender: Int[np.ndarray, " l"]
    receiver: Int[np.ndarray, " l"]
    weight: Float[np.ndarray, " l"]


def links(mixing: Float[np.ndarray, "n n"]) -> Links:
    """Return the links of a mixing matrix.

    Args:
        mixing: [n, n] W.
    """
    matrix = np.asarray(mixing, np.float64)
    linked = (matrix != 0) | np.eye(len(matrix), dtype=bool)
    sender, receiver = np.nonzero(linked.T)
    return Links(sender, receiver, matrix[receiver, sender])


def zip_dl(
    mixing: Float[np.ndarray, "n n"],
    transform: optax.GradientTransformation,
    grad_fn: GradFn,
    *,
    deviation: float,
    key: PRNGKeyArray,
    rounds: int,
    zero_sum: ZeroSum = "with_own_copy",
) -> Algorithm:
    """Zip-DL: every receiver gets the sender's model under another noise.

    With h_i = x_i + transform(g_i), agent i sends h_i + e_ij to j, the e_ij of a round standard
    normals times ``deviation`` less their mean over i's messages ("messages") or over these and
    its own copy ("with_own_copy"); then x_j = sum_i W_ji (h_i + e_ij). Without the subtraction
    they would be independent; with it they cancel in the network's mean.

    Guarantee: none by itself. After clipping to C and a step eta, single nodes or coalitions that
    see what they receive face the loss of ``accounting.views.zip_dl(mixing, zero_sum=...).pndp``
    at noise multiplier deviation / (eta C), for gradients that are fixed or functions of what they
    see ("view"); no finite number is known for others ("any"). An eavesdropper of all messages
    takes the noise away by averaging where the sum runs over messages: that loss is infinite.
    Nodes with one neighbour have no noise on their message then. Noise is fresh in each of the
    first ``rounds`` rounds and for every link; later rounds are refused, inside compiled code NaN.

    Args:
        mixing: [n, n] row-stochastic W.
        transform: Chain on agent-stacked pytrees that ends with the negative step size.
        grad_fn: One agent's gradient, ``grad_fn(params, batch)``.
        deviation: Standard deviation of a message's noise before the mean is taken away, in units
            of the model.
        key: A threefry key of no other use.
        rounds: Rounds the noise is accounted for.
        zero_sum: Over what the noises sum to zero.

    Returns:
        The init/step pair; ``Info.messages`` has leaves [L, ...], by `links`, own copies among
        them, which are not sent.

    Raises:
        ValueError: For another mixing matrix, key, deviation or rule.

    Reference:
        Biswas et al. (2025), Low-cost privacy-preserving decentralized learning.
    """
    _validate.one_of("zero_sum", zero_sum, ("messages", "with_own_copy"))
    deviation = _validate.spread("deviation", deviation)
    rounds = _validate.integer("rounds", rounds)
    matrix = mixing_.check(mixing, stochastic="rows")
    if matrix.ndim != 2:
        raise ValueError(f"mixing has shape {matrix.shape}; Zip-DL takes one matrix [n, n]")
    check_key(key)
    n, sent = len(matrix), links(matrix)
    noised = (sent.sender != sent.receiver) | (zero_sum == "with_own_copy")
    counts = np.maximum(np.bincount(sent.sender[noised], minlength=n), 1)

    def init(params: Any) -> State:
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if jnp.ndim(leaf) < 1 or leaf.shape[0] != n:
                name = jax.tree_util.keystr(path)
                raise ValueError(
                    f"params{name} has shape {jnp.shape(leaf)}; stack the {n} agents on its "
                    "leading axis"
                )
        return State(params, (transform.init(params), key), jnp.zeros((), jnp.int32))

    def step(unused: PRNGKeyArray, state: State, batch: Any) -> tuple[State, Info]:
        del unused
        check_round(state.round, rounds)
        inner, noise_key = state.transform
        gradients = jax.vmap(grad_fn)(state.params, batch)
        updates, inner = transform.update(gradients, inner, state.params)
        models = optax.apply_updates(state.params, updates)
        round_key = jax.random.fold_in(noise_key, state.round)
        valid = jnp.where(state.round < rounds, deviation, jnp.nan)

        def message(index: int, leaf: Array) -> Array:
            wide = jnp.promote_types(leaf.dtype, jnp.float32)
            shape = (len(sent.sender), *leaf.shape[1:])
            leaf_key = jax.random.fold_in(round_key, index)
            drawn = normals(leaf_key, (shape[0], leaf.size // n), wide).reshape(shape)
            side = (-1, *[1] * (leaf.ndim - 1))
            drawn = drawn * jnp.asarray(noised, wide).reshape(side)
            total = jax.ops.segment_sum(drawn, sent.sender, n)
            mean = (total / jnp.asarray(counts, wide).reshape(side))[sent.sender]
            noise = jnp.where(noised.reshape(side), drawn - mean, 0)
            return leaf.astype(wide)[sent.sender] + valid.astype(wide) * noise

        def combine(message: Array, leaf: Array) -> Array:
            weight = jnp.asarray(sent.weight, message.dtype)
            weighted = message * weight.reshape((-1, *[1] * (leaf.ndim - 1)))
            return jax.ops.segment_sum(weighted, sent.receiver, n).astype(leaf.dtype)

        leaves, structure = jax.tree.flatten(models)
        messages = [message(index, leaf) for index, leaf in enumerate(leaves)]
        combined = [combine(*pair) for pair in zip(messages, leaves, strict=True)]
        params = jax.tree.unflatten(structure, combined)
        new = State(params, (inner, noise_key), state.round + 1)
        return new, Info(gradients, jax.tree.unflatten(structure, messages))

    return Algorithm(init, step)
