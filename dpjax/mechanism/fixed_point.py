"""The accelerated fixed point over the multipliers, under ``lax.while_loop``, in float64."""

from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dpjax._numerics import Integer, Scalar

__all__ = ["LARGEST_SVD"]

_Vector: TypeAlias = Float[Array, " n"]
_Matrix: TypeAlias = Float[Array, "n n"]
_Window: TypeAlias = Float[Array, "w n"]
_Flag: TypeAlias = Bool[Array, ""]
_WINDOW = 8
_LOG_FLOOR = -18.420680743952367  # log(1e-8): multipliers stay above 1e-8 of the largest
_JUMP = 6.0  # an accelerated step longer than this in any log-multiplier is not trusted
_FALL = 1e-12  # a relative fall of the dual below this is rounding
# Singular vectors of F L^1/2 resolve twice the digits of eigenvectors of F L F', at three times
# the cost: weak directions matter on small dense graphs, time on large ones.
LARGEST_SVD = 512
_PATIENCE = 40  # iterations without a better gap, after which rounding has the last word


class _Iterate(NamedTuple):
    """Carry of the loop; x are the logarithms of the multipliers at the point to evaluate."""

    x: _Vector
    plain: _Vector  # the plain step from the last accepted point
    last_x: _Vector
    last_step: _Vector
    steps_x: _Window
    steps_f: _Window
    stored: Integer  # differences pushed since the window was cleared
    fresh: _Flag  # no accepted point since the window was cleared
    dual: Scalar
    best_x: _Vector
    best_gap: Scalar
    since_best: Integer
    iterations: Integer


def _evaluate(factor: _Matrix, x: _Vector) -> tuple[_Vector, Scalar, Scalar]:
    """Return diag(P), the scaled dual value tr(S)^2 / sum(l), and the relative gap at exp(x)."""
    n = x.shape[0]
    multipliers = jnp.exp(x)
    eps = jnp.finfo(x.dtype).eps
    if n <= LARGEST_SVD:
        left, roots, _ = jnp.linalg.svd(factor * jnp.sqrt(multipliers))
    else:
        squares, left = jnp.linalg.eigh((factor * multipliers) @ factor.T)
        roots = jnp.sqrt(jnp.where(squares > n * eps * squares[-1], squares, 0.0))
    nonzero = roots > n * eps * jnp.max(roots)
    inverse = jnp.where(nonzero, 1.0 / jnp.where(nonzero, roots, 1.0), 0.0)
    rotated = left.T @ factor
    diagonal = jnp.sum(inverse[:, None] * rotated**2, axis=0)
    dual = jnp.sum(roots) ** 2 / jnp.sum(multipliers)
    # Slack entries at the floor are raised to 1 at the end and then cost nothing: leave them out.
    slack = (x <= jnp.max(x) + 0.99 * _LOG_FLOOR) & (diagonal < 1.0)
    weights = jnp.where(slack, 0.0, multipliers)
    gap = jnp.max(diagonal) * jnp.sum(weights) / jnp.sum(weights * diagonal) - 1.0
    return diagonal, dual, gap


def _floored(x: _Vector) -> _Vector:
    return jnp.maximum(x, jnp.max(x) + _LOG_FLOOR)


def _advance(factor: _Matrix, state: _Iterate) -> _Iterate:
    x = state.x
    diagonal, dual, gap = _evaluate(factor, x)
    # log l <- log l + log P_ii, in steps that cannot overflow.
    logarithm = jnp.log(jnp.maximum(diagonal, 1e-300))
    plain = _floored(x + jnp.clip(logarithm, -20.0, 20.0))
    step = plain - x
    push = ~state.fresh
    # A step of Anderson's that lowers the dual is taken back.
    fell = ~(dual >= state.dual * (1.0 - _FALL)) & push

    # The window is a ring of the last differences.
    slot = state.stored % _WINDOW
    steps_x = jnp.where(push, state.steps_x.at[slot].set(x - state.last_x), state.steps_x)
    steps_f = jnp.where(push, state.steps_f.at[slot].set(step - state.last_step), state.steps_f)
    stored = state.stored + push.astype(state.stored.dtype)
    # Anderson's acceleration: the combination of past steps that cancels this one.
    weights = jnp.linalg.lstsq(steps_f.T, step, rcond=1e-12)[0]
    accelerated = _floored(plain - weights @ (steps_x + steps_f))
    # An accelerated step that long has left where its model holds.
    wild = ~(jnp.max(jnp.abs(accelerated - x)) <= _JUMP)
    clear = fell | wild
    better = ~fell & (gap < state.best_gap)
    # Where the step is taken back, the last accepted point stays, and its plain step is next.
    accepted = state._replace(plain=plain, last_x=x, last_step=step, dual=dual)
    accepted = jax.tree.map(partial(jnp.where, fell), state, accepted)
    return accepted._replace(
        x=jnp.where(fell, state.plain, jnp.where(wild, plain, accelerated)),
        steps_x=jnp.where(clear, 0.0, steps_x),
        steps_f=jnp.where(clear, 0.0, steps_f),
        stored=jnp.where(clear, 0, stored),
        fresh=fell,
        best_x=jnp.where(better, x, state.best_x),
        best_gap=jnp.where(better, gap, state.best_gap),
        since_best=jnp.where(better, 0, state.since_best + 1),
        iterations=state.iterations + 1,
    )


@jax.jit
def climb(
    factor: _Matrix,
    start: _Vector,
    tolerance: Scalar,
    limit: Integer,
) -> _Iterate:
    """Climb the dual from ``start``; stop on the gap, on stagnation, or after ``limit`` steps."""
    zeros = jnp.zeros_like(start)
    window = jnp.zeros((_WINDOW, *start.shape), start.dtype)
    zero = jnp.zeros((), jnp.int32)
    x = _floored(start)
    state = _Iterate(
        x=x,
        plain=x,
        last_x=zeros,
        last_step=zeros,
        steps_x=window,
        steps_f=window,
        stored=zero,
        fresh=jnp.ones((), bool),
        dual=jnp.zeros((), start.dtype),
        best_x=x,
        best_gap=jnp.full((), jnp.inf, start.dtype),
        since_best=zero,
        iterations=zero,
    )

    def unfinished(state: _Iterate) -> _Flag:
        going = (state.best_gap > tolerance) & (state.since_best < _PATIENCE)
        # Tolerance 0 asks for exactly `limit` iterations, so that every agent does the same.
        return (going | (tolerance <= 0)) & (state.iterations < limit)

    return jax.lax.while_loop(unfinished, partial(_advance, factor), state)
