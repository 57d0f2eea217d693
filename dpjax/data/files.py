"""Records from text files: LIBSVM's format, and tables with a label column."""

import bz2
import gzip
import lzma
import os
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from dpjax import _files, _validate

__all__: list[str] = []

_OPEN: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_LABELS = ("label", "target", "class", "y")
"""Column names that are taken for the label when none is named."""


def libsvm(
    path: str | os.PathLike[str], features: int | None = None
) -> tuple[Float[np.ndarray, "N d"], np.ndarray]:
    """Read a LIBSVM file into dense arrays.

    Args:
        path: The file; ``.gz``, ``.bz2`` and ``.xz`` are unpacked on the way.
        features: Number of features d; None is the largest index in the file.

    Returns:
        x [N, d] float32 and y [N], int32 where all labels are whole numbers, else float32.

    Raises:
        FileNotFoundError: When there is no such file.
        ValueError: For a file that is not in the format, has indices that repeat or do not rise, or
            an index above ``features``; for a file without records, or too large when dense.
    """
    from sklearn import datasets

    path = Path(path)
    opened = _OPEN.get(path.suffix, open)
    with _files.reading(path, "give a whole LIBSVM file"), opened(path, "rb") as lines:
        sparse, targets = datasets.load_svmlight_file(lines, zero_based=False)
    records, largest = sparse.shape
    if not records:
        raise ValueError(f"path is {str(path)!r}, which holds no record; give a LIBSVM file")
    width = features or largest
    if largest > width:
        raise ValueError(f"features is {features}, but {path} has the index {largest}; give that")
    _validate.memory("path", str(path), "a dense array", records, width, item=4)
    if sparse.nnz:
        sparse.data = _validate.single(f"a value of {path}", sparse.data)
    sparse.resize(records, width)
    return sparse.toarray().astype(np.float32), labels(
        _validate.finite_array(f"a label of {path}", targets)
    )


def table(
    path: str | os.PathLike[str], label: str | int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Read a table.

    A first line in which no cell is a number is taken for the columns' names.

    Args:
        path: A ``.csv`` file (commas) or ``.tsv`` file (tabs).
        label: The label's column: its name, or its number from 0 (-1 is the last); None looks for
            one called label, target, class or y.

    Returns:
        x [N, d] float32 and y [N]: int32 for whole numbers and for text, which is numbered in
        alphabetical order, else float32.

    Raises:
        ValueError: For a table without records, without that column, or with a cell that is
            empty or no number outside the label column.
    """
    import pandas

    path = Path(path)
    options: Any = {"sep": "\t" if path.suffix == ".tsv" else ",", "skipinitialspace": True}
    try:
        first = pandas.read_csv(path, header=None, nrows=1, dtype=str, **options).iloc[0]
        named = pandas.to_numeric(first, errors="coerce").isna().all()
        frame = pandas.read_csv(path, header=0 if named else None, **options)
    except ValueError as error:
        raise ValueError(f"{path} is unreadable ({str(error).strip()}); give a table") from None
    frame.columns = [str(name).strip() for name in frame.columns]
    column = _column(path, list(frame.columns), label)
    if frame.empty or frame.shape[1] < 2:
        raise ValueError(f"{path} has the shape {frame.shape}; give records, features and a label")
    target, rest = frame.iloc[:, column], frame.drop(columns=frame.columns[column])
    x = rest.apply(pandas.to_numeric, errors="coerce").to_numpy(np.float64)
    if np.isnan(x).any():
        row, place = np.argwhere(np.isnan(x))[0]
        raise ValueError(
            f"{path} holds {rest.iloc[row, place]!r} in column {rest.columns[place]!r}, record "
            f"{row + 1}; give a number in every cell"
        )
    if target.isna().any():
        row = int(np.argmax(target.isna()))
        raise ValueError(f"{path} lacks the label of record {row + 1}; give one")
    _validate.check_range(f"a column of {path}", x[np.isfinite(x)])
    y = target.to_numpy()
    if not pandas.api.types.is_numeric_dtype(target):
        y = np.unique(y.astype(str), return_inverse=True)[1]
    return x.astype(np.float32), labels(y)


def _column(path: Path, columns: list[str], label: str | int | None) -> int:
    """The number of the label's column."""
    if label is None:
        places = [i for i, name in enumerate(columns) if name.lower() in _LABELS]
        if len(places) != 1:
            raise ValueError(
                f"label is None, and {len(places)} columns of {path} are called "
                f"{', '.join(_LABELS)}; name the label's column, by number if need be"
            )
        return places[0]
    if isinstance(label, str):
        if label not in columns:
            raise ValueError(
                f"label is {label!r}, no column of {path}; choose one of {', '.join(columns)}"
            )
        return columns.index(label)
    if not -len(columns) <= label < len(columns):
        raise ValueError(f"label is {label}, but {path} has {len(columns)} columns")
    return label % len(columns)


def labels(values: np.ndarray) -> np.ndarray:
    """Return labels as int32 where all are whole numbers, else as float32.

    Raises:
        ValueError: For labels that neither type holds.
    """
    values = np.asarray(values)
    whole = np.issubdtype(values.dtype, np.integer) or bool(np.all(values == np.round(values)))
    limits = np.iinfo(np.int32)
    if not values.size:
        return values.astype(np.float32)
    largest = max(values.max(), -values.min(), key=abs)
    if whole and not limits.min <= values.min() <= values.max() <= limits.max:
        raise ValueError(
            f"labels reach {largest:.10g}, beyond the {limits.max} of int32; number classes from "
            "0, or scale targets"
        )
    return values.astype(np.int32) if whole else _validate.single("a label", values)
