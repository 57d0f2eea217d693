"""Data sets by name: from the cache, their publishers, or the libraries that bring them."""

import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from dpjax import _files, _validate
from dpjax.data import cache as cache_
from dpjax.data import canonical, catalog
from dpjax.data.canonical import Dataset
from dpjax.data.split import standardise

__all__ = ["Dataset", "load"]

_NO_TEST: dict[str, Any] = {"x_test": None, "y_test": None}


def load(name: str, *, cache: _files.PathLike | None = None, download: bool = True) -> Dataset:
    """Return a data set by name, from the cache or, if need be, from its public address.

    Args:
        name: One of `catalog.SETS`, or the NAME of a ``NAME.npz`` that lies in the cache, the one
            format that is read: convert a CSV file by pandas and `numpy.savez`. a9a, w8a
            and breast_cancer have labels -1 and +1; w8a and housing have no test records. Write
            your own file by `numpy.savez`: ``x_train`` [N, ...] and ``y_train`` [N], ``x_test`` and
            ``y_test``. Records that nobody has split are ``x`` and ``y``; they are returned as
            train records, without test records (`dpjax.data.split.with_test` splits these off).
            ``owner`` [N] names the agent of each train record: numbers, or texts without pickle
            (``frame["site"].to_numpy(str)``).
        cache: The folder; None is `dpjax.data.cache.folder`.
        download: Whether what can be fetched may be when the cache lacks it: a9a, w8a and housing
            directly, images through tensorflow-datasets (in its order, which is not the published
            one). cifar10_small is cut from cifar10, in the order of the cache's file.

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
    if not isinstance(name, str):
        raise _validate.refusal("name", name, "give one data set's, as text: 'digits', say")
    entry = catalog.SETS.get(name)
    if entry is not None and entry.bundled:
        arrays = _bundled(name)
        sha256 = canonical.combined_digest(canonical.part_digests(arrays))
        return Dataset(name=name, source=entry.source, sha256=sha256, **(_NO_TEST | arrays))
    path = root / f"{name}.npz"
    new = not os.path.exists(path)
    if os.sep in name or (new and entry is None):
        choices = _validate.choice(name, available(root))
        raise ValueError(f"name is {name!r}; {choices}, or {_own_file(name, root)}")
    # An own file has no published digest.
    entry = entry or catalog.Known(f"the file {path}")
    if new:
        _obtain(name, entry, path, download)
    again = "write the file again by numpy.savez"
    if entry.obtainable:
        again = "delete the file and fetch it again"
    try:
        arrays, sha256 = canonical.read_archive(
            path, entry.sha256, again, in_any_order=entry.in_any_order
        )
    # A new file that is not the published one would be taken for it the next time.
    except ValueError:
        if new:
            path.unlink()
        raise
    return Dataset(name=name, source=entry.source, sha256=sha256, **(_NO_TEST | arrays))


def available(root: Path) -> list[str]:
    """Return the names that `load` takes: those of the catalog, then the cache's own files.

    Args:
        root: The cache's folder.
    """
    stems = {path.stem for path in root.glob("*.npz")}
    return [*catalog.SETS, *sorted(stems - catalog.SETS.keys())]


def _own_file(name: str, root: Path) -> str:
    """How to bring records of one's own into the cache, from a table say."""
    stem, suffix = os.path.splitext(os.path.basename(name))
    if suffix == ".npz":
        return f"put {stem}.npz into {root} and give its name without .npz"
    # Most own data are tables; the lines below turn one into an archive.
    table = name if suffix else f"{name}.csv"
    return (
        f"put yours as {stem}.npz into {root}: NAME.npz is the one format that is read, and no "
        f"CSV; to convert: import numpy, pandas; table = pandas.read_csv({table!r}); "
        f"numpy.savez({str(root / stem)!r}, x=table.drop(columns='LABEL').to_numpy(float), "
        "y=table['LABEL'].to_numpy(float))"
    )


def _obtain(name: str, entry: catalog.Known, path: Path, download: bool) -> None:
    """Make the file of a data set: by a library, or of LIBSVM's files, fetched or put there."""
    if entry.part_of is not None:
        train, test = entry.sizes
        counts = {"x_train": train, "y_train": train, "x_test": test, "y_test": test}
        # In the order of the cache's file, whatever order the library has.
        records = load(entry.part_of, cache=path.parent, download=download)._asdict()
        first = {field: records[field][:count] for field, count in counts.items()}
        canonical.write_archive(path, first)
        return
    raws = [path.with_name(urls[0].rpartition("/")[2]) for urls in entry.urls]
    by_hand = f"put {path.name} from another cache into {path.parent} (DPJAX_DATA)"
    if raws:
        urls = " and ".join(addresses[0] for addresses in entry.urls)
        names = " and ".join(raw.name for raw in raws)
        by_hand = f"get {urls} and put {names} into {path.parent} (DPJAX_DATA), or {by_hand}"
    if not download and not (raws and all(map(os.path.exists, raws))):
        raise ValueError(f"{path} does not exist; allow the download, or {by_hand}")
    with cache_.locked(path):
        if os.path.exists(path):  # Another process was faster.
            return
        try:
            arrays = _from_libsvm(entry, raws) if raws else _from_library(entry, path)
        except OSError as error:
            raise ValueError(f"{path} does not exist, and {error}; {by_hand}") from None
        canonical.write_archive(path, arrays)


