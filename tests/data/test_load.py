"""Data sets by name and from a user's file."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dpjax.data import cache, canonical, catalog, load, split

TRAIN = "-1 1:1\n+1 2:1 3:1\n-1 3:1\n"
TEST = "+1 1:1 2:1\n"
GET = Callable[[str], Path]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """A data set "tiny" of the catalogue, and what its addresses give."""
    served = {"https://one/tiny": TRAIN, "https://one/tiny.t": TEST}
    x = np.array([[1, 0, 0], [0, 1, 1], [0, 0, 1]])
    digests = (
        canonical.record_digest(x, np.array([-1, 1, -1])),
        canonical.record_digest(np.array([[1, 1, 0]]), np.array([1])),
    )
    urls = (("https://one/tiny", "https://two/tiny"), ("https://one/tiny.t",))
    reference = catalog.Known("made up", digests, urls, 3)
    monkeypatch.setitem(catalog.SETS, "tiny", reference)

    def fetch(addresses: tuple[str, ...], path: Path) -> Path:
        if path.exists():
            return path
        for url in addresses:
            if url in served:
                path.write_text(served[url])
                return path
        raise ConnectionError(f"{addresses[0]} cannot be reached (no network)")

    monkeypatch.setattr(cache, "fetch", fetch)
    return served


def test_missing_set_is_fetched_checked_and_kept(tiny: dict[str, str], tmp_path: Path) -> None:
    data = load.load("tiny", cache=tmp_path)
    assert data.x_train.shape == (3, 3) and data.x_train.dtype == np.float32
    assert data.y_train.tolist() == [-1, 1, -1] and data.y_train.dtype == np.int32
    assert data.x_test is not None and data.x_test.tolist() == [[1, 1, 0]]
    kept = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert kept == {"tiny.npz"}
    tiny.clear()
    again = load.load("tiny", cache=tmp_path, download=False)
    assert again.sha256 == data.sha256 and np.array_equal(again.x_train, data.x_train)


def test_second_address_serves(tiny: dict[str, str], tmp_path: Path) -> None:
    tiny["https://two/tiny"] = tiny.pop("https://one/tiny")
    assert len(load.load("tiny", cache=tmp_path).x_train) == 3


def test_no_network_says_what_to_put_where(tiny: dict[str, str], tmp_path: Path) -> None:
    tiny.clear()
    match = (
        "no network.*get https://one/tiny and .*/tiny.t and put tiny and tiny.t into .*DPJAX_DATA"
    )
    with pytest.raises(ValueError, match=match) as caught:
        load.load("tiny", cache=tmp_path)
    assert str(tmp_path) in str(caught.value) and not (tmp_path / "tiny.npz").exists()
    with pytest.raises(ValueError, match="tiny.npz does not exist; allow the download, or get"):
        load.load("tiny", cache=tmp_path, download=False)
    (tmp_path / "tiny").write_text(TRAIN)
    (tmp_path / "tiny.t").write_text(TEST)
    assert len(load.load("tiny", cache=tmp_path, download=False).x_train) == 3
    assert (tmp_path / "tiny").exists(), "files put there by hand stay"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TRAIN.replace("-1 3:1", "+1 3:1"), "other train records than the published ones"),
        (TRAIN[:9], "other train records"),
        (TRAIN + "1 9:1\n", "n_features was set to 3"),
        ("<html>gone</html>", "cannot be read .*html"),
        ("", "give one row and one label"),
    ],
)
def test_download_of_other_records_leaves_nothing(
    tiny: dict[str, str], tmp_path: Path, content: str, message: str
) -> None:
    tiny["https://one/tiny"] = content
    with pytest.raises(ValueError, match=message):
        load.load("tiny", cache=tmp_path)
    assert not (tmp_path / "tiny.npz").exists() and not (tmp_path / "tiny").exists()


def test_damaged_file_names_itself_and_remedy(tiny: dict[str, str], tmp_path: Path) -> None:
    load.load("tiny", cache=tmp_path)
    path = tmp_path / "tiny.npz"
    path.write_bytes(path.read_bytes()[:100])
    match = "tiny.npz cannot be read .*; delete the file and fetch it again"
    with pytest.raises(ValueError, match=match):
        load.load("tiny", cache=tmp_path)
    np.savez(path, x_train=np.ones((1, 3)), y_train=np.ones(1))
    with pytest.raises(ValueError, match="other train records"):
        load.load("tiny", cache=tmp_path)


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name is 'nothing'; choose one of a9a, w8a"):
        load.load("nothing", cache=tmp_path)
    with pytest.raises(ValueError, match="choose one of"):
        load.load("../a9a", cache=tmp_path)
    with pytest.raises(ValueError, match=r"put own.npz into .* give its name without .npz"):
        load.load("own.npz", cache=tmp_path)


@pytest.mark.parametrize("name", ["own.csv", "tables/own.csv", "own"])
def test_table_is_no_data_set_and_one_line_converts_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path(name).with_suffix(".csv")
    file.parent.mkdir(exist_ok=True)
    file.write_text("age,LABEL\n1.5,1\n2,-1\n")
    with pytest.raises(ValueError, match="NAME.npz is the one format .* and no CSV") as refused:
        load.load(name, cache=tmp_path)
    exec(str(refused.value).partition("; to convert: ")[2], {})
    data = load.load("own", cache=tmp_path)
    assert data.x_train.tolist() == [[1.5], [2]] and data.y_train.tolist() == [1, -1]
    (tmp_path / "own.npz").write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match="own.npz cannot be read .* by numpy.savez"):
        load.load("own", cache=tmp_path)


def test_small_images_are_first_of_all(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, size=(8, 2, 2, 3), dtype=np.uint8)
    labels = np.arange(8)
    parts = {"x_train": images, "y_train": labels, "x_test": images[::-1], "y_test": labels}
    canonical.write_archive(tmp_path / "parent.npz", parts)
    entry = catalog.Known("the first of a parent", part_of="parent", sizes=(5, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(catalog.SETS, "cut", entry)
        data = load.load("cut", cache=tmp_path, download=False)
    assert (data.x_train == images[:5]).all() and (data.x_test == images[:-4:-1]).all()
    assert data.y_train.tolist() == [0, 1, 2, 3, 4] and data.y_test.tolist() == [0, 1, 2]
    assert (tmp_path / "cut.npz").exists()
    with pytest.raises(ValueError, match="cifar10.npz does not exist; allow the download"):
        load.load("cifar10_small", cache=tmp_path, download=False)
    assert not (tmp_path / "cifar10_small.npz").exists()


def test_every_named_data_set_can_be_had() -> None:
    for name, entry in catalog.SETS.items():
        assert entry.bundled or entry.obtainable, name


@pytest.mark.slow
def test_small_cifar_is_cut_from_published_one(
    tmp_path: Path, real_data: Callable[[str], Path]
) -> None:
    (tmp_path / "cifar10.npz").symlink_to(real_data("cifar10"))
    stored = load.load("cifar10_small", cache=real_data("cifar10_small").parent)
    assert load.load("cifar10_small", cache=tmp_path, download=False).sha256 == stored.sha256


def test_user_s_file_is_named_by_its_stem(tmp_path: Path) -> None:
    canonical.write_archive(tmp_path / "own.npz", {"x": np.ones((2, 1)), "y": np.array([0, 1])})
    data = load.load("own", cache=tmp_path)
    assert data.name == "own" and data.x_test is None and data.y_test is None
    with pytest.raises(ValueError, match="cifar100, housing, own"):
        load.load("other", cache=tmp_path)


def test_array_of_python_objects_is_named_with_its_remedy(tmp_path: Path) -> None:
    owners = np.array(["North", "South"], dtype=object)
    np.savez(tmp_path / "own.npz", x=np.ones((2, 1)), y=np.array([0, 1]), owner=owners)
    match = r"array owner holds Python objects; save texts by astype\(str\)"
    with pytest.raises(ValueError, match=match):
        load.load("own", cache=tmp_path)


@pytest.mark.parametrize("name", ["a9a", "w8a"])
def test_real_sets(real_data: GET, name: str) -> None:
    folder = real_data(name).parent
    data = load.load(name, cache=folder, download=False)
    shape = {"a9a": (32561, 123), "w8a": (49749, 300)}[name]
    assert data.x_train.shape == shape and data.x_train.dtype == np.float32
    assert set(np.unique(data.y_train)) == {-1, 1}
    assert int((data.y_train == 1).sum()) == {"a9a": 7841, "w8a": 1479}[name]
    # The published digest, made here without canonical's own code.
    parts = data.x_train.astype(np.uint8).tobytes() + data.y_train.astype(np.int8).tobytes()
    assert hashlib.sha256(parts).hexdigest() == catalog.SETS[name].sha256[0]
    if name == "w8a":
        assert data.x_test is None
    else:
        assert data.x_test is not None and data.x_test.shape == (16281, 123)


@pytest.mark.parametrize(
    ("name", "features", "labels"), [("breast_cancer", 30, [-1, 1]), ("digits", 64, range(10))]
)
def test_bundled_sets(name: str, features: int, labels: list[int], tmp_path: Path) -> None:
    data = load.load(name, cache=tmp_path, download=False)
    again = load.load(name, cache=tmp_path)
    assert data.sha256 == again.sha256 and np.array_equal(data.x_train, again.x_train)
    assert data.x_test is not None and data.y_test is not None
    assert data.x_train.shape[1] == features and data.x_train.dtype == np.float32
    assert data.y_train.dtype == np.int32 and sorted(set(data.y_train.tolist())) == list(labels)
    for label in labels:  # A fifth of each class is for testing.
        train = (data.y_train == label).sum()
        test = (data.y_test == label).sum()
        assert test == round(0.2 * (train + test))
    np.testing.assert_allclose(data.x_train.mean(0), 0, atol=1e-5)
    deviations = data.x_train.std(0)
    assert np.all((np.abs(deviations - 1) < 1e-4) | (deviations == 0))
    # Train statistics alone: the test records' own are not removed.
    assert np.abs(data.x_test.mean(0)).max() > 1e-2
    assert not list(tmp_path.iterdir())


def test_breast_cancer_is_minus_one_where_malignant() -> None:
    data = load.load("breast_cancer")
    assert data.y_test is not None
    labels = np.concatenate([data.y_train, data.y_test])
    assert (labels == -1).sum() == 212 and (labels == 1).sum() == 357


def test_constant_feature_is_centred_only() -> None:
    train, test = split.standardise(np.array([[3.0, 0], [3, 2]]), np.array([[4.0, 1]]))
    np.testing.assert_allclose(train, [[0, -1], [0, 1]])
    np.testing.assert_allclose(test, [[1, 0]])


def test_housing_is_what_scikit_learn_documents(real_data: GET) -> None:
    data = load.load("housing", cache=real_data("housing").parent)
    assert data.x_train.shape == (20640, 8) and data.x_test is None
    first = [8.3252, 41.0, 6.98412698, 1.02380952, 322.0, 2.55555556, 37.88, -122.23]
    np.testing.assert_allclose(data.x_train[0], first, rtol=1e-8)
    assert data.y_train[0] == np.float32(4.526) and abs(data.y_train.mean() - 2.06856) < 1e-5


def test_housing_comes_through_scikit_learn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from sklearn import datasets

    requests = []

    def fetch(data_home: str, return_X_y: bool) -> tuple[np.ndarray, np.ndarray]:
        requests.append(data_home)
        return np.arange(16.0).reshape(2, 8) + 0.5, np.array([1.5, 2.5])

    monkeypatch.setattr(datasets, "fetch_california_housing", fetch)
    monkeypatch.setattr(cache, "reach", lambda *_: None)
    with pytest.raises(ValueError, match="housing.npz does not exist; allow the download, or put"):
        load.load("housing", cache=tmp_path, download=False)
    # What was fetched here is not the published set: refused, as a damaged download would be.
    with pytest.raises(ValueError, match="other train records than the published ones"):
        load.load("housing", cache=tmp_path)
    assert len(requests) == 1 and not (tmp_path / "housing.npz").exists()

    def broken(**_: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(datasets, "fetch_california_housing", broken)
    with pytest.raises(ValueError, match="not exist, and no network; put housing.npz"):
        load.load("housing", cache=tmp_path)
