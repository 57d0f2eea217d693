"""The links of a mixing matrix [n, n], or of a schedule [P, n, n]."""

from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Int

from dpjax.topology.mixing import DenseMixing, SquareMatrix

__all__ = ()

MessageEnds: TypeAlias = Int[np.ndarray, " l"]
LinkEnds: TypeAlias = Int[np.ndarray, "e 2"]


def adjacency(mixing: DenseMixing) -> Bool[np.ndarray, "n n"]:
    """Return which pairs of agents ever exchange something, in either direction."""
    matrix = np.asarray(mixing)
    n = matrix.shape[-1]
    # Over all matrices of a schedule.
    used = (matrix != 0).reshape(-1, n, n).any(axis=0)
    return (used | used.T) & ~np.eye(n, dtype=bool)


def link_pairs(mixing: DenseMixing) -> LinkEnds:
    """Return the links (i, j), i < j, in lexical order."""
    return np.argwhere(np.triu(adjacency(mixing)))


def incidence(ends: LinkEnds, agents: int) -> Float[np.ndarray, "n e"]:
    """Return 1 at a link's first end and -1 at its second, a column each."""
    # The noise of a link is added at one end and taken off at the other.
    signs = np.zeros((agents, len(ends)))
    columns = np.arange(len(ends))
    signs[ends[:, 0], columns] = 1.0
    signs[ends[:, 1], columns] = -1.0
    return signs


def message_pairs(mixing: SquareMatrix) -> tuple[MessageEnds, MessageEnds]:
    """Return sender and receiver of every message of a round, an agent's own copy included."""
    matrix = np.asarray(mixing)
    own_copies = np.eye(len(matrix), dtype=bool)
    # W_ij weighs what i receives of j.
    receives = (matrix != 0) | own_copies
    sender, receiver = np.nonzero(receives.T)
    return sender, receiver


def zero_sum_map(sender: MessageEnds, receiver: MessageEnds, over: str) -> SquareMatrix:
    """The map of standard normals to Zip-DL's noise on messages, at a deviation of 1.

    Args:
        sender: [L] agents.
        receiver: [L] agents; the sender for its own copy.
        over: "messages", or "with_own_copy" where own copies have noise, too.
    """
    noisy = (sender != receiver) | (over == "with_own_copy")
    same_sender = sender[:, None] == sender
    groups = same_sender & noisy[:, None] & noisy
    # Each normal less the mean of its sender's, so that a sender's noises sum to zero.
    counts = np.maximum(groups.sum(axis=1), 1)
    return np.diag(noisy.astype(np.float64)) - groups / counts[:, None]
