"""The links of a mixing matrix: who sends to whom."""

import numpy as np
from jaxtyping import Bool, Float, Int

__all__ = ["copies", "incidence", "linked", "pairs"]


def linked(mixing: Float[np.ndarray, "*p n n"]) -> Bool[np.ndarray, "n n"]:
    """Return which pairs of agents ever exchange something, in either direction.

    Args:
        mixing: [n, n] W, or a schedule [P, n, n].
    """
    matrix = np.asarray(mixing)
    used = (matrix != 0).reshape(-1, *matrix.shape[-2:]).any(axis=0)
    return (used | used.T) & ~np.eye(len(used), dtype=bool)


def pairs(mixing: Float[np.ndarray, "*p n n"]) -> Int[np.ndarray, "e 2"]:
    """Return the links (i, j), i < j, in lexical order.

    Args:
        mixing: [n, n] W, or a schedule [P, n, n].
    """
    return np.argwhere(np.triu(linked(mixing)))


def incidence(ends: Int[np.ndarray, "e 2"], agents: int) -> Float[np.ndarray, "n e"]:
    """Return 1 at a link's first end and -1 at its second, a column each.

    Args:
        ends: Links.
        agents: n.
    """
    signs = np.zeros((agents, len(ends)))
    columns = np.arange(len(ends))
    signs[ends[:, 0], columns], signs[ends[:, 1], columns] = 1.0, -1.0
    return signs


def copies(mixing: Float[np.ndarray, "n n"]) -> tuple[Int[np.ndarray, " l"], Int[np.ndarray, " l"]]:
    """Return sender and receiver of every message of a round, own copies among them, by sender.

    Args:
        mixing: [n, n] W.
    """
    matrix = np.asarray(mixing)
    sender, receiver = np.nonzero(((matrix != 0) | np.eye(len(matrix), dtype=bool)).T)
    return sender, receiver
