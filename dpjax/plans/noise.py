"""Noise designs as parts of a config: correlated over agents, over rounds, or both.

Each part makes a covariance R over agents, a strategy C over rounds, or both; what they share
stands here once: the bound that a budget asks for, the factor that runs, and what it costs.
"""

import abc
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, PRNGKeyArray

from dpjax import _validate
from dpjax._numerics import MARGIN
from dpjax._validate import fixed
from dpjax.accounting import budget as budget_
from dpjax.accounting import discrete, finite, precision, records
from dpjax.algorithms.exchange import Server
from dpjax.mechanism import design as design_
from dpjax.mechanism import spatial
from dpjax.plans import compatibility, strategies
from dpjax.plans.calibration import Calibrated, Factored, Target
from dpjax.plans.protect import Budget
from dpjax.protocols import Privatizer
from dpjax.transforms import noise as noise_

__all__ = [
    "LABELS",
    "Aggregate",
    "AntiPgd",
    "Covariance",
    "Independent",
    "Mafalda",
    "Pairwise",
    "PrefixSum",
    "SpaceTime",
    "Whisper",
    "named",
]

_TRIES = 40


@dataclass(frozen=True)
class Correlated:
    """F (C^-1 Z)_t, with Z ~ N(0, I) for every agent and round, for every coordinate alone.

    Guarantee: after `calibrate` the noise keeps the target's budget against its attacker, if what
    it is added to is clipped as the target says: the plan audits that again.

    Example:
        >>> from dpjax.plans import noise
        >>> [part.label for part in noise.PARTS if part.temporal]
        ['anti_pgd', 'prefix_sum', 'mafalda', 'spacetime']
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
                "round; leave it out, or give noise.Covariance(matrix, name, strategy=C)"
            )
        joint = None
        if self.temporal:
            strategy, joint = self.over_rounds(target, strategy)
        bound = target.bound(strategy)
        if design is None:
            design = self.over_agents(target, bound, joint)
        else:
            _check_design(design, *self.described(target))
        design.check(target.mixing, bound)
        return Factored(_rounded(design.covariance, bound), strategy, design)

    def over_rounds(self, target: Target, strategy: np.ndarray | None) -> strategies.JointStrategy:
        """The strategy over rounds: the part's own, or the one that was given."""
        return strategies.make(
            self.label,
            target.mixing,
            target.pattern,
            custom=strategy,
            bands=getattr(self, "bands", None),
            equal=target.rates is not None,
        )

    def over_agents(
        self, target: Target, bound: Float[np.ndarray, "*n"], joint: np.ndarray | None
    ) -> design_.Design:
        """The design over agents; ``joint`` is what a strategy brings with it."""
        kind, horizon, options = self.described(target)
        return design_.make(kind, target.mixing, bound, horizon=horizon, **options)

    def described(self, target: Target) -> tuple[str, int | None, dict[str, Any]]:
        """Kind, horizon and options of the design over agents, as it is made and saved."""
        return "independent" if self.temporal else self.label, None, {}


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
        if groups is not None:
            nested = isinstance(groups, list | tuple) and len(groups)
            if not nested or not all(isinstance(group, list | tuple) for group in groups):
                raise ValueError(
                    f"subgroups is {_validate.shown(groups)}; give sequences of agents, or None"
                )
            groups = tuple(tuple(_validate.agents("subgroups", group)) for group in groups)
            object.__setattr__(self, "subgroups", groups)

    @property
    def label(self) -> str:  # type: ignore[override]
        """What records call it: "whisper" for one step, "whisper_horizon" for more."""
        return "whisper" if self.horizon is None else "whisper_horizon"

    def described(self, target: Target) -> tuple[str, int | None, dict[str, Any]]:
        """Its horizon, limit and groups, and step sizes where these differ."""
        horizon = target.rounds if self.horizon == "run" else self.horizon
        names = ("max_variance", "subgroups")
        options = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        # A horizon may lie beyond the run's rounds.
        if horizon is not None and ((steps := target.steps(horizon)) != 1).any():
            options["step_sizes"] = steps
        return self.label, horizon, options


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

    def described(self, target: Target) -> tuple[str, int | None, dict[str, Any]]:
        """A part of a joint design."""
        return self.label, None, {}


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
        """The least multiple of R that keeps the bound: its shape matters, not its scale."""
        matrix, n = self.matrix, target.agents
        shape = getattr(matrix, "shape", None)
        if matrix is None or shape != (n, n):
            raise ValueError(
                f"covariance {self.name!r} is {shape} for {n} agents; give {(n, n)}, or a design "
                "that was made of it"
            )
        if matrix.any():
            # A power of two: nothing is rounded, and squares neither vanish nor overflow.
            matrix = matrix * 2.0 ** -np.round(np.log2(float(np.max(np.abs(matrix)))))
        # Refuses a matrix that is not symmetric, or indefinite, or singular in its messages.
        diagonal = precision.inverse_diagonal(matrix)
        excess = float(np.max(diagonal / spatial.bounds(bound, n))) * (1 + 1e-12)
        scaled = (matrix + matrix.T) / 2 * excess
        kind, _, options = self.described(target)
        return dataclasses.replace(
            design_.make("independent", target.mixing, bound),
            kind=kind,
            covariance=scaled,
            value=spatial.energy(scaled, target.mixing),
            options=options,
        )

    def described(self, target: Target) -> tuple[str, int | None, dict[str, Any]]:
        """The user's name for it."""
        return "covariance", None, {"name": self.name}


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
    _validate.one_of("design", label, LABELS)
    return PARTS[LABELS.index(label) - 1]


