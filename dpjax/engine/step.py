"""One round of any method, and the static parts of a compiled run.

`make_rounds` combines the parts of a run into `Rounds`: emit, privatise, send, exchange, absorb.
`Statics` holds these parts, `Data` the arrays that rounds read. Every driver calls these functions:
the scan (`dpjax.engine.program`), the loop on the host (`dpjax.engine.host`), and loops of a user's
own (`dpjax.engine.round`).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int, PRNGKeyArray

from dpjax import _validate
from dpjax._agents import gathered
from dpjax._numerics import fold_in
from dpjax.accounting.guarantee import Guarantee
from dpjax.engine.arguments import Plans, Problems
from dpjax.learning.query import AgentQuery, RecordQuery, UngatheredBatch, keyed
from dpjax.plans.plan import Plan
from dpjax.protocols import (
    Arrays,
    Batch,
    Carry,
    Draw,
    Message,
    Method,
    Models,
    Optimizer,
    Privatizer,
    PublicState,
    Query,
    Round,
    Sampler,
    State,
    Tree,
    Updates,
)

__all__ = ()

Metrics: TypeAlias = Mapping[str, Array]
"""Scalars by name, or stacks of them; not private."""

LOST = "lost_noise"
"""The metric of a round: the probability that its largest entry is sent without noise.

On average at most this share of all entries is: see `dpjax.transforms.noise.lost`.
"""

NOT_FINITE = "not_finite"
"""What a release's round reports for the engine: whether a message has a number that is not."""

# Numbers that are folded into a seed's two keys, all above every round number. Those of one key
# differ, since equal ones would give equal draws.
#
#   noise key   t            noise of round t (`dpjax.transforms.noise`)
#               _BATCHES     key of secret batches: of the whole run, or t is folded into it
#               _MARK        mark of states (`dpjax.engine.round`)
#   batch key   t            `Round.key`, public; also that of the round's public batch
#               _RUN         key of public batches, where a sampler has one of the whole run
#               _VARIANTS    key of augmented records, into which t is folded
#               _START       key of `Method.start`
_BATCHES = 2**32 - 1
_VARIANTS = 2**32 - 1
_START = 2**32 - 2
_RUN = 2**32 - 3


class Secret(NamedTuple):
    """The part of a state that nobody else may see; no checkpoint holds it.

    Guarantee: it is not shown with a state, and pickling it raises a TypeError.

    Attributes:
        noise: The privatizer's state: noise keys and past noise.
        batch_key: The key of secret batches, where their secrecy amplifies; else None.
        mark: Of states of `dpjax.rounds`: derives from the noise key and the agents, and tells
            other states apart; else None.
    """

    noise: Tree
    batch_key: PRNGKeyArray | None = None
    mark: PRNGKeyArray | None = None

    def __repr__(self) -> str:
        """Hide the keys: notebooks and logs show states."""
        return "Secret(...)"

    def __deepcopy__(self, memo: object) -> "Secret":
        """Itself, since arrays of JAX do not change; copies would else be pickled."""
        return self

    def __reduce__(self) -> str:
        """Refuse to be pickled, in simulations too: their loops become those of releases."""
        raise TypeError(
            "secret of a state gives its noise away, so it is not pickled; store "
            "state._replace(secret=()), and go on with rounds.init(stored)"
        )


class Outgoing(NamedTuple):
    """A round between send and absorb.

    Attributes:
        message: What crosses the network.
        carry: What the agents keep meanwhile.
        metrics: Scalars of the round by name.
        secret: The secret part of the state after the round.
    """

    message: Message
    carry: Carry
    metrics: Metrics
    secret: Secret


class Info(NamedTuple):
    """Diagnostics of one round; unused ones cost nothing under jit.

    Attributes:
        metrics: Scalars of the round by name. Not private.
        messages: The messages on the links, as an attacker sees them; with a leading axis of gossip
            steps where there are several.
    """

    metrics: Metrics
    messages: Message


class _Functions(NamedTuple):
    init: Callable[..., State]
    outgoing: Callable[[State], Outgoing]
    incoming: Callable[[State, Outgoing, Message], State]
    step: Callable[[State], tuple[State, Info]]


