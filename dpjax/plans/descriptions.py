"""A part in plain values that are the same in every process: for fingerprints and identities."""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dpjax import _validate

__all__: list[str] = []

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def described(part: Any, name: str = "config") -> Any:
    """Return a part as plain values, its class among them.

    Guarantee: nothing in it is an address, which would be another in each process, so that a
    run that was stopped could not be told from another one.

    Args:
        part: A frozen dataclass of plain values, arrays, functions and parts; or such a value.
        name: Where it stands, for messages.

    Returns:
        Texts, numbers, lists and dicts. Of a function its name: what it computes is in the
        program's hash, or in the arrays that it made.

    Raises:
        ValueError: For a value whose text holds an address, naming the field.
    """
    if isinstance(part, functools.partial):
        return {
            "partial": described(part.func, f"{name}.func"),
            "arguments": described(part.args, f"{name}.args"),
            "keywords": described(part.keywords, f"{name}.keywords"),
        }
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = {
            field.name: described(getattr(part, field.name), f"{name}.{field.name}")
            for field in dataclasses.fields(part)
        }
        return {"part": type(part).__name__} | fields
    if isinstance(part, tuple | list):
        return [described(one, f"{name}[{place}]") for place, one in enumerate(part)]
    if isinstance(part, Mapping):
        pairs = {str(key): described(one, f"{name}[{key!r}]") for key, one in part.items()}
        return dict(sorted(pairs.items()))
    if isinstance(part, np.ndarray) and part.dtype.hasobject:
        return described(part.tolist(), name)
    if part is None or type(part) in (str, bool, int, float):
        return part
    return _named(part, name)


def _named(part: Any, name: str) -> str:
    """The text of a function, an array or another value."""
    if isinstance(part, np.ndarray | jax.Array):
        array = np.asarray(part)
        content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        return f"{array.dtype.name}{array.shape} {content}"
    if callable(part):
        # An object that is called stands for what it computes, as a function does.
        kind = part if hasattr(part, "__qualname__") else type(part)
        return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}"
    text = repr(part)
    if _ADDRESS.search(text):
        raise ValueError(
            f"{name} is {_validate.shown(part)}, whose text holds an address, another in each "
            "process: a run with it could never resume; make its class a frozen dataclass, or "
            "give it a __repr__ of its values"
        )
    return text
