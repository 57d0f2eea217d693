"""Text files in LIBSVM's sparse format: `label index:value index:value ...` a line."""

import bz2
import gzip
import lzma
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

__all__ = ["read"]

_OPEN: dict[str, Callable[..., Any]] = {".bz2": bz2.open, ".gz": gzip.open, ".xz": lzma.open}


def read(
    path: str | os.PathLike[str], features: int | None = None
) -> tuple[Float[np.ndarray, "N d"], Float[np.ndarray, " N"]]:
    """Read a LIBSVM file into dense arrays.

    Indices count from 1 and rise within a line; what follows a ``#`` is ignored. Files ending in
    .bz2, .gz or .xz are unpacked.

    Args:
        path: The file.
        features: Number of features d; None takes the largest index in the file.

    Returns:
        x [N, d] float32 and y [N] float64 labels as written.

    Raises:
        FileNotFoundError: When there is no such file.
        ValueError: With file and line, for a label or feature that cannot be read or is not
            finite, an index that is not a whole number from 1 to d or does not rise, and for a
            file that is empty, truncated or not text.
    """
    path = Path(path)
    labels: list[float] = []
    counts: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    number = 0
    try:
        with _OPEN.get(path.suffix, open)(path, "rt", encoding="ascii") as file:
            for number, line in enumerate(file, start=1):
                words = line.partition("#")[0].split()
                if not words:
                    continue
                labels.append(_finite(words[0], "the label"))
                last = 0
                for word in words[1:]:
                    last = _index(word, last, features)
                    columns.append(last - 1)
                    values.append(_finite(word.partition(":")[2], "a feature's value"))
                counts.append(len(words) - 1)
    except FileNotFoundError:
        raise
    except _BadWord as error:
        raise ValueError(f"path is {str(path)!r}: line {number} {error}") from None
    except (UnicodeDecodeError, EOFError, OSError, lzma.LZMAError) as error:
        raise ValueError(
            f"path is {str(path)!r}, which cannot be read after line {number} ({error}); give a "
            "whole LIBSVM text file"
        ) from None
    if not labels:
        raise ValueError(f"path is {str(path)!r}, which holds no record; give a LIBSVM text file")
    width = features or (max(columns) + 1 if columns else 1)
    x = np.zeros((len(labels), width), np.float32)
    x[np.repeat(np.arange(len(labels)), counts), columns] = values
    return x, np.array(labels)


class _BadWord(Exception):
    """What is wrong within a line."""


def _finite(word: str, what: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise _BadWord(f"has {word!r} for {what}; give `label index:value ...`") from None
    if not math.isfinite(value):
        raise _BadWord(f"has {word!r} for {what}; remove or replace such lines")
    return value


def _index(word: str, last: int, features: int | None) -> int:
    before = word.partition(":")[0]
    if not before.isdecimal() or int(before) < 1:
        raise _BadWord(f"has {word!r}, whose index is no whole number from 1; mend the line")
    index = int(before)
    if index <= last:
        raise _BadWord(f"has {word!r} after index {last}; indices must rise within a line")
    if features is not None and index > features:
        raise _BadWord(f"has {word!r}, but features is {features}; give a larger number")
    return index
