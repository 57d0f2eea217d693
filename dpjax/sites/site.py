"""One process a site: it computes, stores, sends, receives and absorbs, round by round.

`Site` is the loop. It is one thread, which alone writes to the folder; the channel's threads ask it
for greetings, which it answers under a lock. What is sent is on disk before; what is received is on
disk before its receipt goes out. The page 'Sites: the threat model and a round' of the manual has
the states of a round, and what a kill leaves at each.
"""

import contextlib
import hashlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

from dpjax import _files, _validate
from dpjax.accounting import parties
from dpjax.engine.result import Progress
from dpjax.engine.step import NOT_FINITE, Metrics, Outgoing
from dpjax.learning.problem import Problem
from dpjax.plans import calibration
from dpjax.plans.calibration import ByFactor
from dpjax.plans.plan import Plan
from dpjax.protocols import Message, Models, State, Tree
from dpjax.secagg.primitives import derived, key_pair
from dpjax.sites import wire
from dpjax.sites.channel import Channel, Event
from dpjax.sites.compute import SiteRounds, Stored
from dpjax.sites.identity import Identity, Refused, Roster
from dpjax.sites.noise import SiteNoise, of_pair
from dpjax.sites.store import Audit, Damaged, Folder, Log

__all__ = ["MustLeave", "Site"]

_log = logging.getLogger("dpjax.sites")
_TICK = 0.2
"""Seconds after which a waiting site looks for what else there is to do."""
_DIGEST_BYTES = 32
_REFUSALS = 1000
"""Refusals of a neighbour that are reported one by one; later ones at each power of two."""
_ROUNDS_TOLD = 10
"""Rounds of which one is told in the log."""
_PIECE = 32
"""Presences or headers of one frame, which no limit of a channel is below."""
_Presences: TypeAlias = dict[str, wire.Presence]


class MustLeave(ValueError):
    """The site cannot go on without the danger of sending a round twice; nothing was sent.

    Example:
        >>> from dpjax.sites.site import MustLeave
        >>> issubclass(MustLeave, ValueError)
        True
    """


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


@dataclass(frozen=True)
class Waits:
    """How long a site waits, in seconds.

    Attributes:
        late: After this long, who is waited for is named in the log, again and again.
        linger: How long a site that is done stays for those that are not.

    Example:
        >>> from dpjax.sites.site import Waits
        >>> Waits(late=5.0).linger
        60.0
    """

    late: float = 60.0
    linger: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        _validate.fields(self, _validate.positive, "late", "linger")


