"""Parameters of least error: against a grid, by a callable, and measured by simulated runs."""

import itertools

import numpy as np
import pytest

from dpjax.data import fusion
from dpjax.mechanism import laplace, quadratic, tuning
from dpjax.topology import graphs, mixing

N, T = 6, 60
DATA = fusion.make(N, seed=2)
PROBLEM = mixing.metropolis_hastings(graphs.ring(N)), DATA.hessians, DATA.linear
PRINTED = (0.001, 1000.0, 0.97, 0.99)


def test_the_objective_is_the_exact_error_at_the_budget():
    made = laplace.geometric(0.5, 2.0, 0.002, 0.9, 0.95, T)
    want = quadratic.error(*PROBLEM, made.step_sizes, 100.0, quadratic.variances(made)).total
    found = tuning.on_quadratics(*PROBLEM, 0.5, 2.0, T)(0.002, 100.0, 0.9, 0.95)
    assert found == pytest.approx(want, rel=1e-12)
    made = laplace.geometric_gaussian(0.5, 2.0, 0.002, 0.9, 0.95, T, horizon="run")
    want = quadratic.error(*PROBLEM, made.step_sizes, 100.0, quadratic.variances(made)).total
    objective = tuning.on_quadratics(*PROBLEM, 0.5, 2.0, T, noise="gaussian", horizon="run")
    assert objective(0.002, 100.0, 0.9, 0.95) == pytest.approx(want, rel=1e-12)


def test_it_is_as_good_as_a_grid():
    objective = tuning.on_quadratics(*PROBLEM, 1.0, 1.0, T)
    grid = itertools.product(
        np.geomspace(2e-4, 2e-2, 7), (10.0, 100.0, 500.0), (0.7, 0.8, 0.9, 0.95), (0.85, 0.97, 0.99)
    )
    least = min(objective(*point) for point in grid if point[2] < point[3])
    found = tuning.tune(objective, PRINTED, evaluations=400)
    assert found.predicted <= 1.02 * least
    assert found.predicted == objective(*found[:4]) < found.start == objective(*PRINTED)
    assert found.evaluations <= 400 and 0 < found.q1 < found.q2 < 1


def test_predicted_and_measured_agree():
    found = tuning.tune_quadratics(
        *PROBLEM, 1.0, 1.0, T, parameters=PRINTED, trials=4000, evaluations=120
    )
    exact = tuning.on_quadratics(*PROBLEM, 1.0, 1.0, T)
    assert found.predicted == exact(*found[:4]) < found.start == exact(*PRINTED)
    assert found.measured == pytest.approx(found.predicted, rel=0.1)


def test_a_callable_estimates_anything():
    """Monte-Carlo with fixed draws: an error that is not a quadratic's."""
    draws = np.random.default_rng(0).standard_normal(200)

    def objective(gamma, beta, q1, q2):
        del beta
        x = np.full(200, 2.0)
        made = laplace.geometric(1.0, 1.0, gamma, q1, q2, 30)
        for alpha, scale in zip(made.step_sizes, made.scales, strict=True):
            z = x + 0.1 * scale * draws
            x = z - alpha * np.tanh(z)
        return float((x**2).mean())

    found = tuning.tune(objective, (0.05, 1.0, 0.5, 0.9), measure=lambda *point: 7.0)
    assert found.predicted < 0.5 * found.start and found.measured == 7.0


def test_a_start_that_diverges_is_refused_and_diverging_points_are_passed_over():
    with pytest.raises(ValueError, match="start"):
        tuning.tune(lambda *point: np.inf, PRINTED)
    with pytest.raises(ValueError, match="q1"):
        tuning.tune(lambda *point: 1.0, (1.0, 1.0, 0.9, 0.9))
    found = tuning.tune(
        lambda gamma, beta, q1, q2: np.nan if gamma > 1 else 1 / gamma, (0.5, 1.0, 0.5, 0.9)
    )
    assert 0.9 < found.gamma <= 1


def flat(*point):
    return 1.0


@pytest.mark.parametrize(
    ("objective", "start", "options", "match"),
    [
        (flat, (0.1, 2.0, 0.6), {}, "start is .*; give .gamma, beta, q1, q2."),
        (flat, None, {}, "start is None; give .gamma, beta, q1, q2."),
        (flat, (0.1, 0.0, 0.6, 0.7), {}, "start is 0.0; give gamma and beta above 0"),
        ("x", PRINTED, {}, "objective is 'x'; give a function of gamma"),
        (None, PRINTED, {}, "objective is None; give a function of gamma"),
        (flat, PRINTED, {"measure": "x"}, "measure is 'x'; give a function of gamma"),
    ],
)
def test_what_is_no_search_is_refused(objective, start, options, match):
    with pytest.raises(ValueError, match=match):
        tuning.tune(objective, start, **options)


def test_parameters_and_costs_that_are_none_are_refused():
    with pytest.raises(ValueError, match="parameters is .*; give .gamma, beta, q1, q2."):
        tuning.tune_quadratics(*PROBLEM, 1.0, 1.0, T, parameters=PRINTED[:3])
    hills = PROBLEM[0], -DATA.hessians, DATA.linear
    with pytest.raises(ValueError, match="hessians has an average of least curvature -"):
        tuning.tune_quadratics(*hills, 1.0, 1.0, T)
