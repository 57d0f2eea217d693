"""Noise over rounds in a moving frame: covariances by draws, losses by dense oracles."""

import jax.numpy as jnp
import numpy as np
import pytest

import _moving as moving
from dpjax.transforms import sketch

T = 5
D = 12
K = 3


def frames(rounds, d, k, step, seed=0):
    """Frames [T, d, k] that turn at random, each a basis of its own."""
    rng = np.random.default_rng(seed)
    current = rng.normal(size=(d, k))
    results = []
    for _ in range(rounds):
        current = np.linalg.qr(current + step * rng.normal(size=(d, k)))[0]
        results.append(current @ np.linalg.qr(rng.normal(size=(k, k)))[0])
    return np.stack(results)


def banded(rounds, *entries):
    return sum(entry * np.eye(rounds, k=-lag) for lag, entry in enumerate(entries))


STRATEGIES = {
    "taken back": np.tril(np.ones((T, T))),
    "bands": banded(T, 1.0, 0.6),
    "prefix sums": banded(T, 1.0, 1 / 2, 3 / 8, 5 / 16, 35 / 128),
}


def drawn(strategy, value, draws, trials, rng):
    """Decoded noise [trials, T, d], round by round as the module says it, by hand."""
    inverse = np.linalg.inv(strategy)
    turned = [np.eye(K)]
    for before, current in zip(value[:-1], value[1:], strict=True):
        u, _, v = np.linalg.svd((before @ turned[-1]).T @ current)
        turned.append((u @ v).T)
    z = rng.normal(size=(trials, T, K))
    w = rng.normal(size=(trials, T, D))
    out = np.zeros((trials, T, D))
    for t in range(T):
        for r in range(t + 1):
            single = {
                "coordinates": lambda r=r: z[:, r],
                "aligned": lambda t=t, r=r: z[:, r] @ turned[t].T,
                "frame": lambda t=t, r=r: z[:, r] @ value[r].T @ value[t],
                "ambient": lambda t=t, r=r: w[:, r] @ value[t],
            }[draws]()
            out[:, t] += inverse[t, r] * single @ value[t].T
    return out


@pytest.mark.slow
@pytest.mark.parametrize("draws", moving.DRAWS)
def test_running_sum_s_covariance_is_that_of_draws(draws):
    """In every direction and round, and not at 1.5 times it."""
    argument = frames(T, D, K, 0.3)
    trials = 20_000
    for name, strategy in STRATEGIES.items():
        sums = drawn(strategy, argument, draws, trials, np.random.default_rng(1)).cumsum(axis=1)
        stated = moving.running(strategy, argument, draws)
        for t in (1, T - 1):
            result = sums[:, t].T @ sums[:, t] / trials
            error = 5 * np.trace(stated[t]) / np.sqrt(trials)
            assert np.linalg.norm(result - stated[t]) < error, name
            assert np.linalg.norm(result - 1.5 * stated[t]) > error, name


def whitened(strategy, value, moves, draws):
    """The Gaussian loss from the covariance of all that is released, [T k, T k]."""
    inverse = np.linalg.inv(strategy)
    sent = []
    for t in range(len(value)):
        if draws == "ambient":
            sent.append(np.hstack([inverse[t, r] * value[t].T for r in range(len(value))]))
        else:
            sent.append(
                np.hstack([inverse[t, r] * value[t].T @ value[r] for r in range(len(value))])
            )
    joint = np.vstack(sent)
    vector = moves.ravel()
    return np.sqrt(vector @ np.linalg.solve(joint @ joint.T, vector))


