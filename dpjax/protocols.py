"""The parts of a run as types. The engine runs every part that fits them and knows no method.

A round, for every method:

    emit        a method reads its models and a batch, and returns the private payload
    privatise   the engine adds the plan's noise to the payload, and to nothing else
    send        the method turns the noisy payload into a message
    exchange    the message crosses the network: gossip, links, or a sum
    absorb      the method updates its models and memory by the received messages

Only the engine privatises and exchanges, so a method never sees a noise key.
`dpjax.plans.dependence` shows that messages depend on data through the noisy payload alone. All n
agents are the leading axis of every leaf unless a part says otherwise.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    TypeAlias,
    runtime_checkable,
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

__all__ = [
    "Aggregator",
    "Amplification",
    "Answer",
    "CountedRecords",
    "Draw",
    "Emission",
    "Exchange",
    "Look",
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

Tree: TypeAlias = Any
"""A pytree of arrays. Its structure is a user's or a method's own, so types say no more."""

Models: TypeAlias = Tree
"""Parameters of all agents, leaves [n, ...]; or a server's alone, leaves [1, ...]."""

Batch: TypeAlias = Tree
"""The drawn records of all agents, leaves [n, batch, ...], and the mask of padding."""

Updates: TypeAlias = Tree
"""Gradients, their noisy sums, or the steps that an optimizer makes of them."""

Message: TypeAlias = Tree
"""The values that agents send, and those that an exchange delivers for them."""

Memory: TypeAlias = Tree
"""The state that a method keeps between rounds beside its models."""

Carry: TypeAlias = Tree
"""The values that agents keep from send to absorb, within one round."""

Counts: TypeAlias = Int[np.ndarray, " n"]
"""Numbers of records, one an agent."""

_Names: TypeAlias = tuple[str, ...]

_Strategy: TypeAlias = Float[np.ndarray, "t t"]
"""C over rounds."""

Arrays: TypeAlias = Mapping[str, Tree]
"""Arrays that differ between the plans of a run, by name, such as the mixing matrix."""


_RoundNumber: TypeAlias = Int[Array, ""]
"""Rounds done, traced."""

_Scalar: TypeAlias = Float[Array, ""]

_Metrics: TypeAlias = Mapping[str, _Scalar]
"""Scalars to report by name, not private."""

_Sum: TypeAlias = tuple[Message, _Scalar]
"""A sum over the agents present, without their axis, and their number."""

_Mixing: TypeAlias = Float[np.ndarray, "*p n n"]
"""A mixing matrix or a schedule of them."""


class State(NamedTuple):
    """The state between rounds; the treatment of a leaf follows from its slot.

    Within the secret it follows from the leaf's type, see `Privatizer.transformation`.

    Attributes:
        models: Models for gradients, agent-stacked, or the server's alone with a leading axis
            of 1.
        memory: The rest that a method keeps: optimizer, tracking variables, server state.
        secret: The privatizer's state (noise keys and past noise) and the key of secret batches.
            All plans of a seed share it. It is never in a checkpoint, and is drawn again on resume;
            no method ever reads it.
        round: Rounds done.

    Example:
        >>> from dpjax.protocols import State
        >>> State(models=1.0, memory=(), secret=(), round=0)._fields
        ('models', 'memory', 'secret', 'round')
    """

    models: Models
    memory: Memory
    secret: Tree
    round: _RoundNumber


class PublicState(NamedTuple):
    """The state that a method may read: all but the secret.

    Attributes:
        models: As in `State`.
        memory: As in `State`.

    Example:
        >>> from dpjax.protocols import PublicState
        >>> PublicState(models=1.0, memory=())._fields  # no secret
        ('models', 'memory')
    """

    models: Models
    memory: Memory


class Answer(NamedTuple):
    """A query's answer on a batch.

    Attributes:
        total: Agent-stacked sum of clipped gradients.
        metrics: Scalars to report by name, not private.

    Example:
        >>> from dpjax.protocols import Answer
        >>> total, metrics = Answer(total=[1.0])
        >>> metrics
        {}
    """

    total: Updates
    metrics: _Metrics = {}


