"""Strategies over rounds: optimal by a certificate, a reference solver, jax_privacy and a paper."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax.contrib.bands import certified, toeplitz
from dpjax.mechanism import banded, temporal, workload
from dpjax.mechanism.factorization import minimize_trace
from dpjax.mechanism.participation import Participation
from dpjax.topology import graphs, mixing
from tests.mechanism.patterns import is_exact

FLORENTINE = mixing.metropolis_hastings(graphs.florentine())
PARTICIPATIONS = [(12, 1, 12), (12, 3, 4), (12, 4, 3), (12, 12, 1), (12, 1, 5), (1, 1, 1)]
DESIGNS = {
    "mafalda": lambda p: temporal.mafalda(FLORENTINE, p),
    "prefix_sum": temporal.prefix_sum,
    "banded": lambda p: banded.banded(FLORENTINE, p, min(3, p.separation)),
    "toeplitz": lambda p: toeplitz(FLORENTINE, p, min(3, p.separation)),
}


def by_jax_privacy(gram: np.ndarray, participation: Participation) -> np.ndarray:
    from jax_privacy.matrix_factorization import dense

    with jax.enable_x64(True):
        root = jnp.asarray(np.linalg.cholesky(gram).T)
        optimum = dense.optimize(participation.rounds, epochs=participation.epochs, A=root)
        return np.array(optimum)


def test_search_ends_where_its_loss_no_longer_falls() -> None:
    for falls in (0.0, 1e-6):
        ended = banded.stalled()
        steps = [ended(SimpleNamespace(loss=1.0 - falls * step)) for step in range(30)]
        assert steps[:10] == [False] * 10 and any(steps) == (falls == 0)


@pytest.mark.gate(8)
@pytest.mark.parametrize(
    ("design", "fields"),
    [(design, fields) for design in ("mafalda", "prefix_sum") for fields in PARTICIPATIONS]
    + [("banded", (13, 3, 4)), ("banded", (1, 1, 1)), ("toeplitz", (12, 3, 4))]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("banded", (12, 3, 4)),
            ("toeplitz", (13, 3, 4)),
            ("toeplitz", (1, 1, 1)),
        )
    ],
)
def test_strategies_are_lower_triangular_and_of_sensitivity_one(design, fields) -> None:
    participation = Participation(*fields)
    flag = jax.config.jax_enable_x64
    strategy = DESIGNS[design](participation)
    assert jax.config.jax_enable_x64 == flag
    assert strategy.dtype == np.float64 and strategy.shape == (fields[0], fields[0])
    assert not np.triu(strategy, 1).any()
    assert strategy.diagonal().min() > 0
    assert 1 - 1e-10 < temporal.sensitivity(strategy, participation) <= 1
    if design in ("banded", "toeplitz"):
        assert not np.tril(strategy, -3).any()


@pytest.mark.parametrize("fields", [(12, 3, 4), (12, 12, 1)])
def test_rounds_of_record_do_not_overlap(fields) -> None:
    """Then signs, vectors and the bound agree: the guarantee is not loose."""
    participation = Participation(*fields)
    strategy = temporal.mafalda(FLORENTINE, participation)
    assert is_exact(strategy, participation)
    gram = strategy.T @ strategy
    for rounds in participation.patterns:
        np.testing.assert_allclose(
            gram[np.ix_(rounds, rounds)], np.diag(gram[rounds, rounds]), atol=1e-14
        )
        assert gram[rounds, rounds].sum() == pytest.approx(1.0)


@pytest.mark.parametrize("rounds", [1, 2, 9])
def test_identity_and_anti_pgd(rounds) -> None:
    np.testing.assert_array_equal(temporal.identity(rounds), np.eye(rounds))
    z = np.random.default_rng(0).normal(size=rounds)
    noise = np.linalg.solve(temporal.anti_pgd(rounds), z)
    np.testing.assert_allclose(noise, np.diff(z, prepend=0.0), atol=1e-12)


# Optimality.


def test_gram_of_sparse_matrix_is_that_of_its_dense_form() -> None:
    sparse = scipy.sparse.csr_array(FLORENTINE)
    expected = temporal.workload_gram(FLORENTINE, 3)
    np.testing.assert_array_equal(temporal.workload_gram(sparse, 3), expected)


@pytest.mark.parametrize("fields", [(6, 2, 3), (6, 3, 2), (6, 6, 1), (5, 1, 5)])
def test_interior_point_solver_finds_same_optimum(fields) -> None:
    """No orthogonality is asked of the reference: it may use every strategy."""
    cvxpy = pytest.importorskip("cvxpy")
    participation = Participation(*fields)
    gram = temporal.workload_gram(FLORENTINE, fields[0])
    root = np.linalg.cholesky(gram)
    precision = cvxpy.Variable((fields[0], fields[0]), PSD=True)
    limits = [
        cvxpy.sum(cvxpy.abs(precision[np.ix_(rounds, rounds)])) <= 1
        for rounds in participation.patterns
    ]
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.matrix_frac(root, precision)), limits)
    value = problem.solve(solver=cvxpy.CLARABEL)
    solution = temporal.solve(gram, participation)
    assert solution.value == pytest.approx(value, rel=1e-6)
    assert solution.lower_bound <= value * (1 + 1e-6)


MIXED = [FLORENTINE, np.ones((1, 1)), np.full((4, 4), 0.25)]
CERTIFIED = [(12, 3, 4), (64, 8, 8), (12, 4, 3), (40, 2, 20), (30, 30, 1)]


@pytest.mark.parametrize(
    ("fields", "mixed"),
    [
        pytest.param(fields, mixed, marks=[] if (row - column) % 3 == 0 else [pytest.mark.slow])
        for row, fields in enumerate(CERTIFIED)
        for column, mixed in enumerate(MIXED)
    ],
)
def test_certificate(fields, mixed) -> None:
    participation = Participation(*fields)
    gram = temporal.workload_gram(mixed, fields[0])
    solution = temporal.solve(gram, participation)
    assert solution.converged and 0 <= solution.gap < 2e-9
    expected = np.trace(gram @ np.linalg.inv(solution.strategy.T @ solution.strategy))
    assert solution.value == pytest.approx(expected, rel=1e-9)
    assert temporal.objective(7 * solution.strategy, gram, participation) == pytest.approx(expected)


def by_vectors(gram: np.ndarray) -> float:
    """A lower estimate of the exact squared sensitivity on one pattern."""
    rng = np.random.default_rng(0)
    k = len(gram)
    u = rng.normal(size=(k, k))
    for _ in range(100):
        for s in range(k):
            u[s] = gram[s] @ u - gram[s, s] * u[s]
            u[s] /= np.linalg.norm(u[s])
    return float(np.sum(gram * (u @ u.T)))


@given(st.integers(0, 10_000), st.sampled_from([(6, 2, 3), (6, 3, 2), (6, 6, 1)]))
def test_no_strategy_is_below_bound(seed, fields) -> None:
    participation = Participation(*fields)
    gram = temporal.workload_gram(FLORENTINE, fields[0])
    solution = temporal.solve(gram, participation)
    rng = np.random.default_rng(seed)
    # Around the optimum, where a bound that is too high would show.
    noise = np.tril(rng.normal(size=(fields[0], fields[0]))) * 10.0 ** rng.uniform(-4, 0)
    strategy = solution.strategy + 0.3 * noise * solution.strategy.max()
    products = strategy.T @ strategy
    sens2 = max(by_vectors(products[np.ix_(p, p)]) for p in participation.patterns)
    if np.linalg.cond(strategy) < 1e6:
        assert sens2 * np.trace(gram @ np.linalg.inv(products)) >= solution.lower_bound * (1 - 1e-9)


def test_every_round_has_closed_form() -> None:
    gram = temporal.workload_gram(FLORENTINE, 20)
    solution = temporal.solve(gram, Participation(20, 20, 1))
    assert solution.value == pytest.approx(np.sqrt(gram.diagonal()).sum() ** 2, rel=1e-8)


def test_one_evaluation_may_be_all() -> None:
    solution = temporal.solve(np.eye(4), Participation(4, 2, 2), max_iterations=1)
    assert solution.converged and solution.iterations == 1


def test_one_participation_is_minimize_trace() -> None:
    gram = temporal.workload_gram(FLORENTINE, 30)
    solution = minimize_trace(gram)
    strategy = temporal.mafalda(FLORENTINE, Participation(30, 1, 30))
    np.testing.assert_allclose(strategy.T @ strategy, solution.precision, atol=1e-10)
    assert temporal.objective(strategy, gram, Participation(30, 1, 1)) == pytest.approx(
        solution.value, rel=1e-9
    )


def test_epochs_solver_is_minimize_trace_at_one_epoch() -> None:
    gram = temporal.workload_gram(FLORENTINE, 30)
    result, _ = temporal._climb(np.linalg.cholesky(gram).T, 1, 1e-9, 100)
    assert result.gap <= 1e-9
    np.testing.assert_allclose(result.precision, minimize_trace(gram).precision, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "running_sums"),
    [
        ((48, 4, 12), False),
        ((48, 1, 48), True),
        ((40, 20, 2), True),
        ((120, 8, 15), False),
    ],
)
def test_not_above_jax_privacy(fields, running_sums) -> None:
    participation = Participation(*fields)
    if running_sums:
        gram = workload.prefix_sum_gram(fields[0])
        strategy = temporal.prefix_sum(participation)
    else:
        gram = temporal.workload_gram(FLORENTINE, fields[0])
        strategy = temporal.mafalda(FLORENTINE, participation)
    theirs = temporal.objective(by_jax_privacy(gram, participation), gram, participation)
    ours = temporal.objective(strategy, gram, participation)
    assert theirs * (1 - 1e-4) < ours <= theirs * (1 + 1e-8)


SIXTY = Participation(60, 4, 15)


@pytest.fixture(scope="module")
def best_of_sixty():
    return temporal.solve(temporal.workload_gram(FLORENTINE, 60), SIXTY)


@pytest.mark.parametrize(
    "design",
    [
        *("mafalda", "prefix_sum", "identity", "anti_pgd"),
        pytest.param("banded", marks=pytest.mark.slow),
    ],
)
def test_mafalda_is_best(design, best_of_sixty) -> None:
    participation = SIXTY
    best = best_of_sixty
    gram = temporal.workload_gram(FLORENTINE, 60)
    if design in DESIGNS:
        strategy = DESIGNS[design](participation)
    else:
        strategy = getattr(temporal, design)(60)
    ratio = temporal.objective(strategy, gram, participation) / best.value
    assert ratio == pytest.approx(1.0) if design == "mafalda" else ratio > 1.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (graphs.florentine(), (8.40, 681, 1.109)),
        (nx.gnp_random_graph(100, 0.2, seed=1), (7.85, 1140, 1.262)),
    ],
)
def test_published_setting(graph, expected) -> None:
    participation = Participation(380, 20, 19)
    matrix = mixing.metropolis_hastings(graph)
    gram = temporal.workload_gram(matrix, 380)
    strategy = temporal.mafalda(matrix, participation)
    best = temporal.objective(strategy, gram, participation)
    rivals = (temporal.identity(380), temporal.anti_pgd(380), temporal.prefix_sum(participation))
    ratios = [temporal.objective(rival, gram, participation) / best for rival in rivals]
    np.testing.assert_allclose(ratios, expected, rtol=5e-3)


# The flip.


@given(st.integers(0, 10_000), st.integers(1, 8))
def test_strategy_of_precision(seed, rounds) -> None:
    root = np.random.default_rng(seed).normal(size=(rounds, rounds + 2))
    precision = root @ root.T
    strategy = temporal.strategy_of(precision)
    assert not np.triu(strategy, 1).any() and strategy.diagonal().min() > 0
    np.testing.assert_allclose(strategy.T @ strategy, precision, atol=1e-12 * np.trace(precision))


@pytest.mark.mutant
def test_wrong_flip_is_caught() -> None:
    """Half a flip of the workload, 2 % off as in published code, or C from C C' = P."""
    participation = Participation(60, 4, 15)
    gram = temporal.workload_gram(FLORENTINE, 60)
    best = temporal.solve(gram, participation)
    half = np.linalg.cholesky(gram[::-1, ::-1])
    other_workload = temporal.solve(half.T @ half, participation).strategy
    ratio = temporal.objective(other_workload, gram, participation) / best.value
    assert 1.01 < ratio < 1.03
    other_factor = np.linalg.cholesky(best.strategy.T @ best.strategy)
    assert temporal.objective(other_factor, gram, participation) > 1.01 * best.value


