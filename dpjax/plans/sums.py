"""Noise in shares of a sum: real, for simulations, and of whole numbers, as a protocol sends them.

Every agent adds a share, and nobody sees a part of the sum. Of whole numbers what crosses the
network is what is accounted for.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PRNGKeyArray

from dpjax import _validate
from dpjax.accounting import budget as budget_
from dpjax.accounting import discrete
from dpjax.accounting.rounding import MARGIN
from dpjax.algorithms.exchange import Server
from dpjax.encoding import lattice
from dpjax.encoding.lattice import SumCode
from dpjax.plans import compatibility
from dpjax.plans.calibration import Calibrated, DrawnNoise, PerAgent, Target
from dpjax.plans.compatibility import SIMULATED, NoiseTerms
from dpjax.plans.links import ScaledNoise
from dpjax.protocols import Arrays, Look, Updates
from dpjax.topology.mixing import SquareMatrix
from dpjax.transforms import noise as noise_

__all__ = ["Discrete", "SumShares"]

_LEAST = 4
"""Variance of one client's noise, in squared grid units: below, sums are not quite what they are
taken for, and at 1 that costs more than the noise is worth."""
_LONGER = 1.01
"""What rounding may make of a vector's length, where the variance is left to the budget."""
_SHARE = 1e-3
"""Share of delta for roundings that move sums of several records further than the loss says."""


_WHY = (
    "its loss is that of sums of which nobody sees a part: give "
    "method=Federated(aggregate=...) and attacker="
)
_SUMMED = NoiseTerms(
    attackers=(("aggregator", "any"),),
    payloads=("sum",),
    released=False,
    why=f"{_WHY}'aggregator'; {SIMULATED}",
)
"""Of noise in shares of a sum."""


class _InShares:
    """Noise of which every agent adds a share, for sums whose parts nobody sees."""

    dropouts: int
    colluders: int
    sum_only = True
    """Its loss is of sums alone: see `dpjax.accounting.guarantee.Guarantee`."""

    def __post_init__(self) -> None:
        """Refuse what is no number of agents."""
        limits = {"minimum": 0, "maximum": 2**31 - 2}
        _validate.fields(self, _validate.integer, "dropouts", "colluders", **limits)

    def cohort(self, agents: int) -> discrete.Cohort:
        """The agents of a round.

        Args:
            agents: Number of agents n.

        Raises:
            ValueError: Where none is left to hide the others.
        """
        # Shares of the missing and of colluders hide nobody.
        return discrete.Cohort(agents, self.dropouts, self.colluders)

    def check_sums(self, target: Target) -> None:
        """Refuse an exchange that shows single messages, or opens sums of too few.

        Args:
            target: What the noise is for.

        Raises:
            ValueError: Naming the exchange and the remedy.
        """
        # A share alone is less noise than its message needs.
        exchange = getattr(target.config.method, "exchange", None)
        if not isinstance(exchange, Server) or not exchange.aggregate.sum_only:
            raise ValueError(
                f"method has exchange {exchange}, which shows single messages, with noise {self}, "
                "of which each has a share; give an aggregate that shows the sum alone, or "
                "noise.Independent() and attacker='outsider'"
            )
        agents = target.agents
        survivors = max(exchange.aggregate.min_survivors(agents), 0)
        # Of fewer survivors a sum has fewer shares than privacy asks for.
        if survivors < agents - self.dropouts:
            remedy = f"dropouts={agents - survivors}, or " if survivors else ""
            raise ValueError(
                f"aggregate opens sums of {survivors} of {agents} agents with noise {self}; give "
                f"{remedy}an aggregate that aborts earlier"
            )


