"""The ciphers of secure aggregation, the keys made with them, masks, and shares of secrets.

Whoever rebuilds a secret derives keys as both ends of a pair.

Masks are uniform whole numbers modulo 2^b from seeds of 256 bits:

    y_i = x_i + PRG(b_i) + sum_(j > i) PRG(s_ij) - sum_(j < i) PRG(s_ij)   mod 2^b

over the neighbours j of i that finished sharing. In a sum over i each s_ij is added once and taken
off once. A uniform word of 8, 16, 32 or 64 bits, cut to its lowest b, is uniform modulo 2^b: no
value is left out and none is likelier.

Any t shares rebuild a secret, fewer say nothing (Shamir):

    f(z) = s + a_1 z + ... + a_(t-1) z^(t-1)  mod p        a uniform, f(x) is the share at x != 0
    s = sum_i f(x_i) prod_(j != i) x_j / (x_j - x_i)        over any t shares

For t - 1 points and each s there is exactly one f through (0, s) and the shares, and all f are
equally likely: so are all secrets. Arithmetic is Python's whole numbers, not in constant time.

Reference:
    Bonawitz et al. (CCS 2017), Practical secure aggregation for privacy-preserving machine
    learning; Bell et al. (CCS 2020); Shamir (1979), How to share a secret.
"""

import functools
import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt64

from dpjax.encoding.stream import chacha20, library

__all__ = ()

_Residues = UInt64[np.ndarray, " d"]
_End = tuple[int, bytes]
"""A client's number and public key."""
_Keys = Mapping[int, bytes]
"""Keys by the number of the other end."""
KEY_BYTES = 32
SHARE_BYTES = 33
"""A number of the field of shares, which is a little above 2^256."""
LABEL = b"dpjax secure aggregation 1"
MOST_BITS = 64
_X25519 = "hazmat.primitives.asymmetric.x25519"
PRIME = 2**256 + 297
"""The least prime above 2^256: every secret of 32 bytes is below it."""


class KeyPair(NamedTuple):
    """An X25519 key pair.

    Attributes:
        private: 32 bytes.
        public: 32 bytes.
    """

    private: bytes
    public: bytes


@functools.cache
def _library(module: str) -> Any:
    """A module of cryptography, looked for once."""
    return library(f"cryptography.{module}")


def key_pair(private: bytes | None = None) -> KeyPair:
    """Return a new key pair from the operating system's randomness, or that of a private key.

    Args:
        private: 32 bytes; None draws them.
    """
    keys = _library(_X25519).X25519PrivateKey
    key = keys.generate() if private is None else keys.from_private_bytes(private)
    return KeyPair(key.private_bytes_raw(), key.public_key().public_bytes_raw())


def agreed(private: bytes, public: bytes) -> bytes:
    """Return what one's private and another's public key agree on.

    It is no key yet: `derived` makes keys of it.

    Args:
        private: 32 bytes.
        public: 32 bytes of the other end.

    Raises:
        ValueError: For a public key of low order, with which everybody agrees on zero.
    """
    keys = _library(_X25519)
    pair = keys.X25519PrivateKey.from_private_bytes(private)
    return bytes(pair.exchange(keys.X25519PublicKey.from_public_bytes(public)))


def derived(
    secret: bytes, purpose: str, session: bytes, *parties: bytes, label: bytes = LABEL
) -> bytes:
    """Return a key of 32 bytes for one purpose in one session between some parties (HKDF).

        HKDF-SHA256(secret, salt = session, info = label | purpose | parties), each part with its
        length before it, so that no two lists of parts are one string

    Args:
        secret: What is agreed on, or a uniform seed.
        purpose: Role of the key.
        session: 32 bytes that name this aggregation and its terms.
        parties: Numbers and public keys of those who share the key.
        label: Of the protocol and its version.
    """
    # With lengths, so that no two lists of parts are one string.
    info = b""
    for part in (label, purpose.encode(), *parties):
        info += len(part).to_bytes(4, "big") + part
    hkdf = _library("hazmat.primitives.kdf.hkdf").HKDF
    sha256 = _library("hazmat.primitives.hashes").SHA256()
    kdf = hkdf(algorithm=sha256, length=KEY_BYTES, salt=session, info=info)
    return bytes(kdf.derive(secret))


def sealed(key: bytes, plain: bytes, public: bytes) -> bytes:
    """Return ``plain`` encrypted, and bound to ``public``, by ChaCha20-Poly1305.

    The nonce is zero: a key seals one message in its life.

    Args:
        key: 32 bytes, made for this one message.
        plain: What is hidden.
        public: What the receiver must know alike.
    """
    return bytes(_aead(key).encrypt(bytes(12), plain, public))


