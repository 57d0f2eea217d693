"""What an algorithm costs every victim against an attacker.

Noise has standard deviation sigma x clip norm, as `NOISE` says for each algorithm; strategies over
rounds are scaled to sensitivity 1, so that sigma alone decides their loss to an eavesdropper.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from dpjax import _validate
from dpjax._rounding import MARGIN
from dpjax.accounting import budget, gdp, parties, views
from dpjax.accounting.attacker import Gradients
from dpjax.accounting.zipdl import ZipDLViews
from dpjax.mechanism import temporal
from dpjax.mechanism.participation import Participation
from dpjax.plans import strategies

__all__ = ["Setting", "distances", "least", "rows"]

TRUST = ("ldp", "pndp", "secldp")
"""Trust models; see `dpjax.accounting.views`."""

_SCALED = "C scaled to sensitivity 1 for this participation: the loss to an eavesdropper is 1 / "
NOISE: dict[str, str] = {
    "dsgd": "fresh for every agent and round, sigma x clip a coordinate",
    "anti_pgd": f"sigma x clip x (C^-1 Z)_t, z_t - z_t-1; {_SCALED}sigma (zero-out)",
    "mafalda": f"sigma x clip x (C^-1 Z)_t; {_SCALED}sigma (zero-out)",
    "prefix_sum": f"sigma x clip x (C^-1 Z)_t; {_SCALED}sigma (zero-out)",
    "muffliato": "fresh for every agent and gradient, sigma x clip a coordinate, then gossiped",
    "decor": (
        "own, sigma x clip a coordinate; and on every link a secret of sqrt(shared) x sigma x "
        "clip, added at one end and subtracted at the other"
    ),
    "zip_dl": (
        "z_k - mean(z) for message k of a node, z_k of sigma x clip a coordinate, the mean over "
        "its messages (zero_sum: with or without its own copy)"
    ),
}
"""Standard deviation of each algorithm's noise."""
ALGORITHMS = tuple(NOISE)

SECRETS: dict[str, parties.Secrets] = {
    name: "links" if name in ("decor", "zip_dl") else "own" for name in NOISE
}
"""Who draws each algorithm's noise from which secret."""

ASSUMPTIONS = {
    "any": "whatever the other agents' gradients depend on, as in training",
    "view": (
        "only if the other agents' gradients are fixed in advance or functions of what the "
        "attacker sees and knows, and messages are not rounded; training and releases round them, "
        "which an attacker who does not see every message can gain from"
    ),
}
"""What a loss takes for granted, by ``gradients``."""

ROUNDING = 1e-9
"""Losses agree with exact arithmetic to 1e-10; what is stated is rounded up by this share."""


@dataclass(frozen=True, eq=False)
class Setting:
    """An algorithm on a network, less its noise multiplier.

    Attributes:
        algorithm: One of `ALGORITHMS`.
        mixing: [n, n] W.
        participation: Which rounds a record takes part in.
        relation: Neighbouring relation; "replace_agent" asks for every round.
        gossip_steps: Gossip rounds a gradient; 1 for Zip-DL.
        shared: DECOR: variance of a link's secret over that of an agent's own noise.
        zero_sum: Zip-DL: over what its noises sum to zero.
    """

    algorithm: str
    mixing: Float[np.ndarray, "n n"]
    participation: Participation
    relation: budget.Relation
    gossip_steps: int = 1
    shared: float | None = None
    zero_sum: Literal["messages", "with_own_copy"] | None = None

    def __post_init__(self) -> None:
        """Refuse options of another algorithm."""
        _validate.one_of("algorithm", self.algorithm, ALGORITHMS)
        _validate.one_of("relation", self.relation, budget.RELATIONS)
        steps = _validate.integer("gossip_steps", self.gossip_steps)
        if steps > 1 and self.algorithm == "zip_dl":
            raise ValueError(f"gossip_steps is {steps} with zip_dl, which takes one; leave it out")
        for name, owner in (("shared", "decor"), ("zero_sum", "zip_dl")):
            value = getattr(self, name)
            if value is not None and self.algorithm != owner:
                raise ValueError(
                    f"{name} is {value} with {self.algorithm}; it is {owner}'s, leave it out"
                )
        when = self.participation
        if self.relation == "replace_agent" and when.epochs != when.rounds:
            raise ValueError(
                f"relation is 'replace_agent' with {when.epochs} of {when.rounds} rounds; an agent "
                "takes part in every round: leave out epochs and separation, or take a record's"
            )

    @property
    def unit_shift(self) -> float:
        """How far a round's gradient moves at clip 1: 1 for zero-out, else 2."""
        return budget.sensitivity(self.relation, 1.0)

    def make(self) -> "views.LinearAlgorithm | ZipDLViews":
        """The algorithm at clip 1 and noise 1."""
        options: dict[str, Any] = {"gossip_steps": self.gossip_steps}
        if self.algorithm == "zip_dl":
            return views.zip_dl(self.mixing, zero_sum=self.zero_sum or "with_own_copy")
        if self.algorithm == "decor":
            return views.decor(self.mixing, 1.0, 1.0 if self.shared is None else self.shared)
        if self.algorithm in strategies.DESIGNS:
            strategy = strategies.make(self.algorithm, self.mixing, self.participation).strategy
            options["strategy"] = strategy / temporal.sensitivity(strategy, self.participation)
        return views.dsgd(self.mixing, **options)


