"""The fetched network."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dpjax.data import cache
from dpjax.topology import graphs


def test_largest_component_keeps_its_order() -> None:
    text = "9 8\n1 2\n2 1\n3 1\n8 9\n2 3\n"
    assert cache._largest_component(text) == "1 2\n3 1\n2 3\n"


def test_fetching(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    raw = b"1 2\n2 1\n4 5\n2 3\n"
    monkeypatch.setattr(cache, "_EGO_SHA256", hashlib.sha256(raw).hexdigest())

    def fetch(url: str, path: Path, *, sha256: str) -> None:
        assert sha256 == hashlib.sha256(raw).hexdigest()
        path.write_bytes(raw)

    monkeypatch.setattr(cache, "fetch", fetch)
    monkeypatch.setenv("DPJAX_DATA", str(tmp_path))
    path = cache.fetch_facebook_ego()
    assert path.read_text() == "1 2\n2 3\n" and not (tmp_path / "414.edges").exists()
    monkeypatch.delattr(cache, "fetch")
    assert cache.fetch_facebook_ego() == path


def test_no_network_says_what_to_put_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache, "EGO_URL", "http://127.0.0.1:1/414.edges")
    monkeypatch.setenv("DPJAX_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="does not exist, and .*cannot be reached.*414.edges"):
        cache.fetch_facebook_ego()


def test_topology_finds_file(
    real_data: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copy(real_data("facebook_ego"), tmp_path / f"{cache.EGO}.edgelist")
    monkeypatch.setenv("DPJAX_DATA", str(tmp_path))
    assert cache.fetch_facebook_ego().parent == tmp_path
    assert graphs.facebook_ego().number_of_nodes() == 148
