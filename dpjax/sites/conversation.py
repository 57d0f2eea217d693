"""What a site says to its neighbours, what it hears from them, and what it knows by that.

`Conversation` has the messages of a run, on disk and in memory. The site's thread calls `turn`, in
which events of the channel are handled. The channel's threads ask for greetings, which are
answered under a lock.
"""

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

import jax
import numpy as np

from dpjax.plans.plan import Plan
from dpjax.protocols import Message, Tree
from dpjax.sites import wire
from dpjax.sites.channel import Channel, Event
from dpjax.sites.identity import Identity, Refused, Roster
from dpjax.sites.store import Audit, Folder, Log, MustLeave

__all__ = ()

_log = logging.getLogger("dpjax.sites")
GROUP_ITEM = "secret of the group"
"""The item of terms that members of one group compare among themselves."""
_TICK = 0.2
"""Seconds after which a waiting site looks for what else there is to do."""
_DIGEST_BYTES = 32
_LONGEST_DIGEST = 2 * _DIGEST_BYTES
_REFUSALS = 1000
"""Refusals of a neighbour that are reported one by one; later ones at each power of two."""
_PIECE = 32
"""Presences or headers of one frame, which no limit of a channel is below."""
_EVIDENCE = "evidence-"
_REMEDIES = {
    "plan": "get plan.json and plan.npz again, the same two files at both sites",
    "package version": "install one version of dpjax at all sites (dpjax --version)",
    "protocol version": "install one version of dpjax at all sites (dpjax --version)",
    GROUP_ITEM: "copy the one file that the group drew for this run",
}
"""What to do about an item of terms that differs."""
_ANEW = (
    "If the run does not start, stop all sites and start them again; if that does not help, with "
    "new folders and a plan of another seed"
)
"""What to do where two nonces of a site meet: what it said of an old folder is of another plan."""
_Terms: TypeAlias = tuple[tuple[str, str], ...]
Item = TypeVar("Item")


class Agreement(Protocol):
    """What all sites agree on, as `dpjax.sites.project.Project` has it."""

    @property
    def plan(self) -> Plan:
        """Calibrated and audited, with ``release=True``."""

    @property
    def names(self) -> tuple[str, ...]:
        """The sites, in the plan's order."""

    @property
    def roster(self) -> Roster:
        """Their public keys."""

    @property
    def seed(self) -> int:
        """Of the first models and of batches; public."""

    @property
    def digest(self) -> str:
        """Of all that the plan is made of."""

    @property
    def average_rounds(self) -> int:
        """How often sites average on after the last round, without noise."""

    def terms(self) -> Mapping[str, str]:
        """What sites compare: items, each with its digest or text."""

    def described(self) -> Mapping[str, np.ndarray]:
        """What the file of a model says beside the model: its features, say."""


@dataclass
class Neighbour:
    """What a site knows of one of its neighbours.

    Attributes:
        name: The neighbour.
        number: Its number in the plan.
        sends: Whether this site receives its messages.
        hears: Whether it receives this site's.
        met: Whether a session has been opened since this process began.
        live: Whether one is open now.
        acknowledged: The last round that it has absorbed.
        refused: How often either end refused something of the other's.
        refusal: Why the last hello failed; "" once one did not.
        turns: How often a session with it was opened or closed.
        backlog: What is to be said to it next.
    """

    name: str
    number: int
    sends: bool
    hears: bool
    met: bool = False
    live: bool = False
    acknowledged: int = -1
    refused: int = 0
    refusal: str = ""
    turns: int = 0
    backlog: deque[bytes] = field(default_factory=deque)

    def __str__(self) -> str:
        """Its name, and why it is not there."""
        return f"{self.name} ({self.refusal})" if self.refusal else self.name