class Emission(NamedTuple):
    """The result of `Method.emit`.

    Attributes:
        private: Agent-stacked payload before the noise.
        public: Values that are sent unchanged; they must not depend on any batch.
        carry: Values that agents keep until the round ends.
        metrics: Scalars to report by name, not private.

    Example:
        >>> from dpjax.protocols import Emission
        >>> Emission(private=[1.0]).public
        ()
    """

    private: Updates
    public: Message = ()
    carry: Carry = ()
    metrics: _Metrics = {}


class Received(NamedTuple):
    """The result of an exchange.

    Attributes:
        value: The received values, agent-stacked, or the server's.
        sent: The messages on the links, as an attacker sees them.

    Example:
        >>> from dpjax.protocols import Received
        >>> Received(value=[0.5], sent=[1.0]).sent  # what an attacker sees
        [1.0]
    """

    value: Message
    sent: Message


class Draw(NamedTuple):
    """A batch of every agent.

    Attributes:
        rows: [n, b] positions among the agent's own records.
        padding: [n, b] True where a slot holds no record; None where none is padding.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.learning import samplers
        >>> draw = samplers.Full().with_max_records(2).draw(None, 0, jnp.array([2, 1]))
        >>> draw.rows.shape, draw.padding.tolist()
        ((2, 2), [[False, False], [False, True]])
    """

    rows: Int[Array, "n b"]
    padding: Bool[Array, "n b"] | None

    @classmethod
    def of_flags(cls, drawn: Bool[Array, "n m"], capacity: int) -> "Draw":
        """The batch of the records that were drawn, in order, in whole passes of a capacity.

        Args:
            drawn: [n, m] whether a record was.
            capacity: Records a pass.
        """
        count = drawn.shape[1]
        positions = jnp.arange(count, dtype=jnp.int32)[None, :]
        # In order, all that is not drawn behind; on a CPU faster than to count and scatter.
        rows = jnp.sort(jnp.where(drawn, positions, count), axis=1)
        # Whole passes: a batch of any size runs in programs of one shape.
        rows = jnp.pad(rows, ((0, 0), (0, -count % capacity)), constant_values=count)
        padding = rows == count
        return cls(jnp.where(padding, 0, rows), padding)


class Query(Protocol):
    """A sum of clipped gradients: the only way in which a method reads data. Hashable.

    Example:
        >>> from dpjax.learning.query import AgentQuery
        >>> AgentQuery.__call__.__annotations__["return"].__name__
        'Answer'
    """

    @property
    def metrics(self) -> _Names:
        """Names of its metrics."""

    def __call__(
        self, models: Models, batch: Batch, encode: Callable[[Updates], Updates] | None = None
    ) -> Answer:
        """Answer for every agent.

        Args:
            models: Agent-stacked parameters.
            batch: The drawn batch, leaves [n, batch, ...].
            encode: Applied to one gradient (a record's or an agent's) before the clip, which then
                bounds the norm of the result; None is the gradient itself.
        """

    def points(self, weights: Sequence[float] | None = None) -> "Query":
        """The query at several models of an agent at once, leaves [n, points, ...].

        One record's (or agent's) gradients at all models are one gradient, [points, ...], which
        ``encode`` receives and the clip bounds as a whole. So the answer has the sensitivity of a
        query at one model, and more points cost nothing.

        Args:
            weights: One number for each point. Gradients are added up with them before the clip, to
                one of a model's shape. This is faster than the same by ``encode`` where the model
                knows its gradients' norms.
        """

    def local_steps(self, steps: int, step_size: float) -> "Query":
        """The query of local training: plain steps on one record's (or agent's) data.

        A gradient at x_0 is replaced by the mean of those at x_0, .., x_{K-1}, where
        x_{j+1} = x_j - step_size grad f(x_j). It equals (x_0 - x_K) / (K step_size). ``encode``
        receives this mean, and the clip bounds it as a whole. So the sensitivity is that of a query
        of gradients.

        Args:
            steps: K.
            step_size: Of the local steps.
        """


