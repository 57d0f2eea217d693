"""The compiled part of a run: rounds under scan, seeds and plans under vmap.

One call advances every (seed, plan) pair by one chunk. Batches and the secret slot depend on the
seed alone, so plans that differ in design, budget or step size share raw normals: their results are
paired, and the work is done once. That is sound in a simulation only; releases run one plan and one
seed. What is done with a leaf of the state follows from its slot, never from its type.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dpjax._threefry import fold_in
from dpjax.engine import rounds as rounds_
from dpjax.engine.sharding import AXIS
from dpjax.plans.query import AgentQuery, Drawn, Passes, RecordQuery
from dpjax.protocols import Algorithm, Method, Optimizer, Privatizer, Query, Sampler, Seen, State

__all__: list[str] = []


class Statics(NamedTuple):
    """What is static: one compilation for each value (and chunk length).

    ``sequential`` loops over seeds and plans within a round in place of a vmap: per-record
    gradients of many runs at once leave a CPU's caches, and are slower there by ten times.
    ``privatizer`` is None where no plan has noise, which then is not drawn. ``own_data`` is True
    where every seed has data of its own. ``capacity`` is how many records the query gathers
    at a time; None where it is given the batch. ``reports`` are names of what a round reports.
    """

    agents: int
    method: Method
    query: AgentQuery | RecordQuery | Passes
    sampler: Sampler
    optimizer: Optimizer
    divisor: float
    privatizer: Privatizer | None
    metrics: Callable[..., dict[str, Any]]
    mesh: Mesh | None = None
    sequential: bool = False
    own_data: bool = False
    capacity: int | None = None
    reports: tuple[str, ...] = ()


class Data(NamedTuple):
    """Training data over agents, and what the metrics read; with ``own_data`` stacked by seed.

    ``frozen`` are the public values of leaves that are not trained, once for all agents, plans and
    seeds; None where all are trained.
    """

    x: Any
    y: Any
    indices: Int[Array, "n m"]
    counts: Int[Array, " n"]
    evaluation: Any
    frozen: Any = None


_INSIDE = "promise_in_bounds"
# Above every number of a round.
_BATCHES = 2**32 - 1
_TRACES: list[Statics] = []


def traces() -> int:
    """How often `advance` has been traced in this process."""
    return len(_TRACES)


def asked(statics: Statics, frozen: Any) -> Query:
    """The query of models that lack frozen leaves.

    Args:
        statics: What is static.
        frozen: `Data.frozen`.
    """
    return statics.query if frozen is None else statics.query.merging(frozen)


def algorithm(
    statics: Statics, arrays: Any, noise_key: PRNGKeyArray, frozen: Any = None
) -> Algorithm:
    """Join the parts of a run for one plan.

    Args:
        statics: What is static.
        arrays: One plan's arrays, traced or not.
        noise_key: The seed's noise key.
        frozen: `Data.frozen`.

    Returns:
        The algorithm.
    """
    return rounds_.compose(statics.method, arrays, **_parts(statics, arrays, noise_key, frozen))


def halves(
    statics: Statics, arrays: Any, noise_key: PRNGKeyArray, frozen: Any = None
) -> rounds_.Halves:
    """`algorithm`, cut where a round crosses the network.

    Args:
        statics: What is static.
        arrays: One plan's arrays, traced or not.
        noise_key: The seed's noise key.
        frozen: `Data.frozen`.
    """
    return rounds_.halves(statics.method, arrays, **_parts(statics, arrays, noise_key, frozen))


def _parts(statics: Statics, arrays: Any, noise_key: PRNGKeyArray, frozen: Any) -> dict[str, Any]:
    return {
        "query": asked(statics, frozen),
        "privatizer": _privatizer(statics, arrays, noise_key),
        "optimizer": statics.optimizer.chain(arrays),
        "divisor": statics.divisor,
    }


def _privatizer(
    statics: Statics, arrays: Any, noise_key: PRNGKeyArray
) -> optax.GradientTransformation | None:
    if statics.privatizer is None:
        return None
    return statics.privatizer.transformation(arrays, noise_key)


def is_counter(leaf: Any) -> bool:
    """Whether a leaf of the secret slot counts rounds, as all runs of a call do together.

    Args:
        leaf: Of one plan and one seed, or of them all, which share it.
    """
    return jnp.ndim(leaf) == 0 and jnp.issubdtype(leaf.dtype, jnp.integer)


def _axes(state: State, over: str) -> Any:
    """Where the plans (or seeds) are in a stacked state; None where they share one value."""

    def shared(leaf: Any) -> Any:
        # Key and noise before the factor over agents are a seed's; all its plans share them.
        return 0 if over == "seeds" and not is_counter(leaf) else None

    models, memory = jax.tree.map(lambda _: 0, (state.models, state.memory))
    axes: Any = state
    secret = jax.tree.map(shared, state.secret)
    return axes._replace(models=models, memory=memory, secret=secret, round=None)


def _template(statics: Statics, arrays: Any, models: Any, key: PRNGKeyArray) -> State:
    """Structure of the state of one plan and one seed."""
    one = jax.tree.map(lambda leaf: leaf[0], arrays)
    return jax.eval_shape(lambda p, k: algorithm(statics, one, k).init(p), models, key)


@functools.partial(jax.jit, static_argnames="statics")
def initial(statics: Statics, arrays: Any, models: Any, noise_keys: PRNGKeyArray) -> State:
    """Build the stacked initial state.

    Args:
        statics: What is static.
        arrays: Stacked over V plans.
        models: Models to start from, leaves [S, V, n, ...].
        noise_keys: [S] noise keys.

    Returns:
        The state: models and memory [S, V, ...], the secret [S, ...], counters [].
    """

    def of_seed(models: Any, key: PRNGKeyArray) -> State:
        one = jax.tree.map(lambda leaf: leaf[0], models)
        axes = _axes(_template(statics, arrays, one, key), "plans")

        def of_plan(arrays: Any, models: Any) -> State:
            return algorithm(statics, arrays, key).init(models)

        return jax.vmap(of_plan, out_axes=axes)(arrays, models)

    one = jax.tree.map(lambda leaf: leaf[0, 0], models)
    axes = _axes(_template(statics, arrays, one, noise_keys[0]), "seeds")
    return jax.vmap(of_seed, out_axes=axes)(models, noise_keys)


def _vmap_over(function: Any, axes: State, state: State, *others: Any) -> Any:
    """Map ``function(state, *others) -> (state, info)``; shared leaves of the state stay so."""
    zeros = (0,) * len(others)
    return jax.vmap(function, in_axes=(axes, *zeros), out_axes=(axes, 0))(state, *others)


def _loop_over(function: Any, axes: State, state: State, *others: Any) -> Any:
    """`_vmap_over` as a loop."""
    leaves, structure = jax.tree.flatten(state)
    # Not by leaves: None is a shared value's axis, and the place of a frozen leaf.
    mapped = jax.tree.leaves(jax.tree.map(lambda _, axis: axis == 0, state, axes))

    def body(item: Any) -> Any:
        own, rest = item
        own = iter(own)
        full = [next(own) if is_own else leaf for leaf, is_own in zip(leaves, mapped, strict=True)]
        new, info = function(jax.tree.unflatten(structure, full), *rest)
        return jax.tree.leaves(new), info

    own = [leaf for leaf, is_own in zip(leaves, mapped, strict=True) if is_own]
    stacked, info = jax.lax.map(body, (own, others))
    new = [leaf if is_own else leaf[0] for leaf, is_own in zip(stacked, mapped, strict=True)]
    return jax.tree.unflatten(structure, new), info


def _one(own: Sequence[Data], shared: Data | None) -> Data:
    """A seed's own data, or that of all."""
    (chosen,) = own or (shared,)
    assert chosen is not None
    return chosen


