"""Tables of losses: by distance from the attacker, and of every agent of a small network."""

import math
from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

from dpjax.engine.account import grouped

__all__ = ["FEW", "TITLES", "by_agent", "by_distance", "up"]

FEW = 24
"""Up to how many agents a table or figure has a line for each."""
TITLES = {"any": "gradients: any", "view": "gradients: view"}


def by_agent(found: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """The largest loss of every agent, a line for each, or nothing for a large network.

    Args:
        found: From `account.rows` or `account.rows_of_each`.
        names: The agents' labels.
    """
    if len(names) > FEW:
        return []
    several = len({row["attackers"] for row in found}) > 1
    value = "mu" if found[0]["epsilon"] is None else "epsilon"
    worst: dict[int, dict[str, Mapping[str, Any]]] = {}
    for row in found:
        kinds = worst.setdefault(row["victim"], {})
        if row["gradients"] not in kinds or row["mu"] > kinds[row["gradients"]]["mu"]:
            kinds[row["gradients"]] = row
    wide = max(5, *map(len, names))
    heads = ["mu", *(["epsilon"] if value == "epsilon" else [])]
    head = "".join(f"{each:>9}" for each in heads) + (f"  {'to':<{wide}}" if several else "")
    cell = max(len(head), len(TITLES["view"]))
    apart = "" if several or found[0]["distance"] is None else f"{'distance':>10}"
    made = [
        " " * (wide + len(apart))
        + "".join(f"  {title:^{cell}}" for title in TITLES.values()).rstrip(),
        f"{'agent':<{wide}}{apart}  {head:<{cell}}  {head}".rstrip(),
    ]
    for victim in sorted(worst):
        line = f"{names[victim]:<{wide}}"
        if apart:
            away = worst[victim]["any"]["distance"]
            line += f"{'none' if away == -1 else away:>10}"
        for gradients in TITLES:
            row = worst[victim][gradients]
            told = "".join(f"{up(row[each]):>9}" for each in heads)
            if several:
                told += f"  {', '.join(names[each] for each in row['attackers']):<{wide}}"
            line += f"  {told:<{cell}}"
        made.append(line.rstrip())
    return made


def by_distance(found: Sequence[Mapping[str, Any]], delta: float | None) -> list[str]:
    """Both losses side by side, a line for each distance.

    Args:
        found: From `account.rows` or `account.rows_of_each`.
        delta: Delta, or None for no epsilon.
    """
    of = "pairs" if len({row["attackers"] for row in found}) > 1 else "victims"
    several = delta is not None
    groups = {name: [g for g in grouped(found) if g["gradients"] == name] for name in TITLES}
    spent = {}
    if several:
        spent = {(g["gradients"], g["distance"]): g["max"] for g in grouped(found, "epsilon")}
    head = f"{'mu: mean':>10}{'min':>9}{'max':>9}" + (f"{'epsilon':>9}" if several else "")
    made = [
        f"{'':<17}" + "".join(f"{title:^{len(head)}}  " for title in TITLES.values()).rstrip(),
        f"{'distance':<8}{of:>9}{head}  {head}",
    ]
    for each in zip(*groups.values(), strict=True):
        away = "all" if each[0]["distance"] is None else str(each[0]["distance"])
        line = f"{'none' if away == '-1' else away:<8}{each[0]['victims']:>9}"
        for group in each:
            line += f"{up(group['mean']):>10}{up(group['min']):>9}{up(group['max']):>9}"
            if several:
                line += f"{up(spent[group['gradients'], group['distance']]):>9}"
            line += "  " if not group["upper_bounds"] else f"  <= ({group['upper_bounds']})"
        made.append(line.rstrip())
    return made


def up(value: float) -> str:
    """Four digits, rounded up: a printed loss is never below the stated one.

    Args:
        value: A loss.
    """
    if not math.isfinite(value):
        return str(value)
    four = Context(prec=4, rounding=ROUND_CEILING)
    return f"{float(four.create_decimal(Decimal(repr(float(value))))):g}"
