"""What packages share: threefry, float64 sums, layers, links, compiled programs, rounding up."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

import jax
import jax.custom_batching
import jax.extend
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

__all__: list[str] = []

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
def threefry(
    key: PRNGKeyArray, high: UInt32[Array, "..."], low: UInt32[Array, "..."]
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
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
    x, y = high + schedule[0], low + schedule[1]
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
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
    counter = row * np.uint32(columns) + column
    high, low = threefry(key, jnp.zeros_like(counter), counter)
    return high ^ low


def fold_in(key: PRNGKeyArray, number: Any) -> PRNGKeyArray:
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


def check_key(key: Any, name: str = "key", shape: tuple[int, ...] = ()) -> None:
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

UNIT = 2.0**-53
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


def through_memory(
    first: UInt32[Array, "..."], second: UInt32[Array, "..."]
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Two words of each hash, as one array: compilers would hash for each word and use otherwise.

    Args:
        first: Words.
        second: The others, of the same shape.
    """
    with double_precision():
        both = first.astype(jnp.uint64) | (second.astype(jnp.uint64) << np.uint64(32))
        both = jax.lax.optimization_barrier(both)
        return both.astype(jnp.uint32), (both >> np.uint64(32)).astype(jnp.uint32)


def from_memory(fn: Callable[..., Any], *args: Any) -> Any:
    """fn(*args), with every number of args computed once, whatever uses it.

    A compiler that fuses may form a number anew in each use, and round it differently. On GPUs a
    barrier prevents it. XLA for CPUs removes barriers first, but not what enters a loop.

    Args:
        fn: Works on arrays.
        args: Trees of arrays.
    """

    def looped(*args: Any) -> Any:
        def body(i: Any, result: Any) -> Any:
            return jax.lax.cond(i == 0, fn, lambda *_: result, *args)

        result = jax.eval_shape(fn, *args)
        with double_precision():
            start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result)
            return jax.lax.fori_loop(0, 2, body, start)  # One turn alone would be unrolled.

    def fenced(*args: Any) -> Any:
        return fn(*jax.lax.optimization_barrier(args))

    return jax.lax.platform_dependent(*args, cpu=looped, default=fenced)


def sum_error(terms: int) -> float:
    """Largest error of a float64 sum, in any order, over the sizes of its terms added up."""
    return (terms + 4) * UNIT


def wide_dtype(tree: Any) -> Any:
    """The parameters' dtype, at least float32.

    Raises:
        ValueError: For complex ones, whose squares are no squared sizes.
    """
    # The same where JAX is set to promote nothing by itself.
    with jax.numpy_dtype_promotion("standard"):
        kind = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in jax.tree.leaves(tree)))
    if jnp.issubdtype(kind, jnp.complexfloating):
        raise ValueError(f"leaves are {kind}; give real and imaginary parts as leaves of their own")
    return kind


def wide_zeros(like: Any) -> Any:
    """Zeros in float64, in the shapes of a tree of arrays or shapes."""
    with double_precision():
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float64), like)


def wide_sum(total: Any, more: Any) -> Any:
    """The sum of two trees of float64 arrays."""
    with double_precision():
        return jax.tree.map(lambda sum_, term: sum_ + term.astype(sum_.dtype), total, more)


def rounded_sum(total: Any, like: Any) -> Any:
    """A tree of float64 arrays, rounded once to the dtypes of another tree."""
    with double_precision():
        return jax.tree.map(lambda leaf, to: leaf.astype(to.dtype), total, like)


def masked(mask: Bool[Array, " b"], inside: Callable[[Array], Any], tree: Any) -> Any:
    """Return a tree of leaves [b, ...] with other entries where a mask is True.

    Args:
        mask: Over the leading axis.
        inside: ``inside(leaf)``: what stands there.
        tree: The leaves.
    """

    def one(leaf: Array) -> Array:
        return jnp.where(mask.reshape(-1, *[1] * (leaf.ndim - 1)), inside(leaf), leaf)

    return jax.tree.map(one, tree)


