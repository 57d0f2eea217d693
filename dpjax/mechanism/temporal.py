"""Designs of the noise over rounds: strategies C, noise C^-1 z at each agent alone.

Guarantee: with standard deviation sigma * `sensitivity(C, participation)` at clip 1, an outsider
who sees every message of every round learns of one record what 1/sigma-GDP allows, for the
zero-out of that record in every round of its pattern (replacing it doubles the sensitivity), also
when gradients depend on what was sent before. `mafalda`, `prefix_sum`, `banded` and `toeplitz`
return strategies of sensitivity 1 for the participation that they are given, and for no other;
`identity` and `anti_pgd` are not scaled.
"""

import numpy as np
from jaxtyping import Float

from dpjax import _validate
from dpjax.mechanism import workload
from dpjax.mechanism.banded import banded, toeplitz
from dpjax.mechanism.epochs import (
    TemporalSolution,
    minimize_trace_epochs,
    objective,
    strategy_of,
)
from dpjax.mechanism.participation import Participation, checked
from dpjax.mechanism.sensitivity import sensitivity, sensitivity_is_exact

__all__ = [
    "TemporalSolution",
    "anti_pgd",
    "banded",
    "identity",
    "mafalda",
    "objective",
    "prefix_sum",
    "sensitivity",
    "sensitivity_is_exact",
    "solve",
    "strategy_of",
    "toeplitz",
    "workload_gram",
]

Mixing = Float[np.ndarray, "*p n n"]
Strategy = Float[np.ndarray, "t t"]


def identity(rounds: int) -> Strategy:
    """Return C = I: fresh noise in every round (DP-D-SGD). Sensitivity sqrt(epochs).

    Args:
        rounds: T.

    Raises:
        ValueError: for rounds below 1, or more than memory holds.

    Example:
        >>> from dpjax.mechanism import temporal
        >>> temporal.identity(2).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    _validate.rounds_in_memory(_validate.integer("rounds", rounds))
    return np.eye(rounds)


def anti_pgd(rounds: int) -> Strategy:
    """Return C = lower triangular ones: the noise of round t is z_t - z_{t-1} (Anti-PGD).

    Not scaled: its sensitivity grows with the rounds that are left, sqrt(T) for one appearance.

    Args:
        rounds: T.

    Raises:
        ValueError: for rounds below 1, or more than memory holds.

    Example:
        >>> from dpjax.mechanism import temporal
        >>> temporal.anti_pgd(3)
        array([[1., 0., 0.],
               [1., 1., 0.],
               [1., 1., 1.]])
    """
    _validate.rounds_in_memory(_validate.integer("rounds", rounds))
    return np.tri(rounds)


def prefix_sum(participation: Participation) -> Strategy:
    """Return the optimum for running sums, one trusted server's workload (D-MF).

    Args:
        participation: when a record appears; T = k b, or k = 1.

    Returns:
        [T, T] C, lower triangular with a positive diagonal, of sensitivity 1.

    Raises:
        ValueError: for another participation.

    Reference:
        Denisov et al. 2022; Choquette-Choo et al. 2022.

    Example:
        >>> from dpjax.mechanism import temporal
        >>> from dpjax.mechanism.participation import Participation
        >>> temporal.prefix_sum(Participation(4, 2, 2)).round(3)
        array([[ 0.667,  0.   ,  0.   ,  0.   ],
               [ 0.38 ,  0.705,  0.   ,  0.   ],
               [-0.017,  0.275,  0.606,  0.   ],
               [ 0.05 ,  0.   ,  0.2  ,  0.654]])
    """
    return solve(workload.prefix_sum(checked(participation).rounds), participation).strategy


def mafalda(mixing: Mixing, participation: Participation) -> Strategy:
    """Return the optimum for decentralized SGD with this mixing matrix (MAFALDA-SGD).

    min sensitivity(C)^2 ||L C^-1||_F^2,  L'L = H. It and its certificate, a lower bound on
    every strategy, are :func:`solve` of :func:`workload_gram`.

    Args:
        mixing: [n, n] W, or a schedule [P, n, n].
        participation: when a record appears; T = k b, or k = 1.

    Returns:
        [T, T] C, lower triangular with a positive diagonal, of sensitivity 1.

    Raises:
        ValueError: for another participation or a bad mixing matrix.

    Reference:
        "MAFALDA-SGD", eq. (11). Its Algorithm 1 leaves the sensitivity out of the noise's
        standard deviation, and its code factorises P with the wrong flip.

    Example:
        >>> from dpjax.mechanism import temporal
        >>> from dpjax.mechanism.participation import Participation
        >>> from dpjax.topology import graphs, mixing
        >>> weights = mixing.metropolis_hastings(graphs.ring(6))
        >>> temporal.mafalda(weights, Participation(4, 2, 2)).round(3)
        array([[ 0.684,  0.   ,  0.   ,  0.   ],
               [ 0.313,  0.714,  0.   ,  0.   ],
               [-0.012,  0.232,  0.634,  0.   ],
               [ 0.044,  0.   ,  0.173,  0.66 ]])
    """
    return solve(workload.gram(mixing, checked(participation).rounds), participation).strategy


def solve(
    gram: Float[np.ndarray, "t t"],
    participation: Participation,
    *,
    factor: Float[np.ndarray, "m t"] | None = None,
) -> TemporalSolution:
    """Return the strategy of least tr(H (C'C)^-1) at sensitivity 1, with its certificate.

    Args:
        gram: [T, T] H, from :func:`workload_gram` or any other workload.
        participation: when a record appears; T = k b, or k = 1.
        factor: [m, T] F with F'F = H where ``gram`` is that product as rounded; the bound then
            refers to F'F.

    Raises:
        ValueError: for another participation or a gram that is not positive semidefinite.
    """
    return minimize_trace_epochs(gram, participation, factor=factor)


def workload_gram(
    mixing: Mixing, rounds: int, *, covariance: Float[np.ndarray, "n n"] | None = None
) -> Float[np.ndarray, "t t"]:
    """Return H, where tr(H K) is the energy of noise with covariance K (x) R; `workload.gram`.

    Args:
        mixing: [n, n] W, or a schedule [P, n, n].
        rounds: T.
        covariance: [n, n] R over agents; None for I.

    Raises:
        ValueError: for a bad mixing matrix, covariance or rounds.

    Example:
        >>> import numpy as np
        >>> from dpjax.mechanism import temporal
        >>> temporal.workload_gram(np.eye(1), 3)
        array([[3., 2., 1.],
               [2., 2., 1.],
               [1., 1., 1.]])
    """
    return workload.gram(mixing, rounds, covariance=covariance)
