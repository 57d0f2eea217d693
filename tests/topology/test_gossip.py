"""Gossip: the product, its precision, and refusals."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from scipy.sparse import csr_array as csr

from dpjax._numerics import double_precision
from dpjax.topology import gossip, graphs, mixing

W = mixing.metropolis_hastings(graphs.erdos_renyi(12, 0.4, 0))


def test_mix_is_dense_product_on_every_leaf() -> None:
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


def test_mix_asks_for_highest_precision() -> None:
    assert "HIGHEST" in str(jax.make_jaxpr(gossip.mix)(W, jnp.ones((12, 2))))


@pytest.mark.parametrize("leaf", [jnp.ones((11, 2)), jnp.ones(()), jnp.ones((12,), jnp.int32)])
def test_mix_names_bad_leaf(leaf) -> None:
    with pytest.raises(ValueError, match=r"tree\['x'\] has shape"):
        gossip.mix(W, {"x": leaf})


def star_and_ring() -> np.ndarray:
    """Rows of 2 to 200 entries, one of them wide, weights all different, rows not stochastic."""
    rng = np.random.default_rng(0)
    graph = nx.compose(graphs.ring(200), graphs.star(200))
    graph.add_edges_from((i, (i * i + 3) % 200) for i in range(0, 200, 7) if i != (i * i + 3) % 200)
    return (nx.to_numpy_array(graph) + np.eye(200)) * rng.uniform(0.1, 1.0, (200, 200))


NETWORKS = {
    "ring": mixing.metropolis_hastings(graphs.ring(120)),
    "grid": mixing.metropolis_hastings(graphs.grid(18, 19)),
    "irregular": star_and_ring(),
    "directed": np.triu(np.tril(star_and_ring(), 3)) + np.eye(200)[::-1],
    "schedule": np.stack([np.roll(np.eye(130), k, 1) * (k + 1.0) for k in (0, 1, 5)]),
}


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", NETWORKS)
def test_tables_give_dense_product_to_rounding(name) -> None:
    matrix = NETWORKS[name]
    tables = gossip.neighbours(matrix, np.float64)
    assert tables is not None and tables.agents == matrix.shape[-1]
    tree = {"a": np.random.default_rng(1).standard_normal((tables.agents, 3, 2))}
    mixed = jax.jit(lambda w, t, round: gossip.mix(gossip.at(w, round), t))
    with double_precision():
        for round in (0, 1, 5) if matrix.ndim == 3 else (4,):
            used = matrix[round % 3] if matrix.ndim == 3 else matrix
            np.testing.assert_allclose(
                mixed(tables, tree, round)["a"],
                np.einsum("ij,j...->i...", used, tree["a"]),
                rtol=1e-12,
                atol=1e-13,
            )
    narrow = {"a": jnp.asarray(tree["a"], jnp.bfloat16)}
    assert gossip.mix(gossip.at(tables, 0), narrow)["a"].dtype == jnp.bfloat16


@pytest.mark.mutant
@pytest.mark.parametrize("fault", ["dropped", "permuted", "order"])
def test_wrong_neighbours_change_product(fault) -> None:
    matrix = NETWORKS["irregular"]
    tables = gossip.neighbours(matrix, np.float32)
    assert tables is not None
    weights = list(tables.weights)
    order = tables.order
    if fault == "dropped":
        weights[1] = weights[1] * (np.arange(weights[1].shape[1]) > 0)
    elif fault == "permuted":
        weights[1] = weights[1][:, ::-1]
    else:
        order = np.argsort(order)
    values = np.random.default_rng(1).standard_normal((200, 4)).astype(np.float32)
    broken = dataclasses.replace(tables, weights=tuple(weights), order=order)
    np.testing.assert_allclose(gossip.mix(tables, values), matrix @ values, 1e-4, 1e-5)
    assert np.abs(gossip.mix(broken, values) - matrix @ values).max() > 1e-3


def test_layout_follows_from_entries_alone() -> None:
    few = mixing.metropolis_hastings(graphs.ring(64))
    assert gossip.neighbours(few, np.float32) is None
    assert gossip.neighbours(np.full((100, 100), 0.01), np.float32) is None
    first, second = (
        gossip.neighbours(kind(NETWORKS["ring"]), np.float32) for kind in (np.array, csr)
    )
    assert (
        first is not None
        and first.order is None
        and jax.tree.structure(first) == jax.tree.structure(second)
    )
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match=r"leading axis of n=120"):
        gossip.mix(first, jnp.ones((121, 2)))


@pytest.mark.slow
@hypothesis.given(st.integers(65, 160), st.floats(0, 0.05), st.integers(0, 2**32 - 1))
def test_tables_of_random_matrices_give_dense_product(n, density, seed) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.uniform(size=(n, n)) * (rng.uniform(size=(n, n)) < density)
    values = rng.standard_normal((n, 3)).astype(np.float32)
    if (tables := gossip.neighbours(matrix, np.float32)) is not None:
        np.testing.assert_allclose(gossip.mix(tables, values), matrix @ values, 1e-4, 1e-4)
