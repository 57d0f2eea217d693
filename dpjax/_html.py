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
    head = "".join(f"<th>{escape(str(name))}</th>" for name in (rows[0] if rows else ()))
    lines = ["".join(f"<td>{escape(str(value))}</td>" for value in row.values()) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
