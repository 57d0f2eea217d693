"""Best noise against a convex solver and perturbations; the descent against exact errors."""

import jax.numpy as jnp
import numpy as np
import pytest

from dpjax._numerics import double_precision
from dpjax.accounting import pure
from dpjax.contrib import fusion, schedules
from dpjax.mechanism import laplace
from dpjax.topology import graphs, mixing
from tests.contrib.test_quadratics import simulated

RNG = np.random.default_rng(0)
STEPS = np.exp(RNG.uniform(-4, 0, 12))
WEIGHTS = np.exp(RNG.uniform(-3, 3, 12))


def test_best_scales_are_those_of_convex_solver():
    cvxpy = pytest.importorskip("cvxpy")
    nu = cvxpy.Variable(11, pos=True)
    noise = cvxpy.sum(cvxpy.multiply(2 * WEIGHTS[1:], cvxpy.square(nu)))
    spent = cvxpy.sum(cvxpy.multiply(1.5 * STEPS[:-1], cvxpy.inv_pos(nu)))
    problem = cvxpy.Problem(cvxpy.Minimize(noise), [spent <= 0.7])
    problem.solve(solver=cvxpy.CLARABEL)
    result = schedules.best_scales(STEPS, WEIGHTS, 0.7, 1.5)
    assert 2 * WEIGHTS @ result**2 == pytest.approx(problem.value, rel=1e-6)
    np.testing.assert_allclose(result[1:], nu.value, rtol=1e-3)
    assert result[0] == 0

    variance = cvxpy.Variable(11, pos=True)
    squares = cvxpy.multiply((1.5 * STEPS[:-1]) ** 2, cvxpy.inv_pos(variance))
    problem = cvxpy.Problem(cvxpy.Minimize(WEIGHTS[1:] @ variance), [cvxpy.sum(squares) <= 0.49])
    problem.solve(solver=cvxpy.CLARABEL)
    result = schedules.best_scales(STEPS, WEIGHTS, 0.7, 1.5, "gaussian")
    assert WEIGHTS @ result**2 == pytest.approx(problem.value, rel=1e-6)


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_best_scales_spend_budget(noise):
    measure = pure.epsilon if noise == "laplace" else pure.mu_of_steps
    factor = 2.0 if noise == "laplace" else 1.0
    best = schedules.best_scales(STEPS, WEIGHTS, 0.7, 1.5, noise)
    spent = measure(STEPS, best, 1.5)
    assert 0.7 * (1 - 1e-11) < spent <= 0.7
    cost = factor * WEIGHTS @ best**2
    # The closed forms of the least noise.
    display = STEPS[:-1]
    w = WEIGHTS[1:]
    if noise == "laplace":
        minimum = 2 * (1.5 / 0.7) ** 2 * (display ** (2 / 3) * np.cbrt(w)).sum() ** 3
    else:
        minimum = (1.5 / 0.7) ** 2 * (display * np.sqrt(w)).sum() ** 2
    assert cost == pytest.approx(minimum, rel=1e-10)
    rng = np.random.default_rng(1)
    for _ in range(200):
        other = best * np.exp(rng.normal(0, 0.2, 12))
        other *= measure(STEPS, other, 1.5) / 0.7
        assert factor * WEIGHTS @ other**2 >= cost * (1 - 1e-9)


def test_rounds_without_step_need_no_noise():
    steps = np.array([0.5, 0.0, 0.25, 0.0], np.float64)
    result = schedules.best_scales(steps, np.ones(4), 1.0, 1.0)
    assert (result[[0, 2]] == 0).all() and (result[[1, 3]] > 0).all()
    assert pure.epsilon(steps, result, 1.0) == pytest.approx(1.0, rel=1e-10)
    with pytest.raises(ValueError, match="weights"):
        schedules.best_scales(steps, [1.0, 0.0, 1.0, 1.0], 1.0, 1.0)


N = 8
T = 24
DATA = fusion.make(N, seed=1)
W = mixing.metropolis_hastings(graphs.erdos_renyi(N, 0.6, seed=0))
PROBLEM = W, DATA.hessians, DATA.linear


