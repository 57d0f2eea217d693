"""Files read with a reason where they cannot be, written whole or not at all, and locked."""

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dpjax import _validate

__all__ = ()

Content = bytes | Callable[[BinaryIO], None]
PathLike = str | os.PathLike[str]

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Notes:
    """Standard error for lines that no work depends on: what cannot be written there is lost.

    It may be None, as where there is no console, or closed, full, or a pipe that nobody reads.
    """

    _lost = contextlib.suppress(OSError, ValueError, AttributeError)

    def __getattr__(self, name: str) -> Any:
        """What else a progress bar asks of a file: its encoding, and its handle for the width."""
        return getattr(sys.stderr, name)

    def isatty(self) -> bool:
        """Whether somebody watches."""
        with self._lost:
            return sys.stderr.isatty()
        return False

    def write(self, text: str) -> None:
        """Write, if that can be done.

        Args:
            text: Any.
        """
        with self._lost:
            sys.stderr.write(text)

    def flush(self) -> None:
        """Flush, if that can be done."""
        with self._lost:
            sys.stderr.flush()


def say(line: str) -> None:
    """Print a line to standard error, at once.

    Args:
        line: Without its end.
    """
    print(line, file=Notes(), flush=True)


def npz(path: PathLike) -> Path:
    """Return where a path's archive is, to write or to read: ``.npz`` is appended to bare names.

    Args:
        path: As it was given.

    Raises:
        ValueError: For what names no file, numbers among them: those are open files' own.
    """
    # An integer would be taken for an open file's descriptor.
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise _validate.refusal("path", path, "name a file, such as 'run.npz'")
    file = Path(text)
    if os.path.isdir(text) or not file.name or file.name == "..":
        raise ValueError(f"path is {text!r}, a folder; name a file in it, such as 'run.npz'")
    return file if file.suffix else file.with_suffix(".npz")


def archive(path: PathLike) -> dict[str, np.ndarray]:
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
                arrays = {name: _entry(file, name) for name in file.files}
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile, zlib, struct, tokenize: damage takes every shape
        raise ValueError(brief(error)) from None
    if not all(isinstance(array, np.ndarray) for array in arrays.values()):
        raise ValueError("it holds entries that are no arrays")
    return arrays


def _entry(file: Mapping[str, Any], name: str) -> Any:
    """An array of an open archive."""
    try:
        return file[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
    raise ValueError(
        f"its array {name} holds Python objects; save texts by astype(str), numbers by "
        "astype(float)"
    )


def packed(header: str, arrays: Mapping[str, np.ndarray]) -> Content:
    """Return what writes an npz file of arrays, a text and the digest of both, for `unpacked`.

    Args:
        header: JSON, say.
        arrays: By name. Narrow floats, as models have them, are no numbers to NumPy alone: they are
            written as whole numbers of their size.
    """
    plain: dict[str, Any] = dict(arrays)
    for name, array in arrays.items():
        # Narrow floats are raw bytes to NumPy.
        if array.dtype.kind == "V":
            plain[name] = array.view(f"u{array.dtype.itemsize}")
    digest = _digest(header, plain)
    return lambda file: np.savez(file, header=np.array(header), digest=digest, **plain)


def unpacked(path: PathLike) -> tuple[str, dict[str, np.ndarray]]:
    """Return the header and the arrays of a file that `packed` wrote.

    Guarantee: they are what was written, by the digest, which is nobody's signature.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: When there is no such file.
        ValueError: For a truncated, changed or foreign one.
    """
    arrays = archive(path)
    if not {"header", "digest"} <= set(arrays):
        raise ValueError("it lacks a header or a digest")
    header = str(arrays.pop("header"))
    digest = str(arrays.pop("digest"))
    if digest != _digest(header, arrays):
        raise ValueError("its content was changed")
    return header, arrays


def _digest(header: str, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(header.encode())
    # Names, dtypes and shapes too: the same bytes may be another array.
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}{array.dtype.str}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def toml(path: PathLike, remedy: str = "mend the line that is named, and save it as UTF-8") -> Any:
    """Return the plain values of a TOML file.

    Args:
        path: The file.
        remedy: What to do about one that is none.

    Raises:
        FileNotFoundError: Where there is none.
        ValueError: For a file that is none.
    """
    import tomllib

    with reading(path, remedy):
        # Windows writes a byte order mark, which TOML does not know.
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))


@contextlib.contextmanager
def reading(path: PathLike, remedy: str) -> Iterator[None]:
    """Name the file when what reads it fails, whatever it raises: damage takes every shape.

    Args:
        path: The file.
        remedy: What to do about a damaged one.

    Raises:
        FileNotFoundError: If the block does, naming the file.
        ValueError: For any other exception of the block; one that names the file stays as it is.
    """
    name = os.fspath(path)
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"{name} does not exist; name a file that does") from None
    except Exception as error:
        # What names the file already has a reason of its own.
        if isinstance(error, ValueError) and name in str(error):
            raise
        raise ValueError(f"{name} cannot be read ({brief(error)}); {remedy}") from None


