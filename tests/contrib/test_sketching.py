"""Lemma 3.1 by draws, where its noise is enough, what noise reaches, what can be found in it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.accounting import gdp
from dpjax.contrib import sketching
from dpjax.transforms import sketch


def test_lemma_3_1_by_draws():
    """Inside the span k v, in the full dimension d v, and what a sketch misses on top."""
    d = 60
    k = 5
    v = 0.3
    trials = 20_000
    rng = np.random.default_rng(0)
    frame = np.linalg.qr(rng.normal(size=(d, k)))[0]
    loose = rng.normal(size=(d, k)) / np.sqrt(k)
    held = frame @ rng.normal(size=k)
    other = rng.normal(size=d)
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


def test_printed_noise_is_enough_below_one_and_not_above():
    for epsilon in (0.01, 0.5, 0.99):
        for delta in (1e-7, 1e-5, 1e-3):
            noise = sketching.printed_deviation(epsilon, delta, 2.0)
            assert gdp.delta(2.0 / noise, epsilon) <= delta
            assert noise > 2.0 / gdp.mu(epsilon, delta)
    # Of replacement, which moves by 2 C, it is the broken twin.
    assert gdp.delta(4.0 / sketching.printed_deviation(0.5, 1e-5, 2.0), 0.5) > 1e-5
    assert 1.6e-3 < gdp.delta(2 / np.sqrt(2 * np.log(1.25 / 1e-5)), 1.0) < 1.8e-3
    assert 1.6e-3 < gdp.delta(2 / np.sqrt(2 * np.log(1.25 / 1e-5)), 1.0) < 1.8e-3
    printed = np.sqrt(2 * np.log(1.25 / 1e-5)) / 10
    assert 2.2e-5 < gdp.delta(1 / printed, 10.0) < 2.4e-5


LONG = [pytest.param(*size, marks=pytest.mark.slow) for size in ((16, 0.98), (40, 0.95))]


@pytest.mark.parametrize(("k", "forgetting"), [(16, 0.9), *LONG])
def test_noise_alone_reaches_floor(k, forgetting):
    rng = np.random.default_rng(1)
    count = int(20 / (1 - forgetting))
    v = 0.25
    largest = []
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
    distant = sketching.noise_floor(1.0, 8, 0.9, rounds=2000)
    assert sketching.noise_floor(1.0, 8, 0.9) == pytest.approx(distant, rel=1e-9)


def frames(rng, trials, d, k):
    return np.linalg.qr(rng.normal(size=(trials, d, k)))[0]


def listened(rng, d, k, rounds, v, energy, trials, rule):
    """Shares of g explained by its posterior mean, and held by a frame of its own choice."""
    g = np.sqrt(energy / d) * rng.normal(size=(trials, d))
    precision = np.broadcast_to(d / energy * np.eye(d), (trials, d, d)).copy()
    total = np.zeros((trials, d))
    mean = np.zeros((trials, d))
    for t in range(rounds):
        frame = rule(t, mean, precision)
        y = np.einsum("tdk,td->tk", frame, g) + np.sqrt(v) * rng.normal(size=(trials, k))
        precision += frame @ frame.swapaxes(1, 2) / v
        total += np.einsum("tdk,tk->td", frame, y) / v
        mean = np.linalg.solve(precision, total[..., None])[..., 0]
    result = 1 - np.square(g - mean).sum(1) / energy
    best = np.linalg.inv(precision) + mean[:, :, None] * mean[:, None, :]
    best = np.linalg.eigh(best)[1][:, :, -k:]
    held = np.square(np.einsum("tdk,td->tk", best, g)).sum(1) / energy
    return result, held


def average(values):
    return values.mean(), 4 * values.std() / np.sqrt(len(values))


@pytest.mark.parametrize(("k", "rounds"), [(4, 9), (4, 3), (3, 2), (1, 8)])
def test_frames_that_tile_space_find_what_can_be_found(k, rounds):
    d = 12
    v = 0.3
    energy = 4.0
    trials = 6_000
    rng = np.random.default_rng(rounds)

    def tile(t, mean, precision):
        columns = (t * k + np.arange(k)) % d
        return np.broadcast_to(np.eye(d)[:, columns], (trials, d, k))

    result, error = average(listened(rng, d, k, rounds, v, energy, trials, tile)[0])
    assert result == pytest.approx(sketching.findable(energy, v, d, k, rounds), abs=error)
    # Its twins: noise as in the full dimension, and one that forgets it.
    for twin in (sketching.findable(energy, v, d, d, rounds), min(1.0, k * rounds / d)):
        assert result != pytest.approx(twin, abs=2 * error)


def test_no_rule_finds_more_and_frames_hold_k_over_d_beside_it():
    d = 12
    k = 3
    v = 0.4
    energy = 2.0
    trials = 2_000
    rounds = 12
    rng = np.random.default_rng(3)

    def chase(t, mean, precision):
        """What is known of g, and what is known least."""
        rest = np.linalg.eigh(precision)[1][:, :, : k - 1]
        return np.linalg.qr(np.concatenate([mean[:, :, None] + 1e-9, rest], axis=2))[0]

    def least(t, mean, precision):
        return np.linalg.eigh(precision)[1][:, :, :k]

    def fresh(t, mean, precision):
        return frames(rng, trials, d, k)

    limit = sketching.findable(energy, v, d, k, rounds)
    shares = []
    for rule in (chase, least, fresh):
        result, held = listened(rng, d, k, rounds, v, energy, trials, rule)
        shares.append(average(result)[0])
        assert average(result)[0] < limit + average(result)[1]
        assert average(held)[0] < limit + k / d + average(held)[1]
        # The best frame has more than the share found: k / d is no slack.
        assert average(held)[0] > limit
    # Looking where least is known tiles the space, and reaches it: half would be refuted.
    assert shares[1] == pytest.approx(limit, abs=0.02) and max(shares[0], shares[2]) < shares[1]


def test_mean_of_decoded_sketches_finds_nearly_as_much():
    d = 40
    k = 5
    v = 0.05
    energy = 1.0
    rounds = 40
    trials = 400
    rng = np.random.default_rng(5)
    g = np.zeros(d)
    g[0] = np.sqrt(energy)
    total = np.zeros((trials, d))
    for _ in range(rounds):
        frame = frames(rng, trials, d, k)
        y = frame[:, 0] * g[0] + np.sqrt(v) * rng.normal(size=(trials, k))
        total += np.einsum("tdk,tk->td", frame, y)
    cosines = np.square(total[:, 0]) / np.square(total).sum(1)
    stated = 1 / (1 + (d - k) / (k * rounds) + d**2 * v / (k * rounds * energy))
    result, error = average(cosines)
    assert result == pytest.approx(stated, abs=error + 0.01)
    assert result < sketching.findable(energy, v, d, k, rounds)


def test_several_directions_are_no_easier():
    """g_t = U a_t, every a_t known: still below one direction of the same mean energy."""
    d = 8
    k = 2
    v = 0.2
    rounds = 8
    trials = 2_000
    rank = 2
    rng = np.random.default_rng(7)
    a = rng.normal(size=(rounds, rank)) * np.array([1.5, 0.7])
    energy = np.square(a).sum(1).mean()
    truth = rng.normal(size=(trials, rank * d)) / np.sqrt(d)
    precision = np.broadcast_to(d * np.eye(rank * d), (trials, rank * d, rank * d)).copy()
    total = np.zeros((trials, rank * d))
    for t in range(rounds):
        frame = frames(rng, 1, d, k)[0] if t % 2 else np.eye(d)[:, (t * k + np.arange(k)) % d]
        observed = np.kron(a[t], frame.T)
        y = truth @ observed.T + np.sqrt(v) * rng.normal(size=(trials, k))
        precision += observed.T @ observed / v
        total += y @ observed / v
    missed = truth - np.linalg.solve(precision, total[..., None])[..., 0]
    weights = a.T @ a / rounds
    pair = missed.reshape(trials, rank, d)
    result = 1 - np.einsum("tid,ij,tjd->t", pair, weights, pair) / energy
    assert average(result)[0] + average(result)[1] < sketching.findable(energy, v, d, k, rounds)
    # Each by itself finds more than nothing: the smaller one is what makes the difference.
    assert average(result)[0] > 0.5 * sketching.findable(energy, v, d, k, rounds)


def test_rounds_to_find_turns_findable_round():
    for v in (0.0, 0.2, 5.0):
        for share in (0.01, 0.3, 0.9):
            rounds = sketching.rounds_to_find(share, 0.5, v, 50, 7)
            assert sketching.findable(0.5, v, 50, 7, rounds) >= share - 1e-12
            assert rounds == 1 or sketching.findable(0.5, v, 50, 7, rounds - 1) < share
    # d / k times the full dimension's, where noise hides the direction.
    complete = sketching.rounds_to_find(0.5, 0.01, 1.0, 1000, 1000)
    assert sketching.rounds_to_find(0.5, 0.01, 1.0, 1000, 10) == 100 * complete


@pytest.mark.slow
def test_dome_s_own_loop_finds_no_more():
    d = 60
    k = 8
    v = 0.05
    rounds = 40
    runs = 200

    def one(key):
        keys = jax.random.split(key, 3)
        g = jax.random.normal(keys[0], (d,), jnp.float32) / jnp.sqrt(jnp.float32(d))
        state = sketch.start(d, k, keys[1])

        def step(state, key):
            total = jnp.sum(jnp.square(state.frame.T @ g))
            mask, probe = jax.random.split(key)
            z = jnp.sqrt(jnp.float32(v)) * jax.random.normal(mask, (k,), jnp.float32)
            return sketch.update(state, state.frame @ (state.frame.T @ g + z), probe), total

        return jax.lax.scan(step, state, jax.random.split(keys[2], rounds))[1]

    held = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), runs)))
    for t in (0, 10, 39):
        mean, error = average(held[:, t].astype(np.float64))
        limit = k / d + (sketching.findable(1.0, v, d, k, t) if t else 0.0)
        assert mean < limit + error
    # It learns: more than a random frame of as many columns holds.
    assert held[:, -1].mean() > 1.5 * k / d


def test_refusals():
    for invalid in ((1.0, 3, 1.0), (1.0, 3, 1.1, 5), (0.0, 3, 0.9)):
        with pytest.raises(ValueError):
            sketching.noise_floor(*invalid)
