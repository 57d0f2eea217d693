"""The inputs of a run: plans and problems that fit, on the devices, agents over a mesh."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PRNGKeyArray

from dpjax import _numerics, _validate
from dpjax.data.partition import blocks, local
from dpjax.engine import keys, program
from dpjax.engine.arguments import Plans, Problems, Seeds
from dpjax.engine.processes import (
    RunMemory,
    agent_mesh,
    own_devices,
    place,
    place_own,
    without_padding,
)
from dpjax.engine.step import Data, Statics, first_leaves
from dpjax.learning.parameters import Params
from dpjax.learning.problem import Problem
from dpjax.plans import compatibility, dependence, statements
from dpjax.protocols import Arrays, Batch, Models, Privatizer, State, Tree, Updates
from dpjax.topology import gossip, mixing

__all__ = ()


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arguments of the compiled program, except the secret.

    Attributes:
        statics: Static parts, from `Statics.of`.
        arrays: Arrays that differ between plans, stacked.
        data: Training and evaluation data.
        batch_keys: [S] keys of the batches.
        models: Initial models, leaves [S, n, ...], or [S, 1, ...] where all agents start alike.
        memory: The memory of the runs.
        names: Names of the metrics that the program returns.
    """

    statics: Statics
    arrays: Arrays
    data: Data
    batch_keys: PRNGKeyArray
    models: Models
    memory: RunMemory
    names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        # Tracebacks that show local variables print it; the batches' keys may be secret.
        return "Inputs(...)"

    @classmethod
    def of(
        cls,
        plans: Plans,
        problems: Problems,
        seeds: Seeds,
        devices: int | None = None,
        phase: int = 0,
    ) -> "Inputs":
        """Check the models and put the inputs of a run on the devices.

        Args:
            plans: V plans, from `dpjax.engine.arguments.check_run`.
            problems: One, or one a seed.
            seeds: S seeds.
            devices: To spread the agents over; None is one.
            phase: Number of the run among several in a row.

        Raises:
            ValueError: For plans that cannot run together, or models that the run cannot protect.
        """
        mesh = agent_mesh(plans[0].agents, devices)
        statics = Statics.of(plans, problems, mesh)
        memory = RunMemory(mesh, statics.agents, len(seeds), len(plans))
        # Before any array is made: an allocation that fails would name no remedy.
        memory.check_models(problems[0])
        models = _initial_models(problems[0], keys.seed_keys(seeds, "initial"), statics.agents)
        batch_keys = keys.seed_keys(seeds, "batches", phase)
        arrays = stacked_arrays(
            plans, mesh, statics.privatizer, models, tables=statics.method.mixes_by_tables
        )
        data = stacked_data(problems, mesh)
        inputs = cls(statics, arrays, data, batch_keys, models, memory)
        inputs._check_precision(plans)
        # A plan traced a toy, whose leaves a method of a user's own may tell from those of the run.
        if compatibility.custom_names(statics.method):
            leaves, structure = jax.tree.flatten(inputs._agents_models())
            dependence.check_dependence(
                statics.method,
                statics.optimizer,
                plans[0].mixing.shape,
                getattr(statics.privatizer, "opened", None) is not None,
                (structure, *leaves),
            )
        # A problem may be of some agents alone; the shapes of a round are those of all.
        if problems[0].agents < statics.agents:
            partition = _numerics.shapes((data.indices, data.counts), statics.agents, dropped=1)
            data = data._replace(indices=partition[0], counts=partition[1])
        # The program reports what the query and the method measure.
        statics, names = program.with_reports(
            statics, arrays, data, inputs._agents_models(), batch_keys[0]
        )
        return dataclasses.replace(inputs, statics=statics, names=names)

    @property
    def entries(self) -> int:
        """Numbers in one model."""
        return statements.parameter_count(first_leaves(first_leaves(self.models)))

    @property
    def payload(self) -> int:
        """The most numbers to which an agent adds noise in a round."""
        return -(-statements.parameter_count(self._payload()) // self.statics.agents)

    def with_precision_cost(self, plans: Plans, problems: Problems) -> Plans:
        """The plans, whose guarantees cover the rounding of what a release sends.

        Only now is it known how many numbers a release draws; no message is out yet.

        Args:
            plans: The plans.
            problems: One, or one a seed.

        Raises:
            ValueError: For a release whose numbers are too coarse for its budget.
        """
        rounding = self._rounding()
        return tuple(
            statements.with_precision_cost(plan, self.payload, *rounding, problems)
            for plan in plans
        )

    def _rounding(self) -> tuple[float, int | None]:
        """The share of the clip norm that rounding sums of records takes, and a better pass length.

        Returns:
            The share r, 0 where agents are clipped. Of a release whose r is above
            `statements.ROUNDING_LIMIT` the largest power of two as a pass length for which it is
            not; else None, and where there is none.
        """
        # Tracing a batch takes a quarter of a short run's time.
        if not self.statics.query.rounds_sums:
            return 0.0, None
        query: Any = self.statics.query_of(self.data.frozen)

        def batch(data: Data, key: PRNGKeyArray) -> Batch:
            # Its shapes alone are read, so any key will do.
            return self.statics.batch(without_padding(data), key, key, jnp.int32(0))

        data = self.statics.of_first_seed(self.data)
        shapes = (self._agents_models(), jax.eval_shape(batch, data, self.batch_keys[0]))
        share = query.share(*shapes)
        if self.statics.release and share > statements.ROUNDING_LIMIT:
            # Longer passes take less time.
            for power in range(17, -1, -1):
                shorter = dataclasses.replace(query, microbatch=2**power)
                if shorter.share(*shapes) <= statements.ROUNDING_LIMIT:
                    return share, 2**power
        return share, None

    def start(self, values: Models | None, plans: int) -> Models:
        """Models to start from, leaves [S, V, n, ...], on the agents' devices.

        Args:
            values: A caller's own; None for the problem's.
            plans: V.

        Raises:
            ValueError: For other shapes than the problem's, or entries that are not finite.
        """
        shapes = jax.tree.map(
            lambda leaf: (len(leaf), plans, self.statics.agents, *leaf.shape[2:]), self.models
        )
        if values is not None:
            actual = jax.tree.map(np.shape, values)
            if actual != shapes:
                raise ValueError(
                    f"start has shapes {actual}, this run's models {shapes}; give one a run"
                )
            for leaf in jax.tree.leaves(values):
                _validate.finite_array("start", leaf)
            # Their dtype is that of this run, whatever a caller's arrays have.
            return jax.tree.map(lambda x, model: jnp.array(x, model.dtype), values, self.models)

        def spread(models: Models) -> Models:
            agents_models = jax.tree.map(
                lambda leaf, shape: jnp.broadcast_to(leaf[:, None], shape), models, shapes
            )
            return place(agents_models, self.statics.mesh, 2)

        if self.statics.mesh is None:
            return spread(self.models)
        # Compiled, so that no device holds the models of all.
        return jax.jit(spread)(self.models)

    def initial(self, start: Models, noise_keys: PRNGKeyArray) -> State:
        """The state before the first round.

        Args:
            start: Models, leaves [S, V, n, ...].
            noise_keys: [S] keys of the noise.

        Raises:
            ValueError: Where it does not fit in memory, with its bytes and those there are.
        """
        arguments = self.statics, self.arrays, start, self.batch_keys, noise_keys
        shapes = program.initial.trace(*arguments).out_info
        self.memory.check_state(shapes, program.keeps_noise(shapes))
        return program.initial(*arguments)

    def _agents_models(self) -> Models:
        """Shapes of the models of all agents."""
        # In place of the axes of seeds and of agents, of which there may be one for all.
        return _numerics.shapes(self.models, self.statics.agents, dropped=2)

    def _payload(self) -> Updates:
        return jax.eval_shape(self.statics.method.payload, self._agents_models())

    def _check_precision(self, plans: Plans) -> None:
        """Refuse narrow parameters where the private payload is rounded before the noise."""
        trees = []
        sums_records = plans[0].config.protect.clips == "record"
        if sums_records:
            trees.append(self.models)
        unclipped = any(plan.config.protect.gradient_gap is not None for plan in plans)
        # A clip comes after all rounding; these have none, or a sum behind it.
        if sums_records or unclipped or self.statics.method.sensitivity is not None:
            trees.append(self._payload())
        for path, leaf in jax.tree.leaves_with_path(trees):
            if jnp.finfo(leaf.dtype).bits < 32:
                raise ValueError(
                    f"params{jax.tree_util.keystr(path[1:])} are {leaf.dtype}, to which what is "
                    "private is rounded before the noise; use float32"
                )


def stacked_arrays(
    plans: Plans,
    mesh: Mesh | None = None,
    privatizer: Privatizer | None = None,
    models: Models = (),
    tables: bool = False,
) -> Arrays:
    """Stack the arrays that differ between plans.

    Args:
        plans: V plans.
        mesh: From `agent_mesh`.
        privatizer: Draws their noise, and may know a smaller form of its arrays; or None.
        models: Models of the run, whose dtype decides.
        tables: Whether the mixing matrix may be `gossip.Neighbours`. It is where all plans have the
            same matrix and `gossip.neighbours` finds these faster.

    Returns:
        Arrays by name with V as their leading axis. They are float64 where a leaf of the models is,
        else float32, whatever the x64 flag says. Rows of matrices over agents go to the agents'
        devices.
    """
    kind = _numerics.wide_dtype(models)
    # A plan without noise gets zeros for its arrays, so that draws add nothing.
    like = {name: array for plan in plans for name, array in plan.arrays.items()}
    first = like.pop("mixing")
    shared = tables and all(_same(plan.mixing, first) for plan in plans)
    layout = gossip.neighbours(first, kind) if shared else None

    stacked: dict[str, np.ndarray] = {}
    for name, example in like.items():
        arrays = [plan.arrays.get(name, np.zeros_like(example)) for plan in plans]
        dimensions = max(array.ndim for array in arrays)
        # A diagonal beside matrices that have more.
        arrays = [np.diag(a) if a.ndim < dimensions else a for a in arrays]
        stacked[name] = np.stack(arrays).astype(kind)
    if layout is None:
        stacked["mixing"] = np.stack([mixing.dense(plan.mixing) for plan in plans]).astype(kind)
    if privatizer is not None:
        # It may know a smaller form, such as the bands of a strategy [T, T].
        stacked = dict(privatizer.compact(stacked))
    placed: dict[str, Tree] = {}
    for name, array in stacked.items():
        # Rows of matrices over agents, behind the axis of plans.
        axis = array.ndim - 2 if array.ndim > 2 else None
        placed[name] = place(array, mesh, axis)
    if layout is not None:
        divided = layout if mesh is None else gossip.partitioned(layout, mesh)

        def of_plans(part: np.ndarray) -> Array:
            return place(np.stack([part] * len(plans)), mesh, max(1, part.ndim - 1))

        placed["mixing"] = jax.tree.map(of_plans, divided)
    return placed


def _same(first: Tree, second: Tree) -> bool:
    """Whether two mixing matrices, dense or sparse, are equal in every entry."""
    if first is second:
        return True
    alike = type(first) is type(second) and first.shape == second.shape
    return alike and not (first != second).sum()


def _data_of(problem: Problem) -> Data:
    partition = problem.partition
    return Data(problem.x, problem.y, partition.indices, partition.counts, problem.evaluation)


def stacked_data(problems: Problems, mesh: Mesh | None = None) -> Data:
    """Put the data on the devices.

    Args:
        problems: One, shared by all seeds, or one for each seed.
        mesh: From `agent_mesh`.

    Returns:
        The data. With several problems every leaf has the seeds as its leading axis, except frozen
        values, which all seeds share.
    """
    data = [_data_of(problem) for problem in problems]
    # The agents' axis, behind that of seeds where there is one.
    axis = int(len(problems) > 1)
    records: dict[str, Array] = {}
    if mesh is not None or problems[0].local:
        firsts, records = _by_device(problems, mesh, axis)
        for number, first in enumerate(firsts):
            data[number] = data[number]._replace(x=(), y=(), offsets=first)
    axes = Data(None, None, axis, axis, None, axis)
    joint = jax.tree.map(_joined, *data)
    placed = Data(*(place(part, mesh, axis) for part, axis in zip(joint, axes, strict=True)))
    return placed._replace(**records, frozen=place(problems[0].frozen, mesh, None))


def _joined(*leaves: np.ndarray) -> np.ndarray:
    """Arrays of the seeds' problems, stacked on the host: compiling so many would take long."""
    return leaves[0] if len(leaves) == 1 else np.stack(leaves)


def _by_device(
    problems: Problems, mesh: Mesh | None, axis: int
) -> tuple[list[np.ndarray], dict[str, Array]]:
    """Where each agent's records begin, for each problem, and x and y by device."""
    devices = 1 if mesh is None else mesh.size
    layouts = [blocks(problem.partition, devices) for problem in problems]
    # Devices hold equally many records, for all seeds.
    length = max(rows.shape[1] for _, rows in layouts)
    xs = []
    ys = []
    for problem, (_, rows) in zip(problems, layouts, strict=True):
        own_rows = np.pad(rows[own_devices(mesh)], ((0, 0), (0, length - rows.shape[1]))).ravel()
        if problem.local:
            own_rows = np.searchsorted(local(problem.partition), own_rows)
        xs.append(problem.x[own_rows])
        ys.append(problem.y[own_rows])
    x = place_own(_joined(*xs), mesh, axis)
    y = place_own(_joined(*ys), mesh, axis)
    return [first for first, _ in layouts], {"x": x, "y": y}


def _initial_models(problem: Problem, seed_keys: PRNGKeyArray, agents: int) -> Models:
    """Initial models, leaves [S, n, ...] from the seed's key and the agent's number, or [S, 1]."""
    # One model for all agents, which is only spread out when it is placed.
    if not problem.init_per_agent:
        return jax.tree.map(lambda leaf: leaf[:, None], jax.vmap(problem.init)(seed_keys))

    def of_agent(key: PRNGKeyArray, agent: Array) -> Params:
        return problem.init(jax.random.fold_in(key, agent))

    of_seed = jax.vmap(of_agent, in_axes=(None, 0))
    return jax.vmap(of_seed, in_axes=(0, None))(seed_keys, jnp.arange(agents))
