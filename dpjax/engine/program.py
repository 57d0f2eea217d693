"""The compiled part of a run: rounds under scan, seeds and plans under vmap.

One call advances every (seed, plan) pair by one chunk. Batches and raw normals depend on the seed
alone, so plans that differ in design, budget or step size share them: their results are paired,
and the work is done once. That is sound in a simulation only; releases run one plan and one seed.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dpjax.algorithms.base import Algorithm, State
from dpjax.algorithms.dsgd import dsgd
from dpjax.data import batches
from dpjax.engine.sharding import AXIS
from dpjax.transforms import clipping, noise
from dpjax.transforms.sums import clipped_sum

__all__ = [
    "Arrays",
    "Data",
    "Settings",
    "Strategy",
    "advance",
    "algorithm",
    "initial",
    "metric_names",
    "replay",
    "traces",
]


class Strategy:
    """A strategy over rounds as a static value: equal where all its bits are.

    Args:
        matrix: [T, T] C, float64.
    """

    def __init__(self, matrix: Float[np.ndarray, "t t"]):
        self.matrix = matrix
        self._digest = hashlib.sha256(np.ascontiguousarray(matrix).data).digest()

    def __eq__(self, other: object) -> bool:
        """Compare the bits."""
        return isinstance(other, Strategy) and self._digest == other._digest

    def __hash__(self) -> int:
        """Hash the bits."""
        return hash(self._digest)


class Settings(NamedTuple):
    """What is static: one compilation for each value (and chunk length).

    ``sequential`` loops over seeds and plans within a round in place of a vmap: per-record
    gradients of many runs at once leave a CPU's caches, and are slower there by ten times.
    ``separation`` is that of the cyclic sampler, None for the random one. ``noisy`` is False where
    no plan has noise, which then is not drawn. ``weighted`` takes the place of per-record
    gradients where the problem has it.
    ``own_data`` is True where every seed has data of its own. ``grid`` is the spacing that a
    release's noisy sums are rounded to, None for simulations.
    """

    loss: Callable[[Any, Any, Any], Any]
    batch_loss: Callable[[Any, Any, Any], Any] | None
    metrics: Callable[[Any, Any], dict[str, Any]]
    rounds: int
    clip_norm: float
    batch_size: int
    step_decay: str
    clipping: clipping.Method
    microbatch: int | None
    unit: str
    mesh: Mesh | None
    sequential: bool = False
    separation: int | None = None
    strategy: Strategy | None = None
    noisy: bool = True
    weighted: Callable[[Any, Any, Any, Any], Any] | None = None
    own_data: bool = False
    grid: float | None = None


class Arrays(NamedTuple):
    """What differs between plans: leading axis the V plans once stacked."""

    mixing: Float[Array, "..."]
    factor: Float[Array, "n n"]
    step_size: Float[Array, ""]


class Data(NamedTuple):
    """Training data over agents, and what the metrics read; with ``own_data`` stacked by seed."""

    x: Any
    y: Any
    indices: Int[Array, "n m"]
    counts: Int[Array, " n"]
    evaluation: Any


_INSIDE = "promise_in_bounds"
_NORMS = ("gradient_norm", "clip_fraction")
_TRACES: list[Settings] = []


def traces() -> int:
    """How often `advance` has been traced in this process."""
    return len(_TRACES)


def algorithm(settings: Settings, arrays: Arrays, noise_key: PRNGKeyArray) -> Algorithm:
    """Assemble clip, noise and step around D-SGD for one plan.

    Guarantee: the chain is clip (of the agent's gradient, or of every record's), then noise, then
    post-processing; nothing touches the clipped gradient before the noise.

    Args:
        settings: The shared settings.
        arrays: One plan's arrays, traced or not.
        noise_key: The seed's noise key.

    Returns:
        The algorithm.
    """
    links = [_noise(settings, arrays, noise_key)] if settings.noisy else []
    if settings.step_decay == "sqrt":
        step = optax.scale_by_schedule(lambda count: -arrays.step_size / jnp.sqrt(count + 1.0))
    else:
        step = optax.scale(-arrays.step_size)

    if settings.unit == "record":
        per_record = _per_record(settings)

        def grad_fn(params: Any, batch: Any) -> Any:
            x, y, padding = batch
            return per_record(params, x, y, padding)

        # Noise is added to the sum of clipped gradients; the mean is post-processing, by one fixed
        # number: how many places of a batch are padding is not told.
        chain = optax.chain(*links, optax.scale(1 / settings.batch_size), step)
        return dsgd(arrays.mixing, chain, grad_fn)

    def mean_loss(params: Any, batch: Any) -> Any:
        x, y, _ = batch
        if settings.batch_loss is not None:
            return settings.batch_loss(params, x, y)
        return jnp.mean(jax.vmap(settings.loss, in_axes=(None, 0, 0))(params, x, y))

    clip = clipping.per_agent(settings.clip_norm, method=settings.clipping)
    return dsgd(arrays.mixing, optax.chain(clip, *links, step), jax.grad(mean_loss))


def _noise(
    settings: Settings, arrays: Arrays, noise_key: PRNGKeyArray
) -> optax.GradientTransformation:
    strategy = None if settings.strategy is None else settings.strategy.matrix
    return noise.correlated(
        arrays.factor,
        key=noise_key,
        rounds=settings.rounds,
        strategy=strategy,
        grid=settings.grid,
    )


def _per_record(settings: Settings) -> Callable[..., Any]:
    if settings.weighted is not None:
        return clipped_sum(settings.weighted, settings.clip_norm, method=settings.clipping)
    return clipping.per_example(
        settings.loss,
        settings.clip_norm,
        method=settings.clipping,
        microbatch=settings.microbatch,
    )


def _axes(state: State, over: str) -> Any:
    """Where the plans (or seeds) are in a stacked state; None where they share one value."""

    def of_leaf(leaf: Any) -> Any:
        if not _is_noise(leaf):
            return 0
        # Key and noise before the factor over agents are a seed's; all its plans share them.
        mine: Any = 0 if over == "seeds" else None
        return jax.tree.map(lambda _: mine, leaf)._replace(round=None)

    tree = jax.tree.map(of_leaf, state, is_leaf=_is_noise)
    return tree._replace(round=None)


def _template(settings: Settings, arrays: Arrays, params: Any, key: PRNGKeyArray) -> State:
    """Structure of the state of one plan and one seed."""
    one = jax.tree.map(lambda leaf: leaf[0], arrays)
    return jax.eval_shape(lambda p, k: algorithm(settings, one, k).init(p), params, key)


@functools.partial(jax.jit, static_argnames="settings")
def initial(settings: Settings, arrays: Arrays, params: Any, noise_keys: PRNGKeyArray) -> State:
    """Build the stacked initial state.

    Args:
        settings: The shared settings.
        arrays: Stacked over V plans.
        params: Initial parameters of one agent, stacked over S seeds.
        noise_keys: [S] noise keys.

    Returns:
        The state, leaves [S, V, n, ...] but for keys [S] and counters [].
    """
    n = arrays.factor.shape[-1]

    def of_seed(params: Any, key: PRNGKeyArray) -> State:
        stacked = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (n, *leaf.shape)), params)
        axes = _axes(_template(settings, arrays, stacked, key), "plans")
        return jax.vmap(lambda a: algorithm(settings, a, key).init(stacked), out_axes=axes)(arrays)

    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((n, *leaf.shape[1:]), leaf.dtype), params)
    axes = _axes(_template(settings, arrays, one, noise_keys[0]), "seeds")
    return jax.vmap(of_seed, out_axes=axes)(params, noise_keys)


def _vmap_over(function: Any, axes: State, state: State, *others: Any) -> Any:
    """Map ``function(state, *others) -> (state, info)``; shared leaves of the state stay so."""
    zeros = (0,) * len(others)
    return jax.vmap(function, in_axes=(axes, *zeros), out_axes=(axes, 0))(state, *others)


def _loop_over(function: Any, axes: State, state: State, *others: Any) -> Any:
    """`_vmap_over` as a loop."""
    leaves, structure = jax.tree.flatten(state)
    mapped = [axis == 0 for axis in jax.tree.leaves(axes, is_leaf=lambda axis: axis is None)]

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


def _positions(settings: Settings, data: Data, key: PRNGKeyArray, round: Any) -> tuple[Any, Any]:
    """Every agent's records of a round, and which places are padding (None: none is)."""
    if settings.separation is None:
        return batches.draw(key, data.counts, settings.batch_size), None
    return batches.cyclic(round, data.counts, settings.batch_size, settings.separation)