@pytest.mark.slow
@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize("shape", ["smooth", "pulses"])
def test_what_descends_is_exact_error_with_best_noise(shape, gaussian):
    if shape == "smooth":
        start = schedules._smooth(T, 5, 1e-3, 0.9, 50.0, 7)
    else:
        start = schedules._pulses(T, 3, DATA.hessians.mean(axis=0), 50.0, 7)
    noise = "gaussian" if gaussian else "laplace"
    steps, beta = start.steps(start.point)
    weights = schedules.weights(W, DATA.hessians, steps, beta)
    scales = schedules.best_scales(steps, weights, 0.5, 1.2, noise)
    spread = (1.0 if gaussian else 2.0) * scales**2
    want = schedules.error(*PROBLEM, steps, beta, spread, start=0.3, start_variance=0.7)
    factor = (1.0 if gaussian else 2.0) * (1.2 / 0.5) ** 2
    e, u = schedules.problem_of(*PROBLEM, steps, beta).first_errors(0.3)
    rows = np.moveaxis(np.eye(2 * N).reshape(-1, N, 2), 0, 1)
    arrays = W, DATA.hessians, e, u, start.basis, start.mask, rows, 0.7, factor
    with double_precision():
        argument = tuple(jnp.asarray(array) for array in arrays)
        value, slope = schedules._log_error(jnp.asarray(start.point), argument, gaussian)
        assert float(value) == pytest.approx(np.log(want.total), abs=1e-9)
        for j in range(8):
            ends = [start.point + sign * 1e-5 * np.eye(8)[j] for sign in (1, -1)]
            up, down = (
                float(schedules._log_error(jnp.asarray(x), argument, gaussian)[0]) for x in ends
            )
            assert float(slope[j]) == pytest.approx((up - down) / 2e-5, abs=1e-5)


def test_pulses_solve_problem_between_averages():
    """As many as eigenvalues: without noise nothing is left but what averaging leaves."""
    start = schedules._pulses(60, 2, DATA.hessians.mean(axis=0), 1.0, 2)
    steps, beta = start.steps(start.point)
    assert (steps > 0).sum() == 2 and steps[-1] == 0
    complete = np.full((N, N), 1 / N)
    result = schedules.error(complete, DATA.hessians, DATA.linear, steps, beta, np.zeros(60))
    assert result.bias < 1e-20


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_optimum_beats_geometric_schedules(noise):
    best = schedules.optimal(
        *PROBLEM, 1.0, 1.0, T, noise=noise, pulses=(1, 2), knots=6, probes=None, iterations=60
    )
    schedule = best.schedule
    measure = pure.epsilon if noise == "laplace" else pure.mu_of_steps
    assert measure(schedule.step_sizes, schedule.scales, 1.0) <= 1.0
    assert schedule.scales[0] == 0 and schedule.noise == noise
    again = schedules.error(*PROBLEM, schedule.step_sizes, best.beta, schedules.variances(schedule))
    assert again.total == pytest.approx(best.error.total, rel=1e-9)
    assert best.error == best.met[best.shape]
    make = laplace.geometric if noise == "laplace" else schedules.geometric_gaussian
    for gamma, beta, q1, q2 in ((0.001, 1000, 0.97, 0.99), (0.002, 100, 0.9, 0.97)):
        result = make(1.0, 1.0, gamma, q1, q2, T)
        plain = schedules.error(*PROBLEM, result.step_sizes, beta, schedules.variances(result))
        assert best.error.total < 0.5 * plain.total
    paths = simulated(PROBLEM, schedule, best.beta, 4000, seed=0)[:, -1]
    assert abs(paths.mean() - best.error.total) < 4 * paths.std() / np.sqrt(4000)
    assert abs(paths.mean() - 1.5 * best.error.total) > 4 * paths.std() / np.sqrt(4000)


def test_no_shape_is_worse_than_where_it_began():
    best = schedules.optimal(*PROBLEM, 0.1, 1.0, T, knots=4, pulses=(2,), iterations=15)
    smooth = schedules._smooth(
        T, 4, 1 / np.linalg.eigvalsh(DATA.hessians).max(), np.exp(-5 / T), 1, 4
    )
    steps, _ = smooth.steps(smooth.point)
    first = best.met["geometric steps"]
    np.testing.assert_allclose(
        first.weights,
        schedules.weights(W, DATA.hessians, steps, 0.5 / steps[0]),
        rtol=1e-9,
    )
    assert best.met["smooth"].total <= first.total * (1 + 1e-9)
    assert best.error.total == min(item.total for item in best.met.values())


