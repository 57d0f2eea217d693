"""Masks inside jit: they cancel to the bit whoever is missing, and hide until then."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpjax._numerics import double_precision
from dpjax.contrib import masks
from dpjax.transforms import variates

MASKED = jax.jit(masks.masked_vectors, static_argnames=("degree", "bits"))
SUM = jax.jit(masks.unmasked_sum, static_argnames=("degree", "bits"))
SHAPES = [(4, 5, 3, 7), (5, 4, 2, 1), (9, 7, 4, 32)]
"""Clients, entries, degree, bits: everybody with everybody for an even number, and rings."""
MORE = [(3, 5, 2, 32), (6, 3, 5, 20)]


def key(seed=0):
    return jax.random.key(seed, impl="threefry2x32")


def drawn(clients, columns, seed=0):
    words = np.random.default_rng(seed).integers(0, 2**32, (clients, columns), np.uint32)
    return jnp.asarray(words)


def plain(values, present, bits):
    """The sum in Python's whole numbers."""
    rows = [[int(x) for x in row] for row in np.asarray(values)]
    selection = [row for row, here in zip(rows, present, strict=True) if here]
    return [sum(row[index] for row in selection) % 2**bits for index in range(len(rows[0]))]


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [SHAPES, MORE])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_sum_of_whoever_is_present_is_exact(shapes, data):
    clients, columns, degree, bits = data.draw(st.sampled_from(shapes))
    present = data.draw(st.lists(st.booleans(), min_size=clients, max_size=clients))
    seed = data.draw(st.integers(0, 2**31))
    values = drawn(clients, columns, seed)
    sent = MASKED(values, key(seed), degree=degree, bits=bits)
    assert sent.dtype == jnp.uint32 and int(sent.max()) < 2**bits
    here = jnp.asarray(present, bool)
    # What the missing sent, if anything, is not read.
    arrived = jnp.where(here[:, None], sent, jnp.uint32(seed))
    total = SUM(arrived, here, key(seed), degree=degree, bits=bits)
    assert total.dtype == jnp.uint32
    assert total.tolist() == plain(values, present, bits)


