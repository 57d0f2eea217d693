"""A gossip algorithm under the three trust models: who sees what, and who knows which noise.

x_t are the models before round t's gradients, u_t = g_t + xi_t what agents add, K gossip steps:

    messages   W^k (D x_t + u_t), k = 0 .. K - 1        x_t+1 = W^K (D x_t + u_t)

D is the identity, or I - diag(curvature) where gradients are linear in the models. A strategy C
over rounds with few bands (or whose inverse has few) adds a few past noises to the state.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf, lcm
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import scipy.sparse.csgraph

from dpjax import _validate
from dpjax.accounting import dense, kalman
from dpjax.accounting.arrays import Ints, Matrix, Numbers, Sides, Vector
from dpjax.accounting.attacker import Judge, Judged, View, of_model, stated
from dpjax.accounting.kalman import Model
from dpjax.accounting.rounding import UNIT
from dpjax.mechanism import strategy as strategy_
from dpjax.mechanism.participation import Participation
from dpjax.mechanism.strategy import Strategy
from dpjax.topology.links import message_pairs

__all__ = ()

_Agents: TypeAlias = Sequence[int]

# Numbers in the state beyond which a strategy takes the dense route.
_LARGEST_STATE = 1500


class _StrategyMemory(NamedTuple):
    """A strategy as a recursion: xi_t = scale_t z_t + sum_k weights_t,k past_t,k.

    Attributes:
        scale: [P] factor of the fresh noise.
        weights: [P, width] of the past, most recent first.
        of_noise: True where the past is xi itself (C has few bands), False where it is the fresh
            noise (the inverse of C has few).
    """

    scale: Vector
    weights: Matrix
    of_noise: bool


class GossipRounds(NamedTuple):
    """An algorithm, less its noise.

    Attributes:
        mixing: [P, n, n] W of every round.
        steps: Gossip steps K a gradient.
        contraction: [n] diagonal of D.
    """

    mixing: Numbers
    steps: int
    contraction: Vector


_NO_MEMORY = _StrategyMemory(np.ones(1), np.zeros((1, 0)), True)


def remember(strategy: Strategy) -> _StrategyMemory:
    """Write noise C^-1 Z as the recursion of least width.

    Args:
        strategy: [T, T] lower triangular C with a positive diagonal.

    Returns:
        The recursion, of period 1 where C is Toeplitz.
    """
    matrix = np.asarray(strategy)
    rounds = len(matrix)
    inverse = strategy_.sparse_inverse_of(matrix)
    diagonal = matrix.diagonal()
    of_noise = strategy_.width(matrix) <= strategy_.width(inverse)
    weights = strategy_.bands(-matrix / diagonal[:, None] if of_noise else inverse)
    rounding = 1e-15 * abs(matrix).max()
    diagonals = [matrix.diagonal(-lag) for lag in range(rounds)]
    if all(np.ptp(entries) <= rounding for entries in diagonals):
        # Before its first rounds the past is zero, so the late weights serve from the start.
        return _StrategyMemory(1 / diagonal[:1], weights[-1:], of_noise)
    return _StrategyMemory(1 / diagonal, weights, of_noise)


def _model_of(
    gossip: GossipRounds,
    source: Matrix,
    observed: Numbers,
    victims: Vector,
    memory: _StrategyMemory = _NO_MEMORY,
) -> Model:
    """State-space model of what an attacker does not know.

    An attacker receives all that its own models are made of, in every gossip step: these are
    known, and no part of the state.

    Args:
        gossip: The algorithm.
        source: [n, q] map of a round's fresh noise to the agents, without known columns.
        observed: [P, m, n] rows of the messages seen each round, zero rows where none.
        victims: [n] 1 for agents whose gradients are unknown, else 0.
        memory: The strategy over rounds.

    Returns:
        The model.
    """
    n = len(source)
    kind = source.dtype
    size = n * (1 + memory.weights.shape[1])

    def matrices(t: int) -> tuple[Numbers, ...]:
        mixing = gossip.mixing[t % len(gossip.mixing)]
        rows = observed[t % len(observed)]
        scale = memory.scale[t % len(memory.scale)]
        weights = memory.weights[t % len(memory.weights)]
        # u_t less the gradients, as a function of the state (x, past noises).
        from_model = np.diag(gossip.contraction * victims)
        from_noise = np.kron(weights[None], np.eye(n, dtype=kind))
        from_state = np.hstack([from_model, from_noise])
        observe = []
        power = np.eye(n, dtype=kind)
        for _ in range(gossip.steps):
            observe.append(rows @ power)
            power = victims[:, None] * (mixing @ power)
        watch = np.concatenate(observe) * victims
        power = power * victims
        # The newest noise enters, older ones move back; without memory there is none.
        newest = slice(n, min(2 * n, size))
        transition = np.eye(size, k=-n, dtype=kind)
        transition[:n] = power @ from_state
        transition[newest] = 0
        gradient = np.zeros((size, n), kind)
        gradient[:n] = power
        noise = np.zeros((size, source.shape[1]), kind)
        noise[:n] = power @ source * scale
        if size > n:
            noise[newest] = source * scale if memory.of_noise else source
            if memory.of_noise:
                transition[newest, n:] = from_state[:, n:]
        return transition, gradient, noise, watch @ from_state, watch, watch @ source * scale

    period = lcm(len(gossip.mixing), len(observed), len(memory.scale))
    rounds = [matrices(t) for t in range(period)]
    return Model(*(np.stack(parts) for parts in zip(*rounds, strict=True)))


@dataclass(frozen=True, eq=False)
class LinearAlgorithm:
    """A gossip algorithm that waits for a trust model; made by `dsgd` and its like.

    Attributes:
        gossip: Mixing, gossip steps, contraction.
        source: [n, q] map of a round's fresh noise to the agents.
        owners: For each column, the agents who know it.
        secret: For each column, True where it is a pairwise secret.
        strategy: [T, T] C over rounds, or None.
    """

    gossip: GossipRounds
    source: Matrix
    owners: tuple[frozenset[int], ...]
    secret: tuple[bool, ...]
    strategy: Strategy | None = None

    @property
    def agents(self) -> int:
        """Number of agents n."""
        return int(self.gossip.mixing.shape[-1])

    def ldp(self) -> View:
        """An eavesdropper who sees every message and knows nothing else."""
        return self._view((), self._observed(None), [])

    def pndp(self, attackers: int | Collection[int]) -> View:
        """Nodes that see the messages they receive and know their own gradients and noise.

        Args:
            attackers: One node, or several who collude.

        Returns:
            The view. Pairwise secrets of an attacker are its own noise.

        Raises:
            ValueError: For a seed that every agent shares: the loss would be infinite.
        """
        nodes = _nodes_of("attackers", attackers, self.agents)
        everyone = frozenset(range(self.agents))
        if self.agents > 2 and any(owner == everyone for owner in self.owners):
            raise ValueError(
                f"attackers are {list(nodes)}, who share the noise seed with all agents: the loss "
                "is infinite; use ldp(), or give subgroups with a seed each"
            )
        known_columns = [k for k, owner in enumerate(self.owners) if owner & set(nodes)]
        return self._view(nodes, self._observed(nodes), known_columns)

    def secldp(
        self,
        attackers: int | Collection[int] | None = None,
        *,
        protected: Collection[int] | None = None,
    ) -> View:
        """An eavesdropper or nodes, who know every pairwise secret outside a protected set.

        Args:
            attackers: Nodes, who see what they receive and know their own gradients and noise;
                None for an eavesdropper of all messages.
            protected: Agents whose secrets among themselves stay unknown; None for all agents but
                the attackers.

        Returns:
            The view.

        Raises:
            ValueError: Without pairwise secrets, or for attackers who are protected.
        """
        if not any(self.secret):
            raise ValueError(
                "secldp() is about pairwise secrets, and this algorithm has none; use ldp() or "
                "pndp(), or give edge_noise"
            )
        nodes = None if attackers is None else _nodes_of("attackers", attackers, self.agents)
        inside = set(nodes or ())
        rest = set(range(self.agents)) - inside
        covered = rest if protected is None else set(_nodes_of("protected", protected, self.agents))
        if covered & inside:
            raise ValueError(
                f"protected holds the attackers {sorted(covered & inside)}, who know their own "
                "secrets; leave them out"
            )
        known_columns = []
        for column, owner in enumerate(self.owners):
            outside = self.secret[column] and not owner <= covered
            if owner & inside or outside:
                known_columns.append(column)
        return self._view(nodes or (), self._observed(nodes), known_columns)

    def _observed(self, nodes: _Agents | None) -> Numbers:
        """Rows of the messages that reach the nodes, by round; all messages where None."""
        if nodes is None:
            return np.eye(self.agents)[None]
        reach = (self.gossip.mixing[:, list(nodes)] != 0).any(axis=1)
        senders = np.flatnonzero(reach.any(axis=0))
        # A few row counts only, so that views of different degrees share compiled code.
        count = min(self.agents, 1 << (len(senders) - 1).bit_length())
        rows = np.zeros((len(reach), count, self.agents))
        rows[:, np.arange(len(senders)), senders] = reach[:, senders]
        return rows if (reach != reach[0]).any() else rows[:1]

    def _unknown(self, nodes: Ints, known_columns: _Agents) -> Sides:
        """The noise's map without known columns, and [n] 1 for victims, 0 for the nodes."""
        source = self.source.copy()
        victims = np.ones(self.agents)
        source[:, list(known_columns)] = 0.0
        victims[list(nodes)] = 0.0
        return source, victims

    def _view(self, nodes: Ints, observed: Numbers, known_columns: _Agents) -> View:
        source, victims = self._unknown(nodes, known_columns)
        strategy = self.strategy
        n = self.agents
        memory = _NO_MEMORY if strategy is None else remember(strategy)

        def rational() -> Model:
            # In fractions, so that no product of the matrices given is rounded.
            fractions: Any = np.frompyfunc(Fraction, 1, 1)
            mixing, steps, contraction = self.gossip
            gossip = GossipRounds(fractions(mixing), steps, fractions(contraction))
            past = _StrategyMemory(
                fractions(memory.scale), fractions(memory.weights), memory.of_noise
            )
            return _model_of(
                gossip, fractions(source), fractions(observed), fractions(victims), past
            )

        def matrices(t: int, unknown: Numbers) -> Sides:
            # Messages of u = g + xi, then xi = (C^-1 x source) z.
            a, b = dense.materialize(_model_of(self.gossip, source, observed, unknown), t)
            if strategy is not None:
                moved = np.tensordot(a.reshape(-1, t, n), source, 1)
                b = np.einsum("rtq,ts->rsq", moved, strategy_.inverse_of(strategy))
            return a * np.tile(victims, t), b.reshape(len(a), -1)

        def all_messages(participation: Participation) -> Judged:
            return _closed_form(source, strategy, participation)

        def by_rows(participation: Participation) -> Judged:
            energies = dense.energies(*matrices(participation.rounds, victims), participation)
            return stated(energies, participation, nodes, lambda: all_messages(participation)[0])

        # A filter's state holds the models and as many past noises as there are weights.
        past = memory.weights.shape[1]
        small = True
        rounds = None
        if strategy is not None:
            rounds = len(strategy)
            small = past + 1 < rounds and n * (1 + past) <= _LARGEST_STATE
        loss: Judge = by_rows
        if not nodes and np.array_equal(observed, np.eye(n)[None]):
            loss = all_messages
        elif small:
            parts = self.gossip, source, observed, victims, memory
            loss = of_model(lambda: _model_of(*parts), nodes, all_messages, rational=rational)
        return View(n, nodes, rounds, lambda t: matrices(t, np.ones(n)), loss, all_messages)


