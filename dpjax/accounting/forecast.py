"""A forecast before training: the noise in the average model beside what gradients can move it.

D-SGD ends at  mean_T = mean_0 - sum_t eta_t sum_i a_ti (G_ti + V_ti) / B.  The a_ti, which sum to
1 over agents, say how far what agent i sends in round t reaches the average of the final models
(1/n each where mixing is doubly stochastic); B divides sums over records (1 for the agent unit).

    drift   Every clipped gradient has norm at most C (a sum of B clipped records B C), so the
            gradients together move the average by at most C sum_t eta_t, and by that much when
            all of them are clipped and point the same way.
    noise   With covariance R = F F' over agents and C^-1 over rounds, a coordinate of the noise
            in the average has variance  ||C^-T Y||^2 / B^2,  Y_t = eta_t F' a_t, and d
            coordinates have sqrt(d) times its root as root mean square.

Their ratio has a floor that no design can pass. The average is a function of what is sent, so its
noise alone must hide whatever the relation changes: at most s in each round that takes part
(s = 2C, or C under zero-out), which moves the average by  s sum_{t in pi} eta_t a_ti / B. Hence a
standard deviation of at least that over mu_i in every coordinate, and

    ratio >= sqrt(d) max_i s sum_{t in pi} eta_t a_ti / (mu_i B C sum_t eta_t)
           = 2 sqrt(d) / (n mu)      agent unit, doubly stochastic mixing, one budget
           = 2 sqrt(d) / (n B mu)    a record in every round
           = 2 sqrt(d) / (N mu)      records that take part k times in T = k b rounds, N = n B b

whatever T, C, the steps and the correlation. Where agents draw their noise apart, each must hide
its own part, and variances add up: 2 sqrt(d) / (sqrt(n) mu) in the first, and sqrt(n) times the
others. The forecast reads the plan and no data: it costs no privacy and states no guarantee.

What remains in agents' own models around the average, X_T - mean_T, is noise of

    X_t+1 = W_t (X_t - eta_t F (C^-1 Z)_t / B)

less its mean. Noise that cancels in the average, or networks that mix slowly, leave much of it.
`disagreement` draws it. That costs no array [n, n], and has an error of a tenth at most where a
few slow modes of W hold all of it, else of a few percent.
"""

from dataclasses import dataclass
from math import ceil, floor, inf, sqrt
from typing import Any, Literal

import numpy as np
import scipy.linalg
import scipy.sparse.linalg
from numpy.typing import ArrayLike

from dpjax import _validate
from dpjax.accounting import budget, parties, precision
from dpjax.accounting.arrays import Matrix, Numbers, Pattern, Vector
from dpjax.accounting.loss import AmplifiedLoss

__all__ = ["Forecast"]

GOOD = {"agent": 0.5, "record": 0.2}
"""Noise over the largest drift, by unit, up to which most of what can be learned is learned.

Measured, not derived: the page 'Model size: the forecast' of the manual says how. Clipped gradients
of single records agree less than those of agents, so they come less close to the largest drift.
"""
HOPELESS = {"agent": 4.5, "record": 2.0}
"""Noise over the largest drift, by unit, from which next to nothing is learned; measured likewise.
"""

# How much is drawn for a disagreement: numbers in a round, in all where rounds share noise, and
# rounds.
_NUMBERS = 4096
_STORED = 2**24
_ROUNDS = 1000

_Level = Literal["learns", "poor", "hopeless"]

