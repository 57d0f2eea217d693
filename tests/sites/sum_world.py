"""Sites that add up among themselves, in one thread: a network, a clock, kills and restarts."""

import random
from collections import defaultdict, deque
from pathlib import Path

import numpy as np

from dpjax.secagg import primitives
from dpjax.secagg.messages import Keys, MaskedVector, decoded
from dpjax.secagg.terms import Limits
from dpjax.sites import wire
from dpjax.sites.identity import Authority, Identity, Refused, Roster, request
from dpjax.sites.peers import PeerSums, PeerTerms
from dpjax.sites.store import Folder, MustLeave

LENGTH = 8
BITS = 20
RUN = bytes(range(32))
LIMITS = Limits(enrol=20.0, stage=10.0, send=5.0)


def terms(sites: int, dropouts: int = 1, colluders: int = 1) -> PeerTerms:
    dropout = (dropouts + 0.5) / sites if dropouts else 0.0
    corrupt = (colluders + 0.5) / sites
    return PeerTerms(sites, LENGTH, BITS, None, corrupt, dropout, "semi_malicious")


def identities(folder: Path, count: int) -> dict[str, Identity]:
    authority = Authority(folder / "authority")
    loaded = {}
    for number in range(count):
        name = f"site-{number:02d}"
        key, demand = request(name, folder)
        root = authority.certificate
        certificate = authority.sign(demand)
        loaded[name] = Identity.load(name, certificate=certificate, key=key, authority=root)
    return loaded


def vector(number: int, round: int) -> np.ndarray:
    """What a site adds in a round: it does not depend on the attempt."""
    return np.random.default_rng([number, round]).integers(0, 2**BITS, LENGTH)


