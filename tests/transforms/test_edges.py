"""Pairwise secrets: the covariance, what colluding agents can take away, and keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.accounting import views
from dpjax.mechanism.participation import Participation
from dpjax.topology import graphs, mixing
from dpjax.topology.links import link_pairs
from dpjax.transforms import noise, variates

GRAPH = graphs.erdos_renyi(5, 0.5, 1)
W = mixing.metropolis_hastings(GRAPH)
PAIRS = link_pairs(W)
N = 5
E = len(PAIRS)
ROUNDS = 3
OWN = 0.5
SHARED = 2.0
COORDINATES = 40_000


def root(seed=0):
    return jax.random.key(seed, impl="threefry2x32")


def make(own=OWN, shared=SHARED, own_keys=None, edge_keys=None, pairs=PAIRS):
    mine, theirs = noise.simulated_keys(root(), N, E)
    return noise.pairwise_cancelling(
        pairs, own, shared, rounds=ROUNDS,
        own_keys=mine if own_keys is None else own_keys,
        edge_keys=theirs if edge_keys is None else edge_keys,
    )  # fmt: skip


def noises(transform, zeros, rounds=ROUNDS):
    state = transform.init(zeros)
    results = []
    update = jax.jit(transform.update)
    for _ in range(rounds):
        noisy, state = update(zeros, state)
        results.append(jax.tree.map(np.asarray, noisy))
    return results


def laplacian():
    support = (W != 0) & ~np.eye(N, dtype=bool)
    return np.diag(support.sum(1)) - support


def sampled(result):
    flat = result.reshape(N, -1).astype(np.float64)
    return flat @ flat.T / flat.shape[1]


def close(matrix, expected):
    spread = np.sqrt(2 * np.outer(np.diag(expected), np.diag(expected)) / COORDINATES)
    return bool((np.abs(matrix - expected) <= 5 * spread + 1e-6).all())


def test_covariance_is_own_plus_shared_laplacian():
    expected = OWN * np.eye(N) + SHARED * laplacian()
    result = sampled(noises(make(), jnp.zeros((N, COORDINATES)))[1])
    assert close(result, expected) and not close(1.5 * result, expected)
    # Without the minus at the other end the covariance is another one.
    assert not close(
        result, OWN * np.eye(N) + SHARED * (2 * np.diag(np.diag(laplacian())) - laplacian())
    )
    source = views.decor(W, OWN, SHARED).source
    np.testing.assert_allclose(source @ source.T, expected, atol=1e-12)


def drawn(attackers, missing=None):
    """Noise of the first round as the attackers draw it, from the keys that they hold alone."""
    own_keys, edge_keys = noise.simulated_keys(root(), N, E)
    reference = np.zeros((N, COORDINATES), np.float32)

    def normals(value):
        value = jax.random.fold_in(jax.random.fold_in(value, 0), 0)
        return np.asarray(variates.normals(value, (1, COORDINATES), jnp.float32))[0]

    for agent in attackers:
        reference[agent] += np.sqrt(OWN) * normals(own_keys[agent])
    for index, (plus, minus) in enumerate(PAIRS.tolist()):
        if {plus, minus} & set(attackers) and index != missing:
            reference[plus] += np.sqrt(SHARED) * normals(edge_keys[index])
            reference[minus] -= np.sqrt(SHARED) * normals(edge_keys[index])
    return reference


@pytest.mark.parametrize("attackers", [pytest.param((0,), marks=pytest.mark.slow), (1, 3)])
def test_colluding_agents_take_away_what_they_hold_and_no_more(attackers):
    complete = noises(make(), jnp.zeros((N, COORDINATES), jnp.float32), 1)[0]
    left = complete - drawn(attackers)
    # Nothing is left on themselves; on others, the noise that the view says they do not know.
    np.testing.assert_allclose(left[list(attackers)], 0, atol=1e-5)
    reach = np.flatnonzero((W[list(attackers)] != 0).any(0))
    source = views.decor(W, OWN, SHARED).pndp(attackers).materialize(1)[1]
    source = source[: len(reach)]  # rows of zeros fill a view up
    assert close(sampled(left)[np.ix_(reach, reach)], source @ source.T)
    honest = np.setdiff1d(np.arange(N), attackers)
    # The same by hand: own noise, and the Laplacian of the links among honest agents.
    among = -laplacian()[np.ix_(honest, honest)] * (1 - np.eye(len(honest)))
    by_hand = OWN * np.eye(len(honest)) + SHARED * (np.diag(among.sum(1)) - among)
    union = np.ix_(honest, honest)
    assert close(sampled(left)[union], by_hand)
    # One link's key less, another set of attackers, or nothing known, leaves another covariance.
    some = next(k for k, pair in enumerate(PAIRS.tolist()) if len(set(pair) & set(attackers)) == 1)
    others = tuple(honest[: len(attackers)].tolist())
    for guess in (drawn(attackers, missing=some), drawn(others), np.zeros_like(complete)):
        assert not close(sampled(complete - guess)[union], by_hand)
    mu = (
        views.decor(W, OWN, SHARED)
        .pndp(attackers)
        .gdp(Participation(ROUNDS, 1, 1), gradients="view")
    )
    assert np.isnan(mu[list(attackers)]).all() and np.isfinite(np.delete(mu, attackers)).all()


def test_rounds_leaves_and_links_share_no_number():
    zeros = {"a": jnp.zeros((N, 7)), "b": jnp.zeros((N, 2, 3))}
    everything = [
        np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(part)])
        for kind in (make(shared=0.0), make(own=0.0))
        for part in noises(kind, zeros)
    ]
    own = np.concatenate(everything[:ROUNDS])
    assert len(np.unique(own)) == own.size
    shared = np.abs(np.concatenate(everything[ROUNDS:]))
    assert not np.isin(shared, np.abs(own)).any()


def test_after_last_round():
    zeros = jnp.zeros((N, 2))
    result = noises(make(), zeros, ROUNDS + 1)
    assert np.isfinite(result[ROUNDS - 1]).all() and np.isnan(result[ROUNDS]).all()
    transform = make()
    state = transform.init(zeros)._replace(round=jnp.int32(ROUNDS))
    with pytest.raises(ValueError, match="round is 3, the noise is accounted for 3 rounds"):
        transform.update(zeros, state)


@pytest.mark.x64
def test_narrow_leaves_keep_their_dtype():
    (first, *_) = noises(make(), {"a": jnp.zeros((N, 3), jnp.bfloat16)})
    assert first["a"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"own": -1.0}, "own is -1.0; give a variance"),
        ({"shared": np.nan}, "shared is nan"),
        ({"pairs": PAIRS[:-1]}, r"edge_keys has shape"),
        ({"pairs": np.array([[0, 0], *PAIRS[1:]])}, "every link of two"),
        ({"pairs": np.array([PAIRS[1][::-1], *PAIRS[1:]])}, "every link of two"),
        ({"pairs": np.array([[0, 99], *PAIRS[1:]])}, "agents of 0 .. 4"),
        ({"pairs": PAIRS.astype(float)}, "whole numbers, every link"),
        ({"edge_keys": jax.random.split(root(), E)[np.zeros(E, int)]}, "hold a key twice"),
        ({"own_keys": jax.random.split(jax.random.key(0, impl="rbg"), N)}, "generator 'rbg'"),
        ({"own_keys": np.arange(N)}, "own_keys is ndarray"),
    ],
)
def test_bad_input(change, text):
    with pytest.raises(ValueError, match=text):
        make(**change)


def test_leaves_without_agents_are_refused():
    transform = make()
    with pytest.raises(ValueError, match=r"updates\['a'\] has shape \(2, 3\)"):
        transform.update({"a": jnp.zeros((2, 3))}, transform.init(None))
