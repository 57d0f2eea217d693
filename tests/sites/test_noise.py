"""The noise of a site: known answers, an independent derivation, a key for every address."""

import copy
import hashlib
import hmac
import itertools
import pickle

import numpy as np
import pytest
from scipy import stats

from dpjax._numerics import double_precision
from dpjax.encoding.stream import Stream
from dpjax.sites import noise
from dpjax.sites.noise import SiteNoise
from dpjax.transforms import variates

SECRET = bytes(range(32))
RUN = hashlib.sha256(b"a plan, and a nonce of every site").digest()
OTHER_RUN = hashlib.sha256(b"the plan, and other nonces").digest()


def made(secret: bytes = SECRET, **changes: object) -> SiteNoise:
    """Noise of the site Lyon; changes are arguments."""
    arguments = {"run": RUN, "holder": "Lyon", **changes}
    return SiteNoise(secret, **arguments)


def expand(secret: bytes, salt: bytes, *parts: bytes) -> bytes:
    """HKDF-SHA256 (RFC 5869) of 32 bytes, by hand: each part with its length before it."""
    info = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    extracted = hmac.digest(salt, secret, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def quarter(state: list[int], a: int, b: int, c: int, d: int) -> None:
    """The quarter round of RFC 8439, section 2.1."""
    for x, y, z, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        state[x] = (state[x] + state[y]) % 2**32
        mixed = state[z] ^ state[x]
        state[z] = (mixed << turn | mixed >> 32 - turn) % 2**32


def block(key: bytes, counter: int, nonce: bytes = bytes(12)) -> list[int]:
    """The words of a block of ChaCha20, by hand (RFC 8439, section 2.3)."""
    start = list(np.frombuffer(b"expand 32-byte k" + key, "<u4").astype(int))
    start += [counter, *np.frombuffer(nonce, "<u4").astype(int)]
    state = [int(word) for word in start]
    for _ in range(10):
        for column in range(4):
            quarter(state, column, column + 4, column + 8, column + 12)
        for a, b, c, d in ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)):
            quarter(state, a, b, c, d)
    return [(word + int(first)) % 2**32 for word, first in zip(state, start, strict=True)]


def test_chacha20_gives_the_answers_of_its_standard() -> None:
    # RFC 8439, appendix A.1, vectors 1 and 2: a key of zeros, blocks 0 and 1.
    stream = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    second = "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
    words = Stream(bytes(32)).words(32).astype("<u4").tobytes().hex()
    assert words[:64] == stream and words[128:192] == second
    # Section 2.3.2: the key 00 01 .. 1f, a nonce, block 1; the reference here, and the package's.
    nonce = bytes.fromhex("000000090000004a00000000")
    answer = [0xE4E7F110, 0x15593BD1, 0x1FDD0F50, 0xC47120A3]
    assert block(SECRET, 1, nonce)[:4] == answer
    assert Stream(SECRET).words(32).tolist() == block(SECRET, 0) + block(SECRET, 1)


def test_normals_are_quantiles_of_bits_that_follow_from_the_address() -> None:
    # Phase, round, group, rows and entries.
    address = [number.to_bytes(8, "big") for number in (3, 7, 2, 2, 4)]
    key = expand(SECRET, RUN, b"dpjax site 1", b"normals", b"Lyon", *address)
    words = np.array(block(key, 0)).reshape(2, 4, 2)
    # A sign, and 63 bits of the probability beyond.
    beyond = [
        [((int(high) & 2**31 - 1) * 2**32 + int(low) + 0.5) / 2**64 for high, low in row]
        for row in words
    ]
    sign = np.where(words[..., 0] >> 31, -1, 1)
    expected = sign * stats.norm.isf(beyond)
    drawn = made(phase=3).normals(round=7, group=2, rows=2, entries=4)
    assert drawn.dtype == np.float64
    np.testing.assert_allclose(drawn, expected, rtol=1e-13)


