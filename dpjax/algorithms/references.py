"""Decentralized methods without noise that reach the optimum: EXTRA and NIDS, for comparison."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dpjax.algorithms.exchange import Gossip
from dpjax.protocols import Emission, Method, PublicState, Round

__all__ = ["EXTRA", "NIDS"]


class Unbounded:
    """Methods that run without noise alone: none is accounted for on what they send."""

    stochastic: ClassVar[Literal["rows", "columns", "double"]] = "double"
    asks_own: ClassVar[bool] = True

    def sensitivity(
        self, answer: Any, steps: Any, divisor: float, mixing: Any
    ) -> Float[np.ndarray, "t 1"]:
        """Without bound: nothing is said of noise on these messages.

        Args:
            answer: How far answers are apart.
            steps: [T] step sizes.
            divisor: What the sampler divides sums by.
            mixing: The mixing matrix.
        """
        return np.full((len(steps), 1), math.inf)

    def released(self, public_state: PublicState) -> Any:
        """Nothing: no noise was added to any of it."""
        return ()


class Memory(NamedTuple):
    """What an agent keeps of the round before.

    Attributes:
        optimizer: The optimizer's state.
        message: What it sent last.
        model: Its model of the round before.
        mixed: What it received then.
        step: Its step then.
    """

    optimizer: Any
    message: Any
    model: Any
    mixed: Any
    step: Any


class _Reference(Unbounded, Method):
    """What both share; gradients go out as they are, so they run without noise alone."""

    exchange: ClassVar[Gossip] = Gossip()

    def start(self, ctx: Round, models: Any) -> Memory:
        """No round before."""
        zeros = jax.tree.map(jnp.zeros_like, models)
        return Memory(ctx.optimizer.init(models), models, models, models, zeros)

    def payload(self, models: Any) -> Any:
        """What is sent has a model's shape."""
        return models

    def send(
        self, ctx: Round, public_state: PublicState, emission: Emission, noisy: Any
    ) -> tuple[Any, Any]:
        """What was private."""
        return noisy, (noisy, emission.carry)

    def released(self, public_state: PublicState) -> Any:
        """The last message."""
        return public_state.memory.message


@dataclass(frozen=True)
class EXTRA(_Reference):
    """EXTRA: x_{k+2} = (I + W) x_{k+1} - (I + W)/2 x_k + opt(g_{k+1}) - opt(g_k).

    Without noise only: it is a reference.

    Reference:
        Shi, Ling, Wu and Yin (2015).

    Example:
        >>> from dpjax.algorithms.references import EXTRA
        >>> EXTRA().stochastic
        'double'
    """

    def emit(self, ctx: Round, public_state: PublicState) -> Emission:
        """The model is sent."""
        answer = ctx.query(public_state.models, ctx.batch)
        step, state = ctx.optimizer.update(
            ctx.mean(answer.total), public_state.memory.optimizer, public_state.models
        )
        return Emission(public_state.models, carry=(step, state), metrics=answer.metrics)

    def absorb(
        self, ctx: Round, public_state: PublicState, carry: Any, received: Any
    ) -> tuple[Any, Any]:
        """Mix, and take off half of the round before."""
        message, (step, state) = carry
        old, first = public_state.memory, ctx.round == 0

        def after(x: Any, mixed: Any, new: Any, before: Any, heard: Any, was: Any) -> Any:
            later = x + mixed - 0.5 * (before + heard) + new - was
            return jnp.where(first, mixed + new, later)

        models = jax.tree.map(
            after, public_state.models, received, step, old.model, old.mixed, old.step
        )
        return models, Memory(state, message, public_state.models, received, step)


@dataclass(frozen=True)
class NIDS(_Reference):
    """NIDS: x_{k+1} = (I + W)/2 (2 x_k - x_{k-1} + opt(g_k) - opt(g_{k-1})).

    Without noise only: it is a reference.

    Reference:
        Li, Shi and Yan (2019).

    Example:
        >>> from dpjax.algorithms.references import NIDS
        >>> NIDS().stochastic
        'double'
    """

    def emit(self, ctx: Round, public_state: PublicState) -> Emission:
        """The extrapolated model is sent."""
        answer, old = ctx.query(public_state.models, ctx.batch), public_state.memory
        step, state = ctx.optimizer.update(
            ctx.mean(answer.total), old.optimizer, public_state.models
        )
        first = ctx.round == 0

        def ahead(x: Any, before: Any, new: Any, was: Any) -> Any:
            return jnp.where(first, x + new, 2 * x - before + new - was)

        moved = jax.tree.map(ahead, public_state.models, old.model, step, old.step)
        return Emission(moved, carry=(moved, step, state), metrics=answer.metrics)

    def absorb(
        self, ctx: Round, public_state: PublicState, carry: Any, received: Any
    ) -> tuple[Any, Any]:
        """The mean of the agent's own point and the mix; the first step is not mixed."""
        message, (moved, step, state) = carry
        first = ctx.round == 0
        models = jax.tree.map(
            lambda own, mixed: jnp.where(first, own, 0.5 * (own + mixed)), moved, received
        )
        return models, Memory(state, message, public_state.models, received, step)
