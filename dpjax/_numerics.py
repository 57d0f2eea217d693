"""Numbers that all packages share: threefry, float64 sums, layers of parameters."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.custom_batching
import jax.extend
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from dpjax.protocols import Tree

__all__ = ()

# Types of arrays that most packages name: one entry, one row, and the words of a hash.
Shape: TypeAlias = tuple[int, ...]
FlatVector: TypeAlias = Float[Array, " d"]
Scalar: TypeAlias = Float[Array, ""]
Integer: TypeAlias = Int[Array, ""]
Words: TypeAlias = UInt32[Array, "..."]
WordPair: TypeAlias = tuple[Words, Words]

# --- Threefry ---
# Written out so that compilers fuse it with what follows: on a CPU JAX hashes in a loop that
# nothing fuses with, which costs a small round most of its draws' time. Bits are those of
# `jax.random`.
#
# Reference: Salmon et al. (2011), Parallel random numbers: as easy as 1, 2, 3 (Threefry-2x32-20).

THREEFRY = "threefry2x32"

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


@functools.partial(jax.jit, inline=True)
def threefry(key: PRNGKeyArray, high: Words, low: Words) -> WordPair:
    """The two words of the hash of every counter.

    Args:
        key: One threefry key.
        high: First words of the counters.
        low: Second words, of the same shape.

    Raises:
        ValueError: For several keys.
    """
    _one_key(key)
    first, second = jax.random.key_data(key)
    schedule = (first, second, first ^ second ^ _PARITY)
    x = high + schedule[0]
    y = low + schedule[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x = x + y
            y = (y << np.uint32(distance)) | (y >> np.uint32(32 - distance))
            y = x ^ y
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def threefry_bits(key: PRNGKeyArray, shape: tuple[int, int]) -> UInt32[Array, "r c"]:
    """`jax.random.bits` of 32 bits each.

    Args:
        key: One key; of another generator than threefry, JAX draws.
        shape: (rows, columns); where their product is beyond 32 bits, JAX draws.

    Raises:
        ValueError: For several keys.
    """
    _one_key(key)
    rows, columns = shape
    if str(jax.random.key_impl(key)) != THREEFRY or rows * columns >= 2**32:
        return jax.random.bits(key, shape, jnp.uint32)
    row = jax.lax.broadcasted_iota(jnp.uint32, shape, 0)
    column = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    counter = row * np.uint32(columns) + column
    high, low = threefry(key, jnp.zeros_like(counter), counter)
    return high ^ low


def fold_in(key: PRNGKeyArray, number: int | Array) -> PRNGKeyArray:
    """`jax.random.fold_in`.

    Args:
        key: One key; of another generator than threefry, JAX folds.
        number: From 0, below 2**32.

    Raises:
        ValueError: For several keys.
    """
    _one_key(key)
    if str(jax.random.key_impl(key)) != THREEFRY:
        return jax.random.fold_in(key, number)
    words = jnp.stack(threefry(key, jnp.uint32(0), jnp.uint32(number)))
    # Kept: fused with what it is used in, a key is hashed again and again (1.3 times a round).
    return jax.random.wrap_key_data(jax.lax.optimization_barrier(words), impl=THREEFRY)


def row_keys(key: PRNGKeyArray, rows: int) -> PRNGKeyArray:
    """A key for every row, which depends on no other row.

    Args:
        key: One key.
        rows: How many.
    """
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows, dtype=jnp.uint32))


def check_key(key: Any, name: str = "key", shape: Shape = ()) -> None:
    """Refuse anything but typed threefry keys.

    Args:
        key: One, or an array of them.
        name: Its name in messages.
        shape: Shape of the array.

    Raises:
        ValueError: With the call that makes one.
    """
    remedy = (
        f"give typed threefry keys of shape {shape}, as jax.random.key(seed, impl="
        f"{THREEFRY!r}) is one (vmap over several)"
    )
    dtype = getattr(key, "dtype", None)
    if dtype is None or not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        raise ValueError(f"{name} is {type(key).__name__} of dtype {dtype}; {remedy}")
    if (generator := str(jax.random.key_impl(key))) != THREEFRY:
        raise ValueError(f"{name} is of generator {generator!r}; {remedy}")
    if key.shape != shape:
        raise ValueError(f"{name} has shape {key.shape}; {remedy}")


def _one_key(key: PRNGKeyArray) -> None:
    if key.shape:
        raise ValueError(f"key has shape {key.shape}; give one key, or use jax.vmap")


# --- Sums in float64 in the middle of a float32 program, whatever the global flag says ---

UNIT_ROUNDOFF = 2.0**-53
"""Half the spacing of float64 at 1."""


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Return a context in which jax computes in float64; the global flag is restored after.

    Ranks are promoted as numpy does, whatever jax is configured to: nothing of a user's is computed
    inside.
    """
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def _pools() -> Any:
    import scipy.linalg  # Its LAPACK is the one that JAX calls: to be found, it must be there.
    import threadpoolctl

    del scipy
    return threadpoolctl.ThreadpoolController()