def brief(error: object) -> str:
    """Return what went wrong, in one line, without the system's number of it.

    Args:
        error: An exception, or its reason.
    """
    reason = getattr(error, "strerror", None) or str(error)
    if "pickle" in reason:
        # NumPy advises to load such a file all the same, which runs the code in it.
        return "it is no file of arrays, or holds Python objects beside numbers and texts"
    return " ".join(reason.split())[:200] or type(error).__name__


@contextlib.contextmanager
def writing(name: str, path: PathLike) -> Iterator[None]:
    """Name the path when the system refuses to write there: read-only, full, no folder.

    Args:
        name: The argument that named it.
        path: The path.

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


class Busy(ValueError):
    """Somebody else has what was to be locked."""


class Lock:
    """A file or folder that one object of one process has to itself, until `close` or a kill.

    The system holds it for the open file (`flock`): a second object of the same process meets it
    as another process does. A copy of the file is another one.

    Args:
        name: The argument that named it.
        path: Its path.
        file: The file that is locked, which is never replaced: the path by default; made where
            there is none.
        passing: Whether `close` deletes that file.

    Attributes:
        handle: Of the locked file, for reading and writing.

    Raises:
        Busy: Where somebody else has it.
        ValueError: Where it cannot be written, or its file system has no locks.
    """

    def __init__(
        self, name: str, path: PathLike, file: Path | None = None, *, passing: bool = False
    ):
        self._name = name
        self._path = os.fspath(path)
        self._file = Path(file or path).absolute()
        self._passing = passing
        # A fork copies this object, and the system's lock with it.
        self._process = os.getpid()
        with writing(name, path):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self.handle = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
            self._open = weakref.finalize(self, os.close, self.handle)
            # Whoever has the file for a moment may delete it between the open and the lock.
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_there():
                    return
        self._open()
        raise Busy(
            f"{name} is {self._path!r}, which another process uses, or another object of this one; "
            "end or close that one first"
        )

    def _is_there(self) -> bool:
        """Whether the path still names the open file, which another holder may have deleted."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self.handle), os.stat(self._file))
        return False

    def check(self) -> None:
        """Refuse to go on where others are not kept out any more.

        Raises:
            ValueError: After `close`, in a forked process, or where the file was deleted, moved or
                replaced.
        """
        if not self._open.alive:
            reason = "is closed"
        elif self._process != os.getpid():
            reason = "was opened before this process was forked"
        elif not self._is_there():
            reason = "was deleted, moved or replaced while it was in use"
        else:
            return
        raise ValueError(f"{self._name} is {self._path!r}, which {reason}; open it again")

    def close(self) -> None:
        """Let others have it."""
        try:
            if self._passing and self._open.alive and self._process == os.getpid():
                self._file.unlink(missing_ok=True)
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
    with new_file(path, content, mode) as written:
        try:
            os.link(written, path)  # fails where the name is taken, unlike a rename
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # A file system without hard links: take the name first, then fill it.
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
            os.replace(written, path)
        with contextlib.suppress(OSError):
            synchronise(path.parent)


def replace(path: Path, content: Content, *, mode: int = 0o666) -> None:
    """Write a file in place of the one before it; its folder is made.

    Args:
        path: Where to.
        content: All of it, or what writes all of it to an open file.
        mode: The file's mode, before the process's mask, from its first byte on.
    """
    with new_file(path, content, mode) as written:
        os.replace(written, path)
        with contextlib.suppress(OSError):
            synchronise(path.parent)


@contextlib.contextmanager
def new_file(path: Path, content: Content, mode: int) -> Iterator[Path]:
    """Write a file beside another one, in its folder; it is gone when the block ends.

    What the block makes of it lasts through a power failure after `synchronise`.

    Args:
        path: The other one.
        content: All of it, or what writes all of it to an open file.
        mode: The file's mode, before the process's mask, from its first byte on.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(f"{path.parent} is a file") from None
    # Cut, so that the suffix fits into the longest allowed name.
    written = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.tmp")
    try:
        handle = os.open(written, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        with os.fdopen(handle, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            # On disk before it has its name: a crash leaves the whole file or none.
            file.flush()
            os.fsync(file.fileno())
        yield written
    finally:
        written.unlink(missing_ok=True)


def synchronise(folder: Path) -> None:
    """Make the names in a folder last through a power failure.

    Args:
        folder: Its path.

    Raises:
        OSError: Where the system cannot.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
