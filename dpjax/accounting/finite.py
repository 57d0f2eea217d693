"""What noise of finite precision costs: the grid of a release, and its epsilon and delta.

The ideal mechanism M* adds real Gaussian noise x = B z to what is protected, B = C^-1 (x) F, and
rounds to a grid of spacing h: post-processing, as private as the Gaussian mechanism. A release M
has normals z~ of 64 bits, colours them in float64, and rounds the same sum. What is sent differs
only where z~ and z fall into different cells. The page 'Proofs' of the manual derives this bound:

    M(S) <= e^eta M*(S) + beta   and   M*(S) <= e^eta M(S) + beta,   beta without a factor e^epsilon

so that (epsilon, delta') of M* gives M (epsilon + 2 eta, e^eta delta' + beta).

F may be [own | links], with more normals than messages, of which an attacker may know any that
links add. The own ones then smooth the cells alone, given all others.
"""

from collections.abc import Callable
from math import exp, expm1, floor, inf, log, log2, pi, sqrt
from typing import Any, NamedTuple, TypeVar

import numpy as np
from scipy import special
from scipy.sparse import diags_array

from dpjax import _validate
from dpjax.accounting import precision
from dpjax.accounting.arrays import Matrix, Numbers, Vector
from dpjax.mechanism import strategy as strategy_

__all__ = ["release_cost", "release_grid"]

# Largest share of delta that finite precision may use.
LIMIT = 0.01

_T = TypeVar("_T")
_UNIT = 2.0**-53
_SLOPE = 12.0
_COARSEST = 2.0**-3
_FINEST = 2.0**-12
_SHARE = 0.01


def _density(z: float) -> float:
    return exp(-(z**2) / 2) / sqrt(2 * pi)


def _tail(z: float) -> float:
    return float(special.ndtr(-z))


def _quantile(p: float) -> float:
    """The z of tail probability p."""
    return -float(special.ndtri(p))


class NormalSampler(NamedTuple):
    """How normals follow from bits: quantiles of the middles of cells of tail probability.

    Attributes:
        half: Half the width of a cell of the tail probability p.
        finer_half: The same for p below ``finer``.
        finer: Probability below which more bits are drawn.
        last: Least p of which a cell is a small part; beyond it, nothing is claimed.
        error: A computed normal is within error (1 + |z|) of its cell's quantile.
    """

    half: float
    finer_half: float
    finer: float
    last: float
    error: float

    @property
    def reach(self) -> float:
        """Standard deviations up to which normals follow a real one."""
        return _quantile(self.last)

    def discreteness(self, z: float) -> float:
        """How far a normal of up to ``z`` may lie from the real one it stands for.

        Half a cell, over the slope phi of the quantile at its outer end; infinite beyond `reach`.
        """
        if z > self.reach:
            return inf
        edge = _quantile(self.finer)
        coarse = self.half / _density(min(z, edge))
        finer = self.finer_half / _density(z) if z > edge else 0.0
        # The outer end lies up to half a cell beyond z.
        return max(coarse, finer) * (1 + 2 * max(self.half / self.finer, 2.0**-30))


# That of `dpjax.transforms.variates`: 64 bits, 64 more below 2^-32, up to 11.3 deviations.
SAMPLER = NormalSampler(2.0**-65, 2.0**-129, 2.0**-32, 2.0**-97, 2.0**-48)


class Grid(NamedTuple):
    """The grid that noisy sums are rounded to.

    Attributes:
        spacing: h, a power of two.
        deviation: The least standard deviation of a coordinate of the noise given all other
            agents' and rounds' noise, and all normals of links.
        variance: h^2 / 12, which rounding adds to every message; it does not cancel in sums.
        share: What it adds, as a share, to the noise variance of the network's mean summed over
            the run.

    Example:
        >>> import numpy as np
        >>> from dpjax.accounting import finite
        >>> finite.release_grid(np.eye(3), rounds=10).deviation
        1.0
    """

    spacing: float
    deviation: float
    variance: float
    share: float


class Cost(NamedTuple):
    """What finite precision adds to a guarantee.

    Attributes:
        epsilon: 2 eta.
        delta: (e^eta - 1) delta + beta: the part of delta that it uses.
        draws: Normals of the whole run.

    Example:
        >>> from dpjax.accounting.finite import Cost
        >>> Cost(epsilon=1e-9, delta=1e-12, draws=100).draws
        100
    """

    epsilon: float
    delta: float
    draws: int


