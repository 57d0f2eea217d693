"""Secure sums over a channel: the server's end, the clients' ends, and all of them in one process.

    server                                  client
                                       <-   a word: it waits for an aggregation
    messages of `dpjax.secagg.messages`, of one aggregation
    the sum, or why there is none      ->
                                       <-   a word: it has read this

A session may serve one aggregation after another. A client is its name in the roster, and is in an
aggregation once. When its session ends it has left that one; when the session with the server ends,
so does the client. A stage ends when every client has answered, or at its time limit.
"""

import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any, Self

import numpy as np

from dpjax.secagg import local
from dpjax.secagg.client import Client, reply, total_of
from dpjax.secagg.messages import Closed, Keys, ProtocolMessage, decoded, encoded
from dpjax.secagg.server import SumServer, Total
from dpjax.secagg.terms import Abort, Limits, Rejected, Terms
from dpjax.sites.carrier import GrpcChannel
from dpjax.sites.channel import Channel, ChannelLimits, Event
from dpjax.sites.identity import Authority, Identity, Roster, request

__all__ = ["Collector", "channel_limits", "join", "member", "over_channel"]

_WAITS = b"waits"
_HEARD = b"heard"
"""A client's words beside the protocol's messages, which begin with other bytes."""
_MOST_MISPLACED = 8
_ENVELOPE = 2**14
"""Bytes of a message beside its vector, keys and shares."""


def channel_limits(terms: Terms) -> ChannelLimits:
    """Return what bounds the sessions of a channel that carries sums.

    Args:
        terms: What all parties agreed on.

    Example:
        >>> from dpjax.secagg.terms import Terms
        >>> from dpjax.sites import sums
        >>> terms = Terms(clients=4, length=1000, bits=32, bound=9, corrupt=0, dropout=0)
        >>> 4000 < sums.channel_limits(terms).message_bytes < 30_000
        True
    """
    # Where fewer enrol the graph may need more neighbours of each.
    neighbours = min(terms.clients, terms.graph(terms.clients).degree + 1)
    numbers = 4 * 128 * neighbours + 2 * terms.clients
    return ChannelLimits(_ENVELOPE + terms.vector_bytes() + numbers)


def _open(terms: Terms, channel: Channel, part: str, other: str) -> None:
    """Open a channel as one part, between which and the other one these terms are the same."""

    def greeting(end: str) -> bytes:
        return f"{end} of secure sums 1 with terms {terms.digest().hex()}".encode()

    def check(peer: str, theirs: bytes) -> str | None:
        expected = greeting(other)
        if theirs == expected:
            return None
        said = theirs.decode(errors="replace")
        return f"{peer} is the {said[:51]}, not the {expected.decode()[:51]}; give the same terms"

    channel.open(lambda peer: greeting(part), check)


