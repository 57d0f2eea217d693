"""Strategies over rounds of few numbers, whose noise follows from that of a few rounds.

Guarantee: all have sensitivity 1 for the given participation, as in `dpjax.mechanism.temporal`,
where the optimum over all strategies is. ``dpjax.contrib.bands`` has the gap to it, and the best
banded Toeplitz strategy, for thousands of rounds.

With banded strategies a training loop makes noise from its last few rounds alone: C^-1 z is a
recursion over the last `bands` - 1 outputs, so a run holds that many noise arrays instead of T.
With at most b bands no two rounds of a pattern overlap in C'C.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import scipy.linalg

from dpjax import _validate
from dpjax._numerics import double_precision
from dpjax.mechanism import workload
from dpjax.mechanism.certificate import Vector
from dpjax.mechanism.factorization import Device, factor_of
from dpjax.mechanism.participation import Participation, check_participation
from dpjax.mechanism.strategy import Strategy
from dpjax.mechanism.temporal import normalized
from dpjax.topology.mixing import DenseMixing

__all__ = ["banded", "banded_inverse", "one_lag"]

_STALL = 1e-9  # relative decrease of a banded search's loss ...
_STALLED = 10  # ... over this many steps, below which the search ends
MAX_STEPS = 2000
"""Most steps of a search for banded strategies."""


def banded_inverse(participation: Participation, bands: int) -> Strategy:
    """Return the strategy of the banded inverse square root of prefix sums (BISR).

    C^-1 has r_0, .. r_{bands - 1} along its diagonals, sum_j r_j x^j = (1 - x)^(1/2): r_0 = 1,
    r_j = r_{j-1} (j - 3/2) / j. Noise of a round is a sum over `bands` rounds. C has no negative
    entry, so that its sensitivity is exact.

    Args:
        participation: when a record appears.
        bands: number of diagonals of C^-1, 1 (a scaled identity) to T.

    Returns:
        [T, T] C, lower triangular with a positive diagonal, of sensitivity 1.

    Raises:
        ValueError: for another number of diagonals.

    Reference:
        Kalinin, McKenna, Upadhyay and Lampert 2025, "Back to square roots", arXiv 2505.12128.

    Example:
        >>> import numpy as np
        >>> from dpjax.mechanism import banded
        >>> from dpjax.mechanism.participation import Participation
        >>> strategy = banded.banded_inverse(Participation(4, 1, 4), bands=3)
        >>> (np.linalg.inv(strategy)[:, 0] * strategy[0, 0]).round(3)
        array([ 1.   , -0.5  , -0.125,  0.   ])
    """
    rounds = check_participation(participation).rounds
    bands = _validate.integer("bands", bands)
    if bands > rounds:
        raise ValueError(f"bands is {bands}; give at most {rounds}, the number of rounds")
    order = np.arange(1, bands)
    # The binomial series of (1 - x)^(1/2).
    coefficients = np.cumprod(np.concatenate([[1.0], (order - 1.5) / order]))
    return normalized(_inverse_toeplitz(coefficients, rounds), participation)


def one_lag(participation: Participation, fraction: float) -> Strategy:
    """Return the strategy whose noise takes back a fraction of the last round's (DP-lambda-CGD).

    Round t adds d_t (z_t - fraction z_{t-1}), d_t = sqrt(sum_{j < T - t} fraction^2j) counting
    rounds from 0: C_st is fraction^(s - t) / d_t, with columns of norm 1. A run keeps the noise of
    one round, or draws it again from its key. C has no negative entry, so that its sensitivity is
    exact.

    Args:
        participation: when a record appears.
        fraction: lambda, from 0 (a scaled identity) to below 1.

    Returns:
        [T, T] C, lower triangular with a positive diagonal, of sensitivity 1.

    Raises:
        ValueError: for another fraction.

    Reference:
        Kalinin, McKenna, Pagh and Lampert 2026, "DP-lambda-CGD", arXiv 2601.22334.

    Example:
        >>> from dpjax.mechanism import banded
        >>> from dpjax.mechanism.participation import Participation
        >>> banded.one_lag(Participation(3, 1, 3), fraction=0.5).round(3)
        array([[0.873, 0.   , 0.   ],
               [0.436, 0.894, 0.   ],
               [0.218, 0.447, 1.   ]])
    """
    rounds = check_participation(participation).rounds
    remedy = "give a number from 0 to below 1"
    fraction = _validate.number("fraction", fraction, remedy=remedy, holds=lambda x: 0 <= x < 1)
    strategy = _inverse_toeplitz(np.array([1.0, -fraction])[:rounds], rounds)
    return normalized(strategy / np.linalg.norm(strategy, axis=0), participation)


def _inverse_toeplitz(coefficients: Vector, rounds: int) -> Strategy:
    """Return C for the coefficients along the diagonals of C^-1."""
    _validate.rounds_in_memory(rounds)
    first = np.zeros(rounds)
    first[0] = 1.0 / coefficients[0]
    for t in range(1, rounds):
        past = first[max(0, t - len(coefficients) + 1) : t][::-1]
        first[t] = -(coefficients[1 : len(past) + 1] @ past) * first[0]
    return np.asarray(scipy.linalg.toeplitz(first, np.zeros(rounds)))


def banded(
    mixing: DenseMixing,
    participation: Participation,
    bands: int,
    *,
    equal: bool = False,
    device: Device = None,
) -> Strategy:
    """Return the best strategy for MAFALDA's objective with C_st = 0 where s - t >= bands.

    jax_privacy's convex search over C'C. Where T = k b (or k = 1) columns may differ in norm;
    for other participations, or where asked for, they are held equal.

    Args:
        mixing: [n, n] W, or a schedule (`workload.gram`); [[1.0]] is one trusted server.
        participation: when a record appears.
        bands: number of diagonals, 1 (a scaled identity) to the participation's separation.
        equal: whether all columns have one norm: the largest one counts where batches are sampled.
        device: as for `temporal.solve`.

    Returns:
        [T, T] C, lower triangular with a positive diagonal, of sensitivity 1.

    Raises:
        ValueError: for more bands than the separation, or a bad mixing matrix.

    Reference:
        Choquette-Choo et al. 2023, "(Amplified) banded matrix factorization".

    Example:
        >>> from dpjax.mechanism import banded
    """
    from jax_privacy.matrix_factorization import dense

    rounds = participation.rounds
    k = participation.epochs
    bands = check_bands(participation, bands)
    gram = workload.gram(mixing, rounds)
    root = factor_of(gram / np.trace(gram))  # the search is tuned to losses near 1
    # Then the sensitivity is exact for unequal columns, too.
    exact = not equal and (k == 1 or rounds == k * participation.separation)
    with double_precision():
        optimum = dense.optimize(
            rounds,
            epochs=k if exact else 1,
            bands=bands,
            equal_norm=not exact,
            A=jax.device_put(root, device),
            max_optimizer_steps=MAX_STEPS,
            callback=stalled(),
        )
        strategy = np.array(optimum, dtype=np.float64)
    # Cholesky leaves rounding outside the bands, which would couple the rounds of a pattern.
    return normalized(np.tril(np.triu(strategy, 1 - bands)), participation)


def check_bands(participation: Participation, bands: int) -> int:
    """Return the number of bands, refused where two rounds of a pattern would overlap.

    Args:
        participation: when a record appears.
        bands: number of diagonals.

    Raises:
        ValueError: for more bands than the separation.
    """
    bands = _validate.integer("bands", bands)
    limit = participation.rounds if participation.epochs == 1 else participation.separation
    if bands > limit:
        raise ValueError(
            f"bands is {bands}; give at most {limit}, the rounds between two appearances"
        )
    return bands


def stalled() -> Callable[[Any], bool]:
    """Return a callback that ends a search whose loss no longer falls."""
    losses: list[float] = []

    def callback(step: Any) -> bool:
        losses.append(float(step.loss))
        if len(losses) <= _STALLED:
            return False
        return not losses[-1] < min(losses[:-_STALLED]) * (1.0 - _STALL)

    return callback
