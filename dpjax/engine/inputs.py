"""The inputs of a run: plans and problems that fit, on the devices, agents over a mesh."""

import dataclasses
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.sharding import Mesh

from dpjax import _numerics, _validate
from dpjax.data.partition import blocks, local
from dpjax.engine import keys, program
from dpjax.engine.processes import mine, place, place_own, whole
from dpjax.engine.step import Data, Statics
from dpjax.learning import parameters
from dpjax.learning.problem import Problem
from dpjax.learning.query import AgentQuery, RecordQuery
from dpjax.plans import statements
from dpjax.plans.plan import Plan
from dpjax.protocols import State
from dpjax.topology import gossip, mixing, nodes
from dpjax.transforms.rounds import WIDEST

__all__: list[str] = []


def check(
    plans: Any, problem: Any, seeds: Any
) -> tuple[tuple[Plan, ...], tuple[Problem, ...], tuple[int, ...]]:
    """Check that plans, problems and seeds fit.

    Args:
        plans: One plan or several.
        problem: One problem, or one for each seed that differs in its data alone.
        seeds: Whole numbers below 2**32, each once.

    Returns:
        All as tuples.

    Raises:
        ValueError: Naming what does not fit.
    """
    plans = tuple(plans) if isinstance(plans, list | tuple) else (plans,)
    if not plans or not all(isinstance(plan, Plan) for plan in plans):
        kinds = ", ".join(type(plan).__name__ for plan in plans)
        raise ValueError(f"plans is [{kinds}]; give one or more from plans.plan.make")
    labels: dict[str, Any] = {}
    for plan in plans:
        label, noise = plan.config.label, plan.config.noise
        if labels.setdefault(label, noise) != noise:
            raise ValueError(
                f"plans have two noise designs that are called {label!r}, which a result could "
                "not tell apart; give each a name of its own, or run each alone"
            )
    problems, seeds = check_tasks(problem, seeds)
    if any(plan.config.release for plan in plans) and len(plans) * len(seeds) != 1:
        raise ValueError(
            f"a release came with {len(plans)} plans and {len(seeds)} seeds, which would share raw "
            "noise; run one plan with one seed"
        )
    for problem in problems:
        _check_counts(plans, problem)
    return plans, problems, seeds


def check_tasks(problem: Any, seeds: Any) -> tuple[tuple[Problem, ...], tuple[int, ...]]:
    """Check problems and seeds alone, as `check` does.

    Args:
        problem: One problem, or one for each seed.
        seeds: Whole numbers.
    """
    problems = tuple(problem) if isinstance(problem, list | tuple) else (problem,)
    if isinstance(seeds, str | bytes) or not isinstance(seeds, Iterable):
        raise ValueError(f"seeds is {_validate.shown(seeds)}; give whole numbers, such as [0]")
    seeds = tuple(_validate.integer("seeds", seed, least=0, most=2**32 - 1) for seed in seeds)
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds is {seeds}; give at least one, each once")
    if len(problems) not in (1, len(seeds)):
        raise ValueError(
            f"problem is {len(problems)} problems for {len(seeds)} seeds; give one, or one a seed"
        )
    for problem in problems:
        _check_alike(problem, problems[0])
    return problems, seeds


def _check_alike(problem: Any, first: Problem) -> None:
    """Refuse a problem of another seed that differs in more than its data."""
    if not isinstance(problem, Problem):
        raise ValueError(f"problem is {type(problem).__name__}; give a learning.problem.Problem")
    names = ("init", "loss", "metrics", "batch_loss", "augment", "copies", "apart", "local")
    alike = {name: getattr(problem, name) == getattr(first, name) for name in names}
    alike["frozen values"] = parameters.same(problem.frozen, first.frozen)
    shapes = [jax.tree.map(np.shape, _data_of(each)) for each in (problem, first)]
    alike["the shapes of its arrays"] = shapes[0] == shapes[1]
    if differing := [name for name, same in alike.items() if not same]:
        raise ValueError(
            f"problem differs in {differing[0]} between seeds; only values of data may differ"
        )


