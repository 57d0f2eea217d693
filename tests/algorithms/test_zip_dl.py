"""Zip-DL: noises that sum to zero over a sender's messages, another one on each."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.algorithms.zip_dl import links, zip_dl
from dpjax.topology import graphs, mixing

W = mixing.metropolis_hastings(graphs.erdos_renyi(6, 0.5, 2))
N, ROUNDS, DEVIATION = 6, 3, 0.5
SENT = links(W)
OWN = SENT.sender == SENT.receiver


def key(seed=0):
    return jax.random.key(seed, impl="threefry2x32")


def make(rule, **change):
    options = {"deviation": DEVIATION, "key": key(), "rounds": ROUNDS, "zero_sum": rule}
    chain = optax.scale(-0.1)
    return zip_dl(W, chain, lambda params, batch: params - batch, **(options | change))


def rounds(algorithm, params, batch, count=ROUNDS):
    state, step, found = algorithm.init(params), jax.jit(algorithm.step), []
    for _ in range(count):
        state, info = step(key(1), state, batch)
        found.append((state, info))
    return found


def noise(info, params, batch):
    """Noise of the first round's messages."""
    return np.asarray(info.messages) - np.asarray(params - 0.1 * (params - batch))[SENT.sender]


def total(messages):
    return np.stack([messages[SENT.sender == i].sum(0) for i in range(N)])


@pytest.mark.parametrize("rule", ["messages", "with_own_copy"])
def test_noise_sums_to_zero_and_leaves_the_mean(rule):
    params, batch = np.random.default_rng(0).normal(size=(2, N, 4000)).astype(np.float32)
    (state, info), *_ = rounds(make(rule), jnp.asarray(params), jnp.asarray(batch))
    found = noise(info, params, batch)
    np.testing.assert_allclose(total(found), 0, atol=1e-4)
    own = found[OWN]
    assert np.abs(own).max() < 1e-6 if rule == "messages" else np.abs(own).max() > 0.1
    # Against the variances of I - 11'/m, m the messages; 1.5 times the noise is refused.
    counted = ~OWN | (rule == "with_own_copy")
    m = np.bincount(SENT.sender[counted], minlength=N)[SENT.sender]
    expected = np.where(counted, DEVIATION**2 * (1 - 1 / m), 0)
    sampled = np.where(counted, (found**2).mean(1), 0)
    assert (np.abs(sampled - expected) <= 6 * expected / np.sqrt(2000) + 1e-12).all()
    assert (np.abs(1.5 * sampled - expected) > 6 * expected / np.sqrt(2000) + 1e-12).any()
    plain = W @ (params - 0.1 * (params - batch))
    combined = np.zeros_like(plain)
    np.add.at(combined, SENT.receiver, SENT.weight[:, None] * found)
    np.testing.assert_allclose(state.params, plain + combined, atol=1e-5)


def test_links_are_those_of_the_matrix():
    dense = np.zeros((N, N))
    dense[SENT.receiver, SENT.sender] = SENT.weight
    np.testing.assert_array_equal(dense, W)
    assert OWN.sum() == N and (np.diff(SENT.sender) >= 0).all()


def test_noise_is_fresh_for_every_link_round_leaf_and_seed():
    zeros = {"a": jnp.zeros((N, 3)), "b": jnp.zeros((N, 2, 2))}
    free = lambda seed: zip_dl(  # noqa: E731
        W, optax.scale(0.0), lambda params, batch: params, deviation=1.0, key=key(seed),
        rounds=ROUNDS,
    )  # fmt: skip
    numbers = []
    for seed in (0, 1):
        algorithm = free(seed)
        state = algorithm.init(zeros)
        for _ in range(ROUNDS):
            new, info = jax.jit(algorithm.step)(key(1), state, jnp.zeros(N))
            numbers += [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(info.messages)]
            state = new._replace(params=zeros)
    joined = np.concatenate(numbers)
    assert len(np.unique(joined)) == joined.size


def test_leaves_of_one_shape_have_noise_of_their_own():
    zeros = {"a": jnp.zeros((N, 4)), "b": jnp.zeros((N, 4))}
    algorithm = zip_dl(
        W, optax.scale(0.0), lambda params, batch: params, deviation=1.0, key=key(), rounds=1
    )
    _, info = algorithm.step(key(1), algorithm.init(zeros), jnp.zeros(N))
    assert np.abs(np.asarray(info.messages["a"] - info.messages["b"])).max() > 0.1


def test_after_the_last_round():
    zeros = jnp.zeros((N, 2))
    *_, (last, _) = rounds(make("messages"), zeros, zeros, ROUNDS + 1)
    assert np.isnan(last.params).all()
    state = make("messages").init(zeros)._replace(round=jnp.int32(ROUNDS))
    with pytest.raises(ValueError, match="round is 3"):
        make("messages").step(key(), state, zeros)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"deviation": 0.0}, "deviation is 0.0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"key": 3}, "key is int"),
        ({"key": jax.random.key(0, impl="rbg")}, "generator 'rbg'"),
        ({"deviation": 1e-50}, "vanishes or overflows"),
        ({"zero_sum": "links"}, "zero_sum is 'links'"),
    ],
)
def test_bad_input(change, text):
    with pytest.raises(ValueError, match=text):
        make(change.pop("zero_sum", "messages"), **change)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="takes one matrix"):
        zip_dl(np.stack([W, W]), optax.scale(-1.0), None, deviation=1.0, key=key(), rounds=1)
    with pytest.raises(ValueError, match="stack the 6 agents"):
        make("messages").init({"w": jnp.zeros((5, 2))})
