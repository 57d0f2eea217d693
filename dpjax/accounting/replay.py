"""An audit by messages: how well the best linear test tells two neighbouring data sets apart.

`measured` takes the messages of two runs with the same noise, from whatever code made them.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy import special

from dpjax import _validate

__all__ = ["Measured", "measured"]

# Messages are float32: what is smaller than these is their rounding.
_BARE, _LEFT, _FLAT = 1e-5, 1e-3, 1e-9


class Measured(NamedTuple):
    """The loss of one pair of neighbours, measured.

    Attributes:
        mu: How far apart the two data sets are, in standard deviations of the best linear test.
        low: Lower end of the interval for it.
        high: Upper end.

    Example:
        >>> from dpjax.accounting.replay import Measured
        >>> Measured(mu=0.5, low=0.49, high=0.51).low
        0.49
    """

    mu: float
    low: float
    high: float


def measured(messages: Any, neighbours: Any, *, confidence: float = 0.95) -> Measured:
    """Return the Gaussian-DP mu of one pair of neighbours, from messages that were recorded.

    Both runs of a seed have the same noise, so that their messages differ by what the data move
    alone, d. With S the covariance of the messages over seeds, mu^2 = d' S^-1 d: the whitened
    difference, the best linear test, and the best test of all for Gaussian noise whose size does
    not depend on the data. Where d leads out of what the noise reaches, mu is infinite.

    Guarantee: none. It is a lower bound on the loss, of this pair and this attacker: another pair
    may lose more. The interval is exact for Gaussian messages that are independent over seeds:
    d' S^-1 d is then mu^2 over a chi-square variable (Muirhead, Theorem 3.2.12).

    Args:
        messages: [S, ...] all that the attacker sees and knows, one run a seed, noise included.
        neighbours: [S, ...] the same of the neighbouring data, with the same noise.
        confidence: Of the interval.

    Returns:
        The loss and its interval.

    Raises:
        ValueError: For fewer runs than four times the numbers of one, arrays of other shapes, or
            differences that depend on the noise by more than a fiftieth: gradients that react to
            noise need replayed messages (`dpjax.engine.trace.empirical_sensitivity`).

    Reference:
        Dong, Roth and Su (2022), Gaussian differential privacy, for mu.

    Example:
        >>> import numpy as np
        >>> from dpjax.accounting import replay
        >>> noise = np.random.default_rng(0).normal(size=(20_000, 2))
        >>> found = replay.measured(2 * noise, 2 * noise + [1.0, 0.0])
        >>> found.low < 0.5 < found.high, round(found.mu, 2)
        (True, 0.5)
    """
    share = _validate.probability("confidence", confidence)
    one, other = (
        _validate.finite_array(name, given).reshape(len(given), -1).astype(np.float64)
        for name, given in (("messages", messages), ("neighbours", neighbours))
    )
    runs, size = one.shape
    if other.shape != one.shape:
        raise ValueError(
            f"neighbours has {other.shape} numbers, messages {one.shape}; record the same runs"
        )
    if runs < 4 * size:
        raise ValueError(
            f"messages has {runs} runs of {size} numbers; give {4 * size} runs at least"
        )
    apart = other - one
    d = apart.mean(axis=0)
    if np.sqrt(((apart - d) ** 2).sum(axis=1).mean()) > 0.02 * np.linalg.norm(d):
        raise ValueError(
            "neighbours differs from messages by amounts that depend on the noise; give gradients "
            "that do not react to it, or replay the messages (engine.trace.empirical_sensitivity)"
        )
    if not d.any():
        return Measured(0.0, 0.0, 0.0)
    centred = one - one.mean(axis=0)
    spread = centred.std(axis=0)
    # Entries in units of their own noise; those that have none are told apart at once.
    bare = spread <= _BARE * (np.abs(one).max(axis=0) + np.abs(d))
    if (np.abs(d[bare]) > _BARE * np.abs(d).max()).any():
        return Measured(np.inf, np.inf, np.inf)
    scaled, d = centred[:, ~bare] / spread[~bare], d[~bare] / spread[~bare]
    values, vectors = np.linalg.eigh(scaled.T @ scaled / runs)
    held = values > _FLAT * values[-1]
    along = vectors.T @ d
    if np.linalg.norm(along[~held]) > _LEFT * np.linalg.norm(d):
        return Measured(np.inf, np.inf, np.inf)
    squared = float(np.sum(along[held] ** 2 / values[held])) / runs
    free = runs - held.sum()
    tails = np.array([0.5, (1 - share) / 2, (1 + share) / 2])
    mu, low, high = np.sqrt(squared * 2 * special.gammaincinv(free / 2, tails))
    return Measured(float(mu), float(low), float(high))