def _check_counts(plans: tuple[Plan, ...], problem: Problem) -> None:
    """Refuse agents or records that plans are not for, and samplers that cannot draw these."""
    counts, names = problem.partition.counts, problem.partition.names
    for plan in plans:
        if plan.agents != problem.agents:
            raise ValueError(
                f"the plan is for {plan.agents} agents, the problem has {problem.agents}; "
                "partition the data over the network's agents"
            )
        if plan.counts is not None and not np.array_equal(plan.counts, counts):
            planned, actual = (_validate.shown(each.tolist()) for each in (plan.counts, counts))
            text = f"the plan is for {planned} records of the agents, the problem has {actual}"
            raise ValueError(f"{text}; make it with counts=shards.counts")
    if problem.partition.origin == "private" and any(plan.config.release for plan in plans):
        raise ValueError(
            "partition is made from private values (labels in partition.dirichlet), so that a "
            "record that changes moves others to other agents, which no release covers; deal "
            'records by partition.iid, by_size or by_owner ("iid" or "owner" in a file of '
            "settings), or give release=False"
        )
    titles = None if names is None else [nodes.title(names, i) for i in range(len(names))]
    plans[0].sampler.check(counts, titles)


def check_device(plans: Sequence[Plan], devices: Any) -> None:
    """Check that a release runs on devices whose sums are exact and repeatable.

    XLA reads XLA_FLAGS once, when it starts. This check cannot distinguish flags that Python sets
    later, which have no effect: set them before Python starts.

    Args:
        plans: The plans.
        devices: To spread the agents over, or None.

    Raises:
        ValueError: For a release on neither a CPU nor a GPU, under flags that let compiled code
            take nan for a number, or on a GPU without deterministic operations.
    """
    if not any(plan.config.release for plan in plans):
        return
    if jax.process_count() > 1:
        raise ValueError(
            f"release is True in {jax.process_count()} processes, each of which would hold the "
            "noise key; run a release in one"
        )
    mesh = agent_mesh(plans[0].agents, devices)
    used = [*jnp.zeros(()).devices(), *(() if mesh is None else mesh.devices.flat)]
    platforms = {device.platform for device in used}
    if unknown := sorted(platforms - {"cpu", "gpu"}):
        text = "whose float64 may be coarser than 2^-53; run releases on a CPU or a GPU"
        raise ValueError(f"release is True on a {unknown[0]}, {text}")
    flags, exact = _flags(), "--xla_gpu_deterministic_ops"
    if fast := [name for name, on in flags.items() if on and "enable_fast_" in name]:
        text = "under which nan may pass for a number; leave it out before Python starts"
        raise ValueError(f"release is True with {fast[0]} in XLA_FLAGS, {text}")
    if "gpu" in platforms and not flags.get(exact, False):
        raise ValueError(
            "release is True on a gpu, whose sums differ from one time to the next; set "
            f"XLA_FLAGS={exact}=true before Python starts, since XLA reads it once"
        )


