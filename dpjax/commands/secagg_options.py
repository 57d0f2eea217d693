"""The options of `dpjax secagg`: what a server and its clients agree on, and where they meet."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

__all__: list[str] = []


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """Terms, the same at both ends: who holds others is turned away.

    Attributes:
        clients: Most clients that take part; 3 or more.
        length: Entries of a vector.
        bound: Largest absolute entry, a whole number.
        bits: Sums are computed modulo 2^bits; clients times bound must stay below 2^(bits-1).
        corrupt: Fraction of clients whose knowledge the server may have.
        dropout: Fraction of clients that may be missing.
        adversary: What the server may do: follow the protocol and be curious (semi_honest), or tell
            survivors different stories of who has left (semi_malicious: one more stage, in which
            they confirm to each other what they were told; see docs/secagg.md).
        host: The server's address.
        enrol: Seconds for clients to enrol.
        stage: Seconds for each stage after it.
    """

    clients: int
    length: int
    bound: int
    bits: int = 32
    corrupt: float = 0.05
    dropout: float = 0.05
    adversary: Literal["semi_honest", "semi_malicious"] = "semi_honest"
    host: str = "127.0.0.1"
    enrol: float = 60.0
    stage: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Serve(Agreed):
    """Listen for clients and sum their vectors, round after round.

    Example: dpjax secagg serve --clients 5 --length 100 --bound 1000 --dropout 0.2 --port 7000

    Attributes:
        port: TCP port; 0 takes a free one and prints it.
        rounds: How many sums.
        out: Where to write the sums, a .npy file [rounds, length]; must not exist. It is made at
            once and written again after each sum.
    """

    port: int = 0
    rounds: int = 1
    out: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Join(Agreed):
    """Take part in one sum with a vector from a file.

    Example: dpjax secagg join values.npy --clients 5 --length 100 --bound 1000 --dropout 0.2
    --port 7000

    Attributes:
        values: A .npy file of whole numbers [length].
        port: The server's TCP port.
        out: Where to write the sum, a .npy file [length]; must not exist. It is made at once.
    """

    values: Annotated[Path, tyro.conf.Positional]
    port: int
    out: Path | None = None


@dataclass(frozen=True)
class Demo:
    """A server and its clients in this process, over TCP, some of whom leave on the way.

    Example: dpjax secagg demo --clients 20 --dropout 0.2

    Attributes:
        clients: How many take part.
        length: Entries of a vector.
        dropout: Fraction of clients that may leave; so many do, at the stages in turn.
        corrupt: Fraction of clients whose knowledge the server may have.
        adversary: What the server may do: semi_honest or semi_malicious.
    """

    clients: int = 20
    length: int = 1000
    dropout: float = 0.1
    corrupt: float = 0.05
    adversary: Literal["semi_honest", "semi_malicious"] = "semi_honest"


_Action = (
    Annotated[Serve, tyro.conf.subcommand(name="serve")]
    | Annotated[Join, tyro.conf.subcommand(name="join")]
    | Annotated[Demo, tyro.conf.subcommand(name="demo")]
)


@dataclass(frozen=True)
class SecaggCommand:
    """Secure sums over TCP: serve, join, demo.

    A server learns the sum of whole-number vectors and nothing else about them: docs/secagg.md says
    against whom. Connections are not encrypted and clients not authenticated.

    Attributes:
        action: What to do.
    """

    action: tyro.conf.OmitSubcommandPrefixes[_Action]
