"""The body of `dpjax account`: options in, tables, a record file and its figure out."""

import dataclasses
import math
import os
import shlex
import textwrap
from collections.abc import Sequence
from typing import Any

from dpjax._numerics import delta_text, loose_delta, up
from dpjax.accounting import parties, wording
from dpjax.accounting.guarantee import Guarantee
from dpjax.commands import inputs
from dpjax.commands.account import NOISE, SECRETS, Account, account
from dpjax.results import plots, records, tables
from dpjax.topology import nodes

__all__: list[str] = []

_ASSUMPTIONS = {
    "any": "whatever the other agents' gradients depend on, as in training",
    "view": (
        "only if the other agents' gradients are fixed in advance or functions of what the "
        "attacker sees and knows, and messages are not rounded; training and releases round them, "
        "which an attacker who does not see every message can gain from"
    ),
}
_SEES = {
    "ldp": "LDP: an eavesdropper of every message on every link",
    "pndp": "PNDP: {who}, seeing what arrives, knowing own gradients and noise",
    "secldp": "SecLDP: {who}, who also knows every pairwise secret but those among {protected}",
}


def run(command: Any) -> int:
    """Account for an algorithm on a network: print the losses, write records and figure.

    Args:
        command: The options, `dpjax.cli.AccountCommand`.

    Returns:
        Exit status.

    Raises:
        ValueError: For options that do not go together.
    """
    graph, matrix, title = inputs.network(command)
    out, names = inputs.free(command.out, "dpjax-account.jsonl"), nodes.labels(graph)
    figure = out.with_suffix(".svg")
    if os.path.exists(figure):
        raise ValueError(
            f"out is {str(out)!r}, whose figure {figure.name!r} exists; name another file or "
            "delete it"
        )
    same = ("algorithm", "relation", "rounds", "sigma", "epsilon", "delta", "trust", "epochs",
            "separation", "gradients", "gossip_steps", "shared", "zero_sum")  # fmt: skip
    options = {name: getattr(command, name) for name in same}
    protected = command.protected
    if protected is not None:
        protected = nodes.find_all(names, protected, "protected")
    spent = account(matrix, attackers=_attackers(command, names), protected=protected, **options)
    print(title)
    print(f"relation: {command.relation} ({inputs.HIDDEN[command.relation]})")
    print("\n".join(_lines(spent, names, command.gradients)))
    if command.epsilon is not None:
        print("\n".join(_others(spent, command, options)))
    inputs.note_delta(command.delta, len(names), command.relation)
    about = {**dataclasses.asdict(command), "sigma": spent.sigma, "out": None}
    when = spent.setting.participation
    about |= {"epochs": when.epochs, "separation": when.separation}
    setting = ("graph", "algorithm", "trust", "relation", "rounds", "epochs", "separation",
               "sigma", "delta", "mixing", "gossip_steps")  # fmt: skip
    rows = [
        {name: about[name] for name in setting} | row | {
            "attackers": " ".join(map(str, row["attackers"])),
            "attacker_labels": ", ".join(names[each] for each in row["attackers"]),
            "victim_label": names[row["victim"]],
        }
        for row in spent.rows
    ]  # fmt: skip
    metadata = records.metadata(command=_typed(command), seed=command.seed)
    metadata |= {"experiment": "account", "config": about, "labels": list(names)}
    print(f"\nwritten: {records.write(out, rows, metadata)}")
    if any(math.isfinite(row["epsilon"]) for row in rows):
        drawn = plots.from_records(out, y="epsilon", series="gradients", out=figure)
        print(f"written: {drawn}")
    return 0


def _attackers(command: Any, names: Sequence[str]) -> list[tuple[int, ...]] | None:
    """Sets of attackers that a command line names; None is the default of the trust model."""
    words = command.attacker or (("all",) if command.trust == "pndp" else ())
    if words != ("all",):
        return [nodes.find_all(names, words, "attacker")]
    if "all" in names:
        raise ValueError("attacker is 'all', which is also an agent; write label:all for it alone")
    return [(agent,) for agent in range(len(names))]