# Banded strategies.


@pytest.mark.slow
@pytest.mark.parametrize("fields", [(24, 3, 8), (24, 1, 24), (26, 3, 8), (20, 3, 8)])
def test_one_band_and_more_bands(fields) -> None:
    rounds, k, _ = fields
    participation = Participation(*fields)
    gram = temporal.workload_gram(FLORENTINE, rounds)
    few, extras = (
        temporal.objective(banded.banded(FLORENTINE, participation, bands), gram, participation)
        for bands in (1, 8)
    )
    even = temporal.objective(toeplitz(FLORENTINE, participation, 8), gram, participation)
    assert extras * (1 - 1e-6) <= even < 1.15 * extras < few
    if rounds == 24:
        # A diagonal C: within a class, or alone, precision goes as the root of H_tt.
        roots = np.sqrt(gram.diagonal()).reshape(k, -1).sum(axis=0)
        assert few == pytest.approx(np.sum(roots**2), rel=1e-6)
        assert extras > temporal.solve(gram, participation).value
    else:
        assert few == pytest.approx(k * np.trace(gram), rel=1e-6)


def test_all_bands_are_optimum() -> None:
    participation = Participation(24, 1, 24)
    gram = temporal.workload_gram(FLORENTINE, 24)
    strategy = banded.banded(FLORENTINE, participation, 24)
    value = temporal.objective(strategy, gram, participation)
    assert value == pytest.approx(temporal.solve(gram, participation).value, rel=1e-6)


