"""Differences of models under Paillier's encryption, as the transport of a run.

For every link i-j and coordinate, in one round:

    i -> j    E_i(-x_i)
    j -> i    (E_i(x_j) E_i(-x_i))^b_ji E_i(e) = E_i(b_ji (x_j - x_i) + e)
    i         b_ij b_ji (x_j - x_i), added up over its neighbours

E_i is Paillier's cipher under i's key, b_ij is what i drew for the link and shows to nobody, and e
is a blur below half a grain of x_j's floating point. The arithmetic is phe's, by gmpy2: both come
with the extra ``secure``. phe is under the GPL, version 3; dpjax is not, and imports it where it is
used and nowhere else.

Reference:
    Paillier (1999), Public-key cryptosystems based on composite degree residuosity classes; Zhang
    and Wang (2019), Enabling privacy-preservation in decentralized optimization.
"""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from dpjax import _validate
from dpjax.secagg.encoding import FixedPoint, reals
from dpjax.secagg.parties import Agent, check_key_size

__all__ = ["Ciphertexts", "Crossed", "PaillierExchange"]


class Crossed(NamedTuple):
    """What crossed all links in one round.

    Attributes:
        round: Which, from 0.
        numbers: Ciphertexts.
        bytes: Their bytes: each is a number below n^2, sent at full length.
    """

    round: int
    numbers: int
    bytes: int


class Ciphertexts(NamedTuple):
    """One message, as whoever reads the link sees it.

    Attributes:
        sender: Agent.
        receiver: Agent.
        kind: A request, E_i(-x_i), or the answer to one.
        ciphertexts: A coordinate each.
    """

    sender: int
    receiver: int
    kind: Literal["request", "answer"]
    ciphertexts: tuple[int, ...]


