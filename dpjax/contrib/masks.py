"""Masks of a secure sum inside jit, for thousands of simulated clients: they hide, and cancel.

    y_i = x_i + b_i + sum over neighbours j of +-s_ij    mod 2^b,    s_ij = s_ji

n clients sit on a ring in random order, each linked to the k/2 next ones on both sides (a Harary
graph, as in `dpjax.secagg`). The client at position p adds the mask that it shares with the one
at position p + j, which subtracts it, j = 1 to k/2: a loop over j holds the masks of n pairs at
once, so that memory is O(n d) and not O(n k d).

This is a simulation: one process knows every key. What it has in common with the protocol is what
a server is sent and how the sum comes out of it: every masked vector is uniform modulo 2^b, also
one that comes late; masks cancel exactly; what is left of those between survivors and dropouts is
taken off, and so are the self masks of survivors; sums wrap around modulo 2^b. What it does not
show is why a server cannot take off more than that: agreed keys, shares and their threshold, who
answers what, and parties that leave the protocol. That is `dpjax.secagg`. `Masked` is the sum as
the aggregate of a run; a guarantee names it as a custom part.

Reference:
    Bell et al. (CCS 2020), Secure single-server aggregation with (poly)logarithmic overhead.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, PRNGKeyArray, UInt32

from dpjax import _numerics, _validate
from dpjax.algorithms.exchange import Trusted
from dpjax.protocols import Message
from dpjax.topology.gossip import RoundNumber

__all__ = ["Masked", "masked_vectors", "unmasked_sum"]

_MASKS = 2**32 - 1
"""Folded into a seed's key; runs fold small numbers of purposes into theirs."""

# Purposes of a sum's key.
_ORDER = 0
_SELF = 1
_PAIRS = 2
_Words = UInt32[Array, "n d"]
_Row = UInt32[Array, " d"]


@dataclass(frozen=True)
class Masked(Trusted):
    """A secure sum in jit: every agent sends its numbers under masks, which cancel in the sum.

    Agents form a ring in random order, drawn anew in every round, and share a mask with each of
    their neighbours. Each also has a self mask. The server adds up the received vectors. It
    subtracts the self masks of the present agents, and the masks that they share with missing ones.
    The result is the exact sum modulo 2^32, with the bits of `Trusted`. Only integers can be masked
    (`dpjax.plans.sums`).

    Guarantee: as `Trusted`: it releases the sum of enough agents. An eavesdropper sees the sums,
    and for each agent a vector that is uniform modulo 2^32 and independent of all others, if
    threefry is pseudorandom. It is a simulation: one process draws all masks from ``seed`` and the
    round. Whoever knows these can subtract them, and runs with one such seed (several seeds or
    plans in a call, phases in a row) have the same masks. Protection from the server comes from the
    keys, shares and thresholds of the protocol (`dpjax.secagg`), which a run takes as a transport.

    Attributes:
        degree: Neighbours of an agent, even and below n - 1; None, n - 1, is everybody.
            `dpjax.secagg.graph.parameters` says how many the protocol takes.
        seed: Seed of the masks, which change no sum.

    Reference:
        Bell et al. (CCS 2020), Secure single-server aggregation with (poly)logarithmic overhead.
    """

    degree: int | None = None
    seed: int = 0

    integers_only = True

    def __post_init__(self) -> None:
        """Check the number of neighbours."""
        super().__post_init__()
        if self.degree is not None:
            _validate.fields(self, _validate.integer, "degree", minimum=2, maximum=2**31 - 2)
        _validate.fields(self, _validate.integer, "seed", minimum=0, maximum=2**31 - 2)

    def _total(self, messages: Message, present: Bool[Array, " n"], round: RoundNumber) -> Message:
        """The sum of masked messages, unmasked."""
        root = jax.random.key(self.seed, impl=_numerics.THREEFRY)
        # Masks of a round are drawn anew: a mask used twice would cancel between two sums.
        key = jax.random.fold_in(jax.random.fold_in(root, _MASKS), round)
        leaves, structure = jax.tree.flatten(messages)
        totals = []
        for number, leaf in enumerate(leaves):
            if leaf.dtype != jnp.uint32:
                raise ValueError(
                    f"message is {leaf.dtype}, and masks hide whole numbers of 32 bits alone; give "
                    "noise=dp.noise.Discrete, or aggregate=Trusted"
                )
            agents = len(leaf)
            if agents < 3:
                raise ValueError(
                    f"aggregate is {self} for {agents} agents, whose masks hide nothing of the "
                    "other; give 3 agents or more, or aggregate=Trusted"
                )
            # Leaves have masks of their own, for the same reason.
            leaf_key = jax.random.fold_in(key, number)
            degree = agents - 1 if self.degree is None else self.degree
            sent = masked_vectors(leaf.reshape(agents, -1), leaf_key, degree)
            total = unmasked_sum(sent, present, leaf_key, degree)
            totals.append(total.reshape(leaf.shape[1:]))
        return jax.tree.unflatten(structure, totals)


