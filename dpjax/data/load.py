"""Data sets by name, and from a user's own file."""

import os
import tempfile
from pathlib import Path

from dpjax import _files
from dpjax.data import cache as cache_
from dpjax.data import canonical, catalog, files, sources
from dpjax.data.canonical import Dataset

__all__ = ["Dataset", "from_file", "load"]


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

    Example:
        >>> from dpjax.data import load
        >>> load.load("digits").x_train.shape
        (1438, 64)
    """
    root = cache_.folder() if cache is None else Path(cache).expanduser()
    known = catalog.SETS.get(name)
    if known is not None and known.bundled:
        return _dataset(name, sources.bundled(name), known.source)
    path = root / f"{name}.npz"
    if os.sep in name or (known is None and not os.path.exists(path)):
        there = sorted(file.stem for file in root.glob("*.npz") if file.stem not in catalog.SETS)
        raise ValueError(
            f"name is {name!r}; choose one of {', '.join([*catalog.SETS, *there])}, or read your "
            "own file with data.load.from_file"
        )
    known = known or catalog.Known(f"the file {path}")
    new = not os.path.exists(path)
    if new:
        _obtain(name, known, path, download)
    again = "fetch it again" if known.obtainable else "put a whole one there"
    try:
        arrays, sha256 = canonical.read(
            path, known.sha256, f"delete the file and {again}", in_any_order=known.in_any_order
        )
    except ValueError:
        if new:
            path.unlink()
        raise
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

    Example:
        >>> from pathlib import Path
        >>> from dpjax.data import load
        >>> _ = Path("ages.csv").write_text("age,label\\n30,yes\\n40,no\\n")
        >>> load.from_file("ages.csv").y_train.tolist()
        [1, 0]
    """
    path = Path(path)
    if not os.path.isfile(path):
        raise ValueError(f"path is {str(path)!r}, which is no file; give an npz, csv or LIBSVM one")
    with _files.reading(path, "correct the file"):
        if path.suffix == ".npz":
            arrays, sha256 = canonical.read(path)
            return _dataset(path.stem, arrays, str(path), sha256)
        if path.suffix in (".csv", ".tsv"):
            x, y = files.table(path, label)
        else:
            x, y = files.libsvm(path, features)
        return _dataset(path.stem, canonical.check(path, {"x": x, "y": y}), str(path))


def _dataset(
    name: str, arrays: canonical.Arrays, source: str, sha256: str | None = None
) -> Dataset:
    x_test, y_test = arrays.get("x_test"), arrays.get("y_test")
    sha256 = canonical.combined(arrays) if sha256 is None else sha256
    return Dataset(name, arrays["x_train"], arrays["y_train"], x_test, y_test, source, sha256)


def _obtain(name: str, known: catalog.Known, path: Path, download: bool) -> None:
    """Make the file of a data set: by a library, or of LIBSVM's files, fetched or put there."""
    raws = [path.with_name(urls[0].rpartition("/")[2]) for urls in known.urls]
    by_hand = f"put {path.name} from another cache into {path.parent}"
    if raws:
        urls, names = " and ".join(u[0] for u in known.urls), " and ".join(r.name for r in raws)
        by_hand = f"get {urls} and put {names} there, or {by_hand}"
    if not known.obtainable:
        raise ValueError(
            f"{path} does not exist, and {name} cannot be fetched; {by_hand}: {known.source}"
        )
    if not download and not (raws and all(map(os.path.exists, raws))):
        raise ValueError(f"{path} does not exist; allow the download, or {by_hand}")
    with cache_.locked(path):
        if os.path.exists(path):  # Another process was faster.
            return
        try:
            arrays = _from_libsvm(known, raws) if raws else _from_library(known, path)
        except OSError as error:
            raise ValueError(f"{path} does not exist, and {error}; {by_hand}") from None
        canonical.write(path, arrays)


def _from_libsvm(known: catalog.Known, raws: list[Path]) -> canonical.Arrays:
    """Records of LIBSVM's files; those that were fetched are removed."""
    arrays: canonical.Arrays = {}
    fetched = [raw for raw in raws if not os.path.exists(raw)]
    try:
        for part, urls, raw in zip(("train", "test"), known.urls, raws, strict=False):
            cache_.fetch(urls, raw)
            arrays[f"x_{part}"], arrays[f"y_{part}"] = files.libsvm(raw, known.features)
    finally:
        for raw in fetched:
            raw.unlink(missing_ok=True)
    return arrays


def _from_library(known: catalog.Known, path: Path) -> canonical.Arrays:
    """Records that scikit-learn fetches, or a builder of tensorflow-datasets makes."""
    if known.host is not None:
        cache_.reach(known.host, path)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        if known.library == "sklearn":
            from sklearn import datasets

            x, y = datasets.fetch_california_housing(data_home=folder, return_X_y=True)
            return {"x": x, "y": y}
        fields, parts = ("image", "label"), ("train", "test")
        train, test = sources.built(str(known.library), folder, fields, parts)
        return dict(zip(("x_train", "y_train", "x_test", "y_test"), (*train, *test), strict=True))
