"""Exact conversions of Gaussian differential privacy, in float64, rounded to the safe side.

A mechanism is mu-GDP when telling two neighbouring inputs apart is at least as hard as telling
N(0, 1) from N(mu, 1). With x = epsilon / mu - mu / 2 and y = x + mu, the exact privacy profile is

    delta(mu, epsilon) = Phi(-x) - exp(epsilon) Phi(-y) = phi(x) (m(x) - m(y)),

where m(z) = Phi(-z) / phi(z) is Mills' ratio. The right-hand form neither overflows nor cancels;
everything here is solved in the logarithm of delta.
"""

import functools
from collections.abc import Callable
from math import inf

import numpy as np
from numpy.typing import ArrayLike

from dpjax import _validate
from dpjax.accounting.arrays import Numbers
from dpjax.accounting.rounding import TINY, UNIT

__all__ = ["delta", "epsilon", "mu", "rdp", "zcdp"]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)
# Largest relative error of exp(_log_delta) met against 60-digit arithmetic is 4e-13; see the tests.
_MARGIN = 1e-12
_STEPS = 80
# delta is below every float64 long before x = 1e4; beyond, x * x would overflow.
_FAR = 1e4
_MOST = 1e307
_RANGES = {
    "delta": (0.0, 1 - UNIT / 2, "numbers in [0, 1)"),
    "alpha": (1 + UNIT, inf, "orders above 1"),
}

GdpValue = float | Numbers


def _mills(z: Numbers) -> Numbers:
    """Mills' ratio Phi(-z) / phi(z)."""
    from scipy import special

    return np.sqrt(np.pi / 2) * special.erfcx(z / np.sqrt(2))


def _slope(z: Numbers) -> Numbers:
    """Return 1 - z m(z) = -m'(z), positive; its series where the difference would cancel."""
    square = 1 / np.maximum(z, 50.0) ** 2
    series = square * (1 - square * (3 - square * (15 - square * 105)))
    return np.where(z > 50, series, 1 - z * _mills(np.minimum(z, 50.0)))


def _log_delta(mu: Numbers, x: Numbers) -> Numbers:
    """Log of delta for mu > 0 and x = epsilon / mu - mu / 2 >= -mu / 2, relative error < 1e-12."""
    from scipy import special

    with np.errstate(all="ignore"):
        log_density = -0.5 * x * x - 0.5 * np.log(2 * np.pi)
        # m(x) - m(x + mu) cancels for small mu: integrate its derivative there instead.
        half = np.minimum(mu, 1.0)[..., None] / 2
        nodes = x[..., None] + half * (1 + _NODES)
        integral = (_slope(nodes) * _WEIGHTS).sum(-1) * half[..., 0]
        small = log_density + np.log(integral)
        tail = _mills(x + mu)
        difference = _mills(np.maximum(x, 0.0)) - tail
        right = log_density + np.log(difference)
        # Left of 0 delta is near 1: what it lacks is computed.
        missing = special.ndtr(x) + np.exp(log_density) * tail
        left = np.log1p(-missing)
    return np.where(mu < 1, small, np.where(x > 0, right, left))


def _threshold(mu: Numbers, epsilon: Numbers) -> Numbers:
    """Return x = epsilon / mu - mu / 2, cut where a larger one only makes delta smaller still."""
    with np.errstate(over="ignore"):
        return np.minimum(epsilon / mu - mu / 2, _FAR)


def _slack(mu: Numbers, x: Numbers) -> Numbers:
    """Bound on the error of `_log_delta`, the rounding of x in its argument included."""
    with np.errstate(over="ignore"):
        return _MARGIN + 4 * UNIT * (1 + abs(x)) * (abs(x) + mu)


def _arguments(**values: ArrayLike) -> list[Numbers]:
    """Broadcast float64 arguments, each checked against its range."""
    arrays = []
    for name, value in values.items():
        lower, upper, remedy = _RANGES.get(name, (0.0, inf, "numbers >= 0"))
        try:
            array = np.asarray(value, dtype=float)
        except (TypeError, ValueError):
            array = np.full((), np.nan)
        if not ((array >= lower) & (array <= upper)).all():
            raise _validate.refusal(name, value, f"give {remedy}")
        arrays.append(array)
    return list(np.broadcast_arrays(*arrays))


