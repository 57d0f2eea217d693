"""Exact errors of private gradient tracking against the literal update, and simulated runs."""

import numpy as np
import pytest

from dpjax.contrib import fusion, schedules
from dpjax.mechanism import laplace
from dpjax.topology import graphs, mixing

N = 5
P = 2
ROUNDS = 30
BETA = 20.0
DATA = fusion.make(N, seed=4)
W = mixing.metropolis_hastings(graphs.ring(N))
STEPS = 2e-3 * 0.95 ** np.arange(ROUNDS)
SPREAD = 0.01 * 0.9 ** np.arange(ROUNDS)


def round_of(x, y, noise, alpha, beta=BETA):
    """Algorithm 1 as printed, agent by agent."""
    z = x + noise
    new_x = np.empty_like(x)
    new_y = np.empty_like(y)
    for i in range(len(x)):
        mean = sum(W[i, j] * z[j] for j in range(len(x)))
        new_y[i] = y[i] + beta * (z[i] - mean)
        gradient = DATA.hessians[i] @ z[i] - DATA.linear[i]
        new_x[i] = mean - alpha * (new_y[i] + gradient)
    return new_x, new_y


def final(noises, x):
    y = np.zeros_like(x)
    for k, alpha in enumerate(STEPS):
        x, y = round_of(x, y, noises[k], alpha)
    return x - DATA.minimiser


def test_weights_are_squared_responses_of_update():
    """The update is affine: its response to each entry of each noise by differences."""
    start = np.zeros((N, P), np.float64)
    rest = final(np.zeros((ROUNDS, N, P)), start)
    weights = schedules.weights(W, DATA.hessians, STEPS, BETA)
    for k in (0, 1, 17, ROUNDS - 1):
        total = 0.0
        for i, j in np.ndindex(N, P):
            noises = np.zeros((ROUNDS, N, P))
            noises[k, i, j] = 1.0
            total += ((final(noises, start) - rest) ** 2).sum()
        assert weights[k] == pytest.approx(total, rel=1e-9)
    # With a gain ten percent off they are others.
    off = schedules.weights(W, DATA.hessians, STEPS, 1.1 * BETA)
    assert np.abs(off / weights - 1).max() > 1e-3


def test_error_is_bias_plus_noise():
    start = np.arange(N * P, dtype=np.float64).reshape(N, P) / 7
    result = schedules.error(
        W, DATA.hessians, DATA.linear, STEPS, BETA, SPREAD, start=start, start_variance=0.5
    )
    rest = final(np.zeros((ROUNDS, N, P)), start)
    assert result.bias == pytest.approx((rest**2).sum() + 0.5 * result.weights[0], rel=1e-9)
    assert result.noise == pytest.approx(result.weights @ SPREAD, rel=1e-12)
    assert result.total == result.bias + result.noise
    assert result.weights.dtype == np.float64


def simulated(problem, schedule, beta, trials, seed, start_variance=1.0):
    """[R, T] |x(k) - x*|^2 of trials of Algorithm 1 from draws of N(0, start_variance I)."""
    w, hessians, linear = problem
    minimiser = np.linalg.solve(hessians.sum(axis=0), linear.sum(axis=0))
    generator = np.random.default_rng(seed)
    draw = generator.laplace if schedule.noise == "laplace" else generator.normal
    x = np.sqrt(start_variance) * generator.standard_normal((len(w), trials, len(minimiser)))
    y = np.zeros_like(x)
    squares = []
    for alpha, scale in zip(schedule.step_sizes, schedule.scales, strict=True):
        z = x + scale * draw(size=x.shape)
        mixed = np.einsum("ij,jrp->irp", w, z)
        y = y + beta * (z - mixed)
        x = mixed - alpha * (y + z @ hessians - linear[:, None])
        squares.append(((x - minimiser) ** 2).sum(axis=(0, 2)))
    return np.stack(squares, axis=1)


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_simulated_runs_have_predicted_error(noise):
    make = laplace.geometric if noise == "laplace" else schedules.geometric_gaussian
    schedule = make(0.1, 1.0, 2e-3, 0.9, 0.97, ROUNDS)
    problem = (W, DATA.hessians, DATA.linear)
    spread = schedules.variances(schedule)
    paths = simulated(problem, schedule, BETA, 20_000, seed=0, start_variance=0.0)
    above = []
    for k in (1, 2, 11, ROUNDS):
        arguments = *problem, schedule.step_sizes[:k], BETA
        mean = paths[:, k - 1].mean()
        error = 4 * paths[:, k - 1].std() / np.sqrt(len(paths))
        assert abs(mean - schedules.error(*arguments, spread[:k], start_variance=0.0).total) < error
        extra = schedules.error(*arguments, 1.5 * spread[:k], start_variance=0.0).total
        above.append(abs(mean - extra) > error)
    # Noise of 1.5 times the variance is noticed.
    assert any(above)


def test_simulation_is_literal_update():
    schedule = laplace.geometric(3.0, 1.0, 2e-3, 0.9, 0.97, ROUNDS)
    paths = simulated((W, DATA.hessians, DATA.linear), schedule, BETA, 2, 3, start_variance=0.0)
    generator = np.random.default_rng(3)
    generator.standard_normal((N, 2, P))
    x = np.zeros((N, P))
    y = np.zeros((N, P))
    for k, (alpha, scale) in enumerate(zip(schedule.step_sizes, schedule.scales, strict=True)):
        noise = scale * generator.laplace(size=(N, 2, P))
        x, y = round_of(x, y, noise[:, 1], alpha)
        assert paths[1, k] == pytest.approx(((x - DATA.minimiser) ** 2).sum(), rel=1e-9)


def test_sketch_is_unbiased_and_exact_on_mean():
    rows = schedules.sketch(N, P, 7, seed=0)
    same = np.ones((N, 1)) * np.array([1.0, -2.0])
    assert (np.einsum("rnp,np->r", rows, same) ** 2).sum() == pytest.approx((same**2).sum())
    exact = schedules.weights(W, DATA.hessians, STEPS, BETA)
    few = schedules.weights(
        W, DATA.hessians, STEPS, BETA, rows=schedules.sketch(N, P, 4000, seed=1)
    )
    np.testing.assert_allclose(few, exact, rtol=0.05)


def test_run_that_overflows_has_infinite_error():
    result = schedules.error(W, DATA.hessians, DATA.linear, np.full(200, 10.0), 1.0, np.ones(200))
    assert result.total == np.inf
