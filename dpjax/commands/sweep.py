"""Sweeps: configs of a grid on one problem, compatible ones in one run, runs in parallel."""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import numpy as np

from dpjax import _files, _numerics, _validate, _workers
from dpjax.accounting.guarantee import Guarantee
from dpjax.accounting.parties import epsilon_text
from dpjax.engine import arguments, checkpoint
from dpjax.engine.run import ScanDriver, run
from dpjax.engine.state import RunSchedule, RunState
from dpjax.engine.step import shared_parts
from dpjax.learning import parameters
from dpjax.learning.problem import Problem
from dpjax.mechanism.design import Design
from dpjax.plans import compatibility, identity, noise
from dpjax.plans import plan as plan_
from dpjax.plans.optimizers import Chain
from dpjax.plans.plan import Config, Plan
from dpjax.results import records
from dpjax.topology import mixing as mixing_

if TYPE_CHECKING:
    import pandas

__all__ = ["Sweep", "sweep"]

_Point: TypeAlias = Mapping[str, Any]
"""The values of a point of a grid, by field."""
_Work: TypeAlias = Mapping[Path, tuple[Sequence[Config], Sequence[_Point]]]
"""Files, and the group of configs that each is of, with their columns."""


class _Task(NamedTuple):
    """What the rows of all configs depend on beside these.

    Attributes:
        problems: One, or one for each seed.
        mixing: [n, n], or [P, n, n].
        options: Of `dpjax.engine.run.run`: seeds, eval_every, devices.
    """

    problems: Sequence[Problem]
    mixing: mixing_.DenseMixing
    options: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Sweep:
    """The rows of a sweep.

    Attributes:
        points: What was swept: each one's values by field. Points of equal configs are one, as a
            run without noise is the same at every budget.
        frame: Rows of `dpjax.engine.result.Result.rows`, with a column for each field that these
            lack, and ``point``, the number of its point.

    Example:
        >>> import dpjax as dp
        >>> parts = dict(rounds=10, sampler=dp.samplers.Random(1), optimizer=dp.optimizers.Sgd(1.0))
        >>> config = dp.Config(protect=dp.Protect("replace_agent", clip_norm=9.0), **parts)
        >>> tuned = dp.sweep(
        ...     config, {"optimizer.step_size": [0.01, 0.2]},
        ...     dp.mixing.metropolis_hastings(dp.graphs.ring(4)), dp.quadratics(4), seeds=[0],
        ... )
        >>> tuned.best("mean_gap", over="optimizer.step_size")
        [{'optimizer.step_size': 0.2}]
    """

    points: tuple[_Point, ...]
    frame: "pandas.DataFrame" = dataclasses.field(repr=False)

    def to_frame(self) -> "pandas.DataFrame":
        """Its rows, a copy."""
        return self.frame.copy()

    def summary(self) -> str:
        """A table of the last metrics: mean +- standard error over seeds, a line for each point.

        ``epsilon`` is that of the point's guarantee, rounded up, or the range of its agents'. Noise
        designs are called as in figures.
        """
        from dpjax.results import tables

        fields = list(dict.fromkeys(name for point in self.points for name in point))
        names = list(self.frame)
        metrics = [n for n in names[names.index("round") + 1 :] if n not in (*fields, "point")]
        rows = []
        for number, part in self.frame.groupby(["point", "seed"]).tail(1).groupby("point"):
            values = {name: part[name].iloc[0] for name in fields if name in self.points[number]}
            if "noise" in values:
                values["noise"] = noise.display_name(part["design"].iloc[0])
            guarantee = Guarantee.from_dict(part["guarantee"].iloc[0])
            row = dict.fromkeys(fields, "") | values | {"epsilon": epsilon_text(guarantee)}
            rows.append(row | {name: tables.measured(part[name]) for name in metrics})
        return tables.text(rows)

    def best(
        self, metric: str, over: str | Collection[str], *, largest: bool = False
    ) -> list[_Point]:
        """The best points, one for each combination of the other fields: a grid for `sweep`.

        The search is not accounted for in any guarantee, which is one run's.

        Args:
            metric: Compared after the last round, as a mean over seeds.
            over: The field or fields that are chosen.
            largest: True where a larger value is better, as of an accuracy; a run that diverged is
                the worst either way.

        Raises:
            ValueError: For another metric or field.
        """
        if isinstance(over, str):
            searched = [over]
        else:
            searched = list(over)
        for name in searched:
            _validate.one_of("over", name, self.points[0])
        _validate.one_of("metric", metric, self.frame)
        # The last round of each run is what was trained for.
        last = self.frame.groupby(["point", "seed"]).tail(1)
        # A run that diverged is the worst, whichever way is better.
        losses = (-last[metric] if largest else last[metric]).fillna(math.inf)
        best: dict[int, _Point] = {}
        for index in losses.groupby(last["point"]).mean().sort_values(kind="stable").index:
            point = self.points[index]
            others = {name: point[name] for name in point if name not in searched}
            # Points come from the best to the worst: the first of its kind stays.
            if not any(_same(others, other) for other in best.values()):
                best[index] = others
        return [self.points[index] for index in sorted(best)]


