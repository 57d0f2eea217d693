"""Splitting records in two."""

import numpy as np
import pandas
import pytest

from dpjax.data import load, split


def test_both_parts_are_whole() -> None:
    x = np.arange(20.0).reshape(10, 2)
    y = np.arange(10)
    (x1, y1), (x2, y2) = split.split(x, y, 0.3, 0)
    assert len(y1) == 7 and len(y2) == 3
    assert sorted([*y1, *y2]) == list(range(10))
    assert np.array_equal(x1, x[y1]) and np.array_equal(x2, x[y2])
    again = split.split(x, y, 0.3, 0)
    assert np.array_equal(again[1][1], y2)
    assert not np.array_equal(split.split(x, y, 0.3, 1)[1][1], y2)


@pytest.mark.parametrize(
    ("rows", "labels", "fraction", "message"),
    [
        (10, 9, 0.3, "x has 10 rows and y 9"),
        (10, 10, 0.0, "fraction is 0.0"),
        (10, 10, 1.0, "fraction is 1.0"),
        (2, 2, 0.1, "both parts need one"),
    ],
)
def test_bad_arguments_are_refused(rows: int, labels: int, fraction: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split.split(np.zeros((rows, 1)), np.zeros(labels), fraction, 0)


def test_test_records_are_kept_or_split_off() -> None:
    x = np.arange(20.0).reshape(10, 2)
    y = np.arange(10)
    complete = load.Dataset("some", x, y, x[:3], y[:3], "made up", "")
    (_, y_train), (_, y_test) = split.with_test(complete, 0.3, seed=1)
    assert np.array_equal(y_train, y) and np.array_equal(y_test, y[:3])
    parts = split.with_test(complete._replace(x_test=None, y_test=None), 0.3, seed=1)
    expected = split.split(x, y, 0.3, 1)
    assert all(np.array_equal(a[1], b[1]) for a, b in zip(parts, expected, strict=True))


def test_lists_and_data_frames_are_split_by_position() -> None:
    x = [[1.0], [2.0], [3.0], [4.0]]
    y = [1, 2, 3, 4]
    expected = split.split(np.array(x), np.array(y), 0.5, 0)
    rows = pandas.DataFrame(x, index=list("dcba"))
    for case in ((x, y), (rows, pandas.Series(y, index=rows.index))):
        for part, reference in zip(split.split(*case, 0.5, 0), expected, strict=True):
            assert all(map(np.array_equal, part, reference))
    with pytest.raises(ValueError, match="x has shape .*; give one entry a record"):
        split.split(None, y, 0.5, 0)
    with pytest.raises(ValueError, match="y has another index than x"):
        split.split(rows, pandas.Series(y), 0.5, 0)
