"""The known data sets: where they come from, what they must hash to, how files become arrays."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dpjax.data import cache, libsvm

__all__ = ["IMAGES", "SOURCES", "File", "Source", "digest", "write_edges"]

_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
_GITHUB = "https://raw.githubusercontent.com/"
_DECOR = f"{_GITHUB}elfirdoussilab1/DECOR/68ad6980711386d32321e1840e95ecaaa06359a9/libsvm_data/"
_ACCSPD = f"{_GITHUB}unc-optimization/AccSPD/d2f1f2c961e3401032649544445bb24ab63ab1c5/data/"
_VGRAPH = f"{_GITHUB}sunfanyunn/vGraph/f7dd98a3f28b01bd9e656aebdd46ed906383977b/data/facebook/"


@dataclass(frozen=True)
class File:
    """A file at public addresses, all of which give the same bytes.

    Attributes:
        name: What it is called in the cache while it is worked on.
        sha256: SHA-256 of its bytes.
        urls: Addresses, tried in turn.
    """

    name: str
    sha256: str
    urls: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A known data set.

    Attributes:
        name: What it is called.
        about: One line on it.
        suffix: Ending of the canonical file in the cache, ".npz" or ".edgelist".
        digests: `digest` of each split's arrays (or the SHA-256 of an edge list under "file").
        files: What to fetch; empty where there is no public address to fetch from.
        convert: ``convert(files, target)`` writes the canonical file from the fetched ones.
        labels: Type that labels have in the digest.
        citation: Whom to cite.
    """

    name: str
    about: str
    digests: Mapping[str, str]
    suffix: str = ".npz"
    files: tuple[File, ...] = ()
    convert: Callable[[list[Path], Path], None] | None = None
    labels: str = "u1"
    citation: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)


def digest(x: np.ndarray, y: np.ndarray, labels: str = "u1") -> str:
    """Return the SHA-256 of a split: x as bytes of 8 bits, then y as ``labels``, in C order.

    Values that do not fit into 8 bits are another data set, and hash to nothing known.
    """
    narrow = []
    for array, kind in ((x, "u1"), (y, labels)):
        with np.errstate(invalid="ignore"):
            small = np.ascontiguousarray(array, dtype=kind)
        if small is not array and not np.array_equal(small, array):
            return "other values"
        narrow.append(small)
    sha = hashlib.sha256(narrow[0].data)
    sha.update(narrow[1].data)
    return sha.hexdigest()


def _from_libsvm(features: int, *splits: str) -> Callable[[list[Path], Path], None]:
    def convert(files: list[Path], target: Path) -> None:
        arrays = {}
        for split, file in zip(splits, files, strict=True):
            x, y = libsvm.read(file, features)
            arrays |= {f"x_{split}": x, f"y_{split}": y.astype(np.int32)}
        with cache.replacing(target) as beside:
            np.savez_compressed(beside, **arrays)

    return convert


def write_edges(files: list[Path], target: Path) -> None:
    """Write the largest component of an edge list, each edge once, in the file's order."""
    import networkx as nx

    edges = dict.fromkeys(
        (min(words), max(words), *words)
        for words in (line.split() for line in files[0].read_text().splitlines())
    )
    graph = nx.Graph((edge[2], edge[3]) for edge in edges)
    largest = max(nx.connected_components(graph), key=len)
    seen = set()
    with cache.replacing(target) as beside, open(beside, "w", encoding="ascii") as out:
        for low, high, first, second in edges:
            if first in largest and (low, high) not in seen:
                seen.add((low, high))
                out.write(f"{first} {second}\n")


def _image(name: str, about: str, train: str, test: str, citation: str) -> Source:
    return Source(name, about, {"train": train, "test": test}, citation=citation)


_CIFAR = "Krizhevsky, Learning multiple layers of features from tiny images, 2009"