def _batch(statics: Statics, data: Data, key: PRNGKeyArray, round: Any) -> Any:
    """Every agent's records of a round, and which places are padding (None: none is)."""
    drawn = statics.sampler.draw(key, round, data.counts)
    # Positions are below counts and the problem has checked its indices: no bounds to test.
    rows = jnp.take_along_axis(data.indices, drawn.rows, axis=1, mode=_INSIDE)
    if statics.capacity is not None:
        assert drawn.padding is not None
        return Drawn(data.x, data.y, rows, drawn.padding)
    return *(part.at[rows].get(mode=_INSIDE) for part in (data.x, data.y)), drawn.padding


def batch(
    statics: Statics, data: Data, batch_key: PRNGKeyArray, noise_key: PRNGKeyArray, round: Any
) -> Any:
    """Every agent's records of a round of one seed.

    Args:
        statics: What is static.
        data: The seed's data.
        batch_key: Its key of the batches.
        noise_key: Its key of the noise.
        round: Rounds done before.
    """
    key = fold_in(batch_key, round)
    if statics.capacity is not None:
        # Amplified by secret batches: their key is a part of the noise key, which draws
        # noise under the numbers of rounds alone.
        key = fold_in(fold_in(noise_key, _BATCHES), round)
    return _batch(statics, data, key, round)


