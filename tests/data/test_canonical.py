"""The canonical file: what is refused."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpjax.data import canonical

RNG = np.random.default_rng(0)
GOOD: dict[str, np.ndarray] = {
    "x_train": RNG.normal(size=(6, 3)).astype(np.float32),
    "y_train": np.array([-1, 1, 1, -1, 1, 1]),
    "x_test": np.ones((2, 3), np.float32),
    "y_test": np.array([1, -1]),
}


def without(*names: str) -> dict[str, np.ndarray]:
    return {name: array for name, array in GOOD.items() if name not in names}


def test_file_is_written_and_read(tmp_path: Path) -> None:
    path = canonical.write_archive(tmp_path / "a.npz", GOOD)
    arrays, sha256 = canonical.read_archive(path)
    assert set(arrays) == set(GOOD)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, GOOD[name])
    assert arrays["y_train"].dtype == np.int32
    assert (
        sha256
        == canonical.combined_digest(canonical.part_digests(arrays))
        == canonical.read_archive(path)[1]
    )


def test_train_records_alone_do(tmp_path: Path) -> None:
    x = GOOD["x_train"]
    y = GOOD["y_train"]
    arrays, sha256 = canonical.read_archive(
        canonical.write_archive(tmp_path / "a.npz", {"x": x, "y": y})
    )
    assert set(arrays) == {"x_train", "y_train"} and sha256 == canonical.record_digest(x, y)


def test_digest_is_of_smallest_exact_type() -> None:
    x = np.array([[0.0, 1.0], [1.0, 0.0]], np.float32)
    y = np.array([-1, 1], np.int32)
    want = hashlib.sha256(bytes([0, 1, 1, 0]) + np.array([-1, 1], np.int8).tobytes()).hexdigest()
    assert canonical.record_digest(x, y) == want
    assert canonical.record_digest(x.astype(np.uint8), y.astype(np.int8)) == want
    # What does not fit into a byte is never rounded to what does.
    assert canonical.record_digest(x + np.float32(1e-3), y) != want
    assert canonical.record_digest(x + 256, y) != want


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (without("y_train"), "lacks y_train"),
        (without("x_train"), "lacks x_train"),
        ({"x": GOOD["x_train"]}, r"lacks y \(it holds x\)"),
        ({"x": GOOD["x_train"][:5], "y": GOOD["y_train"]}, r"holds x of shape \(5, 3\) and y of"),
        ({"x": GOOD["x_train"].astype(str), "y": GOOD["y_train"]}, "holds x of type"),
        (without("y_test"), "lacks y_test"),
        ({}, "lacks x_train .it holds nothing"),
        (GOOD | {"x_train": GOOD["x_train"][:5]}, r"x_train of shape \(5, 3\) and y_train"),
        (GOOD | {"x_train": np.zeros(6)}, "one row and one label"),
        (GOOD | {"x_test": np.zeros((2, 4))}, "make them alike"),
        (GOOD | {"y_train": np.array(list("abcdef"))}, "y_train of type"),
        (GOOD | {"y_train": np.array([0, 1, np.nan, 0, 0, 0])}, "NaN or infinity in y_train, .* 2"),
        (
            without("x_test", "y_test") | {"x_train": np.full((6, 1), np.inf)},
            "infinity in x_train, record 0",
        ),
        ({"x": np.zeros((0, 3)), "y": np.zeros(0)}, "one row and one label"),
    ],
)
def test_unfit_arrays_are_named_and_never_written(
    tmp_path: Path, arrays: dict[str, Any], message: str
) -> None:
    path = tmp_path / "a.npz"
    with pytest.raises(ValueError, match=message):
        canonical.write_archive(path, arrays)
    assert not list(tmp_path.iterdir())
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=message):
        canonical.read_archive(path)


@pytest.mark.parametrize("selection", [0, 10, 0.5, 0.99])
def test_truncated_file_is_named(tmp_path: Path, selection: float) -> None:
    path = canonical.write_archive(tmp_path / "a.npz", GOOD)
    content = path.read_bytes()
    path.write_bytes(content[: int(selection if selection > 1 else selection * len(content))])
    with pytest.raises(ValueError, match=r"a.npz cannot be read .*; get it anew"):
        canonical.read_archive(path, remedy="get it anew")


@pytest.mark.mutant
def test_flipped_bits_are_caught(tmp_path: Path) -> None:
    path = canonical.write_archive(tmp_path / "a.npz", GOOD)
    content = bytearray(path.read_bytes())
    content[content.index(b"x_train.npy") + 40] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read"):
        canonical.read_archive(path)


def test_no_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ValueError, match="bare array"):
        canonical.read_archive(path)
    np.savez(path, x=np.array([{}], object), y=np.zeros(1))
    with pytest.raises(ValueError, match="cannot be read"):
        canonical.read_archive(path)
    with pytest.raises(FileNotFoundError):
        canonical.read_archive(tmp_path / "none.npz")


def test_other_records_than_known_ones_are_refused(tmp_path: Path) -> None:
    path = canonical.write_archive(tmp_path / "a.npz", GOOD)
    train = canonical.record_digest(GOOD["x_train"], GOOD["y_train"])
    test = canonical.record_digest(GOOD["x_test"], GOOD["y_test"])
    canonical.read_archive(path, (train, test))
    canonical.read_archive(path, (train, None))
    with pytest.raises(ValueError, match="other test records than the published ones"):
        canonical.read_archive(path, (train, train))
    changed = GOOD | {"y_train": -GOOD["y_train"]}
    canonical.write_archive(path, changed)
    with pytest.raises(ValueError, match="other train records"):
        canonical.read_archive(path, (train, test))
    canonical.write_archive(path, without("x_test", "y_test"))
    with pytest.raises(ValueError, match="other test records"):
        canonical.read_archive(path, (train, test))


def test_images_stay_bytes(tmp_path: Path) -> None:
    x = RNG.integers(0, 255, (4, 2, 2, 3), np.uint8)
    y = np.arange(4, dtype=np.int64)
    arrays, _ = canonical.read_archive(
        canonical.write_archive(tmp_path / "a.npz", {"x_train": x, "y_train": y})
    )
    assert arrays["x_train"].dtype == np.uint8 and arrays["y_train"].dtype == np.int32