@dataclass(frozen=True)
class SumShares(ScaledNoise, _InShares):
    """Gaussian noise in shares: every agent adds its own, and the sum has what privacy asks for.

    Guarantee: of n agents at most ``dropouts`` are missing from a sum that is opened (the method's
    aggregate aborts below n - dropouts, before anything is seen), and at most ``colluders`` of
    those who are in it show their messages to the aggregator. Then the shares of the others,
    n - dropouts - colluders at least, are unknown to it. Each has deviation a, so that with
    sensitivity s (the clip norm, or twice it where data are replaced) a unit that takes part in k
    rounds loses mu = s sqrt(k / (n - dropouts - colluders)) / a to an "aggregator", who receives
    the sum of every round and no single message, whatever gradients depend on. To an "outsider",
    who reads all links, it loses no more, and the same is stated: single messages go masked over
    these, which is what a sum-only aggregate promises: this one sees the sums that are opened and
    no shares. Exact arithmetic; real noise, in simulations. A round counts if its sum may have been
    revealed, whether it finished or not.

    Attributes:
        dropouts: Agents that may be missing from a sum, at most.
        colluders: Agents that may show the aggregator what they know, at most.

    Reference:
        DOME, Algorithm 1, a^2 = N E sigma^2 C^2 / B, which leaves the shares of missing clients out
        of the sum; here they are made up for beforehand.

    Example:
        >>> from dpjax.plans.sums import SumShares
        >>> SumShares(dropouts=5).label
        'aggregate'
    """

    dropouts: int = 0
    colluders: int = 0

    label = "aggregate"
    secrets = "shares"
    look = Look("secure sum", "#882255", "8", ":")
    terms = dataclasses.replace(
        _SUMMED,
        attackers=(("aggregator", "any"), ("outsider", "any")),
        why=f"{_WHY}'aggregator' or 'outsider'; {SIMULATED}",
    )

    def unit(self, target: Target) -> PerAgent:
        """Loss mu of every agent at a deviation of 1."""
        self.check_sums(target)
        # The variances of honest shares add up.
        root = math.sqrt(target.squared_sensitivity(None) / self.cohort(target.agents).honest)
        return np.full(target.agents, target.protect.sensitivity * root * MARGIN)

    def source(self, target: Target) -> SquareMatrix:
        """Every agent's own normals."""
        return np.eye(target.agents)

    def drawn(self, target: Target) -> DrawnNoise:
        """Independent normals."""
        return DrawnNoise(_shares, (target.rounds, target.agents))


def _shares(
    arrays: Arrays, key: PRNGKeyArray, rounds: int, agents: int
) -> optax.GradientTransformation:
    deviations = jnp.full(agents, 1.0, jnp.float32) * arrays["noise_scale"]
    return noise_.correlated(deviations, key=key, rounds=rounds)