class Conversation:
    """The messages of a site and of its neighbours, round by round.

    Guarantee: a message is on disk before it is handed to the channel, and it is the only one of
    its round. What is taken of other sites' messages is signed by them, for this run.

    Args:
        agreement: What all sites agree on.
        identity: This site.
        channel: To its neighbours.
        folder: Of the run.
        presence: This site's own.
        group: Names of the sites that share the secret of its noise, itself among them.
        shapes: Of a message's numbers.
        rounds: Of the run, those that only average included.

    Attributes:
        neighbours: By name.
        presences: Who takes part, by name.
        run: Its name; empty before all presences are there.
        round: Rounds absorbed.
        log: Headers of all messages that are known.
        arrived: Messages of neighbours that are not absorbed yet, by name and round.
        doubt: Why the site must leave; None where it need not.
    """

    def __init__(
        self,
        agreement: Agreement,
        identity: Identity,
        channel: Channel,
        folder: Folder,
        presence: wire.Presence,
        *,
        group: Collection[str],
        shapes: Message,
        rounds: int,
    ) -> None:
        self.name = presence.name
        self.neighbours = neighbours_of(agreement, agreement.names.index(self.name))
        self.presences = {self.name: presence}
        self.run = b""
        self.round = 0
        self.log = Log(folder)
        self.audit = Audit(folder)
        self.arrived: dict[tuple[str, int], Message] = {}
        self.doubt: str | None = None
        self._agreement = agreement
        self._identity = identity
        self._channel = channel
        self._folder = folder
        self._group = group
        self._shapes = shapes
        self._rounds = rounds
        self._guard = threading.RLock()
        # Headers that are neither on disk nor handed on, and when they were last.
        self._news: list[wire.Header] = []
        self._settled = 0.0

    def connect(self) -> None:
        """Listen and dial."""
        self._channel.open(self.greeting, self.check)

    def resume(self, begun: bytes) -> None:
        """Take up the run that the folder is of.

        Args:
            begun: The presences that name it.

        Raises:
            ValueError: For a folder of another project.
            MustLeave: For what is damaged.
        """
        presences = {entry.name: entry for entry in _whole(begun, wire.Presences, "run").presences}
        current = self.presences[self.name]
        stored = presences.get(self.name, current)
        differing = _differing(stored.terms, current.terms)
        if differing:
            raise ValueError(
                f"folder is {str(self._folder.path)!r}, of a run that differs in "
                f"{_words(differing)}; restore these, or name another folder for another project"
            )
        if stored.nonce != current.nonce or set(presences) != set(self._agreement.names):
            raise MustLeave(f"{self._folder.path} is not of one run; this site must leave")
        self.presences = presences
        self.run = wire.run_of(presences, self._agreement.digest)

    def recall(self, round: int) -> None:
        """Note what an earlier process of this run has stored.

        Args:
            round: Rounds absorbed.

        Raises:
            MustLeave: For what is damaged, or proves that somebody sent two messages.
        """
        self.round = round
        names = self._folder.names("sent")
        for name in names:
            message = self._stored(name)
            self._note(message.header(self.name))
            if message.round < round - 1:
                self._folder.delete(f"sent/{name}")
        if round == self._rounds and str(round - 1) not in names:
            # All had absorbed it: this site was done.
            for peer in self.neighbours.values():
                peer.acknowledged = round - 1
        for name in self._folder.names("."):
            if name.startswith(_EVIDENCE) and round < self._rounds:
                first, _ = _whole(self._folder.read(name), wire.Headers, name).headers
                raise MustLeave(self._accusation(first))

    # This site's messages.

    def stored(self) -> wire.RoundMessage | None:
        """The message of this round, where there is one.

        Raises:
            MustLeave: Where it is damaged, or known to be out though it is gone.
        """
        name = str(self.round)
        if name in self._folder.names("sent"):
            return self._stored(name)
        self._check_first()
        return None

    def store(self, numbers: Tree) -> wire.RoundMessage:
        """Put a message on disk, from where alone it is sent; from now on its round is spent.

        Args:
            numbers: Of the message.
        """
        bare = wire.RoundMessage(self.round, _bytes_of(numbers), b"")
        header = bare.header(self.name)
        to_sign = wire.message_content(self.run, self._agreement.digest, header)
        message = bare._replace(signature=self._identity.sign("message", to_sign))
        with self._guard:
            self._check_first()
            self._folder.create(f"sent/{self.round}", wire.encoded(message))
            # The payload's digest was computed for the signature.
            self._note(header._replace(signature=message.signature))
        self.audit.note("stored", round=self.round, digest=header.digest.hex())
        return message

    def send(self, message: wire.RoundMessage) -> None:
        """Send a message to all who hear this site; who comes later is welcomed with it.

        Args:
            message: One that is stored.

        Raises:
            MustLeave: Where somebody else was found to send as this site, since it was computed.
        """
        if self.doubt is not None:
            raise MustLeave(self.doubt)
        data = wire.encoded(message)
        for peer in self.neighbours.values():
            if peer.hears and peer.live and peer.acknowledged < message.round:
                peer.backlog.append(data)
        self.flush()

    def numbers(self, message: wire.RoundMessage) -> Message:
        """The numbers of a message, all finite.

        Args:
            message: Of anybody.

        Raises:
            Refused: For other shapes, and for what is not finite.
        """
        leaves, structure = jax.tree.flatten(self._shapes)
        sizes = [leaf.size * leaf.dtype.itemsize for leaf in leaves]
        if len(message.payload) != sum(sizes):
            raise Refused(f"round {message.round} has {len(message.payload)} bytes")
        opened = []
        for leaf, end, size in zip(leaves, np.cumsum(sizes), sizes, strict=True):
            part = message.payload[end - size : end]
            values = np.frombuffer(part, np.dtype(leaf.dtype).newbyteorder("<"))
            values = values.astype(leaf.dtype).reshape(leaf.shape)
            if not np.isfinite(values).all():
                raise Refused(f"round {message.round} has numbers that are not finite")
            opened.append(values)
        return jax.tree.unflatten(structure, opened)

    def absorbed(self) -> None:
        """Go on to the next round: the state after this one is on disk."""
        done = self.round
        self.round += 1
        # All have absorbed the message before this round's, which a new session may still need.
        self._folder.delete(f"sent/{done - 1}")
        for peer in self.neighbours.values():
            if peer.sends:
                del self.arrived[peer.name, done]
            self._acknowledge(peer, done)
        self.flush()

    def end(self) -> None:
        """Let go of the last message, once all who need it have absorbed it."""
        if not self.behind():
            self._folder.delete(f"sent/{self.round - 1}")
        self.flush()
        for peer in self.neighbours.values():
            peer.live = False

    # What is waited for.

    def missing(self) -> list[str]:
        """Who has not sent this round's message, or not absorbed that of the round before."""
        texts = []
        for peer in self.neighbours.values():
            if peer.sends and (peer.name, self.round) not in self.arrived:
                texts.append(f"the message of {peer}")
            if peer.hears and peer.acknowledged < self.round - 1:
                texts.append(f"the receipt of {peer}")
        return texts

    def behind(self) -> list[str]:
        """Who has not absorbed the last round."""
        return [
            peer.name for peer in self.neighbours.values() if peer.acknowledged < self.round - 1
        ]

    def absent(self) -> list[str]:
        """Who has not shown that it takes part."""
        return [name for name in self._agreement.names if name not in self.presences]

    def unmet(self) -> list[str]:
        """With whom no session was opened yet."""
        return [f"a session with {peer}" for peer in self.neighbours.values() if not peer.met]

    def turn(self) -> None:
        """Handle an event, or what waited for a quiet moment, and say what is to be said."""
        event = self._channel.receive(_TICK)
        if event is not None:
            self.handle(event)
        if event is None or time.monotonic() > self._settled + 1:
            self.settle()
        # Others would wait for what was heard last until this site has computed its next round.
        self.flush()

    def flush(self) -> None:
        """Say what is to be said, as far as sessions take it."""
        for peer in self.neighbours.values():
            while peer.backlog and self._channel.send(peer.name, peer.backlog[0]):
                peer.backlog.popleft()

    def settle(self) -> None:
        """Put new headers on disk, and hand them on: so two messages of one round meet."""
        self._settled = time.monotonic()
        with self._guard:
            news = self._news
            self._news = []
            self.log.keep(news)
        for peer in self.neighbours.values():
            if peer.live:
                others = [header for header in news if header.sender not in (self.name, peer.name)]
                peer.backlog.extend(_pieces(wire.Headers, others))

    # What is heard.

    def handle(self, event: Event) -> None:
        """Handle an event of the channel.

        Args:
            event: Any.
        """
        peer = self.neighbours.get(event.peer)
        if peer is None:
            return
        with self._guard:
            if event.kind == "opened":
                peer.live = peer.met = True
                peer.refusal = ""
                _report_turn(peer, "open")
                self._welcome(peer)
            elif event.kind == "closed":
                peer.live = False
                _report_turn(peer, f"closed: {event.reason}")
                peer.backlog.clear()
            elif event.kind == "message":
                try:
                    self._take(peer, wire.decoded(event.data))
                except Refused as refusal:
                    self._refuse(peer, str(refusal))
            else:
                # A hello that either end refused: of another run, say. The channel has logged it.
                peer.refusal = event.reason
                if event.kind == "refused" and _is_new_refusal(peer):
                    self.audit.note("hello refused", peer=peer.name, reason=event.reason)

    def _refuse(self, peer: Neighbour, reason: str) -> None:
        """Say what was refused: here, there and in the audit file."""
        if not _is_new_refusal(peer):
            return
        text = f"{self.name} refuses what {peer.name} sent: {reason}"
        _log.warning("%s", text)
        self.audit.note("refused", peer=peer.name, reason=reason, number=peer.refused)
        peer.backlog.append(wire.encoded(wire.Refusal(text)))

    def _welcome(self, peer: Neighbour) -> None:
        """Say to a new session what the last one may have lost."""
        peer.backlog.clear()
        peer.backlog.extend(_pieces(wire.Presences, self.presences.values()))
        if not self.run:
            return
        recent = [header for header in self.log if header.round >= self.round - 1]
        peer.backlog.extend(_pieces(wire.Headers, recent))
        for round in (self.round - 1, self.round):
            content = self._folder.read(f"sent/{round}")
            if peer.hears and content is not None and peer.acknowledged < round:
                peer.backlog.append(content)
        if not peer.sends and self.log.get(self.name, self.round - 1) is not None:
            self._acknowledge(peer, self.round - 1)

    def _take(self, peer: Neighbour, frame: wire.Frame) -> None:
        """What a neighbour says."""
        if isinstance(frame, wire.Presences):
            self._take_presences(peer, frame)
        elif isinstance(frame, wire.Refusal):
            if _is_new_refusal(peer):
                # As a refusal of one's own: no control characters, one line.
                _log.warning("%s: %s", peer.name, Refused(frame.reason))
        elif not self.run:
            raise Refused("the run has not begun here")
        elif isinstance(frame, wire.RoundMessage):
            self._take_message(peer, frame)
        elif isinstance(frame, wire.Receipt):
            header = self.log.get(self.name if peer.hears else peer.name, frame.round)
            if header is None or header.digest != frame.digest:
                raise Refused(f"a receipt of round {frame.round} for what this site did not send")
            peer.acknowledged = max(peer.acknowledged, frame.round)
        elif isinstance(frame, wire.Headers):
            if len(frame.headers) > _PIECE:
                raise Refused(f"{len(frame.headers)} headers of one frame, more than {_PIECE}")
            for header in frame.headers:
                self._take_header(header)
        else:
            raise Refused("a greeting after the hello")

    def _take_presences(self, peer: Neighbour, frame: wire.Presences) -> None:
        """Learn who takes part; with the last presence the run has a name."""
        new: dict[str, wire.Presence] = {}
        for presence in frame.presences:
            earlier = self.presences.get(presence.name) or new.get(presence.name)
            if earlier is None:
                wire.check_presence(presence, self._agreement.roster)
                self._compare(presence)
                new[presence.name] = presence
            elif earlier.content != presence.content:
                raise Refused(f"{presence.name} has begun twice, with two folders. {_ANEW}")
        # All of a frame or nothing: what is taken is handed on.
        self.presences |= new
        for other in self.neighbours.values():
            if other is not peer and other.live:
                other.backlog.extend(_pieces(wire.Presences, new.values()))
        if not self.run and not self.absent():
            presences = tuple(self.presences[name] for name in self._agreement.names)
            self._folder.create("run", wire.encoded(wire.Presences(presences)))
            self.run = wire.run_of(self.presences, self._agreement.digest)
            self.audit.note("begun", run=self.run.hex(), plan=self._agreement.digest)

    def _compare(self, presence: wire.Presence) -> None:
        """Refuse a site that takes part in something else."""
        own = self.presences[self.name]
        theirs = presence.terms
        mine = own.terms
        if presence.name not in self._group:
            # Each group has a secret of its own.
            theirs = _without_group(theirs)
            mine = _without_group(mine)
        # One item of a group's, however long its terms are: all sites keep them and hand them on.
        if theirs != mine or len(presence.terms) > len(mine) + 1:
            items = _differing(theirs, mine) or ["way in which terms are written"]
            # All else follows from it.
            items = ["plan"] if "plan" in items else items
            remedy = _REMEDIES.get(items[0], "give the same at all sites")
            raise Refused(f"{presence.name} and {self.name} differ in {_words(items)}; {remedy}")
        if bool(presence.exchange) != bool(own.exchange):
            raise Refused(f"{presence.name} differs in whether it shows a key for links")

    def _take_message(self, peer: Neighbour, message: wire.RoundMessage) -> None:
        """Keep a neighbour's message until it is absorbed; once it is, acknowledge it again."""
        header = message.header(peer.name)
        if not peer.sends or not self._is_signed(header):
            raise Refused(f"round {message.round} is not signed for this run, or on no link of it")
        earlier = self.log.get(peer.name, message.round)
        if earlier is not None and earlier.digest != header.digest:
            self._accuse(earlier, header)
        if message.round < self.round:
            if earlier is None:
                raise Refused(f"round {message.round}, which this site never had")
            self._acknowledge(peer, message.round)
            return
        # A neighbour may be one round ahead, and no more.
        if message.round > self.round + 1 or message.round >= self._rounds:
            raise Refused(f"round {message.round} in round {self.round}")
        if message.round > self.round and (peer.name, self.round) not in self.arrived:
            # It keeps a message until all have absorbed it, and sends it first.
            raise Refused(
                f"round {message.round}, so that somebody acknowledged round {self.round} as "
                f"{self.name}, which lacks it: its folder was restored, or has a copy that runs"
            )
        if (peer.name, message.round) not in self.arrived:
            self.arrived[peer.name, message.round] = self.numbers(message)
            self._note(header)

    def _acknowledge(self, peer: Neighbour, round: int) -> None:
        """Say that a message is absorbed, once, however often it came before that is said.

        Who does not send hears of this site's own: until then it stays, whose receipts are needed.
        """
        header = self.log.get(peer.name if peer.sends else self.name, round)
        assert header is not None
        receipt = wire.encoded(wire.Receipt(round, header.digest))
        if receipt not in peer.backlog:
            peer.backlog.append(receipt)

    def _take_header(self, header: wire.Header) -> None:
        """Note what somebody sent to others; two of one round prove that it sent both."""
        earlier = self.log.get(header.sender, header.round)
        if earlier is not None and earlier.digest == header.digest:
            return
        if header.round >= self._rounds or not self._is_signed(header):
            raise Refused(f"a header of {header.sender!r} is not signed for this run")
        if header.sender == self.name:
            self.doubt = self._foreign(header, "a neighbour")
            return
        # No site is further ahead than links lie between; others would fill memory.
        if header.round > self.round + len(self._agreement.names):
            return
        if earlier is not None:
            self._accuse(earlier, header)
        self._note(header)

    def _note(self, header: wire.Header) -> None:
        if self.log.get(header.sender, header.round) is None:
            self.log.note(header)
            self._news.append(header)

    def _accuse(self, first: wire.Header, second: wire.Header) -> None:
        """Stop: a site sent two messages in one round, and its signatures prove it."""
        name = f"{_EVIDENCE}{first.sender}-{first.round}"
        content = wire.encoded(wire.Headers((first, second)))
        if self._folder.read(name) is None:
            self._folder.create(name, content)
        for other in self.neighbours.values():
            other.backlog.append(content)
        self.flush()
        self.doubt = self._accusation(first)
        # Paths of this machine are nothing to others.
        raise Refused(_fault_of(first))

    def _accusation(self, header: wire.Header) -> str:
        """Why a site stops that has the evidence."""
        place = self._folder.path / f"{_EVIDENCE}{header.sender}-{header.round}"
        return f"{_fault_of(header)}. {place} has both signatures. Go on without it"

    # The hello, in the channel's threads.

    def greeting(self, peer: str) -> bytes:
        """This site's part of a hello.

        Args:
            peer: To whom.
        """
        with self._guard:
            last = self.log.last(peer)
            shown = () if last is None else (last,)
            return wire.encoded(wire.Greeting(self.presences[self.name], self.run, shown))

    def check(self, peer: str, data: bytes) -> str | None:
        """Why a neighbour's part of a hello is refused; None where it is not.

        Args:
            peer: Its name.
            data: What it says.
        """
        try:
            frame = wire.decoded(data)
            if not isinstance(frame, wire.Greeting) or frame.presence.name != peer:
                raise Refused("the hello has no greeting")
            wire.check_presence(frame.presence, self._agreement.roster)
            with self._guard:
                self._compare(frame.presence)
                self._check_greeting(peer, frame)
        except Refused as refusal:
            return str(refusal)
        return None

    def _check_greeting(self, peer: str, greeting: wire.Greeting) -> None:
        """Refuse another run, and stop where a neighbour has what this folder lacks."""
        earlier = self.presences.get(peer)
        if earlier is not None and earlier.nonce != greeting.presence.nonce:
            raise Refused(
                f"{peer} began again with another folder, whose noise would be another; it must "
                f"leave a run that has begun. {_ANEW}"
            )
        if self.run and greeting.run and greeting.run != self.run:
            raise Refused(f"{peer} is in another run. {_ANEW}")
        for header in greeting.shown:
            noted_header = self.log.get(self.name, header.round)
            if noted_header is not None and noted_header.digest == header.digest:
                continue
            # A site that has no run yet did not sign in one, unless it lost its folder.
            if header.sender != self.name or not self._is_signed(header, greeting.run):
                raise Refused(f"{peer} shows a message that {self.name} did not sign for this plan")
            self.doubt = self._foreign(header, peer)
            raise Refused(self.doubt)

    def _foreign(self, header: wire.Header, holder: str) -> str:
        """Why a site must leave whose signature is on what its folder does not have."""
        if not self.run:
            return (
                f"this folder is new, and {holder} has a message of {self.name} in round "
                f"{header.round} of a run: {self.name} lost its folder, or restored it from a "
                "backup, and must leave"
            )
        return (
            f"{holder} has a message of {self.name} in round {header.round} that this folder "
            "lacks: it was restored from a backup, or somebody runs a copy of it. "
            f"{self.name} must leave"
        )

    # The folder.

    def _stored(self, name: str) -> wire.RoundMessage:
        """A message of a file of the folder, whose signature still holds."""
        frame = _whole(self._folder.read(f"sent/{name}"), wire.RoundMessage, f"sent/{name}")
        if name != str(frame.round) or not self._is_signed(frame.header(self.name)):
            raise MustLeave(
                f"{self._folder.path / 'sent' / name} is damaged, and may be out already; this "
                "site must leave"
            )
        return frame

    def _check_first(self) -> None:
        """Leave where this round, or any after it, has a message that is known here."""
        last = self.log.last(self.name)
        if last is not None and last.round >= self.round:
            raise MustLeave(
                f"round {last.round} of this folder was sent already, and what round "
                f"{self.round} sent is gone; this site must leave"
            )

    def _is_signed(self, header: wire.Header, run: bytes = b"") -> bool:
        content = wire.message_content(run or self.run, self._agreement.digest, header)
        # A digest of another length is signed as well, and everybody would keep it.
        if len(header.digest) != _DIGEST_BYTES:
            return False
        return self._agreement.roster.verify(header.sender, "message", content, header.signature)


