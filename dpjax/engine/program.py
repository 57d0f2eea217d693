"""The compiled part of a run: rounds under scan, seeds and plans under vmap.

One call advances every (seed, plan) pair by one chunk. Batches and the secret slot depend on the
seed alone, so plans that differ in design, budget or step size share raw normals: their results are
paired, and the work is done once. That is sound in a simulation only; releases run one plan and one
seed.

The treatment of a leaf of a stacked state follows from its slot. Models and memory are [S, V, ...].
The secret is [S, ...], since all plans of a seed share it. All runs share one number of rounds.
Within the secret the type decides, as `dpjax.protocols.Privatizer.transformation` says: an integer
scalar counts rounds, and runs share it; a key is a key, and all else is past noise.

Functions that take `Statics` get the parts that all runs of a call share. A program is compiled for
each value of it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dpjax import _validate
from dpjax._agents import AGENTS
from dpjax._numerics import THREEFRY
from dpjax._programs import compiled
from dpjax.engine.processes import place, without_padding
from dpjax.engine.step import LOST, NOT_FINITE, Data, Metrics, Rounds, Secret, Statics, first_leaves
from dpjax.protocols import Arrays, Models, PublicState, State, Tree

__all__ = ()

_Axes: TypeAlias = Tree
"""Which axes of leaves to map over, 0 or None, as `jax.vmap` takes them."""

_Measured: TypeAlias = tuple[State, Metrics]
"""A state, and the metrics of the rounds before it."""

_TRACES = [0]


def traces() -> int:
    """The number of traces of `advance` in this process."""
    return _TRACES[0]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Blocks:
    """The rounds of a call, as part of its program: a static leaf of its arguments.

    Attributes:
        count: Blocks of equal length.
        length: Their rounds, after which metrics are taken.
        tail: Rounds of a last, shorter block; 0 is none.
    """

    count: int
    length: int
    tail: int = 0

    @property
    def lengths(self) -> Int[np.ndarray, " e"]:
        """The rounds of each block, as data: then blocks of all lengths are one program."""
        lengths = [self.length] * self.count
        if self.tail:
            lengths.append(self.tail)
        return np.array(lengths, np.int32)


def is_counter(leaf: Array) -> bool:
    """Whether a leaf of the secret slot counts rounds, as all runs of a call do together."""
    return jnp.ndim(leaf) == 0 and jnp.issubdtype(leaf.dtype, jnp.integer)


def at_round(state: State, done: int) -> State:
    """The state with every counter at a number of rounds; each in a buffer that may be consumed.

    Args:
        state: Stacked.
        done: The number.
    """

    def counted(leaf: Array) -> Array:
        return jnp.array(done, leaf.dtype, copy=True) if is_counter(leaf) else leaf

    return state._replace(secret=jax.tree.map(counted, state.secret), round=counted(state.round))


def keeps_noise(state: State) -> bool:
    """Whether later rounds depend on noise of earlier ones, which the secret slot keeps."""
    return any(
        not (jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) or is_counter(leaf))
        for leaf in jax.tree.leaves(state.secret)
    )


def _secret_axes(secret: Tree) -> _Axes:
    """The axes of seeds in a stacked secret, or in its noise; None for counters, which all share.

    All plans of a seed share its key and its noise before the factor over agents. What one plan's
    arrays decided there would be that of the first plan for all: see `Privatizer.transformation`.
    """
    return jax.tree.map(lambda leaf: None if is_counter(leaf) else 0, secret)


_PLAN_AXES = State._make([0, 0, None, None])
"""The axes of plans in a stacked state, whose secret they share."""


def _seed_axes(state: State) -> _Axes:
    """The axes of seeds in a stacked state."""
    return _PLAN_AXES._replace(secret=_secret_axes(state.secret))


def _vmap_or_loop(
    sequential: bool, function: Callable[..., Tree], in_axes: _Axes, out_axes: _Axes, *values: Tree
) -> Tree:
    """`jax.vmap` of a function of one seed (or one plan), or the same as a loop.

    An axis is 0 or None, which is a value that all share. With the axes ``(0, None)`` and the
    values ``([1, 2], 5)`` the loop maps over ``([1, 2], None)``, and each call puts the 5 where it
    finds None. Frozen leaves of a model are None, too, in the values: they stay so.
    """
    if not sequential:
        return jax.vmap(function, in_axes=in_axes, out_axes=out_axes)(*values)
    mapped = _replace_shared(lambda leaf: None, in_axes, values)

    def body(item: Tree) -> Tree:
        # What is not mapped enters the loop's body as it is: a constant of the loop.
        arguments = jax.tree.map(
            lambda part, leaf: leaf if part is None else part, item, values, is_leaf=_is_none
        )
        return function(*arguments)

    return _replace_shared(lambda leaf: leaf[0], out_axes, jax.lax.map(body, mapped))


def _is_none(part: Tree) -> bool:
    """Whether it marks unmapped axes or frozen leaves."""
    return part is None


def _replace_shared(function: Callable[[Array], Tree], axes: _Axes, tree: Tree) -> Tree:
    """The tree with a function of the leaves that runs share: their axis, of a prefix, is None."""

    def replaced(axis: int | None, part: Tree) -> Tree:
        return jax.tree.map(function, part) if axis is None else part

    return jax.tree.map(replaced, axes, tree, is_leaf=_is_none)


class RunInputs(NamedTuple):
    """What all runs of a call read, stacked.

    Attributes:
        arrays: Stacked over V plans.
        data: The problem's data.
        state: As from `initial`.
        batch_keys: [S] keys of the batches.
        noise_keys: [S] keys of the noise.
    """

    arrays: Arrays
    data: Data
    state: State
    batch_keys: PRNGKeyArray
    noise_keys: PRNGKeyArray


def each_run(
    statics: Statics,
    function: Callable[..., Tree],
    inputs: RunInputs,
    *others: Tree,
    axes: Callable[[State], tuple[_Axes, _Axes]],
) -> Tree:
    """Call ``function(rounds, state, *others)`` for every seed and plan.

    Args:
        statics: Of the runs.
        function: Of the rounds of one run.
        inputs: Of all runs.
        others: More arguments.
        axes: ``axes(of_state)`` returns the axes of the others and of the results, over plans or
            over seeds, from those of the state.
    """
    arrays, data, state, batch_keys, noise_keys = inputs
    seeds = _seed_axes(state)
    plans_in, plans_out = axes(_PLAN_AXES)
    seeds_in, seeds_out = axes(seeds)
    sequential = statics.sequential
    # Over devices, JAX has no gradient of a convolution whose kernels are mapped, images not.
    plan_by_plan = sequential or statics.mesh is not None

    def of_seed(
        state: State, batch_key: PRNGKeyArray, noise_key: PRNGKeyArray, data: Data, *others: Tree
    ) -> Tree:
        # Once for all plans, which may run one after the other.
        drawn = statics.draw(data, batch_key, state)

        def of_plan(state: State, arrays: Arrays, *others: Tree) -> Tree:
            rounds = statics.rounds(arrays, noise_key, lambda _: drawn, frozen=data.frozen)
            return function(rounds, state, *others)

        in_axes = (_PLAN_AXES, 0, *plans_in)
        return _vmap_or_loop(plan_by_plan, of_plan, in_axes, plans_out, state, arrays, *others)

    in_axes = (seeds, 0, 0, statics.data_axes, *seeds_in)
    return _vmap_or_loop(
        sequential, of_seed, in_axes, seeds_out, state, batch_keys, noise_keys, data, *others
    )


@compiled()
def initial(
    statics: Statics,
    arrays: Arrays,
    models: Models,
    batch_keys: PRNGKeyArray,
    noise_keys: PRNGKeyArray,
) -> State:
    """Build the stacked initial state.

    Args:
        statics: Of the runs.
        arrays: Stacked over V plans.
        models: Models to start from, leaves [S, V, n, ...].
        batch_keys: [S] keys of the batches, of which the methods' public ones are made.
        noise_keys: [S] noise keys.

    Returns:
        The state: models and memory [S, V, ...], the secret [S, ...], counters [].
    """
    arrays, models = without_padding((arrays, models))
    first_models = first_leaves(first_leaves(models))
    # Shapes say which leaves of the secret all plans of a seed share.
    shapes = statics.template(arrays, first_models, noise_keys[0])

    def of_seed(models: Models, batch_key: PRNGKeyArray, noise_key: PRNGKeyArray) -> State:
        def of_plan(arrays: Arrays, models: Models) -> State:
            return statics.initial(arrays, models, batch_key, noise_key)

        return jax.vmap(of_plan, out_axes=_PLAN_AXES)(arrays, models)

    axes = _seed_axes(shapes)
    return _over_devices(statics, jax.vmap(of_seed, out_axes=axes)(models, batch_keys, noise_keys))


def _over_devices(statics: Statics, state: State) -> State:
    """A stacked state as it is between calls: what agents hold is on their devices."""
    mesh = statics.mesh
    if mesh is None:
        return state
    n = statics.agents
    models, memory = place((state.models, state.memory), mesh, 2, n)
    return State(models, memory, place(state.secret, mesh, 1, n), state.round)


@compiled(static=2)
def final_models(statics: Statics, private: bool, state: State) -> Models:
    """Models after a run, leaves [S, V, ...].

    Args:
        statics: Of the runs.
        private: False for models that may be published, functions of messages alone. True for the
            measured models, which agents keep.
        state: Stacked as from `initial`.
    """
    method = statics.method
    models = _read(method.measured if private else method.released, without_padding(state))
    return place(models, statics.mesh, 2, statics.agents)


@compiled()
def secret(
    statics: Statics,
    arrays: Arrays,
    models: Models,
    noise_keys: PRNGKeyArray,
    rounds: Int[Array, ""] | None = None,
) -> Secret:
    """The secret slot of the stacked state under the noise of other keys.

    Args:
        statics: Of the runs.
        arrays: Stacked over V plans.
        models: Leaves [S, V, n, ...], whose shapes alone are read.
        noise_keys: [S] noise keys.
        rounds: Rounds done, whose noise is drawn again; None before the first one.
    """
    batch_keys = jax.vmap(statics.secret_batch_key)(noise_keys)
    if statics.privatizer is None:
        return Secret((), batch_keys)
    arrays, models = without_padding((arrays, models))
    first_plan = first_leaves(arrays)
    payload = statics.method.payload(first_leaves(first_leaves(models)))
    # Neither noise nor its state depends on the payload that it is added to.
    payload = jax.tree.map(jnp.zeros_like, payload)

    def initial_noise(key: PRNGKeyArray) -> Tree:
        return statics.transformation(first_plan, key).init(payload)

    def after_round(key: PRNGKeyArray, past: Tree) -> Tree:
        # Noise depends on no public key, so any will do, but not a secret one: a part of a user's
        # own may show its public key.
        public_key = jax.random.key(0, impl=THREEFRY)
        _, noise = statics.transformation(first_plan, key).update(payload, past, key=public_key)
        return noise

    axes = _secret_axes(jax.eval_shape(initial_noise, noise_keys[0]))

    # Mapped inside the loop, as rounds are: compilers add the terms of a product in an order that
    # depends on its shape, and a loop that is mapped would lose the float64 of a release.
    def after_rounds(_: Array, past: Tree) -> Tree:
        return _vmap_or_loop(statics.sequential, after_round, (0, axes), axes, noise_keys, past)

    noise = _vmap_or_loop(statics.sequential, initial_noise, (0,), axes, noise_keys)
    if rounds is not None:
        noise = jax.lax.fori_loop(0, rounds, after_rounds, noise)
    return Secret(place(noise, statics.mesh, 1, statics.agents), batch_keys)


@compiled(donate_argnames="state")
def advance(
    statics: Statics,
    arrays: Arrays,
    data: Data,
    state: State,
    batch_keys: PRNGKeyArray,
    noise_keys: PRNGKeyArray,
    blocks: Blocks | Int[Array, " e"],
) -> _Measured:
    """Advance all runs by the rounds of all blocks.

    Args:
        statics: Of the runs.
        arrays: Stacked over V plans.
        data: The problem's data.
        state: From `initial` or an earlier call; its buffers are reused.
        batch_keys: [S] keys of the batches.
        noise_keys: [S] keys of the noise (the secret slot holds them too).
        blocks: Rounds of each block, after which metrics are taken. `Blocks` are part of the
            program. Their ``lengths`` are data: blocks of all lengths are then one loop, compiled
            once.

    Returns:
        The new state and the metrics, each [blocks, S, V].
    """
    # This runs while the function is traced, and never after.
    _TRACES[0] += 1
    arrays, data, state = without_padding((arrays, data, state))

    def round_of_run(rounds: Rounds, state: State) -> _Measured:
        state, info = rounds.step(state)
        return state, reported(statics, info.metrics)

    def one_round(_: Array, carry: _Measured) -> _Measured:
        state, sums = carry
        inputs = RunInputs(arrays, data, state, batch_keys, noise_keys)
        state, new = each_run(
            statics, round_of_run, inputs, axes=lambda of_state: ((), (of_state, 0))
        )
        if statics.mesh is not None:
            # Models stay with their agents: XLA may choose to copy them to all devices.
            over_agents = NamedSharding(statics.mesh, PartitionSpec(None, None, AGENTS))
            models = jax.lax.with_sharding_constraint(state.models, over_agents)
            state = state._replace(models=models)
        return state, joined(sums, new)

    def block(state: State, length: Array | int) -> _Measured:
        sums = zeros(statics, state)
        state, sums = jax.lax.fori_loop(0, length, one_round, (state, sums))
        return state, block_metrics(statics, data, state, sums, length)

    if isinstance(blocks, Blocks):
        state, measured = jax.lax.scan(
            lambda state, _: block(state, blocks.length), state, None, length=blocks.count
        )
        if blocks.tail:
            state, last = block(state, blocks.tail)
            measured = jax.tree.map(
                lambda values, value: jnp.concatenate([values, value[None]]), measured, last
            )
    else:
        state, measured = jax.lax.scan(block, state, blocks)
    return _over_devices(statics, state), measured


def _consensus(models: Models) -> Float[Array, ""]:
    """Mean squared distance of the agents' models from their average."""
    leaves = [leaf - jnp.mean(leaf, axis=0, keepdims=True) for leaf in jax.tree.leaves(models)]
    return sum(jnp.sum(jnp.square(leaf)) for leaf in leaves) / leaves[0].shape[0]


