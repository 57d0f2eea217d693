"""What both ends of a pair, and whoever rebuilds a secret, derive alike."""

import hashlib

from dpjax.secagg import primitives
from dpjax.secagg.messages import SHARE_BYTES

__all__: list[str] = []


def number_bytes(number: int) -> bytes:
    """Return a client's number as it stands in keys."""
    return number.to_bytes(4, "big")


def session(nonce: bytes, terms: bytes, transcript: bytes) -> bytes:
    """Return 32 bytes that name an aggregation, its terms and all public keys in it.

    Ends that were told different things derive different keys: their masks do not cancel, and
    what they seal does not open.

    Args:
        nonce: 16 bytes, of the aggregation.
        terms: 32 bytes, the digest of its terms.
        transcript: 32 bytes, the digest of the public keys of all clients.
    """
    return hashlib.sha256(primitives.LABEL + nonce + terms + transcript).digest()


def transcript(keys: list[tuple[bytes, bytes]]) -> bytes:
    """Return the digest of all public keys, by number.

    Args:
        keys: Channel key and mask key of every client.
    """
    return hashlib.sha256(b"".join(channel + mask for channel, mask in keys)).digest()


def mask_key(
    private: bytes, mine: tuple[int, bytes], other: tuple[int, bytes], session: bytes
) -> bytes:
    """Return the key of the mask between two clients, the same from both ends.

    Args:
        private: One's mask key.
        mine: One's number and public mask key.
        other: The other's.
        session: 32 bytes.

    Raises:
        ValueError: For a public key of low order.
    """
    secret = primitives.agreed(private, other[1])
    ends = [part for number, key in sorted([mine, other]) for part in (number_bytes(number), key)]
    return primitives.derived(secret, "pair mask", session, *ends)


def channel_key(
    secret: bytes,
    sender: tuple[int, bytes],
    receiver: tuple[int, bytes],
    session: bytes,
    purpose: str = "channel",
) -> bytes:
    """Return the key of the one message from sender to receiver, the same from both ends.

    Args:
        secret: What their channel keys agree on.
        sender: Number and public channel key.
        receiver: Number and public channel key.
        session: 32 bytes.
        purpose: "channel" for shares, "confirmation" for stories.
    """
    ends = [part for number, key in (sender, receiver) for part in (number_bytes(number), key)]
    return primitives.derived(secret, purpose, session, *ends)


def channel_words(sender: int, receiver: int, session: bytes, stage: str = "shares") -> bytes:
    """Return what a sealed message is bound to: aggregation, stage, sender and receiver."""
    return session + stage.encode() + number_bytes(sender) + number_bytes(receiver)


def self_key(seed: bytes, number: int, session: bytes) -> bytes:
    """Return the key of a client's self mask.

    Args:
        seed: 32 uniform bytes.
        number: The client's.
        session: 32 bytes.
    """
    return primitives.derived(seed, "self mask", session, number_bytes(number))


def commitment(seed: bytes, number: int, session: bytes) -> bytes:
    """Return what a client says of its seed before it is rebuilt.

    It is another output of the key derivation that gives the self mask's key, under another
    purpose: to whoever does not know the seed both are uniform.

    Args:
        seed: 32 uniform bytes.
        number: The client's.
        session: 32 bytes.
    """
    return primitives.derived(seed, "commitment", session, number_bytes(number))


def share_bytes(share: int) -> bytes:
    """Return a share as it stands in messages."""
    return share.to_bytes(SHARE_BYTES, "big")
