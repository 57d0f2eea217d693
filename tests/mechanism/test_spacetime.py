"""Noise over rounds and agents against the matrices of the whole run, nT x nT, and closed forms."""

import functools

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpjax.accounting import views
from dpjax.contrib import joint
from dpjax.mechanism import spacetime, spatial, temporal, workload
from dpjax.mechanism.participation import Participation
from dpjax.topology import graphs, mixing

N = 5
_DIRECTED = nx.DiGraph([(i, (i + 1) % N) for i in range(N)] + [(0, 3), (4, 2)])
SYMMETRIC = mixing.metropolis_hastings(graphs.erdos_renyi(N, 0.5, 0))
ROWS = mixing.uniform_neighbors(_DIRECTED)
STAR = mixing.uniform_neighbors(graphs.star(N))
MIXINGS = {
    "symmetric": SYMMETRIC,
    "reversible": STAR,
    "directed rows": ROWS,
    "directed columns": mixing.push_sum(_DIRECTED),
    "schedule of two": np.stack([SYMMETRIC, ROWS]),
    "schedule of three": np.stack([STAR, ROWS, SYMMETRIC]),
    "one agent": np.ones((1, 1)),
}
SHIFT = np.roll(np.eye(4), 1, axis=0)
FLORENTINE = mixing.metropolis_hastings(graphs.florentine())
PARTICIPATIONS = [(6, 1, 6), (6, 2, 3), (6, 3, 2), (6, 6, 1)]


def whole_run(matrix: np.ndarray, rounds: int) -> np.ndarray:
    """Return the nT x nT map from the noise of all rounds to the models of all rounds."""
    n = matrix.shape[-1]
    schedule = matrix[None] if matrix.ndim == 2 else matrix
    blocks = np.zeros((rounds, n, rounds, n))
    for s in range(rounds):
        carry = np.eye(n)
        for t in range(s, rounds):
            carry = schedule[t % len(schedule)] @ carry
            blocks[t, :, s, :] = carry
    return blocks.reshape(rounds * n, rounds * n)


def energy(matrix: np.ndarray, strategy: np.ndarray, covariance: np.ndarray) -> float:
    """Return the squared noise in all models, from the covariance of all of them."""
    run = whole_run(matrix, len(strategy))
    over_rounds = np.linalg.inv(strategy.T @ strategy)
    return float(np.trace(run @ np.kron(over_rounds, covariance) @ run.T))


def sensitivity(strategy: np.ndarray, covariance: np.ndarray, participation) -> float:
    """Return the largest sum of |P| over a record's entries, P the precision of all noise."""
    n = len(covariance)
    over_agents = np.linalg.inv(covariance)
    precision = np.kron(strategy.T @ strategy, over_agents)
    sums = [
        np.abs(precision[np.ix_(rounds * n + agent, rounds * n + agent)]).sum()
        for rounds in participation.patterns
        for agent in range(n)
    ]
    return float(np.sqrt(max(sums)))


