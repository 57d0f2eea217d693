"""A site's folder: every file whole or not at all, and on disk before anybody hears of it.

lock          held while a process uses the folder
nonce         drawn with the folder
mark          of the group's secret, where there is one: another is refused
secret        of the site's noise, mode 0600; deleted after the last message with noise
exchange      private key of this run's links, likewise
run           all sites' presences, which name the run
sent/R        the message of round R, until all have absorbed it
sums/R        the sum of round R, or that there is none, where sites add up among themselves
journal       keys, vectors and words that there is no sum, each before it goes out; likewise
headers       digests and signatures of all messages, one a line
enrolled      of each site the last keys for a sum that this one has seen
evidence-S-R  of site S in round R, for which this site stopped
state         after the last absorbed round
states/R      after round R: the last few, from which sites may go on without one that left
leaving       that the operator wants the site to leave in order
left-S        that site S has left in order, signed
successor     digest of the one plan after this one that the site signs
audit.jsonl   what was sent when, each line with the digest of the one before
"""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dpjax import _files, _validate
from dpjax.secagg.primitives import KEY_BYTES
from dpjax.sites.wire import Header

__all__ = ()

LEAVING = "leaving"
"""A file of a folder: its operator wants the site to leave."""
SUCCESSOR = "successor"
"""A file of a folder: the digest of the one plan after it that the site has signed."""
UNBEGUN = "unbegun"
"""A file of a folder: the site has signed that this phase has not begun, and begins it no more."""


class MustLeave(ValueError):
    """The site cannot go on in this run, without the danger of sending a round twice, say.

    Example:
        >>> from dpjax.sites.store import MustLeave
        >>> issubclass(MustLeave, ValueError)
        True
    """


class Folder:
    """What a site keeps on disk, to itself.

    Guarantee: a name is given once; what has it is whole and lasts through a power failure, or an
    error is raised. Nothing is suppressed: a file system without hard links or a folder that cannot
    be synchronised is refused, since two payloads of one round might go out there.

    Args:
        path: The folder; made where there is none.

    Raises:
        ValueError: Where another process uses it, or it cannot be written.
    """

    def __init__(self, path: _files.PathLike) -> None:
        self.path = Path(path)
        with _files.writing("folder", path):
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._lock = _files.Lock("folder", path, self.path / "lock")
        except _files.Busy:
            # Who asks whether a site runs holds it for a moment.
            time.sleep(0.05)
            self._lock = _files.Lock("folder", path, self.path / "lock")
        for stray in self.path.rglob(".*.tmp"):
            stray.unlink(missing_ok=True)
        with _files.writing("folder", path):
            (self.path / "sent").mkdir(exist_ok=True, mode=0o700)
            # Or a power failure takes them, with what is in them.
            _files.synchronise(self.path)
            _files.synchronise(self.path.absolute().parent)

    def room(self, name: str) -> None:
        """Make a folder in it that lasts, where there is none.

        Args:
            name: Of the folder.
        """
        with _files.writing("folder", self.path):
            (self.path / name).mkdir(exist_ok=True, mode=0o700)
            _files.synchronise(self.path)

    def close(self) -> None:
        """Let other processes have it."""
        self._lock.close()

    def read(self, name: str) -> bytes | None:
        """The content of a file; None where there is none.

        Args:
            name: Relative to the folder.
        """
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        """Names of the files in a folder of it.

        Args:
            folder: Relative.
        """
        place = self.path / folder
        return sorted(entry.name for entry in place.iterdir()) if place.is_dir() else []

    def create(self, name: str, content: _files.Content) -> None:
        """Write a new file, synchronised, its name too.

        Args:
            name: Relative to the folder.
            content: All of it, or what writes it.

        Raises:
            ValueError: If the name is taken, whose file is left as it is; where there are no hard
                links, or the name does not last.
        """
        self._write(name, content, os.link)

    def replace(self, name: str, content: _files.Content) -> None:
        """Write a file in place of the one before it, synchronised.

        Args:
            name: Relative to the folder.
            content: All of it, or what writes it.
        """
        self._write(name, content, os.replace)

    def link(self, name: str, other: str) -> None:
        """Give a file that there may be a second name, which may not last.

        Args:
            name: Relative to the folder.
            other: Likewise.
        """
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            os.link(self.path / name, self.path / other)

    def lines(self, name: str) -> list[bytes]:
        """The lines of a file that `append` writes, without one that a kill cut off.

        Nobody relied on what was cut off, so it is taken out of the file.

        Args:
            name: Relative to the folder.
        """
        complete, end, rest = (self.read(name) or b"").rpartition(b"\n")
        if rest:
            self.replace(name, complete + end)
        return complete.splitlines()

    def append(self, name: str, line: bytes) -> None:
        """Append a line to a file, synchronised.

        Args:
            name: Relative to the folder.
            line: Without its end.
        """
        self._lock.check()
        with _files.writing("folder", self.path):
            is_new = not (self.path / name).exists()
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            handle = os.open(self.path / name, flags, 0o600)
            size = os.fstat(handle).st_size
            try:
                if os.write(handle, line + b"\n") <= len(line):
                    raise OSError(errno.ENOSPC, "the line does not fit")
                os.fsync(handle)
            except OSError:
                # Half a line would spoil the next one.
                os.ftruncate(handle, size)
                raise
            finally:
                os.close(handle)
            if is_new:
                _files.synchronise(self.path)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there; in the folder itself, where secrets are, for good.

        Args:
            name: Relative to the folder.
        """
        path = self.path / name
        path.unlink(missing_ok=True)
        if path.parent == self.path:
            _files.synchronise(self.path)

    def drawn(self, name: str) -> bytes:
        """32 bytes of the operating system's, drawn at the first call.

        Args:
            name: Relative to the folder.

        Raises:
            MustLeave: For a file of another length, or of zeros.
        """
        content = self.read(name)
        if content is None:
            content = secrets.token_bytes(KEY_BYTES)
            self.create(name, content)
        if len(content) != KEY_BYTES or not any(content):
            raise MustLeave(f"{self.path / name} is damaged; this site must leave")
        return content

    def _write(
        self, name: str, content: _files.Content, move: Callable[[Path, Path], None]
    ) -> None:
        self._lock.check()
        path = self.path / name
        with _files.writing("folder", self.path):
            with _files.new_file(path, content, 0o600) as written:
                move(written, path)
                _files.synchronise(path.parent)


class Log:
    """Headers of all messages that a site sent, received or heard of, for the whole run.

    Args:
        folder: Where they are kept.

    Raises:
        MustLeave: For a line that is none, but for a last one that was cut off.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._headers: dict[tuple[str, int], Header] = {}
        self._last: dict[str, Header] = {}
        for line in folder.lines("headers"):
            header = _header_of(line)
            if header is None:
                raise MustLeave(f"{folder.path / 'headers'} is damaged; this site must leave")
            self.note(header)

    def get(self, sender: str, round: int) -> Header | None:
        """The header of a sender's round; None where it is not known.

        Args:
            sender: The site.
            round: Of the phase.
        """
        return self._headers.get((sender, round))

    def last(self, sender: str) -> Header | None:
        """The header of a sender's last message.

        Args:
            sender: The site.
        """
        return self._last.get(sender)

    def note(self, header: Header) -> None:
        """Note a header in memory; `keep` puts it on disk.

        Args:
            header: One whose signature was checked.
        """
        self._headers[header.sender, header.round] = header
        last = self._last.get(header.sender)
        if last is None or header.round > last.round:
            self._last[header.sender] = header

    def keep(self, headers: list[Header]) -> None:
        """Put headers on disk.

        Args:
            headers: Those that are new there.
        """
        lines = [
            f"{header.sender} {header.round} {header.digest.hex()} {header.signature.hex()}"
            for header in headers
        ]
        if lines:
            self._folder.append("headers", "\n".join(lines).encode())

    def __iter__(self) -> Iterator[Header]:
        """All headers."""
        return iter(tuple(self._headers.values()))