@dataclass(frozen=True)
class Discrete(_InShares):
    """Whole numbers with discrete Gaussian noise in shares, for a sum that is opened alone.

    A payload of k entries is rotated by public signs and a Hadamard matrix, rounded on a grid,
    and given noise; what an agent sends is whole numbers, and whoever receives their sum reads it.
    The signs are drawn anew in every round, from the round's public key: the vectors do not depend
    on them.

    One clipped gradient an agent (of a client, an agent, or batches of one record) is drawn anew
    until it is short. The sum of B clipped records is rounded once, by numbers that know nothing
    of it, so that one record moves it little, but for a share of roundings that delta pays for.

    Guarantee: against an "aggregator", who receives the sum of every round and no single message,
    and knows the noise of at most ``colluders`` agents; of n agents at most ``dropouts`` are
    missing from a sum that is opened (the method's aggregate aborts earlier). A unit moves k sums,
    each by `dpjax.encoding.lattice.moved` grid units: left out ("zero_out") by sqrt(limit), limit
    being of the squares of what is sent after rounding, tested in whole numbers, or replaced, by
    twice that; one of several records by the formula of limit at C or 2 C, float32 included, but
    for a share beta of roundings. The noise of the n - dropouts - colluders others, of variance v
    each, then gives rho-zCDP,

        rho = k e^2 / 2,   e = move / sqrt((n - dropouts - colluders) v) + tau sqrt(K),

    and k beta of delta, a thousandth, goes to roundings; whatever gradients depend on. No mu is
    stated, which is of real noise. Exact: nothing is
    rounded after the noise, and all arithmetic from rounding on is of whole numbers. What float32
    takes of sums of records before is in their clip norm (`Guarantee.sum_rounding`). A round
    whose sum may have been opened counts, finished or not. A simulation's: one process has all
    keys (clients on their own draw with `dpjax.encoding.integers`). Sums wrap around modulo 2^b
    with a probability below 2^-40 a round, over signs and noise, which costs accuracy alone.

    Attributes:
        size: k, entries of the payload: of a model, or of a sketch of its gradient.
        dropouts: Agents that may be missing from a sum, at most.
        colluders: Agents that may show the aggregator what they know, at most.
        variance: v, of an agent's noise in squared grid units, at least 4: the grid then follows
            from the budget. More of it makes a finer grid and longer numbers. None takes the least
            power of two at which rounding lengthens no move by more than 1 %; of several records
            the one of least noise, where none is so fine.

    Reference:
        Kairouz, Liu and Steinke (2021), The distributed discrete Gaussian mechanism for federated
        learning with secure aggregation.

    Example:
        >>> from dpjax.plans.sums import Discrete
        >>> Discrete(size=124, dropouts=3).label
        'discrete'
    """

    size: int
    dropouts: int = 0
    colluders: int = 0
    variance: int | None = None

    label = "discrete"
    look = Look("discrete", "#56B4E9", "H")
    paper = "DDGauss"
    terms = dataclasses.replace(_SUMMED, loss="zcdp")
    integer_encoded = True
    temporal = False

    def __post_init__(self) -> None:
        """Refuse what is no vector, no number of agents, or too little noise for a grid."""
        super().__post_init__()
        _validate.fields(self, _validate.integer, "size", maximum=2**24)
        if self.variance is not None:
            limits = {"minimum": _LEAST, "maximum": lattice.MOST}
            _validate.fields(self, _validate.integer, "variance", **limits)

    def calibrate(self, target: Target) -> "CalibratedCode":
        """Choose grid and modulus for a budget.

        Args:
            target: What it is for.

        Returns:
            The noise, on the finest grid on which it keeps the budget.

        Raises:
            ValueError: For an aggregate that shows single messages or
                opens sums of too few, secret batches, or a budget that no grid keeps.
        """
        self.check(target)
        if self.variance is not None:
            return self._on_grid(target, self.variance)
        finest = None
        variance = _LEAST
        while variance <= lattice.MOST:
            try:
                noise = self._on_grid(target, variance)
            except ValueError:
                # Rounding alone takes the budget, or the grid is too fine.
                pass
            else:
                moved = noise.code.grid * noise.code.moved(_relation(target))
                if moved <= _LONGER * target.protect.sensitivity:
                    return noise
                finest = noise
            # More noise in grid units is a finer grid, whose rounding costs less.
            variance *= 2
        # Of one record, shorter payloads are the remedy; of several, the tail is what is long.
        if finest is not None and target.divisor > 1:
            return finest
        raise ValueError(
            f"budget is {target.budget}, for which no grid rounds {self.size} entries finely "
            "enough; give variance, fewer entries, more agents, or a larger budget"
        )

    def check(self, target: Target) -> None:
        """Refuse a target of other noise.

        Args:
            target: What the noise is for.

        Raises:
            ValueError: As `calibrate`.
        """
        self.check_sums(target)
        self.cohort(target.agents)
        sampler = target.config.sampler
        # How long a sum is, and how much float32 may round it, follows from its records' number.
        if target.divisor != 1 and not compatibility.packaged(type(sampler)):
            raise ValueError(
                f"sampler is {sampler} with noise {self.label!r}, which must know how many records "
                "a batch has at most: give samplers.Random, Cyclic or Full, batches of one record, "
                "or protect whole clients or agents, whose records are clipped as one"
            )

    def _on_grid(self, target: Target, variance: int) -> "CalibratedCode":
        """The noise of a variance, on the finest grid that keeps the budget."""
        budget = target.budget
        records = int(target.divisor)
        clip_norm = target.protect.clip_norm
        times = target.pattern.epochs
        rest = budget.delta
        beta = lattice.REDRAWN
        if target.divisor > 1:
            # The roundings of every round in which a unit is may fail.
            rest *= 1 - _SHARE
            beta = _SHARE * budget.delta / times
        # A Hadamard matrix has a power of two of rows.
        grid = discrete.smallest_grid(
            clip_norm,
            discrete.largest_rho(budget.largest, rest),
            self.cohort(target.agents),
            1 << (self.size - 1).bit_length(),
            variance=variance,
            participations=times,
            relation=_relation(target),
            beta=beta,
            records=records,
        )
        while True:
            code = SumCode(self.size, clip_norm, grid, target.agents, variance, beta, records)
            noise = CalibratedCode(self, code)
            if float(noise.loss(target).epsilon[0]) <= budget.largest:
                return noise
            # Rounded whole numbers may lose a little more than the search states.
            grid *= 1 + 1e-9


