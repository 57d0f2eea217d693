"""The parts of a run as types: what fits these joins the engine, which knows no method.

A round, for every method:

    emit        a method reads its models and a batch, and says what of it is private
    privatise   the engine adds the plan's noise to that, and to nothing else
    send        the method makes a message of it
    exchange    the message crosses the network: gossip, links, or a sum
    absorb      the method takes what it received into its models and memory

Only the engine privatises and exchanges, so a method never sees a noise key, and what it sends can
be shown to depend on data through the noisy payload alone (`dpjax.plans.dependence`). All n agents
are the leading axis of every leaf unless a part says otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

__all__ = [
    "Aggregator",
    "Algorithm",
    "Answer",
    "Draw",
    "Emission",
    "Exchange",
    "Info",
    "IntegerEncoded",
    "Method",
    "Networked",
    "Noise",
    "Optimizer",
    "Privatizer",
    "PublicState",
    "Query",
    "Received",
    "Round",
    "Sampler",
    "State",
    "Timed",
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

    Example:
        >>> from dpjax.protocols import State
        >>> State(models=1.0, memory=(), secret=(), round=0)._fields
        ('models', 'memory', 'secret', 'round')
    """

    models: Any
    memory: Any
    secret: Any
    round: Int[Array, ""]


class PublicState(NamedTuple):
    """What a method may read of a state: all but the secret.

    Attributes:
        models: As in `State`.
        memory: As in `State`.

    Example:
        >>> from dpjax.protocols import PublicState
        >>> PublicState(models=1.0, memory=())._fields  # no secret
        ('models', 'memory')
    """

    models: Any
    memory: Any


class Info(NamedTuple):
    """Diagnostics of one round; what is not used costs nothing under jit.

    Attributes:
        metrics: Scalars of the round by name. Not private.
        messages: What goes over the links, which is what an attacker sees; with an axis of gossip
            steps before where there are several.

    Example:
        >>> from dpjax.protocols import Info
        >>> Info(metrics={"clipped": 0.1}, messages=()).metrics["clipped"]
        0.1
    """

    metrics: Mapping[str, Float[Array, ""]]
    messages: Any


class Algorithm(NamedTuple):
    """A pair of pure functions, which engine and tests call alike.

    Attributes:
        init: ``init(models, key=None) -> State``; the key is public, for methods that draw one.
        step: ``step(key, state, batch) -> (State, Info)``, one round.

    Example:
        >>> from dpjax.protocols import Algorithm
        >>> Algorithm(lambda models: models, lambda key, state, batch: (state, None)).init(3)
        3
    """

    init: Callable[..., State]
    step: Callable[[PRNGKeyArray, State, Any], tuple[State, Info]]


