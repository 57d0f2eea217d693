"""What sites say to each other, and its bytes: what is not exactly one of these frames is refused.

Presence      a site's nonce and what it takes part in, signed; handed on to all sites
Greeting      in the hello: a presence, the run, and the last message of the other end
RoundMessage  the one message of a round, signed
Receipt       that a message is absorbed: what came of it is on the receiver's disk
Headers       who sent which digest in which round, signed by the senders; handed on
Refusal       why something was refused
Beginnings    that a run has begun at some sites, and is charged there; signed, handed on
Leave         that a site takes part no more, signed; handed on

Of sums among peers (`dpjax.sites.peers`):

Word          what either end of an aggregation says, signed
Enrolment     the signed keys of all that take part, from the aggregator; two of one site prove
              that its folder has a copy
Opened        a sum, signed by its aggregator; anybody hands it on
Void          that a site has no sum of a round, and takes part in it no more; signed
Voided        that all sites have said so
Failed        why an attempt ended without a sum
At            the round and the attempt that a site is in: it asks for the sum of that round
"""

import functools
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast, get_args, get_type_hints

from dpjax.encoding.stream import library
from dpjax.secagg.primitives import agreed, key_pair
from dpjax.sites.identity import Identity, Refused, Roster

__all__ = ()

_LONGEST_TEXT = 1000


class Presence(NamedTuple):
    """Who takes part, in what: equal terms at all sites are what they agree on.

    Attributes:
        name: The site.
        nonce: 32 bytes that it drew with its folder.
        exchange: Its public key for this run's links; empty where the plan has no such noise.
        terms: Pairs of an item and its digest or text, in order.
        signature: Of the site, over `content`.
    """

    name: str
    nonce: bytes
    exchange: bytes
    terms: tuple[tuple[str, str], ...]
    signature: bytes

    @property
    def content(self) -> bytes:
        """What is signed."""
        return _packed([self.name, self.nonce, self.exchange, [list(term) for term in self.terms]])


class Beginning(NamedTuple):
    """That a run has begun at a site; it is charged before, where the site has a ledger.

    Attributes:
        name: The site.
        project: Digest of the project's first plan; empty where a plan has no file.
        plan: Digest of the run's plan.
        nonce: The site's, as in its `Presence`.
        run: Its name.
        signature: Of the site, over `content`; empty in a note of its own.
    """

    name: str
    project: str
    plan: str
    nonce: bytes
    run: bytes
    signature: bytes

    @property
    def content(self) -> bytes:
        """What is signed."""
        return _packed([self.name, self.project, self.plan, self.nonce, self.run])


class Header(NamedTuple):
    """That a site sent a payload of some digest in a round.

    Attributes:
        sender: The site.
        round: Of the phase.
        digest: SHA-256 of the payload.
        signature: Of the sender, over `header_content`.
    """

    sender: str
    round: int
    digest: bytes
    signature: bytes


class Greeting(NamedTuple):
    """A site's part of the hello.

    Attributes:
        presence: Its own.
        run: The run that it is in; empty before all presences are there.
        shown: The header of the last message of the other end that it has, or nothing.
        keys: The last keys for a sum that it has seen of the other end, or nothing.
        charges: Beginnings of the other end in runs of the project that it has.
    """

    presence: Presence
    run: bytes
    shown: tuple[Header, ...]
    keys: "tuple[Word, ...]" = ()
    charges: tuple[Beginning, ...] = ()


class Presences(NamedTuple):
    """Presences of some sites."""

    presences: tuple[Presence, ...]


class Beginnings(NamedTuple):
    """Beginnings of one run at some sites."""

    beginnings: tuple[Beginning, ...]


class RoundMessage(NamedTuple):
    """A round's message.

    Attributes:
        round: Of the phase.
        payload: Its numbers.
        signature: As in its `Header`.
    """

    round: int
    payload: bytes
    signature: bytes

    def header(self, sender: str) -> Header:
        """What others are shown of it.

        Args:
            sender: Who sent it.
        """
        return Header(sender, self.round, hashlib.sha256(self.payload).digest(), self.signature)


class Receipt(NamedTuple):
    """That a message is absorbed."""

    round: int
    digest: bytes


class Headers(NamedTuple):
    """What a site has received, for those who did not."""

    headers: tuple[Header, ...]


class Refusal(NamedTuple):
    """Why a message was refused."""

    reason: str


class Leave(NamedTuple):
    """That a site takes part in no round from this one on.

    Attributes:
        name: The site.
        round: Rounds of the phase that it did.
        signature: Of the site, over `leave_content`; empty where others say that it is gone.
    """

    name: str
    round: int
    signature: bytes


