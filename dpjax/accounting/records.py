"""What a guarantee is made of: whom it is against, what is lost, and what else it counts on."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, Self, get_args

from dpjax import _validate
from dpjax.accounting import budget, losses, stopping

__all__ = ["Caveats", "Record", "Threat"]

Attacker = Literal["outsider", "node", "coalition", "aggregator", "nodes"]
"""Words of `dpjax.accounting.wording.ATTACKERS`; "nodes" is what older records call a coalition."""

Secrets = Literal["own", "group", "shared", "links", "shares", "alone"]
"""Who draws the noise from which secret: every agent from its own; the members of a group from one
seed; all agents from one; noise on links; a share of a sum's noise each, from a secret of its own;
one agent who holds all data. Under all but "links" and "shares" the stated loss is that of an
outsider who sees every message, or more."""


@dataclass(frozen=True, kw_only=True)
class Threat:
    """Whose data are protected from whom, and what keeps neighbours' gradients close.

    Attributes:
        relation: Neighbouring relation; None when non-private, no default.
        attacker: Whom it defends against; None when non-private.
        clip_norm: Clip norm C; infinity where nothing is clipped.
        gradients: "any", or "view" where it holds only for gradients that do not depend on what
            the attacker cannot see, see `dpjax.accounting.attacker.View.loss`.
        nodes: The agents of a coalition, which colludes; None for other attackers.
        norm: In which norm gradients are clipped, or assumed to be close.
        gradient_gap: Where nothing is clipped, how far the gradients of neighbouring agents'
            objectives, of whatever batch is drawn, are assumed to be apart at most, at every
            model; every text says that it is an assumption.
        smoothness: Beside such a gap, how far gradients of one objective are assumed to be apart
            over the distance of the models, where the method needs it; else None.
    """

    relation: budget.Relation | None
    attacker: Attacker | None
    clip_norm: float
    gradients: Literal["any", "view"] = "any"
    nodes: tuple[int, ...] | None = None
    norm: Literal["l2", "l1"] = "l2"
    gradient_gap: float | None = None
    smoothness: float | None = None

    def __post_init__(self) -> None:
        """Refuse an attacker that there is not, and gradients that nothing or two things bound."""
        if self.relation is None:
            return
        budget.unit(self.relation)
        _validate.one_of("attacker", self.attacker, get_args(Attacker))
        _validate.one_of("gradients", self.gradients, ("any", "view"))
        _validate.one_of("norm", self.norm, ("l2", "l1"))
        if self.nodes is not None and (self.attacker != "coalition" or not self.nodes):
            raise ValueError(
                f"nodes is {self.nodes} with attacker {self.attacker!r}; give the agents of a "
                "coalition"
            )
        if self.gradient_gap is None:
            _validate.positive("clip_norm", self.clip_norm)
            if self.smoothness is not None:
                raise ValueError(
                    f"smoothness is {self.smoothness} without a gradient gap; leave it out"
                )
            return
        _validate.positive("gradient_gap", self.gradient_gap)
        if self.smoothness is not None:
            _validate.positive("smoothness", self.smoothness)
        if self.clip_norm != math.inf or self.relation != "replace_agent":
            raise ValueError(
                f"gradient_gap is {self.gradient_gap} with clip norm {self.clip_norm} and relation "
                f"{self.relation!r}; a gap is assumed of whole agents that are not clipped"
            )

    @property
    def unit(self) -> Literal["agent", "record", "client"] | None:
        """What is protected, by the relation."""
        return None if self.relation is None else budget.unit(self.relation)


@dataclass(frozen=True, kw_only=True)
class Caveats:
    """What a guarantee counts on, and what it does not cover.

    Attributes:
        release: True where the noise key was drawn from the operating system and kept secret;
            False for a simulation, whose seed gives the noise away.
        unsound: True where the paper's epsilon is below the exact one.
        added_epsilon: What finite-precision noise costs of epsilon, which includes it, see
            `dpjax.accounting.finite`; 0 where noise is taken to be exact, as in simulations.
        added_delta: The part of delta that finite-precision noise uses.
        sum_rounding: Share of the clip norm by which a run lowered it for every record, so that
            sums of records keep it in spite of rounding; 0 where no records are added up.
        private_stop: True where the round at which the run ended was chosen by a callback that
            could read metrics of private data: what that choice gives away is not covered.
        lost_noise: (round, share) where a run found its noise finer than the numbers that it was
            added to: from that round on up to that share of a message's entries went out without
            noise, which the loss does not cover; None where it did not.
        unused: Rounds that are covered and were not run, since the run ended early.
        dropouts: Agents that may be missing from a sum that is opened, at most; with more it does
            not hold.
        colluders: Agents that may show the aggregator their messages and noise, at most.
        sealed: True where noise is in shares, so that it holds for sums alone: an outsider reads
            single messages under the masks of a secure sum, or not at all.
        secrets: Who draws the noise from which secret, by which `protection` tells who else is
            protected; None where that is not known.
        phase: Number of the run among several in a row, from whose seed and number a simulation
            draws its noise; of several the largest.
        custom: Names of the classes of the user's own that it relies on; every text names them.
    """

    release: bool
    unsound: bool = False
    added_epsilon: float = 0.0
    added_delta: float = 0.0
    sum_rounding: float = 0.0
    private_stop: bool = False
    lost_noise: tuple[int, float] | None = None
    unused: int = 0
    dropouts: int = 0
    colluders: int = 0
    sealed: bool = False
    secrets: Secrets | None = None
    phase: int = 0
    custom: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        for name in ("release", "unsound", "private_stop", "sealed"):
            _validate.flag(name, getattr(self, name))
        for name in ("added_epsilon", "added_delta", "sum_rounding"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number >= 0")
        for name in ("unused", "dropouts", "colluders", "phase"):
            object.__setattr__(self, name, _validate.integer(name, getattr(self, name), least=0))
        if self.secrets is not None:
            _validate.one_of("secrets", self.secrets, get_args(Secrets))
        if self.lost_noise is not None:
            first, share = self.lost_noise
            if _validate.integer("lost_noise", first) and not 0 < share <= 1:
                raise ValueError(
                    f"lost_noise is {self.lost_noise}; give (round, share), a share up to 1"
                )
        if any(not (isinstance(name, str) and name.isidentifier()) for name in self.custom):
            raise ValueError(f"custom is {_validate.shown(self.custom)}; give names of classes")


def _of(record: str, names: str) -> list[property]:
    """Properties that read a part's fields."""
    return [property(attrgetter(f"{record}.{name}")) for name in names.split()]


