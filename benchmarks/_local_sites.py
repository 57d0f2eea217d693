"""Sites of one process: identities, what they agree on, and sessions over queues."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpjax.plans.plan import Plan
from dpjax.secagg.terms import Limits
from dpjax.sites import wire
from dpjax.sites.channel import Event, Traffic
from dpjax.sites.identity import Authority, Identity, Roster, request
from dpjax.sites.peers import PeerSums, PeerTerms
from dpjax.sites.store import Folder

NAMES = ("geneva", "lyon", "nice", "turin")


def identities(folder: Path, names: Iterable[str] = NAMES) -> dict[str, Identity]:
    """Of all sites, by an authority for trials."""
    authority = Authority(folder / "authority")
    loaded = {}
    for name in names:
        key, demand = request(name, folder)
        certificate = authority.sign(demand)
        root = authority.certificate
        loaded[name] = Identity.load(name, certificate=certificate, key=key, authority=root)
    return loaded


class Agreed:
    """A project, without its file."""

    names = NAMES
    seed = 3
    spoiled = 3
    phase = 0
    totals: dict[str, Any] = {}

    def __init__(
        self, plan: Plan, identities: Mapping[str, Identity], average_rounds: int = 0
    ) -> None:
        self.plan = plan
        self.roster = Roster({name: identities[name].public_key for name in NAMES})
        self.digest = plan.fingerprint()
        self.average_rounds = average_rounds
        self.extra: dict[str, str] = {}

    def described(self) -> dict[str, Any]:
        """What a model's file says beside the model."""
        return {}

    def terms(self) -> dict[str, str]:
        """What sites compare."""
        return {"plan": self.digest, "roster": self.roster.digest, **self.extra}


class Network:
    """Which channels are open, and the sessions between them."""

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self.channels: dict[str, LocalChannel] = {}
        self.cut: set[frozenset[str]] = set()
        self.frames: list[tuple[str, str, bytes]] = []

    def join(self, first: "LocalChannel", second: "LocalChannel") -> None:
        """A hello between two ends, and a session where both accept it."""
        pair = frozenset((first.name, second.name))
        if second.name not in first.peers or pair in self.cut or second.name in first.sessions:
            return
        for one, other in ((first, second), (second, first)):
            reason = other.check(one.name, one.greeting(other.name))
            if reason is not None:
                for end, peer in ((one, other), (other, one)):
                    end.events.put(Event("refused", peer.name, b"", reason))
                return
        for one, other in ((first, second), (second, first)):
            one.sessions.add(other.name)
            one.events.put(Event("opened", other.name, b"", ""))


class LocalChannel:
    """A `dpjax.sites.channel.Channel` between threads."""

    insecure = False

    def __init__(self, network: Network, name: str, peers: set[str]) -> None:
        self.network = network
        self.name = name
        self.peers = peers
        self.sessions: set[str] = set()
        self.events: queue.Queue[Event] = queue.Queue()

    def open(
        self, greeting: Callable[[str], bytes], check: Callable[[str, bytes], str | None]
    ) -> None:
        """Meet those who are there."""
        self.greeting = greeting
        self.check = check
        with self.network.guard:
            self.network.channels[self.name] = self
            for other in list(self.network.channels.values()):
                if other is not self:
                    self.network.join(self, other)

    def send(self, peer: str, data: bytes) -> bool:
        """Put a message into the other's queue."""
        with self.network.guard:
            if peer not in self.sessions:
                return False
            self.network.frames.append((self.name, peer, data))
            self.network.channels[peer].events.put(Event("message", self.name, data, ""))
            return True

    def receive(self, seconds: float) -> Event | None:
        """The next event."""
        try:
            return self.events.get(timeout=seconds)
        except queue.Empty:
            return None

    def statistics(self) -> Mapping[str, Traffic]:
        """Nothing is counted."""
        return {}

    def close(self) -> None:
        """End all sessions; messages that are in queues still arrive."""
        with self.network.guard:
            if self.network.channels.get(self.name) is self:
                del self.network.channels[self.name]
            for peer in self.sessions:
                other = self.network.channels.get(peer)
                if other is not None:
                    other.sessions.discard(self.name)
                    other.events.put(Event("closed", self.name, b"", "gone"))
            self.sessions.clear()


class Sums:
    """Sites that add up, one after the other in one thread, over queues of bytes."""

    def __init__(self, terms: PeerTerms, identities: Mapping[str, Identity], folder: Path) -> None:
        roster = Roster({name: one.public_key for name, one in identities.items()})
        self.queue: deque[tuple[str, str, bytes]] = deque()
        self.bytes = 0
        self.folders = {name: Folder(folder / "runs" / name) for name in identities}
        self.sites: dict[str, PeerSums] = {}
        for name, identity in identities.items():

            def say(peer: str, frame: wire.Frame, name: str = name) -> None:
                self.queue.append((name, peer, wire.encoded(frame)))

            options = {"limits": Limits(), "spoiled": 0, "say": say}
            self.sites[name] = PeerSums(terms, identity, roster, self.folders[name], **options)
        for name, site in self.sites.items():
            site.resume(bytes(32), 0)
            for peer in identities:
                if peer != name:
                    site.came(peer)

    def add_up(self, values: np.ndarray) -> wire.Opened:
        """Hold a round of all sites' vectors, and return its sum."""
        for site, row in zip(self.sites.values(), values, strict=True):
            site.offer(row)
            site.tick()
        while self.queue:
            sender, peer, data = self.queue.popleft()
            self.bytes += len(data)
            self.sites[peer].hear(sender, wire.decoded(data))
        outcomes = []
        for site in self.sites.values():
            assert isinstance(site.outcome, wire.Opened)
            outcomes.append(site.outcome)
            site.absorbed()
        return outcomes[0]

    def total(self, outcome: wire.Opened) -> np.ndarray:
        """The residues of a sum."""
        return next(iter(self.sites.values())).vector(outcome)

    def close(self) -> None:
        """Let go of the folders."""
        for folder in self.folders.values():
            folder.close()
