"""What the compiled program is made for and what it reads: statics, data, batches, the round."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int, PRNGKeyArray

from dpjax.engine import rounds as rounds_
from dpjax.plans.copies import keyed
from dpjax.plans.query import AgentQuery, Drawn, Passes, RecordQuery
from dpjax.protocols import Algorithm, IntegerEncoded, Method, Optimizer, Privatizer, Query, Sampler

__all__: list[str] = []

_INSIDE = "promise_in_bounds"
# Above every number of a round; those of one key apart.
_BATCHES = _VARIANTS = 2**32 - 1
_START = 2**32 - 2


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
    statics: Statics, arrays: Any, noise_key: PRNGKeyArray, frozen: Any = None, **instead: Any
) -> rounds_.Halves:
    """`algorithm`, cut where a round crosses the network.

    Args:
        statics: What is static.
        arrays: One plan's arrays, traced or not.
        noise_key: The seed's noise key.
        frozen: `Data.frozen`.
        instead: Parts that take the place of the run's own, by name.
    """
    given = _parts(statics, arrays, noise_key, frozen) | instead
    return rounds_.halves(statics.method, arrays, **given)


def _parts(statics: Statics, arrays: Any, noise_key: PRNGKeyArray, frozen: Any) -> dict[str, Any]:
    lost = getattr(statics.privatizer, "lost", None)
    return {
        "query": asked(statics, frozen),
        "privatizer": privatizer(statics, arrays, noise_key),
        "optimizer": statics.optimizer.chain(arrays),
        "divisor": statics.divisor,
        "lost": None if lost is None else functools.partial(lost, arrays),
    }


def privatizer(
    statics: Statics, arrays: Any, noise_key: PRNGKeyArray
) -> optax.GradientTransformation | IntegerEncoded | None:
    """What adds one plan's noise; None where no plan has any.

    Args:
        statics: What is static.
        arrays: One plan's arrays, traced or not.
        noise_key: The seed's noise key.
    """
    if statics.privatizer is None:
        return None
    return statics.privatizer.transformation(arrays, noise_key)


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


def one(own: Sequence[Data], shared: Data | None) -> Data:
    """A seed's own data, or that of all.

    Args:
        own: The seed's data where every seed has its own; else nothing.
        shared: That of all.
    """
    (chosen,) = own or (shared,)
    assert chosen is not None
    return chosen


def beginning(batch_key: PRNGKeyArray) -> PRNGKeyArray:
    """A seed's public key before the first round.

    Args:
        batch_key: Its key of the batches.
    """
    return jax.random.fold_in(batch_key, _START)


def batch(
    statics: Statics, data: Data, batch_key: PRNGKeyArray, noise_key: PRNGKeyArray, round: Any
) -> Any:
    """Every agent's records of a round, and which places are padding (None: none is).

    Args:
        statics: What is static.
        data: The seed's data.
        batch_key: Its key of the batches.
        noise_key: Its key of the noise.
        round: Rounds done before.
    """
    key = jax.random.fold_in(batch_key, round)
    if statics.capacity is not None:
        # Amplified by secret batches: their key is a part of the noise key, which draws
        # noise under the numbers of rounds alone.
        key = jax.random.fold_in(jax.random.fold_in(noise_key, _BATCHES), round)
    variants = None
    if statics.query.copies is not None:
        # Public, so never of the noise key.
        variants = jax.random.fold_in(jax.random.fold_in(batch_key, _VARIANTS), round)
    drawn = statics.sampler.draw(key, round, data.counts)
    # Positions are below counts and the problem has checked its indices: no bounds to test.
    rows = jnp.take_along_axis(data.indices, drawn.rows, axis=1, mode=_INSIDE)
    if statics.capacity is not None:
        assert drawn.padding is not None
        return Drawn(data.x, data.y, rows, drawn.padding, variants)
    x, y = (part.at[rows].get(mode=_INSIDE) for part in (data.x, data.y))
    return keyed(variants, x, rows), y, drawn.padding


def first_sent(
    statics: Statics, arrays: Any, data: Data, models: Any, key: PRNGKeyArray
) -> rounds_.Outgoing:
    """What goes out in the first round, for those who trace its shapes and names.

    Args:
        statics: What is static.
        arrays: One plan's arrays.
        data: The problem's data.
        models: Agent-stacked models to start from.
        key: Any key, in the place of all.
    """
    cut = halves(statics, arrays, key, data.frozen)
    state = cut.init(models, beginning(key))
    drawn = batch(statics, first(statics, data), key, key, state.round)
    return cut.outgoing(key, state, drawn)


def batch_shapes(statics: Statics, data: Data, batch_keys: PRNGKeyArray) -> Any:
    """Shapes of the batch of every agent in a round.

    Args:
        statics: What is static.
        data: The problem's data.
        batch_keys: [S] keys of the batches.
    """
    return jax.eval_shape(
        lambda data, key: batch(statics, data, key, key, jnp.int32(0)),
        first(statics, data),
        batch_keys[0],
    )
