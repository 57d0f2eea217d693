"""Noise of releases: quantiles, bits, tails, the grid, and attacks on last bits."""

import dataclasses
import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from scipy import stats

from dpjax._numerics import double_precision
from dpjax.accounting import finite
from dpjax.engine import inputs
from dpjax.engine.step import Statics
from dpjax.mechanism import temporal
from dpjax.mechanism.participation import Participation
from dpjax.plans import plan
from dpjax.transforms import noise, rounds, variates
from dpjax.transforms.variates import words
from tests.support import algorithm_of, make_config, make_problem

KEY = jax.random.key(7, impl="threefry2x32")


def wide(function, *arguments):
    """Call in double precision, to NumPy."""
    with double_precision():
        return np.asarray(jax.jit(function)(*map(jnp.asarray, arguments)))


def exact(p):
    """Phi^-1 of a tail probability to 50 digits."""
    z = mp.mpf(float(stats.norm.isf(float(p))))
    for _ in range(5):
        z += (mp.erfc(z / mp.sqrt(2)) / 2 - p) / mp.npdf(z)
    return z


def test_quantiles_against_many_digits():
    rng = np.random.default_rng(0)
    near = 0.5 - 10.0 ** rng.uniform(-17, -1, 100)
    p = np.concatenate([rng.uniform(0.05, 0.5, 100), near, 2.0 ** rng.uniform(-129, -1, 300)])
    p = np.concatenate([p, [0.075, np.nextafter(0.075, 0), np.exp(-25.0), 2.0**-65, 2.0**-129]])
    result = wide(variates.quantile, np.concatenate([p, -p]))
    np.testing.assert_array_equal(result[: len(p)], -result[len(p) :])
    with mp.workdps(50):
        for value, z in zip(p, result[: len(p)], strict=True):
            true = exact(mp.mpf(float(value)))
            assert abs(z - true) <= mp.mpf(finite.SAMPLER.error) / 2 * (1 + abs(true))


def test_probabilities_are_those_of_all_bits():
    rng = np.random.default_rng(1)
    words_ = rng.integers(0, 2**32, (4, 500), dtype=np.uint32)
    words_[0, :200] &= np.uint32(2**31)  # Small ones, where the last bits are the first.
    words_[1, :100] >>= np.uint32(20)
    words_[:, -2:] = np.array([[0, 2**32 - 1]] * 4, np.uint32)
    coarse = wide(variates.signed_probabilities, *words_[:2])
    finer = wide(variates.signed_probabilities, *words_[:2], words_[2:])
    for high, low, extra, maximum, a, b in zip(*words_.tolist(), coarse, finer, strict=True):
        sign = -1 if high >> 31 else 1
        m = Fraction(((high & (2**31 - 1)) << 32) + low)
        for result, true in (
            (a, (m + Fraction(1, 2)) / 2**64),
            (b, (m + ((extra << 32) + maximum + Fraction(1, 2)) / Fraction(2**64)) / 2**64),
        ):
            assert abs(Fraction(float(result)) * sign - true) <= true / 2**51
    assert np.abs(finer).min() > 0
    tail = wide(variates.quantile, np.array([2.0**-65, 2.0**-129]))
    assert tail[0] > 9.1 and tail[1] > 13


def test_normals_are_quantiles_of_their_own_hashes():
    key = jax.random.fold_in(KEY, 3)
    result = wide(lambda: variates.release_normals(key, (40, 50)))
    high, low = (np.asarray(w) for w in words(jax.random.fold_in(key, 0), (40, 50)))
    p = (((high & np.uint32(2**31 - 1)).astype(object) << 32) + low.astype(object)) * 2 + 1
    z = stats.norm.isf((p / 2**65).astype(float)) * np.where(high >> 31, -1, 1)
    np.testing.assert_allclose(result, z, rtol=1e-13, atol=1e-15)
    # Neither the shape nor what is vmapped around changes a number.
    extra = wide(
        lambda: jax.vmap(lambda k: variates.release_normals(k, (60, 70)))(jnp.stack([KEY, key]))
    )
    np.testing.assert_array_equal(extra[1, :40, :50], result)
    assert len(np.unique(result)) == result.size


