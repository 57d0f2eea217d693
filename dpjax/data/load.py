"""Data sets by name, and from a user's own file."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpjax import _files
from dpjax.data import builders, bundled, canonical, catalog, libsvm
from dpjax.data import cache as cache_

__all__ = ["Dataset", "from_file", "load"]


class Dataset(NamedTuple):
    """Records of a data set.

    Attributes:
        name: Its name.
        x_train: [N, ...] examples.
        y_train: [N] labels, int32 where they are whole numbers.
        x_test: [M, ...] test examples; None where there are none.
        y_test: [M] their labels; None where there are none.
        source: Where it comes from.
        sha256: Of the records, see `canonical.read`.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray | None
    y_test: np.ndarray | None
    source: str
    sha256: str


def load(
    name: str, *, cache: str | os.PathLike[str] | None = None, download: bool = True
) -> Dataset:
    """Return a data set by name, from the cache or, if need be, from its public address.

    Args:
        name: One of `catalog.SETS`, or the NAME of a ``NAME.npz`` that lies in the cache. a9a, w8a
            and breast_cancer have labels -1 and +1; w8a and housing have no test records.
        cache: The folder; None is `dpjax.data.cache.folder`.
        download: Whether what can be fetched may be when the cache lacks it: a9a, w8a and housing
            directly, images through tensorflow-datasets (in its order, which is not the published
            one).

    Returns:
        The records. Where the published ones are known they are checked against them.

    Raises:
        ValueError: For an unknown name, a file that is missing and cannot be had, or one that is
            damaged or holds other records; the message says what to put where.
    """
    root = _folder(cache)
    if name == "quadratics":
        raise ValueError("name is 'quadratics', which has no records; use data.quadratics.make(n)")
    known = catalog.SETS.get(name)
    if known is not None and known.bundled:
        return _dataset(name, bundled.read(name), known.source)
    path = root / f"{name}.npz"
    if os.sep in name or (known is None and not os.path.exists(path)):
        there = sorted(file.stem for file in root.glob("*.npz") if file.stem not in catalog.SETS)
        raise ValueError(
            f"name is {name!r}; choose one of {', '.join([*catalog.SETS, *there])}, or read your "
            "own file with data.load.from_file"
        )
    known = known or catalog.Known(f"the file {path}")
    if not os.path.exists(path):
        _obtain(name, known, path, download)
    again = "fetch it again" if known.obtainable else "put a whole one there"
    arrays, sha256 = canonical.read(
        path, known.sha256, f"delete the file and {again}", in_any_order=known.in_any_order
    )
    return _dataset(name, arrays, known.source, sha256)


def from_file(
    path: str | os.PathLike[str], *, label: str | int | None = None, features: int | None = None
) -> Dataset:
    """Return the records of a user's own file.

    Args:
        path: An npz archive (``x_train``, ``y_train`` and, if any, ``x_test``, ``y_test``; or ``x``
            and ``y``), a table (``.csv`` or ``.tsv``), or LIBSVM text (any other ending).
        label: A table's label column: its name, or its number from 0 (-1 is the last). None is
            the column that is called label, target, class or y.
        features: LIBSVM's number of features; None is the largest index.

    Returns:
        The records, all for training unless an archive says otherwise; a table's labels that are
        text become 0, 1, ... in alphabetical order.

    Raises:
        ValueError: Naming the file, what is wrong with it and what to change.
    """
    path = Path(path)
    if not os.path.isfile(path):
        raise ValueError(f"path is {str(path)!r}, which is no file; give an npz, csv or LIBSVM one")
    with _files.reading(path, "correct the file"):
        if path.suffix == ".npz":
            arrays, sha256 = canonical.read(path)
            return _dataset(path.stem, arrays, str(path), sha256)
        if path.suffix in (".csv", ".tsv"):
            from dpjax.data import table

            x, y = table.read(path, label)
        else:
            x, y = libsvm.read(path, features)
        return _dataset(path.stem, canonical.check(path, {"x": x, "y": y}), str(path))


def _folder(named: str | os.PathLike[str] | None) -> Path:
    return cache_.folder() if named is None else Path(named).expanduser()


