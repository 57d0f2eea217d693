"""Noise by schedule: its law with statistical power, its layout, and what may never change it."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpjax.transforms import noise, variates
from dpjax.transforms.noise import scheduled

N = 6
ROUNDS = 400
SHAPES = {"a": (N, 5), "b": (N, 5), "c": (N, 2, 3), "d": (N,)}  # a and b must not share noise
SCALES = np.float32(3.0 * 0.99 ** np.arange(ROUNDS))
KINDS = ("laplace", "normal")
LAWS = {"laplace": scipy.stats.laplace, "normal": scipy.stats.norm}
DRAWS = {"laplace": variates.laplaces, "normal": variates.normals}


def key(seed=0):
    return jax.random.key(seed, impl="threefry2x32")


def zeros(dtype=jnp.float32):
    return {name: jnp.zeros(shape, dtype) for name, shape in SHAPES.items()}


@functools.cache
def sampler(build, kind):
    """Compiled once for what builds it; scales and key are arguments."""

    @jax.jit
    def run(scales, key):
        link = build(scales, key=key, rounds=ROUNDS, kind=kind)

        def step(state, _):
            updates, state = link.update(zeros(), state)
            flat = [leaf.reshape(N, -1) for leaf in jax.tree.leaves(updates)]
            return state, jnp.concatenate(flat, axis=1)

        return jax.lax.scan(step, link.init(zeros()), None, length=ROUNDS)[1]

    return run


def collect(build, kind, seed=0, scales=SCALES):
    """Noise of all rounds, [T, n, d], from updates of zero."""
    return np.asarray(sampler(build, kind)(jnp.asarray(scales), key(seed)), np.float64)


def unchanged(largest, scale, kind, dtype):
    """How many of 20,000 sums with noise are the number itself, as the dtype adds them."""
    draws = np.asarray(DRAWS[kind](key(3), (1, 20_000), jnp.float32))
    wide = jnp.promote_types(dtype, jnp.float32)
    x = jnp.asarray(largest, dtype)
    sums = (x.astype(wide) + jnp.asarray(np.float32(scale) * draws, wide)).astype(dtype)
    return float(np.mean(np.asarray(sums == x)))


WRONG = {
    "spacing at one": lambda payload, scale, kind: noise.lost(jnp.ones_like(payload), scale, kind),
    "whole spacing": lambda payload, scale, kind: noise.lost(payload, scale / 2, kind),
    "the other law": lambda payload, scale, kind: noise.lost(
        payload, scale, *({"laplace", "normal"} - {kind})
    ),
    "of float32": lambda payload, scale, kind: noise.lost(payload.astype(jnp.float32), scale, kind),
}


@pytest.mark.parametrize("kind", KINDS)
def test_lost_noise_is_share_of_unchanged_sums(kind):
    cases = [  # None a power of two, below which floats are nearer.
        (1e5, 0.0044, jnp.float32), (1.7e5, 0.0044, jnp.float32), (3.0, 1e-6, jnp.float32),
        (3.0, 1.0, jnp.float32), (1e-4, 1e-11, jnp.float32), (300.0, 0.9, jnp.bfloat16),
    ]  # fmt: skip
    refuted = set()
    for largest, scale, dtype in cases:
        true = unchanged(largest, scale, kind, dtype)
        payload = jnp.array([[0.1 * largest, -largest], [0.0, 0.5 * largest]], dtype)
        share = float(noise.lost(payload, jnp.float32(scale), kind))
        assert share == pytest.approx(true, abs=0.012), (largest, scale)
        for name, broken in WRONG.items():
            invalid = float(broken(payload, jnp.float32(scale), kind))
            refuted |= {name} if abs(invalid - true) > 0.03 else set()
    assert refuted == set(WRONG)
    assert float(noise.lost(jnp.ones((2, 2)), jnp.float32(0), kind)) == 0, "no noise to lose"
    long = jnp.ones(8_192).at[5_000].set(jnp.nan)
    assert float(jax.jit(noise.lost, static_argnums=2)(long, jnp.float32(1), kind)) == 1
    assert float(noise.lost(jnp.zeros((2, 2)), jnp.float32(1e-20), kind)) < 1e-10
    tree = {"a": jnp.ones((2, 3)), "b": jnp.full((2, 1), 1e5, jnp.float32)}
    single = noise.lost(tree["b"], jnp.float32(0.01), kind)
    assert noise.lost(tree, jnp.float32(0.01), kind) == single


def standard_normals(samples, scales, kind):
    """The normals that would be at the same quantiles of the stated law."""
    law = LAWS[kind]
    single = samples / np.asarray(scales, np.float64)[:, None, None]
    # By the nearer tail: the quantile of a probability near 1 has few digits.
    return np.sign(single) * scipy.special.ndtri(law.cdf(-np.abs(single))) * -1


def check_law(samples, scales, kind):
    """The samples have this law in every round and nothing else in common."""
    rounds, n, d = samples.shape
    single = samples / np.asarray(scales, np.float64)[:, None, None]
    distance = scipy.stats.kstest(single.ravel(), LAWS[kind].cdf).statistic
    assert distance * math.sqrt(single.size) < 2.2  # by chance once in 8,000 keys
    white = standard_normals(samples, scales, kind)
    # In every round: the mean of the squares, so that no round has another's scale.
    energy = (white**2).mean(axis=(1, 2))
    assert np.abs(energy - 1).max() < 5.5 * math.sqrt(2 / (n * d))
    assert abs(energy.mean() - 1) < 5.5 * math.sqrt(2 / single.size)
    trend = np.arange(rounds) - (rounds - 1) / 2
    slope = (energy - 1) @ trend / math.sqrt(2 / (n * d) * (trend @ trend))
    assert abs(slope) < 5
    # Signs and magnitudes apart: a shared magnitude under another sign is seen as well.
    magnitudes = (white**2 - 1) / math.sqrt(2)
    for parts, bound in ((white, 5.5), (magnitudes, 9)):  # squares have heavier tails
        over_agents = np.einsum("tid,tjd->ij", parts, parts) / (rounds * d)
        over_coordinates = np.einsum("tic,tid->cd", parts, parts) / (rounds * n)
        for result, count in ((over_agents, rounds * d), (over_coordinates, rounds * n)):
            off = result[~np.eye(len(result), dtype=bool)]
            assert np.abs(off).max() < bound / math.sqrt(count)
        for lag in range(1, 6):
            early = parts[:-lag]
            late = parts[lag:]
            result = np.einsum("tid,tjd->ij", early, late) / (len(late) * d)
            assert np.abs(result).max() < bound / math.sqrt(len(late) * d)
            result = np.einsum("tic,tid->cd", early, late) / (len(late) * n)
            assert np.abs(result).max() < bound / math.sqrt(len(late) * n)
    vectors = {row.tobytes() for row in np.round(np.abs(single), 4).reshape(-1, d)}
    assert len(vectors) == rounds * n  # no agent or round shares its noise


@pytest.mark.parametrize("kind", KINDS)
def test_noise_has_stated_law(kind):
    check_law(collect(scheduled, kind), SCALES, kind)


@pytest.mark.mutant
@pytest.mark.parametrize("kind", KINDS)
def test_check_has_power(kind):
    samples = collect(scheduled, kind)
    other = KINDS[1 - KINDS.index(kind)]
    for scales, law in (
        (1.05 * SCALES, kind),
        (SCALES / 1.05, kind),
        (np.full(ROUNDS, SCALES.mean()), kind),
        (SCALES**0.97, kind),
        (SCALES, other),
    ):
        with pytest.raises(AssertionError):
            check_law(samples, scales, law)


def one_agents(samples):
    """The first agent's noise for all, each with a sign of its own."""
    signs = np.sign(samples[..., :1])
    return np.abs(samples[:, :1]) * np.sign(samples[:, :1]) * signs


