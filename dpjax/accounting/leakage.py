"""How much an attacker's view tells of a private value: mutual information from trials.

Kraskov's first estimator. Of N independent trials of a pair (x, y), let d_i be the distance from
trial i to its k-th nearest other one in the maximum norm over all coordinates of x and y together,
and n_x(i), n_y(i) how many others are strictly nearer than d_i in x alone and in y alone. Then

    I = psi(N) + psi(k) - mean_i ( psi(n_x(i) + 1) + psi(n_y(i) + 1) )        nats,

psi the digamma function. A leakage study takes x as what is private in a round, y as what the
attacker knows of it, and the largest value over the rounds, divided by that of x with itself:

    M-NMI = max_k I(x_k, y_k) / I(x_k, x_k).

**No guarantee.** The estimate is no upper bound on what leaks, and no substitute for epsilon:

- It is never above psi(N) - psi(k), whatever the truth (k - 1 others are strictly nearer in both),
  and far too low where coordinates are many or the dependence is strong.
- It is an average over the law that the trials are drawn from, of one round at a time. An attacker
  has all rounds, and may care about a case that is rare in that law.
- It depends on N, k, the coordinates' scales and the jitter. State them with it.

**Ties.** The formula is for continuous variables. With at least k copies of a *pair* some d_i is 0
and the estimate is refused. Copies in one variable alone are right where its values lie farther
apart than neighbours (Ross's estimator for labels). Data on a lattice (integers, float32 in a
narrow range) share distances: too few are strictly nearer, and the estimate is too large. Jitter
splits ties. A variable that is constant over the trials tells nothing: exactly 0, by rule.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike

from dpjax import _validate
from dpjax.accounting import neighbours, pairs

__all__ = [
    "Leakage",
    "Null",
    "mutual_information",
    "normalised",
    "normaliser",
    "over_rounds",
]

Convention = Literal["exact", "jittered"]
Coordinates = Literal["raw", "standardised"]
Jitter = Literal["none", "ties", "all"]

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


def mutual_information(
    x: ArrayLike, y: ArrayLike, k: int = 3, *, backend: neighbours.Backend | None = None
) -> float:
    """Kraskov's first estimate of the mutual information of x and y, from trials.

    An estimate and no bound: see the module on what it misses and on ties.

    Args:
        x: [N, dx] one row a trial.
        y: [N, dy] the same trials.
        k: Which nearest neighbour; smaller is less biased, larger varies less.
        backend: "tree" (k-d trees, on a CPU) or "dense" (all distances, in blocks, where JAX
            runs); None takes trees where JAX runs on a CPU. Both give the same number.

    Returns:
        Nats, as it comes: around 0, on either side, for independent x and y; 0 where x or y is
        constant.

    Raises:
        ValueError: For entries that are not finite or beyond 1e150, shapes that do not match,
            fewer than k + 1 trials, or k copies of a pair.

    Reference:
        Kraskov, Stoegbauer, Grassberger, "Estimating mutual information", Phys. Rev. E 69
        (2004), equation (8).

    Example:
        >>> x, noise = np.random.default_rng(0).normal(size=(2, 2000, 1))
        >>> abs(mutual_information(x, x + noise) - 0.347) < 0.05  # log(2) / 2
        True
    """
    return float(over_rounds(*pairs.checked(x, y, 2), k, backend=backend)[0])


def over_rounds(
    x: ArrayLike, y: ArrayLike, k: int = 3, *, backend: neighbours.Backend | None = None
) -> Float[np.ndarray, " rounds"]:
    """`mutual_information` of many pairs, one a round.

    Args:
        x: [R, N, dx] trials of R rounds.
        y: [R, N, dy] the same.
        k: As there.
        backend: As there.

    Returns:
        [R] nats.

    Raises:
        ValueError: As there.
    """
    x, y = pairs.checked(x, y, 3)
    trials = x.shape[1]
    k = pairs.neighbours(k, trials)
    count = neighbours.route(backend)
    psi = _digamma(np.arange(1, trials + 1))
    found = np.zeros(len(x))
    for place in np.flatnonzero(~pairs.constant(x, y)):
        near = count(x[place], y[place], k)
        if near.distance.min() == 0:
            _refuse_copies(int(near.distance.argmin()), int(place), k)
        found[place] = psi[k - 1] + psi[trials - 1] - (psi[near.x] + psi[near.y]).mean()
    return found


def normaliser(trials: int, k: int = 3, convention: Convention = "exact") -> float:
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
    k = pairs.neighbours(k, trials)
    _validate.one_of("convention", convention, get_args(Convention))
    return float(_digamma(trials) - _digamma(k + (convention == "jittered")))


def normalised(
    x: ArrayLike,
    y: ArrayLike,
    k: int = 3,
    *,
    convention: Convention = "exact",
    coordinates: Coordinates = "raw",
    jitter: Jitter = "none",
    seed: int | None = None,
    permutations: int = 0,
    level: float = 0.95,
    backend: neighbours.Backend | None = None,
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
        >>> found = normalised(x, x + 0.1 * noise, seed=0, permutations=19)
        >>> found.value > 0.3, found.null.maximum_quantile < 0.05, found.null.p_value
        (True, True, 0.05)
    """
    x, y = pairs.checked(x, y, 3)
    whole = normaliser(x.shape[1], k, convention)
    if whole <= 0:
        raise ValueError(
            f"k is {k} with {x.shape[1]} trials, whose {convention} normaliser is 0; give more "
            "trials, or a smaller k"
        )
    _validate.one_of("coordinates", coordinates, get_args(Coordinates))
    _validate.one_of("jitter", jitter, get_args(Jitter))
    permutations = _validate.integer("permutations", permutations, least=0)
    level = _validate.probability("level", level)
    if seed is not None:
        seed = _validate.integer("seed", seed, least=0)
    elif jitter != "none" or permutations:
        raise ValueError("seed is None; give a whole number for jitter and permutations")
    constant = pairs.constant(x, y)
    if coordinates == "standardised":
        x, y = pairs.standardised(x), pairs.standardised(y)
    if seed is not None and jitter != "none":
        x = pairs.jittered(x, (seed, _JITTER_X), ties_only=jitter == "ties")
        y = pairs.jittered(y, (seed, _JITTER_Y), ties_only=jitter == "ties")
    information = over_rounds(x, y, k, backend=backend)
    rounds = information / whole
    null = None
    if seed is not None and permutations:
        dealt = [
            over_rounds(x, y[:, order], k, backend=backend)
            for order in _orders(x.shape[1], permutations, seed)
        ]
        null = _null(np.stack(dealt) / whole, float(rounds.max()), level)
    best = int(rounds.argmax())
    return Leakage(float(rounds[best]), best, rounds, information, whole, constant, null)


