"""Decentralized methods without noise that reach the optimum: EXTRA and NIDS, for comparison.

They join no noise: `dpjax.algorithms.random_weights.Unbounded` says that no bound is known for
their messages. A run names them as custom methods.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from dpjax.algorithms.exchange import Gossip, Transition
from dpjax.algorithms.random_weights import Unbounded
from dpjax.algorithms.tracking import KeepsMessage
from dpjax.protocols import Carry, Emission, Message, Models, PublicState, Round, Updates

__all__ = ["EXTRA", "NIDS"]


class _LastRound(NamedTuple):
    """An agent's memory of the round before.

    Attributes:
        optimizer: The optimizer's state.
        message: The last message.
        model: Its model of the round before.
        mixed: The messages received in it.
        step: Its step in it.
    """

    optimizer: optax.OptState
    message: Message
    model: Models
    mixed: Models
    step: Updates


class _Reference(Unbounded, KeepsMessage):
    """Base of both methods; they send bare gradients, so they run without noise alone."""

    exchange = Gossip()

    def start(self, ctx: Round, models: Models) -> _LastRound:
        """No round before."""
        zeros = jax.tree.map(jnp.zeros_like, models)
        return _LastRound(ctx.optimizer.init(models), models, models, models, zeros)


@dataclass(frozen=True)
class EXTRA(_Reference):
    """EXTRA: x_{k+2} = (I + W) x_{k+1} - (I + W)/2 x_k + opt(g_{k+1}) - opt(g_k).

    Without noise only: it is a reference.

    Reference:
        Shi, Ling, Wu and Yin (2015).

    Example:
        >>> from dpjax.contrib.references import EXTRA
        >>> EXTRA().stochastic
        'double'
    """

    def emit(self, ctx: Round, public_state: PublicState) -> Emission:
        """The model is sent."""
        models, old = public_state
        answer = ctx.query(models, ctx.batch)
        step, state = ctx.optimizer.update(ctx.mean(answer.total), old.optimizer, models)
        return Emission(models, carry=(step, state), metrics=answer.metrics)

    def absorb(
        self, ctx: Round, public_state: PublicState, carry: Carry, received: Message
    ) -> Transition:
        """Mix, and subtract half of the round before."""
        models, old = public_state
        message, (step, state) = carry

        def after(
            x: Array, mixed: Array, new: Array, before: Array, mixed_before: Array, was: Array
        ) -> Array:
            # (I + W) x_{k+1} - (I + W)/2 x_k, with the received mixes in place of products with W.
            later = x + mixed - 0.5 * (before + mixed_before) + new - was
            # The first round is plain gradient descent from the mix; it has no round before.
            return jnp.where(ctx.round == 0, mixed + new, later)

        new = jax.tree.map(after, models, received, step, old.model, old.mixed, old.step)
        return new, _LastRound(state, message, models, received, step)


@dataclass(frozen=True)
class NIDS(_Reference):
    """NIDS: x_{k+1} = (I + W)/2 (2 x_k - x_{k-1} + opt(g_k) - opt(g_{k-1})).

    Without noise only: it is a reference.

    Reference:
        Li, Shi and Yan (2019).

    Example:
        >>> from dpjax.contrib.references import NIDS
        >>> NIDS().stochastic
        'double'
    """

    def emit(self, ctx: Round, public_state: PublicState) -> Emission:
        """The extrapolated model is sent."""
        models, old = public_state
        answer = ctx.query(models, ctx.batch)
        step, state = ctx.optimizer.update(ctx.mean(answer.total), old.optimizer, models)
        first = ctx.round == 0
        moved = jax.tree.map(
            # The first step has no round before it.
            lambda x, before, new, was: jnp.where(first, x + new, 2 * x - before + new - was),
            models,
            old.model,
            step,
            old.step,
        )
        return Emission(moved, carry=(moved, step, state), metrics=answer.metrics)

    def absorb(
        self, ctx: Round, public_state: PublicState, carry: Carry, received: Message
    ) -> Transition:
        """The mean of the agent's own point and the mix; the first step is not mixed."""
        message, (moved, step, state) = carry
        mean = jax.tree.map(lambda point, mixed: 0.5 * (point + mixed), moved, received)
        models = optax.tree.where(ctx.round == 0, moved, mean)
        return models, _LastRound(state, message, public_state.models, received, step)