def key_added_up(samples):
    """Leaf l of round t takes what its place has under round t + l."""
    late = np.concatenate([samples[1:], samples[:1]])
    return np.concatenate([samples[..., :5], late[..., :5], samples[..., 10:]], axis=2)


BROKEN = {
    "one draw for all rounds": lambda s: np.broadcast_to(s[:1], s.shape),
    "one draw for pairs of rounds": lambda s: s[np.arange(ROUNDS) // 2],
    "one draw for two leaves": lambda s: np.concatenate([s[..., :5], s[..., :-5]], axis=2),
    "key added up": key_added_up,
    "one draw for all agents": lambda s: np.broadcast_to(s[:, :1], s.shape),
    "one draw for all agents, signs apart": one_agents,
    "two agents share": lambda s: s[:, [0, 1, 2, 3, 4, 0]],
    "opposite agents": lambda s: np.concatenate([s[:, :3], -s[:, :3]], axis=1),
    "one side": np.abs,
    "a variance of a half": lambda s: s * 0.5**0.5,
    "a variance of two": lambda s: s * 2**0.5,
    "uniform noise": lambda s: np.random.default_rng(0).uniform(-(3**0.5), 3**0.5, s.shape),
    "no large ones": lambda s: np.clip(s, -2, 2),
}
# Over the samples of scale 1; a tenth between rounds, so that one too late is a tenth of noise.
STEEP = np.float32(1.1 ** -np.arange(ROUNDS))
STALE = {
    "of the round before": np.concatenate([STEEP[:1], STEEP[:-1]]),
    "of the round after": np.concatenate([STEEP[1:], STEEP[-1:]]),
    "of the first round": np.full(ROUNDS, STEEP[0]),
    "in reverse": STEEP[::-1],
    "of pairs of rounds": STEEP[np.arange(ROUNDS) // 2 * 2],
}


@pytest.mark.mutant
@pytest.mark.parametrize("kind", KINDS)
def test_broken_draws_are_caught(kind):
    ones = np.ones(ROUNDS, np.float32)
    samples = collect(scheduled, kind, scales=ones)
    check_law(samples, ones, kind)
    for broken in BROKEN.values():
        with pytest.raises(AssertionError):
            check_law(broken(samples), ones, kind)


@pytest.mark.mutant
@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_other_rounds_are_caught(kind):
    samples = collect(scheduled, kind, scales=np.ones(ROUNDS, np.float32))
    check_law(collect(scheduled, kind, scales=STEEP), STEEP, kind)
    check_law(samples * STEEP[:, None, None], STEEP, kind)
    for stale in STALE.values():
        with pytest.raises(AssertionError):
            check_law(samples * stale[:, None, None], STEEP, kind)


MUTANTS = {
    "round": lambda key, round, group: jax.random.fold_in(jax.random.fold_in(key, 0), group),
    "group": lambda key, round, group: jax.random.fold_in(jax.random.fold_in(key, round), 0),
    "sum": lambda key, round, group: jax.random.fold_in(key, round + group),
}


@pytest.mark.mutant
def test_keys_that_leave_out_part_are_caught(monkeypatch):
    monkeypatch.setattr(noise, "_PACK", 6)  # so that the leaves are several draws

    def check():  # another function each time, or what was compiled would be taken
        check_law(collect(lambda *a, **k: scheduled(*a, **k), "laplace"), SCALES, "laplace")

    check()
    for mutant in MUTANTS.values():
        monkeypatch.setattr(noise, "_draw_key", mutant)
        with pytest.raises(AssertionError):
            check()


@pytest.mark.x64
@pytest.mark.parametrize("kind", KINDS)
def test_layout_and_scaling_are_exact(kind):
    """The layout is part of what a seed means: a change of it must be a decision."""
    scales = np.float32([0.3, 1.7, 0.0, 2.5])
    link = scheduled(scales, key=key(), rounds=4, kind=kind)
    options = {"b": jnp.zeros((2, 3), jnp.float32), "w": jnp.zeros((2, 2, 2), jnp.float32)}
    for t, scale in enumerate(scales):
        out, state = link.update(options, noise.NoiseState(key(), jnp.int32(t)))
        assert isinstance(state, noise.NoiseState) and int(state.round) == t + 1
        drawn = jax.random.fold_in(jax.random.fold_in(key(), t), 0)
        total = scale * np.asarray(DRAWS[kind](drawn, (2, 7), jnp.float32))
        np.testing.assert_array_equal(out["b"], total[:, :3])
        np.testing.assert_array_equal(np.reshape(out["w"], (2, 4)), total[:, 3:])


def test_large_leaves_have_draws_of_their_own(monkeypatch):
    monkeypatch.setattr(noise, "_PACK", 64)
    sizes = {"a": 63, "b": 4, "c": 69, "d": 3}
    options = {name: jnp.zeros((2, size), jnp.float32) for name, size in sizes.items()}
    link = scheduled(np.ones(1), key=key(), rounds=1, kind="laplace")
    out, _ = jax.jit(link.update)(options, link.init(options))
    starts = [np.asarray(leaf[agent, :3]) for leaf in out.values() for agent in (0, 1)]
    assert len({row.tobytes() for row in starts}) == 8
    entries = np.concatenate([np.asarray(leaf).ravel() for leaf in out.values()])
    assert len(np.unique(np.abs(entries))) == entries.size == 2 * 139


@pytest.mark.parametrize("kind", KINDS[:1])
def test_no_two_entries_share_draw(kind, monkeypatch):
    """Every counter of every key that is hashed, over rounds, agents and leaves, counted."""
    observed = []

    def noted(key, shape, dtype, rows=None):
        high, low = variates.words(key, shape, rows)
        observed.append((np.asarray(high).astype(np.uint64) << np.uint64(32)) | np.asarray(low))
        return jnp.zeros(shape, dtype)

    monkeypatch.setitem(noise._DRAWS, kind, noted)
    monkeypatch.setattr(noise, "_PACK", 500)
    big = {"a": jnp.zeros((3, 700)), "b": jnp.zeros((3, 9)), "c": jnp.zeros((3, 495))}
    link = scheduled(np.ones(9), key=key(), rounds=9, kind=kind)
    state = link.init(big)
    for _ in range(9):
        _, state = link.update(big, state)
    entries = np.concatenate([item.ravel() for item in observed])
    assert entries.size == 9 * 3 * (700 + 9 + 495) == len(np.unique(entries))
    assert len(observed) == 9 * 3


@pytest.mark.parametrize("kind", KINDS[:1])
def test_zero_scale_adds_nothing(kind):
    options = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(N, 7)), jnp.float32)}
    link = scheduled(np.array([1.0, 0.0, 1.0]), key=key(), rounds=3, kind=kind)
    state = link.init(options)
    for nothing in (False, True, False):
        out, state = jax.jit(link.update)(options, state)
        assert np.array_equal(out["w"], options["w"]) == nothing


