"""Rounds of a secure sum without a network: who leaves when, and what the server sees."""

import random

import numpy as np

from dpjax.secagg.client import Client
from dpjax.secagg.messages import decoded, encoded
from dpjax.secagg.server import SumServer
from dpjax.secagg.terms import Abort, Terms

STAGES = ("enrol", "share", "mask", "unmask")
ALL_STAGES = ("enrol", "share", "mask", "confirm", "unmask")


class Trusting(Client):
    """A broken twin: it sends confirmations, and does not look at those of others."""

    def _agreed_on(self, confirmed):
        return self._request


def vectors(terms, seed=0):
    """Whole numbers over the whole range, ends included."""
    drawn = np.random.default_rng(seed)
    values = drawn.integers(-terms.bound, terms.bound, (terms.clients, terms.length), np.int64)
    values[drawn.random(values.shape) < 0.1] = terms.bound
    values[drawn.random(values.shape) < 0.1] = -terms.bound
    return values


class Round:
    """One aggregation whose messages all cross as bytes.

    Args:
        terms: Terms.
        values: [clients, length].
        leaves: The stage at which a client leaves, by its row: it sends nothing from then on.
        late: Rows whose masked vector comes after that stage has ended.
        client: Class of clients.
        server: Class of the server.
        seed: Of the graph.
    """

    def __init__(
        self, terms, values, leaves=None, late=(), client=Client, server=SumServer, seed=0
    ):
        self.leaves = dict(leaves or {})
        self.late = set(late)
        self.server = server(terms, random.Random(seed))
        self.clients = [client(terms, row) for row in values]
        self.values = np.asarray(values)
        self.numbers = {}
        self.seen = []
        self.aborted = []

    def here(self, row, stage):
        """Whether a client still takes part in a stage."""
        left = self.leaves.get(row)
        gone = left is not None and ALL_STAGES.index(left) <= ALL_STAGES.index(stage)
        return not gone and row not in self.aborted

    def crossed(self, message):
        """A message as it comes out of its bytes."""
        data = encoded(message)
        back = decoded(data)
        assert back == message
        self.seen.append(message)
        return back

    def told(self, row, act, message):
        """What a client says to a message; None if it ends."""
        try:
            return self.crossed(getattr(self.clients[row], act)(self.crossed(message)))
        except Abort:
            self.aborted.append(row)
            return None

    def enrol(self):
        for row in range(len(self.clients)):
            if self.here(row, "enrol"):
                keys = self.told(row, "greet", self.server.hello)
                self.numbers[row] = self.server.enrol(keys)
        return self.server.draw()

    def step(self, stage, act, messages):
        """One stage: what clients that are still here say to their messages."""
        for row, number in self.numbers.items():
            if number in messages and self.here(row, stage):
                answer = self.told(row, act, messages[number])
                late = stage == "mask" and row in self.late
                if answer is not None and not late:
                    self.server.accept(number, answer)

    def run(self):
        """The sum, or `Abort`."""
        self.step("share", "share", self.enrol())
        self.step("mask", "mask", self.server.deliver())
        reported = self.server.request()
        if "confirm" in self.server.terms.stages:
            self.step("confirm", "confirm", reported)
            reported = self.server.relay()
        self.step("unmask", "unmask", reported)
        return self.server.total()

    def survivors(self):
        """Rows whose masked vector came in time."""
        rows = [row for row in self.numbers if self.here(row, "mask")]
        return [row for row in rows if row not in self.late]

    def want(self):
        """The sum of the survivors' vectors, in whole numbers."""
        return self.values[self.survivors()].sum(axis=0)


def terms_for(clients, **options):
    """Terms of small vectors."""
    defaults = {"length": 5, "bits": 32, "bound": 1000, "corrupt": 0.0, "dropout": 0.0}
    return Terms(clients, **(defaults | options))