def _consensus(params: Any) -> Float[Array, ""]:
    """Mean squared distance of the agents' models from their average."""
    leaves = [leaf - jnp.mean(leaf, axis=0) for leaf in jax.tree.leaves(params)]
    return sum(jnp.sum(jnp.square(leaf)) for leaf in leaves) / leaves[0].shape[0]


def first(settings: Settings, data: Data) -> Data:
    """The data of the first seed.

    Args:
        settings: The shared settings.
        data: The problem's data.
    """
    return jax.tree.map(lambda leaf: leaf[0], data) if settings.own_data else data


def metric_names(settings: Settings, data: Data, state: State) -> list[str]:
    """Names of the metrics `advance` returns, without tracing it."""
    one = jax.tree.map(lambda leaf: leaf[0, 0], state.params)
    names = list(jax.eval_shape(settings.metrics, one, first(settings, data).evaluation))
    return [*names, "consensus", *([] if settings.unit == "record" else _NORMS)]


@functools.partial(jax.jit, static_argnames="settings")
def replay(settings: Settings, arrays: Arrays, state: State, rounds: Int[Array, ""]) -> State:
    """Draw the noise of the first rounds again, which later rounds of a strategy depend on.

    Args:
        settings: The shared settings, with a strategy.
        arrays: Stacked over V plans.
        state: Whose noise states hold the keys; stacked as from `initial`.
        rounds: Rounds done.

    Returns:
        The state with the noise states as they were after that many rounds.
    """
    one = jax.tree.map(lambda leaf: leaf[0], arrays)
    zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0, 0]), state.params)

    def of_seed(key: PRNGKeyArray) -> noise.NoiseState:
        link = _noise(settings, one, key)
        return jax.lax.fori_loop(
            0, rounds, lambda _, past: link.update(zeros, past)[1], link.init(zeros)
        )

    def of_leaf(leaf: Any) -> Any:
        if not _is_noise(leaf):
            return leaf
        past = jax.lax.map(of_seed, leaf.key)
        return past._replace(key=leaf.key, round=past.round[0])

    return jax.tree.map(of_leaf, state, is_leaf=_is_noise)


