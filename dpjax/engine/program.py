"""The compiled part of a run: rounds under scan, seeds and plans under vmap.

One call advances every (seed, plan) pair by one chunk. Batches and the secret slot depend on the
seed alone, so plans that differ in design, budget or step size share raw normals: their results are
paired, and the work is done once. That is sound in a simulation only; releases run one plan and one
seed. What is static, and how a round's parts are joined, stands in `parts`; whose a leaf of the
state is, in `slots`; what is measured, in `metrics`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dpjax._numerics import compiled
from dpjax.engine import metrics, parts, slots
from dpjax.engine.course import Blocks
from dpjax.engine.parts import Data, Statics
from dpjax.engine.sharding import AXIS
from dpjax.protocols import IntegerEncoded, Seen, State

__all__: list[str] = []


_TRACES = [0]


def traces() -> int:
    """How often `advance` has been traced in this process."""
    return _TRACES[0]


def template(statics: Statics, arrays: Any, models: Any, key: PRNGKeyArray) -> State:
    """Shapes of the state of one plan and one seed.

    Args:
        statics: What is static.
        arrays: Stacked over V plans.
        models: Models to start from, leaves [n, ...].
        key: Any key.
    """

    # Arrays are traced too: their values, zero for a plan without noise, are no shapes.
    def start(arrays: Any, models: Any, key: PRNGKeyArray) -> State:
        one = jax.tree.map(lambda leaf: leaf[0], arrays)
        return parts.algorithm(statics, one, key).init(models, key)

    return jax.eval_shape(start, arrays, models, key)


@compiled()
def initial(
    statics: Statics,
    arrays: Any,
    models: Any,
    batch_keys: PRNGKeyArray,
    noise_keys: PRNGKeyArray,
) -> State:
    """Build the stacked initial state.

    Args:
        statics: What is static.
        arrays: Stacked over V plans.
        models: Models to start from, leaves [S, V, n, ...].
        batch_keys: [S] keys of the batches, of which the methods' public ones are made.
        noise_keys: [S] noise keys.

    Returns:
        The state: models and memory [S, V, ...], the secret [S, ...], counters [].
    """

    def of_seed(models: Any, batch_key: PRNGKeyArray, key: PRNGKeyArray) -> State:
        one = jax.tree.map(lambda leaf: leaf[0], models)
        axes = slots.axes(template(statics, arrays, one, key), "plans")

        def of_plan(arrays: Any, models: Any) -> State:
            return parts.algorithm(statics, arrays, key).init(models, parts.beginning(batch_key))

        return jax.vmap(of_plan, out_axes=axes)(arrays, models)

    one = jax.tree.map(lambda leaf: leaf[0, 0], models)
    axes = slots.axes(template(statics, arrays, one, noise_keys[0]), "seeds")
    return jax.vmap(of_seed, out_axes=axes)(models, batch_keys, noise_keys)


@compiled(static=2)
def left(statics: Statics, own: bool, state: State) -> Any:
    """Models that a run leaves, leaves [S, V, ...].

    Args:
        statics: What is static.
        own: False for what may be published, functions of messages alone; True for the models
            that are measured, which are the agents' own.
        state: Stacked as from `initial`.
    """
    if own:
        return metrics.models_of(statics, state)

    def one(models: Any, memory: Any) -> Any:
        return statics.method.released(Seen(models, memory))

    return jax.vmap(jax.vmap(one))(state.models, state.memory)


@compiled()
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
        link = parts.privatizer(statics, one, key)
        assert link is not None
        # Any public key: noise depends on none.
        public = (key,) if isinstance(link, IntegerEncoded) else ()
        return jax.lax.fori_loop(
            0, rounds, lambda _, past: link.update(zeros, past, *public)[1], link.init(zeros)
        )

    secret = jax.lax.map(of_seed, noise_keys)
    # Counters are one for all.
    merge = lambda old, new: new[0] if slots.is_counter(old) else new  # noqa: E731
    return state._replace(secret=jax.tree.map(merge, state.secret, secret))


@compiled(donate_argnames="state")
def advance(
    statics: Statics,
    arrays: Any,
    data: Data,
    state: State,
    batch_keys: PRNGKeyArray,
    noise_keys: PRNGKeyArray,
    blocks: Blocks | Int[Array, " e"],
) -> tuple[State, dict[str, Float[Array, "e s v"]]]:
    """Advance all runs by the rounds of all blocks.

    Args:
        statics: What is static.
        arrays: Stacked over V plans.
        data: The problem's data.
        state: From `initial` or an earlier call; its buffers are reused.
        batch_keys: [S] keys of the batches.
        noise_keys: [S] keys of the noise (the secret slot holds them too).
        blocks: Rounds of each block, after which metrics are taken; as part of the program, or as
            data: then blocks of all lengths are one loop, compiled once.

    Returns:
        The new state and the metrics, each [blocks, S, V].
    """
    _TRACES[0] += 1
    over = slots.loop_over if statics.sequential else slots.vmap_over
    frozen, data = data.frozen, data._replace(frozen=None)
    shared, owned = (None, (data,)) if statics.own_data else (data, ())

    def one_round(_: Any, carry: Any) -> Any:
        state, sums = carry
        plan_axes = slots.axes(state, "plans")
        seed_axes = slots.axes(state, "seeds")

        def of_seed(
            state: State, batch_key: PRNGKeyArray, noise_key: PRNGKeyArray, *own: Data
        ) -> Any:
            round_key = jax.random.fold_in(batch_key, state.round)
            drawn = parts.batch(statics, parts.one(own, shared), batch_key, noise_key, state.round)

            def of_plan(state: State, arrays: Any) -> Any:
                step = parts.algorithm(statics, arrays, noise_key, frozen).step
                state, info = step(round_key, state, drawn)
                return state, metrics.reported(statics, info.metrics)

            return over(of_plan, plan_axes, state, arrays)

        state, info = over(of_seed, seed_axes, state, batch_keys, noise_keys, *owned)
        if statics.mesh is not None:
            over_agents = NamedSharding(statics.mesh, PartitionSpec(None, None, AXIS))
            models = jax.lax.with_sharding_constraint(state.models, over_agents)
            state = state._replace(models=models)
        return state, metrics.joined(sums, info)

    shape = jax.tree.leaves(state.models)[0].shape[:2]
    zeros = {name: jnp.zeros(shape, jnp.float32) for name in statics.reports}

    def block(state: State, length: Any) -> tuple[State, dict[str, Any]]:
        state, sums = jax.lax.fori_loop(0, length, one_round, (state, zeros))
        return state, metrics.measured(statics, data._replace(frozen=frozen), state, sums, length)

    if not isinstance(blocks, Blocks):
        return jax.lax.scan(block, state, blocks)
    taken = []
    if blocks.whole:
        state, each = jax.lax.scan(
            lambda s, _: block(s, blocks.every), state, None, length=blocks.whole
        )
        taken.append(each)
    if blocks.tail:
        state, last = block(state, blocks.tail)
        taken.append(jax.tree.map(lambda leaf: leaf[None], last))
    return state, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *taken)
