"""The quadratics of the Whisper paper: one objective an agent, minimisers far apart."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dpjax import _validate

__all__: list[str] = []

_STEEP, _FLAT = 15.0, 1.0
_ANGLE = np.deg2rad(15.0)


class Quadratics(NamedTuple):
    """Objectives f_i(x) = (x - c_i)' A_i (x - c_i) and the minimum of their average.

    Attributes:
        matrices: [n, 2, 2] A_i, symmetric positive definite, float64.
        centers: [n, 2] c_i, the agents' own minimisers.
        minimiser: [2] x*, the minimiser of f = (1/n) sum_i f_i.
        minimum: f* = f(x*).
    """

    matrices: Float[np.ndarray, "n 2 2"]
    centers: Float[np.ndarray, "n 2"]
    minimiser: Float[np.ndarray, " 2"]
    minimum: float


def make(n: int) -> Quadratics:
    """Return the quadratics of n agents, numbered 1..n in the formula.

    f_i(x) = 15 (x_1 + i)^2 + x_2^2 for i <= n/2, and 15 (x_1 - i)^2 + x_2^2 turned by 15 degrees
    counter-clockwise about its own minimiser (i, 0) above. The average is minimal at
    x* = (sum A_i)^-1 sum A_i c_i, where it is (1/n) sum (c_i - x*)' A_i c_i.

    Args:
        n: Number of agents; where it is odd the smaller half comes first.

    Returns:
        The quadratics.

    Raises:
        ValueError: For n below 1.

    Reference:
        Rodio et al., Whisper D-SGD, (11).
    """
    n = _validate.integer("n", n)
    number = np.arange(1, n + 1, dtype=np.float64)
    first = 2 * number <= n
    centers = np.stack([np.where(first, -number, number), np.zeros(n)], axis=1)
    plain = np.diag([_STEEP, _FLAT])
    turn = np.array([[np.cos(_ANGLE), -np.sin(_ANGLE)], [np.sin(_ANGLE), np.cos(_ANGLE)]])
    matrices = np.where(first[:, None, None], plain, turn @ plain @ turn.T)
    pulled = np.einsum("nij,nj->ni", matrices, centers)
    minimiser = np.linalg.solve(matrices.sum(axis=0), pulled.sum(axis=0))
    minimum = float(np.mean(np.sum((centers - minimiser) * pulled, axis=1)))
    return Quadratics(matrices, centers, minimiser, minimum)


def value(matrix: Any, center: Any, x: Any) -> Any:
    """Return (x - c)' A (x - c), [...], of numpy or JAX arrays [..., 2, 2], [..., 2] and [..., 2].

    Args:
        matrix: A.
        center: c.
        x: Where.
    """
    offset = x - center
    return (offset[..., None, :] @ matrix @ offset[..., :, None])[..., 0, 0]


def gradient(matrix: Any, center: Any, x: Any) -> Any:
    """Return 2 A (x - c), [..., 2], of numpy or JAX arrays [..., 2, 2], [..., 2] and [..., 2].

    Args:
        matrix: A, symmetric.
        center: c.
        x: Where.
    """
    return 2 * (matrix @ (x - center)[..., :, None])[..., 0]
