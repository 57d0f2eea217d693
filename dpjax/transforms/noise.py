"""Gaussian noise that is correlated over agents (and, by a strategy, over rounds).

Which draw a leaf's noise is part of, and what it depends on, is said by `dpjax.transforms.packing`:
a small model is one draw and one product a round.
"""

import contextlib
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dpjax import _validate
from dpjax._numerics import THREEFRY
from dpjax.mechanism.x64 import double_precision
from dpjax.transforms import hardened, packing
from dpjax.transforms import rounds as rounds_
from dpjax.transforms.normals import normals

__all__ = ["NoiseState", "correlated", "network_mean_variance"]


class NoiseState(NamedTuple):
    """State of `correlated`.

    Attributes:
        key: The noise key; whoever has it can subtract the noise.
        round: Rounds done, int32.
        past: With a strategy, what its route keeps of the noise before the factor over agents, a
            tuple of arrays [width, n, entries] a group (see `dpjax.transforms.rounds`); else empty.
    """

    key: PRNGKeyArray
    round: Int[Array, ""]
    past: tuple[tuple[Float[Array, "w n d"], ...], ...] = ()


def correlated(
    factor: Float[Array, "n n"],
    *,
    key: PRNGKeyArray,
    rounds: int,
    strategy: Float[np.ndarray, "t t"] | None = None,
    grid: float | None = None,
) -> optax.GradientTransformation:
    """Add noise F Z_t to agent-stacked updates; with a strategy C over rounds, F (C^-1 Z)_t.

    Z_t [n, d] is standard normal, fresh in every round t and coordinate. The product runs at full
    precision in the leaf's dtype, in float32 for narrower ones, whose sum is rounded once. With a
    grid, every normal has 64 bits, all is computed in float64, noise is added there, and the sum
    is rounded to multiples of the grid before it is rounded to the leaf's dtype.

    Guarantee: in each of the first ``rounds`` updates the noise of a coordinate over agents is
    N(0, F F'), independent of all other coordinates, and without a strategy of all other rounds.
    No two agents or rounds share a normal. Later updates are refused, inside compiled code NaN, so
    that no round goes out with repeated or unaccounted noise. With a strategy the noise is that of
    `dpjax.transforms.rounds.applied`. What this protects, and for whom, depends on the clipping
    before it and is stated by `dpjax.accounting`. Without a grid this is a simulation's noise,
    whose last bits and largest values tell neighbours apart. With one, what finite precision costs
    against an outsider who sees every message is bounded by `dpjax.accounting.finite.cost`, if
    threefry with a secret key of 64 bits is pseudorandom; such a key is no long-lived secret.

    Args:
        factor: [n, n] F, the covariance over agents being F F', or [n], the diagonal of one that
            has nothing else, with the same noise. May be traced (say, vmapped over designs), and is
            then not checked; zero gives no noise at all.
        key: A single threefry key, of no other use: ``jax.random.key(seed, impl="threefry2x32")``.
        rounds: Rounds T the noise is accounted for.
        strategy: [T, T] lower triangular C with a positive diagonal, applied by the route of
            `dpjax.transforms.rounds`, which says what is kept; None is the identity.
        grid: Spacing of a release's grid, a power of two, `dpjax.accounting.finite.grid`; None for
            a simulation.

    Returns:
        An optax transformation with state `NoiseState`.

    Raises:
        ValueError: For another generator's key or an integer, a factor that is not square or not
            finite, a strategy of the wrong shape, a grid that is no power of two; in ``update``,
            for leaves without the n agents as their leading axis or of another than floating dtype.

    Reference:
        Rodio et al., Whisper D-SGD, Algorithm 1; Denisov et al. (2022) for the strategy.

    Example:
        >>> import jax, numpy as np
        >>> from dpjax.transforms import noise
        >>> key = jax.random.key(0, impl="threefry2x32")
        >>> add = noise.correlated(np.array([[1.0, 0.0], [-1.0, 0.0]]), key=key, rounds=10)
        >>> gradients = np.zeros((2, 3), np.float32)
        >>> noisy, state = add.update(gradients, add.init(gradients))
        >>> noisy.sum(axis=0).tolist(), int(state.round)
        ([0.0, 0.0, 0.0], 1)
    """
    rounds = _validate.integer("rounds", rounds)
    if rounds >= 2**31 - 1:
        raise ValueError(f"rounds is {rounds}; give a number below 2**31 - 1")
    check_key(key)
    weights = _checked_factor(factor)
    n = weights.shape[-1]
    over_rounds = None if strategy is None else rounds_.route(strategy, rounds)
    released = grid is not None
    if grid is not None and not (0 < grid < math.inf and math.frexp(grid)[0] == 0.5):
        raise ValueError(f"grid is {grid}; give a power of two, or None for a simulation")

    def precision() -> contextlib.AbstractContextManager:
        return double_precision() if released else contextlib.nullcontext()

    def grouped(paths: list[tuple[Any, Any]]) -> list[packing.Group]:
        wide = np.float64 if released else None
        return packing.groups(paths, n, f"the n={n} agents of the factor", wide)

    def init(params: optax.Params) -> NoiseState:
        groups = grouped(jax.tree_util.tree_leaves_with_path(params))
        past: tuple[tuple[Array, ...], ...] = ()
        if over_rounds is not None:
            with precision():
                past = tuple(over_rounds.start((n, sum(g.sizes)), g.dtype) for g in groups)
        return NoiseState(key, jnp.zeros((), jnp.int32), past)

    def update(
        updates: optax.Updates, state: NoiseState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, NoiseState]:
        del params
        paths = jax.tree_util.tree_leaves_with_path(updates)
        leaves = [leaf for _, leaf in paths]
        groups = grouped(paths)
        check_round(state.round, rounds)
        with precision():
            past = add(leaves, groups, state)
        updates = jax.tree.unflatten(jax.tree.structure(updates), leaves)
        return updates, NoiseState(state.key, state.round + 1, past)

    def add(leaves: list[Any], groups: list[packing.Group], state: NoiseState) -> tuple[Any, ...]:
        valid = jnp.where(state.round < rounds, 1.0, jnp.nan)
        past = []
        for index, group in enumerate(groups):
            draw = _draw(state.key, index, (n, sum(group.sizes)), group.dtype, released)
            if over_rounds is None:
                drawn = draw(state.round)
            else:
                drawn, kept = over_rounds.step(draw, state.past[index], state.round)
                past.append(kept)
            colour = weights.astype(group.dtype) * valid.astype(group.dtype)
            if weights.ndim == 1:
                scaled = colour[:, None] * packing.pinned(drawn, state.round)
                noise = packing.pinned(scaled, state.round)
            else:
                noise = jnp.matmul(colour, drawn, precision=jax.lax.Precision.HIGHEST)
            for position, part in packing.parts(group, noise, leaves):
                leaf = leaves[position]
                noisy = leaf.astype(group.dtype) + part
                noisy = noisy if grid is None else hardened.rounded(noisy, grid)
                leaves[position] = noisy.astype(leaf.dtype)
        return tuple(past)

    return optax.GradientTransformation(init, update)