def one_lapack_thread() -> Any:
    """A context for small matrices: more threads gain nothing, and wait for each other if busy."""
    return _pools().limit(limits=1, user_api="blas")


def through_memory(first: Words, second: Words) -> WordPair:
    """Two words of each hash, as one array: compilers would hash for each word and use otherwise.

    Args:
        first: Words.
        second: The others, of the same shape.
    """
    with double_precision():
        high = second.astype(jnp.uint64) << np.uint64(32)
        words = jax.lax.optimization_barrier(first.astype(jnp.uint64) | high)
        return words.astype(jnp.uint32), (words >> np.uint64(32)).astype(jnp.uint32)


def from_memory(fn: Callable[..., Tree], *args: Tree) -> Tree:
    """fn(*args), with every number of args computed once, whatever uses it.

    A compiler that fuses may form a number anew in each use, and round it differently. On GPUs a
    barrier prevents it. XLA for CPUs removes barriers first, but not what enters a loop.

    Args:
        fn: Works on arrays.
        args: Trees of arrays.
    """

    def looped(*args: Tree) -> Tree:
        def body(i: Array, result: Tree) -> Tree:
            return jax.lax.cond(i == 0, fn, lambda *_: result, *args)

        result = jax.eval_shape(fn, *args)
        with double_precision():
            start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result)
            return jax.lax.fori_loop(0, 2, body, start)  # One turn alone would be unrolled.

    def fenced(*args: Tree) -> Tree:
        return fn(*jax.lax.optimization_barrier(args))

    return jax.lax.platform_dependent(*args, cpu=looped, default=fenced)


def sum_error(terms: int) -> float:
    """Largest error of a float64 sum, in any order, over the sizes of its terms added up."""
    return (terms + 4) * UNIT_ROUNDOFF


def wide_dtype(tree: Tree) -> Any:
    """The parameters' dtype, at least float32.

    Raises:
        ValueError: For complex ones, whose squares are no squared sizes.
    """
    # The same where JAX is set to promote nothing by itself.
    with jax.numpy_dtype_promotion("standard"):
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(tree)]
        kind = jnp.result_type(jnp.float32, *dtypes)
    if jnp.issubdtype(kind, jnp.complexfloating):
        raise ValueError(f"leaves are {kind}; give real and imaginary parts as leaves of their own")
    return kind


def shapes(tree: Tree, *leading: int, dropped: int = 1) -> Tree:
    """Shapes and dtypes of a tree, with other leading axes.

    Args:
        tree: Leaves are arrays or shapes.
        leading: Lengths of the new axes.
        dropped: How many of the old ones they replace.
    """

    def of_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*leading, *leaf.shape[dropped:]), leaf.dtype)

    return jax.tree.map(of_leaf, tree)


def wide_zeros(like: Tree) -> Tree:
    """Zeros in float64, in the shapes of a tree of arrays or shapes."""
    with double_precision():
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float64), like)


def wide_sum(total: Tree, terms: Tree) -> Tree:
    """The sum of two trees of float64 arrays."""
    with double_precision():
        return jax.tree.map(lambda sum_, term: sum_ + term.astype(sum_.dtype), total, terms)


def rounded_sum(total: Tree, like: Tree) -> Tree:
    """A tree of float64 arrays, rounded once to the dtypes of another tree."""
    with double_precision():
        return jax.tree.map(lambda leaf, to: leaf.astype(to.dtype), total, like)


