"""One round at a time, for a training loop of a user's own: `dpjax.rounds`."""

import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from dpjax import _files, _validate
from dpjax._numerics import fold_in, shapes
from dpjax._programs import compiled
from dpjax.accounting.guarantee import Guarantee
from dpjax.data.partition import Partition, blocks, local
from dpjax.engine import arguments, checkpoint, host, keys, program
from dpjax.engine.arguments import Tasks
from dpjax.engine.checkpoint import Checkpoint, Storage
from dpjax.engine.inputs import Inputs
from dpjax.engine.step import (
    NOT_FINITE,
    Data,
    Info,
    Members,
    Metrics,
    Outgoing,
    Rounds,
    Secret,
    Statics,
    first_leaves,
)
from dpjax.learning.problem import Problem
from dpjax.plans import compatibility
from dpjax.plans.optimizers import rows_of
from dpjax.plans.plan import Plan
from dpjax.protocols import Arrays, Combine, Message, Models, Privatizer, State, Tree

__all__ = ["Rounds", "rounds"]

_Transition: TypeAlias = tuple[State, Info]

# Folded into noise keys: apart from rounds and from the batches' number.
_MARK = 2**32 - 2


def rounds(
    plan: Plan,
    problem: Problem,
    *,
    seed: int = 0,
    agents: Sequence[int] | None = None,
    key_file: _files.PathLike | None = None,
) -> Rounds:
    """Return the rounds of a plan as functions, for a loop of one's own.

    They have the bits of `dpjax.run` with the same plan, problem and seed, up to the last bits of
    numbers that a compiler fuses otherwise (as in `dpjax.engine.host`). With n agents, a state has

        models    leaves [n, ...], one model an agent (a server's method: leaves [1, ...])
        memory    what the method keeps beside them, such as the optimizer's state
        secret    noise keys, past noise and the key of secret batches
        round     rounds done, int32

    and `Outgoing` has ``message``, leaves [n, ...] (with a message for each of L links [L, ...]),
    and ``metrics``, scalars by name. Send
    ``sent.message`` and nothing else: ``sent.secret`` has the noise key, and ``sent.carry`` is an
    agent's own. ``received`` is the value of the method's exchange: for D-SGD every agent's average
    W m of all messages m, leaves [n, ...]; for a server the sum without the agents' axis, and the
    number of clients in it. Its tree, shapes and dtypes are checked, its values are not: models
    that receive NaN are NaN, and so are the next messages of models.

    All functions are compiled. They are pure: batch and noise of a round follow from the seed and
    ``state.round``, and the same state gives the same message. Past round T models, memory and
    messages are NaN, and whole numbers in them 0. So are those of a state with the secret of
    another round, seed or release, or of other agents. In simulations a secret follows from the
    seed alone: a loop of another plan with this seed takes its states for its own.

    Guarantee: the plan's, for all messages of the T rounds together; ``rounds.guarantee`` states it
    as the result of `dpjax.run` does, with custom parts of the problem and what finite precision
    adds within the budget. It holds where every round sends its message once, or again unchanged.
    Whoever steps one state twice with different ``received`` values sends the noise of the next
    round with two payloads, which no guarantee covers; a release refuses that. Metrics are not
    private.

    A stored state (of all agents) goes on by ``init(stored)``, which draws the secret of its round
    again. States of other shapes or dtypes are refused, and so are stored models that are not
    finite. ``state.secret`` must not be stored or sent: whoever has it subtracts the noise. States
    do not show it, and it is not pickled. Libraries that walk a state's tree (orbax, flax) store
    the keys all the same: give them ``state._replace(secret=())``. A simulation draws it from the
    seed, and its functions can be compiled into a program of your own.

    A release draws its noise key from the operating system and keeps it in ``key_file``, which
    serves one plan, problem and seed, and which no other loop may use meanwhile. Hard links are
    refused, copies are not noticed. ``outgoing`` and ``step`` note the round and a digest of its
    message in it before they return, which takes about 12 ms. They refuse another message of that
    round, an earlier round, and a message that is not finite; ``init`` refuses a state of earlier
    or of other rounds. Call one of the two in a round: their messages may differ in the last bits.
    Store models, memory and round before a message goes out, and delete the file after the last
    round.

    With ``agents=(3,)`` these are the rounds of some agents alone, say of one that has a process of
    its own. All arrays lead with ``len(agents)``. ``received`` has the messages of other agents as
    they were sent, leaves [agents, senders, ...] in the order of ``plan.senders[agent]``, up to the
    most senders of an agent; places beyond an agent's senders may hold anything. ``step`` raises an
    error, and metrics are of these agents only. The functions hold their records, their rows of
    W and of the noise's factor, and nothing of any other agent. These are arguments of the
    programs, so none of them is in what JAX stores of a program on disk. They agree with a run up
    to rounding, about 1e-6.

    Guarantee: the plan's. An agent draws the raw normals of its whole group (agents whose noise is
    correlated), as every member of a group does who holds the group's seed. So agents of one group
    are not protected from each other. Keys of links between other agents are in no state. All other
    noise of a simulation is drawn from one key, which is in every agent's state and follows from
    the seed: groups are apart in what the programs draw, not in what the key's holder could draw.

    Args:
        plan: One plan.
        problem: Model, data and metrics.
        seed: Models and batches derive from it, in simulations the noise too.
        agents: Numbers of the agents; None is all.
        key_file: Where a release keeps its noise key; mode 0600.

    Returns:
        ``init``, ``outgoing``, ``incoming`` and ``step``, see `Rounds`.

    Raises:
        ValueError: For a plan that does not fit the problem; for a release without a key file, with
            one of another loop, or on a device whose sums are not repeatable; for agents whose
            method, exchange or noise needs all agents, or whose sampler is your own, and for agents
            of a release. From the functions, for states and received values of other kinds, a state
            without a secret, and a sum of fewer clients than the plan's noise is for; from
            ``outgoing``, for gradients "view" and colluders, whose loss is of the method's own
            exchange; of a release, for states that it refuses, and inside a program of your own.

    Example:
        >>> import dpjax as dp
        >>> parts = dict(sampler=dp.samplers.Random(1), optimizer=dp.optimizers.Sgd(0.1), rounds=9)
        >>> config = dp.Config(protect=dp.Protect("replace_agent", clip_norm=1.0), **parts)
        >>> W = dp.mixing.metropolis_hastings(dp.graphs.ring(4))
        >>> plan, task = dp.make_plan(config, W), dp.quadratics(4)
        >>> rounds = dp.rounds(plan, task, seed=1)
        >>> state = rounds.init()
        >>> while state.round < config.rounds:
        ...     state, info = rounds.step(state)
        >>> state.models.shape, sorted(info.metrics)
        ((4, 2), ['clip_fraction', 'gradient_norm'])

        A loop that sends the messages itself:

        >>> state = rounds.init()
        >>> while state.round < config.rounds:
        ...     sent = rounds.outgoing(state)
        ...     received = W.astype("float32") @ sent.message  # by your network
        ...     state = rounds.incoming(state, sent, received)
        >>> result = dp.run(plan, task, seeds=[1])
        >>> bool(abs(state.models - result.params[0, 0]).max() < 1e-6)
        True

        Agent 3 by itself, whose neighbours on the ring are agents 0 and 2:

        >>> own = dp.rounds(plan, task, seed=1, agents=(3,))
        >>> sent, message = own.outgoing(own.init()), rounds.outgoing(rounds.init()).message
        >>> plan.senders[3], sent.message.shape
        ((0, 2), (1, 2))
        >>> state = own.incoming(own.init(), sent, message[None, plan.senders[3]])
        >>> state.models.shape
        (1, 2)
    """
    seed = _validate.integer("seed", seed, minimum=0, maximum=2**32 - 1)
    tasks = arguments.check_run(plan, problem, [seed], agents)
    plans, _, _ = tasks
    if not isinstance(plan, Plan):
        raise ValueError(f"plan is {len(plans)} plans; give one, not a list")
    if agents is not None and plan.config.release:
        raise ValueError(
            f"agents is {_validate.shown(agents)} of a release, whose groups would need a key file "
            "each; give release=False, or leave agents out"
        )
    place = Checkpoint(key_file=key_file)
    checkpoint.check_storage(plans, place)
    if agents is not None:
        agents_part = part(plan, problem, seed, agents)
        functions = _rounds_of_agents(agents_part)
        functions.guarantee = agents_part.guarantee
        return functions
    data, instance, guarantee = _prepared(tasks)
    if plan.config.release:
        storage = _open_release(tasks, data, instance, place)
        # The real key comes last: the file is opened for programs that are hashed already.
        noise_key = storage.noise_keys()[0]
        instance = instance._replace(noise_key=noise_key, mark=_mark(noise_key))
        functions = _functions(plan, data.statics, instance, storage)
    else:
        functions = _functions(plan, data.statics, instance)
    functions.guarantee = guarantee
    return functions


