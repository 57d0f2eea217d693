"""Parameters to start from, and their trained and frozen leaves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from dpjax import _validate

__all__ = ["Given", "check_split", "held", "merge", "same", "split", "starting_values"]


@dataclass(frozen=True, eq=False)
class Given:
    """An ``init`` that starts every agent and seed from the same values.

    Attributes:
        params: Of one agent.
    """

    params: Any

    def __call__(self, key: PRNGKeyArray) -> Any:
        """Return them, whatever the key."""
        del key
        return self.params

    def __eq__(self, other: object) -> bool:
        """Equal where the values are: problems of several seeds start alike."""
        return isinstance(other, Given) and same(self.params, other.params)

    def __hash__(self) -> int:
        """Equal ones have one structure."""
        return hash(jax.tree.structure(self.params))


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
    _validate.check_range(name, np.asarray(leaf))
    try:
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
        ValueError: If nothing or everything is frozen, or what is trained are no real numbers.
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
    for name, leaf, is_frozen in zip(names, leaves, chosen, strict=True):
        if not is_frozen and not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"params {name} are {leaf.dtype}, which nothing trains; freeze them")
    pairs = list(zip(leaves, chosen, strict=True))
    trained = [None if is_frozen else leaf for leaf, is_frozen in pairs]
    kept = [leaf if is_frozen else None for leaf, is_frozen in pairs]
    return structure.unflatten(trained), structure.unflatten(kept)


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
