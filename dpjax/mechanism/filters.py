"""Filters over rounds: what a fixed linear recursion does to privatised gradients.

    m_t = - sum_{k=1..p} a_k m_{t-k} + sum_{k=0..q} b_k g_{t-k}          sum b - sum a = 1

is the sum over the past of kappa_k g_{t-k}, kappa its impulse response. A filter is post-processing
of what was made private: no function here touches a guarantee. ``a`` is without its leading 1,
unlike scipy's. Everything is float64, numpy in and numpy out.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Complex, Float

from dpjax import _validate

__all__ = [
    "Filter",
    "check_filter",
    "impulse_response",
]

Coefficients: TypeAlias = Sequence[float] | np.ndarray

# How far sums of coefficients as printed may be from 1.
_SUM = 1e-9
# Poles closer to the unit circle do not settle within any run.
_RADIUS = 1 - 1e-6
_FIRST = 10_000


class Filter(NamedTuple):
    """Coefficients of a recursion.

    Attributes:
        b: Weights of this gradient and the ones before, b_0 first.
        a: Weights of earlier outputs, a_1 first; empty for a finite response.

    Example:
        >>> from dpjax.mechanism.filters import Filter
        >>> filter = Filter((0.1,), (-0.9,))
    """

    b: tuple[float, ...]
    a: tuple[float, ...] = ()


def _over(divisor: float, b: Coefficients, a: Coefficients) -> Filter:
    """Coefficients as printed, over their common divisor."""
    return Filter(tuple(x / divisor for x in b), tuple(x / divisor for x in a))


PUBLISHED = {
    "sgd": Filter((1.0,)),
    "momentum": Filter((0.1,), (-0.9,)),
    "first v1": _over(11, (1, 1), (-9,)),
    "first v2": _over(11, (3, -1), (-9,)),
    "second": _over(58, (1, 2, 1), (-92, 38)),
    "f1": Filter((0.075, 0.025), (-0.9,)),
    "f2": Filter((0.025, 0.075), (-0.9,)),
    "f3": Filter((0.1, 0.1), (-0.8,)),
    "f4": Filter((0.2, 0.2), (-0.6,)),
    "f5": Filter((0.025, 0.05, 0.025), (-0.9,)),
    "f6": Filter((0.025, 0.025), (-1.8, 0.85)),
}
"""The published filters by name (Zhang et al., DOPPLER, Tables 2 and 4)."""


def check_filter(b: Coefficients, a: Coefficients = ()) -> Filter:
    """Refuse coefficients that no run should use.

    Args:
        b: b_0 .. b_q.
        a: a_1 .. a_p, without the leading 1.

    Returns:
        The same as plain numbers.

    Raises:
        ValueError: For no b, numbers that are not finite, sum b - sum a other than 1 (the filter
            would scale gradients), a pole on or outside the unit circle (the output would not
            settle), or a response to ones that is not above 0 in every round (the correction of
            the zero start divides by it).

    Example:
        >>> from dpjax.mechanism import filters
        >>> filters.check_filter((0.1,), (-0.9,))
        Filter(b=(0.1,), a=(-0.9,))
    """
    numerator = _coefficients("b", b)
    denominator = _coefficients("a", a)
    if numerator.size == 0:
        raise ValueError("b is empty; give b_0 at least, (1.0,) for no filter")
    total = numerator.sum() - denominator.sum()
    if abs(total - 1) > _SUM:
        raise ValueError(
            f"sum b - sum a is {total:.10g}; it must be 1, so that a constant gradient passes as "
            "it is: divide b by (sum b) / (1 + sum a)"
        )
    radius = np.abs(poles(denominator)).max(initial=0.0)
    if radius > _RADIUS:
        raise ValueError(
            f"a has a pole of modulus {radius:.6g}; give coefficients whose poles, the roots of "
            "x^p + a_1 x^(p-1) + ..., lie inside the unit circle"
        )
    result = Filter(tuple(map(float, numerator)), tuple(map(float, denominator)))
    settled = len(numerator) + 1  # Rounds after which the response has, within bounds.
    if radius > 0:
        settled = int(min(_FIRST, settled - 1 + np.ceil(np.log(1e-9) / np.log(radius))))
    # The step response is the running sum of the impulse response.
    smallest = np.cumsum(impulse_response(*result, settled)).min()
    if smallest <= 0:
        raise ValueError(
            f"the response of b, a to ones falls to {smallest:.3g}; the zero start is corrected by "
            "dividing by it, so give a filter whose step response stays above 0 (b_0 > 0)"
        )
    return result


def _coefficients(name: str, value: Coefficients) -> np.ndarray:
    """One coefficient each, none allowed."""
    if isinstance(value, list | tuple | np.ndarray) and np.shape(value)[:1] == (0,):
        return np.zeros(0)
    is_scalar = isinstance(value, float | int | np.number)
    return _validate.finite_array(name, [value] if is_scalar else value, ndim=1)


def poles(a: Coefficients) -> Complex[np.ndarray, " p"]:
    """Return the poles: roots of x^p + a_1 x^(p-1) + .. + a_p. Inside the unit circle is stable.

    The paper prints the test for 1 + sum_k a_k x^k, whose roots are the reciprocals: it would
    refuse every recursive filter that the paper uses.

    Args:
        a: a_1 .. a_p.
    """
    return np.roots(np.concatenate([[1.0], np.asarray(a, float)]))


def impulse_response(b: Coefficients, a: Coefficients, rounds: int) -> Float[np.ndarray, " t"]:
    """Return kappa_0 .. kappa_{T-1}: m_t = sum_k kappa_k g_{t-k}.

    Args:
        b: b_0 .. b_q.
        a: a_1 .. a_p, without the leading 1.
        rounds: T.

    Reference:
        DOPPLER, (5).

    Example:
        >>> from dpjax.mechanism import filters
        >>> filters.impulse_response((0.5, 0.5), (), rounds=3).tolist()
        [0.5, 0.5, 0.0]
    """
    from scipy import signal

    impulse = np.zeros(_validate.integer("rounds", rounds))
    impulse[0] = 1.0
    return signal.lfilter(np.asarray(b, float), np.concatenate([[1.0], a]), impulse)
