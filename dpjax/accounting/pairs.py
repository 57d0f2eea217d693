"""Trials of pairs of variables, before an estimate: checked, standardised, jittered."""

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from dpjax import _validate

__all__ = ["jittered"]

SCALE = 1e-10
"""Width of jitter over a coordinate's spread."""

LARGEST = 1e150
"""Beyond it squares, of which standard deviations are made, overflow."""


def jittered(
    x: ArrayLike, seed: int | tuple[int, ...], *, ties_only: bool = False
) -> Float[np.ndarray, "..."]:
    """Return a copy with a little uniform noise, which makes repeated values different ones.

    Each coordinate's noise is 1e-10 wide in units of its interquartile range over the trials (its
    standard deviation, where that range is 0); a constant coordinate stays as it is.

    Args:
        x: [N, d] trials, or [R, N, d] of R rounds; not changed.
        seed: Of the noise, a whole number or several; the same one gives the same noise.
        ties_only: Leave coordinates alone in which no value comes twice.

    Returns:
        Float64 of x's shape.

    Raises:
        ValueError: For entries that are not finite, another shape, or a seed below 0.

    Example:
        >>> copies = [[1.0], [1.0], [2.0]]
        >>> len(np.unique(jittered(copies, seed=0)))
        3
    """
    values = _validate.finite_array("x", x)
    if values.ndim not in (2, 3):
        raise ValueError(f"x has shape {values.shape}; give [N, d], or [R, N, d] of R rounds")
    parts = seed if isinstance(seed, tuple) else (seed,)
    parts = tuple(_validate.integer("seed", part, least=0) for part in parts)
    low, high = np.quantile(values, [0.25, 0.75], axis=-2, keepdims=True)
    spread = np.where(high > low, high - low, values.std(axis=-2, keepdims=True))
    # Rounding leaves a constant coordinate a standard deviation.
    spread[values.min(axis=-2, keepdims=True) == values.max(axis=-2, keepdims=True)] = 0.0
    if ties_only:
        repeated = np.diff(np.sort(values, axis=-2), axis=-2) == 0
        spread *= repeated.any(axis=-2, keepdims=True)
    noise = np.random.default_rng(parts).uniform(-0.5, 0.5, size=values.shape)
    return values + SCALE * spread * noise


def standardised(x: np.ndarray) -> np.ndarray:
    """Coordinates of mean 0 and standard deviation 1 over the trials; constant ones are 0."""
    constant = x.min(axis=1, keepdims=True) == x.max(axis=1, keepdims=True)
    spread = np.where(constant, 1.0, x.std(axis=1, keepdims=True))
    return np.where(constant, 0.0, (x - x.mean(axis=1, keepdims=True)) / spread)


def constant(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[R] True where x or y, [R, N, d], is the same in all trials."""
    same = [(each.min(axis=1) == each.max(axis=1)).all(axis=1) for each in (x, y)]
    return same[0] | same[1]


def checked(x: ArrayLike, y: ArrayLike, ndim: int) -> tuple[np.ndarray, np.ndarray]:
    """Float64 copies [R, N, d] of two arrays of two dimensions (R is 1) or three.

    Raises:
        ValueError: For entries that are not finite or too large, or shapes that do not match.
    """
    form = "[N, d], one row a trial (x[:, None] for scalars)" if ndim == 2 else "[R, N, d]"
    arrays = []
    for name, value in (("x", x), ("y", y)):
        array = _validate.finite_array(name, value)
        if array.ndim != ndim:
            raise ValueError(f"{name} has shape {array.shape}; give {form}")
        if (largest := float(np.abs(array).max())) > LARGEST:
            raise ValueError(f"{name} reaches {largest:g}; rescale it, {LARGEST:g} is the most")
        arrays.append(array[None] if ndim == 2 else array)
    one, other = arrays
    if one.shape[:2] != other.shape[:2]:
        raise ValueError(
            f"y has shape {np.shape(y)} beside x of {np.shape(x)}; give both of the same trials"
            + (" and rounds" if ndim == 3 else "")
        )
    return one, other


def neighbours(k: int, trials: int) -> int:
    """Return k, where there are more trials than that, else raise ValueError."""
    k = _validate.integer("k", k)
    if k >= trials:
        raise ValueError(f"k is {k} with {trials} trials; give more trials than k, or a smaller k")
    return k
