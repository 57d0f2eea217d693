"""Sums among peers: in turn the sites run a secure sum's aggregator, and all of them take part.

A round has attempts, and each attempt an aggregator, by the roster's order:

    aggregator                     every site, the aggregator among them
    Hello                      ->
                               <-  Keys, signed: once an attempt, noted before they go out
    all signed keys            ->  each derives numbers and transcript by itself
                               <-  Shares
    Delivery                   ->
                               <-  MaskedVector: once a round, noted before it goes out
    Request                    ->
                               <-  Confirm
    Confirmed                  ->
                               <-  UnmaskingShares
    Opened, signed             ->  stored; whoever has it hands it on

`PeerSums` is one site's part: a state machine without network or thread. A site goes on to the next
attempt where it has not sent its masked vector. Once that is out the round is spent for it: it
waits for a sum, or for all sites to say that there is none. The page 'Proofs' of the manual shows
why sums among peers open together.
"""

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, TypeAlias

import numpy as np

from dpjax.plans.plan import Plan
from dpjax.plans.sums import CalibratedCode
from dpjax.secagg import primitives
from dpjax.secagg.client import Client, reply
from dpjax.secagg.graph import Parameters
from dpjax.secagg.messages import (
    Confirm,
    Confirmed,
    Delivery,
    Hello,
    Keys,
    MaskedVector,
    ProtocolMessage,
    Request,
    Roster,
    Shares,
    UnmaskingShares,
    decoded,
    encoded,
)
from dpjax.secagg.server import SumServer
from dpjax.secagg.terms import Abort, Limits, Rejected, Terms
from dpjax.secagg.transport import terms_of
from dpjax.sites import wire
from dpjax.sites.identity import Identity, Refused
from dpjax.sites.identity import Roster as Sites
from dpjax.sites.store import Folder, MustLeave

__all__ = ["PeerTerms"]

_log = logging.getLogger("dpjax.sites")
MOST_SITES = 100
"""Each of n sites has a mask with all others: a round takes n^2 keys and shares."""
_GRACE = 5.0
"""Seconds for an aggregator that is not there, or whom others gave up, to call all the same."""
_EVIDENCE = "evidence-"
_Outcome: TypeAlias = wire.Opened | wire.Voided
_Say: TypeAlias = Callable[[str, wire.Frame], None]
_OF_AGGREGATOR = (Hello, Delivery, Request, Confirmed)
_OF_CLIENT = (Keys, Shares, MaskedVector, Confirm, UnmaskingShares)


@dataclass(frozen=True)
class PeerTerms(Terms):
    """Terms of sums whose aggregator is one of the clients.

    Guarantee: of n sites at most c collude, the aggregator among them, and at most m are missing.
    The graph is complete, so that no party draws it, and the threshold t follows from the number e
    of sites that enrolled: 2 t > e - 1 + c. `dpjax.secagg.client` shows that then no vector is
    opened alone, and no two sums of one attempt. Every client has all signed keys and derives
    numbers and transcript itself, so keys and graph need no honest aggregator.

    Raises:
        ValueError: As `Terms`; without colluders, for n < 2 m + c + 2, and for more than 100 sites.

    Example:
        >>> from dpjax.encoding.lattice import SumCode
        >>> from dpjax.secagg.transport import terms_of
        >>> from dpjax.sites.peers import PeerTerms
        >>> code = SumCode(size=100, bound=1.0, grid=1 / 64, clients=6, variance=4)
        >>> counts = {"dropouts": 1, "colluders": 1}
        >>> terms = terms_of(code, **counts, adversary="semi_malicious", kind=PeerTerms)
        >>> terms.minimum, terms.graph(6).degree, terms.graph(6).threshold
        (5, 5, 4)
    """

    @classmethod
    def of(cls, plan: Plan) -> "PeerTerms":
        """Return the terms of a plan's sums.

        Args:
            plan: With noise Discrete, for sites that have links with all others.

        Raises:
            ValueError: For another plan.
        """
        noise = plan.noise
        if not isinstance(noise, CalibratedCode):
            raise ValueError(f"plan has noise {plan.config.noise}; give Discrete for sums")
        if any(len(senders) + 1 < plan.agents for senders in plan.senders):
            raise ValueError("[network] lacks links, and all sites add up together; leave it out")
        counts = {"dropouts": noise.part.dropouts, "colluders": noise.part.colluders}
        return terms_of(noise.code, **counts, adversary="semi_malicious", kind=cls)

    def __post_init__(self) -> None:
        """Refuse what no complete graph carries."""
        if self.clients > MOST_SITES:
            raise ValueError(
                f"clients is {self.clients}, and sums among peers take at most {MOST_SITES}: each "
                "has keys and shares of all others; give independent noise, or a server's sums"
            )
        super().__post_init__()
        if not self.colluders:
            raise ValueError(
                "colluders is 0, and a site that runs the aggregator knows its own vector and "
                "noise: give at least 1"
            )

    def graph(self, enrolled: int) -> Parameters:
        """Return the complete graph's degree and threshold.

        Args:
            enrolled: e, from the minimum to ``clients``.

        Raises:
            ValueError: Where too few enrolled for a sum.
        """
        most = self.clients - self.minimum
        fewest = 2 * most + self.colluders + 2
        if self.clients < fewest:
            raise ValueError(
                f"{self.clients} sites are too few for sums with {most} dropouts and "
                f"{self.colluders} colluders, which take 2 * {most} + {self.colluders} + 2 = "
                f"{fewest}; give fewer of them, or more sites"
            )
        if not self.minimum <= enrolled <= self.clients:
            raise ValueError(
                f"enrolled is {enrolled}; from {self.minimum} to {self.clients} sites add up "
                "vectors under these terms"
            )
        degree = enrolled - 1
        # 2 t > k + c: no two requests open both secrets of one site.
        threshold = (degree + self.colluders) // 2 + 1
        spare = enrolled - self.minimum
        return Parameters(degree, threshold, enrolled, self.colluders, spare, self.adversary)