def _header_of(line: bytes) -> Header | None:
    try:
        sender, round, digest, signature = line.decode().split(" ")
        return Header(sender, int(round), bytes.fromhex(digest), bytes.fromhex(signature))
    except ValueError:
        return None


class Audit:
    """What a site did, line by line, each with the digest of the line before; no data.

    Args:
        folder: Where the file is.
    """

    name = "audit.jsonl"

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        lines = folder.lines(self.name)
        self._last = hashlib.sha256(lines[-1]).hexdigest() if lines else ""

    def note(self, event: str, **fields: str | int | float) -> None:
        """Append an event.

        Args:
            event: What happened.
            fields: What else is said of it; no data of records.
        """
        line = json.dumps({"event": event, "time": time.time(), **fields, "before": self._last})
        self._folder.append(self.name, line.encode())
        self._last = hashlib.sha256(line.encode()).hexdigest()

    @classmethod
    def check(cls, path: _files.PathLike) -> int:
        """Return the number of lines of an audit file whose chain of digests holds.

        Args:
            path: The file.

        Raises:
            ValueError: Naming the first line that does not follow from the one before.
        """
        before = ""
        lines = Path(path).read_bytes().splitlines()
        for number, line in enumerate(lines, 1):
            try:
                stated = json.loads(line)["before"]
            except (ValueError, KeyError, TypeError):
                stated = None
            if stated != before:
                raise ValueError(f"{path} was changed at line {number}; it proves nothing after it")
            before = hashlib.sha256(line).hexdigest()
        return len(lines)


def shared_secret(path: _files.PathLike) -> bytes:
    """Return the secret of a group of sites, from its file.

    Args:
        path: Of 32 bytes, mode 0600.

    Raises:
        ValueError: For a file that others may read, or of another length.
    """
    with _files.reading(path, "name the file of 32 bytes that your group drew for this run"):
        mode = os.stat(path).st_mode
        content = Path(path).read_bytes()
        if mode & 0o077:
            raise ValueError("others may read it; chmod 600, and draw another if they did")
        if len(content) != KEY_BYTES or not any(content):
            raise _validate.refusal("length", len(content), f"give {KEY_BYTES} random bytes")
    return content
