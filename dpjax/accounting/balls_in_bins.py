"""Balls in bins: the sampler, its draw, and its loss.

Every record is thrown into one of b bins, once, uniformly and apart from all others, and takes
part in the rounds of its bin: j, j + b, j + 2 b, ... Who sees all messages of T = k b rounds has to
tell, by the bin J that nobody knows, whether the record is there or zeroed out.

Given what was seen before, and all others' bins, the messages are m + C (1_J x) + Z: x_t is the
clipped gradient of round t, a function of what was seen before t, whatever the bin. m follows from
what was seen, and is taken off. Let p be the density of what is left where the record is there, and
q that where it is not. With fresh noise (C = I), in units of the noise,

    p / q = (1/b) sum_j L_j,    L_j = product over bin j's rounds of exp(<x_t, y_t> - |x_t|^2 / 2),

where every round moves one L_j alone, by a lognormal factor of mean 1. Both directions of the
privacy loss, E (p/q - e^eps)_+ and E (1 - e^eps p/q)_+ under q, are means of convex functions of
that sum. A lognormal factor of mean 1 rises in convex order with its variance, and convex order
survives products with and sums of what is independent. So, from the last round to the first,
|x_t| = r is the worst, whatever x_t depends on:

    p / q = (1/b) sum_j exp(a g_j - a^2 / 2),    a = r sqrt(k), g standard normal and independent.

Under noise over rounds of h diagonals the columns of rounds that are h apart have no row in common.
Let h' be the smallest divisor of b that is at least h. Tell the attacker J mod h', which says
nothing of whether the record is there. The bins that are left are h' apart, and every row moves one
of them alone: the same with b / h' bins and r the norm of the largest column.

The distribution of that mean is computed on a grid, by doubling. What falls between two numbers of
the grid is shared between them, by a split that keeps its mean: that is larger in convex order, so
both directions are bounded from above, without sampling.

Reference:
    Chua et al. (2025), Balls-and-Bins sampling for DP-SGD, arXiv 2412.16802, for the sampler;
    Choquette-Choo et al. (2025), Near exact privacy amplification for matrix mechanisms, arXiv
    2410.06266, for noise over rounds; both compute the same pair by Monte Carlo.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, exp, log, sqrt
from typing import ClassVar, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray
from scipy.special import ndtr

from dpjax import _numerics, _validate
from dpjax.accounting import gdp, rounding
from dpjax.accounting.arrays import Floats, Indices, Matrix, Numbers, Pattern, Vector
from dpjax.accounting.loss import AmplifiedLoss, checked_delta, draw_ratios, draw_sensitivity
from dpjax.protocols import Amplification, CountedRecords, Draw, SampledNoise, SampledTarget

__all__ = ["BallsInBins", "BinLoss"]

# Numbers of a grid, and of the histogram by which its ends are found.
_NODES = 600
_CELLS = 4096
# The lognormal's ends in deviations, and what lies beyond the ends of a mean's grid.
_REACH = 10.0
_TAIL = 1e-23
# Smaller deltas would count what is beyond; for them batches count as known.
_LEAST_DELTA = 1e-18
# Ratios in which numbers neither cancel nor overflow; smaller ones are rounded up.
_LEAST_RATIO = 0.01
_LARGEST_RATIO = 15.0
# What a mass of one record's lognormal may be wrong by, as a share of it: differences of the normal
# distribution over a cell lose at most its width, about 1e-4, of 1e-15.
_MASS_ROUNDING = 1e-10
# The same of logarithms, and of bins of which one is at most b / 2^64 likelier than another.
_LOG_ROUNDING = 1e-10
# How close to the budget a calibration ends, in epsilon and in the noise.
_CLOSE = 1e-4


@dataclass(frozen=True)
class BinLoss(AmplifiedLoss):
    """Gaussian noise on batches whose records were thrown into bins, for every agent.

    Guarantee: `epsilon` is never below the exact one for zeroing out one record, against an
    outsider who sees every message and knows neither bins nor noise, if every record's bin is
    drawn once, apart from all else and evenly up to 2^-48, and if a record takes part in the rounds
    of its bin alone. Adaptive composition is included. It never rises with delta.

    Two runs throw a record into two bins, and tell of it by the product of two such means, of which
    this loss keeps no distribution: it refuses them, planned or not.

    Attributes:
        bins: Bins that the attacker cannot tell apart, at most ``separation``.
        ratios: [n] how far one round of a record moves the messages, in units of the noise.
        separation: Rounds from one in which a record takes part to the next, b.
        rounds: Rounds T.

    Example:
        >>> from dpjax.accounting.balls_in_bins import BinLoss
        >>> loss = BinLoss(bins=10, ratios=(1.0,), separation=10, rounds=10)
        >>> round(loss.epsilon(1e-5), 2), round(loss.unamplified, 2)
        (2.19, 1.0)
    """

    kind = "balls_in_bins"
    accounting = (
        "with every record in one bin of rounds that is drawn once, apart from all others, and "
        "kept secret, accounted numerically from above (balls in bins)"
    )
    # Of the b bins only those that the attacker cannot tell apart hide a record.
    bins: int
    ratios: Floats
    separation: int
    rounds: int

    def __post_init__(self) -> None:
        """Refuse what is no number of bins or rounds, and what is no sensitivity."""
        _validate.integer("separation", self.separation)
        _validate.integer("bins", self.bins, maximum=self.separation)
        _validate.integer("rounds", self.rounds, minimum=0)
        ratios = tuple(map(float, self.ratios))
        if not ratios or not all(0 <= ratio for ratio in ratios):
            raise ValueError(f"ratios is {ratios}; give a number >= 0 for each agent")
        object.__setattr__(self, "ratios", ratios)

    @property
    def agents(self) -> int:
        """Number of agents n."""
        return len(self.ratios)

    @property
    def times(self) -> int:
        """In how many rounds a record takes part, at most."""
        return ceil(self.rounds / self.separation)

    @property
    def draw_ratios(self) -> Floats:
        """[n] how far one round of a record moves the messages, in units of the noise."""
        return self.ratios

    @property
    def pattern(self) -> Pattern:
        """(epochs, separation) of a record's rounds."""
        return self.times, self.separation

    def pattern_text(self, unit: str) -> str:
        """The pattern in a statement, after the rounds.

        Args:
            unit: What is protected.
        """
        return f", of which every {unit} takes part in {self.times:,}, {self.separation:,} apart,"

    @property
    def unamplified(self) -> float:
        """Gaussian-DP mu of the same noise if the bins were known, rounded up."""
        return max(self.ratios) * sqrt(self.times) * rounding.MARGIN

    def epsilon(self, delta: float) -> float:
        """The epsilon of the agent that loses most, rounded up."""
        return _epsilon(self.bins, self.unamplified, checked_delta(delta))

    def scaled(self, factor: float) -> "BinLoss":
        """The loss with ratios larger by a factor: noise smaller by it.

        Args:
            factor: At least 0.
        """
        return dataclasses.replace(self, ratios=tuple(factor * ratio for ratio in self.ratios))

    def first_rounds(self, rounds: int) -> "BinLoss":
        """The same ratios in fewer rounds of every bin."""
        return dataclasses.replace(self, rounds=rounds)