@dataclass
class _Part:
    """This site's part as a client of one attempt.

    Attributes:
        client: Its secrets.
        nonce: Of the aggregation.
        keys: What it signed.
        deadline: When it has waited long enough for the aggregator's next word.
        sites: Numbers of the sites that enrolled, by their number in the sum.
    """

    client: Client
    nonce: bytes
    keys: wire.Word
    deadline: float
    sites: tuple[int, ...] = ()


@dataclass
class _Aggregation:
    """This site's part as the aggregator of one attempt.

    Attributes:
        server: The protocol.
        attempt: Of the round.
        deadline: When a stage ends.
        keys: Signed keys, by name, while sites enrol.
        names: Who enrolled, by number in the sum.
        ends: What ends the stages that are left.
    """

    server: SumServer
    attempt: int
    deadline: float
    keys: dict[str, wire.Word] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    ends: list[Callable[[], Iterable[tuple[int, ProtocolMessage]]]] = field(default_factory=list)


class _Note(NamedTuple):
    """A line of the journal: what this site is about to say of a round.

    Attributes:
        kind: "keys", "masked" or "void".
        round: Of the phase.
        attempt: Of the round.
        digest: SHA-256 of the keys, in hex; "-" of all else.
    """

    kind: str
    round: int
    attempt: int
    digest: str


