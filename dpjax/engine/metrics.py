"""What a run measures: the rounds' own metrics, and those of the models after a block."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from dpjax import _validate
from dpjax._numerics import compiled
from dpjax.engine import parts
from dpjax.engine.parts import Data, Statics
from dpjax.engine.rounds import LOST
from dpjax.protocols import Seen, State

__all__: list[str] = []


def _consensus(models: Any) -> Float[Array, ""]:
    """Mean squared distance of the agents' models from their average."""
    leaves = [leaf - jnp.mean(leaf, axis=0, keepdims=True) for leaf in jax.tree.leaves(models)]
    return sum(jnp.sum(jnp.square(leaf)) for leaf in leaves) / leaves[0].shape[0]


def reported(statics: Statics, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The round's metrics that a run reports, float32; nan where there is none by that name.

    Args:
        statics: What is static.
        metrics: Of one round.
    """
    return {name: jnp.asarray(metrics.get(name, jnp.nan), jnp.float32) for name in statics.reports}


def joined(sums: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Sums of a block's metrics with a round's; of lost noise the largest share.

    Args:
        sums: Of the rounds before.
        new: Of the round, from `reported`.
    """
    return {
        name: (jnp.maximum if name == LOST else jnp.add)(sums[name], value)
        for name, value in new.items()
    }


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
    found = _of_round.trace(statics, arrays, data, models, key).out_info
    for name, leaf in found.items():
        if leaf.shape:
            raise ValueError(
                f"method reports {name!r} of shape {leaf.shape}; give a scalar, over all agents"
            )
    known = [name for name in statics.query.metrics if name in found]
    return [*known, *sorted(set(found) - set(known))]


@compiled()
def _of_round(statics: Statics, arrays: Any, data: Data, models: Any, key: PRNGKeyArray) -> Any:
    """What a round reports; only traced, once for all runs of a kind."""
    one = jax.tree.map(lambda leaf: leaf[0], arrays)
    return dict(parts.first_sent(statics, one, data, models, key).metrics)


def measured(
    statics: Statics, data: Data, state: State, sums: dict[str, Any], length: Any
) -> dict[str, Any]:
    """Metrics after a block, name -> [S, V].

    Args:
        statics: What is static.
        data: The problem's data.
        state: Stacked, after the block.
        sums: The rounds' own metrics, `joined` over the block.
        length: Rounds of the block.
    """
    metrics, data = _measures(statics, data.frozen), data._replace(frozen=None)
    shared, owned = (None, (data,)) if statics.own_data else (data, ())

    def measure(item: Any) -> dict[str, Any]:
        models, *own = item
        evaluation = parts.one(own, shared).evaluation
        taken = jax.vmap(lambda p: metrics(p, evaluation))(models)
        return taken | {"consensus": jax.vmap(_consensus)(models)}

    models = models_of(statics, state)
    # One seed after the other bounds the memory of the evaluation.
    taken = jax.lax.map(measure, (models, *owned))
    # Compilers multiply by the inverse of a constant, and a length may be one or not.
    length = jax.lax.optimization_barrier(jnp.asarray(length, jnp.float32))
    means = {name: value / length for name, value in sums.items() if name != LOST}
    return taken | means | {name: sums[name] for name in sums if name == LOST}


def models_of(statics: Statics, state: State) -> Any:
    """The models of every run that are measured, leaves [S, V, ...].

    Args:
        statics: What is static.
        state: Stacked.
    """
    made = getattr(statics.method, "measured", None)
    if made is None:
        return state.models
    both = jax.vmap(jax.vmap(lambda models, memory: made(Seen(models, memory))))
    return both(state.models, state.memory)


def _measures(statics: Statics, frozen: Any) -> Callable[[Any, Any], dict[str, Any]]:
    """The metrics of models that lack frozen leaves."""
    if frozen is None:
        return statics.metrics
    return functools.partial(statics.metrics, frozen=frozen)


def every(statics: Statics, data: Data, state: State) -> list[str]:
    """Names of the metrics that `program.advance` returns, without tracing it.

    Args:
        statics: What is static.
        data: The problem's data.
        state: Shapes of one run's state.

    Raises:
        ValueError: For metrics that are no numbers by name, and where the method reports one of
            the names of the others.
    """
    models, own = state.models, getattr(statics.method, "measured", None)
    if own is not None:
        models = jax.eval_shape(own, Seen(state.models, state.memory))
    metrics = _measures(statics, data.frozen)
    found = jax.eval_shape(metrics, models, parts.first(statics, data).evaluation)
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(
            f"metrics returns {_validate.shown(found)}; return a dict of scalars by name, "
            "{} for none"
        )
    for name, value in found.items():
        known = isinstance(value, jax.ShapeDtypeStruct)
        if not known or value.shape or jnp.iscomplexobj(value):
            what = f"{value.dtype}{list(value.shape)}" if known else type(value).__name__
            raise ValueError(
                f"metrics returns {name!r}, a {what}; return one real scalar, over all agents: "
                "take a mean"
            )
    names = [*found, "consensus"]
    if taken := set(names) & set(statics.reports):
        raise ValueError(
            f"method reports {sorted(taken)}, which the problem's metrics are called, or the "
            "engine's; name them otherwise"
        )
    return [*names, *statics.reports]
