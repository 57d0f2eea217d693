"""Filter and strategy together: conditional means, a semidefinite program, brute force, limits."""

import numpy as np
import pytest
from scipy import linalg, optimize

from dpjax.contrib import filtered
from dpjax.contrib.bands import toeplitz
from dpjax.mechanism import temporal, workload
from dpjax.mechanism.participation import Participation


def ar1(rounds, rho=0.9, power=1.0):
    return power * rho ** np.abs(np.subtract.outer(np.arange(rounds), np.arange(rounds)))


def spread(rounds, seed):
    """A random covariance, well conditioned."""
    root = np.random.default_rng(seed).normal(size=(rounds, rounds))
    return root @ root.T + np.eye(rounds)


def squared_error(matrix, signal, noise, weight):
    """J by its definition, from a joint covariance of gradient and noise."""
    pair = np.block([[signal, np.zeros_like(signal)], [np.zeros_like(signal), noise]])
    rows = np.hstack([matrix - np.eye(len(signal)), matrix])
    return np.trace(weight @ rows @ pair @ rows.T @ weight.T)


def test_filter_is_mean_given_what_has_come_in():
    signal = spread(5, 0)
    noise = spread(5, 1)
    got = filtered.wiener(signal, noise)
    for t in range(5):
        past = slice(0, t + 1)
        row = np.linalg.solve((signal + noise)[past, past], signal[past, t])
        np.testing.assert_allclose(got[t, past], row, rtol=1e-9)
    assert not np.triu(got, 1).any()


def test_weight_asks_for_mean_of_sums():
    signal = spread(4, 2)
    noise = spread(4, 3)
    weight = np.tri(4)
    got = filtered.wiener(signal, noise, gram=weight.T @ weight)
    np.testing.assert_allclose(weight.T @ weight, workload.prefix_sum_gram(4))
    for t in range(4):
        past = slice(0, t + 1)
        row = np.linalg.solve((signal + noise)[past, past], (weight @ signal)[t, past])
        np.testing.assert_allclose((weight @ got)[t, past], row, rtol=1e-9)


def test_no_causal_filter_is_better():
    signal = spread(4, 4)
    noise = spread(4, 5)
    weight = np.tri(4) + np.diag([0, 1, 0, 2])
    best = filtered.wiener(signal, noise, gram=weight.T @ weight)
    minimum = squared_error(best, signal, noise, weight)
    lower = np.tril_indices(4)

    def value(entries):
        matrix = np.zeros((4, 4))
        matrix[lower] = entries
        return squared_error(matrix, signal, noise, weight)

    optimum = optimize.minimize(value, np.zeros(len(lower[0])))
    assert minimum == pytest.approx(optimum.fun, rel=1e-7)
    # A filter that may look ahead is better, so that causality is what binds.
    ahead = signal @ np.linalg.inv(signal + noise)
    assert squared_error(ahead, signal, noise, weight) < 0.99 * minimum


def test_error_does_not_depend_on_strategy_s_scale():
    pattern = Participation(6, 3, 2)
    weight = np.tri(6)
    strategy = np.tri(6) + np.eye(6)
    matrix = np.tri(6) / 6
    inverse = np.linalg.inv(strategy)
    classes = [np.abs((strategy.T @ strategy)[c::2, c::2]).sum() for c in range(2)]
    noise = 0.7 * max(classes) * inverse @ inverse.T
    expected = squared_error(matrix, ar1(6), noise, weight) / 6
    for scale in (1.0, 100.0):
        got = filtered.filtered_error(
            matrix, scale * strategy, ar1(6), 0.7, pattern, gram=weight.T @ weight
        )
        assert got == pytest.approx(expected, rel=1e-9)


