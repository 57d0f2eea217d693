"""The ciphers of secure aggregation, all of them cryptography's: one place that imports it."""

import functools
import importlib
from typing import Any, NamedTuple

__all__: list[str] = []

KEY_BYTES = 32
TAG_BYTES = 16
LABEL = b"dpjax secure aggregation 1"


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
    try:
        return importlib.import_module(f"cryptography.{module}")
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed, and secure aggregation needs it; in dpjax's folder: "
            "pip install '.[secure]'"
        ) from None


def _x25519() -> Any:
    return _library("hazmat.primitives.asymmetric.x25519")


def key_pair(private: bytes | None = None) -> KeyPair:
    """Return a new key pair from the operating system's randomness, or that of a private key.

    Args:
        private: 32 bytes; None draws them.
    """
    keys = _x25519().X25519PrivateKey
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
    keys = _x25519()
    mine = keys.X25519PrivateKey.from_private_bytes(private)
    return bytes(mine.exchange(keys.X25519PublicKey.from_public_bytes(public)))


def derived(secret: bytes, purpose: str, session: bytes, *parties: bytes) -> bytes:
    """Return a key of 32 bytes for one purpose in one session between some parties (HKDF).

        HKDF-SHA256(secret, salt = session, info = label | purpose | parties), each part with its
        length before it, so that no two lists of parts are one string

    Args:
        secret: What is agreed on, or a uniform seed.
        purpose: Role of the key.
        session: 32 bytes that name this aggregation and its terms.
        parties: Numbers and public keys of those who share the key.
    """
    parts = [LABEL, purpose.encode(), *parties]
    info = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    kdf = _library("hazmat.primitives.kdf.hkdf").HKDF
    sha256 = _library("hazmat.primitives.hashes").SHA256
    return bytes(kdf(algorithm=sha256(), length=KEY_BYTES, salt=session, info=info).derive(secret))


def sealed(key: bytes, plain: bytes, public: bytes) -> bytes:
    """Return ``plain`` encrypted, and bound to ``public``, by ChaCha20-Poly1305.

    The nonce is zero: a key seals one message in its life.

    Args:
        key: 32 bytes, made for this one message.
        plain: What is hidden.
        public: What the receiver must know alike.
    """
    return bytes(_aead(key).encrypt(bytes(12), plain, public))


def opened(key: bytes, cipher: bytes, public: bytes) -> bytes | None:
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
    return _library("hazmat.primitives.ciphers.aead").ChaCha20Poly1305(key)


def stream(key: bytes, length: int) -> bytes:
    """Return ``length`` bytes of ChaCha20's key stream, from nonce and counter zero.

    Args:
        key: 32 bytes, made for this one stream.
        length: How many bytes.
    """
    ciphers = _library("hazmat.primitives.ciphers")
    chacha = ciphers.algorithms.ChaCha20(key, bytes(16))
    return bytes(ciphers.Cipher(chacha, mode=None).encryptor().update(bytes(length)))
