"""Records come back as written, are never overwritten, and are refused when damaged."""

import gzip
import json
import math
import os
import re

import jax.numpy as jnp
import numpy as np
import pytest

from _common import archives
from dpjax.accounting.guarantee import Guarantee
from dpjax.results import records

ROWS = [
    {"design": "whisper", "seed": 0, "epsilon": 10.0, "test_loss": 0.1 + 0.2, "unit": "agent"},
    {"design": "none", "seed": 1, "epsilon": math.inf, "test_loss": math.nan, "unit": "ü|\n"},
    {"design": "none", "seed": 2, "epsilon": -math.inf, "test_loss": 1e-300, "unit": ""},
]


def private(epsilon=10.0):
    return Guarantee.of(
        epsilon=epsilon, delta=1e-5, mu=0.5, relation="replace_agent", attacker="outsider",
        rounds=100, clip_norm=0.1, accountant="gdp", release=False,
    )  # fmt: skip


def same(value, other):
    return value == other or (value != value and other != other)


def test_rows_and_metadata_come_back(tmp_path):
    path = tmp_path / "a" / "b" / "run.jsonl"
    options = {"command": "python x.py", "config": {"epsilon": math.inf, "steps": (1, 2)}}
    assert records.write(path, ROWS, options) == path
    frame = records.read(path)
    assert list(frame.columns) == list(ROWS[0])
    for row, stored in zip(ROWS, frame.to_dict("records"), strict=True):
        assert all(same(row[name], stored[name]) for name in row)
    stored = records.read_metadata(path)
    assert stored["command"] == "python x.py"
    assert stored["config"] == {"epsilon": math.inf, "steps": [1, 2]}
    assert stored["rows"] == 3


def test_file_is_strict_json_lines(tmp_path):
    path = records.write(tmp_path / "run.jsonl", ROWS, {})

    def refuse(constant):
        raise AssertionError(constant)

    lines = [
        json.loads(line, parse_constant=refuse)
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]
    ]
    assert list(lines[0]) == ["metadata"] and len(lines) == 4
    assert lines[2]["epsilon"] == "inf" and lines[2]["test_loss"] == "nan"


def test_numpy_and_jax_values_are_taken(tmp_path):
    row = {
        "a": np.float32(0.1), "b": np.int64(3), "c": np.bool_(True), "d": np.float64("inf"),
        "e": np.arange(3), "f": jnp.float32(0.5), "g": None, "h": tmp_path, "i": np.str_("x"),
        "j": np.array([np.nan, 1.0]),
    }  # fmt: skip
    path = records.write(tmp_path / "run.jsonl", [row], {})
    (line,) = path.read_text().splitlines()[1:]
    assert json.loads(line) == {
        "a": float(np.float32(0.1)), "b": 3, "c": True, "d": "inf", "e": [0, 1, 2], "f": 0.5,
        "g": None, "h": str(tmp_path), "i": "x", "j": ["nan", 1.0],
    }  # fmt: skip
    stored = records.read(path).to_dict("records")[0]
    assert stored["d"] == math.inf and math.isnan(stored["j"][0])


def test_what_json_cannot_hold_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"rows\[1\].loss is a complex"):
        records.write(tmp_path / "run.jsonl", [{"loss": 1.0}, {"loss": 1j}], {})
    with pytest.raises(ValueError, match="metadata.when is a object"):
        records.write(tmp_path / "run.jsonl", [], {"when": object()})
    with pytest.raises(ValueError, match="rows, which write adds"):
        records.write(tmp_path / "run.jsonl", [], {"rows": 3})
    with pytest.raises(ValueError, match="guarantee is 7"):
        records.write(tmp_path / "run.jsonl", [{"guarantee": 7}], {})
    assert not list(tmp_path.iterdir())


def test_guarantees_are_stored_once_and_put_back(tmp_path):
    kinds = [private().to_dict(), Guarantee.none(100).to_dict(), None]
    rows = [{"round": i, "guarantee": kinds[i % 3]} for i in range(300)]
    path = records.write(tmp_path / "run.jsonl", rows, {})
    assert path.read_text().count("replace_agent") == 1
    assert len(records.read_metadata(path)["guarantees"]) == 2
    frame = records.read(path)
    assert list(frame["guarantee"]) == [row["guarantee"] for row in rows]
    assert Guarantee.from_dict(frame["guarantee"][0]) == private()
    assert Guarantee.from_dict(frame["guarantee"][1]) == Guarantee.none(100)


