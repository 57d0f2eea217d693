"""A relay, to which all sites dial out, and a site's end of it: no site listens to others.

A relay joins two connections and passes bytes on. The sites' own TLS and gRPC run inside, from end
to end. So a relay is an outsider: it sees who talks when and how much, it delays or cuts, and it
reads no content. A connection is TLS 1.3, with certificates of the project's authority at both
ends. It begins with a line:

    caller                 relay              called
                                          <-  park
    dial NAME          ->
                       <-  ok         ok  ->
    from here on bytes of each of the two are the other's

In place of "ok" a relay says "wait" or "no", and a reason. To who is parked it sends an empty line
now and then, and who has become "ok" parks by another connection. A relay keeps nothing: one that
is started again hears all from the sites, which come back with growing waits.
"""

import asyncio
import contextlib
import json
import logging
import math
import random
import re
import resource
import secrets
import shutil
import socket
import ssl
import tempfile
import threading
from collections.abc import Coroutine, Iterable, Mapping
from collections.abc import Set as AbstractSet
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from dpjax import _files, _validate
from dpjax.sites.channel import Absent, ChannelLimits, Unreached
from dpjax.sites.identity import Identity, Refused, Renewal, Roster, check_certificate, site_name

__all__ = ()

NEEDED = ("name", "plan", "certificate", "key", "authority")
OPTIONAL = ("listen", "departed", "renewals")
"""What ``relay.toml`` has."""
_LOG = logging.getLogger("dpjax.sites")
_Files: TypeAlias = Mapping[str, Path]
"""Of an identity: certificate, key, authority."""
_VERSION = "dpjax-relay-1"
"""The first word of a connection: ends of two versions refuse each other."""
_PORT = 443
_ENDPOINT = re.compile(r"(\[[0-9a-f:.]+\]|[^:/\s]+)(?::(\d{1,5}))?")
_HELLO = 10.0
"""Seconds for a handshake, for the line after it, and for a connection to end."""
_ANSWER = 5.0
"""Seconds that a caller waits for who is called to be parked."""
_BEAT = 10.0
"""Seconds between two lines to who is parked."""
_GONE = 45
"""Seconds after which a machine that acknowledges no bytes is gone."""
_PIECE_BYTES = 2**16
"""Read at once; a stream holds a few of these at most, and its sender waits."""
_HANDSHAKES = 1_000
"""At once, of whoever connects: others wait their turn."""
_STREAMS = 3
"""Of a pair at once, as `dpjax.sites.carrier` has them of a name."""
_MINUTE = 60.0
_ATTEMPTS = 100
"""Connections of a site in a minute, and as many for each neighbour."""
_LINES = 16
"""Different lines about a site in a minute."""
_FIRST_WAIT = 0.2
_OPEN_FILES = 2**16
_CLOSED = "it has stopped, or refuses this site's certificate, as its log says"
_MOST_PATH = 64
"""Characters of a folder; the system takes some hundred bytes for a socket's path."""