def test_tail_draws_more_bits(monkeypatch):
    def some_small(key, shape):
        first, second = words(key, shape)
        small = jnp.arange(shape[1]) % 2 == 0
        # Of the first hash alone: the finer one keeps its words.
        is_first = jnp.all(
            jax.random.key_data(key) == jax.random.key_data(jax.random.fold_in(KEY, 0))
        )
        # So small that without the finer bits a number would be another one.
        tail = small & is_first
        second = jnp.where(tail, (second >> np.uint32(24)) | np.uint32(1), second)
        return jnp.where(tail, first & jnp.uint32(2**31), first), second

    monkeypatch.setattr(variates, "words", some_small)
    result = wide(lambda: variates.release_normals(KEY, (3, 8)))
    low = (np.asarray(words(jax.random.fold_in(KEY, 0), (3, 8))[1]) >> 24 | 1).astype(float)
    high = np.asarray(words(jax.random.fold_in(KEY, 1), (3, 8))[0]).astype(float)
    expected = stats.norm.isf((low + high / 2**32) / 2**64)
    np.testing.assert_allclose(np.abs(result)[:, ::2], expected[:, ::2], rtol=1e-11)
    assert np.abs(result)[:, ::2].min() > 6.2 > np.abs(result)[:, 1::2].max()


def test_normals_are_normal():
    z = wide(lambda: variates.release_normals(KEY, (300, 2000))).ravel()
    assert stats.kstest(z, "norm").pvalue > 1e-3
    assert abs(z.mean()) < 4 / np.sqrt(z.size) and abs(z.var() - 1) < 4 * np.sqrt(2 / z.size)
    # A stream of 1.5 times the variance, or without its signs, does not pass.
    assert stats.kstest(1.22 * z, "norm").pvalue < 1e-9 > stats.kstest(abs(z), "norm").pvalue


def strategies(length):
    banded = np.tril(np.triu(np.full((length, length), 0.1), -3), -1) + np.eye(length)
    complete = temporal.prefix_sum(Participation(length, 1, length))
    return [None, banded, np.linalg.inv(banded), complete]


@functools.cache
def drawn_normals(length, shape):
    """Those of all rounds."""

    def of_round(t):
        key = jax.random.fold_in(jax.random.fold_in(KEY, t), 0)
        return variates.release_normals(key, shape)

    return wide(lambda: jax.lax.map(of_round, jnp.arange(length)))


@pytest.mark.gate(2)
@pytest.mark.x64
@pytest.mark.parametrize("which", range(4))
def test_sums_are_rounded_once_as_if_all_was_float64(which):
    n = 4
    length = 40
    h = 2.0**-8
    strategy = strategies(length)[which]
    factor = np.random.default_rng(2).normal(size=(n, n)).astype(np.float32)
    options = {
        "b": np.random.default_rng(3).normal(size=(n, 3)).astype(np.float32),
        "w": np.random.default_rng(4).normal(size=(n, 2, 5)).astype(np.float32),
    }
    link = noise.correlated(factor, key=KEY, rounds=length, strategy=strategy, grid=h)

    def step(state, _):
        updates, state = link.update(options, state)
        return state, updates

    sent = jax.jit(lambda: jax.lax.scan(step, link.init(options), None, length=length)[1])()
    assert sent["b"].dtype == sent["w"].dtype == jnp.float32

    drawn = drawn_normals(length, (n, 13))
    inverse = np.eye(length)
    if strategy is not None:
        inverse = np.linalg.inv(rounds.applied(strategy, np.float64))
    coloured = np.einsum("st,ij,tjd->sid", inverse, factor.astype(float), drawn)
    flat = np.concatenate([options["b"], options["w"].reshape(n, -1)], axis=1).astype(float)
    result = np.concatenate([sent["b"], sent["w"].reshape(length, n, -1)], axis=2).astype(float)
    # Sums may lie so near to a cell's edge that another order of adding crosses it: none does here.
    np.testing.assert_array_equal(result, np.round((flat + coloured) / h) * h)


