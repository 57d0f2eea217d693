"""Parts as plain values: what fingerprints of plans and identities of runs are made of."""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dpjax import _validate
from dpjax.plans import compatibility

__all__ = ()

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def described(part: object, name: str = "config") -> Any:
    """Return a part as plain values, its class among them: for fingerprints and identities.

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
    if part is None or type(part) in (str, bool, int, float):
        return part
    if isinstance(part, tuple | list):
        return [described(entry, f"{name}[{index}]") for index, entry in enumerate(part)]
    if isinstance(part, Mapping):
        pairs = {str(key): described(entry, f"{name}[{key!r}]") for key, entry in part.items()}
        # The order of keys says nothing.
        return dict(sorted(pairs.items()))
    if isinstance(part, np.ndarray) and part.dtype.hasobject:
        return described(part.tolist(), name)
    if isinstance(part, functools.partial):
        fields = {"partial": part.func, "arguments": part.args, "keywords": part.keywords}
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        kind = type(part)
        # The package may move its classes between modules.
        fields = {"part": kind.__name__ if compatibility.packaged(kind) else _text(kind, name)}
        fields |= {entry.name: getattr(part, entry.name) for entry in dataclasses.fields(part)}
    else:
        return _text(part, name)
    return {key: described(entry, f"{name}.{key}") for key, entry in fields.items()}


def _text(part: object, name: str) -> str:
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
    if ADDRESS.search(text):
        raise ValueError(
            f"{name} is {_validate.shown(part)}, whose text holds an address, another in each "
            "process; make its class a frozen dataclass, or give it a __repr__ of its values"
        )
    return text