def _lines(spent: Account, names: Sequence[str], gradients: Any) -> list[str]:
    """The report: by distance, and by agent in a small network."""
    setting, sets = spent.setting, spent.attackers
    when = setting.participation
    every = "every round" if when.epochs == when.rounds else f"{when.epochs:,} rounds"
    apart = "" if when.epochs in (1, when.rounds) else f", {when.separation:,} apart"
    what = "an agent" if setting.relation == "replace_agent" else "a record"
    steps = f", {setting.gossip_steps} gossip steps" if setting.gossip_steps > 1 else ""
    report = [
        f"participation: {what} in {every} of {when.rounds:,}{apart}",
        f"algorithm: {setting.algorithm}{steps}; sigma = {up(spent.sigma)}",
        f"noise: {NOISE[setting.algorithm]}",
        f"attacker: {_who(spent, names)}",
    ]
    for table in (_by_distance, _by_agent):
        for kind in _ASSUMPTIONS:
            rows = table([row for row in spent.rows if row["gradients"] == kind], names)
            report += ["", f"gradients: {kind}:", tables.text(rows)] if rows else []
    report += ["", *(f"gradients: {name}: holds {text}" for name, text in _ASSUMPTIONS.items())]
    if flagged := sum(row["upper_bound"] for row in spent.rows if row["gradients"] == "view"):
        report.append(f"<= : {flagged} are upper bounds, the loss of an attacker who sees more")
    worst = spent.worst(gradients)
    whom = nodes.title(names, worst["victim"])
    whom += f" against {_together(worst['attackers'], names)}" if len(sets) > 1 else ""
    if math.isinf(worst["mu"]):
        report.append(f"no guarantee for {whom}: the loss is infinite")
    else:
        report.append(
            f"guarantee: every victim is {up(worst['mu'])}-Gaussian-DP, (epsilon = "
            f"{up(worst['epsilon'])}, delta = {delta_text(spent.delta)})-DP ({setting.relation}), "
            f"{_ASSUMPTIONS[gradients]}; the worst is {whom}. It presumes that every agent draws "
            "its noise from a secret of its own"
        )
    return [*report, *_parties(spent)]


