"""Records: one immutable file of JSON lines a run, metadata first, merged on reading.

The first line is ``{"metadata": {...}}``, every other line a row. JSON has no infinity and no
NaN: they are written as the strings "inf", "-inf" and "nan" and read as floats again. A row's
``guarantee`` is stored once in the metadata, however many rows share it. The metadata also hold the
SHA-256 of the file, which reading compares: it finds damage, and is nobody's signature. Files of
format 1 have none.

An archive, ``*.jsonl.gz``, holds the files of a folder one after the other, sorted by name and
compressed; each one's metadata has its name as ``file``, which its digest there covers.
"""

import contextlib
import datetime
import fnmatch
import gzip
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata as packages
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from dpjax import _files

if TYPE_CHECKING:
    import pandas

Cell: TypeAlias = "str | float | Sequence[Cell] | Mapping[str, Cell] | None"
"""A plain value: None, text, a number, or lists and dicts of these."""
# Readers know what stands in which column.
Row: TypeAlias = dict[str, Any]
Columns: TypeAlias = Mapping[str, object]
Rows: TypeAlias = list[Row]
"""Tidy rows: columns by name."""
Paths: TypeAlias = _files.PathLike | Iterable[_files.PathLike]
"""A file of records, an archive, a folder, or several of these."""

__all__ = ["digest", "dump", "metadata", "read", "read_metadata", "write"]

_FORMATS = (1, 2)
"""Formats that are read, of which the last is written."""
_RESERVED = ("format", "rows", "guarantees", "file", "digest")
FORMER = {"algorithm": "design", "budget": "accountant"}
"""Columns of a result by their former names, which files of before have."""
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_VERSIONS = ("dpjax", "jax", "jaxlib", "numpy", "optax", "flax")


def write(
    path: _files.PathLike,
    rows: Iterable[Columns],
    metadata: Columns,
) -> Path:
    """Write rows to a new file, whole or not at all.

    Args:
        path: The file, compressed where its name ends in ``.gz``; its folder is made.
        rows: Tidy rows: column name -> plain value, NumPy scalar or array, list or dict. A
            ``guarantee`` is a dict (or None).
        metadata: What `metadata` returned, and more; plain values. ``format``, ``rows``,
            ``guarantees`` and ``digest`` are added here.

    Returns:
        The path.

    Raises:
        ValueError: If the file exists or cannot be written, or for a value that JSON cannot hold.

    Example:
        >>> from dpjax.results import records
        >>> rows = [{"seed": 0, "loss": 0.5}, {"seed": 1, "loss": float("inf")}]
        >>> path = records.write("some.jsonl", rows, {"command": "by hand"})
        >>> records.read(path)["loss"].tolist(), records.read_metadata(path)["rows"]
        ([0.5, inf], 2)
    """
    path = Path(path)
    reserved = [name for name in _RESERVED if name in metadata]
    if reserved:
        raise ValueError(f"metadata holds {', '.join(reserved)}, which write adds; rename them")
    numbers: dict[str, int] = {}
    lines = []
    for count, row in enumerate(rows):
        plain = {str(name): _plain(f"rows[{count}].{name}", row[name]) for name in row}
        # Rows of a run share one guarantee, which is written once, in the head.
        guarantee = plain.get("guarantee")
        if isinstance(guarantee, dict):
            plain["guarantee"] = numbers.setdefault(dump(guarantee), len(numbers))
        elif guarantee is not None:
            raise ValueError(
                f"rows[{count}].guarantee is {guarantee!r}; give its to_dict() or None"
            )
        lines.append(dump(plain))
    head = {name: _plain(f"metadata.{name}", value) for name, value in metadata.items()}
    guarantees = list(map(json.loads, numbers))
    head |= {"format": _FORMATS[-1], "rows": len(lines), "guarantees": guarantees}
    stored = "".join(f"{line}\n" for line in lines).encode()
    # The digest covers the head as well, where guarantees stand.
    head["digest"] = digest(head, stored)
    content = f"{dump({'metadata': head})}\n".encode() + stored
    with _files.writing("path", path):
        if path.suffix == ".gz":
            content = gzip.compress(content, mtime=0)
        try:
            _files.create(path, content)
        except FileExistsError:
            raise ValueError(
                f"path is {str(path)!r}, which exists; records are never overwritten, name another"
            ) from None
    return path


def read(paths: Paths, file: str = "*") -> "pandas.DataFrame":
    """Read the rows of one file, of a folder's files or of several of either.

    Args:
        paths: Files, archives, or folders whose ``*.jsonl`` and ``*.jsonl.gz`` are read,
            subfolders' included.
        file: The files to read, in archives too: a name, or a pattern such as ``a9a_*``.

    Returns:
        All rows, in the order of the files' names within a folder. ``guarantee`` holds dicts as
        written. Of the metadata only ``experiment`` becomes a column, where rows lack it. Rows of
        older results have ``algorithm`` and ``budget``, which become ``design`` and ``accountant``.

    Raises:
        ValueError: If nothing is found, or naming the file and line of a truncated, changed or
            foreign one.

    Example:
        >>> from dpjax.results import records
        >>> path = records.write("run.jsonl", [{"seed": 0, "loss": 0.5}], {"command": "by hand"})
        >>> records.read(path)["loss"].tolist()
        [0.5]
    """
    import pandas

    rows = []
    for path, head, lines in _files_in(paths, file):
        rows += _rows(path, head, lines)
    return pandas.DataFrame(rows)


