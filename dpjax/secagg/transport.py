"""Secure sums as the transport of a run: every round's whole numbers cross the protocol.

    terms = terms_of(plan.noise.code, dropouts=2, colluders=1)
    run(plan, problem, seeds=[0], transport=SecureSums(terms))

A round's message is whole numbers of 32 bits [n, K], a row a client, as a method over a server
sends them with `dpjax.plans.sums.Discrete`; what comes back is their sum modulo 2^b over who
was left, and how many these were. Only NumPy is needed, and the extra ``secure``; ``sites`` where
messages cross a network.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Self, TypeVar

import numpy as np
from jaxtyping import Int64, UInt32

from dpjax import _files, _validate
from dpjax.encoding.lattice import SumCode
from dpjax.secagg import local
from dpjax.secagg.terms import Abort, Limits, Terms

__all__ = ["RoundTraffic", "SecureSums", "terms_of"]

_TermsT = TypeVar("_TermsT", bound=Terms)
_Leaves = Mapping[int, str]
"""The stage in which a client leaves, by its number."""
_Missing = tuple[tuple[int, ...], ...]
"""Who is missing from the sum of every round."""
_Values = UInt32[np.ndarray, " K"]
_Sum = tuple[_Values, np.float32]
"""The sum of a round's messages, and how many it is of."""

_ASKED: dict[str, object] = {}
"""Digests of all messages that this process asked sums of, and who asked."""


class RoundTraffic(NamedTuple):
    """What crossed in a round.

    Attributes:
        round: Rounds before it.
        received: Bytes from clients; 0 where the aggregation was aborted.
        sent: Bytes to clients; 0 where it was aborted.
        survivors: Who is in the sum; nobody where it was aborted.
        seconds: It took.
        aborted: Why, or "".

    Example:
        >>> from dpjax.secagg.transport import RoundTraffic
        >>> RoundTraffic(0, 800, 900, survivors=(0, 1), seconds=0.1, aborted="").survivors
        (0, 1)
    """

    round: int
    received: int
    sent: int
    survivors: tuple[int, ...]
    seconds: float
    aborted: str


