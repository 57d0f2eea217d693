"""What it costs to choose the stopping round from what was released.

A run spends mu_t^2 up to its mark t. Whoever stops where the messages so far look worst finds more
than epsilon(mu_t, delta) at the round where it stopped: that number is for a t fixed beforehand.
The loss of a record's change against the truth is, with full steps, the random walk

    L_t = log dP/dQ  of what was sent up to mark t,     L_t - L_s ~ N((v_t - v_s)/2, v_t - v_s),

v_t = mu_t^2, and numbers eps_t, fixed before the run, hold at whichever mark it stops when

    sup over stopping times tau of E(1 - exp(eps_tau - L_tau))_+  <=  delta.

Guarantee: then P(tau, messages in S) <= E_Q[exp(eps_tau) 1_S] + delta for every S and every rule
tau that looks at messages alone, also where gradients and steps are chosen from earlier messages.
Full steps are worst: a round whose change moves the mean by theta, |theta|^2 <= w in units of the
noise, is drawn from a piece of length |theta|^2 of the walk's own Gaussian (scale its increment
along theta, add independent noise across), so whatever spends at most v_t up to every mark t, by
whatever plan, is a function of the walk up to v_t and fresh randomness; its stopping times are
stopping times of the walk, and forgetting only lowers E(1 - exp(eps - L))_+ (Jensen).

`inner_delta` gives the largest d for which eps_t = epsilon(mu_t, d) does it. The supremum is
computed by dynamic programming, with every error upwards (`supremum`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, exp, isfinite, log, pi, sqrt

import numpy as np

from dpjax import _validate
from dpjax.accounting import gdp
from dpjax.accounting.arrays import Floats, Ints, Numbers, Vector
from dpjax.accounting.rounding import MARGIN, UNIT

__all__ = ()

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
# Relative error of a transition probability, by far: quadrature, exponentials, sums.
_MARGIN = 1e-12
# How close to the largest inner delta the search ends.
_CLOSE = 4e-3
# Most products of a supremum, about a second: a coarser grid only raises it.
_MOST = 4e9
_PIECE = 4096
# Below, a mark's own share would need a grid finer than it is worth.
_LEAST_SHARE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The marks at which a run may stop, fixed before it, and the delta at which all hold.

    Attributes:
        marks: [M] rounds, rising.
        shares: [M] what the rounds up to each mark have spent at most, as shares of mu^2; the last
            is 1. Less than a thousandth is made a thousandth.
        delta: epsilon_t = epsilon(mu sqrt(share_t), delta) holds at every mark at once with the
            guarantee's delta, which is larger.
    """

    marks: Ints
    shares: Floats
    delta: float

    def __post_init__(self) -> None:
        """Refuse marks and shares that do not rise."""
        marks = tuple(_validate.integer("marks", mark) for mark in self.marks)
        shares = tuple(_validate.finite_array("shares", self.shares, ndim=1).tolist())
        if not marks or list(marks) != sorted(set(marks)):
            raise ValueError(f"marks is {marks}; give rounds that rise")
        rising = list(shares) == sorted(shares)
        if len(shares) != len(marks) or not rising or shares[0] < 0 or shares[-1] != 1:
            raise ValueError(f"shares is {shares} for {len(marks)} marks; give them, rising to 1")
        if not 0 <= self.delta < 1:
            raise ValueError(f"delta is {self.delta}; give a number in [0, 1)")
        object.__setattr__(self, "marks", marks)
        object.__setattr__(self, "shares", tuple(max(share, _LEAST_SHARE) for share in shares))

    def holds(self, mu: float, rounds: int, delta: float) -> bool:
        """Whether this curve's delta is small enough.

        Args:
            mu: Gaussian-DP mu of the rounds up to a mark.
            rounds: That mark.
            delta: Delta that all marks share.
        """
        total_mu = mu / self.roots[self.marks.index(rounds)]
        few = self.delta <= delta / len(self.marks) or len(set(self.roots)) == 1
        if few or total_mu == 0 or not isfinite(total_mu):
            return self.delta <= delta
        # The same number from whichever mark it is asked, so that it is computed once.
        return _spent(float(f"{total_mu:.9e}"), self) <= delta * (1 + 1e-6)

    @property
    def roots(self) -> Numbers:
        """[M] each mark's mu over the whole run's, rounded up as `Guarantee` does."""
        return np.minimum(1.0, np.sqrt(np.asarray(self.shares)) * MARGIN)


