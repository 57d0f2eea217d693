"""What every algorithm is: a pair of pure functions, and the state between them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax
from jaxtyping import Array, Int, PRNGKeyArray

__all__ = ["Algorithm", "GradFn", "Info", "State"]

GradFn = Callable[[Any, Any], Any]
"""``grad_fn(params, batch) -> gradient`` of one agent; the algorithm maps it over agents."""


class State(NamedTuple):
    """What the next step needs.

    Attributes:
        params: Agent-stacked pytree: every leaf has the n agents as its leading axis.
        transform: State of the optax chain (noise key and noise round among it).
        round: Rounds done so far.
    """

    params: Any
    transform: optax.OptState
    round: Int[Array, ""]


class Info(NamedTuple):
    """Diagnostics of one step; what is not used costs nothing under jit.

    Attributes:
        gradients: Agent-stacked gradients before the chain. Not private.
        messages: What goes over the links, which is what the attacker sees: agent-stacked models,
            with an axis of gossip steps before where there are several, or one message a link.
    """

    gradients: Any
    messages: Any


class Algorithm(NamedTuple):
    """An init/step pair.

    Attributes:
        init: ``init(params) -> State`` from agent-stacked parameters.
        step: ``step(key, state, batch) -> (State, Info)``, one round; every leaf of ``batch`` has
            the n agents as its leading axis.
    """

    init: Callable[[Any], State]
    step: Callable[[PRNGKeyArray, State, Any], tuple[State, Info]]
