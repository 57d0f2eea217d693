"""Problems of a flax model, a named loss and arrays."""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jaxtyping import Array, PRNGKeyArray

from dpjax import _agents, _numerics, _programs, _validate
from dpjax.data import partition as partition_
from dpjax.data.partition import Partition
from dpjax.data.split import Records
from dpjax.learning import parameters
from dpjax.learning.examples import as_inputs, labelled
from dpjax.learning.parameters import Params
from dpjax.learning.problem import Problem
from dpjax.learning.query import Augment
from dpjax.models import losses
from dpjax.models.layer_norms import Gradients
from dpjax.models.mlp import MLP
from dpjax.protocols import Models

__all__ = ["supervised"]

_LOSSES: dict[str, tuple[Callable, Callable | None]] = {
    "logistic": (losses.logistic, losses.sign_accuracy),
    "cross_entropy": (losses.cross_entropy, losses.multiclass_accuracy),
    "squared": (losses.squared, None),
}
"""Losses by name, each with the score that is reported beside it."""

_SCORES = {"auc": losses.auc, "f1": losses.f1, "balanced_accuracy": losses.balanced_accuracy}
"""Scores by name of all evaluation records' outputs together."""

_EVALUATED = 2**27
"""Numbers of one layer, of all agents and evaluation records together, that are held at once."""

_RELABELLED = {("logistic", 0, 1): "2 * y - 1", ("cross_entropy", -1, 1): "(y + 1) // 2"}
"""Labels that another loss takes, as a loss and the classes, and what makes its own of them."""

_Functions: TypeAlias = dict[str, Any]
"""Functions and values of a `Problem` by name."""

_Outputs: TypeAlias = Callable[[Any, Array], Array]
"""A loss or a score of outputs and labels."""

_Scores: TypeAlias = dict[str, Array]


def _labels(loss: str, split: str, y: np.ndarray) -> np.ndarray:
    """Return labels that a loss takes, float32, or int32 for classes.

    Args:
        loss: One of `_LOSSES`.
        split: "train " or "test ", for messages.
        y: [N] labels.

    Raises:
        ValueError: For labels that it cannot take.
    """
    dtype = "float32"
    fits = np.ones(y.shape, bool)
    kind = "one number a record, [N]"
    if loss == "logistic":
        fits = np.isin(y, (-1, 1))
        kind = "-1 and +1"
    elif loss == "cross_entropy":
        dtype = "int32"
        # Devices hold classes in 32 bits.
        fits = (y == np.round(y)) & (y >= 0) & (y < 2**31)
        kind = "classes 0 .. c-1, numbered from 0"
    # What follows finds the message that helps most.
    if y.ndim == 1 and fits.all():
        return y.astype(dtype)
    classes = np.unique(y).tolist()
    remedy = ""
    if y.ndim != 1:
        problem = "has"
        remedy = _validate.flattened("y", y)
    elif len(classes) == 2:
        problem = f"has classes {classes} in"
        formula = _RELABELLED.get((loss, *classes))
        if formula is None and loss == "logistic":
            formula = f"np.where(y == {classes[1]}, 1, -1)"
        if formula is not None:
            remedy = f"; give {formula}"
    else:
        problem = f"holds {_validate.shown(y[~fits].tolist()[:4])} in"
    raise ValueError(f"{split}y {problem} shape {y.shape}; the {loss} loss takes {kind}{remedy}")


