"""Noise of a diagonal and a polynomial of W: its bound on [R^-1]_ii, energy and certificate."""

import networkx as nx
import numpy as np
import pytest
from numpy.polynomial import chebyshev

from dpjax.mechanism import design, polynomial, spatial, workload
from dpjax.topology import gossip, graphs, mixing

GRAPHS = {
    "regular": nx.random_regular_graph(8, 60, seed=0),
    "random": graphs.erdos_renyi(150, 0.06, 0),
    "hubs": nx.barabasi_albert_graph(60, 3, seed=0),
    "star": graphs.star(9),
    "ring": graphs.ring(12),
    "complete": graphs.complete(5),
    "one": graphs.complete(1),
}


def made(name, bound=1.0, degree=6, rounds=None, sparse=False):
    matrix = mixing.metropolis_hastings(GRAPHS[name], sparse=sparse)
    steps = None if rounds is None else np.ones(rounds)
    return matrix, polynomial.design_polynomial(matrix, bound, degree, step_sizes=steps)


def exact(matrix, noise):
    """[R^-1]_ii by eigenvectors of W, to rounding."""
    values, vectors = np.linalg.eigh(polynomial.rounded(matrix).matrix.toarray())
    inverse = chebyshev.chebval(values, noise.coefficients.astype(float)) ** -2.0
    return vectors**2 @ inverse / noise.scales.astype(float) ** 2


@pytest.mark.gate(6)
@pytest.mark.parametrize("rounds", [None, 200])
@pytest.mark.parametrize("name", GRAPHS)
def test_bound_holds_and_is_proved_again(name, rounds):
    n = len(GRAPHS[name])
    bounds = np.linspace(0.5, 2, n) if n > 1 else 2.0
    matrix, noise = made(name, bounds, rounds=rounds)
    again = polynomial.diagonal_bounds(
        polynomial.rounded(matrix), noise.coefficients, noise.precision, noise.scales
    )
    assert (exact(matrix, noise) <= again * (1 + 1e-9)).all()
    assert (again <= bounds).all() and (again > bounds * (1 - 1e-6)).all()
    assert (exact(matrix, noise) > 0.85 * again).all()
    factor = workload.factor(matrix, rounds)
    colour = polynomial.noise_map(polynomial.rounded(matrix), noise.coefficients, noise.scales)
    assert noise.value == pytest.approx(np.square(factor @ colour).sum(), rel=1e-9)
    assert noise.lower_bound <= noise.value
    assert noise.value < spatial.energy(spatial.independent(matrix, bounds), matrix, rounds) * 1.02


@pytest.mark.parametrize("own", [0.0, 0.05, 0.9])
def test_matrices_with_eigenvalues_near_one_and_minus_one(own):
    matrix = np.array([[own, 1 - own], [1 - own, own]])
    single = polynomial.rounded(matrix).matrix
    low, high = polynomial.interval(single)
    minimum, maximum = np.linalg.eigvalsh(single.toarray())
    assert low < minimum < maximum < high
    noise = polynomial.design_polynomial(matrix, 1.0)
    assert 0.8 < exact(matrix, noise).max() <= 1


@pytest.mark.slow
def test_energy_is_near_optimum():
    matrix, noise = made("random")
    optimum = design.Design.whisper(matrix, 1.0).value
    assert noise.lower_bound < optimum < noise.value < 1.06 * optimum
    assert noise.gap < 0.07 and noise.degree == 6
    few, many = (made("random", degree=degree)[1].value for degree in (1, 12))
    assert few > noise.value > many
    # Of all rounds, independent noise has ten times as much.
    horizon = made("random", rounds=1000)[1]
    assert horizon.value < 0.16 * np.square(workload.factor(matrix, 1000)).sum()
    assert horizon.gap < 1


@pytest.mark.mutant
def test_least_is_below_narrow_dips():
    """The product dips to 1e-9 at one place; the grid alone sees more."""
    rng = np.random.default_rng(0)
    missed = 0
    for index in rng.uniform(-0.8, 1, 50):
        dips = np.array([index**2 + 1e-9, -2 * index, 1.0])
        assert polynomial.least_product(np.ones(1), dips, (-0.8, 1.0)) <= 1e-9
        angles = (np.arange(3 * 1024) + 0.5) * np.pi / (3 * 1024)
        observed = np.polyval(dips[::-1], 0.1 + 0.9 * np.cos(angles)).min()
        missed += observed > 2e-9
        # Coefficients that are 0 somewhere prove nothing.
        root = polynomial.least_product(np.array([-index, 1.0]), np.ones(1), (-0.8, 1.0))
        assert root <= 0
    assert missed > 25
    flat = polynomial.least_product(np.array([2.0, 0.0]), np.array([3.0]), (-1.0, 1.0))
    assert 12 * (1 - 1e-12) < flat <= 12
    assert polynomial.least_product(np.ones(1), np.ones(1), (-1.1, 1.0)) == 0


