"""Sites as processes with certificates: kills, hostile networks, copies, and what each loads."""

import contextlib
import functools
import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax._programs import constants
from dpjax.engine import round as round_
from dpjax.sites import identity, start
from dpjax.sites.compute import SiteRounds
from dpjax.sites.identity import Authority, request
from dpjax.sites.store import Audit
from tests.sites.killed import POINTS
from tests.sites.processes import (
    NAMES,
    Sites,
    contents,
    flat,
    free_port,
    in_one_process,
    make_keys,
    model_of,
    records,
    tracebacks,
)
from tests.sites.proxy import Middle, Proxy

pytest.importorskip("grpc")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("keys") / "home"
    make_keys(home)
    return home


@pytest.fixture
def build(keys: Path, tmp_path: Path) -> Iterator[Callable[..., Sites]]:
    """Makes sites, whose processes and proxies end with the test."""
    all_sites: list[Sites] = []

    def built(rounds: int = 6, **changes: Any) -> Sites:
        sites = Sites(tmp_path / f"sites{len(all_sites)}", keys, rounds, **changes)
        all_sites.append(sites)
        return sites

    yield built
    for sites in all_sites:
        sites.stop()


@pytest.fixture(scope="module")
def undisturbed(
    keys: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, bytes]]:
    """The bits of all sites' models after so many rounds, of the same loop in one process."""

    @functools.cache
    def build(rounds: int) -> dict[str, bytes]:
        folder = tmp_path_factory.mktemp("undisturbed")
        sites = Sites(folder / "sites", keys, rounds)
        try:
            models = in_one_process(sites.project, sites, folder / "threads")
        finally:
            sites.stop()
        for model in models.values():
            # Single numbers may be zero, as they are on a grid.
            assert max(float(abs(value).max()) for value in model.values()) > 1e-6
        return flat(models)

    return build


def assert_sound(sites: Sites, rounds: int) -> None:
    """One digest a message at all receivers, and nothing that a log should not have."""
    digests = sites.digests()
    assert len(digests) == 3 * rounds
    assert {len(of_round) for of_round in digests.values()} == {1}
    assert not list(sites.home.glob("*/run/evidence*"))
    assert not tracebacks(sites)
    for name in NAMES:
        events = events_of(sites, name)
        assert "refused" not in events and "stopped" not in events
        # A message is stored once; a state may be absorbed again.
        assert events.count("stored") <= rounds
        assert not (sites.run_of(name) / "secret").exists()


def events_of(sites: Sites, name: str) -> list[str]:
    path = sites.run_of(name) / "audit.jsonl"
    assert Audit.check(path)
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_processes_train_the_bits_of_one_process(
    build: Callable[..., Sites], undisturbed: Callable[[int], dict[str, bytes]]
) -> None:
    sites = build(6)
    for name in NAMES:
        sites.start(name)
    assert flat(sites.models()) == undisturbed(6)
    assert_sound(sites, 6)


# Lives of a site, each with the point at which it ends, one arrow after another.
LIVES = [(point, number) for number in (1, 2, 3) for point in POINTS]


@pytest.mark.gate(1)
@pytest.mark.parametrize("share", [(), *[(part, part + 7) for part in range(0, len(LIVES), 7)]])
def test_kills_at_each_arrow_change_no_bit_of_any_model(
    share: tuple[int, ...],
    build: Callable[..., Sites],
    undisturbed: Callable[[int], dict[str, bytes]],
) -> None:
    """Each life of a site ends at a point; in the gate one site has one such life."""
    sites = build(8)
    waiting: dict[str, list[tuple[str, int]]]
    if share:
        lives = LIVES[slice(*share)]
        waiting = {name: lives[number::3] for number, name in enumerate(NAMES)}
    else:
        waiting = {"geneva": [], "lyon": [("send: to one", 3)], "turin": []}
    planned = sum(map(len, waiting.values()))
    kills = run_with_kills(sites, waiting)
    assert kills == planned
    assert flat(sites.models()) == undisturbed(8)
    assert_sound(sites, 8)


