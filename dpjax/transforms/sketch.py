"""A sketch that learns: the leading directions of past gradients, followed round by round.

    gradients   g_1, g_2, ...                    in R^d, privatised ones alone
    covariance  A_t = f A_t-1 + g_t g_t'         f: forgetting; never formed
    kept        U_t [d, k], Lam_t [k]            its k leading eigenpairs, by rank-one updates
    frame       S_t = [leading r of U_t | probes]    what the next round projects on

Probes are random directions orthogonal to those kept, new in every round. In a loop whose gradients
are S S' g nothing else ever tells of what the sketch misses, and what entered by chance would stay
for ever without forgetting.

A round costs O(d k^2). Guarantee: none of its own and none lost: post-processing of what it is fed.
All functions are pure and can be compiled, scanned and vmapped. The same inputs give the same bits
on one platform, build and number of threads: see `fingerprint`.

Reference:
    Nicolas et al., Communication Efficient, Differentially Private Distributed Optimization using
    Correlation-Aware Sketching, Algorithm 2; Yang, Hsieh, Wang, History PCA (2018), forgetting.
"""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from dpjax import _validate
from dpjax.transforms.normals import normals

__all__ = [
    "Sketch",
    "fingerprint",
    "flat",
    "largest_angle",
    "orthonormal",
    "start",
    "update",
    "within",
]

_EXACT = jax.lax.Precision.HIGHEST
_WIDE = 8
"""From d = 8 k on, random directions are so far from dependent that a Gram matrix serves."""


class Sketch(NamedTuple):
    """What is known of past gradients, and the frame of the round to come.

    Attributes:
        basis: U [d, k], orthonormal columns; those of weight 0 are arbitrary.
        weights: Lam [k], eigenvalues of the sum of f^(t - s) g_s g_s', largest first; under
            ``printed`` what the paper makes of them, in the order of its QR.
        frame: S [d, k], orthonormal columns: the first ``kept`` of the basis, then probes; a narrow
            one has columns of zeros after these.
        kept: r, a whole number.
    """

    basis: Float[Array, "d k"]
    weights: Float[Array, " k"]
    frame: Float[Array, "d k"]
    kept: Int[Array, ""]


def start(dimension: int, k: int, key: PRNGKeyArray, dtype: Any = jnp.float32) -> Sketch:
    """Return the sketch before any gradient: a random frame, nothing known.

    The first `update` needs no rule of its own: with all weights 0 it finds g/|g|.

    Args:
        dimension: d, entries of a gradient.
        k: Columns, at most d.
        key: A threefry key.
        dtype: float32 or float64.

    Raises:
        ValueError: For k outside 1 .. d, or another dtype.

    Example:
        >>> import jax
        >>> from dpjax.transforms import sketch
        >>> first = sketch.start(100, 4, jax.random.key(0))
        >>> first.frame.shape, int(first.kept)
        ((100, 4), 0)
    """
    dimension = _validate.integer("dimension", dimension)
    k = _validate.integer("k", k, most=dimension)
    frame = _orthonormal(_random(key, k, dimension, dtype)).T
    return Sketch(frame, jnp.zeros(k, dtype), frame, jnp.int32(0))


