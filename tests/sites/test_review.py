"""What a hostile and patient reader tried on a site: promises that were broken, or might be."""

import os
from pathlib import Path

import pytest

from dpjax.sites import store
from dpjax.sites.store import Audit, Folder


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path / "site")
    audit = Audit(folder)
    audit.note("begun")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ValueError, match="No space left"):
            audit.note("stored")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, data, write=os.write: write(handle, data[:9]))
        with pytest.raises(ValueError, match="does not fit"):
            audit.note("stored")
    audit.note("absorbed")
    assert Audit.check(tmp_path / "site" / "audit.jsonl") == 2
    folder.close()


def test_folders_of_messages_last_before_anything_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure must not take the folder of a message that is out."""
    synchronised = []

    def synchronise(folder: Path) -> None:
        synchronised.append((folder, sorted(path.name for path in folder.iterdir())))

    monkeypatch.setattr(store, "_synchronise", synchronise)
    folder = Folder(tmp_path / "site")
    assert (tmp_path / "site", ["lock", "received", "sent"]) in synchronised
    assert any(place == tmp_path and "site" in names for place, names in synchronised)
    # A secret is gone for good.
    folder.create("secret", b"numbers")
    synchronised.clear()
    folder.delete("secret")
    assert synchronised == [(tmp_path / "site", ["lock", "received", "sent"])]
    folder.close()
