"""Archives of records: the files of one experiment, one after the other, sorted and compressed."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

from dpjax import _files
from dpjax.results import records

__all__ = ["pack", "unpack"]


def pack(archive: Path, files: Iterable[Path], overwrite: bool = False) -> list[str]:
    """Add files of records to an archive, written anew as a whole; equal files make equal bytes.

    Args:
        archive: The archive, ``*.jsonl.gz``.
        files: Files of records.
        overwrite: Whether a file takes the place of one of its name that differs.

    Returns:
        Names of files whose rows differ from the archive's, which were left as they are.

    Raises:
        ValueError: For a truncated or foreign file, or an archive that cannot be written.
    """
    texts = _texts(archive) if archive.exists() else {}
    differing = []
    for path in files:
        records.read(path)
        text = path.read_bytes()
        stored = texts.setdefault(path.stem, text)
        # Metadata hold the date and seconds of a run, which differ between equal results.
        same_rows = stored.partition(b"\n")[2] == text.partition(b"\n")[2]
        if overwrite:
            texts[path.stem] = text
        elif not same_rows:
            differing.append(path.name)
    members = [_renamed(texts[name], name) for name in sorted(texts)]
    content = gzip.compress(b"".join(members), mtime=0)
    with _files.writing("archive", archive):
        _files.replace(archive, content)
    return differing


def unpack(archive: Path, folder: Path) -> list[Path]:
    """Write the files of an archive into a folder, as they were, over none that is there."""
    paths = []
    for name, text in _texts(archive).items():
        paths.append(folder / f"{name}.jsonl")
        with _files.writing("folder", paths[-1]):
            _files.create(paths[-1], text)
    return paths


def _renamed(text: bytes, name: str | None = None) -> bytes:
    """A file's text as an archive holds it, or without a name as it was before, with its digest."""
    first, _, rows = text.partition(b"\n")
    head = json.loads(first)["metadata"]
    head.pop("file", None)
    if name is not None:
        head["file"] = name
    if name is None and head["format"] == 1:
        # Files of format 1 have a digest in archives alone.
        head.pop("digest", None)
    else:
        head["digest"] = records.digest(head, rows)
    return records.dump({"metadata": head}).encode() + b"\n" + rows


def _texts(archive: Path) -> dict[str, bytes]:
    """Each file's text as it was before it was packed, by name."""
    records.read(archive)
    lines = gzip.decompress(archive.read_bytes()).splitlines(keepends=True)
    texts = {}
    while lines:
        head = json.loads(lines[0])["metadata"]
        texts[head["file"]] = _renamed(b"".join(lines[: head["rows"] + 1]))
        lines = lines[head["rows"] + 1 :]
    return texts
