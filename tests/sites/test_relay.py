"""Relays between sites: who is joined with whom, what a hostile one can do, and what it sees."""

import asyncio
import functools
import json
import logging
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import jax
import numpy as np
import pytest

import dpjax as dp
from dpjax.sites import relay as relay_
from dpjax.sites.carrier import GrpcChannel
from dpjax.sites.channel import Absent, ChannelLimits, Unreached
from dpjax.sites.identity import Authority, Identity, Roster, request
from dpjax.sites.relay import Forwarder, Relay
from tests.sites import test_start
from tests.sites.processes import ROOT, Sites, flat, free_port, tracebacks
from tests.sites.test_channel import agrees, event, nothing, says, sent, threads
from tests.sites.test_compute import DESIGNS, plan_of, problem_of
from tests.sites.test_processes import keys, undisturbed  # noqa: F401

NAMES = ("geneva", "lyon", "turin")
EDGES = [("geneva", "lyon"), ("lyon", "turin")]
"""Geneva and Turin are no neighbours."""
LIMITS = ChannelLimits(message_bytes=2_000_000, hello=3.0, keepalive=3.0, longest_wait=0.4)
LOCAL = {word: value for word, value in vars(grpc).items() if word.startswith("local_")}
MARKER = b"the records of a patient"


@dataclass(frozen=True)
class Project:
    """An authority, its sites and relays, and one who is in no roster."""

    folder: Path
    files: dict[str, dict[str, Path]]
    identities: dict[str, Identity]
    roster: Roster


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("relays")
    authority = Authority(folder / "authority")
    files = {}
    for name in (*NAMES, "hub", "spare", "oslo"):
        key, demand = request(name, folder)
        certificate = authority.sign(demand)
        files[name] = {"key": key, "certificate": certificate, "authority": authority.certificate}
    identities = {name: Identity.load(name, **paths) for name, paths in files.items()}
    roster = Roster({name: identities[name].public_key for name in NAMES})
    return Project(folder, files, identities, roster)


class Running:
    """A relay in a thread of this process."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.address = f"127.0.0.1:{relay.port}"
        self._begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._begun.wait(5)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        serving = asyncio.create_task(self.relay.serve())
        self._begun.set()
        await self._over.wait()
        serving.cancel()
        self.relay._listener.close()
        # Connections that end are read to their ends.
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        for member in self.relay._members.values():
            for stream in member.parked:
                stream.writer.transport.abort()
        await asyncio.sleep(0.1)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(5)


@pytest.fixture
def relays(project: Project) -> Iterator[Callable[..., Running]]:
    """Starts relays in this process."""
    all_relays: list[Running] = []

    def build(name: str = "hub", kind: type[Relay] = Relay, **changes: Any) -> Running:
        words = {"listen": "127.0.0.1:0", "roster": project.roster, "edges": EDGES, **changes}
        running = Running(kind(name, project.files[name], **words))
        all_relays.append(running)
        return running

    yield build
    for running in all_relays:
        running.stop()


@pytest.fixture
def ends(project: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Opens forwarders, or channels by them, and closes them without a thread left."""
    opened: list[Any] = []

    def build(
        name: str,
        addresses: Mapping[str, str],
        *peers: str,
        who: Mapping[str, Path] | None = None,
        insecure: bool = False,
    ) -> Any:
        if insecure:
            # Of sockets that have a path.
            kind = grpc.LocalConnectionType.UDS
            for word in ("local_channel_credentials", "local_server_credentials"):
                local = functools.partial(LOCAL[word], kind)
                monkeypatch.setattr(grpc, word, local)
        forwarder = Forwarder(name, who or project.files[name], addresses, peers, LIMITS)
        if who is not None:
            forwarder.begin()
            opened.append(forwarder)
            return forwarder
        channel = GrpcChannel(
            project.identities[name],
            project.roster,
            {**forwarder.peers},
            forwarder.listen,
            LIMITS,
            forwarder=forwarder,
        )
        channel.insecure = insecure
        channel.open(says, agrees)
        opened.append(channel)
        return channel

    yield build
    for end in opened:
        end.close()
    assert not threads()


