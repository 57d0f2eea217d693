"""Factors of the matrix M whose trace with the covariance is the energy that a run pays.

Noise V_s added in round s reaches the models of round t as W^{t-s+1} V_s. All factors are built
by orthogonal transformations of stacked factors, never from M, and so keep twice its digits.
"""

import numpy as np
from jaxtyping import Float

from dpjax import _validate

__all__: list[str] = []


def factor(
    mixing: Float[np.ndarray, "*p n n"],
    horizon: int | None = None,
    *,
    discount: float | None = None,
    step_sizes: Float[np.ndarray, " t"] | None = None,
    weights: Float[np.ndarray, " n"] | None = None,
    final_model: bool = False,
) -> Float[np.ndarray, "m n"]:
    """Return F with F'F = M, where tr(M R) is the noise energy of R over ``horizon`` rounds.

    ==========================  ============================================================
    horizon None                M = W'W, one step (a schedule: the mean over its period)
    horizon T                   M = sum_k (T - k + 1) (W^k)' W^k: all models of T rounds
    ... and final_model         M = sum_k (W^k)' W^k: the models after round T alone
    discount rho (T or None)    M = sum_k rho^(2k) (W^k)' W^k, k to T or to infinity
    step_sizes eta_1..eta_T     M = sum_{s<=t} eta_s^2 (W^(t-s+1))' W^(t-s+1) (t = T alone if
                                final_model)
    weights y (push-sum)        the models divided by y: (W^k)' D^-2 W^k, D = diag(y)
    schedule [P, n, n]          A_s = W_s' (I + A_s+1) W_s backwards, M = sum_s eta_s^2 A_s
    ==========================  ============================================================

    Args:
        mixing: [n, n] W, any real matrix, or a schedule [P, n, n] (round s uses W_{s mod P},
            rounds counted from 0).
        horizon: number of rounds T.
        discount: rho, below 1 if ``horizon`` is None.
        step_sizes: [T] eta_s; gives the horizon if that is None.
        weights: [n] positive push-sum weights.
        final_model: count the noise in the final models only.

    Returns:
        [m, n] float64 with m <= n (m = P n for a one-step schedule).

    Raises:
        ValueError: for options that do not go together or out of range.
    """
    matrix = _validate.finite_array("mixing", mixing)
    if matrix.ndim not in (2, 3) or matrix.shape[-1] != matrix.shape[-2]:
        raise ValueError(f"mixing has shape {matrix.shape}; give [n, n] or a schedule [P, n, n]")
    n = matrix.shape[-1]
    readout = _readout(weights, n)
    etas = _step_sizes(step_sizes, horizon)
    if etas is not None:
        horizon = len(etas)
    if horizon is not None:
        horizon = _validate.integer("horizon", horizon)
    if discount is not None:
        if etas is not None or final_model or matrix.ndim == 3:
            raise ValueError(
                f"discount is {discount!r}, together with step_sizes, final_model or a schedule; "
                f"give one of them"
            )
        return _discounted(matrix, _validate.positive("discount", discount), horizon, readout)
    if final_model and horizon is None:
        raise ValueError("final_model needs a horizon; give the number of rounds")
    if horizon is None:
        return (readout[:, None] * matrix).reshape(-1, n) / np.sqrt(
            matrix.shape[0] if matrix.ndim == 3 else 1
        )
    if matrix.ndim == 3 and matrix.shape[0] > 1:
        return _scheduled(matrix, horizon, etas, readout, final_model)
    matrix = matrix[0] if matrix.ndim == 3 else matrix
    if weights is None and np.array_equal(matrix, matrix.T):
        if etas is None:
            return _spectral_doubled(matrix, horizon, final_model)
        return _spectral(matrix, _coefficients(horizon, etas, final_model))
    if etas is not None:
        return _horner(matrix, _coefficients(horizon, etas, final_model), readout)
    final, running = _doubled(matrix, horizon, readout)
    return final if final_model else running


def _readout(weights: Float[np.ndarray, " n"] | None, n: int) -> Float[np.ndarray, " n"]:
    if weights is None:
        return np.ones(n)
    values = _validate.finite_array("weights", weights, ndim=1)
    if values.shape != (n,) or values.min() <= 0:
        raise ValueError(
            f"weights has shape {values.shape} and least entry {values.min()}; give {n} positive "
            f"push-sum weights"
        )
    return 1.0 / values


def _step_sizes(
    step_sizes: Float[np.ndarray, " t"] | None, horizon: int | None
) -> Float[np.ndarray, " t"] | None:
    if step_sizes is None:
        return None
    etas = _validate.finite_array("step_sizes", step_sizes, ndim=1)
    if not etas.any() or (horizon is not None and len(etas) != horizon):
        raise ValueError(
            f"step_sizes has {len(etas)} entries for horizon={horizon}; give one a round, not all 0"
        )
    return etas


