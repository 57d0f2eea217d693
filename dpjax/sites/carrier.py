"""Sessions over gRPC, with certificates at both ends: the carrier of `dpjax.sites.channel`.

One bidirectional stream is a session. Its frames are bytes: a letter for the kind, then a part of
the hello, a piece of a message, or the reason of a refusal. An empty frame says that its sender is
alive. On a slow link a long message arrives in pieces, so that nobody takes its sender for dead.

Threads: a session has a reader here, and a writer of gRPC's that takes what `_Session.outgoing`
yields. One thread more watches the clock. One lock guards all of it. A process that has opened a
channel must not fork.
"""

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import TYPE_CHECKING

from dpjax import _validate
from dpjax.sites.channel import ChannelLimits, Event, Hello, Kind, Traffic, fingerprint
from dpjax.sites.identity import Identity, Refused, Roster, check_certificate

if TYPE_CHECKING:
    import grpc

__all__ = ["GrpcChannel"]

_LOG = logging.getLogger("dpjax.sites")
_SERVICE = "dpjax.sites"
_METHOD = "session"
_HELLO = b"h"
_PIECE = b"p"
"""Of a message: there is more of it."""
_MESSAGE = b"m"
"""The last piece of a message."""
_REFUSAL = b"r"
_PIECE_BYTES = 2**18
"""Of a frame: what a slow link carries in less than a second."""
_FRAMES = 4
"""Messages of a peer that wait to be sent, and that wait to be received."""
_EVENTS = 64
"""Events of a peer that wait to be received: one that comes and goes fills no memory."""
_STREAMS = 3
"""Streams of one name: its session, the one that replaces it, and one to spare."""
_SPARE_WORKERS = 8
"""Threads for streams that are refused at once."""
_LINGER = 0.5
"""Seconds that a stream has to end by itself, so that the other end reads why."""
_FIRST_WAIT = 0.2
_QUIET = 60.0
"""Seconds in which a refusal is not repeated."""
_REASONS = 16
"""Different refusals of a peer that are told in that time."""
_LOOPBACK = ("127.0.0.1", "[::1]", "localhost")
_REMEDIES = {
    "Socket closed": "it stopped, or refuses this site's certificate: its standard error says why",
    "andshake failed": "compare authorities, and both clocks",
    "erification": "another site answers at this address",
}
"""What gRPC says where a connection was refused, and what to do."""


@dataclass
class _Peer:
    """What is known of a neighbour; of those without a name, one for all."""

    name: str
    session: "_Session | None" = None
    inbox: deque[Event] = field(default_factory=deque)
    reported: dict[str, float] = field(default_factory=dict)
    sent: int = 0
    received: int = 0
    sessions: int = 0
    heard: float = -float("inf")


