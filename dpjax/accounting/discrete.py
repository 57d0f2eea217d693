"""The loss of a secure sum whose every client adds discrete Gaussian noise of its own.

n honest survivors each add noise of variance v, in squared grid units, to K whole numbers; a client
that is left out moves the sum by D grid units at most. A round in which a client takes part is

    rho = e^2 / 2,    e = D / sqrt(n v) + tau sqrt(K),
    tau = 10 sum_{j = 1}^{n - 1} exp(-2 pi^2 v j / (j + 1))

in zCDP: sums of discrete Gaussians are not quite discrete Gaussians, and tau bounds by how much. It
is no Gaussian DP, whose bound holds for real Gaussians alone: no mu is stated.

Whoever is in more rounds pays for each of them. Noise of clients that drop out is missing from the
sum, and that of clients who collude is known to those who see it: n counts neither. More survivors
than n only add noise.

Reference:
    Kairouz, Liu and Steinke (2021), The distributed discrete Gaussian mechanism for federated
    learning with secure aggregation, theorem 1 and proposition 14 (its other terms, smaller in
    few cases, are not used).
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import exp, fsum, pi, sqrt
from typing import Literal, TypeAlias

from dpjax import _validate
from dpjax.accounting import losses
from dpjax.accounting.rounding import MARGIN
from dpjax.encoding import lattice

__all__ = [
    "Cohort",
    "largest_rho",
    "concentrated_loss",
    "round_epsilon",
    "smallest_grid",
    "tau",
]

RecordRelation = Literal["zero_out", "replace"]
# The variance of whole numbers, in squared grid units.
_Variance: TypeAlias = int | float | Fraction
_TERMS = 4096
_WIDE = 1 + 1e-12


@dataclass(frozen=True)
class Cohort:
    """The clients of a round: how many are asked, may be gone, may collude with the server.

    Attributes:
        clients: B.
        dropouts: Most that may be gone when the sum is opened.
        colluders: Most whose noise the server knows; they may be among the survivors.

    Raises:
        ValueError: Where nobody honest might be left.

    Example:
        >>> from dpjax.accounting.discrete import Cohort
        >>> cohort = Cohort(clients=100, dropouts=5, colluders=10)
        >>> cohort.honest
        85
    """

    clients: int
    dropouts: int = 0
    colluders: int = 0

    def __post_init__(self) -> None:
        """Refuse a cohort without an honest survivor."""
        clients = _validate.integer("clients", self.clients)
        gone = _validate.integer("dropouts", self.dropouts, minimum=0)
        gone += _validate.integer("colluders", self.colluders, minimum=0)
        if gone >= clients:
            raise ValueError(
                f"clients is {clients}, of whom {gone} may drop out or collude; ask more clients"
            )

    @property
    def honest(self) -> int:
        """n: survivors at least whose noise nobody knows."""
        return self.clients - self.dropouts - self.colluders


def tau(variance: _Variance, honest: int) -> float:
    """Return by how much a sum of discrete Gaussians is off one, rounded up.

    Args:
        variance: v of each, squared grid units, at least 1/4.
        honest: n.

    Returns:
        tau; 0 for one alone.

    Raises:
        ValueError: For a smaller variance, for which it is not proved.

    Reference:
        Kairouz, Liu and Steinke (2021), theorem 1.

    Example:
        >>> from dpjax.accounting import discrete
        >>> f"{discrete.tau(4, 2):.1e}", f"{discrete.tau(1, 1000):.1e}"
        ('7.2e-17', '5.7e-04')
    """
    v = _variance(variance)
    n = _validate.integer("honest", honest)
    counts = range(1, min(n, _TERMS))
    exponent = -2 * pi**2 * v
    terms = [exp(exponent * j / (j + 1)) for j in counts]
    # Those left out are at most exp(-2 pi^2 v) / (1 - ...) each: j / (j + 1) >= T / (T + 1).
    largest = exp(exponent * _TERMS / (_TERMS + 1))
    rest = max(0, n - _TERMS) * largest
    return 10 * (fsum(terms) + rest) * _WIDE


def round_epsilon(sensitivity: float, variance: _Variance, honest: int, size: int) -> float:
    """Return e of one round, of e^2 / 2 - zCDP.

    Guarantee: of the opened sum, against whoever sees it and knows the noise of all but n
    survivors, between inputs whose sums differ by at most the sensitivity in L2.

    Args:
        sensitivity: D, after rounding, in grid units.
        variance: v, of each client's noise, squared grid units.
        honest: n.
        size: K, coordinates of the sum.

    Raises:
        ValueError: For numbers out of range.

    Example:
        >>> from dpjax.accounting import discrete
        >>> round(discrete.round_epsilon(1.0, 4, 900, 4096), 4)
        0.0167
    """
    moved = _validate.positive("sensitivity", sensitivity)
    v = _variance(variance)
    n = _validate.integer("honest", honest)
    k = _validate.integer("size", size)
    return (moved / sqrt(n * v) + tau(variance, n) * sqrt(k)) * _WIDE


def concentrated_loss(
    sensitivity: float,
    variance: _Variance,
    cohort: Cohort,
    size: int,
    *,
    rounds: int,
    participations: int,
    relation: RecordRelation,
    failure: float = 0.0,
) -> losses.Concentrated:
    """Return the loss of all rounds.

    Guarantee: zCDP of one unit, which is in at most so many sums, against the server and the
    colluders together, where every sum that may have been opened is counted, aborted rounds among
    them, and none is opened with more clients missing than ``cohort.dropouts``. A replaced vector
    moves a sum by twice what one left out does.

    Args:
        sensitivity: D of one vector left out, after rounding, in grid units: the root of
            ``SumCode.limit``.
        variance: v of each client's noise, squared grid units.
        cohort: The clients of each round.
        size: K.
        rounds: Rounds T.
        participations: In how many rounds what is protected takes part.
        relation: "zero_out" or "replace".
        failure: Probability a round, at most, that roundings move the sum further.

    Returns:
        The loss, whole from the first round on unless a unit is in all rounds.

    Raises:
        ValueError: For numbers out of range, or more participations than rounds.

    Example:
        >>> from dpjax.accounting import discrete
        >>> cohort = discrete.Cohort(clients=100, dropouts=5)
        >>> spent = discrete.concentrated_loss(
        ...     20.0, 4, cohort, 4096, rounds=300, participations=3, relation="zero_out"
        ... )
        >>> round(spent.rho, 3), round(spent.epsilon(1e-5), 3)
        (1.579, 9.292)
    """
    times = _validate.integer("participations", participations)
    if times > (total := _validate.integer("rounds", rounds)):
        raise ValueError(f"participations is {times} of {total} rounds; give at most as many")
    _validate.one_of("relation", relation, ("zero_out", "replace"))
    moved = _validate.positive("sensitivity", sensitivity) * (2 if relation == "replace" else 1)
    round_cost = round_epsilon(moved, variance, cohort.honest, size)
    rho = times * round_cost**2 / 2 * MARGIN
    return losses.Concentrated(rho, total, times == total, failure=times * failure * MARGIN)


def largest_rho(epsilon: float, delta: float) -> float:
    """Return the largest zCDP whose epsilon at delta is within a budget.

    Args:
        epsilon: Above 0.
        delta: Between 0 and 1.

    Raises:
        ValueError: For other numbers.

    Example:
        >>> from dpjax.accounting import discrete
        >>> round(discrete.largest_rho(8.0, 1e-5), 4)
        1.2297
    """
    e = _validate.positive("epsilon", epsilon)
    d = _validate.probability("delta", delta)
    return _bisected(lambda rho: losses.Concentrated(rho).epsilon(d) <= e, 0.0, e + 1.0)


def smallest_grid(
    bound: float,
    rho: float,
    cohort: Cohort,
    size: int,
    *,
    variance: int | Fraction,
    participations: int,
    relation: RecordRelation,
    beta: float = lattice.REDRAWN,
    records: int = 1,
) -> float:
    """Return the grid at which noise of so many squared grid units is what a budget takes.

    A coarser grid loses less privacy and more accuracy. ``rho`` is spent by `concentrated_loss` of
    ``SumCode(size, bound, grid, ..., variance, beta, records)``, to 12 digits.

    Args:
        bound: C, before rounding.
        rho: zCDP of all rounds.
        cohort: The clients of each round.
        size: K, coordinates as padded.
        variance: v of each client's noise, squared grid units, at least 4: the more, the less of
            the budget goes into rounding, and the more bits a sum takes.
        participations: Of what is protected.
        relation: "zero_out" or "replace".
        beta: Of the code.
        records: Of the code.

    Raises:
        ValueError: For numbers out of range, or a budget that no grid meets at this variance.

    Example:
        >>> from dpjax.accounting import discrete
        >>> grid = discrete.smallest_grid(
        ...     *(1.0, 0.5, discrete.Cohort(100), 4096),
        ...     variance=400, participations=3, relation="zero_out",
        ... )
        >>> round(grid, 5)
        0.00907
    """
    c = _validate.positive("bound", bound)
    budget = _validate.positive("rho", rho)

    def spent(norm: float) -> float:
        loss = concentrated_loss(
            lattice.moved(norm, size, beta, relation, records),
            variance,
            cohort,
            size,
            rounds=participations,
            participations=participations,
            relation="zero_out",
        )
        return loss.rho

    low = 1e-9
    high = 1.0
    if spent(low) > budget:
        raise ValueError(
            f"rho is {rho}, and rounding {size} coordinates under variance {variance} alone takes "
            f"{spent(low):.4g}; give more variance, more clients, or fewer coordinates"
        )
    # The loss rises with the norm, up to steps of the lattice.
    while spent(high) <= budget:
        low = high
        high = 2 * high
    return c / _bisected(lambda norm: spent(norm) <= budget, low, high) * _WIDE


def _bisected(keeps: Callable[[float], bool], low: float, high: float) -> float:
    """The largest number from low to high that keeps a budget, to 13 digits from below."""
    for _ in range(200):
        middle = (low + high) / 2
        if keeps(middle):
            low = middle
        else:
            high = middle
        # Below, halving no longer moves either end.
        if high - low <= 1e-13 * high:
            break
    return low


def _variance(value: _Variance) -> float:
    v = float(value) if isinstance(value, Fraction) else _validate.number("variance", value)
    if not v >= lattice.LEAST:
        raise ValueError(
            f"variance is {value} squared grid units, below 1/4, where nothing is proved; take a "
            "finer grid, or more noise"
        )
    return v
