"""A strategy over rounds: every route against the dense inverse, side by side and past the end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpjax.transforms import noise, rounds

N = 3
ROUNDS = 12
D = 5


def key():
    return jax.random.key(7, impl="threefry2x32")


def strategies():
    rng = np.random.default_rng(0)
    dense = np.tril(rng.uniform(-0.5, 0.5, size=(ROUNDS, ROUNDS)))
    np.fill_diagonal(dense, rng.uniform(0.8, 1.5, size=ROUNDS))
    banded = np.tril(np.triu(dense, -3))
    return {
        "dense": dense,
        "banded": banded,
        "prefix sums": np.tril(np.ones((ROUNDS, ROUNDS))),
        "diagonal": np.diag(np.diag(dense)),
        "identity": np.eye(ROUNDS),
    }


def run(factor, strategy, rounds=ROUNDS):
    zeros = {"w": jnp.zeros((N, D - 1), jnp.float32), "b": jnp.zeros((N,), jnp.float32)}
    transform = noise.correlated(factor, key=key(), rounds=ROUNDS, strategy=strategy)

    def step(state, _):
        updates, state = transform.update(zeros, state)
        return state, jnp.concatenate([updates["b"][:, None], updates["w"]], axis=1)

    return np.asarray(
        jax.jit(lambda s: jax.lax.scan(step, s, None, length=rounds)[1])(transform.init(zeros))
    )


@functools.cache
def normals():
    return run(np.eye(N), None).astype(np.float64)


@pytest.mark.parametrize(
    "name",
    ["dense", "banded", "prefix sums"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("diagonal", "identity")],
)
def test_streaming_equals_dense_product(name):
    strategy = strategies()[name]
    factor = np.random.default_rng(1).normal(size=(N, N))
    expected = np.einsum("ts,ij,sjd->tid", np.linalg.inv(strategy), factor, normals())
    np.testing.assert_allclose(run(factor, strategy), expected, rtol=2e-4, atol=2e-4)


def test_only_band_is_kept_and_none_keeps_nothing():
    zeros = jnp.zeros((N, D), jnp.float32)
    widths = {"dense": ROUNDS - 1, "banded": 3, "prefix sums": 1, "identity": 0}
    for name, width in widths.items():
        transform = noise.correlated(
            np.eye(N), key=key(), rounds=ROUNDS, strategy=strategies()[name]
        )
        ((past,),) = transform.init(zeros).past
        assert past.shape == (width, N, D)
    assert noise.correlated(np.eye(N), key=key(), rounds=ROUNDS).init(zeros).past == ()


def test_past_end_is_nan():
    out = run(np.eye(N), strategies()["banded"], rounds=ROUNDS + 2)
    assert np.isfinite(out[:ROUNDS]).all() and np.isnan(out[ROUNDS:]).all()


def test_past_end_is_refused_where_round_is_known():
    zeros = jnp.zeros((N, D), jnp.float32)
    for strategy in (None, np.eye(1)):
        transform = noise.correlated(np.eye(N), key=key(), rounds=1, strategy=strategy)
        _, state = transform.update(zeros, transform.init(zeros))
        with pytest.raises(ValueError, match="round is 1, the noise is accounted for 1 rounds"):
            transform.update(zeros, state)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (np.eye(ROUNDS - 1), r"shape \(11, 11\) for rounds = 12"),
        (np.ones((ROUNDS, ROUNDS)), "lower triangular"),
        (-np.eye(ROUNDS), "positive diagonal"),
        (np.full((ROUNDS, ROUNDS), np.inf), "strategy holds inf"),
        ("toeplitz", "strategy"),
    ],
)
def test_unfit_strategies_are_refused(strategy, message):
    with pytest.raises(ValueError, match=message):
        noise.correlated(np.eye(N), key=key(), rounds=ROUNDS, strategy=strategy)


# Long enough for blocks: two whole ones and a part.
LONG = 2 * rounds.BLOCK + 9


def long_strategies():
    """One for each route."""
    complete = np.tril(np.random.default_rng(2).uniform(0.1, 0.6, (LONG, LONG))) / LONG
    banded = (
        np.tril(np.triu(complete, -4))
        + np.eye(LONG)
        + np.tril(np.triu(np.ones_like(complete), -4)) / 8
    )
    return {
        "blocked": complete + np.eye(LONG),
        "recursion": banded,
        "moving": np.linalg.inv(np.eye(LONG) - 0.7 * np.eye(LONG, k=-1) - 0.2 * np.eye(LONG, k=-3)),
    }


def long_noises(strategy, zeros, agents=N, factor=None):
    """[LONG, agents, d] noise of all rounds, leaves side by side."""
    factor = np.eye(agents) if factor is None else factor
    transform = noise.correlated(factor, key=key(), rounds=LONG, strategy=strategy)

    def step(state, _):
        updates, state = transform.update(zeros, state)
        flat = [leaf.reshape(agents, -1) for leaf in jax.tree.leaves(updates)]
        return state, jnp.concatenate([leaf.astype(jnp.float32) for leaf in flat], axis=1)

    complete = jax.jit(lambda state: jax.lax.scan(step, state, None, length=LONG)[1])
    return np.asarray(complete(transform.init(zeros)), np.float64)


def impulses(monkeypatch):
    """Normals of round s become the unit vector s: the noise is then the map over rounds itself."""

    def draw(key, group, shape, dtype, released, rows):
        return lambda t: (jnp.arange(shape[1]) == t).astype(dtype)[None]

    monkeypatch.setattr(noise, "_draw", draw)


@pytest.mark.parametrize("kind", ["blocked", "moving"])
def test_run_s_map_is_rounded_inverse(kind, monkeypatch):
    impulses(monkeypatch)
    strategy = long_strategies()[kind]
    assert rounds.route(strategy, LONG).kind == kind
    # One normal in a sum of zeros rounds nothing, so float32 shows the coefficients as they are.
    result = long_noises(strategy, jnp.zeros((1, LONG), jnp.float32), agents=1)[:, 0]
    inverse = np.linalg.inv(strategy)
    inverse[np.abs(inverse) < 1e-13] = 0
    np.testing.assert_allclose(result, inverse, rtol=2**-23)
    mine = rounds.applied(strategy)
    np.testing.assert_allclose(np.linalg.inv(result), mine, rtol=0, atol=1e-12)
    # Neither the strategy asked for nor one whose own entries are rounded is what runs.
    for twin in (strategy, strategy.astype(np.float32).astype(np.float64)):
        assert np.abs(np.linalg.inv(result) - twin).max() > 1e-9


def test_applied_by_recursion_is_that_of_rounded_ratios(monkeypatch):
    strategy = long_strategies()["recursion"]
    ratios = (np.tril(strategy, -1) / np.diag(strategy)[:, None]).astype(np.float32)
    scale = (1 / np.diag(strategy)).astype(np.float32)
    result = np.zeros((LONG, LONG))
    for t in range(LONG):
        result[t] = float(scale[t]) * np.eye(LONG)[t] - ratios[t].astype(np.float64) @ result
    mine = rounds.applied(strategy)
    np.testing.assert_allclose(np.linalg.inv(result), mine, rtol=0, atol=1e-12)
    impulses(monkeypatch)
    ran = long_noises(strategy, jnp.zeros((1, LONG), jnp.float32), agents=1)[:, 0]
    np.testing.assert_allclose(ran, result, rtol=0, atol=1e-6)
    # Rounding the inverse, which is right for the other routes, gives another strategy.
    rounded = np.linalg.inv(np.linalg.inv(strategy).astype(np.float32).astype(np.float64))
    assert np.abs(rounded - mine).max() > 1e-9


@pytest.mark.parametrize("kind", ["recursion", pytest.param("moving", marks=pytest.mark.slow)])
def test_routes_of_one_strategy_agree(kind, monkeypatch):
    strategy = long_strategies()[kind]
    zeros = jnp.zeros((N, D), jnp.float32)
    few = long_noises(strategy, zeros)
    monkeypatch.setattr(rounds, "WIDEST", 0)
    assert rounds.route(strategy, LONG).kind == "blocked"
    np.testing.assert_allclose(long_noises(strategy, zeros), few, rtol=0, atol=2e-5)
    other = long_noises(long_strategies()["blocked"], zeros)
    assert np.abs(other - few).max() > 0.1


@pytest.fixture
def small_groups(monkeypatch):
    """Leaves of 64 entries are draws of their own."""
    monkeypatch.setattr(noise, "_PACK", 64)


def three_leaves(narrow):
    return {
        "a": jnp.zeros((N, 3), narrow),
        "b": jnp.zeros((N, 64), jnp.float32),  # does not fit beside a
        "c": jnp.zeros((N, 2, 2), jnp.float32),
    }


@functools.cache
def long_normals():
    return long_noises(None, three_leaves(jnp.float32))


@pytest.mark.parametrize(
    "kind",
    ["blocked", pytest.param("recursion", marks=pytest.mark.slow), "moving"],
)
def test_groups_and_narrow_leaves_on_every_route(kind, small_groups):
    strategy = long_strategies()[kind]
    plain = long_normals()
    # A float32 normal takes 2^24 values: among so few a pair may agree by chance.
    assert len(np.unique(plain[..., [0, 1, 2, 3, 4, -2, -1]])) >= LONG * N * 7 - 3
    expected = np.einsum("ts,snd->tnd", np.linalg.inv(strategy), plain)
    noises = long_noises(strategy, three_leaves(jnp.bfloat16))
    np.testing.assert_allclose(noises[..., 3:], expected[..., 3:], rtol=0, atol=2e-5)
    np.testing.assert_allclose(noises[..., :3], expected[..., :3], rtol=2**-8, atol=2e-5)
    assert np.abs(noises[..., :3] - expected[..., 3:6]).max() > 0.1


def drawn_once(step, start, seeds):
    """Every round's normals are drawn once a seed, under a scan and a vmap over seeds."""
    observed = []

    def run(selection, t):
        def one(rest, seed):
            def draw(t):
                jax.debug.callback(lambda t, s: observed.append((int(s), int(t))), t, seed)
                return jnp.ones((1, 1), jnp.float32)

            return step(draw, rest, t)

        _, selection = jax.vmap(one)(selection, jnp.arange(seeds))
        return selection, None

    kept = jax.tree.map(lambda leaf: jnp.stack([leaf] * seeds), start)
    jax.block_until_ready(jax.jit(lambda k: jax.lax.scan(run, k, jnp.arange(LONG)))(kept))
    jax.effects_barrier()
    assert len(observed) == len(set(observed)) and {s for s, _ in observed} == set(range(seeds))
    assert {t for _, t in observed} >= set(range(LONG))


