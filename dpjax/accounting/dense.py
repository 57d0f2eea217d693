"""The attacker's view as two dense matrices, O = A G + B Z: the slow route, and the oracle."""

import numpy as np
from jaxtyping import Float

from dpjax import _validate
from dpjax.accounting.kalman import DROPPED, KEPT, LEAK, Energies, Model, rounding
from dpjax.mechanism.participation import Participation

__all__ = ["energies"]

LARGEST = 3 * 2**30
"""Bytes that A and B together may take."""


def materialize(
    model: Model, rounds: int
) -> tuple[Float[np.ndarray, "a b"], Float[np.ndarray, "a c"]]:
    """Stack ``rounds`` rounds of a model.

    Args:
        model: The model.
        rounds: T.

    Returns:
        A [T m, T n] and B [T m, T q]; rows and columns by round first.

    Raises:
        ValueError: If they would take more than `LARGEST` bytes.
    """
    m, n, q = (part.shape[k] for part, k in ((model[3], 1), (model[1], 2), (model[2], 2)))
    _validate.memory("rounds", rounds, "a dense view", rounds * m, rounds * (n + q), most=LARGEST)
    return stacked(model, rounds)


def stacked(model: Model, rounds: int, prime: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """A and B of `materialize`, for floats or whole numbers.

    Args:
        model: The model.
        rounds: T.
        prime: Modulo which entries are taken, int64; None takes them as they are.
    """

    def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        if prime is None:
            return np.tensordot(left, right, 1)
        total = np.zeros((len(left), *right.shape[1:]), right.dtype)
        for k in range(left.shape[1]):
            total = (total + left[:, k, None, None] * right[None, k]) % prime
        return total

    sides = []
    for entering, seen in ((model.gradient, model.gradient_seen), (model.noise, model.noise_seen)):
        size, columns = entering.shape[1:]
        state = np.zeros((size, rounds, columns), entering.dtype)
        rows = np.zeros((rounds, seen.shape[1], rounds, columns), seen.dtype)
        for t in range(rounds):
            step = model.at(t)
            rows[t] = product(step.state_seen, state)
            rows[t, :, t] += seen[t % len(seen)]
            state = product(step.transition, state)
            state[:, t] += entering[t % len(entering)]
        sides.append(rows.reshape(rounds * seen.shape[1], -1))
    return sides[0], sides[1]


def energies(
    a: Float[np.ndarray, "a b"],
    b: Float[np.ndarray, "a c"],
    participation: Participation,
) -> Energies:
    """`dpjax.accounting.kalman.energies` by the singular values of B.

    Args:
        a: [R, T n] A.
        b: [R, T q] B.
        participation: Which rounds go together; its rounds are T.

    Returns:
        The energies (C' B^+ B C)_(s,u),(t,u), with A = B C.

    Example:
        >>> import numpy as np
        >>> from dpjax.accounting import dense, kalman
        >>> from dpjax.mechanism.participation import Participation
        >>> once = Participation(2, 1, 2)
        >>> found = dense.energies(np.eye(2), 2 * np.eye(2), once)
        >>> kalman.pattern_sums(found.values, once).tolist()  # 1 / 2^2
        [0.25]
    """
    rounds, n = participation.rounds, a.shape[1] // participation.rounds
    scale = np.abs(b).max(axis=1, initial=0.0)
    # Rows that carry no noise at all must carry no gradient either.
    noisy = scale > 0
    leak = (a[~noisy] != 0).any(axis=0).astype(np.float64)
    a, b = a[noisy] / scale[noisy, None], b[noisy] / scale[noisy, None]
    # Twice: squares of tiny entries vanish.
    norms = np.linalg.norm(b, axis=1, keepdims=True)
    a, b = a / norms, b / norms
    u, singular, _ = np.linalg.svd(b, full_matrices=False)
    kept = singular > DROPPED
    least = float(singular[kept].min(initial=np.inf))
    condition = max(1.0, float(singular.max(initial=0.0)) / least)
    hidden = int(kept.sum()) < len(b)
    turned = u[:, kept].T @ a
    if hidden:
        left = np.abs(a - u[:, kept] @ turned).max(0) / np.maximum(np.abs(a).max(0), 1e-300)
        leak = np.maximum(leak, np.where(left >= LEAK, left, 0.0))
    white = (turned / singular[kept, None]).reshape(-1, rounds, n)
    values = np.zeros((rounds, participation.epochs, n))
    for lag in range(participation.epochs):
        step = lag * participation.separation
        with np.errstate(over="ignore"):
            values[step:, lag] = (white[:, step:] * white[:, : rounds - step]).sum(axis=0)
    terms = np.abs(u[:, kept].T) @ np.abs(a) / singular[kept, None]
    rate = 8 * np.finfo(np.float64).eps * (1 + condition)
    blur = rate * np.linalg.norm(terms, axis=0).reshape(rounds, n)
    leak, margin = leak.reshape(rounds, n).max(0), rounding(values, blur, participation)
    return Energies(values, leak, least < KEPT, condition, hidden=hidden, rounding=margin)