def triangular(seed: int, rounds: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.tril(rng.normal(size=(rounds, rounds)) / 2) + np.diag(rng.uniform(1, 2, rounds))


def over_agents(matrix: np.ndarray, strategy: np.ndarray) -> np.ndarray:
    """Return the factor of M of a mixing matrix or a schedule."""
    return spacetime.factor_over_agents(workload.schedule_of(matrix), strategy)


@functools.cache
def designed(participation: Participation) -> spacetime.JointDesign:
    return spacetime.design(SYMMETRIC, participation)


# One half-step: the objective over agents.


@pytest.mark.parametrize("kind", MIXINGS)
@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_factor_is_that_of_whole_run(kind, rounds) -> None:
    matrix = MIXINGS[kind]
    strategy = triangular(3, rounds)
    n = matrix.shape[-1]
    blocks = whole_run(matrix, rounds).reshape(-1, rounds, n)
    over_rounds = np.linalg.inv(strategy.T @ strategy)
    expected = np.einsum("xsi,st,xtj->ij", blocks, over_rounds, blocks)
    factor = over_agents(matrix, strategy)
    assert factor.dtype == np.float64
    np.testing.assert_allclose(factor.T @ factor, expected, rtol=1e-10, atol=1e-11)
    # The transposed strategy has another inverse: a swap of K = C^-1 C^-T would show.
    swapped = np.linalg.inv(strategy @ strategy.T)
    invalid = np.einsum("xsi,st,xtj->ij", blocks, swapped, blocks)
    assert rounds == 1 or np.abs(invalid - expected).max() > 1e-2


@given(st.integers(0, 10_000), st.integers(1, 8), st.sampled_from(list(MIXINGS)))
def test_both_half_steps_have_one_objective(seed, rounds, kind) -> None:
    matrix = MIXINGS[kind]
    strategy = triangular(seed, rounds)
    root = np.random.default_rng(seed).normal(size=matrix.shape[-2:])
    covariance = root @ root.T
    factor = over_agents(matrix, strategy)
    gram = temporal.workload_gram(matrix, rounds, covariance=covariance)
    by_agents = np.trace(factor.T @ factor @ covariance)
    by_rounds = np.trace(gram @ np.linalg.inv(strategy.T @ strategy))
    assert by_agents == pytest.approx(by_rounds, rel=1e-8)
    assert by_agents == pytest.approx(energy(matrix, strategy, covariance), rel=1e-8)


@pytest.mark.parametrize("kind", ["symmetric", "directed rows", "schedule of three"])
def test_fresh_noise_gives_horizon_aware_design(kind) -> None:
    matrix = MIXINGS[kind]
    rounds = 20
    factor = over_agents(matrix, np.eye(rounds))
    reference = workload.factor(matrix, rounds)
    np.testing.assert_allclose(factor.T @ factor, reference.T @ reference, rtol=1e-10, atol=1e-10)
    covariance, _ = spatial.solve_whisper(factor, 1.0)
    np.testing.assert_allclose(covariance, spatial.whisper(matrix, 1.0, rounds), atol=2e-3)
    assert np.trace(reference.T @ reference @ covariance) == pytest.approx(
        spatial.energy(spatial.whisper(matrix, 1.0, rounds), matrix, rounds), rel=1e-7
    )


def test_blocks_of_rows_add_up(monkeypatch) -> None:
    strategy = triangular(0, 9)
    complete = over_agents(MIXINGS["schedule of two"], strategy)
    monkeypatch.setattr(spacetime, "_BLOCK", 9 * N * 2)  # two rows, two rows, one
    parts = over_agents(MIXINGS["schedule of two"], strategy)
    np.testing.assert_allclose(parts.T @ parts, complete.T @ complete, rtol=1e-11, atol=1e-11)


# The design.


KINDS = ("symmetric", "reversible", "schedule of two")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        pytest.param(kind, fields, marks=[] if (row - column) % 3 == 0 else [pytest.mark.slow])
        for row, fields in enumerate(PARTICIPATIONS)
        for column, kind in enumerate(KINDS)
    ],
)
def test_design(kind, fields) -> None:
    matrix = MIXINGS[kind]
    participation = Participation(*fields)
    design = spacetime.design(matrix, participation)
    assert not np.triu(design.strategy, 1).any() and design.strategy.diagonal().min() > 0
    assert 1 - 1e-6 < sensitivity(design.strategy, design.covariance, participation) <= 1 + 1e-9
    assert temporal.sensitivity(design.strategy, participation) <= 1
    assert design.value == pytest.approx(
        energy(matrix, design.strategy, design.covariance), rel=1e-7
    )
    assert design.value == pytest.approx(
        joint.objective(matrix, 3 * design.strategy, design.covariance / 7, participation),
        rel=1e-6,
    )
    history = np.array(design.history)
    assert design.converged and len(history) > 1 and (np.diff(history) < 0).all()
    assert design.value == history[-1]
    # C for R = I is MAFALDA's: the design improves on both parents.
    assert history[0] == pytest.approx(
        temporal.solve(temporal.workload_gram(matrix, fields[0]), participation).value
    )
    assert design.value < 0.99 * history[0]
    fresh = spatial.whisper(matrix, 1.0, fields[0])
    parent = joint.objective(matrix, np.eye(fields[0]), fresh, participation)
    assert design.value < 0.99 * parent
    assert 0 <= design.gap < 1e-5
    assert max(design.strategy_bound, design.covariance_bound) <= design.value


@pytest.mark.mutant
def test_loose_covariance_is_caught() -> None:
    participation = Participation(6, 2, 3)
    design = spacetime.design(SYMMETRIC, participation)
    for c, r in ((1.01, 1.0), (1.0, 0.98)):
        loose = sensitivity(c * design.strategy, r * design.covariance, participation)
        assert loose > 1 + 5e-3
    other = Participation(6, 3, 1)
    assert sensitivity(design.strategy, design.covariance, other) > 1.01


@pytest.mark.parametrize("fields", [(6, 1, 6), (6, 2, 3)])
def test_attackers_view_has_this_loss(fields) -> None:
    """The loss of an outsider by the accounting's own recursion: mu = 1 at noise 1, clip 1."""
    participation = Participation(*fields)
    design = spacetime.design(SYMMETRIC, participation)

    def loss(strategy: np.ndarray, covariance: np.ndarray) -> float:
        view = views.dsgd(SYMMETRIC, strategy=strategy, covariance=covariance).ldp()
        return float(np.max(view.gdp(participation)))

    assert loss(design.strategy, design.covariance) == pytest.approx(1.0, abs=1e-5)
    assert loss(design.strategy, design.covariance / 1.1) > 1.04


