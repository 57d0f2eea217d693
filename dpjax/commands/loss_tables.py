"""Tables of losses: by distance from the attacker, and of every agent of a small network."""

from collections.abc import Mapping, Sequence
from typing import Any

from dpjax._rounding import up
from dpjax.commands.victims import grouped

__all__: list[str] = []

FEW = 24
"""Up to how many agents a table or figure has a line for each."""
TITLES = {"any": "gradients: any", "view": "gradients: view"}


def by_agent(
    losses: Sequence[Mapping[str, Any]], names: Sequence[str], columns: int | None = None
) -> list[str]:
    """The largest loss of every agent, a line for each, or nothing for a large network.

    Args:
        losses: From `victims.rows` or `victims.rows_of_each`.
        names: The agents' labels.
        columns: Where lines must end; None is nowhere.
    """
    if len(names) > FEW:
        return []
    several = len({row["attackers"] for row in losses}) > 1
    worst: dict[str, dict[int, Mapping[str, Any]]] = {title: {} for title in TITLES}
    for row in losses:
        kind = worst[row["gradients"]]
        if row["victim"] not in kind or row["mu"] > kind[row["victim"]]["mu"]:
            kind[row["victim"]] = row
    victims = sorted(worst["any"])
    wide = max(5, *map(len, names))
    left = [f"{'agent':<{wide}}", *(f"{names[victim]:<{wide}}" for victim in victims)]
    if not several and losses[0]["distance"] is not None:
        away = ["distance", *(_away(worst["any"][victim]["distance"]) for victim in victims)]
        left = [f"{one}{other:>10}" for one, other in zip(left, away, strict=True)]
    values = ["mu", "epsilon"]
    blocks = {}
    for name, kind in worst.items():
        lines = ["".join(f"{each:>12}" for each in values) + "  to" * several]
        for victim in victims:
            row = kind[victim]
            to = "  " + ", ".join(names[each] for each in row["attackers"])
            lines.append("".join(f"{up(row[each]):>12}" for each in values) + to * several)
        blocks[TITLES[name]] = lines
    return _beside(left, blocks, columns)


def by_distance(losses: Sequence[Mapping[str, Any]], columns: int | None = None) -> list[str]:
    """Both losses, a line for each distance.

    Args:
        losses: From `victims.rows` or `victims.rows_of_each`.
        columns: Where lines must end; None is nowhere.
    """
    of = "pairs" if len({row["attackers"] for row in losses}) > 1 else "victims"
    groups = grouped(losses)
    first = [group for group in groups if group["gradients"] == "any"]
    left = [f"{'distance':<8}{of:>9}"]
    left += [f"{_away(group['distance']):<8}{group['victims']:>9}" for group in first]
    spent = {(g["gradients"], g["distance"]): g["max"] for g in grouped(losses, "epsilon")}
    blocks = {}
    for name, title in TITLES.items():
        lines = [f"{'mu: mean':>10}{'min':>9}{'max':>9}{'epsilon':>9}"]
        for group in (group for group in groups if group["gradients"] == name):
            line = "".join(
                f"{up(group[each], 4):>{wide}}"
                for each, wide in (("mean", 10), ("min", 9), ("max", 9))
            )
            line += f"{up(spent[name, group['distance']], 4):>9}"
            lines.append(line + f"  <= ({group['upper_bounds']})" * bool(group["upper_bounds"]))
        blocks[title] = lines
    return _beside(left, blocks, columns)


def _away(distance: int | None) -> str:
    return {None: "all", -1: "none"}.get(distance, str(distance))


def _beside(
    left: Sequence[str], blocks: Mapping[str, Sequence[str]], columns: int | None
) -> list[str]:
    """Blocks under their titles, beside each other, or below where lines are too short for it."""
    cells = [max(len(title), *map(len, lines)) for title, lines in blocks.items()]
    if columns is not None and len(left[0]) + sum(cells) + 2 * len(cells) > columns:
        return [
            line
            for title, lines in blocks.items()
            for line in [
                f"{title}:",
                *(f"{one}  {other}" for one, other in zip(left, lines, strict=True)),
            ]
        ]
    table = [" " * len(left[0])] + list(left)
    for (title, lines), cell in zip(blocks.items(), cells, strict=True):
        head = f"{title:^{len(lines[0])}}"
        table = [f"{one}  {each:<{cell}}" for one, each in zip(table, [head, *lines], strict=True)]
    return [line.rstrip() for line in table]
