"""What noise costs a run: the Gram H over its rounds, and factors of the matrix M over its agents.

Noise V_s added in round s reaches the models of round t as W^{t-s+1} V_s (the loss counts models
after gossip, hence the +1). The matrix of that map is nT x nT and is never formed: H is a sum
along diagonals of the T x T products of powers, and factors of M are built by orthogonal
transformations of stacked factors, never from M, so that they keep twice its digits.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from jaxtyping import Float
from scipy.sparse import csgraph, csr_array, issparse

from dpjax import _validate
from dpjax.mechanism.certificate import Factor, Vector, eigen
from dpjax.mechanism.factorization import compressed, factor_of
from dpjax.topology import mixing as mixing_
from dpjax.topology.mixing import DenseMixing, HashableMatrix, Mixing, SquareMatrix

__all__ = ()

Gram: TypeAlias = Float[np.ndarray, "t t"]
MixingSchedule: TypeAlias = Float[np.ndarray, "p n n"]
StepSizes: TypeAlias = Float[np.ndarray, " t"] | None
_Operation: TypeAlias = Callable[..., np.ndarray]
# Weights d with d_i W_ij = d_j W_ji count as exact up to what their products round to; a wider
# spread of d would cost the digits that the eigenvalues of the symmetrised W bring.
_REVERSIBLE = 1e-12
_LARGEST_SPREAD = 1e6
_BLOCK = 1 << 25  # float64 numbers in one block of flattened powers: 256 MiB


def gram(
    mixing: DenseMixing,
    rounds: int,
    *,
    covariance: SquareMatrix | None = None,
) -> Gram:
    """Return H, where tr(H K) is the energy over all models of noise with covariance K (x) R.

    H_st = sum_{tau >= max(s,t)} tr(W^{tau-s+1} R (W^{tau-t+1})'), for R = I the Frobenius
    products <W^{tau-s+1}, W^{tau-t+1}>. Read backwards it is a running sum along the diagonals
    of G_ab = tr(W^a R (W^b)'), which takes T^2 steps. A reversible W, D W symmetric for a diagonal
    D, as symmetric ones are for I, needs only the eigenvalues of D^1/2 W D^-1/2; any other W or a
    schedule the products of its T flattened powers, in blocks of rows.

    Args:
        mixing: [n, n] W, stochastic by rows or by columns and connected, or a schedule
            [P, n, n] (round s uses W_{s mod P}, rounds counted from 0).
        rounds: T.
        covariance: [n, n] R, positive semidefinite; None for I.

    Returns:
        [T, T] float64, symmetric.

    Raises:
        ValueError: for a mixing matrix that is neither, a covariance that is not positive
            semidefinite or of another size, rounds below 1, or more than memory holds.

    Reference:
        "MAFALDA-SGD", eq. (11).

    Example:
        >>> import numpy as np
        >>> from dpjax.mechanism import temporal
        >>> temporal.workload_gram(np.eye(1), 3)
        array([[3., 2., 1.],
               [2., 2., 1.],
               [1., 1., 1.]])
    """
    schedule = schedule_of(mixing)
    rounds = _validate.rounds_in_memory(rounds)
    root = None if covariance is None else _root(covariance, schedule.shape[-1])
    return gram_of(schedule, rounds, root)


def gram_of(schedule: MixingSchedule, rounds: int, root: SquareMatrix | None = None) -> Gram:
    """Return H of a checked schedule, for R = Q Q' with root Q; None for I."""
    weights = _reversing(schedule[0]) if len(schedule) == 1 else None
    if weights is not None:
        return summed(_reversible(schedule[0], weights, rounds, root)[None])
    ends = range(len(schedule))
    return summed(np.stack([_flattened(schedule, last, rounds, root) for last in ends]))


def prefix_sum_gram(rounds: int) -> Gram:
    """Return L'L for L the lower triangular ones: H of one trusted server, T - max(s, t).

    Args:
        rounds: T.

    Returns:
        [T, T] float64 (s and t counted from 0).

    Raises:
        ValueError: for rounds below 1, or more than memory holds.
    """
    rounds = _validate.rounds_in_memory(rounds)
    # Round t's sum has noise s in it from s on: T - max(s, t) sums have both.
    index = np.arange(rounds)
    return len(index) - np.maximum.outer(index, index).astype(np.float64)


def schedule_of(mixing: DenseMixing, connected: bool = True) -> MixingSchedule:
    """Return W as a schedule [P, n, n]; ValueError unless stochastic by rows or by columns."""
    matrix = mixing_.dense(mixing_.check_stochastic(mixing, connected=connected))
    return matrix[None] if matrix.ndim == 2 else matrix


def _root(covariance: SquareMatrix, n: int) -> SquareMatrix:
    """Return Q with Q Q' = R."""
    matrix = _validate.square("covariance", covariance)
    if matrix.shape != (n, n):
        raise ValueError(f"covariance has shape {matrix.shape}; give [{n}, {n}], as mixing's")
    return np.ascontiguousarray(factor_of(matrix, "covariance").T)


def _reversing(matrix: SquareMatrix) -> Vector | None:
    """Return d > 0 with d_i W_ij = d_j W_ji, largest 1; None where there is none (or too wide)."""
    support = matrix != 0
    if (support != support.T).any():
        return None
    weights = np.zeros(len(matrix))
    weights[0] = 1.0
    order, before = csgraph.breadth_first_order(support, 0)
    # d_i W_ij = d_j W_ji along a tree of links gives all of d.
    for j in order[1:]:
        i = before[j]
        weights[j] = weights[i] * matrix[i, j] / matrix[j, i]
    # A wide spread of d costs the digits that eigenvalues would bring.
    if not weights.min() > 0 or weights.max() > _LARGEST_SPREAD * weights.min():
        return None
    weights = weights / weights.max()
    # Detailed balance, to what the products round.
    flow = weights[:, None] * matrix
    return weights if (np.abs(flow - flow.T) <= _REVERSIBLE * np.abs(flow)).all() else None


def _reversible(
    matrix: SquareMatrix,
    weights: Vector,
    rounds: int,
    root: SquareMatrix | None,
) -> Gram:
    """G_ab = sum_ij l_i^a (U' D^1/2 R D^1/2 U)_ij (U' D^-1 U)_ij l_j^b."""
    halves = np.sqrt(weights)
    # D^1/2 W D^-1/2 is symmetric where D W is.
    similar = halves[:, None] * matrix / halves
    values, vectors = eigen(similar)
    left = vectors.T * halves
    left = left if root is None else left @ root
    right = vectors.T / halves
    coupling = (left @ left.T) * (right @ right.T)
    powers = np.multiply.accumulate(np.tile(values, (rounds, 1)), axis=0)
    products = powers @ coupling @ powers.T
    return (products + products.T) / 2.0


def _flattened(
    schedule: MixingSchedule,
    last: int,
    rounds: int,
    root: SquareMatrix | None,
) -> Gram:
    """G_ab for the products A_a = W_last W_last-1 .. (a factors), a block of rows at a time."""
    n = schedule.shape[-1]
    size = max(1, min(n, _BLOCK // (rounds * n)))
    total = np.zeros((rounds, rounds))
    for first in range(0, n, size):
        rows = np.eye(n)[first : first + size]
        stacked = np.empty((rounds, rows.size))
        for a in range(rounds):
            rows = rows @ schedule[(last - a) % len(schedule)]
            stacked[a] = (rows if root is None else rows @ root).ravel()
        total += stacked @ stacked.T
    return total


def summed(products: Float[np.ndarray, "p t t"]) -> Gram:
    """Return H: the running sums of G along its diagonals, read backwards.

    A schedule has one G for each round of the period that a sum may end in: H_st adds
    G^(tau mod P) at (tau-s, tau-t) over tau, so the sums of all starts of one residue are shared,
    those that read the phases in the same order.
    """
    period, rounds, _ = products.shape
    gram = np.empty((rounds, rounds))
    for offset in range(rounds):
        # along[c, j] is G of phase c at (j + offset, j), where tau = t + j is c modulo P.
        along = np.diagonal(products, -offset, axis1=1, axis2=2)
        j = np.arange(rounds - offset)
        for first in range(offset, min(offset + period, rounds)):
            sums = np.cumsum(along[(first + j) % period, j])
            t = np.arange(first, rounds, period)
            gram[t - offset, t] = gram[t, t - offset] = sums[rounds - 1 - t]
    return gram


def factor(
    mixing: DenseMixing | HashableMatrix,
    horizon: int | None = None,
    *,
    step_sizes: StepSizes = None,
    weights: Vector | None = None,
) -> Factor:
    """Return F with F'F = M, where tr(M R) is the noise energy of R over ``horizon`` rounds.

    ==========================  ============================================================
    horizon None                M = W'W, one step (a schedule: the mean over its period)
    horizon T                   M = sum_k (T - k + 1) (W^k)' W^k: all models of T rounds
    step_sizes eta_1..eta_T     M = sum_{s<=t} eta_s^2 (W^(t-s+1))' W^(t-s+1)
    weights y (push-sum)        the models divided by y: (W^k)' D^-2 W^k, D = diag(y)
    schedule [P, n, n]          A_s = W_s' (I + A_s+1) W_s backwards, M = sum_s eta_s^2 A_s
    ==========================  ============================================================

    Args:
        mixing: [n, n] W, any real matrix, or a schedule [P, n, n] (round s uses W_{s mod P},
            rounds counted from 0).
        horizon: number of rounds T.
        step_sizes: [T] eta_s; gives the horizon if that is None.
        weights: [n] positive push-sum weights.

    Returns:
        [m, n] float64 with m <= n (m = P n for a one-step schedule).

    Raises:
        ValueError: for options that do not go together or out of range.
    """
    if isinstance(mixing, HashableMatrix):
        # Made from a matrix that was checked.
        schedule = mixing.dense.matrix
    else:
        schedule = _validate.stochastic("mixing", mixing, ())
    schedule = schedule[None] if schedule.ndim == 2 else schedule
    matrix = schedule[0]
    n = schedule.shape[-1]
    readout = np.ones(n)
    if weights is not None:
        weights = _validate.finite_array("weights", weights, ndim=1)
        if weights.shape != (n,) or weights.min() <= 0:
            raise ValueError(
                f"weights has shape {weights.shape} and least entry {weights.min()}; give {n} "
                "positive push-sum weights"
            )
        readout = 1.0 / weights
    etas = step_sizes
    if etas is not None:
        etas = _validate.finite_array("step_sizes", etas, ndim=1)
        if not etas.any() or horizon not in (None, len(etas)):
            raise ValueError(
                f"step_sizes has {len(etas)} entries for horizon={horizon}; give one a round, not "
                "all 0"
            )
        horizon = len(etas)
    if horizon is not None:
        horizon = _validate.integer("horizon", horizon)
    if horizon is None:
        # One step, M = W' D^-2 W; of a schedule the mean.
        return (readout[:, None] * schedule).reshape(-1, n) / np.sqrt(len(schedule))
    if len(schedule) == 1 and weights is None and np.array_equal(matrix, matrix.T):
        return _spectral(matrix, horizon, etas)
    if len(schedule) == 1 and etas is None:
        first = readout[:, None] * matrix
        return _doubled(first, matrix, horizon, np.matmul, compressed, np.sqrt)
    return _backwards(schedule, horizon, etas, readout)


def one_step_energy(mixing: Mixing, variances: Vector) -> float:
    """Return tr(M diag(v)) of one step, without a product of matrices.

    Args:
        mixing: [n, n] W, dense or sparse, or a schedule [P, n, n].
        variances: [n] v.
    """
    readout = np.ones(len(variances))
    if issparse(mixing):
        squares = csr_array(mixing).power(2)
        return float(readout @ (squares @ variances))
    schedule = mixing.reshape(-1, *mixing.shape[-2:])
    # 1' W^2 v with the squares of entries, the mean over a schedule.
    total = np.einsum("i,pij,pij,j->", readout, schedule, schedule, variances)
    return float(total) / len(schedule)


def _spectral(matrix: SquareMatrix, horizon: int, etas: StepSizes) -> SquareMatrix:
    """M = sum_k c_k (W^k)' W^k on eigenvalues: sums of positive terms only."""
    values, vectors = np.linalg.eigh(matrix)
    squares = values**2
    if etas is None:
        total = _doubled(squares, squares, horizon, np.multiply, lambda *terms: sum(terms), float)
    else:
        total = np.zeros_like(squares)
        for coefficient in np.cumsum(etas**2):
            total = squares * (coefficient + total)
    return np.sqrt(total)[:, None] * vectors.T


def _doubled(
    first: np.ndarray,
    power: np.ndarray,
    horizon: int,
    times: _Operation,
    add: _Operation,
    weight: Callable[[int], float],
) -> np.ndarray:
    """sum_{t<=T} G_t, G_t = sum_k (W^k)' W^k, in log T steps, of factors or on eigenvalues.

    G_{a+b} = G_a + (W^a)' G_b W^a  and, summed,  M_{a+b} = M_a + b G_a + (W^a)' M_b W^a.
    """
    length = 1
    final = first
    running = first
    step = power
    for bit in bin(horizon)[3:]:
        running = add(running, weight(length) * final, times(running, power))
        final = add(final, times(final, power))
        length *= 2
        power = times(power, power)
        if bit == "1":
            # One more round in front: a = 1, b = length.
            final = add(first, times(final, step))
            running = add(weight(length + 1) * first, times(running, step))
            length += 1
            power = times(power, step)
    return running


def _backwards(
    schedule: MixingSchedule,
    horizon: int,
    etas: StepSizes,
    readout: Vector,
) -> Factor:
    n = schedule.shape[-1]
    read = np.diag(readout)
    later = np.zeros((0, n))
    total = np.zeros((0, n))
    for s in range(horizon - 1, -1, -1):
        matrix = schedule[s % len(schedule)]
        # A_s = W' (I + A_s+1) W.
        later = compressed(read @ matrix, later @ matrix)
        eta = 1.0 if etas is None else abs(etas[s])
        total = compressed(total, eta * later)
    return total
