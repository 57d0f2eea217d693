"""Secret words of 32 bits from ChaCha20, for a client's roundings and noise."""

import importlib
from typing import Any

import numpy as np
from jaxtyping import UInt32, UInt64

from dpjax import _validate

__all__ = ["Stream"]

_LOW_WORD = 2**32 - 1
_BLOCK = 2**16


def library(module: str) -> Any:
    """Import a module of the extra ``secure``.

    Args:
        module: Its dotted name.

    Raises:
        ValueError: Without the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed, and dpjax.secagg needs it: pip install cryptography "
            "msgpack"
        ) from None


def chacha20(key: bytes, nonce: bytes) -> Any:
    """Return ChaCha20's encryptor.

    Args:
        key: 32 bytes.
        nonce: 16 bytes, of which the first four count blocks of 64 bytes.
    """
    ciphers = library("cryptography.hazmat.primitives.ciphers")
    return ciphers.Cipher(ciphers.algorithms.ChaCha20(key, nonce), mode=None).encryptor()


class Stream:
    """Words of 32 bits from ChaCha20, each given out once.

    Guarantee: none by itself. Two streams of the same seed and purpose give the same words: a seed
    serves one aggregation.

    Args:
        seed: 32 secret bytes, from the operating system.
        purpose: What the words are for; other purposes give independent words.

    Raises:
        ValueError: For another seed or purpose, and without the extra ``secure``.

    Example:
        >>> from dpjax.encoding.stream import Stream
        >>> Stream(bytes(32)).words(2).tolist()
        [2917185654, 2419978656]
    """

    def __init__(self, seed: bytes, purpose: int = 0) -> None:
        if not isinstance(seed, bytes) or len(seed) != 32:
            length = len(seed) if hasattr(seed, "__len__") else 1
            raise ValueError(
                f"seed is {type(seed).__name__} of {length}; give 32 bytes, of "
                "secrets.token_bytes(32)"
            )
        number = _validate.integer("purpose", purpose, minimum=0, maximum=2**63 - 1)
        # The first four bytes count blocks of 64 bytes, from 0.
        self._encryptor = chacha20(seed, bytes(4) + number.to_bytes(12, "little"))
        self._ready = np.zeros(0, np.uint32)
        self._read = 0

    def words(self, count: int) -> UInt32[np.ndarray, " n"]:
        """Return the next words.

        Args:
            count: How many.

        Raises:
            ValueError: Beyond 2^32 blocks, after which ChaCha20 would repeat itself.
        """
        lacking = count - len(self._ready)
        if lacking > 0:
            fresh = -(-max(lacking, _BLOCK) // 16) * 16
            self._read += fresh
            if self._read > 2**36:
                raise ValueError(f"count is {count}, beyond what a seed has left; take one a round")
            drawn = np.frombuffer(self._encryptor.update(bytes(4 * fresh)), "<u4")
            self._ready = np.concatenate([self._ready, drawn])
        words = self._ready[:count]
        self._ready = self._ready[count:]
        return words

    def below(self, bound: int, count: int) -> UInt64[np.ndarray, " n"]:
        """Return uniform whole numbers from 0 to bound - 1.

        Args:
            bound: At most 2^32.
            count: How many.

        Reference:
            Lemire (2019), Fast random integer generation in an interval.
        """
        # Products whose low word is below 2^32 mod bound would favour some numbers: drawn again.
        excess = 2**32 % bound
        drawn = np.zeros(count, np.uint64)
        missing = np.arange(count)
        while missing.size:
            product = self.words(missing.size).astype(np.uint64) * bound
            drawn[missing] = product >> 32
            missing = missing[(product & _LOW_WORD) < excess]
        return drawn
