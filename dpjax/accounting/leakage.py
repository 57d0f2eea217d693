"""How much an attacker's view tells of a private value: mutual information from trials.

Kraskov's first estimator. Of N independent trials of a pair (x, y), let d_i be the distance from
trial i to its k-th nearest other one in the maximum norm over all coordinates of x and y together,
and n_x(i), n_y(i) how many others are strictly nearer than d_i in x alone and in y alone. Then

    I = psi(N) + psi(k) - mean_i ( psi(n_x(i) + 1) + psi(n_y(i) + 1) )        nats,

psi the digamma function.

**No guarantee.** The estimate is no upper bound on what leaks, and no substitute for epsilon:

- It is never above psi(N) - psi(k), whatever the truth (k - 1 others are strictly nearer in both),
  and far too low where coordinates are many or the dependence is strong.
- It is an average over the law that the trials are drawn from, of one round at a time. An attacker
  has all rounds, and may care about a case that is rare in that law.
- It depends on N, k and the coordinates' scales. State them with it.

**Ties.** The formula is for continuous variables. With at least k copies of a *pair* some d_i is 0
and the estimate is refused. Copies in one variable alone are right where its values lie farther
apart than neighbours (Ross's estimator for labels). Data on a lattice (integers, float32 in a
narrow range) share distances: too few are strictly nearer, and the estimate is too large. A little
noise splits ties. A variable that is constant over the trials tells nothing: exactly 0, by rule.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dpjax import _validate
from dpjax.accounting.arrays import Indices, Numbers, Vector

__all__ = ["mutual_information"]

# Beyond it squares, of which standard deviations are made, overflow.
_LARGEST = 1e150
# Trials from which k-d trees are asked by several threads, whose start takes milliseconds.
_THREADS_FROM = 2000


class NeighbourCounts(NamedTuple):
    """What Kraskov's first estimator is made of.

    Attributes:
        x: [N] other trials nearer than `distance` in x alone.
        y: [N] the same in y alone.
        distance: [N] to the k-th nearest other trial in both together.
    """

    x: Indices
    y: Indices
    distance: Vector


def mutual_information(
    x: ArrayLike, y: ArrayLike, k: int = 3, *, count: Callable[..., NeighbourCounts] | None = None
) -> float:
    """Kraskov's first estimate of the mutual information of x and y, from trials.

    An estimate and no bound: see the module on what it misses and on ties.

    Args:
        x: [N, dx] one row a trial.
        y: [N, dy] the same trials.
        k: Which nearest neighbour; smaller is less biased, larger varies less.
        count: What counts; `tree` by default.

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
    from scipy import special

    left = checked("x", x)
    right = checked("y", y)
    trials = len(left)
    k = _validate.integer("k", k)
    if len(right) != trials:
        raise ValueError(f"y has {len(right)} trials beside x of {trials}; give both of the same")
    if k >= trials:
        raise ValueError(f"k is {k} with {trials} trials; give more trials than k, or a smaller k")
    if any((columns == columns[0]).all() for columns in (left, right)):
        return 0.0
    near = (count or tree)(left, right, k)
    if near.distance.min() == 0:
        raise ValueError(
            f"x, y at trial {near.distance.argmin()} are the same as those of at least {k} others "
            "(k). The estimator is for continuous variables: add a little noise, or subtract what "
            "is large and the same in all trials first"
        )
    psi = special.digamma(np.arange(1, trials + 1))
    return float(psi[k - 1] + psi[trials - 1] - (psi[near.x] + psi[near.y]).mean())


def tree(x: Numbers, y: Numbers, k: int) -> NeighbourCounts:
    """Count by k-d trees.

    Args:
        x: [N, dx] trials.
        y: [N, dy] the same.
        k: Which nearest neighbour.
    """
    from scipy import spatial

    points = np.hstack([x, y])
    # Every trial is its own nearest one.
    workers = -1 if len(points) >= _THREADS_FROM else 1
    distance = spatial.cKDTree(points).query(points, [k + 1], p=np.inf, workers=workers)[0][:, 0]
    return NeighbourCounts(_nearer(x, distance), _nearer(y, distance), distance)


def _nearer(x: Numbers, distance: Numbers) -> Numbers:
    """Other trials nearer than ``distance`` [N]."""
    # It counts whole branches, four times as fast as scipy's, and compares the same differences.
    from sklearn.neighbors import KDTree

    within = np.nextafter(distance, 0.0)
    return KDTree(x, metric="chebyshev").query_radius(x, within, count_only=True) - 1


def checked(name: str, value: ArrayLike, ndim: int = 2) -> Numbers:
    """Float64 trials of one round, or of several.

    Args:
        name: Of the argument, for the message.
        value: [N, d] trials, or [R, N, d] of R rounds.
        ndim: 2 or 3.

    Raises:
        ValueError: For entries that are not finite or too large, or another shape.
    """
    array = _validate.finite_array(name, value)
    if array.ndim != ndim:
        form = "[N, d], one row a trial (x[:, None] for scalars)" if ndim == 2 else "[R, N, d]"
        raise ValueError(f"{name} has shape {array.shape}; give {form}")
    if (largest := float(abs(array).max())) > _LARGEST:
        raise ValueError(f"{name} reaches {largest:g}; rescale it, {_LARGEST:g} is the most")
    return array