def sweep(
    config: Config,
    grid: Mapping[str, Sequence[Any]] | Sequence[_Point],
    mixing: mixing_.DenseMixing,
    problem: Problem | Sequence[Problem],
    *,
    seeds: Sequence[int],
    eval_every: int | None = None,
    devices: int | None = None,
    folder: _files.PathLike | None = None,
    parallel: int | _files.PathLike = 1,
    progress: bool = False,
) -> Sweep:
    """Run a config with every combination of values of its fields.

    Configs that differ only in budget and step size are one run, compiled once (`dpjax.run`).
    Guarantee: as there, each run's own; a sweep is a simulation, whose runs share seeds.

    Args:
        config: What all have in common.
        grid: Fields and the values of each, of which all combinations are run; or a list of
            points, each with its values by field (`Sweep.best`). A field is one of the config or
            one of a part of it: ``{"noise": [dp.noise.Independent(), None], "budget.epsilon":
            [1.0, 3.0]}``. None for the noise runs without noise and budget.
        mixing: [n, n] mixing matrix, or [P, n, n].
        problem: Model, data and metrics; or one problem for each seed.
        seeds: Seeds of every run.
        eval_every: Rounds between two measurements; None is a twentieth of the rounds.
        devices: Number of devices over which the agents of a run are spread.
        folder: For records, a file for each run; what it holds is read instead of run, and a run
            that was stopped carries on. Files are tied to the run's configs, network and data, the
            settings of JAX, and the versions of dpjax and JAX. They are also tied to what your
            functions (of the problem, or in a ``Chain``) and custom classes compute in JAX and make
            of a plan, but not to what callbacks do on the host. Processes with the same folder
            share the work. Workers load compiled programs from it, so protect the folder as you
            protect your code. None keeps nothing.
        parallel: Processes, or the path of a YAML file for jobs of a cluster: ``workers`` (how
            many) and parameters of submitit. The numbers have the bits of one process: workers have
            this process's settings of JAX.
        progress: Print how many points are done, and where there is one process each run's bar.

    Returns:
        The rows of all runs.

    Raises:
        ValueError: For a field that the config lacks, values that do not fit together, a release,
            functions that cannot be sent to workers, or workers that ended before all runs did.

    Example:
        >>> import dpjax as dp
        >>> config = dp.Config(
        ...     protect=dp.Protect("replace_agent", clip_norm=1.0), sampler=dp.samplers.Random(1),
        ...     noise=dp.noise.Independent(), budget=dp.Budget(5.0, delta=1e-5), rounds=20,
        ...     optimizer=dp.optimizers.Sgd(0.05),
        ... )
        >>> grid = {"noise": [dp.noise.Independent(), None], "budget.epsilon": [10.0, 30.0]}
        >>> W = dp.mixing.metropolis_hastings(dp.graphs.complete(6))
        >>> swept = dp.sweep(config, grid, W, dp.quadratics(6), seeds=[0, 1], eval_every=20)
        >>> swept.to_frame()[["noise", "budget.epsilon", "epsilon", "seed", "round"]]
                 noise  budget.epsilon  epsilon  seed  round
        0  independent            10.0     10.0     0     20
        1  independent            10.0     10.0     1     20
        2  independent            30.0     30.0     0     20
        3  independent            30.0     30.0     1     20
        4         None             NaN      inf     0     20
        5         None             NaN      inf     1     20
    """
    import pandas

    points: dict[Config, _Point] = {}
    for point in _combinations(grid):
        points.setdefault(_replaced(config, point), point)
    if any(config.release for config in points):
        raise ValueError("config is a release, which runs once; give release=False to try values")
    problems, seeds = arguments.check_tasks(problem, seeds)
    options = {"seeds": seeds, "eval_every": eval_every, "devices": devices}
    task = _Task(problems, mixing, options)
    groups = collections.defaultdict(list)
    for config in points:
        # Budget and step size may differ within a compiled program, these may not.
        shared = config.protect, config.sampler, config.rounds, config.noise, config.method
        groups[*shared, config.optimizer.shared()].append(config)
    with contextlib.ExitStack() as stack:
        if not isinstance(folder, str | os.PathLike | None):
            raise _validate.refusal("folder", folder, "give a path, or None")
        if folder is None and isinstance(parallel, str | os.PathLike):
            raise ValueError("folder is missing; name one that all machines of the cluster share")
        columns_of = {config: _columns(config, points[config]) for config in points}
        text, number = collections.Counter(map(repr, columns_of.values())).most_common(1)[0]
        # Two points under one text would be one row, and a mean over both.
        if number > 1:
            raise ValueError(
                f"grid has {number} points that rows show as {text}; give functions and designs of "
                "your own a name each"
            )
        place = Path(folder or stack.enter_context(tempfile.TemporaryDirectory()))
        described = _described(task)
        work = {}
        for group in groups.values():
            columns = [columns_of[config] for config in group]
            text = json.dumps(
                identity.described([described, group, columns], "grid"), sort_keys=True
            )
            if folder is not None:
                text += _computation(group, task)
            # The file's name: another config, network, problem or version has another file.
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            work[place / f"{digest}.jsonl"] = group, columns
        fill = functools.partial(_fill, work, task)
        team = None
        if parallel != 1:
            team = stack.enter_context(_workers.Team(parallel, fill, place, _files.say))
        fill(team, _files.say, progress)
        frames = []
        # Files hold groups, whatever order points were given in.
        numbers = {config: number for number, config in enumerate(points)}
        for path, (group, _) in work.items():
            # Its digest is of what stands in the file, whatever that is called now.
            name = records.read_metadata(path).get("sweep", path.stem)
            if name != path.stem:
                raise ValueError(f"{path} was {name}.jsonl; call it so again, or delete it")
            rows = records.read(path)
            frames.append(rows.assign(point=[numbers[group[index]] for index in rows["plan"]]))
    frame = pandas.concat(frames).sort_values("point", kind="stable", ignore_index=True)
    return Sweep(tuple(points.values()), frame.drop(columns="plan"))


