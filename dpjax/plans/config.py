"""The frozen config of a run: everything that decides its plan, checked when it is made."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dpjax import _validate
from dpjax.accounting import budget
from dpjax.mechanism.participation import Participation
from dpjax.plans import strategies

__all__ = ["DESIGNS", "Config"]

DESIGNS = (
    "non_private", "independent", "pairwise", "whisper", "whisper_horizon", "anti_pgd",
    "prefix_sum", "mafalda", "spacetime",
)  # fmt: skip
"""Noise designs a run can have by name alone; "covariance" is the user's own, given to the plan.
"central" is a reference that outsiders' accounting refuses."""


@dataclass(frozen=True)
class Config:
    """Everything that decides a run's mechanism.

    Attributes:
        design: "non_private" (clipped, no noise), "independent" (LDP), "pairwise" (DECOR),
            "whisper" (one step) or "whisper_horizon" (the whole run); or noise correlated over
            rounds, at each agent alone: "anti_pgd", "prefix_sum" (D-MF), "mafalda"; or over agents
            and rounds: "spacetime"; or "covariance", a matrix over agents of your own, which
            ``plan.make(..., covariance=R)`` takes and scales to the budget.
        epsilon: Target epsilon at ``delta``, one number or one an agent; ignored when non-private.
        delta: Target delta.
        relation: Neighbouring relation, no default: "replace_agent" (all data of one agent;
            the agent's mini-batch gradient is clipped), "replace_record" or "zero_out_record"
            (every record's gradient is clipped, the sum released and then averaged).
        rounds: Rounds T, which the budget covers and the run cannot exceed.
        clip_norm: Clip norm C of what is clipped.
        batch_size: Distinct records an agent draws each round. No subsampling amplification is
            claimed: a record may take part in every round. With the cyclic sampler the places in
            a batch, padding included: at least the largest number of an agent's records over the
            separation, rounded up. Sums are divided by it either way.
        step_size: Step size eta, of the first round when it decays.
        step_decay: "constant", or "sqrt" for eta / sqrt(t), t = 1, 2, ...
        accountant: How the precision bound follows from the budget: "gdp" (exact), "rdp", "paper".
        allow_unsound: Run the paper's rule where it is false; its guarantee then says so.
        clipping: "flat" or "automatic" (normalised) clipping.
        horizon: Rounds the horizon-aware design looks ahead; None is all of them.
        max_variance: Largest variance of Whisper's noise, in units of independent noise's, above 1;
            None is no limit. Noise that cancels must first be sent.
        subgroups: Agents that share a seed, each agent in one group; Whisper designs only. None is
            one group of all. Members of other groups are outsiders to a group's noise, provided
            that each group draws its own; a run here is one process, whose one key draws all.
        microbatch: Records per pass of per-record clipping, to bound memory; None chooses by cost.
        release: True for a run whose messages really go out: its noise key comes from the
            operating system. False is a simulation, whose seed reveals the noise.
        participation: (epochs k, separation b): every record takes part k times, exactly b rounds
            apart, in T = k b rounds; relations of records and the cyclic sampler only. None: a
            record (or an agent) may take part in every round.
        sampler: "random", or "cyclic": record r of an agent is in the batches of the rounds
            r mod b, r mod b + b, ..., see `dpjax.data.batches.cyclic`.
        name: What records and figures call a design "covariance"; None for all others.
    """

    design: str
    epsilon: float | tuple[float, ...]
    delta: float
    relation: budget.Relation
    rounds: int
    clip_norm: float
    batch_size: int
    step_size: float
    step_decay: Literal["constant", "sqrt"] = "constant"
    accountant: Literal["gdp", "rdp", "paper"] = "gdp"
    allow_unsound: bool = False
    clipping: Literal["flat", "automatic"] = "flat"
    horizon: int | None = None
    max_variance: float | None = None
    subgroups: tuple[tuple[int, ...], ...] | None = None
    microbatch: int | None = None
    release: bool = False
    participation: tuple[int, int] | None = None
    sampler: Literal["random", "cyclic"] = "random"
    name: str | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot be run."""
        given: Any = self.epsilon
        if isinstance(given, list | np.ndarray) and np.ndim(given):
            object.__setattr__(self, "epsilon", tuple(given))
        _validate.flag("release", self.release)
        _validate.flag("allow_unsound", self.allow_unsound)
        if isinstance(self.design, str) and self.design == "central":
            raise ValueError(
                "design is 'central', the trusted-server reference, whose covariance is singular: "
                f"outsiders are not defended against; choose one of {', '.join(DESIGNS)}"
            )
        _validate.one_of("design", self.design, (*DESIGNS, "covariance"))
        self._check_name()
        _validate.one_of("relation", self.relation, budget.RELATIONS)
        _validate.one_of("accountant", self.accountant, budget.ACCOUNTANTS)
        _validate.one_of("step_decay", self.step_decay, ("constant", "sqrt"))
        _validate.one_of("clipping", self.clipping, ("flat", "automatic"))
        for name in ("rounds", "batch_size", "horizon", "microbatch"):
            value = getattr(self, name)
            if value is not None or name in ("rounds", "batch_size"):
                # Below what an int32 counter of rounds can hold.
                value = _validate.integer(name, value, most=2**31 - 2)
                object.__setattr__(self, name, value)
        for name, least, most in (("clip_norm", 1e-9, 1e9), ("step_size", 1e-37, 1e37)):
            value = _validate.positive(name, getattr(self, name))
            if not least <= value <= most:
                raise ValueError(
                    f"{name} is {value!r}; give a number from {least:g} to {most:g}, which float32 "
                    "can work with"
                )
            object.__setattr__(self, name, value)
        self._check_whisper()
        self._check_sampler()
        if self.design == "non_private":
            if self.release:
                raise ValueError("release is True for a non_private design; choose a private one")
            return
        epsilons = self.epsilon if isinstance(self.epsilon, tuple) else (self.epsilon,)
        if not epsilons:
            raise ValueError("epsilon is (); give one number, or one an agent")
        plain = tuple(_validate.positive("epsilon", epsilon) for epsilon in epsilons)
        object.__setattr__(self, "epsilon", plain if isinstance(self.epsilon, tuple) else plain[0])
        object.__setattr__(self, "delta", _validate.probability("delta", self.delta))
        if self.microbatch is not None and self.unit == "agent":
            raise ValueError(
                f"microbatch is {self.microbatch} under relation {self.relation!r}; it divides "
                "per-record clipping only, leave it None"
            )

    @property
    def label(self) -> str:
        """What records, figures and plans call the design."""
        return self.design if self.name is None else self.name

    @property
    def unit(self) -> str:
        """What is clipped and protected: "agent" or "record"."""
        return "agent" if self.relation == "replace_agent" else "record"

    def _check_name(self) -> None:
        """Refuse a covariance without a name, and a name that would pass for another design."""
        given: Any = self.name
        shown = _validate.shown(given)
        if self.design != "covariance":
            if given is not None:
                raise ValueError(
                    f"name is {shown} for design {self.design!r}, which has its own; leave it "
                    "None, or give a covariance of yours under design='covariance'"
                )
            return
        plain = isinstance(given, str) and given.isprintable() and given == given.strip()
        if not plain or not 1 <= len(given) <= 60 or given in (*DESIGNS, "covariance", "central"):
            raise ValueError(
                f"name is {shown} for design 'covariance'; give a name of up to 60 characters "
                "that no other design has, for records and figures"
            )

    def _check_whisper(self) -> None:
        """Refuse what other designs do not have, and keep plain numbers."""
        for name in ("max_variance", "subgroups"):
            value = getattr(self, name)
            if value is not None and not self.design.startswith("whisper"):
                raise ValueError(
                    f"{name} is {_validate.shown(value)} for design {self.design!r}; it goes with "
                    "the whisper designs, leave it None"
                )
        if self.max_variance is not None:
            ratio = _validate.number("max_variance", self.max_variance)
            object.__setattr__(self, "max_variance", ratio)
        groups: Any = self.subgroups
        if groups is None:
            return
        listed = isinstance(groups, list | tuple) and len(groups)
        if not listed or not all(isinstance(group, list | tuple) for group in groups):
            raise ValueError(
                f"subgroups is {_validate.shown(groups)}; give a sequence of sequences of agents, "
                "or None"
            )
        plain = [[_validate.integer("subgroups", i, least=0) for i in group] for group in groups]
        object.__setattr__(self, "subgroups", tuple(map(tuple, plain)))

    def _check_sampler(self) -> None:
        """Refuse a participation that is not sampled, and a cyclic sampler without one."""
        _validate.one_of("sampler", self.sampler, ("random", "cyclic"))
        given: Any = self.participation
        shown = _validate.shown(given)
        if given is None:
            if self.sampler == "cyclic":
                raise ValueError(
                    "sampler is 'cyclic' without a participation; give participation=(epochs, "
                    "separation)"
                )
            return
        if self.sampler != "cyclic":
            raise ValueError(
                f"participation is {shown} with the {self.sampler} sampler, which may draw a "
                "record in any round; use sampler='cyclic', or leave participation None"
            )
        if self.unit == "agent":
            raise ValueError(
                f"participation is {shown} under relation {self.relation!r}; an agent takes part "
                "in every round: leave it None, or protect records"
            )
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise ValueError(f"participation is {shown}; give (epochs, separation)")
        epochs, separation = (
            _validate.integer(f"participation[{place}]", number, most=2**31 - 2)
            for place, number in enumerate(given)
        )
        if epochs * separation != self.rounds:
            raise ValueError(
                f"participation is ({epochs}, {separation}) in {self.rounds} rounds; give rounds = "
                f"{epochs * separation}, or another participation"
            )
        object.__setattr__(self, "participation", (epochs, separation))

    @property
    def pattern(self) -> Participation:
        """In which rounds what the relation changes takes part."""
        return Participation(self.rounds, *(self.participation or (self.rounds, 1)))

    def precision_bound(self, strategy: np.ndarray | None = None) -> np.ndarray:
        """The bound b on [R^-1]_ii, a 0-d array or one entry an agent.

        Args:
            strategy: [T, T] C over rounds of the designs that have one; None is fresh noise.
        """
        return np.asarray(
            budget.precision_bound(
                self.epsilon,
                self.delta,
                clip_norm=self.clip_norm,
                relation=self.relation,
                accountant=self.accountant,
                allow_unsound=self.allow_unsound,
                sensitivity_squared=self.over_rounds(strategy),
            )
        )

    def over_rounds(self, strategy: np.ndarray | None) -> float:
        """Squared sensitivity over rounds, of the strategy as the run applies it.

        Args:
            strategy: [T, T] C, or None.
        """
        if strategy is None:
            return float(self.pattern.epochs)
        return strategies.sensitivity_squared(strategy, self.pattern)
