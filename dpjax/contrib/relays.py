"""Sums without a server: partial sums go up a spanning tree, and the total goes down again.

    up      p_i = message_i + sum of p_j over children j      to the parent
    down    p_root                                            to every child

Every agent ends with the same bits, so that all replay one step from one total and have the same
model, optimizer and sketch. Agents whose totals agree only nearly would diverge: each would learn
another frame and decode messages of other frames, which enlarges the differences
(``experiments/dome_gossip.py`` measures it). Gossip to within a rounding needs more steps than the
tree has levels, and still leaves some sums on both sides of a rounding. Mixing decoded gradients,
as D-SGD does, would send d numbers on each link again.

A round sends 2 (n - 1) vectors in all and takes twice as many hops as the tree has levels; D-SGD
sends one vector over each direction of every link. Flooding sends every message to every agent. It
needs no tree and survives links that fail, but sends at least n vectors over each link.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import networkx
import numpy as np
from jaxtyping import Array

from dpjax import _validate
from dpjax.protocols import Aggregator, Message
from dpjax.topology import gossip
from dpjax.topology.links import adjacency
from dpjax.topology.mixing import SquareMatrix

__all__ = ["Relayed", "spanning"]


@dataclass(frozen=True)
class Relayed(Aggregator):
    """The sum by relays on a tree, without a server.

    Guarantee: none by itself, as for `dpjax.algorithms.exchange.Sum`. Partial sums are functions of
    single messages, and messages are differences of partial sums, so that an outsider sees exactly
    as much as under `Sum`. Each message therefore needs enough noise
    (`dpjax.plans.noise.Independent`). Noise in shares needs sums that hide their terms, which
    relays do not.

    Attributes:
        parents: The agent to which each agent sends its partial sum; the root's is itself
            (`spanning`).

    Raises:
        ValueError: For parents that form no tree.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.contrib.relays import Relayed
        >>> path = Relayed(parents=(0, 0, 1))
        >>> total, present = path(jnp.array([[1.0], [2.0], [4.0]]))
        >>> total.tolist(), path.levels, path.vectors
        ([7.0], 2, 4)
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that the parents form a tree."""
        parents: Any = self.parents
        if not isinstance(parents, list | tuple) or not parents:
            raise ValueError(f"parents is {_validate.shown(parents)}; give spanning(mixing)")
        last = len(parents) - 1
        parents = tuple(_validate.integer("parents", p, minimum=0, maximum=last) for p in parents)
        object.__setattr__(self, "parents", parents)
        # The root is its own parent.
        if sum(child == parent for child, parent in enumerate(parents)) != 1:
            raise ValueError(f"parents is {parents}, with not one root; give spanning(mixing)")
        if not self._descendants()[self.root].all():
            raise ValueError(f"parents is {parents}, which has a cycle; give spanning(mixing)")

    @property
    def root(self) -> int:
        """The agent that computes the total."""
        return next(child for child, parent in enumerate(self.parents) if child == parent)

    @property
    def levels(self) -> int:
        """Hops from the farthest agent to the root: a round takes twice as many."""
        return int(self._descendants().sum(axis=0).max()) - 1

    @property
    def vectors(self) -> int:
        """Vectors sent in a round over all links, partial sums and totals."""
        return 2 * (len(self.parents) - 1)

    def __call__(self, messages: Message) -> tuple[Message, Array]:
        """Sum over the agents, and their number."""
        total = jax.tree.map(lambda leaf: leaf[self.root], self._partial(messages))
        return total, jnp.float32(len(self.parents))

    def observed(self, messages: Message, total: Message) -> Message:
        """Partial sums on their way up, and the total."""
        # A relay sees the sum of its subtree, and all see the total on its way down.
        return {"up": self._partial(messages), "down": total}

    def _partial(self, messages: Message) -> Message:
        """p_i of every agent, [n, ...]."""
        agents = len(jax.tree.leaves(messages)[0])
        if agents != len(self.parents):
            raise ValueError(
                f"parents names {len(self.parents)} agents, and {agents} send; give "
                "spanning(mixing) of the run's mixing matrix"
            )
        return gossip.mix(jnp.asarray(self._descendants(), jnp.float32), messages)

    def _descendants(self) -> SquareMatrix:
        """The agents in each partial sum."""
        inside = np.eye(len(self.parents))
        for agent in range(len(self.parents)):
            above = agent
            for _ in self.parents:
                above = self.parents[above]
                # Climbed once for every agent: beyond the root this stays at the root.
                inside[above, agent] = 1
        return inside


def spanning(mixing: SquareMatrix) -> tuple[int, ...]:
    """Return a spanning tree of a network with the fewest levels: breadth first from a centre.

    The tree is public, like the network. Ties go to the first agent.

    Args:
        mixing: Mixing matrix with links in both directions.

    Raises:
        ValueError: For one-way links, a schedule of matrices, or a disconnected network.

    Example:
        >>> from dpjax.contrib import relays
        >>> from dpjax.topology import graphs, mixing
        >>> relays.spanning(mixing.metropolis_hastings(graphs.path(3)))
        (1, 1, 1)
    """
    matrix = _validate.square("mixing", mixing)
    if ((matrix != 0) != (matrix.T != 0)).any():
        raise ValueError("mixing has links that go one way; give one whose links go both ways")
    graph = networkx.from_numpy_array(adjacency(matrix))
    if not networkx.is_connected(graph):
        raise ValueError("mixing has agents that no path joins; give a connected network")
    # From the centre the tree has the fewest levels.
    edges = networkx.bfs_edges(graph, networkx.center(graph)[0])
    parents = {agent: parent for parent, agent in edges}
    return tuple(parents.get(agent, agent) for agent in graph)
