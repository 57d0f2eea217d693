"""A client of a secure sum: a state machine without input or output.

    greet(hello) -> keys     share(roster) -> shares     mask(delivery) -> masked
    unmask(request) -> answer

or, under ``semi_malicious``, instead of the last

    confirm(request) -> confirmations     unmask(confirmed) -> answer

Each is called once, in this order. Any other call ends the client, which then answers nothing.

``semi_malicious`` has a consistency check. A client seals a digest of its request, of survivors and
dropouts, for every neighbour that the request names as a survivor. It answers only if t neighbours,
the threshold of shares, confirmed the same request; the client itself does not count. It confirms
one request.

    k neighbours, X of them corrupt at most, 2 t > k + X (`dpjax.secagg.graph`): for an honest
    client j, of the k - X or more neighbours that are honest, each confirmed one request or none

    1. Who answers has no mask key rebuilt. An answer of j takes t confirmations of a request in
       which j survives, t - X of them honest. Its mask key takes t shares, t - X of them from
       honest neighbours whose request says that j dropped out. These are others: 2 t - 2 X <= k -
       X, so 2 t <= k + X. Neither are both secrets of j rebuilt, answered or not: the same count.
    2. No vector is opened alone. v's vector is under masks with t or more neighbours, or v ended;
       its seed takes t shares. So 2 t - k > X neighbours do both, one of them honest, j: it
       answered, so that its mask key is not rebuilt (1), nor is v's, whose seed is. The mask of v
       and j is then unknown, and leaves a sum only where both vectors are in it.

The server may choose each client's request and silence, the shares and confirmations that it
forwards, and the dropouts, knowing the graph. The keys and the graph are those of an honest start.
If shares were handed on honestly, v has t - X such neighbours, more than half of its honest ones;
without corrupt clients no ring with chords then falls into parts: a gap takes k/2 clients in a row
away from the client beside it, who keeps k/2 < t. With corrupt neighbours, who give shares and
hide nothing, chosen dropouts may part a ring, with a probability that is not held below 2^-40.

A client of an honest server has t confirming neighbours wherever its own secrets have t answering
ones, so a round within the dropouts aborts no more often than without this stage.

Reference:
    Bonawitz et al. (CCS 2017), Practical secure aggregation for privacy-preserving machine
    learning: survivors that sign who survived, there all of them; Bell et al. (CCS 2020).
"""

import hashlib
import secrets
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from dpjax import _validate
from dpjax.secagg import primitives
from dpjax.secagg.messages import (
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
    encoded,
)
from dpjax.secagg.server import Total, signed
from dpjax.secagg.terms import Abort, Terms

__all__ = ()

_Shares = tuple[bytes, bytes]
"""A neighbour's shares: of its seed, and of its mask key."""