def read_metadata(path: Paths, file: str = "*") -> Row:
    """Read a file's metadata alone.

    Args:
        path: A file of records, an archive, a folder, or several, whose first file is read.
        file: Which file's, in archives too; else the first one's.

    Returns:
        What was given to `write`, and ``format``, ``rows`` (their number) and ``guarantees``.

    Raises:
        ValueError: For a missing, changed or foreign file.

    Example:
        >>> from dpjax.results import records
        >>> path = records.write("other.jsonl", [{"seed": 0, "loss": 0.5}], {"command": "by hand"})
        >>> records.read_metadata(path)["command"]
        'by hand'
    """
    file_path, head, lines = next(_files_in(path, file))
    _check_digest(file_path, lines)
    return head


def metadata(
    command: str | None = None, seed: int | Sequence[int] | None = None, **extra: Cell
) -> Row:
    """What is to be known of a run besides its rows.

    Args:
        command: The command line that made the run.
        seed: Its seed or seeds.
        extra: Further entries.

    Returns:
        command, seed, versions, device (kind and count), platform, commit and dirty (None outside
        a checkout), date (UTC), and the extra entries.

    Example:
        >>> from dpjax.results import records
        >>> about = records.metadata("python train.py", seed=0)
        >>> about["command"], about["seed"]
        ('python train.py', 0)
    """
    import jax

    # Timings and last bits depend on the device.
    devices = jax.devices()
    moment = datetime.datetime.now(datetime.UTC)
    return {
        "command": command,
        "seed": seed if isinstance(seed, int | None) else list(seed),
        "versions": {"python": platform.python_version()} | {n: _version(n) for n in _VERSIONS},
        "device": {"kind": devices[0].device_kind, "count": len(devices)},
        "platform": {
            "backend": devices[0].platform,
            "system": f"{platform.system()} {platform.machine()}",
            "processors": os.cpu_count(),
        },
        **_commit(),
        "date": moment.isoformat(timespec="seconds").replace("+00:00", "Z"),
        **extra,
    }


def _version(name: str) -> str | None:
    with contextlib.suppress(packages.PackageNotFoundError):
        return packages.version(name)
    return None


def _commit() -> Row:
    """The commit that the package's own checkout is at, if it is one."""
    package = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        # No optional locks: a run must not get in the way of other work in the checkout.
        words = ["git", "-C", str(package), "--no-optional-locks", *arguments]
        answer = subprocess.check_output(words, stderr=subprocess.DEVNULL, timeout=20)
        return os.fsdecode(answer).strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        # Installed inside somebody else's checkout, the package is not what its commit names.
        if shutil.which("git") and Path(git("rev-parse", "--show-toplevel")) == package.parent:
            changed = git("status", "--porcelain", "--untracked-files=no")
            return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    return {"commit": None, "dirty": None}


def _plain(name: str, value: Any) -> Cell:
    """The value as strict JSON can hold it."""
    if hasattr(value, "tolist"):  # NumPy and JAX
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise ValueError(f"{name} is a {type(value).__name__}, {value!r}; give plain values")


def _rich(value: Any) -> Any:
    """The inverse of `_plain`, as far as there is one."""
    if isinstance(value, str):
        return _FLOATS.get(value, value)
    if isinstance(value, list):
        return [_rich(entry) for entry in value]
    if isinstance(value, dict):
        # A guarantee's own form already writes infinity as a string: it stays as it is.
        plain = ("guarantee", "guarantees")
        return {name: value[name] if name in plain else _rich(value[name]) for name in value}
    return value


def dump(value: Cell) -> str:
    """A value as a line of a file holds it.

    Args:
        value: Plain values.

    Example:
        >>> from dpjax.results import records
        >>> records.dump({"seed": 0, "loss": 0.5})
        '{"seed":0,"loss":0.5}'
    """
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def digest(head: Columns, rows: bytes) -> str:
    """The SHA-256 of metadata and rows, as the metadata state it.

    Args:
        head: The metadata; a digest among them is passed over.
        rows: The lines behind them.

    Example:
        >>> from dpjax.results import records
        >>> head = {"format": 2, "rows": 0, "guarantees": []}
        >>> records.digest(head, b"") == records.digest(head | {"digest": "other"}, b"")
        True
    """
    written = {name: head[name] for name in head if name != "digest"}
    # Escapes and infinities, so that every text that was parsed has a digest.
    return hashlib.sha256(json.dumps(written).encode() + b"\n" + rows).hexdigest()