def update(
    sketch: Sketch,
    gradient: Float[Array, " d"],
    key: PRNGKeyArray,
    *,
    forgetting: float = 0.95,
    probes: int = 4,
    share: float = 0.99,
    floor: float | Float[Array, ""] | None = None,
    narrow: bool | Bool[Array, ""] = False,
    printed: bool = False,
) -> Sketch:
    """Take in a privatised gradient and make the frame of the next round.

    The eigenpairs of f A + g g' on the span of U and g are exact: those of the (k + 1)-square
    matrix diag(f Lam, 0) + h h', h the coordinates of g in U and its residual. One Newton-Schulz
    step a round keeps the columns orthonormal.

    A gradient of 0 only forgets. One that is NaN, infinite or beyond the square root of the largest
    number leaves basis and weights as they are; probes are new all the same. Where less than k
    directions were seen, others fill the basis at weight 0 and none of these is kept. If all
    weights are 0, nothing is: the frame is all probes.

    Args:
        sketch: The one before, whose frame this round's gradient came through.
        gradient: g [d], flat (`flat`), of privatised quantities only.
        key: A threefry key of this round's probes alone.
        forgetting: f above 0, at most 1 (never forgets: see the module). In a loop of its own with
            16 columns, .95 missed least of gradients of three directions in 1,000 under noise a
            tenth of theirs, and .98 in 200; .9 without noise (``benchmarks/bench_sketch.py``). The
            rounds remembered, 2 / (1 - f), must be many more than the directions to be found.
        probes: p, the least number of probes, 0 .. k. With 0 and every direction kept, a loop that
            sees its own sketch alone learns nothing new.
        share: The r <= k - p leading directions that hold this share of the sum of the weights are
            kept; above 0, at most 1. A tenth left out can be a whole direction, never seen again.
        floor: Weight that noise alone reaches (`dpjax.algorithms.sketches.noise_floor`), from
            public or privatised numbers only: directions not above it are dropped. One dropped in
            a loop is learned anew from probes, which weak gradients never manage: without a floor
            more was found, by the same measurements.
        narrow: The frame has r + p columns, zeros beyond: so many numbers need noise and sending.
            Without, probes take the places of all that is not kept, and more is learned a round:
            narrow frames pay from the round on where the directions are found (``round >= 500``).
        printed: The paper's lines: QR of Y = U Lam + g (g' U), weights the norms of Y's columns,
            the share that of their squares, no order, no forgetting, r up to k. Of the other
            arguments only ``share`` is read.

    Raises:
        ValueError: For shapes that do not fit or parameters out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from dpjax.transforms import sketch
        >>> first = sketch.start(100, 4, jax.random.key(0))
        >>> second = sketch.update(first, jnp.arange(100.0), jax.random.key(1), probes=2)
        >>> int(second.kept), second.frame.shape
        (1, (100, 4))

    Reference:
        Nicolas et al., Algorithm 2.
    """
    d, k = sketch.basis.shape
    gradient = jnp.asarray(gradient, sketch.basis.dtype)
    if gradient.shape != (d,):
        raise ValueError(f"gradient has shape {gradient.shape}; give a flat one of {d} entries")
    share = within("share", share)
    sound = jnp.isfinite(_dot(gradient, gradient))
    gradient = jnp.where(sound, gradient, 0)
    if printed:
        rows, weights = _printed(sketch, gradient)
    else:
        forgetting = within("forgetting", forgetting)
        probes = _validate.integer("probes", probes, least=0, most=k)
        rows, weights = _rank_one(sketch, gradient, forgetting)
    rows = jnp.where(sound, rows, sketch.basis.T)
    weights = jnp.where(sound, weights, sketch.weights)
    kept = _cut(jnp.square(weights) if printed else weights, share, k if printed else k - probes)
    if floor is not None and not printed:
        kept = jnp.minimum(kept, jnp.sum(weights > floor, dtype=jnp.int32))
    columns = jnp.int32(k) if printed else jnp.where(narrow, kept + probes, k)
    return Sketch(rows.T, weights, _frame(rows, kept, columns, key).T, kept)


def orthonormal(matrix: Float[Array, "d k"]) -> Float[Array, "d k"]:
    """Return orthonormal columns with the span of a matrix of independent ones.

    Columns that were orthonormal at the front stay as they are. For d below 8 k by QR; beyond, for
    columns at random angles, by their Gram matrix, whose products alone grow with d.

    Args:
        matrix: [d, k], k at most d.
    """
    return _orthonormal(matrix.T).T


def flat(tree: Any) -> tuple[Float[Array, " d"], Callable[[Float[Array, " d"]], Any]]:
    """Return a pytree's entries as one vector, and what makes such a tree of a vector.

    Args:
        tree: Arrays of floats.

    Raises:
        ValueError: For a tree without entries, or with others than floats.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.transforms import sketch
        >>> vector, back = sketch.flat({"w": jnp.ones((2, 3)), "b": jnp.zeros(2)})
        >>> vector.shape, back(vector)["w"].shape
        ((8,), (2, 3))
    """
    for leaf in jax.tree.leaves(tree):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(f"tree has a leaf of {jnp.result_type(leaf)}; give floats alone")
    vector, back = jax.flatten_util.ravel_pytree(tree)
    if not vector.size:
        raise ValueError("tree has no entries; give at least one")
    return vector, back


