"""Optimizers for noisy gradients: noise-corrected Adam and GaLore.

Guarantee: none by themselves. They are links of an optimizer (``Chain``) behind the noise, and
read noisy gradients alone. The correction of a second moment is the known variance of the noise,
not data. GaLore's space of a round is spanned by singular vectors of noisy gradients of earlier
rounds.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int
from optax import GradientTransformation, OptState, Params, Updates

from dpjax import _validate
from dpjax.mechanism import filters
from dpjax.transforms.lowpass import NoiseVariance, lowpass, passed

__all__ = ["scale_by_adam", "scale_by_galore"]

Variance = float | Float[Array, ""] | Callable[..., Any]
"""Of a coordinate's noise: fresh in every round, or a function of the round and the lag."""

_EXACT = jax.lax.Precision.HIGHEST
_Matrix = Float[Array, "r c"]
_Basis = Float[Array, "s r"]
_Leaves = Sequence[Array]
_Filter = tuple[Sequence[float], Sequence[float]] | None
"""(b, a) of a low-pass filter as the first moment; None is an average."""


class _AdamState(NamedTuple):
    """The state of Adam.

    Attributes:
        first: State of the first moment's filter.
        second: Running means of squared gradients, with the noise unless its variance is passed.
        noise: Running mean of the noise's variance, which ``second`` includes.
        rounds: Rounds done.
    """

    first: OptState
    second: Updates
    noise: Float[Array, ""]
    rounds: Int[Array, ""]


def scale_by_adam(
    noise: Variance,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    floor: float = 1e-8,
    filter: _Filter = None,
) -> GradientTransformation:
    """Divide a filtered gradient by the root of its second moment, corrected for the noise.

    The update is m / sqrt(max(v - noise, floor)). m is the bias-corrected first moment: an average
    at rate b1, or a low-pass filter. v is the bias-corrected average of squares of noisy gradients.
    noise is the variance of the noise, averaged over the rounds as v is. With noise = 0 it is Adam,
    whose v holds mostly noise. The filter is applied here and not before, since v would then hold
    noise of variance noise * sum kappa^2.

    Args:
        noise: Variance of the noise in a coordinate of the noisy gradient, (sigma C / B)^2 for a
            mean of B records; or a function of the round where it changes. With
            `dpjax.transforms.lowpass.passed` every update receives it: a number, or a tree like
            the update's, by coordinate.
        b1: Decay of the first moment, without a filter.
        b2: Decay of the second.
        floor: Smallest second moment.
        filter: (b, a) of a low-pass filter as the first moment.

    Returns:
        The transformation, without a step size. Its ``update`` takes
        ``noise_variance``, where noise is passed, and only there.

    Raises:
        ValueError: For noise below 0, decays outside [0, 1), a floor of 0, or a filter that
            `lowpass` refuses.

    Reference:
        Tang et al., DP-AdamBC (2024), Algorithm 1; by coordinate, Nicolas et al., Lemma 3.2; Zhang
        et al., DOPPLER, Algorithm 3, whose v is corrected by 1 - beta^t where its recursion,
        counting from 0, needs 1 - (1 - beta)^(t+1), and keeps the noise.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.contrib import optimizers
        >>> link = optimizers.scale_by_adam(noise=0.25, floor=1e-4)
        >>> update, state = link.update(jnp.array([1.0, -1.0]), link.init(jnp.zeros(2)))
        >>> [f"{entry:.3f}" for entry in update]  # 1 / sqrt(1 - 0.25)
        ['1.155', '-1.155']
    """
    of_round = per_round(noise)
    _validate.positive("floor", floor)
    for name, decay in (("b1", b1), ("b2", b2)):
        if not 0 <= _validate.number(name, decay) < 1:
            raise ValueError(f"{name} is {decay!r}; give a decay from 0 to below 1")
    if filter is not None:
        b, a = filter_of(filter)
    else:
        b = (1 - b1,)
        a = (-b1,) if b1 else ()
    first = lowpass(b, a)

    def init(params: Params) -> _AdamState:
        second = jax.tree.map(jnp.zeros_like, params)
        rounds = jnp.int32(0)
        return _AdamState(first.init(params), second, jnp.float32(0), rounds)

    def update(
        updates: Updates,
        state: _AdamState,
        params: Params | None = None,
        *,
        noise_variance: Updates | None = None,
        **others: Any,
    ) -> tuple[Updates, _AdamState]:
        mean, filter_state = first.update(updates, state.first)
        squares = jax.tree.map(jnp.square, updates)
        if noise is passed:
            # Subtracted from each square: a separate mean by coordinate would be one more model.
            if noise_variance is None:
                raise ValueError(
                    "noise_variance is None for noise that is passed; give the variance"
                )
            squares = _less_noise(squares, noise_variance)
            variance = jnp.float32(0)
        else:
            variance = of_round(state.rounds)

        def averaged(old: Array, new: Array) -> Array:
            return b2 * old + (1 - b2) * new

        second = jax.tree.map(averaged, state.second, squares)
        rounds = state.rounds + 1
        # Averages from zero hold 1 - b2^t of their weight, the noise's alike.
        correction = 1 - jnp.float32(b2) ** rounds.astype(jnp.float32)
        noise_mean = b2 * state.noise + (1 - b2) * variance

        def scaled(m: Array, v: Array) -> Array:
            signal = (v - noise_mean) / correction
            # Noise may exceed its mean, and leave nothing to take a root of.
            deviation = jnp.sqrt(jnp.maximum(signal, floor))
            return m / deviation.astype(m.dtype)

        after = _AdamState(filter_state, second, noise_mean.astype(jnp.float32), rounds)
        return jax.tree.map(scaled, mean, second), after

    return optax.GradientTransformationExtraArgs(init, update)