def test_normals_are_standard_and_independent() -> None:
    drawn = [made().normals(round=t, group=0, rows=2, entries=100_000) for t in range(2)]
    rows = np.concatenate(drawn)
    assert stats.kstest(rows.ravel(), "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(rows) - np.eye(4)).max() < 0.02
    assert len(np.unique(rows)) == rows.size


def test_what_was_drawn_before_changes_nothing() -> None:
    """A process that was killed draws the same numbers again, wherever it stopped."""
    first = made()
    for t in range(3):
        first.normals(round=t, group=0, rows=1, entries=5)
    late = made().normals(round=3, group=1, rows=2, entries=9)
    np.testing.assert_array_equal(first.normals(round=3, group=1, rows=2, entries=9), late)


def test_no_two_addresses_share_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    monkeypatch.setattr(noise, "Stream", lambda seed: (seeds.append(seed), Stream(seed))[1])
    # Keys alone matter here; all numbers seem rare, so that draws take both purposes.
    monkeypatch.setattr(noise.variates, "signed_probabilities", lambda *words: words[0] * 0.0)
    monkeypatch.setattr(noise.variates, "quantile", lambda signed: signed)
    # Not traced before.
    monkeypatch.setattr(noise, "_drawn", noise._drawn.__wrapped__)
    holders = ("Lyon", "Lyo", "Paris")
    secrets = (SECRET, bytes(31) + b"1")
    objects = itertools.product(secrets, (RUN, OTHER_RUN), holders, (0, 1))
    addresses = list(itertools.product((0, 256), (0, 1), (1, 2), (1, 2)))
    for secret, run, holder, phase in objects:
        drawn = made(secret, run=run, holder=holder, phase=phase)
        for t, group, rows, entries in addresses:
            drawn.normals(round=t, group=group, rows=rows, entries=entries)
    assert len(seeds) == 2 * 24 * 16 and len(set(seeds)) == len(seeds)


class Scripted:
    """In place of streams: words of the first one, then of the second."""

    streams: list[list[int]]

    def __init__(self, seed: bytes) -> None:
        self.drawn = self.streams.pop(0)

    def words(self, count: int) -> np.ndarray:
        return np.array(self.drawn[:count], np.uint32)


def test_far_tails_have_bits_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first 64 bits are all zero, once in 2^31 draws nearly so, 64 more decide."""
    Scripted.streams = [[0, 0, 2**31, 0, 2**30, 5], [7, 9, 0, 1, 1, 1]]
    monkeypatch.setattr(noise, "Stream", Scripted)
    drawn = made().normals(round=0, group=0, rows=1, entries=3)
    # The sign is the first bit; the third number is not rare, and stays as it is.
    beyond = [(7 * 2**32 + 9.5) / 2**128, 1.5 / 2**128, (2**62 + 5.5) / 2**64]
    expected = np.array([1, -1, 1]) * stats.norm.isf(beyond)
    np.testing.assert_allclose(drawn, [expected], rtol=1e-12)
    assert 11 < drawn[0, 0] < 13 < -drawn[0, 1]


def test_refined_are_all_numbers_below_the_bound_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The largest m that is rare under the bound of 2^-32, and the least that is not.
    Scripted.streams = [[0, 2**32 - 1], [2**31, 0]]
    monkeypatch.setattr(noise, "Stream", Scripted)
    made().normals(round=0, group=0, rows=1, entries=1)
    assert not Scripted.streams
    Scripted.streams = [[1, 0], [2**31, 0]]
    made().normals(round=0, group=0, rows=1, entries=1)
    assert len(Scripted.streams) == 1


def test_other_compilations_agree_within_what_is_accounted() -> None:
    drawn = made().normals(round=0, group=0, rows=1, entries=20_000)
    words = made()._words("normals", (0, 0, 0, 1, 20_000))
    with double_precision():
        eager = np.asarray(variates.quantile(variates.signed_probabilities(*words)))
    error = np.abs(drawn - eager) / (1 + np.abs(eager))
    # Two compilations, or this would compare one with itself.
    assert 0 < error.max() <= noise.finite.SAMPLER.error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"secret": b"short"}, "secret is no 32 bytes"),
        ({"secret": "a" * 32}, "secret is no 32 bytes"),
        ({"secret": bytes(32)}, "secret is all zeros"),
        ({"run": bytes(31)}, "run is no 32 bytes"),
        ({"holder": ""}, "holder is ''; give the name"),
        ({"holder": None}, "holder is missing; give the name"),
        ({"phase": -1}, "phase is -1"),
        ({"phase": 2**31 - 1}, "phase is 2147483647"),
        ({"phase": True}, "phase is True"),
        ({"round": -1}, "round is -1"),
        ({"round": 2**31 - 1}, "round is 2147483647"),
        ({"group": 1.5}, "group is 1.5"),
        ({"group": 2**31 - 1}, "group is 2147483647"),
        ({"rows": 0}, "rows is 0"),
        ({"entries": 0}, "entries is 0"),
    ],
)
def test_other_arguments_are_refused(changes: dict[str, object], message: str) -> None:
    address = {"round": 0, "group": 0, "rows": 1, "entries": 1}
    drawn = {name: changes.get(name, value) for name, value in address.items()}
    arguments = {name: value for name, value in changes.items() if name not in address}
    with pytest.raises(ValueError, match=message) as refusal:
        made(**arguments).normals(**drawn)
    assert "short" not in str(refusal.value) and "aaa" not in str(refusal.value)


def test_secret_is_neither_shown_nor_pickled() -> None:
    site_noise = made()
    assert repr(site_noise) == f"{site_noise}" == "SiteNoise(...)"
    for store in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="holds a secret"):
            store(site_noise)
