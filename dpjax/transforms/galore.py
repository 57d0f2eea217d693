"""Adam in a low-rank space of each matrix, which follows the noisy gradients.

Guarantee: none of its own and none lost: post-processing. The space of a round is spanned by
singular vectors of privatised gradients of earlier rounds.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax import _validate
from dpjax.transforms import variance
from dpjax.transforms.adam import AdamState, scale_by_adam
from dpjax.transforms.lowpass import LowpassState

__all__ = ["GaloreState", "scale_by_galore"]

_EXACT = jax.lax.Precision.HIGHEST


class GaloreState(NamedTuple):
    """What it keeps.

    Attributes:
        bases: [s, r] orthonormal columns for each matrix that is projected, s its shorter side;
            [0, 0] for every other leaf.
        adam: Adam's state in the projected shapes.
    """

    bases: tuple[Any, ...]
    adam: AdamState


def scale_by_galore(
    noise: variance.Variance,
    *,
    rank: int | None = 128,
    every: int = 50,
    on_change: Literal["turn", "reset"] = "turn",
    b1: float = 0.9,
    b2: float = 0.999,
    floor: float = 1e-8,
    filter: tuple[Sequence[float], Sequence[float]] | None = None,
) -> optax.GradientTransformation:
    """Run `scale_by_adam` on each matrix's projection on its leading singular vectors.

    Leaves of two axes and more are matrices of their last axis against the others; those whose
    shorter side is above the rank are projected on it, all others stay as they are. After every
    ``every`` rounds the space is that of the last noisy gradient; a gradient's own singular vectors
    would gather its noise, so no round uses its own, and the first ``every``-th begins in the space
    of the first coordinates. The projection is orthonormal: white noise keeps its variance in it.

    Args:
        noise: Variance of the noise in a coordinate of what comes in, or a function of the round.
        rank: r; None is a quarter of each matrix's shorter side, rounded up.
        every: Rounds between changes of the space.
        on_change: "turn" turns past moments by P_new' P_old, and the second moment by its squares
            (with as much of the noise's variance as turns out of the space put back, since it is
            taken off later); "reset" begins anew with moments of 0, corrected as at the start.
        b1: As `scale_by_adam`.
        b2: As `scale_by_adam`.
        floor: As `scale_by_adam`.
        filter: As `scale_by_adam`.

    Returns:
        The transformation, without a step size; its state is a `GaloreState`.

    Raises:
        ValueError: For ranks or intervals below 1, another ``on_change``, or as `scale_by_adam`.

    Reference:
        Zhao et al., GaLore (2024), whose larger models take a quarter (256 of 1,024); Zhang et al.,
        DOPPLER, Algorithm 3, whose space is that of the round's own gradient and which says nothing
        of the rank nor of what past moments become.
    """
    if rank is not None:
        rank = _validate.integer("rank", rank)
    every = _validate.integer("every", every)
    _validate.one_of("on_change", on_change, ("turn", "reset"))
    adam = scale_by_adam(noise, b1=b1, b2=b2, floor=floor, filter=filter)

    def init(params: Any) -> GaloreState:
        leaves = jax.tree.leaves(params)
        bases = tuple(_coordinates(leaf, rank) for leaf in leaves)
        return GaloreState(bases, adam.init(_projected(leaves, bases)))

    def update(updates: Any, state: GaloreState, params: Any = None) -> tuple[Any, GaloreState]:
        del params
        leaves, structure = jax.tree.flatten(updates)
        moved, kept = adam.update(_projected(leaves, state.bases), state.adam)
        out = [
            _back(part, basis, leaf)
            for part, basis, leaf in zip(moved, state.bases, leaves, strict=True)
        ]

        def change(_: None) -> GaloreState:
            bases = tuple(
                _leading(leaf, basis) for leaf, basis in zip(leaves, state.bases, strict=True)
            )
            if on_change == "reset":
                return GaloreState(bases, adam.init(_projected(leaves, bases)))
            return GaloreState(bases, _turned(kept, state.bases, bases, leaves))

        due = (state.adam.rounds + 1) % every == 0
        new = jax.lax.cond(due, change, lambda _: GaloreState(state.bases, kept), None)
        return jax.tree.unflatten(structure, out), new

    return optax.GradientTransformation(init, update)


def _matrix(leaf: Any) -> Any:
    return leaf.reshape(-1, leaf.shape[-1])


def _coordinates(leaf: Any, rank: int | None) -> Any:
    """The first basis of a leaf: [0, 0] where it is not projected."""
    if jnp.ndim(leaf) < 2:
        return jnp.zeros((0, 0))
    side = min(_matrix(leaf).shape)
    rank = -(-side // 4) if rank is None else rank
    return jnp.eye(side, rank, dtype=leaf.dtype) if side > rank else jnp.zeros((0, 0))


def _apply(turn: Any, part: Any, leaf: Any) -> Any:
    """A map of the projected side of a part, whichever side that is."""
    rows, columns = _matrix(leaf).shape
    if rows <= columns:
        return jnp.matmul(turn, part, precision=_EXACT)
    return jnp.matmul(part, turn.T, precision=_EXACT)


def _projected(leaves: Sequence[Any], bases: Sequence[Any]) -> list[Any]:
    return [
        _apply(basis.T, _matrix(leaf), leaf) if basis.size else leaf
        for leaf, basis in zip(leaves, bases, strict=True)
    ]


def _back(part: Any, basis: Any, leaf: Any) -> Any:
    return _apply(basis, part, leaf).reshape(leaf.shape) if basis.size else part


def _leading(leaf: Any, basis: Any) -> Any:
    """Leading singular vectors of the shorter side, [s, r]."""
    if not basis.size:
        return basis
    matrix = _matrix(leaf)
    short = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    _, vectors = jnp.linalg.eigh(jnp.matmul(short, short.T, precision=_EXACT))
    return vectors[:, : -basis.shape[1] - 1 : -1]


def _turned(adam: AdamState, old: Any, new: Any, leaves: Sequence[Any]) -> AdamState:
    """Past moments in the new space."""
    first: LowpassState = adam.first

    def turn(parts: Sequence[Any], square: bool) -> list[Any]:
        turned = []
        for part, before, after, leaf in zip(parts, old, new, leaves, strict=True):
            if before.size:
                matrix = jnp.matmul(after.T, before, precision=_EXACT)
                if square:
                    weights = jnp.square(matrix)
                    lost = 1 - jnp.sum(weights, axis=1)
                    along = lost[:, None] if _rows_first(leaf) else lost[None, :]
                    part = _apply(weights, part, leaf) + (along * adam.noise).astype(part.dtype)
                else:
                    part = _apply(matrix, part, leaf)
            turned.append(part)
        return turned

    delayed = tuple(turn(parts, square=False) for parts in first.delayed)
    second = turn(adam.second, square=True)
    return adam._replace(first=first._replace(delayed=delayed), second=second)


def _rows_first(leaf: Any) -> bool:
    rows, columns = _matrix(leaf).shape
    return rows <= columns
