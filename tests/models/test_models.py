"""Losses against closed forms; models keep their promises."""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.models import linear, losses, mlp


def test_logistic_is_stable_and_right():
    score = jnp.asarray([-1000.0, -1.0, 0.0, 2.0, 1000.0])
    got = losses.logistic(score, jnp.asarray([1, 1, -1, -1, 1]))
    want = [1000.0, np.log1p(np.e), np.log(2), np.log1p(np.exp(2)), 0.0]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_cross_entropy_and_scores():
    logits = jnp.asarray([[2.0, 0.0, -1.0], [0.0, 0.0, 0.0]])
    got = losses.cross_entropy(logits, jnp.asarray([0, 2]))
    want = [np.log(np.exp([0.0, -2.0, -3.0]).sum()), np.log(3)]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_array_equal(losses.multiclass_accuracy(logits, jnp.asarray([0, 2])), [1, 0])
    np.testing.assert_array_equal(
        losses.sign_accuracy(jnp.asarray([1.0, -1.0, 0.0]), jnp.asarray([1, 1, 1])), [1, 0, 0]
    )
    np.testing.assert_allclose(losses.squared(jnp.asarray([1.0]), jnp.asarray([3])), [4.0])


def test_linear_starts_at_zero_and_shapes_hold():
    model = linear.Linear()
    params = model.init(jax.random.key(0), jnp.zeros((1, 5)))
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(params))
    assert model.apply(params, jnp.ones((7, 5))).shape == (7,)
    network = mlp.MLP(hidden=(8, 4), outputs=3)
    params = network.init(jax.random.key(0), jnp.zeros((1, 5)))
    assert network.apply(params, jnp.ones((7, 5))).shape == (7, 3)
    assert hash(network) == hash(mlp.MLP(hidden=(8, 4), outputs=3))
