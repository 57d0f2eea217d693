"""What a run's secure sums have asked for, kept on disk: no message is summed twice."""

import base64
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import UInt32

from dpjax import _files, _validate

__all__: list[str] = []

_DIGEST = b', "digest": "'


class Known(NamedTuple):
    """A round that was asked for.

    Attributes:
        message: Digest of its message; "" where that is not known.
        values: Its sum; None where none was seen.
        present: How many it is of.
    """

    message: str
    values: UInt32[np.ndarray, " K"] | None = None
    present: int = 0

    @property
    def sum(self) -> tuple[Any, np.float32]:
        """As the transport returned it."""
        return self.values, np.float32(self.present)


def digest(rows: Any) -> str:
    """Return what tells messages apart.

    Args:
        rows: [n, K] whole numbers.
    """
    return hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()


class Journal:
    """Rounds of one run by number, each noted before any of it goes out.

    One line of JSON for each note, the terms first. Each line has a digest of itself and of the
    line before it, against damage and against changes by hand: a line that was changed, dropped,
    or put elsewhere is noticed, unless nothing follows it. A last line without its end, as a kill
    leaves it, spends its round, or the next one where its number is not there.

    Guarantee: of all objects that have the file, on one machine, one is open, and it reads what
    others wrote before it says that a round is new.

    Args:
        path: The file; made where there is none.
        terms: Digest of the terms.

    Attributes:
        known: What the file holds.

    Raises:
        ValueError: For a place that cannot be written or that is in use, and a file of something
            else.
    """

    def __init__(self, path: Any, terms: bytes) -> None:
        if not isinstance(path, str | os.PathLike) or not str(path).strip():
            raise ValueError(f"journal is {_validate.shown(path)}; name a file, or None")
        self.path, self.known = Path(path), dict[int, Known]()
        self._terms, self._lines, self._end, self._digest, self._torn = terms.hex(), 0, 0, "", False
        if not self.path.exists():
            with _files.writing("journal", self.path), contextlib.suppress(FileExistsError):
                _files.create(self.path, self._line({"terms": self._terms}))
        self._lock = _files.Lock("journal", self.path)
        try:
            self.read()
            if not self._lines:
                raise self._damaged(1)
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Leave the file to others."""
        self._lock.close()

    def read(self) -> dict[int, Known]:
        """Read what was written since, by whomever, and return all rounds.

        Raises:
            ValueError: Where the file is damaged, or not locked any more.
        """
        self._lock.check()
        with self._opened() as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(self._end)
            *lines, torn = file.read().split(b"\n")
        if length < self._end:
            raise self._damaged(self._lines)
        for line in lines:
            self._take(line)
        if torn and self._lines:
            number = re.match(rb'\{"round": (\d{1,9}), ', torn)
            self._torn = number is None
            if number is not None:
                round = int(number[1])
                self.known[round] = Known(self.known[round].message if round in self.known else "")
                self._append({"round": round, "message": self.known[round].message})
        return self.known

    def ask(self, round: int, message: str) -> bool:
        """Note that a round's message is about to go out.

        Args:
            round: Rounds before it.
            message: Its digest.

        Returns:
            Whether it may; not where the file's last line may have been of this round.
        """
        torn = self._torn
        self.known[round] = Known(message)
        self._append({"round": round, "message": message})
        return not torn

    def opened(self, round: int, values: UInt32[np.ndarray, " K"], present: int) -> None:
        """Note a round's sum.

        Args:
            round: As it was asked for.
            values: Modulo 2^b.
            present: How many it is of.
        """
        self.read()
        self.known[round] = Known(self.known[round].message, values, present)
        words = base64.b64encode(values.astype("<u4").tobytes()).decode()
        self._append({"round": round, "present": present, "sum": words})

    def _take(self, line: bytes) -> None:
        """Take in a line that was written whole."""
        body, _, end = line.rpartition(_DIGEST)
        if end != f'{_chained(self._digest, body)}"}}'.encode():
            raise self._damaged(self._lines + 1)
        note = json.loads(body + b"}")
        if not self._lines and note.get("terms") != self._terms:
            raise ValueError(
                f"journal is {self.path}, of a run of other terms; give each run a file of its own"
            )
        if "message" in note:
            self.known[note["round"]] = Known(note["message"])
        elif "sum" in note:
            values = np.frombuffer(base64.b64decode(note["sum"]), "<u4").astype(np.uint32)
            message = self.known[note["round"]].message
            self.known[note["round"]] = Known(message, values, note["present"])
        self._went(line + b"\n")

    def _append(self, note: dict[str, Any]) -> None:
        line = self._line(note)
        with self._opened() as file:
            # Over what was cut short, which stays until this line is there.
            file.seek(self._end)
            file.write(line)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        self._torn = False
        self._went(line)

    def _line(self, note: dict[str, Any]) -> bytes:
        body = json.dumps(note).encode()[:-1]
        return body + _DIGEST + f'{_chained(self._digest, body)}"}}\n'.encode()

    def _went(self, line: bytes) -> None:
        """Go on behind a line."""
        self._digest = line.rpartition(_DIGEST)[2][: -len(b'"}\n')].decode()
        self._end, self._lines = self._end + len(line), self._lines + 1

    @contextlib.contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        with (
            _files.writing("journal", self.path),
            open(self._lock.handle, "r+b", closefd=False) as file,
        ):
            yield file

    def _damaged(self, line: int) -> ValueError:
        return ValueError(
            f"journal is {self.path}, which is damaged in line {line}, of an earlier version, or "
            "none: which rounds were asked for cannot be told. Restore the file as it was when "
            "the run stopped, or begin another run and account for both"
        )


def _chained(before: str, body: bytes) -> str:
    """The digest of a line, which covers the one before it."""
    return hashlib.sha256(before.encode() + body).hexdigest()
