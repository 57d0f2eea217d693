"""The papers' own bounds, for comparison only: never used in a Guarantee.

Everything is a squared Gaussian-DP parameter at clip 1, noise 1 and zero-out, to be compared with
``View.gdp(...) ** 2``: Renyi-DP of order alpha is alpha / 2 times it, other noise divides it by
sigma^2, replacement multiplies it by 4.

=========  ==================================  ==================================================
paper      its bound for                       here
=========  ==================================  ==================================================
Muffliato  PNDP, one attacker                  `muffliato_pndp`, with both numerators
Muffliato  LDP, an agent in all T rounds       mu^2 = T, where `muffliato_pndp` is capped
MAFALDA    any linear view (Theorem 7)         `mafalda`, as printed: false where it says so
Whisper    LDP, any covariance (Theorem 2)     `dpjax.accounting.budget.loss`, accountant "rdp"
DECOR      LDP                                 Whisper's Theorem 2 at its covariance s I + c L
Zip-DL     LDP                                 none: MAFALDA's A = BC for it does not exist where
                                               the noises sum to zero over the messages sent
=========  ==================================  ==================================================
"""

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy.linalg
from jaxtyping import Bool, Float

from dpjax import _validate
from dpjax.accounting import dense, gdp
from dpjax.accounting.attacker import GradientDependence, View
from dpjax.contrib import moves
from dpjax.mechanism import laplace
from dpjax.mechanism.participation import Participation

__all__ = [
    *("RivalBudget", "Claim", "Numerator", "PaperLimits", "budget", "geometric", "mafalda"),
    *("muffliato_pndp", "paper_limits"),
]

Numerator = Literal["plain", "squared"]

# Of a product of five factors, the share of a run's messages among them, and above the budget of
# a first scale that was rounded up.
_UP = 1 + 2e-14

_LARGEST = 3000
"""Agents times rounds up to which `mafalda` judges by the dense route."""

NUMERATORS = ("plain", "squared")
"""Of Muffliato's bound: (W^s)_uw as MAFALDA's Fig. 2 plots it, or its square."""


class Claim(NamedTuple):
    """What a paper claims, and whether it can be.

    Attributes:
        mu_squared: [n] claimed mu^2 of every victim; nan for attackers.
        false: [n] True where the true loss is certainly larger.
    """

    mu_squared: Float[np.ndarray, " n"]
    false: Bool[np.ndarray, " n"]


def muffliato_pndp(mixing: Any, rounds: int, *, numerator: Numerator) -> Float[np.ndarray, "n n"]:
    """Muffliato's bound on the loss of every victim to every single attacker, for DP-D-SGD.

    min(T, sum_{s=0}^{T-1} (T - s) sum_w (W^s)_uw / ||(W^s)_:w||^2),  w over attacker v and its
    neighbours; with ``"squared"`` the numerator is (W^s)_uw^2, as for averaging. An agent takes
    part in every round (T, T, 1), with one gossip step a gradient.

    Args:
        mixing: [n, n] row-stochastic W.
        rounds: T.
        numerator: One of `NUMERATORS`, no default: the two differ by up to orders of magnitude.

    Returns:
        [n, n] mu^2 by (victim, attacker); nan on the diagonal.

    Raises:
        ValueError: For a schedule or a matrix that is not row-stochastic.

    Reference:
        Cyffers et al., Muffliato (2022), in the form of the code behind Fig. 2 of "Unified Privacy
        Guarantees for Decentralized Learning via Matrix Factorization", (W^s)_uw where a W that is
        not symmetric would have u's part in w's message at (W^s)_wu.

    Example:
        >>> from dpjax.contrib import published
        >>> from dpjax.topology import graphs, mixing
        >>> matrix = mixing.metropolis_hastings(graphs.ring(4))
        >>> published.muffliato_pndp(matrix, 3, numerator="plain").shape
        (4, 4)
    """
    matrix = _validate.stochastic("mixing", mixing, ("row",))
    if matrix.ndim != 2:
        raise ValueError(f"mixing has shape {matrix.shape}; the published bound takes one [n, n]")
    rounds = _validate.integer("rounds", rounds)
    _validate.one_of("numerator", numerator, NUMERATORS)
    n = len(matrix)
    total = np.zeros((n, n))
    power = np.eye(n)
    for s in range(rounds):
        squares = (power**2).sum(axis=0)
        shares = power if numerator == "plain" else power**2
        # A column of zeros is an agent whom nobody hears any more.
        total += (rounds - s) * shares / np.where(squares > 0, squares, 1.0)
        power = power @ matrix
    senders = (matrix != 0) | np.eye(n, dtype=bool)
    bound = np.minimum(float(rounds), total @ senders.T)
    np.fill_diagonal(bound, np.nan)
    return bound


