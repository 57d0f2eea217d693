"""Sessions between sites over gRPC: two and three real channels, and hostile ends of every kind."""

import contextlib
import datetime
import hashlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dpjax import _validate
from dpjax.sites import carrier, channel
from dpjax.sites.carrier import GrpcChannel
from dpjax.sites.channel import ChannelLimits, Event, Hello
from dpjax.sites.identity import Authority, Identity, Refused, Roster, renewal, request

NAMES = ("lyon", "paris", "rome")
LIMITS = ChannelLimits(message_bytes=2_000_000, hello=0.7, keepalive=0.7, longest_wait=0.2)
LOOPBACK = "127.0.0.1:0"
STREAM = "/dpjax.sites/session"


@dataclass(frozen=True)
class Project:
    """An authority, its sites, and one who is in no roster."""

    folder: Path
    identities: dict[str, Identity]
    roster: Roster


def identity(authority: Authority, name: str, folder: Path) -> Identity:
    key, demand = request(name, folder)
    return Identity.load(
        name, certificate=authority.sign(demand), key=key, authority=authority.certificate
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("project")
    authority = Authority(folder / "authority")
    identities = {name: identity(authority, name, folder) for name in (*NAMES, "oslo")}
    return Project(folder, identities, Roster({n: identities[n].public_key for n in NAMES}))


def certified(
    project: Project, name: str, *, first: float = -1, last: float = 1, new_key: bool = False
) -> Identity:
    """An identity with another certificate of the authority, valid for these days from now."""
    folder = project.folder / "authority"
    issuer = x509.load_pem_x509_certificate((folder / "authority_root.pem").read_bytes())
    root: Any = serialization.load_pem_private_key(
        (folder / "authority_key.pem").read_bytes(), None
    )
    plain: Any = project.identities[name]
    key: Any = serialization.load_pem_private_key(plain.private_key_pem, None)
    if new_key:
        key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(first))
        .not_valid_after(now + datetime.timedelta(last))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(root, hashes.SHA256())
    )
    encoding = serialization.Encoding
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return replace(
        plain,
        public_key=key.public_key().public_bytes(encoding.DER, form),
        certificate_chain=certificate.public_bytes(encoding.PEM),
        _private=key,
    )


def agrees(peer: str, theirs: bytes) -> str | None:
    return None if theirs == b"plan" else "the plan's digest differs"


def says(peer: str) -> bytes:
    return b"plan"


@pytest.fixture
def opened(project: Project) -> Iterator[Callable[..., GrpcChannel]]:
    """Opens channels, and closes them in time, without a thread left."""
    channels: list[GrpcChannel] = []

    def build(
        name: str,
        peers: dict[str, str | None],
        *,
        who: Identity | None = None,
        limits: ChannelLimits = LIMITS,
        greeting: Callable[[str], bytes] = says,
        **changes: Any,
    ) -> GrpcChannel:
        arguments = {"roster": project.roster, "listen": LOOPBACK, "limits": limits, **changes}
        end = GrpcChannel(who or project.identities[name], peers=peers, **arguments)
        end.open(greeting, agrees)
        channels.append(end)
        return end

    yield build
    start = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(GrpcChannel.close, channels))
    assert time.monotonic() - start < 2.5
    assert not threads()


def threads(seconds: float = 2.0) -> list[threading.Thread]:
    """Threads of channels that are alive after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        alive = [thread for thread in threading.enumerate() if "dpjax" in thread.name]
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(0.02)


def address(end: GrpcChannel) -> str:
    return f"127.0.0.1:{end.port}"


def event(end: GrpcChannel, kind: str, words: str = "", seconds: float = 8.0) -> Event:
    """The next event of a kind with these words, else an error that shows what came instead."""
    others = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        arrival = end.receive(0.1)
        if arrival is not None:
            if arrival.kind == kind and words in arrival.reason:
                return arrival
            others.append(arrival)
    raise AssertionError(f"no {kind!r} with {words!r}; there were {others}")


def nothing(end: GrpcChannel, kind: str, seconds: float = 0.2) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        arrival = end.receive(0.05)
        if arrival is not None and arrival.kind == kind:
            return False
    return True


def pair(opened: Callable[..., GrpcChannel], **changes: Any) -> tuple[GrpcChannel, GrpcChannel]:
    """Lyon, which listens, and Paris, with a session."""
    lyon = opened("lyon", {"paris": None}, **changes)
    paris = opened("paris", {"lyon": address(lyon)}, **changes)
    event(lyon, "opened")
    event(paris, "opened")
    return lyon, paris


def sent(end: GrpcChannel, peer: str, data: bytes, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not end.send(peer, data):
        assert time.monotonic() < deadline, "no room"
        time.sleep(0.001)


class Dialer:
    """A hostile end: gRPC with somebody's certificate, and frames as they come."""

    def __init__(self, end: GrpcChannel, who: Identity, target: str = "lyon") -> None:
        self.who = who
        self.frames: list[bytes] = []
        self._changed = threading.Condition()
        credentials = grpc.ssl_channel_credentials(
            who.authority, who.private_key_pem, who.certificate_chain
        )
        self._channel = grpc.secure_channel(
            address(end),
            credentials,
            [
                ("grpc.ssl_target_name_override", target),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_receive_message_length", -1),
            ],
        )
        self.call = self._channel.stream_stream(STREAM)(self._outgoing(), timeout=10)

    def _outgoing(self) -> Iterator[bytes]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.frames)
                frame = self.frames.pop(0)
            if frame == b"end":
                return
            yield frame

    def put(self, frame: bytes) -> None:
        with self._changed:
            self.frames.append(frame)
            self._changed.notify_all()

    def take(self) -> bytes:
        """The next frame that is not empty."""
        while True:
            frame = next(self.call)
            if frame:
                return bytes(frame)

    def part(self) -> bytes:
        frame = self.take()
        if frame.startswith(b"r"):
            raise Refused(frame[1:].decode())
        return frame[1:]

    def hello(self, roster: Roster, peer: str = "lyon") -> "Dialer":
        digest = channel.fingerprint(self.who.certificate_chain)
        hello = Hello(self.who, roster, True, peer, digest, says, agrees)
        hello.exchange(lambda part: self.put(b"m" + part), self.part, lambda: None)
        return self

    def __enter__(self) -> "Dialer":
        return self

    def __exit__(self, *_: object) -> None:
        self.put(b"end")
        self.call.cancel()
        self._channel.close()