@pytest.mark.parametrize("kind", KINDS[:1])
def test_rounds_past_end_are_nan_and_refused(kind):
    for scales in (np.ones(2, np.float32), np.zeros(2, np.float32)):
        link = scheduled(scales, key=key(), rounds=2, kind=kind)
        state = link.init(zeros())
        for expected in (True, True, False, False):
            out, state = jax.jit(link.update)(zeros(), state)
            finite = {bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(out)}
            missing = {bool(jnp.isnan(leaf).all()) for leaf in jax.tree.leaves(out)}
            assert (finite, missing) == ({expected}, {not expected})
        with pytest.raises(ValueError, match="round is 4, the noise is accounted for 2 rounds"):
            link.update(zeros(), state)


@pytest.mark.parametrize("kind", KINDS[:1])
def test_one_trace_for_all_rounds_and_jit_equals_eager(kind):
    link = scheduled(SCALES, key=key(), rounds=ROUNDS, kind=kind)
    traces = []

    def step(state):
        traces.append(1)
        return link.update(zeros(), state)

    jitted = jax.jit(step)
    state = link.init(zeros())
    other = link.init(zeros())
    for _ in range(4):
        out, state = jitted(state)
        eager, other = link.update(zeros(), other)
        for name in SHAPES:
            np.testing.assert_allclose(out[name], eager[name], rtol=1e-6)
    assert len(traces) == 1
    assert int(state.round) == 4 and jax.tree.structure(state) == jax.tree.structure(other)


