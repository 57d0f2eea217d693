"""Composed losses of sampled Gaussian rounds between two bounds, by a power of a transform.

Nothing here uses the package nor the library that it accounts with: a round's loss in closed form,
its probabilities on a lattice, and their power.
"""

import numpy as np
from scipy import fft, optimize, special

# What transforms and losses beyond the window may move a delta by.
SLACK = 1e-9
# A round's losses farther out than so many deviations are dropped: probability 1.4e-13.
REACH = 7.4


def cumulative(rate, ratio, present):
    """Return a round's Pr[loss <= l], of (1 - q) N(0, 1) + q N(r, 1) against N(0, 1) or back."""

    def place(loss):
        # Where log(1 - q + q exp(r x - r^2 / 2)) is the loss; -inf where it is nowhere so small.
        inside = np.maximum(1 + np.expm1(loss) / rate, 0)
        with np.errstate(divide="ignore"):
            return np.log(inside) / ratio + ratio / 2

    if present:
        return lambda loss: (
            (1 - rate) * special.ndtr(place(loss)) + rate * special.ndtr(place(loss) - ratio)
        )
    return lambda loss: special.ndtr(-place(-loss))


def bracket(rate, ratio, rounds, delta, width, points, *, sides=(True, False)):
    """Bounds below and above the epsilon of so many rounds, the worse of the directions.

    Losses in (k h, (k + 1) h] are rounded to k h for the one and to (k + 1) h for the other, so
    that all sums over the rounds differ by T h, and so do the two epsilons.

    Args:
        rate: q.
        ratio: r, how far a drawn record moves a round in units of its noise.
        rounds: T.
        delta: Delta.
        width: h.
        points: Cells of the window of sums.
        sides: Directions that count: the record is there against not, and back.
    """
    curves = [_below(rate, ratio, rounds, width, points, side) for side in sides]

    def epsilon(allowed):
        gap = lambda e, curve: curve(e) - allowed  # noqa: E731
        maximum = points * width
        return max(optimize.brentq(gap, 0.0, maximum, args=(item,), xtol=1e-7) for item in curves)

    return epsilon(delta + SLACK), epsilon(delta - SLACK) + rounds * width


def _below(rate, ratio, rounds, width, points, present):
    """Delta as a function of epsilon, every loss rounded down."""
    places = np.array([-REACH, REACH + ratio])
    ends = np.log1p(rate * np.expm1(ratio * (places - ratio / 2)))
    ends = ends if present else -ends[::-1]
    first = int(np.floor(ends[0] / width)) - 1
    last = int(np.ceil(ends[1] / width)) + 1
    edges = width * np.arange(first, last + 1)
    masses = np.diff(cumulative(rate, ratio, present)(edges))
    assert len(masses) <= points and abs(masses.sum() - 1) < SLACK / (10 * rounds)
    # Three quarters of the window on the side of the long losses.
    start = -points // 4 if present else -3 * points // 4
    _check_window(masses, edges, rounds, width * start, width * (start + points))
    power = fft.irfft(fft.rfft(masses, points) ** rounds, points)
    sums = np.roll(power, (rounds * first - start) % points)
    losses = width * np.arange(start, start + points)

    def delta(epsilon):
        over = np.searchsorted(losses, epsilon)
        return float(-np.expm1(epsilon - losses[over:]) @ sums[over:])

    return delta


def _check_window(masses, edges, rounds, low, high):
    """Chernoff's bound on sums outside, which a circular transform would bring back inside."""
    position = np.arange(0, len(masses), 256)
    coarse = np.add.reduceat(masses, position)
    lower = edges[position]
    for sign, reach, losses in ((1, high, np.append(lower[1:], edges[-1])), (-1, -low, lower)):
        orders = np.geomspace(0.3, 60, 40)
        growth = [special.logsumexp(order * sign * losses, b=coarse) for order in orders]
        assert np.min(rounds * np.array(growth) - orders * reach) < np.log(SLACK / 10)