class Rounds(_Functions):
    """The rounds of one plan and one seed: four pure functions of the state.

    The batch and the noise of a round follow from the seed and from ``state.round``. They can be
    jitted, but for those of a release.

    Attributes:
        init: ``init() -> State`` before the first round. That of `dpjax.rounds` also takes a stored
            state, whose secret is not read: ``init(stored)`` goes on from it. That of `make_rounds`
            takes models, leaves [n, ...], and a public key of the run for `Method.start`.
        outgoing: ``outgoing(state) -> Outgoing``, up to the message.
        incoming: ``incoming(state, sent, received) -> State``, from the message on; ``state`` is
            the one that `outgoing` had.
        step: ``step(state) -> (State, Info)``: both, with the method's own exchange.
        guarantee: Of `dpjax.rounds`: what all T rounds guarantee; no item of the tuple.

    Example:
        >>> import dpjax as dp
        >>> from dpjax.engine.step import Rounds
        >>> Rounds._fields
        ('init', 'outgoing', 'incoming', 'step')
    """

    guarantee: Guarantee


class RoundDraw(NamedTuple):
    """What is drawn for a round beside its noise.

    Attributes:
        key: A public key, see `Round.key`.
        batch: The records of every agent.
    """

    key: PRNGKeyArray
    batch: Batch


def make_rounds(
    method: Method,
    arrays: Arrays,
    *,
    query: Query,
    transformation: optax.GradientTransformationExtraArgs,
    optimizer: optax.GradientTransformation,
    divisor: float,
    draw: Callable[[State], RoundDraw],
    secret_batch_key: PRNGKeyArray | None = None,
    opened: Callable[[Message, PRNGKeyArray, Updates], Updates] | None = None,
    lost: Callable[[Arrays, Int[Array, ""], Updates], Array] | None = None,
    checked: bool = False,
) -> Rounds:
    """Combine the parts of a run: emit, privatise, send, exchange, absorb.

    Guarantee: none by itself. The noise is added to the method's private payload, which nothing
    changes between `Method.emit` and the noise. `dpjax.plans.dependence` shows that a message
    depends on data through the noisy payload alone.

    Args:
        method: What agents compute, keep and send.
        arrays: One plan's arrays, traced or not.
        query: Reads clipped gradients of a batch.
        transformation: Adds the noise; the identity where there is none.
        optimizer: Turns noisy means into updates.
        divisor: The sampler's divisor of sums.
        draw: Of a state, what its round draws.
        secret_batch_key: `Secret.batch_key`; that of public batches is in ``draw``.
        opened: As `Privatizer.opened`.
        lost: As `Privatizer.lost`.
        checked: Whether a round reports messages that are not finite.

    Returns:
        The rounds.
    """

    def context(state: State) -> Round:
        drawn = draw(state)
        ctx = Round(arrays, drawn.batch, query, optimizer, divisor, drawn.key, state.round)
        if opened is None:
            return ctx
        # Sums have the payload's shape without the agents' axis.
        payload = jax.eval_shape(method.payload, state.models)
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), payload)
        return ctx._replace(opened=lambda total: opened(total, drawn.key, like))

    def init(models: Models, key: PRNGKeyArray) -> State:
        round = jnp.zeros((), jnp.int32)
        # A method starts before any batch, so its memory depends on no data.
        ctx = Round(arrays, None, query, optimizer, divisor, key, round)
        memory = method.start(ctx, models)
        noise = transformation.init(method.payload(models))
        return State(models, memory, Secret(noise, secret_batch_key), round)

    def emit_privatise_send(ctx: Round, state: State) -> Outgoing:
        public_state = PublicState(state.models, state.memory)
        emission = method.emit(ctx, public_state)
        noise = state.secret.noise
        noisy, noise = transformation.update(emission.private, noise, key=ctx.key)
        # The private payload is out of the method's reach from here on.
        remainder = emission._replace(private=(), metrics={})
        message, carry = method.send(ctx, public_state, remainder, noisy)
        metrics = dict(emission.metrics)
        if lost is not None:
            metrics[LOST] = lost(arrays, state.round, emission.private)
        if checked:
            # Compiled code cannot raise: the driver does, before the message goes out.
            leaves = list(finite_leaves(message).values())
            metrics[NOT_FINITE] = ~jnp.array(leaves, bool).all()
        return Outgoing(message, carry, metrics, state.secret._replace(noise=noise))

    def absorb(ctx: Round, state: State, sent: Outgoing, received: Message) -> State:
        public_state = PublicState(state.models, state.memory)
        models, memory = method.absorb(ctx, public_state, sent.carry, received)
        return State(models, memory, sent.secret, state.round + 1)

    def outgoing(state: State) -> Outgoing:
        return emit_privatise_send(context(state), state)

    def incoming(state: State, sent: Outgoing, received: Message) -> State:
        return absorb(context(state), state, sent, received)

    def step(state: State) -> tuple[State, Info]:
        # Both halves share one draw: a compiler need not find out that two are equal.
        ctx = context(state)
        sent = emit_privatise_send(ctx, state)
        received = method.exchange(arrays, state.round, sent.message)
        return absorb(ctx, state, sent, received.value), Info(sent.metrics, received.sent)

    return Rounds(init, outgoing, incoming, step)


