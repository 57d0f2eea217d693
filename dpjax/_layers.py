"""Layers of a tree of parameters: leaves that stand at one place."""

import math
from typing import Any

import jax

__all__: list[str] = []


def numbers(tree: Any) -> tuple[int, ...]:
    """Return each leaf's layer, numbered from 0 in the order of the leaves.

    A layer is the leaves of one parent: kernel and bias of ``Dense_0``, say.

    Args:
        tree: Parameters, or a gradient; places that hold None are no leaves.
    """
    known: dict[Any, int] = {}
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return tuple(known.setdefault(path[:-1], len(known)) for path in paths)


def groups(tree: Any) -> list[list[int]]:
    """Return the numbers of the leaves of each layer."""
    of = numbers(tree)
    return [[leaf for leaf, its in enumerate(of) if its == layer] for layer in sorted(set(of))]


def share(clip_norm: float, layers: int) -> float:
    """Return C / sqrt(layers), rounded down: layers of this norm have C together at most."""
    return clip_norm / math.sqrt(layers) * (1 - 2**-50) if layers > 1 else clip_norm
