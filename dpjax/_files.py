"""Files read with a reason where they cannot be, written whole or not at all, and locked."""

import bz2
import contextlib
import errno
import fcntl
import gzip
import io
import lzma
import os
import secrets
import weakref
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np

from dpjax import _validate

__all__ = ["Lock", "archive", "create", "npz", "reading", "replace", "text", "writing"]

Content = bytes | Callable[[BinaryIO], None]

_OPEN: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_MOST, _RATIO = 2**28, 200
"""Bytes that any file may unpack to, and how many times its size beyond that: data sets unpack to
at most 60 times, a file made to fill a memory to 1,000 times."""
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
            _check_archive(raw)
            file = np.load(raw, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise ValueError("it is a bare array, not an archive")
            with file:
                held = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile, zlib, struct, tokenize: damage takes every shape
        raise ValueError(_brief(error)) from None
    if not all(isinstance(array, np.ndarray) for array in held.values()):
        raise ValueError("it holds entries that are no arrays")
    return held


def _check_archive(raw: BinaryIO) -> None:
    """Refuse an archive by the sizes in its directory, of which reading gives no byte more."""
    if zipfile.is_zipfile(raw):
        with zipfile.ZipFile(raw) as file:
            unpacked = sum(entry.file_size for entry in file.infolist())
        _check_unpacked(unpacked, os.fstat(raw.fileno()).st_size, "save it with numpy.savez")
    raw.seek(0)


def _check_unpacked(unpacked: int, size: int, remedy: str) -> None:
    most = max(_MOST, _RATIO * size)
    if unpacked > most:
        raise ValueError(
            f"its {size:,} bytes unpack to more than {most:,}; if that is meant, {remedy}"
        )


class _Unpacked(io.RawIOBase):
    """The bytes of a compressed file, as far as they are in proportion to its size."""

    def __init__(self, path: Path):
        self._file: Any = _OPEN[path.suffix](path, "rb")
        self._size, self._done = os.path.getsize(path), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._file.readinto(buffer)
        self._done += count
        _check_unpacked(self._done, self._size, "unpack it first")
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def binary(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file's bytes; ``.gz``, ``.bz2`` and ``.xz`` are unpacked on the way, as by `text`."""
    path = Path(path)
    return io.BufferedReader(_Unpacked(path)) if path.suffix in _OPEN else open(path, "rb")


def text(path: str | os.PathLike[str], *, newline: str | None = None) -> TextIO:
    """Open a text file in UTF-8; ``.gz``, ``.bz2`` and ``.xz`` are unpacked on the way.

    A compressed file that unpacks to more than 200 times its size, and to more than 256 MiB, is
    refused where it does, as a ValueError. What is read is best read inside of `reading`.

    Args:
        path: The file.
        newline: As of `open`.
    """
    return io.TextIOWrapper(binary(path), encoding="utf8", newline=newline)


@contextlib.contextmanager
def reading(path: str | os.PathLike[str], remedy: str) -> Iterator[None]:
    """Name the file when what reads it fails, whatever it raises: damage takes every shape.

    Args:
        path: The file.
        remedy: What to do about a damaged one.

    Raises:
        FileNotFoundError: If the block does.
        ValueError: For any other exception of the block; one that names the file stays as it is.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        if isinstance(error, ValueError) and os.fspath(path) in str(error):
            raise
        raise ValueError(f"{os.fspath(path)} cannot be read ({_brief(error)}); {remedy}") from None


def _brief(error: Exception) -> str:
    """What went wrong, in one line."""
    reason = getattr(error, "strerror", None) or str(error)
    return " ".join(reason.split())[:200] or type(error).__name__


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


class Lock:
    """A place that one object of one process has to itself, until `close` or the process's end.

    The system holds it for the open file (`flock`): a second object of the same process meets it
    as another process does, and a kill frees it. A copy of the place is another place.

    Args:
        name: The argument that named the place.
        path: The place.
        at: The file that is locked, which is never replaced: the place by default; made where
            there is none.
        passing: Whether `close` deletes that file.

    Attributes:
        handle: Of the locked file, for reading and writing.

    Raises:
        ValueError: For a place that somebody else has, that cannot be written, or whose file
            system has no locks.
    """

    def __init__(
        self,
        name: str,
        path: str | os.PathLike[str],
        at: Path | None = None,
        *,
        passing: bool = False,
    ) -> None:
        self._name, self._path, self._process = name, os.fspath(path), os.getpid()
        self._at, self._passing = Path(at or path).absolute(), passing
        handle = None
        with writing(name, path):
            self._at.parent.mkdir(parents=True, exist_ok=True)
            while handle is None:
                handle = self._locked()
        self.handle = handle
        self._open = weakref.finalize(self, os.close, handle)

    def _locked(self) -> int | None:
        """A handle of the locked file; None where its name was given to another file meanwhile."""
        handle = os.open(self._at, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            why = (
                "another process uses, or another object of this one; end or close that one first"
                if isinstance(error, BlockingIOError)
                else f"cannot be locked ({error.strerror or error}); name a place on a file system "
                "with locks (flock), such as a local disk"
            )
            raise ValueError(f"{self._name} is {self._path!r}, which {why}") from None
        if self._is_there(handle):
            return handle
        os.close(handle)
        return None

    def _is_there(self, handle: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(handle), os.stat(self._at))
        return False

    def check(self) -> None:
        """Refuse to go on where others are not kept out any more.

        Raises:
            ValueError: After `close`, in a forked process, or where the file was deleted, moved or
                replaced.
        """
        why = {
            "is closed": not self._open.alive,
            "was opened before this process was forked": self._process != os.getpid(),
            "was deleted, moved or replaced while it was in use": not (
                self._open.alive and self._is_there(self.handle)
            ),
        }
        for reason, holds in why.items():
            if holds:
                raise ValueError(f"{self._name} is {self._path!r}, which {reason}; open it again")

    def close(self) -> None:
        """Free the place."""
        try:
            if self._passing and self._open.alive and self._process == os.getpid():
                self._at.unlink(missing_ok=True)
        finally:
            self._open()


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


def replace(path: Path, content: Content, *, mode: int = 0o666) -> None:
    """Write a file in place of the one before it; its folder is made.

    Args:
        path: Where to.
        content: All of it, or what writes all of it to an open file.
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
    # Cut, so that the longest name that a file may have leaves room for what is added.
    beside = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.tmp")
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