def _check_outputs(model: nn.Module, loss: str, x: np.ndarray, largest: float) -> int:
    """Refuse labels beyond the model's outputs, which would train on something else or on nan.

    Args:
        model: The module.
        loss: One of `_LOSSES`.
        x: Examples.
        largest: The largest label.

    Returns:
        The number of classes; 2 where there is one output.

    Raises:
        ValueError: For outputs that the loss does not take, or too few; for a model that needs more
            than parameters and examples.
    """
    # Shapes alone: nothing is computed, and no weights are drawn.
    batch = _numerics.shapes(x, 2)
    try:
        # With what ``init`` gave it and nothing else.
        params = jax.eval_shape(model.init, jax.random.key(0), batch)
        outputs = jax.eval_shape(model.apply, params, batch)
        if not isinstance(outputs, jax.ShapeDtypeStruct):
            raise TypeError(f"it returns a {type(outputs).__name__}")
    except Exception as error:
        kind = model if isinstance(model, type) else type(model)
        name = kind.__name__
        if any(base.__module__.startswith("flax.nnx") for base in kind.__mro__):
            raise ValueError(
                f"model is {name}, a module of flax.nnx; give nnx.bridge.to_linen({name}, "
                "arguments), without rngs, which makes one of flax.linen of it"
            ) from None
        raise ValueError(
            f"model is {name}, which fails on x {batch.shape} {x.dtype}: "
            f"{_validate.said(error)}; give a module whose apply(params, x) returns one "
            "array, without random keys or state: no dropout, GroupNorm in place of BatchNorm"
        ) from error
    if loss == "cross_entropy":
        form = "[batch, classes]; one score is for logistic (labels -1 and +1) and squared"
        dimensions = 2
    else:
        form = "[batch]"
        dimensions = 1
        if outputs.shape[1:] == (1,):
            form += "; return x[..., 0]"
    if len(outputs.shape) != dimensions:
        raise ValueError(
            f"model maps {batch.shape} to {outputs.shape}; the {loss} loss takes {form}"
        )
    if loss != "cross_entropy":
        return 2
    classes = outputs.shape[-1]
    if largest >= classes:
        raise ValueError(
            f"y reaches class {int(largest)}, the model has "
            f"{_validate.counted(classes, 'output')}; number the classes from 0, or widen the model"
        )
    return classes


