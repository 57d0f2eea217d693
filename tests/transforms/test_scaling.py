"""Scales from released numbers keep the plan's sensitivity; from raw gradients they do not."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from dpjax.algorithms.exchange import Server
from dpjax.contrib.scaled import Quantile
from dpjax.plans import dependence
from dpjax.plans.optimizers import Sgd
from dpjax.protocols import Emission, Method
from dpjax.transforms import clipping

F32 = np.float32
C = 0.5
RULES = [
    Quantile(clip_norm=C, first=3.0),
    Quantile(clip_norm=C, first=1e-3, share=0.9),
]


def ellipsoid(moments, weights=1.0, least=1e-3):
    """D [k], D^2 in proportion to sqrt(m / w): the least sum of w D^2 for noise on vectors s / D.

    Scaled so that the mean square of s / D is that of s. Small moments are raised to a share.
    """
    raised = jnp.maximum(moments / jnp.max(moments), least)
    total = jnp.sum(jnp.sqrt(raised * weights))
    return jnp.sqrt(jnp.sqrt(raised / weights) * total / jnp.sum(raised))


def clipped(vectors):
    """The plan's clip, one vector a record."""
    clip = clipping.per_agent(C)
    return np.asarray(clip.update(jnp.asarray(vectors), clip.init(vectors))[0], np.float64)


def total(rule, state, shape, records):
    """What is summed before noise, [k']."""
    return clipped(jax.vmap(lambda s: rule.encode(state, s / shape))(records)).sum(axis=0)


def moved(rule, state, shape, records):
    """How far the sum moves at most when one record is taken out, scales held."""
    complete = total(rule, state, shape, records)
    without = [total(rule, state, shape, np.delete(records, i, axis=0)) for i in range(3)]
    return max(np.linalg.norm(complete - other) for other in without)


@pytest.mark.parametrize("rule", RULES, ids=["quantile", "tight"])
def test_one_record_moves_sum_by_clip_norm(rule):
    """At any public state and shape; decoded, the ellipsoid is that of the noise."""
    rng = np.random.default_rng(0)
    records = (rng.normal(size=(5, 8)) * 10.0 ** rng.uniform(-3, 3, (5, 1))).astype(F32)
    for bound in (1e-6, 0.2, 3.0, 1e6):
        state = rule.start()._replace(bound=jnp.float32(bound))
        shape = ellipsoid(jnp.asarray(10.0 ** rng.uniform(-6, 3, 8), jnp.float32))
        assert moved(rule, state, shape, records) <= C
        # Whoever decodes multiplies noise and signal alike.
        gain = float(rule.gain(state))
        ones = jnp.ones(rule.size(8), jnp.float32)
        np.testing.assert_allclose(rule.decode(state, ones), np.full(8, gain), rtol=1e-6)


@pytest.mark.mutant
def test_scales_from_raw_gradients_move_sum_further():
    """The twin: the shape, or the clip norm, read off the very records that are summed."""
    rule = RULES[0]
    records = np.full((5, 8), 1e-2, F32)
    records[0] = [30.0] + [1e-2] * 7

    def raw(value):
        shape = ellipsoid(jnp.asarray(np.mean(np.square(value), axis=0), jnp.float32))
        state = rule.start()._replace(bound=jnp.float32(np.linalg.norm(value, axis=1).max()))
        return state, shape

    def released(argument, state, shape):
        return np.asarray(shape * rule.decode(state, total(rule, state, shape, argument)), float)

    state, shape = raw(records)
    first = released(records, state, shape)
    other = released(records[1:], *raw(records[1:]))
    units = np.asarray(shape) * float(rule.gain(state))
    assert np.linalg.norm((first - released(records[1:], state, shape)) / units) <= C
    # The noise is scaled for one of the two only, and the other's tells which it was.
    twin = np.asarray(raw(records[1:])[1]) * float(rule.gain(raw(records[1:])[0]))
    assert np.linalg.norm((first - other) / twin) > 3 * C


def test_noise_as_printed_has_another_sensitivity_than_clip():
    """Equation (40): clip in L2, then noise sigma Z; C / min(sigma) and not C."""
    moments = jnp.asarray([1.0, 1e-4, 1e-4], jnp.float32)
    sigma = np.sqrt(np.asarray(moments) * 3 / np.asarray(moments).sum())
    rare = clipped(np.array([[0.0, 5.0, 0.0]], F32))[0]
    assert np.linalg.norm(rare / sigma) > 10 * C
    shape = np.asarray(ellipsoid(moments))
    assert np.linalg.norm(clipped(np.array([[0.0, 5.0, 0.0]], F32) / shape)[0]) <= C


def test_ellipsoid_is_best_at_equal_sensitivity():
    """Against a search over all shapes; round noise and the printed one add more."""
    rng = np.random.default_rng(1)
    for _ in range(4):
        m = 10.0 ** rng.uniform(-2, 1, 5)
        w = 10.0 ** rng.uniform(-1, 1, 5)
        for cost in (np.ones(5), w):
            result = ellipsoid(
                jnp.asarray(m, jnp.float32), weights=jnp.asarray(cost, jnp.float32), least=1e-6
            )
            squares = np.asarray(result, float) ** 2
            assert (m / squares).sum() == pytest.approx(m.sum(), rel=1e-5)

            def noise(logs, m=m, cost=cost):
                shape = np.exp(logs)
                return (cost * shape).sum() * (m / shape).sum() / m.sum()

            starts = [rng.normal(size=5) for _ in range(4)]
            best = min(optimize.minimize(noise, start).fun for start in starts)
            assert (cost * squares).sum() == pytest.approx(best, rel=1e-5)
            assert noise(np.zeros(5)) > 1.02 * best
        plain = np.asarray(ellipsoid(jnp.asarray(m, jnp.float32), least=1e-6), float) ** 2
        assert plain.sum() == pytest.approx(np.sqrt(m).sum() ** 2 / m.sum(), rel=1e-5)
        # In proportion to the second moment: as much as round noise, and best in Adam's units.
        printed = m * 5 / m.sum()
        assert printed.sum() == pytest.approx(5.0) and (m / printed).sum() == pytest.approx(m.sum())
        adam = ellipsoid(
            jnp.asarray(m, jnp.float32), weights=jnp.asarray(1 / m, jnp.float32), least=1e-6
        )
        np.testing.assert_allclose(np.square(adam), printed, rtol=1e-5)


