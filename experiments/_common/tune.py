"""Choose step sizes on other seeds and held-out data than those that are reported."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpjax import _validate
from dpjax.engine.run import Result, run
from dpjax.learning.problem import Problem
from dpjax.plans import plan as plan_

__all__ = ["Reported", "Trial", "best_steps", "check_seeds", "dealt", "grid", "reported"]


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


def best_steps(
    result: Result, metric: str = "test_loss", *, largest: bool = False
) -> dict[str, float]:
    """The step size with the best final metric, averaged over seeds, for each design.

    The search is not accounted for in the guarantee: as in the papers, epsilon is one run's.

    Args:
        result: A run of `grid`'s plans.
        metric: Which of its metrics; a diverged run counts as the worst.
        largest: Whether larger is better, as of an accuracy.

    Returns:
        design (a covariance's name) -> step size.
    """
    _validate.one_of("metric", metric, result.metrics)
    final = (-1 if largest else 1) * result.metrics[metric][-1].mean(axis=0)
    final = np.nan_to_num(final, nan=np.inf)
    best: dict[str, tuple[float, float]] = {}
    for terms, value in zip(result.terms, final, strict=True):
        label = terms["label"]
        if label not in best or value < best[label][0]:
            best[label] = (float(value), terms["step_size"])
    return {design: step for design, (_, step) in best.items()}


class Trial(NamedTuple):
    """One setting of a method, and the step sizes that it is tried with.

    Attributes:
        name: What records call it.
        steps: Step sizes.
        plans: ``plans(steps, count)``: a plan for each step size, for so many training records.
    """

    name: str
    steps: tuple[float, ...]
    plans: Callable[[tuple[float, ...], int], list[plan_.Plan]]


class Reported(NamedTuple):
    """What was tuned, and the runs of the best.

    Attributes:
        tuning: Every trial with its runs on the validation part.
        trial: The best.
        step_size: Its best step size.
        final: Its runs on the whole.
    """

    tuning: tuple[tuple[Trial, Result], ...]
    trial: Trial
    step_size: float
    final: Result

    def rows(
        self, said: Callable[[Trial, Result], Mapping[str, Any]] | None = None, **extra: Any
    ) -> list[dict[str, Any]]:
        """Tidy rows of both phases: of tuning the last round's, of the best all that was measured.

        Args:
            said: What rows say of a trial and its runs.
            extra: Columns of every row.

        Returns:
            Rows with ``phase`` "tuning" or "final", and with ``rounds`` those of the whole run.
        """
        rows = []
        for trial, result in self.tuning:
            own = dict(said(trial, result)) if said else {}
            last = result.rounds[-1]
            made = result.rows(**{**own, "phase": "tuning", **extra})
            rows += [row for row in made if row["round"] == last]
        own = dict(said(self.trial, self.final)) if said else {}
        own |= {"phase": "final", "rounds": self.final.plans[0].config.rounds}
        return rows + self.final.rows(**own, **extra)


def dealt(steps: Sequence[float], settings: int) -> list[tuple[float, ...]]:
    """Deal step sizes out to the settings of a method, so that all together are tried once.

    So methods of many settings have as many trials as those of one.

    Args:
        steps: Step sizes.
        settings: How many settings.

    Returns:
        Step sizes of each setting, in turn.

    Raises:
        ValueError: For fewer step sizes than settings.

    Example:
        >>> from _common import tune
        >>> tune.dealt((4.0, 2.0, 1.0, 0.5), 2)
        [(4.0, 1.0), (2.0, 0.5)]
    """
    settings = _validate.integer("settings", settings)
    if len(steps) < settings:
        raise ValueError(
            f"steps has {len(steps)} entries for {settings} settings; give at least as many"
        )
    return [tuple(steps[index::settings]) for index in range(settings)]


def check_seeds(
    seeds: Iterable[int], tuning_seeds: Iterable[int], name: str = "tuning_seeds"
) -> None:
    """Refuse to tune on seeds that are reported.

    Args:
        seeds: Of the runs that are reported.
        tuning_seeds: Of the runs that choose.
        name: What the second are called.

    Raises:
        ValueError: For a seed in both.
    """
    shared = sorted({*seeds} & {*tuning_seeds})
    if shared:
        verb = "share" if name.endswith("s") else "shares"
        raise ValueError(f"{name} {verb} {shared} with seeds; tune on others")


def reported(
    trials: Sequence[Trial],
    fit: Problem,
    whole: Problem,
    *,
    seeds: Sequence[int],
    tuning_seeds: Sequence[int],
    measurements: int = 1,
    metric: str = "test_accuracy",
    moves: int = 0,
    checkpoint: Path | None = None,
    runner: Callable[..., Result] | None = None,
    **options: Any,
) -> Reported:
    """Try settings and step sizes on a validation part, and run the best on other seeds.

    The search is not accounted for in the guarantee: epsilon is one run's.

    While the best step size is the least or the largest that its setting was tried with, the next
    one is tried too: its quotient by that end is the one of both step sizes at that end.

    Args:
        trials: Settings of one method.
        fit: Trains on a part of the training records, and measures on the other.
        whole: Trains on all of them, and measures on test records.
        seeds: Of the runs that are reported.
        tuning_seeds: Of the trials; none of ``seeds``.
        measurements: How often the reported runs are measured.
        metric: What is compared: larger is better, but of a loss; a diverged run is the worst.
        moves: Most step sizes that are tried beyond those given.
        checkpoint: Folder for unfinished runs.
        runner: An experiment's own `Lab.run`; None is `dpjax.engine.run.run`.
        options: Of it.

    Returns:
        The trials, the best of them, and its runs. Of equals the first is taken.

    Raises:
        ValueError: For no trials, shared seeds, or another metric.
    """
    check_seeds(seeds, tuning_seeds)
    if not trials:
        raise ValueError("trials is empty; give at least one")
    measurements = _validate.integer("measurements", measurements)

    def at(name: str) -> Path | None:
        return None if checkpoint is None else checkpoint / name

    call = runner or run
    tuning: list[tuple[Trial, Result]] = []
    best = (-math.inf, 0, trials[0].steps[0])
    tried = [trial.steps for trial in trials]

    def attempt(index: int, steps: tuple[float, ...], name: str) -> None:
        nonlocal best
        trial = trials[index]._replace(steps=steps)
        plans = trial.plans(steps, len(fit.y))
        # Measured as often as what is reported: a checkpoint is written at a measurement alone.
        every = math.ceil(plans[0].config.rounds / measurements)
        result = call(
            plans, fit, seeds=tuning_seeds, eval_every=every, checkpoint=at(name), **options
        )
        _validate.one_of("metric", metric, result.metrics)
        tuning.append((trial, result))
        sign = -1.0 if metric.endswith("loss") else 1.0
        scores = sign * result.metrics[metric][-1].mean(axis=0)
        scores = np.nan_to_num(scores, nan=-np.inf, neginf=-np.inf)
        top = int(np.argmax(scores))
        if scores[top] > best[0]:
            best = (float(scores[top]), index, steps[top])

    for index, trial in enumerate(trials):
        attempt(index, trial.steps, f"tuning_{index}")
    for number in range(_validate.integer("moves", moves, least=0)):
        score, index, step = best
        beyond = _beyond(tried[index], step)
        if beyond is None or score == -math.inf:
            break
        tried[index] = (*tried[index], beyond)
        attempt(index, (beyond,), f"moved_{number}")
    _, index, step = best
    trial = trials[index]
    plans = trial.plans((step,), len(whole.y))
    every = math.ceil(plans[0].config.rounds / measurements)
    final = call(plans, whole, seeds=seeds, eval_every=every, checkpoint=at("final"), **options)
    return Reported(tuple(tuning), trial, step, final)


def _beyond(steps: Sequence[float], step: float) -> float | None:
    """The next step size beyond an end of those tried; None where ``step`` is no end of several."""
    ordered = sorted(set(steps))
    if len(ordered) == 1 or step not in (ordered[0], ordered[-1]):
        return None
    inner = ordered[1] if step == ordered[0] else ordered[-2]
    return step * (step / inner)
