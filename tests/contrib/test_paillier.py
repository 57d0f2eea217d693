"""The encrypted exchange against a formula in NumPy, its range, traffic and refusals."""

import sys
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("phe", reason="the extra `contrib` is not installed")
pytest.importorskip("gmpy2", reason="the extra `contrib` is not installed")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import strategies as st  # noqa: E402

from dpjax.contrib.paillier import (  # noqa: E402
    Agent,
    FixedPoint,  # noqa: E402
    Obfuscators,
    PaillierExchange,  # noqa: E402
)

N = 5
LINKS = [(0, 1), (3, 1), (1, 2), (0, 3)]  # agent 4 has none
UNIT = 2.0**-40
WEIGHT = 2.0**-32


class Shown(NamedTuple):
    model: object
    weights: np.ndarray


def drawn(seed, links=LINKS, n=N):
    """Weights on links, no two the same."""
    weights = np.zeros((n, n), np.float32)
    random = np.random.default_rng(seed)
    for i, j in links:
        weights[i, j], weights[j, i] = random.uniform(0.01, 1, 2)
    return weights


def pulls(model, weights):
    """sum_j b_ij b_ji (x_j - x_i), and a bound on what fixed point may add to it."""
    x = np.asarray(model, np.float64).reshape(len(model), -1)
    b = weights.astype(np.float64)
    total = np.zeros_like(x)
    bound = np.zeros_like(x)
    for i in range(len(x)):
        for j in range(len(x)):
            grain = 0.0 if x[j].max() == x[j].min() == 0 else np.spacing(
                np.abs(np.asarray(model[j])).max()
            )  # fmt: skip
            blur = max(UNIT, np.ceil(float(grain) / UNIT) * UNIT) / 2
            total[i] += b[i, j] * b[j, i] * (x[j] - x[i])
            off = UNIT + blur + (np.abs(x[j] - x[i]) + UNIT) * WEIGHT / 2
            bound[i] += b[i, j] * (off + 1e-15 * np.abs(x[j] - x[i]))
    return total.reshape(model.shape), bound.reshape(model.shape)


