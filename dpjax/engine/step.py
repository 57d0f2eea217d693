"""One round of any method, and the static parts of a compiled run.

`make_step` combines the parts of a run into ``Algorithm(init, step)``: emit, privatise, send,
exchange, absorb. `Statics` holds these parts, `Data` the arrays that rounds read. A run is a scan
over the step.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int, PRNGKeyArray

from dpjax._numerics import fold_in, gathered
from dpjax.learning.query import AgentQuery, Drawn, RecordQuery, keyed
from dpjax.protocols import (
    Algorithm,
    Info,
    IntegerEncoded,
    Method,
    Optimizer,
    Privatizer,
    PublicState,
    Query,
    Round,
    Sampler,
    State,
)

__all__: list[str] = []

LOST = "lost_noise"
"""The metric of a round: the largest share of a payload's entries that is sent without noise."""

NOT_FINITE = "not_finite"
"""What a release's round reports for the engine: 1 where a number of a message is not finite."""

# Above every round number; numbers folded into one key differ.
_BATCHES = _VARIANTS = 2**32 - 1
_START = 2**32 - 2


class Outgoing(NamedTuple):
    """A round between send and absorb.

    Attributes:
        message: What crosses the network.
        carry: What the agents keep meanwhile.
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
        step: ``step(key, state, batch) -> (State, Info)``: both, with the method's own exchange.
    """

    init: Callable[..., State]
    outgoing: Callable[[PRNGKeyArray, State, Any], Outgoing]
    incoming: Callable[[PRNGKeyArray, State, Any, Outgoing, Any], State]
    step: Callable[[PRNGKeyArray, State, Any], tuple[State, Info]]


def make_halves(
    method: Method,
    arrays: Any,
    *,
    query: Query,
    privatizer: optax.GradientTransformation | IntegerEncoded | None,
    optimizer: optax.GradientTransformation,
    divisor: float,
    lost: Callable[[Any, Any], Any] | None = None,
    checked: bool = False,
) -> Halves:
    """Combine the parts of a run into the two halves of a round.

    Guarantee: none by itself. The noise is added to the method's private payload, which nothing
    changes between `Method.emit` and the noise. `dpjax.plans.dependence` shows that a message
    depends on data through the noisy payload alone.

    Args:
        method: What agents compute, keep and send.
        arrays: One plan's arrays, traced or not.
        query: Reads clipped gradients of a batch.
        privatizer: Adds the noise; None where there is none.
        optimizer: Turns noisy means into updates.
        divisor: The sampler's divisor of sums.
        lost: ``lost(round, payload)``, the share of entries for which the noise is too fine; None
            where the payload is bounded.
        checked: Whether a round reports messages that are not finite.

    Returns:
        The halves.
    """
    encoded = privatizer if isinstance(privatizer, IntegerEncoded) else None

    def context(key: Any, round: Int[Array, ""], batch: Any, models: Any = None) -> Round:
        opened = None
        if encoded is not None and models is not None:
            payload = jax.eval_shape(method.payload, models)
            like = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), payload
            )
            opened = lambda total: encoded.opened(total, key, like)  # noqa: E731
        return Round(arrays, batch, query, optimizer, divisor, key, round, opened)

    def init(models: Any, key: PRNGKeyArray | None = None) -> State:
        round = jnp.zeros((), jnp.int32)
        memory = method.start(context(key, round, None), models)
        secret = () if privatizer is None else privatizer.init(method.payload(models))
        return State(models, memory, secret, round)

    def outgoing(key: PRNGKeyArray, state: State, batch: Any) -> Outgoing:
        ctx = context(key, state.round, batch, state.models)
        public_state = PublicState(*state[:2])
        emission = method.emit(ctx, public_state)
        noisy, secret = emission.private, state.secret
        if privatizer is not None:
            noisy, secret = privatizer.update(noisy, secret, *(() if encoded is None else (key,)))
        # The private payload is out of the method's reach from here on.
        message, carry = method.send(
            ctx, public_state, emission._replace(private=(), metrics={}), noisy
        )
        metrics = dict(emission.metrics)
        if lost is not None:
            metrics[LOST] = lost(state.round, emission.private)
        if checked:
            metrics[NOT_FINITE] = _not_finite(message)
        return Outgoing(message, carry, metrics, secret)

    def incoming(
        key: PRNGKeyArray, state: State, batch: Any, sent: Outgoing, received: Any
    ) -> State:
        ctx = context(key, state.round, batch, state.models)
        models, memory = method.absorb(ctx, PublicState(*state[:2]), sent.carry, received)
        return State(models, memory, sent.secret, state.round + 1)

    def step(key: PRNGKeyArray, state: State, batch: Any) -> tuple[State, Info]:
        sent = outgoing(key, state, batch)
        received = method.exchange(arrays, state.round, sent.message)
        state = incoming(key, state, batch, sent, received.value)
        return state, Info(sent.metrics, received.sent)

    return Halves(init, outgoing, incoming, step)


