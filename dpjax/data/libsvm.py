"""LIBSVM's text format: a label, then ``index:value`` pairs, a line for each record."""

import math
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from jaxtyping import Float

from dpjax import _files, _validate

__all__: list[str] = []

_LARGEST = 2**31  # entries of a dense array, 8 GiB


def read(
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
        ValueError: Naming the first line that is not in the format, repeats an index, or has an
            index above ``features``; for a file without records, or too large when dense.
    """
    path = Path(path)
    with _files.reading(path, "give a whole LIBSVM file"), _files.text(path) as lines:
        targets, counts, columns, values = _parse(path, lines)
    if not targets:
        raise ValueError(f"path is {str(path)!r}, which holds no record; give a LIBSVM file")
    seen = max(columns, default=0)
    width = features or seen
    rows = np.repeat(np.arange(len(targets)), counts)
    if seen > width:
        row = int(rows[int(np.argmax(np.asarray(columns) > width))])
        raise ValueError(
            f"features is {features}, but record {row + 1} of {path} has the index {seen}; give "
            f"features={seen} or more, or correct the file"
        )
    if width * len(targets) > _LARGEST:
        raise ValueError(
            f"path is {str(path)!r}: {len(targets)} records of {width} features are "
            f"{width * len(targets) * 4 / 2**30:.0f} GiB as a dense array; keep fewer"
        )
    x = np.zeros((len(targets), width), np.float32)
    if values:
        x[rows, np.asarray(columns, np.int64) - 1] = _validate.single(f"a value of {path}", values)
    return x, labels(np.asarray(targets))


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


def _parse(
    path: Path, lines: Iterable[str]
) -> tuple[list[float], list[int], list[int], list[float]]:
    targets: list[float] = []
    counts: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            target = float(words[0])
            pairs = [word.split(":") for word in words[1:] if not word.startswith("qid:")]
            indices = [int(index) for index, _ in pairs]
            entries = [float(value) for _, value in pairs]
        except ValueError:
            raise ValueError(_bad(path, number, line, "write `label index:value ...`")) from None
        if indices and min(indices) < 1:
            raise ValueError(_bad(path, number, line, "indices start at 1"))
        if len(set(indices)) != len(indices):
            raise ValueError(_bad(path, number, line, "give an index once"))
        if not (math.isfinite(target) and all(map(math.isfinite, entries))):
            raise ValueError(_bad(path, number, line, "remove NaN and infinity"))
        targets.append(target)
        counts.append(len(indices))
        columns += indices
        values += entries
    return targets, counts, columns, values


def _bad(path: Path, number: int, line: str, remedy: str) -> str:
    return f"line {number} of {path} is {line.strip()[:60]!r}; {remedy}"
