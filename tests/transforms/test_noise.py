"""Noise: its law with statistical power, its layout, and what may never change it."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpjax.mechanism import spatial
from dpjax.topology import graphs, mixing
from dpjax.transforms import noise
from dpjax.transforms.variates import normals

N = 8
ROUNDS = 300
SHAPES = {"a": (N, 5), "b": (N, 5), "c": (N, 2, 3)}  # a and b alike: they must not share noise


def key(seed=0):
    return jax.random.key(seed, impl="threefry2x32")


@functools.cache
def network():
    weights = mixing.metropolis_hastings(graphs.erdos_renyi(N, 0.4, 1))
    covariance = spatial.whisper(weights, 1.0)
    return weights, covariance, scipy.linalg.sqrtm(covariance).real


@functools.cache
def sampler(build, rounds, shapes):
    """Compiled once; factor and key are arguments."""
    zeros = {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes}

    @jax.jit
    def run(factor, key):
        transform = build(factor, key=key, rounds=rounds)

        def step(state, _):
            updates, state = transform.update(zeros, state)
            flat = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(updates)]
            return state, jnp.concatenate(flat, axis=1)

        return jax.lax.scan(step, transform.init(zeros), None, length=rounds)[1]

    return run


def collect(build, factor, seed=0, rounds=ROUNDS, shapes=None):
    """Noise of all rounds, [T, n, d], from updates of zero."""
    run = sampler(build, rounds, tuple((shapes or SHAPES).items()))
    return np.asarray(run(jnp.asarray(factor, jnp.float32), key(seed)), np.float64)


def check_law(samples, covariance):
    """The samples have this covariance over agents and nothing else in common."""
    rounds, n, d = samples.shape
    white = np.linalg.solve(np.linalg.cholesky(covariance), samples)
    count = rounds * d
    over_agents = np.einsum("tid,tjd->ij", white, white) / count
    # Each entry has a standard deviation of at most sqrt(2 / count).
    assert np.abs(over_agents - np.eye(n)).max() < 5.5 * math.sqrt(2 / count)
    over_coordinates = np.einsum("tic,tid->cd", white, white) / (rounds * n)
    assert np.abs(over_coordinates - np.eye(d)).max() < 5.5 * math.sqrt(2 / (rounds * n))
    for lag in range(1, 6):
        early = white[:-lag]
        late = white[lag:]
        over_coordinates = np.einsum("tic,tid->cd", early, late) / (len(late) * n)
        assert np.abs(over_coordinates).max() < 5.5 / math.sqrt(len(late) * n)
        over_agents = np.einsum("tid,tjd->ij", early, late) / (len(late) * d)
        assert np.abs(over_agents).max() < 5.5 / math.sqrt(len(late) * d)
    assert abs(white.mean()) < 5.5 / math.sqrt(white.size)
    # The fourth moment of a Gaussian is 3, its estimate's variance 96 / count.
    assert abs(np.mean(white**4) - 3) < 5.5 * math.sqrt(96 / white.size)
    vectors = {row.tobytes() for row in np.round(white, 4).reshape(-1, d)}
    assert len(vectors) == rounds * n  # no agent or round shares its noise


def check_energy(samples, weights, covariance):
    """Mixed noise has energy tr(W R W') a coordinate."""
    mixed = np.einsum("ij,tjd->tid", weights, samples)
    mean = (mixed**2).sum(axis=1).mean()
    product = weights @ covariance @ weights.T
    error = math.sqrt(2 * np.trace(product @ product) / (samples.shape[0] * samples.shape[2]))
    assert abs(mean - np.trace(product)) < 5.5 * error


def test_noise_has_designed_law():
    weights, covariance, factor = network()
    samples = collect(noise.correlated, factor)
    check_law(samples, covariance)
    check_energy(samples, weights, covariance)
    mean = samples.mean(axis=1)
    expected = covariance.sum() / N**2
    assert np.mean(mean**2) == pytest.approx(expected, rel=5.5 * math.sqrt(2 / mean.size))


@pytest.mark.mutant
@pytest.mark.parametrize("invalid", [1.5, 1 / 1.5])
def test_checks_have_power(invalid):
    weights, covariance, factor = network()
    samples = collect(noise.correlated, factor)
    with pytest.raises(AssertionError):
        check_law(samples, invalid * covariance)
    with pytest.raises(AssertionError):
        check_energy(samples, weights, invalid * covariance)


def key_added_up(white):
    """Leaf l of round t takes what its place has under round t + l."""
    late = np.concatenate([white[1:], white[:1]])
    return np.concatenate([white[..., :5], late[..., :5], white[..., 10:]], axis=2)


# Of the normals of all rounds, before the factor.
TWINS = {
    "key reused by all rounds": lambda z: np.broadcast_to(z[:1], z.shape),
    "key reused by all leaves": lambda z: np.concatenate([z[..., :5], z[..., :-5]], axis=2),
    "key reused by pairs of rounds": lambda z: z[np.arange(ROUNDS) // 2],
    "key added up": key_added_up,
    "one noise for all agents": lambda z: np.broadcast_to(z[:, :1], z.shape),
    "noise for a mean": lambda z: z / math.sqrt(2),
    "uniform noise": lambda z: np.random.default_rng(0).uniform(-(3**0.5), 3**0.5, z.shape),
}


@functools.cache
def normals_of_rounds():
    _, _, factor = network()
    return np.linalg.solve(factor, collect(noise.correlated, factor))


@pytest.mark.mutant
@pytest.mark.parametrize("name", TWINS)
def test_broken_twins_are_caught(name):
    _, covariance, factor = network()
    broken = np.einsum("ij,tjd->tid", factor, TWINS[name](normals_of_rounds()))
    with pytest.raises(AssertionError):
        check_law(broken, covariance)


@pytest.mark.mutant
def test_mis_scaled_or_transposed_factor_is_caught():
    _, covariance, _ = network()
    factor = np.linalg.cholesky(covariance)
    check_law(collect(noise.correlated, factor), covariance)
    for broken in (0.9 * factor, factor.T, np.diag(np.sqrt(np.diag(covariance)))):
        with pytest.raises(AssertionError):
            check_law(collect(noise.correlated, broken), covariance)


def test_zero_factor_changes_no_bit():
    updates = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(N, 7)), jnp.float32)}
    transform = noise.correlated(np.zeros((N, N)), key=key(), rounds=3)
    out, _ = transform.update(updates, transform.init(updates))
    np.testing.assert_array_equal(out["w"], updates["w"])