class Standing(NamedTuple):
    """How far a site came in a phase: where the phase after it may begin.

    Attributes:
        name: The site.
        plan: Digest of the phase's plan.
        run: Its name; empty where it has not begun at this site.
        rounds: Pairs of a number of rounds done, and the digest of the models after them.
        signature: Of the site, over `content`.
    """

    name: str
    plan: str
    run: bytes
    rounds: tuple[tuple[int, bytes], ...]
    signature: bytes

    @property
    def content(self) -> bytes:
        """What is signed."""
        return _packed([self.name, self.plan, self.run, [list(pair) for pair in self.rounds]])


class Word(NamedTuple):
    """What one end of an aggregation says to the other.

    Attributes:
        sender: The site.
        round: Of the phase.
        attempt: Of the round.
        nonce: Of the aggregation.
        before: Digest of all sums before this round.
        payload: A message of `dpjax.secagg.messages`.
        signature: Of the sender, over `word_content`.
    """

    sender: str
    round: int
    attempt: int
    nonce: bytes
    before: bytes
    payload: bytes
    signature: bytes


class Enrolment(NamedTuple):
    """The signed keys of all that take part, in the roster's order."""

    words: tuple[Word, ...]


class Opened(NamedTuple):
    """The sum of a round.

    Attributes:
        round: Of the phase.
        attempt: Of the round, which names the aggregator.
        before: Digest of all sums before.
        survivors: Numbers of the sites whose vectors are in it, rising.
        total: Its residues, packed.
        signature: Of the aggregator, over `opened_content`.
    """

    round: int
    attempt: int
    before: bytes
    survivors: tuple[int, ...]
    total: bytes
    signature: bytes


class Void(NamedTuple):
    """That a site has no sum of a round, and will take part in it no more.

    Attributes:
        sender: The site.
        round: Of the phase.
        before: Digest of all sums before.
        signature: Of the sender, over `void_content`.
    """

    sender: str
    round: int
    before: bytes
    signature: bytes


class Voided(NamedTuple):
    """What all sites said of a round that has no sum."""

    voids: tuple[Void, ...]


class Failed(NamedTuple):
    """That an attempt ended without a sum."""

    round: int
    attempt: int
    nonce: bytes
    reason: str


class At(NamedTuple):
    """Where a site is, which lacks the sum of that round."""

    round: int
    attempt: int


Frame: TypeAlias = (
    Greeting | Presences | RoundMessage | Receipt | Headers | Refusal
    | Word | Enrolment | Opened | Void | Voided | Failed | At | Leave | Standing | Beginnings
)  # fmt: skip
FrameT = TypeVar("FrameT", bound=Frame)
_KINDS: tuple[type, ...] = get_args(Frame)


def encoded(frame: Frame) -> bytes:
    """Return a message as bytes.

    Args:
        frame: Any of the messages.
    """
    return _packed([_KINDS.index(type(frame)), frame])


def decoded(data: bytes) -> Frame:
    """Return the message that the bytes are.

    Args:
        data: Of another site.

    Raises:
        Refused: For anything else than what `encoded` returned.
    """
    try:
        plain = library("msgpack").unpackb(data, raw=False, use_list=True, strict_map_key=True)
    except Exception as error:
        # msgpack has no common class for what it may raise.
        raise Refused(f"bytes are no message: {type(error).__name__}") from None
    if type(plain) is not list or len(plain) != 2 or type(plain[0]) is not int:
        raise Refused("bytes are no message")
    number, fields = plain
    if not 0 <= number < len(_KINDS):
        raise Refused(f"bytes are a message of kind {number}, which there is not")
    kind = _KINDS[number]
    frame = _built(kind, fields, kind.__name__)
    return cast(Frame, frame)


def message_content(run: bytes, plan: str, header: Header) -> bytes:
    """What a sender signs of a round's message.

    Args:
        run: 32 bytes.
        plan: Digest of the run's plan, which a site can tell that has not begun the run.
        header: Its signature is not read.
    """
    return _packed([run, plan, header.round, header.digest])


def leave_content(run: bytes, phase: int, round: int) -> bytes:
    """What a site signs that leaves.

    Args:
        run: 32 bytes.
        phase: Number of the plan among those of a project.
        round: Rounds that it did.
    """
    return _packed([run, phase, round])


def word_content(run: bytes, phase: int, aggregator: str, word: Word) -> bytes:
    """What a site signs of what it says in an aggregation.

    Args:
        run: 32 bytes.
        phase: Number of the plan among those of a project.
        aggregator: Of the round's attempt.
        word: Its signature is not read.
    """
    digest = hashlib.sha256(word.payload).digest()
    place = [run, phase, word.round, word.attempt, aggregator]
    return _packed([*place, word.nonce, word.before, digest])


