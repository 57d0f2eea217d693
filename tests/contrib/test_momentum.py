"""Momentum at equal effective steps, and Muon on kernels of any number of axes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.contrib.rules import momentum, muon
from dpjax.plans.optimizers import Chain
from dpjax.transforms.lowpass import FILTERS, lowpass

ROUNDS = 400
STEP = 0.3


def moved(link, gradients):
    """The updates of the rounds for scalars."""
    state = link.init(jnp.zeros(()))
    updates = []
    for gradient in gradients:
        update, state = link.update(jnp.asarray(gradient, jnp.float32), state)
        updates.append(float(update))
    return np.array(updates)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_one_gradient_moves_model_by_effective_step(beta, nesterov):
    link = momentum(STEP, beta, nesterov=nesterov)
    pulse = np.eye(1, ROUNDS // 4)[0]
    assert moved(link, pulse).sum() == pytest.approx(-STEP, rel=1e-4)
    scheduled = momentum(lambda count: STEP, beta, nesterov=nesterov)
    np.testing.assert_allclose(moved(scheduled, pulse), moved(link, pulse), rtol=1e-5)
    # The broken twin: optax's own step is longer by 1 / (1 - beta).
    raw = moved(optax.sgd(STEP, momentum=beta, nesterov=nesterov), pulse).sum()
    assert raw == pytest.approx(-STEP / (1 - beta), rel=1e-4)


def test_corrected_for_its_start_it_is_filter():
    gradients = np.random.default_rng(0).normal(size=30)
    plain = moved(momentum(STEP, 0.9), gradients) / (1 - 0.9 ** np.arange(1, 31))
    filtered = optax.chain(lowpass(*FILTERS["momentum"]), optax.sgd(STEP))
    np.testing.assert_allclose(moved(filtered, gradients), plain, rtol=1e-4, atol=1e-6)


def tree(agents, seed):
    random = np.random.default_rng(seed)
    shapes = {"conv": (3, 3, 4, 8), "dense": (6, 5), "bias": (5,)}
    return {
        name: jnp.asarray(random.normal(size=(agents, *shape)), jnp.float32)
        for name, shape in shapes.items()
    }


@pytest.mark.slow
def test_muon_is_every_agents_own_in_chain():
    part = Chain(muon, step_size=0.02)
    n = 3
    chain = part.chain(part.arrays())
    models = tree(n, 0)
    state = chain.init(models)
    own = []
    link = muon(0.02)
    of_one = jax.jit(link.update)
    for seed in (1, 2):
        updates, state = jax.jit(chain.update)(tree(n, seed), state, models)
    for i in range(n):
        take = lambda value, i=i: jax.tree.map(lambda leaf: leaf[i], value)  # noqa: E731
        inner = link.init(take(models))
        for seed in (1, 2):
            single, inner = of_one(take(tree(n, seed)), inner, take(models))
        own.append(single)
    for name, leaf in updates.items():
        np.testing.assert_allclose(
            leaf, np.stack([item[name] for item in own]), rtol=2e-3, atol=2e-5
        )
    for name, width in (("conv", 8), ("dense", 5)):
        values = np.linalg.svd(np.asarray(updates[name][0]).reshape(-1, width), compute_uv=False)
        assert (0.5 * 0.02 < values).all() and (values < 1.4 * 0.02).all(), name


@pytest.mark.parametrize("make", [momentum, muon])
@pytest.mark.parametrize("beta", [-0.1, 1.0])
def test_what_is_no_momentum_is_refused(make, beta):
    with pytest.raises(ValueError, match=f"beta is {beta}"):
        make(0.1, beta)


@pytest.mark.parametrize("make", [momentum, muon])
@pytest.mark.parametrize("step", ["x", None, float("nan")])
def test_what_is_no_step_is_refused(make, step):
    with pytest.raises(ValueError, match="step_size is"):
        make(step)
