"""Losses and deltas rounded up, as numbers and as text."""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

__all__ = ()

MARGIN = 1 + 1e-15
"""Times this, a loss of a few float64 operations is not below what exact ones would give."""

# From 1 to the next number of float64, and its smallest one of full precision.
UNIT = 2.0**-52
TINY = 2.0**-1022


def up(value: float, digits: int = 6) -> str:
    """Return a loss as text, rounded up: what is printed is never below what is stated.

    Six digits show a budget of 4 as 4; tables and figures, whose columns are narrow, have four.

    Args:
        value: A loss, or a noise that must not be less.
        digits: Significant digits.
    """
    return _rounded(value, digits, ROUND_CEILING)


def down(value: float, digits: int = 6) -> str:
    """Return what is left of a budget as text, rounded down.

    Args:
        value: A loss.
        digits: Significant digits.
    """
    return _rounded(value, digits, ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> str:
    if not math.isfinite(value):
        return str(value)
    # The shortest decimal that is this number: 1e-5 stays 1e-5, not the digit above it.
    shortest = Decimal(repr(float(value)))
    rounded = Context(prec=digits, rounding=rounding).create_decimal(shortest)
    return f"{float(rounded):.{digits}g}"


def delta_text(delta: float, digits: int = 6) -> str:
    """Return a delta as text, rounded up; below 1 it is not printed as 1, nor above 0 as 0.

    With delta 1 a guarantee says nothing at all, and one of .9999999 is not that guarantee.

    Args:
        delta: A probability.
        digits: Significant digits; more where it takes more to tell it from 1.
    """
    text = up(delta, digits)
    while delta < 1 <= float(text):
        digits += 1
        text = up(delta, digits)
    return text


def loose_delta(delta: float, units: int, unit: str, *, open_ended: bool = False) -> str:
    """Return a warning of a delta above one over the number of protected units, or "".

    Args:
        delta: A probability.
        units: How many agents, clients or records there are.
        unit: "agent", "client" or "record".
        open_ended: Whether there may be more of them, ``units`` being all that is known.
    """
    if delta * units <= 1:
        return ""
    return (
        f"delta is {delta:g} for {'at least ' if open_ended else ''}{units:,} {unit}s: above one "
        f"over their number it lets a method publish one of them as it is; give a delta "
        f"below {1 / units:.2g}"
    )