def words(folded, columns):
    """Both words of the hashes of (0, 0), (0, 1), ... one after the other."""
    first, second = variates.words(folded, (1, -(-columns // 2)))
    return np.concatenate([first[0], second[0]])[:columns].astype(object)


def by_pairs(values, degree, own=True):
    """Masks pair by pair, in Python's whole numbers, and everybody's neighbours."""
    clients, columns = values.shape
    order = np.asarray(jax.random.permutation(jax.random.fold_in(key(), 0), clients))
    sent = np.asarray(values).astype(object)
    if own:
        for i in range(clients):
            sent[i] += words(jax.random.fold_in(jax.random.fold_in(key(), 1), i), columns)
    near = [[] for _ in range(clients)]
    for distance in range(1, (degree + 1) // 2 + 1):
        pairs = jax.random.fold_in(jax.random.fold_in(key(), 2), distance)
        for place in range(clients // 2 if 2 * distance == clients else clients):
            first = order[place]
            other = order[(place + distance) % clients]
            near[first].append(int(other))
            near[other].append(int(first))
            mask = words(jax.random.fold_in(pairs, place), columns)
            sent[first], sent[other] = sent[first] + mask, sent[other] - mask
    return (sent % 2**32).astype(np.uint32), near


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "columns", "degree", "bits"), [*SHAPES, *MORE])
def test_masks_are_those_of_pairs_on_ring(clients, columns, degree, bits):
    values = drawn(clients, columns)
    want, near = by_pairs(values, degree)
    assert all(len(set(item)) == len(item) == degree for item in near)
    assert all(i not in value for i, value in enumerate(near))
    sent = MASKED(values, key(), degree=degree, bits=bits)
    np.testing.assert_array_equal(sent, want & np.uint32(2**bits - 1))


def uniform(rows):
    """Whether bytes, and pairs of neighbouring half bytes, come as often as others."""
    low = np.asarray(rows, np.uint32).ravel() & 255
    pairs = (low[::2] & 15) * 16 + (low[1::2] & 15)
    counts = [np.bincount(case, minlength=256) for case in (low, pairs)]
    return min(stats.chisquare(count).pvalue for count in counts) > 1e-4


def without_own(values, *, degree, bits=32):
    """A fault seen in public code: no self masks."""
    sent, _ = by_pairs(values, degree, own=False)
    return sent & np.uint32(2**bits - 1)


@pytest.mark.mutant
def test_masked_vector_alone_is_uniform():
    for value in (0, 7):
        values = jnp.full((3, 2**15), value, jnp.uint32)
        sent = np.asarray(MASKED(values, key(), degree=2, bits=8))
        assert all(uniform(row) for row in sent)
        # Rows beside each other, and whether all of them together are.
        assert uniform((sent[0] - sent[1]) & 255) and uniform(sent.sum(0, dtype=np.uint32))
    assert not uniform(np.full(2**15, 7))
    # Without self masks the sum is there before anybody agrees to it.
    assert not uniform(without_own(values, degree=2, bits=8).sum(0, dtype=np.uint32))


def late(mask):
    """What a server reads that takes the masks of all pairs off a vector that comes late."""
    values = jnp.full((5, 2**12), 7, jnp.uint32)
    # The masks of pairs are what vectors of zeros are sent as without self masks.
    between = without_own(jnp.zeros_like(values), degree=2)
    return np.asarray(mask(values, degree=2))[1] - between[1]


@pytest.mark.mutant
def test_late_vector_is_hidden_by_its_self_mask_alone():
    assert uniform(late(functools.partial(MASKED, key=key())))
    np.testing.assert_array_equal(late(without_own), 7)


def sensitive(turned):
    """Whether every bit of a key changes half of the bits of what is sent."""
    values = drawn(3, 64)
    base = np.asarray(jax.random.key_data(key(5)))
    first = np.asarray(MASKED(values, turned(base), degree=2))
    for bit in range(64):
        other = base ^ np.array([1 << bit], np.uint64).view(np.uint32)
        sent = np.asarray(MASKED(values, turned(other), degree=2))
        changed = int(np.bitwise_count(first ^ sent).sum())
        if abs(changed - 3 * 1024) > 6 * 39.2:  # six deviations of 6,144 coin flips
            return False
    return True


def folded(data):
    """A fault seen in public code: a seed of 32 bits."""
    return jax.random.wrap_key_data(np.array([0, data[1]], np.uint32), impl="threefry2x32")


@pytest.mark.mutant
def test_all_bits_of_key_count_and_folded_one_is_caught():
    assert sensitive(functools.partial(jax.random.wrap_key_data, impl="threefry2x32"))
    assert not sensitive(folded)


def test_keys_of_two_rounds_give_masks_of_their_own():
    values = jnp.zeros((9, 7), jnp.uint32)
    first, second = (np.asarray(MASKED(values, key(i), degree=4, bits=32)) for i in range(2))
    assert abs(int(np.bitwise_count(first ^ second).sum()) - 16 * 63) < 6 * 22.5


@pytest.mark.slow
@pytest.mark.x64
def test_numbers_are_same_in_double_precision_and_over_keys():
    values = drawn(5, 9)
    keys = jnp.stack([key(0), key(1)])
    function = jax.jit(jax.vmap(lambda k: masks.masked_vectors(values, k, 2)))(keys)
    with double_precision():
        wide = MASKED(values, key(1), degree=2)
        total = SUM(wide, jnp.ones(5, bool), key(1), degree=2)
    assert wide.dtype == total.dtype == jnp.uint32
    np.testing.assert_array_equal(function[1], wide)
    assert total.tolist() == plain(values, [True] * 5, 32)


@pytest.mark.slow
def test_ten_thousand_clients():
    values = drawn(10_000, 4096)
    present = jnp.asarray(np.random.default_rng(1).random(10_000) > 0.05)
    total = SUM(MASKED(values, key(), degree=36), present, key(), degree=36)
    want = np.asarray(values)[np.asarray(present)].sum(0, dtype=np.uint32)
    np.testing.assert_array_equal(total, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": drawn(5, 3).astype(jnp.int32)}, r"values is int32\[5, 3\]; give uint32"),
        ({"values": drawn(5, 3)[0]}, r"values is uint32\[3\]"),
        ({"values": drawn(2, 3), "degree": 1}, r"values is \[2, 3\]; give 3 clients or more"),
        ({"values": drawn(5, 0)}, r"values is \[5, 0\]"),
        ({"degree": 3}, "degree is 3; give an even number below 4, or 4"),
        ({"degree": 6}, "degree is 6"),
        ({"bits": 33}, "bits is 33"),
        ({"key": jax.random.key(0, impl="rbg")}, "key is of generator"),
    ],
)
def test_what_cannot_be_masked_is_refused(change, message):
    argument = {"values": drawn(5, 3), "key": key(), "degree": 2, "bits": 32} | change
    with pytest.raises(ValueError, match=message):
        masks.masked_vectors(**argument)


@pytest.mark.parametrize("present", [jnp.ones(4, bool), jnp.ones(5, jnp.int32)])
def test_presence_that_is_not_one_client_is_refused(present):
    with pytest.raises(ValueError, match="present is"):
        masks.unmasked_sum(drawn(5, 3), present, key(), 2)
