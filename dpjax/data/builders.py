"""Data sets by tensorflow-datasets' builders, read without TensorFlow where they allow it.

Builders that write images need TensorFlow for that once. Records come in the builder's own order,
which is shuffled.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__: list[str] = []


def read(
    name: str, folder: str | os.PathLike[str], fields: Sequence[str], parts: Sequence[str]
) -> list[list[np.ndarray]]:
    """Return fields of a data set's records, downloaded and prepared if need be.

    Args:
        name: As tensorflow-datasets calls it: "mnist", "glue/sst2".
        folder: Where it keeps what it prepares.
        fields: Names of features, the same in every record.
        parts: Names of splits.

    Returns:
        For each part an array for each field, records first; texts are bytes.

    Raises:
        OSError: Where it cannot be had: no network, no TensorFlow for what needs it, no such data
            set, or one without these parts or fields. The message says which.
    """
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise OSError(f"tensorflow-datasets is not installed ({error})") from None
    try:
        tensorflow_datasets.disable_progress_bar()
        builder = tensorflow_datasets.builder(
            name, data_dir=os.fspath(folder), file_format="array_record"
        )
        builder.download_and_prepare()
        return [_columns(builder.as_data_source(part), fields) for part in parts]
    except Exception as error:  # whatever the builder, its network and its formats come up with
        lines = str(error).strip().splitlines() or [""]
        raise OSError(f"{type(error).__name__}: {lines[-1][:200]}") from error


def _columns(source: Any, fields: Sequence[str]) -> list[np.ndarray]:
    records = [source[index] for index in range(len(source))]
    return [np.stack([np.asarray(record[field]) for record in records]) for field in fields]