def per_round(noise: Variance) -> Callable[..., Any] | NoiseVariance:
    """Return the variance as a function of the round, from a number or a function.

    Args:
        noise: A variance, fresh in every round; or a function of the round, and of the lag if
            needed. Functions and arrays are not checked.

    Raises:
        ValueError: For another value, or one below 0.
    """
    if callable(noise):
        return noise
    if not isinstance(noise, jax.Array) and _validate.number("noise", noise) < 0:
        raise ValueError(f"noise is {noise!r}; give a variance of at least 0")
    return NoiseVariance(noise)


def filter_of(value: object) -> filters.Filter:
    """Return the filter that an argument ``filter`` gives, `dpjax.mechanism.filters.check_filter`.

    Args:
        value: (b, a).

    Raises:
        ValueError: For something else, a name say, or coefficients that no run should use.
    """
    if not isinstance(value, list | tuple) or len(value) not in (1, 2):
        raise ValueError(
            f"filter is {_validate.shown(value)}; give coefficients (b, a), such as "
            "transforms.lowpass.FILTERS['f1']"
        )
    return filters.check_filter(*value)


def _less_noise(squares: Updates, noise_variance: Updates) -> Updates:
    """Squares minus the variance of the noise: one for all coordinates, or a tree like them."""
    if jax.tree_util.all_leaves([noise_variance]):
        noise_variance = jax.tree.map(lambda _: noise_variance, squares)
    return jax.tree.map(lambda s, v: s - jnp.asarray(v, s.dtype), squares, noise_variance)


class _GaloreState(NamedTuple):
    """The state of GaLore.

    Attributes:
        bases: [s, r] orthonormal columns for each matrix that is projected, s its shorter side;
            [0, 0] for every other leaf.
        adam: Adam's state in the projected shapes.
    """

    bases: tuple[_Basis, ...]
    adam: _AdamState


def scale_by_galore(
    noise: Variance,
    *,
    rank: int | None = 128,
    every: int = 50,
    on_change: Literal["turn", "reset"] = "turn",
    b1: float = 0.9,
    b2: float = 0.999,
    floor: float = 1e-8,
    filter: _Filter = None,
) -> GradientTransformation:
    """Run `scale_by_adam` on each matrix's projection on its leading singular vectors.

    Leaves of two axes and more are matrices of their last axis against the others. Those with a
    shorter side above the rank are projected on it; all others are unchanged. After every ``every``
    rounds the space becomes that of the last noisy gradient. A gradient's singular vectors would
    collect its noise, so no round uses its own space, and the first rounds use that of the first
    coordinates. The projection is orthonormal: white noise keeps its variance in it.

    Args:
        noise: Variance of the noise in a coordinate of the noisy gradient, or a function of the
            round.
        rank: r; None is a quarter of each matrix's shorter side, rounded up.
        every: Rounds between changes of the space.
        on_change: "turn" rotates past moments by P_new' P_old, and the second moment by its
            squares. It adds the variance of noise that leaves the space, since the correction
            subtracts it later. "reset" starts again with moments of 0 and the bias correction.
        b1: As `scale_by_adam`.
        b2: As `scale_by_adam`.
        floor: As `scale_by_adam`.
        filter: As `scale_by_adam`.

    Returns:
        The transformation, without a step size.

    Raises:
        ValueError: For ranks or intervals below 1, another ``on_change``, or as `scale_by_adam`.

    Reference:
        Zhao et al., GaLore (2024), whose larger models take a quarter (256 of 1,024). Zhang et al.,
        DOPPLER, Algorithm 3, takes the space of the round's gradient, and states neither the rank
        nor the treatment of past moments.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.contrib import optimizers
        >>> link = optimizers.scale_by_galore(noise=0.01, rank=2, every=10)
        >>> update, state = link.update(jnp.ones((6, 4)), link.init(jnp.ones((6, 4))))
        >>> update.shape
        (6, 4)
    """
    # None is a quarter of each matrix's shorter side, which only a matrix knows.
    if rank is not None:
        rank = _validate.integer("rank", rank)
    every = _validate.integer("every", every)
    _validate.one_of("on_change", on_change, ("turn", "reset"))
    adam = scale_by_adam(noise, b1=b1, b2=b2, floor=floor, filter=filter)

    def init(params: Params) -> _GaloreState:
        leaves = jax.tree.leaves(params)
        bases = tuple(_coordinates(leaf, rank) for leaf in leaves)
        return _GaloreState(bases, adam.init(_projected(leaves, bases)))

    def update(
        updates: Updates, state: _GaloreState, params: Params | None = None
    ) -> tuple[Updates, _GaloreState]:
        leaves, structure = jax.tree.flatten(updates)
        projected = _projected(leaves, state.bases)
        parts, adam_state = adam.update(projected, state.adam)
        scaled = []
        for part, basis, leaf in zip(parts, state.bases, leaves, strict=True):
            if basis.size:
                part = _apply(basis, part, leaf).reshape(leaf.shape)
            scaled.append(part)

        def change(_: None) -> _GaloreState:
            # The space of this round's gradient serves the rounds after it alone.
            bases = tuple(map(_leading, leaves, state.bases))
            if on_change == "reset":
                return _GaloreState(bases, adam.init(_projected(leaves, bases)))
            return _GaloreState(bases, _turned(adam_state, state.bases, bases, leaves))

        def keep(_: None) -> _GaloreState:
            return _GaloreState(state.bases, adam_state)

        # A conditional, so that eigenvectors are computed in these rounds alone.
        due = (state.adam.rounds + 1) % every == 0
        after = jax.lax.cond(due, change, keep, None)
        return jax.tree.unflatten(structure, scaled), after

    return GradientTransformation(init, update)