def _flags() -> dict[str, bool]:
    """XLA's flags by name, whether they are on; the last one counts."""
    text = os.environ.get("XLA_FLAGS", "")
    if text and text[0] != "-" and not text[0].isspace():  # The name of a file of flags.
        text = Path(text).read_text(encoding="utf-8") if Path(text).is_file() else ""
    pairs = (word.partition("=") for word in shlex.split(text))
    return {name: not equal or on.lower() in ("true", "1") for name, equal, on in pairs}


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arguments of the compiled program, except the secret.

    Attributes:
        statics: Static parts, from `make_statics`.
        arrays: Arrays that differ between plans, stacked.
        data: Training and evaluation data.
        batch_keys: [S] keys of the batches.
        models: Initial models, leaves [S, n, ...], or [S, 1, ...] where all agents start alike.
        names: Names of the metrics that the program returns.
    """

    statics: Statics
    arrays: Any
    data: Data
    batch_keys: Any
    models: Any
    names: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        plans: tuple[Plan, ...],
        problems: tuple[Problem, ...],
        seeds: tuple[int, ...],
        devices: int | None = None,
        phase: int = 0,
    ) -> "Inputs":
        """Check the models and put the inputs of a run on the devices.

        Args:
            plans: V plans, from `check`.
            problems: One, or one a seed.
            seeds: S seeds.
            devices: To spread the agents over; None is one.
            phase: Number of the run among several in a row.

        Raises:
            ValueError: For plans that cannot run together, or models that the run cannot protect.
        """
        task, mesh = problems[0], agent_mesh(plans[0].agents, devices)
        statics = make_statics(plans, problems, mesh)
        _check_size(task, plans, len(seeds), statics)
        models = _initial_models(task, keys.stacked(seeds, "initial"))
        batch_keys = keys.stacked(seeds, "batches", phase)
        arrays = stacked_arrays(
            plans, mesh, statics.privatizer, models, tables=statics.method.mixes_by_tables
        )
        inputs = cls(statics, arrays, stacked_data(problems, mesh), batch_keys, models)
        inputs._check_precision(plans)
        # The program reports what the query and the method measure.
        traced = arrays, inputs.data, inputs._agents_models(), batch_keys[0]
        statics = statics._replace(reports=program.reports(statics, *traced))
        names = program.metric_names(statics, *traced)
        return dataclasses.replace(inputs, statics=statics, names=names)

    @property
    def entries(self) -> int:
        """Numbers in one model."""
        return statements.entries(jax.tree.map(lambda leaf: leaf[0, 0], self.models))

    @property
    def payload(self) -> int:
        """The most numbers to which an agent adds noise in a round."""
        return -(-statements.entries(self._payload()) // self.statics.agents)

    @property
    def devices(self) -> int:
        """Devices that the agents are spread over."""
        return 1 if self.statics.mesh is None else self.statics.mesh.size

    def rounding(self, *, release: bool) -> tuple[float, int | None]:
        """The share of the clip norm that rounding sums of records takes, and a better pass length.

        Args:
            release: Whether a share above `statements.LIMIT` is refused with a remedy.

        Returns:
            The share r, 0 where agents are clipped. The largest power of two as a pass length for
            which r is at most `statements.LIMIT`; None where there is none, or outside a release.
        """
        if isinstance(self.statics.query, AgentQuery):
            return 0.0, None
        query: Any = self.statics.query_of(self.data.frozen)

        def batch(data: Data, key: Any) -> Any:
            return self.statics.batch(whole(data), key, key, jnp.int32(0))

        data, key = self.statics.of_first_seed(self.data), self.batch_keys[0]
        shapes = self._agents_models(), jax.eval_shape(batch, data, key)
        share = query.share(*shapes)
        lengths = [2**p for p in range(17, -1, -1)] if release and share > statements.LIMIT else []
        shares = ((m, dataclasses.replace(query, microbatch=m).share(*shapes)) for m in lengths)
        return share, next((m for m, one in shares if one <= statements.LIMIT), None)

    def start(self, values: Any, plans: int) -> Any:
        """Models to start from, leaves [S, V, n, ...], on the agents' devices.

        Args:
            values: The given ones; None for the problem's.
            plans: V.

        Raises:
            ValueError: For other shapes than the problem's, or entries that are not finite.
        """
        shapes = jax.tree.map(
            lambda leaf: (len(leaf), plans, self.statics.agents, *leaf.shape[2:]), self.models
        )
        if values is not None:
            if shapes != (actual := jax.tree.map(np.shape, values)):
                raise ValueError(
                    f"start has shapes {actual}, this run's models {shapes}; give one a run"
                )
            for leaf in jax.tree.leaves(values):
                _validate.finite_array("start", leaf)
            return jax.tree.map(lambda x, model: jnp.array(x, model.dtype), values, self.models)

        def spread(models: Any) -> Any:
            of_agents = lambda leaf, shape: jnp.broadcast_to(leaf[:, None], shape)  # noqa: E731
            return place(jax.tree.map(of_agents, models, shapes), self.statics.mesh, 2)

        # Compiled, so that no device holds the models of all.
        return (spread if self.statics.mesh is None else jax.jit(spread))(self.models)

    def initial(self, start: Any, noise_keys: Any) -> State:
        """The state before the first round.

        Args:
            start: Models, leaves [S, V, n, ...].
            noise_keys: [S] keys of the noise.

        Raises:
            ValueError: Where it does not fit in memory, with its bytes and those there are.
        """
        given = self.statics, self.arrays, start, self.batch_keys, noise_keys
        shapes = program.initial.trace(*given).out_info
        kept = _size(shapes.secret)
        remedy = "run fewer seeds or plans at once, or use more devices"
        if program.keeps_noise(shapes) and 2 * kept > _size(shapes):
            remedy = (
                "give the noise over rounds few diagonals, such as bands=8, of which a run keeps 7 "
                f"rounds (it keeps all rounds of more than {WIDEST + 1} diagonals), or {remedy}"
            )
        what = f"the first state, {kept / 2**30:,.2f} of them for noise kept over rounds"
        self._require_room(-(-_size(shapes) // self.devices), what, remedy)
        return program.initial(*given)

    def memory(self) -> tuple[int, int, int]:
        """Bytes held now, the most so far and the limit: of this process, or its fullest device."""
        known = _device_memory(self.statics.mesh)
        return max(known) if known else (*_validate.resident(), _validate.memory_limit())

    def _require_room(self, more: int, what: str, remedy: str) -> tuple[int, int]:
        """Refuse what does not fit in memory beside what is held.

        Args:
            more: Bytes that a device adds.
            what: Adds them.
            remedy: What to do about it.

        Returns:
            The bytes held, and those that all devices of this memory add.

        Raises:
            ValueError: With both and the limit.
        """
        shared = not _device_memory(self.statics.mesh)
        more *= len(_local_devices(self.statics.mesh)) if shared else 1
        held, _, limit = self.memory()
        if held + more > limit:
            seeds, plans = len(self.batch_keys), jax.tree.leaves(self.arrays)[0].shape[0]
            sizes = [f"{size / 2**30:,.2f}" for size in (held + more, held, more, limit)]
            raise ValueError(
                f"seeds has {_validate.counted(seeds, 'seed')}, with "
                f"{_validate.counted(plans, 'plan')} of {self.statics.agents} agents, "
                f"whose rounds take {sizes[0]} GiB ({sizes[1]} held and {sizes[2]} more in "
                f"{what}); this {'machine' if shared else 'device'} has {sizes[3]} GiB: {remedy}"
            )
        return held, more

    def compiled(self, traced: Sequence[Any], state: Any) -> tuple[int, int]:
        """Compile the rounds of a run, and refuse them where they do not fit in memory.

        Args:
            traced: The programs.
            state: Of their arrays, which are waited for: what they are called with is held already.

        Returns:
            The bytes held, and those that the largest program adds: its outputs and intermediate
            values, without the state whose buffers it uses again.

        Raises:
            ValueError: With both and the limit.
        """
        analyses = [each.lower().compile().memory_analysis() for each in traced]
        added = [
            one.temp_size_in_bytes + one.output_size_in_bytes - one.alias_size_in_bytes
            for one in filter(None, analyses)  # Not every platform knows.
        ]
        jax.block_until_ready(state)
        remedy = (
            "run fewer seeds or plans at once, give Protect(microbatch=...) for clipped records, "
            "or use more devices"
        )
        return self._require_room(max(added, default=0), "the compiled program", remedy)

    def _agents_models(self) -> Any:
        n = self.statics.agents
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((n, *leaf.shape[2:]), leaf.dtype), self.models
        )

    def _payload(self) -> Any:
        return jax.eval_shape(self.statics.method.payload, self._agents_models())

    def _check_precision(self, plans: tuple[Plan, ...]) -> None:
        """Refuse narrow parameters where the private payload is rounded before the noise."""
        records = plans[0].config.protect.clips == "record"
        # These are sums of clipped records, updated models, and gradients without a clip.
        summed = records or self.statics.method.sensitivity is not None
        summed |= any(plan.config.protect.gradient_gap is not None for plan in plans)
        trees = ([self.models] if records else []) + ([self._payload()] if summed else [])
        for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
            if jnp.finfo(leaf.dtype).bits < 32:
                text = "to which what is private is rounded before the noise; use float32"
                raise ValueError(f"params{jax.tree_util.keystr(path[1:])} are {leaf.dtype}, {text}")


def make_statics(
    plans: tuple[Plan, ...], problems: tuple[Problem, ...], mesh: Mesh | None = None
) -> Statics:
    """The static parts that all runs of a call share.

    Args:
        plans: At least one.
        problems: One, or one a seed.
        mesh: From `agent_mesh`.

    Raises:
        ValueError: For plans that differ in what they must share.
    """
    # Without noise the factor is zero, so that draws add nothing.
    noisy = next((plan for plan in plans if plan.noise is not None), plans[0])
    shared = shared_parts(noisy)
    for plan in plans:
        for name, value in shared_parts(plan).items():
            if value != shared[name] and not (name == "noise" and value is None):
                named = "label" if name == "noise" else name
                one, two = (getattr(each.config, named, None) for each in (noisy, plan))
                one, two = map(_validate.shown, (one, two) if one != two else (shared[name], value))
                raise ValueError(
                    f"plans differ in {name} ({one} and {two}); use dp.sweep, or run each alone"
                )
    task, protect, sampler = problems[0], noisy.config.protect, shared["sampler"]
    clip: Any = {name: getattr(protect, name) for name in ("clip_norm", "clipping", "per_layer")}
    clip |= {"copies": task.variants}
    query: AgentQuery | RecordQuery
    if protect.clips == "record":
        clip |= {"microbatch": protect.microbatch, "capacity": sampler.capacity}
        query = RecordQuery(task.loss, task.weighted, **clip)
    else:
        params = jax.eval_shape(task.init, jax.random.key(0))
        clip |= {"norm": protect.norm, "one_by_one": _numerics.one_by_one(params)}
        query = AgentQuery(task.loss, task.batch_loss, **clip)
    # A sketch is of single gradients, whatever the model sums.
    formed = query.one_by_one or getattr(shared["method"], "sketch", None) is not None
    return Statics(
        agents=noisy.agents,
        method=shared["method"],
        query=query,
        sampler=sampler,
        optimizer=shared["optimizer"],
        divisor=sampler.divisor if protect.clips == "record" else 1,
        privatizer=shared["noise"],
        metrics=task.metrics,
        mesh=mesh,
        sequential=formed and jax.default_backend() == "cpu",
        data_per_seed=len(problems) > 1,
        release=plans[0].config.release,
    )


def shared_parts(plan: Plan) -> dict[str, Any]:
    """The parts that plans of one call must share, by name.

    Args:
        plan: One of them.
    """
    protect = plan.config.protect
    names = ("clip_norm", "norm", "clipping", "microbatch", "per_layer", "clips")
    return {
        "rounds": plan.config.rounds,
        "agents": plan.agents,
        "method": plan.method,
        "optimizer": plan.config.optimizer.shared(),
        "sampler": plan.sampler,
        **{name: getattr(protect, name) for name in names},
        "mixing": plan.mixing.shape,
        "noise": plan.privatizer,
    }


def stacked_arrays(
    plans: tuple[Plan, ...],
    mesh: Any = None,
    privatizer: Any = None,
    models: Any = (),
    tables: bool = False,
) -> dict[str, Any]:
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

    def of_plan(plan: Plan, name: str, one: np.ndarray) -> np.ndarray:
        array = plan.arrays.get(name, np.zeros_like(one))
        wide = max(np.ndim(each.arrays.get(name, 0)) for each in plans)
        # A diagonal beside factors that have more.
        return np.diag(array) if name == "factor" and array.ndim < wide else array

    stacked = {
        name: np.stack([of_plan(plan, name, one) for plan in plans]).astype(kind)
        for name, one in like.items()
    }
    if layout is None:
        stacked["mixing"] = np.stack([mixing.dense(plan.mixing) for plan in plans]).astype(kind)
    if privatizer is not None:
        stacked = privatizer.compact(stacked)
    placed: dict[str, Any] = {
        name: place(array, mesh, array.ndim - 2 if array.ndim > 2 else None)
        for name, array in stacked.items()
    }
    if layout is not None:
        divided = layout if mesh is None else gossip.partitioned(layout, mesh)

        def of_plans(part: np.ndarray) -> Any:
            return place(np.stack([part] * len(plans)), mesh, max(1, part.ndim - 1))

        placed["mixing"] = jax.tree.map(of_plans, divided)
    return placed


def _same(one: Any, other: Any) -> bool:
    """Whether two mixing matrices, dense or sparse, are equal in every entry."""
    if one is other:
        return True
    sparse = [scipy.sparse.issparse(each) for each in (one, other)]
    return not (one != other).nnz if all(sparse) else not any(sparse) and np.array_equal(one, other)


def _data_of(problem: Problem) -> Data:
    partition = problem.partition
    return Data(problem.x, problem.y, partition.indices, partition.counts, problem.evaluation)


def stacked_data(problems: tuple[Problem, ...], mesh: Any = None) -> Data:
    """Put the data on the devices.

    Args:
        problems: One, shared by all seeds, or one for each seed.
        mesh: From `agent_mesh`.

    Returns:
        The data. With several problems every leaf has the seeds as its leading axis, except frozen
        values, which all seeds share.
    """
    data, over = [_data_of(problem) for problem in problems], int(len(problems) > 1)
    records: dict[str, Any] = {}
    if mesh is not None or problems[0].local:
        firsts, records = _by_device(problems, mesh, over)
        data = [one._replace(x=(), y=(), first=i) for one, i in zip(data, firsts, strict=True)]
    axes = Data(None, None, over, over, None, over)
    joint = jax.tree.map(_joined, *data)
    placed = Data(*(place(part, mesh, axis) for part, axis in zip(joint, axes, strict=True)))
    return placed._replace(**records, frozen=place(problems[0].frozen, mesh, None))


def _joined(*leaves: Any) -> Any:
    """Arrays of the seeds' problems, stacked on the host: compiling so many would take long."""
    return leaves[0] if len(leaves) == 1 else np.stack(leaves)