def test_block_is_drawn_once_and_not_in_every_round():
    route = rounds.route(long_strategies()["blocked"], LONG)
    start = route.start((1, 1), jnp.float32)
    drawn_once(route.step, start, seeds=2)

    def selected(draw, selection, t):
        """A conditional under vmap that became a select: blocks are made and thrown away."""
        value, new = route.step(draw, selection, t - t % rounds.BLOCK)
        return value, jax.tree.map(
            lambda a, b: jnp.where(t % rounds.BLOCK == 0, a, b), new, selection
        )

    with pytest.raises(AssertionError):
        drawn_once(selected, start, seeds=2)


@pytest.mark.parametrize(
    "kind",
    [pytest.param("blocked", marks=pytest.mark.slow), "recursion", "moving"],
)
def test_plans_share_noise_before_factor(kind):
    """Factors are mapped over, the state is not: as plans of one seed in a run."""
    zeros = jnp.zeros((N, D), jnp.float32)
    strategy = long_strategies()[kind]
    factors = np.random.default_rng(4).normal(size=(2, N, N)).astype(np.float32)

    def one(factor, state):
        transform = noise.correlated(factor, key=key(), rounds=LONG, strategy=strategy)
        return transform.update(zeros, state)

    many = jax.vmap(one, in_axes=(0, None), out_axes=(0, None))
    start = noise.correlated(np.eye(N), key=key(), rounds=LONG, strategy=strategy).init(zeros)

    def step(state, _):
        updates, state = many(factors, state)
        return state, updates

    end, together = jax.jit(lambda s: jax.lax.scan(step, s, None, length=LONG))(start)
    assert jax.tree.map(jnp.shape, end) == jax.tree.map(jnp.shape, start)
    single = long_noises(strategy, zeros)
    expected = np.einsum("pij,tjd->tpid", factors.astype(np.float64), single)
    np.testing.assert_allclose(together, expected, rtol=0, atol=2e-5)
    swapped = np.einsum("pij,tjd->tpid", factors[::-1].astype(np.float64), single)
    assert np.abs(np.asarray(together) - swapped).max() > 0.1


