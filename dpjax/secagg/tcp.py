"""Secure sums over TCP: a server and clients with a time limit on every stage.

A frame is the message's length in four bytes, 16 bytes of its SHA-256 digest, and the message. The
digest detects damage, not tampering. Without it a damaged vector would pass for another vector.

The terms bound a message and so a frame. A stage ends when every client has answered, or at its
time limit. A client that is silent, cut off, or sends no valid message has dropped out. The
connection itself is not encrypted and no client proves who it is: secrets cross sealed, and
clients are known by number.

`Listener.aggregate` and `join` are coroutines; a few hundred clients fit in one process.
"""

import asyncio
import contextlib
import hashlib
from asyncio import StreamReader, StreamWriter, timeout
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from dpjax import _files, _validate
from dpjax.secagg import primitives
from dpjax.secagg.client import Client
from dpjax.secagg.messages import (
    Closed,
    Confirmed,
    Delivery,
    Hello,
    Keys,
    ProtocolMessage,
    Request,
    Roster,
    decoded,
    encoded,
)
from dpjax.secagg.server import SumServer, Total, signed
from dpjax.secagg.terms import Abort, Rejected, Terms

__all__ = ["Limits", "Listener", "join"]

_DIGEST_BYTES = 16
# A frame's length, and the digest of its message.
_PREFIX_BYTES = 4 + _DIGEST_BYTES
_GREETING_BYTES = 1024
_MOST_MISPLACED = 8
_BROKEN = (OSError, EOFError, TimeoutError)


@dataclass(frozen=True)
class Limits:
    """How long anybody waits, in seconds.

    Attributes:
        enrol: For clients to enrol, from the start of an aggregation.
        stage: For each stage after it: three, or four under ``semi_malicious``.
        send: For one message to be taken by the other end, and for a client's first message, which
            enrols it.

    Example:
        >>> from dpjax.secagg import tcp
        >>> tcp.Limits(enrol=5.0, stage=10.0, send=1.0).total
        51.0
    """

    enrol: float = 60.0
    stage: float = 60.0
    send: float = 20.0

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        _validate.fields(self, _validate.positive, "enrol", "stage", "send")

    @property
    def total(self) -> float:
        """The longest that a client takes part: every stage there is, every message of it."""
        return self.enrol + 4 * self.stage + 6 * self.send


def _most_bytes(terms: Terms) -> int:
    """Return the longest frame that either end takes under these terms.

    Args:
        terms: Terms.
    """
    neighbours = 128 * min(terms.clients, terms.graph(terms.clients).degree + 1)
    # Where fewer enrol the graph may need more neighbours of each.
    return _GREETING_BYTES + terms.vector_bytes() + 4 * neighbours + 2 * terms.clients


async def read_frame(reader: StreamReader, limit: int) -> bytes:
    """Return the next frame.

    Args:
        reader: Stream.
        limit: Bytes that it may have.

    Raises:
        Rejected: For a longer one, before any of it is read, and one that was damaged.
        EOFError: Where the other end stopped.
    """
    prefix = await reader.readexactly(_PREFIX_BYTES)
    size = int.from_bytes(prefix[:-_DIGEST_BYTES], "big")
    # Before any of it is read: a length of four bytes may claim 4 GB.
    if size > limit:
        raise Rejected(f"frame of {size} bytes is longer than the {limit} that a message may have")
    data = await reader.readexactly(size)
    if framed(data)[:_PREFIX_BYTES] != prefix:
        raise Rejected("frame was damaged: its digest is another")
    return data


def framed(data: bytes) -> bytes:
    """Return a message with its length and digest before it.

    Args:
        data: An encoded message.
    """
    return len(data).to_bytes(4, "big") + hashlib.sha256(data).digest()[:_DIGEST_BYTES] + data