@dataclass
class _Neighbour:
    """What a site knows of one of its neighbours.

    Attributes:
        name: The neighbour.
        number: Its number in the plan.
        sends: Whether this site receives its messages.
        hears: Whether it receives this site's.
        met: Whether a session has been opened since this process began.
        live: Whether one is open now.
        acknowledged: The last round of this site's that it has on disk.
        finished: Whether it needs nothing more.
        refused: How often either end refused something of the other's.
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
    finished: bool = False
    refused: int = 0
    turns: int = 0
    backlog: deque[bytes] = field(default_factory=deque)


class Site:
    """One site of a run.

    Guarantee: what `Site.guarantee` states, for this site's records, against a participant that
    sees every message of every site, whatever others send. One message a round leaves, the same
    bytes however often the process is killed, each with noise of an address of its own. It holds
    if nobody copies the folder, or starts from an older copy of it while none of the neighbours
    that answer has a later message; and if the secret stays secret.

    Args:
        agreement: The project that all sites compare.
        problem: Of this site's own records, as one agent.
        identity: The site's name and key.
        channel: To its neighbours.
        folder: Of this run, on a local disk; made where there is none.
        secret: Of the site's group, where noise is correlated between sites; None draws one.
        waits: Times.
        is_own: Whether the problem is the caller's own: the first message is made of its first
            model, so that sites then compare its values and those of frozen leaves.

    Attributes:
        guarantee: What all rounds guarantee, finite precision included.

    Raises:
        ValueError: For a name that is not in the project, a key that is not the roster's, a folder
            of another project, and what the plan cannot do at sites.

    Example:
        >>> import dpjax as dp
        >>> def train(settings):
        ...     site = dp.site("plan.json", {"file": "records.csv"}, settings)
        ...     for progress in site.rounds():
        ...         print(progress.round, progress.metrics["test_accuracy"])
        ...     site.save("model.npz")
        >>> train({"name": "lyon"})
        Traceback (most recent call last):
            ...
        ValueError: certificate is missing in the site's settings; give it as text
    """

    def __init__(
        self,
        agreement: Agreement,
        problem: Problem,
        identity: Identity,
        channel: Channel,
        folder: _files.PathLike,
        *,
        secret: bytes | None = None,
        waits: Waits | None = None,
        is_own: bool = False,
    ) -> None:
        self.agreement = agreement
        self.name = identity.name
        self.waits = waits or Waits()
        self._identity = identity
        self._channel = channel
        self._guard = threading.RLock()
        names = agreement.names
        if self.name not in names:
            raise ValueError(f"name is {self.name!r}, which is none of {', '.join(names)}")
        if identity.public_key not in agreement.roster.accepted(self.name):
            raise ValueError(
                f"key of {self.name} is another than the project's; renew the certificate with "
                "the key that the project pins"
            )
        self._number = names.index(self.name)
        self._members = _group_of(agreement.plan, self._number)
        if (secret is None) == (len(self._members) > 1):
            others = ", ".join(names[member] for member in self._members)
            raise ValueError(
                f"secret is {'missing' if secret is None else 'given'} for noise of {others}; give "
                "the file of a group's secret where there is a group, and only there"
            )
        self._group_secret = secret
        self._public = [problem.frozen] if is_own else None
        if is_own and problem.init_per_agent:
            raise ValueError(
                "problem has init_per_agent=True, whose first models sites cannot compare, and "
                "which are sent; give one first model to all"
            )
        self._neighbours = neighbours_of(agreement, self._number)
        self._is_linked = agreement.plan.guarantee.secrets == "links"
        rows = [len(self._members)]
        if self._is_linked:
            rows += [1] * len(self._neighbours)
        self.compute = SiteRounds(agreement.plan, problem, self._number, rows, seed=agreement.seed)
        if agreement.average_rounds and not self.compute.averages:
            raise ValueError(
                f"average_rounds is {agreement.average_rounds} for method {agreement.plan.method}, "
                "whose last models are no averages of messages; give 0"
            )
        # Made once, as every round states it. Refuses a plan whose loss is none at sites.
        self.guarantee = self.compute.guarantee.replace(sites=True, insecure=channel.insecure)
        if self.guarantee.epsilon > parties.VACUOUS:
            _log.warning("epsilon is vacuous: odds may change by more than e^%g", parties.VACUOUS)
        self._last = self.compute.rounds + agreement.average_rounds
        self._is_used = False
        self._folder = Folder(folder)
        self._open_folder()

    @property
    def round(self) -> int:
        """Rounds absorbed."""
        return self._round

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self._folder.path

    def save(self, path: _files.PathLike) -> None:
        """Write what may be published, readable without JAX: arrays by their paths, a statement.

        Args:
            path: An .npz file; must not exist.
        """
        assert self._state is not None
        released = jax.device_get(self.compute.released(self._state))
        entries: dict[str, Any] = {"statement": np.array(self.guarantee.statement())}
        for place, leaf in jax.tree.leaves_with_path(released):
            entries[jax.tree_util.keystr(place)] = leaf[0]
        with _files.writing("path", path):
            _files.create(_files.npz(path), lambda file: np.savez(file, **entries))

    def _open_folder(self) -> None:
        """Read what an earlier process has stored."""
        folder = self._folder
        self._audit = Audit(folder)
        nonce = folder.drawn("nonce")
        self._bind(nonce)
        begun = folder.read("run")
        exchange = b""
        if begun is None:
            # Later none is drawn: what came of the lost one is out.
            if self._group_secret is None:
                folder.drawn("secret")
            if self._is_linked:
                exchange = key_pair(folder.drawn("exchange")).public
        terms = self._terms()
        presence = wire.signed_presence(self._identity, nonce, terms, exchange)
        self._presences: _Presences = {self.name: presence}
        self._run = b""
        self._log = Log(folder)
        self._unkept: list[wire.Header] = []
        self._arrived: dict[tuple[str, int], Message] = {}
        self._doubt: str | None = None
        self._state: State | None = None
        self._round = 0
        self._told = 0.0
        if begun is not None:
            with self._telling_of_end():
                self._resume(begun)

    def _terms(self) -> dict[str, str]:
        """What sites compare; of a problem of one's own its first values, too."""
        terms = dict(self.agreement.terms())
        if self._public is not None:
            values = self.compute.init().models, self._public
            terms["first model"] = hashlib.sha256(_bytes_of(values)).hexdigest()
        if self._group_secret is not None and len(self._members) == len(self.agreement.names):
            # With another secret noise would not cancel, and nobody would notice.
            digest = self.agreement.digest.encode()
            terms["secret of the group"] = derived(self._group_secret, "commitment", digest).hex()
        return terms

    def _bind(self, nonce: bytes) -> None:
        """Refuse another secret of the group than the folder's: rounds' noise is correlated."""
        if self._group_secret is None:
            return
        mark = derived(self._group_secret, "mark", nonce)
        kept = self._folder.read("mark")
        if kept is None:
            self._folder.create("mark", mark)
        elif kept != mark:
            raise ValueError(
                f"secret is another than the one that {str(self._folder.path)!r} began with, and "
                "noise of old and new rounds must be of one; give that file"
            )

    def _resume(self, begun: bytes) -> None:
        """Take up the run that the folder is of."""
        frame = _whole(begun, wire.Presences, "run")
        presences = {presence.name: presence for presence in frame.presences}
        current = self._presences[self.name]
        stored = presences.get(self.name, current)
        differing = _differences(stored.terms, current.terms)
        if differing:
            raise ValueError(
                f"folder is {str(self._folder.path)!r}, of a run that differs in {differing}; "
                "restore these, or name another folder for another project"
            )
        if stored.nonce != current.nonce or set(presences) != set(self.agreement.names):
            raise MustLeave(f"{self._folder.path} is not of one run; this site must leave")
        self._presences = presences
        if self._folder.read("state") is not None:
            self._stored = _restored(self._folder.path / "state", self.compute)
            self._round = self._stored.round
        self._name_run()
        for name in self._folder.names("sent"):
            message = self._stored_message(f"sent/{name}", self.name)
            self._note(message.header(self.name))
            if message.round < self._round:
                self._folder.delete(f"sent/{name}")
        for name in self._folder.names("received"):
            _, _, sender = name.partition(".")
            message = self._stored_message(f"received/{name}", sender)
            self._note(message.header(sender))
            if message.round < self._round:
                self._folder.delete(f"received/{name}")
            else:
                self._arrived[sender, message.round] = self._opened(message)

    def _stored_message(self, name: str, sender: str) -> wire.RoundMessage:
        """A message of a file, whose signature still holds."""
        content = self._folder.read(name)
        frame = _whole(content or b"", wire.RoundMessage, name)
        if not self._is_signed(frame.header(sender)):
            raise Damaged(
                f"{self._folder.path / name} is damaged, and may be out already; this site must "
                "leave"
            )
        return frame

    def _is_signed(self, header: wire.Header, run: bytes = b"") -> bool:
        content = wire.message_content(run or self._run, 0, header)
        # A digest of another length is signed as well, and everybody would keep it.
        if len(header.digest) != _DIGEST_BYTES:
            return False
        return self.agreement.roster.verify(header.sender, "message", content, header.signature)

    def _name_run(self) -> None:
        """Name the run, and take the noise that is drawn for it."""
        self._run = wire.run_of(self._presences, self.agreement.digest)
        if self._round >= self.compute.rounds:
            self._forget()
            return
        secret = self._group_secret or self._kept("secret")
        members = ",".join(self.agreement.names[member] for member in self._members)
        sources = [SiteNoise(secret, run=self._run, holder=members)]
        if self._is_linked:
            private = self._kept("exchange")
            public = self._presences[self.name].exchange
            if key_pair(private).public != public:
                raise Damaged("exchange is another key than this run's; this site must leave")
            for name in self._neighbours:
                ends = {self.name: public, name: self._presences[name].exchange}
                sources.append(of_pair(private, ends, name, run=self._run))
        self.compute.begin(sources)

    def _kept(self, name: str) -> bytes:
        """A secret that was drawn with the folder."""
        if self._folder.read(name) is None:
            raise MustLeave(f"{name} is gone, without which noise is another; this site must leave")
        return self._folder.drawn(name)

    def _forget(self) -> None:
        """Let go of all secrets: every site has the last message with noise."""
        self.compute.begin(())
        self._folder.delete("secret")
        self._folder.delete("exchange")

    def run(self, callback: Callable[[Progress], object] | None = None) -> Models:
        """Take part to the end, and return what may be published.

        Args:
            callback: Called after every round with `dpjax.engine.result.Progress`, of one seed and
                one plan; what it returns is not read. Its metrics are the site's own: no guarantee
                covers them.

        Raises:
            MustLeave: Where going on might send a round twice.
        """
        # A callback that raises must not leave sessions that seem alive.
        with contextlib.closing(self.rounds()) as rounds:
            for done in rounds:
                if callback is not None:
                    callback(done)
        assert self._state is not None
        return self.compute.released(self._state)

    def rounds(self) -> Generator[Progress, None, None]:
        """Take part, round by round; what is behind a ``yield`` is on disk.

        Raises:
            MustLeave: Where going on might send a round twice.
            ValueError: Of a site that has run: its channel is closed.
        """
        if self._is_used:
            raise ValueError(f"{self.name} has run and its channel is closed; make another site")
        self._is_used = True
        with contextlib.closing(self._channel), self._telling_of_end():
            self._channel.open(self._greeting, self._check)
            self._wait(lambda: bool(self._run), self._absent)
            # Before anything is computed, each neighbour shows what it has of this site's.
            self._wait(self._may_compute, self._unmet)
            self._load()
            began = time.monotonic(), self._round
            while self._round < self._last:
                metrics = self._measured(self._step())
                if self._round % _ROUNDS_TOLD == 0:
                    _log.info("round %d of %d", self._round, self._last)
                rate = (self._round - began[1]) / (time.monotonic() - began[0])
                yield Progress(self._round, metrics, (self.guarantee,), rate)
            self._finish()

    @contextlib.contextmanager
    def _telling_of_end(self) -> Generator[None, None, None]:
        """Say in the status why the site stopped, and in the audit file that it must leave."""
        try:
            yield
        except BaseException as error:
            # The first error is what matters, whatever the disk can still take.
            with contextlib.suppress(OSError, ValueError):
                self._told = 0.0
                self._tell(lambda: [], f"stopped: {str(error) or type(error).__name__}")
                if isinstance(error, MustLeave):
                    self._audit.note("stopped", reason=str(error))
            raise

    def close(self) -> None:
        """End the sessions, and let other processes have the folder."""
        self._channel.close()
        self._folder.close()

    # One round.

    def _may_compute(self) -> bool:
        """Whether all neighbours were met; after the last round nothing is computed any more."""
        is_done = self._round >= self._last
        return is_done or all(peer.met for peer in self._neighbours.values())

    def _load(self) -> None:
        """The state that the folder has, or the first one."""
        if self._state is None:
            begun = self._round > 0
            self._state = self.compute.restored(self._stored) if begun else self.compute.init()

    def _step(self) -> Metrics:
        """Compute, store, send, receive and absorb one round."""
        state = self._state
        assert state is not None
        sent, message = self._computed(state)
        data = wire.encoded(message)
        for peer in self._neighbours.values():
            if peer.hears and peer.acknowledged < self._round and peer.live:
                peer.backlog.append(data)
        self._wait(self._is_complete, self._missing)
        received = {}
        for peer in self._neighbours.values():
            if peer.sends:
                received[peer.number] = self._arrived[peer.name, self._round]
        if sent is None:
            new = self.compute.averaged(state, received)
        else:
            new = self.compute.incoming(state, sent, received)
        self._absorb(new)
        return {} if sent is None else sent.metrics

    def _measured(self, of_round: Metrics) -> dict[str, np.ndarray]:
        """Metrics of a round and of the models after it, [1, 1] each."""
        assert self._state is not None
        metrics = {**of_round, **self.compute.metrics(self._state)}
        # A message that is not finite ends the run by an error.
        metrics.pop(NOT_FINITE, None)
        return {name: np.reshape(np.asarray(value), (1, 1)) for name, value in metrics.items()}

    def _computed(self, state: State) -> tuple[Outgoing | None, wire.RoundMessage]:
        """The round's message: the stored one, or a new one that is stored now."""
        name = f"sent/{self._round}"
        content = self._folder.read(name)
        if self._doubt is not None:
            raise MustLeave(self._doubt)
        if content is None:
            self._check_first()
        sent: Outgoing | None = None
        numbers: Tree = state.models
        if self._round < self.compute.rounds:
            sent = self.compute.outgoing(state)
            numbers = sent.message
        if content is None:
            payload = _bytes_of(numbers)
            bare = wire.RoundMessage(self._round, payload, b"")
            to_sign = wire.message_content(self._run, 0, bare.header(self.name))
            message = bare._replace(signature=self._identity.sign("message", to_sign))
            self._store(name, message)
        else:
            message = self._stored_message(name, self.name)
        if sent is not None:
            # What others have, should another library or machine compute other last bits.
            sent = sent._replace(message=self._opened(message))
        return sent, message

    def _check_first(self) -> None:
        """Leave where this round, or any after it, has a message that is known here."""
        last = self._log.last(self.name)
        if last is not None and last.round >= self._round:
            raise MustLeave(
                f"round {last.round} of this folder was sent already, and what round "
                f"{self._round} sent is gone; this site must leave"
            )

    def _store(self, name: str, message: wire.RoundMessage) -> None:
        """Put a message on disk, from where alone it is sent; from now on its round is spent."""
        header = message.header(self.name)
        with self._guard:
            self._check_first()
            self._folder.create(name, wire.encoded(message))
            self._note(header)
        self._audit.note("stored", round=self._round, digest=header.digest.hex())

    def _is_complete(self) -> bool:
        """Whether a round is on all disks where it must be."""
        for peer in self._neighbours.values():
            if peer.hears and peer.acknowledged < self._round:
                return False
            if peer.sends and (peer.name, self._round) not in self._arrived:
                return False
        return True

    def _absorb(self, new: State) -> None:
        """Put the next state on disk, then let go of the messages that it is made of."""
        done = self._round
        with self._guard:
            self._log.keep(self._unkept)
            self._unkept = []
        stored = self.compute.stored(new)
        self._folder.replace("state", _packed(stored))
        self._audit.note("absorbed", round=done)
        self._state = new
        self._round = stored.round
        self._folder.delete(f"sent/{done}")
        for peer in self._neighbours.values():
            if peer.sends:
                del self._arrived[peer.name, done]
                self._folder.delete(f"received/{done}.{peer.name}")
                if (peer.name, self._round) in self._arrived:
                    # It was early; now its round has begun.
                    self._acknowledge(peer, self._round)
        if self._round == self.compute.rounds:
            self._forget()

    def _finish(self) -> None:
        """Stay until all neighbours are done, or for the time of lingering."""
        finished = wire.encoded(wire.Finished(self._round))
        for peer in self._neighbours.values():
            peer.backlog.append(finished)
        end = time.monotonic() + self.waits.linger

        def is_over() -> bool:
            waiting = [peer for peer in self._neighbours.values() if not peer.finished]
            return not waiting or time.monotonic() > end

        self._wait(is_over, lambda: [n.name for n in self._neighbours.values() if not n.finished])
        for peer in self._neighbours.values():
            if not peer.finished:
                _log.warning("%s is not done yet; start this site again if it needs it", peer.name)
        self._flush()
        self._told = 0.0
        self._tell(lambda: [], "is done")
        _log.info("%s is done, after round %d", self.name, self._round)

    # What is heard.

    def _wait(self, reached: Callable[[], bool], missing: Callable[[], list[str]]) -> None:
        """Handle events until something is reached, naming those who are late."""
        late = time.monotonic() + self.waits.late
        while not reached():
            if self._doubt is not None:
                raise MustLeave(self._doubt)
            self._flush()
            event = self._channel.receive(_TICK)
            if event is not None:
                self._handle(event)
            self._tell(missing)
            if time.monotonic() > late:
                late = time.monotonic() + self.waits.late
                _log.warning("round %d waits for %s", self._round, "; ".join(missing()))
        # A neighbour would wait for the last receipt until this site has computed its next round.
        self._flush()

    def _tell(self, missing: Callable[[], list[str]], doing: str = "waits for ") -> None:
        """Write what the site is doing, once a second."""
        if time.monotonic() < self._told:
            return
        self._told = time.monotonic() + 1
        traffic = self._channel.statistics()
        peers = {}
        for peer in self._neighbours.values():
            session = "open" if peer.live else "closed"
            rounds = peer.acknowledged + 1
            state: dict[str, Any] = {"session": session, "acknowledged_rounds": rounds}
            if peer.name in traffic:
                sent, received, sessions, silence = traffic[peer.name]
                state |= {"sent_bytes": sent, "received_bytes": received, "sessions": sessions}
                # JSON has no infinity.
                state["silence_s"] = round(silence, 1) if silence < np.inf else None
            peers[peer.name] = state
        headers = [header for header in self._log if header.sender == self.name]
        status = {
            "name": self.name,
            "time": time.time(),
            "doing": doing + "; ".join(missing()),
            "round": self._round,
            "rounds": self._last,
            "sent": len(headers),
            "caption": self.guarantee.caption(),
            "peers": peers,
        }
        _files.replace(self.folder / "status.json", json.dumps(status).encode(), mode=0o600)

    def _absent(self) -> list[str]:
        return [name for name in self.agreement.names if name not in self._presences]

    def _unmet(self) -> list[str]:
        return [f"a session with {peer.name}" for peer in self._neighbours.values() if not peer.met]

    def _missing(self) -> list[str]:
        """Who has not sent, or not acknowledged."""
        texts = []
        for peer in self._neighbours.values():
            if peer.sends and (peer.name, self._round) not in self._arrived:
                texts.append(f"the message of {peer.name}")
            if peer.hears and peer.acknowledged < self._round:
                texts.append(f"the receipt of {peer.name}")
        return texts

    def _flush(self) -> None:
        """Say what is to be said, as far as sessions take it."""
        for peer in self._neighbours.values():
            while peer.backlog and self._channel.send(peer.name, peer.backlog[0]):
                peer.backlog.popleft()

    def _handle(self, event: Event) -> None:
        """One event of the channel."""
        peer = self._neighbours.get(event.peer)
        if peer is None:
            return
        with self._guard:
            if event.kind == "opened":
                peer.live = peer.met = True
                self._tell_turn(peer, "open")
                self._welcome(peer)
            elif event.kind == "closed":
                peer.live = False
                self._tell_turn(peer, f"closed: {event.reason}")
                peer.backlog.clear()
            elif event.kind == "message":
                try:
                    self._take(peer, wire.decoded(event.data))
                except Refused as refusal:
                    self._refuse(peer, str(refusal))
            elif self._is_told(peer):
                # A hello that either end refused: of another run, say. The channel has logged it.
                self._audit.note("hello refused", peer=peer.name, reason=event.reason)

    def _refuse(self, peer: _Neighbour, reason: str) -> None:
        """Say what was refused: here, there and in the audit file."""
        if not self._is_told(peer):
            return
        text = f"{self.name} refuses what {peer.name} sent: {reason}"
        _log.warning("%s", text)
        self._audit.note("refused", peer=peer.name, reason=reason, number=peer.refused)
        peer.backlog.append(wire.encoded(wire.Refusal(text)))

    def _tell_turn(self, peer: _Neighbour, state: str) -> None:
        """Say that a session began or ended; of one that comes and goes not each time."""
        peer.turns += 1
        if _is_reported(peer.turns):
            _log.info("session with %s %s", peer.name, state)

    def _is_told(self, peer: _Neighbour) -> bool:
        """Whether one more refusal is reported: a flood of them fills no disk and no memory."""
        peer.refused += 1
        return _is_reported(peer.refused)

    def _welcome(self, peer: _Neighbour) -> None:
        """Say to a new session what the last one may have lost."""
        peer.backlog.clear()
        peer.backlog.extend(_pieces(wire.Presences, self._presences.values()))
        if not self._run:
            return
        recent = [header for header in self._log if header.round >= self._round - 1]
        peer.backlog.extend(_pieces(wire.Headers, recent))
        content = self._folder.read(f"sent/{self._round}")
        if peer.hears and content is not None and peer.acknowledged < self._round:
            peer.backlog.append(content)
        if self._round == self._last:
            peer.backlog.append(wire.encoded(wire.Finished(self._round)))

    def _take(self, peer: _Neighbour, frame: wire.Frame) -> None:
        """What a neighbour says."""
        if isinstance(frame, wire.Presences):
            self._take_presences(peer, frame)
        elif isinstance(frame, wire.Refusal):
            if self._is_told(peer):
                # As a refusal of one's own: no control characters, one line.
                _log.warning("%s: %s", peer.name, Refused(frame.reason))
        elif not self._run:
            raise Refused("the run has not begun here")
        elif isinstance(frame, wire.RoundMessage):
            self._take_message(peer, frame)
        elif isinstance(frame, wire.Receipt):
            header = self._log.get(self.name, frame.round)
            if header is None or header.digest != frame.digest:
                raise Refused(f"a receipt of round {frame.round} for what this site did not send")
            peer.acknowledged = max(peer.acknowledged, frame.round)
        elif isinstance(frame, wire.Headers):
            new = [header for header in frame.headers if self._is_news(header)]
            self._hand_on(peer, _pieces(wire.Headers, new))
        elif isinstance(frame, wire.Finished):
            peer.finished = frame.round == self._last
        else:
            raise Refused("a greeting after the hello")

    def _take_presences(self, peer: _Neighbour, frame: wire.Presences) -> None:
        """Learn who takes part; with the last presence the run has a name."""
        new: _Presences = {}
        for presence in frame.presences:
            earlier = self._presences.get(presence.name) or new.get(presence.name)
            if earlier is None:
                wire.check_presence(presence, self.agreement.roster)
                self._compare(presence)
                new[presence.name] = presence
            elif earlier.content != presence.content:
                raise Refused(f"{presence.name} has begun twice, with two folders or plans")
        # All of a frame or nothing: what is taken is handed on.
        self._presences |= new
        self._hand_on(peer, _pieces(wire.Presences, new.values()))
        if not self._run and set(self._presences) == set(self.agreement.names):
            presences = tuple(self._presences[name] for name in self.agreement.names)
            self._folder.create("run", wire.encoded(wire.Presences(presences)))
            self._name_run()
            self._audit.note("begun", run=self._run.hex(), plan=self.agreement.digest)

    def _compare(self, presence: wire.Presence) -> None:
        """Refuse a site that takes part in something else."""
        own = self._presences[self.name].terms
        if presence.terms != own:
            differing = _differences(presence.terms, own) or "how terms are written"
            raise Refused(f"{presence.name} and {self.name} differ in {differing}")
        if bool(presence.exchange) != self._is_linked:
            raise Refused(f"{presence.name} differs in whether it shows a key for links")

    def _take_message(self, peer: _Neighbour, message: wire.RoundMessage) -> None:
        """Put a neighbour's message on disk, then acknowledge it."""
        header = message.header(peer.name)
        if not peer.sends or not self._is_signed(header):
            raise Refused(f"round {message.round} is not signed for this run, or on no link of it")
        earlier = self._log.get(peer.name, message.round)
        if earlier is not None and earlier.digest != header.digest:
            self._accuse(earlier, header)
        is_stored = message.round < self._round or (peer.name, message.round) in self._arrived
        if not is_stored:
            # A neighbour may be one round ahead, and no more.
            if message.round > self._round + 1 or message.round >= self._last:
                raise Refused(f"round {message.round} in round {self._round}")
            if message.round > self._round and (peer.name, self._round) not in self._arrived:
                # It goes on when all have acknowledged the round before.
                raise Refused(
                    f"round {message.round}, so that somebody acknowledged round {self._round} as "
                    f"{self.name}, which lacks it: its folder was restored, or has a copy that runs"
                )
            opened = self._opened(message)
            self._folder.create(f"received/{message.round}.{peer.name}", wire.encoded(message))
            self._arrived[peer.name, message.round] = opened
            if earlier is None:
                self._note(header)
                self._hand_on(peer, _pieces(wire.Headers, [header]))
        elif earlier is None:
            raise Refused(f"round {message.round}, which this site never had")
        # An early one when its round begins: a sender that waits for nobody else stays near.
        if message.round <= self._round:
            self._acknowledge(peer, message.round)

    def _acknowledge(self, peer: _Neighbour, round: int) -> None:
        """Say that a message is on disk, once, however often it came before that is said."""
        header = self._log.get(peer.name, round)
        assert header is not None
        receipt = wire.encoded(wire.Receipt(round, header.digest))
        if receipt not in peer.backlog:
            peer.backlog.append(receipt)

    def _opened(self, message: wire.RoundMessage) -> Message:
        """The numbers of a message, all finite."""
        leaves, structure = jax.tree.flatten(self.compute.message)
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

    def _is_news(self, header: wire.Header) -> bool:
        """Whether a header was not known; two of one round prove that its sender sent both."""
        earlier = self._log.get(header.sender, header.round)
        if earlier is not None and earlier.digest == header.digest:
            return False
        if header.round >= self._last or not self._is_signed(header):
            raise Refused(f"a header of {header.sender!r} is not signed for this run")
        # No site is further ahead than links lie between; others would fill memory.
        if header.round > self._round + len(self.agreement.names):
            return False
        if header.sender == self.name:
            self._doubt = self._foreign(header, "a neighbour")
            return False
        if earlier is not None:
            self._accuse(earlier, header)
        self._note(header)
        return True

    def _hand_on(self, peer: _Neighbour, frames: list[bytes]) -> None:
        """Tell other neighbours what was sent to this site."""
        for other in self._neighbours.values():
            if other is not peer and other.live:
                other.backlog.extend(frames)

    def _note(self, header: wire.Header) -> None:
        if self._log.get(header.sender, header.round) is None:
            self._log.note(header)
            self._unkept.append(header)

    def _accuse(self, first: wire.Header, second: wire.Header) -> None:
        """Stop: a site sent two messages in one round, and its signatures prove it."""
        name = f"evidence-{first.sender}-{first.round}"
        content = wire.encoded(wire.Headers((first, second)))
        if self._folder.read(name) is None:
            self._folder.create(name, content)
        for other in self._neighbours.values():
            other.backlog.append(content)
        self._flush()
        fault = (
            f"{first.sender} sent two messages in round {first.round}: its folder was copied or "
            "restored, and its records are not protected as stated"
        )
        place = self._folder.path / name
        self._doubt = f"{fault}. {place} has both signatures. Go on without it"
        # Paths of this machine are nothing to others.
        raise Refused(fault)

    # The hello, in the channel's threads.

    def _greeting(self, peer: str) -> bytes:
        """This site's part of a hello."""
        with self._guard:
            last = self._log.last(peer)
            shown = () if last is None else (last,)
            return wire.encoded(wire.Greeting(self._presences[self.name], self._run, shown))

    def _check(self, peer: str, data: bytes) -> str | None:
        """Why a neighbour's part of a hello is refused; None where it is not."""
        try:
            frame = wire.decoded(data)
            if not isinstance(frame, wire.Greeting) or frame.presence.name != peer:
                raise Refused("the hello has no greeting")
            wire.check_presence(frame.presence, self.agreement.roster)
            with self._guard:
                self._compare(frame.presence)
                self._check_greeting(peer, frame)
        except Refused as refusal:
            return str(refusal)
        return None

    def _check_greeting(self, peer: str, greeting: wire.Greeting) -> None:
        """Refuse another run, and stop where a neighbour has what this folder lacks."""
        earlier = self._presences.get(peer)
        if earlier is not None and earlier.nonce != greeting.presence.nonce:
            raise Refused(
                f"{peer} began again with another folder, whose noise would be another; it must "
                "leave"
            )
        if self._run and greeting.run and greeting.run != self._run:
            raise Refused(f"{peer} is in another run")
        for header in greeting.shown:
            noted_header = self._log.get(self.name, header.round)
            if noted_header is not None and noted_header.digest == header.digest:
                continue
            # A site that has no run yet did not sign in one, unless it lost its folder.
            if header.sender != self.name or not self._is_signed(header, greeting.run):
                raise Refused(f"{peer} shows a message that {self.name} did not sign")
            self._doubt = self._foreign(header, peer)
            raise Refused(self._doubt)

    def _foreign(self, header: wire.Header, holder: str) -> str:
        """Why a site must leave whose signature is on what its folder does not have."""
        if not self._run:
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