class PaillierExchange:
    """sum_j b_ij b_ji (x_j - x_i) for all agents, no model and no weight of which crosses a link.

    ``run(plan, problem, seeds=[0], transport=PaillierExchange(links, n))`` carries the messages of
    `dpjax.algorithms.random_weights.Encrypted`, or of any method that sends a pair of a model and
    weights. Every agent's secrets are in an `Agent` of its own, which takes and gives ciphertexts.

    Guarantee: none of differential privacy, and none against neighbours who collude. Outsiders see
    Paillier ciphertexts, safe under the decisional composite residuosity assumption, for keys of
    2,048 bits (112 bits of security); agents follow the protocol. A neighbour learns the direction
    of x_j - x_i, since one b weighs all coordinates of a round, and its length times b. Values of a
    grid coarser than their dtype's, whole numbers say, may tell b. Powers are not computed in
    constant time. In a run of one process all of it is a simulation: keys come from the operating
    system, but weights from the message.

    Args:
        links: [e, 2] pairs of agents, each undirected link once.
        agents: How many agents n.
        key_size: Bits of every agent's modulus, even.
        code: Range and precision of fixed-point numbers.
        allow_weak: Whether keys below 1,024 bits pass: for tests, they are broken in practice.
        watch: Whether `seen` keeps the messages of the newest round.

    Attributes:
        agents: The agents.
        links: The links, sorted.
        key_size: Bits of a modulus.
        code: Fixed-point numbers.
        traffic: What crossed the links, a row a round delivered.
        seen: The messages of the newest round, if watched.

    Raises:
        ValueError: Without the extra ``secure``; for links that are none, and keys that are weak or
            too short for the code.
    """

    def __init__(
        self,
        links: Iterable[tuple[int, int]],
        agents: int,
        *,
        key_size: int = 2048,
        code: FixedPoint | None = None,
        allow_weak: bool = False,
        watch: bool = False,
    ) -> None:
        count = _validate.integer("agents", agents, least=2)
        self.code = FixedPoint() if code is None else code
        self.links = _checked_links(links, count)
        self.key_size = check_key_size(key_size, self.code, allow_weak)
        self._watch = _validate.flag("watch", watch)
        self.agents = [
            Agent(i, self.key_size, self.code, allow_weak=allow_weak) for i in range(count)
        ]
        for i, j in self.links:
            self.agents[i].meet(j, self.agents[j].modulus)
            self.agents[j].meet(i, self.agents[i].modulus)
        self.traffic: list[Crossed] = []
        self.seen: list[Ciphertexts] = []

    @property
    def late(self) -> int:
        """How many obfuscators were computed during rounds, not ahead."""
        return sum(agent.late for agent in self.agents)

    def prepare(self, numbers: int) -> None:
        """Compute obfuscators ahead: each is used once, and what lacks is computed in the round.

        Args:
            numbers: Coordinates of a model times rounds.
        """
        numbers = _validate.integer("numbers", numbers, least=0)
        for agent in self.agents:
            agent.prepare(numbers)

    def __call__(self, message: Any, round: int) -> Any:
        """Carry the messages of one round.

        Args:
            message: A pair: the model, a tree of arrays [n, ...], and weights [n, n] with b_ij in
                row i, 0 where no link is.
            round: Which round, from 0.

        Returns:
            A tree like the model: sum_j b_ij b_ji (x_j - x_i), [n, ...] in the model's dtypes.

        Raises:
            ValueError: For another message, or numbers that fixed point does not hold; nothing was
                sent then.
        """
        leaves, structure, weights = self._opened(message)
        n = len(self.agents)
        flat = np.concatenate([leaf.astype(np.float64).reshape(n, -1) for leaf in leaves], axis=1)
        grains = np.concatenate([_grains(leaf) for leaf in leaves], axis=1)
        for agent in self.agents:
            agent.begin(flat[agent.number], weights[agent.number], grains[agent.number])
        numbers, self.seen = 0, []
        for agent in self.agents:
            if not agent.neighbours:
                continue
            request = agent.request()
            for other in agent.neighbours:
                answer = self.agents[other].answer(agent.number, request)
                agent.receive(other, answer)
                numbers += len(request) + len(answer)
                if self._watch:
                    there = agent.number, other
                    self.seen.append(Ciphertexts(*there, "request", tuple(request)))
                    self.seen.append(Ciphertexts(*there[::-1], "answer", tuple(answer)))
        self.traffic.append(Crossed(round, numbers, numbers * (2 * self.key_size // 8)))
        pulled = np.stack([agent.pulled() for agent in self.agents])
        ends = np.cumsum([leaf[0].size for leaf in leaves])[:-1]
        parts = zip(np.split(pulled, ends, axis=1), leaves, strict=True)
        return jax.tree.unflatten(
            structure, [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in parts]
        )

    def _opened(self, message: Any) -> tuple[list[np.ndarray], Any, Float[np.ndarray, "n n"]]:
        """The model's leaves and structure, and the weights."""
        n = len(self.agents)
        if not isinstance(message, tuple) or len(message) != 2:
            raise ValueError(
                f"message is a {type(message).__name__}; give a pair of a model and weights"
            )
        leaves, structure = jax.tree.flatten(message[0])
        leaves = [np.asarray(leaf) for leaf in leaves]
        wrong = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves if not _is_model(leaf, n)]
        if wrong or not leaves:
            raise ValueError(
                f"message holds a model of {', '.join(wrong) or 'no arrays'}; give floats [n, ...] "
                f"of the {n} agents"
            )
        weights = reals("message's weights", message[1])
        if weights.shape != (n, n):
            raise ValueError(f"message holds weights {list(weights.shape)}; give [{n}, {n}]")
        return leaves, structure, weights


def _is_model(leaf: np.ndarray, agents: int) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, np.floating) and leaf.shape[:1] == (agents,)


def _grains(leaf: np.ndarray) -> Float[np.ndarray, "n d"]:
    """Distance of neighbouring floats at the largest entry of each agent's leaf.

    Smaller entries have smaller grains of their own, but where they are left of larger ones, as
    after a subtraction, they keep those of the larger ones.
    """
    flat = np.abs(leaf.astype(np.float64).reshape(len(leaf), -1))
    if not flat.size:
        return flat
    _, exponents = np.frexp(flat.max(axis=1, keepdims=True))
    grains = np.ldexp(float(jax.numpy.finfo(leaf.dtype).eps), exponents - 1)
    return np.broadcast_to(np.where(flat.max(axis=1, keepdims=True) > 0, grains, 0.0), flat.shape)


def _checked_links(links: Any, agents: int) -> list[tuple[int, int]]:
    """Links in order, lower end first."""
    try:
        pairs = np.asarray(list(links))
    except (TypeError, ValueError):
        raise ValueError(
            f"links is {_validate.shown(links)}; give pairs of agents' numbers"
        ) from None
    if pairs.size == 0:
        raise ValueError(f"links is {_validate.shown(links)}; give pairs of agents")
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
        raise ValueError(f"links is {_validate.shown(links)}; give pairs of agents' numbers")
    ends = [(min(i, j), max(i, j)) for i, j in pairs.tolist()]
    for i, j in ends:
        if i == j or i < 0 or j >= agents:
            raise ValueError(f"links holds {(i, j)}; give two of the agents 0 to {agents - 1}")
    if len(set(ends)) < len(ends):
        twice = next(each for each in ends if ends.count(each) > 1)
        raise ValueError(f"links holds {twice} twice; give each undirected link once")
    return sorted(ends)