class _Stream(NamedTuple):
    """A connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def line(self) -> str:
        """The next line, of a limited length."""
        try:
            data = await self.reader.readline()
        except ValueError:
            raise Refused("a line is too long") from None
        except ConnectionError:
            # Whose certificate is refused may be reset before it has read why.
            data = b""
        if not data.endswith(b"\n"):
            raise ConnectionResetError(_CLOSED)
        return data[:-1].decode(errors="replace")

    def say(self, *words: str) -> None:
        """Send a line."""
        self.writer.write(" ".join(words).encode() + b"\n")

    def is_alive(self) -> bool:
        """Whether the other end may still be there."""
        return not (self.reader.at_eof() or self.writer.is_closing())


@dataclass(eq=False)
class _Member:
    """A site, as a relay knows it; all who prove no name are one."""

    name: str
    limit: int = 0
    parked: list[_Stream] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    attempts: int = 0
    lines: set[str] = field(default_factory=set)
    until: float = -math.inf

    def attempt(self) -> None:
        """Count a connection of this minute."""
        now = monotonic()
        if now > self.until:
            self.until = now + _MINUTE
            self.attempts = 0
            self.lines.clear()
        self.attempts += 1

    def warn(self, line: str) -> None:
        """Log a line, once a minute: nobody who knocks fills a log."""
        if line not in self.lines and len(self.lines) < _LINES:
            self.lines.add(line)
            _LOG.warning("%s", line)


@dataclass(eq=False)
class _Pair:
    """Of two sites: streams that are open, and bytes to who was called, and back."""

    streams: int = 0
    sizes: list[int] = field(default_factory=lambda: [0, 0])


class Relay:
    """One public address that joins sites of a plan in pairs, and passes their bytes on.

    Guarantee: a site is the holder of a key that the roster has for the name in its certificate. It
    is joined with neighbours of the plan alone, whom it dials there. None keeps the others from
    being joined: a site has so many connections, and a pair so many streams, each of which holds
    less than a megabyte. A relay has no key of what it passes on, and neither keeps nor logs it.

    Args:
        name: Of its certificate, and of no site.
        files: Its certificate, key and authority.
        listen: "host:port", by default port 443; port 0 takes a free one.
        roster: Names and keys of the sites.
        edges: Pairs of neighbours.
        departed: Names that are refused.

    Attributes:
        name: Of its certificate.
        port: Where it listens.

    Raises:
        ValueError: For a name of a site, and an address where this process cannot listen.
    """

    def __init__(
        self,
        name: str,
        files: _Files,
        listen: str,
        roster: Roster,
        edges: Iterable[Iterable[str]],
        departed: AbstractSet[str] = frozenset(),
    ) -> None:
        if name in roster:
            raise ValueError(f"name is {name!r}, a site's in the plan; make a key for a new name")
        self.name = name
        self._files = files
        self._roster = roster
        self._departed = departed
        self._context = _context(ssl.PROTOCOL_TLS_SERVER, name, files)
        self._strangers = _Member("somebody")
        self._members = {site: _Member(site, _ATTEMPTS) for site in roster}
        # By who dials, which is the one that comes later.
        self._pairs: dict[tuple[str, str], _Pair] = {}
        for edge in edges:
            called, caller = sorted(edge, key=list(roster).index)
            self._pairs[caller, called] = _Pair()
            self._members[caller].limit += _ATTEMPTS
            self._members[called].limit += _ATTEMPTS
        host, port = endpoint("listen", listen)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            remedy = (
                f"this process cannot listen there ({_files.brief(error)}): choose another, stop "
                "what does, or give it the right to"
            )
            raise _validate.refusal("listen", listen, remedy) from None
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Of all that it accepts.
            option = socket.TCP_USER_TIMEOUT
            self._listener.setsockopt(socket.IPPROTO_TCP, option, 1000 * _GONE)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]

    @classmethod
    def of(cls, values: Mapping[str, Any], home: Path) -> "Relay":
        """Return the relay of ``relay.toml``, whose paths are relative to a folder.

        Args:
            values: name, plan, certificate, key, authority; listen, departed, renewals.
            home: The folder.
        """
        for key in values:
            _validate.one_of("a key of the relay", key, NEEDED + OPTIONAL)
        for key in NEEDED:
            if not isinstance(values.get(key), str):
                raise ValueError(f"{key} is missing in the relay's settings; give it as text")
        path = home / values["plan"]
        # No arrays: a relay computes nothing.
        with _files.reading(path, "get the file again"):
            content = json.loads(path.read_text(encoding="utf-8"))
            roster = Roster.from_json(content["roster"])
            edges = content["settings"]["network"]["edges"]
        for renewal in values.get("renewals", ()):
            roster = roster.renewed(Renewal.from_bytes((home / renewal).read_bytes()))
        files = {key: home / values[key] for key in NEEDED[2:]}
        departed = frozenset(map(str, _validate.entries("departed", values.get("departed", ()))))
        listen = values.get("listen", "0.0.0.0")
        return cls(values["name"], files, listen, roster, edges, departed)

    async def serve(self) -> None:
        """Serve until the task is cancelled."""
        loop = asyncio.get_running_loop()
        room = asyncio.Semaphore(_HANDSHAKES)
        tasks = {loop.create_task(self._watch())}
        roster = self._roster.digest
        _LOG.info("%s listens at port %d, for the roster %s", self.name, self.port, roster)
        while True:
            await room.acquire()
            try:
                connection, place = await loop.sock_accept(self._listener)
            except OSError as error:
                # All files of the process may be open, until handshakes have ended.
                room.release()
                self._strangers.warn(f"no connection can be taken: {_said(error)}")
                await asyncio.sleep(_FIRST_WAIT)
                continue
            task = loop.create_task(self._answer(connection, place[0], room))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def status(self) -> str:
        """Return who is parked, and how much each pair has sent."""
        here = [name for name, member in self._members.items() if member.parked]
        sizes = [
            f"{caller} to {called} {pair.sizes[0]:,} bytes, back {pair.sizes[1]:,}"
            for (caller, called), pair in self._pairs.items()
        ]
        return f"parked: {', '.join(here) or 'nobody'}; {'; '.join(sizes)}"

    async def _watch(self) -> None:
        """Tell who is parked that this lives, and now and then the log; take a new certificate."""
        before = ""
        reported = -math.inf
        while True:
            await asyncio.sleep(_BEAT)
            for member in self._members.values():
                # Who parks says nothing until it is joined.
                member.parked = list(filter(_Stream.is_alive, member.parked))
                for stream in member.parked:
                    stream.say()
            if monotonic() < reported + _MINUTE:
                continue
            reported = monotonic()
            status = self.status()
            if status != before:
                _LOG.info("%s", status)
                before = status
            try:
                self._context = _context(ssl.PROTOCOL_TLS_SERVER, self.name, self._files)
            except (OSError, ValueError) as error:
                self._strangers.warn(f"this relay's own certificate: {_said(error)}")

    async def _answer(self, connection: socket.socket, host: str, room: asyncio.Semaphore) -> None:
        """Serve a connection, whoever's it is, or say why it is refused."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(_PIECE_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        words = {"ssl_handshake_timeout": _HELLO, "ssl_shutdown_timeout": _HELLO}
        member = self._strangers
        member.attempt()
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._context, **words
            )
        except OSError as error:
            member.warn(f"{member.name} at {host}: refused: {_said(error)}")
            return
        finally:
            room.release()
        stream = _Stream(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        try:
            # Who has gone, or says nothing, hears nothing.
            with contextlib.suppress(OSError):
                member = self._member(transport.get_extra_info("ssl_object"))
                await self._converse(member, stream)
        except Refused as reason:
            is_early = isinstance(reason, Absent)
            stream.say("wait" if is_early else "no", str(reason))
            if not is_early:
                why = str(reason).removeprefix("refused: ")
                member.warn(f"{member.name} at {host}: refused: {why}")
        finally:
            if stream not in member.parked:
                stream.writer.close()

    def _member(self, connection: ssl.SSLObject) -> _Member:
        """The site at the other end, by the certificate that it showed in TLS."""
        shown = connection.getpeercert(binary_form=True) or b""
        pem = ssl.DER_cert_to_PEM_cert(shown).encode()
        return self._members[check_certificate(pem, self._roster, self._departed)]

    async def _converse(self, member: _Member, stream: _Stream) -> None:
        """Do what a site asks for in its line."""
        member.attempt()
        if member.attempts > member.limit:
            raise Refused(f"{member.name} connects more than {member.limit} times in a minute")
        async with asyncio.timeout(_HELLO):
            line = await stream.line()
        match line.split(" "):
            case [version, "park"] if version == _VERSION:
                stream.say("ok")
                if len(member.parked) >= _STREAMS:
                    member.parked.pop(0).writer.close()
                member.parked.append(stream)
                member.came.set()
            case [version, "dial", name] if version == _VERSION:
                await self._dial(member, name, stream)
            case _:
                raise Refused(f"{member.name} says {line[:99]!r} to {_VERSION}")

    async def _dial(self, member: _Member, name: str, stream: _Stream) -> None:
        """Join a site with a neighbour that it dials in this plan."""
        pair = self._pairs.get((member.name, name))
        if pair is None:
            raise Refused(f"{member.name} does not dial {name} in this plan")
        if name in self._departed:
            raise Refused(f"{name} has left this run")
        if pair.streams >= _STREAMS:
            raise Refused(f"{pair.streams} streams of {member.name} and {name} are open")
        pair.streams += 1
        try:
            called = await self._parked(self._members[name])
            try:
                called.say("ok")
                stream.say("ok")
                _LOG.info("%s and %s are joined", member.name, name)
                await self._join(stream, called, pair)
            finally:
                called.writer.close()
            _LOG.info("%s and %s are no longer joined", member.name, name)
        finally:
            pair.streams -= 1

    async def _parked(self, member: _Member) -> _Stream:
        """A connection of a site that is called, the latest first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER):
                while True:
                    while member.parked:
                        stream = member.parked.pop()
                        if stream.is_alive():
                            return stream
                    member.came.clear()
                    await member.came.wait()
        raise Absent(f"{member.name} is not there yet")

    async def _join(self, caller: _Stream, called: _Stream, pair: _Pair) -> None:
        """Pass bytes on, both ways, until an end has closed."""
        await _splice(caller, called, pair.sizes)


class Forwarder:
    """A site's end of relays: what dials out, so that the site listens to nobody.

    Guarantee: the site's own channel meets its neighbours by sockets of a folder that no other user
    can enter. Whatever a relay sends there has to pass the channel's TLS and hello.

    Args:
        name: The site's.
        files: Its certificate, key and authority.
        relays: By name, as their certificates have it, "host:port"; the first that answers serves.
        peers: The site's neighbours.
        limits: Of the channel.

    Attributes:
        listen: Where the channel has to listen.
        peers: Where it dials each neighbour.

    Raises:
        ValueError: For other names and addresses.
    """

    def __init__(
        self,
        name: str,
        files: _Files,
        relays: Mapping[str, str],
        peers: Iterable[str],
        limits: ChannelLimits,
    ) -> None:
        if not isinstance(relays, Mapping) or not relays:
            raise _validate.refusal("relays", relays, 'give a section: NAME = "host:port"')
        for relay, address in relays.items():
            site_name("name under [relays]", relay)
            endpoint(f"[relays] {relay}", address)
        temporary = tempfile.gettempdir()
        if len(temporary) > _MOST_PATH:
            raise ValueError(f"TMPDIR is {temporary}, too long for a socket; name a shorter folder")
        # Nobody can guess it, and stand there first.
        self._home = Path(temporary, f"dpjax-{secrets.token_hex(8)}")
        self.listen = f"unix:{self._home}/listen"
        self.peers = {peer: f"unix:{self._home}/{place}" for place, peer in enumerate(peers)}
        self._name = name
        self._files = files
        self._relays = dict(relays)
        self._limits = limits
        self._joined: dict[str, _Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self) -> None:
        """Begin to dial out, in a thread."""
        self._home.mkdir(mode=0o700)
        begun = threading.Event()
        run = partial(asyncio.run, self._run(begun))
        threading.Thread(target=run, name="dpjax.sites", daemon=True).start()
        begun.wait()

    def reach(self, peer: str) -> None:
        """Be joined with a peer by a relay: the next connection to the peer's socket goes there.

        Args:
            peer: Name.

        Raises:
            Unreached: Where no relay does so, with the reason.
        """
        assert self._loop is not None
        if not self._over.is_set():
            reached = asyncio.run_coroutine_threadsafe(self._reach(peer), self._loop)
            with contextlib.suppress(futures.CancelledError):
                return reached.result()
        raise Unreached("this site closes the channel")

    def close(self) -> None:
        """End all connections."""
        # It may be closed already.
        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._over.set)
        shutil.rmtree(self._home, ignore_errors=True)

    async def _run(self, begun: threading.Event) -> None:
        """Listen for the channel, and be parked at every relay, until this is closed."""
        self._loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            for peer, address in self.peers.items():
                # No coroutine, whose end Python 3.11 would log.
                def accept(*ends: Any, peer: str = peer) -> None:
                    self._keep(self._pass(peer, _Stream(*ends)))

                server = asyncio.start_unix_server(accept, address.removeprefix("unix:"))
                await stack.enter_async_context(await server)
            for relay in self._relays:
                self._keep(self._stay(relay))
            begun.set()
            await self._over.wait()
            for task in self._tasks:
                task.cancel()
        # Connections that have just been closed end before their loop does.
        await asyncio.sleep(_FIRST_WAIT)

    async def _stay(self, relay: str) -> None:
        """Be parked at a relay, again and again, with growing waits after what fails."""
        before = ""
        wait = 0.0
        while True:
            # Sites that lost the same relay do not all come back at once.
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))
            start = monotonic()
            try:
                stream = await self._called(relay)
            except (Refused, OSError) as error:
                reason = _said(error).removeprefix(f"relay {relay}: ")
                if reason != before:
                    _LOG.warning("%s is not parked at relay %s: %s", self._name, relay, reason)
                is_short = monotonic() < start + _HELLO
                longer = min(_FIRST_WAIT + 2 * wait, self._limits.longest_wait)
                wait = longer if is_short else _FIRST_WAIT
                before = reason
                continue
            self._keep(self._take(stream))
            wait = 0.0

    async def _called(self, relay: str) -> _Stream:
        """Be parked at a relay, and return the connection once somebody is at its other end."""
        stream = await self._asked(relay, "park")
        _LOG.info("%s is parked at relay %s", self._name, relay)
        try:
            while not await asyncio.wait_for(stream.line(), _GONE):
                pass
        except BaseException:
            self._drop(stream)
            raise
        return stream

    async def _take(self, stream: _Stream) -> None:
        """Join who calls with the channel of this site."""
        try:
            with contextlib.suppress(OSError):
                path = self.listen.removeprefix("unix:")
                channel = _Stream(*await asyncio.open_unix_connection(path, limit=_PIECE_BYTES))
                try:
                    await _splice(stream, channel, [0, 0])
                finally:
                    self._drop(channel)
        finally:
            self._drop(stream)

    async def _reach(self, peer: str) -> None:
        """Be joined with a peer, by the first relay that does so."""
        reasons: list[Unreached] = []
        for relay in list(self._relays):
            try:
                stream = await self._asked(relay, "dial", peer)
            except Unreached as reason:
                reasons.append(reason)
                # From now on the others come first.
                self._relays[relay] = self._relays.pop(relay)
                continue
            if peer in self._joined:
                self._drop(self._joined.pop(peer))
            self._joined[peer] = stream
            return
        kind = Absent if all(isinstance(reason, Absent) for reason in reasons) else Unreached
        raise kind("; ".join(map(str, reasons)))

    async def _pass(self, peer: str, channel: _Stream) -> None:
        """Join a connection of the channel with the peer that was reached for it."""
        stream = self._joined.pop(peer, channel)
        try:
            if stream is not channel:
                await _splice(channel, stream, [0, 0])
        finally:
            self._drop(channel)
            self._drop(stream)

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        """Do something until it ends, or all does."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _asked(self, relay: str, *words: str) -> _Stream:
        """A connection to a relay, which said "ok" to a line."""
        host, port = endpoint(relay, self._relays[relay])
        try:
            context = _context(ssl.PROTOCOL_TLS_CLIENT, self._name, self._files)
            async with asyncio.timeout(_HELLO):
                connection = asyncio.open_connection(
                    host, port, limit=_PIECE_BYTES, ssl=context, server_hostname=relay
                )
                stream = _Stream(*await connection)
                try:
                    stream.say(_VERSION, *words)
                    answer, _, reason = (await stream.line()).partition(" ")
                except BaseException:
                    self._drop(stream)
                    raise
        except ssl.SSLError as error:
            remedy = "compare authorities, and both clocks"
            raise Unreached(f"relay {relay}: TLS failed: {remedy} ({_said(error)})") from None
        except (OSError, ValueError) as error:
            raise Absent(f"relay {relay}: {_said(error)}") from None
        if answer == "ok":
            return stream
        self._drop(stream)
        kind = Absent if answer == "wait" else Unreached
        raise kind(f"relay {relay}: {reason}")

    def _drop(self, stream: _Stream) -> None:
        """Close a connection; at the end without a word, as nobody waits for the other's."""
        if self._over.is_set():
            stream.writer.transport.abort()
        else:
            stream.writer.close()


def run(path: _files.PathLike) -> None:
    """Serve as the relay of a file, until the process is stopped.

    Args:
        path: ``relay.toml``.
    """
    relay = Relay.of(_files.toml(path), Path(path).absolute().parent)
    # A connection is an open file, of which a process may have few unless it asks for more.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _OPEN_FILES)), hard))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(relay.serve())


def endpoint(name: str, value: object) -> tuple[str, int]:
    """Return host and port of "host:port", or of a host alone.

    Args:
        name: Of the setting.
        value: What it is.

    Raises:
        ValueError: For anything else.
    """
    match = _ENDPOINT.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[2] or _PORT) > 65535:
        raise _validate.refusal(name, value, f'give "host:port", or "host" for port {_PORT}')
    return match[1].strip("[]"), int(match[2] or _PORT)


async def _splice(caller: _Stream, called: _Stream, sizes: list[int]) -> None:
    """Pass bytes on, both ways, until an end has closed; count them."""
    ways = [
        asyncio.create_task(_pump(caller, called, sizes, 0)),
        asyncio.create_task(_pump(called, caller, sizes, 1)),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in ways:
            task.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _pump(source: _Stream, sink: _Stream, sizes: list[int], way: int) -> None:
    """Pass bytes on, one way; a sink that is slow keeps the source waiting."""
    while data := await source.reader.read(_PIECE_BYTES):
        sink.writer.write(data)
        await sink.writer.drain()
        sizes[way] += len(data)


def _context(protocol: int, name: str, files: _Files) -> ssl.SSLContext:
    """What TLS needs of an identity, which is read and checked anew."""
    identity = Identity.load(name, **files)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=identity.authority.decode())
    context.load_cert_chain(files["certificate"], files["key"])
    return context


def _said(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    return str(Refused(_files.brief(error)))
