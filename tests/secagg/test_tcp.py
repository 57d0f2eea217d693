"""Sums over TCP: whatever clients send, leave out or break off, they are right or there is none."""

import asyncio
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra `secure` is not installed")
pytest.importorskip("msgpack", reason="the extra `secure` is not installed")

from dpjax.secagg import primitives, tcp  # noqa: E402
from dpjax.secagg.client import Client  # noqa: E402
from dpjax.secagg.messages import (  # noqa: E402
    Closed,
    Confirmed,
    Delivery,
    Hello,
    Request,
    decoded,
    encoded,
)
from dpjax.secagg.terms import Abort  # noqa: E402
from tests.secagg.rounds import terms_for, vectors  # noqa: E402

QUICK = tcp.Limits(enrol=3.0, stage=3.0, send=2.0)
SLOW = tcp.Limits(enrol=30.0, stage=30.0, send=10.0)


def test_no_jax_on_path_of_messages():
    code = "import dpjax.secagg.tcp, sys; assert not {'jax', 'scipy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


async def hold(terms, values, faults=None, limits=QUICK):
    """One aggregation: the server's sum or abort, and what each client ends with."""
    faults = faults or {}
    async with tcp.Listener(terms, limits=limits) as listener:
        position = "127.0.0.1", listener.port
        combined = [
            faulty(terms, row, *position, faults[i])
            if i in faults
            else tcp.join(terms, row, *position, limits)
            for i, row in enumerate(values)
        ]
        async with asyncio.timeout(2 * limits.total):
            ends = await asyncio.gather(listener.aggregate(), *combined, return_exceptions=True)
        assert not listener._connections
        return ends[0], ends[1:]


