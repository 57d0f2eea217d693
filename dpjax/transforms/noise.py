"""Noise for agent-stacked updates, as optax transformations; a key is in their states alone.

`correlated` is Gaussian noise over agents (and, by a strategy, over rounds), `scheduled` Laplace or
Gaussian noise whose scale changes by round, `zero_sum` and `pairwise_cancelling` are noise on
links.

The layout of `correlated` and `scheduled`: leaves of one computing dtype are taken in tree order
and packed into groups of at most `_PACK` entries an agent (a larger leaf is a group of its own).
Group g of round t is one draw of shape [n, entries] under ``fold_in(fold_in(key, t), g)``; each
leaf is a run of columns of it. So a small model is one draw a round, a large one never holds more
than a leaf's noise twice, and numbers depend on (key, round, layout) alone: not on what they are
scaled by, on what is vmapped, or on how arrays are sharded. The other two draw leaf l (in tree
order) of round t under ``fold_in(fold_in(key, t), l)``. The layout is part of what a seed means, so
it stays fixed.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.tree_util import tree_leaves_with_path
from jaxtyping import Array, Float, PRNGKeyArray
from optax import GradientTransformation, GradientTransformationExtraArgs, Params, Updates

from dpjax import _numerics, _validate
from dpjax._numerics import Integer, Scalar, double_precision
from dpjax.encoding import simulated
from dpjax.encoding.lattice import SumCode
from dpjax.topology.links import LinkEnds, MessageEnds, incidence
from dpjax.transforms import rounds as rounds_
from dpjax.transforms import variates
from dpjax.transforms.variates import AgentRows

__all__ = [
    "correlated",
    "discrete",
    "opened",
    "pairwise_cancelling",
    "scheduled",
    "simulated_keys",
    "zero_sum",
]

Kind = Literal["laplace", "normal"]
Over = Literal["messages", "with_own_copy"]

_Paths = list[tuple[Any, Array]]
"""Leaves in tree order, each with its path."""
_Past = tuple[tuple[Float[Array, "w n d"], ...], ...]
"""The past noise of a strategy's route, arrays [width, n, entries] for each group."""
_Added = tuple[list[Array], _Past]
"""Leaves with their noise, and the past noise."""
_Real = Array | np.ndarray
_GroupNormals = Float[Array, "l q entries"]
"""Normals of a group of leaves in some consecutive rounds."""

_PACK = 65_536
"""The most entries of an agent in leaves that share one draw."""

_EXACT = lax.Precision.HIGHEST
_DRAWS = {"laplace": variates.laplaces, "normal": variates.normals}


class NoiseState(NamedTuple):
    """State of every transformation here.

    Attributes:
        key: The noise key, or the keys of all parts; whoever has it can subtract the noise.
        round: Rounds done, int32.
        past: With a strategy, the past noise that its route needs before the factor over agents,
            a tuple of arrays [width, n, entries] for each group (`dpjax.transforms.rounds`); else
            empty.
    """

    key: PRNGKeyArray
    round: Integer
    past: _Past = ()

    def __repr__(self) -> str:
        """Hide the key: notebooks and logs show an optimizer's states."""
        return "NoiseState(...)"


