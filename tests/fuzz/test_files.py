"""Mutated files: each reader gives a ValueError that names the file, or what was written.

Bytes are flipped, cut, removed, repeated and inserted, archives' entries and JSON's values
exchanged. Where a file has a checksum, no changed content may come back.
"""

import gzip
import json
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from dpjax.contrib import texts, tokenizer, weights
from dpjax.data import canonical, load
from dpjax.engine.keys import KeyFile
from dpjax.mechanism import design
from dpjax.mechanism.factorization import Solution, minimize_trace
from dpjax.results import records
from dpjax.topology import graphs, mixing

FINGERPRINT = "a" * 64


class Kind(NamedTuple):
    """A kind of file: how one is made, how it is read, and what reading must give back.

    ``same`` compares what a mutated file gave with the original, where a checksum promises it.
    """

    name: str
    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    same: Callable[[Any, Any], bool] | None = None


def make_design(path: Path) -> None:
    matrix = mixing.metropolis_hastings(graphs.ring(5))
    design.Design.whisper(matrix, 0.5).save(path)


def same_fields(a: Any, b: Any) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in a.__dict__)


def make_records(path: Path) -> None:
    rows = [
        {"design": "whisper", "round": 10 * k, "loss": 0.5 / (k + 1), "list": [1, 2.5]}
        for k in range(5)
    ]
    rows[2] |= {"guarantee": {"epsilon": 4.0}, "loss": float("nan")}
    records.write(path, rows, {"command": "none", "experiment": "fuzz"})


def make_data(path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 3)).astype(np.float32)
    y = rng.integers(0, 2, 12)
    canonical.write_archive(path, {"x_train": x, "y_train": y, "x_test": x[:4], "y_test": y[:4]})


def same_arrays(a: Any, b: Any) -> bool:
    return a[0].keys() == b[0].keys() and all(np.array_equal(a[0][k], b[0][k]) for k in a[0])


def make_libsvm(path: Path) -> None:
    path.write_text("".join(f"{1 - 2 * (k % 2)} 1:{k} 3:.5 7:1e-3 # no {k}\n" for k in range(9)))


def same_records(a: Any, b: Any) -> bool:
    return bool(a.sha256 == b.sha256)


class Letters:
    """A tokenizer: the codes of letters."""

    def encode(self, value: Any, length: int, seconds: Any = None) -> np.ndarray:
        return np.array([[ord(label) for label in text[:length].ljust(length)] for text in value])


def make_glue(path: Path) -> None:
    content = "sentence\tlabel\n" + "".join(f"text {k}, é\t{k % 2}\n" for k in range(9))
    for name in ("train", "dev"):
        packed = gzip.compress(content.encode(), mtime=0)
        if path.suffix == ".gz":
            (path.parent / f"{name}.tsv.gz").write_bytes(packed)
        else:
            (path.parent / f"{name}.tsv").write_text(content)


def read_glue(path: Path) -> Any:
    return texts.read_task("sst2", Letters(), 9, folder=path.parent, download=False)