class Round(NamedTuple):
    """The context of a method in a round.

    Attributes:
        arrays: Arrays that differ between plans, the method's by name.
        batch: The drawn batch, and its mask of padding.
        query: Reads clipped gradients of the batch.
        optimizer: Turns noisy means into updates; its state is in the method's memory.
        divisor: The sampler's divisor of sums; 1 where one gradient of each agent is clipped.
        key: A public key of this round, for public randomness; in `Method.start` one of the run.
        round: Rounds done before this one.
        opened: ``opened(total)`` decodes a sum of encoded payloads (`Privatizer.opened`); None for
            others.

    Example:
        >>> from dpjax.protocols import Round
        >>> ctx = Round({}, None, None, None, divisor=4.0, key=None, round=0)
        >>> ctx.mean(8.0)
        2.0
    """

    arrays: Arrays
    batch: Batch
    query: Query
    optimizer: optax.GradientTransformation
    divisor: float
    key: PRNGKeyArray
    round: _RoundNumber
    opened: Callable[[Message], Updates] | None = None

    def mean(self, total: Message, present: _Scalar | None = None) -> Updates:
        """Return a sum over the divisor and the number of present agents: post-processing.

        It alone decodes a sum, in any form that the noise gave it; the result has the payload's
        form. The number of padded slots in a batch stays secret. The number of agents does not,
        since the aggregator knows it.

        Args:
            total: A noisy sum of clipped gradients.
            present: Number of agents in the sum, from an `Aggregator`; None is for one agent's
                sum. Without any present agent the sum is zero and returned unchanged.
        """
        if self.opened is not None:
            # The sum over agents is one vector; sums of single agents are one each.
            decode = self.opened if present is not None else jax.vmap(self.opened)
            total = decode(total)
        # The number of agents present is public: the aggregator counts the messages.
        if present is not None:
            share = 1 / jnp.maximum(present, 1)
            total = jax.tree.map(lambda leaf: leaf * share.astype(leaf.dtype), total)
        # Nothing is computed for 1, so that a program without a divisor stays as it is.
        if self.divisor == 1:
            return total
        return jax.tree.map(lambda leaf: leaf * (1 / self.divisor), total)

    def gradient(self, models: Models) -> Updates:
        """Return the mean of the query's answer at agent-stacked models, without any noise."""
        return self.mean(self.query(models, self.batch).total)

    def step(self, models: Models, direction: Updates, memory: Memory) -> tuple[Models, Memory]:
        """Return ``(models, memory)`` after the optimizer's update along a direction."""
        updates, memory = self.optimizer.update(direction, memory, models)
        return optax.apply_updates(models, updates), memory


class _Part(Protocol):
    """A part of a config: a frozen dataclass, which has fields and a hash."""

    if TYPE_CHECKING:
        # For type checkers alone: `isinstance` asks no part for them.
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

        def __hash__(self) -> int:
            return 0


@runtime_checkable
class Aggregator(Protocol):
    """Computes the server's sum of the agents' messages; hashable. Subclasses inherit defaults.

    It delivers the sum over the present agents and their number. On the host (`dpjax.engine.host`)
    an exchange that cannot be completed raises an error.

    Example:
        >>> from dpjax.algorithms.exchange import Trusted
        >>> from dpjax.protocols import Aggregator
        >>> isinstance(Trusted(), Aggregator)
        True
    """

    def __call__(self, messages: Message) -> _Sum:
        """Return ``(sum, present)``: over the agents present, without the agents' axis.

        Args:
            messages: The messages of all agents, leaves [n, ...].
        """

    def observed(self, messages: Message, total: Message) -> Message:
        """The observable part of an exchange: for outsiders and for the aggregator.

        It is every message where these are sent in the clear, and the sum where messages are
        masked. A guarantee covers all of it.

        Args:
            messages: The messages of all agents.
            total: The sum.
        """
        return messages

    @property
    def sum_only(self) -> bool:
        """Whether nobody sees a single message, and every present message counts once.

        Noise in shares (`plans.noise`) needs it.
        """
        return False

    @property
    def integers_only(self) -> bool:
        """Whether it adds up integers alone, as `Privatizer.opened` decodes them."""
        return False

    def min_survivors(self, agents: int) -> int:
        """The fewest agents in an opened sum, for a sum-only aggregator.

        Args:
            agents: Number of agents n.
        """
        return 0

    def at(self, round: int | _RoundNumber) -> Callable[[Message], _Sum]:
        """The aggregator of a round, where rounds differ.

        Args:
            round: Rounds done before, traced or not.
        """
        return self


