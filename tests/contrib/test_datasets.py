"""Data sets of experiments: found by name, and learned as their labels say."""

import numpy as np
import pytest

from dpjax.contrib import datasets
from dpjax.data import cache


def _write(folder, monkeypatch, labels):
    """A file of one's own in a cache of its own: bytes of pictures, and labels."""
    monkeypatch.setattr(cache, "folder", lambda: folder)
    labels = np.resize(labels, 40)
    pictures = np.zeros((40, 2, 3), np.uint8)
    pictures[:, 1] = 255
    np.savez(folder / "own.npz", x=pictures, y=labels)


def test_unknown_name_is_answered_by_what_there_is(tmp_path, monkeypatch):
    _write(tmp_path, monkeypatch, [0, 1])
    datasets.check("own")
    datasets.check("own", images=True)
    datasets.check("housing")
    with pytest.raises(ValueError, match=r"^dataset is 'odd'; choose from a9a, .* housing, own, "):
        datasets.check("odd")
    with pytest.raises(ValueError, match=r"^pictures is 'a9a'; choose from digits, .*100, own, "):
        datasets.check("a9a", "pictures", images=True)


def test_classes_ask_for_perceptron_on_numbers(tmp_path, monkeypatch):
    _write(tmp_path, monkeypatch, [0, 1, 2])
    task = datasets.flat("own", hidden=4, records=9)
    x, y = task.train
    assert x.shape == (9, 6) and x.dtype == np.float32 and len(y) == 9 and len(task.test[1]) == 8
    np.testing.assert_array_equal(x[0], [-1, -1, -1, 1, 1, 1])
    assert task.loss == "cross_entropy"
    assert task.model.hidden == (4,) and task.model.outputs == 3
    assert datasets.flat("own").model.hidden == ()


def test_labels_of_two_signs_ask_for_linear_model(tmp_path, monkeypatch):
    _write(tmp_path, monkeypatch, [-1, 1])
    task = datasets.flat("own")
    assert task.loss == "logistic" and type(task.model).__name__ == "Linear"
    with pytest.raises(ValueError, match="hidden is 4 for own, of two classes; give 0"):
        datasets.flat("own", hidden=4)
