"""What a guarantee is made of: whom it is against, what is lost, and what else it counts on."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf, isinf
from operator import attrgetter
from typing import Any, Literal, Self, get_args

import numpy as np

from dpjax import _validate
from dpjax.accounting import budget, finite, gdp, stopping
from dpjax.accounting.arrays import Fields, Floats, Ints, Numbers, Pattern
from dpjax.accounting.balls_in_bins import BinLoss as BinLoss  # So that stored ones are read.
from dpjax.accounting.loss import KINDS, AmplifiedLoss, Loss
from dpjax.accounting.losses import Gaussian
from dpjax.accounting.rounding import MARGIN

__all__ = ["Threat"]

_Attacker = Literal["outsider", "node", "coalition", "aggregator"]
"""Words of `dpjax.accounting.wording.ATTACKERS`."""

Secrets = Literal["own", "group", "shared", "links", "shares", "alone"]
"""Who draws the noise from which secret: every agent from its own; the members of a group from one
seed; all agents from one; noise on links; a share of a sum's noise each, from a secret of its own;
one agent who holds all data. Under all but "links" and "shares" the stated loss is that of an
outsider who sees every message, or more."""

# What lists of custom parts can be split into: ``Net``, or ``module.<lambda>``.
_NAME = re.compile(r"[^\s,`]+")


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

    Example:
        >>> from dpjax.accounting.records import Threat
        >>> Threat(relation="replace_record", attacker="outsider", clip_norm=1.0).gradients
        'any'
    """

    relation: budget.Relation | None
    attacker: _Attacker | None
    clip_norm: float
    gradients: Literal["any", "view"] = "any"
    nodes: Ints | None = None
    norm: Literal["l2", "l1"] = "l2"
    gradient_gap: float | None = None
    smoothness: float | None = None

    def __post_init__(self) -> None:
        """Refuse words that there are not, and gradients that nothing bounds."""
        if self.relation is None:
            return
        words = {
            "relation": budget.RELATIONS,
            "attacker": get_args(_Attacker),
            "gradients": ("any", "view"),
            "norm": ("l2", "l1"),
        }
        for name, options in words.items():
            _validate.one_of(name, getattr(self, name), options)
        if self.nodes is not None and (self.attacker != "coalition" or not self.nodes):
            raise ValueError(f"nodes is {self.nodes} with {self.attacker!r}; give a coalition's")
        gap = self.gradient_gap
        bound = "clip_norm" if gap is None else "gradient_gap"
        remedy = f"give {bound}=1.0, say: a finite number above 0"
        _validate.positive(bound, getattr(self, bound), remedy=remedy)
        unclipped = (self.clip_norm, self.relation) == (inf, "replace_agent")
        if gap is not None and not unclipped:
            raise ValueError(
                f"gradient_gap is {gap} with clip norm {self.clip_norm} and relation "
                f"{self.relation!r}; a gap is assumed of whole agents that are not clipped"
            )

    @property
    def unit(self) -> Literal["agent", "record", "client"] | None:
        """What is protected, by the relation."""
        return None if self.relation is None else budget.unit(self.relation)