async def write_frame(writer: StreamWriter, data: bytes, seconds: float) -> int:
    """Send a frame and return its bytes.

    Args:
        writer: Stream.
        data: An encoded message.
        seconds: How long the other end may take.
    """
    writer.write(framed(data))
    async with timeout(seconds):
        await writer.drain()
    return _PREFIX_BYTES + len(data)


class Listener:
    """The server's end: it listens at a port and holds one aggregation after another.

    Guarantee: that of `dpjax.secagg.server.SumServer`. Whatever clients send or leave out, an
    aggregation ends within its time limits, in the exact sum of the survivors or in `Abort`.
    Enrolled clients are never displaced. Besides them twice as many connections as clients, and
    16, may be open; then a new one replaces the oldest.

    Args:
        terms: What all parties agreed on.
        host: Address to listen at; the local machine by default.
        port: TCP port; 0 takes a free one.
        limits: Time limits.

    Attributes:
        port: The port.
        received: Bytes that came from clients, over all aggregations.
        sent: Bytes that went to clients.

    Example:
        >>> import asyncio, numpy as np
        >>> from dpjax.secagg import tcp
        >>> from dpjax.secagg.terms import Terms
        >>> async def sum_of(rows):
        ...     terms = Terms(len(rows), len(rows[0]), bits=32, bound=100, corrupt=0, dropout=0)
        ...     async with tcp.Listener(terms) as listener:
        ...         address = "127.0.0.1", listener.port
        ...         clients = [tcp.join(terms, np.array(row), *address) for row in rows]
        ...         return (await asyncio.gather(listener.aggregate(), *clients))[0].values
        >>> asyncio.run(sum_of([[1, 2], [3, -4], [5, 6]]))
        array([9, 4])
    """

    def __init__(
        self,
        terms: Terms,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits | None = None,
    ) -> None:
        self.terms = terms
        self.limits = limits or Limits()
        self.host = host
        self.port = _validate.integer("port", port, minimum=0, maximum=65535)
        self.received = 0
        self.sent = 0
        self._limit = _most_bytes(terms)
        self._enrolling = asyncio.Event()
        self._changed = asyncio.Event()
        # The aggregation that each takes part in; None while it waits for one.
        self._connections: dict[asyncio.Task[None], SumServer | None] = {}
        # Not enrolled, the first one first.
        self._silent: dict[asyncio.Task[None], None] = {}
        self._writers: dict[int, StreamWriter] = {}
        self._server: SumServer | None = None
        self._socket: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        """Start listening."""
        # All clients may connect at once.
        backlog = min(4096, self.terms.clients + 16)
        try:
            self._socket = await asyncio.start_server(
                self._connected, self.host, self.port, backlog=backlog
            )
        except OSError as error:
            raise ValueError(
                f"port is {self.port} of {self.host}, where this process cannot listen "
                f"({_files.brief(error)}); give another, or 0 for a free one"
            ) from None
        self.port = self._socket.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Stop listening and cut all connections."""
        assert self._socket is not None
        self._socket.close()
        await self._cut(list(self._connections))
        await self._socket.wait_closed()

    async def aggregate(self) -> Total:
        """Hold one aggregation and return its sum.

        Raises:
            Abort: Where there is none, with the reason.
        """
        if self._server is not None:
            raise ValueError("aggregate is running; wait for it, or listen at another port")
        server = self._server = SumServer(self.terms)
        self._enrolling.set()
        last: Closed | None = None
        try:
            await self._wait(self.limits.enrol)
            self._enrolling.clear()
            for messages in server.ends:
                await self._send(messages())
                await self._wait(self.limits.stage)
            total = server.total()
            last = server.closed(total)
            return total
        except Abort as abort:
            last = server.closed(None, abort.reason)
            raise
        finally:
            self._enrolling.clear()
            if last is not None:
                await self._send(dict.fromkeys(self._writers, last))
            self._server = None
            self._writers = {}
            # A connection that waits for the next aggregation stays.
            ended = [task for task, part in self._connections.items() if part is server]
            await self._cut(ended)

    async def _wait(self, seconds: float) -> None:
        """Wait until everybody has spoken, or for the time limit."""
        server = self._server
        assert server is not None
        # At the limit the stage ends with what has come.
        with contextlib.suppress(TimeoutError):
            async with timeout(seconds):
                while not server.ready:
                    self._changed.clear()
                    await self._changed.wait()

    async def _send(self, messages: Mapping[int, ProtocolMessage]) -> None:
        """Send messages to clients by number; one that does not take it has left."""
        server = self._server
        assert server is not None

        async def deliver(number: int, data: bytes) -> None:
            writer = self._writers[number]
            try:
                self.sent += await write_frame(writer, data, self.limits.send)
            except _BROKEN:
                server.leave(number)
                writer.transport.abort()

        # Many get the same message: it becomes bytes once.
        frames = {id(message): message for message in messages.values()}
        data = {key: encoded(message) for key, message in frames.items()}
        async with asyncio.TaskGroup() as group:
            for number, message in messages.items():
                group.create_task(deliver(number, data[id(message)]))

    async def _cut(self, tasks: list[asyncio.Task[None]]) -> None:
        """End connections."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: StreamReader, writer: StreamWriter) -> None:
        """One client's connection, from its first byte to its last."""
        task = asyncio.current_task()
        assert task is not None
        number = None
        server = None
        try:
            # Whoever connects and says nothing must not keep others out.
            if len(self._silent) >= 2 * self.terms.clients + 16:
                oldest = next(iter(self._silent))
                del self._silent[oldest]
                oldest.cancel()
            self._silent[task] = None
            self._connections[task] = None
            # No connection outlasts the longest aggregation.
            async with timeout(self.limits.total):
                await self._enrolling.wait()
                server = self._connections[task] = self._server
                assert server is not None
                number = await self._enrol(server, reader, writer)
                self._silent.pop(task, None)
                await self._listen(server, number, reader)
        except (Rejected, *_BROKEN, asyncio.CancelledError):
            # Who breaks the rules, the connection or the time limit has left; a task that is
            # cancelled ends here as well, with nobody waiting for what it returns.
            pass
        finally:
            self._connections.pop(task, None)
            self._silent.pop(task, None)
            if number is not None and server is not None:
                server.leave(number)
                self._changed.set()
            await _closed(writer, self.limits.send)

    async def _enrol(self, server: SumServer, reader: StreamReader, writer: StreamWriter) -> int:
        """Greet a client and take in its keys; its number."""
        async with timeout(min(self.limits.enrol, self.limits.send)):
            self.sent += await write_frame(writer, encoded(server.hello), self.limits.send)
            data = await read_frame(reader, _GREETING_BYTES)
        self.received += _PREFIX_BYTES + len(data)
        keys = decoded(data)
        if not isinstance(keys, Keys):
            raise Rejected("the first message is no keys")
        number = server.enrol(keys)
        self._writers[number] = writer
        self._changed.set()
        return number

    async def _listen(self, server: SumServer, number: int, reader: StreamReader) -> None:
        """Hand on messages; a few that do not belong are passed over, what is none ends it."""
        misplaced = 0
        while misplaced < _MOST_MISPLACED:
            data = await read_frame(reader, self._limit)
            self.received += _PREFIX_BYTES + len(data)
            message = decoded(data)
            try:
                server.accept(number, message)
            except Rejected:
                # A late message is no fault of the client's, many are.
                misplaced += 1
            self._changed.set()


