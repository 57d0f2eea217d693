"""What the compiled program reads, checked and put on the devices, agents over the mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _validate
from dpjax.engine import parts, sharding
from dpjax.plans import _parameters
from dpjax.plans.plan import Plan, Statics
from dpjax.plans.problem import Problem
from dpjax.plans.query import AgentQuery, Passes, RecordQuery
from dpjax.topology import nodes

__all__: list[str] = []


def check(plans: tuple[Plan, ...], problems: tuple[Problem, ...], seeds: int) -> None:
    """Refuse problems that do not fit the plans, or that differ in more than their data.

    Args:
        plans: At least one.
        problems: One, or one a seed.
        seeds: Number of seeds.

    Raises:
        ValueError: Naming what does not fit.
    """
    if not problems or len(problems) not in (1, seeds):
        raise ValueError(
            f"problem is {len(problems)} problems for {seeds} seeds; give one, or one a seed"
        )
    first = problems[0]
    for problem in problems:
        if not isinstance(problem, Problem):
            raise ValueError(f"problem is {type(problem).__name__}; give a plans.problem.Problem")
        for name in ("init", "loss", "metrics", "batch_loss", "augment", "copies", "apart"):
            if getattr(problem, name) != getattr(first, name):
                raise ValueError(
                    f"problem differs in {name} between seeds; make all with one model and loss"
                )
        if not _parameters.same(problem.frozen, first.frozen):
            raise ValueError(
                "problem has other frozen values for another seed; give all the same ones, which "
                "are held once"
            )
        shapes = [jax.tree.map(np.shape, _parts(one)) for one in (first, problem)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                "problem has arrays of other shapes for another seed; split and partition alike"
            )
    for plan in plans:
        if plan.agents != first.agents:
            raise ValueError(
                f"the plan is for {plan.agents} agents, the problem has {first.agents}; "
                "partition the data over the network's agents"
            )
    for problem in problems:
        counts, names = problem.partition.counts, problem.partition.names
        called = None if names is None else [nodes.title(names, i) for i in range(len(names))]
        sampler = plans[0].statics.sampler
        sampler.check(counts, called)
        for plan in plans:
            if plan.counts is not None and not np.array_equal(plan.counts, counts):
                raise ValueError(
                    f"the plan is for {_validate.shown(plan.counts.tolist())} records of the "
                    f"agents, the problem has {_validate.shown(counts.tolist())}; make it with "
                    "counts=shards.counts"
                )


def _parts(problem: Problem) -> parts.Data:
    partition: Any = problem.partition
    return parts.Data(problem.x, problem.y, partition.indices, partition.counts, problem.evaluation)


def arrays(
    plans: tuple[Plan, ...], mesh: Any, noise: Any = None, models: Any = ()
) -> dict[str, jax.Array]:
    """Stack what differs between plans.

    Args:
        plans: V plans.
        mesh: From `sharding.agent_mesh`.
        noise: How their noise is drawn, which may know a smaller form of its arrays; or None.
        models: Models of the run, whose dtype decides.

    Returns:
        Arrays by name with V as their leading axis, float64 where a model's leaf is, else float32
        whatever the x64 flag says: averages of models keep what models keep. Rows of matrices over
        agents go to the agents' devices.
    """
    kind = computed_in(models)
    # A plan without noise has none of its arrays: zeros, with which whatever is drawn adds nothing.
    like = {name: array for plan in plans for name, array in plan.arrays.items()}
    stacked = {
        name: np.stack([plan.arrays.get(name, np.zeros_like(one)) for plan in plans]).astype(kind)
        for name, one in like.items()
    }
    if hasattr(noise, "compact"):
        stacked = noise.compact(stacked)
    return {
        name: sharding.place(jnp.asarray(array), mesh, array.ndim - 2 if array.ndim > 2 else None)
        for name, array in stacked.items()
    }


def computed_in(tree: Any) -> Any:
    """The dtype of what models are multiplied by: float64 where one of their leaves is.

    Args:
        tree: Models, or messages of their dtypes.
    """
    return jnp.result_type(jnp.float32, *(leaf.dtype for leaf in jax.tree.leaves(tree)))


def data(problems: tuple[Problem, ...], mesh: Any) -> parts.Data:
    """Put the data on the devices.

    Args:
        problems: One, shared by all seeds, or one a seed.
        mesh: From `sharding.agent_mesh`.

    Returns:
        The data; with several problems every leaf has the seeds as its leading axis, but for
        frozen values, which are one for all.
    """
    if len(problems) == 1:
        whole, axis = jax.tree.map(jnp.asarray, _parts(problems[0])), 0
    else:
        each = [_parts(problem) for problem in problems]
        whole, axis = jax.tree.map(_stacked, *each), 1
    return parts.Data(
        x=sharding.place(whole.x, mesh, None),
        y=sharding.place(whole.y, mesh, None),
        indices=sharding.place(whole.indices, mesh, axis),
        counts=sharding.place(whole.counts, mesh, axis),
        evaluation=sharding.place(whole.evaluation, mesh, None),
        frozen=sharding.place(problems[0].frozen, mesh, None),
    )


def _stacked(*leaves: Any) -> Any:
    """One array of all; on the host where they are there: a program of thousands compiles long."""
    if all(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves):
        return jnp.asarray(np.stack(leaves))
    return jnp.stack(leaves)


def statics(together: Statics, problems: tuple[Problem, ...], mesh: Any) -> parts.Statics:
    """What all runs of the call share and one compilation is for.

    Args:
        together: From `dpjax.plans.plan.shared`.
        problems: One, or one a seed.
        mesh: From `sharding.agent_mesh`.

    Returns:
        The statics of `program.advance`.
    """
    task, record = problems[0], together.clips == "record"
    query: AgentQuery | RecordQuery | Passes
    clip: Any = {
        "clip_norm": together.clip_norm,
        "clipping": together.clipping,
        "copies": task.variants,
        "per_layer": together.per_layer,
    }
    if record:
        query = RecordQuery(task.loss, task.weighted, microbatch=together.microbatch, **clip)
        if together.sampler.capacity is not None:
            query = Passes(query, together.sampler.capacity)
    else:
        query = AgentQuery(task.loss, task.batch_loss, norm=together.norm, **clip)
    return parts.Statics(
        agents=together.agents,
        method=together.method,
        query=query,
        sampler=together.sampler,
        optimizer=together.optimizer,
        divisor=together.sampler.divisor if record else 1,
        privatizer=together.noise,
        metrics=task.metrics,
        mesh=mesh,
        sequential=query.one_by_one and jax.default_backend() == "cpu",
        own_data=len(problems) > 1,
        capacity=together.sampler.capacity,
    )
