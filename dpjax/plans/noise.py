"""Noise designs as parts of a config: correlated over agents, over rounds, or both.

Each part makes a covariance R over agents, a strategy C over rounds, or both; what they share
stands here once: the bound that a budget asks for, the factor that runs, and what it costs.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float

from dpjax import _validate
from dpjax._validate import fixed
from dpjax.mechanism import design as design_
from dpjax.plans import factor as factor_
from dpjax.plans import own, strategies
from dpjax.plans.calibration import Factored, Target

__all__ = [
    "LABELS",
    "PARTS",
    "AntiPgd",
    "Correlated",
    "Covariance",
    "Independent",
    "Mafalda",
    "Pairwise",
    "PrefixSum",
    "SpaceTime",
    "Whisper",
    "named",
]


@dataclass(frozen=True)
class Correlated:
    """F (C^-1 Z)_t, with Z ~ N(0, I) for every agent and round, for every coordinate alone.

    Guarantee: after `calibrate` the noise keeps the target's budget against its attacker, if what
    it is added to is clipped as the target says: the plan audits that again.
    """

    label = ""
    """What records, figures and plans call the design."""
    temporal: ClassVar[bool] = False
    """Whether it has a strategy over rounds."""

    def calibrate(
        self,
        target: Target,
        *,
        design: design_.Design | None = None,
        strategy: np.ndarray | None = None,
    ) -> Factored:
        """Make the noise for a budget on a network.

        Args:
            target: What it is for.
            design: A design over agents made earlier for the same target; made here when None.
            strategy: [T, T] C made earlier, in place of the part's own.

        Returns:
            The noise.

        Raises:
            ValueError: For a design or strategy of something else, or noise that float32 cannot
                hold.
        """
        if strategy is not None and not self.temporal:
            raise ValueError(
                f"strategy is given for design {self.label!r}, whose noise is fresh in every "
                f"round; leave it out, choose one of {', '.join(strategies.DESIGNS)}, or give "
                "noise.Covariance(matrix, name, strategy=C), which keeps its name"
            )
        joint = None
        if self.temporal:
            strategy, joint = self.over_rounds(target, strategy)
        bound = target.bound(strategy)
        if design is None:
            design = self.over_agents(target, bound, joint)
        else:
            self.check(design, target)
        design.check(target.mixing, bound)
        return Factored(factor_.rounded(design.covariance, bound), strategy, design)

    def over_rounds(self, target: Target, strategy: np.ndarray | None) -> strategies.JointStrategy:
        """The strategy over rounds: the part's own, or the one that was given."""
        return strategies.make(
            self.label,
            target.mixing,
            target.pattern,
            own=strategy,
            bands=getattr(self, "bands", None),
            equal=target.rates is not None,
        )

    def over_agents(
        self, target: Target, bound: Float[np.ndarray, "*n"], joint: np.ndarray | None
    ) -> design_.Design:
        """The design over agents; ``joint`` is what a strategy brings with it."""
        kind = "independent" if self.temporal else self.label
        return design_.make(kind, target.mixing, bound)

    def check(self, design: design_.Design, target: Target) -> None:
        """Refuse a given design of another kind."""
        kind = "independent" if self.temporal else self.label
        if design.kind != kind or design.horizon is not None:
            raise ValueError(
                f"design is {design.kind!r} with horizon {design.horizon}, the config asks for "
                f"{kind!r} with horizon None; make a design for this config"
            )
        if design.options.get("subgroups") is not None:
            raise ValueError(
                f"design has subgroups {design.options['subgroups']}, the config None; make a "
                "design for this config"
            )


class Independent(Correlated):
    """Noise of its own at every agent: LDP.

    Example:
        >>> from dpjax.plans import noise
        >>> noise.Independent().label
        'independent'
    """

    label = "independent"


class Pairwise(Correlated):
    """Noise that cancels over links: DECOR, with one seed for all agents.

    Example:
        >>> from dpjax.plans import noise
        >>> noise.Pairwise().label
        'pairwise'
    """

    label = "pairwise"


