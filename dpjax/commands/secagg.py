"""The bodies of `dpjax secagg`: serve and join; each returns an exit status."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from dpjax import _files, _validate
from dpjax.commands import inputs
from dpjax.secagg import tcp
from dpjax.secagg.terms import Abort, Terms

__all__ = ()

_Write = Callable[[np.ndarray], None]


def _agreed(
    *,
    clients: int,
    length: int,
    bound: int,
    bits: int = 32,
    corrupt: float = 0.05,
    dropout: float = 0.05,
    adversary: Literal["semi_honest", "semi_malicious"] = "semi_honest",
    enrol: float = 60.0,
    stage: float = 60.0,
) -> tuple[Terms, tcp.Limits]:
    """Terms, the same at both ends: who has others is turned away.

    Args:
        clients: Most clients that take part; 3 or more.
        length: Entries of a vector.
        bound: Largest absolute entry, a whole number.
        bits: Sums are computed modulo 2^bits; clients times bound must stay below 2^(bits-1).
        corrupt: Fraction of clients whose knowledge the server may have.
        dropout: Fraction of clients that may be missing.
        adversary: What the server may do: follow the protocol and be curious (semi_honest), or tell
            survivors different dropout sets (semi_malicious: one more stage, the consistency check,
            in which they confirm to each other what they received; see the page 'A server and
            secure sums' of the manual).
        enrol: Seconds for clients to enrol.
        stage: Seconds for each stage after it.
    """
    terms = Terms(clients, length, bits, bound, corrupt, dropout, adversary)
    return terms, tcp.Limits(enrol, stage)


@inputs.with_arguments(_agreed)
def serve_command(
    *, host: str = "127.0.0.1", port: int = 0, rounds: int = 1, out: Path | None = None,
    **agreed: Any,
) -> int:  # fmt: skip
    """Listen for clients and sum their vectors, round after round.

    Example: dpjax secagg serve --clients 5 --length 100 --bound 1000 --dropout 0.2 --port 7000

    Args:
        host: The address to listen at.
        port: TCP port; 0 takes a free one and prints it.
        rounds: How many sums.
        out: Where to write the sums, a .npy file [rounds, length]; must not exist. It is made at
            once and written again after each sum.
    """
    terms, limits = _agreed(**agreed)
    _validate.integer("rounds", rounds)
    with _written("sums", out, (0, terms.length)) as write:
        return asyncio.run(_serve(terms, host, port, limits, rounds, write))


async def _serve(
    terms: Terms, host: str, port: int, limits: tcp.Limits, rounds: int, write: _Write
) -> int:
    sums = []
    parameters = terms.graph(terms.clients)
    async with tcp.Listener(terms, host, port, limits) as listener:
        print(
            f"listening at {listener.host}:{listener.port}; {max(3, terms.minimum)} to "
            f"{terms.clients} clients must enrol, and {terms.minimum} of them must finish; "
            f"{_validate.counted(parameters.degree, 'neighbour')} each, {parameters.threshold} of "
            f"whom rebuild a secret; terms {terms.digest().hex()[:16]}",
            flush=True,
        )
        for number in range(1, rounds + 1):
            try:
                total = await listener.aggregate()
            except Abort as abort:
                print(f"round {number}: no sum: {abort.reason}", flush=True)
                continue
            # Written after every round: a later one may never end.
            sums.append(total.values)
            write(np.stack(sums))
            vectors = _validate.counted(len(total.survivors), "vector")
            print(f"round {number}: the sum of {vectors}", flush=True)
    return int(len(sums) < rounds)


@inputs.with_arguments(_agreed)
def join_command(
    values: tyro.conf.Positional[Path],
    *,
    host: str = "127.0.0.1",
    port: int,
    out: Path | None = None,
    **agreed: Any,
) -> int:
    """Take part in one sum with a vector from a file.

    Example: dpjax secagg join values.npy --clients 5 --length 100 --bound 1000 --dropout 0.2
    --port 7000

    Args:
        values: A .npy file of whole numbers [length].
        host: The server's address.
        port: The server's TCP port.
        out: Where to write the sum, a .npy file [length]; must not exist. It is made at once.
    """
    terms, limits = _agreed(**agreed)
    place = f"values is {str(values)!r}, which"
    with _files.reading(place, "give a .npy file of whole numbers"):
        vector = np.load(values, allow_pickle=False)
    if not isinstance(vector, np.ndarray):
        raise ValueError(f"{place} is an archive; give a .npy file")
    with _written("sum", out, (0,)) as write:
        try:
            total = asyncio.run(tcp.join(terms, vector, host, port, limits))
        except Abort as abort:
            spent = "its masked vector had gone out" if abort.exposed else "its vector stayed here"
            print(f"no sum: {abort.reason} ({spent})")
            return 1
        write(total.values)
        print(f"the sum of {_validate.counted(len(total.survivors), 'vector')}")
    return 0


# The first line of each: in a list of both, examples would be broken into lines.
_Action = (
    Annotated[
        int,
        tyro.conf.subcommand(
            "serve",
            description=serve_command.__doc__.partition("\n")[0],
            constructor=serve_command,
        ),
    ]
    | Annotated[
        int,
        tyro.conf.subcommand(
            "join",
            description=join_command.__doc__.partition("\n")[0],
            constructor=join_command,
        ),
    ]
)


def secagg_command(action: tyro.conf.OmitSubcommandPrefixes[_Action]) -> int:
    """Secure sums over TCP: serve, join.

    A server learns the sum of whole-number vectors and nothing else about them: the page 'A server
    and secure sums' of the manual says against whom. Connections are not encrypted and clients not
    authenticated. dpjax secagg serve --help has options and an example, as has join.

    Args:
        action: What to do.
    """
    return action


@contextlib.contextmanager
def _written(content: str, path: Path | None, empty: tuple[int, ...]) -> Iterator[_Write]:
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
        # Made before any client is asked: a sum that cannot be written is lost.
        _files.create(path, lambda file: np.save(file, np.zeros(empty, np.int64)))
    try:
        yield write
    finally:
        if sums:
            print(f"{content}: {path}", flush=True)
        else:
            # An empty file would look like a sum.
            path.unlink(missing_ok=True)