_MEANING: dict[str, str] = {
    "learns": "expect it to learn",
    "poor": "expect it to learn poorly",
    "hopeless": "expect it to learn next to nothing",
}


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Noise against the largest drift of the average model, and what would change it.

    Attributes:
        parameters: d.
        agents: n.
        unit: What is clipped, "agent" or "record".
        batch_size: B.
        mu: Gaussian-DP parameter of the run; infinity when non-private.
        delta: Delta of the budget.
        accountant: How an epsilon follows from mu, "gdp" or "rdp".
        rate: Ratio for one parameter; the ratio is ``rate * sqrt(parameters)``.
        floor_rate: What no design of the same budget can pass, for one parameter.
        apart_rate: What no design can pass whose agents draw their noise apart.
        independent: True where agents draw their noise apart (R is diagonal).
        disagreement_rate: Noise in agents' own models around the average, over the largest drift
            and for one parameter; 0 for methods that do not gossip models.
        sampled: The run's loss where batches are secret and amplify; mu then is the same noise's
            on known batches, from which epsilon does not follow.
        largest_batch: Records of the smallest agent, which no batch exceeds; infinity where
            unknown. The batch's own size where a larger one changes how often a record takes part.

    Example:
        >>> import dpjax as dp
        >>> parts = dict(sampler=dp.samplers.Random(1), optimizer=dp.optimizers.Sgd(0.1), rounds=10)
        >>> parts |= dict(noise=dp.noise.Independent(), budget=dp.Budget(8.0, delta=1e-5))
        >>> config = dp.Config(protect=dp.Protect("replace_agent", clip_norm=1.0), **parts)
        >>> plan = dp.make_plan(config, dp.mixing.metropolis_hastings(dp.graphs.ring(3)))
        >>> plan.forecast(parameters=10).unit
        'agent'
    """

    parameters: int
    agents: int
    unit: str
    batch_size: float
    mu: float
    delta: float
    accountant: budget.Accountant
    rate: float
    floor_rate: float
    apart_rate: float
    independent: bool
    disagreement_rate: float = 0.0
    sampled: AmplifiedLoss | None = None
    largest_batch: float = inf

    @property
    def ratio(self) -> float:
        """Root mean square of the noise in the average model over the largest drift."""
        return self.rate * sqrt(self.parameters)

    @property
    def disagreement(self) -> float:
        """Root mean square of the noise in agents' own models around the average, likewise."""
        return self.disagreement_rate * sqrt(self.parameters)

    @property
    def floor(self) -> float:
        """The least ratio that any design has under this budget."""
        return self.floor_rate * sqrt(self.parameters)

    @property
    def level(self) -> _Level:
        """ "learns" up to `GOOD` of the unit, "hopeless" from `HOPELESS`, "poor" between.

        It is that of the larger one of ratio and disagreement.
        """
        if self._worst <= self.good:
            return "learns"
        return "poor" if self._worst < HOPELESS[self.unit] else "hopeless"

    @property
    def good(self) -> float:
        """The ratio to reach, `GOOD` of the unit."""
        return GOOD[self.unit]

    def affords(self, ratio: float | None = None) -> float:
        """The largest model that keeps a ratio on this network under this budget.

        Args:
            ratio: Not to exceed, by the disagreement neither; None is `good`.

        Returns:
            Parameters, a whole number; infinity without noise.
        """
        limit = self._wanted(ratio)
        if self.rate == 0:
            return inf
        return float(floor((limit / max(self.rate, self.disagreement_rate)) ** 2))

    def epsilon(self, ratio: float | None = None) -> float:
        """The epsilon at which this design keeps a ratio; of the largest, where budgets differ.

        Args:
            ratio: Not to exceed, by the disagreement neither; None is `good`.

        Returns:
            Epsilon at the same delta; 0 without noise.
        """
        if self.rate == 0:
            return 0.0
        factor = self._worst / self._wanted(ratio)
        if self.sampled is not None:
            return self.sampled.scaled(factor).epsilon(self.delta)
        return float(
            budget.claimed_epsilon(self.mu * factor, self.delta, accountant=self.accountant)
        )

    def agents_needed(self, ratio: float | None = None) -> int:
        """About how many agents keep a ratio of the average under the same budget and design.

        The ratio falls with n where noise is shared, with sqrt(n) where agents draw it apart.

        Args:
            ratio: Ratio not to exceed; None is `good`.
        """
        times = max(self.ratio / self._wanted(ratio), 1.0)
        return ceil(self.agents * (times**2 if self.independent else times) * (1 - 1e-12))

    @property
    def _worst(self) -> float:
        return max(self.ratio, self.disagreement)

    def _wanted(self, ratio: float | None) -> float:
        return self.good if ratio is None else _validate.positive("ratio", ratio)

    def caption(self) -> str:
        """One line: the ratio and what it means."""
        if self.rate == 0:
            return "no noise"
        text = f"d = {self.parameters:,}: noise {_short(self.ratio)} times the largest drift"
        # The larger of the two decides the level.
        if self.disagreement > self.ratio:
            text += f" ({_short(self.disagreement)} between agents)"
        return f"{text}, {_MEANING[self.level]}"

    def statement(self) -> str:
        """A few lines: the forecast and, unless it learns, what would help, with numbers."""
        if self.rate == 0:
            return "forecast: no noise is added"
        batches = ""
        if self.unit == "record":
            batches = f" and batches of {self.batch_size:,.9g}"
        size = _validate.counted(self.parameters, "parameter")
        text = (
            f"forecast for {size}{batches}: noise in the average model is "
            f"{_short(self.ratio)} times the largest drift\n  (how far clipped gradients can move "
            f"the model); no design of this budget has less than {_short(self.floor)}."
        )
        if self.disagreement:
            text += (
                f"\n  Around the average, in agents' own models, it is {_short(self.disagreement)}."
            )
        text += (
            f" {_MEANING[self.level].capitalize()}.\n  A class with a tenth of the records has a "
            f"tenth of the drift: for it the ratio is {_short(10 * self.ratio)}."
        )
        if self.level == "learns":
            size_text = _validate.counted(self.affords(), "parameter")
            return f"{text}\n  With this noise models of up to {size_text} can learn."
        if self.level == "poor":
            text += (
                f"\n  From {self.good:g} to {HOPELESS[self.unit]:g} a model keeps from most to "
                "next to nothing of what it learns without noise:\n  the page 'Model size: the "
                "forecast' of the manual has the numbers."
            )
        text += f"\n  To reach {self.good:g}, where it can learn, any one of:"
        return "\n    - ".join([text, *self._remedies()])

    def _remedies(self) -> list[str]:
        if self.unit == "agent":
            # A batch divides the noise of a record's sum by its size.
            needed = ceil(self._worst / GOOD["record"])
            batches = (
                f"records protected in place of agents, with batches of {needed:,}, which divide "
                f"the noise: to {GOOD['record']:g}, as records need{self._records(needed, 1)}"
            )
        else:
            needed = ceil(self.batch_size * self._worst / self.good)
            batches = (
                f"batches of {needed:,} in place of {self.batch_size:,.9g}"
                f"{self._records(needed, self.batch_size)}"
            )
        partly = "a part of the way" if self.floor > self.good else "at best"
        shared = (
            f"noise that agents share (whisper_horizon), down to {_short(self.floor)}, {partly}; "
            "they are then not protected from each other"
        )
        agents = f"about {self.agents_needed():,} agents in place of {self.agents:,}"
        gossip = (
            "more gossip between rounds (DSGD(gossip_steps=...)) or a denser network, by which "
            f"agents agree; the average alone has {_short(self.ratio)}"
        )
        if self.disagreement > self.ratio > self.good:
            # Neither is enough alone: agents who agree have the average's noise.
            agents = f"{agents}, and {gossip}"
        elif self.disagreement > self.ratio:
            agents = gossip
        epsilon = f"epsilon {_short(self.epsilon(), 3)} at the same delta"
        if self.epsilon() > parties.VACUOUS:
            epsilon += f", which is vacuous: odds may change by more than e^{parties.VACUOUS:g}"
        size = self.affords()
        smaller = f"a smaller model, of at most {_validate.counted(size, 'parameter')}"
        remedies = [agents, epsilon, batches]
        if size >= 1:
            remedies.insert(0, smaller)
        if self.independent and self.floor < self.ratio / 2:
            remedies.append(shared)
        return remedies

    def _records(self, needed: int, batch_size: float) -> str:
        """What larger batches take where agents have too few records for them."""
        if needed <= self.largest_batch:
            return ""
        largest = max(self.largest_batch, batch_size)
        text = f"; these take about {_short(needed / largest)} times as many records"
        if batch_size < largest:
            ratio = _short(self._worst * batch_size / largest)
            text += f" (batches of {largest:,}, all records of the smallest agent, reach {ratio})"
        return text


