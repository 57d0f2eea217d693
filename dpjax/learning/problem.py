"""What is learned: a model, one example's loss, data over agents, and what is measured."""

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from dpjax import _numerics, _programs, _validate
from dpjax._validate import fixed
from dpjax.data import partition as partition_
from dpjax.data.partition import Partition
from dpjax.learning import parameters, query
from dpjax.learning.examples import labelled
from dpjax.learning.parameters import Params

__all__ = ["Problem"]

_Loss: TypeAlias = Callable[[Params, Array, Array], Array]


def _check_closure(
    name: str, function: Callable[..., Array], arguments: tuple[Params, ...], x: np.ndarray
) -> jax.ShapeDtypeStruct:
    """Refuse a function of one record that holds records: every term would move with theirs.

    The clip bounds a record's own term. Where other terms are made of that record too, as when
    records are mixed, zeroing it out moves all of those, and no guarantee here covers it. What is
    refused are arrays in the function's program of which half the rows or more are rows of ``x``,
    as they are; rows that were changed before are not noticed.

    Args:
        name: What a message calls the function.
        function: The function.
        arguments: What it is given, or the shapes.
        x: [N, ...] all records.

    Returns:
        Shapes of what the function returns.

    Raises:
        ValueError: Naming the function, and the array that it holds.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    constants = map(np.asarray, _programs.constants(program))
    arrays = [array for array in constants if array.ndim > 1 and array.shape[1:] == x.shape[1:]]
    # Hashed where there is something to compare with.
    records = {row.tobytes() for row in x} if arrays else set()
    for array in arrays:
        rows = {row.tobytes() for row in array.astype(x.dtype)}
        common = len(rows & records)
        if common > 1 and 2 * common >= len(rows):
            raise ValueError(
                f"{name} holds an array {array.shape} of the training records, each of which "
                "would move the terms of others; give a function of one record and public values"
            )
    return shapes


@dataclass(frozen=True, eq=False, repr=False)
class Problem:
    """A learning problem over n agents.

    Attributes:
        init: ``init(key) -> params`` of one agent; all agents start alike, unless
            ``init_per_agent``.
        loss: ``loss(params, x, y) -> scalar`` of one example. A run refuses a rule of its own for
            several (`jax.custom_batching.custom_vmap`), which may mix them.
        metrics: ``metrics(params, evaluation) -> {name: scalar}`` of agent-stacked params.
        x: [N, ...] examples of all agents; with ``local`` of this process's alone.
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
            None trains on the records as they are. Keys are public, see `dpjax.learning.query`. It
            is made of its record and of public values alone: one that mixes records is covered by
            no guarantee, and refused where it is found to hold them; so is such a ``loss``.
        augmentation_multiplicity: Variants K of a record in each round in which it takes part; its
            gradient is that of the mean loss over them, and the clip comes after, so that no
            guarantee depends on K.
        init_per_agent: True where every agent draws an initial model of its own, from the seed
            and its number: public, as all initial models are.
        columns: Names of the columns of ``x``, which a data frame for `Result.predictor` must
            have in the same order; None where they have none.
        local: True where ``x`` and ``y`` are the records `dpjax.data.partition.local` of the
            partition alone, in that order: those of agents on this process's devices.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from dpjax.data import partition
        >>> from dpjax.learning.problem import Problem
        >>> Problem(
        ...     init=lambda key: jnp.zeros(3),
        ...     loss=lambda params, x, y: (x @ params - y) ** 2,
        ...     metrics=lambda params, evaluation: {"size": jnp.mean(params**2)},
        ...     x=np.eye(3), y=np.ones(3), partition=partition.iid(3, n=3, seed=0), evaluation=(),
        ... )
        Problem('problem', 3 agents, 3 records of (3,))
    """

    init: Callable[[PRNGKeyArray], Params]
    loss: _Loss
    metrics: Callable[..., dict[str, Array]]
    x: np.ndarray
    y: np.ndarray
    partition: Partition
    evaluation: Any
    name: str = "problem"
    batch_loss: _Loss | None = None
    weighted: Callable[..., Params] | None = None
    evaluation_data: Literal["private", "public"] = "private"
    frozen: Params = None
    predict: Callable[[Params, Array], Array] | None = None
    augment: query.Augment | None = None
    augmentation_multiplicity: int = 1
    init_per_agent: bool = False
    columns: tuple[Hashable, ...] | None = None
    local: bool = False

    def __repr__(self) -> str:
        """Its size in one line: data are not for terminals and logs."""
        agents = _validate.counted(self.agents, "agent")
        records = _validate.counted(len(self.x), "record")
        return f"Problem({self.name!r}, {agents}, {records} of {self.x.shape[1:]})"

    def __post_init__(self) -> None:
        """Refuse data that would fail or mislead later."""
        _validate.one_of("evaluation_data", self.evaluation_data, ("private", "public"))
        if not isinstance(self.name, str):
            raise _validate.refusal("name", self.name, "give text")
        _validate.fields(self, _validate.flag, "init_per_agent", "local")
        for name in ("init", "loss", "metrics"):
            value = getattr(self, name)
            if not callable(value):
                raise _validate.refusal(name, value, "give a function")
        columns = _validate.columns(self.x) if self.columns is None else self.columns
        # Copies that nobody can change after the check.
        x, y = map(fixed, labelled("", self.x, self.y))
        partition = partition_.checked_partition(self.partition, None if self.local else len(x))
        if self.local:
            count = len(partition_.local(partition))
            if len(x) != count:
                raise ValueError(
                    f"x has {len(x)} records, the agents on this process's devices have {count}; "
                    "give those of dpjax.data.partition.local, in its order"
                )
        values = {"x": x, "y": y, "columns": columns, "partition": partition}
        if self.frozen is not None:
            # What `init` leaves out must be frozen, and nothing else.
            parameters.check_split(self.init, self.frozen)
            values["frozen"] = parameters.fixed_values("frozen", self.frozen)
        _validate.assign(self, **values)
        # NumPy would measure what somebody had masked out.
        for leaf in jax.tree.leaves(self.evaluation):
            _validate.unmasked("evaluation", leaf)
        self._check_functions()
        altered = self.frozen is not None or self.augment is not None
        if self.weighted is not None and altered:
            raise ValueError(
                "weighted is given with frozen values or augment, of which it would not know; "
                "leave it None"
            )

    def _check_functions(self) -> None:
        """Refuse functions of one record that hold others, and what cannot be trained."""
        x, y = jax.eval_shape(lambda x, y: (x[0], y[0]), self.x, self.y)
        key = jax.eval_shape(lambda: jax.random.key(0, impl=_numerics.THREEFRY))
        augmentation = self.augmentation
        if augmentation is not None:
            _check_closure("augment", augmentation.augment, (key, x), self.x)
        # Shapes alone: a pretrained model need not fit twice.
        trained = jax.eval_shape(self.init, jax.random.key(0))
        leaves = jax.tree.leaves(trained)
        floating = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
        if not floating or not sum(leaf.size for leaf in leaves):
            raise ValueError(
                f"init returns {_validate.shown(trained)}; return a pytree of floating-point "
                "arrays to train, and move others to frozen"
            )
        params = parameters.merge(trained, self.frozen)
        _check_loss("loss", _check_closure("loss", self.loss, (params, x, y), self.x))
        if self.batch_loss is not None:
            batch = _numerics.shapes((x, y), 2, dropped=0)
            _check_loss("batch_loss", jax.eval_shape(self.batch_loss, params, *batch))

    @property
    def augmentation(self) -> query.Augmentation | None:
        """What stands in the place of each record; None where it is the record itself."""
        return query.augmentation_of(self.augment, self.augmentation_multiplicity, self.x[0])

    @property
    def agents(self) -> int:
        """Number of agents n."""
        return len(self.partition.counts)

    def fingerprint(self) -> str:
        """SHA-256 of the partition and the training data that all processes hold, in hexadecimal.

        Of records that they hold apart it has the shape and dtype of one.
        """
        # Dtype and shape too: the same bytes may be other records.
        digest = hashlib.sha256()
        # Processes with other records must agree on the digest.
        shared = slice(0 if self.local else None)
        for array in (self.x[shared], self.y[shared], *self.partition[:2]):
            array = np.ascontiguousarray(array)
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(array.data)
        return digest.hexdigest()


def _check_loss(name: str, value: jax.ShapeDtypeStruct) -> None:
    """Refuse a loss that is no real scalar."""
    # A loss may return a tree, which has neither.
    scalar = getattr(value, "shape", None) == ()
    if not scalar or not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(f"{name} returns {_validate.shown(value)}; return one real scalar")