def mafalda(
    view: View, participation: Participation, *, gradients: GradientDependence = "any"
) -> Claim:
    """MAFALDA's Theorem 7 as printed, with sens where sens^2 is meant.

    It bounds sens by S = max over patterns of sum |(C' B^+ B C)_st| and claims 1/sigma-GDP at
    noise sigma S: mu = S at noise 1. S bounds sens^2, so the true mu is at most sqrt(S), and where
    S is below 1 (the victims far from an attacker) the claim lies below it.

    ``false`` is True only where a shift that is really there proves it: a unit gradient in one
    round, the mean over signs (sens^2 >= S / k), and, where the view has at most `_LARGEST`
    columns, equal gradients in every round of a pattern. The theorem's claim of adaptivity is not
    judged here; see `dpjax.accounting.views`.

    Args:
        view: What an attacker sees.
        participation: Which rounds a record takes part in.
        gradients: As in ``View.loss``.

    Returns:
        The claim.

    Raises:
        ValueError: As ``View.loss``.

    Reference:
        "Unified Privacy Guarantees for Decentralized Learning via Matrix Factorization", (8), (12)
        and (28); Pillutla et al., Lemma 3.15, has the square.
    """
    loss = view.loss(participation, gradients=gradients)
    once = view.loss(Participation(participation.rounds, 1, 1), gradients=gradients)
    printed = loss.mu**2
    # No less than one participation costs, nor than the most costly of all participations.
    single = np.where(once.upper_bound, 0.0, once.mu**2)
    bounds = np.maximum(single, printed / participation.epochs)
    if gradients == "view" and participation.rounds * view.agents <= _LARGEST:
        bounds = np.maximum(bounds, _equal_gradients(view, participation))
    # A millionth: far above rounding, far below what the slip costs.
    false = (printed < np.sqrt(bounds) * (1 - 1e-6)) & ~loss.upper_bound
    return Claim(printed**2, false)


def _equal_gradients(view: View, participation: Participation) -> Float[np.ndarray, " n"]:
    """Largest sum over a pattern of the entries with their signs, by the dense route."""
    a, b = view.materialize(participation.rounds)
    # Rows that follow from others are left out, as what an attacker sends follows from what it saw.
    triangle, order = scipy.linalg.qr(b.T, mode="r", pivoting=True)
    size = np.abs(np.diag(triangle))
    rows = np.sort(order[: int((size > 1e-10 * size[0]).sum())])
    answer = dense.energies(a[rows], b[rows], participation)
    if answer.ambiguous or answer.hidden:
        return np.zeros(view.agents)
    twice = np.where(np.arange(participation.epochs) == 0, 1.0, 2.0)[:, None]
    partial = np.cumsum(answer.values * twice, axis=1)
    sums = partial[participation.patterns, np.arange(participation.epochs)[None]].sum(axis=1)
    return np.asarray(sums.max(axis=0))


