"""Noise correlated over rounds, one round at a time: x = C^-1 z for a strategy C.

Three routes, chosen from C alone:

- ``recursion``: C has few bands. x_t = (z_t - sum_k C_t,t-k x_t-k) / C_tt from the last x.
- ``moving``: C^-1 has few bands. x_t = sum_k (C^-1)_t,t-k z_t-k from the last z. With one band and
  many numbers, z_t-1 is drawn again and nothing is kept.
- ``blocked``: neither. All z are kept, and `BLOCK` rounds at a time are drawn and coloured by
  products with blocks of C^-1, about T / 2 multiplications a number.

Memory, in numbers of the leaf's computing dtype for n agents of d entries: width n d for the first
two (width the number of bands below the diagonal), (T + BLOCK) n d, T rounded up to whole blocks,
for the third. Coefficients are rounded to that dtype: `applied` is the strategy that results.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dpjax import _validate
from dpjax._numerics import Integer, Shape
from dpjax.mechanism import strategy as strategy_
from dpjax.mechanism.strategy import Strategy

__all__ = ["BLOCK", "route"]

BLOCK = 32
"""Rounds coloured together."""
_AGAIN = 2**22
"""From so many numbers a round on, the last round's are drawn again where no others are needed."""
WIDEST = 32
"""The most bands for which a route keeps noise; beyond it, blocks are faster."""
_HIGHEST = lax.Precision.HIGHEST
_Buffers = tuple[Array, ...]
NormalsOf = Callable[[Integer], Array]


class Route(NamedTuple):
    """The way in which a strategy is applied.

    Attributes:
        kind: One of the module's routes.
        scale: [T] factor of z_t; for blocks unused.
        weights: [T, width] weights of past noise, the latest first; for blocks [T', T'] C^-1 in
            whole blocks.

    Example:
        >>> import numpy as np
        >>> from dpjax.transforms import rounds
        >>> rounds.route(np.tri(4), 4).kind  # its inverse has two diagonals
        'moving'
    """

    kind: Literal["recursion", "moving", "blocked"]
    scale: Float[np.ndarray, " t"]
    weights: Float[np.ndarray, "t w"]

    def start(self, shape: Shape, dtype: jnp.dtype) -> _Buffers:
        """The past noise before the first round, for noise of a shape [n, d]."""
        rounds, width = self.weights.shape
        if self.kind == "blocked":
            return jnp.zeros((rounds, *shape), dtype), jnp.zeros((BLOCK, *shape), dtype)
        if self._draws_again(shape):
            return ()
        return (jnp.zeros((width, *shape), dtype),)

    def _draws_again(self, shape: Shape) -> bool:
        """Whether the last round's numbers are drawn again in place of being kept."""
        width = self.weights.shape[1]
        return self.kind == "moving" and width == 1 and math.prod(shape) >= _AGAIN

    def drawn(self, shape: Shape, t: int) -> range:
        """The rounds whose normals `step` asks for in round t, for noise of a shape [n, d]."""
        if self.kind == "blocked":
            start = t - t % BLOCK
            return range(start, start + BLOCK)
        return range(t - self._draws_again(shape), t + 1)

    def step(self, draw: NormalsOf, buffers: _Buffers, t: Integer) -> tuple[Array, _Buffers]:
        """Noise of round t, from 0, and the past noise after it.

        Args:
            draw: Normals of a round; called with t, or with every round of a block.
            buffers: From `start` or the last step.
            t: The round; beyond the last one the noise is some number.
        """
        if self.kind == "blocked":
            return self._blocked(draw, buffers, t)
        normals = draw(t)
        scale = jnp.asarray(self.scale, normals.dtype)
        weights = jnp.asarray(self.weights, normals.dtype)
        width = weights.shape[1]
        value = normals * scale[t]
        if not buffers:
            # The last round's numbers are drawn again; before round 0 their weight is zero.
            before = draw(jnp.maximum(t - 1, 0))
            return value + weights[t, 0] * before, buffers
        (past,) = buffers
        if width == 0:
            return value, buffers
        # Slot s holds round t - k with k = (t - 1 - s) mod width + 1; rounds before 0 are zero.
        slots = jnp.arange(width, dtype=t.dtype)
        lags = jnp.mod(t - 1 - slots, width)
        correlated = jnp.tensordot(weights[t][lags], past, axes=1, precision=_HIGHEST)
        value = value + correlated
        newest = value if self.kind == "recursion" else normals
        past = lax.dynamic_update_index_in_dim(past, newest, jnp.mod(t, width), 0)
        return value, (past,)

    def _blocked(self, draw: NormalsOf, buffers: _Buffers, t: Integer) -> tuple[Array, _Buffers]:
        """All past normals, and the coloured noise of the block that t is in."""
        normals, ready = buffers
        inverse = jnp.asarray(self.weights, normals.dtype)
        block = t // BLOCK
        offset = jnp.mod(t, BLOCK)
        # Loops of no trips but at a block's start: a conditional would copy its buffers.
        starts = offset == 0

        def fill(k: Array, normals: Array) -> Array:
            return lax.dynamic_update_index_in_dim(normals, draw(t + k), t + k, 0)

        def add(k: Array, ready: Array) -> Array:
            start = k * BLOCK
            coefficients = lax.dynamic_slice(inverse, (t, start), (BLOCK, BLOCK))
            right = lax.dynamic_slice_in_dim(normals, start, BLOCK)
            term = jnp.tensordot(coefficients, right, axes=1, precision=_HIGHEST)
            # The first term replaces the noise of the block before.
            return jnp.where(k == 0, 0, ready) + term

        normals = lax.fori_loop(0, jnp.where(starts, BLOCK, 0), fill, normals)
        ready = lax.fori_loop(0, jnp.where(starts, block + 1, 0), add, ready)
        return lax.dynamic_index_in_dim(ready, offset, keepdims=False), (normals, ready)


