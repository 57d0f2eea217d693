"""Plain HTML of tables, for notebooks and reports."""

import html
from collections.abc import Iterable, Mapping
from typing import Any

__all__: list[str] = []

escape = html.escape


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows of the same columns as a table; texts are escaped.

    Args:
        rows: Column -> value.
    """
    rows = list(rows)
    # A name may break after an underscore, and narrow pages show it before each value.
    heads = [escape(str(name)).replace("_", "_<wbr>") for name in (rows[0] if rows else ())]
    head = "".join(f"<th>{name}</th>" for name in heads)
    texts = [[(escape(str(name)), escape(str(row[name]))) for name in row] for row in rows]
    lines = ["".join(f"<td data-name='{name}'>{one}</td>" for name, one in row) for row in texts]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
