"""Where data files are kept, and how they are fetched: checked, resumed, never half-written."""

import contextlib
import fcntl
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["DataError", "MissingDataError", "fetch", "folder", "replacing", "sha256_of"]

_CHUNK = 1 << 20


class DataError(ValueError):
    """Data that cannot be used: damaged, incomplete, or other data than expected."""


class MissingDataError(DataError, FileNotFoundError):
    """Data that is not here and could not be fetched; the message says what to do."""


def folder() -> Path:
    """Return the folder of data files: $DPJAX_DATA, else dpjax in the user's cache folder.

    The user's cache is $XDG_CACHE_HOME, or ~/.cache. The folder need not exist yet.
    """
    named = os.environ.get("DPJAX_DATA")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dpjax"


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a path to write to; on success it takes the place of ``path``, else it is removed.

    Args:
        path: The file to appear, whole or not at all; its folder is made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield beside
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def fetch(
    url: str,
    target: str | os.PathLike[str],
    sha256: str | None,
    *,
    timeout: float = 30.0,
    attempts: int = 3,
    progress: Callable[[int, int | None], None] | None = None,
) -> Path:
    """Bring a file from a public address to ``target``, once, checked and resumable.

    What has arrived lies in ``target`` + ".part". An interrupted download goes on from there, in
    this call or a later one; only a file with the right hash is renamed to ``target``. Processes
    that fetch the same file wait for each other.

    Args:
        url: The address, http or https.
        target: Where the file goes.
        sha256: SHA-256 of the file's bytes in hexadecimal; None trusts the address.
        timeout: Seconds without an answer after which an attempt ends.
        attempts: Attempts before giving up.
        progress: ``progress(bytes_so_far, total_or_None)``, called as data arrives.

    Returns:
        ``target``.

    Raises:
        MissingDataError: When the address cannot be reached, or the file did not arrive whole.
        DataError: When the file that arrived, or one already at ``target``, has another hash.
    """
    if not url.startswith(("http://", "https://")):
        raise DataError(f"url is {url!r}; give an address that begins with http:// or https://")
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    while not target.exists():
        with open(part, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever held the lock may have renamed or removed the file that was waited for.
            if not _is_named(file.fileno(), part):
                continue
            if target.exists():
                part.unlink()
                break
            _download(url, file.fileno(), part, sha256, timeout, attempts, progress)
            os.fsync(file.fileno())
            os.replace(part, target)
            return target
    if sha256 is not None and sha256_of(target) != sha256:
        raise DataError(f"{target} has another sha256 than {sha256}; remove it to fetch it again")
    return target


def _is_named(descriptor: int, path: Path) -> bool:
    """Tell whether the open file is still the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _download(
    url: str,
    descriptor: int,
    part: Path,
    sha256: str | None,
    timeout: float,
    attempts: int,
    progress: Callable[[int, int | None], None] | None,
) -> None:
    """Fill the part file until its hash is right."""
    reason = ""
    for attempt in range(attempts):
        if attempt:
            time.sleep(min(2.0**attempt / 4, 5.0))
        resumed = os.fstat(descriptor).st_size
        try:
            _receive(url, descriptor, timeout, progress)
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            if isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500:
                break
            continue
        found = sha256_of(part)
        if sha256 is None or found == sha256:
            return
        # A part of an older or foreign file may have been gone on from: begin anew.
        os.ftruncate(descriptor, 0)
        if not resumed:
            part.unlink(missing_ok=True)
            raise DataError(
                f"{url} gave a file of sha256 {found}, not {sha256}; nothing was kept: the address "
                "holds another file, or something on the way changes it"
            )
        reason = "the resumed file had another hash"
    kept = os.fstat(descriptor).st_size
    if not kept:
        part.unlink(missing_ok=True)
    raise MissingDataError(
        f"{url} could not be fetched ({reason}); "
        + (f"{kept:,} bytes are kept, fetch again to go on" if kept else "check the network")
    )


def _receive(
    url: str,
    descriptor: int,
    timeout: float,
    progress: Callable[[int, int | None], None] | None,
) -> None:
    """Append what the part file lacks; raise OSError when less arrives than was announced."""
    have = os.fstat(descriptor).st_size
    request = urllib.request.Request(url, headers={"User-Agent": "dpjax"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        answer = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:  # Nothing lies beyond: complete already, or too long.
            return
        raise
    with answer:
        if answer.status != 206:
            os.ftruncate(descriptor, 0)
            have = 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else None
        while block := answer.read(_CHUNK):
            os.write(descriptor, block)
            have += len(block)
            if progress is not None:
                progress(have, total)
    if total is not None and have < total:
        raise OSError(f"{have:,} of {total:,} bytes arrived")
