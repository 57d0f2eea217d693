"""NAME.npz: the one form in which data sets are kept, and its checks.

A file holds ``x_train`` [N, ...] and ``y_train`` [N], and ``x_test`` and ``y_test`` where there
are test records; ``x`` and ``y`` stand for train records that nobody has split. ``owner`` [N], if
it is there, names the agent of each train record. Reading checks shapes and values, and the
records' digest where it is known.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpjax import _files, _validate
from dpjax.data.catalog import Digests

__all__ = ()

DatasetArrays = dict[str, np.ndarray]

_PARTS = ("train", "test")


class Dataset(NamedTuple):
    """Records of a data set.

    Attributes:
        name: Its name.
        x_train: [N, ...] examples.
        y_train: [N] labels, int32 where they are whole numbers.
        x_test: [M, ...] test examples; None where there are none.
        y_test: [M] their labels; None where there are none.
        source: Where it comes from.
        sha256: Of the records, see `canonical.read_archive`.
        owner: [N] names or numbers of the train records' agents; None where there are none.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray | None
    y_test: np.ndarray | None
    source: str
    sha256: str
    owner: np.ndarray | None = None


def record_digest(x: np.ndarray, y: np.ndarray) -> str:
    """Return the sha256 of records: x, then y, in C order, each in its smallest exact type.

    Args:
        x: [N, ...] examples.
        y: [N] labels.

    Returns:
        Hexadecimal sha256 of the bytes of x and y, as uint8 or int8 where that loses nothing.
    """
    state = hashlib.sha256()
    for array in (x, y):
        content = np.ascontiguousarray(_small(array))
        state.update(content.data)
    return state.hexdigest()


def unordered(x: np.ndarray, y: np.ndarray) -> str:
    """Return the sha256 of records in whatever order: of their sorted sha256s.

    Args:
        x: [N, ...] examples.
        y: [N] labels.

    Returns:
        Hexadecimal sha256; records are hashed as `record_digest` does.
    """
    # Sorting digests takes away the order, and keeps how often a record is there.
    examples = np.ascontiguousarray(_small(x))
    targets = np.ascontiguousarray(_small(y))
    digests = []
    for example, target in zip(examples, targets, strict=True):
        content = example.tobytes() + target.tobytes()
        digests.append(hashlib.sha256(content).digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def _small(array: np.ndarray) -> np.ndarray:
    # Pixels as bytes and as floats are the same records, and have the same digest.
    for kind in (np.uint8, np.int8):
        limits = np.iinfo(kind)
        if array.dtype == kind:
            return array
        if array.size and limits.min <= array.min() and array.max() <= limits.max:
            small = array.astype(kind)
            if np.array_equal(small, array):
                return small
    return array.astype(array.dtype.newbyteorder("<"))


def check_arrays(path: _files.PathLike, arrays: Mapping[str, np.ndarray]) -> DatasetArrays:
    """Return the arrays of a data set, if they are fit to learn from.

    Args:
        path: Where they come from, for messages.
        arrays: ``x_train``, ``y_train`` and, if any, ``x_test``, ``y_test``; or ``x`` and ``y``;
            and ``owner``, if any.

    Returns:
        The arrays by name, labels as int32 where they are whole numbers. Images stay uint8.

    Raises:
        ValueError: For a missing array, lengths that differ, text, NaN or infinity.
    """
    names_there = ", ".join(arrays) or "nothing"
    # Errors call arrays what the file does.
    suffixes = {"train": "_train"}
    if "x_train" not in arrays and "x" in arrays:
        suffixes = {"train": ""}
    # One of the two alone is an oversight.
    if {"x_test", "y_test"} & set(arrays):
        suffixes["test"] = "_test"
    checked: DatasetArrays = {}
    for part, suffix in suffixes.items():
        pair = []
        for title in (f"x{suffix}", f"y{suffix}"):
            if title not in arrays:
                raise ValueError(
                    f"{path} lacks {title} (it holds {names_there}); save x_train and y_train, and "
                    "x_test and y_test, or x and y if nobody has split the records"
                )
            pair.append(_fit(path, title, arrays[title]))
        x, y = pair
        if y.ndim != 1 or x.ndim < 2 or len(x) != len(y) or not len(x):
            raise ValueError(
                f"{path} holds x{suffix} of shape {x.shape} and y{suffix} of shape {y.shape}; "
                "give one row and one label for each record"
            )
        checked |= {f"x_{part}": x, f"y_{part}": as_labels(y)}
        shapes = checked["x_train"].shape[1:], x.shape[1:]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{path} holds train and test records of shapes {shapes}; make them alike"
            )
    if "owner" in arrays:
        owner = np.asarray(arrays["owner"])
        if owner.shape != checked["y_train"].shape:
            remedy = f"give one name or number a train record, {checked['y_train'].shape}"
            raise ValueError(f"{path} holds owner of shape {owner.shape}; {remedy}")
        if owner.dtype.kind == "f":
            # Beyond it neighbouring whole numbers are one float.
            largest = 2 ** np.finfo(owner.dtype).nmant
            inexact = (owner != np.floor(owner)) | (abs(owner) > largest)
            if inexact.any():
                position = _validate.first(inexact)
                remedy = "save names as whole numbers or texts"
                raise ValueError(f"{path} holds owner {owner[position]} at {position}; {remedy}")
        kinds = {"f": np.int64, "S": np.str_}  # Numbers that a float column held; ASCII.
        checked["owner"] = owner.astype(kinds.get(owner.dtype.kind, owner.dtype))
    return checked