def finite_leaves(message: Message, is_finite: Callable[[Tree], Array] = jnp.isfinite) -> Metrics:
    """Whether all numbers of a leaf are finite, by the leaf's place in a message.

    Args:
        message: What is sent or received. Leaves of whole numbers are left out: they are finite.
        is_finite: Of NumPy for leaves on the host, whose dtypes JAX might narrow.
    """
    places = {}
    for path, leaf in jax.tree.leaves_with_path(message):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            places[jax.tree_util.keystr(path)] = is_finite(leaf).all()
    return places


def first_leaves(tree: Tree) -> Tree:
    """Those of the first plan, or of the first seed, of a stack."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


class Data(NamedTuple):
    """Training data over agents, and evaluation data; with ``data_per_seed`` stacked by seed.

    ``indices`` are numbers of records among all. ``offsets`` say where ``x`` and ``y`` have the
    first record of each agent, the others behind it, as on the agent's device; None where they lie
    in the order of the numbers. ``frozen`` are the public values of leaves that are not trained.
    All agents, plans and seeds share them; None where all leaves are trained.
    """

    x: Tree
    y: Tree
    indices: Tree
    counts: Tree
    evaluation: Tree
    offsets: Tree = None
    frozen: Models = None

    def __repr__(self) -> str:
        # Records have no place in tracebacks that show local variables.
        return "Data(...)"


class Members(NamedTuple):
    """Some of all agents, whose rounds are done without the others.

    Attributes:
        numbers: Which agents.
        total: Number of all agents n.
    """

    numbers: tuple[int, ...]
    total: int

    def draw(
        self, sampler: Sampler, key: PRNGKeyArray, round: Int[Array, ""], counts: Int[Array, " m"]
    ) -> Draw:
        """Their part of what all agents draw: a row follows from its number and its own count.

        So it is with the package's samplers; `dpjax.rounds` refuses others.

        Args:
            sampler: Draws for all agents.
            key: The round's key.
            round: Rounds done before.
            counts: Records of these agents.
        """
        places = np.array(self.numbers)
        # What other agents have enters no row but theirs, so any number of records will do.
        everyone = jnp.full(self.total, counts[0], counts.dtype).at[places].set(counts)
        return jax.tree.map(lambda leaf: leaf[places], sampler.draw(key, round, everyone))


class Statics(NamedTuple):
    """The static parts of a run; each value (and chunk length) is compiled once.

    ``sequential`` loops over seeds and plans within a round in place of a vmap: per-record
    gradients of many runs at once exceed a CPU's caches, which makes them ten times slower.
    ``privatizer`` is None where no plan has noise. ``data_per_seed`` is True where data differ
    between seeds. ``reports`` are the names of the values that a round reports. A ``release``
    checks that its messages are finite. ``members`` are the agents that are here; None is all.
    """

    agents: int
    method: Method
    query: AgentQuery | RecordQuery
    sampler: Sampler
    optimizer: Optimizer
    divisor: float
    privatizer: Privatizer | None
    metrics: Callable[..., Metrics]
    mesh: Mesh | None = None
    sequential: bool = False
    data_per_seed: bool = False
    reports: tuple[str, ...] = ()
    release: bool = False
    members: Members | None = None

    @classmethod
    def of(cls, plans: Plans, problems: Problems, mesh: Mesh | None = None) -> "Statics":
        """The static parts that all runs of a call share.

        Args:
            plans: At least one.
            problems: One, or one a seed.
            mesh: From `dpjax.engine.processes.agent_mesh`.

        Raises:
            ValueError: For plans that differ in what they must share.
        """
        # Plans are alike but for the noise, which some may lack: all parts are those of one that
        # has it. Without noise the factor is zero, so that draws add nothing. A release is alone.
        noisy = next((plan for plan in plans if plan.noise is not None), plans[0])
        for plan in plans:
            _check_shared(plan, noisy)
        problem = problems[0]
        protect = noisy.config.protect
        query = protect.query(problem, noisy.sampler.capacity)
        # A sketch is of single gradients, whatever the model sums.
        forms_gradients = query.one_by_one or noisy.method.sketches_gradients
        return cls(
            agents=noisy.agents,
            method=noisy.method,
            query=query,
            sampler=noisy.sampler,
            optimizer=noisy.config.optimizer.shared(),
            # Of an agent one gradient is clipped, however many records it is of.
            divisor=noisy.sampler.divisor if protect.clips == "record" else 1,
            privatizer=noisy.privatizer,
            metrics=problem.metrics,
            mesh=mesh,
            sequential=forms_gradients and jax.default_backend() == "cpu",
            data_per_seed=len(problems) > 1,
            release=noisy.config.release,
        )

    @property
    def data_axes(self) -> Data | None:
        """The axes of seeds in the data, for `jax.vmap`."""
        if not self.data_per_seed:
            return None
        return Data(x=0, y=0, indices=0, counts=0, evaluation=0, offsets=0, frozen=None)

    def of_first_seed(self, data: Data) -> Data:
        """The data of the first seed."""
        if not self.data_per_seed:
            return data
        return first_leaves(data._replace(frozen=None))._replace(frozen=data.frozen)

    def query_of(self, frozen: Models) -> Query:
        """The query of models that lack the frozen leaves."""
        return self.query if frozen is None else self.query.merging(frozen)

    def transformation(
        self, arrays: Arrays, noise_key: PRNGKeyArray
    ) -> optax.GradientTransformationExtraArgs:
        """What adds one plan's noise; the identity where no plan has any."""
        added = optax.identity()
        if self.privatizer is not None:
            added = self.privatizer.transformation(arrays, noise_key)
        # Some noise takes the key of a round, which other transformations do not know.
        return optax.with_extra_args_support(added)

    def secret_batch_key(self, noise_key: PRNGKeyArray) -> PRNGKeyArray | None:
        """The key of secret batches: of the noise key, under a number above those of rounds."""
        return None if self.sampler.amplification() is None else fold_in(noise_key, _BATCHES)

    def rounds(
        self,
        arrays: Arrays,
        noise_key: PRNGKeyArray,
        draw: Callable[[State], RoundDraw],
        *,
        frozen: Models = None,
        transformation: optax.GradientTransformationExtraArgs | None = None,
    ) -> Rounds:
        """Combine the parts of a run for one plan.

        Args:
            arrays: One plan's arrays, traced or not.
            noise_key: The seed's noise key.
            draw: As in `make_rounds`.
            frozen: `Data.frozen`.
            transformation: Takes the place of the privatizer's own; None is that.
        """
        if transformation is None:
            transformation = self.transformation(arrays, noise_key)
        return make_rounds(
            self.method,
            arrays,
            query=self.query_of(frozen),
            transformation=transformation,
            optimizer=self.optimizer.chain(arrays),
            divisor=self.divisor,
            draw=draw,
            secret_batch_key=self.secret_batch_key(noise_key),
            opened=getattr(self.privatizer, "opened", None),
            lost=getattr(self.privatizer, "lost", None),
            checked=self.release,
        )

    def draw(self, data: Data, batch_key: PRNGKeyArray, state: State) -> RoundDraw:
        """What a seed draws for a round beside its noise; the same for all plans.

        Args:
            data: The seed's data.
            batch_key: Its key of the batches.
            state: Of any plan; its round and secret are read.
        """
        # Most samplers draw by the same key. Their batches may be public, as it is: a guarantee
        # without amplification holds for every sequence of batches. Those that amplify have a
        # key of their own, of the noise's.
        key = fold_in(batch_key, state.round)
        return RoundDraw(key, self.batch(data, batch_key, state.secret.batch_key, state.round))

    def batch(
        self,
        data: Data,
        batch_key: PRNGKeyArray,
        secret_key: PRNGKeyArray | None,
        round: Int[Array, ""],
    ) -> Batch:
        """Every agent's records of a round, and the mask of padding (None: no padding).

        Args:
            data: The seed's data.
            batch_key: Its key of the batches.
            secret_key: That of secret batches, from `secret_batch_key`.
            round: Rounds done before.
        """
        # Amplification needs batches that an attacker does not know.
        key = batch_key if secret_key is None else secret_key
        if self.sampler.key_of == "round":
            key = fold_in(key, round)
        elif secret_key is None:
            # Methods receive the rounds' keys, so that of a whole run stands apart from them.
            key = fold_in(key, _RUN)
        variants = None
        if self.query.augmentation is not None:
            # Variants are public, so their key never derives from the noise key.
            variants = fold_in(fold_in(batch_key, _VARIANTS), round)
        if self.members is None:
            drawn = self.sampler.draw(key, round, data.counts)
        else:
            drawn = self.members.draw(self.sampler, key, round, data.counts)
        # Rows are positions among an agent's own records, below its count.
        numbers = jnp.take_along_axis(data.indices, drawn.rows, axis=1, mode="promise_in_bounds")
        places = numbers if data.offsets is None else data.offsets[:, None] + drawn.rows
        if self.sampler.capacity is not None:
            assert drawn.padding is not None
            return UngatheredBatch(data.x, data.y, numbers, drawn.padding, variants, places)
        x, y = gathered(places, data.x, data.y)
        return (x if variants is None else keyed(variants, x, numbers)), y, drawn.padding

    def initial(
        self,
        arrays: Arrays,
        models: Models,
        batch_key: PRNGKeyArray,
        noise_key: PRNGKeyArray,
        transformation: optax.GradientTransformationExtraArgs | None = None,
    ) -> State:
        """The state of one plan and one seed before the first round.

        Args:
            arrays: One plan's arrays.
            models: Models to start from, leaves [n, ...].
            batch_key: The seed's key of the batches.
            noise_key: Its key of the noise.
            transformation: As in `rounds`.
        """
        key = jax.random.fold_in(batch_key, _START)
        rounds = self.rounds(arrays, noise_key, _no_draw, transformation=transformation)
        return rounds.init(models, key)

    def template(self, arrays: Arrays, models: Models, key: PRNGKeyArray) -> State:
        """Shapes of the state of one plan and one seed.

        Args:
            arrays: Stacked over V plans.
            models: Models to start from, leaves [n, ...].
            key: Any key.
        """

        # Arrays are traced, too, since shapes must not depend on their values.
        def state(arrays: Arrays, models: Models, key: PRNGKeyArray) -> State:
            return self.initial(first_leaves(arrays), models, key, key)

        return jax.eval_shape(state, arrays, models, key)

    def first_round(
        self, arrays: Arrays, data: Data, models: Models, key: PRNGKeyArray
    ) -> Outgoing:
        """The outgoing part of the first round, for tracing its shapes and names.

        Args:
            arrays: One plan's arrays.
            data: The problem's data.
            models: Agent-stacked models to start from.
            key: Any key, for all purposes.
        """
        draw = functools.partial(self.draw, self.of_first_seed(data), key)
        rounds = self.rounds(arrays, key, draw, frozen=data.frozen)
        return rounds.outgoing(self.initial(arrays, models, key, key))