def _matrix(leaf: Array) -> _Matrix:
    """A leaf as a matrix of its last axis against the others."""
    return leaf.reshape(-1, leaf.shape[-1])


def _coordinates(leaf: Array, rank: int | None) -> _Basis:
    """The first basis of a leaf: [0, 0] where it is not projected."""
    if jnp.ndim(leaf) >= 2:
        side = min(_matrix(leaf).shape)
        if rank is None:
            rank = -(-side // 4)
        if side > rank:
            return jnp.eye(side, rank, dtype=leaf.dtype)
    return jnp.zeros((0, 0))


def _apply(turn: _Matrix, part: _Matrix, leaf: Array) -> _Matrix:
    """A map of the projected side of a part, which may be either side."""
    if _rows_first(leaf):
        return jnp.matmul(turn, part, precision=_EXACT)
    return jnp.matmul(part, turn.T, precision=_EXACT)


def _projected(leaves: _Leaves, bases: Sequence[_Basis]) -> list[Array]:
    """Coordinates in the bases; leaves without one are unchanged."""
    parts = []
    for leaf, basis in zip(leaves, bases, strict=True):
        parts.append(_apply(basis.T, _matrix(leaf), leaf) if basis.size else leaf)
    return parts


# One matrix at a time under a map: on a CPU, jaxlib's batched calls wait for threads of the pool
# that they hold a thread of, and never end where as many layers as cores are at it.
_eigenvectors = jax.custom_batching.sequential_vmap(lambda matrix: jnp.linalg.eigh(matrix)[1])


def _leading(leaf: Array, basis: _Basis) -> _Basis:
    """Leading singular vectors of the shorter side, [s, r]."""
    if not basis.size:
        return basis
    matrix = _matrix(leaf)
    short = matrix if _rows_first(leaf) else matrix.T
    vectors = _eigenvectors(jnp.matmul(short, short.T, precision=_EXACT))
    return vectors[:, : -basis.shape[1] - 1 : -1]


def _turned(
    adam: _AdamState, old: Sequence[_Basis], new: Sequence[_Basis], leaves: _Leaves
) -> _AdamState:
    """Past moments in the new space."""
    first = adam.first

    def turn(parts: _Leaves, square: bool) -> list[Array]:
        turned = []
        for part, before, after, leaf in zip(parts, old, new, leaves, strict=True):
            if before.size:
                matrix = jnp.matmul(after.T, before, precision=_EXACT)
                if square:
                    # Noise that leaves the space is replaced: the correction subtracts it later.
                    weights = jnp.square(matrix)
                    lost = 1 - jnp.sum(weights, axis=1)
                    side = lost[:, None] if _rows_first(leaf) else lost[None, :]
                    lost_noise = (side * adam.noise).astype(part.dtype)
                    part = _apply(weights, part, leaf) + lost_noise
                else:
                    part = _apply(matrix, part, leaf)
            turned.append(part)
        return turned

    delayed = tuple(turn(parts, square=False) for parts in first.delayed)
    second = turn(adam.second, square=True)
    return adam._replace(first=first._replace(delayed=delayed), second=second)


def _rows_first(leaf: Array) -> bool:
    """Whether rows are the shorter side, which is projected."""
    rows, columns = _matrix(leaf).shape
    return rows <= columns
