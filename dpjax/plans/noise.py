"""Noise designs as parts of a config, all by name, ``dpjax.noise``, and those that are correlated.

Each part makes a covariance R over agents, a strategy C over rounds, or both; what they share
stands here once: how a target's bound on R becomes the factor that runs. What that costs, and the
bound itself, stand in `dpjax.plans.calibration`. A design is its class: its names, its look in
figures and the terms of its guarantee stand there, and `DESIGNS` lists all.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
from jaxtyping import Float

from dpjax import _validate
from dpjax._validate import fixed
from dpjax.accounting import precision
from dpjax.mechanism import banded, spatial, temporal
from dpjax.mechanism.design import Design
from dpjax.mechanism.participation import Participation
from dpjax.mechanism.strategy import Strategy
from dpjax.plans.calibration import (
    AgentBound,
    Factored,
    Target,
    check_applied_strategy,
    float32_factor,
)
from dpjax.plans.compatibility import CORRELATED, OWN_KEYS, SHARED_SEED, TO_SERVER, NoiseTerms
from dpjax.plans.links import PairKeys, ZeroSum
from dpjax.plans.polynomial import Polynomial
from dpjax.plans.scheduled import ScheduledGaussian, ScheduledLaplace
from dpjax.plans.sums import Discrete, SumShares
from dpjax.protocols import Look, Noise
from dpjax.topology.mixing import HashableMatrix, Mixing, fingerprint

if TYPE_CHECKING:
    from dpjax.mechanism.spacetime import JointDesign

__all__ = [
    "DESIGNS",
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

# Older names, by which scripts import them.
Aggregate = SumShares
Laplace = ScheduledLaplace

_Expected: TypeAlias = dict[str, Any]
"""Kind, horizon and options of a design over agents."""

_UNSAID = ("max_variance", "matrix", "participation")
"""Options that designs in older files lack; a `Covariance` may leave its matrix to the design."""
_DOTS = (0, (5, 1.5, 1, 1.5, 1, 1.5))
_SCALED = (
    "C scaled to sensitivity 1 for this participation: the loss to an eavesdropper is 1 / sigma "
    "(zero-out)"
)
_OVER_ROUNDS = f"sigma x clip x (C^-1 Z)_t; {_SCALED}"
_ONE_AGENT = HashableMatrix(np.ones((1, 1)))
"""The network of strategies that depend on none."""


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

    account = ""
    """What `dpjax account` says of sigma; "" where the command does not offer it."""
    compared = False
    """Whether `dpjax design` offers it."""
    slow = False
    """Whether its solver takes minutes for hundreds of agents."""
    terms = CORRELATED
    """What it joins and whom it defends against."""
    of_network = False
    """Whether this strategy depends on the mixing matrix."""

    # Read-only here: a subclass gives a plain value, or computes it from its parameters.
    @property
    def label(self) -> str:
        """What records, plans and the command line call the design."""
        return ""

    @property
    def look(self) -> Look:
        """How figures draw it; its label is the name in figures, tables and summaries."""
        raise NotImplementedError

    @property
    def paper(self) -> str:
        """What its paper calls it; "" where it is of no paper."""
        return ""

    @property
    def temporal(self) -> bool:
        """Whether it has a strategy over rounds."""
        return False

    def calibrate(
        self,
        target: Target,
        *,
        design: Design | None = None,
        strategy: Strategy | None = None,
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
            strategy = self.choose_strategy(target, strategy)
        # What the strategy costs over rounds is left over agents.
        bound = target.precision_bound(strategy)
        if design is None:
            design = self.over_agents(target, bound)
        else:
            _check_design(design, self.expected(target))
        # Of this network and budget, whoever made it.
        design.check(target.network, bound)
        return Factored(float32_factor(design.covariance, bound), strategy, design)

    def choose_strategy(self, target: Target, strategy: Strategy | None) -> Strategy:
        """The strategy over rounds: the part's own, or the one that was given."""
        if strategy is not None:
            check_applied_strategy(strategy, target.rounds)
            return np.asarray(strategy, np.float64)
        # Strategies that depend on no network are made once for all networks and budgets.
        network = target.network.dense if self.of_network else _ONE_AGENT
        # An amplified loss is of max_j |C e_j|, as a record may be drawn in any round j: the best C
        # for it has |C e_j| = |C e_0| for all j.
        return _cached_strategy(self, network, target.pattern, target.amplification is not None)

    def strategy_for(
        self, mixing: Mixing, participation: Participation, equal: bool = False
    ) -> Strategy:
        """Return its strategy, [T, T] C lower triangular, for designs that have one.

        Args:
            mixing: [n, n] W or a schedule [P, n, n].
            participation: When a record appears.
            equal: Whether the columns of one of few bands have one norm, as sampled batches ask.

        Raises:
            ValueError: For an unfit participation.
        """
        raise NotImplementedError

    def over_agents(self, target: Target, bound: AgentBound) -> Design:
        """The design over agents: by default every agent's noise is its own."""
        return Design.independent(target.network, bound)

    def expected(self, target: Target) -> _Expected:
        """What a design over agents that was made earlier must be, beside network and bound."""
        return {"kind": "independent" if self.temporal else self.label}


