"""The attacker's view as two dense matrices, O = A G + B Z: the slow route, and exact ranks.

Float64 matrices are dyadic rationals. Ranks are taken modulo two primes: a residue's rank is
never above the true one and below it with a chance of about 1e-9 a prime.
"""

import functools
from fractions import Fraction

import numpy as np

from dpjax import _validate
from dpjax.accounting.arrays import Flags, Indices, Matrix, Numbers, Sides
from dpjax.accounting.kalman import (
    CERTAIN,
    DROPPED,
    LEAK,
    TRACE,
    Energies,
    Model,
    ModelMaker,
    rounding,
)
from dpjax.accounting.rounding import UNIT
from dpjax.mechanism.participation import Participation

__all__ = ["energies"]

# Bytes that A and B together may take.
_LARGEST = 3 * 2**30
# Multiplications that deciding a rank may take.
_LARGEST_RANK = 2e8
_PRIMES = (2147483647, 2147483629)


def materialize(model: Model, rounds: int) -> Sides:
    """Stack ``rounds`` rounds of a model.

    Args:
        model: The model.
        rounds: T.

    Returns:
        A [T m, T n] and B [T m, T q]; rows and columns by round first.

    Raises:
        ValueError: If they would take more than 3 GiB.
    """
    observed = rounds * model.state_output.shape[1]
    columns = rounds * (model.gradient.shape[2] + model.noise.shape[2])
    _validate.memory("rounds", rounds, "a dense view", observed, columns, maximum=_LARGEST)
    return _stacked(model, rounds)


def _stacked(model: Model, rounds: int, prime: int | None = None) -> Sides:
    """A and B of `materialize`, for floats or whole numbers.

    Args:
        model: The model.
        rounds: T.
        prime: Modulo which entries are taken, int64; None takes them as they are.
    """

    def product(left: Numbers, right: Numbers) -> Numbers:
        if prime is None:
            return np.tensordot(left, right, 1)
        total = np.zeros((len(left), *right.shape[1:]), right.dtype)
        for k in range(left.shape[1]):
            total = (total + left[:, k, None, None] * right[None, k]) % prime
        return total

    sides = []
    for entering, output in (
        (model.gradient, model.gradient_output),
        (model.noise, model.noise_output),
    ):
        size, columns = entering.shape[1:]
        state = np.zeros((size, rounds, columns), entering.dtype)
        rows = np.zeros((rounds, output.shape[1], rounds, columns), output.dtype)
        for t in range(rounds):
            step = model.at(t)
            rows[t] = product(step.state_output, state)
            rows[t, :, t] += output[t % len(output)]
            state = product(step.transition, state)
            state[:, t] += entering[t % len(entering)]
        sides.append(rows.reshape(rounds * output.shape[1], -1))
    return sides[0], sides[1]


def energies(
    a: Matrix,
    b: Matrix,
    participation: Participation,
) -> Energies:
    """`dpjax.accounting.kalman.whitened_energies` by the singular values of B.

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
        >>> energies = dense.energies(np.eye(2), 2 * np.eye(2), once)
        >>> kalman.pattern_sums(energies.values, once).tolist()  # 1 / 2^2
        [0.25]
    """
    rounds = participation.rounds
    n = a.shape[1] // rounds
    scale = abs(b).max(axis=1, initial=0.0)
    # Rows that carry no noise at all must carry no gradient either.
    noisy = scale > 0
    leak = (a[~noisy] != 0).any(axis=0).astype(float)
    a = a[noisy] / scale[noisy, None]
    b = b[noisy] / scale[noisy, None]
    # Twice: squares of tiny entries vanish.
    norms = np.linalg.norm(b, axis=1, keepdims=True)
    a = a / norms
    b = b / norms
    u, singular, _ = np.linalg.svd(b, full_matrices=False)
    nonzero = singular > DROPPED
    smallest = singular[nonzero].min(initial=np.inf)
    condition = max(1.0, singular.max(initial=0.0) / smallest)
    hidden = int(nonzero.sum()) < len(b)
    # Directions that carry noise.
    u = u[:, nonzero]
    turned = u.T @ a
    if hidden:
        # What no noise covers, relative to the column that it is part of.
        uncovered = abs(a - u @ turned).max(0)
        residual = uncovered / np.maximum(abs(a).max(0), 1e-300)
        leak = np.maximum(leak, np.where(residual >= LEAK, residual, 0.0))
    white = (turned / singular[nonzero, None]).reshape(-1, rounds, n)
    values = np.zeros((rounds, participation.epochs, n))
    for lag in range(participation.epochs):
        step = lag * participation.separation
        late = white[:, step:]
        early = white[:, : rounds - step]
        with np.errstate(over="ignore"):
            values[step:, lag] = (late * early).sum(axis=0)
    terms = abs(u.T) @ abs(a) / singular[nonzero, None]
    rate = 8 * UNIT * (1 + condition)
    blur = rate * np.linalg.norm(terms, axis=0).reshape(rounds, n)
    leak = leak.reshape(rounds, n).max(0)
    margin = rounding(values, blur, participation)
    return Energies(values, leak, smallest < CERTAIN, None, hidden, margin, condition)


