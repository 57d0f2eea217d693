"""What an algorithm costs every agent: `dpjax.account`, and what `dpjax account` prints of it.

Noise has standard deviation sigma x clip norm, as `ALGORITHMS` says for each of them; strategies
over rounds are scaled to sensitivity 1, so that sigma alone decides their loss to an eavesdropper.
"""

import math
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Int

from dpjax import _validate
from dpjax.accounting import budget, gdp, parties, views, wording
from dpjax.accounting.attacker import GradientDependence
from dpjax.accounting.guarantee import Guarantee
from dpjax.accounting.records import Secrets
from dpjax.accounting.rounding import MARGIN, delta_text, loose_delta, up
from dpjax.commands import inputs
from dpjax.mechanism import temporal
from dpjax.mechanism.participation import Participation
from dpjax.plans import noise
from dpjax.results import plots, records, tables
from dpjax.topology import nodes
from dpjax.topology.mixing import SquareMatrix

__all__ = ["Account", "account", "distances", "tighter_losses"]

_Trust = Literal["ldp", "pndp", "secldp"]
_ZeroSum = Literal["messages", "with_own_copy"]
_Agents: TypeAlias = Sequence[int]
_Group: TypeAlias = tuple[int, ...]
"""Attackers who collude."""
_Names: TypeAlias = Sequence[str]
"""What the file of edges calls the agents."""


class _Algorithm(NamedTuple):
    """An algorithm of the command.

    Attributes:
        noise: What it adds, and sigma in it.
        view: The algorithm at clip 1 and noise 1, of W and its options.
        options: Their names.
        secrets: Who draws the noise from which secret.
        design: Its noise over rounds, where that is a design.
    """

    noise: str
    view: Callable[..., views.LinearAlgorithm] = views.dsgd
    options: tuple[str, ...] = ("gossip_steps",)
    secrets: Secrets = "own"
    design: noise.Correlated | None = None


ALGORITHMS = {
    "dsgd": _Algorithm("fresh for every agent and round, sigma x clip a coordinate"),
    **{part.label: _Algorithm(part.account, design=part) for part in noise.PARTS if part.account},
    "muffliato": _Algorithm(
        "fresh for every agent and gradient, sigma x clip a coordinate, then gossiped"
    ),
    "decor": _Algorithm(
        "own, sigma x clip a coordinate; and on every link a secret of sqrt(shared) x sigma x "
        "clip, added at one end and subtracted at the other",
        views.decor,
        ("gossip_steps", "shared"),
        "links",
    ),
    "zip_dl": _Algorithm(
        "z_k - mean(z) for message k of a node, z_k of sigma x clip a coordinate, the mean over "
        "its messages (zero_sum: with or without its own copy)",
        views.zip_dl,
        ("zero_sum",),
        "links",
    ),
}
"""Every algorithm by its name on the command line; those of a noise design bear its label."""

_ROUNDING = 1e-9
"""Losses agree with exact arithmetic to 1e-10; stated losses are rounded up by this share."""

_ASSUMPTIONS = {
    "any": "whatever the other agents' gradients depend on, as in training",
    "view": (
        "only if the other agents' gradients are fixed in advance or functions of what the "
        "attacker sees and knows, and messages are not rounded; training and releases round them, "
        "which an attacker who does not see every message can gain from"
    ),
}
_DISTANCES = {None: "all", -1: "none"}
"""What tables say of agents where nobody attacks, and of those whom no attacker hears."""
_SEES = {
    "ldp": "LDP: an eavesdropper of every message on every link",
    "pndp": "PNDP: {who}, seeing what arrives, knowing own gradients and noise",
    "secldp": "SecLDP: {who}, who also knows every pairwise secret but those among {protected}",
}


