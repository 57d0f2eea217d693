"""Arrays that stay as they were checked."""

from typing import Any

import numpy as np

__all__ = ["fixed"]


def fixed(array: Any, dtype: Any = None) -> np.ndarray:
    """Return a copy that nobody can change.

    Args:
        array: An array, or what makes one.
        dtype: Of the copy; None keeps the array's.
    """
    copy = np.array(array, dtype)
    copy.flags.writeable = False
    return copy