Combine: TypeAlias = Callable[[_RoundNumber, Message, Message], Message]
"""``combine(round, sent, received) -> value`` of some agents alone.

It returns what an exchange delivers to m agents, leaves [m, ...], from their own messages [m, ...]
and those that they received, leaves [m, senders, ...]. Rows of W should be arguments of a
`jax.tree_util.Partial`: what a closure holds becomes a constant of programs, which JAX may store.
"""


class Exchange(Protocol):
    """The way of messages through the network.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.algorithms.exchange import Gossip
        >>> arrays = {"mixing": jnp.full((2, 2), 0.5)}
        >>> Gossip()(arrays, 0, jnp.array([[1.0], [3.0]])).value.tolist()
        [[2.0], [2.0]]
    """

    def __call__(self, arrays: Arrays, round: _RoundNumber, message: Message) -> Received:
        """Deliver a message.

        Args:
            arrays: Arrays that differ between plans, such as a mixing matrix or a schedule.
            round: Rounds done before this one.
            message: The method's message.
        """

    @property
    def per_link(self) -> bool:
        """Whether messages differ between links, so that they also have an axis of receivers."""
        return False

    def min_survivors(self, agents: int) -> int:
        """The fewest agents in an opened sum; 0 without a sum, or where messages are visible.

        Args:
            agents: Number of agents n.
        """
        return 0

    def for_agents(
        self,
        mixing: _Mixing,
        agents: Sequence[int],
        senders: Sequence[Sequence[int]],
    ) -> Combine | None:
        """What m agents make of messages by themselves, from their rows of the mixing matrix.

        None, the default, says that no agent can: another one adds up, or messages cross the
        network several times in a round.

        Args:
            mixing: The mixing matrix or schedule, dense or sparse.
            agents: Numbers of the m agents.
            senders: For each of them the numbers of the others whose messages it receives.
        """
        return None