def run_with_kills(sites: Sites, waiting: dict[str, list[tuple[str, int]]]) -> int:
    """Run to the end, each site through lives that end at points; how many did so."""
    for name in NAMES:
        sites.start(name, *(waiting[name].pop(0) if waiting[name] else ()))
    kills = 0
    end = time.monotonic() + 240
    while time.monotonic() < end:
        time.sleep(0.02)
        codes = {name: sites.processes[name].poll() for name in NAMES}
        if all(code == 0 for code in codes.values()):
            break
        for name, code in codes.items():
            if code == -signal.SIGKILL:
                kills += 1
                life = waiting[name].pop(0) if waiting[name] else ()
                sites.start(name, *life)
            assert code in (None, 0, -signal.SIGKILL), sites.log(name)[-3000:]
    return kills


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_kills_at_random_moments_change_no_bit_of_any_model(
    seed: int, build: Callable[..., Sites], undisturbed: Callable[[int], dict[str, bytes]]
) -> None:
    """Five kills a run, from the first import to the last round."""
    rounds = 60
    # A round takes a third of a second or so.
    sites = slowed(build(rounds))
    draw = random.Random(seed)
    for name in NAMES:
        sites.start(name)
    moments = []
    for number in range(5):
        name = draw.choice(NAMES)
        if number % 2:
            time.sleep(draw.uniform(0.0, 6.0))
        else:
            # All are there again.
            last = sites.rounds(name)
            sites.until(lambda name=name, last=last: sites.rounds(name) > last)
            time.sleep(draw.uniform(0.0, 1.0))
        moments.append((name, sites.rounds(name)))
        sites.kill(name)
        sites.start(name)
    assert len(moments) == 5
    assert flat(sites.models(120)) == undisturbed(rounds)
    assert_sound(sites, rounds)


# A hostile network.


def begun(sites: Sites, rounds: int = 2, *names: str) -> None:
    """Start all sites, and wait until some have absorbed so many rounds."""
    for name in NAMES:
        sites.start(name)
    sites.until(lambda: all(sites.rounds(name) >= rounds for name in names or NAMES))


def slowed(sites: Sites, delay: float = 0.05) -> Sites:
    """Rounds that take as long as a test needs to come between them."""
    for proxy in sites.links.values():
        proxy.delay = delay
    return sites


WIDE = {"name": "MLP", "hidden": [40_000], "loss": "cross_entropy"}


@pytest.mark.slow
def test_a_run_over_slow_links_ends(build: Callable[..., Sites]) -> None:
    """4 Mbit/s and 300 ms; a message is longer than a link carries while a session is silent."""
    sites = build(3, model=WIDE)
    for proxy in sites.links.values():
        proxy.rate = 500_000
        proxy.delay = 0.3
    for name in NAMES:
        sites.configure(name, limits="{ hello = 10.0, keepalive = 3.0, longest_wait = 1.0 }")
        sites.start(name)
    began = time.monotonic()
    models = sites.models(240)
    assert sum(leaf.size for leaf in models["lyon"].values()) > 300_000
    sent = sum(proxy.bytes for proxy in sites.links.values())
    # Each link has a message each way every round.
    assert sent > 3 * 3 * 2 * 4 * 300_000
    assert time.monotonic() - began > sent / 6 / 500_000
    assert_sound(sites, 3)
    # No session was lost for being slow.
    assert not re.search("nothing was heard|took more than", "".join(map(sites.log, NAMES)))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2.0, 60.0])
def test_a_run_goes_on_after_a_partition(
    seconds: float, build: Callable[..., Sites], undisturbed: Callable[[int], dict[str, bytes]]
) -> None:
    """Shorter than sessions live, and much longer; lyon alone at one side."""
    sites = slowed(build(30))
    begun(sites)
    links = [proxy for ends, proxy in sites.links.items() if "lyon" in ends]
    for proxy in links:
        proxy.hold()
    before = {name: sites.rounds(name) for name in NAMES}
    time.sleep(seconds)
    # A neighbour may be a round ahead, and no more.
    assert all(sites.rounds(name) <= before[name] + 2 for name in NAMES)
    assert all(sites.processes[name].poll() is None for name in NAMES)
    for proxy in links:
        proxy.release()
    assert flat(sites.models(60)) == undisturbed(30)
    assert_sound(sites, 30)
    # Who is late is named; a session that is silent for long is over, and lyon dials again.
    assert seconds == 2.0 or "the hello took more than" in sites.log("lyon")
    for name in ("geneva", "turin"):
        assert seconds == 2.0 or re.search("waits for .*lyon", sites.log(name))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["half open", "cut", "drip"])
