"""Sketches of gradients that learn nothing: random frames, count sketches, given frames.

Parts for `dpjax.algorithms.federated.Federated`, as `dpjax.algorithms.sketches.Learned` is one. A
guarantee names them as custom parts.

A count sketch lengthens a vector, the more so the fewer its buckets: clip the k-vector, after
`encode`. Guarantee: none by itself. A projection must depend on public (a key, public data) or
privatised values alone.

Reference:
    Chen, Choquette-Choo, Kairouz, Suresh, The Fundamental Price of Secure Aggregation in
    Differentially Private Federated Learning (2022): the sparse projection. Charikar, Chen,
    Farach-Colton (2002): count sketches.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dpjax import _validate
from dpjax._numerics import FlatVector, Scalar
from dpjax._validate import fixed
from dpjax.algorithms.sketches import Projection, check_entries
from dpjax.protocols import Memory, Updates
from dpjax.transforms.sketch import Frame, orthonormal
from dpjax.transforms.variates import normals, words

__all__ = ["Count", "CountSketch", "FixedFrame", "GivenFrame", "count_sketch", "gaussian"]

_Coordinates = Float[Array, " k"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CountSketch:
    """A sparse projection: in every row each coordinate goes to one bucket, with a sign.

    A has entries sign / sqrt(rows), so that A A' is the identity on average over keys: decoding is
    the mean over rows.

    Attributes:
        buckets: [rows, d], whole numbers below ``width``.
        signs: [rows, d], -1 or 1 in int8.
        width: Buckets a row; k = rows x width.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from dpjax.contrib import sketches
        >>> sparse = sketches.count_sketch(100, 20, jax.random.key(0), rows=2)
        >>> sparse.decode(sparse.encode(jnp.ones(100))).shape
        (100,)
    """

    buckets: Int[Array, "rows d"]
    signs: Int[Array, "rows d"]
    width: int = field(metadata={"static": True})

    def encode(self, vector: FlatVector) -> _Coordinates:
        """A' g: sums over buckets."""

        def row(buckets: Array, signs: Array) -> Array:
            signed = vector * signs.astype(vector.dtype)
            return jax.ops.segment_sum(signed, buckets, self.width)

        sums = jax.vmap(row)(self.buckets, self.signs)
        return sums.ravel() * self._scale(vector.dtype)

    def decode(self, coordinates: _Coordinates) -> FlatVector:
        """A y: the mean over rows of a coordinate's bucket, by its sign."""
        table = coordinates.reshape(len(self.buckets), self.width)
        entries = jnp.take_along_axis(table, self.buckets, axis=1)
        signed = entries * self.signs.astype(table.dtype)
        return jnp.sum(signed, axis=0) * self._scale(table.dtype)

    def diagonal(self) -> FlatVector:
        """diag(A A'), which is 1 everywhere: decoded noise is that of the full dimension."""
        return jnp.ones(self.buckets.shape[1], jnp.result_type(float))

    def _scale(self, dtype: jnp.dtype) -> np.ndarray:
        """The size of A's entries."""
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

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from dpjax.contrib import sketches
        >>> frame = sketches.gaussian(100, 4, jax.random.key(0))
        >>> frame.decode(frame.encode(jnp.ones(100))).shape
        (100,)
    """
    columns = normals(key, (k, dimension), jnp.dtype(dtype)).T
    if is_orthonormal:
        return Frame(orthonormal(columns * (1 / math.sqrt(dimension))))
    return Frame(columns * (1 / math.sqrt(k)))


def count_sketch(dimension: int, k: int, key: PRNGKeyArray, *, rows: int = 4) -> CountSketch:
    """Return a sparse projection whose buckets and signs are hashes of coordinates.

    Args:
        dimension: d.
        k: Numbers in a sketch; a multiple of rows.
        key: A threefry key, public.
        rows: Independent hashes of every coordinate.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from dpjax.contrib import sketches
        >>> sparse = sketches.count_sketch(100, 20, jax.random.key(0), rows=2)
        >>> sparse.encode(jnp.ones(100)).shape
        (20,)
    """
    width = k // rows
    low, high = words(key, (rows, dimension))
    # Off from uniform by at most width / 2**32 of a bucket's share.
    buckets = (low % width).astype(jnp.int32)
    bits = (high >> 31).astype(jnp.int32)
    signs = (1 - 2 * bits).astype(jnp.int8)
    return CountSketch(buckets, signs, width)


class _Known:
    """A constant projection, which is its state."""

    def projection(self, state: Projection) -> Projection:
        """The projection of the first round."""
        return state

    def noise(self, state: Memory, variance: Scalar, present: Scalar) -> FlatVector:
        """(a^2 / B) diag(A A')."""
        return state.diagonal() * (variance / present)

    def learn(
        self, state: Memory, gradient: Array, key: PRNGKeyArray, mean: Updates | None = None
    ) -> Memory:
        """The same state: it learns nothing."""
        return state


@dataclass(frozen=True)
class FixedFrame(_Known):
    """A random frame, drawn once.

    Attributes:
        k: Columns.
        is_orthonormal: Whether its columns are; else entries are N(0, 1/k), and A A' is the
            identity on average.

    Reference:
        `gaussian`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from dpjax.contrib.sketches import FixedFrame
        >>> sketch = FixedFrame(k=4)
        >>> frame = sketch.projection(sketch.start(jax.random.key(0), 20, jnp.float32))
        >>> frame.encode(jnp.ones(20)).shape
        (4,)
    """

    k: int
    is_orthonormal: bool = True

    def __post_init__(self) -> None:
        """Check the number of columns."""
        _validate.fields(self, _validate.integer, "k")
        _validate.flag("is_orthonormal", self.is_orthonormal)

    @property
    def min_entries(self) -> int:
        """As many as columns, where these are orthonormal."""
        return self.k if self.is_orthonormal else 1

    def start(self, key: PRNGKeyArray, entries: int, dtype: DTypeLike) -> Frame:
        """The frame."""
        check_entries(self, entries)
        return gaussian(entries, self.k, key, is_orthonormal=self.is_orthonormal, dtype=dtype)


@dataclass(frozen=True)
class Count(_Known):
    """A count sketch, drawn once: the sparse projection of Chen et al. (2022).

    Attributes:
        k: Buckets in all; a multiple of rows.
        rows: Independent hashes of every coordinate.

    Reference:
        `count_sketch`.
    """

    k: int
    rows: int = 1

    min_entries = 1

    def __post_init__(self) -> None:
        """Check that rows divide the buckets."""
        _validate.fields(self, _validate.integer, "k", "rows")
        if self.k % self.rows:
            raise ValueError(f"k is {self.k}, no multiple of rows, {self.rows}; give one that is")

    def start(self, key: PRNGKeyArray, entries: int, dtype: DTypeLike) -> CountSketch:
        """The hashes."""
        return count_sketch(entries, self.k, key, rows=self.rows)


@dataclass(frozen=True, eq=False)
class GivenFrame(_Known):
    """A given frame, such as an oracle's from public gradients.

    Attributes:
        columns: [d, k], public or privatised.

    Reference:
        For example the leading right singular vectors of public gradients.

    Example:
        >>> import numpy as np
        >>> from dpjax.contrib.sketches import GivenFrame
        >>> GivenFrame(np.eye(5)[:, :2]).k
        2
    """

    columns: Float[np.ndarray, "d k"]

    def __post_init__(self) -> None:
        """Check that the columns are a matrix of finite numbers."""
        columns = _validate.finite_array("columns", self.columns, ndim=2)
        if np.abs(columns).max() > np.finfo(np.float32).max:
            raise ValueError(f"columns has {np.abs(columns).max():.3g}, beyond float32; rescale it")
        # Read-only: plans of one run compare and hash this array.
        object.__setattr__(self, "columns", fixed(columns, np.float32))

    # By its numbers: arrays have no hash, and compare by entry.
    def __eq__(self, other: Any) -> bool:
        """Whether the numbers are equal."""
        return isinstance(other, GivenFrame) and np.array_equal(self.columns, other.columns)

    def __hash__(self) -> int:
        """The hash of the numbers."""
        return hash((self.columns.shape, self.columns.tobytes()))

    def __repr__(self) -> str:
        """Its size."""
        return f"GivenFrame(columns={self.columns.shape})"

    @property
    def k(self) -> int:
        """Columns."""
        return self.columns.shape[1]

    @property
    def min_entries(self) -> int:
        """Rows."""
        return self.columns.shape[0]

    def start(self, key: PRNGKeyArray, entries: int, dtype: DTypeLike) -> Frame:
        """The frame."""
        if entries != self.min_entries:
            raise ValueError(
                f"columns has {self.min_entries} rows for a model of {entries:,} entries"
            )
        return Frame(jnp.asarray(self.columns, dtype))
