"""One story of who has left: what clients confirm to each other before they unmask anything.

Under ``semi_malicious`` a client that is told who survived and who dropped out, its story, seals a
digest of it for every neighbour that the story says survived, and answers only if t neighbours, the
threshold of shares, confirmed the very same one; itself does not count. It confirms one story.

    k neighbours, X of them corrupt at most, 2 t > k + X (`dpjax.secagg.graph`): for an honest
    client j, of the k - X or more neighbours that are honest, each confirmed one story or none

    1. Who answers has no mask key rebuilt. An answer of j takes t confirmations of a story in
       which j survives, t - X of them honest. Its mask key takes t shares, t - X of them from
       honest neighbours whose story says that j dropped out. These are others: 2 t - 2 X <= k - X,
       so 2 t <= k + X. Neither are both secrets of j rebuilt, answered or not: the same count.
    2. No vector is opened alone. v's vector is under masks with t or more neighbours, or v ended;
       its seed takes t shares. So 2 t - k > X neighbours do both, one of them honest, j: it
       answered, so that its mask key is not rebuilt (1), nor is v's, whose seed is. The mask of v
       and j is then unknown, and leaves a sum only where both vectors are in it.

The server may choose each client's story and silence, which shares and confirmations it hands on,
and whom it calls dropouts, knowing the graph; the keys and the graph are those of an honest start.
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

from dpjax.secagg import pairs, primitives
from dpjax.secagg.messages import Request, encoded

__all__: list[str] = []


def digest(request: Request, session: bytes) -> bytes:
    """Return 32 bytes that name a story, of all survivors and all dropouts, in an aggregation.

    Args:
        request: Who survived and who dropped out.
        session: 32 bytes.
    """
    return hashlib.sha256(primitives.LABEL + b"story" + session + encoded(request)).digest()


class Confirming:
    """A client's keys for its one confirmation to every neighbour, and theirs to it.

    Args:
        number: The client's.
        session: 32 bytes.
        keys: By neighbour, the key of what goes there and the key of what comes from there.
    """

    def __init__(self, number: int, session: bytes, keys: dict[int, tuple[bytes, bytes]]) -> None:
        self._number, self._session, self._keys = number, session, keys
        self._story = b""

    def told(self, request: Request) -> dict[int, bytes]:
        """Keep a story, and return it sealed for every neighbour that survived in it.

        Args:
            request: Who survived and who dropped out.
        """
        self._story = digest(request, self._session)
        return {
            j: primitives.sealed(sending, self._story, self._words(self._number, j))
            for j, (sending, _) in sorted(self._keys.items())
            if j in request.survivors
        }

    def same(self, sealed: dict[int, bytes]) -> set[int]:
        """Return the neighbours that confirmed the story that was kept.

        What does not open, or is of another story, does not count.

        Args:
            sealed: What they sealed for this client, by neighbour.
        """
        return {
            j
            for j, cipher in sealed.items()
            if j in self._keys
            and primitives.opened(self._keys[j][1], cipher, self._words(j, self._number))
            == self._story
        }

    def _words(self, sender: int, receiver: int) -> bytes:
        return pairs.channel_words(sender, receiver, self._session, "confirmation")
