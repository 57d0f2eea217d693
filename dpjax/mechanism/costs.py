"""Checked quadratic costs, and a noise-free round of private gradient tracking on them."""

from typing import Any, NamedTuple

import numpy as np

from dpjax import _validate

__all__: list[str] = []


class Problem(NamedTuple):
    """Checked arrays of a quadratic problem and a run on it."""

    mixing: np.ndarray
    hessians: np.ndarray
    linear: np.ndarray
    minimiser: np.ndarray
    step_sizes: np.ndarray
    beta: float


def checked(mixing: Any, hessians: Any, linear: Any, step_sizes: Any, beta: float) -> Problem:
    """Return the arguments as float64 arrays that fit each other.

    Args:
        mixing: [n, n], doubly stochastic.
        hessians: [n, p, p], symmetric.
        linear: [n, p]; None for zeros.
        step_sizes: [T], >= 0.
        beta: >= 0.

    Raises:
        ValueError: Where they do not fit, or where the sum of the costs has no unique minimiser.
    """
    w = _validate.stochastic("mixing", mixing, ("row", "column"))
    h = _validate.finite_array("hessians", hessians, ndim=3)
    n, p = h.shape[:2]
    if h.shape[2] != p or w.shape != (n, n):
        raise ValueError(f"hessians has shape {h.shape} for mixing {w.shape}; give [n, p, p]")
    if np.abs(h - np.swapaxes(h, 1, 2)).max() > 1e-9 * np.abs(h).max():
        raise ValueError("hessians holds a matrix that is not symmetric; give second derivatives")
    b = np.zeros((n, p)) if linear is None else _validate.finite_array("linear", linear, ndim=2)
    if b.shape != (n, p):
        raise ValueError(f"linear has shape {b.shape}; give [{n}, {p}]")
    steps = _validate.finite_array("step_sizes", step_sizes, ndim=1)
    beta = _validate.number("beta", beta)
    if min(steps.min(), beta) < 0:
        raise ValueError(f"step_sizes reaches {steps.min():g}, beta is {beta:g}; give numbers >= 0")
    total = h.sum(axis=0)
    if np.linalg.cond(total) > 1e12:
        raise ValueError("hessians sums to a singular matrix; give costs with one minimiser")
    return Problem(w, h, b, np.linalg.solve(total, b.sum(axis=0)), steps, beta)


def variance(value: float) -> float:
    """Return a variance of the start as a float, else raise ValueError.

    Args:
        value: 0 and above.
    """
    number = _validate.number("start_variance", value)
    if number < 0:
        raise ValueError(f"start_variance is {number:g}; give a number >= 0")
    return number


def first_errors(problem: Problem, start: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the means of e and u before the first message, [n, p] each.

    Args:
        problem: Costs.
        start: [n, p] mean of x(0), or what broadcasts.
    """
    shape = problem.linear.shape
    try:
        x = np.broadcast_to(_validate.finite_array("start", start), shape)
    except ValueError:
        raise ValueError(f"start has shape {np.shape(start)}; give {list(shape)}") from None
    return x - problem.minimiser, problem.hessians @ problem.minimiser - problem.linear


def mean_error(problem: Problem, start: Any) -> np.ndarray:
    """Return E x(k) - x* for k = 1..T, [T, n, p].

    Args:
        problem: Costs and steps.
        start: As in `error`.
    """
    e, u = first_errors(problem, start)
    found = np.zeros((len(problem.step_sizes), *e.shape))
    with np.errstate(over="ignore", invalid="ignore"):
        for k, alpha in enumerate(problem.step_sizes):
            mixed = problem.mixing @ e
            u = u + problem.beta * (e - mixed)
            e = mixed - alpha * (u + (e[:, None] @ problem.hessians)[:, 0])
            found[k] = e
    return found


def advanced(problem: Problem, alpha: float, state: np.ndarray) -> np.ndarray:
    """Apply a round without noise to errors e and u, the columns of [2 n p, c].

    Args:
        problem: Matrices and gain.
        alpha: Step.
        state: [2 n p, c].
    """
    n, p = problem.hessians.shape[:2]
    e, u = state.reshape(2, n, p, -1)
    mixed = (problem.mixing @ e.reshape(n, -1)).reshape(e.shape)
    u = u + problem.beta * (e - mixed)
    e = mixed - alpha * (u + problem.hessians @ e)
    return np.stack([e, u]).reshape(state.shape)