# Devices and long horizons.


@pytest.mark.gate(1)
@pytest.mark.parametrize("solver", ["solve", "banded", "toeplitz", "minimize_trace"])
def test_solvers_run_on_device_that_is_given(solver, monkeypatch) -> None:
    participation = Participation(12, 3, 4)
    gram = temporal.workload_gram(FLORENTINE, 12)
    used = set()
    compute = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, on=None: used.add(on) or compute(x, on))
    calls = {
        "solve": lambda **on: temporal.solve(gram, participation, **on).strategy,
        "banded": lambda **on: banded.banded(FLORENTINE, participation, 2, **on),
        "toeplitz": lambda **on: toeplitz(FLORENTINE, participation, 2, **on),
        "minimize_trace": lambda **on: minimize_trace(gram, **on).precision,
    }
    present = calls[solver](device=jax.devices()[3])
    assert used == {jax.devices()[3]}
    np.testing.assert_allclose(present, calls[solver](), atol=1e-9)


def test_compiled_iteration_stays_on_its_device() -> None:
    factor = np.linalg.cholesky(temporal.workload_gram(FLORENTINE, 12)).T
    result, _ = temporal._climb(factor, 3, 1e-9, 50, device=jax.devices()[3])
    assert result.precision.devices() == {jax.devices()[3]} and result.gap <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("fields", [(96, 3, 32), (96, 1, 96), (96, 1, 5)])
