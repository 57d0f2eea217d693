"""The bodies of `dpjax data`: list, fetch, path and check; each returns an exit status."""

import os
from pathlib import Path
from typing import Any

from dpjax.data import cache, canonical, catalog, load, networks
from dpjax.topology import graphs

__all__: list[str] = []

_BAD = "BAD"


def run(action: Any) -> int:
    """Do what the command line asks.

    Args:
        action: One of `dpjax.cli.DataCommand`'s.

    Returns:
        Exit status.
    """
    name = type(action).__name__.lower()
    return (
        _fetch(action.name)
        if name == "fetch"
        else {"list": _list, "where": _where, "check": _check}[name]()
    )


def _list() -> int:
    """List the data sets, which are whole in the cache, and where the others come from."""
    root = cache.folder()
    own = sorted(path.stem for path in root.glob("*.npz") if path.stem not in catalog.SETS)
    bad = False
    print(f"cache: {root}" + ("" if os.path.isdir(root) else " (does not exist yet)"))
    for name in [*catalog.SETS, *own]:
        known = catalog.SETS.get(name, catalog.Known("your own file, not verified"))
        path = root / f"{name}.npz"
        if known.bundled:
            state = "with scikit-learn"
        elif os.path.lexists(path):
            state = _state(path, known)
            bad = bad or state == _BAD
        else:
            state = "can be fetched" if known.obtainable else "to be put there"
        print(f"  {name:<15}{state:<18}{known.source}")
    ego = "can be fetched"
    if os.path.lexists(root / f"{networks.NAME}.edgelist"):
        ego = "here" if _is_ego(root) else _BAD
    print(f"  {networks.NAME:<15}{ego:<18}{networks.SOURCE}")
    if bad:
        print("`dpjax data check` says what is wrong with a bad file")
    return 0


def _state(path: Path, known: catalog.Known) -> str:
    """Whether a file is here and whole."""
    try:
        canonical.read(path, known.sha256, in_any_order=known.in_any_order)
    except (ValueError, OSError):
        return _BAD
    return f"here, {path.stat().st_size / 1e6:.1f} MB"


def _is_ego(root: Path) -> bool:
    """Whether the ego network's file holds that network."""
    try:
        graphs.facebook_ego(root / f"{networks.NAME}.edgelist")
    except (ValueError, OSError):
        return False
    return True


def _fetch(name: str) -> int:
    """Bring a data set into the cache, or verify the one that is there."""
    if name == networks.NAME:
        path = networks.fetch()
        graphs.facebook_ego(path)
        print(path)
        return 0
    data = load.load(name)
    where = cache.folder() / f"{name}.npz"
    tests = 0 if data.x_test is None else len(data.x_test)
    print(f"{name}: {len(data.x_train)} train and {tests} test records, sha256 {data.sha256}")
    print(where if os.path.exists(where) else "with scikit-learn: no file is needed")
    return 0


def _where() -> int:
    """Print the folder of the cache."""
    print(cache.folder())
    return 0


def _check() -> int:
    """Read every data set in the cache; the status is 1 where one is bad."""
    bad = 0
    paths = sorted(cache.folder().glob("*.npz"))
    for path in paths:
        known = catalog.SETS.get(path.stem, catalog.Known("unknown"))
        try:
            _, sha256 = canonical.read(
                path, known.sha256, "delete it and put or fetch a whole one",
                in_any_order=known.in_any_order,
            )  # fmt: skip
        except (ValueError, OSError) as error:
            bad += 1
            print(f"{path.stem}: BAD: {error}")
        else:
            how = "as published" if any(known.sha256) else "whole; no published hash is known"
            print(f"{path.stem}: {how}, sha256 {sha256}")
    print(f"{len(paths)} files, {bad} bad")
    return 1 if bad else 0