def batch_shapes(statics: Statics, data: Data, batch_keys: PRNGKeyArray) -> Any:
    """Shapes of the batch of every agent in a round.

    Args:
        statics: What is static.
        data: The problem's data.
        batch_keys: [S] keys of the batches.
    """
    return jax.eval_shape(
        lambda data, key: _batch(statics, data, key, jnp.int32(0)),
        first(statics, data),
        batch_keys[0],
    )


def _consensus(models: Any) -> Float[Array, ""]:
    """Mean squared distance of the agents' models from their average."""
    leaves = [leaf - jnp.mean(leaf, axis=0) for leaf in jax.tree.leaves(models)]
    return sum(jnp.sum(jnp.square(leaf)) for leaf in leaves) / leaves[0].shape[0]


def reported(statics: Statics, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The round's metrics that a run reports, float32; nan where there is none by that name.

    Args:
        statics: What is static.
        metrics: Of one round.
    """
    return {name: jnp.asarray(metrics.get(name, jnp.nan), jnp.float32) for name in statics.reports}


def reports(statics: Statics, arrays: Any, data: Data, models: Any, key: PRNGKeyArray) -> list[str]:
    """Names of what a round reports: the query's, then a method's own.

    Args:
        statics: What is static.
        arrays: Stacked over V plans.
        data: The problem's data.
        models: Shapes of the models, leaves [n, ...].
        key: Any key.

    Raises:
        ValueError: For a metric that is no scalar.
    """

    def of_round(arrays: Any, data: Data, models: Any, key: PRNGKeyArray) -> Any:
        one = jax.tree.map(lambda leaf: leaf[0], arrays)
        cut = halves(statics, one, key, data.frozen)
        state = cut.init(models)
        drawn = batch(statics, first(statics, data), key, key, state.round)
        return dict(cut.outgoing(key, state, drawn).metrics)

    found = jax.eval_shape(of_round, arrays, data, models, key)
    for name, leaf in found.items():
        if leaf.shape:
            raise ValueError(
                f"method reports {name!r} of shape {leaf.shape}; give a scalar, over all agents"
            )
    known = statics.query.metrics
    return [*known, *sorted(set(found) - set(known))]


def measured(
    statics: Statics, data: Data, state: State, sums: dict[str, Any], length: int
) -> dict[str, Any]:
    """Metrics after a block, name -> [S, V].

    Args:
        statics: What is static.
        data: The problem's data.
        state: Stacked, after the block.
        sums: The rounds' own metrics, added up over the block.
        length: Rounds of the block.
    """
    metrics, data = _measures(statics, data.frozen), data._replace(frozen=None)
    shared, owned = (None, (data,)) if statics.own_data else (data, ())

    def measure(item: Any) -> dict[str, Any]:
        models, *own = item
        evaluation = _one(own, shared).evaluation
        taken = jax.vmap(lambda p: metrics(p, evaluation))(models)
        return taken | {"consensus": jax.vmap(_consensus)(models)}

    # One seed after the other bounds the memory of the evaluation.
    taken = jax.lax.map(measure, (state.models, *owned))
    return taken | {name: value / length for name, value in sums.items()}


def first(statics: Statics, data: Data) -> Data:
    """The data of the first seed.

    Args:
        statics: What is static.
        data: The problem's data.
    """
    if not statics.own_data:
        return data
    own = jax.tree.map(lambda leaf: leaf[0], data._replace(frozen=None))
    return own._replace(frozen=data.frozen)


def _measures(statics: Statics, frozen: Any) -> Callable[[Any, Any], dict[str, Any]]:
    """The metrics of models that lack frozen leaves."""
    if frozen is None:
        return statics.metrics
    return functools.partial(statics.metrics, frozen=frozen)


def metric_names(statics: Statics, data: Data, state: State) -> list[str]:
    """Names of the metrics `advance` returns, without tracing it."""
    one = jax.tree.map(lambda leaf: leaf[0, 0], state.models)
    metrics = _measures(statics, data.frozen)
    names = [*jax.eval_shape(metrics, one, first(statics, data).evaluation), "consensus"]
    if taken := set(names) & set(statics.reports):
        raise ValueError(
            f"method reports {sorted(taken)}, which the problem's metrics are called, or the "
            "engine's; name them otherwise"
        )
    return [*names, *statics.reports]


@functools.partial(jax.jit, static_argnames="statics")
def released(statics: Statics, state: State) -> Any:
    """What may be published of a state, leaves [S, V, ...]: functions of messages alone.

    Args:
        statics: What is static.
        state: Stacked as from `initial`.
    """

    def one(models: Any, memory: Any) -> Any:
        return statics.method.released(Seen(models, memory))

    return jax.vmap(jax.vmap(one))(state.models, state.memory)


def keeps_noise(state: State) -> bool:
    """Whether later rounds depend on noise of earlier ones, which the secret slot keeps.

    Args:
        state: A state, stacked or not.
    """
    return any(
        not (jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) or is_counter(leaf))
        for leaf in jax.tree.leaves(state.secret)
    )


@functools.partial(jax.jit, static_argnames="statics")
def replay(
    statics: Statics,
    arrays: Any,
    state: State,
    noise_keys: PRNGKeyArray,
    rounds: Int[Array, ""],
) -> State:
    """Draw the noise of the first rounds again, which later rounds depend on.

    Args:
        statics: What is static, with a privatizer.
        arrays: Stacked over V plans.
        state: Stacked as from `initial`.
        noise_keys: [S] noise keys.
        rounds: Rounds done.

    Returns:
        The state with the secret slot as it was after that many rounds.
    """
    one = jax.tree.map(lambda leaf: leaf[0], arrays)
    models = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0, 0]), state.models)
    zeros = jax.tree.map(jnp.zeros_like, statics.method.payload(models))

    def of_seed(key: PRNGKeyArray) -> Any:
        link = _privatizer(statics, one, key)
        assert link is not None
        return jax.lax.fori_loop(
            0, rounds, lambda _, past: link.update(zeros, past)[1], link.init(zeros)
        )

    secret = jax.lax.map(of_seed, noise_keys)
    # Counters are one for all.
    merge = lambda old, new: new[0] if is_counter(old) else new  # noqa: E731
    return state._replace(secret=jax.tree.map(merge, state.secret, secret))


@functools.partial(
    jax.jit, static_argnames=("statics", "blocks", "every", "tail"), donate_argnames="state"
)
def advance(
    statics: Statics,
    arrays: Any,
    data: Data,
    state: State,
    batch_keys: PRNGKeyArray,
    noise_keys: PRNGKeyArray,
    *,
    blocks: int,
    every: int,
    tail: int,
) -> tuple[State, dict[str, Float[Array, "e s v"]]]:
    """Advance all runs by ``blocks * every + tail`` rounds.

    Args:
        statics: What is static.
        arrays: Stacked over V plans.
        data: The problem's data.
        state: From `initial` or an earlier call; its buffers are reused.
        batch_keys: [S] keys of the batches.
        noise_keys: [S] keys of the noise (the secret slot holds them too).
        blocks: Whole blocks.
        every: Rounds a block, after which metrics are taken.
        tail: Rounds of a last, shorter block.

    Returns:
        The new state and the metrics, each [blocks (+1 with a tail), S, V].
    """
    _TRACES.append(statics)
    over = _loop_over if statics.sequential else _vmap_over
    frozen, data = data.frozen, data._replace(frozen=None)
    shared, owned = (None, (data,)) if statics.own_data else (data, ())

    def one_round(carry: Any, _: None) -> tuple[Any, None]:
        state, sums = carry
        plan_axes = _axes(state, "plans")
        seed_axes = _axes(state, "seeds")

        def of_seed(
            state: State, batch_key: PRNGKeyArray, noise_key: PRNGKeyArray, *own: Data
        ) -> Any:
            round_key = fold_in(batch_key, state.round)
            drawn = batch(statics, _one(own, shared), batch_key, noise_key, state.round)

            def of_plan(state: State, arrays: Any) -> Any:
                step = algorithm(statics, arrays, noise_key, frozen).step
                state, info = step(round_key, state, drawn)
                return state, reported(statics, info.metrics)

            return over(of_plan, plan_axes, state, arrays)

        state, info = over(of_seed, seed_axes, state, batch_keys, noise_keys, *owned)
        if statics.mesh is not None:
            over_agents = NamedSharding(statics.mesh, PartitionSpec(None, None, AXIS))
            models = jax.lax.with_sharding_constraint(state.models, over_agents)
            state = state._replace(models=models)
        return (state, jax.tree.map(jnp.add, sums, info)), None

    shape = jax.tree.leaves(state.models)[0].shape[:2]
    zeros = {name: jnp.zeros(shape, jnp.float32) for name in statics.reports}

    def block(state: State, length: int) -> tuple[State, dict[str, Any]]:
        (state, sums), _ = jax.lax.scan(one_round, (state, zeros), None, length=length)
        return state, measured(statics, data._replace(frozen=frozen), state, sums, length)

    parts = []
    if blocks:
        state, taken = jax.lax.scan(lambda s, _: block(s, every), state, None, length=blocks)
        parts.append(taken)
    if tail:
        state, taken = block(state, tail)
        parts.append(jax.tree.map(lambda leaf: leaf[None], taken))
    return state, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