@pytest.mark.slow
def test_errors_on_fusion_problem_at_epsilon_one():
    """100 agents: the printed parameters, two pulses; runs agree."""
    data = fusion.make(100, seed=2)
    problem = (
        mixing.metropolis_hastings(graphs.erdos_renyi(100, 0.1, seed=2)),
        data.hessians,
        data.linear,
    )
    printed = laplace.geometric(1.0, 1.0, 0.001, 0.97, 0.99, 300)
    spread = schedules.variances(printed)
    plain = schedules.error(*problem, printed.step_sizes, 1000.0, spread)
    assert plain.total == pytest.approx(0.944, abs=0.005)
    best = schedules.optimal(
        *problem, 1.0, 1.0, 300, shape="pulses", pulses=(2,), probes=8, iterations=30
    )
    assert best.error.total == pytest.approx(0.00152, abs=2e-5) and best.error.bias < 1e-6
    assert pure.epsilon(best.schedule.step_sizes, best.schedule.scales, 1.0) <= 1.0
    paths = simulated(problem, best.schedule, best.beta, 400, seed=0)[:, -1]
    assert abs(paths.mean() - best.error.total) < 4 * paths.std() / 20


def test_start_that_diverges_is_refused():
    with pytest.raises(ValueError, match="gamma"):
        schedules.optimal(*PROBLEM, 1.0, 1.0, 200, gamma=1e3, shape="smooth")


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
@pytest.mark.parametrize(
    ("steps", "weights", "budget", "gap"),
    [
        ([1.0, 1.0, 1.0], [1.0, 1e-310, 2e-310], 1.0, 1.0),
        ([1e-200, 3e-200, 1.0], [1.0, 1e200, 4e200], 1.0, 1.0),
        ([1e-200, 3e-200, 1.0], [1.0, 1e200, 4e200], 1e-130, 1e150),
        ([2.0, 1.0, 1.0], [1.0, 1e-300, 1e300], 1e-140, 1e-140),
        ([1e200, 1.0, 1e-200, 1.0], [1.0, 1.0, 5.0, 1e-100], 1.0, 1.0),
    ],
)
def test_best_scales_of_far_apart_numbers_spend_budget(steps, weights, budget, gap, noise):
    result = schedules.best_scales(steps, weights, budget, gap, noise)
    assert np.isfinite(result).all() and (result[1:] > 1e-300).all()
    spent = (pure.epsilon if noise == "laplace" else pure.mu_of_steps)(steps, result, gap)
    assert budget * (1 - 1e-11) < spent <= budget
    # A tenth of a millionth less noise would not.
    reduced = (pure.epsilon if noise == "laplace" else pure.mu_of_steps)(
        steps, result * (1 - 1e-7), gap
    )
    assert reduced > budget


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
@pytest.mark.parametrize(
    ("steps", "weights", "budget", "gap", "match"),
    [
        ([1.0] * 3, [1.0] * 3, 1e200, 1e-200, "gradient_gap is 1e-200, budget 1e[+]200, .* units"),
        ([1e200] * 3, [1e-300] * 3, 1.0, 1e200, "beyond what float64 holds; give them in units"),
        ([1.0] * 3, [1.0] * 3, 1e-150, 1e-150, "budget 1e-150, .* beyond what float64"),
    ],
)
def test_best_scales_that_float64_does_not_hold_are_refused(
    steps, weights, budget, gap, match, noise
):
    with pytest.raises(ValueError, match=match):
        schedules.best_scales(steps, weights, budget, gap, noise)


@pytest.mark.slow
def test_few_rounds_have_knots_and_pulses_of_their_own():
    for rounds in (2, 3, 10):
        best = schedules.optimal(*PROBLEM, 1.0, 1.0, rounds, iterations=0)
        assert np.isfinite(best.error.total)
        pulses = [name for name in best.met if "pulse" in name]
        assert len(pulses) == min(4, rounds - 1)