@pytest.mark.parametrize("kind", KINDS[:1])
def test_state_resumes_and_key_decides(kind):
    complete = collect(scheduled, kind)
    link = scheduled(SCALES, key=key(), rounds=ROUNDS, kind=kind)
    out, _ = link.update(zeros(), noise.NoiseState(key(), jnp.int32(200)))
    flat = np.concatenate([np.asarray(leaf).reshape(N, -1) for leaf in out.values()], axis=1)
    np.testing.assert_allclose(flat, complete[200], rtol=1e-6)
    other = collect(scheduled, kind, seed=1)
    assert not np.isclose(other, complete).any(axis=2).all(axis=1).any()


@pytest.mark.x64
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_leaves_are_rounded_once(kind):
    options = {
        "half": jnp.full((N, 64), 3.0, jnp.bfloat16),
        "single": jnp.full((N, 64), 3.0, jnp.float32),
    }
    link = scheduled(np.full(2, 0.5), key=key(), rounds=2, kind=kind)
    out, _ = link.update(options, link.init(options))
    assert {name: leaf.dtype for name, leaf in out.items()} == {
        "half": jnp.bfloat16,
        "single": jnp.float32,
    }
    # Both are of computing dtype float32, so they share a draw: half's 64 columns, then single's.
    drawn = jax.random.fold_in(jax.random.fold_in(key(), 0), 0)
    total = 3 + np.float32(0.5) * DRAWS[kind](drawn, (N, 128), jnp.float32)
    np.testing.assert_array_equal(out["half"], total[:, :64].astype(jnp.bfloat16))
    np.testing.assert_array_equal(out["single"], total[:, 64:])