@pytest.mark.mutant
def test_smaller_noise_or_another_polynomial_is_seen():
    matrix, noise = made("hubs")
    w = polynomial.rounded(matrix)

    def proved(coefficients=noise.coefficients, scales=noise.scales):
        return polynomial.diagonal_bounds(w, coefficients, noise.precision, scales).max()

    assert proved() <= 1 < proved(scales=noise.scales * np.float32(1 - 1e-6))
    for k in range(noise.degree + 1):
        reduced = noise.coefficients.copy()
        reduced[k] -= np.float32(1e-3) * np.abs(reduced).max()
        invalid = polynomial.PolynomialNoise(reduced, noise.scales, noise.precision, 1.0, 1.0)
        assert exact(matrix, invalid).max() <= proved(reduced)
    # Upper bounds of sampled diagonals would not do: these are the diagonal itself.
    powers = [np.linalg.matrix_power(w.matrix.toarray(), k).diagonal() for k in range(7)]
    np.testing.assert_allclose(polynomial._moments(w, 3).T, powers, rtol=1e-12)


def drawn_error(matrix, noise):
    """Root mean square of what float32 adds to the noise of a run, in units of its weakest part."""
    complete = polynomial.rounded(matrix)
    normals = np.random.default_rng(0).normal(size=(len(noise.scales), 500)).astype(np.float32)
    weights = complete.matrix.toarray().astype(np.float32)
    drawn = noise.scales[:, None] * gossip.polynomial(weights, noise.coefficients, normals)
    factor = polynomial.noise_map(complete, noise.coefficients, noise.scales)
    return np.sqrt(np.square(np.linalg.solve(factor, drawn - factor @ normals)).mean())


@pytest.mark.mutant
def test_coefficients_that_cancel_are_lowered_or_refused(monkeypatch):
    matrix = mixing.metropolis_hastings(graphs.ring(5))
    noise = polynomial.design_polynomial(matrix, 1.0, 20)
    assert 6 < noise.degree < 20 and drawn_error(matrix, noise) < 1e-3
    with monkeypatch.context() as patch:
        patch.setattr(polynomial, "_CANCELLING", np.inf)
        coarse = polynomial.design_polynomial(matrix, 1.0, 20)
    assert coarse.degree == 20 and drawn_error(matrix, coarse) > 0.05
    parts = coarse.coefficients, coarse.precision, coarse.scales
    assert np.isinf(polynomial.diagonal_bounds(polynomial.rounded(matrix), *parts)).all()


def test_blocks_of_rows_and_lower_powers(monkeypatch):
    matrix = polynomial.rounded(mixing.metropolis_hastings(GRAPHS["random"], sparse=True))
    complete = polynomial._moments(matrix, 3)
    polynomial._moments.cache_clear()
    monkeypatch.setattr(polynomial, "_ROWS", 150 * 40)
    np.testing.assert_array_equal(polynomial._moments(matrix, 3), complete)
    assert polynomial._half(matrix) == 3
    for limit, half in ((1e4, 1), (1e5, 2)):
        monkeypatch.setattr(polynomial, "_WORK", limit)
        assert polynomial._half(matrix) == half
        noise = polynomial.design_polynomial(matrix.matrix, 1.0)
        assert len(noise.precision) == 2 * half + 1
        assert exact(matrix.matrix, noise).max() <= 1 and noise.gap < 0.2


@pytest.mark.parametrize("rounds", [None, 20])
def test_estimates_of_many_agents_are_on_safe_side(monkeypatch, rounds):
    graph = nx.random_regular_graph(8, 300, seed=0)
    matrix = mixing.metropolis_hastings(graph, sparse=True)
    steps = None if rounds is None else np.linspace(1, 0.5, rounds)
    reference = polynomial.design_polynomial(matrix, 2.0, step_sizes=steps)
    monkeypatch.setattr(polynomial, "_DENSE", 0)
    monkeypatch.setattr(polynomial, "_DRAWN", 2**16)
    noise = polynomial.design_polynomial(matrix, 2.0, step_sizes=steps)
    assert reference.value < noise.value < 1.06 * reference.value
    assert 0.9 * reference.lower_bound < noise.lower_bound < reference.lower_bound


def test_what_is_no_symmetric_matrix_is_refused():
    weights = mixing.metropolis_hastings(graphs.ring(5))
    skewed = weights.copy()
    skewed[0, 1] += 1e-9
    skewed[0, 0] -= 1e-9
    polynomial.design_polynomial(skewed, 1.0)  # Not in float32.
    skewed[0, 1] += 1e-6
    skewed[0, 0] -= 1e-6
    for invalid in (mixing.uniform_neighbors(graphs.star(5)), skewed):
        with pytest.raises(ValueError, match="not symmetric and doubly stochastic.*metropolis"):
            polynomial.design_polynomial(invalid, 1.0)
    with pytest.raises(ValueError, match=r"shape \(2, 5, 5\); noise of polynomials needs one"):
        polynomial.design_polynomial(np.stack([weights, weights]), 1.0)
    with pytest.raises(ValueError, match="degree is 0"):
        polynomial.design_polynomial(weights, 1.0, 0)
    with pytest.raises(ValueError, match="noise is"):
        polynomial.design_polynomial(weights, 1e-70)


@pytest.mark.slow
def test_designs_of_many_agents_take_seconds():
    matrix = mixing.metropolis_hastings(nx.random_regular_graph(8, 30_000, seed=0), sparse=True)
    noise = polynomial.design_polynomial(matrix, 1.0)
    assert noise.gap < 0.1
