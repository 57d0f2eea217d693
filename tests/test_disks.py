"""Read-only and full disks: a ValueError with name and remedy, and nothing lost or half-written."""

import errno
import os

import numpy as np
import pytest

from dpjax.data import cache, canonical, networks
from dpjax.mechanism import design
from dpjax.mechanism.factorization import minimize_trace
from dpjax.results import records, sheets
from dpjax.topology import graphs, mixing

W = mixing.metropolis_hastings(graphs.ring(4))
MADE = design.make("independent", W, 0.3)
ROWS = [{"loss": 1.0}]
DATA = {"x": np.ones((4, 2)), "y": np.arange(4)}


def figure(path):
    import matplotlib.pyplot as plt

    drawn, _ = plt.subplots()
    try:
        sheets.save(drawn, path)
    finally:
        plt.close(drawn)


WRITERS = {
    "design.npz": lambda path: MADE.save(path),
    "solution.npz": lambda path: minimize_trace(np.eye(2)).save(path),
    "run.jsonl": lambda path: records.write(path, ROWS, {}),
    "data.npz": lambda path: canonical.write(path, DATA),
    "figure.svg": figure,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_cannot_be_written(tmp_path, monkeypatch, name, code):
    path = tmp_path / name
    if name != "run.jsonl":  # records are never overwritten
        WRITERS[name](path)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ValueError, match=rf"path is .*{name}.*{os.strerror(code)}.*; make room"):
        WRITERS[name](path)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_that_is_a_file(tmp_path, name):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ValueError, match=r"path is .*(cannot be written|exists)"):
        WRITERS[name](tmp_path / "file" / name)


def test_a_download_onto_a_full_disk(tmp_path, monkeypatch):
    """It is not blamed on the network, and what has come stays."""

    class Reply:
        status, headers = 200, {"Content-Length": "3"}

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def read(self, _):
            return b"abc"

    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def write(self, _):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache.urllib.request, "urlopen", lambda *_, **__: Reply())
    monkeypatch.setattr(cache.Path, "open", lambda *_: Full())
    with pytest.raises(ValueError, match="No space left"):
        networks.fetch(tmp_path)
