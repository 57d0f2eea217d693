"""What a noise design is made for, noise as it will run, and what that guarantees.

The guarantee is audited: computed again from the very arrays that will be run. Authors of noise
read `Target` and return a `Calibrated`.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import optax
import scipy.sparse
import scipy.sparse.csgraph
from jaxtyping import Array, Float, PRNGKeyArray
from numpy.typing import ArrayLike

from dpjax import _validate
from dpjax._validate import fixed
from dpjax.accounting import budget as budget_
from dpjax.accounting import finite, losses, precision, records
from dpjax.accounting.guarantee import Guarantee
from dpjax.accounting.loss import Loss
from dpjax.accounting.rounding import loose_delta
from dpjax.data.partition import Partition
from dpjax.mechanism import design as design_
from dpjax.mechanism import strategy as strategy_
from dpjax.mechanism import temporal
from dpjax.mechanism.participation import Participation
from dpjax.mechanism.strategy import Strategy
from dpjax.plans import compatibility, custom, dependence
from dpjax.plans.config import Config
from dpjax.plans.protect import Budget, Protect
from dpjax.protocols import (
    Amplification,
    Arrays,
    Counts,
    Message,
    Method,
    Networked,
    Privatizer,
    Sampler,
    Updates,
)
from dpjax.topology import mixing as mixing_
from dpjax.topology import nodes
from dpjax.topology.mixing import HashableMatrix, Mixing
from dpjax.transforms import noise as noise_
from dpjax.transforms import rounds as rounds_

__all__ = ["Calibrated", "Target"]

PerAgent: TypeAlias = Float[np.ndarray, " n"]
"""One number an agent."""
AgentBound: TypeAlias = Float[np.ndarray, "*n"]
"""One number for all agents, 0-d, or one an agent."""
_Factor: TypeAlias = Float[np.ndarray, "n q"] | PerAgent
"""A map of normals to the agents' noise, or the diagonal of one."""

_Fields: TypeAlias = dict[str, Any]
"""Values of any types by their names."""

_TRIES = 40
"""Scales that are tried for a factor in float32; where noise nearly cancels, some ten are."""
_REMEDY = "make the plan from one config with plan.make"
_AMOUNTS = ("mu", "rho", "failure", "bound", "rates", "ratios")
"""Fields of losses that may be stated larger than they are; all others must agree.

At every delta a loss rises with each of them: mu, rho, what roundings take of delta and epsilon by
definition, an amplified one with the rate of a record and with its sensitivity over the noise. So a
larger one promises less.
"""


def check_applied_strategy(strategy: Strategy | None, rounds: int) -> None:
    """Refuse a strategy that a run of ``rounds`` rounds cannot apply.

    Args:
        strategy: [T, T] C, or None.
        rounds: T.

    Raises:
        ValueError: Unless it is float64 and `dpjax.mechanism.strategy.check_strategy` takes it.
    """
    if strategy is not None:
        dtype = np.asarray(strategy).dtype
        if dtype != np.float64:
            raise ValueError(f"strategy is {dtype}; give float64")
        strategy_.check_strategy(strategy, rounds)


def partial_energies(
    strategy: Strategy, participation: Participation, marks: Sequence[int]
) -> Float[np.ndarray, " marks"]:
    """Return the squared sensitivity of the first rounds' messages, up to each mark.

    Up to mark t these show (C G)_s + Z_s for s <= t and nothing else, so what they spend is the
    energy of C's first t rows, the largest over participation patterns.

    Args:
        strategy: [T, T] C.
        participation: When a record appears.
        marks: [M] numbers of rounds.

    Returns:
        [M] squared sensitivities, at clip 1, of the strategy as a run applies it: the larger of
        those in float32 and in float64.
    """
    energies = []
    for matrix in _applied(strategy):
        # Once for all marks: it takes as long as a mark's sensitivity.
        inverse = strategy_.inverse_of(matrix)
        energies.append([_sensitivity(matrix, inverse, mark, participation) for mark in marks])
    return np.max(energies, axis=0) ** 2


@functools.lru_cache(maxsize=4)
def _squared_sensitivity(strategy: HashableMatrix, participation: Participation) -> float:
    """Of all rounds: calibration, guarantee and audit ask for the same one."""
    matrix = strategy.matrix
    return float(partial_energies(matrix, participation, [len(matrix)])[0])


def _applied(strategy: np.ndarray) -> list[np.ndarray]:
    """The strategy as runs apply it, in float32 and in float64."""
    return [rounds_.applied(strategy, kind) for kind in (np.float32, np.float64)]