def _prepared(tasks: Tasks) -> tuple[Inputs, "Instance", Guarantee]:
    """The inputs of one plan and one seed, and what their rounds guarantee."""
    plans, problems, seeds = tasks
    arguments.check_device(plans, None)
    data = Inputs.of(plans, problems, seeds)
    # Refuses a release whose numbers are too coarse for its budget.
    (priced,) = data.with_precision_cost(plans, problems)
    release = priced.config.release
    # A release has no key of its own before there is a file for it.
    noise_key = keys.throwaway(1)[0] if release else keys.derive(seeds[0], "noise")
    instance = Instance(
        first_leaves(data.arrays),
        data.data,
        data.batch_keys[0],
        noise_key,
        _mark(noise_key),
        data.start(None, 1),
        jnp.int32(priced.config.rounds),
    )
    return data, instance, priced.guarantee


class Instance(NamedTuple):
    """One plan with one seed: the arguments that all of its programs share.

    The models to start from are stacked over one seed and one plan, as a run has them.
    """

    arrays: Arrays
    data: Data
    batch_key: PRNGKeyArray
    noise_key: PRNGKeyArray
    mark: PRNGKeyArray
    models: Models
    last: Int[Array, ""]

    def __repr__(self) -> str:
        # Tracebacks that show local variables print it.
        return "Instance(...)"


