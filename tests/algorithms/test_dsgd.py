"""D-SGD against its formula, gradient descent, and the chain's order."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.algorithms.dsgd import dsgd
from dpjax.topology import graphs, mixing

KEY = jax.random.key(0)


def quadratic(params, target):
    return params - target


def run(algorithm, params, batch, rounds):
    state = algorithm.init(params)
    for _ in range(rounds):
        state, info = algorithm.step(KEY, state, batch)
    return state, info


def test_one_round_is_adapt_then_combine():
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(6, 0.6, 0))
    rng = np.random.default_rng(0)
    x, target = rng.normal(size=(2, 6, 3)).astype(np.float32)
    algorithm = dsgd(jnp.asarray(matrix, jnp.float32), optax.scale(-0.1), quadratic)
    state, info = run(algorithm, jnp.asarray(x), jnp.asarray(target), 1)
    sent = x - 0.1 * (x - target)
    np.testing.assert_allclose(info.messages, sent, rtol=1e-6)
    np.testing.assert_allclose(state.params, matrix @ sent, rtol=1e-5, atol=1e-6)
    assert int(state.round) == 1


def test_complete_graph_is_centralised_gradient_descent():
    n, rounds, step = 8, 30, 0.2
    matrix = mixing.metropolis_hastings(graphs.complete(n))
    targets = np.random.default_rng(1).normal(size=(n, 4)).astype(np.float32)
    algorithm = dsgd(jnp.asarray(matrix, jnp.float32), optax.scale(-step), quadratic)
    state, _ = run(algorithm, jnp.zeros((n, 4)), jnp.asarray(targets), rounds)
    central = np.zeros(4)
    for _ in range(rounds):
        central -= step * (central - targets.mean(axis=0))
    np.testing.assert_allclose(state.params, np.tile(central, (n, 1)), rtol=2e-5, atol=1e-6)


def test_schedule_of_mixing_matrices_is_followed():
    schedule = np.stack([np.eye(2), np.full((2, 2), 0.5)]).astype(np.float32)
    algorithm = dsgd(jnp.asarray(schedule), optax.scale(0.0), quadratic)
    start = jnp.asarray([[0.0], [2.0]])
    state, _ = run(algorithm, start, start, 1)
    np.testing.assert_array_equal(state.params, start)
    state, _ = run(algorithm, start, start, 2)
    np.testing.assert_array_equal(state.params, [[1.0], [1.0]])


def test_pytrees_keep_structure_and_dtype_and_jit_equals_eager():
    matrix = jnp.asarray(mixing.metropolis_hastings(graphs.ring(4)), jnp.float32)
    params = {"w": jnp.ones((4, 2, 3), jnp.bfloat16), "b": [jnp.ones((4,), jnp.float32)]}
    algorithm = dsgd(matrix, optax.scale(-0.5), lambda p, b: jax.tree.map(lambda q: q * b, p))
    batch = jnp.arange(4, dtype=jnp.float32)
    grads_cast = lambda p, b: jax.tree.map(lambda q: (q * b).astype(q.dtype), p)  # noqa: E731
    algorithm = dsgd(matrix, optax.scale(-0.5), grads_cast)
    state = algorithm.init(params)
    eager, _ = algorithm.step(KEY, state, batch)
    jitted, _ = jax.jit(algorithm.step)(KEY, state, batch)
    assert jax.tree.structure(eager.params) == jax.tree.structure(params)
    for a, b, p in zip(*map(jax.tree.leaves, (eager.params, jitted.params, params)), strict=True):
        assert a.dtype == b.dtype == p.dtype
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-2)


def test_unstacked_parameters_are_refused():
    algorithm = dsgd(jnp.eye(4), optax.scale(-0.1), quadratic)
    with pytest.raises(ValueError, match="params.*stack the 4 agents"):
        algorithm.init({"w": jnp.zeros((3, 2))})


def test_gossip_steps_send_every_step_and_mix_as_often():
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(6, 0.6, 0))
    x, target = np.random.default_rng(0).normal(size=(2, 6, 3)).astype(np.float32)
    algorithm = dsgd(jnp.asarray(matrix, jnp.float32), optax.scale(-0.1), quadratic, gossip_steps=3)
    state, info = run(algorithm, jnp.asarray(x), jnp.asarray(target), 1)
    sent = x - 0.1 * (x - target)
    for step in range(3):
        expected = np.linalg.matrix_power(matrix, step) @ sent
        np.testing.assert_allclose(info.messages[step], expected, rtol=1e-5, atol=1e-6)
    final = np.linalg.matrix_power(matrix, 3) @ sent
    np.testing.assert_allclose(state.params, final, rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(state.params) - matrix @ sent).max() > 1e-2
    with pytest.raises(ValueError, match="gossip_steps is 0"):
        dsgd(jnp.asarray(matrix), optax.scale(-0.1), quadratic, gossip_steps=0)
