"""Hashes written out give the bits of JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import _numerics

KEY = jax.random.fold_in(jax.random.key(7, impl="threefry2x32"), 3)


@pytest.mark.gate(3)
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1), (5, 9), (20, 129), (3, 0)])
def test_bits_are_those_of_jax(shape):
    expected = np.asarray(jax.random.bits(KEY, shape, jnp.uint32))
    np.testing.assert_array_equal(_numerics.threefry_bits(KEY, shape), expected)
    np.testing.assert_array_equal(
        jax.jit(_numerics.threefry_bits, static_argnums=1)(KEY, shape), expected
    )


@pytest.mark.parametrize("number", [0, 1, 5, 2**31 - 1, 2**32 - 1])
def test_folded_keys_are_those_of_jax(number):
    expected = jax.random.key_data(jax.random.fold_in(KEY, number))
    for folded in (
        _numerics.fold_in(KEY, number),
        jax.jit(_numerics.fold_in)(KEY, jnp.uint32(number)),
        jax.vmap(_numerics.fold_in, (0, None))(KEY[None], np.uint32(number))[0],
    ):
        np.testing.assert_array_equal(jax.random.key_data(folded), expected)


def test_other_generators_are_left_to_jax():
    key = jax.random.key(7, impl="rbg")
    folded = _numerics.fold_in(key, 3)
    expected = jax.random.fold_in(key, 3)
    np.testing.assert_array_equal(jax.random.key_data(folded), jax.random.key_data(expected))
    np.testing.assert_array_equal(
        _numerics.threefry_bits(key, (3, 4)), jax.random.bits(key, (3, 4), jnp.uint32)
    )


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_several_keys_are_refused(impl):
    """Two keys are four words, which would be taken for the two words of two keys mixed up."""
    keys = jax.random.split(jax.random.key(7, impl=impl), 2)
    for refused in (
        lambda: _numerics.threefry_bits(keys, (3, 4)),
        lambda: jax.jit(_numerics.threefry_bits, static_argnums=1)(keys, (3, 4)),
        lambda: _numerics.fold_in(keys, 3),
    ):
        with pytest.raises(
            ValueError, match=r"key has shape \(2,\); give one key, or use jax.vmap"
        ):
            refused()
    counters = jnp.zeros((5,), jnp.uint32)
    with pytest.raises(ValueError, match="give one key"):
        _numerics.threefry(jax.random.split(KEY, 2), counters, counters)


def test_no_loop_is_left_in_draw():
    # What JAX hashes in on a CPU: a loop that nothing fuses with, and a round has several.
    def hashes(key):
        return _numerics.threefry_bits(_numerics.fold_in(key, 3), (4, 8))

    assert "stablehlo.while" not in jax.jit(hashes).lower(KEY).as_text()