class SecureSums:
    """A run's transport: one aggregation for each round, with clients that drop out.

    Guarantee: that of `dpjax.secagg.terms.Terms` for the server's view of each round, with all
    parties in one process, who share its memory. It gives no differential privacy: messages carry
    their noise, and the plan's guarantee is for the sums. Each round is requested once. A server
    may still open an aborted round, so that round counts as spent. If it were requested again with
    other survivors, the difference of two sums of the same messages would show single ones. After
    an abort the run stops, as for any transport that fails, or continues without that sum
    (``skip=True``), which changes no model. The same holds for a round in which the process was
    killed. A process requests no message twice, from any object. A ``journal`` remembers beyond the
    process: a resumed run gets the sums that it holds, and skips those that may have been opened.
    Without a journal pass these rounds as ``spent``. One object has a journal at a time. It is
    locked until `close`, the end of a ``with`` block, or the end of the process.

    Args:
        terms: The terms of all parties, see `terms_of`. They have as many clients as the run has
            agents, vectors of its messages' length, ``bound=None``, and at least the bits of the
            code's sums, up to 32. They allow at most the plan's dropouts and at least its
            colluders. `dpjax.engine.run.run` refuses other terms.
        leaves: ``leaves(round)`` returns the stage in which each leaving agent drops out, one of
            the terms' ``stages``. It is public and fixed beforehand; None is for no dropouts.
        over: "memory", or "tcp": gRPC on this machine, with keys that a process makes once.
        skip: Whether the run continues without the sum of an aborted aggregation.
        spent: Aborted rounds of a resumed run, which are skipped.
        limits: Time limits of "tcp": where clients do not enrol, the server waits as long.
        journal: File of this run alone, in which every round is noted before it is requested, and
            its sum; None keeps none.

    Attributes:
        crossed: What crossed, a row a round.

    Raises:
        ValueError: For terms with a bound, or more than 32 bits, an unknown way, or what is no
            terms, function, rounds or limits; a journal of something else, that is damaged, in use,
            or cannot be written or locked.

    Example:
        >>> import numpy as np
        >>> from dpjax.encoding.lattice import SumCode
        >>> from dpjax.secagg import transport
        >>> code = SumCode(size=2, bound=1.0, grid=1 / 64, clients=4, variance=4)
        >>> with transport.SecureSums(transport.terms_of(code, dropouts=0, colluders=0)) as sums:
        ...     total, present = sums(np.ones((4, 2), np.uint32), 0)
        >>> total.tolist(), float(present)
        ([4, 4], 4.0)
    """

    def __init__(
        self,
        terms: Terms,
        leaves: Callable[[int], _Leaves] | None = None,
        *,
        over: Literal["memory", "tcp"] = "memory",
        skip: bool = False,
        spent: Sequence[int] = (),
        limits: Limits | None = None,
        journal: _files.PathLike | None = None,
    ) -> None:
        if not isinstance(terms, Terms):
            raise _validate.refusal("terms", terms, "give terms_of(plan.noise.code)")
        if not isinstance(spent, Sequence):
            raise _validate.refusal("spent", spent, "give rounds, as in (4,)")
        if terms.bound is not None or terms.bits > 32:
            raise ValueError(
                f"terms have bound {terms.bound} and bits {terms.bits}; give bound=None, and the "
                "bits of the plan's code, at most 32"
            )
        self.terms = terms
        self.leaves = leaves
        self.over = _validate.one_of("over", over, ("memory", "tcp"))
        self.skip = _validate.flag("skip", skip)
        self.limits = limits
        self.crossed: list[RoundTraffic] = []
        self._journal = None if journal is None else Journal(journal, terms.digest())
        self._spent = {_validate.integer("spent", round, minimum=0) for round in spent}
        # Spent rounds have been asked for, in another process.
        self._asked = set(self._spent)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """As `close`."""
        self.close()

    def close(self) -> None:
        """Leave the journal to others; nothing can be asked for with it any more."""
        if self._journal is not None:
            self._journal.close()

    @property
    def min_survivors(self) -> int:
        """Agents in a sum that is opened, at least."""
        return self.terms.minimum

    @property
    def colluders(self) -> int:
        """Clients whose knowledge the server may have, at most."""
        return self.terms.colluders

    def __call__(self, message: UInt32[np.ndarray, "n K"], round: int) -> _Sum:
        """Return the sum of a round's messages, and how many it is of.

        Args:
            message: [n, K] uint32.
            round: Rounds before it.

        Raises:
            Abort: Where there is no sum, unless ``skip``.
            ValueError: For other messages, or a round that was asked for before, or for another
                message in the journal.
        """
        rows = self._checked(message)
        journal = self._journal
        digest = hashlib.sha256(np.ascontiguousarray(message).tobytes()).hexdigest()
        noted = None
        if journal is not None:
            noted = journal.read().get(round)
        if noted is not None and noted.message not in ("", digest):
            raise ValueError(
                f"journal holds another message of round {round}; give the file of this very run, "
                "or a new one to a new run"
            )
        if round in self._spent:
            return self._nothing()
        if noted is not None:
            # Without a sum it may have been opened all the same.
            if noted.values is None:
                return self._nothing()
            return noted.values, np.float32(noted.present)
        token = object()
        if round in self._asked or _ASKED.setdefault(digest, token) is not token:
            raise ValueError(
                f"round {round}, or its message, was asked for before in this process. Two sums of "
                "the same messages, over different survivors, could reveal single ones: give "
                f"spent=({round},), the journal that holds its sum, or another seed"
            )
        self._asked.add(round)
        # Noted before anything goes out; a round that may be spent is not asked for.
        if journal is not None and not journal.ask(round, digest):
            return self._nothing()
        began = time.perf_counter()
        try:
            leaves = {} if self.leaves is None else dict(self.leaves(round))
            if self.over == "memory":
                carried = local.over_memory(self.terms, rows, leaves)
            else:
                # Sites build on this package, and need more libraries.
                from dpjax.sites import sums

                carried = sums.over_channel(self.terms, rows, leaves, limits=self.limits)
        except Abort as abort:
            seconds = time.perf_counter() - began
            self.crossed.append(RoundTraffic(round, 0, 0, (), seconds, abort.reason))
            if self.skip:
                return self._nothing()
            remedy = f"spent=({round},)" if journal is None else "the same journal"
            abort.add_note(
                "its masked vectors may have gone out, and its sum been opened: it is not asked "
                f"for again. A run with a checkpoint goes on without it, by SecureSums of {remedy}"
            )
            raise
        seconds = time.perf_counter() - began
        total, received, sent, *_ = carried
        self.crossed.append(RoundTraffic(round, received, sent, total.survivors, seconds, ""))
        # Signed or not, the same modulo 2^b; the code reads it so.
        values = (total.values & (2**self.terms.bits - 1)).astype(np.uint32)
        present = len(total.survivors)
        if journal is not None:
            journal.opened(round, values, present)
        return values, np.float32(present)

    def missing(self) -> _Missing:
        """Who was missing from the sum of every round so far, late clients among them.

        All where it was aborted or spent: `dpjax.algorithms.exchange.Trusted` takes these, by
        round.

        Raises:
            ValueError: For rounds of another process, which alone knew who was there.
        """
        present: dict[int, tuple[int, ...]] = dict.fromkeys(self._spent, ())
        noted = {} if self._journal is None else self._journal.rounds
        for round, note in noted.items():
            if note.values is None:
                present[round] = ()
        for traffic in self.crossed:
            present[traffic.round] = traffic.survivors
        clients = set(range(self.terms.clients))
        missing = []
        for round in range(max((*present, *noted), default=-1) + 1):
            # The journal has the sum of such a round, but not who is in it.
            if round not in present:
                raise ValueError(
                    f"round {round} crossed in another process, which knew who was missing; ask "
                    "that one, or begin with its rounds"
                )
            missing.append(tuple(sorted(clients - set(present[round]))))
        return tuple(missing)

    def _nothing(self) -> _Sum:
        """A round without a sum, which changes no model."""
        return np.zeros(self.terms.length, np.uint32), np.float32(0)

    def _checked(self, message: Any) -> Int64[np.ndarray, "n K"]:
        """The rows, modulo 2^bits."""
        expected = f"uint32{[self.terms.clients, self.terms.length]}"
        kind = type(message).__name__
        if isinstance(message, np.ndarray):
            kind = f"{message.dtype}{list(message.shape)}"
        if kind != expected:
            raise ValueError(
                f"message is {kind}; give whole numbers, {expected}, as dp.noise.Discrete makes "
                "them, and terms for as many clients and entries"
            )
        return (message & 2**self.terms.bits - 1).astype(np.int64)


