"""Functions of one agent, of all agents together, on the devices where these are."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.custom_batching
import jax.extend
import jax.numpy as jnp
from jaxtyping import Array, Int

from dpjax._numerics import shapes
from dpjax._programs import jaxprs
from dpjax.protocols import Tree

__all__ = ()

_Function: TypeAlias = Callable[..., Tree]

AGENTS = "agents"
"""The one axis of a mesh of devices."""


def vmap_isolated(function: _Function, *trees: Tree) -> Tree:
    """`jax.vmap` of a function of one record, or agent, none of which reaches another's result.

    Mapped, the gradient by the kernels of a convolution in groups is one whose batch is in groups.
    Compilers take it as one convolution over all groups, most of it times zero; and zero times an
    infinite number of one record is nan in all others. Such functions are taken one by one.

    Args:
        function: Of one record's, or agent's, trees.
        trees: Leaves [b, ...].

    Raises:
        ValueError: For an operation with a rule of its own for several records.
    """
    leaves = jax.tree.leaves(trees)
    # Read before it is mapped, which applies a user's own rules and leaves no trace of them.
    single, results = jax.make_jaxpr(function, return_shape=True)(*shapes(trees))
    _check_rules(single)
    call = jax.extend.core.jaxpr_as_fun(single)
    program = jax.make_jaxpr(jax.vmap(call))(*leaves)
    if _has_groups(program):
        # One by one under a further map, too: over agents, plans or seeds.
        @jax.custom_batching.sequential_vmap
        def sequential(constants: list[jax.Array], parts: list[jax.Array]) -> list[jax.Array]:
            closed = jax.extend.core.ClosedJaxpr(single.jaxpr, constants)
            return jax.extend.core.jaxpr_as_fun(closed)(*parts)

        values = jax.lax.map(lambda parts: sequential(single.consts, parts), leaves)
    else:
        # The program that was read, not a second trace of it.
        values = jax.extend.core.jaxpr_as_fun(program)(*leaves)
    return jax.tree.unflatten(jax.tree.structure(results), values)


_IN_TURN = jax.custom_batching.sequential_vmap(abs).vmap_rule.__code__
"""The code of a rule that takes records one by one."""


def _check_rules(program: Any) -> None:
    """Refuse operations that say themselves, or on the host, what they are of several records."""
    for jaxpr, _ in jaxprs(program):
        for equation in jaxpr.eqns:
            # None fails when it is mapped.
            method = equation.params.get("vmap_method")
            is_open = method not in (None, "sequential", "sequential_unrolled")
            name = equation.primitive.name
            if name == "custom_vmap_call":
                # By its code: a rule's derivative is a function of JAX's around any rule.
                rule = getattr(equation.params["rule"], "rule", None)
                is_open = getattr(rule, "__code__", None) is not _IN_TURN
            if is_open:
                raise ValueError(
                    f"a function of one record (or agent) holds {name}, whose rule for several may "
                    "mix them before the clip: leave it out, or give "
                    "jax.custom_batching.sequential_vmap, or vmap_method='sequential'"
                )


def _has_groups(program: Any) -> bool:
    """Whether a program holds a convolution whose batch is in groups."""
    for jaxpr, _ in jaxprs(program):
        for equation in jaxpr.eqns:
            if equation.params.get("batch_group_count", 1) > 1:
                return True
    return False


def each_agent(function: _Function, *trees: Tree, sequential: bool = False) -> Tree:
    """`vmap_isolated` of a function of one agent; agents over devices stay there.

    A compiler that divides a vmap over devices gathers all agents' images for a convolution.

    Args:
        function: Of one agent's trees.
        trees: Leaves [n, ...].
        sequential: Whether a device takes its agents one after the other.
    """

    def in_turn(*trees: Tree) -> Tree:
        return jax.lax.map(lambda agent: function(*agent), trees)

    mapped = in_turn if sequential else functools.partial(vmap_isolated, function)
    return _each_device(mapped, *trees)


def one_by_one(params: Tree) -> bool:
    """Whether to take agents one after the other: on a CPU, for kernels of convolutions.

    Mapped over agents' kernels, of four axes or more, a CPU takes three times as long.

    Args:
        params: Of one agent, arrays or shapes.
    """
    # Kernels of convolutions have two axes of places and two of channels.
    kernels = any(len(leaf.shape) >= 4 for leaf in jax.tree.leaves(params))
    return kernels and jax.default_backend() == "cpu"


_MANY = 2**24
"""Numbers from which on a CPU takes agents in blocks."""
_BLOCK = 2**20
"""Those of a block."""


def in_blocks(function: _Function, models: Tree, *trees: Tree) -> Tree:
    """A function of arrays over agents; on a CPU, of a block of agents at a time if there are many.

    What is computed between arguments and results then takes the memory of a block. The last block
    ends with the last agent, so some agents may be computed twice, alike.

    Args:
        function: Of trees like the given ones, and of any number of agents.
        models: Leaves [n, ...].
        trees: Leaves [n, ...].
    """
    leaves = jax.tree.leaves(models)
    n = len(leaves[0])
    size = sum(leaf.size for leaf in leaves)
    over_devices = AGENTS in jax.typeof(leaves[0]).sharding.mesh.axis_names
    if size < _MANY or over_devices or jax.default_backend() != "cpu":
        return function(models, *trees)
    # At least one agent, however large its model is.
    block = max(1, _BLOCK * n // size)

    def add(number: jax.Array, total: Tree) -> Tree:
        start = jnp.minimum(number * block, n - block)
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=block)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        results = function(*jax.tree.map(cut, (models, *trees)))
        return jax.tree.map(put, total, results)

    results = jax.eval_shape(function, models, *trees)
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), results)
    return jax.lax.fori_loop(0, -(-n // block), add, empty)


def _each_device(function: _Function, *trees: Tree) -> Tree:
    """A function of arrays over agents, on each device's part of them by itself.

    Args:
        function: Of trees like the given ones, and of any number of agents.
        trees: Leaves whose leading axis is over the devices, if anything is; those of the first one
            and of the result are [n, ...].
    """
    leaves = jax.tree.leaves(trees)
    meshes = [jax.typeof(leaf).sharding.mesh for leaf in leaves]
    mesh = next((mesh for mesh in meshes if AGENTS in mesh.axis_names), None)
    if mesh is None:
        return function(*trees)
    # Every device has as many agents: the last one's are filled up with zeros.
    n = len(leaves[0])
    devices = mesh.shape[AGENTS]
    spec = jax.sharding.PartitionSpec(AGENTS)

    def pad(leaf: jax.Array) -> jax.Array:
        return jnp.pad(leaf, [(0, -len(leaf) % devices)] + [(0, 0)] * (leaf.ndim - 1))

    # A check would have derivatives by a device's constants added up over devices, in private.
    local = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.tree.map(lambda leaf: leaf[:n], local(*jax.tree.map(pad, trees)))


def gathered(positions: Int[Array, "n b"], *parts: Array) -> list[Array]:
    """Rows of arrays of records; over devices, each gathers its own agents' from its own records.

    Args:
        positions: [n, b] places of the records, each in the part of its agent's device.
        parts: Leaves [N, ...], or [devices m, ...] over devices.
    """

    def local(positions: Array, *parts: Array) -> list[Array]:
        # Positions are below counts, and the problem has checked its indices.
        return [part.at[positions].get(mode="promise_in_bounds") for part in parts]

    return _each_device(local, positions, *parts)