def _by_device(problems: Any, mesh: Mesh | None, over: int) -> tuple[Any, dict[str, Any]]:
    """Where each agent's records begin, for each problem, and x and y by device."""
    devices = 1 if mesh is None else mesh.size
    firsts, rows = zip(*(blocks(one.partition, devices) for one in problems), strict=True)
    most = max(each.shape[1] for each in rows)
    own = []
    for problem, each in zip(problems, rows, strict=True):
        at = np.pad(each[mine(mesh)], ((0, 0), (0, most - each.shape[1]))).ravel()
        at = np.searchsorted(local(problem.partition), at) if problem.local else at
        own.append((problem.x[at], problem.y[at]))
    x, y = (place_own(_joined(*each), mesh, over) for each in zip(*own, strict=True))
    return firsts, {"x": x, "y": y}


def agent_mesh(n: int, devices: int | None) -> Mesh | None:
    """Make a one-dimensional mesh for n agents.

    Args:
        n: Number of agents.
        devices: How many of `jax.devices()` to use; None or one device is no mesh.

    Returns:
        The mesh with the one axis `AGENTS`, or None for a single device.

    Raises:
        ValueError: If there are fewer devices or agents, or for less than all devices of several
            processes.
    """
    available = jax.devices()
    if (joined := jax.process_count()) > 1 and devices != len(available):
        raise ValueError(
            f"devices is {devices} in {joined} processes that jax.distributed joined; give all of "
            f"theirs, devices={len(available)}"
        )
    if devices is None:
        return None
    _validate.integer(
        "devices", devices, most=len(available),
        remedy=f"this process has {len(available)}, choose 1 to {len(available)} (on CPUs the "
        "variable JAX_NUM_CPU_DEVICES, set before JAX starts, is how many it has)",
    )  # fmt: skip
    if devices > n:
        raise ValueError(f"devices is {devices} for {n} agents; choose 1 to {n}")
    return None if devices == 1 else Mesh(np.asarray(available[:devices]), (_numerics.AGENTS,))


