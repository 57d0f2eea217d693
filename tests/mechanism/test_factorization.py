"""The solver: its optimum, its certificate, and what it refuses."""

from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st

from dpjax.mechanism import certificate, factorization, fixed_point
from dpjax.mechanism.factorization import Solution, minimize_trace
from dpjax.topology import graphs, mixing


def weights(spec: str) -> np.ndarray:
    return mixing.metropolis_hastings(graphs.parse(spec))


def hub_graph(n: int, seed: int) -> np.ndarray:
    """Agent 0 is joined to all: W is singular and that agent's constraint slack."""
    graph = graphs.erdos_renyi(n, 0.5, seed)
    graph.add_edges_from((0, j) for j in range(1, n))
    return mixing.metropolis_hastings(graph)


def assert_feasible(solution: Solution, factor: np.ndarray) -> None:
    """Check the claims that hold for every solution, by another library's arithmetic."""
    precision = scipy.linalg.inv(solution.covariance)
    assert precision.diagonal().max() <= 1.0
    assert np.linalg.eigvalsh(solution.covariance)[0] > 0
    cost = np.trace(factor @ solution.covariance @ factor.T)
    assert cost == pytest.approx(solution.value, rel=1e-8)
    assert solution.lower_bound <= solution.value
    condition = np.linalg.cond(solution.precision)
    np.testing.assert_allclose(
        solution.precision @ solution.covariance, np.eye(len(precision)), atol=1e-13 * condition
    )
    assert solution.variance_ratio == pytest.approx(solution.covariance.diagonal().max())


@pytest.mark.parametrize(
    ("spec", "gap"),
    [
        ("florentine", 1e-10),
        ("er:20:0.2", 1e-10),
        ("er:20:0.5", 1e-10),
        ("er:20:0.8", 1e-10),
        ("grid:4:5", 1e-10),
        ("star:8", 1e-8),
        ("star:20", 1e-8),
    ],
)
def test_gap_closes_where_optimum_is_attained(spec: str, gap: float) -> None:
    factor = weights(spec)
    solution = minimize_trace(factor=factor)
    assert_feasible(solution, factor)
    assert solution.converged and not solution.regularization
    assert 0 <= solution.gap < gap
    assert solution.iterations < 60


@pytest.mark.parametrize(
    ("spec", "gap", "ratio"), [("complete:20", 1.4e-4, 6800), ("ring:12", 6.6e-6, 4400)]
)
def test_infima_that_are_not_attained(spec: str, gap: float, ratio: float) -> None:
    factor = weights(spec)
    solution = minimize_trace(factor=factor)
    assert_feasible(solution, factor)
    assert solution.regularization == 1e-9 and solution.regularization and solution.converged
    assert gap / 3 < solution.gap < gap
    assert solution.variance_ratio < ratio


def test_complete_graph_approaches_trusted_server() -> None:
    values = [
        minimize_trace(factor=weights("complete:20"), regularization=r).value - 1 / 20
        for r in (1e-7, 1e-9)
    ]
    assert 0 < values[1] < values[0] < 1e-4
    assert values[0] / values[1] == pytest.approx(10, rel=0.1)  # the square root of r


@pytest.mark.parametrize("seed", range(4))
def test_hubs_have_slack_constraints_and_closed_gap(seed: int) -> None:
    factor = hub_graph(8, seed)
    assert np.linalg.svd(factor, compute_uv=False)[-1] < 1e-15
    solution = minimize_trace(factor=factor)
    assert_feasible(solution, factor)
    assert 0 <= solution.gap < 1e-7
    assert solution.multipliers[0] <= 1e-7 * solution.multipliers.max()