class _Sums(NamedTuple):
    """Absolute sums of B = C^-1 (x) F and of its inverse A, which propagate errors.

    ``totals`` is signed: the squared column sums of C^-1, summed.
    """

    columns_f: Vector
    columns_c: Vector
    columns_m: Vector
    totals: float
    rows: float
    within: float
    precision: float
    deviation: float
    terms: int


def release_grid(factor: Matrix, rounds: int, strategy: Matrix | None = None) -> Grid:
    """Choose the grid of a release from its noise.

    The largest power of two that is at most an eighth of the least conditional deviation, adds at
    most 1 % to the variance of the network's mean (unless that takes a grid below 2^-12
    deviations), and over a cell of which no normal moves by more than 1/2.

    Args:
        factor: [n, n] F; noise over agents has covariance F F'. Or [n], a diagonal; or [n, n + e],
            as in `release_cost`.
        rounds: T.
        strategy: [T, T] C as applied; None is the identity.

    Returns:
        The grid.

    Raises:
        ValueError: For a singular factor.

    Example:
        >>> import numpy as np
        >>> from dpjax.accounting import finite
        >>> finite.release_grid(np.eye(3), rounds=10).spacing
        0.125
    """
    sums = _sums(factor, rounds, strategy, recursive=False)
    n = len(factor)
    columns = factor if np.ndim(factor) == 1 else factor.sum(axis=0, dtype=float)
    mean = float(np.square(columns, dtype=float).sum()) / n**2
    mean *= rounds if strategy is None else sums.totals
    spacing = 2.0 ** floor(log2(sums.deviation * _COARSEST))

    def share(h: float) -> float:
        return rounds * h**2 / 12 / n / mean if mean > 0 else inf

    while share(spacing) > _SHARE and spacing / 2 >= sums.deviation * _FINEST:
        spacing /= 2
    while spacing * sums.within > 0.5 or spacing**2 * sums.precision > 1:
        spacing /= 2
    return Grid(spacing, sums.deviation, spacing**2 / 12, share(spacing))


