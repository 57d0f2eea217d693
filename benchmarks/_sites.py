"""One process of `bench_sites`: a site over gRPC, or the same exchange over plain sockets.

Words: the folder of the project, the site's number, and what runs. "sites" is `dp.site` with TLS,
signatures and fsync. "sockets" sends and receives as many bytes on the same links, and acknowledges
them, without computing. "computing" puts the site's own rounds between, and "alone" has no network.
Prints as JSON when each round ended, and the processor's seconds and loopback's bytes after the
first round and the last.
"""

import json
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dpjax.sites.project import write as write

LENGTH = 4
SIGNATURE = 70
RECEIPT = 50
"""Bytes of a site's receipt."""


def names(count: int) -> list[str]:
    """Of the sites."""
    return [f"site-{number:02d}" for number in range(count)]


def loopback() -> int:
    """Bytes that the loopback device of this network has sent."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        device, _, numbers = line.partition(":")
        if device.strip() == "lo":
            return int(numbers.split()[8])
    return 0


class Links:
    """Connections to all other processes, and a thread and a queue for each."""

    def __init__(self, number: int, ports: list[int]) -> None:
        server = socket.create_server(("127.0.0.1", ports[number]), backlog=len(ports))
        self.peers = {}
        for other in range(number):
            self.peers[other] = dialled(ports[other])
            self.peers[other].sendall(bytes([number]))
        for _ in ports[number + 1 :]:
            peer, _ = server.accept()
            (other,) = peer.recv(1)
            self.peers[other] = peer
        self.inboxes: dict[int, queue.SimpleQueue[bytes]] = {}
        for other, peer in self.peers.items():
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.inboxes[other] = queue.SimpleQueue()
            threading.Thread(target=self._read, args=(other,), daemon=True).start()

    def _read(self, other: int) -> None:
        file = self.peers[other].makefile("rb")
        while head := file.read(LENGTH):
            self.inboxes[other].put(file.read(int.from_bytes(head, "big")))

    def exchange(self, data: bytes) -> dict[int, bytes]:
        """Send to all, receive from all and acknowledge."""
        messages = self._exchange(data)
        self._exchange(bytes(RECEIPT))
        return messages

    def _exchange(self, data: bytes) -> dict[int, bytes]:
        framed = len(data).to_bytes(LENGTH, "big") + data
        for peer in self.peers.values():
            peer.sendall(framed)
        return {other: inbox.get() for other, inbox in self.inboxes.items()}


def dialled(port: int) -> socket.socket:
    """A connection, once the other end listens."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.05)


def of_sites(folder: Path, number: int) -> Iterator[Any]:
    """Rounds of a site."""
    import dpjax as dp

    home = folder / names(number + 1)[-1]
    values = json.loads((home / "site.json").read_text(encoding="utf-8"))
    site = dp.site(values["plan"], values["data"], values)
    yield from site.rounds()
    site.close()


def of_sockets(folder: Path, number: int) -> Iterator[Any]:
    """Rounds of bytes alone: messages, then receipts."""
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    links = Links(number, about["ports"])
    # The numbers of a model, and a signature.
    data = secrets.token_bytes(4 * about["parameters"] + SIGNATURE)
    for _ in range(about["rounds"]):
        links.exchange(data)
        yield None


class Computing:
    """A site's own rounds, without disk, signatures and TLS."""

    def __init__(self, folder: Path, number: int) -> None:
        from dpjax.sites.compute import SiteRounds
        from dpjax.sites.noise import SiteNoise
        from dpjax.sites.project import Project
        from dpjax.sites.start import _problem

        home = folder / names(number + 1)[-1]
        values = json.loads((home / "site.json").read_text(encoding="utf-8"))
        project = Project.load(values["plan"])
        problem, _ = _problem(project, values["name"], values["data"], values)
        self.rounds = SiteRounds(project.plan, problem, number, [1], seed=project.seed)
        run = secrets.token_bytes(32)
        noise = SiteNoise(secrets.token_bytes(32), run=run, holder=values["name"])
        self.rounds.begin([noise])
        self.state = self.rounds.init()

    def round(self, exchange: Callable[[bytes], dict[int, bytes]]) -> None:
        """One round, with what carries messages."""
        import jax

        rounds = self.rounds
        sent = rounds.outgoing(self.state)
        leaves, structure = jax.tree.flatten(sent.message)
        numbers = np.concatenate([np.ravel(leaf) for leaf in leaves])
        ends = np.cumsum([leaf.size for leaf in leaves])
        received = {}
        for sender, message in exchange(numbers.tobytes() + bytes(SIGNATURE)).items():
            parts = np.split(np.frombuffer(message[:-SIGNATURE], np.float32), ends[:-1])
            shaped = [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
            received[sender] = jax.tree.unflatten(structure, shaped)
        self.state = rounds.incoming(self.state, sent, received)
        rounds.metrics(self.state)


def of_computing(folder: Path, number: int) -> Iterator[None]:
    """Rounds of a site over plain sockets."""
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    computing = Computing(folder, number)
    links = Links(number, about["ports"])
    for _ in range(about["rounds"]):
        computing.round(links.exchange)
        yield None


def alone(folder: Path, number: int) -> Iterator[None]:
    """Two rounds of a site whose neighbours send what it sends: they fill JAX's cache."""
    computing = Computing(folder, number)
    for _ in range(2):
        computing.round(lambda data: dict.fromkeys(computing.rounds.senders, data))
        yield None


KINDS = {"sites": of_sites, "sockets": of_sockets, "computing": of_computing, "alone": alone}


def main() -> None:
    """Run one process to its end."""
    _, folder, number, kind = sys.argv
    ended = []
    marks = []
    for _ in KINDS[kind](Path(folder), int(number)):
        ended.append(time.monotonic())
        # Only the first of these and the last count; the last is not known before.
        marks[1:] = [(time.process_time(), loopback())]
    print(json.dumps({"ended": ended, "marks": marks}))


if __name__ == "__main__":
    main()