def neighbours_of(agreement: Agreement, site: int) -> dict[str, Neighbour]:
    """Who sends to a site, and who receives from it, by name.

    Args:
        agreement: What all sites agree on.
        site: The site's number.
    """
    senders = agreement.plan.senders
    neighbours = {}
    for number, name in enumerate(agreement.names):
        sends = number in senders[site]
        hears = site in senders[number]
        if sends or hears:
            neighbours[name] = Neighbour(name, number, sends, hears)
    return neighbours


def digest_of(numbers: Tree) -> str:
    """SHA-256, hex, of the numbers of a tree.

    Args:
        numbers: Arrays.
    """
    return hashlib.sha256(_bytes_of(numbers)).hexdigest()


def _bytes_of(numbers: Tree) -> bytes:
    """The numbers of a tree, little-endian, leaf after leaf."""
    parts = []
    for leaf in jax.tree.leaves(numbers):
        array = np.asarray(leaf)
        parts.append(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return b"".join(parts)


def _is_reported(count: int) -> bool:
    """Whether the so-manieth event of a kind is reported: the first ones, then powers of two."""
    return count <= _REFUSALS or count.bit_count() == 1


def _report_turn(peer: Neighbour, state: str) -> None:
    """Say that a session began or ended; of one that comes and goes not each time."""
    peer.turns += 1
    if _is_reported(peer.turns):
        _log.info("session with %s %s", peer.name, state)


def _is_new_refusal(peer: Neighbour) -> bool:
    """Whether one more refusal is reported: a flood of them fills no disk and no memory."""
    peer.refused += 1
    return _is_reported(peer.refused)


def _fault_of(header: wire.Header) -> str:
    """What two messages of one round prove."""
    return (
        f"{header.sender} sent two messages in round {header.round}: its folder was copied or "
        "restored, and its records are not protected as stated"
    )


def _without_group(terms: _Terms) -> _Terms:
    return tuple(term for term in terms if term[0] != GROUP_ITEM or len(term[1]) > _LONGEST_DIGEST)


def _differing(theirs: _Terms, mine: _Terms) -> list[str]:
    """The items of terms that differ."""
    first = dict(theirs)
    second = dict(mine)
    return [item for item in {**second, **first} if first.get(item) != second.get(item)]


def _words(items: list[str]) -> str:
    return " and ".join(f"the {item}" for item in items)


def _whole(content: bytes | None, kind: type[wire.FrameT], name: str) -> wire.FrameT:
    """What a file of the site's own says."""
    try:
        frame = wire.decoded(content or b"")
    except Refused as refusal:
        raise MustLeave(f"{name} is damaged ({refusal}); this site must leave") from None
    if not isinstance(frame, kind):
        raise MustLeave(f"{name} is damaged; this site must leave")
    return frame


def _pieces(kind: Callable[[tuple[Item, ...]], wire.Frame], items: Iterable[Item]) -> list[bytes]:
    """Frames that say all items, each within a channel's limit."""
    parts = tuple(items)
    starts = range(0, len(parts), _PIECE)
    return [wire.encoded(kind(parts[start : start + _PIECE])) for start in starts]
