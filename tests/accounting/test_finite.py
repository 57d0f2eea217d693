"""What finite precision costs, against cells counted one by one and 60-digit arithmetic."""

import math

import mpmath as mp
import numpy as np
import pytest
from scipy import stats

from dpjax.accounting import finite, gdp

COARSE = finite.NormalSampler(2.0**-19, 2.0**-19, 2.0**-8, 2.0**-8, 1e-15)
"""18 bits, one of them the sign: every value can be counted."""


def values(bits):
    """Every normal of a sampler of so many bits."""
    p = (np.arange(2 ** (bits - 1)) + 0.5) * 2.0**-bits
    z = stats.norm.isf(p)
    return np.concatenate([z, -z])


def test_discreteness_bounds_every_kind_of_cell():
    rng = np.random.default_rng(0)
    result = finite.SAMPLER
    with mp.workdps(60):

        def normal(p):
            z = mp.mpf(float(stats.norm.isf(float(p))))
            for _ in range(4):
                z += (mp.erfc(z / mp.sqrt(2)) / 2 - p) / mp.npdf(z)
            return z

        nearest = []
        for exponent in [*rng.uniform(-96.9, -1, 60), -32.001, -31.999]:
            width = mp.mpf(2) ** (-64 if exponent > -32 else -128)
            low = mp.floor(mp.mpf(2) ** mp.mpf(exponent) / width) * width
            middle = normal(low + width / 2)
            z = normal(low + width)
            for edge in (normal(low) if low else z, z):
                bound = result.discreteness(float(edge))
                nearest.append(float(abs(edge - middle) / mp.mpf(bound)))
    assert max(nearest) <= 1
    # Not loose: a bound of a tenth is caught.
    assert max(nearest) > 0.1
    assert result.discreteness(result.reach + 1e-9) == math.inf
    assert result.discreteness(result.reach) < 2.1e-11


def pointwise(z, factor, spacing, sampler):
    """The docs' bound on |log| of a cell's ratio, all of its points within |z|."""
    inverse = np.linalg.inv(factor)
    precision = inverse.T @ inverse
    error = np.abs(factor) @ np.array([sampler.discreteness(item) for item in z])
    slope = spacing * (np.abs(inverse.T) @ z)
    assert (np.diag(precision) > 0).all()
    lost = 2 * error / spacing * slope / -np.expm1(-slope)
    return float(-np.log1p(-lost).sum()) if (lost < 0.5).all() else math.inf


@pytest.mark.parametrize("shift", [0.0, 0.37])
@pytest.mark.parametrize("spacing", [0.25, 0.5])
def test_cells_of_one_coordinate_counted_exactly(spacing, shift):
    sigma = 1.3
    drawn = np.round((shift + sigma * values(18)) / spacing).astype(int)
    cells, counts = np.unique(drawn, return_counts=True)
    worst = 0.0
    for cell, count in zip(cells, counts, strict=True):
        ends = (np.array([cell - 0.5, cell + 0.5]) * spacing - shift) / sigma
        if np.abs(ends).max() > COARSE.reach:
            continue
        ideal = stats.norm.cdf(ends[1]) - stats.norm.cdf(ends[0])
        bound = pointwise(np.abs(ends).max(keepdims=True), sigma * np.eye(1), spacing, COARSE)
        ratio = abs(math.log(count / 2**18 / ideal))
        assert ratio <= bound
        worst = max(worst, ratio / bound)
    assert worst > 0.02  # The bound is within a factor of the truth, so a broken one is caught.


def test_cells_of_two_correlated_coordinates_counted_exactly():
    factor = np.array([[1.0, 0.0], [-0.6, 0.7]])
    spacing = 0.5
    sampler = finite.NormalSampler(2.0**-12, 2.0**-12, 2.0**-4, 2.0**-4, 1e-15)
    z = values(11)
    first = np.round(factor[0, 0] * z / spacing).astype(int)
    second = np.round((factor[1, 0] * z[:, None] + factor[1, 1] * z) / spacing).astype(int)
    codes, counts = np.unique((first[:, None] * 1000 + second).ravel(), return_counts=True)
    cells = np.stack([np.round(codes / 1000).astype(int)] * 2)
    cells[1] = codes - 1000 * cells[0]
    nodes, weights = np.polynomial.legendre.leggauss(20)
    inverse = np.linalg.inv(factor)
    checked = 0
    for cell, count in zip(cells.T, counts, strict=True):
        points = (cell[:, None, None] + np.stack(np.meshgrid(nodes, nodes)) / 2) * spacing
        corners = (cell[:, None] + np.array([[1, 1, -1, -1], [1, -1, 1, -1]]) / 2) * spacing
        maximum = np.abs(inverse @ corners).max(axis=1)
        bound = (
            pointwise(maximum, factor, spacing, sampler)
            if maximum.max() < sampler.reach
            else np.inf
        )
        if math.isinf(bound):
            continue
        density = stats.norm.pdf(np.einsum("ij,jkl->ikl", inverse, points)).prod(axis=0)
        area = spacing**2 / 4 * abs(np.linalg.det(inverse))
        ideal = float(weights @ density @ weights) * area
        assert abs(math.log(count / len(z) ** 2 / ideal)) <= bound
        checked += 1
    assert checked >= 9