@pytest.fixture(scope="module")
def exchange():
    return PaillierExchange(LINKS, N, key_size=512, allow_weak=True, watch=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_received_is_sum_of_weighed_differences(exchange, dtype, seed):
    random = np.random.default_rng(seed)
    model = {
        "kernel": (random.normal(size=(N, 2, 2)) * [1e-6, 3e3]).astype(dtype),
        "bias": random.normal(size=N).astype(dtype),
        "zero": np.zeros((N, 1), dtype),
    }
    weights = drawn(seed)
    received = exchange(Shown(model, weights), 0)
    assert set(received) == set(model)
    for name, leaf in model.items():
        want, bound = pulls(leaf, weights)
        assert received[name].dtype == dtype and received[name].shape == leaf.shape
        # What comes back is rounded to the model's dtype once more.
        last = np.finfo(dtype).eps * np.abs(want) + 1e-300
        assert (np.abs(received[name] - want) <= bound + last).all()
        assert not received[name][4].any()
    # The tolerance is far below what is measured.
    want, bound = pulls(model["kernel"], weights)
    assert bound[:4].max() < 1e-6 * np.abs(want).max()


def test_half_precision_comes_back_as_it_went(exchange):
    model = jnp.arange(N, dtype=jnp.bfloat16)
    received = exchange((np.asarray(model), drawn(0)), 0)
    assert received.dtype == jnp.bfloat16
    want, _ = pulls(np.arange(N, dtype=np.float64), drawn(0))
    # A grain of the largest value is 2^-5.
    np.testing.assert_allclose(received.astype(np.float64), want, atol=3 * 2.0**-6 + 0.02)


CODE = FixedPoint(value_bits=12, fraction_bits=4, weight_bits=8)
WHOLE = st.integers(-(2**11), 2**11 - 1) | st.sampled_from([-(2**11), 2**11 - 1, 0, -1, 1])
SHARES = st.integers(0, 256) | st.sampled_from([0, 1, 255, 256])


@pytest.fixture(scope="module")
def pair():
    return PaillierExchange([(0, 1)], 2, key_size=256, code=CODE, allow_weak=True, watch=True)


@hypothesis.given(
    x=st.lists(WHOLE, min_size=2, max_size=2), y=st.lists(WHOLE, min_size=2, max_size=2),
    b=SHARES, c=SHARES,
)  # fmt: skip
def test_every_value_and_weight_of_range_comes_through(pair, x, y, b, c):
    model = np.array([x, y], np.float64) / 16
    weights = np.array([[0, b], [c, 0]]) / 256
    received = pair((model, weights), 0)
    want = b * c / 2**16 * (model[1] - model[0])
    # Values and weights are held exactly here: the blur alone is left.
    assert (np.abs(received[0] - want) <= b / 256 / 32).all()
    assert (np.abs(received[1] + want) <= c / 256 / 32).all()


def test_blur_is_uniform_below_half_unit():
    code = FixedPoint(value_bits=12, fraction_bits=4, weight_bits=3)
    single = PaillierExchange([(0, 1)], 2, key_size=128, code=code, allow_weak=True)
    size = 4000
    model = np.stack([np.full(size, 2.0), np.full(size, -3.5)])
    received = single((model, np.array([[0, 1], [0.625, 0]])), 0)
    # Differences of b (y - x) in eighths of a unit: -4 to 3, each as often.
    blur = np.rint(received[0] * 128 - 0.625 * -5.5 * 128).astype(int)
    counts = np.bincount(blur + 4, minlength=8)
    assert len(counts) == 8
    # One in a million of chi-square with 7 degrees.
    assert ((counts - size / 8) ** 2 / (size / 8)).sum() < 40.5
    biased = np.bincount(np.minimum(blur + 4, 6), minlength=8)
    assert ((biased - size / 8) ** 2 / (size / 8)).sum() > 40.5


def test_traffic_is_four_ciphertexts_link_and_coordinate(exchange):
    exchange.traffic.clear()
    for round in (0, 1):
        exchange((np.ones((N, 3)), drawn(round)), round)
    numbers = 4 * len(LINKS) * 3
    assert exchange.traffic == [(0, numbers, numbers * 128), (1, numbers, numbers * 128)]
    crossed = [ciphertext for sent in exchange.seen for ciphertext in sent.ciphertexts]
    assert len(crossed) == numbers
    assert 1000 < max(message.bit_length() for message in crossed) <= 1024
    pairs = {(sent.sender, sent.receiver, sent.kind) for sent in exchange.seen}
    ends = {(i, j) for i, j in LINKS} | {(j, i) for i, j in LINKS}
    assert pairs == {(*union, kind) for union in ends for kind in ("request", "answer")}


def test_obfuscators_are_residues_used_once():
    agent = Agent(0, 256, CODE, allow_weak=True)
    n = agent.modulus
    order = (agent._private.p - 1) * (agent._private.q - 1)
    for pool in (agent._own, Obfuscators(n)):
        pool.fill(5)
        assert len(pool) == 5 and pool.late == 0
        selection = [pool.take() for _ in range(8)]
        assert len(set(selection)) == 8 and len(pool) == 0 and pool.late == 3
        # r^n has an order that divides (p-1)(q-1), and hides all of what it multiplies.
        assert all(pow(item, order, n**2) == 1 and item % n != 1 for item in selection)
        assert all(agent._private.raw_decrypt(value) == 0 for value in selection)


@pytest.mark.parametrize("primes", [None, (11, 13)])
def test_obfuscators_are_uniform_over_all_residues(primes):
    n = 11 * 13
    want = {pow(r, n, n**2) for r in range(1, n) if r % 11 and r % 13}
    pool = Obfuscators(n, primes)
    pool.fill(12_000)
    selection = [pool.take() for _ in range(12_000)]
    # Of so short a modulus some r have a factor in common with it: the owner's draws never do.
    selection = [item for item in selection if item % 11 and item % 13]
    assert set(selection) == want and len(want) == 120
    counts = np.array([selection.count(value) for value in sorted(want)])
    expected = len(selection) / 120
    assert ((counts - expected) ** 2 / expected).sum() < 207.2  # one in a million


def test_obfuscators_are_computed_ahead_for_so_many_numbers():
    single = PaillierExchange([(0, 1)], 2, key_size=256, code=CODE, allow_weak=True)
    single.prepare(6)
    for round in range(2):
        single((np.ones((2, 3)), np.array([[0, 0.5], [0.5, 0]])), round)
    assert single.late == 0
    single((np.ones((2, 3)), np.array([[0, 0.5], [0.5, 0]])), 2)
    assert single.late == 2 * 3 * 2


GOOD = np.array([[0, 0.5], [0.5, 0]])
BAD = {
    "wide": ((np.array([[0.0], [128.0]]), GOOD), "model of agent 1 holds 128.0 at entry 0"),
    "nan": ((np.array([[0.0], [np.nan]]), GOOD), "model of agent 1 holds nan"),
    "weight": ((np.ones((2, 1)), 3 * GOOD), "weights of agent 0 holds 1.5 at entry 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_messages_beyond_fixed_point_are_refused_before_sending(pair, name):
    message, match = BAD[name]
    before = len(pair.traffic)
    pair.seen = []
    with pytest.raises(ValueError, match=match):
        pair(message, 0)
    assert len(pair.traffic) == before and not pair.seen


@pytest.mark.parametrize(
    ("links", "changes", "match"),
    [
        ([(0, 1)], {"key_size": 512, "allow_weak": False}, "key_size is 512; give an even number"),
        ([(0, 1)], {"key_size": 2049}, "key_size is 2049; give an even number"),
        ([(0, 1)], {"key_size": 128, "code": FixedPoint(96)}, "takes 130 bits; give fewer value"),
    ],
)
def test_keys_that_are_weak_or_short_are_refused(links, changes, match):
    with pytest.raises(ValueError, match=match):
        PaillierExchange(links, 2, **{"allow_weak": True, **changes})


def test_keys_are_of_2048_bits_unless_told():
    single = PaillierExchange([(0, 1)], 2)
    assert [agent.modulus.bit_length() for agent in single.agents] == [2048, 2048]
    model = np.array([[1.0], [-2.0]])
    received = single((model, np.array([[0, 0.5], [0.25, 0]])), 0)
    np.testing.assert_allclose(received, [[-0.375], [0.375]], atol=3e-12)
    assert single.traffic == [(0, 4, 4 * 512)]


@pytest.mark.parametrize("library", ["phe.paillier", "gmpy2"])
def test_without_extra_it_is_said_what_to_install(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=r"pip install '\.\[contrib\]' \(phe is under the GPL"):
        PaillierExchange([(0, 1)], 2)


def met():
    """Two agents that know each other, with a model each."""
    agents = [Agent(i, 256, CODE, allow_weak=True) for i in range(2)]
    for item, other in (agents, agents[::-1]):
        item.meet(other.number, other.modulus)
        item.begin(np.array([1.0, -2.0]) * (1 + item.number), np.array([[0, 0.5], [0.5, 0]])[
            item.number
        ])  # fmt: skip
    return agents


def test_agents_refuse_what_protocol_has_not():
    first, other = met()
    request = first.request()
    with pytest.raises(ValueError, match="asker is 7, a stranger to agent 1"):
        other.answer(7, request)
    with pytest.raises(ValueError, match="are 1, and the model has 2 coordinates"):
        other.answer(0, request[:1])
    for bad in (0, first.modulus**2, 1.5, -request[0]):
        with pytest.raises(ValueError, match="hold what is no whole number from 1 to"):
            other.answer(0, [request[0], bad])
    answer = other.answer(0, request)
    with pytest.raises(ValueError, match="asker is 0, which agent 1 has answered in this round"):
        other.answer(0, request)
    # A changed ciphertext decrypts to anything below n, which no product is.
    with pytest.raises(ValueError, match="answerer is 1, whose answer decrypts to"):
        first.receive(1, [answer[0], answer[1] ^ 1])
    first.receive(1, answer)
    np.testing.assert_allclose(first.pulled(), [0.25, -0.5], atol=1 / 32)
    with pytest.raises(ValueError, match="agent 3 has no model yet"):
        Agent(3, 256, CODE, allow_weak=True).request()
    with pytest.raises(ValueError, match="modulus of agent 1 is .*fewer than 256 bits; let"):
        first.meet(1, Agent(1, 128, CODE, allow_weak=True).modulus)


@pytest.mark.mutant
def test_unsigned_numbers_would_be_seen(monkeypatch):
    """The broken twin reads the upper half of Z_n as large numbers, not as negative ones."""
    first, other = met()
    monkeypatch.setattr(first, "_decrypted", lambda value: int(first._private.raw_decrypt(value)))
    with pytest.raises(ValueError, match="decrypts to"):
        first.receive(1, other.answer(0, first.request()))


def test_keys_that_are_not_neighbours_are_refused():
    first, other = met()
    for invalid in (first.modulus, other.modulus - 1):
        with pytest.raises(ValueError, match="modulus of agent 1 is even, one's own, or of fewer"):
            first.meet(1, invalid)
    # None of these took the neighbour's place.
    first.receive(1, other.answer(0, first.request()))
