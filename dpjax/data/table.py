"""Tables of numbers with a label column: comma- or tab-separated text."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from dpjax import _validate
from dpjax.data import libsvm

__all__: list[str] = []

LABELS = ("label", "target", "class", "y")
"""Column names that are taken for the label when none is named."""


def read(
    path: str | os.PathLike[str], label: str | int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Read a table.

    A first line in which no cell is a number is taken for the columns' names.

    Args:
        path: A ``.csv`` file (commas) or ``.tsv`` file (tabs).
        label: The label's column: its name, or its number from 0 (-1 is the last); None looks for
            one of `LABELS`.

    Returns:
        x [N, d] float32 and y [N]: int32 for whole numbers and for text, which is numbered in
        alphabetical order, else float32.

    Raises:
        ValueError: For a table without records, without that column, or with a cell that is
            empty or no number outside the label column.
    """
    import pandas

    path = Path(path)
    separator = "\t" if path.suffix == ".tsv" else ","
    try:
        first = pandas.read_csv(path, sep=separator, header=None, nrows=1, dtype=str)
        named = not any(_is_number(cell) for cell in first.iloc[0])
        frame = pandas.read_csv(
            path, sep=separator, header=0 if named else None, skipinitialspace=True
        )
    except (UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} is unreadable ({str(error).strip()}); give a table") from None
    frame.columns = [str(name).strip() for name in frame.columns]
    where = _column(path, list(frame.columns), label, named)
    if frame.empty or frame.shape[1] < 2:
        raise ValueError(f"{path} has the shape {frame.shape}; give records, features and a label")
    target = frame.iloc[:, where]
    rest = frame.drop(columns=frame.columns[where])
    for name in rest.columns:
        numbers = pandas.to_numeric(rest[name], errors="coerce")
        if numbers.isna().any():
            row = int(np.argmax(numbers.isna()))
            raise ValueError(
                f"{path} holds {rest[name].iloc[row]!r} in column {name!r}, record {row + 1}; "
                "give a number in every cell"
            )
        rest[name] = numbers
    if target.isna().any():
        raise ValueError(
            f"{path} lacks the label of record {int(np.argmax(target.isna())) + 1}; give one"
        )
    if not pandas.api.types.is_numeric_dtype(target):
        _, numbered = np.unique(target.to_numpy().astype(str), return_inverse=True)
        return _features(path, rest), numbered.astype(np.int32)
    return _features(path, rest), libsvm.labels(target.to_numpy())


def _features(path: Path, rest: Any) -> np.ndarray:
    values = rest.to_numpy(np.float64)
    _validate.check_range(f"a column of {path}", values[np.isfinite(values)])
    return values.astype(np.float32)


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True


def _column(path: Path, columns: list[str], label: str | int | None, named: bool) -> int:
    if label is None:
        places = [i for i, name in enumerate(columns) if name.lower() in LABELS]
        if len(places) != 1:
            raise ValueError(
                f"label is None, and {len(places)} columns of {path} are called "
                f"{', '.join(LABELS)}; name the label's column, by number if need be"
            )
        return places[0]
    if isinstance(label, str) and named:
        if label not in columns:
            raise ValueError(
                f"label is {label!r}, no column of {path}; choose one of {', '.join(columns)}"
            )
        return columns.index(label)
    try:
        number = int(label)
    except ValueError:
        raise ValueError(
            f"label is {label!r}, but {path} names no columns; give a number, -1 for the last"
        ) from None
    if not -len(columns) <= number < len(columns):
        raise ValueError(f"label is {number}, but {path} has {len(columns)} columns")
    return number % len(columns)