def terms_of(
    code: SumCode,
    *,
    colluders: int,
    dropouts: int = 0,
    adversary: Literal["semi_honest", "semi_malicious"] = "semi_honest",
    kind: type[_TermsT] = Terms,  # type: ignore[assignment]
) -> _TermsT:
    """Return the terms of sums of a code, modulo as many bits as they take.

    Args:
        code: What all agree on; of a plan, ``plan.noise.code``.
        colluders: Clients whose knowledge the server may have, at least as many as the plan's noise
            is for; no default, since with fewer a single client's message may be opened.
        dropouts: Clients that may be missing, at most as many as the plan's noise is for.
        adversary: As of `Terms`.
        kind: The class of the terms.

    Raises:
        ValueError: As `Terms`.

    Example:
        >>> from dpjax.encoding.lattice import SumCode
        >>> from dpjax.secagg import transport
        >>> code = SumCode(size=100, bound=1.0, grid=1 / 64, clients=50, variance=4)
        >>> terms = transport.terms_of(code, dropouts=2, colluders=1)
        >>> terms.length, terms.bits == code.bits, terms.minimum, terms.colluders
        (128, True, 48, 1)
    """

    def fraction(name: str, count: int) -> float:
        count = _validate.integer(name, count, minimum=0)
        if not count:
            return 0.0
        # Half a client more: fractions of whole numbers are rounded down, and floats are not exact.
        return (count + 0.5) / code.clients

    dropout = fraction("dropout", dropouts)
    corrupt = fraction("corrupt", colluders)
    return kind(code.clients, code.padded, code.bits, None, corrupt, dropout, adversary)


