"""Where the bound on a sensitivity is known to be attained."""

import numpy as np


def is_exact(strategy, participation):
    """Whether C'C has no negative entry, beyond rounding, on a pattern of the largest sum.

    Equal gradients then reach the bound.
    """
    size = np.abs(strategy)
    support = (strategy != 0).astype(float)
    gram = strategy.T @ strategy
    rounding = np.finfo(float).eps * (support.T @ support) * (size.T @ size)
    sums = []
    negative = []
    for rounds in participation.patterns:
        block = np.ix_(rounds, rounds)
        sums.append(np.abs(gram[block]).sum())
        negative.append((gram[block] < -2 * rounding[block]).any())
    return bool((~np.array(negative) & (np.array(sums) >= max(sums) * (1 - 1e-12))).any())