class PeerSums:
    """One site's part in the sums of a run.

    Guarantee: its vector of a round leaves it at most once, under masks, and after a note of it is
    on disk. It signs keys once an attempt, answers one request an attempt, and takes a sum that its
    aggregator signed, of enough survivors, which names this site only if its vector went out in
    that attempt. Everything is bound to the run, the round, the attempt, the aggregator and all
    sums before. It cannot tell whether a sum is true.

    Args:
        terms: What all agree on.
        identity: This site.
        roster: All sites, in the plan's order.
        folder: Of the run.
        limits: How long it waits.
        spoiled: Rounds without a sum after which it stops.
        phase: Number of the plan among those of a project.
        say: Says a frame to a site, or to nobody where it is not there.
        clock: Seconds.

    Attributes:
        round: Rounds done.
        before: Digest of all sums so far.
        attempt: The attempt of this round.
        spent: Whether this round's vector may have gone out, or this site said that it is void.
        live: Sites with which there is a session.
        outcome: Of this round; None before.
        charged: Rounds whose masked vector may have gone out.
        places: The round that each other site said it is in.
        doubt: Why the site must stop; None where it need not.
    """

    def __init__(
        self,
        terms: PeerTerms,
        identity: Identity,
        roster: Sites,
        folder: Folder,
        *,
        limits: Limits,
        spoiled: int,
        phase: int = 0,
        say: _Say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.terms = terms
        self.name = identity.name
        self.names = tuple(roster)
        self.round = 0
        self.before = b""
        self.attempt = 0
        self.spent = False
        self.live: set[str] = set()
        self.outcome: _Outcome | None = None
        self.charged: set[int] = set()
        self.doubt: str | None = None
        self._run = b""
        self._identity = identity
        self._roster = roster
        self._folder = folder
        self._limits = limits
        self._spoiled = spoiled
        self._phase = phase
        self._void_rounds: set[int] = set()
        self._utter = say
        self._clock = clock
        self._values: np.ndarray | None = None
        # The attempt in which this round's vector went out.
        self._masked: int | None = None
        # The survivors that it confirmed there, as numbers of sites.
        self._confirmed: tuple[int, ...] | None = None
        # Digests of the keys that this site signed, and the last ones that it saw of others.
        self._signed: dict[tuple[int, int], str] = {}
        self._seen: dict[str, wire.Word] = {}
        # Of this site's, which others showed before the run had a name.
        self._shown: dict[str, wire.Word] = {}
        self._part: _Part | None = None
        self._aggregation: _Aggregation | None = None
        # Calls for attempts that this site has not come to.
        self._calls: dict[int, wire.Word] = {}
        self._voids: dict[str, wire.Void] = {}
        # Who left, and the round that it was in: it has no sum of any later one.
        self._last_rounds: dict[str, int] = {}
        self._call_by = 0.0
        self._began = 0.0
        # Who was asked for this round's sum.
        self._asked: set[str] = set()
        # The attempt of this round that each other site said it is in.
        self._attempts: dict[str, int] = {}
        # What this site says to itself: its aggregator to its client, and back.
        self._own: list[wire.Frame] = []
        # The round that each other site said it is in.
        self.places: dict[str, int] = {}
        folder.room("sums")

    def resume(self, run: bytes, round: int) -> None:
        """Begin, or go on after so many rounds.

        Args:
            run: Its name.
            round: Rounds whose outcome is in the state.

        Raises:
            MustLeave: For notes or sums that are damaged or gone.
        """
        self._run = run
        for name in self._folder.names("."):
            if name.startswith(_EVIDENCE):
                # It still hands in how far it came, so that others go on without who lied.
                self.doubt = (
                    f"{self._folder.path / name} proves that a site signed what no honest one "
                    "does; this run cannot go on with it"
                )
        self.before = hashlib.sha256(run).digest()
        self.round = round
        if round:
            self.before = self._digest(self._kept(round - 1))
        if self._folder.read("journal") is None:
            if round:
                raise MustLeave("journal is gone; this site must leave")
            self._folder.create("journal", b"")
        for line in self._folder.lines("journal"):
            note = _note_of(line)
            if note is None:
                raise MustLeave("journal is damaged; this site must leave")
            if note.kind == "keys":
                self._signed[note.round, note.attempt] = note.digest
            if note.kind == "masked":
                self.charged.add(note.round)
            if note.kind == "void":
                self._void_rounds.add(note.round)
            if note.round > round:
                raise MustLeave(
                    f"journal has round {note.round}, and the state is of round {round}: it was "
                    "restored from a backup; this site must leave"
                )
            if note.round == round:
                self.attempt = max(self.attempt, note.attempt + 1)
                self.spent |= note.kind != "keys"
                if note.kind == "masked":
                    self._masked = note.attempt
        # Rounds for which it said so and whose sum came all the same are not void.
        self._void_rounds = {
            past for past in self._void_rounds if past < round and self._is_void(past)
        }
        self.doubt = self.doubt or self._spoiling()
        if self._folder.read("enrolled") is not None:
            enrolled = self._read("enrolled")
            assert isinstance(enrolled, wire.Enrolment)
            self._seen = {word.sender: word for word in enrolled.words}
        if self._folder.read(f"sums/{round}") is not None:
            self._settle(self._kept(round))
        elif self.spent:
            self._say_void()
        for peer, word in self._shown.items():
            with contextlib.suppress(Refused):
                self.check_shown(peer, (word,))

    def _spoiling(self) -> str | None:
        """Why too many rounds without a sum end the run; None for fewer."""
        if len(self._void_rounds) <= self._spoiled:
            return None
        return (
            f"{len(self._void_rounds)} rounds have no sum, more than the {self._spoiled} of "
            "the plan; find out which site spoils them, and make a plan without it"
        )

    def shown(self, peer: str) -> tuple[wire.Word, ...]:
        """The last keys of another site that this one has seen, for the hello.

        Args:
            peer: The site.
        """
        word = self._seen.get(peer)
        return () if word is None else (word,)

    def check_shown(self, peer: str, words: tuple[wire.Word, ...]) -> None:
        """Stop where a site has keys of this one that its journal lacks.

        Args:
            peer: Who shows them.
            words: What it shows; one at most.

        Raises:
            Refused: For what this site did not sign in this run, or does not know.
        """
        for word in words[:1]:
            if not self._run:
                self._shown[peer] = word
                continue
            if word.sender != self.name:
                raise Refused(f"{peer} shows keys of {word.sender!r} as those of {self.name}")
            self._keys_of(word)
            self._see(word)

    @property
    def is_wanted(self) -> bool:
        """Whether this round still takes this site's vector."""
        return self.outcome is None and not self.spent

    def offer(self, values: np.ndarray) -> None:
        """Give the vector of this round.

        Args:
            values: [length] residues.
        """
        self._values = values
        self._wait_for_call()

    def absorbed(self) -> None:
        """Go on to the next round: the state after this one is on disk.

        Raises:
            MustLeave: Where too many rounds had no sum.
        """
        assert self.outcome is not None
        self.before = self._digest(self.outcome)
        if isinstance(self.outcome, wire.Voided):
            self._void_rounds.add(self.round)
        self.round += 1
        self.attempt = 0
        self.spent = False
        self.outcome = self._masked = self._confirmed = self._values = None
        self._part = None
        self._aggregation = None
        self._calls = {}
        self._voids = {}
        self._attempts = {}
        self._asked = {peer for peer, round in self.places.items() if round >= self.round}
        for peer in sorted(self._asked):
            # What it said of this round came too early, and is said again.
            self._utter(peer, wire.At(self.round, 0))
        fault = self._spoiling()
        if fault is not None:
            raise MustLeave(fault)

    def withdraw(self) -> None:
        """Say that this site is in no sum of this round, unless it has one: it leaves."""
        if self.outcome is None:
            self.spent = True
            self._say_void()

    def part_from(self, name: str, round: int) -> None:
        """Wait for no word of a site that left, in the rounds after the one that it was in.

        Args:
            name: Who signed that it leaves.
            round: Rounds that it had done.
        """
        self._last_rounds[name] = round
        if self._run and self.outcome is None:
            self._give_up()

    def finish(self) -> None:
        """Say to all that no round is left, and to one site what came of the last one.

        Each site compares what another one has of it, so that two sums of it are found, too.
        """
        after = self.names[(self.names.index(self.name) + 1) % len(self.names)]
        for peer in sorted(self.live):
            self._utter(peer, wire.At(self.round, 0))
        if after in self.live:
            self._utter(after, self._kept(self.round - 1))

    def vector(self, opened: wire.Opened) -> np.ndarray:
        """The residues of a sum.

        Args:
            opened: Which was taken.
        """
        return primitives.unpacked_vector(opened.total, self.terms.length, self.terms.bits)

    def missing(self) -> list[str]:
        """What is waited for, in words."""
        if self.outcome is not None:
            return []
        if self.spent:
            silent = [name for name in self._asked_for_voids(self.round) if name not in self._voids]
            if self._part is None:
                return [f"a sum, or word that there is none, of {', '.join(silent)}"]
        aggregator = self.aggregator(self.attempt)
        if self._aggregation is not None:
            return [f"what it asked of others in attempt {self.attempt}"]
        return [f"{aggregator}, who adds up in attempt {self.attempt}"]

    def aggregator(self, attempt: int, round: int | None = None) -> str:
        """Who adds up.

        Args:
            attempt: Of the round.
            round: Of the phase; this one where it is None.
        """
        turn = (self.round if round is None else round) + attempt
        return self.names[turn % len(self.names)]

    # Sessions, and time.

    def came(self, peer: str) -> None:
        """A session with a site was opened.

        Args:
            peer: Its name.
        """
        self.live.add(peer)
        self._utter(peer, wire.At(self.round, self.attempt))
        if self._voids:
            self._utter(peer, wire.Voided(tuple(self._voids.values())))
        self._call_again(peer)

    def left(self, peer: str) -> None:
        """The session with a site has ended.

        Args:
            peer: Its name.
        """
        self.live.discard(peer)
        self._lose(peer)
        part = self._part
        if part is not None and peer == self.aggregator(self.attempt):
            self._fail(f"the session with {peer} ended")
        elif part is None and peer == self.aggregator(self.attempt):
            # Who is not there is waited for no longer than one who is.
            self._call_by = min(self._call_by, self._clock() + self._grace)

    def tick(self) -> None:
        """Do what it is time for."""
        while self._own:
            frame = self._own.pop(0)
            try:
                self._take(self.name, frame)
            except Refused as refusal:
                # Of itself it refuses nothing but what came too late.
                _log.debug("%s: %s", self.name, refusal)
        if self.outcome is not None:
            return
        now = self._clock()
        if self._aggregation is not None:
            self._advance(self._aggregation, now)
        elif self._part is not None:
            if now > self._part.deadline:
                self._fail(f"no word of {self.aggregator(self.attempt)} in time")
        elif not self.spent and self._values is not None:
            self._start(now)
        if self._own:
            self.tick()

    def hear(self, peer: str, frame: wire.Frame) -> None:
        """Take what a site says.

        Args:
            peer: Who says it.
            frame: What.

        Raises:
            Refused: For what does not belong here, or proves a fault; of a round nothing is
                changed then.
        """
        self._take(peer, frame)
        self.tick()

    def _take(self, peer: str, frame: wire.Frame) -> None:
        if isinstance(frame, wire.Word):
            self._take_word(peer, frame)
        elif isinstance(frame, wire.Enrolment):
            self._take_enrolment(peer, frame)
        elif isinstance(frame, wire.Opened):
            self._take_opened(peer, frame)
        elif isinstance(frame, wire.Voided):
            self._take_voided(peer, frame)
        elif isinstance(frame, wire.Failed):
            part = self._part
            place = self.round, self.attempt
            is_meant = part is not None and frame.nonce == part.nonce
            if is_meant and peer == self.aggregator(self.attempt) and frame[:2] == place:
                self._fail(str(Refused(frame.reason)))
        elif isinstance(frame, wire.At):
            self._keep_step(peer, frame)
            self._hand_on(peer, frame.round)
            self._ask(peer, frame.round)
        else:
            raise Refused("a frame of gossip, in a run of sums")

    @property
    def _grace(self) -> float:
        return min(_GRACE, self._limits.enrol)

    def _wait_for_call(self) -> None:
        """Begin to wait for the aggregator of this attempt."""
        aggregator = self.aggregator(self.attempt)
        is_there = aggregator in self.live or aggregator == self.name
        self._began = self._clock()
        if not self._takes_part(aggregator, self.round):
            self._call_by = self._began
            return
        # Longer with each turn of all sites: what is too short for them ends.
        turns = 1 + self.attempt // len(self.names)
        self._call_by = self._began + turns * (self._limits.enrol if is_there else self._grace)

    def _start(self, now: float) -> None:
        """Begin this attempt: call others, or answer who called, or go on to the next one."""
        called = self._calls.pop(self.attempt, None)
        aggregator = self.aggregator(self.attempt)
        callers = {self.aggregator(attempt) for attempt in self._calls}
        # So many that one of them is honest: others alone could rush this site ahead.
        is_called = len(callers) > self.terms.colluders
        is_late = now > self._call_by or (is_called and now > self._began + self._grace)
        if aggregator == self.name:
            self._call(now)
        elif called is not None:
            self._answer_call(called)
        elif is_late or not self._may_add_up(aggregator, self.attempt):
            self._next_attempt()

    def _next_attempt(self) -> None:
        self.attempt += 1
        self._wait_for_call()
        for peer in sorted(self.live):
            self._utter(peer, wire.At(self.round, self.attempt))

    def _keep_step(self, peer: str, place: wire.At) -> None:
        """Go on to an attempt that more sites are in than may collude."""
        if place.round != self.round:
            return
        self._attempts[peer] = place.attempt
        if self._aggregation is not None and place.attempt > self._aggregation.attempt:
            self._lose(peer)
        ahead = sorted(self._attempts.values(), reverse=True)[: self.terms.colluders + 1]
        is_idle = self._part is None and self._aggregation is None and not self.spent
        if is_idle and len(ahead) > self.terms.colluders and ahead[-1] > self.attempt:
            self.attempt = ahead[-1] - 1
            self._next_attempt()

    def _fail(self, reason: str) -> None:
        """This attempt is over for this site."""
        _log.info("round %d, attempt %d: %s", self.round, self.attempt, reason)
        self._part = None
        if not self.spent:
            self._next_attempt()
            return
        self._say_void()

    # As a client.

    def _answer_call(self, word: wire.Word) -> None:
        """Begin a part in the aggregation of a call."""
        assert self._values is not None
        message = decoded(word.payload)
        assert isinstance(message, Hello)
        client = Client(self.terms, self._values)
        try:
            keys = self._word(word.attempt, message.nonce, client.greet(message))
        except Abort as abort:
            self._fail(abort.reason)
            return
        # Where the process dies now, the attempt is lost to this site.
        digest = hashlib.sha256(keys.payload).hexdigest()
        self._note("keys", digest)
        self._signed[self.round, self.attempt] = digest
        deadline = self._clock() + self._limits.enrol + self._limits.stage
        self._part = _Part(client, message.nonce, keys, deadline)
        self._say(self.aggregator(word.attempt), keys)

    def _take_enrolment(self, peer: str, frame: wire.Enrolment) -> None:
        """Derive numbers and transcript from all signed keys, and share the secrets."""
        part = self._part
        senders = [word.sender for word in frame.words]
        if len(senders) == 2 and senders[0] == senders[1]:
            self._take_two_keys(*frame.words)
            return
        if part is None or peer != self.aggregator(self.attempt) or part.sites:
            raise Refused("keys of sites, and this site takes part in no such aggregation")
        # One number for each site, in an order that no party chooses.
        if senders != [name for name in self.names if name in senders]:
            raise Refused("keys are not in the roster's order, or of one site twice")
        pairs = []
        for word in frame.words:
            place = word.round, word.attempt, word.nonce, word.before
            if place != (self.round, self.attempt, part.nonce, self.before):
                raise Refused(f"keys of {word.sender!r} are of another aggregation")
            message = self._keys_of(word)
            pairs.append((message.channel, message.mask))
        if self.name not in senders:
            raise Refused("keys of this site are missing")
        for word in frame.words:
            self._see(word)
        # Whose keys are here may send its vector: none of its backups may do so again.
        self._folder.replace("enrolled", wire.encoded(wire.Enrolment(tuple(self._seen.values()))))
        sites = [self.names.index(name) for name in senders]
        own = self.names.index(self.name)
        part.sites = tuple(sites)
        number = sites.index(own)
        neighbours = {j: b"".join(pair) for j, pair in enumerate(pairs) if j != number}
        transcript = primitives.transcript(pairs)
        self._reply(Roster(part.nonce, number, len(sites), transcript, neighbours))

    def _reply(self, message: ProtocolMessage) -> None:
        """What the client says to a message; where it says nothing, its attempt is over."""
        part = self._part
        assert part is not None
        try:
            answer = reply(part.client, message)
        except Abort as abort:
            self._fail(abort.reason)
            return
        if isinstance(answer, MaskedVector):
            # The sum may be opened as soon as the vector is out.
            self._note("masked")
            self.charged.add(self.round)
            self.spent = True
            self._masked = self.attempt
            self._values = None
        elif isinstance(message, Request):
            self._confirmed = tuple(part.sites[number] for number in sorted(message.survivors))
        part.deadline = self._clock() + 2 * self._limits.stage
        self._say(self.aggregator(self.attempt), self._word(self.attempt, part.nonce, answer))

    # As the aggregator.

    def _call_again(self, peer: str) -> None:
        """Ask a site for its keys that was not there, or had not come to this round."""
        mine = self._aggregation
        if mine is None or mine.server.stage != "enrol" or peer in mine.keys:
            return
        if self._may_add_up(peer, mine.attempt):
            hello = mine.server.hello
            self._utter(peer, self._word(mine.attempt, hello.nonce, hello))

    def _call(self, now: float) -> None:
        """Ask all sites for their keys."""
        server = SumServer(self.terms)
        self._aggregation = _Aggregation(server, self.attempt, now + self._limits.enrol)
        word = self._word(self.attempt, server.hello.nonce, server.hello)
        for peer in sorted(self.live):
            self._utter(peer, word)
        self._answer_call(word)

    def _hear_client(self, mine: _Aggregation, word: wire.Word, message: ProtocolMessage) -> None:
        """What a site says in the aggregation that this one runs."""
        server = mine.server
        if isinstance(message, Keys):
            if server.stage != "enrol" or (message.nonce, message.terms) != server.hello:
                raise Refused("keys that are late, or of other terms")
            self._see(word)
            mine.keys[word.sender] = word
            return
        if word.sender not in mine.names:
            raise Refused(f"{word.sender} is in no part of this aggregation")
        try:
            server.accept(mine.names.index(word.sender), message)
        except Rejected as rejection:
            raise Refused(str(rejection)) from None

    def _advance(self, mine: _Aggregation, now: float) -> None:
        """End a stage where all have spoken, or its time is over."""
        server = mine.server
        try:
            if server.stage == "enrol":
                silent = (self.live | {self.name}) - mine.keys.keys()
                is_awaited = any(self._may_add_up(name, mine.attempt) for name in silent)
                if is_awaited and now < mine.deadline:
                    return
                self._enrol(mine)
            elif not server.ready and now < mine.deadline:
                return
            elif mine.ends:
                end = mine.ends.pop(0)
                for number, message in end():
                    word = self._word(mine.attempt, server.hello.nonce, message)
                    self._say(mine.names[number], word)
            else:
                self._open(mine)
                return
        except Abort as abort:
            self._aggregation = None
            failed = wire.Failed(self.round, mine.attempt, server.hello.nonce, abort.reason[:900])
            for peer in (*sorted(self.live), self.name):
                self._say(peer, failed)
            return
        mine.deadline = now + self._limits.stage

    def _enrol(self, mine: _Aggregation) -> None:
        """End enrolment, in the roster's order, and tell all the keys."""
        server = mine.server
        words = []
        for name in self.names:
            word = mine.keys.get(name)
            if word is None:
                continue
            message = decoded_message(word.payload)
            assert isinstance(message, Keys)
            try:
                server.enrol(message)
            except Rejected as rejection:
                _log.warning("%s is not in the sum: %s", name, rejection)
                continue
            mine.names.append(name)
            words.append(word)
        # Each site derives its roster from the keys: what the server drew is not said.
        draw, *ends = server.ends
        draw()
        mine.ends = [lambda end=end: end().items() for end in ends]  # type: ignore[misc]
        for number, name in enumerate(mine.names):
            if name != self.name and name not in self.live:
                server.leave(number)
            self._say(name, wire.Enrolment(tuple(words)))

    def _open(self, mine: _Aggregation) -> None:
        """Sign the sum, store it, and say it to all."""
        total = mine.server.total()
        residues = total.values.astype(np.uint64) & primitives.low_bits(self.terms.bits)
        survivors = tuple(self.names.index(mine.names[number]) for number in total.survivors)
        packed = primitives.packed_vector(residues, self.terms.bits)
        bare = wire.Opened(self.round, mine.attempt, self.before, survivors, packed, b"")
        content = wire.opened_content(self._run, self._phase, bare)
        opened = bare._replace(signature=self._identity.sign("sum", content))
        self._aggregation = None
        self._take_opened(self.name, opened)
        for peer in sorted(self.live):
            self._utter(peer, opened)

    # What anybody says.

    def _take_word(self, peer: str, word: wire.Word) -> None:
        if word.sender != peer:
            raise Refused(f"a word of {word.sender!r}")
        if word.round != self.round or word.before != self.before:
            self._compare(peer, word)
            return
        self._check_word(word)
        self._notice(peer, word.round)
        message = decoded_message(word.payload)
        aggregator = self.aggregator(word.attempt)
        if isinstance(message, _OF_CLIENT) and aggregator == self.name:
            mine = self._aggregation
            # What comes after an aggregation is over is no fault of its sender's.
            if mine is not None and mine.server.hello.nonce == word.nonce:
                self._hear_client(mine, word, message)
        elif isinstance(message, _OF_AGGREGATOR) and aggregator == peer:
            part = self._part
            if isinstance(message, Hello):
                self._take_call(peer, word)
            elif part is not None and (self.attempt, part.nonce) == (word.attempt, word.nonce):
                self._reply(message)
        else:
            raise Refused(f"{type(message).__name__}, which is not {peer}'s to say")

    def _take_call(self, peer: str, word: wire.Word) -> None:
        """Keep a call until this site has come to its attempt."""
        if self.spent:
            if self._voids:
                self._say(peer, wire.Voided(tuple(self._voids.values())))
            return
        if word.attempt < self.attempt:
            # It came back, and does not know yet: no fault of its.
            self._utter(peer, wire.At(self.round, self.attempt))
            return
        # One that is further ahead than there are sites would let one site rush all others.
        if word.attempt >= self.attempt + len(self.names):
            raise Refused(f"a call for attempt {word.attempt} in attempt {self.attempt}")
        if self._part is None or word.attempt > self.attempt:
            self._calls.setdefault(word.attempt, word)

    def _compare(self, peer: str, word: wire.Word) -> None:
        """Find out who is behind, or why sums differ."""
        if word.round < self.round:
            self._hand_on(peer, word.round)
        elif word.round > self.round:
            self._ask(peer, word.round)
        else:
            self._part_ways(peer)

    def _part_ways(self, peer: str) -> NoReturn:
        """Ask who signed two: the sum of the round before, as the other has it, proves it."""
        self._utter(peer, wire.At(max(0, self.round - 1), 0))
        raise Refused(f"{peer} and {self.name} have other sums before round {self.round}")

    def _hand_on(self, peer: str, round: int) -> None:
        """Say the outcome of a round that a site lacks; with the next one it asks again."""
        if round < self.round:
            self._utter(peer, self._kept(round))
        elif round == self.round and self.outcome is not None:
            self._utter(peer, self.outcome)
        elif round == self.round:
            if self._voids:
                # They may have come to it too early.
                self._utter(peer, wire.Voided(tuple(self._voids.values())))
            self._call_again(peer)

    def _ask(self, peer: str, round: int) -> None:
        """Ask a site that is in a later round for the outcome of this one, once in each of its."""
        is_new = self._notice(peer, round)
        if round > self.round:
            if self.outcome is None and (is_new or peer not in self._asked):
                self._asked.add(peer)
                self._utter(peer, wire.At(self.round, self.attempt))

    def _notice(self, peer: str, round: int) -> bool:
        """Note the round that a site is in; whether it is later than the one noted last."""
        earlier = self.places.get(peer, 0)
        # Who asks for the sum of an earlier round is not back in it.
        self.places[peer] = max(round, earlier)
        return round > earlier

    def _take_opened(self, peer: str, opened: wire.Opened) -> None:
        """Take a sum that its aggregator signed, or find that two were signed."""
        aggregator = self.aggregator(opened.attempt, opened.round)
        content = wire.opened_content(self._run, self._phase, opened)
        if not self._roster.verify(aggregator, "sum", content, opened.signature):
            raise Refused(f"a sum of round {opened.round} that {aggregator} did not sign")
        if opened.round < self.round:
            earlier = self._kept(opened.round)
            if self._digest(earlier) != self._digest(opened):
                self._accuse_sums(earlier, opened)
            return
        if opened.round > self.round:
            self._ask(peer, opened.round)
            return
        if self.outcome is not None:
            if self._digest(self.outcome) != self._digest(opened):
                self._accuse_sums(self.outcome, opened)
            return
        if opened.before != self.before:
            self._part_ways(peer)
        self._check_opened(opened)
        self._settle(opened)

    def _check_opened(self, opened: wire.Opened) -> None:
        """Refuse a sum that is no answer to what this site said."""
        survivors = opened.survivors
        if survivors != tuple(sorted(set(survivors))) or survivors[-1:] >= (len(self.names),):
            raise Refused("a sum whose survivors are no sites")
        if self.terms.minimum > len(survivors):
            raise Refused(f"a sum of {len(survivors)} sites, fewer than {self.terms.minimum}")
        try:
            self.vector(opened)
        except ValueError as error:
            raise Refused(f"a sum that is none: {error}") from None
        aggregator = self.aggregator(opened.attempt)
        # Others may take such a sum and go on, so that this site would wait for ever.
        if self._masked != opened.attempt:
            if self.names.index(self.name) in survivors:
                self._accuse(
                    [aggregator],
                    [opened],
                    f"{aggregator} signed a sum of round {opened.round} with a vector that "
                    f"{self.name} did not send, unless its folder was restored or copied",
                )
        elif self._confirmed not in (None, survivors):
            self._accuse(
                [aggregator],
                [opened],
                f"{aggregator} signed a sum of round {opened.round} of other sites than it asked "
                "for",
            )

    def _settle(self, outcome: _Outcome) -> None:
        """This round has an outcome: it is put on disk before anything is made of it."""
        name = f"sums/{self.round}"
        if self._folder.read(name) is None:
            self._folder.create(name, wire.encoded(outcome))
        self.outcome = outcome
        self._part = None
        self._aggregation = None

    def _take_voided(self, peer: str, frame: wire.Voided) -> None:
        """Take what sites said of a round without a sum; a sum beside all of it proves a lie."""
        voids = frame.voids
        round = voids[0].round if voids else 0
        names = self._asked_for_voids(round)
        if len(voids) < len(names):
            for void in voids:
                self._take_void(peer, void)
            return
        senders = {void.sender for void in voids}
        is_of_one_round = {void.round for void in voids} == {round}
        if not senders >= {*names} or len(senders) < len(voids) or not is_of_one_round:
            raise Refused("word that there is no sum, and not of each site once")
        known = self._kept(round) if round < self.round else None
        if round == self.round:
            known = self.outcome
        if isinstance(known, wire.Opened):
            for void in voids:
                self._check_void(void)
            self._accuse_sums(frame, known)
        # Who has all of them asks for nothing.
        for void in voids:
            if round == self.round:
                self._take_void(peer, void)

    def _take_void(self, peer: str, void: wire.Void) -> None:
        """Note that a site has no sum of a round; once all say so there is none."""
        if void.round == self.round and void.sender in self._voids and self.outcome is None:
            return
        self._check_void(void)
        if void.sender == self.name and void.round >= self.round and self.outcome is None:
            self._leave(f"{peer} has word of {self.name} of round {void.round}")
        if void.round > self.round:
            self._ask(peer, void.round)
        elif void.round < self.round:
            self._hand_on(peer, void.round)
        elif void.before != self.before:
            self._part_ways(peer)
        elif isinstance(self.outcome, wire.Opened):
            self._utter(peer, self.outcome)
        elif self.outcome is None:
            self._voids[void.sender] = void
            self._lose(void.sender)
            self._give_up()

    def _check_void(self, void: wire.Void) -> None:
        content = wire.void_content(self._run, self._phase, void.round, void.before)
        if not self._roster.verify(void.sender, "void", content, void.signature):
            raise Refused(f"a word of {void.sender!r} that it has no sum, which it did not sign")

    def _give_up(self) -> None:
        """Say that there is no sum, where too few are left for one; or know it of all."""
        names = self._asked_for_voids(self.round)
        left = [name for name in names if name not in self._voids or name == self.name]
        if not self.spent and len(left) < self.terms.minimum:
            self.spent = True
            self._part = None
            self._say_void()
        if self._voids.keys() >= {*names}:
            self._settle(wire.Voided(tuple(self._voids[name] for name in names)))

    def _asked_for_voids(self, round: int) -> list[str]:
        """Without whose word no round is void: all but those who left before it."""
        return [name for name in self.names if self._takes_part(name, round)]

    def _takes_part(self, name: str, round: int) -> bool:
        """Whether a site had not left before a round."""
        return self._last_rounds.get(name, round) >= round

    def _may_add_up(self, name: str, attempt: int) -> bool:
        """Whether a site may be in an attempt: it is here, in no later one, and gave up no sum."""
        is_in = name not in self._voids and self._takes_part(name, self.round)
        return is_in and self._attempts.get(name, 0) <= attempt

    def _say_void(self) -> None:
        """Sign that this site has no sum of this round, and will be in none."""
        # An aggregator that says so opens nothing any more.
        self._aggregation = None
        self._part = None
        if self.name in self._voids:
            return
        self._note("void")
        content = wire.void_content(self._run, self._phase, self.round, self.before)
        signature = self._identity.sign("void", content)
        self._voids[self.name] = wire.Void(self.name, self.round, self.before, signature)
        for peer in sorted(self.live):
            self._utter(peer, wire.Voided((self._voids[self.name],)))
        self._give_up()

    def _lose(self, peer: str) -> None:
        """Wait no longer for a site in this aggregation."""
        mine = self._aggregation
        if mine is not None and peer in mine.names:
            mine.server.leave(mine.names.index(peer))

    # What proves a fault.

    def _see(self, word: wire.Word) -> None:
        """Note keys whose signature was checked, the last of each site; or stop for them."""
        place = word.round, word.attempt
        if word.sender == self.name:
            if self._signed.get(place) != hashlib.sha256(word.payload).hexdigest():
                self._leave(f"there are keys of {self.name} of round {word.round}")
            return
        earlier = self._seen.setdefault(word.sender, word)
        self._check_single(earlier, word)
        if place > (earlier.round, earlier.attempt):
            self._seen[word.sender] = word

    def _check_single(self, earlier: wire.Word, word: wire.Word) -> None:
        """Stop for two keys of one attempt: they prove that their site lives twice."""
        places = {(one.round, one.attempt) for one in (earlier, word)}
        if len(places) == 1 and earlier.payload != word.payload:
            self._accuse(
                [word.sender],
                [wire.Enrolment((earlier, word))],
                f"{word.sender} signed two keys of attempt {word.attempt} of round {word.round}: "
                "its folder was copied or restored",
            )

    def _take_two_keys(self, first: wire.Word, second: wire.Word) -> None:
        """Take what another site stopped for."""
        for word in (first, second):
            self._keys_of(word)
            self._see(word)
        self._check_single(first, second)

    def _leave(self, fault: str) -> NoReturn:
        """Stop: somebody has this site's signature on what its journal lacks."""
        self.doubt = (
            f"{fault}, which this folder lacks: it was restored from a backup, or somebody runs a "
            f"copy of it. {self.name} must leave"
        )
        raise Refused(self.doubt)

    def _accuse_sums(self, first: _Outcome, second: _Outcome) -> None:
        """Stop: there are two outcomes of one round, and signatures prove whose they are."""
        opened = [one for one in (first, second) if isinstance(one, wire.Opened)]
        round = opened[0].round
        signers = sorted({self.aggregator(one.attempt, round) for one in opened})
        fault = f"round {round} has two outcomes, signed by {' and '.join(signers)}"
        if len(signers) > 1:
            fault += (
                ", of whom one lies: by its journal each site knows the attempt in which its "
                "vector went out"
            )
        self._accuse(signers, [first, second], fault)

    def _accuse(self, signers: list[str], frames: list[wire.Frame], fault: str) -> NoReturn:
        """Store and hand on what proves a fault, and stop."""
        name = f"{_EVIDENCE}{'-'.join(signers)}-{self.round}"
        for number, frame in enumerate(frames, 1):
            if self._folder.read(f"{name}-{number}") is None:
                self._folder.create(f"{name}-{number}", wire.encoded(frame))
        # Once: who has it says it to all, this site among them.
        if self.doubt is None:
            for peer in sorted(self.live):
                for frame in frames:
                    self._utter(peer, frame)
        self.doubt = f"{fault}. {self._folder.path / name}-1 has it. Go on without who lied"
        raise Refused(fault)

    # What is signed, stored and read.

    def _say(self, peer: str, frame: wire.Frame) -> None:
        if peer == self.name:
            self._own.append(frame)
        else:
            self._utter(peer, frame)

    def _word(self, attempt: int, nonce: bytes, message: ProtocolMessage) -> wire.Word:
        payload = encoded(message)
        bare = wire.Word(self.name, self.round, attempt, nonce, self.before, payload, b"")
        content = wire.word_content(self._run, self._phase, self.aggregator(attempt), bare)
        return bare._replace(signature=self._identity.sign("word", content))

    def _check_word(self, word: wire.Word) -> None:
        aggregator = self.aggregator(word.attempt, word.round)
        content = wire.word_content(self._run, self._phase, aggregator, word)
        if not self._roster.verify(word.sender, "word", content, word.signature):
            raise Refused(f"a word that {word.sender!r} did not sign for this attempt")

    def _keys_of(self, word: wire.Word) -> Keys:
        """The keys that a site signed."""
        self._check_word(word)
        message = decoded_message(word.payload)
        if not isinstance(message, Keys):
            raise Refused(f"{word.sender} signed what are no keys")
        return message

    def _note(self, kind: str, digest: str = "-") -> None:
        """Put on disk what this site is about to say."""
        self._folder.append("journal", f"{kind} {self.round} {self.attempt} {digest}".encode())

    def _kept(self, round: int) -> _Outcome:
        """The outcome of an earlier round."""
        frame = self._read(f"sums/{round}")
        assert isinstance(frame, _Outcome)
        return frame

    def _read(self, name: str) -> wire.Frame:
        """A file of the folder: an outcome, or keys."""
        try:
            frame = wire.decoded(self._folder.read(name) or b"")
        except Refused:
            frame = None
        if not isinstance(frame, wire.Enrolment if name == "enrolled" else _Outcome):
            raise MustLeave(f"{name} is damaged or gone; this site must leave")
        return frame

    def _is_void(self, round: int) -> bool:
        return isinstance(self._kept(round), wire.Voided)

    def _digest(self, outcome: _Outcome) -> bytes:
        """What stands for this outcome and all before it."""
        if isinstance(outcome, wire.Opened):
            content = wire.opened_content(self._run, self._phase, outcome)
        else:
            void = outcome.voids[0]
            content = b"void" + wire.void_content(self._run, self._phase, void.round, void.before)
        return hashlib.sha256(content).digest()


def decoded_message(payload: bytes) -> ProtocolMessage:
    """The message of a word.

    Args:
        payload: Bytes of another site.

    Raises:
        Refused: For what is none.
    """
    try:
        return decoded(payload)
    except Rejected as rejection:
        raise Refused(str(rejection)) from None


def _note_of(line: bytes) -> _Note | None:
    try:
        kind, round, attempt, digest = line.decode().split(" ")
        return _Note(kind, int(round), int(attempt), digest)
    except ValueError:
        return None