def test_rounds_past_end_are_nan():
    zeros = {"w": jnp.zeros((N, 4)), "b": jnp.zeros((N,))}
    for factor in (np.eye(N), np.zeros((N, N))):
        transform = noise.correlated(factor, key=key(), rounds=2)
        state = transform.init(zeros)
        for expected in (True, True, False, False):
            out, state = jax.jit(transform.update)(zeros, state)
            finite = {bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(out)}
            missing = {bool(jnp.isnan(leaf).all()) for leaf in jax.tree.leaves(out)}
            assert (finite, missing) == ({expected}, {not expected})


def test_one_trace_for_all_rounds_and_jit_equals_eager():
    zeros = {"w": jnp.zeros((N, 4), jnp.float32)}
    transform = noise.correlated(np.eye(N), key=key(), rounds=10)
    traces = []

    def step(state):
        traces.append(1)
        return transform.update(zeros, state)

    jitted = jax.jit(step)
    state = transform.init(zeros)
    other = transform.init(zeros)
    for _ in range(4):
        out, state = jitted(state)
        eager, other = transform.update(zeros, other)
        np.testing.assert_array_equal(out["w"], eager["w"])
    assert len(traces) == 1
    assert int(state.round) == 4


def test_state_resumes_and_key_decides():
    _, _, factor = network()
    complete = collect(noise.correlated, factor, rounds=6)
    zeros = {name: jnp.zeros(shape, jnp.float32) for name, shape in SHAPES.items()}
    transform = noise.correlated(factor, key=key(), rounds=6)
    out, _ = transform.update(zeros, noise.NoiseState(key(), jnp.int32(4)))
    flat = np.concatenate([np.asarray(leaf).reshape(N, -1) for leaf in out.values()], axis=1)
    np.testing.assert_allclose(flat, complete[4], rtol=1e-6, atol=1e-6)
    other = collect(noise.correlated, factor, seed=1, rounds=6)
    assert not np.isclose(other, complete).any(axis=2).all(axis=1).any()


@pytest.mark.x64
def test_layout_is_fixed():
    """The layout is part of what a seed means: a change of it must be a decision."""
    zeros = {"b": jnp.zeros((2, 3), jnp.float32), "w": jnp.zeros((2, 2, 2), jnp.float32)}
    transform = noise.correlated(np.eye(2), key=key(), rounds=9)
    out, _ = transform.update(zeros, noise.NoiseState(key(), jnp.int32(5)))
    drawn = jax.random.fold_in(jax.random.fold_in(key(), 5), 0)
    complete = normals(drawn, (2, 7), jnp.float32)
    np.testing.assert_array_equal(out["b"], complete[:, :3])
    np.testing.assert_array_equal(out["w"].reshape(2, 4), complete[:, 3:])