def test_a_lost_connection_hangs_nobody(
    fault: str, build: Callable[..., Sites], undisturbed: Callable[[int], dict[str, bytes]]
) -> None:
    sites = slowed(build(30))
    begun(sites)
    for ends in (("lyon", "geneva"), ("turin", "lyon")):
        if fault == "half open":
            sites.links[ends].half_open()
        elif fault == "cut":
            sites.links[ends].cut()
        else:
            sites.links[ends].rate = 1.0
    if fault == "drip":
        time.sleep(15)
        assert all(sites.processes[name].poll() is None for name in NAMES)
        for proxy in sites.links.values():
            proxy.rate = float("inf")
            proxy.cut()
    assert flat(sites.models(60)) == undisturbed(30)
    assert_sound(sites, 30)


@pytest.mark.slow
def test_strangers_keep_nobody_waiting(
    build: Callable[..., Sites], undisturbed: Callable[[int], dict[str, bytes]]
) -> None:
    """500 idle connections, and some that send a byte a second: of nothing, of TLS, of a hello."""
    sites = slowed(build(30))
    place = ("127.0.0.1", sites.ports["geneva"])
    begun(sites)
    idle = [socket.create_connection(place, 10) for _ in range(500)]
    drips = [
        b"GET / HTTP/1.0\r\n\r\n" * 9,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(99),
    ]
    stopped = threading.Event()
    for content in drips:
        threading.Thread(target=drip, args=(place, content, stopped), daemon=True).start()
    # One with a certificate of the authority: that of a neighbour, no less.
    context = ssl.create_default_context(cafile=str(sites.authority.certificate))
    context.load_cert_chain(sites.certificates["turin"], sites.home / "turin" / "turin.key")
    context.set_alpn_protocols(["h2"])
    certified = context.wrap_socket(socket.create_connection(place, 10), server_hostname="geneva")
    certified.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    sites.kill("lyon")
    sites.start("lyon")
    try:
        assert flat(sites.models(60)) == undisturbed(30)
    finally:
        stopped.set()
        certified.close()
        for connection in idle:
            connection.close()
    assert_sound(sites, 30)


def drip(place: tuple[str, int], content: bytes, stopped: threading.Event) -> None:
    """Send a byte a second until the other end has enough."""
    with socket.create_connection(place, 10) as connection, contextlib.suppress(OSError):
        for number in range(len(content)):
            connection.sendall(content[number : number + 1])
            if stopped.wait(1.0):
                return


@pytest.mark.slow
@pytest.mark.parametrize("holder", ["oslo", "geneva"])
def test_a_machine_in_the_middle_is_refused_at_both_ends(
    holder: str, build: Callable[..., Sites]
) -> None:
    """It has certificates of the same authority: of its own name, or of both ends' names."""
    sites = build(4)
    names = {"oslo": ("oslo", "oslo"), "geneva": ("geneva", "lyon")}[holder]
    context = [certified_context(sites, name, number == 0) for number, name in enumerate(names)]
    middle = Middle(f"127.0.0.1:{sites.ports['geneva']}", *context)
    sites.links["lyon", "geneva"].target = middle.address
    try:
        for name in NAMES:
            sites.start(name)
        line = {
            "oslo": "another site answers at this address",
            "geneva": "lyon has another key in the roster",
        }[holder]
        sites.until(lambda: line in sites.log("lyon"))
        if holder == "geneva":
            sites.until(lambda: line in sites.log("geneva"))
        assert not any(sites.rounds(name) for name in NAMES)
        # Gone, the run begins.
        sites.links["lyon", "geneva"].target = f"127.0.0.1:{sites.ports['geneva']}"
        sites.links["lyon", "geneva"].cut()
        sites.models()
    finally:
        middle.close()
    if holder == "oslo":
        # Had lyon believed it, what would geneva have said?
        assert "refused" not in sites.log("geneva")
    assert not tracebacks(sites)
    assert {len(of_round) for of_round in sites.digests().values()} == {1}