def _no_draw(state: State) -> RoundDraw:
    raise AssertionError("a state before the first round draws nothing")


def _check_shared(plan: Plan, noisy: Plan) -> None:
    """Refuse a plan that differs from another in what they must share; it may lack the noise."""
    shared = shared_parts(noisy)
    for name, value in shared_parts(plan).items():
        if value == shared[name] or (name == "noise" and value is None):
            continue
        # The config's own word for a part says more than the part.
        field = "label" if name == "noise" else name
        pair = [getattr(config, field, None) for config in (noisy.config, plan.config)]
        if pair[0] == pair[1]:
            pair = [shared[name], value]
        first, second = map(_validate.shown, pair)
        raise ValueError(
            f"plans differ in {name} ({first} and {second}); use dp.sweep, or run each alone"
        )


def shared_parts(plan: Plan) -> dict[str, Any]:
    """The parts that plans of one call must share, by name.

    Args:
        plan: One of them.
    """
    protect = plan.config.protect
    names = ("clip_norm", "norm", "clipping", "microbatch", "per_layer", "clips")
    return {
        "rounds": plan.config.rounds,
        "agents": plan.agents,
        "method": plan.method,
        "optimizer": plan.config.optimizer.shared(),
        "sampler": plan.sampler,
        **{name: getattr(protect, name) for name in names},
        "mixing": plan.mixing.shape,
        "noise": plan.privatizer,
    }