def test_large_leaves_have_draws_of_their_own(monkeypatch):
    monkeypatch.setattr(noise, "_PACK", big := 4096)
    shapes = {"a": (2, big - 1), "b": (2, 4), "c": (2, big + 5), "d": (2, 3)}
    samples = collect(noise.correlated, np.eye(2), rounds=1, shapes=shapes)[0]
    vectors = [samples[agent, start : start + 3] for agent in (0, 1) for start in
               (0, big - 1, big + 3, 2 * big + 8)]  # fmt: skip
    assert len({tuple(vector) for vector in vectors}) == 8
    assert abs(samples.mean()) < 5.5 / math.sqrt(samples.size)
    assert samples.var() == pytest.approx(1, abs=5.5 * math.sqrt(2 / samples.size))


@pytest.mark.x64
def test_narrow_leaves_are_rounded_once():
    updates = {
        "half": jnp.full((N, 64), 3.0, jnp.bfloat16),
        "single": jnp.full((N, 64), 3.0, jnp.float32),
    }
    transform = noise.correlated(np.eye(N), key=key(), rounds=2)
    out, _ = transform.update(updates, transform.init(updates))
    assert {name: leaf.dtype for name, leaf in out.items()} == {
        "half": jnp.bfloat16,
        "single": jnp.float32,
    }
    # Both are of computing dtype float32, so they share a draw: half's 64 columns, then single's.
    drawn = jax.random.fold_in(jax.random.fold_in(key(), 0), 0)
    complete = normals(drawn, (N, 128), jnp.float32)
    np.testing.assert_array_equal(out["half"], (3 + complete[:, :64]).astype(jnp.bfloat16))


@pytest.mark.x64
def test_double_precision_leaves_get_double_noise():
    if not jax.config.jax_enable_x64:
        pytest.skip("needs jax_enable_x64")
    updates = {"w": jnp.zeros((N, 64), jnp.float64), "v": jnp.zeros((N, 64), jnp.float32)}
    transform = noise.correlated(np.eye(N), key=key(), rounds=2)
    out, _ = transform.update(updates, transform.init(updates))
    assert out["w"].dtype == jnp.float64 and out["v"].dtype == jnp.float32
    assert not np.allclose(out["w"], out["v"])
    assert (np.asarray(out["w"]) != np.asarray(out["w"], np.float32)).any()


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def test_designs_share_one_draw_under_vmap():
    _, _, factor = network()
    factors = jnp.asarray(np.stack([factor, 2 * factor, np.eye(N)]), jnp.float32)
    zeros = {"w": jnp.zeros((N, 4), jnp.float32)}

    def one(factor, state):
        return noise.correlated(factor, key=key(), rounds=5).update(zeros, state)

    state = noise.NoiseState(key(), jnp.int32(3))
    many = jax.vmap(one, in_axes=(0, None), out_axes=(0, None))
    together, after = jax.jit(many)(factors, state)
    assert after.key.shape == () and int(after.round) == 4
    for index, item in enumerate(factors):
        single, _ = one(item, state)
        np.testing.assert_allclose(together["w"][index], single["w"], rtol=1e-5, atol=1e-6)
    drawn = [
        equation.outvars[0].aval.shape
        for equation in equations(jax.make_jaxpr(many)(factors, state).jaxpr)
        if equation.primitive.name == "erf_inv"
    ]
    assert drawn == [(N, 4)]
    products = [
        equation.params["precision"]
        for equation in equations(jax.make_jaxpr(many)(factors, state).jaxpr)
        if equation.primitive.name == "dot_general"
    ]
    assert products and all(set(p) == {jax.lax.Precision.HIGHEST} for p in products)


def test_seeds_under_vmap_get_noise_they_get_alone():
    zeros = {"w": jnp.zeros((N, 4), jnp.float32), "b": jnp.zeros((N,), jnp.float32)}
    _, _, factor = network()

    def one(key):
        transform = noise.correlated(factor, key=key, rounds=5)
        return transform.update(zeros, transform.init(zeros))[0]

    def raw(key):
        transform = noise.correlated(np.eye(N), key=key, rounds=5)
        return transform.update(zeros, transform.init(zeros))[0]

    keys = jax.vmap(lambda seed: jax.random.fold_in(key(), seed))(jnp.arange(3))
    together = jax.jit(jax.vmap(one))(keys)
    normals = jax.jit(jax.vmap(raw))(keys)
    one = jax.jit(one)
    raw = jax.jit(raw)
    for index in range(3):
        # The bits are the same; compilers may round the inverse normal's last place either way.
        np.testing.assert_allclose(normals["w"][index], raw(keys[index])["w"], rtol=3e-7)
        np.testing.assert_allclose(
            together["w"][index], one(keys[index])["w"], rtol=1e-5, atol=1e-6
        )
    assert len({row.tobytes() for row in np.asarray(normals["w"]).reshape(-1, 4)}) == 3 * N