def row_sum(rows: Any) -> Array:
    """The sum over the leading axis of a float64 array, its rows added up in groups of eight.

    On CPUs a quarter of the time of one reduction over rows, which compilers do not vectorise.

    Args:
        rows: [b, ...], b at least 1.
    """
    with double_precision():
        while (count := len(rows)) > 1:
            size = -(-count // 8)
            rows = jnp.pad(rows, [(0, -count % size)] + [(0, 0)] * (rows.ndim - 1))
            groups = (rows[start : start + size] for start in range(0, count, size))
            rows = functools.reduce(jnp.add, groups)
        return rows[0]


# --- Sums of squares, or of sizes, whose rounding is bounded whatever the order of additions ---

# Up to this many entries one sum, in any order, is accurate enough.
ONE_SUM = 4_096


def sum_levels(size: int) -> tuple[int, int]:
    """Length and number of the partial sums of that many numbers."""
    if size <= ONE_SUM:
        return size, 1
    length = math.isqrt(size - 1) + 1
    return length, -(-size // length)


def square_sum(flat: Float[Array, " d"]) -> Float[Array, ""]:
    """Sum of squares with rounding error below (length + number) ulp whatever the order."""
    return _summed(jnp.square(flat))


def absolute_sum(flat: Float[Array, " d"]) -> Float[Array, ""]:
    """Sum of absolute values with rounding error below (length + number) ulp."""
    return _summed(jnp.abs(flat))


def _summed(terms: Float[Array, " d"]) -> Float[Array, ""]:
    length, number = sum_levels(terms.size)
    if number == 1:
        return jnp.sum(terms)
    terms = jnp.pad(terms, (0, length * number - terms.size)).reshape(number, length)
    # A compiler must not merge the two sums into one of d terms. The barrier forbids it; on a CPU,
    # where XLA drops barriers, that no pass does is an assumption, which tests of long sums check.
    return jnp.sum(jax.lax.optimization_barrier(jnp.sum(terms, axis=1)))


# --- Layers of a tree of parameters: the leaves of one parent (kernel and bias of Dense_0, say) ---


def layer_numbers(tree: Any) -> tuple[int, ...]:
    """Return each leaf's layer, numbered from 0 in the order of the leaves.

    Args:
        tree: Parameters, or a gradient; None is no leaf.
    """
    known: dict[Any, int] = {}
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return tuple(known.setdefault(path[:-1], len(known)) for path in paths)


def layer_groups(tree: Any) -> list[list[int]]:
    """Return the numbers of the leaves of each layer."""
    of = layer_numbers(tree)
    return [[leaf for leaf, its in enumerate(of) if its == layer] for layer in sorted(set(of))]


def layer_share(clip_norm: float, layers: int) -> float:
    """Return C / sqrt(layers), rounded down: layers of this norm have C together at most."""
    return clip_norm / math.sqrt(layers) * (1 - 2**-50) if layers > 1 else clip_norm


# --- Links of a mixing matrix [n, n], or of a schedule [P, n, n] ---


def linked(mixing: Float[np.ndarray, "*p n n"]) -> Bool[np.ndarray, "n n"]:
    """Return which pairs of agents ever exchange something, in either direction."""
    matrix = np.asarray(mixing)
    used = (matrix != 0).reshape(-1, *matrix.shape[-2:]).any(axis=0)
    return (used | used.T) & ~np.eye(len(used), dtype=bool)


def link_pairs(mixing: Float[np.ndarray, "*p n n"]) -> Int[np.ndarray, "e 2"]:
    """Return the links (i, j), i < j, in lexical order."""
    return np.argwhere(np.triu(linked(mixing)))


def incidence(ends: Int[np.ndarray, "e 2"], agents: int) -> Float[np.ndarray, "n e"]:
    """Return 1 at a link's first end and -1 at its second, a column each."""
    signs = np.zeros((agents, len(ends)))
    columns = np.arange(len(ends))
    signs[ends[:, 0], columns], signs[ends[:, 1], columns] = 1.0, -1.0
    return signs


def message_pairs(
    mixing: Float[np.ndarray, "n n"],
) -> tuple[Int[np.ndarray, " l"], Int[np.ndarray, " l"]]:
    """Return sender and receiver of every message of a round, an agent's own copy included."""
    matrix = np.asarray(mixing)
    sender, receiver = np.nonzero(((matrix != 0) | np.eye(len(matrix), dtype=bool)).T)
    return sender, receiver


def zero_sum(
    sender: Int[np.ndarray, " l"], receiver: Int[np.ndarray, " l"], over: str
) -> Float[np.ndarray, "l l"]:
    """The map of standard normals to Zip-DL's noise on messages, at a deviation of 1.

    Args:
        sender: [L] agents.
        receiver: [L] agents; the sender for its own copy.
        over: "messages", or "with_own_copy" where own copies have noise, too.
    """
    noised = (sender != receiver) | (over == "with_own_copy")
    together = (sender[:, None] == sender) & noised[:, None] & noised
    counts = np.maximum(together.sum(axis=1), 1)
    return np.diag(noised.astype(np.float64)) - together / counts[:, None]


# --- Compiled programs, of which a bounded number is kept ---

_PROGRAMS = 16


class Compiled:
    """``jax.jit`` of a function whose first arguments are static, for at most 16 values of them.

    `jax.jit` keeps a program for every value of a static argument for good. Statics hold the
    problem's functions, so a process that makes one problem after another would keep all their
    programs. Here a program lives as long as its own `jax.jit`, and the least recently used one
    makes room.

    Args:
        function: What to compile.
        static: How many of its first arguments are static.
        options: Of `jax.jit`.
    """

    def __init__(self, function: Callable[..., Any], static: int = 1, **options: Any):
        functools.update_wrapper(self, function)
        self._static = static

        @functools.lru_cache(maxsize=_PROGRAMS)
        def program(*statics: Any) -> Any:
            return jax.jit(functools.partial(function, *statics), **options)

        self._program = program

    def __call__(self, *arguments: Any) -> Any:
        """Call the program of these static arguments."""
        return self._program(*arguments[: self._static])(*arguments[self._static :])

    def trace(self, *arguments: Any) -> Any:
        """Trace it, as ``jax.jit(function).trace`` does; a later call runs that trace."""
        return self._program(*arguments[: self._static]).trace(*arguments[self._static :])


def compiled(static: int = 1, **options: Any) -> Callable[[Callable[..., Any]], Compiled]:
    """Return a decorator that makes a function `Compiled`."""
    return functools.partial(Compiled, static=static, **options)


# --- Functions of one agent ---

AGENTS = "agents"
"""The one axis of a mesh of devices."""


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


def apart(function: Callable[..., Any], *trees: Any) -> Any:
    """`jax.vmap` of a function of one record, or agent, none of which reaches another's result.

    Mapped, the gradient by the kernels of a convolution in groups is one whose batch is in groups.
    Compilers take it as one convolution over all groups, most of it times zero; and zero times an
    infinite number of one record is nan in all others. Such functions are taken one by one.

    Args:
        function: Of one record's, or agent's, trees.
        trees: Leaves [b, ...].
    """
    leaves = jax.tree.leaves(trees)
    program, results = jax.make_jaxpr(jax.vmap(function), return_shape=True)(*trees)
    equations = (equation for jaxpr, _ in jaxprs(program) for equation in jaxpr.eqns)
    if any(equation.params.get("batch_group_count", 1) > 1 for equation in equations):
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), trees)
        program, results = jax.make_jaxpr(function, return_shape=True)(*shapes)

        # One by one under a further map, too: over agents, plans or seeds.
        @jax.custom_batching.sequential_vmap
        def alone(constants: list[Any], parts: list[Any]) -> list[Any]:
            closed = jax.extend.core.ClosedJaxpr(program.jaxpr, constants)
            return jax.extend.core.jaxpr_as_fun(closed)(*parts)

        values = jax.lax.map(lambda parts: alone(program.consts, parts), leaves)
    else:
        # The program that was read, not a second trace of it.
        values = jax.extend.core.jaxpr_as_fun(program)(*leaves)
    return jax.tree.unflatten(jax.tree.structure(results), values)


