"""Payloads as whole numbers with their noise: law, signs, modulus, and broken twins of each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import _numerics
from dpjax.encoding import simulated
from dpjax.encoding.lattice import SumCode
from dpjax.transforms import noise as noise_

N = 6
K = 300
BOUND = 1.0
NOISE, PUBLIC = jax.random.split(jax.random.key(4, impl="threefry2x32"))
CODE = SumCode(size=K, bound=BOUND, grid=1 / 64, clients=N, variance=4)


def vectors(length=BOUND, seed=0):
    x = np.random.default_rng(seed).normal(size=(N, K)).astype(np.float32)
    return length * x / np.linalg.norm(x, axis=1, keepdims=True) * np.float32(1 - 1e-6)


def split(values):
    """As a tree of two leaves."""
    return {"a": values[:, :100].reshape(N, 10, 10), "b": values[:, 100:]}


@functools.partial(jax.jit, static_argnums=0)
def sent_of(code, payload, key, public, round):
    add = noise_.discrete(code, key=key, rounds=5)
    state = add.init(payload)._replace(round=round)
    return add.update(payload, state, key=public)


def sent(code=CODE, payload=None, key=NOISE, public=PUBLIC, round=0):
    payload = split(vectors()) if payload is None else payload
    return np.asarray(sent_of(code, payload, key, public, jnp.int32(round))[0])


encoded = jax.jit(functools.partial(simulated.encode_rows, CODE))
public_signs = jax.jit(functools.partial(simulated.public_signs, CODE))


@functools.partial(jax.jit, static_argnums=0)
def opened(code, total, public, like):
    return noise_.opened(code, jnp.asarray(total), public, like)


def test_sum_is_decoded_in_payload_s_form():
    complete = sent()
    assert complete.dtype == np.uint32 and complete.shape == (N, 512)
    like = jax.tree.map(lambda leaf: leaf[0], split(vectors()))
    exact = complete.sum(0, dtype=np.uint32)
    for total in (exact, exact & np.uint32(2**CODE.bits - 1)):
        result = opened(CODE, total, PUBLIC, like)
        for leaf, expected in zip(
            jax.tree.leaves(result), jax.tree.leaves(split(vectors())), strict=True
        ):
            assert leaf.shape == expected.shape[1:] and leaf.dtype == expected.dtype
            # Six noises of variance 4, and six roundings of a sixth on average, on a 1/64 grid.
            deviation = np.sqrt(6 * (4 + 1 / 6)) / 64
            assert np.std(leaf - expected.sum(0)) == pytest.approx(deviation, rel=0.2)


@pytest.mark.x64
def test_messages_are_roundings_plus_exact_noise():
    """To the bit; noise rounded to whole numbers from floats is another law, and is caught."""
    signs = public_signs(PUBLIC)
    subkey = jax.random.fold_in(NOISE, 0)
    rounded, _ = encoded(vectors(), signs, jax.random.fold_in(subkey, 0))
    draw = jax.jit(simulated.discrete_gaussian_rows, static_argnums=(1, 2))
    noise = draw(jax.random.fold_in(subkey, 1), rounded.shape, 4)
    np.testing.assert_array_equal(sent().view(np.int32), np.asarray(rounded + noise))
    squares = np.square(np.asarray(rounded, np.int64)).sum(1)
    assert (squares <= CODE.limit).all() and (squares > 0).all()


def test_both_words_of_hash_are_whole():
    keys = jax.random.split(jax.random.key(0), 2)
    counters = jnp.arange(8, dtype=jnp.uint32).reshape(2, 4)
    words = jax.vmap(_numerics.threefry)(keys, counters, counters + 1)
    np.testing.assert_array_equal(jax.jit(_numerics.through_memory)(*words), words)


@pytest.mark.mutant
@pytest.mark.optimized  # many draws: compiling them well pays
@pytest.mark.parametrize("twin", [False, True])
def test_noise_is_discrete_gaussian(twin, monkeypatch):
    if twin:

        def floats(key, shape, variance):
            return jnp.round(jax.random.normal(key, shape) * np.sqrt(variance)).astype(jnp.int32)

        monkeypatch.setattr(simulated, "discrete_gaussian_rows", floats)
    code = SumCode(size=2**15, bound=BOUND, grid=1 / 64, clients=24, variance=4)
    zeros = np.zeros((code.clients, code.size), np.float32)
    # Under another name: what is compiled is kept by it.
    function = jax.jit(
        lambda key: simulated.noisy_rows(code, zeros, simulated.signs(code, PUBLIC), key)[0]
    )
    noise = np.asarray(function(NOISE)).ravel()
    around = np.arange(-40, 41)
    law = np.exp(-(around**2) / 8)
    law /= law.sum()
    result = np.bincount(noise + 40, minlength=81)[:81] / noise.size
    cells = law * noise.size > 20
    chi = noise.size * ((result - law)[cells] ** 2 / law[cells]).sum()
    # 10 to 20 cells: 60 is past any chance.
    assert (chi > 60) == twin, chi


def test_signs_are_public_and_new_in_every_round():
    rounds = [jax.random.fold_in(PUBLIC, t) for t in range(4)]
    signs = np.stack([np.asarray(public_signs(key)) for key in rounds])
    assert set(np.unique(signs)) == {-1.0, 1.0}
    # Independent: no two rounds agree in more places than chance lets, nor does any lean.
    assert np.abs(signs @ signs.T - 512 * np.eye(4)).max() < 5 * np.sqrt(512)
    assert np.abs(signs.sum(1)).max() < 5 * np.sqrt(512)
    # The twin: reused signs.
    same = np.tile(signs[:1], (4, 1))
    assert not np.abs(same @ same.T - 512 * np.eye(4)).max() < 5 * np.sqrt(512)


@pytest.mark.mutant
def test_no_sign_comes_from_noise_key():
    """Whoever reads a sum knows the public key alone; the twin rotates by the noise key."""
    like = jax.tree.map(lambda leaf: leaf[0], split(vectors()))
    expected = vectors()[:, 100:].sum(0)

    def off(complete):
        result = opened(CODE, complete.sum(0, dtype=np.uint32), PUBLIC, like)
        return np.abs(np.asarray(result["b"]) - expected).max()

    for seed in range(2):
        key = jax.random.key(seed, impl="threefry2x32")
        assert off(sent(key=key)) < 0.6
        rounded, _ = encoded(vectors(), public_signs(key), key)
        assert off(np.asarray(rounded).view(np.uint32)) > 0.6
        right, _ = encoded(vectors(), public_signs(PUBLIC), key)
        assert off(np.asarray(right).view(np.uint32)) < 0.3


def test_sum_that_overflows_is_another_one():
    """All agents alike and longest: 2^b holds the sum; three bits fewer, unsaid, do not."""
    alike = np.tile(vectors()[:1], (N, 1))
    total = sent(payload=split(alike)).sum(0, dtype=np.uint32)
    like = jax.tree.map(lambda leaf: leaf[0], split(alike))

    def off(code):
        result = opened(code, total, PUBLIC, like)
        return np.abs(np.asarray(result["b"]) - alike[:, 100:].sum(0)).max()

    class Narrow(SumCode):
        bits = 5  # type: ignore[assignment]

    assert CODE.bits > 7 and off(CODE) < 0.5
    assert off(Narrow(K, BOUND, 1 / 64, N, 4)) > 0.5


@pytest.mark.mutant
def test_sum_shows_no_more_than_sum():
    """Numbers modulo 2^b added in more bits show how many were below zero: the twin."""
    signed = sent().view(np.int32).astype(np.int64)
    total = sent().sum(0, dtype=np.uint32).view(np.int32)
    np.testing.assert_array_equal(total, signed.sum(0))
    residues = (signed & (2**CODE.bits - 1)).sum(0)
    below = (residues - signed.sum(0)) >> CODE.bits
    np.testing.assert_array_equal(below, (signed < 0).sum(0))


def test_rows_that_are_no_vectors_are_noise_alone():
    bad = vectors()
    bad[1] = np.nan
    bad[3] *= 3
    records = sent(payload=split(bad))
    same = sent()
    zeros = sent(payload=split(np.zeros_like(bad)))
    for row in range(N):
        np.testing.assert_array_equal(records[row], (zeros if row in (1, 3) else same)[row])


def test_rounds_are_counted_and_nothing_goes_out_after_last():
    first = sent(round=0)
    second = sent(round=1)
    assert (first != second).mean() > 0.5
    assert not sent(round=5).any()
    add = noise_.discrete(CODE, key=NOISE, rounds=5)
    state = add.init(split(vectors()))._replace(round=jnp.int32(5))
    with pytest.raises(ValueError, match="accounted for 5 rounds"):
        add.update(split(vectors()), state, key=PUBLIC)


def test_other_payloads_are_refused():
    with pytest.raises(ValueError, match="give size=299"):
        noise_.discrete(CODE, key=NOISE, rounds=5).init(vectors()[:, 1:])
    with pytest.raises(ValueError, match="of 7 agents"):
        noise_.discrete(CODE, key=NOISE, rounds=5).init(np.zeros((7, K), np.float32))
    with pytest.raises(ValueError, match="floating leaves"):
        noise_.discrete(CODE, key=NOISE, rounds=5).init(np.zeros((6, K), np.int32))


def test_code_promotes_no_ranks():
    code = SumCode(size=3, bound=1.0, grid=2**-10, clients=2, variance=4)
    with jax.numpy_rank_promotion("raise"):
        signs = simulated.signs(code, jax.random.key(0))
        simulated.noisy_rows(code, jnp.ones((2, 3)), signs, jax.random.key(1))
