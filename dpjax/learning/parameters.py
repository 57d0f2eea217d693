"""Parameters to start from, and their trained and frozen leaves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from dpjax import _validate

__all__: list[str] = []

Params: TypeAlias = Any
"""Parameters of one agent, a pytree of a user's own; or their shapes and dtypes."""


@dataclass(frozen=True, eq=False)
class ConstantInit:
    """An ``init`` that starts every agent and seed from the same values.

    Attributes:
        leaves: Values of one agent, which nobody can change.
        structure: Of the tree that they make; a tree itself could be changed.
    """

    leaves: tuple[jax.Array, ...]
    structure: Any

    @classmethod
    def of(cls, params: Any) -> "ConstantInit":
        """The start from such values.

        Args:
            params: Of one agent, arrays that nobody can change.
        """
        leaves, structure = jax.tree.flatten(params)
        return cls(tuple(leaves), structure)

    def __call__(self, key: PRNGKeyArray | None = None) -> Any:
        """Return them in containers of the caller's own, whatever the key."""
        del key
        return self.structure.unflatten(self.leaves)

    def __eq__(self, other: object) -> bool:
        """Equal where the values are: problems of several seeds start alike."""
        return isinstance(other, ConstantInit) and equal_trees(self(), other())

    def __hash__(self) -> int:
        """Equal ones have one structure."""
        return hash(self.structure)


def equal_trees(one: Any, other: Any) -> bool:
    """Whether two trees hold the same numbers.

    Args:
        one: A pytree of arrays.
        other: Another.
    """
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=False)
    return _alike(one, other) and all(
        a is b or (a.dtype == b.dtype and np.array_equal(a, b)) for a, b in pairs
    )


def _alike(one: Any, other: Any) -> bool:
    structures: Any = list(map(jax.tree.structure, (one, other)))
    return structures[0] == structures[1]


def starting_values(params: Any, wanted: Any) -> Any:
    """Return parameters to start from as a run holds them: arrays of at most 32 bits a number.

    Args:
        params: Of one agent.
        wanted: Shapes and dtypes of the model's parameters.

    Raises:
        ValueError: For another model's parameters, or numbers that are not finite.
    """
    ours, theirs = (
        {name: np.shape(leaf) for name, leaf in _named(tree).items()} for tree in (params, wanted)
    )
    if ours != theirs or not _alike(params, wanted):
        name, _ = min(ours.items() ^ theirs.items(), default=("its structure", None))
        raise ValueError(
            f"params differs from the model in {name} ({ours.get(name)} and {theirs.get(name)}); "
            "give all parameters of this model, as its init returns them"
        )
    return fixed_values("params", params)


def fixed_values(name: str, params: Any) -> Any:
    """Return values as arrays that nobody can change, at most 32 bits a number.

    Args:
        name: Argument, for messages.
        params: A pytree of arrays; those of JAX are not copied.

    Raises:
        ValueError: For leaves that are not finite real numbers.
    """

    def one(path: Any, leaf: Any) -> jax.Array:
        leaf_name = f"{name} {_path(path)}"
        _validate.finite_array(leaf_name, leaf)
        _validate.check_range(leaf_name, np.asarray(leaf))
        kind = jnp.result_type(leaf)
        if kind.itemsize > 4:
            kind = jnp.dtype(jnp.float32 if jnp.issubdtype(kind, jnp.floating) else jnp.int32)
        return (jnp.asarray if isinstance(leaf, jax.Array) else jnp.array)(leaf, kind)

    return jax.tree_util.tree_map_with_path(one, params)


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by their path, "params/Dense_0/kernel" say."""
    return {_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def split_trained(params: Any, frozen: Any) -> tuple[Any, Any]:
    """Split parameters into trained and frozen ones, each with None in the other's places.

    Args:
        params: Of one agent.
        frozen: ``frozen(path) -> bool`` of a leaf's path, "params/Dense_0/kernel" say; or a tree
            of bools, whose leaves may stand for whole branches.

    Raises:
        ValueError: For what is neither, or freezes nothing or everything.
    """
    try:
        flags = frozen
        if callable(frozen):
            flags = jax.tree_util.tree_map_with_path(lambda path, _: frozen(_path(path)), params)
        flags = jax.tree.broadcast(flags, params)
    except ValueError as error:
        raise ValueError(f"frozen does not fit the parameters ({error})") from None
    chosen = jax.tree.leaves(flags)
    if not all(isinstance(flag, bool | np.bool_) for flag in chosen) or len(set(chosen)) < 2:
        raise ValueError(
            f"frozen is {_validate.shown(flags)}; give a function of a leaf's path to True or "
            "False, or a tree of bools over the parameters, and freeze some of them"
        )
    trained = jax.tree.map(lambda leaf, flag: None if flag else leaf, params, flags)
    return trained, jax.tree.map(lambda leaf, flag: leaf if flag else None, params, flags)


def check_trained(trained: Any, wanted: Any) -> None:
    """Refuse trained leaves that are no parameters of the model, or other numbers than its own.

    Args:
        trained: Of one agent, with None in the places of frozen leaves.
        wanted: Shapes and dtypes of all that the model's ``init`` returns.

    Raises:
        ValueError: Naming the leaf.
    """
    models = _named(wanted)
    for name, leaf in _named(trained).items():
        collection = name.partition("/")[0]
        if collection != "params":
            # Running statistics, say, would be clipped, noised, sent and released.
            raise ValueError(
                f"params {name} would be trained, clipped, noised and released, and {collection!r} "
                "is no collection of parameters; give params and frozen=lambda path: "
                f"path.startswith({collection!r})"
            )
        kind = models[name].dtype if models[name].dtype.itemsize <= 4 else jnp.dtype(jnp.float32)
        if leaf.dtype not in (kind, models[name].dtype):
            raise ValueError(
                f"params {name} are {leaf.dtype} and the model's {kind}, in which it would not be "
                f"trained; give them as {kind}, or freeze them"
            )


def merge(trained: Any, frozen: Any) -> Any:
    """Return all parameters, from what `split_trained` made of them.

    Args:
        trained: With None in the places of frozen leaves.
        frozen: With None in the places of trained leaves; None altogether where there are none.
    """
    if frozen is None:
        return trained
    return jax.tree.map(
        lambda value, public: public if value is None else value, trained, frozen, is_leaf=_missing
    )


def check_split(init: Callable[[Any], Any], frozen: Any) -> None:
    """Refuse frozen values that are not in the places that an ``init`` leaves free.

    Args:
        init: Of a problem.
        frozen: Its frozen values.

    Raises:
        ValueError: For anything else than one value in every place.
    """
    trained = jax.eval_shape(init, jax.random.key(0))
    places = [jax.tree.map(_missing, tree, is_leaf=_missing) for tree in (trained, frozen)]
    flags = list(map(jax.tree.leaves, places))
    one_each = _alike(*places) and not any(map(bool.__eq__, *flags))
    if not one_each or all(flags[0]):
        raise ValueError(
            "frozen has other places than init leaves free; give both one tree, None in init's "
            "where frozen has a value and the other way round, and train something"
        )


def _missing(leaf: Any) -> bool:
    return leaf is None