class RivalBudget(NamedTuple):
    """A budget by a paper's own formula.

    Attributes:
        epsilon: The number; a claim of that paper, in no guarantee of this package.
        reconstruction: True where the formula is recalled or inferred, not read.
        remark: What is known about it.
    """

    epsilon: float
    reconstruction: bool
    remark: str


REPORTED = {
    "pp_doagt": {10.0: 18446.44, 1.0: 3652.67, 0.1: 365.27},
    "diff_tv_ab": {10.0: 102.40, 1.0: 20.34, 0.1: 7.12},
}
"""Budgets of the rivals under the noise of Algorithm 1 at its epsilon, as its paper has them."""

_REMARKS = {
    "tracking": "read: (12), which pairs the step of a round with the noise of the round before",
    "dpop": "recalled: 2 C2 sqrt(p) c q2 / (m (q2 - q1))",
    "pp_doagt": "inferred from Table 3, 3 (gap + c) a_k over nu_k: at first step 1, whatever "
    "gamma, budgets reported are 1.230, 1.218 and 1.218 times it at c = 0 (c = .230, .218, .218)",
    "diff_tv_ab": "inferred: the first message alone, gap / nu_1; the reported budgets are 1.014, "
    "1.007 and 1.007 times it, and what is added to it is not known",
}


class PaperLimits(NamedTuple):
    """Up to which epsilon the paper's rule can be trusted, at one delta.

    Attributes:
        proposition: log(1/delta), where the paper's Proposition 1 ends.
        rdp: 8 (1 - 1/sqrt 2) log(1/delta), where its own Renyi conversion stops confirming it.
        exact: Where it becomes false: beyond, the exact epsilon exceeds the claimed one.
    """

    proposition: float
    rdp: float
    exact: float


def paper_limits(delta: float) -> PaperLimits:
    """Up to which epsilon the paper's rule can be trusted.

    Args:
        delta: Delta, in (0, 1).

    Returns:
        The three limits; the last rounded down to a relative 1e-9.

    Raises:
        ValueError: For delta outside (0, 1).

    Reference:
        Rodio et al., Whisper D-SGD, Proposition 1 and (10b).

    Example:
        >>> from dpjax.contrib import published
        >>> published.paper_limits(1e-5)._fields
        ('proposition', 'rdp', 'exact')
    """
    delta = _validate.probability("delta", delta)
    log = -np.log(delta)
    rdp = 8 * (1 - np.sqrt(0.5)) * log
    # The Renyi conversion is safe, so the rule is true up to `rdp` at least.
    low = rdp
    high = 2 * rdp
    while _sound(high, delta):
        low = high
        high = 2 * high
    while high - low > 1e-9 * low:
        middle = (low + high) / 2
        low, high = (middle, high) if _sound(middle, delta) else (low, middle)
    return PaperLimits(float(log), float(rdp), float(low))


def _sound(epsilon: float, delta: float) -> bool:
    mu = epsilon / (2 * np.sqrt(-np.log(delta)))
    return bool(gdp.epsilon(mu, delta) <= epsilon)


def geometric(
    first_scale: float,
    gradient_gap: float,
    gamma: float,
    q1: float,
    q2: float,
    rounds: int | None = None,
) -> float:
    """Return what messages of a geometric Laplace schedule cost, in closed form.

    epsilon = gap gamma / (nu_1 (q2 - q1)) (1 - (q1/q2)^(K-1)) after K messages, the first factor
    for any number of them: the inverse of `dpjax.mechanism.laplace.first_scale`.

    Guarantee: as `pure.epsilon`, for steps gamma q1^(k-1) and scales nu_1 q2^(k-1).

    Args:
        first_scale: nu_1, above 0.
        gradient_gap: L1 bound.
        gamma: First step.
        q1: Decay of the steps.
        q2: Decay of the noise, between q1 and 1.
        rounds: Messages K; None for any number of them.

    Returns:
        Epsilon, rounded up.

    Raises:
        ValueError: For numbers out of range, or q1 not below q2.

    Example:
        >>> from dpjax.contrib import published
        >>> round(published.geometric(0.05, 1.0, gamma=0.001, q1=0.97, q2=0.99), 6)
        1.0
    """
    scale = _validate.positive("first_scale", first_scale)
    gap = _validate.positive("gradient_gap", gradient_gap)
    gamma = _validate.positive("gamma", gamma)
    q1, q2 = laplace.decays(q1, q2)
    share = laplace.horizon_share(rounds, 1, q1, q2)
    loss = laplace.ratio([gap, gamma, share], [scale, q2 - q1]) * _UP
    # A loss that underflows is not 0.
    return max(loss, float(np.finfo(np.float64).tiny))


