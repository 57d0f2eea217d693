"""The server of a secure sum: a state machine without input or output.

    enrol(keys)  accept(number, shares)   accept(number, masked)   accept(number, answer)
    draw()       deliver()                request()                total()

A row above is called while a stage lasts, the one below ends it: by what has come until then. Under
``semi_malicious`` one more stage follows `request`, of confirmations, which `relay` ends.
"""

import random
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np

from dpjax.secagg import graph, primitives
from dpjax.secagg.messages import (
    NONCE_BYTES,
    ByNumber,
    Closed,
    Confirm,
    Confirmed,
    Delivery,
    Hello,
    Keys,
    MaskedVector,
    ProtocolMessage,
    Request,
    Roster,
    Shares,
    UnmaskingShares,
)
from dpjax.secagg.terms import Abort, Rejected, Terms

__all__ = ["Total"]


class Total(NamedTuple):
    """A secure sum.

    Attributes:
        values: [length] int64, the sum of the survivors' vectors; where the terms have no bound,
            the number around zero that is the sum modulo 2^bits.
        survivors: Their numbers.

    Example:
        >>> import numpy as np
        >>> from dpjax.secagg.server import Total
        >>> Total(np.array([4, 4]), survivors=(0, 2)).survivors
        (0, 2)
    """

    values: np.ndarray
    survivors: tuple[int, ...]