def _check_design(
    design: design_.Design, kind: str, horizon: int | None, options: dict[str, Any]
) -> None:
    """Refuse a given design of another kind, horizon, grouping or name."""
    groups = options.get("subgroups")
    wanted = {
        "kind": (design.kind, kind),
        "horizon": (design.horizon, horizon),
        "subgroups": (design.options.get("subgroups"), groups and [*map(list, groups)]),
        "name": (design.options.get("name"), options.get("name")),
    }
    for name, (given, own) in wanted.items():
        if given != own:
            raise ValueError(
                f"design is {design.kind!r} of {name} {given!r}, the config's is {own!r}; make a "
                "design for this config"
            )


def check_one_epsilon(part: Any, budget: Budget) -> None:
    """Refuse one epsilon an agent for noise that gives all the same.

    Args:
        part: The noise.
        budget: What it may cost.

    Raises:
        ValueError: Naming both.
    """
    if budget.each is not None:
        raise ValueError(f"epsilon is {budget.epsilon} for noise {part.label!r}; give one for all")


def _rounded(
    covariance: Float[np.ndarray, "n n"], bound: Float[np.ndarray, "*n"]
) -> Float[np.ndarray, "n n"]:
    """Round a factor of a covariance to float32, keeping [R^-1]_ii <= b_i.

    The factor is the triangular one: where noise cancels, its small pivots keep all their digits,
    and those of R^-1 follow. A symmetric factor writes the same small numbers as differences of
    large ones, whose rounding costs noise in proportion to the square root of R's condition number.

    Guarantee: with R = F F' of the float32 F that is returned, no [R^-1]_ii exceeds b_i, rounding
    included; R gains a few 1e-7 of itself, unless it is all but singular in float32.

    Args:
        covariance: [n, n] symmetric positive definite R, in the squared units of the noise.
        bound: b, or [n] b_i.

    Returns:
        [n, n] lower triangular float32 F.

    Raises:
        ValueError: For a covariance that is singular in float32.
    """
    try:
        exact = np.linalg.cholesky(covariance)
        scale = 1.0
        for attempt in range(_TRIES):
            with np.errstate(over="ignore"):
                factor = (exact * scale).astype(np.float32)
            diagonal = precision.inverse_diagonal(factor=factor.astype(np.float64))
            excess = float(np.max(diagonal / bound))
            # The margin covers the rounding between this and the accountant's own steps.
            if excess <= 1 - 1e-12:
                return factor
            # Steps that grow: each rounding moves the excess anew, by an amount that does not.
            scale *= np.sqrt(excess) * (1 + 2.0 ** (attempt - 25))
    except (np.linalg.LinAlgError, ValueError):
        pass
    raise ValueError(
        f"design.covariance has condition number {np.linalg.cond(covariance):.1e} and entries up "
        f"to {np.max(np.abs(covariance)):.1e}, too far apart for float32 noise; take "
        "noise.Whisper(max_variance=20), which bounds the noise's variance, or rescale the loss"
    )


class InShares:
    """Noise of which every agent adds a share, for sums whose parts nobody sees."""

    dropouts: int
    colluders: int
    sum_only: ClassVar[bool] = True
    """Its loss is of sums alone: see `dpjax.accounting.guarantee.Guarantee`."""

    def __post_init__(self) -> None:
        """Refuse what is no number of agents."""
        for name in ("dropouts", "colluders"):
            value = _validate.integer(name, getattr(self, name), least=0, most=2**31 - 2)
            object.__setattr__(self, name, value)

    def cohort(self, agents: int) -> discrete.Cohort:
        """The agents of a round.

        Args:
            agents: Number of agents n.

        Raises:
            ValueError: Where none is left to hide the others.
        """
        return discrete.Cohort(agents, self.dropouts, self.colluders)

    def check_sums(self, target: Target) -> None:
        """Refuse an exchange that shows single messages, or opens sums of too few.

        Args:
            target: What the noise is for.

        Raises:
            ValueError: Naming the exchange and the remedy.
        """
        exchange = getattr(target.method, "exchange", None)
        if not isinstance(exchange, Server) or not exchange.aggregate.sum_only:
            raise ValueError(
                f"method has exchange {exchange}, which shows single messages, with noise {self}, "
                "of which each has a share; give an aggregate that shows the sum alone, or "
                "noise.Independent() and attacker='outsider'"
            )
        agents, survivors = target.agents, max(exchange.aggregate.min_survivors(target.agents), 0)
        if survivors < agents - self.dropouts:
            remedy = f"dropouts={agents - survivors}, or " if survivors else ""
            raise ValueError(
                f"aggregate opens sums of {survivors} of {agents} agents with noise {self}; give "
                f"{remedy}an aggregate that aborts earlier"
            )