class Wire:
    """A client's end of a connection, to break rules with."""

    def __init__(self, client, reader, writer):
        self.client = client
        self.reader = reader
        self.writer = writer

    async def next(self):
        return decoded(await tcp.read_frame(self.reader, 10**7))

    async def say(self, message):
        await tcp.write_frame(self.writer, encoded(message), 5)

    async def raw(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def until(self, kind):
        """Take part as one should, up to a message of this kind, and return it."""
        while not isinstance(message := await self.next(), kind):
            await self.say(tcp.reply(self.client, message))
        return message


async def faulty(terms, values, host, port, fault):
    reader, writer = await asyncio.open_connection(host, port)
    wire = Wire(Client(terms, values), reader, writer)
    try:
        await fault(wire)
        while await reader.read(2**16):
            pass
    except (OSError, EOFError):
        pass
    finally:
        writer.close()


# Each is what client 0 of eight does; it counts as a survivor where that is said.


async def says_nothing(wire):
    return  # `faulty` waits until the server cuts the connection


async def leaves_at_once(wire):
    wire.writer.close()


async def sends_noise(wire):
    await wire.raw(bytes(range(256)) * 40)


async def sends_an_oversized_greeting(wire):
    await wire.next()
    await wire.raw((2**31).to_bytes(4, "big") + bytes(10**5))


async def enrols_and_hangs(wire):
    await wire.say(wire.client.greet(await wire.next()))
    return  # `faulty` waits until the server cuts the connection


async def sends_a_truncated_vector(wire):
    data = encoded(wire.client.mask(await wire.until(Delivery)))
    await wire.raw(tcp.framed(data[:-5]))


async def vanishes_in_its_vector(wire):
    data = encoded(wire.client.mask(await wire.until(Delivery)))
    await wire.raw(tcp.framed(data)[: len(data) // 2])
    wire.writer.transport.abort()


async def hangs_in_its_vector(wire):
    data = encoded(wire.client.mask(await wire.until(Delivery)))
    await wire.raw(tcp.framed(data)[: len(data) // 2])
    return  # `faulty` waits until the server cuts the connection


async def sends_an_oversized_vector(wire):
    message = wire.client.mask(await wire.until(Delivery))
    await wire.raw(tcp.framed(encoded(message._replace(vector=message.vector * 9000))))


async def sends_a_damaged_vector(wire):
    data = bytearray(tcp.framed(encoded(wire.client.mask(await wire.until(Delivery)))))
    data[-9] ^= 1
    await wire.raw(bytes(data))


async def sends_a_vector_of_another_length(wire):
    message = wire.client.mask(await wire.until(Delivery))
    await wire.say(message._replace(vector=message.vector + bytes(4)))


async def sends_a_vector_of_another_aggregation(wire):
    message = wire.client.mask(await wire.until(Delivery))
    await wire.say(message._replace(nonce=bytes(16)))


async def sends_its_vector_late(wire):
    message = wire.client.mask(await wire.until(Delivery))
    await asyncio.sleep(QUICK.stage + 0.3)
    await wire.say(message)


async def sends_its_vector_twice(wire):
    message = wire.client.mask(await wire.until(Delivery))
    await wire.say(message)
    await wire.say(message)
    await wire.say(wire.client.unmask(await wire.until(Request)))


async def sends_its_shares_again(wire):
    hello = await wire.next()
    await wire.say(wire.client.greet(hello))
    shares = wire.client.share(await wire.next())
    await wire.say(shares)
    message = wire.client.mask(await wire.until(Delivery))
    for _ in range(3):
        await wire.say(shares)
    await wire.say(message)
    await wire.say(wire.client.unmask(await wire.until(Request)))


async def vanishes_before_it_answers(wire):
    await wire.until(Request)
    wire.writer.transport.abort()


async def answers_for_others(wire):
    answer = wire.client.unmask(await wire.until(Request))
    await wire.say(answer._replace(keys=answer.keys | answer.seeds))


async def sends_the_servers_messages(wire):
    await wire.until(Delivery)
    await wire.say(Closed(wire.client.nonce, "", frozenset({0}), b""))


SURVIVES = {sends_its_vector_twice, sends_its_shares_again, vanishes_before_it_answers,
            answers_for_others}  # fmt: skip
FAULTS = [
    says_nothing, leaves_at_once, sends_noise, sends_an_oversized_greeting, enrols_and_hangs,
    sends_a_truncated_vector, vanishes_in_its_vector, hangs_in_its_vector,
    sends_an_oversized_vector, sends_a_damaged_vector, sends_a_vector_of_another_length,
    sends_a_vector_of_another_aggregation, sends_its_vector_late, sends_its_vector_twice,
    sends_its_shares_again, vanishes_before_it_answers, answers_for_others,
    sends_the_servers_messages,
]  # fmt: skip


@pytest.fixture(scope="module")
def broken():
    """What aggregations end in, one a fault, all at once: most wait for a time limit."""
    terms = terms_for(8, dropout=0.25, length=64)
    values = vectors(terms)

    async def all_at_once():
        return await asyncio.gather(*(hold(terms, values, {0: fault}) for fault in FAULTS))

    started = time.monotonic()
    ends = asyncio.run(all_at_once())
    assert time.monotonic() - started < QUICK.total
    return values, dict(zip(FAULTS, ends, strict=True))


@pytest.mark.mutant
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_one_client_that_breaks_rules_is_at_most_left_out(broken, fault):
    values, (total, clients) = broken[0], broken[1][fault]
    rows = range(8) if fault in SURVIVES else range(1, 8)
    want = values[list(rows)].sum(axis=0)
    np.testing.assert_array_equal(total.values, want)
    assert len(total.survivors) == len(rows)
    for end in clients[1:]:
        np.testing.assert_array_equal(end.values, want)
        assert end.survivors == total.survivors


# Under ``semi_malicious``; a client that breaks the rules of confirming has its vector in the sum.


async def vanishes_before_it_confirms(wire):
    await wire.until(Request)
    wire.writer.transport.abort()


async def confirms_late(wire):
    message = wire.client.confirm(await wire.until(Request))
    await asyncio.sleep(QUICK.stage + 0.3)
    await wire.say(message)


async def confirms_twice(wire):
    message = wire.client.confirm(await wire.until(Request))
    await wire.say(message)
    await wire.say(message)
    await wire.say(wire.client.unmask(await wire.until(Confirmed)))


async def confirms_to_half(wire):
    message = wire.client.confirm(await wire.until(Request))
    await wire.say(message._replace(confirmations=dict(list(message.confirmations.items())[::2])))


async def confirms_what_does_not_open(wire):
    message = wire.client.confirm(await wire.until(Request))
    await wire.say(message._replace(confirmations=dict.fromkeys(message.confirmations, b"c" * 48)))
    await wire.say(wire.client.unmask(await wire.until(Confirmed)))


async def vanishes_before_it_unmasks(wire):
    await wire.until(Confirmed)
    wire.writer.transport.abort()


CONFIRMING = [
    vanishes_before_it_confirms, confirms_late, confirms_twice, confirms_to_half,
    confirms_what_does_not_open, vanishes_before_it_unmasks, sends_its_vector_late,
]  # fmt: skip


@pytest.mark.slow
def test_who_breaks_rules_of_confirming_is_made_up_for():
    terms = terms_for(8, dropout=0.25, length=64, adversary="semi_malicious")
    values = vectors(terms)

    async def all_at_once():
        return await asyncio.gather(*(hold(terms, values, {0: item}) for item in CONFIRMING))

    started = time.monotonic()
    ends = asyncio.run(all_at_once())
    assert time.monotonic() - started < QUICK.total
    for fault, (total, clients) in zip(CONFIRMING, ends, strict=True):
        want = values[int(fault is sends_its_vector_late) :].sum(axis=0)
        for end in (total, *clients[1:]):
            np.testing.assert_array_equal(end.values, want, err_msg=fault.__name__)


def test_sum_does_not_wait_for_answers_that_it_can_do_without():
    async def keeps_its_answer(wire):
        await wire.until(Request)

    terms = terms_for(8, dropout=0.25, length=64)
    values = vectors(terms)
    started = time.monotonic()
    total, clients = asyncio.run(hold(terms, values, {0: keeps_its_answer}, SLOW))
    assert time.monotonic() - started < SLOW.stage / 2
    for end in (total, *clients[1:]):
        np.testing.assert_array_equal(end.values, values.sum(axis=0))


@pytest.mark.slow
def test_too_many_that_vanish_are_abort_for_everybody():
    terms = terms_for(6, dropout=0.17, length=64)
    faults = {0: vanishes_in_its_vector, 1: hangs_in_its_vector}
    total, clients = asyncio.run(hold(terms, vectors(terms), faults))
    assert isinstance(total, Abort) and "fewer than the minimum 5" in total.reason
    for end in clients[2:]:
        assert isinstance(end, Abort) and "fewer than the minimum 5" in end.reason
        assert end.exposed


def test_too_few_that_come_are_abort_within_time_limit():
    terms = terms_for(6)
    total, clients = asyncio.run(hold(terms, vectors(terms)[:4], limits=tcp.Limits(0.4, 1, 1)))
    assert isinstance(total, Abort) and "enrolled is 4" in total.reason
    assert all(isinstance(end, Abort) and not end.exposed for end in clients)


@pytest.mark.slow
def test_other_terms_are_turned_away():
    async def both():
        terms = terms_for(4, dropout=0.25)
        other = terms_for(4, dropout=0.25, bound=999)
        async with tcp.Listener(terms, limits=QUICK) as listener:
            position = "127.0.0.1", listener.port, QUICK
            combined = [tcp.join(terms, row, *position) for row in vectors(terms)[:3]]
            stray = tcp.join(other, vectors(other)[0], *position)
            return await asyncio.gather(
                listener.aggregate(), stray, *combined, return_exceptions=True
            )

    total, stray, *clients = asyncio.run(both())
    np.testing.assert_array_equal(total.values, vectors(terms_for(4))[:3].sum(axis=0))
    assert isinstance(stray, Abort) and "terms" in stray.reason and not stray.exposed


def test_no_vector_crosses_unmasked(monkeypatch):
    terms = terms_for(4, length=256)
    values = vectors(terms)
    crossed = []
    true_write = tcp.write_frame

    async def recorded(writer, data, seconds):
        crossed.append(data)
        return await true_write(writer, data, seconds)

    monkeypatch.setattr(tcp, "write_frame", recorded)
    total, _ = asyncio.run(hold(terms, values))
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


def test_who_comes_while_aggregation_runs_is_in_next_one():
    async def both():
        terms = terms_for(4, dropout=0.25)
        values = vectors(terms)
        async with tcp.Listener(terms, limits=QUICK) as listener:
            position = "127.0.0.1", listener.port

            async def slowly(wire):
                message = wire.client.mask(await wire.until(Delivery))
                following.extend(
                    asyncio.ensure_future(tcp.join(terms, row, *position, QUICK)) for row in values
                )
                await asyncio.sleep(0.3)
                await wire.say(message)

            following: list = []
            combined = [tcp.join(terms, row // 2, *position, QUICK) for row in values[1:]]
            halves = faulty(terms, values[0] // 2, *position, slowly)
            first, *_ = await asyncio.gather(listener.aggregate(), halves, *combined)
            second = await listener.aggregate()
            ends = await asyncio.gather(*following)
        return values, first, second, ends

    values, first, second, ends = asyncio.run(both())
    np.testing.assert_array_equal(first.values, (values // 2).sum(axis=0))
    np.testing.assert_array_equal(second.values, values.sum(axis=0))
    assert all((end.values == second.values).all() for end in ends)


async def idle(port, connections):
    """Open so many connections that never say a word."""
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(connections)]
    return [writer for _, writer in opened]


@pytest.mark.gate(2)
@pytest.mark.parametrize("when", ["long before", "before", "during", "after"])
def test_idle_connections_do_not_keep_clients_out(when):
    """Forty, where six clients enrol: before clients that wait, as it begins, and half-way."""
    terms = terms_for(6)
    values = vectors(terms)

    async def crowded():
        async with tcp.Listener(terms, limits=SLOW) as listener:
            position = "127.0.0.1", listener.port
            crowd = await idle(listener.port, 40) if "before" in when else []
            early = values[:3] if when == "long before" else []  # They wait to be asked.
            combined = [
                asyncio.ensure_future(tcp.join(terms, row, *position, SLOW)) for row in early
            ]
            await asyncio.sleep(0.1)
            holding = asyncio.ensure_future(listener.aggregate())
            await asyncio.sleep(0.05)
            crowd += await idle(listener.port, 40) if when == "during" else []
            combined += [
                asyncio.ensure_future(tcp.join(terms, row, *position, SLOW))
                for row in values[len(early) : 3]
            ]
            await asyncio.sleep(0.3)
            # Who has enrolled stays, whoever comes.
            crowd += await idle(listener.port, 40) if when == "after" else []
            rest = [tcp.join(terms, row, *position, SLOW) for row in values[3:]]
            ends = await asyncio.gather(holding, *combined, *rest)
            for writer in crowd:
                writer.close()
            return ends

    started = time.monotonic()
    for end in asyncio.run(crowded()):
        np.testing.assert_array_equal(end.values, values.sum(axis=0))
    assert time.monotonic() - started < SLOW.send


def test_who_is_silent_is_cut_off_while_others_may_still_enrol():
    terms = terms_for(4)
    values = vectors(terms)

    async def cut():
        limits = tcp.Limits(enrol=20.0, stage=20.0, send=0.4)
        async with tcp.Listener(terms, limits=limits) as listener:
            position = "127.0.0.1", listener.port
            holding = asyncio.ensure_future(listener.aggregate())
            reader, writer = await asyncio.open_connection(*position)
            slow, other = await asyncio.open_connection(*position)
            started = time.monotonic()
            for _ in range(3):  # A byte now and then is not a message.
                other.write(b"\0")
                await asyncio.sleep(0.1)
            await asyncio.gather(reader.read(), slow.read())
            waited = time.monotonic() - started
            combined = [tcp.join(terms, row, *position, limits) for row in values]
            total, *_ = await asyncio.gather(holding, *combined)
            writer.close()
            other.close()
            return waited, total

    waited, total = asyncio.run(cut())
    assert waited < 5
    np.testing.assert_array_equal(total.values, values.sum(axis=0))


@pytest.mark.parametrize("port", [-1, 0, 65536, "x", 1.5])
def test_what_is_no_port_is_refused_before_anything_is_sent(port):
    terms = terms_for(3)
    with pytest.raises(ValueError, match=f"port is {port!r}; give a whole number from 1 to 65535"):
        asyncio.run(tcp.join(terms, vectors(terms)[0], "127.0.0.1", port, QUICK))


@pytest.mark.parametrize("host", ["x" * 70, ".."])
def test_what_is_no_host_is_no_connection(host):
    terms = terms_for(3)
    with pytest.raises(Abort, match="no connection to"):
        asyncio.run(tcp.join(terms, vectors(terms)[0], host, 9, QUICK))


def test_one_port_holds_aggregation_after_aggregation():
    async def several():
        terms = terms_for(5, dropout=0.2)
        results = []
        async with tcp.Listener(terms, limits=QUICK) as listener:
            position = "127.0.0.1", listener.port, QUICK
            for seed in range(3):
                values = vectors(terms, seed)
                combined = [tcp.join(terms, row, *position) for row in values]
                total, *_ = await asyncio.gather(listener.aggregate(), *combined)
                results.append((total.values, values.sum(axis=0)))
            assert listener.sent > listener.received > 0
        return results

    for total, want in asyncio.run(several()):
        np.testing.assert_array_equal(total, want)


@pytest.mark.parametrize("stage", [Delivery, Request])
def test_killed_server_gives_second_sum(stage):
    """Clients of the first end with an abort; those of the second have nothing in common with."""

    async def both():
        terms = terms_for(5, length=64)
        values = vectors(terms)
        first = tcp.Listener(terms, limits=QUICK)
        await first.__aenter__()
        position = "127.0.0.1", first.port
        reached = asyncio.Event()

        async def stops(wire):
            wire.message = await wire.until(stage)
            reached.set()
            wires.append(wire)

        wires: list = []
        clients = [asyncio.ensure_future(faulty(terms, values[0], *position, stops))]
        clients += [
            asyncio.ensure_future(tcp.join(terms, row, *position, QUICK)) for row in values[1:]
        ]
        holding = asyncio.ensure_future(first.aggregate())
        await asyncio.wait_for(reached.wait(), 10)
        holding.cancel()
        await first.__aexit__()
        ends = await asyncio.gather(*clients, return_exceptions=True)
        second = tcp.Listener(terms, port=position[1], limits=QUICK)
        async with second:
            combined = [tcp.join(terms, row, *position, QUICK) for row in values]
            total, *_ = await asyncio.gather(second.aggregate(), *combined)
        return values, ends[1:], wires[0], total

    values, ends, wire, total = asyncio.run(both())
    assert all(isinstance(end, Abort) and "ended the connection" in end.reason for end in ends)
    assert all(end.exposed for end in ends)
    np.testing.assert_array_equal(total.values, values.sum(axis=0))
    if stage is Request:
        # The one that had not answered yet answers once, and no story after it.
        tcp.reply(wire.client, wire.message)
        with pytest.raises(Abort, match="out of order"):
            tcp.reply(wire.client, wire.message)


def test_client_of_server_that_is_silent_gives_up():
    async def silent():
        async def nothing(reader, writer):
            await reader.read()
            writer.close()

        server = await asyncio.start_server(nothing, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        limits = tcp.Limits(0.1, 0.1, 0.1)
        try:
            with pytest.raises(Abort, match="no sum within"):
                terms = terms_for(3)
                await tcp.join(terms, vectors(terms)[0], "127.0.0.1", port, limits)
        finally:
            server.close()
            await asyncio.sleep(0.1)
        with pytest.raises(Abort, match="no connection to"):
            await tcp.join(terms, vectors(terms)[0], "127.0.0.1", port, limits)

    asyncio.run(silent())


@pytest.mark.parametrize(
    "data", [b"", b"\x00", tcp.framed(b"junk"), (2**31).to_bytes(4, "big") + bytes(16)]
)
def test_client_of_server_that_sends_noise_gives_up(data):
    async def noisy():
        async def noise(reader, writer):
            writer.write(data)
            writer.close()

        server = await asyncio.start_server(noise, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        terms = terms_for(3)
        with pytest.raises(Abort) as caught:
            await tcp.join(terms, vectors(terms)[0], "127.0.0.1", port, QUICK)
        assert not caught.value.exposed
        server.close()

    asyncio.run(noisy())


def test_server_that_asks_twice_gets_one_answer():
    terms = terms_for(3)

    async def asked():
        answers = []

        async def twice(reader, writer):
            hello = Hello(b"n" * 16, terms.digest())
            await tcp.write_frame(writer, encoded(hello), 1)
            await tcp.write_frame(writer, encoded(hello), 1)
            try:
                while True:
                    answers.append(decoded(await tcp.read_frame(reader, 10**5)))
            except EOFError:
                writer.close()

        server = await asyncio.start_server(twice, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Abort, match="out of order"):
            await tcp.join(terms, vectors(terms)[0], "127.0.0.1", port, QUICK)
        await asyncio.sleep(0.1)
        server.close()
        return answers

    assert len(asyncio.run(asked())) == 1


@pytest.mark.parametrize("name", ["enrol", "stage", "send"])
def test_times_that_are_none_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        tcp.Limits(**{name: 0})


@pytest.mark.slow
def test_two_hundred_clients_over_tcp_with_dropouts():
    terms = terms_for(200, length=4096, bound=2**20, corrupt=0.05, dropout=0.05)
    values = vectors(terms)
    kinds = [leaves_at_once, vanishes_in_its_vector, vanishes_before_it_answers]
    faults = {7 * index: kinds[index % 3] for index in range(10)}
    total, clients = asyncio.run(hold(terms, values, faults, SLOW))
    rows = [i for i in range(200) if faults.get(i) in (None, vanishes_before_it_answers)]
    np.testing.assert_array_equal(total.values, values[rows].sum(axis=0))
    assert sum(not isinstance(end, BaseException) and end is not None for end in clients) == 190


@pytest.mark.slow
def test_any_faults_together_give_sum_or_abort():
    """Eighty aggregations at once, up to four of eight clients break the rules in each."""
    terms = terms_for(8, dropout=0.25, length=64)
    values = vectors(terms)
    drawn = np.random.default_rng(0)
    kinds = [fault for fault in FAULTS if fault is not sends_its_vector_late]
    cases = []
    for _ in range(80):
        rows = drawn.choice(8, drawn.integers(1, 5), replace=False)
        cases.append({int(row): kinds[drawn.integers(len(kinds))] for row in rows})

    async def all_at_once():
        limits = tcp.Limits(20.0, 20.0, 10.0)
        return await asyncio.gather(*(hold(terms, values, case, limits) for case in cases))

    sums = 0
    for case, (total, _) in zip(cases, asyncio.run(all_at_once()), strict=True):
        if isinstance(total, Abort):
            assert len(case) > 2, case
            continue
        rows = [row for row in range(8) if case.get(row) in (None, *SURVIVES)]
        np.testing.assert_array_equal(total.values, values[rows].sum(axis=0))
        assert len(total.survivors) == len(rows) >= 6
        sums += 1
    assert 20 < sums < 80
