"""What a noise design is made for, and what calibrating one gives: noise as it will run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import optax
import scipy.sparse.csgraph
from jaxtyping import Float, Int, PRNGKeyArray

from dpjax._numerics import MARGIN
from dpjax.accounting import budget as budget_
from dpjax.accounting import finite, precision, records, sampled
from dpjax.accounting.sampled import Pld
from dpjax.mechanism import design as design_
from dpjax.mechanism.participation import Participation
from dpjax.plans import compatibility, strategies
from dpjax.plans.config import Config
from dpjax.plans.protect import Budget, Protect
from dpjax.protocols import Method, Networked, Privatizer, Sampler
from dpjax.transforms import noise as noise_
from dpjax.transforms import rounds as rounds_

__all__ = ["Calibrated", "Target"]


@dataclass(frozen=True, eq=False)
class Target:
    """What a noise design is made for.

    Attributes:
        mixing: [n, n] or [P, n, n] mixing matrix, float64.
        budget: What the run may cost.
        protect: What is protected.
        pattern: In which rounds what the relation changes takes part.
        steps: ``steps(rounds)`` gives step sizes over the first one, [rounds].
        method: What agents compute and send.
        first_step: The first round's step size.
        divisor: What the sampler divides sums by; 1 where one gradient an agent is clipped.
        rates: [n] probability that a record is in a round's batch, where that amplifies.

    Example:
        >>> import numpy as np
        >>> import dpjax as dp
        >>> from dpjax.plans.calibration import Target
        >>> from dpjax.mechanism.participation import Participation
        >>> parts = dict(method=dp.methods.DSGD(), first_step=0.1, divisor=1.0, steps=np.ones)
        >>> protect, budget = dp.Protect("replace_agent", clip_norm=1.0), dp.Budget(1.0, delta=1e-5)
        >>> Target(np.eye(3), budget, protect, Participation(2, 2, 1), **parts).agents
        3
    """

    mixing: Float[np.ndarray, "*p n n"]
    budget: Budget
    protect: Protect
    pattern: Participation
    steps: Callable[[int], np.ndarray]
    method: Method | Networked
    first_step: float
    divisor: float
    rates: Float[np.ndarray, " n"] | None = None

    def __post_init__(self) -> None:
        """Refuse budgets that are not one an agent, and attackers who are none of the agents."""
        each, n, nodes = self.budget.each, self.agents, self.protect.nodes
        if each is not None and len(each) != n:
            raise ValueError(f"epsilon has {len(each)} entries for {n} agents; give one an agent")
        if nodes is not None and not (max(nodes) < n and len(nodes) < n):
            raise ValueError(
                f"nodes is {nodes} of {n} agents; give some of 0 .. {n - 1}, and leave a victim"
            )
        if self.protect.attacker == "node" and n == 1:
            raise ValueError("attacker is 'node' with one agent, who has no other; give 'outsider'")

    @property
    def agents(self) -> int:
        """Number of agents n."""
        return self.mixing.shape[-1]

    @property
    def rounds(self) -> int:
        """Rounds T."""
        return self.pattern.rounds

    def over_rounds(self, strategy: np.ndarray | None) -> float:
        """Squared sensitivity over rounds, of the strategy as a run applies it."""
        if strategy is None:
            return float(self.pattern.epochs)
        return strategies.sensitivity_squared(strategy, self.pattern)

    def bound(self, strategy: np.ndarray | None) -> Float[np.ndarray, "*n"]:
        """The bound b on [R^-1]_ii, a 0-d array or one entry an agent."""
        budget, protect = self.budget, self.protect
        if self.rates is not None:
            sensitivity = protect.sensitivity * self.by_one_draw(strategy)
            return sampled.bound(
                self.rates,
                self.pattern.epochs,
                budget.largest,
                budget.delta,
                sensitivity=sensitivity,
            )
        return np.asarray(
            budget_.precision_bound(
                budget.epsilon,
                budget.delta,
                clip_norm=protect.clip_norm,
                relation=protect.relation,
                accountant=budget.rule,
                allow_unsound=budget.allow_unsound,
                sensitivity_squared=self.over_rounds(strategy),
            )
        )

    def by_one_draw(self, strategy: np.ndarray | None) -> float:
        """How far one draw of a record moves all rounds' messages, at clip 1 and noise 1.

        Args:
            strategy: [T, T] C; None is fresh noise.

        Raises:
            ValueError: For a strategy whose rows join two draws of a record.
        """
        if strategy is None:
            return 1.0
        return strategies.largest_column(strategy, self.pattern.separation)

    def sampled(self, factor: np.ndarray, strategy: np.ndarray | None) -> Pld:
        """What sampled batches cost every agent, against an outsider.

        Args:
            factor: [n, n] float32 F.
            strategy: [T, T] C; None is noise that is white over rounds.
        """
        assert self.rates is not None
        diagonal = precision.inverse_diagonal(factor=factor.astype(np.float64))
        moved = self.protect.sensitivity * self.by_one_draw(strategy)
        ratios = moved * np.sqrt(diagonal) * MARGIN
        return Pld.of(self.rates, ratios, self.rounds, self.pattern.separation)


@runtime_checkable
class Calibrated(Protocol):
    """Noise that keeps a budget, as it will run: what a plan knows of it.

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
    def arrays(self) -> Mapping[str, np.ndarray]:
        """What may differ between plans of one run, float32, by name."""
        ...

    @property
    def factor(self) -> Float[np.ndarray, "n q"] | None:
        """Map of a round's fresh normals to the agents' noisy sums, for forecasts and tables.

        [n, q], in units of what is clipped; correlated noise over agents is drawn with it. None
        where no one map says it: noise that is not Gaussian, or another in each round.
        """
        return None

    @property
    def strategy(self) -> Float[np.ndarray, "t t"] | None:
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

    def white(self, target: Target) -> bool:
        """Whether the first t of T rounds spend t / T of the squared loss."""
        ...

    def check(self, target: Target) -> None:
        """Refuse arrays of other shapes or types than the target's."""
        ...

    def loss(self, target: Target) -> budget_.AgentLoss:
        """What every agent loses to the target's attacker, from the very arrays that run."""
        ...

    def grid(self, target: Target) -> finite.Grid:
        """The grid that a release's noisy sums are rounded to; refused for simulated noise.

        Raises:
            ValueError: By default.
        """
        raise ValueError(f"release is True with {type(self).__name__}, noise of simulations alone")

    def privatizer(self, target: Target, grid: finite.Grid | None) -> Privatizer:
        """How it is drawn; hashable."""
        ...


