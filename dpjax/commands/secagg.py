"""The bodies of `dpjax secagg`: serve, join and demo; each returns an exit status."""

import asyncio
import random
import time
from pathlib import Path

import numpy as np

from dpjax import _validate
from dpjax.commands.secagg_options import Agreed, Demo, Join, Serve
from dpjax.secagg import graph, tcp
from dpjax.secagg.client import Client
from dpjax.secagg.messages import decoded, encoded
from dpjax.secagg.server import Total
from dpjax.secagg.terms import Abort, Terms

__all__: list[str] = []

LEAVES = ("before it enrols", "after its keys", "after its shares", "after its vector")


def serve(command: Serve) -> int:
    """Sum clients' vectors round after round.

    Args:
        command: Options.
    """
    terms, limits = _agreed(command)
    rounds = _validate.integer("rounds", command.rounds, least=1)
    _check_free(command.out)
    sums = asyncio.run(_served(command, terms, limits, rounds))
    if command.out is not None and sums:
        np.save(command.out, np.stack(sums))
        print(f"sums: {command.out}")
    return int(len(sums) < rounds)


async def _served(
    command: Serve, terms: Terms, limits: tcp.Limits, rounds: int
) -> list[np.ndarray]:
    sums = []
    async with tcp.Listener(terms, command.host, command.port, limits) as listener:
        print(f"listening at {listener.host}:{listener.port}; {_said(terms)}", flush=True)
        for number in range(1, rounds + 1):
            try:
                total = await listener.aggregate()
            except Abort as abort:
                print(f"round {number}: no sum: {abort.reason}", flush=True)
                continue
            sums.append(total.values)
            print(f"round {number}: the sum of {len(total.survivors)} vectors", flush=True)
    return sums


def join(command: Join) -> int:
    """Take part in one sum.

    Args:
        command: Options.
    """
    terms, limits = _agreed(command)
    _check_free(command.out)
    try:
        values = np.load(command.values, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"values is {command.values}, no .npy file of numbers ({error})") from None
    if not isinstance(values, np.ndarray):
        raise ValueError(f"values is {command.values}, an archive; give a .npy file")
    try:
        total = asyncio.run(tcp.join(terms, values, command.host, command.port, limits))
    except Abort as abort:
        spent = "its masked vector had gone out" if abort.exposed else "its vector stayed here"
        print(f"no sum: {abort.reason} ({spent})")
        return 1
    print(f"the sum of {len(total.survivors)} vectors")
    if command.out is not None:
        np.save(command.out, total.values)
        print(f"sum: {command.out}")
    return 0


def demo(command: Demo) -> int:
    """Show one sum with clients that leave.

    Args:
        command: Options.
    """
    bits, bound = 48, 2**20
    terms = Terms(command.clients, command.length, bits, bound, command.corrupt, command.dropout)
    print(_said(terms))
    drawn = np.random.default_rng()
    values = drawn.integers(-bound, bound, (terms.clients, terms.length), endpoint=True)
    lost = graph.share(terms.clients, "dropout", terms.dropout)
    leaves = dict(zip(random.sample(range(terms.clients), lost), 10**6 * LEAVES, strict=False))
    started = time.perf_counter()
    total, listener = asyncio.run(_shown(terms, values, leaves))
    for client, stage in sorted(leaves.items()):
        print(f"  client {client} left {stage}")
    present = [i for i in range(terms.clients) if leaves.get(i) in (None, LEAVES[3])]
    right = np.array_equal(total.values, values[present].sum(axis=0))
    print(
        f"the sum of {len(total.survivors)} vectors is {'exact' if right else 'WRONG'}: "
        f"{time.perf_counter() - started:.2f} s, {listener.received / terms.clients / 1e3:.1f} kB "
        f"from and {listener.sent / terms.clients / 1e3:.1f} kB to a client, "
        f"{terms.vector_bytes() / 1e3:.1f} kB of them its vector"
    )
    return int(not right)


async def _shown(
    terms: Terms, values: np.ndarray, leaves: dict[int, str]
) -> tuple[Total, tcp.Listener]:
    limits = tcp.Limits(enrol=3.0, stage=20.0, send=5.0)
    async with tcp.Listener(terms, limits=limits) as listener:
        at = "127.0.0.1", listener.port, limits
        joined = [
            _leaving(terms, row, listener.port, LEAVES.index(leaves[i]))
            if i in leaves
            else tcp.join(terms, row, *at)
            for i, row in enumerate(values)
        ]
        total, *_ = await asyncio.gather(listener.aggregate(), *joined)
        return total, listener


async def _leaving(terms: Terms, values: np.ndarray, port: int, answers: int) -> None:
    """A client that leaves after so many messages of its own."""
    if not answers:
        return
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = Client(terms, values)
    for _ in range(answers):
        message = decoded(await tcp.read_frame(reader, tcp.most_bytes(terms)))
        await tcp.write_frame(writer, encoded(tcp.said(client, message)), 5.0)
    writer.close()


def _agreed(command: Agreed) -> tuple[Terms, tcp.Limits]:
    terms = Terms(
        command.clients,
        command.length,
        command.bits,
        command.bound,
        command.corrupt,
        command.dropout,
        command.adversary,
    )
    return terms, tcp.Limits(enrol=command.enrol, stage=command.stage)


def _said(terms: Terms) -> str:
    found = terms.graph(terms.clients)
    return (
        f"up to {terms.clients} clients, at least {terms.minimum} survivors; {found.degree} "
        f"neighbours each, {found.threshold} of whom rebuild a secret; terms "
        f"{terms.digest().hex()[:16]}"
    )


def _check_free(path: Path | None) -> None:
    if path is not None and path.exists():
        raise ValueError(f"out is {path}, which exists; give another file")
    if path is not None and path.suffix != ".npy":
        raise ValueError(f"out is {path}; give a file that ends in .npy")
