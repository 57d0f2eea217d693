"""Learned clip norms in a run: the plan's guarantee, and what they learn."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.algorithms import sketches
from dpjax.algorithms.federated import Federated
from dpjax.contrib.rules import UpdateRule
from dpjax.contrib.scaled import Quantile, Scaled
from dpjax.contrib.sketches import Count, FixedFrame
from dpjax.engine.run import run
from dpjax.plans import dependence, noise, plan
from dpjax.plans.optimizers import Sgd
from dpjax.topology import graphs, mixing
from dpjax.transforms import clipping
from tests.support import make_config, make_problem

N = 4
D = 6
C = 0.5
NETWORK = mixing.metropolis_hastings(graphs.complete(N))
RULE = Quantile(clip_norm=C, first=50.0, rate=0.5)
CASES = {
    "clip norm": Scaled(sketches.Learned(4, probes=2), RULE),
    "fixed": Scaled(FixedFrame(4), RULE),
    "count": Scaled(Count(4), RULE),
}


@functools.lru_cache
def states(name, rounds=12):
    """Three states after means of anything, as a server has them."""
    part = CASES[name]
    first = part.start(jax.random.key(0), D, jnp.float32)

    def step(state, value):
        mean, key = value
        gradient = part.projection(state).decode(mean)
        return part.learn(state, gradient, key, mean), None

    means = 0.2 * np.random.default_rng(0).normal(size=(3, rounds, part.k)).astype(np.float32)
    keys = jax.random.split(jax.random.key(1), rounds)
    run = jax.jit(jax.vmap(lambda argument: jax.lax.scan(step, first, (argument, keys))[0]))
    result = run(jnp.asarray(means))
    return [jax.tree.map(lambda leaf, i=i: leaf[i], result) for i in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_decoding_returns_encoded_value_and_stated_noise(name):
    part = CASES[name]
    state = states(name)[0]
    projection = part.projection(state)
    vector = projection.inner.decode(jnp.asarray([1e-3, 2e-3, 0.0, -1e-3], jnp.float32))
    sent = projection.encode(vector)
    assert sent.shape == (part.k,) and sent.dtype == jnp.float32
    plain = projection.inner.decode(projection.inner.encode(vector))
    np.testing.assert_allclose(projection.decode(sent), plain, rtol=1e-4, atol=1e-8)
    matrix = np.asarray(jax.vmap(projection.decode)(jnp.eye(part.k, dtype=jnp.float32)), float)
    np.testing.assert_allclose(projection.diagonal(), (matrix**2).sum(0), rtol=1e-4)
    np.testing.assert_allclose(part.noise(state, 6.0, 3), 2 * (matrix**2).sum(0), rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_one_gradient_moves_scaled_sum_by_clip_norm(name):
    part = CASES[name]
    clip = clipping.per_agent(C)
    rng = np.random.default_rng(1)
    values = jnp.asarray(rng.normal(size=(40, D)) * 10.0 ** rng.uniform(-4, 4, (40, 1)), "f")
    for state in states(name):
        projection = part.projection(state)
        sent = clip.update(jax.vmap(projection.encode)(values), None)[0]
        assert np.linalg.norm(np.asarray(sent, float), axis=1).max() <= C


@dataclasses.dataclass(frozen=True)
class Raw(Federated):
    """The twin: the clip norm is learned from sums without their noise."""

    def send(self, ctx, public_state, emission, noisy):
        raw = ctx.query(public_state.models, ctx.batch, self._encoder(public_state.memory)).total
        return noisy, jnp.mean(raw, axis=0)

    def absorb(self, ctx, public_state, carry, received):
        models, memory = super().absorb(ctx, public_state, carry, received)
        size = self.sketch.quantile.learn(public_state.memory.sketch.size, carry)
        return models, memory._replace(sketch=memory.sketch._replace(size=size))


@pytest.mark.mutant
def test_scales_of_gradients_are_refused():
    for part in CASES.values():
        dependence.check_dependence(Federated(sketch=part, centre=0.9), Sgd(0.1), (N, N))
    with pytest.raises(ValueError, match="depends on data by another way"):
        dependence.check_dependence(Raw(sketch=CASES["clip norm"]), Sgd(0.1), (N, N))


@pytest.mark.slow
def test_run_learns_its_clip_norm_at_same_loss():
    """From a hundred times too large, where noise is all there is; the guarantee is the plan's."""
    rule = Quantile(clip_norm=C, first=50.0, rate=0.5, share=0.5)
    problem = make_problem(N)
    losses = []
    epsilons = set()
    for quantile in (rule, dataclasses.replace(rule, rate=1e-6)):
        sketch = Scaled(sketches.Learned(5), quantile)
        config = make_config(
            design="independent", method=Federated(sketch=sketch), rounds=60, epsilon=1000.0,
            clip_norm=C, step_size=0.1,
        )  # fmt: skip
        training_plan = plan.make(config, NETWORK)
        result = run(training_plan, problem, seeds=[0, 1], eval_every=60)
        losses.append(result.metrics["test_loss"][-1].mean())
        epsilons.add(training_plan.guarantee.epsilon)
    plain = make_config(
        design="independent", method=Federated(), rounds=60, epsilon=1000.0, clip_norm=C
    )
    assert epsilons == {plan.make(plain, NETWORK).guarantee.epsilon}
    assert losses[0] < 0.7 * losses[1]