def budget(
    method: str,
    first_scale: float,
    *,
    q1: float,
    q2: float,
    gamma: float,
    gradient_gap: float | None = None,
    gradient_bound: float | None = None,
    dimension: int | None = None,
    constant: float = 0.0,
) -> RivalBudget:
    """Return a method's budget by its own paper's formula, for noise nu_1 q2^(k-1).

        tracking     gap gamma q2 / (nu_1 (q2 - q1))                      as printed
        dpop         2 C2 sqrt(p) gamma q2 / (nu_1 (q2 - q1))             recalled
        pp_doagt     3 (gap + constant) gamma q2 / (nu_1 (q2 - q1))       reconstruction
        diff_tv_ab   gap / nu_1                                           reconstruction

    None of these goes into a guarantee. The first two lie below the truth by the factor q2, one
    round too early; the last leaves out every message but the first, and what its messages cost
    together grows without bound where noise decays (`dpjax.contrib.moves.diff_tv_ab`).

    Args:
        method: "tracking", "dpop", "pp_doagt" or "diff_tv_ab".
        first_scale: nu_1.
        q1: Decay of the steps.
        q2: Decay of the noise.
        gamma: First step (the reported budgets of PP-DOAGT need 1, whatever gamma Algorithm 1 has).
        gradient_gap: delta, for all but DPOP.
        gradient_bound: C2, L2 bound of a gradient, for DPOP.
        dimension: Entries p of a model, for DPOP.
        constant: c_6 > 0 of Table 3, which the paper does not state.

    Returns:
        The budget, and what stands behind it.

    Raises:
        ValueError: For another method, what a formula needs and was not given, or numbers out of
        range.

    Reference:
        Xie, Liu and Chai, (12), Table 3 and Section 6.1; Huang, Mitra and Vaidya (2015).

    Example:
        >>> from dpjax.contrib import published
        >>> scale = 0.0495  # of Algorithm 1 at epsilon 1, as printed
        >>> decays = dict(q1=0.97, q2=0.99, gamma=1.0)
        >>> rival = published.budget("pp_doagt", scale, gradient_gap=1.0, **decays)
        >>> round(rival.epsilon, 6), published.REPORTED["pp_doagt"][1.0]
        (3000.0, 3652.67)
    """
    _validate.one_of("method", method, _REMARKS)
    scale = _validate.positive("first_scale", first_scale)
    if method == "dpop":
        bound = _needed("gradient_bound", gradient_bound, method)
        gap = 2 * bound * math.sqrt(_validate.integer("dimension", dimension))
    else:
        gap = _needed("gradient_gap", gradient_gap, method)
    if method == "pp_doagt":
        constant = _validate.number("constant", constant)
        gap = moves.printed_sensitivity("pp_doagt", gap, 1.0, constants=(0.0, constant))
    value = gap / scale if method == "diff_tv_ab" else geometric(scale, gap, gamma, q1, q2) * q2
    return RivalBudget(value, method != "tracking", _REMARKS[method])


def _needed(name: str, value: float | None, method: str) -> float:
    return _validate.positive(name, value, remedy=f"give it: {method}'s formula needs it")