def reported(statics: Statics, metrics: Metrics) -> Metrics:
    """The round's metrics that a run reports, float32; nan for missing ones.

    Args:
        statics: Its ``reports`` are the names.
        metrics: Of one round.
    """
    # A loop carries one structure, whatever a round reports.
    return {name: jnp.asarray(metrics.get(name, jnp.nan), jnp.float32) for name in statics.reports}


def joined(sums: Metrics, new: Metrics) -> Metrics:
    """Add a round's metrics to the sums of its block; of lost noise the largest share counts.

    Args:
        sums: Sums of the earlier rounds.
        new: Metrics of the round, from `reported`.
    """
    return {
        name: (jnp.maximum if name == LOST else jnp.add)(sums[name], value)
        for name, value in new.items()
    }


def zeros(statics: Statics, state: State) -> Metrics:
    """Sums of a block's metrics before its first round, name -> [S, V].

    Args:
        statics: Its ``reports`` are the names.
        state: Stacked.
    """
    shape = jax.tree.leaves(state.models)[0].shape[:2]
    return {name: jnp.zeros(shape, jnp.float32) for name in statics.reports}


def block_metrics(
    statics: Statics, data: Data, state: State, sums: Metrics, length: Array | int
) -> Metrics:
    """Metrics after a block, name -> [S, V].

    Args:
        statics: Of the runs.
        data: The problem's data.
        state: Stacked, after the block.
        sums: The rounds' own metrics, `joined` over the block.
        length: Rounds of the block.
    """
    metrics = _measures(statics, data)

    def measure(item: tuple[Models, ...]) -> Metrics:
        models, *evaluations = item
        (evaluation,) = evaluations or (data.evaluation,)
        values = jax.vmap(lambda model: metrics(model, evaluation))(models)
        return {**values, "consensus": jax.vmap(_consensus)(models)}

    per_seed = (data.evaluation,) if statics.data_per_seed else ()
    # Seeds run one after the other, which bounds the memory of the evaluation.
    values = jax.lax.map(measure, (_read(statics.method.measured, state), *per_seed))
    # Compilers multiply by the inverse of a constant, and the length may be constant or not.
    length = jax.lax.optimization_barrier(jnp.asarray(length, jnp.float32))
    means = {name: value if name == LOST else value / length for name, value in sums.items()}
    return {**values, **means}