def masked_vectors(values: _Words, key: PRNGKeyArray, degree: int, bits: int = 32) -> _Words:
    """Return every client's vector under its self mask and one with every neighbour.

    Guarantee: to whoever does not know the key the rows are uniform modulo 2^bits and independent,
    whatever the values are, if threefry is pseudorandom.

    Args:
        values: [n, d] whole numbers, read modulo 2^bits; n from 3 on.
        key: A threefry key, of this sum alone: two sums under one key show the values' differences.
        degree: k, neighbours of a client: even and below n - 1, or n - 1, everybody; static.
        bits: b, 1 to 32; static.

    Returns:
        [n, d] uint32 below 2^bits.

    Raises:
        ValueError: For other shapes and types, a degree that no such graph has, another key.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from dpjax.contrib import masks
        >>> values = jnp.arange(10, dtype=jnp.uint32).reshape(5, 2)
        >>> sent = masks.masked_vectors(values, jax.random.key(0), degree=2, bits=8)
        >>> sent.shape, str(sent.dtype)
        ((5, 2), 'uint32')
    """
    clients, columns, low = _checked("values", values, key, degree, bits)
    position = jnp.argsort(_order(key, clients))

    def step(distance: Array, total: Array) -> Array:
        drawn = _shared(key, distance, clients, columns)
        # The client farther on takes off what this one adds.
        return total + drawn - jnp.roll(drawn, distance, axis=0)

    zeros = jnp.zeros((clients, columns), jnp.uint32)
    between = jax.lax.fori_loop(1, _beyond(degree), step, zeros)
    return (values + _self_masks(key, clients, columns) + between[position]) & low


def unmasked_sum(
    masked: _Words,
    present: Bool[Array, " n"],
    key: PRNGKeyArray,
    degree: int,
    bits: int = 32,
) -> _Row:
    """Return the sum of the vectors of the present clients, as the server computes it.

    It adds up the vectors of the present clients, and subtracts their self masks and the masks that
    they share with missing clients. A server does the same once it has the seeds of the former and
    the mask keys of the latter. The result is the plain sum modulo 2^bits, for any set of present
    clients.

    Args:
        masked: [n, d] what `masked_vectors` returned; rows of missing clients may hold anything.
        present: [n] whose vectors are in the sum.
        key: The key of `masked_vectors`.
        degree: k, static.
        bits: b, static.

    Returns:
        [d] uint32 below 2^bits.

    Raises:
        ValueError: As `masked_vectors`, and for a presence that is not one a client.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from dpjax.contrib import masks
        >>> values = jnp.arange(10, dtype=jnp.uint32).reshape(5, 2)
        >>> sent = masks.masked_vectors(values, jax.random.key(0), degree=2, bits=8)
        >>> present = jnp.array([True, True, False, True, False])
        >>> masks.unmasked_sum(sent, present, jax.random.key(0), degree=2, bits=8).tolist()
        [8, 11]
    """
    clients, columns, low = _checked("masked", masked, key, degree, bits)
    if jnp.shape(present) != (clients,) or jnp.result_type(present) != jnp.bool_:
        raise ValueError(
            f"present is {jnp.result_type(present)}{list(jnp.shape(present))}; give one bool for "
            f"each of the {clients} clients"
        )
    # Words that are 0 or 1, since sums wrap around in uint32.
    counted = jnp.asarray(present).astype(jnp.uint32)
    ring = counted[_order(key, clients)]

    def step(distance: Array, remaining: Array) -> Array:
        # 1 where only the adding client is present, -1 where only the other one is, modulo 2^32.
        unpaired = ring - jnp.roll(ring, -distance)
        drawn = _shared(key, distance, clients, columns)
        return remaining + _total(unpaired[:, None] * drawn)

    # Masks between present clients have cancelled: these are left, and self masks.
    zeros = jnp.zeros(columns, jnp.uint32)
    remaining = jax.lax.fori_loop(1, _beyond(degree), step, zeros)
    self_masks = counted[:, None] * _self_masks(key, clients, columns)
    total = _total(counted[:, None] * masked) - _total(self_masks)
    return (total - remaining) & low


