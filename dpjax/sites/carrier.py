"""Sessions over gRPC, with certificates at both ends: the carrier of `dpjax.sites.channel`.

One bidirectional stream is a session. Its frames are bytes: a letter for the kind, then a piece of
a message, or the reason of a refusal. The first three messages are the parts of the hello. An empty
frame says that its sender is alive. On a slow link a long message arrives in pieces, so that nobody
takes its sender for dead.

Threads: a session has a reader here, and a writer of gRPC's that takes what `_Session.outgoing`
yields. One thread more watches the clock. One lock guards all of it. Each session has a condition
of its own: a message wakes the threads of one session alone. A process that has opened a channel
must not fork.
"""

import logging
import math
import queue
import random
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from time import monotonic, sleep
from typing import TYPE_CHECKING, Literal

from dpjax import _validate
from dpjax.sites.channel import (
    Absent,
    ChannelLimits,
    Check,
    Event,
    Greeting,
    Hello,
    Kind,
    Traffic,
    Unreached,
    fingerprint,
)
from dpjax.sites.identity import Identity, Refused, Roster, check_certificate
from dpjax.sites.relay import Forwarder

if TYPE_CHECKING:
    import grpc

__all__ = ["GrpcChannel"]

_LOG = logging.getLogger("dpjax.sites")
_SERVICE = "dpjax.sites"
_METHOD = "session"
_PIECE = b"p"
"""Of a message: there is more of it."""
_END = b"m"
"""The last piece of a message."""
_REFUSAL = b"r"
_PIECE_BYTES = 2**18
"""Of a frame: what a slow link carries in less than a second."""
_PART_BYTES = 2**16
"""Of a part of the hello."""
_FRAMES = 4
"""Frames of a peer that wait to be sent, beyond which it takes no more messages."""
_EVENTS = 64
"""Events of a peer that wait to be received: one that comes and goes fills no memory."""
_STREAMS = 3
"""Streams of one name: its session, the one that replaces it, and one to spare."""
_SPARE_WORKERS = 8
"""Threads for streams that are refused at once."""
_LINGER = 0.5
"""Seconds that a stream has to end by itself, so that the other end reads why."""
_TICK = 0.05
_FIRST_WAIT = 0.2
_QUIET = 60.0
"""Seconds in which a refusal is not repeated."""
_REASONS = 16
"""Different refusals of a peer that are told in that time."""
_LOOPBACK = r"(127\.0\.0\.1|\[::1\]|localhost)"
_NOBODY = "onnection refused"
_REMEDIES = {
    "Socket closed": (
        "TLS ended: it refuses this site's certificate, or stopped; compare authorities, and both "
        "clocks"
    ),
    _NOBODY: "nothing listens at its address yet",
    "andshake failed": "TLS failed: compare authorities, and both clocks",
    "erification": "another site answers at this address",
}
"""What gRPC says where a connection was refused, and what to do."""


class _Over(Refused):
    """A session ends, and nobody refuses it."""


@dataclass
class _Peer:
    """What is known of a neighbour; of all that prove no name, together."""

    name: str
    session: "_Session | None" = None
    unread: int = 0
    quiet: float = -math.inf
    reported: set[str] = field(default_factory=set)
    sent: int = 0
    received: int = 0
    sessions: int = 0
    heard: float = -math.inf


@dataclass(eq=False)
class _Session:
    """One stream: what goes out, what comes in, and when its time is over."""

    changed: threading.Condition
    peer: _Peer
    limits: ChannelLimits
    deadline: float
    stage: Literal["hello", "open", "over"] = "hello"
    outbox: deque[bytes] = field(default_factory=deque)
    frames: Iterator[bytes] = field(init=False)
    cancel: Callable[[], object] = field(init=False)

    def put(self, *frames: bytes) -> None:
        """Add frames to what goes out."""
        with self.changed:
            self.outbox.extend(frames)
            self.changed.notify_all()

    def outgoing(self) -> Iterator[bytes]:
        """What goes out, until the session is over; something at least every so many seconds."""
        while self.outbox or self.stage != "over":
            with self.changed:
                self.changed.wait_for(
                    lambda: self.outbox or self.stage == "over", self.limits.keepalive / 3
                )
                frame = self.outbox.popleft() if self.outbox else b""
            yield frame

    def message(self, most_bytes: int) -> bytes:
        """The next message, of all its pieces; Refused where the session cannot go on."""
        data = bytearray()
        kind = b""
        while kind != _END:
            frame = _next(self.frames)
            self.peer.received += len(frame)
            self.listen()
            kind = frame[:1]
            data += frame[1:]
            if kind == _REFUSAL:
                raise Refused(f"{self.peer.name} refuses: {frame[1:].decode(errors='replace')}")
            if kind not in (b"", _PIECE, _END):
                raise Refused(f"{self.peer.name} sent {kind!r} where a message belongs")
            if len(data) > most_bytes:
                raise Refused(f"{self.peer.name} sent a message of more than {most_bytes:,} bytes")
        return bytes(data)

    def listen(self) -> None:
        """Note that something was heard; a hello has no more time for it."""
        with self.changed:
            self.peer.heard = monotonic()
            if self.stage == "open":
                self.deadline = self.peer.heard + self.limits.keepalive


