"""Masks: uniform whole numbers modulo 2^b from seeds of 256 bits, and how they cancel.

    y_i = x_i + PRG(b_i) + sum_(j > i) PRG(s_ij) - sum_(j < i) PRG(s_ij)   mod 2^b

over the neighbours j of i that finished sharing. In a sum over i each s_ij is added once and taken
off once. A uniform word of 8, 16, 32 or 64 bits, cut to its lowest b, is uniform modulo 2^b: no
value is left out and none is likelier.

Reference:
    Bonawitz et al. (CCS 2017), Practical secure aggregation for privacy-preserving machine
    learning; Bell et al. (CCS 2020).
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import UInt64

from dpjax.secagg import primitives

__all__: list[str] = []

MOST_BITS = 64


def expand(key: bytes, length: int, bits: int) -> UInt64[np.ndarray, " d"]:
    """Return uniform whole numbers from 0 to 2^bits - 1, the same for the same key.

    Args:
        key: 32 bytes.
        length: How many numbers.
        bits: b, 1 to 64.

    Example:
        >>> from dpjax.secagg import masks
        >>> masks.expand(bytes(32), 3, 16)
        array([47222, 44512, 61856], dtype=uint64)
    """
    size = next(size for size in (1, 2, 4, 8) if 8 * size >= bits)
    words = np.frombuffer(primitives.stream(key, size * length), f"<u{size}").astype(np.uint64)
    return words & low_bits(bits)


def low_bits(bits: int) -> np.uint64:
    """Return 2^bits - 1."""
    return np.uint64(2**bits - 1)


def masked(
    values: UInt64[np.ndarray, " d"],
    own: bytes,
    pairs: Mapping[int, bytes],
    number: int,
    bits: int,
) -> UInt64[np.ndarray, " d"]:
    """Return a client's values under its own mask and those with its neighbours.

    Guarantee: uniform modulo 2^bits, whatever the values are, to whoever lacks one of the keys.

    Args:
        values: [d] whole numbers modulo 2^bits.
        own: Key of the self mask.
        pairs: Key with every neighbour, by its number.
        number: The client's.
        bits: b.
    """
    total = values + expand(own, len(values), bits)
    return combined(total, pairs, number, bits)


def combined(
    values: UInt64[np.ndarray, " d"], pairs: Mapping[int, bytes], number: int, bits: int
) -> UInt64[np.ndarray, " d"]:
    """Return the values with the masks of pairs on them, as client ``number`` puts them.

    Args:
        values: [d] whole numbers.
        pairs: Key with every neighbour, by its number.
        number: The client's.
        bits: b.
    """
    total = values.copy()  # uint64 wraps modulo 2^64, which 2^bits divides
    for other, key in pairs.items():
        mask = expand(key, len(total), bits)
        if number < other:
            total += mask
        else:
            total -= mask
    return total & low_bits(bits)


def width(bits: int) -> int:
    """Return how many bytes a number takes in a message."""
    return (bits + 7) // 8


def packed(values: UInt64[np.ndarray, " d"], bits: int) -> bytes:
    """Return the numbers as bytes, the fewest whole ones that hold b bits, lowest first.

    Args:
        values: [d] whole numbers below 2^bits.
        bits: b.
    """
    words = np.ascontiguousarray(values, "<u8").view(np.uint8).reshape(-1, 8)
    return words[:, : width(bits)].tobytes()


def unpacked(data: bytes, length: int, bits: int) -> UInt64[np.ndarray, " d"]:
    """Return the numbers that `packed` made bytes of.

    Args:
        data: Bytes.
        length: How many numbers.
        bits: b.

    Raises:
        ValueError: For another number of bytes, and numbers of 2^bits or more.
    """
    size = width(bits)
    if len(data) != size * length:
        raise ValueError(f"vector has {len(data)} bytes; send {length} numbers of {size} each")
    words = np.zeros((length, 8), np.uint8)
    words[:, :size] = np.frombuffer(data, np.uint8).reshape(length, size)
    values = words.view("<u8")[:, 0].astype(np.uint64)
    if length and values.max() > low_bits(bits):
        raise ValueError(f"vector holds a number of more than {bits} bits; send them modulo 2^b")
    return values
