"""Linear sketches of a vector, R^d to R^k and back, learned or not.

    encode   y = A' g          what is clipped, noised and sent
    decode   g^ = A (y + z)    A [d, k]

A sketch may lengthen a vector. Then a clip before it bounds no message: clip the k-vector, after
`encode`. Guarantee: none by itself. A projection must depend on public (a key, public data) or
privatised values alone. ``dpjax.contrib.sketches`` has fixed projections.

`Sketch` learns the leading directions of past gradients, followed round by round:

    gradients   g_1, g_2, ...                    in R^d, privatised ones alone
    covariance  A_t = f A_t-1 + g_t g_t'         f: forgetting; never formed
    basis       U_t [d, k], Lam_t [k]            its k leading eigenpairs, by rank-one updates
    frame       S_t = [leading r of U_t | probes]    what the next round projects on

Probes are new random directions in every round, orthogonal to the kept ones. In a loop whose
gradients are S S' g only probes reveal directions that the sketch misses, and directions that
entered by chance would stay for ever without forgetting. A round costs O(d k^2). The same inputs
give the same bits on one platform, build and number of threads.

All functions are pure and can be compiled, scanned and vmapped; callers check arguments.

Reference:
    Nicolas et al., Communication Efficient, Differentially Private Distributed Optimization using
    Correlation-Aware Sketching, Algorithm 2, Theorem 3.3 and equation (40); Yang, Hsieh, Wang,
    History PCA (2018), forgetting.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray
from optax import Updates

from dpjax._numerics import FlatVector, Integer, Scalar
from dpjax.transforms.variates import normals

__all__ = [
    "Frame",
    "Sketch",
    "aligned",
    "flat",
    "orthonormal",
    "start",
    "update",
]

_EXACT = jax.lax.Precision.HIGHEST
_Coordinates = Float[Array, " k"]
_Columns = Float[Array, "d k"]
_Rows = Float[Array, "k d"]
"""Directions as rows, whose products are several times as fast on a CPU."""
_Weights = Float[Array, " k"]
_WIDE = 8
"""From d = 8 k on, random directions are so far from dependent that a Gram matrix serves."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frame:
    """A dense projection.

    Attributes:
        columns: A [d, k], orthonormal or not; a learned sketch's is `Sketch.frame`.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.transforms import sketch
        >>> frame = sketch.Frame(jnp.eye(3)[:, :2])
        >>> frame.decode(frame.encode(jnp.array([1.0, 2.0, 3.0]))).tolist()
        [1.0, 2.0, 0.0]
    """

    columns: _Columns

    def encode(self, vector: FlatVector) -> _Coordinates:
        """A' g."""
        return _dot(vector, self.columns)

    def decode(self, coordinates: _Coordinates) -> FlatVector:
        """A y."""
        return _dot(self.columns, coordinates)

    def diagonal(self) -> FlatVector:
        """diag(A A'): the variance of decoded noise over that of a coordinate's."""
        return jnp.sum(jnp.square(self.columns), axis=1)


def aligned(columns: _Columns, before: _Columns) -> _Columns:
    """Return a frame's columns turned so that they are as near as they can be to another frame's.

    S Q with the orthogonal Q that makes |S Q - S_before| least (Procrustes). The space is the same;
    a sketch's numbers then mean nearly what they meant a round before, and noise that is taken back
    in later rounds cancels as far as the spaces agree (``benchmarks/_moving.py``).

    Args:
        columns: S [d, k], orthonormal.
        before: The aligned frame of the round before, orthonormal. A narrow frame's columns of
            zeros would be mixed with the others: give frames of full width.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.transforms import sketch
        >>> frame = jnp.eye(3)[:, :2]
        >>> sketch.aligned(frame[:, ::-1], frame).tolist()
        [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    """
    # The polar factor of S' S_before, by its singular vectors.
    turn = _dot(columns.T, before)
    left, _, right = jnp.linalg.svd(turn, full_matrices=False)
    return _dot(columns, _dot(left, right))


class Sketch(NamedTuple):
    """What is known of past gradients, and the frame of the round to come.

    Attributes:
        basis: U [d, k], orthonormal columns; those of weight 0 are arbitrary.
        weights: Lam [k], eigenvalues of the sum of f^(t - s) g_s g_s', largest first; under
            ``as_published`` what the paper makes of them, in the order of its QR.
        frame: S [d, k], orthonormal columns: the first ``kept`` of the basis, then probes; a narrow
            one has columns of zeros after these.
        kept: r, a whole number.

    Example:
        >>> import jax
        >>> from dpjax.transforms import sketch
        >>> first = sketch.start(100, 4, jax.random.key(0))
        >>> first.basis.shape, first.weights.shape, first.frame.shape
        ((100, 4), (4,), (100, 4))
    """

    basis: _Columns
    weights: _Coordinates
    frame: _Columns
    kept: Integer