def _short(value: float, digits: int = 2) -> str:
    """A number without an exponent, of a few digits where it has no more before the point."""
    return f"{value:.{digits}g}" if value < 10**digits else f"{value:,.0f}"


def weights(mixing: Any, rounds: int) -> Matrix:
    """How far what agents send in each round reaches the average of the final models.

    a_T = W' 1/n for the last round, a_t = W_t' a_t+1 before; rows sum to 1.

    Args:
        mixing: [n, n] row-stochastic W, dense or sparse, or a schedule [P, n, n], round t using
            W_{t mod P}.
        rounds: T.

    Returns:
        [T, n], or [1, n] where all rounds are alike, as for doubly stochastic mixing.
    """
    schedule = [mixing] if mixing.ndim == 2 else mixing
    n = mixing.shape[-1]
    if all(np.allclose(matrix.sum(axis=0), 1.0, rtol=0, atol=1e-12) for matrix in schedule):
        return np.full((1, n), 1 / n)
    _validate.memory("rounds", rounds, "the weight of every round and agent [T, n]", 3, rounds, n)
    reached = np.empty((rounds, n))
    current = np.full(n, 1 / n)
    for t in range(rounds - 1, -1, -1):
        current = current @ schedule[t % len(schedule)]
        reached[t] = current
    return reached