def _same(point: _Point, other: _Point) -> bool:
    """Whether two points have equal values, of which some may be arrays."""

    def equal(a: Any, b: Any) -> bool:
        return a is b or bool(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b)

    return point.keys() == other.keys() and all(equal(point[name], other[name]) for name in point)


def _combinations(grid: Any) -> list[_Point]:
    """The points of a grid."""
    lists = grid.values() if isinstance(grid, Mapping) else [None]
    if all(isinstance(values, Collection) and not isinstance(values, str) for values in lists):
        grid = [
            dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())
        ]
    points = grid if isinstance(grid, Collection) else ()
    names = (point if isinstance(point, Mapping) else [None] for point in points)
    if not points or not all(isinstance(name, str) for name in itertools.chain(*names)):
        raise _validate.refusal("grid", grid, "give a list of values for each field")
    return list(grid)


def _replaced(config: Config, point: _Point) -> Config:
    """The config with the values of a point."""
    changes: dict[str, Any] = {}
    for name in sorted(point):  # Whole parts come before their own fields.
        field, _, inner = name.partition(".")
        parts = vars(config) | changes
        inner_fields = getattr(parts.get(field), "__dataclass_fields__", ())
        choices = [*parts, *(f"{field}.{key}" for key in inner_fields)]
        _validate.one_of("a field of grid", name, choices)
        value = point[name]
        if inner:
            value = dataclasses.replace(parts[field], **{inner: value})
        changes[field] = value
    # A run without noise keeps no budget, whatever the grid says of it.
    if changes.get("noise", config.noise) is None:
        changes |= {"noise": None, "budget": None}
    return dataclasses.replace(config, **changes)


def _described(task: _Task) -> list[Any]:
    """Digests of a task."""
    problems, mixing, options = task
    matrix = mixing_.check_mixing(mixing, stochastic=None, connected=False)
    functions = _functions(problems[0])
    traced = [jax.jit(function).trace(*arguments) for function, *arguments in functions]
    program = checkpoint.computation(traced, release=False)
    described = checkpoint.of_arguments([], problems, options["seeds"], options)
    return [described, program, mixing_.fingerprint(matrix)]


def _computation(group: Sequence[Config], task: _Task) -> str:
    """Digests of what functions and custom classes in a group's configs compute.

    The package's own parts compute what its version says: of these the text is empty.
    """
    config = group[0]
    custom = compatibility.custom_names(*group)
    if not custom and not isinstance(config.optimizer, Chain):
        return ""
    uses_noise = config.integer_encoded or getattr(config.optimizer, "uses_noise", False)
    if not custom and not uses_noise:
        # A design takes minutes, and such a chain computes the same without noise.
        group = [dataclasses.replace(config, noise=None, budget=None)]
    plans = _plans(group, task)
    options = task.options
    schedule = RunSchedule.of(config.rounds, None, options["eval_every"], 1)
    digests = [f"{plan.fingerprint()} {plan.guarantee.to_dict()}" for plan in plans]
    for indices in _joined(plans):
        # One run has the program's functions; its shapes follow from the task.
        first = (plans[indices[0]],), tuple(task.problems[:1]), options["seeds"][:1]
        state = RunState.first(first, schedule, None, 0, None, throwaway_key=True)
        digests.append(checkpoint.computation(ScanDriver().traced(state), release=False))
    return " ".join(digests)


