"""Sessions of bytes between sites by name, what bounds them, and the hello that begins each one.

A carrier (`dpjax.sites.carrier` is one, over gRPC) holds at most one session with every neighbour.
Of two neighbours the one that comes later in the roster dials, and the other one listens. A session
begins with a hello, in which each end sends four parts:

1. its opening: version of the protocol, its name, the other's, a nonce, the roster's digest, the
   SHA-256 of the dialer's certificate (as it was sent, or as the listener saw it) and a greeting;
2. its signature over both openings, by the key that the roster pins, for a purpose of its role;
3. nothing, which says that it accepts the session.

The nonces keep a recorded hello from serving again, the roles one's own from coming back, and the
certificate a third party from standing between two ends.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple, Protocol, TypeAlias

from dpjax import _validate
from dpjax.encoding.stream import library
from dpjax.sites.identity import Identity, Refused, Roster

__all__ = ["Channel", "ChannelLimits", "Event", "Hello", "Traffic"]

_VERSION = 1
"""Of the hello and of the frames after it: sites of two versions refuse each other."""
_TERMS = (
    "version of the protocol",
    "name of the end that says hello",
    "name of the end it says hello to",
    "roster",
    "certificate of the end that dials (somebody stands between, if they differ)",
)
_PURPOSES = ("site hello 1, listener", "site hello 1, dialer")


Kind: TypeAlias = Literal["opened", "message", "closed", "refused"]


class Event(NamedTuple):
    """What a channel tells of a peer.

    Attributes:
        kind: A session was opened or closed, a message came, or a session was refused, by either
            end.
        peer: Name; empty where an end that was refused has proved none.
        data: Of a message.
        reason: One line, why a session was closed or refused.

    Example:
        >>> from dpjax.sites.channel import Event
        >>> Event("message", "lyon", b"abc").reason
        ''
    """

    kind: Kind
    peer: str
    data: bytes = b""
    reason: str = ""


class Traffic(NamedTuple):
    """What went between this site and a peer since the channel was opened.

    Attributes:
        sent: Bytes of messages that were handed to a session.
        received: Bytes of frames.
        sessions: How many sessions were opened, so that all but one are reconnections.
        silence: Seconds since anything was heard; infinite where nothing was.

    Example:
        >>> from dpjax.sites.channel import Traffic
        >>> Traffic().silence
        inf
    """

    sent: int = 0
    received: int = 0
    sessions: int = 0
    silence: float = float("inf")


@dataclass(frozen=True)
class ChannelLimits:
    """What bounds a session.

    Attributes:
        message_bytes: The longest message, from the model's size. A peer that sends more is
            refused.
        hello: Seconds in which a hello ends, from the first byte.
        keepalive: Seconds of silence after which a session ends.
        longest_wait: Seconds at most between two attempts to reach a peer; they grow up to it.

    Raises:
        ValueError: For what is no such number.

    Example:
        >>> from dpjax.sites.channel import ChannelLimits
        >>> ChannelLimits(message_bytes=1_000_000).hello
        10.0
    """

    message_bytes: int
    hello: float = 10.0
    keepalive: float = 30.0
    longest_wait: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what is no limit."""
        _validate.fields(self, _validate.integer, "message_bytes", maximum=10**9)
        _validate.fields(self, _validate.positive, "hello", "keepalive", "longest_wait")


class Channel(Protocol):
    """Sessions of bytes by the peers' names, whatever carries them.

    Guarantee: messages of one session arrive whole and in order, from the site that the name's
    pinned key belongs to. No session is resumed: what a closed one had not delivered is lost.

    Example:
        >>> from dpjax.sites.carrier import GrpcChannel
        >>> from dpjax.sites.channel import Channel
        >>> def channel_of(carrier: GrpcChannel) -> Channel:
        ...     return carrier
    """

    @property
    def insecure(self) -> bool:
        """Whether messages cross without encryption."""

    def statistics(self) -> Mapping[str, Traffic]:
        """What went between this site and each peer."""

    def open(
        self, greeting: Callable[[str], bytes], check: Callable[[str, bytes], str | None]
    ) -> None:
        """Listen and dial.

        Args:
            greeting: What this end says to a peer in its hello.
            check: A reason to refuse a peer by what it says, or None.
        """

    def send(self, peer: str, data: bytes) -> bool:
        """Hand a message to a peer's session; False where there is none, or it has no room."""

    def receive(self, seconds: float) -> Event | None:
        """Return the next event of any peer, in turn; None after so many seconds."""

    def close(self) -> None:
        """End all sessions."""