@dataclass(eq=False)
class GrpcChannel:
    """A `dpjax.sites.channel.Channel` over gRPC.

    Guarantee: a session is with the site whose key the roster pins for its name, over TLS with
    certificates of both ends, and there is one at most. A refusal is an event at both ends, and a
    warning of the logger ``dpjax.sites``; who has no certificate of the authority is refused by
    TLS, which says so at the end that dials, and here in gRPC's log on standard error alone.
    Without certificates nothing listens or dials, unless ``insecure_loopback`` is given: then all
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
        forwarder: Where this site listens and dials by relays; ``peers`` and ``listen`` are then
            the forwarder's.

    Attributes:
        insecure: Whether there is no TLS; then connections of other machines are refused.
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

    identity: Identity
    roster: Roster
    peers: Mapping[str, str | None]
    listen: str | None
    limits: ChannelLimits
    departed: AbstractSet[str] = frozenset()
    reload: Callable[[], Identity] | None = None
    _: KW_ONLY
    insecure_loopback: bool = False
    forwarder: Forwarder | None = None

    def __post_init__(self) -> None:
        """Check names and addresses before anything is sent."""
        try:
            import grpc  # noqa: F401
        except ImportError:
            raise ValueError(
                "grpcio is not installed, and dpjax.sites needs it: pip install 'dpjax[sites]'"
            ) from None
        identity = self.identity
        self.insecure = _validate.flag("insecure_loopback", self.insecure_loopback)
        self.port: int | None = None
        name = identity.name
        has_certificates = identity.certificate_chain and identity.authority
        _validate.refuse(
            {
                f"identity is of {name}, which is not in the roster; give all certificates": (
                    name not in self.roster
                ),
                f"identity is of {name} with a key that the roster does not have; renew it": (
                    identity.public_key not in self.roster.accepted(name)
                ),
                # gRPC would trust the system's authorities in place of none.
                "identity has no certificates; give them, nothing is sent without": (
                    not (self.insecure or has_certificates)
                ),
                "insecure_loopback is given beside relays, which take certificates; leave it out": (
                    self.insecure and self.forwarder
                ),
            }
        )
        order = list(self.roster)
        self._callers = []
        for peer, address in self.peers.items():
            _validate.one_of("peers", peer, [other for other in order if other != name])
            if order.index(peer) < order.index(name):
                why = f"as this site dials {peer}: a line under [neighbours] of a site.toml"
                self._check_address(f"address of {peer}", address, 1, why)
            else:
                self._callers.append(peer)
        if self._callers:
            why = f"as {', '.join(self._callers)} dial this site"
            self._check_address("listen", self.listen, 0, why)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stopped = threading.Event()
        self._peers = {name: _Peer(name) for name in self.peers}
        self._stranger = _Peer("")
        self._served = b""
        self._events: queue.SimpleQueue[tuple[_Peer, Event]] = queue.SimpleQueue()
        self._sessions: list[_Session] = []
        self._server: grpc.Server | None = None

    def open(self, greeting: Greeting, check: Check) -> None:
        """Listen and dial; see `dpjax.sites.channel.Channel`.

        Args:
            greeting: What this end says to a peer in its hello, at most 60,000 bytes.
            check: A reason to refuse a peer by what it says, or None.

        Raises:
            ValueError: For an address where this process cannot listen.
        """
        self._greeting = greeting
        self._check = check
        if self.forwarder is not None:
            self.forwarder.begin()
        if self._callers:
            self._serve()
        self._start(self._watch)
        for name in self._peers.keys() - self._callers:
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
        _validate.integer("bytes of data", len(data), maximum=self.limits.message_bytes)
        starts = range(0, len(data), _PIECE_BYTES)
        pieces = [_PIECE + data[start : start + _PIECE_BYTES] for start in starts]
        neighbour = self._peers[peer]
        with self._changed:
            session = neighbour.session
            if session is None or session.stage != "open" or len(session.outbox) >= _FRAMES:
                return False
            session.put(*pieces, _END)
            neighbour.sent += len(data)
        return True

    def receive(self, seconds: float) -> Event | None:
        """Return the next event, of the peers in turn; None after so many seconds.

        Args:
            seconds: At least 0.
        """
        try:
            peer, event = self._events.get(timeout=seconds)
        except queue.Empty:
            return None
        with self._changed:
            peer.unread -= 1
            if peer.session is not None:
                peer.session.changed.notify_all()
        return event

    def depart(self, name: str) -> None:
        """Refuse a name from now on, and end its session.

        Args:
            name: The site that left.
        """
        with self._changed:
            self.departed = self.departed | {name}
            for session in self._sessions:
                if session.peer.name == name:
                    self._end(session, Refused(f"{name} has left this run"))

    def renew(self, roster: Roster) -> None:
        """Accept renewed keys in hellos from now on.

        Args:
            roster: The one before, with renewals.

        Raises:
            ValueError: For another one.
        """
        if roster.digest != self.roster.digest:
            raise _validate.refusal("roster", roster, "give the one before, with renewals")
        self.roster = roster

    def statistics(self) -> dict[str, Traffic]:
        """Return what went between this site and every peer."""
        now = monotonic()
        return {
            name: Traffic(peer.sent, peer.received, peer.sessions, now - peer.heard)
            for name, peer in self._peers.items()
        }

    def close(self) -> None:
        """End all sessions within two seconds; what was handed over goes out if peers take it."""
        with self._changed:
            self._stopped.set()
            for session in self._sessions:
                self._end(session, _Over("this site closed the channel"))
            # The watch ends those that do not end by themselves.
            self._changed.wait_for(lambda: not self._sessions, 2 * _LINGER)
        if self._server is not None:
            self._server.stop(None).wait(_LINGER)
            self._pool.shutdown(wait=False)
        if self.forwarder is not None:
            self.forwarder.close()

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        """Run something in a thread of this channel, which ends when the channel is closed."""
        threading.Thread(target=run, args=arguments, name="dpjax.sites", daemon=True).start()

    def _watch(self) -> None:
        """End sessions that are silent, that do not end, and those whose hello does not."""
        hello = Refused(f"the hello took more than {self.limits.hello:g} seconds")
        silence = _Over(f"nothing was heard for {self.limits.keepalive:g} seconds")
        while self._sessions or not self._stopped.is_set():
            sleep(_TICK)
            # Not under the lock: who cancels waits for what gRPC's threads wait for.
            for session in list(self._sessions):
                if monotonic() < session.deadline:
                    continue
                if session.stage == "over":
                    session.cancel()
                self._end(session, hello if session.stage == "hello" else silence)

    # A session.

    def _session(self, peer: _Peer) -> _Session:
        """A session that begins, of few that a name may have at once."""
        deadline = monotonic() + self.limits.hello
        changed = threading.Condition(self._lock)
        session = _Session(changed, peer, self.limits, deadline)
        with self._changed:
            streams = sum(other.peer is peer for other in self._sessions)
            if streams >= _STREAMS or self._stopped.is_set():
                raise Refused(f"{streams} streams of {peer.name} are open")
            self._sessions.append(session)
        return session

    def _converse(self, session: _Session, dials: bool, certificate: bytes) -> None:
        """Read a session, from its hello to its end."""
        import grpc

        name = session.peer.name
        callbacks = (self._greeting, self._check)
        hello = Hello(self.identity, self.roster, dials, name, certificate, *callbacks)
        try:
            hello.exchange(
                lambda part: session.put(_END + part),
                lambda: session.message(_PART_BYTES),
                lambda: self._admit(session),
            )
            self._store(session, "opened")
            while session.stage == "open":
                self._store(session, "message", session.message(self.limits.message_bytes))
        except Refused as reason:
            self._end(session, reason)
        except Exception as error:  # What greets and checks is the caller's.
            fault = type(error).__name__
            self._end(session, Refused(f"the hello failed at {self.identity.name}: {fault}"))
        # Until the other end has read why; the watch ends it otherwise.
        with suppress(grpc.RpcError):
            deque(session.frames, 0)
        with self._changed:
            self._sessions.remove(session)
            self._changed.notify_all()

    def _admit(self, session: _Session) -> None:
        """Make this the one session of a name."""
        peer = session.peer
        with self._changed:
            if session.stage == "over" or peer.name in self.departed:
                raise Refused(f"{peer.name} has left this run")
            if peer.session is not None:
                raise Refused(f"{peer.name} has a session, which is alive")
            peer.session = session

    def _store(self, session: _Session, kind: Kind, data: bytes = b"") -> None:
        """Put what came into the queue, once all before it was taken.

        Until then nothing is read, so that the peer waits; and none keeps others waiting.
        """
        with self._changed:
            if session.stage != "over":
                session.deadline = math.inf
            session.changed.wait_for(lambda: session.stage == "over" or not session.peer.unread)
            if session.stage != "over":
                # Not before its event: what was meant for the session before must not go out here.
                session.stage = "open"
                session.listen()
                session.peer.sessions += kind == "opened"
                self._tell(session.peer, kind, data)

    def _tell(self, peer: _Peer, kind: Kind, data: bytes = b"", reason: str = "") -> None:
        """Put an event into the queue."""
        peer.unread += 1
        self._events.put((peer, Event(kind, peer.name, data, reason)))

    def _end(self, session: _Session, reason: Refused) -> None:
        """End a session; what waits to be sent still goes out while its stream ends."""
        peer = session.peer
        with self._changed:
            if session.stage == "over":
                return
            if not isinstance(reason, _Over):
                session.outbox = deque([_REFUSAL + str(reason).encode()])
                self._report(peer, reason)
            if session.stage == "open":
                self._tell(peer, "closed", reason=str(reason))
            if peer.session is session:
                peer.session = None
            session.stage = "over"
            session.deadline = monotonic() + _LINGER
            session.changed.notify_all()

    def _report(self, peer: _Peer, reason: Refused) -> None:
        """Tell of a refusal, once a minute."""
        now = monotonic()
        with self._changed:
            if now > peer.quiet:
                peer.quiet = now + _QUIET
                peer.reported.clear()
            line = str(reason)
            has_room = len(peer.reported) < _REASONS and peer.unread < _EVENTS
            if has_room and line not in peer.reported:
                peer.reported.add(line)
                verb = "" if isinstance(reason, Unreached) else "refused: "
                _LOG.warning("%s: %s%s", peer.name or "a site", verb, line)
                kind: Kind = "absent" if isinstance(reason, Absent) else "refused"
                self._tell(peer, kind, reason=line)

    # The end that listens.

    def _serve(self) -> None:
        """Listen."""
        import grpc

        workers = _STREAMS * len(self._callers) + _SPARE_WORKERS
        self._pool = ThreadPoolExecutor(workers, "dpjax.sites")
        stream = grpc.stream_stream_rpc_method_handler(self._answer)
        service = grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: stream})
        settings = (self._options(), 8 * workers)
        server = grpc.server(self._pool, [service], None, *settings)
        if self.insecure:
            credentials = grpc.local_server_credentials()
        else:
            credentials = grpc.dynamic_ssl_server_credentials(
                self._renewed(), self._renewed, require_client_authentication=True
            )
        try:
            self.port = server.add_secure_port(str(self.listen), credentials)
        except RuntimeError:
            remedy = "this process cannot listen there: choose another, or stop what does"
            raise _validate.refusal("listen", self.listen, remedy) from None
        server.start()
        self._server = server
        # Behind a relay it is a socket of the machine, which firewalls know nothing of.
        if not str(self.listen).startswith("unix:"):
            _LOG.info("%s listens at %s, port %d", self.identity.name, self.listen, self.port)

    def _answer(self, frames: Iterator[bytes], context: "grpc.ServicerContext") -> Iterator[bytes]:
        """Hold a session with who dialled."""
        peer = self._stranger
        certificate = b""
        try:
            if self.insecure:
                # What it says here, it proves in the hello.
                name = str(dict(context.invocation_metadata()).get(_METHOD))
            else:
                pem = context.auth_context()["x509_pem_cert"][0]
                name = check_certificate(pem, self.roster, self.departed)
                certificate = fingerprint(pem)
            if name not in self._callers:
                raise Refused(f"{name} does not dial {self.identity.name} in this plan")
            peer = self._peers[name]
            session = self._session(peer)
        except Refused as error:
            self._report(peer, error)
            yield _REFUSAL + str(error).encode()
            return
        session.frames = frames
        session.cancel = context.cancel
        self._start(self._converse, session, False, certificate)
        yield from session.outgoing()

    def _renewed(self) -> "grpc.ServerCertificateConfiguration | None":
        """For a connection: the certificates, or None for those before.

        Never the same anew: gRPC 1.85 crashes where many connections change them at once.
        """
        import grpc

        identity = self._current()
        if identity.certificate_chain == self._served:
            return None
        self._served = identity.certificate_chain
        pair = (identity.private_key_pem, identity.certificate_chain)
        return grpc.ssl_server_certificate_configuration([pair], identity.authority)

    def _current(self) -> Identity:
        """This site's identity, read again; the one before where that fails."""
        if self.reload is not None:
            try:
                identity = self.reload()
                check_certificate(identity.certificate_chain, self.roster)
                self.identity = identity
            except (OSError, ValueError, Refused) as error:
                self._report(self._stranger, Refused(f"this site's own certificate: {error}"))
        return self.identity

    # The end that dials.

    def _dial(self, name: str) -> None:
        """Hold sessions with a peer, with growing waits between them."""
        wait = 0.0
        # Sites that lost the same peer do not all come back at once.
        while not self._stopped.wait(wait * random.uniform(0.5, 1.0)):
            if name in self.departed:
                return
            start = monotonic()
            with suppress(Refused):
                self._attempt(name)
            is_short = monotonic() < start + self.limits.hello
            longer = min(_FIRST_WAIT + 2 * wait, self.limits.longest_wait)
            wait = longer if is_short else _FIRST_WAIT

    def _attempt(self, name: str) -> None:
        """Dial a peer and hold the session, if there is one."""
        import grpc

        if self.forwarder is not None:
            try:
                self.forwarder.reach(name)
            except Unreached as reason:
                self._report(self._peers[name], reason)
                raise
        identity = self._current()
        certificate = b""
        credentials = grpc.local_channel_credentials()
        if not self.insecure:
            certificate = fingerprint(identity.certificate_chain)
            credentials = grpc.ssl_channel_credentials(
                identity.authority, identity.private_key_pem, identity.certificate_chain
            )
        options = [*self._options(), ("grpc.ssl_target_name_override", name)]
        with grpc.secure_channel(str(self.peers[name]), credentials, options) as channel:
            session = self._session(self._peers[name])
            stream = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")
            call = stream(session.outgoing(), metadata=[(_METHOD, identity.name)])
            session.frames = call
            session.cancel = call.cancel
            self._converse(session, True, certificate)

    def _check_address(self, name: str, value: str | None, least: int, why: str) -> None:
        """Refuse what is no "host:port", of this machine where there is no TLS."""
        host = _LOOPBACK if self.insecure else ".+"
        address = re.fullmatch(rf"{host}:(?P<port>\d{{1,5}})", str(value))
        is_port = address is not None and least <= int(address["port"]) <= 65535
        if self.forwarder is None and not is_port:
            of = ", of 127.0.0.1, [::1] or localhost without TLS" if self.insecure else ""
            remedy = f"give host:port, a port of {least} to 65535{of}, {why}"
            raise _validate.refusal(name, value, remedy)

    def _options(self) -> list[tuple[str, int | str]]:
        """Settings of gRPC, for both ends."""
        beat = int(1000 * self.limits.keepalive / 3)
        hello = int(1000 * self.limits.hello)
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


def _next(frames: Iterator[bytes]) -> bytes:
    """The next frame of a stream; Refused where there is none, for a reason that stays."""
    import grpc

    try:
        return next(frames)
    except StopIteration:
        raise _Over("the other end has closed the session") from None
    except grpc.RpcError as error:
        # The end that listens is told no more.
        details = str(error.details()) if isinstance(error, grpc.Call) else "the connection broke"
    _, is_connecting, cause = details.rpartition("last error: ")
    for words, remedy in _REMEDIES.items():
        if is_connecting and words in cause:
            kind = Absent if words == _NOBODY else Unreached
            raise kind(f"{remedy} ({cause})")
    raise _Over(details)