def _open_release(tasks: Tasks, data: Inputs, instance: Instance, place: Checkpoint) -> Storage:
    """Open the key file of a release, which is of its programs under a throwaway key.

    They are traced first: other programs would put the file's noise on other gradients.
    """
    statics = data.statics
    state = _initial(statics, instance)
    outgoing = outgoing_program.trace(statics, instance, state)
    # The state's own secret has the same shapes, of which JAX would shorten float64.
    sent = outgoing.out_info._replace(secret=state.secret)
    received = host.delivered(statics, instance.arrays, sent.message)
    programs = [
        _initial.trace(statics, instance),
        outgoing,
        _incoming.trace(statics, instance, state, sent, received),
        _step.trace(statics, instance, state),
    ]
    values = ((data.models, None), data.arrays, state.memory)
    devices = data.memory.devices
    identity = checkpoint.of_run(tasks, {"driver": "rounds"}, values, programs, devices)
    return Storage(identity, place)


def _functions(
    plan: Plan, statics: Statics, instance: Instance, storage: Storage | None = None
) -> Rounds:
    """The compiled functions of one plan and one seed; a release notes what it may have sent.

    Functions of their own, since a partial's repr would print a release's key and its records. They
    hold the storage, whose lock lasts as long as any of them can send.
    """
    first = _initial.trace(statics, instance).out_info

    def init(stored: State | None = None) -> State:
        if stored is None:
            state = _initial(statics, instance)
        else:
            check_form(stored, first)
            for leaf in jax.tree.leaves(stored.models):
                _validate.finite_array("stored.models", leaf)
            state = stored._replace(secret=_secret_at(statics, instance, stored.round))
        if storage is not None:
            # `Storage.noise_keys` cannot refuse a new key file for all drivers: a loop's state
            # comes later, where that of a run is in its folder.
            storage.check_sent(int(state.round), is_noted=stored is not None)
        return state

    def note(state: State, message: Message, metrics: Metrics) -> None:
        if storage is None:
            return
        is_refused = metrics[NOT_FINITE]
        if isinstance(is_refused, jax.core.Tracer):
            raise ValueError(
                "state is traced in a release, whose key file notes every round; call these "
                "functions as they are, which are compiled"
            )
        done = int(state.round)
        if done >= plan.config.rounds:
            raise ValueError(
                f"state.round is {done}, so all messages are sent; end the loop, or plan another "
                "release and account for both"
            )
        if is_refused:
            raise ValueError(
                "state has a message that is not finite, and nothing goes out: models diverged, "
                "or the secret is of another round or loop. Where models diverged, the loop's end "
                "by this error is an output that no epsilon covers"
            )
        storage.note_sent(done, message)

    def outgoing(state: State) -> Outgoing:
        _check_network(plan)
        check_form(state, first)
        sent = outgoing_program(statics, instance, state)
        note(state, sent.message, sent.metrics)
        return sent

    def incoming(state: State, sent: Outgoing, received: Message) -> State:
        check_form(state, first)
        _check_sent(sent)
        new = _incoming(statics, instance, state, sent, received)
        # The program has checked the form of what was received.
        survivors = statics.method.exchange.min_survivors(statics.agents)
        host.check_opened("received is", received, survivors)
        return new

    def step(state: State) -> _Transition:
        check_form(state, first)
        new, info = _step(statics, instance, state)
        note(state, info.messages, info.metrics)
        return new, info

    return Rounds(init, outgoing, incoming, step)