@given(st.integers(2, 12), st.integers(0, 10_000))
def test_bounds_hold_for_any_matrix(n: int, seed: int) -> None:
    factor = np.random.default_rng(seed).normal(size=(n, n)) * 10.0 ** (seed % 7 - 3)
    solution = minimize_trace(factor=factor, pad_to=12)
    assert_feasible(solution, factor)
    # Any feasible point lies above the lower bound, the identity and random ones among them.
    assert np.sum(factor**2) >= solution.lower_bound
    other = np.cov(np.random.default_rng(seed + 1).normal(size=(n, 3 * n))) + 1e-3 * np.eye(n)
    other /= other.diagonal().max()
    assert np.trace(factor @ np.linalg.inv(other) @ factor.T) >= solution.lower_bound
    # Any multipliers bound the optimum from below: the solver's value is above them all.
    drawn = np.random.default_rng(seed + 2).uniform(0.1, 1, n)
    bound, _ = certificate.lower_bound(drawn, factor=factor)
    assert bound <= solution.value


@pytest.mark.parametrize("spec", ["er:8:0.4", "er:8:0.8:3", "er:12:0.6", "star:8", "florentine"])
def test_interior_point_solver_agrees(spec: str) -> None:
    pytest.importorskip("clarabel")
    factor = weights(spec)
    ours = minimize_trace(factor=factor)
    theirs = minimize_trace(factor=factor, solver="sdp")
    assert_feasible(theirs, factor)
    assert ours.value == pytest.approx(theirs.value, rel=1e-6)
    assert ours.value <= theirs.value * (1 + 1e-9)
    assert ours.lower_bound <= theirs.value and theirs.lower_bound <= ours.value


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, 8, 12, 16, 20])
@pytest.mark.parametrize("p", [0.2, 0.4, 0.6, 0.8])
def test_interior_point_solver_agrees_on_many(n: int, p: float) -> None:
    pytest.importorskip("clarabel")
    for seed in range(2 if n > 12 else 8):
        factor = weights(f"er:{n}:{p}:{100 * seed}")
        ours = minimize_trace(factor=factor)
        theirs = minimize_trace(factor=factor, solver="sdp")
        assert ours.lower_bound <= theirs.value and theirs.lower_bound <= ours.value
        if not ours.regularization:
            assert ours.gap < 1e-7
            assert ours.value == pytest.approx(theirs.value, rel=1e-6)
        else:  # neither attains it; the bounds meet, and ours is the better design
            assert ours.lower_bound == pytest.approx(theirs.lower_bound, rel=1e-6)
            assert ours.value <= theirs.value * (1 + 1e-6)


@pytest.mark.slow
def test_gaps_over_many_graphs() -> None:
    for n in (8, 20):
        for p in (0.2, 0.4, 0.6, 0.8):
            for seed in range(0, 2000, 100):
                solution = minimize_trace(factor=weights(f"er:{n}:{p}:{seed}"))
                slack = solution.multipliers.min() <= 1e-7 * solution.multipliers.max()
                assert solution.converged
                if not solution.regularization:
                    assert solution.gap < (1e-7 if slack else 1e-8)
                else:
                    assert solution.gap < 2e-5


@pytest.mark.slow
def test_thousand_agents() -> None:
    factor = weights("er:1000:0.05")
    solution = minimize_trace(factor=factor)
    assert_feasible(solution, factor)
    assert solution.gap < 1e-8 and solution.iterations < 40


@pytest.mark.parametrize("spec", ["er:6:0.5", "star:6", "complete:6", "ring:6"])
def test_certificate_in_exact_arithmetic(spec: str) -> None:
    """Fifty digits: the bound, the value and the lower bound are on the safe side to the last."""
    mpmath = pytest.importorskip("mpmath")
    factor = weights(spec)
    solution = minimize_trace(factor=factor)
    with mpmath.workdps(50):
        root = mpmath.matrix(factor.tolist())
        noise = mpmath.matrix(solution.covariance.tolist())
        inverse = noise**-1
        assert max(inverse[i, i] for i in range(6)) <= 1
        image = root * noise * root.T
        assert sum(image[i, i] for i in range(6)) <= solution.value
        duals = mpmath.diag([mpmath.mpf(float(x)) for x in solution.multipliers])
        squares = mpmath.eigsy(root * duals * root.T, eigvals_only=True)
        total = sum(mpmath.sqrt(abs(x)) for x in squares)
        best = total**2 / sum(duals[i, i] for i in range(6))
        assert solution.lower_bound <= best <= solution.value