def ranks(model: Model, rounds: int) -> tuple[Indices, Flags]:
    """Rank of what is seen, and who shows without noise.

    Args:
        model: Its entries, float64 or fractions, are taken as they are.
        rounds: T.

    Returns:
        [T] rank of the noise of the first rounds, [n] True where a gradient of the agent shows in
        a combination without noise.
    """
    echelons = [_echelon(*_stacked_modulo(model, rounds, prime), prime) for prime in _PRIMES]
    # Each is right but for a chance in 1e9; where they differ the larger rank is.
    independent, shows = max(echelons, key=lambda echelon: int(echelon[0].sum()))
    count = independent.reshape(rounds, -1).sum(axis=1).cumsum()
    return count, np.asarray(shows.reshape(rounds, -1).any(axis=0))


def confirmed(model: Model, estimate: Energies, rational: ModelMaker | None) -> Energies:
    """Energies whose hidden combinations are confirmed to carry no noise, or left open.

    Args:
        model: The model that they are of.
        estimate: From `dpjax.accounting.kalman.whitened_energies`.
        rational: Makes the model again in fractions, where its float64 entries are rounded
            products; called only where it is small enough. None where they are meant as they are.

    Returns:
        The same with ``hidden`` and ``leak`` decided where ranks agree; else as given.
    """
    if estimate.rank is None or _work(model, len(estimate.rank)) > _LARGEST_RANK:
        return estimate
    count, shows = ranks(rational() if rational else model, len(estimate.rank))
    if (count != estimate.rank.cumsum()).any():
        return estimate
    # A trace that rounding of the matrices may have left stays open.
    leak = np.where(shows, np.maximum(estimate.leak, TRACE if rational else 1.0), 0.0)
    return estimate._replace(leak=leak, hidden=False)


def _work(model: Model, rounds: int) -> float:
    """Multiplications that eliminating the stacked rows takes."""
    used = np.zeros(model.state_output.shape[1])
    for part in model[3:]:
        used = np.maximum(used, (np.asarray(part) != 0).any(axis=2).mean(axis=0))
    columns = rounds * (model.gradient.shape[-1] + model.noise.shape[-1])
    return (used.sum() * rounds) ** 2 * columns / 2


def _stacked_modulo(model: Model, rounds: int, prime: int) -> Sides:
    """A and B modulo a prime."""

    @functools.cache
    def residue(value: float | Fraction) -> int:
        top, bottom = value.as_integer_ratio()
        return int(top * pow(bottom, -1, prime) % prime)

    residues = np.frompyfunc(residue, 1, 1)
    parts = [np.asarray(residues(part), np.int64) for part in model]
    return _stacked(Model(*parts), rounds, prime=prime)


def _echelon(a: Numbers, b: Numbers, prime: int) -> Sides:
    """Rows of B that no earlier ones span, and columns of A that show without noise."""
    width = b.shape[1]
    rows = np.concatenate([b, a], axis=1) % prime
    independent = np.zeros(len(b), bool)
    shows = np.zeros(a.shape[1], bool)
    for i, row in enumerate(rows):
        places = np.flatnonzero(row[:width])
        if not len(places):
            shows |= row[width:] != 0
            continue
        independent[i] = True
        below = rows[i + 1 :]
        hit = np.flatnonzero(below[:, places[0]])
        if len(hit):
            # Of the field of so many elements: division is by the inverse.
            inverse = pow(int(row[places[0]]), -1, prime)
            factor = below[hit, places[0]] * inverse % prime
            below[hit] = (below[hit] - factor[:, None] * row) % prime
    return independent, shows
