"""The bodies of `dpjax secagg`: serve and join; each returns an exit status."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro

from dpjax import _files, _validate
from dpjax.commands import inputs
from dpjax.secagg.terms import Abort, Limits, Terms
from dpjax.sites import sums
from dpjax.sites.carrier import GrpcChannel
from dpjax.sites.identity import Identity, Roster

__all__ = ()

_Write = Callable[[np.ndarray], None]


class _Party(NamedTuple):
    """What a party agreed to, and who all parties are, the server first."""

    terms: Terms
    limits: Limits
    identity: Identity
    roster: Roster
    insecure: bool

    def channel(self, peers: dict[str, str | None], listen: str | None) -> GrpcChannel:
        """Return this party's channel, which is not open."""
        bounds = sums.channel_limits(self.terms)
        arguments = (self.identity, self.roster, peers, listen, bounds)
        return GrpcChannel(*arguments, insecure_loopback=self.insecure)


def _agreed(
    *,
    clients: int,
    length: int,
    bound: int,
    name: str,
    certificate: Path,
    key: Path,
    certificates: tuple[Path, ...],
    authority: Path = Path("authority_root.pem"),
    bits: int = 32,
    corrupt: float = 0.05,
    dropout: float = 0.05,
    adversary: Literal["semi_honest", "semi_malicious"] = "semi_honest",
    enrol: float = 60.0,
    stage: float = 60.0,
    insecure_loopback: bool = False,
) -> _Party:
    """Terms, the same at both ends: who has others is turned away.

    Args:
        clients: Most clients that take part; 3 or more.
        length: Entries of a vector.
        bound: Largest absolute entry, a whole number.
        name: This party's, as its certificate has it.
        certificate: This party's own.
        key: Its private key, of the certificate.
        certificates: Of all parties, the server's first, in the same order for all; their keys are
            pinned.
        authority: The root certificates.
        bits: Sums are computed modulo 2^bits; clients times bound must stay below 2^(bits-1).
        corrupt: Fraction of clients whose knowledge the server may have.
        dropout: Fraction of clients that may be missing.
        adversary: What the server may do: follow the protocol and be curious (semi_honest), or tell
            survivors different dropout sets (semi_malicious: one more stage, the consistency check,
            in which they confirm to each other what they received; see the page 'A server and
            secure sums' of the manual).
        enrol: Seconds for clients to enrol; a client waits as long for the server.
        stage: Seconds for each stage after it.
        insecure_loopback: Without certificates' encryption, on this machine alone.
    """
    terms = Terms(clients, length, bits, bound, corrupt, dropout, adversary)
    limits = Limits(enrol, stage)
    identity = Identity.load(name, certificate=certificate, key=key, authority=authority)
    return _Party(terms, limits, identity, Roster.of_certificates(certificates), insecure_loopback)


@inputs.with_arguments(_agreed)
def serve_command(
    *, listen: str = "127.0.0.1:0", rounds: int = 1, out: Path | None = None, **agreed: Any
) -> int:
    """Listen for clients and sum their vectors, round after round.

    Example: dpjax secagg serve --clients 3 --length 100 --bound 1000 --name server --certificate
    server.pem --key server.key --certificates server.pem lyon.pem turin.pem rome.pem --listen
    0.0.0.0:7000

    Args:
        listen: host:port to listen at; port 0 takes a free one and prints it.
        rounds: How many sums.
        out: Where to write the sums, a .npy file [rounds, length]; must not exist. It is made at
            once and written again after each sum.
    """
    _validate.integer("rounds", rounds)
    party = _agreed(**agreed)
    first, *callers = party.roster
    fewest = max(3, party.terms.minimum)
    _validate.refuse(
        {
            f"certificates begin with that of {first}, and this server is {party.identity.name}; "
            "give its own first": first != party.identity.name,
            f"certificates are of {_validate.counted(len(callers), 'client')}, and {fewest} must "
            "enrol; give those of all parties": len(callers) < fewest,
        }
    )
    channel = party.channel(dict.fromkeys(callers), listen)
    with _written("sums", out, (0, party.terms.length)) as write:
        return _serve(party, channel, rounds, write)


def _serve(party: _Party, channel: GrpcChannel, rounds: int, write: _Write) -> int:
    terms = party.terms
    totals = []
    parameters = terms.graph(terms.clients)
    with sums.Collector(terms, channel, party.limits) as collector:
        host = str(channel.listen).rpartition(":")[0]
        print(
            f"listening at {host}:{channel.port}; {max(3, terms.minimum)} to "
            f"{terms.clients} clients must enrol, and {terms.minimum} of them must finish; "
            f"{_validate.counted(parameters.degree, 'neighbour')} each, {parameters.threshold} of "
            f"whom rebuild a secret; terms {terms.digest().hex()[:16]}",
            flush=True,
        )
        for number in range(1, rounds + 1):
            try:
                total = collector.aggregate()
            except Abort as abort:
                missing = ", ".join(collector.missing) or "nobody"
                print(
                    f"round {number}: no sum: {abort.reason}; missing: {missing}, and --dropout "
                    f"{terms.dropout:g} lets {terms.clients - terms.minimum} be",
                    flush=True,
                )
                continue
            # Written after every round: a later one may never end.
            totals.append(total.values)
            write(np.stack(totals))
            vectors = _validate.counted(len(total.survivors), "vector")
            print(f"round {number}: the sum of {vectors}", flush=True)
    return int(len(totals) < rounds)


@inputs.with_arguments(_agreed)
def join_command(
    values: tyro.conf.Positional[Path], *, server: str, out: Path | None = None, **agreed: Any
) -> int:
    """Take part in one sum with a vector from a file.

    Example: dpjax secagg join values.npy --clients 3 --length 100 --bound 1000 --name lyon
    --certificate lyon.pem --key lyon.key --certificates server.pem lyon.pem turin.pem rome.pem
    --server sums.example.org:7000

    Args:
        values: A .npy file of whole numbers [length].
        server: The server's address, host:port.
        out: Where to write the sum, a .npy file [length]; must not exist. It is made at once.
    """
    party = _agreed(**agreed)
    place = f"values is {str(values)!r}, which"
    with _files.reading(place, "give a .npy file of whole numbers"):
        vector = np.load(values, allow_pickle=False)
    if not isinstance(vector, np.ndarray):
        raise ValueError(f"{place} is an archive; give a .npy file")
    first = next(iter(party.roster))
    channel = party.channel({first: server}, None)
    with _written("sum", out, (0,)) as write:
        try:
            total = sums.join(party.terms, vector, channel, first, party.limits)
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
    """Secure sums between machines: serve, join.

    A server learns the sum of whole-number vectors and nothing else about them: the page 'A server
    and secure sums' of the manual says against whom. Parties know each other by the keys in their
    certificates, over TLS. Clients do not sign the keys of the protocol, so the server is trusted
    to follow it while these are collected. dpjax secagg serve --help has options and an example, as
    has join.

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
    arrays: list[np.ndarray] = []

    def write(array: np.ndarray) -> None:
        with _files.writing("out", path):
            _files.replace(path, lambda file: np.save(file, array))
        arrays.append(array)

    with _files.writing("out", path):
        # Made before any client is asked: a sum that cannot be written is lost.
        _files.create(path, lambda file: np.save(file, np.zeros(empty, np.int64)))
    try:
        yield write
    finally:
        if arrays:
            print(f"{content}: {path}", flush=True)
        else:
            # An empty file would look like a sum.
            path.unlink(missing_ok=True)
