"""What is learned: a model, one example's loss, data over agents, and what is measured."""

import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from dpjax import _numerics, _validate
from dpjax._validate import fixed
from dpjax.data import quadratics as quadratics_
from dpjax.data.partition import Partition
from dpjax.models import losses
from dpjax.models.layer_norms import Gradients
from dpjax.models.mlp import MLP
from dpjax.plans import parameters, query

__all__ = ["LOSSES", "Problem", "quadratics", "supervised"]


def check_closure(
    name: str, function: Callable[..., Any], arguments: Any, x: np.ndarray
) -> list[Any]:
    """Refuse a function of one record that holds records: every term would move with theirs.

    The clip bounds a record's own term. Where other terms are made of that record too, as when
    records are mixed, zeroing it out moves all of those, and no guarantee here covers it. What is
    found are arrays in the function's program of which half the rows or more are rows of ``x``, as
    they are; rows that were changed before are not.

    Args:
        name: What a message calls the function.
        function: The function.
        arguments: What it is given, or the shapes.
        x: [N, ...] all records.

    Returns:
        Shapes of what the function returns, in a list of one; nothing where it fails.

    Raises:
        ValueError: Naming the function, and the array that it holds.
    """
    try:
        program, returned = jax.make_jaxpr(function, return_shape=True)(*arguments)
    except Exception:  # What fails is told where it is called.
        return []
    rows: set[bytes] | None = None
    for constant in _constants(program):
        shape = np.shape(constant)
        if len(shape) < 2 or shape[1:] != x.shape[1:] or len(shape) != x.ndim or shape[0] < 2:
            continue
        if rows is None:
            rows = set(map(bytes, _flat(x, x.dtype)))
        found = [row for row in map(bytes, _flat(constant, x.dtype)) if row in rows]
        if len(set(found)) > 1 and 2 * len(found) >= shape[0]:
            raise ValueError(
                f"{name} holds an array {shape} of the training records; give a function of one "
                "record and of public values alone: a record that enters the terms of others moves "
                "more than its own, clipped one, which no guarantee here covers"
            )
    return [returned]


def _flat(rows: Any, kind: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(rows).astype(kind).reshape(len(rows), -1))