@dataclass(frozen=True, kw_only=True)
class _Caveats:
    """What a guarantee counts on, and what it does not cover.

    Attributes:
        release: True where the noise key was drawn from the operating system and kept secret;
            False for a simulation, whose seed gives the noise away.
        sites: True where every agent was a process of its own with secrets of its own, a site: the
            loss is one to participants, too, who see every message. A release of several parties.
        insecure: True where links of sites were not encrypted, and nobody proved who it was.
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
        sum_only: True where noise is in shares, so that it holds for sums alone: an outsider reads
            single messages under the masks of a secure sum, or not at all; "sealed" in older
            records.
        secrets: Who draws the noise from which secret, by which `protection` tells who else is
            protected; None where that is not known.
        phase: Number of the run among several in a row, from whose seed and number a simulation
            draws its noise; of several the largest.
        custom: Names of the user's own classes and functions that it relies on, and attributes
            that were set on the package's parts; every text names them.
        private_partition: True where labels or other values of records decided which agent holds
            which record; it is stated as if that were public.
    """

    release: bool
    sites: bool = False
    insecure: bool = False
    unsound: bool = False
    added_epsilon: float = 0.0
    added_delta: float = 0.0
    sum_rounding: float = 0.0
    private_stop: bool = False
    lost_noise: tuple[int, float] | None = None
    unused: int = 0
    dropouts: int = 0
    colluders: int = 0
    sum_only: bool = False
    secrets: Secrets | None = None
    phase: int = 0
    custom: tuple[str, ...] = ()
    private_partition: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        flags = ("release", "sites", "insecure", "unsound", "private_stop", "sum_only")
        _validate.fields(self, _validate.flag, *flags, "private_partition")
        if self.sites and not self.release:
            raise ValueError(
                "sites is True with release False; sites draw hardened noise: give release=True, "
                "or leave sites out for a simulation"
            )
        if self.insecure and not self.sites:
            raise ValueError("insecure is True and sites False; leave it out where no links are")
        for name in ("added_epsilon", "added_delta", "sum_rounding"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number >= 0")
        counts = ("unused", "dropouts", "colluders", "phase")
        _validate.fields(self, _validate.integer, *counts, minimum=0)
        if self.secrets is not None:
            _validate.one_of("secrets", self.secrets, get_args(Secrets))
        if self.lost_noise is not None:
            first, share = self.lost_noise
            if _validate.integer("lost_noise", first) and not 0 < share <= 1:
                raise ValueError(f"lost_noise is {self.lost_noise}; give (round, share up to 1)")
        for name in self.custom:
            if not (isinstance(name, str) and name.isprintable() and _NAME.fullmatch(name)):
                raise _validate.refusal("custom", self.custom, "give names of classes or functions")

    @property
    def kind(self) -> Literal["simulation", "release", "sites"]:
        """Who drew the noise, and how."""
        if self.sites:
            return "sites"
        return "release" if self.release else "simulation"


def _loss(name: str, default: Any = None) -> property:
    """A property of the loss, or what stands for it under losses that have none."""
    return property(lambda record: getattr(record.loss, name, default))


@dataclass(frozen=True, kw_only=True)
class Record(Threat, _Caveats):
    """(epsilon, delta)-DP of a run: the threat, the loss, and the caveats.

    Attributes:
        epsilon: Stated epsilon, the largest over agents; infinity when non-private.
        delta: Delta.
        accountant: How epsilon follows from mu, one of `budget.ACCOUNTANTS`; the loss's own kind
            where that is not Gaussian ("pld", "zcdp", "pure", say); None when non-private.
        loss: What the run costs, before it is stated at a delta.
        per_agent_epsilon: One epsilon an agent, where budgets differ.
        per_agent_mu: Beside it, what Gaussian noise costs each agent: upper bounds, which phases
            add up. None in older records and those of one's own, where each agent's mu is what the
            accountant allows for its epsilon (`dpjax.accounting.gdp.mu`, exact to 1e-11).
        curve: The marks at which the run may have stopped by what was released, with what makes
            the numbers of all of them hold at once; None where the rounds were fixed beforehand.
        phases: The phases so far of which this record states a total that was fixed before the
            first one, see `dpjax.accounting.guarantee.Guarantee.within`; empty for a run of its
            own.
        rounds: Rounds T that it covers.
        mu: Gaussian-DP parameter of the whole run, the largest over agents; None without one.
        white: True where the noise is independent between rounds, so that they spend apart.
        over_rounds: Why ``white`` is False, see `dpjax.accounting.losses.Gaussian`.

    Example:
        >>> import dpjax as dp
        >>> parts = dict(sampler=dp.samplers.Random(1), optimizer=dp.optimizers.Sgd(0.1), rounds=2)
        >>> config = dp.Config(protect=dp.Protect("replace_agent", clip_norm=1.0), **parts)
        >>> plan = dp.make_plan(config, dp.mixing.metropolis_hastings(dp.graphs.ring(3)))
        >>> plan.guarantee.epsilon, plan.guarantee.rounds  # no noise
        (inf, 2)
    """

    epsilon: float
    delta: float
    accountant: str | None
    loss: Loss
    per_agent_epsilon: Floats | None = None
    per_agent_mu: Floats | None = None
    curve: stopping.Curve | None = None
    phases: "tuple[Self, ...]" = ()

    rounds = property(attrgetter("loss.rounds"))
    mu = _loss("mu")
    white = _loss("white", True)
    over_rounds = _loss("over_rounds")

    def __post_init__(self) -> None:
        """Refuse a record that contradicts itself."""
        Threat.__post_init__(self)
        _Caveats.__post_init__(self)
        # The loss is stated at what is left of delta.
        if self.added_delta and not self.added_delta < self.delta:
            raise ValueError(f"added_delta is {self.added_delta}; give less than {self.delta}")
        exact = self.exact_epsilon  # Refuses a bad delta.
        epsilon = self.epsilon
        mu = self.mu
        if not epsilon >= 0:
            raise ValueError(f"epsilon is {epsilon}; give a number >= 0")
        _validate.integer("unused", self.unused, minimum=0, maximum=self.rounds)
        if self.relation is None:
            if not epsilon == mu == inf or self.release:
                raise ValueError(
                    f"relation is None with epsilon {epsilon}; give one of "
                    f"{', '.join(budget.RELATIONS)}, or use Guarantee.none"
                )
            return
        # A Gaussian loss is stated by one of several rules, every other by its own.
        rules = (self.loss.kind,) if mu is None else budget.ACCOUNTANTS
        _validate.one_of("accountant", self.accountant, rules)
        if self.per_agent_epsilon is not None:
            epsilons = tuple(map(float, self.per_agent_epsilon))
            # A nan fails every comparison.
            fits = all(value >= 0 for value in epsilons)
            if mu is None or not fits or max(epsilons, default=-1.0) != epsilon:
                raise ValueError(
                    f"per_agent_epsilon is {epsilons}; epsilon {epsilon} is to be their maximum"
                )
            object.__setattr__(self, "per_agent_epsilon", epsilons)
        understated = exact > epsilon
        if self.per_agent_mu is not None:
            understated |= self._check_agents()
        if self.unsound != understated or (self.unsound and self.accountant != "paper"):
            loss_text = f"a {type(self.loss).__name__} loss" if mu is None else f"mu {mu}"
            raise ValueError(
                f"epsilon is {epsilon} with {loss_text} and delta {self.delta}, whose exact "
                f"epsilon is {exact}; state at least that, or add noise (unsound=True "
                "only for the paper's rule where it is false)"
            )
        self._check_threat()

    def _check_agents(self) -> bool:
        """Refuse losses of agents beyond the record's; whether some are beyond their epsilons."""
        mus = np.array(self.per_agent_mu, float)
        object.__setattr__(self, "per_agent_mu", tuple(mus.tolist()))
        epsilons = np.array(self.per_agent_epsilon or (), float)
        if self.mu is None or mus.shape != epsilons.shape or mus.max() != self.mu:
            raise ValueError(
                f"per_agent_mu is {self.per_agent_mu}; give one number for each of "
                f"{len(epsilons)} agents' epsilons, of which mu {self.mu} is the largest"
            )
        exact = np.asarray(gdp.epsilon(mus, self._delta)) + self.added_epsilon
        # The last bits of an epsilon may depend on how many are computed at once.
        understated = bool((exact > epsilons * (1 + 1e-12)).any())
        if understated and not self.unsound:
            agent = int(np.argmax(exact - epsilons))
            raise ValueError(
                f"per_agent_epsilon is {epsilons[agent]} at agent {agent} with mu {mus[agent]}, "
                f"whose exact epsilon is {exact[agent]}; state at least that, or add noise "
                "(unsound=True only for the paper's rule where it is false)"
            )
        return understated

    def _check_threat(self) -> None:
        """Refuse a loss that does not hold against the threat, or at a curve's marks."""
        threat = f"relation is {self.relation!r} and attacker {self.attacker!r}"
        loss = self.loss
        stated = (self.relation, self.attacker)
        if isinstance(loss, AmplifiedLoss) and stated != (loss.relation, loss.attacker):
            raise ValueError(
                f"{threat}; a {type(loss).__name__} loss is of {loss.relation} and an "
                f"{loss.attacker} alone"
            )
        # An agent has gradients whatever its records do.
        if self.participation is not None and self.unit == "agent":
            raise ValueError(
                f"participation is {self.participation}; an agent takes part in every round"
            )
        if self.release and self.gradient_gap is not None:
            raise ValueError(f"gradient_gap is {self.gradient_gap} in a release; simulate with one")
        rounds_sums = self.attacker == "aggregator" and not self.sums_of_sites
        if self.release and (rounds_sums or self.gradients == "view"):
            raise ValueError(
                f"{threat} with gradients {self.gradients!r} in a release: rounded sums can show "
                "what exact ones hide. State the loss of all messages: attacker 'outsider', or "
                "gradients 'any' for nodes"
            )
        if self.sites:
            self._check_sites()
        if (curve := self.curve) is not None:
            remaining = self.delta - self.added_delta
            fits = self.mu is not None and self.rounds in curve.marks
            if not (fits and curve.holds(self.mu, self.rounds, remaining)):
                raise ValueError(
                    f"curve.delta is {curve.delta} with {remaining} left of delta, too much to "
                    "hold at all its marks; make it with Guarantee.stopping_at"
                )

    @property
    def sums_of_sites(self) -> bool:
        """Whether sites add up whole numbers among themselves, so that none sees a single one."""
        return self.sites and self.sum_only and self.loss.kind == "zcdp"

    def _check_sites(self) -> None:
        """Refuse what does not hold where every agent holds its own secrets and reads messages."""
        if self.sums_of_sites:
            if self.attacker != "aggregator" or not self.colluders:
                raise ValueError(
                    f"attacker is {self.attacker!r} and colluders {self.colluders} of sums among "
                    "sites, of whom one adds up and knows its own noise: give attacker "
                    "'aggregator', and colluders=1 at least"
                )
            return
        if self.attacker != "outsider" and self.secrets not in ("own", "links"):
            # A member of a group holds the noise of all its members, whatever a node is said to.
            raise ValueError(
                f"attacker is {self.attacker!r} and secrets is {self.secrets!r} of sites, who can "
                "subtract the noise of secrets that they hold; plan for attacker 'outsider'"
            )
        if self.sum_only or self.secrets == "shares":
            raise ValueError(
                f"sum_only is {self.sum_only} and secrets is {self.secrets!r} of sites, who read "
                "single messages; give noise that protects each message, noise.Independent() say, "
                "or whole numbers, noise.Discrete()"
            )
        if isinstance(self.loss, AmplifiedLoss):
            raise ValueError(
                f"loss is {type(self.loss).__name__} of sites; it holds for an outsider alone: "
                "give another sampler, Random or Cyclic say"
            )

    @property
    def participation(self) -> Pattern | None:
        """(epochs, separation) of a Gaussian loss; None where a record may take part in all."""
        return self.loss.participation if isinstance(self.loss, Gaussian) else None

    @property
    def other_loss(self) -> Loss | None:
        """The loss where it is not Gaussian; None where mu says all."""
        return None if isinstance(self.loss, Gaussian) else self.loss

    @property
    def exact_epsilon(self) -> float:
        """Epsilon of the loss at this delta (a curve's), whatever the accountant states."""
        return self.exact(self.loss)

    def exact(self, loss: Loss) -> float:
        """Epsilon of a loss at this delta, what finite precision adds included.

        Args:
            loss: The record's own, or one of its agents'.
        """
        return loss.epsilon(self._delta) + self.added_epsilon

    @property
    def _delta(self) -> float:
        """Delta at which the loss is stated: a curve's, or without what finite precision takes."""
        return self.delta - self.added_delta if self.curve is None else self.curve.delta

    @property
    def spent(self) -> Any:
        """The loss of the phases under a total together; without them the loss itself.

        Every phase counts by the agent with its largest loss.
        """
        if not self.phases:
            return self.loss
        phase_losses = [_counted(phase, self.accountant) for phase in self.phases]
        return reduce(lambda first, later: first.then(later), phase_losses)

    @property
    def agents_spent(self) -> Numbers:
        """[n] sizes of what the phases have cost each agent, [1] where all count alike.

        Upper bounds. Agent i is the same one in all phases; where phases have different numbers of
        agents, each counts by the agent with its largest loss.
        """
        used = together(self.phases) if self.accountant == "gdp" else None
        return np.array([self.spent.size]) if used is None else used

    @classmethod
    def of(cls, *, rounds: int, mu: Any = None, other_loss: Any = None, **fields: Any) -> Self:
        """The record from its fields by name, with those of a Gaussian loss, as they are stored.

        Args:
            rounds: Of the loss.
            mu: Of a Gaussian loss; None with ``other_loss``.
            other_loss: A loss that is not Gaussian.
            fields: Of this record, `Threat` and `_Caveats`; ``white``, ``over_rounds`` and
                ``participation`` of a Gaussian loss; ``unit``, which the relation says itself.

        Raises:
            TypeError: For missing or unknown fields.
            ValueError: For a record that contradicts itself.
        """
        # Stored for readers of the file; the relation implies it.
        unit = fields.pop("unit", None)
        names = ("white", "over_rounds", "participation")
        gaussian = {name: fields.pop(name) for name in names if name in fields}
        loss = Gaussian(mu, rounds, **gaussian) if other_loss is None else other_loss
        if other_loss is not None and (mu is not None or rounds != loss.rounds):
            raise ValueError(
                f"mu is {mu} and rounds {rounds} with a loss that covers {loss.rounds}"
            )
        record = cls(loss=loss, **fields)
        if unit not in (None, record.unit):
            raise ValueError(f"unit is {unit!r}, and the relation's {record.unit!r}; leave it out")
        return record

    def fields(self) -> Fields:
        """Fields by name, those of a Gaussian loss among them; the inverse of `of`."""
        names = ["mu", "rounds", "white", "over_rounds", "participation", "other_loss"]
        flat = vars(self) | {name: getattr(self, name) for name in names}
        return {name: value for name, value in flat.items() if name != "loss"}

    def replace(self, **changes: Any) -> Self:
        """The record with other fields, by their names in `of`.

        Args:
            changes: The fields.
        """
        return self.of(**(self.fields() | changes))

    def to_dict(self) -> Fields:
        """The record as a dict for strict JSON: infinities are the string "inf"."""
        stored = _plain(self.fields() | {"unit": self.unit})
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
        values = {_OLDER.get(key, key): _rich(value) for key, value in record.items()}
        # Which agents colluded was not stored then.
        if values.get("attacker") == "nodes":
            values["attacker"] = "coalition"
        try:
            curve = values.get("curve")
            if curve is not None:
                values["curve"] = stopping.Curve(**curve)
            loss = values.get("other_loss")
            if loss is not None:
                kind = loss.pop("kind")
                if kind not in KINDS:
                    raise ValueError(
                        f"record has a loss of kind {kind!r}, which no class here has; import the "
                        "module that defines it"
                    )
                values["other_loss"] = KINDS[kind](**loss)
            values["phases"] = tuple(map(cls.from_dict, values.get("phases", ())))
            return cls.of(**values)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"record has unknown or missing fields ({error})") from None