class Client:
    """One client in one aggregation: its vector, its secrets, and its answers.

    The operating system draws both key pairs, the seed of the self mask and all shares for this
    aggregation. The channels' key encrypts shares and stays secret. The masks' key may be rebuilt
    if the client drops out, and then protects nothing, so the two are separate.

    Guarantee: its vector leaves it only under its self mask and a mask with every neighbour that
    finished sharing. It answers one request, of this aggregation, under four conditions: it is
    itself a survivor; there are at least the terms' minimum of survivors; no client is both
    survivor and dropout; every neighbour that finished sharing is one of the two. So it never
    gives both shares of one neighbour, whatever the server sends, and even if the server was
    restarted. Its own secrets have at least as many holders as the threshold, or it ends. Under
    ``semi_malicious`` it answers only a request that as many neighbours as the threshold confirmed,
    and confirms one.

    Args:
        terms: What all parties agreed on.
        values: [length] whole numbers from -bound to bound; from 0 to 2^bits - 1 without a bound.

    Attributes:
        terms: The terms.
        nonce: The number of the aggregation, once it is known.
        number: Its own number, once it has one.
        exposed: Whether its masked vector has gone out: the sum may be opened then.

    Raises:
        ValueError: For values that the terms do not hold.
    """

    def __init__(self, terms: Terms, values: Any) -> None:
        self.terms = terms
        # None once the vector has gone out under its masks.
        self._values: np.ndarray | None = _residues(terms, values)
        self._stage = "greet"
        self._stages = ("greet", *terms.stages[1:], "over")
        # Two pairs: the masks' key may be rebuilt, the channels' never.
        self._channel = primitives.key_pair()
        self._mask = primitives.key_pair()
        self._seed = secrets.token_bytes(primitives.KEY_BYTES)
        self._agreed: ByNumber = {}
        # By neighbour that finished sharing; None where what it sealed did not open.
        self._shares: dict[int, _Shares | None] = {}
        self._confirm_keys: dict[int, tuple[bytes, bytes]] = {}
        self._request: Request | None = None
        self.nonce = b""
        self.number = -1
        self.exposed = False

    @property
    def over(self) -> bool:
        """Whether it will say nothing more."""
        return self._stage == "over"

    def end(self, reason: str) -> NoReturn:
        """Forget all secrets and raise `Abort`.

        Args:
            reason: Why.
        """
        self._forget()
        raise Abort(reason, exposed=self.exposed)

    def greet(self, hello: Hello) -> Keys:
        """Return its public keys, for an aggregation under its own terms.

        Args:
            hello: The server's first word.

        Raises:
            Abort: For other terms, or out of order.
        """
        self._enter("greet")
        if hello.terms != self.terms.digest():
            self.end("the server's terms are not this client's; give both the same")
        self.nonce = hello.nonce
        return Keys(hello.nonce, hello.terms, self._channel.public, self._mask.public)

    def share(self, roster: Roster) -> Shares:
        """Return shares of its seed and of its mask key, sealed for each neighbour.

        Args:
            roster: Its number, its neighbours and their keys.

        Raises:
            Abort: For a roster that its terms do not give, or out of order.
        """
        self._enter("share", roster.nonce)
        self._check(roster)
        self.number = roster.number
        self._enrolled = roster.enrolled
        self._session = primitives.session(self.nonce, self.terms.digest(), roster.transcript)
        self._keys = {j: _halves(pair) for j, pair in roster.neighbours.items()}
        seeds = self._split(self._seed)
        keys = self._split(self._mask.private)
        sealed = {}
        for j in self._keys:
            words = primitives.channel_words(self.number, j, self._session)
            key = self._channel_key(j, sending=True)
            sealed[j] = primitives.sealed(key, seeds[j] + keys[j], words)
        # Whoever rebuilds the seed from wrong shares notices.
        commitment = primitives.commitment(self._seed, self.number, self._session)
        return Shares(self.nonce, commitment, sealed)

    def _split(self, secret: bytes) -> ByNumber:
        """A share of a secret for each neighbour."""
        # The share at 0 would be the secret itself, and numbers begin there.
        points = [j + 1 for j in self._keys]
        number = int.from_bytes(secret, "big")
        shares = primitives.split_secret(number, points, self._graph.threshold)
        return {j: shares[j + 1].to_bytes(primitives.SHARE_BYTES, "big") for j in self._keys}

    def mask(self, delivery: Delivery) -> MaskedVector:
        """Return its vector under its self mask and those with neighbours that finished sharing.

        What does not open is kept as missing: its sender gets no share from here.

        Args:
            delivery: What the neighbours sealed for it.

        Raises:
            Abort: For fewer neighbours than the threshold, for strangers, or out of order.
        """
        self._enter("mask", delivery.nonce)
        strangers = sorted(set(delivery.sealed) - set(self._keys))
        if strangers:
            self.end(f"delivery names {strangers[0]}, who is no neighbour")
        # Fewer holders than the threshold could not rebuild its secrets.
        if len(delivery.sealed) < self._graph.threshold:
            self.end(
                f"delivery has shares of {len(delivery.sealed)} neighbours, fewer than the "
                f"threshold {self._graph.threshold}"
            )
        for j, cipher in delivery.sealed.items():
            words = primitives.channel_words(j, self.number, self._session)
            plain = primitives.unsealed(self._channel_key(j, sending=False), cipher, words)
            self._shares[j] = None
            if plain is not None and len(plain) == 2 * primitives.SHARE_BYTES:
                self._shares[j] = _halves(plain)
        keys = {j: self._pair_key(j) for j in self._shares}
        self_mask_key = primitives.self_key(self._seed, self.number, self._session)
        assert self._values is not None
        bits = self.terms.bits
        vector = primitives.masked_vector(self._values, self_mask_key, keys, self.number, bits)
        if "confirm" in self._stages:
            # Made now: the channels' secrets are forgotten below.
            for j in self._shares:
                sending = self._channel_key(j, sending=True, purpose="confirmation")
                receiving = self._channel_key(j, sending=False, purpose="confirmation")
                self._confirm_keys[j] = sending, receiving
        self._forget_masking()
        # From here on the sum may be opened, whatever the client does.
        self.exposed = True
        return MaskedVector(self.nonce, primitives.packed_vector(vector, bits))

    def confirm(self, request: Request) -> Confirm:
        """Return a digest of a request, sealed for surviving neighbours; ``semi_malicious`` alone.

        Args:
            request: Who survived and who dropped out.

        Raises:
            Abort: For a request that it must not answer, a second one, or out of order.
        """
        self._enter("confirm", request.nonce)
        self._refuse(request)
        self._request = request
        plain = request_digest(request, self._session)
        sealed = {}
        for j in sorted(request.survivors & set(self._confirm_keys)):
            sending, _ = self._confirm_keys[j]
            sealed[j] = primitives.sealed(sending, plain, self._confirm_words(self.number, j))
        return Confirm(request.nonce, sealed)

    def unmask(self, message: Request | Confirmed) -> UnmaskingShares:
        """Return its shares of survivors' seeds and of dropouts' mask keys, once.

        Args:
            message: Who survived and who dropped out; under ``semi_malicious``, where that was
                confirmed before, what the neighbours confirmed.

        Raises:
            Abort: For a request that it must not answer, or that too few neighbours confirmed, a
                second one, or out of order.
        """
        self._enter("unmask", message.nonce)
        if isinstance(message, Confirmed):
            request = self._agreed_on(message)
        elif "confirm" in self._stages:
            self.end("request came in place of what the neighbours confirmed")
        else:
            request = message
            self._refuse(request)
        shares = {j: pair for j, pair in self._shares.items() if pair is not None}
        # Never both of one neighbour: no client is survivor and dropout.
        seeds = {j: seed for j, (seed, _) in shares.items() if j in request.survivors}
        keys = {j: key for j, (_, key) in shares.items() if j in request.dropouts}
        self._forget()
        return UnmaskingShares(request.nonce, seeds, keys)

    def _agreed_on(self, confirmed: Confirmed) -> Request:
        """The consistency check: its request, if enough neighbours confirmed the same; else end."""
        if self._request is None:
            self.end("confirmations came, and these terms have none")
        neighbours = self._request.survivors & set(self._shares)
        strangers = sorted(set(confirmed.confirmations) - neighbours)
        if strangers:
            self.end(f"confirmations name {strangers[0]}, who is no surviving neighbour")
        plain = request_digest(self._request, self._session)
        threshold = self._graph.threshold
        count = 0
        for j, cipher in confirmed.confirmations.items():
            _, receiving = self._confirm_keys[j]
            words = self._confirm_words(j, self.number)
            # What does not open, or is of another request, does not count.
            if primitives.unsealed(receiving, cipher, words) == plain:
                count += 1
        if count < threshold:
            self.end(
                f"{count} neighbours confirmed the same survivors and dropouts, fewer than the "
                f"threshold {threshold}: too many have left, or had another request"
            )
        return self._request

    def _refuse(self, request: Request) -> None:
        """End where an answer could say more than the sum of enough survivors."""
        survivors = request.survivors
        dropouts = request.dropouts
        # Both secrets of such a client would be rebuilt.
        twice = survivors & dropouts
        if twice:
            self.end(f"request names {min(twice)} as survivor and as dropout")
        # A client that answers has survived: its mask key must not be rebuilt.
        if self.number not in survivors:
            self.end("request leaves this client out of the survivors")
        if len(survivors) < self.terms.minimum:
            self.end(
                f"request names {len(survivors)} survivors, fewer than the minimum "
                f"{self.terms.minimum}"
            )
        named = survivors | dropouts
        if max(named) >= self._enrolled:
            self.end(f"request names {max(named)}, of {self._enrolled} clients")
        # A neighbour that is left out would keep its mask in the sum, with nobody to take it off.
        absent = set(self._keys) - set(self._shares)
        misfits = (set(self._shares) - named) | (absent & named)
        if misfits:
            fault = "named" if misfits & absent else "left out"
            self.end(
                f"request does not fit who finished sharing: neighbour {min(misfits)} is {fault}"
            )

    def _check(self, roster: Roster) -> None:
        """End where a roster is none of the terms, or holds a key twice."""
        try:
            self._graph = self.terms.graph(roster.enrolled)
        except ValueError as error:
            self.end(str(error))
        near = roster.neighbours
        degree = self._graph.degree
        if len(near) != degree:
            self.end(f"roster has {len(near)} neighbours, not the {degree} of its size")
        if roster.number in near or max(roster.number, *near) >= roster.enrolled:
            self.end("roster numbers clients wrongly")
        keys = [self._channel.public, self._mask.public]
        for pair in near.values():
            keys += _halves(pair)
        # One party that stands for two neighbours would hold two of their shares.
        if len(set(keys)) < len(keys):
            self.end("roster holds one public key twice")

    def _enter(self, stage: str, nonce: bytes | None = None) -> None:
        """Begin a stage; end at a message that is out of order, or of another aggregation."""
        # Also where these terms have no such stage.
        if self._stage != stage:
            self.end(
                f"message for the stage {stage} came at {self._stage}: answered once or out of "
                "order"
            )
        if nonce is not None and nonce != self.nonce:
            self.end("message is of another aggregation")
        self._stage = self._stages[self._stages.index(stage) + 1]

    def _channel_key(self, other: int, *, sending: bool, purpose: str = "channel") -> bytes:
        """The key of the one message to a neighbour, or from it."""
        public = self._keys[other][0]
        if other not in self._agreed:
            try:
                self._agreed[other] = primitives.agreed(self._channel.private, public)
            except ValueError:
                self.end(f"roster holds a public key of low order, of neighbour {other}")
        local = self.number, self._channel.public
        peer = other, public
        # The sender first: each end derives the key of either direction.
        ends = primitives.ends(local, peer) if sending else primitives.ends(peer, local)
        return primitives.derived(self._agreed[other], purpose, self._session, *ends)

    def _confirm_words(self, sender: int, receiver: int) -> bytes:
        return primitives.channel_words(sender, receiver, self._session, "confirmation")

    def _pair_key(self, other: int) -> bytes:
        """The key of the mask with a neighbour."""
        local = self.number, self._mask.public
        peer = other, self._keys[other][1]
        try:
            return primitives.mask_key(self._mask.private, local, peer, self._session)
        except ValueError:
            self.end(f"roster holds a public key of low order, of neighbour {other}")

    def _forget(self) -> None:
        """Drop every secret. Python may leave copies in memory, which nothing here can wipe."""
        self._stage = "over"
        self._shares = {}
        self._confirm_keys = {}
        self._forget_masking()

    def _forget_masking(self) -> None:
        """Drop what only its own vector's masks and its channels needed."""
        self._values = None
        self._seed = b""
        self._agreed = {}
        self._channel = self._mask = primitives.KeyPair(b"", b"")