def _check_size(task: Problem, plans: tuple[Plan, ...], seeds: int, statics: Statics) -> None:
    """Refuse models that do not fit in memory twice: those to start from, and the state's."""
    leaves = jax.tree.leaves(jax.eval_shape(task.init, jax.random.key(0)))
    entries = sum(leaf.size for leaf in leaves)
    size = _size(leaves)
    n, runs, limits = statics.agents, len(plans) * seeds, _device_memory(statics.mesh)
    shape = f"[{seeds} seeds, {len(plans)} plans, {n} agents, {entries:,} entries]"
    _validate.memory(
        "problem", task, f"the array {shape} of models, with their first state,", 2, runs, n, size,
        item=1, most=sum(limit for *_, limit in limits) or None,
    )  # fmt: skip


def _size(tree: Any) -> int:
    """Bytes of a tree of shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _local_devices(mesh: Mesh | None) -> Sequence[Any]:
    return jax.local_devices()[:1] if mesh is None else mesh.local_devices


def _device_memory(mesh: Mesh | None) -> list[tuple[int, int, int]]:
    """Bytes in use, the most so far and the limit of each device; empty for the host's memory."""
    names = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
    stats = [each.memory_stats() or {} for each in _local_devices(mesh)]
    known = all(name in each for each in stats for name in names)
    return [tuple(each[name] for name in names) for each in stats] if known else []


def _initial_models(task: Problem, seed_keys: Any) -> Any:
    """Initial models, leaves [S, n, ...] from the seed's key and the agent's number, or [S, 1]."""
    if not task.apart:
        return jax.tree.map(lambda leaf: leaf[:, None], jax.vmap(task.init)(seed_keys))

    def of_agent(key: Any, agent: Any) -> Any:
        return task.init(jax.random.fold_in(key, agent))

    of_seed = jax.vmap(of_agent, in_axes=(None, 0))
    return jax.vmap(of_seed, in_axes=(0, None))(seed_keys, jnp.arange(task.agents))