def _is_noise(leaf: Any) -> bool:
    return isinstance(leaf, noise.NoiseState)


@functools.partial(
    jax.jit, static_argnames=("settings", "blocks", "every", "tail"), donate_argnames="state"
)
def advance(
    settings: Settings,
    arrays: Arrays,
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
        settings: The shared settings.
        arrays: Stacked over V plans.
        data: The problem's data.
        state: From `initial` or an earlier call; its buffers are reused.
        batch_keys: [S] keys of the batches.
        noise_keys: [S] keys of the noise (the state holds them too).
        blocks: Whole blocks.
        every: Rounds a block, after which metrics are taken.
        tail: Rounds of a last, shorter block.

    Returns:
        The new state and the metrics, each [blocks (+1 with a tail), S, V].
    """
    _TRACES.append(settings)
    over = _loop_over if settings.sequential else _vmap_over
    shared, owned = (None, (data,)) if settings.own_data else (data, ())

    def one_round(carry: Any, _: None) -> tuple[Any, None]:
        state, sums = carry
        plan_axes = _axes(state, "plans")
        seed_axes = _axes(state, "seeds")

        def of_seed(
            state: State, batch_key: PRNGKeyArray, noise_key: PRNGKeyArray, *own: Data
        ) -> Any:
            data = _one(own, shared)
            round_key = jax.random.fold_in(batch_key, state.round)
            positions, padding = _positions(settings, data, round_key, state.round)
            # Positions are below counts and the problem has checked its indices: no bounds to test.
            rows = jnp.take_along_axis(data.indices, positions, axis=1, mode=_INSIDE)
            batch = *(part.at[rows].get(mode=_INSIDE) for part in (data.x, data.y)), padding

            def of_plan(state: State, arrays: Arrays) -> Any:
                step = algorithm(settings, arrays, noise_key).step
                state, info = step(round_key, state, batch)
                norms = jax.vmap(optax.tree.norm)(info.gradients)
                taken = (jnp.mean(norms), jnp.mean(norms > settings.clip_norm))
                narrow = [value.astype(jnp.float32) for value in taken]
                return state, dict(zip(_NORMS, narrow, strict=True))

            return over(of_plan, plan_axes, state, arrays)

        state, info = over(of_seed, seed_axes, state, batch_keys, noise_keys, *owned)
        if settings.mesh is not None:
            over_agents = NamedSharding(settings.mesh, PartitionSpec(None, None, AXIS))
            params = jax.lax.with_sharding_constraint(state.params, over_agents)
            state = state._replace(params=params)
        return (state, jax.tree.map(jnp.add, sums, info)), None

    shape = jax.tree.leaves(state.params)[0].shape[:2]
    zeros = {name: jnp.zeros(shape, jnp.float32) for name in _NORMS}

    def block(state: State, length: int) -> tuple[State, dict[str, Any]]:
        (state, sums), _ = jax.lax.scan(one_round, (state, zeros), None, length=length)

        def measure(item: Any) -> dict[str, Any]:
            params, *own = item
            evaluation = _one(own, shared).evaluation
            taken = jax.vmap(lambda p: settings.metrics(p, evaluation))(params)
            return taken | {"consensus": jax.vmap(_consensus)(params)}

        # One seed after the other bounds the memory of the evaluation.
        taken = jax.lax.map(measure, (state.params, *owned))
        means = {name: value / length for name, value in sums.items()}
        if settings.unit == "record":
            means = {}  # What grad_fn returns there is a sum of clipped gradients.
        return state, taken | means

    parts = []
    if blocks:
        state, taken = jax.lax.scan(lambda s, _: block(s, every), state, None, length=blocks)
        parts.append(taken)
    if tail:
        state, taken = block(state, tail)
        parts.append(jax.tree.map(lambda leaf: leaf[None], taken))
    return state, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