async def _closed(writer: StreamWriter, seconds: float) -> None:
    """Close a stream: politely within the time limit, else at once."""
    try:
        writer.close()
        async with timeout(seconds):
            await writer.wait_closed()
    except (*_BROKEN, asyncio.CancelledError):
        writer.transport.abort()


async def join(
    terms: Terms, values: Any, host: str, port: int, limits: Limits | None = None
) -> Total:
    """Take part in one aggregation with a vector, and return the sum as the server tells it.

    Guarantee: that of `dpjax.secagg.client.Client`: the vector leaves under masks or not at all.
    Nothing checks that the sum is true.

    Args:
        terms: What all parties agreed on.
        values: [length] whole numbers from -bound to bound.
        host: The server's.
        port: The server's, 1 to 65535.
        limits: Time limits; in all it waits for no longer than every stage may last.

    Returns:
        The sum and its survivors.

    Raises:
        Abort: Where there is no sum, with the reason; its ``exposed`` says whether the vector had
            gone out.
        ValueError: For values that the terms do not hold, and what is no port.

    Example:
        >>> import asyncio, numpy as np
        >>> from dpjax.secagg import tcp
        >>> from dpjax.secagg.terms import Terms
        >>> async def total_of(rows):
        ...     terms = Terms(len(rows), len(rows[0]), bits=32, bound=100, corrupt=0, dropout=0)
        ...     async with tcp.Listener(terms) as listener:
        ...         address = "127.0.0.1", listener.port
        ...         clients = [tcp.join(terms, np.array(row), *address) for row in rows]
        ...         return (await asyncio.gather(listener.aggregate(), *clients))[1]
        >>> asyncio.run(total_of([[1, 2], [3, -4], [5, 6]])).values.tolist()
        [9, 4]
    """
    limits = limits or Limits()
    port = _validate.integer("port", port, maximum=65535)
    client = Client(terms, values)
    try:
        total = await take_part(client, host, port, limits)
        assert total is not None
        return total
    except Rejected as error:
        reason = str(error)
    except TimeoutError:
        reason = f"no sum within {limits.total:g} seconds"
    except EOFError:
        reason = "the server ended the connection"
    except (OSError, UnicodeError) as error:
        # A host's name may be none.
        reason = f"no connection to {host}:{port} ({_files.brief(error)})"
    client.end(reason)


