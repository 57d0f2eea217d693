"""The record of what a run guarantees; every run stores one and every figure prints it."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any, Literal

from dpjax import _validate
from dpjax.accounting import budget, gdp

__all__ = ["ATTACKERS", "Attacker", "Guarantee"]

Attacker = Literal["outsider", "aggregator", "nodes"]

ATTACKERS: dict[str, str] = {
    "outsider": (
        "an outsider who sees every message on every link, the mixing matrix and the noise "
        "design, but not the noise seed"
    ),
    "aggregator": (
        "whoever receives the sum of the agents' messages of every round, but no single message "
        "and not the noise seed"
    ),
    "nodes": (
        "nodes of the network who see the messages they receive and know their own gradients and "
        "noise, but not the other nodes' seeds"
    ),
}
"""Attackers by name, each with what it sees and does not know."""

_RELATION_TEXT = {
    "replace_agent": "replacing all data of one agent",
    "replace_record": "replacing one record of one agent",
    "zero_out_record": "zeroing out one record of one agent",
}
_GRADIENTS_TEXT = {
    "any": "",
    "view": ", only for gradients that do not depend on what the attacker cannot see",
}
_ACCOUNTANT_TEXT = {
    "gdp": "accounted exactly (Gaussian DP)",
    "rdp": "accounted through Renyi DP",
    "paper": "by the Whisper paper's rule",
}


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

    def __post_init__(self) -> None:
        """Refuse a record that contradicts itself."""
        _validate.integer("rounds", self.rounds, least=0)
        self._check_added()
        for name in ("release", "white", "unsound"):
            _validate.flag(name, getattr(self, name))
        exact = self.exact_epsilon  # Refuses a bad mu or delta.
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon is {self.epsilon}; give a number >= 0")
        if self.relation is None:
            if not self.epsilon == self.mu == math.inf or self.release:
                raise ValueError(
                    f"relation is None with epsilon {self.epsilon}; name the neighbouring relation "
                    f"({', '.join(budget.RELATIONS)}), or use Guarantee.none"
                )
            return
        self._check_participation()
        unit = budget.unit(self.relation)
        if self.unit is not None and self.unit != unit:
            raise ValueError(
                f"unit is {self.unit!r}, relation {self.relation!r} protects {unit!r}; leave it out"
            )
        object.__setattr__(self, "unit", unit)
        _validate.one_of("attacker", self.attacker, ATTACKERS)
        _validate.one_of("accountant", self.accountant, budget.ACCOUNTANTS)
        self._check_release()
        _validate.positive("clip_norm", self.clip_norm)
        if self.per_agent_epsilon is not None:
            values = tuple(float(value) for value in self.per_agent_epsilon)
            if not values or max(values) != self.epsilon or min(values) < 0:
                raise ValueError(
                    f"per_agent_epsilon is {values} with epsilon {self.epsilon}; epsilon is their "
                    "maximum"
                )
            object.__setattr__(self, "per_agent_epsilon", values)
        if self.unsound != (exact > self.epsilon) or (self.unsound and self.accountant != "paper"):
            raise ValueError(
                f"epsilon is {self.epsilon} with mu {self.mu} and delta {self.delta}, whose exact "
                f"epsilon is {exact}; state at least that (unsound=True only for the paper's rule "
                "where it is false)"
            )

    def _check_added(self) -> None:
        if not 0 <= self.added_epsilon < math.inf:
            raise ValueError(f"added_epsilon is {self.added_epsilon}; give a number >= 0")
        if not (self.added_delta == 0 or 0 < self.added_delta < self.delta):
            raise ValueError(
                f"added_delta is {self.added_delta} with delta {self.delta}, which includes it; "
                "give a number from 0 to below delta"
            )

    def _check_release(self) -> None:
        """Refuse a release accounted for a view of which rounded messages are no function."""
        _validate.one_of("gradients", self.gradients, ("any", "view"))
        if not self.release:
            return
        if self.attacker == "aggregator" or self.gradients == "view":
            raise ValueError(
                f"attacker is {self.attacker!r} with gradients {self.gradients!r} in a release, "
                "which rounds every message: sums of rounded messages can show what sums of exact "
                "ones hide. State the loss of all messages: attacker 'outsider', or gradients "
                "'any' for nodes"
            )

    def _check_participation(self) -> None:
        if self.participation is None:
            return
        remedy = "give (epochs, separation) that fit the rounds, or None"
        if not isinstance(self.participation, tuple) or len(self.participation) != 2:
            raise ValueError(f"participation is {self.participation!r}; {remedy}")
        epochs = _validate.integer("participation[0]", self.participation[0], least=0)
        separation = _validate.integer("participation[1]", self.participation[1])
        if epochs > self.rounds:
            raise ValueError(
                f"participation is {self.participation} in {self.rounds} rounds; {remedy}"
            )
        assert self.relation is not None
        if budget.unit(self.relation) != "record":
            raise ValueError(
                f"participation is {self.participation} under relation {self.relation!r}; an agent "
                "takes part in every round, leave it None"
            )
        object.__setattr__(self, "participation", (epochs, separation))

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
        """Exact epsilon at the same mu and delta, whatever the accountant states."""
        return self._exact(self.mu)

    def _exact(self, mu: float) -> float:
        """Exact epsilon of a mu at this delta, what finite precision adds included."""
        return float(gdp.epsilon(mu, self.delta - self.added_delta)) + self.added_epsilon

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
        """What the first rounds of the run have spent.

        For noise that is white over rounds mu_t = mu sqrt(t / T), or mu sqrt(ceil(t / b) / k) where
        a record takes part k times, b rounds apart, and epsilon is exact at the same delta; for
        correlated noise the whole run's loss stands from its first round on.

        Guarantee: holds for the first ``rounds`` rounds, also when the decision to stop there was
        taken from what was released. Not when it was taken from logged losses, which are not
        private.

        Args:
            rounds: Rounds t done so far, 0 to T.

        Returns:
            The guarantee of what has been sent.

        Raises:
            ValueError: For more rounds than are covered.
        """
        rounds = _validate.integer("rounds", rounds, least=0)
        if rounds > self.rounds:
            raise ValueError(
                f"rounds is {rounds}, the guarantee covers {self.rounds}; plan the longer run "
                "from its start, noise for a shorter one does not cover it"
            )
        if self.relation is None:
            return Guarantee.none(rounds)
        share, participation = 1.0, self.participation
        if participation is not None:
            epochs, separation = participation
            participation = min(epochs, -(-rounds // separation)), separation
            share = math.sqrt(participation[0] / max(epochs, 1))
        elif self.rounds:
            share = math.sqrt(rounds / self.rounds)
        share = share if self.white else 1.0
        share = 0.0 if rounds == 0 else min(1.0, share * (1 + 1e-15))
        mu = self.mu * share
        each = None
        epsilon = self._exact(mu)
        if self.per_agent_epsilon is not None:
            # Each agent's mu is at most what its accountant allowed for its epsilon.
            mus = [self._mu_of(value) * share for value in self.per_agent_epsilon]
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

    def followed_by(self, later: "Guarantee") -> "Guarantee":
        """What two runs in a row have spent on the same agents: mu^2 adds up.

        Guarantee: adaptive composition of Gaussian DP; the later run may depend on what the
        earlier one released. Both must have noise of their own.

        Args:
            later: The guarantee of the run that carried on.

        Returns:
            The guarantee of both, with the exact epsilon at the same delta.

        Raises:
            ValueError: If the two differ in relation, attacker, delta, release, gradients, or in
                how far apart a record takes part; if what finite precision adds uses up delta.

        Reference:
            Dong, Roth and Su (2022), Corollary 3.3.
        """
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
        )

    def _mu_of(self, epsilon: float) -> float:
        """An upper bound on the mu for which this record's accountant states epsilon."""
        assert self.accountant is not None
        epsilon = max(0.0, epsilon - self.added_epsilon)
        if epsilon == 0:
            return float(gdp.mu(0.0, self.delta)) * (1 + 1e-9)
        mu = budget.allowed_mu(epsilon, self.delta, accountant=self.accountant, allow_unsound=True)
        return float(mu) * (1 + 1e-9)

    def statement(self) -> str:
        """Everything in one sentence, and what it does not cover in another."""
        if self.relation is None:
            return f"Not private: {self.rounds:,} rounds without a differential-privacy guarantee."
        assert self.attacker is not None and self.accountant is not None
        text = (
            f"({self._epsilon_text()}, delta = {_up(self.delta)})-differentially private per "
            f"{self.unit} ({_RELATION_TEXT[self.relation]}; relation {self.relation}, clip norm "
            f"{self.clip_norm:g}) over {self.rounds:,} rounds{self._participation_text()}"
            f"{'' if self.white else ' with noise correlated over rounds'} against "
            f"{ATTACKERS[self.attacker]}{_GRADIENTS_TEXT[self.gradients]}; "
            f"{_ACCOUNTANT_TEXT[self.accountant]}, mu = {_up(self.mu)}"
        )
        if self.accountant != "gdp":
            text += f", exact epsilon = {_up(self.exact_epsilon)}"
        if self.unsound:
            text += " (the stated epsilon is FALSE, the exact one holds)"
        if self.release:
            text += (
                f"; {_up(self.added_epsilon)} of epsilon and {_up(self.added_delta)} of delta are "
                "for noise of finite precision"
                if self.added_epsilon
                else "; what noise of finite precision adds is not in it"
            )
            return text + ". Release: the noise key was drawn secretly and must stay secret."
        return text + ". Simulation: whoever knows the seed can subtract the noise."

    def caption(self) -> str:
        """The guarantee in a few words, for a figure."""
        if self.relation is None:
            return f"not private, T = {self.rounds}"
        exact = ""
        if self.accountant != "gdp":
            exact = f" [exact epsilon {_up(self.exact_epsilon)}]"
        if self.unsound:
            exact = f" [FALSE: exact epsilon {_up(self.exact_epsilon)}]"
        return (
            f"({self._epsilon_text()}, delta = {_up(self.delta)})-DP{exact} per {self.unit} "
            f"({self.relation}), {self.attacker}"
            f"{' (gradients: view)' if self.gradients == 'view' else ''}, "
            f"T = {self.rounds}{self._pattern_text()}, "
            f"{self.accountant} accountant, "
            f"{'release' if self.release else 'simulation'}"
        )

    def _epsilon_text(self) -> str:
        if self.per_agent_epsilon and min(self.per_agent_epsilon) < self.epsilon:
            return f"epsilon = {_up(min(self.per_agent_epsilon))} to {_up(self.epsilon)} by agent"
        return f"epsilon = {_up(self.epsilon)}"

    def _participation_text(self) -> str:
        if self.participation is None:
            return ""
        epochs, separation = self.participation
        return f", of which every record takes part in at most {epochs:,}, {separation:,} apart,"

    def _pattern_text(self) -> str:
        if self.participation is None:
            return ""
        return f", k = {self.participation[0]}, b = {self.participation[1]}"

    def to_dict(self) -> dict[str, Any]:
        """The record as a dict for strict JSON: infinities are the string "inf"."""

        def plain(value: Any) -> Any:
            if isinstance(value, tuple):
                return [plain(entry) for entry in value]
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
            if isinstance(value, list | tuple):
                return tuple(rich(entry) for entry in value)
            return math.inf if value == "inf" else value

        return cls(**{key: rich(value) for key, value in record.items()})


def _up(value: float) -> str:
    """Four digits, rounded up: a printed loss is never below the stated one."""
    if not math.isfinite(value):
        return str(value)
    rounded = Context(prec=4, rounding=ROUND_CEILING).create_decimal(Decimal(repr(float(value))))
    return f"{float(rounded):g}"