@given(st.integers(0, 10_000), st.sampled_from(PARTICIPATIONS))
def test_no_pair_nearby_is_better(seed, fields) -> None:
    participation = Participation(*fields)
    design = designed(participation)
    rng = np.random.default_rng(seed)
    size = 10.0 ** rng.uniform(-4, 0)
    step = np.tril(rng.normal(size=(6, 6))) * design.strategy.diagonal().min() * size
    strategy = design.strategy + 0.3 * step
    skewed = np.eye(N) + 0.3 * size * rng.normal(size=(N, N))
    covariance = skewed @ design.covariance @ skewed.T
    if min(np.abs(strategy.diagonal())) > 1e-3 and np.linalg.cond(skewed) < 1e3:
        cost = joint.objective(SYMMETRIC, strategy, covariance, participation)
        assert cost >= design.value * (1 - 1e-7)


def test_other_start_ends_in_same_value() -> None:
    """Alternation from C = I, the horizon-aware design's, by hand."""
    participation = Participation(12, 3, 4)
    strategy = temporal.identity(12)
    for _ in range(12):
        factor = over_agents(FLORENTINE, strategy)
        covariance, _ = spatial.solve_whisper(factor, 1.0)
        gram = temporal.workload_gram(FLORENTINE, 12, covariance=covariance)
        step = temporal.solve(gram, participation)
        strategy = step.strategy
    assert spacetime.design(FLORENTINE, participation).value == pytest.approx(step.value, rel=1e-8)


def relative(graph: nx.Graph, rounds: int) -> tuple[float, ...]:
    matrix = mixing.metropolis_hastings(graph)
    participation = Participation(rounds, 1, rounds)
    n = len(matrix)
    fresh = np.eye(rounds)
    designs = [
        (temporal.mafalda(matrix, participation), np.eye(n)),
        (fresh, spatial.whisper(matrix, 1.0)),
        (fresh, spatial.whisper(matrix, 1.0, rounds)),
        spacetime.design(matrix, participation)[:2],
    ]
    single = joint.objective(matrix, fresh, np.eye(n), participation)
    return tuple(joint.objective(matrix, *pair, participation) / single for pair in designs)


@pytest.mark.parametrize(
    ("graph", "rounds", "expected"),
    [
        pytest.param(
            *(graphs.florentine(), 64, (0.278, 0.613, 0.469, 0.192)), marks=pytest.mark.slow
        ),
        (graphs.ring(12), 40, (0.322, 0.512, 0.385, 0.186)),
    ],
)
def test_known_values(graph, rounds, expected) -> None:
    np.testing.assert_allclose(relative(graph, rounds), expected, atol=6e-4)


def test_too_few_half_steps_are_said() -> None:
    design = spacetime.design(FLORENTINE, Participation(12, 3, 4), max_iterations=1)
    best = spacetime.design(FLORENTINE, Participation(12, 3, 4))
    assert not design.converged and best.converged
    assert best.value < design.value
    # The certificates hold for the pair that is returned.
    assert design.strategy_bound <= design.value and design.covariance_bound <= design.value
    assert design.gap > best.gap


# What the Kronecker form gives away.


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        pytest.param(kind, fields, marks=[] if row == column else [pytest.mark.slow])
        for row, fields in enumerate([(4, 1, 4), (4, 2, 2), (4, 4, 1)])
        for column, kind in enumerate(["symmetric", "directed rows", "schedule of two"])
    ],
)
def test_unrestricted_bound_is_below(kind, fields) -> None:
    matrix = MIXINGS[kind]
    participation = Participation(*fields)
    bound = joint.unrestricted_bound(matrix, participation)
    design = spacetime.design(matrix, participation)
    assert 0.3 * design.value < bound.lower_bound <= design.value
    assert bound.gap < 1e-3


@pytest.mark.parametrize("fields", [(2, 1, 2), (2, 2, 1), (4, 2, 2)])
def test_unrestricted_bound_by_interior_point_solver(fields) -> None:
    """The constraint written out record by record, from the definition of the sensitivity."""
    cvxpy = pytest.importorskip("cvxpy")
    participation = Participation(*fields)
    matrix = mixing.metropolis_hastings(graphs.ring(3))
    n = 3
    size = 3 * fields[0]
    run = whole_run(matrix, fields[0])
    precision = cvxpy.Variable((size, size), PSD=True)
    limits = [
        cvxpy.sum(cvxpy.abs(precision[np.ix_(rounds * n + agent, rounds * n + agent)])) <= 1
        for rounds in participation.patterns
        for agent in range(n)
    ]
    root = np.linalg.cholesky(run.T @ run + 1e-10 * np.eye(size))
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.matrix_frac(root, precision)), limits)
    value = problem.solve(solver=cvxpy.CLARABEL)
    bound = joint.unrestricted_bound(matrix, participation)
    assert bound.lower_bound == pytest.approx(value, rel=1e-3)
    assert bound.lower_bound <= value * (1 + 1e-6)