@dataclass(frozen=True)
class Bins(Amplification):
    """What bins that nobody knows take off the loss: `BinLoss`.

    Attributes:
        separation: Bins, b.
    """

    kind = BinLoss.kind
    remedy = (
        "give a covariance over agents that is fresh in every round, or a strategy of few bands "
        "(noise.PrefixSum(bands=2), say), for bins that a small number from the bands on divides"
    )
    separation: int

    def hidden(self, target: SampledTarget, strategy: Matrix | None) -> int:
        """The bins that are left where the attacker knows the bin modulo the diagonals.

        Args:
            target: What the noise is for.
            strategy: [T, T] C over rounds; None is fresh noise.
        """
        # Columns of C that are this far apart have no row in common.
        diagonals = target.diagonals(strategy)
        spacings = [d for d in range(1, self.separation + 1) if self.separation % d == 0]
        # No wider one than the bins: more diagonals are refused.
        spacing = next((d for d in spacings if d >= diagonals), self.separation)
        return self.separation // spacing

    def bound(self, target: SampledTarget, strategy: Matrix | None) -> Numbers:
        """The bound on [R^-1]_ii that keeps the target's budget, the same for all agents."""
        moved = draw_sensitivity(target, strategy)
        budget = target.budget
        largest = _largest_ratio(self.hidden(target, strategy), budget.largest, budget.delta)
        # MARGINs cover what sums and roots of the loss round.
        round_ratio = largest / (sqrt(target.pattern.epochs) * rounding.MARGIN)
        deviation = round_ratio / (moved * rounding.MARGIN)
        return np.asarray(deviation**2 * (1 - 1e-12))

    def loss(self, target: SampledTarget, noise: SampledNoise) -> BinLoss:
        """What every agent loses, in each round of a record's bin by its ratio."""
        ratios = tuple(draw_ratios(target, noise).tolist())
        hidden = self.hidden(target, noise.strategy)
        return BinLoss(hidden, ratios, self.separation, target.rounds)


