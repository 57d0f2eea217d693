"""The bodies of `dpjax secagg`: serve and join; each returns an exit status."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dpjax import _files, _validate
from dpjax.secagg import tcp
from dpjax.secagg.terms import Abort, Terms

__all__: list[str] = []

_Write = Callable[[np.ndarray], None]


def serve(command: Any) -> int:
    """Sum clients' vectors round after round.

    Args:
        command: Options.
    """
    terms, limits = _agreed(command)
    rounds = _validate.integer("rounds", command.rounds, least=1)
    with _written("sums", command.out, (0, terms.length)) as write:
        return asyncio.run(_served(command, terms, limits, rounds, write))


async def _served(
    command: Any, terms: Terms, limits: tcp.Limits, rounds: int, write: _Write
) -> int:
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
            write(np.stack(sums))
            print(
                f"round {number}: the sum of {_validate.counted(len(total.survivors), 'vector')}",
                flush=True,
            )
    return int(len(sums) < rounds)


def join(command: Any) -> int:
    """Take part in one sum.

    Args:
        command: Options.
    """
    terms, limits = _agreed(command)
    where = f"values is {str(command.values)!r}, which"
    with _files.reading(where, "give a .npy file of whole numbers"):
        values = np.load(command.values, allow_pickle=False)
    if not isinstance(values, np.ndarray):
        raise ValueError(f"{where} is an archive; give a .npy file")
    with _written("sum", command.out, (0,)) as write:
        try:
            total = asyncio.run(tcp.join(terms, values, command.host, command.port, limits))
        except Abort as abort:
            spent = "its masked vector had gone out" if abort.exposed else "its vector stayed here"
            print(f"no sum: {abort.reason} ({spent})")
            return 1
        write(total.values)
        print(f"the sum of {_validate.counted(len(total.survivors), 'vector')}")
    return 0


def _agreed(command: Any) -> tuple[Terms, tcp.Limits]:
    names = ("clients", "length", "bits", "bound", "corrupt", "dropout", "adversary")
    terms = Terms(**{name: getattr(command, name) for name in names})
    return terms, tcp.Limits(enrol=command.enrol, stage=command.stage)


def _said(terms: Terms) -> str:
    parameters = terms.graph(terms.clients)
    return (
        f"{max(3, terms.minimum)} to {terms.clients} clients must enrol, and {terms.minimum} of "
        f"them must finish; {_validate.counted(parameters.degree, 'neighbour')} each, "
        f"{parameters.threshold} of whom rebuild a secret; terms {terms.digest().hex()[:16]}"
    )


@contextlib.contextmanager
def _written(what: str, path: Path | None, empty: tuple[int, ...]) -> Iterator[_Write]:
    """Make a file before anything is asked of anybody, and give what writes it whole."""
    if path is None:
        yield lambda array: None
        return
    if path.suffix != ".npy" or path.exists():
        why = (
            "which exists; give another file" if path.exists() else "give a file that ends in .npy"
        )
        raise ValueError(f"out is {path}, {why}")
    sums: list[np.ndarray] = []

    def write(array: np.ndarray) -> None:
        with _files.writing("out", path):
            _files.replace(path, lambda file: np.save(file, array))
        sums.append(array)

    with _files.writing("out", path):
        _files.create(path, lambda file: np.save(file, np.zeros(empty, np.int64)))
    try:
        yield write
    finally:
        if sums:
            print(f"{what}: {path}", flush=True)
        else:
            path.unlink(missing_ok=True)
