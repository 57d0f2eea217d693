"""The noise multiplier that a budget needs against insiders, and who asks for the most."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpjax import _validate
from dpjax.accounting import gdp
from dpjax.accounting.attacker import Gradients
from dpjax.commands import victims

__all__ = ["Multiplier", "least_multiplier"]


class Multiplier(NamedTuple):
    """The least noise that keeps every victim within a budget.

    Attributes:
        sigma: Noise multiplier, rounded up.
        mu: Gaussian-DP parameter that the budget allows.
        attackers: The worst attackers.
        victim: Their worst victim.
        ties: How many (attackers, victim) pairs come within a relative 1e-6 of these.
        upper_bound: True where the worst loss is that of a strictly larger view.
        ldp: Multiplier that the same algorithm needs against an eavesdropper of every message.
        independent: Multiplier that fresh independent noise needs against it.
    """

    sigma: float
    mu: float
    attackers: tuple[int, ...]
    victim: int
    ties: int
    upper_bound: bool
    ldp: float
    independent: float


def least_multiplier(
    setting: victims.Setting,
    attackers: Sequence[Sequence[int]],
    *,
    epsilon: float,
    delta: float,
    gradients: Gradients = "any",
) -> Multiplier:
    """The noise multiplier at which every victim keeps a budget against each set of attackers.

    mu falls as 1 / sigma, so sigma is the worst loss at noise 1 over the mu of the budget.

    Guarantee: with noise of this multiplier, as `victims.NOISE` says, every agent outside a set of
    attackers is (epsilon, delta)-DP against that set, for the setting's relation and
    participation; with ``gradients="view"`` only under its assumption.

    Args:
        setting: The algorithm and what is protected.
        attackers: Sets of colluding nodes, each on its own.
        epsilon: Epsilon > 0.
        delta: Delta.
        gradients: "any" or "view".

    Returns:
        The multiplier, the worst attackers and their worst victim.

    Raises:
        ValueError: Where the loss is infinite whatever the noise.
    """
    epsilon, delta = _validate.positive("epsilon", epsilon), _validate.probability("delta", delta)
    mu, shift = float(gdp.mu(epsilon, delta)), setting.unit_shift
    algorithm = setting.make()
    seen = [victims.view(algorithm, "pndp", each) for each in attackers]
    stated_losses = victims.stated_losses(seen, setting.participation, gradients)
    losses = np.nan_to_num(np.array([each.mu for each in stated_losses]), nan=-1.0, posinf=np.inf)
    where, victim = np.unravel_index(np.argmax(losses), losses.shape)
    worst = float(losses[where, victim])
    if not np.isfinite(worst):
        remedy = "take another algorithm" + ("" if gradients == "view" else ", or gradients 'view'")
        raise ValueError(
            f"gradients is {gradients!r}: the loss of the agent at index {victim} to those at "
            f"{seen[where].attackers} is infinite under {setting.algorithm}, whatever the noise; "
            f"{remedy}"
        )

    def multiplier(loss: float) -> float:
        sigma = loss * shift / mu * (1 + 1e-12) if np.isfinite(loss) else float("inf")
        while np.isfinite(sigma) and float(gdp.epsilon(loss * shift / sigma, delta)) > epsilon:
            sigma *= 1 + 1e-10
        return sigma

    (outside,) = victims.stated_losses([algorithm.ldp()], setting.participation, "any")
    return Multiplier(
        multiplier(worst),
        mu,
        seen[where].attackers,
        int(victim),
        int((losses >= worst * (1 - 1e-6)).sum()),
        bool(stated_losses[where].upper_bound[victim]),
        multiplier(float(outside.mu.max())),
        multiplier(float(np.sqrt(setting.participation.epochs)) * (1 + victims.ROUNDING)),
    )