def refusal(dialer: Dialer) -> str:
    """Why the listener refuses: its first frame that is a refusal."""
    while True:
        frame = dialer.take()
        if frame.startswith(b"r"):
            return frame[1:].decode()


# Messages.


def test_messages_arrive_whole_and_in_order(opened: Callable[..., GrpcChannel]) -> None:
    lyon, paris = pair(opened)
    messages = [hashlib.sha256(bytes([i])).digest() * (1 + 31_000 * (i % 2)) for i in range(24)]

    def send_all(end: GrpcChannel, peer: str) -> None:
        for message in messages:
            sent(end, peer, message)

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(send_all, lyon, "paris"), pool.submit(send_all, paris, "lyon")]
        for end in (lyon, paris):
            assert [event(end, "message").data for _ in messages] == messages
        for job in jobs:
            job.result()
    traffic = lyon.statistics()["paris"]
    total = sum(map(len, messages))
    assert total <= traffic.sent < total + 100 and total < traffic.received < total + 2000
    assert traffic.sessions == 1 and traffic.silence < 5


def test_three_sites_and_turns(opened: Callable[..., GrpcChannel]) -> None:
    lyon = opened("lyon", {"paris": None, "rome": None})
    paris = opened("paris", {"lyon": address(lyon), "rome": None})
    rome = opened("rome", {"lyon": address(lyon), "paris": address(paris)})
    for end in (lyon, paris, rome):
        assert {event(end, "opened").peer, event(end, "opened").peer} < set(NAMES)
    for number in range(3):
        sent(paris, "lyon", bytes([number]))
    time.sleep(0.1)
    sent(rome, "lyon", b"r")
    time.sleep(0.1)
    # Paris spoke first and most; Rome is not kept waiting.
    assert [event(lyon, "message").peer for _ in range(4)] == ["paris", "rome", "paris", "paris"]


def test_limits_of_messages(opened: Callable[..., GrpcChannel]) -> None:
    lyon, _ = pair(opened)
    for data in (b"", bytes(LIMITS.message_bytes + 1)):
        with pytest.raises(ValueError, match="bytes of data"):
            lyon.send("paris", data)
    with pytest.raises(ValueError, match="peer is 'rome'"):
        lyon.send("rome", b"x")
    assert lyon.receive(0) is None
    with pytest.raises(ValueError, match="message_bytes"):
        ChannelLimits(0)
    with pytest.raises(ValueError, match="keepalive"):
        ChannelLimits(1, keepalive=0)


def test_no_session_takes_nothing(opened: Callable[..., GrpcChannel]) -> None:
    lyon = opened("lyon", {"paris": None})
    assert not lyon.send("paris", b"x")


def test_reconnection(opened: Callable[..., GrpcChannel]) -> None:
    lyon, paris = pair(opened)
    port = lyon.port
    lyon.close()
    assert event(paris, "closed").peer == "lyon"
    again = opened("lyon", {"paris": None}, listen=f"127.0.0.1:{port}")
    event(again, "opened")
    event(paris, "opened")
    sent(again, "paris", b"again")
    assert event(paris, "message").data == b"again"
    assert paris.statistics()["lyon"].sessions == 2


def test_nothing_is_sent_on_a_session_that_is_not_told_yet(
    opened: Callable[..., GrpcChannel],
) -> None:
    """What was meant for the session before, whose end is unread, would go out first."""
    lyon, paris = pair(opened)
    paris.close()
    again = opened("paris", {"lyon": address(lyon)})
    event(again, "opened")
    for _ in range(20):
        assert not lyon.send("paris", b"of the session before")
        time.sleep(0.02)
    assert [lyon.receive(8).kind for _ in range(2)] == ["closed", "opened"]
    sent(lyon, "paris", b"first")
    assert event(again, "message").data == b"first"