def _orders(trials: int, permutations: int, seed: int) -> Iterator[np.ndarray]:
    """Permutations of the trials, each the same whatever their number."""
    for index in range(permutations):
        yield np.random.default_rng((seed, _PERMUTATION, index)).permutation(trials)


def _null(found: np.ndarray, value: float, level: float) -> Null:
    """What permutations [B, R] say."""
    maxima = found.max(axis=1)

    def quantile(of: np.ndarray) -> np.ndarray:
        return np.quantile(of, level, axis=0, method="higher")

    return Null(
        mean=found.mean(axis=0),
        quantile=quantile(found),
        maximum_mean=float(maxima.mean()),
        maximum_quantile=float(quantile(maxima)),
        p_value=float((1 + (maxima >= value).sum()) / (1 + len(found))),
        level=level,
        permutations=len(found),
    )


def _digamma(of: ArrayLike) -> np.ndarray:
    from scipy import special

    return np.asarray(special.digamma(of))


def _refuse_copies(trial: int, place: int, k: int) -> None:
    raise ValueError(
        f"x, y at trial {trial} of round {place} are the same as those of at least {k} others (k); "
        "the estimator is for continuous variables: add jitter (pairs.jittered, or jitter='ties' "
        "in normalised), or subtract what is large and the same in all trials first"
    )
