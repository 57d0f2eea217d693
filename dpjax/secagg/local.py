"""Secure sums with all parties in one process: for experiments, with clients that leave on the way.

The messages are those of the protocol, and every client has secrets of its own; but whoever holds
the process holds them all.
"""

import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dpjax import _validate
from dpjax.secagg.client import Client, reply
from dpjax.secagg.messages import Keys, ProtocolMessage, decoded, encoded
from dpjax.secagg.server import SumServer, Total
from dpjax.secagg.terms import Abort, Terms

__all__ = ["STAGES", "over_memory"]

STAGES = ("enrol", "share", "mask", "unmask")
"""When a client may leave: it sends nothing in that stage and after. Under ``semi_malicious``
"confirm" comes before the last one (``terms.stages``)."""

Leaves = Mapping[int, str] | None
"""The stage in which a client leaves, by its row."""


class Carried(NamedTuple):
    """A secure sum and what crossed for it.

    Attributes:
        total: The sum and its survivors, by their rows.
        received: Bytes from clients.
        sent: Bytes to clients.
        server: The process's own seconds for the server; of `over_memory` alone.
        clients: Those of all clients together.

    Example:
        >>> import numpy as np
        >>> from dpjax.secagg import local
        >>> from dpjax.secagg.terms import Terms
        >>> terms = Terms(clients=4, length=2, bits=32, bound=9, corrupt=0, dropout=0.25)
        >>> local.over_memory(terms, np.ones((4, 2), int)).total.values.tolist()
        [4, 4]
    """

    total: Total
    received: int
    sent: int
    server: float | None = None
    clients: float | None = None


def over_memory(
    terms: Terms,
    rows: np.ndarray,
    leaves: Leaves = None,
) -> Carried:
    """Return the sum of rows by the protocol, message by message, without a network.

    Args:
        terms: What all parties agreed on.
        rows: [n, length] whole numbers, a row a client.
        leaves: The stage in which a client leaves, by its row; nobody does if None.

    Returns:
        The sum, bytes as messages have them, and seconds.

    Raises:
        Abort: Where there is no sum.
        ValueError: For rows that the terms do not hold, and stages that are none.

    Example:
        >>> import numpy as np
        >>> from dpjax.secagg import local
        >>> from dpjax.secagg.terms import Terms
        >>> terms = Terms(clients=4, length=2, bits=32, bound=9, corrupt=0, dropout=0.25)
        >>> local.over_memory(terms, np.arange(8).reshape(4, 2), {3: "mask"}).total.values
        array([6, 9])
    """
    # Seconds of this process alone: waiting for a busy processor is not the protocol's.
    clock = time.process_time
    began = clock()
    clients, stays = parties(terms, rows, leaves)
    spent = clock() - began
    server = SumServer(terms)
    received = 0
    sent = 0

    def say(row: int, message: ProtocolMessage) -> ProtocolMessage | None:
        """What a client answers, message by message as bytes; None where it ends."""
        nonlocal received, sent, spent
        data = encoded(message)
        sent += len(data)
        before = clock()
        try:
            answer = encoded(reply(clients[row], decoded(data)))
        except Abort:
            return None
        finally:
            spent += clock() - before
        received += len(answer)
        return decoded(answer)

    enrolled = []
    for row in range(len(clients)):
        keys = say(row, server.hello) if stays[row] > 0 else None
        if isinstance(keys, Keys):
            server.enrol(keys)
            enrolled.append(row)
    for stage, end in enumerate(server.ends, start=1):
        for number, message in end().items():
            row = enrolled[number]
            if stays[row] <= stage:
                continue
            answer = say(row, message)
            if answer is not None:
                server.accept(number, answer)
    total = by_row(server.total(), clients)
    return Carried(total, received, sent, clock() - began - spent, spent)


def parties(terms: Terms, rows: np.ndarray, leaves: Leaves) -> tuple[list[Client], list[int]]:
    """Clients, and how many words each of them says."""
    values = np.asarray(rows)
    if values.ndim != 2 or len(values) > terms.clients:
        raise ValueError(
            f"rows have shape {values.shape}; give at most {terms.clients} of {terms.length} "
            "whole numbers"
        )
    stays = [len(terms.stages)] * len(values)
    for row, stage in (leaves or {}).items():
        row = _validate.integer("leaves", row, minimum=0, maximum=len(values) - 1)
        _validate.one_of("leaves", stage, terms.stages)
        stays[row] = terms.stages.index(stage)
    return [Client(terms, vector) for vector in values], stays


def by_row(total: Total, clients: list[Client]) -> Total:
    """A sum whose survivors are named by their rows, in place of numbers."""
    # A client that left before enrolment has no number.
    rows = {client.number: row for row, client in enumerate(clients) if client.number >= 0}
    return Total(total.values, tuple(sorted(rows[number] for number in total.survivors)))
