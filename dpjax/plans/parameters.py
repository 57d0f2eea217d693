"""Parameters to start from, and their trained and frozen leaves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from dpjax import _validate

__all__: list[str] = []


@dataclass(frozen=True, eq=False)
class Given:
    """An ``init`` that starts every agent and seed from the same values.

    Attributes:
        leaves: Values of one agent, which nobody can change.
        structure: Of the tree that they make; a tree itself could be changed.
    """

    leaves: tuple[jax.Array, ...]
    structure: Any

    @classmethod
    def of(cls, params: Any) -> "Given":
        """The start from such values.

        Args:
            params: Of one agent, from `held`.
        """
        leaves, structure = jax.tree.flatten(params)
        return cls(tuple(leaves), structure)

    def __call__(self, key: PRNGKeyArray) -> Any:
        """Return them in containers of the caller's own, whatever the key."""
        del key
        return self.structure.unflatten(self.leaves)

    def __eq__(self, other: object) -> bool:
        """Equal where the values are: problems of several seeds start alike."""
        return (
            isinstance(other, Given)
            and self.structure == other.structure
            and same(self.leaves, other.leaves)
        )

    def __hash__(self) -> int:
        """Equal ones have one structure."""
        return hash(self.structure)


class Lasting:
    """A field for a tree, of which every reader gets containers of their own.

    Whoever puts another leaf into what they read changes nothing of the object that holds it.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        """Keep the leaves under the field's own name."""
        self.name = name

    def __get__(self, holder: Any, owner: type | None = None) -> Any:
        """The tree; the field's default is None."""
        if holder is None:
            return None
        leaves, structure = holder.__dict__[self.name]
        return structure.unflatten(leaves)

    def __set__(self, holder: Any, tree: Any) -> None:
        """Take the tree apart."""
        leaves, structure = jax.tree.flatten(tree)
        holder.__dict__[self.name] = tuple(leaves), structure


def same(one: Any, other: Any) -> bool:
    """Whether two trees hold the same numbers.

    Args:
        one: A pytree of arrays.
        other: Another.
    """
    if not _alike(one, other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a is b or (a.dtype == b.dtype and np.array_equal(a, b)) for a, b in pairs)


def starting_values(params: Any, wanted: Any) -> Any:
    """Return parameters to start from as a run holds them: arrays of at most 32 bits a number.

    Args:
        params: Of one agent.
        wanted: Shapes and dtypes of the model's parameters.

    Raises:
        ValueError: For another model's parameters, or numbers that are not finite.
    """
    remedy = "give all parameters of this model, as its init returns them"
    try:
        shapes = jax.tree.map(np.shape, params)
    except (TypeError, ValueError) as error:
        raise ValueError(f"params is no pytree of arrays ({error}); {remedy}") from None
    here, there = (_named(tree) for tree in (shapes, jax.tree.map(lambda x: x.shape, wanted)))
    if not _alike(params, wanted) or here != there:
        differ = [name for name in {**there, **here} if here.get(name) != there.get(name)]
        name = differ[0] if differ else "its structure"
        raise ValueError(
            f"params differs from the model in {name} ({here.get(name)} and {there.get(name)}); "
            f"{remedy}"
        )
    return held("params", params)


