"""A model for inference from what a run leaves."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _validate
from dpjax.engine import identity
from dpjax.plans import _parameters
from dpjax.plans.problem import Problem

__all__: list[str] = []


def place(name: str, wanted: Any, there: Sequence[Any]) -> int:
    """Return where one of several stands.

    Args:
        name: Argument, for messages.
        wanted: The one; None where there is no choice.
        there: All.

    Raises:
        ValueError: For one that is not there, or not once, or none of several.
    """
    choices = _validate.shown(list(there))
    if wanted is None:
        if len(there) != 1:
            raise ValueError(f"{name} is None for several; give one of {choices}")
        return 0
    known = isinstance(wanted, str | int | np.integer) and not isinstance(wanted, bool)
    if not known or list(there).count(wanted) != 1:
        raise ValueError(
            f"{name} is {_validate.shown(wanted)}; give one of {choices}, by its number"
        )
    return list(there).index(wanted)


def one(models: Any, agent: int | None) -> Any:
    """Return one model of several, or their average.

    Args:
        models: Leaves [n, ...].
        agent: Which; None averages.

    Raises:
        ValueError: For an agent that is not there, or without models.
    """
    leaves = jax.tree.leaves(models)
    if not leaves:
        raise ValueError("params are empty: this method releases no models")
    if agent is not None:
        number = _validate.integer("agent", agent, least=0, most=len(leaves[0]) - 1)
        return jax.tree.map(lambda leaf: leaf[number], models)

    def average(leaf: Any) -> np.ndarray:
        return np.asarray(leaf).mean(axis=0, dtype=np.float64).astype(leaf.dtype)

    return jax.tree.map(average, models)


def complete(problem: Any, params: Any, frozen: str) -> Any:
    """Return the parameters of one model, frozen values in their places.

    Args:
        problem: The problem that was trained.
        params: Of one model, None in the places of frozen leaves.
        frozen: Digest of the frozen values that it was trained with, see `frozen_digest`.

    Raises:
        ValueError: For what is no problem, another problem's parameters, or other frozen values.
    """
    if not isinstance(problem, Problem):
        raise ValueError(
            f"problem is {_validate.shown(problem)}; give the problem that was trained"
        )
    _check_fits(params, jax.eval_shape(problem.init, jax.random.key(0)))
    if frozen_digest(problem.frozen) != frozen:
        raise ValueError(
            "problem has other frozen values than those that were trained with; give the "
            "problem that was trained"
        )
    return _parameters.merge(params, problem.frozen)


def predictor(problem: Any, params: Any, frozen: str) -> Callable[[Any], Any]:
    """Return ``predict(x)`` of one model.

    Args:
        problem: The problem, or a module with ``apply``.
        params: Of one model.
        frozen: Digest of the frozen values that it was trained with, see `frozen_digest`.

    Raises:
        ValueError: For what cannot predict, or another problem's parameters.
    """
    if isinstance(problem, Problem):
        if problem.predict is None:
            raise ValueError(
                "problem has no predict; make it with problem.supervised, or give it one"
            )
        whole, apply = complete(problem, params, frozen), jax.jit(problem.predict)
        return lambda x: apply(whole, _like(problem, x))
    if isinstance(problem, type) or not callable(getattr(problem, "apply", None)):
        raise ValueError(
            f"problem is {_validate.shown(problem)}; give the problem, or a flax module"
        )
    if frozen:
        raise ValueError(
            f"problem is {_validate.shown(problem)}, which lacks the values that were frozen; give "
            "the problem that was trained"
        )
    apply = jax.jit(problem.apply)
    return lambda x: apply(params, x if isinstance(x, jax.core.Tracer) else _numbers(x))


def frozen_digest(frozen: Any) -> str:
    """Return what tells frozen values from others; empty where there are none.

    Args:
        frozen: Of a problem.
    """
    if frozen is None:
        return ""
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(frozen)]
    return identity.digest((frozen, names))


def _check_fits(params: Any, wanted: Any) -> None:
    def shapes(tree: Any) -> Any:
        return [
            (jax.tree_util.keystr(path), leaf.dtype.name, leaf.shape)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        ]

    if shapes(params) != shapes(wanted):
        raise ValueError(
            f"problem trains {_validate.shown(shapes(wanted))}, this result holds "
            f"{_validate.shown(shapes(params))}; give the problem that was trained"
        )


def _like(problem: Problem, x: Any) -> Any:
    """Examples in the form of those that the model was trained on."""
    trained = problem.x
    _validate.check_columns("x", x, problem.columns)
    records = x if isinstance(x, jax.core.Tracer) else _numbers(x)
    if not records.ndim or records.shape[1:] != trained.shape[1:]:
        shape = ", ".join(map(str, ("M", *trained.shape[1:])))
        raise ValueError(f"x has shape {records.shape}; give examples [{shape}]")
    if isinstance(records, jax.core.Tracer):
        return _traced(trained.dtype, records)
    if trained.dtype.kind not in "iub":
        return jnp.asarray(records.astype(trained.dtype))
    if (records.dtype.kind == "b") != (trained.dtype.kind == "b") or records.dtype.kind == "f":
        wanted = "booleans" if trained.dtype.kind == "b" else "integers"
        raise ValueError(f"x is {records.dtype}; the model was trained on {wanted}, give such")
    if trained.dtype.kind != "b":
        # A cast would wrap around, and an embedding would take another word.
        _check_within(records, trained.dtype)
    return jnp.asarray(records.astype(trained.dtype))


def _traced(trained: np.dtype, x: Any) -> Any:
    """Examples inside a function that is traced, whose values nobody can see."""
    kind = jnp.result_type(trained)
    if x.dtype != kind:
        raise ValueError(
            f"x is {x.dtype} in a function that is traced, where its values cannot be checked; "
            f"give {kind}, as the model was trained on"
        )
    return x


def _check_within(records: np.ndarray, kind: np.dtype) -> None:
    own, held = np.iinfo(kind), np.iinfo(np.int32)
    least, most = max(own.min, held.min), min(own.max, held.max)
    if records.size and not least <= records.min() <= records.max() <= most:
        value = records.max() if records.max() > most else records.min()
        raise ValueError(
            f"x holds {value}; the model was trained on {kind}, give whole numbers from {least} to "
            f"{most}"
        )


def _numbers(x: Any) -> np.ndarray:
    """Examples as finite real numbers that 32 bits hold, else ValueError."""
    try:
        records = np.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"x is no array of numbers ({error}); give examples [M, ...]") from None
    if records.dtype.kind == "O" and all(type(entry) is int for entry in records.flat):
        try:
            records = records.astype(np.int64)
        except OverflowError:
            value = _validate.shown(max(records.flat, key=abs))
            raise ValueError(f"x holds {value}; give numbers of at most 32 bits") from None
    elif records.dtype.kind == "O":
        records = _validate.finite_array("x", records)
    if records.size and records.dtype.kind != "b":
        _validate.finite_array("x", records)
        _validate.check_range("x", records)
    return records
