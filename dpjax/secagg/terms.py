"""What all parties of a secure sum agree on before it."""

import hashlib
from dataclasses import dataclass, fields
from typing import Literal

from dpjax import _validate
from dpjax.secagg import graph, primitives

__all__ = ["Abort", "Limits", "Terms"]


class Abort(Exception):
    """The aggregation ends without a sum.

    Attributes:
        reason: Why.
        exposed: On a client's side, whether its masked vector had gone out: then the sum may have
            been opened, and what it costs in privacy is spent.

    Example:
        >>> from dpjax.secagg.terms import Abort
        >>> Abort("too few clients are left", exposed=True).exposed
        True
    """

    def __init__(self, reason: str, *, exposed: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.exposed = exposed


class Rejected(Exception):
    """One message is not taken in; the aggregation goes on.

    Example:
        >>> from dpjax.secagg.terms import Rejected
        >>> raise Rejected("client 3 sent its keys twice")
        Traceback (most recent call last):
        dpjax.secagg.terms.Rejected: client 3 sent its keys twice
    """


@dataclass(frozen=True)
class Limits:
    """How long anybody waits, in seconds; each party has its own.

    Attributes:
        enrol: For clients to enrol, from the start of an aggregation; and a client for its server.
        stage: For each stage after it: three, or four under ``semi_malicious``.
        send: For one message to be taken by the other end.

    Raises:
        ValueError: For what is no time.

    Example:
        >>> from dpjax.secagg.terms import Limits
        >>> Limits(enrol=5.0, stage=10.0, send=1.0).total
        51.0
    """

    enrol: float = 60.0
    stage: float = 60.0
    send: float = 20.0

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        _validate.fields(self, _validate.positive, "enrol", "stage", "send")

    @property
    def total(self) -> float:
        """The longest that a client takes part: every stage there is, every message of it."""
        return self.enrol + 4 * self.stage + 6 * self.send


@dataclass(frozen=True)
class Terms:
    """The number of clients, the range of their vectors, and the adversary.

    Entries are whole numbers from -bound to bound, computed modulo 2^bits. Terms need
    clients bound < 2^(bits-1), so that a sum of at most ``clients`` vectors never wraps around.
    ``bound=None`` is for a caller whose code chooses the bits, for example with unbounded noise:
    entries are then from 0 to 2^bits - 1, and the sum is exact modulo 2^bits alone. The aggregation
    ends below ``minimum`` survivors, and clients give their shares for no fewer.

    Guarantee: none of differential privacy. The server follows the protocol and knows all that
    ``corrupt clients`` clients know, who follow it as well. It learns the sum of at least
    ``minimum`` survivors, and nothing else about honest inputs, except with a probability of 2^-40
    over the graph, if X25519, HKDF-SHA256, ChaCha20 and ChaCha20-Poly1305 are secure. Three things
    are not defended under either adversary. A server may deviate while keys are collected: no key
    is signed, so it can invent clients and stand between any two. Clients may send wrong values,
    which enter the sum. The names of the participants are public. ``semi_malicious`` defends
    against a server that is honest until then and later tells different clients different dropout
    sets: it cannot unmask a single client (`dpjax.secagg.client`).

    Args:
        clients: Most clients that may enrol, at least 3.
        length: Entries of a vector.
        bits: b, 2 to 64: of the modulus.
        bound: Largest absolute entry of a client's vector; None for sums modulo 2^bits.
        corrupt: Fraction of clients whose knowledge the server may have.
        dropout: Fraction of clients that may be missing, at any stage from enrolment on.
        adversary: "semi_honest" or "semi_malicious".

    Raises:
        ValueError: For sums that do not fit, and fractions that no graph carries.

    Example:
        >>> from dpjax.secagg.terms import Terms
        >>> terms = Terms(clients=100, length=4096, bits=32, bound=2**20)
        >>> terms.minimum, terms.graph(100).degree
        (95, 12)
    """

    clients: int
    length: int
    bits: int
    bound: int | None
    corrupt: float = 0.05
    dropout: float = 0.05
    adversary: Literal["semi_honest", "semi_malicious"] = "semi_honest"

    def __post_init__(self) -> None:
        """Refuse what cannot be summed or hidden."""
        check = _validate.integer
        _validate.fields(self, check, "clients", minimum=3, maximum=graph.MOST_CLIENTS)
        _validate.fields(self, check, "length", maximum=2**28)
        _validate.fields(self, check, "bits", minimum=2, maximum=primitives.MOST_BITS)
        for name in ("corrupt", "dropout"):
            graph.allowed_clients(self.clients, name, getattr(self, name))
            object.__setattr__(self, name, float(getattr(self, name)))
        if self.bound is not None:
            _validate.fields(self, check, "bound", maximum=2**63 - 1)
            if not self._fits(self.bound):
                raise ValueError(
                    f"bound is {self.bound}, and a sum of {self.clients} entries may reach "
                    f"{self.clients * self.bound}, beyond the {2 ** (self.bits - 1) - 1} of bits "
                    f"{self.bits}; give more bits or a smaller bound"
                )
        # Fractions that no graph carries are refused now, not when clients have enrolled.
        self.graph(self.clients)

    def _fits(self, bound: int) -> bool:
        # Numbers around zero: half of the residues are for those below it.
        return self.clients * bound < 2 ** (self.bits - 1)

    @property
    def minimum(self) -> int:
        """The fewest survivors whose sum is opened: clients less dropouts."""
        # A sum of one is its input.
        return max(2, self.clients - graph.allowed_clients(self.clients, "dropout", self.dropout))

    @property
    def colluders(self) -> int:
        """The most clients whose knowledge the server may have."""
        return graph.allowed_clients(self.clients, "corrupt", self.corrupt)

    @property
    def stages(self) -> tuple[str, ...]:
        """Stages of an aggregation, each of which a client may be the first to miss."""
        confirm = ("confirm",) if self.adversary == "semi_malicious" else ()
        return ("enrol", "share", "mask", *confirm, "unmask")

    def graph(self, enrolled: int) -> graph.Parameters:
        """Return the degree and the threshold for so many clients that enrolled.

        All that may be corrupt are taken to be among them, and as many may leave as the minimum
        lets.

        Args:
            enrolled: From the minimum, and 3, to ``clients``.

        Raises:
            ValueError: Where too few enrolled for any graph.
        """
        fewest = max(3, self.minimum)
        if not fewest <= enrolled <= self.clients:
            raise ValueError(
                f"enrolled is {enrolled}; from {fewest} to {self.clients} clients add up vectors "
                "under these terms"
            )
        spare = max(0, enrolled - self.minimum)
        return graph.of_counts(enrolled, self.colluders, spare, self.adversary)

    def digest(self) -> bytes:
        """Return 32 bytes that name these terms: who holds other terms is turned away."""
        # Part of the protocol: both ends must write the same text.
        pairs = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self)]
        text = ";".join(pairs)
        return hashlib.sha256(text.encode()).digest()

    def vector_bytes(self) -> int:
        """Return how many bytes a vector takes in a message."""
        return self.length * primitives.number_width(self.bits)