@dataclass(frozen=True, eq=False)
class Factored:
    """F (C^-1 Z)_t of correlated noise.

    Guarantee: `loss` is an outsider's, who sees every message on every link, whatever gradients
    depend on; see `dpjax.accounting.budget.loss`. Where every agent's noise is its own (F is
    diagonal), other agents lose no more to any number of the others, who know their own noise.

    Attributes:
        factor: [n, n] float32 F as the run uses it; the covariance over agents is F F'.
        strategy: [T, T] float64 C over rounds; None is the identity.
        design: The design over agents.
    """

    factor: Float[np.ndarray, "n n"]
    strategy: Float[np.ndarray, "t t"] | None
    design: design_.Design

    @property
    def secrets(self) -> records.Secrets:
        """Agents who use the same normals share a seed; the others need none in common."""
        count = len(set(groups(self.factor)))
        if count == len(self.factor):
            return "own"
        return "shared" if count == 1 else "group"

    @property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """The factor."""
        return {"factor": self.factor}

    def white(self, target: Target) -> bool:
        """Whether there is no strategy."""
        return self.strategy is None

    def check(self, target: Target) -> None:
        """Refuse another factor than float32 [n, n], another strategy than [T, T], or attacker.

        Raises:
            ValueError: For these, and for methods whose payload is no clipped sum.
        """
        compatibility.check_noise(
            None, target.method, target.protect, own_keys=self.secrets == "own"
        )
        shape, n = self.factor.shape, target.agents
        if shape != (n, n) or self.factor.dtype != np.float32:
            raise ValueError(f"factor is {self.factor.dtype} {shape}; give float32 {(n, n)}")
        strategies.check(self.strategy, target.rounds)

    def loss(self, target: Target) -> budget_.AgentLoss:
        """What every agent loses to an outsider."""
        budget, protect = target.budget, target.protect
        return budget_.loss(
            None,
            budget.delta,
            clip_norm=protect.clip_norm,
            relation=protect.relation,
            accountant=budget.rule,
            factor=self.factor.astype(np.float64),
            allow_unsound=budget.allow_unsound,
            sensitivity_squared=target.over_rounds(self.strategy),
        )

    def grid(self, target: Target) -> finite.Grid:
        """The grid of a release."""
        strategy = None if self.strategy is None else rounds_.applied(self.strategy, np.float64)
        return finite.grid(self.factor, target.rounds, strategy)

    def privatizer(self, target: Target, grid: finite.Grid | None) -> "Coloured":
        """How it is drawn."""
        strategy = None if self.strategy is None else strategies.Fixed(self.strategy)
        return Coloured(target.rounds, strategy, None if grid is None else grid.spacing)


