"""The sketch: exact against dense oracles, orthonormal for long, and what its parts are for."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax._numerics import double_precision
from dpjax.contrib import replica
from dpjax.transforms import sketch

ROOT = Path(__file__).resolve().parents[2]
F32 = np.float32


def directions(d, rank, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(d, rank)))[0]


def stream(rounds, d, rank, seed=0, dtype=F32, spectrum=None):
    """Gradients [T, d] of a fixed space, and its basis."""
    truth = directions(d, rank, seed)
    spectrum = np.ones(rank) if spectrum is None else np.asarray(spectrum)
    numbers = np.random.default_rng(seed + 1).normal(size=(rounds, rank)) * spectrum
    return (numbers @ truth.T).astype(dtype), truth


start = jax.jit(sketch.start, static_argnums=(0, 1, 3))
NUMBERS = ("forgetting", "share", "probes", "as_published")
update = jax.jit(sketch.update, static_argnames=NUMBERS)


@jax.jit
def scanned(first, gradients, key):
    def step(state, value):
        round, gradient = value
        return sketch.update(state, gradient, jax.random.fold_in(key, round)), None

    rounds = jnp.arange(len(gradients), dtype=jnp.int32)
    return jax.lax.scan(step, first, (rounds, gradients))[0]


def run(gradients, k, seed=0, first=None, **options):
    """Round by round, so that streams of any length are one program."""
    d = gradients.shape[1]
    key = jax.random.key(seed + 1)
    options = {"forgetting": 0.95, "share": 0.99} | options
    state = start(d, k, jax.random.key(seed), gradients.dtype) if first is None else first
    for round, gradient in enumerate(gradients):
        state = update(state, gradient, jax.random.fold_in(key, round), **options)
    return state


def off(columns):
    """How far from orthonormal, the largest entry."""
    columns = np.asarray(columns, np.float64)
    return np.abs(columns.T @ columns - np.eye(columns.shape[1])).max()


def angle(basis, truth):
    basis, _ = np.linalg.qr(np.asarray(basis, np.float64))
    missed = truth - basis @ (basis.T @ truth)
    return float(np.arcsin(min(1.0, np.linalg.norm(missed, 2))))


def covariance(gradients, forgetting):
    gradients = np.asarray(gradients, np.float64)
    ages = np.arange(len(gradients))[::-1]
    return (gradients * (forgetting**ages)[:, None]).T @ gradients


@pytest.mark.x64
@pytest.mark.parametrize(("forgetting", "dtype"), [(1.0, F32), (0.9, np.float64)])
def test_it_is_dense_decomposition_where_rank_is_low(forgetting, dtype):
    with double_precision():
        gradients, truth = stream(300, 100, 5, dtype=dtype, spectrum=[3, 2, 1, 0.5, 0.2])
        result = run(gradients, 8, forgetting=forgetting)
    values, vectors = np.linalg.eigh(covariance(gradients, forgetting))
    digits = 1e-5 if dtype == F32 else 1e-12
    np.testing.assert_allclose(
        result.weights, np.maximum(values[:-9:-1], 0), atol=digits * values[-1]
    )
    assert result.basis.dtype == result.frame.dtype == result.weights.dtype == dtype
    assert angle(result.basis[:, :5], truth) < 1e3 * digits
    for column, vector in zip(np.asarray(result.basis).T[:5], vectors.T[:-6:-1], strict=True):
        assert abs(column @ vector) > 1 - 1e2 * digits
    assert max(off(result.basis), off(result.frame)) < digits


@pytest.mark.slow
def test_what_is_cut_off_at_full_rank_is_little():
    """Weights are at most the dense ones, and leading directions those of the stream."""
    gradients, _ = stream(400, 40, 40, spectrum=0.6 ** np.arange(40))
    result = run(gradients, 10, forgetting=0.95)
    values, vectors = np.linalg.eigh(covariance(gradients, 0.95))
    assert (np.asarray(result.weights) <= values[:-11:-1] * (1 + 1e-4) + 1e-4 * values[-1]).all()
    assert angle(result.basis, vectors[:, :-4:-1]) < 1e-2


@pytest.mark.slow
def test_it_is_scikit_learns_incremental_pca():
    """Both given every gradient and its opposite: the mean is 0, which their method takes off."""
    from sklearn.decomposition import IncrementalPCA

    gradients, truth = stream(240, 50, 6, spectrum=[3, 2.5, 2, 1.5, 1, 0.5])
    peer = IncrementalPCA(n_components=8)
    for batch in gradients.astype(np.float64).reshape(-1, 8, 50):
        peer.partial_fit(np.concatenate([batch, -batch]))
    result = run(gradients, 8, forgetting=1.0)
    np.testing.assert_allclose(result.weights[:6], peer.singular_values_[:6] ** 2 / 2, rtol=1e-4)
    assert angle(result.basis[:, :6], peer.components_[:6].T) < 1e-3
    assert angle(result.basis[:, :6], truth) < 1e-3


@pytest.mark.slow
def test_it_finds_space_in_noise_and_follows_one_that_turns():
    rng = np.random.default_rng(3)
    gradients, truth = stream(400, 500, 3)
    noisy = gradients + (1e-4 * rng.normal(size=gradients.shape)).astype(F32)
    assert angle(run(noisy, 8).basis[:, :3], truth) < 1e-2
    # A plane that turns by 1e-3 a round towards another one: seen as it was some rounds before.
    pair = directions(200, 4)
    turns = 1e-3 * np.arange(600)[:, None, None]
    planes = np.cos(turns) * pair[:, :2] + np.sin(turns) * pair[:, 2:]
    turning = np.einsum("tdr,tr->td", planes, rng.normal(size=(600, 2))).astype(F32)
    followed = run(turning, 6, forgetting=0.9)
    assert angle(followed.basis[:, :2], planes[-1]) < 3e-2
    # Nothing forgotten is the broken twin: it holds the mean of all planes so far.
    assert angle(run(turning, 6, forgetting=1.0).basis[:, :2], planes[-1]) > 0.2


def drifts(rounds, d=300, k=6):
    """Distance from orthonormal after rounds in float32, of three directions that stay."""
    first = start(d, k, jax.random.key(0), jnp.float32)
    truth = jnp.asarray(directions(d, 3), jnp.float32)

    @jax.jit
    def long(state):
        def step(state, round):
            key = jax.random.fold_in(jax.random.key(1), round)
            numbers = jax.random.normal(jax.random.fold_in(key, 1), (3,), jnp.float32)
            return sketch.update(state, truth @ numbers, jax.random.fold_in(key, 2)), None

        return jax.lax.scan(step, state, jnp.arange(rounds, dtype=jnp.int32))[0]

    result = long(first)
    return max(off(result.basis), off(result.frame))


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_float32_columns_stay_orthonormal(rounds):
    assert drifts(rounds) < 1e-5
    assert drifts(rounds, d=40) < 1e-5  # close to k: by QR


def test_without_correcting_step_columns_drift(monkeypatch):
    monkeypatch.setattr(sketch, "_polished", lambda rows: rows)
    assert drifts(1000) > 1e-5


@pytest.mark.slow
def test_cut_keeps_share_of_what_was_seen():
    gradients, _ = stream(200, 100, 6, spectrum=[4, 3, 2, 1, 0.5, 0.1])
    for share in (0.5, 0.8, 0.99):
        result = run(gradients, 10, share=share, forgetting=0.9)
        observed = covariance(gradients, 0.9)
        kept = np.asarray(result.frame)[:, : int(result.kept)].astype(np.float64)
        assert np.trace(kept.T @ observed @ kept) >= (share - 1e-4) * np.trace(observed)
        fewer = kept[:, :-1]
        assert np.trace(fewer.T @ observed @ fewer) < share * np.trace(observed)
    # At most k - p of them, whatever the share.
    assert int(run(gradients, 6, share=1.0, probes=4).kept) == 2


def test_cut_without_order_loses_energy(monkeypatch):
    gradients, _ = stream(200, 100, 6, spectrum=[4, 3, 2, 1, 0.5, 0.1])
    observed = covariance(gradients, 0.9)
    exact = sketch._rank_one

    def energy(**options):
        result = run(gradients, 8, forgetting=0.9, **options)
        kept = np.asarray(result.frame)[:, : min(int(result.kept), 4)].astype(np.float64)
        return np.trace(kept.T @ observed @ kept) / np.trace(observed)

    def unordered(state, gradient, forgetting):
        rows, weights = exact(state, gradient, forgetting)
        order = jnp.argsort(weights)
        return rows[order], weights[order]

    assert energy(share=0.9) > 0.9 - 1e-4
    monkeypatch.setattr(sketch, "_rank_one", unordered)
    # Compiled anew: what is compiled is kept by its function.
    again = jax.jit(
        lambda *subject, **value: sketch.update(*subject, **value), static_argnames=NUMBERS
    )
    monkeypatch.setitem(globals(), "update", again)
    assert energy(share=0.9) < 0.9


def test_paper_s_lines_by_name():
    """One round by NumPy; weights that the first round gives to invented directions."""
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(3, 30)).astype(F32)
    result = run(gradients[:1], 4, as_published=True, share=0.9)
    coordinates = gradients[0] @ np.asarray(sketch.start(30, 4, jax.random.key(0)).frame)
    length = np.linalg.norm(gradients[0])
    np.testing.assert_allclose(result.weights, length * np.abs(coordinates), rtol=1e-5)
    assert angle(result.basis[:, :1], gradients[:1].T / length) < 1e-3
    second = run(gradients[1:2], 4, seed=5, first=result, as_published=True, share=0.9)
    basis = np.asarray(result.basis, float)
    weights = np.asarray(result.weights, float)
    y = basis * weights + np.outer(gradients[1], gradients[1] @ basis)
    np.testing.assert_allclose(second.weights, np.linalg.norm(y, axis=0), rtol=1e-5)
    assert angle(second.basis, np.linalg.qr(y)[0]) < 1e-3
    squares = np.asarray(second.weights, float) ** 2
    r = int(second.kept)
    assert squares[:r].sum() >= 0.9 * squares.sum() > squares[: r - 1].sum()
    assert off(second.frame) < 1e-5
    np.testing.assert_array_equal(second.frame[:, :r], second.basis[:, :r])


def missed(rounds, d=60, k=8, noise=1e-3, **options):
    """Energy of a fixed space outside the frame, by round, where only S (S' g + z) is seen."""
    truth = jnp.asarray(directions(d, 2), jnp.float32)

    @jax.jit
    def loop(state):
        def step(state, round):
            key = jax.random.fold_in(jax.random.key(1), round)
            numbers = jax.random.normal(jax.random.fold_in(key, 1), (2,), jnp.float32)
            z = noise * jax.random.normal(jax.random.fold_in(key, 2), (k,), jnp.float32)
            inside = state.frame.T @ truth
            new = sketch.update(state, state.frame @ (inside @ numbers + z), key, **options)
            return new, 1 - jnp.sum(jnp.square(inside)) / 2

        return jax.lax.scan(step, state, jnp.arange(rounds, dtype=jnp.int32))[1]

    return np.asarray(loop(sketch.start(d, k, jax.random.key(0))))


@pytest.mark.slow
def test_in_its_own_loop_it_learns_by_probes_and_by_forgetting():
    learned = missed(600, forgetting=0.9)
    assert learned[0] > 0.7 and learned[-100:].mean() < 1e-3
    # Everything kept: no probe is left, and nothing outside the first frame is ever seen.
    closed = missed(600, probes=0, share=1.0)
    assert closed[-1] > 0.5 and abs(closed[-1] - closed[20]) < 1e-4
    # Nothing forgotten: what entered wrong stays.
    assert missed(600, forgetting=1.0)[-100:].mean() > 10 * learned[-100:].mean()


def test_frames_hold_what_is_kept_and_then_new_probes():
    gradients, truth = stream(100, 100, 3)
    before = run(gradients, 10)
    after = [run(gradients[:1], 10, seed=s, first=before) for s in (1, 2)]
    for new in after:
        assert int(new.kept) == 3 and off(new.frame) < 1e-5
        np.testing.assert_array_equal(new.frame[:, :3], new.basis[:, :3])
        assert angle(new.basis[:, :3], truth) < 1e-3
    probes = [np.asarray(new.frame[:, 3:]) for new in after]
    assert np.abs(probes[0].T @ probes[1]).max() < 0.5  # independent ones: about 1 / sqrt(d)
    np.testing.assert_array_equal(after[0].basis, after[1].basis)


@pytest.mark.slow
def test_probes_are_as_likely_in_every_direction():
    """The mean of Q Q' over keys is that of the complement; scaled by 1.5 it would be seen."""
    first = sketch.start(12, 4, jax.random.key(0))
    step = functools.partial(sketch.update, probes=3)
    reference = step(first, jnp.eye(12, dtype=jnp.float32)[0], jax.random.key(1))
    keys = jax.random.split(jax.random.key(2), 4000)
    again = jax.vmap(lambda key: step(reference, jnp.zeros(12, jnp.float32), key))(keys)
    probes = np.asarray(again.frame[:, :, 1:], np.float64)
    mean = np.einsum("ndk,nek->de", probes, probes) / len(probes)
    expected = np.diag([0.0] + [3 / 11] * 11)
    np.testing.assert_allclose(mean, expected, atol=0.02)
    assert np.abs(mean * 1.5 - expected).max() > 0.02


@pytest.mark.parametrize("bad", [np.nan, 3e30])
def test_gradients_that_are_no_numbers_teach_nothing(bad):
    gradients, _ = stream(50, 100, 3)
    before = run(gradients, 8)
    gradient = gradients[:1].copy()
    gradient[0, 7] = bad
    after = run(gradient, 8, seed=9, first=before)
    np.testing.assert_array_equal(after.basis, before.basis)
    np.testing.assert_array_equal(after.weights, before.weights)
    assert off(after.frame) < 1e-5 and int(after.kept) == 3
    assert np.abs(np.asarray(after.frame[:, 3:] - before.frame[:, 3:])).max() > 0.01


def test_zeros_only_forget_and_what_has_no_rank_is_filled():
    gradients, truth = stream(50, 100, 3)
    before = run(gradients, 8)
    after = run(np.zeros((1, 100), F32), 8, seed=9, first=before, forgetting=0.5)
    np.testing.assert_allclose(after.weights, before.weights / 2, rtol=1e-5, atol=1e-3)
    assert angle(after.basis[:, :3], truth) < 1e-3
    nothing = run(np.zeros((5, 100), F32), 8)
    assert int(nothing.kept) == 0 and off(nothing.frame) < 1e-5
    # Nothing outside the basis, again and again: no column may come of the missing residual.
    same = run(np.repeat(gradients[:1], 60, axis=0), 8)
    assert int(same.kept) == 1 and max(off(same.basis), off(same.frame)) < 1e-5
    square, _ = stream(60, 8, 8)
    complete = run(square, 8, share=1.0, forgetting=0.9)
    assert max(off(complete.basis), off(complete.frame)) < 1e-5
    values = np.linalg.eigvalsh(covariance(square, 0.9))
    np.testing.assert_allclose(complete.weights, values[::-1], atol=1e-4 * values[-1])


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_size_of_gradients_does_not_matter(size):
    gradients, truth = stream(60, 100, 3)
    result = run(gradients * F32(size), 8)
    assert int(result.kept) == 3 and angle(result.basis[:, :3], truth) < 1e-3
    np.testing.assert_allclose(
        result.weights[:3] / size**2, run(gradients, 8).weights[:3], rtol=1e-3
    )


def test_floor_drops_directions_and_narrows_frame():
    gradients, truth = stream(100, 100, 4, spectrum=[5, 4, 0.1, 0.1])
    options = {"share": 1.0, "floor": 3.0, "probes": 2}
    result = run(gradients, 10, **options, narrow=False)
    assert int(result.kept) == 2 and off(result.frame) < 1e-5
    result = run(gradients, 10, **options, narrow=True)
    assert int(result.kept) == 2
    assert off(result.frame[:, :4]) < 1e-5
    assert not np.asarray(result.frame[:, 4:]).any()
    assert angle(result.frame[:, :2], truth[:, :2]) < 0.1
    assert int(run(gradients, 10, **options | {"floor": 1e-3}, narrow=False).kept) == 4
    # From a round on: known when it runs, in one program.
    wide, cut = (
        run(gradients[:1], 10, seed=3, first=result, **options, narrow=t >= 5) for t in (4, 5)
    )
    assert off(wide.frame) < 1e-5 and not np.asarray(cut.frame[:, 4:]).any()
    np.testing.assert_array_equal(cut.basis, wide.basis)


def test_scanned_vmapped_and_round_by_round_are_one():
    gradients, _ = stream(6, 100, 3)
    state = run(gradients, 8)
    first = start(100, 8, jax.random.key(0), F32)
    key = jax.random.key(1)
    firsts = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), first)
    side = jax.jit(jax.vmap(lambda first: scanned(first, gradients, key)))(firsts)
    for case in (scanned(first, gradients, key), jax.tree.map(lambda leaf: leaf[1], side)):
        assert int(case.kept) == int(state.kept)
        np.testing.assert_allclose(case.weights, state.weights, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(
            np.asarray(case.frame) @ np.asarray(case.frame).T,
            state.frame @ state.frame.T,
            atol=1e-3,
        )


@pytest.mark.gate(1)
@pytest.mark.optimized
@pytest.mark.parametrize("seeds", [1, 3])
def test_columns_stay_orthonormal_for_gradients_inside(seeds):
    """In the first round of its own loop: what is left is rounding, in each use the same."""
    over = lambda function: jax.vmap(jax.vmap(function))  # noqa: E731, as runs do
    mapped = jax.jit(over(functools.partial(sketch.update, probes=2)))
    for seed in range(8):
        root = jax.random.key(seed, impl="threefry2x32")
        keys = jax.random.split(root, (3, seeds, 1))
        first = over(lambda key: sketch.start(12, 4, key))(keys[0])
        sent = over(lambda key: jax.random.normal(key, (4,)))(keys[1])
        states = mapped(first, jnp.einsum("svdk,svk->svd", first.frame, sent), keys[2])
        for columns in (*states.basis[:, 0], *states.frame[:, 0]):
            assert off(columns) < 1e-5


@pytest.mark.slow
def test_round_costs_in_proportion_to_dimension():
    def operations(d):
        state = sketch.start(d, 8, jax.random.key(0))
        step = jax.jit(sketch.update)
        cost = step.lower(state, jnp.zeros(d, jnp.float32), jax.random.key(0)).compile()
        return cost.cost_analysis()["flops"], cost.memory_analysis().temp_size_in_bytes

    (first, _), (second, _), (four, room) = (operations(d) for d in (1000, 2000, 4000))
    assert (four - second) / (second - first) == pytest.approx(2.0, rel=0.01)
    assert four < 4.0 * first and first < 100 * 1000 * 8**2
    assert room < 4 * 4000 * 4000 / 4  # d x d would be 64 MB


REPLAY = """
import jax, jax.numpy as jnp, numpy as np
from dpjax.contrib import replica
from dpjax.transforms import sketch
step = jax.jit(sketch.update)
received = np.random.default_rng(5).normal(size=(40, 8)).astype(np.float32)
state = sketch.start(20_000, 8, jax.random.key(3))
for round, coordinates in enumerate(received):
    key = jax.random.fold_in(jax.random.key(4), round)
    state = step(state, jnp.matmul(state.frame, coordinates), key)
print(replica.state_fingerprint(state))
"""


@pytest.mark.slow
@pytest.mark.optimized
def test_another_process_replays_same_bits():
    """From the k-vectors and a seed alone, as many threads stated."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NPROC": "2"}
    command = [sys.executable, "-c", REPLAY]
    runs = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1] and len(runs[0].strip()) == 64
    other = subprocess.run(
        [sys.executable, "-c", REPLAY.replace("key(4)", "key(5)")],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert other.stdout != runs[0]


def test_fingerprint_sees_every_bit():
    state = sketch.start(9, 2, jax.random.key(0))
    hashed = replica.state_fingerprint(state)
    basis = np.array(state.basis)
    basis[3, 1] = np.nextafter(basis[3, 1], F32(2))
    assert replica.state_fingerprint(state._replace(basis=basis)) != hashed
    assert replica.state_fingerprint(state._replace(kept=jnp.int32(1))) != hashed
    swapped = state._replace(basis=state.basis.T)
    assert replica.state_fingerprint(swapped) != hashed


def test_flat_trees():
    tree = {"w": jnp.ones((2, 3), jnp.float32), "b": jnp.arange(2, dtype=jnp.float32)}
    vector, back = sketch.flat(tree)
    jax.tree.map(np.testing.assert_array_equal, back(vector), tree)
    for invalid in ({}, {"n": jnp.arange(3)}):
        with pytest.raises(ValueError):
            sketch.flat(invalid)


def test_narrow_frame_promotes_no_ranks():
    with jax.numpy_rank_promotion("raise"):
        sketch.orthonormal(jnp.ones((3, 2)) + jnp.eye(3, 2))
