"""NAME.npz: the one form in which data sets are kept, and its checks.

A file holds ``x_train`` [N, ...] and ``y_train`` [N], and ``x_test`` and ``y_test`` where there
are test records; ``x`` and ``y`` stand for train records that nobody has split. Reading checks
shapes and values, and the records' digest where it is known. A note beside the file
(``.NAME.npz.checked``) remembers its size, time of change and digests, so that the next load need
not compute them.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dpjax import _files, _validate
from dpjax.data import cache, libsvm

__all__: list[str] = []

Arrays = dict[str, np.ndarray]

_PARTS = ("train", "test")


def digest(x: np.ndarray, y: np.ndarray) -> str:
    """Return the sha256 of records: x, then y, in C order, each in its smallest exact type.

    Args:
        x: [N, ...] examples.
        y: [N] labels.

    Returns:
        Hexadecimal sha256 of the bytes of x and y, as uint8 or int8 where that loses nothing.
    """
    state = hashlib.sha256()
    for array in (x, y):
        state.update(np.ascontiguousarray(_small(array)).data)
    return state.hexdigest()


def unordered(x: np.ndarray, y: np.ndarray) -> str:
    """Return the sha256 of records in whatever order: of their sorted sha256s.

    Args:
        x: [N, ...] examples.
        y: [N] labels.

    Returns:
        Hexadecimal sha256; records are hashed as `digest` does.
    """
    x, y = (np.ascontiguousarray(_small(array)) for array in (x, y))
    each = [hashlib.sha256(a.tobytes() + b.tobytes()).digest() for a, b in zip(x, y, strict=True)]
    return hashlib.sha256(b"".join(sorted(each))).hexdigest()


def _small(array: np.ndarray) -> np.ndarray:
    for kind in (np.uint8, np.int8):
        limits = np.iinfo(kind)
        if array.dtype == kind:
            return array
        if array.size and limits.min <= array.min() and array.max() <= limits.max:
            small = array.astype(kind)
            if np.array_equal(small, array):
                return small
    return array.astype(array.dtype.newbyteorder("<"))


def check(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Return the four arrays of a data set, if they are fit to learn from.

    Args:
        path: Where they come from, for messages.
        arrays: ``x_train``, ``y_train`` and, if any, ``x_test``, ``y_test``; or ``x`` and ``y``.

    Returns:
        The arrays by name, labels as int32 where they are whole numbers. Images stay uint8.

    Raises:
        ValueError: For a missing array, lengths that differ, text, NaN or infinity.
    """
    names = {"x": "x_train", "y": "y_train"}
    if "x_train" in arrays:
        names = {}
    held = {names.get(name, name): array for name, array in arrays.items()}
    for name in ("x_train", "y_train", *(("y_test",) if "x_test" in held else ())):
        if name not in held:
            raise ValueError(
                f"{path} lacks {name} (it holds {', '.join(arrays) or 'nothing'}); save x_train "
                "and y_train, and x_test and y_test if there are test records"
            )
    checked = {}
    for part in _PARTS:
        if f"x_{part}" not in held:
            continue
        x, y = (_fit(path, name, held[name]) for name in (f"x_{part}", f"y_{part}"))
        if y.ndim != 1 or x.ndim < 2 or len(x) != len(y) or not len(x):
            raise ValueError(
                f"{path} holds x_{part} of shape {x.shape} and y_{part} of shape {y.shape}; give "
                "one row and one label for each record"
            )
        checked[f"x_{part}"], checked[f"y_{part}"] = x, libsvm.labels(y)
    if "x_test" in checked and checked["x_test"].shape[1:] != checked["x_train"].shape[1:]:
        raise ValueError(
            f"{path} holds train records of shape {checked['x_train'].shape[1:]} and test records "
            f"of shape {checked['x_test'].shape[1:]}; make them alike"
        )
    return checked


