"""What a run's secure sums have asked for, kept on disk: no message is summed twice."""

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt32

from dpjax import _files, _validate

__all__: list[str] = []


class Known(NamedTuple):
    """A round that was asked for.

    Attributes:
        message: Digest of its message.
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

    One line of JSON for each note, the terms first. A line that was cut short was not followed by
    a message, and is left out.

    Args:
        path: The file; made where there is none.
        terms: Digest of the terms.

    Attributes:
        known: What the file holds.

    Raises:
        ValueError: For a place that cannot be written, and a file of something else.
    """

    def __init__(self, path: Any, terms: bytes) -> None:
        if not isinstance(path, str | os.PathLike) or not str(path).strip():
            raise ValueError(f"journal is {_validate.shown(path)}; name a file, or None")
        self.path, self.known = Path(path), dict[int, Known]()
        with _files.writing("journal", self.path):
            if not self.path.exists():
                _files.create(self.path, self._line({"terms": terms.hex()}))
            text = self.path.read_bytes()
        whole, _, cut = text.rpartition(b"\n")
        try:
            first, *notes = map(json.loads, whole.split(b"\n"))
            told = first["terms"]
            for note in notes:
                self._read(note)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"journal is {self.path}, which is none ({error!r})") from None
        if told != terms.hex():
            raise ValueError(
                f"journal is {self.path}, of a run of other terms; give each run a file of its own"
            )
        if cut:
            with _files.writing("journal", self.path):
                os.truncate(self.path, len(whole) + 1)

    def ask(self, round: int, message: str) -> None:
        """Note that a round's message is about to go out.

        Args:
            round: Rounds before it.
            message: Its digest.
        """
        self.known[round] = Known(message)
        self._append({"round": round, "message": message})

    def opened(self, round: int, values: UInt32[np.ndarray, " K"], present: int) -> None:
        """Note a round's sum.

        Args:
            round: As it was asked for.
            values: Modulo 2^b.
            present: How many it is of.
        """
        self.known[round] = Known(self.known[round].message, values, present)
        words = base64.b64encode(values.astype("<u4").tobytes()).decode()
        self._append({"round": round, "present": present, "sum": words})

    def _read(self, note: dict[str, Any]) -> None:
        round = int(note["round"])
        if "message" in note:
            self.known[round] = Known(str(note["message"]))
            return
        values = np.frombuffer(base64.b64decode(note["sum"]), "<u4").astype(np.uint32)
        self.known[round] = Known(self.known[round].message, values, int(note["present"]))

    def _append(self, note: dict[str, Any]) -> None:
        with _files.writing("journal", self.path), open(self.path, "ab") as file:
            file.write(self._line(note))
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def _line(note: dict[str, Any]) -> bytes:
        return json.dumps(note).encode() + b"\n"
