"""Masks: uniform, of every bit of the seed, cancelling; broken generators are caught."""

import hashlib
import hmac

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra `secure` is not installed")

from scipy import stats  # noqa: E402

from dpjax.secagg import primitives  # noqa: E402


def key(text):
    return hashlib.sha256(str(text).encode()).digest()


def test_derived_key_is_hkdf_of_parts_with_their_lengths():
    # RFC 5869 by hand: one block of 32 bytes.
    secret = key("secret")
    session = key("session")
    parts = (primitives.LABEL, b"mask", b"\0\0\0\1", b"other")
    info = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    extracted = hmac.digest(session, secret, "sha256")
    expected = hmac.digest(extracted, info + b"\1", "sha256")
    assert primitives.derived(secret, "mask", session, *parts[2:]) == expected


def test_stream_is_chacha20():
    # RFC 8439, A.1, test vector 1.
    block = bytes.fromhex(
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert primitives.stream(bytes(32), 64) == block
    for bits, dtype in ((8, "<u1"), (16, "<u2"), (32, "<u4"), (64, "<u8")):
        want = np.frombuffer(block, dtype).astype(np.uint64)
        np.testing.assert_array_equal(primitives.expand(bytes(32), len(want), bits), want)


@pytest.mark.parametrize("bits", [1, 3, 8, 12, 20, 32, 33, 48, 63, 64])
def test_numbers_are_of_their_bits_and_all_bits_are_used(bits):
    drawn = primitives.expand(key(bits), 4096, bits)
    assert drawn.dtype == np.uint64 and drawn.shape == (4096,)
    assert drawn.max() < 2**bits
    for bit in range(bits):
        ones = int(((drawn >> np.uint64(bit)) & np.uint64(1)).sum())
        assert abs(ones - 2048) < 5 * 32  # five standard deviations
    np.testing.assert_array_equal(drawn, primitives.expand(key(bits), 4096, bits))


def uniform(expand, bits=4, draws=64, length=1024):
    """Whether every value of Z_(2^bits) comes as often as the others."""
    counts = np.zeros(2**bits)
    for seed in range(draws):
        counts += np.bincount(expand(key(seed), length, bits).astype(int), minlength=2**bits)
    return stats.chisquare(counts).pvalue > 1e-4


def never_the_top(key, length, bits):
    """A fault seen in public code: the upper end of a range that leaves it out."""
    wide = primitives.expand(key, length, 64)
    return wide % np.uint64(2**bits - 1)


@pytest.mark.mutant
def test_values_are_uniform_and_truncated_generator_is_caught():
    assert uniform(primitives.expand)
    assert not uniform(never_the_top)
    assert never_the_top(key(0), 10**5, 4).max() == 14


def sensitive(expand):
    """Whether every bit of the seed changes the mask."""
    base = bytearray(key("seed"))
    first = expand(bytes(base), 64, 32)
    for bit in range(256):
        turned = bytearray(base)
        turned[bit // 8] ^= 1 << bit % 8
        # 64 numbers of 32 bits: half of 2,048 bits change.
        changed = int(np.bitwise_count(first ^ expand(bytes(turned), 64, 32)).sum())
        if abs(changed - 1024) > 6 * 22.7:
            return False
    return True


def folded(key, length, bits):
    """A fault seen in public code: a seed of 32 bits."""
    short = int.from_bytes(key, "big") % 2**32
    return primitives.expand(short.to_bytes(32, "big"), length, bits)


@pytest.mark.mutant
def test_all_256_bits_of_seed_count():
    assert sensitive(primitives.expand)
    assert not sensitive(folded)


@pytest.mark.parametrize("bits", [1, 7, 8, 13, 32, 50, 64])
def test_masks_cancel(bits):
    values = [primitives.expand(key(("values", i)), 33, bits) for i in range(4)]
    own = [key(("own", i)) for i in range(4)]
    pairs = [{j: key(("pair", min(i, j), max(i, j))) for j in range(4) if j != i} for i in range(4)]
    total = np.zeros(33, np.uint64)
    for i in range(4):
        sent = primitives.masked_vector(values[i], own[i], pairs[i], i, bits)
        assert sent.max() < 2**bits
        assert bits == 1 or (sent != values[i]).mean() > 0.4
        total += sent - primitives.expand(own[i], 33, bits)
    want = np.array(
        [sum(int(v[index]) for v in values) % 2**bits for index in range(33)], np.uint64
    )
    np.testing.assert_array_equal(total & primitives.low_bits(bits), want)


def test_masked_vector_alone_is_uniform_whatever_is_in_it():
    for values in (np.zeros(2**16, np.uint64), np.full(2**16, 7, np.uint64)):
        sent = primitives.masked_vector(values, key("own"), {1: key("a"), 2: key("b")}, 0, 8)
        counts = np.bincount(sent.astype(int), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-4
        pairs = np.bincount((sent[::2] * 16 % 256 + sent[1::2] % 16).astype(int), minlength=256)
        assert stats.chisquare(pairs).pvalue > 1e-4
        runs = stats.kstest(sent / 256 + 1 / 512, "uniform")
        assert runs.pvalue > 1e-4
    # The test has power: unmasked values, and a mask of one value, fail.
    assert stats.chisquare(np.bincount(np.full(2**16, 7), minlength=256)).pvalue < 1e-9


@pytest.mark.parametrize("bits", [1, 8, 9, 16, 20, 33, 64])
def test_bytes_hold_numbers(bits):
    drawn = primitives.expand(key(bits), 17, bits)
    data = primitives.packed_vector(drawn, bits)
    assert len(data) == 17 * -(-bits // 8)
    np.testing.assert_array_equal(primitives.unpacked_vector(data, 17, bits), drawn)
    with pytest.raises(ValueError, match="vector has"):
        primitives.unpacked_vector(data[:-1], 17, bits)
    if bits % 8:
        with pytest.raises(ValueError, match="vector holds"):
            primitives.unpacked_vector(b"\xff" * len(data), 17, bits)


def test_keys_are_apart_by_purpose_session_and_parties():
    def made(secret=b"s" * 32, purpose="mask", session=b"1", parties=(b"a", b"b")):
        return primitives.derived(secret, purpose, session, *parties)

    keys = [
        made(), made(secret=b"t" * 32), made(purpose="channel"), made(session=b"2"),
        made(parties=(b"b", b"a")), made(parties=(b"ab",)), made(parties=(b"a", b"b", b"")),
        made(parties=(b"", b"ab")),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys) and all(len(item) == 32 for item in keys)
    assert made() == keys[0]


def test_what_is_sealed_opens_for_same_key_and_words_alone():
    cipher = primitives.sealed(key(0), b"share", b"from 1 to 2")
    assert primitives.unsealed(key(0), cipher, b"from 1 to 2") == b"share"
    assert primitives.unsealed(key(1), cipher, b"from 1 to 2") is None
    assert primitives.unsealed(key(0), cipher, b"from 2 to 1") is None
    for index in range(len(cipher)):
        changed = bytearray(cipher)
        changed[index] ^= 1
        assert primitives.unsealed(key(0), bytes(changed), b"from 1 to 2") is None


def test_keys_agree_and_low_orders_are_refused():
    keys = primitives.key_pair()
    second = primitives.key_pair()
    assert primitives.agreed(keys.private, second.public) == primitives.agreed(
        second.private, keys.public
    )
    assert primitives.key_pair(keys.private) == keys
    for low in (bytes(32), (1).to_bytes(32, "little")):
        with pytest.raises(ValueError):
            primitives.agreed(keys.private, low)
