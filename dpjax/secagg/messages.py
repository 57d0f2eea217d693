"""Messages of a secure sum, and their bytes: what is not exactly one of them is refused.

    server            client
    Hello       ->                 the aggregation's number and the digest of its terms
                <-    Keys         public keys, fresh: of channels, of masks
    Roster      ->                 the client's number, its neighbours and their keys
                <-    Shares       for every neighbour, sealed, a share of both secrets
    Delivery    ->                 what the neighbours sealed for it
                <-    MaskedVector   its vector under masks
    Request     ->                 who survived and who dropped out
                <-    Confirm      a digest of the request, sealed for surviving neighbours
    Confirmed   ->                 what the neighbours confirmed to it
                <-    UnmaskingShares   of survivors' seeds and of dropouts' keys
    Closed      ->                 the sum, or why there is none

`Confirm` and `Confirmed` are sent under ``semi_malicious`` alone. Each message carries the number
of the aggregation, 16 random bytes: one from another is refused.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, get_args

from dpjax.encoding.stream import library
from dpjax.secagg.primitives import SHARE_BYTES
from dpjax.secagg.terms import Rejected

__all__ = ()

NONCE_BYTES = 16
# Two shares, or a digest, and the tag of ChaCha20-Poly1305.
SEALED_BYTES = 2 * SHARE_BYTES + 16
_CONFIRMATION_BYTES = 32 + 16
_MOST_REASON = 2000


ByNumber = dict[int, bytes]
"""Keys, shares and what is sealed, by the numbers of clients."""
_Clients = frozenset[int]
"""Clients by number."""


class Hello(NamedTuple):
    """The server's first word: which aggregation, under which terms."""

    nonce: bytes
    terms: bytes


class Keys(NamedTuple):
    """A client's public keys."""

    nonce: bytes
    terms: bytes
    channel: bytes
    mask: bytes


class Roster(NamedTuple):
    """Who a client is, among how many, and its neighbours' keys: channel and mask in one."""

    nonce: bytes
    number: int
    enrolled: int
    transcript: bytes
    neighbours: ByNumber


class Shares(NamedTuple):
    """A commitment to the seed, and what is sealed for every neighbour."""

    nonce: bytes
    commitment: bytes
    sealed: ByNumber


class Delivery(NamedTuple):
    """What the neighbours that finished sharing sealed for a client."""

    nonce: bytes
    sealed: ByNumber


class MaskedVector(NamedTuple):
    """A vector under its masks."""

    nonce: bytes
    vector: bytes


class Request(NamedTuple):
    """Who survived, and who dropped out after sharing: of all clients."""

    nonce: bytes
    survivors: _Clients
    dropouts: _Clients


class UnmaskingShares(NamedTuple):
    """Shares of survivors' seeds, and of dropouts' mask keys."""

    nonce: bytes
    seeds: ByNumber
    keys: ByNumber


class Closed(NamedTuple):
    """The sum and the survivors whose vectors are in it; or a reason, and neither."""

    nonce: bytes
    reason: str
    survivors: _Clients
    total: bytes


class Confirm(NamedTuple):
    """A digest of a client's request, sealed for its surviving neighbours."""

    nonce: bytes
    confirmations: ByNumber


class Confirmed(NamedTuple):
    """What the neighbours sealed for a client of their requests."""

    nonce: bytes
    confirmations: ByNumber


ProtocolMessage = (
    Hello | Keys | Roster | Shares | Delivery | MaskedVector | Request | UnmaskingShares | Closed
    | Confirm | Confirmed
)  # fmt: skip
_KINDS: tuple[type, ...] = get_args(ProtocolMessage)


def encoded(message: ProtocolMessage) -> bytes:
    """Return a message as bytes (msgpack).

    Args:
        message: Any of the messages.
    """
    plain: list[Any] = [_KINDS.index(type(message))]
    plain += [_plain(value) for value in message]
    return bytes(library("msgpack").packb(plain))