def test_existing_file_is_never_overwritten(tmp_path):
    path = records.write(tmp_path / "run.jsonl", ROWS, {})
    before = path.read_bytes()
    with pytest.raises(ValueError, match="exists; records are never overwritten"):
        records.write(path, [], {})
    assert path.read_bytes() == before


@pytest.mark.parametrize("links", [True, False])
def test_file_that_appears_meanwhile_is_kept(tmp_path, monkeypatch, links):
    path = tmp_path / "run.jsonl"

    def rows():
        yield ROWS[0]
        path.write_text("another's")  # between the check and the writing

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(ValueError, match="never overwritten"):
        records.write(path, rows(), {})
    assert path.read_text() == "another's"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.jsonl"]


def no_links(*_):
    raise PermissionError(1, "no hard links here")


def test_file_systems_without_links_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", no_links)
    path = records.write(tmp_path / "run.jsonl", ROWS, {})
    assert len(records.read(path)) == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize("step", ["fsync", "link"])
def test_crash_half_way_leaves_nothing(tmp_path, monkeypatch, step):
    def crash(*_):
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, step, crash)
    with pytest.raises(ValueError, match="cannot be written .no space left.; make room"):
        records.write(tmp_path / "run.jsonl", ROWS, {})
    assert not list(tmp_path.iterdir())


def test_folders_and_lists_are_merged_in_order(tmp_path):
    for name in ("b/2", "a", "b/1"):
        records.write(tmp_path / f"{name}.jsonl", [{"name": name}], {"experiment": f"of {name}"})
    (tmp_path / ".c.jsonl.tmp").write_text("unfinished")
    frame = records.read(tmp_path)
    assert list(frame["name"]) == ["a", "b/1", "b/2"]
    assert list(frame["experiment"]) == ["of a", "of b/1", "of b/2"]
    assert list(frame.columns) == ["experiment", "name"]
    selection = records.read([tmp_path / "b", tmp_path / "a.jsonl"])
    assert list(selection["name"]) == ["b/1", "b/2", "a"]
    assert list(selection.index) == [0, 1, 2]


def test_nothing_to_read_is_error(tmp_path):
    for arguments, message in (
        (tmp_path / "none.jsonl", "not there"),
        (tmp_path, "without"),
        ([], "at least one"),
    ):
        with pytest.raises(ValueError, match=message):
            records.read(arguments)
    with pytest.raises(ValueError, match="without"):
        records.read_metadata(tmp_path)


def test_every_truncation_is_noticed(tmp_path):
    rows = [{"seed": i, "guarantee": private().to_dict()} for i in range(3)]
    complete = records.write(tmp_path / "run.jsonl", rows, {}).read_bytes()
    cut = tmp_path / "cut.jsonl"
    for length in range(len(complete)):
        cut.write_bytes(complete[:length])
        with pytest.raises(ValueError, match=r"cut.jsonl, line \d"):
            records.read(cut)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: ["a,b\n", *lines[1:]], 1),
        (lambda lines: ['{"a": 1}\n', *lines[1:]], 1),
        (lambda lines: ['{"metadata": 3}\n', *lines[1:]], 1),
        (lambda lines: [lines[0], "[1]\n", *lines[2:]], 2),
        (lambda lines: [lines[0], lines[1].replace("0", "NaN", 1), *lines[2:]], 2),
        (lambda lines: [*lines[:2], "\n", *lines[3:]], 3),
        (lambda lines: [*lines[:2], "caf\xe9\n", *lines[3:]], 3),
        (lambda lines: [*lines[:3], lines[3].replace('"guarantee":0', '"guarantee":1')], 4),
        (lambda lines: [*lines, lines[-1]], 5),
    ],
)
def test_foreign_lines_are_refused_by_file_and_line(tmp_path, change, line):
    rows = [{"seed": i, "guarantee": private().to_dict()} for i in range(3)]
    path = records.write(tmp_path / "run.jsonl", rows, {})
    lines = path.read_text().splitlines(keepends=True)
    other = tmp_path / "other.jsonl"
    other.write_bytes("".join(change(lines)).encode("latin-1"))
    with pytest.raises(ValueError, match=rf"other.jsonl, line {line}\b"):
        records.read(other)


