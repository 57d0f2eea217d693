"""What a run costs, before it is stated at a delta: Gaussian, sampled, concentrated, pure.

    Gaussian        mu-GDP; epsilon is exact
    Pld             Gaussian noise on Poisson-sampled batches; numerical, from above
    Concentrated    rho-zCDP, but for a probability that is part of delta
    Pure            epsilon-DP at every delta

Each kind composes with its own. A Gaussian also goes into `Pld` and `Concentrated`, a pure loss
into `Concentrated`; what is left is refused, with the form in which both can be stated.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, hypot, inf, isinf, log, log1p, sqrt
from types import ModuleType
from typing import Any, ClassVar, Literal, Self, TypeAlias, get_args

import numpy as np

from dpjax import _validate
from dpjax.accounting import gdp
from dpjax.accounting.arrays import Pattern
from dpjax.accounting.loss import Loss, checked_delta, lowest
from dpjax.accounting.rounding import MARGIN, up
from dpjax.accounting.sampled import Phase, Pld

__all__ = ["Concentrated", "Gaussian", "Pld", "Pure"]

_Reason: TypeAlias = Literal["correlated", "schedule", "sampler", "phases"]


class _Summed(Loss):
    """A loss of one number, which adds up over rounds, as it is or squared.

    Attributes:
        parameter: The number's name.
        symbol: What texts call it.
        flag: The name of what says that every round costs the same in which what is protected
            takes part; else the whole loss is spent from the first round on.
        participation: (epochs, separation) of what is protected; None where it may take part in
            all rounds.
    """

    parameter: ClassVar[str]
    symbol: ClassVar[str]
    flag = "even"
    squared = False
    participation: Pattern | None = None

    def __post_init__(self) -> None:
        """Refuse what is no loss, and participations that are none."""
        for name in (self.parameter, "failure"):
            value = getattr(self, name)
            if value is None or not value >= 0:
                raise ValueError(f"{name} is {value}; give a number >= 0")
        _validate.integer("rounds", self.rounds, minimum=0)
        _validate.flag(self.flag, getattr(self, self.flag))
        pair: Any = self.participation
        if pair is not None:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(f"participation is {pair!r}; give (epochs, separation), or None")
            _validate.integer("participation[0]", pair[0], minimum=0, maximum=self.rounds)
            _validate.integer("participation[1]", pair[1])

    @property
    def size(self) -> float:
        """The number: mu, rho or epsilon."""
        return getattr(self, self.parameter)

    @property
    def pattern(self) -> Pattern | None:
        """(epochs, separation) of what is protected, as a statement says it."""
        return self.participation

    def size_text(self) -> str:
        """The number, for a statement."""
        return f", {self.symbol} = {up(self.size)}"

    def share(self, rounds: int) -> float:
        """The share of the loss, or of its square, that the first rounds have spent at most."""
        # Nothing was sent yet.
        if rounds == 0:
            return 0.0
        # What part of correlated noise the first rounds show is not known here.
        if not getattr(self, self.flag):
            return 1.0
        if self.participation is None:
            return rounds / self.rounds
        return _begun(self.participation, rounds)[0] / max(self.participation[0], 1)

    def part(self, rounds: int, share: float) -> Self:
        """The first rounds, which have spent a share of the loss, or of its square.

        Args:
            rounds: Rounds t.
            share: At most 1.
        """
        changes: Any = {self.parameter: self.size * self.scale(share) if share else 0.0}
        if self.participation is not None:
            changes["participation"] = _begun(self.participation, rounds)
        return replace(self, rounds=rounds, **changes)  # type: ignore[type-var]

    @classmethod
    def scale(cls, share: float) -> float:
        """What part of the loss a share of it, or of its square, is, rounded up.

        Args:
            share: At most 1.
        """
        return min(1.0, (sqrt(share) if cls.squared else share) * MARGIN)

    def first_rounds(self, rounds: int) -> Self:
        """The share that these rounds have spent at most."""
        return self.part(rounds, self.share(rounds))


@lru_cache(maxsize=256)  # Each record of one loss asks for it, at a millisecond each.
def _epsilon(mu: float, delta: float) -> float:
    return float(gdp.epsilon(mu, delta))


@dataclass(frozen=True)
class Gaussian(_Summed):
    """Gaussian DP: as hard to tell apart as N(0, 1) and N(mu, 1).

    Guarantee: `epsilon` is never below the exact one, see `dpjax.accounting.gdp.epsilon`.

    Attributes:
        mu: Of all rounds together.
        rounds: Rounds T.
        white: True where the noise is independent between rounds; else the whole loss is spent
            from the first round on.
        participation: (epochs, separation) of what is protected; None where it may take part in
            all rounds.
        over_rounds: Why ``white`` is False: "correlated" noise, a scale by "schedule", a "sampler"
            by which records are in some rounds alone, perhaps the first, or "phases" of several
            runs. None where it is True, where gradients are a "view", and in older records.

    Example:
        >>> from dpjax.accounting import losses
        >>> loss = losses.Gaussian(mu=1.0, rounds=100)
        >>> round(loss.epsilon(1e-5), 3), round(loss.after(25).mu, 3)
        (4.377, 0.5)
    """

    kind = "gdp"
    flag = "white"
    squared = True
    parameter = symbol = "mu"
    mu: float
    rounds: int = 1
    white: bool = True
    participation: Pattern | None = None
    over_rounds: _Reason | None = None

    def __post_init__(self) -> None:
        """Refuse what is no mu, and reasons why noise that is white is not."""
        super().__post_init__()
        if self.over_rounds is not None:
            _validate.one_of("over_rounds", self.over_rounds, get_args(_Reason))
            if self.white:
                raise ValueError(
                    f"over_rounds is {self.over_rounds!r} of noise that is white over rounds; "
                    "leave it out, or give white=False"
                )

    def epsilon(self, delta: float) -> float:
        """The least epsilon at delta, rounded up."""
        return _epsilon(self.mu, delta)

    def dp_event(self, events: ModuleType, delta: float) -> Any:
        """One Gaussian, or as many as there are rounds that cost the same."""
        del delta
        if self.mu == 0:
            return events.NoOpDpEvent()
        if isinf(self.mu):
            return events.NonPrivateDpEvent()
        times = self.rounds
        if self.participation is not None:
            times = self.participation[0]
        if not self.white or times < 2:
            return events.GaussianDpEvent(1 / self.mu)
        return events.SelfComposedDpEvent(events.GaussianDpEvent(sqrt(times) / self.mu), times)

    def plus(self, later: "Gaussian") -> "Gaussian":
        """Both mus, squared and added."""
        mu = hypot(self.mu, later.mu) * MARGIN
        rounds = self.rounds + later.rounds
        return Gaussian(mu, rounds, False, _both(self, later), "phases")

    def in_form_of(self, other: Loss) -> Loss:
        """As a `Pld`, of which it is the case that every record is drawn, or as zCDP."""
        if isinstance(other, Pld):
            return self.sampled(other.agents)
        return self.concentrated() if isinstance(other, Concentrated) else self

    def concentrated(self) -> "Concentrated":
        """The same loss as zCDP: rho = mu^2 / 2, rounded up."""
        # A unit that is not in all rounds may be in the first ones.
        even = self.white and self.participation is None
        return Concentrated(float(gdp.zcdp(self.mu)), self.rounds, even)

    def sampled(self, agents: int) -> Pld:
        """The same loss as a `Pld` in which nothing is amplified.

        Args:
            agents: Agents n, all with this loss.
        """
        at_once = not (self.white and self.participation is None and self.rounds)
        ratio = self.mu if at_once else self.mu / sqrt(self.rounds) * MARGIN
        return Pld((Phase((1.0,) * agents, (ratio,) * agents, self.rounds, whole=at_once),))


@dataclass(frozen=True)
class Concentrated(_Summed):
    """rho-zCDP: every Renyi divergence of order alpha is at most rho alpha.

    Guarantee: `epsilon` is never below what the definition implies at its best order, up to the
    search over orders, which any of them makes safe. With a ``failure`` p it is of measures that
    lack at most p of the outputs' probability: P(S) <= M(S) + p and M(S) <= e^epsilon M'(S) +
    delta', M' being at most P', so that what is stated at delta is epsilon at delta - p.

    Attributes:
        rho: Of all rounds together.
        rounds: Rounds T.
        even: True where every round costs the same in which what is protected takes part; else the
            whole loss is spent from the first round on.
        participation: (epochs, separation) of what is protected; None where it may take part in
            all rounds.
        failure: p, of all rounds together: whole from the first on.

    Reference:
        Bun and Steinke (2016); Canonne, Kamath and Steinke (2020), Proposition 12, for epsilon.

    Example:
        >>> from dpjax.accounting import losses
        >>> round(losses.Concentrated(rho=0.5).epsilon(1e-5), 3)
        4.728
    """

    kind = "zcdp"
    parameter = "rho"
    symbol = "rho"
    accounting = "accounted by concentrated DP (zCDP)"
    no_total = (
        "failure is above 0 of a simulated phase, whose total keeps no part of delta for "
        "roundings; state the runs apart"
    )
    rho: float
    rounds: int = 1
    even: bool = False
    participation: Pattern | None = None
    failure: float = 0.0

    def size_text(self) -> str:
        """rho, and what of delta is no part of it."""
        rounding = f", and {up(self.failure)} of delta for rounding" if self.failure else ""
        return super().size_text() + rounding

    def epsilon(self, delta: float) -> float:
        """The epsilon at delta of the best order found, rounded up."""
        delta = checked_delta(delta) - self.failure
        if self.rho == 0 <= delta:
            return 0.0
        if delta <= 0 or isinf(self.rho):
            return inf

        def bound(log_excess: float) -> float:
            # With alpha = 1 + a: rho alpha + log(1 - 1/alpha) + (log(1/delta) - log alpha) / a.
            a = exp(log_excess)
            tail = -(log(delta) + log1p(a)) / a
            terms = (self.rho * (1 + a), -log1p(1 / a), tail)
            return sum(terms) + 1e-14 * sum(map(abs, terms))

        # Without log alpha the best a is sqrt(log(1 / delta) / rho).
        centre = 0.5 * log(max(-log(delta), 1e-3) / self.rho)
        grid = np.linspace(centre - 6, centre + 6, 121)
        # Every order is safe, so that a local minimum costs tightness alone.
        _, *bounds = lowest(bound, grid)
        return max(0.0, min(bounds))

    def dp_event(self, events: ModuleType, delta: float) -> Any:
        """An event of the same rho; refused where that is not all."""
        if self.failure:
            return super().dp_event(events, delta)
        return events.ZCDpEvent(self.rho)

    def plus(self, later: "Concentrated") -> "Concentrated":
        """The sums of both rhos, and of what either lacks."""
        rho = (self.rho + later.rho) * MARGIN
        failure = (self.failure + later.failure) * MARGIN
        rounds = self.rounds + later.rounds
        return Concentrated(rho, rounds, participation=_both(self, later), failure=failure)


@dataclass(frozen=True)
class Pure(_Summed):
    """epsilon-DP at every delta: Laplace noise.

    Guarantee: `epsilon` is the bound itself, also where delta would allow for less.

    Attributes:
        bound: Epsilon of all rounds together.
        rounds: Rounds T.
        even: As in `Concentrated`.

    Example:
        >>> from dpjax.accounting import losses
        >>> losses.Pure(bound=2.0).epsilon(0.0)
        2.0
    """

    kind = "pure"
    parameter = "bound"
    symbol = "epsilon"
    accounting = "accounted by adding up epsilons"
    caveat = ", of noise in exact arithmetic"
    bound: float
    rounds: int = 1
    even: bool = False

    def epsilon(self, delta: float) -> float:
        """The bound, whatever delta."""
        checked_delta(delta)
        return self.bound

    def plus(self, later: "Pure") -> "Pure":
        """The sum of both bounds."""
        return Pure((self.bound + later.bound) * MARGIN, self.rounds + later.rounds)

    def in_form_of(self, other: Loss) -> Loss:
        """As zCDP, which a pure loss implies, and not the other way."""
        return self.concentrated() if isinstance(other, Concentrated) else self

    def size_text(self) -> str:
        """Nothing: the number is the epsilon that is stated."""
        return ""

    def concentrated(self) -> Concentrated:
        """The same loss as zCDP: rho = epsilon^2 / 2, rounded up.

        Reference:
            Bun and Steinke (2016), Proposition 1.4.
        """
        return Concentrated(float(gdp.zcdp(self.bound)), self.rounds)


def _begun(participation: Pattern, rounds: int) -> Pattern:
    """(epochs, separation) in the first rounds, at most."""
    epochs, separation = participation
    return min(epochs, -(-rounds // separation)), separation


def _both(first: _Summed, later: _Summed) -> Pattern | None:
    """(epochs, separation) of two runs in a row; the separations are equal."""
    earlier = first.participation
    latter = later.participation
    if earlier is None or latter is None:
        return None
    return earlier[0] + latter[0], earlier[1]