def correlated(
    factor: Float[Array, "n n"],
    *,
    key: PRNGKeyArray,
    rounds: int,
    strategy: Float[np.ndarray, "t t"] | None = None,
    grid: float | None = None,
    spread: Callable[[Array], Array] | None = None,
    rows: AgentRows = None,
    normals: Sequence[_GroupNormals] | None = None,
) -> GradientTransformation:
    """Add noise F Z_t to agent-stacked updates; with a strategy C over rounds, F (C^-1 Z)_t.

    Z_t [n, d] is standard normal, fresh in every round t and coordinate. The product runs at full
    precision in the leaf's dtype, in float32 for narrower ones, whose sum is rounded once. With a
    grid, every normal has 64 bits, all is computed in float64, noise is added there, and the sum
    is rounded to multiples of the grid before it is rounded to the leaf's dtype.

    Guarantee: in each of the first ``rounds`` updates the noise of a coordinate over agents is
    N(0, F F'), independent of all other coordinates, and without a strategy of all other rounds.
    No two agents or rounds share a normal. Later updates are refused, inside compiled code NaN, so
    that no round goes out with repeated or unaccounted noise. With a strategy the noise is that of
    `dpjax.transforms.rounds.applied`. What this protects, and for whom, depends on the clipping
    before it and is stated by `dpjax.accounting`. Without a grid this is a simulation's noise,
    whose last bits and largest values distinguish neighbours. With one, what finite precision costs
    against an outsider who sees every message is bounded by
    `dpjax.accounting.finite.release_cost`, if threefry with a secret key of 64 bits is
    pseudorandom; such a key is no long-lived secret.

    Args:
        factor: [n, n] F, the covariance over agents being F F', or [n], the diagonal of one that
            has nothing else, with the same noise. May be traced (say, vmapped over designs), and is
            then not checked; zero gives no noise at all.
        key: A single threefry key, of no other use: ``jax.random.key(seed, impl="threefry2x32")``.
        rounds: Rounds T the noise is accounted for.
        strategy: [T, T] lower triangular C with a positive diagonal, applied by the route of
            `dpjax.transforms.rounds`, which says what is kept; None is the identity.
        grid: Spacing of a release's grid, a power of two, `dpjax.accounting.finite.release_grid`;
            None for a simulation.
        spread: A linear map over agents, of arrays [n, entries], that normals pass before the
            factor; None is the identity.
        rows: For the noise of m agents alone: numbers of the q agents whose raw normals it is made
            of. The factor is then [m, q] (a diagonal [m] of q = m), and updates have m agents. None
            is all agents.
        normals: In place of those of the key, [L, q, entries] for each group of leaves: round
            t's at place t mod L, of all rounds that `dpjax.transforms.rounds.Route.drawn` names.

    Returns:
        An optax transformation with state `NoiseState`.

    Raises:
        ValueError: For another generator's key or an integer, a factor that is not square or not
            finite, a strategy of the wrong shape, a grid that is no power of two; in ``update``,
            for rows with a grid and without normals, normals of another shape, and leaves
            without the n agents as their leading axis or of another than floating dtype.

    Reference:
        Rodio et al., Whisper D-SGD, Algorithm 1; Denisov et al. (2022) for the strategy.

    Example:
        >>> import jax, numpy as np
        >>> from dpjax.transforms import noise
        >>> key = jax.random.key(0, impl="threefry2x32")
        >>> add = noise.correlated(np.array([[1.0, 0.0], [-1.0, 0.0]]), key=key, rounds=10)
        >>> gradients = np.zeros((2, 3), np.float32)
        >>> noisy, state = add.update(gradients, add.init(gradients))
        >>> noisy.sum(axis=0).tolist(), int(state.round)
        ([0.0, 0.0, 0.0], 1)
    """
    rounds = _accounted(key, rounds)
    weights = _checked_factor(factor, rows)
    n = weights.shape[0]
    raw = weights.shape[-1]
    route = None if strategy is None else rounds_.route(strategy, rounds)
    released = grid is not None
    if grid is not None and not (0 < grid < math.inf and math.frexp(grid)[0] == 0.5):
        raise ValueError(f"grid is {grid}; give a power of two, or None for a simulation")
    precision = double_precision if released else contextlib.nullcontext

    def grouped(paths: _Paths) -> list[_Group]:
        # A release computes all leaves in float64, in which it is rounded to the grid.
        wide = np.float64 if released else None
        return draw_groups(paths, n, f"the n={n} agents of the factor", wide)

    def start(params: Params) -> _Past:
        packed = grouped(tree_leaves_with_path(params))
        if route is None:
            return ()
        with precision():
            return tuple(route.start((raw, group.entries), group.dtype) for group in packed)

    def add(paths: _Paths, state: NoiseState, valid: Array) -> _Added:
        leaves = [leaf for _, leaf in paths]
        past = []
        with precision():
            for index, group in enumerate(grouped(paths)):
                shape = (raw, group.entries)
                if normals is not None:
                    draw = _taken(normals[index], shape)
                elif released and rows is not None:
                    # The hardened draw counts all agents' normals, and would give those of others.
                    raise ValueError(f"rows is {rows} with a grid, which needs normals")
                else:
                    draw = _draw(state.key, index, shape, group.dtype, released, rows)
                if route is None:
                    drawn = draw(state.round)
                else:
                    drawn, buffers = route.step(draw, state.past[index], state.round)
                    past.append(buffers)
                if spread is not None:
                    drawn = spread(drawn)
                # A round past the last one turns the factor, and so all noise, to NaN.
                colour = weights.astype(group.dtype) * valid.astype(group.dtype)
                if weights.ndim == 1:
                    noise = _scaled(colour[:, None], drawn, state.round)
                else:
                    noise = jnp.matmul(colour, drawn, precision=_EXACT)
                _add_to_leaves(leaves, group, noise, grid)
        return leaves, tuple(past)

    return _transformation(key, rounds, add, start)