SETTINGS = [
    # rounds, epochs, rho, variance, sums, how far from the optimum, how far below it the bound
    (6, 1, 0.9, 1.0, False, 1e-4, 1e-4),
    (4, 2, 0.9, 0.3, True, 1e-4, 2e-3),
    pytest.param(5, 5, 0.5, 0.3, True, 1e-3, 1e-2, marks=pytest.mark.slow),
    (6, 1, 0.99, 10.0, False, 1e-3, 0.1),
    pytest.param(4, 2, 0.95, 10.0, False, 2e-3, 0.05, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("rounds, epochs, rho, variance, sums, above, below", SETTINGS)
def test_both_are_optimum_of_semidefinite_program(
    rounds, epochs, rho, variance, sums, above, below
):
    cvxpy = pytest.importorskip("cvxpy")
    separation = rounds // epochs
    weight = np.tri(rounds) if sums else np.eye(rounds)
    root = np.linalg.cholesky(ar1(rounds, rho))
    matrix = cvxpy.Variable((rounds, rounds))
    block = cvxpy.Variable((2 * rounds, 2 * rounds), PSD=True)
    # [[P, (W F)'], [W F, X]] >= 0 is X >= W F P^-1 F' W'.
    requests = [block[rounds:, :rounds] == weight @ matrix, cvxpy.upper_tri(matrix) == 0]
    requests += [
        cvxpy.sum(cvxpy.abs(block[c:rounds:separation, c:rounds:separation])) <= 1
        for c in range(separation)
    ]
    lost = cvxpy.sum_squares(weight @ (matrix - np.eye(rounds)) @ root)
    noise = variance * cvxpy.trace(block[rounds:, rounds:])
    optimum = (
        cvxpy.Problem(cvxpy.Minimize(lost + noise), requests).solve(solver="CLARABEL") / rounds
    )

    pattern = Participation(rounds, epochs, separation)
    pair = filtered.solve(ar1(rounds, rho), variance, pattern, gram=weight.T @ weight)
    assert optimum * (1 - 1e-6) <= pair.error <= optimum * (1 + above)
    assert optimum * (1 - below) <= pair.lower_bound <= optimum * (1 + 1e-6)
    assert all(
        later <= earlier for earlier, later in zip(pair.errors, pair.errors[1:], strict=False)
    )
    again = filtered.filtered_error(
        pair.filter, pair.strategy, ar1(rounds, rho), variance, pattern, gram=weight.T @ weight
    )
    assert again == pytest.approx(pair.error, rel=1e-9)
    gram = pair.strategy.T @ pair.strategy
    sums = [np.abs(gram[c::separation, c::separation]).sum() for c in range(separation)]
    assert 0.99 < max(sums) <= 1.0


@pytest.mark.slow
def test_no_pair_that_search_finds_is_better():
    signal = ar1(3)
    pattern = Participation(3, 1, 3)
    pair = filtered.solve(signal, 2.0, pattern, tolerance=1e-6)

    def value(entries):
        strategy = np.eye(3)
        matrix = np.zeros((3, 3))
        strategy[np.tril_indices(3)] = entries[:6]
        matrix[np.tril_indices(3)] = entries[6:]
        if abs(np.linalg.det(strategy)) < 1e-6:
            return 1e6
        inverse = np.linalg.inv(strategy) * np.linalg.norm(strategy, axis=0).max()
        return squared_error(matrix, signal, 2.0 * inverse @ inverse.T, np.eye(3)) / 3

    identity = np.eye(3)[np.tril_indices(3)]
    result = min(
        optimize.minimize(value, np.concatenate([identity + case, 0.3 * identity])).fun
        for case in (0.0, 0.3, -0.2)
    )
    assert pair.error <= result * (1 + 1e-5)
    assert result <= pair.error * 1.02  # the search came near, so that it could have found better


@pytest.mark.slow
def test_no_search_finds_better_bands():
    rounds = 8
    variance = 2.0
    signal = ar1(rounds)
    pattern = Participation(rounds, 2, 4)
    gram = workload.prefix_sum_gram(rounds)
    pair = filtered.solve(signal, variance, pattern, gram=gram, bands=3, tolerance=1e-9)

    def made(numbers):
        column = np.concatenate([[1.0], numbers, np.zeros(rounds - 3)])
        strategy = linalg.toeplitz(column, np.zeros(rounds))
        return strategy / np.linalg.norm(strategy, axis=0) / np.sqrt(2)

    def value(numbers):
        inverse = np.linalg.inv(made(numbers))
        matrix = filtered.wiener(signal, variance * inverse @ inverse.T, gram=gram)
        return filtered.filtered_error(matrix, made(numbers), signal, variance, pattern, gram=gram)

    optimum = optimize.minimize(value, [0.3, 0.1], method="Nelder-Mead", options={"xatol": 1e-8})
    np.testing.assert_allclose(pair.strategy, made(optimum.x), atol=1e-3)
    assert pair.error == pytest.approx(optimum.fun, rel=1e-5)
    assert pair.lower_bound <= filtered.solve(signal, variance, pattern, gram=gram).error
    single = toeplitz(np.eye(1), pattern, 3)[:, 0]
    assert pair.error < 0.99 * value(single[1:3] / single[0])


def test_white_gradients_are_shrunk_and_their_noise_is_white():
    pair = filtered.solve(3 * np.eye(8), 2.0, Participation(8, 1, 8))
    np.testing.assert_allclose(pair.filter, 0.6 * np.eye(8), atol=1e-6)
    np.testing.assert_allclose(pair.strategy, np.eye(8), atol=1e-6)
    assert pair.error == pytest.approx(1.2, rel=1e-6) and pair.gap < 1e-4


def test_little_noise_leaves_strategy_alone():
    rounds = 8
    variance = 1e-6
    pattern = Participation(rounds, 2, 4)
    gram = workload.prefix_sum_gram(rounds)
    pair = filtered.solve(ar1(rounds), variance, pattern, gram=gram)
    single = temporal.solve(gram, pattern)
    np.testing.assert_allclose(pair.filter, np.eye(rounds), atol=1e-3)
    assert pair.error == pytest.approx(variance * single.value / rounds, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("sums", [False, True])
def test_both_are_better_than_either(sums):
    rounds = 16
    variance = 4.0
    pattern = Participation(rounds, 1, rounds)
    gram = workload.prefix_sum_gram(rounds) if sums else np.eye(rounds)
    signal = ar1(rounds, 0.95)
    none = np.eye(rounds)
    pair = filtered.solve(signal, variance, pattern, gram=gram)
    single = temporal.solve(gram, pattern).strategy
    strategy = filtered.filtered_error(none, single, signal, variance, pattern, gram=gram)
    white = filtered.wiener(signal, variance * none, gram=gram)
    assert pair.errors[0] == pytest.approx(
        filtered.filtered_error(white, none, signal, variance, pattern, gram=gram)
    )
    assert pair.error < 0.9 * min(strategy, pair.errors[0])