def route(strategy: Strategy, rounds: int) -> Route:
    """Return the route by which C is applied.

    Args:
        strategy: [T, T] lower triangular C with a positive diagonal.
        rounds: T.

    Raises:
        ValueError: For another matrix, or one beyond the limits of `dpjax.mechanism.strategy`.

    Example:
        >>> import numpy as np
        >>> from dpjax.transforms import rounds
        >>> rounds.route(np.eye(4) - 0.5 * np.eye(4, k=-1), 4).kind
        'recursion'
    """
    matrix = strategy_.check_strategy(strategy, rounds)
    # Few bands of C or of its inverse need little memory; C's own come first.
    diagonal = np.diag(matrix)
    inverse = strategy_.sparse_inverse_of(matrix)
    inverse_width = strategy_.width(inverse)
    if strategy_.width(matrix) <= min(WIDEST, inverse_width):
        scaled = -matrix / diagonal[:, None]
        return Route("recursion", 1 / diagonal, strategy_.bands(scaled))
    if inverse_width <= WIDEST:
        return Route("moving", np.diag(inverse), strategy_.bands(inverse))
    padded = -(-rounds // BLOCK) * BLOCK
    in_blocks = np.zeros((padded, padded))
    in_blocks[:rounds, :rounds] = inverse
    return Route("blocked", np.ones(rounds), in_blocks)


def applied(strategy: Strategy, dtype: Any = np.float32) -> Strategy:
    """Return C with rounded coefficients, the strategy of the actual noise.

    Sensitivity and guarantee must use this strategy.

    Args:
        strategy: [T, T] C.
        dtype: Computing dtype of the noise.

    Returns:
        [T, T] float64.

    Raises:
        ValueError: As `route`.

    Example:
        >>> import numpy as np
        >>> from dpjax.transforms import rounds
        >>> bool(np.allclose(rounds.applied(np.tri(4)), np.tri(4)))
        True
    """
    rounds = len(_validate.square("strategy", strategy))
    kind, *coefficients = route(strategy, rounds)
    scale, weights = (np.asarray(part, dtype).astype(np.float64) for part in coefficients)
    if kind == "blocked":
        return strategy_.inverse_of(weights[:rounds, :rounds])
    # A recursion states C itself, over its diagonal; a moving sum states its inverse.
    recursion = kind == "recursion"
    matrix = np.eye(rounds) if recursion else np.diag(scale)
    for lag in range(1, weights.shape[1] + 1):
        band = np.diag(weights[lag:, lag - 1], -lag)
        matrix += -band if recursion else band
    return matrix / scale[:, None] if recursion else strategy_.inverse_of(matrix)