def test_sharding_changes_no_normal():
    if len(jax.devices()) < 8:
        pytest.skip("needs eight devices")
    n = 24
    mesh = Mesh(np.array(jax.devices()[:8]), ("agents",))
    rng = np.random.default_rng(0)
    zeros = {"w": jnp.zeros((n, 9, 3), jnp.float32), "b": jnp.zeros((n,), jnp.float32)}
    over_agents = NamedSharding(mesh, PartitionSpec("agents"))
    spread = jax.device_put(zeros, over_agents)
    for factor, exact in ((np.eye(n), True), (rng.normal(size=(n, n)), False)):
        transform = noise.correlated(factor, key=key(), rounds=5)
        plain, _ = jax.jit(transform.update)(zeros, transform.init(zeros))
        step = jax.jit(transform.update, out_shardings=(over_agents, None))
        sharded, _ = step(spread, transform.init(spread))
        for name in zeros:
            assert len(sharded[name].sharding.device_set) == 8
            if exact:
                np.testing.assert_array_equal(sharded[name], plain[name])
            else:
                np.testing.assert_allclose(sharded[name], plain[name], rtol=1e-5, atol=1e-5)


def test_other_keys_are_refused():
    for invalid, message in (
        (jax.random.key(0, impl="rbg"), "generator 'rbg'"),
        (jax.random.key(0, impl="unsafe_rbg"), "generator"),
        (0, "key is int"),
        (None, "key is NoneType"),
        (jax.random.split(key(), 3), r"shape \(3,\)"),
        (jnp.zeros(2, jnp.uint32), "uint32"),
    ):
        with pytest.raises(ValueError, match=f"{message}.*threefry"):
            noise.correlated(np.eye(2), key=invalid, rounds=3)
    with pytest.raises(ValueError, match="generator"):
        jax.jit(lambda k: noise.correlated(np.eye(2), key=k, rounds=3).init(jnp.zeros((2, 1))))(
            jax.random.key(0, impl="rbg")
        )


@pytest.mark.parametrize(
    ("factor", "rounds", "message"),
    [
        (np.ones((2, 3)), 3, "square"),
        (np.full((2, 2), np.nan), 3, "factor holds nan"),
        (np.eye(2), 0, "rounds is 0"),
        (np.eye(2), 2.0, "rounds is 2.0"),
        (np.eye(2), 2**31, "rounds is 2147483648"),
    ],
)
def test_invalid_arguments_are_refused(factor, rounds, message):
    with pytest.raises(ValueError, match=message):
        noise.correlated(factor, key=key(), rounds=rounds)


def test_malformed_updates_are_refused():
    transform = noise.correlated(np.eye(3), key=key(), rounds=3)
    for updates in (jnp.ones((2, 2)), jnp.ones(()), {"a": jnp.arange(3)}):
        with pytest.raises(ValueError, match="n=3 agents"):
            transform.init(updates)
            transform.update(updates, noise.NoiseState(key(), jnp.int32(0)))


@pytest.mark.gate(1)
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("released", "rounds_strategy"),
    [
        (False, "anti_pgd"),
        (True, None),
        pytest.param(False, None, marks=pytest.mark.slow),
        pytest.param(True, "anti_pgd", marks=pytest.mark.slow),
    ],
)
def test_diagonal_is_its_matrix_to_bit(released, rounds_strategy):
    scales = np.array([0.5, 3.0, 0.0, 1.7], np.float32)
    strategy = None if rounds_strategy is None else np.tri(5)
    updates = {"w": np.ones((4, 6), np.float32), "b": np.zeros((4, 2), np.float32)}
    out = []
    for factor in (np.diag(scales), scales):
        link = noise.correlated(
            factor, key=key(3), rounds=5, strategy=strategy, grid=2.0**-20 if released else None
        )
        state = link.init(updates)
        selection = []
        for _ in range(5):
            noisy, state = jax.jit(link.update)(updates, state)
            selection.append(noisy)
        out.append(selection)
    jax.tree.map(np.testing.assert_array_equal, *out)
    assert np.abs(out[0][0]["w"][2] - 1).max() < 1e-5 < np.abs(out[0][0]["w"][1] - 1).max()


def test_factor_of_another_shape_is_refused():
    for factor in (np.ones((2, 3), np.float32), np.ones((1, 2, 2), np.float32)):
        with pytest.raises(ValueError, match="factor"):
            noise.correlated(factor, key=key(), rounds=5)
    with pytest.raises(ValueError, match="factor holds nan"):
        noise.correlated(np.array([1.0, np.nan], np.float32), key=key(), rounds=5)


def test_states_key_is_not_shown():
    state = noise.correlated(np.eye(N), key=key(7), rounds=3).init(jnp.zeros((N, 2)))
    assert repr((state,)) == "(NoiseState(...),)"
