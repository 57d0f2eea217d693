"""Captions: what guarantee a figure's rows have, in a few words."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dpjax._numerics import delta_text, up

__all__: list[str] = []

_KIND = ("delta", "unit", "relation", "attacker", "accountant", "release", "unsound")
_FALSE = "by the paper's rule, which is FALSE here"


def guarantees(entries: Any) -> list[str]:
    """One caption for each kind of guarantee among those given.

    Guarantees that differ in epsilon and rounds alone are told together, as a list or a range;
    those with other participations (k, b) apart. Printed epsilons are rounded up. The non-private
    runs' is left out beside private ones.

    Args:
        entries: A text, a guarantee (anything with ``caption()``), its dict, or several of these.

    Returns:
        The captions, in the order of the first ones.

    Raises:
        ValueError: For anything else.
    """
    captions: list[str] = []
    private: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    open_rounds: set[int] = set()
    for one in listed(entries):
        if isinstance(one, str):
            captions.append(one)
            continue
        record = one.to_dict() if hasattr(one, "to_dict") else one
        if not isinstance(record, Mapping):
            if not hasattr(one, "caption"):
                raise ValueError(f"guarantee is {one!r}; give a text, a Guarantee or its dict")
            captions.append(str(one.caption()))
        elif record.get("relation") is None:
            open_rounds.add(int(record.get("rounds", 0)))
        else:
            kind = (*(record.get(name) for name in _KIND), *_conditions(record))
            private.setdefault(kind, []).append(record)
    for kind, records in private.items():
        captions.append(_caption(kind, records))
    if open_rounds and not captions:
        captions.append(f"not private, T = {_several(open_rounds, str)}")
    return list(dict.fromkeys(captions))


def listed(records: Any) -> list[Any]:
    """What `guarantees` takes, as a list without the rows that have none.

    Args:
        records: A text, a guarantee, its dict, or several; None is none.

    Returns:
        The list.
    """
    if records is None:
        return []
    if isinstance(records, str | Mapping) or hasattr(records, "caption"):
        return [records]
    # A column of records has nan where a row has none.
    return [one for one in records if one is not None and not isinstance(one, float)]


def participation(record: Any) -> str | None:
    """In which rounds what a guarantee protects takes part: what else its numbers rest on.

    Args:
        record: A guarantee's dict; anything else has no participation.

    Returns:
        "k = 20, b = 19", "all rounds", or None where there is no private guarantee.
    """
    if not isinstance(record, Mapping) or record.get("relation") is None:
        return None
    if record.get("participation") is None:
        return "all rounds"
    epochs, separation = record["participation"]
    return f"k = {epochs}, b = {separation}"


def _conditions(record: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """A private guarantee's conditions: assumptions, gradients, rounds, parts of the user's own."""
    assumed = ""
    if record.get("gradient_gap") is not None:
        # Figures sweep the gap; that it is assumed is what they must say.
        smooth = "smoothness and " if record.get("smoothness") is not None else ""
        assumed = f", ASSUMED {smooth}{record.get('norm', 'l2')} gap between gradients"
    nodes = record.get("nodes")
    view = f" of {', '.join(map(str, nodes))}" if nodes else ""
    view += " (gradients: view)" if record.get("gradients") == "view" else ""
    pattern = participation(record)
    rounds = "" if pattern == "all rounds" else f", {pattern}"
    curve = record.get("curve")
    rounds += f", may stop at {len(curve['marks'])} marks" if curve else ""
    rounds += ", NOISE LOST in some rounds" if record.get("lost_noise") else ""
    rounds += ", stopping round not covered" if record.get("private_stop") else ""
    custom = ", ".join(f"`{name}`" for name in record.get("custom") or ())
    return assumed, view, rounds, f", relies on your own {custom}" if custom else ""


def _caption(kind: tuple[Any, ...], records: list[Mapping[str, Any]]) -> str:
    delta, unit, relation, attacker, accountant, release, unsound, *conditions = kind
    assumed, view, pattern, custom = conditions
    epsilons = {_number(record["epsilon"]) for record in records}
    for record in records:
        epsilons |= {_number(value) for value in record.get("per_agent_epsilon") or ()}
    rounds = {int(record["rounds"]) for record in records}
    gaps = {_number(record["gradient_gap"]) for record in records} if assumed else set()
    assumed += f" of {_several(gaps, _up)}" if gaps else ""
    rule = f"{accountant} accountant"
    if accountant in ("rdp", "paper"):
        # The exact loss follows from mu; the stated epsilon alone would hide it.
        rule += f", mu = {_several({_number(record['mu']) for record in records}, _up)}"
    return (
        f"(epsilon = {_several(epsilons, _up)}, delta = {delta_text(delta, 4)})-DP per {unit} "
        f"({relation}{assumed})"
        f"{' ' + _FALSE if unsound else ''}, {attacker}{view}, T = {_several(rounds, str)}"
        f"{pattern}, {rule}, {'release' if release else 'simulation'}{custom}"
    )


def _number(value: Any) -> float:
    return math.inf if value == "inf" else float(value)


def _several(values: Iterable[Any], show: Any) -> str:
    """Up to three values, or a range."""
    ordered = sorted(values)
    shown = list(dict.fromkeys(show(value) for value in ordered))
    if len(shown) > 3:
        return f"{shown[0]} to {shown[-1]}"
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def _up(value: float) -> str:
    """Four digits: a caption is short."""
    return up(value, 4)