class ScaledNoise(abc.ABC):
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

    def calibrate(self, target: Target) -> "CalibratedScale":
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
        noise = CalibratedScale(self, scale, self.source(target))
        while (noise.loss(target).epsilon > np.asarray(budget.epsilon)).any():
            more = np.nextafter(noise.scale, np.float32(np.inf))
            noise = CalibratedScale(self, more, noise.source)
        return noise


@dataclass(frozen=True, eq=False)
class CalibratedScale(Calibrated):
    """A shape of noise at the scale that keeps a budget.

    Guarantee: `loss` is that of the target's attacker and gradients, with what float32 rounds.

    Attributes:
        part: The design.
        scale: Float32 factor of all noise.
        source: [n, q] as `ScaledNoise.source`, at scale 1.
    """

    part: ScaledNoise
    scale: np.float32
    source: Float[np.ndarray, "n q"]

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

    def check(self, target: Target) -> None:
        """Refuse a scale that float32 noise cannot have, and what the design does not join.

        Raises:
            ValueError: For a scale below 1e-30 or above 1e30, another method or attacker.
        """
        compatibility.check_noise(self.part, target.method, target.protect)
        _validate.spread("scale", float(self.scale))

    def loss(self, target: Target) -> budget_.AgentLoss:
        """What every agent loses to the target's attacker; attackers lose nothing to themselves."""
        return target.budget.spent(self.part.unit(target) / float(self.scale))

    def privatizer(self, target: Target, grid: finite.Grid | None) -> Privatizer:
        """How it is drawn."""
        return self.part.drawn(target)


@dataclass(frozen=True)
class Aggregate(ScaledNoise, InShares):
    """Gaussian noise in shares: every agent adds its own, and the sum has what privacy asks for.

    Guarantee: of n agents at most ``dropouts`` are missing from a sum that is opened (the method's
    aggregate aborts below n - dropouts, before anything is seen), and at most ``colluders`` of
    those who are in it show their messages to the aggregator. Then the shares of the others,
    n - dropouts - colluders at least, are unknown to it. Each has deviation a, so that with
    sensitivity s (C, or 2 C where data are replaced) a unit that takes part in k rounds loses
    mu = s sqrt(k / (n - dropouts - colluders)) / a to an "aggregator", who receives the sum of
    every round and no single message, whatever gradients depend on. To an "outsider", who reads all
    links, it loses no more, and the same is stated: single messages go masked over these, which is
    what a sum-only aggregate promises: this one sees the sums that are opened and no shares.
    Exact arithmetic; real noise, in simulations. A round whose sum may have been opened counts,
    finished or not.

    Attributes:
        dropouts: Agents that may be missing from a sum, at most.
        colluders: Agents that may show the aggregator what they know, at most.

    Reference:
        DOME, Algorithm 1, a^2 = N E sigma^2 C^2 / B, which leaves the shares of missing clients out
        of the sum; here they are made up for beforehand.

    Example:
        >>> from dpjax.plans.noise import Aggregate
        >>> Aggregate(dropouts=5).label
        'aggregate'
    """

    dropouts: int = 0
    colluders: int = 0

    label, secrets = "aggregate", "shares"

    def unit(self, target: Target) -> Float[np.ndarray, " n"]:
        """Loss mu of every agent at a deviation of 1."""
        self.check_sums(target)
        rounds = target.over_rounds(None)
        root = math.sqrt(rounds / self.cohort(target.agents).honest)
        return np.full(target.agents, target.protect.sensitivity * root * MARGIN)

    def source(self, target: Target) -> Float[np.ndarray, "n n"]:
        """Every agent's own normals."""
        return np.eye(target.agents)

    def drawn(self, target: Target) -> "AggregatePrivatizer":
        """Independent normals."""
        return AggregatePrivatizer(target.rounds, target.agents)


@dataclass(frozen=True)
class AggregatePrivatizer(Privatizer):
    """How `Aggregate` is drawn; see `dpjax.transforms.noise.correlated`.

    Attributes:
        rounds: Rounds that the noise is accounted for.
        agents: n.
    """

    rounds: int
    agents: int

    def transformation(self, arrays: Any, key: PRNGKeyArray) -> optax.GradientTransformation:
        """The noise of one plan; ``arrays["noise_scale"]`` is its deviation."""
        deviations = jnp.full(self.agents, 1.0, jnp.float32) * arrays["noise_scale"]
        return noise_.correlated(deviations, key=key, rounds=self.rounds)
