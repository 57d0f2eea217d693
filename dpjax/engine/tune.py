"""Choose step sizes on other seeds and held-out data than those that are reported."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dpjax import _validate
from dpjax.engine.run import Result
from dpjax.plans import plan as plan_

__all__ = ["best_steps", "grid"]


def grid(
    configs: Mapping[str, plan_.Config], steps: Sequence[float], mixing: Any
) -> list[plan_.Plan]:
    """Plans for every config at every step size; each noise design is made once.

    Args:
        configs: name -> config.
        steps: Step sizes, above 0.
        mixing: [n, n] mixing matrix.

    Returns:
        Plans, config by config, step by step.
    """
    if not len(steps):
        raise ValueError("steps is empty; give at least one step size")
    plans = []
    for config in configs.values():
        design: Any = None
        for step in steps:
            optimizer = replace(config.optimizer, step_size=_validate.positive("steps", step))
            config = replace(config, optimizer=optimizer)
            plans.append(plan_.make(config, mixing, design=design))
            design = plans[-1].design
    return plans


def best_steps(result: Result, metric: str = "test_loss") -> dict[str, float]:
    """The step size with the least final metric, averaged over seeds, for each design.

    The search is not accounted for in the guarantee: as in the papers, epsilon is one run's.

    Args:
        result: A run of `grid`'s plans.
        metric: Which of its metrics, smaller is better; a diverged run counts as infinite.

    Returns:
        design (a covariance's name) -> step size.
    """
    _validate.one_of("metric", metric, result.metrics)
    final = np.nan_to_num(result.metrics[metric][-1].mean(axis=0), nan=np.inf)
    best: dict[str, tuple[float, float]] = {}
    for terms, value in zip(result.terms, final, strict=True):
        if terms.label not in best or value < best[terms.label][0]:
            best[terms.label] = (float(value), terms.step_size)
    return {design: step for design, (_, step) in best.items()}