def lengths(rng, rounds, batch, k, spread):
    """Records [T, B, k] of log-normal lengths around 1 and any direction."""
    drawn = rng.normal(size=(rounds, batch, k))
    drawn /= np.linalg.norm(drawn, axis=-1, keepdims=True)
    return (drawn * np.exp(spread * rng.normal(size=(rounds, batch, 1)))).astype(F32)


def learned(rule, records, deviation, seed=0):
    """Bounds over rounds, from noisy averages of clipped records alone."""
    rng = np.random.default_rng(seed)
    noise = (deviation * rng.normal(size=(len(records), rule.size(records.shape[-1])))).astype(F32)
    clip = clipping.per_agent(C)

    def step(state, value):
        vectors, z = value
        encoded = jax.vmap(lambda s: rule.encode(state, s))(vectors)
        mean = jnp.mean(clip.update(encoded, None)[0], axis=0) + z
        new = rule.learn(state, mean)
        return new, new.bound

    return np.asarray(jax.lax.scan(step, rule.start(), (records, noise))[1])


@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_quantile_is_found_from_noisy_averages(quantile):
    """From 100 times too large and too small; the noise on the fraction is a fifth."""
    records = lengths(np.random.default_rng(2), 600, 50, 6, 0.5)
    truth = np.quantile(np.linalg.norm(records, axis=-1), quantile)
    for first in (1e-2, 1e2):
        rule = Quantile(clip_norm=C, first=first, quantile=quantile)
        bounds = learned(rule, records, 0.02)[-300:]
        assert np.exp(np.log(bounds).mean()) == pytest.approx(truth, rel=0.07)
        # Its twin, that learns the opposite, would be at another quantile.
        other = np.quantile(np.linalg.norm(records, axis=-1), 1.4 - quantile)
        assert abs(np.log(bounds).mean() - np.log(other)) > 0.3


def test_nan_and_sizes_teach_nothing():
    for rule in RULES:
        state = rule.start()
        for bad in (np.nan, np.inf):
            mean = jnp.full(rule.size(4), bad, jnp.float32)
            assert float(rule.learn(state, mean).bound) == float(state.bound)
        for size in (1e-30, 1e30):
            encoded = rule.encode(state, jnp.full(4, size, jnp.float32))
            assert np.isfinite(np.asarray(encoded)).all() and encoded.dtype == jnp.float32
        assert rule.start(jnp.float32).bound.dtype == jnp.float32


@dataclasses.dataclass(frozen=True)
class Scaled(Method):
    """A server's mean under a clip norm that is learned: of noisy sums, or (the twin) of raw."""

    raw: bool
    stochastic = "rows"
    rule = RULES[0]

    @property
    def exchange(self):
        return Server()

    def start(self, ctx, models):
        return self.rule.start()

    def payload(self, models):
        shape = (models["w"].shape[0], self.rule.size(models["w"].shape[1]))
        return jnp.zeros(shape, jnp.float32)

    def emit(self, ctx, public_state):
        def encode(gradient):
            return self.rule.encode(public_state.memory, gradient["w"])

        total: Any = ctx.query(public_state.models, ctx.batch, encode).total
        return Emission(total, carry=total if self.raw else ())

    def send(self, ctx, public_state, emission, noisy):
        return noisy, emission.carry

    def absorb(self, ctx, public_state, carry, received):
        mean = received[0] / received[1]
        taught = jnp.mean(carry, axis=0) if self.raw else mean
        step = self.rule.decode(public_state.memory, mean)
        models = {"w": public_state.models["w"] - 0.1 * step}
        return models, self.rule.learn(public_state.memory, taught)

    def released(self, public_state):
        return public_state.models


@pytest.mark.mutant
def test_plan_tells_scales_of_sums_from_those_of_gradients():
    dependence.check_dependence(Scaled(raw=False), Sgd(0.1), (4, 4))
    with pytest.raises(ValueError, match="depends on data by another way"):
        dependence.check_dependence(Scaled(raw=True), Sgd(0.1), (4, 4))


def test_refusals():
    for invalid, named in (
        (lambda: Quantile(clip_norm=0.0, first=1.0), "clip_norm"),
        (lambda: Quantile(clip_norm=1.0, first=np.inf), "first"),
        (lambda: Quantile(clip_norm=1.0, first=1.0, quantile=1.0), "quantile"),
        (lambda: Quantile(clip_norm=1.0, first=1.0, share=0.0), "share"),
        (lambda: Quantile(clip_norm=1.0, first=1.0, rate=2.0), "rate"),
    ):
        with pytest.raises(ValueError, match=named):
            invalid()


def test_long_sketch_that_is_not_finite_is_left_out():
    """Whatever the largest of its numbers is said to be."""
    rule = Quantile(clip_norm=C, first=3.0)
    encode = jax.jit(lambda vector: rule.encode(rule.start(), vector))
    for bad in (np.nan, np.inf):
        assert np.isnan(encode(jnp.ones(8_192).at[5_000].set(bad))).all()