class Independent(Correlated):
    """Noise of its own at every agent; papers call it LDP.

    Example:
        >>> from dpjax.plans import noise
        >>> noise.Independent().label
        'independent'
    """

    label = "independent"
    look = Look("independent", "#E69F00", "o")
    paper = "LDP"
    compared = True
    terms = TO_SERVER


class Pairwise(Correlated):
    """Noise that cancels over links, as DECOR's does, with one seed for all agents.

    Example:
        >>> from dpjax.plans import noise
        >>> noise.Pairwise().label
        'pairwise'
    """

    label = "pairwise"
    look = Look("pairwise", "#009E73", "s", "-.")
    paper = "DECOR (as Whisper's paper has it)"
    compared = True
    terms = SHARED_SEED

    def over_agents(self, target: Target, bound: AgentBound) -> Design:
        """Noise that cancels over links."""
        return Design.pairwise(target.network, bound)


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

    compared = True
    slow = True
    terms = SHARED_SEED

    def __post_init__(self) -> None:
        """Refuse what is no horizon, limit or grouping, and keep plain numbers."""
        # An array is equal to no text, and has no truth value.
        is_run = isinstance(self.horizon, str) and self.horizon == "run"
        if self.horizon is not None and not is_run:
            remedy = f'give "run", a whole number from 1 to {2**31 - 2}, or leave it out'
            _validate.fields(self, _validate.integer, "horizon", maximum=2**31 - 2, remedy=remedy)
        if self.max_variance is not None:
            _validate.fields(self, _validate.number, "max_variance")
        groups: Any = self.subgroups
        if groups is None:
            return
        if not isinstance(groups, list | tuple) or not all(
            isinstance(group, list | tuple) for group in groups
        ):
            raise _validate.refusal("subgroups", groups, "give sequences of agents, or None")
        # Tuples, since parts are hashed.
        groups = tuple(tuple(_validate.agents("subgroups", group)) for group in groups)
        _validate.assign(self, subgroups=groups)

    @property
    def label(self) -> str:
        """What records call it: "whisper" for one step, "whisper_horizon" for more."""
        return "whisper" if self.horizon is None else "whisper_horizon"

    @property
    def look(self) -> Look:
        """How figures draw it."""
        if self.horizon is None:
            return Look("Whisper", "#0072B2", "^", "--")
        return Look("Whisper, whole run", "#D55E00", "D")

    @property
    def paper(self) -> str:
        """What the paper calls the noise for one step."""
        return "Whisper D-SGD; CorN-DSGD in its second version" if self.horizon is None else ""

    def _rounds(self, target: Target) -> int | None:
        return target.rounds if self.horizon == "run" else self.horizon

    def _steps(self, target: Target) -> np.ndarray | None:
        """Step sizes over the first one, where they differ within the horizon."""
        horizon = self._rounds(target)
        if horizon is None:
            return None
        # A horizon may lie beyond the run's rounds.
        steps = target.config.optimizer.relative(horizon)
        return steps if (steps != 1).any() else None

    def over_agents(self, target: Target, bound: AgentBound) -> Design:
        """The design for the horizon, and for step sizes where these differ."""
        return Design.whisper(
            target.network,
            bound,
            self._rounds(target),
            step_sizes=self._steps(target),
            subgroups=self.subgroups,
            max_variance=self.max_variance,
        )

    def expected(self, target: Target) -> _Expected:
        """Its horizon, step sizes, groups and limit."""
        return {
            "kind": self.label,
            "horizon": self._rounds(target),
            "step_sizes": _digest(self._steps(target)),
            "subgroups": None if self.subgroups is None else [*map(list, self.subgroups)],
            "max_variance": math.inf if self.max_variance is None else self.max_variance,
        }