def _bisected(holds: Callable[[Numbers], Numbers], inside: Numbers, outside: Numbers) -> Numbers:
    """The last numbers that hold, between some that do and some that need not."""
    for _ in range(_STEPS):
        middle = inside + (outside - inside) / 2
        enough = holds(middle)
        inside = np.where(enough, middle, inside)
        outside = np.where(enough, outside, middle)
    return inside


def result(value: Numbers) -> GdpValue:
    """Return an array as it is, and one without axes as a float."""
    return float(value) if value.ndim == 0 else value


def delta(mu: ArrayLike, epsilon: ArrayLike) -> GdpValue:
    """Exact delta of a mu-GDP mechanism at epsilon, rounded up.

    delta = Phi(-epsilon/mu + mu/2) - exp(epsilon) Phi(-epsilon/mu - mu/2).

    Guarantee: never below the true delta; at most about 1e-11 above it, relatively.

    Args:
        mu: Gaussian-DP parameter, >= 0; infinity is no privacy.
        epsilon: Epsilon, >= 0, of any shape that broadcasts with mu.

    Returns:
        Delta in [0, 1], a float for scalars.

    Raises:
        ValueError: For a negative argument or NaN.

    Reference:
        Dong, Roth and Su (2022), Corollary 2.13; Balle and Wang (2018), Theorem 8.

    Example:
        >>> from dpjax.accounting import gdp
        >>> round(gdp.delta(mu=1.0, epsilon=1.0), 4)
        0.1269
    """
    m, e = _arguments(mu=mu, epsilon=epsilon)
    usual = (m > 0) & np.isfinite(m) & np.isfinite(e)
    safe_m = np.where(usual, m, 1.0)
    x = _threshold(safe_m, np.where(usual, e, 1.0))
    with np.errstate(over="ignore", under="ignore"):
        log_value = _log_delta(safe_m, x) + _slack(safe_m, x)
        value = np.minimum(np.exp(log_value), 1.0)
    # Below the normal range relative rounding is lost; the smallest normal number is above.
    value = np.maximum(value, TINY)
    value = np.where(usual, value, np.where(np.isinf(m), 1.0, 0.0))
    return result(value)


def epsilon(mu: ArrayLike, delta: ArrayLike) -> GdpValue:
    """Exact epsilon of a mu-GDP mechanism at delta, rounded up.

    The smallest epsilon >= 0 with delta(mu, epsilon) <= delta.

    Guarantee: never below the true epsilon.

    Args:
        mu: Gaussian-DP parameter, >= 0; infinity is no privacy.
        delta: Delta in [0, 1), of any shape that broadcasts with mu.

    Returns:
        Epsilon, a float for scalars; infinity for mu = infinity, or for mu > 0 at delta = 0.

    Raises:
        ValueError: For mu < 0, delta outside [0, 1), or NaN.

    Reference:
        Balle and Wang (2018), Theorem 8, solved by bisection.

    Example:
        >>> from dpjax.accounting import gdp
        >>> round(gdp.epsilon(mu=1.0, delta=1e-5), 4)
        4.3772
    """
    m, d = _arguments(mu=mu, delta=delta)
    if m.size != 1:
        return result(_epsilon(m, d))
    return result(np.full(m.shape, _single_epsilon(m.item(), d.item())))


@functools.lru_cache(maxsize=1_000)
def _single_epsilon(mu: float, delta: float) -> float:
    """Of one mu: noise, guarantee and audit ask for the same number, which takes 3 ms to find."""
    return float(_epsilon(np.asarray(mu), np.asarray(delta)))


def _epsilon(m: Numbers, d: Numbers) -> Numbers:
    """Search epsilon between 0 and what a Gaussian tail allows, as `epsilon` says."""
    usual = (m > 0) & np.isfinite(m) & (d > 0)
    m_ = np.where(usual, m, 1.0)
    log_d = np.log(np.where(usual, d, 0.1))
    # epsilon = mu (x + mu/2): searching x avoids the difference epsilon/mu - mu/2. The upper end
    # holds since delta <= Phi(-x) <= exp(-x^2/2) / 2.
    low = -m_ / 2
    high = np.sqrt(-2 * log_d)

    def holds(x: Numbers) -> Numbers:
        return _log_delta(m_, x) + _slack(m_, x) <= log_d

    at_zero = holds(low)
    high = _bisected(holds, high, low)
    with np.errstate(over="ignore"):
        rounding = 4 * UNIT * m_ * (abs(high) + m_)
        value = m_ * (high + m_ / 2) + rounding
    value = np.where(at_zero, 0.0, np.maximum(value, 0.0))
    unusual = np.where(m == 0, 0.0, inf)
    return np.where(usual, value, unusual)


