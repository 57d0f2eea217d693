"""What the parts of a run hand on to each other; `dpjax.protocols` says which part gives what."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

__all__ = [
    "Algorithm",
    "Answer",
    "Draw",
    "Emission",
    "Info",
    "IntegerEncoded",
    "Received",
    "Seen",
    "State",
]


class State(NamedTuple):
    """What the next round needs, by slot: what is done with a leaf follows from where it is.

    Attributes:
        models: What gradients are of, agent-stacked, or the server's alone with a leading axis
            of 1.
        memory: The rest that a method keeps: optimizer, tracking variables, server state.
        secret: The privatizer's state: noise keys and past noise. Shared by all plans of a seed,
            never in a checkpoint, drawn again on resume; no method ever reads it.
        round: Rounds done.
    """

    models: Any
    memory: Any
    secret: Any
    round: Int[Array, ""]


class Seen(NamedTuple):
    """What a method may read of a state: all but the secret.

    Attributes:
        models: As in `State`.
        memory: As in `State`.
    """

    models: Any
    memory: Any


class Info(NamedTuple):
    """Diagnostics of one round; what is not used costs nothing under jit.

    Attributes:
        metrics: Scalars of the round by name. Not private.
        messages: What goes over the links, which is what an attacker sees; with an axis of gossip
            steps before where there are several.
    """

    metrics: Mapping[str, Float[Array, ""]]
    messages: Any


class Algorithm(NamedTuple):
    """A pair of pure functions, which engine and tests call alike.

    Attributes:
        init: ``init(models, key=None) -> State``; the key is public, for methods that draw one.
        step: ``step(key, state, batch) -> (State, Info)``, one round.
    """

    init: Callable[..., State]
    step: Callable[[PRNGKeyArray, State, Any], tuple[State, Info]]


class Answer(NamedTuple):
    """What a query says of a batch.

    Attributes:
        total: Agent-stacked sum of what was clipped.
        metrics: Scalars to report by name, not private.
    """

    total: Any
    metrics: Mapping[str, Float[Array, ""]] = {}


class Emission(NamedTuple):
    """What a method emits.

    Attributes:
        private: Agent-stacked payload that noise is added to.
        public: What is sent as it is; it must not depend on any batch.
        carry: What the agents keep for themselves until the round ends.
        metrics: Scalars to report by name, not private.
    """

    private: Any
    public: Any = ()
    carry: Any = ()
    metrics: Mapping[str, Float[Array, ""]] = {}


class Received(NamedTuple):
    """What an exchange delivers.

    Attributes:
        value: What reaches the agents, agent-stacked, or the server.
        sent: What went over the links: what an attacker sees.
    """

    value: Any
    sent: Any


class IntegerEncoded(NamedTuple):
    """A privatizer whose noisy payload has another form than the payload: whole numbers, say.

    Sums of what it gives are read by ``opened``, which needs nothing secret: whoever receives a sum
    reads it. The public key is of the round, the same for all who take part, and no noise may
    depend on it.

    Attributes:
        init: ``init(payload) -> state``.
        update: ``update(payload, state, key) -> (noisy, state)``, with the round's public key.
        opened: ``opened(total, key, like) -> tree``: the sum of payloads that a sum of noisy ones
            stands for, without the agents' axis; ``like`` has the shapes and dtypes of one
            agent's payload.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, PRNGKeyArray], tuple[Any, Any]]
    opened: Callable[[Any, PRNGKeyArray, Any], Any]


class Draw(NamedTuple):
    """A batch of every agent.

    Attributes:
        rows: [n, b] positions among the agent's own records.
        padding: [n, b] True where a place holds no record; None where none is padding.
    """

    rows: Int[Array, "n b"]
    padding: Bool[Array, "n b"] | None