def each_agent(function: Callable[..., Any], *trees: Any, sequential: bool = False) -> Any:
    """`apart` of a function of one agent; agents over devices stay there.

    A compiler that divides a vmap over devices gathers all agents' images for a convolution.

    Args:
        function: Of one agent's trees.
        trees: Leaves [n, ...].
        sequential: Whether a device takes its agents one after the other.
    """

    def in_turn(*trees: Any) -> Any:
        return jax.lax.map(lambda one: function(*one), trees)

    return each_device(in_turn if sequential else functools.partial(apart, function), *trees)


def one_by_one(params: Any) -> bool:
    """Whether to take agents one after the other: on a CPU, for kernels of convolutions.

    Mapped over agents' kernels, of four axes or more, a CPU takes three times as long.

    Args:
        params: Of one agent, arrays or shapes.
    """
    kernels = any(len(leaf.shape) >= 4 for leaf in jax.tree.leaves(params))
    return kernels and jax.default_backend() == "cpu"


_MANY, _BLOCK = 2**24, 2**20
"""Numbers from which on a CPU takes agents in blocks, and those of a block."""


def in_blocks(function: Callable[..., Any], models: Any, *trees: Any) -> Any:
    """A function of arrays over agents; on a CPU, of a block of agents at a time if there are many.

    What is computed between arguments and results then takes the memory of a block. The last block
    ends with the last agent, so some agents may be computed twice, alike.

    Args:
        function: Of trees like the given ones, and of any number of agents.
        models: Leaves [n, ...].
        trees: Leaves [n, ...].
    """
    leaves = jax.tree.leaves(models)
    n, size = len(leaves[0]), sum(leaf.size for leaf in leaves)
    over_devices = AGENTS in jax.typeof(leaves[0]).sharding.mesh.axis_names
    if size < _MANY or over_devices or jax.default_backend() != "cpu":
        return function(models, *trees)
    block = max(1, _BLOCK * n // size)

    def add(number: Any, total: Any) -> Any:
        start = jnp.minimum(number * block, n - block)
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=block)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return jax.tree.map(put, total, function(*jax.tree.map(cut, (models, *trees))))

    shapes = jax.eval_shape(function, models, *trees)
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.fori_loop(0, -(-n // block), add, empty)


def each_device(function: Callable[..., Any], *trees: Any) -> Any:
    """A function of arrays over agents, on each device's part of them by itself.

    Args:
        function: Of trees like the given ones, and of any number of agents.
        trees: Leaves whose leading axis is over the devices, if anything is; those of the first one
            and of the result are [n, ...].
    """
    leaves = jax.tree.leaves(trees)
    meshes = [jax.typeof(leaf).sharding.mesh for leaf in leaves]
    mesh = next((each for each in meshes if AGENTS in each.axis_names), None)
    if mesh is None:
        return function(*trees)
    n, devices, spec = len(leaves[0]), mesh.shape[AGENTS], jax.sharding.PartitionSpec(AGENTS)

    def pad(leaf: Any) -> Any:
        return jnp.pad(leaf, [(0, -len(leaf) % devices)] + [(0, 0)] * (leaf.ndim - 1))

    # A check would have derivatives by a device's constants added up over devices, in private.
    local = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.tree.map(lambda leaf: leaf[:n], local(*jax.tree.map(pad, trees)))


def gathered(at: Any, *parts: Any) -> list[Any]:
    """Rows of arrays of records; over devices, each gathers its own agents' from its own records.

    Args:
        at: [n, b] places of the records, each in the part of its agent's device.
        parts: Leaves [N, ...], or [devices m, ...] over devices.
    """

    def local(at: Any, *parts: Any) -> list[Any]:
        # Positions are below counts, and the problem has checked its indices.
        return [part.at[at].get(mode="promise_in_bounds") for part in parts]

    return each_device(local, at, *parts)


# --- Losses and deltas are rounded up, as numbers and as text ---

MARGIN = 1 + 1e-15
"""Times this, a loss of a few float64 operations is not below what exact ones would give."""


def up(value: float, digits: int = 6) -> str:
    """Return a loss as text, rounded up: what is printed is never below what is stated.

    Six digits show a budget of 4 as 4; tables and figures, whose columns are narrow, have four.

    Args:
        value: A loss, or a noise that must not be less.
        digits: Significant digits.
    """
    if not math.isfinite(value):
        return str(value)
    # The shortest decimal that is this number: 1e-5 stays 1e-5, not the digit above it.
    shortest = Decimal(repr(float(value)))
    rounded = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(shortest)
    return f"{float(rounded):.{digits}g}"


def delta_text(delta: float, digits: int = 6) -> str:
    """Return a delta as text, rounded up; below 1 it is not printed as 1, nor above 0 as 0.

    With delta 1 a guarantee says nothing at all, and one of .9999999 is not that guarantee.

    Args:
        delta: A probability.
        digits: Significant digits; more where it takes more to tell it from 1.
    """
    shown = up(delta, digits)
    while delta < 1 <= float(shown):
        digits += 1
        shown = up(delta, digits)
    return shown


def loose_delta(delta: float, units: int, unit: str, *, more: bool = False) -> str:
    """Return a warning of a delta above one over the number of protected units, or "".

    Args:
        delta: A probability.
        units: How many agents, clients or records there are.
        unit: "agent", "client" or "record".
        more: Whether there may be more of them, ``units`` being all that is known.
    """
    if delta * units <= 1:
        return ""
    return (
        f"delta is {delta:g} for {'at least ' if more else ''}{units:,} {unit}s: above one "
        f"over their number it lets a method publish one of them as it is; give a delta "
        f"below {1 / units:.2g}"
    )


def jaxprs(value: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Every jaxpr within a jaxpr or within an operation's parameter, with its constants."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from jaxprs(part)
    elif hasattr(value, "eqns"):
        inner = getattr(value, "jaxpr", value)
        yield inner, getattr(value, "consts", ())
        for equation in inner.eqns:
            yield from jaxprs(equation.params)


def constants(closed: Any) -> Iterator[Any]:
    """Every array that a program holds, at any depth: constants and literals."""
    for jaxpr, held in jaxprs(closed):
        yield from held
        for equation in jaxpr.eqns:
            yield from (atom.val for atom in equation.invars if hasattr(atom, "val"))
