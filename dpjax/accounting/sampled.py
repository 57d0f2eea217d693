"""The loss of Gaussian noise on Poisson-sampled batches, by privacy loss distributions.

In a round every record of an agent is in the batch with probability q, independently, and the sum
of the batch's clipped gradients is sent with Gaussian noise. Zeroing a record out, the batch's
public divisor staying as it is, then moves the mean by at most r in units of the noise, and only
in the rounds in which the record is in the batch. Whoever sees all rounds has to tell

    Q = N(0, 1)    from    P = (1 - q) N(0, 1) + q N(r, 1)

in each of them, in both directions: P against Q where the record is there, Q against P where it
is zero. That is dp_accounting's relation REPLACE_SPECIAL, whose pair equals ADD_OR_REMOVE_ONE's,
since a zero adds what an absent record adds. Replacement by another record is not covered: it
would need N(r, 1) against N(-r, 1) in P and Q.

Noise C^-1 Z over rounds, C of at most b diagonals, where a record may be drawn in every b-th round
alone: C's columns of these rounds have no row in common, so that the rounds fall into blocks of b,
in each of which the record enters by one coin flip and one column. Given what was seen before, and
all others' coins, a block of messages is m + B c x + Z with B the coin, c the column and x the
clipped gradient; m_s follows from what was seen before s, whatever B, and is taken off. What is
left is a round as above with r = |c| |x| over the noise, once in b rounds.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, exp, expm1, floor, frexp, hypot, inf, isinf, log, log1p, log2, sqrt
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_ndtr, logsumexp

from dpjax import _validate
from dpjax.accounting import gdp
from dpjax.accounting.arrays import Floats, Matrix, Numbers, Pattern, Vector
from dpjax.accounting.loss import (
    AmplifiedLoss,
    checked_delta,
    draw_ratios,
    draw_sensitivity,
    lowest,
)
from dpjax.accounting.rounding import UNIT
from dpjax.protocols import Amplification, SampledNoise, SampledTarget

__all__ = ()

# Losses within ten deviations of a round's noise have at least so many cells, and sums at most.
_CELLS = 30_000
_MOST_CELLS = 2**20
_REACH = 10.0
# Shares of delta: what is truncated of it, and what cells add to it, or about.
_SHARE = 1e-9
_INFLATION = 1e-3
# About exp(-20) of the transformed probabilities is outside their window.
_OUTSIDE = 20.0
# A Fourier transform errs by this times log2 of its size, relative to its argument's length as a
# vector: Higham (2002), theorem 24.2.
_FOURIER = 5 * UNIT
_UP = 1 + 1e-12
# The range of ratios that are distinguished, and the least delta of which float64 holds the shares.
_LEAST = 1e-6
_MOST = 1e3
# Powers of two of delta that share a composition.
_APART = 16
_LEAST_DELTA = 1e-250
# Rates that a calibration tells apart; between two of them the higher one is taken.
_LEVELS = 8
# How close to the budget it ends: in epsilon, and in the noise after so many halvings.
_CLOSE = 2e-4
_HALVINGS = 14
# Orders beyond this over epsilon, for every unit of log delta, are not transformed.
_STEEPEST = 8.0
# Wider cells are not transformed: exp of them overflows.
_WIDEST = 500.0
_NONE = np.zeros(0)

# Rate, ratio and number of rounds alike of one agent.
_Part: TypeAlias = tuple[float, float, int]
_Parts: TypeAlias = Sequence[_Part]


@dataclass(frozen=True)
class Phase:
    """Rounds that cost alike.

    Attributes:
        rates: [n] probability that a record of an agent is in a round's batch.
        ratios: [n] how far a record can move a round's mean, in units of the noise.
        rounds: Their number.
        whole: True where ``ratios`` are of all these rounds together, whatever happens inside.
        separation: b, where a record may be drawn in one round of every b in a row, always the
            same, and a ratio is of what it moves by one draw; 1 is in every round.
    """

    rates: Floats
    ratios: Floats
    rounds: int
    whole: bool = False
    separation: int = 1

    def __post_init__(self) -> None:
        """Refuse what is no probability or sensitivity, and keep plain numbers."""
        for name, limit in (("rates", 1.0), ("ratios", inf)):
            values = tuple(map(float, getattr(self, name)))
            outside = [value for value in values if not 0 <= value <= limit]
            if outside:
                raise ValueError(f"{name} has {outside[0]}; give numbers from 0 to {limit:g}")
            object.__setattr__(self, name, values)
        if not self.rates or len(self.rates) != len(self.ratios):
            raise ValueError(
                f"{len(self.rates)} rates for {len(self.ratios)} ratios; give one each an agent"
            )
        _validate.integer("rounds", self.rounds, minimum=0)
        _validate.flag("whole", self.whole)
        _validate.integer("separation", self.separation)

    @property
    def times(self) -> int:
        """How often the ratios count."""
        if self.whole:
            return min(self.rounds, 1)
        return -(-self.rounds // self.separation)


@dataclass(frozen=True)
class Pld(AmplifiedLoss):
    """Gaussian noise on Poisson-sampled batches, round after round, for every agent.

    Guarantee: `epsilon` is never below the exact one for zeroing out one record, against an
    outsider who sees every message and knows neither batches nor noise, if every record's presence
    is drawn apart from all else with at most its agent's rate, and the noise is Gaussian and white
    over rounds, or has a strategy of at most as many diagonals as the rounds between two in which
    a record may be drawn. Adaptive composition is included, at every delta and number of rounds.
    Discretised losses are rounded up; what is truncated, and what Fourier transforms round, counts.
    `epsilon` never rises with delta. It may fall with more rounds, larger rates or ratios, by what
    cells and rounding move it: in trials at deltas from 1e-14 on, 4e-7 or two parts in 10^6,
    whichever is larger. It is above the exact one throughout.

    Attributes:
        phases: Rounds that cost alike, one after the other, each with the same agents.

    Reference:
        Doroshenko et al. (2022), Connect the Dots; Koskela et al. (2020), for the composition;
        Mironov, Talwar and Zhang (2019), for Renyi divergences;
        Choquette-Choo et al. (2023), (Amplified) banded matrix factorization, for strategies.

    Example:
        >>> from dpjax.accounting.sampled import Pld
        >>> loss = Pld.of(rates=[0.1], ratios=[1.0], rounds=10)
        >>> round(loss.epsilon(1e-5), 2), round(loss.unamplified, 2)
        (2.85, 3.16)
    """

    kind = "pld"
    accounting = (
        "with batches drawn anew in every round and kept secret, each record apart from all "
        "others, accounted numerically from above (privacy loss distributions)"
    )
    no_total = (
        "loss is Pld, of Poisson-sampled batches; adding up such losses to a total does not "
        "hold for phases chosen on the way (arXiv 2602.06756). Take samplers.Random or Cyclic, or "
        "fix all phases beforehand and compose them with planned=True"
    )
    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        """Refuse phases of different agents."""
        # Records hold phases as their fields.
        phases = [Phase(**part) if isinstance(part, Mapping) else part for part in self.phases]
        sizes = {len(phase.rates) for phase in phases}
        if len(sizes) != 1:
            raise ValueError(f"phases are of {sorted(sizes)} agents; give the same agents in each")
        object.__setattr__(self, "phases", tuple(phases))

    @classmethod
    def of(cls, rates: ArrayLike, ratios: ArrayLike, rounds: int, separation: int = 1) -> "Pld":
        """The loss of one phase.

        Args:
            rates: [n] probability that a record is in a round's batch, one an agent.
            ratios: [n] sensitivity of a round in units of the noise.
            rounds: Rounds T.
            separation: Rounds from one in which a record may be drawn to the next.
        """
        # A phase keeps plain numbers, whatever holds them.
        phase = Phase(rates, ratios, rounds, separation=separation)  # type: ignore[arg-type]
        return cls((phase,))

    @property
    def agents(self) -> int:
        """Number of agents n."""
        return len(self.phases[0].rates)

    @property
    def rounds(self) -> int:  # type: ignore[override]
        """Rounds of all phases."""
        return sum(phase.rounds for phase in self.phases)

    def _rows(self) -> list[_Parts]:
        """(rate, ratio, times) of each agent's phases."""
        columns = []
        for phase in self.phases:
            times = [phase.times] * self.agents
            columns.append(zip(phase.rates, phase.ratios, times, strict=True))
        return list(zip(*columns, strict=True))

    def epsilon(self, delta: float) -> float:
        """The epsilon of the agent that loses most, rounded up."""
        delta = checked_delta(delta)
        rows = set(self._rows())
        # The others cannot lose most, and an epsilon takes a tenth of a second.
        worst = [row for row in rows if not _below_another(row, rows)]
        return max(_epsilon(row, delta) for row in worst)

    def dp_event(self, events: ModuleType, delta: float) -> Any:
        """Poisson-sampled Gaussians, phase after phase, of the agent that loses most."""
        worst = max(self._rows(), key=lambda row: _epsilon(row, delta))
        phases = []
        for rate, ratio, times in worst:
            if rate > 0 and ratio > 0 and times > 0:
                coins = events.PoissonSampledDpEvent(rate, events.GaussianDpEvent(1 / ratio))
                phases.append(events.SelfComposedDpEvent(coins, times))
        return events.ComposedDpEvent(phases)

    @property
    def unamplified(self) -> float:
        """Gaussian-DP mu of the same noise if every record were in every batch, rounded up."""
        return max(_all_in(row) for row in self._rows())

    @property
    def draw_ratios(self) -> Floats:
        """[n] how far one draw of a record moves the messages, of the first phase."""
        return self.phases[0].ratios

    @property
    def pattern(self) -> Pattern | None:
        """(epochs, separation) of a record's draws; None where it may be drawn in any round."""
        separation = max(phase.separation for phase in self.phases)
        if separation == 1:
            return None
        return sum(phase.times for phase in self.phases), separation

    def pattern_text(self, unit: str) -> str:
        """The pattern in a statement, after the rounds.

        Args:
            unit: What is protected.
        """
        if self.pattern is None:
            return ""
        epochs, separation = self.pattern
        return (
            f" of noise correlated over rounds, in {epochs:,} of which, {separation:,} apart, "
            f"every {unit} may be drawn,"
        )

    def size_text(self) -> str:
        """Rate and noise multiplier, where every round and every agent has the same."""
        pairs = set[tuple[float, float]]()
        for phase in self.phases:
            if phase.rounds and not phase.whole:
                pairs.update(zip(phase.rates, phase.ratios, strict=True))
        if len(pairs) != 1 or self.pattern is not None:
            return ""
        ((rate, ratio),) = pairs
        multiplier = f", noise multiplier {1 / ratio:.4g}" if ratio else ""
        return f", sampling rate {rate:.4g}{multiplier}"

    def scaled(self, factor: float) -> "Pld":
        """The loss with ratios larger by a factor: noise smaller by it.

        Args:
            factor: At least 0.
        """
        phases = []
        for phase in self.phases:
            ratios = tuple(factor * ratio for ratio in phase.ratios)
            phases.append(replace(phase, ratios=ratios))
        return Pld(tuple(phases))

    def first_rounds(self, rounds: int) -> "Pld":
        """A whole phase is spent from its first round on."""
        phases = []
        for phase in self.phases:
            covered = min(rounds, phase.rounds)
            phases.append(replace(phase, rounds=covered))
            rounds -= covered
        return Pld(tuple(phases))

    def plus(self, later: "Pld") -> "Pld":
        """The phases of both, one after the other."""
        return Pld(self.phases + later.phases)


