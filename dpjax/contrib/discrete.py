"""Sums under real Gaussian noise, and noise by a published rule and by tight ones."""

import math
from typing import Literal

from dpjax import _validate
from dpjax.accounting import discrete, gdp, losses
from dpjax.accounting.discrete import Cohort, RecordRelation

__all__ = ["gaussian_loss", "published_sigma", "sigma", "variance"]

_WIDE = 1 + 1e-12


def gaussian_loss(
    sensitivity: float,
    variance: float,
    cohort: Cohort,
    *,
    rounds: int,
    participations: int,
    relation: RecordRelation,
) -> losses.Gaussian:
    """Return the loss of the same sums under real Gaussian noise: tight, and of no whole numbers.

    Args:
        sensitivity: D of one vector left out.
        variance: Of each client's noise, in the same unit, squared.
        cohort: The clients of each round.
        rounds: Rounds T.
        participations: Of what is protected.
        relation: "zero_out" or "replace".

    Returns:
        mu = D sqrt(participations / (n v)), twice that for replacement.

    Raises:
        ValueError: For numbers out of range, or more participations than rounds.
    """
    times = participations
    total = rounds
    if times > total:
        raise ValueError(f"participations is {times} of {total} rounds; give at most as many")
    moved = _validate.positive("sensitivity", sensitivity)
    if relation == "replace":
        # One record goes and another comes.
        moved *= 2
    noise = math.sqrt(cohort.honest * _validate.positive("variance", variance))
    mu = moved / noise * math.sqrt(times) * _WIDE
    return losses.Gaussian(mu, total, times == total)


def published_sigma(epsilon: float, delta: float) -> float:
    """Return the paper's sigma: 1 / (2 sigma^2) - zCDP, hence (epsilon, delta).

    sigma = max(1 / sqrt(epsilon), 2 sqrt(2 log(1 / delta)) / epsilon)

    Args:
        epsilon: Above 0.
        delta: Between 0 and 1.

    Raises:
        ValueError: For other numbers.

    Example:
        >>> from dpjax.contrib import discrete
        >>> round(discrete.published_sigma(2.0, 1e-5), 3)
        4.799
    """
    e = _validate.positive("epsilon", epsilon)
    d = _validate.probability("delta", delta)
    floor = 1 / math.sqrt(e)
    gaussian = 2 * math.sqrt(-2 * math.log(d)) / e
    return max(floor, gaussian) * _WIDE


def sigma(
    epsilon: float, delta: float, accountant: Literal["published", "zcdp", "gdp"] = "zcdp"
) -> float:
    """Return the noise over sensitivity that one sum takes for a budget, tau left out.

    Args:
        epsilon: Above 0.
        delta: Between 0 and 1.
        accountant: "published", the paper's rule; "zcdp", the best that zCDP allows; "gdp", exact,
            for real Gaussian noise alone.

    Raises:
        ValueError: For other numbers, or another accountant.
    """
    _validate.one_of("accountant", accountant, ("published", "zcdp", "gdp"))
    if accountant == "published":
        return published_sigma(epsilon, delta)
    if accountant == "gdp":
        return 1 / float(gdp.mu(epsilon, delta)) * _WIDE
    return 1 / math.sqrt(2 * discrete.largest_rho(epsilon, delta)) * _WIDE


def variance(sigma: float, sensitivity: float, participations: int, cohort: Cohort) -> float:
    """Return each client's noise: participations sigma^2 D^2 / (B - dropouts - colluders).

    Args:
        sigma: As of `sigma`.
        sensitivity: D, twice that of a vector left out for replacement.
        participations: Of what is protected.
        cohort: The clients of each round.

    Raises:
        ValueError: For numbers out of range.
    """
    s = _validate.positive("sigma", sigma) * _validate.positive("sensitivity", sensitivity)
    times = _validate.integer("participations", participations)
    return times * s**2 / cohort.honest * _WIDE