def _coefficients(
    horizon: int, etas: Float[np.ndarray, " t"] | None, final_model: bool
) -> Float[np.ndarray, " t"]:
    """Return c_k, k = 1..T, of M = sum_k c_k (W^k)' W^k."""
    squares = np.ones(horizon) if etas is None else etas**2
    return squares[::-1] if final_model else np.cumsum(squares)[::-1]


def _compress(*blocks: Float[np.ndarray, "_ n"]) -> Float[np.ndarray, "m n"]:
    return np.asarray(np.linalg.qr(np.concatenate(blocks), mode="r"))


def _spectral(
    matrix: Float[np.ndarray, "n n"], coefficients: Float[np.ndarray, " t"]
) -> Float[np.ndarray, "n n"]:
    values, vectors = np.linalg.eigh(matrix)
    squares = values**2
    total = np.zeros_like(squares)
    for coefficient in coefficients[::-1]:
        total = squares * (coefficient + total)
    return np.sqrt(total)[:, None] * vectors.T


def _spectral_doubled(
    matrix: Float[np.ndarray, "n n"], horizon: int, final_model: bool
) -> Float[np.ndarray, "n n"]:
    """`_doubled` on eigenvalues: sums of positive terms only, in log T steps."""
    values, vectors = np.linalg.eigh(matrix)
    squares = values**2
    length, final, running, power = 1, squares, squares, squares
    for bit in bin(horizon)[3:]:
        final, running = final + power * final, running + length * final + power * running
        length, power = 2 * length, power**2
        if bit == "1":
            final, running = squares + squares * final, (length + 1) * squares + squares * running
            length, power = length + 1, power * squares
    return np.sqrt(final if final_model else running)[:, None] * vectors.T


def _horner(
    matrix: Float[np.ndarray, "n n"],
    coefficients: Float[np.ndarray, " t"],
    readout: Float[np.ndarray, " n"],
) -> Float[np.ndarray, "m n"]:
    total = np.zeros((0, matrix.shape[0]))
    for coefficient in coefficients[::-1]:
        total = _compress(np.sqrt(coefficient) * readout[:, None] * matrix, total @ matrix)
    return total


def _doubled(
    matrix: Float[np.ndarray, "n n"], horizon: int, readout: Float[np.ndarray, " n"]
) -> tuple[Float[np.ndarray, "m n"], Float[np.ndarray, "m n"]]:
    """Return factors of G_T = sum_k (W^k)' W^k and of sum_{t<=T} G_t by doubling.

    G_{a+b} = G_a + (W^a)' G_b W^a  and, summed,  M_{a+b} = M_a + b G_a + (W^a)' M_b W^a.
    """
    first = readout[:, None] * matrix
    length, final, running, power = 1, first, first, matrix
    for bit in bin(horizon)[3:]:
        final, running = (
            _compress(final, final @ power),
            _compress(running, np.sqrt(length) * final, running @ power),
        )
        length, power = 2 * length, power @ power
        if bit == "1":
            # One more round in front: a = 1, b = length.
            final, running = (
                _compress(first, final @ matrix),
                _compress(np.sqrt(length + 1) * first, running @ matrix),
            )
            length, power = length + 1, power @ matrix
    return final, running


def _discounted(
    matrix: Float[np.ndarray, "n n"],
    discount: float,
    horizon: int | None,
    readout: Float[np.ndarray, " n"],
) -> Float[np.ndarray, "m n"]:
    damped = discount * matrix
    if horizon is not None:
        return _doubled(damped, horizon, readout)[0]
    radius = float(np.abs(np.linalg.eigvals(damped)).max())
    if radius >= 1:
        raise ValueError(
            f"discount is {discount!r} without a horizon: the sum diverges (spectral radius of "
            f"discount * mixing {radius:.6g}); give a horizon or a smaller discount"
        )
    # The tail after T rounds is of order radius^2T; square the eps so that the factor is exact.
    rounds = 1 + int(np.ceil(np.log(1e-34) / np.log(max(radius, 1e-34) ** 2)))
    return _doubled(damped, 1 << rounds.bit_length(), readout)[0]


def _scheduled(
    schedule: Float[np.ndarray, "p n n"],
    horizon: int,
    etas: Float[np.ndarray, " t"] | None,
    readout: Float[np.ndarray, " n"],
    final_model: bool,
) -> Float[np.ndarray, "m n"]:
    n = schedule.shape[-1]
    read = np.diag(readout)
    later = read if final_model else np.zeros((0, n))
    total = np.zeros((0, n))
    for s in range(horizon - 1, -1, -1):
        matrix = schedule[s % len(schedule)]
        here = later @ matrix if final_model else np.concatenate([read @ matrix, later @ matrix])
        later = _compress(here)
        total = _compress(total, (1.0 if etas is None else abs(etas[s])) * later)
    return total
