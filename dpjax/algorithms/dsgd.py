"""Decentralized SGD with a chain of optax transformations between gradient and gossip."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from dpjax import _validate
from dpjax.algorithms.base import Algorithm, GradFn, Info, State
from dpjax.algorithms.exchange import Gossip
from dpjax.protocols import Emission, Round, Seen
from dpjax.topology import gossip
from dpjax.topology import mixing as mixing_

__all__ = ["DSGD", "dsgd"]


@dataclass(frozen=True)
class DSGD:
    """Decentralized SGD: adapt, then combine; X <- W^K (X + opt(G / divisor)).

    What is private is the query's answer, and what is sent the updated models; with one agent it
    is central DP-SGD, with K > 1 gossip steps a gradient Muffliato-SGD(K).

    Attributes:
        gossip_steps: K. A schedule of matrices gives one a gradient.

    Reference:
        Rodio et al., Whisper D-SGD, Algorithm 1; Lian et al. 2017 for the update; Cyffers et al.
        2022 (Muffliato) for several gossip steps.
    """

    gossip_steps: int = 1

    stochastic: ClassVar[Literal["rows", "columns", "double"]] = "rows"

    def __post_init__(self) -> None:
        """Refuse no gossip."""
        steps = _validate.integer("gossip_steps", self.gossip_steps)
        object.__setattr__(self, "gossip_steps", steps)

    @property
    def exchange(self) -> Gossip:
        """Gossip, K steps."""
        return Gossip(self.gossip_steps)

    def start(self, here: Round, models: Any) -> Any:
        """The optimizer's state."""
        return here.optimizer.init(models)

    def payload(self, models: Any) -> Any:
        """One gradient for each model."""
        return models

    def emit(self, here: Round, seen: Seen) -> Emission:
        """The gradients are private."""
        answer = here.query(seen.models, here.batch)
        return Emission(answer.total, metrics=answer.metrics)

    def send(self, here: Round, seen: Seen, emission: Emission, noisy: Any) -> tuple[Any, Any]:
        """The updated models; the optimizer's state stays."""
        updates, memory = here.optimizer.update(here.mean(noisy), seen.memory, seen.models)
        return optax.apply_updates(seen.models, updates), memory

    def absorb(self, here: Round, seen: Seen, carry: Any, received: Any) -> tuple[Any, Any]:
        """What was received is the model."""
        return received, carry

    def released(self, seen: Seen) -> Any:
        """All models: functions of messages."""
        return seen.models


def dsgd(
    mixing: Float[Array, "n n"] | Float[Array, "p n n"],
    transform: optax.GradientTransformation,
    grad_fn: GradFn,
    *,
    gossip_steps: int = 1,
) -> Algorithm:
    """Decentralized SGD: adapt, then combine.

    One round is ``X <- W^K (X + transform(G))`` with ``G_i = grad_fn(X_i, batch_i)``, so the chain
    ends with the negative step size. For Whisper D-SGD the chain is clip, correlated noise, step;
    K > 1 gossip steps a gradient are Muffliato-SGD(K).

    Guarantee: none by itself. It is the chain's: what leaves an agent is a function of its
    gradients only through ``transform``, so a chain that clips and then adds noise makes every
    message private; mixing is post-processing for an attacker who sees all messages, those of
    every gossip step among them.

    Args:
        mixing: [n, n] mixing matrix, or [P, n, n], a schedule with period P; row i holds the
            weights with which agent i averages what it receives.
        transform: Chain on agent-stacked pytrees.
        grad_fn: One agent's gradient, ``grad_fn(params, batch)``; mapped over agents here.
        gossip_steps: K. For K > 1 ``Info.messages`` has leaves [K, n, ...], what is sent before
            each gossip step. A schedule gives one matrix a gradient.

    Returns:
        The init/step pair. ``step`` ignores its key: batches are drawn outside and the noise has
        a key of its own, in the chain's state.

    Raises:
        ValueError: For gossip steps below 1; in ``init``, if a leaf's leading axis is not n.

    Reference:
        Rodio et al., Whisper D-SGD, Algorithm 1; Lian et al. 2017 for the update; Cyffers et al.
        2022 (Muffliato) for several gossip steps.
    """
    n = mixing.shape[-1]
    gossip_steps = _validate.integer("gossip_steps", gossip_steps)

    def init(params: Any) -> State:
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if jnp.ndim(leaf) < 1 or leaf.shape[0] != n:
                name = jax.tree_util.keystr(path)
                raise ValueError(
                    f"params{name} has shape {jnp.shape(leaf)}; stack the {n} agents on its "
                    "leading axis"
                )
        return State(params, transform.init(params), jnp.zeros((), jnp.int32))

    def step(key: PRNGKeyArray, state: State, batch: Any) -> tuple[State, Info]:
        del key
        gradients = jax.vmap(grad_fn)(state.params, batch)
        updates, inner = transform.update(gradients, state.transform, state.params)
        messages = optax.apply_updates(state.params, updates)
        matrix = mixing_.at(mixing, state.round)
        if gossip_steps == 1:
            params = gossip.mix(matrix, messages)
        else:
            params, messages = jax.lax.scan(
                lambda sent, _: (gossip.mix(matrix, sent), sent), messages, length=gossip_steps
            )
        return State(params, inner, state.round + 1), Info(gradients, messages)

    return Algorithm(init, step)