@dataclass(frozen=True)
class Coloured(Privatizer):
    """How correlated noise is drawn; see `dpjax.transforms.noise.correlated`.

    Attributes:
        rounds: Rounds that the noise is accounted for.
        strategy: C over rounds; None is the identity.
        grid: Spacing that a release's noisy sums are rounded to; None for simulations.
    """

    rounds: int
    strategy: strategies.Fixed | None = None
    grid: float | None = None

    def transformation(self, arrays: Any, key: PRNGKeyArray) -> optax.GradientTransformation:
        """The noise of one plan; ``arrays["factor"]`` is its F [n, n], or the diagonal [n]."""
        strategy = None if self.strategy is None else self.strategy.matrix
        return noise_.correlated(
            arrays["factor"], key=key, rounds=self.rounds, strategy=strategy, grid=self.grid
        )

    def compact(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Diagonals in the place of factors [V, n, n] that are diagonal in all plans of a run."""
        factor = arrays["factor"]
        diagonal = np.diagonal(factor, axis1=1, axis2=2)
        if np.count_nonzero(factor) > np.count_nonzero(diagonal):
            return dict(arrays)
        return {**arrays, "factor": diagonal}


def groups(factor: Float[np.ndarray, "n n"]) -> Int[np.ndarray, " n"]:
    """Which agents share a seed: those who use the same normals, directly or through others.

    Args:
        factor: [n, n] F, whose column j holds how much of the j-th normals each agent adds.

    Returns:
        [n] numbers, equal within a group.
    """
    _, group = scipy.sparse.csgraph.connected_components(factor != 0, directed=False)
    return group.astype(np.int64)


def target_of(config: Config, mixing: np.ndarray, counts: np.ndarray | None = None) -> Target:
    """Return what the noise of a config is made for.

    Args:
        config: A private config.
        mixing: [n, n] or [P, n, n] mixing matrix.
        counts: [n] records of each agent, where the sampler must know them.

    Raises:
        ValueError: For a config without a budget.
    """
    if config.budget is None:
        raise ValueError("budget is None; a config without noise keeps none")
    rates, sampler = None, config.sampler
    # Where the sampler claims them, and so keeps to the rules of those that do.
    if counts is not None and sampler.capacity is not None:
        rates = sampler.rates(counts)
    divisor = counted(sampler, counts).divisor if config.protect.clips == "record" else 1
    optimizer = config.optimizer
    return Target(
        mixing=mixing,
        budget=config.budget,
        protect=config.protect,
        pattern=config.pattern,
        steps=optimizer.relative,
        method=config.method,
        first_step=optimizer.first,
        divisor=divisor,
        rates=rates,
    )


def counted(sampler: Sampler, counts: np.ndarray | None) -> Sampler:
    """Return a sampler that knows how many records there are, where it must.

    Args:
        sampler: Which records take part.
        counts: [n] records of each agent, or None.
    """
    return sampler if counts is None else sampler.holding(int(counts.max()))


def on_network(method: Method | Networked, mixing: np.ndarray) -> Method:
    """Return a method on its network; most are the same on all.

    Args:
        method: What agents compute, keep and send.
        mixing: [n, n] or [P, n, n] mixing matrix.
    """
    return method.on(mixing) if isinstance(method, Networked) else method
