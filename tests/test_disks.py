"""Read-only and full disks: a ValueError with name and remedy, and nothing lost or half-written."""

import errno
import hashlib
import os

import numpy as np
import pytest

from dpjax.contrib import texts, tokenizer, weights
from dpjax.data import cache, canonical, load
from dpjax.mechanism import design
from dpjax.mechanism.factorization import minimize_trace
from dpjax.results import plots, records
from dpjax.topology import graphs, mixing

W = mixing.metropolis_hastings(graphs.ring(4))
MADE = design.Design.independent(W, 0.3)
ROWS = [{"loss": 1.0}]
DATA = {"x": np.ones((4, 2)), "y": np.arange(4)}


class Letters:
    encode = None


def figure(path):
    import matplotlib.pyplot as plt

    drawn, _ = plt.subplots()
    try:
        plots.save(drawn, path)
    finally:
        plt.close(drawn)


WRITERS = {
    "design.npz": lambda path: MADE.save(path),
    "solution.npz": lambda path: minimize_trace(np.eye(2)).save(path),
    "run.jsonl": lambda path: records.write(path, ROWS, {}),
    "data.npz": lambda path: canonical.write_archive(path, DATA),
    "figure.svg": figure,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_disk_that_cannot_be_written(tmp_path, monkeypatch, name, code):
    path = tmp_path / name
    if name != "run.jsonl":  # records are never overwritten
        WRITERS[name](path)
    before = {item.name: item.read_bytes() for item in tmp_path.iterdir()}

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ValueError, match=rf"path is .*{name}.*{os.strerror(code)}.*; make room"):
        WRITERS[name](path)
    assert {value.name: value.read_bytes() for value in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", WRITERS)
def test_folder_that_is_file(tmp_path, name):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ValueError, match=r"path is .*(cannot be written|exists)"):
        WRITERS[name](tmp_path / "file" / name)


def read_network(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPJAX_DATA", folder)
        return cache.fetch_facebook_ego()


READERS = {
    "graph": graphs.parse,
    "edge list": graphs.from_edgelist,
    "records": records.read,
    "data": canonical.read_archive,
    "archive": lambda name: canonical.read_archive(f"{name}.npz"),
    "cache": lambda name: load.load("a9a", cache=name, download=False),
    "name": load.load,
    "download": lambda name: load.load("housing", cache=name),
    "network": read_network,
    "design": design.Design.load,
    "task": lambda name: texts.read_task("sst2", Letters, 4, folder=name, download=False),
    "made task": lambda name: texts.read_task("sst2", Letters, 4, folder=name),
    "tokenizer": tokenizer.load,
    "weights": weights.read_tensors,
}


@pytest.mark.parametrize("name", READERS)
def test_name_that_no_file_can_have(name, tmp_path, monkeypatch):
    """300 characters: systems take 255 bytes at most."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"n{300}.*; "):
        READERS[name]("n" * 300)


@pytest.mark.parametrize("name", WRITERS)
def test_longest_name_can_be_written_and_no_longer_one(name, tmp_path):
    long = tmp_path / f"{'n' * (255 - len(name))}{name}"
    WRITERS[name](long)
    assert long.stat().st_size
    with pytest.raises(ValueError, match="path is .*cannot be written .File name too long"):
        WRITERS[name](tmp_path / f"{'n' * 300}{name}")


def test_download_onto_full_disk(tmp_path, monkeypatch):
    """It is not blamed on the network."""

    class Reply:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def read(self):
            return b"abc"

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "_EGO_SHA256", hashlib.sha256(b"abc").hexdigest())
    monkeypatch.setattr(cache.urllib.request, "urlopen", lambda *_, **__: Reply())
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="No space left"):
        read_network(str(tmp_path))
