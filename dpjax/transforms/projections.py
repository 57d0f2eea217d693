"""Linear sketches of a vector: R^d to R^k and back, one interface for all.

    encode   y = A' g          what is clipped, noised and sent
    decode   g^ = A (y + z)    A [d, k]

A sketch may lengthen a vector, count sketches the more the fewer buckets they have, and then a clip
before it bounds nothing that is sent: clip the k-vector, after `encode`. Guarantee: none of its
own; what a projection is made of must be public (a key, public data) or privatised.

Reference:
    Chen, Choquette-Choo, Kairouz, Suresh, The Fundamental Price of Secure Aggregation in
    Differentially Private Federated Learning (2022): the sparse projection. Charikar, Chen,
    Farach-Colton (2002): count sketches.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dpjax import _validate
from dpjax.transforms import sketch
from dpjax.transforms.normals import normals, words

__all__ = [
    "CountSketch",
    "Frame",
    "aligned",
    "count_sketch",
    "gaussian",
    "oracle",
    "second_moment_noise",
]

_EXACT = jax.lax.Precision.HIGHEST


@functools.partial(jax.tree_util.register_dataclass, data_fields=["columns"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Frame:
    """A dense projection.

    Attributes:
        columns: A [d, k], orthonormal or not; a learned sketch's is `Sketch.frame`.
    """

    columns: Float[Array, "d k"]

    def encode(self, vector: Float[Array, " d"]) -> Float[Array, " k"]:
        """A' g."""
        return jnp.matmul(vector, self.columns, precision=_EXACT)

    def decode(self, coordinates: Float[Array, " k"]) -> Float[Array, " d"]:
        """A y."""
        return jnp.matmul(self.columns, coordinates, precision=_EXACT)

    def diagonal(self) -> Float[Array, " d"]:
        """diag(A A'): the variance of decoded noise over that of a coordinate's."""
        return jnp.sum(jnp.square(self.columns), axis=1)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["buckets", "signs"], meta_fields=["width"]
)
@dataclasses.dataclass(frozen=True)
class CountSketch:
    """A sparse projection: in every row each coordinate goes to one bucket, with a sign.

    A has entries sign / sqrt(rows), so that A A' is the identity on average over keys: decoding is
    the mean over rows.

    Attributes:
        buckets: [rows, d], whole numbers below ``width``.
        signs: [rows, d], -1 or 1 in int8.
        width: Buckets a row; k = rows x width.
    """

    buckets: Int[Array, "rows d"]
    signs: Int[Array, "rows d"]
    width: int

    def encode(self, vector: Float[Array, " d"]) -> Float[Array, " k"]:
        """A' g: sums over buckets."""

        def row(buckets: Array, signs: Array) -> Array:
            return jax.ops.segment_sum(vector * signs.astype(vector.dtype), buckets, self.width)

        return jax.vmap(row)(self.buckets, self.signs).ravel() * self._scale(vector.dtype)

    def decode(self, coordinates: Float[Array, " k"]) -> Float[Array, " d"]:
        """A y: the mean over rows of a coordinate's bucket, by its sign."""
        table = coordinates.reshape(len(self.buckets), self.width)
        found = jnp.take_along_axis(table, self.buckets, axis=1) * self.signs.astype(table.dtype)
        return jnp.sum(found, axis=0) * self._scale(table.dtype)

    def diagonal(self) -> Float[Array, " d"]:
        """diag(A A'), which is 1 everywhere: decoded noise is that of the full dimension."""
        return jnp.ones(self.buckets.shape[1], jnp.result_type(float))

    def _scale(self, dtype: Any) -> np.ndarray:
        return np.asarray(1 / np.sqrt(len(self.buckets)), dtype)


def gaussian(
    dimension: int,
    k: int,
    key: PRNGKeyArray,
    *,
    is_orthonormal: bool = True,
    dtype: Any = jnp.float32,
) -> Frame:
    """Return a fixed random frame.

    Args:
        dimension: d.
        k: Numbers in a sketch; at most d where columns are orthonormal.
        key: A threefry key, public.
        is_orthonormal: Then A A' is a projection, k/d of the identity on average, and lengthens
            nothing. Else entries are N(0, 1/k): A A' is the identity on average.
        dtype: float32 or float64.

    Raises:
        ValueError: For k out of range or another dtype.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from dpjax.transforms import projections
        >>> frame = projections.gaussian(100, 5, jax.random.key(0))
        >>> frame.decode(frame.encode(jnp.ones(100))).shape
        (100,)
    """
    dimension = _validate.integer("dimension", dimension)
    k = _validate.integer("k", k, most=dimension if is_orthonormal else None)
    columns = normals(key, (k, dimension), dtype).T
    if is_orthonormal:
        return Frame(sketch.orthonormal(columns * np.asarray(1 / np.sqrt(dimension), dtype)))
    return Frame(columns * np.asarray(1 / np.sqrt(k), dtype))


