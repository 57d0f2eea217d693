"""Results as files: npz, written beside and linked, with a digest that is checked on reading.

Entries of such a file, readable with NumPy alone:

    header      JSON: seeds, names of the metrics, guarantees, what rows say of each plan, and where
                each array stands in the parameters
    rounds      [E]
    metric_0    [E, S, V], the first name's, and so on
    leaf_0      [S, V, n, ...] parameters, and so on; bfloat16 as the 16-bit integers it is made of
    times       seconds, rounds a second
    digest      SHA-256 of all of it
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _files, _validate
from dpjax.engine import coherence

__all__: list[str] = []

_FORMAT = 2
_KIND = "dpjax result"


def write(
    path: str | os.PathLike[str], header: Mapping[str, Any], arrays: Any, params: Any
) -> Path:
    """Write a result to a new file, whole or not at all, readable by its owner alone.

    Args:
        path: Where to; ``.npz`` is appended where there is no suffix.
        header: What JSON can hold.
        arrays: Arrays by name.
        params: Nested dicts (keyed by texts), lists and tuples of arrays.

    Returns:
        The path.

    Raises:
        ValueError: Where the file exists or cannot be written, or for other containers.
    """
    path = _files.npz(path)
    taken = ValueError(
        f"path is {str(path)!r}, which exists; results are never overwritten, name another"
    )
    if os.path.lexists(path):
        raise taken
    leaves: list[np.ndarray] = []
    tree = _structure(params, leaves)
    kinds = [leaf.dtype.name for leaf in leaves]
    held = {name: np.asarray(array) for name, array in arrays.items()}
    coherence.check(header, held, leaves)
    whole = {"format": _FORMAT, "kind": _KIND, "tree": tree, "dtypes": kinds, **header}
    text = json.dumps(whole, sort_keys=True, allow_nan=False)
    held |= {f"leaf_{i}": _plain(leaf) for i, leaf in enumerate(leaves)}
    entries: dict[str, Any] = {"header": np.array(text), "digest": _digest(text, held), **held}
    with _files.writing("path", path):
        try:
            _files.create(path, lambda file: np.savez(file, **entries), mode=0o600)
        except FileExistsError:
            raise taken from None
    return path


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, np.ndarray], Any]:
    """Return header, arrays and parameters that `write` stored.

    Args:
        path: The file, from `_files.npz`.

    Raises:
        FileNotFoundError: Where there is no such file.
        ValueError: For a truncated, changed or foreign file, or one that contradicts itself.
    """
    held = _files.archive(path)
    text, digest = str(held.pop("header")), str(held.pop("digest"))
    if digest != _digest(text, held):
        raise ValueError("its content was changed")
    header = json.loads(text)
    if header["kind"] != _KIND or header["format"] != _FORMAT:
        raise ValueError(f"it is a {header['kind']} of format {header['format']}")
    kinds = enumerate(header.pop("dtypes"))
    leaves = [_rich(held.pop(f"leaf_{i}"), kind) for i, kind in kinds]
    for array in (*held.values(), *leaves):
        array.flags.writeable = False
    tree = header.pop("tree")
    coherence.check(header, held, leaves)
    used: list[int] = []
    params = _filled(tree, leaves, used)
    if sorted(used) != list(range(len(leaves))):
        raise ValueError(f"its parameters hold {len(leaves)} arrays, its tree names {used}")
    return header, held, params


def _plain(leaf: np.ndarray) -> np.ndarray:
    """A leaf as NumPy alone can read it; narrow floats of models are no numbers to it."""
    if leaf.dtype.kind != "V":
        return leaf
    return np.ascontiguousarray(leaf).view(f"u{leaf.dtype.itemsize}")


def _rich(leaf: np.ndarray, kind: str) -> np.ndarray:
    """The inverse of `_plain`."""
    return leaf if leaf.dtype.name == kind else leaf.view(jnp.dtype(kind))


def _structure(tree: Any, leaves: list[np.ndarray]) -> Any:
    """Where each leaf stands, in lists and dicts that JSON can hold."""
    if tree is None:
        return None
    if type(tree) is dict:
        if not all(type(key) is str for key in tree):
            keys = _validate.shown(list(tree))
            raise ValueError(f"params hold a dict with the keys {keys}; name them by texts")
        return {"dict": {key: _structure(part, leaves) for key, part in tree.items()}}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_structure(part, leaves) for part in tree]}
    if not isinstance(tree, np.ndarray | np.generic | jax.Array):
        raise ValueError(
            f"params hold a {type(tree).__name__}, which a file without code cannot; save "
            "dataclasses.replace(result, params=...) with dicts, lists and tuples of arrays"
        )
    if not (jnp.issubdtype(tree.dtype, jnp.number) or jnp.issubdtype(tree.dtype, jnp.bool_)):
        raise ValueError(
            f"params hold an array of {tree.dtype}, which is no number; save "
            "dataclasses.replace(result, params=...) with arrays of numbers alone, and no keys"
        )
    leaves.append(np.asarray(tree))
    return len(leaves) - 1


def _filled(tree: Any, leaves: list[np.ndarray], used: list[int]) -> Any:
    """The inverse of `_structure`; ``used`` gathers the numbers of leaves."""
    if tree is None:
        return None
    if type(tree) is int and 0 <= tree < len(leaves):
        used.append(tree)
        return leaves[tree]
    ((kind, parts),) = tree.items()
    if kind == "dict":
        return {key: _filled(part, leaves, used) for key, part in parts.items()}
    return {"list": list, "tuple": tuple}[kind](_filled(part, leaves, used) for part in parts)


def _digest(header: str, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}{array.dtype.str}{array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
