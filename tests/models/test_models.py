"""Losses against closed forms; models keep their promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.models import layer_norms, linear, losses, mlp
from tests.support import with_norms


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
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 5)))
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(params))
    assert model.apply(params, jnp.ones((7, 5))).shape == (7,)
    network = mlp.MLP(hidden=(8, 4), outputs=3)
    params = jax.jit(network.init)(jax.random.key(0), jnp.zeros((1, 5)))
    assert network.apply(params, jnp.ones((7, 5))).shape == (7, 3)
    assert hash(network) == hash(mlp.MLP(hidden=(8, 4), outputs=3))


@pytest.mark.parametrize(("activation", "function"), [("tanh", np.tanh), ("relu", None)])
def test_mlp_is_its_formula(activation, function):
    function = function or (lambda z: np.maximum(z, 0))
    network = mlp.MLP(hidden=(4,), outputs=None, activation=activation)
    x = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    params = jax.jit(network.init)(jax.random.key(0), x)
    first = params["params"]["Dense_0"]
    last = params["params"]["Dense_1"]
    want = function(x @ first["kernel"] + first["bias"]) @ last["kernel"] + last["bias"]
    assert network.apply(params, x).shape == (7,)
    np.testing.assert_allclose(network.apply(params, x), want[:, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("network", "loss"),
    [
        (mlp.MLP(hidden=(6,), outputs=None, activation="relu"), losses.squared),
        pytest.param(
            mlp.MLP(hidden=(6, 4), outputs=3), losses.cross_entropy, marks=pytest.mark.slow
        ),
        (mlp.MLP(hidden=(), outputs=None), losses.squared),
    ],
)
def test_weighted_gradients_are_those_of_autodiff(network, loss):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(9, 5)), jnp.float32)
    y = jnp.asarray(rng.integers(0, 3, 9), jnp.float32)
    params = jax.jit(network.init)(jax.random.key(2), x)

    def one(params, x, y):
        return loss(network.apply(params, x[None])[0], y)

    function = jax.jit(jax.vmap(jax.grad(one), (None, 0, 0)))(params, x, y)
    flat = np.concatenate([np.reshape(leaf, (9, -1)) for leaf in jax.tree.leaves(function)], 1)
    norms = np.linalg.norm(flat.astype(np.float64), axis=1)
    gradients = layer_norms.Gradients(network.apply, loss)
    got, observed = with_norms(gradients, params, x, y, lambda norms: 1 / (1 + norms))
    np.testing.assert_allclose(observed, norms, rtol=1e-5)
    want = jax.tree.map(lambda leaf: np.tensordot(1 / (1 + norms), leaf, 1), function)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
