"""A user's tables."""

from pathlib import Path

import numpy as np
import pytest

from dpjax.data import load

TABLE = "age,label,income\n30,yes,1.5\n40,no,-2\n50,yes,0\n"


def write(folder: Path, text: str, name: str = "mine.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_named_label_and_text_labels(tmp_path: Path) -> None:
    data = load.from_file(write(tmp_path, TABLE))
    np.testing.assert_array_equal(data.x_train, np.array([[30, 1.5], [40, -2], [50, 0]]))
    assert data.y_train.tolist() == [1, 0, 1] and data.y_train.dtype == np.int32
    assert data.x_train.dtype == np.float32
    named = load.from_file(write(tmp_path, TABLE.replace("yes", "1").replace("no", "2")), label=0)
    assert named.y_train.tolist() == [30, 40, 50] and named.x_train[:, 0].tolist() == [1, 2, 1]


def test_a_table_without_names_and_one_with_tabs(tmp_path: Path) -> None:
    data = load.from_file(write(tmp_path, "1,2,-1\n3,4,1\n"), label=-1)
    assert data.x_train.tolist() == [[1, 2], [3, 4]] and data.y_train.tolist() == [-1, 1]
    tabs = write(tmp_path, TABLE.replace(",", "\t"), "mine.tsv")
    assert load.from_file(tabs, label="label").x_train.shape == (3, 2)
    fractions = load.from_file(write(tmp_path, "1,0.5\n3,4\n"), label=1)
    assert fractions.y_train.dtype == np.float32


@pytest.mark.parametrize(
    ("text", "label", "message"),
    [
        (TABLE, "nope", "label is 'nope', no column of .*; choose one of age, label, income"),
        (TABLE, 3, "has 3 columns"),
        (TABLE.replace("label", "answer"), None, "name the label's column"),
        ("1,2\n3,4\n", "answer", "no column of .*; choose one of 0, 1"),
        ("1,2\n3,4\n", None, "name the label's column"),
        (TABLE.replace("40", "old"), None, "holds 'old' in column 'age', record 2"),
        (TABLE.replace("40", ""), None, "column 'age', record 2"),
        (TABLE.replace("no", ""), None, "lacks the label of record 2"),
        (TABLE.replace("-2", "inf"), None, "NaN or infinity in x_train, record 1"),
        ("age,label\n", None, "give records"),
        ("", None, "unreadable"),
        ('"', None, "unreadable"),
    ],
)
def test_a_bad_table_is_named(
    tmp_path: Path, text: str, label: str | int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load.from_file(write(tmp_path, text), label=label)
