"""The quadratics of the Whisper paper, whose minimum is known."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dpjax import _validate
from dpjax.data.partition import Partition
from dpjax.learning.parameters import ConstantInit, Params
from dpjax.learning.problem import Problem

__all__ = ["quadratics"]


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
        >>> from dpjax.learning.quadratics import quadratics
        >>> quadratics(6).agents
        6
    """
    _validate.one_of("start", start, ("origin", "optimum"))
    agents = _validate.integer("agents", agents)
    matrices, centers, minimiser, minimum = _objectives(agents)
    values = np.zeros(2) if start == "origin" else minimiser
    # A record is (A_i, c_i), flattened.
    flat = matrices.reshape(agents, 4)
    x = np.concatenate([flat, centers], axis=1).astype(np.float32)
    rows = np.arange(agents, dtype=np.int32)
    partition = Partition(rows[:, None], np.ones(agents, np.int32))
    return Problem(
        ConstantInit.of(jnp.asarray(values, jnp.float32)),
        _quadratic,
        _gaps,
        x,
        np.zeros(agents, np.float32),
        partition,
        (x, np.float32(minimum)),
        f"quadratics from the {start}",
        evaluation_data="public",
    )


def _objectives(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """f_i(x) = (x - c_i)' A_i (x - c_i) of agents 1..n, and the minimum of their average.

    f_i(x) = 15 (x_1 + i)^2 + x_2^2 for i <= n/2, and 15 (x_1 - i)^2 + x_2^2 turned by 15 degrees
    counter-clockwise about its own minimiser (i, 0) above. The average is minimal at
    x* = (sum A_i)^-1 sum A_i c_i, where it is (1/n) sum (c_i - x*)' A_i c_i.

    Returns:
        A [n, 2, 2], c [n, 2], x* [2] and f(x*), float64.

    Reference:
        Rodio et al., Whisper D-SGD, (11).
    """
    number = np.arange(1, n + 1, dtype=np.float64)
    first = 2 * number <= n
    positions = np.where(first, -number, number)
    centers = np.stack([positions, np.zeros(n)], axis=1)
    diagonal = np.diag([15.0, 1.0])
    angle = np.deg2rad(15.0)
    # Counter-clockwise.
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrices = np.where(first[:, None, None], diagonal, rotation @ diagonal @ rotation.T)
    # A_i c_i, the linear terms.
    linear = np.einsum("nij,nj->ni", matrices, centers)
    minimiser = np.linalg.solve(matrices.sum(axis=0), linear.sum(axis=0))
    values = np.sum((centers - minimiser) * linear, axis=1)
    return matrices, centers, minimiser, float(np.mean(values))


def _quadratic(params: Params, x: Array, y: Array | None) -> Array:
    del y
    offset = params - x[4:]
    return offset @ x[:4].reshape(2, 2) @ offset


def _gaps(models: Array, evaluation: tuple[Array, Array]) -> dict[str, Array]:
    records, minimum = evaluation
    own_values = jax.vmap(_quadratic, in_axes=(0, 0, None))(models, records, None)
    at_model = jax.vmap(_quadratic, in_axes=(None, 0, None))
    values = at_model(models.mean(axis=0), records, None)
    return {"optimality_gap": own_values.mean() - minimum, "mean_gap": values.mean() - minimum}
