"""Leakage studies: normalised mutual information over rounds, its null, ties, and a GPU's route.

A leakage study takes x as what is private in a round, y as what the attacker knows of it, and the
largest value over the rounds, divided by that of x with itself:

    M-NMI = max_k I(x_k, y_k) / I(x_k, x_k),

with I Kraskov's estimator (`dpjax.accounting.leakage`), whose limits it shares: no guarantee.
"""

import functools
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike
from scipy import special

from dpjax import _validate
from dpjax._numerics import double_precision
from dpjax.accounting import leakage

__all__ = ["Leakage", "Null", "jittered", "normalised", "normaliser", "over_rounds"]

_Backend = Literal["tree", "dense"]
_Convention = Literal["exact", "jittered"]
_Coordinates = Literal["raw", "standardised"]
_Jitter = Literal["none", "ties", "all"]

_SCALE = 1e-10
"""Width of jitter over a coordinate's spread."""
_ENTRIES = {"cpu": 2**18, "gpu": 2**22}
"""Distances that the dense route holds at once, for each of x, y and both, by platform.

On a CPU more than its caches hold takes four times as long; on a GPU it is 32 MiB each.
"""

_JITTER_X, _JITTER_Y, _PERMUTATION = range(3)


class Null(NamedTuple):
    """The same estimate where y is dealt to other trials, so that it tells nothing of x.

    One permutation of the trials serves all rounds, which keeps what rounds have in common.

    Attributes:
        mean: [R] of a round's normalised value over the permutations.
        quantile: [R] of the same, at `level`.
        maximum_mean: Mean of the maximum over rounds: what that maximum is where nothing leaks.
        maximum_quantile: Quantile of the maximum over rounds, at `level`.
        p_value: (1 + permutations whose maximum is at least the value) / (1 + permutations).
        level: Of the quantiles.
        permutations: B.
    """

    mean: Float[np.ndarray, " rounds"]
    quantile: Float[np.ndarray, " rounds"]
    maximum_mean: float
    maximum_quantile: float
    p_value: float
    level: float
    permutations: int


class Leakage(NamedTuple):
    """Normalised mutual information of every round, and its maximum.

    Attributes:
        value: M-NMI, the largest of `rounds`; negative values are not cut.
        round: Where it is.
        rounds: [R] `information` over `normaliser`.
        information: [R] nats.
        normaliser: Nats.
        constant: [R] True where x or y was the same in all trials, and the value is 0 by rule.
        null: What is found where y tells nothing; None where no permutations were asked for.
    """

    value: float
    round: int
    rounds: Float[np.ndarray, " rounds"]
    information: Float[np.ndarray, " rounds"]
    normaliser: float
    constant: Bool[np.ndarray, " rounds"]
    null: Null | None


def over_rounds(
    x: ArrayLike, y: ArrayLike, k: int = 3, *, backend: _Backend | None = None
) -> Float[np.ndarray, " rounds"]:
    """Estimates of many pairs, one a round; see `dpjax.accounting.leakage.mutual_information`.

    Args:
        x: [R, N, dx] trials of R rounds.
        y: [R, N, dy] the same.
        k: As there.
        backend: "tree" (k-d trees, on a CPU) or "dense" (all distances, in blocks, where JAX
            runs); None takes trees where JAX runs on a CPU. Both give the same number.

    Returns:
        [R] nats.

    Raises:
        ValueError: As there.

    Example:
        >>> import numpy as np
        >>> from dpjax.contrib import leakage
        >>> x = np.random.default_rng(0).normal(size=(1, 50, 1))
        >>> leakage.over_rounds(x, x).shape
        (1,)
    """
    if backend is None:
        backend = "tree" if jax.default_backend() == "cpu" else "dense"
    _validate.one_of("backend", backend, get_args(_Backend))
    count = dense if backend == "dense" else None
    rounds = zip(*_checked(x, y), strict=True)
    return np.array([leakage.mutual_information(*pair, k, count=count) for pair in rounds])


