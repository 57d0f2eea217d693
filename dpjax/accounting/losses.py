"""What a run costs, before it is stated at a delta: Gaussian, sampled, concentrated, pure.

    Gaussian        mu-GDP; epsilon is exact
    Pld             Gaussian noise on Poisson-sampled batches; numerical, from above
    Concentrated    rho-zCDP
    Pure            epsilon-DP at every delta

Each kind composes with its own. A Gaussian also goes into `Pld` and `Concentrated`, a pure loss
into `Concentrated`; what is left is refused, with the form in which both can be stated.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from dpjax import _validate
from dpjax._numerics import MARGIN
from dpjax.accounting import gdp
from dpjax.accounting.sampled import Phase, Pld

__all__ = ["Concentrated", "Gaussian", "Phase", "Pld", "Pure"]


@dataclass(frozen=True)
class Gaussian:
    """Gaussian DP: as hard to tell apart as N(0, 1) and N(mu, 1).

    Guarantee: `epsilon` is never below the exact one, see `dpjax.accounting.gdp.epsilon`.

    Attributes:
        mu: Of all rounds together.
        rounds: Rounds T.
        white: True where the noise is independent between rounds; else the whole loss is spent
            from the first round on.
        participation: (epochs, separation) of what is protected; None where it may take part in
            all rounds.
        over_rounds: Why ``white`` is False: "correlated" noise, a scale by "schedule", or "phases"
            of several runs; None where it is True, and in older records.

    Example:
        >>> from dpjax.accounting import losses
        >>> loss = losses.Gaussian(mu=1.0, rounds=100)
        >>> round(loss.epsilon(1e-5), 3), round(loss.after(25).mu, 3)
        (4.377, 0.5)
    """

    kind: ClassVar[str] = "gdp"
    mu: float
    rounds: int = 1
    white: bool = True
    participation: tuple[int, int] | None = None
    over_rounds: Literal["correlated", "schedule", "phases"] | None = None

    def __post_init__(self) -> None:
        """Refuse what is no mu, and reasons why noise that is white is not."""
        if self.mu is None or not self.mu >= 0:
            raise ValueError(f"mu is {self.mu}; give a number >= 0")
        _validate.integer("rounds", self.rounds, least=0)
        _validate.flag("white", self.white)
        _check_participation(self.participation, self.rounds)
        if self.over_rounds is not None:
            _validate.one_of("over_rounds", self.over_rounds, ("correlated", "schedule", "phases"))
            if self.white:
                raise ValueError(
                    f"over_rounds is {self.over_rounds!r} of noise that is white over rounds; "
                    "leave it out, or give white=False"
                )

    def epsilon(self, delta: float) -> float:
        """The least epsilon at delta, rounded up."""
        return float(gdp.epsilon(self.mu, delta))

    def share(self, rounds: int) -> float:
        """The share of mu^2 that the first rounds have spent at most, not rounded."""
        if rounds == 0:
            return 0.0
        if not self.white:
            return 1.0
        if self.participation is None:
            return rounds / self.rounds
        first = _begun(self.participation, rounds)
        return first[0] / max(self.participation[0], 1)

    def after(self, rounds: int) -> "Gaussian":
        """What the first rounds cost, their number fixed beforehand.

        mu_t = mu sqrt(t / T), or mu sqrt(ceil(t / b) / k) where a record takes part k times, b
        rounds apart; the whole loss for noise correlated over rounds.
        """
        return self.part(_first(rounds, self.rounds), self.share(rounds))

    def part(self, rounds: int, share: float) -> "Gaussian":
        """The first rounds, which have spent a share of mu^2.

        Args:
            rounds: Rounds t.
            share: At most 1.
        """
        given = self.participation
        return dataclasses.replace(
            self,
            mu=self.mu * root(share),
            rounds=rounds,
            participation=None if given is None else _begun(given, rounds),
        )

    def then(self, later: "AnyLoss") -> "AnyLoss":
        """What this and a later run cost together, both planned: mu^2 adds up."""
        if not isinstance(later, Gaussian):
            return _lifted(self, later).then(later)
        mu = math.hypot(self.mu, later.mu) * MARGIN
        participation = None
        if self.participation is not None and later.participation is not None:
            epochs = self.participation[0] + later.participation[0]
            participation = epochs, self.participation[1]
        return Gaussian(mu, self.rounds + later.rounds, False, participation, "phases")

    def concentrated(self) -> "Concentrated":
        """The same loss as zCDP: rho = mu^2 / 2, rounded up."""
        even = self.white and self.participation is None
        return Concentrated(float(gdp.zcdp(self.mu)), self.rounds, even)

    def sampled(self, agents: int) -> Pld:
        """The same loss as a `Pld` in which nothing is amplified.

        Args:
            agents: Agents n, all with this loss.
        """
        if self.white and self.participation is None and self.rounds:
            ratio = self.mu / math.sqrt(self.rounds) * MARGIN
            return Pld((Phase((1.0,) * agents, (ratio,) * agents, self.rounds),))
        return Pld((Phase((1.0,) * agents, (self.mu,) * agents, self.rounds, whole=True),))


@dataclass(frozen=True)
class Concentrated:
    """rho-zCDP: every Renyi divergence of order alpha is at most rho alpha.

    Guarantee: `epsilon` is never below what the definition implies at its best order, up to the
    search over orders, which any of them makes safe.

    Attributes:
        rho: Of all rounds together.
        rounds: Rounds T.
        even: True where every round costs the same in which what is protected takes part; else the
            whole loss is spent from the first round on.
        participation: (epochs, separation) of what is protected; None where it may take part in
            all rounds.

    Reference:
        Bun and Steinke (2016); Canonne, Kamath and Steinke (2020), Proposition 12, for epsilon.

    Example:
        >>> from dpjax.accounting import losses
        >>> round(losses.Concentrated(rho=0.5).epsilon(1e-5), 3)
        4.728
    """

    kind: ClassVar[str] = "zcdp"
    rho: float
    rounds: int = 1
    even: bool = False
    participation: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Refuse what is no rho, and participations that are none."""
        if not self.rho >= 0:
            raise ValueError(f"rho is {self.rho}; give a number >= 0")
        _validate.integer("rounds", self.rounds, least=0)
        _validate.flag("even", self.even)
        _check_participation(self.participation, self.rounds)

    def epsilon(self, delta: float) -> float:
        """The epsilon at delta of the best order found, rounded up."""
        delta = _delta(delta)
        if self.rho == 0:
            return 0.0
        if delta == 0 or math.isinf(self.rho):
            return math.inf
        from scipy import optimize

        def bound(log_excess: float) -> float:
            # With alpha = 1 + a: rho alpha + log(1 - 1/alpha) + (log(1/delta) - log alpha) / a.
            a = math.exp(log_excess)
            terms = (self.rho * (1 + a), -math.log1p(1 / a), -(math.log(delta) + math.log1p(a)) / a)
            return sum(terms) + 1e-14 * sum(map(abs, terms))

        centre = 0.5 * math.log(max(-math.log(delta), 1e-3) / self.rho)
        grid = np.linspace(centre - 6, centre + 6, 121)
        values = [bound(one) for one in grid]
        best = int(np.argmin(values))
        around = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        minimum = optimize.minimize_scalar(bound, bounds=around, method="bounded")
        return max(0.0, min(values[best], bound(float(minimum.x))))

    def after(self, rounds: int) -> "Concentrated":
        """What the first rounds cost, their number fixed beforehand.

        rho t / T, or rho ceil(t / b) / k where a record takes part k times, b rounds apart.
        """
        given = self.participation
        if given is None:
            share = _share(rounds, self.rounds, self.even)
            return dataclasses.replace(self, rho=self.rho * share, rounds=rounds)
        first = _begun(given, _first(rounds, self.rounds))
        share = _share(first[0], given[0], self.even) if given[0] else 0.0
        return dataclasses.replace(self, rho=self.rho * share, rounds=rounds, participation=first)

    def then(self, later: "AnyLoss") -> "Concentrated":
        """What this and a later run cost together, both planned: rho adds up."""
        if isinstance(later, Pld):
            raise _refused(self, later)
        other = later if isinstance(later, Concentrated) else later.concentrated()
        both = None
        if self.participation is not None and other.participation is not None:
            both = self.participation[0] + other.participation[0], self.participation[1]
        rho, rounds = (self.rho + other.rho) * MARGIN, self.rounds + other.rounds
        return Concentrated(rho, rounds, participation=both)