@dataclass(frozen=True)
class BallsInBins(CountedRecords):
    """Every record is in one bin, drawn once, and takes part in every b-th round.

    Batches vary in size. Where a batch is larger than the capacity, it is computed in several
    passes and never cut. Sums are divided by the largest number of an agent's records over the
    bins, a public number that is the same for all. Bins that are drawn anew in every cycle are
    another sampler, and so are shuffled batches of one size: neither is amplified here.

    Guarantee: every record of an agent is in the rounds of one bin and in no others, and its bin is
    independent of all other records, as far as threefry bits are; no bin has a probability above
    1 / b + 2^-64. Whoever knows the key knows the bins, and nothing is amplified against it: a run
    draws them from the noise's own key.

    Attributes:
        bins: Bins b, the rounds of a cycle; divides a run's rounds.
        capacity: Records a pass, to bound memory.
        records: Most records of an agent; the plan fills it in, and refuses another number.

    Reference:
        Chua et al. (2025), arXiv 2412.16802.

    Example:
        >>> from dpjax.plans.samplers import BallsInBins
        >>> BallsInBins(bins=5, capacity=16, records=40).divisor
        8.0
    """

    bins: int
    capacity: int = dataclasses.field()
    records: int | None = None

    key_of: ClassVar[Literal["round", "run"]] = "run"

    def __post_init__(self) -> None:
        """Refuse what is no number of bins or records."""
        _validate.fields(self, _validate.integer, "bins", maximum=2**16)
        _validate.fields(self, _validate.integer, "capacity", maximum=2**31 - 2)
        if self.records is not None:
            _validate.fields(self, _validate.integer, "records", maximum=2**31 - 2)

    @property
    def divisor(self) -> float:
        """Sums are divided by the largest expected batch; nan before a plan has said it."""
        return float("nan") if self.records is None else self.records / self.bins

    def pattern(self, rounds: int) -> Pattern:
        """(epochs, separation) of the rounds in which one record takes part.

        Raises:
            ValueError: For rounds that are no multiple of the bins.
        """
        # Else some bins would have a round more, and another loss.
        if rounds % self.bins:
            raise ValueError(
                f"rounds is {rounds} for sampler {self}; give a multiple of {self.bins}, in which "
                "every bin has as many rounds"
            )
        return rounds // self.bins, self.bins

    def fill_share(self, counts: Indices, rounds: int) -> Numbers:
        """The share of records in the largest expected batch, [n]."""
        del rounds
        return np.asarray(counts) / self.places

    def check(self, counts: Indices, agents: Sequence[str] | None = None) -> None:
        """Refuse agents with fewer records than bins, most of whose batches would be empty."""
        index = int(np.argmin(counts))
        fewest = counts[index]
        if fewest < self.bins:
            agent = f"agent {index}" if agents is None else agents[index]
            raise ValueError(
                f"bins is {self.bins}, but {agent} has {_validate.counted(fewest, 'record')}; "
                f"lower it to {fewest} at most"
            )

    def amplification(self, counts: Indices | None = None) -> Bins:
        """What the secret bins take off the loss, whatever the counts."""
        del counts
        return Bins(self.bins)

    def draw(self, key: PRNGKeyArray, round: Int[Array, ""], counts: Int[Array, " n"]) -> Draw:
        """Draw a round's records, those of its bin.

        Args:
            key: The run's key, the same in every round, so that the bins are.
            round: Rounds done before this one.
            counts: [n] records of each agent.

        Raises:
            ValueError: Where ``records`` is None.
        """
        counts = jnp.asarray(counts, jnp.int32)[:, None]
        # Of 64 bits the remainder, by two words: 32 bits would favour the first bins by b / 2^32,
        # which is no small share of a delta.
        agents = counts.shape[0]
        words = _numerics.threefry_bits(key, (2 * agents, self.places))
        divisor = jnp.uint32(self.bins)
        high = words[:agents] % divisor
        low = words[agents:] % divisor
        bins = (high * jnp.uint32(2**32 % self.bins) + low) % divisor
        turn = jnp.mod(jnp.asarray(round, jnp.int32), self.bins)
        positions = jnp.arange(self.places, dtype=jnp.int32)[None, :]
        drawn = (bins == turn.astype(jnp.uint32)) & (positions < counts)
        return Draw.of_flags(drawn, self.capacity)