def test_long_horizons(monkeypatch, fields) -> None:
    """The coarse start, Cholesky's factor, its certificate and sums by pattern, at a small size."""
    participation = Participation(*fields)
    gram = temporal.workload_gram(FLORENTINE, 96)
    reference = temporal.solve(gram, participation)
    for name, rounds in (("_COMPILED", 60), ("_COARSE", 40), ("_LONG", 80)):
        monkeypatch.setattr(temporal, name, rounds)
    solution = temporal.solve(gram, participation, tolerance=1e-9)
    assert solution.converged and solution.value == pytest.approx(reference.value, rel=2e-9)
    assert reference.value * (1 - 1e-8) <= solution.lower_bound <= reference.value
    assert 1 - 1e-10 < temporal.sensitivity(solution.strategy, participation) <= 1
    assert solution.iterations < reference.iterations
    few = toeplitz(FLORENTINE, participation, 8)
    judged = certified(few, gram, participation)
    assert 0.1 < judged.gap < 0.4
    assert judged.value == pytest.approx(temporal.objective(few, gram, participation))


@pytest.mark.parametrize("fields", [(24, 3, 8), (26, 3, 8), (24, 1, 24), (9, 9, 1)])
def test_sensitivity_by_pattern(fields, monkeypatch) -> None:
    participation = Participation(*fields)
    strategy = np.tril(np.random.default_rng(0).normal(size=(fields[0], fields[0])))
    complete = temporal.sensitivity(strategy, participation)
    monkeypatch.setattr(temporal, "_LONG", 1)
    assert temporal.sensitivity(strategy, participation) == pytest.approx(complete, rel=1e-14)


