"""Lemma 3.1 by draws, where its noise is enough, and the weight that noise alone reaches."""

import numpy as np
import pytest

from dpjax.accounting import gdp
from dpjax.mechanism import sketching


def test_lemma_3_1_by_draws():
    """Inside the span k v, in the full dimension d v, and what a sketch misses on top."""
    d, k, v, trials = 60, 5, 0.3, 20_000
    rng = np.random.default_rng(0)
    frame = np.linalg.qr(rng.normal(size=(d, k)))[0]
    loose = rng.normal(size=(d, k)) / np.sqrt(k)
    held, other = frame @ rng.normal(size=k), rng.normal(size=d)
    noise = np.sqrt(v) * rng.normal(size=(trials, d))

    def drawn(matrix, gradient):
        decoded = (gradient @ matrix + noise[:, : matrix.shape[1]]) @ matrix.T
        squares = ((decoded - gradient) ** 2).sum(axis=1)
        return squares.mean(), 5 * squares.std() / np.sqrt(trials)

    def holds(stated, matrix, gradient):
        mean, error = drawn(matrix, gradient)
        return abs(mean - stated) < error

    cases = [
        (sketching.mean_square_error(v, k), frame, held),
        (sketching.mean_square_error(v, frame), frame, held),
        (sketching.mean_square_error(v, d), np.eye(d), other),
        (sketching.mean_square_error(v, frame, other), frame, other),
        (sketching.mean_square_error(v, loose, other), loose, other),
    ]
    for stated, matrix, gradient in cases:
        assert holds(stated, matrix, gradient)
        assert not holds(1.5 * stated, matrix, gradient)
    # As printed, k v, only where the sketch holds the gradient.
    assert not holds(sketching.mean_square_error(v, k), frame, other)


def test_the_printed_noise_is_enough_below_one_and_not_above():
    for epsilon in (0.01, 0.5, 0.99):
        for delta in (1e-7, 1e-5, 1e-3):
            noise = sketching.printed_deviation(epsilon, delta, 2.0)
            assert gdp.delta(2.0 / noise, epsilon) <= delta
            assert noise > 2.0 / gdp.mu(epsilon, delta)
    # Of replacement, which moves by 2 C, it is the broken twin.
    assert gdp.delta(4.0 / sketching.printed_deviation(0.5, 1e-5, 2.0), 0.5) > 1e-5
    printed = np.sqrt(2 * np.log(1.25 / 1e-5)) / 10
    assert 2.2e-5 < gdp.delta(1 / printed, 10.0) < 2.4e-5


@pytest.mark.parametrize(("k", "forgetting"), [(16, 0.9), (16, 0.98), (40, 0.95)])
def test_noise_alone_reaches_the_floor(k, forgetting):
    rng = np.random.default_rng(1)
    count, v, largest = int(20 / (1 - forgetting)), 0.25, []
    weights = forgetting ** (np.arange(count) / 2)
    for _ in range(300):
        z = np.sqrt(v) * weights[:, None] * rng.normal(size=(count, k))
        largest.append(np.linalg.norm(z, 2) ** 2)
    floor = sketching.noise_floor(v, k, forgetting)
    assert 0.8 < np.mean(largest) / floor < 1.0
    assert np.mean(np.array(largest) > floor) < 0.25
    assert np.mean(np.array(largest) > 1.3 * floor) < 0.05
    # Its naive twin, the mean weight of a direction, is passed in every round.
    assert np.min(largest) > v / (1 - forgetting)


def test_without_forgetting_it_is_marchenko_and_pastur_s_edge():
    for rounds, k in ((1, 1), (100, 9), (25, 100)):
        edge = (np.sqrt(rounds) + np.sqrt(k)) ** 2
        assert sketching.noise_floor(2.0, k, 1.0, rounds) == pytest.approx(2 * edge, rel=1e-6)
    far = sketching.noise_floor(1.0, 8, 0.9, rounds=2000)
    assert sketching.noise_floor(1.0, 8, 0.9) == pytest.approx(far, rel=1e-9)


def test_refusals():
    for wrong in (
        lambda: sketching.mean_square_error(-1.0, 3),
        lambda: sketching.mean_square_error(1.0, 0),
        lambda: sketching.mean_square_error(1.0, 3, np.ones(3)),
        lambda: sketching.mean_square_error(1.0, np.eye(3), np.ones(4)),
        lambda: sketching.printed_deviation(1.0, 1e-5, 1.0),
        lambda: sketching.printed_deviation(0.5, 0.0, 1.0),
        lambda: sketching.noise_floor(1.0, 3, 1.0),
        lambda: sketching.noise_floor(1.0, 3, 1.1, 5),
        lambda: sketching.noise_floor(0.0, 3, 0.9),
    ):
        with pytest.raises(ValueError):
            wrong()
