"""Data sets through tensorflow-datasets, from a small one that is built here."""

from pathlib import Path

import numpy as np
import pytest

from dpjax.contrib import texts
from dpjax.data import cache, canonical, catalog, load

try:
    import tensorflow_datasets as tfds
except ImportError as reason:
    pytest.skip(f"tensorflow-datasets: {reason}", allow_module_level=True)

X = np.random.default_rng(0).integers(0, 256, (9, 4, 4, 1)).astype(np.uint8)
Y = np.arange(9) % 3
SENTENCES = ["a fine film", "dull , long", "naïve", "so-so"]


class TinyImages(tfds.core.GeneratorBasedBuilder):
    """Six images for training and three for testing; tensors, which need no TensorFlow."""

    # Of no package: the library would look for files of data beside it.
    __module__ = "builders_of_tests"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "image": tfds.features.Tensor(shape=(4, 4, 1), dtype=np.uint8),
            "label": tfds.features.ClassLabel(num_classes=3),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, manager):
        return {"train": self._generate_examples(0, 6), "test": self._generate_examples(6, 9)}

    def _generate_examples(self, begin, end):
        for row in range(begin, end):
            yield row, {"image": X[row], "label": int(Y[row])}


class TinyTexts(tfds.core.GeneratorBasedBuilder):
    """Three sentences for training and one for validation."""

    # Of no package: the library would look for files of data beside it.
    __module__ = "builders_of_tests"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "sentence": tfds.features.Text(),
            "label": tfds.features.ClassLabel(num_classes=2),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, manager):
        return {"train": self._generate_examples(0, 3), "validation": self._generate_examples(3, 4)}

    def _generate_examples(self, begin, end):
        for row in range(begin, end):
            yield row, {"sentence": SENTENCES[row] + " ", "label": row % 2}


def known(monkeypatch, **changes):
    fields = dict(
        sha256=(canonical.record_digest(X[:6], Y[:6]), canonical.record_digest(X[6:], Y[6:])),
        in_any_order=(canonical.unordered(X[:6], Y[:6]), canonical.unordered(X[6:], Y[6:])),
        library="tiny_images",
    )
    monkeypatch.setitem(catalog.SETS, "tiny", catalog.Known("made up", **(fields | changes)))


def records(x, y):
    return sorted((int(label), image.tobytes()) for image, label in zip(x, y, strict=True))


def test_missing_set_is_made_by_its_builder_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(monkeypatch)
    data = load.load("tiny", cache=tmp_path)
    assert data.x_test is not None and data.y_test is not None
    assert records(data.x_train, data.y_train) == records(X[:6], Y[:6])
    assert records(data.x_test, data.y_test) == records(X[6:], Y[6:])
    assert data.x_train.dtype == np.uint8 and data.y_train.dtype == np.int32
    # Its own order, which is known by what it holds.
    assert not np.array_equal(data.x_train, X[:6])
    kept = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert kept == {"tiny.npz"}
    monkeypatch.setattr(load, "built", None)
    again = load.load("tiny", cache=tmp_path, download=False)
    assert again.sha256 == data.sha256


def test_other_records_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = canonical.unordered(X[:6], 2 - Y[:6])
    known(monkeypatch, in_any_order=(other, None))
    with pytest.raises(ValueError, match="other train records than the published ones"):
        load.load("tiny", cache=tmp_path)


def test_what_cannot_be_built_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, library="no_such_data_set")
    with pytest.raises(ValueError, match="tiny.npz does not exist, and .*; put tiny.npz from"):
        load.load("tiny", cache=tmp_path)
    with pytest.raises(ValueError, match="allow the download, or put tiny.npz"):
        load.load("tiny", cache=tmp_path, download=False)
    assert not (tmp_path / "tiny.npz").exists()
    with pytest.raises(OSError, match="KeyError"):
        load.built("tiny_images", tmp_path, ("images",), ("train",))


class Letters:
    """A tokenizer: the codes of letters."""

    def encode(self, value, length, seconds=None):
        rows = [[ord(letter) for letter in text[:length].ljust(length)] for text in value]
        return np.array(rows, np.int32)


def test_texts_are_made_by_builder_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "_BUILDER", "tiny_texts")
    monkeypatch.setattr(cache, "reach", lambda *_: None)
    data = texts.read_task("sst2", Letters(), 12, folder=tmp_path / "sst2")
    spelt = sorted("".join(map(chr, row)).strip() for row in data.x_train)
    assert spelt == sorted(SENTENCES[:3])
    assert data.y_test is not None and data.y_test.tolist() == [1]
    monkeypatch.setattr(load, "built", None)
    again = texts.read_task("sst2", Letters(), 12, folder=tmp_path / "sst2")
    assert again.sha256 == data.sha256