def _constants(program: Any) -> Iterator[Any]:
    """Arrays of a program, and of the programs that it calls."""
    yield from getattr(program, "consts", ())
    for equation in getattr(program, "jaxpr", program).eqns:
        for value in equation.params.values():
            for each in value if isinstance(value, list | tuple) else (value,):
                if hasattr(getattr(each, "jaxpr", each), "eqns"):
                    yield from _constants(each)


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
def module_functions(
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
    values = wanted if params is None else parameters.starting_values(params, wanted)
    trained, kept = (values, None) if frozen is None else parameters.split(values, frozen)
    parameters.check_trained(trained, wanted)
    if params is None:
        return functions, None
    weighted = functions.weighted if frozen is None else None
    return functions._replace(init=parameters.Given.of(trained), weighted=weighted), kept


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
            return jax.tree.map(jnp.mean, each(parameters.merge(one, frozen), x, y))

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
                return jax.tree.map(total, each(parameters.merge(one, frozen), *part))

            taken = over_agents(of_agent, params)
            return jax.tree.map(jnp.mean, taken)

        sums = jax.lax.map(of_batch, jnp.arange(-(-len(x) // size)))
        return jax.tree.map(lambda each: jnp.sum(each) / len(x), sums)

    return metrics if batch is None else in_batches


@dataclass(frozen=True, eq=False, repr=False)
class Problem:
    """A learning problem over n agents.

    Attributes:
        init: ``init(key) -> params`` of one agent; all agents start alike, but for ``apart``.
        loss: ``loss(params, x, y) -> scalar`` of one example.
        metrics: ``metrics(params, evaluation) -> {name: scalar}`` of agent-stacked params.
        x: [N, ...] examples, one array for all agents.
        y: [N] labels or targets.
        partition: Which rows belong to which agent.
        evaluation: Pytree of arrays handed to ``metrics``.
        name: For records.
        batch_loss: ``batch_loss(params, x, y) -> scalar``, the mean loss of a batch, where that is
            faster than a mean over ``loss``; used for the agent unit only.
        weighted: ``weighted(params, x, y, weights) -> gradient``, a sum of per-example gradients
            with weights from their norms, where the model has one (see
            `dpjax.models.layer_norms.Gradients`); used for the record unit only.
        frozen: Public values of parameters that are neither trained nor clipped, noised, sent or
            copied for each agent, in a tree like the model's with None in the places of trained
            ones; ``init`` then returns None in theirs, ``loss`` and ``batch_loss`` are given both
            together, and ``metrics`` is ``metrics(params, evaluation, frozen=frozen)``, of trained
            ones. No guarantee covers what these values tell of the data that they were made from.
        predict: ``predict(params, x) -> outputs`` of examples [M, ...] by one whole model, where
            there is such a thing; for `Result.predictor`.
        evaluation_data: "private" where the metrics come from data that must not leak, as held-out
            records of the agents do; "public" where anybody may have them. A run whose callback
            reads metrics of private data, or of models that no message shows (of tracking and its
            rivals), does not cover the round at which it ended.
        augment: ``augment(key, x) -> x``, a random variant of one record, of its shape and dtype;
            None trains on the records as they are. Keys are public, see `dpjax.plans.query`. It is
            made of its record and of public values alone: one that mixes records is covered by no
            guarantee, and refused where it is found to hold them; so is such a ``loss``.
        copies: Variants K of a record in each round in which it takes part; its gradient is that
            of the mean loss over them, and the clip comes after, so that no guarantee depends
            on K.
        apart: True where every agent draws an initial model of its own, from the seed and its
            number: public, as all initial models are.
        columns: Names of the columns of ``x``, which a data frame for `Result.predictor` must
            have in the same order; None where they have none.
    """

    init: Callable[[PRNGKeyArray], Any]
    loss: Callable[[Any, Any, Any], Any]
    metrics: Callable[..., dict[str, Any]]
    x: np.ndarray
    y: np.ndarray
    partition: Partition
    evaluation: Any
    name: str = "problem"
    batch_loss: Callable[[Any, Any, Any], Any] | None = None
    weighted: Callable[[Any, Any, Any, Any], Any] | None = None
    evaluation_data: Literal["private", "public"] = "private"
    frozen: Any = parameters.Lasting()
    predict: Callable[[Any, Any], Any] | None = None
    augment: Callable[[PRNGKeyArray, Any], Any] | None = None
    copies: int = 1
    apart: bool = False
    columns: tuple[Any, ...] | None = None

    def __repr__(self) -> str:
        """Its size in one line: data are not for terminals and logs."""
        rows, agents = len(self.x), len(self.partition.counts)
        return f"Problem({self.name!r}, {agents} agents, {rows:,} records of {self.x.shape[1:]})"

    def __post_init__(self) -> None:
        """Refuse data that would fail or mislead later."""
        _validate.one_of("evaluation_data", self.evaluation_data, ("private", "public"))
        _validate.flag("apart", self.apart)
        for name in ("init", "loss", "metrics"):
            if not callable(value := getattr(self, name)):
                raise ValueError(f"{name} is {_validate.shown(value)}; give a function")
        if not _validate.finite_array("x", self.x).ndim:
            raise ValueError(f"x is {_validate.shown(self.x)}; give examples [N, ...]")
        if not np.ndim(self.y):
            raise ValueError(f"y is {_validate.shown(self.y)}; give one label a row")
        if len(self.x) != len(self.y):
            raise ValueError(f"x has {len(self.x)} rows and y {len(self.y)}; give one label a row")
        _validate.check_rows("", self.x, self.y)
        _validate.finite_array("y", self.y)
        _check_partition(self.partition)
        if self.frozen is not None:
            parameters.check_split(self.init, self.frozen)
            object.__setattr__(self, "frozen", parameters.held("frozen", self.frozen))
            _check_metrics(self.metrics)
            if self.weighted is not None:
                raise ValueError(
                    "weighted is given with frozen values, whose gradients it would take; leave "
                    "it None"
                )
        if self.columns is None:
            object.__setattr__(self, "columns", _validate.columns(self.x))
        # Copies that nobody can change after the check.
        for name in ("x", "y"):
            array = fixed(getattr(self, name))
            _validate.check_range(name, array)
            object.__setattr__(self, name, array)
        indices, counts = (fixed(part, np.int32) for part in self.partition[:2])
        object.__setattr__(
            self, "partition", self.partition._replace(indices=indices, counts=counts)
        )
        if indices.min() < 0:
            raise ValueError(
                f"partition.indices hold {indices.min()}; give rows of x from 0, and fill an "
                "agent's places beyond its count with its first record"
            )
        if indices.max() >= len(self.x):
            raise ValueError(
                f"partition.indices reach {indices.max()}, x has {len(self.x)} rows; "
                "partition the same data"
            )
        for leaf in jax.tree.leaves(self.evaluation):
            _validate.unmasked("evaluation", leaf)
        self._check_functions()
        if self.variants is not None and self.weighted is not None:
            raise ValueError(
                "weighted is given with augment, whose variants it would leave out; leave it None"
            )

    def _check_functions(self) -> None:
        """Refuse functions of one record that hold others, and what cannot be trained."""
        one, y = (jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in (self.x, self.y))
        key = jax.eval_shape(lambda: jax.random.key(0, impl=_numerics.THREEFRY))
        if self.augment is not None:
            check_closure("augment", self.augment, (key, one), self.x)
        for params in _returned(self.init, jax.random.key(0)):
            _check_trained(params)
            params = parameters.merge(params, self.frozen)
            for value in check_closure("loss", self.loss, (params, one, y), self.x):
                _check_loss("loss", "one example", value)
            two = (jax.ShapeDtypeStruct((2, *a.shape), a.dtype) for a in (one, y))
            for value in _returned(self.batch_loss, params, *two):
                _check_loss("batch_loss", "a batch", value)

    @property
    def variants(self) -> query.Copies | None:
        """What stands in the place of each record; None where it is the record itself."""
        return query.variants(self.augment, self.copies, self.x[0])

    @property
    def agents(self) -> int:
        """Number of agents n."""
        return len(self.partition.counts)

    def fingerprint(self) -> str:
        """SHA-256 of the training data and its partition, in hexadecimal."""
        digest = hashlib.sha256()
        for array in (self.x, self.y, self.partition.indices, self.partition.counts):
            array = np.ascontiguousarray(array)
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(array.data)
        return digest.hexdigest()


def supervised(
    model: nn.Module,
    loss: str,
    train: tuple[Any, Any],
    test: tuple[Any, Any],
    partition: Partition,
    *,
    name: str = "supervised",
    evaluation_data: Literal["private", "public"] = "private",
    eval_batch: int | None = None,
    params: Any = None,
    frozen: Any = None,
    augment: Callable[[PRNGKeyArray, Any], Any] | None = None,
    copies: int = 1,
) -> Problem:
    """A flax model, a named loss, and arrays.

    The metrics are the test loss (and accuracy) of every agent's model on the pooled test set,
    averaged over agents. Integers in x (tokens, images of bytes) reach the model as integers, all
    other numbers as float32.

    Args:
        model: Module whose ``apply`` maps [..., features] to scores or logits.
        loss: One of `LOSSES`; logistic wants labels -1 and +1, cross_entropy 0 .. c-1.
        train: x [N, ...] and y [N].
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
        augment: As in `Problem`; `dpjax.data.augmentation` has the customary ones for images.
        copies: As in `Problem`.

    Returns:
        The problem.

    Raises:
        ValueError: For an unknown loss, NaN in data or parameters, labels the loss cannot take,
            data frames whose columns differ or whose index is not that of y, another model's
            parameters, trained leaves outside the collection "params" or of another dtype, or a
            ``frozen`` that holds for all of them or none.

    Example:
        >>> import numpy as np
        >>> from dpjax.data import partition
        >>> from dpjax.models.linear import Linear
        >>> from dpjax.plans import problem
        >>> x, y = np.eye(4), np.array([1, -1, 1, -1])
        >>> shards = partition.iid(4, n=2, seed=0)
        >>> problem.supervised(Linear(), "logistic", (x, y), (x, y), shards).agents
        2
    """
    _validate.one_of("loss", loss, LOSSES)
    if eval_batch is not None:
        eval_batch = _validate.integer("eval_batch", eval_batch, most=2**31 - 2)
    arrays = []
    names: list[tuple[Any, ...] | None] = []
    for split, (x, y) in (("train", train), ("test", test)):
        names.append(_validate.columns(x))
        _validate.check_rows(f"{split} ", x, y)
        _validate.check_columns(f"{split} x", x, names[0])
        x, y = inputs(split, x), labels(loss, split, y)
        if len(x) != len(y):
            raise ValueError(f"{split} x has {len(x)} rows, y {len(y)}; give one label a row")
        arrays.append((x, y))
    (x, y), (x_test, y_test) = arrays
    if x.shape[1:] != x_test.shape[1:]:
        raise ValueError(
            f"test x has records of shape {x_test.shape[1:]}, train x of {x.shape[1:]}; give both "
            "the same columns, in the same order"
        )
    if x.dtype != x_test.dtype:
        raise ValueError(
            f"test x is {x_test.dtype} and train x {x.dtype}; give both as numbers of one kind"
        )
    check_outputs(model, loss, x, max(y.max(), y_test.max()))
    if eval_batch is None:
        eval_batch = at_once(model, x_test, _agents(partition))
    parts = loss, x.shape[1:], x.dtype, eval_batch
    try:
        functions = module_functions(model, *parts)
    except TypeError:  # A module with an unhashable field: no sharing of compiled code.
        functions = module_functions.__wrapped__(model, *parts)
    if frozen is not None and params is None:
        raise ValueError("frozen is given without params; give the values that stay as they are")
    functions, kept = started(functions, params, frozen)
    weighted = functions.weighted if augment is None else None
    return Problem(
        functions.init, functions.loss, functions.metrics, x, y, partition, (x_test, y_test), name,
        functions.batch_loss, weighted, evaluation_data, kept, functions.predict, augment, copies,
        columns=names[0],
    )  # fmt: skip


def _agents(partition: Any) -> int:
    _check_partition(partition)
    return len(partition.counts)


def _returned(function: Any, *arguments: Any) -> list[Any]:
    """Shapes of what a function returns, in a list of one; nothing where it fails, or is None."""
    try:
        return [jax.eval_shape(function, *arguments)]
    except Exception:  # What fails is told where it is called.
        return []


def _check_trained(params: Any) -> None:
    """Refuse initial values of which something cannot be trained."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not sum(leaf.size for _, leaf in leaves):
        raise ValueError(
            f"init returns {_validate.shown(params)}, which holds no parameters; return a pytree "
            "with an array to train"
        )
    for path, leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"init returns params{jax.tree_util.keystr(path)} of dtype {leaf.dtype}, which no "
                "gradient trains; make them float32, or move them to frozen"
            )


def _check_loss(name: str, of: str, value: Any) -> None:
    """Refuse a loss that is no real scalar."""
    if not isinstance(value, jax.ShapeDtypeStruct):
        raise ValueError(
            f"{name} returns {_validate.shown(value)}; return one scalar, the loss of {of}"
        )
    if value.shape or not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"{name} returns {value.dtype}{list(value.shape)}; return one real scalar, the loss of "
            f"{of}: take a sum or a mean"
        )


def _check_metrics(metrics: Callable[..., Any]) -> None:
    """Refuse metrics that do not take frozen values, before a run has begun."""
    try:
        signature = inspect.signature(metrics)
    except (TypeError, ValueError):  # compiled code does not say
        return
    try:
        signature.bind(None, None, frozen=None)
    except TypeError as error:
        raise ValueError(
            f"metrics cannot be called with frozen values ({error}); write it as metrics(params, "
            "evaluation, frozen=None), of trained params"
        ) from None


def _check_partition(partition: Any) -> None:
    """Refuse shards that repeat a record: a repeated one moves a clipped sum more than once."""
    remedy = "make it with dpjax.data.partition"
    if not isinstance(partition, Partition):
        raise ValueError(f"partition is a {type(partition).__name__}; {remedy}")
    named = zip(partition._fields, partition[:2], strict=False)
    indices, counts = (np.asarray(_validate.unmasked(*each)) for each in named)
    if indices.dtype.kind not in "iu" or counts.dtype.kind not in "iu":
        raise ValueError(f"partition has dtypes {indices.dtype}, {counts.dtype}; {remedy}")
    if indices.ndim != 2 or counts.shape != indices.shape[:1] or not counts.size:
        raise ValueError(f"partition has shapes {indices.shape}, {counts.shape}; {remedy}")
    if counts.min() < 1 or counts.max() > indices.shape[1]:
        raise ValueError(
            f"partition.counts go from {counts.min()} to {counts.max()} in rows of "
            f"{indices.shape[1]}; {remedy}"
        )
    if partition.names is not None and len(partition.names) != len(counts):
        raise ValueError(
            f"partition has {len(partition.names)} names for {len(counts)} agents; {remedy}"
        )
    owned = np.concatenate([row[:count] for row, count in zip(indices, counts, strict=True)])
    values, times = np.unique(owned, return_counts=True)
    if times.max() > 1:
        raise ValueError(
            f"partition gives record {values[times.argmax()]} {times.max()} times; every record "
            "belongs to one agent, once, or its sensitivity would be more than stated"
        )


def quadratics(agents: int, *, start: str = "origin") -> Problem:
    """The Whisper paper's two-dimensional quadratics, one an agent.

    The metric ``optimality_gap`` is (1/n) sum_i f_i(x_i) - f*, each agent's objective at its own
    model, which is below zero where agents have drifted to their own minimisers; ``mean_gap`` is
    f(average model) - f*.

    Args:
        agents: Number of agents n.
        start: "origin", or "optimum", the minimiser of the average objective.

    Returns:
        The problem; the model is a vector of two, batches are the agent's one record.

    Raises:
        ValueError: For another start.

    Reference:
        Rodio et al., Whisper D-SGD, section VI-A.

    Example:
        >>> from dpjax.plans import problem
        >>> problem.quadratics(6).agents
        6
    """
    _validate.one_of("start", start, ("origin", "optimum"))
    objectives = quadratics_.make(agents)
    at = np.zeros(2) if start == "origin" else np.asarray(objectives.minimiser)
    # A record is (A_i, c_i), flattened.
    x = np.concatenate([objectives.matrices.reshape(agents, 4), objectives.centers], axis=1)
    rows = np.arange(agents, dtype=np.int32)
    return Problem(
        _start_at(tuple(map(float, at))),
        _quadratic,
        _gaps,
        x.astype(np.float32),
        np.zeros(agents, np.float32),
        Partition(rows[:, None], np.ones(agents, np.int32)),
        (x.astype(np.float32), np.float32(objectives.minimum)),
        f"quadratics from the {start}",
        evaluation_data="public",
    )


@functools.lru_cache(maxsize=64)
def _start_at(point: tuple[float, ...]) -> Callable[[PRNGKeyArray], Any]:
    return lambda key: jnp.asarray(point, jnp.float32)


def _quadratic(params: Any, x: Any, y: Any) -> Any:
    offset = params - x[4:]
    return offset @ x[:4].reshape(2, 2) @ offset


def _gaps(params: Any, evaluation: Any) -> dict[str, Any]:
    records, minimum = evaluation
    own = jax.vmap(_quadratic, in_axes=(0, 0, None))(params, records, None)
    mean = jax.vmap(_quadratic, in_axes=(None, 0, None))(params.mean(axis=0), records, None)
    return {"optimality_gap": own.mean() - minimum, "mean_gap": mean.mean() - minimum}