@pytest.mark.gate(1)
@pytest.mark.parametrize("fields", [(13, 3, 4), (24, 1, 24), (30, 2, 15)])
def test_toeplitz_is_no_worse_than_its_neighbours(fields) -> None:
    """At the dense objective: the search works with sums along diagonals."""
    participation = Participation(*fields)
    gram = temporal.workload_gram(FLORENTINE, fields[0])
    best = toeplitz(FLORENTINE, participation, 4)
    value = temporal.objective(best, gram, participation)
    rng = np.random.default_rng(0)
    column = best[:4, 0]
    for scale in (1e-3, 1e-2):
        moved = column * (1 + scale * rng.normal(size=4))
        other = np.tril(sum(np.diag(np.full(fields[0] - j, c), -j) for j, c in enumerate(moved)))
        other /= np.linalg.norm(other, axis=0)
        assert temporal.objective(other, gram, participation) > value


# Strategies of few bands in the inverse.


def banded_inverses(participation: Participation) -> list[np.ndarray]:
    rounds = participation.rounds
    bisr = [banded.banded_inverse(participation, bands) for bands in {1, min(3, rounds), rounds}]
    return bisr + [banded.one_lag(participation, fraction) for fraction in (0, 0.5, 0.99)]


@pytest.mark.parametrize("fields", [(12, 3, 4), (12, 1, 12), (13, 2, 5), (1, 1, 1)])
def test_sensitivity_of_banded_inverses_is_attained(fields) -> None:
    """No entry is negative: equal gradients in one pattern's rounds reach the bound."""
    participation = Participation(*fields)
    for strategy in banded_inverses(participation):
        assert strategy.min() >= 0 and not np.triu(strategy, 1).any()
        rounds = np.array(participation.patterns)
        moved = max(
            np.linalg.norm(strategy[:, round_number].sum(axis=1)) for round_number in rounds
        )
        assert 1 - 1e-12 < moved <= 1


@pytest.mark.mutant
def test_banded_inverses_scaled_to_one_appearance_are_caught() -> None:
    participation = Participation(12, 3, 4)
    for strategy in banded_inverses(participation):
        once = strategy / np.linalg.norm(strategy, axis=0).max()
        rounds = participation.patterns[0]
        assert np.linalg.norm(once[:, rounds].sum(axis=1)) > 1.5


def test_full_banded_inverse_is_root_of_prefix_sums() -> None:
    participation = Participation(9, 1, 9)
    root = banded.banded_inverse(participation, 9)
    root /= root[0, 0]
    np.testing.assert_allclose(root @ root, np.tri(9), atol=1e-14)
    few = np.linalg.inv(banded.banded_inverse(participation, 4) / root[0, 0])
    expected = np.triu(np.tril(np.linalg.inv(root)), -3)
    np.testing.assert_allclose(few / few[0, 0], expected, atol=1e-12)


def test_one_step_takes_back_fraction_of_last_noise() -> None:
    strategy = banded.one_lag(Participation(6, 2, 3), 0.7)
    noise = np.linalg.inv(strategy)
    np.testing.assert_allclose(noise[1:, :-1].diagonal() / noise.diagonal()[1:], -0.7)
    assert abs(np.tril(noise, -2)).max() < 1e-14
    np.testing.assert_allclose(
        *np.broadcast_arrays(np.linalg.norm(strategy, axis=0), noise[-1, -1] ** -1)
    )
    # At prefix sums it lies between independent noise and the optimum.
    participation = Participation(64, 2, 32)
    gram = workload.prefix_sum_gram(64)
    none, half = (
        temporal.objective(banded.one_lag(participation, f), gram, participation)
        for f in (0.0, 0.5)
    )
    assert temporal.solve(gram, participation).value < half < none


def test_rounds_of_banded_inverses_are_sums_over_few() -> None:
    from dpjax.transforms import rounds

    participation = Participation(80, 2, 40)
    for strategy, width in (
        (banded.banded_inverse(participation, 5), 4),
        (banded.one_lag(participation, 0.9), 1),
    ):
        route = rounds.route(strategy, 80)
        assert route.kind == "moving" and route.weights.shape == (80, width)


# Edges.


@settings(max_examples=8)
@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from([(6, 2, 3), (6, 3, 2)]))
def test_singular_grams(seed, rank, fields) -> None:
    root = np.random.default_rng(seed).normal(size=(rank, 6))
    gram = root.T @ root
    participation = Participation(*fields)
    solution = temporal.solve(gram, participation)
    assert temporal.sensitivity(solution.strategy, participation) <= 1
    assert solution.lower_bound <= solution.value <= solution.lower_bound * (1 + 1e-3)