def _fit(path: _files.PathLike, name: str, values: np.ndarray) -> np.ndarray:
    array = np.asarray(_validate.unmasked(f"{name} of {path}", values))
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{path} holds {name} of type {array.dtype}; give numbers")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        # The first axis is over records.
        row = _validate.first(~np.isfinite(array))[0]
        raise ValueError(f"{path} holds NaN or infinity in {name}, record {row}; remove or fill it")
    return array


def read_archive(
    path: _files.PathLike,
    expected: Digests = (None, None),
    remedy: str = "make the file again",
    *,
    in_any_order: Digests = (None, None),
) -> tuple[DatasetArrays, str]:
    """Read a file in the canonical form, checked.

    Args:
        path: The npz file.
        expected: Known digests of train and test records; None is not compared.
        remedy: What to do about a file that is damaged or another's.
        in_any_order: Known digests of the same records in whatever order, which do as well.

    Returns:
        The arrays by name and the sha256 of all records, as `combined_digest` gives it.

    Raises:
        FileNotFoundError: When there is no such file.
        ValueError: For a file that is truncated, has missing or unfit arrays, or other records.
    """
    with _files.reading(path, remedy):
        arrays = check_arrays(path, _files.archive(path))
    digests = part_digests(arrays)
    for part, want, shuffled in zip(_PARTS, expected, in_any_order, strict=True):
        if want is None or digests.get(part) == want:
            continue
        # Builders of one data set may shuffle it.
        if part not in digests or unordered(*_records(arrays, part)) != shuffled:
            raise ValueError(f"{path} holds other {part} records than the published ones; {remedy}")
    return arrays, combined_digest(digests)


def write_archive(path: _files.PathLike, arrays: Mapping[str, np.ndarray]) -> Path:
    """Write a data set in the canonical form, complete or not at all.

    Args:
        path: The npz file; one that is there is replaced.
        arrays: As for `check_arrays`.

    Returns:
        The path.
    """
    checked = check_arrays(path, arrays)
    path = Path(path)
    with _files.writing("path", path):
        _files.replace(path, lambda file: np.savez_compressed(file, **checked))  # type: ignore[arg-type]
    return path


def combined_digest(digests: Mapping[str, str]) -> str:
    """Return the sha256 of all records: of the train records where there are no others.

    Args:
        digests: Of each part, from `part_digests`.
    """
    texts = list(digests.values())
    if len(texts) == 1:
        return texts[0]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def _records(arrays: DatasetArrays, part: str) -> tuple[np.ndarray, np.ndarray]:
    return arrays[f"x_{part}"], arrays[f"y_{part}"]


def part_digests(arrays: DatasetArrays) -> dict[str, str]:
    """Return the sha256 of the train records and, if any, of the test records.

    Args:
        arrays: From `check_arrays`.
    """
    parts = [part for part in _PARTS if f"x_{part}" in arrays]
    return {part: record_digest(*_records(arrays, part)) for part in parts}


def as_labels(values: np.ndarray) -> np.ndarray:
    """Return labels as int32 where all are whole numbers, else as float32.

    Raises:
        ValueError: For labels that neither type holds.
    """
    values = np.asarray(values)
    if values.dtype == bool:
        values = values.astype(np.int8)
    # No values are labels of either kind.
    if not values.size:
        return values.astype(np.float32)
    # Labels of LIBSVM's files are floats.
    if not np.all(values == np.round(values)):
        targets = _validate.finite_array("a label", values)
        _validate.check_range("a label", targets)
        return targets.astype(np.float32)
    limits = np.iinfo(np.int32)
    if values.min() < limits.min or values.max() > limits.max:
        largest = max(values.max(), -values.min(), key=abs)
        raise ValueError(
            f"labels reach {largest:.10g}, beyond the {limits.max} of int32; number classes from "
            "0, or scale targets"
        )
    return values.astype(np.int32)