def _relation(target: Target) -> Literal["zero_out", "replace"]:
    """What becomes of a unit's vectors."""
    return "zero_out" if target.protect.relation.startswith("zero_out") else "replace"


@dataclass(frozen=True, eq=False)
class CalibratedCode(Calibrated):
    """Whole numbers and their noise, at the grid that keeps a budget.

    Guarantee: `loss` is that of `Discrete`, from the very code that runs.

    Attributes:
        part: The design.
        code: Grid, limit, noise and modulus.
    """

    part: Discrete
    code: SumCode

    secrets = "shares"

    @property
    def arrays(self) -> Arrays:
        """The grid, for records: the program has it as a constant."""
        return {"noise_grid": np.asarray(self.code.grid)}

    @property
    def factor(self) -> SquareMatrix:
        """Deviation of each agent's noise, in units of what is clipped; rounding is not in it."""
        # v is in squared grid units.
        deviation = self.code.grid * math.sqrt(self.code.variance)
        return np.diag(np.full(self.code.clients, deviation, np.float32))

    def spends_evenly(self, target: Target) -> bool:
        """The loss says itself what the first rounds spend."""
        return True

    def check(self, target: Target) -> None:
        """Refuse a code of other vectors, agents or noise than the target's.

        Raises:
            ValueError: Naming what does not fit.
        """
        self.part.check(target)
        code = self.code
        # A variance that the budget chose is what the code has.
        variance = self.part.variance or max(code.variance, _LEAST)
        expected = dataclasses.replace(
            code,
            size=self.part.size,
            bound=target.protect.clip_norm,
            clients=target.agents,
            variance=variance,
            records=int(target.divisor),
        )
        if code != expected:
            raise ValueError(
                f"code is {code} for noise {self.part}, and the config's is {expected}; make the "
                "plan from one config with plan.make"
            )

    def loss(self, target: Target) -> budget_.AgentLoss:
        """What every agent loses to the target's attacker."""
        code = self.code
        spent = discrete.concentrated_loss(
            code.moved(_relation(target)),
            code.variance,
            self.part.cohort(target.agents),
            code.padded,
            rounds=target.rounds,
            participations=target.pattern.epochs,
            # How far replacing moves is in it.
            relation="zero_out",
            # One vector an agent is drawn anew.
            failure=code.beta if code.records > 1 else 0.0,
        )
        # The same for all agents, who have equal shares.
        ones = np.ones(target.agents)
        epsilon = spent.epsilon(target.budget.delta) * ones
        return budget_.AgentLoss("zcdp", spent.rho * ones, epsilon, epsilon, spent.failure)

    def privatizer(self, target: Target) -> DrawnNoise:
        """How it is drawn."""
        return DrawnNoise(_encoded, (target.rounds, self.code), decode=_decoded)


def _encoded(
    arrays: Arrays, key: PRNGKeyArray, rounds: int, code: SumCode
) -> optax.GradientTransformation:
    return noise_.discrete(code, key=key, rounds=rounds)


def _decoded(rounds: int, code: SumCode, total: Array, key: PRNGKeyArray, like: Updates) -> Updates:
    return noise_.opened(code, total, key, like)