@pytest.mark.x64
def test_no_vmap_of_scan_adds_float32_noise():
    link = noise.correlated(np.eye(2, dtype=np.float32), key=KEY, rounds=5, grid=2.0**-20)
    zeros = jnp.zeros((2, 9))

    def whole(key):
        start = link.init(zeros)._replace(key=key)
        return jax.lax.scan(lambda s, _: link.update(zeros, s)[::-1], start, None, length=5)[1]

    apart = np.asarray(jax.jit(whole)(KEY))
    try:
        together = jax.jit(jax.vmap(whole))(jnp.stack([KEY, KEY]))
    except (TypeError, UserWarning):
        return  # Versions of JAX that would fall back to float32 products refuse the sum.
    np.testing.assert_array_equal(together[0], apart)


def test_a_zero_of_the_grid_has_no_sign():
    link = noise.correlated(np.eye(2, dtype=np.float32), key=KEY, rounds=5, grid=4.0)
    payload = np.zeros((2, 100), np.float32)
    sent, _ = jax.jit(link.update)(payload, link.init(payload))
    values = np.asarray(sent)
    # Nearly all of them are zero, half of them from below.
    assert np.count_nonzero(values == 0) > 150
    assert not np.signbit(values[values == 0]).any()


def test_grids_are_powers_of_two():
    for invalid in (0.0, -0.5, 0.3, np.inf, np.nan):
        with pytest.raises(ValueError, match="give a power of two"):
            noise.correlated(np.eye(2), key=KEY, rounds=5, grid=invalid)


def test_grid_is_for_all_agents():
    add = noise.correlated(np.ones(1), key=KEY, rounds=5, grid=0.5, rows=(1,))
    payload = np.ones((1, 3), np.float32)
    with pytest.raises(ValueError, match=r"rows is \(1,\) with a grid, which needs normals"):
        add.update(payload, add.init(payload))


def test_normals_of_a_driver_have_the_shape_that_a_round_needs():
    payload = np.ones((1, 3), np.float32)
    for shape in ((1, 1, 4), (1, 2, 3), (3,)):
        normals = [jnp.zeros(shape)]
        add = noise.correlated(np.ones(1), key=KEY, rounds=5, grid=0.5, rows=(1,), normals=normals)
        with pytest.raises(ValueError, match=r"normals has shape .*; give \[rounds, 1, 3\]"):
            add.update(payload, add.init(payload))


# The attack on last bits. Everybody has the gradient g or g'; the attacker sees models before and
# after one step of independent noise, and asks for every coordinate which of the two could have
# led to the number that was sent.

SIZE = 40
STEP = 0.1


class Fixed:
    """A chain whose clipped gradient is what the batch says, as a run assembles it."""

    def __init__(self, release, epsilon=8.0):
        config = make_config(
            design="independent", release=release, rounds=3, clip_norm=1.0, step_size=STEP,
            epsilon=epsilon,
        )  # fmt: skip
        self.plan = plan.make(config, np.full((6, 6), 1 / 6))
        statics = Statics.of((self.plan,), (make_problem(6),))
        query = dataclasses.replace(
            statics.query, loss=lambda params, x, y: params @ x, batch_loss=None
        )
        self.statics = statics._replace(query=query)
        stacked = inputs.stacked_arrays((self.plan,))
        arrays = jax.tree.map(lambda leaf: leaf[0], stacked)

        @jax.jit
        def sent(models, batch, key):
            algorithm = algorithm_of(self.statics, arrays, key)
            return algorithm.step(key, algorithm.init(models), batch)[1].messages

        self.sent = sent

    def messages(self, models, gradient, key):
        """What every agent sends in the first round, [n, SIZE] float32."""
        batch = (jnp.broadcast_to(gradient, (6, 1, SIZE)), jnp.zeros((6, 1)), None)
        return np.asarray(self.sent(models, batch, key))


@jax.jit
def _as_normal(uniform):
    return np.float32(np.sqrt(2)) * jax.lax.erf_inv(uniform)


