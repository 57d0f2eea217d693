"""How discrete Gaussian variables are proposed: the whole numbers that all samplers share.

    sigma^2 = p / r,     q = sigma, rounded, at least 1,     s = r q
    u uniform in 0, ..., p - 1;   v with P(v) ~ e^-v;   a = floor((u + p v) / s);   a sign
    y = +-a is kept with probability exp(-(2 u + r (a - q)^2) / (2 p)), but for -0, which is not

(u + p v is kept with probability e^(-u/p) where its law shall be ~ exp(-x / p); then a is discrete
Laplace of scale p / s = sigma^2 / q, and exp(-a^2 / (2 sigma^2)) over its law is, up to a factor,
exp(-(a - q)^2 / (2 sigma^2)). The scale being sigma^2 over a whole number, all is rational with
small terms: p <= 2^20 lets everything be computed in words of 32 bits.)

Reference:
    Canonne, Kamath and Steinke (2020), The discrete Gaussian for differential privacy, algorithms
    1 to 3.
"""

import math
from fractions import Fraction
from typing import Any, NamedTuple

from dpjax import _validate

__all__ = ["LEAST", "MOST", "Proposal", "above", "proposal"]

LEAST = Fraction(1, 4)
"""The least variance: below, nearly every proposal would be turned down."""
MOST = 2**20
"""The largest variance, and the largest numerator of any."""


class Proposal(NamedTuple):
    """The numbers p, r, q of a variance.

    Attributes:
        numerator: p.
        denominator: r.
        centre: q, where proposals are turned down least.
    """

    numerator: int
    denominator: int
    centre: int

    @property
    def step(self) -> int:
        """s: how many of u + p v fall onto one number."""
        return self.denominator * self.centre

    @property
    def farthest(self) -> int:
        """The largest |a - q| whose exponent is below 2^32 / (2 p): 63.9 sigma at least."""
        return math.isqrt((2**32 - 2 * self.numerator) // self.denominator)


def proposal(variance: Any) -> Proposal:
    """Return the numbers of a variance.

    Args:
        variance: sigma^2, a whole number or a Fraction, from 1/4 to 2^20.

    Raises:
        ValueError: For floats, variances out of range, and fractions of too many digits.
    """
    whole = isinstance(variance, int) and not isinstance(variance, bool)
    if not whole and not isinstance(variance, Fraction):
        raise ValueError(
            f"variance is {_validate.shown(variance)}; give a whole number or a Fraction "
            "(dpjax.secagg.discrete.variance_above makes one of a float)"
        )
    value = Fraction(variance)
    if not LEAST <= value <= MOST:
        raise ValueError(
            f"variance is {_validate.shown(variance)} squared grid units; give one from {LEAST} to "
            f"{MOST}: the grid is too {'coarse' if value < LEAST else 'fine'} for this noise"
        )
    if value.numerator > MOST:
        raise ValueError(
            f"variance is {value}, of a numerator above 2^20; round it up to fewer digits, by "
            "dpjax.secagg.discrete.variance_above"
        )
    centre = max(1, (math.isqrt(4 * value.numerator // value.denominator) + 1) // 2)
    return Proposal(value.numerator, value.denominator, centre)


def above(value: Any) -> Fraction:
    """Return the least variance, of those that can be drawn with this many digits, not below one.

    Args:
        value: A number from 0 to 2^20.

    Raises:
        ValueError: For another one.
    """
    number = _validate.number("variance", value)
    if not 0 < number <= MOST:
        raise ValueError(
            f"variance is {_validate.shown(value)} squared grid units; give one above 0, to 2^20"
        )
    exact = max(Fraction(value) if isinstance(value, int | Fraction) else Fraction(number), LEAST)
    # The numerator is below 2^20 after rounding up.
    denominator = 2 ** max(0, 19 - math.floor(math.log2(exact)))
    while math.ceil(exact * denominator) > MOST:
        denominator //= 2
    return Fraction(math.ceil(exact * denominator), denominator)
