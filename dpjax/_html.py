"""Plain HTML of tables, for notebooks and reports."""

import html
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ()

escape = html.escape


def html_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows of the same columns as a table; texts are escaped.

    Args:
        rows: Column -> value.
    """
    rows = list(rows)
    heads = [escape(str(name)) for name in (rows[0] if rows else ())]
    # A name may break after an underscore.
    head = "".join(f"<th>{name}</th>".replace("_", "_<wbr>") for name in heads)
    body = ""
    for row in rows:
        cells = ""
        for name, value in row.items():
            # Narrow pages show the name before each value.
            cells += f"<td data-name='{escape(str(name))}'>{escape(str(value))}</td>"
        body += f"<tr>{cells}</tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
