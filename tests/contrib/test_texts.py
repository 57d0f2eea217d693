"""Tab-separated files of GLUE as tokens and classes."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from dpjax.contrib import texts, tokenizer
from dpjax.data import cache


class Letters:
    """A tokenizer: the codes of letters."""

    def encode(self, value, length, seconds=None):
        pairs = value
        if seconds is not None:
            pairs = [a + "|" + b for a, b in zip(value, seconds, strict=True)]
        rows = [[ord(letter) for letter in text[:length].ljust(length)] for text in pairs]
        return np.array(rows, np.int32)


def spelt(tokens):
    return ["".join(map(chr, row)).rstrip() for row in tokens]


def put(folder: Path, **contents: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / f"{name}.tsv").write_text(content, encoding="utf8")
    return folder


HEAD = "sentence\tlabel\n"


def test_one_text_record(tmp_path: Path) -> None:
    put(tmp_path, train=HEAD + 'a "fine film \t1\n no\t0\nso-so\t1\n', dev=HEAD + "é\t0\n")
    data = texts.read_task("sst2", Letters(), 12, folder=tmp_path)
    assert spelt(data.x_train) == ['a "fine film', "no", "so-so"]
    assert data.y_train.tolist() == [1, 0, 1] and data.y_train.dtype == np.int32
    assert data.x_test is not None and spelt(data.x_test) == ["é"]
    assert data.x_train.dtype == np.int32 and len(data.sha256) == 64


def test_pairs_other_columns_and_named_classes(tmp_path: Path) -> None:
    head = "index\tsentence1\tsentence2\tx\tgold_label\n"
    rows = "0\ta\tb\t-\tneutral\n1\tc\td\t-\tentailment\n2\te\tf\t-\tcontradiction\n"
    put(tmp_path, train=head + rows, dev_matched=head + "0\tg\th\t-\tneutral\n")
    data = texts.read_task("mnli", Letters(), 8, folder=tmp_path)
    assert spelt(data.x_train) == ["a|b", "c|d", "e|f"]
    assert data.y_train.tolist() == [2, 1, 0]
    assert data.y_test is not None and data.y_test.tolist() == [2]


def test_compressed_files_in_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    (tmp_path / "sst2").mkdir()
    for name in ("train", "dev"):
        packed = gzip.compress((HEAD + "yes\t1\nno\t0\n").encode())
        (tmp_path / "sst2" / f"{name}.tsv.gz").write_bytes(packed)
    assert spelt(texts.read_task("sst2", Letters(), 4).x_train) == ["yes", "no"]
    (tmp_path / "sst2" / "dev.tsv.gz").write_bytes(packed[:-9])
    with pytest.raises(ValueError, match="dev.tsv.gz cannot be read"):
        texts.read_task("sst2", Letters(), 4)


@pytest.mark.parametrize(
    ("train", "text"),
    [
        ("text\tlabel\na\t1\n", "names no column 'sentence'"),
        (HEAD + "a\t1\nb\n", "line 3, has 1 of 2 columns"),
        (HEAD + "a\t\n", "line 2, has 2 of 2 columns or no label"),
        (HEAD, "holds no record"),
        ("", "names no column"),
    ],
)
def test_what_is_no_task_is_refused(tmp_path: Path, train: str, text: str) -> None:
    put(tmp_path, train=train, dev=HEAD + "a\t1\n")
    with pytest.raises(ValueError, match=text):
        texts.read_task("sst2", Letters(), 4, folder=tmp_path)


def test_missing_files_and_other_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="task is 'stsb'"):
        texts.read_task("stsb", Letters(), 4, folder=tmp_path)
    with pytest.raises(ValueError, match="holds no train.tsv; put the task's files"):
        texts.read_task("sst2", Letters(), 4, folder=tmp_path, download=False)
    with pytest.raises(ValueError, match="holds no train.tsv"):
        texts.read_task("rte", Letters(), 4, folder=tmp_path)
    put(tmp_path, train=HEAD + "a\t1\n")
    with pytest.raises(ValueError, match="holds no dev.tsv"):
        texts.read_task("sst2", Letters(), 4, folder=tmp_path)


@pytest.mark.slow
def test_sentiment_treebank(data_folder: Path) -> None:
    pytest.importorskip("tokenizers")
    if not (data_folder / "sst2").is_dir() or not (data_folder / "bpe").is_dir():
        pytest.skip("sst2 and bpe are not in the data cache")
    data = texts.read_task("sst2", tokenizer.load(data_folder / "bpe"), 16)
    assert data.x_train.shape == (67349, 16) and data.y_train.mean() == pytest.approx(
        0.5578, abs=1e-3
    )
    assert data.x_test is not None and data.x_test.shape == (872, 16)
    assert (data.x_train[:, 0] == tokenizer.START).all() and data.x_train.max() < 50265


@pytest.mark.parametrize("value", [{"length": 0}, {"folder": 5}, {"tokenizer": None}])
def test_what_reads_nothing_is_refused(value: dict) -> None:
    (name,) = value
    with pytest.raises(ValueError, match=f"{name} is"):
        texts.read_task(**({"task": "sst2", "tokenizer": Letters(), "length": 4} | value))