def _from_libsvm(entry: catalog.Known, raws: list[Path]) -> canonical.DatasetArrays:
    """Records of LIBSVM's files; those that were fetched are removed."""
    arrays: canonical.DatasetArrays = {}
    # Files that someone put there stay.
    fetched = [raw for raw in raws if not os.path.exists(raw)]
    try:
        for part, urls, raw in zip(("train", "test"), entry.urls, raws, strict=False):
            cache_.fetch(urls, raw)
            x, y = libsvm(raw, entry.features)
            arrays |= {f"x_{part}": x, f"y_{part}": y}
    finally:
        for raw in fetched:
            raw.unlink(missing_ok=True)
    return arrays


def _from_library(entry: catalog.Known, path: Path) -> canonical.DatasetArrays:
    """Records that scikit-learn fetches, or a builder of tensorflow-datasets makes."""
    if entry.host is not None:
        cache_.reach(entry.host, path)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        if entry.library == "sklearn":
            from sklearn import datasets

            # Nobody has split these records.
            x, y = datasets.fetch_california_housing(data_home=folder, return_X_y=True)
            return {"x": x, "y": y}
        parts = built(str(entry.library), folder, ("image", "label"), ("train", "test"))
    names = ("x_train", "y_train", "x_test", "y_test")
    return dict(zip(names, itertools.chain(*parts), strict=True))


def libsvm(path: Path, features: int | None) -> tuple[Float[np.ndarray, "N d"], np.ndarray]:
    """Return the records of a LIBSVM file as dense arrays.

    Args:
        path: The file.
        features: Number of features d; None is the largest index in the file.

    Returns:
        x [N, d] float32 and y [N], int32 where all labels are whole numbers, else float32.

    Raises:
        FileNotFoundError: When there is no such file.
        ValueError: For a file that is not in the format, has indices that repeat or do not rise, or
            an index above ``features``.
    """
    from sklearn import datasets

    with _files.reading(path, "give a whole LIBSVM file"):
        sparse, targets = datasets.load_svmlight_file(path, n_features=features, zero_based=False)
    return sparse.toarray().astype(np.float32), canonical.as_labels(targets)


def _bundled(name: str) -> canonical.DatasetArrays:
    """Return a data set of scikit-learn, split and standardised.

    A fifth of each class is for testing, chosen by a fixed seed: the split is the same for
    everybody. Features are centred and scaled by mean and standard deviation of the train records
    alone. These statistics are not private; a real deployment states them or spends budget.

    Args:
        name: "breast_cancer" (30 features, labels -1 malignant and +1 benign) or "digits"
            (64 features, labels 0 to 9).

    Returns:
        ``x_train``, ``y_train``, ``x_test``, ``y_test``; float32 and int32.
    """
    from sklearn import datasets

    loaders = {"breast_cancer": datasets.load_breast_cancer, "digits": datasets.load_digits}
    x, y = loaders[name](return_X_y=True)
    if name == "breast_cancer":
        # Labels -1 and +1, which the logistic loss takes.
        y = 2 * y - 1
    rng = np.random.default_rng(0)
    test = np.zeros(len(y), bool)
    # A fifth of every class, so that small classes are tested as well.
    for label in np.unique(y):
        rows = np.flatnonzero(y == label)
        count = round(0.2 * len(rows))
        test[rng.choice(rows, count, replace=False)] = True
    x_train, x_test = standardise(x[~test], x[test])
    return {
        "x_train": x_train.astype(np.float32),
        "y_train": y[~test].astype(np.int32),
        "x_test": x_test.astype(np.float32),
        "y_test": y[test].astype(np.int32),
    }


def built(
    name: str, folder: _files.PathLike, fields: Sequence[str], parts: Sequence[str]
) -> list[list[np.ndarray]]:
    """Return fields of a data set's records, downloaded and prepared if need be.

    Args:
        name: As tensorflow-datasets calls it: "mnist", "glue/sst2".
        folder: Where it keeps what it prepares.
        fields: Names of features, the same in every record.
        parts: Names of splits.

    Returns:
        For each part an array for each field, records first; texts are bytes.

    Raises:
        OSError: Where it cannot be had: no network, no TensorFlow for what needs it, no such data
            set, or one without these parts or fields. The message says which.
    """
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise OSError(f"tensorflow-datasets is not installed ({error})") from None
    try:
        tensorflow_datasets.disable_progress_bar()
        # Files of array_record are read without TensorFlow.
        builder = tensorflow_datasets.builder(
            name, data_dir=os.fspath(folder), file_format="array_record"
        )
        builder.download_and_prepare()
        tables = []
        for part in parts:
            source = builder.as_data_source(part)
            records = [source[index] for index in range(len(source))]
            # Records are read once: each may be decoded anew.
            tables.append([np.stack([record[field] for record in records]) for field in fields])
        return tables
    except Exception as error:  # whatever the builder, its network and its formats come up with
        lines = str(error).strip().splitlines() or [""]
        raise OSError(f"{type(error).__name__}: {lines[-1][:200]}") from error