@pytest.mark.parametrize(("minimum", "seed"), [(1e-9, 0), (3e-10, 1), (1e-10, 2)])
def test_nearly_singular_grams_are_solved_as_well_as_others(minimum, seed) -> None:
    """By singular values of F V^1/2: eigenvalues of its square keep half of the digits."""
    basis, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(24, 24)))
    gram = (basis * np.geomspace(1, minimum, 24)) @ basis.T
    solution = temporal.solve((gram + gram.T) / 2, Participation(24, 4, 6))
    assert solution.lower_bound <= solution.value <= solution.lower_bound * (1 + 1e-6)


@settings(max_examples=8)
@given(st.integers(0, 10_000), st.sampled_from([(6, 1, 6), (6, 2, 3), (6, 3, 2), (6, 6, 1)]))
def test_gram_of_rank_one_has_closed_form(seed, fields) -> None:
    """The infimum is the largest (sum |a_s|)^2 over a pattern: the dual's weight is all there."""
    a = np.random.default_rng(seed).normal(size=6)
    participation = Participation(*fields)
    solution = temporal.solve(np.outer(a, a), participation)
    expected = max(np.abs(a[rounds]).sum() ** 2 for rounds in participation.patterns)
    assert solution.lower_bound <= expected * (1 + 1e-12)
    # The infimum is not attained: the ridge keeps the value above it by about its root.
    assert expected * (1 - 1e-12) <= solution.value <= expected * (1 + 1e-3)


@pytest.mark.parametrize("fields", [(13, 3, 4), (11, 3, 4)])
def test_other_participations_are_refused(fields) -> None:
    for design in (temporal.prefix_sum, lambda p: temporal.mafalda(FLORENTINE, p)):
        with pytest.raises(ValueError, match="use 12 rounds"):
            design(Participation(*fields))


def test_matrices_in_wrong_order_are_refused() -> None:
    participation = Participation(8, 2, 4)
    gram = temporal.workload_gram(FLORENTINE, 8)
    strategy = temporal.solve(gram, participation).strategy
    with pytest.raises(ValueError, match="strategy has entries above its diagonal; give a lower"):
        temporal.objective(gram, strategy, participation)
    with pytest.raises(ValueError, match="strategy has entries above its diagonal"):
        certified(gram, strategy, participation)
    # Both in one place, and a strategy for its precision.
    with pytest.raises(ValueError, match="gram is not symmetric"):
        temporal.objective(strategy, strategy, participation)
    with pytest.raises(ValueError, match="precision is not symmetric"):
        temporal.strategy_of(strategy)


def test_bad_input() -> None:
    participation = Participation(12, 3, 4)
    with pytest.raises(ValueError, match="gram has shape"):
        temporal.solve(np.eye(5), participation)
    with pytest.raises(ValueError, match="gram is zero"):
        temporal.solve(np.zeros((12, 12)), participation)
    with pytest.raises(ValueError, match="gram has the eigenvalue"):
        temporal.solve(-np.eye(12), participation)
    with pytest.raises(ValueError, match="gram has shape"):
        temporal.objective(np.eye(12), np.eye(5), participation)
    with pytest.raises(ValueError, match="strategy is singular"):
        temporal.objective(np.zeros((12, 12)), np.eye(12), participation)
    with pytest.raises(ValueError, match="precision is not positive definite"):
        temporal.strategy_of(-np.eye(3))
    with pytest.raises(ValueError, match="tolerance is 0"):
        temporal.solve(np.eye(12), participation, tolerance=0)
    with pytest.raises(ValueError, match="max_iterations is 0"):
        temporal.solve(np.eye(12), participation, max_iterations=0)
    for design in (banded.banded, toeplitz):
        with pytest.raises(ValueError, match="bands is 5; give at most 4"):
            design(FLORENTINE, participation, 5)
    for design in (temporal.identity, temporal.anti_pgd):
        with pytest.raises(ValueError, match="rounds is 0"):
            design(0)
    with pytest.raises(ValueError, match="bands is 13; give at most 12"):
        banded.banded_inverse(participation, 13)
    with pytest.raises(ValueError, match="fraction is 1"):
        banded.one_lag(participation, 1)
