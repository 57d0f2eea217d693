"""One round of any method: emit, privatise, send, exchange, absorb."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PRNGKeyArray

from dpjax.protocols import (
    Algorithm,
    Emission,
    Info,
    IntegerEncoded,
    Method,
    Query,
    Round,
    Seen,
    State,
)

__all__ = ["Halves", "Outgoing", "compose", "halves"]

LOST = "lost_noise"
"""The metric of a round: the largest share of a payload's entries that is sent without noise."""


class Outgoing(NamedTuple):
    """A round between send and absorb.

    Attributes:
        message: What is about to cross the network.
        carry: What the agents keep for themselves meanwhile.
        metrics: Scalars of the round by name.
        secret: The privatizer's state after the round.
    """

    message: Any
    carry: Any
    metrics: Mapping[str, Array]
    secret: Any


class Halves(NamedTuple):
    """A round cut where it crosses the network, for a loop that sends messages itself.

    Attributes:
        init: ``init(models, key=None) -> State``; the key is public, see `Round.key`.
        outgoing: ``outgoing(key, state, batch) -> Outgoing``.
        incoming: ``incoming(key, state, batch, outgoing, received) -> State``.
    """

    init: Any
    outgoing: Any
    incoming: Any


def halves(
    method: Method,
    arrays: Any,
    *,
    query: Query,
    privatizer: optax.GradientTransformation | IntegerEncoded | None,
    optimizer: optax.GradientTransformation,
    divisor: float,
    lost: Callable[[Any, Any], Any] | None = None,
) -> Halves:
    """Join the parts of a run into the two halves of a round.

    Guarantee: none by itself; the noise is added to the method's private payload and nothing
    touches that between `Method.emit` and the noise. That a message depends on data through the
    noisy payload alone is for `dpjax.plans.dependence` to show.

    Args:
        method: What agents compute, keep and send.
        arrays: One plan's arrays, traced or not.
        query: How gradients of a batch are read.
        privatizer: What adds the noise; None where there is none.
        optimizer: What turns noisy means into updates.
        divisor: What the sampler divides sums by.
        lost: ``lost(round, payload)``, the share of entries that noise is too fine for; None where
            the payload is bounded.

    Returns:
        The halves.
    """

    def here(key: Any, round: Int[Array, ""], batch: Any, models: Any = None) -> Round:
        opened = None if models is None else _opened(privatizer, key, method, models)
        return Round(arrays, batch, query, optimizer, divisor, key, round, opened)

    def init(models: Any, key: PRNGKeyArray | None = None) -> State:
        round = jnp.zeros((), jnp.int32)
        memory = method.start(here(key, round, None), models)
        secret = () if privatizer is None else privatizer.init(method.payload(models))
        return State(models, memory, secret, round)

    def outgoing(key: PRNGKeyArray, state: State, batch: Any) -> Outgoing:
        now, seen = here(key, state.round, batch, state.models), Seen(state.models, state.memory)
        emission = method.emit(now, seen)
        noisy, secret = emission.private, state.secret
        if privatizer is not None:
            public = (key,) if isinstance(privatizer, IntegerEncoded) else ()
            noisy, secret = privatizer.update(noisy, secret, *public)
        # What was private is not at hand any more.
        kept = Emission((), emission.public, emission.carry)
        message, carry = method.send(now, seen, kept, noisy)
        metrics = dict(emission.metrics)
        if lost is not None:
            metrics[LOST] = lost(state.round, emission.private)
        return Outgoing(message, carry, metrics, secret)

    def incoming(
        key: PRNGKeyArray, state: State, batch: Any, sent: Outgoing, received: Any
    ) -> State:
        now, seen = here(key, state.round, batch, state.models), Seen(state.models, state.memory)
        models, memory = method.absorb(now, seen, sent.carry, received)
        return State(models, memory, sent.secret, state.round + 1)

    return Halves(init, outgoing, incoming)


def _opened(privatizer: Any, key: PRNGKeyArray, method: Method, models: Any) -> Any:
    """What reads sums of noisy payloads of another form than the payload; None for the payload's.

    Args:
        privatizer: What adds the noise.
        key: The round's public key.
        method: Whose payload it is.
        models: Agent-stacked.
    """
    if not isinstance(privatizer, IntegerEncoded):
        return None
    payload = jax.eval_shape(method.payload, models)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), payload)
    return lambda total: privatizer.opened(total, key, like)


def compose(method: Method, arrays: Any, **parts: Any) -> Algorithm:
    """Join the parts of a run into an init/step pair, messages crossing the method's exchange.

    Args:
        method: What agents compute, keep and send.
        arrays: One plan's arrays.
        parts: As in `halves`.

    Returns:
        The algorithm.
    """
    cut, exchange = halves(method, arrays, **parts), method.exchange

    def step(key: PRNGKeyArray, state: State, batch: Any) -> tuple[State, Info]:
        sent = cut.outgoing(key, state, batch)
        received = exchange(arrays, state.round, sent.message)
        state = cut.incoming(key, state, batch, sent, received.value)
        return state, Info(sent.metrics, received.sent)

    return Algorithm(cut.init, step)
