"""The static parts of a run, which all plans of a call share."""

from typing import Any

import jax
from jax.sharding import Mesh

from dpjax import _numerics, _validate
from dpjax.engine.step import Statics
from dpjax.learning.problem import Problem
from dpjax.learning.query import AgentQuery, RecordQuery
from dpjax.plans.plan import Plan

__all__: list[str] = []


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