@dataclass(frozen=True)
class CoinFlips(Amplification):
    """What coin flips for every record take off the loss: `Pld`.

    Attributes:
        rates: [n] probability that a record is in a round's batch; None before it is known.

    Example:
        >>> from dpjax.accounting.sampled import CoinFlips
        >>> CoinFlips((0.1, 0.2)).kind
        'pld'
    """

    kind = Pld.kind
    remedy = (
        "give a covariance over agents that is fresh in every round, a strategy of few bands "
        "(noise.PrefixSum(bands=b) and Poisson(..., separation=b))"
    )
    rates: Floats | None = None

    def bound(self, target: SampledTarget, strategy: Matrix | None) -> Numbers:
        """The bound on [R^-1]_ii that keeps the target's budget; see `bound`."""
        assert self.rates is not None
        moved = draw_sensitivity(target, strategy)
        budget = target.budget
        times = target.pattern.epochs
        return bound(self.rates, times, budget.largest, budget.delta, sensitivity=moved)

    def loss(self, target: SampledTarget, noise: SampledNoise) -> Pld:
        """What every agent loses, in each round by its rate and its ratio."""
        assert self.rates is not None
        ratios = draw_ratios(target, noise)
        return Pld.of(self.rates, ratios, target.rounds, target.pattern.separation)


