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

from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from dpjax import _validate
from dpjax.accounting.attacker import Gradients, View
from dpjax.mechanism.participation import Participation

__all__ = ["Claim", "Numerator", "mafalda", "muffliato_pndp"]

Numerator = Literal["plain", "squared"]

LARGEST = 3000
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
    """
    matrix = _validate.stochastic("mixing", mixing, ("row",))
    if matrix.ndim != 2:
        raise ValueError(f"mixing has shape {matrix.shape}; the published bound takes one [n, n]")
    rounds = _validate.integer("rounds", rounds)
    _validate.one_of("numerator", numerator, NUMERATORS)
    n = len(matrix)
    total, power = np.zeros((n, n)), np.eye(n)
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


def mafalda(view: View, participation: Participation, *, gradients: Gradients = "any") -> Claim:
    """MAFALDA's Theorem 7 as printed, with sens where sens^2 is meant.

    It bounds sens by S = max over patterns of sum |(C' B^+ B C)_st| and claims 1/sigma-GDP at
    noise sigma S: mu = S at noise 1. S bounds sens^2, so the true mu is at most sqrt(S), and where
    S is below 1 (the victims far from an attacker) the claim lies below it.

    ``false`` is True only where a shift that is really there proves it: a unit gradient in one
    round, the mean over signs (sens^2 >= S / k), and, where the view has at most `LARGEST` columns,
    equal gradients in every round of a pattern. The theorem's claim of adaptivity is not judged
    here; see `dpjax.accounting.views`.

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
    least = np.maximum(np.where(once.upper_bound, 0.0, once.mu**2), printed / participation.epochs)
    if gradients == "view" and participation.rounds * view.agents <= LARGEST:
        least = np.maximum(least, _equal_gradients(view, participation))
    # A millionth: far above rounding, far below what the slip costs.
    false = (printed < np.sqrt(least) * (1 - 1e-6)) & ~loss.upper_bound
    return Claim(printed**2, false)


def _equal_gradients(view: View, participation: Participation) -> Float[np.ndarray, " n"]:
    """Largest sum over a pattern of the entries with their signs, by the dense route."""
    answer = view._dense(participation)
    if answer.ambiguous or answer.hidden:
        return np.zeros(view.agents)
    twice = np.where(np.arange(participation.epochs) == 0, 1.0, 2.0)[:, None]
    partial = np.cumsum(answer.values * twice, axis=1)
    sums = partial[participation.patterns, np.arange(participation.epochs)[None]].sum(axis=1)
    return np.asarray(sums.max(axis=0))