def _dataset(
    name: str, arrays: canonical.Arrays, source: str, sha256: str | None = None
) -> Dataset:
    if sha256 is None:
        sha256 = canonical.combined(arrays)
    x_test, y_test = arrays.get("x_test"), arrays.get("y_test")
    return Dataset(name, arrays["x_train"], arrays["y_train"], x_test, y_test, source, sha256)


def _obtain(name: str, known: catalog.Known, path: Path, download: bool) -> None:
    """Make the file ``path`` of a data set from LIBSVM's files, fetched or put there by hand."""
    if known.fetched:
        _fetch_housing(known.host, path, download)
        return
    if known.builder is not None:
        _build(known.builder, known.host, path, download)
        return
    if not known.urls:
        raise ValueError(
            f"{path} does not exist, and {name} cannot be fetched; put it there ({known.source}: "
            "x_train, y_train, x_test, y_test)"
        )
    raws = [path.with_name(urls[0].rpartition("/")[2]) for urls in known.urls]
    by_hand = (
        f"get {' and '.join(urls[0] for urls in known.urls)} on a machine with a network and put "
        f"{' and '.join(raw.name for raw in raws)}, or {path.name} from another cache, into "
        f"{path.parent}"
    )
    if not download and not all(os.path.exists(raw) for raw in raws):
        raise ValueError(f"{path} does not exist; allow the download, or {by_hand}")
    with cache_.locked(path):
        if os.path.exists(path):  # Another process was faster.
            return
        fetched = [raw for raw in raws if not os.path.exists(raw)]
        try:
            for urls, raw in zip(known.urls, raws, strict=True):
                cache_.fetch(urls, raw)
        except ConnectionError as error:
            raise ValueError(f"{path} does not exist, and {error}; {by_hand}") from None
        arrays: canonical.Arrays = {}
        for part, raw, want in zip(("train", "test"), raws, known.sha256, strict=False):
            try:
                x, y = libsvm.read(raw, known.features)
                digest = canonical.digest(x, y)
                if digest != want:
                    raise ValueError(
                        f"{raw} holds other records than the published ones (sha256 "
                        f"{digest[:12]}, not {str(want)[:12]}); delete it and fetch it again"
                    )
            except ValueError:
                if raw in fetched:
                    raw.unlink()
                raise
            arrays |= {f"x_{part}": x, f"y_{part}": y}
        canonical.write(path, arrays)
        for raw in fetched:
            raw.unlink()


def _build(name: str, host: str | None, path: Path, download: bool) -> None:
    """Make the file ``path`` of images by a builder of tensorflow-datasets."""

    def read(folder: str) -> canonical.Arrays:
        train, test = builders.read(name, folder, ("image", "label"), ("train", "test"))
        names = ("x_train", "y_train", "x_test", "y_test")
        return dict(zip(names, (*train, *test), strict=True))

    remedy = ", or install tensorflow where it needs that"
    _through("tensorflow-datasets cannot make it", read, host, path, download, remedy)


def _fetch_housing(host: str | None, path: Path, download: bool) -> None:
    """Make the file ``path`` of California housing through scikit-learn."""

    def read(folder: str) -> canonical.Arrays:
        from sklearn import datasets

        x, y = datasets.fetch_california_housing(data_home=folder, return_X_y=True)
        return {"x": x, "y": y}

    _through("scikit-learn cannot fetch it", read, host, path, download)


def _through(
    failure: str,
    read: Callable[[str], canonical.Arrays],
    host: str | None,
    path: Path,
    download: bool,
    remedy: str = "",
) -> None:
    """Make the file ``path`` of what a library reads, given a folder for its own files."""
    by_hand = f"put {path.name} from another cache into {path.parent}"
    if not download:
        raise ValueError(f"{path} does not exist; allow the download, or {by_hand}")
    with cache_.locked(path):
        if os.path.exists(path):  # Another process was faster.
            return
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            try:
                if host is not None:
                    cache_.reach(host, path)
                arrays = read(folder)
            except OSError as error:
                raise ValueError(
                    f"{path} does not exist, and {failure} ({error}); {by_hand}{remedy}"
                ) from None
        canonical.write(path, arrays)