def bound(
    rates: ArrayLike, rounds: int, epsilon: float, delta: float, *, sensitivity: float
) -> Numbers:
    """The bound b_i on [R^-1]_ii that keeps sampled rounds within a budget.

    Guarantee: noise over agents with [R^-1]_ii <= b_i, white over rounds, keeps epsilon at delta
    for every agent as `Pld` states it, against an outsider, for zeroing out one record.

    Args:
        rates: [n] probability that a record is in a round's batch.
        rounds: T.
        epsilon: The budget.
        delta: Its delta.
        sensitivity: How far zeroing a record out moves a round's sum: the clip norm.

    Returns:
        b_i in 1 / (gradient units)^2, just below the largest that does; a 0-d array where all
        rates are alike.

    Raises:
        ValueError: For a delta of at least the probability that a record is drawn at all.
    """
    chances = np.asarray(rates, float)
    levels = np.unique(chances)
    if len(levels) > _LEVELS:
        # Every agent takes the noise of the next higher level.
        shares = np.linspace(0, 1, _LEVELS + 1)[1:]
        levels = np.unique(np.quantile(chances, shares, method="higher"))
    ratios = np.array([_largest_ratio(float(rate), rounds, epsilon, delta) for rate in levels])
    bounds = (ratios / sensitivity) ** 2 * (1 - 1e-12)
    if len(levels) == 1:
        return bounds[0] * np.ones(())
    return bounds[np.searchsorted(levels, chances)]


