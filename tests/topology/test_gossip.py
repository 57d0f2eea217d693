"""Gossip: the product, its precision, and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.topology import gossip, graphs, mixing

W = mixing.metropolis_hastings(graphs.erdos_renyi(12, 0.4, 0))


def test_mix_is_the_dense_product_on_every_leaf() -> None:
    key = jax.random.key(0)
    tree = {"a": jax.random.normal(key, (12, 3, 4)), "b": (jnp.arange(12.0),)}
    mixed = jax.jit(gossip.mix)(W, tree)
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(mixed), strict=True):
        assert after.dtype == before.dtype
        expected = np.einsum("ij,j...->i...", W, np.asarray(before, np.float64))
        np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(mixed) == jax.tree.structure(tree)


def test_mix_keeps_low_precision_but_sums_in_float32() -> None:
    leaf = jnp.full((12, 2), 1.0, jnp.bfloat16).at[0].set(256.0)
    mixed = gossip.mix(W, leaf)
    assert mixed.dtype == jnp.bfloat16
    expected = W @ np.asarray(leaf, np.float64)
    # Rounded once: within half a unit in the last place, and a tie may go either way.
    np.testing.assert_allclose(np.asarray(mixed, np.float64), expected, rtol=2.0**-8 * 1.001)


def test_mix_asks_for_the_highest_precision() -> None:
    assert "HIGHEST" in str(jax.make_jaxpr(gossip.mix)(W, jnp.ones((12, 2))))


@pytest.mark.parametrize("leaf", [jnp.ones((11, 2)), jnp.ones(()), jnp.ones((12,), jnp.int32)])
def test_mix_names_the_bad_leaf(leaf) -> None:
    with pytest.raises(ValueError, match=r"tree\['x'\] has shape"):
        gossip.mix(W, {"x": leaf})