def reply(client: Client, message: ProtocolMessage) -> ProtocolMessage:
    """Return what a client says to a message of the server.

    Args:
        client: The client.
        message: The message.

    Raises:
        Abort: If it says nothing.
    """
    answers: dict[type, Callable[[Any], ProtocolMessage]] = {
        Hello: client.greet,
        Roster: client.share,
        Delivery: client.mask,
        Request: client.confirm if "confirm" in client.terms.stages else client.unmask,
        Confirmed: client.unmask,
    }
    kind = type(message)
    if kind not in answers:
        client.end(f"the server sent {kind.__name__}, which is a client's to send")
    return answers[kind](message)


def total_of(client: Client, closed: Closed) -> Total:
    """Return the sum as the server tells it.

    Args:
        client: The client.
        closed: The server's last word.

    Raises:
        Abort: Where there is none.
    """
    terms = client.terms
    if closed.nonce != client.nonce:
        client.end("the last message is of another aggregation")
    if closed.reason or len(closed.survivors) < terms.minimum:
        client.end(f"the server ended the aggregation: {closed.reason or 'too few survivors'}")
    try:
        residues = primitives.unpacked_vector(closed.total, terms.length, terms.bits)
    except ValueError as error:
        client.end(f"the sum is none: {error}")
    return Total(signed(residues, terms.bits), tuple(sorted(closed.survivors)))