class _Mean(NamedTuple):
    """The distribution of a mean of likelihood ratios, from above in convex order.

    Attributes:
        values: [m] its values, rising from 0.
        masses: [m] their probabilities.
        lost: What the mean has above the largest value.
    """

    values: Vector
    masses: Vector
    lost: float


def _epsilon(bins: int, mu: float, delta: float) -> float:
    """The epsilon of one agent in both directions, rounded up."""
    unamplified = float(gdp.epsilon(mu, delta))
    if bins == 1 or mu == 0 or mu > _LARGEST_RATIO or delta < _LEAST_DELTA:
        return unamplified
    mean = _mean(bins, max(mu, _LEAST_RATIO))
    # Masses of a mean are products of as many masses as there are bins.
    allowed = delta * (1 - _MASS_ROUNDING * bins) - 2 * mean.lost
    weighted = mean.values * mean.masses
    # The record is there: E (R - e^eps)_+ is the largest sum of masses times (value - e^eps) over
    # upper sets, so that e^eps is the largest of these quotients.
    upper_mass = mean.masses[::-1].cumsum()
    upper_value = weighted[::-1].cumsum()
    # It is zeroed out: E (1 - e^eps R)_+, over lower sets.
    lower_mass = mean.masses.cumsum()[1:]
    lower_value = weighted.cumsum()[1:]
    with np.errstate(divide="ignore"):
        present = np.max((upper_value - allowed) / upper_mass)
        absent = np.max((lower_mass - allowed) / lower_value)
    epsilon = log(max(present, absent, 0.5)) + _LOG_ROUNDING
    return min(unamplified, max(epsilon, 0.0))


@lru_cache
def _mean(bins: int, ratio: float) -> _Mean:
    """The mean of as many lognormals as bins, by doubling and adding one."""
    single = _lognormal(ratio)
    # R_n, the mean of n: R_2n is the mean of two, R_2n+1 that of R_2n and one more.
    mean = single
    count = 1
    for digit in f"{bins:b}"[1:]:
        mean = _averaged(mean, count, mean, count)
        count *= 2
        if digit == "1":
            mean = _averaged(mean, count, single, 1)
            count += 1
    return mean