@dataclass(frozen=True)
class Hello:
    """One end of a hello.

    Guarantee: `exchange` returns a name only where the other end holds the key that the roster pins
    for it, means this end by its name, has the same roster, and saw the same certificate of the
    dialer; and where both ends accept. This needs unforgeable signatures and a nonce that does
    not repeat.

    Args:
        identity: This site.
        roster: Names and pinned keys.
        dials: Whether this end dials.
        peers: Names that the other end may have; of a dialer one.
        certificate: SHA-256 of the dialer's certificate, as this end knows it; empty without TLS.
        greeting: What this end says to a peer, up to 60,000 bytes.
        check: A reason to refuse a peer by its greeting, or None.

    Example:
        >>> from queue import SimpleQueue
        >>> from threading import Thread
        >>> from dpjax.sites.channel import Hello
        >>> from dpjax.sites.identity import Authority, Identity, Roster, request
        >>> authority = Authority("trial")
        >>> def identity(name):
        ...     key, demand = request(name, "sites")
        ...     return Identity.load(name, certificate=authority.sign(demand), key=key,
        ...                          authority=authority.certificate)
        >>> lyon, paris = identity("lyon"), identity("paris")
        >>> roster = Roster({"lyon": lyon.public_key, "paris": paris.public_key})
        >>> said = lambda peer: b"", lambda peer, theirs: None
        >>> listener = Hello(lyon, roster, False, ["paris"], b"", *said)
        >>> dialer = Hello(paris, roster, True, ["lyon"], b"", *said)
        >>> there, back = SimpleQueue(), SimpleQueue()
        >>> admit = lambda peer: None
        >>> Thread(target=listener.exchange, args=(back.put, there.get, admit)).start()
        >>> dialer.exchange(there.put, back.get, admit)
        'lyon'
    """

    identity: Identity
    roster: Roster
    dials: bool
    peers: Sequence[str]
    certificate: bytes
    greeting: Callable[[str], bytes]
    check: Callable[[str, bytes], str | None]

    def exchange(
        self,
        put: Callable[[bytes], None],
        take: Callable[[], bytes],
        admit: Callable[[str], None],
    ) -> str:
        """Exchange the parts of a hello and return the other's name.

        Args:
            put: Sends a part.
            take: Returns the other's next part.
            admit: Gives the name a session, or raises Refused.

        Raises:
            Refused: With the reason, which the caller tells the other end.
        """
        if self.dials:
            mine = self._opening(self.peers[0])
            put(mine)
            theirs = take()
            peer, greeting = self._read(theirs)
            transcript = _transcript(mine, theirs)
        else:
            # Who dials says first who it is.
            theirs = take()
            peer, greeting = self._read(theirs)
            mine = self._opening(peer)
            put(mine)
            transcript = _transcript(theirs, mine)
        put(self.identity.sign(_PURPOSES[self.dials], transcript))
        if not self.roster.verify(peer, _PURPOSES[not self.dials], transcript, take()):
            raise Refused(f"the hello is not signed by the key that the roster has of {peer}")
        reason = self.check(peer, greeting)
        if reason is not None:
            raise Refused(reason)
        admit(peer)
        put(b"")
        if take():
            raise Refused("the hello does not end as hellos do")
        return peer

    def _opening(self, peer: str) -> bytes:
        """The opening of this end."""
        terms = (_VERSION, self.identity.name, peer, self.roster.digest, self.certificate)
        opening = (*terms, secrets.token_bytes(32), self.greeting(peer))
        data: bytes = library("msgpack").packb(opening)
        return data

    def _read(self, data: bytes) -> tuple[str, bytes]:
        """Name and greeting of the other end's opening, where its terms are this end's."""
        try:
            *theirs, _, greeting = library("msgpack").unpackb(data)
            peer = theirs[1]
            is_valid = isinstance(greeting, bytes)
        except Exception:  # Hostile bytes raise errors of many kinds.
            is_valid = False
        if not is_valid:
            raise Refused("the hello does not begin as hellos do")
        here = self.identity.name
        name = peer if peer in self.peers else " or ".join(self.peers)
        terms = [_VERSION, name, here, self.roster.digest, self.certificate]
        for subject, there, expected in zip_longest(_TERMS, theirs, terms):
            if there != expected:
                raise Refused(f"{subject}: {there!r} at the other end, {expected!r} at {here}")
        return name, greeting


def _transcript(dialer: bytes, listener: bytes) -> bytes:
    """What both ends sign: an opening never looks like parts of two."""
    return len(dialer).to_bytes(8, "big") + dialer + listener


def fingerprint(pem: bytes) -> bytes:
    """Return the SHA-256 of the first certificate of a chain, as both ends compute it."""
    certificate = library("cryptography.x509").load_pem_x509_certificate(pem)
    algorithm = library("cryptography.hazmat.primitives.hashes").SHA256()
    return bytes(certificate.fingerprint(algorithm))