class _Session:
    """One stream. The channel's lock guards its fields."""

    def __init__(self, lock: threading.RLock, peer: _Peer, seconds: float) -> None:
        self.changed = threading.Condition(lock)
        self.peer = peer
        self.outbox: deque[bytes] = deque()
        self.heard = monotonic()  # Infinite while its reader waits for room.
        self.deadline = self.heard + seconds
        self.cancel: Callable[[], object] = lambda: None
        self.is_open = False
        self.is_over = False

    def put(self, *frames: bytes) -> None:
        """Add frames to what goes out."""
        with self.changed:
            self.outbox.extend(frames)
            self.changed.notify_all()

    def outgoing(self, beat: float) -> Iterator[bytes]:
        """What goes out, until the session is over; something at least every so many seconds."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.outbox or self.is_over, beat)
                if self.is_over and not self.outbox:
                    return
                frame = self.outbox.popleft() if self.outbox else b""
            yield frame


class GrpcChannel:
    """A `dpjax.sites.channel.Channel` over gRPC.

    Guarantee: a session is with the site whose key the roster pins for its name, over TLS with
    certificates of both ends, and there is one at most. A refusal is an event at both ends, and a
    warning of the logger ``dpjax.sites``; who has no certificate of the authority is refused by
    TLS, which says so in gRPC's log on standard error and at the end that dials. Without
    certificates nothing listens or dials, unless ``insecure_loopback`` is given: then all
    addresses are of this machine, and names are proved by signatures alone. A peer that floods is
    slowed down, one that stalls is cut off, and neither keeps others waiting.

    Args:
        identity: This site.
        roster: All sites' names and keys. Of two neighbours the later one dials.
        peers: The neighbours, by name "host:port", or None for those that dial.
        listen: "host:port" to listen at; port 0 takes a free one. Unused where all peers are
            dialled.
        limits: Bounds.
        departed: Names that are refused.
        reload: Returns the identity as it is on disk now, for every connection; a certificate is
            renewed without a restart. None keeps ``identity``.
        insecure_loopback: No TLS, for trials on one machine.

    Attributes:
        insecure: Whether there is no TLS.
        port: Where it listens; None before `open`, and where it does not.

    Raises:
        ValueError: For names that are not in the roster, missing and other addresses, and without
            the extra ``sites``; from `open`, for an address that is taken.

    Example:
        >>> from dpjax.sites.carrier import GrpcChannel
        >>> from dpjax.sites.channel import ChannelLimits
        >>> from dpjax.sites.identity import Authority, Identity, Roster, request
        >>> authority = Authority("trial")
        >>> def identity(name):
        ...     key, demand = request(name, "sites")
        ...     return Identity.load(name, certificate=authority.sign(demand), key=key,
        ...                          authority=authority.certificate)
        >>> lyon, paris = identity("lyon"), identity("paris")
        >>> roster = Roster({"lyon": lyon.public_key, "paris": paris.public_key})
        >>> hello = lambda peer: b"", lambda peer, theirs: None
        >>> one = GrpcChannel(lyon, roster, {"paris": None}, "127.0.0.1:0", ChannelLimits(1000))
        >>> one.open(*hello)
        >>> address = f"127.0.0.1:{one.port}"
        >>> other = GrpcChannel(paris, roster, {"lyon": address}, None, ChannelLimits(1000))
        >>> other.open(*hello)
        >>> one.receive(30).kind, one.send("paris", b"numbers")
        ('opened', True)
        >>> other.receive(30).kind, other.receive(30).data
        ('opened', b'numbers')
        >>> one.close(), other.close()
        (None, None)
    """

    def __init__(
        self,
        identity: Identity,
        roster: Roster,
        peers: Mapping[str, str | None],
        listen: str | None,
        limits: ChannelLimits,
        departed: AbstractSet[str] = frozenset(),
        reload: Callable[[], Identity] | None = None,
        *,
        insecure_loopback: bool = False,
    ) -> None:
        _check_library()
        self.insecure = _validate.flag("insecure_loopback", insecure_loopback)
        self.port: int | None = None
        order = list(roster)
        _validate.one_of("identity's name", identity.name, order)
        for name in peers:
            _validate.one_of("peers", name, [other for other in order if other != identity.name])
        if identity.public_key not in roster.accepted(identity.name):
            raise ValueError(f"identity has another key than the roster for {identity.name}")
        # gRPC would trust the system's authorities in place of none.
        if not self.insecure and not (identity.certificate_chain and identity.authority):
            raise ValueError("identity has no certificates; give them, nothing is sent without")
        place = order.index(identity.name)
        self._callers = [name for name in peers if order.index(name) > place]
        self._addresses = {
            name: self._address(f"address of {name}", address)
            for name, address in peers.items()
            if name not in self._callers
        }
        self._listen = self._address("listen", listen) if self._callers else ""
        self._identity = identity
        self._served = identity
        self._roster = roster
        self._limits = limits
        self._departed = set(departed)
        self._reload = reload
        self._beat = limits.keepalive / 3
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        self._stopped = threading.Event()
        self._peers = {name: _Peer(name) for name in peers}
        self._stranger = _Peer("")
        self._ready: deque[_Peer] = deque()  # With events, in turn.
        self._sessions: list[_Session] = []
        self._server: grpc.Server | None = None

    def open(
        self, greeting: Callable[[str], bytes], check: Callable[[str, bytes], str | None]
    ) -> None:
        """Listen and dial; see `dpjax.sites.channel.Channel`.

        Args:
            greeting: What this end says to a peer in its hello, at most 60,000 bytes.
            check: A reason to refuse a peer by what it says, or None.

        Raises:
            ValueError: For an address where this process cannot listen.
        """
        self._greeting = greeting
        self._check = check
        if self._callers:
            self._serve()
        self._start(self._watch)
        for name in self._addresses:
            self._start(self._dial, name)

    def send(self, peer: str, data: bytes) -> bool:
        """Hand a message to a peer's session, and return at once.

        Args:
            peer: Name.
            data: The message: at least a byte, and as many as `ChannelLimits` allow.

        Returns:
            Whether the session took it. False where there is none, or where it has not sent what
            it took before.

        Raises:
            ValueError: For another name, and messages of other lengths.
        """
        _validate.one_of("peer", peer, self._peers)
        _validate.integer("bytes of data", len(data), maximum=self._limits.message_bytes)
        starts = range(0, len(data), _PIECE_BYTES)
        pieces = [_PIECE + data[start : start + _PIECE_BYTES] for start in starts]
        pieces[-1] = _MESSAGE + pieces[-1][1:]
        neighbour = self._peers[peer]
        with self._lock:
            session = neighbour.session
            if session is None or not session.is_open or len(session.outbox) >= _FRAMES:
                return False
            session.put(*pieces)
            neighbour.sent += len(data)
            return True

    def receive(self, seconds: float) -> Event | None:
        """Return the next event, of the peers in turn; None after so many seconds.

        Args:
            seconds: At least 0.
        """
        with self._arrived:
            self._arrived.wait_for(lambda: self._ready or self._stopped.is_set(), seconds)
            if not self._ready:
                return None
            peer = self._ready.popleft()
            event = peer.inbox.popleft()
            if peer.inbox:
                self._ready.append(peer)
            if peer.session is not None:
                peer.session.changed.notify_all()
            return event

    def depart(self, name: str) -> None:
        """Refuse a name from now on, and end its session.

        Args:
            name: The site that left.
        """
        with self._lock:
            self._departed.add(name)
            for session in self._sessions:
                if session.peer.name == name:
                    self._refuse(session, f"{name} has left this run")

    def renew(self, roster: Roster) -> None:
        """Accept renewed keys in hellos from now on.

        Args:
            roster: The one before, with renewals.

        Raises:
            ValueError: For another one.
        """
        if roster.digest != self._roster.digest:
            raise _validate.refusal("roster", roster, "give the one before, with renewals")
        self._roster = roster

    def statistics(self) -> dict[str, Traffic]:
        """Return what went between this site and every peer."""
        now = monotonic()
        return {
            name: Traffic(peer.sent, peer.received, peer.sessions, now - peer.heard)
            for name, peer in self._peers.items()
        }

    def close(self) -> None:
        """End all sessions within two seconds; what was handed over goes out if peers take it."""
        with self._arrived:
            self._stopped.set()
            for session in self._sessions:
                self._end(session, "this site closed the channel")
            self._arrived.notify_all()
            # The watch ends those that do not end by themselves.
            self._arrived.wait_for(lambda: not self._sessions, 2 * _LINGER)
        if self._server is not None:
            self._server.stop(None).wait(_LINGER)
            self._pool.shutdown(wait=False)

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        """Run something in a thread of this channel, which ends when the channel is closed."""
        threading.Thread(target=run, args=arguments, name="dpjax.sites", daemon=True).start()

    def _watch(self) -> None:
        """End sessions that are silent, that do not end, and those whose hello does not."""
        hello = self._limits.hello
        silence = self._limits.keepalive
        while self._sessions or not self._stopped.is_set():
            sleep(min(0.1, hello / 4, silence / 4))
            now = monotonic()
            for session in list(self._sessions):
                is_late = now > session.deadline
                if session.is_over and is_late:
                    session.cancel()
                elif is_late and not session.is_open:
                    self._refuse(session, f"the hello took more than {hello:g} seconds")
                elif session.is_open and now > session.heard + silence:
                    self._end(session, f"nothing was heard for {silence:g} seconds")

    def _converse(self, session: _Session, frames: Iterator[bytes], hello: Hello) -> None:
        """Read a session, from its hello to its end."""
        import grpc

        try:
            hello.exchange(
                lambda part: session.put(_HELLO + part),
                lambda: self._next(session, frames, _HELLO)[1:],
                lambda name: self._admit(session, self._peers[name]),
            )
            with self._lock:
                if not session.is_over:
                    session.is_open = True
                    session.peer.sessions += 1
                    self._add(session.peer, "opened")
            while not session.is_over:
                self._store(session, self._message(session, frames))
        except ConnectionRefusedError as error:
            self._end(session, str(error), is_refusal=True)
        except ConnectionError as error:
            self._end(session, str(error))
        except Refused as error:
            self._refuse(session, str(error))
        except Exception as error:  # What greets and checks is the caller's.
            self._refuse(
                session, f"the hello failed at {self._identity.name}: {type(error).__name__}"
            )
        finally:
            # Until the other end has read why; the watch ends it otherwise.
            with suppress(grpc.RpcError):
                deque(frames, 0)
            with self._arrived:
                self._sessions.remove(session)
                self._arrived.notify_all()

    def _message(self, session: _Session, frames: Iterator[bytes]) -> bytes:
        """The next message, of all its pieces."""
        data = bytearray()
        frame = _PIECE
        while frame.startswith(_PIECE):
            frame = self._next(session, frames, _PIECE + _MESSAGE)
            data += frame[1:]
            if len(data) > self._limits.message_bytes:
                limit = self._limits.message_bytes
                raise Refused(f"{session.peer.name} sent a message of more than {limit:,} bytes")
        return bytes(data)

    def _next(self, session: _Session, frames: Iterator[bytes], kinds: bytes) -> bytes:
        """The next frame.

        Raises:
            Refused: For frames that do not belong here.
            ConnectionRefusedError: Where the other end refused.
            ConnectionResetError: Where the session is over.
        """
        frame = b""
        while not frame:
            frame = _frame(frames)
            session.heard = monotonic()
            session.peer.heard = session.heard
            session.peer.received += len(frame)
        if frame.startswith(_REFUSAL):
            text = f"{session.peer.name} refuses: {frame[1:].decode(errors='replace')}"
            raise ConnectionRefusedError(str(Refused(text)))
        if frame[:1] not in kinds:
            raise Refused(f"{session.peer.name} sent {frame[:1]!r} where {kinds!r} belongs")
        return frame

    def _admit(self, session: _Session, peer: _Peer) -> None:
        """Make this the one session of a name."""
        with self._lock:
            if session.is_over or peer.name in self._departed:
                raise Refused(f"{peer.name} has left this run")
            if peer.session is not None:
                raise Refused(f"{peer.name} has a session, which is alive")
            if len(peer.inbox) >= _EVENTS:
                raise Refused(f"{peer.name} comes and goes faster than its messages are taken")
            session.peer = peer
            peer.session = session

    def _store(self, session: _Session, data: bytes) -> None:
        """Keep a message until it is taken. Without room nothing is read, so the peer waits."""
        inbox = session.peer.inbox
        with session.changed:
            session.heard = float("inf")
            session.changed.wait_for(lambda: session.is_over or len(inbox) < _FRAMES)
            session.heard = monotonic()
            if not session.is_over:
                self._add(session.peer, "message", data)

    def _add(self, peer: _Peer, kind: Kind, data: bytes = b"", reason: str = "") -> None:
        """Put an event in its peer's turn."""
        with self._arrived:
            if not peer.inbox:
                self._ready.append(peer)
            peer.inbox.append(Event(kind, peer.name, data, reason))
            self._arrived.notify_all()

    def _refuse(self, session: _Session, reason: str) -> None:
        """End a session and say why, at both ends."""
        with self._lock:
            self._end(session, reason, is_refusal=True)
            session.outbox.clear()
            session.put(_REFUSAL + reason.encode())

    def _end(self, session: _Session, reason: str, *, is_refusal: bool = False) -> None:
        """End a session; what waits to be sent still goes out while its stream ends."""
        peer = session.peer
        with self._lock:
            if session.is_over:
                return
            session.is_over = True
            session.deadline = monotonic() + _LINGER
            _LOG.info("%s: session over: %s", peer.name, reason)
            session.changed.notify_all()
            if is_refusal:
                self._report(peer, reason)
            if peer.session is session:
                peer.session = None
            if session.is_open:
                self._add(peer, "closed", reason=reason)

    def _report(self, peer: _Peer, reason: str) -> None:
        """Tell of a refusal, once a minute."""
        line = str(Refused(reason))
        now = monotonic()
        with self._lock:
            for text, since in list(peer.reported.items()):
                if now > since + _QUIET:
                    del peer.reported[text]
            has_room = len(peer.reported) < _REASONS and len(peer.inbox) < _EVENTS
            if has_room and line not in peer.reported:
                peer.reported[line] = now
                _LOG.warning("%s: refused: %s", peer.name or "a site", line)
                self._add(peer, "refused", reason=line)

    # The end that listens.

    def _serve(self) -> None:
        """Listen."""
        import grpc

        workers = _STREAMS * len(self._callers) + _SPARE_WORKERS
        self._pool = ThreadPoolExecutor(workers, "dpjax.sites")
        server = grpc.server(
            self._pool, options=self._options(), maximum_concurrent_rpcs=8 * workers
        )
        stream = grpc.stream_stream_rpc_method_handler(self._answer)
        service = grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: stream})
        server.add_generic_rpc_handlers((service,))
        try:
            if self.insecure:
                self.port = server.add_insecure_port(self._listen)
            else:
                configuration = _configuration(self._served)
                credentials = grpc.dynamic_ssl_server_credentials(
                    configuration, self._renewed, require_client_authentication=True
                )
                self.port = server.add_secure_port(self._listen, credentials)
        except RuntimeError:
            remedy = "this process cannot listen there: choose another, or stop what does"
            raise _validate.refusal("listen", self._listen, remedy) from None
        server.start()
        self._server = server

    def _answer(self, frames: Iterator[bytes], context: "grpc.ServicerContext") -> Iterator[bytes]:
        """Hold a session with who dialled."""
        peer = self._stranger
        names = self._callers
        certificate = b""
        try:
            if not self.insecure:
                pem = context.auth_context()["x509_pem_cert"][0]
                name = check_certificate(pem, self._roster, self._departed)
                if name not in names:
                    raise Refused(f"{name} does not dial {self._identity.name} in this plan")
                peer = self._peers[name]
                names = [name]
                certificate = fingerprint(pem)
            session = self._session(peer)
        except Refused as error:
            self._report(peer, str(error))
            yield _REFUSAL + str(error).encode()
            return
        session.cancel = context.cancel
        self._start(self._converse, session, frames, self._hello(False, names, certificate))
        yield from session.outgoing(self._beat)

    def _session(self, peer: _Peer) -> _Session:
        """A session that begins, of few that a name may have at once."""
        session = _Session(self._lock, peer, self._limits.hello)
        with self._lock:
            streams = sum(other.peer is peer for other in self._sessions)
            if streams >= _STREAMS or self._stopped.is_set():
                raise Refused(f"{streams} streams of {peer.name or 'strangers'} are open")
            self._sessions.append(session)
        return session

    def _renewed(self) -> "grpc.ServerCertificateConfiguration | None":
        """For a connection: new certificates, or None for those before."""
        identity = self._current()
        if identity.certificate_chain == self._served.certificate_chain:
            return None
        self._served = identity
        return _configuration(identity)

    def _current(self) -> Identity:
        """This site's identity, read again; the one before where that fails."""
        if self._reload is not None:
            try:
                identity = self._reload()
                check_certificate(identity.certificate_chain, self._roster)
                self._identity = identity
            except (OSError, ValueError, Refused) as error:
                self._report(self._stranger, f"this site's own certificate, read again: {error}")
        return self._identity

    # The end that dials.

    def _dial(self, name: str) -> None:
        """Hold sessions with a peer, with growing waits between them."""
        wait = _FIRST_WAIT
        while not self._stopped.is_set() and name not in self._departed:
            start = monotonic()
            self._attempt(name)
            is_short = monotonic() < start + max(wait, self._limits.hello)
            wait = min(2 * wait, self._limits.longest_wait) if is_short else _FIRST_WAIT
            # Sites that lost the same peer do not all come back at once.
            self._stopped.wait(wait * random.uniform(0.5, 1.0))

    def _attempt(self, name: str) -> None:
        """Dial a peer and hold the session, if there is one."""
        import grpc

        address = self._addresses[name]
        options = [*self._options(), ("grpc.ssl_target_name_override", name)]
        certificate = b""
        if self.insecure:
            channel = grpc.insecure_channel(address, options)
        else:
            identity = self._current()
            certificate = fingerprint(identity.certificate_chain)
            credentials = grpc.ssl_channel_credentials(
                identity.authority, identity.private_key_pem, identity.certificate_chain
            )
            channel = grpc.secure_channel(address, credentials, options)
        with channel, suppress(Refused):
            session = self._session(self._peers[name])
            call = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")(session.outgoing(self._beat))
            session.cancel = call.cancel
            self._converse(session, call, self._hello(True, [name], certificate))

    def _hello(self, dials: bool, names: list[str], certificate: bytes) -> Hello:
        """This end's part of a hello."""
        callbacks = (self._greeting, self._check)
        return Hello(self._identity, self._roster, dials, names, certificate, *callbacks)

    def _address(self, name: str, value: str | None) -> str:
        """Return "host:port", of this machine where there is no TLS, else raise ValueError."""
        host, _, port = str(value).rpartition(":")
        if not host or not port.isdecimal():
            raise _validate.refusal(name, value, "give host:port")
        if self.insecure and host not in _LOOPBACK:
            raise _validate.refusal(name, value, f"without TLS give one of {_LOOPBACK}")
        return str(value)

    def _options(self) -> list[tuple[str, int | str]]:
        """Settings of gRPC, for both ends."""
        beat = max(1, int(1000 * self._beat))
        hello = max(1, int(1000 * self._limits.hello))
        settings: dict[str, int] = {
            "max_receive_message_length": _PIECE_BYTES + 1,
            "max_concurrent_streams": _STREAMS,
            "keepalive_time_ms": beat,
            "keepalive_timeout_ms": 2 * beat,
            "http2.min_recv_ping_interval_without_data_ms": beat // 2,
            # Connections without a stream: these and handshakes end like a hello.
            "server_handshake_timeout_ms": hello,
            "max_connection_idle_ms": hello,
            # Two sites never share a port, nor two attempts a connection; nothing is sent twice.
            "so_reuseport": 0,
            "use_local_subchannel_pool": 1,
            "enable_retries": 0,
            # A proxy that the environment names is not this machine.
            "enable_http_proxy": int(not self.insecure),
        }
        return [(f"grpc.{name}", value) for name, value in settings.items()]


def _check_library() -> None:
    """Refuse to begin without gRPC."""
    try:
        import grpc  # noqa: F401
    except ImportError:
        raise ValueError(
            "grpcio is not installed, and dpjax.sites needs it: pip install 'dpjax[sites]'"
        ) from None


def _configuration(identity: Identity) -> "grpc.ServerCertificateConfiguration":
    """The certificates of the end that listens."""
    import grpc

    pair = (identity.private_key_pem, identity.certificate_chain)
    return grpc.ssl_server_certificate_configuration([pair], identity.authority)


def _frame(frames: Iterator[bytes]) -> bytes:
    """The next frame of a stream, else raise ConnectionError."""
    import grpc

    try:
        return next(frames)
    except StopIteration:
        raise ConnectionResetError("the other end has closed the session") from None
    except grpc.RpcError as error:
        # The end that listens is told no more.
        details = str(error.details()) if isinstance(error, grpc.Call) else "the connection broke"
    _, is_connecting, cause = details.rpartition("last error: ")
    for words, remedy in _REMEDIES.items():
        if is_connecting and words in cause:
            raise ConnectionRefusedError(f"{cause} ({remedy})")
    raise ConnectionResetError(details)
