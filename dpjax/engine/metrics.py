"""What a run measures: the rounds' own metrics, and those of the models after a block."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from dpjax import _validate
from dpjax._numerics import compiled
from dpjax.engine.step import LOST, Data, Statics
from dpjax.protocols import PublicState, State

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


def zeros(statics: Statics, state: State) -> dict[str, Any]:
    """Sums of a block's metrics before its first round, name -> [S, V].

    Args:
        statics: What is static.
        state: Stacked.
    """
    shape = jax.tree.leaves(state.models)[0].shape[:2]
    return {name: jnp.zeros(shape, jnp.float32) for name in statics.reports}


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
    metrics = _measures(statics, data.frozen)
    per_seed = (data.evaluation,) if statics.data_per_seed else ()

    def measure(item: Any) -> dict[str, Any]:
        models, *evaluations = item
        (evaluation,) = evaluations or (data.evaluation,)
        values = jax.vmap(lambda p: metrics(p, evaluation))(models)
        return values | {"consensus": jax.vmap(_consensus)(models)}

    models = models_of(statics, state)
    # One seed after the other bounds the memory of the evaluation.
    values = jax.lax.map(measure, (models, *per_seed))
    # Compilers multiply by the inverse of a constant, and a length may be one or not.
    length = jax.lax.optimization_barrier(jnp.asarray(length, jnp.float32))
    means = {name: value if name == LOST else value / length for name, value in sums.items()}
    return values | means


def models_of(statics: Statics, state: State) -> Any:
    """The models of every run that are measured, leaves [S, V, ...].

    Args:
        statics: What is static.
        state: Stacked.
    """
    measured = statics.method.measured
    both = jax.vmap(jax.vmap(lambda models, memory: measured(PublicState(models, memory))))
    return both(state.models, state.memory)


def _measures(statics: Statics, frozen: Any) -> Callable[[Any, Any], dict[str, Any]]:
    """The metrics of models that lack frozen leaves."""
    if frozen is None:
        return statics.metrics
    return functools.partial(statics.metrics, frozen=frozen)


@compiled()
def _of_round(statics: Statics, arrays: Any, data: Data, models: Any, key: PRNGKeyArray) -> Any:
    """What a round reports; only traced, once for all runs of a kind."""
    one = jax.tree.map(lambda leaf: leaf[0], arrays)
    return dict(statics.first_round(one, data, models, key).metrics)


def reports(
    statics: Statics, arrays: Any, data: Data, models: Any, key: PRNGKeyArray
) -> tuple[str, ...]:
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
    shapes = _of_round.trace(statics, arrays, data, models, key).out_info
    for name, leaf in shapes.items():
        if leaf.shape:
            raise ValueError(
                f"method reports {name!r} of shape {leaf.shape}; give a scalar, over all agents"
            )
    known = [name for name in statics.query.metrics if name in shapes]
    return (*known, *sorted(set(shapes) - set(known)))


def names(statics: Statics, data: Data, state: State) -> tuple[str, ...]:
    """Names of the metrics that `program.advance` returns, without tracing it.

    Args:
        statics: What is static.
        data: The problem's data.
        state: Shapes of one run's state.

    Raises:
        ValueError: For metrics that are no numbers by name, and where the method reports one of
            the names of the others.
    """
    models = jax.eval_shape(statics.method.measured, PublicState(*state[:2]))
    metrics = _measures(statics, data.frozen)
    shapes = jax.eval_shape(metrics, models, statics.of_first_seed(data).evaluation)
    if not isinstance(shapes, dict) or not all(isinstance(name, str) for name in shapes):
        raise ValueError(
            f"metrics returns {_validate.shown(shapes)}; return a dict of scalars by name, "
            "{} for none"
        )
    for name, value in shapes.items():
        known = isinstance(value, jax.ShapeDtypeStruct)
        if not known or value.shape or jnp.iscomplexobj(value):
            what = f"{value.dtype}{list(value.shape)}" if known else type(value).__name__
            raise ValueError(
                f"metrics returns {name!r}, a {what}; return one real scalar, over all agents: "
                "take a mean"
            )
    measured = (*shapes, "consensus")
    if twice := sorted(set(measured) & set(statics.reports)):
        raise ValueError(
            f"method reports {twice}, which the problem's metrics are called, or the "
            "engine's; name them otherwise"
        )
    return (*measured, *statics.reports)