def _sensitivity(
    strategy: np.ndarray, inverse: np.ndarray, mark: int, participation: Participation
) -> float:
    """Sensitivity S of the first rows of C, with what inverting its coefficients may have lost.

    Column j of C comes by substitution, whose error E_j is, entry by entry and to first order, at
    most u |C| |C^-1| |C_j| for u = T eps / 2 (Higham 2002, Theorem 8.5). So with the norms c_k of
    C's columns

        |E_j| <= u e_j,  e_j = sum_k c_k (|C^-1| |C|)_kj,

    and a pattern's sum of Gram entries errs by at most 2 u (sum_j e_j) (sum_j c_j), which is S by a
    share u K, K = (sum_j e_j) (sum_j c_j) / S^2. Eight times that covers the second order and what
    rounds here. No K of the package's strategies comes near `strategy.WORST`, which stands for all
    that are smaller.
    """
    rows = strategy[:mark]
    size = temporal.sensitivity(rows, participation)
    norms = np.linalg.norm(rows, axis=0)
    lost = norms @ np.abs(inverse) @ np.abs(strategy)
    norm_sums, lost_sums = [column[participation.patterns].sum(axis=1) for column in (norms, lost)]
    product = norm_sums.max() * lost_sums.max()
    # NaN stays NaN, which states no loss.
    share = float(np.maximum(strategy_.WORST, product / size**2))
    return size * (1 + 4 * len(strategy) * share * np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class Target:
    """What a noise design is made for.

    Attributes:
        config: The config.
        mixing: [n, n] or [P, n, n] mixing matrix, float64; a sparse one as a read-only
            ``scipy.sparse.csr_array``.
        counts: [n] records of each agent, which the sampler may have to know, or a partition, whose
            counts they become; or None.

    Raises:
        ValueError: For a matrix that is unfit, a method that shows what no noise was added to,
            counts that are missing, no numbers of records or unfit for the sampler, and budgets or
            attackers that the network's agents cannot have.

    Example:
        >>> import numpy as np
        >>> import dpjax as dp
        >>> from dpjax.plans.calibration import Target
        >>> parts = dict(sampler=dp.samplers.Random(1), optimizer=dp.optimizers.Sgd(0.1), rounds=2)
        >>> protect = dp.Protect("replace_agent", clip_norm=1.0)
        >>> parts |= dict(noise=dp.noise.Independent(), budget=dp.Budget(1.0, delta=1e-5))
        >>> Target(dp.Config(protect=protect, **parts), np.full((3, 3), 1 / 3)).agents
        3
    """

    config: Config
    mixing: Mixing
    counts: Counts | None = None

    def __post_init__(self) -> None:
        """Refuse what does not fit the network, on copies that nobody can change afterwards."""
        config = self.config
        if not isinstance(config, Config):
            raise _validate.refusal("config", config, "give make_plan(dp.Config(...), W)")
        mixing = mixing_.check_mixing(self.mixing, stochastic=config.method.stochastic)
        if not scipy.sparse.issparse(mixing):
            mixing.flags.writeable = False
        _validate.assign(self, mixing=mixing)
        # Every loss is that of noisy payloads alone, and all noise is made for a target: here no
        # method passes that shows data by another way.
        dependence.check_dependence(
            self.method,
            config.optimizer.shared(),
            mixing.shape,
            config.integer_encoded,
        )
        self._check_counts()
        if config.budget is None:
            return
        per_agent = config.budget.each
        n = self.agents
        nodes = config.protect.nodes
        if per_agent is not None and len(per_agent) != n:
            raise ValueError(
                f"epsilon has {_validate.counted(len(per_agent), 'entry', 'entries')} for "
                f"{_validate.counted(n, 'agent')}; give one an agent"
            )
        if nodes is not None and (max(nodes) >= n or len(nodes) >= n):
            raise ValueError(
                f"nodes is {nodes} of {n} agents; give some of 0 .. {n - 1}, and leave a victim"
            )
        if config.protect.attacker == "node" and n == 1:
            raise ValueError("attacker is 'node' with one agent, who has no other; give 'outsider'")

    def _check_counts(self) -> None:
        sampler = self.config.sampler
        counts: Any = self.counts
        if counts is None:
            if sampler.needs_counts:
                raise ValueError(
                    f"counts is None for sampler {sampler}, whose rates or divisor depend on them; "
                    "give make_plan(config, mixing, counts=shards.counts)"
                )
            return
        titles = None
        if isinstance(counts, Partition):
            if (names := counts.names) is not None:
                titles = [nodes.title(names, index) for index in range(len(names))]
            counts = counts.counts
        numbers = _validate.finite_array("counts", counts, ndim=1)
        whole_numbers = (numbers == np.round(numbers)) & (numbers >= 1)
        if len(numbers) != self.agents or not whole_numbers.all():
            raise ValueError(
                f"counts is {_validate.shown(counts)} for {self.agents} agents; give the number of "
                "records of each"
            )
        records = fixed(numbers, np.int64)
        _validate.assign(self, counts=records)
        sampler.check(records, titles)
        # Refuses more records than its batches hold.
        sampler.with_max_records(int(records.max()))

    @property
    def budget(self) -> Budget:
        """What the run may cost; ValueError for a config without noise."""
        if self.config.budget is None:
            raise ValueError("budget is missing; a config without noise keeps none")
        return self.config.budget

    @property
    def protect(self) -> Protect:
        """What is protected."""
        return self.config.protect

    @property
    def method(self) -> Method:
        """What agents compute and send, on the network; most are the same on all."""
        method = self.config.method
        return method.on(self.dense) if isinstance(method, Networked) else method

    @property
    def sampler(self) -> Sampler:
        """Which records take part; it knows how many there are where it must."""
        sampler = self.config.sampler
        counts = self.counts
        return sampler if counts is None else sampler.with_max_records(int(counts.max()))

    @functools.cached_property
    def network(self) -> HashableMatrix:
        """The mixing matrix with its digest, for what is made of it and kept."""
        return HashableMatrix(self.mixing)

    @property
    def dense(self) -> Float[np.ndarray, "*p n n"]:
        """The mixing matrix as a dense array, for parts that need it; refused beyond memory."""
        return mixing_.dense(self.mixing)

    @property
    def pattern(self) -> Participation:
        """In which rounds what the relation changes takes part."""
        return self.config.pattern

    @property
    def agents(self) -> int:
        """Number of agents n."""
        return self.mixing.shape[-1]

    @property
    def rounds(self) -> int:
        """Rounds T."""
        return self.config.rounds

    @property
    def divisor(self) -> float:
        """What the sampler divides sums by; 1 where one gradient an agent is clipped."""
        return self.sampler.divisor if self.protect.clips == "record" else 1

    @property
    def amplification(self) -> Amplification | None:
        """What the sampler's secret batches take off the loss; None is nothing."""
        return self.config.sampler.amplification(self.counts)

    def squared_sensitivity(self, strategy: Strategy | None) -> float:
        """That of all rounds together, of the strategy as a run applies it, at clip 1."""
        if strategy is None:
            return float(self.pattern.epochs)
        return _squared_sensitivity(HashableMatrix(strategy), self.pattern)

    def precision_bound(self, strategy: Strategy | None) -> AgentBound:
        """The bound b on [R^-1]_ii, a 0-d array or one entry an agent."""
        if self.amplification is not None:
            return self.amplification.bound(self, strategy)
        squared = self.squared_sensitivity(strategy)
        return budget_.bound_of(self.budget.allowed_mu(), self.protect.sensitivity, squared)

    def single_draw_sensitivity(self, strategy: Strategy | None) -> float:
        """How far one draw of a record moves all rounds' messages, at clip 1 and noise 1.

        Where coins are flipped for a record in every so many rounds alone, and C has no more
        diagonals than that, the largest column of C bounds it: see `dpjax.accounting.sampled`.

        Args:
            strategy: [T, T] C; None is fresh noise.

        Returns:
            The larger of the norms in float32 and float64, with a margin.

        Raises:
            ValueError: For a strategy whose rows join two draws of a record, as it is applied.
        """
        if strategy is None:
            return 1.0
        separation = self.pattern.separation
        if self.diagonals(strategy) > separation:
            raise ValueError(
                f"strategy has more than {separation} diagonals as a run applies it, in whose rows "
                "two draws of a record meet, which no amplified loss here covers. Give bands of C "
                f"(not of C^-1) of at most {min(separation, rounds_.WIDEST + 1)}, as "
                "noise.PrefixSum(bands=b) has, or use Cyclic"
            )
        # A draw moves the rows of its round's column, and no later draw shares one of them.
        single = Participation(self.rounds, 1, 1)
        return _squared_sensitivity(HashableMatrix(strategy), single) ** 0.5

    def diagonals(self, strategy: Strategy | None) -> int:
        """How many diagonals a strategy has, as a run applies it.

        Args:
            strategy: [T, T] C; None is fresh noise, of one diagonal.
        """
        if strategy is None:
            return 1
        # Rounding of coefficients may drop the outer ones in float32 alone.
        lags = [np.subtract(*np.nonzero(matrix)).max() for matrix in _applied(strategy)]
        return 1 + int(max(lags))


@runtime_checkable
class Calibrated(Protocol):
    """Noise that keeps a budget, as it will run: what a plan knows of it.

    A class may hold its design as ``part``: the audit goes by that one's terms, then, and by the
    config's where there is none.

    Example:
        >>> import dpjax as dp
        >>> parts = dict(sampler=dp.samplers.Random(1), optimizer=dp.optimizers.Sgd(0.1), rounds=2)
        >>> protect = dp.Protect("replace_agent", clip_norm=1.0)
        >>> parts |= dict(noise=dp.noise.Independent(), budget=dp.Budget(8.0, delta=1e-5))
        >>> W = dp.mixing.metropolis_hastings(dp.graphs.ring(3))
        >>> dp.make_plan(dp.Config(protect=protect, **parts), W).noise.factor.shape
        (3, 3)
    """

    @property
    def arrays(self) -> Arrays:
        """What may differ between plans of one run, float32, by name.

        An array of fewer axes than another plan's is its diagonal.
        """

    @property
    def factor(self) -> _Factor | None:
        """Map of a round's fresh normals to the agents' noisy sums, for forecasts and tables.

        [n, q], in units of what is clipped; correlated noise over agents is drawn with it. Or [n],
        the diagonal of a map that has nothing else. None where no one map says it: noise that is
        not Gaussian, or another in each round.
        """
        return None

    @property
    def operator(self) -> Any:
        """What forecasts multiply columns by: by default the factor, where there is one."""
        return self.factor

    @property
    def strategy(self) -> Strategy | None:
        """C over rounds; None where noise is fresh in every round."""
        return None

    @property
    def design(self) -> design_.Design | None:
        """The optimised design over agents; None where there is none to save."""
        return None

    @property
    def secrets(self) -> records.Secrets | None:
        """Who draws it from which secret, by which other agents are protected or not.

        None, the default, says nothing: then no other participant is said to be protected.
        """
        return None

    def spends_evenly(self, target: Target) -> bool:
        """Whether all rounds cost what is in them the same, so that each part of them is known.

        Of the squared loss the first t of T rounds then spend t / T, or ceil(t / b) / k where a
        fixed order deals records k times, b rounds apart; records say "white".
        """

    def check(self, target: Target) -> None:
        """Refuse arrays of other shapes or types than the target's."""
        return

    def loss(self, target: Target) -> budget_.AgentLoss:
        """What every agent loses to the target's attacker, from the very arrays that run."""

    def grid(self, target: Target) -> finite.Grid:
        """The grid that a release's noisy sums are rounded to; refused for simulated noise.

        Raises:
            ValueError: By default.
        """
        raise ValueError(
            f"release is True with noise {_design(self)}, which has no grid that noisy sums are "
            "rounded to: give release=False, or noise over agents, noise.Covariance(R, name) say"
        )

    def privatizer(self, target: Target) -> Privatizer:
        """How it is drawn; hashable."""


def _design(noise: object) -> str:
    """What a user calls noise: the class of its design, where it holds one."""
    return type(getattr(noise, "part", noise)).__name__


class OverAgents:
    """Gaussian noise that is correlated over agents: what it costs an outsider."""

    strategy: Strategy | None
    """[T, T] float64 C over rounds; None is the identity."""

    def spends_evenly(self, target: Target) -> bool:
        """Whether there is no strategy."""
        return self.strategy is None

    def loss(self, target: Target) -> budget_.AgentLoss:
        """What every agent loses to an outsider."""
        squared = target.squared_sensitivity(self.strategy)
        mu = budget_.mu_of(self.inverse_diagonal(), target.protect.sensitivity, squared)
        return target.budget.spent(mu)

    def inverse_diagonal(self) -> PerAgent:
        """Upper bounds on [R^-1]_ii."""
        raise NotImplementedError


class ByFactor:
    """Noise F (C^-1 Z)_t, drawn by its factor and strategy: hardened, where it is released."""

    factor: _Factor
    """[n, n] float32 F, or its diagonal [n]; with more columns, these are normals of links."""
    strategy: Strategy | None
    """[T, T] float64 C over rounds; None is the identity."""

    @property
    def arrays(self) -> Arrays:
        """The factor."""
        return {"factor": self.factor}

    def grid(self, target: Target) -> finite.Grid:
        """The grid of a release."""
        # A release applies its strategy in float64.
        strategy = None if self.strategy is None else rounds_.applied(self.strategy, np.float64)
        return finite.release_grid(self.factor, target.rounds, strategy)

    def privatizer(self, target: Target) -> "_Coloured":
        """How it is drawn."""
        strategy = None if self.strategy is None else HashableMatrix(self.strategy)
        spacing = self.grid(target).spacing if target.config.release else None
        return _Coloured(target.rounds, strategy, spacing)


@dataclass(frozen=True, eq=False)
class Factored(ByFactor, OverAgents):
    """F (C^-1 Z)_t of correlated noise.

    Guarantee: `loss` is an outsider's, who sees every message on every link, whatever gradients
    depend on; see `dpjax.accounting.budget.loss`. Where every agent's noise is its own (F is
    diagonal), agent i loses no more to a coalition: mu_i = s sqrt(K [R^-1]_ii) = s sqrt(K) / F_ii,
    K the squared sensitivity over rounds, whatever noise of their own its members subtract.

    Attributes:
        factor: [n, n] float32 F as the run uses it; the covariance over agents is F F'. Its
            diagonal [n] for independent noise of a sparse mixing matrix.
        strategy: [T, T] float64 C over rounds; None is the identity.
        design: The design over agents.
    """

    factor: _Factor
    strategy: Strategy | None
    design: design_.Design

    @property
    def secrets(self) -> records.Secrets:
        """Agents who use the same normals hold one shared seed; others need none in common."""
        count = len(set(groups(self.factor)))
        # One agent has no other, and its noise is its own.
        if count == len(self.factor):
            return "own"
        return "shared" if count == 1 else "group"

    @property
    def operator(self) -> _Factor:
        """The factor."""
        return self.factor

    def check(self, target: Target) -> None:
        """Refuse another factor than float32 [n, n], or another strategy than [T, T]."""
        shape = self.factor.shape
        n = target.agents
        if shape not in ((n, n), (n,)) or self.factor.dtype != np.float32:
            raise ValueError(f"factor is {self.factor.dtype} {shape}; give float32 {(n, n)}")
        check_applied_strategy(self.strategy, target.rounds)

    def inverse_diagonal(self) -> PerAgent:
        """[R^-1]_ii of R = F F'."""
        return precision.inverse_diagonal(factor=self.factor)


@dataclass(frozen=True)
class DrawnNoise(Privatizer):
    """Noise that a function of arrays and a key draws.

    Attributes:
        function: ``function(arrays, key, *options)`` is the noise of one plan.
        options: What else it is given; hashable.
        share_lost: ``share_lost(arrays, round, payload, *options)`` is
            `dpjax.protocols.Privatizer.lost`; None where the payload is bounded.
        by_agent: Whether ``function(arrays, key, *options, agents)`` is the noise of some agents.
            Theirs have ``agents``, a tuple, as one more option, which both functions below receive.
        decode: ``decode(*options, total, key, like)``, see `dpjax.protocols.Privatizer.opened`.
    """

    function: Callable[..., optax.GradientTransformation]
    options: tuple[Hashable, ...]
    share_lost: Callable[..., Array] | None = None
    by_agent: bool = False
    decode: Callable[..., Updates] | None = None

    @property
    def opened(self) -> Callable[[Message, PRNGKeyArray, Updates], Updates] | None:
        """What decodes sums, where they have a form of their own."""
        return None if self.decode is None else functools.partial(self.decode, *self.options)

    @property
    def lost(self) -> Callable[[Arrays, Array, Updates], Array] | None:
        """How much of a payload goes out without noise, where nothing bounds it."""
        share_lost = self.share_lost
        if share_lost is None:
            return None
        return lambda arrays, round, payload: share_lost(arrays, round, payload, *self.options)

    def for_agents(
        self, arrays: Arrays, agents: Sequence[int]
    ) -> "tuple[Privatizer, Arrays] | None":
        """The noise of some agents alone, where the function draws it."""
        if not self.by_agent:
            return None
        return dataclasses.replace(self, options=(*self.options, tuple(agents))), arrays

    def transformation(self, arrays: Arrays, key: PRNGKeyArray) -> optax.GradientTransformation:
        """The noise of one plan."""
        return self.function(arrays, key, *self.options)


@dataclass(frozen=True)
class _Coloured(Privatizer):
    """How correlated noise is drawn; see `dpjax.transforms.noise.correlated`.

    Attributes:
        rounds: Rounds that the noise is accounted for.
        strategy: C over rounds; None is the identity.
        grid: Spacing that a release's noisy sums are rounded to; None for simulations.
        rows: Numbers of the agents whose raw normals are drawn; None is all.
    """

    rounds: int
    strategy: HashableMatrix | None = None
    grid: float | None = None
    rows: tuple[int, ...] | None = None

    def transformation(self, arrays: Arrays, key: PRNGKeyArray) -> optax.GradientTransformation:
        """The noise of one plan; ``arrays["factor"]`` is its F [n, q], or the diagonal [n].

        A driver that draws the normals itself gives them as ``arrays["normals"]``.
        """
        strategy = None if self.strategy is None else self.strategy.matrix
        return noise_.correlated(
            arrays["factor"],
            key=key,
            rounds=self.rounds,
            strategy=strategy,
            grid=self.grid,
            rows=self.rows,
            normals=arrays.get("normals"),
        )

    def for_agents(
        self, arrays: Arrays, agents: Sequence[int]
    ) -> "tuple[Privatizer, Arrays] | None":
        """Their rows of F, and the columns of the raw normals of their groups, or of their own."""
        factor = np.asarray(arrays["factor"])
        numbers = list(agents)
        # A group's members hold its seed in practice, so they draw all its normals; no others'.
        rows = tuple(numbers)
        if (diagonal := precision.diagonal_of(factor)) is not None:
            part = diagonal[numbers]
        else:
            used = np.any(factor[numbers], axis=0)
            # Only the two ends of a link hold its secret, whose column is beyond the square part.
            if factor.shape[0] == factor.shape[1]:
                group = groups(factor)
                used = np.isin(group, group[numbers])
            rows = tuple(np.flatnonzero(used).tolist())
            part = factor[np.ix_(numbers, rows)]
        return dataclasses.replace(self, rows=rows), {**arrays, "factor": part}

    def compact(self, arrays: Arrays) -> Arrays:
        """Diagonals in the place of factors [V, n, n] that are diagonal in all plans of a run."""
        factor = arrays["factor"]
        if factor.ndim == 2:
            return arrays
        diagonal = np.diagonal(factor, axis1=1, axis2=2)
        # The same bits: a product with zeros adds nothing.
        if np.count_nonzero(factor) > np.count_nonzero(diagonal):
            return arrays
        return {**arrays, "factor": diagonal}


def groups(factor: np.ndarray) -> Counts:
    """Which agents share a seed: those who use the same normals, directly or through others.

    Args:
        factor: [n, n] F, whose column j holds how much of the j-th normals each agent adds; or [n],
            a diagonal.

    Returns:
        [n] numbers, equal within a group.
    """
    if precision.diagonal_of(factor) is not None:
        return np.arange(len(factor))
    # Whoever adds a normal must know it, and all that the others who add it know.
    _, group = scipy.sparse.csgraph.connected_components(factor != 0, directed=False)
    return group.astype(np.int64)


def float32_factor(covariance: np.ndarray, bound: AgentBound) -> np.ndarray:
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
    # A matrix that is singular, indefinite or not finite has no factor (a LinAlgError, which is a
    # ValueError), or one without an inverse: it is refused below, with those that no scale brings
    # within the bound.
    with contextlib.suppress(ValueError), np.errstate(over="ignore", invalid="ignore"):
        wide = np.linalg.cholesky(covariance) if diagonal is None else np.sqrt(diagonal)
        # Rounding moves every entry by 2^-24 of its own size at most: a few larger factors are
        # enough.
        scale = 1.0
        for attempt in range(_TRIES):
            factor = (wide * scale).astype(np.float32)
            excess = float(np.max(precision.inverse_diagonal(factor=factor) / bound))
            # With b of `budget.bound_of`, `budget.mu_of` states of [R^-1]_ii <= (1 - 1e-12) b no
            # more than mu sqrt((1 - 1e-12) (1 - 1e-15)) (1 + 1e-15), rounded by a few 1e-16.
            if excess <= 1 - 1e-12:
                return factor if covariance.ndim == factor.ndim else np.diag(factor)
            # Steps that grow: each rounding moves the excess anew, by an amount that does not.
            scale *= np.sqrt(excess) * (1 + 2.0 ** (attempt - 25))
    matrix = covariance
    if diagonal is not None:
        # Its ends say the condition number, without an array [n, n].
        matrix = np.diag([diagonal.min(), diagonal.max()])
    raise ValueError(
        f"design.covariance has condition number {np.linalg.cond(matrix):.1e} and entries up "
        f"to {np.max(np.abs(covariance)):.1e}, too far apart for float32 noise; take "
        "noise.Whisper(max_variance=20), which bounds the noise's variance, or rescale the loss"
    )


def guarantee_of(target: Target, noise: Calibrated) -> Guarantee:
    """The budget as a guarantee, with the loss of the noise that will run.

    Guarantee: the constructor's, which refuses less than the loss says. With sampled batches that
    is of an outsider who knows neither batches nor noise, for zeroing out one record: agent i has
    the sampler's rate and the sensitivity over noise clip_norm sqrt([R^-1]_ii) in every round in
    which it may be drawn, times the norm of the strategy's largest column where there is one.

    Args:
        target: What the noise was made for.
        noise: The noise as it will run.
    """
    budget = target.budget
    loss, spent = _spent(target, noise)
    agents: _Fields = {}
    if spent is not None:
        # Agent by agent: one may lose more than its own epsilon, and less than the largest.
        agents["unsound"] = bool((spent.exact_epsilon > np.asarray(budget.epsilon)).any())
        if budget.each is not None:
            agents["per_agent_mu"] = tuple(spent.size.tolist())
    return Guarantee(
        epsilon=budget.largest,
        per_agent_epsilon=budget.each,
        loss=loss,
        **agents,
        **_terms(target, noise),
    )


def _spent(target: Target, noise: Calibrated) -> tuple[Loss, budget_.AgentLoss | None]:
    """What the very arrays that run cost: the loss to state, and that of every agent.

    An amplified loss holds all agents' ratios, and no agent has a number of its own: its second is
    None. That its epsilon at delta is no more than stated is for the record to check,
    `dpjax.accounting.records.Record.__post_init__`.
    """
    amplification = target.amplification
    if amplification is not None:
        # Amplified losses are composed by the sampler alone, of Gaussian noise over agents.
        if not isinstance(noise, OverAgents):
            raise ValueError(
                f"noise is {_design(noise)} for sampled batches; give a covariance over agents, "
                "and a strategy over rounds of few bands or none"
            )
        return amplification.loss(target, noise), None
    spent = noise.loss(target)
    rounds = target.rounds
    # The guarantee is one for all agents: that of the worst.
    size = float(np.max(spent.size))
    if spent.kind == "pure":
        return losses.Pure(size, rounds), spent
    dealt = target.config.participation
    even = noise.spends_evenly(target)
    # What is in some rounds alone may be in the first ones, unless they are dealt.
    regular = dealt is not None or target.pattern.epochs == rounds
    white = even and regular
    if spent.kind == "zcdp":
        return losses.Concentrated(size, rounds, white, dealt, spent.failure), spent
    # Why the first t rounds may spend more than t / T of the squared loss.
    reason: Literal["correlated", "schedule", "sampler"] | None = None
    # A released schedule is a strategy, whose rounds are independent.
    if compatibility.noise(target.config.noise).by_round:
        reason = "schedule"
    elif noise.strategy is not None:
        reason = "correlated"
    elif even:
        reason = "sampler"
    return losses.Gaussian(size, rounds, white, dealt, None if white else reason), spent


def _secrets(target: Target, noise: Calibrated) -> records.Secrets | None:
    """Who draws the noise from which secret, as the noise says; None where nobody promises it."""
    # The numbers of a factor show it, whatever the design is.
    if type(noise) is Factored:
        return noise.secrets
    # Elsewhere it is a promise, which a user's class makes itself: it inherits none, as it may draw
    # the noise in another way.
    for kind in (type(target.config.noise), type(noise)):
        if not (compatibility.packaged(kind) or "secrets" in vars(kind)):
            return None
    return noise.secrets


def _terms(target: Target, noise: Calibrated) -> _Fields:
    """What a guarantee is about, as its fields: all but the loss."""
    config = target.config
    design = config.noise
    threat = {name: getattr(target.protect, name) for name in records.Threat.__dataclass_fields__}
    return threat | {
        "delta": target.budget.delta,
        "accountant": config.accountant,
        "release": config.release,
        "secrets": "alone" if target.agents == 1 else _secrets(target, noise),
        "dropouts": getattr(design, "dropouts", 0),
        "colluders": getattr(design, "colluders", 0),
        "sum_only": getattr(design, "sum_only", False),
        "custom": compatibility.custom_names(config, noise),
    }


def audit(target: Target, noise: Calibrated | None, stated: Guarantee) -> None:
    """Compute the guarantee again from what will be run, and refuse an understatement.

    A plan with a smaller factor, a strategy of larger sensitivity, a larger clip norm, more rounds,
    more participations or a weaker relation than its guarantee states cannot exist.

    Args:
        target: The config on its network.
        noise: The noise as it will run; None when non-private.
        stated: The guarantee.

    Raises:
        ValueError: Naming what disagrees.
    """
    config = target.config
    # Noise that no config asks for has no terms to be held to.
    if (noise is None) != (config.noise is None):
        raise ValueError(
            f"noise is {type(noise).__name__} for a config with noise "
            f"{_validate.shown(config.noise)}; {_REMEDY}"
        )
    if noise is None:
        if np.isfinite(stated.epsilon):
            raise ValueError(
                f"guarantee states epsilon {stated.epsilon} for a config without noise; "
                "use Guarantee.none"
            )
        return
    correlated = isinstance(noise, Factored)
    # The terms are those of what runs, whose design may be another than the config's.
    design = None if correlated else getattr(noise, "part", config.noise)
    own = correlated and _secrets(target, noise) == "own"
    compatibility.check_noise(design, config.method, config.protect, independent_keys=own)
    noise.check(target)
    loss, spent = _spent(target, noise)
    # The package's classes compute it from the factor, but for what a design of a user's own says.
    packaged = compatibility.packaged(type(config.noise)) or isinstance(noise, OverAgents)
    if not (packaged and compatibility.packaged(type(noise))):
        custom.check_stated_loss(target, noise, loss, spent)
        if config.release:
            noise.grid(target)  # Refuses noise that only simulations draw.
    # A loss's fields and a record's go by their names together: where both have one, as `white` and
    # `participation`, the record's is the loss's. One phase says all, since a plan's loss has one,
    # and the number of phases is compared.
    amounts, fields = _split(loss)
    stated_amounts, stated_fields = _split(stated.loss)
    for name, value in (_terms(target, noise) | fields).items():
        other = stated_fields.get(name, getattr(stated, name, None))
        # A run adds those of its problem.
        agree = value == other or (name == "custom" and set(value) <= set(other or ()))
        if not agree:
            raise ValueError(f"guarantee.{name} is {other!r}, the config runs {value!r}; {_REMEDY}")
    if spent is not None:
        amounts = {"epsilon": spent.epsilon, **amounts}
        stated_amounts["epsilon"] = stated.per_agent_epsilon or stated.epsilon
        if stated.per_agent_mu is not None:
            amounts["per_agent_mu"] = spent.size
            stated_amounts["per_agent_mu"] = stated.per_agent_mu
    # An amount that is not stated at all counts as -1, below any.
    for name, amount in amounts.items():
        _check_amount(name, amount, stated_amounts.get(name, -1.0), target.agents)


def _check_amount(name: str, amount: ArrayLike, stated: ArrayLike, agents: int) -> None:
    """Refuse an amount that is larger than stated for some agent; NaN is stated by none."""
    real = np.broadcast_to(amount, agents)
    claim = np.broadcast_to(stated, agents)
    understated = ~(real <= claim)
    if understated.any():
        agent = int(np.argmax(understated))
        raise ValueError(
            f"guarantee states {name} {claim[agent]:.6g} for agent {agent}, but its noise "
            f"gives {real[agent]:.6g}; {_REMEDY}"
        )


def _split(loss: Loss) -> tuple[_Fields, _Fields]:
    """How large a loss is, and all else that it says."""
    phases = getattr(loss, "phases", (loss,))
    fields = dict(vars(phases[0]), kind=loss.kind, phases=len(phases))
    return {name: fields.pop(name) for name in _AMOUNTS if name in fields}, fields


def check_delta(config: Config, agents: int, counts: Counts | None, stacklevel: int = 3) -> None:
    """Warn of a delta above one over the number of units that are protected, where it is known.

    Args:
        config: The config.
        agents: n.
        counts: [n] records of each agent, or None.
        stacklevel: Of the caller to whom the warning points.

    Warns:
        UserWarning: Once.
    """
    if config.budget is None:
        return
    unit = str(config.protect.unit)
    sampler = config.sampler
    units = agents
    if unit == "client":
        units *= sampler.clients
    elif unit == "record" and counts is not None:
        units = int(np.sum(counts))
    elif unit == "record":
        # Batches of distinct records say that there are as many at least; others say nothing.
        if sampler.distinct is None:
            return
        units *= sampler.distinct
    at_least = unit == "record" and counts is None
    warning = loose_delta(config.budget.delta, units, unit, open_ended=at_least)
    if warning:
        warnings.warn(warning, UserWarning, stacklevel=stacklevel)