class LinearZipDL(LinearAlgorithm):
    """Zip-DL, waiting for a trust model; made by `zip_dl`. Its sources are those of messages."""

    def _observed(self, nodes: _Agents | None) -> Numbers:
        """Which messages; an eavesdropper does not see own copies, which are not sent."""
        sender, receiver = message_pairs(self.gossip.mixing[0])
        if nodes is None:
            return np.flatnonzero(sender != receiver)
        return np.flatnonzero(np.isin(receiver, nodes))

    def _view(self, nodes: Ints, observed: Numbers, known_columns: _Agents) -> View:
        noise, victims = self._unknown(nodes, known_columns)
        mixing = self.gossip.mixing[0]
        n = self.agents
        sender, receiver = message_pairs(mixing)
        gather = np.zeros((n, len(sender)))
        gather[receiver, np.arange(len(sender))] = mixing[receiver, sender]
        senders = np.eye(n)[sender[observed]]
        sent = noise[observed]
        # In units that make their noise whole numbers: those of a sender sum to zero exactly.
        units = np.maximum(np.count_nonzero(sent, axis=1), 1)[:, None]

        def model(hidden: Numbers, units: Any, sent_noise: Numbers) -> Model:
            flow = mixing * hidden[:, None]
            visible = senders * units
            entering = gather @ noise * hidden[:, None]
            return Model.of(
                flow * hidden,
                flow * victims,
                entering,
                visible * hidden,
                visible * victims,
                sent_noise,
            )

        def infinite(participation: Participation) -> Judged:
            # Seeing every message and own copy, the zero sum takes the noise away.
            return np.full(n, inf), np.zeros(n, bool)

        def matrices(rounds: int) -> Sides:
            return dense.materialize(model(np.ones(n), 1, sent), rounds)

        # An attacker receives all that its own model is made of, and knows it.
        unknown = model(victims, units, np.round(sent * units))
        loss = of_model(lambda: unknown, nodes, infinite, rational=lambda: unknown)
        return View(n, nodes, None, matrices, loss, infinite)