class _OverRounds(Correlated):
    """What designs of a strategy alone share: every agent draws its noise by itself."""

    account = _OVER_ROUNDS
    terms = OWN_KEYS
    temporal = True


class AntiPgd(_OverRounds):
    """Noise of which the next round takes most away, at each agent alone.

    Example:
        >>> from dpjax.plans import noise
        >>> noise.AntiPgd().label
        'anti_pgd'
    """

    label = "anti_pgd"
    look = Look("anti-PGD", "#56B4E9", "P", "-.")
    paper = "Anti-PGD"
    account = f"sigma x clip x (C^-1 Z)_t, z_t - z_t-1; {_SCALED}"

    def strategy_for(
        self, mixing: Mixing, participation: Participation, equal: bool = False
    ) -> Strategy:
        """Lower triangular ones."""
        return temporal.anti_pgd(participation.rounds)


@dataclass(frozen=True)
class _Banded(_OverRounds):
    """What `PrefixSum` and `Mafalda` share: strategies of all diagonals, or of a few.

    Attributes:
        bands: Diagonals of the strategy, at most the rounds from one time that a record takes part
            to the next; up to 33, a run then keeps that many noise arrays less one, in place of
            one a round. None is the optimum over all strategies. Beyond some hundred rounds its
            search takes minutes: ``plan.make(..., strategy=)`` takes nearly as good a one of
            ``dpjax.contrib.bands``.
    """

    bands: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no number of diagonals."""
        if self.bands is not None:
            _validate.fields(self, _validate.integer, "bands")

    def strategy_for(
        self, mixing: Mixing, participation: Participation, equal: bool = False
    ) -> Strategy:
        """The best strategy of these diagonals."""
        # With one agent, W = [1], a model is a sum over rounds: x_T = x_0 - eta sum_t y_t.
        over = mixing if self.of_network else _ONE_AGENT.matrix
        if self.bands is None:
            return temporal.mafalda(over, participation)
        return banded.banded(over, participation, self.bands, equal=equal)


@dataclass(frozen=True)
class PrefixSum(_Banded):
    """Noise optimised for the sums of gradients over rounds; papers call it D-MF.

    With one agent and ``bands`` it is banded matrix factorization (Choquette-Choo et al. 2023).

    Example:
        >>> from dpjax.plans import noise
        >>> noise.PrefixSum(bands=4)
        PrefixSum(bands=4)
    """

    label = "prefix_sum"
    look = Look("prefix sum", "#999933", "X", "--")
    paper = "D-MF"
    terms = TO_SERVER


@dataclass(frozen=True)
class Mafalda(_Banded):
    """Noise over rounds optimised for what the network makes of it.

    Example:
        >>> from dpjax.plans import noise
        >>> noise.Mafalda().label
        'mafalda'
    """

    label = "mafalda"
    look = Look("MAFALDA", "#882255", "p")
    paper = "MAFALDA-SGD"
    of_network = True


@dataclass(frozen=True)
class BandedInverse(_OverRounds):
    """Noise that is a sum over the last rounds, near the optimum for prefix sums.

    Papers call it BISR.

    Attributes:
        bands: Rounds that the noise of a round is a sum over (`banded.banded_inverse`), or all
            where the run has fewer. A run keeps that many noise arrays less one.

    Example:
        >>> from dpjax.plans import noise
        >>> noise.BandedInverse(bands=4)
        BandedInverse(bands=4)
    """

    bands: int = 8

    label = "banded_inverse"
    look = Look("banded inverse", "#AA4499", "1", _DOTS)
    paper = "BISR"

    def __post_init__(self) -> None:
        """Refuse what is no number of rounds."""
        _validate.fields(self, _validate.integer, "bands")

    def strategy_for(
        self, mixing: Mixing, participation: Participation, equal: bool = False
    ) -> Strategy:
        """`banded.banded_inverse` of these rounds."""
        return banded.banded_inverse(participation, min(self.bands, participation.rounds))


@dataclass(frozen=True)
class OneStep(_OverRounds):
    """Noise that takes back a fraction of the last round's; papers call it DP-lambda-CGD.

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

    label = "one_step"
    look = Look("one step", "#CC6677", "2", "-.")
    paper = "DP-lambda-CGD"

    def __post_init__(self) -> None:
        """Refuse what is no number; `banded.one_lag` checks its range."""
        _validate.fields(self, _validate.number, "fraction")

    def strategy_for(
        self, mixing: Mixing, participation: Participation, equal: bool = False
    ) -> Strategy:
        """`banded.one_lag` of this fraction."""
        return banded.one_lag(participation, self.fraction)