@dataclass(frozen=True, kw_only=True)
class Record:
    """(epsilon, delta)-DP of a run: the threat, the loss, and the caveats.

    Fields of the parts are read by name as well, ``guarantee.attacker``, and stored by it.

    Attributes:
        epsilon: Stated epsilon, the largest over agents; infinity when non-private.
        delta: Delta.
        accountant: How epsilon follows from mu, one of `budget.ACCOUNTANTS`; the loss's own kind
            where that is not Gaussian ("pld", "zcdp", "pure"); None when non-private.
        threat: Whose data are protected from whom.
        loss: What the run costs, before it is stated at a delta.
        caveats: What it counts on, and what it does not cover.
        per_agent_epsilon: One epsilon an agent, where budgets differ.
        curve: The marks at which the run may have stopped by what was released, with what makes
            the numbers of all of them hold at once; None where the rounds were fixed beforehand.
        phases: The phases so far of which this record states a total that was fixed before the
            first one, see `dpjax.accounting.guarantee.Guarantee.within`; empty for a run of its
            own.
    """

    epsilon: float
    delta: float
    accountant: Literal["gdp", "rdp", "paper", "pld", "zcdp", "pure"] | None
    threat: Threat
    loss: losses.AnyLoss
    caveats: Caveats = field(default_factory=lambda: Caveats(release=False))
    per_agent_epsilon: tuple[float, ...] | None = None
    curve: stopping.Curve | None = None
    phases: "tuple[Self, ...]" = ()

    relation, unit, attacker, nodes, gradients, clip_norm, norm = _of(
        "threat", "relation unit attacker nodes gradients clip_norm norm"
    )
    gradient_gap, smoothness = _of("threat", "gradient_gap smoothness")
    release, unsound, added_epsilon, added_delta, sum_rounding, private_stop = _of(
        "caveats", "release unsound added_epsilon added_delta sum_rounding private_stop"
    )
    lost_noise, unused, dropouts, colluders, sealed, secrets, phase, custom = _of(
        "caveats", "lost_noise unused dropouts colluders sealed secrets phase custom"
    )

    def __post_init__(self) -> None:
        """Refuse a record that contradicts itself."""
        if self.added_delta and not self.added_delta < self.delta:
            raise ValueError(
                f"added_delta is {self.added_delta} with delta {self.delta}, which includes it; "
                "give a number from 0 to below delta"
            )
        exact = self.exact_epsilon  # Refuses a bad delta.
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon is {self.epsilon}; give a number >= 0")
        _validate.integer("unused", self.unused, least=0, most=self.rounds)
        if self.relation is None:
            if not self.epsilon == self.mu == math.inf or self.release:
                raise ValueError(
                    f"relation is None with epsilon {self.epsilon}; name the neighbouring relation "
                    f"({', '.join(budget.RELATIONS)}), or use Guarantee.none"
                )
            return
        gaussian = isinstance(self.loss, losses.Gaussian)
        rules = budget.ACCOUNTANTS if gaussian else (self.loss.kind,)
        _validate.one_of("accountant", self.accountant, rules)
        self._check_threat()
        self._check_curve()
        if self.per_agent_epsilon is not None:
            values = tuple(float(value) for value in self.per_agent_epsilon)
            if not gaussian or not values or max(values) != self.epsilon or min(values) < 0:
                raise ValueError(
                    f"per_agent_epsilon is {values} with epsilon {self.epsilon}; epsilon is their "
                    "maximum, of a Gaussian loss"
                )
            object.__setattr__(self, "per_agent_epsilon", values)
        if self.unsound != (exact > self.epsilon) or (self.unsound and self.accountant != "paper"):
            what = f"mu {self.mu}" if gaussian else f"a {type(self.loss).__name__} loss"
            raise ValueError(
                f"epsilon is {self.epsilon} with {what} and delta {self.delta}, whose exact "
                f"epsilon is {exact}; state at least that (unsound=True only for the paper's rule "
                "where it is false)"
            )

    def _check_threat(self) -> None:
        """Refuse a loss that does not hold against the threat."""
        if isinstance(self.loss, losses.Pld) and (
            (self.relation, self.attacker) != ("zero_out_record", "outsider")
        ):
            raise ValueError(
                f"relation is {self.relation!r} and attacker {self.attacker!r} with a Pld loss; "
                "sampling amplifies for zero_out_record and an outsider alone"
            )
        if self.participation is not None and self.unit == "agent":
            raise ValueError(
                f"participation is {self.participation} under relation {self.relation!r}; an agent "
                "takes part in every round, leave it None"
            )
        if self.release and self.gradient_gap is not None:
            raise ValueError(
                f"gradient_gap is {self.gradient_gap} in a release; a gap is assumed in simulations"
            )
        if self.release and (self.attacker == "aggregator" or self.gradients == "view"):
            raise ValueError(
                f"attacker is {self.attacker!r} with gradients {self.gradients!r} in a release, "
                "which rounds every message: sums of rounded messages can show what sums of exact "
                "ones hide. State the loss of all messages: attacker 'outsider', or gradients "
                "'any' for nodes"
            )

    def _check_curve(self) -> None:
        if self.curve is None:
            return
        if self.mu is None or self.rounds not in self.curve.marks:
            raise ValueError(
                f"curve has marks {self.curve.marks} for {self.rounds} rounds of a "
                f"{type(self.loss).__name__} loss; make it with Guarantee.stopping_at"
            )
        if not self.curve.holds(self.mu, self.rounds, self.delta - self.added_delta):
            raise ValueError(
                f"curve.delta is {self.curve.delta} with delta {self.delta}, of which "
                f"{self.added_delta} is used, which is too much to hold at all its marks; make it "
                "with Guarantee.stopping_at"
            )

    @property
    def mu(self) -> float | None:
        """Gaussian-DP parameter of the whole run, the largest over agents; None without one."""
        return self.loss.mu if isinstance(self.loss, losses.Gaussian) else None

    @property
    def rounds(self) -> int:
        """Rounds T that it covers."""
        return self.loss.rounds

    @property
    def white(self) -> bool:
        """True where the noise is independent between rounds, so that they spend apart."""
        return getattr(self.loss, "white", True)

    @property
    def over_rounds(self) -> str | None:
        """Why ``white`` is False; None where it is True, and in older records."""
        return getattr(self.loss, "over_rounds", None)

    @property
    def participation(self) -> tuple[int, int] | None:
        """(epochs, separation) of a Gaussian loss; None where a record may take part in all."""
        return self.loss.participation if isinstance(self.loss, losses.Gaussian) else None

    @property
    def other_loss(self) -> losses.Pld | losses.Concentrated | losses.Pure | None:
        """The loss where it is not Gaussian; None where mu says all."""
        return None if isinstance(self.loss, losses.Gaussian) else self.loss

    @property
    def exact_epsilon(self) -> float:
        """Epsilon of the loss at this delta (a curve's), whatever the accountant states."""
        return self.exact(self.loss)

    def exact(self, loss: losses.AnyLoss) -> float:
        """Epsilon of a loss at this delta, what finite precision adds included.

        Args:
            loss: The record's own, or one of its agents'.
        """
        delta = self.delta - self.added_delta if self.curve is None else self.curve.delta
        return loss.epsilon(delta) + self.added_epsilon

    @property
    def spent(self) -> losses.AnyLoss:
        """What the phases under a total have spent together; without them the loss itself."""
        if not self.phases:
            return self.loss
        every = [_counted(one.loss, self.accountant) for one in self.phases]
        return functools.reduce(lambda first, later: first.then(later), every)

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """The record from its fields and those of its parts by name, as they are stored.

        Args:
            fields: Of this record, `Threat` and `Caveats`; and ``mu``, ``rounds``, ``white``,
                ``over_rounds`` and ``participation`` of a Gaussian loss, or ``other_loss``.

        Raises:
            TypeError: For missing or unknown fields.
            ValueError: For a record that contradicts itself.
        """
        parts: dict[str, Any] = {}
        for name, part in (("threat", Threat), ("caveats", Caveats)):
            known = {one.name for one in dataclasses.fields(part)} & fields.keys()
            parts[name] = part(**{key: fields.pop(key) for key in known})
        unit = fields.pop("unit", None)
        if unit not in (None, parts["threat"].unit):
            raise ValueError(
                f"unit is {unit!r}, relation {parts['threat'].relation!r} protects "
                f"{parts['threat'].unit!r}; leave it out"
            )
        names = ("mu", "rounds", "white", "over_rounds", "participation")
        gaussian = {name: fields.pop(name) for name in names if name in fields}
        loss = fields.pop("other_loss", None)
        if loss is None:
            if missing := {"mu", "rounds"} - gaussian.keys():
                raise TypeError(f"missing {', '.join(sorted(missing))}")
            loss = losses.Gaussian(**gaussian)
        elif gaussian.get("mu") is not None or gaussian.get("rounds") != loss.rounds:
            raise ValueError(
                f"mu is {gaussian.get('mu')} and rounds {gaussian.get('rounds')} with a "
                f"{type(loss).__name__} loss, which covers {loss.rounds}; leave mu out"
            )
        return cls(loss=loss, **parts, **fields)

    def fields(self) -> dict[str, Any]:
        """Fields and those of the parts by name; the inverse of `of`."""
        names = [one.name for one in dataclasses.fields(self)]
        names += ["unit", "mu", "rounds", "white", "over_rounds", "participation", "other_loss"]
        flat = {n: getattr(self, n) for n in names if n not in ("threat", "loss", "caveats")}
        return flat | vars(self.threat) | vars(self.caveats)

    def replace(self, **changes: Any) -> Self:
        """The record with other fields, by their names in `of`.

        Args:
            changes: The fields.
        """
        if "relation" in changes:
            changes = {"unit": None} | changes
        return self.of(**(self.fields() | changes))

    def to_dict(self) -> dict[str, Any]:
        """The record as a dict for strict JSON: infinities are the string "inf"."""

        def plain(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return [plain(entry) for entry in value]
            if isinstance(value, dict):
                return {key: plain(entry) for key, entry in value.items()}
            return "inf" if value == math.inf else value

        record = self.fields() | {"phases": [one.to_dict() for one in self.phases]}
        if self.curve is not None:
            record["curve"] = dataclasses.asdict(self.curve)
        if (loss := self.other_loss) is not None:
            record["other_loss"] = {"kind": loss.kind} | dataclasses.asdict(loss)
        stored = {key: plain(value) for key, value in record.items()}
        return {k: v for k, v in stored.items() if k not in _LATER or v not in _DEFAULTS}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; the record is checked again.

        Args:
            record: What `to_dict` returned, perhaps through JSON.

        Returns:
            The guarantee.

        Raises:
            ValueError: For missing or unknown fields, or a record that contradicts itself.
        """

        def rich(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: rich(entry) for key, entry in value.items()}
            if isinstance(value, list | tuple):
                return tuple(rich(entry) for entry in value)
            return math.inf if value == "inf" else value

        values = {key: rich(value) for key, value in record.items() if key != "phases"}
        if isinstance(values.get("curve"), dict):
            values["curve"] = stopping.Curve(**values["curve"])
        if isinstance(values.get("other_loss"), dict):
            values["other_loss"] = losses.from_dict(values["other_loss"])
        phases = tuple(cls.from_dict(one) for one in record.get("phases", ()))
        try:
            return cls.of(**values, phases=phases)
        except TypeError as error:
            raise ValueError(
                f"record has unknown or missing fields ({error}); read it with the version that "
                "wrote it"
            ) from None


_DEFAULTS: tuple[Any, ...] = (None, 0, [], "l2")
_LATER = {
    "nodes", "other_loss", "norm", "gradient_gap", "smoothness", "dropouts", "colluders",
    "sealed", "sum_rounding", "secrets", "over_rounds", "phases", "lost_noise", "unused", "phase",
    "custom",
}  # fmt: skip
"""Fields that records leave out where they are a default, as those of before had none."""


def _counted(loss: losses.AnyLoss, kind: Any) -> Any:
    """A phase's loss in the terms of a total, for which a filter is known."""
    if kind == "zcdp" and isinstance(loss, losses.Gaussian | losses.Pure):
        return loss.concentrated()
    if isinstance(loss, losses.Pld):
        raise ValueError(
            "loss is Pld, of batches drawn by Poisson sampling; adding up such losses to a total "
            "does not hold for phases chosen on the way (arXiv 2602.06756). Sample without "
            "amplification (samplers.Random or Cyclic), or fix all phases beforehand and compose "
            "them with planned=True"
        )
    if loss.kind != kind:
        raise ValueError(
            f"loss is {type(loss).__name__}, which no filter of a total by {kind!r} adds up; 'gdp' "
            "takes Gaussian noise, 'pure' Laplace noise, and 'zcdp' both and discrete noise: fix "
            "the total as Budget(..., accountant=...) for all phases"
        )
    return loss