def fingerprint(state: Any) -> str:
    """Return a hash of every bit of a pytree of arrays, as 64 hexadecimal digits.

    Two sides that replay the same rounds compare these, and send the whole state where they differ.
    Equal bits are promised for one platform, build and number of threads, and for the same
    compiled function: a loop unrolled or vmapped may round otherwise. With 100,000 entries one core
    and two gave other bits; the variable NPROC, set to the same number on all sides before JAX
    starts, makes them equal, whatever cores there are.

    Args:
        state: A `Sketch`, or any pytree of arrays.

    Example:
        >>> import jax
        >>> from dpjax.transforms import sketch
        >>> one, same = (sketch.start(9, 2, jax.random.key(0)) for _ in range(2))
        >>> sketch.fingerprint(one) == sketch.fingerprint(same)
        True
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        array = np.ascontiguousarray(leaf)
        label = f"{jax.tree_util.keystr(path)} {array.dtype.name} {array.shape};"
        digest.update(label.encode() + array.tobytes())
    return digest.hexdigest()


def largest_angle(basis: Float[Array, "d k"], directions: Float[Array, "d m"]) -> Float[Array, ""]:
    """Return the largest principal angle between directions and a space, in radians.

    By sines, so that small angles keep their digits.

    Args:
        basis: [d, k], orthonormal columns that span the space.
        directions: [d, m], orthonormal columns, m at most k.
    """
    missed = directions - _dot(basis, _dot(basis.T, directions))
    sines = jnp.linalg.svd(missed, compute_uv=False)
    return jnp.arcsin(jnp.minimum(sines[0], 1))


def _dot(one: Array, other: Array) -> Array:
    return jnp.matmul(one, other, precision=_EXACT)


def within(name: str, value: float) -> float:
    """Return a share of something as a float, refused outside 0 (excluded) .. 1.

    Args:
        name: What messages call it.
        value: The share.

    Raises:
        ValueError: For another number.
    """
    value = _validate.positive(name, value, remedy="give a number above 0, at most 1")
    if value > 1:
        raise ValueError(f"{name} is {value!r}; give a number above 0, at most 1")
    return value


# Inside, directions are rows [k, d], whose products are several times as fast on a CPU.


def _random(key: PRNGKeyArray, k: int, d: int, dtype: Any) -> Array:
    """Gaussian rows of length around 1."""
    drawn = normals(key, (k, d), dtype) * np.asarray(1 / np.sqrt(d), dtype)
    # The compiler would hash again for each use.
    return jax.lax.optimization_barrier(drawn)


def _polished(rows: Array) -> Array:
    """One Newton-Schulz step: what is off by e from orthonormal is off by the order of e^2."""
    return 1.5 * rows - 0.5 * _dot(_dot(rows, rows.T), rows)


def _orthonormal(rows: Array) -> Array:
    """Orthonormal rows, as `orthonormal`."""
    k, d = rows.shape
    if d < _WIDE * k:
        columns, triangle = jnp.linalg.qr(rows.T)
        return (columns * jnp.where(jnp.diag(triangle) < 0, -1, 1).astype(rows.dtype)).T
    triangle = jnp.linalg.cholesky(_dot(rows, rows.T))
    unit = jnp.eye(k, dtype=rows.dtype)
    inverse = jax.scipy.linalg.solve_triangular(triangle, unit, lower=True)
    return _polished(_dot(inverse, rows))


def _unit(vector: Array) -> tuple[Array, Array]:
    length = jnp.sqrt(_dot(vector, vector))
    return vector / jnp.where(length > 0, length, 1), length


def _rank_one(sketch: Sketch, gradient: Array, forgetting: float) -> tuple[Array, Array]:
    """The k leading eigenpairs of f U diag(Lam) U' + g g', vectors as rows."""
    rows = sketch.basis.T
    k, d = rows.shape
    weights = sketch.weights * np.asarray(forgetting, rows.dtype)
    # Squares of what is far from 1 would leave the dtype's range inside the small problem.
    scale = jnp.sqrt(jnp.maximum(weights[0], _dot(gradient, gradient)))
    scale = jnp.where(scale > 0, scale, 1)
    vector = gradient / scale
    inside = _dot(rows, vector)
    residual, length = _unit(vector - _dot(inside, rows))
    for _ in range(2):  # A short residual is mostly rounding until it is projected again.
        residual, _left = _unit(residual - _dot(_dot(rows, residual), rows))
    least = jnp.finfo(rows.dtype).eps
    outside = (length > least * jnp.sqrt(_dot(vector, vector))) & (d > k)
    length = jnp.where(outside, length, 0)
    residual = jnp.where(outside, residual, 0)
    small = jnp.concatenate([inside, length[None]])
    # Without a residual there is no row of its own: at -1 it comes last, and is never taken.
    corner = jnp.where(outside, 0, -1).astype(rows.dtype)
    diagonal = jnp.concatenate([weights / jnp.square(scale), corner[None]])
    values, turn = jnp.linalg.eigh(jnp.diag(diagonal) + jnp.outer(small, small))
    turn = turn.T[:0:-1]
    turned = _dot(turn[:, :-1], rows) + jnp.outer(turn[:, -1], residual)
    return _polished(turned), jnp.maximum(values[:0:-1], 0) * jnp.square(scale)


def _printed(sketch: Sketch, gradient: Array) -> tuple[Array, Array]:
    """The paper's step; in the first round QR invents k - 1 directions, and these get weights."""
    outer = jnp.outer(gradient, _dot(gradient, sketch.basis))
    basis, triangle = jnp.linalg.qr(sketch.basis * sketch.weights + outer)
    return basis.T, jnp.sqrt(jnp.sum(jnp.square(triangle), axis=0))


def _cut(weights: Array, share: float, most: int) -> Array:
    """How many of the first weights hold a share of their sum, at most so many."""
    reached = jnp.cumsum(weights)
    short = reached < np.asarray(share, weights.dtype) * reached[-1]
    needed = 1 + jnp.sum(short, dtype=jnp.int32)
    return jnp.where(reached[-1] > 0, jnp.minimum(needed, most), 0).astype(jnp.int32)


def _frame(rows: Array, kept: Array, width: Array, key: PRNGKeyArray) -> Array:
    """The first directions of a basis, then probes, then zeros, as rows."""
    k, d = rows.shape
    place = jnp.arange(k)[:, None]
    front = jnp.where(place < kept, rows, 0)
    drawn = _random(key, k, d, rows.dtype)
    drawn = drawn - _dot(_dot(drawn, front.T), front)
    frame = _orthonormal(jnp.where(place < kept, rows, drawn))
    frame = jnp.where(place < kept, rows, frame)
    return jnp.where(place < width, frame, 0)