def certified_context(sites: Sites, name: str, serves: bool) -> ssl.SSLContext:
    """TLS with another key and certificate of the same authority."""
    folder = sites.home / f"middle-{name}-{serves}"
    key, _ = request(name, folder)
    certificate = folder / "certificate.pem"
    certificate.write_bytes(issued(sites, name, key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(sites.authority.certificate)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    return context


def issued(sites: Sites, name: str, key: Path, seconds: float = 3600.0) -> bytes:
    """A certificate of the authority, which its own rules would not give."""
    root: Any = identity._private_key(sites.home / "authority" / "authority_key.pem")
    public: Any = identity._private_key(key).public_key()
    days: Any = seconds / 86400
    return identity._pem(identity._issued(name, public, root, days))


# Copies and backups.


def copied(sites: Sites, others_records: bool) -> Proxy:
    """A copy of lyon's folder in another place, with links of its own."""
    home = sites.home / "copy"
    shutil.copytree(sites.home / "lyon", home)
    (home / "log").unlink()
    if others_records:
        x, y = records("somebody else")
        np.savez(home / "records.npz", x=x, y=y)
    text = (home / "site.toml").read_text()
    port = free_port()
    proxy = Proxy(f"127.0.0.1:{sites.ports['geneva']}")
    sites.links["copy", "geneva"] = proxy
    text = text.replace(f":{sites.ports['lyon']}", f":{port}")
    text = text.replace(sites.links["lyon", "geneva"].address, proxy.address)
    (home / "site.toml").write_text(text)
    return proxy


@pytest.mark.slow
@pytest.mark.parametrize("case", ["neighbours apart", "neighbours joined", "the same records"])
def test_a_copy_under_a_partition_is_found_and_named(
    case: str, build: Callable[..., Sites], undisturbed: Callable[[int], dict[str, bytes]]
) -> None:
    """One round of lyon's goes to geneva, and that of its copy to turin, which had both met."""
    sites = slowed(build(30), 0.02)
    # It stops itself, all of it, before it computes a round that nobody has.
    sites.start("lyon", "compute: before", 4, "SIGSTOP")
    sites.start("geneva")
    sites.start("turin")
    sites.until(lambda: is_stopped(sites, "lyon"))
    round = sites.rounds("lyon")
    link = copied(sites, case != "the same records")
    port = re.search(r'listen = "(.*)"', (sites.home / "copy" / "site.toml").read_text())
    assert port is not None
    # The network knows the copy alone.
    sites.links["lyon", "geneva"].target = None
    sites.links["turin", "lyon"].target = port[1]
    for ends in (("lyon", "geneva"), ("turin", "lyon")):
        sites.links[ends].cut()
    sites.start("copy", "compute: before", 1, "SIGSTOP")
    sites.until(lambda: is_stopped(sites, "copy"))
    # Now geneva reaches the original alone, and turin the copy.
    link.target = None
    link.cut()
    sites.links["lyon", "geneva"].target = f"127.0.0.1:{sites.ports['geneva']}"
    if case == "neighbours apart":
        sites.links["turin", "geneva"].hold()
    sites.processes["copy"].send_signal(signal.SIGCONT)
    if case == "neighbours joined":
        # Geneva hears of it before the original has a session.
        sites.until(lambda: ("lyon", round) in messages_at(sites, "turin"))
        time.sleep(2)
    sites.processes["lyon"].send_signal(signal.SIGCONT)
    if case == "neighbours apart":
        for name in ("geneva", "turin"):
            sites.until(lambda name=name: ("lyon", round) in messages_at(sites, name))
        sites.links["turin", "geneva"].release()
        assert sites.ended("geneva", "turin") == [2, 2]
        evidence = sites.home.glob(f"*/run/evidence-lyon-{round}")
        holders = {path.parent.parent.name for path in evidence}
        assert holders == {"geneva", "turin"}
        for name in holders:
            assert f"lyon sent two messages in round {round}" in sites.log(name)
        # Nobody is left for the original and its copy.
    elif case == "neighbours joined":
        assert sites.ended("lyon") == [2]
        assert "somebody runs a copy of it" in sites.log("lyon")
        # What geneva knows of the round is what turin was sent.
        assert digests_of(sites, "geneva", round) == digests_of(sites, "turin", round) != set()
    else:
        # The same bytes went to both neighbours. Neither can absorb the round.
        for name in ("geneva", "turin"):
            sites.until(lambda name=name: ("lyon", round) in messages_at(sites, name))
        assert all(sites.processes[name].poll() is None for name in (*NAMES, "copy"))
        # The original ends, the partition too, and all others finish.
        sites.kill("lyon")
        link.target = f"127.0.0.1:{sites.ports['geneva']}"
        assert sites.ended("copy", "geneva", "turin") == [0, 0, 0]
        finished = {name: model_of(sites.run_of(name) / "model.npz") for name in ("copy", "turin")}
        bits = flat(finished)
        assert bits == {"copy": undisturbed(30)["lyon"], "turin": undisturbed(30)["turin"]}
    assert case == "neighbours apart" or not list(sites.home.glob("*/run/evidence*"))
    # To one peer never other bytes of a round.
    for name in NAMES:
        lines = [line.split()[:3] for line in headers_of(sites, name)]
        rounds_seen = {(sender, number) for sender, number, _ in lines}
        assert len(rounds_seen) == len({tuple(line) for line in lines})
    assert not tracebacks(sites)


def messages_at(sites: Sites, name: str) -> set[tuple[str, int]]:
    """The messages that a site knows of."""
    lines = [line.split() for line in headers_of(sites, name)]
    return {(sender, int(number)) for sender, number, *_ in lines}


def digests_of(sites: Sites, name: str, round: int) -> set[str]:
    """The digests of lyon's message of a round that a site knows."""
    lines = [line.split() for line in headers_of(sites, name)]
    return {
        digest for sender, number, digest, _ in lines if (sender, int(number)) == ("lyon", round)
    }


def headers_of(sites: Sites, name: str) -> list[str]:
    path = sites.run_of(name) / "headers"
    return path.read_text().splitlines() if path.exists() else []


def is_stopped(sites: Sites, name: str) -> bool:
    assert sites.processes[name].poll() is None, sites.log(name)[-3000:]
    status = Path(f"/proc/{sites.processes[name].pid}/stat").read_text()
    return status.rpartition(")")[2].split()[0] == "T"


@pytest.mark.slow
def test_a_restored_backup_stops_before_it_computes(build: Callable[..., Sites]) -> None:
    sites = slowed(build(60))
    begun(sites, 3)
    for name in NAMES:
        sites.kill(name)
    shutil.copytree(sites.run_of("lyon"), sites.home / "backup")
    old = sites.rounds("lyon")
    begun(sites, old + 3)
    for name in NAMES:
        sites.kill(name)
    shutil.rmtree(sites.run_of("lyon"))
    (sites.home / "backup").rename(sites.run_of("lyon"))
    before = contents(sites.run_of("lyon"), ("status.json", "audit.jsonl", "lock"))
    states = {name: (sites.run_of(name) / "state").read_bytes() for name in ("geneva", "turin")}
    for name in NAMES:
        sites.start(name)
    assert sites.ended("lyon") == [2]
    assert "restored from a backup" in sites.log("lyon").splitlines()[-1]
    after = contents(sites.run_of("lyon"), ("status.json", "audit.jsonl", "lock"))
    # What others sent is noted; of its own only what the folder has already.
    heard = after.pop("headers").removeprefix(before.pop("headers")).decode()
    for sender, number, *_ in map(str.split, heard.splitlines()):
        assert sender != "lyon" or f"sent/{number}" in before
    assert after == before
    # Others wait for it; they lost nothing.
    for name, state in states.items():
        assert sites.processes[name].poll() is None
        assert (sites.run_of(name) / "state").read_bytes() == state
    # It hears of it from one, and leaves.
    assert any("restored from a backup" in sites.log(name) for name in states)
    assert {len(of_round) for of_round in sites.digests().values()} == {1}
    assert not tracebacks(sites)


# What a site loads.


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="reads the memory of another process")
def test_a_site_has_nobody_elses_records(build: Callable[..., Sites]) -> None:
    sites = slowed(build(60))
    for name in NAMES:
        sites.start(name, "opened")
    sites.until(lambda: all(sites.rounds(name) >= 2 for name in NAMES))
    for proxy in sites.links.values():
        proxy.hold()
    for name in NAMES:
        process = Path(f"/proc/{sites.processes[name].pid}")
        others = [other for other in NAMES if other != name]
        folders = [str(sites.home / other) + "/" for other in others]
        targets = [os.readlink(entry) for entry in process.joinpath("fd").iterdir()]
        lines = (process / "maps").read_text().splitlines()
        mapped = [line.split(maxsplit=5)[5:] for line in lines]
        paths = targets + [path[0].strip() for path in mapped if path]
        own_paths = [path for path in paths if path.startswith(str(sites.home))]
        assert any(path.endswith("run/lock") for path in own_paths)
        opened = (sites.home / name / "opened").read_text().splitlines()
        assert str(sites.home / name / "records.npz") in opened
        assert str(sites.home / "plan.json") in opened
        for path in [*paths, *opened]:
            assert not any(path.startswith(folder) for folder in folders)
        for path in [*own_paths, *opened]:
            is_here = path.startswith(str(sites.home)) and not path.startswith(
                (str(sites.home / name), str(sites.home / "plan."), str(sites.home / "authority"))
            )
            assert not is_here, path
        # As they stand in its file, and scaled, as the program takes them.
        marks = {other: marks_of(other) for other in NAMES}
        matches = in_memory(
            sites.processes[name].pid, [mark for row in marks.values() for mark in row]
        )
        has_marks = {other: [mark in matches for mark in row] for other, row in marks.items()}
        assert any(has_marks[name])
        assert not any(any(has_marks[other]) for other in others)


def marks_of(name: str) -> list[bytes]:
    """A record of a site in every form."""
    x, _ = records(name)
    row = x[7]
    scaled = np.clip(row / 4, -1, 1).astype(np.float32)
    return [row.tobytes(), scaled.tobytes(), row.astype(np.float32).tobytes()]


def in_memory(pid: int, marks: list[bytes]) -> set[bytes]:
    """Which of some bytes stand in a process's memory."""
    matches = set()
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            span, rights, *_ = line.split()
            if not rights.startswith("rw"):
                continue
            start, end = (int(number, 16) for number in span.split("-"))
            with contextlib.suppress(OSError, ValueError):
                memory.seek(start)
                content = memory.read(end - start)
                matches |= {mark for mark in marks if mark in content}
    return matches


def test_a_sites_programs_hold_no_records(keys: Path, tmp_path: Path) -> None:
    """Records are arguments of a program, its own alone; none are constants in it."""
    sites = Sites(tmp_path / "sites", keys, 4)
    sites.stop()
    values = {"home": sites.home / "lyon", "held_out": 0.2}
    problem, *_ = start._problem(sites.project, "lyon", {"file": "records.npz"}, values)
    compute = SiteRounds(sites.project.plan, problem, 1, [1], seed=sites.project.seed)
    part = compute._part
    zeros = compute._with(compute._places(0))
    program = round_.outgoing_program.trace(part.statics, zeros, part.first)
    marks = {name: marks_of(name) for name in NAMES}
    arguments = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(part.instance.data))
    constant_bytes = b"".join(np.asarray(value).tobytes() for value in constants(program.jaxpr))
    words = numbers_of(program.lower().as_text())
    for name in NAMES:
        assert any(mark in arguments for mark in marks[name]) == (name == "lyon")
        assert not any(mark in constant_bytes + words for mark in marks[name])
    # Such a constant is found.
    row = jnp.asarray(np.frombuffer(marks["lyon"][1], np.float32))
    closed = jax.jit(lambda scale: row * scale).trace(1.0)
    constant_bytes = b"".join(np.asarray(value).tobytes() for value in constants(closed.jaxpr))
    assert marks["lyon"][1] in constant_bytes
    assert marks["lyon"][1] in numbers_of(closed.lower().as_text())