def _by_distance(rows: list[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Mean, least and largest loss over the victims (of every attacker) at each distance."""
    several, table = len({row["attackers"] for row in rows}) > 1, []
    for distance in sorted(
        {row["distance"] for row in rows}, key=lambda at: -1 if at is None else at
    ):
        part = [row for row in rows if row["distance"] == distance]
        mu = [row["mu"] for row in part]
        bounds = sum(row["upper_bound"] for row in part)
        table.append(
            {
                "distance": {None: "all", -1: "none"}.get(distance, str(distance)),
                "pairs" if several else "victims": len(part),
                "mu: mean": up(sum(mu) / len(mu), 4),
                "min": up(min(mu), 4),
                "max": up(max(mu), 4),
                "epsilon": up(max(row["epsilon"] for row in part), 4)
                + (f"  <= ({bounds})" if bounds else ""),
            }
        )
    return table


def _by_agent(rows: list[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """The largest loss of every agent of a small network."""
    if len(names) > inputs.FEW:
        return []
    several, table = len({row["attackers"] for row in rows}) > 1, []
    for victim in sorted({row["victim"] for row in rows}):
        row = max((row for row in rows if row["victim"] == victim), key=lambda row: row["mu"])
        line = {"agent": names[victim]}
        if not several and row["distance"] is not None:
            line["distance"] = "none" if row["distance"] < 0 else str(row["distance"])
        line |= {"mu": up(row["mu"]), "epsilon": up(row["epsilon"])}
        if several:
            line["to"] = ", ".join(names[each] for each in row["attackers"])
        table.append(line)
    return table


def _parties(spent: Account) -> list[str]:
    """Who else is protected, a sentence a party: all but those whom the tables are about.

    Guarantee: sentences with an epsilon are of an outsider's loss, for gradients of any kind.
    """
    setting, agents = spent.setting, len(spent.setting.mixing)
    when = setting.participation
    outside = account(
        setting.mixing, setting.algorithm, relation=setting.relation, rounds=when.rounds,
        epochs=when.epochs, separation=when.separation, sigma=spent.sigma, delta=spent.delta,
        gossip_steps=setting.gossip_steps, shared=setting.shared, zero_sum=setting.zero_sum,
    ).worst()  # fmt: skip
    if math.isinf(outside["mu"]):
        return ["NOT protected from an outsider: the loss is infinite."]
    stated = Guarantee.of(
        epsilon=outside["epsilon"],
        delta=spent.delta,
        mu=outside["mu"],
        relation=setting.relation,
        attacker="outsider",
        rounds=when.rounds,
        clip_norm=1.0,
        accountant="gdp",
        release=False,
        secrets=SECRETS[setting.algorithm],
    )
    subjects = {"an outsider"} if spent.trust == "ldp" else set()
    if spent.trust == "pndp" and len(spent.attackers) == agents:
        subjects.add(parties.ANOTHER)
    rows = [row for row in stated.protection()[:-2] if row.party not in subjects]
    if loose_delta(spent.delta, agents, "agent"):
        why = f"delta = {delta_text(spent.delta)} is above one over the number of agents"
        return [str(row._replace(epsilon=None, why=why)) for row in rows]
    several = wording.records(stated, "an outsider").strip()
    return [*map(str, rows), *([several] if several else [])]


def _others(spent: Account, command: Any, options: dict[str, Any]) -> list[str]:
    """What noise this budget takes against an eavesdropper, and the same in Python."""
    setting, lines = spent.setting, []
    plain = options | {"trust": "ldp", "gradients": "any"}
    bare = plain | {"algorithm": "dsgd", "gossip_steps": 1, "shared": None, "zero_sum": None}
    for title, each in (
        (f"{setting.algorithm} against an eavesdropper of every message", plain),
        ("independent noise (dsgd) against it", bare),
    ):
        try:
            sigma = account(setting.mixing, **each).sigma
            lines.append(f"{title}: sigma = {up(sigma)}, {sigma / spent.sigma:.3g} times this")
        except ValueError:
            lines.append(f"{title}: no noise is enough")
    weights = "metropolis_hastings" if command.mixing == "metropolis" else "uniform_neighbors"
    if len(spent.attackers) == 1 and spent.trust != "ldp":
        options = options | {"attackers": [list(spent.attackers[0])]}
    words = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
    program = [
        "import dpjax as dp",
        f"W = dp.mixing.{weights}(dp.graphs.parse({inputs.seeded(command.graph, command.seed)!r}))",
        "spent = dp.account(",
        *textwrap.wrap(f"W, {words}", 76, initial_indent="    ", subsequent_indent="    "),
        ")",
    ]
    return [*lines, "", "the same in Python:", "", *program]


def _who(spent: Account, names: Sequence[str]) -> str:
    attackers = spent.attackers[0]
    who = _together(attackers, names) + (", who collude" if len(attackers) > 1 else "")
    who = (
        "any single agent"
        if len(spent.attackers) > 1
        else who or "an eavesdropper of every message"
    )
    protected = "all other agents" if attackers else "all agents"
    if spent.protected is not None:
        protected = ", ".join(nodes.title(names, agent) for agent in spent.protected)
    return _SEES[spent.trust].format(who=who, protected=protected)


def _together(agents: Sequence[int], names: Sequence[str]) -> str:
    return " and ".join(nodes.title(names, agent) for agent in agents)


def _typed(command: Any) -> str:
    """The command line that gives these options."""
    words = ["dpjax", "account"]
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if value != field.default:
            several = value if isinstance(value, tuple) else (value,)
            words += [f"--{field.name.replace('_', '-')}", *map(str, several)]
    return shlex.join(words)
