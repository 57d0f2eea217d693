"""Stated lower bounds against infima that are known, and against the dual in fifty digits."""

import mpmath
import numpy as np
import pytest
import scipy.linalg

from dpjax.contrib import joint
from dpjax.mechanism import certificate, factorization, temporal
from dpjax.mechanism.participation import Participation
from dpjax.topology import graphs, mixing


def blocks(seed):
    """A gram of rank-one blocks of any scale: its infimum is the sum of their largest squares."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 6, 4)
    gram = np.zeros((sizes.sum(),) * 2)
    infimum = mpmath.mpf(0)
    first = 0
    for size in sizes:
        # Few digits: the products are exact.
        vector = random.integers(-(2**20), 2**20, size) * 2.0 ** random.integers(-20, 20)
        gram[first : first + size, first : first + size] = np.outer(vector, vector)
        infimum += mpmath.mpf(float(np.abs(vector).max())) ** 2
        first += size
    return gram, infimum


def dual(gram, multipliers):
    """tr((L^1/2 M L^1/2)^1/2)^2 / sum(l) in fifty digits."""
    with mpmath.workdps(50):
        roots = mpmath.diag([mpmath.sqrt(mpmath.mpf(float(x))) for x in multipliers])
        values = mpmath.eigsy(roots * mpmath.matrix(gram.tolist()) * roots, eigvals_only=True)
        total = mpmath.fsum(mpmath.sqrt(abs(x)) for x in values)
        return total**2 / mpmath.fsum(mpmath.mpf(float(x)) for x in multipliers)


@pytest.mark.parametrize("n", [2, 10, pytest.param(100, marks=pytest.mark.slow)])
def test_of_one_average(n):
    """11': the infimum is 1, and rounding alone made eigenvalues of 1e-16 whose roots add up."""
    gram = np.ones((n, n))
    optimum = factorization.minimize_trace(gram=gram)
    assert 1 - 1e-9 <= optimum.lower_bound <= 1
    assert optimum.value >= 1
    # The broken twin: singular values of a factor that was computed.
    factor = factorization.factor_of(gram) * np.sqrt(optimum.multipliers)
    twin = np.linalg.svd(factor, compute_uv=False).sum() ** 2 / optimum.multipliers.sum()
    assert n < 100 or twin > 1 + 1e-8


@pytest.mark.parametrize("seed", range(6))
def test_of_rank_one_blocks_of_any_scale(seed):
    gram, infimum = blocks(seed)
    optimum = factorization.minimize_trace(gram=gram)
    assert optimum.lower_bound <= infimum
    assert optimum.lower_bound >= infimum * (1 - mpmath.mpf("1e-6"))


@pytest.mark.parametrize("seed", range(6))
def test_of_any_multipliers(seed):
    """Below the exact dual, and within 1e-9 of it where the matrix is well conditioned."""
    random = np.random.default_rng(seed)
    root = random.normal(size=(8, 8)) * 10.0 ** (seed - 3)
    if seed > 3:
        root[:, 5:] = root[:, :3]
    gram = root.T @ root
    drawn = random.uniform(0.1, 1, 8)
    for bound, exact in (
        (certificate.lower_bound(drawn, gram=gram)[0], dual(gram, drawn)),
        (certificate.lower_bound(drawn, factor=root)[0], dual_of_factor(root, drawn)),
    ):
        assert bound <= exact
        assert seed > 3 or bound >= exact * (1 - mpmath.mpf("1e-9"))


def dual_of_factor(factor, multipliers):
    with mpmath.workdps(50):
        matrix = mpmath.matrix(factor.tolist())
        square = matrix.T * matrix
        roots = mpmath.diag([mpmath.sqrt(mpmath.mpf(float(x))) for x in multipliers])
        values = mpmath.eigsy(roots * square * roots, eigvals_only=True)
        total = mpmath.fsum(mpmath.sqrt(abs(x)) for x in values)
        return total**2 / mpmath.fsum(mpmath.mpf(float(x)) for x in multipliers)


@pytest.mark.parametrize("epochs", [1, 2])
def test_unrestricted_over_agents_and_rounds(epochs):
    """On a complete graph all agents are one: the infimum is that over rounds, by n."""
    n = 6
    rounds = 4
    participation = Participation(rounds, epochs, rounds // epochs)
    matrix = mixing.metropolis_hastings(graphs.complete(n))
    complete = np.tri(rounds)
    infimum = temporal.solve(complete.T @ complete, participation).value / n
    bound = joint.unrestricted_bound(matrix, participation).lower_bound
    assert bound <= infimum
    assert bound >= infimum * (1 - 1e-6)


@pytest.mark.parametrize("epochs", [1, 2])
def test_over_rounds_that_are_all_alike(epochs):
    """H = 11': only the sum over all rounds is wanted, which a record in k of them moves by k."""
    rounds = 20
    participation = Participation(rounds, epochs, rounds // epochs)
    solution = temporal.solve(np.ones((rounds, rounds)), participation)
    assert (1 - 1e-6) * epochs**2 <= solution.lower_bound <= epochs**2 <= solution.value


@pytest.mark.parametrize("seed", range(3))
def test_of_known_eigenvectors(seed):
    """Below the trace in fifty digits, and near it; eigenvalues that are off do not raise it."""
    random = np.random.default_rng(seed)
    gram = np.tri(8).T @ np.tri(8) + np.diag(random.uniform(0, 1, 8))
    half = random.normal(size=(4, 2, 2))
    half = half @ half.transpose(0, 2, 1) + 0.1 * np.eye(2)
    complete = scipy.linalg.block_diag(*half)
    with mpmath.workdps(50):
        product = mpmath.matrix(complete.T.tolist()) * mpmath.matrix(gram.tolist())
        values = mpmath.eigsy(product * mpmath.matrix(complete.tolist()), eigvals_only=True)
        exact = mpmath.fsum(mpmath.sqrt(value) for value in values)
    factor = np.linalg.cholesky(gram).T
    squares, left = np.linalg.eigh(factor @ complete @ complete.T @ factor.T)
    bound = certificate.factored_root_trace(factor, half, left, np.sqrt(squares))
    assert exact * (1 - mpmath.mpf("1e-9")) <= bound <= exact
    for invalid in (1 + 1e-6, 1.1, 3.0):
        off = certificate.factored_root_trace(factor, half, left, invalid * np.sqrt(squares))
        assert off <= exact
        turned = certificate.factored_root_trace(factor, half, invalid * left, np.sqrt(squares))
        assert turned <= exact


def test_products_of_halves_are_exact():
    random = np.random.default_rng(0)
    left = random.normal(size=(40, 30))
    right = random.normal(size=(30, 50))
    left *= 10.0 ** random.uniform(-9, 9, (40, 1))
    high, low, off = certificate._product(left, right)
    with mpmath.workdps(40):
        exact = mpmath.matrix(left.tolist()) * mpmath.matrix(right.tolist())
        faults = [
            exact[i, j] - mpmath.mpf(high[i, j]) - mpmath.mpf(low[i, j])
            for i in range(40)
            for j in range(50)
        ]
        assert mpmath.sqrt(mpmath.fsum(w**2 for w in faults)) <= off
    assert off < 1e-5 * 40 * np.finfo(float).eps * np.linalg.norm(left) * np.linalg.norm(right)
