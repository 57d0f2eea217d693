"""Noise of which every part has a key of its own: an agent's, or the two ends' of a link (DECOR).

Normals of an agent or a link in round t for leaf l (in tree order) are one draw under
``fold_in(fold_in(key, t), l)``, of the leaf's shape for one agent. So whoever holds a key can draw
its noise, and nobody else's.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dpjax import _numerics, _validate
from dpjax._numerics import THREEFRY
from dpjax.transforms.leaves import check as check_leaf
from dpjax.transforms.noise import check_round
from dpjax.transforms.normals import normals

__all__ = ["PairwiseState", "links", "pairwise", "simulated_keys"]

_REMEDY = 'give typed threefry keys, as jax.random.split(jax.random.key(seed, impl="threefry2x32"))'


class PairwiseState(NamedTuple):
    """State of `pairwise`.

    Attributes:
        own_keys: [n] keys, one an agent.
        edge_keys: [E] keys, one a link.
        round: Rounds done, int32.
    """

    own_keys: PRNGKeyArray
    edge_keys: PRNGKeyArray
    round: Int[Array, ""]


def links(mixing: Float[np.ndarray, "*p n n"]) -> Int[np.ndarray, "e 2"]:
    """Return the links (i, j), i < j, over which something is ever sent, in lexical order.

    Args:
        mixing: [n, n] W, or a schedule [P, n, n].
    """
    return _numerics.link_pairs(_validate.finite_array("mixing", mixing))


def simulated_keys(root: PRNGKeyArray, agents: int, edges: int) -> tuple[Array, Array]:
    """Return keys for a simulation, all from one root: whoever knows it knows all noise.

    In a release every agent draws its own key, and the two ends of every link agree on theirs.

    Args:
        root: A threefry key of no other use.
        agents: n.
        edges: E.

    Returns:
        [n] and [E] keys.
    """
    _check_keys("root", root, ())
    agents, edges = _validate.integer("agents", agents), _validate.integer("edges", edges, least=0)
    own, shared = (jax.random.fold_in(root, purpose) for purpose in (0, 1))

    def split(key: PRNGKeyArray, count: int) -> Array:
        return jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(count))

    return split(own, agents), split(shared, edges)


def pairwise(
    edges: Int[np.ndarray, "e 2"],
    own: float,
    shared: float,
    *,
    own_keys: PRNGKeyArray,
    edge_keys: PRNGKeyArray,
    rounds: int,
    scale: Any = 1.0,
) -> optax.GradientTransformation:
    """Add every agent's own noise, and +z at one end and -z at the other of every link.

    Agent i adds sqrt(own) z_i + sum over its links of +-sqrt(shared) z_e, + at the end that the
    link names first; the covariance over agents is own I + shared L, L the graph's Laplacian. The
    normals of one leaf are held at once, n + E times its entries for one agent.

    Guarantee: fresh normals in each of the first ``rounds`` updates, none shared by agents, links,
    rounds, leaves or coordinates; later updates are refused, inside compiled code NaN. An outsider
    without keys sees that covariance; agents who collude know their own noise and that of their
    links, and no other: the loss against them is `dpjax.accounting.views.decor`'s ``pndp`` and
    ``secldp`` for these two variances, after clipping to the norm that they are in units of.

    Args:
        edges: [E, 2] links, each once; see `links`.
        own: Variance of an agent's own noise, squared units of the update.
        shared: Variance of a link's noise.
        own_keys: [n] threefry keys, each of one agent and of no other use.
        edge_keys: [E] threefry keys, each of the two ends of a link.
        rounds: Rounds T the noise is accounted for.
        scale: Multiplies all noise (both variances by its square); may be traced, and is then
            not checked. So may the keys, which are then not compared with each other.

    Returns:
        An optax transformation of agent-stacked updates, with state `PairwiseState`.

    Raises:
        ValueError: For keys that are not as many, of another generator, or given twice; links of
            no agent, to itself or given twice; negative variances.

    Reference:
        Allouah et al. (2024), DECOR.
    """
    rounds = _validate.integer("rounds", rounds)
    spreads = []
    for name, value in (("own", own), ("shared", shared)):
        if _validate.number(name, value) < 0:
            raise ValueError(f"{name} is {value!r}; give a variance of at least 0")
        spreads.append(_validate.spread(name, np.sqrt(value)) if value else 0.0)
    pairs = np.asarray(edges)
    _check_keys("own_keys", own_keys, getattr(own_keys, "shape", ())[:1] or (1,))
    n = len(own_keys)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not np.issubdtype(pairs.dtype, np.integer):
        raise ValueError(f"edges has shape {pairs.shape}; give whole numbers [E, 2]")
    _check_keys("edge_keys", edge_keys, (len(pairs),))
    _check_edges(pairs, n)
    if not isinstance(own_keys, jax.core.Tracer) and not isinstance(edge_keys, jax.core.Tracer):
        words = np.concatenate([jax.random.key_data(part) for part in (own_keys, edge_keys)])
        if len(np.unique(words, axis=0)) != len(words):
            raise ValueError(
                "edge_keys and own_keys hold a key twice; give every part one of its own"
            )
    if not isinstance(scale, jax.core.Tracer):
        scale = _validate.spread("scale", scale)
    ends = np.zeros((n, len(pairs)))
    ends[pairs[:, 0], np.arange(len(pairs))] = 1.0
    ends[pairs[:, 1], np.arange(len(pairs))] = -1.0
    spread = np.hstack([spreads[0] * np.eye(n), spreads[1] * ends])

    def init(params: optax.Params) -> PairwiseState:
        del params
        return PairwiseState(own_keys, edge_keys, jnp.zeros((), jnp.int32))

    def update(
        updates: optax.Updates, state: PairwiseState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, PairwiseState]:
        del params
        check_round(state.round, rounds)
        keys = jnp.concatenate([state.own_keys, state.edge_keys])
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, state.round)
        valid = jnp.where(state.round < rounds, 1.0, jnp.nan)
        leaves = jax.tree_util.tree_leaves_with_path(updates)
        noisy = []
        for index, (path, leaf) in enumerate(leaves):
            check_leaf(path, leaf, n, f"the n={n} agents")
            dtype = jnp.promote_types(leaf.dtype, jnp.float32)

            def draw(key: PRNGKeyArray, index: int = index, leaf: Array = leaf) -> Array:
                wide = jnp.promote_types(leaf.dtype, jnp.float32)
                drawn = normals(jax.random.fold_in(key, index), (1, leaf.size // n), wide)
                return drawn.reshape(leaf.shape[1:])

            colour = jnp.asarray(spread, dtype) * (valid * scale).astype(dtype)
            noise = jnp.tensordot(
                colour, jax.vmap(draw)(keys), axes=1, precision=jax.lax.Precision.HIGHEST
            )
            noisy.append((leaf.astype(dtype) + noise).astype(leaf.dtype))
        updates = jax.tree.unflatten(jax.tree.structure(updates), noisy)
        return updates, state._replace(round=state.round + 1)

    return optax.GradientTransformation(init, update)


def _check_keys(name: str, keys: PRNGKeyArray, shape: tuple[int, ...]) -> None:
    dtype = getattr(keys, "dtype", None)
    if dtype is None or not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        raise ValueError(f"{name} is {type(keys).__name__} of dtype {dtype}; {_REMEDY}")
    if str(jax.random.key_impl(keys)) != THREEFRY:
        raise ValueError(f"{name} is of generator {str(jax.random.key_impl(keys))!r}; {_REMEDY}")
    if keys.shape != shape:
        raise ValueError(f"{name} has shape {keys.shape}; give {shape}, one key for each part")


def _check_edges(pairs: Int[np.ndarray, "e 2"], n: int) -> None:
    if len(pairs) and (pairs.min() < 0 or pairs.max() >= n):
        raise ValueError(f"edges names agents outside 0 .. {n - 1}; give ends that exist")
    if (pairs[:, 0] == pairs[:, 1]).any():
        raise ValueError("edges holds a link of an agent with itself; leave it out")
    if len(np.unique(np.sort(pairs, axis=1), axis=0)) != len(pairs):
        raise ValueError("edges holds a link twice; give every link once, in one direction")