def start(dimension: int, k: int, key: PRNGKeyArray, dtype: Any = jnp.float32) -> Sketch:
    """Return the sketch before any gradient: a random frame, nothing known.

    The first `update` needs no rule of its own: with all weights 0 it finds g/|g|.

    Args:
        dimension: d, entries of a gradient.
        k: Columns, at most d.
        key: A threefry key.
        dtype: float32 or float64.

    Example:
        >>> import jax
        >>> from dpjax.transforms import sketch
        >>> first = sketch.start(100, 4, jax.random.key(0))
        >>> first.frame.shape, int(first.kept)
        ((100, 4), 0)
    """
    frame = _orthonormal(_random(key, k, dimension, dtype)).T
    return Sketch(frame, jnp.zeros(k, dtype), frame, jnp.int32(0))


def update(
    sketch: Sketch,
    gradient: FlatVector,
    key: PRNGKeyArray,
    *,
    forgetting: float = 0.95,
    probes: int = 4,
    share: float = 0.99,
    floor: float | Scalar | None = None,
    narrow: bool | Bool[Array, ""] = False,
    as_published: bool = False,
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
        floor: Weight that noise alone reaches (`dpjax.contrib.sketching.noise_floor`), from
            public or privatised numbers only: directions not above it are dropped. One dropped in
            a loop is learned anew from probes, which weak gradients never manage: without a floor
            more was found, by the same measurements.
        narrow: The frame has r + p columns, zeros beyond: so many numbers need noise and sending.
            Without, probes replace all dropped directions, and a round learns more:
            narrow frames pay from the round on where the directions are found (``round >= 500``).
        as_published: The paper's lines: QR of Y = U Lam + g (g' U), weights the norms of Y's
            columns, the share that of their squares, no order, no forgetting, r up to k. Of the
            other arguments only ``share`` is read.

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
    k = sketch.basis.shape[1]
    gradient = jnp.asarray(gradient, sketch.basis.dtype)
    sound = jnp.isfinite(_dot(gradient, gradient))
    gradient = jnp.where(sound, gradient, 0)
    if as_published:
        rows, weights = _published_step(sketch, gradient)
    else:
        rows, weights = _rank_one(sketch, gradient, forgetting)
    # A gradient that is not finite leaves what is known as it was.
    rows = jnp.where(sound, rows, sketch.basis.T)
    weights = jnp.where(sound, weights, sketch.weights)
    if as_published:
        # Its weights are norms, and it has no probes.
        rank = _cut(jnp.square(weights), share, k)
        columns = jnp.int32(k)
    else:
        rank = _cut(weights, share, k - probes)
        if floor is not None:
            above = jnp.sum(weights > floor, dtype=jnp.int32)
            rank = jnp.minimum(rank, above)
        columns = jnp.where(narrow, rank + probes, k)
    return Sketch(rows.T, weights, _frame(rows, rank, columns, key).T, rank)


def orthonormal(matrix: _Columns) -> _Columns:
    """Return orthonormal columns with the span of a matrix of independent ones.

    Columns that were orthonormal at the front stay as they are. For d below 8 k by QR; beyond, for
    columns at random angles, by their Gram matrix, whose products alone grow with d.

    Args:
        matrix: [d, k], k at most d.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.transforms import sketch
        >>> columns = sketch.orthonormal(jnp.array([[3.0], [4.0]]))
        >>> [f"{abs(entry):.1f}" for entry in columns[:, 0]]
        ['0.6', '0.8']
    """
    return _orthonormal(matrix.T).T


def flat(tree: Updates) -> tuple[FlatVector, Callable[[FlatVector], Updates]]:
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
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"tree has a leaf of {dtype}; give floats alone")
    vector, back = jax.flatten_util.ravel_pytree(tree)
    if not vector.size:
        raise ValueError("tree has no entries; give at least one")
    return vector, back


def _dot(left: Array, right: Array) -> Array:
    """A product at full precision: on GPUs the default has mantissas of ten bits."""
    return jnp.matmul(left, right, precision=_EXACT)


def _random(key: PRNGKeyArray, k: int, d: int, dtype: jnp.dtype) -> _Rows:
    """Gaussian rows of length around 1."""
    length = 1 / math.sqrt(d)
    drawn = normals(key, (k, d), dtype) * length
    # The compiler would hash again for each use.
    return jax.lax.optimization_barrier(drawn)


def _polished(rows: _Rows) -> _Rows:
    """One Newton-Schulz step: what is off by e from orthonormal is off by the order of e^2."""
    return 1.5 * rows - 0.5 * _dot(_dot(rows, rows.T), rows)