_DIGEST = b', "digest": "'


class _Asked(NamedTuple):
    """A round that was asked for.

    Attributes:
        message: Digest of its message; "" where that is not known.
        values: Its sum; None where it is unknown.
        present: How many it is of.
    """

    message: str
    values: _Values | None = None
    present: int = 0


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
        rounds: What the file holds, by round.

    Raises:
        ValueError: For a place that cannot be written or that is in use, and a file of something
            else.
    """

    def __init__(self, path: _files.PathLike, terms: bytes) -> None:
        if not isinstance(path, str | os.PathLike) or not str(path).strip():
            raise _validate.refusal("journal", path, "name a file, or None")
        self.path = Path(path)
        self.rounds: dict[int, _Asked] = {}
        self._terms = terms.hex()
        # Lines that were read or written, where they end, and the last one's digest.
        self._lines = 0
        self._end = 0
        self._digest = ""
        # Whether a line was cut short before its round's number.
        self._torn = False
        # Another object may make the file at the same time: the first one's terms stay.
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

    def read(self) -> dict[int, _Asked]:
        """Read what was written since, by whomever, and return all rounds.

        Raises:
            ValueError: Where the file is damaged, or not locked any more.
        """
        self._lock.check()
        with self._opened() as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(self._end)
            *lines, torn = file.read().split(b"\n")
        # Others only append: a shorter file is another one.
        if length < self._end:
            raise self._damaged(self._lines)
        for line in lines:
            self._take(line)
        if torn and self._lines:
            number = re.match(rb'\{"round": (\d{1,9}), ', torn)
            self._torn = number is None
            if number is not None:
                # The kill may have come after the message went out: its round is spent.
                round = int(number[1])
                message = self.rounds[round].message if round in self.rounds else ""
                self._ask(round, message)
        return self.rounds

    def ask(self, round: int, message: str) -> bool:
        """Note that a round's message is about to go out.

        Args:
            round: Rounds before it.
            message: Its digest.

        Returns:
            Whether it may; not where the file's last line may have been of this round.
        """
        torn = self._torn
        self._ask(round, message)
        return not torn

    def _ask(self, round: int, message: str) -> None:
        self.rounds[round] = _Asked(message)
        self._append({"round": round, "message": message})

    def opened(self, round: int, values: _Values, present: int) -> None:
        """Note a round's sum.

        Args:
            round: As it was asked for.
            values: Modulo 2^b.
            present: How many it is of.
        """
        self.read()
        self.rounds[round] = _Asked(self.rounds[round].message, values, present)
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
        # The first line has the terms alone.
        round = note.get("round")
        if "message" in note:
            self.rounds[round] = _Asked(note["message"])
        elif "sum" in note:
            values = np.frombuffer(base64.b64decode(note["sum"]), "<u4").astype(np.uint32)
            self.rounds[round] = _Asked(self.rounds[round].message, values, note["present"])
        self._went(line + b"\n")

    def _append(self, note: dict[str, Any]) -> None:
        line = self._line(note)
        with self._opened() as file:
            # Over what was cut short, which stays until this line is there.
            file.seek(self._end)
            file.write(line)
            file.truncate()
            file.flush()
            # Noted on the disk before anything goes out: a power cut must not forget a round.
            os.fsync(file.fileno())
        self._torn = False
        self._went(line)

    def _line(self, note: dict[str, Any]) -> bytes:
        """A note with the digest of itself and of the line before it."""
        body = json.dumps(note).encode()[:-1]
        return body + _DIGEST + f'{_chained(self._digest, body)}"}}\n'.encode()

    def _went(self, line: bytes) -> None:
        """Go on behind a line."""
        self._digest = line.rpartition(_DIGEST)[2][: -len(b'"}\n')].decode()
        self._end += len(line)
        self._lines += 1

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
