"""Sites that are audited by record and replay, for `audit_sites`."""

import contextlib
import copy
import functools
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import _audit as audit
from _local_sites import NAMES, Agreed, LocalChannel, Network, identities
from dpjax.contrib import replay
from dpjax.data.partition import Partition
from dpjax.engine import round as round_
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.plans import optimizers, plan, protect
from dpjax.plans.plan import Plan
from dpjax.sites import meeting, wire
from dpjax.sites import site as site_
from dpjax.sites.carrier import GrpcChannel
from dpjax.sites.channel import Channel, ChannelLimits, Event
from dpjax.sites.identity import Identity
from dpjax.sites.noise import SiteNoise
from dpjax.sites.site import Site, Waits
from dpjax.sites.store import KEY_BYTES, Folder

VICTIM = 1
NEIGHBOUR = 2
MOST_ROUNDING = 0.2
"""Of the difference between two worlds, what may vary with the noise."""
FEWEST = 160
"""Runs that all links' numbers need."""
SECONDS = 60.0
"""After which a run hangs."""


class Case(NamedTuple):
    """What is audited: a noise design, the sampler, and the faults that are tried with it."""

    noise: str
    sampler: str
    faults: tuple[str, ...]


HALF = "noise is 0.5 of what it should be"
TWICE = "two rounds draw from one address"
BARE = "noise is left out on one link"
CASES = (
    Case("independent", "Random", (HALF, BARE)),
    Case("independent", "Cyclic", (TWICE,)),
    Case("mafalda", "Random", (HALF,)),
    Case("banded_inverse", "Cyclic", (HALF, TWICE)),
    Case("whisper", "Random", (HALF,)),
    Case("spacetime", "Cyclic", (HALF, TWICE)),
)


def planned(case: Case, rounds: int = audit.ROUNDS) -> Plan:
    """The plan of a case: a release, as sites need it."""
    if case.sampler == "Random":
        sampler: Any = samplers.Random(1)
        counts = (1,) * len(NAMES)
    else:
        (sampler, counts), *_ = audit.SAMPLERS[case.sampler]
    refusals = []
    for design in audit.NOISES[case.noise]:
        try:
            config = plan.Config(
                noise=design,
                sampler=sampler,
                rounds=rounds,
                optimizer=optimizers.Sgd(0.5),
                budget=protect.Budget(audit.EPSILON, audit.DELTA),
                protect=protect.Protect("replace_record", clip_norm=1.0),
                release=True,
            )
            return plan.make(config, audit.NETWORK, counts=counts)
        except ValueError as error:
            refusals.append(str(error))
    raise ValueError(f"{case} cannot be planned: {refusals}")


def problems(training_plan: Plan, victim: int | None) -> list[Problem]:
    """The records of each site, as one agent; with a victim, the neighbour that differs there."""
    together = audit.problem(training_plan, victim)
    alone = []
    for number, count in enumerate(together.partition.counts):
        rows = together.partition.indices[number][:count]
        shards = Partition(np.arange(count)[None], np.array([count]))
        task = Problem(
            together.init,
            together.loss,
            together.metrics,
            together.x[rows],
            together.y[rows],
            shards,
            (),
        )
        alone.append(task)
    return alone


class Tap:
    """A channel that records the messages of rounds as they arrive."""

    def __init__(self, channel: Channel, name: str) -> None:
        self.channel = channel
        self.name = name
        self.insecure = channel.insecure
        self.open = channel.open
        self.statistics = channel.statistics
        self.close = channel.close
        self.arrived: dict[tuple[str, str, int], bytes] = {}

    def send(self, peer: str, data: bytes) -> bool:
        """Pass it on."""
        return self.channel.send(peer, data)

    def receive(self, seconds: float) -> Event | None:
        """Record what it is, if it is a round's message."""
        event = self.channel.receive(seconds)
        if event is not None and event.kind == "message":
            frame = wire.decoded(event.data)
            if isinstance(frame, wire.RoundMessage):
                self.arrived[event.peer, self.name, frame.round] = frame.payload
        return event


class Leak(Tap):
    """A broken copy: to one neighbour goes what a site computed, before its noise.

    It signs both messages, and takes the neighbour's receipts for those of the other one. Honest
    sites find it where two receivers are joined without passing the sender; on a path none are.
    """

    def attach(self, site: Site, identity: Identity) -> None:
        """Learn what the site computes."""
        self.site = site
        self.identity = identity
        self.bare: dict[int, bytes] = {}
        self.digests: dict[bytes, bytes] = {}
        outgoing = site.compute.outgoing

        def with_bare(state: Any) -> Any:
            compute = site.compute
            zeros = compute._with(compute._places(int(state.round)))
            sent = round_.outgoing_program(compute._part.statics, zeros, state)
            self.bare[int(state.round)] = meeting.bytes_of(sent.message)
            return outgoing(state)

        site.compute.outgoing = with_bare  # type: ignore[method-assign]

    def send(self, peer: str, data: bytes) -> bool:
        """Leave the noise out on one link."""
        frame = wire.decoded(data)
        if peer == NAMES[NEIGHBOUR] and isinstance(frame, wire.RoundMessage):
            bare = frame._replace(payload=self.bare[frame.round])
            header = bare.header(self.name)
            content = wire.message_content(
                self.site._conversation.run, self.site.agreement.digest, header
            )
            bare = bare._replace(signature=self.identity.sign("message", content))
            self.digests[header.digest] = frame.header(self.name).digest
            data = wire.encoded(bare)
        return self.channel.send(peer, data)

    def receive(self, seconds: float) -> Event | None:
        """Exchange the digest of a receipt."""
        event = super().receive(seconds)
        if event is not None and event.kind == "message":
            frame = wire.decoded(event.data)
            if isinstance(frame, wire.Receipt) and frame.digest in self.digests:
                receipt = frame._replace(digest=self.digests[frame.digest])
                return event._replace(data=wire.encoded(receipt))
        return event


