"""What is learned: a model, one example's loss, data over agents, and what is measured."""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from dpjax import _validate
from dpjax.data.partition import Partition
from dpjax.models import losses

__all__ = ["LOSSES", "Problem", "supervised"]

LOSSES: dict[str, tuple[Callable, Callable | None]] = {
    "logistic": (losses.logistic, losses.sign_accuracy),
    "cross_entropy": (losses.cross_entropy, losses.multiclass_accuracy),
    "squared": (losses.squared, None),
}
"""Losses by name, each with the score that is reported beside it."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A learning problem over n agents.

    Attributes:
        init: ``init(key) -> params`` of one agent; all agents start alike.
        loss: ``loss(params, x, y) -> scalar`` of one example.
        metrics: ``metrics(params, evaluation) -> {name: scalar}`` of agent-stacked params.
        x: [N, ...] examples, one array for all agents.
        y: [N] labels or targets.
        partition: Which rows belong to which agent.
        evaluation: Pytree of arrays handed to ``metrics``.
        name: For records.
    """

    init: Callable[[PRNGKeyArray], Any]
    loss: Callable[[Any, Any, Any], Any]
    metrics: Callable[[Any, Any], dict[str, Any]]
    x: np.ndarray
    y: np.ndarray
    partition: Partition
    evaluation: Any
    name: str = "problem"

    def __post_init__(self) -> None:
        """Refuse data that would fail or mislead later."""
        _validate.finite_array("x", self.x)
        if len(self.x) != len(self.y):
            raise ValueError(f"x has {len(self.x)} rows and y {len(self.y)}; give one label a row")
        indices = np.asarray(self.partition.indices)
        if indices.min() < 0 or indices.max() >= len(self.x):
            raise ValueError(
                f"partition.indices reach {indices.max()}, x has {len(self.x)} rows; "
                "partition the same data"
            )

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
) -> Problem:
    """A flax model, a named loss, and arrays.

    The metrics are the test loss (and accuracy) of every agent's model on the pooled test set,
    averaged over agents.

    Args:
        model: Module whose ``apply`` maps [..., features] to scores or logits.
        loss: One of `LOSSES`; logistic wants labels -1 and +1, cross_entropy 0 .. c-1.
        train: x [N, ...] and y [N].
        test: x [M, ...] and y [M].
        partition: The training rows of each agent.
        name: For records.

    Returns:
        The problem.

    Raises:
        ValueError: For an unknown loss, NaN in the data, or labels the loss cannot take.
    """
    _validate.one_of("loss", loss, LOSSES)
    arrays = []
    for split, (x, y) in (("train", train), ("test", test)):
        x = _validate.finite_array(f"{split} x", x).astype(np.float32)
        y = _labels(loss, split, y)
        if len(x) != len(y):
            raise ValueError(f"{split} x has {len(x)} rows, y {len(y)}; give one label a row")
        arrays.append((x, y))
    try:
        functions = _functions(model, loss, arrays[0][0].shape[1:])
    except TypeError:  # A module with an unhashable field: no sharing of compiled code.
        functions = _functions.__wrapped__(model, loss, arrays[0][0].shape[1:])
    (x, y), evaluation = arrays
    return Problem(*functions, x, y, partition, evaluation, name)


def _labels(loss: str, split: str, y: Any) -> np.ndarray:
    y = _validate.finite_array(f"{split} y", y, ndim=1)
    if loss == "logistic" and not np.isin(y, (-1, 1)).all():
        raise ValueError(
            f"{split} y holds {sorted(set(y.tolist()))[:4]}; the logistic loss takes -1 and +1"
        )
    if loss == "cross_entropy":
        if (y != np.round(y)).any() or y.min() < 0:
            raise ValueError(f"{split} y holds {y.min()}; cross_entropy takes classes 0 .. c-1")
        return y.astype(np.int32)
    return y.astype(np.float32)


@functools.lru_cache(maxsize=64)
def _functions(model: nn.Module, loss: str, shape: tuple[int, ...]) -> tuple:
    """Functions of one model and loss; the same objects each time, so compiled code is shared."""
    loss_fn, score_fn = LOSSES[loss]

    def init(key: PRNGKeyArray) -> Any:
        return model.init(key, jnp.zeros((1, *shape), jnp.float32))

    def example_loss(params: Any, x: Any, y: Any) -> Any:
        return loss_fn(model.apply(params, x[None])[0], y)

    def metrics(params: Any, evaluation: Any) -> dict[str, Any]:
        x, y = evaluation

        def of_agent(agent_params: Any) -> dict[str, Any]:
            outputs = model.apply(agent_params, x)
            result = {"test_loss": jnp.mean(loss_fn(outputs, y))}
            if score_fn is not None:
                result["test_accuracy"] = jnp.mean(score_fn(outputs, y))
            return result

        return jax.tree.map(jnp.mean, jax.vmap(of_agent)(params))

    return init, example_loss, metrics
