"""LIBSVM's text format."""

import bz2
import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest

from dpjax import _validate
from dpjax.data import files

TEXT = "-1 1:0.5 3:2 # first\n\n+1 qid:4 2:-1e-3\n1\n"
X = np.array([[0.5, 0, 2], [0, -1e-3, 0], [0, 0, 0]], np.float32)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text(TEXT)
    x, y = files.libsvm(path)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, [-1, 1, 1])
    assert x.dtype == np.float32 and y.dtype == np.int32
    wide, _ = files.libsvm(path, 5)
    assert wide.shape == (3, 5) and not wide[:, 3:].any()


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip), ("bz2", bz2), ("xz", lzma)])
def test_packed_files_are_unpacked(tmp_path: Path, ending: str, pack: object) -> None:
    path = tmp_path / f"data.{ending}"
    packed = pack.compress(TEXT.encode())  # type: ignore[attr-defined]
    path.write_bytes(packed)
    np.testing.assert_array_equal(files.libsvm(path)[0], X)
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match="cannot be read .*; give a whole LIBSVM file"):
        files.libsvm(path)
    path.write_bytes(b"no archive at all")
    with pytest.raises(ValueError, match="cannot be read .*; give a whole LIBSVM file"):
        files.libsvm(path)


def test_labels_that_are_no_whole_numbers_stay_fractions(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("0.5 1:1\n2 1:1\n")
    y = files.libsvm(path)[1]
    assert y.dtype == np.float32 and y.tolist() == [0.5, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 1:1\n1 2\n", "cannot be read"),
        ("1 1:1\nyes 1:1\n", "cannot be read .*yes"),
        ("1 0:1\n", "Invalid index 0"),
        ("1 1:1 1:2\n", "sorted and unique"),
        ("1 2:1 1:2\n", "sorted and unique"),
        ("1 1:nan\n", "a value of .* holds nan"),
        ("inf 1:1\n", "a label of .* holds inf"),
        ("1 1.5:2\n", "cannot be read .*1.5"),
        ("", "holds no record"),
        ("# only words\n", "holds no record"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "data"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        files.libsvm(path)


def test_an_index_above_the_features_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("1 1:1\n1 4:1\n")
    with pytest.raises(ValueError, match="features is 3, but .* has the index 4; give that"):
        files.libsvm(path, 3)


def test_a_dense_array_too_large_for_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_validate, "memory_limit", lambda: 2**34)
    path = tmp_path / "data"
    path.write_text("1 2000000000:1\n" * 9)
    with pytest.raises(ValueError, match="a dense array takes 67.1 GiB"):
        files.libsvm(path)


def test_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match="cannot be read .*; give a whole LIBSVM file"):
        files.libsvm(path)
    with pytest.raises(FileNotFoundError):
        files.libsvm(tmp_path / "none")