class Collector:
    """The server's end: it holds one aggregation after another, over the same sessions.

    Guarantee: that of `dpjax.secagg.server.SumServer`. Whatever clients send or leave out, an
    aggregation ends within its time limits, in the exact sum of the survivors or in `Abort`. A
    client is in an aggregation once, by its name, whatever sessions it has. None keeps others from
    being heard.

    Args:
        terms: What all parties agreed on.
        channel: Whose peers are the clients. It is opened by a ``with`` block, and closed at its
            end, once clients have read the last sum or had ``limits.send`` for it.
        limits: Time limits.

    Attributes:
        missing: Peers that had not spoken when the last stage ended.

    Example:
        >>> from dpjax.secagg.terms import Terms
        >>> from dpjax.sites import sums
        >>> from dpjax.sites.channel import Channel
        >>> def serve(terms: Terms, channel: Channel) -> None:
        ...     with sums.Collector(terms, channel) as collector:
        ...         print(collector.aggregate().values)
    """

    def __init__(self, terms: Terms, channel: Channel, limits: Limits | None = None) -> None:
        self.terms = terms
        self.limits = limits or Limits()
        self.missing: list[str] = []
        self._channel = channel
        # Clients that wait for an aggregation, and those that have yet to read the last word.
        self._waiting: set[str] = set()
        self._unread: set[str] = set()
        # Of this aggregation: numbers by name, and how often each broke a rule.
        self._numbers: dict[str, int] = {}
        self._faults: Counter[int] = Counter()

    def __enter__(self) -> Self:
        """Open the channel."""
        _open(self.terms, self._channel, "server", "client")
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the channel, after a sum once clients have read it."""
        deadline = monotonic() + self.limits.send
        while self._unread and exception[0] is None and monotonic() < deadline:
            event = self._channel.receive(max(0.0, deadline - monotonic()))
            if event is not None:
                self._unread.discard(event.peer)
        self._channel.close()

    def aggregate(self) -> Total:
        """Hold one aggregation and return its sum.

        Raises:
            Abort: Where there is none, with the reason.
        """
        server = SumServer(self.terms)
        self._numbers = {}
        self._faults = Counter()
        try:
            self._listen(server, self.limits.enrol)
            for end in server.ends:
                names = list(self._numbers)
                for number, message in end().items():
                    self._tell(server, names[number], message)
                self._listen(server, self.limits.stage)
            total = server.total()
            self._close(server.closed(total))
            return total
        except Abort as abort:
            self._close(server.closed(None, abort.reason))
            raise

    def _listen(self, server: SumServer, seconds: float) -> None:
        """Hear until everybody has spoken, or for the time limit; the channel gives turns."""
        deadline = monotonic() + seconds
        while not server.ready and monotonic() < deadline:
            if server.stage == "enrol":
                for name in self._waiting - self._numbers.keys():
                    self._waiting.discard(name)
                    self._tell(server, name, server.hello)
            event = self._channel.receive(max(0.0, deadline - monotonic()))
            if event is not None:
                self._take(server, event)
        names = self._channel.statistics()
        self.missing = [name for name in names if self._numbers.get(name) not in server.came]

    def _take(self, server: SumServer, event: Event) -> None:
        """Take an event: a few messages that do not belong are passed over, what is none ends."""
        name = event.peer
        number = self._numbers.get(name, -1)
        self._unread.discard(name)
        if event.kind == "closed":
            self._waiting.discard(name)
            self._blame(server, number, _MOST_MISPLACED)
        elif event.data == _WAITS:
            self._waiting.add(name)
        elif event.data not in (b"", _HEARD) and self._faults[number] < _MOST_MISPLACED:
            fault = _MOST_MISPLACED
            try:
                message = decoded(event.data)
                # A late message is no fault of the client's, many are.
                fault = 1
                if number >= 0:
                    server.accept(number, message)
                elif isinstance(message, Keys):
                    self._enrol(server, name, message)
            except Rejected:
                self._blame(server, number, fault)

    def _enrol(self, server: SumServer, name: str, keys: Keys) -> None:
        """Take a client in, or tell it why not: it waits for an answer."""
        try:
            self._numbers[name] = server.enrol(keys)
        except Rejected as error:
            self._tell(server, name, server.closed(None, str(error)))

    def _blame(self, server: SumServer, number: int, faults: int) -> None:
        """Count faults of a client that has enrolled; after so many it has left."""
        if number >= 0:
            self._faults[number] += faults
            if self._faults[number] >= _MOST_MISPLACED:
                server.leave(number)

    def _tell(self, server: SumServer, name: str, message: ProtocolMessage) -> None:
        """Send a message to a client; it has left if it has not taken the one before."""
        if not self._channel.send(name, encoded(message)) and name in self._numbers:
            server.leave(self._numbers[name])

    def _close(self, last: Closed) -> None:
        """Tell all that have not left the last word."""
        # It becomes bytes once.
        data = encoded(last)
        for name, number in self._numbers.items():
            if self._faults[number] < _MOST_MISPLACED and self._channel.send(name, data):
                self._unread.add(name)


@contextmanager
def member(
    terms: Terms, channel: Channel, server: str, limits: Limits | None = None
) -> Iterator[Callable[[Any], Total]]:
    """Give what takes part in one aggregation after another, over the same session.

    Guarantee: that of `join`, of which each call is one. After a failure the channel is closed.

    Args:
        terms: What all parties agreed on.
        channel: Which has the server as its peer; it is opened, and closed at the end.
        server: The server's name.
        limits: Time limits.

    Example:
        >>> import numpy as np
        >>> from dpjax.secagg.terms import Terms
        >>> from dpjax.sites import sums
        >>> from dpjax.sites.channel import Channel
        >>> def add(terms: Terms, rows: np.ndarray, channel: Channel) -> None:
        ...     with sums.member(terms, channel, "server") as add:
        ...         for row in rows:
        ...             print(add(row))
    """
    _open(terms, channel, "client", "server")
    try:
        yield lambda values: take_part(Client(terms, values), channel, server, limits or Limits())
    finally:
        channel.close()


def take_part(
    client: Client, channel: Channel, server: str, limits: Limits, answers: int = 6
) -> Total:
    """Answer a server until its last word, or so many times: then the client has left.

    Args:
        client: The client.
        channel: Which is open; after any failure it is closed, so that the server does not wait.
        server: The server's name.
        limits: Time limits.
        answers: How many messages it answers; there are at most six, with the last one.

    Raises:
        Abort: As `join`, and where the client has left.
    """
    deadline = monotonic() + limits.total
    try:
        _say(client, channel, server, _WAITS, limits.enrol)
        while answers > 0:
            event = channel.receive(max(0.0, deadline - monotonic()))
            if event is None or monotonic() > deadline:
                client.end(f"no sum within {limits.total:g} seconds")
            if event.peer != server or event.kind in ("opened", "absent"):
                continue
            if event.kind != "message":
                client.end(f"{server} ended the session ({event.reason})")
            message = decoded(event.data)
            if isinstance(message, Closed):
                channel.send(server, _HEARD)
                return total_of(client, message)
            _say(client, channel, server, encoded(reply(client, message)), limits.send)
            answers -= 1
        client.end("it has left")
    except Rejected as error:
        channel.close()
        client.end(str(error))
    except BaseException:
        # The server sees at once that this client has left.
        channel.close()
        raise


def _say(client: Client, channel: Channel, server: str, data: bytes, seconds: float) -> None:
    """Hand a word to the server, which waits for it, or end where it is not taken in time."""
    deadline = monotonic() + seconds
    while not channel.send(server, data):
        event = channel.receive(max(0.0, min(0.1, deadline - monotonic())))
        if event is not None and event.kind not in ("opened", "absent"):
            cause = "ended the session" if event.kind == "closed" else "took no message"
            client.end(f"{server} {cause} ({event.reason})")
        if monotonic() > deadline:
            client.end(f"no session with {server} within {seconds:g} seconds")


def join(
    terms: Terms, values: Any, channel: Channel, server: str, limits: Limits | None = None
) -> Total:
    """Take part in one aggregation with a vector, and return the sum as the server tells it.

    Guarantee: that of `dpjax.secagg.client.Client`: the vector leaves under masks or not at all.
    The server is the one whose key the channel's roster pins. Nothing checks that its sum is true.

    Args:
        terms: What all parties agreed on.
        values: [length] whole numbers from -bound to bound.
        channel: Which has the server as its peer; it is opened, and closed at the end.
        server: The server's name.
        limits: Time limits; in all it waits for no longer than every stage may last.

    Returns:
        The sum and its survivors.

    Raises:
        Abort: Where there is no sum, with the reason; its ``exposed`` says whether the vector had
            gone out.
        ValueError: For values that the terms do not hold.

    Example:
        >>> import numpy as np
        >>> from dpjax.secagg.terms import Terms
        >>> from dpjax.sites import sums
        >>> from dpjax.sites.channel import Channel
        >>> def take_part(terms: Terms, channel: Channel) -> list[int]:
        ...     return sums.join(terms, np.array([1, 2]), channel, "server").values.tolist()
    """
    # What the terms do not hold is refused before anything is sent.
    client = Client(terms, values)
    with member(terms, channel, server):
        return take_part(client, channel, server, limits or Limits())


def over_channel(
    terms: Terms,
    rows: np.ndarray,
    leaves: local.Leaves = None,
    *,
    limits: Limits | None = None,
) -> local.Carried:
    """Return the sum of rows by the protocol, over a channel on this machine.

    Every party has a key and a certificate of an authority, which a process makes once for so many
    parties. Where clients leave in the stage "enrol", the server waits as long as the limits say.

    Args:
        terms: What all parties agreed on.
        rows: [n, length] whole numbers, a row a client.
        leaves: The stage in which a client leaves, by its row; nobody does if None.
        limits: Time limits.

    Returns:
        The sum, and bytes of messages.

    Raises:
        Abort: Where there is no sum.
        ValueError: For rows that the terms do not hold, stages that are none, and without the
            extra ``sites``.

    Example:
        >>> import numpy as np
        >>> from dpjax.secagg.terms import Terms
        >>> from dpjax.sites import sums
        >>> terms = Terms(clients=4, length=2, bits=32, bound=9, corrupt=0, dropout=0.25)
        >>> sums.over_channel(terms, np.ones((4, 2), int)).total.values.tolist()
        [4, 4]
    """
    clients, stays = local.parties(terms, rows, leaves)
    limits = limits or Limits()
    bounds = channel_limits(terms)
    server, *members = _identities(1 + max(1, len(clients)))
    roster = Roster({party.name: party.public_key for party in (server, *members)})
    callers = dict.fromkeys(list(roster)[1:])
    listener = GrpcChannel(server, roster, callers, "127.0.0.1:0", bounds)

    def join_and_leave(row: int) -> None:
        peers = {server.name: f"127.0.0.1:{listener.port}"}
        channel = GrpcChannel(members[row], roster, peers, None, bounds)
        # Who stays for all stages reads the last word, too.
        answers = stays[row] + (stays[row] == len(terms.stages))
        with member(terms, channel, server.name):
            take_part(clients[row], channel, server.name, limits, answers)

    # A client waits in a thread of its own, at most until the server has closed its channel.
    with (
        ThreadPoolExecutor(len(members)) as pool,
        Collector(terms, listener, limits) as collector,
    ):
        # A client that leaves in the first stage never connects.
        for row, stages in enumerate(stays):
            if stages:
                pool.submit(join_and_leave, row)
        # To shake hands takes none of the time to enrol.
        deadline = monotonic() + limits.total
        sessions = sum(stages > 0 for stages in stays)
        while (
            sum(part.sessions for part in listener.statistics().values()) < sessions
            and monotonic() < deadline
        ):
            sleep(0.01)
        total = collector.aggregate()
    traffic = listener.statistics().values()
    received = sum(part.received for part in traffic)
    sent = sum(part.sent for part in traffic)
    return local.Carried(local.by_row(total, clients), received, sent)


@functools.cache
def _identities(parties: int) -> list[Identity]:
    """Identities for a trial: the server's, then those of clients, in files that do not stay."""
    identities = []
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(folder)
        root = authority.certificate
        for number in range(parties):
            name = f"client-{number}" if number else "server"
            key, demand = request(name, folder)
            certificate = authority.sign(demand)
            identity = Identity.load(name, certificate=certificate, key=key, authority=root)
            identities.append(identity)
    return identities