@pytest.mark.x64
@pytest.mark.parametrize("kind", KINDS)
def test_double_precision_leaves_get_double_noise(kind):
    if not jax.config.jax_enable_x64:
        pytest.skip("needs jax_enable_x64")
    options = {"w": jnp.zeros((N, 64), jnp.float64), "v": jnp.zeros((N, 64), jnp.float32)}
    for scales in (np.array([1 / 3, 1.0]), np.float32([1 / 3, 1.0])):
        link = scheduled(scales, key=key(), rounds=2, kind=kind)
        out, _ = jax.jit(link.update)(options, link.init(options))
        assert out["w"].dtype == jnp.float64 and out["v"].dtype == jnp.float32
        # In tree order float32's v is the first group, float64's w the second.
        drawn = jax.random.fold_in(jax.random.fold_in(key(), 0), 1)
        wide = np.asarray(DRAWS[kind](drawn, (N, 64), jnp.float64)) * np.float64(scales[0])
        np.testing.assert_allclose(out["w"], wide, rtol=1e-14)


@pytest.mark.x64
@pytest.mark.parametrize("kind", KINDS)
def test_float64_scales_add_what_their_float32_roundings_do(kind):
    scales = 1 / np.arange(3.0, 6.0)
    out = []
    for case in (scales, scales.astype(np.float32), list(scales)):
        link = scheduled(case, key=key(), rounds=3, kind=kind)
        out.append(link.update(zeros(), link.init(zeros()))[0])
    jax.tree.map(np.testing.assert_array_equal, out[0], out[1])
    jax.tree.map(np.testing.assert_array_equal, out[0], out[2])


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


@pytest.mark.parametrize(("kind", "primitive"), [("laplace", "log1p"), ("normal", "erf_inv")])
def test_plans_share_one_draw_under_vmap_and_each_is_as_alone(kind, primitive):
    plans = jnp.asarray(np.stack([SCALES, 2 * SCALES, np.ones_like(SCALES)]))
    options = {"w": jnp.ones((N, 4), jnp.float32)}

    def one(scales, state):
        return scheduled(scales, key=key(), rounds=ROUNDS, kind=kind).update(options, state)

    state = noise.NoiseState(key(), jnp.int32(3))
    many = jax.vmap(one, in_axes=(0, None), out_axes=(0, None))
    together, after = jax.jit(many)(plans, state)
    assert after.key.shape == () and int(after.round) == 4
    for index, scales in enumerate(plans):
        single, _ = jax.jit(one)(scales, state)
        np.testing.assert_array_equal(together["w"][index], single["w"])
    assert np.abs(together["w"][0] - together["w"][1]).max() > 0.1
    drawn = [
        equation.outvars[0].aval.shape
        for equation in equations(jax.make_jaxpr(many)(plans, state).jaxpr)
        if equation.primitive.name == primitive
    ]
    assert drawn == [(N, 4)]


