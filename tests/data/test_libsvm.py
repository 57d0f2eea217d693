"""LIBSVM's text format."""

from pathlib import Path

import numpy as np
import pytest

from dpjax.data import load

TEXT = "-1 1:0.5 3:2 # first\n\n+1 qid:4 2:-1e-3\n1\n"
X = np.array([[0.5, 0, 2], [0, -1e-3, 0], [0, 0, 0]], np.float32)


def test_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text(TEXT)
    x, y = load.libsvm(path, None)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, [-1, 1, 1])
    assert x.dtype == np.float32 and y.dtype == np.int32
    wide, _ = load.libsvm(path, 5)
    assert wide.shape == (3, 5) and not wide[:, 3:].any()


def test_labels_that_are_no_whole_numbers_stay_fractions(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("0.5 1:1\n2 1:1\n")
    y = load.libsvm(path, None)[1]
    assert y.dtype == np.float32 and y.tolist() == [0.5, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 1:1\n1 2\n", "cannot be read"),
        ("1 1:1\nyes 1:1\n", "cannot be read .*yes"),
        ("1 0:1\n", "Invalid index 0"),
        ("1 1:1 1:2\n", "sorted and unique"),
        ("1 2:1 1:2\n", "sorted and unique"),
        ("inf 1:1\n", "labels reach inf"),
        ("1 1.5:2\n", "cannot be read .*1.5"),
    ],
)
def test_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "data"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load.libsvm(path, None)


def test_index_above_features_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("1 1:1\n1 4:1\n")
    with pytest.raises(ValueError, match="n_features was set to 3, but input file contains 4"):
        load.libsvm(path, 3)


def test_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match="cannot be read .*; give a whole LIBSVM file"):
        load.libsvm(path, None)
    with pytest.raises(FileNotFoundError):
        load.libsvm(tmp_path / "none", None)