def masked(mask: Bool[Array, " b"], inside: Callable[[Array], Array], tree: Tree) -> Tree:
    """Return a tree of leaves [b, ...] with other entries where a mask is True.

    Args:
        mask: Over the leading axis.
        inside: ``inside(leaf)``: what stands there.
        tree: The leaves.
    """

    def of_leaf(leaf: Array) -> Array:
        column = mask.reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.where(column, inside(leaf), leaf)

    return jax.tree.map(of_leaf, tree)


def row_sum(rows: Array) -> Array:
    """The sum over the leading axis of a float64 array, its rows added up in groups of eight.

    On CPUs a quarter of the time of one reduction over rows, which compilers do not vectorise.

    Args:
        rows: [b, ...], b at least 1.
    """
    with double_precision():
        while len(rows) > 1:
            count = len(rows)
            size = -(-count // 8)
            padding = [(0, -count % size)] + [(0, 0)] * (rows.ndim - 1)
            rows = jnp.pad(rows, padding)
            groups = (rows[start : start + size] for start in range(0, count, size))
            rows = functools.reduce(jnp.add, groups)
        return rows[0]


# --- Sums of squares, or of sizes, whose rounding is bounded whatever the order of additions ---

# Up to this many entries one sum, in any order, is accurate enough.
_ONE_SUM = 4_096


def sum_levels(size: int) -> tuple[int, int]:
    """Length and number of the partial sums of that many numbers."""
    if size <= _ONE_SUM:
        return size, 1
    length = math.isqrt(size - 1) + 1
    return length, -(-size // length)


def square_sum(flat: FlatVector) -> Scalar:
    """Sum of squares with rounding error below (length + number) ulp whatever the order."""
    return _summed(jnp.square(flat))


def absolute_sum(flat: FlatVector) -> Scalar:
    """Sum of absolute values with rounding error below (length + number) ulp."""
    return _summed(jnp.abs(flat))


def _summed(terms: FlatVector) -> Scalar:
    length, number = sum_levels(terms.size)
    if number == 1:
        return jnp.sum(terms)
    terms = jnp.pad(terms, (0, length * number - terms.size)).reshape(number, length)
    # A compiler must not merge the two sums into one of d terms. The barrier forbids it; on a CPU,
    # where XLA drops barriers, that no pass does is an assumption, which tests of long sums check.
    return jnp.sum(jax.lax.optimization_barrier(jnp.sum(terms, axis=1)))


# --- Layers of a tree of parameters: the leaves of one parent (kernel and bias of Dense_0, say) ---


def layer_numbers(tree: Tree) -> tuple[int, ...]:
    """Return each leaf's layer, numbered from 0 in the order of the leaves.

    Args:
        tree: Parameters, or a gradient; None is no leaf.
    """
    numbers: dict[jax.tree_util.KeyPath, int] = {}
    layers = []
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        layers.append(numbers.setdefault(path[:-1], len(numbers)))
    return tuple(layers)


def layer_groups(tree: Tree) -> list[list[int]]:
    """Return the numbers of the leaves of each layer."""
    groups: dict[int, list[int]] = {}
    for leaf, layer in enumerate(layer_numbers(tree)):
        groups.setdefault(layer, []).append(leaf)
    return list(groups.values())


def layer_share(clip_norm: float, layers: int) -> float:
    """Return C / sqrt(layers), rounded down: layers of this norm have C together at most."""
    # One layer is the whole model, whose share is exact.
    if layers <= 1:
        return clip_norm
    return clip_norm / math.sqrt(layers) * (1 - 2**-50)


def check_leaf(path: Any, leaf: Any, count: int | None, expected: str) -> None:
    """Refuse a leaf of updates of another leading axis or dtype.

    Args:
        path: Path of the leaf.
        leaf: An array, or a tracer.
        count: Length of the leading axis.
        expected: Name of the axis in messages.

    Raises:
        ValueError: Naming the leaf.
    """
    shape = jnp.shape(leaf)
    dtype = jnp.result_type(leaf)
    if not shape or shape[0] != count or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"updates{jax.tree_util.keystr(path)} has shape {shape} and dtype {dtype}; give "
            f"floating leaves with {expected} as their leading axis"
        )