def test_reconnections_fill_no_memory_while_nobody_listens(
    opened: Callable[..., GrpcChannel],
) -> None:
    """One session is told of at a time, so one end of it at most waits."""
    lyon, paris = pair(opened)
    for _ in range(6):
        paris.close()
        paris = opened("paris", {"lyon": address(lyon)})
        time.sleep(0.2)
    kinds = []
    while not lyon._events.empty():
        kinds.append(lyon._events.get()[1].kind)
    assert kinds.count("closed") == 1 and "opened" not in kinds


def test_close_delivers_what_was_handed_over(opened: Callable[..., GrpcChannel]) -> None:
    lyon, paris = pair(opened)
    for end, peer, other in ((lyon, "paris", paris), (paris, "lyon", lyon)):
        if end is paris:
            lyon, paris = pair(opened)
            end, other = paris, lyon
        sent(end, peer, bytes(1_000_000))
        sent(end, peer, b"last")
        end.close()
        assert len(event(other, "message").data) == 1_000_000
        assert event(other, "message").data == b"last"


# Certificates and names.


def test_tls_refuses(project: Project, opened: Callable[..., GrpcChannel], tmp_path: Path) -> None:
    lyon = opened("lyon", {"paris": None})
    foreign = identity(Authority(tmp_path / "other"), "paris", tmp_path)
    trusting = replace(foreign, authority=project.identities["lyon"].authority)
    context = ssl.create_default_context(cadata=trusting.authority.decode())
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(("127.0.0.1", lyon.port)) as plain:
        with contextlib.suppress(OSError):
            with context.wrap_socket(plain, server_hostname="lyon") as secure:
                secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                # One that takes this connection sends its settings.
                assert not secure.recv(1)
    for who in (trusting, certified(project, "paris", first=-3, last=-1)):
        with Dialer(lyon, who) as dialer, pytest.raises(grpc.RpcError, match="closed"):
            dialer.hello(project.roster)
    assert not lyon.send("paris", b"x") and nothing(lyon, "opened", 0.1)


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("dates", "words"),
    [((-3, -1), "expired"), ((1, 2), "not yet valid")],
    ids=["expired", "early"],
)
def test_dates_are_named(
    project: Project,
    opened: Callable[..., GrpcChannel],
    dates: tuple[int, int],
    words: str,
) -> None:
    lyon = opened(
        "lyon", {"paris": None}, who=certified(project, "lyon", first=dates[0], last=dates[1])
    )
    paris = opened("paris", {"lyon": address(lyon)})
    reason = event(paris, "refused", words).reason
    assert "clocks" in reason


def test_foreign_listener_and_rejected_dialer_are_named(
    project: Project, opened: Callable[..., GrpcChannel], tmp_path: Path
) -> None:
    lyon = opened("lyon", {"paris": None})
    foreign = identity(Authority(tmp_path / "other"), "paris", tmp_path)
    roster = Roster({**project.roster, "paris": foreign.public_key})
    for root, words in ((foreign.authority, "andshake"), (None, "refuses this site")):
        who = replace(foreign, authority=root or project.identities["lyon"].authority)
        paris = opened("paris", {"lyon": address(lyon)}, who=who, roster=roster)
        refused = event(paris, "refused", words)
        assert refused.peer == "lyon" and "compare authorities, and both clocks" in refused.reason
    stranger = opened("rome", {"paris": address(lyon)})
    assert "another site answers" in event(stranger, "refused").reason


def test_names_and_keys_are_the_rosters(
    project: Project, opened: Callable[..., GrpcChannel], caplog: pytest.LogCaptureFixture
) -> None:
    lyon = opened("lyon", {"paris": None, "rome": None}, departed=frozenset({"rome"}))
    cases = {
        "not in the roster": project.identities["oslo"],
        "has left this run": project.identities["rome"],
        "key": certified(project, "paris", new_key=True),
        "does not dial": project.identities["lyon"],
    }
    with caplog.at_level(logging.WARNING, "dpjax.sites"):
        for words, who in cases.items():
            with Dialer(lyon, who) as dialer:
                assert words in refusal(dialer)
                assert words in event(lyon, "refused").reason
            with Dialer(lyon, who) as dialer:
                assert words in refusal(dialer)
        assert nothing(lyon, "refused", 0.1), "told twice within a minute"
    levels = [record.levelname for record in caplog.records if record.levelname != "INFO"]
    assert levels == ["WARNING"] * len(cases)


def test_who_dials_a_place_where_nobody_listens_hears_so(
    opened: Callable[..., GrpcChannel],
) -> None:
    """No refusal: the peer may start later."""
    paris = opened("paris", {"lyon": "127.0.0.1:9"})
    assert "nothing listens at its address yet" in event(paris, "absent").reason
    assert nothing(paris, "refused", 0.3)


