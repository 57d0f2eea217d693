"""Means with standard errors, and tables as text; ``dpjax.contrib.summaries`` has summaries."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from dpjax import _validate
from dpjax.results import captions
from dpjax.results.records import Cell, Columns

if TYPE_CHECKING:
    import pandas

__all__ = ["text"]


def means(frame: "pandas.DataFrame", names: list[str], value: str) -> "pandas.DataFrame":
    """Mean and standard error of a column in groups, over rows of one participation (k, b).

    The standard error is s / sqrt(count), s with count - 1 in the denominator: nan for one row.

    Args:
        frame: Tidy rows.
        names: Columns that make the groups, which come in the order of their first rows.
        value: Column of numbers.
    """
    import pandas

    comparable(frame, names)
    number_column(frame, value)
    rows = []
    for key, group in frame.groupby(names, sort=False, dropna=False):
        _refuse_participations(group, dict(zip(names, key, strict=True)))
        rows.append((*key, *moments(group[value])))
    return pandas.DataFrame(rows, columns=[*names, "mean", "standard error", "count"])


def text(rows: "pandas.DataFrame | Iterable[Columns]", columns: Sequence[str] | None = None) -> str:
    """Rows as aligned text with four significant digits.

    Args:
        rows: A frame or rows. Columns with dicts in them are left out.
        columns: Which columns, in which order; by default all, as given.

    Returns:
        Lines without a final newline.

    Example:
        >>> from dpjax.results import tables
        >>> print(tables.text([{"n": 10, "loss": 0.123456}, {"n": 1000, "loss": 0.05}]))
           n     loss
        ----  -------
          10   0.1235
        1000  0.05000
    """
    if hasattr(rows, "to_dict"):
        # A frame is a sequence of its columns' names.
        names = list(rows)
        rows = rows.to_dict("records")
    else:
        rows = list(map(dict, rows))
        # Rows may lack columns: the order is that of the first ones to have each.
        names = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns or ():
        if name not in names:
            present = ", ".join(map(str, names))
            raise ValueError(f"columns has {name!r}, which is not in the rows; they have {present}")
    table = []
    for name in names if columns is None else columns:
        values = [row.get(name) for row in rows]
        if not any(isinstance(value, Mapping) for value in values):
            table.append(_column(str(name), values))
    if not table:
        return "\n"
    return "\n".join("  ".join(line).rstrip() for line in zip(*table, strict=True))


def number_column(frame: "pandas.DataFrame", name: str) -> np.ndarray:
    """A column of numbers, nan where a cell is empty.

    Args:
        frame: Tidy rows.
        name: The column.

    Raises:
        ValueError: For a column that is not there, or a cell that is neither empty nor a number.
    """
    comparable(frame, [name])
    # NumPy would make numbers of texts such as "1".
    for cell in frame[name]:
        if cell is not None and not _is_number(cell):
            raise ValueError(
                f"column {name!r} holds {_validate.shown(cell)}, which is no number; name a column "
                "of numbers, or choose the rows that have one"
            )
    return frame[name].to_numpy(np.float64)


def comparable(frame: "pandas.DataFrame", names: Sequence[str]) -> None:
    """Refuse columns that tell no rows apart.

    Args:
        frame: Tidy rows.
        names: The columns.

    Raises:
        ValueError: For a column that is not there, or that holds lists.
    """
    for name in names:
        if name not in frame.columns:
            raise ValueError(
                f"column {name!r} is not in the rows; they have {', '.join(map(str, frame))}"
            )
        for cell in frame[name]:
            if isinstance(cell, list | dict):
                raise ValueError(
                    f"column {name!r} holds {_validate.shown(cell)}, which tells no rows apart; "
                    "give a text or a number in its place, or name another column"
                )


def _refuse_participations(group: "pandas.DataFrame", keys: Columns) -> None:
    """Refuse a mean over guarantees of different (k, b), which none of them would describe."""
    if "guarantee" not in group.columns:
        return
    participations = group["guarantee"].map(captions.participation)
    several = sorted(participations.dropna().unique())
    if len(several) > 1:
        # Measurements are floats, and tell all rows apart.
        settings = group.select_dtypes(exclude=[np.floating])
        differing = []
        for name in settings.columns.difference([*keys, "seed", "guarantee"], sort=False):
            # Rows of one value of such a column have one participation.
            if participations.groupby(group[name].map(str)).nunique().max() == 1:
                differing.append(name)
        column = "give rows a column"
        if differing:
            value = group[differing[0]].iloc[0]
            column = f"one value of {', '.join(differing)} (where {differing[0]}={value}, say)"
        raise ValueError(
            f"frame has rows with {pairs(keys)} whose guarantees are for {'; '.join(several)}; "
            f"choose some of the files first, or {column} that tells them apart"
        )


def pairs(keys: Columns) -> str:
    """Return columns and cells as text, "epsilon = 1.0, design = whisper".

    Args:
        keys: Cells by column.
    """
    return ", ".join(f"{name} = {value}" for name, value in keys.items())


def moments(values: ArrayLike) -> tuple[float, float, int]:
    """Mean, its standard error, and how many."""
    array = np.asarray(values, dtype=np.float64)
    count = array.size
    mean = math.nan
    error = math.nan
    if count and np.isfinite(array).all():
        mean = float(array.mean())
        if count > 1:
            error = float(array.std(ddof=1) / math.sqrt(count))
    elif count and (array == array[0]).all():
        # The mean of what diverged alike is inf, without a standard error; of others it is nan.
        mean = float(array[0])
    return mean, error, count


def measured(values: ArrayLike) -> str:
    """Mean +- standard error."""
    # One seed has no standard error, and claims none.
    mean, error, _ = moments(values)
    return f"{mean:.4g}" + ("" if np.isnan(error) else f" +- {error:.2g}")


def _column(name: str, values: Sequence[Any]) -> list[str]:
    """Header, rule and cells of one width; numbers go to the right."""
    floats = [float(v) for v in values if isinstance(v, float | np.floating)]
    # Settings (0.05, 10) are shown as they are, measurements with four digits each.
    short = all(f"{v:.4g}" == f"{v:.15g}" for v in floats)
    filled = [value for value in values if value is not None]
    right = bool(filled) and all(map(_is_number, filled))
    cells = [name, *(_cell(value, short) for value in values)]
    width = max(map(len, cells))
    cells.insert(1, "-" * width)
    return [cell.rjust(width) if right else cell.ljust(width) for cell in cells]


def _is_number(value: Cell) -> bool:
    # Python counts True among its integers, NumPy does not.
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _cell(value: Cell, short: bool) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, float | np.floating):
        value = float(value)
        # An exponent reads worse than a whole number, up to a billion.
        if math.isfinite(value) and 1e4 <= abs(value) < 1e9:
            if not short:
                return f"{float(f'{value:.4g}'):,.0f}"
            return f"{value:.15g}"
        if short:
            return f"{value:.4g}"
        return f"{value:#.4g}".rstrip(".")
    return " ".join(str(value).split())