class SpaceTime(Correlated):
    """Noise optimised over agents and rounds in turn.

    Example:
        >>> from dpjax.plans import noise
        >>> noise.SpaceTime().label
        'spacetime'
    """

    label = "spacetime"
    look = Look("space and time", "#332288", "*", (0, (7, 2)))
    terms = SHARED_SEED
    temporal = True
    of_network = True

    def strategy_for(
        self, mixing: Mixing, participation: Participation, equal: bool = False
    ) -> Strategy:
        """The joint design's part over rounds."""
        return np.asarray(_joint(HashableMatrix(mixing), participation).strategy)

    def over_agents(self, target: Target, bound: AgentBound) -> Design:
        """The joint design's part over agents; its value is tr R.

        The joint objective has no part of its own over agents.
        """
        covariance = np.asarray(_joint(target.network.dense, target.pattern).covariance)
        # The joint design is for the bound 1: agent i's noise goes by 1 / sqrt(b_i).
        roots = np.sqrt(spatial.bounds(bound, target.agents))
        scaled = covariance / np.outer(roots, roots)
        return Design.of(
            self.label,
            target.network,
            bound,
            scaled,
            float(np.trace(scaled)),
            options=_participation(target),
        )

    def expected(self, target: Target) -> _Expected:
        """A part of a joint design for a participation."""
        return {"kind": self.label, **_participation(target)}


@dataclass(frozen=True, eq=False)
class Covariance(Correlated):
    """A covariance over agents of your own, scaled until it keeps the budget.

    With a strategy of your own, the noise is correlated over rounds, too. For one over rounds
    alone give it beside the identity.

    Attributes:
        matrix: [n, n] R, symmetric positive definite, at any scale; None where a design that was
            made of it is given to the plan.
        name: What records and figures call it; no name of the package's designs, and
            without "(", which begins the parameters in their labels.
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
        _check_label("name", self.name, "a covariance")
        if self.matrix is not None:
            _validate.assign(self, matrix=fixed(_validate.square("covariance", self.matrix)))
        if self.strategy is not None:
            strategy = _validate.square("strategy", self.strategy)
            check_applied_strategy(strategy, len(strategy))
            _validate.assign(self, strategy=fixed(strategy))

    def __eq__(self, other: object) -> bool:
        """Whether name and bits of the matrices are equal."""
        return isinstance(other, Covariance) and self._bits == other._bits

    def __hash__(self) -> int:
        """Of name and bits."""
        return hash(self._bits)

    @functools.cached_property
    def _bits(self) -> tuple[str, str | None, str | None]:
        return self.name, _digest(self.matrix), _digest(self.strategy)

    @property
    def label(self) -> str:
        """The user's name for it."""
        return self.name

    @property
    def temporal(self) -> bool:
        """Whether it has a strategy over rounds."""
        return self.strategy is not None

    def choose_strategy(self, target: Target, strategy: Strategy | None) -> Strategy:
        """The user's strategy."""
        if strategy is not None:
            raise ValueError(
                f"strategy is given beside that of the covariance {self.name!r}; give one of them"
            )
        assert self.strategy is not None
        check_applied_strategy(self.strategy, target.rounds)
        return self.strategy

    def over_agents(self, target: Target, bound: AgentBound) -> Design:
        """The least multiple of R that keeps the bound: its shape matters, not its scale."""
        matrix = self.matrix
        n = target.agents
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
        return Design.of(
            "covariance",
            target.network,
            bound,
            scaled,
            spatial.energy(scaled, target.dense),
            options={"name": self.name, "matrix": _digest(self.matrix)},
        )

    def expected(self, target: Target) -> _Expected:
        """The user's name for it, and the matrix where the part has one."""
        return {"kind": "covariance", "name": self.name, "matrix": _digest(self.matrix)}


