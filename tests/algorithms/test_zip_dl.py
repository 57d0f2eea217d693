"""Zip-DL: noises that sum to zero over a sender's messages, another one on each."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.algorithms.zip_dl import ZipDL, links
from dpjax.engine.step import Secret
from dpjax.topology import graphs, mixing
from dpjax.topology.links import zero_sum_map
from dpjax.transforms.noise import zero_sum
from dpjax.transforms.variates import normals
from tests.support import composed

W = mixing.metropolis_hastings(graphs.erdos_renyi(6, 0.5, 2))
N = 6
ROUNDS = 3
DEVIATION = 0.5
SENT = links(W)
OWN = SENT.sender == SENT.receiver


def key(seed=0):
    return jax.random.key(seed, impl="threefry2x32")


def make(rule, **change):
    options = {"deviation": DEVIATION, "key": key(), "rounds": ROUNDS, "over": rule}

    def gradient(params, batch):
        return params - batch

    step = change.pop("step", 0.1)
    noisy = zero_sum(SENT.sender, SENT.receiver, **(options | change))
    return composed(W, gradient, optax.scale(-step), privatizer=noisy, method=ZipDL().on(W))


def rounds(algorithm, params, batch, count=ROUNDS):
    state = algorithm.init(params)
    step = jax.jit(algorithm.step)
    results = []
    for _ in range(count):
        state, info = step(key(1), state, batch)
        results.append((state, info))
    return results


def noise(info, params, batch):
    """Noise of the first round's messages."""
    return np.asarray(info.messages) - np.asarray(params - 0.1 * (params - batch))[SENT.sender]


def total(messages):
    return np.stack([messages[SENT.sender == i].sum(0) for i in range(N)])


@pytest.mark.parametrize("rule", ["messages", "with_own_copy"])
def test_noise_sums_to_zero_and_leaves_mean(rule):
    params, batch = np.random.default_rng(0).normal(size=(2, N, 4000)).astype(np.float32)
    (state, info), *_ = rounds(make(rule), jnp.asarray(params), jnp.asarray(batch))
    result = noise(info, params, batch)
    np.testing.assert_allclose(total(result), 0, atol=1e-4)
    own = result[OWN]
    assert np.abs(own).max() < 1e-6 if rule == "messages" else np.abs(own).max() > 0.1
    # Against the variances of I - 11'/m, m the messages; 1.5 times the noise is refused.
    counted = ~OWN | (rule == "with_own_copy")
    m = np.bincount(SENT.sender[counted], minlength=N)[SENT.sender]
    expected = np.where(counted, DEVIATION**2 * (1 - 1 / m), 0)
    sampled = np.where(counted, (result**2).mean(1), 0)
    assert (np.abs(sampled - expected) <= 6 * expected / np.sqrt(2000) + 1e-12).all()
    assert (np.abs(1.5 * sampled - expected) > 6 * expected / np.sqrt(2000) + 1e-12).any()
    plain = W @ (params - 0.1 * (params - batch))
    combined = np.zeros_like(plain)
    np.add.at(combined, SENT.receiver, SENT.weight[:, None] * result)
    np.testing.assert_allclose(state.models, plain + combined, atol=1e-5)


def test_links_are_those_of_matrix():
    dense = np.zeros((N, N))
    dense[SENT.receiver, SENT.sender] = SENT.weight
    np.testing.assert_array_equal(dense, W)
    assert OWN.sum() == N and (np.diff(SENT.sender) >= 0).all()


def bare(value, rounds):
    """Models that stay as they are under noise of deviation 1."""
    noisy = zero_sum(SENT.sender, SENT.receiver, 1.0, key=value, rounds=rounds)
    return composed(
        W, lambda params, batch: params, optax.scale(0.0), privatizer=noisy, method=ZipDL().on(W)
    )


@pytest.mark.parametrize("rule", ["messages", "with_own_copy"])
def test_map_of_noise_is_one_drawn(rule):
    zeros = jnp.zeros((N, 3), jnp.float32)
    (_, info), *_ = rounds(make(rule, step=0.0), zeros, zeros)
    leaf_key = jax.random.fold_in(jax.random.fold_in(key(), 0), 0)
    z = np.asarray(normals(leaf_key, (len(SENT.sender), 3), jnp.float32))
    result = DEVIATION * zero_sum_map(SENT.sender, SENT.receiver, rule) @ z
    np.testing.assert_allclose(info.messages, result, atol=1e-6)


def test_noise_is_fresh_for_every_link_round_leaf_and_seed():
    zeros = {"a": jnp.zeros((N, 3)), "b": jnp.zeros((N, 2, 2))}
    numbers = []
    for seed in (0, 1):
        algorithm = bare(key(seed), ROUNDS)
        state = algorithm.init(zeros)
        for _ in range(ROUNDS):
            new, info = jax.jit(algorithm.step)(key(1), state, jnp.zeros(N))
            numbers += [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(info.messages)]
            state = new._replace(models=zeros)
    combined = np.concatenate(numbers)
    assert len(np.unique(combined)) == combined.size


def test_leaves_of_one_shape_have_noise_of_their_own():
    zeros = {"a": jnp.zeros((N, 4)), "b": jnp.zeros((N, 4))}
    algorithm = bare(key(), 1)
    _, info = algorithm.step(key(1), algorithm.init(zeros), jnp.zeros(N))
    assert np.abs(np.asarray(info.messages["a"] - info.messages["b"])).max() > 0.1


def test_after_last_round():
    zeros = jnp.zeros((N, 2))
    *_, (last, _) = rounds(make("messages"), zeros, zeros, ROUNDS + 1)
    assert np.isnan(last.models).all()
    state = make("messages").init(zeros)
    state = state._replace(secret=Secret(state.secret.noise._replace(round=jnp.int32(ROUNDS))))
    with pytest.raises(ValueError, match="round is 3"):
        make("messages").step(key(), state, zeros)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"deviation": 0.0}, "deviation is 0.0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"key": 3}, "key is int"),
        ({"key": jax.random.key(0, impl="rbg")}, "generator 'rbg'"),
        ({"deviation": 1e-50}, "as float32 needs"),
        ({"over": "links"}, "over is 'links'"),
    ],
)
def test_bad_input(change, text):
    with pytest.raises(ValueError, match=text):
        make(change.pop("over", "messages"), **change)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="takes one matrix"):
        ZipDL().on(np.stack([W, W]))
    noisy = zero_sum(SENT.sender, SENT.receiver, 1.0, key=key(), rounds=1)
    with pytest.raises(ValueError, match=r"\['w'\] has shape \(5, 2\).*messages as their leading"):
        noisy.update({"w": jnp.zeros((5, 2))}, noisy.init(None))
    with pytest.raises(ValueError, match="one of each"):
        zero_sum(SENT.sender, SENT.receiver[1:], 1.0, key=key(), rounds=1)