def _records_at_once(model: nn.Module, x: np.ndarray, agents: int) -> int | None:
    """How many evaluation records a model is measured on at once; None is all.

    Args:
        model: The module.
        x: [M, ...] evaluation records.
        agents: Number of agents.
    """
    sizes = []
    # From two on, since some modules take one by another way.
    for records in (2, 3):
        batch = _numerics.shapes(x, records)
        params = jax.eval_shape(model.init, jax.random.key(0), batch)
        sizes.append(_sizes(jax.make_jaxpr(model.apply)(params, batch)))
    if len(sizes[0]) == len(sizes[1]):
        # Not weights that are turned round or cast, which are as large for any number of records.
        widest = max((larger - smaller for smaller, larger in zip(*sizes, strict=True)), default=1)
    else:  # Another program for another number: all of it bounds what grows.
        widest = max(sizes[1])
    allowed = max(1, _EVALUATED // (agents * max(1, widest)))
    return None if len(x) <= allowed else allowed


def _sizes(program: core.ClosedJaxpr) -> list[int]:
    """Numbers in every result of a program, and of the programs that it calls."""
    equations = (equation for jaxpr, _ in _programs.jaxprs(program) for equation in jaxpr.eqns)
    return [math.prod(atom.aval.shape) for equation in equations for atom in equation.outvars]


@functools.lru_cache(maxsize=64)
def _module_functions(
    model: nn.Module,
    loss: str,
    shape: tuple[int, ...],
    kind: np.dtype,
    batch: int | None,
    scores: tuple[str, ...],
    class_weights: tuple[float, ...] | None,
) -> _Functions:
    """Functions of a `Problem` by name; the same objects each time, so compiled code is shared.

    Args:
        model: The module.
        loss: One of `_LOSSES`.
        shape: Of one example.
        kind: Its dtype.
        batch: Evaluation records at once; None is all.
        scores: Names among `_SCORES`.
        class_weights: As in `supervised`.
    """
    loss_fn = _weighted(_LOSSES[loss][0], class_weights)

    # Compiled: one by one, the operations of a whole forward pass take far longer.
    compiled_init = jax.jit(lambda key: model.init(key, jnp.zeros((1, *shape), kind)))

    def init(key: PRNGKeyArray) -> Params:
        # A compiled function that was pickled can be called, but not traced under its own name.
        return compiled_init(key)

    def example_loss(params: Params, x: Array, y: Array) -> Array:
        return loss_fn(model.apply(params, x[None])[0], y)

    def batch_loss(params: Params, x: Array, y: Array) -> Array:
        return jnp.mean(loss_fn(model.apply(params, x), y))

    gradients = Gradients(model.apply, loss_fn)
    # Without a layer whose gradient is a product there is nothing to gain.
    params = jax.eval_shape(init, jax.random.key(0))
    layers = gradients.chosen(params, jax.ShapeDtypeStruct((1, *shape), kind))
    # Hidden layers of all agents at once leave a CPU's caches: 20 times as slow for 148 agents.
    deep = type(model) is MLP and jax.default_backend() == "cpu"
    deep = deep or _agents.one_by_one(params)
    return {
        "init": init,
        "loss": example_loss,
        "metrics": _metrics(model, loss, batch, deep, scores),
        "batch_loss": batch_loss,
        "weighted": gradients if layers else None,
        "predict": model.apply,
    }


def _started(functions: _Functions, params: Params, frozen: Params) -> _Functions:
    """Return the functions of a model that starts from given values, with which of these stay.

    Args:
        functions: From `_module_functions`.
        params: Of one agent; None leaves the model's own start.
        frozen: As in `supervised`.

    Raises:
        ValueError: For another model's values, a choice of all or none, or trained leaves that are
            no parameters.
    """
    shapes = jax.eval_shape(functions["init"], jax.random.key(0))
    if params is None:
        if frozen is not None:
            raise ValueError("frozen is given without params; give the values that stay")
        parameters.check_trained(shapes, shapes)
        return functions
    trained = parameters.starting_values(params, shapes)
    frozen_values = None
    if frozen is not None:
        trained, frozen_values = parameters.split_trained(trained, frozen)
        # A model's own sum of gradients is of all its leaves.
        functions = functions | {"weighted": None}
    parameters.check_trained(trained, shapes)
    return functions | {"init": parameters.ConstantInit.of(trained), "frozen": frozen_values}


def _weighted(loss: _Outputs, weights: tuple[float, ...] | None) -> _Outputs:
    """A loss times the weight of the label's class."""
    if weights is None:
        return loss
    # NumPy's: a function that is cached holds no array of a device.
    table = np.array(weights, np.float32)

    def of_class(outputs: Array, y: Array) -> Array:
        index = y
        if not jnp.issubdtype(y.dtype, jnp.integer):
            # Labels -1 and +1 are classes 0 and 1.
            index = (y > 0).astype(jnp.int32)
        weight = jnp.asarray(table, outputs.dtype)[index]
        return weight * loss(outputs, y)

    return of_class


def _metrics(
    model: nn.Module, loss: str, batch: int | None, deep: bool, scores: tuple[str, ...]
) -> Callable[..., _Scores]:
    """Loss and scores of every agent's model on all evaluation records, averaged over agents."""
    loss_fn, score_fn = _LOSSES[loss]

    def summed(params: Params, part: Sequence[Array]) -> tuple[_Scores, Params]:
        x, y = part
        outputs: Any = model.apply(params, x)
        values = {"test_loss": loss_fn(outputs, y)}
        if score_fn is not None:
            values["test_accuracy"] = score_fn(outputs, y)
        # Scores of all records together need all outputs.
        return jax.tree.map(jnp.sum, values), outputs if scores else ()

    def metrics(models: Models, evaluation: Sequence[Array], frozen: Params = None) -> _Scores:
        records = len(evaluation[0])
        size = min(batch or records, records)
        # The last part may be shorter.
        divisible = records - records % size
        batches = [leaf[:divisible].reshape(-1, size, *leaf.shape[1:]) for leaf in evaluation]
        rest = [leaf[divisible:] for leaf in evaluation]

        def of_agent(trained: Params) -> _Scores:
            params = trained if frozen is None else parameters.merge(trained, frozen)
            of_part = functools.partial(summed, params)
            if size == records:
                total, outputs = of_part(evaluation)
            else:
                totals, outputs = jax.lax.map(of_part, batches)
                total = jax.tree.map(jnp.sum, totals)
                outputs = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outputs)
                if divisible < records:
                    last_total, last_outputs = of_part(rest)
                    total = jax.tree.map(jnp.add, total, last_total)
                    outputs = jax.tree.map(
                        lambda *parts: jnp.concatenate(parts), outputs, last_outputs
                    )
            # By one division at the end: means of parts of other sizes would weigh otherwise.
            means = jax.tree.map(lambda value: value / records, total)
            for name in scores:
                means[f"test_{name}"] = _SCORES[name](outputs, evaluation[1])
            return means

        return jax.tree.map(jnp.mean, _agents.each_agent(of_agent, models, sequential=deep))

    return metrics


