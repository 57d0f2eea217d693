"""Sums without a server: partial sums up a spanning tree of the network, the total down again.

    up      p_i = message_i + sum of p_j over children j      to the parent
    down    p_root                                            to every child

Every agent ends with the very same bits, so that all replay one step from one total: the same
model, optimizer and sketch everywhere. Agents whose totals agree only nearly do not stay together.
Each learns a frame of its own then, what one sends is read through another's, and differences feed
on themselves (``experiments/dome_gossip.py`` measures it); gossip to within a rounding needs more
steps than the tree has levels, and still leaves some sums on both sides of a rounding. Mixing what
was decoded, as D-SGD does, would send d numbers a link again.

A round sends 2 (n - 1) vectors in all and takes twice as many hops as the tree has levels, where
D-SGD sends one over each direction of every link. Flooding, every message to everybody, needs no
tree and outlives links that fail, and sends n vectors over each link at least.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import networkx
import numpy as np
from jaxtyping import Array, Float

from dpjax import _validate
from dpjax._numerics import linked
from dpjax.protocols import Aggregator
from dpjax.topology import gossip

__all__ = ["Relayed", "spanning"]


@dataclass(frozen=True)
class Relayed(Aggregator):
    """The sum by relays on a tree, in place of a server's.

    Guarantee: none by itself, and none lost. Partial sums are functions of single messages, and
    single messages of partial sums (differences to those of the children): who listens on all links
    sees exactly what `dpjax.algorithms.exchange.Sum` shows. So messages need noise enough each,
    `dpjax.plans.noise.Independent`; noise in shares needs sums whose parts nobody sees, which
    relays are no protocol for.

    Attributes:
        parents: Of every agent, who its partial sum goes to; the root's own for the root
            (`spanning`).

    Raises:
        ValueError: For what is no tree.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.algorithms.relays import Relayed
        >>> path = Relayed(parents=(0, 0, 1))
        >>> total, present = path(jnp.array([[1.0], [2.0], [4.0]]))
        >>> total.tolist(), path.levels, path.vectors
        ([7.0], 2, 4)
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse what is no tree."""
        given: Any = self.parents
        if not isinstance(given, list | tuple) or not given:
            raise ValueError(f"parents is {_validate.shown(given)}; give spanning(mixing)")
        most = len(given) - 1
        parents = tuple(_validate.integer("parents", p, least=0, most=most) for p in given)
        object.__setattr__(self, "parents", parents)
        if sum(child == parent for child, parent in enumerate(parents)) != 1:
            raise ValueError(f"parents is {parents}, with not one root; give spanning(mixing)")
        if not self._descendants()[self.root].all():
            raise ValueError(f"parents is {parents}, which has a cycle; give spanning(mixing)")

    @property
    def root(self) -> int:
        """Who has the total first."""
        return next(child for child, parent in enumerate(self.parents) if child == parent)

    @property
    def levels(self) -> int:
        """Hops from the farthest agent to the root: a round takes twice as many."""
        return int(self._descendants().sum(axis=0).max()) - 1

    @property
    def vectors(self) -> int:
        """Vectors sent in a round over all links, partial sums and totals."""
        return 2 * (len(self.parents) - 1)

    def __call__(self, messages: Any) -> tuple[Any, Array]:
        """Sum over the agents, and their number."""
        total = jax.tree.map(lambda leaf: leaf[self.root], self._partial(messages))
        return total, jnp.float32(len(self.parents))

    def seen(self, messages: Any, total: Any) -> Any:
        """Partial sums on their way up, and the total."""
        return {"up": self._partial(messages), "down": total}

    def _partial(self, messages: Any) -> Any:
        """p_i of every agent, [n, ...]."""
        agents = len(jax.tree.leaves(messages)[0])
        if agents != len(self.parents):
            raise ValueError(
                f"parents names {len(self.parents)} agents, and {agents} send; give "
                "spanning(mixing) of the run's mixing matrix"
            )
        return gossip.mix(jnp.asarray(self._descendants(), jnp.float32), messages)

    def _descendants(self) -> Float[np.ndarray, "n n"]:
        """Whose messages are in whose partial sum."""
        found = np.eye(len(self.parents))
        for agent in range(len(self.parents)):
            above = agent
            for _ in self.parents:
                above = self.parents[above]
                found[above, agent] = 1
        return found


def spanning(mixing: Float[np.ndarray, "n n"]) -> tuple[int, ...]:
    """Return a spanning tree of a network, of the fewest levels: from a centre, breadth first.

    Public, like the network. Ties go to the first agent.

    Args:
        mixing: Mixing matrix, whose links go both ways.

    Raises:
        ValueError: For links that go one way, a schedule of matrices, or a network in parts.

    Example:
        >>> from dpjax.algorithms import relays
        >>> from dpjax.topology import graphs, mixing
        >>> relays.spanning(mixing.metropolis_hastings(graphs.path(3)))
        (1, 1, 1)
    """
    matrix = _validate.square("mixing", mixing)
    if ((matrix != 0) != (matrix.T != 0)).any():
        raise ValueError("mixing has links that go one way; give one whose links go both ways")
    graph = networkx.from_numpy_array(linked(matrix))
    if not networkx.is_connected(graph):
        raise ValueError("mixing has agents that no path joins; give a connected network")
    parents = dict(networkx.bfs_predecessors(graph, networkx.center(graph)[0]))
    return tuple(parents.get(agent, agent) for agent in graph)
