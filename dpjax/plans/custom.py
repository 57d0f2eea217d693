"""The loss that a custom noise design states, against its own map of normals to noise.

A custom design is its author's word, but for this: nobody loses less than an outsider who sees all
noisy sums, and what that one gains follows from the factor alone.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from dpjax.accounting import precision

__all__: list[str] = []


def refuse_understated(
    design: str,
    factor: Float[np.ndarray, "n q"] | Float[np.ndarray, " n"],
    stated: Float[np.ndarray, " n"],
    moved: float,
    attackers: Sequence[int],
    *,
    sum_only: bool,
) -> None:
    """Refuse a loss below an outsider's to a factor F.

    Args:
        design: Name of the class that states it.
        factor: [n, q] F, or a diagonal [n].
        stated: [n] mu.
        moved: How far all rounds' messages move, at noise 1.
        attackers: Agents of whom nothing is to hide.
        sum_only: Whether attackers see the sum over agents alone.

    Raises:
        ValueError: Naming the design, the agent, both losses and the formula.
    """
    deviations = np.broadcast_to(_deviations(factor, sum_only), stated.shape)
    covered = stated * deviations
    covered[attackers] = np.inf
    worst = int(np.argmin(covered))
    if covered[worst] >= moved:
        return
    formula = "s sqrt(k / 1' F F' 1)" if sum_only else "s sqrt(k [(F F')^-1]_ii)"
    raise ValueError(
        f"noise is {design}, which states mu {stated[worst]:.4g} for agent {worst}. By its own "
        f"factor F an outsider gains {moved / deviations[worst]:.4g}: state at least {formula}, "
        "s = target.protect.sensitivity (twice the clip norm where data are replaced) and "
        "k = target.over_rounds(strategy), its strategy or None"
    )


def _deviations(factor: np.ndarray, sum_only: bool) -> Float[np.ndarray, " n"]:
    """Upper bounds on the deviations of noise in what an outsider sees of agents.

    Of agent i that is message i less what the others' messages say of its noise, -P_ij / P_ii of
    message j, with P = (F F')^-1: their deviation is 1 / sqrt(P_ii). Any other combination bounds
    it, too. A factor of tables is rounded to float32, by its entries, which counts by agent. Of the
    sum over agents it is one number.

    Args:
        factor: [n, q] F, or a diagonal [n].
        sum_only: Whether it sees the sum over agents alone.

    Raises:
        ValueError: For noise that some combination of the messages has (almost) none of.
    """
    rounding = np.finfo(np.float32).eps
    if factor.ndim == 1 and not sum_only:
        return np.abs(factor.astype(np.float64)) * (1 + rounding)
    scaled = np.diag(factor) if factor.ndim == 1 else factor
    scaled = scaled.astype(np.float64)
    sizes = np.ones(1)
    weights = np.ones((1, len(scaled)))
    if not sum_only:
        # Refuses a singular one: its weights would be rounding alone.
        precision.inverse_diagonal(scaled @ scaled.T)
        sizes = np.linalg.norm(scaled, axis=1)
        scaled /= sizes[:, None]
        inverse = np.linalg.inv(scaled @ scaled.T)
        weights = inverse / np.diag(inverse)[:, None]
    deviations = np.linalg.norm(weights @ scaled, axis=1)
    lost = np.linalg.norm(np.abs(weights) @ np.abs(scaled), axis=1)
    return sizes * (deviations + rounding * lost)
