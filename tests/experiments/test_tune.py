"""Trials on a validation part, then the best on other seeds."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest

from _common import tune
from dpjax.engine.run import run
from dpjax.learning.samplers import Random
from dpjax.plans import plan
from tests.support import make_config, make_problem


def plans(share, steps, count):
    """Plans without noise, of rounds that follow from the number of records."""
    configs = [
        make_config(
            design="non_private", relation="replace_record", step_size=step, sampler=Random(8),
            rounds=count // share,
        )
        for step in steps
    ]  # fmt: skip
    return [plan.make(config, np.eye(1)) for config in configs]


def trial(name, steps, share=4):
    return tune.Trial(name, steps, functools.partial(plans, share))


@functools.cache
def problems():
    return make_problem(1, records=40), make_problem(1, records=56)


@functools.cache
def found():
    trials = [trial("short", (0.3, 0.2), 40), trial("long", (0.1, 0.03))]
    return tune.reported(trials, *problems(), seeds=(0, 1), tuning_seeds=(7,), measurements=2)


@pytest.mark.slow
def test_best_trial_is_run_as_it_would_be_alone():
    best = found()
    scores = {
        (item.name, step): score
        for item, result in best.tuning
        for step, score in zip(item.steps, result.metrics["test_accuracy"][-1, 0], strict=True)
    }
    assert len(scores) == 4 and len(set(scores.values())) > 1
    assert max(scores, key=scores.get) == (best.trial.name, best.step_size)
    assert best.trial.name == "long"
    single = run(plans(4, (best.step_size,), 56), problems()[1], seeds=(0, 1), eval_every=7)
    for name, values in single.metrics.items():
        np.testing.assert_array_equal(best.final.metrics[name], values)


@pytest.mark.slow
def test_rows_have_every_trial_and_best_curve():
    rows = found().rows(lambda value, result: {"setting": value.name}, design="m")
    tried = [row for row in rows if row["phase"] == "tuning"]
    assert [(row["setting"], row["step_size"]) for row in tried] == [
        ("short", 0.3),
        ("short", 0.2),
        ("long", 0.1),
        ("long", 0.03),
    ]
    # A part of the records has fewer rounds than the whole.
    assert [(row["seed"], row["round"]) for row in tried] == [(7, 1), (7, 1), (7, 10), (7, 10)]
    final = [row for row in rows if row["phase"] == "final"]
    assert {(row["seed"], row["round"], row["rounds"]) for row in final} == {
        (seed, number, 14) for seed in (0, 1) for number in (7, 14)
    }
    assert {row["design"] for row in rows} == {"m"}


def test_run_that_diverged_is_never_best(monkeypatch):
    scores = {1e3: np.nan, 1.0: 0.2, 0.1: 0.3, 0.01: 0.3}

    def run(plans, problem, *, seeds, **options):
        steps = [item.config.optimizer.first for item in plans]
        values = np.array([[[scores[step] for step in steps]] * len(seeds)])
        metrics = {"test_accuracy": values, "test_loss": values}
        return SimpleNamespace(plans=plans, metrics=metrics, rounds=[1])

    monkeypatch.setattr(tune, "run", run)
    trials = [trial("first", (1e3, 1.0)), trial("second", (0.1,)), trial("third", (0.01,))]
    best = tune.reported(trials, *problems(), seeds=(0,), tuning_seeds=(7, 8))
    # Of two that are alike the first.
    assert (best.trial.name, best.step_size) == ("second", 0.1)
    lone = tune.reported(trials[:1], *problems(), seeds=(0,), tuning_seeds=(7,))
    assert lone.step_size == 1.0
    # The least loss, where losses are compared.
    few = tune.reported(trials, *problems(), seeds=(0,), tuning_seeds=(7,), metric="test_loss")
    assert few.step_size == 1.0
    # A search alone finds the same, and runs nothing else.
    search = tune.search(trials, problems()[0], tuning_seeds=(7, 8))
    assert (search.step_size, search.final) == (0.1, None)


@pytest.mark.parametrize(
    ("peak", "moves", "reached"),
    [
        (2.0, 3, [(4.0, 2.0, 1.0)]),
        (16.0, 3, [(4.0, 2.0, 1.0), (8.0,), (16.0,), (32.0,)]),
        (16.0, 1, [(4.0, 2.0, 1.0), (8.0,)]),
        (0.6, 3, [(4.0, 2.0, 1.0), (0.5,), (0.25,)]),
        (None, 3, [(4.0, 2.0, 1.0)]),
    ],
)
def test_steps_beyond_best_end_are_tried(monkeypatch, tmp_path, peak, moves, reached):
    """Scores fall with the distance from the peak; without one, every run diverged."""
    folders = []

    def run(plans, problem, *, seeds, checkpoint, **options):
        folders.append(checkpoint)
        steps = np.array([item.config.optimizer.first for item in plans])
        scores = np.full(len(steps), np.nan) if peak is None else -np.abs(np.log(steps / peak))
        values = np.tile(scores, (1, len(seeds), 1))
        return SimpleNamespace(plans=plans, metrics={"test_accuracy": values}, rounds=[1])

    monkeypatch.setattr(tune, "run", run)
    best = tune.reported(
        [trial("only", (4.0, 2.0, 1.0))], *problems(), seeds=(0,), tuning_seeds=(7,), moves=moves,
        checkpoint=tmp_path,
    )  # fmt: skip
    assert [value.steps for value, _ in best.tuning] == reached
    assert len(set(folders)) == len(folders) == len(reached) + 1
    tried = [step for steps in reached for step in steps]
    distance = {step: abs(np.log(step / (peak or step))) for step in tried}
    assert distance[best.step_size] == min(distance.values())
    with pytest.raises(ValueError, match="moves is -1"):
        tune.reported([trial("only", (1.0,))], *problems(), seeds=(0,), tuning_seeds=(7,), moves=-1)


def test_step_sizes_are_dealt_so_that_all_have_as_many_trials():
    for settings in (1, 2, 3):
        hands = tune.dealt((4.0, 2.0, 1.0, 0.5), settings)
        assert sorted(step for hand in hands for step in hand) == [0.5, 1.0, 2.0, 4.0]
        assert len(hands) == settings
    with pytest.raises(ValueError, match="steps has 1 entries for 2 settings"):
        tune.dealt((1.0,), 2)


@pytest.mark.slow
def test_what_is_no_search_is_refused():
    fit, complete = problems()
    settings = {"seeds": (0, 1), "tuning_seeds": (7,)}
    for trials, options, text in (
        ([], {}, "trials is empty"),
        ([trial("a", (1.0,))], {"tuning_seeds": (1, 7)}, r"tuning_seeds share \[1\]"),
        ([trial("a", (1.0,))], {"metric": "luck"}, "metric is 'luck'"),
        ([trial("a", (1.0,))], {"measurements": 0}, "measurements is 0"),
    ):
        with pytest.raises(ValueError, match=text):
            tune.reported(trials, fit, complete, **(settings | options))