def reachable_simulation(models, message, gradient, sigma, width=40):
    """Whether some float32 normal leads from a gradient to a message, entry by entry."""
    expected = (models.astype(float) - message.astype(float)) / np.float32(STEP)
    guess = (expected - gradient) / float(sigma)
    step = np.floor(2**23 * (2 * stats.norm.cdf(guess) - 1)).astype(np.int64)
    step = step[..., None] + np.arange(-width, width + 1)
    step = np.clip(step, -(2**23), 2**23 - 1).astype(np.float32)
    uniform = (step + np.float32(0.5)) * np.float32(2.0**-23)
    normal = np.asarray(_as_normal(uniform))
    noisy = gradient[..., None] + np.float32(sigma) * normal
    # Both ways in which a processor may round the last product and sum.
    apart = models[..., None] + np.float32(-STEP) * noisy
    fused = models[..., None].astype(float) - float(np.float32(STEP)) * noisy.astype(float)
    fused = fused.astype(np.float32)
    return ((apart == message[..., None]) | (fused == message[..., None])).any(axis=-1)


@jax.jit
def _quantile(p):
    with double_precision():
        return variates.quantile(p)


def reachable_release(models, message, gradient, sigma, h):
    """The same for a release: some word of 64 bits leads to the message."""
    expected = (models.astype(float) - message.astype(float)) / float(np.float32(STEP))
    result = np.zeros(message.shape, bool)
    for offset in range(-4, 5):
        cell = np.round(expected / h) + offset
        update = np.float32(cell * h)
        apart = models + np.float32(-STEP) * update
        fused = models.astype(float) - float(np.float32(STEP)) * update.astype(float)
        fused = fused.astype(np.float32)
        leads = (apart == message) | (fused == message)
        tail = stats.norm.sf(np.abs(cell * h - gradient) / float(sigma))
        word = np.floor(tail * 2.0**64)  # At least 2^20 here: the rounding of one matters little.
        with double_precision():
            value = np.asarray(_quantile(np.clip((word + 0.5) * 2.0**-64, 2.0**-65, 0.5)))
        value = np.sign(cell * h - gradient) * value * float(sigma)
        result |= leads & (np.round((gradient + value) / h) == cell)
    return result


def attacked(release, trials, seed):
    """Shares of coordinates that could have come from the true gradient, and from the other."""
    chain = Fixed(release)
    sigma = chain.plan.factor[0, 0]
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=SIZE)
    gradient = (0.9 * direction / np.linalg.norm(direction)).astype(np.float32)
    other = -gradient
    own = []
    others = []
    for trial in range(trials):
        models = rng.normal(size=(6, SIZE)).astype(np.float32)
        message = chain.messages(models, gradient, jax.random.key(trial, impl="threefry2x32"))
        extra = (chain.plan.grid.spacing,) if release else ()
        test = reachable_release if release else reachable_simulation
        for result, candidate in ((own, gradient), (others, other)):
            values = np.broadcast_to(candidate, message.shape)
            result.append(test(models, message, values, sigma, *extra))
    return np.concatenate(own), np.concatenate(others)


def test_last_bits_of_simulation_give_gradient_away():
    own, others = attacked(False, 20, 0)
    assert own.all()
    # Some coordinates exclude the neighbour: forty of them together do in every trial.
    assert 0.05 < others.mean() < 0.95
    assert not others.all(axis=1).any()


def test_last_bits_of_release_tell_nothing():
    own, others = attacked(True, 20, 0)
    # Of 4,800 coordinates not one excludes the neighbour: at a rate of 1 in 1,000, 99 % power.
    assert own.size == 4800 and own.all() and others.all()


def test_remainders_of_release_do_not_depend_on_gradient():
    sigma = 1.0
    h = 2.0**-4
    count = 40_000
    link = noise.correlated(np.eye(4, dtype=np.float32), key=KEY, rounds=2, grid=h)
    first_round = jax.jit(lambda value: link.update(value, link.init(value))[0])

    def cells(shift):
        sent = np.asarray(first_round(jnp.full((4, count), shift, jnp.float32))).ravel()
        assert sent.std() == pytest.approx(sigma, rel=0.02)
        return np.round(sent / h).astype(int) % 8

    for shift in (0.0, h / 3, 0.4):
        counted = np.bincount(cells(shift), minlength=8)
        assert stats.chisquare(counted).pvalue > 1e-3