def release_cost(
    factor: Matrix,
    rounds: int,
    strategy: Matrix | None = None,
    *,
    spacing: float,
    parameters: int,
    mu: float,
    delta: float,
    clip_norm: float,
    recursive: bool = False,
    sampler: NormalSampler = SAMPLER,
) -> Cost:
    """Bound what finite precision adds to a release, over all of its draws.

    Guarantee: for every neighbouring pair of data sets, against an outsider who sees every
    message: if the ideal mechanism is (e, delta - cost.delta)-DP, the release is
    (e + cost.epsilon, delta)-DP, provided that the generator of bits (threefry, and ChaCha20 at
    sites) is pseudorandom, that normals are those of `dpjax.transforms.variates`, and that they are
    coloured and added in float64. It is so, too, against who knows any normals of links, chosen or
    not, and all of some agents: ``mu`` is then that of the ideal mechanism against the same
    attacker.

    Args:
        factor: [n, n] F, or [n], a diagonal. Or [n, n + e]: F = [own | links], of which the square
            part is invertible, and the e further columns are of normals that others may know.
        rounds: T.
        strategy: [T, T] C as applied in float64; None is the identity.
        spacing: h.
        parameters: d, numbers an agent sends a round.
        mu: Gaussian-DP parameter of the ideal mechanism.
        delta: Delta of the guarantee.
        clip_norm: C, which bounds what the noise is added to.
        recursive: True where the strategy is applied by its own recursion, which feeds rounding
            errors back, and not by C^-1.
        sampler: How normals follow from bits.

    Returns:
        The cost; infinite epsilon and delta where rounding errors are no small part of a cell.

    Raises:
        ValueError: For a singular factor or numbers out of range.

    Example:
        >>> import numpy as np
        >>> from dpjax.accounting import finite
        >>> sizes = dict(spacing=2.0**-20, parameters=100, mu=1.0, delta=1e-5, clip_norm=1.0)
        >>> cost = finite.release_cost(np.eye(3), 10, **sizes)
        >>> cost.draws, cost.epsilon < 0.01
        (3000, True)
    """
    parameters = _validate.integer("parameters", parameters)
    delta = _validate.probability("delta", delta)
    sums = _sums(factor, rounds, strategy, recursive=recursive)
    draws = len(sums.columns_f) * rounds * parameters
    within = sums.within * spacing * 1.01
    slope = (mu + _SLOPE) * spacing / sums.deviation + spacing**2 * sums.precision * 1.01
    # Twice the error over the cell is what a cell's two ends gain or lose, by a density's slope.
    ends = 2 / spacing * slope / -expm1(-slope) * 1.02

    sampled = ends * np.outer(sums.columns_c, sums.columns_f).ravel()
    # Rounding in sums over rounds, then over agents, for a unit of each normal.
    sums_c = 0 if strategy is None else rounds + 2
    sums_f = sums.terms + 3
    coloured = 1.01 * _UNIT * (sums_c * sums.columns_m + sums_f * sums.columns_c)
    coloured = ends * np.outer(coloured, sums.columns_f).ravel()
    added = ends * 2 * _UNIT * clip_norm
    reach = sampler.reach
    furthest = sampler.error * (1 + reach) + sampler.discreteness(reach)
    distances = furthest + 1.01 * _UNIT * (sums_c + sums_f) * reach
    # Beyond, the mean of a cell's effects is not bounded by its first order.
    farthest_move = ends * sums.rows * distances + added
    if within > 1 or farthest_move > 0.005:
        return Cost(inf, inf, draws)

    log_rest = -log(1e-6 * delta)
    # A normal beyond the reach, or a density of more than the slope.
    room = reach - within
    tails = _tail(room) + _tail(room - 0.5)
    beyond = 2 * draws * tails + 8 * mu**2 * _tail(room - mu)
    steep = 4 * draws * _tail(_SLOPE)
    beta = (beyond + steep) * 1.01 + 4 * exp(-log_rest)
    errors = sampled * furthest + coloured * reach
    copies = draws // len(errors)
    eta = inf
    largest = float(errors.max())
    for shift in (1 / 8, 1 / 4, 1 / 2, 1):
        mean = _mean(sampler, sampled, coloured, within, shift)
        for rate in (0.03, 0.1, 0.3, 1.0):
            moved = largest * ((mu / shift) ** 2 + log_rest / rate)
            expected = copies * mean * expm1(rate) / rate
            eta = min(eta, expected + moved)
    # Whoever knows normals of links may have chosen them: these count at their largest.
    chosen = coloured.reshape(-1, len(sums.columns_f))[:, len(factor) :]
    eta += added * draws + copies * reach * float(chosen.sum())
    # Fresh noise, by rounds and coordinates: errors of both signs add up like a random walk.
    steps = rounds * parameters
    step_error = float(errors.sum()) + len(errors) * added
    deviations = 2 * mu / sqrt(2 * pi) + sqrt(2 * log_rest)
    walk = step_error * sqrt(steps) * deviations
    if strategy is None and step_error < 0.1:
        drift = 4 * steps * step_error**2
        eta = min(eta, walk + drift + beta)
    if eta > 1:
        return Cost(inf, inf, draws)
    return Cost(2 * eta, expm1(eta) * delta + beta, draws)


def of_group(records: int, mu: float, spent: tuple[float, float], delta: float) -> Cost:
    """Bound what finite precision adds where several records change together, from one's cost.

    The proof of `release_cost` asks of two data sets how far apart their means are: k mu, for k
    records. Of what mu is in, the density's slope over a cell grows by (k - 1) mu / 8 at most,
    since a cell of a `release_grid` is an eighth of the deviation. What is lost at a cell's ends is
    x / (1 - e^-x) of that slope x, so it grows by the factor 1 + (k - 1) mu / 8: below 2 wherever
    the cost is less than delta, which the margins of `release_cost` hold. Sums of losses have
    mu^2 as a factor, or mu, or none. Only normals that a shift of k mu takes beyond the reach come
    anew.

    Guarantee: nothing is below what `release_cost` states at k mu, for noise on a `release_grid`.

    Args:
        records: k.
        mu: Gaussian-DP parameter of the ideal mechanism, per record.
        spent: What is added for one record, of epsilon and of delta; sums over phases.
        delta: Delta of the guarantee.

    Returns:
        The cost; infinite where sums of losses are too large for the bound.
    """
    group_mu = records * mu
    beyond = 1.01 * 8 * group_mu**2 * _tail(SAMPLER.reach - 1 - group_mu)
    eta = spent[0] / 2 * records**2 * (1 + (group_mu - mu) / 8) + beyond
    if eta > 1:
        return Cost(inf, inf, 0)
    return Cost(2 * eta, expm1(eta) * delta + spent[1] + beyond, 0)