Payload: TypeAlias = Literal["dsgd", "answer", "sum", "models", "links", "bare"]
"""Kinds of private payloads, by which methods and noise designs join, see `MethodTerms`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodTerms:
    """What a method of the package joins, stated in its class as ``terms``.

    A user's class has the terms of its nearest class of the package, whatever it states itself.

    Attributes:
        payload: The kind of its private payload; a noise design lists those that it joins.
            "answer": one answer of the query an agent; "dsgd": such an answer, sent in the very
            messages of D-SGD; "sum": one that a server adds to those of others; "models": models,
            which plain steps move; "links": a model for every link, as Zip-DL sends it; "bare":
            what no noise was accounted for.
        steps: What it joins: "any" optimizer, "plain" steps of a size known beforehand, or plain
            ones of "constant" size.
        one_answer: True where an agent's private payload takes one gradient a round as it is, so
            that an assumed gap between gradients says how far it moves.
        noisy_means: "own" where the optimizer is given the mean of each agent's own noisy sum, so
            that the variance of the noise in it is the plan's; "sums" where it is given means over
            agents, and receives the variance with each; None where it is given something else.
        why: Why no others, with the remedy.
        unprotected: Why nobody is protected in a run without noise.
        wraps: Name of its field that holds another method, whose terms are its own.

    Example:
        >>> from dpjax.algorithms.dsgd import DSGD
        >>> DSGD.terms.payload, DSGD.terms.steps
        ('dsgd', 'any')
    """

    payload: Payload = "answer"
    steps: Literal["any", "plain", "constant"] = "any"
    noisy_means: Literal["own", "sums"] | None = None
    one_answer: bool = False
    why: str = ""
    unprotected: str = "no noise is added"
    wraps: str | None = None


class _Described(_Part, Protocol):
    """Properties of a method beside its round, with defaults."""

    @property
    def sensitivity(self) -> Callable[..., Any] | None:
        """The sensitivity of a private payload that is not the query's answer; else None.

        ``sensitivity(answer, steps, divisor, mixing) -> [T, P]`` is the sensitivity of each part of
        the payload in every round, with all earlier messages fixed. ``answer(distance)`` is the
        distance of two neighbours' answers at models of that distance. The others are the step
        sizes [T], the sampler's divisor and the mixing matrix.
        """
        return None

    @property
    def reads_private_models(self) -> bool:
        """Whether it computes gradients at models that only their agent knows.

        The sensitivity then includes the distance of these models.
        """
        return False

    @property
    def sketches_gradients(self) -> bool:
        """Whether it compresses single gradients, so that a query forms each of them."""
        return False

    @property
    def min_entries(self) -> int:
        """The fewest entries of a model on which it runs."""
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
        """The exchange of its messages."""

    def start(self, ctx: Round, models: Models) -> Memory:
        """The memory before the first round, by default the optimizer's state.

        ``ctx`` has neither batch nor query.
        """
        return ctx.optimizer.init(models)

    def payload(self, models: Models) -> Updates:
        """A tree with the shapes and dtypes of `Emission.private`; by default the models."""
        return models

    def emit(self, ctx: Round, public_state: PublicState) -> Emission:
        """Return the private payload of a round."""

    def send(
        self, ctx: Round, public_state: PublicState, emission: Emission, noisy: Updates
    ) -> tuple[Message, Carry]:
        """Return ``(message, carry)`` from the noisy payload; agents keep the carry.

        ``private`` and ``metrics`` of the emission are empty here, since no noise was added to
        them: the method receives the payload as ``noisy`` alone, the message by default.
        """
        return noisy, emission.carry

    def absorb(
        self, ctx: Round, public_state: PublicState, carry: Carry, received: Message
    ) -> tuple[Models, Memory]:
        """Return ``(models, memory)`` after the round, from received messages and the carry.

        ``received`` is the ``value`` of the exchange's `Received`, in the message's form; ``sent``
        is an attacker's, and no method reads it.
        """
        return received, carry

    def released(self, public_state: PublicState) -> Models:
        """The values that may be published, functions of messages alone; by default nothing."""
        return ()

    def measured(self, public_state: PublicState) -> Models:
        """The agent-stacked models that metrics read."""
        return public_state.models

    @property
    def mixes_by_tables(self) -> bool:
        """Whether ``arrays["mixing"]`` may be `dpjax.topology.gossip.Neighbours`.

        True says that nothing but ``gossip.at`` and ``gossip.mix`` reads it, in ``exchange``, say.
        """
        return False

    @property
    def by_agent(self) -> bool:
        """Whether every agent's part of a round follows from its own rows of all trees.

        True says that ``start``, ``emit``, ``send`` and ``absorb`` work on the rows of any agents,
        and read neither the mixing matrix, nor the number of all agents, nor an agent's own number.
        Such a method also runs at some agents alone (`dpjax.rounds`). A class of your own that
        replaces one of these functions says so again, else the answer is no.
        """
        return False

    @property
    def measures_private(self) -> bool:
        """Whether metrics read models that agents never send, on any data."""
        return self.sensitivity is not None


@runtime_checkable
class Networked(_Described, Protocol):
    """A method whose payload has the shape of a network, which a run supplies.

    Example:
        >>> from dpjax.algorithms.zip_dl import ZipDL
        >>> from dpjax.protocols import Networked
        >>> isinstance(ZipDL(), Networked)
        True
    """

    @property
    def stochastic(self) -> Literal["rows", "columns", "double"]:
        """Which sums of its mixing matrix must be 1."""

    def on(self, mixing: _Mixing) -> Method:
        """The method on a network; hashable.

        Args:
            mixing: The mixing matrix or schedule.

        Raises:
            ValueError: For a network on which it cannot run.
        """


@runtime_checkable
class Timed(Protocol):
    """A method, or a factory of optimizers, that depends on the length of a run.

    Example:
        >>> from dpjax.algorithms.disk import DiSK
        >>> from dpjax.protocols import Timed
        >>> isinstance(DiSK(), Timed)
        False
    """

    def check_rounds(self, rounds: int) -> None:
        """Refuse a run of an unsuitable length.

        Args:
            rounds: Rounds of the run.

        Raises:
            ValueError: Naming the argument, its value and the remedy.
        """


class Privatizer(Protocol):
    """Draws the noise; hashable, with one compilation for each value.

    Example:
        >>> from dpjax.protocols import Privatizer
        >>> Privatizer.compact(None, {"factor": 1.0})
        {'factor': 1.0}
    """

    def transformation(self, arrays: Arrays, key: PRNGKeyArray) -> optax.GradientTransformation:
        """The transformation that adds noise to a payload; only its state holds a secret key.

        ``update(payload, state, params, key=...)`` receives the round's public key, which is the
        same for all participants, and on which no noise may depend.

        Integer scalars in that state count rounds. Everything else but keys is past noise, which is
        drawn again on resume. All plans of a seed share the state, which is then the first plan's.
        So nothing in it may depend on ``arrays``: what is drawn is kept before these colour it.
        """

    def compact(self, arrays: Arrays) -> Arrays:
        """A smaller form of the arrays of all plans of a run, with the same bits of noise.

        Args:
            arrays: By name, [V, ...] each.
        """
        return arrays

    def for_agents(
        self, arrays: Arrays, agents: Sequence[int]
    ) -> "tuple[Privatizer, Arrays] | None":
        """The same noise at some agents alone, and its arrays; None where it needs all agents.

        Guarantee: the arrays are of these agents, and keys of links are those at their ends. What
        some agents draw from one secret, each of them draws whole: its group's raw normals. A
        simulation's own noise comes from one key for all agents, which the state holds.

        Args:
            arrays: One plan's, by name.
            agents: Numbers of the agents, whose payloads are the leading axis then.
        """
        return None

    @property
    def opened(self) -> Callable[[Message, PRNGKeyArray, Updates], Updates] | None:
        """For noisy payloads of another form than the payload, such as integers; else None.

        ``opened(total, key, like)`` decodes a sum of noisy payloads without any secret, by the
        round's public key. The sum has no axis of agents, and ``like`` has the shapes and dtypes of
        one agent's payload. Methods decode by `Round.mean` alone, and the noise design has
        ``integer_encoded = True``.
        """
        return None

    @property
    def lost(
        self,
    ) -> Callable[[Arrays, _RoundNumber, Updates], _Scalar] | None:
        """Where nothing bounds the payload, ``lost(arrays, round, payload)``; else None.

        It returns the largest share of the payload's entries without noise, where the noise is
        finer than the spacing of these numbers (`dpjax.transforms.noise.lost`).
        """
        return None


class Look(NamedTuple):
    """How a series is drawn in figures.

    Attributes:
        label: What the legend says.
        color: Of line and marker.
        marker: As Matplotlib names it.
        line: Line style.

    Example:
        >>> from dpjax.protocols import Look
        >>> Look("my method", "#0072B2", "d", "--").line
        '--'
    """

    label: str
    color: str
    marker: str
    line: str | tuple[float, tuple[float, ...]] = "-"


@runtime_checkable
class Noise(_Part, Protocol):
    """A noise design, calibrated to a budget on a network.

    Example:
        >>> from dpjax.plans import noise
        >>> from dpjax.protocols import Noise
        >>> isinstance(noise.Whisper(), Noise), noise.Whisper().label
        (True, 'whisper')
    """

    @property
    def label(self) -> str:
        """Its name in records and figures."""

    def calibrate(self, target: Any) -> Any:
        """Return noise that keeps a budget, a `dpjax.plans.calibration.Calibrated`."""


class SampledTarget(Protocol):
    """What `dpjax.plans.calibration.Target` tells an `Amplification`."""

    @property
    def protect(self) -> Any:
        """`dpjax.plans.protect.Protect`: zeroing a record out moves a sum by its `sensitivity`."""

    @property
    def budget(self) -> Any:
        """`dpjax.plans.protect.Budget`: what the run may cost is its `largest`, at its `delta`."""

    @property
    def pattern(self) -> Any:
        """In how many rounds a record may take part, `epochs`, and how many apart, `separation`."""

    @property
    def rounds(self) -> int:
        """Rounds T."""

    def diagonals(self, strategy: _Strategy | None) -> int:
        """How many diagonals a strategy has, as a run applies it; 1 of fresh noise."""

    def single_draw_sensitivity(self, strategy: _Strategy | None) -> float:
        """How far one draw of a record moves all rounds' messages, at clip 1 and noise 1."""