def _checked(x: ArrayLike, y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Both as float64 [R, N, d], of the same rounds and trials."""
    left = leakage.checked("x", x, 3)
    other = leakage.checked("y", y, 3)
    if left.shape[:2] != other.shape[:2]:
        raise ValueError(
            f"y has shape {np.shape(y)} beside x of {np.shape(x)}; give both of the same trials "
            "and rounds"
        )
    return left, other


def normaliser(trials: int, k: int = 3, convention: _Convention = "exact") -> float:
    """What the estimator gives for a continuous variable and itself, of any dimension.

    Where y is x, the k - 1 trials nearer in both are those nearer in each, and the estimate is
    psi(N) - psi(k): 7.594 at N = 5,000 and k = 3. Where both have jitter of their own, small
    against the gaps between distances, the same trials are nearer, but the k-th is at the distance
    in one of the two alone and strictly nearer in the other, which counts k there:
    psi(N) - psi(k + 1), less by 1 / k: 7.261. Public tools that add noise to each argument by
    themselves give this one. Neither is an entropy: they grow with N, and differential entropy
    may be negative.

    Args:
        trials: N.
        k: As in `mutual_information`.
        convention: "exact" (x with itself), or "jittered" (two copies with independent jitter).

    Returns:
        Nats.

    Raises:
        ValueError: For fewer than k + 1 trials or an unknown convention.

    Example:
        >>> [round(normaliser(5000, 3, each), 3) for each in ("exact", "jittered")]
        [7.594, 7.261]
    """
    trials = _validate.integer("trials", trials)
    k = _validate.integer("k", k, maximum=trials - 1)
    _validate.one_of("convention", convention, get_args(_Convention))
    return float(special.digamma(trials) - special.digamma(k + (convention == "jittered")))


def normalised(
    x: ArrayLike,
    y: ArrayLike,
    k: int = 3,
    *,
    convention: _Convention = "exact",
    coordinates: _Coordinates = "raw",
    jitter: _Jitter = "none",
    seed: int | None = None,
    permutations: int = 0,
    level: float = 0.95,
    backend: _Backend | None = None,
) -> Leakage:
    """The largest normalised mutual information over rounds, M-NMI, and what chance alone gives.

    A maximum over rounds is biased upwards: where y tells nothing, single rounds lie around 0 and
    their maximum above it. The permutation null says by how much for these very data.

    Args:
        x: [R, N, dx] what is private, in R rounds of N independent trials; not changed.
        y: [R, N, dy] what the attacker knows of it; not changed.
        k: As in `mutual_information`.
        convention: Of the `normaliser`. "exact" is never exceeded where there are no ties;
            "jittered" goes with ``jitter="all"``.
        coordinates: "raw", or "standardised": every coordinate of every round less its mean over
            the trials, over its standard deviation. In the maximum norm the scales of y's
            coordinates against each other decide which of them count.
        jitter: "none"; "ties": coordinates with repeated values; "all": every coordinate, x's and
            y's independently, as tools do that add it by themselves.
        seed: Of jitter and permutations, needed where either is asked for.
        permutations: B; 0 leaves the null out. Each costs as much as the value itself.
        level: Of the null's quantiles.
        backend: As in `mutual_information`.

    Returns:
        The value, the rounds' values, and the null.

    Raises:
        ValueError: As `mutual_information`, or without the seed.

    Reference:
        Xie, Liu, Chai, arXiv:2505.07482, equation (43).

    Example:
        >>> x, noise = np.random.default_rng(0).normal(size=(2, 5, 500, 1))
        >>> estimates = normalised(x, x + 0.1 * noise, seed=0, permutations=19)
        >>> estimates.value > 0.3, estimates.null.maximum_quantile < 0.05, estimates.null.p_value
        (True, True, 0.05)
    """
    x, y = _checked(x, y)
    scale = normaliser(x.shape[1], k, convention)
    if scale <= 0:
        raise ValueError(
            f"k is {k} with {x.shape[1]} trials, whose {convention} normaliser is 0; give more "
            "trials, or a smaller k"
        )
    _validate.one_of("coordinates", coordinates, get_args(_Coordinates))
    _validate.one_of("jitter", jitter, get_args(_Jitter))
    permutations = _validate.integer("permutations", permutations, minimum=0)
    level = _validate.probability("level", level)
    if seed is not None:
        seed = _validate.integer("seed", seed, minimum=0)
    elif jitter != "none" or permutations:
        raise ValueError("seed is None; give a whole number for jitter and permutations")
    same = [(array.min(axis=1) == array.max(axis=1)).all(axis=1) for array in (x, y)]
    constant = same[0] | same[1]
    if coordinates == "standardised":
        x = standardised(x)
        y = standardised(y)
    if seed is not None and jitter != "none":
        x = jittered(x, (seed, _JITTER_X), ties_only=jitter == "ties")
        y = jittered(y, (seed, _JITTER_Y), ties_only=jitter == "ties")
    information = over_rounds(x, y, k, backend=backend)
    rounds = information / scale
    null = None
    if seed is not None and permutations:
        shuffled = []
        for order in _orders(x.shape[1], permutations, seed):
            shuffled.append(over_rounds(x, y[:, order], k, backend=backend))
        null = _null(np.stack(shuffled) / scale, float(rounds.max()), level)
    best = int(rounds.argmax())
    return Leakage(float(rounds[best]), best, rounds, information, scale, constant, null)


def _orders(trials: int, permutations: int, seed: int) -> Iterator[np.ndarray]:
    """Permutations of the trials, each the same whatever their number."""
    for index in range(permutations):
        yield np.random.default_rng((seed, _PERMUTATION, index)).permutation(trials)


def _null(values: np.ndarray, value: float, level: float) -> Null:
    """What permutations [B, R] say."""
    maxima = values.max(axis=1)

    def quantile(sample: np.ndarray) -> np.ndarray:
        return np.quantile(sample, level, axis=0, method="higher")

    # The value itself counts as one permutation, so that no p-value is 0.
    extremes = 1 + (maxima >= value).sum()
    p_value = float(extremes / (1 + len(values)))
    return Null(
        mean=values.mean(axis=0),
        quantile=quantile(values),
        maximum_mean=float(maxima.mean()),
        maximum_quantile=float(quantile(maxima)),
        p_value=p_value,
        level=level,
        permutations=len(values),
    )


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
    parts = tuple(_validate.integer("seed", part, minimum=0) for part in parts)
    low, high = np.quantile(values, [0.25, 0.75], axis=-2, keepdims=True)
    spread = np.where(high > low, high - low, values.std(axis=-2, keepdims=True))
    # Rounding leaves a constant coordinate a standard deviation.
    spread[values.min(axis=-2, keepdims=True) == values.max(axis=-2, keepdims=True)] = 0.0
    if ties_only:
        repeated = np.diff(np.sort(values, axis=-2), axis=-2) == 0
        spread *= repeated.any(axis=-2, keepdims=True)
    noise = np.random.default_rng(parts).uniform(-0.5, 0.5, size=values.shape)
    return values + _SCALE * spread * noise


def standardised(x: np.ndarray) -> np.ndarray:
    """Coordinates of mean 0 and standard deviation 1 over the trials; constant ones are 0."""
    constant = x.min(axis=1, keepdims=True) == x.max(axis=1, keepdims=True)
    spread = np.where(constant, 1.0, x.std(axis=1, keepdims=True))
    return np.where(constant, 0.0, (x - x.mean(axis=1, keepdims=True)) / spread)


def dense(x: np.ndarray, y: np.ndarray, k: int) -> leakage.NeighbourCounts:
    """Count from all distances, in blocks of rows."""
    trials = len(x)
    entries = _ENTRIES.get(jax.default_backend(), _ENTRIES["gpu"])
    blocks = -(-trials * trials // entries)
    size = -(-trials // min(blocks, trials))
    with double_precision():
        blocked = _blocks(jnp.asarray(x), jnp.asarray(y), k, size)
        return leakage.NeighbourCounts(*(np.asarray(part) for part in blocked))


@functools.partial(jax.jit, static_argnames="size")
def _blocks(x: jax.Array, y: jax.Array, k: int, size: int) -> tuple[jax.Array, ...]:
    """The three arrays of `leakage.NeighbourCounts`, ``size`` rows at a time."""
    trials = len(x)
    others = jnp.arange(trials)

    def block(rows: jax.Array) -> tuple[jax.Array, ...]:
        in_x = _distances(x, rows)
        in_y = _distances(y, rows)
        # A trial is no neighbour of itself.
        itself = rows[:, None] == others
        joint = jnp.where(itself, jnp.inf, jnp.maximum(in_x, in_y))

        def further(_: int, distance: jax.Array) -> jax.Array:
            # On to the next larger distance, where fewer than k are within this one.
            edge = distance[:, None]
            following = jnp.where(joint > edge, joint, jnp.inf).min(axis=1)
            within = (joint <= edge).sum(axis=1)
            return jnp.where(within < k, following, distance)

        distance = jax.lax.fori_loop(0, k, further, jnp.full(size, -jnp.inf))
        edge = distance[:, None]
        # Less one, the trial itself.
        count_x = (in_x < edge).sum(axis=1) - 1
        count_y = (in_y < edge).sum(axis=1) - 1
        return count_x, count_y, distance

    # Rows that fill up the last block repeat the last trial, and are cut off.
    rows = jnp.minimum(jnp.arange(-(-trials // size) * size), trials - 1)
    counts = jax.lax.map(block, rows.reshape(-1, size))
    return tuple(part.reshape(-1)[:trials] for part in counts)


def _distances(x: jax.Array, rows: jax.Array) -> jax.Array:
    """From the trials of some rows to all, in the maximum norm."""
    distance = jnp.abs(x[rows, 0, None] - x[:, 0])
    # Column by column: all at once would take as many matrices.
    for column in range(1, x.shape[1]):
        distance = jnp.maximum(distance, jnp.abs(x[rows, column, None] - x[:, column]))
    return distance