@dataclass(frozen=True)
class Whisper(Correlated):
    """Noise optimised for the network, for one step or for a whole run.

    Attributes:
        horizon: None looks one step ahead, as the paper does; "run" over all rounds; or a number.
        max_variance: Largest variance of the noise, in units of independent noise's, above 1; None
            is no limit. Noise that cancels must first be sent.
        subgroups: Agents that share a seed, each agent in one group; None is one group of all.
            Members of other groups are outsiders to a group's noise, provided that each group
            draws its own; a run here is one process, whose one key draws all.

    Example:
        >>> from dpjax.plans import noise
        >>> noise.Whisper().label, noise.Whisper("run").label
        ('whisper', 'whisper_horizon')
    """

    horizon: int | Literal["run"] | None = None
    max_variance: float | None = None
    subgroups: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        """Refuse what is no horizon, limit or grouping, and keep plain numbers."""
        whole = isinstance(self.horizon, str) and self.horizon == "run"
        if self.horizon is not None and not whole:
            remedy = f'give "run", None for one step, or a whole number from 1 to {2**31 - 2}'
            horizon = _validate.integer("horizon", self.horizon, most=2**31 - 2, remedy=remedy)
            object.__setattr__(self, "horizon", horizon)
        if self.max_variance is not None:
            ratio = _validate.number("max_variance", self.max_variance)
            object.__setattr__(self, "max_variance", ratio)
        groups: Any = self.subgroups
        if groups is None:
            return
        listed = isinstance(groups, list | tuple) and len(groups)
        if not listed or not all(isinstance(group, list | tuple) for group in groups):
            raise ValueError(
                f"subgroups is {_validate.shown(groups)}; give a sequence of sequences of agents, "
                "or None"
            )
        plain = tuple(tuple(_validate.agents("subgroups", group)) for group in groups)
        object.__setattr__(self, "subgroups", plain)

    @property
    def label(self) -> str:  # type: ignore[override]
        """What records call it: "whisper" for one step, "whisper_horizon" for more."""
        return "whisper" if self.horizon is None else "whisper_horizon"

    def _horizon(self, target: Target) -> int | None:
        return target.rounds if self.horizon == "run" else self.horizon

    def over_agents(
        self, target: Target, bound: Float[np.ndarray, "*n"], joint: np.ndarray | None
    ) -> design_.Design:
        """The design over agents."""
        options: dict[str, Any] = {}
        if self.max_variance is not None:
            options["max_variance"] = self.max_variance
        if self.subgroups is not None:
            options["subgroups"] = self.subgroups
        horizon = self._horizon(target)
        # A horizon may lie beyond the run's rounds.
        if horizon is not None and ((steps := target.steps(horizon)) != 1).any():
            options["step_sizes"] = steps
        return design_.make(self.label, target.mixing, bound, horizon=horizon, **options)

    def check(self, design: design_.Design, target: Target) -> None:
        """Refuse a given design of another kind, horizon or grouping."""
        horizon = self._horizon(target)
        if design.kind != self.label or design.horizon != horizon:
            raise ValueError(
                f"design is {design.kind!r} with horizon {design.horizon}, the config asks for "
                f"{self.label!r} with horizon {horizon}; make a design for this config"
            )
        groups = None if self.subgroups is None else [list(group) for group in self.subgroups]
        if design.options.get("subgroups") != groups:
            raise ValueError(
                f"design has subgroups {design.options.get('subgroups')}, the config {groups}; "
                "make a design for this config"
            )


class AntiPgd(Correlated):
    """Noise of which the next round takes most away, at each agent alone.

    Example:
        >>> from dpjax.plans import noise
        >>> noise.AntiPgd().label
        'anti_pgd'
    """

    label, temporal = "anti_pgd", True