class Runs:
    """Runs of a case's sites, and what arrived in them.

    Args:
        case: What runs.
        folder: Of identities and of runs.
        carrier: "queues" or "grpc".
        rounds: T.
    """

    def __init__(
        self, case: Case, folder: Path, carrier: str = "queues", rounds: int = audit.ROUNDS
    ) -> None:
        self.plan = planned(case, rounds)
        self.folder = folder
        self.carrier = carrier
        self.identities = identities(folder)
        self.agreed = Agreed(self.plan, self.identities)
        self.worlds = [problems(self.plan, None), problems(self.plan, VICTIM)]
        self._traced: dict[int, Any] = {}

    def recorded(self, runs: int, leaks: bool = False) -> list[np.ndarray]:
        """What arrived on all links of both worlds, [runs, links, rounds, numbers] each."""
        worlds: list[list[np.ndarray]] = [[], []]
        for _ in range(runs):
            with tempfile.TemporaryDirectory(dir=self.folder) as place:
                for world, arrived in enumerate(self._pair(Path(place), leaks)):
                    worlds[world].append(arrived)
        return [np.stack(records) for records in worlds]

    def links(self, worlds: list[np.ndarray], names: tuple[str, ...] | None) -> list[int]:
        """Numbers of the links that some sites see, or all; of equal ones the first alone.

        Args:
            worlds: What arrived.
            names: None for all links.
        """
        unlike: dict[tuple[str, bytes], int] = {}
        for number, link in enumerate(self._links()):
            if names is None or set(names) & set(link):
                content = b"".join(world[:, number].tobytes() for world in worlds)
                unlike.setdefault((link[0], content), number)
        return list(unlike.values())

    def _links(self) -> list[tuple[str, str]]:
        senders = self.plan.senders
        return [
            (NAMES[sender], name) for number, name in enumerate(NAMES) for sender in senders[number]
        ]

    def _pair(self, place: Path, leaks: bool) -> Iterator[np.ndarray]:
        """A run in both worlds, with the same secrets, which the sites' own code draws."""
        shared = None
        if self.plan.guarantee.secrets != "own":
            shared = secrets.token_bytes(KEY_BYTES)
        for name in NAMES:
            folder = Folder(place / "0" / name)
            folder.drawn("nonce")
            if shared is None:
                folder.drawn("secret")
            folder.close()
        shutil.copytree(place / "0", place / "1")
        for world, tasks in enumerate(self.worlds):
            yield self._run(place / str(world), tasks, shared, leaks)

    def _run(
        self, place: Path, tasks: list[Problem], shared: bytes | None, leaks: bool
    ) -> np.ndarray:
        """One run of all sites."""
        channels = self._channels()
        taps = []
        sites = []
        for number, name in enumerate(NAMES):
            leaky = leaks and number == VICTIM
            tap = (Leak if leaky else Tap)(channels[name], name)
            with mock.patch.object(site_, "SiteRounds", self._rounds):
                site = Site(
                    self.agreed,
                    tasks[number],
                    self.identities[name],
                    tap,
                    place / name,
                    secret=shared,
                    waits=Waits(late=SECONDS, linger=SECONDS),
                )
            if isinstance(tap, Leak):
                tap.attach(site, self.identities[name])
            taps.append(tap)
            sites.append(site)
        run_all(sites)
        arrived: dict[tuple[str, str, int], bytes] = {}
        for tap in taps:
            arrived |= tap.arrived
        rows = []
        for link in self._links():
            payloads = [arrived[*link, round] for round in range(self.plan.config.rounds)]
            rows.append([np.frombuffer(payload, "<f4") for payload in payloads])
        return np.array(rows, np.float64)

    def _rounds(self, training_plan: Plan, task: Problem, *options: Any, **named: Any) -> Any:
        """A site's rounds, traced once: what they hold of a run is new in each copy."""
        if id(task) not in self._traced:
            self._traced[id(task)] = _SiteRounds(training_plan, task, *options, **named)
        return copy.copy(self._traced[id(task)])

    def _channels(self) -> dict[str, Channel]:
        senders = self.plan.senders
        network = Network()
        peers = {
            name: {NAMES[sender] for sender in senders[number]} for number, name in enumerate(NAMES)
        }
        if self.carrier == "queues":
            return {name: LocalChannel(network, name, peers[name]) for name in NAMES}
        ports = dict(zip(NAMES, free_ports(len(NAMES)), strict=True))
        channels: dict[str, Channel] = {}
        for name in NAMES:
            addresses = {}
            for peer in peers[name]:
                dials = NAMES.index(peer) < NAMES.index(name)
                addresses[peer] = f"localhost:{ports[peer]}" if dials else None
            channels[name] = GrpcChannel(
                self.identities[name],
                self.agreed.roster,
                addresses,
                f"localhost:{ports[name]}",
                ChannelLimits(message_bytes=2**17),
            )
        return channels