def _orthonormal(rows: _Rows) -> _Rows:
    """Orthonormal rows, as `orthonormal`."""
    k, d = rows.shape
    if d < _WIDE * k:
        columns, triangle = jnp.linalg.qr(rows.T)
        # QR may turn a column round: with its triangle's sign orthonormal ones stay.
        diagonal = jnp.diag(triangle)[None, :]
        signs = jnp.where(diagonal < 0, -1, 1)
        return (columns * signs.astype(rows.dtype)).T
    # L^-1 makes rows of Gram matrix L L' orthonormal; a step more takes off what rounding left.
    triangle = jnp.linalg.cholesky(_dot(rows, rows.T))
    unit = jnp.eye(k, dtype=rows.dtype)
    inverse = jax.scipy.linalg.solve_triangular(triangle, unit, lower=True)
    return _polished(_dot(inverse, rows))


def _unit(vector: FlatVector) -> tuple[FlatVector, Scalar]:
    """A vector of length 1, and the length that it had."""
    length = jnp.sqrt(_dot(vector, vector))
    return vector / jnp.where(length > 0, length, 1), length


def _outside(rows: _Rows, vector: FlatVector, inside: _Coordinates) -> FlatVector:
    """What a vector has outside of rows, by one product.

    A difference would be computed anew wherever it is used, rounded in one place and not in
    another, and where little is left these differ as much as it is long.
    """
    weights = jnp.concatenate([-inside, jnp.ones(1, rows.dtype)])
    return _dot(weights, jnp.concatenate([rows, vector[None]]))


def _rank_one(sketch: Sketch, gradient: FlatVector, forgetting: float) -> tuple[_Rows, _Weights]:
    """The k leading eigenpairs of f U diag(Lam) U' + g g', vectors as rows."""
    rows = sketch.basis.T
    k, d = rows.shape
    weights = sketch.weights * np.asarray(forgetting, rows.dtype)
    # Squares of what is far from 1 would leave the dtype's range inside the small problem.
    energy = _dot(gradient, gradient)
    scale = jnp.sqrt(jnp.maximum(weights[0], energy))
    scale = jnp.where(scale > 0, scale, 1)
    vector = gradient / scale
    inside = _dot(rows, vector)
    residual, length = _unit(_outside(rows, vector, inside))
    for _ in range(2):
        # A short residual is mostly rounding until it is projected again.
        again = _outside(rows, residual, _dot(rows, residual))
        residual, _ = _unit(again)
    norm = jnp.sqrt(_dot(vector, vector))
    rounding = jnp.finfo(rows.dtype).eps * norm
    outside = (length > rounding) & (d > k)
    length = jnp.where(outside, length, 0)
    residual = jnp.where(outside, residual, 0)
    small = jnp.concatenate([inside, length[None]])
    # Without a residual there is no row of its own: at -1 it comes last, and is never taken.
    corner = jnp.where(outside, 0, -1).astype(rows.dtype)
    diagonal = jnp.concatenate([weights / jnp.square(scale), corner[None]])
    updated = jnp.diag(diagonal) + jnp.outer(small, small)
    values, turn = jnp.linalg.eigh(updated)
    # The largest first, and the least left out.
    turn = turn.T[:0:-1]
    within = _dot(turn[:, :-1], rows)
    turned = within + jnp.outer(turn[:, -1], residual)
    # Rounding may leave an eigenvalue below zero.
    largest = values[:0:-1]
    weights = jnp.maximum(largest, 0) * jnp.square(scale)
    return _polished(turned), weights


def _published_step(sketch: Sketch, gradient: FlatVector) -> tuple[_Rows, _Weights]:
    """The paper's step; in the first round QR invents k - 1 directions, and these get weights."""
    outer = jnp.outer(gradient, _dot(gradient, sketch.basis))
    weighted = sketch.basis * sketch.weights
    basis, triangle = jnp.linalg.qr(weighted + outer)
    squares = jnp.sum(jnp.square(triangle), axis=0)
    return basis.T, jnp.sqrt(squares)


def _cut(weights: _Weights, share: float, limit: int) -> Integer:
    """How many of the first weights hold a share of their sum, up to a limit."""
    reached = jnp.cumsum(weights)
    goal = np.asarray(share, weights.dtype) * reached[-1]
    short = reached < goal
    needed = 1 + jnp.sum(short, dtype=jnp.int32)
    rank = jnp.minimum(needed, limit)
    return jnp.where(reached[-1] > 0, rank, 0).astype(jnp.int32)


def _frame(rows: _Rows, rank: Integer, width: Integer, key: PRNGKeyArray) -> _Rows:
    """The first directions of a basis, then probes, then zeros, as rows."""
    k, d = rows.shape
    column = jnp.arange(k, dtype=rank.dtype)[:, None]
    within = column < rank
    front = jnp.where(within, rows, 0)
    probes = _random(key, k, d, rows.dtype)
    probes = probes - _dot(_dot(probes, front.T), front)
    frame = _orthonormal(jnp.where(within, rows, probes))
    # To the bit: a direction that stays must not move by rounding.
    frame = jnp.where(within, rows, frame)
    return jnp.where(column < width, frame, 0)
