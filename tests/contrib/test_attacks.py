"""What the exchange keeps from outsiders and neighbours, and what broken twins of it give away."""

import secrets
import types

import numpy as np
import pytest

pytest.importorskip("phe", reason="the extra `contrib` is not installed")
pytest.importorskip("gmpy2", reason="the extra `contrib` is not installed")

from dpjax.contrib import paillier  # noqa: E402
from dpjax.contrib.paillier import (  # noqa: E402
    Agent,
    FixedPoint,  # noqa: E402
    Obfuscators,
    PaillierExchange,  # noqa: E402
)
from tests.contrib import attacks  # noqa: E402

D = 40
CODE = FixedPoint(value_bits=32, fraction_bits=20, weight_bits=32)
MODEL = np.random.default_rng(3).normal(size=(2, D))
WEIGHTS = np.array([[0, 0.3], [0.7654321, 0]])
SHARE = round(0.7654321 * 2**32)  # what agent 0 must not learn


def exchanged(model=MODEL, weights=WEIGHTS, code=CODE, watch=True):
    exchange = PaillierExchange([(0, 1)], 2, key_size=256, code=code, allow_weak=True, watch=watch)
    exchange((model, weights), 0)
    return exchange


def crossed(value, asker=0):
    """Agent 0's request and the answer to it."""
    results = [sent.ciphertexts for sent in value.seen if asker == (
        sent.sender if sent.kind == "request" else sent.receiver
    )]  # fmt: skip
    return results[0], results[1]


def openly(value, asker=0):
    """All that crosses under agent 0's key, read without a key: whole numbers, or None."""
    n = value.agents[asker].modulus
    return [attacks.read(item, n) for pair in crossed(value, asker) for item in pair]


def test_outsiders_read_nothing_without_key():
    single = exchanged()
    assert openly(single) == [None] * 2 * D and openly(single, 1) == [None] * 2 * D
    entries = [ciphertext for sent in single.seen for ciphertext in sent.ciphertexts]
    assert len(set(entries)) == len(entries)
    wholes = {abs(item) for item in CODE.values("x", MODEL.ravel())} | {SHARE}
    assert not wholes & set(entries)


def test_same_model_never_looks_same():
    single = exchanged()
    before = {ciphertext for sent in single.seen for ciphertext in sent.ciphertexts}
    single((MODEL, WEIGHTS), 1)
    assert not before & {item for sent in single.seen for item in sent.ciphertexts}


@pytest.mark.mutant
def test_without_obfuscators_outsiders_would_read_models(monkeypatch):
    monkeypatch.setattr(Obfuscators, "take", lambda pool: 1)
    assert openly(exchanged())[:D] == [-item for item in CODE.values("x", MODEL[0])]


@pytest.mark.mutant
def test_reused_obfuscator_would_tell_outsiders_differences(monkeypatch):
    def told(value):
        n, (request, _) = value.agents[0].modulus, crossed(value)
        return [attacks.difference(request[0], item, n) for item in request[1:]]

    assert told(exchanged()) == [None] * (D - 1)
    selection = {}

    def again(pool):
        return selection.setdefault(id(pool), pool._fresh())

    monkeypatch.setattr(Obfuscators, "take", again)
    wholes = CODE.values("x", MODEL[0])
    assert told(exchanged()) == [case - wholes[0] for case in wholes[1:]]


@pytest.mark.mutant
def test_outsiders_read_weight_of_repeated_answer(monkeypatch):
    """Modulo n a ciphertext is its obfuscator, and the answer a power of it: 2^16 steps find b."""

    def told(value):
        (request, answer), n = crossed(value), value.agents[0].modulus
        return attacks.logarithm(request[0] % n, answer[0] % n, n, 32)

    assert told(exchanged()) is None
    take = Obfuscators.take
    monkeypatch.setattr(Obfuscators, "take", lambda pool: 1 if pool._primes is None else take(pool))
    assert told(exchanged()) == SHARE


@pytest.mark.mutant
def test_obfuscation_before_power_tells_parity(monkeypatch):
    """As the protocol is printed, E(x_j) is obfuscated and then raised to b: always a square."""
    even = np.array([[0, 0.5], [0.5, 0]])

    def told(value):
        return attacks.squares(crossed(value)[1], value.agents[0]._private.p)

    assert 5 < sum(told(exchanged(weights=even))) < D - 5

    def before(self, asker, ciphertexts):
        public, pool = self._others[asker]
        return [
            pow(self._encrypted(public, x, pool.take()) * ciphertext, self._exponents[asker],
                public.nsquare)
            for x, ciphertext in zip(self._values, ciphertexts, strict=True)
        ]  # fmt: skip

    monkeypatch.setattr(Agent, "answer", before)
    twin = exchanged(weights=even)
    assert all(told(twin))
    # It computes the same sums, which no test of sums would tell from right ones.
    np.testing.assert_allclose(twin.agents[0].pulled(), 0.25 * (MODEL[1] - MODEL[0]), atol=2e-6)


def decrypted(value):
    """What agent 0 decrypts."""
    return [value.agents[0]._decrypted(item) for item in crossed(value)[1]]


def unblurred(monkeypatch):
    """Draws of obfuscators stay, those of the blur, far shorter, are 0."""

    def randbelow(span):
        return secrets.randbelow(span) if span.bit_length() > 100 else span // 2

    monkeypatch.setattr(paillier, "secrets", types.SimpleNamespace(randbelow=randbelow))


@pytest.mark.mutant
def test_without_blur_asker_divides_weight_out(monkeypatch):
    assert attacks.divisor(decrypted(exchanged())) != SHARE
    unblurred(monkeypatch)
    assert attacks.divisor(decrypted(exchanged())) == SHARE


@pytest.mark.mutant
def test_blur_below_grain_of_floats_would_tell_weight(monkeypatch):
    """float32 values lie on a grid of 2^-23 here, fixed point on one of 2^-40."""
    code = FixedPoint(value_bits=48, fraction_bits=40, weight_bits=16)
    model = (1 + np.random.default_rng(4).random((2, D))).astype(np.float32)
    share = round(0.7654321 * 2**16)
    grain = 2**17
    # A difference is below 1, and so the weight at least an answer.
    answers = decrypted(exchanged(model, code=code))
    minimum = max(abs(answer) for answer in answers) / 2**40

    def told(answers, width):
        fits = attacks.consistent(answers, grain, 16, width)
        return fits[fits >= minimum]

    # With the blur of a run nothing is ruled out; as if it were narrower, all or nothing is found.
    assert len(told(answers, grain * 2**15)) == 2**16 - np.ceil(minimum) + 1
    assert not len(told(answers, 2**15))
    begin = Agent.begin
    monkeypatch.setattr(Agent, "begin", lambda self, values, weights, grains: begin(
        self, values, weights
    ))  # fmt: skip
    twin = decrypted(exchanged(model, code=code))
    assert told(twin, 2**15).tolist() == [share]


def test_agent_sends_its_modulus_and_ciphertexts_alone():
    single = exchanged()
    for agent in single.agents:
        assert [name for name in vars(agent) if not name.startswith("_")] == ["number"]
    kinds = {type(ciphertext) for sent in single.seen for ciphertext in sent.ciphertexts}
    assert kinds == {int}
