"""Whether what a saved result states fits together; its digest says only that nothing broke."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpjax import _validate

__all__: list[str] = []

_TERMS: dict[str, Any] = {
    "label": str, "agents": int, "epsilon": str, "delta": int | float, "accountant": str,
    "relation": str, "unit": str, "step_size": int | float,
}  # fmt: skip


def check(
    header: Mapping[str, Any], arrays: Mapping[str, np.ndarray], leaves: Sequence[np.ndarray]
) -> None:
    """Refuse lengths, types and shapes that would fail or mislead later.

    Args:
        header: As in `dpjax.engine.saved`, of S seeds and V plans.
        arrays: ``rounds`` [E], ``times`` [2], and [E, S, V] for every metric.
        leaves: Parameters [S, V, ...].

    Raises:
        ValueError: Naming what does not fit.
    """
    seeds, terms = _several(header, "seeds"), _several(header, "terms")
    metrics = _several(header, "metrics", least=0)
    for seed in seeds:
        _validate.integer("seeds", seed, least=0, most=2**32 - 1)
    if len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds is {_validate.shown(seeds)}; each stands there once")
    if not all(isinstance(name, str) for name in metrics) or len(set(metrics)) != len(metrics):
        raise ValueError(f"metrics is {_validate.shown(metrics)}; each is a name, once")
    stated = len(_several(header, "guarantees"))
    if stated != len(terms):
        raise ValueError(f"guarantees are {stated} for {len(terms)} plans")
    for each in terms:
        _check_terms(each)
    _validate.flag("ended", header["ended"])
    if not isinstance(header["frozen"], str):
        raise ValueError(f"frozen is {_validate.shown(header['frozen'])}; it is a digest")
    rounds, shape = arrays["rounds"], (len(seeds), len(terms))
    if rounds.ndim != 1 or not rounds.size or rounds.dtype.kind not in "iu" or rounds.min() < 0:
        raise ValueError(f"rounds is {_validate.shown(rounds)}; they are whole numbers, [E]")
    wanted = {"times": (2,), "rounds": rounds.shape}
    wanted |= {f"metric_{i}": (len(rounds), *shape) for i in range(len(metrics))}
    found = {name: array.shape for name, array in arrays.items()}
    kinds = {array.dtype.kind for array in arrays.values()}
    if found != wanted or not kinds <= set("fiub"):
        raise ValueError(f"arrays have shapes {found}, of dtypes {kinds}; {wanted} fit the rest")
    if bad := [leaf.shape for leaf in leaves if leaf.shape[:2] != shape]:
        raise ValueError(f"params have a leaf of shape {bad[0]}; all begin with {shape}")


def _several(header: Mapping[str, Any], name: str, least: int = 1) -> Sequence[Any]:
    value = header[name]
    if not isinstance(value, list | tuple) or len(value) < least:
        raise ValueError(f"{name} is {_validate.shown(value)}; give a list of at least {least}")
    return value


def _check_terms(terms: Any) -> None:
    if not isinstance(terms, dict) or set(terms) != set(_TERMS):
        raise ValueError(f"terms hold {_validate.shown(terms)}; they are {', '.join(_TERMS)}")
    for name, kind in _TERMS.items():
        value = terms[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(
                f"terms hold {name} = {_validate.shown(value)}; give another kind of value"
            )
    if not float(terms["epsilon"]) >= 0:
        raise ValueError(f"terms hold epsilon = {terms['epsilon']}; it is 0 or more")