def worst(strategy, value, members, draws, seed=0):
    """The largest loss found over unit moves in the rounds of a participation."""
    rng, (rounds, _, k) = np.random.default_rng(seed), value.shape
    # The loss is a quadratic form of the moves: its matrix from unit moves, then ascent by round.
    units = np.zeros((rounds * k, rounds, k))
    places = [t * k + i for t in members for i in range(k)]
    for place in places:
        units[place, place // k, place % k] = 1
    single = {place: moving.loss(strategy, value, units[place], draws) ** 2 for place in places}
    form = np.zeros((len(places), len(places)))
    for i, p in enumerate(places):
        for j, q in enumerate(places[:i]):
            pair = moving.loss(strategy, value, units[p] + units[q], draws) ** 2
            form[i, j] = form[j, i] = (pair - single[p] - single[q]) / 2
        form[i, i] = single[p]
    best = 0.0
    for _ in range(3):
        moves = rng.normal(size=(len(members), k))
        for _ in range(60):
            # A move that makes no loss is zero on some processors, and almost so on others.
            moves /= np.maximum(np.linalg.norm(moves, axis=1, keepdims=True), 1e-300)
            moves = (form @ moves.ravel()).reshape(moves.shape)
        moves /= np.maximum(np.linalg.norm(moves, axis=1, keepdims=True), 1e-300)
        best = max(best, float(moves.ravel() @ form @ moves.ravel()))
    return np.sqrt(best)


def sensitivity(strategy, members):
    """Of vectors as long as 1 in these rounds, by all signs: here columns' products have none."""
    columns = strategy[:, list(members)]
    return np.sqrt(np.abs(columns.T @ columns).sum())


def test_losses_are_those_of_all_that_is_released():
    argument = frames(T, D, K, 0.5)
    moves = np.random.default_rng(2).normal(size=(T, K))
    for strategy in STRATEGIES.values():
        for draws in ("frame", "ambient"):
            stated = moving.loss(strategy, argument, moves, draws)
            assert stated == pytest.approx(whitened(strategy, argument, moves, draws), rel=1e-8)
        turned = np.einsum("tij,ti->tj", moving.turns(argument), moves)
        for draws, vectors in (("coordinates", moves), ("aligned", turned)):
            plain = np.linalg.norm(strategy @ vectors)
            assert moving.loss(strategy, argument, moves, draws) == pytest.approx(plain, rel=1e-9)


def away_and_back(angle, k=1):
    """Three frames: the second turned by an angle, the third the first."""
    d = 2 * k
    first = np.eye(d)[:, :k]
    other = np.eye(d)[:, k:]
    return np.stack([first, np.cos(angle) * first + np.sin(angle) * other, first])


@pytest.mark.parametrize("draws", ["coordinates", "aligned", "ambient"])
def test_three_ways_keep_strategy_s_guarantee(draws):
    """Whatever the frames, for every participation tried."""
    cases = [frames(T, D, K, step, seed) for step in (0.1, 1.0) for seed in (0, 1)]
    for case in cases:
        for strategy in (STRATEGIES["bands"], STRATEGIES["prefix sums"]):
            for members in ((0,), (0, 2), (0, 2, 4)):
                bound = sensitivity(strategy, members)
                assert worst(strategy, case, members, draws) <= bound * (1 + 1e-9)
    strategy = banded(3, 1.0, 0.5)
    for angle in (0.3, 1.0, np.pi / 2):
        case = away_and_back(angle)
        assert worst(strategy, case, (0, 2), draws) <= sensitivity(strategy, (0, 2)) * (1 + 1e-9)


@pytest.mark.mutant
def test_noise_drawn_in_frames_alone_loses_more():
    """The twin: bands as wide as rounds are apart, and a frame that turns away and back."""
    for entry, factor in ((0.5, 1.067), (1.0, 1.29)):
        strategy = banded(3, 1.0, entry)
        bound = sensitivity(strategy, (0, 2))
        # The third column has no row below it: a unit's last round moves nothing later.
        assert bound == pytest.approx(np.sqrt(2 + entry**2))
        result = worst(strategy, away_and_back(np.pi / 2), (0, 2), "frame")
        assert result == pytest.approx(np.sqrt(1 + (1 + entry**2) ** 2))
        assert result / bound == pytest.approx(factor, rel=5e-3)
        assert worst(strategy, away_and_back(0.0), (0, 2), "frame") == pytest.approx(bound)


def test_aligned_noise_cancels_where_coordinates_do_not():
    """A frame that stays but for its basis: all of it against none; and principal angles."""
    strategy = STRATEGIES["taken back"]
    still = np.eye(D)[:, :K]
    rng = np.random.default_rng(5)
    values = np.stack([still @ np.linalg.qr(rng.normal(size=(K, K)))[0] for _ in range(T)])

    def left(value, draws):
        return np.trace(moving.running(strategy, value, draws)[-1])

    for draws in ("aligned", "frame", "ambient"):
        assert left(values, draws) == pytest.approx(K)
    assert left(values, "coordinates") > 3 * K
    turning = frames(T, D, K, 0.2, seed=3)
    cosines = [
        np.linalg.svd(a.T @ b, compute_uv=False)
        for a, b in zip(turning[:-1], turning[1:], strict=True)
    ]
    first = K + sum(2 * (1 - c).sum() for c in cosines)
    other = K + sum(2 * (1 - c**2).sum() for c in cosines)
    assert left(turning, "aligned") == pytest.approx(first)
    assert left(turning, "ambient") == pytest.approx(other) and first < other
    # No other rotations do better than Procrustes'.
    for seed in range(3):
        other_turns = [np.linalg.qr(np.random.default_rng(seed).normal(size=(K, K)))[0]] * T
        tried = np.stack([s @ q for s, q in zip(turning, other_turns, strict=True)])
        assert left(tried, "coordinates") >= first


def test_what_runs_online_is_same_rotation():
    argument = frames(T, D, K, 0.4)
    stated = np.einsum("tdi,tij->tdj", argument, moving.turns(argument))
    before = jnp.asarray(argument[0], jnp.float32)
    for columns, expected in zip(argument, stated, strict=True):
        before = sketch.aligned(jnp.asarray(columns, jnp.float32), before)
        assert before.dtype == jnp.float32
        np.testing.assert_allclose(before, expected, atol=1e-5)
