"""Strategies over rounds for plans: made once, checked, and as the run applies them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from dpjax import _validate
from dpjax.mechanism import design as design_
from dpjax.mechanism import strategy as strategy_
from dpjax.mechanism import temporal
from dpjax.mechanism.participation import Participation
from dpjax.mechanism.spatial import bounds
from dpjax.topology import mixing as mixing_
from dpjax.transforms import rounds

__all__: list[str] = []

DESIGNS = ("anti_pgd", "prefix_sum", "mafalda", "spacetime")
"""Designs whose noise is correlated over rounds."""


class Fixed:
    """A matrix as a static value, a strategy over rounds, say: equal where all its bits are.

    Args:
        matrix: Float64.
    """

    def __init__(self, matrix: np.ndarray):
        self.matrix = matrix
        self._fingerprint = mixing_.fingerprint(matrix)

    def __eq__(self, other: object) -> bool:
        """Compare the bits."""
        return isinstance(other, Fixed) and self._fingerprint == other._fingerprint

    def __hash__(self) -> int:
        """Hash the bits."""
        return hash(self._fingerprint)

    def __repr__(self) -> str:
        """The size, and enough of the fingerprint to tell two apart."""
        return f"Fixed({len(self.matrix)} rounds, {self._fingerprint[:12]})"


class JointStrategy(NamedTuple):
    """A strategy, and what goes with it over agents.

    Attributes:
        strategy: [T, T] C, lower triangular.
        covariance: [n, n] R over agents with max diag(R^-1) = 1; None is independent agents.
    """

    strategy: Float[np.ndarray, "t t"]
    covariance: Float[np.ndarray, "n n"] | None = None


def make(
    name: str,
    mixing: Float[np.ndarray, "*p n n"],
    participation: Participation,
    *,
    custom: Float[np.ndarray, "t t"] | None = None,
    bands: int | None = None,
    equal: bool = False,
) -> JointStrategy:
    """Return the strategy of a design; the last few are kept, since they serve every budget.

    Args:
        name: One of `DESIGNS`.
        mixing: [n, n] W or a schedule [P, n, n].
        participation: When a record appears.
        custom: [T, T] C to use in place of the design's.
        bands: Diagonals of "prefix_sum" or "mafalda"; None is all.
        equal: Whether the columns of these have one norm, as sampled batches ask for.

    Returns:
        The strategy and, for "spacetime", the covariance over agents.

    Raises:
        ValueError: For an unfit participation or strategy.
    """
    _validate.one_of("design", name, DESIGNS)
    # Only what a strategy depends on is part of the key.
    at = Fixed(np.asarray(mixing)) if name in ("mafalda", "spacetime") else None
    if custom is None:
        return _joint_strategy(name, at, participation, bands, equal)
    check(custom, participation.rounds)
    covariance = None
    if name == "spacetime":
        covariance = _joint_strategy(name, at, participation, None, False).covariance
    return JointStrategy(np.asarray(custom, np.float64), covariance)


@functools.lru_cache(maxsize=16)
def _joint_strategy(
    name: str,
    mixing: Fixed | None,
    participation: Participation,
    bands: int | None,
    equal: bool,
) -> JointStrategy:
    if bands is not None:
        # Sums over rounds are what one agent's models are.
        over = np.ones((1, 1)) if mixing is None else mixing.matrix
        return JointStrategy(temporal.banded(over, participation, bands, equal=equal))
    if name == "anti_pgd":
        return JointStrategy(temporal.anti_pgd(participation.rounds))
    if name == "prefix_sum":
        return JointStrategy(temporal.prefix_sum(participation))
    assert mixing is not None
    if name == "mafalda":
        return JointStrategy(temporal.mafalda(mixing.matrix, participation))
    from dpjax.mechanism import spacetime

    joint = spacetime.design(mixing.matrix, participation)
    return JointStrategy(np.asarray(joint.strategy), np.asarray(joint.covariance))


def spatial(
    mixing: Float[np.ndarray, "*p n n"],
    covariance: Float[np.ndarray, "n n"],
    precision_bound: Float[np.ndarray, "*n"],
) -> design_.Design:
    """Return the part over agents of a joint design, scaled to a budget.

    Args:
        mixing: [n, n] W or a schedule.
        covariance: [n, n] R with max diag(R^-1) = 1.
        precision_bound: b, or [n] b_i.

    Returns:
        The design of kind "spacetime"; its value is tr R, since the joint objective has no part of
        its own over agents.
    """
    roots = np.sqrt(bounds(precision_bound, len(covariance)))
    scaled = covariance / np.outer(roots, roots)
    base = design_.make("independent", mixing, precision_bound)
    value = float(np.trace(scaled))
    return dataclasses.replace(base, kind="spacetime", covariance=scaled, value=value)


def check(strategy: np.ndarray | None, rounds: int) -> None:
    """Refuse a strategy that a run of ``rounds`` rounds cannot apply.

    Args:
        strategy: [T, T] C, or None.
        rounds: T.

    Raises:
        ValueError: Unless it is float64 and `dpjax.mechanism.strategy.checked` takes it.
    """
    if strategy is not None:
        if np.asarray(strategy).dtype != np.float64:
            raise ValueError(f"strategy is {np.asarray(strategy).dtype}; give float64")
        strategy_.checked(strategy, rounds)


def sensitivity_squared(strategy: Float[np.ndarray, "t t"], participation: Participation) -> float:
    """Return the squared sensitivity of the strategy that a run applies, in float32 or float64.

    Args:
        strategy: [T, T] C.
        participation: When a record appears.

    Returns:
        The larger of the two, at clip 1.
    """
    return float(partial_energies(strategy, participation, [len(strategy)])[0])


def largest_column(strategy: Float[np.ndarray, "t t"], separation: int) -> float:
    """Return the largest norm of a column of the strategy that a run applies.

    It bounds what one draw of a record costs where coins are flipped for it in every so many
    rounds alone, and C has no more diagonals than that: see `dpjax.accounting.sampled`.

    Args:
        strategy: [T, T] C.
        separation: Rounds between two in which one record may be drawn.

    Returns:
        The larger of those in float32 and float64, with a margin.

    Raises:
        ValueError: For a strategy with more diagonals, as it is applied.
    """
    applied = _applied(strategy)
    if any(np.any(np.tril(matrix, -separation)) for matrix in applied):
        raise ValueError(
            f"strategy has more than {separation} diagonals as a run applies it, in whose rows "
            "two draws of a record meet, which no amplified loss here covers; give noise with "
            f"bands of at most {min(separation, rounds.WIDEST + 1)}, or use Cyclic"
        )
    return max(float(np.linalg.norm(one, axis=0).max()) for one in applied) * _margin(strategy)


def partial_energies(
    strategy: Float[np.ndarray, "t t"], participation: Participation, marks: Sequence[int]
) -> Float[np.ndarray, " marks"]:
    """Return the squared sensitivity of the first rounds' messages, up to each mark.

    Up to mark t these show (C G)_s + Z_s for s <= t and nothing else, so what they spend is the
    energy of C's first t rows, the largest over participation patterns.

    Args:
        strategy: [T, T] C.
        participation: When a record appears.
        marks: [M] numbers of rounds.

    Returns:
        [M] squared sensitivities, at clip 1, of the strategy as a run applies it.
    """
    applied, margin = _applied(strategy), _margin(strategy)
    largest = [
        max(temporal.sensitivity(one[:mark], participation) for one in applied) for mark in marks
    ]
    return (np.asarray(largest) * margin) ** 2


def _applied(strategy: np.ndarray) -> list[np.ndarray]:
    """The strategy as runs apply it, in float32 and in float64."""
    return [rounds.applied(strategy, kind) for kind in (np.float32, np.float64)]


def _margin(strategy: np.ndarray) -> float:
    """What inverting the coefficients may have lost."""
    return 1 + 4 * len(strategy) * strategy_.WORST * np.finfo(np.float64).eps
