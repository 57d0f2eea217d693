"""Zip-DL: another noise on each outgoing message, summing to zero over a node's messages."""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from dpjax import _numerics
from dpjax.accounting import dense
from dpjax.accounting.attacker import View, ViewLoss, of_model
from dpjax.accounting.kalman import Model
from dpjax.accounting.trust import nodes_of
from dpjax.mechanism.participation import Participation

__all__: list[str] = []


@dataclass(frozen=True, eq=False)
class ZipDLViews:
    """Zip-DL, waiting for a trust model; made by `zip_dl`."""

    mixing: Float[np.ndarray, "n n"]
    own_copy: bool

    def ldp(self) -> View:
        """An eavesdropper of every message on every link; own copies are not sent."""
        return self._view((), [(i, j) for i, j in self._links() if i != j])

    def pndp(self, attackers: int | Collection[int]) -> View:
        """Nodes that see the messages they receive and know their own gradients and noise."""
        nodes = nodes_of("attackers", attackers, len(self.mixing))
        return self._view(nodes, [(i, j) for i, j in self._links() if j in nodes])

    def secldp(self, *unused: Any, **also: Any) -> View:
        """Refused: Zip-DL has no pairwise secrets."""
        raise ValueError("secldp() is about pairwise secrets, and Zip-DL has none; use pndp()")

    def _links(self) -> list[tuple[int, int]]:
        """(sender, receiver), own copies among them, by sender."""
        return [
            (int(i), int(j)) for i, j in zip(*_numerics.message_pairs(self.mixing), strict=True)
        ]

    def _view(self, nodes: tuple[int, ...], seen: Sequence[tuple[int, int]]) -> View:
        n, links = len(self.mixing), self._links()
        at = {link: row for row, link in enumerate(links)}
        noise = np.zeros((len(links), len(links)))
        for i in range(n):
            rows = [at[a, b] for a, b in links if a == i and (a != b or self.own_copy)]
            if rows:
                noise[np.ix_(rows, rows)] = np.eye(len(rows)) - 1 / len(rows)
        gather = np.zeros((n, len(links)))
        for (i, j), row in at.items():
            gather[j, row] = self.mixing[j, i]
        known = [row for (i, _), row in at.items() if i in nodes]
        noise[:, known] = 0.0
        victims = np.ones(n)
        victims[list(nodes)] = 0.0
        rows = [at[link] for link in seen]
        senders = np.eye(n)[[i for i, _ in seen]]
        sent = Model.of(
            self.mixing,
            self.mixing * victims,
            gather @ noise,
            senders,
            senders * victims,
            noise[rows],
        )
        # For the loss: an attacker receives all that its own model is made of, and knows it.
        # Messages are in units that make their noise whole numbers, so that those of a sender
        # sum to zero exactly.
        counts = np.array([np.count_nonzero(noise[row]) for row in rows]).reshape(-1, 1)
        whole = np.maximum(counts, 1)
        unknown = victims[:, None]
        model = Model.of(
            self.mixing * unknown * victims,
            self.mixing * unknown * victims,
            gather @ noise * unknown,
            senders * victims * whole,
            senders * victims * whole,
            np.round(noise[rows] * whole),
        )

        def infinite(participation: Participation) -> ViewLoss:
            # Seeing every message and own copy, the zero sum takes the noise away.
            return ViewLoss(np.full(n, np.inf), np.zeros(n, bool), "closed form", "any")

        def matrices(rounds: int, reduced: bool) -> tuple[np.ndarray, np.ndarray]:
            return dense.materialize(model if reduced else sent, rounds)

        return dataclasses.replace(of_model(model, nodes, infinite), _matrices=matrices)