def _fit(path: str | os.PathLike[str], name: str, given: np.ndarray) -> np.ndarray:
    array = np.asarray(_validate.unmasked(f"{name} of {path}", given))
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{path} holds {name} of type {array.dtype}; give numbers")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        row = int(np.argwhere(~np.isfinite(array))[0][0])
        raise ValueError(
            f"{path} holds NaN or infinity in {name}, record {row}; remove or fill such records"
        )
    return array


def read(
    path: str | os.PathLike[str],
    expected: tuple[str | None, str | None] = (None, None),
    remedy: str = "make the file again",
    *,
    in_any_order: tuple[str | None, str | None] = (None, None),
    again: bool = False,
) -> tuple[Arrays, str]:
    """Read a file in the canonical form, checked.

    Args:
        path: The npz file.
        expected: Known digests of train and test records; None is not compared.
        remedy: What to do about a file that is damaged or another's.
        in_any_order: Known digests of the same records in whatever order, which do as well.
        again: Compute the digests even where the note beside the file has them.

    Returns:
        The arrays by name and the sha256 of all records: of the train records where there are no
        others, else of the two digests' text.

    Raises:
        FileNotFoundError: When there is no such file.
        ValueError: For a file that is truncated, has missing or unfit arrays, or other records.
    """
    path = Path(path)
    with _files.reading(path, remedy):
        arrays = check(path, _files.archive(path))
    digests = None if again else _remembered(path)
    if digests is None:
        digests = _digests(arrays)
    wanted = zip(_PARTS, expected, in_any_order, [*digests, None], strict=False)
    for part, want, shuffled, have in wanted:
        if want is not None and want != have and not _same(arrays, part, shuffled):
            raise ValueError(
                f"{path} holds other {part} records than the published ones (sha256 "
                f"{have[:12] if have else 'none'}, not {want[:12]}); {remedy}"
            )
    _remember(path, digests)
    return arrays, _joined(digests)


def known(path: Path, expected: tuple[str | None, str | None]) -> bool:
    """Whether the note beside a file says that it has been read and holds these records.

    Args:
        path: The npz file.
        expected: Known digests of train and test records; None is not compared.
    """
    digests = _remembered(path)
    if digests is None:
        return False
    pairs = zip(expected, [*digests, None], strict=False)
    return all(want in (None, have) for want, have in pairs)


def write(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> Path:
    """Write a data set in the canonical form, complete or not at all.

    Args:
        path: The npz file; one that is there is replaced.
        arrays: As for `check`.

    Returns:
        The path.
    """
    path = Path(path)
    held = check(path, arrays)
    with cache.beside(path) as temporary:
        np.savez_compressed(temporary, **held)  # type: ignore[arg-type]
    return path


def combined(arrays: Mapping[str, np.ndarray]) -> str:
    """Return the sha256 of all records, as `read` does."""
    return _joined(_digests(arrays))


def _digests(arrays: Mapping[str, np.ndarray]) -> list[str]:
    return [digest(arrays[f"x_{p}"], arrays[f"y_{p}"]) for p in _PARTS if f"x_{p}" in arrays]


def _same(arrays: Mapping[str, np.ndarray], part: str, want: str | None) -> bool:
    """Whether a part's records are the known ones in another order."""
    if want is None or f"x_{part}" not in arrays:
        return False
    return unordered(arrays[f"x_{part}"], arrays[f"y_{part}"]) == want


def _joined(digests: list[str]) -> str:
    return (
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    )


def _note(path: Path) -> Path:
    return path.with_name(f".{path.name}.checked")


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _remembered(path: Path) -> list[str] | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        note = json.loads(_note(path).read_text())
        if note["stamp"] == _stamp(path):
            return [str(entry) for entry in note["sha256"]]
    return None


def _remember(path: Path, digests: list[str]) -> None:
    # A cache that cannot be written to is checked again each time.
    with contextlib.suppress(ValueError), cache.beside(_note(path)) as temporary:
        temporary.write_text(json.dumps({"stamp": _stamp(path), "sha256": digests}))