class SumServer:
    """The server in one aggregation.

    Guarantee: `total` gives the exact sum of the vectors of the survivors, who are at least the
    terms' minimum, or `Abort` is raised, here and in every call after. Every mask key that it
    rebuilds is held against the public key, every seed against its commitment, and every entry of
    the sum against survivors times bound. What it relies on is that clients mask their vectors as
    they say. A message that comes late, twice, from a stranger or from another aggregation raises
    `Rejected` and changes nothing.

    Args:
        terms: What all parties agreed on.
        generator: Draws the graph; None is the operating system's.

    Attributes:
        terms: The terms.
        hello: The first word to every client.
        stage: "enrol", "share", "mask", "confirm", "unmask" or "over".
        came: Messages of the one kind that the stage takes, by client.
    """

    def __init__(self, terms: Terms, generator: random.Random | None = None) -> None:
        self.terms = terms
        self.hello = Hello(secrets.token_bytes(NONCE_BYTES), terms.digest())
        self.stage = "enrol"
        self._generator = generator
        # Agreeing with it tells keys of low order, with which everybody agrees on zero.
        self._probe = primitives.key_pair()
        self._keys: list[tuple[bytes, bytes]] = []
        self._used: set[bytes] = set()
        self._dropped: set[int] = set()
        self.came: dict[int, Any] = {}
        self._reason = ""

    @property
    def enrolled(self) -> int:
        """How many clients have enrolled."""
        return len(self._keys)

    @property
    def ends(self) -> list[Callable[[], Mapping[int, ProtocolMessage]]]:
        """What ends each stage but the last one, with what is then said to clients."""
        confirm = [self.relay] if "confirm" in self.terms.stages else []
        return [self.draw, self.deliver, self.request, *confirm]

    @property
    def waiting(self) -> set[int]:
        """Clients from whom something may still come in this stage."""
        if self.stage == "enrol":
            return set(range(self.enrolled, self.terms.clients))
        if self.stage == "over":
            return set()
        return set(self._asked) - set(self.came) - self._dropped

    @property
    def ready(self) -> bool:
        """Whether the stage need not wait any longer: all have spoken, or every share is there."""
        return not self.waiting or (self.stage == "unmask" and not self._lacking)

    def leave(self, number: int) -> None:
        """Wait no longer for a client whose connection has ended.

        Args:
            number: The client's.
        """
        self._dropped.add(number)

    def end(self, reason: str) -> NoReturn:
        """End the aggregation without a sum.

        Args:
            reason: Why.
        """
        # The first reason stays, whatever is called after it.
        self._reason = self._reason or reason
        self.stage = "over"
        raise Abort(self._reason)

    def enrol(self, keys: Keys) -> int:
        """Take a client in and return its number.

        Args:
            keys: Its public keys.

        Raises:
            Rejected: For one that is late, of other terms or too many, and keys that are bad.
        """
        if self.stage != "enrol" or self.enrolled >= self.terms.clients:
            raise Rejected("enrolment is closed")
        # Of other terms a client would give its shares for fewer survivors.
        if (keys.nonce, keys.terms) != self.hello:
            raise Rejected("keys are for another aggregation, or other terms")
        pair = keys.channel, keys.mask
        if keys.channel == keys.mask or not self._used.isdisjoint(pair):
            raise Rejected("keys are in use")
        for key in pair:
            try:
                primitives.agreed(self._probe.private, key)
            except ValueError:
                raise Rejected("keys hold one of low order") from None
        self.came[self.enrolled] = keys
        self._keys.append(pair)
        self._used.update(pair)
        return self.enrolled - 1

    def draw(self) -> dict[int, Roster]:
        """End enrolment, draw the graph and return every client's roster.

        Raises:
            Abort: If too few enrolled.
        """
        self._leave("enrol")
        try:
            self.graph = self.terms.graph(self.enrolled)
        except ValueError as error:
            self.end(str(error))
        self._near = graph.harary(self.enrolled, self.graph.degree, self._generator)
        # Clients that were told different keys derive different ones: their masks do not cancel.
        transcript = primitives.transcript(self._keys)
        self._session = primitives.session(self.hello.nonce, self.hello.terms, transcript)
        self._ask("share", range(self.enrolled))
        rosters = {}
        for i, near in enumerate(self._near):
            keys = {j: b"".join(self._keys[j]) for j in near}
            rosters[i] = Roster(self.hello.nonce, i, self.enrolled, transcript, keys)
        return rosters

    def accept(self, number: int, message: ProtocolMessage) -> None:
        """Take a client's message of this stage.

        Args:
            number: Who sent it.
            message: Shares, a masked vector, confirmations or an answer.

        Raises:
            Rejected: For what does not belong here; nothing is changed then.
        """
        kinds = {
            "share": Shares,
            "mask": MaskedVector,
            "confirm": Confirm,
            "unmask": UnmaskingShares,
        }
        expected = kinds.get(self.stage)
        if expected is None or not isinstance(message, expected) or number not in self._asked:
            kind = type(message).__name__
            raise Rejected(f"{kind} of client {number} does not belong in the stage {self.stage}")
        if message.nonce != self.hello.nonce:
            raise Rejected(f"message of client {number} is of another aggregation")
        if number in self.came:
            raise Rejected(f"client {number} has sent this before")
        if isinstance(message, Shares) and set(message.sealed) != set(self._near[number]):
            raise Rejected(f"shares of client {number} are not for its neighbours")
        if isinstance(message, Confirm):
            neighbours = self._survivors & set(self._near[number])
            if set(message.confirmations) != neighbours:
                raise Rejected(f"confirmations of client {number} are not for its neighbours")
        if isinstance(message, MaskedVector):
            # Added up at once: a thousand vectors would take too much memory.
            try:
                vector = primitives.unpacked_vector(
                    message.vector, self.terms.length, self.terms.bits
                )
            except ValueError as error:
                raise Rejected(f"client {number}: {error}") from None
            self._sum += vector
            message = MaskedVector(message.nonce, b"")
        if isinstance(message, UnmaskingShares):
            self._count(number, message)
        self.came[number] = message

    def _count(self, number: int, message: UnmaskingShares) -> None:
        """Take note of whose secrets lack fewer shares now."""
        # One secret of each neighbour: a seed of a survivor, or a mask key of a dropout.
        near = set(self._near[number])
        seeds = near & self._survivors
        keys = near & self._dropouts
        if not (set(message.seeds) <= seeds and set(message.keys) <= keys):
            raise Rejected(f"answer of client {number} is not what was asked")
        for i in self._lacking.keys() & {*message.seeds, *message.keys}:
            self._lacking[i] -= 1
            if not self._lacking[i]:
                del self._lacking[i]

    def deliver(self) -> dict[int, Delivery]:
        """End sharing and return to everybody who shared what its neighbours sealed for it.

        Raises:
            Abort: If fewer than the minimum shared.
        """
        self._leave("share")
        self._enough("shared")
        shared = self.came
        self._shared = frozenset(shared)
        self._commitments = {i: message.commitment for i, message in shared.items()}
        self._sum = np.zeros(self.terms.length, np.uint64)
        self._ask("mask", self._shared)
        deliveries = {}
        for i in shared:
            sealed = {j: shared[j].sealed[i] for j in self._near[i] if j in shared}
            deliveries[i] = Delivery(self.hello.nonce, sealed)
        return deliveries

    def request(self) -> dict[int, Request]:
        """End masking and return to every survivor who survived and who dropped out.

        Raises:
            Abort: If fewer than the minimum survived.
        """
        self._leave("mask")
        self._enough("sent a vector")
        survivors = self._survivors = frozenset(self.came)
        self._dropouts = self._shared - survivors
        self._ask("confirm" if "confirm" in self.terms.stages else "unmask", survivors)
        # A dropout without a surviving neighbour left no mask in the sum.
        needed = [i for i in self._dropouts if not survivors.isdisjoint(self._near[i])]
        self._lacking = dict.fromkeys([*survivors, *needed], self.graph.threshold)
        request = Request(self.hello.nonce, survivors, self._dropouts)
        return dict.fromkeys(survivors, request)

    def relay(self) -> dict[int, Confirmed]:
        """End confirming and return to everybody who confirmed what its neighbours did.

        ``semi_malicious`` alone. Whoever has not confirmed has dropped out; its vector stays in.
        """
        self._leave("confirm")
        came = self.came
        self._ask("unmask", frozenset(came))
        relayed = {}
        for i in came:
            confirmations = {j: came[j].confirmations[i] for j in self._near[i] if j in came}
            relayed[i] = Confirmed(self.hello.nonce, confirmations)
        return relayed

    def total(self) -> Total:
        """End unmasking and return the sum.

        Raises:
            Abort: For fewer shares than the threshold of any secret, and for secrets that are not
                what clients committed to.
        """
        self._leave("unmask")
        answers = self.came
        bits = self.terms.bits
        total = self._sum
        for i in sorted(self._survivors):
            seeds = {j: answers[j].seeds for j in self._near[i] if j in answers}
            seed = self._rebuilt(f"seed of survivor {i}", seeds, i)
            # A wrong share would rebuild another seed, and another sum.
            if primitives.commitment(seed, i, self._session) != self._commitments[i]:
                self.end(f"seed of survivor {i} is not what it committed to: a share is wrong")
            self_key = primitives.self_key(seed, i, self._session)
            total = total - primitives.expand(self_key, self.terms.length, bits)
        for i in sorted(self._dropouts):
            near = [j for j in self._near[i] if j in self._survivors]
            if near:
                keys = {j: answers[j].keys for j in near if j in answers}
                private = self._rebuilt(f"mask key of dropout {i}", keys, i)
                # The dropout's own masks are what its neighbours' lack to cancel.
                pair_keys = self._pair_keys(i, private, near)
                total = primitives.with_pair_masks(total, pair_keys, i, bits)
        values = signed(total & primitives.low_bits(bits), bits)
        # A vector that was not masked as it was said leaves a mask in the sum.
        largest = len(self._survivors) * (self.terms.bound or 2**bits)
        if int(values.max()) > largest or int(values.min()) < -largest:
            self.end("the sum is beyond survivors times bound: a client did not mask as it said")
        # A second sum of the same vectors could show single ones.
        self.stage = "over"
        self._reason = "the sum has been given"
        return Total(values, tuple(sorted(self._survivors)))

    def closed(self, total: Total | None, reason: str = "") -> Closed:
        """Return the last word to every client.

        Args:
            total: The sum, if there is one.
            reason: Else, why not.
        """
        if total is None:
            return Closed(self.hello.nonce, reason[:2000] or "aborted", frozenset(), b"")
        # Modulo 2^bits: the messages have no signs.
        residues = total.values.astype(np.uint64) & primitives.low_bits(self.terms.bits)
        vector = primitives.packed_vector(residues, self.terms.bits)
        return Closed(self.hello.nonce, "", frozenset(total.survivors), vector)

    def _pair_keys(self, number: int, private: bytes, near: list[int]) -> ByNumber:
        """The keys of a dropout's masks with its surviving neighbours."""
        public = self._keys[number][1]
        if primitives.key_pair(private).public != public:
            self.end(f"mask key of dropout {number} is not its public key's: a share is wrong")
        keys = {}
        for j in near:
            peer = j, self._keys[j][1]
            keys[j] = primitives.mask_key(private, (number, public), peer, self._session)
        return keys

    def _rebuilt(self, name: str, answers: Mapping[int, ByNumber], number: int) -> bytes:
        """A client's secret, from the shares that its neighbours answered."""
        threshold = self.graph.threshold
        shares = {j + 1: row[number] for j, row in answers.items() if number in row}
        if len(shares) < threshold:
            self.end(f"{name} has {len(shares)} shares, fewer than the threshold {threshold}")
        # Any of them will do; weights are kept for the same points.
        points = sorted(shares)[:threshold]
        numbers = {point: int.from_bytes(shares[point], "big") for point in points}
        try:
            return primitives.join_shares(numbers).to_bytes(primitives.KEY_BYTES, "big")
        except OverflowError:
            self.end(f"{name} does not come out of its shares: one of them is wrong")

    def _enough(self, verb: str) -> None:
        """End below the fewest whose sum the terms open."""
        minimum = self.terms.minimum
        count = len(self.came)
        if count < minimum:
            self.end(f"{count} clients {verb}, fewer than the minimum {minimum}")

    def _ask(self, stage: str, clients: range | frozenset[int]) -> None:
        """Begin a stage, in which these clients are to speak."""
        self.stage = stage
        self._asked = frozenset(clients)
        self.came = {}

    def _leave(self, stage: str) -> None:
        """End a stage, if it is the one."""
        if self.stage != stage:
            self.end(f"the stage {stage} ended at {self.stage}")


def signed(residues: np.ndarray, bits: int) -> np.ndarray:
    """Return residues modulo 2^bits as whole numbers around zero, int64.

    Args:
        residues: From 0 to 2^bits - 1, uint64.
        bits: b.
    """
    # The sign bit is the highest of the word; an arithmetic shift copies it down.
    shift = 64 - bits
    return (residues << shift).view(np.int64) >> shift