def check_form(state: State, first: State) -> None:
    """Refuse a state of another form than the first one has.

    Guarantee: a release runs the programs that its key file is of. Other dtypes would compile
    others, whose rounding its guarantee does not cover.
    """
    if not isinstance(state, State):
        raise ValueError(f"state is {type(state).__name__}; give a State of these rounds")
    parts, expected = [(form.models, form.memory, form.round) for form in (state, first)]
    host.check_delivered("state is", parts, expected, "these rounds have")


def _check_sent(sent: Outgoing) -> None:
    if not isinstance(sent, Outgoing):
        raise ValueError(f"sent is {type(sent).__name__}; give what outgoing returned")


def _secret_at(statics: Statics, instance: Instance, done: Array) -> Secret:
    """The secret of one plan and one seed after so many rounds."""
    # A run stacks its states over seeds and plans.
    arrays = jax.tree.map(lambda leaf: leaf[None], instance.arrays)
    secret = program.secret(statics, arrays, instance.models, instance.noise_key[None], done)
    secret = jax.tree.map(lambda leaf: leaf if program.is_counter(leaf) else leaf[0], secret)
    return secret._replace(mark=instance.mark)


def _check_network(plan: Plan) -> None:
    """Refuse a network of the loop's own, where the loss is of the method's own exchange."""
    gradients = plan.config.protect.gradients
    colluders = plan.guarantee.colluders
    if colluders or gradients == "view":
        raise ValueError(
            f"plan has gradients {gradients!r} and colluders={colluders}, whose loss is not that "
            "of any network; call step, which exchanges messages as the plan says, or plan for "
            "'any' gradients and no colluders"
        )


@compiled()
def _initial(statics: Statics, instance: Instance) -> State:
    start = first_leaves(first_leaves(instance.models))
    state = statics.initial(instance.arrays, start, instance.batch_key, instance.noise_key)
    return state._replace(secret=state.secret._replace(mark=instance.mark))


@compiled()
def outgoing_program(statics: Statics, instance: Instance, state: State) -> Outgoing:
    return _rounds(statics, instance).outgoing(state)


@compiled()
def _incoming(
    statics: Statics, instance: Instance, state: State, sent: Outgoing, received: Message
) -> State:
    expected = host.delivered(statics, instance.arrays, sent.message)
    host.check_delivered("received is", received, expected)
    return _rounds(statics, instance).incoming(state, sent, received)


@compiled()
def incoming_of_agents(
    statics: Statics,
    instance: Instance,
    combine: Combine,
    state: State,
    sent: Outgoing,
    received: Message,
) -> State:
    value = combine(state.round, sent.message, received)
    return _rounds(statics, instance).incoming(state, sent, value)


@compiled()
def _step(statics: Statics, instance: Instance, state: State) -> _Transition:
    return _rounds(statics, instance).step(state)


