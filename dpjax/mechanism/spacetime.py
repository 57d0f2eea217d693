"""Noise correlated over rounds and agents: covariance K (x) R, K = (C'C)^-1 over rounds.

Guarantee: the noise is sigma C^-1 Z R^1/2, Z standard normal [T, n], at clip 1. Against an outsider
who sees every message of every round it gives 1/sigma-GDP, for the zero-out of one record in every
round of its pattern; replacing it doubles the sensitivity. This also holds when gradients depend on
earlier messages. A record of agent i has sensitivity sqrt(sum_{s,t in pi} |(C'C)_st| [R^-1]_ii) on
whitened messages. It is the product of those over rounds and over agents, and both are 1.

All agents draw Z from one seed, and whoever holds it can subtract the noise. So there is no
guarantee against agents, alone or together.
"""

from typing import NamedTuple

import numpy as np

from dpjax import _validate
from dpjax.mechanism import strategy as strategy_
from dpjax.mechanism import temporal, workload
from dpjax.mechanism.certificate import Factor, relative_gap
from dpjax.mechanism.factorization import Device, factor_of, minimize_trace
from dpjax.mechanism.participation import Participation, check_participation
from dpjax.mechanism.strategy import Strategy
from dpjax.topology.mixing import DenseMixing, SquareMatrix

__all__ = ["JointDesign", "design"]

_BLOCK = 1 << 24  # float64 numbers in one block of flattened powers: 128 MiB


class JointDesign(NamedTuple):
    """A strategy over rounds and a covariance over agents, with their certificates.

    Attributes:
        strategy: [T, T] C, lower triangular with a positive diagonal, of sensitivity 1.
        covariance: [n, n] R with max [R^-1]_ii = 1 (below both by rounding's margin).
        value: the noise energy tr((C'C)^-1 H(R)): the expected squared noise, per coordinate,
            summed over all models of all agents and rounds, at sensitivity 1.
        strategy_bound: no strategy of sensitivity 1 has a smaller value with this covariance.
        covariance_bound: no covariance of sensitivity 1 has a smaller value with this strategy.
        history: the value after each half-step, C first; it never rises.
        converged: whether the last round of half-steps gained less than the tolerance.

    Example:
        >>> from dpjax.mechanism import spacetime
        >>> from dpjax.mechanism.participation import Participation
        >>> from dpjax.topology import graphs, mixing
        >>> W = mixing.metropolis_hastings(graphs.ring(3))
        >>> joint = spacetime.design(W, Participation(4, 1, 4))
        >>> joint.strategy.shape, joint.covariance.shape, joint.gap < 1e-3
        ((4, 4), (3, 3), True)
    """

    strategy: Strategy
    covariance: SquareMatrix
    value: float
    strategy_bound: float
    covariance_bound: float
    history: tuple[float, ...]
    converged: bool

    @property
    def gap(self) -> float:
        """The largest relative gain of changing one of the two alone."""
        return relative_gap(self.value, min(self.strategy_bound, self.covariance_bound))


def design(
    mixing: DenseMixing,
    participation: Participation,
    *,
    tolerance: float = 1e-9,
    max_iterations: int = 50,
    device: Device = None,
) -> JointDesign:
    """Return the strategy and covariance of least noise energy, both of sensitivity 1.

    min tr((C'C)^-1 H(R)),  sensitivity(C) <= 1,  [R^-1]_ii <= 1

    Alternates between the best C for R (`temporal.solve` of H(R)) and the best R for C
    (`factorization.minimize_trace` of :func:`factor_over_agents`), from R = I. Each half-step is
    convex and certified. With one participation both together are convex along geodesics of
    positive definite matrices: so are tr(A (P (x) Q)^-1) for A >= 0 and the diagonals in the
    constraints; alternation is then not caught in a local optimum. With several, whose bound sums
    absolute values, that is not proved. What the form K (x) R itself gives away is measured in
    ``experiments/spacetime_tradeoff.py``.

    Args:
        mixing: [n, n] W, or a schedule [P, n, n].
        participation: when a record appears; T = k b, or k = 1.
        tolerance: relative decrease over both half-steps at which to stop.
        max_iterations: most rounds of two half-steps.
        device: the JAX device of both solvers; None is JAX's default.

    Returns:
        The design, without a guarantee towards the agents themselves: they share the seed.

    Raises:
        ValueError: for another participation, a bad mixing matrix or a bad option.

    Example:
        >>> from dpjax.mechanism import spacetime
        >>> from dpjax.mechanism.participation import Participation
        >>> from dpjax.topology import graphs, mixing
        >>> weights = mixing.metropolis_hastings(graphs.ring(6))
        >>> design = spacetime.design(weights, Participation(4, 2, 2))
        >>> round(float(design.value), 3), design.converged
        (14.19, True)
    """
    tolerance = _validate.positive("tolerance", tolerance)
    max_iterations = _validate.integer("max_iterations", max_iterations)
    schedule = workload.schedule_of(mixing)
    rounds = _validate.rounds_in_memory(check_participation(participation).rounds)
    gram = workload.gram_of(schedule, rounds)
    time = temporal.solve(gram, participation, device=device)
    strategy = time.strategy
    history = [time.value]
    covariance = np.eye(schedule.shape[-1])
    covariance_bound = 0.0
    multipliers = None
    converged = False
    for _ in range(max_iterations):
        before = history[-1]
        root = factor_over_agents(schedule, strategy)
        space = minimize_trace(factor=root, warm_start=multipliers, device=device)
        multipliers = space.multipliers
        covariance_bound = space.lower_bound
        # Rounding may make a half-step worse: then the last covariance stays.
        if space.value < history[-1]:
            covariance = space.covariance
            history.append(space.value)
        gram = workload.gram_of(schedule, rounds, np.ascontiguousarray(factor_of(covariance).T))
        time = temporal.solve(gram, participation, device=device)
        # The last strategy is not taken: both bounds then speak of the pair that is returned.
        if not time.value < before * (1.0 - tolerance):
            converged = True
            break
        if time.value < history[-1]:
            strategy = time.strategy
            history.append(time.value)
    # The bound over agents is then of an older strategy: solve for the last one.
    if not converged:
        covariance_bound = minimize_trace(
            factor=factor_over_agents(schedule, strategy), warm_start=multipliers
        ).lower_bound
    bounds = time.lower_bound, covariance_bound
    return JointDesign(strategy, covariance, history[-1], *bounds, tuple(history), converged)