def forecast(
    parameters: int,
    *,
    factor: Any,
    reach: Matrix,
    step_sizes: Vector,
    patterns: Pattern,
    clip_norm: float,
    relation: budget.Relation,
    batch_size: float,
    mu: float,
    delta: float,
    accountant: budget.Accountant = "gdp",
    strategy: Matrix | None = None,
    budgets: ArrayLike | None = None,
    fill_share: ArrayLike = 1.0,
    sampled: AmplifiedLoss | None = None,
    spread: float = 0.0,
    records: float = inf,
) -> Forecast:
    """Return the forecast of a run from the noise that it adds.

    Args:
        parameters: d, entries of one agent's model.
        factor: [n, q] F, F F' being the covariance over agents; zero is no noise. Or [n], the
            diagonal of one that has nothing else; or a ``LinearOperator``.
        reach: [T, n] or [1, n] a_ti, from `weights`.
        step_sizes: [T] eta_t; their scale does not matter.
        patterns: (epochs k, separation b), the rounds of what the relation changes: any start.
        clip_norm: C.
        relation: Neighbouring relation.
        batch_size: B, by which sums over records are divided; unused for the agent unit.
        mu: Gaussian-DP parameter of the whole run, the largest over agents.
        delta: Delta.
        accountant: How epsilons are told.
        strategy: [T, T] C over rounds; None is fresh noise.
        budgets: [n] mu_i that each agent's budget allows; None is ``mu`` for all.
        fill_share: How much of a batch is records, [n] or [T, n]; the rest is padding.
        sampled: The loss where secret batches amplify, ``mu`` being that of known ones.
        spread: What `disagreement` returned; 0 leaves it out.
        records: Those of the agent with the fewest; infinity where unknown.

    Returns:
        The forecast.

    Raises:
        ValueError: For a number of parameters below 1.
    """
    parameters = _validate.integer("parameters", parameters)
    colour = _operator(factor)
    steps = np.asarray(step_sizes, float) / np.max(step_sizes)
    n = colour.shape[0]
    unit = budget.clips(relation)
    divisor = batch_size if unit == "record" else 1
    sent = steps[:, None] * np.broadcast_to(reach, (len(steps), n))
    # All gradients of one direction, each as long as its clip allows.
    drift = float(clip_norm * (sent * fill_share).sum())

    def over_rounds(responses: Numbers) -> float:
        """|C^-T Y|, whose square is the variance of sum_t y_t' (C^-1 Z)_t."""
        if strategy is not None:
            responses = scipy.linalg.solve_triangular(strategy, responses, lower=True, trans="T")
        return float(np.linalg.norm(responses))

    if len(reach) == 1:
        # One product of rounds and agents: a column in place of n.
        agent_noise = float(np.linalg.norm(colour.T @ reach.T))
        noise = over_rounds(steps[:, None]) * agent_noise / divisor
    else:
        noise = over_rounds((colour.T @ sent.T).T) / divisor
    # No design gives an agent less noise than its own budget asks for.
    allowed = np.full(n, mu) if budgets is None else np.asarray(budgets, float)
    # The largest sum over the rounds of a pattern, any start.
    epochs, separation = patterns
    starts = len(sent) - (epochs - 1) * separation
    moved: Any = 0
    for epoch in range(epochs):
        first = epoch * separation
        moved = moved + sent[first : first + starts]
    hidden = budget.clipped_sensitivity(relation, clip_norm) / divisor * moved.max(axis=0)
    floors = hidden / allowed if noise else np.zeros(n)
    independent = scipy.sparse.issparse(colour)
    if isinstance(colour, np.ndarray):
        independent = precision.diagonal_of(colour @ colour.T) is not None
    if unit == "record" and (separation > 1 or sampled is not None):
        # A batch that grows alone takes each record in more rounds, or with a larger rate.
        records = batch_size
    return Forecast(
        parameters=parameters,
        agents=n,
        unit=unit,
        batch_size=batch_size,
        mu=mu,
        delta=delta,
        accountant="rdp" if accountant == "rdp" else "gdp",
        rate=noise / drift,
        floor_rate=float(floors.max()) / drift,
        apart_rate=float(np.linalg.norm(floors)) / drift,
        independent=independent,
        disagreement_rate=spread / divisor / drift,
        sampled=sampled,
        largest_batch=records,
    )