def _not_finite(message: Any) -> Array:
    """Whether a message holds a number that is not finite; whole numbers always are."""
    leaves = [leaf for leaf in jax.tree.leaves(message) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    finite = [jnp.isfinite(leaf).all() for leaf in leaves]
    return ~jnp.array(finite, bool).all()


def make_step(method: Method, arrays: Any, **parts: Any) -> Algorithm:
    """Combine the parts of a run into an init/step pair with the method's own exchange.

    Args:
        method: What agents compute, keep and send.
        arrays: One plan's arrays.
        parts: As in `make_halves`.

    Returns:
        The algorithm.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from dpjax.algorithms.dsgd import DSGD
        >>> from dpjax.engine.step import make_step
        >>> from dpjax.protocols import Answer
        >>> def query(models, batch):
        ...     return Answer(models - batch)  # gradients of squares around the batch
        >>> parts = dict(query=query, privatizer=None, optimizer=optax.sgd(0.5), divisor=1)
        >>> step = make_step(DSGD(), {"mixing": jnp.full((2, 2), 0.5)}, **parts)
        >>> state = step.init(jnp.zeros((2, 1)), jax.random.key(0))
        >>> state, info = step.step(jax.random.key(1), state, jnp.array([[1.0], [3.0]]))
        >>> state.models.tolist()
        [[1.0], [1.0]]
    """
    halves = make_halves(method, arrays, **parts)
    return Algorithm(halves.init, halves.step)


class Data(NamedTuple):
    """Training data over agents, and evaluation data; with ``data_per_seed`` stacked by seed.

    ``indices`` are numbers of records among all. ``first`` is where ``x`` and ``y`` have the first
    record of each agent, the others behind it, as on the agent's device; None where they lie in the
    order of the numbers. ``frozen`` are the public values of leaves that are not trained. All
    agents, plans and seeds share them; None where all leaves are trained.
    """

    x: Any
    y: Any
    indices: Any
    counts: Any
    evaluation: Any
    first: Any = None
    frozen: Any = None


class Statics(NamedTuple):
    """The static parts of a run; each value (and chunk length) is compiled once.

    ``sequential`` loops over seeds and plans within a round in place of a vmap: per-record
    gradients of many runs at once exceed a CPU's caches, which makes them ten times slower.
    ``privatizer`` is None where no plan has noise. ``data_per_seed`` is True where data differ
    between seeds. ``reports`` are the names of the values that a round reports. A ``release``
    checks that its messages are finite.
    """

    agents: int
    method: Method
    query: AgentQuery | RecordQuery
    sampler: Sampler
    optimizer: Optimizer
    divisor: float
    privatizer: Privatizer | None
    metrics: Callable[..., dict[str, Any]]
    mesh: Mesh | None = None
    sequential: bool = False
    data_per_seed: bool = False
    reports: tuple[str, ...] = ()
    release: bool = False

    @property
    def data_axes(self) -> Data | None:
        """The axes of seeds in the data, for `jax.vmap`."""
        return Data(0, 0, 0, 0, 0, 0, None) if self.data_per_seed else None

    def of_first_seed(self, data: Data) -> Data:
        """The data of the first seed."""
        if not self.data_per_seed:
            return data
        first = jax.tree.map(lambda leaf: leaf[0], data._replace(frozen=None))
        return first._replace(frozen=data.frozen)

    def query_of(self, frozen: Any) -> Query:
        """The query of models that lack the frozen leaves."""
        return self.query if frozen is None else self.query.merging(frozen)

    def link(
        self, arrays: Any, noise_key: PRNGKeyArray
    ) -> optax.GradientTransformation | IntegerEncoded | None:
        """The transformation that adds one plan's noise; None where no plan has any."""
        if self.privatizer is None:
            return None
        return self.privatizer.transformation(arrays, noise_key)

    def halves(
        self, arrays: Any, noise_key: PRNGKeyArray, frozen: Any = None, **changes: Any
    ) -> Halves:
        """Combine the parts of a run for one plan.

        Args:
            arrays: One plan's arrays, traced or not.
            noise_key: The seed's noise key.
            frozen: `Data.frozen`.
            changes: Parts that replace those of the run, by name.
        """
        lost = None if self.privatizer is None else self.privatizer.lost
        parts = {
            "query": self.query_of(frozen),
            "privatizer": self.link(arrays, noise_key),
            "optimizer": self.optimizer.chain(arrays),
            "divisor": self.divisor,
            "lost": None if lost is None else functools.partial(lost, arrays),
            "checked": self.release,
        }
        return make_halves(self.method, arrays, **parts | changes)

    def batch(
        self, data: Data, batch_key: PRNGKeyArray, noise_key: PRNGKeyArray, round: Any
    ) -> Any:
        """Every agent's records of a round, and the mask of padding (None: no padding).

        Args:
            data: The seed's data.
            batch_key: Its key of the batches.
            noise_key: Its key of the noise.
            round: Rounds done before.
        """
        key = fold_in(batch_key, round)
        if self.sampler.capacity is not None:
            # Amplification needs secret batches. Their key derives from the noise key, under a
            # number above those of rounds.
            key = fold_in(fold_in(noise_key, _BATCHES), round)
        variants = None
        if self.query.copies is not None:
            # Variants are public, so their key never derives from the noise key.
            variants = fold_in(fold_in(batch_key, _VARIANTS), round)
        drawn = self.sampler.draw(key, round, data.counts)
        # Positions are below counts.
        rows = jnp.take_along_axis(data.indices, drawn.rows, axis=1, mode="promise_in_bounds")
        at = rows if data.first is None else data.first[:, None] + drawn.rows
        if self.sampler.capacity is not None:
            assert drawn.padding is not None
            return Drawn(data.x, data.y, rows, drawn.padding, variants, at)
        x, y = gathered(at, data.x, data.y)
        return (x if variants is None else keyed(variants, x, rows)), y, drawn.padding

    def template(self, arrays: Any, models: Any, key: PRNGKeyArray) -> State:
        """Shapes of the state of one plan and one seed.

        Args:
            arrays: Stacked over V plans.
            models: Models to start from, leaves [n, ...].
            key: Any key.
        """

        # Arrays are traced, too, since shapes must not depend on their values.
        def start(arrays: Any, models: Any, key: PRNGKeyArray) -> State:
            one = jax.tree.map(lambda leaf: leaf[0], arrays)
            return self.halves(one, key).init(models, key)

        return jax.eval_shape(start, arrays, models, key)

    def first_round(self, arrays: Any, data: Data, models: Any, key: PRNGKeyArray) -> Outgoing:
        """The outgoing part of the first round, for tracing its shapes and names.

        Args:
            arrays: One plan's arrays.
            data: The problem's data.
            models: Agent-stacked models to start from.
            key: Any key, for all purposes.
        """
        halves = self.halves(arrays, key, data.frozen)
        state = halves.init(models, start_key(key))
        batch = self.batch(self.of_first_seed(data), key, key, state.round)
        return halves.outgoing(key, state, batch)


def start_key(batch_key: PRNGKeyArray) -> PRNGKeyArray:
    """A seed's public key before the first round, from its key of the batches."""
    return jax.random.fold_in(batch_key, _START)