def scheduled(
    scales: _Real,
    *,
    key: PRNGKeyArray,
    rounds: int,
    kind: Kind,
    rows: AgentRows = None,
) -> GradientTransformation:
    """Add fresh noise of scale scales[t] to every entry of agent-stacked updates in round t.

    "laplace" is noise of density exp(-|v| / scale) / (2 scale), "normal" that of standard
    deviation scale. It is computed and added in the leaf's dtype, in float32 for narrower ones,
    whose sum is rounded once.

    Guarantee: in each of the first ``rounds`` updates every entry of every agent has noise of the
    stated law and the scale of that round, independent of all other entries, agents, leaves and
    rounds: no two share a draw. Later updates are refused, inside compiled code NaN, so that no
    round goes out with repeated or unaccounted noise. What this protects is stated by
    accounting, from the scales as the leaf's dtype rounds them. It is a simulation's noise, never
    a release's: floating-point sums of any scale distinguish neighbours by their last bits, and
    noise far smaller than the number that it is added to is rounded away
    (the page 'Noise of finite precision' of the manual).

    Args:
        scales: [T] scale of each round's noise, in the units of the updates; zero adds nothing.
            May be traced (say, vmapped over plans), and is then not checked.
        key: A single threefry key, of no other use: ``jax.random.key(seed, impl="threefry2x32")``.
        rounds: Rounds T the noise is accounted for.
        kind: "laplace" or "normal".
        rows: Numbers of the agents in the updates, whose noise is drawn; None is all.

    Returns:
        An optax transformation with state `NoiseState`; whoever has its
        key can subtract the noise.

    Raises:
        ValueError: For another generator's key or an integer, another kind, scales that are not
            one a round, or negative; in ``update``, for leaves without one leading axis of agents
            or of another than floating dtype.

    Example:
        >>> import jax, numpy as np
        >>> from dpjax.transforms import noise
        >>> key = jax.random.key(0, impl="threefry2x32")
        >>> add = noise.scheduled(np.array([1.0, 0.0]), key=key, rounds=2, kind="laplace")
        >>> states = np.ones((3, 2), np.float32)
        >>> noisy, state = add.update(states, add.init(states))
        >>> bool((noisy != 1).all()), int(state.round)
        (True, 1)
        >>> add.update(states, state)[0].tolist()
        [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    """
    rounds = _accounted(key, rounds)
    draw = _DRAWS[_validate.one_of("kind", kind, tuple(_DRAWS))]
    if not isinstance(scales, Tracer):
        # float32 scales stay as they are: accounting states the loss of these very numbers.
        dtype = np.float32 if np.asarray(scales).dtype == np.float32 else np.float64
        scales = _validate.finite_array("scales", scales, ndim=1).astype(dtype)
        smallest = scales.min(initial=0.0)
        if smallest < 0:
            raise ValueError(f"scales holds {smallest:.3g}; give scales of at least 0")
    if scales.shape != (rounds,):
        raise ValueError(f"scales has shape {scales.shape} for rounds = {rounds}; give one each")

    def add(paths: _Paths, state: NoiseState, valid: Array) -> _Added:
        leaves = [leaf for _, leaf in paths]
        n = next((len(leaf) for leaf in leaves if jnp.ndim(leaf)), 0)
        # Past the last round it is NaN, and not the last scale.
        scale = jnp.take(jnp.asarray(scales), state.round, mode="fill", fill_value=jnp.nan)
        for index, group in enumerate(draw_groups(paths, n, f"the n={n} agents of the first leaf")):
            key = _draw_key(state.key, state.round, index)
            drawn = draw(key, (n, group.entries), group.dtype, rows)
            noise = _scaled(scale.astype(group.dtype), drawn, state.round)
            _add_to_leaves(leaves, group, noise)
        return leaves, ()

    return _transformation(key, rounds, add)


def lost(payload: Updates, scale: Scalar, kind: Kind) -> Scalar:
    """Return the probability that the largest entry of a payload is sent without noise.

    Floats at an entry are u apart, and noise of less than u/2 leaves the entry unchanged:

        1 - exp(-u / (2 scale))        "laplace"
        erf(u / (2 sqrt(2) scale))     "normal"

    On average, at most this share of all entries is sent without noise.

    Guarantee: none. It is a metric of private numbers.

    Args:
        payload: Leaves of floating dtypes before the noise.
        scale: Scale of the noise; zero loses none.
        kind: "laplace" or "normal".

    Returns:
        The share, float32; 1 where an entry is not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.transforms import noise
        >>> round(float(noise.lost(jnp.array([[1.0, 1e5]]), jnp.float32(0.0044), "laplace")), 3)
        0.588
    """
    # Noise of less than half the spacing at an entry leaves it as it is.
    half = jnp.float32(0)
    for leaf in jax.tree.leaves(payload):
        wide = leaf.astype(_numerics.wide_dtype(leaf))
        limits = jnp.finfo(leaf.dtype)
        # The largest of many numbers need not be nan where one of them is.
        finite = jnp.isfinite(wide).all()
        largest = jnp.max(jnp.abs(wide), initial=float(limits.tiny))
        _, exponent = jnp.frexp(largest)
        unit = wide.dtype.type(float(limits.eps))
        spacing = jnp.ldexp(unit, exponent - 1)
        spacing = jnp.where(finite, spacing, jnp.inf)
        half = jnp.maximum(half, spacing.astype(jnp.float32) / 2)
    divisor = jnp.where(scale > 0, scale, 1)
    ratio = half / divisor.astype(jnp.float32)
    if kind == "laplace":
        share = -jnp.expm1(-ratio)
    else:
        share = jax.scipy.special.erf(ratio / np.sqrt(2))
    return jnp.where(scale > 0, share, 0)


