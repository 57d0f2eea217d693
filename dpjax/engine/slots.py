"""A stacked state: which of its leaves the plans and the seeds of a call have of their own.

What is done with a leaf follows from its slot, never from its type. Models and memory are [S, V,
...]; the secret is a seed's, [S, ...], shared by its plans; counters are one for all.
"""

from typing import Any

import jax
import jax.numpy as jnp

from dpjax.protocols import State

__all__: list[str] = []


def is_counter(leaf: Any) -> bool:
    """Whether a leaf of the secret slot counts rounds, as all runs of a call do together.

    Args:
        leaf: Of one plan and one seed, or of them all, which share it.
    """
    return jnp.ndim(leaf) == 0 and jnp.issubdtype(leaf.dtype, jnp.integer)


def keeps_noise(state: State) -> bool:
    """Whether later rounds depend on noise of earlier ones, which the secret slot keeps.

    Args:
        state: A state, stacked or not.
    """
    return any(
        not (jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) or is_counter(leaf))
        for leaf in jax.tree.leaves(state.secret)
    )


def axes(state: State, over: str) -> Any:
    """Where the plans (or seeds) are in a stacked state; None where they share one value.

    Args:
        state: Its structure and the dtypes of the secret are read.
        over: "plans" or "seeds".
    """

    def shared(leaf: Any) -> Any:
        # Key and noise before the factor over agents are a seed's; all its plans share them.
        return 0 if over == "seeds" and not is_counter(leaf) else None

    models, memory = jax.tree.map(lambda _: 0, (state.models, state.memory))
    found: Any = state
    secret = jax.tree.map(shared, state.secret)
    return found._replace(models=models, memory=memory, secret=secret, round=None)


def vmap_over(function: Any, axes: State, state: State, *others: Any) -> Any:
    """Map ``function(state, *others) -> (state, info)``; shared leaves of the state stay so.

    Args:
        function: Of one plan or seed.
        axes: From `axes`.
        state: Stacked.
        others: Stacked on their leading axes.
    """
    zeros = (0,) * len(others)
    return jax.vmap(function, in_axes=(axes, *zeros), out_axes=(axes, 0))(state, *others)


def loop_over(function: Any, axes: State, state: State, *others: Any) -> Any:
    """`vmap_over` as a loop."""
    leaves, structure = jax.tree.flatten(state)
    # Not by leaves: None is a shared value's axis, and the place of a frozen leaf.
    mapped = jax.tree.leaves(jax.tree.map(lambda _, axis: axis == 0, state, axes))

    def body(item: Any) -> Any:
        own, rest = item
        own = iter(own)
        full = [next(own) if is_own else leaf for leaf, is_own in zip(leaves, mapped, strict=True)]
        new, info = function(jax.tree.unflatten(structure, full), *rest)
        return jax.tree.leaves(new), info

    own = [leaf for leaf, is_own in zip(leaves, mapped, strict=True) if is_own]
    stacked, info = jax.lax.map(body, (own, others))
    new = [leaf if is_own else leaf[0] for leaf, is_own in zip(stacked, mapped, strict=True)]
    return jax.tree.unflatten(structure, new), info