@pytest.mark.parametrize(
    "kind",
    [
        "blocked",
        pytest.param("recursion", marks=pytest.mark.slow),
        pytest.param("moving", marks=pytest.mark.slow),
    ],
)
def test_agents_over_devices_get_same_noise(kind):
    if len(jax.devices()) < 8:
        pytest.skip("needs eight devices")
    n = 8
    strategy = long_strategies()[kind]
    over_agents = NamedSharding(
        Mesh(np.array(jax.devices()[:8]), ("agents",)), PartitionSpec("agents")
    )
    zeros = jnp.zeros((n, D), jnp.float32)
    factor = np.random.default_rng(5).normal(size=(n, n))
    plain = long_noises(strategy, zeros, agents=n, factor=factor)
    transform = noise.correlated(factor, key=key(), rounds=LONG, strategy=strategy)
    spread = jax.device_put(zeros, over_agents)
    step = jax.jit(transform.update, out_shardings=(over_agents, None), donate_argnums=1)
    state = jax.device_put(transform.init(spread), NamedSharding(over_agents.mesh, PartitionSpec()))
    for t in range(LONG):
        updates, state = step(spread, state)
        assert len(updates.sharding.device_set) == 8
        np.testing.assert_allclose(updates, plain[t], rtol=0, atol=5e-5)


def test_traced_round_past_block_is_nan_and_repeats_nothing():
    """Past the last whole block too, where indices of the kept noise would wrap or clamp."""
    zeros = jnp.zeros((N, D), jnp.float32)
    for strategy in long_strategies().values():
        transform = noise.correlated(np.eye(N), key=key(), rounds=LONG, strategy=strategy)
        step = jax.jit(transform.update)
        state = transform.init(zeros)
        for late in (LONG, LONG + 1, 3 * rounds.BLOCK, 5 * rounds.BLOCK + 1):
            out, _ = step(zeros, state._replace(round=jnp.int32(late)))
            assert np.isnan(out).all()
            with pytest.raises(ValueError, match=f"round is {late}, .*make a plan for more"):
                transform.update(zeros, state._replace(round=jnp.int32(late)))
