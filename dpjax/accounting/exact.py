"""Rank decisions of small views in exact arithmetic, where float64 leaves them open.

Float64 matrices are dyadic rationals. Ranks are taken modulo two primes: a residue's rank is
never above the true one and below it with a chance of about 1e-9 a prime.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from dpjax.accounting import dense
from dpjax.accounting.kalman import Energies, Model

__all__: list[str] = []

LARGEST_RANK = 2e8
"""Multiplications that deciding a rank may take."""
_PRIMES = (2147483647, 2147483629)
_TRACE = 1e-300


def ranks(model: Model, rounds: int) -> tuple[Int[np.ndarray, " t"], Bool[np.ndarray, " n"]]:
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
    kept, shows = max(echelons, key=lambda each: int(each[0].sum()))
    count = np.cumsum(kept.reshape(rounds, -1).sum(axis=1))
    return count, np.asarray(shows.reshape(rounds, -1).any(axis=0))


def confirmed(model: Model, estimate: Energies, rational: Callable[[], Model] | None) -> Energies:
    """Energies whose hidden combinations are confirmed to carry no noise, or left open.

    Args:
        model: The model that they are of.
        estimate: From `dpjax.accounting.kalman.energies`.
        rational: Makes the model again in fractions, where its float64 entries are rounded
            products; called only where it is small enough. None where they are meant as they are.

    Returns:
        The same with ``hidden`` and ``leak`` decided where ranks agree; else as given.
    """
    if estimate.rank is None or _work(model, len(estimate.rank)) > LARGEST_RANK:
        return estimate
    count, shows = ranks(rational() if rational else model, len(estimate.rank))
    if (count != estimate.rank.cumsum()).any():
        return estimate
    # A trace that rounding of the matrices may have left stays open.
    leak = np.where(shows, np.maximum(estimate.leak, _TRACE if rational else 1.0), 0.0)
    return estimate._replace(leak=leak, hidden=False)


def _work(model: Model, rounds: int) -> float:
    """Multiplications that eliminating the stacked rows takes."""
    used = np.zeros(model.state_seen.shape[1])
    for part in model[3:]:
        used = np.maximum(used, (np.asarray(part) != 0).any(axis=2).mean(axis=0))
    columns = rounds * (model.gradient.shape[-1] + model.noise.shape[-1])
    return float(used.sum() * rounds) ** 2 * columns / 2


def _stacked_modulo(model: Model, rounds: int, prime: int) -> tuple[np.ndarray, np.ndarray]:
    """A and B modulo a prime."""

    @functools.cache
    def residue(value: Any) -> int:
        top, bottom = value.as_integer_ratio()
        return int(top * pow(bottom, -1, prime) % prime)

    whole = np.frompyfunc(residue, 1, 1)
    return dense.stacked(
        Model(*(whole(part).astype(np.int64) for part in model)), rounds, prime=prime
    )


def _echelon(a: np.ndarray, b: np.ndarray, prime: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of B that no earlier ones span, and columns of A that show without noise."""
    width, both = b.shape[1], np.concatenate([b, a], axis=1) % prime
    kept, shows = np.zeros(len(b), bool), np.zeros(a.shape[1], bool)
    for i, row in enumerate(both):
        places = np.flatnonzero(row[:width])
        if not len(places):
            shows |= row[width:] != 0
            continue
        kept[i] = True
        below = both[i + 1 :]
        hit = np.flatnonzero(below[:, places[0]])
        if len(hit):
            factor = below[hit, places[0]] * pow(int(row[places[0]]), -1, prime) % prime
            below[hit] = (below[hit] - factor[:, None] * row) % prime
    return kept, shows