class Answer(NamedTuple):
    """What a query says of a batch.

    Attributes:
        total: Agent-stacked sum of what was clipped.
        metrics: Scalars to report by name, not private.

    Example:
        >>> from dpjax.protocols import Answer
        >>> total, metrics = Answer(total=[1.0])
        >>> metrics
        {}
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

    Example:
        >>> from dpjax.protocols import Emission
        >>> Emission(private=[1.0]).public
        ()
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

    Example:
        >>> from dpjax.protocols import Received
        >>> Received(value=[0.5], sent=[1.0]).sent  # what an attacker sees
        [1.0]
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

    Example:
        >>> import jax
        >>> from dpjax.protocols import IntegerEncoded
        >>> from dpjax.secagg.integers import SumCode
        >>> from dpjax.transforms import integers
        >>> code = SumCode(size=3, bound=1.0, grid=2**-10, clients=2, variance=4)
        >>> isinstance(integers.privatizer(code, key=jax.random.key(0), rounds=5), IntegerEncoded)
        True
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, PRNGKeyArray], tuple[Any, Any]]
    opened: Callable[[Any, PRNGKeyArray, Any], Any]


class Draw(NamedTuple):
    """A batch of every agent.

    Attributes:
        rows: [n, b] positions among the agent's own records.
        padding: [n, b] True where a slot holds no record; None where none is padding.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.plans import samplers
        >>> draw = samplers.Full().holding(2).draw(None, 0, jnp.array([2, 1]))
        >>> draw.rows.shape, draw.padding.tolist()
        ((2, 2), [[False, False], [False, True]])
    """

    rows: Int[Array, "n b"]
    padding: Bool[Array, "n b"] | None


class Query(Protocol):
    """A sum of clipped gradients: the only way in which a method reads data. Hashable.

    Example:
        >>> from dpjax.plans.query import AgentQuery
        >>> AgentQuery.__call__.__annotations__["return"].__name__
        'Answer'
    """

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what it reports."""

    def __call__(
        self, models: Any, batch: Any, encode: Callable[[Any], Any] | None = None
    ) -> Answer:
        """Answer for every agent.

        Args:
            models: Agent-stacked parameters.
            batch: What the sampler drew, leaves [n, batch, ...].
            encode: Applied to one gradient (a record's or an agent's) before the clip, which then
                bounds the norm of what it returns; None is the gradient itself.
        """

    def points(self, weights: Sequence[float] | None = None) -> "Query":
        """The query at several models of an agent at once, leaves [n, points, ...].

        One record's (or agent's) gradients at all of them are one gradient, [points, ...]: that
        is what ``encode`` gets and what is clipped, as a whole. So an answer moves no farther
        than one at a single model: gradients at other points cost nothing beside those at one.

        Args:
            weights: One a point, plain numbers: gradients are added up with them beforehand, to
                one of a model's shape. Faster than the same by ``encode`` where the model knows its
                gradients' norms.
        """

    def along(self, steps: int, step_size: float) -> "Query":
        """The query of local training: plain steps on one record's (or agent's) data.

        In the place of a gradient at x_0 it has the mean of those at x_0, .., x_{K-1}, where
        x_{j+1} = x_j - step_size grad f(x_j), so (x_0 - x_K) / (K step_size); that is what
        ``encode`` gets and what is clipped, as a whole. An answer moves no farther than one of
        gradients.

        Args:
            steps: K.
            step_size: Of the local steps.
        """


class Round(NamedTuple):
    """What a method works with in a round.

    Attributes:
        arrays: What differs between plans, the method's own by name.
        batch: What the sampler drew, with which slots are padding.
        query: How gradients of it are read.
        optimizer: What turns noisy means into updates; its state is in the method's memory.
        divisor: What the sampler divides sums by: 1 where one gradient an agent is clipped.
        key: A key of this round without any secret, for public randomness; in `Method.start` one of
            the run's own, of no round.
        round: Rounds done before this one.
        opened: ``opened(total)`` reads a sum of `IntegerEncoded` payloads; None where they have the
            payload's own form.

    Example:
        >>> from dpjax.protocols import Round
        >>> ctx = Round({}, None, None, None, divisor=4.0, key=None, round=0)
        >>> ctx.mean(8.0)
        2.0
    """

    arrays: Any
    batch: Any
    query: Query
    optimizer: optax.GradientTransformation
    divisor: float
    key: PRNGKeyArray
    round: Int[Array, ""]
    opened: Callable[[Any], Any] | None = None

    def mean(self, total: Any, present: Any = None) -> Any:
        """Return a sum over the divisor, and over who is in it: post-processing.

        The one place where a sum is read, whatever form the noise gave it: what it returns has the
        payload's. How many slots of a batch are padding stays unknown; how many agents
        sent does not: whoever adds up knows it.

        Args:
            total: A sum of clipped gradients with its noise.
            present: How many agents' sums it is, from an `Aggregator`; None is one agent's own.
                Where nobody was present the sum is returned as it is, which is zero.
        """
        if self.opened is not None:
            each = self.opened if present is not None else jax.vmap(self.opened)
            total = each(total)
        if present is not None:
            share = 1 / jnp.maximum(present, 1)
            total = jax.tree.map(lambda leaf: leaf * share.astype(leaf.dtype), total)
        if self.divisor == 1:
            return total
        return jax.tree.map(lambda leaf: leaf * (1 / self.divisor), total)

    def gradient(self, models: Any) -> Any:
        """Return the mean of the query's answer at agent-stacked models, without any noise."""
        return self.mean(self.query(models, self.batch).total)

    def step(self, models: Any, direction: Any, memory: Any) -> tuple[Any, Any]:
        """Return ``(models, memory)`` after the optimizer's update along a direction."""
        updates, memory = self.optimizer.update(direction, memory, models)
        return optax.apply_updates(models, updates), memory


