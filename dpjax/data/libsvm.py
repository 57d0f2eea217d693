"""LIBSVM's text format: a label, then ``index:value`` pairs, a line for each record."""

import os
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
        ValueError: For a file that is not in the format, has indices that repeat or do not rise, or
            an index above ``features``; for a file without records, or too large when dense.
    """
    from sklearn import datasets

    path = Path(path)
    with _files.reading(path, "give a whole LIBSVM file"), _files.binary(path) as lines:
        sparse, targets = datasets.load_svmlight_file(lines, zero_based=False)
    records, largest = sparse.shape
    if not records:
        raise ValueError(f"path is {str(path)!r}, which holds no record; give a LIBSVM file")
    width = features or largest
    if largest > width:
        raise ValueError(
            f"features is {features}, but {path} has the index {largest}; give features={largest} "
            "or more, or correct the file"
        )
    if width * records > _LARGEST:
        raise ValueError(
            f"path is {str(path)!r}: {records} records of {width} features are "
            f"{width * records * 4 / 2**30:.0f} GiB as a dense array; keep fewer"
        )
    if sparse.nnz:
        sparse.data = _validate.single(f"a value of {path}", sparse.data)
    sparse.resize(records, width)
    return sparse.toarray().astype(np.float32), labels(
        _validate.finite_array(f"a label of {path}", targets)
    )


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
