"""The bodies of `dpjax secagg`: serve, join and demo; each returns an exit status."""

import asyncio
import random
import time
from pathlib import Path

import numpy as np

from dpjax import _validate
from dpjax.commands.secagg_options import Agreed, Demo, Join, Serve
from dpjax.secagg import local, tcp
from dpjax.secagg.terms import Abort, Terms

__all__: list[str] = []

LEFT = {
    "share": "after its keys",
    "mask": "after its shares",
    "confirm": "after its vector",
    "unmask": "before it unmasked",
}


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
    bound = 2**20
    fractions = command.corrupt, command.dropout
    terms = Terms(command.clients, command.length, 48, bound, *fractions, command.adversary)
    print(_said(terms))
    values = np.random.default_rng().integers(
        -bound, bound, (terms.clients, terms.length), endpoint=True
    )
    rows = random.sample(range(terms.clients), terms.clients - terms.minimum)
    stages = terms.stages[1:]
    leaves = {row: stages[at % len(stages)] for at, row in enumerate(rows)}
    started = time.perf_counter()
    total, received, sent = local.over_tcp(terms, values, leaves)[:3]
    seconds = time.perf_counter() - started
    for row, stage in sorted(leaves.items()):
        print(f"  client {row} left {LEFT[stage]}")
    right = np.array_equal(total.values, values[list(total.survivors)].sum(axis=0))
    print(
        f"the sum of {len(total.survivors)} vectors is {'exact' if right else 'WRONG'}: "
        f"{seconds:.2f} s, {received / terms.clients / 1e3:.1f} kB from and "
        f"{sent / terms.clients / 1e3:.1f} kB to a client, "
        f"{terms.vector_bytes() / 1e3:.1f} kB of either its vector or the sum"
    )
    return int(not right)


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
