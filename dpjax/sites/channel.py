"""Sessions of bytes between sites by name, what bounds them, and the hello that begins each one.

A carrier (`dpjax.sites.carrier` is one, over gRPC) holds at most one session with every neighbour.
Of two neighbours the one that comes later in the roster dials, and the other one listens. A session
begins with a hello, in which each end sends four parts:

1. its opening: version of the protocol, its name, the other's, the roster's digest, the SHA-256 of
   the dialer's certificate (as it was sent, or as the listener saw it), a nonce and a greeting;
2. its signature over both openings, by the key that the roster pins, for a purpose of its role;
3. nothing, which says that it accepts the session.

The nonces keep a recorded hello from serving again, the roles one's own from coming back, and the
certificate a third party from standing between two ends.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

from dpjax import _validate
from dpjax.encoding.stream import library
from dpjax.sites.identity import Identity, Refused, Roster

__all__ = ["Channel", "ChannelLimits", "Event", "Hello", "Traffic"]

_VERSION = 5
"""Of the hello and of the frames after it: sites of two versions refuse each other."""
_PURPOSES = ("site hello 1, listener", "site hello 1, dialer")


Kind: TypeAlias = Literal["opened", "message", "closed", "refused", "absent"]
Greeting: TypeAlias = Callable[[str], bytes]
"""What a site says to a peer of this name in its hello."""
Check: TypeAlias = Callable[[str, bytes], str | None]
"""Why a peer of this name is refused, by what it says; None where it is not."""


class Unreached(Refused):
    """The dialled end cannot be reached, for a reason that stays."""


class Absent(Unreached):
    """Nothing listens where the dialled end should be, or not yet."""


class Event(NamedTuple):
    """What a channel tells of a peer.

    Attributes:
        kind: A session was opened or closed, a message came, a session was refused, by either
            end, or nobody listens where the peer is dialled.
        peer: Name; empty where an end that was refused has proved none. Without TLS it is the name
            that was claimed.
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

    def open(self, greeting: Greeting, check: Check) -> None:
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

    Guarantee: `exchange` returns only where the other end holds the key that the roster pins for
    the peer, means this end by its name, has the same roster, and saw the same certificate of the
    dialer; and where both ends accept. This needs unforgeable signatures and a nonce that does
    not repeat.

    Args:
        identity: This site.
        roster: Names and pinned keys.
        dials: Whether this end dials.
        peer: Name of the other end, which has yet to prove it.
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
        >>> said = lambda peer: b"plan 1", lambda peer, theirs: None
        >>> listener = Hello(lyon, roster, False, "paris", b"", *said)
        >>> dialer = Hello(paris, roster, True, "lyon", b"", *said)
        >>> there, back = SimpleQueue(), SimpleQueue()
        >>> admit = lambda: None
        >>> Thread(target=listener.exchange, args=(back.put, there.get, admit)).start()
        >>> dialer.exchange(there.put, back.get, lambda: print("lyon is admitted"))
        lyon is admitted
    """

    identity: Identity
    roster: Roster
    dials: bool
    peer: str
    certificate: bytes
    greeting: Greeting
    check: Check

    def exchange(
        self,
        put: Callable[[bytes], None],
        take: Callable[[], bytes],
        admit: Callable[[], None],
    ) -> None:
        """Exchange the parts of a hello.

        Args:
            put: Sends a part.
            take: Returns the other's next part.
            admit: Gives the peer a session, or raises Refused.

        Raises:
            Refused: With the reason, which the caller tells the other end.
        """
        mine = self._opening()
        put(mine)
        theirs = take()
        greeting = self._read(theirs)
        # In an order that both ends know: each opening says whose it is.
        transcript: bytes = library("msgpack").packb(sorted((mine, theirs)))
        put(self.identity.sign(_PURPOSES[self.dials], transcript))
        if not self.roster.verify(self.peer, _PURPOSES[not self.dials], transcript, take()):
            raise Refused(f"the hello is not signed by the key that the roster has of {self.peer}")
        reason = self.check(self.peer, greeting)
        if reason is not None:
            raise Refused(reason)
        admit()
        put(b"")
        if take():
            raise Refused("the hello does not end as hellos do")

    def _terms(self, name: str, other: str) -> dict[str, object]:
        """What both ends must say alike of the end of a name."""
        return {
            "version of the protocol": _VERSION,
            "name of the end that says hello": name,
            "name of the end it says hello to": other,
            "roster (names, keys or their order are others, if it differs)": self.roster.digest,
            "certificate of the end that dials (somebody stands between, if they differ)": (
                self.certificate
            ),
        }

    def _opening(self) -> bytes:
        """The opening of this end."""
        opening = self._terms(self.identity.name, self.peer)
        opening["nonce"] = secrets.token_bytes(32)
        opening["greeting"] = self.greeting(self.peer)
        data: bytes = library("msgpack").packb(opening)
        return data

    def _read(self, data: bytes) -> bytes:
        """The greeting of the other end's opening, where its terms are this end's."""
        try:
            theirs = library("msgpack").unpackb(data)
            greeting = theirs["greeting"]
        except Exception:  # Hostile bytes raise errors of many kinds.
            greeting = None
        if not isinstance(greeting, bytes):
            raise Refused("the hello does not begin as hellos do")
        here = self.identity.name
        for subject, expected in self._terms(self.peer, here).items():
            there = theirs.get(subject)
            if there != expected:
                raise Refused(f"{subject}: {there!r} at the other end, {expected!r} at {here}")
        return greeting


def fingerprint(pem: bytes) -> bytes:
    """Return the SHA-256 of the first certificate of a chain, as both ends compute it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    return x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256())
