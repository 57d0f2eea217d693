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

__all__ = [
    "Reported",
    "Trial",
    "best_step",
    "check_seeds",
    "dealt",
    "grid",
    "reported",
    "search",
]


def grid(config: plan_.Config, steps: Sequence[float], mixing: Any) -> list[plan_.Plan]:
    """Plans of a config at every step size; its noise design is made once.

    Args:
        config: The config, whose optimizer has a step size.
        steps: Step sizes, above 0.
        mixing: [n, n] mixing matrix.

    Returns:
        Plans, step by step.
    """
    if not len(steps):
        raise ValueError("steps is empty; give at least one step size")
    plans: list[plan_.Plan] = []
    design = None
    for step in steps:
        optimizer = replace(config.optimizer, step_size=_validate.positive("steps", step))
        plan = plan_.make(replace(config, optimizer=optimizer), mixing, design=design)
        design = plan.design
        plans.append(plan)
    return plans


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
        final: Its runs on the whole; None after a search alone.
    """

    tuning: tuple[tuple[Trial, Result], ...]
    trial: Trial
    step_size: float
    final: Result | None = None

    def rows(
        self, describe: Callable[[Trial, Result], Mapping[str, Any]] | None = None, **extra: Any
    ) -> list[dict[str, Any]]:
        """Tidy rows of both phases: of tuning the last round's, of the best all that was measured.

        Args:
            describe: What rows say of a trial and its runs.
            extra: Columns of every row.

        Returns:
            Rows with ``phase`` "tuning" or "final", and with ``rounds`` those of the whole run.
        """
        rows = []
        for trial, result in self.tuning:
            columns = dict(describe(trial, result)) if describe else {}
            columns |= {"phase": "tuning", **extra}
            last = result.rounds[-1]
            rows += [row for row in result.rows(**columns) if row["round"] == last]
        if self.final is None:
            return rows
        columns = dict(describe(self.trial, self.final)) if describe else {}
        columns |= {"phase": "final", "rounds": self.final.plans[0].config.rounds, **extra}
        return rows + self.final.rows(**columns)


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


def search(
    trials: Sequence[Trial],
    fit: Problem,
    *,
    tuning_seeds: Sequence[int],
    measurements: int = 1,
    metric: str = "test_accuracy",
    moves: int = 0,
    checkpoint: Path | None = None,
    runner: Callable[..., Result] | None = None,
    **options: Any,
) -> Reported:
    """Try settings and step sizes on a validation part.

    The search is not accounted for in the guarantee: epsilon is one run's.

    While the best step size is the least or the largest that its setting was tried with, the next
    one is tried too: its quotient by that end is the one of both step sizes at that end.

    Args:
        trials: Settings of one method.
        fit: Trains on a part of the training records, and measures on the other.
        tuning_seeds: Of the trials.
        measurements: How often each run is measured.
        metric: What is compared: larger is better, but of a loss or a residual; a diverged run is
            the worst.
        moves: Most step sizes that are tried beyond those given.
        checkpoint: Folder for unfinished runs.
        runner: An experiment's own `Lab.run`; None is `dpjax.engine.run.run`.
        options: Of it.

    Returns:
        The trials and the best of them. Of equals the first is taken.

    Raises:
        ValueError: For no trials, or another metric.
    """
    if not trials:
        raise ValueError("trials is empty; give at least one")
    measurements = _validate.integer("measurements", measurements)
    moves = _validate.integer("moves", moves, minimum=0)
    tuning: list[tuple[Trial, Result]] = []
    best = (-math.inf, 0, trials[0].steps[0])
    tried = [trial.steps for trial in trials]

    def attempt(index: int, steps: tuple[float, ...], name: str) -> None:
        nonlocal best
        trial = trials[index]._replace(steps=steps)
        plans = trial.plans(steps, len(fit.y))
        # Measured as often as what is reported: a checkpoint is written at a measurement alone.
        interval = math.ceil(plans[0].config.rounds / measurements)
        folder = None if checkpoint is None else checkpoint / name
        result = (runner or run)(
            plans, fit, seeds=tuning_seeds, eval_every=interval, checkpoint=folder, **options
        )
        _validate.one_of("metric", metric, result.metrics)
        tuning.append((trial, result))
        sign = -1.0 if metric.endswith(("loss", "residual")) else 1.0
        scores = sign * result.metrics[metric][-1].mean(axis=0)
        scores = np.nan_to_num(scores, nan=-np.inf, neginf=-np.inf)
        top = int(np.argmax(scores))
        if scores[top] > best[0]:
            best = (float(scores[top]), index, steps[top])

    for index, trial in enumerate(trials):
        attempt(index, trial.steps, f"tuning_{index}")
    for number in range(moves):
        score, index, step = best
        beyond = _beyond(tried[index], step)
        if beyond is None or score == -math.inf:
            break
        tried[index] = (*tried[index], beyond)
        attempt(index, (beyond,), f"moved_{number}")
    _, index, step = best
    return Reported(tuple(tuning), trials[index], step)


def reported(
    trials: Sequence[Trial],
    fit: Problem,
    complete: Problem,
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
    """Try settings and step sizes as `search` does, and run the best on other seeds.

    Args:
        trials: Settings of one method.
        fit: As in `search`.
        complete: Trains on all training records, and measures on test records.
        seeds: Of the runs that are reported.
        tuning_seeds: Of the trials; none of ``seeds``.
        measurements: How often runs are measured.
        metric: As in `search`.
        moves: As in `search`.
        checkpoint: Folder for unfinished runs.
        runner: As in `search`.
        options: Of it.

    Returns:
        The trials, the best of them, and its runs.

    Raises:
        ValueError: For no trials, shared seeds, or another metric.
    """
    check_seeds(seeds, tuning_seeds)
    best = search(
        trials,
        fit,
        tuning_seeds=tuning_seeds,
        measurements=measurements,
        metric=metric,
        moves=moves,
        checkpoint=checkpoint,
        runner=runner,
        **options,
    )
    plans = best.trial.plans((best.step_size,), len(complete.y))
    interval = math.ceil(plans[0].config.rounds / measurements)
    folder = None if checkpoint is None else checkpoint / "final"
    final = (runner or run)(
        plans, complete, seeds=seeds, eval_every=interval, checkpoint=folder, **options
    )
    return best._replace(final=final)


def best_step(
    trials: Sequence[Trial],
    tasks: tuple[Problem, Problem],
    config: Any,
    lab: Any,
    folder: Path,
    **options: Any,
) -> Reported:
    """Choose setting and step size by the test loss, with seeds and runner of an experiment.

    Args:
        trials: Settings of one method.
        tasks: Problems to tune on and to report, as in `reported`.
        config: The experiment's, with ``seeds`` and ``tuning_seeds``.
        lab: The experiment's, whose `run` runs.
        folder: For unfinished runs.
        options: As in `reported`.
    """
    return reported(
        trials,
        *tasks,
        seeds=config.seeds,
        tuning_seeds=config.tuning_seeds,
        metric="test_loss",
        runner=lab.run,
        checkpoint=folder,
        **options,
    )


def _beyond(steps: Sequence[float], step: float) -> float | None:
    """The next step size beyond an end of those tried; None where ``step`` is no end of several."""
    ordered = sorted(set(steps))
    if len(ordered) == 1 or step not in (ordered[0], ordered[-1]):
        return None
    inner = ordered[1] if step == ordered[0] else ordered[-2]
    return step * (step / inner)
