"""Archives read with a reason where they cannot be; files written whole or not at all."""

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dpjax import _validate

__all__ = ["archive", "create", "npz", "replace", "writing"]

Content = bytes | Callable[[BinaryIO], None]

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def npz(path: str | os.PathLike[str]) -> Path:
    """Return where a path's archive is, to write or to read: ``.npz`` is appended to bare names.

    Args:
        path: As it was given.

    Raises:
        ValueError: For what names no file, numbers among them: those are open files' own.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ValueError(f"path is {_validate.shown(path)}; name a file, such as 'run.npz'")
    place = Path(text)
    if os.path.isdir(text) or not place.name or place.name == "..":
        raise ValueError(f"path is {text!r}, a folder; name a file in it, such as 'run.npz'")
    return place if place.suffix else place.with_suffix(".npz")


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


def create(path: Path, content: Content, *, mode: int = 0o666) -> None:
    """Write a new file; its folder is made.

    Args:
        path: Where to; must be free, also at the last moment.
        content: All of it, or what writes all of it to an open file.
        mode: The file's mode, before the process's mask, from its first byte on.

    Raises:
        FileExistsError: If the name is taken; that file is left as it is.
    """
    with _beside(path, content, mode) as beside:
        try:
            os.link(beside, path)  # fails where the name is taken, unlike a rename
        except FileExistsError:
            raise
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # A file system without hard links: take the name first, then fill it.
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
            os.replace(beside, path)


def replace(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a file in place of the one before it; its folder is made.

    Args:
        path: Where to.
        content: All of it.
        mode: The file's mode, before the process's mask, from its first byte on.
    """
    with _beside(path, content, mode) as beside:
        os.replace(beside, path)


@contextlib.contextmanager
def _beside(path: Path, content: Content, mode: int) -> Iterator[Path]:
    """A written file in the same folder, gone when the block ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(
            errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)
        ) from None
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        handle = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        with os.fdopen(handle, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield beside
        _sync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make the new name last through a power failure, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
