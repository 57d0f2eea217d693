"""Trials nearer in x alone, and in y alone, than the k-th nearest is in both together.

Distances are in the maximum norm, and nearer is strictly nearer. Two routes give the same
integers: k-d trees, made for a CPU, and all N^2 distances in blocks of rows, made for a GPU.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from dpjax import _validate
from dpjax.mechanism.x64 import double_precision

__all__: list[str] = []

Backend = Literal["tree", "dense"]

ENTRIES = {"cpu": 2**18, "gpu": 2**22}
"""Distances that the dense route holds at once, for each of x, y and both, by platform.

On a CPU more than its caches hold takes four times as long; on a GPU it is 32 MiB each.
"""
THREADS_FROM = 2000
"""Trials from which k-d trees are asked by several threads, whose start takes milliseconds."""


class Counts(NamedTuple):
    """What Kraskov's first estimator is made of.

    Attributes:
        x: [N] other trials nearer than `distance` in x alone.
        y: [N] the same in y alone.
        distance: [N] to the k-th nearest other trial in both together.
    """

    x: Int[np.ndarray, " n"]
    y: Int[np.ndarray, " n"]
    distance: Float[np.ndarray, " n"]


Route = Callable[[np.ndarray, np.ndarray, int], Counts]


def route(backend: Backend | None) -> Route:
    """Return what counts: a function of x [N, dx], y [N, dy], both float64, and k < N.

    Args:
        backend: "tree" or "dense"; None takes trees where JAX runs on a CPU.
    """
    if backend is None:
        backend = "tree" if jax.default_backend() == "cpu" else "dense"
    return {"tree": tree, "dense": dense}[_validate.one_of("backend", backend, ("tree", "dense"))]


def tree(x: np.ndarray, y: np.ndarray, k: int) -> Counts:
    """Count by k-d trees; a variable of one coordinate by its order."""
    from scipy import spatial

    both = np.hstack([x, y])
    # Every trial is its own nearest one.
    workers = -1 if len(both) >= THREADS_FROM else 1
    found = spatial.cKDTree(both).query(both, [k + 1], p=np.inf, workers=workers)[0]
    distance = found[:, 0]
    return Counts(_nearer(x, distance), _nearer(y, distance), distance)


def _nearer(x: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """Other trials nearer than ``distance`` [N]."""
    if x.shape[1] == 1:
        values, ordered = x[:, 0], np.sort(x[:, 0])
        above = _below(ordered, values, distance)
        # All are inside on one side at least, those nearer on both.
        return above + _below(-ordered[::-1], -values, distance) - len(x) - 1
    # It counts whole branches, four times as fast as scipy's, and compares the same differences.
    from sklearn.neighbors import KDTree

    within = np.nextafter(distance, 0.0)
    return KDTree(x, metric="chebyshev").query_radius(x, within, count_only=True) - 1


def _below(ordered: np.ndarray, centres: np.ndarray, radii: np.ndarray) -> np.ndarray:
    """How many values have value - centre < radius, as float64 subtracts, for every centre."""
    count = np.searchsorted(ordered, centres + radii)
    ends = np.concatenate([[-np.inf], ordered, [np.inf]])
    # The sum was rounded otherwise than the difference that the joint distance is made of.
    strayed = (ends[count] - centres >= radii) | (ends[count + 1] - centres < radii)
    for i in np.flatnonzero(strayed):
        count[i] = np.count_nonzero(ordered - centres[i] < radii[i])
    return count


def dense(x: np.ndarray, y: np.ndarray, k: int) -> Counts:
    """Count from all distances, in blocks of rows."""
    trials = len(x)
    entries = ENTRIES.get(jax.default_backend(), ENTRIES["gpu"])
    blocks = -(-trials * trials // entries)
    with double_precision():
        found = _blocks(jnp.asarray(x), jnp.asarray(y), k, -(-trials // min(blocks, trials)))
        return Counts(*(np.asarray(each) for each in found))


@functools.partial(jax.jit, static_argnames="size")
def _blocks(x: jax.Array, y: jax.Array, k: int, size: int) -> tuple[jax.Array, ...]:
    """The three arrays of `Counts`, ``size`` rows at a time."""
    trials = len(x)
    others = jnp.arange(trials)

    def block(rows: jax.Array) -> tuple[jax.Array, ...]:
        in_x, in_y = _distances(x, rows), _distances(y, rows)
        both = jnp.where(rows[:, None] == others, jnp.inf, jnp.maximum(in_x, in_y))

        def further(_: int, distance: jax.Array) -> jax.Array:
            # On to the next larger distance, where fewer than k are within this one.
            edge = distance[:, None]
            following = jnp.where(both > edge, both, jnp.inf).min(axis=1)
            return jnp.where((both <= edge).sum(axis=1) < k, following, distance)

        distance = jax.lax.fori_loop(0, k, further, jnp.full(size, -jnp.inf))
        edge = distance[:, None]
        return (in_x < edge).sum(axis=1) - 1, (in_y < edge).sum(axis=1) - 1, distance

    rows = jnp.minimum(jnp.arange(-(-trials // size) * size), trials - 1)
    found = jax.lax.map(block, rows.reshape(-1, size))
    return tuple(each.reshape(-1)[:trials] for each in found)


def _distances(x: jax.Array, rows: jax.Array) -> jax.Array:
    """From the trials of some rows to all, in the maximum norm."""
    columns = (jnp.abs(x[rows, column, None] - x[:, column]) for column in range(x.shape[1]))
    return functools.reduce(jnp.maximum, columns)
