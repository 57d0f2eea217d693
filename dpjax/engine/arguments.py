"""The arguments of a run: plans, problems, seeds and devices that fit."""

import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _validate
from dpjax.engine.processes import agent_mesh
from dpjax.learning import parameters
from dpjax.learning.problem import Problem
from dpjax.plans import compatibility, custom
from dpjax.plans.plan import Plan
from dpjax.protocols import Noise, Tree
from dpjax.topology import nodes

__all__ = ()

Plans: TypeAlias = tuple[Plan, ...]
Problems: TypeAlias = tuple[Problem, ...]
Seeds: TypeAlias = tuple[int, ...]
Tasks: TypeAlias = tuple[Plans, Problems, Seeds]


def check_run(plans: Any, problem: Any, seeds: Any, agents: Sequence[int] | None = None) -> Tasks:
    """Check that plans, problems and seeds fit.

    Args:
        plans: One plan or several.
        problem: One problem, or one for each seed that differs in its data alone.
        seeds: Whole numbers below 2**32, each once.
        agents: Some agents of one plan, of which alone the problem may be; None is all.

    Returns:
        All as tuples.

    Raises:
        ValueError: Naming what does not fit.
    """
    plans = tuple(plans) if isinstance(plans, list | tuple) else (plans,)
    if not plans or not all(isinstance(plan, Plan) for plan in plans):
        kinds = ", ".join(type(plan).__name__ for plan in plans)
        raise ValueError(f"plans is [{kinds}]; give one or more from dp.make_plan")
    # A result tells plans apart by their labels alone.
    noises: dict[str, Noise | None] = {}
    for plan in plans:
        label = plan.config.label
        noise = plan.config.noise
        if noises.setdefault(label, noise) != noise:
            raise ValueError(
                f"plans have two noise designs that are called {label!r}, which a result could "
                "not tell apart; give each a name of its own, or run each alone"
            )
    problems, seeds = check_tasks(problem, seeds)
    # Plans of a seed share its raw normals, of which a release may show one use.
    if any(plan.config.release for plan in plans) and len(plans) * len(seeds) != 1:
        raise ValueError(
            f"a release came with {len(plans)} plans and {len(seeds)} seeds, which would share raw "
            "noise; run one plan with one seed"
        )
    config = plans[0].config
    if agents is None and config.release and not compatibility.noise(config.noise).one_process:
        raise ValueError(
            f"release is True with noise {config.noise} in one process: its secrets are those of "
            "several holders. Run it as sites (dp.site), or give release=False"
        )
    for problem in problems:
        _check_counts(plans, problem, agents)
    return plans, problems, seeds


def check_tasks(problem: Any, seeds: Any) -> tuple[Problems, Seeds]:
    """Check problems and seeds alone, as `check_run` does.

    Args:
        problem: One problem, or one for each seed.
        seeds: Whole numbers.
    """
    problems = tuple(problem) if isinstance(problem, list | tuple) else (problem,)
    if isinstance(seeds, str | bytes) or not np.iterable(seeds):
        raise _validate.refusal("seeds", seeds, "give whole numbers, such as [0]")
    seeds = tuple(_validate.integer("seeds", seed, minimum=0, maximum=2**32 - 1) for seed in seeds)
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds is {seeds}; give at least one, each once")
    # Seeds share one problem, or each of them has data of its own.
    if len(problems) not in (1, len(seeds)):
        raise ValueError(
            f"problem is {len(problems)} problems for {len(seeds)} seeds; give one, or one a seed"
        )
    for problem in problems:
        if not isinstance(problem, Problem):
            raise ValueError(
                f"problem is {type(problem).__name__}; give a learning.problem.Problem"
            )
        if problem is not problems[0]:
            _check_alike(problem, problems[0])
    return problems, seeds


def _check_alike(problem: Problem, first: Problem) -> None:
    """Refuse a problem of another seed that differs in more than its data."""
    names = (
        "init",
        "loss",
        "metrics",
        "batch_loss",
        "augment",
        "augmentation_multiplicity",
        "init_per_agent",
        "local",
    )
    # One program runs all seeds, so all that it is traced from must be equal.
    alike = {name: getattr(problem, name) == getattr(first, name) for name in names}
    alike["frozen values"] = parameters.equal_trees(problem.frozen, first.frozen)
    alike["the shapes of its arrays"] = _shapes(problem) == _shapes(first)
    for name, is_alike in alike.items():
        if not is_alike:
            raise ValueError(
                f"problem differs in {name} between seeds; only values of data may differ"
            )