IMAGES = {
    source.name: source
    for source in (
        _image(
            "mnist",
            "digits, 60,000 + 10,000 images of 28 x 28 x 1",
            "edc0d1098aa497be14ace79ddd5171e5a3dcf9c4d196c015389203eb3ba1f59b",
            "c3f9adf9c66efb572b1f9326c3a511b45910c7173b97be66ceceeeeaef6b802b",
            "LeCun, Bottou, Bengio, Haffner, Gradient-based learning, 1998",
        ),
        _image(
            "cifar10",
            "50,000 + 10,000 images of 32 x 32 x 3 in 10 classes",
            "f912919bdea371136f1aa4feed6beeca728015a5f08b1899a29c932a7e30be2b",
            "36f35f1379b4eae9f3a161dede7a4011300cc8cd445d66d756f1a2f870f1c328",
            _CIFAR,
        ),
        _image(
            "cifar10_small",
            "the first 5,000 + 1,000 images of cifar10",
            "cd687b904f4da2f70c02a448d8d180c55da5bcec1a0cdd4499e14a81bd168e02",
            "3bbdff8a1946fbed0a833aaf37c6ffbb3d391356d3e79d47a8030d5ee93186db",
            _CIFAR,
        ),
        _image(
            "cifar100",
            "50,000 + 10,000 images of 32 x 32 x 3 in 100 classes",
            "14886c20287690f03728355958fe0858f491f72573360ceb2c75e0feff0833ba",
            "c9932723af57f8e018b7f4f7481ec322f64dd796c85e2eaf8e250b6a5e13a700",
            _CIFAR,
        ),
    )
}
"""Image sets that are checked and loaded when their canonical file is in the cache."""

_ADULT = "Becker and Kohavi, Adult, UCI, 1996; in LIBSVM's form after Platt 1998"

SOURCES = {
    source.name: source
    for source in (
        Source(
            "a9a",
            "census incomes, 32,561 + 16,281 records, 123 binary features, labels -1/+1",
            {
                "train": "371a9290bde31ab15d922117dbe2f1f8f09df85c99015d7956072ff6378e7a84",
                "test": "42f0014b7d8a6d482628cb0fa64571d5551b1daa2716b2c97b4619faeb3dca48",
            },
            files=(
                File(
                    "a9a",
                    "f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906",
                    (f"{_LIBSVM}a9a", f"{_DECOR}a9a.txt"),
                ),
                File(
                    "a9a.t",
                    "1f448a153f0320399a7e40836eb207655b0bde0f21fc941cc472193daa9f5de9",
                    (f"{_LIBSVM}a9a.t", f"{_DECOR}a9a_t.txt"),
                ),
            ),
            convert=_from_libsvm(123, "train", "test"),
            labels="i1",
            citation=_ADULT,
        ),
        Source(
            "w8a",
            "web pages, 49,749 records (no test file), 300 binary features, labels -1/+1",
            {"train": "6224d5d96cff524dc99e745a85841b0983c4efe2dacc2a0be2d924b35e315184"},
            files=(
                File(
                    "w8a",
                    "b464b4f6ce6a5d9e181ffc793e19a04751036273722312398ef7673705014902",
                    (f"{_LIBSVM}w8a", f"{_ACCSPD}w8a"),
                ),
            ),
            convert=_from_libsvm(300, "train"),
            labels="i1",
            citation="Platt, Fast training of SVMs using sequential minimal optimization, 1998",
        ),
        Source(
            "facebook_ego",
            "a graph: ego network 414 of ego-Facebook, 148 nodes, 1,692 edges",
            {"file": "EDGES"},
            suffix=".edgelist",
            files=(
                File(
                    "414.edges",
                    "1f5c9d43608a8cf6d56e27f1902f528cf7cf9ef1114afd3df7bc5888d7250fb1",
                    (f"{_VGRAPH}414.edges",),
                ),
            ),
            convert=write_edges,
            citation="McAuley and Leskovec, Learning to discover social circles, 2012",
        ),
        *IMAGES.values(),
    )
}
"""Known data sets by name."""