def unsealed(key: bytes, cipher: bytes, public: bytes) -> bytes | None:
    """Return what was sealed; None if anything of it was changed.

    Args:
        key: 32 bytes.
        cipher: What `sealed` returned.
        public: As it was sealed.
    """
    try:
        return bytes(_aead(key).decrypt(bytes(12), cipher, public))
    except _library("exceptions").InvalidTag:
        return None


def _aead(key: bytes) -> Any:
    """The cipher under a key, which also notices what was changed."""
    return _library("hazmat.primitives.ciphers.aead").ChaCha20Poly1305(key)


def stream(key: bytes, length: int) -> bytes:
    """Return ``length`` bytes of ChaCha20's key stream, from nonce and counter zero.

    Args:
        key: 32 bytes, made for this one stream.
        length: How many bytes.
    """
    return bytes(chacha20(key, bytes(16)).update(bytes(length)))


def _number_bytes(number: int) -> bytes:
    """Return a client's number as it stands in keys."""
    return number.to_bytes(4, "big")


def session(nonce: bytes, terms: bytes, transcript: bytes) -> bytes:
    """Return 32 bytes that name an aggregation, its terms and all public keys in it.

    Ends with different terms or keys derive different keys: their masks do not cancel, and their
    sealed messages do not open.

    Args:
        nonce: 16 bytes, of the aggregation.
        terms: 32 bytes, the digest of its terms.
        transcript: 32 bytes, the digest of the public keys of all clients.
    """
    return hashlib.sha256(LABEL + nonce + terms + transcript).digest()


def transcript(keys: list[tuple[bytes, bytes]]) -> bytes:
    """Return the digest of all public keys, by number.

    Args:
        keys: Channel key and mask key of every client.
    """
    return hashlib.sha256(b"".join(channel + mask for channel, mask in keys)).digest()


def mask_key(private: bytes, local: _End, other: _End, session: bytes) -> bytes:
    """Return the key of the mask between two clients, the same from both ends.

    Args:
        private: One's mask key.
        local: This end's number and public mask key.
        other: The other's.
        session: 32 bytes.

    Raises:
        ValueError: For a public key of low order.
    """
    # In the order of their numbers, whichever end this is.
    parties = ends(*sorted([local, other]))
    return derived(agreed(private, other[1]), "pair mask", session, *parties)


def ends(*clients: _End) -> list[bytes]:
    """Return numbers and public keys, as they stand in keys."""
    parts: list[bytes] = []
    for number, key in clients:
        parts += (_number_bytes(number), key)
    return parts


def channel_words(sender: int, receiver: int, session: bytes, stage: str = "shares") -> bytes:
    """Return what a sealed message is bound to: aggregation, stage, sender and receiver."""
    return session + stage.encode() + _number_bytes(sender) + _number_bytes(receiver)


def self_key(seed: bytes, number: int, session: bytes) -> bytes:
    """Return the key of a client's self mask.

    Args:
        seed: 32 uniform bytes.
        number: The client's.
        session: 32 bytes.
    """
    return derived(seed, "self mask", session, _number_bytes(number))


def commitment(seed: bytes, number: int, session: bytes) -> bytes:
    """Return what a client says of its seed before it is rebuilt.

    It is another output of the key derivation that gives the self mask's key, under another
    purpose: to whoever does not know the seed both are uniform.

    Args:
        seed: 32 uniform bytes.
        number: The client's.
        session: 32 bytes.
    """
    return derived(seed, "commitment", session, _number_bytes(number))


def expand(key: bytes, length: int, bits: int) -> _Residues:
    """Return uniform whole numbers from 0 to 2^bits - 1, the same for the same key.

    Args:
        key: 32 bytes.
        length: How many numbers.
        bits: b, 1 to 64.

    Example:
        >>> from dpjax.secagg import primitives
        >>> primitives.expand(bytes(32), 3, 16)
        array([47222, 44512, 61856], dtype=uint64)
    """
    # The shortest words that hold b bits: fewer bytes of the stream.
    size = next(size for size in (1, 2, 4, 8) if 8 * size >= bits)
    words = np.frombuffer(stream(key, size * length), f"<u{size}")
    return words.astype(np.uint64) & low_bits(bits)


def low_bits(bits: int) -> np.uint64:
    """Return 2^bits - 1."""
    return np.uint64(2**bits - 1)