@pytest.mark.parametrize("form", ["gram", "factor"])
def test_value_is_of_matrix_that_was_given(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rounds in the factor that is solved with; here far more than ever does."""
    tall = np.random.default_rng(3).normal(size=(9, 5)) * 10.0 ** -np.arange(9.0)[:, None]
    matrix = tall if form == "factor" else tall.T @ tall
    complete = factorization._root
    monkeypatch.setattr(factorization, "_root", lambda *those: complete(*those) * (1 - 1e-9))
    solution = minimize_trace(**{form: matrix})
    exact = [[Fraction(float(entry)) for entry in row] for row in solution.covariance]
    entries = [[Fraction(float(entry)) for entry in row] for row in matrix]
    if form == "factor":
        gram = [[sum(row[i] * row[j] for row in entries) for j in range(5)] for i in range(5)]
    else:
        gram = entries
    trace = sum(gram[i][j] * exact[i][j] for i in range(5) for j in range(5))
    assert trace <= Fraction(solution.value) <= trace * (1 + Fraction(1, 10**9))


@pytest.mark.mutant
def test_margin_is_what_keeps_bound() -> None:
    """Without it the rounded inverse breaks the bound on some graphs."""
    broken = 0
    for seed in range(20):
        factor = weights(f"er:8:0.5:{seed}")
        covariance = minimize_trace(factor=factor).covariance
        precision = np.linalg.inv(covariance)
        unsafe = covariance * precision.diagonal().max()
        assert precision.diagonal().max() <= 1
        broken += np.linalg.inv(unsafe).diagonal().max() > 1
    assert broken > 0


def test_dividing_by_multipliers_would_break_hubs() -> None:
    """The first formula of the note, P = L^-1/2 S L^-1/2, is indefinite where S is singular."""
    factor = hub_graph(8, 0)
    scaled = np.sqrt(np.maximum(minimize_trace(factor=factor).multipliers, 1e-16))
    root = np.real(scipy.linalg.sqrtm(scaled[:, None] * (factor.T @ factor) * scaled))
    naive = root / scaled[:, None] / scaled
    assert np.linalg.eigvalsh((naive + naive.T) / 2)[0] < 1e-9
    assert np.linalg.eigvalsh(minimize_trace(factor=factor).precision)[0] > 1e-3


def test_gram_and_wide_or_tall_factors_are_one_problem() -> None:
    factor = weights("er:9:0.5")
    value = minimize_trace(factor=factor).value
    tall = np.concatenate([factor, factor]) / np.sqrt(2)
    assert minimize_trace(factor.T @ factor).value == pytest.approx(value, rel=1e-9)
    assert minimize_trace(factor=tall).value == pytest.approx(value, rel=1e-9)
    wide = minimize_trace(factor=factor[:4])
    assert_feasible(wide, factor[:4])
    assert wide.regularization and wide.gap < 1e-3


def test_scale_and_order_of_agents() -> None:
    factor = weights("florentine")
    order = np.random.default_rng(0).permutation(15)
    solution = minimize_trace(factor=factor)
    scaled = minimize_trace(factor=1e-4 * factor)
    assert scaled.value == pytest.approx(1e-8 * solution.value, rel=1e-9)
    permuted = minimize_trace(factor=factor[:, order])
    np.testing.assert_allclose(
        permuted.covariance, solution.covariance[np.ix_(order, order)], atol=1e-7
    )


def test_warm_start_and_padding_save_work_and_compilations() -> None:
    factor = weights("er:20:0.8")
    first = minimize_trace(factor=factor)
    compiled = fixed_point.climb._cache_size()
    again = minimize_trace(factor=factor, warm_start=first.multipliers)
    smaller = minimize_trace(factor=weights("er:17:0.5"), pad_to=20)
    assert again.iterations <= 2 < first.iterations
    assert again.value == pytest.approx(first.value, rel=1e-9)
    assert fixed_point.climb._cache_size() == compiled
    assert smaller.value == pytest.approx(minimize_trace(factor=weights("er:17:0.5")).value)


def test_fixed_iterations_run_exactly() -> None:
    solution = minimize_trace(factor=weights("er:10:0.5"), tolerance=0, max_iterations=37)
    again = minimize_trace(factor=weights("er:10:0.5"), tolerance=0, max_iterations=37)
    assert solution.iterations == 37 and solution.converged
    assert mixing.fingerprint(solution.covariance) == mixing.fingerprint(again.covariance)


@pytest.mark.parametrize("limit", [1.5, 100.0])
def test_max_variance_is_kept_and_used(limit: float) -> None:
    factor = weights("complete:20")
    solution = minimize_trace(factor=factor, max_variance=limit)
    assert_feasible(solution, factor)
    assert 0.9 * limit < solution.variance_ratio <= limit
    assert solution.regularization > 1e-9
    unlimited = minimize_trace(factor=weights("florentine"), max_variance=100)
    assert not unlimited.regularization


def test_few_iterations_say_so_but_stay_feasible() -> None:
    factor = weights("er:20:0.8")
    solution = minimize_trace(factor=factor, max_iterations=2)
    assert_feasible(solution, factor)
    assert not solution.converged and solution.gap > 1e-6


def test_either_precision_flag_gives_same_bits() -> None:
    factor = weights("er:8:0.5")
    before = jax.config.jax_enable_x64
    prints = []
    try:
        for flag in (False, True):
            jax.config.update("jax_enable_x64", flag)
            prints.append(mixing.fingerprint(minimize_trace(factor=factor).covariance))
            assert jax.config.jax_enable_x64 is flag
    finally:
        jax.config.update("jax_enable_x64", before)
    assert prints[0] == prints[1]


def test_saved_solutions(tmp_path: Path) -> None:
    solution = minimize_trace(factor=weights("er:8:0.5"))
    path = solution.save(tmp_path / "solution")
    loaded = Solution.load(path)
    assert mixing.fingerprint(loaded.precision) == mixing.fingerprint(solution.precision)
    assert (loaded.value, loaded.gap, loaded.converged) == (solution.value, solution.gap, True)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match="make it again"):
        Solution.load(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one"),
        ({"gram": np.eye(2), "factor": np.eye(2)}, "exactly one"),
        ({"gram": np.array([[1.0, 2.0], [0.0, 1.0]])}, "not symmetric"),
        ({"gram": np.diag([1.0, -1.0])}, "eigenvalue -1"),
        ({"gram": np.zeros((3, 3))}, "zero"),
        ({"gram": np.full((2, 2), np.nan)}, "nan"),
        ({"gram": np.ones((2, 3))}, "square"),
        ({"gram": np.eye(2), "solver": "mosek"}, "fixed_point, sdp"),
        ({"gram": np.eye(2), "tolerance": -1.0}, "tolerance is -1"),
        ({"gram": np.eye(2), "max_iterations": 0}, "max_iterations is 0"),
        ({"gram": np.eye(2), "max_variance": 1.0}, "above 1"),
        ({"gram": np.eye(2), "warm_start": np.ones(3)}, "2 multipliers"),
        ({"gram": np.eye(2), "warm_start": np.zeros(2)}, "not all 0"),
        ({"gram": np.eye(4), "pad_to": 3}, "pad_to is 3"),
        ({"gram": np.eye(31), "solver": "sdp"}, "n <= 30"),
        ({"gram": np.eye(3), "solver": "sdp", "max_variance": 2.0}, "max_variance needs"),
    ],
)
def test_refusals(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        minimize_trace(**arguments)


def test_sdp_without_its_libraries_has_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str):
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ValueError, match="pip install cvxpy clarabel"):
        minimize_trace(np.eye(3), solver="sdp")
