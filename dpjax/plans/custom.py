"""The loss that a custom noise design states, against its own map of normals to noise.

A custom design is its author's word, but for this: nobody loses less than an outsider who sees all
noisy sums, and what that one gains follows from the factor alone.
"""

from typing import Any

import numpy as np

from dpjax.accounting import precision
from dpjax.accounting.budget import AgentLoss
from dpjax.accounting.loss import AmplifiedLoss, Loss
from dpjax.plans import compatibility

__all__ = ()


def check_stated_loss(target: Any, noise: Any, loss: Loss, spent: AgentLoss) -> None:
    """Refuse a loss that a custom design states below an outsider's to its own factor F.

    An outsider who sees all noisy sums gains mu_i = s sqrt(k [(F F')^-1]_ii) of agent i, and any
    attacker under gradients "any" as much of those who are not its own. Whoever sees the sum over
    agents alone gains s sqrt(k / 1' F F' 1).

    Args:
        target: The config on its network.
        noise: Noise of a user's own class, or of a design of a user's own.
        loss: What it states.
        spent: The same of every agent.

    Raises:
        ValueError: Naming the design, the agent, both losses and the formula.
    """
    part = target.config.noise
    protect = target.protect
    factor = noise.factor
    strategy = noise.strategy
    if strategy is not None and noise.white(target):
        raise ValueError(
            f"noise is {type(noise).__name__}, whose white() is True beside a strategy: what t "
            "rounds of correlated noise spend is no share t / T; return strategy is None"
        )
    # Under "view" an attacker gains less, and noise without one map has no formula.
    if protect.gradients == "view" or factor is None:
        return
    moved = protect.sensitivity
    if isinstance(loss, AmplifiedLoss):
        stated = np.asarray(loss.draw_ratios)
        moved *= target.single_draw_sensitivity(strategy)
    elif spent.kind == "gdp":
        stated = spent.size
        moved *= np.sqrt(target.over_rounds(strategy))
    else:
        return
    sum_only = getattr(part, "sum_only", False) or protect.attacker == "aggregator"
    deviations = np.broadcast_to(_deviations(factor, sum_only), target.agents)
    covered = stated * deviations
    # Attackers lose nothing to themselves.
    covered[list(protect.nodes or ())] = np.inf
    worst = int(np.argmin(covered))
    if covered[worst] >= moved:
        return
    design = type(noise if compatibility.packaged(type(part)) else part).__name__
    formula = "s sqrt(k / 1' F F' 1)" if sum_only else "s sqrt(k [(F F')^-1]_ii)"
    mu = np.broadcast_to(stated, target.agents)[worst]
    raise ValueError(
        f"noise is {design}, which states mu {mu:.4g} for agent {worst}. By its own "
        f"factor F an outsider gains {moved / deviations[worst]:.4g}: state at least {formula}, "
        "s = target.protect.sensitivity (twice the clip norm where data are replaced) and "
        "k = target.over_rounds(strategy), its strategy or None"
    )


def _deviations(factor: np.ndarray, sum_only: bool) -> np.ndarray:
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
    wide = factor.astype(np.float64)
    if sum_only:
        matrix = np.diag(wide) if wide.ndim == 1 else wide
        lost = np.linalg.norm(np.abs(matrix).sum(axis=0))
        return np.asarray(np.linalg.norm(matrix.sum(axis=0)) + rounding * lost)
    if wide.ndim == 1:
        return np.abs(wide) * (1 + rounding)
    # Refuses a singular one: its weights would be rounding alone.
    precision.inverse_diagonal(wide @ wide.T)
    sizes = np.linalg.norm(wide, axis=1)
    scaled = wide / sizes[:, None]
    # Agents of other sizes are scaled alike, so that no weight of a small one is lost.
    inverse = np.linalg.inv(scaled @ scaled.T)
    weights = inverse / np.diag(inverse)[:, None]
    deviations = np.linalg.norm(weights @ scaled, axis=1)
    lost = np.linalg.norm(np.abs(weights) @ np.abs(scaled), axis=1)
    return sizes * (deviations + rounding * lost)