@lru_cache(maxsize=256)
def _largest_ratio(rate: float, rounds: int, epsilon: float, delta: float) -> float:
    """The largest ratio of one agent that keeps the budget, by bisection from below."""

    # Below the budget by more than the numerics waver where ratios differ in their last bits.
    allowed = epsilon * (1 - _CLOSE)

    def keeps(ratio: float) -> bool:
        return _epsilon(((rate, ratio, rounds),), delta) <= allowed

    drawn = 1.0
    if rate < 1:
        drawn = -expm1(rounds * log1p(-rate))
    # Such a delta covers whatever happens to a record: no noise would be asked for.
    if drawn <= delta:
        raise ValueError(
            f"delta is {delta:g}, but a record is in any batch of {rounds} rounds with probability "
            f"{drawn:.3g} alone, so that no noise is needed and those drawn go unprotected; give a "
            "smaller delta, or larger batches"
        )
    # What holds without sampling holds with it.
    allowed_mu = float(gdp.mu(epsilon * (1 - 2 * _CLOSE), delta))
    low = allowed_mu / sqrt(rounds) * (1 - 1e-9)
    if rate >= 1:
        return low
    high = 2 * low
    while keeps(high):
        low = high
        high = 2 * high
    for _ in range(_HALVINGS):
        middle = sqrt(low * high)
        if keeps(middle):
            low = middle
        else:
            high = middle
    return low


def _below_another(row: _Parts, rows: set) -> bool:
    """Whether another agent loses at least as much in every phase: rates and ratios both rise."""
    for other in rows:
        pairs = zip(row, other, strict=True)
        if other != row and all(low[0] <= up[0] and low[1] <= up[1] for low, up in pairs):
            return True
    return False


@lru_cache(maxsize=4096)
def _epsilon(row: _Parts, delta: float) -> float:
    """The epsilon of one agent."""
    parts = [part for part in row if min(part) > 0]
    # Without sampling all rounds are one Gaussian.
    plain = _all_in([part for part in parts if part[0] == 1])
    sampled = []
    for rate, ratio, times in parts:
        if rate < 1:
            # Tiny ratios are rounded up.
            sampled.append((rate, max(ratio, _LEAST), times))
    if not sampled:
        return float(gdp.epsilon(plain, delta))
    largest = max(ratio for _, ratio, _ in sampled)
    if isinf(max(largest, plain)):
        return inf
    # Each of these bounds holds, and amplification never makes a loss larger.
    unamplified = float(gdp.epsilon(_all_in(parts), delta))
    # At the largest ratios sampling hides nothing, and numbers overflow.
    if delta < _LEAST_DELTA or largest > _MOST or plain > _MOST:
        return unamplified
    if plain:
        sampled.append((1.0, max(plain, _LEAST), 1))
    return min(unamplified, _at_delta(tuple(sampled), delta) * _UP)


def _all_in(parts: _Parts) -> float:
    """Gaussian-DP mu of records in every batch, rounded up; squares of no ratio underflow."""
    sizes = [ratio * sqrt(times) for _, ratio, times in parts]
    return hypot(*sizes) * _UP


