"""Noise designs that are one shape of noise times one scale, which a budget decides."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from dpjax import _validate
from dpjax._validate import fixed
from dpjax.accounting import budget as budget_
from dpjax.accounting import finite, records
from dpjax.mechanism import design as design_
from dpjax.plans import compatibility
from dpjax.plans.calibration import Target
from dpjax.protocols import Privatizer

__all__: list[str] = []


class Shaped(abc.ABC):
    """A noise design that is one shape times one scale."""

    label = ""
    """What records, figures and plans call the design."""
    secrets: ClassVar[records.Secrets | None] = None
    """As `dpjax.plans.calibration.Calibrated.secrets`."""

    @abc.abstractmethod
    def unit(self, target: Target) -> Float[np.ndarray, " n"]:
        """Loss mu of every agent at scale 1, an upper bound; 0 for attackers."""

    @abc.abstractmethod
    def source(self, target: Target) -> Float[np.ndarray, "n q"]:
        """Map of a round's normals to the agents' sums at scale 1, in units of what is clipped."""

    @abc.abstractmethod
    def drawn(self, target: Target) -> Privatizer:
        """How it is drawn, from ``arrays["noise_scale"]``."""

    def calibrate(self, target: Target) -> "Scaled":
        """Make the noise for a budget on a network.

        Args:
            target: What it is for.

        Returns:
            The noise, of the least float32 scale at which every agent's loss is within its budget.

        Raises:
            ValueError: For an attacker to whom some agent's loss is
                infinite at every scale.
        """
        unit, budget = self.unit(target), target.budget
        worst = int(np.argmax(unit))
        if not np.isfinite(unit[worst]):
            raise ValueError(
                f"noise is {self}, under which agent {worst} has a neighbour or a coalition that "
                "sees its gradients without noise, at any scale; give ZeroSum(over="
                "'with_own_copy'), another attacker, or a network with more links"
            )
        largest = float(np.max(unit / budget.allowed_mu()))
        scale = np.float32(_validate.spread("scale", largest))
        allowed = np.broadcast_to(budget.epsilon, unit.shape)
        scaled = Scaled(self, scale, self.source(target))
        while (scaled.loss(target).epsilon > allowed).any():
            scaled = Scaled(self, np.nextafter(scaled.scale, np.float32(np.inf)), scaled.source)
        return scaled


@dataclass(frozen=True, eq=False)
class Scaled:
    """A shape of noise at the scale that keeps a budget.

    Guarantee: `loss` is that of the target's attacker and gradients, with what float32 rounds.

    Attributes:
        part: The design.
        scale: Float32 factor of all noise.
        source: [n, q] as `Shaped.source`, at scale 1.
    """

    part: Shaped
    scale: np.float32
    source: Float[np.ndarray, "n q"]

    strategy: ClassVar[None] = None
    design: ClassVar[design_.Design | None] = None

    @property
    def secrets(self) -> records.Secrets | None:
        """The design's."""
        return self.part.secrets

    @property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """The scale."""
        return {"noise_scale": np.asarray(self.scale)}

    @property
    def factor(self) -> Float[np.ndarray, "n q"]:
        """Map of a round's fresh normals to the agents' noisy sums."""
        return (float(self.scale) * self.source).astype(np.float32)

    def white(self, target: Target) -> bool:
        """Not under "view": what a round costs there depends on how many follow."""
        return target.protect.gradients == "any"

    def frozen(self) -> "Scaled":
        """The same on a copy that nobody can change afterwards."""
        return Scaled(self.part, np.float32(self.scale), fixed(self.source))

    def check(self, target: Target) -> None:
        """Refuse a scale that float32 noise cannot have, and what the design does not join.

        Raises:
            ValueError: For a scale below 1e-30 or above 1e30, another method or attacker.
        """
        compatibility.check_noise(self.part, target.method, target.protect)
        _validate.spread("scale", float(self.scale))

    def loss(self, target: Target) -> budget_.CovarianceLoss:
        """What every agent loses to the target's attacker; attackers lose nothing to themselves."""
        mu = self.part.unit(target) / float(self.scale)
        squared = target.protect.sensitivity**2 * target.over_rounds(None)
        return target.budget.spent(mu, mu**2 / squared)

    def grid(self, target: Target) -> finite.Grid:
        """Refused: its releases are many processes, each with keys of its own.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"release is True with noise {self.part.label!r}; a run in one process holds all"
        )

    def privatizer(self, target: Target, grid: finite.Grid | None) -> Privatizer:
        """How it is drawn."""
        return self.part.drawn(target)