class SampledNoise(Protocol):
    """What Gaussian noise over agents tells an `Amplification`."""

    @property
    def strategy(self) -> _Strategy | None:
        """C over rounds; None is fresh noise."""

    def inverse_diagonal(self) -> Float[np.ndarray, " n"]:
        """Upper bounds on [R^-1]_ii, R being the covariance over agents."""


class Amplification(abc.ABC):
    """What a sampler's secret batches take off the loss, and where that is proved.

    A sampler returns one from `Sampler.amplification`. A plan refuses relations, attackers and
    gradients that are not named here, calibrates noise by `bound`, and states `loss`. One of your
    own defines `kind`, `bound` and `loss`; Python names what is missing.

    Attributes:
        relations: Neighbouring relations for which it holds.
        attackers: Whom it holds against.
        gradients: "any", or "view".
        remedy: What to give in place of noise over more rounds than it covers.

    Example:
        >>> from dpjax.plans import samplers
        >>> samplers.Poisson(expected=8, capacity=16).amplification().relations
        ('zero_out_record',)
    """

    relations: ClassVar[_Names] = ("zero_out_record",)
    attackers: ClassVar[_Names] = ("outsider",)
    gradients: ClassVar[_Names] = ("any",)
    remedy: ClassVar[str] = "give a covariance over agents that is fresh in every round"

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """The ``kind`` of its loss, which records name as the accountant."""

    @abc.abstractmethod
    def bound(self, target: SampledTarget, strategy: _Strategy | None) -> Float[np.ndarray, "*n"]:
        """The bound b on [R^-1]_ii that keeps the target's budget: 0-d, or one entry an agent.

        Args:
            target: What the noise is for.
            strategy: [T, T] C over rounds; None is fresh noise.
        """

    @abc.abstractmethod
    def loss(self, target: SampledTarget, noise: SampledNoise) -> Any:
        """What every agent loses, an `dpjax.accounting.loss.AmplifiedLoss`.

        Args:
            target: What the noise is for.
            noise: The noise as it will run.
        """