def mu(epsilon: ArrayLike, delta: ArrayLike) -> GdpValue:
    """Largest mu whose mechanism is (epsilon, delta)-DP, rounded down: the calibration.

    Guarantee: a mechanism of the returned mu is (epsilon, delta)-DP, and ``epsilon(mu, delta)``
    of this module confirms it.

    Args:
        epsilon: Epsilon, >= 0; infinity is no privacy.
        delta: Delta in [0, 1), of any shape that broadcasts with epsilon.

    Returns:
        Mu, a float for scalars; 0 at delta = 0, infinity at epsilon = infinity.

    Raises:
        ValueError: For epsilon < 0, delta outside [0, 1), or NaN.

    Reference:
        Balle and Wang (2018), Algorithm 1, solved by bisection.

    Example:
        >>> from dpjax.accounting import gdp
        >>> round(gdp.mu(epsilon=1.0, delta=1e-5), 4)
        0.2681
    """
    e, d = _arguments(epsilon=epsilon, delta=delta)
    usual = np.isfinite(e) & (d > 0)
    # A smaller epsilon allows less, so cutting the largest ones, which overflow, is safe.
    e_ = np.where(usual, np.minimum(e, _MOST), 1.0)
    d_ = np.where(usual, d, 0.1)
    log_d = np.log(d_)

    def holds(m: Numbers) -> Numbers:
        x = _threshold(m, e_)
        # Four times the slack of `epsilon`, so that the two agree.
        return _log_delta(m, x) + 4 * _slack(m, x) <= log_d

    # Two lower bounds: delta(mu, epsilon) <= mu phi(0), and the Renyi-DP conversion's.
    root = np.sqrt(-2 * log_d)
    by_renyi = 2 * e_ / (np.sqrt(root**2 + 2 * e_) + root)
    low = np.maximum(2 * d_, by_renyi)
    high = 2 * low
    for _ in range(1100):
        enough = holds(high)
        if not enough.any():
            break
        low = np.where(enough, high, low)
        high = np.where(enough, 2 * high, high)
    low = _bisected(holds, low, high)
    # Where nothing above the proven bound passed the test, its own rounding is taken off.
    value = np.where(holds(low), low, low * (1 - 1e-11))
    return result(np.where(usual, value, np.where(np.isinf(e), inf, 0.0)))


def rdp(mu: ArrayLike, alpha: ArrayLike) -> GdpValue:
    """Renyi-DP epsilon of a mu-GDP Gaussian mechanism: alpha mu^2 / 2, rounded up.

    Args:
        mu: Gaussian-DP parameter, >= 0.
        alpha: Renyi order, > 1.

    Returns:
        Epsilon of order alpha, a float for scalars.

    Raises:
        ValueError: For mu < 0, alpha <= 1, or NaN.

    Reference:
        Mironov (2017), Proposition 7.

    Example:
        >>> from dpjax.accounting import gdp
        >>> round(gdp.rdp(mu=1.0, alpha=4.0), 6)
        2.0
    """
    return result(_half_square(*_arguments(mu=mu, alpha=alpha)))


def zcdp(mu: ArrayLike) -> GdpValue:
    """Zero-concentrated-DP parameter of a mu-GDP Gaussian mechanism: mu^2 / 2, rounded up.

    Args:
        mu: Gaussian-DP parameter, >= 0.

    Returns:
        Rho, a float for scalars.

    Raises:
        ValueError: For mu < 0 or NaN.

    Reference:
        Bun and Steinke (2016), Proposition 1.6.

    Example:
        >>> from dpjax.accounting import gdp
        >>> round(gdp.zcdp(mu=1.0), 6)
        0.5
    """
    return result(_half_square(*_arguments(mu=mu)))


def _half_square(m: Numbers, times: Numbers | float = 1.0) -> Numbers:
    """``times m^2 / 2``, above its own rounding and underflow; 0 where m is."""
    shift = np.where(m == 0, 1.0, m)
    with np.errstate(over="ignore", under="ignore"):
        value = np.maximum(times * shift * shift / 2 * (1 + 4 * UNIT), TINY)
    return np.asarray(np.where(m == 0, 0.0, value))