def participation(rounds: int, epochs: int | None, separation: int | None) -> Participation:
    """When a record takes part; in every round where nothing is given.

    Args:
        rounds: T.
        epochs: How many times; with ``separation``.
        separation: Rounds from one to the next.

    Raises:
        ValueError: For one of the two alone, or numbers that do not fit.
    """
    if (epochs is None) != (separation is None):
        raise ValueError(f"epochs is {epochs} and separation {separation}; give both or neither")
    rounds = _validate.integer("rounds", rounds)
    if epochs is None or separation is None:
        return Participation(rounds, rounds, 1)
    return Participation(rounds, epochs, separation)


class StatedLoss(NamedTuple):
    """What may be stated of one attacker, at clip 1, noise 1 and zero-out.

    Attributes:
        mu: [n] rounded up; nan for attackers.
        upper_bound: [n] True where it is the loss of a strictly larger view.
    """

    mu: Float[np.ndarray, " n"]
    upper_bound: Bool[np.ndarray, " n"]


def view(
    algorithm: "views.LinearAlgorithm | ZipDLViews",
    trust: str,
    attackers: Sequence[int] = (),
    protected: Sequence[int] | None = None,
) -> views.View:
    """What the attacker of a trust model sees.

    Args:
        algorithm: From ``Setting.make``.
        trust: One of `TRUST`.
        attackers: Nodes that collude; none for an eavesdropper.
        protected: With "secldp", agents whose secrets among themselves stay unknown.

    Returns:
        The view.

    Raises:
        ValueError: For a combination that is not defined.
    """
    _validate.one_of("trust", trust, TRUST)
    if protected is not None and trust != "secldp":
        raise ValueError(f"protected is {list(protected)} with trust {trust!r}; it is secldp's")
    if trust == "ldp":
        if attackers:
            raise ValueError(
                f"attacker is {list(attackers)} with trust 'ldp', an eavesdropper who is no node; "
                "leave it out, or take --trust pndp"
            )
        return algorithm.ldp()
    if trust == "pndp":
        if not attackers:
            raise ValueError("attacker is missing; trust 'pndp' needs at least one node")
        return algorithm.pndp(list(attackers))
    if isinstance(algorithm, ZipDLViews) or not any(algorithm.secret):
        raise ValueError(
            "trust is 'secldp', about pairwise secrets, and this algorithm has none; take ldp or "
            "pndp, or algorithm decor"
        )
    return algorithm.secldp(list(attackers) or None, protected=protected)


def stated_losses(
    seen: Sequence[views.View], participation: Participation, gradients: Gradients
) -> list[StatedLoss]:
    """What may be stated: the loss, or that of all messages where it is less, rounded up.

    Args:
        seen: Views.
        participation: Which rounds a record takes part in.
        gradients: "any" or "view".

    Returns:
        One for each view.

    Raises:
        ValueError: As ``View.loss``.
    """
    wide = views.losses(seen, participation, gradients="any")
    if gradients == "any":
        return [StatedLoss(each.mu * (1 + ROUNDING), each.upper_bound) for each in wide]
    return least(views.losses(seen, participation, gradients=gradients), wide)


def least(plain: Sequence[views.ViewLoss], wide: Sequence[views.ViewLoss]) -> list[StatedLoss]:
    """Losses of views, or of larger views where these are less, rounded up.

    The plain bound sums absolute values, and can exceed the loss of a larger view.

    Args:
        plain: Losses of views.
        wide: Losses of larger ones, one for each.
    """
    losses = []
    for one, all_ in zip(plain, wide, strict=True):
        less = all_.mu < one.mu * (1 - ROUNDING)
        mu = np.where(less, all_.mu, one.mu) * (1 + ROUNDING)
        losses.append(StatedLoss(mu, one.upper_bound | less))
    return losses


