"""A proxy of TCP between sites, with the faults of networks: slow, late, cut, silent, half-open."""

import queue
import socket
import ssl
import threading
import time
from contextlib import suppress

CHUNK = 2**14
"""Bytes at once."""


class Proxy:
    """Listens at an address of its own and forwards bytes to another.

    Attributes:
        address: "host:port", where it listens.
        target: Where connections go that are opened from now on; None refuses them.
        rate: Bytes a second each way of a connection.
        delay: Seconds that each byte takes, each way.
        bytes: Forwarded so far.
        damages: Whether a bit of all that is forwarded is another.
    """

    def __init__(
        self, target: str | None, *, rate: float = float("inf"), delay: float = 0.0
    ) -> None:
        self.target = target
        self.rate = rate
        self.delay = delay
        self.bytes = 0
        self.damages = False
        self.connections: list[_Connection] = []
        self._flows = threading.Event()
        self._flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        """Let no byte through either way, as a partition does; connections stay."""
        self._flows.clear()

    def release(self) -> None:
        """Let bytes through again, those that waited first."""
        self._flows.set()

    def cut(self) -> None:
        """End all connections, at both ends."""
        for connection in self.connections:
            connection.close()

    def half_open(self) -> None:
        """End all connections towards the target, and let who dialled believe that they live."""
        for connection in self.connections:
            connection.abandon()

    def close(self) -> None:
        """End everything."""
        self.target = None
        # Wakes the thread that accepts; to close the socket alone would not.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.release()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._flows.wait()
        if self.target is None:
            near.close()
            return
        host, _, port = self.target.rpartition(":")
        try:
            target = socket.create_connection((host, int(port)), 10)
        except OSError:
            near.close()
            return
        self.connections.append(_Connection(self, near, target))


class _Connection:
    """Two sockets, and four threads between them."""

    def __init__(self, proxy: Proxy, near: socket.socket, target: socket.socket) -> None:
        self._proxy = proxy
        self._near = near
        self._target = target
        self._abandoned = False
        for source, sink in ((near, target), (target, near)):
            # It may have been closed at once.
            with suppress(OSError):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # As much as the link holds, so that a fast sender waits for it.
            waiting: queue.Queue[tuple[float, bytes]] = queue.Queue(64)
            for run in (self._read, self._write):
                threading.Thread(target=run, args=(source, sink, waiting), daemon=True).start()

    def close(self) -> None:
        for end in (self._near, self._target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def abandon(self) -> None:
        self._abandoned = True
        with suppress(OSError):
            self._target.shutdown(socket.SHUT_RDWR)

    def _read(self, source: socket.socket, sink: socket.socket, waiting: queue.Queue) -> None:
        data = b"?"
        while data:
            try:
                data = source.recv(CHUNK)
            except OSError:
                data = b""
            waiting.put((time.monotonic() + self._proxy.delay, data))

    def _write(self, source: socket.socket, sink: socket.socket, waiting: queue.Queue) -> None:
        data = b"?"
        free = 0.0
        while data:
            due, data = waiting.get()
            self._proxy._flows.wait()
            # One byte a second is sent byte by byte.
            size = max(1, int(min(CHUNK, self._proxy.rate / 10)))
            for start in range(0, len(data), size):
                part = data[start : start + size]
                free = max(free, time.monotonic()) + len(part) / self._proxy.rate
                time.sleep(max(0.0, max(due, free) - time.monotonic()))
                self._proxy._flows.wait()
                if self._abandoned:
                    continue
                if self._proxy.damages:
                    part = bytes([part[0] ^ 1]) + part[1:]
                with suppress(OSError):
                    sink.sendall(part)
                    self._proxy.bytes += len(part)
        if not self._abandoned:
            self.close()


class Middle(Proxy):
    """A machine in the middle: it ends TLS at both sides, with certificates of its own.

    Args:
        target: Whom it calls.
        server: What it shows to who dials it.
        client: What it shows to the target.
    """

    def __init__(self, target: str, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
        self.contexts = (server, client)
        self.read = b""
        super().__init__(target)

    def _connect(self, near: socket.socket) -> None:
        assert self.target is not None
        host, _, port = self.target.rpartition(":")
        server, client = self.contexts
        with suppress(OSError):
            near.settimeout(10)
            with server.wrap_socket(near, server_side=True) as inner:
                target = socket.create_connection((host, int(port)), 10)
                with client.wrap_socket(target, server_hostname="geneva") as outer:
                    self._pump(inner, outer)

    def _pump(self, near: ssl.SSLSocket, target: ssl.SSLSocket) -> None:
        """Both ways in one thread: TLS of one socket is not for two."""
        for end in (near, target):
            end.settimeout(0.02)
        data = b"?"
        while data:
            for source, sink in ((near, target), (target, near)):
                with suppress(TimeoutError):
                    data = source.recv(CHUNK)
                    if not data:
                        break
                    self.read += data
                    sink.sendall(data)