def numbers_of(text: str) -> bytes:
    """All numbers that stand in a program's text, as float32."""
    plain = re.findall(r"-?\d+\.\d+(?:[eE][+-]?\d+)?", text)
    blobs = re.findall(r'"0x([0-9A-Fa-f]*)"', text)
    return np.array(plain, np.float32).tobytes() + b"".join(map(bytes.fromhex, blobs))


# Identities of the dead.


CHANGING = ("status.json", "audit.jsonl", "metrics.jsonl", "lock")
# What the others say, and what is said to turin: TLS tells the end that it refuses nothing.
REFUSALS = {
    "departed": ("turin has left this run", "turin has left this run"),
    "foreign": ("unable to get local issuer certificate", "refuses this site's certificate"),
    "expired": ("certificate has expired", "refuses this site's certificate"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", REFUSALS)
def test_who_may_not_take_part_is_refused_at_both_ends(
    fault: str, build: Callable[..., Sites]
) -> None:
    """In the middle of a run; the others keep the state that they had."""
    sites = slowed(build(200))
    begun(sites)
    links = [proxy for ends, proxy in sites.links.items() if "turin" in ends]
    sites.kill("turin")
    if fault == "departed":
        for name in ("geneva", "lyon"):
            sites.kill(name)
            sites.configure(name, departed='["turin"]')
            sites.start(name)
        restarted = ("geneva", "lyon")
        sites.until(
            lambda: all(sites.log(name).count("accountant, sites") == 2 for name in restarted)
        )
    elif fault == "foreign":
        other = Authority(sites.home / "other")
        sites.certificates["turin"] = other.sign(request("turin", sites.home / "turin")[1])
        # It trusts both; the others trust theirs.
        roots = sites.home / "turin" / "roots.pem"
        certificates = (sites.authority.certificate, other.certificate)
        roots.write_bytes(b"".join(path.read_bytes() for path in certificates))
        sites.configure("turin", authority='"roots.pem"')
    else:
        # It is valid when it is read, and no more when it is shown.
        expiry = time.monotonic() + 20
        sites.certificates["turin"] = sites.home / "turin" / "short.pem"
        key = sites.home / "turin" / "turin.key"
        sites.certificates["turin"].write_bytes(issued(sites, "turin", key, 20))
        sites.configure("turin")
        for proxy in links:
            proxy.hold()
    # What was on its way is on disk.
    time.sleep(3)
    before = {name: contents(sites.run_of(name), CHANGING) for name in ("geneva", "lyon")}
    lengths = {name: len(sites.log(name)) for name in NAMES}
    sites.start("turin")
    if fault == "expired":
        sites.until(lambda: time.monotonic() > expiry + 1)
        for proxy in links:
            proxy.release()
    for name in NAMES:
        line = REFUSALS[fault][name == "turin"]
        sites.until(lambda name=name, line=line: line in sites.log(name)[lengths[name] :], 60)
    time.sleep(5)
    for name, content in before.items():
        assert sites.processes[name].poll() is None
        assert contents(sites.run_of(name), CHANGING) == content
    assert not tracebacks(sites)


@pytest.mark.slow
def test_who_has_no_certificate_begins_nothing(build: Callable[..., Sites]) -> None:
    sites = build(4)
    sites.start("geneva")
    sites.configure("turin", certificate='"nothing.pem"')
    sites.start("turin")
    assert sites.ended("turin") == [2]
    assert "nothing.pem" in sites.log("turin").splitlines()[-1]
    # And one that calls all the same.
    context = ssl.create_default_context(cafile=str(sites.authority.certificate))
    context.set_alpn_protocols(["h2"])
    place = ("127.0.0.1", sites.ports["geneva"])
    sites.until(lambda: listens(place))
    before = contents(sites.run_of("geneva"), CHANGING)
    length = len(sites.log("geneva"))
    with (
        pytest.raises(OSError),
        socket.create_connection(place, 10) as plain,
        context.wrap_socket(plain, server_hostname="geneva") as connection,
    ):
        # Of TLS 1.3 a client learns it when it reads.
        if connection.recv(1) == b"":
            raise ConnectionResetError
    time.sleep(1)
    assert contents(sites.run_of("geneva"), CHANGING) == before
    assert sites.processes["geneva"].poll() is None
    assert not tracebacks(sites)
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in sites.log("geneva")[length:]


def listens(place: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(place, 1):
        return True
    return False
