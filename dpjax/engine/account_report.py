"""What `dpjax account` and `dpjax design --trust pndp` print, record and draw."""

import math
from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, Context, Decimal
from pathlib import Path
from typing import Any

from dpjax.engine.account import ASSUMPTIONS, NOISE, Setting, grouped
from dpjax.engine.multiplier import Needed

__all__ = ["attackers", "check_place", "lines", "multiplier_lines", "write"]

_SEES = {
    "ldp": "LDP: an eavesdropper of every message on every link",
    "pndp": "PNDP: {who}, seeing what arrives, knowing own gradients and noise",
    "secldp": "SecLDP: {who}, who also knows every pairwise secret but those among {kept}",
}
_TITLES = {"any": "gradients: any", "view": "gradients: view"}


def attackers(words: Sequence[str], agents: int) -> list[tuple[int, ...]]:
    """Sets of attackers that a command line names: every single agent, or one set.

    Args:
        words: ("all",) or numbers of agents.
        agents: Number of agents n.

    Raises:
        ValueError: For anything else.
    """
    if tuple(words) == ("all",):
        return [(agent,) for agent in range(agents)]
    try:
        return [tuple(int(word) for word in words)]
    except ValueError:
        raise ValueError(
            f"attacker is {list(words)}; give all, or agents of 0 .. {agents - 1}"
        ) from None


def lines(
    setting: Setting,
    trust: str,
    found: Sequence[Mapping[str, Any]],
    attackers: Sequence[int],
    protected: Sequence[int] | None,
    names: Mapping[int, str | None],
    *,
    sigma: float,
    delta: float | None,
    gradients: str,
) -> list[str]:
    """The report of `account.rows`, by distance.

    Args:
        setting: The algorithm.
        trust: The trust model.
        found: From `account.rows`.
        attackers: Nodes that collude.
        protected: See `account.view`.
        names: The agents' labels.
        sigma: Noise multiplier.
        delta: Delta, or None.
        gradients: Which loss the last line is about.
    """
    steps = f", {setting.gossip_steps} gossip steps" if setting.gossip_steps > 1 else ""
    made = [
        _when(setting),
        f"algorithm: {setting.algorithm}{steps}; sigma = {sigma:g}",
        f"noise: {NOISE[setting.algorithm]}",
        f"attacker: {_who(trust, attackers, protected, names)}",
        "",
        *_table(found, delta),
        "",
    ]
    flagged = sum(row["upper_bound"] for row in found if row["gradients"] == "view")
    made += [f"gradients: {name}: holds {text}" for name, text in ASSUMPTIONS.items()]
    if flagged:
        made.append(f"<= : {flagged} are upper bounds, the loss of an attacker who sees more")
    chosen = [row for row in found if row["gradients"] == gradients]
    worst = max(chosen, key=lambda row: row["mu"])
    if math.isinf(worst["mu"]):
        made.append(f"no guarantee for {_agent(worst['victim'], names)}: the loss is infinite")
        return made
    cost = f"{_up(worst['mu'])}-Gaussian-DP"
    if delta is not None:
        cost += f", (epsilon = {_up(worst['epsilon'])}, delta = {_up(delta)})-DP"
    made.append(
        f"guarantee: every victim is {cost} ({setting.relation}), {ASSUMPTIONS[gradients]}; the "
        f"worst is {_agent(worst['victim'], names)}. It presumes that every agent draws its noise "
        "from a secret of its own"
    )
    return made