# Fields of older records; these also call a coalition "nodes", and do not say of which agents.
_OLDER = {"sealed": "sum_only"}
_DEFAULTS: tuple[Any, ...] = (None, 0, [], "l2")
# Fields that records leave out where they are a default, as those of before had none.
_LATER = {
    "nodes", "other_loss", "norm", "gradient_gap", "smoothness", "dropouts", "colluders",
    "sum_only", "sum_rounding", "secrets", "over_rounds", "phases", "lost_noise", "unused", "phase",
    "custom", "private_partition", "per_agent_mu", "sites", "insecure",
}  # fmt: skip


def agents_mus(record: Record) -> Numbers:
    """[n] upper bounds on each agent's mu, [1] where all agents have the same.

    Args:
        record: A guarantee of Gaussian noise.
    """
    if record.per_agent_epsilon is None:
        return np.array([record.mu])
    if record.per_agent_mu is not None:
        return np.array(record.per_agent_mu)
    # Older records hold each agent's epsilon alone.
    epsilons = np.array(record.per_agent_epsilon)
    shared = np.full(len(epsilons), record.mu)
    mus = shared
    rule = record.accountant
    if rule != "gdp":
        # Each agent's mu is at most what its accountant allowed for its epsilon.
        above = np.maximum(epsilons, 1e-300)
        allowed = budget.allowed_mu(
            above,
            record.delta,
            accountant=rule,  # type: ignore[arg-type]
            allow_unsound=True,
        )
        mus = np.minimum(mus, allowed)
    if not record.unsound:
        # The exact rule may allow less than the accountant did.
        free = np.maximum(epsilons - record.added_epsilon, 0.0)
        mus = np.minimum(mus, gdp.mu(free, record._delta))
    # Epsilons of an unsound rule can say less than the record's mu, which somebody loses.
    if mus.max() < record.mu * (1 - 1e-9):
        return shared
    return mus


