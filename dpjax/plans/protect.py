"""What is protected, from whom, and at which budget."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float

from dpjax import _agents, _validate
from dpjax.accounting import budget
from dpjax.accounting.records import Threat
from dpjax.learning.problem import Problem
from dpjax.learning.query import AgentQuery, RecordQuery

__all__ = ["Budget", "Protect"]

_ATTACKERS = ("outsider", "node", "coalition", "aggregator")
"""Attackers that a plan can be calibrated for; `dpjax.plans.compatibility` says which noise
protects against which of them."""


@dataclass(frozen=True)
class Protect(Threat):
    """Whose data are protected, how gradients are clipped for it, and what the attacker sees.

    Guarantee: none by itself; it is what a plan's guarantee is about.

    Attributes:
        relation: Neighbouring relation, no default: "replace_agent" (all data of one agent; the
            agent's mini-batch gradient is clipped), "replace_record" or "zero_out_record" (every
            record's gradient is clipped, and their sum released), "replace_client" or
            "zero_out_client" (the same, and all records of one of the clients who fill an agent's
            cohort slot in turn are protected together: samplers.Clients).
        clip_norm: Clip norm C of what is clipped. Leave it out where ``gradient_gap`` is assumed.
        attacker: "outsider", who sees every message on every link; "node", any single agent, who
            sees the messages that it receives and knows its own gradients and noise; "coalition",
            the agents in ``nodes`` together; "aggregator", who receives the sum of all messages of
            every round and no single one. Attackers are not protected from themselves. Noise that
            every agent draws from a secret of its own states the outsider's epsilon against
            agents, too; a plan's ``protection()`` tells of all parties.
        gradients: "any": gradients may depend on everything sent before, by whomever. "view": they
            are fixed beforehand, or depend on what the attacker sees alone; that is an assumption,
            which training of several agents breaks, and captions say so. Then nothing but what
            the attacker sees may be published, the final models neither.
        nodes: The agents of a coalition.
        clipping: "flat" or "automatic" (normalised) clipping.
        microbatch: Records a pass of per-record clipping, to bound memory; None chooses by cost.
        per_layer: Whether each of a model's L layers (leaves of one parent) is clipped by itself,
            to C / sqrt(L), so that the whole has norm C at most; the guarantee is the same.
        norm: In which norm, "l2" for Gaussian noise or "l1" for Laplace noise; the second clips
            agents alone.
        gradient_gap: In the place of a clip: how far the gradients that an agent answers with, of
            whatever batch is drawn, and those of the agent that it may be replaced by are apart
            at most, at every model, in ``norm``. Nothing is clipped and nothing enforces it: an
            ASSUMPTION, printed wherever the guarantee is. Honest where it follows from the
            objectives and all records are in every batch, as for two quadratics of one Hessian; a
            network's gradients have no such bound, and are clipped to half the gap. With noise it
            joins methods that take one gradient an agent, as it is.
        smoothness: Beside an assumed gap, how far gradients of one objective are apart at most,
            over the distance of the models, both in ``norm``: assumed as well. Methods that ask for
            gradients at models that nobody else knows need it; None says nothing.

    Example:
        >>> from dpjax.plans.protect import Protect
        >>> protect = Protect("replace_record", clip_norm=0.5)
        >>> protect.sensitivity, protect.unit
        (1.0, 'record')
        >>> Protect("replace_agent", gradient_gap=1.0, norm="l1").sensitivity
        1.0
    """

    relation: budget.Relation
    clip_norm: float = math.inf
    attacker: Literal["outsider", "node", "coalition", "aggregator"] = field(
        default="outsider", kw_only=True
    )
    clipping: Literal["flat", "automatic"] = "flat"
    microbatch: int | None = None
    per_layer: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be clipped or protected."""
        # The name that other libraries have for it; adding a record would change a public count.
        if "add_remove" in _validate.shown(self.relation):
            raise ValueError(f"relation is {self.relation!r}; give 'zero_out_record' in its place")
        _validate.one_of("relation", self.relation, budget.RELATIONS)
        _validate.one_of("attacker", self.attacker, _ATTACKERS)
        _validate.one_of("clipping", self.clipping, ("flat", "automatic"))
        _validate.flag("per_layer", self.per_layer)
        self._check_nodes()
        super().__post_init__()
        self._check_bound()
        if self.microbatch is None:
            return
        _validate.fields(self, _validate.integer, "microbatch", maximum=2**31 - 2)
        if self.unit == "agent":
            raise ValueError(
                f"microbatch is {self.microbatch} under relation {self.relation!r}; it divides "
                "per-record clipping only, leave it None"
            )

    def _check_bound(self) -> None:
        """Refuse what float32 cannot clip to, or what bounds gradients in a norm that it cannot."""
        gap = self.gradient_gap
        smoothness = self.smoothness
        name = "clip_norm" if gap is None else "gradient_gap"
        # Squares of smaller or larger norms leave float32.
        bound = _validate.single_precision(name, getattr(self, name), 1e-9, 1e9)
        _validate.assign(self, **{name: bound})
        if smoothness is not None:
            _validate.fields(self, _validate.positive, "smoothness")
            if gap is None:
                raise ValueError(
                    f"smoothness is {smoothness} for clipped gradients, which at any model are "
                    "within 2C of each other; leave it out"
                )
        parted_l1 = self.norm == "l1" and (self.unit != "agent" or self.per_layer)
        if parted_l1 or (gap is not None and self.clipping != "flat"):
            raise ValueError(
                f"norm is {self.norm!r} and gradient_gap {gap} with relation {self.relation!r}, "
                f"clipping {self.clipping!r} and per_layer {self.per_layer}; L1 norms and assumed "
                "gaps are of one whole gradient an agent: protect replace_agent, with flat "
                "clipping of all layers together"
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
        # Sorted and once each: equal coalitions are one key of what is cached.
        _validate.assign(self, nodes=tuple(sorted(set(_validate.agents("nodes", nodes)))))

    @property
    def clips(self) -> Literal["agent", "record"]:
        """Of what the gradient is clipped: a client's is that of the agent whose place it has."""
        return budget.clips(self.relation)

    def query(self, problem: Problem, capacity: int | None) -> AgentQuery | RecordQuery:
        """The query that clips a problem's gradients.

        Args:
            problem: The problem.
            capacity: The sampler's records in one pass; None where batches have one size.
        """
        if self.clips == "record":
            return RecordQuery(
                problem.loss,
                problem.weighted,
                self.clip_norm,
                self.clipping,
                self.microbatch,
                augmentation=problem.augmentation,
                per_layer=self.per_layer,
                capacity=capacity,
            )
        # By size: whether agents fit in memory side by side.
        params = jax.eval_shape(problem.init, jax.random.key(0))
        return AgentQuery(
            problem.loss,
            problem.batch_loss,
            self.clip_norm,
            self.clipping,
            augmentation=problem.augmentation,
            per_layer=self.per_layer,
            norm=self.norm,
            one_by_one=_agents.one_by_one(params),
        )

    @property
    def sensitivity(self) -> float:
        """How far what is clipped can move in a round, in ``norm``; an assumed gap itself."""
        if self.gradient_gap is not None:
            return self.gradient_gap
        return budget.clipped_sensitivity(self.relation, self.clip_norm)

    def answer_distance(self, distance: float) -> float:
        """How far answers of the query are apart, of neighbours at models so far apart, in a round.

        Args:
            distance: Of the models, in ``norm``.

        Returns:
            `sensitivity` for one clipped gradient an agent, whatever the models; infinite for sums
            over records at different models, of which every term moves. Of an assumed gap, the gap
            plus the smoothness times the distance, infinite where none is assumed.
        """
        # One clipped gradient is within C of zero at any model.
        if distance == 0 or (self.gradient_gap is None and self.unit == "agent"):
            return self.sensitivity
        per_distance = math.inf if self.smoothness is None else self.smoothness
        return self.sensitivity + per_distance * distance


@dataclass(frozen=True)
class Budget:
    """What a run may cost.

    Attributes:
        epsilon: Target epsilon at ``delta``, one number or one an agent.
        delta: Target delta; 0, the default, under "pure" alone.
        accountant: How the noise follows from it: "gdp" (exact), "rdp", "paper"; "pure" adds up
            the epsilons of Laplace noise, "zcdp" the rho of discrete noise.
        allow_unsound: Run the paper's rule where it is false; its guarantee then says so.
        reserve: Share of epsilon for which a release adds no Gaussian noise: it pays for the finite
            precision of the noise, and a release that needs more is refused. Simulations have none.

    Example:
        >>> from dpjax.plans.protect import Budget
        >>> Budget(epsilon=(1.0, 4.0), delta=1e-5).largest
        4.0
    """

    epsilon: float | tuple[float, ...]
    delta: float = 0.0
    accountant: Literal["gdp", "rdp", "paper", "pure", "zcdp"] = "gdp"
    allow_unsound: bool = False
    reserve: float = 0.001

    def __post_init__(self) -> None:
        """Refuse what is no budget, and keep plain numbers."""
        epsilon: Any = self.epsilon
        # One an agent, where it is a list.
        epsilons = _validate.numbers("epsilon", epsilon)
        for number in epsilons or [epsilon]:
            _validate.positive("epsilon", number)
        _validate.one_of("accountant", self.accountant, (*budget.ACCOUNTANTS, "pure", "zcdp"))
        if self.accountant == "pure":
            delta = _validate.number("delta", self.delta)
            if delta != 0:
                raise ValueError(
                    f"delta is {self.delta} with accountant 'pure', which needs none; leave it out"
                )
        else:
            remedy = (
                "give a number strictly between 0 and 1 (left out, it is 0), or accountant='pure' "
                "with Laplace noise"
            )
            delta = _validate.probability("delta", self.delta, remedy=remedy)
        _validate.flag("allow_unsound", self.allow_unsound)
        _validate.assign(
            self,
            epsilon=epsilons or float(epsilon),
            delta=delta,
            reserve=_validate.probability("reserve", self.reserve),
        )

    def without_reserve(self) -> "Budget":
        """The budget that the ideal noise of a release is calibrated for."""
        # A share of every agent's, so that none's reserve runs out first.
        rest = np.asarray(self.epsilon) * (1 - self.reserve)
        return dataclasses.replace(self, epsilon=tuple(rest.tolist()) if rest.ndim else float(rest))

    @property
    def rule(self) -> budget.Accountant:
        """The accountant of Gaussian noise."""
        assert self.accountant != "pure" and self.accountant != "zcdp"  # A config refuses these.
        return self.accountant

    def allowed_mu(self) -> Float[np.ndarray, "..."]:
        """The Gaussian-DP mu that keeps it, one an agent where epsilon is given so, rounded down.

        Raises:
            ValueError: As `dpjax.accounting.budget.allowed_mu`.
        """
        allowed = budget.allowed_mu(
            self.epsilon, self.delta, accountant=self.rule, allow_unsound=self.allow_unsound
        )
        return np.asarray(allowed)

    def spent(self, mu: Float[np.ndarray, " n"]) -> budget.AgentLoss:
        """What agents lose by its accountant under Gaussian noise.

        Args:
            mu: [n] Gaussian-DP parameters, upper bounds.
        """
        return budget.AgentLoss.of_mu(
            mu, self.delta, accountant=self.rule, allow_unsound=self.allow_unsound
        )

    @property
    def largest(self) -> float:
        """The largest epsilon of an agent."""
        return float(np.max(self.epsilon))

    @property
    def each(self) -> tuple[float, ...] | None:
        """One epsilon an agent, where they were given so."""
        return self.epsilon if isinstance(self.epsilon, tuple) else None
