"""The static parts of a run, which all plans of a call share."""

from typing import Any

import jax
from jax.sharding import Mesh

from dpjax import _validate
from dpjax.engine.arguments import Plans, Problems
from dpjax.engine.step import Statics
from dpjax.plans.plan import Plan

__all__: list[str] = []


def make_statics(plans: Plans, problems: Problems, mesh: Mesh | None = None) -> Statics:
    """The static parts that all runs of a call share.

    Args:
        plans: At least one.
        problems: One, or one a seed.
        mesh: From `dpjax.engine.processes.agent_mesh`.

    Raises:
        ValueError: For plans that differ in what they must share.
    """
    # Without noise the factor is zero, so that draws add nothing.
    noisy = next((plan for plan in plans if plan.noise is not None), plans[0])
    for plan in plans:
        _check_shared(plan, noisy)
    problem = problems[0]
    protect = noisy.config.protect
    query = protect.query(problem, noisy.sampler.capacity)
    # A sketch is of single gradients, whatever the model sums.
    forms_gradients = query.one_by_one or noisy.method.sketches_gradients
    return Statics(
        agents=noisy.agents,
        method=noisy.method,
        query=query,
        sampler=noisy.sampler,
        optimizer=noisy.config.optimizer.shared(),
        divisor=noisy.sampler.divisor if protect.clips == "record" else 1,
        privatizer=noisy.privatizer,
        metrics=problem.metrics,
        mesh=mesh,
        sequential=forms_gradients and jax.default_backend() == "cpu",
        data_per_seed=len(problems) > 1,
        release=plans[0].config.release,
    )


def _check_shared(plan: Plan, noisy: Plan) -> None:
    """Refuse a plan that differs from another in what they must share; it may lack the noise."""
    shared = shared_parts(noisy)
    for name, value in shared_parts(plan).items():
        if value == shared[name] or (name == "noise" and value is None):
            continue
        # The config's own word for a part says more than the part.
        field = "label" if name == "noise" else name
        first = getattr(noisy.config, field, None)
        second = getattr(plan.config, field, None)
        if first == second:
            first = shared[name]
            second = value
        raise ValueError(
            f"plans differ in {name} ({_validate.shown(first)} and {_validate.shown(second)}); use "
            "dp.sweep, or run each alone"
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
