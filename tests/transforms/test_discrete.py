"""Discrete Gaussians inside jit: their law, and every number replayed in fractions."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import _lattice
from dpjax.mechanism.x64 import double_precision
from dpjax.transforms import discrete
from tests.secagg import lattice

VARIANCES = [Fraction(1, 4), 4, Fraction(50, 3)]


def key(seed=3):
    return jax.random.key(seed, impl="threefry2x32")


@functools.cache
def sample(variance, seed=3, shape=(40, 1500)):
    drawn = jax.jit(discrete.discrete_gaussians, static_argnums=(1, 2))(key(seed), shape, variance)
    assert drawn.dtype == jnp.int32 and drawn.shape == shape
    return np.asarray(drawn)


@pytest.mark.optimized  # many draws: compiling them well pays
@pytest.mark.parametrize("variance", VARIANCES, ids=str)
def test_their_law_is_the_exact_one(variance) -> None:
    values = sample(variance).ravel()
    assert lattice.fit(values, variance) > 1e-3
    assert lattice.fit(values, Fraction(variance) * Fraction(105, 100)) < 1e-6
    tail = np.abs(values) > 3 * float(variance) ** 0.5
    assert lattice.fit(np.where(tail, 0, values), variance) < 1e-4


def test_rows_columns_and_keys_are_independent() -> None:
    values = sample(4).astype(np.float64)
    others = [values[1:, :], values[:, 1:], sample(4, 4)]
    mine = [values[:-1, :], values[:, :-1], values]
    for one, other in zip(mine, others, strict=True):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4 / one.size**0.5


def test_they_are_those_of_chacha() -> None:
    secure = pytest.importorskip("dpjax.secagg.discrete")
    pytest.importorskip("cryptography")
    for variance in VARIANCES:
        theirs = secure.discrete_gaussians(secure.Stream(bytes(32)), 60_000, variance)
        assert lattice.same(sample(variance).ravel(), theirs) > 1e-3
    wider = secure.discrete_gaussians(secure.Stream(bytes(32)), 60_000, Fraction(22, 5))
    assert lattice.same(sample(4).ravel(), wider) < 1e-6


def pairs(row, column, seed=3):
    """The pairs of words that a number is drawn from."""
    from dpjax import _numerics

    folded = jax.random.fold_in(key(seed), row)
    ticks = jnp.arange(3000, dtype=jnp.uint32)
    drawn = _numerics.threefry(folded, ticks, jnp.full_like(ticks, column))
    return list(zip(*(np.asarray(words).tolist() for words in drawn), strict=True))


@pytest.mark.parametrize("variance", VARIANCES, ids=str)
def test_numbers_follow_from_their_words_as_fractions_tell(variance) -> None:
    centre = _lattice.proposal(variance).centre
    for row, column in [(0, 0), (0, 31), (0, 32), (7, 1499), *((39, c) for c in range(0, 800, 20))]:
        exact = lattice.replayed(pairs(row, column), Fraction(variance), centre)
        assert sample(variance)[row, column] == exact


def test_events_that_words_leave_open_wait_for_the_next() -> None:
    rng = np.random.default_rng(0)
    divisors = rng.integers(1, 2**21, 2000).astype(np.uint32)
    rests = (divisors * rng.random(2000)).astype(np.uint32)
    # Words beside the end of the event, and anywhere.
    near = (rests.astype(np.uint64) << np.uint64(32)) // divisors
    words = np.where(np.arange(2000) % 2, near + rng.integers(-1, 2, 2000).astype(np.uint64), near)
    words = np.clip(words.astype(np.int64), 0, 2**32 - 1).astype(np.uint32)
    products = discrete._product(jnp.asarray(words), jnp.asarray(divisors))
    products = tuple(np.asarray(each) for each in products)
    whole = [int(a) * int(b) for a, b in zip(words, divisors, strict=True)]
    assert [int(h) * 2**32 + int(low) for h, low in zip(*products, strict=True)] == whole
    compared = discrete._compared(products, jnp.asarray(rests), jnp.asarray(divisors))
    yes, no, left = (np.asarray(each) for each in compared)
    opened = 0
    for i, product in enumerate(whole):
        target = int(rests[i]) * 2**32
        assert bool(yes[i]) == (product + int(divisors[i]) <= target)
        assert bool(no[i]) == (product >= target)
        if not yes[i] and not no[i]:
            opened += 1
            assert int(left[i]) == target - product
    assert opened > 500


def test_a_number_depends_on_key_row_and_column_alone() -> None:
    whole = sample(4)
    np.testing.assert_array_equal(discrete.discrete_gaussians(key(), (3, 33), 4), whole[:3, :33])
    one = jax.vmap(lambda k: discrete.discrete_gaussians(k, (2, 40), 4))(
        jnp.stack([key(3), key(4)])
    )
    np.testing.assert_array_equal(one[0], whole[:2, :40])
    np.testing.assert_array_equal(one[1], sample(4, 4)[:2, :40])

    def body(carry, seed):
        return carry, discrete.discrete_gaussians(jax.random.key(seed), (2, 40), 4)

    seeds = jnp.array([3, 4], jnp.uint32)
    np.testing.assert_array_equal(jax.lax.scan(body, 0, seeds)[1][1], one[1])
    with double_precision():
        wide = jax.jit(discrete.discrete_gaussians, static_argnums=(1, 2))(key(), (3, 33), 4)
    assert wide.dtype == jnp.int32
    np.testing.assert_array_equal(wide, whole[:3, :33])


def test_nothing_is_drawn_for_no_rows() -> None:
    assert discrete.discrete_gaussians(key(), (0, 3), 4).shape == (0, 3)
    assert discrete.discrete_gaussians(key(), (3, 0), 4).shape == (3, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": jax.random.key(0, impl="rbg")}, "key"),
        ({"shape": 3}, r"shape is 3; give \(rows, columns\)"),
        ({"shape": (3, -1)}, "shape is -1"),
        ({"variance": 4.0}, "give a whole number or a Fraction"),
        ({"variance": Fraction(1, 5)}, "too coarse"),
    ],
)
def test_what_cannot_be_drawn_is_refused(change, message) -> None:
    given = {"key": key(), "shape": (3, 2), "variance": 4} | change
    with pytest.raises(ValueError, match=message):
        discrete.discrete_gaussians(**given)
