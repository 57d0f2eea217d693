"""Flax modules, named losses and arrays as the functions of a problem."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from dpjax import _validate
from dpjax.models import losses
from dpjax.models.mlp import MLP
from dpjax.models.taps import Gradients
from dpjax.plans import _parameters

__all__ = [
    "LOSSES",
    "Functions",
    "at_once",
    "check_outputs",
    "functions",
    "inputs",
    "labels",
    "started",
]

LOSSES: dict[str, tuple[Callable, Callable | None]] = {
    "logistic": (losses.logistic, losses.sign_accuracy),
    "cross_entropy": (losses.cross_entropy, losses.multiclass_accuracy),
    "squared": (losses.squared, None),
}
"""Losses by name, each with the score that is reported beside it."""

_EVALUATED = 2**27
"""Numbers of one layer, of all agents and evaluation records together, that are held at once."""


class Functions(NamedTuple):
    """What a module and a loss give a problem, see `dpjax.plans.problem.Problem`."""

    init: Callable[[PRNGKeyArray], Any]
    loss: Callable[[Any, Any, Any], Any]
    metrics: Callable[..., dict[str, Any]]
    batch_loss: Callable[[Any, Any, Any], Any]
    weighted: Callable[[Any, Any, Any, Any], Any] | None
    predict: Callable[[Any, Any], Any]


def inputs(split: str, x: Any) -> np.ndarray:
    """Return examples as a run reads them: integers as they are, other numbers as float32.

    Args:
        split: "train" or "test", for messages.
        x: [N, ...] examples; integers of 32 bits and more become int32.

    Raises:
        ValueError: For NaN, or numbers beyond 32 bits.
    """
    name = f"{split} x"
    _validate.unmasked(name, x)
    try:
        array = np.asarray(x)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is no array of numbers ({error}); give one") from None
    if not array.ndim:
        raise ValueError(f"{name} is {_validate.shown(x)}; give examples [N, ...]")
    kind = array.dtype
    if kind.kind not in "iu":
        return _validate.single(name, x)
    if not array.size:
        raise ValueError(f"{name} has shape {array.shape}; give at least one entry")
    _validate.check_range(name, array)
    return array.astype(np.int32) if kind.itemsize >= 4 else array


def labels(loss: str, split: str, y: Any) -> np.ndarray:
    """Return labels that a loss takes, float32, or int32 for classes.

    Args:
        loss: One of `LOSSES`.
        split: "train" or "test", for messages.
        y: [N] labels.

    Raises:
        ValueError: For labels that it cannot take.
    """
    y = _validate.finite_array(f"{split} y", y, ndim=1)
    if loss == "logistic" and not np.isin(y, (-1, 1)).all():
        raise ValueError(
            f"{split} y holds {sorted(set(y.tolist()))[:4]}; the logistic loss takes -1 and +1"
        )
    if loss == "cross_entropy":
        if (y != np.round(y)).any() or y.min() < 0:
            raise ValueError(f"{split} y holds {y.min()}; cross_entropy takes classes 0 .. c-1")
        if y.max() > np.iinfo(np.int32).max:
            raise ValueError(
                f"{split} y reaches {y.max():.10g}; cross_entropy takes classes 0 .. c-1: number "
                "them from 0"
            )
        return y.astype(np.int32)
    return _validate.single(f"{split} y", y)


def check_outputs(model: nn.Module, loss: str, x: np.ndarray, largest: float) -> None:
    """Refuse labels beyond the model's outputs, which would train on something else or on nan.

    Args:
        model: The module.
        loss: One of `LOSSES`.
        x: Examples.
        largest: The largest label.

    Raises:
        ValueError: For outputs that the loss does not take, or too few; for a model that needs more
            than parameters and examples.
    """
    one = jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype)
    outputs = _outputs(model, one)
    wanted = 2 if loss == "cross_entropy" else 1
    if len(outputs.shape) != wanted:
        shape = "[batch, classes]" if wanted == 2 else "[batch]"
        raise ValueError(
            f"model maps {one.shape} to {outputs.shape}; the {loss} loss takes {shape}"
        )
    if loss == "cross_entropy" and largest >= outputs.shape[-1]:
        raise ValueError(
            f"y reaches class {int(largest)}, the model has {outputs.shape[-1]} outputs for "
            f"classes 0 .. {outputs.shape[-1] - 1}; number the classes from 0, or widen the model"
        )


def _outputs(model: nn.Module, x: Any) -> Any:
    """Shape of what a model makes of examples, with what ``init`` gave it and nothing else."""
    remedy = (
        "give a module whose apply(params, x) returns one array and needs no random keys and no "
        "state: dropout that is deterministic, GroupNorm in the place of BatchNorm"
    )
    try:
        params = jax.eval_shape(model.init, jax.random.key(0), x)
        outputs = jax.eval_shape(model.apply, params, x)
    except Exception as error:
        said = (str(error).splitlines() or [""])[0].partition(" (http")[0]
        raise ValueError(
            f"model is {type(model).__name__}, which fails on x {x.shape} {x.dtype}: "
            f"{type(error).__name__}: {said}; {remedy}"
        ) from error
    if not isinstance(outputs, jax.ShapeDtypeStruct):
        raise ValueError(
            f"model is {type(model).__name__}, which returns {type(outputs).__name__}; {remedy}"
        )
    return outputs


def at_once(model: nn.Module, x: np.ndarray, agents: int) -> int | None:
    """How many evaluation records a model is measured on at once; None is all.

    Args:
        model: The module.
        x: [M, ...] evaluation records.
        agents: Number of agents.
    """
    # From two on, since some modules take one by another way.
    two, three = (jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for size in (2, 3))
    params = jax.eval_shape(model.init, jax.random.key(0), two)
    sizes = [list(_sizes(jax.make_jaxpr(model.apply)(params, x).jaxpr)) for x in (two, three)]
    if len(sizes[0]) == len(sizes[1]):
        # Not weights that are turned round or cast, which are as large for any number of records.
        widest = max((more - less for less, more in zip(*sizes, strict=True)), default=1)
    else:  # another program for another number; all of it bounds what grows
        widest = max(sizes[1])
    allowed = max(1, _EVALUATED // (agents * max(1, widest)))
    return None if len(x) <= allowed else allowed


def _sizes(jaxpr: Any) -> Iterator[int]:
    """Numbers in every result of a program, and of the programs that it calls."""
    for equation in jaxpr.eqns:
        yield from (math.prod(variable.aval.shape) for variable in equation.outvars)
        for value in equation.params.values():
            if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                yield from _sizes(inner)


@functools.lru_cache(maxsize=64)
def functions(
    model: nn.Module, loss: str, shape: tuple[int, ...], kind: np.dtype, batch: int | None
) -> Functions:
    """Functions of one model and loss; the same objects each time, so compiled code is shared.

    Args:
        model: The module.
        loss: One of `LOSSES`.
        shape: Of one example.
        kind: Its dtype.
        batch: Evaluation records at once; None is all.
    """
    loss_fn = LOSSES[loss][0]

    # Compiled: one by one, the operations of a whole forward pass take far longer.
    @jax.jit
    def init(key: PRNGKeyArray) -> Any:
        return model.init(key, jnp.zeros((1, *shape), kind))

    def example_loss(params: Any, x: Any, y: Any) -> Any:
        return loss_fn(model.apply(params, x[None])[0], y)

    def batch_loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean(loss_fn(model.apply(params, x), y))

    gradients = Gradients(model.apply, loss_fn)
    found = gradients.chosen(
        jax.eval_shape(init, jax.random.key(0)), jax.ShapeDtypeStruct((1, *shape), kind)
    )
    # Without a layer whose gradient is a product there is nothing to gain.
    weighted = gradients if found else None
    metrics = _metrics(model, loss, batch)
    return Functions(init, example_loss, metrics, batch_loss, weighted, model.apply)


def started(functions: Functions, params: Any, frozen: Any) -> tuple[Functions, Any]:
    """Return the functions of a model that starts from given values, and which of these stay.

    Args:
        functions: From `functions`.
        params: Of one agent; None leaves the model's own start.
        frozen: As in `dpjax.plans.problem.supervised`.

    Raises:
        ValueError: For another model's values, a choice of all or none, or trained leaves that are
            no parameters.
    """
    wanted = jax.eval_shape(functions.init, jax.random.key(0))
    values = wanted if params is None else _parameters.starting_values(params, wanted)
    trained, kept = (values, None) if frozen is None else _parameters.split(values, frozen)
    _parameters.check_trained(trained, wanted)
    if params is None:
        return functions, None
    weighted = functions.weighted if frozen is None else None
    return functions._replace(init=_parameters.Given.of(trained), weighted=weighted), kept


def _metrics(model: nn.Module, loss: str, batch: int | None) -> Callable[..., dict[str, Any]]:
    """Loss (and score) of every agent's model on all evaluation records, averaged over agents."""
    loss_fn, score_fn = LOSSES[loss]

    def each(params: Any, x: Any, y: Any) -> dict[str, Any]:
        outputs = model.apply(params, x)
        values = {"test_loss": loss_fn(outputs, y)}
        return values if score_fn is None else values | {"test_accuracy": score_fn(outputs, y)}

    def over_agents(of_agent: Callable[[Any], Any], params: Any) -> Any:
        # Hidden layers of all agents at once leave a CPU's caches: 20 times as slow for 148 agents.
        deep = type(model) is MLP and jax.default_backend() == "cpu"
        return jax.lax.map(of_agent, params) if deep else jax.vmap(of_agent)(params)

    def metrics(params: Any, evaluation: Any, frozen: Any = None) -> dict[str, Any]:
        x, y = evaluation

        def of_agent(one: Any) -> Any:
            return jax.tree.map(jnp.mean, each(_parameters.merge(one, frozen), x, y))

        taken = over_agents(of_agent, params)
        return jax.tree.map(jnp.mean, taken)

    def in_batches(params: Any, evaluation: Any, frozen: Any = None) -> dict[str, Any]:
        x, y = evaluation
        size = min(batch or len(x), len(x))

        def of_batch(number: Any) -> Any:
            # The last one begins earlier where it would be short, and counts what is new alone.
            begin = jnp.minimum(number * size, len(x) - size)
            new = begin + jnp.arange(size) >= number * size
            part = [jax.lax.dynamic_slice_in_dim(whole, begin, size) for whole in (x, y)]

            def total(values: Any) -> Any:
                return jnp.sum(jnp.where(new, values, 0))

            def of_agent(one: Any) -> Any:
                return jax.tree.map(total, each(_parameters.merge(one, frozen), *part))

            taken = over_agents(of_agent, params)
            return jax.tree.map(jnp.mean, taken)

        sums = jax.lax.map(of_batch, jnp.arange(-(-len(x) // size)))
        return jax.tree.map(lambda each: jnp.sum(each) / len(x), sums)

    return metrics if batch is None else in_batches