def supervised(
    model: nn.Module,
    loss: str,
    train: Records | Callable[[np.ndarray], Records],
    test: Records,
    partition: Partition,
    *,
    name: str = "supervised",
    evaluation_data: Literal["private", "public"] = "private",
    eval_batch: int | None = None,
    params: Params = None,
    frozen: Params = None,
    augment: Augment | None = None,
    augmentation_multiplicity: int = 1,
    metrics: str | Sequence[str] = (),
    class_weights: Sequence[float] | None = None,
) -> Problem:
    """A flax model, a named loss, and arrays.

    The metrics are the test loss (and accuracy) of every agent's model on the pooled test set,
    averaged over agents. Integers in x (tokens, images of bytes) reach the model as integers, all
    other numbers as float32.

    Args:
        model: Module whose ``apply`` maps [..., features] to scores or logits.
        loss: "logistic" (labels -1 and +1), "cross_entropy" (0 .. c-1) or "squared".
        train: x [N, ...] and y [N]; or a function ``train(rows)`` that returns those of records
            with these numbers. Each process that takes part in a run calls it for the records of
            its own agents (`dpjax.data.partition.local`), and holds no others.
        test: x [M, ...] and y [M].
        partition: The training rows of each agent.
        name: For records.
        evaluation_data: Whose ``test`` is: "private", what the agents hold, or "public".
        eval_batch: Test records that all agents' models are measured on at once, to bound memory;
            the metrics are those of the whole set up to rounding. None takes all, or fewer where
            a layer's outputs would be more than 2^27 numbers.
        params: Values that all agents and seeds start from, all of the model's parameters as its
            ``init`` returns them (pretrained ones, say); None draws them from the seed. They are
            taken as public: no guarantee covers what they tell of the data they were made from.
        frozen: Which of them stay as they are: ``frozen(path) -> bool`` of "params/Dense_0/kernel"
            and so on, or a tree of bools whose leaves may stand for whole branches. Frozen
            leaves are neither clipped nor noised nor sent, and are held once for all agents; clip
            norms, noise and numbers of parameters are of trained ones. None trains all.
        augment: As in `Problem`; `dpjax.contrib.augmentation` has the customary ones for images.
        augmentation_multiplicity: As in `Problem`.
        metrics: More metrics of classifiers: "auc" (area under the ROC curve), "f1" and
            "balanced_accuracy", where there are several classes means over them.
        class_weights: Factors of the training loss of each class, [c] numbers above 0; for labels
            -1 and +1 two, in this order. The test loss has none. A record is clipped after it is
            weighted. So a weight changes nothing where the gradient stays above the clip norm, or
            where clipping is automatic; give frequent classes weights far below 1. They are taken
            as public: no guarantee covers what they tell of the labels.

    Returns:
        The problem.

    Raises:
        ValueError: For an unknown loss or metric, data that are not two arrays, "auc" of test
            records of one class, other weights than one a class, NaN in data or parameters, labels
            the loss cannot take, data frames whose columns differ or whose index is not that of y,
            another model's parameters, trained leaves outside the collection "params" or of another
            dtype, or a ``frozen`` that holds for all of them or none.

    Example:
        >>> import numpy as np
        >>> from dpjax.data import partition
        >>> from dpjax.models.linear import Linear
        >>> from dpjax.learning.supervised import supervised
        >>> x, y = np.eye(4), np.array([1, -1, 1, -1])
        >>> shards = partition.iid(4, n=2, seed=0)
        >>> supervised(Linear(), "logistic", (x, y), (x, y), shards).agents
        2
    """
    _validate.one_of("loss", loss, _LOSSES)
    if eval_batch is not None:
        eval_batch = _validate.integer("eval_batch", eval_batch, maximum=2**31 - 2)
    local = callable(train)
    # Each process reads the records of its own agents alone.
    if callable(train):
        train = train(partition_.local(partition))
    columns, x, y, x_test, y_test = _arrays(loss, train, test)
    classes = _check_outputs(model, loss, x, max(y.max(), y_test.max()))
    if eval_batch is None:
        # The problem refuses what is no partition.
        agents = max(1, np.size(getattr(partition, "counts", ())))
        eval_batch = _records_at_once(model, x_test, agents)
    if not isinstance(metrics, Sequence):
        raise ValueError(f"metrics is {metrics!r}; give a list of {', '.join(_SCORES)}")
    scores = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    for score in scores:
        _validate.one_of("metrics", score, _SCORES)
    if loss == "squared" and (scores or class_weights is not None):
        raise ValueError("loss is 'squared', which has no classes; leave out metrics and weights")
    if "auc" in scores and len(np.unique(y_test)) < 2:
        raise ValueError(
            f"metrics has 'auc' and test y one class, {y_test[0]:g}; give test records of two "
            "classes, or leave it out"
        )
    # By the model's outputs: a class may be missing among the labels.
    if class_weights is not None:
        weights = _validate.finite_array("class_weights", class_weights)
        if weights.shape != (classes,) or not (weights > 0).all():
            raise _validate.refusal(
                "class_weights",
                class_weights,
                f"give {classes} numbers above 0, one for each class",
            )
        class_weights = tuple(weights.tolist())
    # Numbers and texts alone, by which a second problem finds the compiled functions of a first.
    parts = loss, x.shape[1:], x.dtype, eval_batch, scores, class_weights
    try:
        functions = _module_functions(model, *parts)
    except TypeError:  # A module with an unhashable field: no sharing of compiled code.
        functions = _module_functions.__wrapped__(model, *parts)
    functions = _started(functions, params, frozen)
    if augment is not None:
        # A model's own sum would read the record in the place of its variants.
        functions = functions | {"weighted": None}
    return Problem(
        **functions,
        x=x,
        y=y,
        partition=partition,
        evaluation=(x_test, y_test),
        name=name,
        evaluation_data=evaluation_data,
        augment=augment,
        augmentation_multiplicity=augmentation_multiplicity,
        local=local,
        columns=columns,
    )