def network_mean_variance(covariance: Float[np.ndarray, "n n"]) -> float:
    """Variance of one coordinate of the agents' average noise, 1'R1 / n^2.

    No doubly stochastic mixing changes the average, so this part of the noise stays however
    often agents mix.

    Args:
        covariance: [n, n] noise covariance R over agents.

    Returns:
        The variance, in the noise's units squared.

    Raises:
        ValueError: For a matrix that is not square or not finite.
    """
    matrix = _validate.square("covariance", covariance)
    return float(matrix.sum() / len(matrix) ** 2)


def _draw(key: PRNGKeyArray, group: int, shape: tuple[int, int], dtype: Any, released: bool) -> Any:
    """Normals of a group by round; key and round decide them, not what is vmapped around."""

    def draw(round: Any) -> Array:
        own = packing.draw_key(key, round, group)
        return hardened.normals(own, shape) if released else normals(own, shape, dtype)

    return draw


def check_round(round: Any, rounds: int) -> None:
    """Refuse a round past the last one, where its number is known (compiled code gives NaN).

    Args:
        round: Rounds done; nothing is checked while it is traced.
        rounds: Rounds the noise is accounted for.

    Raises:
        ValueError: If none is left.
    """
    if not isinstance(round, jax.core.Tracer) and int(round) >= rounds:
        raise ValueError(
            f"round is {int(round)}, the noise is accounted for {rounds} rounds; stop there, or "
            "make a plan for more"
        )


def check_key(key: Any) -> None:
    """Refuse anything but one typed threefry key.

    Args:
        key: What was given as ``key``.

    Raises:
        ValueError: With the call that makes one.
    """
    remedy = 'give one typed threefry key, jax.random.key(seed, impl="threefry2x32")'
    dtype = getattr(key, "dtype", None)
    if dtype is None or not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        raise ValueError(f"key is {type(key).__name__} of dtype {dtype}; {remedy}")
    generator = str(jax.random.key_impl(key))
    if generator != THREEFRY:
        raise ValueError(f"key is of generator {generator!r}; {remedy}")
    if key.shape != ():
        raise ValueError(f"key has shape {key.shape}; {remedy} (vmap over several)")


def _checked_factor(factor: Any) -> Array | np.ndarray:
    if not isinstance(factor, jax.core.Tracer):
        factor = np.asarray(factor)
        if factor.ndim == 1:
            factor = _validate.finite_array("factor", factor, ndim=1).astype(factor.dtype)
        else:
            if not np.issubdtype(factor.dtype, np.float32):
                factor = _validate.square("factor", factor)
            _validate.square("factor", factor)
        largest = float(np.abs(factor).max(initial=0.0))
        if largest > 0 and not 1e-30 <= largest <= 1e30:
            raise ValueError(
                f"factor has a largest entry of {largest:.3g}, at which noise vanishes or "
                "overflows; rescale it"
            )
    if factor.ndim not in (1, 2) or factor.shape[0] != factor.shape[-1]:
        raise ValueError(
            f"factor has shape {factor.shape}; give a square matrix over the agents, or a diagonal"
        )
    return factor
