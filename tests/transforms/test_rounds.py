"""Every route of noise over rounds against the dense inverse, and what it really applies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.transforms import noise, rounds

N = 2
T = 2 * rounds.BLOCK + 9


def key(seed=3):
    return jax.random.key(seed, impl="threefry2x32")


def strategies():
    random = np.random.default_rng(0)
    complete = np.tril(random.uniform(0.1, 0.6, (T, T))) / T + np.eye(T)
    return {
        "blocked": complete,
        "recursion": np.tril(np.triu(complete, -4)) + np.tril(np.triu(np.ones((T, T)), -4)) / 8,
        "moving": np.linalg.inv(np.eye(T) - 0.7 * np.eye(T, k=-1) - 0.2 * np.eye(T, k=-3)),
    }


def noises(strategy, zeros, seed=3, length=T, factor=None):
    """[length, N, d] noise of every round, leaves side by side."""
    factor = np.eye(N) if factor is None else factor
    transform = noise.correlated(factor, key=key(seed), rounds=T, strategy=strategy)

    def step(state, _):
        updates, state = transform.update(zeros, state)
        flat = [leaf.reshape(N, -1).astype(jnp.float32) for leaf in jax.tree.leaves(updates)]
        return state, jnp.concatenate(flat, axis=1)

    def whole(state):
        return jax.lax.scan(step, state, None, length=length)[1]

    return np.asarray(jax.jit(whole)(transform.init(zeros)), np.float64)


@pytest.mark.parametrize("kind", strategies())
def test_covariance_over_rounds_and_agents(kind):
    """Over 4,000 coordinates; 1.5 times the noise would be far outside."""
    strategy = strategies()[kind]
    factor = np.array([[1.0, 0.0], [0.6, 0.8]])
    result = noises(strategy, jnp.zeros((N, 4000)), factor=factor)
    inverse = np.linalg.inv(strategy)
    expected = np.kron(inverse @ inverse.T, factor @ factor.T)
    flat = result.reshape(T * N, -1)
    sampled = flat @ flat.T / flat.shape[1]
    spread = np.sqrt(np.outer(np.diag(expected), np.diag(expected)) * 2 / 4000)
    assert (np.abs(sampled - expected) < 6 * spread).all()
    assert (np.abs(1.5 * sampled - expected) > 6 * spread).any()


def test_large_noise_of_last_round_is_drawn_again(monkeypatch):
    strategy = np.linalg.inv(np.eye(T) - 0.7 * np.eye(T, k=-1))
    zeros = jnp.zeros((N, 6))
    stored = noises(strategy, zeros)
    monkeypatch.setattr(rounds, "_AGAIN", 12)
    selection = rounds.route(strategy, T)
    assert selection.kind == "moving" and selection.start((N, 6), jnp.float32) == ()
    with jax.numpy_rank_promotion("raise"):
        drawn_again = noises(strategy, zeros)
    np.testing.assert_allclose(drawn_again, stored, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", strategies())
def test_no_number_repeats(kind):
    result = noises(strategies()[kind], {"a": jnp.zeros((N, 6)), "b": jnp.zeros((N, 5))})
    assert len(np.unique(result)) == result.size
    assert not np.isin(noises(strategies()[kind], jnp.zeros((N, 6)), seed=4), result).any()


@pytest.mark.x64
def test_narrow_leaves_are_coloured_in_float32():
    zeros = {"a": jnp.zeros((N, 6), jnp.bfloat16), "b": jnp.zeros((N, 3), jnp.float32)}
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), zeros)
    strategy = strategies()["blocked"]
    narrow = noises(strategy, zeros)
    complete = noises(strategy, wide)
    np.testing.assert_allclose(narrow, complete, rtol=2**-8)
    np.testing.assert_array_equal(narrow[..., 6:], complete[..., 6:])


def test_seeds_side_by_side_are_those_alone():
    strategy = strategies()["blocked"]
    zeros = jnp.zeros((N, 4))

    def make(value):
        return noise.correlated(np.eye(N), key=value, rounds=T, strategy=strategy)

    keys = jnp.stack([key(3), key(4)])
    start = jax.vmap(lambda item: make(item).init(zeros))(keys)._replace(round=jnp.int32(0))
    axes = jax.tree.map(lambda _: 0, start)._replace(round=None)

    def step(state, _):
        def one(state):
            return make(state.key).update(zeros, state)

        updates, state = jax.vmap(one, in_axes=(axes,), out_axes=(0, axes))(state)
        return state, updates

    pair = np.asarray(jax.jit(lambda s: jax.lax.scan(step, s, None, length=T)[1])(start))
    for place, seed in enumerate((3, 4)):
        np.testing.assert_allclose(pair[:, place], noises(strategy, zeros, seed), atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (5e37 * np.eye(4), "diagonal from 5e.37 to 5e.37, with which noise would vanish"),
        (np.diag([1.0, 1.0, 1.0, 1e36]), "would vanish"),
        (1e-38 * np.eye(4), "would vanish or overflow"),
        (np.linalg.inv(0.01 * np.eye(12) + np.eye(12, k=-1)), "condition number"),
    ],
)
def test_strategies_that_float32_cannot_apply_are_refused(strategy, text):
    """Noise that vanishes sends gradients in clear; what cannot be inverted cannot be accounted."""
    with pytest.raises(ValueError, match=text):
        rounds.route(np.tril(strategy), len(strategy))


@pytest.mark.gate(1)
@pytest.mark.parametrize("kind", strategies())
def test_applied_agrees_with_exact_arithmetic(kind):
    """The sensitivity of the inverse of the rounded coefficients, in 50 digits."""
    import mpmath

    selection = rounds.route(strategies()[kind], T)
    if kind == "recursion":
        pytest.skip("its coefficients are the strategy: nothing is inverted")
    coefficients = np.float64(np.float32(selection.weights))
    if kind == "moving":
        inverse = np.diag(np.float64(np.float32(selection.scale)))
        for lag in range(1, coefficients.shape[1] + 1):
            inverse += np.diag(coefficients[lag:, lag - 1], -lag)
    else:
        inverse = coefficients[:T, :T]
    column = T // 3
    with mpmath.workdps(50):
        solved = mpmath.lu_solve(
            mpmath.matrix(inverse.tolist()), mpmath.matrix(np.eye(T)[column].tolist())
        )
        exact = np.array([float(value) for value in solved])
    np.testing.assert_allclose(rounds.applied(strategies()[kind])[:, column], exact, atol=1e-13)
