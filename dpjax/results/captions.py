"""Captions: what guarantee a figure's rows have, in a few words."""

import collections
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

from dpjax.accounting.guarantee import Guarantee

__all__ = ()


@runtime_checkable
class _Captioned(Protocol):
    def caption(self) -> str: ...


StatedEntry: TypeAlias = str | _Captioned | Mapping[str, Any]
"""A text, a guarantee, or its dict."""
Stated: TypeAlias = StatedEntry | Iterable[StatedEntry | float | None] | None
"""A text, a guarantee (anything with ``caption()``), its dict, or several of these."""

_VARYING = re.compile(
    r"(?<=epsilon = )[^, ]+|(?<= to )\S+(?= by agent)|(?<=exact epsilon )[^\]]+|(?<= gap )[^), ]+"
    r"|(?<=, T = )\d+"
)
"""Numbers of a caption that guarantees of one kind may differ in."""

_OWN = ", relies on your own "
"""What stands before the names of custom parts, at the end of a caption."""


def guarantees(entries: Stated) -> list[str]:
    """One caption for each kind of guarantee among those given.

    Captions that differ in epsilon, an assumed gap and rounds alone stand together, as a list
    or a range; those with other participations (k, b) apart. Those that rely on custom parts stand
    together, with the names of all. Printed epsilons are rounded up. The non-private runs' is left
    out beside private ones.

    Args:
        entries: A text, a guarantee (anything with ``caption()``), its dict, or several of these.

    Returns:
        The captions, in the order of the first ones.

    Raises:
        ValueError: For anything else.
    """
    kinds = collections.defaultdict(list)
    custom = collections.defaultdict(list)
    # Rows of a run share one dict.
    for guarantee in {id(entry): entry for entry in stated_guarantees(entries)}.values():
        stated = guarantee
        if isinstance(stated, Mapping):
            stated = Guarantee.from_dict(stated)
        if not isinstance(stated, str):
            if not hasattr(stated, "caption"):
                raise ValueError(
                    f"guarantee is {guarantee!r}; give a text, a Guarantee or its dict"
                )
            text, mark, names = str(stated.caption()).partition(_OWN)
            # Captions of one kind differ in numbers alone, and have one line together.
            kind = _VARYING.sub("\0", text) + mark
            kinds[kind].append(_VARYING.findall(text))
            custom[kind].extend(names.split(", "))
        else:
            kinds[stated].append([])
    # A baseline has no guarantee that a reader of private ones needs.
    private = [kind for kind in kinds if not kind.startswith("not private")]
    captions = []
    for kind in private or kinds:
        values = map(_several, zip(*kinds[kind], strict=True))
        caption = re.sub("\0", lambda _, values=values: next(values), kind)  # type: ignore[misc]
        captions.append(caption + ", ".join(dict.fromkeys(custom[kind])))
    return captions


def stated_guarantees(records: Stated) -> list[StatedEntry]:
    """What `guarantees` takes, as a list without the rows that have none.

    Args:
        records: A text, a guarantee, its dict, or several; None is none.

    Returns:
        The list.
    """
    if records is None:
        return []
    if isinstance(records, str | Mapping | _Captioned):
        return [records]
    # A column of records has nan where a row has none.
    return [record for record in records if not isinstance(record, float | None)]


def participation(record: object) -> str | None:
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


def _several(values: tuple[str, ...]) -> str:
    """Up to three values, or a range."""
    texts = sorted(set(values), key=float)
    if len(texts) > 3:
        return f"{texts[0]} to {texts[-1]}"
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