def factor_over_agents(schedule: workload.MixingSchedule, strategy: Strategy) -> Factor:
    """Return F with F'F = M, where tr(M R) is the energy of noise with covariance (C'C)^-1 (x) R.

    M = sum_{s,t} K_st sum_{tau >= max(s,t)} (W^{tau-t+1})' W^{tau-s+1},  K = (C'C)^-1; C = I
    gives the horizon-aware objective of `workload.factor`. Nothing larger than [T, n^2] is
    formed, a block of rows at a time: with Z_s = W'(I + Z_{s+1}) W the sum over tau is
    (W^{s-t})' Z_s for t <= s.

    Args:
        schedule: [P, n, n] W_{s mod P} of round s, from 0, from `workload.schedule_of`.
        strategy: [T, T] C, lower triangular with a nonzero diagonal.

    Returns:
        [n, n] float64.
    """
    inverse = strategy_.inverse_of(strategy)
    if len(schedule) == 1 and np.array_equal(schedule[0], schedule[0].T):
        return _spectral(schedule[0], inverse)
    return factor_of(_by_powers(schedule, inverse @ inverse.T))


def _spectral(matrix: SquareMatrix, inverse: Strategy) -> SquareMatrix:
    """M = U diag(m) U', m_i a sum of squares: the noise of round j in the models of round t."""
    values, vectors = np.linalg.eigh(matrix)
    total = np.zeros(len(values))
    response = np.zeros((len(values), len(inverse)))
    for row in inverse:
        # The noise of this round joins what earlier rounds left, and W applies.
        response = values[:, None] * (response + row)
        total += np.sum(response**2, axis=1)
    return np.sqrt(total)[:, None] * vectors.T


def _by_powers(schedule: workload.MixingSchedule, over_rounds: workload.Gram) -> SquareMatrix:
    """M = sum_s F_s' Z_s + its transpose, F_s = K_ss I / 2 + sum_{t<s} K_st W_{s-1} .. W_t."""
    period, n, _ = schedule.shape
    rounds = len(over_rounds)
    # delayed[s, a] = K_{s, s-a}; the products of a factors that end in round s - 1 are shared
    # by the rounds of one residue.
    s, a = np.indices((rounds, rounds))
    delayed = np.where(a <= s, over_rounds[s, np.maximum(s - a, 0)], 0.0)
    delayed[:, 0] /= 2.0
    total = np.zeros((n, n))
    # A block of rows at a time bounds the memory of all powers.
    size = max(1, min(n, _BLOCK // (rounds * n)))
    for first in range(0, n, size):
        picked = slice(first, min(first + size, n))
        response = np.empty((rounds, picked.stop - first, n))
        for phase in range(min(period, rounds)):
            rows = np.eye(n)[picked]
            stacked = np.empty((rounds, rows.size))
            for factors in range(rounds):
                stacked[factors] = rows.ravel()
                rows = rows @ schedule[(phase - 1 - factors) % period]
            times = np.arange(phase, rounds, period)
            response[times] = (delayed[times] @ stacked).reshape(len(times), *rows.shape)
        tail = np.zeros((n, n))
        for r in range(rounds - 1, -1, -1):
            matrix = schedule[r % period]
            tail = matrix.T @ (matrix + tail @ matrix)
            total += response[r].T @ tail[picked]
    return total + total.T
