"""The descent behind `dpjax.mechanism.schedules.optimal`: steps and gain by their logarithms."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from dpjax.mechanism.x64 import double_precision

__all__: list[str] = []

# Logarithms may move so far from where they began.
_REACH = 12.0


class Start(NamedTuple):
    """Steps mask * exp(basis @ point[:-1]) and gain exp(point[-1]).

    Attributes:
        basis: [T, J].
        mask: [T] of 0 and 1: rounds with a step.
        point: [J + 1].
    """

    basis: np.ndarray
    mask: np.ndarray
    point: np.ndarray

    def steps(self, point: np.ndarray | None = None) -> tuple[np.ndarray, float]:
        """Return steps and gain at a point, where it begins if None.

        Args:
            point: [J + 1].
        """
        at = self.point if point is None else point
        return self.mask * np.exp(self.basis @ at[:-1]), float(np.exp(at[-1]))


def smooth(rounds: int, knots: int, gamma: float, q1: float, beta: float, width: int) -> Start:
    """Return geometric steps as a line through knots of their logarithm.

    Args:
        rounds: T.
        knots: Of them, evenly spaced.
        gamma: First step.
        q1: Decay.
        beta: Gain.
        width: Columns of the basis, those beyond the knots empty.
    """
    places = np.linspace(0, rounds - 1, knots)
    basis, point = np.zeros((rounds, width)), np.zeros(width + 1)
    for j, row in enumerate(np.eye(knots)):
        basis[:, j] = np.interp(np.arange(rounds), places, row)
    point[:knots] = np.log(gamma) + np.log(q1) * places
    point[-1] = np.log(beta)
    return Start(basis, np.ones(rounds), point)


def pulses(rounds: int, count: int, hessian: np.ndarray, beta: float, width: int) -> Start:
    """Return steps in a few evenly spaced rounds: inverse Chebyshev nodes, the longest first.

    Args:
        rounds: T.
        count: Steps.
        hessian: [p, p] average Hessian; its eigenvalues themselves where there are as many.
        beta: Gain.
        width: Columns of the basis, those beyond the pulses empty.
    """
    curvatures = np.linalg.eigvalsh(hessian)
    low, high = curvatures[0], curvatures[-1]
    nodes = np.cos((2 * np.arange(count) + 1) * np.pi / (2 * count))
    nodes = (high + low) / 2 - (high - low) / 2 * nodes
    if count == len(curvatures):
        nodes = curvatures
    # The last step is followed by averaging too; all lie before the last round, distinct.
    where = np.arange(1, count + 1) * rounds // (count + 1)
    basis, mask, point = np.zeros((rounds, width)), np.zeros(rounds), np.zeros(width + 1)
    basis[where, np.arange(count)], mask[where] = 1.0, 1.0
    point[:count], point[-1] = -np.log(np.sort(nodes)), np.log(beta)
    return Start(basis, mask, point)


class Given(NamedTuple):
    """Arrays that the error depends on beside the steps and the gain."""

    mixing: jax.Array
    hessians: jax.Array
    e: jax.Array
    u: jax.Array
    basis: jax.Array
    mask: jax.Array
    rows: jax.Array
    start_variance: jax.Array
    factor: jax.Array


def descend(
    start: Start,
    mixing: np.ndarray,
    hessians: np.ndarray,
    errors: tuple[np.ndarray, np.ndarray],
    rows: np.ndarray | None,
    start_variance: float,
    factor: float,
    gaussian: bool,
    iterations: int,
) -> tuple[np.ndarray, float, int]:
    """Return steps and gain where L-BFGS ends, and its evaluations.

    Args:
        start: Where it begins.
        mixing: [n, n].
        hessians: [n, p, p].
        errors: [n, p] e and u before the first message.
        rows: [r, n, p] directions in which the error counts; None for all.
        start_variance: Variance of an entry of x(0).
        factor: 2 (gap / epsilon)^2, or (gap / mu)^2.
        gaussian: Which noise.
        iterations: Most of them.
    """
    from scipy import optimize

    n, p = errors[0].shape
    rows = np.eye(n * p).reshape(-1, n, p) if rows is None else rows
    with double_precision():
        given = Given(
            mixing=jnp.asarray(mixing),
            hessians=jnp.asarray(hessians),
            e=jnp.asarray(errors[0]),
            u=jnp.asarray(errors[1]),
            basis=jnp.asarray(start.basis),
            mask=jnp.asarray(start.mask),
            rows=jnp.asarray(np.moveaxis(rows, 0, 1)),
            start_variance=jnp.asarray(start_variance),
            factor=jnp.asarray(factor),
        )

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            value, slope = _log_error(jnp.asarray(x), given, gaussian)
            slope = np.asarray(slope, np.float64)
            if not np.isfinite(float(value)) or not np.isfinite(slope).all():
                return 1e6, np.zeros_like(slope)  # The line search steps back.
            return float(value), slope

        found = optimize.minimize(
            objective,
            start.point,
            jac=True,
            method="L-BFGS-B",
            bounds=[(entry - _REACH, entry + _REACH) for entry in start.point],
            options={"maxiter": iterations},
        )
    steps, beta = start.steps(np.asarray(found.x, np.float64))
    return steps, beta, int(found.nfev)


def log_error(point: jax.Array, given: Given, gaussian: bool) -> jax.Array:
    """Return the logarithm of bias plus least noise.

    Args:
        point: [J + 1] of a `Start`.
        given: The problem.
        gaussian: Which noise.
    """
    logs, beta = given.basis @ point[:-1], jnp.exp(point[-1])
    steps = given.mask * jnp.exp(logs)
    w, h = given.mixing, given.hessians

    def forwards(state: Any, alpha: jax.Array) -> Any:
        e, u = state
        mixed = w @ e
        u = u + beta * (e - mixed)
        return (mixed - alpha * (u + jnp.einsum("nij,nj->ni", h, e)), u), None

    def backwards(state: Any, alpha: jax.Array) -> Any:
        e, u = state
        gained = beta * (u - alpha * e)
        mixed = (w.T @ (e - gained).reshape(len(w), -1)).reshape(e.shape)
        after = mixed + gained - alpha * jnp.einsum("nri,nij->nrj", e, h)
        return (after, u - alpha * e), (after**2).sum()

    (e, _), _ = jax.lax.scan(forwards, (given.e, given.u), steps)
    rows = given.rows
    _, weights = jax.lax.scan(backwards, (rows, jnp.zeros_like(rows)), steps, reverse=True)
    # Powers of the logarithm: those of a step of 0 have no slope.
    shown, power = weights[1:], 1.0 if gaussian else 2 / 3
    sizes = given.mask[:-1] * jnp.exp(power * logs[:-1])
    if gaussian:
        noise = (sizes * jnp.sqrt(shown)).sum() ** 2
    else:
        noise = (sizes * jnp.cbrt(shown)).sum() ** 3
    return jnp.log((e**2).sum() + given.start_variance * weights[0] + given.factor * noise)


_log_error = jax.jit(jax.value_and_grad(log_error), static_argnums=2)
