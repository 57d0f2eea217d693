"""Messages come back from their bytes, and nothing else is taken for one."""

import os

import pytest

pytest.importorskip("cryptography", reason="the extra `secure` is not installed")
msgpack = pytest.importorskip("msgpack", reason="the extra `secure` is not installed")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import strategies as st  # noqa: E402

from dpjax.secagg import messages  # noqa: E402
from dpjax.secagg.messages import decoded, encoded  # noqa: E402
from dpjax.secagg.terms import Rejected  # noqa: E402

NONCE = b"n" * 16
DIGEST = b"d" * 32
SHARE = b"s" * 33
SEALED = b"c" * messages.SEALED_BYTES
SAMPLES = [
    messages.Hello(NONCE, DIGEST),
    messages.Keys(NONCE, DIGEST, b"a" * 32, b"b" * 32),
    messages.Roster(NONCE, 3, 9, DIGEST, {1: b"k" * 64, 7: b"l" * 64}),
    messages.Shares(NONCE, DIGEST, {1: SEALED, 300: SEALED}),
    messages.Delivery(NONCE, {}),
    messages.MaskedVector(NONCE, b"12345678"),
    messages.Request(NONCE, frozenset({0, 5, 999}), frozenset({1})),
    messages.UnmaskingShares(NONCE, {0: SHARE}, {1: SHARE}),
    messages.Closed(NONCE, "too few", frozenset(), b""),
    messages.Confirm(NONCE, {1: b"h" * 48, 300: b"i" * 48}),
    messages.Confirmed(NONCE, {}),
]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_message_comes_back(message):
    assert decoded(encoded(message)) == message


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_changed_bytes_are_refused_or_another_message(message):
    data = encoded(message)
    for end in range(len(data)):
        with pytest.raises(Rejected):
            decoded(data[:end])
    with pytest.raises(Rejected):
        decoded(data + b"\0")
    for index in range(min(len(data), 80)):
        changed = bytearray(data)
        changed[index] ^= 0x41
        try:
            assert decoded(bytes(changed)) != message
        except Rejected:
            pass


@hypothesis.given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_message(data):
    try:
        assert encoded(decoded(data))
    except Rejected:
        pass


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=40)
    | st.text(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)  # fmt: skip


@hypothesis.given(kind=st.integers(-1, 12), parts=st.lists(JUNK, max_size=6))
def test_any_objects_are_refused_or_message(kind, parts):
    try:
        assert encoded(decoded(msgpack.packb([kind, *parts])))
    except Rejected:
        pass


@pytest.mark.parametrize(
    "plain",
    [
        [3, NONCE, DIGEST, [5, SEALED, 5, SEALED]],  # twice
        [3, NONCE, DIGEST, [6, SEALED, 5, SEALED]],  # out of order
        [3, NONCE, DIGEST, [5]],
        [3, NONCE, DIGEST, [True, SEALED]],
        [3, NONCE, DIGEST, [-1, SEALED]],
        [3, NONCE, DIGEST, [2**32, SEALED]],
        [3, NONCE, DIGEST, [5, SEALED + b"x"]],
        [3, NONCE, DIGEST, {5: SEALED}],
        [3, NONCE, DIGEST],
        [3, NONCE, DIGEST, [], []],
        [6, NONCE, b"\1\0", b""],  # no shortest bitmap: two texts of one message
        [8, NONCE, "x" * 2001, b"", b""],
        [8, NONCE, b"text", b"", b""],
        [True, NONCE, DIGEST],
        [9, NONCE],
        [9, NONCE, [5, b"h" * 47]],
        [10, NONCE, [5, b"h" * 48, 5, b"h" * 48]],
        [11, NONCE],
        [],
        {},
        5,
    ],
)
def test_what_is_nearly_message_is_refused(plain):
    with pytest.raises(Rejected):
        decoded(msgpack.packb(plain, strict_types=False))


def test_deep_nesting_is_refused():
    with pytest.raises(Rejected):
        decoded(b"\x91" * 5000 + b"\xc0")
    with pytest.raises(Rejected):
        decoded(os.urandom(5000))