def masked_vector(
    values: _Residues, self_mask_key: bytes, pairs: _Keys, number: int, bits: int
) -> _Residues:
    """Return a client's values under its own mask and those with its neighbours.

    Guarantee: uniform modulo 2^bits, whatever the values are, to whoever lacks one of the keys.

    Args:
        values: [d] whole numbers modulo 2^bits.
        self_mask_key: Key of the self mask.
        pairs: Key with every neighbour, by its number.
        number: The client's.
        bits: b.
    """
    self_mask = expand(self_mask_key, len(values), bits)
    return with_pair_masks(values + self_mask, pairs, number, bits)


def with_pair_masks(values: _Residues, pairs: _Keys, number: int, bits: int) -> _Residues:
    """Return the values with the masks of pairs on them, as client ``number`` puts them.

    Args:
        values: [d] whole numbers.
        pairs: Key with every neighbour, by its number.
        number: The client's.
        bits: b.
    """
    # uint64 wraps modulo 2^64, which 2^bits divides.
    total = values.copy()
    for other, key in pairs.items():
        # What one end adds the other takes off.
        put = np.add if number < other else np.subtract
        put(total, expand(key, len(total), bits), out=total)
    return total & low_bits(bits)


def number_width(bits: int) -> int:
    """Return how many bytes a number takes in a message."""
    return (bits + 7) // 8


def packed_vector(values: _Residues, bits: int) -> bytes:
    """Return the numbers as bytes, the fewest whole ones that hold b bits, lowest first.

    Args:
        values: [d] whole numbers below 2^bits.
        bits: b.
    """
    # The lowest byte first, so that the highest ones can be cut off.
    words = np.ascontiguousarray(values, "<u8").view(np.uint8).reshape(-1, 8)
    return words[:, : number_width(bits)].tobytes()


def unpacked_vector(data: bytes, length: int, bits: int) -> _Residues:
    """Return the numbers that `packed_vector` made bytes of.

    Args:
        data: Bytes.
        length: How many numbers.
        bits: b.

    Raises:
        ValueError: For another number of bytes, and numbers of 2^bits or more.
    """
    # The last byte may hold more bits than the modulus: checked below.
    size = number_width(bits)
    if len(data) != size * length:
        raise ValueError(f"vector has {len(data)} bytes; send {length} numbers of {size} each")
    words = np.zeros((length, 8), np.uint8)
    words[:, :size] = np.frombuffer(data, np.uint8).reshape(length, size)
    values = words.view("<u8")[:, 0].astype(np.uint64)
    if length and values.max() > low_bits(bits):
        raise ValueError(f"vector holds a number of more than {bits} bits; send them modulo 2^b")
    return values


def split_secret(
    secret: int,
    points: Iterable[int],
    threshold: int,
    *,
    prime: int = PRIME,
    draw: Callable[[int], int] = secrets.randbelow,
) -> dict[int, int]:
    """Return Shamir shares of the secret, one for each point.

    Guarantee: fewer than ``threshold`` shares have the same distribution whatever the secret is,
    if ``draw`` is uniform.

    Args:
        secret: From 0 to below the prime.
        points: Distinct, from 1 to below the prime: the share at 0 is the secret itself.
        threshold: t, how many shares rebuild the secret.
        prime: p, the field.
        draw: Gives a uniform whole number below its argument.

    Example:
        >>> from dpjax.secagg import primitives
        >>> shares = primitives.split_secret(7, [1, 2, 3], 2)
        >>> primitives.join_shares({1: shares[1], 3: shares[3]})
        7
    """
    coefficients = [secret, *(draw(prime) for _ in range(threshold - 1))]
    shares = {}
    for x in points:
        # Horner's rule for f(x).
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * x + coefficient) % prime
        shares[x] = value
    return shares


def join_shares(shares: Mapping[int, int]) -> int:
    """Reconstruct the secret that exactly these Shamir shares stand for.

    Fewer than the threshold, or one that is wrong, give some other number: check what comes out
    against something public.

    Args:
        shares: A share by its point, as many as the threshold, in the field of `PRIME`.
    """
    points = tuple(sorted(shares))
    weights = _weights(points)
    terms = (weight * shares[x] for weight, x in zip(weights, points, strict=True))
    return sum(terms) % PRIME


@functools.lru_cache(maxsize=4096)
def _weights(points: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's coefficients at 0."""
    weights = []
    for x in points:
        above = 1
        below = 1
        for other in points:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        # Division modulo a prime is a product with the inverse.
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)