@runtime_checkable
class Sampler(_Part, Protocol):
    """Draws the records of a round: a frozen dataclass that inherits this.

    It defines `divisor` and `draw`; ``examples/own_sampler.py`` also has an accountant.

    Attributes:
        capacity: Records that are computed together, where a batch has any size; it bounds memory
            and nothing else. None where batches have one size.
        clients: Clients who fill an agent's cohort slot in turn.
        needs_counts: Whether a plan must know how many records each agent has (``counts``).
        key_of: Whether `draw` receives the "round"'s own key, or one of the whole "run", from
            which a sampler derives what stays the same over a cycle of rounds.

    Example:
        >>> from dpjax.learning import samplers
        >>> from dpjax.protocols import Sampler
        >>> isinstance(samplers.Random(8), Sampler), samplers.Random(8).divisor
        (True, 8)
    """

    capacity: int | None = None
    clients: int = 1
    needs_counts: ClassVar[bool] = False
    key_of: ClassVar[Literal["round", "run"]] = "round"

    @property
    def divisor(self) -> float:
        """The divisor of a sum of clipped records; public, the same in every round.

        Not a number before a plan has said how many records there are, where it depends on them.
        """

    @property
    def participation(self) -> tuple[int, int] | None:
        """(epochs, separation) for records in a fixed order; None where any may take part."""
        return None

    @property
    def turns(self) -> tuple[int, int] | None:
        """(times, separation) of a client in a fixed order; None, the default, knows no clients."""
        return None

    @property
    def distinct(self) -> int | None:
        """How many records an agent has at least, as batches of distinct ones show; None says 0."""
        return None

    def pattern(self, rounds: int) -> tuple[int, int]:
        """(epochs, separation) of the rounds in which one record may take part; by default all.

        Two of these rounds are a multiple of the separation apart, below epochs x separation.
        """
        return rounds, 1

    def fill_share(self, counts: Counts, rounds: int) -> np.ndarray:
        """The share of records in each batch, [n] or [T, n]; by default batches are full."""
        return np.ones(len(counts))

    def amplification(self, counts: Counts | None = None) -> Amplification | None:
        """What batches that stay secret take off the loss; None, the default, is nothing.

        A sampler that returns one draws from a key that derives from the noise's key, so that its
        batches are as secret as the noise.

        Args:
            counts: [n] records of each agent; None before they are known, where only the rules of
                the amplification are read.
        """
        return None

    def with_max_records(self, records: int) -> "Sampler":
        """The sampler for agents with at most so many records; by default itself."""
        return self

    def check(self, counts: Counts, agents: Sequence[str] | None = None) -> None:
        """Refuse unsuitable numbers of records; ``agents`` names the agents in messages."""
        return

    def draw(self, key: PRNGKeyArray, round: _RoundNumber, counts: Int[Array, " n"]) -> Draw:
        """Draw a round's records: distinct rows of each agent, padding aside.

        A row that came twice would be clipped twice, and move the sum by twice the clip norm. A
        plan draws a few rounds of a class of your own and refuses what it sees to be wrong. Such a
        trial is no proof: the guarantee stays your word, and names the class.

        Args:
            key: The round's own key; that of the whole run where ``key_of`` is "run".
            round: Rounds done before this one.
            counts: [n] records of each agent.
        """