def _plans(group: Sequence[Config], task: _Task) -> list[Plan]:
    """The plans of a group; the noise of a budget is designed once."""
    counts: Any = task.problems[0].partition.counts
    if any(not np.array_equal(problem.partition.counts, counts) for problem in task.problems):
        counts = None
    # Step sizes decide no noise, and a design takes minutes.
    designs: dict[Hashable, Design | None] = {}
    plans = []
    for config in group:
        design = designs.get(config.budget)
        plans.append(plan_.make(config, task.mixing, counts=counts, design=design))
        designs[config.budget] = plans[-1].design
    return plans


def _joined(plans: Sequence[Plan]) -> list[list[int]]:
    """Numbers of the plans of each run: of those that share what plans of one run must."""
    parts = [shared_parts(plan) for plan in plans]
    firsts = [number for number, part in enumerate(parts) if part not in parts[:number]]
    return [[i for i, part in enumerate(parts) if part == parts[first]] for first in firsts]


def _functions(problem: Problem) -> Iterator[tuple[Any, ...]]:
    """The functions of a problem that its rows depend on, each with arguments of their shapes."""
    # Traced for shapes alone: no number of it is used.
    key = jax.random.key(0, impl=_numerics.THREEFRY)
    n = problem.agents
    trained = jax.eval_shape(problem.init, key)
    params = parameters.merge(trained, problem.frozen)
    example, x, y = problem.x[0], *(np.asarray(array[:2]) for array in (problem.x, problem.y))
    agents = _numerics.shapes(trained, n, dropped=0)
    frozen = {} if problem.frozen is None else {"frozen": problem.frozen}
    yield problem.init, key
    yield problem.loss, params, example, y[0]
    yield functools.partial(problem.metrics, **frozen), agents, problem.evaluation
    if problem.batch_loss is not None:
        yield problem.batch_loss, params, x, y
    weighted = problem.weighted
    if weighted is not None:
        yield lambda p, x, y: weighted(p, x, y, lambda norms: norms), params, x, y
    if problem.augment is not None:
        yield problem.augment, key, example


def _fill(
    work: _Work, task: _Task, team: _workers.Team | None = None,
    say: Callable[[str], None] = lambda text: None, progress: bool = False,
) -> None:  # fmt: skip
    """Run the groups whose files are missing, and write their rows; workers say nothing."""
    done = 0
    total = sum(len(group) for group, _ in work.values())
    for path, missing in _workers.shared_files(work, team, say):
        group, columns = work[path]
        if missing:
            _run(path, group, columns, task, progress)
        done += len(group)
        if progress:
            say(f"{done:,} of {_validate.counted(total, 'point')} done")


def _run(
    path: Path, group: Sequence[Config], columns: Sequence[_Point], task: _Task, progress: bool
) -> None:
    """Run the configs of a group and write their rows."""
    problems, _, options = task
    folder = path.parent / "checkpoints" / path.stem
    plans = _plans(group, task)
    rows = []
    for indices in _joined(plans):
        checkpoint_ = folder / str(indices[0])
        run_plans = [plans[index] for index in indices]
        result = run(run_plans, problems, checkpoint=checkpoint_, progress=progress, **options)
        size = len(result.seeds) * len(result.rounds)
        for number, row in enumerate(result.rows()):
            index = indices[number // size]
            rows.append({**columns[index], **row, "plan": index})
    described = identity.described(group)
    about = records.metadata(seed=options["seeds"], configs=described, sweep=path.stem)
    records.write(path, rows, about)
    # The rows are written, and nothing is left to carry on.
    shutil.rmtree(folder, ignore_errors=True)


def _columns(config: Config, point: _Point) -> dict[str, Any]:
    """The values of a point's fields as a table holds them; nan where the config lacks the part."""
    columns = {}
    for name in point:
        field, _, inner = name.partition(".")
        value = getattr(config, field)
        value = getattr(value, inner, math.nan) if inner else value
        if name == "noise" and value is not None:
            value = config.label
        elif not isinstance(value, str | int | float | None):
            # Addresses of functions differ in every process.
            value = identity.ADDRESS.sub("", repr(value))
        columns[name] = value
    return columns
