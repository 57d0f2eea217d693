"""Reading archives and writing files: whatever fails is a ValueError that says where and why."""

import contextlib
import os
from collections.abc import Iterator

import numpy as np

__all__ = ["archive", "writing"]


def archive(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return all arrays of an npz file.

    Args:
        path: The file.

    Returns:
        The arrays by name.

    Raises:
        FileNotFoundError: When there is no such file.
        ValueError: For whatever else keeps it from being read, with the reason alone.
    """
    try:
        # Opened here, since np.load leaves its own handle open when the archive is damaged.
        with open(path, "rb") as raw:
            file = np.load(raw, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise ValueError("it is a bare array, not an archive")
            with file:
                held = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile, zlib, struct, tokenize: damage takes every shape
        raise ValueError(" ".join(str(error).split())[:200] or type(error).__name__) from None
    if not all(isinstance(array, np.ndarray) for array in held.values()):
        raise ValueError("it holds entries that are no arrays")
    return held


@contextlib.contextmanager
def writing(name: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the place when the system refuses to write there: read-only, full, no folder.

    Args:
        name: The argument that named it.
        path: The place.

    Raises:
        ValueError: For any OSError in the block.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{name} is {os.fspath(path)!r}, which cannot be written ({error.strerror or error}); "
            "make room, or name a place that can be written"
        ) from None