def until(reached: Callable[[], object], seconds: float = 8.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def dialled(files: Mapping[str, Path], address: str, name: str = "hub") -> ssl.SSLSocket:
    """A connection to a relay by hand."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files["authority"])
    context.load_cert_chain(files["certificate"], files["key"])
    host, _, port = address.rpartition(":")
    plain = socket.create_connection((host, int(port)), 10)
    return context.wrap_socket(plain, server_hostname=name)


def said(files: Mapping[str, Path], address: str, line: str) -> str:
    """What a relay says to a line."""
    with dialled(files, address) as connection:
        connection.sendall(line.encode() + b"\n")
        return connection.makefile().readline().rstrip()


def linked(
    ends: Callable[..., Any], addresses: Mapping[str, str], **words: Any
) -> tuple[GrpcChannel, GrpcChannel]:
    """Geneva, and Lyon, which dials it, in a session."""
    geneva = ends("geneva", addresses, "lyon", **words)
    lyon = ends("lyon", addresses, "geneva", **words)
    event(geneva, "opened")
    event(lyon, "opened")
    return geneva, lyon


# Who is joined.


def test_messages_arrive_both_ways_by_a_relay(
    relays: Callable[..., Running], ends: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dpjax.sites")
    hub = relays()
    geneva, lyon = linked(ends, {"hub": hub.address})
    messages = [bytes([number]) * (1 + 400_000 * (number % 2)) for number in range(6)]
    for message in messages:
        sent(geneva, "lyon", message)
        sent(lyon, "geneva", message)
        assert event(lyon, "message").data == event(geneva, "message").data == message
    assert {"lyon and geneva are joined", "lyon is parked at relay hub"} <= set(caplog.messages)
    total = sum(map(len, messages))
    until(lambda: "geneva" in hub.relay.status().partition(";")[0])
    status = hub.relay.status()
    assert re.search("parked: geneva, lyon; lyon to geneva [1-9][0-9,]+ bytes, back", status)
    for size in hub.relay._pairs["lyon", "geneva"].sizes:
        assert total < size < 1.1 * total + 20_000


def test_relay_that_is_started_again_is_found(
    relays: Callable[..., Running], ends: Callable[..., Any]
) -> None:
    hub = relays()
    geneva, lyon = linked(ends, {"hub": hub.address})
    hub.stop()
    assert event(lyon, "closed").peer == "geneva"
    event(geneva, "closed")
    event(lyon, "absent", "relay hub: ")
    relays(listen=hub.address)
    event(lyon, "opened")
    event(geneva, "opened")
    sent(geneva, "lyon", b"again")
    assert event(lyon, "message").data == b"again"


def test_second_relay_serves_where_the_first_does_not(
    relays: Callable[..., Running], ends: Callable[..., Any]
) -> None:
    hub = relays()
    spare = relays("spare")
    geneva, lyon = linked(ends, {"hub": hub.address, "spare": spare.address})
    assert hub.relay._pairs["lyon", "geneva"].streams == 1
    hub.stop()
    event(geneva, "closed")
    event(lyon, "closed")
    event(geneva, "opened")
    event(lyon, "opened")
    assert spare.relay._pairs["lyon", "geneva"].streams == 1
    sent(lyon, "geneva", b"by the other")
    assert event(geneva, "message").data == b"by the other"


def test_who_is_not_there_yet_is_named(
    relays: Callable[..., Running], ends: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_, "_ANSWER", 0.2)
    lyon = ends("lyon", {"hub": relays().address}, "geneva")
    assert event(lyon, "absent").reason == "relay hub: geneva is not there yet"


def test_sites_listen_on_no_port(relays: Callable[..., Running], ends: Callable[..., Any]) -> None:
    before = listening(os.getpid())
    hub = relays()
    geneva, _ = linked(ends, {"hub": hub.address})
    assert listening(os.getpid()) - before == {hub.relay.port}
    (home,) = {Path(place).parent for place in (geneva.listen, geneva.peers["lyon"])}
    folder = Path(str(home).removeprefix("unix:"))
    assert folder.stat().st_mode & 0o777 == 0o700
    geneva.close()
    until(lambda: not folder.exists())


def listening(process: int) -> set[int]:
    """Ports at which a process listens, at any address."""
    inodes = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(entry))
    ports = set()
    for file in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{file}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                ports.add(int(words[1].rpartition(":")[2], 16))
    return ports


# Who is refused.


def renamed(project: Project, name: str, folder: Path) -> dict[str, Path]:
    """Files of an identity whose name the authority gave to another key."""
    shutil.copytree(project.folder / "authority", folder, ignore=shutil.ignore_patterns("*.owner"))
    key, demand = request(name, folder / "new")
    return {**project.files[name], "key": key, "certificate": Authority(folder).sign(demand)}


@pytest.mark.parametrize(
    ("case", "peer", "words"),
    [
        ("oslo", "geneva", "oslo is not in the roster"),
        ("another key", "geneva", "lyon has another key in the roster"),
        ("departed", "geneva", "turin has left this run"),
        ("lyon", "rome", "lyon does not dial rome in this plan"),
        ("lyon", "turin", "lyon does not dial turin in this plan"),
        ("geneva", "turin", "geneva does not dial turin in this plan"),
        ("lyon", "geneva of the departed", "geneva has left this run"),
    ],
)
def test_who_may_not_be_joined_is_named_at_both_ends(
    case: str,
    peer: str,
    words: str,
    project: Project,
    relays: Callable[..., Running],
    ends: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = {"another key": "lyon", "departed": "turin"}.get(case, case)
    called, _, is_departed = peer.partition(" of the ")
    departed = {name} if case == "departed" else {called} if is_departed else set()
    hub = relays(departed=departed)
    files = project.files[name]
    if case == "another key":
        files = renamed(project, name, tmp_path / "again")
    with pytest.raises(Unreached, match=f"relay hub: .*{words}") as caught:
        ends(name, {"hub": hub.address}, called, who=files).reach(called)
    assert not isinstance(caught.value, Absent)
    until(lambda: f"at 127.0.0.1: refused: {words}" in caplog.text)


def test_who_is_reset_hears_what_it_may_mean() -> None:
    async def line() -> str:
        reader = asyncio.StreamReader()
        reader.set_exception(ConnectionResetError(104, "Connection reset by peer"))
        return await relay_._Stream(reader, None).line()  # type: ignore[arg-type]

    with pytest.raises(ConnectionResetError, match="refuses this site's certificate"):
        asyncio.run(line())


def test_foreign_authority_is_refused_at_both_ends(
    project: Project,
    relays: Callable[..., Running],
    ends: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub = relays()
    other = Authority(tmp_path / "other")
    key, demand = request("lyon", tmp_path)
    files = {"certificate": other.sign(demand), "key": key, "authority": other.certificate}
    lyon = ends("lyon", {"hub": hub.address}, "geneva", who=files)
    with pytest.raises(Unreached, match="relay hub: TLS failed: compare authorities"):
        lyon.reach("geneva")
    # It believes both; the relay does not believe it.
    bundle = tmp_path / "both.pem"
    roots = (files["authority"], project.files["lyon"]["authority"])
    bundle.write_bytes(b"".join(path.read_bytes() for path in roots))
    lyon = ends("lyon", {"hub": hub.address}, "geneva", who={**files, "authority": bundle})
    with pytest.raises(Unreached, match="relay hub: .*refuses this site's certificate"):
        lyon.reach("geneva")
    until(lambda: re.search("somebody at 127.0.0.1: refused: .*certificate", caplog.text))
    assert hub.relay.status().startswith("parked: nobody")


def test_relay_of_another_name_is_refused(
    project: Project, relays: Callable[..., Running], ends: Callable[..., Any]
) -> None:
    """Another site has a certificate of the authority, too."""
    hub = relays("spare")
    lyon = ends("lyon", {"hub": hub.address}, "geneva", who=project.files["lyon"])
    with pytest.raises(Unreached, match="relay hub: TLS failed"):
        lyon.reach("geneva")


@pytest.mark.mutant
def test_relay_that_joins_anybody_is_caught(
    project: Project, relays: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "dpjax-relay-1 dial turin"
    monkeypatch.setattr(relay_, "_ANSWER", 0.1)
    assert said(project.files["geneva"], relays().address, line).startswith("no geneva does not")
    broken = relays()
    broken.relay._pairs["geneva", "turin"] = relay_._Pair()
    assert said(project.files["geneva"], broken.address, line) == "wait turin is not there yet"


# What one alone can take.


def test_streams_of_a_pair_are_limited(
    project: Project, relays: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    hub = relays()
    files = project.files["lyon"]
    waiting = [dialled(files, hub.address) for _ in range(relay_._STREAMS)]
    try:
        for connection in waiting:
            connection.sendall(b"dpjax-relay-1 dial geneva\n")
        until(lambda: hub.relay._pairs["lyon", "geneva"].streams == len(waiting))
        words = "3 streams of lyon and geneva are open"
        assert said(files, hub.address, "dpjax-relay-1 dial geneva") == f"no {words}"
        until(lambda: words in caplog.text)
        # Another pair has streams of its own.
        park = dialled(files, hub.address)
        park.sendall(b"dpjax-relay-1 park\n")
        assert said(project.files["turin"], hub.address, "dpjax-relay-1 dial lyon") == "ok"
        park.close()
    finally:
        for connection in waiting:
            connection.close()


def test_connections_and_lines_of_a_site_are_limited(
    project: Project, relays: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_, "_ATTEMPTS", 4)
    hub = relays()
    files = project.files["geneva"]
    for line in ("park", "dpjax-relay-2 park", "dpjax-relay-1 park 2", "dpjax-relay-1 dial"):
        assert said(files, hub.address, line).startswith("no geneva says ")
    assert said(files, hub.address, "x" * 200_000) == "no a line is too long"
    for _ in range(4):
        assert said(files, hub.address, "dpjax-relay-1 park") in ("ok", LIMITED)
    assert said(files, hub.address, "dpjax-relay-1 park") == LIMITED
    assert said(project.files["lyon"], hub.address, "dpjax-relay-1 park") == "ok"
    assert len(hub.relay._members["geneva"].parked) <= relay_._STREAMS


LIMITED = "no geneva connects more than 8 times in a minute"


def test_idle_connections_keep_nobody_waiting(
    relays: Callable[..., Running], ends: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_, "_HELLO", 1.0)
    hub = relays()
    idle = [socket.create_connection(("127.0.0.1", hub.relay.port)) for _ in range(500)]
    try:
        start = time.monotonic()
        geneva, lyon = linked(ends, {"hub": hub.address})
        sent(geneva, "lyon", b"x")
        assert event(lyon, "message").data == b"x"
        assert time.monotonic() - start < 4
        # They end after the time for a handshake.
        until(lambda: idle[0].recv(1) == b"")
    finally:
        for connection in idle:
            connection.close()


# A hostile relay.


class Hostile(Relay):
    """A relay that does with bytes what it likes."""

    faults = ""
    recorded = b""
    swaps: Mapping[str, str] = {}

    async def _parked(self, member: Any) -> Any:
        return await super()._parked(self._members[self.swaps.get(member.name, member.name)])

    async def _join(self, caller: Any, called: Any, pair: Any) -> None:
        ways = [self._carry(caller, called), self._carry(called, caller)]
        tasks = [asyncio.create_task(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _carry(self, source: Any, sink: Any) -> None:
        size = 0
        while data := await source.reader.read(2**16):
            self.recorded += data
            size += len(data)
            if self.faults == "flips" and len(data) > 4_000:
                data = data[:2_000] + bytes([data[2_000] ^ 1]) + data[2_001:]
            if self.faults == "truncates" and size > 200_000:
                return
            sink.writer.write(data)
            await sink.writer.drain()


def exchanged(geneva: GrpcChannel, lyon: GrpcChannel, seconds: float) -> list[bytes]:
    """What Lyon receives in some seconds, in which Geneva sends numbered messages."""
    arrived = []
    number = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        number += geneva.send("lyon", number.to_bytes(2, "big") * 4_000)
        while geneva.receive(0) is not None:
            pass
        arrival = lyon.receive(0.02)
        if arrival is not None and arrival.kind == "message":
            arrived.append(arrival.data)
    return arrived


def is_sound(messages: list[bytes]) -> bool:
    """Whether all are as they were sent, in order, none twice."""
    repeats = [message == message[:2] * 4_000 for message in messages]
    numbers = [message[:2] for message in messages]
    return all(repeats) and numbers == sorted(set(numbers))


@pytest.mark.parametrize("faults", ["flips", "truncates"])
def test_bytes_that_a_relay_changes_are_never_messages(
    faults: str, relays: Callable[..., Running], ends: Callable[..., Any]
) -> None:
    hub = relays(kind=Hostile)
    geneva, lyon = linked(ends, {"hub": hub.address})
    hub.relay.faults = faults
    messages = exchanged(geneva, lyon, 2.0)
    assert is_sound(messages)
    hub.relay.faults = ""
    assert lyon.statistics()["geneva"].sessions > 1 or event(lyon, "opened")
    assert exchanged(geneva, lyon, 1.0)


@pytest.mark.mutant
def test_changed_bytes_are_messages_where_nothing_is_encrypted(
    relays: Callable[..., Running], ends: Callable[..., Any]
) -> None:
    hub = relays(kind=Hostile)
    geneva, lyon = linked(ends, {"hub": hub.address}, insecure=True)
    hub.relay.faults = "flips"
    assert not is_sound(exchanged(geneva, lyon, 1.0))


def test_relay_reads_no_content(relays: Callable[..., Running], ends: Callable[..., Any]) -> None:
    hub = relays(kind=Hostile)
    geneva, lyon = linked(ends, {"hub": hub.address})
    sent(geneva, "lyon", MARKER * 1_000)
    assert event(lyon, "message").data == MARKER * 1_000
    assert len(hub.relay.recorded) > 1_000 * len(MARKER)
    assert MARKER not in hub.relay.recorded and b"plan" not in hub.relay.recorded


@pytest.mark.mutant
def test_content_without_encryption_is_found(
    relays: Callable[..., Running], ends: Callable[..., Any]
) -> None:
    hub = relays(kind=Hostile)
    geneva, lyon = linked(ends, {"hub": hub.address}, insecure=True)
    sent(geneva, "lyon", MARKER)
    assert event(lyon, "message").data == MARKER
    assert MARKER in hub.relay.recorded and b"plan" in hub.relay.recorded


def test_relay_that_joins_with_another_site_is_refused(
    relays: Callable[..., Running], ends: Callable[..., Any]
) -> None:
    hub = relays(kind=Hostile, edges=[*EDGES, ("geneva", "turin")])
    geneva = ends("geneva", {"hub": hub.address}, "turin")
    lyon = ends("lyon", {"hub": hub.address}, "turin")
    hub.relay.swaps = {"lyon": "geneva"}
    turin = ends("turin", {"hub": hub.address}, "lyon")
    event(turin, "refused", "another site answers at this address")
    assert nothing(geneva, "opened") and nothing(lyon, "opened")


def test_bytes_that_a_relay_sends_again_open_nothing(
    relays: Callable[..., Running], ends: Callable[..., Any]
) -> None:
    hub = relays(kind=Hostile)
    geneva, lyon = linked(ends, {"hub": hub.address})
    sent(lyon, "geneva", b"once")
    assert event(geneva, "message").data == b"once"
    recorded = hub.relay.recorded
    lyon.close()
    event(geneva, "closed")
    until(lambda: hub.relay._members["geneva"].parked)
    parked = hub.relay._members["geneva"].parked.pop()
    hub._loop.call_soon_threadsafe(parked.writer.write, b"ok\n" + recorded)
    assert nothing(geneva, "opened", 1.0) and nothing(geneva, "message")


# Runs.


def in_threads(files: dict, folder: Path, settings: Mapping[str, dict[str, Any]]) -> list[bytes]:
    """The bits of all sites' models after a run, whose secrets are the same every time."""
    plan = plan_of(DESIGNS["own"], rounds=5)
    results: dict[str, Any] = {}

    def live(number: int, name: str) -> None:
        place = folder / name
        place.mkdir(parents=True, mode=0o700)
        (place / "nonce").write_bytes(bytes([number + 1] * 32))
        (place / "secret").write_bytes(bytes([number + 101] * 32))
        site = dp.site(plan, problem_of(number), settings[name])
        try:
            results[name] = site.run()
        finally:
            site.close()

    sites = [
        threading.Thread(target=live, args=pair, daemon=True)
        for pair in enumerate(test_start.NAMES)
    ]
    for site in sites:
        site.start()
    for site in sites:
        site.join(60)
    leaves = [jax.tree.leaves(results[name]) for name in test_start.NAMES]
    return [np.asarray(leaf).tobytes() for tree in leaves for leaf in tree]


files = test_start.files


def test_models_of_a_run_by_a_relay_are_those_of_one_without(files: dict, tmp_path: Path) -> None:
    ports = test_start.free_ports()
    settings = {
        name: test_start.settings_of(files, name, tmp_path / "direct", ports)
        for name in test_start.NAMES
    }
    plain = in_threads(files, tmp_path / "direct", settings)
    authority = Authority(Path(files["authority"]).parent)
    key, demand = request("hub", tmp_path)
    paths = {"certificate": authority.sign(demand), "key": key, "authority": files["authority"]}
    roster = Roster.of_certificates([files[name]["certificate"] for name in test_start.NAMES])
    places = test_start.NAMES
    edges = [(place, places[number - 1]) for number, place in enumerate(places)]
    hub = Running(Relay("hub", paths, "127.0.0.1:0", roster, edges))
    for name, values in settings.items():
        del values["listen"], values["neighbours"]
        values["relays"] = {"hub": hub.address}
        values["folder"] = tmp_path / "relay" / name
    try:
        assert in_threads(files, tmp_path / "relay", settings) == plain
    finally:
        hub.stop()


class Relayed(Sites):
    """Three sites as processes, and relays as processes; no site listens."""

    relays: dict[str, int] = {}

    def configure(self, name: str, text: str = "", **changes: str) -> None:
        super().configure(name, text, **changes)
        self.relays = self.relays or {"hub": free_port(), "spare": free_port()}
        path = self.home / name / "site.toml"
        lines = [
            line
            for line in path.read_text().splitlines()
            if not line.startswith(("listen", "neighbours"))
        ]
        places = [f'{relay} = "127.0.0.1:{port}"' for relay, port in self.relays.items()]
        path.write_text("\n".join([*lines, f"relays = {{ {', '.join(places)} }}"]) + "\n")

    def start_relay(self, name: str) -> None:
        """Start a relay, or start it again."""
        place = self.home / name
        if not place.exists():
            _, demand = request(name, place)
            certificate = self.authority.sign(demand)
            (place / "relay.toml").write_text(
                f'name = "{name}"\nplan = "../plan.json"\ncertificate = "{certificate}"\n'
                f'key = "{name}.key"\nauthority = "{self.authority.certificate}"\n'
                f'listen = "127.0.0.1:{self.relays[name]}"\n'
            )
        with open(place / "log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "dpjax", "site", "relay", "relay.toml"],
                cwd=place,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.started.append(process)
        self.processes[name] = process
        self.until(lambda: "listens at port" in self.log(name) or process.poll() is not None, 20)
        assert process.poll() is None, self.log(name)


@pytest.fixture
def build(keys: Path, tmp_path: Path) -> Iterator[Callable[..., Relayed]]:  # noqa: F811
    """Makes sites behind relays."""
    sites: list[Relayed] = []

    def built(rounds: int) -> Relayed:
        sites.append(Relayed(tmp_path / "sites", keys, rounds))
        return sites[-1]

    yield built
    for entry in sites:
        entry.stop()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", "killed and started again", "first of two dies"])
def test_processes_behind_relays_train_the_bits_of_one_process(
    fault: str,
    build: Callable[..., Relayed],
    undisturbed: Callable[[int], dict[str, bytes]],  # noqa: F811
) -> None:
    rounds = 60 if fault != "none" else 20
    sites = build(rounds)
    sites.start_relay("hub")
    if "two" in fault:
        sites.start_relay("spare")
    for name in NAMES:
        sites.start(name)
    sites.until(lambda: all(sites.rounds(name) >= 3 for name in NAMES))
    for name in NAMES:
        assert listening(sites.processes[name].pid) == set()
    if fault != "none":
        sites.kill("hub")
        before = min(sites.rounds(name) for name in NAMES)
        assert before < rounds - 5
    if "again" in fault:
        time.sleep(2.0)
        # A neighbour may be a round ahead, and no more.
        assert max(sites.rounds(name) for name in NAMES) <= before + 4
        sites.start_relay("hub")
    assert flat(sites.models()) == undisturbed(rounds)
    assert not tracebacks(sites)
    used = "spare" if "two" in fault else "hub"
    assert "turin and lyon are joined" in sites.log(used)
    for name in NAMES:
        audit = (sites.run_of(name) / "audit.jsonl").read_text().splitlines()
        assert [json.loads(line)["event"] for line in audit].count("stored") == rounds


# Settings.


def relay_settings(project: Project, folder: Path, **changes: object) -> dict[str, object]:
    """What relay.toml holds, beside a plan file."""
    plan = {"roster": project.roster.to_json(), "settings": {"network": {"edges": EDGES}}}
    (folder / "plan.json").write_text(json.dumps(plan))
    paths = {key: str(path) for key, path in project.files["hub"].items()}
    values = {"name": "hub", "plan": "plan.json", **paths, "listen": "127.0.0.1:0", **changes}
    return {key: value for key, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": None}, "name is missing in the relay's settings; give it as text"),
        ({"nme": "x"}, "a key of the relay is 'nme'; did you mean name"),
        ({"plan": "none.json"}, "none.json does not exist"),
        ({"listen": "here:there"}, "listen is 'here:there'; give \"host:port\""),
        ({"listen": "127.0.0.1:65536"}, "listen is '127.0.0.1:65536'; give \"host:port\""),
        ({"listen": "192.0.2.1:7"}, "this process cannot listen there"),
        ({"name": "lyon"}, "name is 'lyon', a site's in the plan"),
        ({"departed": "lyon"}, "departed is 'lyon'; give a list"),
        ({"name": "spare"}, "give that of 'spare'"),
    ],
)
def test_settings_of_a_relay_are_refused_by_name(
    changes: dict, words: str, project: Project, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(words)):
        Relay.of(relay_settings(project, tmp_path, **changes), tmp_path)


def test_relay_of_a_file_knows_the_plan(project: Project, tmp_path: Path) -> None:
    relay = Relay.of(relay_settings(project, tmp_path, departed=["turin"]), tmp_path)
    with closing(relay._listener):
        assert set(relay._pairs) == {("lyon", "geneva"), ("turin", "lyon")}
        assert relay._departed == {"turin"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"listen": "127.0.0.1:1"}, r"listen is given beside \[relays\]"),
        ({"neighbours": {"geneva": "127.0.0.1:1"}}, r"neighbours is given beside \[relays\]"),
        ({"relays": {}}, "relays is {}; give a section"),
        ({"relays": "hub"}, "relays is 'hub'; give a section"),
        ({"relays": {"hub": "no port:x"}}, r"\[relays\] hub is 'no port:x'; give \"host:port\""),
        ({"relays": {"Hub": "a:1"}}, r"name under \[relays\] is 'Hub'"),
        ({"relays": {"turin": "a:1"}}, r"\[relays\] turin is a site of the plan"),
    ],
)
def test_relays_of_a_site_are_refused_by_name(
    changes: dict, words: str, files: dict, tmp_path: Path
) -> None:
    settings = test_start.settings_of(files, "lyon", tmp_path, dict.fromkeys(test_start.NAMES, 1))
    del settings["listen"], settings["neighbours"]
    settings |= {"relays": {"hub": "relay.example.org"}, **changes}
    with pytest.raises(ValueError, match=words):
        dp.site(plan_of(DESIGNS["own"], rounds=5), problem_of(1), settings)


def test_relays_take_certificates(files: dict, tmp_path: Path) -> None:
    settings = test_start.settings_of(files, "lyon", tmp_path, dict.fromkeys(test_start.NAMES, 1))
    del settings["listen"], settings["neighbours"]
    settings["relays"] = {"hub": "relay.example.org"}
    with pytest.raises(ValueError, match="insecure_loopback is given beside relays"):
        dp.site(plan_of(DESIGNS["own"], rounds=5), problem_of(1), settings, insecure_loopback=True)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("relay.example.org", ("relay.example.org", 443)),
        ("192.0.2.1:7", ("192.0.2.1", 7)),
        ("[::1]:7", ("::1", 7)),
        ("[::1]", ("::1", 443)),
    ],
)
def test_port_is_443_by_default(text: str, place: tuple[str, int]) -> None:
    assert relay_.endpoint("listen", text) == place


def test_relay_loads_no_jax() -> None:
    program = "import sys; from dpjax.sites import relay; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