@runtime_checkable
class Aggregator(Protocol):
    """How a server comes by the sum of what agents send; hashable. Those who inherit have defaults.

    What it delivers is the sum over those who were present and how many they were, or, on the host
    (`dpjax.engine.host`), nothing: an exchange that cannot be completed raises there.

    Example:
        >>> from dpjax.algorithms.exchange import Trusted
        >>> from dpjax.protocols import Aggregator
        >>> isinstance(Trusted(), Aggregator)
        True
    """

    def __call__(self, messages: Any) -> tuple[Any, Float[Array, ""]]:
        """Return ``(sum, present)``: over the agents present, without the agents' axis.

        Args:
            messages: What all agents would send, leaves [n, ...].
        """

    def seen(self, messages: Any, total: Any) -> Any:
        """What goes over the links as who listens sees it, the aggregator among them.

        Every message where they are sent as they are; the sum alone where it is all that can be
        read. A guarantee is for what is returned here, and never for less.

        Args:
            messages: What all agents would send.
            total: The sum.
        """
        return messages

    @property
    def sum_only(self) -> bool:
        """Whether nobody sees a single message, and every one that is present counts once.

        Noise in shares (`plans.noise`) joins no other.
        """
        return False

    @property
    def whole(self) -> bool:
        """Whether it adds up whole numbers alone (`IntegerEncoded` noise makes them)."""
        return False

    def min_survivors(self, agents: int) -> int:
        """Agents in a sum that is opened, at least, where it shows the sum only.

        Args:
            agents: Number of agents n.
        """
        return 0

    def at(self, round: Any) -> Callable[[Any], tuple[Any, Float[Array, ""]]]:
        """The aggregator of a round, where rounds differ.

        Args:
            round: Rounds done before, traced or not.
        """
        return self


class Exchange(Protocol):
    """How a message crosses the network.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.algorithms.exchange import Gossip
        >>> arrays = {"mixing": jnp.full((2, 2), 0.5)}
        >>> Gossip()(arrays, 0, jnp.array([[1.0], [3.0]])).value.tolist()
        [[2.0], [2.0]]
    """

    def __call__(self, arrays: Any, round: Int[Array, ""], message: Any) -> Received:
        """Deliver a message.

        Args:
            arrays: What differs between plans: a mixing matrix or a schedule, say.
            round: Rounds done before this one.
            message: What a method sends.
        """

    @property
    def per_link(self) -> bool:
        """Whether every link has a message of its own, so that it has an axis of receivers too."""
        return False

    def min_survivors(self, agents: int) -> int:
        """Agents in a sum that it opens, at least; 0 where it is no sum, or shows single messages.

        Args:
            agents: Number of agents n.
        """
        return 0


class _Described(Protocol):
    """What a method says of itself beside its round. Those who inherit have the defaults."""

    @property
    def sensitivity(self) -> Callable[..., Any] | None:
        """Where its private payload is not the query's answer, how far that moves; else None.

        ``sensitivity(answer, steps, divisor, mixing) -> [T, P]``: how far each part of the payload
        moves in every round, all messages before held, given how far answers are apart
        (``answer(distance)`` for points that far apart), the step sizes [T], the sampler's divisor
        and the mixing matrix.
        """
        return None

    @property
    def asks_own(self) -> bool:
        """Whether it asks for gradients at models that others do not know.

        The sensitivity then counts how far these are apart.
        """
        return False

    @property
    def entries(self) -> int:
        """The least number of entries of a model that it runs on."""
        return 1