@dataclass(frozen=True)
class Pure:
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

    kind: ClassVar[str] = "pure"
    bound: float
    rounds: int = 1
    even: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no epsilon."""
        if not self.bound >= 0:
            raise ValueError(f"bound is {self.bound}; give a number >= 0")
        _validate.integer("rounds", self.rounds, least=0)
        _validate.flag("even", self.even)

    def epsilon(self, delta: float) -> float:
        """The bound, whatever delta."""
        _delta(delta)
        return self.bound

    def after(self, rounds: int) -> "Pure":
        """What the first rounds cost, their number fixed beforehand."""
        share = _share(rounds, self.rounds, self.even)
        return dataclasses.replace(self, bound=self.bound * share, rounds=rounds)

    def then(self, later: "AnyLoss") -> "AnyLoss":
        """What this and a later run cost together, both planned: epsilons add up."""
        if isinstance(later, Pure):
            return Pure((self.bound + later.bound) * MARGIN, self.rounds + later.rounds)
        if isinstance(later, Concentrated):
            return self.concentrated().then(later)
        raise _refused(self, later)

    def concentrated(self) -> Concentrated:
        """The same loss as zCDP: rho = epsilon^2 / 2, rounded up.

        Reference:
            Bun and Steinke (2016), Proposition 1.4.
        """
        rho = float(gdp.zcdp(self.bound))
        return Concentrated(rho, self.rounds, False)


AnyLoss = Gaussian | Pld | Concentrated | Pure

KINDS: dict[str, Any] = {one.kind: one for one in (Gaussian, Pld, Concentrated, Pure)}
"""Losses by the name under which records store them."""


def from_dict(record: Mapping[str, Any]) -> AnyLoss:
    """The inverse of `dataclasses.asdict` with the loss's ``kind`` beside it.

    Args:
        record: Plain values, perhaps through JSON.

    Raises:
        ValueError: For another kind, or fields that it has not.
    """
    fields = dict(record)
    kind = _validate.one_of("kind", fields.pop("kind", None), KINDS)
    try:
        return KINDS[kind](**fields)
    except TypeError as error:
        raise ValueError(f"loss has unknown or missing fields ({error})") from None


def root(share: float) -> float:
    """The root of a share of mu^2, rounded up.

    Args:
        share: At most 1.
    """
    return 0.0 if share == 0 else min(1.0, math.sqrt(share) * MARGIN)


def _lifted(first: Gaussian, later: Any) -> Any:
    """A Gaussian loss in a form that composes with a later one."""
    if isinstance(later, Pld):
        return first.sampled(later.agents)
    if isinstance(later, Concentrated):
        return first.concentrated()
    raise _refused(first, later)


def _refused(first: Any, later: Any) -> ValueError:
    names = type(first).__name__, type(later).__name__
    remedy = "state the two runs apart"
    if "Pld" not in names:
        remedy = "state the pure one by its concentrated()"
    return ValueError(f"loss is {names[0]}, then {names[1]}, which do not compose; {remedy}")


def _check_participation(given: Any, rounds: int) -> None:
    if given is None:
        return
    if not isinstance(given, tuple) or len(given) != 2:
        raise ValueError(f"participation is {given!r}; give (epochs, separation), or None")
    _validate.integer("participation[0]", given[0], least=0, most=rounds)
    _validate.integer("participation[1]", given[1])


def _begun(participation: tuple[int, int], rounds: int) -> tuple[int, int]:
    """(epochs, separation) in the first rounds, at most."""
    epochs, separation = participation
    return min(epochs, -(-rounds // separation)), separation


def _first(rounds: int, whole: int) -> int:
    if _validate.integer("rounds", rounds, least=0) > whole:
        raise ValueError(f"rounds is {rounds}, the loss covers {whole}; account for the longer run")
    return rounds


def _share(rounds: int, whole: int, even: bool) -> float:
    """The share of an additive loss that the first rounds have spent, rounded up."""
    if _first(rounds, whole) == 0:
        return 0.0
    return min(1.0, rounds / whole * MARGIN) if even else 1.0


def _delta(delta: float) -> float:
    if not 0 <= delta < 1:
        raise ValueError(f"delta is {delta}; give a number in [0, 1)")
    return float(delta)
