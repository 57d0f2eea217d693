"""Probabilities as text: rounded up as losses are, and never to what they are not."""

from dpjax._rounding import up

__all__ = ["loose", "text"]


def text(delta: float, digits: int = 6) -> str:
    """Return a delta as text, rounded up; below 1 it is not printed as 1, nor above 0 as 0.

    With delta 1 a guarantee says nothing at all, and one of .9999999 is not that guarantee.

    Args:
        delta: A probability.
        digits: Significant digits; more where it takes more to tell it from 1.
    """
    shown = up(delta, digits)
    while delta < 1 <= float(shown):
        digits += 1
        shown = up(delta, digits)
    return shown


def loose(delta: float, units: int, unit: str, *, more: bool = False) -> str:
    """Return what is wrong with a delta above one over the number of protected units, or "".

    Args:
        delta: A probability.
        units: How many agents, clients or records there are.
        unit: "agent", "client" or "record".
        more: Whether there may be more of them, ``units`` being all that is known.
    """
    if delta * units <= 1:
        return ""
    return (
        f"delta is {delta:g} for {'at least ' if more else ''}{units:,} {unit}s: above one "
        f"over their number it lets a method publish one of them as it is; give a delta "
        f"below {1 / units:.2g}"
    )