def held(name: str, params: Any) -> Any:
    """Return values as arrays that nobody can change, at most 32 bits a number.

    Args:
        name: Argument, for messages.
        params: A pytree of arrays; those of JAX are not copied.

    Raises:
        ValueError: For leaves that are not finite real numbers.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _held(f"{name} {_path(path)}", leaf), params
    )


def _named(shapes: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return {_path(path): shape for path, shape in leaves}


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _held(name: str, leaf: Any) -> jax.Array:
    _validate.unmasked(name, leaf)
    try:
        if isinstance(leaf, str | bytes):  # the name of a dtype, perhaps
            raise TypeError(f"a {type(leaf).__name__}")
        _validate.check_range(name, np.asarray(leaf))
        # Also of the narrow floats of models, which NumPy does not know by itself.
        kind = jnp.result_type(leaf)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} are no numbers ({error}); give an array of them") from None
    floating = jnp.issubdtype(kind, jnp.floating)
    if not floating and not jnp.issubdtype(kind, jnp.integer):
        raise ValueError(f"{name} are {kind}; give real numbers")
    if floating and not bool(jnp.isfinite(jnp.asarray(leaf)).all()):
        raise ValueError(f"{name} hold nan or infinity; give finite numbers")
    if jnp.dtype(kind).itemsize > 4:
        kind = jnp.dtype(jnp.float32 if floating else jnp.int32)
    return jnp.asarray(leaf, kind) if isinstance(leaf, jax.Array) else jnp.array(leaf, kind)


def split(params: Any, frozen: Any) -> tuple[Any, Any]:
    """Split parameters into trained and frozen ones, each with None in the other's places.

    Args:
        params: Of one agent, from `given`.
        frozen: ``frozen(path) -> bool`` of a leaf's path, "params/Dense_0/kernel" say; or a tree
            of bools, whose leaves may stand for whole branches.

    Raises:
        ValueError: If nothing or everything is frozen.
    """
    chosen = jax.tree.leaves(_chosen(params, frozen))
    names = [_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    if all(chosen) or not any(chosen):
        raise ValueError(
            f"frozen holds for {'all' if all(chosen) else 'none'} of the parameters, "
            f"{_validate.shown(names)}; freeze some of them, or leave it out"
        )
    leaves = jax.tree.leaves(params)
    structure: Any = jax.tree.structure(params)
    pairs = list(zip(leaves, chosen, strict=True))
    trained = [None if is_frozen else leaf for leaf, is_frozen in pairs]
    kept = [leaf if is_frozen else None for leaf, is_frozen in pairs]
    return structure.unflatten(trained), structure.unflatten(kept)


def check_trained(trained: Any, wanted: Any) -> None:
    """Refuse trained leaves that are no parameters of the model, or other numbers than its own.

    Args:
        trained: Of one agent, with None in the places of frozen leaves.
        wanted: Shapes and dtypes of all that the model's ``init`` returns.

    Raises:
        ValueError: Naming the leaf.
    """
    kinds = {_path(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(trained):
        name, kind = _path(path), leaf.dtype
        collection = name.partition("/")[0]
        if collection != "params":
            # Running statistics, say, would be clipped, noised, sent and released.
            raise ValueError(
                f"params {name} would be trained, clipped, noised and released, and {collection!r} "
                "is no collection of parameters; give params and frozen=lambda path: "
                f"path.startswith({collection!r})"
            )
        if not jnp.issubdtype(kind, jnp.floating):
            raise ValueError(f"params {name} are {kind}, which nothing trains; freeze them")
        own = jnp.dtype(jnp.float32) if kinds[name].itemsize > 4 else kinds[name]
        if kind != own and kind.itemsize <= 4:
            raise ValueError(
                f"params {name} are {kind} and the model's {own}, in which it would not be "
                f"trained; give them as {own}"
            )


def _chosen(params: Any, frozen: Any) -> Any:
    """One bool a leaf."""
    if callable(frozen):

        def asked(path: Any, leaf: Any) -> bool:
            answer = frozen(_path(path))
            if not isinstance(answer, bool | np.bool_):
                raise ValueError(
                    f"frozen({_path(path)!r}) is {_validate.shown(answer)}; return True or False"
                )
            return bool(answer)

        return jax.tree_util.tree_map_with_path(asked, params)
    remedy = "give a function of a leaf's path, or a tree of bools over the parameters"
    if not all(isinstance(flag, bool | np.bool_) for flag in jax.tree.leaves(frozen)):
        raise ValueError(f"frozen is {_validate.shown(frozen)}; {remedy}")
    try:
        return jax.tree.map(
            lambda flag, part: jax.tree.map(lambda _: bool(flag), part), frozen, params
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"frozen does not fit the parameters ({error}); {remedy}") from None


def merge(trained: Any, frozen: Any) -> Any:
    """Return all parameters, from what `split` made of them.

    Args:
        trained: With None in the places of frozen leaves.
        frozen: With None in the places of trained leaves; None altogether where there are none.
    """
    if frozen is None:
        return trained
    return jax.tree.map(
        lambda own, public: public if own is None else own, trained, frozen, is_leaf=_missing
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
    here, there = map(jax.tree.leaves, places)
    fits = _alike(*places) and all(a != b for a, b in zip(here, there, strict=True))
    if not fits or all(here):
        raise ValueError(
            "frozen has other places than init leaves free; give both one tree, None in init's "
            "where frozen has a value and the other way round, and train something"
        )


def _alike(one: Any, other: Any) -> bool:
    here, there = (cast(Any, jax.tree.structure(tree)) for tree in (one, other))
    return bool(here == there)


def _missing(leaf: Any) -> bool:
    return leaf is None