def make_tokenizer(path: Path) -> None:
    """Files of 256 bytes and two merges, RoBERTa's or, compressed, GPT-2's."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = [*map(chr, own), *map(chr, range(256, 324)), "lo", "low"]
    merges = "#version: 0.2\nl o\nlo w\n"
    if path.suffix == ".gz":
        numbers = {token: number for number, token in enumerate(tokens)} | {"<|endoftext|>": 258}
        contents = {
            "encoder.json.gz": json.dumps(numbers), "vocab.bpe.gz": merges,
            "dict.txt.gz": "".join(f"{number} 1\n" for number in reversed(range(259))),
        }  # fmt: skip
        for name, content in contents.items():
            (path.parent / name).write_bytes(gzip.compress(content.encode(), mtime=0))
        return
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    numbers = {token: number for number, token in enumerate([*special, *tokens, "<mask>"])}
    (path.parent / "vocab.json").write_text(json.dumps(numbers))
    (path.parent / "merges.txt").write_text(merges)


def read_tokenizer(path: Path) -> tokenizer.Tokenizer:
    result = tokenizer.load(path.parent)
    assert (
        len(result.vocabulary)
        == len(set(result.vocabulary.values()))
        == 258 + ("<|endoftext|>" in result.vocabulary)
    )
    assert len(result.merges) == 2
    return result


def make_weights(path: Path) -> None:
    raw = np.arange(12, dtype=np.float32).tobytes()
    head = {"a.weight": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, len(raw)]}}
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw)


def make_key(path: Path) -> None:
    KeyFile(path, FINGERPRINT).create()


def read_key(path: Path) -> Any:
    import jax

    path.chmod(0o600)
    return np.asarray(jax.random.key_data(KeyFile(path, FINGERPRINT).key()))


KINDS = [
    Kind("design.npz", make_design, design.Design.load, same_fields),
    Kind(
        "solution.npz",
        lambda path: minimize_trace(np.diag([1.0, 2.0, 3.0])).save(path) and None,
        Solution.load,
        same_fields,
    ),
    Kind("records.jsonl", make_records, records.read, lambda a, b: a.equals(b)),
    Kind("data.npz", make_data, canonical.read_archive, same_arrays),
    Kind("data.libsvm", make_libsvm, lambda path: load.libsvm(path, 7)),
    Kind("train.tsv", make_glue, read_glue),
    Kind("dev.tsv.gz", make_glue, read_glue, same_records),
    *(Kind(name, make_tokenizer, read_tokenizer) for name in ("vocab.json", "merges.txt")),
    *(
        Kind(f"{name}.gz", make_tokenizer, read_tokenizer, same_fields)
        for name in ("encoder.json", "vocab.bpe", "dict.txt")
    ),
    Kind("own.safetensors", make_weights, weights.read_tensors),
    Kind(
        "graph.edges", lambda path: path.write_text("a b\nb c # x\n c,a\n") and None, graphs.parse
    ),
    Kind("noise.key", make_key, read_key, np.array_equal),
]


def mutate(content: bytes, rng: np.random.Generator) -> bytes:
    """One random change of a file's bytes."""
    data = bytearray(content)
    position = int(rng.integers(len(data)))
    length = int(rng.integers(1, 40))
    kind = rng.integers(6)
    if kind == 0:
        for _ in range(int(rng.integers(1, 9))):
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del data[position:]
    elif kind == 2:
        del data[position : position + length]
    elif kind == 3:
        data[position:position] = data[position : position + length] * int(rng.integers(1, 5))
    elif kind == 4:
        data[position:position] = rng.bytes(length)
    else:
        other = int(rng.integers(len(data)))
        data[position : position + length], data[other : other + length] = (
            data[other : other + length], data[position : position + length],
        )  # fmt: skip
    return bytes(data)


def exchange(path: Path, content: bytes, rng: np.random.Generator) -> bytes:
    """Exchange the entries of an archive, or JSON's values for values of other kinds."""
    if path.suffix == ".npz":
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            entries = [archive.read(name) for name in names]
        order = rng.permutation(len(names))
        with zipfile.ZipFile(path, "w") as archive:
            for name, index in zip(names, order, strict=True):
                if rng.random() < 0.9:
                    archive.writestr(name, entries[index])
        return path.read_bytes()
    values = [b"null", b"[]", b"{}", b'""', b"-1", b"1e999", b"true", b"NaN", b"[[1],2]", b'"x"']
    spots = list(re.finditer(rb"(?<=[:,\[ ])[-\w.\"]+(?=[,\]} \n])", content))
    if not spots:
        return mutate(content, rng)
    spot = spots[int(rng.integers(len(spots)))]
    return content[: spot.start()] + values[int(rng.integers(10))] + content[spot.end() :]


def check(kind: Kind, folder: Path, count: int) -> None:
    rng = np.random.default_rng(len(kind.name))
    path = folder / kind.name
    kind.make(path)
    content = path.read_bytes()
    truth = kind.read(path)
    for number in range(count):
        path.write_bytes(content)
        changed = exchange(path, content, rng) if number % 4 == 3 else mutate(content, rng)
        path.write_bytes(changed)
        try:
            frame = kind.read(path)
        except ValueError as error:
            assert kind.name in str(error) or str(folder) in str(error), (error, changed)
            continue
        if kind.same is not None and number % 4 != 3:
            assert kind.same(frame, truth), changed


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_mutated_files_are_refused_or_read(kind: Kind, tmp_path: Path) -> None:
    check(kind, tmp_path, 16)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_thousands_of_mutated_files(kind: Kind, tmp_path: Path) -> None:
    check(kind, tmp_path, 650)


def test_changed_design_with_its_old_digest_is_refused(tmp_path: Path) -> None:
    """Also where the archive itself is whole: zip's own checksums are no protection from edits."""
    path = tmp_path / "design.npz"
    make_design(path)
    with np.load(path) as file:
        held = {name: file[name] for name in file.files}
    np.savez(path, **held)
    design.Design.load(path)
    np.savez(path, **(held | {"covariance": held["covariance"] * 0.99}))
    with pytest.raises(ValueError, match="content was changed"):
        design.Design.load(path)


def test_records_with_other_cells_are_read_or_refused(tmp_path: Path) -> None:
    """What rows hold is theirs; the metadata's own fields are checked."""
    path = tmp_path / "records.jsonl"
    make_records(path)
    head, *rows = path.read_text().splitlines()
    for field, value in (("rows", True), ("rows", -1), ("guarantees", [3]), ("guarantees", None)):
        changed = json.loads(head)
        changed["metadata"][field] = value
        path.write_text("\n".join([json.dumps(changed), *rows]) + "\n")
        with pytest.raises(ValueError, match="records"):
            records.read(path)