def _at_delta(parts: _Parts, delta: float) -> float:
    """Epsilon of all rounds in both directions, rounded up; it never rises with delta.

    All deltas from an anchor to the next one are read off the anchor's curves, which fall. Where
    curves change, just below the next anchor, epsilon is at least what it is there.
    """
    # Where a record is hardly ever drawn, losses have tails for which orders must fit delta.
    expected_draws = sum(rate * times for rate, _, times in parts)
    spacing = _APART if expected_draws > 1 else 1
    exponent = (frexp(delta)[1] - 1) // spacing * spacing
    epsilons = [curve.epsilon(delta) for curve in _curves(parts, 2.0**exponent)]
    anchor = 2.0 ** (exponent + spacing)
    if 0.98 * anchor < delta and anchor < 1:
        epsilons += [curve.epsilon(anchor) for curve in _curves(parts, anchor)]
    return max(epsilons)


@lru_cache(maxsize=8)  # Statements of several records ask for many deltas.
def _curves(parts: _Parts, anchor: float) -> tuple["_Curve", "_Curve"]:
    """Curves in both directions, from a least delta on."""
    return _composed(parts, anchor, True), _composed(parts, anchor, False)


class _Curve(NamedTuple):
    """Epsilon of all rounds in one direction by delta, rounded up.

    Attributes:
        orders: [k] orders a.
        moments: [k] K(a) and the logarithm of the largest (1 - exp(-x)) exp(-a x).
        order: Order of the other numbers, K of which is ``log_mass``.
        log_mass: K at that order.
        slack: What sums round, as a share of delta.
        epsilons: [m] falling by a cell's width; empty where transforms round too much.
        means: [m] delta at these, as a share of exp(K - a e).
        slopes: [m] how much the delta falls by exp(e), likewise.
        log_deltas: [m] logarithms of these deltas, rising.
    """

    orders: Vector
    moments: Vector
    order: float
    log_mass: float = 0.0
    slack: float = 0.0
    epsilons: Vector = _NONE
    means: Vector = _NONE
    slopes: Vector = _NONE
    log_deltas: Vector = _NONE

    def epsilon(self, delta: float) -> float:
        """Epsilon at a delta, at least the one that the curve was made for."""
        log_delta = log(delta * (1 - 2 * _SHARE))
        best = ((self.moments - log_delta) / self.orders).min()
        log_delta -= self.slack
        last = int(np.searchsorted(self.log_deltas, log_delta, side="right"))
        last = min(last, len(self.epsilons) - 1)
        if last > 0:
            # Between two sums delta is linear in exp(e); slopes may be 0 in floating point.
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                sum_epsilon = self.epsilons[last]
                allowed = np.exp(log_delta - self.log_mass + self.order * sum_epsilon)
                missing = np.maximum(self.means[last] - allowed, 0)
                excess = missing / self.slopes[last]
                reached = sum_epsilon + np.log1p(excess)
            best = min(best, np.fmin(reached, self.epsilons[last - 1]))
        return float(max(best, 0.0))


class _Round(NamedTuple):
    """The losses of rounds alike in one direction, those of one of them on a grid.

    Attributes:
        losses: [m] equally spaced, ascending.
        logs: [m] logarithms of their probabilities.
        times: How many rounds.
    """

    losses: Vector
    logs: Vector
    times: int


