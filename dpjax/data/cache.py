"""Where data sets are kept, and how files get there: whole or not at all."""

import contextlib
import fcntl
import hashlib
import http.client
import os
import queue
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dpjax import _files

__all__ = ["folder"]

_CHUNK = 1 << 16
_HEADERS = {"User-Agent": "dpjax"}
_TRIES = 3
_PAUSE = 0.5  # seconds, times the number of tries
_ANSWER = 8.0  # seconds until a server must have answered


def folder() -> Path:
    """Return the cache: ``$DPJAX_DATA``, else ``$XDG_CACHE_HOME/dpjax``, else ``~/.cache/dpjax``.

    The folder need not exist yet.

    Example:
        >>> import pathlib
        >>> from dpjax.data import cache
        >>> isinstance(cache.folder(), pathlib.Path)
        True
    """
    named = os.environ.get("DPJAX_DATA")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dpjax"


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yield a path to write to; it becomes ``path`` when the block ends well, else it is removed.

    Args:
        path: The file to make; its folder is made too.

    Yields:
        A name of this process in the same folder, with the same ending.

    Raises:
        ValueError: Where the system refuses to write.
    """
    temporary = path.with_name(f".{path.stem[:50]}.{os.getpid()}.tmp{path.suffix}")
    with _files.writing("path", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of ``path`` while the block runs: one process makes the file, others wait."""
    with _files.writing("path", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_name(f".{path.name}.lock"), "w")  # noqa: SIM115 - closed below
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fetch(
    url: str | Sequence[str],
    path: str | os.PathLike[str],
    *,
    sha256: str | None = None,
    timeout: float = 15.0,
    progress: bool | None = None,
) -> Path:
    """Download a file; an interrupted download carries on where it stopped.

    Bytes go to ``path`` with ``.part`` appended, which a later call continues by a Range request,
    and are renamed when all have come. What is fetched, and where from, is said on standard error.

    Args:
        url: Where from, http or https; or several addresses of the same bytes, tried in turn.
        path: Where to; a file that is there already is returned as it is.
        sha256: Of the bytes, in hexadecimal; None where the caller checks what they decode to.
        timeout: Seconds of silence after which a try is given up; 8 until the first answer.
        progress: Show a progress bar; None is when standard error is a terminal.

    Returns:
        The path.

    Raises:
        ValueError: If the bytes have another sha256; the download is removed.
        ConnectionError: If there is no network, or no server sends the file.
    """
    path = Path(path)
    if os.path.exists(path):
        return path
    with _files.writing("path", path):
        path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    show = sys.stderr.isatty() if progress is None else progress
    reasons = []
    for address in [url] if isinstance(url, str) else url:
        reason = _download(address, part, timeout, show)
        if reason is None:
            break
        reasons.append(f"{address} {reason}")
    else:
        kept = f"; {part} holds what came" if os.path.exists(part) else ""
        raise ConnectionError(", ".join(reasons) + kept)
    if sha256 is not None:
        with part.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != sha256:
            part.unlink()
            raise ValueError(
                f"url {address} gave a file of sha256 {digest[:12]}, not {sha256[:12]}; it was "
                "removed: fetch again, or get the file elsewhere"
            )
    part.replace(path)
    return path


def reach(url: str, path: Path) -> None:
    """Say that a file is fetched, and find out whether its server answers.

    Before a library fetches it, which may try for minutes where there is no network.

    Args:
        url: An address of the server, http or https.
        path: What will be made of it.

    Raises:
        ConnectionError: If nothing answers within 8 s.
    """
    _say(url, path)
    try:
        _opened(urllib.request.Request(url, method="HEAD", headers=_HEADERS), _ANSWER).close()
    except urllib.error.HTTPError as error:
        error.close()  # It answers, whatever it thinks of the address.
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(f"{url} {_unreachable(error)}") from None


def _say(url: str, path: Path) -> None:
    print(f"fetching {path.name} from {url}", file=sys.stderr, flush=True)


def _unreachable(error: Exception) -> str:
    return f"cannot be reached ({getattr(error, 'reason', None) or error})"


def _opened(request: urllib.request.Request, seconds: float, timeout: float | None = None) -> Any:
    """A server's answer, given up after so many seconds: resolvers wait as long as they like."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(urllib.request.urlopen(request, timeout=timeout or 2 * seconds))
        except BaseException as error:  # The caller's to raise.
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise urllib.error.URLError(f"no answer within {seconds:g} s") from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _download(url: str, part: Path, timeout: float, show: bool) -> str | None:
    """Complete ``part`` from one address; None, or why that failed."""
    reason = ""
    _say(url, part.with_name(part.name.removesuffix(".part")))
    for attempt in range(_TRIES):
        time.sleep(_PAUSE * attempt)
        try:
            if _receive(url, part, timeout, show):
                return None
            reason = "broke off"
        except urllib.error.HTTPError as error:
            error.close()
            reason = f"answers {error.code} {error.reason}"
            if error.code == 416 and os.path.exists(part):
                # What is there is no beginning of the server's file: start again.
                part.unlink()
            elif error.code < 500:
                return reason
        except (OSError, http.client.HTTPException) as error:
            reason = _unreachable(error)
            if _hopeless(error):
                return reason
    return reason


def _hopeless(error: Exception) -> bool:
    """Tell whether trying again at once cannot help: no such host, no route, refused."""
    return isinstance(error, urllib.error.URLError) and not isinstance(error.reason, TimeoutError)


def _receive(url: str, part: Path, timeout: float, show: bool) -> bool:
    """Append what is missing to ``part``; whether the file is complete."""
    have = part.stat().st_size if os.path.exists(part) else 0
    request = urllib.request.Request(url, headers=_HEADERS)
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        reply = _opened(request, min(timeout, _ANSWER), timeout)
    except urllib.error.HTTPError as error:
        whole = re.fullmatch(r"bytes \*/(\d+)", error.headers.get("Content-Range", ""))
        if error.code == 416 and whole and int(whole[1]) == have:
            error.close()
            return True
        raise
    with reply:
        begun = re.match(r"bytes (\d+)-", reply.headers.get("Content-Range", ""))
        if reply.status != 206 or begun is None or int(begun[1]) != have:
            have = 0  # The server sends the file from its start.
        length = reply.headers.get("Content-Length")
        total = have + int(length) if length is not None else None
        with part.open("ab" if have else "wb") as file, _bar(part, have, total, show) as advance:
            while chunk := reply.read(_CHUNK):
                with _files.writing("path", part):
                    file.write(chunk)
                have += len(chunk)
                advance(len(chunk))
    return total is None or have == total


@contextlib.contextmanager
def _bar(part: Path, have: int, total: int | None, show: bool) -> Iterator:
    if not show:
        yield lambda size: None
        return
    from tqdm import tqdm

    name = part.name.removesuffix(".part")
    with tqdm(desc=name, initial=have, total=total, unit="B", unit_scale=True) as bar:
        yield bar.update