def _shapes(problem: Problem) -> Tree:
    """The shapes of a problem's arrays."""
    partition = problem.partition
    arrays = problem.x, problem.y, partition.indices, partition.counts, problem.evaluation
    return jax.tree.map(np.shape, arrays)


def _check_counts(plans: Plans, problem: Problem, agents: Sequence[int] | None) -> None:
    """Refuse agents or records that plans are not for, and samplers that cannot draw these."""
    counts = problem.partition.counts
    names = problem.partition.names
    for plan in plans:
        members = list(range(plan.agents))
        if agents is not None:
            of_some = _validate.agents("agents", agents, maximum=plan.agents - 1)
            if not of_some or len(set(of_some)) != len(of_some):
                raise _validate.refusal("agents", agents, "give one or more, each once")
            if problem.agents == len(of_some):
                members = of_some
        if len(members) != problem.agents:
            raise ValueError(
                f"the plan is for {plan.agents} agents, the problem has {problem.agents}; "
                "partition the data over the network's agents"
            )
        # Rates and divisors follow from the counts that the plan was made for.
        planned = counts if plan.counts is None else plan.counts[members]
        if not np.array_equal(planned, counts):
            raise ValueError(
                f"the plan is for {_validate.shown(planned.tolist())} records of the agents, the "
                f"problem has {_validate.shown(counts.tolist())}; make it with counts=shards.counts"
            )
    if problem.partition.origin == "private" and plans[0].config.release:
        raise ValueError(
            "partition is made from private values (labels in partition.dirichlet), so that a "
            "record that changes moves others to other agents, which no release covers. Deal "
            'records by partition.iid, by_size or by_owner ("iid" or "owner" in a file of '
            "settings), or give release=False"
        )
    titles = None if names is None else [nodes.title(names, i) for i in range(len(names))]
    # Plans of a run share their sampler.
    plans[0].sampler.check(counts, titles)
    # One of a user's own was tried on the plan's numbers of records, if it knew any.
    if plans[0].counts is None and compatibility.custom_names(plans[0].sampler):
        custom.check_sampler(dataclasses.replace(plans[0].target, counts=counts))


def check_device(plans: Sequence[Plan], devices: int | None) -> None:
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
    if not plans[0].config.release:
        return
    # The noise key stays in one process.
    if jax.process_count() > 1:
        raise ValueError(
            f"release is True in {jax.process_count()} processes, each of which would hold the "
            "noise key; run a release in one"
        )
    mesh = agent_mesh(plans[0].agents, devices)
    # Where arrays lie by default, and where the agents are.
    platforms = {device.platform for device in jnp.zeros(()).devices()}
    if mesh is not None:
        platforms |= {device.platform for device in mesh.devices.flat}
    for platform in sorted(platforms - {"cpu", "gpu"}):
        raise ValueError(
            f"release is True on a {platform}, whose float64 may be coarser than 2^-53; run "
            "releases on a CPU or a GPU"
        )
    # Compilers that assume finite numbers drop the clip's checks for nan.
    flags = _flags()
    for name, is_on in flags.items():
        if is_on and "enable_fast_" in name:
            raise ValueError(
                f"release is True with {name} in XLA_FLAGS, under which nan may pass for a number; "
                "leave it out before Python starts"
            )
    # Atomic additions come in another order each time, and a resumed round must send the same bits.
    deterministic = "--xla_gpu_deterministic_ops"
    if "gpu" in platforms and not flags.get(deterministic, False):
        raise ValueError(
            "release is True on a gpu, whose sums differ from one time to the next; set "
            f"XLA_FLAGS={deterministic}=true before Python starts, since XLA reads it once"
        )


def _flags() -> dict[str, bool]:
    """XLA's flags by name, whether they are on; the last one counts."""
    text = os.environ.get("XLA_FLAGS", "")
    # The name of a file of flags has no dash in front.
    if text and text[0] != "-" and not text[0].isspace():
        text = Path(text).read_text(encoding="utf-8") if Path(text).is_file() else ""
    flags = {}
    for word in shlex.split(text):
        name, equal, value = word.partition("=")
        # A flag without a value is on.
        flags[name] = not equal or value.lower() in ("true", "1")
    return flags