def _composed(parts: _Parts, anchor: float, present: bool) -> _Curve:
    """Epsilon of all rounds in one direction at a least delta and above it, rounded up.

    With L the sum of the losses and K(a) = log E exp(a L), at every order a > 0

        delta(e) = E (1 - exp(e - L))_+ = exp(K - a e) E_a (1 - exp(e - L))_+ exp(-a (L - e)),

    E_a under the probabilities times exp(a L - K). What a Fourier transform of these errs by is
    then relative to exp(K - a e), which is near delta, and not to 1. Where that is too much, the
    largest value in E_a still holds: epsilon by the Renyi divergence of order a + 1.
    """
    count = sum(times for *_, times in parts)
    log_least = log(anchor)
    # Beyond so many deviations a coordinate's probability over all rounds is a share of delta.
    reach = sqrt(2 * (log(count) - log_least - log(_SHARE)))
    # The width of a loss's cells: a share of how far the widest of the rounds reaches.
    cell = max(ratio * (ratio / 2 + _REACH) for _, ratio, _ in parts) / _CELLS

    def discretised(width: float, window: float) -> list[_Round]:
        return [_discretised(part, width, reach, window, present) for part in parts]

    rounds = discretised(cell, inf)
    moments = dict[float, float]()

    def moment(log_order: float) -> float:
        order = exp(log_order)
        if order not in moments:
            # (1 - exp(-x)) exp(-a x) is largest at x = log(1 + 1 / a).
            largest = -log1p(order) - order * log1p(1 / order)
            moments[order] = _cumulant(rounds, order) + largest
        return moments[order]

    span = max(part.losses[-1] for part in rounds)
    lowest_order = log(0.01 / (span * sqrt(count)))
    grid = np.linspace(lowest_order, log(1e6 / span), 12)

    def order_at(epsilon: float) -> float:
        """The order whose Chernoff bound is least there."""
        log_order, *_ = lowest(lambda x: moment(x) - exp(x) * epsilon, grid)
        return exp(log_order)

    log_order, renyi, _ = lowest(lambda x: (moment(x) - log_least) / exp(x), grid)
    orders = np.array(list(moments))
    bounds = (orders, np.array(list(moments.values())))
    # Losses that have a largest one have an order without end, and little is near that one.
    order = min(exp(log_order), _STEEPEST * (8 - log_least) / max(renyi, 1e-300))
    curve = _transformed(rounds, discretised, _Curve(*bounds, order), anchor, cell, span)
    for _ in range(3):
        epsilon = curve.epsilon(anchor)
        if 0 < epsilon < 0.7 * renyi:
            # The order was that of a larger epsilon.
            guess = _Curve(*bounds, order_at(epsilon))
            closer = _transformed(rounds, discretised, guess, anchor, cell, span)
            curve = min(curve, closer, key=lambda other: other.epsilon(anchor))
    return curve


