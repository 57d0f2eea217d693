"""The data sets known by name: where they come from and what they must hold."""

from typing import NamedTuple, TypeAlias

__all__ = ()

Digests: TypeAlias = tuple[str | None, str | None]
"""Of the train and of the test records; None for records without one."""

_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
_GITHUB = "https://raw.githubusercontent.com/"
_DECOR = _GITHUB + "elfirdoussilab1/DECOR/68ad6980711386d32321e1840e95ecaaa06359a9/libsvm_data/"
_ACCSPD = _GITHUB + "unc-optimization/AccSPD/d2f1f2c961e3401032649544445bb24ab63ab1c5/data/"


class Known(NamedTuple):
    """What is known of a data set.

    Attributes:
        source: Where it comes from, and whom to cite.
        sha256: Digest of the train and of the test records (`canonical.record_digest`); None where
            there are none or it is not fixed.
        urls: Of the LIBSVM file of the train records, then of the test records, as far as they
            can be fetched: addresses of the same records, tried in turn.
        features: Number of features of those.
        bundled: Comes with scikit-learn: no file is needed.
        library: What makes it when the cache lacks it: "sklearn", or tensorflow-datasets by the
            name of its builder.
        host: The server that a library fetches it from; None is not asked before.
        part_of: The data set whose first records these are.
        sizes: Then, how many of its train and of its test records.
        in_any_order: As ``sha256``, of the records in whatever order (`canonical.unordered`); a
            library's is its own.
        images: Whether its records are pictures and their classes.
    """

    source: str
    sha256: Digests = (None, None)
    urls: tuple[tuple[str, ...], ...] = ()
    features: int | None = None
    bundled: bool = False
    library: str | None = None
    in_any_order: Digests = (None, None)
    host: str | None = None
    part_of: str | None = None
    sizes: tuple[int, int] = (0, 0)
    images: bool = False

    @property
    def obtainable(self) -> bool:
        """Whether it can be had from a network."""
        return bool(self.urls or self.library or self.part_of)


SETS = {
    "a9a": Known(
        "UCI Adult (CC BY 4.0) as encoded by Platt 1998, from LIBSVM: 123 binary features",
        (
            "371a9290bde31ab15d922117dbe2f1f8f09df85c99015d7956072ff6378e7a84",
            "42f0014b7d8a6d482628cb0fa64571d5551b1daa2716b2c97b4619faeb3dca48",
        ),
        ((_LIBSVM + "a9a", _DECOR + "a9a.txt"), (_LIBSVM + "a9a.t", _DECOR + "a9a_t.txt")),
        123,
    ),
    "w8a": Known(
        "web pages, Platt 1998, from LIBSVM: 300 binary features, train records only",
        ("6224d5d96cff524dc99e745a85841b0983c4efe2dacc2a0be2d924b35e315184", None),
        ((_LIBSVM + "w8a", _ACCSPD + "w8a"),),
        300,
    ),
    "breast_cancer": Known(
        "UCI Breast Cancer Wisconsin (CC BY 4.0), with scikit-learn; +1 is benign", bundled=True
    ),
    "digits": Known(
        "UCI handwritten digits (CC BY 4.0), with scikit-learn: 8 x 8", bundled=True, images=True
    ),
    "mnist": Known(
        "LeCun, Cortes, Burges: handwritten digits, 28 x 28 x 1",
        (
            "edc0d1098aa497be14ace79ddd5171e5a3dcf9c4d196c015389203eb3ba1f59b",
            "c3f9adf9c66efb572b1f9326c3a511b45910c7173b97be66ceceeeeaef6b802b",
        ),
        library="mnist",
        in_any_order=(
            "54e1ab866c9484947dd4821c52bb7a43938f555d6b046be6af55247f8e6ffc64",
            "97b756d55950f1841ebd48df7379b9b2fc87a10d63e08d6213dad41d564e8508",
        ),
        host="https://storage.googleapis.com",
        images=True,
    ),
    "fashion_mnist": Known(
        "Xiao, Rasul, Vollgraf 2017: articles of clothing, 28 x 28 x 1",
        library="fashion_mnist",
        host="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        images=True,
    ),
    "cifar10": Known(
        "Krizhevsky 2009: 32 x 32 x 3, 10 classes",
        ("f912919bdea371136f1aa4feed6beeca728015a5f08b1899a29c932a7e30be2b", None),
        library="cifar10",
        in_any_order=("6a3b2c04d0a79ce272dcdacaf0bc440275db5a8cbe3717521a28fada2ea0d2ed", None),
        host="https://www.cs.toronto.edu",
        images=True,
    ),
    "cifar10_small": Known(
        "the first 5,000 train and 1,000 test images of CIFAR-10",
        part_of="cifar10",
        sizes=(5_000, 1_000),
        images=True,
    ),
    "cifar100": Known(
        "Krizhevsky 2009: 32 x 32 x 3, 100 classes",
        ("14886c20287690f03728355958fe0858f491f72573360ceb2c75e0feff0833ba", None),
        library="cifar100",
        in_any_order=("640c97a4012a8aebfcaf57fd82a33dd43b37d2e397a02cb9b0a3d89e6d6d936d", None),
        host="https://www.cs.toronto.edu",
        images=True,
    ),
    "housing": Known(
        "StatLib California housing, Pace and Barry 1997, as scikit-learn derives its 8 features "
        "and the median value in 100,000 dollars; not split",
        ("edfb1cd7732d73f174f7adf9582e172a2788d522cc7f6ec0cf82121ea7011f01", None),
        library="sklearn",
        host="https://ndownloader.figshare.com",
    ),
}
"""Data sets by name."""