def _beyond(degree: int) -> int:
    """The first distance along the ring without neighbours."""
    return (degree + 1) // 2 + 1


def _total(rows: _Words) -> _Row:
    """The sum of rows modulo 2^32."""
    return jnp.sum(rows, axis=0, dtype=jnp.uint32)


def _order(key: PRNGKeyArray, clients: int) -> Int32[Array, " n"]:
    """The clients by their position on the ring."""
    numbers = jnp.arange(clients, dtype=jnp.int32)
    return jax.random.permutation(jax.random.fold_in(key, _ORDER), numbers)


def _self_masks(key: PRNGKeyArray, clients: int, columns: int) -> _Words:
    """Every client's self mask."""
    return _words(jax.random.fold_in(key, _SELF), clients, columns)


def _shared(key: PRNGKeyArray, distance: Array, clients: int, columns: int) -> _Words:
    """The masks of the clients at every position p with those at p + distance."""
    pairs = jax.random.fold_in(jax.random.fold_in(key, _PAIRS), distance)
    drawn = _words(pairs, clients, columns)
    # Halfway round an even ring p + 2 distance is p, so two positions share a mask.
    is_first = jnp.arange(clients) < clients // 2
    once = (2 * distance != clients) | is_first
    return jnp.where(once[:, None], drawn, 0)


def _words(key: PRNGKeyArray, rows: int, columns: int) -> _Words:
    """Uniform words of 32 bits, every row of a key of its own; both words of each hash."""
    # Every row's key, so that a client's mask depends on no other client.
    keys = _numerics.row_keys(key, rows)
    half = -(-columns // 2)
    counter = jax.lax.broadcasted_iota(jnp.uint32, (rows, half), 1)
    drawn = jax.vmap(_numerics.threefry)(keys, jnp.zeros_like(counter), counter)
    return jnp.concatenate(_numerics.through_memory(*drawn), axis=1)[:, :columns]


def _checked(
    name: str, values: _Words, key: PRNGKeyArray, degree: int, bits: int
) -> tuple[int, int, np.uint32]:
    """Clients, columns and 2^bits - 1."""
    _numerics.check_key(key)
    shape = jnp.shape(values)
    dtype = jnp.result_type(values)
    if len(shape) != 2 or dtype != jnp.uint32:
        raise ValueError(f"{name} is {dtype}{list(shape)}; give uint32 [clients, entries]")
    clients, columns = shape
    if clients < 3 or not columns:
        raise ValueError(f"{name} is {[clients, columns]}; give 3 clients or more, and an entry")
    remedy = f"give an even number below {clients - 1}, or {clients - 1}"
    k = _validate.integer("degree", degree, minimum=2, maximum=clients - 1, remedy=remedy)
    if k % 2 and k != clients - 1:
        raise ValueError(f"degree is {k}; {remedy}")
    b = _validate.integer("bits", bits, maximum=32)
    return clients, columns, np.uint32(2**b - 1)
