"""Noise designs as parts of a config, all by name, ``dpjax.noise``, and those that are correlated.

Each part makes a covariance R over agents, a strategy C over rounds, or both; what they share
stands here once: the bound that a budget asks for, the factor that runs, and what it costs.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float

from dpjax import _validate
from dpjax._validate import fixed
from dpjax.accounting import precision
from dpjax.mechanism import banded, spatial, temporal
from dpjax.mechanism import design as design_
from dpjax.mechanism.participation import Participation
from dpjax.mechanism.strategy import Strategy
from dpjax.plans.calibration import Factored, Target, check_strategy
from dpjax.plans.integers import Discrete
from dpjax.plans.links import PairKeys, SumShares, ZeroSum
from dpjax.plans.polynomial import Polynomial
from dpjax.plans.scheduled import ScheduledGaussian, ScheduledLaplace
from dpjax.topology.mixing import HashableMatrix

__all__ = [
    "LABELS",
    "AntiPgd",
    "BandedInverse",
    "Covariance",
    "Discrete",
    "Independent",
    "Mafalda",
    "OneStep",
    "PairKeys",
    "Pairwise",
    "Polynomial",
    "PrefixSum",
    "ScheduledGaussian",
    "ScheduledLaplace",
    "SpaceTime",
    "SumShares",
    "Whisper",
    "ZeroSum",
    "named",
]

# Names that stay fixed.
Aggregate = SumShares
Laplace = ScheduledLaplace

_TRIES = 40
_OF_NETWORK = ("mafalda", "spacetime")
"""Designs whose strategy depends on the mixing matrix."""


@dataclass(frozen=True)
class Correlated:
    """F (C^-1 Z)_t, with Z ~ N(0, I) for every agent and round, for every coordinate alone.

    Guarantee: after `calibrate` the noise keeps the target's budget against its attacker, if what
    it is added to is clipped as the target says: the plan audits that again.

    Example:
        >>> from dpjax.plans import noise
        >>> [part.label for part in noise.PARTS if part.temporal]
        ['anti_pgd', 'prefix_sum', 'mafalda', 'spacetime', 'banded_inverse', 'one_step']
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
        if self.temporal:
            strategy = self.over_rounds(target, strategy)
        bound = target.bound(strategy)
        if design is None:
            design = self.over_agents(target, bound)
        else:
            _check_design(design, *self.described(target))
        design.check(target.mixing, bound)
        return Factored(_rounded(design.covariance, bound), strategy, design)

    def over_rounds(self, target: Target, strategy: np.ndarray | None) -> Strategy:
        """The strategy over rounds: the part's own, or the one that was given."""
        if strategy is not None:
            check_strategy(strategy, target.rounds)
            return np.asarray(strategy, np.float64)
        bands = getattr(self, "bands", None)
        # A draw costs its column's norm, so that an amplified loss counts the largest one.
        equal = target.amplification is not None
        over = target.dense if self.label in _OF_NETWORK else target.mixing
        return named_strategy(self.label, over, target.pattern, bands, equal)

    def over_agents(self, target: Target, bound: Float[np.ndarray, "*n"]) -> design_.Design:
        """The design over agents."""
        kind, horizon, options = self.described(target)
        return design_.make(kind, target.mixing, bound, horizon=horizon, **options)

    def described(self, target: Target) -> tuple[str, int | None, dict[str, Any]]:
        """Kind, horizon and options of the design over agents, as it is made and saved."""
        return "independent" if self.temporal else self.label, None, {}

    def _of(
        self, target: Target, bound: np.ndarray, covariance: np.ndarray, value: float
    ) -> design_.Design:
        """The design of a covariance that has been made for the bound."""
        kind, _, options = self.described(target)
        base = design_.make("independent", target.mixing, bound)
        return dataclasses.replace(
            base, kind=kind, covariance=covariance, value=value, options=options
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

    horizon: int | Literal["run"] | None = dataclasses.field(
        default=None, metadata={"in_label": "run"}
    )
    max_variance: float | None = None
    subgroups: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        """Refuse what is no horizon, limit or grouping, and keep plain numbers."""
        whole = isinstance(self.horizon, str) and self.horizon == "run"
        if self.horizon is not None and not whole:
            remedy = f'give "run", None for one step, or a whole number from 1 to {2**31 - 2}'
            limits = {"most": 2**31 - 2, "remedy": remedy}
            _validate.fields(self, _validate.integer, "horizon", **limits)
        if self.max_variance is not None:
            _validate.fields(self, _validate.number, "max_variance")
        groups: Any = self.subgroups
        if groups is not None:
            nested = isinstance(groups, list | tuple)
            if not nested or not all(isinstance(group, list | tuple) for group in groups):
                shown = _validate.shown(groups)
                raise ValueError(f"subgroups is {shown}; give sequences of agents, or None")
            groups = tuple(tuple(_validate.agents("subgroups", each)) for each in groups)
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
        if (
            horizon is not None
            and ((steps := target.config.optimizer.relative(horizon)) != 1).any()
        ):
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
            to the next; up to 33, a run then keeps that many noise arrays less one, in place of
            one a round. None is the optimum over all strategies. Beyond some hundred rounds its
            search takes minutes: ``plan.make(..., strategy=banded.toeplitz(W, participation,
            bands))`` is nearly as good.
    """

    bands: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no number of diagonals."""
        if self.bands is not None:
            _validate.fields(self, _validate.integer, "bands")


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


@dataclass(frozen=True)
class BandedInverse(Correlated):
    """Noise that is a sum over the last rounds, near the optimum for prefix sums: BISR.

    Attributes:
        bands: Rounds that the noise of a round is a sum over (`banded.banded_inverse`), or all
            where the run has fewer. A run keeps that many noise arrays less one.

    Example:
        >>> from dpjax.plans import noise
        >>> noise.BandedInverse(bands=4)
        BandedInverse(bands=4)
    """

    bands: int = 8

    label, temporal = "banded_inverse", True

    def __post_init__(self) -> None:
        """Refuse what is no number of rounds."""
        _validate.fields(self, _validate.integer, "bands")

    def over_rounds(self, target: Target, strategy: np.ndarray | None) -> Strategy:
        """The strategy for the participation, or the one that was given."""
        if strategy is None:
            strategy = banded.banded_inverse(target.pattern, min(self.bands, target.rounds))
        return super().over_rounds(target, strategy)


@dataclass(frozen=True)
class OneStep(Correlated):
    """Noise that takes back a fraction of the last round's: DP-lambda-CGD.

    A run of large models keeps no noise: it draws the last round's again.

    Attributes:
        fraction: What is taken back, from 0 to below 1 (`banded.one_lag`). The best one rises
            with the rounds between one time that a record takes part and the next.

    Example:
        >>> from dpjax.plans import noise
        >>> noise.OneStep(fraction=0.9)
        OneStep(fraction=0.9)
    """

    fraction: float = 0.8

    label, temporal = "one_step", True

    def __post_init__(self) -> None:
        """Refuse what is no number; `banded.one_lag` checks its range."""
        _validate.fields(self, _validate.number, "fraction")

    def over_rounds(self, target: Target, strategy: np.ndarray | None) -> Strategy:
        """The strategy for the participation, or the one that was given."""
        if strategy is None:
            strategy = banded.one_lag(target.pattern, self.fraction)
        return super().over_rounds(target, strategy)


class SpaceTime(Correlated):
    """Noise optimised over agents and rounds in turn.

    Example:
        >>> from dpjax.plans import noise
        >>> noise.SpaceTime().label
        'spacetime'
    """

    label, temporal = "spacetime", True

    def over_agents(self, target: Target, bound: Float[np.ndarray, "*n"]) -> design_.Design:
        """The part over agents, made with its own strategy; its value is tr R.

        The joint objective has no part of its own over agents.
        """
        covariance = np.asarray(_joint(HashableMatrix(target.dense), target.pattern).covariance)
        roots = np.sqrt(spatial.bounds(bound, target.agents))
        scaled = covariance / np.outer(roots, roots)
        return self._of(target, bound, scaled, float(np.trace(scaled)))

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
    strategy: Strategy | None = None

    def __post_init__(self) -> None:
        """Refuse a name that would pass for another design; keep a copy of the matrix."""
        name: Any = self.name
        plain = isinstance(name, str) and name.isprintable() and name == name.strip()
        if not plain or not 1 <= len(name) <= 60 or name in ("covariance", "central", *LABELS):
            raise ValueError(
                f"name is {_validate.shown(name)} for a covariance of your own; give a name of "
                "up to 60 characters that no other design has, for records and figures"
            )
        if self.matrix is not None:
            object.__setattr__(self, "matrix", fixed(_validate.square("covariance", self.matrix)))
        if self.strategy is not None:
            strategy = _validate.square("strategy", self.strategy)
            check_strategy(strategy, len(strategy))
            object.__setattr__(self, "strategy", fixed(strategy))

    def __eq__(self, other: object) -> bool:
        """Whether name and bits of the matrices are equal."""
        return isinstance(other, Covariance) and self._bits == other._bits

    def __hash__(self) -> int:
        """Of name and bits."""
        return hash(self._bits)

    @property
    def _bits(self) -> tuple[Any, ...]:
        given = (self.matrix, self.strategy)
        return self.name, *(
            None if one is None else HashableMatrix(one).fingerprint for one in given
        )

    @property
    def label(self) -> str:  # type: ignore[override]
        """The user's name for it."""
        return self.name

    @property
    def temporal(self) -> bool:  # type: ignore[override]
        """Whether it has a strategy over rounds."""
        return self.strategy is not None

    def over_rounds(self, target: Target, strategy: np.ndarray | None) -> Strategy:
        """The user's strategy."""
        if strategy is not None:
            raise ValueError(
                f"strategy is given beside that of the covariance {self.name!r}; give one of them"
            )
        assert self.strategy is not None
        check_strategy(self.strategy, target.rounds)
        return self.strategy

    def over_agents(self, target: Target, bound: Float[np.ndarray, "*n"]) -> design_.Design:
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
        return self._of(target, bound, scaled, spatial.energy(scaled, target.dense))

    def described(self, target: Target) -> tuple[str, int | None, dict[str, Any]]:
        """The user's name for it."""
        return "covariance", None, {"name": self.name}


PARTS: tuple[Correlated, ...] = (
    Independent(), Pairwise(), Whisper(), Whisper("run"), AntiPgd(), PrefixSum(), Mafalda(),
    SpaceTime(), BandedInverse(), OneStep(),
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


def named_strategy(
    name: str,
    mixing: Float[np.ndarray, "*p n n"],
    participation: Participation,
    bands: int | None = None,
    equal: bool = False,
) -> Strategy:
    """Return the strategy of a design; the last few are kept, since they serve every budget.

    Args:
        name: The label of a design that has one.
        mixing: [n, n] W or a schedule [P, n, n].
        participation: When a record appears.
        bands: Diagonals of "prefix_sum" or "mafalda"; None is all.
        equal: Whether the columns of these have one norm, as sampled batches ask for.

    Returns:
        [T, T] C, lower triangular.

    Raises:
        ValueError: For an unfit participation.
    """
    # Only what a strategy depends on is part of the key; sums over rounds are one agent's models.
    over = np.asarray(mixing) if name in _OF_NETWORK else np.ones((1, 1))
    return _cached_strategy(name, HashableMatrix(over), participation, bands, equal)


@functools.lru_cache(maxsize=16)
def _cached_strategy(
    name: str, over: HashableMatrix, participation: Participation, bands: int | None, equal: bool
) -> Strategy:
    if name == "spacetime":
        return np.asarray(_joint(over, participation).strategy)
    if bands is not None:
        return banded.banded(over.matrix, participation, bands, equal=equal)
    if name == "anti_pgd":
        return temporal.anti_pgd(participation.rounds)
    if name == "prefix_sum":
        return temporal.prefix_sum(participation)
    return temporal.mafalda(over.matrix, participation)


@functools.lru_cache(maxsize=16)
def _joint(mixing: HashableMatrix, participation: Participation) -> Any:
    from dpjax.mechanism import spacetime

    return spacetime.design(mixing.matrix, participation)


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
    for name, (actual, expected) in wanted.items():
        if actual != expected:
            raise ValueError(
                f"design is {design.kind!r} of {name} {actual!r}, the config's is {expected!r}; "
                "make a design for this config"
            )


def _rounded(covariance: np.ndarray, bound: Float[np.ndarray, "*n"]) -> np.ndarray:
    """Round a factor of a covariance to float32, keeping [R^-1]_ii <= b_i.

    The factor is the triangular one: where noise cancels, its small pivots keep all their digits,
    and those of R^-1 follow. A symmetric factor writes the same small numbers as differences of
    large ones, whose rounding costs noise in proportion to the square root of R's condition number.

    Guarantee: with R = F F' of the float32 F that is returned, no [R^-1]_ii exceeds b_i, rounding
    included; R gains a few 1e-7 of itself, unless it is all but singular in float32.

    Args:
        covariance: [n, n] symmetric positive definite R, in the squared units of the noise, or a
            diagonal [n].
        bound: b, or [n] b_i.

    Returns:
        [n, n] lower triangular float32 F, or its diagonal.

    Raises:
        ValueError: For a covariance that is singular in float32.
    """
    diagonal = precision.diagonal_of(covariance)
    try:
        if diagonal is not None and not (diagonal > 0).all():
            raise ValueError("a variance is not positive")
        exact = np.linalg.cholesky(covariance) if diagonal is None else np.sqrt(diagonal)
        scale = 1.0
        for attempt in range(_TRIES):
            with np.errstate(over="ignore"):
                factor = (exact * scale).astype(np.float32)
            excess = float(np.max(precision.inverse_diagonal(factor=factor) / bound))
            # The margin covers the rounding between this and the accountant's own steps.
            if excess <= 1 - 1e-12:
                return factor if covariance.ndim == factor.ndim else np.diag(factor)
            # Steps that grow: each rounding moves the excess anew, by an amount that does not.
            scale *= np.sqrt(excess) * (1 + 2.0 ** (attempt - 25))
    except (np.linalg.LinAlgError, ValueError):
        pass
    matrix = (
        covariance
        if diagonal is None
        else np.diag(diagonal[[diagonal.argmin(), diagonal.argmax()]])
    )
    raise ValueError(
        f"design.covariance has condition number {np.linalg.cond(matrix):.1e} and entries up "
        f"to {np.max(np.abs(covariance)):.1e}, too far apart for float32 noise; take "
        "noise.Whisper(max_variance=20), which bounds the noise's variance, or rescale the loss"
    )