def _rounds(statics: Statics, instance: Instance) -> Rounds:
    """The functions, for states of the instance's mark and rounds up to the last one alone.

    Guarantee: of other states nothing is sent, and models become NaN. Their noise went out already,
    or is that of other agents. Compiled code cannot raise.
    """
    draw = functools.partial(statics.draw, instance.data, instance.batch_key)
    functions = statics.rounds(
        instance.arrays, instance.noise_key, draw, frozen=instance.data.frozen
    )
    survivors = statics.method.exchange.min_survivors(statics.agents)

    def is_valid(state: State, secret: Secret, ahead: int = 0) -> Bool[Array, ""]:
        if not isinstance(secret, Secret):
            raise ValueError("state has no secret; give init(state), which draws it again")
        valid = (secret.mark == instance.mark) & (state.round < instance.last)
        for leaf in jax.tree.leaves(secret):
            if program.is_counter(leaf):
                valid &= leaf == state.round + ahead
        return valid

    def outgoing(state: State) -> Outgoing:
        valid = is_valid(state, state.secret)
        message, carry, metrics, secret = functions.outgoing(state)
        # NaN in the models is not enough: clipping takes gradients that are not finite for 0.
        message, carry, metrics = _blanked(valid, (message, carry, metrics))
        return Outgoing(message, carry, metrics, secret)

    def incoming(state: State, sent: Outgoing, received: Message) -> State:
        valid = is_valid(state, sent.secret, 1)
        if survivors:
            _, present = received
            valid &= (present <= 0) | (present >= survivors)
        new = functions.incoming(state, sent, received)
        return _blanked_state(valid, new)

    def step(state: State) -> _Transition:
        valid = is_valid(state, state.secret)
        new, info = functions.step(state)
        return _blanked_state(valid, new), _blanked(valid, info)

    return Rounds(functions.init, outgoing, incoming, step)


def _blanked(valid: Bool[Array, ""], tree: Tree) -> Tree:
    """The tree where a state is valid; else NaN, in place of whole numbers 0, of flags True."""

    def blanked(leaf: Array) -> Array:
        # A method's memory may hold keys, which are public.
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        is_number = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return jnp.where(valid, leaf, jnp.nan if is_number else leaf.dtype == bool)

    return jax.tree.map(blanked, tree)


def _blanked_state(valid: Bool[Array, ""], state: State) -> State:
    """The state, whose memory is blanked too: methods keep messages there and release them."""
    models, memory = _blanked(valid, (state.models, state.memory))
    return state._replace(models=models, memory=memory)


def _mark(noise_key: PRNGKeyArray, agents: Sequence[int] = ()) -> PRNGKeyArray:
    """What tells states apart that are of other noise, or of other agents."""
    return functools.reduce(fold_in, agents, fold_in(noise_key, _MARK))


class Part(NamedTuple):
    """Some agents' part of a plan: what is compiled, and the arguments of all rounds.

    Attributes:
        statics: Of these agents.
        instance: Their records, rows of W and of the factor; the noise key is a throwaway one.
        first: The state before the first round.
        combine: What they make of received messages.
        senders: For each of them the numbers of the others whose messages it receives.
        guarantee: The plan's.
    """

    statics: Statics
    instance: Instance
    first: State
    combine: Combine
    senders: tuple[tuple[int, ...], ...]
    guarantee: Guarantee

    @property
    def widest(self) -> int:
        """The most senders of one of them."""
        return max(map(len, self.senders))