class Account(NamedTuple):
    """What an algorithm costs every victim, against each set of attackers on its own.

    Attributes:
        attackers: Sets of nodes that collude; one empty set for an eavesdropper alone.
        participation: Which rounds a record takes part in.
        sigma: Noise multiplier: standard deviation over the clip norm, as `ALGORITHMS` says.
        rows: By gradients, then attackers, then victim: gradients, attackers, victim, distance
            (None without attackers), mu, epsilon, upper_bound.

    Example:
        >>> import dpjax as dp
        >>> W = dp.mixing.metropolis_hastings(dp.graphs.ring(5))
        >>> cost = dp.account(W, relation="replace_record", rounds=10, sigma=5.0, trust="pndp")
        >>> cost.sigma, len(cost.attackers)
        (5.0, 5)
    """

    attackers: tuple[_Group, ...]
    participation: Participation
    sigma: float
    rows: records.Rows

    def worst(self, gradients: GradientDependence = "any") -> records.Row:
        """The row of the largest loss.

        Args:
            gradients: "any" or "view".

        Raises:
            ValueError: For another word.
        """
        _validate.one_of("gradients", gradients, _ASSUMPTIONS)
        rows = (row for row in self.rows if row["gradients"] == gradients)
        return max(rows, key=lambda row: row["mu"])


