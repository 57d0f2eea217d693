"""Texts with labels as tokens: SST-2, and other tasks of GLUE from files that a user has.

A task is a folder of tab-separated files, as GLUE distributes them, plain or compressed (``.gz``):
``train.tsv``, and ``dev.tsv`` for testing, since the labels of ``test.tsv`` are not public.
"""

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Int

from dpjax import _files, _validate
from dpjax.contrib import tokenizer as tokens
from dpjax.data import cache, canonical, load
from dpjax.data.load import Dataset

__all__ = ["TASKS", "read_task"]


class Columns(NamedTuple):
    """Which columns of a task's files are read.

    Attributes:
        texts: One, or two that are read together.
        label: Text or number; classes are numbered in the order of their sorted names.
        dev: Name of the file for testing.
    """

    texts: tuple[str, ...]
    label: str
    dev: str = "dev"


TASKS = {
    "sst2": Columns(("sentence",), "label"),
    "qnli": Columns(("question", "sentence"), "label"),
    "qqp": Columns(("question1", "question2"), "is_duplicate"),
    "mnli": Columns(("sentence1", "sentence2"), "gold_label", "dev_matched"),
    "rte": Columns(("sentence1", "sentence2"), "label"),
    "mrpc": Columns(("#1 String", "#2 String"), "Quality"),
}
"""Tasks of GLUE with classes and named columns."""

_BUILDER = "glue/sst2"
_HOST = "https://dl.fbaipublicfiles.com"


class _Encoder(Protocol):
    """What `dpjax.contrib.tokenizer.Tokenizer` does."""

    def encode(
        self, texts: Sequence[str], length: int, seconds: Sequence[str] | None = None
    ) -> Int[np.ndarray, "n t"]: ...


def read_task(
    task: str,
    tokenizer: _Encoder,
    length: int,
    *,
    folder: str | os.PathLike[str] | None = None,
    download: bool = True,
) -> Dataset:
    """Return a task's records as tokens, cut or filled up to one length, and classes.

    Args:
        task: One of `TASKS`.
        tokenizer: From `dpjax.contrib.tokenizer.load`.
        length: Tokens a record, special ones included.
        folder: Of the task's files; None is the folder of the task's name in the cache
            (`dpjax.data.cache.folder`).
        download: Whether SST-2 may be fetched, through tensorflow-datasets, when its files are not
            there.

    Returns:
        int32 tokens [N, length] and int32 classes; those of the dev file as test records.

    Raises:
        ValueError: For another task, files that are missing, or lines that are no records.
    """
    columns = TASKS[_validate.one_of("task", task, TASKS)]
    length = _validate.integer("length", length)
    _validate.flag("download", download)
    if not hasattr(tokenizer, "encode"):
        raise ValueError(f"tokenizer is {_validate.shown(tokenizer)}; give one of tokenizer.load")
    if not isinstance(folder, str | os.PathLike | None):
        raise ValueError(f"folder is {_validate.shown(folder)}; give a path, or None")
    place = cache.folder() / task if folder is None else Path(folder).expanduser()
    if _file(place, "train") is None and task == "sst2" and download:
        _obtain(place)
    parts = [_records(place, name, columns) for name in ("train", columns.dev)]
    classes = sorted({label for _, labels in parts for label in labels}, key=_order)
    source = f"GLUE, {task}, from {place}"
    arrays: canonical.DatasetArrays = {}
    for part, (texts, labels) in zip(("train", "test"), parts, strict=True):
        arrays[f"x_{part}"] = tokenizer.encode(texts[0], length, *texts[1:])
        arrays[f"y_{part}"] = np.array([classes.index(label) for label in labels], np.int32)
    train = (arrays["x_train"], arrays["y_train"])
    test = (arrays["x_test"], arrays["y_test"])
    return Dataset(
        task, *train, *test, source, canonical.combined_digest(canonical.part_digests(arrays))
    )


def _order(label: str) -> tuple[float, str]:
    """Numbers by size, before names."""
    try:
        return float(label), label
    except ValueError:
        return float("inf"), label


def _file(folder: Path, name: str) -> Path | None:
    for path in (folder / f"{name}.tsv", folder / f"{name}.tsv.gz"):
        if os.path.isfile(path):
            return path
    return None


def _records(folder: Path, name: str, columns: Columns) -> tuple[list[list[str]], list[str]]:
    """Texts by column, and labels, of a file."""
    path = _file(folder, name)
    if path is None:
        raise ValueError(
            f"{folder} holds no {name}.tsv; put the task's files there, as GLUE distributes them, "
            "plain or as .tsv.gz"
        )
    names = [*columns.texts, columns.label]
    fields: list[list[str]] = [[] for _ in names]
    with _files.reading(path, "give a whole file"), tokens.opened(path, newline="") as file:
        lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        header = next(lines, [])
        missing = [column for column in names if column not in header]
        if missing:
            raise ValueError(
                f"{path} names no column {missing[0]!r} in its first line; give the file of "
                f"this task, with {', '.join(names)}"
            )
        places = [header.index(column) for column in names]
        for number, line in enumerate(lines, start=2):
            if len(line) != len(header) or not line[places[-1]].strip():
                raise ValueError(
                    f"{path}, line {number}, has {len(line)} of {len(header)} columns or no "
                    "label; give a whole file with labels"
                )
            for column, place in zip(fields, places, strict=True):
                column.append(line[place].strip())
    if not fields[0]:
        raise ValueError(f"{path} holds no record; give a whole file")
    return fields[:-1], fields[-1]


def _obtain(folder: Path) -> None:
    """Make the files of SST-2 through tensorflow-datasets."""
    with cache.locked(folder / "train.tsv"):
        if _file(folder, "train") is not None:  # Another process was faster.
            return
        names = {"dev": "validation", "train": "train"}
        fields = ("sentence", "label")
        try:
            cache.reach(_HOST, folder / "train.tsv")
            parts = load.built(_BUILDER, folder / "tfds", fields, tuple(names.values()))
        except OSError as error:
            raise ValueError(
                f"{folder} holds no train.tsv, and tensorflow-datasets cannot make it ({error}); "
                "put the task's files there, as GLUE distributes them"
            ) from None
        for name, (texts, labels) in zip(names, parts, strict=True):
            lines = ["sentence\tlabel"]
            for text, label in zip(texts.tolist(), labels.tolist(), strict=True):
                lines.append(f"{bytes(text).decode('utf8').strip()}\t{int(label)}")
            # The training file last: with it the folder counts as whole.
            _files.replace(folder / f"{name}.tsv", ("\n".join(lines) + "\n").encode())