def part(
    plan: Plan,
    problem: Problem,
    seed: int,
    agents: Sequence[int],
    *,
    encoding: Privatizer | None = None,
) -> Part:
    """Return some agents' part of a plan, from values that hold nothing of the others.

    Guarantee: records, keys, rows of W and of the factor are arguments of the programs, which JAX
    may store on disk for everybody. None is of another agent.

    Args:
        plan: For all agents.
        problem: With the records of all agents, or of these alone, in their order.
        seed: As in `rounds`.
        agents: Their numbers.
        encoding: In place of the noise, of a method whose messages are added up elsewhere: its
            rounds end before the noise, which the caller adds, and begin again with a sum.

    Raises:
        ValueError: For a method, exchange, noise or sampler that needs all agents.
    """
    tasks = arguments.check_run(plan, problem, [seed], agents)
    if encoding is None:
        _check_network(plan)
    members = _validate.agents("agents", agents, maximum=plan.agents - 1)
    senders = tuple(plan.senders[agent] for agent in members)
    method = plan.method
    combine = method.exchange.for_agents(plan.mixing, members, senders)
    if encoding is not None:
        combine = _of_sum
    elif not compatibility.by_agent(method) or combine is None:
        raise ValueError(
            f"agents is {members} for method {method}, whose rounds need all agents; leave agents "
            "out, or give DSGD(gossip_steps=1), Tracking or GradientTracking"
        )
    if not compatibility.packaged(type(plan.sampler)):
        raise ValueError(
            f"agents is {members} for sampler {plan.sampler}, whose rows may depend on the counts "
            "of others; leave agents out, or give a sampler of the package"
        )
    inputs, instance, guarantee = _prepared(tasks)
    statics = inputs.statics
    arrays: Arrays = rows_of(instance.arrays, members)
    # Their rows of W are in what combines messages.
    arrays = {name: array for name, array in arrays.items() if name != "mixing"}
    privatizer = encoding or statics.privatizer
    if encoding is None and privatizer is not None:
        noise = privatizer.for_agents(arrays, members)
        if noise is None:
            raise ValueError(
                f"agents is {members} for noise {plan.config.noise}, which is drawn for all agents "
                "together; leave agents out, or give noise over agents by a factor, such as "
                "Independent or Whisper"
            )
        privatizer, arrays = noise
    numbers = Members(tuple(members), plan.agents)
    statics = statics._replace(agents=len(members), privatizer=privatizer, members=numbers)
    places = members if problem.agents == plan.agents else range(len(members))
    data = _records_of(problem, places)._replace(frozen=instance.data.frozen)
    instance = instance._replace(
        arrays=arrays,
        data=data,
        mark=_mark(instance.noise_key, members),
        models=jax.tree.map(lambda leaf: leaf[:, :, np.array(members)], instance.models),
    )
    first = _initial(statics, instance)
    # From the noise key follow keys of links between others, so rounds do not keep it. Noise takes
    # its keys from the state alone.
    instance = instance._replace(noise_key=keys.throwaway(1)[0])
    if not isinstance(combine, jax.tree_util.Partial):
        combine = jax.tree_util.Partial(combine)
    return Part(statics, instance, first, combine, senders, guarantee)


def _of_sum(round: int | Array, sent: Message, received: Message) -> Message:
    """A sum as it came."""
    return received


def _rounds_of_agents(agents_part: Part) -> Rounds:
    """The functions of some agents of a simulation."""
    statics, instance, first, combine, _, _ = agents_part
    assert statics.members is not None
    members = list(statics.members.numbers)

    def init(stored: State | None = None) -> State:
        if stored is not None:
            raise ValueError(
                f"init has a stored state of agents {members}; leave it out and run their rounds "
                "again from the first, with the same received messages"
            )
        # The caller may donate them.
        return jax.tree.map(jnp.copy, first)

    def outgoing(state: State) -> Outgoing:
        check_form(state, first)
        return outgoing_program(statics, instance, state)

    def incoming(state: State, sent: Outgoing, received: Message) -> State:
        check_form(state, first)
        _check_sent(sent)
        expected = shapes(sent.message, len(members), agents_part.widest)
        host.check_delivered("received is", received, expected)
        return incoming_of_agents(statics, instance, combine, state, sent, received)

    def step(state: State) -> _Transition:
        raise ValueError(
            f"step needs messages of others than agents {members}; call outgoing and incoming"
        )

    return Rounds(init, outgoing, incoming, step)


def _records_of(problem: Problem, agents: Sequence[int]) -> Data:
    """The records of some agents, one agent's after the other's."""
    rows = problem.partition.indices[agents]
    counts = problem.partition.counts[agents]
    first, (places,) = blocks(Partition(rows, counts), 1)
    if problem.local:
        places = np.searchsorted(local(problem.partition), places)
    data = Data(problem.x[places], problem.y[places], rows, counts, (), first)
    return jax.tree.map(jnp.asarray, data)