def _is_reported(count: int) -> bool:
    """Whether the so-manieth event of a kind is reported: the first ones, then powers of two."""
    return count <= _REFUSALS or count.bit_count() == 1


def _group_of(plan: Plan, site: int) -> tuple[int, ...]:
    """The sites that draw their noise from one secret with a site, itself among them."""
    noise: object = plan.noise
    if not isinstance(noise, ByFactor):
        raise ValueError(
            f"plan has noise {plan.config.noise}, which sites do not draw as it is; give "
            "release=True, and a design such as Independent, Mafalda, Whisper or PairKeys"
        )
    # What both ends of a link draw comes of keys of theirs, and no group's secret.
    if plan.guarantee.secrets == "links":
        return (site,)
    group = calibration.groups(noise.factor)
    return tuple(np.flatnonzero(group == group[site]).tolist())


def neighbours_of(agreement: Agreement, site: int) -> dict[str, _Neighbour]:
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
            neighbours[name] = _Neighbour(name, number, sends, hears)
    return neighbours


def _differences(theirs: tuple[tuple[str, str], ...], mine: tuple[tuple[str, str], ...]) -> str:
    """The items of terms that differ, in words; "" for none."""
    first = dict(theirs)
    second = dict(mine)
    items = [item for item in {**second, **first} if first.get(item) != second.get(item)]
    return " and ".join(f"the {item}" for item in items)