class World:
    """All sites of a run; `step` does one thing that may happen next."""

    def __init__(
        self,
        folder: Path,
        identities: dict[str, Identity],
        rounds: int,
        *,
        seed: int = 0,
        dropouts: int = 1,
        colluders: int = 1,
        spoiled: int = 5,
    ) -> None:
        self.folder = folder
        self.identities = identities
        self.roster = Roster({name: one.public_key for name, one in identities.items()})
        self.names = list(identities)
        self.terms = terms(len(self.names), dropouts, colluders)
        self.rounds = rounds
        self.spoiled = spoiled
        self.random = random.Random(seed)
        self.now = 0.0
        self.queues: dict[tuple[str, str], deque[bytes]] = defaultdict(deque)
        self.sites: dict[str, PeerSums] = {}
        self.folders: dict[str, Folder] = {}
        self.cut: set[frozenset[str]] = set()
        # What lasts of each site's state: outcomes of the rounds done.
        self.history: dict[str, list[wire.Opened | wire.Voided]] = {n: [] for n in self.names}
        self.left: dict[str, str] = {}
        self.refusals: list[str] = []
        # Everything that went out, by kind and sender.
        self.masked: dict[tuple[str, int], set[bytes]] = defaultdict(set)
        self.keys: dict[tuple[str, int, int], set[bytes]] = defaultdict(set)
        # Kinds of messages that each site has said in round 1.
        self.words: set[tuple[str, type]] = set()

    def start(self, *names: str) -> None:
        for name in names or self.names:
            folder = Folder(self.folder / name)
            site = PeerSums(
                self.terms,
                self.identities[name],
                self.roster,
                folder,
                limits=LIMITS,
                spoiled=self.spoiled,
                say=lambda peer, frame, name=name: self.say(name, peer, frame),
                clock=lambda: self.now,
            )
            self.folders[name] = folder
            self.sites[name] = site
            site.resume(RUN, len(self.history[name]))
            for peer in list(self.sites):
                self.join(name, peer)

    def kill(self, name: str) -> None:
        """As SIGKILL: what is on disk stays, sessions end."""
        self.sites.pop(name)
        self.folders.pop(name).close()
        for peer in list(self.sites):
            self.part(name, peer)

    def join(self, first: str, second: str) -> None:
        if first == second or frozenset((first, second)) in self.cut:
            return
        if first not in self.sites or second not in self.sites:
            return
        pairs = ((first, second), (second, first))
        for name, peer in pairs:
            # The hello: each shows what it has of the other.
            try:
                self.sites[name].check_shown(peer, self.sites[peer].shown(name))
            except Refused:
                return
        for name, peer in pairs:
            self.sites[name].came(peer)

    def part(self, first: str, second: str) -> None:
        for one, other in ((first, second), (second, first)):
            self.queues[one, other].clear()
            if one in self.sites:
                self.sites[one].left(other)

    def say(self, sender: str, peer: str, frame: wire.Frame) -> None:
        self.record(sender, frame)
        if frozenset((sender, peer)) in self.cut or peer not in self.sites:
            return
        self.queues[sender, peer].append(wire.encoded(frame))

    def record(self, sender: str, frame: wire.Frame) -> None:
        if isinstance(frame, wire.Word) and frame.sender == sender:
            message = decoded(frame.payload)
            if frame.round == 1:
                self.words.add((sender, type(message)))
            if isinstance(message, MaskedVector):
                self.masked[sender, frame.round].add(frame.payload)
            if isinstance(message, Keys):
                self.keys[sender, frame.round, frame.attempt].add(frame.payload)

    def deliver(self, sender: str, peer: str) -> None:
        data = self.queues[sender, peer].popleft()
        site = self.sites[peer]
        try:
            site.hear(sender, wire.decoded(data))
        except Refused as refusal:
            self.refusals.append(f"{peer} of {sender}: {refusal}")

    def think(self, name: str) -> bool:
        """A site's own turn: offer a vector, or absorb what came."""
        site = self.sites[name]
        if site.doubt is not None:
            self.leave(name, site.doubt)
            return True
        if site.outcome is not None:
            self.history[name].append(site.outcome)
            try:
                site.absorbed()
            except MustLeave as reason:
                self.leave(name, str(reason))
                return True
            if site.round == self.rounds:
                site.finish()
            return True
        if site.is_wanted and site._values is None and site.round < self.rounds:
            site.offer(vector(self.names.index(name), site.round))
            return True
        return False

    def leave(self, name: str, reason: str) -> None:
        self.left[name] = reason
        self.kill(name)

    def step(self) -> None:
        choices = [pair for pair, queue in self.queues.items() if queue and pair[1] in self.sites]
        thinkers = [name for name in self.sites if self._wants_turn(name)]
        if choices and (not thinkers or self.random.random() < 0.7):
            self.deliver(*self.random.choice(choices))
        elif thinkers:
            self.think(self.random.choice(thinkers))
        else:
            # Nothing happens any more until somebody's time is over.
            self.now += 0.5
        for name in list(self.sites):
            self.sites[name].tick()

    def _wants_turn(self, name: str) -> bool:
        site = self.sites[name]
        wants = site.is_wanted and site._values is None and site.round < self.rounds
        return site.outcome is not None or wants or site.doubt is not None

    @property
    def done(self) -> bool:
        return all(len(self.history[name]) >= self.rounds for name in self.sites)

    def run(self, steps: int = 200_000) -> None:
        for _ in range(steps):
            if self.done:
                return
            self.step()
        waits = {name: (site.round, site.missing()) for name, site in self.sites.items()}
        raise AssertionError(f"no end: {waits}")

    def check(self) -> None:
        """No vector went out twice, no keys twice, and all sums are those of their survivors."""
        assert all(len(payloads) == 1 for payloads in self.masked.values())
        assert all(len(payloads) == 1 for payloads in self.keys.values())
        longest = max(self.history.values(), key=len)
        self.check_histories(longest)
        for round, outcome in enumerate(longest):
            if isinstance(outcome, wire.Opened):
                self.check_sum(round, outcome)

    def check_histories(self, longest: list[wire.Opened | wire.Voided]) -> None:
        """All sites have the same outcomes, signatures apart."""
        for history in self.history.values():
            for mine, theirs in zip(history, longest, strict=False):
                assert distinguished(mine) == distinguished(theirs)

    def check_sum(self, round: int, outcome: wire.Opened) -> None:
        """A sum is that of its survivors."""
        expected = sum(vector(number, round) for number in outcome.survivors)
        total = primitives.unpacked_vector(outcome.total, LENGTH, BITS)
        np.testing.assert_array_equal(total, expected % 2**BITS)
        assert len(outcome.survivors) >= self.terms.minimum


def distinguished(outcome: wire.Opened | wire.Voided) -> object:
    """What differs between outcomes that differ."""
    return outcome[:-1] if isinstance(outcome, wire.Opened) else "void"
