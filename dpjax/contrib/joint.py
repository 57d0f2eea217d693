"""What noise over rounds and agents costs, and what no covariance of both can beat."""

import numpy as np
import scipy.linalg
from jaxtyping import Float

from dpjax import _validate
from dpjax.mechanism import temporal, workload
from dpjax.mechanism.participation import Participation

__all__ = ["objective", "unrestricted_bound"]

_Mixing = Float[np.ndarray, "*p n n"]

_LARGEST = 2000
"""Most agents times rounds of :func:`unrestricted_bound`."""


def objective(
    mixing: _Mixing,
    strategy: Float[np.ndarray, "t t"],
    covariance: Float[np.ndarray, "n n"],
    participation: Participation,
) -> float:
    """Return sensitivity(C)^2 max_i [R^-1]_ii tr((C'C)^-1 H(R)), the same for every scale.

    Args:
        mixing: [n, n] W, or a schedule [P, n, n].
        strategy: [T, T] C, invertible.
        covariance: [n, n] R, positive definite.
        participation: when a record appears.

    Raises:
        ValueError: for shapes that do not fit, or a singular strategy or covariance.
    """
    matrix = _validate.square("covariance", covariance)
    gram = workload.gram(mixing, participation.rounds, covariance=matrix)
    try:
        lower = np.linalg.cholesky((matrix + matrix.T) / 2.0)
    except np.linalg.LinAlgError:
        raise ValueError("covariance is not positive definite; give one that is") from None
    whitener = scipy.linalg.solve_triangular(lower, np.eye(len(matrix)), lower=True)
    largest = float(np.sum(whitener**2, axis=0).max())
    return largest * temporal.objective(strategy, gram, participation)


def unrestricted_bound(mixing: _Mixing, participation: Participation) -> temporal.TemporalSolution:
    """Return the best noise of any covariance over rounds and agents together, nT x nT.

    The convex problem over precision matrices P [nT, nT] in which the records of agent i see the
    entries (s,i), (t,i) alone: sum_{s,t in pi} |P_(s,i)(t,i)| <= 1. Its ``lower_bound`` is below
    every design of sensitivity 1, K (x) R or not; what it is below the joint design's value is at
    most what that form gives away. The entry of round t and agent i is number t n + i, so that
    the patterns are those of n T rounds, n b apart.

    Args:
        mixing: [n, n] W, or a schedule [P, n, n].
        participation: when a record appears; T = k b, or k = 1.

    Returns:
        The solution, its strategy of nT rows. Minutes at nT = 1000.

    Raises:
        ValueError: for another participation, a bad mixing matrix, or n T above 2000.

    Example:
        >>> from dpjax.contrib import joint
        >>> from dpjax.mechanism.participation import Participation
        >>> from dpjax.topology import graphs, mixing
        >>> matrix = mixing.metropolis_hastings(graphs.ring(4))
        >>> round(joint.unrestricted_bound(matrix, Participation(2, 1, 2)).value, 2)
        2.31
    """
    schedule = workload.schedule_of(mixing)
    n = schedule.shape[-1]
    rounds = participation.rounds
    if n * rounds > _LARGEST:
        raise ValueError(
            f"participation has {rounds} rounds and mixing {n} agents; the unrestricted problem "
            f"is for agents times rounds up to {_LARGEST}: use fewer of either"
        )
    k = participation.epochs
    b = participation.separation
    if k > 1 and rounds != k * b:
        raise ValueError(
            f"participation is ({rounds}, {k}, {b}); the optimum is known for rounds = epochs * "
            f"separation (or one epoch): use {k * b} rounds, or change the others"
        )
    run = np.zeros((rounds, n, rounds, n))
    for t in range(rounds):
        if t:
            run[t] = run[t - 1]
        run[t, :, t, :] += np.eye(n)
        matrix = schedule[t % len(schedule)]
        run[t] = np.tensordot(matrix, run[t], axes=1)
    covariance = run.reshape(rounds * n, rounds * n)
    when = Participation(n * rounds, k, n * b)
    return temporal.solve(covariance.T @ covariance, when, factor=covariance)