def _whole(content: bytes, kind: type[wire.FrameT], name: str) -> wire.FrameT:
    """What a file of the site's own says."""
    try:
        frame = wire.decoded(content)
    except Refused as refusal:
        raise Damaged(f"{name} is damaged ({refusal}); this site must leave") from None
    if not isinstance(frame, kind):
        raise Damaged(f"{name} is damaged; this site must leave")
    return frame


def _pieces(kind: type[wire.Presences] | type[wire.Headers], items: Iterable[Any]) -> list[bytes]:
    """Frames that say all items, each within a channel's limit."""
    parts = tuple(items)
    starts = range(0, len(parts), _PIECE)
    return [wire.encoded(kind(parts[start : start + _PIECE])) for start in starts]


def _bytes_of(numbers: Tree) -> bytes:
    """The numbers of a tree, little-endian, leaf after leaf."""
    parts = []
    for leaf in jax.tree.leaves(numbers):
        array = np.asarray(leaf)
        parts.append(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return b"".join(parts)


def _packed(stored: Stored) -> _files.Content:
    """A state as a file, with its digest."""
    leaves = jax.tree.leaves((stored.models, stored.memory))
    arrays = {f"leaf_{number}": np.asarray(leaf) for number, leaf in enumerate(leaves)}
    return _files.packed(json.dumps({"round": stored.round}), arrays)


def _restored(path: Path, compute: SiteRounds) -> Stored:
    """The state of a file."""
    first = compute.stored(compute.init())
    like, structure = jax.tree.flatten((first.models, first.memory))
    try:
        header, arrays = _files.unpacked(path)
        leaves = []
        for number, leaf in enumerate(like):
            leaves.append(arrays[f"leaf_{number}"].view(leaf.dtype).reshape(leaf.shape))
        models, memory = jax.tree.unflatten(structure, leaves)
        return Stored(models, memory, json.loads(header)["round"])
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"state is damaged ({_files.brief(error)}); this site must leave") from None
