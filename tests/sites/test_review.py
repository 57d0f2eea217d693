"""What a hostile and patient reader tried on a site: promises that were broken, or might be."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from tests.sites.test_compute import DESIGNS, plan_of, problem_of, site_of

from dpjax.algorithms.dsgd import DSGD
from dpjax.sites import store
from dpjax.sites.compute import SiteRounds
from dpjax.sites.noise import SiteNoise
from dpjax.sites.store import Audit, Folder


def test_rounds_begun_again_draw_from_the_new_secret() -> None:
    site = site_of(plan_of(DESIGNS["own"]), 0)
    first = site.outgoing(site.init()).message
    site.begin([SiteNoise(bytes([77] * 32), run=bytes([5] * 32), holder="site 0")])
    second = site.outgoing(site.init()).message
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    assert all((np.asarray(one) != np.asarray(other)).all() for one, other in pairs)


def test_models_of_a_method_of_ones_own_are_not_sent_without_noise() -> None:
    """Its last models may hold more than messages show."""

    class Mine(DSGD):
        pass

    plan = plan_of(DESIGNS["own"], method=Mine())
    assert not SiteRounds(plan, problem_of(0), 0, [1]).averages
    assert SiteRounds(plan_of(DESIGNS["own"]), problem_of(0), 0, [1]).averages


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
