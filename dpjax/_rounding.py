"""The one place where losses are rounded up, as numbers and as text."""

import math
from decimal import ROUND_CEILING, Context, Decimal

__all__ = ["MARGIN", "up"]

MARGIN = 1 + 1e-15
"""Times this, a loss of a few float64 operations is not below what exact ones would give."""


def up(value: float, digits: int = 6) -> str:
    """Return a loss as text, rounded up: what is printed is never below what is stated.

    Six digits show a budget of 4 as 4; tables and figures, whose columns are narrow, have four.

    Args:
        value: A loss, or a noise that must not be less.
        digits: Significant digits.
    """
    if not math.isfinite(value):
        return str(value)
    # The shortest decimal that is this number: 1e-5 is told as such, not as the digit above it.
    shortest = Decimal(repr(float(value)))
    rounded = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(shortest)
    return f"{float(rounded):.{digits}g}"