def zero_sum(
    sender: MessageEnds,
    receiver: MessageEnds,
    deviation: float | Array,
    *,
    key: PRNGKeyArray,
    rounds: int,
    over: Over = "with_own_copy",
) -> GradientTransformation:
    """Add noise to every message of a sender, such that the noises sum to zero.

    The noises of a sender's m messages are z_k - mean(z), z_k standard normals times
    ``deviation``: over the messages that it sends, or over these and its own copy.

    Guarantee: none by itself. For messages that one clipped gradient moves by at most s a round,
    single nodes or coalitions that see what they receive face the loss of
    ``accounting.views.zip_dl(mixing, zero_sum=over).pndp`` at noise deviation / s, for gradients
    that are fixed or functions of what they see ("view"); no finite number is known for others
    ("any"). Where the sum runs over messages, an eavesdropper of all messages averages the noise
    away: that loss is infinite. Nodes with one neighbour then have no noise on their message. Noise
    is fresh in each of the first ``rounds`` rounds and for every link; later rounds are refused,
    inside compiled code NaN.

    Args:
        sender: [L] agents, one a message, own copies among them.
        receiver: [L] agents; the sender for its own copy.
        deviation: Standard deviation of a message's noise before the mean is taken away; may be
            traced, and is then not checked.
        key: A threefry key of no other use.
        rounds: Rounds the noise is accounted for.
        over: Over what the noises sum to zero.

    Returns:
        An optax transformation of leaves [L, ...], with state `NoiseState`.

    Raises:
        ValueError: For another key, deviation or rule, links that are not as many senders as
            receivers; in ``update``, for leaves without the L links as their leading axis.

    Reference:
        Biswas et al. (2025), Low-cost privacy-preserving decentralized learning.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from dpjax.transforms import noise
        >>> sender, receiver = jnp.array([0, 0, 0]), jnp.array([0, 1, 2])
        >>> add = noise.zero_sum(sender, receiver, 1.0, key=jax.random.key(0), rounds=5)
        >>> noisy, _ = add.update(jnp.zeros((3, 4)), add.init(jnp.zeros((3, 4))))
        >>> bool(abs(noisy.sum(0)).max() < 1e-5)
        True
    """
    _validate.one_of("over", over, ("messages", "with_own_copy"))
    rounds = _accounted(key, rounds)
    if not isinstance(deviation, Tracer):
        deviation = _validate.spread("deviation", deviation)
    if np.ndim(sender) != 1 or np.shape(sender) != np.shape(receiver) or not len(sender):
        raise ValueError(
            f"sender has shape {np.shape(sender)}, receiver {np.shape(receiver)}; give one of "
            "each a message"
        )
    count = len(sender)
    n = int(np.max(sender)) + 1
    noised = (sender != receiver) | (over == "with_own_copy")
    # A sender of no noised message divides by 1, and has no noise.
    counts = np.bincount(sender[noised], minlength=n)
    counts = np.maximum(counts, 1)[:, None]
    noised = noised[:, None]

    def add(paths: _Paths, state: NoiseState, valid: Array) -> _Added:
        key = jax.random.fold_in(state.key, state.round)
        scale = valid * deviation
        leaves = []
        for index, (path, leaf) in enumerate(paths):
            _numerics.check_leaf(path, leaf, count, f"the {count} messages")
            wide = _numerics.wide_dtype(leaf)
            shape = (count, leaf.size // count)
            drawn = variates.normals(jax.random.fold_in(key, index), shape, wide)
            drawn = drawn * jnp.asarray(noised, wide)
            # Each sender's noises less their mean sum to zero.
            total = jax.ops.segment_sum(drawn, sender, n)
            mean = (total / jnp.asarray(counts, wide))[sender]
            noise = jnp.where(noised, drawn - mean, 0).reshape(leaf.shape)
            noisy = leaf.astype(wide) + scale.astype(wide) * noise
            leaves.append(noisy.astype(leaf.dtype))
        return leaves, ()

    return _transformation(key, rounds, add)


def simulated_keys(root: PRNGKeyArray, agents: int, edges: int) -> tuple[Array, Array]:
    """Return keys for a simulation from one root, which reveals all noise.

    In a release every agent draws its own key, and the two ends of every link agree on theirs.

    Args:
        root: A threefry key of no other use.
        agents: n.
        edges: E.

    Returns:
        [n] and [E] keys.

    Example:
        >>> import jax
        >>> from dpjax.transforms import noise
        >>> own, shared = noise.simulated_keys(jax.random.key(0), agents=3, edges=2)
        >>> own.shape, shared.shape
        ((3,), (2,))
    """
    _numerics.check_key(root, "root")
    agents = _validate.integer("agents", agents)
    edges = _validate.integer("edges", edges, minimum=0)
    agent_root = jax.random.fold_in(root, 0)
    edge_root = jax.random.fold_in(root, 1)
    return _numerics.row_keys(agent_root, agents), _numerics.row_keys(edge_root, edges)


def pairwise_cancelling(
    edges: LinkEnds,
    own: float,
    shared: float,
    *,
    own_keys: PRNGKeyArray,
    edge_keys: PRNGKeyArray,
    rounds: int,
    scale: float | Array = 1.0,
    agents: AgentRows = None,
) -> GradientTransformation:
    """Add noise of every agent, and for every link +z at one end and -z at the other.

    Agent i adds sqrt(own) z_i + sum over its links of +-sqrt(shared) z_e, + at the end that the
    link names first; the covariance over agents is own I + shared L, L the graph's Laplacian. The
    normals of one leaf are held at once, n + E times its entries for one agent.

    Guarantee: fresh normals in each of the first ``rounds`` updates, none shared by agents, links,
    rounds, leaves or coordinates; later updates are refused, inside compiled code NaN. An outsider
    without keys sees that covariance; agents who collude know their own noise and that of their
    links, and no other: the loss against them is `dpjax.accounting.views.decor`'s ``pndp`` and
    ``secldp`` for these two variances, after clipping to the norm that they are in units of.

    Args:
        edges: [E, 2] links, each once; `dpjax.topology.links.link_pairs`.
        own: Variance of an agent's own noise, squared units of the update.
        shared: Variance of a link's noise.
        own_keys: [n] threefry keys, each of one agent and of no other use.
        edge_keys: [E] threefry keys, each of the two ends of a link.
        rounds: Rounds T the noise is accounted for.
        scale: Multiplies all noise (both variances by its square); may be traced, and is then
            not checked. So may the keys, which are then not compared with each other.
        agents: Numbers of the agents in the updates, whose keys and whose links' keys the state
            holds; None is all n.

    Returns:
        An optax transformation of agent-stacked updates, with state `NoiseState`, its keys [n + E].

    Raises:
        ValueError: For keys that are not as many, of another generator, or given twice; links of
            no agent, to itself or given twice; negative variances.

    Reference:
        Allouah et al. (2024), DECOR.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from dpjax.transforms import noise
        >>> edges = jnp.array([[0, 1], [1, 2]])
        >>> own, shared = noise.simulated_keys(jax.random.key(0), agents=3, edges=2)
        >>> keys = {"own_keys": own, "edge_keys": shared}
        >>> add = noise.pairwise_cancelling(edges, 0.0, 1.0, **keys, rounds=5)
        >>> noisy, _ = add.update(jnp.zeros((3, 4)), add.init(jnp.zeros((3, 4))))
        >>> bool(abs(noisy.sum(0)).max() < 1e-6)  # what one end adds the other takes away
        True
    """
    rounds = _validate.integer("rounds", rounds)
    spreads = []
    for name, value in (("own", own), ("shared", shared)):
        if _validate.number(name, value) < 0:
            raise _validate.refusal(name, value, "give a variance of at least 0")
        spreads.append(_validate.spread(name, np.sqrt(value)) if value else 0.0)
    pairs = np.asarray(edges)
    _numerics.check_key(own_keys, "own_keys", getattr(own_keys, "shape", ())[:1] or (1,))
    n = len(own_keys)
    _check_edges(pairs, n)
    _numerics.check_key(edge_keys, "edge_keys", (len(pairs),))
    all_keys = jnp.concatenate([own_keys, edge_keys])
    # A key that two parts share would let one take off the other's noise.
    if not isinstance(all_keys, Tracer):
        words = jax.random.key_data(all_keys)
        if len(np.unique(words, axis=0)) != len(words):
            raise ValueError("edge_keys and own_keys hold a key twice; give every part its own")
    if not isinstance(scale, Tracer):
        scale = _validate.spread("scale", scale)
    # The covariance is own I + shared L: a link has one sign at each end.
    of_agents = spreads[0] * np.eye(n)
    of_links = spreads[1] * incidence(pairs, n)
    spread = np.hstack([of_agents, of_links])
    if agents is not None:
        spread = spread[list(agents)]
        used = np.flatnonzero(spread.any(axis=0))
        spread = spread[:, used]
        all_keys = all_keys[used]
        n = len(spread)

    def add(paths: _Paths, state: NoiseState, valid: Array) -> _Added:
        fold_in = jax.vmap(jax.random.fold_in, (0, None))
        keys = fold_in(state.key, state.round)
        leaves = []
        for index, (path, leaf) in enumerate(paths):
            _numerics.check_leaf(path, leaf, n, f"the n={n} agents")
            dtype = _numerics.wide_dtype(leaf)
            shape = (1, leaf.size // n)
            draw = functools.partial(variates.normals, shape=shape, dtype=dtype)
            factor = (valid * scale).astype(dtype)
            colour = jnp.asarray(spread, dtype) * factor
            drawn = jax.vmap(draw)(fold_in(keys, index))
            drawn = drawn.reshape(-1, *leaf.shape[1:])
            noise = jnp.tensordot(colour, drawn, axes=1, precision=_EXACT)
            leaves.append((leaf.astype(dtype) + noise).astype(leaf.dtype))
        return leaves, ()

    return _transformation(all_keys, rounds, add)


def discrete(code: SumCode, *, key: PRNGKeyArray, rounds: int) -> GradientTransformationExtraArgs:
    """Make whole numbers of agent-stacked payloads, with each agent's discrete Gaussian noise.

    Leaves in tree order are one vector [n, k], rotated by the round's public signs, rounded, and
    given noise of ``code.variance`` squared grid units. What goes out is one array [n, K], whole
    numbers modulo 2^32, so that sums of all of them are exact: they are read modulo 2^b, and
    whoever sums may do so modulo 2^b from the beginning.

    Guarantee: a message's numbers without noise have a norm of at most sqrt(code.limit), whatever
    the payload was, by an integer test; a row that is longer or not finite counts as zero. Of
    several records, nothing but a row that is not finite counts as zero: their clip excludes it,
    and what is sent of all others is rounded once by numbers that know nothing of it. In each
    of the first ``rounds`` updates the noise is exact, fresh for every agent and number, and
    depends on key and round alone. Later updates are refused; inside compiled code they are zero,
    and carry nothing. Signs come from the public key alone, and the rounding's bits and the noise
    from the noise key alone. A simulation's: whoever knows the key can subtract the noise.

    Args:
        code: What all agree on.
        key: A single threefry key, of no other use.
        rounds: Rounds the noise is accounted for.

    Returns:
        An optax transformation with state `NoiseState`, whose ``update(payload, state, key=...)``
        takes the round's public key; `opened` decodes sums of what it returns.

    Raises:
        ValueError: For another generator's key; in ``init`` and ``update`` for payloads that have
            not ``code.size`` entries an agent.

    Example:
        >>> import jax, numpy as np
        >>> from dpjax.encoding.lattice import SumCode
        >>> from dpjax.transforms import noise
        >>> code = SumCode(size=3, bound=1.0, grid=2**-10, clients=2, variance=4)
        >>> noise_key, public = jax.random.split(jax.random.key(0, impl="threefry2x32"))
        >>> add = noise.discrete(code, key=noise_key, rounds=10)
        >>> x = np.full((2, 3), 0.25, np.float32)
        >>> sent, state = add.update(x, add.init(x), key=public)
        >>> total = noise.opened(code, sent.sum(0, dtype=np.uint32), public, x[0])
        >>> sent.dtype.name, bool(abs(total - 0.5).max() < 0.05)
        ('uint32', True)
    """
    rounds = _accounted(key, rounds)

    def init(payload: Updates) -> NoiseState:
        _entries(code, payload)
        return NoiseState(key, jnp.int32(0))

    def update(
        payload: Updates,
        state: NoiseState,
        params: Params | None = None,
        *,
        key: PRNGKeyArray,
    ) -> tuple[Array, NoiseState]:
        values = _entries(code, payload)
        _check_round(state.round, rounds)
        # This argument is the round's public key, of which the signs are made and nothing else.
        signs = simulated.public_signs(code, key)
        noise_key = jax.random.fold_in(state.key, state.round)
        integers, _ = simulated.noisy_rows(code, values, signs, noise_key)
        # Past the last round nothing may go out: integers have no NaN.
        integers = jnp.where(state.round < rounds, integers, 0)
        sent = lax.bitcast_convert_type(integers, jnp.uint32)
        return sent, NoiseState(state.key, state.round + 1)

    return GradientTransformationExtraArgs(init, update)


def opened(code: SumCode, total: Array, key: PRNGKeyArray, like: Updates) -> Updates:
    """Decode a sum of messages of `discrete`; see `dpjax.protocols.Privatizer.opened`.

    Args:
        code: What all agree on.
        total: [K] sum of noisy payloads.
        key: The round's public key.
        like: Shapes and dtypes of one agent's payload.

    Example:
        >>> import jax, numpy as np
        >>> from dpjax.encoding.lattice import SumCode
        >>> from dpjax.transforms import noise
        >>> code = SumCode(size=3, bound=1.0, grid=2**-10, clients=2, variance=4)
        >>> like = np.zeros(3, np.float32)
        >>> total = noise.opened(code, np.zeros(4, np.uint32), jax.random.key(0), like)
        >>> total.shape
        (3,)
    """
    reals = simulated.decode_total(code, total, simulated.public_signs(code, key))
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    parts = []
    for part, leaf in zip(jnp.split(reals, ends), leaves, strict=True):
        parts.append(part.reshape(leaf.shape).astype(leaf.dtype))
    return jax.tree.unflatten(structure, parts)


def _entries(code: SumCode, payload: Updates) -> Float[Array, "n k"]:
    """The payload as one vector an agent."""
    paths = tree_leaves_with_path(payload)
    agents = next((len(leaf) for _, leaf in paths if jnp.ndim(leaf)), 0)
    rows = []
    for path, leaf in paths:
        _numerics.check_leaf(path, leaf, agents, "the agents of the first leaf")
        row = jnp.reshape(leaf, (agents, -1))
        rows.append(row.astype(jnp.float32))
    size = sum(row.shape[1] for row in rows)
    if size != code.size:
        raise ValueError(
            f"payload has {size} entries an agent in {len(rows)} leaves, and the noise is for size "
            f"{code.size}; give size={size}"
        )
    if agents > code.clients:
        raise ValueError(
            f"payload is of {agents} agents, and the noise is for {code.clients}; make it for all"
        )
    return jnp.concatenate(rows, axis=1)


def _check_edges(pairs: np.ndarray, n: int) -> None:
    """Check the links of n agents."""
    valid = pairs.ndim == 2 and pairs.shape[1] == 2 and np.issubdtype(pairs.dtype, np.integer)
    if valid:
        ordered = np.sort(pairs, axis=1)
        in_range = ((pairs >= 0) & (pairs < n)).all()
        of_two = (ordered[:, 0] < ordered[:, 1]).all()
        valid = in_range and of_two and len(np.unique(ordered, axis=0)) == len(pairs)
    if not valid:
        raise _validate.refusal(
            "edges",
            pairs,
            f"give [E, 2] whole numbers, every link of two agents of 0 .. {n - 1} once",
        )


def _accounted(key: PRNGKeyArray, rounds: int) -> int:
    """Check a key and return the number of rounds."""
    _numerics.check_key(key)
    # Rounds are counted in int32, and one more than the last must fit.
    return _validate.integer("rounds", rounds, maximum=2**31 - 2)


def _transformation(
    key: PRNGKeyArray,
    rounds: int,
    add: Callable[[_Paths, NoiseState, Array], _Added],
    start: Callable[[Params], _Past] = lambda params: (),
) -> GradientTransformation:
    """The transformation whose updates ``add(paths, state, valid)`` makes; NaN past the end."""

    def init(params: Params) -> NoiseState:
        return NoiseState(key, jnp.int32(0), start(params))

    def update(
        updates: Updates, state: NoiseState, params: Params | None = None
    ) -> tuple[Updates, NoiseState]:
        _check_round(state.round, rounds)
        valid = jnp.where(state.round < rounds, 1.0, jnp.nan)
        leaves, past = add(tree_leaves_with_path(updates), state, valid)
        updates = jax.tree.unflatten(jax.tree.structure(updates), leaves)
        return updates, NoiseState(state.key, state.round + 1, past)

    return GradientTransformation(init, update)


def _check_round(round: Integer, rounds: int) -> None:
    """Refuse a round past the last one, where its number is known (compiled code gives NaN).

    Args:
        round: Rounds done; nothing is checked while it is traced.
        rounds: Rounds the noise is accounted for.

    Raises:
        ValueError: If none is left.
    """
    if not isinstance(round, Tracer) and int(round) >= rounds:
        raise ValueError(
            f"round is {int(round)}, the noise is accounted for {rounds} rounds; stop there, or "
            "make a plan for more"
        )


class _Group(NamedTuple):
    """Leaves that share a draw.

    Attributes:
        leaves: Their positions in the flattened tree.
        sizes: Their entries for each agent.
        dtype: Dtype in which their noise is computed.
    """

    leaves: list[int]
    sizes: list[int]
    dtype: jnp.dtype

    @property
    def entries(self) -> int:
        """All entries of an agent."""
        return sum(self.sizes)


def draw_groups(paths: _Paths, n: int, expected: str, wide: Any = None) -> list[_Group]:
    """Pack leaves into draws.

    Args:
        paths: The leaves in tree order, each with its path.
        n: Agents, the length of every leading axis.
        expected: Name of that axis in messages.
        wide: One computing dtype for all; None is each leaf's, float32 for narrower ones.

    Raises:
        ValueError: For a leaf of another leading axis, or not of floating dtype.
    """
    packed: list[_Group] = []
    open_groups: dict[jnp.dtype, _Group] = {}
    for position, (path, leaf) in enumerate(paths):
        _numerics.check_leaf(path, leaf, n, expected)
        size = int(np.prod(leaf.shape[1:]))
        dtype = _numerics.wide_dtype(leaf) if wide is None else np.dtype(wide)
        group = open_groups.get(dtype)
        # A leaf that does not fit opens the next group of its dtype.
        if group is None or group.entries + size > _PACK:
            group = _Group([], [], dtype)
            open_groups[dtype] = group
            packed.append(group)
        group.leaves.append(position)
        group.sizes.append(size)
    return packed


def _add_to_leaves(
    leaves: list[Array], group: _Group, noise: Array, grid: float | None = None
) -> None:
    """Add to every leaf of a group its columns of the noise, [n, entries], on a release's grid."""
    # Where each leaf's columns begin, but for the first.
    columns = np.cumsum(group.sizes)[:-1]
    for position, part in zip(group.leaves, jnp.split(noise, columns, 1), strict=True):
        leaf = leaves[position]
        noisy = leaf.astype(group.dtype) + part.reshape(leaf.shape)
        if grid is not None:
            # A power of two: nothing but the nearest multiple is rounded.
            noisy = jnp.round(noisy * (1 / grid)) * grid
            # A zero's sign would tell on which side of it the sum was. A compiler drops + 0.
            noisy = jnp.where(noisy == 0, 0, noisy)
        leaves[position] = noisy.astype(leaf.dtype)


def _draw(
    key: PRNGKeyArray,
    group: int,
    shape: tuple[int, int],
    dtype: jnp.dtype,
    released: bool,
    rows: AgentRows,
) -> rounds_.NormalsOf:
    """Normals of a group by round; they depend on key and round, and not on a vmap."""

    def draw(round: Integer) -> Array:
        # By key and round alone: a resumed run draws the same numbers.
        key_ = _draw_key(key, round, group)
        if released:
            return variates.release_normals(key_, shape)
        return variates.normals(key_, shape, dtype, rows)

    return draw


def _taken(normals: _GroupNormals, shape: tuple[int, int]) -> rounds_.NormalsOf:
    """Normals of a group by round, among those of a driver."""
    if normals.shape[1:] != shape:
        raise ValueError(
            f"normals has shape {normals.shape}; give [rounds, {shape[0]}, {shape[1]}]"
        )
    return lambda round: lax.dynamic_index_in_dim(normals, round % len(normals), keepdims=False)


def _draw_key(key: PRNGKeyArray, round: Integer, group: int) -> PRNGKeyArray:
    """The key of a group's draw in a round."""
    return _numerics.fold_in(_numerics.fold_in(key, round), group)


def _scaled(scale: _Real, drawn: Array, round: Integer) -> Array:
    """A product whose rounding compilers cannot move into the factors or into a sum.

    Compilers would round them together, which changes last bits beside a matrix product, and a
    seed's results must not change. Rounds are not below 0, which no compiler knows.
    """

    def pinned(values: _Real) -> Array:
        words = jnp.uint32 if values.dtype == jnp.float32 else jnp.uint64
        zero = (round < 0).astype(words)
        bits = lax.bitcast_convert_type(values, words) ^ zero
        return lax.bitcast_convert_type(bits, values.dtype)

    return pinned(scale * pinned(drawn))


def _checked_factor(factor: _Real, rows: AgentRows) -> _Real:
    """A factor over agents; a float32 one stays as it is."""
    if rows is not None:
        if factor.shape[-1] != len(rows):
            raise ValueError(
                f"factor has shape {factor.shape} for {len(rows)} rows of normals; give a column "
                "for each"
            )
        return factor
    if not isinstance(factor, Tracer):
        factor = np.asarray(factor)
        if factor.ndim == 1:
            factor = _validate.finite_array("factor", factor, ndim=1).astype(factor.dtype)
        else:
            checked = _validate.square("factor", factor)
            if factor.dtype != np.float32:
                factor = checked
        # Products in float32 must neither vanish nor overflow.
        largest = float(np.abs(factor).max(initial=0.0))
        if largest > 0 and not 1e-30 <= largest <= 1e30:
            raise ValueError(
                f"factor has a largest entry of {largest:.3g}, at which noise vanishes or "
                "overflows; rescale it"
            )
    # A traced one may have more columns, of normals that links share.
    if factor.ndim not in (1, 2) or factor.shape[0] > factor.shape[-1]:
        raise ValueError(
            f"factor has shape {factor.shape}; give a square matrix over the agents, or a diagonal"
        )
    return factor
