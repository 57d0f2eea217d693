"""A strategy over rounds: the streaming recursion against the dense inverse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.transforms import noise

N, ROUNDS, D = 3, 12, 5


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


@pytest.mark.parametrize("name", strategies())
def test_streaming_equals_the_dense_product(name):
    strategy = strategies()[name]
    factor = np.random.default_rng(1).normal(size=(N, N))
    normals = run(np.eye(N), None).astype(np.float64)
    expected = np.einsum("ts,ij,sjd->tid", np.linalg.inv(strategy), factor, normals)
    np.testing.assert_allclose(run(factor, strategy), expected, rtol=2e-4, atol=2e-4)


def test_only_the_band_is_kept_and_none_keeps_nothing():
    zeros = jnp.zeros((N, D), jnp.float32)
    widths = {"dense": ROUNDS - 1, "banded": 3, "prefix sums": 1, "identity": 0}
    for name, width in widths.items():
        transform = noise.correlated(
            np.eye(N), key=key(), rounds=ROUNDS, strategy=strategies()[name]
        )
        ((past,),) = transform.init(zeros).past
        assert past.shape == (width, N, D)
    assert noise.correlated(np.eye(N), key=key(), rounds=ROUNDS).init(zeros).past == ()


def test_past_the_end_is_nan():
    out = run(np.eye(N), strategies()["banded"], rounds=ROUNDS + 2)
    assert np.isfinite(out[:ROUNDS]).all() and np.isnan(out[ROUNDS:]).all()


def test_past_the_end_is_refused_where_the_round_is_known():
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
