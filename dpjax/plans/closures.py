"""What functions of a problem hold beside their arguments: no records that are to be protected."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

__all__: list[str] = []


def check(name: str, function: Callable[..., Any], arguments: Any, x: np.ndarray) -> list[Any]:
    """Refuse a function of one record that holds records: every term would move with theirs.

    The clip bounds a record's own term. Where other terms are made of that record too, as when
    records are mixed, zeroing it out moves all of those, and no guarantee here covers it. What is
    found are arrays in the function's program of which half the rows or more are rows of ``x``, as
    they are; rows that were changed before are not.

    Args:
        name: What a message calls the function.
        function: The function.
        arguments: What it is given, or the shapes.
        x: [N, ...] all records.

    Returns:
        Shapes of what the function returns, in a list of one; nothing where it fails.

    Raises:
        ValueError: Naming the function, and the array that it holds.
    """
    try:
        program, returned = jax.make_jaxpr(function, return_shape=True)(*arguments)
    except Exception:  # What fails is told where it is called.
        return []
    rows: set[bytes] | None = None
    for constant in _constants(program):
        shape = np.shape(constant)
        if len(shape) < 2 or shape[1:] != x.shape[1:] or len(shape) != x.ndim or shape[0] < 2:
            continue
        if rows is None:
            rows = set(map(bytes, _flat(x, x.dtype)))
        found = [row for row in map(bytes, _flat(constant, x.dtype)) if row in rows]
        if len(set(found)) > 1 and 2 * len(found) >= shape[0]:
            raise ValueError(
                f"{name} holds an array {shape} of the training records; give a function of one "
                "record and of public values alone: a record that enters the terms of others moves "
                "more than its own, clipped one, which no guarantee here covers"
            )
    return [returned]


def _flat(rows: Any, kind: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(rows).astype(kind).reshape(len(rows), -1))


def _constants(program: Any) -> Iterator[Any]:
    """Arrays of a program, and of the programs that it calls."""
    yield from getattr(program, "consts", ())
    for equation in getattr(program, "jaxpr", program).eqns:
        for value in equation.params.values():
            for each in value if isinstance(value, list | tuple) else (value,):
                if hasattr(getattr(each, "jaxpr", each), "eqns"):
                    yield from _constants(each)