def test_departure_ends_a_session(opened: Callable[..., GrpcChannel]) -> None:
    lyon, paris = pair(opened)
    lyon.depart("paris")
    for end in (lyon, paris):
        assert "paris has left" in event(end, "refused").reason
        assert "paris has left" in event(end, "closed").reason
    assert not lyon.send("paris", b"x")
    assert nothing(lyon, "opened", 0.3)


def test_departed_are_not_dialled(opened: Callable[..., GrpcChannel]) -> None:
    lyon, paris = pair(opened)
    paris.depart("lyon")
    event(lyon, "refused", "lyon has left")
    assert nothing(lyon, "opened", 0.3)


# The hello.


def greeter(project: Project, dials: bool, **changes: Any) -> Hello:
    """Paris, which dials, or Lyon, which listens."""
    mine = "paris" if dials else "lyon"
    arguments: dict[str, Any] = {
        "identity": project.identities[mine],
        "roster": project.roster,
        "peer": "lyon" if dials else "paris",
        "certificate": b"c" * 32,
        **changes,
    }
    return Hello(dials=dials, greeting=says, check=agrees, **arguments)


def exchanged(dialer: Hello, listener: Hello) -> list[object]:
    """What both ends of a hello return or raise."""
    forward: Any = SimpleQueue()
    back: Any = SimpleQueue()

    def run(hello: Hello, put: Any, take: Any) -> object:
        try:
            hello.exchange(put, lambda: take(timeout=0.2), lambda: None)
            return hello.peer
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(run, dialer, forward.put, back.get),
            pool.submit(run, listener, back.put, forward.get),
        ]
        return [job.result() for job in jobs]


def test_hello_names_both(project: Project) -> None:
    assert exchanged(greeter(project, True), greeter(project, False)) == ["lyon", "paris"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"certificate": b"d" * 32}, "certificate of the end that dials"),
        ({"peer": "rome"}, "name of the end that says hello"),
    ],
    ids=["certificate", "name"],
)
def test_hello_compares(project: Project, change: dict[str, Any], words: str) -> None:
    answers = exchanged(greeter(project, True), greeter(project, False, **change))
    assert words in str(answers[1]) and all(isinstance(answer, Exception) for answer in answers)


def test_hello_compares_rosters(project: Project) -> None:
    keys = dict(reversed(list(project.roster.items())))
    answers = exchanged(greeter(project, True), greeter(project, False, roster=Roster(keys)))
    assert "roster" in str(answers[1]) and project.roster.digest in str(answers[1])


def test_hello_needs_the_pinned_key(project: Project) -> None:
    thief = certified(project, "paris", new_key=True)
    answers = exchanged(greeter(project, True, identity=thief), greeter(project, False))
    assert "not signed by the key" in str(answers[1])


def test_reflected_hello_is_refused(project: Project) -> None:
    # Its own parts come back: an end that took them would speak with itself.
    for dials in (True, False):
        hello = greeter(project, dials)
        opening = greeter(project, dials)._opening()
        with pytest.raises(Refused, match="hello"):
            hello.exchange(lambda part: None, lambda opening=opening: opening, lambda: None)


def test_signature_of_the_other_role_is_refused(project: Project) -> None:
    """Were purposes alike, a listener's own signature could come back as the dialer's."""
    lyon = project.identities["lyon"]
    arguments: dict[str, Any] = {
        "identity": lyon,
        "roster": Roster(
            {"lyon": lyon.public_key, **{name: project.roster[name] for name in ("paris",)}}
        ),
    }
    sent_parts: list[bytes] = []
    listener = greeter(project, False, peer="lyon", **arguments)
    dialer = greeter(project, True, **arguments)
    opening = dialer._opening()
    replies = iter([lambda: opening, lambda: sent_parts[1]])
    with pytest.raises(Refused, match="not signed"):
        listener.exchange(sent_parts.append, lambda: next(replies)(), lambda: None)


def test_replayed_hello_is_refused(project: Project, opened: Callable[..., GrpcChannel]) -> None:
    lyon = opened("lyon", {"paris": None})
    recorded: list[bytes] = []
    with Dialer(lyon, project.identities["paris"]) as dialer:
        put = dialer.put
        dialer.put = lambda frame: (recorded.append(frame), put(frame))[1]  # type: ignore[method-assign]
        dialer.hello(project.roster)
        event(lyon, "opened")
        dialer.put = put  # type: ignore[method-assign]
    event(lyon, "closed")
    with Dialer(lyon, project.identities["paris"]) as dialer:
        for frame in recorded:
            dialer.put(frame)
        assert "not signed by the key" in refusal(dialer)
    event(lyon, "refused", "not signed")


