"""The bodies of `dpjax data`: list, fetch, path and check; each returns an exit status."""

import os
from pathlib import Path
from typing import Literal

import tyro

from dpjax import _validate
from dpjax.data import cache, canonical, catalog, load
from dpjax.topology import graphs

__all__ = ()

_EGO = catalog.Known(cache.EGO_SOURCE, urls=((cache.EGO_URL,),))
_CUSTOM = catalog.Known("your own file, not verified")


def data_command(
    task: tyro.conf.Positional[Literal["list", "fetch", "path", "check"]] = "list",
    name: tyro.conf.Positional[str | None] = None,
) -> int:
    """The data sets and their cache: list, fetch, path, check.

    The cache is $DPJAX_DATA, else $XDG_CACHE_HOME/dpjax, else ~/.cache/dpjax.

    Args:
        task: list: the data sets, which of them are in the cache, and where the others come from.
            fetch: bring one into the cache, or verify the one that is there. path: print the
            cache's folder. check: read every data set in the cache and compare its records with the
            published ones.
        name: With fetch, the data set's name, or facebook_ego.
    """
    if (name is not None) != (task == "fetch"):
        text = f"{_validate.argument('name', name)} with {task}"
        raise ValueError(f"{text}; give a data set to fetch, and to it alone")
    if name is not None:
        return _fetch(name)
    if task == "path":
        print(cache.folder())
        return 0
    return _list() if task == "list" else _check()


def _list() -> int:
    """List the data sets, which are whole in the cache, and where the others come from."""
    root = cache.folder()
    bad = False
    print(f"cache: {root}" + ("" if os.path.isdir(root) else " (does not exist yet)"))
    files = {name: root / f"{name}.npz" for name in load.available(root)}
    for name, path in (files | {cache.EGO: root / f"{cache.EGO}.edgelist"}).items():
        entry = _EGO if name == cache.EGO else catalog.SETS.get(name, _CUSTOM)
        state = "can be fetched" if entry.obtainable else "to be put there"
        # A package brings it: no file of the cache is read.
        if entry.bundled:
            state = "with scikit-learn"
        elif os.path.lexists(path):
            if _fault(path):
                state = "BAD"
            else:
                state = f"here, {path.stat().st_size / 1e6:.1f} MB"
        bad |= state == "BAD"
        print(f"  {name:<15}{state:<18}{entry.source}")
    if bad:
        print("`dpjax data check` says what is wrong with a bad file")
    return 0


def _fault(path: Path) -> Exception | None:
    """What is wrong with a file."""
    entry = catalog.SETS.get(path.stem, _CUSTOM)
    try:
        if path.suffix == ".edgelist":
            graphs.facebook_ego(path)
        else:
            remedy = "delete it and put or fetch a whole one"
            canonical.read_archive(path, entry.sha256, remedy, in_any_order=entry.in_any_order)
    except (ValueError, OSError) as error:
        return error
    return None


def _fetch(name: str) -> int:
    """Bring a data set into the cache, or verify the one that is there."""
    if name == cache.EGO:
        path = cache.fetch_facebook_ego()
        graphs.facebook_ego(path)
        print(path)
        return 0
    data = load.load(name)
    where = cache.folder() / f"{name}.npz"
    tests = 0 if data.x_test is None else len(data.x_test)
    parts = f"{len(data.x_train):,} train and {_validate.counted(tests, 'test record')}"
    print(f"{name}: {parts}, sha256 {data.sha256}")
    print(where if os.path.exists(where) else "with scikit-learn: no file is needed")
    return 0


def _check() -> int:
    """Read every data set in the cache; the status is 1 where one is bad."""
    faults = {path.stem: _fault(path) for path in sorted(cache.folder().glob("*.npz"))}
    for name, fault in faults.items():
        published = name in catalog.SETS and any(catalog.SETS[name].sha256)
        verdict = "as published" if published else "whole; no published hash is known"
        print(f"{name}: " + (verdict if fault is None else f"BAD: {fault}"))
    bad = sum(fault is not None for fault in faults.values())
    print(f"{_validate.counted(len(faults), 'file')}, {bad} bad")
    return int(bad > 0)
