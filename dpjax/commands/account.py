"""What an algorithm costs every agent: `dpjax.account`, and what `dpjax account` prints of it.

Noise has standard deviation sigma x clip norm, as `NOISE` says for each algorithm; strategies over
rounds are scaled to sensitivity 1, so that sigma alone decides their loss to an eavesdropper.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from dpjax import _validate
from dpjax._numerics import MARGIN
from dpjax.accounting import budget, gdp, records, views
from dpjax.accounting.attacker import Gradients
from dpjax.accounting.zipdl import ZipDLViews
from dpjax.mechanism import temporal
from dpjax.mechanism.participation import Participation
from dpjax.plans import strategies

__all__ = ["Account", "Setting", "account", "distances", "least"]

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

SECRETS: dict[str, records.Secrets] = {
    name: "links" if name in ("decor", "zip_dl") else "own" for name in NOISE
}
"""Who draws each algorithm's noise from which secret."""

ROUNDING = 1e-9
"""Losses agree with exact arithmetic to 1e-10; stated losses are rounded up by this share."""


@dataclass(frozen=True, eq=False)
class Setting:
    """An algorithm on a network, less its noise multiplier.

    Attributes:
        algorithm: A key of `NOISE`.
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
        _validate.one_of("algorithm", self.algorithm, NOISE)
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


class Account(NamedTuple):
    """What an algorithm costs every victim, against each set of attackers on its own.

    Attributes:
        setting: The algorithm and what is protected.
        trust: "ldp", "pndp" or "secldp".
        attackers: Sets of nodes that collude; one empty set for an eavesdropper alone.
        protected: With "secldp", agents whose secrets among themselves stay unknown, or None.
        sigma: Noise multiplier: standard deviation over the clip norm, as `NOISE` says.
        delta: At which epsilon is stated.
        rows: By gradients, then attackers, then victim: gradients, attackers, victim, distance
            (None without attackers), mu, epsilon, upper_bound.
    """

    setting: Setting
    trust: str
    attackers: tuple[tuple[int, ...], ...]
    protected: tuple[int, ...] | None
    sigma: float
    delta: float
    rows: list[dict[str, Any]]

    def worst(self, gradients: Gradients = "any") -> dict[str, Any]:
        """The row of the largest loss.

        Args:
            gradients: "any" or "view".
        """
        rows = (row for row in self.rows if row["gradients"] == gradients)
        return max(rows, key=lambda row: row["mu"])


def account(
    mixing: Float[np.ndarray, "n n"],
    algorithm: str = "dsgd",
    *,
    relation: budget.Relation,
    rounds: int,
    sigma: float | None = None,
    epsilon: float | None = None,
    delta: float = 1e-5,
    trust: Literal["ldp", "pndp", "secldp"] = "ldp",
    attackers: Sequence[Sequence[int]] | None = None,
    protected: Sequence[int] | None = None,
    epochs: int | None = None,
    separation: int | None = None,
    gradients: Gradients = "any",
    **options: Any,
) -> Account:
    """What an algorithm costs every agent; or the least noise that keeps a budget.

    mu falls as 1 / sigma, so the least sigma is the worst loss at noise 1 over the budget's mu.

    Guarantee: in rows of gradients "any", agent u's records (or agent u) are mu-Gaussian-DP against
    these attackers over all rounds, when noise is as `NOISE` says; in rows of "view" only if the
    other agents' gradients are fixed in advance or functions of what the attacker sees. Sets of
    attackers do not collude with one another. With ``epsilon``, every victim keeps that budget.

    Args:
        mixing: [n, n] W.
        algorithm: dsgd, anti_pgd, mafalda, prefix_sum, muffliato, decor or zip_dl.
        relation: Neighbouring relation; "replace_agent" asks for every round.
        rounds: T, counted in gradients.
        sigma: Noise multiplier; or
        epsilon: Budget at ``delta``, for which the least sigma is found.
        delta: Delta.
        trust: Who attacks: ldp (an outsider), pndp (nodes) or secldp (those who know all secrets of
            pairs but the protected ones').
        attackers: Sets of nodes, each colluding; by default every node alone with pndp, else none.
        protected: With secldp, agents whose secrets among themselves stay unknown.
        epochs: Rounds in which a record takes part; with ``separation``. Every round by default.
        separation: Rounds from one of them to the next.
        gradients: Under which assumption the budget must hold.
        options: ``gossip_steps``, ``shared``, ``zero_sum``, see `Setting`.

    Returns:
        The losses, the noise multiplier and the setting.

    Raises:
        ValueError: For options that do not go together, a view too large, or a loss that no noise
            makes finite.

    Example:
        >>> import dpjax as dp
        >>> W = dp.mixing.metropolis_hastings(dp.graphs.ring(6))
        >>> spent = dp.account(W, relation="replace_record", rounds=50, epsilon=3.0, trust="pndp")
        >>> round(spent.sigma, 2), spent.worst()["epsilon"] <= 3
        (19.67, True)
    """
    pattern = participation(rounds, epochs, separation)
    setting = Setting(algorithm, mixing, pattern, relation, **options)
    delta = _validate.probability("delta", delta)
    if (sigma is None) == (epsilon is None):
        raise ValueError(f"sigma is {sigma} and epsilon {epsilon}; give one of the two")
    if attackers is None:
        attackers = [(agent,) for agent in range(len(mixing))] if trust == "pndp" else [()]
    model = setting.make()
    each = [_view(model, trust, one, protected) for one in attackers]
    losses = _stated(each, pattern)
    if sigma is None:
        sigma = _least_sigma(setting, each, losses[gradients], epsilon, delta, gradients)
    rows = _rows(setting, each, losses, _validate.positive("sigma", sigma), delta)
    nodes = tuple(tuple(map(int, one.attackers)) for one in each)
    return Account(
        setting, trust, nodes, None if protected is None else tuple(protected), sigma, delta, rows
    )


def participation(rounds: int, epochs: int | None, separation: int | None) -> Participation:
    """When a record takes part; in every round without epochs and separation."""
    if (epochs is None) != (separation is None):
        raise ValueError(f"epochs is {epochs} and separation {separation}; give both or neither")
    rounds = _validate.integer("rounds", rounds)
    if epochs is None or separation is None:
        return Participation(rounds, rounds, 1)
    return Participation(rounds, epochs, separation)


def _view(
    model: "views.LinearAlgorithm | ZipDLViews",
    trust: str,
    attackers: Sequence[int],
    protected: Sequence[int] | None,
) -> views.View:
    """What the attacker of a trust model sees."""
    _validate.one_of("trust", trust, ("ldp", "pndp", "secldp"))
    if protected is not None and trust != "secldp":
        raise ValueError(f"protected is {list(protected)} with trust {trust!r}; it is secldp's")
    if trust == "ldp":
        if attackers:
            raise ValueError(
                f"attacker is {list(attackers)} with trust 'ldp', an eavesdropper who is no node; "
                "leave it out, or take --trust pndp"
            )
        return model.ldp()
    if trust == "pndp":
        return model.pndp(list(attackers))
    if isinstance(model, ZipDLViews) or not any(model.secret):
        raise ValueError(
            "trust is 'secldp', about pairwise secrets, and this algorithm has none; take ldp or "
            "pndp, or algorithm decor"
        )
    return model.secldp(list(attackers) or None, protected=protected)


def least(plain: Sequence[views.ViewLoss], wide: Sequence[views.ViewLoss]) -> list[views.ViewLoss]:
    """Losses of views, or of larger views where these are less, rounded up.

    The plain bound sums absolute values, and can exceed the loss of a larger view.

    Args:
        plain: Losses of views.
        wide: Losses of larger ones, one for each.
    """
    losses = []
    for one, larger in zip(plain, wide, strict=True):
        less = larger.mu < one.mu * (1 - ROUNDING)
        mu = np.where(less, larger.mu, one.mu) * (1 + ROUNDING)
        losses.append(one._replace(mu=mu, upper_bound=one.upper_bound | less))
    return losses


def _stated(seen: Sequence[views.View], pattern: Participation) -> dict[str, list[views.ViewLoss]]:
    """Losses by gradients, at clip 1, noise 1 and zero-out, rounded up."""
    wide = views.losses(seen, pattern, gradients="any")
    narrow = views.losses(seen, pattern, gradients="view")
    rounded = [each._replace(mu=each.mu * (1 + ROUNDING)) for each in wide]
    return {"any": rounded, "view": least(narrow, wide)}


def _least_sigma(
    setting: Setting,
    seen: Sequence[views.View],
    losses: Sequence[views.ViewLoss],
    epsilon: Any,
    delta: float,
    gradients: str,
) -> float:
    """The noise multiplier at which every victim keeps a budget, rounded up."""
    epsilon = _validate.positive("epsilon", epsilon)
    mu = np.nan_to_num(np.array([each.mu for each in losses]), nan=-1.0, posinf=np.inf)
    where, victim = map(int, np.unravel_index(np.argmax(mu), mu.shape))
    shift = float(mu[where, victim]) * setting.unit_shift
    if math.isinf(shift):
        remedy = "take another algorithm" + ("" if gradients == "view" else ", or gradients 'view'")
        raise ValueError(
            f"gradients is {gradients!r}: the loss of the agent at index {victim} to those at "
            f"{seen[where].attackers} is infinite under {setting.algorithm}, whatever the noise; "
            f"{remedy}"
        )
    sigma = shift / float(gdp.mu(epsilon, delta)) * (1 + 1e-12)
    while float(gdp.epsilon(shift / sigma * MARGIN, delta)) > epsilon:
        sigma *= 1 + 1e-10
    return sigma


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
    reached, hops = np.array(sorted(attackers)), 0
    while len(reached):
        hops += 1
        senders = (mixing[reached] != 0).any(axis=0) & (hops_to < 0)
        hops_to[senders] = hops
        reached = np.flatnonzero(senders)
    return hops_to


def _rows(
    setting: Setting,
    seen: Sequence[views.View],
    losses: dict[str, list[views.ViewLoss]],
    sigma: float,
    delta: float,
) -> list[dict[str, Any]]:
    scale, rows = setting.unit_shift / sigma, []
    for gradients, stated in losses.items():
        for view, loss in zip(seen, stated, strict=True):
            attackers = tuple(map(int, view.attackers))
            away = distances(setting.mixing, attackers) if attackers else None
            victims = [u for u in range(len(setting.mixing)) if u not in attackers]
            mu = loss.mu[victims] * scale * MARGIN
            for u, one, epsilon in zip(victims, mu, np.ravel(gdp.epsilon(mu, delta)), strict=True):
                rows.append(
                    {
                        "gradients": gradients,
                        "attackers": attackers,
                        "victim": u,
                        "distance": None if away is None else int(away[u]),
                        "mu": float(one),
                        "epsilon": float(epsilon),
                        "upper_bound": bool(loss.upper_bound[u]),
                    }
                )
    return rows