def multiplier_lines(
    setting: Setting,
    found: Needed,
    sets: Sequence[Sequence[int]],
    names: Mapping[int, str | None],
    *,
    epsilon: float,
    delta: float,
    clip: float,
    gradients: str,
    mixing: str,
) -> list[str]:
    """The report of `multiplier.needed`.

    Args:
        setting: The algorithm.
        found: What is needed.
        sets: The attackers that were tried.
        names: The agents' labels.
        epsilon: Budget.
        delta: Delta.
        clip: Clip norm.
        gradients: "any" or "view".
        mixing: "metropolis" or "uniform".
    """
    one = len(sets) == 1
    who = _who("pndp", sets[0], None, names) if one else "PNDP: any single agent"
    worst = " and ".join(_agent(agent, names) for agent in found.attackers)
    others = "" if found.ties < 2 else f" ({found.ties - 1:,} more pairs cost as much)"
    made = [
        _when(setting),
        f"algorithm: {setting.algorithm}",
        f"noise: {NOISE[setting.algorithm]}",
        f"attacker: {who}",
        f"gradients: {gradients}: holds {ASSUMPTIONS[gradients]}",
        "",
        f"sigma = {_up(found.sigma)}, standard deviation {_up(found.sigma * clip)} at clip "
        f"{clip:g}: every victim is ({epsilon:g}, {delta:g})-DP ({setting.relation}), "
        f"mu = {found.mu:.6g}",
        f"worst attacker: {worst}; worst victim: {_agent(found.victim, names)}{others}",
    ]
    if found.upper_bound:
        made.append("that loss is an upper bound: of an attacker who sees more")
    for title, value in (
        (f"{setting.algorithm} against an eavesdropper of every message", found.ldp),
        ("independent noise (dsgd) against it", found.independent),
    ):
        share = "no noise is enough" if math.isinf(value) else f"sigma = {_up(value)}"
        more = "" if math.isinf(value) else f", {value / found.sigma:.3g} times this"
        made.append(f"{title}: {share}{more}")
    weights = "metropolis_hastings" if mixing == "metropolis" else "uniform_neighbors"
    when = setting.participation
    made += [
        "",
        "nothing is written; the same in Python:",
        f"  W = topology.mixing.{weights}(graph)",
        f"  when = Participation({when.rounds}, {when.epochs}, {when.separation})",
        f'  setting = engine.account.Setting("{setting.algorithm}", W, when, '
        f'"{setting.relation}"{_options(setting)})',
        f"  engine.multiplier.needed(setting, {_short(sets)}, epsilon={epsilon:g}, "
        f'delta={delta:g}, gradients="{gradients}").sigma',
        '  engine.account.rows(setting, "pndp", attackers=..., sigma=...)  # every victim',
    ]
    if setting.algorithm not in ("decor", "zip_dl"):
        made.append(
            "  transforms.noise.correlated(sigma * clip * numpy.eye(len(W)), key=..., "
            f"rounds={when.rounds}, strategy=setting.make().strategy)"
        )
    return made


def write(
    out: Path, found: Sequence[Mapping[str, Any]], about: Mapping[str, Any], command: str
) -> list[Path]:
    """Write the rows to a record file and the figure beside it.

    Args:
        out: The record file; must not exist.
        found: From `account.rows`.
        about: The command's options.
        command: The command line.

    Returns:
        Both paths.
    """
    from dpjax.results import records
    from dpjax.results.ranges import ranges

    names = ("graph", "algorithm", "trust", "relation", "rounds", "epochs", "separation", "sigma")
    told = {name: about[name] for name in (*names, "delta", "mixing", "gossip_steps")}
    told["attackers"] = " ".join(map(str, about["attacker"]))
    rows = [{**told, **row} for row in found]
    metadata = records.metadata(command=command, seed=about.get("seed"))
    paths = [records.write(out, rows, metadata | {"experiment": "account", "config": dict(about)})]
    frame = records.read(out)
    value = "mu" if about["delta"] is None else "epsilon"
    stored: list[dict[str, Any]] = frame.to_dict("records")
    if frame["distance"].isna().any():
        # An eavesdropper is nowhere: each agent on its own.
        stored = [{**row, "distance": row["victim"]} for row in stored]
    drawn = type(frame)(grouped(stored, value))
    drawn["gradients"] = drawn["gradients"].map(_TITLES)
    if not (drawn["max"].map(math.isfinite) & (drawn["min"] > 0)).any():
        return paths
    paths.append(
        ranges(
            drawn,
            "distance",
            "gradients",
            path=out.with_suffix(".svg"),
            xlabel="agent" if frame["distance"].isna().any() else "distance from the attacker",
            ylabel="mu" if value == "mu" else f"epsilon at delta = {about['delta']:g}",
            title=f"{about['algorithm']} on {about['graph']}, {about['trust']}",
            note=f"Mean, least and largest over victims; {about['relation']}, sigma = "
            f"{about['sigma']:g}, T = {about['rounds']}. gradients: any holds {ASSUMPTIONS['any']};"
            f" view {ASSUMPTIONS['view']}.",
        )
    )
    return paths