@dataclass(frozen=True)
class _Banded(Correlated):
    """What `PrefixSum` and `Mafalda` share: strategies of all diagonals, or of a few.

    Attributes:
        bands: Diagonals of the strategy, at most the rounds from one time that a record takes part
            to the next; a run then keeps that many noise arrays less one, in place of one a round.
            None is the optimum over all strategies. Beyond some hundred rounds its search takes
            minutes: ``plan.make(..., strategy=temporal.toeplitz(W, participation, bands))`` is
            nearly as good.
    """

    bands: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no number of diagonals."""
        if self.bands is not None:
            object.__setattr__(self, "bands", _validate.integer("bands", self.bands))


@dataclass(frozen=True)
class PrefixSum(_Banded):
    """Noise optimised for the sums of gradients over rounds: D-MF.

    With one agent and ``bands`` it is banded matrix factorization (Choquette-Choo et al. 2023).

    Example:
        >>> from dpjax.plans import noise
        >>> noise.PrefixSum(bands=4)
        PrefixSum(bands=4)
    """

    label, temporal = "prefix_sum", True


@dataclass(frozen=True)
class Mafalda(_Banded):
    """Noise over rounds optimised for what the network makes of it.

    Example:
        >>> from dpjax.plans import noise
        >>> noise.Mafalda().label
        'mafalda'
    """

    label, temporal = "mafalda", True


class SpaceTime(Correlated):
    """Noise optimised over agents and rounds in turn.

    Example:
        >>> from dpjax.plans import noise
        >>> noise.SpaceTime().label
        'spacetime'
    """

    label, temporal = "spacetime", True

    def over_agents(
        self, target: Target, bound: Float[np.ndarray, "*n"], joint: np.ndarray | None
    ) -> design_.Design:
        """The part over agents, made with the strategy."""
        assert joint is not None
        return strategies.spatial(target.mixing, joint, bound)

    def check(self, design: design_.Design, target: Target) -> None:
        """Refuse a given design of another kind."""
        if design.kind != self.label:
            raise ValueError(
                f"design is {design.kind!r}, the config asks for {self.label!r}; make a design "
                "for this config"
            )


@dataclass(frozen=True, eq=False)
class Covariance(Correlated):
    """A covariance over agents of your own, scaled until it keeps the budget.

    With a strategy of your own, the noise is correlated over rounds, too. For one over rounds
    alone give it beside the identity.

    Attributes:
        matrix: [n, n] R, symmetric positive definite, at any scale; None where a design that was
            made of it is given to the plan.
        name: What records and figures call it; no other design's name.
        strategy: [T, T] float64 C over rounds, lower triangular, at any scale; None is noise that
            is fresh in every round.

    Example:
        >>> import numpy as np
        >>> from dpjax.plans import noise
        >>> noise.Covariance(np.array([[2.0, 1.0], [1.0, 2.0]]), name="mine").label
        'mine'
    """

    matrix: Float[np.ndarray, "n n"] | None
    name: str
    strategy: Float[np.ndarray, "t t"] | None = None

    def __post_init__(self) -> None:
        """Refuse a name that would pass for another design; keep a copy of the matrix."""
        name: Any = self.name
        plain = isinstance(name, str) and name.isprintable() and name == name.strip()
        taken = ("covariance", "central", *LABELS)
        if not plain or not 1 <= len(name) <= 60 or name in taken:
            raise ValueError(
                f"name is {_validate.shown(name)} for a covariance of your own; give a name of "
                "up to 60 characters that no other design has, for records and figures"
            )
        if self.matrix is not None:
            matrix = _validate.square("covariance", self.matrix)
            object.__setattr__(self, "matrix", fixed(matrix))
        if self.strategy is not None:
            strategy = _validate.square("strategy", self.strategy)
            strategies.check(strategy, len(strategy))
            object.__setattr__(self, "strategy", fixed(strategy))

    @property
    def label(self) -> str:  # type: ignore[override]
        """The user's name for it."""
        return self.name

    @property
    def temporal(self) -> bool:  # type: ignore[override]
        """Whether it has a strategy over rounds."""
        return self.strategy is not None

    def over_rounds(self, target: Target, strategy: np.ndarray | None) -> strategies.JointStrategy:
        """The user's strategy."""
        if strategy is not None:
            raise ValueError(
                f"strategy is given beside that of the covariance {self.name!r}; give one of them"
            )
        assert self.strategy is not None
        strategies.check(self.strategy, target.rounds)
        return strategies.JointStrategy(self.strategy)

    def over_agents(
        self, target: Target, bound: Float[np.ndarray, "*n"], joint: np.ndarray | None
    ) -> design_.Design:
        """The design, scaled to the bound."""
        if self.matrix is None:
            raise ValueError(
                f"matrix is None for the covariance {self.name!r}; give it, or a design made of it"
            )
        return own.design(self.matrix, target.mixing, bound, self.name)

    def check(self, design: design_.Design, target: Target) -> None:
        """Refuse a design of another covariance."""
        if design.kind != own.KIND or design.options.get("name") != self.name:
            raise ValueError(
                f"design is {design.kind!r} of the covariance {design.options.get('name')!r}, the "
                f"config's is {self.name!r}; give the config that name"
            )


PARTS: tuple[Correlated, ...] = (
    Independent(), Pairwise(), Whisper(), Whisper("run"), AntiPgd(), PrefixSum(), Mafalda(),
    SpaceTime(),
)  # fmt: skip
"""Every design that needs no matrix of the user's, with its defaults."""

LABELS = ("non_private", *(part.label for part in PARTS))
"""What records call these, and a run without noise."""


def named(label: str | None) -> Correlated | None:
    """Return the design that records call so, with its defaults; None for "non_private".

    Args:
        label: One of `LABELS`.

    Raises:
        ValueError: For another name.

    Example:
        >>> from dpjax.plans import noise
        >>> noise.named("whisper_horizon")
        Whisper(horizon='run', max_variance=None, subgroups=None)
    """
    if label is None or label == "non_private":
        return None
    if label == "central":
        raise ValueError(
            "design is 'central', the trusted-server reference, whose covariance is singular: "
            f"outsiders are not defended against; choose one of {', '.join(LABELS)}"
        )
    _validate.one_of("design", label, LABELS)
    return PARTS[LABELS.index(label) - 1]