def left(aligned, rounds=60):
    """Of noise that is taken back in the next round, squared, in a space of two directions."""
    part = sketches.Learned(2, probes=0, share=1.0, forgetting=0.8, aligned=aligned)
    rng = np.random.default_rng(3)
    state = part.start(jax.random.key(0), D, jnp.float32)
    total = np.zeros(D)
    before = np.zeros(2)
    learn = jax.jit(part.learn)
    past = []
    for t in range(rounds):
        frame = np.asarray(part.projection(state).columns, float)
        np.testing.assert_allclose(frame.T @ frame, np.eye(2), atol=1e-5)
        z = rng.normal(size=2)
        total = total + frame @ (z - before)
        before = z
        past.append(total @ total)
        gradient = np.concatenate([rng.normal(size=2), np.zeros(D - 2)])
        state = learn(state, jnp.asarray(gradient, jnp.float32), jax.random.key(t))
    return np.mean(past[10:])


def test_aligned_frames_let_noise_over_rounds_cancel():
    """Same spaces, same draws: what stays of it, beside columns as they come."""
    assert left(True) < left(False) / 4


def test_noise_over_rounds_of_passed_variance_is_refused():
    """Its loss is the strategy's, whatever the frames; benchmarks/_moving.py has the proof."""
    method = Federated(sketch=sketches.Learned(4, probes=1, aligned=True))
    options = dict(
        noise=noise.PrefixSum(bands=2), rounds=8, participation=(2, 4), relation="zero_out_record"
    )
    training_plan = plan.make(make_config(method=method, **options), NETWORK)
    complete = plan.make(make_config(**options), NETWORK)
    assert training_plan.guarantee.epsilon == complete.guarantee.epsilon
    np.testing.assert_array_equal(training_plan.noise.factor, complete.noise.factor)
    config = make_config(method=method, **options)
    with pytest.raises(ValueError, match="of noise PrefixSum changes by round"):
        dataclasses.replace(config, optimizer=UpdateRule("adam").chain(0.1))


def test_refusals():
    for invalid, named in (
        (lambda: Scaled(5, RULE), "sketch"),
        (lambda: Scaled(sketches.Learned, RULE), "sketch"),
        (lambda: Scaled(FixedFrame(4), 0.5), "quantile"),
        (lambda: sketches.Learned(4, floor=-1.0), "floor"),
        (lambda: sketches.Learned(4, as_published=True, floor=1.0), "as_published"),
    ):
        with pytest.raises(ValueError, match=named):
            invalid()
