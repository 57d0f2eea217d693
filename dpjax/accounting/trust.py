"""A gossip algorithm under the three trust models: who sees what, and who knows which noise.

x_t are the models before round t's gradients, u_t = g_t + xi_t what agents add, K gossip steps:

    messages   W^k (D x_t + u_t), k = 0 .. K - 1        x_t+1 = W^K (D x_t + u_t)

D is the identity, or I - diag(curvature) where gradients are linear in the models. A strategy C
over rounds with few bands (or whose inverse has few) adds a few past noises to the state.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse.csgraph
from jaxtyping import Float

from dpjax.accounting import dense, kalman
from dpjax.accounting.attacker import View, ViewLoss
from dpjax.accounting.kalman import Model
from dpjax.mechanism import strategy as strategy_
from dpjax.mechanism.participation import Participation

__all__: list[str] = []

LARGEST_STATE = 1500
"""Numbers in the state beyond which a strategy takes the dense route."""


class Memory(NamedTuple):
    """A strategy as a recursion: xi_t = scale_t z_t + sum_k weights_t,k past_t,k.

    Attributes:
        scale: [P] factor of the fresh noise.
        weights: [P, width] of the past, most recent first.
        of_noise: True where the past is xi itself (C has few bands), False where it is the fresh
            noise (the inverse of C has few).
    """

    scale: Float[np.ndarray, " p"]
    weights: Float[np.ndarray, "p w"]
    of_noise: bool


class GossipRounds(NamedTuple):
    """An algorithm, less its noise.

    Attributes:
        mixing: [P, n, n] W of every round.
        steps: Gossip steps K a gradient.
        contraction: [n] diagonal of D.
    """

    mixing: Float[np.ndarray, "p n n"]
    steps: int
    contraction: Float[np.ndarray, " n"]


NO_MEMORY = Memory(np.ones(1), np.zeros((1, 0)), True)


def remember(strategy: Float[np.ndarray, "t t"]) -> Memory:
    """Write noise C^-1 Z as the recursion of least width.

    Args:
        strategy: [T, T] lower triangular C with a positive diagonal.

    Returns:
        The recursion, of period 1 where C is Toeplitz.
    """
    matrix = np.asarray(strategy)
    rounds = len(matrix)
    inverse = strategy_.sparse_inverse_of(matrix)
    diagonal = np.diag(matrix)
    of_noise = strategy_.width(matrix) <= strategy_.width(inverse)
    weights = strategy_.bands(-matrix / diagonal[:, None] if of_noise else inverse)
    constant = all(
        np.ptp(np.diag(matrix, -lag)) <= 1e-15 * np.abs(matrix).max() for lag in range(rounds)
    )
    if constant:
        # Before its first rounds the past is zero, so the late weights serve from the start.
        return Memory(1 / diagonal[:1], weights[-1:], of_noise)
    return Memory(1 / diagonal, weights, of_noise)


def model_of(
    gossip: GossipRounds,
    source: Float[np.ndarray, "n q"],
    seen: Float[np.ndarray, "p m n"],
    victims: Float[np.ndarray, " n"],
    memory: Memory = NO_MEMORY,
) -> Model:
    """State-space model of what an attacker does not know.

    An attacker receives all that its own models are made of, in every gossip step: these are
    known, and no part of the state.

    Args:
        gossip: The algorithm.
        source: [n, q] map of a round's fresh noise to the agents, without known columns.
        seen: [P, m, n] rows of the messages seen each round, zero rows where none.
        victims: [n] 1 for agents whose gradients are unknown, else 0.
        memory: The strategy over rounds.

    Returns:
        The model.

    Raises:
        ValueError: If the state would be too large.
    """
    n, width = source.shape[0], memory.weights.shape[1]
    size = n * (1 + width)
    if size > LARGEST_STATE:
        raise ValueError(
            f"strategy has {width} bands for {n} agents, a state of {size} numbers (at most "
            f"{LARGEST_STATE}); give a strategy of fewer bands"
        )
    period = math.lcm(len(gossip.mixing), len(seen), len(memory.scale))
    rounds = [_round(gossip, source, seen, victims, memory, t) for t in range(period)]
    return Model(*(np.stack(parts) for parts in zip(*rounds, strict=True)))


def _round(
    gossip: GossipRounds,
    source: Float[np.ndarray, "n q"],
    seen: Float[np.ndarray, "p m n"],
    victims: Float[np.ndarray, " n"],
    memory: Memory,
    t: int,
) -> tuple[np.ndarray, ...]:
    mixing = gossip.mixing[t % len(gossip.mixing)]
    rows = seen[t % len(seen)]
    n, width = source.shape[0], memory.weights.shape[1]
    scale = memory.scale[t % len(memory.scale)]
    weights = memory.weights[t % len(memory.weights)]
    # u_t less the gradients, as a function of the state (x, past noises).
    kind = source.dtype
    own = np.diag(gossip.contraction * victims)
    from_state = np.hstack([own, np.kron(weights[None], np.eye(n, dtype=kind))])
    observe, power = [], np.eye(n, dtype=kind)
    for _ in range(gossip.steps):
        observe.append(rows @ power)
        power = victims[:, None] * (mixing @ power)
    watch = np.concatenate(observe) * victims
    power = power * victims
    transition, noise = [power @ from_state], [power @ source * scale]
    if width:
        past = np.zeros((n, n * (1 + width)), kind)
        if memory.of_noise:
            past[:, n:] = from_state[:, n:]
        shift = np.eye(n * (width - 1), n * (1 + width), n, dtype=kind)
        transition += [past, shift]
        noise += [
            source * (scale if memory.of_noise else 1.0),
            np.zeros((n * (width - 1), source.shape[1]), kind),
        ]
    gradient = np.zeros((n * (1 + width), n), kind)
    gradient[:n] = power
    return (
        np.concatenate(transition),
        gradient,
        np.concatenate(noise),
        watch @ from_state,
        watch,
        watch @ source * scale,
    )


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
    source: Float[np.ndarray, "n q"]
    owners: tuple[frozenset[int], ...]
    secret: tuple[bool, ...]
    strategy: Float[np.ndarray, "t t"] | None = None

    @property
    def agents(self) -> int:
        """Number of agents n."""
        return len(self.source)

    def ldp(self) -> View:
        """An eavesdropper who sees every message and knows nothing else."""
        return self._view((), np.eye(self.agents)[None], [])

    def pndp(self, attackers: int | Collection[int]) -> View:
        """Nodes that see the messages they receive and know their own gradients and noise.

        Args:
            attackers: One node, or several who collude.

        Returns:
            The view. Pairwise secrets of an attacker are its own noise.

        Raises:
            ValueError: For a seed that every agent shares: the loss would be infinite.
        """
        nodes = nodes_of("attackers", attackers, self.agents)
        everyone = frozenset(range(self.agents))
        if self.agents > 2 and any(owner == everyone for owner in self.owners):
            raise ValueError(
                f"attackers are {list(nodes)}, who share the noise seed with all agents: the loss "
                "is infinite; use ldp(), or give subgroups with a seed each"
            )
        known = [k for k, owner in enumerate(self.owners) if owner & set(nodes)]
        return self._view(nodes, self._received(nodes), known)

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
        nodes = () if attackers is None else nodes_of("attackers", attackers, self.agents)
        rest = set(range(self.agents)) - set(nodes)
        kept = rest if protected is None else set(nodes_of("protected", protected, self.agents))
        if kept & set(nodes):
            raise ValueError(
                f"protected holds the attackers {sorted(kept & set(nodes))}, who know their own "
                "secrets; leave them out"
            )
        known = [
            k
            for k, (owner, secret) in enumerate(zip(self.owners, self.secret, strict=True))
            if owner & set(nodes) or (secret and not owner <= kept)
        ]
        seen = np.eye(self.agents)[None] if attackers is None else self._received(nodes)
        return self._view(nodes, seen, known)

    def _received(self, nodes: Sequence[int]) -> np.ndarray:
        """Rows of the messages that reach the nodes, by round; zero rows fill up."""
        reach = (self.gossip.mixing[:, list(nodes)] != 0).any(axis=1)
        senders = np.flatnonzero(reach.any(axis=0))
        # A few row counts only, so that views of different degrees share compiled code.
        count = min(self.agents, 1 << (len(senders) - 1).bit_length())
        seen = np.zeros((len(reach), count, self.agents))
        seen[:, np.arange(len(senders)), senders] = reach[:, senders]
        return seen if (reach != reach[0]).any() else seen[:1]

    def _view(self, nodes: tuple[int, ...], seen: np.ndarray, known: Sequence[int]) -> View:
        source = self.source.copy()
        source[:, list(known)] = 0.0
        victims = np.ones(self.agents)
        victims[list(nodes)] = 0.0
        strategy = self.strategy
        rounds = None if strategy is None else len(strategy)
        memory = NO_MEMORY if strategy is None else remember(strategy)
        width = memory.weights.shape[1]
        small = strategy is None or (
            width + 1 < len(strategy) and self.agents * (1 + width) <= LARGEST_STATE
        )

        parts = self.gossip, source, seen, victims, memory

        def model() -> Model:
            return model_of(*parts)

        def rational() -> Model:
            # In fractions, so that no product of the matrices given is rounded.
            whole: Any = np.frompyfunc(Fraction, 1, 1)
            mixing, steps, contraction = self.gossip
            gossip = GossipRounds(whole(mixing), steps, whole(contraction))
            past = Memory(whole(memory.scale), whole(memory.weights), memory.of_noise)
            return model_of(gossip, whole(source), whole(seen), whole(victims), past)

        def matrices(t: int, reduced: bool) -> tuple[np.ndarray, np.ndarray]:
            # Messages of u = g + xi, then xi = (C^-1 x source) z.
            unknown = victims if reduced else np.ones(self.agents)
            plain = model_of(self.gossip, source, seen, unknown)
            if strategy is None:
                a, b = dense.materialize(plain, t)
                return a * np.tile(victims, t), b
            whole, _ = dense.materialize(plain, t)
            inverse = strategy_.inverse_of(strategy)
            moved = np.tensordot(whole.reshape(-1, t, self.agents), source, 1)
            b = np.einsum("rtq,ts->rsq", moved, inverse)
            return whole * np.tile(victims, t), b.reshape(len(whole), -1)

        def all_messages(participation: Participation) -> ViewLoss:
            return _closed_form(source, strategy, participation)

        complete = not nodes and np.array_equal(seen, np.eye(self.agents)[None])
        route = model if small else None
        return View(
            self.agents,
            nodes,
            rounds,
            route,
            matrices,
            all_messages,
            complete,
            _rational=rational,
        )


def _closed_form(
    source: Float[np.ndarray, "n q"],
    strategy: Float[np.ndarray, "t t"] | None,
    participation: Participation,
) -> ViewLoss:
    """Loss when all messages are seen: they determine g_t + xi_t of every round.

    mu_u^2 = [(S S')^+]_uu max over patterns of sum |(C'C)_st|, S the unknown noise's map. Agents
    without a source in common are judged apart, each in units of its own noise.
    """
    n = len(source)
    size = np.abs(source).max(axis=1, initial=0.0)
    energy, open_ = np.full(n, np.inf), np.zeros(n, bool)
    noisy = np.flatnonzero(size)
    with np.errstate(over="ignore"):
        units = source[noisy] / size[noisy, None]
        norms = np.linalg.norm(units, axis=1)
        units /= norms[:, None]
        touching = (units != 0).astype(np.float64)
        _, part = scipy.sparse.csgraph.connected_components(touching @ touching.T)
        for block in (np.flatnonzero(part == k) for k in range(part.max(initial=-1) + 1)):
            own_energy, uncertain = _block_energy(units[block])
            members = noisy[block]
            energy[members] = own_energy / norms[block] ** 2 / size[members] ** 2
            open_[members] = uncertain
        mu = np.sqrt(energy) * _over_rounds(strategy, participation)
    return ViewLoss(mu, open_, "closed form", "any")


def _block_energy(units: Float[np.ndarray, "b q"]) -> tuple[np.ndarray, np.ndarray]:
    """[(S S')^-1]_uu for rows of norm 1, rounded up, and where rounding mattered."""
    count = len(units)
    u, values, _ = np.linalg.svd(units, full_matrices=True)
    values = np.pad(values[:count], (0, max(0, count - len(values))))
    kept = values > kalman.DROPPED * values[0]
    if not kept.all():
        # A combination without noise: whom it leaves alone, rounding cannot tell.
        leak = np.sqrt((u[:, ~kept] ** 2).sum(axis=1))
        return np.full(count, np.inf), leak < kalman.LEAK
    energy = ((u / values) ** 2).sum(axis=1)
    condition = float(values[0] / values[-1])
    if condition <= 1 / kalman.KEPT:
        return energy, np.zeros(count, bool)
    return energy * (1.0 + 1e3 * np.finfo(float).eps * condition), np.ones(count, bool)


def _over_rounds(strategy: Float[np.ndarray, "t t"] | None, participation: Participation) -> float:
    if strategy is None:
        return float(np.sqrt(participation.epochs))
    patterns = participation.patterns
    gram = np.abs(strategy.T @ strategy)
    return float(np.sqrt(gram[patterns[:, :, None], patterns[:, None, :]].sum((1, 2)).max()))


def nodes_of(name: str, chosen: Any, n: int) -> tuple[int, ...]:
    """Return one agent or several as a sorted tuple; ValueError for none, all, or no agent.

    Args:
        name: Of the argument, for the message.
        chosen: An agent or several.
        n: Number of agents.
    """
    if not isinstance(chosen, Collection):
        chosen = [chosen]
    nodes = list(chosen)
    for node in nodes:
        if isinstance(node, bool) or not isinstance(node, int | np.integer) or not 0 <= node < n:
            raise ValueError(f"{name} holds {node!r}; give agents of 0 .. {n - 1}")
    if not nodes and name == "attackers":
        raise ValueError("attackers is empty; give at least one agent, or use ldp()")
    if len(nodes) == n and name == "attackers":
        raise ValueError(f"attackers are all {n} agents; leave a victim")
    return tuple(sorted({int(node) for node in nodes}))