def supremum(mus: Vector, epsilons: Vector) -> float:
    """Return an upper bound on sup over stopping times of E(1 - exp(eps_tau - L_tau))_+.

    With r = exp(-L), a martingale, the value V_t(r) of the best rule from mark t on is convex and
    falls from V_t(0) <= 1: payoffs (1 - exp(eps) r)_+ are, and max and expectation keep it.
    Between points of a grid it therefore lies below its chord, above the grid's least r below its
    value there, and beyond the largest L below the chord to 1. Each step is one sum of positive
    terms with probabilities that split every cell's mass between its ends along the chord.

    Guarantee: never below the supremum; its own rounding is added.

    Args:
        mus: [M] Gaussian-DP mu up to each mark, finite, not falling.
        epsilons: [M] epsilon claimed at each mark.

    Returns:
        The bound, at most 1.
    """
    keep = mus > 0
    values = mus[keep]
    claims = epsilons[keep]
    if not len(values):
        return 0.0
    total = values[-1]
    marks = len(values)
    smallest = max(np.min(gdp.delta(values, claims)), 1e-300)
    # Mass this far out may count as certain harm; it is far below every payoff that matters.
    reach = sqrt(-2 * log(1e-6 * smallest / marks))
    # Points are v_t / 2 + spacing * index: the walk's mean moves with the grid.
    highest = (claims - values**2 / 2).max()
    top = max(highest + 2 * total, total)
    steps = np.diff(values**2, prepend=0.0)
    products = 2 * reach * (top + 4 * total) * np.sqrt(steps).sum()
    # Chords add a variance of h^2 / 6 a step. Up to each mark that is a share of what is spent, the
    # smaller the less likely the payoffs, whose logarithm moves by as many times that share.
    share = 1.5e-3 / max(2.0, -log(smallest)) * max(1.0, marks / 100) ** 0.5
    squares = np.maximum(values**2, _LEAST_SHARE * values[-1] ** 2)
    spent = squares / np.arange(1, marks + 1)
    spacing = sqrt(6 * share * spent.min())
    spacing = max(spacing, sqrt(products / _MOST))
    # Steps far below a cell are made larger, which is worse: whatever spends more, earlier, is.
    steps = np.maximum(steps, (spacing / 32) ** 2)
    energies = steps.cumsum() * (1 + (marks + 4) * UNIT)
    lowest = -ceil(4 * total / spacing)
    index = np.arange(lowest, ceil(top / spacing) + 1)
    best = _payoff(claims[-1], energies[-1] / 2 + spacing * index)
    for mark in range(marks - 1, -1, -1):
        first, kernel = _kernel(sqrt(steps[mark]), spacing, reach)
        last = first + len(kernel) - 1
        # Below the grid the least value holds, above it the chord to 1.
        beyond = np.arange(1, max(last, 0) + 1)
        above = 1 - (1 - best[-1]) * np.exp(-spacing * beyond)
        below = np.full(max(-first, 0), best[0])
        padded = np.concatenate([below, best, above])
        harm = _tail(reach)
        margin = 1 + _MARGIN + (len(kernel) + 8) * UNIT
        if mark == 0:
            start = max(-first, 0) - index[0] + first
            mean = padded[start : start + len(kernel)] @ kernel
            return float(min(1.0, (mean + harm) * margin))
        here = _payoff(claims[mark - 1], energies[mark - 1] / 2 + spacing * index)
        going_on = (_means(padded, kernel) + harm) * margin
        best = np.minimum(np.maximum(here, going_on), 1.0)
    raise AssertionError("the first mark returns")