def _lognormal(ratio: float) -> _Mean:
    """exp(a g - a^2 / 2) of a standard normal g on a grid."""
    ends = np.linspace(-_REACH, _REACH + ratio, _NODES)
    values = np.append(0.0, np.exp(ratio * ends - ratio**2 / 2))
    # Between two ends: the probability, and the value's mean times it.
    masses = _normal_cells(ends)
    weighted = _normal_cells(ends - ratio)
    right = (weighted - values[:-1] * masses) / np.diff(values)
    right = np.clip(right, 0.0, masses)
    shared = np.append(masses - right, 0.0) + np.append(0.0, right)
    # What is above the last end counts as there, and what it has above it as lost.
    shared[-1] += ndtr(-ends[-1])
    return _Mean(values, shared, ndtr(ratio - ends[-1]))


def _normal_cells(ends: Vector) -> Vector:
    """Probabilities of a standard normal below the first end, and between each two."""
    # Of the two tails the smaller one, in which a difference loses less.
    below = ndtr(ends)
    above = ndtr(-ends)
    cells = np.where(ends[1:] > 0, above[:-1] - above[1:], below[1:] - below[:-1])
    return np.append(below[0], cells)


def _averaged(first: _Mean, first_count: int, second: _Mean, second_count: int) -> _Mean:
    """The mean of two independent means of so many, on a grid of its own."""
    count = first_count + second_count
    first_share = first_count / count
    second_share = second_count / count
    values = np.add.outer(first_share * first.values, second_share * second.values).ravel()
    masses = np.multiply.outer(first.masses, second.masses).ravel()
    lost = first_share * first.lost + second_share * second.lost
    with np.errstate(divide="ignore"):
        logs = np.log(values)
    low, high = _ends(logs, values, masses)
    width = (high - low) / (_NODES - 1)
    grid = np.append(0.0, np.exp(low + width * np.arange(_NODES)))
    # What is above the grid counts as its top, and the rest as lost.
    excess = np.maximum(values - grid[-1], 0.0)
    lost += masses @ excess
    # The first cell is the one from 0 to the grid's lowest positive number.
    numbers = np.floor((logs - low) / width) + 1
    cells = np.clip(numbers, 0, _NODES - 1).astype(np.intp)
    right = np.clip((values - grid[cells]) / np.diff(grid)[cells], 0.0, 1.0) * masses
    shared = np.bincount(cells, masses - right, minlength=_NODES + 1)
    shared += np.bincount(cells + 1, right, minlength=_NODES + 1)
    return _Mean(grid, shared, lost)


def _ends(logs: Vector, values: Vector, masses: Vector) -> tuple[float, float]:
    """Logarithms between which all but the tails lie, of the mass below and of the mean above."""
    # The value 0 has no logarithm, and next to no mass.
    positive = values > 0
    logs = logs[positive]
    masses = masses[positive]
    below, ends = np.histogram(logs, _CELLS, weights=masses)
    above, _ = np.histogram(logs, _CELLS, weights=masses * values[positive])
    first = int(np.searchsorted(below.cumsum(), _TAIL))
    last = int(np.count_nonzero(above[::-1].cumsum() > _TAIL))
    return ends[first], ends[max(last, first + 1)]


@lru_cache
def _largest_ratio(bins: int, epsilon: float, delta: float) -> float:
    """The largest ratio of all rounds together that keeps the budget, from below."""
    from scipy import optimize

    allowed = epsilon * (1 - _CLOSE)
    # What holds where the bins are known holds where they are secret.
    known_mu = float(gdp.mu(epsilon * (1 - 2 * _CLOSE), delta))
    low = known_mu * (1 - 1e-9)

    def excess(log_ratio: float) -> float:
        return _epsilon(bins, exp(log_ratio), delta) / allowed - 1

    start = log(low)
    end = start + log(2)
    while excess(end) < 0:
        start = end
        end += log(2)
    root = optimize.brentq(excess, start, end, xtol=_CLOSE / 4, rtol=_CLOSE / 4)
    # A root is on either side of the budget.
    while excess(root) > 0:
        root -= _CLOSE
    return exp(max(root, log(low)))