def opened_content(run: bytes, phase: int, opened: Opened) -> bytes:
    """What an aggregator signs of a sum.

    Args:
        run: 32 bytes.
        phase: Number of the plan among those of a project.
        opened: Its signature is not read.
    """
    digest = hashlib.sha256(opened.total).digest()
    place = [run, phase, opened.round, opened.attempt]
    return _packed([*place, opened.before, list(opened.survivors), digest])


def void_content(run: bytes, phase: int, round: int, before: bytes) -> bytes:
    """What a site signs of a round without a sum.

    Args:
        run: 32 bytes.
        phase: Number of the plan among those of a project.
        round: Of the phase.
        before: Digest of all sums before.
    """
    return _packed([run, phase, round, before])


def signed_presence(
    identity: Identity, nonce: bytes, terms: Mapping[str, str], exchange: bytes = b""
) -> Presence:
    """Return a site's own presence.

    Args:
        identity: The site's.
        nonce: 32 bytes.
        terms: What it takes part in.
        exchange: Its public key for links.
    """
    bare = Presence(identity.name, nonce, exchange, tuple(sorted(terms.items())), b"")
    return bare._replace(signature=identity.sign("presence", bare.content))


def check_presence(presence: Presence, roster: Roster) -> None:
    """Refuse a presence that its site did not sign.

    Args:
        presence: Of anybody.
        roster: Names and keys.

    Raises:
        Refused: For a name that is not on the roster, another nonce, a false signature, and a key
            of low order, with which everybody agrees on the same number.
    """
    name = presence.name
    signed = name in roster and roster.verify(
        name, "presence", presence.content, presence.signature
    )
    if not signed or len(presence.nonce) != 32:
        raise Refused("a presence is not signed by the site that it names")
    if presence.exchange:
        try:
            agreed(key_pair().private, presence.exchange)
        except ValueError:
            raise Refused(f"{name} shows a key for links that is none, or of low order") from None


def signed_beginning(identity: Identity, beginning: Beginning) -> Beginning:
    """Return a beginning with its site's signature.

    Args:
        identity: The site's.
        beginning: What is signed.
    """
    return beginning._replace(signature=identity.sign("beginning", beginning.content))


def check_beginning(beginning: Beginning, roster: Roster) -> None:
    """Refuse a beginning that its site did not sign.

    Args:
        beginning: Of anybody.
        roster: Names and keys.

    Raises:
        Refused: For a false signature, and a name that is not on the roster.
    """
    if not roster.verify(beginning.name, "beginning", beginning.content, beginning.signature):
        raise Refused("a beginning is not signed by the site that it names")


def run_of(presences: Mapping[str, Presence], digest: str) -> bytes:
    """Return the name of a run: a digest of the plan, and of one nonce and key of every site.

    Args:
        presences: Of all sites, by name.
        digest: The plan's.
    """
    drawn = [[name, presences[name].nonce, presences[name].exchange] for name in sorted(presences)]
    return hashlib.sha256(_packed(["dpjax run", digest, drawn])).digest()


def _packed(plain: object) -> bytes:
    return bytes(library("msgpack").packb(plain))


_hints = functools.cache(get_type_hints)


def _built(kind: type, value: Any, place: str) -> object:
    """A value of an annotated type, whose parts are checked one by one."""
    if kind in (int, str, bytes):
        # type, not isinstance: True is an int.
        valid = type(value) is kind
        if kind is int:
            valid = valid and 0 <= value < 2**31
        if kind is str:
            valid = valid and len(value) <= _LONGEST_TEXT
        if not valid:
            raise Refused(f"{place} is no valid {kind.__name__}")
        return value
    if type(value) is not list:
        raise Refused(f"{place} is no list")
    names = getattr(kind, "_fields", None)
    if names is not None:
        hints = _hints(kind)
        if len(value) != len(names):
            raise Refused(f"{place} has {len(value)} parts, not {len(names)}")
        parts = zip(names, value, strict=True)
        return kind(*(_built(hints[name], part, f"{place}.{name}") for name, part in parts))
    inner = get_args(kind)
    if inner[-1] is Ellipsis:
        return tuple(_built(inner[0], part, place) for part in value)
    if len(value) != len(inner):
        raise Refused(f"{place} has {len(value)} parts, not {len(inner)}")
    return tuple(_built(of, part, place) for of, part in zip(inner, value, strict=True))