def distances(mixing: Float[np.ndarray, "n n"], attackers: Sequence[int]) -> Int[np.ndarray, " n"]:
    """Links that a message passes from each agent to the nearest attacker.

    Args:
        mixing: [n, n] W; j sends to i where W_ij != 0.
        attackers: Nodes.

    Returns:
        [n] distances, -1 where no message arrives.
    """
    hops_to = np.full(len(mixing), -1)
    hops_to[list(attackers)] = 0
    here, hops = np.array(sorted(attackers)), 0
    while len(here):
        hops += 1
        senders = (mixing[here] != 0).any(axis=0) & (hops_to < 0)
        hops_to[senders] = hops
        here = np.flatnonzero(senders)
    return hops_to


def rows(
    setting: Setting,
    trust: str,
    *,
    attackers: Sequence[int] = (),
    protected: Sequence[int] | None = None,
    sigma: float,
    delta: float | None = None,
) -> list[dict[str, Any]]:
    """The loss of every victim, for gradients of any kind and under the assumption of the view.

    Guarantee: for ``gradients="any"``, agent u's records (or agent u) are mu-Gaussian-DP against
    this attacker over all rounds, when noise is as `NOISE` says; for ``gradients="view"`` only
    under its assumption.

    Args:
        setting: The algorithm and what is protected.
        trust: One of `TRUST`.
        attackers: Nodes that collude.
        protected: See `view`.
        sigma: Noise multiplier: standard deviation over the clip norm, as `NOISE` says.
        delta: Delta at which epsilon is told; None for none.

    Returns:
        Rows by gradients, then victim: attackers, mu, epsilon, upper_bound, distance (None without
        attackers).

    Raises:
        ValueError: For a combination that is not defined, or a view too large.
    """
    return rows_of_each(setting, trust, [attackers], protected=protected, sigma=sigma, delta=delta)


def rows_of_each(
    setting: Setting,
    trust: str,
    sets: Sequence[Sequence[int]],
    *,
    protected: Sequence[int] | None = None,
    sigma: float,
    delta: float | None = None,
) -> list[dict[str, Any]]:
    """`rows` against several attackers, each on its own.

    Guarantee: that of `rows` against each set alone; sets do not collude with one another.

    Args:
        setting: The algorithm and what is protected.
        trust: One of `TRUST`.
        sets: Sets of nodes that collude.
        protected: See `view`.
        sigma: Noise multiplier.
        delta: Delta at which epsilon is told; None for none.

    Returns:
        Rows by gradients, then attackers, then victim.

    Raises:
        ValueError: As `rows`.
    """
    scale = setting.unit_shift / _validate.positive("sigma", sigma)
    if delta is not None:
        delta = _validate.probability("delta", delta)
    algorithm = setting.make()
    seen = [view(algorithm, trust, attackers, protected) for attackers in sets]
    rows = []
    for gradients in ("any", "view"):
        losses = stated_losses(seen, setting.participation, gradients)
        for each, loss in zip(seen, losses, strict=True):
            who = tuple(map(int, each.attackers))
            away = distances(setting.mixing, who) if who else None
            victims = [u for u in range(len(setting.mixing)) if u not in who]
            mu = loss.mu[victims] * scale * MARGIN
            spent = mu if delta is None else np.ravel(gdp.epsilon(mu, delta))
            for place, u in enumerate(victims):
                rows.append(
                    {
                        "gradients": gradients,
                        "attackers": who,
                        "victim": u,
                        "distance": None if away is None else int(away[u]),
                        "mu": float(mu[place]),
                        "epsilon": None if delta is None else float(spent[place]),
                        "upper_bound": bool(loss.upper_bound[u]),
                    }
                )
    return rows


def grouped(losses: Sequence[Mapping[str, Any]], value: str = "mu") -> list[dict[str, Any]]:
    """Mean, least and largest over the victims (of every attacker) at each distance.

    Args:
        losses: From `rows` or `rows_of_each`.
        value: "mu" or "epsilon".

    Returns:
        Rows by gradients, then distance: victims, mean, min, max, upper_bounds (their number).
    """
    keys = sorted({(row["gradients"], -1 if row["distance"] is None else row["distance"])
                   for row in losses})  # fmt: skip
    groups = []
    for gradients, distance in keys:
        part = [
            row
            for row in losses
            if row["gradients"] == gradients
            and (row["distance"] is None or row["distance"] == distance)
        ]
        values = [row[value] for row in part]
        groups.append(
            {
                "gradients": gradients,
                "distance": None if part[0]["distance"] is None else distance,
                "victims": len(part),
                "mean": float(np.mean(values)),
                "min": min(values),
                "max": max(values),
                "upper_bounds": sum(row["upper_bound"] for row in part),
            }
        )
    return groups
