"""Examples and labels as arrays of numbers, row by row."""

import numpy as np
from numpy.typing import ArrayLike

from dpjax import _validate

__all__ = ()


def as_numbers(name: str, x: ArrayLike) -> np.ndarray:
    """Return examples or labels as an array of numbers, with rows.

    Args:
        name: What messages call it.
        x: [N, ...] numbers.

    Raises:
        ValueError: For NaN, numbers beyond 32 bits, or no rows.
    """
    wide = _validate.finite_array(name, x)
    if not wide.ndim:
        raise _validate.refusal(name, x, "give one entry a record, [N, ...]")
    array = np.asarray(x)
    # Of Python objects NumPy keeps references, not numbers.
    array = wide if array.dtype == object else array
    _validate.check_range(name, array)
    return array


def labelled(split: str, x: ArrayLike, y: ArrayLike) -> list[np.ndarray]:
    """Return examples and labels as arrays that belong together, row by row.

    Args:
        split: "train " or "test ", or "", for messages.
        x: [N, ...] examples.
        y: [N, ...] labels.

    Raises:
        ValueError: As `as_numbers`, or for rows that do not belong together.
    """
    _validate.check_rows(split, x, y)
    arrays = [as_numbers(f"{split}x", x), as_numbers(f"{split}y", y)]
    if len(arrays[0]) != len(arrays[1]):
        raise ValueError(
            f"{split}x has {len(arrays[0])} rows, {split}y {len(arrays[1])}; give one label a row"
        )
    return arrays


def as_inputs(x: np.ndarray) -> np.ndarray:
    """Return examples as a run reads them: integers stay (up to int32), others are float32.

    Args:
        x: [N, ...] examples.
    """
    # Tokens are looked up, and images of bytes take a quarter of the memory.
    if x.dtype.kind not in "iu":
        return x.astype(np.float32)
    return x.astype(np.int32) if x.dtype.itemsize >= 4 else x
