"""Probabilities as text: rounded up as losses are, and never to what they are not."""

from dpjax._rounding import up

__all__ = ["text"]


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