def count_sketch(dimension: int, k: int, key: PRNGKeyArray, *, rows: int = 4) -> CountSketch:
    """Return a sparse projection whose buckets and signs are hashes of coordinates.

    Args:
        dimension: d.
        k: Numbers in a sketch; a multiple of rows.
        key: A threefry key, public.
        rows: Independent hashes of every coordinate.

    Raises:
        ValueError: For a k that rows do not divide, or numbers out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from dpjax.transforms import projections
        >>> sparse = projections.count_sketch(100, 20, jax.random.key(0), rows=2)
        >>> sparse.encode(jnp.ones(100)).shape
        (20,)
    """
    dimension = _validate.integer("dimension", dimension)
    rows = _validate.integer("rows", rows)
    k = _validate.integer("k", k)
    if k % rows:
        raise ValueError(f"k is {k}, no multiple of rows, {rows}; give one that is")
    width = k // rows
    low, high = words(key, (rows, dimension))
    # Off from uniform by at most width / 2**32 of a bucket's share.
    buckets = (low % np.uint32(width)).astype(jnp.int32)
    signs = (1 - 2 * (high >> np.uint32(31)).astype(jnp.int32)).astype(jnp.int8)
    return CountSketch(buckets, signs, width)


def oracle(vectors: Float[Array, "m d"], k: int) -> Frame:
    """Return the frame of the k leading directions of given vectors: PCA of public gradients.

    Args:
        vectors: [m, d], of public data; not centred.
        k: Directions, at most the smaller of m and d.

    Raises:
        ValueError: For k out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.transforms import projections
        >>> frame = projections.oracle(jnp.array([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), 1)
        >>> float(abs(frame.columns[0, 0]))
        1.0
    """
    vectors = jnp.asarray(vectors)
    if vectors.ndim != 2:
        raise ValueError(f"vectors has shape {vectors.shape}; give one vector a row")
    k = _validate.integer("k", k, most=min(vectors.shape))
    _, _, directions = jnp.linalg.svd(vectors, full_matrices=False)
    return Frame(directions[:k].T)


def aligned(columns: Float[Array, "d k"], before: Float[Array, "d k"]) -> Float[Array, "d k"]:
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
        >>> from dpjax.transforms import projections
        >>> frame = jnp.eye(3)[:, :2]
        >>> projections.aligned(frame[:, ::-1], frame).tolist()
        [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    """
    turn = jnp.matmul(columns.T, before, precision=_EXACT)
    left, _, right = jnp.linalg.svd(turn, full_matrices=False)
    return jnp.matmul(columns, jnp.matmul(left, right, precision=_EXACT), precision=_EXACT)


def second_moment_noise(
    projection: Frame | CountSketch,
    variance: float | Float[Array, ""],
    survivors: int | Int[Array, ""] | Float[Array, ""],
    *,
    printed: bool = False,
) -> Float[Array, " d"]:
    """Return what noise adds to the mean square of a decoded average, coordinate by coordinate.

    For q = (1/B) sum (s_i + z_i), z_i ~ N(0, a^2 I_k) and s the mean of the s_i, over the noise:
    E (A q)^2 = (A s)^2 + (a^2 / B) diag(A A'). Subtracted from g_hat^2, it leaves the second moment
    without noise.

    Args:
        projection: A of this very round.
        variance: a^2, of one client's noise in a coordinate.
        survivors: B, clients in the sum, dropouts apart.
        printed: a^2 diag(A A'), B times too much: the paper's line, which also takes the A of the
            round before (give that one).

    Example:
        >>> import jax
        >>> from dpjax.transforms import projections
        >>> frame = projections.gaussian(10, 2, jax.random.key(0))
        >>> float(projections.second_moment_noise(frame, 8.0, 4).sum().round(4))
        4.0

    Reference:
        Nicolas et al., Lemma 3.2 (right, for noise of variance v^2 on the average itself) and
        Algorithm 1, line 19, which puts a^2 in the place of v^2 = a^2 / B and S_t-1 in that of S_t.
    """
    return projection.diagonal() * (variance if printed else variance / survivors)