async def take_part(
    client: Client, host: str, port: int, limits: Limits, answers: int | None = None
) -> Total | None:
    """Answer a server until its last word, or so many times: then the client has left.

    Args:
        client: The client.
        host: The server's.
        port: The server's.
        limits: Time limits.
        answers: How many; None is all.
    """
    writer = None
    try:
        async with timeout(limits.total):
            reader, writer = await asyncio.open_connection(host, port)
            while answers is None or answers > 0:
                message = decoded(await read_frame(reader, _most_bytes(client.terms)))
                if isinstance(message, Closed):
                    return _result(client, message)
                await write_frame(writer, encoded(reply(client, message)), limits.send)
                answers = None if answers is None else answers - 1
            return None
    finally:
        if writer is not None:
            await _closed(writer, limits.send)


def reply(client: Client, message: ProtocolMessage) -> ProtocolMessage:
    """Return what a client says to a message of the server.

    Args:
        client: The client.
        message: The message.

    Raises:
        Abort: If it says nothing.
    """
    answers: dict[type, Callable[[Any], ProtocolMessage]] = {
        Hello: client.greet,
        Roster: client.share,
        Delivery: client.mask,
        Request: client.confirm if "confirm" in client.terms.stages else client.unmask,
        Confirmed: client.unmask,
    }
    kind = type(message)
    if kind not in answers:
        client.end(f"the server sent {kind.__name__}, which is a client's to send")
    return answers[kind](message)


def _result(client: Client, closed: Closed) -> Total:
    """The sum as the server tells it; else the client ends."""
    terms = client.terms
    if closed.nonce != client.nonce:
        client.end("the last message is of another aggregation")
    if closed.reason or len(closed.survivors) < terms.minimum:
        client.end(f"the server ended the aggregation: {closed.reason or 'too few survivors'}")
    try:
        residues = primitives.unpacked_vector(closed.total, terms.length, terms.bits)
    except ValueError as error:
        client.end(f"the sum is none: {error}")
    return Total(signed(residues, terms.bits), tuple(sorted(closed.survivors)))
