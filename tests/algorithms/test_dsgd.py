"""D-SGD against its formula, gradient descent, and the chain's order."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.algorithms.dsgd import DSGD
from dpjax.topology import graphs, mixing
from tests.support import composed

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
    algorithm = composed(jnp.asarray(matrix, jnp.float32), quadratic, optax.scale(-0.1))
    state, info = run(algorithm, jnp.asarray(x), jnp.asarray(target), 1)
    sent = x - 0.1 * (x - target)
    np.testing.assert_allclose(info.messages, sent, rtol=1e-6)
    np.testing.assert_allclose(state.models, matrix @ sent, rtol=1e-5, atol=1e-6)
    assert int(state.round) == 1


def test_complete_graph_is_centralised_gradient_descent():
    n = 8
    rounds = 30
    step = 0.2
    matrix = mixing.metropolis_hastings(graphs.complete(n))
    targets = np.random.default_rng(1).normal(size=(n, 4)).astype(np.float32)
    algorithm = composed(jnp.asarray(matrix, jnp.float32), quadratic, optax.scale(-step))
    state, _ = run(algorithm, jnp.zeros((n, 4)), jnp.asarray(targets), rounds)
    central = np.zeros(4)
    for _ in range(rounds):
        central -= step * (central - targets.mean(axis=0))
    np.testing.assert_allclose(state.models, np.tile(central, (n, 1)), rtol=2e-5, atol=1e-6)


def test_schedule_of_mixing_matrices_is_followed():
    schedule = np.stack([np.eye(2), np.full((2, 2), 0.5)]).astype(np.float32)
    algorithm = composed(schedule, quadratic, optax.scale(0.0))
    start = jnp.asarray([[0.0], [2.0]])
    state, _ = run(algorithm, start, start, 1)
    np.testing.assert_array_equal(state.models, start)
    state, _ = run(algorithm, start, start, 2)
    np.testing.assert_array_equal(state.models, [[1.0], [1.0]])


def test_pytrees_keep_structure_and_dtype_and_jit_equals_eager():
    matrix = jnp.asarray(mixing.metropolis_hastings(graphs.ring(4)), jnp.float32)
    params = {"w": jnp.ones((4, 2, 3), jnp.bfloat16), "b": [jnp.ones((4,), jnp.float32)]}
    batch = jnp.arange(4, dtype=jnp.float32)
    grads_cast = lambda p, b: jax.tree.map(lambda q: (q * b).astype(q.dtype), p)  # noqa: E731
    algorithm = composed(matrix, grads_cast, optax.scale(-0.5))
    state = algorithm.init(params)
    eager, _ = algorithm.step(KEY, state, batch)
    jitted, _ = jax.jit(algorithm.step)(KEY, state, batch)
    assert jax.tree.structure(eager.models) == jax.tree.structure(params)
    for a, b, p in zip(*map(jax.tree.leaves, (eager.models, jitted.models, params)), strict=True):
        assert a.dtype == b.dtype == p.dtype
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-2)


def test_unstacked_parameters_are_refused():
    algorithm = composed(np.eye(4), lambda model, batch: model, optax.scale(-0.1))
    state = algorithm.init({"w": jnp.zeros((3, 2))})
    with pytest.raises(ValueError, match=r"'w'.*shape \(3, 2\).*leading axis of n=4 agents"):
        algorithm.step(KEY, state, jnp.zeros(3))


def test_gossip_steps_send_every_step_and_mix_as_often():
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(6, 0.6, 0))
    x, target = np.random.default_rng(0).normal(size=(2, 6, 3)).astype(np.float32)
    algorithm = composed(matrix, quadratic, optax.scale(-0.1), method=DSGD(gossip_steps=3))
    state, info = run(algorithm, jnp.asarray(x), jnp.asarray(target), 1)
    sent = x - 0.1 * (x - target)
    for step in range(3):
        expected = np.linalg.matrix_power(matrix, step) @ sent
        np.testing.assert_allclose(info.messages[step], expected, rtol=1e-5, atol=1e-6)
    final = np.linalg.matrix_power(matrix, 3) @ sent
    np.testing.assert_allclose(state.models, final, rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(state.models) - matrix @ sent).max() > 1e-2
    with pytest.raises(ValueError, match="gossip_steps is 0"):
        DSGD(gossip_steps=0)
