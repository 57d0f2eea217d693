"""What is protected, from whom, and at which budget."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dpjax import _validate
from dpjax.accounting import budget

__all__ = ["Budget", "Protect"]

ATTACKERS = ("outsider", "node", "coalition")
"""Attackers that a plan can be calibrated for; which noise defends against whom is the registry's.
"""


@dataclass(frozen=True)
class Protect:
    """Whose data are protected, how gradients are clipped for it, and what the attacker sees.

    Guarantee: none by itself; it is what a plan's guarantee is about.

    Attributes:
        relation: Neighbouring relation, no default: "replace_agent" (all data of one agent; the
            agent's mini-batch gradient is clipped), "replace_record" or "zero_out_record" (every
            record's gradient is clipped, and their sum released).
        clip_norm: Clip norm C of what is clipped, in L2.
        attacker: "outsider", who sees every message on every link; "node", any single agent, who
            sees the messages that it receives and knows its own gradients and noise; "coalition",
            the agents in ``nodes`` together. Attackers are not protected from themselves.
        gradients: "any": gradients may depend on everything sent before, by whomever. "view": they
            are fixed beforehand, or depend on what the attacker sees alone; that is an assumption,
            which training of several agents breaks, and captions say so. Then nothing but what
            the attacker sees may be published, the final models neither.
        nodes: The agents of a coalition.
        clipping: "flat" or "automatic" (normalised) clipping.
        microbatch: Records a pass of per-record clipping, to bound memory; None chooses by cost.
        per_layer: Whether each of a model's L layers (leaves of one parent) is clipped by itself,
            to C / sqrt(L), so that the whole has norm C at most; the guarantee is the same.

    Example:
        >>> from dpjax.plans.protect import Protect
        >>> protect = Protect("replace_record", clip_norm=0.5)
        >>> protect.sensitivity, protect.unit
        (1.0, 'record')
    """

    relation: budget.Relation
    clip_norm: float
    attacker: Literal["outsider", "node", "coalition"] = "outsider"
    gradients: Literal["any", "view"] = "any"
    clipping: Literal["flat", "automatic"] = "flat"
    microbatch: int | None = None
    nodes: tuple[int, ...] | None = None
    per_layer: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be clipped or protected."""
        _validate.one_of("relation", self.relation, budget.RELATIONS)
        _validate.one_of("attacker", self.attacker, ATTACKERS)
        _validate.one_of("gradients", self.gradients, ("any", "view"))
        _validate.one_of("clipping", self.clipping, ("flat", "automatic"))
        _validate.flag("per_layer", self.per_layer)
        clip_norm = _validate.single_precision("clip_norm", self.clip_norm, 1e-9, 1e9)
        object.__setattr__(self, "clip_norm", clip_norm)
        self._check_nodes()
        if self.microbatch is None:
            return
        places = _validate.integer("microbatch", self.microbatch, most=2**31 - 2)
        object.__setattr__(self, "microbatch", places)
        if self.unit == "agent":
            raise ValueError(
                f"microbatch is {places} under relation {self.relation!r}; it divides per-record "
                "clipping only, leave it None"
            )

    def _check_nodes(self) -> None:
        nodes: Any = self.nodes
        if nodes is None and self.attacker != "coalition":
            return
        if self.attacker != "coalition" or not isinstance(nodes, list | tuple) or not nodes:
            raise ValueError(
                f"nodes is {_validate.shown(nodes)} with attacker {self.attacker!r}; give the "
                "agents of a coalition, nodes=(0, 3), and None for other attackers"
            )
        numbers = {_validate.integer("nodes", i, least=0, most=2**31 - 2) for i in nodes}
        object.__setattr__(self, "nodes", tuple(sorted(numbers)))

    @property
    def unit(self) -> str:
        """What is clipped and protected: "agent" or "record"."""
        return budget.unit(self.relation)

    @property
    def sensitivity(self) -> float:
        """How far what is clipped can move in a round, in L2."""
        return budget.sensitivity(self.relation, self.clip_norm)


@dataclass(frozen=True)
class Budget:
    """What a run may cost.

    Attributes:
        epsilon: Target epsilon at ``delta``, one number or one an agent.
        delta: Target delta.
        accountant: How the noise follows from it: "gdp" (exact), "rdp", "paper".
        allow_unsound: Run the paper's rule where it is false; its guarantee then says so.

    Example:
        >>> from dpjax.plans.protect import Budget
        >>> Budget(epsilon=(1.0, 4.0), delta=1e-5).largest
        4.0
    """

    epsilon: float | tuple[float, ...]
    delta: float
    accountant: Literal["gdp", "rdp", "paper"] = "gdp"
    allow_unsound: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no budget, and keep plain numbers."""
        epsilons: Any = self.epsilon
        listed = isinstance(epsilons, list | tuple) or (
            isinstance(epsilons, np.ndarray) and epsilons.ndim
        )
        if listed and not len(epsilons):
            raise ValueError(f"epsilon is {epsilons!r}; give one number, or one an agent")
        numbers = [
            _validate.positive("epsilon", one) for one in (epsilons if listed else [epsilons])
        ]
        object.__setattr__(self, "epsilon", tuple(numbers) if listed else numbers[0])
        object.__setattr__(self, "delta", _validate.probability("delta", self.delta))
        _validate.one_of("accountant", self.accountant, budget.ACCOUNTANTS)
        _validate.flag("allow_unsound", self.allow_unsound)

    @property
    def largest(self) -> float:
        """The largest epsilon of an agent."""
        return float(np.max(self.epsilon))

    @property
    def each(self) -> tuple[float, ...] | None:
        """One epsilon an agent, where they were given so."""
        return self.epsilon if isinstance(self.epsilon, tuple) else None