@pytest.mark.parametrize("read", [records.read, records.read_metadata])
def test_no_changed_digit_is_read(tmp_path, read):
    """Metadata, rows and guarantees are those that were written, or none."""
    rows = [{"seed": i, "loss": 0.25, "guarantee": private().to_dict()} for i in range(2)]
    path = records.write(tmp_path / "run.jsonl", rows, {"config": {"epsilon": 3.5}})
    content = path.read_bytes()
    assert read(path) is not None
    digits = [place for place, letter in enumerate(content) if chr(letter).isdigit()]
    other = tmp_path / "other.jsonl"
    for place in digits:
        changed = bytearray(content)
        changed[place] = ord("7") if changed[place] != ord("7") else ord("6")
        other.write_bytes(changed)
        with pytest.raises(ValueError, match=r"other.jsonl, lines? \d"):
            read(other)
    for text in ("1e999", r'"\ud800"'):
        other.write_bytes(content.replace(b"3.5", text.encode()))
        with pytest.raises(ValueError, match="other.jsonl, lines 1 to 3, were changed"):
            read(other)
    # Lines in another order are changed, too.
    head, first, second = content.splitlines(keepends=True)
    other.write_bytes(head + second + first)
    with pytest.raises(ValueError, match="lines 1 to 3, were changed .*; restore the file"):
        read(other)


@pytest.mark.parametrize("value", ['"digest":null,', ""])
def test_file_that_lost_its_digest_is_refused(tmp_path, value):
    path = records.write(tmp_path / "run.jsonl", ROWS, {})
    other = tmp_path / "other.jsonl"
    other.write_text(re.sub(r',"digest":"\w+"', value and "," + value[:-1], path.read_text()))
    with pytest.raises(ValueError, match="other.jsonl, lines 1 to 4, were changed"):
        records.read(other)


def test_files_of_earlier_versions_have_no_digest_and_are_read(tmp_path):
    head = {"metadata": {"command": "before", "format": 1, "rows": 1, "guarantees": []}}
    path = tmp_path / "before.jsonl"
    path.write_text(f'{json.dumps(head)}\n{{"loss":0.5}}\n')
    assert records.read(path)["loss"].tolist() == [0.5]
    assert records.read_metadata(path) == head["metadata"]


def test_changed_file_in_archive_is_named(tmp_path):
    path = records.write(tmp_path / "a.jsonl", [{"x": 99}], {})
    archive = tmp_path / "all.jsonl.gz"
    archives.pack(archive, [path])
    text = gzip.decompress(archive.read_bytes()).replace(b'"x":99', b'"x":98')
    archive.write_bytes(gzip.compress(text))
    with pytest.raises(ValueError, match="all.jsonl.gz, lines 1 to 2 of 'a', were changed"):
        records.read(archive)


@pytest.mark.parametrize("form", [1, 2])
@pytest.mark.parametrize("read", [records.read, records.read_metadata])
def test_files_of_archive_that_change_names_are_refused(tmp_path, read, form):
    paths = [records.write(tmp_path / f"{name}.jsonl", [{"of": name}], {}) for name in "ab"]
    if form == 1:
        for path in paths:
            before = path.read_text().replace('"format":2', '"format":1')
            path.write_text(re.sub(r',"digest":"\w+"', "", before))
    texts = [path.read_bytes() for path in paths]
    archive = tmp_path / "all.jsonl.gz"
    archives.pack(archive, paths)
    assert read(archive, "b") is not None
    copies = archives.unpack(archive, tmp_path / "copies")
    assert [copy.read_bytes() for copy in copies] == texts
    names = {b'"file":"a"': b'"file":"b"', b'"file":"b"': b'"file":"a"'}
    text = gzip.decompress(archive.read_bytes())
    swapped = re.sub(b'"file":"."', lambda match: names[match[0]], text)
    archive.write_bytes(gzip.compress(swapped))
    with pytest.raises(ValueError, match="all.jsonl.gz, lines 1 to 2 of 'b', were changed"):
        read(archive)


def test_archive_with_file_twice_is_refused(tmp_path):
    path = records.write(tmp_path / "a.jsonl", [{"of": 1}], {})
    archive = tmp_path / "all.jsonl.gz"
    archives.pack(archive, [path])
    archive.write_bytes(gzip.compress(2 * gzip.decompress(archive.read_bytes())))
    with pytest.raises(ValueError, match="all.jsonl.gz holds the file 'a' twice; get the"):
        records.read(archive)