def inner_delta(mus: Sequence[float] | Vector, delta: float) -> float:
    """Return d such that eps_t = epsilon(mu_t, d) holds at every mark at once, with ``delta``.

    Guarantee: what is seen until a mark chosen from what was released, by any rule, is
    (epsilon(mu_t, d), delta)-DP in the sense of the module for the mark t where it stopped. The
    marks and their mus must be fixed before the run.

    Args:
        mus: [M] Gaussian-DP mu up to each mark, not falling.
        delta: Delta, in [0, 1).

    Returns:
        d, at most delta and at least delta over the number of marks; within a percent of the
        largest one, unless the first mus are far below the last. It is delta where all marks have
        one mu.

    Raises:
        ValueError: For an infinite mu.

    Reference:
        Rogers, Roth, Ullman and Vadhan (2016) for odometers; Snell envelopes for the supremum.
    """
    values = np.asarray(mus, float)
    different = tuple(np.unique(values[values > 0]).tolist())
    if len(different) < 2 or delta == 0:
        return delta
    if not isfinite(different[-1]):
        raise ValueError(f"mus reaches {different[-1]}; a run that is not private has no curve")
    return _inner_delta(different, delta)


@lru_cache(maxsize=256)
def _inner_delta(mus: Floats, delta: float) -> float:
    """The search: the supremum is nearly proportional to d."""
    values = np.asarray(mus)
    # The payoffs of all marks together bound the best rule's, whatever the grid.
    union = delta / len(mus) * (1 - 1e-12)
    inner = delta
    proven = union
    for _ in range(12):
        bound = supremum(values, np.asarray(gdp.epsilon(values, inner)))
        if bound <= delta:
            proven = max(proven, inner)
            if inner == delta or bound >= (1 - _CLOSE) * delta:
                break
        inner = min(inner * delta / bound * (1 - _CLOSE / 2), delta)
        if inner < union:
            break
    return proven


@lru_cache(maxsize=256)
def _spent(mu: float, curve: Curve) -> float:
    """The delta that a curve really has."""
    mus = mu * curve.roots
    return supremum(mus, np.asarray(gdp.epsilon(mus, curve.delta)))


def _payoff(epsilon: float, loss: Numbers) -> Numbers:
    excess = np.minimum(epsilon - loss, 0.0)
    return np.maximum(-np.expm1(excess), 0.0)


def _means(values: Numbers, kernel: Numbers) -> Numbers:
    """Return the kernel's sums over the values, each a sum of positive terms.

    In pieces: the dot products of longer ones are given to several threads, one by one.
    """
    count = len(values) - len(kernel) + 1
    total = np.zeros(count)
    for start in range(0, len(kernel), _PIECE):
        piece = kernel[start : start + _PIECE]
        end = start + count + len(piece) - 1
        total += np.correlate(values[start:end], piece, "valid")
    return total


def _tail(reach: float) -> float:
    """A bound on Phi(-reach)."""
    return exp(-reach * reach / 2) / 2


@lru_cache(maxsize=16)  # Kernels are long.
def _kernel(deviation: float, spacing: float, reach: float) -> tuple[int, Numbers]:
    """Probabilities of steps by whole cells, and the first step's number of cells.

    A step N(0, deviation^2) that ends a share of the way through a cell goes to the cell's ends
    with the weights that keep E exp(-L): (e^(h - u) - 1) / (e^h - 1) to the lower one.
    """
    cells = max(1, ceil(reach * deviation / spacing))
    # Panels of at most half a deviation, on which the quadrature is exact to rounding.
    panels = ceil(2 * spacing / deviation)
    edges = spacing * np.arange(panels) / panels
    inside = (edges[:, None] + spacing / panels * (1 + _NODES) / 2).ravel()
    weights = np.tile(_WEIGHTS * spacing / panels / 2, panels)
    places = spacing * np.arange(-cells, cells)[:, None] + inside
    density = np.exp(-0.5 * (places / deviation) ** 2) / (deviation * sqrt(2 * pi))
    mass = density * weights
    # In this form neither overflows.
    below = np.exp(-inside) * np.expm1(inside - spacing) / np.expm1(-spacing)
    above = np.expm1(-inside) / np.expm1(-spacing)
    kernel = np.zeros(2 * cells + 1)
    kernel[:-1] += mass @ below
    kernel[1:] += mass @ above
    # Below the reach: to its end, which is upwards.
    kernel[0] += _tail(reach)
    kernel *= 1 + _MARGIN
    kernel.setflags(write=False)
    return -cells, kernel