def account(
    mixing: SquareMatrix,
    algorithm: str = "dsgd",
    *,
    relation: inputs.CommandRelation,
    rounds: int,
    sigma: float | None = None,
    epsilon: float | None = None,
    delta: float = 1e-5,
    trust: _Trust = "ldp",
    attackers: Sequence[_Agents] | None = None,
    protected: _Agents | None = None,
    epochs: int | None = None,
    separation: int | None = None,
    gradients: GradientDependence = "any",
    gossip_steps: int = 1,
    shared: float | None = None,
    zero_sum: _ZeroSum | None = None,
) -> Account:
    """What an algorithm costs every agent; or the least noise that keeps a budget.

    mu falls as 1 / sigma, so the least sigma is the worst loss at noise 1 over the budget's mu.

    Guarantee: in rows of gradients "any", agent u's records (or agent u) are mu-Gaussian-DP against
    these attackers over all rounds, when noise is as `ALGORITHMS` says; in rows of "view" only if
    the other agents' gradients are fixed in advance or functions of what the attacker sees. Sets of
    attackers do not collude with one another. With ``epsilon``, every victim keeps that budget.

    Args:
        mixing: [n, n] W.
        algorithm: dsgd (independent noise), anti_pgd (anti-PGD), mafalda (MAFALDA), prefix_sum
            (prefix sum), banded_inverse (banded inverse, 8 bands), one_step (one step, fraction
            0.8), muffliato, decor (pair keys), zip_dl (zero sum).
        relation: What is hidden: replace_record (one record, against another), zero_out_record
            (against its absence) or replace_agent (all data of one agent, in every round). There is
            no default: the same epsilon means different things.
        rounds: T, rounds of training, counted in gradients.
        sigma: Noise multiplier: standard deviation over clip norm; or
        epsilon: Budget at delta that every agent keeps, for which the least sigma is found.
        delta: Epsilon is stated at this delta, beside mu.
        trust: Who attacks: ldp (local DP: an outsider, who reads every message on every link), pndp
            (pairwise network DP: each other participant, who reads the messages that it receives
            and knows its own gradients and noise) or secldp (LDP with secrets between pairs: an
            outsider, or participants who collude, who knows every pair's secret but those among
            the protected).
        attackers: Sets of nodes, each colluding; by default every node alone with pndp, else none.
        protected: With secldp, agents whose secrets among themselves stay unknown; all but the
            attackers by default.
        epochs: Rounds in which a record takes part; with separation. Every round by default.
        separation: Rounds from one of them to the next.
        gradients: Which loss the budget is about: any (what training needs) or view (only for
            gradients that are fixed in advance or functions of what the attacker sees).
        gossip_steps: Gossip rounds a gradient, each observed (muffliato); 1 for zip_dl.
        shared: decor: variance of a link's secret over that of an agent's own noise; 1 by default.
        zero_sum: zip_dl: over what noises sum to zero: with_own_copy (the default) or messages.

    Returns:
        The losses and the noise multiplier.

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
    _validate.one_of("gradients", gradients, _ASSUMPTIONS)
    if (epochs is None) != (separation is None):
        pair = _validate.argument("epochs", epochs), _validate.argument("separation", separation)
        raise ValueError(f"{' and '.join(pair)}; give both or neither")
    if (sigma is None) == (epsilon is None):
        pair = _validate.argument("sigma", sigma), _validate.argument("epsilon", epsilon)
        raise ValueError(f"{' and '.join(pair)}; give one of the two")
    pattern = Participation(rounds, epochs or rounds, separation or 1)
    if relation == "replace_agent" and pattern.epochs != rounds:
        raise ValueError(
            f"relation is 'replace_agent' with {epochs} of {rounds} rounds; an agent takes part in "
            "every round: leave out epochs and separation, or take a record's"
        )
    # Views count a zeroed-out gradient of norm 1; a replaced one moves twice as far.
    shift = budget.clipped_sensitivity(relation, 1.0)
    delta = _validate.probability("delta", delta)
    steps = _validate.integer("gossip_steps", gossip_steps)
    several = None if steps == 1 else steps
    options = {"gossip_steps": several, "shared": shared, "zero_sum": zero_sum}
    model = _model(algorithm, mixing, pattern, options)
    if attackers is None:
        # Pairwise network DP is about every participant, each alone; else nobody takes part.
        attackers = [(agent,) for agent in range(len(mixing))] if trust == "pndp" else [()]
    groups = list(attackers) if np.iterable(attackers) else []
    if not groups or not all(map(np.iterable, groups)):
        raise _validate.refusal("attackers", attackers, "give sets of nodes, as in [[0], [1, 2]]")
    attacker_views = [_view(model, trust, group, protected) for group in groups]
    any_losses = [view.loss(pattern) for view in attacker_views]
    view_losses = [view.loss(pattern, gradients="view") for view in attacker_views]
    losses = {
        # Both are rounded up; a bound of gradients "any" covers those of "view".
        "any": tighter_losses(any_losses, any_losses),
        "view": tighter_losses(view_losses, any_losses),
    }
    if epsilon is not None:
        # Losses are of noise 1, and fall as 1 / sigma.
        mu = shift * max(float(np.nanmax(loss.mu)) for loss in losses[gradients])
        if math.isinf(mu):
            remedy = "" if gradients == "view" else ", or gradients 'view'"
            raise ValueError(
                f"gradients is {gradients!r}: the largest loss is infinite under {algorithm}, "
                f"whatever the noise; take another algorithm{remedy}"
            )
        sigma = mu / float(gdp.mu(_validate.positive("epsilon", epsilon), delta)) * (1 + 1e-12)
        # The conversions round: sigma grows until the stated epsilon is within the budget.
        while float(gdp.epsilon(mu / sigma * MARGIN, delta)) > epsilon:
            sigma *= 1 + 1e-10
    sigma = _validate.positive("sigma", sigma)
    coalitions = tuple(tuple(map(int, view.attackers)) for view in attacker_views)
    rows: records.Rows = []
    for kind, stated in losses.items():
        for group, loss in zip(coalitions, stated, strict=True):
            rows += _rows(mixing, kind, group, loss._replace(mu=loss.mu * (shift / sigma)), delta)
    return Account(coalitions, pattern, sigma, rows)


def _model(
    algorithm: str, mixing: SquareMatrix, pattern: Participation, options: inputs.Arguments
) -> views.LinearAlgorithm:
    """The algorithm at clip 1 and noise 1; options that are None are left out."""
    row = ALGORITHMS[_validate.one_of("algorithm", algorithm, ALGORITHMS)]
    chosen = {name: value for name, value in options.items() if value is not None}
    for name, value in chosen.items():
        # An option of another algorithm would be ignored without a word.
        if name not in row.options:
            raise ValueError(f"{name} is {value} with {algorithm}, which has none; leave it out")
    if row.design is not None:
        strategy = row.design.strategy_for(mixing, pattern)
        # So that sigma alone decides the loss to an eavesdropper.
        chosen["strategy"] = strategy / temporal.sensitivity(strategy, pattern)
    return row.view(mixing, **chosen)


def _view(
    model: views.LinearAlgorithm,
    trust: str,
    attackers: _Agents,
    protected: _Agents | None,
) -> views.View:
    """What the attacker of a trust model sees."""
    _validate.one_of("trust", trust, _SEES)
    if protected is not None and trust != "secldp":
        text = _validate.shown(protected)
        raise ValueError(f"protected is {text} with trust {trust!r}; leave it out, or take secldp")
    if trust == "pndp":
        return model.pndp(list(attackers))
    if trust == "ldp":
        if attackers:
            raise ValueError(
                f"attackers is {list(attackers)} with trust 'ldp', an eavesdropper who is no node; "
                "leave it out, or take trust 'pndp'"
            )
        return model.ldp()
    # Without pairwise secrets an outsider who knows them sees nothing more.
    if not any(model.secret):
        raise ValueError(
            "trust is 'secldp', about pairwise secrets, and this algorithm has none; take ldp or "
            "pndp, or algorithm decor"
        )
    return model.secldp(list(attackers) or None, protected=protected)


def tighter_losses(
    plain: Sequence[views.ViewLoss], wide: Sequence[views.ViewLoss]
) -> list[views.ViewLoss]:
    """Losses of views, or of larger views where these are less, rounded up.

    The plain bound sums absolute values, and can exceed the loss of a larger view.

    Args:
        plain: Losses of views.
        wide: Losses of larger ones, one for each.

    Example:
        >>> import numpy as np
        >>> from dpjax.accounting.attacker import ViewLoss
        >>> from dpjax.commands import account
        >>> plain, wide = (ViewLoss(np.array([mu]), np.array([False]), "any") for mu in (2.0, 1.0))
        >>> account.tighter_losses([plain], [wide])[0].mu.round(6).tolist()
        [1.0]
    """
    losses = []
    for loss, larger in zip(plain, wide, strict=True):
        tighter = larger.mu < loss.mu * (1 - _ROUNDING)
        mu = np.where(tighter, larger.mu, loss.mu) * (1 + _ROUNDING)
        losses.append(loss._replace(mu=mu, upper_bound=loss.upper_bound | tighter))
    return losses


def distances(mixing: SquareMatrix, attackers: _Agents) -> Int[np.ndarray, " n"]:
    """Links that a message passes from each agent to the nearest attacker.

    Args:
        mixing: [n, n] W; j sends to i where W_ij != 0.
        attackers: Nodes.

    Returns:
        [n] distances, -1 where no message arrives.

    Example:
        >>> from dpjax.commands import account
        >>> from dpjax.topology import graphs, mixing
        >>> account.distances(mixing.metropolis_hastings(graphs.ring(5)), [0]).tolist()
        [0, 1, 2, 2, 1]
    """
    from scipy.sparse import csgraph

    # Row i of W names whom agent i hears, so paths lead back from the attacker.
    links = (mixing != 0).astype(float)
    nodes = _validate.agents("attackers", attackers, maximum=len(mixing) - 1)
    hops = csgraph.dijkstra(links, indices=nodes, unweighted=True, min_only=True)
    return np.where(np.isinf(hops), -1, hops).astype(int)


def _rows(
    mixing: SquareMatrix,
    kind: str,
    attackers: _Group,
    loss: views.ViewLoss,
    delta: float,
) -> Iterable[records.Row]:
    """A row for each victim of a set of attackers."""
    away = distances(mixing, attackers) if attackers else None
    # An attacker knows its own data: it is no victim of itself.
    victims = [u for u in range(len(mixing)) if u not in attackers]
    # Epsilon is stated of a mu that is rounded up, never down.
    mu = loss.mu[victims] * MARGIN
    for u, value, epsilon in zip(victims, mu, np.ravel(gdp.epsilon(mu, delta)), strict=True):
        yield {
            "gradients": kind,
            "attackers": attackers,
            "victim": u,
            "distance": None if away is None else int(away[u]),
            "mu": float(value),
            "epsilon": float(epsilon),
            "upper_bound": bool(loss.upper_bound[u]),
        }


@inputs.with_arguments(account)
def account_command(
    graph: str,
    *,
    mixing: inputs.Weights = "metropolis",
    seed: int = 0,
    attackers: tuple[str, ...] = (),
    protected: tuple[str, ...] | None = None,
    out: Path | None = None,
    **terms: Any,
) -> int:
    """State what an algorithm costs every agent against an attacker, by distance from it.

    With --sigma the losses of that noise; with --epsilon the least noise that keeps the budget.

    sigma is the noise multiplier: a noise's standard deviation a coordinate over the clip norm.
    dsgd, muffliato: of the noise that each agent adds to each gradient. anti_pgd, mafalda,
    prefix_sum, banded_inverse, one_step: of the normals Z in C^-1 Z, the strategy C scaled to
    sensitivity 1 for this participation, so that an eavesdropper's loss is mu = 1 / sigma
    (zero-out). decor: of an agent's own noise; a link's secret has --shared times its variance.
    zip_dl: of z_k in z_k - mean(z).

    Prints the mean, least and largest loss at each distance (and of every agent, where they are
    few), for both kinds of gradients, and writes the loss of every agent to a record file, and a
    figure beside it.

    Example: dpjax account --graph florentine --algorithm dsgd --trust pndp --attackers Medici
    --relation replace_record --rounds 380 --epochs 20 --separation 19 --sigma 1

    Args:
        graph: An edge-list file or a name, as in dpjax design.
        mixing: How neighbours average: metropolis (symmetric weights) or uniform (row-stochastic).
        seed: First seed of a random graph that names none.
        attackers: Agents who attack, and collude if several; or all, every single agent in turn,
            which is the default of pndp. None with ldp. An agent is its label in the network, or
            its index 0, 1, ...; label:3 and index:3 say which, where 3 may be either.
        protected: With secldp, agents whose secrets among themselves stay unknown; all but the
            attackers by default.
        out: Record file to write; must not exist. By default dpjax-account.jsonl here, numbered if
            that is taken. The figure has its name and ends in .svg.
    """
    links, matrix, title = inputs.network(graph, mixing, seed)
    path = inputs.free(out, "dpjax-account.jsonl")
    # Reports call agents as the file of edges does.
    names = nodes.labels(links)
    # Refused before the computation, which may take minutes.
    figure = path.with_suffix(".svg")
    if os.path.exists(figure):
        raise ValueError(
            f"out is {str(path)!r}, whose figure {figure.name!r} exists; name another file or "
            "delete it"
        )
    hidden = None if protected is None else nodes.find_all(names, protected, "protected")
    groups = _attackers(attackers, names)
    spent = account(matrix, attackers=groups, protected=hidden, **terms)
    relation = terms["relation"]
    print(title)
    print(f"relation: {relation} ({inputs.HIDDEN[relation]})")
    print(f"attacker: {_who(terms['trust'], spent, names, hidden)}")
    print("\n".join(_lines(spent, terms, names)))
    # Tables are about one attacker; the sentences below are about all others.
    outside = {**terms, "trust": "ldp", "gradients": "any"}
    outsider = account(matrix, **outside | {"sigma": spent.sigma, "epsilon": None})
    print("\n".join(_parties(spent, terms, len(names), outsider)))
    if terms["epsilon"] is not None:
        # What correlation or secrets are worth shows beside independent noise.
        bare = {"algorithm": "dsgd", "gossip_steps": 1, "shared": None, "zero_sum": None}
        independent = outside | bare
        compared = {terms["algorithm"]: outside} if outside != terms else {}
        if independent not in (terms, outside):
            compared["independent noise (dsgd)"] = independent
        for algorithm, options in compared.items():
            try:
                sigma = account(matrix, **options).sigma
                comparison = f"sigma = {up(sigma)}, {sigma / spent.sigma:.3g} times this"
            except ValueError:
                comparison = "no noise is enough"
            print(f"{algorithm} against an eavesdropper of every message: {comparison}")
    inputs.note_delta(terms["delta"], len(names), relation)
    pattern = spent.participation
    settings = {"graph": graph, "mixing": mixing, "seed": seed, **terms}
    settings |= {"attackers": attackers, "protected": protected}
    # The record says how to make it again, defaults included.
    command = _typed(settings)
    settings |= {"sigma": spent.sigma, "epochs": pattern.epochs, "separation": pattern.separation}
    columns = ("graph", "algorithm", "trust", "relation", "rounds", "epochs", "separation",
               "sigma", "delta", "mixing", "gossip_steps")  # fmt: skip
    rows = []
    for row in spent.rows:
        words = {
            "attackers": " ".join(map(str, row["attackers"])),
            "attacker_labels": ", ".join(names[agent] for agent in row["attackers"]),
            "victim_label": names[row["victim"]],
        }
        rows.append({name: settings[name] for name in columns} | row | words)
    metadata = records.metadata(command, seed, experiment="account", config=settings)
    # Without attackers there is no distance to draw over.
    x = "distance" if spent.attackers[0] else "victim"
    metadata |= {"labels": names, "plot": {"x": x, "y": "epsilon", "series": "gradients"}}
    print(f"\nwritten: {records.write(path, rows, metadata)}")
    print(f"written: {plots.from_records(path, out=figure)}")
    return 0


def _attackers(words: tuple[str, ...], names: _Names) -> list[_Group] | None:
    """Sets of attackers that a command line names; None is the default of the trust model."""
    if not words:
        return None
    if words != ("all",):
        # Several that are named collude: they are one set.
        return [nodes.find_all(names, words, "attackers")]
    if "all" in names:
        raise ValueError("attackers is 'all', which is also an agent; write label:all for it alone")
    return [(agent,) for agent in range(len(names))]


def _typed(options: inputs.Arguments) -> str:
    """A command line with these options."""
    words = ["dpjax", "account"]
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        # What was left out is a default, and None has no form on a command line.
        if values not in ((), (None,)):
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join(words)


def _lines(spent: Account, terms: inputs.Arguments, names: _Names) -> list[str]:
    """The report: by distance, and by agent in a small network."""
    pattern = spent.participation
    algorithm = terms["algorithm"]
    relation = terms["relation"]
    gradients = terms["gradients"]
    rounds = "every round"
    if pattern.epochs < pattern.rounds:
        rounds = _validate.counted(pattern.epochs, "round")
    # Rounds of one, or of all, have no distance between them.
    spacing = ""
    if 1 < pattern.epochs < pattern.rounds:
        spacing = f", {pattern.separation:,} apart"
    unit = "an agent" if relation == "replace_agent" else "a record"
    steps = ""
    if terms["gossip_steps"] > 1:
        steps = f", {terms['gossip_steps']} gossip steps"
    report = [
        f"participation: {unit} in {rounds} of {pattern.rounds:,}{spacing}",
        f"algorithm: {algorithm}{steps}; sigma = {up(spent.sigma)}",
        f"noise: {ALGORITHMS[algorithm].noise}",
    ]
    several = len(spent.attackers) > 1
    # Where there are no other agents, gradients have nothing of theirs to depend on.
    kinds = _ASSUMPTIONS if len(names) > 1 else {}
    for table in (_by_distance, _by_agent):
        for kind in kinds or ["any"]:
            rows = table([row for row in spent.rows if row["gradients"] == kind], names, several)
            title = [f"gradients: {kind}:"] if kinds else []
            report += ["", *title, tables.text(rows)] if rows else []
    report += ["", *(f"gradients: {name}: holds {text}" for name, text in kinds.items())]
    flagged = sum(row["upper_bound"] for row in spent.rows if row["gradients"] == "view")
    if flagged:
        report.append(f"<= ({flagged}): upper bounds, which the exact loss may be below")
    worst = spent.worst(gradients)
    whom = nodes.title(names, worst["victim"])
    whom += f" against {_together(worst['attackers'], names)}" if several else ""
    if math.isinf(worst["mu"]):
        return [*report, f"no guarantee for {whom}: the loss is infinite"]
    loss = (
        f"{up(worst['mu'])}-Gaussian-DP, (epsilon = {up(worst['epsilon'])}, delta = "
        f"{delta_text(terms['delta'])})-DP ({relation})"
    )
    if not kinds:
        return [*report, f"guarantee: the agent is {loss}. It presumes that its noise is secret"]
    return [
        *report,
        f"guarantee: every victim is {loss}, {kinds[gradients]}; the worst is {whom}. It presumes "
        "that every agent draws its noise from a secret of its own",
    ]


def _by_distance(rows: records.Rows, names: _Names, several: bool) -> records.Rows:
    """Mean, least and largest loss over the victims (of every attacker) at each distance."""
    table = []
    for distance in sorted({row["distance"] for row in rows}):
        part = [row for row in rows if row["distance"] == distance]
        mu = [row["mu"] for row in part]
        # A "<=" marks losses that a larger view bounds.
        bounds = sum(row["upper_bound"] for row in part)
        table.append(
            {
                "distance": _DISTANCES.get(distance, str(distance)),
                "pairs" if several else "victims": len(part),
                "mu: mean": up(sum(mu) / len(mu), 4),
                "min": up(min(mu), 4),
                "max": up(max(mu), 4),
                "epsilon": up(max(row["epsilon"] for row in part), 4)
                + (f"  <= ({bounds})" if bounds else ""),
            }
        )
    return table


def _by_agent(rows: records.Rows, names: _Names, several: bool) -> records.Rows:
    """The largest loss of every agent of a small network."""
    # A line each would be pages; the record file has them all.
    if len(names) > inputs.FEW:
        return []
    table = []
    for victim in sorted({row["victim"] for row in rows}):
        row = max((row for row in rows if row["victim"] == victim), key=lambda row: row["mu"])
        line = {"agent": names[victim]}
        if not several and row["distance"] is not None:
            line["distance"] = _DISTANCES.get(row["distance"], str(row["distance"]))
        line |= {"mu": up(row["mu"]), "epsilon": up(row["epsilon"])}
        if several:
            line["to"] = ", ".join(names[agent] for agent in row["attackers"])
        table.append(line)
    return table


def _parties(spent: Account, terms: inputs.Arguments, agents: int, outside: Account) -> list[str]:
    """Who else is protected, a sentence a party: all but those whom the tables are about.

    Guarantee: sentences with an epsilon are of an outsider's loss, for gradients of any kind.
    """
    worst = outside.worst()
    if math.isinf(worst["mu"]):
        return ["NOT protected from an outsider: the loss is infinite."]
    stated = Guarantee.of(
        epsilon=worst["epsilon"],
        delta=terms["delta"],
        mu=worst["mu"],
        relation=terms["relation"],
        attacker="outsider",
        rounds=terms["rounds"],
        clip_norm=1.0,
        accountant="gdp",
        release=False,
        secrets="alone" if agents == 1 else ALGORITHMS[terms["algorithm"]].secrets,
    )
    subjects = {"an outsider"} if terms["trust"] == "ldp" else set()
    if terms["trust"] == "pndp" and len(spent.attackers) == agents:
        subjects.add(parties.ANOTHER)
    rows = [row for row in stated.protection()[:-2] if row.party not in subjects]
    # Such a delta promises an agent nothing, so no epsilon is printed beside it.
    if loose_delta(terms["delta"], agents, "agent"):
        why = f"delta = {delta_text(terms['delta'])} is above one over the number of agents"
        return [str(row._replace(epsilon=None, why=why)) for row in rows]
    several = wording.records(stated, "an outsider").strip()
    return [*map(str, rows), *([several] if several else [])]


def _who(trust: str, spent: Account, names: _Names, protected: _Agents | None) -> str:
    """The attacker in words."""
    attackers = spent.attackers[0]
    who = _together(attackers, names) + (", who collude" if len(attackers) > 1 else "")
    if len(spent.attackers) > 1:
        who = "any single agent"
    hidden = "all other agents" if attackers else "all agents"
    if protected is not None:
        hidden = ", ".join(nodes.title(names, agent) for agent in protected)
    return _SEES[trust].format(who=who or "an eavesdropper of every message", protected=hidden)


def _together(agents: _Agents, names: _Names) -> str:
    return " and ".join(nodes.title(names, agent) for agent in agents)