def disagreement(
    factor: Any,
    mixing: Any,
    step_sizes: Vector,
    strategy: Matrix | None = None,
    gossip_steps: int = 1,
) -> float:
    """Return the root mean square of the noise in agents' models around their average at the end.

    It is drawn for as many coordinates as make some thousand numbers, from a fixed seed. Of noise
    that is white over rounds the last thousand rounds count.

    Args:
        factor: As in `forecast`.
        mixing: As in `weights`.
        step_sizes: As in `forecast`.
        strategy: As in `forecast`.
        gossip_steps: Products with W in every round.

    Returns:
        It, of one coordinate, in units of what is clipped and of the largest step.
    """
    colour = _operator(factor)
    schedule = [mixing] if mixing.ndim == 2 else list(mixing)
    n, sources = colour.shape
    rounds = len(step_sizes)
    coordinates = max(1, min(_NUMBERS, _STORED // rounds) // n)
    steps = np.asarray(step_sizes, float) / np.max(step_sizes)
    normals = np.random.default_rng(0).standard_normal
    shape = (sources, coordinates)
    first = max(0, rounds - _ROUNDS)
    drawn: Any = None
    if strategy is not None:
        # What is sent in a round holds normals of all rounds before it.
        first = 0
        white = normals((rounds, sources * coordinates))
        drawn = scipy.linalg.solve_triangular(strategy, white, lower=True)
    models = np.zeros((n, coordinates))
    for t in range(first, rounds):
        noise = normals(shape) if drawn is None else drawn[t].reshape(shape)
        models -= steps[t] * (colour @ noise)
        for _ in range(gossip_steps):
            models = schedule[t % len(schedule)] @ models
    return float(np.sqrt(models.var(axis=0).mean()))


def _operator(factor: Any) -> Any:
    """F as what multiplies columns, sparse where it is a diagonal."""
    if isinstance(factor, scipy.sparse.linalg.LinearOperator):
        return factor
    diagonal = precision.diagonal_of(np.asarray(factor))
    if diagonal is None:
        return np.asarray(factor, float)
    return scipy.sparse.diags_array(np.asarray(diagonal, float)).tocsr()
