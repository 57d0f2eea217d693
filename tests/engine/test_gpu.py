"""What only a GPU can get wrong: precision of cancelling noise, agreement with the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from dpjax.engine.run import run
from dpjax.mechanism import factorization, spatial
from dpjax.plans import plan
from dpjax.topology import gossip, graphs, mixing
from dpjax.transforms import clipping, noise
from tests.support import make_config, make_problem
from tests.transforms import rounding

pytestmark = pytest.mark.gpu


def on_cpu():
    return jax.default_device(jax.devices("cpu")[0])


@pytest.mark.parametrize("name", [*rounding.ROUTES, *rounding.WHOLE])
def test_neighbouring_sums_are_one_clip_norm_apart(name):
    total = (rounding.ROUTES | rounding.WHOLE)[name]
    for form in rounding.FORMS:
        assert 0.99 < rounding.distance(total, form) <= rounding.CLIP


def test_neighbouring_sums_in_single_precision_are_further_apart(monkeypatch):
    rounding.in_single_precision(monkeypatch)
    total = rounding.ROUTES["records one by one"]
    assert rounding.distance(total) > 1.1 * rounding.CLIP


@pytest.mark.parametrize("method", clipping.CLIPPINGS)
@pytest.mark.parametrize(("size", "n"), [(2, 1), (16, 4), (100, 4), (5_000, 4)])
def test_clip_holds_where_number_formed_twice_differs(size, n, method):
    clip = rounding.of_remainders(1.0, method)
    rounding.check_bound(clip, rounding.factors(size, n), 1.0)


def test_gpu_is_what_runs():
    assert jax.default_backend() == "gpu"


def test_noise_that_cancels_still_cancels():
    """With ten-bit mantissas what is left after mixing would be hundreds of times too much."""
    matrix = mixing.metropolis_hastings(graphs.complete(20))
    covariance = spatial.whisper(matrix, 1.0)
    factor = scipy.linalg.sqrtm(covariance).real.astype(np.float32)
    chain = noise.correlated(factor, key=jax.random.key(0), rounds=4)
    zero = jnp.zeros((20, 50_000))
    drawn, _ = chain.update(zero, chain.init(zero))
    left = np.sum(np.square(np.asarray(gossip.mix(jnp.asarray(matrix, jnp.float32), drawn))))
    np.testing.assert_allclose(left / 50_000, spatial.energy(covariance, matrix), rtol=0.05)
    coarse = factor.astype(jnp.bfloat16).astype(np.float32)
    chain = noise.correlated(coarse, key=jax.random.key(0), rounds=4)
    drawn, _ = chain.update(zero, chain.init(zero))
    invalid = np.sum(np.square(np.asarray(gossip.mix(jnp.asarray(matrix, jnp.float32), drawn))))
    assert invalid > 1.5 * left


def test_normals_are_cpus():
    chain = noise.correlated(np.eye(8, dtype=np.float32), key=jax.random.key(3), rounds=2)
    zero = jnp.zeros((8, 1000))
    here, _ = chain.update(zero, chain.init(zero))
    with on_cpu():
        chain = noise.correlated(np.eye(8, dtype=np.float32), key=jax.random.key(3), rounds=2)
        present, _ = chain.update(jnp.zeros((8, 1000)), chain.init(jnp.zeros((8, 1000))))
    np.testing.assert_allclose(here, present, rtol=1e-5, atol=1e-5)


def test_solver_agrees_with_cpu():
    factor = mixing.metropolis_hastings(graphs.erdos_renyi(60, 0.2, 0))
    here = factorization.minimize_trace(factor=factor)
    with on_cpu():
        optimum = factorization.minimize_trace(factor=factor)
    assert here.gap < 1e-8 and optimum.gap < 1e-8
    np.testing.assert_allclose(here.value, optimum.value, rtol=1e-8)


@pytest.mark.parametrize("relation", ["replace_agent", "replace_record"])
def test_runs_agree_with_cpu(relation):
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(6, 0.5, 0))
    training_plan = plan.make(make_config(relation=relation), matrix)
    problem = make_problem(6)
    here = run(training_plan, problem, seeds=[0, 1])
    with on_cpu():
        result = run(training_plan, problem, seeds=[0, 1])
    for name, value in result.metrics.items():
        np.testing.assert_allclose(here.metrics[name], value, rtol=2e-2, atol=1e-3)
    again = run(training_plan, problem, seeds=[0, 1])
    for name, value in here.metrics.items():
        np.testing.assert_array_equal(again.metrics[name], value)
