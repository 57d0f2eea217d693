"""Sums over channels: whatever ends send or leave out, they are right or there is none."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from benchmarks._local_sites import LocalChannel, Network
from dpjax import _validate
from dpjax.secagg import primitives
from dpjax.secagg.client import Client, reply
from dpjax.secagg.messages import (
    Closed,
    Confirmed,
    Delivery,
    Hello,
    ProtocolMessage,
    Request,
    decoded,
    encoded,
)
from dpjax.secagg.server import Total
from dpjax.secagg.terms import Abort, Limits, Terms
from dpjax.sites import sums
from dpjax.sites.carrier import GrpcChannel
from dpjax.sites.channel import ChannelLimits, Event
from dpjax.sites.identity import Identity, Roster
from tests.secagg.rounds import terms_for, vectors
from tests.sites.proxy import Proxy

QUICK = Limits(enrol=3.0, stage=3.0, send=2.0)
SLOW = Limits(enrol=30.0, stage=30.0, send=10.0)
LOOPBACK = "127.0.0.1:0"


@pytest.fixture(scope="module")
def identities() -> list[Identity]:
    """A server and eight clients."""
    return sums._identities(9)


def test_no_jax_on_path_of_messages() -> None:
    code = "import dpjax.sites.sums, sys; assert not {'jax', 'scipy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@dataclass
class Stage:
    """A server's channel and clients of it, all in threads, which are closed together.

    Attributes:
        identities: The server's, then those of clients.
        terms: Of all that say no others.
        limits: Of all.
    """

    identities: list[Identity]
    terms: Terms
    limits: Limits = QUICK
    listen: str = LOOPBACK
    insecure: bool = False
    channels: list[GrpcChannel] = field(default_factory=list)
    proxies: list[Proxy] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.over = threading.Event()
        self.roster = Roster({party.name: party.public_key for party in self.identities})
        self.pool = ThreadPoolExecutor(3 * len(self.identities))
        server = self.identities[0]
        self.bounds = sums.channel_limits(self.terms)
        callers = dict.fromkeys(list(self.roster)[1:])
        self.listener = GrpcChannel(server, self.roster, callers, self.listen, self.bounds)
        self.collector = sums.Collector(self.terms, self.listener, self.limits)

    def __enter__(self) -> "Stage":
        self.collector.__enter__()
        self.address = f"127.0.0.1:{self.listener.port}"
        return self

    def __exit__(self, *exception: object) -> None:
        self.collector.__exit__(None)
        self.over.set()
        self.pool.shutdown()
        for channel in self.channels:
            channel.close()
        for proxy in self.proxies:
            proxy.close()

    def channel(self, row: int, address: str = "", limits: ChannelLimits | None = None) -> Any:
        """A client's channel, which is not open."""
        peers = {"server": address or self.address}
        identity = self.identities[row + 1]
        return GrpcChannel(identity, self.roster, peers, None, limits or self.bounds)

    def join(self, row: int, values: np.ndarray, terms: Terms | None = None) -> "Future[Total]":
        """A client that does as it should."""
        channel = self.channel(row)
        arguments = (terms or self.terms, values, channel, "server", self.limits)
        return self.pool.submit(sums.join, *arguments)

    def hostile(self, row: int, values: np.ndarray, fault: "Fault") -> "Future[None]":
        """A client that breaks rules."""
        return self.pool.submit(self._break, row, values, fault)

    def _break(self, row: int, values: np.ndarray, fault: "Fault") -> None:
        wire = Wire(self, row, Client(self.terms, values))
        with contextlib.suppress(EOFError):
            fault(wire)
        self.over.wait()

    def opened(self, sessions: int) -> None:
        """Wait until so many sessions have been opened."""
        deadline = time.monotonic() + 20
        while sum(part.sessions for part in self.listener.statistics().values()) < sessions:
            assert time.monotonic() < deadline, "no sessions"
            time.sleep(0.01)

    def aggregate(self) -> Total | Abort:
        """The server's end of one aggregation."""
        try:
            return self.collector.aggregate()
        except Abort as abort:
            return abort