def priced(draws=10**6, factor=None, mu=2.0, delta=1e-5, rounds=10, strategy=None, **options):
    factor = np.eye(4) if factor is None else factor
    parameters = -(-draws // (len(factor) * rounds))
    spacing = finite.release_grid(factor, rounds, strategy).spacing
    return finite.release_cost(
        factor, rounds, strategy,
        **{"spacing": spacing, "mu": mu, "delta": delta, "clip_norm": 1.0, "parameters": parameters}
        | options,
    )  # fmt: skip


def test_cost_bounds_exact_closeness_of_small_run():
    # One draw of one coordinate: its largest ratio, and what lies beyond its reach.
    spacing = 0.25
    sampler = finite.NormalSampler(2.0**-23, 2.0**-23, 2.0**-9, 2.0**-9, 1e-15)
    cost = finite.release_cost(
        np.eye(1), 1, spacing=spacing, parameters=1, mu=0.5, delta=0.4, clip_norm=1.0,
        sampler=sampler,
    )  # fmt: skip
    z = values(22)
    cells, counts = np.unique(np.round(z / spacing).astype(int), return_counts=True)
    ideal = np.diff(stats.norm.cdf((np.append(cells, cells[-1] + 1) - 0.5) * spacing))
    ratio = np.abs(np.log(counts / len(z) / ideal))
    near = np.abs(cells * spacing) + spacing / 2 <= sampler.reach
    assert 0 < ratio[near].max() <= cost.epsilon / 2 < 0.1
    assert ideal[~near].sum() + counts[~near].sum() / len(z) <= cost.delta


def test_both_directions_of_closeness_are_paid_for():
    """Release and ideal noise are within e^eta of each other: the loss takes it twice."""
    reduced, extras = (priced(10**10, delta=delta) for delta in (1e-3, 1.001e-3))
    eta = math.log1p((extras.delta - reduced.delta) / 1e-6)
    assert extras.epsilon == pytest.approx(2 * eta, rel=0.02)


def test_cost_grows_with_draws_and_with_correlation():
    few = priced(10**6)
    many = priced(10**10)
    assert 0 < few.epsilon < many.epsilon < 0.02 and 0 < few.delta < many.delta
    assert many.delta <= finite.LIMIT * 1e-5, "10^10 draws of independent noise are affordable"
    assert many.draws == 10**10
    # Noise that cancels: the same conditional deviations, a hundred times the marginal ones.
    cancelling = np.linalg.cholesky(np.eye(4) + 1e4 * (np.eye(4) - 0.25))
    assert priced(factor=cancelling).epsilon > 10 * few.epsilon
    assert priced(10**12, factor=1e3 * cancelling, spacing=2.0**-10).delta > finite.LIMIT * 1e-5


def test_strategy_that_feeds_errors_back_costs_more():
    rounds = 40
    strategy = np.eye(rounds) + np.diag(np.full(rounds - 1, 0.9), -1)
    plain, fed = (
        priced(rounds=rounds, strategy=strategy, recursive=recursive) for recursive in (False, True)
    )
    assert plain.epsilon < fed.epsilon < 100 * plain.epsilon


def test_grid_is_share_of_conditional_deviations_and_of_mean():
    # 100 agents whose noise almost cancels: each alone has a large one, given the others a small.
    n = 100
    covariance = 1e4 * (np.eye(n) - 1 / n) + np.eye(n)
    grid = finite.release_grid(np.linalg.cholesky(covariance), 50)
    conditional = 1 / math.sqrt(np.linalg.inv(covariance).diagonal().max())
    assert grid.deviation == pytest.approx(conditional, rel=1e-9)
    assert conditional < 10 and math.frexp(grid.spacing)[0] == 0.5
    assert grid.spacing <= conditional / 8 and grid.variance == grid.spacing**2 / 12
    # One agent's rounding has this share of the variance of the mean's noise, n agents' as well.
    assert grid.share == pytest.approx(grid.variance / n / (covariance.sum() / n**2))
    assert grid.share <= 0.01
    # Over rounds: the last of a sum that cancels.
    strategy = np.tril(np.ones((50, 50)))
    over = finite.release_grid(np.eye(3), 50, strategy)
    assert over.deviation == pytest.approx(1 / math.sqrt(50))
    assert over.share == pytest.approx(50 * over.variance / 3 / (1 / 3))


def test_refusals():
    with pytest.raises(ValueError, match="factor is singular"):
        finite.release_grid(np.ones((3, 3)), 5)
    with pytest.raises(ValueError, match="strategy has shape"):
        finite.release_grid(np.eye(3), 5, np.eye(4))
    assert math.isinf(priced(spacing=2.0**-60).delta)
    assert gdp.epsilon(2.0, 1e-5 - priced().delta) < gdp.epsilon(2.0, 1e-5) * (1 + 1e-4)


@pytest.mark.parametrize("within", [0.02, 0.5])
@pytest.mark.parametrize("shift", [0.125, 1.0])
def test_mean_effects_against_quadrature(within, shift):
    single = np.ones(1)
    none = np.zeros(1)
    sampler = finite.SAMPLER
    z = np.linspace(0, sampler.reach - within, 40_001)
    weight = 2 * stats.norm.pdf(z) * np.cosh(shift * z)
    cells = np.array([sampler.discreteness(float(item)) for item in z + within])
    exact = np.trapezoid(weight * cells, z)
    only_cells = finite._mean(sampler._replace(error=0.0), single, none, within, shift)
    assert exact <= only_cells <= 10 * exact
    linear = np.trapezoid(weight * (z + within), z)
    assert (
        linear * (1 - 1e-6) <= finite._mean(sampler, none, single, within, shift) <= 1.01 * linear
    )


def share_below(ends, bits):
    """How many of a sampler's 2^bits normals, as a share, lie below: middles of cells are."""
    return np.round(stats.norm.cdf(ends) * 2.0**bits) * 2.0**-bits


def cells_of(offsets, sizes, own, spacing, bits=None):
    """[cells, offsets] probabilities of rounded ``offset + own z``; None is for real normals."""
    ends = ((np.arange(-sizes, sizes + 2) - 0.5)[:, None] * spacing - offsets) / own
    below = stats.norm.cdf(ends) if bits is None else share_below(ends, bits)
    return np.diff(below, axis=0)


def test_message_given_normal_of_its_link_counted_exactly():
    """The release adds c times the link's normal; the ideal mechanism any real one of its cell."""
    bits = 26
    strength = 1000.0
    spacing = 0.25
    sampler = finite.NormalSampler(2.0**-27, 2.0**-27, 2.0**-5, 2.0**-5, 1e-15)
    factor = np.array([[1.0, strength]])
    sizes = dict(spacing=spacing, parameters=1, mu=0.5, delta=0.4, clip_norm=1.0, sampler=sampler)
    cost = finite.release_cost(factor, 1, **sizes)
    rng = np.random.default_rng(0)
    # Cells of the link's normal, up to the reach: in between is the number that is drawn.
    first = np.floor(rng.uniform(2.0**-5, 1 - 2.0**-5, 500) * 2**bits)
    drawn = stats.norm.ppf((first + 0.5) * 2.0**-bits)
    worst = 0.0
    near = np.abs(np.arange(-8, 9)) * spacing + spacing / 2 <= sampler.reach
    for place in (0.0, 1.0):
        real = stats.norm.ppf((first + place) * 2.0**-bits)
        # Where a message comes to lie decides nothing, so the common part is taken away.
        release = cells_of(np.zeros(500), 8, 1.0, spacing, bits)
        ideal = cells_of(strength * (real - drawn), 8, 1.0, spacing)
        worst = max(worst, np.abs(np.log(release / ideal))[near[2:-2].nonzero()[0] + 2].max())
    assert 0 < worst <= cost.epsilon / 2 < 0.2
    # Errors of own normals alone are no bound.
    assert finite.release_cost(factor[:, :1], 1, **sizes).epsilon / 2 < worst


@pytest.mark.parametrize("knows", [False, True])
def test_two_messages_of_one_link_are_as_private_as_stated(knows):
    """Every pair of messages, summed over all normals of the link, or with the one that it had."""
    sizes = (1.0, 1.25)
    link = 0.75
    spacing = 0.25
    bits = 18
    factor = np.array([[sizes[0], 0.0, link], [0.0, sizes[1], -link]])
    sampler = finite.NormalSampler(2.0**-19, 2.0**-19, 2.0**-6, 2.0**-6, 1e-15)
    shift = 0.9
    move = np.array([shift, 0.0])
    covariance = np.diag(np.square(sizes)) + (0 if knows else link**2) * np.array(
        [[1, -1], [-1, 1]]
    )
    mu = math.sqrt(move @ np.linalg.solve(covariance, move))
    cost = finite.release_cost(
        factor, 1, spacing=spacing, parameters=1, mu=mu, delta=0.4, clip_norm=1.0, sampler=sampler
    )
    # A known normal is what it is; of an unknown one the ideal mechanism has the real one.
    drawn = np.sort(values(10 if knows else bits))
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    normals = {
        "release": (bits, drawn, np.full(len(drawn), 1 / len(drawn))),
        "ideal": (None, nodes, weights / weights.sum()),
    }
    if knows:
        normals["ideal"] = (None, *normals["release"][1:])
    tables = {}
    for name, (exact, points, shares) in normals.items():
        for side, mean in (("first", 0.0), ("second", shift)):
            one = cells_of(mean + link * points, 30, sizes[0], spacing, exact) * shares
            other = cells_of(-link * points, 30, sizes[1], spacing, exact)
            tables[name, side] = np.einsum("il,jl->lij", one, other) if knows else one @ other.T
    # Closeness of what is near: 18 bits reach no further.
    near = np.abs(np.arange(-30, 31)) <= 6
    for side in ("first", "second"):
        release, ideal = (tables[name, side][..., near, :][..., near] for name in normals)
        likely = (ideal > 1e-3 * ideal.max(axis=(-2, -1), keepdims=True)) & (ideal > 1e-8)
        ratio = np.abs(np.log(release[likely] / ideal[likely]))
        assert 0 < np.quantile(ratio, 0.5) and ratio.max() <= cost.epsilon / 2
    # And privacy, which is that of who knows the link: the outsider's is no bound for it.
    for epsilon in (0.0, 0.5, 1.0):
        first, second = tables["release", "first"], tables["release", "second"]
        spent = np.maximum(first - math.exp(epsilon) * second, 0).sum()
        assert spent <= gdp.delta(mu, epsilon) * (1 + 1e-3)
        outside = shift * math.sqrt(
            np.linalg.inv(np.diag(np.square(sizes)) + link**2 * np.array([[1, -1], [-1, 1]]))[0, 0]
        )
        assert not knows or spent > gdp.delta(outside, epsilon) * (1 + 1e-3)


def test_links_cost_as_further_normals_and_smooth_nothing():
    own = np.diag([2.0, 3.0])
    column = np.array([[1.0], [-1.0]])

    def linked(*strengths):
        return np.hstack([own, *(strength * column for strength in strengths)])

    grids = [finite.release_grid(linked(*strengths), 10) for strengths in ((), (1.0,), (50.0, 9.0))]
    assert len({(grid.spacing, grid.deviation, grid.share) for grid in grids}) == 1
    assert grids[0].deviation == 2.0, "that of the own noise, however large links are"
    sizes = dict(spacing=0.25, parameters=100, mu=1.0, delta=1e-5, clip_norm=1.0)
    costs = [
        finite.release_cost(linked(*strengths), 10, **sizes)
        for strengths in ((), (0.0,), (1.0,), (2.0,), (2.0, 2.0), (50.0, 2.0))
    ]
    assert [cost.draws for cost in costs] == [2000, 3000, 3000, 3000, 4000, 4000]
    for less, more in zip(costs, costs[1:], strict=False):
        assert less.epsilon < more.epsilon and less.delta <= more.delta
    assert costs[0] == finite.release_cost(np.array([2.0, 3.0]), 10, **sizes)
    # The own part alone must be invertible: what links add may be known.
    with pytest.raises(ValueError, match="factor is singular"):
        finite.release_grid(np.hstack([np.diag([1.0, 0.0]), column]), 10)


def test_chosen_normals_of_links_count_at_their_largest():
    """With a strategy no walk is taken: rounding of every message adds up."""
    strength = 1e3
    spacing = 2.0**-3
    messages = 10_000
    sizes = dict(spacing=spacing, parameters=messages, mu=1e-3, delta=0.5, clip_norm=0.0)
    fine = finite.SAMPLER._replace(half=2.0**-200, finer_half=2.0**-300, error=0.0)
    cost = finite.release_cost(np.array([[1.0, strength]]), 1, np.eye(1), sampler=fine, **sizes)
    # Two terms and an addition, each rounded by a unit of the chosen number, at two ends of a cell.
    rounding = 3 * 2.0**-53 * strength * fine.reach
    assert messages * 2 / spacing * rounding < cost.epsilon / 2


def test_square_factor_costs_what_it_did():
    """Numbers of the version without links, to the last bits of sums."""
    sizes = dict(spacing=2.0**-4, parameters=1000, mu=1.5, delta=1e-6, clip_norm=2.0)
    cost = finite.release_cost(np.array([0.5, 1.0, 2.0]), 20, **sizes)
    assert cost == pytest.approx((3.4934613129319054e-07, 4.174673085121386e-12, 60000), rel=1e-12)