PARTS: tuple[Correlated, ...] = (
    Independent(), Pairwise(), Whisper(), Whisper("run"), AntiPgd(), PrefixSum(), Mafalda(),
    SpaceTime(), BandedInverse(), OneStep(),
)  # fmt: skip
"""The package's subclasses of `Correlated` that need no matrix of the user's, at defaults."""

LABELS = ("non_private", *(part.label for part in PARTS))
"""What records call these, and a run without noise."""


class _Design(Noise, Protocol):
    @property
    def look(self) -> Look: ...
    @property
    def terms(self) -> NoiseTerms: ...


_ALL: tuple[_Design, ...] = (
    *PARTS, Polynomial(), PairKeys(), ScheduledLaplace(), ScheduledGaussian(), SumShares(),
    Discrete(size=1), ZeroSum(),
)  # fmt: skip
DESIGNS = {part.label: part for part in _ALL}
"""Every design of the package by its label, with parameters that stand for any."""

NAMES = {
    "non_private": "non-private",
    "central": "CDP (trusted server)",
    **{label: part.look.label for label, part in DESIGNS.items()},
}
"""Names of designs in figures, tables and summaries, by their labels."""


def display_name(label: str) -> str:
    """Return the name of a config's design in figures, tables and summaries.

    Args:
        label: The config's, as in records: of another text it is the name itself.
    """
    design, bracket, parameters = label.partition("(")
    if design not in NAMES:
        return label
    name = NAMES[design]
    if parameters.startswith("horizon"):
        # A horizon of so many rounds is not that of the whole run.
        name = name.partition(",")[0]
    return f"{name} ({parameters}" if bracket else name


def check_design(part: Any) -> None:
    """Refuse a design of a user's own whose label records and figures would take for another's.

    Args:
        part: A noise design.

    Raises:
        ValueError: For such a label; a subclass of one of the package's designs may have its own.
    """
    if not isinstance(part, tuple(map(type, DESIGNS.values()))):
        _check_label("label", part.label, f"{type(part).__name__}, a design")


def _check_label(argument: str, label: Any, subject: str) -> None:
    taken = ("covariance", *NAMES, *NAMES.values())
    plain = isinstance(label, str) and label.isprintable() and label == label.strip()
    # A config's label has its design's parameters in brackets.
    if not plain or not 1 <= len(label) <= 60 or label in taken or "(" in label:
        raise ValueError(
            f"{argument} is {_validate.shown(label)} for {subject} of your own; give a name of up "
            "to 60 characters that no other design has, without brackets, for records and figures"
        )


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
    if label in (None, "non_private"):
        return None
    _validate.one_of("design", label, LABELS)
    return PARTS[LABELS.index(label) - 1]


def _participation(target: Target) -> _Expected:
    """What a joint design depends on beside network and bound; a list, as files hold it."""
    return {"participation": list(dataclasses.astuple(target.pattern))}


def _digest(matrix: np.ndarray | None) -> str | None:
    return None if matrix is None else fingerprint(matrix)


@functools.lru_cache(maxsize=16)
def _cached_strategy(
    part: Correlated, network: HashableMatrix, participation: Participation, equal: bool
) -> Strategy:
    return part.strategy_for(network.matrix, participation, equal)


@functools.lru_cache(maxsize=16)
def _joint(network: HashableMatrix, participation: Participation) -> "JointDesign":
    from dpjax.mechanism import spacetime

    return spacetime.design(network.matrix, participation)


def _check_design(design: Design, expected: _Expected) -> None:
    """Refuse a given design that was made from anything else than the config says."""
    actual = {"kind": design.kind, "horizon": design.horizon, **design.options}
    for name in actual | expected:
        value = actual.get(name)
        needed = expected.get(name)
        unsaid = name in _UNSAID and None in (value, needed)
        if value != needed and not unsaid:
            raise ValueError(
                f"design is {design.kind!r} of {name} {value!r}, the config's is {needed!r}; "
                "make a design for this config"
            )
