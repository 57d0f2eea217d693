"""Data sets that libraries bring: scikit-learn's small ones, and tensorflow-datasets' builders."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpjax.data.split import standardise

__all__: list[str] = []


def bundled(name: str) -> dict[str, np.ndarray]:
    """Return a data set of scikit-learn, split and standardised.

    A fifth of each class is for testing, chosen by a fixed seed: the split is the same for
    everybody. Features are centred and scaled by mean and standard deviation of the train records
    alone. These statistics are not private; a real deployment states them or spends budget.

    Args:
        name: "breast_cancer" (30 features, labels -1 malignant and +1 benign) or "digits"
            (64 features, labels 0 to 9).

    Returns:
        ``x_train``, ``y_train``, ``x_test``, ``y_test``; float32 and int32.
    """
    from sklearn import datasets

    x, y = {"breast_cancer": datasets.load_breast_cancer, "digits": datasets.load_digits}[name](
        return_X_y=True
    )
    if name == "breast_cancer":
        y = 2 * y - 1
    rng = np.random.default_rng(0)
    test = np.zeros(len(y), bool)
    for label in np.unique(y):
        rows = np.flatnonzero(y == label)
        test[rng.choice(rows, round(0.2 * len(rows)), replace=False)] = True
    x_train, x_test = standardise(x[~test], x[test])
    return {
        "x_train": x_train.astype(np.float32),
        "y_train": y[~test].astype(np.int32),
        "x_test": x_test.astype(np.float32),
        "y_test": y[test].astype(np.int32),
    }


def built(
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