@pytest.mark.parametrize("kind", KINDS[:1])
def test_seeds_under_vmap_get_noise_they_get_alone(kind):
    def one(key):
        link = scheduled(SCALES, key=key, rounds=ROUNDS, kind=kind)
        return link.update(zeros(), link.init(zeros()))[0]

    keys = jax.vmap(lambda seed: jax.random.fold_in(key(), seed))(jnp.arange(3))
    together = jax.jit(jax.vmap(one))(keys)
    for index in range(3):
        for name, leaf in one(keys[index]).items():
            np.testing.assert_allclose(together[name][index], leaf, rtol=1e-6)
    assert len({row.tobytes() for row in np.asarray(together["a"]).reshape(-1, 5)}) == 3 * N


@pytest.mark.parametrize("kind", KINDS[:1])
def test_sharding_changes_no_number(kind):
    if len(jax.devices()) < 8:
        pytest.skip("needs eight devices")
    mesh = Mesh(np.array(jax.devices()[:8]), ("agents",))
    over_agents = NamedSharding(mesh, PartitionSpec("agents"))
    options = {"w": jnp.zeros((24, 9, 3), jnp.float32), "b": jnp.zeros((24,), jnp.float32)}
    spread = jax.device_put(options, over_agents)
    link = scheduled(SCALES, key=key(), rounds=ROUNDS, kind=kind)
    plain, _ = jax.jit(link.update)(options, link.init(options))
    step = jax.jit(link.update, out_shardings=(over_agents, None))
    sharded, _ = step(spread, link.init(spread))
    for name in options:
        assert len(sharded[name].sharding.device_set) == 8
        np.testing.assert_array_equal(sharded[name], plain[name])


def test_other_keys_are_refused():
    for invalid, message in (
        (jax.random.key(0, impl="rbg"), "generator 'rbg'"),
        (0, "key is int"),
        (jax.random.split(key(), 3), r"shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=f"{message}.*threefry"):
            scheduled(np.ones(3), key=invalid, rounds=3, kind="laplace")


@pytest.mark.parametrize(
    ("scales", "rounds", "kind", "message"),
    [
        (np.ones(2), 3, "laplace", r"scales has shape \(2,\) for rounds = 3; give one each"),
        (np.ones((3, 1)), 3, "laplace", "scales has shape"),
        (np.array([1.0, np.nan]), 2, "normal", "scales holds nan"),
        (np.array([1.0, -0.5]), 2, "normal", "scales holds -0.5; give scales of at least 0"),
        (np.ones(1), 0, "laplace", "rounds is 0"),
        (np.ones(1), 2**31, "laplace", "rounds is 2147483648"),
        (np.ones(1), 1, "gaussian", "kind is 'gaussian'; choose one of laplace, normal"),
    ],
)
def test_invalid_arguments_are_refused(scales, rounds, kind, message):
    with pytest.raises(ValueError, match=message):
        scheduled(scales, key=key(), rounds=rounds, kind=kind)


def test_traced_scales_of_another_length_are_refused():
    with pytest.raises(ValueError, match="give one each"):
        jax.jit(lambda s: scheduled(s, key=key(), rounds=3, kind="normal").init(zeros()))(
            jnp.ones(2)
        )


def test_malformed_updates_are_refused():
    link = scheduled(np.ones(3), key=key(), rounds=3, kind="laplace")
    for updates in (
        {"a": jnp.ones((2, 2)), "b": jnp.ones((3, 2))},
        jnp.ones(()),
        {"a": jnp.ones((2, 2)), "b": jnp.ones(())},
        {"a": jnp.arange(3)},
    ):
        with pytest.raises(ValueError, match="agents of the first leaf"):
            link.update(updates, noise.NoiseState(key(), jnp.int32(0)))