class Wire:
    """A client's end of a session, to break rules with."""

    def __init__(self, stage: Stage, row: int, client: Client) -> None:
        self.client = client
        self.limits = stage.limits
        self.over = stage.over
        self.proxy = Proxy(stage.address)
        stage.proxies.append(self.proxy)
        # It sends more than the server takes.
        bounds = ChannelLimits(10**7)
        self.channel = stage.channel(row, self.proxy.address, bounds)
        stage.channels.append(self.channel)
        sums._open(stage.terms, self.channel, "client", "server")
        assert self.event("opened")

    def event(self, kind: str) -> Event:
        while not self.over.is_set():
            event = self.channel.receive(0.05)
            if event is not None and event.kind == kind:
                return event
            if event is not None and event.kind == "closed":
                break
        raise EOFError

    def next(self) -> ProtocolMessage:
        return decoded(self.event("message").data)

    def say(self, message: ProtocolMessage) -> None:
        self.raw(encoded(message))

    def raw(self, data: bytes) -> None:
        while not self.channel.send("server", data):
            if self.over.wait(0.005):
                raise EOFError

    def half(self, data: bytes) -> None:
        """A message that breaks off."""
        self.session.put(b"p" + data[: len(data) // 2])

    @property
    def session(self) -> Any:
        return self.channel._peers["server"].session

    def cut(self) -> None:
        """End the connection without a word."""
        time.sleep(0.05)
        self.proxy.cut()
        self.proxy.target = None

    def until(self, kind: type) -> Any:
        """Take part as one should, up to a message of this kind, and return it."""
        self.raw(sums._WAITS)
        return self.onwards(kind)

    def onwards(self, kind: type) -> Any:
        while not isinstance(message := self.next(), kind):
            self.say(reply(self.client, message))
        return message

    def masked(self) -> Any:
        """Its vector, which is not sent."""
        return self.client.mask(self.until(Delivery))


Fault = Callable[[Wire], None]


def hold(
    identities: list[Identity],
    terms: Terms,
    values: np.ndarray,
    faults: dict[int, Fault] | None = None,
    limits: Limits = QUICK,
) -> tuple[Any, list[Any]]:
    """One aggregation: the server's sum or abort, and what each client ends with."""
    faults = faults or {}
    with Stage(identities[: len(values) + 1], terms, limits) as stage:
        ends: list[Future] = [
            stage.hostile(row, vector, faults[row]) if row in faults else stage.join(row, vector)
            for row, vector in enumerate(values)
        ]
        stage.opened(len(values))
        total = stage.aggregate()
    return total, [end.exception(10) or end.result() for end in ends]


# Each is what client 0 does; it counts as a survivor where that is said.


def says_nothing(wire: Wire) -> None:
    return


def leaves_at_once(wire: Wire) -> None:
    wire.channel.close()


def sends_noise(wire: Wire) -> None:
    for data in (bytes(range(256)) * 40, b"\x00", b"junk"):
        wire.raw(data)


def sends_an_oversized_first_word(wire: Wire) -> None:
    wire.raw(bytes(10**6))


def enrols_and_hangs(wire: Wire) -> None:
    wire.raw(sums._WAITS)
    wire.say(wire.client.greet(wire.next()))


def drips_its_keys(wire: Wire) -> None:
    wire.raw(sums._WAITS)
    message = wire.next()
    wire.proxy.rate = 5
    wire.say(wire.client.greet(message))


def sends_a_truncated_vector(wire: Wire) -> None:
    wire.raw(encoded(wire.masked())[:-5])


def vanishes_in_its_vector(wire: Wire) -> None:
    wire.half(encoded(wire.masked()))
    wire.cut()


def hangs_in_its_vector(wire: Wire) -> None:
    wire.half(encoded(wire.masked()))


def drips_its_vector(wire: Wire) -> None:
    message = wire.masked()
    wire.proxy.rate = 5
    wire.say(message)


def sends_an_oversized_vector(wire: Wire) -> None:
    message = wire.masked()
    wire.say(message._replace(vector=message.vector * 9000))


def sends_a_damaged_vector(wire: Wire) -> None:
    message = wire.masked()
    wire.proxy.damages = True
    wire.say(message)


def sends_a_vector_of_another_length(wire: Wire) -> None:
    message = wire.masked()
    wire.say(message._replace(vector=message.vector + bytes(4)))


def sends_a_vector_of_another_aggregation(wire: Wire) -> None:
    wire.say(wire.masked()._replace(nonce=bytes(16)))


def sends_its_vector_late(wire: Wire) -> None:
    message = wire.masked()
    wire.over.wait(wire.limits.stage + 0.3)
    wire.say(message)


def sends_its_vector_over_another_session(wire: Wire) -> None:
    message = wire.masked()
    wire.session.cancel()
    with contextlib.suppress(EOFError):
        wire.event("closed")
    wire.event("opened")
    wire.raw(sums._WAITS)
    wire.say(message)


def sends_its_vector_twice(wire: Wire) -> None:
    message = wire.masked()
    wire.say(message)
    wire.say(message)
    wire.say(wire.client.unmask(wire.onwards(Request)))


def sends_its_shares_again(wire: Wire) -> None:
    wire.raw(sums._WAITS)
    wire.say(wire.client.greet(wire.next()))
    shares = wire.client.share(wire.next())
    wire.say(shares)
    message = wire.client.mask(wire.onwards(Delivery))
    for _ in range(3):
        wire.say(shares)
    wire.say(message)
    wire.say(wire.client.unmask(wire.onwards(Request)))


def floods(wire: Wire) -> None:
    message = wire.masked()
    for _ in range(30):
        wire.say(message._replace(nonce=bytes(16)))
    wire.say(message)


def vanishes_before_it_answers(wire: Wire) -> None:
    wire.until(Request)
    wire.cut()


def answers_for_others(wire: Wire) -> None:
    answer = wire.client.unmask(wire.until(Request))
    wire.say(answer._replace(keys=answer.keys | answer.seeds))


def sends_the_servers_messages(wire: Wire) -> None:
    wire.until(Delivery)
    wire.say(Closed(wire.client.nonce, "", frozenset({0}), b""))


SURVIVES = {sends_its_vector_twice, sends_its_shares_again, vanishes_before_it_answers,
            answers_for_others}  # fmt: skip
FAULTS: list[Fault] = [
    says_nothing, leaves_at_once, sends_noise, sends_an_oversized_first_word, enrols_and_hangs,
    drips_its_keys, sends_a_truncated_vector, vanishes_in_its_vector, hangs_in_its_vector,
    drips_its_vector, sends_an_oversized_vector, sends_a_damaged_vector,
    sends_a_vector_of_another_length, sends_a_vector_of_another_aggregation,
    sends_its_vector_late, sends_its_vector_over_another_session, sends_its_vector_twice,
    sends_its_shares_again, floods, vanishes_before_it_answers, answers_for_others,
    sends_the_servers_messages,
]  # fmt: skip


def all_at_once(
    identities: list[Identity], terms: Terms, values: np.ndarray, faults: list[Fault]
) -> dict[Fault, Any]:
    """What aggregations end in, one a fault; most wait for a time limit."""
    started = time.monotonic()
    with ThreadPoolExecutor(len(faults)) as pool:
        jobs = {fault: pool.submit(hold, identities, terms, values, {0: fault}) for fault in faults}
        ends = {fault: job.result() for fault, job in jobs.items()}
    assert time.monotonic() - started < QUICK.total
    return ends


@pytest.fixture(scope="module")
def broken(identities: list[Identity]) -> tuple[np.ndarray, dict[Fault, Any]]:
    """What aggregations end in, one a fault, all at once."""
    terms = terms_for(4, dropout=0.25, length=64)
    values = vectors(terms)
    return values, all_at_once(identities, terms, values, FAULTS)


@pytest.mark.mutant
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_one_client_that_breaks_rules_is_at_most_left_out(broken: Any, fault: Fault) -> None:
    values = broken[0]
    total, clients = broken[1][fault]
    rows = range(4) if fault in SURVIVES else range(1, 4)
    expected = values[list(rows)].sum(axis=0)
    np.testing.assert_array_equal(total.values, expected)
    assert len(total.survivors) == len(rows)
    for end in clients[1:]:
        np.testing.assert_array_equal(end.values, expected)
        assert end.survivors == total.survivors


# Under ``semi_malicious``; a client that breaks the rules of confirming has its vector in the sum.


def vanishes_before_it_confirms(wire: Wire) -> None:
    wire.until(Request)
    wire.cut()


def confirms_late(wire: Wire) -> None:
    message = wire.client.confirm(wire.until(Request))
    wire.over.wait(wire.limits.stage + 0.3)
    wire.say(message)


def confirms_twice(wire: Wire) -> None:
    message = wire.client.confirm(wire.until(Request))
    wire.say(message)
    wire.say(message)
    wire.say(wire.client.unmask(wire.onwards(Confirmed)))


def confirms_to_half(wire: Wire) -> None:
    message = wire.client.confirm(wire.until(Request))
    wire.say(message._replace(confirmations=dict(list(message.confirmations.items())[::2])))


def confirms_what_does_not_open(wire: Wire) -> None:
    message = wire.client.confirm(wire.until(Request))
    wire.say(message._replace(confirmations=dict.fromkeys(message.confirmations, b"c" * 48)))
    wire.say(wire.client.unmask(wire.onwards(Confirmed)))


def vanishes_before_it_unmasks(wire: Wire) -> None:
    wire.until(Confirmed)
    wire.cut()


CONFIRMING: list[Fault] = [
    vanishes_before_it_confirms, confirms_late, confirms_twice, confirms_to_half,
    confirms_what_does_not_open, vanishes_before_it_unmasks, sends_its_vector_late,
]  # fmt: skip


@pytest.mark.slow
def test_who_breaks_rules_of_confirming_is_made_up_for(identities: list[Identity]) -> None:
    terms = terms_for(8, dropout=0.25, length=64, adversary="semi_malicious")
    values = vectors(terms)
    for fault, (total, clients) in all_at_once(identities, terms, values, CONFIRMING).items():
        expected = values[int(fault is sends_its_vector_late) :].sum(axis=0)
        for end in (total, *clients[1:]):
            np.testing.assert_array_equal(end.values, expected, err_msg=fault.__name__)


def keeps_its_answer(wire: Wire) -> None:
    wire.until(Request)
    wire.event("message")
    wire.raw(sums._HEARD)


@pytest.mark.parametrize(
    "fault", [keeps_its_answer, sends_a_truncated_vector, vanishes_in_its_vector]
)
def test_sum_does_not_wait_for_what_it_can_do_without(
    identities: list[Identity], fault: Fault
) -> None:
    terms = terms_for(8, dropout=0.25, length=64)
    values = vectors(terms)
    started = time.monotonic()
    total, clients = hold(identities, terms, values, {0: fault}, SLOW)
    assert time.monotonic() - started < SLOW.stage / 2
    expected = values[int(fault is not keeps_its_answer) :].sum(axis=0)
    for end in (total, *clients[1:]):
        np.testing.assert_array_equal(end.values, expected)


@pytest.mark.slow
def test_too_many_that_vanish_are_abort_for_everybody(identities: list[Identity]) -> None:
    terms = terms_for(6, dropout=0.17, length=64)
    faults: dict[int, Fault] = {0: vanishes_in_its_vector, 1: hangs_in_its_vector}
    total, clients = hold(identities, terms, vectors(terms), faults)
    assert isinstance(total, Abort) and "fewer than the minimum 5" in total.reason
    for end in clients[2:]:
        assert isinstance(end, Abort) and "fewer than the minimum 5" in end.reason
        assert end.exposed


def test_too_few_that_come_are_abort_within_time_limit(identities: list[Identity]) -> None:
    terms = terms_for(6)
    total, clients = hold(identities, terms, vectors(terms)[:4], limits=Limits(0.4, 1, 1))
    assert isinstance(total, Abort) and "enrolled is 4" in total.reason
    assert all(isinstance(end, Abort) and not end.exposed for end in clients)


@pytest.mark.mutant
def test_other_terms_are_turned_away_at_both_ends(identities: list[Identity]) -> None:
    terms = terms_for(4, dropout=0.25)
    other = terms_for(4, dropout=0.25, bound=999)
    values = vectors(terms)
    with Stage(identities[:5], terms, Limits(0.7, 3, 2)) as stage:
        stray = stage.join(3, vectors(other)[0], other)
        joined = [stage.join(row, values[row]) for row in range(3)]
        total = stage.aggregate()
        assert isinstance(total, Total)
        np.testing.assert_array_equal(total.values, values[:3].sum(axis=0))
        abort = stray.exception(5)
        assert isinstance(abort, Abort) and not abort.exposed
        for digest in (terms.digest(), other.digest()):
            assert digest.hex()[:16] in abort.reason
        assert all(job.result() for job in joined)
        # Neither end alone relies on the other's check: both names of terms are refused there.
        reasons: dict[str, Any] = {}
        for part, end in (("server", "client"), ("client", "server")):
            channel = LocalChannel(Network(), part, {end})
            sums._open(terms, channel, part, end)
            greetings = [channel.greeting(end), channel.greeting(end).replace(b"server", b"client")]
            reasons[part] = [channel.check(end, data) for data in (*greetings, b"")]
        assert "client" in reasons["server"][0] and reasons["server"][1] is None
        assert all(reasons["client"])


def test_no_vector_crosses_unmasked(
    identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = terms_for(4, length=256)
    values = vectors(terms)
    crossed = []
    true_send = GrpcChannel.send

    def recorded(channel: GrpcChannel, peer: str, data: bytes) -> bool:
        crossed.append(data)
        return true_send(channel, peer, data)

    monkeypatch.setattr(GrpcChannel, "send", recorded)
    total, _ = hold(identities, terms, values)
    np.testing.assert_array_equal(total.values, values.sum(axis=0))
    everything = b"".join(crossed)
    for row in values:
        plain = primitives.packed_vector(row.astype(np.uint64) & primitives.low_bits(32), 32)
        for index in range(0, len(plain) - 16, 16):
            assert plain[index : index + 16] not in everything
    # The search finds what is there: the sum crosses in plain.
    sum_bytes = primitives.packed_vector(
        total.values.astype(np.uint64) & primitives.low_bits(32), 32
    )
    assert sum_bytes[:16] in everything


def test_who_comes_while_aggregation_runs_is_in_next_one(identities: list[Identity]) -> None:
    terms = terms_for(4, dropout=0.25)
    values = vectors(terms)
    following: list[Future] = []

    with Stage(identities, terms, QUICK) as stage:

        def slowly(wire: Wire) -> None:
            message = wire.masked()
            following.extend(stage.join(row, values[row - 4]) for row in range(4, 8))
            stage.opened(8)
            wire.say(message)
            wire.say(reply(wire.client, wire.next()))
            wire.event("message")
            wire.raw(sums._HEARD)

        ends = [stage.join(row, values[row] // 2) for row in range(1, 4)]
        stage.hostile(0, values[0] // 2, slowly)
        first = stage.aggregate()
        # Whoever still waits is in, and nobody of those before.
        second = stage.aggregate()
        assert isinstance(first, Total) and isinstance(second, Total)
        np.testing.assert_array_equal(first.values, (values // 2).sum(axis=0))
        np.testing.assert_array_equal(second.values, values.sum(axis=0))
        assert all((end.result().values == first.values).all() for end in ends)
        assert all((end.result().values == second.values).all() for end in following)


@pytest.mark.gate(1)
@pytest.mark.parametrize("when", ["before", "during"])
def test_idle_connections_do_not_keep_clients_out(identities: list[Identity], when: str) -> None:
    """Five hundred, where six clients enrol: before clients come, and half-way."""
    terms = terms_for(6)
    values = vectors(terms)
    started = time.monotonic()
    with contextlib.ExitStack() as stack, Stage(identities[:7], terms, SLOW) as stage:

        def crowd() -> None:
            for _ in range(500):
                stack.enter_context(
                    socket.create_connection(("127.0.0.1", stage.listener.port or 0))
                )

        if when == "before":
            crowd()
        ends = [stage.join(row, values[row]) for row in range(3)]
        stage.opened(3)
        if when == "during":
            crowd()
        ends += [stage.join(row, values[row]) for row in range(3, 6)]
        for end in (stage.aggregate(), *(end.result() for end in ends)):
            assert isinstance(end, Total)
            np.testing.assert_array_equal(end.values, values.sum(axis=0))
    assert time.monotonic() - started < SLOW.send


def test_silent_sessions_do_not_keep_clients_out(identities: list[Identity]) -> None:
    terms = terms_for(4)
    values = vectors(terms)
    started = time.monotonic()
    with Stage(identities, terms, SLOW) as stage:
        for row in range(4, 8):
            stage.hostile(row, values[0], says_nothing)
        stage.opened(4)
        ends = [stage.join(row, values[row]) for row in range(4)]
        total = stage.aggregate()
        assert isinstance(total, Total)
        np.testing.assert_array_equal(total.values, values.sum(axis=0))
        assert all(end.result() for end in ends)
    assert time.monotonic() - started < SLOW.send


class Forgetful(sums.Collector):
    """A broken twin: who comes back is a client that it has not seen."""

    def _take(self, server: Any, event: Event) -> None:
        super()._take(server, event)
        if event.kind == "closed":
            self._numbers.pop(event.peer, None)


@pytest.mark.mutant
@pytest.mark.parametrize(("kind", "enrolled"), [(sums.Collector, 1), (Forgetful, 2)])
def test_name_enrols_once(kind: type[sums.Collector], enrolled: int) -> None:
    terms = terms_for(3)
    network = Network()
    channel = LocalChannel(network, "server", {"a"})
    reasons: list[str] = []
    with kind(terms, channel, Limits(0.5, 0.1, 0.1)) as collector, ThreadPoolExecutor() as pool:

        def comes_and_goes() -> None:
            for _ in range(2):
                client = Client(terms, vectors(terms)[0])
                end = LocalChannel(network, "a", {"server"})
                with contextlib.suppress(Abort), sums.member(terms, end, "server"):
                    sums.take_part(client, end, "server", Limits(0.2, 0.1, 0.1), answers=1)

        job = pool.submit(comes_and_goes)
        try:
            collector.aggregate()
        except Abort as abort:
            reasons.append(abort.reason)
        job.exception()
    assert reasons[0].startswith(f"enrolled is {enrolled};")


@pytest.mark.slow
def test_address_where_nobody_listens_is_no_session(identities: list[Identity]) -> None:
    terms = terms_for(3)
    with Stage(identities[:4], terms, QUICK) as stage:
        channel = stage.channel(0, "127.0.0.1:9")
        with pytest.raises(Abort, match="no session with server within 0.5 seconds") as caught:
            sums.join(terms, vectors(terms)[0], channel, "server", Limits(0.5, 1, 1))
        assert not caught.value.exposed


def rounds(stage: Stage, count: int) -> Iterator[tuple[Any, np.ndarray]]:
    """Aggregations over the same sessions, with other vectors each."""
    clients = stage.terms.clients

    def member(row: int) -> None:
        channel = stage.channel(row)
        with sums.member(stage.terms, channel, "server", stage.limits) as add:
            for seed in range(count):
                add(vectors(stage.terms, seed)[row])

    jobs = [stage.pool.submit(member, row) for row in range(clients)]
    for seed in range(count):
        yield stage.aggregate(), vectors(stage.terms, seed).sum(axis=0)
    for job in jobs:
        job.result(20)


def test_sessions_hold_aggregation_after_aggregation(identities: list[Identity]) -> None:
    terms = terms_for(5)
    with Stage(identities[:6], terms, SLOW) as stage:
        for total, expected in rounds(stage, 5):
            np.testing.assert_array_equal(total.values, expected)
        traffic = stage.listener.statistics().values()
        assert all(part.sessions == 1 and part.sent > 0 for part in traffic)


@pytest.mark.slow
def test_five_hundred_rounds_take_no_more_memory(identities: list[Identity]) -> None:
    terms = terms_for(3, length=20_000)
    with Stage(identities[:4], terms, SLOW) as stage:
        for number, (total, expected) in enumerate(rounds(stage, 500)):
            np.testing.assert_array_equal(total.values, expected)
            if number == 100:
                before, _ = _validate.resident()
        after, _ = _validate.resident()
    assert after - before < 20e6


@pytest.mark.parametrize("kind", [Delivery, Request])
def test_killed_server_gives_second_sum(identities: list[Identity], kind: type) -> None:
    """Clients of the first end with an abort; those of the second have nothing in common with."""
    terms = terms_for(4, length=64)
    values = vectors(terms)
    reached = threading.Event()
    wires: list[tuple[Wire, Any]] = []

    def stops(wire: Wire) -> None:
        wires.append((wire, wire.until(kind)))
        # Until the others have answered.
        wire.over.wait(0.3)
        reached.set()

    with Stage(identities[:5], terms, QUICK) as first:
        first.hostile(0, values[0], stops)
        ends = [first.join(row, values[row]) for row in range(1, 4)]
        holding = first.pool.submit(first.aggregate)
        assert reached.wait(10)
        first.listener.close()
        for end in ends:
            abort = end.exception(10)
            assert isinstance(abort, Abort) and "ended the session" in abort.reason
            assert abort.exposed
        assert isinstance(holding.result(10), Abort)
    with Stage(identities[:5], terms, QUICK, f"127.0.0.1:{first.listener.port}") as second:
        ends = [second.join(row, values[row]) for row in range(4)]
        total = second.aggregate()
        assert isinstance(total, Total)
        np.testing.assert_array_equal(total.values, values.sum(axis=0))
        assert all(end.result() for end in ends)
    if kind is Request:
        # The one that had not answered yet answers once, and no story after it.
        wire, message = wires[0]
        reply(wire.client, message)
        with pytest.raises(Abort, match="out of order"):
            reply(wire.client, message)


def asked_by(
    identities: list[Identity], messages: list[bytes], limits: Limits = QUICK
) -> tuple[Abort, list[bytes]]:
    """What a client ends with, and says, whose server sends these messages and nothing else."""
    terms = terms_for(3)
    words: list[bytes] = []
    with Stage(identities[:4], terms, limits) as stage:
        end = stage.join(0, vectors(terms)[0])
        while not end.done():
            event = stage.listener.receive(0.05)
            if event is None or event.kind != "message":
                continue
            words.append(event.data)
            while messages:
                stage.listener.send(event.peer, messages.pop(0))
        abort = end.exception()
    assert isinstance(abort, Abort)
    return abort, words


def test_client_of_server_that_is_silent_gives_up(identities: list[Identity]) -> None:
    abort, words = asked_by(identities, [], Limits(0.5, 0.1, 0.1))
    assert "no sum within 1.5 seconds" in abort.reason and words == [sums._WAITS]


@pytest.mark.gate(2)
@pytest.mark.parametrize("data", [b"\x00", b"junk", b"\x91" * 3000, b"\x95\x00"])
def test_client_of_server_that_sends_noise_gives_up(
    identities: list[Identity], data: bytes
) -> None:
    abort, _ = asked_by(identities, [data])
    assert not abort.exposed and "no message" in abort.reason


def test_client_of_server_that_sends_too_much_gives_up(identities: list[Identity]) -> None:
    bounds = sums.channel_limits(terms_for(3))
    with Stage(identities[:4], terms_for(3), QUICK) as stage:
        # Of this one's own limit.
        stage.listener.limits = ChannelLimits(10**7)
        end = stage.join(0, vectors(terms_for(3))[0])
        while not stage.listener.send("client-1", bytes(bounds.message_bytes + 1)):
            time.sleep(0.01)
        abort = end.exception(10)
    assert isinstance(abort, Abort) and "a message of more than" in abort.reason


def test_server_that_asks_twice_gets_one_answer(identities: list[Identity]) -> None:
    hello = encoded(Hello(b"n" * 16, terms_for(3).digest()))
    abort, words = asked_by(identities, [hello, hello])
    assert "out of order" in abort.reason and not abort.exposed
    assert len(words) == 2 and words[0] == sums._WAITS


@pytest.mark.mutant
def test_client_whose_session_ends_has_ended(identities: list[Identity]) -> None:
    """Whatever the server sends on another session, there is no answer of the same client."""
    terms = terms_for(3)
    with Stage(identities[:4], terms, SLOW) as stage:
        client = Client(terms, vectors(terms)[0])
        channel = stage.channel(0)

        def take_part() -> None:
            with sums.member(terms, channel, "server"):
                sums.take_part(client, channel, "server", SLOW)

        end = stage.pool.submit(take_part)
        while (event := stage.listener.receive(5)) is not None and event.data != sums._WAITS:
            pass
        stage.listener.close()
        assert isinstance(end.exception(10), Abort)
        assert client.over
        with pytest.raises(Abort, match="out of order"):
            reply(client, Hello(b"n" * 16, terms.digest()))


def test_process_makes_keys_once_for_so_many_parties(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = terms_for(3)
    values = vectors(terms)
    first = sums.over_channel(terms, values, limits=QUICK).total
    monkeypatch.setattr(sums, "request", None)
    second = sums.over_channel(terms, values, limits=QUICK).total
    np.testing.assert_array_equal(first.values, second.values)


@pytest.mark.slow
def test_two_hundred_clients_with_dropouts() -> None:
    terms = terms_for(200, length=4096, bound=2**20, corrupt=0.05, dropout=0.05)
    values = vectors(terms)
    leaves = {7 * index: terms.stages[1 + index % 3] for index in range(10)}
    limits = Limits(60.0, 60.0, 30.0)
    total = sums.over_channel(terms, values, leaves, limits=limits).total
    rows = [row for row in range(200) if leaves.get(row) in (None, "unmask")]
    assert total.survivors == tuple(rows)
    np.testing.assert_array_equal(total.values, values[rows].sum(axis=0))


@pytest.mark.slow
def test_any_faults_together_give_sum_or_abort(identities: list[Identity]) -> None:
    """Forty aggregations, up to four of eight clients break the rules in each."""
    terms = terms_for(8, dropout=0.25, length=64)
    values = vectors(terms)
    drawn = np.random.default_rng(0)
    kinds = [fault for fault in FAULTS if fault is not sends_its_vector_late]
    cases = []
    for _ in range(40):
        rows = drawn.choice(8, drawn.integers(1, 5), replace=False)
        cases.append({int(row): kinds[drawn.integers(len(kinds))] for row in rows})
    limits = Limits(6.0, 6.0, 3.0)
    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(lambda case: hold(identities, terms, values, case, limits), cases))
    count = 0
    for case, (total, _) in zip(cases, ends, strict=True):
        if isinstance(total, Abort):
            assert len(case) > 2, case
            continue
        rows = [row for row in range(8) if case.get(row) in (None, *SURVIVES)]
        np.testing.assert_array_equal(total.values, values[rows].sum(axis=0))
        assert len(total.survivors) == len(rows) >= 6
        count += 1
    assert 10 < count < 40
