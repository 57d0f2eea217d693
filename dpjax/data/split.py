"""Splitting records in two, and scaling both parts."""

from typing import Any, TypeAlias

import numpy as np

from dpjax import _validate
from dpjax.data.canonical import Dataset
from dpjax.data.partition import generator

__all__ = ["split", "standardise", "with_test"]

Records: TypeAlias = tuple[Any, Any]
"""Examples and labels, one a row."""


def split(x: np.ndarray, y: np.ndarray, fraction: float, seed: int) -> tuple[Records, Records]:
    """Split records at random.

    Args:
        x: [N, ...] examples.
        y: [N] labels.
        fraction: Share of the second part, strictly between 0 and 1.
        seed: Of the permutation.

    Returns:
        ``((x1, y1), (x2, y2))``, the second with ``round(fraction N)`` records, at least one each.

    Raises:
        ValueError: If x and y are no arrays of records, their lengths or the indices of data frames
            differ, or a part would be empty.

    Example:
        >>> import numpy as np
        >>> from dpjax.data import split
        >>> train, test = split.split(np.eye(8), np.arange(8), 0.25, seed=0)
        >>> len(train[1]), len(test[1])
        (6, 2)
    """
    fraction = _validate.probability("fraction", fraction)
    _validate.check_rows("", x, y)
    # Rows of lists and data frames are not taken by numbers.
    x = np.asarray(_validate.unmasked("x", x))
    y = np.asarray(_validate.unmasked("y", y))
    if not x.ndim or not y.ndim:
        raise ValueError(f"x has shape {x.shape} and y {y.shape}; give one entry a record each")
    if len(x) != len(y):
        raise ValueError(f"x has {len(x)} rows and y {len(y)}; give one label a row")
    tests = round(fraction * len(x))
    if not 0 < tests < len(x):
        raise ValueError(
            f"fraction is {fraction} of {_validate.counted(len(x), 'record')}; both parts need one"
        )
    rng = generator(seed)
    order = rng.permutation(len(x))
    # The order of records within a part stays the file's.
    train = np.sort(order[tests:])
    test = np.sort(order[:tests])
    first = (x[train], y[train])
    second = (x[test], y[test])
    return first, second


def with_test(data: Dataset, fraction: float, seed: int) -> tuple[Records, Records]:
    """Return a data set's training and test records, splitting off the latter where it has none.

    Args:
        data: The records.
        fraction: Share of the test records where they are split off.
        seed: Of that split.

    Returns:
        ``((x, y), (x_test, y_test))``.

    Raises:
        ValueError: As `split`.

    Example:
        >>> from dpjax.data import load, split
        >>> train, test = split.with_test(load.load("digits"), 0.2, seed=0)
        >>> len(train[1]), len(test[1])
        (1438, 359)
    """
    x = np.asarray(data.x_train)
    y = np.asarray(data.y_train)
    if data.x_test is None:
        return split(x, y, fraction, seed)
    return (x, y), (data.x_test, data.y_test)


def standardise(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centre and scale features by the mean and standard deviation of the train records.

    Args:
        train: [N, d] train examples.
        test: [M, d] test examples.

    Returns:
        Both, float64; a feature that is constant in ``train`` is centred only.

    Raises:
        ValueError: For other columns in ``test``, NaN, infinity, or values whose squares overflow.

    Example:
        >>> import numpy as np
        >>> from dpjax.data import split
        >>> train, test = split.standardise(np.array([[1.0], [3.0]]), np.array([[2.0]]))
        >>> train.ravel().tolist(), test.ravel().tolist()
        ([-1.0, 1.0], [0.0])
    """
    train = _validate.finite_array("train", train, ndim=2)
    test = _validate.finite_array("test", test, ndim=2)
    if train.shape[1] != test.shape[1]:
        raise ValueError(f"test has {test.shape[1]} columns, train {train.shape[1]}")
    # Squares of larger numbers are infinite.
    largest = max(np.abs(train).max(), np.abs(test).max())
    if largest > 1e150:
        raise ValueError(f"train or test reaches {largest:.3g}; scale or drop that feature")
    mean = train.mean(0)
    deviation = train.std(0)
    # Of a constant feature rounding leaves a deviation that is not quite zero.
    deviation[deviation <= 1e-12 * np.maximum(1.0, np.abs(mean))] = 1.0
    return (train - mean) / deviation, (test - mean) / deviation