def _transformed(
    rounds: list[_Round],
    discretised: Callable[..., list[_Round]],
    curve: _Curve,
    anchor: float,
    cell: float,
    span: float,
) -> _Curve:
    """A curve by transforms at about its order; itself where these round too much.

    Sums beyond the window come back at its other end, where they only add to delta, unless they
    are above its top. These and losses beyond the reach are shares of delta, and taken off it.
    """
    from scipy import fft, signal

    count = sum(part.times for part in rounds)
    log_share = log(_SHARE * anchor)
    # Where a few rounds may lose much, an order's multiple is wide: a lower one is transformed.
    order = _rounded(curve.order / 1.3, floor)
    log_mass = _cumulant(rounds, order)
    # Chernoff's bounds on what the multiple has outside, and delta above.
    larger_mass = _cumulant(rounds, 1.5 * order)
    smaller_mass = _cumulant(rounds, order / 2)
    beyond = (larger_mass - log_mass + _OUTSIDE) / (order / 2)
    below = (log_mass - smaller_mass - _OUTSIDE) / (order / 2)
    window = max((log_mass - log_share) / order, beyond) - below
    # Moved to the ends of cells, losses have up to width^2 / 6 more variance a round, or about.
    widest = sqrt(12 * _INFLATION / (count * order * (order + 1)))
    width = min(cell, widest)
    # Runs that hardly differ have the same cells.
    narrowest = _rounded((window + span) / _MOST_CELLS, ceil)
    width = max(_rounded(width, floor), narrowest)
    size = fft.next_fast_len(ceil(window / width) + 1, real=True)
    unit = _FOURIER * log2(size)
    if count * unit * sqrt(size) > 0.5 or width > _WIDEST:
        return curve

    rounds = discretised(width, window)
    spectrum = np.ones(size // 2 + 1, np.complex128)
    for part in rounds:
        logs = order * part.losses + part.logs
        masses = np.exp(logs - logs.max())
        places = np.arange(len(masses)) % size
        folded = np.bincount(places, masses / masses.sum(), minlength=size)
        spectrum *= fft.rfft(folded) ** part.times
    sums = np.maximum(fft.irfft(spectrum, size), 0)
    # No entry of a spectrum is above 1: powers multiply errors by their exponents, and add some.
    off = 2 * (count + 1) * unit
    # By Cauchy and Schwarz, with the squares of (1 - exp(-x)) exp(-a x) summed over the cells.
    off *= sqrt((0.25 / order**3 + 0.14 * width / order**2) / width)

    log_mass = _cumulant(rounds, order)
    lowest = sum(part.times * part.losses[0] for part in rounds)
    top = ceil(((log_mass - log_share) / order - lowest) / width)
    # Down to the first epsilon that is none.
    last = max(top - floor(-lowest / width), 1)
    last = min(last, size - 1)
    numbers = top - np.arange(last + 1)
    epsilons = lowest + width * numbers
    # E_a at each of them from the top down, by two sums that have positive terms alone.
    decay = exp(-(order + 1) * width)
    slopes = signal.lfilter([0, decay], [1, -decay], sums[numbers % size])
    falling = exp(-order * width)
    means = signal.lfilter([expm1(width)], [1, -falling], slopes) + off

    def log_delta(place: int) -> float:
        return log_mass - order * epsilons[place] + log(means[place])

    # Other deltas are not asked for.
    first = bisect.bisect(range(size), log(0.5 * anchor), 0, last, key=log_delta)
    last_delta = log(anchor) + (_APART + 1) * log(2)
    end = bisect.bisect(range(size), last_delta, 0, last, key=log_delta)
    places = slice(max(first - 2, 0), end + 2)
    arrays = [array[places].copy() for array in (epsilons, means, slopes)]
    log_deltas = log_mass - order * arrays[0] + np.log(arrays[1])
    arrays.append(np.maximum.accumulate(log_deltas))
    slack = 16 * size * UNIT  # What these sums round.
    return _Curve(curve.orders, curve.moments, order, log_mass, slack, *arrays)


def _cumulant(rounds: list[_Round], order: float) -> float:
    """K of all rounds, rounded up."""
    total = 0.0
    for part in rounds:
        furthest = abs(part.losses[[0, -1]]).max()
        rounding = 8 * UNIT * (600 + order * furthest)
        cumulant = logsumexp(order * part.losses + part.logs)
        total += part.times * (cumulant + rounding)
    return float(total)


def _rounded(value: float, to: Callable[[float], int]) -> float:
    """A positive number moved to an eighth root of a power of two."""
    return 2.0 ** (to(8 * log2(value)) / 8)


def _discretised(part: _Part, width: float, reach: float, window: float, present: bool) -> _Round:
    """Losses on a grid, whose delta is a round's at each of its numbers.

    Between two of them the grid's delta is linear in exp(e) and the round's is convex, hence below.
    Rounds whose deltas are larger at every e have larger ones when composed.
    """
    rate, ratio, times = part
    sign = 1 if present else -1
    infimum = log1p(-rate) if rate < 1 else 0.0
    # Where the record is there, x has the loss log(1 - q + q exp(r x - r^2 / 2)).
    coordinates = np.array([-reach, reach + ratio])[::sign]
    ends = log(rate) + ratio * (coordinates - ratio / 2)
    absent_log = infimum if rate < 1 else -inf
    low, high = sign * np.logaddexp(absent_log, ends) - sign * infimum
    # Losses far below zero, which do not come near epsilon again, are moved up.
    low = max(low, -window - sign * infimum)
    numbers = np.arange(floor(low / width), ceil(high / width) + 1)
    steps = width * numbers
    losses = sign * infimum + steps
    # r x - r^2 / 2 where x has these losses, exact near the infimum.
    logs = steps = sign * steps
    if rate < 1:
        with np.errstate(divide="ignore"):
            logs = infimum + steps - log(rate) + np.log(-np.expm1(-steps))
    places = logs / ratio + ratio / 2
    scale = 0.0 if present else losses
    present_tail = np.exp(log_ndtr(sign * (ratio - places)) + scale)
    absent_tail = np.exp(log_ndtr(-sign * places) + logs + scale)
    # Delta at every loss, and the probabilities that have these deltas.
    rounding = 16 * UNIT * (8 + (reach + ratio) ** 2)
    margin = (present_tail + absent_tail) * rounding
    deltas = rate * (abs(present_tail - absent_tail) + margin)
    slopes = np.diff(deltas) / expm1(width)
    heads = np.append(1 - deltas[0], -exp(width) * slopes)
    masses = np.maximum(heads + np.append(slopes, 0.0), 0) + 8 * UNIT * abs(heads)
    # Above what floating point may have taken off a loss.
    furthest = abs(losses).max()
    losses += 16 * UNIT * (4 - infimum + furthest)
    with np.errstate(divide="ignore"):
        return _Round(losses, np.log(masses), times)
