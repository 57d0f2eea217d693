"""Several random variants of each record in the place of one: augmentation multiplicity.

The gradient of a record is then that of its mean loss over K variants, taken before the clip. The
clip sees one gradient a record, so that a record moves a sum by as much as without variants,
whatever K; clipping K variants as K records would let it move the sum K times as far.

Keys of variants are public: a record's key is the round's, of its own purpose, folded with the
record's row, and a variant's is that folded with its number. Guarantees hold for every value of
them: given the keys a variant is a function of its record alone, so no other record's term depends
on which records a batch has, and the clip bounds each term. Passes, places in a batch, resumed runs
and loops on the host therefore make the same variants.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray, UInt32

from dpjax import _numerics, _validate

__all__: list[str] = []

Augment = Callable[[PRNGKeyArray, Any], Any]


class Keyed(NamedTuple):
    """Records with the keys that their variants are drawn with.

    Attributes:
        x: [..., *record].
        words: [..., 2] a threefry key's words for each.
    """

    x: Any
    words: UInt32[Array, "*r 2"]


@dataclass(frozen=True)
class Copies:
    """How variants of a record are made, and how many.

    Attributes:
        augment: ``augment(key, x) -> x`` of one record.
        number: K.
    """

    augment: Augment
    number: int

    def of(self, record: Keyed) -> Any:
        """Return the variants of one record, [K, *record].

        Args:
            record: One record with its key.
        """
        key = jax.random.wrap_key_data(record.words, impl=_numerics.THREEFRY)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(self.number))
        return jax.vmap(self.augment, in_axes=(0, None))(keys, record.x)

    def averaged(self, loss: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
        """Return ``loss(params, record, y)`` as the mean over a record's variants.

        Args:
            loss: ``loss(params, x, y) -> scalar`` of one example.
        """

        def mean(params: Any, record: Keyed, y: Any) -> Any:
            each = jax.vmap(loss, in_axes=(None, 0, None))
            return jnp.mean(each(params, self.of(record), y))

        return mean

    def spread(self, records: Keyed, *others: Any) -> tuple[Any, ...]:
        """Return the variants of a batch as its records, [B K, ...], and others K times each.

        Args:
            records: B of them with their keys.
            others: Arrays [B, ...].
        """
        x = jax.vmap(self.of)(records)
        whole = x.reshape(-1, *x.shape[2:])
        return whole, *(jnp.repeat(other, self.number, axis=0) for other in others)


def keyed(key: PRNGKeyArray | None, x: Any, rows: Int[Array, "*r"]) -> Any:
    """Return records with their keys; as they are where no key is given.

    Args:
        key: The round's, for variants.
        x: [..., *record] records.
        rows: [...] where each stands among all.
    """
    if key is None:
        return x
    each = jax.vmap(lambda row: jax.random.key_data(jax.random.fold_in(key, row)))
    return Keyed(x, each(rows.reshape(-1)).reshape(*rows.shape, 2))


def checked(augment: Any, copies: Any, record: Any) -> Copies | None:
    """Return what a problem's augmentation makes, or None where it has none.

    Args:
        augment: As in `dpjax.plans.problem.Problem`.
        copies: K.
        record: One example, or its shape and dtype.

    Raises:
        ValueError: For no function, one that does not keep shape and dtype, copies without it, or
            no number.
    """
    number = _validate.integer("copies", copies)
    if augment is None:
        if number != 1:
            raise ValueError(
                f"copies is {number} without augment, and all would be alike; give augment"
            )
        return None
    remedy = "give a function of a key and of one record that returns a record like it"
    if not callable(augment):
        raise ValueError(f"augment is {_validate.shown(augment)}; {remedy}")
    one = jax.ShapeDtypeStruct(jnp.shape(record), record.dtype)
    key = jax.eval_shape(lambda: jax.random.key(0, impl=_numerics.THREEFRY))
    try:
        made = jax.eval_shape(augment, key, one)
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"augment fails on a record of {one.shape}: {said}; {remedy}") from error
    if getattr(made, "shape", None) != one.shape or made.dtype != one.dtype:
        raise ValueError(f"augment turns a record of {one.shape} {one.dtype} into {made}; {remedy}")
    return Copies(augment, number)