def _plain(value: Any) -> Any:
    """A field as msgpack takes it: one form for each value, so that bytes can be compared."""
    if isinstance(value, dict):
        pairs: list[Any] = []
        for number in sorted(value):
            pairs += (number, value[number])
        return pairs
    if isinstance(value, frozenset):
        # A list of a million numbers would take a thousand times a round's bytes.
        bitmap = sum(1 << number for number in value)
        return bitmap.to_bytes((bitmap.bit_length() + 7) // 8, "little")
    return value


def decoded(data: bytes) -> ProtocolMessage:
    """Return the message that the bytes are.

    Args:
        data: What `encoded` returned.

    Raises:
        Rejected: For anything else: other types, other lengths, numbers out of order or twice.
    """
    try:
        plain = library("msgpack").unpackb(data, raw=False, use_list=True, strict_map_key=True)
    except Exception as error:
        # msgpack has no common class for what it may raise.
        raise Rejected(f"bytes are no message: {type(error).__name__}") from None
    # type, not isinstance: True is an int, and 1 in msgpack's eyes too.
    if not isinstance(plain, list) or not plain or type(plain[0]) is not int:
        raise Rejected("bytes are no message: no kind")
    if not 0 <= plain[0] < len(_KINDS):
        raise Rejected(f"bytes are no message: kind {plain[0]}")
    kind: Any = _KINDS[plain[0]]
    names = kind._fields
    values = plain[1:]
    # No field may be missing, and none be added for a reader that would skip it.
    if len(values) != len(names):
        raise Rejected(f"{kind.__name__} has {len(values)} parts, not {len(names)}")
    fields = []
    for name, value in zip(names, values, strict=True):
        read = _READERS[name]
        fields.append(read(f"{kind.__name__}.{name}", value))
    message: ProtocolMessage = kind(*fields)
    return message


def _bytes(shortest: int, longest: int | None = None) -> Callable[[str, Any], bytes]:
    """A reader of strings of bytes."""
    if longest is None:
        longest = shortest
    size = f"{shortest} bytes" if longest == shortest else f"{shortest} bytes or more"

    def read(name: str, value: Any) -> bytes:
        if type(value) is not bytes or not shortest <= len(value) <= longest:
            raise Rejected(f"{name} is no string of {size}")
        return value

    return read


def _number(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**32:
        raise Rejected(f"{name} is no whole number of 32 bits")
    return value


def _text(name: str, value: Any) -> str:
    if type(value) is not str or len(value) > _MOST_REASON:
        raise Rejected(f"{name} is no text of at most {_MOST_REASON} characters")
    return value


def _by_number(size: int) -> Callable[[str, Any], ByNumber]:
    """A reader of strings of bytes by clients' numbers."""
    read_bytes = _bytes(size)

    def read(name: str, value: Any) -> ByNumber:
        if type(value) is not list or len(value) % 2:
            raise Rejected(f"{name} is no list of numbers and bytes")
        pairs: ByNumber = {}
        before = -1
        for key, data in zip(value[::2], value[1::2], strict=True):
            number = _number(name, key)
            # In order, so that no number comes twice and equal messages have equal bytes.
            if number <= before:
                raise Rejected(f"{name} holds numbers out of order")
            pairs[number] = read_bytes(name, data)
            before = number
        return pairs

    return read


def _set(name: str, value: Any) -> _Clients:
    """The numbers whose bits are set, the lowest first."""
    data = _bytes(0, 2**17)(name, value)
    # Zeros at the end would be a second form of the same set.
    if data[-1:] == b"\0":
        raise Rejected(f"{name} is no shortest bitmap")
    numbers: set[int] = set()
    for place, byte in enumerate(data):
        if byte:
            numbers.update(8 * place + bit for bit in range(8) if byte >> bit & 1)
    return frozenset(numbers)


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "nonce": _bytes(NONCE_BYTES),
    **dict.fromkeys(("terms", "channel", "mask", "transcript", "commitment"), _bytes(32)),
    **dict.fromkeys(("number", "enrolled"), _number),
    "neighbours": _by_number(64),
    "sealed": _by_number(SEALED_BYTES),
    "confirmations": _by_number(_CONFIRMATION_BYTES),
    **dict.fromkeys(("seeds", "keys"), _by_number(SHARE_BYTES)),
    **dict.fromkeys(("vector", "total"), _bytes(0, 2**32)),
    **dict.fromkeys(("survivors", "dropouts"), _set),
    "reason": _text,
}
"""By the name of a field."""