@runtime_checkable
class Method(_Described, Protocol):
    """What agents compute, keep and send: a frozen dataclass that inherits this.

    Example:
        >>> from dpjax.algorithms.dsgd import DSGD
        >>> from dpjax.protocols import Method
        >>> isinstance(DSGD(), Method), DSGD().stochastic
        (True, 'rows')
    """

    @property
    def stochastic(self) -> Literal["rows", "columns", "double"]:
        """Which sums of its mixing matrix must be 1."""

    @property
    def exchange(self) -> Exchange:
        """How its messages cross the network."""

    def start(self, ctx: Round, models: Any) -> Any:
        """The memory before the first round: the optimizer's; ``ctx`` without batch and query."""
        return ctx.optimizer.init(models)

    def payload(self, models: Any) -> Any:
        """A tree of the shapes and dtypes of `Emission.private`: of the models', if not said."""
        return models

    def emit(self, ctx: Round, public_state: PublicState) -> Emission:
        """Say what is private."""

    def send(
        self, ctx: Round, public_state: PublicState, emission: Emission, noisy: Any
    ) -> tuple[Any, Any]:
        """Make ``(message, carry)`` of the noisy payload; the carry stays with the agents.

        ``emission.private`` is withheld: what was private is at hand as ``noisy`` alone, which by
        default is the message.
        """
        return noisy, emission.carry

    def absorb(
        self, ctx: Round, public_state: PublicState, carry: Any, received: Any
    ) -> tuple[Any, Any]:
        """Return ``(models, memory)`` after the round: what was received, and the carry."""
        return received, carry

    def released(self, public_state: PublicState) -> Any:
        """What may be published: a function of messages alone; nothing, if not said."""
        return ()

    def measured(self, public_state: PublicState) -> Any:
        """What metrics are of, agent-stacked models."""
        return public_state.models

    @property
    def measures_private(self) -> bool:
        """Whether metrics are of models that no message shows, whatever data they are taken on."""
        return self.sensitivity is not None


@runtime_checkable
class Networked(_Described, Protocol):
    """A method whose payload has the shape of a network: it is placed on one for a run.

    Example:
        >>> from dpjax.algorithms.zip_dl import ZipDL
        >>> from dpjax.protocols import Networked
        >>> isinstance(ZipDL(), Networked)
        True
    """

    @property
    def stochastic(self) -> Literal["rows", "columns", "double"]:
        """Which sums of its mixing matrix must be 1."""

    def on(self, mixing: Float[np.ndarray, "*p n n"]) -> Method:
        """The method on a network; hashable.

        Args:
            mixing: The mixing matrix or schedule.

        Raises:
            ValueError: For a network that it cannot run on.
        """


@runtime_checkable
class Timed(Protocol):
    """A method, or what makes an optimizer, that does something else in runs of other lengths.

    Example:
        >>> from dpjax.algorithms.disk import DiSK
        >>> from dpjax.protocols import Timed
        >>> isinstance(DiSK(), Timed)
        False
    """

    def check_rounds(self, rounds: int) -> None:
        """Refuse a run of a length that it is not made for.

        Args:
            rounds: Rounds of the run.

        Raises:
            ValueError: Naming the argument, its value and the remedy.
        """


