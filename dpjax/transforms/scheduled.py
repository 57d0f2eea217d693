"""Independent Laplace or Gaussian noise whose scale changes from round to round.

Which draw a leaf's noise is part of is said by `dpjax.transforms.packing`.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from dpjax import _validate
from dpjax.transforms import packing
from dpjax.transforms.laplaces import laplaces
from dpjax.transforms.noise import NoiseState, check_key, check_round
from dpjax.transforms.normals import normals

__all__ = ["Kind", "lost", "scheduled"]

Kind = Literal["laplace", "normal"]

_DRAWS = {"laplace": laplaces, "normal": normals}


def scheduled(
    scales: Float[Array, " t"], *, key: PRNGKeyArray, rounds: int, kind: Kind
) -> optax.GradientTransformation:
    """Add fresh noise of scale scales[t] to every entry of agent-stacked updates in round t.

    "laplace" is noise of density exp(-|v| / scale) / (2 scale), "normal" that of standard
    deviation scale. It is computed and added in the leaf's dtype, in float32 for narrower ones,
    whose sum is rounded once.

    Guarantee: in each of the first ``rounds`` updates every entry of every agent has noise of the
    stated law and the scale of that round, independent of all other entries, agents, leaves and
    rounds: no two share a draw. Later updates are refused, inside compiled code NaN, so that no
    round goes out with repeated or unaccounted noise. What this protects is stated by
    accounting, from the scales as the leaf's dtype rounds them. It is a simulation's noise, never
    a release's: floating-point sums of any scale tell neighbours apart by their last bits, and
    noise far smaller than the number that it is added to is rounded away
    (docs/floating-point.md).

    Args:
        scales: [T] scale of each round's noise, in the units of the updates; zero adds nothing.
            May be traced (say, vmapped over plans), and is then not checked.
        key: A single threefry key, of no other use: ``jax.random.key(seed, impl="threefry2x32")``.
        rounds: Rounds T the noise is accounted for.
        kind: "laplace" or "normal".

    Returns:
        An optax transformation with state `dpjax.transforms.noise.NoiseState`; whoever has its
        key can subtract the noise.

    Raises:
        ValueError: For another generator's key or an integer, another kind, scales that are not
            one a round, negative, or so small or large that float32 noise vanishes or overflows;
            in ``update``, for leaves without one leading axis of agents or of another than
            floating dtype.

    Example:
        >>> import jax, numpy as np
        >>> from dpjax.transforms import scheduled
        >>> key = jax.random.key(0, impl="threefry2x32")
        >>> add = scheduled.scheduled(np.array([1.0, 0.0]), key=key, rounds=2, kind="laplace")
        >>> states = np.ones((3, 2), np.float32)
        >>> noisy, state = add.update(states, add.init(states))
        >>> bool((noisy != 1).all()), int(state.round)
        (True, 1)
        >>> add.update(states, state)[0].tolist()
        [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    """
    rounds = _validate.integer("rounds", rounds)
    if rounds >= 2**31 - 1:
        raise ValueError(f"rounds is {rounds}; give a number below 2**31 - 1")
    _validate.one_of("kind", kind, tuple(_DRAWS))
    check_key(key)
    by_round = _checked(scales, rounds)
    draw = _DRAWS[kind]

    def init(params: optax.Params) -> NoiseState:
        _grouped(jax.tree_util.tree_leaves_with_path(params))
        return NoiseState(key, jnp.zeros((), jnp.int32))

    def update(
        updates: optax.Updates, state: NoiseState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, NoiseState]:
        del params
        paths = jax.tree_util.tree_leaves_with_path(updates)
        leaves, groups = [leaf for _, leaf in paths], _grouped(paths)
        check_round(state.round, rounds)
        now = jnp.take(jnp.asarray(by_round), state.round, mode="clip")
        now = jnp.where(state.round < rounds, now, jnp.nan)
        for index, group in enumerate(groups):
            shape = len(leaves[group.leaves[0]]), sum(group.sizes)
            drawn = draw(packing.draw_key(state.key, state.round, index), shape, group.dtype)
            scaled = now.astype(group.dtype) * packing.pinned(drawn, state.round)
            noise = packing.pinned(scaled, state.round)
            for position, part in packing.parts(group, noise, leaves):
                leaf = leaves[position]
                leaves[position] = (leaf.astype(group.dtype) + part).astype(leaf.dtype)
        updates = jax.tree.unflatten(jax.tree.structure(updates), leaves)
        return updates, NoiseState(state.key, state.round + 1)

    return optax.GradientTransformation(init, update)


def lost(payload: Any, scale: Float[Array, ""], kind: Kind) -> Float[Array, ""]:
    """Return how likely the largest entry of a payload is to go out without its noise.

    Floats at an entry are u apart, and noise of less than u/2 leaves the entry as it is:

        1 - exp(-u / (2 scale))        "laplace"
        erf(u / (2 sqrt(2) scale))     "normal"

    So of all entries at most this share goes out bare, on average.

    Guarantee: none. It is computed from private numbers, and is a metric as others are.

    Args:
        payload: What the noise is added to, leaves of floating dtypes.
        scale: Of the noise; zero is no noise, of which none is lost.
        kind: "laplace" or "normal".

    Returns:
        The share, float32; 1 where an entry is not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.transforms import scheduled
        >>> round(float(scheduled.lost(jnp.array([[1.0, 1e5]]), jnp.float32(0.0044), "laplace")), 3)
        0.588
    """
    half = jnp.zeros((), jnp.float32)
    for leaf in jax.tree.leaves(payload):
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        largest = jnp.max(jnp.abs(wide), initial=float(jnp.finfo(leaf.dtype).tiny))
        _, exponent = jnp.frexp(largest)
        spacing = jnp.ldexp(wide.dtype.type(float(jnp.finfo(leaf.dtype).eps)), exponent - 1)
        spacing = jnp.where(jnp.isfinite(largest), spacing, jnp.inf)
        half = jnp.maximum(half, spacing.astype(jnp.float32) / 2)
    ratio = half / jnp.where(scale > 0, scale, 1).astype(jnp.float32)
    share = -jnp.expm1(-ratio) if kind == "laplace" else jax.scipy.special.erf(ratio / np.sqrt(2))
    return jnp.where(scale > 0, share, 0)


def _grouped(paths: list[tuple[Any, Any]]) -> list[packing.Group]:
    """Pack the leaves; the first one says how many agents there are."""
    n = next((len(leaf) for _, leaf in paths if jnp.ndim(leaf)), 0)
    return packing.groups(paths, n, f"the n={n} agents of the first leaf")


def _checked(scales: Any, rounds: int) -> Array | np.ndarray:
    if not isinstance(scales, jax.core.Tracer):
        given = np.asarray(scales)
        values = _validate.finite_array("scales", given, ndim=1)
        least = values[values != 0].min(initial=1.0)
        largest = values.max(initial=0.0)
        if least < 0:
            raise ValueError(f"scales holds {least:.3g}; give scales of at least 0")
        if least < 1e-30 or largest > 1e30:
            wrong = least if least < 1e-30 else largest
            raise ValueError(
                f"scales holds {wrong:.3g}, at which noise vanishes or overflows; rescale, or give "
                "0 for a round without noise"
            )
        scales = values.astype(given.dtype if given.dtype == np.float32 else np.float64)
    if scales.shape != (rounds,):
        raise ValueError(f"scales has shape {scales.shape} for rounds = {rounds}; give one a round")
    return scales