class _Arrays(NamedTuple):
    """Training and test data as arrays, and the names of the columns of x."""

    columns: tuple[Hashable, ...] | None
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def _arrays(loss: str, train: Any, test: Any) -> _Arrays:
    """Return examples and labels that belong together and that the loss takes."""
    for split, data in (("train", train), ("test", test)):
        is_list = isinstance(data, tuple | list)
        if not is_list or len(data) != 2:
            # By its kind alone: a message holds no records.
            count = f" of {len(data)}" if is_list else ""
            raise ValueError(
                f"{split} is a {type(data).__name__}{count}; give two arrays, examples and their "
                f"labels, (x_{split}, y_{split})"
            )
    columns = _validate.columns(train[0])
    _validate.check_columns("test x", test[0], columns)
    arrays = []
    for split, data in (("train ", train), ("test ", test)):
        examples, labels = labelled(split, *data)
        arrays += [as_inputs(examples), _labels(loss, split, labels)]
    x, _, x_test, _ = arrays
    if (x.shape[1:], x.dtype) != (x_test.shape[1:], x_test.dtype):
        raise ValueError(
            f"test x has records of shape {x_test.shape[1:]} and is {x_test.dtype}, train x of "
            f"{x.shape[1:]} and {x.dtype}; give both the same columns, of one kind"
        )
    return _Arrays(columns, *arrays)