class CountedRecords(Sampler):
    """A sampler that must know the most records of an agent, in its field ``records``.

    Example:
        >>> from dpjax.plans import samplers
        >>> samplers.Full().with_max_records(40).places
        40
    """

    needs_counts = True
    records: int | None

    @property
    def places(self) -> int:
        """The most records of an agent, where the plan has said it."""
        if self.records is None:
            raise ValueError("records is None; draw with plan.sampler")
        return self.records

    def with_max_records(self, records: int) -> Self:
        """The same sampler, for agents of at most so many records.

        Args:
            records: Most records of an agent.

        Raises:
            ValueError: For a sampler of another number.
        """
        if self.records not in (None, records):
            raise ValueError(
                f"records is {self.records}, but the most records of an agent are {records}; leave "
                "records out of the sampler: the plan fills it in"
            )
        return dataclasses.replace(self, records=records)


@runtime_checkable
class Optimizer(_Part, Protocol):
    """Post-processing of noisy means, and the only part with step sizes.

    Example:
        >>> from dpjax.plans import optimizers
        >>> from dpjax.protocols import Optimizer
        >>> isinstance(optimizers.Sgd(0.1), Optimizer), optimizers.Sgd(0.1).first
        (True, 0.1)
    """

    @property
    def first(self) -> float:
        """Step size of the first round, for stored records."""

    def arrays(self) -> Arrays:
        """The arrays that may differ between plans of one run."""

    def shared(self) -> "Optimizer":
        """The hashable part without `arrays`, which plans of one run share."""

    def relative(self, rounds: int) -> Float[np.ndarray, " t"]:
        """Step sizes over the first one, [T], for designs and forecasts."""

    def chain(self, arrays: Arrays) -> optax.GradientTransformation:
        """The transformation, whose updates are added to the models."""
