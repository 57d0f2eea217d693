"""Sketches of one interface: linear, adjoint to each other, unbiased where they say so."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax._numerics import double_precision
from dpjax.contrib import sketches

F32 = np.float32


NAMES = ("gaussian", "orthonormal", "count sketch")


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 4))
def made(name, d, k, key, dtype=F32):
    if name == "count sketch":
        return sketches.count_sketch(d, k, key, rows=2)
    return sketches.gaussian(d, k, key, is_orthonormal=name == "orthonormal", dtype=dtype)


decoded = jax.jit(lambda projection, coordinates: projection.decode(coordinates))
columns = jax.jit(jax.vmap(lambda projection, unit: projection.decode(unit), (None, 0)))


def dense(projection, d, k, dtype=F32):
    """A [d, k], column by column through `decode`."""
    return np.asarray(columns(projection, jnp.eye(k, dtype=dtype))).T


@pytest.mark.slow
@pytest.mark.x64
@pytest.mark.parametrize("dtype", [F32, np.float64])
@pytest.mark.parametrize("name", NAMES)
def test_encoding_and_decoding_are_one_matrix(name, dtype):
    d = 90
    k = 12
    rng = np.random.default_rng(1)
    with double_precision():
        projection = made(name, d, k, jax.random.key(1), dtype)
        matrix = dense(projection, d, k, dtype)
        vector = jnp.asarray(rng.normal(size=d), dtype)
        coordinates = jax.jit(lambda p, v: p.encode(v))(projection, vector)
        digits = 1e-5 if dtype == F32 else 1e-13
        assert coordinates.dtype == dtype and coordinates.shape == (k,)
        np.testing.assert_allclose(coordinates, matrix.T @ np.asarray(vector), atol=digits)
        back = decoded(projection, coordinates)
        assert back.dtype == dtype
        np.testing.assert_allclose(back, matrix @ np.asarray(coordinates), atol=10 * digits)
        diagonal = np.asarray(projection.diagonal())
    np.testing.assert_allclose(diagonal, (matrix.astype(float) ** 2).sum(axis=1), atol=1e-5)


def test_count_sketch_has_one_entry_row_and_coordinate():
    d = 400
    k = 60
    rows = 3
    sparse = sketches.count_sketch(d, k, jax.random.key(2), rows=rows)
    matrix = dense(sparse, d, k).reshape(d, rows, k // rows)
    assert (np.count_nonzero(matrix, axis=2) == 1).all()
    np.testing.assert_allclose(np.abs(matrix).max(axis=2), 1 / np.sqrt(rows), rtol=1e-6)
    # Buckets are filled alike, signs balanced, rows independent: each to five deviations.
    many = sketches.count_sketch(40_000, 40, jax.random.key(3), rows=2)
    counts = np.stack([np.bincount(row, minlength=20) for row in np.asarray(many.buckets)])
    assert np.abs(counts - 2000).max() < 5 * np.sqrt(2000)
    signs = np.asarray(many.signs, int)
    assert np.abs(signs.sum(axis=1)).max() < 5 * 200 and abs((signs[0] * signs[1]).sum()) < 1000
    together = (np.asarray(many.buckets[0]) == np.asarray(many.buckets[1])).mean()
    assert abs(together - 1 / 20) < 5 * np.sqrt(0.05 / 40_000)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_decoded_is_right_on_average(name):
    d = 20
    k = 8
    trials = 4000
    vector = jnp.asarray(np.random.default_rng(4).normal(size=d), F32)

    def one(key):
        projection = made(name, d, k, key)
        return projection.decode(projection.encode(vector))

    keys = jax.random.split(jax.random.key(5), trials)
    result = np.asarray(jax.jit(jax.vmap(one))(keys), float)
    expected = np.asarray(vector, float) * (k / d if name == "orthonormal" else 1.0)
    error = 5 * result.std(axis=0) / np.sqrt(trials)
    assert (np.abs(result.mean(axis=0) - expected) < error).all()
    assert not (np.abs(result.mean(axis=0) - 1.5 * expected) < error).all()


def test_sketch_can_lengthen_so_clip_stands_after_it():
    """Clipped before, a count sketch sends more than the clip norm; clipped after, it does not."""
    sparse = made("count sketch", 300, 4, jax.random.key(6))
    longest = np.linalg.svd(dense(sparse, 300, 4))[0][:, 0]
    clipped = jnp.asarray(longest / np.linalg.norm(longest), F32)
    sent = np.asarray(sparse.encode(clipped))
    assert np.linalg.norm(sent) > 5
    assert np.linalg.norm(sent * min(1.0, 1 / np.linalg.norm(sent))) <= 1 + 1e-6
    frame = made("orthonormal", 300, 4, jax.random.key(6))
    assert np.linalg.norm(dense(frame, 300, 4), 2) < 1 + 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_lemma_3_2_by_draws_and_printed_line_fails(name):
    """Fixed gradients of B clients, each with its own noise; the same test for both lines."""
    d = 12
    k = 4
    clients = 5
    deviation = 2.0
    trials = 40_000
    rng = np.random.default_rng(8)
    projection, before = (made(name, d, k, jax.random.key(s)) for s in (9, 10))
    matrix = dense(projection, d, k).astype(float)
    encoded = rng.normal(size=(clients, d)) @ matrix
    noise = deviation * rng.normal(size=(trials, clients, k))
    squares = ((encoded + noise).mean(axis=1) @ matrix.T) ** 2
    without = (matrix @ encoded.mean(axis=0)) ** 2
    error = 5 * squares.std(axis=0) / np.sqrt(trials) + 1e-6

    def holds(correction):
        return bool((np.abs(squares.mean(axis=0) - np.asarray(correction) - without) < error).all())

    variance = deviation**2 / clients
    assert holds(projection.diagonal() * variance)
    assert not holds(1.5 * projection.diagonal() * variance)
    assert not holds(projection.diagonal() * deviation**2)
    assert not holds(before.diagonal() * deviation**2)
    if name in ("gaussian", "orthonormal"):  # The others' diagonals are the same in every round.
        assert not holds(before.diagonal() * variance)