def test_unrestricted_bound_on_shift_has_closed_form() -> None:
    """Every model is passed on whole: a running sum H, once agents are renamed in each round.

    One participation in two rounds: min (3 - 2x) / (1 - x^2) = ((1 + sqrt 5) / 2)^2 an agent. In
    every round: after renaming no two entries of a running sum are one record's, which leaves
    tr P <= 1 and (tr H^1/2)^2. K (x) R cannot rename, and pays more.
    """
    cases = [((1, 1, 1), 1.0), ((2, 1, 2), (3 + 5**0.5) / 2), ((2, 2, 1), 5.0)]
    for rounds in (3, 4):
        roots = np.linalg.svd(np.tri(rounds), compute_uv=False)
        cases.append(((rounds, rounds, 1), roots.sum() ** 2))
    for fields, expected in cases:
        bound = joint.unrestricted_bound(SHIFT, Participation(*fields))
        assert bound.value / 4 == pytest.approx(expected, rel=1e-6)
        assert bound.lower_bound / 4 == pytest.approx(expected, rel=1e-6)
    for rounds in (3, 4):
        participation = Participation(rounds, 1, rounds)
        bound = joint.unrestricted_bound(SHIFT, participation)
        single = joint.unrestricted_bound(np.ones((1, 1)), participation)
        assert bound.value == pytest.approx(4 * single.value, rel=1e-6)
    design = spacetime.design(SHIFT, Participation(2, 1, 2))
    assert design.value / 4 > 1.01 * (3 + 5**0.5) / 2


def test_one_round_is_spatial_problem() -> None:
    """A circulant W: (sum |l|)^2 / n, of the eigenvalues l, in space, jointly and unrestricted."""
    matrix = mixing.metropolis_hastings(graphs.ring(5))
    participation = Participation(1, 1, 1)
    expected = np.abs(np.linalg.eigvalsh(matrix)).sum() ** 2 / 5
    assert spacetime.design(matrix, participation).value == pytest.approx(expected, rel=1e-7)
    bound = joint.unrestricted_bound(matrix, participation)
    assert bound.lower_bound == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(("k", "b"), [(1, 5), (3, 1), (2, 4)])
def test_one_agent_has_no_space(k, b) -> None:
    participation = Participation(k * b, k, b)
    design = spacetime.design(np.ones((1, 1)), participation)
    single = temporal.solve(np.linalg.multi_dot([np.tri(k * b).T, np.tri(k * b)]), participation)
    assert design.value == pytest.approx(single.value, rel=1e-8)
    np.testing.assert_allclose(design.covariance, 1.0, rtol=1e-9)


# Size, and bad input.


@pytest.mark.slow
@pytest.mark.parametrize("weights", [mixing.metropolis_hastings, mixing.uniform_neighbors])
def test_large_networks_fit(weights) -> None:
    matrix = weights(graphs.erdos_renyi(148, 0.1, 0))
    design = spacetime.design(matrix, Participation(380, 20, 19))
    assert design.converged and design.gap < 1e-4
    assert design.value < 0.9 * design.history[0]


def test_bad_input() -> None:
    participation = Participation(6, 2, 3)
    with pytest.raises(ValueError, match="use 6 rounds"):
        spacetime.design(SYMMETRIC, Participation(7, 2, 3))
    with pytest.raises(ValueError, match="use 6 rounds"):
        joint.unrestricted_bound(SYMMETRIC, Participation(7, 2, 3))
    with pytest.raises(ValueError, match="sum to 1"):
        spacetime.design(1.1 * SYMMETRIC, participation)
    with pytest.raises(ValueError, match="tolerance is 0"):
        spacetime.design(SYMMETRIC, participation, tolerance=0)
    with pytest.raises(ValueError, match="max_iterations is 0"):
        spacetime.design(SYMMETRIC, participation, max_iterations=0)
    with pytest.raises(ValueError, match="agents times rounds up to 2000"):
        joint.unrestricted_bound(SYMMETRIC, Participation(401, 1, 401))
    with pytest.raises(ValueError, match="covariance is not positive definite"):
        joint.objective(SYMMETRIC, np.eye(6), np.ones((N, N)), participation)
    with pytest.raises(ValueError, match="covariance has shape"):
        joint.objective(SYMMETRIC, np.eye(6), np.eye(N + 1), participation)