def _closed_form(
    source: Matrix,
    strategy: Strategy | None,
    participation: Participation,
) -> Judged:
    """Loss when all messages are seen: they determine g_t + xi_t of every round.

    mu_u^2 = [(S S')^+]_uu max over patterns of sum |(C'C)_st|, S the unknown noise's map. Agents
    without a source in common are judged apart, each in units of its own noise.
    """
    energy = np.full(len(source), inf)
    open_ = np.zeros(len(source), bool)
    noisy = np.flatnonzero(source.any(axis=1))
    touching = (source[noisy] != 0).astype(float)
    _, part = scipy.sparse.csgraph.connected_components(touching @ touching.T)
    once = Participation(1, 1, 1)
    judged = {}
    with np.errstate(over="ignore", invalid="ignore"):
        for number in np.unique(part):
            block = noisy[part == number]
            used = source[block][:, source[block].any(axis=0)]
            # Most networks have agents alone, all with the same noise.
            if (key := (used.shape, used.tobytes())) not in judged:
                judged[key] = dense.energies(np.eye(len(block)), used, once)
            energies = judged[key]
            if energies.hidden:
                # A combination without noise: whom it leaves alone, rounding cannot tell.
                open_[block] = energies.leak < kalman.LEAK
            else:
                uncertain = energies.condition > 1 / kalman.CERTAIN
                margin = 1e3 * UNIT * energies.condition * uncertain
                energy[block] = energies.values[0, 0] * (1.0 + margin)
                open_[block] = uncertain
        over_rounds: Any = participation.epochs
    if strategy is not None:
        patterns = participation.patterns
        gram = abs(strategy.T @ strategy)
        over_rounds = gram[patterns[:, :, None], patterns[:, None, :]].sum((1, 2)).max()
    return np.sqrt(energy) * np.sqrt(over_rounds), open_


def _nodes_of(name: str, numbers: Any, n: int) -> Ints:
    """Return one agent or several as a sorted tuple; ValueError for none, all, or no agent.

    Args:
        name: Of the argument, for the message.
        numbers: An agent or several.
        n: Number of agents.
    """
    numbers = numbers if isinstance(numbers, Collection) else [numbers]
    nodes = sorted(set(_validate.agents(name, numbers, maximum=n - 1)))
    if name == "attackers" and len(nodes) in (0, n):
        number = "all" if nodes else "none of"
        remedy = "give at least one, leave a victim"
        if n == 1:
            remedy = "one agent alone has outsiders as its attackers: take ldp"
        raise ValueError(f"attackers are {number} {n} agents; {remedy}")
    return tuple(nodes)
