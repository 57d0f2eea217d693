"""The exact mean-square error of private gradient tracking on quadratics: a linear recursion.

With gradients H_i x - b_i, errors e = x - x* and u = y - y* (y*_i = b_i - H_i x*, what the tracking
variable settles at) and z = e + noise, a round of Algorithm 1 is

    u+ = u + beta (I - W) z,      e+ = W z - alpha (u+ + H z)

so that E|x(K) - x*|^2, summed over agents, is a bias, what the start leaves, plus sum_k w_k var_k,
var_k the variance of an entry of the noise of message k. `weights` finds all w_k in one pass
backwards in time; `curve` goes forwards with the whole covariance and gives every round. Float64,
numpy in and out.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dpjax import _validate
from dpjax.mechanism.costs import Problem, advanced, checked, first_errors, mean_error, variance
from dpjax.mechanism.laplace import Schedule

__all__ = ["Error", "curve", "error", "simulate", "sketch", "variances", "weights"]


class Error(NamedTuple):
    """A predicted E|x(T) - x*|^2, the sum over agents and entries.

    Attributes:
        bias: What is left of the start without noise.
        noise: What the noise adds.
        weights: [T] of the variance of an entry of message k's noise.
    """

    bias: float
    noise: float
    weights: Float[np.ndarray, " T"]

    @property
    def total(self) -> float:
        """Both."""
        return self.bias + self.noise


def variances(schedule: Schedule) -> Float[np.ndarray, " T"]:
    """Return the variance of an entry of every message's noise: 2 nu^2, or sigma^2.

    Args:
        schedule: Scales, and of which noise.

    Example:
        >>> from dpjax.mechanism import laplace, quadratic
        >>> made = laplace.geometric(1.0, 1.0, gamma=0.1, q1=0.5, q2=0.9, rounds=2)
        >>> quadratic.variances(made).round(6).tolist()
        [0.125, 0.10125]
    """
    factor = 2.0 if schedule.noise == "laplace" else 1.0
    return factor * np.asarray(schedule.scales, np.float64) ** 2


def error(
    mixing: Any,
    hessians: Any,
    linear: Any,
    step_sizes: Any,
    beta: float,
    variances: Any,
    *,
    start: Any = 0.0,
    start_variance: float = 1.0,
    rows: Any = None,
) -> Error:
    """Return the exact mean-square error of Algorithm 1 after T messages and steps.

    Args:
        mixing: [n, n] W, symmetric, rows and columns summing to 1.
        hessians: [n, p, p] H_i.
        linear: [n, p] b_i.
        step_sizes: [T] alpha_k.
        beta: Gain of the tracking variable.
        variances: [T] of an entry of each message's noise.
        start: [n, p] mean of x(0), or what broadcasts.
        start_variance: Variance of an entry of x(0).
        rows: As in `weights`: noise and start variance are then estimated.

    Returns:
        Bias, noise and weights; infinite where the recursion overflows.

    Raises:
        ValueError: For shapes that do not fit, or numbers out of range.

    Reference:
        Xie, Liu and Chai, Algorithm 1 and (13); the bound (25) is `dpjax.mechanism.accuracy.bound`.

    Example:
        >>> import numpy as np
        >>> from dpjax.data import fusion
        >>> from dpjax.mechanism import laplace, quadratic
        >>> data, mixing = fusion.make(4, seed=0), np.full((4, 4), 0.25)
        >>> made = laplace.geometric(10.0, 1.0, gamma=0.002, q1=0.97, q2=0.99, rounds=300)
        >>> found = quadratic.error(mixing, data.hessians, data.linear, made.step_sizes, 100.0,
        ...                         quadratic.variances(made))
        >>> found.bias < found.total < 1
        True
    """
    problem = checked(mixing, hessians, linear, step_sizes, beta)
    spread = _variances(variances, problem)
    w = weights(mixing, hessians, step_sizes, beta, rows=rows)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = mean_error(problem, start)[-1]
        bias = float((mean**2).sum() + variance(start_variance) * w[0])
        noise = float(w @ spread)
    finite = np.isfinite([bias, noise]).all()
    return Error(bias, noise, w) if finite else Error(np.inf, np.inf, w)


def weights(
    mixing: Any, hessians: Any, step_sizes: Any, beta: float, *, rows: Any = None
) -> Float[np.ndarray, " T"]:
    """Return w_k: what noise of variance 1 in every entry of message k adds to E|x(T) - x*|^2.

    w_k = |d x(T) / d z(k)|_F^2, from one pass backwards over the rounds.

    Args:
        mixing: [n, n] W.
        hessians: [n, p, p].
        step_sizes: [T].
        beta: Gain.
        rows: [r, n, p] directions in which the error counts; None for all of them, `sketch` for an
            unbiased estimate by few.

    Returns:
        [T] weights.

    Raises:
        ValueError: As in `error`.

    Example:
        >>> import numpy as np
        >>> from dpjax.mechanism import quadratic
        >>> quadratic.weights(np.ones((1, 1)), np.ones((1, 1, 1)), [0.5, 0.5], beta=0.0).tolist()
        [0.0625, 0.25]
    """
    problem = checked(mixing, hessians, None, step_sizes, beta)
    w, h, steps, gain = problem.mixing, problem.hessians, problem.step_sizes, problem.beta
    n, p = h.shape[:2]
    if rows is None:
        e = np.eye(n * p).reshape(n * p, n, p)
    else:
        e = _validate.finite_array("rows", rows, ndim=3)
        if e.shape[1:] != (n, p):
            raise ValueError(f"rows has shape {e.shape}; give [r, {n}, {p}]")
    e = np.ascontiguousarray(np.moveaxis(e, 0, 1))  # [n, r, p]: mixing is then one matrix product
    u, found = np.zeros_like(e), np.zeros(len(steps))
    with np.errstate(over="ignore", invalid="ignore"):
        for k in range(len(steps) - 1, -1, -1):
            alpha = steps[k]
            gained = gain * (u - alpha * e)
            mixed = (w.T @ (e - gained).reshape(n, -1)).reshape(e.shape)
            e, u = mixed + gained - alpha * (e @ h), u - alpha * e
            found[k] = np.vdot(e, e)
    return found


def sketch(agents: int, dimension: int, probes: int, seed: int) -> Float[np.ndarray, "r n p"]:
    """Return rows for `weights`: the agents' mean whole, what differs between them by random signs.

    The mean carries most of the error and is exact; probes + p rows replace n p.

    Args:
        agents: Agents n.
        dimension: Entries p.
        probes: Random rows, 1 and above.
        seed: Of numpy's default generator.

    Returns:
        [probes + p, n, p].

    Raises:
        ValueError: For numbers out of range.
    """
    n, p = _validate.integer("agents", agents), _validate.integer("dimension", dimension)
    probes = _validate.integer("probes", probes)
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), (probes, n, p))
    signs = (signs - signs.mean(axis=1, keepdims=True)) / np.sqrt(probes)
    mean = np.broadcast_to(np.eye(p)[:, None], (p, n, p)) / np.sqrt(n)
    return np.concatenate([mean, signs])


def curve(
    mixing: Any,
    hessians: Any,
    linear: Any,
    step_sizes: Any,
    beta: float,
    variances: Any,
    *,
    start: Any = 0.0,
    start_variance: float = 1.0,
) -> Float[np.ndarray, " T"]:
    """Return E|x(k) - x*|^2 for k = 1..T, by the recursion of the whole second moment.

    Memory grows with (2 n p)^2 and time with T (2 n p)^2 n: for a few hundred entries in all.

    Args:
        mixing: [n, n].
        hessians: [n, p, p].
        linear: [n, p].
        step_sizes: [T].
        beta: Gain.
        variances: [T].
        start: As in `error`.
        start_variance: As in `error`.

    Returns:
        [T] errors, the last as in `error`.

    Raises:
        ValueError: As in `error`.
    """
    problem = checked(mixing, hessians, linear, step_sizes, beta)
    spread = _variances(variances, problem)
    n, p = problem.hessians.shape[:2]
    size = n * p
    first = np.concatenate([part.ravel() for part in first_errors(problem, start)])
    moment = np.outer(first, first)
    diagonal = np.arange(size)
    moment[diagonal, diagonal] += variance(start_variance)
    found = np.zeros(len(spread))
    with np.errstate(over="ignore", invalid="ignore"):
        for k, alpha in enumerate(problem.step_sizes):
            moment[diagonal, diagonal] += spread[k]
            half = advanced(problem, alpha, moment)
            moment = advanced(problem, alpha, half.T)
            found[k] = moment[diagonal, diagonal].sum()
    return found


def simulate(
    mixing: Any,
    hessians: Any,
    linear: Any,
    schedule: Schedule,
    beta: float,
    *,
    trials: int,
    seed: int,
    start: Any = 0.0,
    start_variance: float = 1.0,
) -> Float[np.ndarray, "R T"]:
    """Return |x(k) - x*|^2 of independent trials of Algorithm 1, k = 1..T: a measured error.

    For measuring predictions, not for releases: noise is numpy's.

    Args:
        mixing: [n, n].
        hessians: [n, p, p].
        linear: [n, p].
        schedule: Steps and noise.
        beta: Gain.
        trials: Trials R.
        seed: Of numpy's default generator.
        start: Mean of x(0), as in `error`.
        start_variance: Variance of its entries.

    Returns:
        [R, T] residuals, sums over agents.

    Raises:
        ValueError: As in `error`.
    """
    problem = checked(mixing, hessians, linear, schedule.step_sizes, beta)
    w, h, gain = problem.mixing, problem.hessians, problem.beta
    generator = np.random.default_rng(_validate.integer("seed", seed, least=0))
    draw = generator.laplace if schedule.noise == "laplace" else generator.normal
    shape = (len(w), _validate.integer("trials", trials), h.shape[1])
    mean = np.broadcast_to(np.asarray(start, np.float64), (len(w), h.shape[1]))
    x = mean[:, None] + np.sqrt(variance(start_variance)) * generator.standard_normal(shape)
    y, found = np.zeros(shape), []
    for alpha, scale in zip(schedule.step_sizes, schedule.scales, strict=True):
        z = x + scale * draw(size=shape)
        mixed = (w @ z.reshape(len(w), -1)).reshape(shape)
        y = y + gain * (z - mixed)
        x = mixed - alpha * (y + z @ h - problem.linear[:, None])
        found.append(((x - problem.minimiser) ** 2).sum(axis=(0, 2)))
    return np.stack(found, axis=1)


def _variances(variances: Any, problem: Problem) -> np.ndarray:
    spread = _validate.finite_array("variances", variances, ndim=1)
    if len(spread) != len(problem.step_sizes) or spread.min() < 0:
        raise ValueError(
            f"variances has {len(spread)} entries from {spread.min():g} for "
            f"{len(problem.step_sizes)} steps; give one number >= 0 a message"
        )
    return spread