class Privatizer(Protocol):
    """How noise is drawn; hashable, one compilation for each value.

    Example:
        >>> from dpjax.protocols import Privatizer
        >>> Privatizer.compact(None, {"factor": 1.0})
        {'factor': 1.0}
    """

    def transformation(
        self, arrays: Any, key: PRNGKeyArray
    ) -> optax.GradientTransformation | IntegerEncoded:
        """Add the noise to a payload; its state is the only place with a key.

        An `IntegerEncoded` one gives the payload another form. Methods read its sums by
        `Round.mean` alone, and its noise design says so: ``integer_encoded = True``.

        Scalars of whole numbers in that state count rounds; what is neither these nor a key is
        past noise, which is drawn again on resume.
        """

    def compact(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """A smaller form, for the same noise to the bit, of the arrays of all plans of a run.

        Args:
            arrays: By name, [V, ...] each.
        """
        return arrays

    @property
    def lost(self) -> Callable[[Any, Any, Any], Any] | None:
        """Where nothing bounds the payload, ``lost(arrays, round, payload)``; else None.

        It returns the largest share of the payload's entries that is sent without noise, since
        noise is finer than numbers of their size (`dpjax.transforms.noise.lost`).
        """
        return None


@runtime_checkable
class Noise(Protocol):
    """A noise design: how much of it a budget asks for, on which network.

    Example:
        >>> from dpjax.plans import noise
        >>> from dpjax.protocols import Noise
        >>> isinstance(noise.Whisper(), Noise), noise.Whisper().label
        (True, 'whisper')
    """

    @property
    def label(self) -> str:
        """What records and figures call it."""

    def calibrate(self, target: Any) -> Any:
        """Make noise that keeps a budget, `dpjax.plans.calibration.Calibrated`."""


@runtime_checkable
class Sampler(Protocol):
    """Which records take part in a round.

    Example:
        >>> from dpjax.plans import samplers
        >>> from dpjax.protocols import Sampler
        >>> isinstance(samplers.Random(8), Sampler), samplers.Random(8).divisor
        (True, 8)
    """

    @property
    def divisor(self) -> float:
        """What a sum of clipped records is divided by; public, the same in every round."""

    @property
    def participation(self) -> tuple[int, int] | None:
        """(epochs, separation) where a fixed order deals the records; None where any may come."""

    def pattern(self, rounds: int) -> Any:
        """In which rounds of a run one record may take part, a `Participation`."""

    def filled(self, counts: Int[np.ndarray, " n"], rounds: int) -> np.ndarray:
        """How much of each batch is records, [n] or [T, n]."""

    @property
    def capacity(self) -> int | None:
        """Records that a batch is computed at a time, where its size is not known; else None."""

    def rates(self, counts: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"] | None:
        """[n] probability that a record is in a batch, where that may amplify; else None."""

    @property
    def counted(self) -> bool:
        """Whether a plan must know how many records each agent has (``counts``)."""

    def holding(self, records: int) -> "Sampler":
        """The sampler for agents of at most so many records; itself where it need not know."""

    def check(self, counts: Int[np.ndarray, " n"], agents: Sequence[str] | None = None) -> None:
        """Refuse numbers of records that it cannot draw from; ``agents`` names them in messages."""

    def draw(self, key: PRNGKeyArray, round: Int[Array, ""], counts: Int[Array, " n"]) -> Draw:
        """Draw a round's records, with the round's own key."""


@runtime_checkable
class Optimizer(Protocol):
    """What is done with noisy means: post-processing, and the only place of step sizes.

    Example:
        >>> from dpjax.plans import optimizers
        >>> from dpjax.protocols import Optimizer
        >>> isinstance(optimizers.Sgd(0.1), Optimizer), optimizers.Sgd(0.1).first
        (True, 0.1)
    """

    @property
    def first(self) -> float:
        """Step size of the first round, for records."""

    def arrays(self) -> Mapping[str, np.ndarray]:
        """What may differ between plans of one run."""

    def shared(self) -> "Optimizer":
        """The part without what `arrays` holds, hashable: what plans of one run share."""

    def relative(self, rounds: int) -> Float[np.ndarray, " t"]:
        """Step sizes over the first one, [T], for designs and forecasts that look ahead."""

    def chain(self, arrays: Any) -> optax.GradientTransformation:
        """The transformation, whose updates are added to the models."""
