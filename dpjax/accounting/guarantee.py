"""The record of what a run guarantees; every run stores one and every figure prints it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dpjax import _validate
from dpjax.accounting import budget, consistency, gdp, stopping, wording
from dpjax.accounting.wording import ATTACKERS

__all__ = ["ATTACKERS", "Attacker", "Guarantee"]

Attacker = Literal["outsider", "aggregator", "nodes"]


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """(epsilon, delta)-DP of a run, and under which assumptions.

    Guarantee: a record cannot be made that states less than the exact loss at its mu, unless it
    says so (``unsound=True``, for the paper's rule where it is false; it then prints both).

    Attributes:
        epsilon: Stated epsilon, the largest over agents; infinity when non-private.
        delta: Delta.
        mu: Gaussian-DP parameter of the whole run, the largest over agents.
        relation: Neighbouring relation; None when non-private, no default.
        attacker: Whom it defends against, a key of `ATTACKERS`.
        rounds: Rounds T that it covers.
        clip_norm: Clip norm C; infinity when non-private and unclipped.
        accountant: How epsilon follows from mu, one of `budget.ACCOUNTANTS`; None when non-private.
        release: True where the noise key was drawn from the operating system and kept secret;
            False for a simulation, whose seed gives the noise away.
        unit: "agent" or "record", from the relation; may be given, and must then agree.
        per_agent_epsilon: One epsilon an agent, where budgets differ.
        white: True when the noise is independent between rounds; `after` then spends by rounds.
        unsound: True where the paper's epsilon is below the exact one.
        participation: (epochs, separation) where every record takes part in at most ``epochs``
            rounds, ``separation`` apart within a run, by a fixed order; None where it may in all.
        added_epsilon: What finite-precision noise adds to epsilon, which includes it, see
            `dpjax.accounting.finite`; 0 where noise is taken to be exact, as in simulations.
        added_delta: The part of delta that finite-precision noise uses.
        gradients: "any", or "view" where it holds only for gradients that do not depend on what
            the attacker cannot see, see `dpjax.accounting.view.View.loss`.
        curve: The marks at which the run may have stopped by what was released, with what makes
            the numbers of all of them hold at once; None where the rounds were fixed beforehand.
        private_stop: True where the round at which the run ended was chosen by whoever had read
            metrics of private data: what that choice gives away is not covered.
    """

    epsilon: float
    delta: float
    mu: float
    relation: budget.Relation | None
    attacker: Attacker | None
    rounds: int
    clip_norm: float
    accountant: budget.Accountant | None
    release: bool
    unit: str | None = None
    per_agent_epsilon: tuple[float, ...] | None = None
    white: bool = True
    unsound: bool = False
    participation: tuple[int, int] | None = None
    added_epsilon: float = 0.0
    added_delta: float = 0.0
    gradients: Literal["any", "view"] = "any"
    curve: stopping.Curve | None = None
    private_stop: bool = False

    def __post_init__(self) -> None:
        """Refuse a record that contradicts itself."""
        consistency.check(self)

    @classmethod
    def none(cls, rounds: int) -> "Guarantee":
        """The record of a non-private run: epsilon is infinite.

        Args:
            rounds: Rounds T.

        Returns:
            The record.
        """
        return cls(
            epsilon=math.inf,
            delta=0.0,
            mu=math.inf,
            relation=None,
            attacker=None,
            rounds=rounds,
            clip_norm=math.inf,
            accountant=None,
            release=False,
        )

    @property
    def exact_epsilon(self) -> float:
        """Exact epsilon at the same mu and delta (a curve's), whatever the accountant states."""
        return self._exact(self.mu)

    def _exact(self, mu: float) -> float:
        """Exact epsilon of a mu at this delta, what finite precision adds included."""
        delta = self.delta - self.added_delta if self.curve is None else self.curve.delta
        return float(gdp.epsilon(mu, delta)) + self.added_epsilon

    def with_finite_precision(self, epsilon: float, delta: float) -> "Guarantee":
        """The record of the same noise in finite precision: what it costs, on top.

        Guarantee: if exact noise gives this record's loss, and what is sent has a distribution
        within a factor e^(epsilon / 2) of its own under exact noise, on both sides, up to
        probabilities whose cost in delta is ``delta``, the record returned holds. Its delta is
        this one's; its epsilon that of a delta less ``delta``, plus ``epsilon``.

        Args:
            epsilon: `dpjax.accounting.finite.Cost.epsilon`.
            delta: `dpjax.accounting.finite.Cost.delta`.

        Returns:
            The record, with both in ``added_epsilon`` and ``added_delta``.

        Raises:
            ValueError: For negative numbers, a delta that is used up, or a record that has a cost.
        """
        if self.relation is None:
            return self
        if self.added_epsilon or self.added_delta:
            raise ValueError(
                f"added_epsilon is {self.added_epsilon} already; add the cost to the record of "
                "exact noise"
            )
        # Checks the two before they are used.
        free = dataclasses.replace(
            self,
            epsilon=math.inf,
            per_agent_epsilon=None,
            unsound=False,
            added_epsilon=epsilon,
            added_delta=delta,
        )

        def grown(stated: float, mu: float) -> float:
            # The paper's rule stays as false as it was.
            exact = 0.0 if self.unsound else free._exact(mu)
            return max(stated + epsilon, exact)

        each = self.per_agent_epsilon
        if each is not None:
            each = tuple(grown(one, min(self._mu_of(one), self.mu)) for one in each)
        return dataclasses.replace(
            free,
            epsilon=grown(self.epsilon, self.mu) if each is None else max(each),
            per_agent_epsilon=each,
            unsound=self.unsound,
        )

    def after(self, rounds: int) -> "Guarantee":
        """What the first rounds of the run spend, their number fixed before it began.

        For noise that is white over rounds mu_t = mu sqrt(t / T), or mu sqrt(ceil(t / b) / k) where
        a record takes part k times, b rounds apart, and epsilon is exact at the same delta; for
        correlated noise the whole run's loss stands from its first round on.

        Guarantee: holds where ``rounds`` was fixed before the first one. Not where the decision to
        stop there was taken from anything seen on the way, released or not: with 20 places to
        stop the true delta is 7 times the one stated. Such a run states this guarantee itself, or
        the one that `stopping_at` gave before it began.

        Args:
            rounds: Rounds t, 0 to T.

        Returns:
            The guarantee of the first t rounds.

        Raises:
            ValueError: For more rounds than are covered, or a guarantee with a curve.
        """
        if self.curve is not None:
            raise ValueError(
                f"curve has marks {self.curve.marks}; use stopped(rounds), whose numbers hold for "
                "a round chosen on the way, or the plan's own guarantee"
            )
        rounds = _validate.integer("rounds", rounds, least=0)
        if rounds > self.rounds:
            raise ValueError(
                f"rounds is {rounds}, the guarantee covers {self.rounds}; plan the longer run "
                "from its start, noise for a shorter one does not cover it"
            )
        if self.relation is None:
            return Guarantee.none(rounds)
        return self._part(rounds, self._share(rounds))

    def _share(self, rounds: int) -> float:
        """The share of mu^2 that the first rounds have spent at most, not rounded."""
        if rounds == 0:
            return 0.0
        if not self.white:
            return 1.0
        if self.participation is None:
            return rounds / self.rounds
        epochs, separation = self.participation
        return min(epochs, -(-rounds // separation)) / max(epochs, 1)

    def _part(self, rounds: int, share: float) -> "Guarantee":
        """The record of the first rounds, which have spent a share of mu^2."""
        root = 0.0 if share == 0 else min(1.0, math.sqrt(share) * (1 + 1e-15))
        participation = self.participation
        if participation is not None:
            epochs, separation = participation
            participation = min(epochs, -(-rounds // separation)), separation
        mu = self.mu * root
        each = None
        epsilon = self._exact(mu)
        if self.per_agent_epsilon is not None:
            mus = [value * root for value in self._agents_mus()]
            each = tuple(self._exact(min(m, mu)) for m in mus)
            epsilon = max(each)
            mu = min(mu, max(mus))
        return dataclasses.replace(
            self,
            epsilon=epsilon,
            mu=mu,
            rounds=rounds,
            accountant="gdp",
            per_agent_epsilon=each,
            unsound=False,
            participation=participation,
        )

    def stopping_at(
        self, marks: Sequence[int], *, shares: Sequence[float] | None = None
    ) -> "Guarantee":
        """What a run states that may stop at any of its marks by what was released.

        Guarantee: if the marks were fixed before the run, then `stopped` of what this returns
        holds at whichever mark the run stopped, by any rule that looks at messages alone: see
        `dpjax.accounting.stopping` for what that means and why. In exchange the whole run costs
        more than without stops: with mu 1, delta 1e-5 and 20 marks epsilon is 0.93 at the first
        mark and 4.84 at the last, where this guarantee is 4.38.

        Args:
            marks: Rounds t at which the run may stop, rising; the last is T.
            shares: [marks] what the rounds up to each mark have spent at most, as shares of mu^2,
                over all participation patterns; by default t / T, or ceil(t / b) / k, where noise
                is white over rounds, and 1 at every mark where it is not.

        Returns:
            The guarantee of the whole run, with the curve.

        Raises:
            ValueError: For marks that do not rise to T, or shares that do not rise to 1.
        """
        if self.relation is None:
            return self
        if self.curve is not None:
            raise ValueError("curve is given already; use the plan's own guarantee")
        if shares is None:
            shares = [self._share(_validate.integer("marks", mark)) for mark in marks]
        free = stopping.Curve(marks=tuple(marks), shares=tuple(shares), delta=self.delta)
        if free.marks[-1] != self.rounds:
            raise ValueError(f"marks end at {free.marks[-1]}; end them at the {self.rounds} rounds")
        mus = {min(mu, self.mu) for mu in self._agents_mus()}
        added = self.added_delta
        while added < self.delta:
            inner = min(free.inner_delta(mu, self.delta - added) for mu in mus)
            made = self._curved(dataclasses.replace(free, delta=inner), added)
            # What finite precision adds to delta grows like e^epsilon, and epsilon with the curve.
            growth = math.exp(min(max(0.0, made.epsilon - self.epsilon), 700.0))
            if added >= self.added_delta * growth:
                return made
            added = 1.01 * self.added_delta * growth
        raise ValueError(
            f"added_delta is {self.added_delta} with delta {self.delta}, which leaves nothing for "
            "a curve; state the plan's guarantee, or use a larger delta"
        )

    def _curved(self, curve: stopping.Curve, added_delta: float) -> "Guarantee":
        """The record of the whole run at the curve's delta."""
        bare = dataclasses.replace(
            self,
            epsilon=math.inf,
            per_agent_epsilon=None,
            accountant="gdp",
            unsound=False,
            added_delta=added_delta,
            curve=curve,
        )
        each = None
        if self.per_agent_epsilon is not None:
            each = tuple(bare._exact(min(mu, self.mu)) for mu in self._agents_mus())
        epsilon = bare.exact_epsilon if each is None else max(each)
        return dataclasses.replace(bare, epsilon=epsilon, per_agent_epsilon=each)

    def stopped(self, rounds: int) -> "Guarantee":
        """What a run states that ended after some rounds because of what was released.

        Guarantee: a curve's numbers hold at the mark where the run ended, see `stopping_at`.
        Without one the whole run's guarantee stands, whenever it ended.

        Args:
            rounds: Rounds done; with a curve, one of its marks.

        Returns:
            The guarantee.

        Raises:
            ValueError: For rounds that are no mark of the curve, or beyond those covered.
        """
        rounds = _validate.integer("rounds", rounds)
        if self.curve is None:
            if rounds > self.rounds:
                raise ValueError(f"rounds is {rounds}, the guarantee covers {self.rounds}")
            return self
        if rounds not in self.curve.marks or self.rounds != self.curve.marks[-1]:
            raise ValueError(
                f"rounds is {rounds} of {self.rounds}, the curve's marks are {self.curve.marks}; "
                "ask the whole run's guarantee for one of them"
            )
        return self._part(rounds, self.curve.shares[self.curve.marks.index(rounds)])

    def followed_by(self, later: "Guarantee", *, planned: bool) -> "Guarantee":
        """What two runs in a row spend on the same agents: mu^2 adds up.

        Guarantee: adaptive composition of Gaussian DP. The later run's data, models and gradients
        may depend on what the earlier one released; that there is one, its length and its noise
        must have been fixed before the earlier one began. A phase added because of what the first
        one released makes delta up to 1.87 times the one stated (two equal phases). Both must have
        noise of their own. An earlier run that was stopped on the way states all that it had
        planned, and that is what composes.

        Args:
            later: The guarantee of the run that carried on.
            planned: True: both phases were fixed before the first one began.

        Returns:
            The guarantee of both, with the exact epsilon at the same delta.

        Raises:
            ValueError: If ``planned`` is not True; for guarantees with a curve, whose numbers were
                chosen on the way; if the two differ in relation, attacker, delta, release,
                gradients, or in how far apart a record takes part; if what finite precision adds
                uses up delta.

        Reference:
            Dong, Roth and Su (2022), Corollary 3.3.
        """
        if not _validate.flag("planned", planned):
            raise ValueError(
                "planned is False; a phase that was decided on after seeing the first one is not "
                "covered by any sum of the two. Fix the largest later phase before the first one "
                "begins, and state both with planned=True whether or not it is run"
            )
        for record in (self, later):
            if record.curve is not None:
                raise ValueError(
                    f"curve has marks {record.curve.marks}; phases in a row are covered by their "
                    "plans' own guarantees, compose those"
                )
        if self.relation is None or later.relation is None:
            return Guarantee.none(self.rounds + later.rounds)
        for name in ("relation", "attacker", "delta", "release", "gradients"):
            if getattr(self, name) != getattr(later, name):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, then {getattr(later, name)!r}; only equal "
                    "ones compose"
                )
        apart = [record.participation and record.participation[1] for record in (self, later)]
        if apart[0] != apart[1]:
            raise ValueError(
                f"participation is {self.participation}, then {later.participation}; only equal "
                "separations compose"
            )
        participation = None
        if self.participation is not None and later.participation is not None:
            epochs = self.participation[0] + later.participation[0]
            participation = epochs, self.participation[1]
        mu = math.hypot(self.mu, later.mu) * (1 + 1e-15)
        added_epsilon = self.added_epsilon + later.added_epsilon
        added_delta = self.added_delta + later.added_delta
        if added_delta >= self.delta > 0:
            raise ValueError(
                f"added_delta is {self.added_delta}, then {later.added_delta}, which uses up delta "
                f"{self.delta}; state the two runs apart"
            )
        return dataclasses.replace(
            self,
            epsilon=float(gdp.epsilon(mu, self.delta - added_delta)) + added_epsilon,
            added_epsilon=added_epsilon,
            added_delta=added_delta,
            mu=mu,
            rounds=self.rounds + later.rounds,
            clip_norm=max(self.clip_norm, later.clip_norm),
            accountant="gdp",
            per_agent_epsilon=None,
            white=False,
            unsound=False,
            participation=participation,
            private_stop=self.private_stop or later.private_stop,
        )

    def _agents_mus(self) -> list[float]:
        """Upper bounds on each agent's mu; one number where all agents have the same."""
        if self.per_agent_epsilon is None:
            return [self.mu]
        # Each agent's mu is at most what its accountant allowed for its epsilon.
        return [self._mu_of(value) for value in self.per_agent_epsilon]

    def _mu_of(self, epsilon: float) -> float:
        """An upper bound on the mu for which this record's accountant states epsilon."""
        assert self.accountant is not None
        epsilon = max(0.0, epsilon - self.added_epsilon)
        delta = self.delta if self.curve is None else self.curve.delta
        if epsilon == 0:
            return float(gdp.mu(0.0, delta)) * (1 + 1e-9)
        mu = budget.allowed_mu(epsilon, delta, accountant=self.accountant, allow_unsound=True)
        return float(mu) * (1 + 1e-9)

    def statement(self) -> str:
        """Everything in one sentence, and what it does not cover in another."""
        return wording.statement(self)

    def caption(self, digits: int = 4) -> str:
        """The guarantee in a few words, for a figure.

        Args:
            digits: Of its numbers, which are rounded up.
        """
        return wording.caption(self, digits)

    def to_dict(self) -> dict[str, Any]:
        """The record as a dict for strict JSON: infinities are the string "inf"."""

        def plain(value: Any) -> Any:
            if isinstance(value, tuple):
                return [plain(entry) for entry in value]
            if isinstance(value, dict):
                return {key: plain(entry) for key, entry in value.items()}
            return "inf" if value == math.inf else value

        return {key: plain(value) for key, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "Guarantee":
        """The inverse of `to_dict`; the record is checked again.

        Args:
            record: What `to_dict` returned, perhaps through JSON.

        Returns:
            The guarantee.

        Raises:
            ValueError: For missing or unknown fields, or a record that contradicts itself.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        required = {
            field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING
        }
        wrong = sorted(set(record) - names) + sorted(required - set(record))
        if wrong:
            raise ValueError(
                f"record has unknown or missing fields: {', '.join(wrong)}; read it with the "
                "version that wrote it"
            )

        def rich(value: Any) -> Any:
            if isinstance(value, Mapping):
                return stopping.Curve(**{key: rich(entry) for key, entry in value.items()})
            if isinstance(value, list | tuple):
                return tuple(rich(entry) for entry in value)
            return math.inf if value == "inf" else value

        return cls(**{key: rich(value) for key, value in record.items()})