def precision_cost(record: Record) -> tuple[float, float]:
    """What finite precision adds to epsilon, and the part of delta that it uses.

    Guarantee: of a release plan that still states nothing of both, no less than its run will. Runs
    are refused where an agent's epsilon by the accountant and the cost pass the agent's budget, or
    where they take more of delta.

    Args:
        record: The guarantee.
    """
    cost = record.added_epsilon, record.added_delta
    # Simulations pay nothing, and a run's record states what it has paid.
    if any(cost) or not record.release or record.unsound:
        return cost
    if record.mu is None or isinf(record.epsilon):
        return cost
    mus = [record.mu]
    epsilons = [record.epsilon]
    if record.per_agent_mu and record.per_agent_epsilon:
        mus = list(record.per_agent_mu)
        epsilons = list(record.per_agent_epsilon)
    claimed = budget.claimed_epsilon(
        mus,
        record._delta,
        accountant=record.accountant,  # type: ignore[arg-type]
        allow_unsound=True,
    )
    reserve = float((np.array(epsilons) - claimed).min())
    if reserve > 1e-6 * min(epsilons):
        return reserve, finite.LIMIT * record.delta
    return cost


def together(phases: Sequence[Record]) -> Numbers | None:
    """[n] upper bounds on each agent's mu of all phases, where budgets of some are by agent.

    Args:
        phases: Guarantees of runs in a row, agent i being the same one in all of them.

    Returns:
        None where every phase has one budget for all agents, a loss is not Gaussian, or numbers
        of agents differ, so that the agents of one phase are not known in another.
    """
    if any(phase.mu is None for phase in phases):
        return None
    mus = [agents_mus(phase) for phase in phases]
    # Phases of one number for all agents join those of several.
    counts = {len(agent_mus) for agent_mus in mus} - {1}
    if len(counts) != 1:
        return None
    return reduce(lambda first, later: np.hypot(first, later) * MARGIN, mus)


