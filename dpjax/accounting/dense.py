"""The attacker's view as two dense matrices, O = A G + B Z: the slow route, and the oracle."""

import numpy as np
from jaxtyping import Float

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
    check_size(rounds * m, rounds * (n + q))
    a, b = np.zeros((rounds, m, rounds, n)), np.zeros((rounds, m, rounds, q))
    size = model.transition.shape[-1]
    by_gradient, by_noise = np.zeros((size, rounds, n)), np.zeros((size, rounds, q))
    for t in range(rounds):
        here = model.at(t)
        a[t] = np.tensordot(here.state_seen, by_gradient, 1)
        b[t] = np.tensordot(here.state_seen, by_noise, 1)
        a[t, :, t] += here.gradient_seen
        b[t, :, t] += here.noise_seen
        by_gradient = np.tensordot(here.transition, by_gradient, 1)
        by_noise = np.tensordot(here.transition, by_noise, 1)
        by_gradient[:, t] += here.gradient
        by_noise[:, t] += here.noise
    return a.reshape(rounds * m, -1), b.reshape(rounds * m, -1)


def check_size(rows: int, columns: int) -> None:
    """Refuse a dense view beyond `LARGEST`."""
    size = 8 * rows * columns
    if size > LARGEST:
        raise ValueError(
            f"rounds gives a dense view of {rows} x {columns} numbers, {size / 2**30:.1f} GiB; "
            "account fewer rounds, or a strategy of few bands, which has a small state"
        )


def check_factors(a: Float[np.ndarray, "a b"], b: Float[np.ndarray, "a c"]) -> None:
    """Refuse a view with A != B C for every C: part of it is seen without noise.

    Args:
        a: [R, T n] A.
        b: [R, T q] B.

    Raises:
        ValueError: Saying how far A is from the range of B.
    """
    if not a.any():
        return
    # In units of a row's own noise, or of its gradients where it has none.
    units = np.where(b.any(axis=1), np.abs(b).max(axis=1, initial=0.0), np.abs(a).max(axis=1))
    units = np.where(units > 0, units, 1.0)[:, None]
    a, b = a / units, b / units
    u, values, _ = np.linalg.svd(b, full_matrices=False)
    u = u[:, values > DROPPED]
    left = float((np.abs(a - u @ (u.T @ a)) / np.abs(a).max(axis=0, initial=1e-300)).max())
    if left > 1e-9:
        raise ValueError(
            f"rounds gives a view with no C such that A = B C (distance {left:.1e}): some "
            "combination of messages carries gradients without noise, and the loss is infinite; "
            "materialize(rounds, check=False) returns A and B all the same"
        )


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
    """
    rounds, epochs, separation = (
        participation.rounds,
        participation.epochs,
        participation.separation,
    )
    n = a.shape[1] // rounds
    scale = np.abs(b).max(axis=1, initial=0.0)
    # Rows that carry no noise at all must carry no gradient either.
    noisy = scale > 0
    leak = (a[~noisy] != 0).any(axis=0).astype(np.float64)
    a, b = a[noisy] / scale[noisy, None], b[noisy] / scale[noisy, None]
    # Twice: squares of tiny entries vanish.
    norms = np.linalg.norm(b, axis=1, keepdims=True)
    a, b = a / norms, b / norms
    values = np.zeros((rounds, epochs, n))
    ambiguous, hidden, condition = False, False, 1.0
    blur = np.zeros((rounds, n))
    if len(b):
        u, singular, _ = np.linalg.svd(b, full_matrices=False)
        kept = singular > DROPPED
        ambiguous = bool((kept & (singular < KEPT)).any())
        condition = float(singular[0] / singular[kept].min())
        hidden = int(kept.sum()) < len(b)
        turned = u.T @ a
        if hidden:
            reached = np.maximum(np.abs(a).max(0), 1e-300)
            left = np.abs(a - u[:, kept] @ turned[kept]).max(0) / reached
            leak = np.maximum(leak, np.where(left >= LEAK, left, 0.0))
        white = (turned[kept] / singular[kept, None]).reshape(-1, rounds, n)
        terms = np.abs(u[:, kept].T) @ np.abs(a) / singular[kept, None]
        rate = 8 * np.finfo(np.float64).eps * (1 + condition)
        blur = rate * np.linalg.norm(terms, axis=0).reshape(rounds, n)
        for lag in range(epochs):
            step = lag * separation
            values[step:, lag] = np.einsum(
                "rtn,rtn->tn", white[:, step:], white[:, : rounds - step]
            )
    leak = leak.reshape(rounds, n).max(0)
    room = rounding(values, blur, participation)
    return Energies(values, leak, ambiguous, condition, hidden=hidden, rounding=room)