def _check_digest(path: Path, lines: list[bytes]) -> None:
    """Refuse a file whose content is not what was written; its lines are valid."""
    head = json.loads(lines[0])["metadata"]
    if head["format"] == 1 and "digest" not in head:
        return
    rows = b"".join(lines[1:])
    if head.get("digest") != digest(head, rows):
        inside = f" of {head['file']!r}" if "file" in head else ""
        raise ValueError(
            f"{path}, lines 1 to {len(lines)}{inside}, were changed after they were written; "
            "restore the file from a copy, or make it again"
        )


def _parse(path: Path, number: int, line: bytes) -> Row:
    """One line of a file, which must be a whole JSON object."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        if not line.endswith(b"\n"):
            raise ValueError("truncated")
        # Python's parser takes NaN and Infinity, which are no JSON.
        value = json.loads(line.decode(), parse_constant=refuse)
        if not isinstance(value, dict):
            raise ValueError("no JSON object")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}, line {number}, is not a record ({error}); give a whole file that dpjax "
            "wrote, or make it again"
        ) from None
    return value


def _head(path: Path, line: bytes) -> Row:
    """The metadata, checked."""
    head = _parse(path, 1, line).get("metadata")
    head = head if isinstance(head, dict) else {}
    rows = head.get("rows")
    listed = head.get("guarantees")
    guarantees = listed if isinstance(listed, list) else [None]
    valid = (
        type(rows) is int
        and rows >= 0
        and all(isinstance(guarantee, dict) for guarantee in guarantees)
    )
    if not valid:
        raise ValueError(f"{path}, line 1, is not the metadata of records; name a file of records")
    if head.get("format") not in _FORMATS:
        raise ValueError(
            f"{path}, line 1: format is {head.get('format')!r}, this version reads 1 and 2; "
            "read it with the version that wrote it"
        )
    return _rich({name: head[name] for name in head if name != "digest"})


def _files_in(paths: Paths, pattern: str) -> Iterator[tuple[Path, Row, list[bytes]]]:
    """Path, metadata and lines of each file that is wanted, those in archives too."""
    names = []
    read = set()
    for path in _meant(paths):
        content = path.read_bytes()
        packed = path.suffix == ".gz"
        try:
            content = gzip.decompress(content) if packed else content
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is damaged ({error}); get the whole archive again") from None
        lines = content.splitlines(keepends=True) or [b""]
        while lines:
            head = _head(path, lines[0])
            # An archive has one file after the other; the head says where each ends.
            size = head["rows"] + 1 if packed else len(lines)
            file_lines = lines[:size]
            lines = lines[size:]
            name = str(head.get("file", path.stem))
            if "file" in head and (path, name) in read:
                raise ValueError(f"{path} holds the file {name!r} twice; get the archive again")
            read.add((path, name))
            names.append(name)
            if fnmatch.fnmatchcase(name, pattern):
                yield path, head, file_lines
    if not fnmatch.filter(names, pattern):
        # Of many, some from all over: names that begin alike are next to one another.
        sample = ", ".join(sorted(names)[:: max(1, len(names) // 12)])
        raise ValueError(f"file is {pattern!r}, of which there is none; there are {sample}")


def _rows(path: Path, head: Row, lines: list[bytes]) -> Rows:
    """The rows of a file, checked."""
    rows = []
    for number, content in enumerate(lines[1:], start=2):
        rows.append(_current(_rich(_parse(path, number, content))))
    fault = ""
    if len(rows) != head["rows"]:
        fault = f"the last one, and not of {head['rows']} rows"
    number = len(rows) + 1
    for line, row in enumerate(rows, start=2):
        index = row.get("guarantee")
        if type(index) is int and 0 <= index < len(head["guarantees"]):
            # Rows share the dict: captions read each guarantee once.
            row["guarantee"] = head["guarantees"][index]
        elif index is not None:
            fault = f"of guarantee {index!r}, unknown to the metadata"
            number = line
    if fault:
        raise ValueError(
            f"{path}, line {number}, is {fault}; the file was truncated or changed, make it again"
        )
    _check_digest(path, lines)
    return [({"experiment": head["experiment"]} if "experiment" in head else {}) | r for r in rows]


def _current(row: Row) -> Row:
    """A row with a result's columns by the names that they have now."""
    # Other rows have columns of their own, which may be called like one of these.
    if not FORMER.keys() <= row.keys():
        return row
    return {FORMER.get(name, name): value for name, value in row.items()}


def _meant(paths: Paths) -> Iterator[Path]:
    """The files meant, each folder's in the order of their names."""
    files = path_list(paths)
    if not files:
        raise ValueError(f"paths is {paths!r}; name at least one file of records")
    for path in files:
        inside = [path] if os.path.isfile(path) else []
        fault = "which is not there"
        if os.path.isdir(path):
            inside = sorted([*path.rglob("*.jsonl"), *path.rglob("*.jsonl.gz")])
            fault = "a folder without *.jsonl"
        if not inside:
            raise ValueError(f"path is {str(path)!r}, {fault}; name a file of records")
        yield from inside


def path_list(paths: Paths) -> list[Path]:
    """One path, or several, as a list.

    Args:
        paths: Files, archives or folders of records.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    return list(map(Path, paths))
