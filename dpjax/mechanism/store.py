"""Files of designs: npz, written beside and renamed, with a digest that is checked on reading."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpjax import _files
from dpjax._files import PathLike

__all__ = ()

_FORMAT = 1


def write_arrays(
    path: PathLike,
    kind: str,
    arrays: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> Path:
    """Write ``arrays`` and ``fields`` (JSON) to ``path``; never leave half a file.

    Args:
        path: where to; ``.npz`` is appended when there is no suffix.
        kind: what the file is, checked by :func:`read_arrays`.
        arrays: numbers, texts or arrays of them by name; floating ones are kept as float64.
        fields: what JSON can hold (infinities included).

    Returns:
        The path written.

    Raises:
        ValueError: where the system refuses to write.
    """
    path = _files.npz(path)
    header = json.dumps({"format": _FORMAT, "kind": kind, "fields": dict(fields)}, sort_keys=True)
    storable = {name: _storable(array) for name, array in arrays.items()}
    # Written beside and renamed, so that a reader never meets half a file.
    with _files.writing("path", path):
        _files.replace(path, _files.packed(header, storable))
    return path


def read_arrays(path: PathLike, kind: str, names: set[str]) -> dict[str, Any]:
    """Return the arrays and fields of these names that :func:`write_arrays` stored as ``kind``.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: for a truncated, changed or foreign file, or one that lacks a name.
    """
    path = _files.npz(path)
    where = f"path is {str(path)!r}"
    remedy = f"give a file that dpjax saved as a {kind}, or make it again"
    try:
        header, arrays = _files.unpacked(path)
        content = json.loads(header)
        stored = (content["kind"], content["format"])
        fields = content["fields"]
    except FileNotFoundError:
        raise FileNotFoundError(f"{where}, which does not exist; {remedy}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}, unreadable ({error}); {remedy}") from None
    if stored != (kind, _FORMAT):
        raise ValueError(f"{where}, a {stored[0]} of format {stored[1]}; {remedy}")
    content_fields = {name: value for name, value in (arrays | fields).items() if name in names}
    if missing := sorted(names - set(content_fields)):
        raise ValueError(f"{where}, which lacks {missing[0]}; {remedy}")
    return content_fields


def _storable(value: object) -> np.ndarray:
    # One byte order and size for every kind of number, on any platform.
    array = np.asarray(value)
    return array.astype({"i": "<i8", "U": array.dtype.str}.get(array.dtype.kind, "<f8"))