def _halves(pair: bytes) -> tuple[bytes, bytes]:
    """Two keys, or two shares, that stand behind each other in one string."""
    half = len(pair) // 2
    return pair[:half], pair[half:]


def _residues(terms: Terms, values: Any) -> np.ndarray:
    """A vector modulo 2^bits, refused where the terms do not hold it."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu" or array.shape != (terms.length,):
        raise ValueError(
            f"values are {array.dtype}{list(array.shape)}; give {terms.length} whole numbers"
        )
    if terms.bound is None:
        low = 0
        high = 2**terms.bits - 1
        limit = f"0 to {high}"
        remedy = f"give them modulo 2^{terms.bits}"
    else:
        low = -terms.bound
        high = terms.bound
        limit = f"bound {high}"
        remedy = "clip, or state a larger bound"
    # As Python's numbers: a comparison in NumPy may round 2^64 - 1.
    if int(array.max()) > high or int(array.min()) < low:
        entry = int(np.argmax((array > high) | (array < low)))
        value = _validate.shown(int(array[entry]))
        raise ValueError(f"values hold {value} at entry {entry}, beyond {limit}; {remedy}")
    return array.astype(np.uint64) & primitives.low_bits(terms.bits)


def request_digest(request: Request, session: bytes) -> bytes:
    """Return 32 bytes that name a request, of all survivors and dropouts, in an aggregation.

    Args:
        request: Who survived and who dropped out.
        session: 32 bytes.
    """
    return hashlib.sha256(primitives.LABEL + b"story" + session + encoded(request)).digest()