@pytest.mark.gate(3)
@pytest.mark.parametrize(
    "opening", [b"", b"\xc1", b"\x93\x01\x02", b"\x91" * 3000, bytes(70_000), b"\x80"]
)
def test_openings_of_another_kind(
    project: Project, opened: Callable[..., GrpcChannel], opening: bytes
) -> None:
    lyon = opened("lyon", {"paris": None})
    with Dialer(lyon, project.identities["paris"]) as dialer:
        dialer.put(b"m" + opening)
        assert refusal(dialer)
    assert event(lyon, "refused").peer == "paris"


def test_plans_that_differ_are_named_at_both_ends(
    project: Project, opened: Callable[..., GrpcChannel]
) -> None:
    lyon = opened("lyon", {"paris": None})
    paris = opened("paris", {"lyon": address(lyon)}, greeting=lambda peer: b"another plan")
    for end in (lyon, paris):
        assert "the plan's digest differs" in event(end, "refused").reason
    assert not lyon.send("paris", b"x") and nothing(paris, "opened")


def test_reasons_of_others_are_one_line(
    project: Project, opened: Callable[..., GrpcChannel], caplog: pytest.LogCaptureFixture
) -> None:
    lyon = opened("lyon", {"paris": None})
    with Dialer(lyon, project.identities["paris"]) as dialer:
        dialer.put(b"r" + b"two\nlines\x1b[31m \xff" + b"x" * 1000)
        reason = event(lyon, "refused").reason
        assert reason.isprintable() and len(reason) <= 300 and reason in caplog.text
    with Dialer(lyon, project.identities["paris"]) as dialer:
        dialer.hello(project.roster)
        dialer.put(b"rtwo\nlines" + b"x" * 1000)
        reason = event(lyon, "closed").reason
        assert reason.isprintable() and len(reason) <= 300


def test_failing_check_refuses(opened: Callable[..., GrpcChannel]) -> None:
    def fails(peer: str) -> bytes:
        raise KeyError("secret")

    lyon = opened("lyon", {"paris": None}, greeting=fails)
    paris = opened("paris", {"lyon": address(lyon)})
    for end in (lyon, paris):
        reason = event(end, "refused").reason
        assert "failed at lyon" in reason and "secret" not in reason


