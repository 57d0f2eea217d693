"""Discrete Gaussian noise that makes whole numbers of a payload, and what reads their sums."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from dpjax import _validate
from dpjax._sums import SumCode
from dpjax.protocols import IntegerEncoded
from dpjax.transforms import fixed, leaves
from dpjax.transforms import noise as noise_

__all__ = ["discrete", "public_signs"]

_SIGNS = 2**32 - 2
"""Folded into a round's public key: above every number of a place, an agent or a gossip step."""


def public_signs(code: SumCode, key: PRNGKeyArray) -> Float[Array, " K"]:
    """Return the signs of a round's rotation, which everybody knows.

    Args:
        code: What all agree on, static.
        key: The round's public key.
    """
    return fixed.signs(code, jax.random.fold_in(key, _SIGNS))


def discrete(code: SumCode, *, key: PRNGKeyArray, rounds: int) -> IntegerEncoded:
    """Make whole numbers of agent-stacked payloads, with each agent's discrete Gaussian noise.

    Leaves in tree order are one vector [n, k], rotated by the round's public signs, rounded, and
    given noise of ``code.variance`` squared grid units. What goes out is one array [n, K], whole
    numbers modulo 2^32, so that sums of all of them are exact: they are read modulo 2^b, and
    whoever sums may do so modulo 2^b from the beginning.

    Guarantee: a message's numbers without noise have a norm of at most sqrt(code.limit), whatever
    the payload was, by an integer test; a row that is longer or not finite counts as zero. In each
    of the first ``rounds`` updates the noise is exact, fresh for every agent and number, and
    depends on key and round alone. Later updates are refused; inside compiled code they are zero,
    and carry nothing. Signs come from the public key alone, and the rounding's bits and the noise
    from the noise key alone. A simulation's: whoever knows the key can subtract the noise.

    Args:
        code: What all agree on.
        key: A single threefry key, of no other use.
        rounds: Rounds the noise is accounted for.

    Returns:
        A privatizer with state `dpjax.transforms.noise.NoiseState`.

    Raises:
        ValueError: For another generator's key; in ``init`` and ``update`` for payloads that have
            not ``code.size`` entries an agent.

    Example:
        >>> import jax, numpy as np
        >>> from dpjax.secagg.fixed import SumCode
        >>> from dpjax.transforms import coded
        >>> code = SumCode(size=3, bound=1.0, grid=2**-10, clients=2, variance=4)
        >>> noise_key, public = jax.random.split(jax.random.key(0, impl="threefry2x32"))
        >>> add = coded.discrete(code, key=noise_key, rounds=10)
        >>> x = np.full((2, 3), 0.25, np.float32)
        >>> sent, state = add.update(x, add.init(x), public)
        >>> total = add.opened(sent.sum(0, dtype=np.uint32), public, x[0])
        >>> sent.dtype.name, bool(abs(total - 0.5).max() < 0.05)
        ('uint32', True)
    """
    rounds = _validate.integer("rounds", rounds, most=2**31 - 2)
    noise_.check_key(key)

    def init(payload: Any) -> noise_.NoiseState:
        _entries(code, payload)
        return noise_.NoiseState(key, jnp.zeros((), jnp.int32))

    def update(
        payload: Any, state: noise_.NoiseState, public: PRNGKeyArray
    ) -> tuple[Array, noise_.NoiseState]:
        values = _entries(code, payload)
        noise_.check_round(state.round, rounds)
        own = jax.random.fold_in(state.key, state.round)
        whole, _ = fixed.noisy(code, values, public_signs(code, public), own)
        whole = jnp.where(state.round < rounds, whole, 0)
        after = noise_.NoiseState(state.key, state.round + 1)
        return jax.lax.bitcast_convert_type(whole, jnp.uint32), after

    def opened(total: Array, public: PRNGKeyArray, like: Any) -> Any:
        reals = fixed.decode(code, total, public_signs(code, public))
        flat, structure = jax.tree.flatten(like)
        ends = np.cumsum([int(np.prod(leaf.shape)) for leaf in flat])[:-1]
        parts = [
            part.reshape(leaf.shape).astype(leaf.dtype)
            for part, leaf in zip(jnp.split(reals, ends), flat, strict=True)
        ]
        return jax.tree.unflatten(structure, parts)

    return IntegerEncoded(init, update, opened)


def _entries(code: SumCode, payload: Any) -> Float[Array, "n k"]:
    """The payload as one vector an agent."""
    paths = jax.tree_util.tree_leaves_with_path(payload)
    agents = len(paths[0][1]) if paths and jnp.ndim(paths[0][1]) else 0
    for path, leaf in paths:
        leaves.check(path, leaf, agents, "the agents of the first leaf")
    sizes = [int(np.prod(jnp.shape(leaf)[1:])) for _, leaf in paths]
    if sum(sizes) != code.size:
        raise ValueError(
            f"payload has {sum(sizes)} entries an agent in {len(sizes)} leaves, and the noise is "
            f"for size {code.size}; give size={sum(sizes)}"
        )
    if agents > code.clients:
        raise ValueError(
            f"payload is of {agents} agents, and the noise is for {code.clients}; make it for all"
        )
    rows = [jnp.reshape(leaf, (agents, -1)).astype(jnp.float32) for _, leaf in paths]
    return jnp.concatenate(rows, axis=1)