def check_place(out: Path) -> None:
    """Refuse a record file whose figure would replace another one."""
    for ending in (".svg", ".png"):
        if out.with_suffix(ending).exists():
            raise ValueError(
                f"out is {str(out)!r}, whose figure {out.with_suffix(ending).name!r} exists; name "
                "another file or delete it"
            )


def _table(found: Sequence[Mapping[str, Any]], delta: float | None) -> list[str]:
    """Both losses side by side, a line for each distance."""
    several = delta is not None
    groups = {name: [g for g in grouped(found) if g["gradients"] == name] for name in _TITLES}
    spent = {}
    if several:
        spent = {(g["gradients"], g["distance"]): g["max"] for g in grouped(found, "epsilon")}
    head = f"{'mu: mean':>10}{'min':>9}{'max':>9}" + (f"{'epsilon':>9}" if several else "")
    made = [
        f"{'':<17}" + "".join(f"{title:^{len(head)}}  " for title in _TITLES.values()).rstrip(),
        f"{'distance':<8}{'victims':>9}{head}  {head}",
    ]
    for each in zip(*groups.values(), strict=True):
        away = "all" if each[0]["distance"] is None else str(each[0]["distance"])
        line = f"{'none' if away == '-1' else away:<8}{each[0]['victims']:>9}"
        for group in each:
            line += f"{_up(group['mean']):>10}{_up(group['min']):>9}{_up(group['max']):>9}"
            if several:
                line += f"{_up(spent[group['gradients'], group['distance']]):>9}"
            line += "  " if not group["upper_bounds"] else f"  <= ({group['upper_bounds']})"
        made.append(line.rstrip())
    return made


def _when(setting: Setting) -> str:
    when = setting.participation
    every = "every round" if when.epochs == when.rounds else f"{when.epochs:,} rounds"
    apart = "" if when.epochs in (1, when.rounds) else f", {when.separation:,} apart"
    what = "an agent" if setting.relation == "replace_agent" else "a record"
    return f"participation: {what} in {every} of {when.rounds:,}{apart}"


def _who(
    trust: str,
    attackers: Sequence[int],
    protected: Sequence[int] | None,
    names: Mapping[int, str | None],
) -> str:
    who = " and ".join(_agent(agent, names) for agent in attackers)
    who += ", who collude" if len(attackers) > 1 else ""
    who = who or "an eavesdropper of every message"
    others = "all agents" if not attackers else "all other agents"
    kept = others if protected is None else ", ".join(map(str, protected))
    return _SEES[trust].format(who=who, kept=kept)


def _agent(agent: int, names: Mapping[int, str | None]) -> str:
    name = names.get(agent)
    return f"agent {agent}" + ("" if name in (None, str(agent)) else f" ({name})")


def _options(setting: Setting) -> str:
    return "" if setting.gossip_steps == 1 else f", gossip_steps={setting.gossip_steps}"


def _short(sets: Sequence[Sequence[int]]) -> str:
    return f"[{tuple(sets[0])}]" if len(sets) == 1 else "[(i,) for i in range(len(W))]"


def _up(value: float) -> str:
    """Four digits, rounded up: a printed loss is never below the stated one."""
    if not math.isfinite(value):
        return str(value)
    four = Context(prec=4, rounding=ROUND_CEILING)
    return f"{float(four.create_decimal(Decimal(repr(float(value))))):g}"
