"""DiSK and DP-PMLF against their recursions in NumPy loops, and what they cost: what D-SGD does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import signal

from dpjax.algorithms.disk import DiSK
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.pmlf import PMLF
from dpjax.engine.run import run
from dpjax.learning.query import RecordQuery
from dpjax.learning.samplers import Poisson
from dpjax.plans import plan
from dpjax.plans.optimizers import Chain
from dpjax.transforms.lowpass import FILTERS, lowpass
from tests.support import make_algorithm, make_config, make_problem

N = 2
B = 4
D = 3
T = 6
CLIP = 0.8
STEP = 0.3
W = np.array([[0.7, 0.3], [0.3, 0.7]])
RNG = np.random.default_rng(2)
X = RNG.normal(size=(T, N, B, D))
Y = RNG.normal(size=(T, N, B))
START = RNG.normal(size=(N, D))


def loss(w, x, y):
    return jnp.log1p(jnp.exp(-y * (x @ w)))


def gradient(w, x, y):
    return -y * x / (1 + np.exp(y * (x @ w)))


def ran(method, optimizer=None):
    """Models of the rounds, by the engine and the package's query, without noise."""
    algorithm = make_algorithm(
        method,
        {"mixing": jnp.asarray(W, jnp.float32)},
        query=RecordQuery(loss, None, CLIP, "flat", None),
        privatizer=None,
        optimizer=optax.sgd(STEP) if optimizer is None else optimizer,
        divisor=B,
    )
    state = algorithm.init(jnp.asarray(START, jnp.float32))
    step = jax.jit(algorithm.step)
    observed = []
    for t in range(T):
        batch = (jnp.asarray(X[t], jnp.float32), jnp.asarray(Y[t], jnp.float32), None)
        state, _ = step(jax.random.key(0), state, batch)
        observed.append(np.asarray(state.models))
    return np.stack(observed)


def clipped_mean(t, i, points, weights):
    """Of agent i's batch: every example's weighted gradients at the points, clipped."""
    total = np.zeros(D)
    for x, y in zip(X[t, i], Y[t, i], strict=True):
        g = sum(w * gradient(p, x, y) for w, p in zip(weights, points, strict=True))
        total += g * min(1.0, CLIP / np.linalg.norm(g))
    return total / B


def disk_by_hand(kappa, gamma, gain):
    x = START.copy()
    before = START.copy()
    g = np.zeros((N, D))
    observed = []
    c = (1 - kappa) / (kappa * gamma)
    for t in range(T):
        for i in range(N):
            points = (x[i] + gamma * (x[i] - before[i]), x[i])
            v = clipped_mean(t, i, points, (c, 1 - c))
            g[i] = v if t == 0 else (1 - gain) * g[i] + gain * v
        before = x
        x = W @ (x - STEP * g)
        observed.append(x)
    return np.stack(observed)


@pytest.mark.parametrize(
    ("method", "value"),
    [
        (DiSK(kappa=0.7, gamma=0.5), (0.7, 0.5, 0.7)),
        (DiSK(kappa=0.8, gamma=2.0, weights="opacus"), (0.8, 2.0, 0.2)),
        (DiSK(kappa=0.6, gamma=0.1), (0.6, 0.1, 0.6)),
        (DiSK(kappa=0.7, gamma=None), (0.7, 3 / 7, 0.7)),
    ],
)
def test_disk_is_its_recursion(method, value):
    np.testing.assert_allclose(ran(method), disk_by_hand(*value), rtol=2e-5, atol=2e-6)


def test_one_point_is_two_of_which_one_weighs_nothing():
    pair = ran(DiSK(kappa=0.7, gamma=3 / 7))
    np.testing.assert_allclose(ran(DiSK(kappa=0.7, gamma=None)), pair, rtol=2e-5, atol=2e-6)


def pmlf_by_hand(k, beta, b, a):
    """Algorithm 1 of the paper at every agent, models before the first round being the first."""
    models = [START.copy()]
    means = []
    observed = []
    weights = np.array([beta**j for j in range(k)])
    for t in range(T):
        points = [models[max(t - j, 0)] for j in range(k)]
        means.append([
            clipped_mean(t, i, [p[i] for p in points], weights / weights.sum()) for i in range(N)
        ])  # fmt: skip
        ones = signal.lfilter(b, [1, *a], np.ones(t + 1))[-1]
        m = signal.lfilter(b, [1, *a], np.array(means), axis=0)[-1] / ones
        models.append(W @ (models[-1] - STEP * m))
        observed.append(models[-1])
    return np.stack(observed)


@pytest.mark.parametrize(
    ("k", "beta", "name"), [(2, 0.1, "sgd"), (3, 0.9, "first v1"), (4, 1.0, "f5")]
)
def test_pmlf_is_its_algorithm(k, beta, name):
    b, a = FILTERS[name]
    got = ran(PMLF(length=k, beta=beta), optax.chain(lowpass(b, a), optax.sgd(STEP)))
    np.testing.assert_allclose(got, pmlf_by_hand(k, beta, b, a), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("method", [DiSK(), DiSK(gamma=None), PMLF(length=4)])
@pytest.mark.parametrize(
    "changes",
    [
        {"relation": "replace_agent", "design": "whisper"},
        {"relation": "zero_out_record", "sampler": Poisson(6.0, 4), "design": "independent"},
    ],
)
def test_guarantee_is_that_of_dsgd(method, changes):
    plans = [
        plan.make(make_config(**changes, method=case), W, counts=np.full(N, 24))
        for case in (DSGD(), method)
    ]
    assert plans[0].guarantee == plans[1].guarantee
    for name in plans[0].arrays:
        np.testing.assert_array_equal(plans[0].arrays[name], plans[1].arrays[name])


@pytest.mark.slow
def test_one_agent_trains_as_dp_pmlf_with_its_filter():
    filter_ = FILTERS["first v1"]
    config = make_config(
        method=PMLF(length=2), relation="zero_out_record", rounds=5, design="independent",
        sampler=Poisson(6.0, 8), optimizer=Chain(
            lambda step: optax.chain(lowpass(*filter_), optax.sgd(step)), 0.5
        ),
    )  # fmt: skip
    training_plan = plan.make(config, np.eye(1), counts=np.array([40]))
    result = run(training_plan, make_problem(1, records=40), seeds=[0])
    assert np.isfinite(result.metrics["test_loss"]).all()
    assert result.guarantees[0].epsilon <= 8.0


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (DiSK, {"kappa": 1.0}, "kappa is 1.0; give a number below 1"),
        (DiSK, {"kappa": 1e-30}, "kappa is 1e-30"),
        (DiSK, {"gamma": 0.0}, "gamma is 0"),
        (DiSK, {"gamma": 1e300}, "gamma is 1e.300"),
        (DiSK, {"weights": "both"}, "weights is 'both'"),
        (PMLF, {"length": 1}, "length is 1"),
        (PMLF, {"length": 10**9}, "length is 1000000000"),
        (PMLF, {"beta": 1.5}, "beta is 1.5; give .* at most 1"),
    ],
)
def test_what_is_no_filter_is_refused(kind, value, text):
    with pytest.raises(ValueError, match=text):
        kind(**value)
