"""Parameters to start from, and their trained and frozen leaves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from dpjax import _validate

__all__ = ()

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
    structure: jax.tree_util.PyTreeDef

    @classmethod
    def of(cls, params: Params) -> "ConstantInit":
        """The start from such values.

        Args:
            params: Of one agent, arrays that nobody can change.
        """
        # Containers such as dicts could be changed later; leaves and structure cannot.
        leaves, structure = jax.tree.flatten(params)
        return cls(tuple(leaves), structure)

    def __call__(self, key: PRNGKeyArray | None = None) -> Params:
        """Return them in containers of the caller's own, whatever the key."""
        del key
        return self.structure.unflatten(self.leaves)

    def __eq__(self, other: object) -> bool:
        """Equal where the values are: problems of several seeds start alike."""
        return isinstance(other, ConstantInit) and equal_trees(self(), other())

    def __hash__(self) -> int:
        """Equal ones have one structure."""
        return hash(self.structure)


def equal_trees(first: Params, second: Params) -> bool:
    """Whether two trees hold the same numbers.

    Args:
        first: A pytree of arrays.
        second: Another.
    """
    if not _same_structure(first, second):
        return False
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        # Seeds mostly share their frozen leaves: no comparison of large arrays.
        if a is not b and (a.dtype != b.dtype or not np.array_equal(a, b)):
            return False
    return True


def _same_structure(first: Params, second: Params) -> bool:
    structure: Any = jax.tree.structure(first)
    return bool(structure == jax.tree.structure(second))


def starting_values(params: Params, shapes: Params) -> Params:
    """Return parameters to start from as a run holds them: arrays of at most 32 bits a number.

    Args:
        params: Of one agent.
        shapes: Shapes and dtypes of the model's parameters.

    Raises:
        ValueError: For another model's parameters, or numbers that are not finite.
    """
    actual = _named_shapes(params)
    expected = _named_shapes(shapes)
    if actual != expected or not _same_structure(params, shapes):
        # Which leaf differs helps more than both trees.
        name, _ = min(actual.items() ^ expected.items(), default=("its structure", None))
        raise ValueError(
            f"params differs from the model in {name} ({actual.get(name)} and "
            f"{expected.get(name)}); give all parameters of this model, as its init returns them"
        )
    return fixed_values("params", params)


def fixed_values(name: str, params: Params) -> Params:
    """Return values as arrays that nobody can change, at most 32 bits a number.

    Args:
        name: Argument, for messages.
        params: A pytree of arrays; those of JAX are not copied.

    Raises:
        ValueError: For leaves that are not finite real numbers.
    """

    def of_leaf(path: jax.tree_util.KeyPath, leaf: object) -> jax.Array:
        leaf_name = f"{name} {_path(path)}"
        _validate.finite_array(leaf_name, leaf)
        _validate.check_range(leaf_name, np.asarray(leaf))
        kind = jnp.result_type(leaf)
        if kind.itemsize > 4:
            kind = jnp.dtype(jnp.float32 if jnp.issubdtype(kind, jnp.floating) else jnp.int32)
        # Arrays of JAX cannot be changed, those of NumPy can.
        return jnp.asarray(leaf, kind) if isinstance(leaf, jax.Array) else jnp.array(leaf, kind)

    return jax.tree_util.tree_map_with_path(of_leaf, params)


def _named(tree: Params) -> dict[str, Any]:
    """Leaves by their path, "params/Dense_0/kernel" say."""
    return {_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _named_shapes(tree: Params) -> dict[str, tuple[int, ...]]:
    return {name: np.shape(leaf) for name, leaf in _named(tree).items()}


def _path(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def split_trained(params: Params, frozen: Params) -> tuple[Params, Params]:
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
        # A bool may stand for a whole branch.
        flags = jax.tree.broadcast(flags, params)
    except ValueError as error:
        raise ValueError(f"frozen does not fit the parameters ({error})") from None
    leaf_flags = jax.tree.leaves(flags)
    are_bools = all(isinstance(flag, bool | np.bool_) for flag in leaf_flags)
    if not are_bools or len(set(leaf_flags)) < 2:
        raise _validate.refusal(
            "frozen",
            flags,
            "give a function of a leaf's path to True or False, or a tree of bools over the "
            "parameters, and freeze some of them",
        )
    # JAX takes None for an empty subtree: transformations of one half leave the other's places out.
    trained = jax.tree.map(lambda leaf, flag: None if flag else leaf, params, flags)
    return trained, jax.tree.map(lambda leaf, flag: leaf if flag else None, params, flags)


def check_trained(trained: Params, shapes: Params) -> None:
    """Refuse trained leaves that are no parameters of the model, or other numbers than its own.

    Args:
        trained: Of one agent, with None in the places of frozen leaves.
        shapes: Shapes and dtypes of all that the model's ``init`` returns.

    Raises:
        ValueError: Naming the leaf.
    """
    named_shapes = _named(shapes)
    for name, leaf in _named(trained).items():
        collection = name.partition("/")[0]
        if collection != "params":
            # Running statistics, say, would be clipped, noised, sent and released.
            raise ValueError(
                f"params {name} would be trained, clipped, noised and released, and {collection!r} "
                "is no collection of parameters; give params and frozen=lambda path: "
                f"path.startswith({collection!r})"
            )
        dtype = named_shapes[name].dtype
        kind = dtype if dtype.itemsize <= 4 else jnp.dtype(jnp.float32)
        if leaf.dtype not in (kind, dtype):
            raise ValueError(
                f"params {name} are {leaf.dtype} and the model's {kind}, in which it would not be "
                f"trained; give them as {kind}, or freeze them"
            )


def merge(trained: Params, frozen: Params) -> Params:
    """Return all parameters, from what `split_trained` made of them.

    Args:
        trained: With None in the places of frozen leaves.
        frozen: With None in the places of trained leaves; None altogether where there are none.
    """
    if frozen is None:
        return trained
    # Without the leaf rule, None would be an empty tree and its place be lost.
    return jax.tree.map(
        lambda value, public: public if value is None else value, trained, frozen, is_leaf=_missing
    )


def check_split(init: Callable[[PRNGKeyArray], Params], frozen: Params) -> None:
    """Refuse frozen values that are not in the places that an ``init`` leaves free.

    Args:
        init: Of a problem.
        frozen: Its frozen values.

    Raises:
        ValueError: For anything else than one value in every place.
    """
    trained = jax.eval_shape(init, jax.random.key(0))
    is_frozen = jax.tree.map(_missing, trained, is_leaf=_missing)
    is_trained = jax.tree.map(_missing, frozen, is_leaf=_missing)
    frozen_flags = jax.tree.leaves(is_frozen)
    fits = _same_structure(is_frozen, is_trained)
    # Every leaf has one value, a trained or a frozen one.
    fits = fits and not any(map(bool.__eq__, frozen_flags, jax.tree.leaves(is_trained)))
    if not fits or all(frozen_flags):
        raise ValueError(
            "frozen has other places than init leaves free; give both one tree, None in init's "
            "where frozen has a value and the other way round, and train something"
        )


def _missing(leaf: object) -> bool:
    return leaf is None