def _read(function: Callable[[PublicState], Models], state: State) -> Models:
    """What a function reads of the state of every run, leaves [S, V, ...]."""
    return jax.vmap(jax.vmap(function))(PublicState(state.models, state.memory))


def _measures(statics: Statics, data: Data) -> Callable[[Models, Tree], Metrics]:
    """The metrics of models that lack frozen leaves."""
    if data.frozen is None:
        return statics.metrics
    return functools.partial(statics.metrics, frozen=data.frozen)


@compiled()
def _of_round(
    statics: Statics, arrays: Arrays, data: Data, models: Models, key: PRNGKeyArray
) -> Metrics:
    """The reports of a round; traced once for all runs of a kind, and never run."""
    arrays, data = without_padding((arrays, data))
    return dict(statics.first_round(first_leaves(arrays), data, models, key).metrics)


def with_reports(
    statics: Statics, arrays: Arrays, data: Data, models: Models, key: PRNGKeyArray
) -> tuple[Statics, tuple[str, ...]]:
    """The statics with the names of a round's reports, and all metrics that `advance` returns.

    Neither traces `advance`. Reports of the query come first, then those of the method.

    Args:
        statics: Of the runs.
        arrays: Stacked over V plans.
        data: The problem's data.
        models: Shapes of the models, leaves [n, ...].
        key: Any key.

    Raises:
        ValueError: For metrics that are no numbers by name, and names that occur twice.
    """
    reports = _of_round.trace(statics, arrays, data, models, key).out_info
    of_query = [name for name in statics.query.metrics if name in reports]
    names = (*of_query, *sorted(set(reports) - set(of_query)))
    statics = statics._replace(reports=names)
    state = statics.template(without_padding(arrays), models, key)
    models = jax.eval_shape(statics.method.measured, PublicState(state.models, state.memory))
    evaluation = statics.of_first_seed(data).evaluation
    shapes = jax.eval_shape(_measures(statics, data), models, evaluation)
    named = isinstance(shapes, dict) and all(isinstance(name, str) for name in shapes)
    for value in shapes.values() if named else [None]:
        if getattr(value, "shape", None) != () or jnp.iscomplexobj(value):
            raise ValueError(
                f"metrics returns {_validate.shown(shapes)}; return a dict of real scalars by name"
            )
    repeated = sorted({*shapes, "consensus"} & set(names))
    if repeated:
        raise ValueError(
            f"method reports {repeated}, as the problem or the engine does; rename them"
        )
    return statics, (*shapes, "consensus", *(name for name in names if name != NOT_FINITE))