def test_another_format_is_refused(tmp_path):
    path = records.write(tmp_path / "run.jsonl", [], {})
    other = tmp_path / "other.jsonl"
    other.write_text(path.read_text().replace('"format":2', '"format":3'))
    with pytest.raises(ValueError, match="format is 3"):
        records.read_metadata(other)


def test_metadata_says_what_ran_where():
    metadata = records.metadata(command="python x.py", seed=(0, 1), note="quick")
    assert (
        metadata["command"] == "python x.py"
        and metadata["seed"] == [0, 1]
        and metadata["note"] == "quick"
    )
    assert set(metadata["versions"]) == {
        "python",
        "dpjax",
        "jax",
        "jaxlib",
        "numpy",
        "optax",
        "flax",
    }
    assert all(metadata["versions"].values())
    assert metadata["device"]["count"] >= 1 and metadata["device"]["kind"]
    assert metadata["date"].endswith("Z") and len(metadata["date"]) == 20
    assert (metadata["commit"] is None) == (metadata["dirty"] is None)
    json.dumps(metadata, allow_nan=False)


def test_metadata_is_made_where_git_is_missing(monkeypatch):
    monkeypatch.setenv("PATH", "")
    metadata = records.metadata()
    assert metadata["commit"] is None and metadata["dirty"] is None and metadata["seed"] is None


def test_archive_holds_folder_s_files_as_they_were(tmp_path):
    paths = [
        records.write(tmp_path / f"{name}.jsonl", [{"name": name, "x": x} for x in range(3)], {})
        for name in ("b", "a_1", "a_2")
    ]
    archive = tmp_path / "all.jsonl.gz"
    assert archives.pack(archive, paths) == []
    content = archive.read_bytes()
    assert records.read(archive)["name"].tolist() == [n for n in ("a_1", "a_2", "b") for _ in "012"]
    assert set(records.read(archive, "a_*")["name"]) == {"a_1", "a_2"}
    assert records.read_metadata(archive, "b")["rows"] == 3
    with pytest.raises(ValueError, match="file is 'c'"):
        records.read(archive, "c")
    copies = archives.unpack(archive, tmp_path / "copies")
    assert {p.name: p.read_bytes() for p in copies} == {p.name: p.read_bytes() for p in paths}
    with pytest.raises(ValueError, match="exists"):
        archives.unpack(archive, tmp_path / "copies")
    # A file that differs is kept, unless asked.
    copies[0].unlink()
    records.write(copies[0], [{"name": "new"}], {})
    assert archives.pack(archive, copies) == [copies[0].name] and archive.read_bytes() == content
    assert archives.pack(archive, copies, overwrite=True) == []
    assert "new" in set(records.read(archive)["name"]) and len(records.read(archive)) == 7


def test_damaged_archive_is_refused_by_name(tmp_path):
    path = records.write(tmp_path / "a.jsonl", [{"x": x} for x in range(99)], {})
    archive = tmp_path / "all.jsonl.gz"
    archives.pack(archive, [path])
    complete = archive.read_bytes()
    for damaged in (complete[:-9], complete[:40] + b"!" + complete[41:], b"", b"no archive"):
        archive.write_bytes(damaged)
        with pytest.raises(ValueError, match="all.jsonl.gz"):
            records.read(archive)
    archive.write_bytes(gzip.compress(path.read_bytes()[:-5]))
    with pytest.raises(ValueError, match="truncated"):
        records.read(archive)


def test_compressed_file_is_read_as_it_was_written(tmp_path):
    path = records.write(tmp_path / "a.jsonl.gz", [{"x": 1.5}], {"seed": 3})
    assert records.read(path)["x"].tolist() == [1.5] and records.read_metadata(path)["seed"] == 3


def test_old_columns_are_read_by_their_new_names(tmp_path):
    old = [{"algorithm": "whisper", "budget": "gdp", "loss": 0.5}]
    own = [{"algorithm": "tracking", "loss": 0.5}]
    for name, rows in (("old", old), ("own", own)):
        records.write(tmp_path / f"{name}.jsonl", rows, {})
    assert list(records.read(tmp_path, "old").columns) == ["design", "accountant", "loss"]
    assert list(records.read(tmp_path, "own").columns) == ["algorithm", "loss"]