def grown(
    state: Callable[[float], tuple[_T, float]], added_delta: float, delta: float, epsilon: float
) -> _T | None:
    """What is stated where a larger epsilon makes finite precision take more of delta.

    The part that it takes grows like e^epsilon.

    Args:
        state: From the part of delta that it takes to what is stated, and its epsilon.
        added_delta: The part at ``epsilon``.
        delta: Delta.
        epsilon: Epsilon as it was.

    Returns:
        What is stated; None where nothing of delta is left.
    """
    added = added_delta
    while added < delta or added == 0:
        stated, cost = state(added)
        growth = exp(min(max(0.0, cost - epsilon), 700.0))
        if added >= added_delta * growth:
            return stated
        added = 1.01 * added_delta * growth
    return None


def _mean(
    sampler: NormalSampler, sampled: Numbers, coloured: Numbers, within: float, shift: float
) -> float:
    """Sum of the mean effects of normals that are each moved by up to ``shift``."""
    zeroth = exp(shift**2 / 2)
    first = 2 * _density(shift) + shift * (1 - 2 * _tail(shift))
    first = (first + within) * zeroth
    rate = within + shift
    edge = _quantile(sampler.finer)
    ends = ((sampler.half, edge), (sampler.finer_half, sampler.reach))
    # The density cancels against the slope of the quantile: what is left grows with `rate` alone.
    cells = 0.0
    for half, end in ends:
        cells += 2 * half * exp(within**2 / 2) * expm1(rate * end) / rate
    # Beyond the edge, within a cell of the wider ones before it.
    wide = 2 * sampler.half / _density(edge) * zeroth * _tail(edge - rate)
    of_sampler = sampler.error * (zeroth + first) + 1.01 * (cells + wide)
    return float(sampled.sum() * of_sampler + coloured.sum() * first)


def _sums(factor: Numbers, rounds: int, strategy: Numbers | None, *, recursive: bool) -> _Sums:
    factor = _validate.finite_array("factor", factor)
    rounds = _validate.integer("rounds", rounds)
    # Errors come of all normals; what smooths a cell are the own ones.
    square = factor if factor.ndim == 1 else factor[:, : len(factor)]
    diagonal = precision.diagonal_of(square)
    if diagonal is None:
        rank = np.linalg.matrix_rank(_validate.square("factor", square))
        singular = rank < len(factor)
    else:
        sizes = abs(diagonal)
        singular = (sizes <= sizes.max() * len(factor) * 2.0**-52).any()
    if singular:
        raise ValueError(
            "factor is singular: some combination of the messages carries no noise; give a factor "
            "of full rank"
        )
    if diagonal is None:
        inverse = np.linalg.inv(square)
    else:
        inverse = diags_array(1 / diagonal, format="csr")
    if factor.ndim == 1:
        factor = diags_array(factor, format="csr")
    c = np.ones((1, 1)) if strategy is None else strategy_.check_strategy(strategy, rounds)
    c_inverse = strategy_.inverse_of(c)
    feedback = abs(c_inverse)
    if recursive:
        feedback = feedback @ abs(c) @ feedback
    over_agents = inverse.T @ inverse
    over_rounds = c.T @ c
    largest = over_agents.diagonal().max() * over_rounds.diagonal().max()

    def rows(left: Any, right: Numbers) -> float:
        return float(abs(left).sum(1).max() * abs(right).sum(1).max())

    return _Sums(
        columns_f=abs(factor).sum(0),
        columns_c=abs(c_inverse).sum(0),
        columns_m=feedback.sum(0),
        totals=float(np.square(c_inverse.sum(0)).sum()),
        rows=rows(factor, feedback),
        within=rows(inverse, c),
        precision=rows(over_agents, over_rounds),
        deviation=1 / sqrt(largest),
        terms=int((factor != 0).sum(1).max()),
    )
