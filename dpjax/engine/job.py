"""What a run's rounds are called with: statics, arrays, data, keys and models."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import _validate
from dpjax.engine import arguments, identity, keys, metrics, parts, placing, program, sharding
from dpjax.plans import forecasts, releases
from dpjax.plans.plan import Plan, Statics
from dpjax.plans.problem import Problem
from dpjax.plans.query import AgentQuery
from dpjax.protocols import State

__all__: list[str] = []


@dataclass(frozen=True, eq=False)
class Job:
    """What the compiled program is called with, but for the secret.

    Attributes:
        statics: What is static.
        arrays: What differs between plans, stacked.
        data: Training and evaluation data.
        batch_keys: [S] keys of the batches.
        models: Initial models of one agent, leaves [S, ...].
        mesh: Over which the agents are spread; None is one device.
        apart: Every agent's own initial model, leaves [S, n, ...]; None where all start alike.
        names: Of the metrics that the program returns.
    """

    statics: parts.Statics
    arrays: Any
    data: parts.Data
    batch_keys: Any
    models: Any
    mesh: Any
    apart: Any = None
    names: tuple[str, ...] = ()

    @property
    def entries(self) -> int:
        """Numbers in one model."""
        return forecasts.entries(jax.tree.map(lambda leaf: leaf[0], self.models))

    @property
    def payload(self) -> int:
        """Numbers that an agent adds noise to in a round, the most."""
        return -(-forecasts.entries(self._payload()) // self.statics.agents)

    def rounding(self, *, release: bool) -> tuple[float, int | None]:
        """What rounding sums of records takes of the clip norm, and a pass length with little.

        Args:
            release: Whether a share above `releases.LIMIT` is refused, and a remedy looked for.

        Returns:
            The share r, 0 where agents are clipped; the largest power of two as a pass length for
            which r is at most `releases.LIMIT`, or None, also where none is looked for.
        """
        query = self.statics.query
        if isinstance(query, AgentQuery):
            return 0.0, None
        asked: Any = query if self.data.frozen is None else query.merging(self.data.frozen)
        batch = parts.batch_shapes(self.statics, self.data, self.batch_keys)
        models = self._agents_models()
        share = asked.share(models, batch)
        asks = release and share > releases.LIMIT
        lengths = [2**power for power in range(17, -1, -1)] if asks else []
        enough = (m for m in lengths if asked.by(m).share(models, batch) <= releases.LIMIT)
        return share, next(enough, None)

    @property
    def devices(self) -> int:
        """Devices that the agents are spread over."""
        return 1 if self.mesh is None else self.mesh.size

    def _agents_models(self) -> Any:
        n = self.statics.agents
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((n, *leaf.shape[1:]), leaf.dtype), self.models
        )

    def _payload(self) -> Any:
        return jax.eval_shape(self.statics.method.payload, self._agents_models())

    def check(self, *, summed: bool) -> None:
        """Refuse payloads too narrow for sums.

        Args:
            summed: Whether what is rounded before the noise must be wide: sums over records, or
                models that a step has moved.

        Raises:
            ValueError: Naming the leaf.
        """
        if summed:
            arguments.check_dtypes(self._payload())

    def reporting(self) -> "Job":
        """The same job, whose program reports what the query and the method measure."""
        models, key = self._agents_models(), self.batch_keys[0]
        found = metrics.reports(self.statics, self.arrays, self.data, models, key)
        statics = self.statics._replace(reports=tuple(found))
        state = program.template(statics, self.arrays, models, key)
        names = metrics.every(statics, self.data, state)
        return dataclasses.replace(self, statics=statics, names=tuple(names))

    def start(self, values: Any, plans: int) -> Any:
        """Models to start from, leaves [S, V, n, ...].

        Args:
            values: Those that the run is asked to start from; None: the problem's.
            plans: V.

        Raises:
            ValueError: For given ones that do not fit the problem's.
        """
        n = self.statics.agents
        if values is not None:
            return arguments.starting(values, self.models, plans, n)
        if self.apart is not None:
            return jax.tree.map(lambda leaf: jnp.repeat(leaf[:, None], plans, axis=1), self.apart)

        def spread(leaf: Any) -> Any:
            return jnp.broadcast_to(leaf[:, None, None], (len(leaf), plans, n, *leaf.shape[1:]))

        return jax.tree.map(spread, self.models)

    def initial(self, start: Any, noise_keys: Any) -> State:
        """The state before the first round.

        Args:
            start: Models, leaves [S, V, n, ...].
            noise_keys: [S] keys of the noise.
        """
        state = program.initial(self.statics, self.arrays, start, self.batch_keys, noise_keys)
        return state._replace(models=sharding.place(state.models, self.mesh, 2))

    def computed(
        self, traced: Callable[[State], list[Any]], start: Any, *, release: bool
    ) -> tuple[Any, str]:
        """The memory before the first round, and the hash of all that a run computes.

        Now, before a callback may change what the model closes over: later calls find what was
        traced here. The keys of the noise are arguments of the program, so that any will do. Arrays
        and not shapes: a release keeps past noise in float64, which shapes are traced without.

        Args:
            traced: Of a driver, its programs for a state, traced.
            start: Models, leaves [S, V, n, ...].
            release: Whether to refuse work outside the program.

        Raises:
            ValueError: For such work.
        """
        state = self.initial(start, self.batch_keys)
        return state.memory, identity.computation(traced(state), release=release)


def prepared(
    plans: tuple[Plan, ...],
    problems: tuple[Problem, ...],
    seeds: tuple[int, ...],
    together: Statics,
    devices: int | None,
    phase: int,
) -> Job:
    """Put on the devices what a run reads, its models checked.

    Args:
        plans: V plans.
        problems: One, or one a seed.
        seeds: S seeds.
        together: What the plans share.
        devices: To spread the agents over; None is one.
        phase: Number of the run among several in a row.

    Raises:
        ValueError: For models that the run cannot protect.
    """
    task, mesh = problems[0], sharding.agent_mesh(together.agents, devices)
    initial = keys.stacked(seeds, "initial")
    statics = placing.statics(together, problems, mesh)
    _check_size(task, len(plans), len(seeds), statics, together.microbatch)
    models = jax.vmap(task.init)(initial)
    if together.clips == "record":
        arguments.check_dtypes(models)
    job = Job(
        statics=statics,
        arrays=placing.arrays(plans, mesh, together.noise, models),
        data=placing.data(problems, mesh),
        batch_keys=keys.stacked(seeds, "batches", phase),
        models=models,
        mesh=mesh,
        apart=_apart(task, initial) if task.apart else None,
    )
    # What is rounded beyond what is accounted: sums, moved models, gradients that nothing clips.
    narrow = together.clips == "record" or hasattr(together.method, "sensitivity")
    narrow |= any(plan.config.protect.gradient_gap is not None for plan in plans)
    job.check(summed=narrow)
    return job.reporting()


def _check_size(
    task: Problem, plans: int, seeds: int, statics: parts.Statics, microbatch: int | None
) -> None:
    """Refuse models that do not fit in memory with one gradient each, before any is made."""
    leaves = jax.tree.leaves(jax.eval_shape(task.init, jax.random.key(0)))
    entries, size = (
        sum(leaf.size for leaf in leaves),
        sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
    )
    n, runs = statics.agents, plans * seeds
    # Of each model its gradient; per-record gradients of a pass are held together.
    at_once = microbatch if statics.query.one_by_one and microbatch else 1
    gradients = min(at_once, int(task.partition.counts.max())) * (1 if statics.sequential else runs)
    shape = f"[{seeds} seeds, {plans} plans, {n} agents, {entries:,} entries]"
    _validate.memory(
        "problem", task, f"the array {shape} of models, with gradients,", runs + gradients, n,
        size, item=1, most=sharding.memory(statics.mesh),
    )  # fmt: skip


def _apart(task: Problem, initial: Any) -> Any:
    """Every agent's own initial model, leaves [S, n, ...], from the seed's key and its number."""

    def of_seed(key: Any) -> Any:
        agents = jnp.arange(task.agents)
        return jax.vmap(lambda agent: task.init(jax.random.fold_in(key, agent)))(agents)

    return jax.vmap(of_seed)(initial)
