"""How sites meet: who takes part, the sessions with neighbours, and what is said over them.

`Meeting` is what every run of sites has in common; what its rounds say is for a subclass. The
site's thread calls `turn`, in which events of the channel are handled. The channel's threads ask
for greetings, which are answered under a lock.
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
from dpjax.plans.protect import Budget
from dpjax.protocols import Tree
from dpjax.sites import wire
from dpjax.sites.channel import Channel, Event
from dpjax.sites.identity import Identity, Refused, Roster
from dpjax.sites.ledger import Ledger, beginning_of
from dpjax.sites.store import Audit, Folder, MustLeave

__all__ = ()

_log = logging.getLogger("dpjax.sites")
GROUP_ITEM = "secret of the group"
"""The item of terms that members of one group compare among themselves."""
_TICK = 0.2
"""Seconds after which a waiting site looks for what else there is to do."""
_LONGEST_DIGEST = 64
_REFUSALS = 1000
"""Refusals of a neighbour that are reported one by one; later ones at each power of two."""
LEFT = "left-"
"""How the names of files begin that have the word of a site that left."""
PIECE = 32
"""Presences or headers of one frame, which no limit of a channel is below."""
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

    @property
    def spoiled(self) -> int:
        """Rounds without a sum after which sites that add up stop."""

    @property
    def phase(self) -> int:
        """Number of the plan among those of a project, from 0."""

    @property
    def totals(self) -> Mapping[str, Budget]:
        """What each site may spend in all phases, by name; empty where the plan has none."""

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
        absent: Since when there has been no session, in seconds of a clock that runs evenly.
        knows: Of whom it said that they take part no more.
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
    absent: float = field(default_factory=time.monotonic)
    knows: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        """Its name, and why it is not there."""
        return f"{self.name} ({self.refusal})" if self.refusal else self.name


class Meeting:
    """Who takes part in a run, and the sessions of a site with its neighbours.

    Guarantee: a run has a name, which follows from the plan and from one nonce of every site, once
    all sites have shown that they take part in the same. Presences are signed by their sites.

    Args:
        agreement: What all sites agree on.
        identity: This site.
        channel: To its neighbours.
        folder: Of the run.
        presence: This site's own.
        group: Names of the sites that share the secret of its noise, itself among them.
        neighbours: By name, whom it says and hears something.

    Attributes:
        neighbours: By name.
        presences: Who takes part, by name.
        run: Its name; empty before all presences are there.
        round: Rounds absorbed.
        audit: What the site did.
        doubt: Why the site must leave; None where it need not.
        departed: Who takes part no more, by name.
        ledger: Of the site; None where there is none.
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
        neighbours: dict[str, Neighbour],
    ) -> None:
        self.name = presence.name
        self.neighbours = neighbours
        self.presences = {self.name: presence}
        self.run = b""
        self.round = 0
        self.audit = Audit(folder)
        self.doubt: str | None = None
        self.departed: dict[str, wire.Leave] = {}
        self.ledger: Ledger | None = None
        self._beginnings: dict[str, wire.Beginning] = {}
        self._agreement = agreement
        self._identity = identity
        self._channel = channel
        self._folder = folder
        self._group = group
        self._guard = threading.RLock()

    # What the rounds of a subclass say.

    @property
    def sent(self) -> int:
        """Rounds whose message or vector may be out."""
        raise NotImplementedError

    def recall(self, round: int) -> None:
        """Note what an earlier process of this run has stored.

        Args:
            round: Rounds absorbed.

        Raises:
            MustLeave: For what is damaged, or proves that somebody sent two messages.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """Put on disk what was heard."""

    def behind(self) -> list[str]:
        """Who has not absorbed the last round that this site has."""
        raise NotImplementedError

    def end(self) -> None:
        """Say what is left to be said: the rounds are over."""
        self.flush()
        for peer in self.neighbours.values():
            peer.live = False

    def welcome(self, peer: Neighbour) -> None:
        """Say to a new session what the last one may have lost of the run.

        Args:
            peer: Whose session was opened.
        """

    def begun(self) -> None:
        """The run has a name."""

    def parted(self, peer: Neighbour) -> None:
        """A session has ended.

        Args:
            peer: Whose.
        """

    def take(self, peer: Neighbour, frame: wire.Frame) -> None:
        """Take what a neighbour says of the run, which has begun.

        Args:
            peer: Who says it.
            frame: What.

        Raises:
            Refused: For what does not belong here.
        """
        raise Refused("a greeting after the hello")

    def idle(self, is_quiet: bool) -> None:
        """Do what waits for a quiet moment.

        Args:
            is_quiet: Whether no event came.
        """

    def shown(self, peer: str) -> tuple[wire.Header, ...]:
        """The last of the other end's that this site has, for the hello.

        Args:
            peer: The other end.
        """
        return ()

    def shown_keys(self, peer: str) -> tuple[wire.Word, ...]:
        """The last keys of the other end that this site has seen, for the hello.

        Args:
            peer: The other end.
        """
        return ()

    def check_shown(self, peer: str, greeting: wire.Greeting) -> None:
        """Refuse, and stop, where a neighbour has what this folder lacks.

        Args:
            peer: The neighbour.
            greeting: What it says.
        """

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
        presences = {entry.name: entry for entry in whole(begun, wire.Presences, "run").presences}
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
        self._begin()
        self.run = self._beginnings[self.name].run
        if self.ledger is not None:
            self._beginnings |= {kept.name: kept for kept in self.ledger.kept(self.run)}
        for name in self._folder.names("."):
            if name.startswith(LEFT):
                leave = whole(self._folder.read(name), wire.Leave, name)
                self.departed[leave.name] = leave

    # Who takes part no more.

    @property
    def spare(self) -> int:
        """How many sites may take part no more, so that the run goes on."""
        return 0

    def ended(self, is_stuck: bool) -> str | None:
        """Why the run has ended before its last round; None where it has not.

        Args:
            is_stuck: Whether this site has waited for longer than anybody should.
        """
        if len(self.departed) <= (0 if is_stuck else self.spare):
            return None
        texts = []
        for name, leave in self.departed.items():
            if leave.signature:
                texts.append(f"{name} left in order, after {leave.round} rounds")
            else:
                texts.append(f"{name} is gone (start this site again to wait for it)")
        return (
            f"{', and '.join(texts)}: this run has ended. To go on without, give your "
            "coordinator what dpjax site standing writes; see 'A site leaves' of the manual"
        )

    def leave(self) -> None:
        """Say to all that this site takes part no more."""
        content = wire.leave_content(self.run, self._agreement.phase, self.round)
        signature = self._identity.sign("leave", content)
        with self._guard:
            self.depart(wire.Leave(self.name, self.round, signature))

    def give_up(self, silence: float) -> None:
        """Say of neighbours without a session for so long that they are gone.

        Args:
            silence: Seconds.
        """
        with self._guard:
            for peer in self.neighbours.values():
                is_silent = not peer.live and time.monotonic() - peer.absent > silence
                if is_silent and peer.name not in self.departed:
                    self.depart(wire.Leave(peer.name, self.round, b""))

    def untold(self) -> list[str]:
        """Who has not said that it knows who takes part no more."""
        stay = [peer for peer in self.neighbours.values() if peer.name not in self.departed]
        return [peer.name for peer in stay if self.departed.keys() - peer.knows]

    def depart(self, leave: wire.Leave) -> None:
        """Note that a site takes part no more, and say so.

        Args:
            leave: Its word, which was checked, or nobody's.
        """
        earlier = self.departed.get(leave.name)
        if earlier is not None and _rank(earlier) <= _rank(leave):
            return
        if leave.signature:
            self._folder.replace(f"{LEFT}{leave.name}", wire.encoded(leave))
        self.departed[leave.name] = leave
        self.audit.note("departed", site=leave.name, round=leave.round)
        if leave.name != self.name:
            how = "has left in order" if leave.signature else "is gone"
            _log.warning("%s %s, after %d rounds", leave.name, how, leave.round)
        self._hand_on([wire.encoded(leave)])

    def _take_leave(self, peer: Neighbour, leave: wire.Leave) -> None:
        """Learn that a site takes part no more: by its word, or since others do not reach it."""
        name = leave.name
        if leave.signature:
            content = wire.leave_content(self.run, self._agreement.phase, leave.round)
            if not self._agreement.roster.verify(name, "leave", content, leave.signature):
                raise Refused(f"word that {name!r} leaves, which it did not sign")
        else:
            direct = self.neighbours.get(name)
            is_here = name == self.name or (direct is not None and direct.live)
            if is_here or name not in self._agreement.names:
                raise Refused(f"word that {name!r} is gone, which is here, or is no site")
        if name == self.name and name not in self.departed:
            self.doubt = (
                f"{peer.name} has word of {name} that it leaves, which this folder lacks: it was "
                f"restored from a backup, or is a copy. {name} must leave"
            )
            raise Refused(self.doubt)
        peer.knows.add(name)
        self.depart(leave)

    # What is waited for.

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
        self.idle(event is None)
        # Others would wait for what was heard last until this site has computed its next round.
        self.flush()

    def flush(self) -> None:
        """Say what is to be said, as far as sessions take it."""
        for peer in self.neighbours.values():
            while peer.backlog and self._channel.send(peer.name, peer.backlog[0]):
                peer.backlog.popleft()

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
                leave = self.departed.get(peer.name)
                if leave is not None and not leave.signature:
                    # It is back.
                    del self.departed[peer.name]
                _report_turn(peer, "open")
                self._welcome(peer)
            elif event.kind == "closed":
                peer.live = False
                peer.absent = time.monotonic()
                self.parted(peer)
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
        peer.backlog.extend(pieces(wire.Presences, self.presences.values()))
        peer.backlog.extend(pieces(wire.Beginnings, self._beginnings.values()))
        peer.backlog.extend(wire.encoded(leave) for leave in self.departed.values())
        if self.run:
            self.welcome(peer)

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
        elif isinstance(frame, wire.Beginnings):
            self._take_beginnings(peer, frame)
        elif isinstance(frame, wire.Leave):
            self._take_leave(peer, frame)
        elif peer.name not in self._beginnings:
            # Once its ledger is lost, this site could not show that it has sent something.
            raise Refused(f"{peer.name} has not signed that the run has begun there")
        else:
            self.take(peer, frame)

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
        self._hand_on(pieces(wire.Presences, new.values()), peer)
        if not self.run and not self.absent():
            presences = tuple(self.presences[name] for name in self._agreement.names)
            self._begin()
            self._folder.create("run", wire.encoded(wire.Presences(presences)))
            self.run = self._beginnings[self.name].run
            self.audit.note("begun", run=self.run.hex(), plan=self._agreement.digest)
            self._hand_on(pieces(wire.Beginnings, [self._beginnings[self.name]]))
            self.begun()

    def _begin(self) -> None:
        """Charge the run before anything goes out, and sign that it begins."""
        bare = beginning_of(self.presences, self.name)
        if self.ledger is not None:
            self.ledger.charge(bare)
        self._beginnings[self.name] = wire.signed_beginning(self._identity, bare)

    def _take_beginnings(self, peer: Neighbour, frame: wire.Beginnings) -> None:
        """Learn that the run has begun at some sites, and keep their word for it."""
        new = [entry for entry in frame.beginnings if entry.name not in self._beginnings]
        own = self._beginnings[self.name]
        for beginning in new:
            presence = self.presences.get(beginning.name)
            if presence is None or beginning != own._replace(
                name=presence.name, nonce=presence.nonce, signature=beginning.signature
            ):
                raise Refused(f"word that another run has begun at {beginning.name!r}")
            wire.check_beginning(beginning, self._agreement.roster)
        for beginning in new:
            if self.ledger is not None:
                self.ledger.keep(beginning)
            self._beginnings[beginning.name] = beginning
        self._hand_on(pieces(wire.Beginnings, new), peer)

    def _hand_on(self, frames: list[bytes], source: Neighbour | None = None) -> None:
        """Say something to all who are here, but to whom it came from."""
        for peer in self.neighbours.values():
            if peer is not source and peer.live:
                peer.backlog.extend(frames)

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
            remedy = _REMEDIES.get(items[0], "give the same at all sites")
            words = _words(items)
            if "plan" in items:
                # All else follows from it.
                digests = [dict(terms).get("plan", "")[:16] for terms in (theirs, mine)]
                words = f"the plan, {' and '.join(digests)}" if all(digests) else "the plan"
                remedy = _REMEDIES["plan"]
            raise Refused(f"{presence.name} and {self.name} differ in {words}; {remedy}")
        if bool(presence.exchange) != bool(own.exchange):
            raise Refused(f"{presence.name} differs in whether it shows a key for links")

    # The hello, in the channel's threads.

    def greeting(self, peer: str) -> bytes:
        """This site's part of a hello.

        Args:
            peer: To whom.
        """
        with self._guard:
            charges = () if self.ledger is None else self.ledger.shown(peer)
            shown = self.shown(peer), self.shown_keys(peer), charges
            return wire.encoded(wire.Greeting(self.presences[self.name], self.run, *shown))

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
                try:
                    # It counts also where the hello is refused.
                    self._take_charges(peer, frame)
                finally:
                    # That two plans differ says more than what it showed of another one.
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
        self.check_shown(peer, greeting)

    def _take_charges(self, peer: str, greeting: wire.Greeting) -> None:
        """Charge what a neighbour shows, and stop where that cannot be."""
        if self.ledger is not None:
            try:
                self.ledger.take(peer, greeting.charges)
            except MustLeave as error:
                self.doubt = str(error)
                raise Refused(self.doubt) from None


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
    return hashlib.sha256(bytes_of(numbers)).hexdigest()


def bytes_of(numbers: Tree) -> bytes:
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


def _without_group(terms: _Terms) -> _Terms:
    return tuple(term for term in terms if term[0] != GROUP_ITEM or len(term[1]) > _LONGEST_DIGEST)


def _differing(theirs: _Terms, mine: _Terms) -> list[str]:
    """The items of terms that differ."""
    first = dict(theirs)
    second = dict(mine)
    return [item for item in {**second, **first} if first.get(item) != second.get(item)]


def _words(items: list[str]) -> str:
    return " and ".join(f"the {item}" for item in items)


def _rank(leave: wire.Leave) -> tuple[bool, int]:
    """Which word of one site stands: a signed one, of the earliest round, the same everywhere."""
    return not leave.signature, leave.round if leave.signature else 0


def whole(content: bytes | None, kind: type[wire.FrameT], name: str) -> wire.FrameT:
    """What a file of the site's own says."""
    try:
        frame = wire.decoded(content or b"")
    except Refused as refusal:
        raise MustLeave(f"{name} is damaged ({refusal}); this site must leave") from None
    if not isinstance(frame, kind):
        raise MustLeave(f"{name} is damaged; this site must leave")
    return frame


def pieces(kind: Callable[[tuple[Item, ...]], wire.Frame], items: Iterable[Item]) -> list[bytes]:
    """Frames that say all items, each within a channel's limit."""
    parts = tuple(items)
    starts = range(0, len(parts), PIECE)
    return [wire.encoded(kind(parts[start : start + PIECE])) for start in starts]