def _plain(value: Any) -> Any:
    """A field as JSON has it."""
    if isinstance(value, Record):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        fields = dict(vars(value))
        # By its kind a loss finds its class again.
        kind = getattr(value, "kind", None)
        if kind is not None:
            fields["kind"] = kind
        return {name: _plain(entry) for name, entry in fields.items()}
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    # Strict JSON has no infinity.
    return "inf" if value == inf else value


def _rich(value: Any) -> Any:
    """The inverse, but for classes."""
    if isinstance(value, Mapping):
        return {key: _rich(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_rich(entry) for entry in value)
    return inf if value == "inf" else value


def _counted(phase: Record, kind: Any) -> Any:
    """A phase's loss in the terms of a total, for which a filter is known."""
    loss = phase.loss
    summed: Any = loss
    # The part of delta that a release's total keeps for finite precision is for roundings, too.
    if isinstance(loss, AmplifiedLoss) or (loss.failure and not phase.release):
        raise ValueError(summed.no_total)
    if kind == "zcdp":
        return loss.concentrated()
    if loss.kind != kind:
        raise ValueError(
            f"loss is {type(loss).__name__}, which no filter of a total by {kind!r} adds up; give "
            "Budget(..., accountant=...): 'gdp' for Gaussian noise, 'pure' for Laplace noise, "
            "'zcdp' for both and discrete noise"
        )
    return loss