_SiteRounds = site_.SiteRounds


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [server.getsockname()[1] for server in servers]


def run_all(sites: list[Site]) -> None:
    """Run sites to their end, each in a thread."""
    errors: list[BaseException] = []

    def live(site: Site) -> None:
        try:
            site.run()
        except BaseException as error:
            errors.append(error)
        finally:
            site.close()

    threads = [threading.Thread(target=live, args=(site,), daemon=True) for site in sites]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        if thread.is_alive() or errors:
            raise RuntimeError("a site failed or hangs") from next(iter(errors), None)


# Faults, each in a site's own code as it is deployed.


def _halved(normals: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    @functools.wraps(normals)
    def broken(noise: SiteNoise, **address: int) -> np.ndarray:
        return normals(noise, **address) / 2

    return broken


def _repeated(normals: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    @functools.wraps(normals)
    def broken(noise: SiteNoise, **address: int) -> np.ndarray:
        return normals(noise, **{**address, "round": address["round"] // 2})

    return broken


RECORD = audit.SITES
FAULTS: dict[str, Callable[..., Any] | None] = {HALF: _halved, TWICE: _repeated, BARE: None}


def broken_records(runs: Runs, fault: str, count: int) -> list[np.ndarray]:
    """What arrives from a broken copy."""
    wrap = FAULTS[fault]
    if wrap is None:
        return runs.recorded(count, leaks=True)
    with mock.patch.object(SiteNoise, "normals", wrap(SiteNoise.normals)):
        return runs.recorded(count)


def measured(
    runs: Runs,
    worlds: list[np.ndarray],
    names: tuple[str, ...] | None,
    confidence: float = 0.95,
) -> audit.Found:
    """The loss to whoever sees the links of some sites, or all."""
    links = runs.links(worlds, names)
    one, other = (world[:, links].reshape(len(world), -1) for world in worlds)
    difference = other - one
    mean = difference.mean(axis=0)
    # Rounding to the grid of a release comes after the noise, so that it differs between worlds.
    residual = np.sqrt(((difference - mean) ** 2).sum(axis=1).mean())
    if residual > MOST_ROUNDING * np.linalg.norm(mean):
        raise ValueError("the worlds differ by more than a record and rounding; noise is not equal")
    result = replay.measured(one, one + mean, confidence=confidence)
    tested = audit.separated(one, other) if np.isfinite(result.mu) else None
    return audit.Found("mu", float(runs.plan.guarantee.mu or 0.0), *result, tested)


def entries(result: audit.Found) -> dict[str, Any]:
    """The numbers of a row."""
    row = {"unit": result.unit, "stated": result.stated, "measured": min(result.measured, 1e9)}
    for name, value in zip(("ratio", "low", "high"), result[2:5], strict=True):
        row[name] = min(value / result.stated, 1e9)
    if result.tested is not None:
        row["tested"] = result.tested / result.stated
    return row


def rows(
    case: Case, count: int, folder: Path, carrier: str = "queues", confidence: float = 0.95
) -> Iterator[dict[str, Any]]:
    """All rows of a case."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        runs = Runs(case, Path(place), carrier)
        about = {"noise": case.noise, "sampler": case.sampler, "carrier": carrier, "runs": count}
        about["secrets"] = runs.plan.guarantee.secrets
        worlds = runs.recorded(count)
        attackers = {"outsider": None, "neighbour": (NAMES[NEIGHBOUR],)}
        for attacker, names in attackers.items():
            found = measured(runs, worlds, names, confidence)
            row = {"what": "sites", **about, "attacker": attacker, "fault": "", **entries(found)}
            yield row | {"finding": audit.flagged(found)}
        # A fault needs no narrow interval.
        fewer = min(count, FEWEST)
        for fault in case.faults:
            broken = measured(runs, broken_records(runs, fault, fewer), None, confidence)
            row = {"what": "sites", **about, "attacker": "outsider", "fault": fault}
            row["runs"] = fewer
            yield {**row, **entries(broken), "flagged": audit.flagged(broken)}


def memory() -> Path:
    """A folder in memory, where there is one."""
    place = Path("/dev/shm")
    return place if place.is_dir() else Path(tempfile.gettempdir())