def relay(end: GrpcChannel, front: Identity, back: Identity) -> tuple[grpc.Server, str]:
    """Somebody between: a listener with one certificate that passes all on with another."""

    def answer(frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with Dialer(end, back) as dialer:

            def pass_on() -> None:
                with contextlib.suppress(grpc.RpcError):
                    for frame in frames:
                        dialer.put(frame)

            threading.Thread(target=pass_on, daemon=True).start()
            with contextlib.suppress(grpc.RpcError):
                yield from dialer.call

    server = grpc.server(ThreadPoolExecutor(4))
    handler = grpc.stream_stream_rpc_method_handler(answer)
    service = grpc.method_handlers_generic_handler("dpjax.sites", {"session": handler})
    server.add_generic_rpc_handlers((service,))
    credentials = grpc.ssl_server_credentials(
        [(front.private_key_pem, front.certificate_chain)], front.authority, True
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    return server, f"127.0.0.1:{port}"


@pytest.mark.parametrize("is_checked", [True, False])
def test_somebody_between_is_noticed(
    project: Project,
    opened: Callable[..., GrpcChannel],
    monkeypatch: pytest.MonkeyPatch,
    is_checked: bool,
) -> None:
    """It has certificates of both names by the same authority, and relays the hello."""
    if not is_checked:  # A listener that takes any certificate: the dialer still notices.
        monkeypatch.setattr(carrier, "check_certificate", lambda *_: "paris")
    lyon = opened("lyon", {"paris": None})
    rogues = [certified(project, name, new_key=True) for name in ("lyon", "paris")]
    server, between = relay(lyon, *rogues)
    paris = opened("paris", {"lyon": between})
    words = "key" if is_checked else "certificate of the end that dials"
    assert words in event(paris, "refused").reason
    assert words in event(lyon, "refused").reason
    assert nothing(lyon, "opened") and nothing(paris, "opened", 0.1)
    server.stop(None).wait()


# One session a name.


def test_second_session_is_refused_while_one_is_alive(
    project: Project, opened: Callable[..., GrpcChannel]
) -> None:
    lyon, paris = pair(opened)
    with Dialer(lyon, project.identities["paris"]) as second:
        with pytest.raises(Refused, match="has a session"):
            second.hello(project.roster)
    assert "has a session" in event(lyon, "refused").reason
    sent(paris, "lyon", b"still here")
    assert event(lyon, "message").data == b"still here"


def test_silent_session_is_replaced(project: Project, opened: Callable[..., GrpcChannel]) -> None:
    lyon = opened("lyon", {"paris": None})
    with Dialer(lyon, project.identities["paris"]) as silent:
        silent.hello(project.roster)
        event(lyon, "opened")
        paris = opened("paris", {"lyon": address(lyon)})
        event(paris, "refused", "has a session")
        assert "nothing was heard" in event(lyon, "closed").reason
        event(lyon, "opened")
        event(paris, "opened")


def test_quiet_sessions_stay(opened: Callable[..., GrpcChannel]) -> None:
    lyon, paris = pair(opened)
    assert nothing(lyon, "closed", 1.5 * LIMITS.keepalive) and nothing(paris, "closed", 0.1)
    assert lyon.statistics()["paris"].silence < LIMITS.keepalive


class Link:
    """A slow network between a dialer and a listener, which can be cut without a word."""

    def __init__(self, end: GrpcChannel, rate: float) -> None:
        self._target = ("127.0.0.1", end.port or 0)
        self._rate = rate
        self.is_up = threading.Event()
        self.is_up.set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._sockets = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for pipe in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=pipe, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(8192):
                time.sleep(len(data) / self._rate)
                self.is_up.wait()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: object) -> None:
        self.is_up.set()
        self._server.shutdown(socket.SHUT_RDWR)
        for end in self._sockets:
            end.close()


@pytest.mark.slow
def test_slow_link_and_partition(opened: Callable[..., GrpcChannel]) -> None:
    lyon = opened("lyon", {"paris": None})
    with Link(lyon, 1e6) as link:
        paris = opened("paris", {"lyon": link.address})
        event(lyon, "opened")
        event(paris, "opened")
        # It takes longer than the keepalive, and no frame arrives before its last byte.
        start = time.monotonic()
        sent(paris, "lyon", bytes(LIMITS.message_bytes))
        assert len(event(lyon, "message").data) == LIMITS.message_bytes
        assert time.monotonic() - start > 1.2 * LIMITS.keepalive
        link.is_up.clear()
        for end in (lyon, paris):
            event(end, "closed", "nothing was heard", 3 * LIMITS.keepalive)
        assert not lyon.send("paris", b"x")
        link.is_up.set()
        for end in (lyon, paris):
            event(end, "opened")
    # A connection that breaks is no refusal.
    event(paris, "closed")
    assert nothing(paris, "refused")


# Floods, drips and those that stay silent.


def test_oversized_messages_end_the_session(
    project: Project, opened: Callable[..., GrpcChannel]
) -> None:
    lyon = opened("lyon", {"paris": None})
    with Dialer(lyon, project.identities["paris"]) as dialer:
        dialer.hello(project.roster)
        event(lyon, "opened")
        for _ in range(1 + LIMITS.message_bytes // 200_000):
            dialer.put(b"p" + bytes(200_000))
        assert "paris sent a message of more than 2,000,000 bytes" in refusal(dialer)
        event(lyon, "refused", "paris sent a message of more than")
        event(lyon, "closed")
    with Dialer(lyon, project.identities["paris"]) as dialer:
        dialer.hello(project.roster)
        event(lyon, "opened")
        dialer.put(b"m" + bytes(2**18 + 1))
        event(lyon, "closed")
        with pytest.raises(grpc.RpcError, match="larger than max"):
            dialer.take()
    assert nothing(lyon, "message", 0.1)


def test_frames_of_no_kind_end_the_session(
    project: Project, opened: Callable[..., GrpcChannel]
) -> None:
    lyon = opened("lyon", {"paris": None})
    for frame in (b"x", b"h", b"\0" * 100):
        with Dialer(lyon, project.identities["paris"]) as dialer:
            dialer.hello(project.roster)
            event(lyon, "opened")
            dialer.put(frame)
            assert "belongs" in refusal(dialer)
        event(lyon, "closed")


def test_hello_that_does_not_end(project: Project, opened: Callable[..., GrpcChannel]) -> None:
    lyon = opened("lyon", {"paris": None})
    with Dialer(lyon, project.identities["paris"]) as dialer:
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.1):
                dialer.put(b"")

        thread = threading.Thread(target=drip)
        thread.start()
        assert "took more than 0.7 seconds" in refusal(dialer)
        stop.set()
        thread.join()
    event(lyon, "refused", "took more than")


def tls_socket(project: Project, end: GrpcChannel, folder: Path) -> ssl.SSLSocket:
    """A connection with the certificate of Paris, on which nobody speaks HTTP/2."""
    who = project.identities["paris"]
    context = ssl.create_default_context(cadata=who.authority.decode())
    context.set_alpn_protocols(["h2"])
    (folder / "chain").write_bytes(who.certificate_chain)
    (folder / "key").write_bytes(who.private_key_pem)
    context.load_cert_chain(folder / "chain", folder / "key")
    plain = socket.create_connection(("127.0.0.1", end.port or 0))
    return context.wrap_socket(plain, server_hostname="lyon")


def test_bytes_that_drip_end(
    project: Project, opened: Callable[..., GrpcChannel], tmp_path: Path
) -> None:
    lyon = opened("lyon", {"paris": None})
    bare = socket.create_connection(("127.0.0.1", lyon.port or 0))
    secure = tls_socket(project, lyon, tmp_path)
    for stream, data in ((bare, b"\x16\x03\x01\x02\x00\x01"), (secure, b"PRI * HTTP/2.0\r\n\r\n")):
        stream.settimeout(0.3)
        start = time.monotonic()
        is_ended = False
        position = 0
        while not is_ended and time.monotonic() < start + 6:
            with contextlib.suppress(TimeoutError):
                try:
                    stream.sendall(data[position % len(data) :][:1])
                    position += 1
                    while stream.recv(1000):
                        pass
                    is_ended = True
                except TimeoutError:
                    pass
                except OSError:
                    is_ended = True
        assert is_ended, "still open"
        stream.close()


@pytest.mark.slow
def test_half_open_listener_ends(opened: Callable[..., GrpcChannel]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        paris = opened("paris", {"lyon": f"127.0.0.1:{port}"})
        assert "took more than" in event(paris, "refused").reason
        start = time.monotonic()
        paris.close()
        assert time.monotonic() - start < 2


def test_idle_connections(project: Project, opened: Callable[..., GrpcChannel]) -> None:
    lyon = opened("lyon", {"paris": None})
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(socket.create_connection(("127.0.0.1", lyon.port or 0)))
        paris = opened("paris", {"lyon": address(lyon)})
        event(paris, "opened")
        for number in range(50):
            sent(paris, "lyon", bytes([number]))
            assert event(lyon, "message").data == bytes([number])


def test_flood_is_slowed(project: Project, opened: Callable[..., GrpcChannel]) -> None:
    lyon = opened("lyon", {"paris": None, "rome": None})
    message = b"m" + bytes(2**18)
    with Dialer(lyon, project.identities["paris"]) as flood:
        flood.hello(project.roster)
        event(lyon, "opened")
        before, _ = _validate.resident()
        count = 0
        full = time.monotonic() + 0.5
        while time.monotonic() < full:
            if not flood.frames:
                flood.put(message)
                count += 1
            time.sleep(0.001)
        after, _ = _validate.resident()
        assert count < 100, "the flood was not slowed"
        assert after - before < 120e6
        rome = opened("rome", {"lyon": address(lyon)})
        event(rome, "opened")
        sent(rome, "lyon", b"here")
        time.sleep(0.1)
        # Messages of Paris wait; that of Rome has its turn all the same, and none is lost.
        arrivals = [lyon.receive(1) for _ in range(4)]
        assert "rome" in {incoming.peer for incoming in arrivals if incoming is not None}
        assert nothing(lyon, "closed", 0.3)


def test_many_streams_of_one_name(project: Project, opened: Callable[..., GrpcChannel]) -> None:
    lyon = opened("lyon", {"paris": None, "rome": None})
    with contextlib.ExitStack() as stack:
        dialers = [Dialer(lyon, project.identities["paris"]) for _ in range(50)]
        for dialer in dialers:
            stack.enter_context(dialer)
            dialer.put(b"")
        rome = opened("rome", {"lyon": address(lyon)})
        assert event(rome, "opened", seconds=1.4).peer == "lyon"
        assert "3 streams of paris are open" in event(lyon, "refused").reason
        assert sum(session.peer.name == "paris" for session in lyon._sessions) <= 3


def test_certificate_is_renewed_without_a_restart(
    project: Project, opened: Callable[..., GrpcChannel]
) -> None:
    stored = {"lyon": project.identities["lyon"], "paris": project.identities["paris"]}
    lyon = opened("lyon", {"paris": None}, reload=lambda: stored["lyon"])
    paris = opened("paris", {"lyon": address(lyon)}, reload=lambda: stored["paris"])
    for end in (lyon, paris):
        event(end, "opened")

    def shown() -> bytes:
        pem = ssl.get_server_certificate(("127.0.0.1", lyon.port or 0))
        return channel.fingerprint(pem.encode())

    assert shown() == channel.fingerprint(stored["lyon"].certificate_chain)
    for name in stored:
        stored[name] = certified(project, name, last=5)
    assert shown() == channel.fingerprint(stored["lyon"].certificate_chain)
    paris._peers["lyon"].session.cancel()  # type: ignore[union-attr]
    for end in (lyon, paris):
        event(end, "opened")
    sent(paris, "lyon", b"renewed")
    assert event(lyon, "message").data == b"renewed"
    # A key that the old one signed is accepted, once the roster has it.
    renewed = certified(project, "paris", new_key=True)
    roster = project.roster.renewed(renewal(stored["paris"], renewed.public_key))
    for end in (lyon, paris):
        end.renew(roster)
    stored["paris"] = renewed
    paris._peers["lyon"].session.cancel()  # type: ignore[union-attr]
    for end in (lyon, paris):
        event(end, "opened")
    with pytest.raises(ValueError, match="the one before"):
        lyon.renew(Roster({**project.roster, "paris": renewed.public_key}))
    # A certificate of another key is not used.
    good = shown()
    stored["lyon"] = certified(project, "lyon", new_key=True)
    assert shown() == good
    assert "own certificate" in event(lyon, "refused").reason


def test_close_with_stuck_ends(project: Project, opened: Callable[..., GrpcChannel]) -> None:
    lyon = opened("lyon", {"paris": None, "rome": None})
    with (
        Dialer(lyon, project.identities["paris"]) as stuck,
        Dialer(lyon, project.identities["rome"]),
    ):
        stuck.hello(project.roster)
        event(lyon, "opened")
        # It reads nothing, so that nothing more goes out.
        while lyon.send("paris", bytes(LIMITS.message_bytes)) or lyon.receive(0.1):
            pass
        stuck.put(b"m" + bytes(1000))
        start = time.monotonic()
        lyon.close()
        assert time.monotonic() - start < 2
    assert not threads()


# Failing closed.


def test_nothing_without_certificates(project: Project) -> None:
    for field in ("certificate_chain", "authority"):
        bare = replace(project.identities["lyon"], **{field: b""})
        with pytest.raises(ValueError, match="no certificates"):
            GrpcChannel(bare, project.roster, {"paris": None}, LOOPBACK, LIMITS)


@pytest.mark.parametrize(
    "where", ["0.0.0.0:0", "[::]:0", "example.org:7000", "10.0.0.1:7000", "unix:/tmp/x:1"]
)
def test_insecure_means_loopback(project: Project, where: str) -> None:
    lyon, paris = project.identities["lyon"], project.identities["paris"]
    with pytest.raises(ValueError, match="without TLS"):
        GrpcChannel(lyon, project.roster, {"paris": None}, where, LIMITS, insecure_loopback=True)
    with pytest.raises(ValueError, match="without TLS"):
        GrpcChannel(paris, project.roster, {"lyon": where}, None, LIMITS, insecure_loopback=True)


def test_insecure_loopback_still_proves_names(
    project: Project, opened: Callable[..., GrpcChannel]
) -> None:
    lyon, paris = pair(opened, insecure_loopback=True)
    assert lyon.insecure and paris.insecure
    sent(paris, "lyon", b"x")
    assert event(lyon, "message").data == b"x"
    thief = certified(project, "rome", new_key=True)
    roster = Roster({**project.roster, "rome": thief.public_key})
    paris.close()
    rome = opened("rome", {"lyon": address(lyon)}, who=thief, roster=roster, insecure_loopback=True)
    event(rome, "refused")
    assert nothing(rome, "opened")


def test_insecure_and_secure_do_not_meet(opened: Callable[..., GrpcChannel]) -> None:
    lyon = opened("lyon", {"paris": None})
    assert not lyon.insecure
    paris = opened("paris", {"lyon": address(lyon)}, insecure_loopback=True)
    assert nothing(paris, "opened") and nothing(lyon, "opened", 0.1)


def test_bad_arguments(project: Project, opened: Callable[..., GrpcChannel]) -> None:
    lyon, paris = project.identities["lyon"], project.identities["paris"]
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((lyon, project.roster, {"oslo": None}, LOOPBACK, LIMITS), "peers is 'oslo'"),
        ((lyon, project.roster, {"lyon": None}, LOOPBACK, LIMITS), "peers is 'lyon'"),
        (
            (project.identities["oslo"], project.roster, {"paris": None}, LOOPBACK, LIMITS),
            "identity is of oslo",
        ),
        ((lyon, project.roster, {"paris": None}, None, LIMITS), "listen is missing.*as paris dial"),
        ((lyon, project.roster, {"paris": None}, "7000", LIMITS), "give host:port"),
        (
            (lyon, project.roster, {"paris": None}, "127.0.0.1:70000", LIMITS),
            "listen is '127.0.0.1:70000'; give host:port, a port of 0 to 65535",
        ),
        (
            (paris, project.roster, {"lyon": None}, LOOPBACK, LIMITS),
            r"address of lyon is missing.*a line under \[neighbours\]",
        ),
        (
            (certified(project, "lyon", new_key=True), project.roster, {"paris": None}, "", LIMITS),
            "a key that the roster does not have",
        ),
    ]
    for arguments, words in cases:
        with pytest.raises(ValueError, match=words):
            GrpcChannel(*arguments)
    occupant = opened("lyon", {"paris": None})
    with pytest.raises(ValueError, match="listen is '127.0.0.1:.*cannot listen"):
        opened("lyon", {"paris": None}, listen=address(occupant))


def test_only_dialers_do_not_listen(opened: Callable[..., GrpcChannel]) -> None:
    rome = opened("rome", {"lyon": "127.0.0.1:1"})
    assert rome.port is None and rome._server is None


def test_who_cannot_be_reached_is_named_first(
    project: Project, opened: Callable[..., GrpcChannel], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "dpjax.sites"):
        lyon = opened("lyon", {"paris": None})
        rome = opened("rome", {"paris": address(lyon)})
        assert event(rome, "refused").reason.startswith("another site answers at this address (")
    lines = [record.getMessage() for record in caplog.records]
    assert f"lyon listens at 127.0.0.1:0, port {lyon.port}" in lines
    assert any(line.startswith("paris: another site answers at this address (") for line in lines)
