"""What `dpjax account` and `dpjax design --trust pndp` print, record and draw."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpjax import _rounding
from dpjax._rounding import up
from dpjax.accounting import parties, wording
from dpjax.accounting.guarantee import Guarantee
from dpjax.commands.loss_tables import FEW, TITLES, by_agent, by_distance
from dpjax.commands.multiplier import Multiplier
from dpjax.commands.victims import ASSUMPTIONS, NOISE, SECRETS, Setting, grouped, rows_of_each
from dpjax.topology import nodes

__all__: list[str] = []

_SEES = {
    "ldp": "LDP: an eavesdropper of every message on every link",
    "pndp": "PNDP: {who}, seeing what arrives, knowing own gradients and noise",
    "secldp": "SecLDP: {who}, who also knows every pairwise secret but those among {kept}",
}


def attackers(words: Sequence[str], names: Sequence[str]) -> list[tuple[int, ...]]:
    """Sets of attackers that a command line names: every single agent, or one set.

    Args:
        words: ("all",), or labels or indices of agents.
        names: The agents' labels.

    Returns:
        Sets of indices; one empty set for no words.

    Raises:
        ValueError: For a word that means no agent, or two; see `dpjax.topology.nodes`.
    """
    if tuple(words) != ("all",):
        return [nodes.find_all(names, words, "attacker")]
    if "all" in names:
        raise ValueError("attacker is 'all', which is also an agent; write label:all for it alone")
    return [(agent,) for agent in range(len(names))]


def lines(
    setting: Setting,
    trust: str,
    losses: Sequence[Mapping[str, Any]],
    sets: Sequence[Sequence[int]],
    protected: Sequence[int] | None,
    names: Sequence[str],
    *,
    sigma: float,
    delta: float,
    gradients: str,
    columns: int | None = None,
) -> list[str]:
    """The report of `victims.rows_of_each`, by distance, and by agent in a small network.

    Args:
        setting: The algorithm.
        trust: The trust model.
        losses: From `victims.rows_of_each`.
        sets: The attackers, each set on its own.
        protected: See `victims.view`.
        names: The agents' labels.
        sigma: Noise multiplier.
        delta: Delta.
        gradients: Which loss the last line is about.
        columns: Where the tables' lines must end; None is nowhere.
    """
    steps = f", {setting.gossip_steps} gossip steps" if setting.gossip_steps > 1 else ""
    report = [
        _when(setting),
        f"algorithm: {setting.algorithm}{steps}; sigma = {sigma:g}",
        f"noise: {NOISE[setting.algorithm]}",
        f"attacker: {_who(trust, sets, protected, names)}",
        "",
        *by_distance(losses, columns),
        "",
    ]
    each = by_agent(losses, names, columns)
    report += [*each, ""] if each else []
    flagged = sum(row["upper_bound"] for row in losses if row["gradients"] == "view")
    report += [f"gradients: {name}: holds {text}" for name, text in ASSUMPTIONS.items()]
    if flagged:
        report.append(f"<= : {flagged} are upper bounds, the loss of an attacker who sees more")
    chosen = [row for row in losses if row["gradients"] == gradients]
    worst = max(chosen, key=lambda row: row["mu"])
    if math.isinf(worst["mu"]):
        report.append(f"no guarantee for {_whom(worst, sets, names)}: the loss is infinite")
        return [*report, *other_parties(setting, trust, sets, sigma, delta)]
    cost = (
        f"{up(worst['mu'])}-Gaussian-DP, (epsilon = {up(worst['epsilon'])}, "
        f"delta = {_rounding.delta_text(delta)})-DP"
    )
    report.append(
        f"guarantee: every victim is {cost} ({setting.relation}), {ASSUMPTIONS[gradients]}; the "
        f"worst is {_whom(worst, sets, names)}. It presumes that every agent draws its noise "
        "from a secret of its own"
    )
    return [*report, *other_parties(setting, trust, sets, sigma, delta)]


def other_parties(
    setting: Setting, trust: str, sets: Sequence[Sequence[int]], sigma: float, delta: float
) -> list[str]:
    """Who else is protected, a sentence a party: all but those whom the table is about.

    Guarantee: sentences with an epsilon are of an outsider's loss, for gradients of any kind.

    Args:
        setting: The algorithm.
        trust: The trust model.
        sets: The attackers, each set on its own.
        sigma: Noise multiplier.
        delta: Delta.
    """
    outside = rows_of_each(setting, "ldp", [()], sigma=sigma, delta=delta)
    worst = max((row for row in outside if row["gradients"] == "any"), key=lambda row: row["mu"])
    if math.isinf(worst["mu"]):
        return ["NOT protected from an outsider: the loss is infinite."]
    secrets = SECRETS[setting.algorithm]
    stated = Guarantee(
        epsilon=worst["epsilon"],
        delta=delta,
        mu=worst["mu"],
        relation=setting.relation,
        attacker="outsider",
        rounds=setting.participation.rounds,
        clip_norm=1.0,
        accountant="gdp",
        release=False,
        secrets=secrets,
    )
    told = {"an outsider"} if trust == "ldp" else set()
    if trust == "pndp" and len(sets) == len(setting.mixing):
        told.add(parties.ANOTHER)
    several, agents = wording.records(stated, "an outsider").strip(), len(setting.mixing)
    others = [row for row in stated.protection()[:-2] if row.party not in told]
    if _rounding.loose_delta(delta, agents, "agent"):
        why = f"delta = {_rounding.delta_text(delta)} is above one over the number of agents"
        return [str(row._replace(epsilon=None, why=why)) for row in others]
    rows = [str(row) for row in others]
    return [*rows, several] if several else rows


def multiplier_lines(
    setting: Setting,
    multiplier: Multiplier,
    sets: Sequence[Sequence[int]],
    names: Sequence[str],
    each: Sequence[str] = (),
    program: Sequence[str] = (),
    *,
    epsilon: float,
    delta: float,
    clip: float,
    gradients: str,
) -> list[str]:
    """The report of `multiplier.least_multiplier`.

    Args:
        setting: The algorithm.
        multiplier: What is needed.
        sets: The attackers that were tried.
        names: The agents' labels.
        each: The table of every agent's loss at this multiplier, of a small network.
        program: The same in Python, from `pasted.of_multiplier`.
        epsilon: Budget.
        delta: Delta.
        clip: Clip norm.
        gradients: "any" or "view".
    """
    who = _who("pndp", sets, None, names)
    worst = _together(multiplier.attackers, names)
    others = "" if multiplier.ties < 2 else f" ({multiplier.ties - 1:,} more pairs cost as much)"
    report = [
        _when(setting),
        f"algorithm: {setting.algorithm}",
        f"noise: {NOISE[setting.algorithm]}",
        f"attacker: {who}",
        f"gradients: {gradients}: holds {ASSUMPTIONS[gradients]}",
        "",
        f"sigma = {up(multiplier.sigma)}, standard deviation {up(multiplier.sigma * clip)} at clip "
        f"{clip:g}: every victim is ({up(epsilon)}, {_rounding.delta_text(delta)})-DP "
        f"({setting.relation}), mu = {up(multiplier.mu)}",
        f"worst attacker: {worst}; worst victim: {nodes.title(names, multiplier.victim)}{others}",
    ]
    if multiplier.upper_bound:
        report.append("that loss is an upper bound: of an attacker who sees more")
    for title, value in (
        (f"{setting.algorithm} against an eavesdropper of every message", multiplier.ldp),
        ("independent noise (dsgd) against it", multiplier.independent),
    ):
        share = "no noise is enough" if math.isinf(value) else f"sigma = {up(value)}"
        more = "" if math.isinf(value) else f", {value / multiplier.sigma:.3g} times this"
        report.append(f"{title}: {share}{more}")
    report += ["", *other_parties(setting, "pndp", sets, multiplier.sigma, delta)]
    report += ["", *each] if each else []
    report += ["", "nothing is written; the same in Python:", "", *program]
    return report


def write(
    out: Path,
    losses: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
    names: Sequence[str],
    command: str,
) -> list[Path]:
    """Write the rows to a record file and the figure beside it.

    Args:
        out: The record file; must not exist.
        losses: From `victims.rows_of_each`.
        about: The command's options.
        names: The agents' labels.
        command: The command line.

    Returns:
        Both paths.
    """
    from dpjax.results import records

    kept = ("graph", "algorithm", "trust", "relation", "rounds", "epochs", "separation", "sigma")
    setting = {name: about[name] for name in (*kept, "delta", "mixing", "gossip_steps")}
    rows = [
        {
            **setting,
            **row,
            "attackers": " ".join(map(str, row["attackers"])),
            "attacker_labels": ", ".join(names[each] for each in row["attackers"]),
            "victim_label": names[row["victim"]],
        }
        for row in losses
    ]
    metadata = records.metadata(command=command, seed=about.get("seed"))
    metadata |= {"experiment": "account", "config": dict(about), "labels": list(names)}
    return [records.write(out, rows, metadata), *_draw(out, losses, about, names)]


def _draw(
    out: Path, losses: Sequence[Mapping[str, Any]], about: Mapping[str, Any], names: Sequence[str]
) -> list[Path]:
    """The figure by distance, or by agent where an eavesdropper is nowhere."""
    import pandas

    from dpjax.results.ranges import ranges

    everywhere = losses[0]["distance"] is None
    placed = [{**row, "distance": row["victim"]} for row in losses] if everywhere else losses
    drawn = pandas.DataFrame(grouped(placed, "epsilon"))
    drawn["gradients"] = drawn["gradients"].map(TITLES)
    if not (drawn["max"].map(math.isfinite) & (drawn["min"] > 0)).any():
        return []
    sets = {row["attackers"] for row in losses}
    who = "the attacker" if len(sets) > 1 else _together(sorted(*sets), names)
    return [
        ranges(
            drawn,
            "distance",
            "gradients",
            path=out.with_suffix(".svg"),
            xlabel="agent" if everywhere else f"distance from {who}",
            ylabel=f"epsilon at delta = {about['delta']:g}",
            ticks=names if everywhere and nodes.named(names) and len(names) <= FEW else None,
            title=f"{about['algorithm']} on {about['graph']}, {about['trust']}",
            note=("Mean, least and largest over victims" + " and attackers" * (len(sets) > 1))
            + f"; {about['relation']}, sigma = "
            f"{about['sigma']:g}, T = {about['rounds']}. gradients: any holds {ASSUMPTIONS['any']};"
            f" view {ASSUMPTIONS['view']}.",
        )
    ]


def check_place(out: Path) -> None:
    """Refuse a record file whose figure would replace another one."""
    for ending in (".svg", ".png"):
        if os.path.exists(out.with_suffix(ending)):
            raise ValueError(
                f"out is {str(out)!r}, whose figure {out.with_suffix(ending).name!r} exists; name "
                "another file or delete it"
            )


def _when(setting: Setting) -> str:
    when = setting.participation
    every = "every round" if when.epochs == when.rounds else f"{when.epochs:,} rounds"
    apart = "" if when.epochs in (1, when.rounds) else f", {when.separation:,} apart"
    what = "an agent" if setting.relation == "replace_agent" else "a record"
    return f"participation: {what} in {every} of {when.rounds:,}{apart}"


def _who(
    trust: str,
    sets: Sequence[Sequence[int]],
    protected: Sequence[int] | None,
    names: Sequence[str],
) -> str:
    attackers = sets[0]
    who = _together(attackers, names)
    who += ", who collude" if len(attackers) > 1 else ""
    who = who or "an eavesdropper of every message"
    who = "any single agent" if len(sets) > 1 else who
    others = "all agents" if not attackers else "all other agents"
    kept = others if protected is None else ", ".join(nodes.title(names, i) for i in protected)
    return _SEES[trust].format(who=who, kept=kept)


def _together(agents: Sequence[int], names: Sequence[str]) -> str:
    return " and ".join(nodes.title(names, agent) for agent in agents)


def _whom(worst: Mapping[str, Any], sets: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """The worst victim, and of several attackers the worst."""
    against = f" against {_together(worst['attackers'], names)}" if len(sets) > 1 else ""
    return nodes.title(names, worst["victim"]) + against
