"""One round at a time, for a training loop of a user's own: `dpjax.rounds`."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from dpjax import _files, _validate
from dpjax._programs import compiled
from dpjax.data.partition import local
from dpjax.engine import arguments, checkpoint, keys, program
from dpjax.engine.checkpoint import Checkpoint, Storage
from dpjax.engine.inputs import Inputs
from dpjax.engine.step import Data, Info, Members, Outgoing, Rounds, Statics, first_leaves
from dpjax.learning.problem import Problem
from dpjax.plans import compatibility
from dpjax.plans.optimizers import rows_of
from dpjax.plans.plan import Plan
from dpjax.protocols import Arrays, Message, Models, State

__all__ = ["Rounds", "rounds"]


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

    and `Outgoing` has ``message``, leaves [n, ...], and ``metrics``, scalars by name. Send
    ``sent.message`` and nothing else: ``sent.secret`` has the noise key, and ``sent.carry`` is an
    agent's own. ``received``
    is the value of the method's exchange: for D-SGD every agent's average W m of all messages m,
    leaves [n, ...]; for a server the sum without the agents' axis, and the number of clients in it.
    All functions are compiled. They are pure: batch and noise of a round follow from the seed and
    ``state.round``, and the same state gives the same message. Past round T models are NaN.

    Guarantee: the plan's (``plan.guarantee``), for all messages of the T rounds together. The
    guarantees of `dpjax.run`'s result also name custom parts of the problem, and what finite
    precision adds within the budget. It holds where every round sends its message once, or again
    unchanged. Whoever steps one state twice with different ``received`` values sends the noise of
    the next round with two payloads, which no guarantee covers. Metrics are not private.

    A stored state (of all agents) goes on by ``init(stored)``, which draws the secret of its round
    again; with the secret of another round its models are NaN. A key file does not say which rounds
    were sent: a loop that was stopped goes on from its stored state, never from the beginning.

    ``state.secret`` must not be stored or sent: whoever has it subtracts the noise. A simulation
    draws it from the seed. A release draws its noise key from the operating system and keeps it in
    ``key_file``, which serves one plan, problem and seed, and which no other loop may use
    meanwhile. Do not compile `Rounds.init` of a release into a program of your own, which would
    hold the key. Store models, memory and round before a message goes out, and delete the file
    after the last round. A message that is not finite (``metrics["not_finite"]`` of a release) must
    not go out.

    With ``agents=(3,)`` these are the rounds of some agents alone, say of one that has a process of
    its own. All arrays lead with ``len(agents)``. ``received`` has the messages of other agents as
    they were sent, leaves [agents, senders, ...] in the order of ``plan.senders[agent]``; places
    beyond an agent's senders may hold anything. ``step`` raises an error, and metrics are of these
    agents only. The programs hold their records, their rows of W and of the noise's factor, and
    nothing of any other agent. They agree with a run up to rounding, about 1e-6.

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
            method, exchange or noise needs all agents, and for agents of a release.

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
    tasks = arguments.check_run(plan, problem, [seed])
    plans, problems, seeds = tasks
    if not isinstance(plan, Plan):
        raise ValueError(f"plan is {len(plans)} plans; give one, not a list")
    place = Checkpoint(key_file=key_file)
    checkpoint.check_storage(plans, place)
    arguments.check_device(plans, None)
    data = Inputs.of(plans, problems, seeds)
    # Refuses a release whose numbers are too coarse for its budget.
    data.with_precision_cost(plans, problems)
    statics = data.statics
    run = _Run(
        first_leaves(data.arrays),
        data.data,
        data.batch_keys[0],
        # A release has no key of its own before there is a file for it.
        keys.throwaway(1)[0] if plan.config.release else keys.derive(seed, "noise"),
        jnp.int32(plan.config.rounds),
    )
    models = jax.tree.map(lambda leaf: leaf[0, 0], data.start(None, 1))
    if agents is not None:
        return _rounds_of_agents(plan, problem, statics, run, models, agents)
    if not plan.config.release:
        return _functions(statics, run, models)
    # The key file is of these very programs: others would put its noise on other gradients.
    state = _initial(statics, run, models)
    programs = [function.trace(statics, run, state) for function in (_outgoing, _step)]
    values = ((data.models, None), data.arrays, state.memory)
    identity = checkpoint.of_run(tasks, {"driver": "rounds"}, values, programs, data.memory.devices)
    # A stored state goes on with the key of its own noise: another one sends its round twice.
    is_new = not os.path.lexists(key_file or "")
    storage = Storage(identity, place)
    functions = _functions(statics, run._replace(noise_key=storage.noise_keys()[0]), models)
    if is_new:
        functions = functions._replace(init=functools.partial(_begin, functions.init))
    for function in functions:
        # Its lock lasts as long as any of them can be called.
        vars(function)["storage"] = storage
    return functions


def _begin(init: Callable[[], State], stored: State | None = None) -> State:
    """The first state of a release whose key file was made just now."""
    if stored is not None:
        raise ValueError(
            "stored is a state of before, and the key file is new; a release goes on only with "
            "the key file of its own noise, and ends without it"
        )
    return init()


class _Run(NamedTuple):
    """The arguments that all programs of one plan and one seed share."""

    arrays: Arrays
    data: Data
    batch_key: PRNGKeyArray
    noise_key: PRNGKeyArray
    last: Int[Array, ""]


def _functions(statics: Statics, run: _Run, models: Models) -> Rounds:
    """The compiled functions of one plan and one seed.

    Functions of their own, since a partial's repr would print a release's key and its records.
    """

    def init(stored: State | None = None) -> State:
        return _initial(statics, run, models, stored)

    def outgoing(state: State) -> Outgoing:
        return _outgoing(statics, run, state)

    def incoming(state: State, sent: Outgoing, received: Message) -> State:
        return _incoming(statics, run, state, sent, received)

    def step(state: State) -> tuple[State, Info]:
        return _step(statics, run, state)

    return Rounds(init, outgoing, incoming, step)


def _initial(statics: Statics, run: _Run, models: Models, stored: State | None = None) -> State:
    first = _first(statics, run, models)
    if stored is None:
        return first
    if not isinstance(stored, State):
        raise ValueError(f"stored is {type(stored).__name__}; give a State of these rounds")
    # A run stacks its states over seeds and plans.
    stacked = jax.tree.map(lambda leaf: leaf[None], run.arrays)
    models = jax.tree.map(lambda leaf: leaf[None, None], models)
    secret = program.secret(statics, stacked, models, run.noise_key[None], stored.round)
    of_seed = jax.tree.map(lambda leaf: leaf if program.is_counter(leaf) else leaf[0], secret)
    return stored._replace(secret=of_seed)


@compiled()
def _first(statics: Statics, run: _Run, models: Models) -> State:
    return statics.initial(run.arrays, models, run.batch_key, run.noise_key)


@compiled()
def _outgoing(statics: Statics, run: _Run, state: State) -> Outgoing:
    return _rounds(statics, run).outgoing(_planned(run.last, state))


@compiled()
def _incoming(
    statics: Statics, run: _Run, state: State, sent: Outgoing, received: Message
) -> State:
    return _planned(run.last, _rounds(statics, run).incoming(state, sent, received))


@compiled()
def _step(statics: Statics, run: _Run, state: State) -> tuple[State, Info]:
    new, info = _rounds(statics, run).step(_planned(run.last, state))
    return _planned(run.last, new), info


def _rounds(statics: Statics, run: _Run) -> Rounds:
    draw = functools.partial(statics.draw, run.data, run.batch_key)
    return statics.rounds(run.arrays, run.noise_key, draw, frozen=run.data.frozen)


def _planned(last: Int[Array, ""], state: State) -> State:
    """The state, its models NaN past the last round, and where its noise is of another round.

    A stored state with the secret of a new one would send noise that went out already.
    """
    valid = state.round <= last
    for leaf in jax.tree.leaves(state.secret):
        if program.is_counter(leaf):
            valid &= leaf == state.round
    models = jax.tree.map(lambda leaf: jnp.where(valid, leaf, jnp.nan), state.models)
    return state._replace(models=models)


def _rounds_of_agents(
    plan: Plan,
    problem: Problem,
    statics: Statics,
    run: _Run,
    models: Models,
    agents: Sequence[int],
) -> Rounds:
    """The rounds of some agents, from values that hold nothing of the others."""
    if plan.config.release:
        raise ValueError(
            f"agents is {_validate.shown(agents)} of a release, whose groups would need a key file "
            "each; give release=False, or leave agents out"
        )
    members = _validate.agents("agents", agents, maximum=plan.agents - 1)
    if not members or len(set(members)) != len(members):
        raise ValueError(f"agents is {_validate.shown(agents)}; give one or more, each once")
    senders = [plan.senders[agent] for agent in members]
    method = plan.method
    combine = method.exchange.for_agents(plan.mixing, members, senders)
    if not compatibility.by_agent(method) or combine is None:
        raise ValueError(
            f"agents is {members} for method {method}, whose rounds need all agents; leave agents "
            "out, or give DSGD(gossip_steps=1), Tracking or GradientTracking"
        )
    arrays: Arrays = rows_of(run.arrays, members)
    # Their rows of W are in what combines messages.
    arrays = {name: array for name, array in arrays.items() if name != "mixing"}
    privatizer = statics.privatizer
    if privatizer is not None:
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
    data = _records_of(problem, members)._replace(frozen=run.data.frozen)
    start = jax.tree.map(lambda leaf: leaf[np.array(members)], models)
    # Once and outside of any program: keys of other links follow from the noise key, and none of
    # them may enter one.
    added = statics.transformation(arrays, run.noise_key)
    first = statics.initial(arrays, start, run.batch_key, run.noise_key, added)
    draw = functools.partial(statics.draw, data, run.batch_key)
    functions = statics.rounds(
        arrays, run.noise_key, draw, frozen=data.frozen, transformation=added
    )
    # The functions below must not keep the run, which has the others' records and keys.
    last = run.last

    def init(stored: State | None = None) -> State:
        if stored is not None:
            raise ValueError(
                f"init has a stored state of agents {members}; leave it out and run their rounds "
                "again from the first, with the same received messages"
            )
        return first

    def incoming(state: State, sent: Outgoing, received: Message) -> State:
        value = combine(state.round, sent.message, received)
        return _planned(last, functions.incoming(state, sent, value))

    def step(state: State) -> tuple[State, Info]:
        raise ValueError(
            f"step needs messages of others than agents {members}; call outgoing and incoming"
        )

    def outgoing(state: State) -> Outgoing:
        return functions.outgoing(_planned(last, state))

    return Rounds(init, jax.jit(outgoing), jax.jit(incoming), step)


def _records_of(problem: Problem, agents: Sequence[int]) -> Data:
    """The records of some agents, one agent's after the other's."""
    partition = problem.partition
    indices = np.asarray(partition.indices)[agents]
    counts = np.asarray(partition.counts)[agents]
    # Behind an agent's records its row is padded.
    places = indices[np.arange(indices.shape[1]) < counts[:, None]]
    if problem.local:
        places = np.searchsorted(local(partition), places)
    first = np.cumsum(counts) - counts
    data = Data(problem.x[places], problem.y[places], indices, counts, (), first)
    return jax.tree.map(jnp.asarray, data)
